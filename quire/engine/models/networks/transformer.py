"""Embeddings, layers and final norm of a `TransformerSpec`; shared by decoders and encoders."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from quire.engine.models.distributed.group import RankGroup
from quire.engine.models.layers.disentangled_attention import RelativePositions
from quire.engine.models.layers.embedding import Embedding, EmbeddingSum
from quire.engine.models.layers.heads import PoolerHeads
from quire.engine.models.layers.inputs import ModelInputs, StepAttention, StepCrossAttention
from quire.engine.models.layers.layer_inputs import LayerEmbeddingTable
from quire.engine.models.layers.linear import Linear
from quire.engine.models.layers.parallel import VocabParallelEmbedding
from quire.engine.models.layers.relative_bias import RelativeBiasTable
from quire.engine.models.layers.rope import QueryFactors, RopeTables, rope_switch
from quire.engine.models.layers.step import StepContext, StepLoRA
from quire.engine.models.layers.streams import StreamEnds
from quire.engine.models.networks.stack import LayerStack
from quire.engine.models.specs.decoder import (
    DecoderSpec,
    DisentangledAttention,
    GroupedQueryAttention,
    LatentAttention,
    TransformerSpec,
)
from quire.engine.models.specs.rope import Rope
from quire.engine.models.specs.shared_block import any_reads_embedded


class Transformer(LayerStack):
    """Run a `TransformerSpec`. Call `set_context` before the first `run`.

    Attributes:
        num_adapters: number of its adapters (LoRA), whose ids are below it.
        keeps_embedded: the input of the first layer is kept for layers that read it.
    """

    def __init__(self, spec: TransformerSpec, tied: Linear | None = None, group: RankGroup | None = None) -> None:
        """Make the model.

        Args:
            spec: its architecture, or that of the part which this rank has.
            tied: the output projection that shares the embedding's weight.
            group: ranks that have other parts of each layer and of the vocabulary; None: they are whole.
        """
        encoder = spec.encoder if isinstance(spec, DecoderSpec) else None
        super().__init__(spec, 0 if encoder is None else encoder.hidden, group)
        size = spec.embeddings.size or spec.hidden
        self.embed = (
            Embedding(spec.vocab, size, tied)
            if group is None
            else VocabParallelEmbedding(spec.vocab, size, group, tied)
        )
        self.embed_sum = EmbeddingSum(spec)
        biases = [a.relative_bias for a in _grouped(spec) if a.relative_bias is not None]
        self.relative_bias = RelativeBiasTable(biases[0], _grouped(spec)[0].heads) if biases else None
        tables = [layer.attn for layer in spec.layers if isinstance(layer.attn, DisentangledAttention)]
        self.relative_positions = RelativePositions(tables[0], spec) if tables else None
        self.keeps_embedded = any_reads_embedded(spec.layers)
        self.layer_embeddings = layer_embedding_table(spec)
        if isinstance(spec, DecoderSpec) and spec.streams is not None:
            self.stream_ends = StreamEnds(spec.streams, spec.hidden)
        self.heads: PoolerHeads | None = None
        self.num_adapters = 0
        self.spec = spec

    def run(
        self,
        inputs: ModelInputs,
        attend: StepAttention,
        *,
        last_token_only: bool = False,
        cross: StepCrossAttention | None = None,
    ) -> Tensor:
        """Hidden states of a step, as `LanguageModel.run` describes."""
        step = self._step(inputs, attend, last_token_only=last_token_only, cross=cross)
        return self.run_layers(*self._begun(inputs, step))

    def _begun(self, inputs: ModelInputs, step: StepContext) -> tuple[Tensor, StepContext]:
        """The input of the first layer, and the step with what layers read of it."""
        x = self._embedded(inputs)
        if self.keeps_embedded:
            step = replace(step, embedded=x)
        if self.layer_embeddings is not None:
            step = replace(step, layer_inputs=self.layer_embeddings(inputs.token_ids, x, inputs.items))
        return x if self.stream_ends is None else self.stream_ends.expanded(x), step

    def _embedded(self, inputs: ModelInputs) -> Tensor:
        """The input of the first layer: (tokens, hidden)."""
        x, items = self.embed(inputs.token_ids), inputs.items
        if items is not None and self.spec.embeddings.scales_items:
            x, items = items.apply(x), None
        embedded = self._with_token_rows(self.embed_sum(x, inputs), inputs)
        return embedded if items is None else items.apply(embedded)

    def _with_token_rows(self, embedded: Tensor, _: ModelInputs) -> Tensor:
        """The embeddings of a step's tokens, with those that the table does not have."""
        return embedded

    def _step(
        self, inputs: ModelInputs, attend: StepAttention, *, last_token_only: bool, cross: StepCrossAttention | None
    ) -> StepContext:
        """The values that a step passes to every layer."""
        return StepContext(
            self._ropes.at(inputs.positions),
            attend,
            inputs.logits_indices,
            last_token_only,
            inputs.cu_seqlens,
            None if self.relative_bias is None else self.relative_bias(),
            None if self.relative_positions is None else self.relative_positions(),
            cross,
            StepLoRA.of(inputs.lora_ids, self.num_adapters),
            inputs.states,
            items=inputs.items,
            query_factors=self._query_factors.at(inputs.positions),
            positions=inputs.positions,
        )

    @property
    def pooler_heads(self) -> PoolerHeads:
        """The heads of a model that pools."""
        assert self.heads is not None
        return self.heads

    @property
    def hidden_size(self) -> int:
        """Elements of a hidden state."""
        return self.spec.hidden

    def set_context(self, context_len: int) -> None:
        self.context_len = context_len
        self.rope_switch = rope_switch(self.ropes, context_len)
        device = next(self.parameters()).device
        self._ropes = RopeTables(self.ropes, context_len, self.rope_switch, device)
        temperatures = {a.temperature for a in _grouped(self.spec) if a.temperature is not None}
        self._query_factors = QueryFactors(temperatures, context_len, self.rope_switch, device)

    @property
    def ropes(self) -> set[Rope]:
        """All ropes that steps need."""
        return ropes_of(self.spec)


def layer_embedding_table(spec: TransformerSpec) -> LayerEmbeddingTable | None:
    """Make what gives layers inputs of their own; None: they have none."""
    embeddings = spec.layer_embeddings if isinstance(spec, DecoderSpec) else None
    if embeddings is None:
        return None
    return LayerEmbeddingTable(embeddings, spec.hidden, len(spec.layers), spec.norm, spec.vocab)


def ropes_of(spec: TransformerSpec) -> set[Rope]:
    """The ropes of all layers."""
    attns = [layer.attn for layer in spec.layers]
    indexers = [attn.indexer for attn in attns if isinstance(attn, LatentAttention) and attn.indexer is not None]
    ropes = [*(attn.rope for attn in attns), *(indexer.rope for indexer in indexers)]
    return {rope for rope in ropes if rope is not None}


def _grouped(spec: TransformerSpec) -> list[GroupedQueryAttention]:
    return [layer.attn for layer in spec.layers if isinstance(layer.attn, GroupedQueryAttention)]
