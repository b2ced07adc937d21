"""Endpoints of operators: pauses, new weights."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from quire.protocol.common import RequestBody


class PauseStatus(BaseModel):
    """What /pause and /resume have done."""

    status: Literal["paused", "resumed"]


class Paused(BaseModel):
    """Whether a model is paused."""

    is_paused: bool


class UpdateWeightsRequest(RequestBody):
    """Replace the weights of a model by those in a directory."""

    path: Annotated[str, Field(min_length=1, max_length=4096)] = Field(
        description="directory of the model with the new weights, in --weight-update-path or relative to it"
    )
    model: str | None = Field(None, description="name of the model; default: the first model")
    mode: Literal["abort", "wait", "keep"] = Field(
        "wait",
        description="requests that have begun are aborted, or end first, or go on with the new weights",
    )


class UpdateWeightsFromDiskRequest(RequestBody):
    """The same in SGLang's API."""

    model_path: Annotated[str, Field(min_length=1, max_length=4096)] = Field(
        description="directory of the model with the new weights, in --weight-update-path or relative to it"
    )
    load_format: Literal["auto", "safetensors"] | None = None
    abort_all_requests: bool = Field(False, description="abort requests that have begun; else they end first")
    flush_cache: Literal[True] = Field(True, description="the caches are always emptied")


class UpdateWeightsFromDiskResponse(BaseModel):
    """The weights have been replaced."""

    success: Literal[True] = True
    message: str
    num_paused_requests: int = 0


class UpdateWeightsResponse(BaseModel):
    """The weights have been replaced."""

    message: str
