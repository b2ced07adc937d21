"""Random configs of every family: greedy tokens and log-probabilities are those of transformers."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.support.engine import random_prompt
from tests.support.odd_configs import BIDIRECTIONAL, FAMILIES, bidirectional_configs, odd_configs
from tests.support.oracle import assert_equal, assert_hidden_equal, write_folder
from tests.support.variants import slow_but

LIKE_OTHERS = ("deepseek_v2", "qwen2_moe")  # share nearly all of what they read with a family beside them
PHASES = [Phase.explicit, Phase.reuse, Phase.generate]  # configs are small, and shrinking them takes minutes
PROMPTS = [random_prompt(1, 40), random_prompt(2, 5)]


def compare(config: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert_equal(write_folder(Path(folder), config), PROMPTS)


def compare_hidden(config: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert_hidden_equal(write_folder(Path(folder), config), PROMPTS)


@pytest.mark.parametrize("family", slow_but(FAMILIES, *(name for name in FAMILIES if name not in LIKE_OTHERS)))
@given(st.data())
@settings(max_examples=2, deadline=None, derandomize=True, phases=PHASES, suppress_health_check=list(HealthCheck))
def test_random_configs(family: str, data: st.DataObject) -> None:
    compare(data.draw(odd_configs(family)))


@pytest.mark.parametrize("family", BIDIRECTIONAL)
@given(st.data())
@settings(max_examples=2, deadline=None, derandomize=True, phases=PHASES, suppress_health_check=list(HealthCheck))
def test_random_bidirectional_configs(family: str, data: st.DataObject) -> None:
    compare_hidden(data.draw(bidirectional_configs(family)))


@pytest.mark.slow
@pytest.mark.parametrize("family", BIDIRECTIONAL)
@given(st.data())
@settings(max_examples=30, deadline=None, phases=PHASES, suppress_health_check=list(HealthCheck))
def test_many_random_bidirectional_configs(family: str, data: st.DataObject) -> None:
    compare_hidden(data.draw(bidirectional_configs(family)))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@given(st.data())
@settings(max_examples=30, deadline=None, phases=PHASES, suppress_health_check=list(HealthCheck))
def test_many_random_configs(family: str, data: st.DataObject) -> None:
    compare(data.draw(odd_configs(family)))
