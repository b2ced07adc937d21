"""DecoderSpec, EncoderSpec, CTCSpec and TransducerSpec: the architecture of a transformer.

Fields describe operations, never model names. New control flow gets a new type.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Self

from typing_extensions import override

from quire.engine.models.specs.audio import (
    BlockAttention,
    CausalConv2dStem,
    ChunkedAttention,
    Positions,
    Projector,
    QueryProjector,
    RelativeAttention,
    Stem,
    TimeConv,
)
from quire.engine.models.specs.cache import (
    CacheGroup,
    CacheShape,
    ChunkCache,
    FullCache,
    IndexedCache,
    LatentCache,
    StateArray,
    StateCache,
    StateDtype,
    TokenCache,
    WindowCache,
    group_layers,
)
from quire.engine.models.specs.layer_inputs import LayerEmbeddings, LayerInput, Streams
from quire.engine.models.specs.part import SpecPart
from quire.engine.models.specs.rope import Rope


class QKNorm(Enum):
    """Elements over which queries and keys are normalized."""

    HEAD = "each head"
    HEAD_ONLY = "each head, without weights"
    ALL = "all heads together"


@dataclass(frozen=True, kw_only=True)
class Attention(SpecPart, ABC):
    """The base of kinds of attention, and of layers in the place of attention.

    Attributes:
        description: what errors call it.
        layer: class of the layers of a kind outside of the tree, as "package.module:Class"; it is imported when a model
            is built, since specs are read without torch. Those of the tree are in `networks/stack.py`.
        rope: its position embedding; None: it has none.
    """

    description: ClassVar[str] = "this kind of attention"
    layer: ClassVar[str] = ""

    rope: Rope | None

    @property
    @abstractmethod
    def cache(self) -> TokenCache | StateCache | None:
        """What it keeps of a sequence in a decoder; None: it is not for decoders."""

    @property
    def state_beside(self) -> StateCache | None:
        """The state that it keeps beside `cache`; None: there is none."""
        return None

    def cache_shape(self, alignment: int = 1) -> CacheShape | None:
        """Return the elements that it caches of a token; None if it keeps a state or nothing.

        `alignment`: see `CacheShape`.
        """
        return None


@dataclass(frozen=True, kw_only=True)
class GroupedQueryAttention(Attention):
    """Grouped-query attention: `heads` query heads share `kv_heads` key and value heads."""

    description: ClassVar = "attention with grouped keys and values"
    positive: ClassVar = ("heads", "kv_heads", "head_dim", "scale")

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: Rope | None  # None: no position embedding
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: QKNorm | None = None
    norms_rotated: bool = False  # norms of heads follow the rope, rather than precede it
    window: int | None = None  # positions that a query attends to, including its own; in encoders on each side
    chunk: int | None = None  # positions are divided into chunks of so many; a query attends to those of its own
    softcap: float | None = None
    sinks: bool = False  # a learned logit per head is added to the softmax's denominator
    alibi: tuple[float, ...] | None = None  # slope of each head: its scores lose slope * distance (Press et al. 2021)
    relative_bias: RelativeBias | ClippedBias | None = None
    temperature: QueryTemperature | None = None
    output_gate: bool = False  # queries' projection makes gates as well; results are multiplied with their sigmoid
    value_norm: bool = False  # each head of values is normalized, without a weight
    keys_as_values: bool = False  # the projection of keys is also that of values; its weight is loaded for both
    is_causal: bool = False  # also tokens that attend to each other in both directions in other layers do not here

    @property
    def cache(self) -> FullCache | WindowCache | ChunkCache:
        """What it keeps in a decoder."""
        if self.chunk is not None:
            return ChunkCache(self.chunk)
        return FullCache() if self.window is None else WindowCache(self.window)

    @override
    def cache_shape(self, alignment: int = 1) -> CacheShape:
        return CacheShape(self.kv_heads, self.head_dim, self.head_dim, alignment=alignment)


@dataclass(frozen=True, kw_only=True)
class QueryTemperature(SpecPart):
    """A factor of queries that grows with their position (Llama 4).

    It is 1 + growth * log(1 + floor((position + offset) / length)).
    """

    positive: ClassVar = ("length",)

    growth: float
    length: int
    offset: int = 0


@dataclass(frozen=True, kw_only=True)
class RelativeBias:
    """A learned bias of scores by distance, in logarithmic buckets (T5); all layers share the first one's."""

    buckets: int
    max_distance: int


