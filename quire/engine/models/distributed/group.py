"""RankGroup: ranks that call collectives; RankGroups: all connections of a rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.engine.models.distributed.connection import RankConnection
from quire.engine.models.distributed.link import RankLink
from quire.engine.models.distributed.placement import Placement
from quire.engine.models.distributed.rendezvous import Rendezvous, torch_distributed
from quire.kernels.capture import break_capture

_ONE_SHOT = 256 << 10  # bytes of a rank, up to which an all-reduce of more than two ranks takes one message


class RankGroup(RankConnection):
    """Some ranks that call the same collectives in the same order.

    The results do not depend on the place of a row in a tensor, so that they are the same in any batch.
    """

    def connect(self, rendezvous: Rendezvous, device: torch.device) -> None:
        """Connect to the other ranks, which do the same.

        Args:
            rendezvous: where all ranks find each other.
            device: device of all tensors.
        """
        self._connect(rendezvous, device)
        if device.type == "cuda":
            self.all_reduce(torch.zeros(1, device=device))  # NCCL connects at the first call, and takes memory then

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
        options = torch_distributed().GatherOptions()
        options.rootRank = 0
        self._backend.gather([gathered] if gathered else [], [x], options).wait()
        return gathered

    def all_gather(self, x: Tensor) -> Tensor:
        """(size, *shape): the ranks' tensors, all of one shape, on all ranks."""
        break_capture()
        return self._all_gather(x.contiguous())

    def _all_gather(self, x: Tensor) -> Tensor:
        """(size, *shape): the ranks' tensors."""
        gathered = x.new_empty(self.size, *x.shape)
        self._backend._allgather_base(gathered.view(-1), x.view(-1)).wait()
        return gathered


def _sum(gathered: Tensor) -> Tensor:
    """The sum over the first dimension, in order."""
    total = gathered[0].float()
    for part in gathered[1:]:
        total = total + part
    return total.to(gathered.dtype)


@dataclass(frozen=True, slots=True)
class RankGroups:
    """The connections of a rank.

    Attributes:
        placement: position of the rank.
        tensor: the ranks that share its layers; None: it has whole layers.
        previous: receives hidden states from the stage before; None in the first stage.
        next: sends hidden states to the stage after it; None in the last stage.
        logits: from the rank that gathers the logits to rank 0; None on other ranks, and if there is one stage.
    """

    placement: Placement
    tensor: RankGroup | None
    previous: RankLink | None
    next: RankLink | None
    logits: RankLink | None

    @classmethod
    def of(cls, placement: Placement) -> RankGroups:
        """Connections that are not made yet."""
        rank, steps = placement.rank, placement.stages  # as many steps as stages are in flight
        tensor = previous = following = logits = None
        if placement.tensor_size > 1:
            tensor = RankGroup(f"stage-{placement.stage}", placement.tensor_rank, placement.tensor_size)
        if not placement.is_first_stage:
            previous = RankLink(f"hidden-{placement.previous}-{rank}", sends=False, depth=steps)
        if not placement.is_last_stage:
            following = RankLink(f"hidden-{rank}-{placement.next}", sends=True, depth=steps)
        if steps > 1 and rank in (0, placement.logits_rank):
            logits = RankLink("logits", sends=rank != 0, depth=steps)
        return cls(placement, tensor, previous, following, logits)

    def connect(self, rendezvous: Rendezvous, device: torch.device) -> None:
        """Make all connections, in an order in which no ranks wait for each other."""
        if self.tensor is not None:
            self.tensor.connect(rendezvous, device)
        for link in self._links():
            link.connect(rendezvous, device)

    def abort(self) -> None:
        """End the transfers that other threads wait for, with an error."""
        for connection in self._connections():
            connection.abort()

    def close(self) -> None:
        """Disconnect."""
        for connection in self._connections():
            connection.close()

    def _links(self) -> list[RankLink]:
        return [link for link in (self.previous, self.next, self.logits) if link is not None]

    def _connections(self) -> list[RankConnection]:
        return [*self._links(), *([] if self.tensor is None else [self.tensor])]
