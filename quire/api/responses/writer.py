"""An answer as items, and as the events that tell how they came about."""

from __future__ import annotations

import copy
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from quire.api.answers.tools.calls import CallDelta, Parsed
from quire.api.mcp.outcome import CallOutcome
from quire.api.responses.translation import sealed

Event = dict[str, Any]
# Of the items that are calls: what their ids begin with, and the field that grows.
_CALLS = {"function_call": ("fc", "arguments"), "custom_tool_call": ("ctc", "input"), "mcp_call": ("mcp", "arguments")}


def new_id(kind: str) -> str:
    """An id of an item: `msg_`, `fc_`, `ctc_`, `rs_` and a random number."""
    return f"{kind}_{secrets.token_hex(24)}"


class ItemWriter:
    """Writes the items of one answer: one after the other, each added, filled and done.

    Attributes:
        items: the items so far; the last one may be unfinished.
    """

    def __init__(self, *, reasoning: bool, seal: bool, servers: Mapping[str, str] | None = None) -> None:
        """What it is told.

        Args:
            reasoning: show it.
            seal: show it so that a client which keeps it can hand it back.
            servers: labels of MCP servers by the names of their tools.
        """
        self.items: list[dict[str, Any]] = []
        self._reasoning = reasoning
        self._seal = seal
        self._servers = servers or {}
        self._open: str | None = None  # type of the last item, while it is filled
        self._logprobs: list[Any] = []  # of tokens whose text has not been told yet
        self._called = False  # which of the tokens behind a call are text cannot be told from a delta that has both

    def write(self, parsed: Parsed, logprobs: Sequence[Any] = ()) -> Iterator[Event]:
        """Events of what was found; `logprobs` are of tokens that may be a message's."""
        if not self._called:
            self._logprobs.extend(logprobs)
        for piece in parsed.pieces:
            if isinstance(piece, CallDelta):
                yield from self._call(piece)
            elif not piece.reasoning:
                yield from self._ensure("message")
                yield from self._grow("output_text", piece.text)
            elif self._reasoning:
                yield from self._ensure("reasoning")
                yield from self._grow("reasoning_text", piece.text)

    def end(self, status: str) -> Iterator[Event]:
        """The last item's end, and that of a turn."""
        yield from self._close(status)
        self._called = False

    def break_off(self) -> None:
        """There is no more; what is unfinished stays as far as it went, and no event tells of its end."""
        if self._open is not None:
            self.items[-1]["status"] = "incomplete"
        for call in self.pending():
            call["status"] = "incomplete"
        self._open = None

    # Tools of MCP servers

    def listed(self, label: str, tools: list[dict[str, Any]]) -> Iterator[Event]:
        """Events of an item with a server's tools."""
        item = {"type": "mcp_list_tools", "id": new_id("mcpl"), "server_label": label, "tools": tools, "error": None}
        self.items.append(item)
        place = len(self.items) - 1
        yield {"type": "response.output_item.added", "output_index": place, "item": {**item, "tools": []}}
        for kind in ("in_progress", "completed"):
            yield self._about(f"response.mcp_list_tools.{kind}")
        yield {"type": "response.output_item.done", "output_index": place, "item": item}

    def pending(self) -> list[dict[str, Any]]:
        """Calls that are still to be made."""
        return [item for item in self.items if item["type"] == "mcp_call" and item["status"] == "in_progress"]

    def made(self, call: dict[str, Any], outcome: CallOutcome) -> Iterator[Event]:
        """Events of what came of a call."""
        call["output"], call["error"] = outcome.output, outcome.error
        status = "completed" if outcome.error is None else "failed"
        yield {"type": f"response.mcp_call.{status}", "item_id": call["id"], "output_index": self.items.index(call)}
        yield from self._leave(call, status)

    def not_made(self) -> Iterator[Event]:
        """Events of calls that nobody will make, as the answer broke off."""
        for call in self.pending():
            yield from self._leave(call, "incomplete")

    # What an answer is made of

    def _call(self, call: CallDelta) -> Iterator[Event]:
        self._called = True
        self._logprobs.clear()
        if call.name is not None:
            yield from self._close("completed")
            yield from self._begin(call)
        if call.arguments:
            field = _CALLS[self._open or ""][1]
            self.items[-1][field] += call.arguments
            yield self._about(f"response.{self._open}_{field}.delta", delta=call.arguments)

    def _begin(self, call: CallDelta) -> Iterator[Event]:
        label = self._servers.get(call.name or "")
        kind = "mcp_call" if label is not None else "custom_tool_call" if call.custom else "function_call"
        prefix, field = _CALLS[kind]
        item: dict[str, Any] = {"type": kind, "id": new_id(prefix), "name": call.name, field: ""}
        if label is None:
            yield from self._add(kind, {**item, "call_id": call.id})
            return
        yield from self._add(
            kind, {**item, "server_label": label, "output": None, "error": None, "approval_request_id": None}
        )
        yield self._about("response.mcp_call.in_progress")

    def _ensure(self, kind: str) -> Iterator[Event]:
        if self._open == kind:
            return
        yield from self._close("completed")
        if kind == "reasoning":
            item: dict[str, Any] = {"type": "reasoning", "id": new_id("rs"), "summary": [], "content": []}
            part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        else:
            item = {"type": "message", "id": new_id("msg"), "role": "assistant", "content": []}
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        yield from self._add(kind, item)
        yield self._about("response.content_part.added", content_index=0, part=copy.deepcopy(part))
        self.items[-1]["content"].append(part)

    def _add(self, kind: str, item: dict[str, Any]) -> Iterator[Event]:
        self._open = kind
        self.items.append({**item, "status": "in_progress"})
        # Its content is still to come, and the event must not change when it does.
        told = {**self.items[-1], **({"content": []} if "content" in item else {})}
        yield {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": told}

    def _grow(self, kind: str, text: str) -> Iterator[Event]:
        part = self.items[-1]["content"][0]
        part["text"] += text
        more: dict[str, Any] = {}
        if kind == "output_text":
            more["logprobs"] = self._take_logprobs(text)
            part["logprobs"].extend(more["logprobs"])
        yield self._about(f"response.{kind}.delta", content_index=0, delta=text, **more)

    def _take_logprobs(self, text: str) -> list[Any]:
        """The entries of tokens up to the end of `text`: behind it are an end token's, a stop's or a call's."""
        wanted, said, taken = text.encode(), b"", list[Any]()
        while self._logprobs and wanted not in said:
            taken.append(self._logprobs.pop(0))
            said += bytes(taken[-1]["bytes"] or ())
        return taken

    def _close(self, status: str) -> Iterator[Event]:
        if self._open is None:
            return
        item = self.items[-1]
        if self._open in _CALLS:
            field = _CALLS[self._open][1]
            named = {"name": item["name"]} if self._open == "function_call" else {}
            yield self._about(f"response.{self._open}_{field}.done", **named, **{field: item[field]})
        else:
            part = item["content"][0]
            told = {"text": part["text"]}
            if self._open == "message":
                told["logprobs"] = part["logprobs"]
                self._logprobs.clear()  # no text of it came
            yield self._about(f"response.{part['type']}.done", content_index=0, **told)
            yield self._about("response.content_part.done", content_index=0, part=part)
        if self._open == "reasoning" and self._seal:
            item["encrypted_content"] = sealed(item["content"][0]["text"])
        kind, self._open = self._open, None
        if kind == "mcp_call" and status == "completed":  # it is still to be made
            return
        yield from self._leave(item, status)

    def _leave(self, item: dict[str, Any], status: str) -> Iterator[Event]:
        """An item is as it will stay."""
        item["status"] = status
        yield {"type": "response.output_item.done", "output_index": self.items.index(item), "item": item}

    def _about(self, kind: str, **fields: Any) -> Event:
        """An event of the last item."""
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **fields}
