"""The spec of the part of a decoder that one rank has."""

from __future__ import annotations

from dataclasses import replace

from quire.engine.models.distributed.placement import Placement
from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.model_config import ModelConfig
from quire.engine.models.specs.decoder import (
    Attention,
    DecoderSpec,
    FeedForward,
    GroupedQueryAttention,
    LatentAttention,
    Layer,
    MoE,
    NoAttention,
    QKNorm,
    Recurrence,
    SideBySide,
)
from quire.engine.models.specs.shared_block import BlockBeforeRecurrence
from quire.engine.models.specs.shared_keys import SharedKeysAttention

_DivisibleAttention = GroupedQueryAttention | LatentAttention | SharedKeysAttention


def part_of(spec: DecoderSpec, placement: Placement) -> DecoderSpec:
    """The spec of a rank: its layers, cut.

    Raises:
        UnsupportedModel: the model cannot be divided like this.
    """
    check_divisible(spec, placement)
    return shard(
        stage(spec, placement.stage, placement.stages),
        placement.tensor_rank,
        placement.tensor_size,
        expert_parallel=placement.expert_parallel,
    )


def sources_before(spec: DecoderSpec, layer: int) -> tuple[int, ...]:
    """Indices of the layers before `layer` whose keys layers from there on read."""
    attns = [behind.attn for behind in spec.layers[layer:]]
    return tuple(
        sorted({attn.source for attn in attns if isinstance(attn, SharedKeysAttention) and attn.source < layer})
    )


def stage(spec: DecoderSpec, index: int, stages: int) -> DecoderSpec:
    """The spec of a pipeline stage: consecutive layers; only the last stage has the final norm.

    The embedding belongs to the first stage and the output projection to the last, so they are not tied. The inputs of
    all layers are made before the first one.

    A layer that reads keys of one in an earlier stage reads a copy of them, whose index is behind those of the layers.
    Weights that layers of several stages have in common are in each of these stages.
    """
    if stages == 1:
        return spec
    indices = stage_layers(len(spec.layers), index, stages)
    places = {source: len(indices) + copy for copy, source in enumerate(sources_before(spec, indices.start))}
    places |= {layer: layer - indices.start for layer in indices}
    layers = [spec.layers[layer] for layer in indices]
    return replace(
        spec,
        layers=tuple(
            replace(layer, attn=replace(layer.attn, source=places[layer.attn.source]))
            if isinstance(layer.attn, SharedKeysAttention)
            else layer
            for layer in layers
        ),
        final_norm=spec.final_norm and index == stages - 1,
        tied=False,
        layer_embeddings=None,
    )


