"""The tokenizer and chat template of a small model that reads pictures, and a core that tells what it has got."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import tokenizers
from PIL import Image

from quire.engine.client.audio import AudioInfo
from quire.engine.client.model_info import Generates
from quire.engine.client.pictures import FixedSize, Geometry, PictureInfo, SmartResize, VideoInfo
from quire.engine.client.protocol import AddRequest, PictureItem
from tests.support.fake_core import INFO, FakeCore
from tests.support.server import Server, running_server
from tests.support.tokenizer import byte_level

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
IMAGE, VIDEO, AUDIO = "<image>", "<video>", "<audio>"
_SPECIAL = ("<|im_start|>", "<|im_end|>", IMAGE, "<pic>", "</pic>", VIDEO, AUDIO)
TOKEN = {text: 256 + index for index, text in enumerate(_SPECIAL)}
FIXED = FixedSize(height=8, width=8, tokens=4)
SMART = SmartResize(multiple=4, min_pixels=16, max_pixels=1 << 12)
PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for c in m.content %}{% if c.type == 'image' %}<image>"
    "{% elif c.type == 'video' %}<video>{% elif c.type == 'audio' %}<audio>{% else %}{{ c.text }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXTS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@lru_cache(maxsize=1)
def picture_tokenizer() -> tokenizers.Tokenizer:
    """Bytes, then the special tokens."""
    return byte_level(_SPECIAL)


def picture_info(geometry: Geometry = FIXED, video: VideoInfo | None = None) -> PictureInfo:
    """Facts about the model."""
    return PictureInfo(
        placeholder=TOKEN[IMAGE],
        placeholder_text=IMAGE,
        geometry=geometry,
        before="<pic>",
        after="</pic>",
        embedding_size=6,
        video=video,
    )


def described(message: AddRequest) -> list[int]:
    """The spans of a request's pictures."""
    spans = " ".join(f"{item.start}+{item.length}" for item in message.items)
    return [*picture_tokenizer().encode(spans or "nothing").ids, TOKEN["<|im_end|>"]]


@dataclass
class PictureCore(FakeCore):
    """A core that says which pictures it has got."""

    geometry: Geometry = FIXED
    context: int = 4096
    video: VideoInfo | None = None
    audio: AudioInfo | None = None
    answer: Callable[[AddRequest], list[int]] = field(default=described)

    def __post_init__(self) -> None:
        self.info = msgspec.structs.replace(
            INFO,
            vocab_size=256 + len(_SPECIAL),
            max_model_len=self.context,
            kind=Generates(audio=self.audio, pictures=picture_info(self.geometry, self.video)),
        )

    @property
    def requests(self) -> list[AddRequest]:
        """What it has got."""
        return [message for message in self.received if isinstance(message, AddRequest)]

    @property
    def prompts(self) -> list[str]:
        """The prompts of these."""
        return [
            picture_tokenizer().decode(message.prompt.tolist(), skip_special_tokens=False) for message in self.requests
        ]

    @property
    def items(self) -> list[list[PictureItem]]:
        """The pictures of these."""
        return [[item for item in message.items if isinstance(item, PictureItem)] for message in self.requests]


@asynccontextmanager
async def picture_server(
    folder: Path, core: PictureCore | None = None, *others: FakeCore, template: str = PARTS, **options: Any
) -> AsyncIterator[Server]:
    """A server of the model; `others` are further ones."""

    def write(folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        picture_tokenizer().save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
        (folder / "chat_template.jinja").write_text(template)
        (folder / "config.json").write_text("{}")

    async with running_server(folder, core or PictureCore(), *others, write=write, **options) as server:
        yield server


def painted(color: str = "red", size: tuple[int, int] = (16, 8), kind: str = "PNG", **options: Any) -> bytes:
    """The file of a picture of one colour. `size`: width and height."""
    file = io.BytesIO()
    Image.new(options.pop("mode", "RGB"), size, color).save(file, kind, **options)
    return file.getvalue()


def base64_of(content: bytes) -> str:
    """Content in base64."""
    return base64.b64encode(content).decode()


def data_url(content: bytes, kind: str = "image/png") -> str:
    """A data URL."""
    return f"data:{kind};base64,{base64_of(content)}"


def image_url(content: bytes, **fields: Any) -> dict[str, Any]:
    """A content part of OpenAI's chats."""
    return {"type": "image_url", "image_url": {"url": data_url(content)}, **fields}


def input_image(content: bytes) -> dict[str, Any]:
    """A content part of OpenAI's responses."""
    return {"type": "input_image", "image_url": data_url(content), "detail": "auto"}


def image_block(content: bytes) -> dict[str, Any]:
    """A content block of Anthropic's messages."""
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": base64_of(content)}}


def asked(*parts: dict[str, Any] | str, **fields: Any) -> dict[str, Any]:
    """The body of a chat with one message."""
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"messages": [{"role": "user", "content": content}], **fields}


async def said(server: Server, body: dict[str, Any], path: str = CHAT) -> Any:
    """The body of an answer."""
    response = await server.post(path, body)
    assert response.status_code == 200, response.text
    return response.json()


async def refused(server: Server, body: dict[str, Any], path: str = CHAT) -> dict[str, Any]:
    """The error of a request that is refused, which is short."""
    response = await server.post(path, body)
    assert response.status_code == 400, response.text
    assert len(response.text) < 1000
    error: dict[str, Any] = response.json()["error"]
    return error
