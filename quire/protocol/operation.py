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


class ScaleRequest(RequestBody):
    """Change the number of replicas, by vLLM's names."""

    new_data_parallel_size: Annotated[int, Field(ge=1, le=64)] = Field(
        description="number of replicas that there are to be"
    )
    drain_timeout: Annotated[float, Field(gt=0, le=86400)] = Field(
        120, description="seconds in which the requests of replicas that are removed end"
    )


class Scaled(BaseModel):
    """The number of replicas has been changed."""

    message: str


class ScalingStatus(BaseModel):
    """Whether the number of replicas is being changed."""

    is_scaling_elastic_ep: bool


class ReplicaStatus(BaseModel):
    """A replica of a model.

    `tokens`: tokens of its requests that it has yet to compute: of prompts, and of answers as long as they usually are.
    """

    model: str
    engine: int
    state: Literal["starting", "ready", "draining", "dead"]
    requests: int
    tokens: int


class ReplicaList(BaseModel):
    """The replicas of all models."""

    data: list[ReplicaStatus]
