"""Trains quire-nano: ``python -m training.run`` trains (or resumes from the last checkpoint) and exports."""

from __future__ import annotations

import argparse
import shutil
from dataclasses import replace
from pathlib import Path

import torch

from training.export import export
from training.loop import TOKENIZER, Trainer
from training.recipe import Recipe

EXPORT = Path(__file__).parent.parent / "quire" / "bundled" / "nano"


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    recipe = Recipe()
    parser = argparse.ArgumentParser(prog="python -m training.run", description=__doc__)
    parser.add_argument(
        "--work", type=Path, default=Path("build/nano"), help="work folder of checkpoint, tokenizer and log"
    )
    parser.add_argument("--out", type=Path, default=EXPORT, help="output folder of the exported model")
    parser.add_argument("--steps", type=int, default=recipe.steps, help="number of steps of the whole run")
    parser.add_argument(
        "--until", type=int, help="stop early at this step and export; the learning rate schedule stays that of --steps"
    )
    parser.add_argument("--start", type=Path, help="without a checkpoint: start from the weights of this folder")
    parser.add_argument("--start-step", type=int, default=0, help="the step number of these weights")
    parser.add_argument("--teacher", type=Path,
                        help="hold the themes that are not new in a phase to this folder's predictions")  # fmt: skip
    parser.add_argument("--warmup", type=int, default=recipe.warmup, help="steps of warm-up of the learning rates")
    parser.add_argument("--decay-share", type=float, default=recipe.decay_share,
                        help="share of --steps over which the learning rates decay to 0")  # fmt: skip
    parser.add_argument("--tokens-per-batch", type=int, default=recipe.tokens_per_batch)
    parser.add_argument("--width", type=int, default=recipe.width)
    parser.add_argument("--layers", type=int, default=recipe.layers)
    parser.add_argument("--heads", type=int, default=recipe.heads)
    parser.add_argument("--inner", type=int, default=recipe.inner)
    parser.add_argument("--seed", type=int, default=recipe.seed)
    parser.add_argument("--save-every", type=int, default=200, help="steps between checkpoints")
    parser.add_argument("--pause-file", type=Path, help="no step begins while this file exists")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: the default of torch")
    parser.add_argument(
        "--resume", action=argparse.BooleanOptionalAction, default=True, help="resume from the checkpoint"
    )
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=True, help="compile the layers (faster)"
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Train and export."""
    chosen = options(arguments)
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    recipe = replace(
        Recipe(), steps=chosen.steps, tokens_per_batch=chosen.tokens_per_batch, width=chosen.width,
        layers=chosen.layers, heads=chosen.heads, inner=chosen.inner, seed=chosen.seed,
        warmup=chosen.warmup, decay_share=chosen.decay_share,
    )  # fmt: skip
    if chosen.start and not (chosen.work / TOKENIZER).exists():
        chosen.work.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(chosen.start / TOKENIZER, chosen.work / TOKENIZER)
    trainer = Trainer(recipe, chosen.work, compiled=chosen.compile)
    if chosen.resume and trainer.resume():
        print(f"resuming from step {trainer.step}", flush=True)
    elif chosen.start:
        trainer.start_from(chosen.start, chosen.start_step)
    if chosen.teacher:
        trainer.learn_from(chosen.teacher)
    trainer.train(
        min(chosen.until or recipe.steps, recipe.steps), chosen.save_every, lambda line: print(line, flush=True),
        chosen.pause_file,
    )  # fmt: skip
    if trainer.step == recipe.steps:
        trainer.average()
    export(trainer.model, trainer.tokenizer, chosen.out)
    print(f"exported to {chosen.out}", flush=True)


if __name__ == "__main__":
    main()
