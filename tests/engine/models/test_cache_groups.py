"""Which layers share block tables."""

from __future__ import annotations

import pytest

from quire.engine.models.specs.cache import (
    CacheGroup,
    CrossCache,
    FullCache,
    LatentCache,
    StateArray,
    StateCache,
    TokenCache,
    WindowCache,
    group_layers,
)

FULL: TokenCache = FullCache()
LATENT: TokenCache = LatentCache()
WINDOW: TokenCache = WindowCache(8)
OTHER: TokenCache = WindowCache(5)
STATE = StateCache((StateArray((3, 4), "float32"), StateArray((2,), "bfloat16")))
GEMMA: list[TokenCache] = [*[*[WINDOW] * 5, FULL] * 4, WINDOW, WINDOW]  # the layers of Gemma 3 1B


@pytest.mark.parametrize("kind", [FULL, LATENT, WINDOW])
def test_layers_of_one_kind_are_one_group(kind: TokenCache) -> None:
    assert group_layers([kind] * 5, 100) == (CacheGroup(kind, (0, 1, 2, 3, 4)),)


def test_a_kind_with_more_layers_makes_several_groups_of_equal_size() -> None:
    groups = group_layers(GEMMA, 100)
    assert [group.kind for group in groups] == [WINDOW] * 6 + [FULL]
    assert groups[-1].layers == (5, 11, 17, 23)
    assert {len(group.layers) for group in groups} == {3, 4}
    assert sorted(layer for group in groups for layer in group.layers) == list(range(26))


@pytest.mark.parametrize("stages", [2, 3])
def test_each_pipeline_stage_has_layers_of_all_groups(stages: int) -> None:
    groups = group_layers(GEMMA, 100)
    for stage in range(stages):
        local = range(stage * 26 // stages, (stage + 1) * 26 // stages)
        counts = [sum(layer in local for layer in group.layers) for group in groups]
        assert min(counts) >= 1
        assert max(counts) <= -(-4 // stages) + 1


def test_a_window_that_is_not_shorter_than_the_context_keeps_all_tokens() -> None:
    assert group_layers([WINDOW, FULL], 8) == (CacheGroup(FULL, (0, 1)),)
    assert len(group_layers([WINDOW, FULL], 9)) == 2
    assert [group.window for group in group_layers([WINDOW, OTHER], 7)] == [None, 5]


def test_the_number_of_groups_is_bounded() -> None:
    groups = group_layers([FULL, *[WINDOW] * 63], 100)
    assert len(groups) == 8
    assert max(len(group.layers) for group in groups) == 9


def test_cross_attention_has_a_group_beside_one_of_all_layers() -> None:
    groups = group_layers([WINDOW, FULL, FULL], 100, crossing=[0, 2])
    assert groups == (CacheGroup(FULL, (0, 1, 2)), CacheGroup(CrossCache(), (0, 2)))


def test_states_are_groups_of_their_own() -> None:
    groups = group_layers([STATE, FULL, STATE, WINDOW], 100)
    assert groups == (CacheGroup(FULL, (1,)), CacheGroup(WINDOW, (3,)), CacheGroup(STATE, (0, 2)))
    assert group_layers([STATE] * 2, 100) == (CacheGroup(STATE, (0, 1)),)
    assert [array.nbytes for array in STATE.arrays] == [48, 4]
