"""The formats of tool calls, by vLLM's names of their parsers. A new format is registered here.

docs/api/structured-outputs-and-tools.md lists the names, too. A new syntax is a dataclass whose markers are string
fields, because `parsers.parser_tokens` reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from quire.parsing.grammar_writer import GrammarWriter
from quire.parsing.tools.calls import Schemas, Steps, ToolParser, random_id, short_id
from quire.parsing.tools.delimited_syntax import DelimitedSyntax, kimi_name, name_after
from quire.parsing.tools.element_syntax import ElementSyntax
from quire.parsing.tools.harmony_syntax import HarmonySyntax
from quire.parsing.tools.json_syntax import JsonSyntax
from quire.parsing.tools.message_syntax import InklingSyntax, MuseSyntax
from quire.parsing.tools.python_syntax import BraceSyntax, PythonSyntax
from quire.parsing.tools.tagged_syntax import TaggedSyntax


class CallSyntax(Protocol):
    """The syntax of tool calls in answers."""

    def parse(self, out: ToolParser) -> Steps:
        """Parse an answer and report its text and calls to `out`."""


@runtime_checkable
class HasGrammar(Protocol):
    """A syntax that can be written as a grammar, so that answers can be constrained to it."""

    def grammar(self, writer: GrammarWriter, schemas: Schemas, *, parallel: bool) -> str:
        """A grammar expression for one call, or for several if `parallel`."""


@dataclass(frozen=True, slots=True)
class ReadOnlySyntax:
    """A syntax of which no grammar is made: calls that are required are written as a JSON list."""

    syntax: TaggedSyntax

    def parse(self, out: ToolParser) -> Steps:
        """Parse an answer."""
        return self.syntax.parse(out)


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A registered format.

    Attributes:
        name: value of `--tool-call-parser`.
        markers: groups of texts; a chat template that contains all texts of one group belongs to this format.
        make_id: makes the id of a call from its index and name.
        full_answer: the syntax describes all answers, reasoning included, and not only calls.
        answer: text that the model writes before an answer that is not a call.
    """

    name: str
    syntax: CallSyntax
    markers: tuple[tuple[str, ...], ...] = ()
    make_id: Callable[[int, str], str] = random_id
    full_answer: bool = False
    answer: str = ""

    def parser(self, schemas: Schemas) -> ToolParser:
        """A parser of one answer, in which functions with these schemas may be called."""
        return ToolParser(self.syntax.parse, schemas, self.make_id)

    @property
    def constrained(self) -> ToolFormat:
        """The format for answers that must be a call: this one, or a JSON list if its syntax has no grammar."""
        return self if isinstance(self.syntax, HasGrammar) else ToolFormat(self.name, _JSON_LIST, make_id=self.make_id)

    def is_in(self, template: str) -> bool:
        """Return whether a chat template describes this format."""
        return any(all(marker in template for marker in group) for group in self.markers)

    def grammar(self, writer: GrammarWriter, schemas: Schemas, *, parallel: bool) -> str:
        """A grammar expression for calls of these functions; only of `constrained` formats."""
        assert isinstance(self.syntax, HasGrammar)
        return self.syntax.grammar(writer, schemas, parallel=parallel)


