"""Whisper computes what transformers computes."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from quire.config.options import ModelOptions
from quire.engine.client.pooling_params import PoolingParams
from quire.engine.client.sampling_params import SamplingParams, TokenProbs
from tests.support.engine import Engine, greedy
from tests.support.variants import slow_but
from tests.support.whisper import (
    BEGIN,
    BEGIN_SUPPRESS,
    END,
    ENGLISH,
    GERMAN,
    NO_SPEECH,
    NO_TIMESTAMPS,
    PREVIOUS,
    RULE,
    START,
    SUPPRESS,
    TRANSCRIBE,
    TRANSLATE,
    expected_tokens,
    features,
    generated,
    item,
    make_whisper,
    save_whisper,
    shortened,
)

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "distilled": {"decoder_layers": 1, "d_model": 96, "decoder_attention_heads": 3, "encoder_attention_heads": 6},
    "relu, untied": {"activation_function": "relu", "tie_word_embeddings": False},
}
PROMPTS = (
    [START],
    [START, ENGLISH, TRANSCRIBE, NO_TIMESTAMPS],
    [START, GERMAN, TRANSLATE],
    [PREVIOUS, 4, 6, 9, 20, 31, 8, 44, START, ENGLISH, TRANSCRIBE, BEGIN],
)


def suppressing(max_tokens: int, **fields: Any) -> SamplingParams:
    """Greedy, without the tokens that generation_config.json suppresses."""
    return greedy(
        max_tokens,
        eos_token_ids=(END,),
        bad_words=tuple((token,) for token in SUPPRESS),
        begin_suppress_tokens=tuple(BEGIN_SUPPRESS),
        **fields,
    )


@pytest.mark.parametrize(
    ("kind", "device"),
    slow_but(product(KINDS, ["cpu", "reference"]), *((kind, "cpu") for kind in KINDS), ("plain", "reference")),
)
def test_greedy_tokens_equal_transformers(tmp_path: Path, kind: str, device: str) -> None:
    """In chunks of at most 5 tokens, all together, and each alone."""
    model = make_whisper(**KINDS[kind])
    folder = save_whisper(model, tmp_path)
    engine = Engine(folder, model=ModelOptions(device=device), block_size=8, max_num_batched_tokens=5, max_num_seqs=5)
    cases = [(seed, prompt) for seed in range(2) for prompt in PROMPTS]
    for index, (seed, prompt) in enumerate(cases):
        engine.add(str(index), prompt, greedy(8, eos_token_ids=(END,)), items=(item(seed),))
    engine.run()
    expected = [expected_tokens(model, seed, prompt, 8) for seed, prompt in cases]
    assert len({tuple(tokens) for tokens in expected}) > len(cases) // 2, "the outputs say nothing about the inputs"
    assert [engine.results[str(index)].tokens for index in range(len(cases))] == expected
    alone = Engine(folder, model=ModelOptions(device=device))
    assert [
        alone.generate(prompt, greedy(8, eos_token_ids=(END,)), items=(item(seed),)).tokens for seed, prompt in cases
    ] == expected


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_shorter_items(whisper: Any, whisper_folder: Path, device: str) -> None:
    """Items of different lengths in one batch, each as in a model whose encoder has as many positions."""
    engine = Engine(whisper_folder, model=ModelOptions(device=device), block_size=8, max_num_batched_tokens=64)
    prompt = [START, ENGLISH, TRANSCRIBE]
    for length in (1, 7, 16, 33, 40):
        engine.add(str(length), prompt, greedy(10, eos_token_ids=(END,)), items=(item(4, length),))
    engine.run()
    for length in (1, 7, 16, 33, 40):
        expected = expected_tokens(shortened(whisper, length), 4, prompt, 10, length)
        assert engine.results[str(length)].tokens == expected
    refused = engine.generate([*prompt, 9], PoolingParams(task="align", num_positions=8), items=(item(4, 7),))
    assert "num_positions must be from 1 to 7" in (refused.error or "")


@pytest.mark.parametrize("timestamps", [False, True])
@pytest.mark.parametrize("task", ["transcribe", "translate"])
def test_the_rules_of_generate(whisper: Any, whisper_folder: Path, task: str, timestamps: bool) -> None:
    """Suppressed tokens and timestamps are as in transformers' generate, with language and task forced."""
    engine = Engine(whisper_folder)
    token = {"transcribe": TRANSCRIBE, "translate": TRANSLATE}[task]
    for seed in range(6):
        prompt = [START, GERMAN, token, *([] if timestamps else [NO_TIMESTAMPS])]
        expected = generated(whisper, seed, language="de", task=task, return_timestamps=timestamps)
        assert expected[: len(prompt)] == prompt
        params = suppressing(len(expected) - len(prompt), timestamp_rule=RULE if timestamps else None)
        assert engine.generate(prompt, params, items=(item(seed),)).tokens == expected[len(prompt) :]


