"""Compares what the engine computes for a model folder with what transformers computes for it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from quire.engine.client.pooling_params import PoolingParams
from tests.support.engine import Engine, greedy
from tests.support.models import draw_weights

TOLERANCE = 1e-4  # of the largest logit
_HIDDEN_TOLERANCE = 1e-3  # of the largest element; rounding needs a fifth of it, a window that is off by one much more
_ROUNDING = 2.0**-24  # of a float32


def write_folder(folder: Path, config: dict[str, Any], *, seed: int = 0) -> Path:
    """Write a config.json as given, and random weights for what transformers makes of it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    parsed = AutoConfig.from_pretrained(folder)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(parsed, attn_implementation="eager", dtype=torch.float32)
    draw_weights(model, config["model_type"])
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))  # transformers has rewritten it
    return folder


def change_weights(folder: Path, changes: dict[str, torch.Tensor], *, remove: Sequence[str] = ()) -> None:
    """Add, replace or remove tensors of a folder's weights."""
    path = folder / "model.safetensors"
    weights = {name: tensor for name, tensor in load_file(path).items() if name not in remove}
    save_file({**weights, **changes}, path, metadata={"format": "pt"})


def transformers_model(folder: Path) -> Any:
    """The model of a folder as transformers loads it."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return model


def generated(model: Any, prompt: list[int], count: int) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens of Hugging Face's implementation with its KV cache, and the logits of each."""
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    return out.sequences[0, len(prompt) :].tolist(), torch.stack(out.logits)[:, 0]


def assert_equal(folder: Path, prompts: Sequence[list[int]], tokens: int = 6, **options: Any) -> Engine:
    """Check the log-probabilities of prompts and the greedy tokens after them; `options` are the engine's.

    All prompts run together, twice: the second time they find what the first has left in the prefix cache.
    Where rounding alone changes transformers' own results by more than the tolerance, four times that is allowed.
    Where rounding alone decides which of two tokens is the likeliest, either is right, and the rest is skipped.
    """
    model = transformers_model(folder)
    engine = Engine(folder, **{"block_size": 8, "max_num_batched_tokens": 48, **options})
    for run in range(2):
        for i, prompt in enumerate(prompts):
            engine.add(f"{run}-{i}", prompt, greedy(tokens, logprobs=5, prompt_logprobs=None if run else 3))
        engine.run()
    for i, prompt in enumerate(prompts):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt])).logits[0].float()
        expected, generated_logits = generated(model, prompt, tokens)
        sequence = torch.tensor([[*prompt, *expected]])
        pairs: list[tuple[Any, torch.Tensor, int]] = []  # what the engine says, transformers' logits, their position
        for run in range(2):
            result = engine.results[f"{run}-{i}"]
            assert result.error is None
            same = _same_tokens(result.tokens, expected)
            if same < len(expected):
                gap = _gap(generated_logits[same], expected[same], result.tokens[same])
                noise = _noise(model, sequence)[len(prompt) - 1 + same]
                assert gap < 4 * noise, f"prompt {i} of {len(prompt)} tokens, run {run}, token {same}: {gap} {noise}"
            for step, output in enumerate(result.outputs[: same + 1]):
                assert output.logprobs is not None
                pairs.append((output.logprobs[0], generated_logits[step], len(prompt) - 1 + step))
        reported = engine.results[f"0-{i}"].outputs[0].prompt_logprobs
        assert reported is not None
        pairs += [(entry, logits[position], position) for position, entry in enumerate(reported[1:])]
        errors = torch.tensor([_error(entry, row) for entry, row, _ in pairs])
        if errors.max() >= TOLERANCE:
            noise = _noise(model, sequence)[[position for *_, position in pairs]]
            assert (errors < (4 * noise).clamp(min=TOLERANCE)).all(), (errors, noise)
    return engine


def assert_hidden_equal(folder: Path, prompts: Sequence[list[int]]) -> None:
    """Check the hidden states of prompts that run together; a prompt is cut where the engine's longest text ends."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    engine = Engine(folder, max_num_batched_tokens=64)
    params = PoolingParams(task="token_embed", use_activation=False)
    texts = [prompt[: engine.info.max_model_len] for prompt in prompts]
    for i, text in enumerate(texts):
        engine.add(str(i), text, params)
    engine.run()
    for i, text in enumerate(texts):
        with torch.inference_mode():
            expected = model.base_model(torch.tensor([text])).last_hidden_state[0]
        pooled = engine.results[str(i)].pooled
        assert pooled is not None, engine.results[str(i)].error
        error = (torch.from_numpy(pooled.data) - expected).abs().max() / expected.abs().max()
        assert error < _HIDDEN_TOLERANCE, f"text {i} of {len(text)} tokens: {error}"


def _same_tokens(tokens: Sequence[int], expected: Sequence[int]) -> int:
    """The number of tokens before the first that differs."""
    assert len(tokens) == len(expected)
    pairs = zip(tokens, expected, strict=True)
    return next((i for i, (token, other) in enumerate(pairs) if token != other), len(expected))


def _gap(logits: torch.Tensor, expected: int, token: int) -> float:
    """How much less likely a token is than the expected one, as `_error` counts it."""
    return float((logits[expected] - logits[token]) / logits.abs().max())


def _error(entry: Any, logits: torch.Tensor) -> float:
    """The largest error of log-probabilities, as a part of the largest logit."""
    expected = logits.float().log_softmax(-1)[entry.token_ids]
    return float((torch.tensor(entry.logprobs) - expected).abs().max() / logits.abs().max())


def _noise(model: Any, token_ids: torch.Tensor) -> torch.Tensor:
    """How much logits at each position change if all layers' outputs are rounded otherwise, as `_error` counts it."""

    def rounded(_module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output * (1 + _ROUNDING * torch.randn_like(output))

    def logits() -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = model(token_ids).logits[0].float()
        return logits

    kinds = (torch.nn.Embedding, torch.nn.Linear)
    exact = logits()
    hooks = [part.register_forward_hook(rounded) for part in model.modules() if isinstance(part, kinds)]
    torch.manual_seed(0)
    runs = torch.stack([logits() for _ in range(8)])
    for hook in hooks:
        hook.remove()
    changes = (runs.log_softmax(-1) - exact.log_softmax(-1)).abs().amax(-1)
    return changes.amax(0) / exact.abs().amax(-1)
