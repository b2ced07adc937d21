"""The training loop, which can be resumed from a checkpoint."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from training.embedder.batches import Step, Steps
from training.embedder.loss import contrastive_loss, share_right
from training.embedder.model import Embedder
from training.embedder.recipe import Recipe
from training.embedder.tokens import load_or_build
from training.loop import CHECKPOINT, CLIP, LOG_EVERY, PAUSE, TOKENIZER
from training.optim import make_optimizers, rate_factor


class Trainer:
    """Model, optimizers and position in the data; ``work`` is the folder of checkpoint, tokenizer and log."""

    def __init__(self, recipe: Recipe, work: Path, *, dtype: torch.dtype = torch.bfloat16) -> None:
        self.work = work
        work.mkdir(parents=True, exist_ok=True)
        self.tokenizer: Tokenizer = load_or_build(work / TOKENIZER, recipe.seed, recipe.shape.vocabulary)
        self.recipe = replace(recipe, shape=replace(recipe.shape, vocabulary=self.tokenizer.get_vocab_size()))
        torch.manual_seed(recipe.seed)
        self.model = Embedder(self.recipe.shape, dtype)
        self.optimizers = make_optimizers(self.model, recipe.weight_decay)
        self.steps = Steps(self.tokenizer, self.recipe)
        self.step = self.warmup_start = 0

    def start_from(self, folder: Path, step: int) -> None:
        """Load the weights of an exported folder as those of ``step``; the learning rates warm up again."""
        known = self.model.state_dict()
        weights = load_file(folder / "model.safetensors")
        self.model.load_state_dict({name: weights[name].float() for name in known})
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

    def train(
        self, until: int, save_every: int, report: Callable[[str], None] = print, pause_file: Path | None = None
    ) -> list[float]:
        """Train up to step ``until`` and return the losses of the steps. No step begins while ``pause_file`` exists."""
        losses: list[float] = []
        meter = Meter()
        while self.step < until:
            while pause_file is not None and pause_file.exists():
                time.sleep(PAUSE)
            losses.append(self._take_step(self.steps.make(self.step), meter))
            self.step += 1
            if self.step % LOG_EVERY == 0:
                self._log(meter.take(), report)
            if self.step % save_every == 0:
                self.save()
        self.save()
        return losses

    def embed(self, step: Step) -> Tensor:
        """Return the embeddings of all texts of a step, in order."""
        embedded: Tensor = self.model(step.groups)
        return embedded[torch.argsort(step.places)]

    def _take_step(self, step: Step, meter: Meter) -> float:
        recipe = self.recipe
        factor = rate_factor(self.step, self.warmup_start, recipe.steps, recipe.warmup, recipe.decay_share)
        for optimizer, rate in zip(self.optimizers, recipe.rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
        embeddings = self.embed(step)
        loss = contrastive_loss(embeddings, step.queries, step.allowed, recipe.temperature, recipe.dimensions)
        value = loss.item()
        if not math.isfinite(value):
            raise FloatingPointError(f"loss {value} at step {self.step}")
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        meter.add(value, share_right(embeddings.detach(), step.queries, step.allowed), step.tokens)
        return value

    def _log(self, measured: dict[str, float], report: Callable[[str], None]) -> None:
        line = {"step": self.step, **measured}
        with (self.work / "log.jsonl").open("a", encoding="utf-8") as log:
            log.write(json.dumps(line) + "\n")
        report(" ".join(f"{name} {value}" for name, value in line.items()))


class Meter:
    """Mean loss, share of right answers, and tokens per second since the last report."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self.losses: list[float] = []
        self.right: list[float] = []
        self.tokens = 0
        self.started, self.cpu_started = time.monotonic(), time.process_time()

    def add(self, loss: float, right: float, tokens: int) -> None:
        """Record a step."""
        self.losses.append(loss)
        self.right.append(right)
        self.tokens += tokens

    def take(self) -> dict[str, float]:
        """Return the means, and tokens per second of the clock and of CPU time; and reset."""
        count = len(self.losses)
        result: dict[str, float] = {
            "loss": round(sum(self.losses) / count, 4),
            "right": round(sum(self.right) / count, 3),
            "tokens_per_second": round(self.tokens / (time.monotonic() - self.started)),
            "tokens_per_cpu_second": round(self.tokens / (time.process_time() - self.cpu_started)),
        }
        self._reset()
        return result
