"""How ranks on GPUs are connected. NCCL is replaced by a backend that records what it is asked for."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.engine.models.distributed import connection, group, rendezvous
from quire.engine.models.distributed.group import RankGroup, RankGroups
from quire.engine.models.distributed.link import RankLink
from quire.engine.models.distributed.placement import Placement
from quire.engine.models.distributed.rendezvous import FileRendezvous, TcpRendezvous

CUDA = torch.device("cuda", 0)
SETTINGS = {"NCCL_SOCKET_IFNAME": "lo", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}


class Work:
    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name, self.done = log, name, False

    def is_completed(self) -> bool:
        return self.done

    def wait(self) -> None:
        self.log.append(f"wait {self.name}")


class FakeNCCL:
    """What ProcessGroupNCCL is asked for, in order; `made` has all of them."""

    made: list[FakeNCCL]

    class Options:
        _timeout: Any = None

    def __init__(self, store: Path, rank: int, size: int, options: Options) -> None:
        assert options._timeout is not None
        self.store, self.rank, self.size = store.name, rank, size
        self.log: list[str] = []
        self.works: list[Work] = []
        self.made.append(self)

    def _set_sequence_number_for_group(self) -> None:
        pass

    def allreduce(self, _: list[torch.Tensor]) -> Work:
        return self._started("allreduce")

    def send(self, _: list[torch.Tensor], rank: int, __: int) -> Work:
        return self._started(f"send {rank}")

    def recv(self, _: list[torch.Tensor], rank: int, __: int) -> Work:
        return self._started(f"recv {rank}")

    def abort(self) -> None:
        self.log.append("abort")

    def _started(self, name: str) -> Work:
        self.log.append(name)
        self.works.append(Work(self.log, name))
        return self.works[-1]


class FakeDistributed:
    ProcessGroupNCCL = FakeNCCL

    class FileStore:
        def __init__(self, path: str, _: int) -> None:
            self.name = Path(path).name

        def set_timeout(self, _: Any) -> None:
            pass


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[FakeNCCL]:
    """The backends that are made; tensors of GPUs are on the CPU."""
    backends = FakeNCCL.made = []
    for name in SETTINGS:
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    for module in (connection, group, rendezvous):
        monkeypatch.setattr(module, "torch_distributed", FakeDistributed)
    for name in ("zeros", "empty"):
        real = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *args, _real=real, **kw: _real(*args, **{**kw, "device": "cpu"}))
    return backends


def test_each_direction_has_a_communicator_which_connects_at_once(tmp_path: Path, made: list[FakeNCCL]) -> None:
    """Later, connecting would take memory that was counted as free for the KV cache."""
    for rank in range(2):
        RankGroups.of(Placement(rank, 1, 2)).connect(FileRendezvous(tmp_path), CUDA)
    assert [(group.store, group.rank, group.size, group.log) for group in made] == [
        ("hidden-0-1", 0, 2, ["send 1"]),
        ("logits", 1, 2, ["recv 0", "wait recv 0"]),
        ("hidden-0-1", 1, 2, ["recv 0", "wait recv 0"]),
        ("logits", 0, 2, ["send 1"]),
    ]


def test_settings_of_nccl_can_be_changed(tmp_path: Path, made: list[FakeNCCL], monkeypatch: pytest.MonkeyPatch) -> None:
    RankGroup("first", 0, 2).connect(FileRendezvous(tmp_path), CUDA)
    assert {name: os.environ[name] for name in SETTINGS} == SETTINGS
    settings = {"NCCL_SOCKET_IFNAME": "eth0", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    RankGroup("second", 0, 2).connect(FileRendezvous(tmp_path), CUDA)
    assert {name: os.environ[name] for name in SETTINGS} == settings
    assert [group.log for group in made] == [["allreduce", "wait allreduce"]] * 2


def test_nccl_uses_the_interface_that_has_the_address_of_a_node() -> None:
    assert TcpRendezvous("127.0.0.1", 1, "127.0.0.1").interface == "lo"
    assert TcpRendezvous("127.0.0.1", 1, "192.0.2.7").interface == ""


def test_a_sender_waits_for_the_oldest_tensor_only_when_the_link_is_full(tmp_path: Path, made: list[FakeNCCL]) -> None:
    link = RankLink("there", sends=True, depth=2)
    link.connect(FileRendezvous(tmp_path), CUDA)
    link.send(torch.ones(1))
    assert made[0].log == ["send 1"] * 2
    link.send(torch.ones(1))
    assert made[0].log == ["send 1", "send 1", "wait send 1", "send 1"]


def test_a_tensor_that_has_arrived_is_freed_at_the_next_transfer(tmp_path: Path, made: list[FakeNCCL]) -> None:
    link = RankLink("there", sends=True, depth=4)
    link.connect(FileRendezvous(tmp_path), CUDA)
    tensors = [torch.ones(1) for _ in range(3)]
    held = [weakref.ref(tensor) for tensor in tensors]
    for sent in tensors[:2]:
        link.send(sent)
    made[0].works[0].done = made[0].works[1].done = True  # that of `connect`, and the first one
    link.send(tensors.pop())
    tensors.clear()
    del sent
    assert [ref() is not None for ref in held] == [False, True, True]


def test_ranks_do_not_wait_for_each_other_when_they_disconnect(tmp_path: Path, made: list[FakeNCCL]) -> None:
    groups = RankGroups.of(Placement(1, 2, 2))
    groups.connect(FileRendezvous(tmp_path), CUDA)
    groups.close()
    groups.close()
    assert [group.log[-1] for group in made] == ["abort"] * 2
    assert sum(group.log.count("abort") for group in made) == 2