@dataclass(frozen=True, kw_only=True)
class ClippedBias(SpecPart):
    """A learned bias of scores by distance, from -reach to reach - 1; all layers share the first one's."""

    positive: ClassVar = ("reach",)

    reach: int


@dataclass(frozen=True, kw_only=True)
class DisentangledAttention(Attention):
    """Attention of content to content, of content to relative positions and of these to content (DeBERTa v2).

    Attributes:
        buckets: logarithmic buckets of distances; 0: distances are clipped.
        max_distance: rows of the table of relative positions are twice as many, or twice `buckets`.
        share_keys: positions are projected by the projections of queries and keys.
        to_position, from_position: whether content attends to positions, and positions to content.
        norm_positions: the table of relative positions is normalized.
    """

    description: ClassVar = "disentangled attention"
    positive: ClassVar = ("heads", "head_dim", "max_distance")

    heads: int
    head_dim: int
    buckets: int
    max_distance: int
    share_keys: bool
    to_position: bool
    from_position: bool
    norm_positions: bool
    rope: Rope | None = None  # always None

    @property
    def cache(self) -> None:
        """Nothing: it is for encoders."""


@dataclass(frozen=True, kw_only=True)
class Indexer(SpecPart):
    """Selects the `top_k` earlier tokens that a token attends to (DeepSeek sparse attention, the lightning indexer).

    The score of a token is a sum over heads: weight * relu(query * key). All heads have the same key.

    Attributes:
        heads: number of heads.
        dim: elements of a key.
        top_k: number of tokens; in shorter contexts all are attended to.
        rope: of the first elements of queries and keys.
        is_shared: there is no indexer; the tokens are those that the last layer with one has selected.
    """

    positive: ClassVar = ("heads", "dim", "top_k")

    heads: int
    dim: int
    top_k: int
    rope: Rope | None
    is_shared: bool = False

    @property
    def key_dim(self) -> int:
        """Elements that are cached of a token."""
        return 0 if self.is_shared else self.dim


@dataclass(frozen=True, kw_only=True)
class LatentAttention(Attention):
    """Multi-head latent attention (MLA): one cached vector of kv_rank + shared_dim elements for keys and values.

    Attributes:
        shared_dim: elements of keys that all heads have in common; all of them are rotated, if there is a rope.
        indexer: selects the tokens that are attended to; its keys lie behind the cached vectors. None: all are.
    """

    description: ClassVar = "latent attention (MLA)"
    positive: ClassVar = ("heads", "kv_rank", "nope_dim", "shared_dim", "value_dim", "scale")

    heads: int
    q_rank: int | None  # None: queries are projected in one step
    kv_rank: int
    nope_dim: int
    shared_dim: int
    value_dim: int
    scale: float
    rope: Rope | None  # None: no position embedding
    bias: bool = False
    indexer: Indexer | None = None

    @property
    def cache(self) -> LatentCache:
        """What it keeps."""
        return LatentCache() if self.indexer is None else IndexedCache(self.indexer.top_k)

    @property
    def key_dim(self) -> int:
        """Elements of a cached vector, and of the indexer's key behind it."""
        return self.kv_rank + self.shared_dim + (0 if self.indexer is None else self.indexer.key_dim)

    @override
    def cache_shape(self, alignment: int = 1) -> CacheShape:
        return CacheShape(1, self.key_dim, self.kv_rank, values_in_keys=True, alignment=alignment)


@dataclass(frozen=True, kw_only=True)
class Recurrence(Attention):
    """The base of layers in the place of attention that read earlier tokens from a state of a fixed size."""

    description: ClassVar = "recurrent layers"

    rope: Rope | None = None  # always None

    def divided(self, ranks: int) -> Self:
        """Return the part that each of some ranks has; the same: each computes the layer as a whole."""
        return self

    @property
    @abstractmethod
    def cache(self) -> StateCache:
        """The state of a sequence."""


