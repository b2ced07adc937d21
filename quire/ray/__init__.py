"""Quire as a deployment of Ray Serve; `import_path: quire.ray:app`. Needs the extra `quire[ray]`.

Imports of Ray are inside the function: the parts that need none of it are tested without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve import Application


def app(args: dict[str, Any]) -> Application:
    """Return the application for the `args` of a Serve config: those of `quire serve`.

    Raises:
        ConfigError: an argument does not exist, is not valid, or is decided by Ray.
    """
    from quire.ray.deployment import build_application  # noqa: PLC0415 imports Ray

    return build_application(args)


__all__ = ["app"]
