"""Gate: whether steps run, and the requests that wait until they may begin."""

from __future__ import annotations

from collections.abc import Collection

from quire.engine.client.protocol import AddRequest, AudioItem, ExtendRequest, MediaItem

_MOST_BYTES = 64 << 20  # of what is appended to held requests


class Gate:
    """Hold requests that arrive while those before them end, because the engine is to pause then.

    Once it pauses, requests are held no longer: they wait in the scheduler's queue, as no step is run.

    Attributes:
        is_closed: no step is run, unless the engine drains.
        waiting: serials of the commands that are answered when all requests before them have ended. While there are
            any, the engine drains.
    """

    def __init__(self) -> None:
        self.is_closed = False
        self.waiting: list[int] = []
        self._held: dict[str, list[AddRequest | ExtendRequest]] = {}  # by id: a request, and what is appended to it
        self._appended = 0  # bytes

    @property
    def lets_steps_run(self) -> bool:
        """Whether steps may be run."""
        return not self.is_closed or self.drains

    @property
    def drains(self) -> bool:
        """Whether requests that have arrived end, and later ones are held."""
        return bool(self.waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._held

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, message: AddRequest) -> None:
        """Hold a request."""
        self._held[message.request_id] = [message]

    def hold_extension(self, message: ExtendRequest) -> bool:
        """Hold what is appended to a held request; returns whether there was room for it."""
        size = _size(message)
        if self._appended + size > _MOST_BYTES:
            self.drop([message.request_id])
            return False
        self._appended += size
        self._held[message.request_id].append(message)
        return True

    def drop(self, request_ids: Collection[str]) -> None:
        """Forget held requests; unknown ids are ignored."""
        for request_id in request_ids:
            self._appended -= sum(map(_size, self._held.pop(request_id, ())))

    def end_drain(self) -> tuple[list[int], list[AddRequest | ExtendRequest]]:
        """Return the serials of the commands that waited, and what was held, in order of the requests."""
        ended = self.waiting, [message for messages in self._held.values() for message in messages]
        self.waiting, self._held, self._appended = [], {}, 0
        return ended


def _size(message: AddRequest | ExtendRequest) -> int:
    """Bytes that count against the bound: a request itself has been admitted."""
    if isinstance(message, AddRequest):
        return 0
    return message.tokens.nbytes + sum(map(_bytes_of, message.items))


def _bytes_of(item: MediaItem) -> int:
    if isinstance(item, AudioItem):
        return item.features.nbytes
    return item.pixels.nbytes + sum(part.values.nbytes for part in item.inputs)
