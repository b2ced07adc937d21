"""Requests with audio are computed with the model's adapter, others without it, whatever runs beside them."""

from __future__ import annotations

import json
import logging
import math
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.config.options import ModelOptions
from quire.engine.execution.step_graphs import StepGraphs
from quire.engine.models.errors import ModelError
from quire.engine.scheduling.blocks import hasher_named
from quire.engine.scheduling.request import Request
from quire.kernels import native
from tests.support.audio_models import (
    LoRA,
    adapt,
    expected_tokens,
    make_audio_model,
    noise,
    prompt_with,
    save_audio_model,
)
from tests.support.engine import Engine, Result, greedy

ADAPTED = ("granite_speech", "phi4_multimodal")
HEAD = [5, 9, 7, 8, 3, 41, 6, 2, 11]
# Heads are as wide as the kernels want them, so nothing is padded by torch.
WIDE = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
compiled = pytest.mark.skipif(native.instructions() is None, reason="only compiled kernels give the same bits")


def ask(engine: Engine, *parts: Any, tokens: int = 4, **fields: Any) -> Result:
    prompt, items = prompt_with(engine.audio, *parts)
    return engine.generate(prompt, greedy(tokens), items=items, **fields)


@pytest.mark.parametrize("kind", ADAPTED)
def test_prefixes_are_not_shared_with_requests_without_audio(audio_folders: dict[str, Path], kind: str) -> None:
    """The adapter changes the keys of all tokens, also of those before the audio."""
    engine = Engine(audio_folders[kind], block_size=4)
    texts, sounds = set(), set()
    for cached in (0, 8):
        text = ask(engine, HEAD)
        sound = ask(engine, HEAD, noise(0, 0.4), [4])
        assert text.outputs[0].cached_tokens == cached
        assert sound.outputs[0].cached_tokens >= cached
        texts.add(tuple(text.tokens))
        sounds.add(tuple(sound.tokens))
    assert ask(engine, HEAD, noise(1, 0.4), [4]).outputs[0].cached_tokens == 8
    assert len(texts) == len(sounds) == 1


def test_blocks_belong_to_the_content_of_an_adapter() -> None:
    """Ids differ between processes; the same tokens have the same hashes there if the adapters are the same."""
    hasher = hasher_named("sha256")

    def hashes(lora_id: int | None, digest: bytes = b"") -> list[bytes]:
        request = Request("a", array("i", range(8)), greedy(1), (0,))
        if lora_id is not None:
            request.use_lora(lora_id, digest, hasher)
        return request.block_hashes(4, hasher)

    assert hashes(0, b"one") == hashes(3, b"one")
    assert len({tuple(digests) for digests in (hashes(None), hashes(0, b"one"), hashes(0, b"other"))}) == 3


def test_digests_of_adapters(tmp_path: Path) -> None:
    """Of their weights and scales, whatever else is in their files."""

    def digest(name: str, change: Callable[[LoRA], object]) -> bytes:
        model = make_audio_model("granite_speech")
        change(model.lora)
        limits = Engine(save_audio_model(model, tmp_path / name)).core.scheduler.limits
        assert limits.item_lora_id is not None
        return limits.lora_digests[limits.item_lora_id]

    plain = digest("plain", lambda _: None)
    assert digest("again", configured(inference_mode=True)) == plain
    assert len({plain, digest("scale", configured(lora_alpha=7.0)), digest("weight", scaled("q_proj.lora_B"))}) == 3


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("kind", ADAPTED)
def test_audio_that_comes_in_a_later_piece(
    audio_folders: dict[str, Path], kind: str, last: bool, in_flight: int
) -> None:
    """What was computed before it is computed again, and nothing of it is found as a prefix."""
    engine = Engine(audio_folders[kind], block_size=4, in_flight=in_flight)
    info = engine.audio
    prompt, items = prompt_with(info, HEAD, noise(0, 0.4))
    expected = ask(Engine(audio_folders[kind]), HEAD, noise(0, 0.4)).tokens
    for wait in (0, 1, 9):
        name = f"r{wait}"
        engine.add(name, prompt[: len(HEAD)], greedy(4), open=True)
        for _ in range(wait):
            if engine.busy:
                engine.step()
        shifted = tuple(type(item)(**{**_fields(item), "start": item.start - len(HEAD)}) for item in items)
        engine.extend(name, prompt[len(HEAD) :], items=shifted, last=last)
        if not last:
            engine.extend(name, [], last=True)
        engine.run()
        assert engine.results[name].error is None
        assert engine.results[name].tokens == expected
    assert ask(engine, HEAD).tokens == ask(Engine(audio_folders[kind]), HEAD).tokens
    assert engine.blocks_used == 0


