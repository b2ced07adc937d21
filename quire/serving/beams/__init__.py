"""Beam search over the engine."""
