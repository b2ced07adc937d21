"""Sums and differences of numbers of up to two digits, with scratch steps digit by digit."""

from __future__ import annotations

import re
from random import Random

from training.books import phrase_book
from training.generators.compose import expand, fresh
from training.generators.turn import Turn
from training.grammar import draw, fill
from training.noise import disturb

ONES = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
]  # fmt: skip
TENS = ["_", "_", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
HELDOUT_SHARE = 7
WORD_RATE = 0.1
WHOLE_RATE = 0.35  # of whole sums in tables
# Between words a minus would read as a hyphen: sixty-six.
HYPHEN = re.compile(r"\}\s*[-–]\s*\{")
# How often a phrase is one of those written out; the others are composed of frames and contents.
WRITTEN = 0.35
SHAPES = {"np": 5, "do": 2.5, "clause": 1, "ask": 2.5}


def in_words(number: int) -> str:
    """27 as twenty-seven; for 0 to 99."""
    if number < 20:
        return ONES[number]
    tens, ones = divmod(number, 10)
    return TENS[tens] + (f"-{ONES[ones]}" if ones else "")


def is_heldout(a: int, b: int) -> bool:
    """Pairs of numbers which only the evaluation uses (one in seven of those above nine)."""
    return max(a, b) > 9 and (a * 101 + b * 37 + a * b) % HELDOUT_SHARE == 3


def steps(a: int, b: int, minus: bool) -> str:
    """The scratch steps, ending in the result."""
    if not minus:
        return f"{a}+{b}: {_add_steps(a, b)} -> {a + b}"
    if a < b:
        return f"{a}-{b}: {a}<{b}, {b}-{a}: {_sub_steps(b, a)} -> {a - b}"
    return f"{a}-{b}: {_sub_steps(a, b)} -> {a - b}"


def _add_steps(a: int, b: int) -> str:
    low = a % 10 + b % 10
    text = f"{a % 10}+{b % 10}={low}"
    if a < 10 and b < 10:
        return text
    carry = low // 10
    high = a // 10 + b // 10 + carry
    return f"{text}, {a // 10}+{b // 10}{'+1' if carry else ''}={high}"


def _sub_steps(a: int, b: int) -> str:
    borrow = a % 10 < b % 10
    low = a % 10 + (10 if borrow else 0)
    text = f"{low}-{b % 10}={low - b % 10}"
    if a < 10:
        return text
    high = a // 10 - b // 10 - borrow
    return f"{text}, {a // 10}-{b // 10}{'-1' if borrow else ''}={high}"


def table_rows(rng: Random) -> list[tuple[str, str]]:
    """Sums and differences of digits, each cut behind its equals sign, and whole scratch steps."""
    rows = []
    for _ in range(rng.randint(10, 24)):
        if rng.random() < WHOLE_RATE:
            head, _, rest = steps(*draw_pair(rng, "train"), minus=rng.random() < 0.65).partition(":")
            rows.append((f"{head}:", rest))
            continue
        a, b, carry = rng.randint(0, 9), rng.randint(0, 9), rng.random() < 0.3
        if rng.random() < 0.5:
            rows.append((f"{a}+{b}{'+1' if carry else ''}=", f"{a + b + carry}"))
            continue
        a, b = (max(a, b), min(a, b)) if carry or rng.random() < 0.5 else (a, b)
        if carry and a > b:
            rows.append((f"{a}-{b}-1=", f"{a - b - 1}"))
        else:
            a += 10 if a < b else 0
            rows.append((f"{a}-{b}=", f"{a - b}"))
    return rows


def draw_pair(rng: Random, split: str) -> tuple[int, int]:
    """Two numbers of the split."""
    while True:
        top_a, top_b = rng.choice((9, 99, 99, 99)), rng.choice((9, 99, 99, 99))
        a, b = rng.randint(0, top_a), rng.randint(0, top_b)
        if is_heldout(a, b) == (split == "heldout"):
            return a, b


def composed(rng: Random, section: str) -> str:
    """A request of a section of ``sums.toml`` with the slots of the numbers left; none of the evaluation's."""
    return fresh(lambda: _compose(rng, section), "arithmetic")


def _compose(rng: Random, section: str) -> str:
    book = phrase_book("sums")
    shape = rng.choices(list(SHAPES), list(SHAPES.values()))[0]
    content = rng.choice(book[section][shape])
    frame = "{ask}" if shape == "ask" else rng.choice(book["frames"][shape])
    return expand(frame, {**book["words"], shape: [content]}, rng)


def arithmetic_turn(rng: Random, split: str = "train", minus: bool | None = None) -> Turn:
    """A sum or a difference."""
    if minus is None:
        minus = rng.random() < 0.52
    a, b = draw_pair(rng, split)
    book = phrase_book("arithmetic")
    reversed_order = minus and rng.random() < 0.3
    section = "sub_reversed" if reversed_order else "sub" if minus else "add"
    if split == "train" and rng.random() >= WRITTEN:
        phrase = disturb(composed(rng, "sub" if minus else "add"), rng)
    else:
        phrase = disturb(draw(rng.choice(book[section][split]), rng), rng, split)
    spell = rng.random() < WORD_RATE and (split != "train" or not HYPHEN.search(phrase))
    user = fill(phrase, {"a": in_words(a) if spell else str(a), "b": in_words(b) if spell else str(b)})
    result = a - b if minus else a + b
    reply = f"{a} {'-' if minus else '+'} {b} = {result}."
    return Turn("arithmetic", user, reply, steps(a, b, minus), expect={"result": result, "minus": minus})


def unsupported_turn(rng: Random, split: str = "train") -> Turn:
    """Arithmetic beyond the model: it says what it can do."""
    if split == "train" and rng.random() >= WRITTEN:
        phrase = disturb(composed(rng, "unsupported"), rng)
    else:
        phrase = disturb(draw(rng.choice(phrase_book("arithmetic")["unsupported"][split]), rng), rng, split)
    numbers = {"a": rng.randint(2, 99), "b": rng.randint(2, 99), "c": rng.randint(1, 99),
               "big": rng.choice((100, 1000, 10000)) * rng.randint(1, 9) + rng.randint(0, 99),
               "big2": rng.randint(100, rng.choice((999, 99999)))}  # fmt: skip
    user = fill(phrase, {name: str(number) for name, number in numbers.items()})
    return Turn("unsupported_arithmetic", user, phrase_book("fallback")["answers"]["arithmetic"])
