"""Muon for the matrices, AdamW for embedding and norms, and the warmup-stable-decay schedule."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

MOMENTUM = 0.95
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5


def orthogonalise(matrices: Tensor) -> Tensor:
    """Orthogonalise a stack of wide matrices by Newton-Schulz iteration: all singular values become close to one."""
    a, b, c = NEWTON_SCHULZ
    x = matrices.bfloat16()
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.to(matrices.dtype)


class Muon(torch.optim.Optimizer):
    """The Muon optimizer: momentum with orthogonalised updates."""

    def __init__(self, params: Iterable[Tensor], lr: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient with its orthogonalised momentum."""
        for group in self.param_groups:
            stacks: dict[tuple[int, int], list[Tensor]] = {}
            for weight in group["params"]:
                if weight.grad is not None:
                    stacks.setdefault((min(weight.shape), max(weight.shape)), []).append(weight)
            for weights in stacks.values():
                self._step_stack(weights, group["lr"], group["weight_decay"])

    def _step_stack(self, weights: list[Tensor], rate: float, decay: float) -> None:
        """Update all matrices of one size together, because batched small products are faster."""
        wide = []
        for weight in weights:
            momentum: Tensor = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
            gradient = _gradient(weight)
            momentum.lerp_(gradient, 1 - MOMENTUM)
            update = gradient.lerp(momentum, MOMENTUM)
            wide.append(update if update.shape[0] <= update.shape[1] else update.T)
        for weight, update in zip(weights, orthogonalise(torch.stack(wide)), strict=True):
            tall = weight.shape[0] > weight.shape[1]
            scale = (weight.shape[0] / weight.shape[1]) ** 0.5 if tall else 1.0
            weight.mul_(1 - rate * decay)
            weight.add_(update.T if tall else update, alpha=-rate * scale)


def _gradient(weight: Tensor) -> Tensor:
    if weight.grad is None:
        raise ValueError(f"a matrix of size {tuple(weight.shape)} has no gradient")
    return weight.grad


def make_optimizers(model: nn.Module, decay: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the layers and AdamW for the rest; the training loop sets their rates."""
    matrices = [weight for name, weight in model.named_parameters() if weight.ndim == 2 and "embed" not in name]
    others = [weight for name, weight in model.named_parameters() if weight.ndim < 2 or "embed" in name]
    return [Muon(matrices, 0.0, decay), torch.optim.AdamW(others, 0.0, betas=(0.9, 0.95), weight_decay=0.0)]


def rate_factor(step: int, warmup_start: int, total: int, warmup: int, decay_share: float) -> float:
    """Return the learning rate factor: linear warm-up from step ``warmup_start``, constant, linear decay to 0."""
    left = (total - step) / max(1.0, total * decay_share)
    return min(1.0, left, (step - warmup_start + 1) / warmup)
