"""The tags of reasoning, by vLLM's names of their parsers. New tags are registered here.

docs/api/structured-outputs-and-tools.md lists the names, too.
"""

from __future__ import annotations

from collections.abc import Mapping

from quire.parsing.reasoning import ReasoningTags

_CALL = ("<tool_call>",)
# Hybrid models write the tags themselves, or their templates do: an answer without them is content.
_THINK = ReasoningTags()
_HYBRID = ReasoningTags(switchable=True, closers=_CALL)
_IMPLICIT = ReasoningTags(implicit_start=True)
# Models that reason unless a request switches it off. Of those with calls, a call ends the reasoning as well.
_SWITCHED = ReasoningTags(implicit_start=True, switchable=True)
_SWITCHED_CALL = ReasoningTags(implicit_start=True, switchable=True, closers=_CALL)
# Models that reason only if a request switches it on.
_ON_REQUEST = ReasoningTags(switchable=True, on_request=True)
_COHERE = (("<|START_THINKING|>",), ("<|END_THINKING|>",))

# As for gpt-oss; without the tool parser of this name, the headers of messages are removed.
_MUSE = ReasoningTags(
    (" to=self<|message|>", "to=self<|message|>", "<|message|>"),
    ("<|eom|><|start|>assistant", "<|eom|>"),
    dropped=(
        *(f"<|start|>assistant to={name}<|message|>" for name in ("user", "commentary")),
        *(f" to={name}<|message|>" for name in ("user", "commentary")),
        *(f"to={name}<|message|>" for name in ("user", "commentary")),
        *("<|eom|>", "<|eot|>"),
    ),
)

PARSERS: Mapping[str, ReasoningTags] = {
    "apertus": ReasoningTags(("<|inner_prefix|>",), ("<|inner_suffix|>",)),
    "cohere_command3": ReasoningTags(*_COHERE, wrapper=("<|START_RESPONSE|>", "<|END_RESPONSE|>"), citations=True),
    "cohere_command4": ReasoningTags(*_COHERE, wrapper=("<|START_TEXT|>", "<|END_TEXT|>"), citations=True),
    "deepseek_r1": _IMPLICIT,
    "deepseek_v3": _ON_REQUEST,
    "deepseek_v4": ReasoningTags(implicit_start=True, switchable=True, closers=("<｜DSML｜tool_calls>",)),
    "deepseek_v41": ReasoningTags(implicit_start=True, switchable=True, closers=("<｜DSML｜ calls>",)),
    "ernie45": ReasoningTags(implicit_start=True, wrapper=("<response>", "</response>")),
    "gemma4": ReasoningTags(
        ("<|channel>thought", "<|channel>"), ("<channel|>",), switchable=True, closers=("<|tool_call>",)
    ),
    "glm45": _SWITCHED_CALL,
    "glm47": _SWITCHED_CALL,
    "glm4_moe": _SWITCHED_CALL,
    "granite": ReasoningTags(
        starts=("Here is my thought process:", "Here's my thought process:"),
        ends=("Here is my response:", "Here's my response:"),
    ),
    "granite_thinking_parser": _HYBRID,
    "holo2": _SWITCHED,
    "hunyuan_a13b": ReasoningTags(wrapper=("<answer>", "</answer>")),
    # The tags of one checkpoint may have a suffix, which its template shows; see `parsers.py`.
    "hy_v3": ReasoningTags(switchable=True, on_request=True, closers=("<tool_calls>",)),
    "hy_v4": ReasoningTags(implicit_start=True, switchable=True, closers=("<tool_calls>",)),
    # As for gpt-oss; without the tool parser of this name, the marks of messages are removed.
    "inkling": ReasoningTags(
        ("<|content_thinking|>", "<|message_model|><|content_thinking|>"),
        ("<|end_message|><|message_model|>", "<|end_message|>", "<|content_model_end_sampling|>"),
        dropped=("<|message_model|>", "<|content_text|>", "<|end_message|>", "<|content_model_end_sampling|>"),
    ),
    # One pair of tags for each effort.
    "k2_horizon": ReasoningTags(
        ("<ifm|think>", "<ifm|think_fast>", "<ifm|think_faster>"),
        ("</ifm|think>", "</ifm|think_fast>", "</ifm|think_faster>"),
        implicit_start=True,
        closers=("<ifm|tool_calls>",),
    ),
    "kimi_k2": ReasoningTags(implicit_start=True, switchable=True, closers=("<|tool_calls_section_begin|>",)),
    "kimi_k3": ReasoningTags(
        ("<|open|>think<|sep|>",),
        ("<|close|>think<|sep|>",),
        implicit_start=True,
        switchable=True,
        closers=("<|open|>response<|sep|>", "<|open|>tools<|sep|>"),
        dropped=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
    ),
    "ling3": _SWITCHED_CALL,
    "mimo": _HYBRID,
    "minicpmv": _HYBRID,
    "minimax_m2": _IMPLICIT,
    "minimax_m2_append_think": ReasoningTags(implicit_start=True, in_content=True),
    "minimax_m3": ReasoningTags(
        ("<mm:think>",), ("</mm:think>",), switchable=True, closers=("]<]minimax[>[<tool_call>",)
    ),
    "mistral": ReasoningTags(("[THINK]",), ("[/THINK]",)),
    "muse": _MUSE,
    "muse_glimmer": _MUSE,
    "musespark1x": _MUSE,
    "nemotron_v3": _HYBRID,
    "olmo3": _IMPLICIT,
    # The tags as grammars need them; answers are parsed by the tool parser of this name.
    "openai_gptoss": ReasoningTags(("<|channel|>analysis<|message|>",), ("<|end|><|start|>assistant",)),
    "plamo3": ReasoningTags(
        ("<|plamo:begin_think:plamo|>",),
        ("<|plamo:end_think:plamo|>",),
        implicit_start=True,
        switchable=True,
        closers=("<|plamo:begin_tool_requests:plamo|>",),
        dropped=("<|plamo:tag|>",),
    ),
    "poolside_v1": _ON_REQUEST,
    "qwen3": _HYBRID,
    "seed_oss": ReasoningTags(("<seed:think>",), ("</seed:think>",), switchable=True, closers=("<seed:tool_call>",)),
    "step3": _IMPLICIT,
    "step3p5": _IMPLICIT,
    "step5": _IMPLICIT,
}

