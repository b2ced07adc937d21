"""A tiny embedder trains, resumes with the same losses and exports; the shipped one is small and finds texts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModel, AutoTokenizer

from training.embedder import run
from training.embedder.batches import Steps
from training.embedder.evaluate import main as evaluate
from training.embedder.export import export
from training.embedder.loop import Trainer
from training.embedder.loss import contrastive_loss, share_right
from training.embedder.model import Embedder, Group
from training.embedder.recipe import Recipe, Shape
from training.embedder.retrievers import Folder
from training.embedder.tokens import build_tokenizer

SHIPPED = Path(__file__).parents[2] / "quire" / "bundled" / "nano_embed"
SHAPE = Shape(vocabulary=400, width=32, layers=2, heads=2, inner=48, positions=64)
MIX = {"topics": 1.0, "arithmetic": 1.0, "typo": 1.0}
TINY = Recipe(
    shape=SHAPE, steps=6, pairs=12, chunk=4, length=32, dimensions=(32, 16), rates=(0.02, 3e-3), warmup=2, mix=MIX
)


@pytest.fixture(scope="module")
def tokenizer_text() -> str:
    texts = ["how do i reset the password?", "Résumé of Ann, 42 (Oslo)", "send back an item", "what is 12 plus 30"]
    return build_tokenizer(texts * 3, SHAPE.vocabulary).to_str()


def trainer(work: Path, tokenizer_text: str) -> Trainer:
    work.mkdir(parents=True, exist_ok=True)
    (work / "tokenizer.json").write_text(tokenizer_text, encoding="utf-8")
    return Trainer(TINY, work, dtype=torch.float32)


def test_tokens_do_not_depend_on_case_or_place(tokenizer_text: str) -> None:
    tokenizer = Tokenizer.from_str(tokenizer_text)
    assert tokenizer.encode("Password").ids == tokenizer.encode("password").ids
    assert tokenizer.encode("(resume)", add_special_tokens=False).tokens[1:-1] == (
        tokenizer.encode("RÉSUMÉ", add_special_tokens=False).tokens
    )
    assert len(tokenizer.encode("12 402", add_special_tokens=False).ids) == 5
    pair = tokenizer.encode("send", "日本")
    assert pair.tokens[0] == "[CLS]"
    assert pair.tokens[-1] == "[SEP]"
    assert set(pair.type_ids) == {0, 1}
    assert "[UNK]" not in pair.tokens


def test_steps_are_repeatable(tokenizer_text: str) -> None:
    steps = Steps(Tokenizer.from_str(tokenizer_text), TINY)
    first, second = steps.make(3), steps.make(3)
    assert first.allowed.tolist() == second.allowed.tolist()
    assert all(torch.equal(group.ids, other.ids) for group, other in zip(first.groups, second.groups, strict=True))
    assert bool(first.allowed[:, : first.queries].diagonal().all())
    assert sorted(first.places.tolist()) == list(range(first.queries + first.texts))


def test_loss_is_small_for_right_order() -> None:
    units = torch.eye(4)
    allowed = torch.ones(2, 2, dtype=torch.bool)
    right = torch.stack([units[0], units[1], units[0], units[1]])
    wrong = torch.stack([units[0], units[1], units[1], units[0]])
    losses = [float(contrastive_loss(scores, 2, allowed, 0.05, (4, 2))) for scores in (right, wrong)]
    assert losses[0] < 1e-3 < 10 < losses[1]
    assert [share_right(scores, 2, allowed) for scores in (right, wrong)] == [1.0, 0.0]
    masked = torch.eye(2, dtype=torch.bool)
    assert float(contrastive_loss(wrong, 2, masked, 0.05, (4,))) < 1e-3


def test_resumed_run_has_the_same_losses(tmp_path: Path, tokenizer_text: str) -> None:
    whole = trainer(tmp_path / "whole", tokenizer_text).train(6, save_every=100, report=lambda _: None)
    first = trainer(tmp_path / "parts", tokenizer_text)
    losses = first.train(4, save_every=100, report=lambda _: None)
    second = trainer(tmp_path / "parts", tokenizer_text)
    assert second.resume()
    assert second.step == 4
    losses += second.train(6, save_every=100, report=lambda _: None)
    assert losses == pytest.approx(whole, rel=1e-4)


def test_exported_folder_gives_the_same_embeddings(tmp_path: Path, tokenizer_text: str) -> None:
    made = trainer(tmp_path / "work", tokenizer_text)
    export(made.model, made.tokenizer, TINY.dimensions, tmp_path / "out")
    expected = Folder(tmp_path / "out").embed(["reset the password", "send an item back, please"])
    embedder = Embedder(made.model.shape, torch.float32)
    embedder.load_state_dict({name: weight.bfloat16().float() for name, weight in made.model.state_dict().items()})
    encoded = made.tokenizer.encode_batch(["reset the password", "send an item back, please"])
    for row, encoding in zip(expected, encoded, strict=True):
        ids = torch.tensor([encoding.ids])
        with torch.no_grad():
            mine = torch.nn.functional.normalize(
                embedder([Group(ids, torch.ones_like(ids, dtype=torch.bool))]), dim=-1
            )[0]
        assert torch.allclose(mine, row, atol=1e-5)


def test_command_lines(
    tmp_path: Path, tokenizer_text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "Recipe", lambda: TINY)
    work, out = tmp_path / "work", tmp_path / "out"
    trainer(work, tokenizer_text)
    run.main(["--work", str(work), "--out", str(out), "--until", "1"])
    modules = json.loads((out / "modules.json").read_text("utf-8"))
    assert [module["path"] for module in modules] == ["", "1_Pooling", "2_Normalize"]
    assert all((out / module["path"]).is_dir() for module in modules)
    results = tmp_path / "results.json"
    evaluate(["--folder", str(out), "--kinds", "typo", "--count", "5", "--dimensions", "16", "--json", str(results)])
    assert "BM25" in capsys.readouterr().out
    assert set(json.loads(results.read_text("utf-8"))["mean"]) == {"quire-nano-embed", "16 dimensions", "BM25"}


def test_vocabulary_follows_the_tokenizer(tmp_path: Path, tokenizer_text: str) -> None:
    made = trainer(tmp_path, tokenizer_text)
    assert made.model.shape == replace(SHAPE, vocabulary=made.tokenizer.get_vocab_size())


def test_shipped_model_is_small() -> None:
    files = [path for path in SHIPPED.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 16_000_000
    tensors = load_file(SHIPPED / "model.safetensors").values()
    assert sum(tensor.numel() for tensor in tensors) <= 8_000_000
    assert all(tensor.dtype is torch.bfloat16 for tensor in tensors)


def test_shipped_folder_loads_and_finds(caplog: pytest.LogCaptureFixture) -> None:
    texts = [
        "--port sets the TCP port that the server listens on.",
        "get_weather: Get the current weather for a city",
        "My dog is called Rex and he is four years old.",
    ]
    queries = ["what's my dog's name", "which flag changes the port", "is it raining in Oslo"]
    best = Folder(SHIPPED).scores(queries, texts).argmax(-1)
    assert best.tolist() == [2, 0, 1]
    assert "newly initialized" not in caplog.text
    assert AutoTokenizer.from_pretrained(SHIPPED).model_max_length == 512
    assert AutoModel.from_pretrained(SHIPPED).config.matryoshka_dimensions == [64, 128, 256]
