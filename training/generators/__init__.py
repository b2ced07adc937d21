"""Generators of training and evaluation text, one module a kind of task."""
