"""Contents that requests encode in base64."""

from __future__ import annotations

import base64

import pytest

from quire.multimodal import sources
from quire.multimodal.errors import PromptError
from quire.multimodal.size_limit import SizeLimit

LIMIT = SizeLimit(1 << 20, "--limit")


@pytest.mark.parametrize("size", [1, 5, 6, 7, 12, 100])
def test_base64_is_decoded_in_parts(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(sources, "_PART", 8)
    content = bytes(range(size))
    assert sources._decode_base64(base64.b64encode(content).decode(), LIMIT, "here") == content


@pytest.mark.parametrize(
    "text", ["AAAAAA==AAAAAAAA", "AAAAAAA=A", "AAAAAAAAAAAA!AAA", "AAAAAAAA\u00e4AAA", "AAAAAAAAA"]
)
def test_a_part_that_is_not_base64_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sources, "_PART", 8)
    with pytest.raises(PromptError, match="not valid base64"):
        sources._decode_base64(text, LIMIT, "here")
