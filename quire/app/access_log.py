"""The access log: a message for each HTTP request and realtime session, when its answer has ended."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from starlette.types import Scope

from quire.api.http.keys import API_KEY, ApiKey
from quire.api.http.request_head import ARRIVED, endpoint_path
from quire.config.options import LogOptions
from quire.engine.client.origin import current_origin
from quire.protocol.errors import ApiError

logger = logging.getLogger("quire.access")
_MAX_PATH = 256  # characters


class AccessLog:
    """Log requests, but those to the paths of probes. Query strings are not logged: some clients put keys there."""

    def __init__(self, options: LogOptions) -> None:
        self._enabled = options.access_log and logger.isEnabledFor(logging.INFO)
        self._skipped = frozenset(options.disable_access_log_for_endpoints)

    def includes(self, scope: Scope) -> bool:
        """Return whether a request is to be logged."""
        return self._enabled and endpoint_path(scope) not in self._skipped

    def write(self, scope: Scope, status: int, *, is_complete: bool = True) -> None:
        """Log a request whose answer has ended.

        Args:
            scope: the request.
            status: of the answer.
            is_complete: all of the answer was sent; otherwise the client has left.
        """
        state = scope.get("state", {})
        method = scope.get("method", "WEBSOCKET")
        key: ApiKey | None = scope.get(API_KEY)
        fields: dict[str, Any] = {
            "client": _address(scope.get("client")),
            **({} if key is None or not key.is_client else {"key": key.name}),
            "method": method,
            "path": quote(scope["path"][:_MAX_PATH]),
            "status": int(status),
            "duration_ms": round((time.monotonic() - state[ARRIVED]) * 1e3, 1) if ARRIVED in state else None,
            **({} if is_complete else {"client_left": True}),
            **_of_the_engine(state.get("request_id", "")),
        }
        text = [f'{fields["client"]} "{method} {fields["path"]} HTTP/{scope["http_version"]}" {status:d}']
        if fields["duration_ms"] is not None:
            text.append(f"in {fields['duration_ms'] / 1e3:.3f} s")
        if "key" in fields:
            text.append(f"key {fields['key']}")
        if "prompt_tokens" in fields:
            text.append(f"{fields['prompt_tokens']} + {fields['output_tokens']} tokens")
        if not is_complete:
            text.append("client left")
        _log(", ".join(text), fields, state.get("request_id", ""))

    def write_refusal(self, client: tuple[str, int] | None, error: ApiError, request_id: str) -> None:
        """Log a request that was refused before its head or its body was complete."""
        if self._enabled:
            address = _address(client)
            fields = {"client": address, "status": int(error.status), "error": str(error)}
            _log(f"{address} {error.status:d}: {error}", fields, request_id)


def _log(text: str, fields: Mapping[str, Any], request_id: str) -> None:
    logger.info("%s", text, extra={"fields": fields, "request_id": request_id})


def _address(client: tuple[str, int] | None) -> str:
    return f"{client[0]}:{client[1]}" if client else "-"


def _of_the_engine(request_id: str) -> dict[str, Any]:
    """Return the tokens of a request, and when it got the first of them; nothing if the engine was not asked."""
    origin = current_origin()
    times = origin.timeline
    if origin.request_id != request_id or not times.prompt_tokens:
        return {}
    tokens = {name: getattr(times, name) for name in ("prompt_tokens", "cached_tokens", "output_tokens")}
    if not times.first_token:
        return tokens
    return {**tokens, "ttft_ms": round((times.first_token - origin.arrived) * 1e3, 1)}
