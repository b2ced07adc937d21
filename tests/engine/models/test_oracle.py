"""Greedy tokens and logits of the engine equal Hugging Face's, for every architecture."""

from __future__ import annotations

from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.config.options import ModelOptions
from quire.engine.models.errors import UnsupportedModel
from quire.kernels import native
from quire.kernels.quantized import quantize_groups
from tests.support.engine import Engine, greedy, load, random_prompt
from tests.support.models import DECODERS, FALLBACKS, make_model, save_model
from tests.support.oracle import generated
from tests.support.variants import slow_but

TOKENS = 32
# On the reference device: each kind of attention and feed-forward. Others have logits of their prompts compared there.
ON_REFERENCE = ("llama-dynamic", "gemma2", "gpt_oss", "deepseek_v3", "phi3-longrope", "bloom", "gpt2")


# Their ropes change when a sequence has become long, and transformers keeps the keys that it has cached.
GROWING = ("llama-dynamic", "phi3-longrope")


@cache
def model_of(case: str) -> Any:
    return make_model(case)


@cache
def next_logits(case: str, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> torch.Tensor:
    """transformers' logits behind a prompt and each of the tokens after it but the last; computed once for all devices.

    Tokens that have the largest of them are those that transformers generates.
    """
    model = model_of(case)
    if case in GROWING:
        return generated(model, list(prompt), len(tokens))[1]
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([[*prompt, *tokens[:-1]]]), use_cache=False).logits
    return logits[0, len(prompt) - 1 :].float()


@pytest.mark.parametrize(
    ("case", "device"),
    slow_but(
        product([*DECODERS, *FALLBACKS], ["cpu", "reference"]),
        *((case, "cpu") for case in (*DECODERS, *FALLBACKS)),
        *((case, "reference") for case in ON_REFERENCE),
    ),
)
def test_engine_equals_hugging_face(case: str, device: Any, tmp_path: Path) -> None:
    options = ModelOptions(device=device)
    engine = Engine(save_model(model_of(case), tmp_path), model=options, block_size=8, max_num_batched_tokens=48)
    assert engine.info.implementation == ("quire" if case in DECODERS else "transformers")
    for seed, length in ((1, 5), (2, 40)):
        prompt = random_prompt(seed, length)
        result = engine.generate(prompt, greedy(TOKENS, logprobs=20))
        logits = next_logits(case, tuple(prompt), tuple(result.tokens))
        assert result.tokens == logits.argmax(-1).tolist()
        expected = logits.log_softmax(-1)
        for step, output in enumerate(result.outputs):
            assert output.logprobs is not None
            ids, values = output.logprobs[0].token_ids, torch.tensor(output.logprobs[0].logprobs)
            scale = logits[step].abs().max()
            assert ((values - expected[step][ids]).abs().max() / scale).item() < 1e-4


# Hugging Face applies dynamic NTK for a prompt's last position to all of it; ours does not depend on chunks.
@pytest.mark.parametrize("case", [case for case in (*DECODERS, *FALLBACKS) if case != "llama-dynamic"])
@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_prompt_logits_equal_hugging_face(case: str, device: Any, tmp_path: Path) -> None:
    """Logits at all positions of a prompt that is computed in chunks."""
    model = model_of(case)
    options = ModelOptions(device=device)
    engine = Engine(save_model(model, tmp_path), model=options, block_size=8, max_num_batched_tokens=17)
    prompt = random_prompt(3, 45)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt])).logits[0].float()
    result = engine.generate(prompt, greedy(1, prompt_logprobs=3))
    reported = result.outputs[0].prompt_logprobs
    assert reported is not None
    assert len(reported) == len(prompt)
    assert reported[0] is None
    expected = logits.log_softmax(-1)
    for position, entry in enumerate(reported[1:]):
        assert entry is not None
        assert entry.token_ids[0] == prompt[position + 1]
        error = (torch.tensor(entry.logprobs) - expected[position][entry.token_ids]).abs().max()
        largest = logits[position].abs().max()
        assert (error / largest).item() < 1e-4
        above = expected[position] - expected[position][prompt[position + 1]]
        equal = 1e-5 * largest  # tokens whose rank depends on how sums are rounded
        assert 1 + (above > equal).sum().item() <= entry.ranks[0] <= (above >= -equal).sum().item()