def test_the_timestamp_rule_equals_transformers(whisper_folder: Path) -> None:
    """On random logits and outputs, not only on those that a greedy choice leads to."""
    from transformers import GenerationConfig
    from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

    config = GenerationConfig(eos_token_id=END)
    config.no_timestamps_token_id, config.max_initial_timestamp_index = NO_TIMESTAMPS, 8
    engine = Engine(whisper_folder)
    prompt = [START, ENGLISH, TRANSCRIBE]
    processor = WhisperTimeStampLogitsProcessor(config, begin_index=len(prompt))
    rule = next(s for s in engine.runner._sampler._processors if type(s).__name__ == "Timestamps")
    generator = torch.Generator().manual_seed(0)
    table = engine.runner._table
    engine.add("a", prompt, suppressing(40, timestamp_rule=RULE), items=(item(0),))
    engine.step()
    row = table.row_of("a")
    for length in [0, 1, 2, 3, 5, 8] * 12:
        stamps = (BEGIN + torch.randint(0, 12, (length,), generator=generator)).sort().values
        text = torch.randint(0, 80, (length,), generator=generator)
        output = torch.where(torch.rand(length, generator=generator) < 0.6, stamps, text).tolist()
        known = [*prompt, *output]
        table.tokens[row, : len(known)], table.lengths[row] = known, len(known)
        logits = torch.randn(130, generator=generator) * 3
        expected = processor(torch.tensor([known]), logits[None])[0]
        rule.apply(logits, row, table)
        assert logits.equal(expected), output


def test_probabilities_at_the_start_token(whisper: Any, whisper_folder: Path) -> None:
    """Also where the prompt is computed in chunks, or was found in the prefix cache."""
    engine = Engine(whisper_folder, block_size=4, max_num_batched_tokens=3, max_num_seqs=2)
    prompt = [PREVIOUS, *range(10, 20), START, ENGLISH, TRANSCRIBE]
    token_probs = TokenProbs(prompt.index(START), (NO_SPEECH, ENGLISH, GERMAN))
    with torch.inference_mode():
        logits = whisper(torch.from_numpy(features(3))[None], decoder_input_ids=torch.tensor([prompt])).logits
    expected = logits[0, token_probs.position].softmax(-1)[list(token_probs.token_ids)]
    for _ in range(2):
        outputs = engine.generate(prompt, suppressing(3, token_probs=token_probs), items=(item(3),)).outputs
        torch.testing.assert_close(torch.tensor(outputs[0].token_probs), expected, atol=1e-5, rtol=1e-4)
        assert all(output.token_probs is None for output in outputs[1:])
    assert outputs[0].cached_tokens == 8


@pytest.mark.parametrize("frames", [None, 17])
def test_alignment_equals_transformers(whisper: Any, whisper_folder: Path, frames: int | None) -> None:
    prompt = [START, ENGLISH, TRANSCRIBE, NO_TIMESTAMPS]
    tokens = [*prompt, *range(20, 34), END]
    with torch.inference_mode():
        out = whisper(
            torch.from_numpy(features(5))[None], decoder_input_ids=torch.tensor([tokens]), output_attentions=True
        )
    heads = whisper.generation_config.alignment_heads
    weights = torch.stack([out.cross_attentions[layer][0, head] for layer, head in heads])[:, len(prompt) :, :frames]
    weights = (weights - weights.mean(1, keepdim=True)) / weights.std(1, keepdim=True, unbiased=False)
    padded = torch.nn.functional.pad(weights, (3, 3), mode="reflect")
    expected = padded.unfold(-1, 7, 1).sort().values[..., 3].mean(0)
    task = PoolingParams(task="align", skip_tokens=len(prompt), num_positions=frames)
    engine = Engine(whisper_folder, max_num_batched_tokens=6, max_num_seqs=4)
    for run in range(2):  # the second finds the item, and would find the tokens
        engine.add(f"other-{run}", prompt, greedy(8), items=(item(run),))
        pooled = engine.generate(tokens, task, items=(item(5),)).pooled
        assert pooled is not None
        torch.testing.assert_close(torch.from_numpy(pooled.data.copy()), expected, atol=1e-4, rtol=1e-4)
    assert engine.items_cached > 0


