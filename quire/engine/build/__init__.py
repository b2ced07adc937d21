"""Builds an engine around a model: executors, ranks, the size of the KV cache, warm-up."""
