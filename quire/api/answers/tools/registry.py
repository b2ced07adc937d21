"""The forms that models write their calls in, by the names that vLLM gave them, and which model writes which."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from quire.api.answers.grammar_writer import GrammarWriter
from quire.api.answers.tools.calls import Schemas, Steps, ToolParser, random_id, short_id
from quire.api.answers.tools.harmony_form import HarmonyForm
from quire.api.answers.tools.json_form import JsonForm
from quire.api.answers.tools.marked_form import MarkedForm, kimi_name, last_part
from quire.api.answers.tools.python_form import BraceForm, PythonForm
from quire.api.answers.tools.tagged_form import TaggedForm


class Form(Protocol):
    """A way of writing calls."""

    def parse(self, out: ToolParser) -> Steps:
        """Reads an answer and reports what is in it."""


@runtime_checkable
class Writable(Protocol):
    """A form that an answer can be held to."""

    def grammar(self, writer: GrammarWriter, schemas: Schemas, *, several: bool) -> str:
        """An expression for one or more calls."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A form with its name and the ids that its calls get.

    Attributes:
        whole: every answer has the form, whether it calls or not, and its reasoning stands in it.
        answer: what the model writes before an answer that is no call.
    """

    name: str
    form: Form
    make_id: Callable[[int, str], str] = random_id
    whole: bool = False
    answer: str = ""

    def parser(self, schemas: Schemas) -> ToolParser:
        """Reads one answer, in which these functions may be called."""
        return ToolParser(self.form.parse, schemas, self.make_id)

    @property
    def held(self) -> ToolFormat:
        """The format that an answer is held to which has to be a call: this one, or a JSON list if it cannot."""
        return self if isinstance(self.form, Writable) else ToolFormat(self.name, _LIST, self.make_id)

    def grammar(self, writer: GrammarWriter, schemas: Schemas, *, several: bool) -> str:
        """An expression for one or more calls; of `held` formats only."""
        assert isinstance(self.form, Writable)
        return self.form.grammar(writer, schemas, several=several)


_LIST = JsonForm(bare=True, as_list=True)
_QWEN = TaggedForm(
    wrapper=("<tool_call>", "</tool_call>"),
    function=("<function=", ">", "</function>"),
    parameter=("<parameter=", ">", "</parameter>"),
)
_GLM = TaggedForm(
    function=("<tool_call>", "", "</tool_call>"),
    parameter=("<arg_key>", "</arg_key>", "</arg_value>"),
    value="<arg_value>",
    padded=False,
)
_MINIMAX = TaggedForm(
    wrapper=("<minimax:tool_call>", "</minimax:tool_call>"),
    function=('<invoke name="', '">', "</invoke>"),
    parameter=('<parameter name="', '">', "</parameter>"),
    padded=False,
)
_SEED = TaggedForm(
    wrapper=("<seed:tool_call>", "</seed:tool_call>"),
    function=("<function=", ">", "</function>"),
    parameter=("<parameter=", ">", "</parameter>"),
    padded=False,
)
_DEEPSEEK_SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK_V3 = MarkedForm(
    section=_DEEPSEEK_SECTION,
    begin="<｜tool▁call▁begin｜>",
    header_end="\n```json\n",
    end="<｜tool▁call▁end｜>",
    name=last_part("<｜tool▁sep｜>"),
    header=("function<｜tool▁sep｜>", ""),
    fence="\n```",
)
_DEEPSEEK_V31 = MarkedForm(
    section=_DEEPSEEK_SECTION,
    begin="<｜tool▁call▁begin｜>",
    header_end="<｜tool▁sep｜>",
    end="<｜tool▁call▁end｜>",
)
_KIMI = MarkedForm(
    section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    begin="<|tool_call_begin|>",
    header_end="<|tool_call_argument_begin|>",
    end="<|tool_call_end|>",
    name=kimi_name,
    header=("functions.", ":0"),
)


@dataclass(frozen=True, slots=True)
class MistralForm:
    """[TOOL_CALLS] and a list, or since version 11 [TOOL_CALLS]NAME[ARGS]{...} or [TOOL_CALLS]NAME{...} for each."""

    begin: str = "[TOOL_CALLS]"
    before_arguments: tuple[str, ...] = ("[CALL_ID]", "[ARGS]")

    def parse(self, out: ToolParser) -> Steps:
        """Read an answer."""
        scan, mark = out.scanner, self.begin
        listed = JsonForm(begins=(mark,))
        while (yield from scan.until((mark,), out.say)) is not None:
            scan.note()
            if (yield from scan.blanks()) and scan.held[0] in "[{":
                yield from listed.calls(out, mark=mark)
                continue
            name = (yield from scan.word("[{")).strip()
            while scan.held[:1] == "[":
                yield from scan.word("]")
                yield from scan.accept("]")
                yield from scan.word("[{")
            if not name or not scan.held:
                out.say(mark + scan.noted)
                continue
            out.begin(name)
            yield from scan.json(out.argue)

    def grammar(self, writer: GrammarWriter, schemas: Schemas, *, several: bool) -> str:
        """An expression for one or more calls of these functions."""
        return JsonForm(begins=(self.begin,), as_list=True).grammar(writer, schemas, several=several)


HARMONY = ToolFormat("openai", HarmonyForm(), whole=True, answer="<|channel|>final<|message|>")
FORMATS: Mapping[str, ToolFormat] = {
    one.name: one
    for one in (
        ToolFormat("hermes", JsonForm(begins=("<tool_call>",), end="</tool_call>")),
        ToolFormat(
            "llama3_json", JsonForm(begins=("<|python_tag|>",), bare=True, separator=";", arguments="parameters")
        ),
        ToolFormat("llama4_pythonic", PythonForm(begins=("<|python_start|>",), ends=("<|python_end|>",))),
        ToolFormat("pythonic", PythonForm()),
        ToolFormat("mistral", MistralForm(), short_id),
        ToolFormat("qwen3_coder", _QWEN),
        ToolFormat("qwen3_xml", _QWEN),
        ToolFormat("deepseek_v3", _DEEPSEEK_V3),
        ToolFormat("deepseek_v31", _DEEPSEEK_V31),
        ToolFormat("glm45", _GLM),
        ToolFormat("kimi_k2", _KIMI),
        ToolFormat("granite", JsonForm(begins=("<|tool_call|>", "<tool_call>"), as_list=True)),
        ToolFormat(
            "internlm",
            JsonForm(begins=("<|action_start|><|plugin|>",), end="<|action_end|>", arguments="parameters"),
        ),
        ToolFormat("jamba", JsonForm(begins=("<tool_calls>",), end="</tool_calls>", as_list=True)),
        ToolFormat("hunyuan_a13b", JsonForm(begins=("<tool_calls>",), end="</tool_calls>", as_list=True)),
        ToolFormat("xlam", JsonForm(begins=("[TOOL_CALLS]", "<tool_call>", "```json"), end="```", bare=True)),
        ToolFormat("phi4mini", JsonForm(begins=("functools",), as_list=True)),
        ToolFormat("minimax_m2", _MINIMAX),
        ToolFormat("seed_oss", _SEED),
        HARMONY,
        ToolFormat("gemma", BraceForm(begin="<start_function_call>", end="<end_function_call>", quote="<escape>")),
    )
}

# What a chat template has to contain, of which the first that does decides.
_SIGNS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|channel|>", "<|message|>"), "openai"),
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<seed:tool_call>",), "seed_oss"),
    (("<start_function_call>",), "gemma"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("<｜tool▁calls▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁calls▁begin｜>",), "deepseek_v31"),
    (("<|action_start|>", "<|plugin|>"), "internlm"),
    (("<|python_start|>",), "llama4_pythonic"),
    (("<arg_key>",), "glm45"),
    (("<tool_call>", "<function="), "qwen3_coder"),
    (("<|tool_call|>",), "granite"),
    (("<tool_calls>",), "jamba"),
    (("<tool_call>",), "hermes"),
    (("[TOOL_CALLS]",), "mistral"),
    (("functools",), "phi4mini"),
    (("<|tool|>", "<|/tool|>"), "phi4mini"),
    (("<|python_tag|>",), "llama3_json"),
    (('"parameters": dictionary of argument name',), "llama3_json"),
)


def format_of(template: str) -> ToolFormat | None:
    """The format that a chat template teaches, as far as one can tell."""
    return next((FORMATS[name] for signs, name in _SIGNS if all(sign in template for sign in signs)), None)
