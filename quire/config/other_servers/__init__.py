"""Flags of other servers: vLLM's are understood, others are named in errors and in the documentation."""
