"""Errors in loading a model.

ModelError
├── BrokenFolder          files are missing or unreadable
├── UnavailableDevice     the device that is to run the model is not available
├── UnavailableLibrary    a package that an option needs cannot be imported
├── UnknownArchitecture   no implementation supports this kind of model
├── UnsupportedModel      the architecture is supported, but not this variant (quantization, option)
│   └── UnsupportedOption  Quire's own implementation lacks an option, which that of transformers may have
└── WeightMismatch        a weight is missing, unexpected or of the wrong shape
"""

from __future__ import annotations


class ModelError(Exception):
    """Base class of the errors in loading a model."""


class BrokenFolder(ModelError):
    """The folder does not contain a readable model."""


class UnavailableDevice(ModelError):
    """The device that is to run the model is not available."""


class UnavailableLibrary(ModelError):
    """A package that an option needs cannot be imported."""


class UnknownArchitecture(ModelError):
    """Neither Quire's decoder nor transformers supports this kind of model."""


class UnsupportedModel(ModelError):
    """This variant of a supported architecture is not supported."""


class UnsupportedOption(UnsupportedModel):
    """Quire's own implementation lacks an option of the architecture, which that of transformers may have."""


class WeightMismatch(ModelError):
    """The checkpoint's weights do not match the model's parameters."""
