"""Models on ranks of two nodes give the tokens of one rank; what has to be the same on all nodes."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.config.options import EngineOptions, ModelOptions, ParallelOptions
from quire.engine.build.core_config import CoreConfig
from quire.engine.build.nodes import facts_of, run_node
from quire.engine.execution.ranks.errors import NodesMissing
from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.model_config import read_model_config
from tests.support.engine import Engine, greedy, random_prompt
from tests.support.models import make_model, save_model
from tests.support.parallel import EP, PP, TP
from tests.support.process import free_port
from tests.support.ranks import ThreadRank

PROMPTS = [random_prompt(1, 5), random_prompt(2, 40)]


def settings(parallel: dict[str, Any], nodes: int, port: int, node: int) -> ParallelOptions:
    """Those of a node; each has another loopback address."""
    common = {"nnodes": nodes, "master_addr": "127.0.0.1", "master_port": port, "distributed_timeout_seconds": 60.0}
    return ParallelOptions(**parallel, **common, node_rank=node, headless=node > 0, node_addr=f"127.0.0.{node + 1}")


def config_of(folder: Path, parallel: ParallelOptions, **options: Any) -> CoreConfig:
    return CoreConfig(
        folder=folder,
        model_config=read_model_config(folder),
        model=ModelOptions(dtype="float32"),
        engine=EngineOptions(
            **{"kv_cache_memory_bytes": 8 << 20, "max_num_batched_tokens": 30, "max_num_seqs": 16, **options}
        ),
        parallel=parallel,
    )


@contextmanager
def on_nodes(folder: Path, parallel: dict[str, Any], nodes: int, **options: Any) -> Iterator[Engine]:
    """An engine whose ranks are on several nodes, all in threads of this process."""
    port = free_port()
    with ThreadPoolExecutor(nodes) as threads:
        others = [
            threads.submit(
                run_node,
                config_of(folder, settings(parallel, nodes, port, node), **options),
                lambda: False,
                lambda: None,
                ThreadRank,
            )
            for node in range(1, nodes)
        ]
        engine = Engine(
            folder, parallel=settings(parallel, nodes, port, 0), max_num_batched_tokens=30, launch=ThreadRank, **options
        )
        try:
            yield engine
        finally:
            engine.core.close()
        for other in others:
            other.result(60)


@pytest.mark.parametrize(
    ("case", "parallel", "nodes"),
    [
        ("llama", TP, 2),
        ("gemma3", PP, 2),
        pytest.param("qwen3_moe", EP, 2, marks=pytest.mark.slow),
        pytest.param("llama", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, 2, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", {"tensor_parallel_size": 4}, 4, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_ranks_on_several_nodes_give_the_tokens_of_one(
    case: str, parallel: dict[str, Any], nodes: int, tmp_path: Path
) -> None:
    """Prompts in chunks, together, then again from the prefix cache."""
    folder = save_model(make_model(case), tmp_path)
    alone = Engine(folder, block_size=8, max_num_batched_tokens=30)
    expected = [alone.generate(prompt, greedy(10)).tokens for prompt in PROMPTS]
    alone.core.close()
    with on_nodes(folder, parallel, nodes, block_size=8) as engine:
        for index, prompt in enumerate(PROMPTS):
            engine.add(str(index), prompt, greedy(10))
        engine.run()
        assert [engine.results[str(index)].tokens for index in range(2)] == expected
        assert [engine.generate(prompt, greedy(10)).tokens for prompt in PROMPTS] == expected


def test_what_has_to_be_the_same_on_all_nodes(tmp_path: Path) -> None:
    folder = save_model(make_model("llama"), tmp_path / "one")
    other = save_model(make_model("llama", num_hidden_layers=1), tmp_path / "other")
    config = config_of(folder, ParallelOptions(**TP))
    facts = facts_of(config)

    def differing(changed: CoreConfig) -> set[str]:
        theirs = facts_of(changed)
        return {name for name in facts.keys() | theirs.keys() if facts.get(name) != theirs.get(name)}

    def with_engine(**options: Any) -> CoreConfig:
        return replace(config, engine=config.engine.model_copy(update=options))

    def with_model(**options: Any) -> CoreConfig:
        return replace(config, model=config.model.model_copy(update=options))

    assert differing(config) == set()
    assert differing(replace(config, folder=other)) == {"the digest of config.json", "the digest of the weights"}
    assert differing(with_engine(block_size=32, num_threads=3, kv_cache_memory_bytes=1 << 30)) == {"--block-size"}
    assert differing(with_model(dtype="bfloat16", revision="main")) == {"--dtype"}
    assert differing(replace(config, parallel=ParallelOptions(tensor_parallel_size=4, node_rank=1))) == {
        "--tensor-parallel-size"
    }


def test_a_weight_that_differs_is_noticed(tmp_path: Path) -> None:
    """Files of the same names and sizes: two fine-tuned models, for example."""
    folder = save_model(make_model("llama"), tmp_path)
    before = facts_of(config_of(folder, ParallelOptions(**TP)))
    (file,) = folder.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    after = facts_of(config_of(folder, ParallelOptions(**TP)))
    assert {name for name in before if before[name] != after[name]} == {"the digest of the weights"}


def test_a_model_that_cannot_be_divided_ends_a_node_before_it_joins(tmp_path: Path) -> None:
    folder = save_model(make_model("llama"), tmp_path)
    config = config_of(folder, settings({"tensor_parallel_size": 3}, 3, free_port(), 1))
    with pytest.raises(UnsupportedModel, match="--tensor-parallel-size"):
        run_node(config, lambda: False, lambda: None)


def test_a_node_that_does_not_come_ends_the_engine(tmp_path: Path) -> None:
    folder = save_model(make_model("llama"), tmp_path)
    parallel = settings(TP, 2, free_port(), 0).model_copy(update={"distributed_timeout_seconds": 0.01})
    with pytest.raises(NodesMissing, match="node 1 of 2 did not come"):
        Engine(folder, parallel=parallel)
