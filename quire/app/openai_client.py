"""What our own commands need of an OpenAI server's HTTP side."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx

_SHOWN = 200  # characters of what a server sent that an error message repeats


class ServerError(Exception):
    """The server cannot be reached, or answered with an error."""


def connect(url: str, api_key: str | None, timeout: httpx.Timeout) -> httpx.Client:
    """A client of the server with that base URL.

    Raises:
        ServerError: no request can be made of URL and key.
    """
    try:
        return httpx.Client(base_url=url.rstrip("/") + "/", headers=_headers(api_key), timeout=timeout)
    except (httpx.InvalidURL, UnicodeEncodeError) as error:
        raise ServerError(f"{url} cannot be asked: {error}") from error


def first_model(client: httpx.Client) -> str:
    """The first model that the server names.

    Raises:
        ServerError: it names none.
    """
    try:
        answer = client.get("models").raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
        raise ServerError(f"{client.base_url} does not name a model: {error}") from error


def stream_chat(client: httpx.Client, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Deltas of a streamed chat.

    Raises:
        ServerError: the server refused the request, or the stream broke or held no answer.
    """
    answered = False
    try:
        with client.stream("POST", "chat/completions", json={**body, "stream": True}) as answer:
            if answer.is_error:
                answer.read()
                raise ServerError(error_text(answer))
            for line in answer.iter_lines():
                for choice in choices(read_chunk(line)):
                    answered = True
                    yield delta_of(choice)
    except httpx.HTTPError as error:
        raise ServerError(f"{client.base_url}: {error}") from error
    if not answered:
        raise ServerError(f"{client.base_url}: the stream held no answer")


def read_chunk(line: str) -> dict[str, Any]:
    """The JSON object on a line of a stream; an empty one if the line carries none.

    Raises:
        ServerError: the line is broken, or tells of an error.
    """
    data = line.removeprefix("data:").strip()
    if not line.startswith("data:") or data in ("", "[DONE]"):
        return {}
    try:
        chunk = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ServerError(f"the stream holds a line that is not JSON: {data[:_SHOWN]}") from error
    if not isinstance(chunk, dict):
        raise ServerError(f"the stream holds a line that is no JSON object: {data[:_SHOWN]}")
    if (told := chunk.get("error")) is not None:
        raise ServerError(str((told.get("message") if isinstance(told, dict) else None) or told)[:_SHOWN])
    return chunk


def choices(chunk: dict[str, Any]) -> list[dict[str, Any]]:
    """A chunk's choices; other servers leave them out, or write null."""
    found = chunk.get("choices")
    return [choice for choice in found if isinstance(choice, dict)] if isinstance(found, list) else []


def delta_of(choice: dict[str, Any]) -> dict[str, Any]:
    """What a choice adds."""
    delta = choice.get("delta")
    return delta if isinstance(delta, dict) else {}


def text_in(delta: dict[str, Any], *names: str) -> str:
    """The first text among the fields of these names."""
    return next((text for name in names if isinstance(text := delta.get(name), str) and text), "")


def error_text(answer: httpx.Response) -> str:
    """What an error answer says."""
    try:
        return f"{answer.status_code}: {answer.json()['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"{answer.status_code}: {answer.text[:_SHOWN]}"


def _headers(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}
