"""Triton kernels for GPUs, one op a file. Each is the twin of a torch reference in ``quire.kernels``.

An op of ``quire.kernels`` imports its twin where it calls it: triton is not installed for CPUs.
"""
