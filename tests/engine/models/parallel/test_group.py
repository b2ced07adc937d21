"""Collectives, among ranks in threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from threading import Barrier, Event
from typing import TypeVar

import pytest
import torch

from quire.engine.execution.ranks.sockets import resolve
from quire.engine.models.distributed import connection
from quire.engine.models.distributed.group import RankGroup, RankGroups
from quire.engine.models.distributed.link import RankLink
from quire.engine.models.distributed.placement import Placement
from quire.engine.models.distributed.rendezvous import FileRendezvous, StoreServer, TcpRendezvous

Result = TypeVar("Result")


def on_ranks(size: int, folder: Path, function: Callable[[RankGroup], Result]) -> list[Result]:
    """Return the results of a function on connected ranks."""
    all_connected = Barrier(size)

    def run(rank: int) -> Result:
        group = RankGroup("store", rank, size)
        group.connect(FileRendezvous(folder), torch.device("cpu"))
        all_connected.wait(60)  # a rank that ends while another connects to it is an error of connecting
        try:
            return function(group)
        finally:
            group.close()

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, range(size)))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("shape", [(5, 8), (1, 1), (700, 129)])  # the last is reduced in pieces
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_does_not_depend_on_the_place_of_a_row(
    tmp_path: Path, size: int, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(size, *shape, generator=generator).to(dtype)
    expected = values[0].float()
    for value in values[1:]:
        expected = expected + value.float()

    def reduce(group: RankGroup) -> tuple[torch.Tensor, torch.Tensor]:
        whole = group.all_reduce(values[group.rank].clone())
        return whole, group.all_reduce(values[group.rank][-1:].clone())

    for whole, last in on_ranks(size, tmp_path, reduce):
        assert torch.equal(whole, expected.to(dtype))
        assert torch.equal(last, whole[-1:])


def test_tensors_are_gathered(tmp_path: Path) -> None:
    def gather(group: RankGroup) -> list[float]:
        return [float(row[0, 0]) for row in group.gather(torch.full((2, 3), float(group.rank)).T)]

    assert on_ranks(3, tmp_path, gather) == [[0.0, 1.0, 2.0], [], []]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("rows", [2, 0])
def test_tensors_are_gathered_on_all_ranks(tmp_path: Path, size: int, rows: int) -> None:
    def gather(group: RankGroup) -> list[list[float]]:
        return group.all_gather(torch.full((3, rows), float(group.rank)).T)[..., 0].tolist()

    assert on_ranks(size, tmp_path, gather) == [[[float(rank)] * rows for rank in range(size)]] * size


def test_ranks_send_to_each_other_before_they_receive(tmp_path: Path) -> None:
    """As many tensors as the links are deep, in order."""
    received_all = Barrier(2)

    def exchange(rank: int) -> list[float]:
        links = [RankLink(name, sends=sends == rank, depth=3) for sends, name in enumerate(("there", "back"))]
        for link in links:
            link.connect(FileRendezvous(tmp_path), torch.device("cpu"))
        mine, other_end = links if rank == 0 else links[::-1]
        received = []
        for turn in range(4):
            for index in range(3):
                mine.send(torch.full((1000, 4), float(10 * turn + index))[::2])
            received += [float(other_end.receive((500, 4), torch.float32).mean()) for _ in range(3)]
        received_all.wait(60)  # a link that is closed drops what the other rank has not received
        for link in links:
            link.close()
        return received

    with ThreadPoolExecutor(2) as threads:
        exchanged = list(threads.map(exchange, range(2)))
    assert exchanged == [[float(10 * turn + index) for turn in range(4) for index in range(3)]] * 2


def test_a_stage_may_compute_for_longer_than_ranks_may_take_to_connect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gloo would end a transfer after its timeout for connecting."""
    monkeypatch.setattr(connection, "CONNECT_TIMEOUT", timedelta(seconds=2))
    computed, arrived = Event(), Event()

    def run(rank: int) -> float:
        link = RankLink("hidden", sends=rank == 0, depth=1)
        link.connect(FileRendezvous(tmp_path), torch.device("cpu"))
        if rank == 0:
            computed.wait(2.5)  # nobody sets it
            link.send(torch.ones(3))
            arrived.wait(60)  # a link that is closed drops what has not been received
            return 0.0
        try:
            return float(link.receive((3,), torch.float32).sum())
        finally:
            arrived.set()

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(run, range(2))) == [0.0, 3.0]


