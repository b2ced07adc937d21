"""Which layers share block tables."""

from __future__ import annotations

import pytest
import torch

from quire.engine.execution.cache_layout import CacheLayout
from quire.engine.models.specs.cache import (
    CacheGroup,
    CacheShape,
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


def test_layers_with_smaller_keys_share_the_places_of_larger_ones() -> None:
    """Of Gemma 4 E2B, whose layers with all tokens have heads that are twice as large as those with windows."""
    kinds = [*[*[WINDOW] * 4, FULL] * 3, *[None] * 20]
    shapes = {layer: CacheShape(1, 8 if kind == FULL else 4, 8 if kind == FULL else 4)
              for layer, kind in enumerate(kinds) if kind is not None}  # fmt: skip
    groups = group_layers(kinds, 100, sizes={layer: shape.elements for layer, shape in shapes.items()})
    assert [len(group.layers) for group in groups] == [6, 6, 3]
    layout = CacheLayout(shapes, groups)
    assert layout.block_bytes(1, torch.float32) == 4 * 3 * 16
    memory = torch.zeros(5 * layout.block_bytes(2, torch.float32), dtype=torch.uint8)
    for by_place in (False, True):
        layers = layout.divide(memory, 5, 2, torch.float32, by_place=by_place)
        for group in groups:
            memory.zero_()
            for layer in group.layers:
                layers[layer].keys.fill_(layer + 1)
                layers[layer].values.fill_(-layer - 1)
            for layer in group.layers:  # none has overwritten another
                assert bool((layers[layer].keys == layer + 1).all())
                assert bool((layers[layer].values == -layer - 1).all())


def test_few_groups_of_layers_of_different_sizes() -> None:
    """Of Gemma 4 26B: the layers with windows are larger."""
    kinds = [*[WINDOW] * 5, FULL] * 5
    groups = group_layers(kinds, 100, sizes={layer: 1 if kind == FULL else 2 for layer, kind in enumerate(kinds)})
    assert [len(group.layers) for group in groups] == [4, 4, 4, 4, 3, 3, 3, 5]
