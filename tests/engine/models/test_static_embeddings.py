"""Static embeddings: the mean of a table's rows, as sentence-transformers and model2vec save them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from quire.config.options import ModelOptions
from quire.engine.client.pooling_params import PoolingParams
from quire.engine.models.config.pooling import PoolingOptions
from quire.engine.models.errors import BrokenFolder, UnsupportedModel
from quire.engine.models.model_config import read_model_config
from quire.rendering.tokenizer import Tokenizer
from tests.support.engine import Engine, load
from tests.support.hf_encoders import assert_close, pool, random_text
from tests.support.tokenizer import VOCAB_SIZE, write_tokenizer

TEXTS = [random_text(i, length) for i, length in enumerate((1, 40, 5000))]
PREFIX = "sentence_transformers.models"


def write(folder: Path, inner: str, tensors: dict[str, Tensor], *, normalize: bool = True) -> Path:
    """A folder with a table in a directory."""
    entries = [{"idx": 0, "name": "0", "path": inner, "type": f"{PREFIX}.StaticEmbedding"}]
    if normalize:
        entries.append({"idx": 1, "name": "1", "path": "1_Normalize", "type": f"{PREFIX}.Normalize"})
    (folder / inner).mkdir(exist_ok=True)
    (folder / "modules.json").write_text(json.dumps(entries))
    save_file(tensors, folder / inner / "model.safetensors")
    return folder


@pytest.mark.parametrize("inner", ["", "0_StaticEmbedding"])
def test_a_text_is_the_mean_of_its_rows(inner: str, tmp_path: Path) -> None:
    table = torch.randn(VOCAB_SIZE, 24)
    engine = Engine(write(tmp_path, inner, {"embedding.weight": table}), model=ModelOptions(dtype="auto"))
    assert engine.pools.tasks == ("embed", "token_embed")
    assert engine.info.dtype == "float32"
    for got, text in zip(pool(engine, TEXTS, PoolingParams(task="embed")), TEXTS, strict=True):
        assert_close(got, F.normalize(table[text].mean(0), dim=0), 1e-6)


def test_tables_without_normalization(tmp_path: Path) -> None:
    table = torch.randn(VOCAB_SIZE, 24).half()
    engine = Engine(write(tmp_path, "", {"embedding.weight": table}, normalize=False))
    assert_close(pool(engine, TEXTS[1:2], PoolingParams(task="embed"))[0], table[TEXTS[1]].float().mean(0), 1e-6)


def test_shared_rows_and_weights_of_tokens(tmp_path: Path) -> None:
    """model2vec: tokens share rows of a smaller table, and each has a weight."""
    table, weights = torch.randn(30, 24), torch.rand(VOCAB_SIZE)
    mapping = torch.randint(0, 30, (VOCAB_SIZE,))
    engine = Engine(write(tmp_path, "", {"embeddings": table, "mapping": mapping, "weights": weights}))
    assert engine.info.vocab_size == VOCAB_SIZE
    for got, text in zip(pool(engine, TEXTS, PoolingParams(task="embed")), TEXTS, strict=True):
        assert_close(got, F.normalize((table[mapping] * weights[:, None])[text].mean(0), dim=0), 1e-5)


def test_a_table_may_be_cut_if_the_settings_say_so(tmp_path: Path) -> None:
    table = torch.randn(VOCAB_SIZE, 24)
    options = ModelOptions(hf_overrides={"matryoshka_dimensions": [8, 24]})
    engine = Engine(write(tmp_path, "", {"embedding.weight": table}), model=options)
    assert engine.pools.dimensions == (8, 24)
    (cut,) = pool(engine, TEXTS[1:2], PoolingParams(task="embed", dimensions=8))
    assert_close(cut, F.normalize(table[TEXTS[1]].mean(0)[:8], dim=0), 1e-6)


@pytest.mark.parametrize("inner", ["", "0_StaticEmbedding"])
def test_no_special_tokens_are_added(inner: str, tmp_path: Path) -> None:
    write(tmp_path, inner, {"embedding.weight": torch.randn(VOCAB_SIZE, 8)})
    write_tokenizer(tmp_path / inner, joins=True)
    ids = Tokenizer.load(tmp_path).encode("river", add_special_tokens=True)
    assert ids == Tokenizer.load(tmp_path).encode("river", add_special_tokens=False)
    (tmp_path / "modules.json").unlink()
    assert len(Tokenizer.load(tmp_path / inner).encode("river", add_special_tokens=True)) > len(ids)


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"other": torch.ones(4, 4)}, "no table"),
        ({"embeddings": torch.ones(4)}, "no table"),
        ({"embeddings": torch.ones(4, 4), "mapping": torch.full((9,), 4)}, "does not fit"),
        ({"embeddings": torch.ones(4, 4), "weights": torch.ones(9)}, "does not fit"),
    ],
)
def test_tables_that_cannot_be_used_are_refused(tensors: dict[str, Tensor], reason: str, tmp_path: Path) -> None:
    with pytest.raises(BrokenFolder, match=reason):
        load(write(tmp_path, "", tensors))


def test_a_table_cannot_generate(tmp_path: Path) -> None:
    write(tmp_path, "", {"embedding.weight": torch.randn(VOCAB_SIZE, 8)})
    with pytest.raises(UnsupportedModel, match="generate"):
        read_model_config(tmp_path, pooling=PoolingOptions(task="generate"))
