"""The training loop, which can be resumed from a checkpoint, and measures held-out pictures as it goes."""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from training.loop import CHECKPOINT, CLIP, LOG_EVERY, PAUSE, TOKENIZER
from training.optim import make_optimizers, rate_factor
from training.see.batches import IGNORED, Asked, Step, Steps
from training.see.heldout import group_of, sights
from training.see.model import See
from training.see.recipe import Recipe
from training.see.tokens import Ids, load_or_build, padded_size

HELDOUT_PICTURES, HELDOUT_SEED = 300, 1  # not the seed of the evaluation


class Trainer:
    """Model, optimizers and position in the data; ``work`` is the folder of checkpoint, tokenizer and log."""

    def __init__(self, recipe: Recipe, work: Path, *, dtype: torch.dtype = torch.bfloat16) -> None:
        self.recipe, self.work = recipe, work
        work.mkdir(parents=True, exist_ok=True)
        self.tokenizer: Tokenizer = load_or_build(work / TOKENIZER, recipe)
        self.ids = Ids(self.tokenizer)
        torch.manual_seed(recipe.seed)
        self.model = See(recipe.shape, padded_size(self.tokenizer), self.ids.image, dtype)
        self.optimizers = make_optimizers(self.model, recipe.weight_decay)
        self.steps = Steps(self.ids, recipe)
        self.step = 0

    def resume(self) -> bool:
        """Load the checkpoint; return False if there is none."""
        path = self.work / CHECKPOINT
        if not path.exists():
            return False
        state: dict[str, Any] = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step = state["step"]
        return True

    def save(self) -> None:
        """Write the checkpoint; an interrupted write keeps the old one."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
            "recipe": asdict(self.recipe),
        }
        temporary = self.work / f"{CHECKPOINT}.new"
        torch.save(state, temporary)
        temporary.replace(self.work / CHECKPOINT)

    def train(
        self,
        until: int,
        save_every: int,
        measure_every: int = 500,
        report: Callable[[str], None] = print,
        pause_file: Path | None = None,
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
            if self.step % measure_every == 0 and self.step > self.recipe.tower_steps:
                self._log(self.measure(*self.steps.heldout(sights(HELDOUT_PICTURES, HELDOUT_SEED))), report)
        self.save()
        return losses

    @torch.no_grad()
    def measure(self, step: Step, asked: list[Asked]) -> dict[str, float]:
        """Return the percentage of right answers by group.

        Greedy decoding gives the right answer if each of its tokens is the likeliest after those before it, so the
        answers need not be generated.
        """
        right: defaultdict[str, list[bool]] = defaultdict(list)
        size = self.recipe.pictures
        likeliest = torch.cat([
            self.model.logits(self.model(*(part[at : at + size] for part in _inputs(step)))[0]).argmax(-1)
            for at in range(0, len(step.tokens), size)
        ])  # fmt: skip
        matches = likeliest == step.labels
        for place in asked:
            right[group_of(place.question)].append(bool(matches[place.row, place.start : place.end].all()))
        return {group: round(100 * sum(values) / len(values), 1) for group, values in sorted(right.items())}

    def _take_step(self, step: Step, meter: Meter) -> float:
        recipe = self.recipe
        factor = rate_factor(self.step, 0, recipe.steps, recipe.warmup, recipe.decay_share)
        for optimizer, rate in zip(self.optimizers, recipe.rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
        figures: dict[str, float] = {}
        if len(step.tokens):
            states, patches = self.model(*_inputs(step))
            counted = step.labels != IGNORED
            logits, labels = self.model.logits(states[counted]), step.labels[counted]
            loss = F.cross_entropy(logits, labels)
            figures = {"loss": loss.item(), "tokens_right": (logits.argmax(-1) == labels).float().mean().item()}
        else:
            patches, loss = self.model.tower(step.pixels), torch.zeros(())
        what, which = self.model.classes(patches)
        shown = F.cross_entropy(what.flatten(0, 1), step.what.flatten()) + F.cross_entropy(
            which.flatten(0, 1), step.which.flatten()
        )
        loss = loss + recipe.patch_weight * shown
        if not math.isfinite(loss.item()):
            raise FloatingPointError(f"loss {loss.item()} at step {self.step}")
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        filled = step.what > 0
        right = (what.argmax(-1) == step.what)[filled].float().mean().item()
        meter.add(figures | {"patches": shown.item(), "patches_right": right}, len(step.pixels))
        return loss.item()

    def _log(self, measured: dict[str, float], report: Callable[[str], None]) -> None:
        line = {"step": self.step, **measured}
        with (self.work / "log.jsonl").open("a", encoding="utf-8") as log:
            log.write(json.dumps(line) + "\n")
        report(" ".join(f"{name} {value}" for name, value in line.items()))


def _inputs(step: Step) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return step.pixels, step.tokens, step.positions, step.segments


class Meter:
    """Means since the last report, each over the steps that have the figure, and pictures per second."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self.figures: defaultdict[str, list[float]] = defaultdict(list)
        self.pictures = 0
        self.started, self.cpu_started = time.monotonic(), time.process_time()

    def add(self, figures: dict[str, float], pictures: int) -> None:
        """Record a step."""
        for name, value in figures.items():
            self.figures[name].append(value)
        self.pictures += pictures

    def take(self) -> dict[str, float]:
        """Return the means, and pictures per second of the clock and of CPU time; and reset."""
        result = {name: round(sum(values) / len(values), 4) for name, values in self.figures.items()}
        result["per_second"] = round(self.pictures / (time.monotonic() - self.started), 1)
        result["per_cpu_second"] = round(self.pictures / (time.process_time() - self.cpu_started), 1)
        self._reset()
        return result
