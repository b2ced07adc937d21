"""The training loop, which can be resumed from a checkpoint."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from training.hear.features import LogMel
from training.hear.model import Hear
from training.hear.recipe import Recipe
from training.hear.recordings import Recordings
from training.hear.tokens import Ids, load_or_build
from training.hear.windows import IGNORED, Step, Steps
from training.loop import CHECKPOINT, CLIP, LOG_EVERY, PAUSE, TOKENIZER
from training.optim import make_optimizers, rate_factor


class Trainer:
    """Model, optimizers and position in the data; ``work`` is the folder of checkpoint, tokenizer and log."""

    def __init__(
        self, recipe: Recipe, work: Path, recordings: Recordings, *, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self.recipe, self.work = recipe, work
        work.mkdir(parents=True, exist_ok=True)
        shape = recipe.shape
        self.tokenizer: Tokenizer = load_or_build(
            work / TOKENIZER, recordings.texts(), shape.text_tokens, shape.seconds
        )
        self.ids = Ids(self.tokenizer)
        torch.manual_seed(recipe.seed)
        self.model = Hear(shape, self.tokenizer.get_vocab_size(), dtype)
        self.optimizers = make_optimizers(self.model, recipe.weight_decay)
        self.steps = Steps(recordings, self.ids, recipe)
        self._log_mel = LogMel(shape.mels)
        weights = torch.ones(self.model.vocabulary)
        weights[[*self.ids.languages.values(), self.ids.no_speech]] = recipe.language_weight
        self._weights = weights
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
        self, until: int, save_every: int, report: Callable[[str], None] = print, pause_file: Path | None = None
    ) -> list[float]:
        """Train up to step ``until`` and return the losses of the steps. No step begins while ``pause_file`` exists."""
        losses: list[float] = []
        meter = Meter()
        while self.step < until:
            wait_while(pause_file)
            losses.append(self._take_step(self.steps.make(self.step), meter))
            self.step += 1
            if self.step % LOG_EVERY == 0:
                self._log(meter.take(), report)
            if self.step % save_every == 0:
                self.save()
        self.save()
        return losses

    def _take_step(self, step: Step, meter: Meter) -> float:
        recipe = self.recipe
        factor = rate_factor(self.step, 0, recipe.steps, recipe.warmup, recipe.decay_share)
        for optimizer, rate in zip(self.optimizers, recipe.rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
        logits, positions = self.model(self._log_mel(step.samples), step.inputs)
        text_loss = self._token_loss(logits, step.labels)
        ctc = ctc_loss(positions, step)
        loss = text_loss + recipe.ctc_weight * ctc
        if not math.isfinite(loss.item()):
            raise FloatingPointError(f"loss {loss.item()} at step {self.step}")
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        meter.add(
            {"loss": text_loss.item(), "ctc": ctc.item(), **self._shares(logits, step.labels)},
            step.samples.numel() / 16_000,
        )
        return loss.item()

    def _token_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), self._weights, ignore_index=IGNORED)

    def _shares(self, logits: Tensor, labels: Tensor) -> dict[str, float]:
        """Share of right languages, and of right text tokens."""
        codes = torch.tensor(list(self.ids.languages.values()))
        language, text = torch.isin(labels, codes), (labels >= 0) & (labels < self.ids.text_count)
        right = logits.argmax(-1) == labels
        return {"language": right[language].float().mean().item(), "text": right[text].float().mean().item()}

    def _log(self, measured: dict[str, float], report: Callable[[str], None]) -> None:
        line = {"step": self.step, **measured}
        with (self.work / "log.jsonl").open("a", encoding="utf-8") as log:
            log.write(json.dumps(line) + "\n")
        report(" ".join(f"{name} {value}" for name, value in line.items()))


def wait_while(pause_file: Path | None) -> None:
    """Return when the file does not exist."""
    while pause_file is not None and pause_file.exists():
        time.sleep(PAUSE)


def ctc_loss(positions: Tensor, step: Step) -> Tensor:
    """The CTC loss of the encoder's positions (windows, positions, text tokens + 1) for a text token."""
    likely = F.log_softmax(positions, dim=-1).transpose(0, 1)
    lengths = torch.full((positions.shape[0],), positions.shape[1])
    total = F.ctc_loss(
        likely, step.text, lengths, step.text_lengths, blank=positions.shape[2] - 1, reduction="sum", zero_infinity=True
    )
    return total / max(1, len(step.text))


class Meter:
    """Means since the last report, and seconds of audio per second."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self.figures: list[dict[str, float]] = []
        self.seconds = 0.0
        self.started, self.cpu_started = time.monotonic(), time.process_time()

    def add(self, figures: dict[str, float], seconds: float) -> None:
        """Record a step."""
        self.figures.append(figures)
        self.seconds += seconds

    def take(self) -> dict[str, float]:
        """Return the means, and seconds of audio per second of the clock and of CPU time; and reset."""
        result = {
            name: round(sum(figure[name] for figure in self.figures) / len(self.figures), 4) for name in self.figures[0]
        }
        result["audio_per_second"] = round(self.seconds / (time.monotonic() - self.started), 1)
        result["audio_per_cpu_second"] = round(self.seconds / (time.process_time() - self.cpu_started), 1)
        self._reset()
        return result
