"""Client secrets: one has one spelling."""

from __future__ import annotations

import string

import pytest

from quire.realtime.secrets import ClientSecrets


@pytest.mark.parametrize("session", [b"{}", b"{} ", b"{}  "])  # lengths whose last character has 0, 2 or 4 unused bits
def test_another_spelling_is_refused(session: bytes) -> None:
    secrets = ClientSecrets()
    text, _ = secrets.make(session, seconds=60, owner=None, beta=False)
    assert secrets.is_valid(text)
    last = [text[:-1] + char for char in string.ascii_letters + string.digits + "-_" if char != text[-1]]
    for other in (*last, text + "!", text + "=", text[:9] + "~" + text[9:], text + "\n"):
        assert not secrets.is_valid(other), other
