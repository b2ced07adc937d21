"""A set of replicas over cores without models."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

from quire.engine.client.engine_client import EngineClient
from quire.engine.client.errors import EngineDead
from quire.engine.client.launch import CoreEntry, ThreadCore
from quire.engine.client.model_info import ModelInfo
from quire.engine.client.protocol import Shutdown
from quire.engine.client.replicas.replica import Replica
from quire.engine.client.replicas.replica_set import ReplicaSet
from quire.engine.client.slots import Slots
from quire.engine.client.transport import ClientChannel
from tests.support.fake_core import FakeCore
from tests.support.patience import PATIENCE
from tests.support.tokenizer import byte_tokenizer


class FakeReplicas:
    """The set, and the handles of its cores."""

    def __init__(self, capacity: int) -> None:
        self.slots = Slots(capacity, 1.0)
        self.set = ReplicaSet(self.slots, has_prefix_cache=True)
        self._handles: list[tuple[CoreEntry, ThreadCore]] = []

    @property
    def clients(self) -> Sequence[EngineClient]:
        return [replica.client for replica in self.set.replicas]

    async def add(self, core: CoreEntry) -> Replica:
        """Add a replica with this core, which enters."""
        handle = ThreadCore()
        rank = len(self.set.replicas)
        client = EngineClient(ClientChannel(handle.address), byte_tokenizer(), self.slots, rank)
        replica = Replica(rank, client)
        self.set.add(replica)
        self._start(core, handle, client)
        await self.set.enter(replica, await client.ready())
        return replica

    async def restart(self, replica: Replica, core: CoreEntry) -> ModelInfo:
        """Replace the core of a replica, which then could enter."""
        with suppress(EngineDead):
            replica.client._channel.send(Shutdown())  # the old one may run still
        handle = ThreadCore()
        await replica.client.reconnect(ClientChannel(handle.address))
        self._start(core, handle, replica.client)
        return await replica.client.ready()

    def _start(self, core: CoreEntry, handle: ThreadCore, client: EngineClient) -> None:
        self._handles.append((core, handle))
        handle.start(core, client.fail)

    async def close(self) -> None:
        for core, _ in self._handles:
            if isinstance(core, FakeCore):
                core.hold.clear()
                core.deaf.clear()
        for client in self.clients:
            with suppress(EngineDead):
                client._channel.send(Shutdown())  # of one that counts as dead, too
            await client.close()
        for _, handle in self._handles:
            await handle.join(PATIENCE)


@asynccontextmanager
async def running_set(*cores: CoreEntry, capacity: int = 64) -> AsyncIterator[FakeReplicas]:
    """Replicas with these cores; `capacity`: sequences of each."""
    replicas = FakeReplicas(capacity)
    try:
        for core in cores:
            await replicas.add(core)
        yield replicas
    finally:
        await replicas.close()


def nothing_is_held(replicas: FakeReplicas) -> bool:
    """Whether no request, slot or work is left."""
    of_each = [replica.client.open_streams + replica.load.requests for replica in replicas.set.replicas]
    tokens = sum(replica.load.tokens for replica in replicas.set.replicas)
    left = len(replicas.set._open) + len(replicas.set._items)
    return not any(of_each) and not tokens and not left and replicas.set.slots_in_use == 0
