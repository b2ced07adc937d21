"""Admission: a request reserves slots in the engine before anything is rendered, tokenized or compiled."""

from __future__ import annotations

from starlette.requests import Request

from quire.api.http.routing import enter_for_request
from quire.protocol.errors import InvalidRequest
from quire.serving.models import ServedModel
from quire.workers.tenant import current_tenant


def check_capacity(model: ServedModel, sequences: int, param: str) -> None:
    """Refuse a request for more sequences than the engine has slots. See `admit` for the arguments.

    Raises:
        InvalidRequest: there are more sequences.
    """
    most = model.client.largest_request
    if sequences > most:
        raise InvalidRequest(
            f"The request asks for {sequences} sequences; the server accepts at most {most} at once.", param
        )


def admit(request: Request, model: ServedModel, sequences: int, param: str) -> None:
    """Reserve slots until the request has been answered.

    Args:
        request: the HTTP request; its route releases the slots, however it ends.
        model: the model whose engine generates.
        sequences: number of slots, known from fields that are cheap to read.
        param: the request field that determines the number, for errors.

    Raises:
        EngineOverloaded: the queue is full, or the client has its share; the response has a Retry-After header.
        InvalidRequest: the number exceeds what one client may have.
        EngineDead: the engine has ended.
    """
    check_capacity(model, sequences, param)
    enter_for_request(request, model.client.slots(sequences, current_tenant()))
