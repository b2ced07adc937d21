"""FastAPI's descriptions of routes, made once in a process of the tests.

Hundreds of tests start a server of their own. Most of that time FastAPI would describe the parameters, bodies and
answers of the same 75 routes again. The `quire` command, which tests start as well, does without this.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import fastapi.routing
import pytest


def share(patch: pytest.MonkeyPatch) -> None:
    """Let routes with the same code, path and options have the same descriptions, each with its own endpoint."""
    describe = fastapi.routing._populate_api_route_state
    known: dict[object, list[tuple[object, dict[str, Any]]]] = defaultdict(list)

    def describe_once(
        route: Any, path: str, endpoint: Callable[..., Any], *, dependency_overrides_provider: Any, **options: Any
    ) -> None:
        function = inspect.unwrap(endpoint)
        if not all(isinstance(annotation, str) for annotation in function.__annotations__.values()):
            # The server's state has made one, as for /invocations.
            describe(route, path, endpoint, dependency_overrides_provider=dependency_overrides_provider, **options)
            return
        signature = (function.__defaults__, function.__kwdefaults__, options)
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

    patch.setattr(fastapi.routing, "_populate_api_route_state", describe_once)
