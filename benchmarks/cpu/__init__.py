"""What the kernels and steps reach on this CPU, beside what the machine can do at most."""
