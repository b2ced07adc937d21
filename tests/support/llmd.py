"""The rules by which llm-d's endpoint picker reads a server: metrics, block keys and the index, restated."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.support.kv_events import decode_batch, hash_of

_SPEC = re.compile(r"\s*([a-zA-Z_:][\w:]*)\s*(?:\{([^}]*)\})?\s*")
_INDEXED_KINDS = {"full_attention", "mla_attention", "sink_full_attention"}
_MASK = (1 << 64) - 1


def metric(page: str, spec: str) -> tuple[float, Mapping[str, str]]:
    """The value and labels of the sample that a metric specification such as name{label=value} selects."""
    match = _SPEC.fullmatch(spec)
    assert match is not None, f"{spec} is not a metric specification"
    wanted = dict(pair.replace('"', "").split("=") for pair in (match[2] or "").split(",") if pair)
    samples = [
        (sample.value, sample.labels)
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == match[1] and wanted.items() <= sample.labels.items()
    ]
    assert samples, f"there is no sample of {spec}"
    return samples[0]


def endpoint_of_topic(topic: bytes) -> tuple[str, str]:
    """The server and the model that a topic names."""
    kind, server, model = topic.decode().split("@")
    assert kind == "kv"
    return server, model


def _cbor(value: Any) -> bytes:
    """A value in canonical CBOR."""
    match value:
        case None:
            return b"\xf6"
        case int():
            return _cbor_head(0, value)
        case str():
            return _cbor_head(3, len(value.encode())) + value.encode()
        case list() | tuple():
            return _cbor_head(4, len(value)) + b"".join(map(_cbor, value))
        case dict():
            return _cbor_head(5, len(value)) + b"".join(_cbor(key) + _cbor(item) for key, item in value.items())
    raise AssertionError(f"{type(value)} is not in block keys")


def _cbor_head(major: int, value: int) -> bytes:
    if value < 24:
        return bytes((major << 5 | value,))
    size = next(size for size in range(4) if value < 1 << (8 << size))
    return bytes((major << 5 | 24 + size,)) + value.to_bytes(1 << size)


def _fnv(data: bytes) -> int:
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 & _MASK
    return value


def _key(parent: int, tokens: Sequence[int] | None, extra: Any) -> int:
    return _fnv(_cbor([parent, tokens, extra]))


def block_keys(
    tokens: Sequence[int], model: str, texts: Sequence[Sequence[str]], size: int, parent: int | None = None
) -> list[int]:
    """The keys of the full blocks of tokens, in blocks of the picker's size.

    `texts`: of each block the hashes of media in it, and of the first one the salt.
    """
    key = _key(_fnv(b""), None, model) if parent is None else parent
    keys = []
    for index in range(len(tokens) // size):
        extra = [{"Hash": text} for text in texts[index]] or None
        key = _key(key, tokens[index * size : (index + 1) * size], extra)
        keys.append(key)
    return keys


def request_keys(rendered: Mapping[str, Any], model: str, size: int, salt: str | None = None) -> list[int]:
    """The keys of a request, from what /v1/…/render answers."""
    tokens, features = rendered["token_ids"], rendered.get("features") or {"mm_hashes": {}, "mm_placeholders": {}}
    items = sorted(
        (place["offset"], place["offset"] + place["length"], digest)
        for kind, hashes in features["mm_hashes"].items()
        for digest, place in zip(hashes, features["mm_placeholders"][kind], strict=True)
    )
    texts = [
        [digest for start, end, digest in items if start < begin + size and end > begin]
        for begin in range(0, len(tokens), size)
    ]
    if salt and texts:
        texts[0].append(salt)
    return block_keys(tokens, model, texts, size)


@dataclass
class Indexer:
    """What llm-d's index knows of one server."""

    size: int
    model: str = ""
    keys: dict[int, list[int]] = field(default_factory=dict)  # by the engine's hash
    present: set[tuple[int, int | None]] = field(default_factory=set)  # key and group
    second_tier: set[tuple[int, int | None]] = field(default_factory=set)  # like `present`
    kinds: dict[int, str] = field(default_factory=dict)

    def take(self, topic: bytes, payload: bytes) -> None:
        """Apply a message."""
        _, self.model = endpoint_of_topic(topic)
        for event in decode_batch(payload)[1]:
            match event["type"]:
                case "BlockStored":
                    self._store(event)
                case "BlockRemoved":
                    self._remove(event)
                case "AllBlocksCleared":
                    self.present.clear()
                    self.second_tier.clear()

    def _store(self, event: Mapping[str, Any]) -> None:
        group = event["group_idx"]
        if event["kv_cache_spec_kind"]:
            self.kinds[group] = event["kv_cache_spec_kind"]
        if group is not None and self.kinds.get(group) not in _INDEXED_KINDS:
            return
        hashes, tokens = list(map(hash_of, event["block_hashes"])), event["token_ids"]
        if hashes and not tokens:  # blocks that are known are in another tier as well
            assert event["medium"] != "GPU"
            self.second_tier |= {(key, group) for block in hashes for key in self.keys.get(block, ())}
            return
        if len(tokens) != event["block_size"] * len(hashes):
            return
        parent = None
        if event["parent_block_hash"]:
            known = self.keys.get(hash_of(event["parent_block_hash"]))
            if known is None:
                return
            parent = known[-1]
        texts = [[text if isinstance(text, str) else text[0] for text in keys or ()] for keys in event["extra_keys"]]
        keys = block_keys(tokens, self.model, self._realigned(texts, len(tokens) // self.size), self.size, parent)
        for index, key in enumerate(keys):
            self.keys.setdefault(hashes[index * len(hashes) // len(keys)], []).append(key)
            self.present.add((key, group))

    def _realigned(self, texts: list[list[str]], count: int) -> list[list[str]]:
        if len(texts) <= count:
            return [texts[index * len(texts) // count] for index in range(count)]
        merged: list[list[str]] = [[] for _ in range(count)]
        for index, block in enumerate(texts):
            merged[index * count // len(texts)] += block
        return merged

    def _remove(self, event: Mapping[str, Any]) -> None:
        group = event["group_idx"]
        if group is not None and self.kinds.get(group) not in _INDEXED_KINDS:
            return
        present = self.present if event["medium"] == "GPU" else self.second_tier
        for block in map(hash_of, event["block_hashes"]):
            for key in self.keys.get(block, ()):
                present.discard((key, group))

    def matched(self, keys: Iterable[int]) -> int:
        """How many of a request's first blocks the server has."""
        present = {key for key, _ in self.present}
        count = 0
        for key in keys:
            if key not in present:
                break
            count += 1
        return count
