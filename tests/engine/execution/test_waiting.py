"""Operators that let the host wait for a device are refused, with and without inference mode."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from quire.engine.execution.waiting import RefuseWaiting, WaitsForDevice

X, META, INDICES = torch.ones(4), torch.ones(4, device="meta"), torch.tensor([0, 1])


def set_items(mask: torch.Tensor) -> None:
    torch.ones(4)[mask] = 2.0


WAITING: dict[str, Callable[[], object]] = {
    "item": lambda: X.sum().item(),
    "bool": lambda: bool(X.sum()),
    "int": lambda: int(X.sum()),
    "nonzero": X.nonzero,
    "where": lambda: torch.where(X > 0),
    "mask": lambda: X[X > 0],
    "mask of a target": lambda: set_items(X > 0),
    "masked_select": lambda: X.masked_select(X > 0),
    "equal": lambda: torch.equal(X, X),
    "unique": X.unique,
    "repeat_interleave": lambda: X.repeat_interleave(torch.tensor([1, 2, 1, 1])),
    "to": lambda: X.to("meta"),
    "copy": lambda: META.clone().copy_(X),
    "indices of the host": lambda: META.index_select(0, INDICES),
}
OTHERS: dict[str, Callable[[], object]] = {
    "sum": lambda: X + 1,
    "indices": lambda: X[INDICES],
    "indices of a target": lambda: set_items(INDICES),
    "scalar of the host": lambda: META * torch.tensor(2.0),
    "choice by a mask": lambda: torch.where(X > 0, X, 0.0).masked_fill(X > 0, 1.0),
    "topk": lambda: X.topk(2),
    "views and types": lambda: X.unflatten(0, (2, 2))[1:].contiguous().to(torch.float16).split([1]),
    "new": lambda: torch.zeros(3, device="meta").new_empty(2),
    "product": lambda: torch.ones(2, 2) @ torch.ones(2, 2),
}


@pytest.fixture(params=[False, True])
def inference(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.mark.parametrize("name", WAITING)
def test_waiting_is_refused(name: str, inference: bool) -> None:
    with torch.inference_mode(inference), pytest.raises(WaitsForDevice), RefuseWaiting():
        WAITING[name]()


@pytest.mark.parametrize("name", OTHERS)
def test_other_operators_are_not(name: str, inference: bool) -> None:
    with torch.inference_mode(inference), RefuseWaiting():
        OTHERS[name]()


def test_other_threads_may_wait() -> None:
    values: list[float] = []
    with RefuseWaiting():
        thread = threading.Thread(target=lambda: values.append(X.sum().item()))
        thread.start()
        thread.join()
    assert values == [4.0]
