"""Models with convolutions and state spaces: transformers' tokens, in any schedule."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.config.options import ModelOptions, ParallelOptions
from quire.engine.execution.step_graphs import StepGraphs
from quire.engine.models.errors import UnsupportedModel
from quire.kernels import native
from tests.support.engine import Engine, greedy, load, random_prompt
from tests.support.invariance import SCHEDULES, together, workload
from tests.support.models import STATE_SPACES, make_model, save_model
from tests.support.variants import covering, slow_but

SEED = 1
# One of each kind of layer: a short convolution, a state space of heads with experts, one of channels, one beside
# attention, layers that are one thing alone.
KINDS = ("lfm2", "granitemoehybrid", "jamba", "falcon_h1", "nemotron_h")


@cache
def model_of(case: str) -> Any:
    layers = {} if case == "nemotron_h" else {"num_hidden_layers": 2}
    return make_model(case, **layers)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders of models, which are written when they are needed first."""

    class Folders(dict[str, Path]):
        def __missing__(self, case: str) -> Path:
            self[case] = save_model(model_of(case), tmp_path_factory.mktemp("model"))
            return self[case]

    return Folders()


@cache
def alone(folder: Path, dtype: Any = "auto") -> list[list[int]]:
    engine = Engine(folder, model=ModelOptions(dtype=dtype), enable_prefix_caching=False)
    return [engine.generate(prompt, params).tokens for prompt, params in workload(SEED)]


@pytest.mark.parametrize(
    ("case", "device"),
    slow_but([(case, device) for case in STATE_SPACES for device in ("cpu", "reference")],
             *((case, "cpu") for case in STATE_SPACES), ("lfm2", "reference"), ("jamba", "reference"),
             ("granitemoehybrid", "reference")),
)  # fmt: skip
def test_engine_equals_transformers(folders: dict[str, Path], case: str, device: Any) -> None:
    """Greedy tokens and log-probabilities, behind prompts that are longer than a chunk of either."""
    options = ModelOptions(device=device)
    engine = Engine(folders[case], model=options, block_size=8, max_num_batched_tokens=48)
    assert engine.info.implementation == "quire"
    for seed, length in ((1, 5), (2, 90)):
        prompt = random_prompt(seed, length)
        result = engine.generate(prompt, greedy(16, logprobs=20))
        with torch.inference_mode():
            sequence = torch.tensor([[*prompt, *result.tokens[:-1]]])
            logits = model_of(case)(sequence, use_cache=False).logits[0, length - 1 :].float()
        assert result.tokens == logits.argmax(-1).tolist()
        expected = logits.log_softmax(-1)
        for step, output in enumerate(result.outputs):
            assert output.logprobs is not None
            ids, values = output.logprobs[0].token_ids, torch.tensor(output.logprobs[0].logprobs)
            assert ((values - expected[step][ids]).abs().max() / logits[step].abs().max()).item() < 1e-4


VARIANTS: list[dict[str, Any]] = [
    SCHEDULES["small chunks"],
    SCHEDULES["speculation"],
    {"in_flight": 2, "block_size": 4},
    {"model": ModelOptions(device="reference"), "max_num_batched_tokens": 7, "max_num_seqs": 4},
]


@pytest.mark.parametrize(("case", "variant"), covering(KINDS, VARIANTS))
def test_tokens_do_not_depend_on_the_schedule(folders: dict[str, Path], case: str, variant: dict[str, Any]) -> None:
    engine = Engine(folders[case], **variant)
    assert together(engine, workload(SEED), SEED) == alone(folders[case])


@pytest.mark.parametrize(
    "case", slow_but(["lfm2", "granitemoehybrid", "jamba", "falcon_h1"], "granitemoehybrid", "falcon_h1")
)
def test_tokens_do_not_depend_on_preemption(folders: dict[str, Path], case: str) -> None:
    model = ModelOptions(max_model_len=104)
    roomy = Engine(folders[case], model=model, block_size=4)
    states = roomy.runner._states.slots.memory.numel()
    size = states + 27 * (roomy.info.cache_bytes - states) // roomy.info.num_blocks
    engine = Engine(folders[case], model=model, block_size=4, kv_cache_memory_bytes=size)
    assert together(engine, workload(SEED), SEED) == alone(folders[case])
    assert engine.preemptions > 0


