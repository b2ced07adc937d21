"""Paths of requests. With --root-path, a reverse proxy may or may not strip a prefix from them."""

from __future__ import annotations

from starlette.types import Scope


def path_below(root: str, path: str) -> str:
    """A path without the prefix, if it has it."""
    return path[len(root) :] if root and (path == root or path.startswith(f"{root}/")) else path


def endpoint_path(scope: Scope) -> str:
    """The path of a request as it is without --root-path."""
    return path_below(scope.get("root_path", ""), scope["path"])


def put_below(root: str, scope: Scope) -> None:
    """Give a request its path with the prefix, as ASGI wants it, whether or not it was stripped."""
    scope["root_path"] = root
    scope["path"] = root + path_below(root, scope["path"])
