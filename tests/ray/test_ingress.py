from __future__ import annotations

from starlette.types import Message, Receive, Scope, Send

from quire.engine.client.replicas.prefix_index import PrefixIndex
from quire.ray.ingress import Ingress
from quire.ray.prefixes import packed
from quire.ray.proxy import PREFIX


async def _seen(scope: Scope) -> tuple[Scope, PrefixIndex]:
    """What an app gets of a request, and the prefixes that are noted."""
    seen: list[Scope] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope)

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        raise AssertionError(message)

    held = PrefixIndex(10)
    await Ingress(app, held)(scope, receive, send)
    return seen[0], held


async def test_a_request_has_the_id_of_its_header_and_a_path_below_the_prefix_of_its_route() -> None:
    headers = [(b"x-request-id", b"abc")]
    scope, _ = await _seen({"type": "http", "path": "/llm/v1/models", "root_path": "/llm", "headers": headers})

    assert scope["state"]["request_id"] == "abc"
    assert scope["state"]["arrived"] > 0
    assert (scope["root_path"], scope["path"]) == ("/llm", "/llm/v1/models")


async def test_the_pieces_of_a_prompt_are_noted_and_not_passed_on() -> None:
    scope, held = await _seen({"type": "http", "path": "/v1/x", "headers": [], PREFIX: packed([7, 8])})

    assert PREFIX not in scope
    assert held.recent(5) == [7, 8]


async def test_the_lifespan_passes_as_it_is() -> None:
    assert (await _seen({"type": "lifespan"}))[0] == {"type": "lifespan"}
