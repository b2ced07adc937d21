"""Weights that are replaced while an engine runs: afterwards it computes what a new one computes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from quire.config.options import ModelOptions, ParallelOptions
from quire.engine.client.pooling_params import PoolingParams
from quire.engine.client.protocol import AddRequest, Ping, Pong, RunCommand, UpdateWeights, Wake
from quire.engine.models.checkpoint.checkpoint import SafetensorsCheckpoint
from quire.engine.models.checkpoint.weights import WeightFiller
from quire.engine.models.source import ReplacedInPart, tensors_in
from tests.support.audio_models import make_audio_model, save_audio_model
from tests.support.commands import do, run
from tests.support.ctc import make_ctc, save_ctc
from tests.support.encoders import tiny_embedder
from tests.support.engine import Engine, Result, greedy, random_prompt
from tests.support.fallback_composites import make_fallback, save_fallback
from tests.support.models import make_model, save_model
from tests.support.sleep import ALL, AWAKE, answer, sleep
from tests.support.streaming_models import make_streaming_model, save_streaming_model
from tests.support.transducer_models import make_transducer, save_transducer
from tests.support.variants import slow_but
from tests.support.vision_models import make_composite, save_seeing
from tests.support.whisper import ENGLISH, START, TRANSCRIBE, item, make_whisper, save_whisper

PROMPT = random_prompt(1, 40)
Make = Callable[[Path, int], Path]


def llama(folder: Path, seed: int, **changes: Any) -> Path:
    return save_model(make_model("llama", seed=seed, num_hidden_layers=2, **changes), folder)


def decoder(case: str) -> Make:
    return lambda folder, seed: save_model(make_model(case, seed=seed, num_hidden_layers=2), folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models that differ in their weights."""
    root = tmp_path_factory.mktemp("models")
    return llama(root / "old", 0), llama(root / "new", 1)


@pytest.fixture
def copied(folders: tuple[Path, Path], tmp_path: Path) -> Path:
    """A copy of the second model, which a test may change."""
    return Path(shutil.copytree(folders[1], tmp_path / "copied"))


