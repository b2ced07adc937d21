"""Models in GGUF files compute what their dequantized twins in Hugging Face's format compute."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from quire.config.options import ModelOptions, ParallelOptions
from quire.engine.client.pooling_params import PoolingParams
from quire.engine.models.checkpoint.formats import stored_groups
from quire.engine.models.checkpoint.gguf.architectures import CONFIGS
from quire.engine.models.checkpoint.gguf.blocks import stored_blocks, with_columns
from quire.engine.models.checkpoint.gguf.container import BLOCK_KINDS
from quire.engine.models.checkpoint.gguf.decoder_config import EMBEDDING, EXPERTS
from quire.engine.models.checkpoint.gguf.folder import gguf_models, model_folder
from quire.engine.models.errors import BrokenFolder, ModelError, UnknownArchitecture, UnsupportedModel
from quire.engine.models.layers.linear import Linear
from quire.engine.models.model_config import read_model_config
from quire.kernels.grouped import can_pack_groups
from quire.kernels.grouped_weight import GroupedWeight
from tests.support import hf_encoders, models
from tests.support.engine import Engine, greedy, load, random_prompt
from tests.support.gguf_models import ARCHITECTURES, JINA, add_value, write_gguf
from tests.support.hf_encoders import assert_close, hidden_states, make_encoder, pool, random_text
from tests.support.jina import JinaBert
from tests.support.models import make_model, save_model
from tests.support.nomic_moe import NomicMoe
from tests.support.tokenizer import VOCAB_SIZE
from tests.support.variants import slow_but

TOKENS = 12
Q4_0, Q8_0 = gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.Q8_0


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


# Values that files have no room for, so that all models of the architecture have them.
_GEMMA = {"query_pre_attn_scalar": 32}
_LLAMA4 = {
    "num_hidden_layers": 4,
    "no_rope_layers": [1, 1, 1, 0],
    "attention_chunk_size": 8192,
    "floor_scale": 8192,
    "attn_scale": 0.1,
    "moe_layers": None,
    "interleave_moe_layer_step": 2,
}
DECODERS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-biased-tied": {},
    "llama-linear": {},
    "llama-llama3": {},
    "llama-yarn": {},
    "mixtral": {"sliding_window": None},
    "qwen2": {},
    "qwen2_moe": {"mlp_only_layers": []},
    "qwen3": {},
    "qwen3_moe": {"mlp_only_layers": []},
    "phi": {},
    "phi3": {},
    "phi3-partial-rope": {},
    "phi3-longrope": {},
    "gemma": {},
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "gemma3n": {"vocab_size_per_layer_input": VOCAB_SIZE},
    "gemma4": {},
    "gemma4-moe": {},
    "olmo2": {},
    "granite": {},
    "granitemoe": {},
    "ministral3": {},
    "smollm3": {},
    "gpt_oss": {},
    "deepseek_v2": {},
    "deepseek_v3": {},
    "deepseek_v3-yarn": {},
    "falcon": {},
    "falcon-new": {},
    "starcoder2": {},
    "stablelm": {},
    "stablelm-parallel": {},
    "cohere": {},
    "cohere2": {},
    "lfm2": {"num_hidden_layers": 2},
    "arcee": {"num_hidden_layers": 2},
    "dots1": {"sliding_window": None, "layer_types": None},
    "ernie4_5": {"num_hidden_layers": 2},
    "ernie4_5_moe": {"num_hidden_layers": 2},
    "exaone4": {},
    "exaone4-rope": {"num_hidden_layers": 2},
    "glm4": {"num_hidden_layers": 2},
    "glm4_moe": {"num_hidden_layers": 2},
    "hunyuan_v1_dense": {"num_hidden_layers": 2},
    "hunyuan_v1_moe": {"num_hidden_layers": 2, "moe_topk": 2},
    "llama4": _LLAMA4,
    "minimax": {
        "num_hidden_layers": 8,
        "layer_types": ["linear_attention"] * 7 + ["full_attention"],
        "rotary_dim": 8,
        **{f"{kind}_alpha_factor": 1.25 for kind in ("full_attn", "linear_attn", "mlp")},
        **{f"{kind}_beta_factor": 1.0 for kind in ("full_attn", "linear_attn", "mlp")},
    },
    "minimax_m2": {"num_hidden_layers": 2},
    "olmo3": {},
    "seed_oss": {"num_hidden_layers": 2},
    "lfm2_moe": {"num_hidden_layers": 2},
    "qwen3_next": {"mlp_only_layers": []},
    "qwen3_5": {"linear_value_head_dim": 32},
    "qwen3_5_moe": {},
    "granitemoehybrid": {"num_hidden_layers": 2},
    "granitemoehybrid-dense": {"num_hidden_layers": 2, "position_embedding_type": None},
    "jamba": {"num_hidden_layers": 2},
    "mamba": {"num_hidden_layers": 2, "intermediate_size": 128},
    "falcon_mamba": {"num_hidden_layers": 2, "intermediate_size": 128},
    "mamba2": {"num_hidden_layers": 2},
    "falcon_h1": {"num_hidden_layers": 2, "mamba_norm_before_gate": False},
    "nemotron_h": {"layers_block_type": ["linear_attention", "full_attention", "moe"]},
    "apertus": {},
    "bamba": {"num_hidden_layers": 2, "mamba_proj_bias": True},
    "bloom": {},
    "deepseek_v32": {},
    "exaone_moe": {},
    "glm": {},
    "glm_moe_dsa": {},
    "gpt2": {},
    "gpt_neox": {},
    "gpt_neox-sequential": {},
    "kimi_linear": {"n_group": 1, "topk_group": 1},
    "olmoe": {},
}
NOT_QUANTIZED = ("falcon_h1", "gpt2")  # factors are multiplied into weights; weights have their inputs first
MISTRAL3 = "mistral3"  # other names of Llama are tried as such
ALIKE = {"nemotron_h"}  # is tried with feed-forwards instead of experts
SEEING = {"paddleocr", "qwen2vl", "qwen3vl", "qwen3vlmoe"}  # are tried with their towers, in `test_gguf_projectors`
# With the kind of their tokenizers.
ENCODERS = {
    "bert": "bert",
    "xlm-roberta": "t5",
    "nomic_bert": "bert",
    "jina-v3": "t5",
    "modernbert": "bert",
    "modernbert-biased": "bert",
    "eurobert": "bert",
}
DIRECTIONLESS = {"gemma-embedding", "llama-embed", "nomic-bert-moe"}  # are tried below


def twins(tmp_path: Path, case: str, changes: dict[str, Any] | None = None, **options: Any) -> tuple[Path, Path]:
    """The folder that is made of a GGUF file, and that of its twin."""
    twin = save_model(make_model(case, **(DECODERS[case] if changes is None else changes)), tmp_path / "twin")
    return model_folder(write_gguf(twin, tmp_path / f"{case}.gguf", **options)), twin


def check_tokens(folder: Path, twin: Path, **fields: Any) -> None:
    """Check that both give the same tokens with the same probabilities."""
    engines = [Engine(each, model=ModelOptions(**fields), kv_cache_memory_bytes=8 << 20) for each in (folder, twin)]
    for seed, length in ((1, 5), (2, 60)):
        prompt = random_prompt(seed, length)
        results = [engine.generate(prompt, greedy(TOKENS, logprobs=1)) for engine in engines]
        assert results[0].tokens == results[1].tokens
    for engine in engines:
        engine.core.close()


@pytest.mark.parametrize(
    "case", slow_but(DECODERS, "gemma3", "gemma4", "lfm2", "qwen3", "qwen3_5", "granitemoehybrid", "glm4_moe", "olmo3")
)
def test_decoders(tmp_path: Path, case: str) -> None:
    check_tokens(*twins(tmp_path, case, **({"kind": None} if case in NOT_QUANTIZED else {})))


@pytest.mark.slow
def test_nemotron_without_experts(tmp_path: Path) -> None:
    layers = {"layers_block_type": ["linear_attention", "mlp", "full_attention"]}
    check_tokens(*twins(tmp_path, "nemotron_h", layers, architecture="nemotron_h", metadata={".expert_count": None}))


def test_granite_with_a_shared_expert(tmp_path: Path) -> None:
    """Granite 4 without state spaces, which files call by the architecture of Granite 3 with experts."""
    changes = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2, "position_embedding_type": "rope"}
    check_tokens(*twins(tmp_path, "granitemoehybrid", changes, architecture="granitemoe"))


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    changes = {"num_hidden_layers": 2, "linear_value_head_dim": 32}
    twin = save_model(make_model("qwen3_5", **changes), tmp_path / "twin")
    tensors = {"blk.2.nextn.eh_proj.weight": np.zeros((64, 128)), "blk.2.attn_norm.weight": np.zeros(64)}
    metadata = {".block_count": 3, ".nextn_predict_layers": 1}
    check_tokens(model_folder(write_gguf(twin, tmp_path / "m.gguf", tensors=tensors, metadata=metadata)), twin)


@pytest.mark.parametrize("size", [32, 16])
def test_columns_in_another_order(size: int) -> None:
    """Groups that stay together are taken as they are, and whole rows of numbers otherwise."""
    kind = BLOCK_KINDS[Q8_0.value]
    weight = np.random.default_rng(0).standard_normal((4, 128), np.float32)
    blocks = torch.from_numpy(gguf.quantize(weight, Q8_0)).view(4, 4, -1)
    columns = torch.arange(128).view(2, -1, size).transpose(0, 1).flatten()
    stored = stored_blocks(blocks, kind)
    ordered = with_columns(stored, kind, columns)
    expected = stored.dequantize(torch.float32)[:, columns]
    assert isinstance(ordered, torch.Tensor) == (size == 16)
    if isinstance(ordered, torch.Tensor):
        assert torch.equal(ordered, expected)
    else:
        assert torch.equal(ordered.dequantize(torch.float32), expected)
        part = ordered.part((slice(1, 3), slice(32, 96)))
        assert torch.equal(part.dequantize(torch.float32), expected[1:3, 32:96])


def test_all_architectures_are_tried() -> None:
    tables = (
        *(models.DECODERS, models.STATE_SPACES, models.DELTA_NETS),
        *(models.LLAMA_RELATIVES, models.LAYER_INPUTS, models.RECURRENCES),
    )
    tried = [next(table[case][0] for table in tables if case in table) for case in DECODERS]
    encoders = [hf_encoders.ENCODERS[case][0] for case in ENCODERS]
    others = {JINA, MISTRAL3, *SEEING, *ALIKE, *DIRECTIONLESS}
    assert {ARCHITECTURES[kind] for kind in (*tried, *encoders)} | others == set(CONFIGS)


# The families that people have files of, by what these call their architecture.
LISTED = {
    "llama, mistral, mixtral, smollm": ["llama"],
    "mistral small 3": ["mistral3"],
    "smollm 3": ["smollm3"],
    "qwen": ["qwen2", "qwen2moe", "qwen3", "qwen3moe", "qwen2vl", "qwen3vl", "qwen3vlmoe"],
    "gemma": ["gemma", "gemma2", "gemma3", "gemma3n", "gemma4"],
    "phi": ["phi2", "phi3"],
    "granite": ["granite", "granitemoe"],
    "olmo 2 and 3": ["olmo2"],
    "glm": ["glm4", "glm4moe"],
    "exaone 4, ernie 4.5, seed, hunyuan": ["exaone4", "ernie4_5", "ernie4_5-moe", "seed_oss", "hunyuan-dense"],
    "llama 4, minimax, dots, arcee": ["llama4", "minimax-01", "minimax-m2", "dots1", "arcee"],
    "falcon": ["falcon"],
    "starcoder 2": ["starcoder2"],
    "stablelm": ["stablelm"],
    "cohere": ["command-r", "cohere2"],
    "deepseek": ["deepseek2"],
    "gpt-oss": ["gpt-oss"],
    "lfm2": ["lfm2", "lfm2moe"],
    "hybrids": [
        "qwen35",
        "qwen35moe",
        "qwen3next",
        "granitehybrid",
        "falcon-h1",
        "nemotron_h",
        "nemotron_h_moe",
        "jamba",
    ],
    "state spaces": ["mamba", "mamba2"],
    "embedders": ["bert", "nomic-bert", "nomic-bert-moe", "jina-bert-v2", "gemma-embedding", "modern-bert", "eurobert"],
    "kimi, glm 5, deepseek 3.2": ["kimi-linear", "glm-dsa", "deepseek32"],
    "apertus, olmoe, k-exaone": ["apertus", "olmoe", "exaone-moe"],
    "early models": ["gpt2", "gptneox", "bloom", "chatglm"],
}


@pytest.mark.parametrize("family", LISTED)
def test_families_that_people_have_are_read(family: str) -> None:
    assert set(LISTED[family]) <= CONFIGS.keys()


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({".expert_gating_func": 3}, r"deepseek2\.expert_gating_func is 3, which is not supported.*1 \(softmax\)"),
        ({".expert_weights_norm": True}, r"DeepSeek V2 model whose experts' weights sum to 1"),
    ],
)
def test_other_routers_of_deepseek_are_refused(tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        twins(tmp_path, "deepseek_v2", metadata=metadata)


@pytest.mark.slow
def test_mistral_small_is_a_llama(tmp_path: Path) -> None:
    check_tokens(*twins(tmp_path, "llama", architecture=MISTRAL3))


def encoder_tokenizer(case: str) -> Callable[[gguf.GGUFWriter], None]:
    """Writes the tokenizer of an encoder."""

    def write(writer: gguf.GGUFWriter) -> None:
        tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"\u2581w{index}" for index in range(257))]
        writer.add_tokenizer_model(ENCODERS[case])
        writer.add_token_list(tokens)
        writer.add_token_scores([0.0] * len(tokens))
        writer.add_unk_token_id(1)
        writer.add_pad_token_id(0 if ENCODERS[case] == "bert" else 1)

    return write


@pytest.mark.parametrize("case", slow_but(ENCODERS, "bert"))
def test_encoders(tmp_path: Path, case: str) -> None:
    twin = tmp_path / "twin"
    make_encoder(case).save_pretrained(twin)
    folder = model_folder(write_gguf(twin, tmp_path / "encoder.gguf", tokenizer=encoder_tokenizer(case)))
    prompts = [random_text(seed, length) for seed, length in ((1, 5), (2, 40))]
    states, expected = (hidden_states(Engine(each), prompts) for each in (folder, twin))
    for state, other in zip(states, expected, strict=True):
        np.testing.assert_array_equal(state, other)


@pytest.mark.parametrize(("case", "architecture"), [("gemma3", "gemma-embedding"), ("llama", "llama-embed")])
def test_decoders_that_attend_in_both_directions(tmp_path: Path, case: str, architecture: str) -> None:
    changes = {**_GEMMA, "use_bidirectional_attention": True} if case == "gemma3" else {"is_causal": False}
    folder, twin = twins(tmp_path, case, changes, architecture=architecture)
    prompts = [random_text(seed, length) for seed, length in ((1, 5), (2, 60))]
    states, expected = (hidden_states(Engine(each), prompts) for each in (folder, twin))
    for state, other in zip(states, expected, strict=True):
        np.testing.assert_array_equal(state, other)


def test_layers_behind_the_pooling(tmp_path: Path) -> None:
    """Embeddings are those of the pooled hidden states behind two matrices."""
    generator = np.random.default_rng(0)
    first, second = (generator.standard_normal(shape, np.float32) for shape in ((96, 64), (64, 96)))
    changes = {**_GEMMA, "use_bidirectional_attention": True}
    twin = save_model(make_model("gemma3", **changes), tmp_path / "twin")
    options: dict[str, Any] = {"architecture": "gemma-embedding", "metadata": {".pooling_type": 1}}
    plain = model_folder(write_gguf(twin, tmp_path / "plain.gguf", **options))
    tensors = {"dense_2.weight": first, "dense_3.weight": second}
    folder = model_folder(write_gguf(twin, tmp_path / "dense.gguf", tensors=tensors, **options))
    prompts = [random_text(seed, length) for seed, length in ((1, 5), (2, 40))]
    params = PoolingParams(task="embed", use_activation=False)
    for pooled, embedding in zip(
        pool(Engine(plain), prompts, params), pool(Engine(folder), prompts, params), strict=True
    ):
        np.testing.assert_allclose(embedding, second @ (first @ pooled), rtol=1e-4, atol=1e-4)


def test_an_encoder_with_experts(tmp_path: Path) -> None:
    model = NomicMoe()
    engine = Engine(model_folder(model.write(tmp_path / "m.gguf")))
    prompts = [random_text(seed, length) for seed, length in ((1, 5), (2, 40))]
    for state, prompt in zip(hidden_states(engine, prompts), prompts, strict=True):
        assert_close(state, model.hidden_states(prompt))


@pytest.mark.parametrize("qk_norm", [False, True], ids=["plain", "qk_norm"])
@pytest.mark.parametrize("is_split", [False, True], ids=["joined", "split"])
def test_jina_embedders(tmp_path: Path, *, qk_norm: bool, is_split: bool) -> None:
    """Older files have the gates and the ups of feed-forwards in two tensors."""
    twin = tmp_path / "twin"
    twin.mkdir()
    model = JinaBert(qk_norm=qk_norm, hidden_size=96)
    model.save(twin)
    joined = {name: tensor for name, tensor in model.weights.items() if "gated_layer" in name}
    tensors: dict[str, Any] = {}
    if is_split:
        parts = ("ffn_up", "ffn_gate") if qk_norm else ("ffn_gate", "ffn_up")
        for index, weight in enumerate(joined.values()):
            halves = zip(parts, weight.chunk(2), strict=True)
            tensors |= {f"blk.{index}.{part}.weight": half.numpy() for part, half in halves}
        save_file(
            {name: weight for name, weight in model.weights.items() if name not in joined}, twin / "model.safetensors"
        )
    path = tmp_path / "m.gguf"
    folder = model_folder(write_gguf(twin, path, kind=None, tensors=tensors, tokenizer=encoder_tokenizer("bert")))
    model.save(twin)
    prompts = [random_text(seed, length) for seed, length in ((1, 5), (2, 40))]
    states, expected = (hidden_states(Engine(each), prompts) for each in (folder, twin))
    for state, other in zip(states, expected, strict=True):
        np.testing.assert_array_equal(state, other)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [None, Q4_0, gguf.GGMLQuantizationType.Q4_1], ids=str)
def test_kinds_of_blocks(tmp_path: Path, kind: gguf.GGMLQuantizationType | None) -> None:
    check_tokens(*twins(tmp_path, "llama", kind=kind))


class Grouped:
    """Multiply with a weight in groups as it is."""

    def __init__(self, parts: Sequence[GroupedWeight]) -> None:
        self.parts = parts
        self.nbytes = sum(part.nbytes for part in parts)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None, **options: Any) -> torch.Tensor:
        weight = torch.cat([part.dequantize(x.dtype) for part in self.parts])
        y = F.linear(x, weight, bias)
        out = options.get("out")
        return y.to(options.get("out_dtype") or x.dtype) if out is None else out.copy_(y)


@pytest.mark.parametrize("case", slow_but(["llama", "mixtral", "qwen3_5"], "mixtral", "qwen3_5"))
def test_weights_stay_in_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """Also those whose rows lie in another order in files, and experts."""
    monkeypatch.setattr(stored_groups, "can_pack_groups", lambda *_: True)
    monkeypatch.setattr(stored_groups, "pack_groups", lambda parts, *_: Grouped([part.copied() for part in parts]))
    folder, twin = twins(tmp_path, case)
    layers = {
        name.rpartition(".")[2]
        for name, module in load(folder).model.named_modules()
        if isinstance(module, Linear) and isinstance(module.packed, Grouped)
    }
    assert layers == {"qkv", "out", "gate_up", "down", "head"} | ({"z"} if case == "qwen3_5" else set())
    check_tokens(folder, twin)


@pytest.mark.skipif(not can_pack_groups(torch.bfloat16, torch.device("cpu")), reason="there are no kernels")
@pytest.mark.parametrize("case", slow_but(["qwen3_moe", "mixtral"], "qwen3_moe"))
def test_experts_take_the_memory_of_the_file(tmp_path: Path, case: str) -> None:
    folder, twin = twins(tmp_path, case, {**DECODERS[case], "hidden_size": 256, "intermediate_size": 256}, kind=Q4_0)
    stored = (tmp_path / f"{case}.gguf").stat().st_size
    assert load(folder, dtype="bfloat16").weight_bytes < 1.1 * stored < 0.8 * load(twin, dtype="bfloat16").weight_bytes


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"quantization": "int8", "dtype": "bfloat16"}], ids=str)
def test_other_dtypes(tmp_path: Path, options: dict[str, Any]) -> None:
    """Kernels may read blocks as they are, so that only the model's size is sure."""
    folder, twin = twins(tmp_path, "llama")
    sizes = [load(each, **options).weight_bytes for each in (folder, twin)]
    assert sizes[0] <= sizes[1]


