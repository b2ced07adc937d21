"""SavedWeight: a packed weight as tensors and facts, so that it can be written to a file and read again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class SavedWeight:
    """What a packed weight is made of.

    Attributes:
        kind: of the packed weight; see `SAVED_KINDS`.
        facts: values of JSON.
        tensors: by name.
    """

    kind: str
    facts: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
