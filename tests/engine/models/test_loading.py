"""Loading: shards, memory, dtypes, and clear errors for invalid folders."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.engine.models.checkpoint.safetensors import SafetensorsFile
from quire.engine.models.checkpoint.weights import WeightFiller, check_finite
from quire.engine.models.errors import BrokenFolder, ModelError, UnknownArchitecture, UnsupportedModel, WeightMismatch
from quire.engine.models.layers import linear as linear_module
from quire.engine.models.layers.moe import Expert
from quire.engine.models.specs.tensor_names import WeightTarget
from quire.kernels import native
from quire.kernels.linear import pack_weight
from tests.support.engine import load
from tests.support.models import make_model, save_model
from tests.support.variants import slow_but

WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_model(make_model("llama"), tmp_path)


def change_weights(folder: Path, change: Any) -> None:
    weights = load_file(folder / WEIGHTS)
    change(weights)
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


def change_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_sharded_and_single_files_give_the_same_weights(tmp_path: Path) -> None:
    model = make_model("mixtral")
    whole = load(save_model(model, tmp_path / "whole")).model
    sharded_folder = save_model(model, tmp_path / "shards", max_shard_size="200KB")
    assert len(list(sharded_folder.glob("*.safetensors"))) > 2
    sharded = load(sharded_folder).model
    for (name, parameter), (_, other) in zip(whole.named_parameters(), sharded.named_parameters(), strict=True):
        assert torch.equal(parameter, other), name


@pytest.mark.parametrize(
    ("stored", "requested", "loaded_as"),
    [
        ("float32", "auto", "bfloat16" if native.has_bfloat16() else "float32"),
        ("float32", "float32", "float32"),
        ("bfloat16", "auto", "bfloat16"),
        ("float16", "auto", "bfloat16"),
        ("float16", "float16", "bfloat16"),
        ("bfloat16", "float16", "bfloat16"),
        ("bfloat16", "float32", "float32"),
    ],
)
def test_dtypes(tmp_path: Path, stored: str, requested: str, loaded_as: str) -> None:
    folder = save_model(make_model("llama").to(getattr(torch, stored)), tmp_path)
    loaded = load(folder, dtype=requested)
    assert loaded.dtype == getattr(torch, loaded_as)
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {loaded.dtype}


def test_a_missing_weight_is_reported(folder: Path) -> None:
    change_weights(folder, lambda weights: weights.pop("model.layers.1.self_attn.k_proj.weight"))
    with pytest.raises(WeightMismatch, match=r"checkpoint: model\.layers\.1\.self_attn\.k_proj\.weight"):
        load(folder)


def test_an_unexpected_weight_is_reported(folder: Path) -> None:
    change_weights(folder, lambda weights: weights.update({"model.layers.0.adapter.weight": torch.ones(2)}))
    with pytest.raises(
        WeightMismatch, match=r"unexpected weights in the checkpoint: model\.layers\.0\.adapter\.weight"
    ):
        load(folder)


def test_an_unexpected_expert_is_reported(tmp_path: Path) -> None:
    folder = save_model(make_model("mixtral"), tmp_path)
    name = "model.layers.0.block_sparse_moe.experts.99.w2.weight"
    change_weights(folder, lambda weights: weights.update({name: torch.ones(2, 2)}))
    with pytest.raises(WeightMismatch, match=r"unexpected weights in the checkpoint: .*experts\.99\.w2"):
        load(folder)


def test_a_weight_of_the_wrong_shape_is_reported_with_both_shapes(folder: Path) -> None:
    change_weights(folder, lambda weights: weights.update({"model.layers.0.mlp.up_proj.weight": torch.ones(7, 64)}))
    with pytest.raises(WeightMismatch, match=r"up_proj\.weight has shape \(7, 64\), but the model's is \(96, 64\)"):
        load(folder)


def test_a_missing_weight_of_a_fallback_model_is_reported(tmp_path: Path) -> None:
    folder = save_model(make_model("gpt2"), tmp_path)
    change_weights(folder, lambda weights: weights.pop("transformer.h.0.mlp.c_fc.weight"))
    with pytest.raises(WeightMismatch, match=r"c_fc\.weight"):
        load(folder, model_impl="transformers")


def test_layers_for_multi_token_prediction_are_skipped(tmp_path: Path) -> None:
    folder = save_model(make_model("deepseek_v3"), tmp_path)
    extra = {"model.layers.4.eh_proj.weight": torch.ones(2, 2)}
    change_weights(folder, lambda weights: weights.update(extra))
    change_config(folder, num_nextn_predict_layers=1)
    load(folder)


def test_folders_without_a_model_are_rejected(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(BrokenFolder, match=r"config\.json"):
        load(tmp_path / "empty")
    (folder / WEIGHTS).unlink()
    with pytest.raises(BrokenFolder, match=r"no \.safetensors"):
        load(folder)


@pytest.mark.parametrize(
    "name", ["consolidated.safetensors", "consolidated.00-of-02.safetensors", "adapter_model.safetensors"]
)
@pytest.mark.parametrize("sharded", [False, True])
def test_other_weights_beside_the_models_are_not_read(folder: Path, name: str, sharded: bool) -> None:
    if sharded:
        (folder / WEIGHTS).rename(folder / "model-00001-of-00001.safetensors")
    save_file({"layers.0.attention.wq.weight": torch.ones(2)}, folder / name)
    load(folder)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("pytorch_model.bin", "pickle"),
        ("pytorch_model-00001-of-00002.bin", "pickle"),
        ("consolidated.00.pth", "pickle"),
        ("tiny-Q4_K_M.gguf", "GGUF"),
        ("consolidated.safetensors", "Mistral's own format"),
        ("adapter_model.safetensors", "an adapter"),
        ("tf_model.h5", "another framework"),
    ],
)
def test_weights_of_other_formats_are_named(folder: Path, name: str, reason: str) -> None:
    (folder / WEIGHTS).rename(folder / name)
    with pytest.raises(BrokenFolder, match=f"no .safetensors files that can be loaded: {name} is.*{reason}"):
        load(folder)


def test_git_lfs_pointers_are_named(folder: Path) -> None:
    (folder / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")
    with pytest.raises(BrokenFolder, match="Git LFS pointer; run `git lfs pull`"):
        load(folder)


@pytest.mark.parametrize("implementation", ["auto", "transformers"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused(folder: Path, implementation: str, value: float) -> None:
    def spoil(weights: dict[str, torch.Tensor]) -> None:
        weights["model.layers.1.mlp.up_proj.weight"][3, 5] = value

    change_weights(folder, spoil)
    with pytest.raises(BrokenFolder, match=r"layers\.1\.mlp\.up_proj\.weight has NaN or infinite values"):
        load(folder, model_impl=implementation)


def test_weights_beyond_the_dtype_are_refused() -> None:
    """On devices that compute in float16; CPUs use a wider dtype instead."""
    with pytest.raises(UnsupportedModel, match=r"norm\.weight has values that float16 cannot represent"):
        check_finite("model.norm.weight", torch.tensor([1e5]).half(), torch.tensor([1e5]))


@pytest.mark.parametrize("implementation", ["auto", "transformers"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_integers_without_a_quantization_config_are_refused(
    folder: Path, implementation: str, dtype: torch.dtype
) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    change_weights(folder, lambda weights: weights.update({name: weights[name].to(dtype)}))
    with pytest.raises(UnsupportedModel, match=r"up_proj\.weight is stored as u?int8.*no quantization_config"):
        load(folder, model_impl=implementation)


def test_an_index_with_missing_files_is_rejected(folder: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BrokenFolder, match="model-00001-of-00002"):
        load(folder)


@pytest.mark.parametrize("size", [0, 5, 100, 2000, -10])
def test_a_truncated_file_is_rejected(folder: Path, size: int) -> None:
    path = folder / WEIGHTS
    data = path.read_bytes()
    path.write_bytes(data[:size])
    with pytest.raises(BrokenFolder):
        load(folder)


def test_a_config_that_is_not_json_is_rejected(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(BrokenFolder):
        load(folder)


@pytest.mark.parametrize("implementation", ["quire", "transformers"])
def test_values_of_the_config_can_be_replaced(folder: Path, implementation: str) -> None:
    loaded = load(folder, model_impl=implementation, hf_overrides={"max_position_embeddings": 64})
    assert loaded.context_len == 64
    with pytest.raises(ModelError):
        load(folder, model_impl=implementation, hf_overrides={"hidden_size": "wide"})


def test_unknown_architectures_are_reported(folder: Path) -> None:
    change_config(folder, model_type="never_heard_of")
    with pytest.raises(UnknownArchitecture, match="never_heard_of"):
        load(folder)


def test_models_that_do_not_generate_are_rejected(folder: Path) -> None:
    change_config(folder, architectures=["LlamaForQuestionAnswering"])
    with pytest.raises(UnknownArchitecture, match="LlamaForQuestionAnswering"):
        load(folder)


def test_unsupported_quantization_methods_are_reported(folder: Path) -> None:
    change_config(folder, quantization_config={"quant_method": "vptq", "bits": 4})
    with pytest.raises(UnsupportedModel, match="vptq"):
        load(folder)
    change_config(folder, quantization_config=None, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    load(folder)


def test_a_context_length_above_the_models_is_rejected(folder: Path) -> None:
    assert load(folder, max_model_len=100).context_len == 100
    with pytest.raises(UnsupportedModel, match="256"):
        load(folder, max_model_len=257)


def test_the_fallback_can_be_requested(folder: Path) -> None:
    assert load(folder, model_impl="transformers").config.implementation == "transformers"


def test_rope_types_that_depend_on_the_batch_are_rejected_for_the_fallback(tmp_path: Path) -> None:
    long = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "original_max_position_embeddings": 64,
    }
    for name, folder in (
        ("dynamic", save_model(make_model("llama-dynamic"), tmp_path / "dynamic")),
        ("longrope", save_model(make_model("llama", rope_parameters=long), tmp_path / "longrope")),
    ):
        load(folder)
        with pytest.raises(UnsupportedModel, match=f"'{name}'.*largest position"):
            load(folder, model_impl="transformers")


def test_fallback_models_are_loaded_one_at_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each load changes torch's default dtype temporarily."""
    from transformers import AutoModelForCausalLM

    active, max_active = 0, 0
    real = AutoModelForCausalLM.from_pretrained

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal active, max_active
        active += 1
        max_active = max(max_active, active)
        time.sleep(0.05)
        try:
            return real(*args, **kwargs)
        finally:
            active -= 1

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", counting)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda _: load(folder, model_impl="transformers", dtype="bfloat16"), range(3)))
    assert max_active == 1
    assert torch.get_default_dtype() == torch.float32


