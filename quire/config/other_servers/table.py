"""The form of the tables of other servers' flags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["same", "translated_to", "ignored", "refused"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherServerFlag:
    """A flag of another server, or several flags that are treated alike.

    Attributes:
        names: names with their leading dashes; short names last.
        kind: same: Quire has it; translated_to: Quire has it under another name, or with other values; ignored: it is
            accepted without effect; refused: Quire has no such setting, or it must be set in another way.
        ours: Quire's flag; empty if there is none.
        note: the reason why it has no effect or is refused, or the difference.
        switch: it takes no value, and may be negated with `--no-`.
        values: values that have another name in Quire.
        only: accepted values, which have no effect; other values are refused. Empty: all values are accepted.
    """

    names: tuple[str, ...]
    kind: Kind
    ours: str = ""
    note: str = ""
    switch: bool = False
    values: Mapping[str, str] = field(default_factory=dict)
    only: tuple[str, ...] = ()


def same(*names: str) -> list[OtherServerFlag]:
    """Flags that Quire has as well."""
    return [OtherServerFlag(names=(name,), kind="same", ours=name) for name in names]


def translated_to(
    names: str, ours: str, note: str = "", *, switch: bool = False, values: Mapping[str, str] | None = None
) -> OtherServerFlag:
    """A flag that has another name, or values of other names, in Quire."""
    return OtherServerFlag(
        names=tuple(names.split()), kind="translated_to", ours=ours, note=note, switch=switch, values=values or {}
    )


def ignored(names: str, note: str, *, only: Sequence[str] = (), ours: str = "") -> list[OtherServerFlag]:
    """Flags with a value that are accepted without effect; each is an entry, short names follow the name in `|`."""
    return [
        OtherServerFlag(names=tuple(name.split("|")), kind="ignored", note=note, only=tuple(only), ours=ours)
        for name in names.split()
    ]


def ignored_switch(names: str, note: str, ours: str = "") -> list[OtherServerFlag]:
    """Flags without a value that are accepted without effect."""
    return [
        OtherServerFlag(names=tuple(name.split("|")), kind="ignored", note=note, switch=True, ours=ours)
        for name in names.split()
    ]


def refused(names: str, note: str, ours: str = "") -> list[OtherServerFlag]:
    """Flags that are refused; each is an entry."""
    return [
        OtherServerFlag(names=tuple(name.split("|")), kind="refused", note=note, ours=ours) for name in names.split()
    ]
