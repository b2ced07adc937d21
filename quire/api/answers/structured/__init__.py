"""Holding answers to JSON schemas, regular expressions, choices, grammars and structural tags."""