_JSON_LIST = JsonSyntax(bare=True, as_list=True)
_QWEN = TaggedSyntax(
    wrapper=("<tool_call>", "</tool_call>"),
    function=("<function=", ">", "</function>"),
    parameter=("<parameter=", ">", "</parameter>"),
)
_GLM = TaggedSyntax(
    function=("<tool_call>", "", "</tool_call>"),
    parameter=("<arg_key>", "</arg_key>", "</arg_value>"),
    value="<arg_value>",
    padded=False,
)
_MINIMAX = TaggedSyntax(
    wrapper=("<minimax:tool_call>", "</minimax:tool_call>"),
    function=('<invoke name="', '">', "</invoke>"),
    parameter=('<parameter name="', '">', "</parameter>"),
    padded=False,
)
_SEED = TaggedSyntax(
    wrapper=("<seed:tool_call>", "</seed:tool_call>"),
    function=("<function=", ">", "</function>"),
    parameter=("<parameter=", ">", "</parameter>"),
    padded=False,
)
_STEP3 = TaggedSyntax(
    wrapper=("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
    around=("<｜tool_call_begin｜>function<｜tool_sep｜>", "<｜tool_call_end｜>"),
    function=('<steptml:invoke name="', '">', "</steptml:invoke>"),
    parameter=('<steptml:parameter name="', '">', "</steptml:parameter>"),
    padded=False,
)
_DEEPSEEK_V32 = TaggedSyntax(
    wrapper=("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
    function=('<｜DSML｜invoke name="', '">', "</｜DSML｜invoke>"),
    parameter=('<｜DSML｜parameter name="', '">', "</｜DSML｜parameter>"),
    padded=False,
    typed=True,
)
_DEEPSEEK_V4 = replace(_DEEPSEEK_V32, wrapper=("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"))
_DEEPSEEK_V41 = TaggedSyntax(
    wrapper=("<｜DSML｜ calls>", "</｜DSML｜ calls>"),
    function=('<｜DSML｜ invoke name="', '">', "</｜DSML｜ invoke>"),
    parameter=('<｜DSML｜ parameter name="', '">', "</｜DSML｜ parameter>"),
    padded=False,
    typed=True,
)
_HY_V3 = TaggedSyntax(
    wrapper=("<tool_calls>", "</tool_calls>"),
    function=("<tool_call>", "<tool_sep>", "</tool_call>"),
    parameter=("<arg_key>", "</arg_key>", "</arg_value>"),
    value="<arg_value>",
    padded=False,
)
_K2_HORIZON = TaggedSyntax(
    wrapper=("<ifm|tool_calls>", "</ifm|tool_calls>"),
    function=("<ifm|tool_call>", "", "</ifm|tool_call>"),
    parameter=("<ifm|arg_key>", "</ifm|arg_key>", "</ifm|arg_value>"),
    value="<ifm|arg_value>",
    padded=False,
    json_after="<ifm|tool_call>",
)
_DOTS = TaggedSyntax(
    wrapper=("<dots_function_call>", "</dots_function_call>"),
    function=('<invoke name="', '">', "</invoke>"),
    parameter=('<parameter name="', '">', "</parameter>"),
    padded=False,
    json_after="<dots_function_call>",
)
_MINICPM5 = TaggedSyntax(
    function=('<function name="', '">', "</function>"),
    parameter=('<param name="', '">', "</param>"),
    padded=False,
    cdata=("<![CDATA[", "]]>"),
)
_KIMI_K3 = TaggedSyntax(
    wrapper=("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
    function=('<|open|>call tool="', "<|sep|>", "<|close|>call<|sep|>"),
    parameter=('<|open|>argument key="', "<|sep|>", "<|close|>argument<|sep|>"),
    padded=False,
)
_MUSE = MuseSyntax(
    calls=TaggedSyntax(
        wrapper=("<atem:function_calls>", "</atem:function_calls>"),
        function=('<atem:invoke name="', '">', "</atem:invoke>"),
        parameter=('<atem:parameter name="', '">', "</atem:parameter>"),
        padded=False,
    )
)
_DEEPSEEK_SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK_V3 = DelimitedSyntax(
    section=_DEEPSEEK_SECTION,
    begin="<｜tool▁call▁begin｜>",
    header_end="\n```json\n",
    end="<｜tool▁call▁end｜>",
    name=name_after("<｜tool▁sep｜>"),
    header=("function<｜tool▁sep｜>", ""),
    fence="\n```",
)
_DEEPSEEK_V31 = DelimitedSyntax(
    section=_DEEPSEEK_SECTION,
    begin="<｜tool▁call▁begin｜>",
    header_end="<｜tool▁sep｜>",
    end="<｜tool▁call▁end｜>",
)
_PLAMO3 = DelimitedSyntax(
    section=("<|plamo:begin_tool_requests:plamo|>", "<|plamo:end_tool_requests:plamo|>"),
    begin="<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>",
    header_end=(
        "<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>"
    ),
    end="<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>",
)
_KIMI = DelimitedSyntax(
    section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    begin="<|tool_call_begin|>",
    header_end="<|tool_call_argument_begin|>",
    end="<|tool_call_end|>",
    name=kimi_name,
    header=("functions.", ":0"),
)


@dataclass(frozen=True, slots=True)
class MistralSyntax:
    """[TOOL_CALLS] and a JSON list; since version 11, [TOOL_CALLS]NAME[ARGS]{...} or [TOOL_CALLS]NAME{...} per call."""

    begin: str = "[TOOL_CALLS]"
    before_arguments: tuple[str, ...] = ("[CALL_ID]", "[ARGS]")  # special tokens that must be kept in the text

    def parse(self, out: ToolParser) -> Steps:
        """Read an answer."""
        scan, mark = out.scanner, self.begin
        scan.stop_json_at((mark,))
        listed = JsonSyntax(begins=(mark,))
        while (yield from scan.read_until((mark,), out.add_text)) is not None:
            scan.mark()
            if (yield from scan.skip_whitespace()) and scan.next_character in "[{":
                yield from listed.calls(out, mark=mark)
                continue
            name = (yield from scan.read_word("[{")).strip()
            while (yield from scan.next_is(self.before_arguments)):
                yield from scan.read_word("]")
                yield from scan.accept("]")
                yield from scan.read_word("[{")
            if scan.next_character == "[":  # there is other text before the list
                out.add_text(mark + scan.since_mark)
                scan.mark()
                yield from listed.calls(out)
                continue
            if not name or not scan.next_character:
                out.add_text(mark + scan.since_mark)
                continue
            out.begin_call(name)
            yield from scan.read_json(out.add_arguments)

    def grammar(self, writer: GrammarWriter, schemas: Schemas, *, parallel: bool) -> str:
        """An expression for one or more calls of these functions."""
        return JsonSyntax(begins=(self.begin,), as_list=True).grammar(writer, schemas, parallel=parallel)


_HERMES = JsonSyntax(begins=("<tool_call>",), end="</tool_call>")
_JAMBA = JsonSyntax(begins=("<tool_calls>",), end="</tool_calls>", as_list=True)
_INTERNLM = JsonSyntax(begins=("<|action_start|><|plugin|>",), end="<|action_end|>", arguments="parameters")
_LLAMA3 = JsonSyntax(begins=("<|python_tag|>",), bare=True, separator=";", arguments="parameters")
_PHI4 = JsonSyntax(begins=("functools",), as_list=True)
_OLMO = PythonSyntax(begins=("<function_calls>",), ends=("</function_calls>",), listed=False)
_GEMMA = BraceSyntax(begin="<start_function_call>", end="<end_function_call>", quote="<escape>")
_GEMMA4 = BraceSyntax(begin="<|tool_call>", end="<tool_call|>", quote='<|"|>')
_LFM2 = PythonSyntax(begins=("<|tool_call_start|>",), ends=("<|tool_call_end|>",))
_LONGCAT = JsonSyntax(begins=("<longcat_tool_call>",), end="</longcat_tool_call>")
_GRANITE_20B = JsonSyntax(begins=("<function_call>",))
_MINIMAX_M1 = JsonSyntax(begins=("<tool_calls>",), end="</tool_calls>", lines=True, skipped=("<think>", "</think>"))
# The first one of version 3.1, the others of version 3, where each call is a separate message.
_GIGACHAT = JsonSyntax(
    begins=("<|function_call|>", "<|message_sep|>\n\nfunction call<|role_sep|>\n", "function call<|role_sep|>"),
    dropped=("<|message_sep|>", "</s>"),
)
_APERTUS = JsonSyntax(begins=("<|tools_prefix|>",), end="<|tools_suffix|>", as_list=True, name="")
_COHERE = JsonSyntax(
    begins=("<|START_ACTION|>",),
    end="<|END_ACTION|>",
    as_list=True,
    name="tool_name",
    arguments="parameters",
    call_id="tool_call_id",
)
_XLAM = JsonSyntax(
    others=(("[TOOL_CALLS]", ""), ("<tool_call>", "</tool_call>"), ("```json", "```"), ("```", "```")),
    bare=True,
    as_list=True,
)
HARMONY = ToolFormat(
    "openai",
    HarmonySyntax(),
    markers=(("<|channel|>", "<|message|>"),),
    full_answer=True,
    answer="<|channel|>final<|message|>",
)

# All formats. The first one with markers in a chat template is used for it.
FORMATS: Mapping[str, ToolFormat] = {
    known.name: known
    for known in (
        HARMONY,
        ToolFormat(
            "inkling",
            InklingSyntax(),
            (("<|content_invoke_tool_json|>",),),
            full_answer=True,
            answer="<|content_text|>",
        ),
        ToolFormat("muse", _MUSE, (("<atem:function_calls>",),), full_answer=True, answer=" to=user<|message|>"),
        ToolFormat("kimi_k3", ReadOnlySyntax(_KIMI_K3), (("<|open|>", "<|sep|>"),)),
        ToolFormat("minimax_m3", ElementSyntax(mark="]<]minimax[>["), (("]<]minimax[>[",),)),
        ToolFormat("gemma4", _GEMMA4, (("<|tool_call>", "<tool_call|>"),)),
        ToolFormat("lfm2", _LFM2, (("<|tool_call_start|>",), ("<|tool_list_start|>",))),
        ToolFormat("k2_horizon", _K2_HORIZON, (("<ifm|tool_call>",),)),
        ToolFormat("plamo3", _PLAMO3, (("<|plamo:begin_tool_request",),)),
        ToolFormat("dots", _DOTS, (("<dots_function_call>",),)),
        ToolFormat("minicpm5", _MINICPM5, (('<function name="', '<param name="'),)),
        ToolFormat("hy_v3", _HY_V3, (("<tool_sep",),)),
        ToolFormat("minimax_m2", _MINIMAX, (("<minimax:tool_call>",),)),
        ToolFormat("seed_oss", _SEED, (("<seed:tool_call>",),)),
        ToolFormat("step3", _STEP3, (("<steptml:invoke",), ("<｜tool_calls_begin｜>", "<｜tool_sep｜>"))),
        ToolFormat("functiongemma", _GEMMA, (("<start_function_call>",),)),
        ToolFormat("cohere_command3", _COHERE, (("<|START_ACTION|>",),)),
        ToolFormat("apertus", _APERTUS, (("<|tools_prefix|>",),)),
        ToolFormat("gigachat3", _GIGACHAT, (("<|function_call|>", "<|message_sep|>"), ("function call<|role_sep|>",))),
        ToolFormat("longcat", _LONGCAT, (("<longcat_tool_call>",),)),
        ToolFormat("olmo3", _OLMO, (("<functions>", "<function_calls>"),)),
        ToolFormat("kimi_k2", _KIMI, (("<|tool_calls_section_begin|>",),)),
        ToolFormat("deepseek_v32", _DEEPSEEK_V32, (("<｜DSML｜function_calls>",), ("｜DSML｜", "function_calls"))),
        ToolFormat("deepseek_v41", _DEEPSEEK_V41, (("<｜DSML｜ calls>",),)),
        ToolFormat("deepseek_v4", _DEEPSEEK_V4, (("<｜DSML｜tool_calls>",), ("｜DSML｜", "tool_calls"))),
        ToolFormat("deepseek_v3", _DEEPSEEK_V3, (("<｜tool▁calls▁begin｜>", "```json"),)),
        ToolFormat("deepseek_v31", _DEEPSEEK_V31, (("<｜tool▁calls▁begin｜>",),)),
        ToolFormat("internlm", _INTERNLM, (("<|action_start|>", "<|plugin|>"),)),
        ToolFormat(
            "llama4_pythonic",
            PythonSyntax(begins=("<|python_start|>",), ends=("<|python_end|>",)),
            (("<|python_start|>",),),
        ),
        ToolFormat("glm45", _GLM, (("<arg_key>",),)),
        ToolFormat("qwen3_coder", _QWEN, (("<tool_call>", "<function="),)),
        ToolFormat(
            "granite",
            JsonSyntax(begins=("<|tool_call|>",), others=(("<tool_call>", "</tool_call>"),), as_list=True),
            (("<|tool_call|>",),),
        ),
        ToolFormat("minimax", _MINIMAX_M1, (("<tool_calls>", "<beginning_of_sentence>"),)),
        ToolFormat("jamba", _JAMBA, (("<tool_calls>",),)),
        ToolFormat("hermes", _HERMES, (("<tool_call>",),)),
        ToolFormat("mistral", MistralSyntax(), (("[TOOL_CALLS]",),), short_id),
        ToolFormat("phi4mini", _PHI4, (("functools",), ("<|tool|>", "<|/tool|>"))),
        ToolFormat("llama3_json", _LLAMA3, (("<|python_tag|>",), ('"parameters": dictionary of argument name',))),
        # The other names of formats, and formats that templates do not show.
        ToolFormat("gemma", _GEMMA),
        ToolFormat("cohere_command4", _COHERE),
        ToolFormat("ernie45", _HERMES),
        ToolFormat("granite4", _HERMES),
        ToolFormat("granite-20b-fc", _GRANITE_20B),
        ToolFormat("glm47", _GLM),
        ToolFormat("ling3", _GLM),
        ToolFormat("poolside_v1", _GLM),
        ToolFormat("hy_v4", replace(_HY_V3, function=("<tool_call>", "", "</tool_call>"))),
        ToolFormat("mimo", replace(_QWEN, padded=False)),
        ToolFormat("muse_glimmer", _MUSE, full_answer=True, answer=" to=user<|message|>"),
        ToolFormat("musespark1x", _MUSE, full_answer=True, answer=" to=user<|message|>"),
        ToolFormat("qwen3_json", _HERMES),
        ToolFormat("step5", _QWEN),
        ToolFormat("step3p5", _QWEN),
        ToolFormat("llama4_json", _LLAMA3),
        ToolFormat("phi4_mini_json", _PHI4),
        ToolFormat("pythonic", PythonSyntax()),
        ToolFormat("qwen3_xml", _QWEN),
        ToolFormat("hunyuan_a13b", _JAMBA),
        ToolFormat("xlam", _XLAM),
    )
}


def detect_format(template: str) -> ToolFormat | None:
    """The format that a chat template describes; None if it is not known."""
    return next((known for known in FORMATS.values() if known.is_in(template)), None)
