"""The part of a model that one rank has, and its weights."""