@pytest.mark.parametrize("case", slow_but(["llama", "qwen3_moe", "phi3", "deepseek_v3"], "llama"))
def test_ranks(tmp_path: Path, case: str) -> None:
    sizes = {"intermediate_size": 128, **({"moe_intermediate_size": 64} if "_" in case else {})}  # whole groups
    folder, twin = twins(tmp_path, case, {**DECODERS[case], **sizes})
    parallel = ParallelOptions(tensor_parallel_size=2)
    prompt = random_prompt(3, 30)
    tokens = []
    for each, ranks in ((folder, parallel), (twin, ParallelOptions())):
        engine = Engine(each, parallel=ranks, model=ModelOptions(), kv_cache_memory_bytes=8 << 20)
        tokens.append(engine.generate(prompt, greedy(TOKENS)).tokens)
        engine.core.close()
    assert tokens[0] == tokens[1]


def test_pooling_of_the_file_decides_what_the_model_does(tmp_path: Path) -> None:
    """As of embedders that are decoders."""
    folder, _ = twins(tmp_path, "qwen3", metadata={".pooling_type": 3})
    pooler = read_model_config(folder).facts.pooler
    assert pooler is not None
    assert "embed" in pooler.tasks


def write_header(
    path: Path, metadata: dict[str, Any], architecture: str = "llama", tensor: str = EMBEDDING, *shape: int
) -> Path:
    """Write a file of an architecture with some metadata, and one tensor."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        add_value(writer, key, value)
    writer.add_tensor(tensor, np.zeros(shape or (4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_other_architectures_are_refused_with_those_that_are_accepted(tmp_path: Path) -> None:
    path = write_header(tmp_path / "m.gguf", {}, "rwkv7")
    with pytest.raises(UnknownArchitecture, match=r"m\.gguf .*architecture 'rwkv7'.* bert, .*llama.*starcoder2"):
        model_folder(path)


REFUSED: dict[str, tuple[dict[str, Any], type[ModelError], str]] = {
    "no context length": ({}, BrokenFolder, "no llama.attention.head_count"),
    "more layers than tensors": (
        {**dict.fromkeys(("llama.attention.head_count", "llama.embedding_length"), 4), "llama.block_count": 1 << 31}
        | {"llama.attention.layer_norm_rms_epsilon": 1.0},
        BrokenFolder,
        "has 1 tensors, but its metadata 2147483648 layers",
    ),
    "text for a number": (
        {"llama.attention.head_count": "four"},
        BrokenFolder,
        "head_count must be an integer, not 'four'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_metadata_that_is_missing_or_wrong_is_named(tmp_path: Path, case: str) -> None:
    metadata, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        model_folder(write_header(tmp_path / "m.gguf", metadata))


def test_experts_that_are_no_matrices_are_named(tmp_path: Path) -> None:
    """The size of experts is that of their weights, in files that leave it out."""
    path = write_header(tmp_path / "m.gguf", {}, "qwen2moe", EXPERTS, 64)
    with pytest.raises(BrokenFolder, match=r"ffn_up_exps\.weight must be a matrix or a stack of them.* \(64,\)"):
        model_folder(path)


def test_scalings_that_are_not_known_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedModel, match=r"rope\.scaling\.type 'su' is not supported; supported are none, linear"
    ):
        twins(tmp_path, "llama", metadata={".rope.scaling.type": "su"})


def scores(folder: Path) -> list[Any]:
    """What a reranker gives for two prompts."""
    prompts = [random_text(seed, length) for seed, length in ((1, 5), (2, 40))]
    return [score.tolist() for score in pool(Engine(folder), prompts, PoolingParams(task="score"))]


HEADS = {
    "bert": {"pooler.dense": "cls", "classifier": "cls.output"},
    "xlm-roberta": {"classifier.dense": "cls", "classifier.out_proj": "cls.output"},
    "modernbert": {"head.dense": "cls", "head.norm": "cls.norm", "classifier": "cls.output"},
}


@pytest.mark.parametrize("case", slow_but(HEADS, "xlm-roberta"))
def test_rerankers_that_are_encoders(tmp_path: Path, case: str) -> None:
    """Their heads have two layers in files."""
    twin = tmp_path / "twin"
    model = make_encoder(case, AutoModelForSequenceClassification, num_labels=1)
    weights = {re.sub(r"^(bert|roberta|model)\.", "", name): tensor for name, tensor in model.state_dict().items()}
    model.save_pretrained(twin, state_dict=dict(weights))
    head = {
        f"{stored}.{kind}": weights[f"{name}.{kind}"].numpy()
        for name, stored in HEADS[case].items()
        for kind in ("weight", "bias")
        if f"{name}.{kind}" in weights
    }
    metadata = {".pooling_type": 4}
    path = tmp_path / "m.gguf"
    write_gguf(twin, path, tensors=head, tokenizer=encoder_tokenizer(case), metadata=metadata)
    folder = model_folder(path)
    assert scores(folder) == scores(twin)


@pytest.mark.parametrize("qk_norm", [False, True], ids=["plain", "qk_norm"])
def test_rerankers_of_jina(tmp_path: Path, *, qk_norm: bool) -> None:
    """With both layers of the head, in blocks but for it, as it is written down for PyTorch on dequantized weights."""
    model = JinaBert(qk_norm=qk_norm, hidden_size=96)
    model.add_head()
    folder = model_folder(write_jina(tmp_path, model, {"pooler.dense": "cls", "classifier": "cls.output"}))
    model.weights.update(load_file(tmp_path / "twin/model.safetensors"))
    prompts = [random_text(seed, length) for seed, length in ((1, 5), (2, 40))]
    for got, prompt in zip(scores(folder), prompts, strict=True):
        assert_close(np.array(got, np.float32), model.score(prompt))


def test_a_reranker_of_jina_without_a_layer_is_refused(tmp_path: Path) -> None:
    """As llama.cpp's converter writes them: the layer of the label under the name of the first one."""
    model = JinaBert(hidden_size=96)
    model.add_head()
    with pytest.raises(
        UnsupportedModel, match=r"without cls\.output\.weight, a part of its head; its scores would not"
    ):
        model_folder(write_jina(tmp_path, model, {"classifier": "cls"}))


