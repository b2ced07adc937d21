"""Weights in groups, as formats of checkpoints give them."""

from __future__ import annotations

import torch

from quire.kernels.grouped_weight import GroupedWeight

_NF4 = "-1 -.6962 -.5251 -.3949 -.2844 -.1848 -.0911 0 .0796 .1609 .2461 .3379 .4407 .5626 .723 1"
NF4 = torch.tensor([float(value) for value in _NF4.split()])
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
TABLES = {"nf4": NF4, "e2m1": torch.cat((E2M1, -E2M1))}


def make_groups(kind: str, size_out: int, group: int | None, size_in: int) -> GroupedWeight:
    """A weight as some format gives it, whose scales differ by up to a thousand times."""
    groups = 1 if group is None else size_in // group
    scales = torch.randn(size_out, groups) * torch.logspace(-4, -1, size_out)[:, None]
    minimums, table = None, TABLES.get(kind)
    if "affine" in kind:
        minimums = -8 * scales.abs() * (0.5 + torch.rand(size_out, groups))
    if kind == "symmetric":
        minimums = -8 * scales
    if kind in ("Q4_K", "Q6_K"):
        factors = (torch.rand(size_out, 1 + size_in // 256) * 1e-3).half().float()
        largest = {"Q4_K": 63, "Q6_K": -128}[kind]
        integers = (
            torch.randint(-100, 100, (size_out, groups)) if kind == "Q6_K" else torch.randint(64, (size_out, groups))
        )
        per = 256 * groups // size_in
        integers[:, ::per] = largest
        scales = factors.repeat_interleave(per, 1)[:, :groups] * integers
        minimums = None if kind == "Q6_K" else -factors.repeat_interleave(per, 1)[:, :groups] * (integers.flip(0))
    if "bits" in kind or kind in ("int8", "int8 affine", "Q6_K"):
        low, high = {"Q6_K": (-32, 32), "6 bits": (-32, 32), "5 bits affine": (0, 32)}.get(kind, (-128, 128))
        codes = torch.randint(low, high, (size_out, size_in), dtype=torch.int8)
    else:
        codes = torch.randint(256, (size_out, size_in // 2), dtype=torch.uint8)
    return GroupedWeight(codes, scales, minimums, table)