@dataclass(frozen=True, kw_only=True)
class NoAttention(Attention):
    """Nothing in the place of attention: a layer that is a feed-forward alone."""

    description: ClassVar = "layers without attention"

    rope: Rope | None = None  # always None

    @property
    def cache(self) -> None:
        """Nothing."""


@dataclass(frozen=True, kw_only=True)
class SideBySide(Attention):
    """Attention and a recurrence that read the same input, whose results are added (Falcon-H1).

    Attributes:
        input_scale: factor of what the attention reads.
        scale: factor of its result.
        recurrence_scale: factor of the recurrence's result.
    """

    description: ClassVar = "attention beside a recurrence"

    attention: GroupedQueryAttention
    recurrence: Recurrence
    input_scale: float = 1.0
    scale: float = 1.0
    recurrence_scale: float = 1.0

    @property
    def cache(self) -> FullCache | WindowCache | ChunkCache:
        """What the attention keeps."""
        return self.attention.cache

    @property
    @override
    def state_beside(self) -> StateCache:
        return self.recurrence.cache

    @override
    def cache_shape(self, alignment: int = 1) -> CacheShape:
        return self.attention.cache_shape(alignment)


@dataclass(frozen=True, kw_only=True)
class GatedMLP(SpecPart):
    """out_scale * down(act(gate_scale * gate(x)) * up(x)).

    Attributes:
        sparsity: part of the gates that are zero if these have a normal distribution: what exceeds the quantile of
            their mean and deviation is kept, without it.
    """

    positive: ClassVar = ("size",)
    activations: ClassVar = ("act",)

    size: int
    act: str = "silu"
    bias: bool = False
    down_bias: bool | None = None  # of the second projection; None: as `bias`
    gate_scale: float = 1.0
    out_scale: float = 1.0
    sparsity: float = 0.0


@dataclass(frozen=True, kw_only=True)
class PlainMLP(SpecPart):
    """down(act(up(x)))."""

    positive: ClassVar = ("size",)
    activations: ClassVar = ("act",)

    size: int
    act: str
    bias: bool = True


@dataclass(frozen=True, kw_only=True)
class LearnedMLP(SpecPart):
    """down(xielu(up(x))), an activation with two learned numbers for each layer (xIELU, Huang and Schlag 2024)."""

    positive: ClassVar = ("size",)

    size: int


@dataclass(frozen=True, kw_only=True)
class SoftmaxRouter(SpecPart):
    """Select groups by their highest logit, then the top_k experts in these by the softmax of all logits.

    Attributes:
        renormalize: the weights of the selected experts sum to 1.
        selection_bias: a bias of each expert is added to its softmax for the selection, but not for its weight.
        least_sum: the sum of weights that they are divided by to sum to 1 is at least this, with a selection bias.
        groups: number of groups; 1: there are none.
        top_groups: number of groups that are selected.
        scale: factor of the weights.
    """

    positive: ClassVar = ("groups", "top_groups")

    renormalize: bool = True
    bias: bool = False
    selection_bias: bool = False
    least_sum: float = 0.0
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class GroupedSigmoidRouter(SpecPart):
    """Select groups by the sum of their two highest sigmoid scores, then the top_k experts in these groups."""

    positive: ClassVar = ("groups", "top_groups")

    groups: int
    top_groups: int
    renormalize: bool
    scale: float


@dataclass(frozen=True, kw_only=True)
class SigmoidRouter:
    """Select the top_k experts by their logits; the weight of each is the sigmoid of its logit."""


@dataclass(frozen=True, kw_only=True)
class GatedExperts(SpecPart):
    """Experts that are gated MLPs without biases."""

    activations: ClassVar = ("act",)

    act: str = "silu"


@dataclass(frozen=True, kw_only=True)
class PlainExperts(SpecPart):
    """Experts that are plain MLPs without biases."""

    activations: ClassVar = ("act",)

    act: str


