"""Content parts of items of responses."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from quire.protocol.common import RequestPart


class Part(RequestPart):
    """A part of a message's content. Other fields depend on its type."""

    type: str
    text: str | None = None
    refusal: str | None = None
    input_audio: Any = Field(None, description="of audio: the base64 text and its format, as in chats")
    image_url: Any = Field(None, description="of a picture: its URL")
    video_url: Any = Field(None, description="of a video: its URL, or an object with it, as in chats")
    detail: Any = Field(
        None, description="of a picture: low, high, auto or original; low: the smallest form that the model knows"
    )
    file_data: Any = Field(None, description="of a file: a data URL, or base64")
    file_url: Any = Field(None, description="of a file: its URL")
    file_id: Any = Field(None, description="of a picture, a video or a file: its id, from /v1/files")
    filename: Any = Field(None, description="of a file: its name, which the model reads")
    annotations: Any = Field(None, description="of a text of an earlier answer; without effect")
    logprobs: Any = Field(None, description="of a text of an earlier answer; without effect")
