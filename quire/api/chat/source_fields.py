"""Names of fields in the request that a chat request was translated from, for errors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from quire.multimodal.errors import PromptError
from quire.protocol.errors import ApiError


@dataclass(frozen=True, slots=True)
class SourcedMessage:
    """A message of a chat request.

    Attributes:
        source: path of the field that it was made from, as in `input[2]`.
        calls: the same for each of its tool calls.
        parts: the same for each of its content parts; empty: they have the same place in that field.
    """

    fields: dict[str, Any]
    source: str
    calls: Sequence[str] = ()
    parts: Sequence[str] = ()


class SourceFields:
    """The fields that those of a chat request were made from."""

    def __init__(self, names: Mapping[str, str], messages: Iterable[SourcedMessage]) -> None:
        """`names`: names in the original request by names in the chat request, where they differ."""
        self._names = dict(names)
        for index, message in enumerate(messages):
            self._names[f"messages[{index}]"] = message.source
            for number, call in enumerate(message.calls):
                self._names[f"messages[{index}].tool_calls[{number}]"] = call
            for number, part in enumerate(message.parts):
                self._names[f"messages[{index}].content[{number}]"] = part

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Let errors name the field that the client has sent."""
        try:
            yield
        except (ApiError, PromptError) as error:
            text = str(error)
            for name, source in self._names.items():
                text = text.replace(f"`{name}`", f"`{source}`")
            error.args = (text,)
            if error.param is not None:
                error.param = self._source(error.param)
            raise

    def _source(self, param: str) -> str:
        known = param
        while known:
            if known in self._names:
                return self._names[known] + param[len(known) :]
            known = known[: max(known.rfind("["), known.rfind("."), 0)]
        return param
