"""Tensors of checkpoints, as they become the weights of modules."""
