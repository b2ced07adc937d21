"""Parallelism: which part of a decoder each rank has, and how ranks exchange tensors."""