def round_weights(model: Any, quantization: str) -> None:
    """Round the weights of a small model's linear layers as quantization rounds them while loading."""
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear):
            at_least = "int8" if name == "lm_head" else "int6"
            groups = quantize_groups(layer.weight.data, at_least if quantization == "int4" else quantization)
            assert groups is not None
            layer.weight.data = groups.dequantize(torch.float32)


@pytest.mark.parametrize("fields", [{"dtype": "bfloat16"}, {"quantization": "int8"}, {"quantization": "int4"}])
def test_other_dtypes_and_quantizations_are_close(tmp_path: Path, fields: dict[str, Any]) -> None:
    """Log-probabilities are close to those of the (rounded) weights in float32."""
    model = make_model("qwen3", tie_word_embeddings=False)
    folder = save_model(model, tmp_path)
    prompt = random_prompt(4, 30)
    if "quantization" in fields:
        round_weights(model, fields["quantization"])
    with torch.inference_mode():
        logits = model(torch.tensor([prompt])).logits[0]
    engine = Engine(folder, model=ModelOptions(**fields))
    assert engine.info.dtype == fields.get("dtype", "float32")
    reported = engine.generate(prompt, greedy(1, prompt_logprobs=0)).outputs[0].prompt_logprobs
    assert reported is not None
    expected = logits.log_softmax(-1)
    errors = [
        abs(entry.logprobs[0] - expected[position][prompt[position + 1]].item())
        for position, entry in enumerate(reported[1:])
        if entry is not None
    ]
    assert 0 < sum(errors) / len(errors) < 0.2


@pytest.mark.parametrize("case", ["llama", "gemma2", "gpt_oss", "deepseek_v3", "gpt2"])
@pytest.mark.parametrize("tokens", [512, 7])
def test_an_int8_cache_is_close(tmp_path: Path, case: str, tokens: int) -> None:
    """An int8 KV cache gives similar log-probabilities in fewer bytes, with whole and chunked prompts."""
    folder = save_model(make_model(case), tmp_path)
    prompt = random_prompt(4, 60)
    logprobs, sizes = [], []
    for cache_dtype in ("auto", "int8"):
        options: dict[str, Any] = {"kv_cache_dtype": cache_dtype, "max_num_batched_tokens": tokens, "max_num_seqs": 4}
        engine = Engine(folder, **options)
        sizes.append(engine.info.cache_bytes / engine.info.num_blocks)
        reported = engine.generate(prompt, greedy(1, prompt_logprobs=0)).outputs
        entries = [entry for output in reported for entry in output.prompt_logprobs or [] if entry]
        logprobs.append(torch.tensor([entry.logprobs[0] for entry in entries]))
    assert len(logprobs[0]) == len(logprobs[1]) == len(prompt) - 1
    assert 0 < (logprobs[0] - logprobs[1]).abs().median() < 0.3  # unrelated log-probabilities differ by 3
    assert sizes[1] < 0.8 * sizes[0]


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
def test_an_int8_cache_with_chunked_prompts(tmp_path: Path, dtype: Any) -> None:
    """In every compute dtype, including steps that sample no token."""
    folder = save_model(make_model("qwen3").to(getattr(torch, dtype)), tmp_path)
    options: dict[str, Any] = {"kv_cache_dtype": "int8", "max_num_batched_tokens": 16, "max_num_seqs": 4}
    engine = Engine(folder, model=ModelOptions(dtype=dtype), **options)
    assert len(engine.generate(random_prompt(4, 60), greedy(5)).tokens) == 5


