"""The training loop, which can be resumed from a checkpoint."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import nn

from training.batches import Batch, Batches
from training.model import Nano, Shape
from training.optim import make_optimizers, rate_factor
from training.recipe import Phase, Recipe
from training.tokens import load_or_build, padded_size

CLIP = 1.0
CHECKPOINT = "checkpoint.pt"
EARLIER = "earlier.pt"  # weights of an earlier step, averaged with the final ones
TOKENIZER = "tokenizer.json"
LOG_EVERY = 20
PAUSE = 1.0  # seconds between looks at the pause file


class Trainer:
    """Model, optimizers and position in the data; ``work`` is the folder of checkpoint, tokenizer and log."""

    def __init__(
        self, recipe: Recipe, work: Path, *, compiled: bool = True, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self.recipe, self.work = recipe, work
        work.mkdir(parents=True, exist_ok=True)
        self.tokenizer: Tokenizer = load_or_build(work / TOKENIZER, recipe.seed, recipe.pieces, recipe.spaced)
        torch.manual_seed(recipe.seed)
        shape = Shape(padded_size(self.tokenizer), recipe.width, recipe.layers, recipe.heads, recipe.inner)
        self.model = Nano(shape, dtype)
        if compiled:
            self.model.compile()
        self.optimizers = make_optimizers(self.model, recipe.weight_decay)
        self.teacher: Nano | None = None
        self.step = self.warmup_start = 0

    def learn_from(self, folder: Path) -> None:
        """Hold the old themes of a phase to the predictions of an exported folder, besides the text."""
        self.teacher = Nano(self.model.shape, self.model.dtype)
        self.teacher.load_state_dict(_weights(folder))

    def start_from(self, folder: Path, step: int) -> None:
        """Load the weights of an exported folder as those of ``step``; the learning rate warms up again."""
        self.model.load_state_dict(_weights(folder))
        self.step = self.warmup_start = step

    def resume(self) -> bool:
        """Load the checkpoint; return False if there is none."""
        path = self.work / CHECKPOINT
        if not path.exists():
            return False
        state: dict[str, Any] = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.warmup_start = state["step"], state["began"]
        return True

    def save(self) -> None:
        """Write the checkpoint; an interrupted write keeps the old one."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
            "began": self.warmup_start,
            "recipe": asdict(self.recipe),
        }
        temporary = self.work / f"{CHECKPOINT}.new"
        torch.save(state, temporary)
        temporary.replace(self.work / CHECKPOINT)

    def average(self) -> None:
        """Average the weights with those of the recipe's ``average_from`` step, if these were saved."""
        path = self.work / EARLIER
        if path.exists():
            earlier: dict[str, torch.Tensor] = torch.load(path, weights_only=True)
            now = self.model.state_dict()
            self.model.load_state_dict({name: torch.lerp(earlier[name], now[name], 0.5) for name in now})

    def train(
        self, until: int, save_every: int, report: Callable[[str], None] = print, pause_file: Path | None = None
    ) -> list[float]:
        """Train up to step ``until`` and return the losses of the steps. No step begins while ``pause_file`` exists."""
        losses: list[float] = []
        meter = Meter()
        while self.step < until:
            phase, start = self.recipe.phase_at(self.step)
            seed = f"{self.recipe.seed}-{phase.name}"
            batch_source = Batches(self.tokenizer, seed, phase.mix, self.recipe.tokens_per_batch)
            batches = batch_source.start_at((self.step - start) * phase.batches)
            while self.step < until and self.recipe.phase_at(self.step)[0] is phase:
                while pause_file is not None and pause_file.exists():
                    time.sleep(PAUSE)
                losses.append(self._take_step(list(islice(batches, phase.batches)), phase, meter))
                self.step += 1
                if self.step == self.recipe.average_from:
                    torch.save(self.model.state_dict(), self.work / EARLIER)
                if self.step % LOG_EVERY == 0:
                    self._log(meter, phase.name, report)
                if self.step % save_every == 0:
                    self.save()
        self.save()
        return losses

    def _take_step(self, batches: list[Batch], phase: Phase, meter: Meter) -> float:
        recipe = self.recipe
        factor = rate_factor(self.step, self.warmup_start, recipe.steps, recipe.warmup, recipe.decay_share)
        for optimizer, rate in zip(self.optimizers, phase.rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
        value = sum(self._add_gradient(batch, len(batches), phase.new) for batch in batches)
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if not math.isfinite(value):
            raise FloatingPointError(f"loss {value} at step {self.step}")
        meter.add(value, sum(batch.ids.numel() for batch in batches))
        return value

    def _add_gradient(self, batch: Batch, share: int, new: tuple[str, ...]) -> float:
        taught = torch.tensor([theme not in new for theme in batch.themes])
        loss = self.model.loss(batch.ids, batch.loss_mask, self.teacher, taught) / share
        loss.backward()
        return loss.item()

    def _log(self, meter: Meter, phase: str, report: Callable[[str], None]) -> None:
        loss, speed = meter.take()
        line = {"step": self.step, "phase": phase, "loss": round(loss, 4), "tokens_per_second": round(speed)}
        with (self.work / "log.jsonl").open("a", encoding="utf-8") as log:
            log.write(json.dumps(line) + "\n")
        report(f"step {self.step}/{self.recipe.steps} {phase} loss {loss:.4f} {speed:.0f} tokens/s")


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: weight.float() for name, weight in load_file(folder / "model.safetensors").items()}


class Meter:
    """Mean loss and tokens per second since the last report."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self.losses: list[float] = []
        self.tokens = 0
        self.started = time.monotonic()

    def add(self, loss: float, tokens: int) -> None:
        """Record a step."""
        self.losses.append(loss)
        self.tokens += tokens

    def take(self) -> tuple[float, float]:
        """Return mean loss and tokens per second, and reset."""
        result = sum(self.losses) / len(self.losses), self.tokens / (time.monotonic() - self.started)
        self._reset()
        return result
