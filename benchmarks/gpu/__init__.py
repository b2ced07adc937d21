"""Benchmarks on one GPU: engine steps and kernels, relative to the limits of the hardware. See README.md here."""
