"""POST /v1/completions and /inference/v1/generate."""
