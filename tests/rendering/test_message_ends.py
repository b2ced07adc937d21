"""Where messages end in a prompt: what the engine is told, so that states are saved there."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from quire.config.options import ChatOptions
from quire.rendering.prompts import ChatJob, Conversation, PromptBuilder
from quire.rendering.tokenizer import Tokenizer
from tests.support.tokenizer import write_tokenizer

SYSTEM = {"role": "system", "content": "Be brief. \n"}
USER = {"role": "user", "content": "Hi"}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
ANSWER = {"role": "assistant", "content": "Hello."}
PLAIN = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content | trim }} [/INST]"
    "{% elif m.role == 'system' %}{{ m.content | trim }}{{ tools | tojson if tools else '' }}"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
PARTS = "{% for m in messages %}<{% for part in m.content %}{{ part.text }}{% endfor %}>{% endfor %}"


def before_ends(folder: Path, template: str, messages: list[dict[str, Any]], **fields: Any) -> list[str] | None:
    """Return the texts of a prompt's tokens between the ends that the engine is told; None: it is told nothing."""
    write_tokenizer(folder, chat_template=template)
    tokenizer = Tokenizer.load(folder)
    builder = PromptBuilder(folder, tokenizer, ChatOptions(), 1000, finds_messages=True)
    rendered = builder.chat(ChatJob(Conversation(messages=messages, **fields), None)).prompt
    plain = PromptBuilder(folder, tokenizer, ChatOptions(), 1000).chat(
        ChatJob(Conversation(messages=messages, **fields), None)
    )
    assert rendered.token_ids.tolist() == plain.prompt.token_ids.tolist()
    assert plain.prompt.message_ends is None
    if rendered.message_ends is None:
        return None
    ends = sorted({0, *rendered.message_ends.tolist(), rendered.next_turn})
    return [
        tokenizer.decode(rendered.token_ids[begin:end].tolist(), skip_special_tokens=False)
        for begin, end in itertools.pairwise(ends)
    ]


def test_the_ends_of_texts(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    pieces = before_ends(tmp_path, PLAIN, [SYSTEM, USER, ANSWER, USER], tools=tools)
    assert pieces == ["Be brief.", f"{json.dumps(tools)}[INST] Hi", " [/INST] Hello.", "</s>[INST] Hi", " [/INST]"]
    assert before_ends(tmp_path, PLAIN, [USER, CALL, USER]) == ["[INST] Hi", " [/INST] </s>[INST] Hi", " [/INST]"]
    assert before_ends(tmp_path, PARTS, [SYSTEM, USER]) == ["<Be brief.", " \n><Hi", ">"]


def test_where_the_next_turn_parts(tmp_path: Path) -> None:
    """Reasoning is written into answers behind the last question, and in front of the next one."""
    template = (
        "{% for m in messages %}<{{ m.role }}>"
        "{% if m.reasoning and not loop.last and messages[-1].role == 'tool' %}({{ m.reasoning }}){% endif %}"
        "{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>({% endif %}"
    )
    assert before_ends(tmp_path, template, [USER]) == ["<user>Hi", "<assistant>"]
    called = {"role": "assistant", "content": "f()", "reasoning": "hm"}
    pieces = before_ends(tmp_path, template, [USER, called, {"role": "tool", "content": "1"}])
    assert pieces == ["<user>Hi", "<assistant>", "(hm)f()", "<tool>1"]
    refusing = "{% if messages | length > 1 %}{{ raise_exception('one') }}{% endif %}{{ messages[0].content }}!"
    assert before_ends(tmp_path, refusing, [USER]) == ["Hi"]


def test_the_end_of_a_message_that_is_continued(tmp_path: Path) -> None:
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    assert before_ends(tmp_path, PLAIN, [USER, ANSWER], **fields) == ["[INST] Hi", " [/INST] Hello."]


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content | length }},{{ m.content }}{% endfor %}",
        "{% for m in messages %}{% if m.content.endswith('Hi') %}{{ m.content }}{% endif %}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{% if m.content | length > 9 %}{{ raise_exception('') }}{% endif %}"
        "{% endfor %}",
    ],
)
def test_nothing_is_told_where_the_template_looks_at_the_texts(tmp_path: Path, template: str) -> None:
    assert before_ends(tmp_path, template, [USER]) is None
