"""Replica: one engine of a set, and what the front end knows about it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from typing_extensions import override

from quire.engine.client.engine_client import EngineClient
from quire.engine.client.model_info import ModelInfo
from quire.engine.client.protocol import MemoryTag, SleepLevel
from quire.engine.client.records import Observer
from quire.engine.client.replicas.load import Load
from quire.engine.client.replicas.prefix_index import Prefixes, PrefixIndex

_STALLED = 10.0  # seconds without an answer after which others get requests
ReplicaState = Literal["starting", "ready", "draining", "dead"]


class Replica(Observer):
    """One engine of a set. It gets requests from when it has entered until it leaves or dies.

    Attributes:
        rank: its number in the set.
        client: the client of its core.
        load: what it has yet to compute.
        end: ends its core, which is then started again; called with the reason.
        info: facts about the model that its core has loaded; None before.
        prefixes: what its prefix cache probably holds; None if there is none.
        is_loaded: its core was loaded once.
        has_entered: its core is as the others are: it has their weights, and is paused or asleep if they are.
        is_leaving: it gets no more requests, and is removed once it has none.
    """

    def __init__(
        self,
        rank: int,
        client: EngineClient,
        load: Load | None = None,
        new_prefixes: Callable[[int], Prefixes] = PrefixIndex,
        *,
        entered: bool = False,
    ) -> None:
        """Its core may still be loading.

        Args:
            rank: its number in the set.
            client: the client of its core.
            load: what several front ends count together; None: this one is alone.
            new_prefixes: gives what its prefix cache holds, by the number of its blocks.
            entered: for other front ends it has entered.
        """
        self.rank = rank
        self.client = client
        self.end: Callable[[str], None] = client.fail
        self.load = load or Load()
        self._new_prefixes = new_prefixes
        self.info: ModelInfo | None = None
        self.prefixes: Prefixes | None = None
        self.is_loaded = False
        self.has_entered = entered
        self.is_leaving = False
        client.observers.add(self)

    @property
    def is_live(self) -> bool:
        """Whether its core runs."""
        return self.is_loaded and self.client.dead is None

    @property
    def is_ready(self) -> bool:
        """Whether it may get requests."""
        return self.is_live and self.has_entered and not self.is_leaving

    @property
    def responds(self) -> bool:
        """Whether its core has answered of late."""
        return self.client.unresponsive_seconds() < _STALLED

    @property
    def state(self) -> ReplicaState:
        """Its state, for operators."""
        if self.client.dead is not None:
            return "dead"
        if not self.has_entered:
            return "starting"
        return "draining" if self.is_leaving else "ready"

    def describe(self, info: ModelInfo, *, has_prefix_cache: bool) -> None:
        """Take note of the model that its core has loaded."""
        self.prefixes = self._new_prefixes(info.num_blocks) if has_prefix_cache and info.num_blocks else None
        self.info = info
        self.is_loaded = True

    def forget_prefixes(self) -> None:
        """Take note that its prefix cache is empty."""
        if self.prefixes is not None:
            self.prefixes.clear()

    @override
    def on_sleep(self, asleep: frozenset[MemoryTag], level: SleepLevel) -> None:
        """See `Observer`. It is told so when the core has died, too."""
        self.forget_prefixes()

    @override
    def on_restart(self) -> None:
        """See `Observer`. The new core has yet to become as the others are."""
        self.has_entered = False


def end_stalled(replicas: Sequence[Replica], seconds: float) -> None:
    """Fail replicas that have not answered for so long, if others do: else it is the machine that does not go on."""
    answering = [replica for replica in replicas if replica.is_ready and replica.responds]
    if not answering:
        return
    for replica in replicas:
        stalled = replica.client.unresponsive_seconds()
        if replica not in answering and replica.client.dead is None and stalled > seconds:
            replica.end(f"it has made no progress for {stalled:.0f} s (--stall-timeout)")
