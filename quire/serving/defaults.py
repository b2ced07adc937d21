"""Sampling defaults and end-of-sequence tokens from a model's own files."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationError

from quire.engine.client.json_file import read_json
from quire.engine.client.sampling_params import SamplingNumbers
from quire.multimodal.errors import ModelFileError
from quire.protocol.sampling import ModelDefaultFields
from quire.rendering.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class _GenerationConfig(ModelDefaultFields):
    """The fields of generation_config.json that are used, with the same bounds as in requests."""

    model_config = ConfigDict(allow_inf_nan=False)

    max_new_tokens: Annotated[int, Field(ge=1)] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """Values of fields that a request leaves out."""

    eos_token_ids: tuple[int, ...]
    numbers: SamplingNumbers
    max_tokens: int | None = None

    def known_eos_token_ids(self, vocab_size: int) -> tuple[int, ...]:
        """Return the end-of-sequence tokens that are in the vocabulary."""
        return tuple(token for token in self.eos_token_ids if token < vocab_size)


def check_overrides(overrides: dict[str, Any]) -> str | None:
    """What is wrong with the values of --override-generation-config; None if nothing is."""
    known = _GenerationConfig.model_fields
    for name in overrides:
        if name not in known:
            return f"the keys {', '.join(known)}, not {name!r}"
    try:
        _GenerationConfig.model_validate(overrides)
    except ValidationError as error:
        problem = error.errors()[0]
        return f"valid values: {problem['loc'][0]}: {problem['msg']}"
    return None


def read_defaults(
    folder: Path,
    tokenizer: Tokenizer,
    mode: Literal["auto", "none"],
    overrides: Mapping[str, Any] = MappingProxyType({}),
    hf_overrides: Mapping[str, Any] = MappingProxyType({}),
) -> GenerationDefaults:
    """Read generation_config.json; in mode `none` only its end-of-sequence tokens are used.

    Args:
        folder: the model's directory.
        tokenizer: the model's tokenizer.
        mode: value of --generation-config.
        overrides: values that `check_overrides` has accepted; they replace those of the file.
        hf_overrides: values that replace those of config.json.

    Raises:
        ModelFileError: the file cannot be read.
    """
    generation = read_json(folder / "generation_config.json", ModelFileError)
    config = {**read_json(folder / "config.json", ModelFileError), **hf_overrides}
    eos_ids = generation.get("eos_token_id")
    if eos_ids is None:
        text_config = config.get("text_config")
        eos_ids = config.get("eos_token_id", text_config.get("eos_token_id") if isinstance(text_config, dict) else None)
    ids = [*_as_list(eos_ids), tokenizer.token_id(tokenizer.special.get("eos_token", ""))]
    eos = tuple(dict.fromkeys(token for token in ids if token is not None))
    values = _within_bounds(generation) if mode == "auto" else {}
    if mode == "auto" and generation.get("do_sample") is False:  # explicitly
        values["temperature"] = 0.0
    values |= {name: value for name, value in overrides.items() if value is not None}
    max_tokens = values.pop("max_new_tokens", None)
    return GenerationDefaults(eos_token_ids=eos, numbers=SamplingNumbers(**values), max_tokens=max_tokens)


def _within_bounds(values: dict[str, Any]) -> dict[str, Any]:
    """The valid sampling defaults. A value that would be refused in a request is ignored with a warning."""
    known = {name: values[name] for name in _GenerationConfig.model_fields if values.get(name) is not None}
    while True:
        try:
            return _GenerationConfig.model_validate(known).model_dump(exclude_none=True)
        except ValidationError as error:
            for name in {str(problem["loc"][0]) for problem in error.errors()}:
                logger.warning("generation_config.json: ignored %s=%r: out of range", name, known.pop(name))


def _as_list(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [entry for entry in values if type(entry) is int and entry >= 0]
