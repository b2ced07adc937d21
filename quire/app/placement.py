"""Where the replicas of a model run: each has its own part of the CPU's cores, or its own GPUs."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

from quire.config.commands import Serve
from quire.engine.client.launch import ProcessPlace, allowed_cores
from quire.engine.execution.memory import MemoryShare, free_memory
from quire.engine.models.errors import UnavailableDevice

_SYSTEM = Path("/sys/devices/system")
_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/dxg"))  # of GPUs that torch can use, on Linux and in WSL
_FORK = multiprocessing.get_context("fork")


def gpus_of_replicas(device: Literal["auto", "cpu", "cuda", "reference"]) -> list[str] | None:
    """Return the GPUs that replicas have, in the words of CUDA_VISIBLE_DEVICES; None: they run on the CPU.

    A process of its own looks, as this one is not to import torch. It has to be able to fork.
    """
    if device in ("cpu", "reference") or not any(driver.exists() for driver in _DRIVERS):
        return [] if device == "cuda" else None
    reading, writing = _FORK.Pipe(duplex=False)
    looking = _FORK.Process(target=_look_for_gpus, args=(device, writing))
    looking.start()
    writing.close()
    try:
        gpus: list[str] | None = reading.recv()
    except EOFError as error:
        raise UnavailableDevice("the process that looks for GPUs has failed") from error
    finally:
        reading.close()
        looking.join()
    return gpus


def _look_for_gpus(device: Literal["auto", "cuda"], answer: Connection) -> None:
    from quire.engine.execution.devices.select import uses_gpu, visible_gpus  # noqa: PLC0415 imports torch

    answer.send(visible_gpus() if uses_gpu(device) else None)


def replica_places(settings: Serve, size: int, gpus: Sequence[str] | None) -> list[ProcessPlace]:
    """Return the places of so many replicas. On a CPU those of a larger number than at first share the first ones'.

    `gpus`: that there are; None: they run on the CPU.

    Raises:
        UnavailableDevice: there are not enough GPUs.
    """
    if gpus is None:
        first = host_places(settings.replicas)
        return [first[rank % len(first)] for rank in range(size)]
    ranks = settings.tensor_parallel_size * settings.pipeline_parallel_size
    places = gpu_places(size, gpus, ranks)
    if len(places) < size:
        raise UnavailableDevice(
            f"{size} replicas on {ranks} GPUs each need {size * ranks} GPUs, but there are {len(gpus)}"
        )
    return places


def memory_of_replicas(added: int, reserved: int, weight_bytes: int) -> MemoryShare:
    """Return what each of so many cores that are started now may take of the host's memory, beside weights.

    `reserved`: of running cores, as the pages of a KV cache count as free memory until they are used.
    """
    return MemoryShare(max(0, free_memory() - reserved - added * weight_bytes) // added)


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


def gpu_places(count: int, gpus: Sequence[str], ranks: int) -> list[ProcessPlace]:
    """Return the places of so many replicas, with a GPU for each of their ranks; fewer if there are not enough GPUs."""
    places = [ProcessPlace(gpus=tuple(gpus[start : start + ranks])) for start in range(0, count * ranks, ranks)]
    return [place for place in places if len(place.gpus) == ranks]
