"""The characters that stand for bytes in byte-level BPE (Radford et al. 2019)."""

from __future__ import annotations

from functools import lru_cache


@lru_cache(maxsize=1)
def byte_letters() -> tuple[str, ...]:
    """The character of each byte: printable bytes are themselves, others are characters from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return tuple(chr(byte if byte in printable else next(others)) for byte in range(0x100))


@lru_cache(maxsize=1)
def bytes_of_letters() -> dict[str, int]:
    """Bytes by their characters."""
    return {letter: byte for byte, letter in enumerate(byte_letters())}
