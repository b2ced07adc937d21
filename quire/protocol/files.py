"""OpenAI's files, which clients upload to name them in messages."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from quire.protocol.common import RequestBody, StrictModel

_HOUR, _MONTH = 3600, 30 * 24 * 3600


class ExpiresAfter(StrictModel):
    """When a file is deleted."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=_HOUR, le=_MONTH)]


class FileRequest(RequestBody):
    """The fields of a form with a file."""

    purpose: Annotated[str, Field(min_length=1, max_length=64)]
    expires_after: ExpiresAfter | None = None


class FileObject(BaseModel):
    """A stored file."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None = None
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"


class FileList(BaseModel):
    """A page of files."""

    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(BaseModel):
    """The answer to a deletion."""

    id: str
    object: Literal["file"] = "file"
    deleted: bool = True
