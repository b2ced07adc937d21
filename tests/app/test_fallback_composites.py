"""Models of architectures without a family, served as users do it: what comes out is what transformers generates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.fallback_composites import FALLBACKS, PLACEHOLDER, expected_tokens, make_fallback, save_fallback
from tests.support.picture_chat import asked, image_url
from tests.support.pictures import drawn, encoded
from tests.support.process import ServerProcess, serving

pytestmark = pytest.mark.slow  # starting the processes takes many seconds
CASES = ("aya_vision", "deepseek_vl", "lighton_ocr")
FIRST, SECOND = drawn(60, 44), drawn(30, 90, seed=3)


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    """transformers' models."""
    return {case: make_fallback(case, seed=4) for case in CASES}


@pytest.fixture(scope="module")
def folders(made: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {case: save_fallback(made[case], case, tmp_path_factory.mktemp("served") / case) for case in CASES}


@pytest.fixture(scope="module")
def server(folders: dict[str, Path]) -> Iterator[ServerProcess]:
    """One server of all of them."""
    options = ("--dtype", "float32", "--kv-cache-memory-bytes", "64MiB", "--max-num-batched-tokens", "32")
    with serving(*(str(folder) for folder in folders.values()), *options, "--max-num-seqs", "8") as running:
        yield running


def posted(server: ServerProcess, body: dict[str, Any]) -> Any:
    fields = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    with server.http as client:
        return client.post("/v1/chat/completions", json={**body, **fields})


@pytest.mark.parametrize("case", CASES)
def test_chats(server: ServerProcess, made: dict[str, Any], folders: dict[str, Path], case: str) -> None:
    """Two pictures of different sizes with text between."""
    parts: list[Any] = ["a", image_url(encoded(FIRST)), "\n0?", image_url(encoded(SECOND)), "1?"]
    response = posted(server, {**asked(*parts), "model": str(folders[case])})
    assert response.status_code == 200, response.text
    answer = response.json()
    marker = FALLBACKS[case].marker
    text = f"<|im_start|>user\na{marker}\n0?{marker}1?<|im_end|>"
    prompt, expected = expected_tokens(made[case], case, text, [FIRST, SECOND], 12)
    assert answer["prompt_token_ids"] == prompt
    assert PLACEHOLDER in prompt
    assert answer["choices"][0]["token_ids"] == expected


def test_broken_pictures_and_settings_are_refused(server: ServerProcess, folders: dict[str, Path]) -> None:
    model = str(folders["lighton_ocr"])
    broken = posted(server, {**asked(image_url(encoded(FIRST)[:200])), "model": model})
    assert broken.status_code == 400
    assert "messages[0].content[0]" in broken.text
    settings = {"mm_processor_kwargs": {"size": {"longest_edge": 99}}}
    response = posted(server, {**asked(image_url(encoded(FIRST))), "model": model, **settings})
    assert response.status_code == 400
    assert "mm_processor_kwargs.size" in response.text
