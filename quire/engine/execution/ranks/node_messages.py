"""Messages between node 0, which has the core, and the process that starts the ranks of another node."""

from __future__ import annotations

import msgspec


class Join(msgspec.Struct, frozen=True, tag=True):
    """A node has come.

    Attributes:
        node: its --node-rank.
        facts: what has to be the same on all nodes, by its name.
    """

    node: int
    facts: dict[str, str]


class JoinRank(msgspec.Struct, frozen=True, tag=True):
    """This connection is that of a rank. `ticket`: that of the welcome."""

    rank: int
    ticket: bytes


class RankEnded(msgspec.Struct, frozen=True, tag=True):
    """The process of a rank has ended, although nobody has told it to."""

    rank: int
    exitcode: int


class Choices(msgspec.Struct, frozen=True):
    """What node 0 has chosen for `auto`, for its device."""

    attention_backend: str
    kv_cache_dtype: str
    quantization: str


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The node fits.

    Attributes:
        store_port: port of the store by which ranks find each other, at the address of node 0.
        ticket: by which the connections of its ranks are known.
        choices: see there.
    """

    store_port: int
    ticket: bytes
    choices: Choices


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The node must end. `error`: why."""

    error: str


class End(msgspec.Struct, frozen=True, tag=True):
    """All ranks end. `error`: why; empty: node 0 was told to."""

    error: str


FromNode = Join | JoinRank | RankEnded
ToNode = Welcome | Refused | End
