"""Trains quire-nano-hear: ``python -m training.hear.run`` records, trains, or resumes, and exports."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch

from training.hear.export import export
from training.hear.loop import Trainer, wait_while
from training.hear.recipe import Recipe
from training.hear.recordings import Recordings

EXPORT = Path(__file__).parents[2] / "quire" / "bundled" / "nano_hear"


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    recipe = Recipe()
    parser = argparse.ArgumentParser(prog="python -m training.hear.run", description=__doc__)
    parser.add_argument(
        "--work", type=Path, default=Path("build/hear"), help="work folder of recordings, checkpoint, tokenizer and log"
    )
    parser.add_argument("--out", type=Path, default=EXPORT, help="output folder of the exported model")
    parser.add_argument("--steps", type=int, default=recipe.steps, help="number of steps of the whole run")
    parser.add_argument(
        "--until", type=int, help="stop early at this step and export; the learning rate schedule stays that of --steps"
    )
    parser.add_argument("--shards", type=int, default=recipe.shards, help="thousands of recorded sentences")
    parser.add_argument("--seed", type=int, default=recipe.seed)
    parser.add_argument("--save-every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--pause-file", type=Path, help="nothing is recorded and no step begins while this file exists")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: the default of torch")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Record, train and export."""
    chosen = options(arguments)
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    recipe = replace(Recipe(), steps=chosen.steps, shards=chosen.shards, seed=chosen.seed)
    recordings = Recordings(
        chosen.work / "recordings", recipe.seed, recipe.shards, max(1, chosen.threads),
        wait=lambda: wait_while(chosen.pause_file),
    )  # fmt: skip
    trainer = Trainer(recipe, chosen.work, recordings)
    if trainer.resume():
        print(f"resuming from step {trainer.step}", flush=True)
    trainer.train(
        min(chosen.until or recipe.steps, recipe.steps), chosen.save_every, lambda line: print(line, flush=True),
        chosen.pause_file,
    )  # fmt: skip
    export(trainer.model, trainer.tokenizer, chosen.out)
    print(f"exported to {chosen.out}", flush=True)


if __name__ == "__main__":
    main()
