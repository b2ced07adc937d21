"""Prepared pictures, kept for requests that have the same ones."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Self

from quire.engine.client.protocol import EncoderInput, PixelArray
from quire.multimodal.errors import PromptError
from quire.multimodal.memory import MediaMemory, Reservation
from quire.multimodal.pictures.layout import PictureLayout

_MOST_NAMES = 1 << 14  # names of contents that are remembered
Key = tuple[bytes, bytes]  # hash of a file, and of everything else that its preparation depends on


@dataclass(frozen=True, slots=True)
class PreparedPicture:
    """A picture or video that is ready for requests.

    Attributes:
        layout: its layout.
        pixels: those of all of its items; none with `inputs`.
        inputs: those of its item, if transformers' processor has prepared it.
    """

    layout: PictureLayout
    pixels: PixelArray
    inputs: tuple[EncoderInput, ...] = ()


class RequestCache:
    """Keep pictures for the next prompts of a request, until its context ends or somebody needs their memory."""

    def __init__(self, memory: MediaMemory, tenant: str) -> None:
        """Begin with none. `memory`: what they are counted in; `tenant`: who sent the request."""
        self._memory = memory
        self._tenant = tenant
        self._reservation = Reservation(memory, tenant, 0)
        self._pictures: dict[Key, PreparedPicture] = {}

    def __enter__(self) -> Self:
        self._memory.add_spare(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._memory.remove_spare(self)
        self.forget()

    def find(self, key: Key) -> PreparedPicture | None:
        """The picture of a key, if it is kept."""
        return self._pictures.get(key)

    def keep(self, key: Key, picture: PreparedPicture) -> None:
        """Keep a picture, if nobody waits for its memory."""
        size = picture.layout.size
        if key not in self._pictures and self._memory.has_room(size, self._tenant):
            self._reservation.resize(self._reservation.size + size)
            self._pictures[key] = picture

    def forget(self) -> None:
        """Keep none of the pictures any longer."""
        self._pictures.clear()
        self._reservation.close()


class _GivenUp(Exception):
    """The caller that prepared the picture was cancelled, or refused for another reason than the picture."""


class PictureCache:
    """Keep pictures that were used last, within a number of bytes; one that is being prepared is prepared once.

    What is being prepared is in the memory that who prepares it has reserved. For one event loop.

    Attributes:
        size: bytes of the pictures that are kept.
    """

    def __init__(self, limit: int) -> None:
        """`limit`: bytes; 0: nothing is kept."""
        self.size = 0
        self._limit = limit
        self._pictures: OrderedDict[Key, PreparedPicture] = OrderedDict()
        self._under_way: dict[Key, asyncio.Future[PreparedPicture]] = {}
        self._names: OrderedDict[tuple[str, str], bytes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pictures)

    @property
    def under_way(self) -> int:
        """Number of pictures that are being prepared."""
        return len(self._under_way)

    def name(self, tenant: str, name: str, digest: bytes) -> None:
        """Remember the name that a tenant gives to a content. Names of other tenants are others."""
        self._names[tenant, name] = digest
        self._names.move_to_end((tenant, name))
        if len(self._names) > _MOST_NAMES:
            self._names.popitem(last=False)

    def named(self, tenant: str, name: str) -> bytes | None:
        """The hash of the content that the tenant has named so; None if that is not known."""
        return self._names.get((tenant, name))

    def find(self, key: Key) -> PreparedPicture | None:
        """A picture that is kept, and was used now."""
        picture = self._pictures.get(key)
        if picture is not None:
            self._pictures.move_to_end(key)
        return picture

    async def get(self, key: Key, make: Callable[[], Awaitable[PreparedPicture]]) -> tuple[PreparedPicture, bool]:
        """The picture of a key, and whether it was kept or prepared by another caller meanwhile.

        A caller that prepares pictures must have reserved the memory for it, as others may wait for it that have.

        Raises:
            PromptError: the picture cannot be prepared.
        """
        while True:
            picture = self.find(key)
            if picture is not None:
                return picture, True
            under_way = self._under_way.get(key)
            if under_way is None:
                return await self._made(key, make), False
            try:
                return await asyncio.shield(under_way), True
            except _GivenUp:
                continue

    async def _made(self, key: Key, make: Callable[[], Awaitable[PreparedPicture]]) -> PreparedPicture:
        done: asyncio.Future[PreparedPicture] = asyncio.get_running_loop().create_future()
        done.add_done_callback(asyncio.Future.exception)  # nobody may wait for it
        self._under_way[key] = done
        try:
            picture = await make()
        except BaseException as error:
            del self._under_way[key]
            same_for_all = isinstance(error, PromptError)
            done.set_exception(PromptError(str(error), "") if same_for_all else _GivenUp())
            raise
        del self._under_way[key]
        done.set_result(picture)
        self._keep(key, picture)
        return picture

    def _keep(self, key: Key, picture: PreparedPicture) -> None:
        size = picture.layout.size
        if size > self._limit:
            return
        while self.size + size > self._limit:
            _, oldest = self._pictures.popitem(last=False)
            self.size -= oldest.layout.size
        self._pictures[key] = picture
        self.size += size

    def clear(self) -> None:
        """Forget everything."""
        self._pictures.clear()
        self._names.clear()
        self.size = 0

    def check(self) -> None:
        """Assert that the state is consistent."""
        assert self.size == sum(picture.layout.size for picture in self._pictures.values()) <= self._limit
        assert len(self._names) <= _MOST_NAMES
