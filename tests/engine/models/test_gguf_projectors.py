"""Models in GGUF files see with the file of their vision tower ("mmproj") what they see in Hugging Face's format."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from quire.engine.models.checkpoint.gguf.folder import gguf_models, model_folder
from quire.engine.models.errors import BrokenFolder, ModelError, UnsupportedModel
from tests.support.engine import Engine, greedy
from tests.support.gguf_models import add_value
from tests.support.gguf_projectors import MODEL, PROJECTOR, write_seeing
from tests.support.pictures import drawn
from tests.support.variants import slow_but
from tests.support.vision_models import COMPOSITES, make_composite, prompt_with_pictures, save_seeing

TOKENS = 7
CASES = ["gemma3-narrow", "idefics3", "internvl", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def _experts_in_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files have no room for layers without experts behind some with them."""
    kind, fields = COMPOSITES["qwen3_vl_moe"]
    text = {**fields["text_config"], "mlp_only_layers": []}
    monkeypatch.setitem(COMPOSITES, "qwen3_vl_moe", (kind, {**fields, "text_config": text}))


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The path of a file with a model, beside which is that of its tower; and its twin."""
    return written(tmp_path_factory.mktemp("seeing"), "idefics3")


def written(target: Path, case: str, metadata: dict[str, Any] | None = None) -> tuple[Path, Path]:
    """The path of a case's file, and its twin in Hugging Face's format."""
    twin = save_seeing(make_composite(case), case, target / "twin")
    if case.startswith("gemma3"):  # files have no room for another scale of scores
        path = twin / "config.json"
        config = json.loads(path.read_text())
        config["text_config"]["query_pre_attn_scalar"] = config["text_config"]["head_dim"]
        path.write_text(json.dumps(config))
    return write_seeing(twin, target, metadata), twin


def answers(folder: Path) -> list[list[int]]:
    """Greedy tokens of prompts with and without pictures."""
    engine = Engine(folder, kv_cache_memory_bytes=8 << 20)
    prompts: list[list[Any]] = [
        [[5, 9, 77], drawn(60, 44, seed=1), [20, 31]],
        [[8], drawn(30, 90, seed=2), [7, 8], drawn(100, 33, seed=3), [4]],
        [[5, 9, 77, 20, 31]],
    ]
    tokens = []
    for parts in prompts:
        prompt, items = prompt_with_pictures(engine.pictures, *parts)
        tokens.append(engine.generate(prompt, greedy(TOKENS), items=items).tokens)
    engine.core.close()
    return tokens


@pytest.mark.parametrize("case", slow_but(CASES, "gemma3-narrow", "qwen2_5_vl"))
def test_pictures_are_seen_as_in_the_other_format(tmp_path: Path, case: str) -> None:
    file, twin = written(tmp_path, case)
    tokens = answers(model_folder(file))
    assert tokens == answers(twin)
    assert len({tuple(each) for each in tokens}) == len(tokens), "the outputs say nothing about the inputs"
