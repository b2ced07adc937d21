"""The tables of other servers' flags: `vllm.toml`, `llama_server.toml` and `ollama.toml` beside this file."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

Kind = Literal["same", "translated", "ignored", "refused"]
Server = Literal["vllm", "llama_server", "ollama"]
_KINDS: tuple[Kind, ...] = ("same", "translated", "ignored", "refused")


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherServerFlag:
    """A flag of another server.

    A row of a table has the names of flags that are treated alike under their kind, and the other attributes by name.

    Attributes:
        names: names with their leading dashes; short names last.
        kind: same: Quire has it; translated: Quire has it under another name, or with other values; ignored: it is
            accepted without effect; refused: Quire has no such setting, or it must be set in another way.
        ours: Quire's flag; empty if there is none.
        note: the reason why it has no effect or is refused, or the difference.
        switch: it takes no value, and may be negated with `--no-`.
        several: it takes several values, one after the other, which Quire's takes one by one.
        values: values that have another name in Quire.
        only: accepted values, which have no effect; other values are refused. Empty: all values are accepted.
    """

    names: tuple[str, ...]
    kind: Kind
    ours: str = ""
    note: str = ""
    switch: bool = False
    several: bool = False
    values: Mapping[str, str] = field(default_factory=dict)
    only: tuple[str, ...] = ()


@cache
def flags_of(server: Server) -> tuple[OtherServerFlag, ...]:
    """Return the flags of a server, in the order of its table."""
    table = tomllib.loads((Path(__file__).parent / f"{server}.toml").read_text(encoding="utf-8"))
    return tuple(flag for row in table["rows"] for flag in _flags(row))


def _flags(row: dict[str, Any]) -> Iterator[OtherServerFlag]:
    (kind,) = (kind for kind in _KINDS if kind in row)
    for name in row.pop(kind).split():
        names = tuple(name.split("|"))
        settings = {**row, "ours": names[0]} if kind == "same" else row
        yield OtherServerFlag(names=names, kind=kind, **{**settings, "only": tuple(settings.get("only", ()))})