@dataclass(frozen=True, kw_only=True)
class ClampedSwigluExperts:
    """Experts with biases: (clamp(up) + 1) * g * sigmoid(alpha * g), g = clamp(gate)."""

    alpha: float
    limit: float


@dataclass(frozen=True, kw_only=True)
class MoE(SpecPart):
    """Mixture of experts of width `size`, and a shared expert of width `shared`; 0 for no shared expert.

    Attributes:
        experts: number of all experts, which the router selects from.
        shared_gate: the shared expert's result is multiplied with the sigmoid of a logit of the token.
        weighs_inputs: weights are factors of what experts read, rather than of their results.
        branch_norms: router, experts and the shared expert each have a norm before them instead of that of the layer,
            and both kinds of experts have one behind them.
        expert_scale: weights have a learned factor of each expert.
        first_expert: index of the first expert that this rank has.
        num_local_experts: number of experts that this rank has; None: all.
    """

    positive: ClassVar = ("size", "experts", "top_k")

    size: int
    experts: int
    top_k: int
    router: SoftmaxRouter | GroupedSigmoidRouter | SigmoidRouter
    expert: GatedExperts | PlainExperts | ClampedSwigluExperts = GatedExperts()
    shared: int = 0
    shared_gate: bool = False
    weighs_inputs: bool = False
    branch_norms: bool = False
    expert_scale: bool = False
    first_expert: int = 0
    num_local_experts: int | None = None

    @property
    def local_experts(self) -> range:
        """Indices of the experts that this rank has."""
        count = self.experts if self.num_local_experts is None else self.num_local_experts
        return range(self.first_expert, self.first_expert + count)


@dataclass(frozen=True, kw_only=True)
class CrossAttention(SpecPart):
    """Attention of a decoder's tokens to all positions of an encoder's output.

    Attributes:
        bias: queries, values and the result have one; keys never do.
    """

    positive: ClassVar = ("heads", "head_dim", "scale")

    heads: int
    head_dim: int
    scale: float
    bias: bool = True


FeedForward = GatedMLP | PlainMLP | LearnedMLP | MoE


@dataclass(frozen=True, kw_only=True)
class RMSNormSpec:
    """x / rms(x) * (weight + offset); gemma stores weights minus 1."""

    eps: float
    offset: float = 0.0


@dataclass(frozen=True, kw_only=True)
class LayerNormSpec:
    """(x - mean) / deviation * weight + bias."""

    eps: float
    bias: bool = True


Norm = RMSNormSpec | LayerNormSpec


class ParallelResidual(Enum):
    """Attention and feed-forward in parallel: x + attn(norm(x)) + ffn(norm(x))."""

    ONE_NORM = "attention and feed-forward have the same norm"
    TWO_NORMS = "attention and feed-forward have separate norms"


@dataclass(frozen=True, kw_only=True)
class NormedResidual:
    """y = a * norm(x) + b * attn(norm(x)), and the same with ffn and factors of its own (MiniMax)."""

    attn_residual: float = 1.0
    attn_branch: float = 1.0
    ffn_residual: float = 1.0
    ffn_branch: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Layer:
    """x + scale * post(attn(pre(x))), and the same with ffn; pre and post are norms, if enabled.

    Attributes:
        pre_attn_norm: False: the attention alone has no norm before it.
        post_ln: x becomes norm(x + attn(x)), and the same with ffn (BERT).
        inner_post_ln: with post_ln, attn(x) is inner_norm(x + attn(x)) (Jina's code embedder).
        parallel: attention and feed-forward both read the layer's input.
        cross: cross-attention between attention and feed-forward, with a norm before it; not in layers
            with `post_ln` or `parallel`.
        ffn: None: the layer is attention, or what is in its place, alone; then x + scale * attn(pre(x)).
        normed_residual: residuals are the results of norms, with factors; None: they are not.
        layer_input: what is added behind attention and feed-forward, from the layer's own input.
        output_scale: the result has a learned factor.
        streams: the hidden states of a token, if there are several.
    """

    attn: Attention
    ffn: FeedForward | None
    pre_norm: bool = True
    pre_attn_norm: bool = True
    branch_output_norm: bool = False
    post_ln: bool = False
    inner_post_ln: bool = False
    parallel: ParallelResidual | None = None
    residual_scale: float = 1.0
    cross: CrossAttention | None = None
    normed_residual: NormedResidual | None = None
    layer_input: LayerInput | None = None
    output_scale: bool = False
    streams: Streams | None = None