def _fields(item: Any) -> dict[str, Any]:
    return {name: getattr(item, name) for name in item.__struct_fields__}


@compiled
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_the_same_bits_alone_and_beside_others(tmp_path: Path, quantization: Any) -> None:
    """Requests with audio and without, in one batch, have the log-probabilities that each has alone."""
    folder = save_audio_model(make_audio_model("phi4_multimodal", text=WIDE).bfloat16(), tmp_path)
    options = ModelOptions(dtype="bfloat16", quantization=quantization)
    parts: list[list[Any]] = [[HEAD], [HEAD, noise(0, 0.5), [4]], [[7]], [[3], noise(1, 0.3)], [[8, 1]]]
    engine = Engine(folder, model=options, block_size=8)
    alone = Engine(folder, model=options, block_size=8)
    logprobs = []
    for index, part in enumerate(parts):
        prompt, items = prompt_with(engine.audio, *part)
        engine.add(str(index), prompt, greedy(9, logprobs=1), items=items)
        result = alone.generate(prompt, greedy(9, logprobs=1), items=items)
        logprobs.append([entry.logprobs for output in result.outputs for entry in output.logprobs or ()])
    engine.run()
    for index, expected in enumerate(logprobs):
        outputs = engine.results[str(index)].outputs
        assert [entry.logprobs for output in outputs for entry in output.logprobs or ()] == expected


