"""Requests of applications that talk to model servers, as recorded from them, with shorter prompts and fewer tools.

The shapes are those of Claude Code 2.1.332, Codex 0.171.0 and LiteLLM 1.110.2, which were recorded, and of Open WebUI,
which were read in its source. Limits of output tokens are smaller, as the bundled model's context is.
"""

from __future__ import annotations

import json
from typing import Any

WEATHER = "How is the weather in Oslo?"
RESULT = '{"temperature": 21, "condition": "sunny"}'
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
EXTRACT = "Extract the person as JSON: Anna is 33 years old."
_CACHED = {"cache_control": {"type": "ephemeral"}}

CLAUDE_CODE_HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27,"
    "mid-conversation-tool-changes-2026-07-01,thinking-token-count-2026-05-13,advanced-tool-use-2025-11-20,"
    "effort-2025-11-24",
    "anthropic-dangerous-direct-browser-access": "true",
    "x-app": "cli",
}


def claude_code(messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """A turn of Claude Code."""
    return {
        "model": "quire-nano",
        "messages": messages,
        "system": [
            {"type": "text", "text": "x-billing-header: cc_version=2.1; cc_entrypoint=cli;"},
            {"type": "text", "text": "You are a helpful assistant.", **_CACHED},
        ],
        "tools": [
            {"name": "get_weather", "description": "Get the weather of a city.", "input_schema": CITY},
            {
                "name": "Bash",
                "description": "Run a command.",
                "input_schema": {
                    "$schema": "https://json-schema.org/draft/2020-12/schema",
                    "type": "object",
                    "properties": {"command": {"type": "string"}, "timeout": {"type": "number"}},
                    "required": ["command"],
                    "additionalProperties": False,
                },
            },
            {
                "name": "DeferredToolPlaceholder",
                "description": "Stands for tools that a search finds.",
                "input_schema": {"type": "object", "properties": {}},
                "defer_loading": True,
            },
        ],
        "metadata": {"user_id": json.dumps({"device_id": "d", "account_uuid": "", "session_id": "s"})},
        "max_tokens": 300,
        "thinking": {"type": "adaptive", "display": "omitted"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
        **fields,
    }


CLAUDE_CODE_FIRST = [
    {"role": "user", "content": [{"type": "text", "text": WEATHER}]},
    {"role": "system", "content": [{"type": "text", "text": "# Environment\nPlatform: linux", **_CACHED}]},
]


def claude_code_second(call: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages after a call has been made."""
    result = {"tool_use_id": call["id"], "type": "tool_result", "content": RESULT, "is_error": False, **_CACHED}
    return [
        CLAUDE_CODE_FIRST[0],
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]


CLAUDE_CODE_WEB_SEARCH = {
    "model": "quire-nano",
    "messages": [{"role": "user", "content": "Perform a web search for the query: Quire"}],
    "system": [{"type": "text", "text": "You perform a web search."}],
    "tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
    "max_tokens": 300,
    "stream": True,
}


def codex(items: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """A turn of Codex."""
    return {
        "model": "quire-nano",
        "input": [
            {
                "type": "message",
                "id": "msg_1",
                "role": "developer",
                "content": [{"type": "input_text", "text": "You are a helpful assistant."}],
            },
            {
                "type": "message",
                "id": "msg_2",
                "role": "user",
                "content": [{"type": "input_text", "text": WEATHER}],
            },
            *items,
        ],
        "tools": [
            {
                "type": "function",
                "name": "get_weather",
                "description": "Get the weather of a city.",
                "strict": False,
                "parameters": CITY,
            },
            {
                "type": "namespace",
                "name": "multi_agent_v1",
                "description": "Tools for sub-agents.",
                "tools": [{"type": "function", "name": "close_agent", "strict": False, "parameters": CITY}],
            },
            {"type": "web_search", "external_web_access": False},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "client_metadata": {"session_id": "s", "x-codex-turn-metadata": "{}"},
        **fields,
    }


def open_webui(messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """A turn of Open WebUI whose model calls tools natively."""
    function = {"name": "get_weather", "description": "Get the weather of a city.", "parameters": CITY}
    return {
        "stream": True,
        "model": "quire-nano",
        "messages": messages,
        "stream_options": {"include_usage": True},
        "tools": [{"type": "function", "function": function}],
        **fields,
    }


OPEN_WEBUI_TITLE = {
    "model": "quire-nano",
    "messages": [{"role": "user", "content": "What is 27 + 58?"}],
    "stream": False,
    "max_completion_tokens": 1000,
}

LITELLM_CHAT = {
    "model": "quire-nano",
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "You are a helpful assistant.", **_CACHED}]},
        {"role": "user", "content": [{"type": "text", "text": EXTRACT}]},
    ],
    "max_tokens": 300,
    "stream": True,
    "stream_options": {"include_usage": True},
    "response_format": {
        "type": "json_schema",
        "json_schema": {"schema": PERSON, "name": "Person", "strict": True},
    },
}

LITELLM_RESPONSES = {  # from a request of the Messages API
    "model": "quire-nano",
    "input": [
        {
            "type": "message",
            "role": "developer",
            "content": [{"type": "input_text", "text": "You are a helpful assistant."}],
        },
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": WEATHER}]},
    ],
    "include": ["reasoning.encrypted_content"],
    "max_output_tokens": 300,
    "reasoning": {"effort": "high"},
    "tools": [
        {
            "type": "function",
            "name": "get_weather",
            "strict": False,
            "description": "Get the weather of a city.",
            "parameters": CITY,
        }
    ],
    "user": "x",
}
