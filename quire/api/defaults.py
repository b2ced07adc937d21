"""What a model's own files say about sampling: defaults and end-of-sequence tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from quire.multimodal.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """Values for fields that a request leaves out."""

    eos_token_ids: tuple[int, ...]
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None


def read_defaults(folder: Path, tokenizer: Tokenizer, mode: Literal["auto", "none"]) -> GenerationDefaults:
    """Read generation_config.json; under mode `none` only its end-of-sequence tokens."""
    given = _read(folder / "generation_config.json")
    config = _read(folder / "config.json")
    ends = given.get("eos_token_id")
    if ends is None:
        ends = config.get("eos_token_id", (config.get("text_config") or {}).get("eos_token_id"))
    ids = [*_as_list(ends), tokenizer.token_id(tokenizer.special.get("eos_token", ""))]
    eos = tuple(dict.fromkeys(token for token in ids if token is not None))
    if mode == "none":
        return GenerationDefaults(eos_token_ids=eos)
    values: dict[str, Any] = {
        name: kind(given[name])
        for name, kind in (
            ("temperature", float),
            ("top_p", float),
            ("top_k", int),
            ("min_p", float),
            ("repetition_penalty", float),
        )
        if given.get(name) is not None
    }
    if given.get("do_sample") is False:  # said, not just left out
        values["temperature"] = 0.0
    return GenerationDefaults(eos_token_ids=eos, max_tokens=given.get("max_new_tokens"), **values)


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {}


def _as_list(value: Any) -> list[int]:
    return value if isinstance(value, list) else [] if value is None else [value]
