"""CUDA graphs of decode steps: captured when the engine starts, one for each number of rows, and replayed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from tqdm import tqdm
from typing_extensions import override

from quire.config.options import EngineOptions
from quire.engine.execution.attention.backend import AttentionBackend, PreparedAttention
from quire.engine.execution.cache import OutOfCacheMemory
from quire.engine.execution.device_inputs import DeviceInputBuilder
from quire.engine.execution.inputs import StepInputs
from quire.engine.execution.states import StateCaches
from quire.engine.execution.step_graphs import EagerSteps, StepRunner
from quire.engine.execution.waiting import RefuseWaiting
from quire.engine.models.layers.linear import LoRA
from quire.engine.models.networks.decoder import LanguageModel

logger = logging.getLogger(__name__)
_SMALL = (1, 2, 4)  # sizes below multiples of _STRIDE
_STRIDE = 8
_WIDE = 256  # above it every other multiple
_capturing = threading.Lock()  # torch allows one capture at a time in a process, of which several engines are threads
_LARGEST = 512  # sequences; larger steps take so long that launching kernels does not matter


def capture_sizes(options: EngineOptions) -> tuple[int, ...]:
    """Numbers of sequences of the decode steps to capture, in ascending order: as configured, else up to all."""
    if options.cudagraph_capture_sizes:
        return tuple(sorted({size for size in options.cudagraph_capture_sizes if size <= options.max_num_seqs}))
    most = min(options.max_num_seqs, _LARGEST)
    dense, sparse = range(_STRIDE, min(most, _WIDE) + 1, _STRIDE), range(_WIDE + 2 * _STRIDE, most + 1, 2 * _STRIDE)
    return tuple(sorted({size for size in (*_SMALL, *dense, *sparse, most) if size <= most}))


class Graph(Protocol):
    """The work that a function submits to a device, to be submitted again as a whole."""

    def capture(self, function: Callable[[], None]) -> None:
        """Call a function once, to find out its work.

        Raises:
            RuntimeError: it cannot be captured, as it waits for the device.
            torch.OutOfMemoryError: there is no memory for its results.
        """

    def replay(self) -> None:
        """Submit the work."""


class CudaGraph(Graph):
    """A CUDA graph."""

    def __init__(self, pool: Any) -> None:
        """`pool`: memory that it shares with graphs that never run at the same time."""
        self._pool = pool
        self._graph = torch.cuda.CUDAGraph()

    @classmethod
    def sharing_memory(cls) -> Callable[[], CudaGraph]:
        """A function that makes graphs whose intermediate results share memory."""
        pool = torch.cuda.graph_pool_handle()
        return lambda: cls(pool)

    @override
    def capture(self, function: Callable[[], None]) -> None:
        function()  # compiles kernels and fills caches
        with RefuseWaiting():  # to fail here, as a failed capture may leave the device unusable
            function()
        torch.cuda.synchronize()
        with _capturing, torch.cuda.graph(self._graph, pool=self._pool, capture_error_mode="thread_local"):
            function()

    @override
    def replay(self) -> None:
        self._graph.replay()


class GraphSteps(StepRunner):
    """Replay the graph of each padded step; others run layer by layer.

    Where the model has adapters, each size has two graphs: with the adapters' products and without them, as most steps
    have no row that needs them. Which rows do, the former read from the step's inputs.

    Attributes:
        graphs: the graphs by number of rows; lora_graphs: those with adapters.
    """

    def __init__(
        self,
        model: LanguageModel,
        inputs: DeviceInputBuilder,
        attention: AttentionBackend,
        new_graph: Callable[[], Graph],
        states: StateCaches | None = None,
    ) -> None:
        """`states`: those of the model's layers; None: they have none."""
        self._model = model
        self._inputs = inputs
        self._attention = attention
        self._new_graph = new_graph
        self._states = states
        self._eager = EagerSteps(model)
        self._logits: Tensor | None = None  # of the largest graph
        self.graphs: dict[int, Graph] = {}
        self.lora_graphs: dict[int, Graph] = {}

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture a graph of each size, the largest first, as its memory then serves all others.

        Raises:
            OutOfCacheMemory: the KV cache leaves too little memory for a step.
        """
        sizes = sorted(self._inputs.padded_sizes, reverse=True)
        kinds = (False, True) if _has_lora(self._model) else (False,)
        steps = [(size, has_lora) for size in sizes for has_lora in kinds]
        for size, has_lora in tqdm(steps, desc="capturing CUDA graphs", unit="graph", leave=False, disable=None):
            inputs = self._with_states(self._inputs.blank(size, has_lora=has_lora))
            prepared = self._attention.prepare(inputs)
            if self._logits is None:
                shape = (sizes[0], self._model.lm_head.vocab_size)
                self._logits = torch.empty(shape, dtype=torch.float32, device=inputs.model.token_ids.device)
            graph, out = self._new_graph(), self._logits[:size]
            try:
                graph.capture(partial(self._compute, inputs, prepared, out))
            except torch.OutOfMemoryError as error:
                raise OutOfCacheMemory(
                    f"a decode step of {size} sequences does not fit into memory beside the KV cache: "
                    "lower --gpu-memory-utilization or --max-num-seqs"
                ) from error
            except RuntimeError as error:
                logger.warning("the model runs without CUDA graphs: its steps cannot be captured (%s)", error)
                self.graphs.clear()
                self.lora_graphs.clear()
                return
            (self.lora_graphs if has_lora else self.graphs)[size] = graph

    def _with_states(self, inputs: StepInputs) -> StepInputs:
        if self._states is None:
            return inputs
        states = self._states.of_step(inputs.spans, inputs.padded)
        return replace(inputs, model=replace(inputs.model, states=states))

    @override
    def logits(self, inputs: StepInputs, attention: PreparedAttention) -> Tensor:
        graphs = self.graphs if inputs.model.lora_ids is None else self.lora_graphs
        graph = graphs.get(inputs.num_tokens) if inputs.static and attention.static else None
        if graph is None or self._logits is None or not inputs.model.is_replayable:
            return self._eager.logits(inputs, attention)
        graph.replay()
        return self._logits[: inputs.num_logits]

    def _compute(self, inputs: StepInputs, attention: PreparedAttention, out: Tensor) -> None:
        hidden = self._model.run(inputs.model, attention.attend, last_token_only=True, cross=attention.cross)
        self._model.lm_head.logits(hidden, out=out)


def _has_lora(model: LanguageModel) -> bool:
    return isinstance(model, nn.Module) and any(isinstance(module, LoRA) for module in model.modules())
