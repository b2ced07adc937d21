"""The samples of the audio file in a form."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from starlette.datastructures import UploadFile
from starlette.requests import Request

from quire.api.http.admission import admit
from quire.api.http.sse import unless_disconnected
from quire.engine.client.origin import current_origin
from quire.multimodal.audio.decode import DecodedAudio, check_size
from quire.multimodal.audio.reader import AudioFile, AudioUse
from quire.multimodal.memory import Reservation
from quire.serving.models import ServedModel
from quire.speech.transcriber import Transcriber
from quire.speech.windows import kept_bytes
from quire.workers.tenant import current_tenant


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
    with current_origin().timeline.media:
        (samples,) = await unless_disconnected(request, decoding)
    file.file.close()  # it may take space on disk
    return samples
