"""Long short-term memory (Hochreiter and Schmidhuber 1997), one step at a time."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quire.engine.models.layers.linear import Linear


class LSTM(nn.Module):
    """Layers of an LSTM whose inputs and states have the same size. Gates are in torch's order."""

    def __init__(self, size: int, layers: int) -> None:
        super().__init__()
        self.inputs = nn.ModuleList(Linear(size, *[size] * 4, bias=True) for _ in range(layers))
        self.states = nn.ModuleList(Linear(size, *[size] * 4, bias=True) for _ in range(layers))

    def forward(self, x: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Advance each row by one step.

        Args:
            x: (rows, size).
            hidden, cell: (rows, layers, size).

        Returns:
            The last layer's output (rows, size), and the states behind the step.
        """
        hiddens, cells = [], []
        for index, (from_input, from_state) in enumerate(zip(self.inputs, self.states, strict=True)):
            gates = from_input(x) + from_state(hidden[:, index].contiguous())
            enter, keep, new, leave = gates.chunk(4, 1)
            after = keep.sigmoid() * cell[:, index] + enter.sigmoid() * new.tanh()
            x = leave.sigmoid() * after.tanh()
            hiddens.append(x)
            cells.append(after)
        return x, torch.stack(hiddens, 1), torch.stack(cells, 1)
