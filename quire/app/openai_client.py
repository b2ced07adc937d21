"""What our own commands need of an OpenAI server's HTTP side."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx


class ServerError(Exception):
    """The server cannot be reached, or answered with an error."""


def headers(api_key: str | None) -> dict[str, str]:
    """Headers of every request."""
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def first_model(client: httpx.Client) -> str:
    """The first model that the server names.

    Raises:
        ServerError: it names none.
    """
    try:
        answer = client.get("models").raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
        raise ServerError(f"{client.base_url} does not name a model: {error}") from error


def stream_chat(client: httpx.Client, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Deltas of a streamed chat.

    Raises:
        ServerError: the server refused the request, or the stream broke.
    """
    try:
        with client.stream("POST", "chat/completions", json={**body, "stream": True}) as answer:
            if answer.is_error:
                answer.read()
                raise ServerError(error_text(answer))
            for line in answer.iter_lines():
                data = line.removeprefix("data:").strip()
                if not line.startswith("data:") or data == "[DONE]":
                    continue
                chunk = json.loads(data)
                if "error" in chunk:
                    raise ServerError(chunk["error"].get("message", data))
                yield from (choice["delta"] for choice in chunk["choices"])
    except httpx.HTTPError as error:
        raise ServerError(f"{client.base_url}: {error}") from error


def error_text(answer: httpx.Response) -> str:
    """What an error answer says."""
    try:
        return f"{answer.status_code}: {answer.json()['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"{answer.status_code}: {answer.text[:200]}"
