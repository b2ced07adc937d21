"""Whole models, made of layers: decoders, encoders, transducers."""
