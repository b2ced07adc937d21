"""Bodies with long lists, long texts in fields, and parameters at their limits."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.hostile.body import (
    CHAT,
    COMPLETIONS,
    DETOKENIZE,
    GENERATE,
    MEGABYTE,
    MESSAGES,
    RENDER_COMPLETION,
    RESPONSES,
    VOCABULARY,
    Hostile,
    Json,
    chat,
    completion,
    function,
    message,
    response,
    token_ids,
)

_PARAGRAPH = "The quick brown fox jumps over the lazy dog. "


def bodies() -> list[Hostile]:
    """All bodies of this kind."""
    return [*_token_lists(), *_limits(), *_many_tools(), *_many_messages(), *_many_items(), *_fields(), *_echoes()]


def _token_lists() -> list[Hostile]:
    return [
        Hostile(
            "a million stop tokens",
            COMPLETIONS,
            lambda: completion(stop_token_ids=token_ids(MEGABYTE), max_tokens=64, ignore_eos=True),
        ),
        Hostile(
            "a million allowed tokens, n=64",
            COMPLETIONS,
            lambda: completion(allowed_token_ids=token_ids(MEGABYTE), n=64),
        ),
        Hostile(
            "a million stop tokens, 1,024 prompts",
            COMPLETIONS,
            lambda: completion(["x"] * 1024, stop_token_ids=token_ids(MEGABYTE)),
        ),
        Hostile("a million tokens as prompt", GENERATE, lambda: _generate(token_ids(MEGABYTE))),
        Hostile("five million tokens as text", DETOKENIZE, lambda: {"tokens": token_ids(5 * MEGABYTE)}),
        Hostile("500,000 prompts of one token", COMPLETIONS, lambda: completion([[1]] * 500_000)),
        Hostile("1,024 prompts to render", RENDER_COMPLETION, lambda: completion([_PARAGRAPH * 40] * 1024)),
        Hostile(
            "1,024 prompts, a million stop tokens, render",
            RENDER_COMPLETION,
            lambda: completion(["x"] * 1024, stop_token_ids=token_ids(MEGABYTE)),
        ),
    ]


def _generate(tokens: list[int], **params: Any) -> Json:
    return {"token_ids": tokens, "sampling_params": {"max_tokens": 32, **params}}


def _limits() -> list[Hostile]:
    long = token_ids(1900)
    biases = {str(token): -1.0 for token in range(1024)}
    everything: Json = {"presence_penalty": 1, "frequency_penalty": 1, "repetition_penalty": 1.1, "min_p": 0.01}
    return [
        Hostile("n=64, ordinary", COMPLETIONS, lambda: completion(n=64, max_tokens=64, ignore_eos=True), control=True),
        Hostile("one chat, ordinary", CHAT, lambda: chat(max_tokens=64, ignore_eos=True), control=True),
        Hostile("prompt_logprobs of 500 prompts", COMPLETIONS, lambda: completion([long] * 500, prompt_logprobs=20)),
        Hostile("1,024 biases, n=64", COMPLETIONS, lambda: completion(n=64, logit_bias=biases)),
        Hostile(
            "a bias for every token, n=64",
            COMPLETIONS,
            lambda: completion(n=64, logit_bias={str(token): 1.0 for token in range(VOCABULARY)}),
        ),
        Hostile("128 stop strings", COMPLETIONS, lambda: completion(stop=[f"stop {n}" for n in range(128)])),
        Hostile(
            "16 stop strings of 100,000 letters",
            COMPLETIONS,
            lambda: completion(stop=[f"{n}" + "a" * 100_000 for n in range(16)], ignore_eos=True),
        ),
        Hostile(
            "prompt_logprobs=20 of 1,900 tokens, n=16", COMPLETIONS, lambda: completion(long, prompt_logprobs=20, n=16)
        ),
        Hostile(
            "echo with 20 logprobs, n=64",
            COMPLETIONS,
            lambda: completion(long, echo=True, logprobs=20, n=64, max_tokens=1),
        ),
        Hostile("20 logprobs, n=64", CHAT, lambda: chat(n=64, logprobs=True, top_logprobs=20, max_tokens=64)),
        Hostile(
            "20 logprobs, n=64, streamed",
            CHAT,
            lambda: chat(
                n=64,
                logprobs=True,
                top_logprobs=20,
                max_tokens=64,
                stream=True,
                return_token_ids=True,
                stream_options={"include_usage": True, "continuous_usage_stats": True},
            ),
        ),
        Hostile(
            "128 bad words and all penalties, n=64",
            COMPLETIONS,
            lambda: completion(n=64, bad_words=[f"{n} " + "bad " * 60 for n in range(128)], **everything),
        ),
        Hostile("n=64 for 1,024 prompts", COMPLETIONS, lambda: completion(["x"] * 1024, n=64)),
        Hostile("n of 19 digits", COMPLETIONS, lambda: completion(n=10**18)),
        Hostile("best_of", COMPLETIONS, lambda: completion(best_of=1_000_000)),
        Hostile("8 prompts, n=64", COMPLETIONS, lambda: completion([long] * 8, n=64, max_tokens=8)),
    ]


def _many_tools() -> list[Hostile]:
    def tools(count: int) -> list[Json]:
        return [function(f"function{number}") for number in range(count)]

    optional = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(20_000)}, "required": ["p"]}
    both = {**optional, "required": [f"q{n}" for n in range(20_000)]}
    allowed = [{"type": "function", "function": {"name": f"function{number}"}} for number in range(20_000)]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": allowed}}
    flat = [{"type": "function", "name": f"function{number}", "parameters": {}} for number in range(40_000)]
    plain = [{"name": f"function{number}", "input_schema": {"type": "object"}} for number in range(40_000)]
    return [
        Hostile("20,000 tools", CHAT, lambda: chat(tools=tools(20_000))),
        Hostile("40,000 tools of one name", CHAT, lambda: chat(tools=[function("same")] * 40_000)),
        Hostile("40,000 tools, Responses", RESPONSES, lambda: response(tools=flat)),
        Hostile("40,000 tools, Anthropic", MESSAGES, lambda: message(tools=plain)),
        Hostile("20,000 tools, all allowed", CHAT, lambda: chat(tools=tools(20_000), tool_choice=choice)),
        Hostile("a tool with 20,000 optional properties", CHAT, lambda: chat(tools=[function("f", optional)])),
        Hostile("properties times required", CHAT, lambda: chat(tools=[function("f", both)])),
    ]


def _many_messages() -> list[Hostile]:
    def messages(count: int, **fields: Any) -> Json:
        return {"messages": [{"role": "user", "content": "", **fields}] * count, "max_tokens": 8}

    parts = [{"type": "text", "text": ""}] * 200_000
    images = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}] * 100_000
    results = [{"type": "tool_result", "tool_use_id": f"id{number}", "content": "x"} for number in range(100_000)]
    calls = [{"id": f"c{n}", "type": "function", "function": {"name": "f", "arguments": "{}"}} for n in range(50_000)]
    return [
        Hostile("100,000 empty messages", CHAT, lambda: messages(100_000)),
        Hostile("300,000 messages", CHAT, lambda: messages(300_000, content="hi")),
        Hostile("100,000 system messages", CHAT, lambda: messages(100_000, role="system")),
        Hostile("100,000 tool messages", CHAT, lambda: messages(100_000, role="tool", tool_call_id="x")),
        Hostile("200,000 parts of a message", CHAT, lambda: chat(parts)),
        Hostile("100,000 images", CHAT, lambda: chat(images)),
        Hostile("100,000 results of tools, Anthropic", MESSAGES, lambda: message(results)),
        Hostile("200,000 system blocks, Anthropic", MESSAGES, lambda: message(system=parts)),
        Hostile("50,000 calls in a message", CHAT, lambda: {"messages": [{"role": "assistant", "tool_calls": calls}]}),
        Hostile(
            "reasoning tags repeated 100,000 times",
            CHAT,
            lambda: {"messages": [{"role": "assistant", "content": "<think></think>" * 100_000}], "max_tokens": 8},
        ),
    ]


def _many_items() -> list[Hostile]:
    def items(count: int, **item: Any) -> Json:
        return response([{"role": "user", "content": "", **item}] * count)

    outputs = [{"type": "function_call_output", "call_id": f"c{n}", "output": "x"} for n in range(100_000)]
    calls = [{"type": "function_call", "call_id": f"c{n}", "name": "f", "arguments": "{}"} for n in range(100_000)]
    pairs = [item for pair in zip(calls, outputs, strict=True) for item in pair]
    return [
        Hostile("100,000 items", RESPONSES, lambda: items(100_000)),
        Hostile("200,000 system items", RESPONSES, lambda: items(200_000, role="system", content="x")),
        Hostile("100,000 calls and outputs", RESPONSES, lambda: response(pairs)),
        Hostile("100,000 outputs without calls", RESPONSES, lambda: response(outputs)),
        Hostile(
            "a chain of responses with 1 MB of reasoning each",
            RESPONSES,
            lambda: _link(None),
            follow=lambda answer: _link(json.loads(answer).get("id")),
        ),
        Hostile("300,000 metadata entries", RESPONSES, lambda: response(metadata=_numbered(300_000))),
        Hostile("responses in the background", RESPONSES, lambda: response(store=True, background=True)),
        Hostile(
            "8 MB of instructions, stored",
            RESPONSES,
            lambda: response(store=True, instructions=_PARAGRAPH * 180_000, truncation="auto"),
        ),
    ]


def _link(previous: str | None) -> Json:
    """A stored response whose reasoning item the chat template leaves out."""
    reasoning = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "x" * MEGABYTE}]}
    items = [reasoning, {"role": "user", "content": "hi"}]
    return {"input": items, "max_output_tokens": 4, "previous_response_id": previous}


def _numbered(count: int) -> dict[str, str]:
    return {f"field{number}": "x" for number in range(count)}


def _fields() -> list[Hostile]:
    slow: Json = {"max_tokens": 512, "ignore_eos": True}
    return [
        Hostile("300,000 unknown fields", CHAT, lambda: chat(**_numbered(300_000))),
        Hostile("30 MB in an unknown field", COMPLETIONS, lambda: completion(unknown=["x" * 10] * 2_000_000, **slow)),
        Hostile("30 MB of small objects", COMPLETIONS, lambda: completion(unknown=[{}] * 7_000_000, **slow)),
        Hostile("30 MB in metadata", CHAT, lambda: chat(metadata={"x": "y" * 30 * MEGABYTE}, **slow)),
        Hostile("300,000 biases of the wrong type", CHAT, lambda: chat(logit_bias=_numbered(300_000))),
        Hostile("300,000 template variables", CHAT, lambda: chat(chat_template_kwargs=_numbered(300_000))),
        Hostile("100,000 documents", CHAT, lambda: chat(documents=[{"text": "x"}] * 100_000)),
        Hostile("100,000 stop strings", CHAT, lambda: chat(stop=["x"] * 100_000)),
        Hostile("100,000 bad words", COMPLETIONS, lambda: completion(bad_words=["bad"] * 100_000)),
        Hostile("40 MB", CHAT, lambda: chat("x" * 40 * MEGABYTE)),
    ]


def _echoes() -> list[Hostile]:
    """Bodies whose error text might quote 10 MB."""
    long = "x" * 10 * MEGABYTE
    return [
        Hostile("quoted: model", CHAT, lambda: chat(model=long)),
        Hostile("quoted: role", CHAT, lambda: {"messages": [{"role": long, "content": "x"}]}),
        Hostile("quoted: format type", CHAT, lambda: chat(response_format={"type": long})),
        Hostile(
            "quoted: tool choice", CHAT, lambda: chat(tool_choice={"function": {"name": long}}, tools=[function("f")])
        ),
        Hostile("quoted: key of logit_bias", CHAT, lambda: chat(logit_bias={long: 1.0})),
        Hostile("quoted: name of a field", CHAT, lambda: chat(messages=[{"role": "user", "content": {long: 1}}])),
        Hostile("quoted: bad word", COMPLETIONS, lambda: completion(bad_words=[long])),
        Hostile("quoted: item type", RESPONSES, lambda: response([{"type": long}])),
        Hostile("quoted: previous response", RESPONSES, lambda: response(previous_response_id=long)),
        Hostile("quoted: tool type", RESPONSES, lambda: response(tools=[{"type": long}])),
        Hostile("quoted: request id", CHAT, lambda: chat(request_id=long)),
    ]