@dataclass(frozen=True, kw_only=True)
class ConformerLayer:
    """Half a feed-forward, attention, a convolution and half a feed-forward, in residual branches; then a norm.

    Each branch begins with a norm (Gulati et al. 2020).

    Attributes:
        ffn: architecture of both feed-forwards.
        feedback: classes, of which the probabilities at the layer's output are projected and added to it (Nozaki and
            Komatsu 2021); 0 for none.
    """

    attn: RelativeAttention | ChunkedAttention | BlockAttention | GroupedQueryAttention
    ffn: PlainMLP | GatedMLP
    conv: TimeConv
    feedback: int = 0


@dataclass(frozen=True, kw_only=True)
class Embeddings:
    """The embedding of a token, and the embeddings that are added to it.

    Attributes:
        scale: factor of the token's embedding.
        scales_items: the factor is also that of embeddings of items; False: these are as their encoder makes them.
        positions: rows of the table of learned positions; 0 for none.
        position_offset: row of the first position.
        types: rows of the table of token types; 0 for none.
        norm: applied to the sum; None for no norm.
        size: elements of the tables, if a projection to the hidden size follows.
        norm_projected: the projection precedes the norm, and has no bias.
        tasks: rows of the table of tasks, of which the first is added to all tokens (ERNIE); 0 for none.
    """

    scale: float = 1.0
    scales_items: bool = True
    positions: int = 0
    position_offset: int = 0
    types: int = 0
    norm: Norm | None = None
    size: int | None = None
    norm_projected: bool = False
    tasks: int = 0


@dataclass(frozen=True, kw_only=True)
class StackSpec(SpecPart):
    """Layers, and a norm.

    Attributes:
        final_norm: the norm after the last layer exists.
        order: indices of the layers in the order in which they run, where some run more than once (ALBERT); only in
            encoders of text. None: each runs once.
    """

    hidden: int
    layers: tuple[Layer | ConformerLayer, ...]
    norm: Norm
    max_positions: int
    final_norm: bool = True
    order: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class TransformerSpec(StackSpec):
    """Embeddings of tokens before the layers.

    Attributes:
        family: name of the family whose checkpoints have the weights.
    """

    positive: ClassVar = ("hidden", "vocab", "max_positions")

    layers: tuple[Layer, ...]
    vocab: int
    embeddings: Embeddings = Embeddings()
    family: str = ""


@dataclass(frozen=True, kw_only=True)
class AudioEncoderSpec(StackSpec):
    """An encoder of audio.

    Learned positions are added.

    Attributes:
        max_positions: positions of an item, after the stem.
        positions: position embeddings; None if the stem adds them, or attention encodes positions.
        averaged: pooling factor: the mean of this many neighbouring positions becomes one, before the norm.
        joined: stack factor: this many neighbouring positions are concatenated to one, after the norm.
        concatenated: indices of layers whose inputs are put before the last layer's output, along the elements.
        chunk: positions of an item; one that continues another is filled up with zeros, which are attended to.
            0: items are independent of each other.
        projector: applied to the result; None: there is none.
        picture_projector: there is another projector like it for audio in prompts that have pictures as well.
    """

    positive: ClassVar = ("hidden", "max_positions", "averaged", "joined")

    stem: Stem
    positions: Positions | None
    averaged: int = 1
    joined: int = 1
    concatenated: tuple[int, ...] = ()
    chunk: int = 0
    projector: Projector | QueryProjector | None = None
    picture_projector: bool = False


@dataclass(frozen=True, kw_only=True)
class CTCSpec(SpecPart):
    """An encoder and a projection to the logits of each position (Graves et al. 2006).

    Attributes:
        family: as of a `TransformerSpec`.
    """

    positive: ClassVar = ("vocab",)

    encoder: AudioEncoderSpec
    vocab: int
    family: str = ""


