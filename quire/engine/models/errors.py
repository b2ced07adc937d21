"""Why a model cannot be loaded.

ModelError
├── BrokenFolder          files are missing or cannot be read
├── UnknownArchitecture   nothing here runs such a model
├── UnsupportedModel      the architecture is known, but not this variant (quantisation, option)
└── WeightMismatch        a weight is missing, extra or of the wrong shape
"""

from __future__ import annotations


class ModelError(Exception):
    """Base of the errors in loading a model."""


class BrokenFolder(ModelError):
    """The folder does not hold a readable model."""


class UnknownArchitecture(ModelError):
    """No decoder spec and no fallback for this kind of model."""


class UnsupportedModel(ModelError):
    """A variant of a known architecture that cannot be run."""


class WeightMismatch(ModelError):
    """The checkpoint's weights do not fit the model."""
