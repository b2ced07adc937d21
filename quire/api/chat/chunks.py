"""Chunks of a streamed chat. Most contain only text and are made from a prepared template."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from quire.api.http.request_head import fingerprint
from quire.api.http.sse import event
from quire.engine.client.stream import Delta
from quire.parsing.answer import AnswerParser
from quire.parsing.logprobs import LogprobFormatter
from quire.parsing.tools.calls import CallDelta, Parsed, TextDelta

_EMPTY = {"content": ""}
_PLACEHOLDER = "\ue000"  # in the template, in place of the text


@dataclass(frozen=True, slots=True)
class ChatChunkFields:
    """The fields that all chunks of a response share."""

    id: str
    created: int
    model: str

    def fields(self) -> dict[str, Any]:
        """The JSON fields."""
        return {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": fingerprint(),
        }


class ChatChunkWriter:
    """Write the chunks of one choice: first its role, then its deltas, then its finish reason.

    Attributes:
        started: the role has been written.
    """

    def __init__(
        self,
        head: ChatChunkFields,
        index: int,
        *,
        role: str,
        echo: str,
        parser: AnswerParser,
        include_reasoning: bool,
        formatter: LogprobFormatter | None,
        prompt_token_ids: Sequence[int] | None,
        has_usage: bool = False,
    ) -> None:
        """Make a writer.

        Args:
            head: fields of all chunks.
            index: index of the choice.
            role: role of the answer.
            echo: text before the answer.
            parser: parses the answer.
            include_reasoning: whether reasoning is shown.
            formatter: formats log-probabilities; None: there are none.
            prompt_token_ids: token ids of the prompt; None: no token ids are shown.
            has_usage: chunks have a field `usage`, which is null where there are no token counts.
        """
        self._head = head
        self._index = index
        self._role = role
        self._echo = echo
        self._parser = parser
        self._include_reasoning = include_reasoning
        self._formatter = formatter
        self._prompt_token_ids = prompt_token_ids
        self._has_usage = has_usage
        self.started = False
        self._plain = formatter is None and prompt_token_ids is None
        self._verbatim = self._plain and parser.plain
        template = self._chunk({"content": _PLACEHOLDER}, None)
        self._before, self._after = template.split(f'"{_PLACEHOLDER}"'.encode())

    def write(self, delta: Delta, usage: Mapping[str, Any] | None) -> Iterator[bytes]:
        """The chunks of one delta."""
        if self._verbatim and usage is None and delta.finish_reason is None:
            if delta.text:
                yield self._before + orjson.dumps(delta.text) + self._after
            return
        parsed = self._parser.push(delta.text, last=delta.finish_reason is not None)
        if not self._plain or usage is not None or delta.finish_reason is not None:
            yield from self._write_full(delta, list(self._pieces(parsed)), usage)
            return
        for piece in self._pieces(parsed):
            if "content" in piece:  # nearly all chunks
                yield self._before + orjson.dumps(piece["content"]) + self._after
            else:
                yield self._chunk(piece, None)

    def _pieces(self, parsed: Parsed) -> Iterator[dict[str, Any]]:
        """The `delta` objects of parsed pieces."""
        for piece in parsed.pieces:
            if not isinstance(piece, TextDelta):
                yield from _call(piece)
            elif not piece.reasoning:
                yield {"content": f"\n{piece.text}" if piece.apart else piece.text}
            elif self._include_reasoning:
                yield {"reasoning": piece.text, "reasoning_content": piece.text}

    def _write_full(
        self, delta: Delta, pieces: Sequence[Mapping[str, Any]], usage: Mapping[str, Any] | None
    ) -> Iterator[bytes]:
        """Chunks with all fields. Token ids and log-probabilities are in the last of them."""
        end = None
        if delta.finish_reason is not None:
            reason = self._parser.finish_reason(delta.finish_reason)
            end = {"finish_reason": reason, "stop_reason": delta.stop_reason}
            pieces = pieces if pieces and "content" in pieces[-1] else [*pieces, {} if self._parser.called else _EMPTY]
        for piece in pieces[:-1]:
            yield self._chunk(piece, usage)
        yield self._chunk(pieces[-1] if pieces else _EMPTY, usage, delta, end=end)

    def start(self, usage: Mapping[str, Any] | None) -> Iterator[bytes]:
        """The chunk with the role, and one with the echoed text if there is any."""
        self.started = True
        extra = {} if self._prompt_token_ids is None else {"prompt_token_ids": list(self._prompt_token_ids)}
        yield self._chunk({"role": self._role, "content": ""}, usage, top=extra)
        if self._echo:
            yield self._chunk({"content": self._echo}, usage)

    def _chunk(
        self,
        delta: Mapping[str, Any],
        usage: Mapping[str, Any] | None,
        tokens: Delta | None = None,
        *,
        end: Mapping[str, Any] | None = None,
        top: Mapping[str, Any] | None = None,
    ) -> bytes:
        fields: dict[str, Any] = {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None}
        if tokens is not None and self._formatter is not None:
            fields["logprobs"] = {"content": self._formatter.chat(tokens.logprobs)}
        if self._prompt_token_ids is not None:
            fields["token_ids"] = None if tokens is None else tokens.token_ids
        body = {**self._head.fields(), "choices": [{**fields, **(end or {})}], **(top or {})}
        return event({**body, "usage": usage} if self._has_usage else body)


def _call(call: CallDelta) -> Iterator[dict[str, Any]]:
    kind, argument = ("custom", "input") if call.custom else ("function", "arguments")
    if call.name is not None:
        start = {"id": call.id, "type": kind, kind: {"name": call.name, argument: ""}}
        yield {"tool_calls": [{"index": call.index, **start}]}
    if call.arguments:
        yield {"tool_calls": [{"index": call.index, kind: {argument: call.arguments}}]}
