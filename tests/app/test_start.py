"""What a start imports, and in which state it leaves the process."""

from __future__ import annotations

import subprocess
import sys

# Imports what `quire serve` imports before it serves, and prints the names of what has been imported.
_START = """
import sys
from quire.app.cli import prepare_process
prepare_process()
import quire.app.commands, quire.app.serve
from quire.engine.models.torch_import import import_shapes, import_torch
import_torch()
import quire.app.lifecycle
print(*sys.modules)
import torch
without = torch.empty(2, 3, device="meta").T.shape
import_shapes()
import torch._meta_registrations
print(without == (3, 2), hasattr(torch._meta_registrations, "register_meta"))
"""
# What few models and servers need, and takes a tenth of a second or more to import.
_SLOW = (
    *("torch._meta_registrations", "torch._dynamo", "torch._inductor", "triton", "sympy"),
    *("transformers", "huggingface_hub", "safetensors", "gguf"),
    *("sqlalchemy", "httpx", "httpx2", "rich", "mcp", "openai", "matplotlib", "scipy"),
    *("opentelemetry.sdk", "opentelemetry.exporter", "grpc"),
)


def test_a_start_imports_nothing_slow_that_few_servers_need() -> None:
    shown = subprocess.run([sys.executable, "-c", _START], capture_output=True, text=True, check=True).stdout
    imported, checks = shown.splitlines()
    assert "quire.app.lifecycle" in imported.split()
    assert [name for name in _SLOW if name in imported.split()] == []
    assert checks == "True True"
