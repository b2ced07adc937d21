"""Reads forms with a file: fields as a client's multipart encoder writes them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData, UploadFile
from starlette.requests import ClientDisconnect, Request

from quire.api.http.body import check_encoding, release_body
from quire.api.http.routing import enter_for_request
from quire.protocol.errors import ClientDisconnected, InvalidRequest, disk_error, shorten

Body = TypeVar("Body", bound=BaseModel)
_MAX_FIELDS = 512
_MAX_FIELD_SIZE = 1 << 20  # bytes
_CHARSETS = frozenset({"", "utf-8", "utf8", "us-ascii", "ascii", "iso-8859-1", "latin-1", "latin1"})
_NESTED = re.compile(r"([^\[\]]+)\[([^\[\]]+)\]")  # as in chunking_strategy[type]


async def read_form(
    request: Request, kind: type[Body], what: str, lists: Collection[str] = ()
) -> tuple[UploadFile, Body]:
    """The file and the fields of a form. Large files are on disk; they are deleted when the request has been answered.

    Args:
        request: the HTTP request.
        kind: the model of its fields.
        what: what the file is, for errors.
        lists: fields that are lists.

    Raises:
        InvalidRequest: it is not a form, has another charset than is accepted, or has no file.
        Unavailable: the file cannot be stored.
        RequestValidationError: a field is not valid.
        ClientDisconnected: the client disconnected before its end.
    """
    _check_media_type(request)
    try:
        form = await request.form(max_files=1, max_fields=_MAX_FIELDS, max_part_size=_MAX_FIELD_SIZE)
    except ClientDisconnect as error:
        raise ClientDisconnected from error
    except OSError as error:  # a large file is written to the disk
        raise disk_error(error, "stored", "file") from error
    release_body(request)
    enter_for_request(request, _closing(form))
    fields = _fields(form, lists)
    file = fields.pop("file", None)
    if not isinstance(file, UploadFile):
        reason = "is required" if file is None else "must be a file, not text"
        raise InvalidRequest(f"`file` {reason}: send {what} as a part with a file name.", "file")
    for name, value in fields.items():
        if isinstance(value, UploadFile):
            raise InvalidRequest(f"`{shorten(name)}` must not be a file.", name)
    try:
        return file, kind.model_validate(fields)
    except ValidationError as error:
        problems = error.errors(include_input=False)
        raise RequestValidationError(problems, body=fields) from error


def _check_media_type(request: Request) -> None:
    """Raise InvalidRequest for a body that is not a form, is compressed, or has texts in an unusual charset.

    Some of Python's codecs take time that grows with the square of the length, and each unknown name is kept for ever.
    """
    media_type, options = parse_options_header(request.headers.get("content-type", ""))
    if media_type != b"multipart/form-data":
        raise InvalidRequest("Unsupported Media Type: Only 'multipart/form-data' is allowed")
    check_encoding(request)
    charset = options.get(b"charset", b"").decode("latin-1")
    if charset.lower() not in _CHARSETS:
        raise InvalidRequest(f"The charset of a form must be UTF-8, US-ASCII or ISO-8859-1, not {shorten(charset)!r}.")


@contextmanager
def _closing(form: FormData) -> Iterator[None]:
    try:
        yield
    finally:
        for _, value in form.multi_items():
            if isinstance(value, UploadFile):
                value.file.close()


def _fields(form: FormData, lists: Collection[str]) -> dict[str, Any]:
    """Fields by name. `name[]` is a list, `name[key]` an entry of an object, and an empty text is no value."""
    fields: dict[str, Any] = {}
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
