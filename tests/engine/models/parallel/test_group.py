"""Collectives, among ranks in threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from quire.engine.models.parallel.group import RankGroup
from quire.engine.models.parallel.placement import Placement

Result = TypeVar("Result")


def on_ranks(size: int, folder: Path, function: Callable[[RankGroup], Result]) -> list[Result]:
    """The results of a function on connected ranks."""

    def run(rank: int) -> Result:
        group = RankGroup(rank, size)
        group.connect(folder / "store", torch.device("cpu"))
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
    for one in values[1:]:
        expected = expected + one.float()

    def reduce(group: RankGroup) -> tuple[torch.Tensor, torch.Tensor]:
        whole = group.all_reduce(values[group.rank].clone())
        return whole, group.all_reduce(values[group.rank][-1:].clone())

    for whole, last in on_ranks(size, tmp_path, reduce):
        assert torch.equal(whole, expected.to(dtype))
        assert torch.equal(last, whole[-1:])


def test_tensors_are_gathered_and_sent(tmp_path: Path) -> None:
    def exchange(group: RankGroup) -> tuple[list[float], float]:
        gathered = [float(one[0, 0]) for one in group.gather(torch.full((2, 3), float(group.rank)).T)]
        if group.rank == 2:
            group.send(torch.full((4,), 7.0)[::2], 0)
            return gathered, 0.0
        if group.rank == 0:
            return gathered, float(group.receive((2,), torch.float32, torch.device("cpu"), 2).sum())
        return gathered, 0.0

    assert on_ranks(3, tmp_path, exchange) == [([0.0, 1.0, 2.0], 14.0), ([], 0.0), ([], 0.0)]


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
    assert [(one.stage, one.tensor_rank) for one in ranks] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [one.next for one in ranks[:2]] == [2, 3]
    assert [one.previous for one in ranks[2:]] == [0, 1]
    assert {one.logits_rank for one in ranks} == {2}