def write_jina(tmp_path: Path, model: JinaBert, head: dict[str, str]) -> Path:
    """Write a reranker to a file, with the layers of its head under the names that they have in files."""
    twin = tmp_path / "twin"
    twin.mkdir()
    model.save(twin)
    tensors = {
        f"{stored}.{kind}": model.weights[f"{name}.{kind}"].numpy()
        for name, stored in head.items()
        for kind in ("weight", "bias")
    }
    metadata = {".pooling_type": 4}
    path = tmp_path / "m.gguf"
    return write_gguf(twin, path, tensors=tensors, tokenizer=encoder_tokenizer("bert"), metadata=metadata)


def test_rerankers_that_are_decoders(tmp_path: Path) -> None:
    """The probability of one of two words."""
    twin = save_model(make_model("qwen3"), tmp_path / "twin")
    rows = np.random.default_rng(0).standard_normal((2, 64), np.float32)
    metadata = {".pooling_type": 4, ".classifier.output_labels": ["yes", "no"]}
    folder = model_folder(write_gguf(twin, tmp_path / "m.gguf", metadata=metadata, tensors={"cls.output.weight": rows}))
    config = json.loads((twin / "config.json").read_text())
    classifier = {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    (twin / "config.json").write_text(json.dumps({**config, **classifier}))
    weights = {**load_file(twin / "model.safetensors"), "score.weight": torch.from_numpy(rows[:1] - rows[1:])}
    save_file(weights, twin / "model.safetensors", metadata={"format": "pt"})
    assert scores(folder) == scores(twin)


RANKERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "without a head": ("qwen3", {}, r"no tensor cls\.output\.weight"),
    "of another architecture": (
        "llama",
        {},
        "reranker or classifier of the architecture 'llama'.*bert, jina-bert-v2, modern-bert and qwen3",
    ),
    "with other labels": ("qwen3", {".classifier.output_labels": ["a", "b"]}, "labels a, b, which is not supported"),
}


