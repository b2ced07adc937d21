"""SpecPart: what a part of a spec says about its fields to those that check specs."""

from __future__ import annotations

from typing import ClassVar


class SpecPart:
    """The base of the values of which a spec consists.

    Attributes:
        positive: names of the fields that must be above 0.
        activations: names of the fields that name an activation.
    """

    positive: ClassVar[tuple[str, ...]] = ()
    activations: ClassVar[tuple[str, ...]] = ()
