"""A consumer of KV events that knows nothing of Quire's code: it restates what routers do with a stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import msgspec
import zmq

from tests.support.patience import PATIENCE

END = b"\xff" * 8
_STORED = (
    *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys"),
    *("group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"),
)
_FIELDS = {
    "BlockStored": _STORED,
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}
Event = dict[str, Any]


def decode_batch(payload: bytes) -> tuple[float, list[Event], int | None]:
    """The time, events and rank of a batch; events in both encodings become dicts, with None for absent fields."""
    content = msgspec.msgpack.decode(payload)
    assert isinstance(content, list)
    time, events, *ranks = content
    return time, [_event(event) for event in events], ranks[0] if ranks else None


def _event(content: Any) -> Event:
    if isinstance(content, list):
        name, *values = content
        known = dict(zip(_FIELDS[name], values, strict=False))
    else:
        assert isinstance(content, dict)
        known = content
        name = known["type"]
    return {"type": name, **{key: known.get(key) for key in _FIELDS[name]}}


def hash_of(value: int | bytes) -> int:
    """A hash as 64 bits, from the number or the last eight bytes."""
    return int.from_bytes(value[-8:]) if isinstance(value, bytes) else value & (1 << 64) - 1


@dataclass(frozen=True)
class IndexedBlock:
    """What is known of a block: all tokens up to its end, and the extra keys of each of these blocks.

    Attributes:
        orphan: the hash of a first block whose parent was never stored, so that only tokens behind it are known.
    """

    tokens: tuple[int, ...]
    extra_keys: tuple[Any, ...]
    orphan: int | None = None


@dataclass
class BlockIndex:
    """The blocks of one server, by hash and group, as its events tell.

    Attributes:
        known: all blocks that were ever stored: a later one may follow one that was removed.
        windows: by group, how its layers attend, and to how many tokens.
    """

    present: dict[tuple[int, int], IndexedBlock] = field(default_factory=dict)
    known: dict[int, IndexedBlock] = field(default_factory=dict)
    kinds: dict[int, tuple[str, int | None]] = field(default_factory=dict)

    def apply(self, event: Event) -> None:
        """Apply an event, which must make sense after those before it."""
        match event["type"]:
            case "BlockStored":
                self._store(event)
            case "BlockRemoved":
                assert event["medium"] == "GPU"
                for block in event["block_hashes"]:
                    del self.present[hash_of(block), event["group_idx"]]
            case "AllBlocksCleared":
                self.present.clear()

    def _store(self, event: Event) -> None:
        size, tokens, hashes = event["block_size"], event["token_ids"], event["block_hashes"]
        extra_keys = event["extra_keys"]
        assert event["medium"] == "GPU"
        assert len(tokens) == size * len(hashes)
        assert len(extra_keys) == len(hashes)
        self.kinds[event["group_idx"]] = event["kv_cache_spec_kind"], event["kv_cache_spec_sliding_window"]
        parent = event["parent_block_hash"]
        before = IndexedBlock((), ())
        if parent is not None:
            before = self.known.get(hash_of(parent)) or IndexedBlock((), (), hash_of(parent))
        for index, key in enumerate(map(hash_of, hashes)):
            keys = extra_keys[index]
            assert keys is None or len(keys) > 0
            content = tuple(tokens[index * size : (index + 1) * size])
            extra = (*before.extra_keys, keys and tuple(map(_hashable, keys)))
            before = IndexedBlock(before.tokens + content, extra, before.orphan)
            known = self.known.get(key)
            if known is None or known.orphan is not None:
                self.known[key] = before
            assert before.orphan is not None or self.known[key] == before, "two contents have the same hash"
            assert (key, event["group_idx"]) not in self.present, "a block was stored twice"
            self.present[key, event["group_idx"]] = before


def _hashable(key: Any) -> Any:
    return tuple(key) if isinstance(key, list) else key


class Subscriber:
    """Subscribe to the events of a server, and ask for those that were missed."""

    def __init__(self, endpoint: str, replay_endpoint: str | None = None, topic: bytes = b"") -> None:
        self._context = zmq.Context()
        self._sub: zmq.Socket[bytes] = self._context.socket(zmq.SUB)
        self._sub.setsockopt(zmq.RCVTIMEO, int(PATIENCE * 1000))
        self._sub.setsockopt(zmq.SUBSCRIBE, topic)
        self._sub.connect(endpoint)
        self._replay_endpoint = replay_endpoint

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._context.destroy(linger=0)

    def join(self, publish: Callable[[], None]) -> None:
        """Publish until a message arrives: a subscriber gets those from some time after its connection on."""
        while not self._sub.poll(5):
            publish()

    def receive(self) -> tuple[bytes, int, bytes]:
        """The topic, sequence number and payload of the next message."""
        topic, sequence, payload = self._sub.recv_multipart()
        assert len(sequence) == 8
        return topic, int.from_bytes(sequence), payload

    def missed(self, start: int) -> list[tuple[int, bytes]]:
        """The sequence numbers and batches that the server sends again, from a number on."""
        return [(int.from_bytes(sequence), payload) for _, sequence, payload in self._replay(start)]

    def replayed(self) -> list[tuple[bytes, bytes]]:
        """The topics and batches of all that the server still has."""
        return [(topic, payload) for topic, _, payload in self._replay(0)]

    def _replay(self, start: int) -> list[tuple[bytes, bytes, bytes]]:
        assert self._replay_endpoint is not None
        dealer: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.RCVTIMEO, int(PATIENCE * 1000))
        dealer.connect(self._replay_endpoint)
        dealer.send_multipart((b"", start.to_bytes(8)))
        messages: list[tuple[bytes, bytes, bytes]] = []
        while True:
            empty, topic, sequence, payload = dealer.recv_multipart()
            assert empty == b""
            if sequence == END:
                assert payload == b""
                dealer.close()
                return messages
            messages.append((topic, sequence, payload))


@dataclass
class Follower:
    """Keep an index up to date from a stream that has gaps.

    Attributes:
        replay: returns batches from a sequence number on.
        next: the sequence number that is expected.
    """

    replay: Callable[[int], Sequence[tuple[int, bytes]]]
    index: BlockIndex = field(default_factory=BlockIndex)
    next: int = 0

    def take(self, sequence: int, payload: bytes) -> None:
        """Apply a batch; what was missed before it is asked for."""
        if sequence > self.next:
            for missed, content in self.replay(self.next):
                self._apply(missed, content)
        self._apply(sequence, payload)

    def _apply(self, sequence: int, payload: bytes) -> None:
        if sequence < self.next:
            return  # it came with a replay before
        assert sequence == self.next, "the replay has a gap"
        self.next = sequence + 1
        for event in decode_batch(payload)[1]:
            self.index.apply(event)
