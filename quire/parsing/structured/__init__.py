"""Structured outputs: grammars for JSON schemas, regular expressions, choices, Lark grammars and structural tags."""
