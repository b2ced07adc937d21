"""Checkpoints that are changed at random are read, or refused with an error that names a file: with bounded memory.

`FUZZ_SECONDS` says for how long the slow tests try.
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Protocol

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save

from quire.config.options import ModelOptions
from quire.engine.models.checkpoint.checkpoint import SafetensorsCheckpoint
from quire.engine.models.checkpoint.gguf.folder import model_folder
from quire.engine.models.config.quantization import quantization_section
from quire.engine.models.errors import ModelError
from quire.engine.models.loader import open_checkpoint
from quire.engine.models.model_config import read_model_config
from tests.support import float_checkpoints, integer_checkpoints
from tests.support.changed_files import changed_bytes, changed_tensors, changed_tree
from tests.support.engine import load
from tests.support.gguf_models import add_value, write_gguf
from tests.support.gguf_projectors import MODEL, PROJECTOR, write_seeing
from tests.support.integer_checkpoints import Variant
from tests.support.models import make_model, save_model
from tests.support.stored_weights import MODULE
from tests.support.vision_models import make_composite, save_seeing

MOST_MEMORY = 400 << 20  # by which the process grows: the files have some hundred kilobytes
MOST_CHARACTERS = 4000


class Attempt(Protocol):
    """Changes a checkpoint, and reads it.

    Attributes:
        subjects: what an error must name.
    """

    subjects: tuple[str, ...]

    def __call__(self, source: random.Random) -> None: ...


VARIANTS: dict[str, Variant] = {
    **float_checkpoints.VARIANTS,
    "gptq": integer_checkpoints.gptq(),
    "gptq-3-order": integer_checkpoints.gptq(3, ordered=True),
    "awq": integer_checkpoints.awq(),
    "awq-gemv": integer_checkpoints.awq("gemv"),
    "auto-round": integer_checkpoints.auto_round("auto_round:auto_gptq"),
    "pack-4": integer_checkpoints.compressed(symmetric=False, actorder="group"),
    "int-8": integer_checkpoints.compressed("int-quantized", 8, strategy="channel"),
    "hqq": integer_checkpoints.hqq(),
    "hqq-across": integer_checkpoints.hqq(axis=0),
    "torchao-4": integer_checkpoints.torchao("Int4Tensor"),
    "torchao-8": integer_checkpoints.torchao("Int8Tensor", None),
}


class Formats:
    """Changes the section of a config, the tensors of a weight, or the bytes of its file."""

    def __init__(self, folder: Path) -> None:
        self.subjects: tuple[str, ...] = ()
        self._folder = folder
        self._bases = []
        for variant in VARIANTS.values():
            weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
            tensors = {f"{MODULE}.{name}": tensor for name, tensor in variant.pack(weight)[0].items()}
            metadata = {} if variant.metadata is None else {f"{MODULE}.weight": variant.metadata(weight)}
            self._bases.append((json.loads(json.dumps(variant.section)), tensors, metadata))

    def __call__(self, source: random.Random) -> None:
        section, tensors, metadata = source.choice(self._bases)
        kind = source.randrange(3)
        self.subjects = ("model.safetensors: ", MODULE) if kind == 1 else ()
        section = changed_tree(section, source) if kind == 0 else section
        tensors = changed_tensors(tensors, source) if kind == 1 else tensors
        if metadata and not source.randrange(4):
            metadata = {
                name: changed_bytes(text.encode(), source).decode(errors="replace") for name, text in metadata.items()
            }
        data = save(
            {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()},
            {"format": "pt", **metadata},
        )
        data = changed_bytes(data, source, 1500) if kind == 2 else data
        (self._folder / "model.safetensors").write_bytes(data)
        checked = quantization_section(SimpleNamespace(quantization_config=section), self._folder)
        with SafetensorsCheckpoint(self._folder, checked) as checkpoint:
            for _, tensor in checkpoint.tensors(torch.float32, lambda _: None):
                tensor.numel()


class Gguf:
    """Changes the metadata, the names and shapes, or the bytes of a model's file or of its tower's."""

    def __init__(self, folder: Path) -> None:
        self.subjects: tuple[str, ...] = ()
        self._folder = folder / "changed"
        self._folder.mkdir()
        for name in ("text", "seeing"):
            (folder / name).mkdir()
        text = write_gguf(save_model(make_model("llama"), folder / "twin"), folder / "text" / MODEL)
        twin = save_seeing(make_composite("qwen2_5_vl"), "qwen2_5_vl", folder / "seeing-twin")
        write_seeing(twin, folder / "seeing")
        self._bases = [
            {MODEL: Contents(text)},
            {name: Contents(folder / "seeing" / name) for name in (MODEL, PROJECTOR)},
        ]

    def __call__(self, source: random.Random) -> None:
        files = source.choice(self._bases)
        chosen = source.choice(sorted(files))
        for path in self._folder.iterdir():
            path.unlink()
        for name, contents in files.items():
            contents.write(self._folder / name, source if name == chosen else None)
        folder = model_folder(self._folder / MODEL)
        config = read_model_config(folder)
        if not source.randrange(4):
            load(folder)
            return
        with open_checkpoint(folder, config, ModelOptions()) as checkpoint:
            for _, tensor in checkpoint.tensors(torch.float32, lambda _: None):
                tensor.numel()


ODD = (
    0,
    1,
    2,
    3,
    7,
    1 << 16,
    (1 << 31) - 1,
    1 << 63,
    -1,
    0.0,
    1e30,
    float("nan"),
    "",
    "x",
    True,
    [1, 2, 3],
    ["a"],
    [0.5],
)


class Contents:
    """A file, and what is in it."""

    def __init__(self, path: Path) -> None:
        self._data = path.read_bytes()
        reader = gguf.GGUFReader(path)
        self._architecture = reader.fields["general.architecture"].contents()
        own = ("GGUF.", "general.architecture")
        self._values = {key: field.contents() for key, field in reader.fields.items() if not key.startswith(own)}
        self._tensors = [
            (tensor.name, np.array(tensor.data), tensor.tensor_type if tensor.data.dtype == np.uint8 else None)
            for tensor in reader.tensors
        ]
        self._header = int(min(tensor.data_offset for tensor in reader.tensors))

    def write(self, path: Path, source: random.Random | None) -> None:
        """Write it. `source`: of changes; None: there are none."""
        if source is None or source.randrange(3) == 0:
            path.write_bytes(self._data if source is None else changed_bytes(self._data, source, self._header))
            return
        values, tensors = dict(self._values), list(self._tensors)
        for _ in range(source.randint(1, 2)):
            key = source.choice(sorted(values))
            if source.randrange(5):
                values[key] = source.choice(ODD)
            else:
                del values[key]
        if not source.randrange(3):
            at = source.randrange(len(tensors))
            name, data, kind = tensors.pop(at)
            replaced = [[], [(f"{name}x", data, kind)], [(name, data[: len(data) // 2 or 1], kind)]]
            replaced.append([(re.sub(r"\d+", "77", name, count=1), data, kind)])
            tensors += source.choice(replaced)
        writer = gguf.GGUFWriter(path, self._architecture)
        for key, value in values.items():
            add_value(writer, key, value)
        for name, data, kind in tensors:
            writer.add_tensor(name, data, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


KINDS: dict[str, Callable[[Path], Attempt]] = {"formats": Formats, "gguf": Gguf}


def fuzz(attempt: Attempt, seeds: range | None, seconds: float) -> int:
    """Read changed checkpoints, for all seeds or for some seconds. Returns how many were read as a whole."""
    end, before, whole = time.monotonic() + seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0
    for seed in seeds or range(1 << 62):
        if seeds is None and time.monotonic() > end:
            break
        refused = ""
        try:
            attempt(random.Random(seed))
            whole += 1
        except ModelError as error:
            refused = str(error)
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
        assert len(refused) < MOST_CHARACTERS, seed
        if refused:
            assert all(subject in refused for subject in attempt.subjects), f"seed {seed}: {refused}"
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown << 10 < MOST_MEMORY, f"seed {seed}: the process has grown by {grown} KiB"
    return whole


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "count"), [("formats", 300), ("gguf", 60)])
def test_changed_checkpoints_are_read_or_refused(tmp_path: Path, kind: str, count: int) -> None:
    whole = fuzz(KINDS[kind](tmp_path), range(count), 0)
    assert 0 < whole < count


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_changed_checkpoints_for_a_while(tmp_path: Path, kind: str) -> None:
    assert fuzz(KINDS[kind](tmp_path), None, float(os.environ.get("FUZZ_SECONDS", "60"))) > 10