@pytest.mark.parametrize("case", RANKERS)
def test_other_rerankers_are_refused(tmp_path: Path, case: str) -> None:
    name, metadata, message = RANKERS[case]
    with pytest.raises(ModelError, match=message):
        twins(tmp_path, name, metadata={".pooling_type": 4, **metadata})


def test_a_pooling_that_no_head_has_is_refused(tmp_path: Path) -> None:
    make_encoder("modernbert").save_pretrained(tmp_path / "twin")
    head = {"cls.weight": np.ones((64, 64)), "cls.norm.weight": np.ones(64), "cls.output.weight": np.ones((1, 64))}
    metadata = {".pooling_type": 4, ".classifier.pooling_type": 3}
    path = write_gguf(tmp_path / "twin", tmp_path / "m.gguf", tensors=head, metadata=metadata)
    with pytest.raises(UnsupportedModel, match=r"modern-bert\.classifier\.pooling_type is 3, .* are 1 \(mean\) and 2 "):
        model_folder(path)


def test_weights_have_scales_of_their_own(tmp_path: Path) -> None:
    """As NVFP4 has them; those of inputs do not change what is computed."""
    twin = save_model(make_model("mixtral", sliding_window=None), tmp_path / "twin")
    experts = json.loads((twin / "config.json").read_text())["num_local_experts"]
    scales = {
        "blk.0.attn_output.scale": np.array([2], np.float32),
        "blk.0.attn_output.input_scale": np.array([3], np.float32),
        "blk.1.ffn_up_exps.scale": np.array([2**index for index in range(experts)], np.float32),
    }
    folder = model_folder(write_gguf(twin, tmp_path / "m.gguf", tensors=scales))
    weights = load_file(twin / "model.safetensors")
    weights["model.layers.0.self_attn.o_proj.weight"] *= 2
    for name, weight in weights.items():
        if match := re.fullmatch(r"model\.layers\.1\..*experts\.(\d+)\.(?:w3|up_proj)\.weight", name):
            weight *= 2 ** int(match[1])
        elif re.fullmatch(r"model\.layers\.1\..*experts\.gate_up_proj", name):
            for index, expert in enumerate(weight):
                expert[len(expert) // 2 :] *= 2**index
    save_file(weights, twin / "model.safetensors", metadata={"format": "pt"})
    check_tokens(folder, twin)


def test_scales_that_do_not_fit_are_named(tmp_path: Path) -> None:
    scales = {"blk.0.attn_output.scale": np.ones(3, np.float32)}
    folder, _ = twins(tmp_path, "llama", tensors=scales)
    with pytest.raises(BrokenFolder, match=r"llama\.gguf: blk\.0\.attn_output\.scale has 3 values for 1 weights"):
        load(folder)


def test_a_tensor_that_no_rule_names_is_named(tmp_path: Path) -> None:
    folder, _ = twins(tmp_path, "qwen3", changes={"attention_bias": True})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "attention_bias": False}))
    with pytest.raises(ModelError, match="unexpected weights in the checkpoint: "):
        load(folder)


