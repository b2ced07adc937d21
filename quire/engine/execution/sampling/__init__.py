"""Sampling: logits processors change the logits of rows that use them, then a token is chosen."""
