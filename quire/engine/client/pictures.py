"""Facts about a vision language model, for the front end."""

from __future__ import annotations

import msgspec


class FixedSize(msgspec.Struct, frozen=True, kw_only=True, tag="fixed"):
    """Every picture becomes one image of a size, whatever its own is.

    Attributes:
        height, width: of the image.
        tokens: placeholder tokens of it.
    """

    height: int
    width: int
    tokens: int


Geometry = FixedSize  # how a picture is resized and divided, and which tokens stand for it


class PictureInfo(msgspec.Struct, frozen=True, kw_only=True):
    """How pictures become items of a vision language model, with placeholder tokens in its prompts.

    Attributes:
        placeholder: the token that stands for each embedding.
        placeholder_text: text that stands for a whole picture in a rendered chat; the front end replaces it by the text
            of the picture's layout.
        geometry: how a picture is resized and divided, and which tokens stand for it.
        item_tokens: most tokens of an item: as many as the engine has room for, which sets it.
    """

    placeholder: int
    placeholder_text: str
    geometry: Geometry
    item_tokens: int = 0
