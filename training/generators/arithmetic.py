"""Sums and differences of numbers of up to two digits, with scratch steps digit by digit."""

from __future__ import annotations

import re
from random import Random

from training.books import phrase_book
from training.generators.compose import draw_not_heldout, expand
from training.generators.turn import Turn
from training.grammar import draw, fill
from training.noise import add_noise

ONES = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
]  # fmt: skip
TENS = ["_", "_", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
HELDOUT_MODULUS = 7
WORD_RATE = 0.1
COMPLETE_STEPS_RATE = 0.35  # of complete scratch steps in tables
# Between number words a minus sign would look like a hyphen: sixty-six.
HYPHEN = re.compile(r"\}\s*[-–]\s*\{")
# Share of hand-written phrases; the others are composed of templates and contents.
LISTED_RATE = 0.35
TEMPLATE_WEIGHTS = {"np": 5, "do": 2.5, "clause": 1, "ask": 2.5}


def in_words(number: int) -> str:
    """Spell out a number from 0 to 99: twenty-seven for 27."""
    if number < 20:
        return ONES[number]
    tens, ones = divmod(number, 10)
    return TENS[tens] + (f"-{ONES[ones]}" if ones else "")


def is_heldout(a: int, b: int) -> bool:
    """Whether only the evaluation uses this pair of numbers (one in seven of the pairs with a number above nine)."""
    return max(a, b) > 9 and (a * 101 + b * 37 + a * b) % HELDOUT_MODULUS == 3


def steps(a: int, b: int, minus: bool) -> str:
    """Return the scratch steps, which end with the result."""
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
    """Return rows of (question, result): sums and differences of digits, and complete scratch steps."""
    rows = []
    for _ in range(rng.randint(10, 24)):
        if rng.random() < COMPLETE_STEPS_RATE:
            head, _, answer = steps(*draw_pair(rng, "train"), minus=rng.random() < 0.65).partition(":")
            rows.append((f"{head}:", answer))
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
    """Draw two numbers of the split."""
    while True:
        top_a, top_b = rng.choice((9, 99, 99, 99)), rng.choice((9, 99, 99, 99))
        a, b = rng.randint(0, top_a), rng.randint(0, top_b)
        if is_heldout(a, b) == (split == "heldout"):
            return a, b


def composed_request(rng: Random, section: str) -> str:
    """Return a request of a section of ``sums.toml``, not a held-out one; the slots of the numbers are not filled."""
    return draw_not_heldout(lambda: _compose(rng, section), "arithmetic")


def _compose(rng: Random, section: str) -> str:
    book = phrase_book("sums")
    template_kind = rng.choices(list(TEMPLATE_WEIGHTS), list(TEMPLATE_WEIGHTS.values()))[0]
    content = rng.choice(book[section][template_kind])
    frame = "{ask}" if template_kind == "ask" else rng.choice(book["frames"][template_kind])
    return expand(frame, {**book["words"], template_kind: [content]}, rng)


def arithmetic_turn(rng: Random, split: str = "train", minus: bool | None = None) -> Turn:
    """Return a turn about a sum or a difference."""
    if minus is None:
        minus = rng.random() < 0.52
    a, b = draw_pair(rng, split)
    book = phrase_book("arithmetic")
    reversed_order = minus and rng.random() < 0.3
    section = "sub_reversed" if reversed_order else "sub" if minus else "add"
    if split == "train" and rng.random() >= LISTED_RATE:
        phrase = add_noise(composed_request(rng, "sub" if minus else "add"), rng)
    else:
        phrase = add_noise(draw(rng.choice(book[section][split]), rng), rng, split)
    spelled_out = rng.random() < WORD_RATE and (split != "train" or not HYPHEN.search(phrase))
    user = fill(phrase, {"a": in_words(a) if spelled_out else str(a), "b": in_words(b) if spelled_out else str(b)})
    result = a - b if minus else a + b
    reply = f"{a} {'-' if minus else '+'} {b} = {result}."
    return Turn("arithmetic", user, reply, steps(a, b, minus), expect={"result": result, "minus": minus})


def unsupported_turn(rng: Random, split: str = "train") -> Turn:
    """Return a turn with unsupported arithmetic; the reply says what the model can do."""
    if split == "train" and rng.random() >= LISTED_RATE:
        phrase = add_noise(composed_request(rng, "unsupported"), rng)
    else:
        phrase = add_noise(draw(rng.choice(phrase_book("arithmetic")["unsupported"][split]), rng), rng, split)
    numbers = {"a": rng.randint(2, 99), "b": rng.randint(2, 99), "c": rng.randint(1, 99),
               "big": rng.choice((100, 1000, 10000)) * rng.randint(1, 9) + rng.randint(0, 99),
               "big2": rng.randint(100, rng.choice((999, 99999)))}  # fmt: skip
    user = fill(phrase, {name: str(number) for name, number in numbers.items()})
    return Turn("unsupported_arithmetic", user, phrase_book("fallback")["answers"]["arithmetic"])
