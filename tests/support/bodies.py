"""Valid bodies of every POST route, which together have every field."""

from __future__ import annotations

from typing import Any

Body = dict[str, Any]
SCHEMA: Body = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0}, "b": {"enum": ["x", "y"]}, "c": {"$ref": "#/$defs/d"}},
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"d": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{1,3}$"}, "maxItems": 3}},
}
_PARAMETERS: Body = {
    "type": "object",
    "properties": {
        "a": {"type": "integer"},
        "b": {"enum": ["x", "y"]},
        "c": {"anyOf": [{"type": "null"}, {"const": 1}]},
    },
    "required": ["a"],
}
_FUNCTION: Body = {"name": "weather", "description": "Tells.", "parameters": _PARAMETERS, "strict": True}
_TOOL: Body = {"type": "function", "function": _FUNCTION}
_CUSTOM: Body = {
    "type": "custom",
    "custom": {
        "name": "calculate",
        "format": {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[0-9+]+"}},
    },
}
_CALL: Body = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"a": 1}'}}
_SAMPLING: Body = {
    "model": "fake",
    "stream": False,
    "seed": 1,
    "stop": ["zz", "zzz"],
    "temperature": 0.5,
    "top_p": 0.9,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "logit_bias": {"5": 1.5},
    "top_k": 5,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "stop_token_ids": [7],
    "include_stop_str_in_output": True,
    "ignore_eos": False,
    "min_tokens": 0,
    "skip_special_tokens": True,
    "allowed_token_ids": [1, 2, 3, 5, 7],
    "bad_words": ["zq"],
    "priority": 0,
    "cache_salt": "salt",
    "vllm_xargs": {"a": 1, "b": ["c", 0.5]},
    "timeout": 30.0,
}
_GENERATION: Body = {
    **_SAMPLING,
    "n": 2,
    "stream_options": None,
    "truncate_prompt_tokens": 100,
    "truncation_side": "right",
    "prompt_logprobs": 1,
    "logprob_token_ids": [1, 5],
    "request_id": "request",
    "return_tokens_as_token_ids": True,
    "return_token_ids": True,
    "return_metrics": True,
}
_TRANSFER: Body = {
    "do_remote_decode": False,
    "do_remote_prefill": False,
    "remote_engine_id": "a",
    "remote_request_id": "b",
    "remote_host": "127.0.0.1",
    "remote_port": 14579,
    "remote_num_tokens": 5,
    "remote_block_ids": [1, 2],
    "remote_blocks_expiry_time": 1.5,
    "remote_registration_generation": 0,
    "transfer_mode": "read",
    "tp_size": 1,
    "dcp_size": 1,
    "pp_size": 1,
}
_STREAMED: Body = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
_TAG: Body = {"begin": "<a>", "schema": SCHEMA, "end": "</a>"}
_STRUCTURES: tuple[Body, ...] = (
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
    {"response_format": {"type": "structural_tag", "structures": [_TAG], "triggers": ["<a"]}},
    {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True, "disable_additional_properties": True}},
    {"structured_outputs": {"grammar": 'root ::= "a" other\nother ::= [a-z]+'}},
    {"structured_outputs": {"choice": ["yes", "no"]}},
    {"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"},
    {"guided_regex": "(a|b){1,3}c?"},
    {"guided_choice": ["yes", "no"]},
    {"guided_grammar": 'start: "a" rest\nrest: /[b-d]+/'},
    {"structural_tag": '{"format": {"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "</a>"}}'},
)
_MESSAGES: list[Body] = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": [{"type": "text", "text": "Weather?"}], "name": "me"},
    {"role": "assistant", "content": None, "tool_calls": [_CALL], "reasoning": "Hm.", "reasoning_content": None},
    {"role": "tool", "content": "Sunny.", "tool_call_id": "c1"},
]
_BLOCKS: list[Body] = [
    {"role": "user", "content": [{"type": "text", "text": "Weather?", "cache_control": {"type": "ephemeral"}}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "s"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "tool_use", "id": "t1", "name": "weather", "input": {"a": 1}},
        ],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "Sunny.", "is_error": False}]},
]
_ITEMS: list[Body] = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
    {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"a": 1}'},
    {"type": "function_call_output", "call_id": "c1", "output": "Sunny."},
    {"type": "custom_tool_call", "call_id": "c2", "name": "calculate", "input": "1+1"},
    {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "2"}]},
]
_RESPONSE_TOOLS: list[Body] = [
    {"type": "function", **_FUNCTION},
    {
        "type": "custom",
        "name": "calculate",
        "format": {"type": "grammar", "syntax": "regex", "definition": "[0-9]+"},
    },
]
_CONVERSATION: Body = {
    "model": "fake",
    "messages": _BLOCKS,
    "system": [{"type": "text", "text": "Be short."}],
    "tools": [{"name": "weather", "description": "Tells.", "input_schema": _PARAMETERS, "strict": True}],
    "tool_choice": {"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "chat_template_kwargs": {"a": 1},
}

_COMPLETIONS: list[Body] = [
    {
        **_GENERATION, "prompt": ["Once", "Twice"], "echo": True, "logprobs": 2, "max_tokens": 4, "suffix": None,
        "kv_transfer_params": _TRANSFER,
        "add_special_tokens": False, "metadata": {"a": "b"}, "best_of": 1, "use_beam_search": False,
        "length_penalty": 1.0,
    },
    {"prompt": [[1, 2], [3]], "max_tokens": 4, "logprobs": 1, **_STREAMED},
    {"prompt": "Once", **_STRUCTURES[0]},
]  # fmt: skip
_CHATS: list[Body] = [
    {
        **_GENERATION, "kv_transfer_params": _TRANSFER,
        "messages": _MESSAGES, "max_tokens": 8, "max_completion_tokens": 8, "logprobs": True,
        "top_logprobs": 2, "tools": [_TOOL, _CUSTOM], "tool_choice": "required", "parallel_tool_calls": False,
        "reasoning_effort": None, "include_reasoning": True, "echo": False, "add_generation_prompt": True,
        "continue_final_message": False, "add_special_tokens": False, "documents": [{"text": "x"}],
        "chat_template": None, "chat_template_kwargs": {"enable_thinking": False}, "use_beam_search": False,
        "length_penalty": 1.0, "mm_processor_kwargs": {}, "media_io_kwargs": {},
    },
    {"messages": _MESSAGES, "tools": [_TOOL], "logprobs": True, "top_logprobs": 1, **_STREAMED},
    {
        "messages": _MESSAGES, "tools": [_TOOL, _CUSTOM],
        "tool_choice": {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "weather"}}]},
        },
    },
    {"messages": [{"role": "assistant", "content": "Once"}], "echo": True, "continue_final_message": True},
    *({"messages": _MESSAGES[:2], "max_tokens": 8, **structure} for structure in _STRUCTURES),
]  # fmt: skip

