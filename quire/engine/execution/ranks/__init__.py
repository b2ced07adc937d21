"""Ranks: processes that run parts of one model, and follow the core's plans."""
