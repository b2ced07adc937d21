"""Reads forms: fields as a client's multipart encoder writes them, and the audio file with its samples."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
from fastapi.exceptions import RequestValidationError
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError
from starlette.datastructures import FormData, UploadFile
from starlette.requests import ClientDisconnect, Request

from quire.api.http.admission import admit
from quire.api.http.body import release_body
from quire.api.http.routing import enter_for_request
from quire.api.http.sse import unless_disconnected
from quire.multimodal.audio.decode import DecodedAudio, check_size
from quire.multimodal.audio.reader import AudioFile, AudioUse
from quire.multimodal.memory import Reservation
from quire.protocol.errors import ClientDisconnected, InvalidRequest, shorten
from quire.serving.models import ServedModel
from quire.speech.transcriber import Transcriber
from quire.speech.windows import kept_bytes
from quire.workers.tenant import current_tenant

Body = TypeVar("Body", bound=BaseModel)
_MAX_FIELDS = 512
_MAX_FIELD_SIZE = 1 << 20  # bytes
_NESTED = re.compile(r"([^\[\]]+)\[([^\[\]]+)\]")  # as in chunking_strategy[type]


async def read_form(request: Request, kind: type[Body]) -> tuple[UploadFile, Body]:
    """The file and the fields of a form. Large files are on disk; they are deleted when the request has been answered.

    Raises:
        InvalidRequest: it is not a form, or has no file.
        RequestValidationError: a field is not valid.
        ClientDisconnected: the client disconnected before its end.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "multipart/form-data":
        raise InvalidRequest("Unsupported Media Type: Only 'multipart/form-data' is allowed")
    try:
        form = await request.form(max_files=1, max_fields=_MAX_FIELDS, max_part_size=_MAX_FIELD_SIZE)
    except ClientDisconnect as error:
        raise ClientDisconnected from error
    release_body(request)
    enter_for_request(request, _closing(form))
    fields = _fields(form)
    file = fields.pop("file", None)
    if not isinstance(file, UploadFile):
        reason = "is required" if file is None else "must be a file, not text"
        raise InvalidRequest(f"`file` {reason}: send the audio as a part with a file name.", "file")
    for name, value in fields.items():
        if isinstance(value, UploadFile):
            raise InvalidRequest(f"`{shorten(name)}` must not be a file.", name)
    try:
        return file, kind.model_validate(fields)
    except ValidationError as error:
        problems = error.errors(include_input=False)
        raise RequestValidationError(problems, body=fields) from error


@contextmanager
def _closing(form: FormData) -> Iterator[None]:
    try:
        yield
    finally:
        for _, value in form.multi_items():
            if isinstance(value, UploadFile):
                value.file.close()


def _fields(form: FormData) -> dict[str, Any]:
    """Fields by name. `name[]` is a list, `name[key]` an entry of an object, and an empty text is no value."""
    fields: dict[str, Any] = {}
    lists = {"timestamp_granularities", "include", "languages", "keywords"}
    for name, value in form.multi_items():
        base = name.removesuffix("[]")
        nested = _NESTED.fullmatch(name)
        if base != name or base in lists:
            listed = fields.setdefault(base, [])
            if not isinstance(listed, list):
                raise InvalidRequest(f"`{shorten(base)}` is given twice.", base)
            listed.append(value)
        elif nested is not None:
            inside = fields.setdefault(nested[1], {})
            if not isinstance(inside, dict):
                raise InvalidRequest(f"`{shorten(nested[1])}` is given twice.", nested[1])
            inside[nested[2]] = value
        elif name in fields:
            raise InvalidRequest(f"`{shorten(name)}` is given twice.", name)
        elif value != "":
            fields[name] = value
    return fields


async def admitted_audio(
    request: Request, model: ServedModel, transcriber: Transcriber, file: UploadFile, sequences: int = 1
) -> NDArray[np.float32]:
    """Admit a request to a model that transcribes, and decode its file.

    Args:
        request: the HTTP request.
        model: the model.
        transcriber: transcribes with it.
        file: the audio.
        sequences: number of slots.

    Returns:
        1-D float32 at 16 kHz, in [-1, 1]; the memory for it and for its features is reserved for as long as it lives.

    Raises:
        ApiError: the server is full.
        PromptError: the file is too large or not audio.
        QueueFull: it has waited too long for memory.
    """
    reader, window_seconds = transcriber.reader, transcriber.window_seconds
    check_size(file.size or 0, reader.limits)
    admit(request, model, sequences, "file" if sequences == 1 else "n")

    async def keep(_: int, audio: DecodedAudio, reservation: Reservation) -> NDArray[np.float32]:
        reservation.pass_on(audio.samples, kept_bytes(len(audio.samples), window_seconds))
        return audio.samples

    use = AudioUse(while_made=lambda _: 0, result=lambda count: kept_bytes(count, window_seconds))
    decoding = reader.decode([AudioFile(file.file)], use, keep, tenant=current_tenant())
    (samples,) = await unless_disconnected(request, decoding)
    file.file.close()  # it may take space on disk
    return samples
