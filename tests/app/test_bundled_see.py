"""The bundled model that reads pictures, served by plain `quire serve`, says what is in drawings, over all APIs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from PIL import Image, ImageDraw, ImageFont

from tests.support.picture_chat import base64_of
from tests.support.pictures import encoded
from tests.support.process import ServerProcess, serving

NAME = "quire-nano-see"


def shapes() -> Image.Image:
    image = Image.new("RGB", (200, 200), "white")
    pen = ImageDraw.Draw(image)
    pen.ellipse((20, 20, 75, 75), fill=(220, 20, 30))
    pen.rectangle((125, 125, 180, 180), fill=(30, 70, 220))
    return image


def number(text: str) -> Image.Image:
    image = Image.new("RGB", (220, 160), (30, 30, 36))
    ImageDraw.Draw(image).text((40, 40), text, font=ImageFont.load_default(64), fill=(255, 220, 20))
    return image


@pytest.fixture(scope="module", name="server")
def _server() -> Iterator[ServerProcess]:
    with serving() as running:
        yield running


@pytest.fixture(scope="module", name="client")
def _client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as opened:
        yield opened


def asked(client: openai.OpenAI, question: str, image: Image.Image | None = None) -> str:
    """The answer of a chat."""
    content: list[Any] = [{"type": "text", "text": question}]
    if image is not None:
        content.append(
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64_of(encoded(image))}"}}
        )
    message: Any = {"role": "user", "content": content}
    answer = client.chat.completions.create(model=NAME, messages=[message], temperature=0)
    return answer.choices[0].message.content or ""


def test_it_is_listed_as_a_model_that_reads_pictures(server: ServerProcess) -> None:
    with server.http as client:
        cards = {card["id"]: card for card in client.get("/v1/models").json()["data"]}
    assert cards[NAME]["input_modalities"] == ["text", "image"]
    assert "image" not in cards["quire-nano"]["input_modalities"]


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("What colour is the circle?", "The circle is red."),
        ("What colour is the square?", "The square is blue."),
        ("How many shapes are there?", "There are 2 shapes."),
        ("Is there a star?", "No."),
    ],
)
def test_it_says_what_is_drawn(client: openai.OpenAI, question: str, answer: str) -> None:
    assert asked(client, question, shapes()) == answer


def test_it_sees_a_shape_that_fills_the_picture(client: openai.OpenAI) -> None:
    image = Image.new("RGB", (400, 400), "white")
    ImageDraw.Draw(image).ellipse((50, 50, 350, 350), fill=(220, 20, 30))
    assert asked(client, "What is in the picture?", image) == "A red circle in the middle."


@pytest.mark.parametrize("digits", ["7", "42", "9163"])
def test_it_reads_numbers(client: openai.OpenAI, digits: str) -> None:
    assert digits in asked(client, "Which number is in the picture?", number(digits))


def test_it_asks_for_a_picture(client: openai.OpenAI) -> None:
    assert "Send me a simple picture" in asked(client, "How many shapes are there?")


def test_the_other_apis_and_pages_of_pdf_files_give_the_same_answer(
    server: ServerProcess, client: openai.OpenAI
) -> None:
    import anthropic  # not where each process collects tests: it takes a second

    question, answer, picture = "What colour is the circle?", "The circle is red.", base64_of(encoded(shapes()))
    image = {"type": "input_image", "image_url": f"data:image/png;base64,{picture}", "detail": "auto"}
    item: Any = {"role": "user", "content": [image, {"type": "input_text", "text": question}]}
    assert client.responses.create(model=NAME, input=[item], store=False).output_text == answer
    text = {"type": "text", "text": question}
    source = {"type": "base64", "media_type": "image/png", "data": picture}
    message: Any = {"role": "user", "content": [{"type": "image", "source": source}, text]}
    with anthropic.Anthropic(base_url=server.url, api_key="none") as claude:
        block = claude.messages.create(model=NAME, max_tokens=32, messages=[message]).content[0]
    assert block.type == "text"
    assert block.text == answer
    page = {"filename": "a.pdf", "file_data": f"data:application/pdf;base64,{base64_of(encoded(shapes(), 'PDF'))}"}
    message = {"role": "user", "content": [{"type": "file", "file": page}, text]}
    pages = client.chat.completions.create(model=NAME, messages=[message], temperature=0)
    assert pages.choices[0].message.content == answer


def test_a_picture_is_prepared_and_encoded_once(server: ServerProcess, client: openai.OpenAI) -> None:
    image = number("508")

    asked(client, "Which number is in the picture?", image)
    prepared, hits = server.metric("mm_cache_hits_total"), server.metric("prefix_cache_hits_total")
    answer = asked(client, "What number can you see?", image)
    assert "508" in answer
    assert server.metric("mm_cache_hits_total") == prepared + 1
    assert server.metric("prefix_cache_hits_total") > hits  # the question is new, its picture is not
