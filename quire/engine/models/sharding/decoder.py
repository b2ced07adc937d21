"""The part of a decoder that one of several ranks runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor
from typing_extensions import override

from quire.engine.models.distributed.group import RankGroups
from quire.engine.models.distributed.placement import Placement
from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.layers.attention import GroupedAttentionLayer
from quire.engine.models.layers.inputs import ModelInputs, StepAttention, StepCrossAttention
from quire.engine.models.layers.linear import Linear
from quire.engine.models.layers.step import StepContext
from quire.engine.models.model_config import ModelConfig
from quire.engine.models.networks.decoder import Decoder, LMHead
from quire.engine.models.networks.stack import TransformerLayer
from quire.engine.models.networks.transformer import layer_embedding_table, ropes_of
from quire.engine.models.sharding.passed_values import PassedColumns, PassedValues
from quire.engine.models.sharding.shard import part_of, shard, stage_layers
from quire.engine.models.specs.cache import CacheGroup, CacheShape, StateCache
from quire.engine.models.specs.decoder import DecoderSpec, EncoderSpec
from quire.engine.models.specs.rope import Rope
from quire.engine.models.specs.shared_block import any_reads_embedded


def check_parallel(config: ModelConfig) -> None:
    """Check that several ranks may run a model.

    Raises:
        UnsupportedModel: they may not; the message says which models they can run.
    """
    if config.spec is None:
        what = f"what Quire's own decoder does not support, {config.unsupported}"
    elif isinstance(config.spec, EncoderSpec) or config.facts.pooler is not None:
        what = "models for embeddings, classification or scores"
    elif not isinstance(config.spec, DecoderSpec) or config.spec.encoder is not None:
        what = "models with audio"
    else:
        return
    raise UnsupportedModel(
        f"--tensor-parallel-size and --pipeline-parallel-size must be 1 for {what}: they divide models that generate "
        "text from text and pictures"
    )


class ShardedDecoder(Decoder):
    """A pipeline stage, of which the ranks of a tensor-parallel group have a part each.

    Hidden states are the same on all ranks of a stage. Every rank calls `run` for the same steps in the same order, and
    the head as well. Rank 0 of a pipeline may call `run` for further steps before it calls the head.

    Attributes:
        whole: spec of the whole decoder.
        placement: position of the rank.
        stage: indices of its layers in the whole decoder.
    """

    def __init__(self, whole: DecoderSpec, groups: RankGroups, dtype: torch.dtype) -> None:
        """Make a rank's part.

        Args:
            whole: spec of the whole decoder.
            groups: the rank's groups; they are connected before the first run.
            dtype: dtype of hidden states.
        """
        placement = groups.placement
        spec = part_of(whole, placement)
        super().__init__(spec, groups.tensor)
        self.stage = stage_layers(len(whole.layers), placement.stage, placement.stages)
        caches = _caches(whole, placement)
        self._received = PassedColumns.before(whole, self.stage.start, caches)
        self._sent = PassedColumns.before(whole, self.stage.stop, caches)
        self.keeps_embedded = any_reads_embedded(whole.layers)  # for later stages, too
        self.caches = {**self.caches, **{self._copy_of(source): caches[source] for source in self._received.stored}}
        for source in self._sent.stored:
            if source in self.stage:
                self._layer(source).keeps_keys = True
        self.lm_head = ShardedHead(whole, self.head, groups)
        self.whole = whole
        self.placement = placement
        self._groups = groups
        self._dtype = dtype
        if placement.is_first_stage:
            self.layer_embeddings = layer_embedding_table(whole)  # of the layers of all stages and the whole vocabulary
        else:
            del self.embed, self.embed_sum
        if not placement.is_last_stage:
            del self.head
        if self.stream_ends is not None:
            self.stream_ends.keep(expand=placement.is_first_stage, merge=placement.is_last_stage)

    @property
    @override
    def ropes(self) -> set[Rope]:
        """Those of all stages: a sequence takes other frequencies at the same length on every rank."""
        return ropes_of(self.whole)

    @override
    def cache_groups(self, context_len: int) -> tuple[CacheGroup, ...]:
        first, stage, copies = self.stage.start, self.stage, self._received.stored
        return tuple(
            self._with_own_state(
                replace(
                    group,
                    layers=tuple(
                        layer - first if layer in stage else self._copy_of(layer)
                        for layer in group.layers
                        if layer in stage or layer in copies
                    ),
                )
            )
            for group in self.whole.cache_groups(context_len)
        )

    def _copy_of(self, source: int) -> int:
        """The index of the copy of what an earlier stage's layer stores; `source`: its index in the whole model."""
        return len(self.stage) + list(self._received.stored).index(source)

    def _layer(self, index: int) -> GroupedAttentionLayer:
        """The attention of one of the layers; `index`: that in the whole model."""
        layer = self.layers[index - self.stage.start]
        assert isinstance(layer, TransformerLayer)
        assert isinstance(layer.attn, GroupedAttentionLayer)
        return layer.attn

    def _with_own_state(self, group: CacheGroup) -> CacheGroup:
        """Return a group of this rank's layers, whose states may be a part of those of the whole layers."""
        if not isinstance(group.kind, StateCache) or not group.layers:
            return group
        attn = self.spec.layers[group.layers[0]].attn
        kind = attn.cache if isinstance(attn.cache, StateCache) else attn.state_beside
        assert kind is not None
        return replace(group, kind=kind)

    @override
    def run(
        self,
        inputs: ModelInputs,
        attend: StepAttention,
        *,
        last_token_only: bool = False,
        cross: StepCrossAttention | None = None,
    ) -> Tensor:
        """Hidden states, as `LanguageModel.run` describes; in a stage before the last, only their number is right."""
        groups = self._groups
        step = self._step(inputs, attend, last_token_only=last_token_only, cross=cross)
        if groups.previous is None:
            x, step = self._begun(inputs, step)
        else:
            joined = groups.previous.receive((len(inputs.token_ids), self._received.total), self._dtype)
            received = self._received.divided(joined)
            for source, pair in received.stored.items():
                attend.store(self._copy_of(source), pair.keys, pair.values)
                step.stored[self._copy_of(source)] = pair
            x = received.hidden
            step = replace(step, layer_inputs=received.inputs, embedded=received.embedded)
        hidden = self.run_layers(x, step, more_layers=groups.next is not None)
        if groups.next is None:
            return hidden
        groups.next.send(self._passed(hidden, step).joined())
        indices = inputs.logits_indices if last_token_only else None
        return hidden if indices is None else hidden[: len(indices)]

    def _passed(self, hidden: Tensor, step: StepContext) -> PassedValues:
        """What the next stage gets of a step."""
        inputs = step.layer_inputs
        if inputs is not None:
            inputs = inputs[:, inputs.shape[1] - self._sent.inputs :]
        first = self.stage.start
        stored = {
            source: step.stored[source - first if source in self.stage else self._copy_of(source)]
            for source in self._sent.stored
        }
        return PassedValues(hidden, inputs, step.embedded if self._sent.embedded else None, stored)


