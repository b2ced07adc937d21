"""Models with convolutions and state spaces: transformers' tokens, in any schedule."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from quire.config.options import ModelOptions, ParallelOptions
from quire.engine.execution.step_graphs import StepGraphs
from quire.kernels import native
from tests.support.engine import Engine, greedy, random_prompt
from tests.support.families import (
    SCHEDULED,
    check_bits,
    check_log_probabilities,
    check_ranks,
    check_refused,
    check_schedule,
)
from tests.support.models import STATE_SPACES, make_model, save_model
from tests.support.variants import covering, slow_but

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


@pytest.mark.parametrize(
    ("case", "device"),
    slow_but([(case, device) for case in STATE_SPACES for device in ("cpu", "reference")],
             *((case, "cpu") for case in STATE_SPACES), ("lfm2", "reference"), ("jamba", "reference"),
             ("granitemoehybrid", "reference")),
)  # fmt: skip
def test_engine_equals_transformers(folders: dict[str, Path], case: str, device: Any) -> None:
    """Greedy tokens and log-probabilities, behind prompts that are longer than a chunk of either."""
    check_log_probabilities(model_of(case), folders[case], device, prompts=(5, 90))


VARIANTS: list[dict[str, Any]] = [
    *SCHEDULED,
    {"model": ModelOptions(device="reference"), "max_num_batched_tokens": 7, "max_num_seqs": 4},
]


@pytest.mark.parametrize(("case", "variant"), covering(KINDS, VARIANTS))
def test_tokens_do_not_depend_on_the_schedule(folders: dict[str, Path], case: str, variant: dict[str, Any]) -> None:
    check_schedule(folders[case], Engine(folders[case], **variant))


@pytest.mark.parametrize(
    "case", slow_but(["lfm2", "granitemoehybrid", "jamba", "falcon_h1"], "granitemoehybrid", "falcon_h1")
)
def test_tokens_do_not_depend_on_preemption(folders: dict[str, Path], case: str) -> None:
    model = ModelOptions(max_model_len=104)
    roomy = Engine(folders[case], model=model, block_size=4)
    states = roomy.runner._states.slots.memory.numel()
    size = states + 27 * (roomy.info.cache_bytes - states) // roomy.info.num_blocks
    engine = Engine(folders[case], model=model, block_size=4, kv_cache_memory_bytes=size)
    check_schedule(folders[case], engine)
    assert engine.preemptions > 0


@pytest.mark.parametrize(
    ("case", "parallel"),
    covering(KINDS, [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}]),
)
def test_tokens_do_not_depend_on_the_ranks(folders: dict[str, Path], case: str, parallel: dict[str, int]) -> None:
    check_ranks(folders[case], parallel)


def test_heads_of_one_group_are_divided_among_ranks(tmp_path: Path) -> None:
    """The ranks have a part of the states each, and normalize their elements together."""
    folder = save_model(make_model("granitemoehybrid-dense", num_hidden_layers=2, mamba_n_groups=1), tmp_path)
    whole, engine = Engine(folder), Engine(folder, parallel=ParallelOptions(tensor_parallel_size=2))
    try:
        check_schedule(folder, engine)
        part, states = (tested.runner._states.slots.memory.shape[1] for tested in (engine, whole))
        assert part < 0.6 * states
    finally:
        engine.core.close()


@pytest.mark.skipif(native.instructions() is None, reason="torch's products sum in another order with more rows")
@pytest.mark.parametrize(("case", "quantization"), covering(KINDS, ["none", "int8"]))
def test_bits_in_low_precision_do_not_depend_on_the_batch(
    folders: dict[str, Path], case: str, quantization: Any
) -> None:
    check_bits(folders[case], quantization)


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
    check_refused(model_of(case), folders[case], changes, message, tmp_path)
