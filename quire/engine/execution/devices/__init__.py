"""Devices: where a model runs, and the parts of the runner that differ between them."""
