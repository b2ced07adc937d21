"""Scheduling of multimodal items with placeholder tokens: encoder budget and encoder cache."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterator

import msgspec
import numpy as np

from quire.engine.client.protocol import AudioItem, MediaItem, PictureItem
from quire.engine.scheduling.plan import EncodedItem, PlaceholderTokens, RotaryPositions, StepPlan

ItemKey = bytes


def pixels_of(item: PictureItem) -> int:
    """The number of pixels of all images of an item; of what a processor has made, that of the largest input."""
    return max((part.values.size for part in item.inputs), default=item.pixels.size) // 3


def _beside_pictures(item: MediaItem) -> MediaItem:
    """An item of a prompt with pictures: audio knows that they are there."""
    if isinstance(item, PictureItem) or item.beside_pictures:
        return item
    return msgspec.structs.replace(item, hash=item.hash + b"beside pictures", beside_pictures=True)


class PlaceholderRanges:
    """The items of one request, in the order of their spans."""

    def __init__(self, items: tuple[MediaItem, ...], prefix: bytes, *, marks_audio: bool = False) -> None:
        """Hold the items of a prompt.

        Args:
            items: the items.
            prefix: prefix of the keys of items; only requests with equal prefixes share an encoding.
            marks_audio: see `SchedulerLimits.marks_audio`.
        """
        self._marks_audio = marks_audio
        self._items: list[MediaItem] = []
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._prefix = prefix
        self.extend(items, 0)

    def extend(self, items: tuple[MediaItem, ...], offset: int) -> None:
        """Append items, whose spans count from `offset`."""
        for item in items:
            placed = msgspec.structs.replace(item, start=item.start + offset) if offset else item
            self._items.append(placed)
            self._starts.append(placed.start)
            self._ends.append(placed.start + placed.length)
        if self._marks_audio and any(isinstance(item, PictureItem) for item in self._items):
            self._items = [_beside_pictures(item) for item in self._items]

    def key(self, item: MediaItem) -> ItemKey:
        """The key of an item in the encoder cache."""
        return self._prefix + item.hash

    def all_keys(self) -> set[ItemKey]:
        """The keys of all items in the encoder cache."""
        return {self.key(item) for item in self._items}

    def within(self, start: int, end: int) -> list[MediaItem]:
        """The items that have tokens in [start, end)."""
        if not self._items:
            return []
        return self._items[bisect_right(self._ends, start) : bisect_left(self._starts, end)]

    def content(self, start: int, end: int) -> bytes:
        """The items in the tokens [start, end), as content for block hashes: their hashes and starts."""
        return b"".join(item.hash + (item.start - start).to_bytes(8, signed=True) for item in self.within(start, end))

    def extra_keys(self, start: int, end: int) -> list[tuple[str, int]]:
        """The same content for readers outside of the process."""
        return [(item.hash.hex(), item.start - start) for item in self.within(start, end)]

    def tokens(self, start: int, end: int) -> tuple[PlaceholderTokens, ...]:
        """The parts of items that the tokens [start, end) stand for."""
        return tuple(self._tokens(start, end))

    def _tokens(self, start: int, end: int) -> Iterator[PlaceholderTokens]:
        for item in self.within(start, end):
            first, last = max(start, item.start), min(end, item.start + item.length)
            yield PlaceholderTokens(self.key(item), first, first - item.start, last - first)

    def rotary_positions(self, length: int) -> RotaryPositions | None:
        """The rotary positions of a prompt of that length; None: those of its tokens in the sequence."""
        if not any(isinstance(item, PictureItem) and item.positions is not None for item in self._items):
            return None
        tokens = np.empty((3, length), np.int32)
        end = position = 0  # behind the item before, and the rotary position there
        for item in self._items:
            if isinstance(item, AudioItem):
                if item.ends_video:
                    behind = item.start + item.length + 1
                    tokens[:, end:behind] = np.arange(position, position + behind - end)
                    position += behind - end - 1
                    end = behind
                continue
            if item.positions is None:
                continue
            tokens[:, end : item.start] = np.arange(position, position + item.start - end)
            position += item.start - end
            end = item.start + item.length
            tokens[:, item.start : end] = item.positions + position
            position += item.length if item.advance is None else item.advance
        tokens[:, end:] = np.arange(position, position + length - end)
        return RotaryPositions(tokens, position + length - end)


class EncoderCache:
    """Decide which encoded items the runner keeps: the most recently used, up to a number of embeddings.

    An item stays until others need its place, so that the chunks of a prompt and further prompts find it. Those that a
    step reads are not evicted in that step. Nothing else is held, so a request never waits for another one's items.
    """

    def __init__(self, capacity: int, encoder_compute_budget: int, pixel_cost: float = 0.0) -> None:
        """Make an empty cache.

        Args:
            capacity: embeddings that are kept; at least those of the largest item.
            encoder_compute_budget, pixel_cost: see `SchedulerLimits`.
        """
        self._capacity = capacity
        self._encoder_compute_budget = encoder_compute_budget
        self._pixel_cost = pixel_cost
        self._lengths: OrderedDict[ItemKey, int] = OrderedDict()  # least recently used first
        self._held = 0
        self._left = 0  # of the budget, for this step
        self._read: set[ItemKey] = set()  # by this step
        self._dropped: list[ItemKey] = []  # since the step before

    def begin_step(self, plan: StepPlan) -> None:
        """Another step is planned."""
        self._left = self._encoder_compute_budget
        self._read.clear()
        plan.evicted.extend(self._dropped)
        self._dropped.clear()

    def readable(
        self,
        plan: StepPlan,
        spans: PlaceholderRanges,
        start: int,
        count: int,
        first: int,
        *,
        exceeds_budget: bool = False,
    ) -> int:
        """Schedule the encoding of items; returns how many of `count` tokens from `start` on the step can compute.

        Args:
            plan: the plan of the step.
            spans: the items of the request.
            start: computed tokens of the request.
            count: tokens that could be computed otherwise.
            first: computed tokens of the request when it entered the batch.
            exceeds_budget: there is room for all of the items, see `reads_all`.
        """
        for item in spans.within(start, start + count):
            key = spans.key(item)
            is_cached = key in self._lengths
            if not is_cached and not self._make_room(plan, item, exceeds_budget):
                return max(0, item.start - start)
            if not is_cached or item.start >= start or start == first:
                plan.stats.item_queries += 1
                plan.stats.item_hits += is_cached
            if not is_cached:
                self._lengths[key] = item.length
                self._held += item.length
                self._left -= self._cost(item)
                plan.encoded.append(EncodedItem(key, item))
            self._lengths.move_to_end(key)
            self._read.add(key)
        return count

    def reads_all(self, spans: PlaceholderRanges, start: int, end: int) -> bool:
        """Whether this step can read all items of the tokens [start, end), whichever of them are encoded.

        If the step encodes nothing else, they may cost more than its budget.
        """
        unread = {spans.key(item): item for item in spans.within(start, end)}
        unread = {key: item for key, item in unread.items() if key not in self._read}
        is_first = self._left == self._encoder_compute_budget
        if (
            not is_first
            and sum(self._cost(item) for key, item in unread.items() if key not in self._lengths) > self._left
        ):
            return False
        held = sum(self._lengths[key] for key in self._read)
        return held + sum(item.length for item in unread.values()) <= self._capacity

    def forget(self, key: ItemKey) -> None:
        """An item could not be encoded."""
        self._held -= self._lengths.pop(key, 0)

    def drop(self, spans: PlaceholderRanges) -> None:
        """The encoding of a request's items may be wrong: it is not used again."""
        for key in spans.all_keys():
            if key in self._lengths:
                self.forget(key)
                self._dropped.append(key)

    def clear(self) -> None:
        """No encoding is used again."""
        self._dropped += self._lengths
        self._lengths.clear()
        self._held = 0

    def check(self) -> None:
        """Assert that the number of embeddings is right."""
        assert self._held == sum(self._lengths.values()), "embeddings are counted wrongly"
        assert self._held <= self._capacity, "there are more embeddings than there is room for"

    def _cost(self, item: MediaItem) -> int:
        pixels = pixels_of(item) if isinstance(item, PictureItem) else 0
        return max(item.length, round(pixels * self._pixel_cost))

    def _make_room(self, plan: StepPlan, item: MediaItem, exceeds_budget: bool) -> bool:
        """Evict items until there is room for another one; False if this step must not encode it."""
        is_first = self._left == self._encoder_compute_budget
        if self._cost(item) > self._left and not is_first and not exceeds_budget:
            return False
        length = item.length
        read = sum(self._lengths[key] for key in self._read)
        if read + length > self._capacity:
            return False
        while self._held + length > self._capacity:
            key = next(key for key in self._lengths if key not in self._read)
            self.forget(key)
            plan.evicted.append(key)
        return True
