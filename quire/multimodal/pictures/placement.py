"""The placeholders of pictures in a tokenized prompt."""

from __future__ import annotations

from collections.abc import Sequence

from quire.engine.client.pictures import PictureInfo
from quire.engine.client.protocol import PictureItem
from quire.multimodal.pictures.reader import RequestPicture
from quire.multimodal.placement import Placeholders


def picture_placeholders(pictures: Sequence[RequestPicture], info: PictureInfo) -> Placeholders:
    """The placeholders of pictures whose layouts are in the text of a prompt: one for each row of an item."""
    repeats: list[int] = []
    items: list[tuple[int, PictureItem]] = []
    for picture in pictures:
        for item_layout, item in zip(picture.layout.items, picture.items, strict=True):
            items.append((len(repeats), item))
            repeats += [item_layout.row_length] * item_layout.rows
    return Placeholders(info.placeholder, info.token, "picture", repeats, items)
