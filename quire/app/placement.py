"""Where the replicas of a model run: each has its own part of the CPU's cores, or its own GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quire.engine.client.launch import ProcessPlace, allowed_cores

_SYSTEM = Path("/sys/devices/system")


def host_places(count: int, system: Path = _SYSTEM) -> list[ProcessPlace]:
    """Return the places of so many replicas on the CPU: whole NUMA nodes where they can be divided so, and whole cores.

    If there are fewer cores than replicas, some of these share a core.
    """
    cores = ordered_cores(allowed_cores(), system)
    if len(cores) < count:
        return [ProcessPlace(frozenset((cores[index % len(cores)],))) for index in range(count)]
    borders = [len(cores) * index // count for index in range(count + 1)]
    return [ProcessPlace(frozenset(cores[borders[index] : borders[index + 1]])) for index in range(count)]


def ordered_cores(cores: Sequence[int], system: Path = _SYSTEM) -> list[int]:
    """Return logical cores in an order in which neighbours share most: threads of a core, then cores of a NUMA node."""
    nodes = {
        core: index
        for index, path in enumerate(sorted(system.glob("node/node[0-9]*/cpulist"), key=_number))
        for core in parsed_list(path.read_text(encoding="ascii"))
    }

    def place(core: int) -> tuple[int, int, int]:
        siblings = system / f"cpu/cpu{core}/topology/thread_siblings_list"
        threads = parsed_list(siblings.read_text(encoding="ascii")) if siblings.exists() else []
        return nodes.get(core, 0), min(threads, default=core), core

    return sorted(cores, key=place)


def _number(path: Path) -> int:
    """The number of a node, of whose folder this is a file."""
    return int(path.parent.name.removeprefix("node"))


def parsed_list(text: str) -> list[int]:
    """Return the numbers in a list of the kernel's, such as 0-3,8."""
    numbers: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            numbers += range(int(first), int(last or first) + 1)
    return numbers


def gpu_places(count: int, gpus: Sequence[str], each: int) -> list[ProcessPlace]:
    """Return the places of so many replicas that have `each` GPUs; fewer places if there are not enough."""
    places = [ProcessPlace(gpus=tuple(gpus[start : start + each])) for start in range(0, count * each, each)]
    return [place for place in places if len(place.gpus) == each]
