"""Benchmarks of kernels and engine steps on the CPU, relative to the limits of the hardware."""
