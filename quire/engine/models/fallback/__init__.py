"""Models that transformers' own code runs, in our engine."""

from quire.engine.models.torch_import import import_shapes

import_shapes()
