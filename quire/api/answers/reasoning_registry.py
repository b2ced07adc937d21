"""The tags of reasoning, by vLLM's names of their parsers. New tags are registered here.

docs/api/structured-outputs-and-tools.md lists the names, too.
"""

from __future__ import annotations

from collections.abc import Mapping

from quire.api.answers.reasoning import ReasoningTags

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

PARSERS: Mapping[str, ReasoningTags] = {
    "apertus": ReasoningTags(("<|inner_prefix|>",), ("<|inner_suffix|>",)),
    "cohere_command3": ReasoningTags(*_COHERE, wrapper=("<|START_RESPONSE|>", "<|END_RESPONSE|>"), citations=True),
    "cohere_command4": ReasoningTags(*_COHERE, wrapper=("<|START_TEXT|>", "<|END_TEXT|>"), citations=True),
    "deepseek_r1": _IMPLICIT,
    "deepseek_v3": _ON_REQUEST,
    "ernie45": ReasoningTags(implicit_start=True, wrapper=("<response>", "</response>")),
    "glm45": _SWITCHED_CALL,
    "glm47": _SWITCHED_CALL,
    "glm4_moe": _SWITCHED_CALL,
    "granite": ReasoningTags(
        starts=("Here is my thought process:", "Here's my thought process:"),
        ends=("Here is my response:", "Here's my response:"),
    ),
    "holo2": _SWITCHED,
    "hunyuan_a13b": ReasoningTags(wrapper=("<answer>", "</answer>")),
    "kimi_k2": ReasoningTags(implicit_start=True, switchable=True, closers=("<|tool_calls_section_begin|>",)),
    "minimax_m2": _IMPLICIT,
    "minimax_m2_append_think": ReasoningTags(implicit_start=True, kept=True),
    "mistral": ReasoningTags(("[THINK]",), ("[/THINK]",)),
    "nemotron_v3": _HYBRID,
    "olmo3": _IMPLICIT,
    # The tags as grammars need them; answers are parsed by the tool parser of this name.
    "openai_gptoss": ReasoningTags(("<|channel|>analysis<|message|>",), ("<|end|><|start|>assistant",)),
    "qwen3": _HYBRID,
    "seed_oss": ReasoningTags(("<seed:think>",), ("</seed:think>",), switchable=True, closers=("<seed:tool_call>",)),
    "step3": _IMPLICIT,
    "step3p5": _IMPLICIT,
}

# The first ones all of whose texts are in a chat template are used for it.
_DETECTED: tuple[tuple[tuple[str, ...], ReasoningTags], ...] = (
    (("<|channel|>",), PARSERS["openai_gptoss"]),
    (("<seed:think>",), PARSERS["seed_oss"]),
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
