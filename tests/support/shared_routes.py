"""FastAPI's descriptions of routes, made once in a process of the tests.

Hundreds of tests start a server of their own. Most of that time FastAPI would describe the parameters, bodies and
answers of the same 75 routes again. The `quire` command, which tests start as well, does without this.

The bodies of /invocations are described for the state of a server. Those of tests' servers are described once for all
of them: the state is that of the context in which the server has been started, which its requests inherit.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import fastapi.routing
import pytest

from quire.api import invocations
from quire.serving.models import ServerState

STARTED: ContextVar[ServerState | None] = ContextVar("STARTED", default=None)  # the server that is being started


def share(patch: pytest.MonkeyPatch) -> None:
    """Let routes with the same code, path and options have the same descriptions, each with its own endpoint."""
    describe = fastapi.routing._populate_api_route_state
    known: dict[object, list[tuple[object, dict[str, Any]]]] = defaultdict(list)
    kind_of, describe_body = invocations._kind, invocations._invocation
    invocation: Any = describe_body(None)  # type: ignore[arg-type]

    def describe_once(
        route: Any, path: str, endpoint: Callable[..., Any], *, dependency_overrides_provider: Any, **options: Any
    ) -> None:
        function = inspect.unwrap(endpoint)
        made = [annotation for annotation in function.__annotations__.values() if not isinstance(annotation, str)]
        if made not in ([], [invocation]):  # a server's state has made one
            describe(route, path, endpoint, dependency_overrides_provider=dependency_overrides_provider, **options)
            return
        signature = (function.__defaults__, function.__kwdefaults__, made, options)
        alike = known[type(route), path, function.__code__]
        for other_signature, description in alike:
            if signature == other_signature:
                vars(route).update(description)
                break
        else:
            before = dict(vars(route))
            describe(route, path, endpoint, dependency_overrides_provider=None, **options)
            description = {name: value for name, value in vars(route).items() if before.get(name, route) is not value}
            alike.append((signature, description))
        route.endpoint = endpoint
        route.dependant = replace(route.dependant, call=endpoint)
        route.dependency_overrides_provider = dependency_overrides_provider

    def kind(body: Any, state: ServerState | None) -> str | None:
        return kind_of(body, STARTED.get() if state is None else state)  # type: ignore[arg-type]

    patch.setattr(invocations, "_kind", kind)
    patch.setattr(
        invocations, "_invocation", lambda state: invocation if STARTED.get() is state else describe_body(state)
    )
    patch.setattr(fastapi.routing, "_populate_api_route_state", describe_once)
