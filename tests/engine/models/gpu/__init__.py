"""Models with the Triton kernels."""
