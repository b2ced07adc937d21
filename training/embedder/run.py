"""Trains quire-nano-embed: ``python -m training.embedder.run`` trains, or resumes, and exports."""

from __future__ import annotations

import argparse
import shutil
from dataclasses import replace
from pathlib import Path

import torch

from training.embedder.export import export
from training.embedder.loop import Trainer
from training.embedder.recipe import Recipe
from training.loop import TOKENIZER

EXPORT = Path(__file__).parents[2] / "quire" / "bundled" / "nano_embed"


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    recipe = Recipe()
    parser = argparse.ArgumentParser(prog="python -m training.embedder.run", description=__doc__)
    parser.add_argument(
        "--work", type=Path, default=Path("build/embed"), help="work folder of checkpoint, tokenizer and log"
    )
    parser.add_argument("--out", type=Path, default=EXPORT, help="output folder of the exported model")
    parser.add_argument("--steps", type=int, default=recipe.steps, help="number of steps of the whole run")
    parser.add_argument(
        "--until", type=int, help="stop early at this step and export; the learning rate schedule stays that of --steps"
    )
    parser.add_argument(
        "--start", type=Path, help="without a checkpoint: start from the weights and tokenizer of this folder"
    )
    parser.add_argument("--start-step", type=int, default=0, help="the step number of these weights")
    parser.add_argument("--pairs", type=int, default=recipe.pairs, help="pairs of a step")
    parser.add_argument("--layers", type=int, default=recipe.shape.layers)
    parser.add_argument("--vocabulary", type=int, default=recipe.shape.vocabulary, help="tokens of the tokenizer")
    parser.add_argument("--seed", type=int, default=recipe.seed)
    parser.add_argument("--save-every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--pause-file", type=Path, help="no step begins while this file exists")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: the default of torch")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Train and export."""
    chosen = options(arguments)
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    recipe = Recipe()
    shape = replace(recipe.shape, layers=chosen.layers, vocabulary=chosen.vocabulary)
    recipe = replace(recipe, shape=shape, steps=chosen.steps, pairs=chosen.pairs, seed=chosen.seed)
    if chosen.start and not (chosen.work / TOKENIZER).exists():
        chosen.work.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(chosen.start / TOKENIZER, chosen.work / TOKENIZER)
    trainer = Trainer(recipe, chosen.work)
    if trainer.resume():
        print(f"resuming from step {trainer.step}", flush=True)
    elif chosen.start:
        trainer.start_from(chosen.start, chosen.start_step)
    trainer.train(
        min(chosen.until or recipe.steps, recipe.steps), chosen.save_every, lambda line: print(line, flush=True),
        chosen.pause_file,
    )  # fmt: skip
    export(trainer.model, trainer.tokenizer, recipe.dimensions, chosen.out)
    print(f"exported to {chosen.out}", flush=True)


if __name__ == "__main__":
    main()
