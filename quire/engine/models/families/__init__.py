"""Model families, a module for each family or for a few relatives: see `Family` in `engine/models/family.py`."""
