"""What is sent to MCP servers, and what comes back."""

from __future__ import annotations

import pytest

from quire.api.mcp.types import arguments_of


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("", {}),
        ('{"a": 1}', {"a": 1}),
        ('{"a": 123456789012345678901234567890}', {"a": 123456789012345678901234567890}),
        ("[]", None),
        ("5", None),
        ("{", None),
        ('{"a": NaN}', None),
        ('{"a":' * 300 + "1" + "}" * 300, None),
        ('{"a":' * 20_000 + "1" + "}" * 20_000, None),
    ],
)
def test_arguments_are_an_object_that_can_be_serialized(text: str, arguments: object) -> None:
    assert arguments_of(text) == arguments