def test_rope_per_layer_type_does_not_extend_the_context(tmp_path: Path) -> None:
    plain = {"rope_type": "default", "rope_theta": 1e4}
    wide = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
    ropes = {"full_attention": wide, "sliding_attention": plain}
    folder = save_model(make_model("gemma3"), tmp_path)
    for order in (sorted(ropes), sorted(ropes, reverse=True)):
        change_config(folder, rope_parameters={name: ropes[name] for name in order})
        assert load(folder).context_len == 256


def test_quires_decoder_can_be_required(tmp_path: Path) -> None:
    folder = save_model(make_model("diffllama"), tmp_path)
    with pytest.raises(UnknownArchitecture, match="diffllama"):
        load(folder, model_impl="quire")


def test_models_whose_attention_cannot_be_replaced_are_rejected(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    small = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100, "intermediate_size": 64}
    config = AutoConfig.for_model("rwkv", **small, num_attention_heads=4, num_key_value_heads=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel):
        load(tmp_path)


def test_safetensors_of_unusual_shapes_and_dtypes(tmp_path: Path) -> None:
    tensors = {
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "bytes": torch.arange(7, dtype=torch.uint8),
        "half": torch.randn(3, 5).half(),
        "wide": torch.randn(2, 2, dtype=torch.float64),
        "ints": torch.arange(5),
    }
    save_file(tensors, tmp_path / "x.safetensors")
    with SafetensorsFile(tmp_path / "x.safetensors") as file:
        assert set(file.names()) == set(tensors)
        for name, tensor in tensors.items():
            got = file.tensor(name)
            assert got.dtype == tensor.dtype
            assert torch.equal(got, tensor)
            file.release(name)
            assert torch.equal(file.tensor(name), tensor)


