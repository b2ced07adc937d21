"""A small client of OpenAI-compatible servers, for `quire chat` and `quire bench`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

import httpx

_MAX_QUOTED = 200  # characters of a response in error messages


class ServerError(Exception):
    """The server cannot be reached, or returned an error."""


def connect(url: str, api_key: str | None, timeout: httpx.Timeout) -> httpx.Client:
    """An HTTP client of the server with this base URL.

    Raises:
        ServerError: the URL or the key is not valid.
    """
    try:
        return httpx.Client(base_url=url.rstrip("/") + "/", headers=_headers(api_key), timeout=timeout)
    except (httpx.InvalidURL, UnicodeEncodeError) as error:
        raise ServerError(f"invalid server URL {url}: {error}") from error


def first_model(client: httpx.Client) -> str:
    """The first model of the server.

    Raises:
        ServerError: it lists no models.
    """
    try:
        answer = client.get("models")
        if not answer.is_success:
            is_elsewhere = answer.status_code == HTTPStatus.NOT_FOUND
            meant = "; the base URL of most servers ends in /v1" if is_elsewhere else ""
            raise ServerError(f"could not list the models of {client.base_url}: {error_text(answer)}{meant}")
        return str(answer.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
        raise ServerError(f"could not list the models of {client.base_url}: {error}") from error


def stream_chat(client: httpx.Client, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Deltas of a streamed chat.

    Raises:
        ServerError: the server refused the request, or the stream broke off or was empty.
    """
    has_choice = False
    try:
        with client.stream("POST", "chat/completions", json={**body, "stream": True}) as answer:
            if answer.is_error:
                answer.read()
                raise ServerError(error_text(answer))
            for line in answer.iter_lines():
                for choice in choices(read_chunk(line)):
                    has_choice = True
                    yield delta_of(choice)
    except httpx.HTTPError as error:
        raise ServerError(f"{client.base_url}: {error}") from error
    if not has_choice:
        raise ServerError(f"{client.base_url}: the stream contained no answer")


def read_chunk(line: str) -> dict[str, Any]:
    """The JSON object on a line of a stream; empty if the line has none.

    Raises:
        ServerError: the line is malformed, or contains an error.
    """
    data = line.removeprefix("data:").strip()
    if not line.startswith("data:") or data in ("", "[DONE]"):
        return {}
    try:
        chunk = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ServerError(f"the stream contains a line that is not JSON: {data[:_MAX_QUOTED]}") from error
    if not isinstance(chunk, dict):
        raise ServerError(f"the stream contains a line that is not a JSON object: {data[:_MAX_QUOTED]}")
    if (detail := chunk.get("error")) is not None:
        raise ServerError(str((detail.get("message") if isinstance(detail, dict) else None) or detail)[:_MAX_QUOTED])
    return chunk


def choices(chunk: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices of a chunk; other servers may leave them out, or set them to null."""
    entries = chunk.get("choices")
    return [choice for choice in entries if isinstance(choice, dict)] if isinstance(entries, list) else []


def delta_of(choice: dict[str, Any]) -> dict[str, Any]:
    """The `delta` of a choice."""
    delta = choice.get("delta")
    return delta if isinstance(delta, dict) else {}


def text_in(delta: dict[str, Any], *names: str) -> str:
    """The first non-empty string among these fields."""
    return next((text for name in names if isinstance(text := delta.get(name), str) and text), "")


def error_text(answer: httpx.Response) -> str:
    """Status and message of an error response."""
    try:
        return f"{answer.status_code}: {answer.json()['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"{answer.status_code}: {answer.text[:_MAX_QUOTED]}"


def _headers(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}
