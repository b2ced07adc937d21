"""A recurrent layer for tests: a causal convolution and a gated sum of outer products, and models that have it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.engine.models import source
from quire.engine.models.distributed.group import RankGroup, RankGroups
from quire.engine.models.layers.linear import Linear, Packable
from quire.engine.models.layers.step import StepContext
from quire.engine.models.loader import LoadedModel, load_model
from quire.engine.models.networks.decoder import Decoder
from quire.engine.models.sharding.decoder import ShardedDecoder
from quire.engine.models.sharding.weight_shards import WeightShards
from quire.engine.models.specs.cache import StateArray, StateCache
from quire.engine.models.specs.decoder import DecoderSpec, GroupedQueryAttention, Recurrence, StackSpec
from quire.kernels.capture import split_heads
from quire.kernels.causal_conv import causal_conv
from quire.kernels.state_parameters import HeadParameters
from quire.kernels.state_space_scan import state_space_scan
from tests.support.engine import Engine


@dataclass(frozen=True, kw_only=True)
class GatedSum(Recurrence):
    """S = gate * S + k v^T after a causal convolution of v; the result is q S."""

    layer: ClassVar = "tests.support.recurrent:GatedSumLayer"

    heads: int
    dim: int
    width: int

    @property
    def cache(self) -> StateCache:
        """The last inputs of the convolution, and S."""
        size = self.heads * self.dim
        return StateCache(
            (
                StateArray((self.width - 1, size), "bfloat16"),
                StateArray((self.heads, self.dim, self.dim), "float32"),
            )
        )


class GatedSumLayer(nn.Module):
    """Compute token by token, so that no result depends on how the tokens are divided among steps."""

    def __init__(self, index: int, spec: GatedSum, model: StackSpec, group: RankGroup | None = None) -> None:
        """`group` is not read: the layer is not divided."""
        super().__init__()
        self.index, self.spec = index, spec
        size = spec.heads * spec.dim
        self.qkv = Linear(model.hidden, size, size, size)
        self.gate = Linear(model.hidden, spec.heads)
        self.kernel = nn.Parameter(torch.empty(spec.width, size), requires_grad=False)
        self.out = Linear(size, model.hidden)

    def forward(self, x: Tensor, step: StepContext, *, last_layer: bool = False) -> Tensor:
        """(tokens, hidden) to (tokens, hidden), or to (len(logits_indices), hidden); see `StepAttention`."""
        assert step.states is not None
        qkv, gates = self.qkv(x), self.gate(x)
        inputs, sums = step.states.arrays(self.index)
        results = torch.zeros(len(x), self.spec.heads * self.spec.dim, dtype=x.dtype)
        bounds = step.states.cu_seqlens.tolist()
        for slot, begin, end in zip(step.states.slots.tolist(), bounds, bounds[1:], strict=False):
            if slot < 0:  # padding
                continue
            for token in range(begin, end):
                results[token] = self._token(qkv[token], gates[token], inputs[slot], sums[slot])
        if last_layer and step.last_token_only and step.logits_indices is not None:
            results = results[step.logits_indices]
        out: Tensor = self.out(results)
        return out

    def _token(self, qkv: Tensor, gate: Tensor, inputs: Tensor, total: Tensor) -> Tensor:
        """The result of a token; `inputs` and `total` are the state, and change."""
        q, k, v = qkv.chunk(3)
        window = torch.cat((inputs, v[None].to(inputs.dtype)))
        inputs.copy_(window[1:])
        convolved = (window.to(v.dtype) * self.kernel).sum(0)
        heads = [part.view(self.spec.heads, self.spec.dim).float() for part in (q, k, convolved)]
        total.mul_(gate.float().sigmoid()[:, None, None]).add_(heads[1][:, :, None] * heads[2][:, None])
        return (heads[0][:, :, None] * total).sum(1).flatten().to(q.dtype)


@dataclass(frozen=True, kw_only=True)
class Scan(Recurrence):
    """A causal convolution and a state-space recurrence, both by compiled kernels."""

    layer: ClassVar = "tests.support.recurrent:ScanLayer"

    heads: int = 2
    dim: int = 16
    size: int = 16
    width: int = 4

    @property
    def cache(self) -> StateCache:
        """The last inputs of the convolution, and the states of heads."""
        return StateCache(
            (
                StateArray((self.width - 1, self.heads * self.dim), "float32"),
                StateArray((self.heads, self.size, self.dim), "float32"),
            )
        )


class ScanLayer(nn.Module):
    """Call nothing but compiled kernels in decode steps, which can therefore be captured."""

    def __init__(self, index: int, spec: Scan, model: StackSpec, group: RankGroup | None = None) -> None:
        """`group` is not read: the layer is not divided."""
        super().__init__()
        self.index, self.spec = index, spec
        channels = spec.heads * spec.dim
        self.projection = Linear(model.hidden, channels, spec.size, spec.size, spec.heads)
        self.kernel = nn.Parameter(torch.empty(spec.width, channels), requires_grad=False)
        # No parameters, which would have the dtype of the others.
        self.parameters_of_heads = HeadParameters(
            -torch.ones(spec.heads), torch.zeros(spec.heads), torch.ones(spec.heads)
        )
        self.out = Linear(channels, model.hidden)

    def forward(self, x: Tensor, step: StepContext, *, last_layer: bool = False) -> Tensor:
        """(tokens, hidden) to (tokens, hidden), or to (len(logits_indices), hidden); see `StepAttention`."""
        spec, states = self.spec, step.states
        assert states is not None
        channels = spec.heads * spec.dim
        projected = self.projection(x)
        inputs, b, c, dt = projected.split([channels, spec.size, spec.size, spec.heads], 1)
        convolution, sums = states.arrays(self.index)
        place = (states.slots, states.cu_seqlens)
        convolved = causal_conv(inputs, self.kernel.t(), None, convolution, *place)
        parts = (split_heads(convolved, spec.heads, spec.dim), dt, b[:, None], c[:, None])
        gate = split_heads(inputs, spec.heads, spec.dim)
        results = state_space_scan(*parts, self.parameters_of_heads, sums, *place, gate=gate).flatten(1)
        if last_layer and step.last_token_only and step.logits_indices is not None:
            results = results[step.logits_indices]
        out: Tensor = self.out(results)
        return out


KINDS = ("states and attention", "states and windows", "states only", "large states")


def with_states(spec: DecoderSpec, kind: str) -> DecoderSpec:
    """Replace some attention of a decoder, or all of it. `kind`: one of `KINDS`, or "compiled kernels"."""
    recurrence: Recurrence = GatedSum(heads=2, dim=32 if kind == "large states" else 8, width=4)
    if kind == "compiled kernels":
        recurrence = Scan()
    layers = list(spec.layers)
    for index, layer in enumerate(layers):
        if kind == "states only" or index % 2 == 0:
            layers[index] = replace(layer, attn=recurrence)
        elif kind == "states and windows" and index == 1:
            assert isinstance(layer.attn, GroupedQueryAttention)
            layers[index] = replace(layer, attn=replace(layer.attn, window=9))
    return replace(spec, layers=tuple(layers))


@contextmanager
def recurrent_models(kind: str) -> Any:
    """Let engines that are built within have a decoder with states in place of the model of their folder.

    Each rank has its part of it.
    """

    def load(*arguments: Any) -> LoadedModel:
        loaded = load_model(*arguments)
        assert isinstance(loaded.model, Decoder)
        sharded = loaded.model if isinstance(loaded.model, ShardedDecoder) else None
        spec = loaded.model.spec if sharded is None else sharded.whole
        assert isinstance(spec, DecoderSpec)
        model = whole = _random_decoder(with_states(spec, kind), loaded.dtype)
        if sharded is not None:
            model = _part(whole, sharded._groups, loaded.dtype)
        for module in model.modules():
            if isinstance(module, Packable):
                module.pack_weights("none")
        return replace(loaded, model=model)

    with mock.patch.object(source, "load_model", load):
        yield


def _random_decoder(spec: DecoderSpec, dtype: torch.dtype) -> Decoder:
    """A decoder, with the same weights each time."""
    model, generator = Decoder(spec).to(dtype), torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.fill_(1.0)
        else:
            parameter.data.normal_(0, 0.25, generator=generator)
    return model


def _part(whole: Decoder, groups: RankGroups, dtype: torch.dtype) -> ShardedDecoder:
    """The part of a decoder that a rank has."""
    assert isinstance(whole.spec, DecoderSpec)
    part = ShardedDecoder(whole.spec, groups, dtype).to(dtype)
    shards = WeightShards(part)
    for name, parameter in whole.named_parameters():
        if (local := shards.local(name)) is not None:
            cut = shards.cut(name, None, parameter, name)
            cut = F.pad(cut, (0, 0) * (cut.dim() - 1) + (0, shards.padding(name)))
            part.get_parameter(local).data.copy_(cut)
    return part


def recurrent_engine(folder: Path, kind: str, **options: Any) -> Engine:
    """An engine with a model that has states; `folder` is that of a model with attention."""
    with recurrent_models(kind):
        return Engine(folder, **options)


def tokens_of(engine: Engine, prompt: Sequence[int], params: Any) -> list[int]:
    """The tokens of one request."""
    return engine.generate(prompt, params).tokens
