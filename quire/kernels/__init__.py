"""Ops, and what they share.

An op is a file: a torch reference, the calls of the compiled kernel (`csrc/ops`) and of the Triton kernel (`triton`),
and a function that chooses among them. The other files are the compiled extension (`native.py`), captured calls
(`capture.py`), packed weights (`panels.py`, `quantized.py`, `gpu_weights.py`), and values that several ops take.
"""