@compiled
def test_replayed_steps_are_adapted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of requests with audio alone are replayed, like those of requests without."""
    folder = save_audio_model(make_audio_model("granite_speech", text=WIDE).bfloat16(), tmp_path)

    def tokens() -> tuple[list[list[int]], StepGraphs]:
        engine = Engine(folder, model=ModelOptions(dtype="bfloat16"), block_size=8)
        for index in range(9):
            prompt, items = prompt_with(engine.audio, HEAD, *([noise(index, 0.3)] if index % 3 else []))
            engine.add(str(index), prompt, greedy(8 + index), items=items)
            if index % 3 != 1:  # else the next one runs beside it
                engine.run()
        return [engine.results[str(index)].tokens for index in range(9)], engine.runner.steps

    replayed, graphs = tokens()
    assert {lora_id for _, lora_id in graphs.graphs} == {0, None}
    monkeypatch.setattr(StepGraphs, "logits", lambda self, *args: self._eager.logits(*args))
    assert tokens()[0] == replayed


def saved(tmp_path: Path, kind: str = "granite_speech") -> tuple[Any, Path, Path]:
    """A model, its folder and that of its adapter."""
    model = make_audio_model(kind)
    folder = save_audio_model(model, tmp_path / kind)
    return model, folder, folder / "speech-lora" if kind == "phi4_multimodal" else folder


@pytest.mark.parametrize("kind", ADAPTED)
def test_a_model_without_its_adapter(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """It is loaded as transformers loads it, and a warning says so."""
    model, folder, adapter_folder = saved(tmp_path, kind)
    (adapter_folder / "adapter_config.json").unlink()
    with caplog.at_level(logging.WARNING):
        engine = Engine(folder)
    assert "has no adapter for audio" in caplog.text
    prompt, items = prompt_with(engine.audio, HEAD, noise(0, 0.4))
    model.adapted = (model,)
    assert engine.generate(prompt, greedy(9), items=items).tokens == expected_tokens(model, prompt, [noise(0, 0.4)], 9)


def test_patterns_and_scales(tmp_path: Path) -> None:
    """A module may have another alpha, and scales may be divided by the root of the rank."""
    model = make_audio_model("granite_speech")
    plain = adapt(model, ["q_proj", "v_proj"], rank=4, alpha=4.0)  # scales of 1
    layers = dict(plain.named_modules())
    for name, module in model.named_modules():
        if name.endswith(("q_proj", "v_proj")) and "language_model" in name:
            change = layers[name].weight.data - module.weight.data
            scale = 1.0 if name.endswith("layers.1.self_attn.v_proj") else 3.0
            layers[name].weight.data = module.weight.data + scale * change
    model.adapted = (plain,)
    model.lora.config |= {
        "lora_alpha": 6.0,
        "use_rslora": True,
        "alpha_pattern": {r"layers\.1\.self_attn\.v_proj": 2.0},
    }
    assert 6.0 / math.sqrt(4) == 3.0
    engine = Engine(save_audio_model(model, tmp_path))
    prompt, items = prompt_with(engine.audio, HEAD, noise(0, 0.4))
    assert engine.generate(prompt, greedy(9), items=items).tokens == expected_tokens(model, prompt, [noise(0, 0.4)], 9)


def without(key: str) -> Callable[[LoRA], object]:
    return lambda lora: lora.tensors.pop(next(name for name in lora.tensors if name.endswith(key)))


def renamed(part: str, replacement: str) -> Callable[[LoRA], object]:
    def change(lora: LoRA) -> None:
        lora.tensors = {name.replace(part, replacement): tensor for name, tensor in lora.tensors.items()}

    return change


def narrowed(key: str, dimension: int) -> Callable[[LoRA], object]:
    def change(lora: LoRA) -> None:
        name = next(name for name in lora.tensors if name.endswith(key))
        lora.tensors[name] = lora.tensors[name].narrow(dimension, 0, 3).contiguous()

    return change


def scaled(key: str) -> Callable[[LoRA], object]:
    return lambda lora: next(tensor for name, tensor in lora.tensors.items() if name.endswith(key)).mul_(1.5)


def configured(**fields: Any) -> Callable[[LoRA], object]:
    return lambda lora: lora.config.update(fields)


BROKEN: dict[str, tuple[Callable[[LoRA], object], str]] = {
    "another method": (configured(peft_type="IA3"), "peft_type 'IA3' is not supported"),
    "dora": (configured(use_dora=True), "use_dora True is not supported"),
    "biases": (configured(bias="all"), "bias 'all' is not supported"),
    "whole modules": (configured(modules_to_save=["lm_head"]), "modules_to_save"),
    "alpha": (configured(lora_alpha="many"), "lora_alpha must be a number, not 'many'"),
    "pattern": (configured(alpha_pattern={"(": 1.0}), "not a regular expression"),
    "patterns": (configured(alpha_pattern=[1]), "alpha_pattern must be an object"),
    "one side": (without("lora_A"), "only one of lora_A and lora_B"),
    "another module": (renamed("q_proj", "q_norm"), "the adapter changes"),
    "another layer": (renamed("layers.2", "layers.7"), "the adapter changes"),
    "the encoder": (renamed("model.language_model.layers.0.self_attn.q_proj", "model.encoder.input_linear"), "changes"),
    "ranks": (narrowed("q_proj.lora_A", 0), "which do not fit"),
    "outputs": (narrowed("q_proj.lora_B", 0), "which do not fit"),
    "inputs": (narrowed("q_proj.lora_A", 1), "which do not fit to 64 inputs"),
    "another weight": (renamed("lora_A", "lora_embedding_A"), "is not a weight of a low-rank adapter"),
    "nothing": (lambda lora: lora.tensors.clear(), "no weights of the adapter"),
    "nan": (lambda lora: next(iter(lora.tensors.values())).fill_(math.nan), "NaN or infinite"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_adapters_that_cannot_be_used(tmp_path: Path, name: str) -> None:
    change, text = BROKEN[name]
    model = make_audio_model("granite_speech")
    change(model.lora)
    folder = save_audio_model(model, tmp_path)
    with pytest.raises(ModelError) as refusal:
        Engine(folder)
    assert text in str(refusal.value)


def test_files_that_are_missing_or_broken(tmp_path: Path) -> None:
    _, folder, adapter_folder = saved(tmp_path)
    weights = (adapter_folder / "adapter_model.safetensors").read_bytes()
    (adapter_folder / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"adapter_model\.safetensors is missing"):
        Engine(folder)
    (adapter_folder / "adapter_model.safetensors").write_bytes(weights[:100])
    with pytest.raises(ModelError):
        Engine(folder)
    (adapter_folder / "adapter_model.safetensors").write_bytes(weights)
    (adapter_folder / "adapter_config.json").write_text(json.dumps([1]))
    with pytest.raises(ModelError, match="must contain a JSON object"):
        Engine(folder)
