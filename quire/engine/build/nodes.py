"""What nodes that run a model together must have in common, and the body of a node other than node 0."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

import quire
from quire.engine.build.core_config import CoreConfig
from quire.engine.build.ranks import run_rank
from quire.engine.execution.devices.select import uses_gpu
from quire.engine.execution.ranks.node import Node
from quire.engine.execution.ranks.node_messages import Choices
from quire.engine.execution.ranks.nodes import JoinedNode, NodeListener
from quire.engine.execution.ranks.workers import Launcher
from quire.engine.models.checkpoint.packed_cache import samples_of, source_digest
from quire.engine.models.distributed.placement import Placement
from quire.engine.models.sharding.decoder import check_parallel
from quire.engine.models.sharding.shard import check_divisible
from quire.engine.models.specs.decoder import DecoderSpec
from quire.kernels import native

# Settings that may differ: of a machine, or of the core, which is on node 0 only.
_OF_A_MACHINE = frozenset({"num_threads", "packed_weight_cache_size", "model_hub", "revision", "node_rank"})
_OF_A_MACHINE |= {"headless", "node_addr", "master_addr", "master_port", "distributed_timeout_seconds"}
_OF_A_MACHINE |= {"kv_cache_memory_bytes", "kv_cache_free_memory_fraction", "gpu_memory_utilization"}
_OF_THE_CORE = frozenset({"engine_process", "on_engine_death", "kv_cache_metrics", "kv_cache_metrics_sample", "seed"})
_OF_THE_CORE |= {
    "kv_events_config",
    "kv_offloading_size",
    "kv_offloading_disk_size",
    "kv_offloading_backend",
    "kv_offloading_path",
}
_OF_THE_CORE |= {"scheduling_policy", "enable_prefix_caching", "prefix_caching_hash_algo", "weight_update_path"}
_OF_THE_CORE |= {"speculative_method", "num_speculative_tokens", "state_snapshot_memory"}
_CODE = ("engine", "kernels")  # folders of what ranks run
_WEIGHTS = (".safetensors", ".gguf", ".bin")
_SHOWN = 12  # digits of a digest


def facts_of(config: CoreConfig) -> dict[str, str]:
    """Return what has to be the same on all nodes, by the names that errors have for it."""
    facts = {
        "the version of Quire": quire.__version__,
        "the version of torch": torch.__version__.partition("+")[0],
        "the digest of Quire's code": source_digest(_CODE).hex()[:_SHOWN],
        "the kind of device": "GPU" if uses_gpu(config.model.device) else "CPU",
        "the kernels": "not compiled" if native.kernels is None else "compiled",
        "the digest of config.json": _digest_of_file(config.folder / "config.json"),
        "the digest of the weights": _digest_of_weights(config.folder),
    }
    for options in (config.parallel, config.model, config.engine):
        for name, value in options.model_dump(mode="json").items():
            if name not in _OF_A_MACHINE | _OF_THE_CORE:
                text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
                facts[f"--{name.replace('_', '-')}"] = text
    return facts


def wait_for_nodes(
    requested: CoreConfig, config: CoreConfig, poll: Callable[[], None]
) -> tuple[list[JoinedNode], NodeListener]:
    """Wait at node 0 until all other nodes have come.

    Args:
        requested: the configuration as it was set.
        config: the same with what was chosen for the device of node 0.
        poll: is called meanwhile.

    Returns:
        The nodes, and what has waited for them.

    Raises:
        NodesMissing: it cannot listen at the configured address, or a node has not come in time, or does not fit.
    """
    parallel = config.parallel
    ranks = [Placement.of_node(parallel, node) for node in range(parallel.nnodes)]
    choices = Choices(config.engine.attention_backend, config.engine.kv_cache_dtype, config.model.quantization)
    with NodeListener(parallel.master_addr, parallel.master_port, parallel.node_addr, ranks) as listener:
        nodes = listener.wait(facts_of(requested), choices, parallel.distributed_timeout_seconds, poll)
    return nodes, listener


def run_node(
    config: CoreConfig, is_over: Callable[[], bool], joined: Callable[[], None], launch: Launcher | None = None
) -> None:
    """Run the ranks of a node other than node 0, until that ends.

    Args:
        config: of the model, with the settings of this node.
        is_over: whether to end before.
        joined: called when node 0 has let the node join.
        launch: starts a rank; None: in processes that have the GPUs of this machine.

    Raises:
        UnsupportedModel: the model cannot be divided like this.
        NodesMissing: node 0 has not come, or this node does not fit.
        RankDied: node 0, another node or a rank has ended unexpectedly.
    """
    parallel = config.parallel
    check_parallel(config.model_config)
    check_divisible(cast("DecoderSpec", config.model_config.spec), Placement.of(parallel))
    ranks = Placement.of_node(parallel, parallel.node_rank)
    node = Node(parallel.node_rank, ranks, parallel.master_addr, parallel.master_port, parallel.node_addr)
    try:
        welcome = node.join(facts_of(config), parallel.distributed_timeout_seconds)
        joined()
        node.start(partial(run_rank, _with_choices(config, welcome.choices)), welcome, launch)
        node.run(is_over)
    finally:
        node.close()


def _with_choices(config: CoreConfig, choices: Choices) -> CoreConfig:
    """The configuration with what node 0 has chosen."""
    engine: dict[str, Any] = {
        "attention_backend": choices.attention_backend,
        "kv_cache_dtype": choices.kv_cache_dtype,
    }
    return replace(
        config,
        model=config.model.model_copy(update={"quantization": choices.quantization}),
        engine=config.engine.model_copy(update=engine),
    )


def _digest_of_file(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:_SHOWN] if path.exists() else "none"


def _digest_of_weights(folder: Path) -> str:
    """What weights are known by: the names and sizes of their files, and samples of their content."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.suffix in _WEIGHTS):
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        for sample in samples_of(path):
            digest.update(sample)
    return digest.hexdigest()[:_SHOWN]
