"""Generators of training and evaluation text, one module per kind of task."""
