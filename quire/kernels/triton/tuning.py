"""Configurations of Triton kernels by GPU: block sizes, warps, stages.

A table is ``tuned/OP.json``: ``{GPU: {KERNEL: [RULE, ...]}}``, and ``{"measured": {...}}`` beside the kernels of a GPU
on which they were measured: date and versions. The GPU ``default`` has what nobody measured. A rule is
``{"shape": {NAME: VALUE}, "config": {NAME: NUMBER}}``, where a value may be a list of the least and the largest number.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

DEFAULT = "default"
_MEASURED = "measured"
_TABLES = Path(__file__).parent / "tuned"


def gpu_name(device: torch.device) -> str:
    """The name of a device in tables, such as "nvidia-h100-80gb-hbm3"; `DEFAULT` for CPUs (Triton's interpreter)."""
    if device.type != "cuda":
        return DEFAULT
    return "-".join(torch.cuda.get_device_name(device).lower().split())


@cache
def config(op: str, kernel: str, device: torch.device, **shape: int | str) -> Mapping[str, int]:
    """The arguments that a kernel is launched with: its block sizes, ``num_warps``, ``num_stages``.

    They are those of the first rule that fits the shape, among the rules of the device's GPU and then the defaults.

    Args:
        op: the table's name.
        shape: sizes and types that decide. Results have the same bits in any batch only if none of these depends on
            the batch, or if the rules' configs do not change the order in which the kernel sums.

    Raises:
        LookupError: no rule fits.
    """
    table = _table(op)
    rules = [*table.get(gpu_name(device), {}).get(kernel, ()), *table[DEFAULT].get(kernel, ())]
    for rule in rules:
        if all(_fits(shape.get(name), value) for name, value in rule["shape"].items()):
            return dict(rule["config"])
    raise LookupError(f"tuned/{op}.json has no configuration of {kernel} for {shape}")


def store(
    op: str, kernel: str, device: torch.device, rules: Sequence[Mapping[str, Any]], measured: Mapping[str, str]
) -> Path:
    """Replace the rules of a kernel for the device's GPU.

    Args:
        measured: when and with which versions the rules were measured.

    Returns:
        the table's file.
    """
    table = dict(_table(op))
    of_gpu = dict(table.get(gpu_name(device), {}))
    table[gpu_name(device)] = {**of_gpu, _MEASURED: dict(measured), kernel: list(rules)}
    file = _TABLES / f"{op}.json"
    file.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    _table.cache_clear()
    config.cache_clear()
    return file


@cache
def _table(op: str) -> dict[str, dict[str, Any]]:
    table: dict[str, dict[str, Any]] = json.loads((_TABLES / f"{op}.json").read_text(encoding="utf-8"))
    return table


def _fits(actual: int | str | None, expected: int | str | list[int]) -> bool:
    if isinstance(expected, list):
        return isinstance(actual, int) and expected[0] <= actual <= expected[1]
    return actual == expected
