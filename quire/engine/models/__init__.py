"""Models: an architecture is a value (`spec`) that one decoder runs; `transformers_model` runs all others."""
