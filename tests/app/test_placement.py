"""How replicas divide the machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quire.app.placement import gpu_places, host_places, ordered_cores, parsed_list
from quire.engine.client.launch import ProcessPlace


def machine(folder: Path) -> Path:
    """Two NUMA nodes with two cores each, of which each has two threads, as Linux numbers them."""
    for node, cores in enumerate(("0-1,4-5", "2-3,6-7")):
        (folder / f"node/node{node}").mkdir(parents=True)
        (folder / f"node/node{node}/cpulist").write_text(f"{cores}\n")
    for core in range(8):
        (folder / f"cpu/cpu{core}/topology").mkdir(parents=True)
        (folder / f"cpu/cpu{core}/topology/thread_siblings_list").write_text(f"{core % 4},{core % 4 + 4}\n")
    return folder


def test_lists_of_the_kernel_are_read() -> None:
    assert parsed_list("0-2,5,8-9\n") == [0, 1, 2, 5, 8, 9]
    assert parsed_list("\n") == []


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (1, [{0, 1, 2, 3, 4, 5, 6, 7}]),
        (2, [{0, 1, 4, 5}, {2, 3, 6, 7}]),
        (4, [{0, 4}, {1, 5}, {2, 6}, {3, 7}]),
        (3, [{0, 4}, {1, 5, 2}, {6, 3, 7}]),
        (9, [{0}, {4}, {1}, {5}, {2}, {6}, {3}, {7}, {0}]),
    ],
)
def test_replicas_have_whole_nodes_and_whole_cores(
    tmp_path: Path, count: int, expected: list[set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert [set(place.cores) for place in host_places(count, machine(tmp_path))] == expected


def test_replicas_are_placed_where_the_cores_of_a_process_cannot_be_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert [set(place.cores) for place in host_places(2, tmp_path)] == [{0, 1}, {2, 3}]


def test_only_cores_that_the_server_may_use_are_divided(tmp_path: Path) -> None:
    assert ordered_cores([1, 2, 5], machine(tmp_path)) == [1, 5, 2]
    assert ordered_cores([0, 1], tmp_path / "nothing") == [0, 1]


def test_replicas_have_gpus_of_their_own() -> None:
    assert gpu_places(2, ["3", "GPU-a", "5", "6"], 2) == [
        ProcessPlace(gpus=("3", "GPU-a")),
        ProcessPlace(gpus=("5", "6")),
    ]
    assert len(gpu_places(2, ["0", "1", "2"], 2)) == 1
    assert gpu_places(1, [], 1) == []
