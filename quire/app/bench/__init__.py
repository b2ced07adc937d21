"""`quire bench`: a load generator for OpenAI-compatible servers, and a benchmark of the start-up of `quire serve`."""
