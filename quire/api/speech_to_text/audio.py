"""The audio of a request: admission, then decoding."""

from __future__ import annotations

import numpy as np
from fastapi import Request
from numpy.typing import NDArray
from starlette.datastructures import UploadFile

from quire.api.http.routing import enter_for_request
from quire.api.http.sse import unless_disconnected
from quire.api.http.tenant import current_tenant
from quire.api.serving.admission import admit
from quire.api.serving.models import ServedModel
from quire.multimodal.audio.decode import check_size


async def admitted_audio(request: Request, model: ServedModel, file: UploadFile) -> NDArray[np.float32]:
    """Admit a request to a model that transcribes, with one slot, and decode its file.

    Returns:
        1-D float32 at 16 kHz, in [-1, 1]; its memory is reserved until the request has been answered.

    Raises:
        ApiError: the server is full, or the file is too large or not audio.
    """
    assert model.audio is not None
    check_size(file.size or 0, model.audio.limits)
    admit(request, model, 1, "file")
    audio = await unless_disconnected(request, model.audio.decode(file.file, tenant=current_tenant()))
    file.file.close()  # it may take space on disk
    enter_for_request(request, model.audio.hold(audio, tenant=current_tenant()))
    return audio.samples
