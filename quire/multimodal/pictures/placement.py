"""The placeholders of pictures and videos in a tokenized prompt."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from quire.engine.client.protocol import PictureItem
from quire.multimodal.pictures.reader import RequestPicture
from quire.multimodal.placement import Placeholders


def picture_placeholders(pictures: Sequence[RequestPicture]) -> list[Placeholders]:
    """The placeholders of pictures and videos whose layouts are in the text of a prompt: one for each row of an item.

    Those of videos may have a token of their own. Those with the same token have the order of `pictures`.
    """
    infos = {picture.info.placeholder: picture.info for picture in pictures}
    return [_placeholders([picture for picture in pictures if picture.info.placeholder == token]) for token in infos]


def _placeholders(pictures: Sequence[RequestPicture]) -> Placeholders:
    repeats: list[int] = []
    items: list[tuple[int, PictureItem]] = []
    for item_layout, item in chain.from_iterable(
        zip(picture.layout.items, picture.items, strict=True) for picture in pictures
    ):
        items.append((len(repeats), item))
        repeats += [item_layout.row_length] * item_layout.rows
    info = pictures[0].info
    return Placeholders(info.placeholder, info.token, "picture or video", repeats, items)
