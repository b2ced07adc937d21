"""Sampling: stages change the logits, then a token is chosen. A stage costs nothing for rows that do not use it."""
