"""docs/api.md names every field that requests may have, and every one that is refused or without effect."""

from __future__ import annotations

import re
from pathlib import Path

from quire.api.http.fields import HARMLESS, UNSUPPORTED
from quire.api.protocol.chat import ChatRequest
from quire.api.protocol.completions import CompletionRequest

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")


def test_every_field_is_documented() -> None:
    named = set(re.findall(r"`([a-z_.]+)`", PAGE))
    declared = {*ChatRequest.model_fields, *CompletionRequest.model_fields}
    assert declared - named == set()
    assert HARMLESS - named == set()
    assert set(UNSUPPORTED) - named == set()


def test_no_field_is_both_supported_and_not() -> None:
    declared = {*ChatRequest.model_fields, *CompletionRequest.model_fields}
    assert not declared & set(UNSUPPORTED)
    assert not declared & HARMLESS
    assert not HARMLESS & set(UNSUPPORTED)
