"""What ops check of their arguments: errors name the argument and what is accepted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from quire.kernels import native
from quire.kernels.linear import PackedBFloat16
from quire.kernels.rms_norm import rms_norm

pytestmark = pytest.mark.skipif(native.instructions() is None, reason="only compiled kernels check their arguments")
Arguments = dict[str, Any]


def _norm() -> Arguments:
    return {"x": torch.randn(3, 32), "weight": torch.randn(32), "out": torch.empty(3, 32), "eps": 1e-6, "offset": 0.0}


def _decode() -> Arguments:
    pages = torch.randn(2, 5, 4, 32)
    return {
        "q": torch.randn(3, 4, 32),
        "keys": pages,
        "values": pages,
        "out": torch.empty(3, 4, 32),
        "block_tables": torch.zeros(3, 2, dtype=torch.int32),
        "seq_lens": torch.ones(3, dtype=torch.int64),
        "sinks": None,
        "window": 0,
        "scale": 1.0,
        "softcap": 0.0,
    }


def _linear() -> Arguments:
    weight = PackedBFloat16(torch.randn(40, 16).bfloat16())._data
    x, bias, out = torch.randn(3, 16).bfloat16(), torch.randn(40), torch.empty(3, 40)
    return {"x": x, "weight": weight, "bias": bias, "out": out, "act": None}


def _rope() -> Arguments:
    return {
        "x": torch.randn(3, 4, 32),
        "cos": torch.randn(3, 16),
        "sin": torch.randn(3, 16),
        "q_weight": None,
        "k_weight": None,
        "q_heads": 2,
        "k_heads": 1,
        "eps": 0.0,
        "offset": 0.0,
        "interleaved": 0,
    }


@pytest.mark.parametrize(
    ("op", "arguments", "changes", "error", "message"),
    [
        ("rms_norm", _norm, {"x": [1.0]}, TypeError, r"rms_norm\(\): x: a torch.Tensor is expected, not list"),
        ("rms_norm", _norm, {"eps": "small"}, TypeError, "eps: a float is expected, not str"),
        ("rms_norm", _norm, {"x": torch.randn(3, 32).half()}, TypeError, "x: dtype float32 or bfloat16 is expected"),
        (
            "rms_norm",
            _norm,
            {"weight": torch.randn(32).bfloat16()},
            TypeError,
            "weight: dtype float32 is expected, not bf",
        ),
        (
            "rms_norm",
            _norm,
            {"weight": torch.randn(33)},
            ValueError,
            r"weight: shape \(dim=32\) is expected, not \(33,\)",
        ),
        ("rms_norm", _norm, {"out": torch.empty(2, 32)}, ValueError, r"out: shape \(rows=3, dim=32\) is expected"),
        ("rms_norm", _norm, {"x": torch.randn(32)}, ValueError, r"x: shape \(rows, dim\) is expected, not \(32,\)"),
        ("rms_norm", _norm, {"x": torch.randn(32, 3).T}, ValueError, "x: has to be contiguous in its last dimension"),
        ("rms_norm", _norm, {"out": torch.empty(32, 3).T}, ValueError, "out: has to be contiguous in its last dim"),
        (
            "rms_norm",
            _norm,
            {"x": torch.empty(3, 32, device="meta")},
            ValueError,
            "x: a tensor in CPU memory is expected",
        ),
        ("rms_norm", _norm, {"x": torch.randn(3, 32).to_sparse()}, ValueError, "x: a tensor in CPU memory is expected"),
        (
            "paged_decode",
            _decode,
            {"seq_lens": torch.ones(3)},
            TypeError,
            "seq_lens: dtype int64 is expected, not float32",
        ),
        (
            "paged_decode",
            _decode,
            {"seq_lens": torch.ones(2).long()},
            ValueError,
            "seq_lens: shape .sequences=3. is exp",
        ),
        (
            "paged_decode",
            _decode,
            {"block_tables": torch.zeros(3, 2).long()},
            TypeError,
            "block_tables: dtype int32 is exp",
        ),
        (
            "paged_decode",
            _decode,
            {"keys": torch.randn(3, 5, 4, 32)},
            ValueError,
            "values: shape .kv_heads=3, blocks=5",
        ),
        ("paged_decode", _decode, {"q": torch.randn(3, 4, 64)}, ValueError, "q: shape .*dim of keys=32. is expected"),
        ("paged_decode", _decode, {"q": torch.randn(3, 3, 32)}, ValueError, "q: a multiple of kv_heads is expected"),
        ("paged_decode", _decode, {"sinks": torch.randn(5)}, ValueError, "sinks: shape .heads=4. is expected"),
        (
            "paged_decode",
            _decode,
            {"values": torch.zeros(2, 5, 4, 36).char()},
            ValueError,
            "values: the dtype of keys is exp",
        ),
        (
            "linear",
            _linear,
            {"out": torch.empty(3, 80)},
            ValueError,
            r"weight: shape \(panels=3, size_in / 2=8, panel=32\)",
        ),
        ("linear", _linear, {"bias": torch.randn(40).bfloat16()}, TypeError, "bias: dtype float32 is expected"),
        ("linear", _linear, {"x": torch.randn(3, 16)}, TypeError, "x: dtype bfloat16 is expected, not float32"),
        ("linear", _linear, {"act": "tanh"}, ValueError, "act: silu, gelu, gelu_tanh, quick_gelu, relu or relu2"),
        ("qk_norm_rope", _rope, {"sin": None}, ValueError, "cos, sin: both or neither has to be given"),
        ("qk_norm_rope", _rope, {"cos": torch.randn(2, 16)}, ValueError, "cos: shape .tokens=3, pairs. is expected"),
        ("qk_norm_rope", _rope, {"q_heads": 4}, ValueError, "q_heads, k_heads: at most the heads of x"),
    ],
)
def test_errors(
    op: str, arguments: Callable[[], Arguments], changes: Arguments, error: type[Exception], message: str
) -> None:
    call, good = getattr(native.kernels, op), arguments()
    assert call(**good) is None
    with pytest.raises(error, match=message):
        call(**{**good, **changes})


def test_build_inputs_checks_the_spans_of_a_step() -> None:
    int64, int32 = torch.int64, torch.int32
    arrays = native.kernels.input_arrays(
        known_tokens=torch.arange(16, dtype=int32).view(2, 8),
        known_blocks=torch.tensor([[3, 1], [0, 2]], dtype=int32),
        block_size=4,
        tokens=(tokens := torch.zeros(6, dtype=int64)),
        positions=torch.zeros(6, dtype=int64),
        slots=(slots := torch.zeros(6, dtype=int64)),
        seq_lens=torch.zeros(2, dtype=int64),
        span_counts=(span_counts := torch.zeros(4, dtype=int64)),
        block_tables=torch.zeros(2, 2, dtype=int32),
        end_rows=(end_rows := torch.zeros(2, dtype=int64)),
        end_seq_lens=torch.zeros(2, dtype=int64),
        end_block_tables=torch.zeros(2, 2, dtype=int32),
    )
    good = {"arrays": arrays, "rows": [1, 0], "starts": [7, 3], "counts": [1, 2], "singles": 1, "ends": [1]}
    assert native.kernels.build_inputs(**good) == 3
    assert (tokens[:3].tolist(), slots[:3].tolist()) == ([15, 3, 4], [11, 15, 4])
    assert (span_counts.tolist(), end_rows[0].item()) == ([1, 2, 1, 2], 2)
    for changes, message in (
        ({"rows": [2, 0]}, "rows of the request table are expected"),
        ({"starts": [8, 3]}, "positions of the context are expected"),
        ({"counts": [1]}, "one for each span is expected"),
        ({"singles": 2}, "singles: spans of one token are expected"),
        ({"singles": 3}, "singles: a number of spans is expected"),
        ({"ends": [2]}, "ends: indices of spans are expected"),
        ({"starts": [0, 0], "counts": [4, 4], "singles": 0}, "the step is larger"),
    ):
        with pytest.raises(ValueError, match=message):
            native.kernels.build_inputs(**{**good, **changes})
    with pytest.raises(TypeError, match="arrays: input_arrays is expected, not int"):
        native.kernels.build_inputs(**{**good, "arrays": 3})


def test_arguments_may_be_given_by_position_or_in_any_order() -> None:
    arguments = _norm()
    native.kernels.rms_norm(**arguments)
    expected = arguments["out"].clone()
    calls: list[Callable[[], object]] = [
        lambda: native.kernels.rms_norm(*arguments.values()),
        lambda: native.kernels.rms_norm(**dict(reversed(arguments.items()))),
        lambda: native.kernels.rms_norm(
            arguments["x"], **{key: arguments[key] for key in ("offset", "eps", "out", "weight")}
        ),
    ]
    for call in calls:
        arguments["out"].zero_()
        call()
        assert torch.equal(arguments["out"], expected)


def test_missing_and_unknown_arguments() -> None:
    arguments = _norm()
    without = {key: value for key, value in arguments.items() if key != "eps"}
    with pytest.raises(TypeError, match=r"rms_norm\(\): 5 arguments are expected, not 4"):
        native.kernels.rms_norm(**without)
    with pytest.raises(TypeError, match=r"rms_norm\(\): unknown argument 'epsilon'"):
        native.kernels.rms_norm(**without, epsilon=1e-6)
    with pytest.raises(TypeError, match="unknown argument 'x'"):
        native.kernels.rms_norm(arguments["x"], **without)


def test_disabled_is_local_to_the_thread() -> None:
    """So that one thread can run the references beside another one that runs kernels."""
    x, weight = torch.randn(3, 32), torch.randn(32)
    seen: list[tuple[object, bool]] = []

    def look() -> None:
        seen.append((native.instructions(), native.supports(x)))

    with native.disabled():
        look()
        with native.disabled():
            rms_norm(x, weight, 1e-6)
        look()
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    look()
    assert seen == [(None, False), (None, False), (native.instructions(), True), (native.instructions(), True)]


def test_supported_tensors() -> None:
    x = torch.randn(3, 32)
    assert native.supports(x)
    assert native.supports(x, torch.randn(5))
    assert native.supports(x.bfloat16()[1:])
    assert not native.supports(x, x.bfloat16())
    assert not native.supports(x.half())
    assert not native.supports(x.int())
    assert not native.supports(x.t())
    assert not native.supports(torch.empty(3, 32, device="meta"))
    assert not native.supports(torch.tensor(1.0))