def stage_layers(layers: int, index: int, stages: int) -> range:
    """Indices of the layers of a stage; the numbers of layers of two stages differ by at most one."""
    return range(index * layers // stages, (index + 1) * layers // stages)


def with_pictures_of_stages(config: ModelConfig, stages: int) -> ModelConfig:
    """The config of a model in so many stages, the first of which must have all layers that pictures need."""
    spec, pictures = config.spec, config.facts.pictures
    if pictures is None or not isinstance(spec, DecoderSpec):
        return config
    layers = len(stage_layers(len(spec.layers), 0, stages))
    if pictures.levels <= layers:
        return config
    return config.without_pictures(
        f"levels of embeddings are added behind {pictures.levels} layers, but the first pipeline stage has {layers}"
    )


def shard(spec: DecoderSpec, rank: int, size: int, *, expert_parallel: bool = False) -> DecoderSpec:
    """The spec of one of `size` ranks that share each layer (tensor parallelism, Shoeybi et al. 2019).

    A rank has some of the heads, some of the elements between the two projections of a feed-forward, and some of the
    vocabulary, which is padded to a multiple of `size`. Key heads are replicated if there are fewer than ranks, the
    cache of latent attention always is, and recurrent layers with their states are where their heads or channels cannot
    be divided. The spec must be divisible, see `check_divisible`.

    Args:
        spec: a whole decoder, or a stage of one.
        rank: index of the rank.
        size: number of ranks.
        expert_parallel: a rank has some of the experts, each as a whole; otherwise a part of every expert.
    """
    if size == 1:
        return spec
    layers = tuple(
        replace(
            layer,
            attn=_shard_attention(layer.attn, rank, size),
            ffn=_shard_feed_forward(layer.ffn, rank, size, expert_parallel),
        )
        for layer in spec.layers
    )
    return replace(spec, layers=layers, vocab=padded_vocab(spec.vocab, size) // size)


def padded_vocab(vocab: int, size: int) -> int:
    """The next multiple of `size`."""
    return -(-vocab // size) * size


def _shard_attention(attn: Attention, rank: int, size: int) -> Attention:
    if isinstance(attn, NoAttention):
        return attn
    if isinstance(attn, Recurrence):
        return attn.divided(size)
    if isinstance(attn, SideBySide):
        attention = _shard_attention(attn.attention, rank, size)
        assert isinstance(attention, GroupedQueryAttention)
        return replace(attn, attention=attention, recurrence=attn.recurrence.divided(size))
    if isinstance(attn, BlockBeforeRecurrence):
        attention = _shard_attention(attn.attention, rank, size)
        assert isinstance(attention, GroupedQueryAttention)
        ffn = replace(attn.ffn, size=attn.ffn.size // size)
        return replace(attn, attention=attention, ffn=ffn, recurrence=attn.recurrence.divided(size))
    assert isinstance(attn, _DivisibleAttention)
    heads = attn.heads // size
    if isinstance(attn, LatentAttention):
        return replace(attn, heads=heads)
    if isinstance(attn, SharedKeysAttention):
        return replace(attn, heads=heads, kv_heads=max(1, attn.kv_heads // size))
    alibi = None if attn.alibi is None else attn.alibi[rank * heads : (rank + 1) * heads]
    return replace(attn, heads=heads, kv_heads=max(1, attn.kv_heads // size), alibi=alibi)


def _shard_feed_forward(ffn: FeedForward | None, rank: int, size: int, expert_parallel: bool) -> FeedForward | None:
    if ffn is None:
        return None
    if not isinstance(ffn, MoE):
        return replace(ffn, size=ffn.size // size)
    shared = ffn.shared // size
    if not expert_parallel:
        return replace(ffn, size=ffn.size // size, shared=shared)
    first, end = rank * ffn.experts // size, (rank + 1) * ffn.experts // size
    return replace(ffn, first_expert=first, num_local_experts=end - first, shared=shared)


def check_divisible(spec: DecoderSpec, placement: Placement) -> None:
    """Check that a model can be divided among ranks.

    Raises:
        UnsupportedModel: it cannot; the message has the reason and what is accepted.
    """
    if placement.ranks == 1:
        return
    if placement.stages > len(spec.layers):
        raise UnsupportedModel(
            f"--pipeline-parallel-size is {placement.stages}, but the model has {len(spec.layers)} layers: "
            "it must not be larger than that"
        )
    for index in range(1, placement.stages):
        first = spec.layers[stage_layers(len(spec.layers), index, placement.stages).start].attn
        if isinstance(first, LatentAttention) and first.indexer is not None and first.indexer.is_shared:
            raise UnsupportedModel(
                f"--pipeline-parallel-size {placement.stages} is not supported for this model: a stage would begin "
                "with a layer that attends to the tokens which a layer of an earlier stage has selected"
            )
    problem = _problem(spec, placement.tensor_size, placement.expert_parallel)
    if problem is not None:
        attentions = [_attention_of(layer) for layer in spec.layers]
        heads = [attn.heads for attn in attentions if isinstance(attn, _DivisibleAttention)]
        most = max(heads, default=1)
        sizes = [n for n in range(1, most + 1) if _problem(spec, n, placement.expert_parallel) is None]
        accepted = f"must be {' or '.join(map(str, sizes))}" if len(sizes) < 3 else f"must be one of {_listed(sizes)}"
        raise UnsupportedModel(
            f"{problem} cannot be divided among {placement.tensor_size} ranks: --tensor-parallel-size {accepted}"
        )


def _listed(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes))


def _problem(spec: DecoderSpec, size: int, expert_parallel: bool) -> str | None:
    """What cannot be divided among `size` ranks; None if all can."""
    if size == 1:
        return None
    for layer in dict.fromkeys(spec.layers):
        ffn = layer.attn.ffn if isinstance(layer.attn, BlockBeforeRecurrence) else layer.ffn
        for problem in (_attention_problem(layer, size), _feed_forward_problem(ffn, size, expert_parallel)):
            if problem is not None:
                return problem
    return None


def _attention_of(layer: Layer) -> Attention:
    """What a layer has in the place of attention, without a recurrence beside it or behind it."""
    return layer.attn.attention if isinstance(layer.attn, SideBySide | BlockBeforeRecurrence) else layer.attn


def _attention_problem(layer: Layer, size: int) -> str | None:
    attn = _attention_of(layer)
    if not isinstance(attn, _DivisibleAttention | Recurrence | NoAttention):
        return attn.description
    if layer.cross is not None:
        return "cross-attention"
    if isinstance(attn, Recurrence | NoAttention):
        return None
    if attn.heads % size:
        return f"{attn.heads} attention heads"
    if isinstance(attn, LatentAttention):
        return None
    if attn.kv_heads % size and size % attn.kv_heads:
        return f"{attn.kv_heads} KV heads"
    if isinstance(attn, SharedKeysAttention):
        return None
    if attn.qk_norm is QKNorm.ALL and attn.kv_heads % size:
        return f"a norm of the keys of {attn.kv_heads} KV heads"
    return None if attn.relative_bias is None else "attention with a relative position bias"


def _feed_forward_problem(ffn: FeedForward | None, size: int, expert_parallel: bool) -> str | None:
    if ffn is None:
        return None
    if not isinstance(ffn, MoE):
        return _indivisible(ffn.size, size, "an intermediate size")
    if ffn.shared % size:
        return f"a shared expert's intermediate size of {ffn.shared}"
    return None if expert_parallel else _indivisible(ffn.size, size, "an expert's intermediate size")


def _indivisible(count: int, size: int, what: str) -> str | None:
    return f"{what} of {count}" if count % size else None
