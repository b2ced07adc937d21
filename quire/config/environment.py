"""The variables of the environment: which are settings, misspelt settings, or links to services of Kubernetes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches

ENV_PREFIX = "QUIRE_"
# Kubernetes describes each Service of a namespace to its pods, as Docker did with links: for `quire-web` and port 8000
# by QUIRE_WEB_SERVICE_HOST, QUIRE_WEB_PORT_8000_TCP_ADDR and so on.
_ADDRESS, _NUMBER, _PROTOCOL = r"[0-9a-fA-F:.\[\]]+", r"\d{1,5}", r"(?:tcp|udp|sctp)"
_URL = rf"{_PROTOCOL}://.+:{_NUMBER}"
_LINKS = tuple(
    (re.compile(rf"[A-Z][A-Z0-9_]*_{name}"), re.compile(value))
    for name, value in (
        (r"SERVICE_HOST", _ADDRESS),
        (r"SERVICE_PORT(?:_[A-Z0-9_]+)?", _NUMBER),
        (r"PORT(?:_\d+_(?:TCP|UDP|SCTP))?", _URL),
        (r"PORT_\d+_(?:TCP|UDP|SCTP)_PROTO", _PROTOCOL),
        (r"PORT_\d+_(?:TCP|UDP|SCTP)_PORT", _NUMBER),
        (r"PORT_\d+_(?:TCP|UDP|SCTP)_ADDR", _ADDRESS),
    )
)


def is_service_link(name: str, value: str) -> bool:
    """Return whether Kubernetes made a variable for a Service, by its name and the form of its value."""
    return any(form.fullmatch(name) and content.fullmatch(value) for form, content in _LINKS)


def service_links(environment: Mapping[str, str], prefix: str) -> list[str]:
    """Names of the variables with this prefix that Kubernetes made."""
    names = (name for name in environment if name.startswith(prefix))
    return sorted(name for name in names if is_service_link(name, environment[name]))


def misspelt(environment: Mapping[str, str], fields: Iterable[str]) -> Iterator[tuple[str, str | None]]:
    """`QUIRE_*` variables that belong to no setting, most likely typing errors, and the variable with the nearest name.

    `fields`: names of all settings of all commands.
    """
    known = {ENV_PREFIX + field.upper() for field in fields}
    for name in sorted(environment):
        if name.startswith(ENV_PREFIX) and name.upper() not in known and not is_service_link(name, environment[name]):
            matches = get_close_matches(name.upper(), sorted(known))
            # First of all one with the same letters in another order.
            yield name, max(matches, key=lambda match: sorted(match) == sorted(name.upper()), default=None)