def test_transformers_does_not_run_files(tmp_path: Path) -> None:
    folder, _ = twins(tmp_path, "llama")
    with pytest.raises(UnsupportedModel, match="GGUF files run with Quire's own implementation"):
        load(folder, model_impl="transformers")


def test_a_folder_is_made_once_for_a_file_as_it_is(tmp_path: Path) -> None:
    folder, twin = twins(tmp_path, "llama")
    path = tmp_path / "llama.gguf"
    assert model_folder(path) == folder
    write_gguf(twin, path, metadata={".context_length": 128})
    other = model_folder(path)
    assert other != folder
    assert json.loads((other / "config.json").read_text())["max_position_embeddings"] == 128
    tokenizer = {"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert json.loads((model_folder(path) / "tokenizer.json").read_text()) == tokenizer  # it wins


def test_files_of_a_folder_with_models() -> None:
    names = ["a.gguf", "b-00002-of-00002.gguf", "b-00001-of-00002.gguf", "mmproj-a.gguf", "config.json"]
    assert gguf_models(names) == ["a.gguf", "b-00001-of-00002.gguf"]


def test_files_that_are_split(tmp_path: Path) -> None:
    twin = save_model(make_model("llama"), tmp_path / "twin")
    write_gguf(twin, tmp_path / "llama.gguf", split_max_tensors=9)
    first, *others = sorted(tmp_path.glob("llama-*.gguf"))
    assert others
    folder = model_folder(first)
    assert folder.name == "llama"
    check_tokens(folder, twin)
    others[-1].unlink()
    with pytest.raises(BrokenFolder, match=others[-1].name):
        model_folder(first)