def change(folder: Path, tensors: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change the tensors of a model."""
    path = folder / "model.safetensors"
    stored = {name: tensor.clone() for name, tensor in load_file(path).items()}
    tensors(stored)
    save_file(stored, path, metadata={"format": "pt"})


def model_of(engine: Engine) -> Any:
    """The model of an engine of any kind."""
    assert engine.core._update is not None
    return engine.core._update._loaded().model


def assert_equal_weights(left: nn.Module, right: nn.Module) -> None:
    """All tensors of both have the same bits."""
    lefts, rights = dict(tensors_in(left)), dict(tensors_in(right))
    assert lefts.keys() == rights.keys()
    for path, tensor in lefts.items():
        assert torch.equal(tensor, rights[path]), path


@pytest.mark.parametrize(
    ("make", "dtype", "quantization"),
    [
        pytest.param(llama, "float32", "none", id="float32"),
        pytest.param(llama, "bfloat16", "none", id="bfloat16"),
        pytest.param(llama, "bfloat16", "int8", id="int8"),
        *(
            pytest.param(decoder(case), "bfloat16", "int8", id=case, marks=pytest.mark.slow)
            for case in ("llama-biased-tied", "mixtral", "gpt_oss", "deepseek_v3", "gpt2", "phi3", "qwen3_moe")
        ),
        pytest.param(decoder("llama-biased-tied"), "float32", "none", id="tied-float32", marks=pytest.mark.slow),
        pytest.param(llama, "float32", "int4", id="int4", marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_of_a_new_engine(tmp_path: Path, make: Make, dtype: Any, quantization: Any) -> None:
    old, new = make(tmp_path / "old", 0), make(tmp_path / "new", 1)
    model = ModelOptions(dtype=dtype, quantization=quantization)
    fresh = Engine(new, model=model)
    expected = fresh.generate(PROMPT, greedy(16)).tokens
    engine = Engine(old, model=model, weight_update_path=tmp_path)
    parameters = [parameter.data_ptr() for parameter in engine.model.parameters()]
    before = engine.generate(PROMPT, greedy(16)).tokens
    assert before != expected
    do(engine, UpdateWeights(str(new)))
    after = engine.generate(PROMPT, greedy(16))
    assert after.tokens == expected
    assert after.outputs[0].cached_tokens == 0
    assert_equal_weights(engine.model, fresh.model)
    assert [parameter.data_ptr() for parameter in engine.model.parameters()] == parameters  # in their places
    do(engine, UpdateWeights(str(old)))
    assert engine.generate(PROMPT, greedy(16)).tokens == before


@pytest.mark.parametrize(("tensor", "pipeline"), slow_but([(2, 1), (1, 2)], (2, 1)))
def test_all_ranks_get_new_weights(folders: tuple[Path, Path], tensor: int, pipeline: int) -> None:
    old, new = folders
    expected = Engine(new).generate(PROMPT, greedy(16)).tokens
    parallel = ParallelOptions(tensor_parallel_size=tensor, pipeline_parallel_size=pipeline)
    engine = Engine(old, parallel=parallel, weight_update_path=old.parent)
    try:
        engine.add("running", PROMPT, greedy(4))
        engine.step()
        do(engine, UpdateWeights(str(new)))
        engine.run()
        assert engine.generate(PROMPT, greedy(16)).tokens == expected
    finally:
        engine.core.close()


@pytest.mark.parametrize("in_flight", [1, 2])
def test_running_requests_go_on_with_the_new_weights(folders: tuple[Path, Path], in_flight: int) -> None:
    old, new = folders
    engine = Engine(old, in_flight=in_flight, weight_update_path=old.parent)
    engine.add("running", PROMPT, greedy(16))
    while len(engine.results["running"].tokens) < 6:
        engine.step()
    do(engine, UpdateWeights(str(new)))
    kept = list(engine.results["running"].tokens)
    engine.run()
    rest = Engine(new).generate([*PROMPT, *kept], greedy(16 - len(kept))).tokens
    assert engine.results["running"].tokens == [*kept, *rest]


def test_embeddings_are_those_of_a_new_engine(tmp_path: Path) -> None:
    old = tiny_embedder(tmp_path / "old")
    new = Path(shutil.copytree(old, tmp_path / "new"))
    change(new, _shift)
    params = PoolingParams(task="embed")
    expected = Engine(new).generate([5, 6, 7], params).pooled
    engine = Engine(old, weight_update_path=tmp_path)
    engine.generate([5, 6, 7], params)  # which makes tables that are derived from weights
    do(engine, UpdateWeights(str(new)))
    after = engine.generate([5, 6, 7], params).pooled
    assert after is not None
    assert expected is not None
    assert np.array_equal(after.data, expected.data)


@pytest.mark.parametrize("quantization", slow_but(["none", "int8"], "int8"))  # gains of norms move into int8 weights
def test_transcriptions_are_those_of_a_new_engine(tmp_path: Path, quantization: Any) -> None:
    old, new = (save_whisper(make_whisper(seed=seed), tmp_path / str(seed)) for seed in (0, 1))
    model, prompt = ModelOptions(dtype="float32", quantization=quantization), [START, ENGLISH, TRANSCRIBE]
    fresh = Engine(new, model=model)
    expected = fresh.generate(prompt, greedy(8), items=(item(1),)).tokens
    engine = Engine(old, model=model, weight_update_path=tmp_path)
    engine.generate(prompt, greedy(8), items=(item(1),))
    do(engine, UpdateWeights(str(new)))
    assert engine.generate(prompt, greedy(8), items=(item(1),)).tokens == expected
    assert_equal_weights(engine.model, fresh.model)


@pytest.mark.slow
@pytest.mark.parametrize(
    "save",
    [
        pytest.param(lambda folder: save_audio_model(make_audio_model("voxtral"), folder), id="audio"),
        pytest.param(lambda folder: save_audio_model(make_audio_model("granite_speech"), folder), id="adapter"),
        *(
            pytest.param(lambda folder, case=case: save_seeing(make_composite(case), case, folder), id=case)
            for case in ("llava", "qwen2_5_vl", "paligemma")
        ),
        pytest.param(lambda folder: save_fallback(make_fallback("aya_vision"), "aya_vision", folder), id="no family"),
        pytest.param(lambda folder: save_streaming_model(make_streaming_model(), folder), id="delayed streams"),
        pytest.param(lambda folder: save_transducer(make_transducer(), folder), id="transducer"),
        pytest.param(lambda folder: save_ctc(make_ctc("wav2vec2"), folder), id="ctc"),
    ],
)
def test_all_weights_of_models_of_other_kinds_are_replaced(tmp_path: Path, save: Callable[[Path], Path]) -> None:
    old = save(tmp_path / "old")
    new = Path(shutil.copytree(old, tmp_path / "new"))
    change(new, _shift)
    engine = Engine(old, weight_update_path=tmp_path)
    do(engine, UpdateWeights(str(new)))
    assert_equal_weights(model_of(engine), model_of(Engine(new, weight_update_path=tmp_path)))
    engine.core.check()


def test_a_model_that_transformers_runs_gets_new_weights(folders: tuple[Path, Path]) -> None:
    old, new = folders
    model = ModelOptions(dtype="float32", model_impl="transformers")
    expected = Engine(new, model=model).generate(PROMPT, greedy(8)).tokens
    engine = Engine(old, model=model, weight_update_path=old.parent)
    do(engine, UpdateWeights(str(new)))
    assert engine.generate(PROMPT, greedy(8)).tokens == expected


def test_weights_are_replaced_after_sleep(folders: tuple[Path, Path]) -> None:
    old, new = folders
    expected = Engine(new).generate(PROMPT, greedy(8)).tokens
    engine = Engine(old, enable_sleep_mode=True, weight_update_path=old.parent)
    sleep(engine, 2)
    assert "/wake_up?tags=weights" in str(run(engine, UpdateWeights(str(new))).error)
    answer(engine, Wake(frozenset(("weights",))))
    do(engine, UpdateWeights(str(new)))
    assert answer(engine, Wake(ALL)) == AWAKE
    assert engine.generate(PROMPT, greedy(8)).tokens == expected
    sleep(engine, 2)
    assert answer(engine, Wake(ALL)) == AWAKE  # from the new folder
    assert engine.generate(PROMPT, greedy(8)).tokens == expected


def _shift(tensors: dict[str, torch.Tensor]) -> None:
    for tensor in tensors.values():
        if tensor.is_floating_point():
            tensor.mul_(-0.5).add_(0.1)


def _double_head(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"].mul_(2)


def _drop(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.norm.weight"]


def _add(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.extra"] = torch.zeros(1)


def _reshape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = torch.zeros(3)


def _retype(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"].bfloat16()


def _break(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"][1, 2] = torch.nan


@pytest.mark.parametrize(
    ("spoil", "part"),
    [
        (_drop, "lacks weights of the model: model.norm.weight"),
        (_add, "has weights that the model lacks: model.layers.0.extra"),
        (_reshape, "model.norm.weight of copied is float32 (3,), but that of the model is float32 (64,)"),
        (_retype, "model.norm.weight of copied is bfloat16"),
        (_break, "lm_head.weight has NaN"),
    ],
)
def test_weights_that_do_not_fit_change_nothing(
    folders: tuple[Path, Path], copied: Path, spoil: Callable[[dict[str, torch.Tensor]], None], part: str
) -> None:
    change(copied, spoil)
    engine = Engine(folders[0], weight_update_path=copied.parent)
    before = engine.generate(PROMPT, greedy(4)).tokens
    done = run(engine, UpdateWeights(str(copied)))
    assert part in str(done.error)
    assert done.invalid
    assert engine.generate(PROMPT, greedy(4)).tokens == before


def test_other_configs_are_refused_by_name(folders: tuple[Path, Path], copied: Path) -> None:
    engine = Engine(folders[0], weight_update_path=copied.parent)
    path = copied / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "use_cache": False, "eos_token_id": 7, "transformers_version": "1"}))
    do(engine, UpdateWeights(str(copied)))
    path.write_text(json.dumps({**config, "rms_norm_eps": 0.5, "num_attention_heads": 2}))
    done = run(engine, UpdateWeights(str(copied)))
    assert "num_attention_heads" in str(done.error)
    assert "rms_norm_eps" in str(done.error)
    path.write_text("{")
    assert run(engine, UpdateWeights(str(copied))).invalid
    assert "is not a directory" in str(run(engine, UpdateWeights(str(copied / "none"))).error)


def test_a_head_that_is_tied_no_longer_is_refused(tmp_path: Path) -> None:
    old = llama(tmp_path / "old", 0, tie_word_embeddings=True)
    head = load_file(old / "model.safetensors")["model.embed_tokens.weight"]
    change(old, lambda tensors: tensors.update({"lm_head.weight": head.clone()}))
    new = Path(shutil.copytree(old, tmp_path / "new"))
    change(new, _double_head)
    engine = Engine(old, weight_update_path=tmp_path)
    before = engine.generate(PROMPT, greedy(4)).tokens
    done = run(engine, UpdateWeights(str(new)))
    assert "another model" in str(done.error)
    assert done.invalid
    assert engine.generate(PROMPT, greedy(4)).tokens == before


def test_without_memory_for_the_check_nothing_changes(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(folders[0], weight_update_path=folders[0].parent)
    before = engine.generate(PROMPT, greedy(4)).tokens

    def fails(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr("quire.engine.models.source.check_finite", fails)
    done = run(engine, UpdateWeights(str(folders[1])))
    assert "cannot be checked: no memory" in str(done.error)
    assert engine.generate(PROMPT, greedy(4)).tokens == before


def test_a_failure_in_the_middle_ends_the_engine(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = folders
    engine = Engine(old, weight_update_path=old.parent)
    complete, count = WeightFiller._complete, [0]

    def fails(filler: WeightFiller, parameter: str) -> None:
        count[0] += 1
        if count[0] == 6:
            raise OSError("the disk is gone")
        complete(filler, parameter)

    monkeypatch.setattr(WeightFiller, "_complete", fails)
    with pytest.raises(ReplacedInPart, match="only in part: the disk is gone"):
        run(engine, UpdateWeights(str(new)))


def test_probes_are_answered_and_requests_wait_meanwhile(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = folders
    engine = Engine(old, weight_update_path=old.parent)
    expected = Engine(new).generate(PROMPT, greedy(4)).tokens
    engine.results["new"] = Result()
    requests, probes = [AddRequest("new", np.array(PROMPT, np.int32), greedy(4))], [Ping(7)]
    monkeypatch.setattr(engine.channel, "receive", lambda _: requests.pop() if requests else None)
    monkeypatch.setattr(engine.channel, "receive_arrived", lambda *_: probes.pop() if probes else None)
    engine.core._handle(RunCommand(1, UpdateWeights(str(new))))
    assert Pong(7) in engine.channel.sent
    engine.core._drain_inbox()
    engine.run()
    assert engine.results["new"].tokens == expected


def test_a_weight_is_moved_before_the_next_is_read(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """No second copy of the model is in memory at any time."""
    old, new = folders
    engine = Engine(old, weight_update_path=old.parent)
    models: list[nn.Module] = []
    tensors = SafetensorsCheckpoint.tensors
    init = WeightFiller.__init__

    def seen(filler: WeightFiller, model: nn.Module, *arguments: Any, **options: Any) -> None:
        models.append(model)
        init(filler, model, *arguments, **options)

    held: list[int] = []

    def counted(checkpoint: SafetensorsCheckpoint, *arguments: Any) -> Any:
        for name, tensor in tensors(checkpoint, *arguments):
            if models and ".layers." in name:
                linears = [t for path, t in tensors_in(models[0]) if "layers" in path and "norm" not in path]
                held.append(sum(t.untyped_storage().nbytes() for t in linears))
            yield name, tensor

    monkeypatch.setattr(WeightFiller, "__init__", seen)
    monkeypatch.setattr(SafetensorsCheckpoint, "tensors", counted)
    do(engine, UpdateWeights(str(new)))
    assert held
    assert held[-1] < held[0] / 4
