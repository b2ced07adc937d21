"""ProfilerConfig: the value of --profiler-config, with vLLM's names."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema

from quire.config.types import JsonObject


class ProfilerConfig(BaseModel):
    """What torch's profiler records, for how long, and where it writes.

    Attributes:
        torch_profiler_dir: a directory, or a URI of fsspec such as s3://bucket/traces.
        delay_iterations: steps before the first that is recorded.
        max_iterations: steps that are recorded; 0: as many as `max_seconds` allows.
        max_seconds: time after which a profile ends by itself; not in vLLM.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    profiler: Literal["torch"]
    torch_profiler_dir: Annotated[str, Field(min_length=1)]
    torch_profiler_with_stack: bool = True
    torch_profiler_record_shapes: bool = False
    torch_profiler_with_memory: bool = False
    torch_profiler_with_flops: bool = False
    torch_profiler_use_gzip: bool = True
    delay_iterations: Annotated[int, Field(ge=0, le=1 << 31)] = 0
    max_iterations: Annotated[int, Field(ge=0, le=1 << 20)] = 200
    max_seconds: Annotated[float, Field(gt=0, le=3600)] = 60.0


_OPTIONAL = tuple(ProfilerConfig.model_fields)[2:]


def _check(value: dict[str, Any]) -> dict[str, Any]:
    if value:
        try:
            ProfilerConfig.model_validate(value)
        except ValidationError as error:
            raise ValueError("it has other keys or values than the profiler's") from error
    return value


ProfilerOption = Annotated[
    JsonObject,
    AfterValidator(_check),
    WithJsonSchema(
        {"accepts": f'a JSON object with "profiler": "torch", torch_profiler_dir, and perhaps {", ".join(_OPTIONAL)}'}
    ),
]
