"""Token ids are validated as pydantic validates a list of integers, but without a list."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, TypeAdapter, ValidationError

from quire.protocol.token_ids import TokenIds

AS_LIST: TypeAdapter[Any] = TypeAdapter(list[Annotated[int, Field(ge=0, lt=1 << 31)]])
AS_ARRAY: TypeAdapter[Any] = TypeAdapter(TokenIds)
ITEMS = st.integers(-1, 1 << 31) | st.integers(0, 9) | st.none() | st.floats() | st.text(max_size=2) | st.booleans()


@given(value=st.lists(st.integers(0, 9)) | st.lists(ITEMS, max_size=4) | ITEMS)
def test_the_same_values_are_valid(value: Any) -> None:
    try:
        expected = AS_LIST.validate_python(value)
    except ValidationError:
        with pytest.raises(ValidationError):
            AS_ARRAY.validate_python(value)
        return
    ids = AS_ARRAY.validate_python(value)
    assert ids.dtype == np.int32
    assert ids.tolist() == expected
    assert AS_ARRAY.validate_python(ids) is ids


def test_documentation_and_json_have_a_list() -> None:
    assert AS_ARRAY.json_schema() == AS_LIST.json_schema()
    assert AS_ARRAY.dump_json(AS_ARRAY.validate_python([1, 2])) == b"[1,2]"
