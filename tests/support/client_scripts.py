"""Scripts of `tests/clients`, which use other projects' clients."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "clients"


def run_script(script: str, *arguments: str) -> None:
    """Run a script with Node or in its own environment, and check that it succeeds."""
    runner = (
        "node" if script.endswith(".mjs") else str(FOLDER / ".venvs" / script.removesuffix(".py") / "bin" / "python")
    )
    # huggingface_hub would refuse to send anything, also to this server.
    env = {**os.environ, "OPENAI_API_KEY": "none", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "0"}
    ran = subprocess.run(
        [runner, script, *arguments],
        cwd=FOLDER,
        env=env,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def scripts(kind: str = "") -> list[str]:
    """Names of the scripts of a kind: those that need the same servers have the same prefix."""
    return sorted(path.name for path in FOLDER.glob(f"use_{kind}*"))
