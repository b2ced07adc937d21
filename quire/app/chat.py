"""`quire chat`: chat in the terminal with an OpenAI-compatible server."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

import httpx

from quire.app.openai_client import ServerError, connect, first_model, stream_chat, text_in
from quire.config.commands import Chat

with suppress(ImportError):
    import readline  # noqa: F401 adds editing and a history to input()

_DIM, _PLAIN = "\033[2m", "\033[0m"
_HELP = "/clear starts a new conversation, /exit or Ctrl+D exits, Ctrl+C stops an answer"


def run(settings: Chat) -> int:
    """Chat until the user exits, or send the message of --message; returns the exit status."""
    try:
        with connect(settings.url, settings.api_key, httpx.Timeout(10, read=None)) as client:
            conversation = _Conversation(client, settings, settings.model_name or first_model(client))
            if settings.message is not None:
                conversation.send(settings.message)
            else:
                _loop(conversation)
    except ServerError as error:
        print(f"quire chat: {error}", file=sys.stderr)
        return 1
    return 0


class _Conversation:
    """The messages of a conversation."""

    def __init__(self, client: httpx.Client, settings: Chat, model: str) -> None:
        self.model = model
        self._client = client
        self._settings = settings
        self.clear()

    def clear(self) -> None:
        """Remove all messages but the system message."""
        system = self._settings.system
        self._messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]

    def send(self, text: str) -> None:
        """Send a message and print the answer as it arrives. A message that causes an error is removed."""
        self._messages.append({"role": "user", "content": text})
        try:
            answer = self._print_answer()
        except ServerError:
            self._messages.pop()
            raise
        self._messages.append({"role": "assistant", "content": answer})

    def _print_answer(self) -> str:
        body: dict[str, Any] = {"model": self.model, "messages": self._messages}
        if self._settings.temperature is not None:
            body["temperature"] = self._settings.temperature
        if self._settings.max_tokens is not None:
            body["max_tokens"] = self._settings.max_tokens
        pieces: list[str] = []
        thinking = False
        try:
            for delta in stream_chat(self._client, body):
                reasoning = text_in(delta, "reasoning", "reasoning_content")
                content = text_in(delta, "content")
                if bool(reasoning) != thinking and (reasoning or content):
                    thinking = bool(reasoning)
                    print(_dim() if thinking else _plain(), end="")
                print(reasoning or content, end="", flush=True)
                pieces.append(content)
        except KeyboardInterrupt:
            pass  # the text so far is the answer
        finally:
            print(_plain() if thinking else "")
        return "".join(pieces)


def _loop(conversation: _Conversation) -> None:
    print(f"Chatting with {conversation.model}. {_HELP}.")
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        match text:
            case "":
                continue
            case "/exit" | "/quit":
                return
            case "/clear":
                conversation.clear()
            case "/help":
                print(_HELP)
            case _:
                try:
                    conversation.send(text)
                except ServerError as error:
                    print(f"quire chat: {error}", file=sys.stderr)


def _dim() -> str:
    return _DIM if sys.stdout.isatty() else ""


def _plain() -> str:
    return f"{_PLAIN}\n" if sys.stdout.isatty() else "\n"
