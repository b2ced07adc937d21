"""The part of a decoder that one of several ranks runs."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from typing_extensions import override

from quire.engine.models.distributed.group import RankGroups
from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.layers.inputs import ModelInputs, StepAttention, StepCrossAttention
from quire.engine.models.layers.linear import Linear
from quire.engine.models.model_config import ModelConfig
from quire.engine.models.networks.decoder import Decoder, LMHead
from quire.engine.models.networks.transformer import ropes_of
from quire.engine.models.sharding.shard import part_of, stage_layers
from quire.engine.models.specs.cache import CacheGroup, StateCache
from quire.engine.models.specs.decoder import DecoderSpec, EncoderSpec
from quire.engine.models.specs.rope import Rope


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
        self.lm_head = ShardedHead(whole, self.head, groups)
        self.whole = whole
        self.placement = placement
        self.stage = stage_layers(len(whole.layers), placement.stage, placement.stages)
        self._groups = groups
        self._dtype = dtype
        if not placement.is_first_stage:
            del self.embed, self.embed_sum
        if not placement.is_last_stage:
            del self.head

    @property
    @override
    def ropes(self) -> set[Rope]:
        """Those of all stages: a sequence takes other frequencies at the same length on every rank."""
        return ropes_of(self.whole)

    @override
    def cache_groups(self, context_len: int) -> tuple[CacheGroup, ...]:
        first, stage = self.stage.start, self.stage
        return tuple(
            self._with_own_state(replace(group, layers=tuple(i - first for i in group.layers if i in stage)))
            for group in self.whole.cache_groups(context_len)
        )

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
            x = groups.previous.receive((len(inputs.token_ids), self.spec.hidden), self._dtype)
        hidden = self.run_layers(x, step, more_layers=groups.next is not None)
        if groups.next is None:
            return hidden
        groups.next.send(hidden)
        indices = inputs.logits_indices if last_token_only else None
        return hidden if indices is None else hidden[: len(indices)]


class ShardedHead(LMHead):
    """The output projection, of which each rank of the last stage has some rows. Rank 0 gets the logits."""

    def __init__(self, whole: DecoderSpec, linear: Linear, groups: RankGroups) -> None:
        super().__init__(whole, linear)
        self._groups = groups

    @override
    def project(self, hidden: Tensor, *, rows: Tensor | slice | None = None, out: Tensor | None = None) -> Tensor:
        """(rows, vocab) float32 on rank 0, and (0, vocab) on the others."""
        placement, tensor, link = self._groups.placement, self._groups.tensor, self._groups.logits
        hidden = hidden if rows is None else hidden[rows]
        logits = hidden.new_empty((0, self.vocab_size), dtype=torch.float32)
        if not len(hidden):
            return logits
        if placement.is_last_stage:
            part = super().project(hidden)
            parts = [part] if tensor is None else tensor.gather(part)
            if parts:
                logits = torch.cat(parts, 1)[:, : self.vocab_size]
        if link is not None and placement.rank:
            link.send(logits)
        elif link is not None:
            logits = link.receive((len(hidden), self.vocab_size), torch.float32)
        return logits if out is None or placement.rank else out.copy_(logits)
