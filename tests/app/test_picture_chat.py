"""Tiny models that read pictures, served as users do it: what comes out is what transformers generates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.support.picture_chat import asked, image_block, image_url, input_image
from tests.support.pictures import drawn, encoded
from tests.support.process import ServerProcess, serving
from tests.support.served_pictures import PLACEHOLDERS, write_tokenizer
from tests.support.vision_models import PICTURE, expected_of_pictures, make_composite, save_seeing

READING_VIDEOS = {
    "gemma4",
    "llava_onevision",
    "internvl",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "glm4v",
    "smolvlm",
}
FIRST, SECOND = drawn(60, 44), drawn(30, 90, seed=3)


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    """transformers' models."""
    return {case: make_composite(case, seed=4) for case in PLACEHOLDERS}


@pytest.fixture(scope="module")
def folders(made: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    saved = {}
    for case, placeholder in PLACEHOLDERS.items():
        saved[case] = save_seeing(made[case], case, tmp_path_factory.mktemp("served") / case)
        write_tokenizer(saved[case], placeholder)
    return saved


@pytest.fixture(scope="module")
def server(folders: dict[str, Path]) -> Iterator[ServerProcess]:
    """One server of all of them."""
    options = ("--dtype", "float32", "--kv-cache-memory-bytes", "64MiB", "--max-num-batched-tokens", "32")
    with serving(*(str(folder) for folder in folders.values()), *options, "--max-num-seqs", "8") as running:
        yield running


def answered(server: ServerProcess, body: dict[str, Any]) -> dict[str, Any]:
    fields = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    with server.http as client:
        response = client.post("/v1/chat/completions", json={**body, **fields})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


@pytest.mark.parametrize(
    ("case", "pictures"),
    [
        pytest.param(
            case, pictures, marks=() if name == "two" or case == "llava" else pytest.mark.slow, id=f"{name}-{case}"
        )
        for name, pictures in (("one", [FIRST]), ("two", [FIRST, SECOND]), ("none", []))
        for case in PLACEHOLDERS
    ],
)
def test_chats(
    server: ServerProcess, made: dict[str, Any], folders: dict[str, Path], case: str, pictures: list[Image.Image]
) -> None:
    """One picture, two of different sizes with text between, none."""
    parts: list[Any] = ["a"]
    for index, picture in enumerate(pictures):
        parts += [image_url(encoded(picture)), f"{index}?"]
    answer = answered(server, {**asked(*parts), "model": str(folders[case])})
    prompt = answer["prompt_token_ids"]
    assert (PICTURE in prompt) == bool(pictures)
    expected = expected_of_pictures(made[case], case, prompt, pictures, 12)
    assert answer["choices"][0]["token_ids"] == expected


@pytest.mark.parametrize("case", PLACEHOLDERS)
def test_all_apis_see_the_same(server: ServerProcess, folders: dict[str, Path], case: str) -> None:
    """The same picture in a chat, in responses, and in messages has the same tokens, which are cached then."""
    model, content = str(folders[case]), encoded(SECOND)
    question = {"type": "text", "text": "What do you see in it?"}
    chat = answered(server, {**asked(image_url(content), question), "model": model})
    with server.http as client:
        response = client.post(
            "/v1/responses",
            json={
                "model": model,
                "input": [{"role": "user", "content": [input_image(content), {**question, "type": "input_text"}]}],
                "temperature": 0,
                "max_output_tokens": 12,
                "ignore_eos": True,
                "enable_response_messages": True,
            },
        ).json()
        message = client.post(
            "/v1/messages",
            json={
                "model": model,
                "max_tokens": 4,
                "messages": [{"role": "user", "content": [image_block(content), question]}],
            },
        ).json()
    assert response["input_messages"][0]["tokens"] == chat["prompt_token_ids"]
    assert response["output_messages"][0]["tokens"] == chat["choices"][0]["token_ids"]
    assert response["usage"]["input_tokens_details"]["cached_tokens"] > 0
    usage = message["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == chat["usage"]["prompt_tokens"]


def test_models_tell_what_they_read(server: ServerProcess) -> None:
    with server.http as client:
        cards = client.get("/v1/models").json()["data"]
    modalities = {Path(card["id"]).name: card["input_modalities"] for card in cards}
    assert modalities == {
        case: ["text", "image", *(["video"] if case in READING_VIDEOS else [])] for case in PLACEHOLDERS
    }
