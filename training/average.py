"""Averages the weights of exported folders: ``python -m training.average OUT FOLDER FOLDER ...``."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

WEIGHTS = "model.safetensors"


def average(out: Path, folders: list[Path]) -> None:
    """Write the mean of the weights of the folders; all other files are those of the first folder."""
    parts = [load_file(folder / WEIGHTS) for folder in folders]
    mean = {
        name: torch.stack([part[name].float() for part in parts]).mean(0).to(torch.bfloat16).contiguous()
        for name in parts[0]
    }
    out.mkdir(parents=True, exist_ok=True)
    for path in folders[0].iterdir():
        if path.name not in (WEIGHTS, "README.md"):
            shutil.copyfile(path, out / path.name)
    save_file(mean, out / WEIGHTS, metadata={"format": "pt"})


if __name__ == "__main__":
    average(Path(sys.argv[1]), [Path(folder) for folder in sys.argv[2:]])