def test_alignment_beside_a_sequence_that_has_reported_its_probabilities(whisper_folder: Path) -> None:
    prompt = [START, ENGLISH, TRANSCRIBE, NO_TIMESTAMPS]
    engine = Engine(whisper_folder)
    engine.add("text", prompt, greedy(12, token_probs=TokenProbs(0, (NO_SPEECH,))), items=(item(1),))
    engine.step()
    engine.step()
    tokens = [*prompt, *range(20, 34), END]
    engine.add("times", tokens, PoolingParams(task="align", skip_tokens=len(prompt)), items=(item(2),))
    for _ in range(30):
        if engine.busy:
            engine.step()
    assert engine.results["times"].pooled is not None
    assert not engine.busy


def test_facts_for_the_front_end(whisper: Any, whisper_folder: Path, tmp_path: Path) -> None:
    engine = Engine(whisper_folder)
    info = engine.info
    assert info.tasks == ("transcribe",)
    speech = engine.speech
    assert speech.languages == {"en": ENGLISH, "de": GERMAN}
    assert (speech.start_token, speech.transcribe_token, speech.translate_token) == (START, TRANSCRIBE, TRANSLATE)
    assert (speech.no_speech_token, speech.previous_token) == (NO_SPEECH, PREVIOUS)
    assert (speech.no_timestamps_token, speech.timestamp_begin) == (NO_TIMESTAMPS, BEGIN)
    assert (speech.num_columns, speech.num_positions, speech.window_seconds) == (80, 40, 0.8)
    assert speech.suppress_tokens == tuple(SUPPRESS)
    english = save_whisper(whisper, tmp_path, without=("lang_to_id", "task_to_id", "alignment_heads"))
    other = Engine(english).speech
    assert (other.languages, other.transcribe_token) == ({}, None)


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("cache_dtype", ["auto", "int8"])
def test_low_precision_stays_close(whisper_folder: Path, quantization: str, cache_dtype: str) -> None:
    """Probabilities in bfloat16 and int8 are near those in float32."""
    prompt = [START, ENGLISH, TRANSCRIBE]
    token_probs = TokenProbs(2, tuple(range(130)))
    exact = Engine(whisper_folder).generate(prompt, greedy(1, token_probs=token_probs), items=(item(1),))
    rough = Engine(
        whisper_folder,
        model=ModelOptions(dtype="bfloat16", quantization=quantization),
        kv_cache_dtype=cache_dtype,
        block_size=32,
    ).generate(prompt, greedy(1, token_probs=token_probs), items=(item(1),))
    distance = 0.5 * sum(
        abs(a - b) for a, b in zip(exact.outputs[0].token_probs or [], rough.outputs[0].token_probs or [], strict=True)
    )
    assert distance < 0.2


def test_audio_for_which_the_model_computes_nan(tmp_path: Path) -> None:
    """It ends with an error, and its encoding is not kept for other requests with this audio."""
    model = make_whisper()
    engine = Engine(save_whisper(model, tmp_path))
    good, loud = item(1), item(2)
    loud = msgspec.structs.replace(loud, features=np.full_like(loud.features, 3e38))
    for name, audio in (("bad", loud), ("good", good)):
        engine.add(name, [START, ENGLISH, TRANSCRIBE], suppressing(4), items=(audio,))
    engine.run()
    assert "not a finite number" in (engine.results["bad"].error or "")
    assert engine.results["good"].error is None
    assert (engine.blocks_used, engine.corrupted, engine.items_cached) == (0, 1, 0)
    engine.generate([START, ENGLISH, TRANSCRIBE], suppressing(4), items=(loud,))
    assert engine.items_cached == 0
    engine.generate([START, ENGLISH, TRANSCRIBE], suppressing(4), items=(good,))
    assert engine.items_cached == 1
