"""RankLink: sends tensors from one rank to another."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from quire.engine.models.distributed.connection import RankConnection
from quire.engine.models.distributed.rendezvous import Rendezvous
from quire.kernels.capture import break_capture


class RankLink(RankConnection):
    """One direction between two ranks: tensors arrive in the order in which they were sent.

    Each direction has a connection of its own. On one of both directions NCCL would run transfers one after the other,
    and two ranks that send to each other at the same time would wait forever.
    """

    def __init__(self, name: str, *, sends: bool, depth: int) -> None:
        """A link that is not connected yet.

        Args:
            name: the same for both ranks, and no other link's.
            sends: this rank sends, the other one receives.
            depth: tensors that are sent before the first of them is received.
        """
        super().__init__(name, int(not sends), 2)
        self._sends = sends
        self._depth = depth
        self._sent: deque[tuple[Any, Tensor]] = deque()  # a tensor must not be freed before it has arrived

    def connect(self, rendezvous: Rendezvous, device: torch.device) -> None:
        """Connect to the other rank, which does the same.

        Args:
            rendezvous: where all ranks find each other.
            device: device of all tensors.
        """
        self._connect(rendezvous, device)
        if device.type == "cuda":  # NCCL connects at the first transfer, and takes memory then
            if self._sends:
                self.send(torch.zeros(1, device=device))
            else:
                self.receive((1,), torch.float32)

    def send(self, x: Tensor) -> None:
        """Send a tensor, which is not changed afterwards, in the background."""
        break_capture()
        while self._sent and (len(self._sent) == self._depth or self._sent[0][0].is_completed()):
            self._wait(self._sent.popleft()[0])
        x = x.contiguous()
        self._sent.append((self._backend.send([x], 1, 0), x))

    def receive(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Receive the next tensor, which the other rank sends in this shape and dtype."""
        break_capture()
        x = torch.empty(tuple(shape), dtype=dtype, device=self._device)
        self._wait(self._backend.recv([x], 0, 0))
        return x

    @override
    def close(self) -> None:
        super().close()
        self._sent.clear()
