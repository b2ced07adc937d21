"""Compiles grammars in worker processes of `GrammarChecker`, so that only grammars that compile reach the engine."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llguidance.gbnf_to_lark import any_to_lark

from quire.engine.client.grammar import CLIENT_GRAMMAR, GrammarError, GrammarTokens
from quire.parsing.grammar_depth import rules_depth, schema_depth

MAX_DEPTH = 256  # of nesting and references
MAX_COMPILED = 32 << 20  # bytes of a compiled grammar


@dataclass(frozen=True, slots=True)
class CompilationResult:
    """A grammar that compiles.

    Attributes:
        text: the text that the engine compiles; None if it is the given text.
        size: bytes that it takes when it is compiled.
    """

    text: str | None
    size: int


def worker(folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> Callable[[str | None], Any]:
    """The function of a worker process: it checks a grammar; for None it returns the ids of special tokens by text.

    Raises:
        GrammarError: the model does not support grammars.
    """
    tokens = GrammarTokens(folder, vocab_size, eos_token_ids)
    return lambda grammar: tokens.special if grammar is None else check(tokens, grammar)


def check(tokens: GrammarTokens, grammar: str) -> CompilationResult:
    """Compile a grammar.

    Raises:
        GrammarError: it is not valid, or too expensive.
    """
    complete = complete_grammar(grammar)
    before = _used_memory()
    matcher = tokens.matcher(complete)
    size = max(_used_memory() - before, len(complete))
    del matcher
    if size > MAX_COMPILED:
        raise GrammarError(f"it takes {size >> 20} MiB when it is compiled; at most {MAX_COMPILED >> 20} are allowed")
    return CompilationResult(None if complete is grammar else complete, size)


def complete_grammar(grammar: str) -> str:
    """A grammar with all of its parts in llguidance's format, none of them too deep.

    Raises:
        GrammarError: a part cannot be read, or is too deep.
    """
    parts = json.loads(grammar)["grammars"]
    changed = False
    for part in parts:
        if CLIENT_GRAMMAR in part:
            part["lark_grammar"] = _lark(part.pop(CLIENT_GRAMMAR))
            changed = True
        _check_depth(max(rules_depth(part.get("lark_grammar", "")), schema_depth(part.get("json_schema"))))
    return json.dumps({"grammars": parts}, ensure_ascii=False) if changed else grammar


def _check_depth(depth: int) -> None:
    if depth > MAX_DEPTH:
        raise GrammarError(f"its nesting and references are {depth} levels deep; at most {MAX_DEPTH} are allowed")


def _lark(text: str) -> str:
    """A client's Lark or GBNF grammar, as Lark."""
    _check_depth(rules_depth(text))
    try:
        return any_to_lark(text)
    except IndexError as error:
        raise GrammarError("the GBNF grammar ends in the middle of an escape sequence") from error
    except RecursionError as error:
        raise GrammarError("the GBNF grammar is nested too deeply") from error
    except MemoryError:
        raise
    except Exception as error:  # of this type if, for example, a rule does not exist
        raise GrammarError(f"the GBNF grammar is not valid: {error}") from error


class _Mallinfo2(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    ]


def _used_memory() -> int:
    """Bytes that are allocated at this moment; 0 where the C library does not tell."""
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return 0
    mallinfo2.restype = _Mallinfo2
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)
