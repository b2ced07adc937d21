"""Structural tags as grammars."""

from __future__ import annotations

from typing import Any

import pytest

from quire.parsing.grammar_writer import GrammarTooLong, GrammarWriter
from quire.parsing.structured.tags import format_tree, triggered_tags


def test_the_longest_trigger_is_used() -> None:
    writer = GrammarWriter({})
    triggered_tags(writer, ["<a", "<ab", "<"], [("<abc>", '"x"', "</abc>")])
    grammar = writer.finish("start")
    assert '\\"<ab\\"' in grammar
    assert '\\"c>\\"' in grammar


@pytest.mark.timeout(30)
def test_many_tags_are_written_in_linear_time() -> None:
    """At sizes at which quadratic costs would take minutes."""
    writer, count = GrammarWriter({}), 20_000
    names = [f"<f{number}>" for number in range(count)]
    triggered_tags(writer, names, [(name, '"x"', "</f>") for name in names])
    format_tree(writer, {"type": "sequence", "elements": [{"type": "any_text"}] * count})
    assert writer.finish("start").count("ANYTHING: ") == 1


@pytest.mark.timeout(30)
def test_triggers_of_many_lengths() -> None:
    """Only those that may be the begin of a tag are compared."""
    writer = GrammarWriter({})
    triggers = ["<" + "x" * length for length in range(1_000)]
    triggered_tags(writer, triggers, [(f"<{number}", '"x"', "</f>") for number in range(20_000)])
    assert writer.finish("start").count('ANYTHING \\"<\\"') == 20_000


def test_a_structural_tag_that_is_too_long() -> None:
    with pytest.raises(GrammarTooLong, match="more than 1048576 characters"):
        triggered_tags(GrammarWriter({}), ["<" + "x" * 2000] * 1000, [])


@pytest.mark.parametrize(
    ("node", "field"),
    [
        ({"type": "or", "elements": []}, "elements"),
        ({"type": "triggered_tags", "triggers": ["<"], "tags": []}, "tags"),
        ({"type": "tags_with_separator", "tags": [], "separator": ","}, "tags"),
    ],
)
def test_a_list_without_alternatives_is_refused_by_name(node: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=f"^`{field}` of the `{node['type']}` format of the structural tag"):
        format_tree(GrammarWriter({}), node)
