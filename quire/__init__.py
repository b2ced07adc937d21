"""Quire: an inference server for language models. A quire is a gathering of pages; the KV cache is paged."""

__version__ = "0.1.0"
