"""Attention backends: `plan` a step once, then let every layer write its keys and values and attend."""
