"""What a start imports, and in which state it leaves the process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.process import tiny_model

# Imports what `quire serve` imports before it serves, and prints the names of what has been imported.
_START = """
import sys
from quire.app.cli import prepare_process
prepare_process()
import quire.app.commands, quire.app.serve
from quire.engine.models.torch_import import import_torch
import_torch()
import quire.app.engines, quire.app.lifecycle
print(*sys.modules)
import torch
without = torch.empty(2, 3, device="meta").T.shape
import torch._refs
print(without == (3, 2), hasattr(torch._refs, "flip"), hasattr(torch._meta_registrations, "register_meta"))
"""
_TRACE = """
from quire.engine.models.torch_import import import_torch
import_torch()
import torch
print(tuple(torch.compile(lambda values: values.flip(0), backend="eager")(torch.ones(2, 3)).shape))
"""
# What few models and servers need, and takes a tenth of a second or more to import.
_SLOW = (
    *("torch._meta_registrations", "torch._dynamo", "torch._inductor", "triton", "sympy"),
    *("transformers", "huggingface_hub", "safetensors", "gguf"),
    *("sqlalchemy", "httpx", "httpx2", "rich", "mcp", "openai", "matplotlib", "scipy"),
    *("opentelemetry.sdk", "opentelemetry.exporter", "grpc"),
)


def test_a_start_imports_nothing_slow_that_few_servers_need() -> None:
    imported, checks = printed_by(_START).splitlines()
    assert "quire.app.lifecycle" in imported.split()
    assert [name for name in _SLOW if name in imported.split()] == []
    assert checks == "True True True"


@pytest.mark.slow  # an interpreter that imports all of torch
def test_torch_can_still_trace() -> None:
    assert printed_by(_TRACE) == "(2, 3)\n"


def test_random_weights_need_nothing_that_a_start_leaves_out(tmp_path: Path) -> None:
    """Started as users start it: processes of other tests have imported all of torch."""
    folder = tiny_model(tmp_path / "tiny")
    command = [sys.executable, "-m", "quire", "serve", str(folder), "--load-format", "dummy", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        log = ""
        for line in process.stdout:
            log += line
            if "random numbers (--load-format dummy)" in line:
                break
        process.terminate()
    assert "random numbers (--load-format dummy)" in log, log


def printed_by(script: str) -> str:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