# The first ones all of whose texts are in a chat template are used for it.
_DETECTED: tuple[tuple[tuple[str, ...], ReasoningTags], ...] = (
    (("<|channel|>",), PARSERS["openai_gptoss"]),
    (("<seed:think>",), PARSERS["seed_oss"]),
    (("<|open|>", "<|sep|>"), PARSERS["kimi_k3"]),
    (("<|content_thinking|>",), PARSERS["inkling"]),
    (("<|message|>", "to=self"), PARSERS["muse"]),
    (("<|channel>",), PARSERS["gemma4"]),
    (("<mm:think>",), PARSERS["minimax_m3"]),
    (("<ifm|think>",), PARSERS["k2_horizon"]),
    (("<|plamo:begin_think",), PARSERS["plamo3"]),
    (("[THINK]",), PARSERS["mistral"]),
    (("Here is my thought process",), PARSERS["granite"]),
    (("<|tool_calls_section_begin|>", "</think>"), PARSERS["kimi_k2"]),
    (("</response>",), PARSERS["ernie45"]),
    (("<|START_RESPONSE|>",), PARSERS["cohere_command3"]),
    (("<|START_TEXT|>",), PARSERS["cohere_command4"]),
    (("<|inner_prefix|>",), PARSERS["apertus"]),
    (("</answer>",), PARSERS["hunyuan_a13b"]),
    (("<arg_key>", "</think>"), PARSERS["glm45"]),
    (("</think>", "enable_thinking"), ReasoningTags(switchable=True)),
    (("</think>",), _THINK),
)


def detect_tags(template: str) -> ReasoningTags | None:
    """The tags that a chat template contains; None if it contains none that are known."""
    return next((tags for marks, tags in _DETECTED if all(mark in template for mark in marks)), None)


def tags_named(text: str) -> ReasoningTags:
    """The tags of the parser with this name, or those of START...END.

    Raises:
        ValueError: it is neither.
    """
    if text in PARSERS:
        return PARSERS[text]
    start, dots, end = text.partition("...")
    if not (start and dots and end):
        raise ValueError(f"unknown reasoning parser {text!r}; known: {', '.join(PARSERS)} or START...END")
    return ReasoningTags(starts=(start,), ends=(end,))