_MEASURE = """
import sys, threading, time, pathlib, psutil, torch
from tests.support.engine import load
import quire.engine.core.loop, transformers.models.llama.configuration_llama
process, peak, done = psutil.Process(), 0, False
def watch():
    global peak
    while not done:
        peak = max(peak, process.memory_info().rss)
        time.sleep(0.001)
before = process.memory_info().rss
thread = threading.Thread(target=watch, daemon=True); thread.start()
loaded = load(pathlib.Path(sys.argv[1])); done = True; thread.join()
print((peak - before) / loaded.weight_bytes)
"""


@pytest.mark.parametrize("tied", slow_but([False, True], False))
def test_peak_memory_of_loading_is_close_to_the_weights(tmp_path: Path, tied: bool) -> None:
    model = make_model(
        "llama",
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=3,
        vocab_size=8000,
        tie_word_embeddings=tied,
    )
    folder = save_model(model.to(torch.bfloat16), tmp_path)
    del model
    out = subprocess.run([sys.executable, "-c", _MEASURE, str(folder)], capture_output=True, text=True, check=True)
    assert float(out.stdout) <= 1.2


@pytest.mark.parametrize("case", ["qwen3_moe", "gpt_oss"])
def test_each_expert_is_packed_before_the_next_one_is_copied(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the plain weights of at most one expert exist beside the packed ones."""
    plain = most_plain = 0
    copy_weight = WeightFiller._copy

    def copy_and_count(filler: WeightFiller, name: str, target: WeightTarget, tensor: torch.Tensor) -> None:
        nonlocal plain, most_plain
        counted = ".experts." in target.parameter and target.parameter.endswith("weight")
        if counted and target.part in (None, 0):
            plain += 1
            most_plain = max(most_plain, plain)
        copy_weight(filler, name, target, tensor)

    def pack_and_count(weight: torch.Tensor, quantization: Any, *, six_bit_rows: int) -> Any:
        nonlocal plain
        packed = pack_weight(weight, quantization, six_bit_rows=six_bit_rows)
        plain -= packed is not None and plain > 0
        return packed

    monkeypatch.setattr(WeightFiller, "_copy", copy_and_count)
    monkeypatch.setattr(linear_module, "pack_weight", pack_and_count)
    folder = save_model(make_model(case).bfloat16(), tmp_path)
    model = load(folder, dtype="bfloat16").model
    experts = [module for module in model.modules() if isinstance(module, Expert)]
    assert all(expert.gate_up.packed and expert.down.packed for expert in experts)
    assert 1 <= most_plain <= 2  # a fused projection may come in two tensors, with another weight between them
