"""Reasoning and content do not depend on how the text was cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.parsing.answer import AnswerFormat
from quire.parsing.parsers import check_parsers, reasoning_tags, tool_format
from quire.parsing.reasoning import ReasoningSplitter, ReasoningTags
from quire.parsing.reasoning_registry import PARSERS, detect_tags, tags_named

TAGS = ReasoningTags()
PIECES = st.sampled_from(["<think>", "</think>", "<th", "ink>", "</", "a", "b c", "\n", " ", "<", ">"])


def split(pieces: list[str], prompt: str | None = None, continued: str = "") -> tuple[str, str]:
    splitter = ReasoningSplitter(TAGS, prompt, continued)
    parts = [splitter.push(piece) for piece in pieces] + [splitter.push("", last=True)]
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts)


@given(pieces=st.lists(PIECES, max_size=15), opened=st.booleans())
def test_pieces_and_the_whole_give_the_same(pieces: list[str], opened: bool) -> None:
    prompt = "x<think>\n" if opened else "x"
    whole = ReasoningSplitter(TAGS, prompt).push("".join(pieces), last=True)
    assert split(pieces, prompt) == whole


@pytest.mark.parametrize(
    ("text", "prompt", "expected"),
    [
        ("plain", None, ("", "plain")),
        ("  plain", None, ("", "  plain")),
        ("<think>a</think>b", None, ("a", "b")),
        ("\n<think>\n a \n</think>\n\nb\n", None, ("a", "b\n")),
        ("<think></think>b", None, ("", "b")),
        ("<think>a", None, ("a", "")),
        ("a</think>b", "user<think>\n", ("a", "b")),
        ("a</think>b", "user", ("", "a</think>b")),
        ("b<think>a</think>", None, ("", "b<think>a</think>")),
        ("<thinker>", None, ("", "<thinker>")),
        ("<think>a</think>b</think>c", None, ("a", "b</think>c")),
        ("<thi", None, ("", "<thi")),
        ("", None, ("", "")),
        ("</think>\nb", None, ("", "b")),
        ("</think>b", "<think></think>", ("", "b")),
        ("<think>a</think>\n</think>b", None, ("a", "b")),
        ("<think>\n<think>a</think>b", None, ("a", "b")),
        ("<think>a</think>b", "user<think>\n", ("a", "b")),
    ],
)
def test_what_is_reasoning_and_what_is_not(text: str, prompt: str | None, expected: tuple[str, str]) -> None:
    assert split([text], prompt) == expected
    assert split(list(text), prompt) == expected


@pytest.mark.parametrize(
    ("continued", "text", "expected"),
    [
        ("<think>\n27", " + 1</think>\n28", (" + 1", "28")),
        ("<think>\n", " 27</think>28", ("27", "28")),
        ("<think>a</think>b", " c", ("", " c")),
        ("<think>a</think>", "\n\nb", ("", "b")),
        ("I say ", "<think>", ("", "<think>")),
        (" ", "<think>a</think>b", ("a", "b")),
    ],
)
def test_a_continued_message_may_have_begun_to_reason(continued: str, text: str, expected: tuple[str, str]) -> None:
    assert split([text], "x" + continued, continued) == expected
    assert split(list(text), "x" + continued, continued) == expected


def test_tokens_of_the_reasoning_are_counted() -> None:
    texts = ["<think>", "a", "b", "</think>", "c"]
    for size in (1, 2, 5):
        counter = AnswerFormat(tags=TAGS, prompt=None).counter(texts.__getitem__)
        tokens = list(range(5))
        assert sum(counter.count(tokens[i : i + size]) for i in range(0, 5, size)) == 4


RECORDED = [
    ("deepseek_r1", "I think.</think>\n\nYes.", ("I think.", "Yes.")),
    ("deepseek_r1", "<think>\nI think.\n</think>\nYes.", ("I think.", "Yes.")),
    ("deepseek_r1", "never ends", ("never ends", "")),
    ("deepseek_v3", "<think>I think.</think>Yes.", ("I think.", "Yes.")),
    ("qwen3", "Yes.", ("", "Yes.")),
    ("glm45", "<think>a</think>b", ("a", "b")),
    ("glm45", "a</think>b", ("a", "b")),
    ("glm45", "\nnever ends", ("never ends", "")),
    ("glm45", "a<tool_call>now</tool_call>", ("a", "<tool_call>now</tool_call>")),
    ("glm47", "a</think></think>b", ("a", "b")),
    ("glm4_moe", "a</think>b", ("a", "b")),
    ("kimi_k2", "a</think>b", ("a", "b")),
    ("qwen3", "<think>a<tool_call>now", ("a", "<tool_call>now")),
    ("glm47", "<think>a</think>b", ("a", "b")),
    ("glm4_moe", "<think>a</think>b", ("a", "b")),
    ("granite", "Here's my thought process: a. Here is my response: b.", ("a.", "b.")),
    ("granite", "Here is my thought process: a", ("a", "")),
    ("granite", "Here is my answer", ("", "Here is my answer")),
    ("mistral", "[THINK]a[/THINK]b", ("a", "b")),
    ("hunyuan_a13b", "<think>\na\n</think>\n<answer>\nb\n</answer>", ("a", "b")),
    ("hunyuan_a13b", "<answer>b", ("", "b")),
    ("hunyuan_a13b", "b < c", ("", "b < c")),
    ("minimax_m2", "a</think>b", ("a", "b")),
    ("minimax_m2_append_think", "a\n</think>\n\nb", ("", "<think>a\n</think>\n\nb")),
    ("minimax_m2_append_think", "<think>a</think>b", ("", "<think>a</think>b")),
    ("minimax_m2_append_think", "", ("", "")),
    ("step3", "a</think>b", ("a", "b")),
    ("step3p5", "a\n</think>\nb", ("a", "b")),
    ("holo2", "a</think>b", ("a", "b")),
    ("apertus", "<|inner_prefix|>a<|inner_suffix|>b", ("a", "b")),
    ("apertus", "b", ("", "b")),
    ("cohere_command3", "<|START_THINKING|> a<|END_THINKING|>\n<|START_RESPONSE|>b<|END_RESPONSE|>", ("a", "b")),
    ("cohere_command3", "<|START_THINKING|>a<|END_THINKING|><|START_ACTION|>[", ("a", "<|START_ACTION|>[")),
    ("cohere_command3",
     "<|START_THINKING|>A <co>b</co: 0:[1]><|END_THINKING|><|START_RESPONSE|>c <co>d</co: 0:[1,2],1:[3]>, <code></co",
     ("A b", "c d, <code></co")),
    ("cohere_command4", "<|START_TEXT|>b<|END_TEXT|>", ("", "b")),
    ("kimi_k2", "<think>a<|tool_calls_section_begin|>x", ("a", "<|tool_calls_section_begin|>x")),
    ("seed_oss", "<seed:think>a</seed:think>b", ("a", "b")),
    ("ernie45", "a\n</think>\n\n<response>\nb\n\nc\n</response>\n", ("a", "b\n\nc")),
    ("olmo3", "a</think>b", ("a", "b")),
    ("nemotron_v3", "<think></think>b", ("", "b")),
    ("deepseek_v4", "a</think>b", ("a", "b")),
    ("deepseek_v4", "a<｜DSML｜tool_calls>x", ("a", "<｜DSML｜tool_calls>x")),
    ("deepseek_v41", "<think>a<｜DSML｜ calls>x", ("a", "<｜DSML｜ calls>x")),
    ("gemma4", "<|channel>thought\na<channel|>b", ("a", "b")),
    ("gemma4", "<|channel>thinking<channel|>b", ("thinking", "b")),
    ("gemma4", "<channel|>b", ("", "b")),
    ("gemma4", "b", ("", "b")),
    ("granite_thinking_parser", "<think>a\n</think>\nb", ("a", "b")),
    ("hy_v3", "<think>a</think>b", ("a", "b")),
    ("hy_v3", "b", ("", "b")),
    ("hy_v4", "a</think>b", ("a", "b")),
    ("hy_v4", "a<tool_calls>x", ("a", "<tool_calls>x")),
    ("inkling", "<|content_thinking|>a<|end_message|><|message_model|><|content_text|>b<|end_message|>", ("a", "b")),
    ("inkling", "<|message_model|><|content_text|>b<|end_message|>c", ("", "bc")),
    ("k2_horizon", "a</ifm|think_fast>b", ("a", "b")),
    ("k2_horizon", "<ifm|think>a<ifm|tool_calls>x", ("a", "<ifm|tool_calls>x")),
    ("kimi_k3",
     "<|open|>think<|sep|>a<|close|>think<|sep|><|open|>response<|sep|>b<|close|>response<|sep|>"
     "<|close|>message<|sep|>", ("a", "b")),
    ("kimi_k3", "a<|close|>think<|sep|>b <|open|>x", ("a", "b <|open|>x")),
    ("kimi_k3", "<|open|>response<|sep|>b", ("", "b")),
    ("ling3", "a</think>b", ("a", "b")),
    ("mimo", "<think>a</think>b", ("a", "b")),
    ("minicpmv", "<think>a</think>b", ("a", "b")),
    ("minimax_m3", "<mm:think>a</mm:think>b", ("a", "b")),
    ("minimax_m3", "b", ("", "b")),
    ("muse", " to=self<|message|>a<|eom|><|start|>assistant to=user<|message|>b<|eot|>", ("a", "b")),
    ("muse", " to=user<|message|>b<|eot|>", ("", "b")),
    ("muse_glimmer", "to=self<|message|>a<|eom|>b", ("a", "b")),
    ("musespark1x", "<|message|>a<|eom|>b", ("a", "b")),
    ("plamo3", "a<|plamo:end_think:plamo|>b<|plamo:tag|>", ("a", "b")),
    ("poolside_v1", "<think>a</think>b", ("a", "b")),
    ("step5", "a</think>b", ("a", "b")),
    ("openai_gptoss", "<|channel|>analysis<|message|>a<|end|><|start|>assistantb", ("a", "b")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "expected"), RECORDED)
def test_each_parser_by_name(name: str, text: str, expected: tuple[str, str]) -> None:
    whole = ReasoningSplitter(tags_named(name), None).push(text, last=True)
    splitter = ReasoningSplitter(tags_named(name), None)
    parts = [*(splitter.push(char) for char in text), splitter.push("", last=True)]
    assert whole == ("".join(part[0] for part in parts), "".join(part[1] for part in parts)) == expected


def test_every_parser_has_a_recording() -> None:
    assert {name for name, *_ in RECORDED} == set(PARSERS)


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_no_text_is_read_otherwise_in_pieces(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(PARSERS)))
    tags = tags_named(name)
    marks = list(filter(None, (*tags.starts, *tags.ends, *tags.closers, *tags.wrapper, *tags.dropped)))
    bits = [*marks, *(mark[: len(mark) // 2] for mark in marks), "a", "\n", "<", ">"]
    text = "".join(data.draw(st.lists(st.sampled_from(bits), max_size=12)))
    whole = ReasoningSplitter(tags_named(name), None).push(text, last=True)
    splitter = ReasoningSplitter(tags_named(name), None)
    parts = [*(splitter.push(char) for char in text), splitter.push("", last=True)]
    assert ("".join(part[0] for part in parts), "".join(part[1] for part in parts)) == whole


def test_a_template_that_closes_the_block_leaves_content() -> None:
    splitter = ReasoningSplitter(tags_named("deepseek_r1"), "assistant\n<think>\n\n</think>\n\n")
    assert splitter.push("Yes.", last=True) == ("", "Yes.")


def test_reasoning_that_is_kept_is_counted_and_has_its_tags() -> None:
    tags = tags_named("minimax_m2_append_think")
    assert ReasoningSplitter(tags, "user<think>\n").push("a</think>b", last=True) == ("", "<think>a</think>b")
    assert ReasoningSplitter(tags, "user<think></think>").push("b", last=True) == ("", "b")
    assert ReasoningSplitter(tags, "x<think>a", "<think>a").push("</think>b", last=True) == ("", "</think>b")
    texts = ["a", "</think>", "b"]
    assert AnswerFormat(tags=tags, prompt=None).counter(texts.__getitem__).count(range(3)) == 2


def test_tags_of_ones_own_and_of_a_template() -> None:
    assert ReasoningSplitter(tags_named("<a>...</a>"), None).push("<a>x</a>y", last=True) == ("x", "y")
    assert detect_tags("... [THINK] ...") is PARSERS["mistral"]
    assert detect_tags("no such thing") is None


@pytest.mark.parametrize("name", [name for name, tags in PARSERS.items() if tags.switchable])
def test_reasoning_that_a_request_switches_off_is_content(name: str) -> None:
    tags = tags_named(name)
    start, end = tags.starts[0], tags.ends[0]
    off = tags.switched(False, "user")
    whole = f"{start}a{end}b"
    assert off is None or ReasoningSplitter(off, "user").push(whole, last=True) == ("", whole)
    on = tags.switched(True, "user")
    assert on is not None
    assert ReasoningSplitter(on, "user").push(f"{start}a{end}b", last=True) == ("a", "b")
    # A block that the prompt has opened is reasoning whatever the request says.
    opened = tags.switched(False, f"user{start}\n")
    assert opened is not None
    assert ReasoningSplitter(opened, f"user{start}\n").push(f"a{end}b", last=True) == ("a", "b")


def test_models_that_reason_on_request_do_so_without_a_start_tag() -> None:
    tags = tags_named("deepseek_v3")
    for thinking, expected in ((None, ("", "a</think>b")), (True, ("a", "b"))):
        switched = tags.switched(thinking, "user")
        assert switched is not None
        assert ReasoningSplitter(switched, "user").push("a</think>b", last=True) == expected


def test_marks_around_the_content_are_removed_without_reasoning_as_well() -> None:
    off = tags_named("kimi_k3").switched(False, "user")
    assert off is not None
    text = "<|open|>response<|sep|>a <|open|>think<|sep|><|close|>response<|sep|><|close|>message<|sep|>"
    for pieces in ([text], list(text)):
        splitter = ReasoningSplitter(off, "user", "continued")
        parts = [*(splitter.push(piece) for piece in pieces), splitter.push("", last=True)]
        assert "".join(part[1] for part in parts) == "a <|open|>think<|sep|>"
        assert splitter.in_content


@pytest.mark.parametrize("name", ["hy_v3", "hy_v4"])
def test_the_suffix_of_tags_is_that_of_the_template(name: str) -> None:
    template = "{{ '<think:6124c78e>' }} <tool_calls:6124c78e>"
    tags, tools = reasoning_tags(name, template), tool_format(name, template)
    assert tags is not None
    assert tools is not None
    assert (tags.starts, tags.ends) == (("<think:6124c78e>",), ("</think:6124c78e>",))
    text = "<think:6124c78e>a</think:6124c78e><tool_calls:6124c78e><tool_call:6124c78e>now"
    assert ReasoningSplitter(tags, None).push(text, last=True)[0] == "a"
    separator = "<tool_sep:6124c78e>" if name == "hy_v3" else ""
    call = f"<tool_call:6124c78e>now{separator}<arg_key:6124c78e>b</arg_key:6124c78e>"
    value = "<arg_value:6124c78e>1</arg_value:6124c78e></tool_call:6124c78e></tool_calls:6124c78e>"
    parsed = tools.parser({}).push(f"<tool_calls:6124c78e>{call}{value}", last=True)
    assert ([piece.name for piece in parsed.calls], parsed.calls[0].arguments) == (["now"], '{"b": 1}')
    plain = reasoning_tags(name, "no suffix")
    assert plain is not None
    assert plain.starts == ("<think>",)


@pytest.mark.parametrize("name", ["hf", "beam"])
def test_parsers_that_need_a_response_template_are_refused(name: str) -> None:
    for names, field in (((name, "auto"), "reasoning_parser"), (("auto", name), "tool_call_parser")):
        refused = check_parsers(*names)
        assert refused is not None
        assert refused[0] == field


@pytest.mark.parametrize(
    ("template", "text", "expected"),
    [
        ("<arg_key> </think>", "a</think>b", ("a", "b")),
        ("<|tool_calls_section_begin|> </think>", "a</think>b", ("a", "b")),
        ("</think>", "b", ("", "b")),
        ("</think> enable_thinking", "b", ("", "b")),
    ],
)
def test_a_template_says_whether_an_answer_begins_with_reasoning(
    template: str, text: str, expected: tuple[str, str]
) -> None:
    tags = detect_tags(template)
    assert tags is not None
    assert ReasoningSplitter(tags, "user").push(text, last=True) == expected
    assert detect_tags("<|tool_calls_section_begin|>") is None  # Kimi K2 Instruct does not reason


WRAPPED = st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", "<an", "swer>", "</", "a", "b c", "\n", " "])


@given(pieces=st.lists(WRAPPED, max_size=12), name=st.sampled_from(["hunyuan_a13b", "ernie45"]))
def test_pieces_and_the_whole_give_the_same_with_a_wrapper(pieces: list[str], name: str) -> None:
    tags = tags_named(name)
    pieces = [piece.replace("answer", tags.wrapper[0][1:-1]) for piece in pieces]
    splitter = ReasoningSplitter(tags, None)
    parts = [splitter.push(piece) for piece in pieces] + [splitter.push("", last=True)]
    whole = ReasoningSplitter(tags, None).push("".join(pieces), last=True)
    assert ("".join(part[0] for part in parts), "".join(part[1] for part in parts)) == whole


def test_many_marks_in_one_piece_are_read_in_linear_time() -> None:
    count = 200_000
    whole = ReasoningSplitter(tags_named("glm45"), None).push("a" + "</think>\n" * count + "b", last=True)
    assert whole == ("a", "b")
    mark = "<|close|>response<|sep|>"
    off = tags_named("kimi_k3").switched(False, None)
    assert off is not None
    assert ReasoningSplitter(off, None).push(f"a{mark}" * count, last=True) == ("", "a" * count)
