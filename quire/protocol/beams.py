"""Fields of beam search."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from quire.protocol.common import ChatAndCompletionFields, field_error


class BeamFields(ChatAndCompletionFields):
    """Beam search instead of sampling: returns the `n` most likely of the answers found with `n` beams."""

    use_beam_search: bool = Field(False, description="search for the most likely answers, with `n` beams")
    length_penalty: Annotated[float, Field(ge=-10, le=10)] = Field(
        1.0, description="answers are ranked by their log-probability divided by their length to this power"
    )

    @model_validator(mode="after")
    def _check_beams(self) -> Self:
        if self.use_beam_search and self.stream:
            raise field_error("use_beam_search", "`use_beam_search` is not available when `stream=True`.")
        if self.length_penalty != 1 and not self.use_beam_search:
            raise field_error("length_penalty", "`length_penalty` requires `use_beam_search`.")
        return self
