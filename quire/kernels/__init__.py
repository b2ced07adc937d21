"""Ops, one per file: a torch reference, the call of the compiled kernel, and a function that chooses between them."""
