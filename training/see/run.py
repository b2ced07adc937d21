"""Trains quire-nano-see: ``python -m training.see.run`` trains, or resumes, and exports."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch

from training.see.export import export
from training.see.loop import Trainer
from training.see.recipe import Recipe

EXPORT = Path(__file__).parents[2] / "quire" / "bundled" / "nano_see"


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    recipe = Recipe()
    parser = argparse.ArgumentParser(prog="python -m training.see.run", description=__doc__)
    parser.add_argument(
        "--work", type=Path, default=Path("build/see"), help="work folder of checkpoint, tokenizer and log"
    )
    parser.add_argument("--out", type=Path, default=EXPORT, help="output folder of the exported model")
    parser.add_argument("--steps", type=int, default=recipe.steps, help="number of steps of the whole run")
    parser.add_argument(
        "--until", type=int, help="stop early at this step and export; the learning rate schedule stays that of --steps"
    )
    parser.add_argument("--seed", type=int, default=recipe.seed)
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--measure-every", type=int, default=500, help="steps between measurements")
    parser.add_argument("--pause-file", type=Path, help="no step begins while this file exists")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: the default of torch")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Train and export."""
    chosen = options(arguments)
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    recipe = replace(Recipe(), steps=chosen.steps, seed=chosen.seed)
    trainer = Trainer(recipe, chosen.work)
    if trainer.resume():
        print(f"resuming from step {trainer.step}", flush=True)
    trainer.train(
        min(chosen.until or recipe.steps, recipe.steps), chosen.save_every, chosen.measure_every,
        lambda line: print(line, flush=True), chosen.pause_file,
    )  # fmt: skip
    export(trainer.model, trainer.tokenizer, chosen.out)
    print(f"exported to {chosen.out}", flush=True)


if __name__ == "__main__":
    main()
