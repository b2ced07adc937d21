"""The benchmarks of GPUs in miniature, on the CPU."""
