"""Token ids in requests."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, GetCoreSchemaHandler, GetPydanticSchema
from pydantic_core import CoreSchema, core_schema

_List = Annotated[list[Annotated[int, Field(ge=0, lt=1 << 31)]], Field(fail_fast=True)]


def _validate(value: Any, validate_list: Callable[[Any], list[int]]) -> NDArray[np.int32]:
    if isinstance(value, np.ndarray):  # of a request that is translated into another one
        return value
    if isinstance(value, list) and value:
        try:
            ids = np.frombuffer(array("i", value), np.int32)
        except (TypeError, OverflowError):
            pass  # converted or refused below, as pydantic does it
        else:
            if int(ids.min()) >= 0:
                return ids
    return np.array(validate_list(value), np.int32)


def _schema(_source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
    return core_schema.no_info_wrap_validator_function(
        _validate,
        handler.generate_schema(_List),
        serialization=core_schema.plain_serializer_function_ser_schema(np.ndarray.tolist),
    )


# 1-D int32. As a list, ids would need nine times the memory, and each conversion of a million of them 50 ms.
TokenIds = Annotated[NDArray[np.int32], GetPydanticSchema(_schema)]
