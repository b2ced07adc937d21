"""Broken files of sentence-transformers end in an error that says what is wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.broken_folders import DOCUMENTED, load_everything
from tests.support.encoders import tiny_embedder

MODULES, POOLING, DENSE = "modules.json", "1_Pooling/config.json", "9_Dense/config.json"
LIST = json.loads('[{"path": "", "type": "models.Transformer"}, {"path": "1_Pooling", "type": "models.Pooling"}]')
WITH_DENSE = json.dumps([*LIST, {"path": "9_Dense", "type": "models.Dense"}])
TYPES: list[Any] = [5, None, "", "models.Unheard", []]
MODES: list[Any] = [5, True, [], [5], [[]], {"a": 1}, 1e308, "what"]
SIZES: list[Any] = [5.5, -1, 0, None, "8", [8], 10**30, 1e308, True]
MEAN, TANH = {"pooling_mode_mean_tokens": True}, {"in_features": 64, "out_features": 8}


def listed(**changes: Any) -> str:
    """modules.json with changes of its second entry."""
    return json.dumps([LIST[0], {**LIST[1], **changes}])


CASES: list[dict[str, str]] = [
    *({MODULES: text} for text in ("", "{", "5", "null", '{"a": 1}', "[5]", "[{}]", "[" * 100_000)),
    *({MODULES: listed(type=value)} for value in TYPES),
    *({MODULES: listed(path=value)} for value in ("..", "/etc", 5, "nowhere")),
    *({POOLING: text} for text in ("", "5", "[]", "{}", "\x00")),
    *({POOLING: json.dumps({"pooling_mode": value})} for value in MODES),
    {POOLING: json.dumps({**MEAN, "pooling_mode_cls_token": True})},
    *(
        {MODULES: WITH_DENSE, DENSE: json.dumps({**TANH, name: value})}
        for name in ("in_features", "out_features")
        for value in SIZES
    ),
    {MODULES: WITH_DENSE, DENSE: json.dumps({**TANH, "activation_function": ["x"]})},
    {MODULES: WITH_DENSE, DENSE: json.dumps(TANH)},  # without weights
    {MODULES: WITH_DENSE, DENSE: json.dumps(TANH), "9_Dense/model.safetensors": "short"},
    *({"config_sentence_transformers.json": text} for text in ("", "5", '{"prompts": 5}', '{"prompts": ["x"]}')),
    *({"sentence_bert_config.json": text} for text in ("", "[]")),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_embedder(tmp_path_factory.mktemp("models") / "embedder")


@pytest.mark.parametrize("files", CASES, ids=lambda files: str(files)[:80])
def test_a_broken_embedder_is_refused_in_words(files: dict[str, str], whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    with pytest.raises(DOCUMENTED) as refused:
        load_everything(folder)
    assert 10 < len(str(refused.value)) < 2000


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("matryoshka_dimensions", value) for value in (5, True, "x", [0], [1.5], {"a": 1})),
        *(("type_vocab_size", value) for value in (-1, 10**30, 1.5)),
        *(("num_labels", value) for value in (10**9, -1, "x")),  # transformers makes a name for each label
    ],
)
def test_a_broken_config_of_an_embedder_is_refused(name: str, value: Any, whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, name: value}))
    with pytest.raises(DOCUMENTED, match=name):
        load_everything(folder)


def test_a_dense_module_is_loaded_if_its_files_are_whole(whole: Path, tmp_path: Path) -> None:
    """So that the cases above are refused for what is broken."""
    import safetensors.torch
    import torch

    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    (folder / MODULES).write_text(WITH_DENSE)
    (folder / "9_Dense").mkdir()
    (folder / DENSE).write_text(json.dumps(TANH))
    weights = {"linear.weight": torch.ones(8, 64), "linear.bias": torch.ones(8)}
    safetensors.torch.save_file(weights, folder / "9_Dense/model.safetensors")
    load_everything(folder)
