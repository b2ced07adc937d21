"""RankGroup: ranks that exchange tensors, over torch.distributed (NCCL on GPUs, Gloo on CPUs)."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.engine.models.parallel.placement import Placement
from quire.kernels.capture import break_capture

_CONNECT_TIMEOUT = timedelta(minutes=1)
_TIMEOUT = timedelta(minutes=10)  # of a collective; a rank that has ended is noticed at once
_ONE_SHOT = 256 << 10  # bytes of a rank, up to which an all-reduce of more than two ranks takes one message


class RankGroup:
    """Some ranks that call the same collectives in the same order.

    The results do not depend on the place of a row in a tensor, so that they are the same in any batch.

    Attributes:
        rank: index of this rank in the group.
        size: number of ranks.
    """

    def __init__(self, rank: int, size: int) -> None:
        """A group that is not connected yet."""
        self.rank = rank
        self.size = size
        self._backend: Any = None

    def connect(self, store: Path, device: torch.device) -> None:
        """Connect to the other ranks, which do the same.

        Args:
            store: file in which the ranks find each other; not there at first.
            device: device of all tensors.
        """
        dist = _torch_distributed()
        files = dist.FileStore(str(store), self.size)
        files.set_timeout(_CONNECT_TIMEOUT)
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = _TIMEOUT
            self._backend = dist.ProcessGroupNCCL(files, self.rank, self.size, options)
            self._backend._set_sequence_number_for_group()
            self.all_reduce(torch.zeros(1, device=device))  # NCCL connects at the first call
            return
        options = dist.ProcessGroupGloo._Options()
        options._timeout = _CONNECT_TIMEOUT
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        self._backend = dist.ProcessGroupGloo(files, self.rank, self.size, options)
        self._backend._set_default_timeout(_TIMEOUT)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of the ranks' tensors, on all ranks; x may be overwritten.

        With more than two ranks, libraries add in an order that depends on an element's place in the tensor. Here
        each element is summed in the order of the ranks, in float32.
        """
        break_capture()
        x = x.contiguous()
        if self.size == 2:
            self._backend.allreduce([x]).wait()
            return x
        if x.nbytes <= _ONE_SHOT:
            return _sum(self._all_gather(x))
        flat = torch.nn.functional.pad(x.flatten(), (0, -x.numel() % self.size))
        received = torch.empty_like(flat)
        self._backend.alltoall_base(received, flat, [], []).wait()
        return self._all_gather(_sum(received.view(self.size, -1))).flatten()[: x.numel()].view_as(x)

    def gather(self, x: Tensor) -> list[Tensor]:
        """The ranks' tensors, all of one shape, on the first rank; an empty list on the others."""
        break_capture()
        x = x.contiguous()
        gathered = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else []
        options = _torch_distributed().GatherOptions()
        options.rootRank = 0
        self._backend.gather([gathered] if gathered else [], [x], options).wait()
        return gathered

    def send(self, x: Tensor, rank: int) -> None:
        """Send a tensor to a rank of the group."""
        break_capture()
        self._backend.send([x.contiguous()], rank, 0).wait()

    def receive(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, rank: int) -> Tensor:
        """Receive a tensor from a rank of the group, which sends it in this shape and dtype."""
        break_capture()
        x = torch.empty(tuple(shape), dtype=dtype, device=device)
        self._backend.recv([x], rank, 0).wait()
        return x

    def abort(self) -> None:
        """End the collectives that other threads wait in, with an error."""
        if self._backend is not None:
            self._backend.abort()

    def close(self) -> None:
        """Disconnect."""
        self._backend = None

    def _all_gather(self, x: Tensor) -> Tensor:
        """(size, *shape): the ranks' tensors."""
        gathered = x.new_empty(self.size, *x.shape)
        self._backend._allgather_base(gathered.view(-1), x.view(-1)).wait()
        return gathered


def _torch_distributed() -> Any:
    """The module, whose import takes a tenth of a second that one rank does not need; its stubs lack the backends."""
    return importlib.import_module("torch.distributed")


def _sum(gathered: Tensor) -> Tensor:
    """The sum over the first dimension, in order."""
    total = gathered[0].float()
    for part in gathered[1:]:
        total = total + part
    return total.to(gathered.dtype)


@dataclass(frozen=True, slots=True)
class RankGroups:
    """The groups of a rank.

    Attributes:
        placement: position of the rank.
        tensor: the ranks that share its layers; None: it has whole layers.
        world: all ranks; None if there is one pipeline stage.
    """

    placement: Placement
    tensor: RankGroup | None
    world: RankGroup | None

    @classmethod
    def of(cls, placement: Placement) -> RankGroups:
        """Groups that are not connected yet."""
        tensor = RankGroup(placement.tensor_rank, placement.tensor_size) if placement.tensor_size > 1 else None
        world = RankGroup(placement.rank, placement.ranks) if placement.stages > 1 else None
        return cls(placement, tensor, world)

    def connect(self, folder: Path, device: torch.device) -> None:
        """Connect all groups. `folder`: the same for all ranks; files are made in it."""
        if self.world is not None:
            self.world.connect(folder / "world", device)
        if self.tensor is not None:
            self.tensor.connect(folder / f"stage-{self.placement.stage}", device)

    def abort(self) -> None:
        """End the collectives that other threads wait in, with an error."""
        for group in (self.tensor, self.world):
            if group is not None:
                group.abort()

    def close(self) -> None:
        """Disconnect all groups."""
        for group in (self.tensor, self.world):
            if group is not None:
                group.close()
