"""What of settings and variables must not be shown: keys, and passwords in URLs."""

from __future__ import annotations

import re

from pydantic.fields import FieldInfo

from quire.config.types import SECRET

HIDDEN = "(hidden)"
# Names of variables that hold keys, or headers that may.
_SECRET_NAME = re.compile(
    r".*(?:KEYS?|TOKENS?|SECRETS?|HEADERS|AUTH)|.*(?:PASSWORD|SECRET|CREDENTIAL).*", re.IGNORECASE
)
_PASSWORD = re.compile(r"(?<=://)[^/@\s]+(?=@)")  # and the name of the user
_PASSWORD_OF_PROXY = re.compile(r"^[^/@\s]+(?=@)")  # of a URL without a scheme, which variables of proxies may have


def is_secret(field: FieldInfo) -> bool:
    """Return whether the value of a setting must not be shown."""
    return SECRET in field.metadata


def without_passwords(text: str) -> str:
    """Return a text without the users and passwords of its URLs."""
    return _PASSWORD.sub(HIDDEN, text)


def shown_variable(name: str, value: str) -> str:
    """Return the value of a variable as it may be shown."""
    if value and _SECRET_NAME.fullmatch(name):
        return HIDDEN
    text = without_passwords(value)
    return _PASSWORD_OF_PROXY.sub(HIDDEN, text) if name.upper().endswith("_PROXY") else text
