"""The page docs/flags-of-other-servers.md: `python -m quire.config.other_servers.page > FILE`."""

from __future__ import annotations

from collections.abc import Sequence

from quire.config.other_servers.table import OtherServerFlag, flags_of
from quire.config.other_servers.variables import VARIABLES

_HEAD = """# Flags of other servers

`quire serve` accepts vLLM's flags: after `vllm` is replaced by `quire`, most command lines work as they are. A
flag that Quire has under another name, or with other names of values, is translated; a flag that is not needed is
accepted. For each of these flags one line in the log says so. Any other flag is refused, with the name of Quire's
flag for it if there is one. Underscores may be written for dashes. The keys of a JSON object may be given one by one:
`--hf-overrides.a.b 1` is `--hf-overrides '{"a": {"b": 1}}'`, and `--flag.list+ x,y` appends to a list.

Of vLLM's environment variables, those in the first table are obeyed if nothing else sets Quire's setting. All others
that are set are named in a warning at start, as they have no effect.

Of llama-server, the flags that name a model are translated. The others, of which many have other units, are refused
with the name of Quire's flag. For ollama, the table has the environment variables of `ollama serve` and the lines of a
Modelfile. All flags of Quire are in [settings](configuration.md).

This page is written by `python -m quire.config.other_servers.page`; a test keeps it up to date.
"""


def page() -> str:
    """The text of docs/flags-of-other-servers.md."""
    tables = (
        ("vLLM", "flag of `vllm serve`", flags_of("vllm")),
        ("llama-server", "flag of `llama-server`", flags_of("llama_server")),
        ("ollama", "variable or parameter of ollama", flags_of("ollama")),
    )
    sections = [_section(title, column, flags) for title, column, flags in tables]
    return "\n".join([_HEAD, _variables(), *sections])


def _variables() -> str:
    rows = [
        f"| `{name}` | `--{variable.field.replace('_', '-')}` | {variable.note} |"
        for name, variable in VARIABLES.items()
    ]
    return "\n".join(["## Variables of vLLM", "", "| variable | Quire's | |", "|---|---|---|", *rows, ""])


def _section(title: str, column: str, flags: Sequence[OtherServerFlag]) -> str:
    rows = [_row(flag, accepted=title != "ollama") for flag in flags]
    return "\n".join([f"## {title}", "", f"| {column} | Quire's | |", "|---|---|---|", *rows, ""])


def _row(flag: OtherServerFlag, *, accepted: bool) -> str:
    names = ", ".join(f"`{name}`" for name in flag.names)
    cells = [names, f"`{flag.ours}`" if flag.ours else "", "; ".join(_remarks(flag, accepted=accepted))]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _remarks(flag: OtherServerFlag, *, accepted: bool) -> list[str]:
    remarks = []
    if flag.kind == "ignored":
        values = " or ".join(f"`{value}`" for value in flag.only)
        remarks.append(f"accepted with {values}, refused with other values" if flag.only else "accepted without effect")
    elif flag.kind == "refused" and accepted:
        remarks.append("refused")
    remarks += [f"`{other_value}` is `{value}`" for other_value, value in flag.values.items()]
    return [*remarks, flag.note] if flag.note else remarks


if __name__ == "__main__":
    print(page(), end="")  # noqa: T201 writes the page
