"""The output items of a response, and the events of their generation."""

from __future__ import annotations

import copy
import secrets
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from quire.api.mcp.types import CallOutcome
from quire.api.responses.translation import encode_reasoning
from quire.parsing.event_writer import EventWriter, TextKind
from quire.parsing.tools.calls import CallDelta, Parsed

Event = dict[str, Any]
# Item types of calls: the prefix of their ids, and the field that grows while the call is generated.
_CALLS = {"function_call": ("fc", "arguments"), "custom_tool_call": ("ctc", "input"), "mcp_call": ("mcp", "arguments")}


def new_id(prefix: str) -> str:
    """A random id of an item, such as `msg_...`."""
    return f"{prefix}_{secrets.token_hex(24)}"


class ItemWriter(EventWriter[Event]):
    """Build the output items of one response and the events of their generation.

    Attributes:
        items: the items so far; the last one may be unfinished.
    """

    def __init__(self, *, reasoning: bool, encode_reasoning: bool, servers: Mapping[str, str] | None = None) -> None:
        """Make a writer without items.

        Args:
            reasoning: whether reasoning is shown.
            encode_reasoning: add `encrypted_content` to reasoning, so that clients can send it back.
            servers: labels of MCP servers by the names of their tools.
        """
        super().__init__(reasoning=reasoning)
        self.items: list[dict[str, Any]] = []
        self._encode_reasoning = encode_reasoning
        self._servers = servers or {}
        self._indices: dict[str, int] = {}  # of the items, by their ids
        self._texts: list[str] = []  # of the open part; joined when it is closed
        self._logprobs: deque[Any] = deque()  # of tokens whose text was not written yet
        self._called = False  # after a call, log-probabilities cannot be matched with text

    def write_tokens(self, parsed: Parsed, logprobs: Sequence[Any]) -> Iterator[Event]:
        """Events of further pieces. `logprobs`: log-probabilities of their tokens, without those of reasoning."""
        if not self._called:
            self._logprobs.extend(logprobs)
        yield from self.write(parsed)

    def end_turn(self, status: str) -> Iterator[Event]:
        """Events of the end of a turn of the model."""
        yield from self.close(status)
        self._called = False

    def abort(self) -> None:
        """Mark unfinished items as incomplete, without events."""
        if self._open is not None:
            self._join_text()
            self.items[-1]["status"] = "incomplete"
        for call in self.pending_calls():
            call["status"] = "incomplete"
        self._open = None

    # Tools of MCP servers

    def tools_listed(self, label: str, tools: list[dict[str, Any]]) -> Iterator[Event]:
        """Events of an item that lists the tools of a server."""
        item = {"type": "mcp_list_tools", "id": new_id("mcpl"), "server_label": label, "tools": tools, "error": None}
        index = self._append(item)
        yield {"type": "response.output_item.added", "output_index": index, "item": {**item, "tools": []}}
        for kind in ("in_progress", "completed"):
            yield self._item_event(f"response.mcp_list_tools.{kind}")
        yield {"type": "response.output_item.done", "output_index": index, "item": item}

    def pending_calls(self) -> list[dict[str, Any]]:
        """Items of MCP calls that were not made yet."""
        return [item for item in self.items if item["type"] == "mcp_call" and item["status"] == "in_progress"]

    def call_finished(self, call: dict[str, Any], outcome: CallOutcome) -> Iterator[Event]:
        """Events of the outcome of an MCP call."""
        call["output"], call["error"] = outcome.output, outcome.error
        if outcome.content is not None:
            call["content"] = outcome.content
        status = "completed" if outcome.error is None else "failed"
        yield {"type": f"response.mcp_call.{status}", "item_id": call["id"], "output_index": self._indices[call["id"]]}
        yield from self._item_done(call, status)

    def calls_skipped(self) -> Iterator[Event]:
        """Events of MCP calls that will not be made because the answer was cut off."""
        for call in self.pending_calls():
            yield from self._item_done(call, "incomplete")

    # Parts of an answer

    def _text_opened(self, kind: TextKind) -> Iterator[Event]:
        if kind == "reasoning":
            item: dict[str, Any] = {"type": "reasoning", "id": new_id("rs"), "summary": [], "content": []}
            part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        else:
            item = {"type": "message", "id": new_id("msg"), "role": "assistant", "content": []}
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        yield from self._item_added(item)
        yield self._item_event("response.content_part.added", content_index=0, part=copy.deepcopy(part))
        self.items[-1]["content"].append(part)

    def _text_extended(self, kind: TextKind, text: str) -> Event:
        part = self.items[-1]["content"][0]
        self._texts.append(text)
        fields: dict[str, Any] = {"content_index": 0, "delta": text}
        if kind == "text":
            fields["logprobs"] = self._take_logprobs(text)
            part["logprobs"].extend(fields["logprobs"])
        return self._item_event(f"response.{part['type']}.delta", **fields)

    def _write_call(self, call: CallDelta) -> Iterator[Event]:
        self._called = True
        self._logprobs.clear()
        yield from super()._write_call(call)

    def _call_opened(self, call: CallDelta) -> Iterator[Event]:
        label = self._servers.get(call.name or "")
        kind = "custom_tool_call" if call.custom else "function_call"
        if label is not None:
            kind = "mcp_call"
        prefix, field = _CALLS[kind]
        item: dict[str, Any] = {"type": kind, "id": new_id(prefix), "name": call.name, field: ""}
        if label is None:
            yield from self._item_added({**item, "call_id": call.id})
            return
        yield from self._item_added(
            {**item, "server_label": label, "output": None, "error": None, "approval_request_id": None}
        )
        yield self._item_event("response.mcp_call.in_progress")

    def _call_extended(self, arguments: str) -> Event:
        item = self.items[-1]
        field = _CALLS[item["type"]][1]
        self._texts.append(arguments)
        return self._item_event(f"response.{item['type']}_{field}.delta", delta=arguments)

    def _closed(self, kind: TextKind | Literal["call"], status: str) -> Iterator[Event]:
        self._join_text()
        item = self.items[-1]
        if kind == "call":
            field = _CALLS[item["type"]][1]
            named = {"name": item["name"]} if item["type"] == "function_call" else {}
            yield self._item_event(f"response.{item['type']}_{field}.done", **named, **{field: item[field]})
            if item["type"] == "mcp_call" and status == "completed":  # `call_finished` ends it
                return
        else:
            yield from self._content_done(item)
        self._open = None  # before the event: the generator may not be resumed after it
        yield from self._item_done(item, status)

    def _join_text(self) -> None:
        """Put the text of the open part into its item."""
        if not self._texts:  # the part may not have begun
            return
        item = self.items[-1]
        text = "".join(self._texts)
        self._texts = []
        if item["type"] in _CALLS:
            item[_CALLS[item["type"]][1]] += text
        else:
            item["content"][0]["text"] += text

    def _content_done(self, item: dict[str, Any]) -> Iterator[Event]:
        part = item["content"][0]
        fields = {"text": part["text"]}
        if item["type"] == "message":
            fields["logprobs"] = part["logprobs"]
            self._logprobs.clear()  # their tokens had no text
        yield self._item_event(f"response.{part['type']}.done", content_index=0, **fields)
        yield self._item_event("response.content_part.done", content_index=0, part=part)
        if item["type"] == "reasoning" and self._encode_reasoning:
            item["encrypted_content"] = encode_reasoning(part["text"])

    def _take_logprobs(self, text: str) -> list[Any]:
        """Entries of the tokens up to the end of `text`; those that follow are of end tokens, stops or calls."""
        target = text.encode()
        taken_text = bytearray()
        taken = list[Any]()
        searched = 0  # no occurrence begins before
        while self._logprobs and taken_text.find(target, searched) < 0:
            searched = max(0, len(taken_text) - len(target) + 1)
            taken.append(self._logprobs.popleft())
            taken_text += bytes(taken[-1]["bytes"] or ())
        return taken

    def _item_added(self, item: dict[str, Any]) -> Iterator[Event]:
        index = self._append({**item, "status": "in_progress"})
        # A copy without content, as the item changes after the event.
        added = {**self.items[-1], **({"content": []} if "content" in item else {})}
        yield {"type": "response.output_item.added", "output_index": index, "item": added}

    def _append(self, item: dict[str, Any]) -> int:
        """Add an item; returns its index."""
        index = self._indices[item["id"]] = len(self.items)
        self.items.append(item)
        return index

    def _item_done(self, item: dict[str, Any], status: str) -> Iterator[Event]:
        item["status"] = status
        yield {"type": "response.output_item.done", "output_index": self._indices[item["id"]], "item": item}

    def _item_event(self, kind: str, **fields: Any) -> Event:
        """An event of the last item."""
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **fields}
