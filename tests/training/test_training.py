"""A tiny run trains, resumes with the same losses and exports; the shipped model is within its size limits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from training import run
from training.batches import Batches
from training.export import export
from training.loop import Trainer
from training.model import Nano
from training.recipe import Phase, Recipe

NANO = Path(__file__).parents[2] / "quire" / "bundled" / "nano"
MIX = {"arithmetic": 1.0, "quire": 1.0}
TINY = Recipe(
    pieces=400, spaced=40, width=32, layers=1, heads=2, inner=32, steps=8, tokens_per_batch=512, warmup=2,
    phases=(Phase("a", 4, (0.02, 3e-3), 1, MIX), Phase("b", None, (0.01, 1e-3), 2, MIX)),
)  # fmt: skip


def trainer(work: Path) -> Trainer:
    (work / "tokenizer.json").parent.mkdir(parents=True, exist_ok=True)
    (work / "tokenizer.json").write_bytes((NANO / "tokenizer.json").read_bytes())
    return Trainer(TINY, work, compiled=False, dtype=torch.float32)


def test_resumed_run_has_the_same_losses(tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole").train(8, save_every=100, report=lambda _: None)
    assert whole[-1] < whole[0]
    first = trainer(tmp_path / "parts")
    losses = first.train(5, save_every=100, report=lambda _: None)
    second = trainer(tmp_path / "parts")
    assert second.resume()
    assert second.step == 5
    losses += second.train(8, save_every=100, report=lambda _: None)
    assert losses == pytest.approx(whole, rel=1e-5)


def test_a_teacher_keeps_old_themes_but_not_new_ones(tmp_path: Path) -> None:
    phase = Phase("a", None, (0.02, 3e-3), 1, MIX)
    old = _after_lessons(tmp_path / "old", phase)
    assert old < 0.8 * _after_lessons(tmp_path / "new", replace(phase, new=tuple(MIX)))


def _after_lessons(work: Path, phase: Phase) -> float:
    """Trains on MIX with the initial weights as the teacher; returns how far arithmetic is from the teacher's."""
    trainer(work)
    made = Trainer(replace(TINY, steps=40, phases=(phase,)), work, compiled=False, dtype=torch.float32)
    export(made.model, made.tokenizer, work / "teacher")
    made.learn_from(work / "teacher")
    made.train(40, save_every=100, report=lambda _: None)
    assert made.teacher is not None
    batch = next(Batches(made.tokenizer, "other", {"arithmetic": 1.0}, 512).start_at(0))
    with torch.no_grad():
        actual, expected = (
            model.logits(model.hidden(batch.ids)).log_softmax(-1) for model in (made.model, made.teacher)
        )
    return float((expected.exp() * (expected - actual)).sum(-1)[batch.loss_mask.roll(-1)].mean())


def test_command_line_exports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "Recipe", lambda: TINY)
    work = tmp_path / "work"
    trainer(work)
    arguments = ["--work", str(work), "--out", str(tmp_path / "out"), "--until", "2", "--no-compile"]
    run.main(arguments)
    config = json.loads((tmp_path / "out" / "config.json").read_text("utf-8"))
    assert config["model_type"] == "llama"
    assert (tmp_path / "out" / "chat_template.jinja").exists()


def test_same_logits_as_transformers(tmp_path: Path) -> None:
    made = trainer(tmp_path / "work")
    export(made.model, made.tokenizer, tmp_path / "out")
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    model = Nano(made.model.shape, torch.float32)
    model.load_state_dict({name: weight.bfloat16().float() for name, weight in made.model.state_dict().items()})
    ids = torch.randint(0, made.tokenizer.get_vocab_size(), (2, 200))
    with torch.no_grad():
        assert torch.allclose(model.logits(model.hidden(ids)), reference(ids).logits, atol=1e-4)


def test_shipped_model_is_small() -> None:
    assert sum(path.stat().st_size for path in NANO.iterdir()) <= 25_000_000
    tensors = load_file(NANO / "model.safetensors").values()
    assert sum(tensor.numel() for tensor in tensors) <= 12_000_000
    assert all(tensor.dtype is torch.bfloat16 for tensor in tensors)


def test_shipped_folder_loads_and_answers() -> None:
    tokenizer = AutoTokenizer.from_pretrained(NANO)
    model = AutoModelForCausalLM.from_pretrained(NANO, dtype=torch.float32)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], add_generation_prompt=True, tokenize=False
    )
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    output = model.generate(input_ids=inputs["input_ids"], max_new_tokens=60)
    assert "quire-nano" in tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
