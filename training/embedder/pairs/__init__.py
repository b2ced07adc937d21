"""Generators of pairs of texts that mean the same or belong together, one module for each kind of text."""
