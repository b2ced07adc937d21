"""/v1/files, as of OpenAI: files that messages may name."""

from __future__ import annotations

import asyncio
from pathlib import PurePath
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from quire.api.http.form import read_form
from quire.api.http.routing import CheckedRoute, enter_for_request
from quire.api.http.sse import unless_disconnected
from quire.api.http.tenant import owner_of
from quire.multimodal.file_store import StoredFile
from quire.protocol import fields
from quire.protocol.common import ERRORS
from quire.protocol.errors import InvalidRequest, NotFound, disk_error, shorten
from quire.protocol.files import DeletedFile, FileList, FileObject, FileRequest
from quire.protocol.speech_to_text import form_schema
from quire.serving.models import ServerState
from quire.workers.tenant import current_tenant

_MAX_NAME = 256  # characters


def router(state: ServerState) -> APIRouter:
    """A router with the endpoints of files."""
    routes = APIRouter(route_class=CheckedRoute, responses=ERRORS)

    @routes.post("/v1/files", openapi_extra=form_schema(FileRequest))
    async def create_file(request: Request) -> FileObject:
        """Store a file."""
        _require_one_process(state)
        files = state.media.files
        if not files.limit:
            raise InvalidRequest("This server stores no files (--file-store-size 0).", "file")
        upload, body = await read_form(request, FileRequest, "it")
        fields.ignore(request, fields.take_unknown_fields(body))
        if not upload.size:
            raise InvalidRequest("The file is empty.", "file")
        if upload.size > files.largest:
            raise InvalidRequest(
                f"The file has {upload.size} bytes; at most {files.largest} are accepted (--max-client-share of "
                "--file-store-size).",
                "file",
            )
        add = files.add(
            upload.file,
            upload.size,
            name=(PurePath(upload.filename or "").name or "file")[:_MAX_NAME],
            purpose=body.purpose,
            owner=owner_of(request.scope),
            tenant=current_tenant(),
            seconds=None if body.expires_after is None else body.expires_after.seconds,
        )
        try:
            stored = await unless_disconnected(request, add)
        except OSError as error:
            raise disk_error(error, "stored", "file") from error
        return _object(stored)

    @routes.get("/v1/files")
    async def list_files(
        request: Request,
        purpose: str | None = None,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> FileList:
        """The files of the client."""
        _require_one_process(state)
        files = [file for file in state.media.files.files(owner_of(request.scope)) if purpose in (None, file.purpose)]
        if order == "desc":
            files.reverse()
        if after is not None:
            places = [index for index, file in enumerate(files) if file.id == after]
            if not places:
                raise InvalidRequest(f"There is no file '{shorten(after)}'.", "after")
            files = files[places[0] + 1 :]
        page = [_object(file) for file in files[:limit]]
        first, last = (page[0].id, page[-1].id) if page else (None, None)
        return FileList(data=page, first_id=first, last_id=last, has_more=len(files) > limit)

    @routes.get("/v1/files/{file_id}")
    async def retrieve_file(file_id: str, request: Request) -> FileObject:
        """What is known of a file."""
        return _object(owned_file(file_id, request))

    @routes.get("/v1/files/{file_id}/content", response_class=Response)
    async def retrieve_content(file_id: str, request: Request) -> Response:
        """The content of a file."""
        file = owned_file(file_id, request)
        # The memory is held until the client has read the answer.
        enter_for_request(request, await state.media_memory.reserve(2 * file.size, current_tenant(), "file_id"))
        try:
            content = await asyncio.to_thread(file.path.read_bytes)
        except FileNotFoundError as error:  # it was deleted, or expired, while this waited for memory
            raise _not_found(file_id) from error
        except OSError as error:
            raise disk_error(error, "read", "file_id") from error
        return Response(content, media_type="application/octet-stream")

    @routes.delete("/v1/files/{file_id}")
    async def delete_file(file_id: str, request: Request) -> DeletedFile:
        """Delete a file."""
        file = owned_file(file_id, request)
        await state.media.files.delete(file)
        return DeletedFile(id=file.id)

    def owned_file(identifier: str, request: Request) -> StoredFile:
        _require_one_process(state)
        file = state.media.files.find(identifier, owner_of(request.scope))
        if file is None:
            raise _not_found(identifier)
        return file

    return routes


def _require_one_process(state: ServerState) -> None:
    if state.others.count:
        raise InvalidRequest(
            "Files are not stored by a server with several processes (--api-server-count): later requests would not "
            "find the one that has a file. Send files in messages."
        )


def _not_found(identifier: str) -> NotFound:
    return NotFound(f"There is no file '{shorten(identifier)}'.", "file_id")


def _object(file: StoredFile) -> FileObject:
    return FileObject(
        id=file.id,
        bytes=file.size,
        created_at=file.created_at,
        expires_at=file.expires_at,
        filename=file.name,
        purpose=file.purpose,
    )