@pytest.mark.parametrize(
    ("case", "parallel"),
    covering(KINDS, [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}]),
)
def test_tokens_do_not_depend_on_the_ranks(folders: dict[str, Path], case: str, parallel: dict[str, int]) -> None:
    engine = Engine(folders[case], parallel=ParallelOptions(**parallel))
    try:
        assert together(engine, workload(SEED), SEED) == alone(folders[case])
    finally:
        engine.core.close()


def test_heads_of_one_group_are_divided_among_ranks(tmp_path: Path) -> None:
    """The ranks have a part of the states each, and normalize their elements together."""
    folder = save_model(make_model("granitemoehybrid-dense", num_hidden_layers=2, mamba_n_groups=1), tmp_path)
    whole, engine = Engine(folder), Engine(folder, parallel=ParallelOptions(tensor_parallel_size=2))
    try:
        assert together(engine, workload(SEED), SEED) == alone(folder)
        part, states = (tested.runner._states.slots.memory.shape[1] for tested in (engine, whole))
        assert part < 0.6 * states
    finally:
        engine.core.close()


@pytest.mark.skipif(native.instructions() is None, reason="torch's products sum in another order with more rows")
@pytest.mark.parametrize(("case", "quantization"), covering(KINDS, ["none", "int8"]))
def test_bits_in_low_precision_do_not_depend_on_the_batch(
    folders: dict[str, Path], case: str, quantization: Any
) -> None:
    model = ModelOptions(dtype="bfloat16", quantization=quantization)
    requests = [(random_prompt(seed, 5 + 17 * seed), greedy(12, logprobs=3)) for seed in range(4)]
    batch, single = Engine(folders[case], model=model, max_num_batched_tokens=16), Engine(folders[case], model=model)
    for index, request in enumerate(requests):
        batch.add(f"r{index}", *request)
    batch.run()
    for index, request in enumerate(requests):
        outputs = zip(batch.results[f"r{index}"].outputs, single.generate(*request).outputs, strict=True)
        assert all(beside_others.logprobs == by_itself.logprobs for beside_others, by_itself in outputs)


@pytest.mark.skipif(native.instructions() is None, reason="only calls of the compiled kernels can be captured")
@pytest.mark.parametrize("case", ["lfm2", "granitemoehybrid-dense", "mamba", "mamba2"])
def test_decode_steps_are_replayed(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And give the same tokens, of sequences that begin and end at different steps."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1} if case != "mamba2" else {}
    folder = save_model(make_model(case, num_hidden_layers=2, **heads), tmp_path)

    def tokens() -> tuple[list[list[int]], StepGraphs]:
        engine = Engine(folder, model=ModelOptions(dtype="bfloat16"))
        for number in range(4):
            engine.add(str(number), random_prompt(number, 1 + 9 * number), greedy(8 + 7 * number))
            engine.step()
        engine.run()
        return [engine.results[str(number)].tokens for number in range(4)], engine.runner.steps

    replayed, steps = tokens()
    assert steps.graphs
    monkeypatch.setattr(StepGraphs, "logits", lambda self, *args: self._eager.logits(*args))
    assert tokens()[0] == replayed


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("lfm2", {"layer_types": ["conv", "sliding_attention"]}, "layer_types must name 2 layers; accepted are conv"),
        ("lfm2", {"conv_L_cache": 1}, "width of its convolutions is 1, but must be at least 2"),
        ("bamba", {"mamba_n_groups": 3}, "4 heads of a state space cannot be split into 3 groups"),
        ("lfm2_moe", {"use_expert_bias": False}, "use_expert_bias must be true"),
        ("mamba", {"hidden_act": "gelu"}, "hidden_act is 'gelu', but must be 'silu'"),
        ("mamba2", {"state_size": 0}, "state is 0, but must be above 0"),
        ("falcon_h1", {"ssm_multipliers": [1.0]}, "ssm_multipliers is .*, but 5 numbers are expected"),
        ("nemotron_h", {"moe_latent_size": 32}, "moe_latent_size is not supported"),
    ],
)
def test_configs_that_are_not_supported_are_refused(
    folders: dict[str, Path], case: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = type(model_of(case).config).from_pretrained(folders[case])
    for name, value in changes.items():
        object.__setattr__(config, name, value)
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=message):
        load(tmp_path, model_impl="quire")
