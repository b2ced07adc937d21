"""StateSnapshots: when the states of sequences are saved, and which requests begin with saved ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from quire.engine.client.protocol import LostReason, StepStats
from quire.engine.client.sampling_params import SamplingParams
from quire.engine.scheduling.request import BlockHash, Hasher, Request
from quire.engine.scheduling.seen_prefixes import Chats, SeenPrefixes
from quire.engine.scheduling.snapshot_borders import choose_borders, is_growing, message_ends
from quire.engine.scheduling.snapshot_index import SnapshotIndex


@dataclass(frozen=True, slots=True)
class SnapshotStore:
    """The memory for snapshots.

    Attributes:
        places: how many there are.
        nbytes: bytes of each, on all ranks.
        answer_blocks: blocks between two snapshots of an answer that is being generated.
    """

    places: int
    nbytes: int
    answer_blocks: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class PlannedSnapshot:
    """States that a step in flight saves.

    Attributes:
        root: the root hash of the request when that was planned.
        replaces: it is of an answer, and the next one of the same answer takes its place.
    """

    request: Request
    root: BlockHash
    blocks: int
    place: int
    replaces: bool


@dataclass(slots=True)
class _Borders:
    """Where the states of a request are saved, if it begins as it was looked at.

    Attributes:
        coming: hashes of the blocks before those positions behind which they will be, while it is in the batch.
    """

    root: BlockHash
    length: int
    computed: int
    positions: list[int]
    coming: dict[int, BlockHash] = field(default_factory=dict)


@dataclass(slots=True)
class _Counts:
    """What has happened since the last step."""

    lost: dict[LostReason, int] = field(default_factory=dict)
    hits: int = 0
    saved: int = 0
    evicted: int = 0


class StateSnapshots:
    """Plan the snapshots of states: at borders of blocks, at which a step has to end.

    A snapshot counts once the step that takes it has ended. A step that begins a sequence with one copies it before
    it computes anything, and saves others after that: so the place of one that is used may be given to another at once.
    """

    def __init__(self, store: SnapshotStore, block_size: int, hasher: Hasher) -> None:
        self._store = store
        self._size = block_size
        self._hasher = hasher
        self._index = SnapshotIndex(store.places, block_size)
        self._seen = SeenPrefixes()
        self._chats = Chats(hasher)
        self._planned: list[PlannedSnapshot] = []  # by the step that is being planned
        self._in_flight: list[PlannedSnapshot] = []
        self._borders: dict[str, _Borders] = {}  # of requests in the batch, and of the first that waits
        self._coming: Counter[BlockHash] = Counter()  # snapshots that requests in the batch will take of their prompts
        self._last: dict[str, BlockHash] = {}  # the snapshot of each answer that is being generated
        self._counts = _Counts()

    def counts(self, hashes: Sequence[BlockHash]) -> Iterator[int]:
        """Yield the numbers of blocks behind which a request can begin, the largest first."""
        return self._index.counts(hashes)

    def prepare(self, request: Request, computed: int) -> None:
        """Choose where the states of a request are saved that is about to enter the batch.

        `computed`: its tokens that are cached.
        """
        length = len(request.tokens) - request.held_back
        known = self._borders.get(request.id)
        if known is not None and (known.root, known.length, known.computed) == (request.root_hash, length, computed):
            return
        positions: list[int] = []
        if request.bidirectional is None:
            hashes = request.block_hashes(self._size, self._hasher)
            parted = self._seen.longest(hashes) * self._size
            ends = _message_ends(request, length)
            parting = [position for position in (parted, request.next_turn) if position > computed]
            positions = choose_borders(length, computed, self._size, ends, parting)
        self._borders[request.id] = _Borders(request.root_hash, length, computed, positions)

    def is_awaited(self, request: Request) -> bool:
        """Return whether a request that had to wait for states of another still has to."""
        return request.awaited is not None and request.awaited in self._coming

    def is_coming(self, request: Request, computed: int) -> bool:
        """Return whether a request in the batch will soon save states with which a waiting one could begin.

        A request waits for one snapshot, the longest: not for those of requests that have passed it meanwhile.

        Args:
            request: waits.
            computed: tokens behind which it can begin now.
        """
        if not self._coming or request.awaited is not None:
            return self.is_awaited(request)
        longest = request.max_cached_tokens // self._size
        hashes = request.block_hashes(self._size, self._hasher)[computed // self._size : longest]
        request.awaited = next((key for key in reversed(hashes) if key in self._coming), None)
        return request.awaited is not None

    def enter(self, request: Request, blocks: int, *, is_first: bool, was_cached: int) -> int | None:
        """Return the place of the states that a request begins with; None: it begins with its first token.

        Args:
            request: enters the batch.
            blocks: those that it begins behind.
            is_first: for the first time; else it was preempted.
            was_cached: how many of its first blocks are in memory.
        """
        hashes = request.block_hashes(self._size, self._hasher)
        if is_first:
            self._count_lost(request, hashes, blocks, was_cached)
        self._seen.add(hashes)
        self._last.pop(request.id, None)
        request.awaited = None
        if (borders := self._borders.get(request.id)) is not None and request.is_shared:
            borders.coming = {position: hashes[position // self._size - 1] for position in borders.positions}
            self._coming.update(borders.coming.values())
        if not blocks:
            return None
        self._counts.hits += is_first
        return self._index.use(hashes[blocks - 1])

    def _count_lost(self, request: Request, hashes: list[BlockHash], blocks: int, was_cached: int) -> None:
        """Count the tokens that were computed before, and have to be computed again."""
        lost, seen = self._counts.lost, min(self._seen.longest(hashes), request.max_cached_tokens // self._size)
        if seen > blocks:
            is_evicted = was_cached < seen or self._seen.had_snapshot(hashes[blocks:seen])
            reason: LostReason = "evicted" if is_evicted else "no_snapshot"
            lost[reason] = lost.get(reason, 0) + (seen - blocks) * self._size
        ends = _message_ends(request, request.prompt_len)
        changed = self._chats.compare(request.root_hash, request.tokens[: request.prompt_len].tobytes(), ends)
        if changed:
            lost["template_changed"] = lost.get("template_changed", 0) + changed

    def cut(self, request: Request, start: int, count: int) -> int:
        """Return as many of `count` tokens from `start` on as there are before the next border."""
        if (borders := self._borders.get(request.id)) is None:
            return count
        position = next((position for position in borders.positions if position > start), start + count)
        return min(count, position - start)

    def room_for_draft(self, end: int, room: int) -> int:
        """Return the longest draft behind position `end` of an answer: a step is to end where its states are saved."""
        distance = self._size * self._store.answer_blocks
        return min(room, distance - end % distance - 1) if end % distance else 0

    def plan(self, request: Request, end: int) -> int | None:
        """Return the place for the states of a request behind position `end`, where a step ends; None: not saved."""
        if end % self._size or not end or not request.is_shared:
            return None
        borders, blocks = self._borders.get(request.id), end // self._size
        is_border = borders is not None and end in borders.positions
        is_answer = end > request.prompt_len and blocks % self._store.answer_blocks == 0
        if not is_border and not is_answer:
            return None
        if end <= len(request.tokens):
            key = request.block_hashes(self._size, self._hasher)[blocks - 1]
            if key in self._index:
                self._index.keep(key)
                self._has_come(request, end)
                return None
        replaces = is_answer and not is_growing(end, self._size)
        if is_answer and (last := self._last.pop(request.id, None)) is not None:
            self._index.replace(last, request.id)
        place = self._index.take_place()
        self._note_evicted()
        if place is None:
            self._has_come(request, end)
        else:
            self._planned.append(PlannedSnapshot(request, request.root_hash, blocks, place, replaces))
        return place

    def _has_come(self, request: Request, position: int) -> None:
        """Note that a request has saved its states behind a position, or will not."""
        if (borders := self._borders.get(request.id)) is not None:
            self._forget_coming(borders, [position])

    def _forget_coming(self, borders: _Borders, positions: Iterable[int]) -> None:
        for position in positions:
            if (key := borders.coming.pop(position, None)) is not None:
                self._coming[key] -= 1
                if not self._coming[key]:
                    del self._coming[key]

    def _note_evicted(self) -> None:
        if self._index.evicted:
            self._counts.evicted += len(self._index.evicted)
            self._seen.evicted(self._index.evicted)
            self._index.evicted = []

    def take_planned(self) -> list[PlannedSnapshot]:
        """Return the snapshots that were planned since the last call: those that a step takes."""
        planned, self._planned = self._planned, []
        self._in_flight += planned
        return planned

    def finish(self, planned: Sequence[PlannedSnapshot], failed: Collection[str]) -> None:
        """Register the snapshots of a step that has ended. `failed`: requests whose states are not to be trusted."""
        for snapshot in planned:
            self._in_flight.remove(snapshot)
            request, size = snapshot.request, self._size
            self._has_come(request, snapshot.blocks * size)
            is_known = snapshot.root == request.root_hash and len(request.tokens) >= snapshot.blocks * size
            if request.id in failed or not is_known:
                self._index.give_back(snapshot.place)
                continue
            hashes = request.block_hashes(size, self._hasher)[: snapshot.blocks]
            self._seen.add(hashes[request.prompt_len // size :])
            self._index.add(snapshot.place, hashes, request.id if snapshot.replaces else "")
            self._counts.saved += 1
            if snapshot.replaces and request.in_batch:
                self._last[request.id] = hashes[-1]

    def evict(self, request: Request, start: int) -> None:
        """Let other requests not begin with the states of a request behind positions after `start`."""
        for key in request.hashes[start // self._size :]:
            self._index.drop(key)

    def leave(self, request: Request) -> None:
        """Note that a request leaves the batch: the last snapshot of its answer stays."""
        if (borders := self._borders.pop(request.id, None)) is not None:
            self._forget_coming(borders, [*borders.coming])
        self._last.pop(request.id, None)

    def clear(self) -> None:
        """Forget all snapshots. No step is in flight."""
        self._index.clear()
        self._seen.clear()
        self._last.clear()
        self._coming.clear()
        self._borders.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of the snapshots."""
        return len(self._index) * self._store.nbytes

    def report(self, stats: StepStats) -> None:
        """Put what has happened since the last report into the statistics of a step."""
        counts, self._counts = self._counts, _Counts()
        stats.lost_tokens, stats.snapshot_hits = counts.lost, counts.hits
        stats.snapshots_saved, stats.snapshots_evicted = counts.saved, counts.evicted

    def check(self, running: Collection[str]) -> None:
        """Assert that no place is lost. `running`: ids of the requests in the batch."""
        self._index.check([snapshot.place for snapshot in (*self._planned, *self._in_flight)])
        assert self._last.keys() <= set(running), "a request that has ended replaces snapshots"
        coming = Counter(key for borders in self._borders.values() for key in borders.coming.values())
        assert coming == self._coming, "snapshots are waited for that do not come"
        assert all(not borders.coming or name in running for name, borders in self._borders.items())


def _message_ends(request: Request, length: int) -> list[int]:
    """Return the positions behind the messages of a prompt."""
    params = request.params
    if not isinstance(params, SamplingParams):
        return []
    if request.message_ends is not None:
        return _behind_end_tokens(request, length)
    return message_ends(np.frombuffer(request.tokens, np.int32)[:length].copy(), params.eos_token_ids)


def _behind_end_tokens(request: Request, length: int) -> list[int]:
    """Return the positions that the renderer has named, behind the token that ends the message if one follows."""
    tokens, end_tokens = request.tokens, request.sampling_params.eos_token_ids
    return [end + (end < length and tokens[end] in end_tokens) for end in request.message_ends or () if end <= length]
