"""Truncation of conversations: `truncation: auto` drops the oldest items until the prompt fits into the context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.api.chat.prepare import PreparedChat, prepare_chat
from quire.api.responses.run import CLIENT_CALLS
from quire.api.responses.translation import to_chat_request
from quire.multimodal.errors import PromptError
from quire.protocol.errors import InvalidRequest
from quire.protocol.responses import MAX_ITEMS, InputMessage, ResponsesRequest
from quire.serving.models import GeneratingModel, ServerState

_OUTPUTS = ("function_call_output", "custom_tool_call_output")
# `param` of errors about prompts that do not fit into the context.
TOO_LONG = ("input_tokens", "input_text", "max_output_tokens")


async def prepare_turn(
    body: ResponsesRequest, items: Sequence[Any], model: GeneratingModel, state: ServerState, response_id: str
) -> PreparedChat:
    """Render a turn. With `truncation: auto`, as few of the oldest items as necessary are dropped."""

    async def prepare_without(count: int) -> PreparedChat:
        chat, source = to_chat_request(body, _without(items, count))
        with source.errors():
            return await prepare_chat(chat, model, state, response_id)

    fewest = max(0, len(items) - MAX_ITEMS)
    if fewest and body.truncation != "auto":
        raise InvalidRequest(
            f"The conversation has {len(items)} items; without `truncation`: auto at most {MAX_ITEMS} are allowed.",
            "input",
        )
    try:
        return await prepare_without(fewest)
    except (InvalidRequest, PromptError) as error:
        if body.truncation != "auto" or error.param not in TOO_LONG:
            raise
    enough = len(_droppable(items))
    prepared = await prepare_without(enough)
    too_few = fewest
    while enough - too_few > 1:
        count = (enough + too_few) // 2
        try:
            prepared = await prepare_without(count)
            enough = count
        except (InvalidRequest, PromptError) as error:
            if error.param not in TOO_LONG:
                raise
            too_few = count
    return prepared


def _droppable(items: Sequence[Any]) -> list[int]:
    """Indices of items that may be dropped: not instructions, the last item, or the call that it is a result of."""
    if not items:
        return []
    needed = items[-1].call_id if items[-1].type in _OUTPUTS else None
    return [
        index
        for index, item in enumerate(items[:-1])
        if not (isinstance(item, InputMessage) and item.role in ("system", "developer"))
        and not (item.type in CLIENT_CALLS and item.call_id == needed)
    ]


def _without(items: Sequence[Any], count: int) -> list[Any]:
    """The items without the first `count` droppable ones and the results of calls among these."""
    if not count:
        return list(items)
    dropped = set(_droppable(items)[:count])
    calls = {items[index].call_id for index in dropped if items[index].type in CLIENT_CALLS}
    return [
        item
        for index, item in enumerate(items)
        if index not in dropped and not (item.type in _OUTPUTS and item.call_id in calls)
    ]