def _caches(whole: DecoderSpec, placement: Placement) -> Mapping[int, CacheShape]:
    """What a rank stores of a token in each layer of the whole model, if it has the layer."""
    layers = shard(whole, placement.tensor_rank, placement.tensor_size).layers
    shapes = {index: layer.attn.cache_shape() for index, layer in enumerate(layers)}
    return {index: shape for index, shape in shapes.items() if shape is not None}


class ShardedHead(LMHead):
    """The output projection, of which each rank of the last stage has some rows. Rank 0 gets the logits."""

    def __init__(self, whole: DecoderSpec, linear: Linear, groups: RankGroups) -> None:
        super().__init__(whole, linear)
        self._groups = groups

    @override
    def logits(self, hidden: Tensor, *, rows: Tensor | slice | None = None, out: Tensor | None = None) -> Tensor:
        """(rows, vocab) float32 on rank 0, and (0, vocab) on the others."""
        placement, tensor, link = self._groups.placement, self._groups.tensor, self._groups.logits
        hidden = hidden if rows is None else hidden[rows]
        logits = hidden.new_empty((0, self.vocab_size), dtype=torch.float32)
        if not len(hidden):
            return logits
        if placement.is_last_stage:
            part = super().logits(hidden)
            parts = [part] if tensor is None else tensor.gather(part)
            if parts:
                logits = torch.cat(parts, 1)[:, : self.vocab_size]
        if link is not None and placement.rank:
            link.send(logits)
        elif link is not None:
            logits = link.receive((len(hidden), self.vocab_size), torch.float32)
        return logits if out is None or placement.rank else out.copy_(logits)