@dataclass(frozen=True, kw_only=True)
class TransducerSpec(SpecPart):
    """An encoder of audio in pieces, and networks that give the next token at a position (RNN-T, Graves 2012).

    The prediction network is an LSTM over the tokens so far. The joint network adds its output to the encoder's, with
    an activation and a projection to logits.

    Attributes:
        hidden: elements of both outputs.
        vocab: tokens, with the blank.
        lstm_layers: number of layers of the LSTM.
        act: activation of the joint network.
        chunk: number of positions that are encoded together.
        family: as of a `TransformerSpec`.
    """

    positive: ClassVar = ("hidden", "vocab", "lstm_layers", "chunk")
    activations: ClassVar = ("act",)

    encoder: AudioEncoderSpec
    hidden: int
    vocab: int
    lstm_layers: int
    act: str
    chunk: int
    family: str = ""

    @property
    def stem_state(self) -> int:
        """The index of the stem's state."""
        return 2 * len(self.encoder.layers)

    @property
    def prediction_state(self) -> int:
        """The index of the prediction network's state."""
        return self.stem_state + 1

    def states(self, dtype: StateDtype) -> tuple[StateCache, ...]:
        """Return what is kept of a sequence between pieces of its audio; `dtype`: that of activations.

        For each layer of the encoder what its attention keeps, then what its convolution keeps; the stem's; that of the
        prediction network: the LSTM's outputs and cells, and the output of the network.
        """
        kinds = list[StateCache]()
        for layer in self.encoder.layers:
            assert isinstance(layer, ConformerLayer)
            assert isinstance(layer.attn, ChunkedAttention)
            kinds += (layer.attn.state(dtype), layer.conv.state(dtype))
        assert isinstance(self.encoder.stem, CausalConv2dStem)
        lstm = StateArray((self.lstm_layers, self.hidden), dtype)
        return (*kinds, self.encoder.stem.state(dtype), StateCache((lstm, lstm, StateArray((self.hidden,), dtype))))


@dataclass(frozen=True, kw_only=True)
class DecoderSpec(TransformerSpec):
    """A decoder-only language model.

    Attributes:
        tied: the output projection shares the embedding's weight.
        head_bias: the output projection has a bias.
        logit_softcap: logits become cap * tanh(logits / cap).
        encoder: audio encoder: feeds cross-attention if layers have it; otherwise its outputs replace embeddings of
            placeholder tokens, or, where audio arrives while tokens are generated, are added to those of all tokens.
            None if there is none.
        language_model: name of the language model's family, if the model is composed of parts.
        prefix_lm: the tokens of a prompt attend to each other in both directions, also to those before windows.
        layer_embeddings: what makes the inputs of layers that have some; None: none has.
        streams: the hidden states of a token that its layers have, if there are several.
    """

    tied: bool = False
    head_bias: bool = False
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    encoder: AudioEncoderSpec | None = None
    language_model: str = ""
    prefix_lm: bool = False
    layer_embeddings: LayerEmbeddings | None = None
    streams: Streams | None = None

    @property
    def has_cross_attention(self) -> bool:
        """Whether layers read the encoder's output."""
        return any(layer.cross is not None for layer in self.layers)

    def cache_groups(self, context_len: int) -> tuple[CacheGroup, ...]:
        """Return the groups of its layers; see `group_layers`."""
        kinds = [layer.attn.cache for layer in self.layers]
        crossing = [index for index, layer in enumerate(self.layers) if layer.cross is not None]
        beside = {index: layer.attn.state_beside for index, layer in enumerate(self.layers)}
        shapes = {index: layer.attn.cache_shape() for index, layer in enumerate(self.layers)}
        sizes = {index: shape.elements for index, shape in shapes.items() if shape is not None}
        return group_layers(kinds, context_len, crossing=crossing, beside=beside, sizes=sizes)


@dataclass(frozen=True, kw_only=True)
class EncoderSpec(TransformerSpec):
    """A transformer whose tokens attend in both directions."""
