"""Calls in recorded answers: what is found in them, however they are cut, and that nothing makes a parser fail."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.parsing.tools.calls import join_calls
from quire.parsing.tools.registry import FORMATS, detect_format

SCHEMAS: dict[str, Any] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "tags": {"type": "array"},
            "codes": {"anyOf": [{"type": "object", "additionalProperties": {"type": "string"}}, {"type": "null"}]},
        },
        "required": ["city"],
    },
    "now": {"type": "object", "properties": {}},
}
WEATHER = ("get_weather", {"city": 'Rio "de" Janeiro', "days": 3})
NOW: tuple[str, dict[str, Any]] = ("now", {})

# format, answer, content, calls
RECORDED: list[tuple[str, str, str, list[tuple[str, dict[str, Any]]]]] = [
    (
        "hermes",
        'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rio \\"de\\" Janeiro", "days": 3}}\n'
        '</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        "Let me see.",
        [WEATHER, NOW],
    ),
    ("hermes", '<tool_call>{"arguments": {"days": 3}, "name": "get_weather"}</tool_call> ok', "ok",
     [("get_weather", {"days": 3})]),
    ("hermes", 'First.\n<tool_call>{"name": "now"}</tool_call>\n\nThen. <tool_call>{"name": "now"}</tool_call>End',
     "First.\nThen.\nEnd", [NOW, NOW]),
    ("hermes", '<tool_call>{"name": "now", "arguments": {}}}]\n</tool_call>\nDone', "Done", [NOW]),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", [NOW]),
    ("hermes", '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("now", {"a": 1})]),
    ("hermes", '<tool_call>{"name": "now", "arguments": null, "id": 5}</tool_call>', "", [NOW]),
    ("hermes", "a < b, <tool_box>, <tool_call>no</tool_call>", "a < b, <tool_box>, <tool_call>no</tool_call>", []),
    ("hermes", " plain text \n", " plain text \n", []),
    ("llama3_json", '{"name": "now", "parameters": {}}; {"name": "get_weather", "parameters": {"days": 3}}', "",
     [NOW, ("get_weather", {"days": 3})]),
    ("llama3_json", '<|python_tag|>{"name": "now", "parameters": {}}', "", [NOW]),
    ("llama3_json", '{"name": "Bob", "parameters": "x"} is JSON', '{"name": "Bob", "parameters": "x"} is JSON', []),
    ("llama3_json", '{"answer": 5}', '{"answer": 5}', []),
    ("llama3_json", 'It is: {"name": "now", "parameters": {}}; {"name": "now", "parameters": {}} {more?}',
     "It is:\n{more?}", [NOW, NOW]),
    ("llama3_json", 'f() { return {"name": "x"} } [{"name": "now", "arguments": {}}]', 'f() { return {"name": "x"} }',
     [NOW]),
    ("pythonic", '[get_weather(city="Rio \\"de\\" Janeiro", days=3), now()]', "", [WEATHER, NOW]),
    ("pythonic", "[1, 2] is a list", "[1, 2] is a list", []),
    ("pythonic", "[now(), 5] and", ", 5] and", [NOW]),
    ("pythonic", "[now(a=1])]", "[now(a=1])]", []),
    ("pythonic", "[now(a=b'x'), now()] ok", "[now(a=b'x')\nok", [NOW]),
    ("pythonic", "[now(a=1e999)] ok", "[now(a=1e999)] ok", []),
    ("pythonic", "[get_weather(tags=['a', (1, true)], city=')')]", "",
     [("get_weather", {"tags": ["a", [1, True]], "city": ")"})]),
    ("llama4_pythonic", "<|python_start|>[now()]<|python_end|>", "", [NOW]),
    ("llama4_pythonic", "Hi <|python_start|>[now()]<|python_end|> bye", "Hi\nbye", [NOW]),
    ("mistral", '[TOOL_CALLS][{"name": "now", "arguments": {}}, {"name": "get_weather", "arguments": {"days": 3}}]', "",
     [NOW, ("get_weather", {"days": 3})]),
    ("mistral", 'Hm. [TOOL_CALLS]now{}[TOOL_CALLS]get_weather[ARGS]{"days": 3}', "Hm.",
     [NOW, ("get_weather", {"days": 3})]),
    ("mistral", '[TOOL_CALLS] Hm [{"name": "now", "arguments": {}}]', "[TOOL_CALLS] Hm", [NOW]),
    ("mistral", '[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{"a": [1]}', "", [("now", {"a": [1]})]),
    (
        "qwen3_coder",
        "I look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nRio \"de\" Janeiro\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>"
        "\n</function>\n</tool_call>",
        "I look.",
        [WEATHER, NOW],
    ),
    ("qwen3_xml", "<function=get_weather>\n<parameter=city>\na\n\nb\n</parameter>\n</function>", "",
     [("get_weather", {"city": "a\n\nb"})]),
    ("qwen3_xml",
     "<function=get_weather><parameter=unknown>[1, 2]</parameter><parameter=other>x</parameter></function>", "",
     [("get_weather", {"unknown": [1, 2], "other": "x"})]),
    ("qwen3_coder",
     "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n<parameter=days>\n3\n<function=now></function>", "",
     [("get_weather", {"city": "Rome", "days": 3}), NOW]),
    ("qwen3_coder", "Hi<tool_call><function=get_weather\n<parameter=city>\nRome\n</parameter></function></tool_call>E",
     "Hi\nE", [("get_weather", {"city": "Rome"})]),
    ("qwen3_coder", "Hi<tool_call>a<function=no</function><function=now></function>", "Hi\na<function=no</function>",
     [NOW]),
    ("qwen3_coder", "<function=get_weather>\n<parameter=place>\n{'k': 'v', 'n': [None, True]}\n</parameter></function>",
     "", [("get_weather", {"place": {"k": "v", "n": [None, True]}})]),
    (
        "glm45",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Rio \"de\" Janeiro</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call><tool_call>now\n</tool_call>",
        "",
        [WEATHER, NOW],
    ),
    (
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="days">3</parameter>\n</invoke>\n'
        '<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        "",
        [("get_weather", {"days": 3}), NOW],
    ),
    ("minimax_m2", '<invoke name="get_weather"><parameter name="city">\n  a b\n</parameter></invoke>', "",
     [("get_weather", {"city": "\n  a b\n"})]),
    ("deepseek_v32",
     'I.<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">3'
     '</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
     '<｜DSML｜parameter name="other" string="true">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
     '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>', "I.",
     [("get_weather", {"city": "3", "days": 3, "other": "3"}), NOW]),
    ("seed_oss",
     "<seed:tool_call>\n<function=get_weather>\n<parameter=days>3</parameter>\n</function>\n</seed:tool_call>", "",
     [("get_weather", {"days": 3})]),
    ("step3",
     'I.<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="get_weather">\n'
     '<steptml:parameter name="city">Rio "de" Janeiro</steptml:parameter>\n<steptml:parameter name="days">3'
     "</steptml:parameter>\n</steptml:invoke><｜tool_call_end｜>\n<｜tool_call_begin｜>function<｜tool_sep｜>"
     '<steptml:invoke name="now">\n</steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>', "I.", [WEATHER, NOW]),
    ("step3", '<steptml:invoke name="now"></steptml:invoke> a < b', "a < b", [NOW]),
    (
        "deepseek_v3",
        "Sure.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{\"days\": 3}\n```"
        "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
        "Sure.",
        [("get_weather", {"days": 3}), NOW],
    ),
    ("deepseek_v31",
     "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "",
     [NOW]),
    (
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"days": 3}'
        "<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        "",
        [("get_weather", {"days": 3}), NOW],
    ),
    (
        "openai",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>One moment.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        '{"days": 3}<|call|>'
        "<|start|>assistant to=functions.now<|channel|>commentary<|message|>{}",
        "One moment.",
        [("get_weather", {"days": 3}), NOW],
    ),
    ("granite", '<|tool_call|>[{"name": "now", "arguments": {}}]', "", [NOW]),
    ("internlm", 'Ok<|action_start|><|plugin|>{"name": "get_weather", "parameters": {"days": 3}}<|action_end|>', "Ok",
     [("get_weather", {"days": 3})]),
    ("jamba", '<tool_calls>[\n{"name": "now", "arguments": {}},\n{"name": "now", "arguments": {}}\n]</tool_calls>', "",
     [NOW, NOW]),
    ("hunyuan_a13b", '<tool_calls>[{"name": "now", "arguments": {}}]</tool_calls>', "", [NOW]),
    ("xlam", '[{"name": "get_weather", "arguments": {"days": 3}}]', "", [("get_weather", {"days": 3})]),
    ("xlam", 'I.<tool_call>[{"name": "now", "arguments": {}}]</tool_call>More.', "I.\nMore.", [NOW]),
    ("xlam", '```json\n{"a": 1}\n```', '```json\n{"a": 1}\n```', []),
    ("xlam", 'So:\n```json\n[{"name": "now", "arguments": {}}]\n```', "So:", [NOW]),
    ("phi4mini", 'functools[{"name": "get_weather", "arguments": {"days": 3}}]', "", [("get_weather", {"days": 3})]),
    ("functiongemma",
     '<start_function_call>call:get_weather{city:<escape>Rio "de" Janeiro<escape>,days:3}<end_function_call>', "",
     [WEATHER]),
    ("functiongemma",
     "So:<start_function_call>call:get_weather{city:<escape>3<escape>days:<escape>3<escape>,tags:[<escape>a<escape>]}"
     "<end_function_call><start_function_call>call:now{}<end_function_call>", "So:",
     [("get_weather", {"city": "3", "days": 3, "tags": ["a"]}), NOW]),
    ("functiongemma",
     "<start_function_call>call:get_weather{days:3<start_function_call>call:now{}<end_function_call>", "",
     [("get_weather", {"days": 3}), NOW]),
    ("apertus", 'I.<|tools_prefix|>[{"get_weather": {"days": 3}}, {"now": {}}]<|tools_suffix|>', "I.",
     [("get_weather", {"days": 3}), NOW]),
    ("apertus", '<|tools_prefix|>[{"now": {}, "get_weather": {"tags": [{}]}}]', "",
     [NOW, ("get_weather", {"tags": [{}]})]),
    ("cohere_command3",
     '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"days": 3}},\n'
     '    {"tool_call_id": "1", "tool_name": "now", "parameters": {}}\n]<|END_ACTION|>', "",
     [("get_weather", {"days": 3}), NOW]),
    ("gigachat3", 'I.<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "now", "arguments": {}}</s>', "I.", [NOW]),
    ("gigachat3", 'I.<|function_call|>{"name": "get_weather", "arguments": {"days": 3}}', "I.",
     [("get_weather", {"days": 3})]),
    ("gigachat3", 'A function call.<|message_sep|>', "A function call.", []),
    ("longcat", '<longcat_tool_call>\n{"name": "now", "arguments": {}}\n</longcat_tool_call>', "", [NOW]),
    ("granite-20b-fc",
     '<function_call> {"name": "now", "arguments": {}}\n<function_call> {"name": "now", "arguments": {}}',
     "", [NOW, NOW]),
    ("minimax",
     'I.<tool_calls>\n{"name": "get_weather", "arguments": {"days": 3}}\n{"name": "now", "arguments": {}}\n'
     "</tool_calls>", "I.", [("get_weather", {"days": 3}), NOW]),
    ("minimax",
     '<think>No <tool_calls>{"name": "now"}</tool_calls></think>\n<tool_calls>\n{"name": "now", "arguments": {}}\n'
     '{no}\n{"name": "now", "arguments": {}}',
     '<think>No <tool_calls>{"name": "now"}</tool_calls></think>\n{no}', [NOW, NOW]),
    ("olmo3", "So:\n<function_calls>get_weather(city='Rio \"de\" Janeiro', days=3)\nnow()\n</function_calls>", "So:",
     [WEATHER, NOW]),
    ("olmo3", "<function_calls>bad(x=b'z')\nnow()</function_calls> End", "bad(x=b'z')\nEnd", [NOW]),
    ("olmo3", "<function_calls>now(x=1])</function_calls>", "now(x=1])", []),
    ("deepseek_v4",
     'I.<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">3'
     '</｜DSML｜parameter>\n<｜DSML｜parameter name="other">[1]</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
     '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>', "I.",
     [("get_weather", {"city": "3", "other": [1]}), NOW]),
    ("deepseek_v41",
     '<｜DSML｜ calls>\n<｜DSML｜ invoke name="get_weather">\n<｜DSML｜ parameter name="days" string="false">3'
     "</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls>", "", [("get_weather", {"days": 3})]),
    ("hy_v3",
     'I.<tool_calls>\n<tool_call>get_weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>'
     'Rio "de" Janeiro</arg_value>'
     "\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now<tool_sep>\n</tool_call>\n"
     "</tool_calls>", "I.", [WEATHER, NOW]),
    ("hy_v4",
     "<tool_calls><tool_call>get_weather<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>"
     "<tool_call>now</tool_call></tool_calls>", "", [("get_weather", {"days": 3}), NOW]),
    ("k2_horizon",
     "I.<ifm|tool_calls><ifm|tool_call>get_weather<ifm|arg_key>city</ifm|arg_key><ifm|arg_type>string</ifm|arg_type>"
     "<ifm|arg_value>5</ifm|arg_value></ifm|tool_call>\n<ifm|tool_call>now</ifm|tool_call></ifm|tool_calls>", "I.",
     [("get_weather", {"city": "5"}), NOW]),
    ("k2_horizon",
     '<ifm|tool_calls><ifm|tool_call>{"name": "get_weather", "arguments": {"days": 3}}</ifm|tool_call>\n'
     '<ifm|tool_call>{"name": "now", "arguments": {}}</ifm|tool_call></ifm|tool_calls>', "",
     [("get_weather", {"days": 3}), NOW]),
    ("dots",
     'I.<dots_function_call>\n<invoke name="get_weather">\n<parameter name="city">a\nb</parameter>\n</invoke>\n'
     '<invoke name="now">\n</invoke>\n</dots_function_call>', "I.", [("get_weather", {"city": "a\nb"}), NOW]),
    ("dots", '<dots_function_call>\n{"name": "now", "arguments": {}}\n</dots_function_call> ok', "ok", [NOW]),
    ("minicpm5",
     'I.\n<function name="get_weather"><param name="city"><![CDATA[a </param> <b>]]></param>'
     '<param name="days">3</param>'
     '</function>\n<function name="now"></function>',
     "I.", [("get_weather", {"city": "a </param> <b>", "days": 3}), NOW]),
    ("kimi_k3",
     'I.<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|><|open|>argument key="city" type="string"'
     '<|sep|>Rio "de" Janeiro<|close|>argument<|sep|><|open|>argument key="days" type="number"<|sep|>3'
     '<|close|>argument<|sep|><|close|>call<|sep|><|open|>call tool="now" index="2"<|sep|><|close|>call<|sep|>'
     "<|close|>tools<|sep|>", "I.", [WEATHER, NOW]),
    ("kimi_k3",
     '<|open|>call tool="now" index="1"<|sep|><|open|>argument key="a" type="string"<|sep|>1<|close|>argument<|sep|>'
     '<|open|>argument key="b" type="object"<|sep|>{"c": 1}<|close|>argument<|sep|><|close|>call<|sep|>', "",
     [("now", {"a": "1", "b": {"c": 1}})]),
    ("plamo3",
     "I.<|plamo:begin_tool_requests:plamo|><|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>get_weather"
     "<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>"
     '{"days": 3}<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>'
     "<|plamo:end_tool_requests:plamo|>", "I.", [("get_weather", {"days": 3})]),
    ("gemma4",
     'So:<|tool_call>call:get_weather{city:<|"|>Rio "de" Janeiro<|"|>,days:3}<tool_call|><|tool_call>call:now{}'
     "<tool_call|>", "So:", [WEATHER, NOW]),
    ("gemma4",
     '<|tool_call>:get_weather{tags:[<|"|>a<|"|>,{b:<|"|>c<|"|>,d:[1,true]}]}<tool_call|>', "",
     [("get_weather", {"tags": ["a", {"b": "c", "d": [1, True]}]})]),
    ("gemma4",
     '<|tool_call>call:get_weather{city:Rome, Italy at:http://x/y}<tool_call|>', '<|tool_call>call:get_weather'
     "{city:Rome, Italy at:http://x/y}<tool_call|>", []),
    ("gemma4",
     '<|tool_call>call:get_weather{city:New York,days:3,tags:[a,"b, c:d",1.5,True],at:http://x/y}<tool_call|>', "",
     [("get_weather", {"city": "New York", "days": 3, "tags": ["a", "b, c:d", 1.5, True], "at": "http://x/y"})]),
    ("gemma4", "<|tool_call>call:now{x:NaN,y:1e999}<tool_call|>", "", [("now", {"x": "NaN", "y": "1e999"})]),
    ("lfm2",
     "<|tool_call_start|>[get_weather(city='Rio\n\\'x\\' 007', days=007, tags={'a', 'b'})]<|tool_call_end|>", "",
     [("get_weather", {"city": "Rio\n'x' 007", "days": 7, "tags": ["a", "b"]})]),
    ("lfm2",
     "<|tool_call_start|>[get_weather(city='Rio \"de\" Janeiro', days=3), now()]<|tool_call_end|>Done.", "Done.",
     [WEATHER, NOW]),
    ("mimo",
     "<tool_call>\n<function=get_weather>\n<parameter=city> a\n</parameter>\n<parameter=days>"
     "3</parameter>\n</function>\n"
     "</tool_call>", "", [("get_weather", {"city": " a\n", "days": 3})]),
    ("minimax_m3",
     'I.]<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="get_weather">]<]minimax[>[<city>'
     'Rio "de" Janeiro]<]minimax[>['
     "</city>]<]minimax[>[<days>3]<]minimax[>[</days>\n]<]minimax[>[</invoke>\n]<]minimax[>[<invoke name='now'>"
     "]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>", "I.", [WEATHER, NOW]),
    ("minimax_m3",
     ']<]minimax[>[<invoke name="get_weather">]<]minimax[>[<tags>]<]minimax[>[<item>a]<]minimax[>[</item>]<]minimax[>['
     "<item>2]<]minimax[>[</item>]<]minimax[>[</tags>]<]minimax[>[<x>]<]minimax[>[<y>1]<]minimax[>[</y>]<]minimax[>["
     "<y>b]<]minimax[>[</y>]<]minimax[>[</x>]<]minimax[>[<cut>]<]minimax[>[</invoke>", "",
     [("get_weather", {"tags": ["a", 2], "x": {"y": [1, "b"]}})]),
    ("minimax_m3",
     ']<]minimax[>[<invoke name="get_weather">]<]minimax[>[<days>+003]<]minimax[>[</days>]<]minimax[>[<codes>'
     "]<]minimax[>[<city>018956]<]minimax[>[</city>]<]minimax[>[</codes>]<]minimax[>[</invoke>", "",
     [("get_weather", {"days": 3, "codes": {"city": "018956"}})]),
    ("inkling",
     "<|content_thinking|>hm<|end_message|><|message_model|><|content_text|>One moment.<|end_message|><|message_model|>"
     '<|content_invoke_tool_json|>{"name": "get_weather", "args": {"days": 3}}<|end_message|><|message_model|>now'
     '<|content_invoke_tool_json|>{"name": "now", "args": {}}<|end_message|>', "One moment.",
     [("get_weather", {"days": 3}), NOW]),
    ("inkling", "no marks", "no marks", []),
    ("inkling", "<|content_text|>a<|content_model_end_sampling|>", "a", []),
    ("muse",
     " to=self<|message|>hm <atem:invoke name=\"no\"><|eom|><|start|>"
     "assistant to=commentary<|message|>One moment.<|eom|>"
     '<|start|>assistant to=w.get_weather<|message|><atem:function_calls>\n<atem:invoke name="get_weather">\n'
     '<atem:parameter name="days">3</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eom|>'
     '<|start|>assistant to=now<|message|><atem:function_calls><atem:invoke name="now"></atem:invoke>'
     "</atem:function_calls><|eom|><|start|>assistant to=developer<|message|>x<|eom|>"
     "<|start|>assistant to=user<|message|>Done.<|eot|>", "One moment.\nDone.", [("get_weather", {"days": 3}), NOW]),
    ("muse", "no marks", "no marks", []),
]  # fmt: skip
# Other names of the same formats.
ALIASES = {
    "gemma": "functiongemma",
    "cohere_command4": "cohere_command3",
    "ernie45": "hermes",
    "granite4": "hermes",
    "glm47": "glm45",
    "ling3": "glm45",
    "poolside_v1": "glm45",
    "qwen3_json": "hermes",
    "step5": "qwen3_coder",
    "muse_glimmer": "muse",
    "musespark1x": "muse",
    "step3p5": "qwen3_coder",
    "llama4_json": "llama3_json",
    "phi4_mini_json": "phi4mini",
}
RECORDED += [
    (alias, text, content, calls)
    for alias, name in ALIASES.items()
    for recorded_name, text, content, calls in RECORDED
    if recorded_name == name
]


def read(name: str, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    parser = FORMATS[name].parser(SCHEMAS)
    parts = [parser.push(piece) for piece in pieces] + [parser.push("", last=True)]
    calls = join_calls(call for part in parts for call in part.calls)
    return "".join(part.content for part in parts), [(call.name or "", call.arguments) for call in calls]


def cut(text: str, rng: Random) -> list[str]:
    at = sorted(rng.randint(0, len(text)) for _ in range(rng.randint(0, 12)))
    return [text[begin:end] for begin, end in zip([0, *at], [*at, len(text)], strict=True)]


@pytest.mark.parametrize(("name", "text", "content", "calls"), RECORDED)
def test_what_is_found(name: str, text: str, content: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    actual_content, actual_calls = read(name, [text])
    assert actual_content == content
    assert [(function, json.loads(arguments)) for function, arguments in actual_calls] == calls


# format, the text of a first call that is broken, and that of a second one
BROKEN = [
    (name, before + arguments + between, after)
    for arguments in ('{"city": "Ro', '{"city": "Rome"', '{"city": ', '{"city": [{}')
    for name, before, between, after in (
        ("kimi_k2", "<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>", "<|tool_call_end|>",
         "<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"),
        ("deepseek_v31", "<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
         "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>"),
        ("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n", "\n```<｜tool▁call▁end｜>",
         "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>"),
        ("hermes", '<tool_call>{"name": "get_weather", "arguments": ', "</tool_call>",
         '<tool_call>{"name": "now", "arguments": {}}</tool_call>'),
        ("mistral", "[TOOL_CALLS]get_weather", "[TOOL_CALLS]", "now{}"),
    )
    if between != "[TOOL_CALLS]" or arguments != '{"city": "Ro'  # what ends the string cannot be known
]  # fmt: skip


@pytest.mark.parametrize(("name", "first", "second"), BROKEN)
def test_a_call_after_broken_json_is_found(name: str, first: str, second: str) -> None:
    for pieces in ([first + second], list(first + second)):
        content, calls = read(name, pieces)
        assert content == ""
        assert [function for function, _ in calls] == ["get_weather", "now"]
        assert calls[0][1] in first
        assert calls[1][1] == "{}"


def test_marks_in_strings_are_text() -> None:
    city = "a </tool_call> b <tool_call>"
    text = f'<tool_call>{{"name": "get_weather", "arguments": {{"city": "{city}"}}}}</tool_call>'
    ((_, arguments),) = read("hermes", [text])[1]
    assert json.loads(arguments) == {"city": city}


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("<|open|>tools<|sep|>", "kimi_k3"),
        ("]<]minimax[>[<tool_call> <tool_call>", "minimax_m3"),
        ("<|tool_call>call:x<tool_call|>", "gemma4"),
        ("<|tool_list_start|>", "lfm2"),
        ("<ifm|tool_call>", "k2_horizon"),
        ("<|plamo:begin_tool_request:plamo|>", "plamo3"),
        ("<|content_invoke_tool_json|>", "inkling"),
        ("<atem:function_calls>", "muse"),
        ("<dots_function_call> <invoke name=", "dots"),
        ("<tool_sep> <arg_key> <tool_call>", "hy_v3"),
        ("｜DSML｜ function_calls tool_calls", "deepseek_v32"),
        ("｜DSML｜ tool_calls", "deepseek_v4"),
        ("<｜DSML｜ calls> tool_calls", "deepseek_v41"),
        ("<|channel|> <|message|>", "openai"),
        ("<|tool_call|>", "granite"),
    ],
)
def test_templates_say_what_format_they_have(template: str, name: str) -> None:
    detected = detect_format(template)
    assert detected is not None
    assert detected.name == name


def test_every_format_has_a_recording() -> None:
    assert {name for name, *_ in RECORDED} == set(FORMATS)


@pytest.mark.parametrize(("name", "text", "content", "calls"), RECORDED)
def test_pieces_and_the_whole_give_the_same(name: str, text: str, content: str, calls: Any) -> None:
    whole = read(name, [text])
    assert read(name, list(text)) == whole
    rng = Random(1)
    for _ in range(30):
        assert read(name, cut(text, rng)) == whole


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_broken_answers_are_read_all_the_same(data: st.DataObject) -> None:
    name, text, *_ = data.draw(st.sampled_from(RECORDED))
    begin, end = sorted(data.draw(st.tuples(st.integers(0, len(text)), st.integers(0, len(text)))))
    other = data.draw(st.sampled_from(RECORDED))[1]
    broken = data.draw(st.sampled_from([text[:end], text[begin:], text[:begin] + text[end:], text[:begin] + other]))
    whole = read(name, [broken])
    assert read(name, list(broken)) == whole
    assert all(function for function, _ in whole[1])


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(FORMATS)), st.text("<>{}[]()\"'\\:,=| \nabfnowtool_cal/;`0", max_size=60))
def test_any_text_at_all(name: str, text: str) -> None:
    assert read(name, list(text)) == read(name, [text])


def texts(value: Any) -> list[str]:
    """All strings in a value, in its items and fields."""
    if isinstance(value, tuple):
        return [text for item in value for text in texts(item)]
    if is_dataclass(value):
        return texts(tuple(getattr(value, field.name) for field in fields(value)))
    return [value] if isinstance(value, str) and value else []


BITS = (
    '{"name": "now"',
    "{",
    "}",
    "[",
    "]",
    '"',
    "'",
    "\n",
    " ",
    "a",
    "now(",
    '"arguments": ',
    '{"city": 1}',
    ":",
    ",",
)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_marks_in_any_order(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(FORMATS)))
    marks = texts(FORMATS[name].syntax)
    parts = st.sampled_from([*marks, *(mark[:-1] for mark in marks), *BITS])
    text = "".join(data.draw(st.lists(parts, max_size=10)))
    assert read(name, list(text)) == read(name, [text])


def test_a_mark_may_begin_with_another_one() -> None:
    text = '[{"name": "now", "a```json'
    assert read("xlam", list(text)) == read("xlam", [text])


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_arguments_come_before_they_are_complete(name: str) -> None:
    """Long texts are not held back till the end: whoever reads a file being written sees it grow."""
    text = next(text for recorded_name, text, _, calls in RECORDED if recorded_name == name and calls)
    parser = FORMATS[name].parser(SCHEMAS)
    seen = [parser.push(char) for char in text]
    assert any(part.calls and part.calls[0].name for part in seen)


def test_harmony_holds_reasoning_and_answer() -> None:
    text = "<|channel|>analysis<|message|>hm, 5<|end|><|start|>assistant<|channel|>final<|message|>Five."
    for pieces in ([text], list(text)):
        parser = FORMATS["openai"].parser({})
        parts = [*(parser.push(piece) for piece in pieces), parser.push("", last=True)]
        assert "".join(part.reasoning for part in parts) == "hm, 5"
        assert "".join(part.content for part in parts) == "Five."
    assert FORMATS["openai"].parser({}).push("no channels", last=True).content == "no channels"


def test_each_call_has_an_id_of_its_own() -> None:
    parser = FORMATS["mistral"].parser(SCHEMAS)
    calls = join_calls(parser.push("[TOOL_CALLS]now{}[TOOL_CALLS]now{}", last=True).calls)
    assert len({call.id for call in calls}) == 2
    assert all(len(call.id or "") == 9 for call in calls)
    kimi = FORMATS["kimi_k2"].parser(SCHEMAS)
    text = "<|tool_call_begin|>functions.now:7<|tool_call_argument_begin|>{}<|tool_call_end|>"
    assert kimi.push(text, last=True).calls[0].id == "functions.now:7"