def test_ranks_on_other_addresses_notice_that_transfers_are_aborted(tmp_path: Path) -> None:
    """Those of collectives and of links, although their peers are alive: their machine may be silent."""
    family, bound = resolve("127.0.0.1", 0)
    server = StoreServer(family, bound)
    all_connected, all_aborted = Barrier(2), Barrier(2)

    def run(rank: int) -> list[str]:
        rendezvous = TcpRendezvous("127.0.0.1", server.port, f"127.0.0.{rank + 1}")
        group, link = RankGroup("stage", rank, 2), RankLink("hidden", sends=rank == 1, depth=1)
        for made in (group, link):
            made.connect(rendezvous, torch.device("cpu"))
        all_connected.wait(60)
        errors = []
        if rank == 0:
            calls: list[Callable[[], object]] = [lambda: group.all_reduce(torch.ones(3))]
            calls.append(lambda: link.receive((3,), torch.float32))
            with ThreadPoolExecutor(2) as threads:
                waiting = [threads.submit(call) for call in calls]
                for made in (group, link):
                    made.abort()
                errors = [type(future.exception(60)).__name__ for future in waiting]
        all_aborted.wait(60)
        for made in (group, link):
            made.close()
        return errors

    with ThreadPoolExecutor(2) as threads:
        assert next(iter(threads.map(run, range(2)))) == ["RuntimeError", "RuntimeError"]
    server.close()


@pytest.mark.parametrize(("tensor_size", "stages"), [(1, 2), (1, 4), (2, 3), (3, 1)])
def test_all_ranks_connect(tmp_path: Path, tensor_size: int, stages: int) -> None:
    """None waits for one that waits for it; hidden states pass through all stages, and logits come back."""
    all_received = Barrier(tensor_size * stages)

    def run(rank: int) -> float:
        groups = RankGroups.of(Placement(rank, tensor_size, stages))
        try:
            groups.connect(FileRendezvous(tmp_path), torch.device("cpu"))
            x = torch.zeros(2, 2) if groups.previous is None else groups.previous.receive((2, 2), torch.float32)
            x = x + 1 if groups.tensor is None else groups.tensor.all_reduce((x + 1) / tensor_size)
            if groups.next is not None:
                groups.next.send(x)
            if groups.logits is not None and rank:
                groups.logits.send(x)
            elif groups.logits is not None:
                x = groups.logits.receive((2, 2), torch.float32)
            all_received.wait(60)  # a link that is closed drops what the other rank has not received
        finally:
            groups.close()  # after an error too: the other ranks would wait for this one
        return round(float(x.mean()), 3)

    with ThreadPoolExecutor(tensor_size * stages) as threads:
        results = list(threads.map(run, range(tensor_size * stages)))
    assert results[0] == results[-1] == stages


def test_a_rank_that_ends_is_an_error_for_those_that_wait(tmp_path: Path) -> None:
    def wait(group: RankGroup) -> str:
        if group.rank == 1:
            return "ended"
        with pytest.raises(RuntimeError):
            group.all_reduce(torch.ones(3))
        return "noticed"

    assert on_ranks(2, tmp_path, wait) == ["noticed", "ended"]


def test_the_places_of_ranks() -> None:
    ranks = [Placement(rank, tensor_size=2, stages=2) for rank in range(4)]
    assert [(rank.stage, rank.tensor_rank) for rank in ranks] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [rank.next for rank in ranks[:2]] == [2, 3]
    assert [rank.previous for rank in ranks[2:]] == [0, 1]
    assert {rank.logits_rank for rank in ranks} == {2}