@pytest.mark.parametrize("option", ["prompt_logprobs", "speculation"])
def test_options_of_other_requests_do_not_change_logprobs(tmp_path: Path, option: str) -> None:
    """A step computes its last layer for more tokens if another request needs them."""
    folder = save_model(make_model("qwen3").bfloat16(), tmp_path)
    options: dict[str, Any] = {"kv_cache_dtype": "int8"}
    logprobs = []
    for adds in (False, True):
        extra: dict[str, Any] = {"prompt_logprobs": 0} if adds and option == "prompt_logprobs" else {}
        guessing: dict[str, Any] = {"speculative_method": "ngram"} if adds and option == "speculation" else {}
        engine = Engine(folder, model=ModelOptions(dtype="bfloat16"), **options, **guessing)
        engine.add("neighbour", [5, 6, 7] * 8, greedy(20, **extra))
        if option == "speculation":
            for _ in range(4):
                engine.step()
        engine.add("own", random_prompt(4, 40), greedy(1, logprobs=3))
        engine.run()
        logprobs.append(engine.results["own"].outputs[0].logprobs)
    assert logprobs[0] == logprobs[1]


@pytest.mark.parametrize("case", ["llama", "qwen3", "gemma2", "qwen3_moe", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_compiled_kernels_and_torch_agree(tmp_path: Path, case: str, quantization: str) -> None:
    """In bfloat16, where the kernels differ most. Single tokens may differ much, if another expert was selected."""
    folder = save_model(make_model(case).bfloat16(), tmp_path)

    def logprobs(engine: Engine) -> Tensor:
        answers = [engine.generate(random_prompt(seed, 40), greedy(1, prompt_logprobs=0)) for seed in (4, 5, 6)]
        entries = [entry for answer in answers for entry in answer.outputs[0].prompt_logprobs or [] if entry]
        return torch.tensor([entry.logprobs[0] for entry in entries])

    actual = logprobs(Engine(folder, model=ModelOptions(quantization=quantization, dtype="bfloat16")))
    with native.disabled():
        expected = logprobs(Engine(folder, model=ModelOptions(dtype="bfloat16")))
    assert len(actual) == len(expected) == 3 * 39
    assert (actual - expected).abs().median() < 0.5  # log-probabilities are around -9; unrelated ones differ by 3


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    models = {tied: make_model("qwen3", tie_word_embeddings=tied).bfloat16() for tied in (True, False)}
    sizes = {
        tied: load(save_model(model, tmp_path / str(tied)), dtype="bfloat16").weight_bytes
        for tied, model in models.items()
    }
    assert sizes[False] - sizes[True] == models[True].get_input_embeddings().weight.nbytes


def test_a_tied_table_is_quantized_once(tmp_path: Path) -> None:
    """The head and the table are one weight in 8 bits, with a scale of 16 for each 64 inputs or fewer."""
    model = make_model("qwen3", tie_word_embeddings=True).bfloat16()
    folder, table = save_model(model, tmp_path), model.get_input_embeddings().weight
    loaded = load(folder, dtype="bfloat16", quantization="int8")
    others = model.num_parameters() - table.numel()
    assert loaded.weight_bytes < 2 * others + 1.2 * table.numel()


def test_quantization_saves_memory_and_needs_quires_decoder(tmp_path: Path) -> None:
    folder = save_model(make_model("qwen3", tie_word_embeddings=False).bfloat16(), tmp_path)
    sizes = [load(folder, quantization=bits, dtype="bfloat16").weight_bytes for bits in ("none", "int8", "int4")]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 3
    with pytest.raises(UnsupportedModel, match="--quantization"):
        load(folder, model_impl="transformers", quantization="int8")
    with native.disabled(), pytest.raises(UnsupportedModel, match="--quantization"):
        load(folder, quantization="int8")
