"""Spans of an engine's steps, made where the engine runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from quire.engine.client.pooling_params import PoolingParams
from quire.engine.client.trace_context import TraceContext
from quire.tracing.engine_spans import EngineSpans
from quire.tracing.span import Attributes
from quire.tracing.tracing import Sampler
from tests.support.engine import Engine, greedy, random_prompt
from tests.support.models import make_model, save_model
from tests.support.traces import Trees

PARENT = TraceContext("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", state="a=1")


class Ids(Sampler):
    """Numbers as ids."""

    def __init__(self) -> None:
        self._last = 0

    @override
    def begin(self, parent: TraceContext | None, attributes: Callable[[], Attributes]) -> TraceContext:
        raise AssertionError("the engine begins no trace")

    @override
    def child(self, parent: TraceContext) -> TraceContext:
        self._last += 1
        return TraceContext(parent.trace_id, f"{self._last:016x}", True, parent.state)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(make_model("llama"), tmp_path_factory.mktemp("model"))


def traced(folder: Path, **options: Any) -> tuple[Engine, Trees]:
    engine, trees = Engine(folder, **options), Trees()
    engine.core.step_observer = EngineSpans(Ids(), trees)
    return engine, trees


def test_a_request_has_a_span_with_its_chunks_and_steps(folder: Path) -> None:
    engine, trees = traced(folder, max_num_batched_tokens=32)
    engine.add("a", random_prompt(1, 80), greedy(5), trace=PARENT)
    engine.add("b", random_prompt(2, 4), greedy(5))
    engine.run()
    (tree,) = trees.trees
    assert (tree.context.trace_id, tree.context.state, tree.parent) == (PARENT.trace_id, "a=1", PARENT)
    (span,) = trees.spans
    assert (span.name, span.failed) == ("engine", False)
    chunks = [child for child in span.children if child.name == "prefill_chunk"]
    assert sum(int(str(chunk.attributes["quire.tokens"])) for chunk in chunks) == 80
    assert span.attributes == {"quire.prefill.steps": len(chunks), "quire.decode.steps": 4}
    steps = span.children[-1]
    assert (steps.name, steps.attributes["quire.steps"]) == ("decode_steps", 4)
    assert 1 <= float(str(steps.attributes["quire.steps.mean_sequences"])) <= 2
    for child in span.children:
        assert span.began <= child.began <= child.ended <= span.ended


def test_requests_end_however_they_do(folder: Path) -> None:
    engine, trees = traced(folder)
    engine.add("refused", [], greedy(5), trace=PARENT)
    engine.add("aborted", random_prompt(1, 8), greedy(500), trace=PARENT)
    engine.step()
    engine.abort("aborted")
    engine.add("pooled", random_prompt(1, 8), PoolingParams(task="embed"), trace=PARENT)  # not of this model
    engine.run()
    assert len(trees.trees) == 3


def test_long_prompts_have_a_bounded_number_of_spans(folder: Path) -> None:
    engine, trees = traced(folder, max_num_batched_tokens=8, max_num_seqs=4)
    engine.add("a", random_prompt(1, 200), greedy(2), trace=PARENT)
    engine.run()
    (span,) = trees.spans
    assert span.attributes["quire.prefill.steps"] == 25
    assert len(span.children) == 17
    assert span.count == 18
