"""The spec of a rank, and models that cannot be divided."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from quire.engine.models.distributed.placement import Placement
from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.registry import spec_of
from quire.engine.models.sharding.shard import check_divisible, part_of, shard, stage, stage_layers
from quire.engine.models.specs.decoder import DecoderSpec, GatedMLP, GroupedQueryAttention, LatentAttention, MoE
from tests.support.models import make_model


def spec(case: str, **changes: Any) -> DecoderSpec:
    spec = spec_of(make_model(case, **changes).config)
    assert isinstance(spec, DecoderSpec)
    return spec


def test_heads_feed_forward_and_vocabulary_are_divided() -> None:
    whole = spec("qwen3", vocab_size=1001)
    for rank in range(2):
        part = shard(whole, rank, 2)
        attn, ffn = part.layers[0].attn, part.layers[0].ffn
        assert isinstance(attn, GroupedQueryAttention)
        assert (attn.heads, attn.kv_heads, attn.head_dim) == (2, 1, 32)
        assert isinstance(ffn, GatedMLP)
        assert ffn.size == 48
        assert part.vocab == 501  # the last rank has a row of padding
        assert part.hidden == whole.hidden


def test_key_heads_are_replicated_where_there_are_fewer_than_ranks() -> None:
    attn = shard(spec("llama"), 3, 4).layers[0].attn
    assert isinstance(attn, GroupedQueryAttention)
    assert (attn.heads, attn.kv_heads) == (1, 1)


def test_each_rank_has_the_slopes_of_its_heads() -> None:
    whole = spec("bloom")
    slopes: list[float] = []
    for rank in range(2):
        attn = shard(whole, rank, 2).layers[0].attn
        assert isinstance(attn, GroupedQueryAttention)
        slopes += attn.alibi or ()
    attn = whole.layers[0].attn
    assert isinstance(attn, GroupedQueryAttention)
    assert tuple(slopes) == attn.alibi


def test_latent_attention_divides_heads_and_not_the_cache() -> None:
    attn = shard(spec("deepseek_v3"), 1, 4).layers[0].attn
    assert isinstance(attn, LatentAttention)
    assert (attn.heads, attn.kv_rank, attn.shared_dim) == (1, 16, 8)


def experts(part: DecoderSpec) -> MoE:
    ffn = part.layers[-1].ffn
    assert isinstance(ffn, MoE)
    return ffn


def test_experts_are_cut_or_divided() -> None:
    whole = spec("deepseek_v3")
    cut = experts(shard(whole, 1, 2))
    assert (cut.size, cut.shared, cut.local_experts) == (24, 24, range(8))
    ranks = [experts(shard(whole, rank, 4, expert_parallel=True)) for rank in range(4)]
    assert [rank.local_experts for rank in ranks] == [range(2), range(2, 4), range(4, 6), range(6, 8)]
    assert {(rank.size, rank.shared, rank.experts) for rank in ranks} == {(48, 12, 8)}


def test_any_number_of_experts_is_divided() -> None:
    parts = [experts(shard(spec("qwen3_moe"), rank, 4, expert_parallel=True)).local_experts for rank in range(4)]
    assert [index for part in parts for index in part] == list(range(6))


@pytest.mark.parametrize(("layers", "stages"), [(4, 1), (4, 2), (7, 3), (5, 5), (61, 8)])
def test_stages_have_consecutive_layers(layers: int, stages: int) -> None:
    parts = [stage_layers(layers, index, stages) for index in range(stages)]
    assert [layer for part in parts for layer in part] == list(range(layers))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


def test_only_the_last_stage_has_the_final_norm() -> None:
    whole = spec("gemma2")
    assert whole.tied
    first, last = stage(whole, 0, 2), stage(whole, 1, 2)
    assert (len(first.layers), first.final_norm, first.tied) == (2, False, False)
    assert (last.layers, last.final_norm, last.tied) == (whole.layers[2:], True, False)


REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("llama", {}, {"tensor_size": 3}, "4 attention heads cannot be divided among 3 ranks.* one of 1, 2, 4"),
    (
        "llama",
        {"num_attention_heads": 12, "num_key_value_heads": 3, "hidden_size": 96},
        {"tensor_size": 4},
        "3 KV heads cannot be divided among 4 ranks: --tensor-parallel-size must be one of 1, 3, 6",
    ),
    ("llama", {"intermediate_size": 90}, {"tensor_size": 4}, "an intermediate size of 90 .* must be 1 or 2"),
    ("mixtral", {"intermediate_size": 90}, {"tensor_size": 4}, "an expert's intermediate size of 90 cannot"),
    ("olmo2", {"num_key_value_heads": 1}, {"tensor_size": 2}, "norm of the keys of 1 KV heads .* must be 1"),
    ("llama", {}, {"stages": 5}, "--pipeline-parallel-size is 5, but the model has 4 layers"),
]


@pytest.mark.parametrize(("case", "changes", "placement", "complaint"), REFUSED)
def test_what_cannot_be_divided_is_refused_with_what_is_accepted(
    case: str, changes: dict[str, Any], placement: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(UnsupportedModel, match=complaint) as refused:
        part_of(spec(case, **changes), Placement(**placement))
    sizes = re.search(r"must be (?:one of )?([\d, or]+)$", str(refused.value))
    for size in re.findall(r"\d+", sizes[1]) if sizes is not None else ():
        check_divisible(spec(case, **changes), Placement(tensor_size=int(size)))


def test_experts_that_cannot_be_cut_can_be_divided() -> None:
    whole = spec("mixtral", intermediate_size=90)
    check_divisible(whole, Placement(tensor_size=4, expert_parallel=True))
    layers = [replace(layer, ffn=replace(experts(whole), shared=30)) for layer in whole.layers]
    with pytest.raises(UnsupportedModel, match="a shared expert's intermediate size of 30"):
        check_divisible(replace(whole, layers=tuple(layers)), Placement(tensor_size=4, expert_parallel=True))