_POOLED: Body = {
    "mm_processor_kwargs": {}, "media_io_kwargs": {},
    "model": "fake-1", "truncate_prompt_tokens": 20, "truncation_side": "left", "padding": "do_not_pad", "priority": 0,
    "cache_salt": "salt", "request_id": "request", "timeout": 30.0,
}  # fmt: skip
_ENCODED: Body = {"encoding_format": "base64", "embed_dtype": "float16", "endianness": "big"}
_EMBEDDED: Body = {"dimensions": 8, "use_activation": True, "input_type": None, **_ENCODED}
_CHAT_INPUT: Body = {
    "messages": _MESSAGES[:2], "add_generation_prompt": True, "continue_final_message": False,
    "add_special_tokens": True, "chat_template": None, "chat_template_kwargs": {"a": 1},
}  # fmt: skip
_SCORED: Body = {
    **_POOLED, "use_activation": False, "max_tokens_per_query": 5, "max_tokens_per_doc": 5, "instruction": None,
    "chat_template_kwargs": None,
}  # fmt: skip
_INPUTS: list[Any] = ["Once", ["Once", "Twice"], [1, 2, 3], [[1, 2], [3]]]
_PARTS: Body = {"content": [{"type": "text", "text": "Once"}]}
_EMBEDDINGS: list[Body] = [
    {**_POOLED, **_EMBEDDED, "input": ["Once", "Twice"], "add_special_tokens": False, "prompt_name": "query",
     "instruction": "look"},
    {**_POOLED, **_EMBEDDED, **_CHAT_INPUT, "prompt_name": None, "instruction": None},
    *({"input": inputs, "encoding_format": "bytes"} for inputs in _INPUTS),
]  # fmt: skip
_CLASSIFIED: list[Body] = [
    {**_POOLED, "input": ["Once", "Twice"], "add_special_tokens": False, "use_activation": False},
    {**_POOLED, **_CHAT_INPUT, "use_activation": None},
]
_POOLINGS: list[Body] = [
    *({**body, "task": "embed"} for body in _EMBEDDINGS),
    {"input": ["Once", "Twice"], "task": "token_embed", "encoding_format": "bytes_only"},
    {"input": "Once", "task": "token_classify"},
]
_SCORES: list[Body] = [
    {**_SCORED, "queries": "Once", "documents": ["Once", {"text": "Twice"}, _PARTS]},
    {"queries": [_PARTS, "x"], "items": ["Once", "Twice"]},
    {"data_1": "Once", "data_2": "Twice"},
    {"text_1": "Once", "text_2": ["Once", "Twice"]},
]
_TEI: Body = {"model": "fake-1", "truncate": True, "truncation_direction": "Left"}
_TEI_TEXTS: list[Body] = [
    {**_TEI, "inputs": ["Once", "Twice"], "prompt_name": "query"},
    *({"inputs": inputs} for inputs in _INPUTS),
]
_TEI_EMBEDDED: list[Body] = [
    {**_TEI_TEXTS[0], "normalize": False, "dimensions": 4, "encoding_format": "float"},
    *_TEI_TEXTS,
]
_PREDICTED: list[Body] = [
    {**_TEI, "inputs": [["Once", "Twice"]], "raw_scores": True},
    {"inputs": [["Once"], ["Twice"]]},
    {"inputs": "Once"},
]
_RERANKED: list[Body] = [
    {**_SCORED, "query": "Once", "documents": ["Once", {"text": "Twice"}], "top_n": 1, "return_documents": False},
    {**_TEI, "query": "Once", "texts": ["Once", "Twice"], "raw_scores": True, "return_text": True},
]
_BEAMS: Body = {"use_beam_search": True, "n": 3, "length_penalty": 0.5, "max_tokens": 4}
_INVOCATIONS: list[Body] = [
    *_CHATS,
    *_COMPLETIONS,
    *({"prompt": "Once", **structure} for structure in _STRUCTURES),
    *(body for body in _EMBEDDINGS if "input" in body),
    *(_POOLINGS + _SCORES + _RERANKED + _TEI_EMBEDDED),
]
_BETA_SESSION: dict[str, Any] = {
    "client_secret": {"expires_after": {"anchor": "created_at", "seconds": 60}}, "model": "fake-2",
    "input_audio_format": "pcm16", "input_audio_transcription": {"language": "en", "prompt": "Hi"},
    "input_audio_noise_reduction": None, "turn_detection": {"type": "server_vad", "threshold": 0.5},
    "include": [], "modalities": ["text"], "instructions": "Be kind.", "max_response_output_tokens": "inf",
    "output_audio_format": "pcm16", "speed": 1.0, "temperature": 0.8, "tool_choice": "auto", "tools": [],
    "tracing": None, "voice": "alloy",
}  # fmt: skip
_RESPONSES: list[Body] = [
    {
        **_SAMPLING, "input": _ITEMS, "instructions": "Be short.", "previous_response_id": None, "store": True,
        "mm_processor_kwargs": {}, "media_io_kwargs": {},
        "background": False, "stream_options": None, "prompt": None, "include": ["message.output_text.logprobs"],
        "max_output_tokens": 8, "max_tool_calls": 2, "metadata": {"a": "b"}, "parallel_tool_calls": False,
        "reasoning": {"effort": "low", "summary": "auto"}, "tools": _RESPONSE_TOOLS,
        "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}, "verbosity": "medium"},
        "tool_choice": {"type": "function", "name": "weather"}, "top_logprobs": 2, "truncation": "disabled",
        "user": "me", "include_reasoning": True, "chat_template_kwargs": {"a": 1}, "enable_response_messages": True,
        "return_metrics": True,
    },
    {"input": "Weather?", "stream": True, "stream_options": {"include_obfuscation": False}},
    {
        "input": "Weather?", "structured_outputs": {"regex": "[a-z]+"}, "store": False,
        "kv_transfer_params": _TRANSFER,
    },
    {"input": "Weather?", "background": True, "tools": _RESPONSE_TOOLS, "tool_choice": "auto"},
]  # fmt: skip
_ANTHROPIC: list[Body] = [
    {
        **_CONVERSATION, "max_tokens": 8, "stop_sequences": ["zz"], "stream": True, "temperature": 0.5,
        "top_p": 0.9, "top_k": 5, "cache_salt": "salt", "output_config": None, "metadata": {"user_id": "me"},
        "kv_transfer_params": _TRANSFER,
    },
    {
        "messages": [{"role": "user", "content": "Weather?"}], "max_tokens": 8,
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "low"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    },
    {
        "messages": [{"role": "user", "content": "Weather?"}], "max_tokens": 8,
        "output_format": {"type": "json_schema", "schema": SCHEMA},
    },
]  # fmt: skip
# The fields of each route that neither its bodies above nor these have would not be tested.
BODIES: dict[str, list[Body]] = {
    "/v1/completions": [
        {"prompt": ["a", "b"], "echo": True, **_BEAMS},
        *_COMPLETIONS,
        *({"prompt": "Once", **structure} for structure in _STRUCTURES),
    ],
    "/v1/completions/render": [
        *_COMPLETIONS,
        *({"prompt": "Once", **structure} for structure in _STRUCTURES),
        {"prompt": ["Once", "Twice"], "return_token_offsets": True},
    ],
    "/invocations": _INVOCATIONS,
    "/": _INVOCATIONS,
    "/v1/embeddings": _EMBEDDINGS,
    "/pooling": _POOLINGS,
    "/classify": _CLASSIFIED,
    "/score": _SCORES,
    "/v1/score": _SCORES,
    "/rerank": _RERANKED,
    "/v1/rerank": _RERANKED,
    "/v2/rerank": _RERANKED,
    "/v2/embed": [
        {
            "model": "fake-1", "texts": ["Once", "Twice"], "inputs": None, "input_type": "search_query",
            "embedding_types": ["float", "int8", "uint8", "binary", "ubinary", "base64"], "output_dimension": 8,
            "truncate": "START", "max_tokens": 5, "priority": 0,
        },
        {"inputs": [_PARTS]},
    ],
    "/embed": _TEI_EMBEDDED,
    "/embed_all": _TEI_TEXTS,
    "/embed_sparse": _TEI_TEXTS,
    "/predict": _PREDICTED,
    "/v1/chat/completions": [*_CHATS, {"messages": _MESSAGES[:2], "logprobs": True, **_BEAMS}],
    "/v1/chat/completions/render": [*_CHATS, {**_CHATS[0], "return_token_offsets": True}],
    "/v1/responses": _RESPONSES,
    "/v1/responses/render": _RESPONSES,
    "/v1/messages": _ANTHROPIC,
    "/v1/messages/render": _ANTHROPIC,
    "/v1/messages/count_tokens": [
        _CONVERSATION,
        {
            "messages": [{"role": "user", "content": "Weather?"}], "output_config": {"effort": "low"},
            "output_format": {"type": "json_schema", "schema": SCHEMA}, "context_management": {"edits": []},
        },
    ],
    "/inference/v1/generate": [
        {
            "model": "fake", "token_ids": [1, 2, 3], "request_id": "request", "stream": False, "stream_options": None,
            "cache_salt": "salt", "priority": 0, "output_mode": "text", "return_token_ids": True,
            "kv_transfer_params": _TRANSFER,
            "sampling_params": {
                **{name: value for name, value in _GENERATION.items() if name != "model"},
                "max_tokens": 4, "logprobs": 2, "structured_outputs": None, "detokenize": True,
            },
        },
        {
            "token_ids": [1, 2, 3], "sampling_params": {"structured_outputs": {"choice": ["a", "b"]}},
            "stream": True, "stream_options": {"include_usage": True}, "features": None,
        },
    ],
    "/tokenize": [
        {"model": "fake", "prompt": "Once", "add_special_tokens": True, "return_token_strs": True},
        {
            "messages": _MESSAGES, "tools": [_TOOL], "add_generation_prompt": False, "continue_final_message": False,
            "chat_template": None, "chat_template_kwargs": {"a": 1}, "mm_processor_kwargs": {}, "media_io_kwargs": {},
        },
    ],
    "/detokenize": [{"model": "fake", "tokens": [1, 2, 3]}],
    "/scale_elastic_ep": [{"new_data_parallel_size": 2, "drain_timeout": 1.5, "model": "fake"}],
    "/update_weights": [{"path": "step-100", "model": "fake", "mode": "keep"}],
    "/update_weights_from_disk": [
        {
            "model_path": "step-100", "model": "fake", "load_format": "auto", "abort_all_requests": True,
            "flush_cache": True,
        }
    ],
    "/v1/realtime/client_secrets": [
        {
            "expires_after": {"anchor": "created_at", "seconds": 60},
            "session": {
                "type": "transcription", "include": [],
                "audio": {
                    "input": {
                        "format": {"type": "audio/pcm", "rate": 24000}, "noise_reduction": None,
                        "transcription": {"language": "en", "prompt": "Hi"},
                        "turn_detection": {
                            "type": "server_vad", "threshold": 0.5,
                            "prefix_padding_ms": 300, "silence_duration_ms": 500,
                        },
                    },
                },
            },
        },
    ],
    "/v1/realtime/sessions": [_BETA_SESSION],
    "/v1/realtime/transcription_sessions": [_BETA_SESSION],
}  # fmt: skip
