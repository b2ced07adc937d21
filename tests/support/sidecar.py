"""The calls that llm-d's sidecar (pd-sidecar, connector nixlv2) makes of two servers for a request, restated.

Read from its source of August 2026. It stands before the decoder and gets the address of the prefiller in a header,
which a router has set. What it does with a client's request, in this order:

1. a new id in the header x-request-id of both calls, beside one of the client;
2. to the prefiller, at the same path: the body with `kv_transfer_params` of six fields, four of them null, `stream`
   false, no `stream_options`, and every token limit of the API 1, whether the client has sent it or not;
3. a status from 400 on is the client's answer. 502, 503 and 504 may be tried again before;
4. to the decoder: the client's body again with the prefiller's `kv_transfer_params`, or null;
5. `usage.prompt_tokens_details.cached_tokens` of the answer is replaced by the prefiller's.

With a chunk size it asks the decoder for some tokens of a chat at a time (`decode` below): from the second time on
without `kv_transfer_params`, with the text so far as the last message, to be continued.
"""

from __future__ import annotations

import copy
import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

_LIMITS = {"/v1/responses": ("max_output_tokens",), "/inference/v1/generate": ("max_tokens", "min_tokens")}
_CHAT_LIMITS = ("max_tokens", "max_completion_tokens", "min_tokens")  # also of completions and messages
_RETRIED = (502, 503, 504)
_CHAT = "/v1/chat/completions"
Body = dict[str, Any]


@dataclass
class Sidecar:
    """What stands before a decoder.

    Attributes:
        prefiller, decoder: addresses of servers.
        chunk_size: tokens that the decoder is asked for at a time; 0: all.
        retries: further attempts at a prefill.
        calls: what was sent, in order: to whom, and the body.
    """

    prefiller: httpx.Client
    decoder: httpx.Client
    chunk_size: int = 0
    retries: int = 0
    calls: list[tuple[str, Body]] = field(default_factory=list)

    def post(self, path: str, body: Body, headers: dict[str, str] | None = None) -> httpx.Response:
        """Answer a client's request."""
        identified = [*(headers or {}).items(), ("x-request-id", str(uuid.uuid4()))]
        answer = self.prefill(path, body, identified)
        if answer.status_code >= 400:
            return answer
        prefilled = answer.json()
        decoded = {**body, "kv_transfer_params": prefilled.get("kv_transfer_params")}
        if self.chunk_size and path == _CHAT:
            return self.decode(path, decoded, identified)
        response = self._send("decoder", path, decoded, identified)
        details = (prefilled.get("usage") or {}).get("prompt_tokens_details") or {}
        return _with_cached_tokens(response, details.get("cached_tokens") or 0)

    def prefill(self, path: str, body: Body, headers: list[tuple[str, str]] | None = None) -> httpx.Response:
        """Let the prefiller compute the prompt."""
        sent = copy.deepcopy(body)
        sent["kv_transfer_params"] = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }
        sent["stream"] = False
        sent.pop("stream_options", None)
        limits = sent.setdefault("sampling_params", {}) if path == "/inference/v1/generate" else sent
        limits |= dict.fromkeys(_LIMITS.get(path, _CHAT_LIMITS), 1)
        for _ in range(self.retries):
            answer = self._send("prefiller", path, sent, headers)
            if answer.status_code not in _RETRIED:
                return answer
        return self._send("prefiller", path, sent, headers)

    def decode(self, path: str, body: Body, headers: list[tuple[str, str]]) -> httpx.Response:
        """Ask the decoder for some tokens at a time, without streaming."""
        budget = body.get("max_completion_tokens") or body.get("max_tokens") or -1
        if 0 < budget <= self.chunk_size:
            return self._send("decoder", path, body, headers)
        request, text, tokens = {**body, "stream": False}, "", 0
        request.pop("stream_options", None)
        while True:
            size = self.chunk_size if budget < 0 else min(self.chunk_size, budget - tokens)
            request |= {"max_tokens": size, "max_completion_tokens": size}
            response = self._send("decoder", path, request, headers)
            if response.status_code >= 400:
                return response
            answer = response.json()
            choice = answer["choices"][0]
            piece = choice["message"]["content"] or ""
            text, tokens = text + piece, tokens + answer["usage"]["completion_tokens"]
            if choice["finish_reason"] != "length" or tokens == budget:
                choice["message"]["content"] = text
                return httpx.Response(200, json=answer)
            request.pop("kv_transfer_params", None)
            request |= {"continue_final_message": True, "add_generation_prompt": False}
            if piece:
                request["messages"] = [*request["messages"], {"role": "assistant", "content": piece}]

    def _send(self, server: str, path: str, body: Body, headers: list[tuple[str, str]] | None) -> httpx.Response:
        self.calls.append((server, copy.deepcopy(body)))
        client = self.prefiller if server == "prefiller" else self.decoder
        return client.post(path, json=body, headers=headers)


def _with_cached_tokens(response: httpx.Response, cached: int) -> httpx.Response:
    """Replace the number of cached tokens in an answer, or in each event of a stream."""
    if "text/event-stream" not in response.headers.get("content-type", ""):
        return httpx.Response(response.status_code, json=_replaced(response.json(), cached))
    return httpx.Response(
        response.status_code, headers={"content-type": "text/event-stream"}, text="\n".join(_lines(response, cached))
    )


def _lines(response: httpx.Response, cached: int) -> Iterator[str]:
    for line in response.text.split("\n"):
        yield f"data: {json.dumps(_replaced(json.loads(line[6:]), cached))}" if line.startswith("data: {") else line


def _replaced(answer: Body, cached: int) -> Body:
    details = (answer.get("usage") or {}).get("prompt_tokens_details")
    if details is not None:
        details["cached_tokens"] = cached
    return answer
