"""Low-rank adapters for tasks, of which one is merged into the weights when a model is loaded (Jina's embedder v3)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.engine.models.errors import UnsupportedModel, WeightMismatch

if TYPE_CHECKING:  # configs are read without torch
    from torch import Tensor

_TENSOR = re.compile(r"(?P<module>.+)\.parametrizations\.weight\.(?P<part>original|0\.lora_A|0\.lora_B)")
_SETTING = "jina_task"  # of --hf-overrides, as vLLM names it for Jina's embedder v5


@dataclass(frozen=True, slots=True)
class TaskAdapter:
    """The adapter that is merged.

    Attributes:
        index: its index among those of the checkpoint.
        scale: factor of the product of its two matrices.
    """

    index: int
    scale: float


def read_task_adapter(config: Any) -> TaskAdapter | None:
    """The adapter that a config asks for, by default the last one, as in vLLM; None if the model has none.

    Raises:
        UnsupportedModel: there is no such adapter, or the config does not describe it.
    """
    tasks = getattr(config, "lora_adaptations", None)
    if not tasks:
        return None
    rank, alpha = getattr(config, "lora_rank", None), getattr(config, "lora_alpha", None)
    if not isinstance(tasks, list) or not isinstance(rank, int) or not isinstance(alpha, int | float) or rank < 1:
        raise UnsupportedModel("config.json: lora_adaptations needs a list of names, and numbers lora_rank, lora_alpha")
    task = getattr(config, _SETTING, None) or tasks[-1]
    if task not in tasks:
        raise UnsupportedModel(f"{_SETTING} must be one of {', '.join(map(str, tasks))}, not {task!r}")
    return TaskAdapter(tasks.index(task), alpha / rank)


def merged(tensors: Iterable[tuple[str, Tensor]], adapter: TaskAdapter) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a checkpoint with the adapter in them, under the names that they have without adapters.

    Raises:
        WeightMismatch: a part of an adapted weight is missing, or does not fit the others.
    """
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors:
        if (match := _TENSOR.fullmatch(name)) is None:
            yield name, tensor
            continue
        module, part = match["module"], match["part"][-1]
        if part in "AB" and adapter.index >= len(tensor):
            raise WeightMismatch(f"{name} has {len(tensor)} adapters, but config.json names {adapter.index + 1}")
        known = parts.setdefault(module, {})
        known[part] = (tensor if part == "l" else tensor[adapter.index]).clone()  # `tensor` is valid for this step only
        if len(known) == 3:
            yield f"{module}.weight", _sum(module, parts.pop(module), adapter.scale)
    if parts:
        raise WeightMismatch(f"the adapter of {', '.join(sorted(parts))} is incomplete in the checkpoint")


def _sum(module: str, parts: dict[str, Tensor], scale: float) -> Tensor:
    weight, a, b = (parts[part] for part in ("l", "A", "B"))
    left, right = (a, b) if a.shape[0] == weight.shape[0] and b.shape[1:] == weight.shape[1:] else (b, a)
    if (left.shape[0], *right.shape[1:]) != tuple(weight.shape) or left.shape[1] != right.shape[0]:
        raise WeightMismatch(f"the adapter of {module} has other shapes than its weight, {tuple(weight.shape)}")
    return (weight.float() + left.float() @ right.float() * scale).to(weight.dtype)
