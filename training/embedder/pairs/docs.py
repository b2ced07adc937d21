"""Paragraphs of this repository's documentation, with their headings, with a sentence of them, and with keywords."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from random import Random
from zlib import crc32

from training.books import HERE
from training.embedder.pairs.pair import Pair, same
from training.embedder.pairs.wording import content_words

ROOT = HERE.parent
PATTERNS = (
    "README.md",
    "CHANGELOG.md",
    "docs/*.md",
    "docs/api/*.md",
    "docs/architecture/*.md",
    "docs/decisions/*.md",
    "benchmarks/README.md",
    "benchmarks/measured/*.md",
    "training/README.md",
)
HELDOUT_EVERY = 6
MIN_WORDS, MAX_WORDS = 8, 110
SENTENCE_END = re.compile(r"(?<=[.!?:;]) +(?=[A-Z`*])")


@dataclass(frozen=True)
class Paragraph:
    """A paragraph with the headings above it, and its sentences."""

    key: str
    headings: tuple[str, ...]
    sentences: tuple[str, ...]

    @property
    def text(self) -> str:
        """The whole paragraph."""
        return " ".join(self.sentences)


@cache
def paragraphs(split: str) -> tuple[Paragraph, ...]:
    """Return the paragraphs of the pages of a split; a page's name decides its split."""
    collected: list[Paragraph] = []
    for path in sorted(path for pattern in PATTERNS for path in ROOT.glob(pattern)):
        name = path.relative_to(ROOT).as_posix()
        if (crc32(name.encode()) % HELDOUT_EVERY == 0) == (split == "heldout"):
            collected += _paragraphs(name, path.read_text("utf-8"))
    return tuple(collected)


def _paragraphs(name: str, page: str) -> list[Paragraph]:
    collected: list[Paragraph] = []
    headings: list[str] = []
    page = re.sub(r"^(```.*?^```|    .*?$)", "", page, flags=re.MULTILINE | re.DOTALL)
    for block in re.split(r"\n\s*\n|\n(?=- |\|)", page):
        block = block.strip()
        if block.startswith("#"):
            level = len(block) - len(block.lstrip("#"))
            headings = [*headings[: level - 1], plain(block.lstrip("# ").split("\n")[0])]
            block = block.partition("\n")[2]
        if block.startswith("|"):
            continue  # rows of tables are mostly numbers
        text = plain(block)
        if MIN_WORDS <= len(text.split()) <= MAX_WORDS:
            collected.append(Paragraph(f"{name} {len(collected)}", tuple(headings), tuple(SENTENCE_END.split(text))))
    return collected


def plain(text: str) -> str:
    """Return Markdown as plain text in one line."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"\s+", " ", re.sub(r"[`*|]+|^- |-{3,}", " ", text)).strip()


def docs_pair(rng: Random, split: str) -> Pair:
    """Return a part of a paragraph, or its headings, and the paragraph."""
    paragraph = rng.choice(paragraphs(split))
    form = rng.random()
    if form < 0.25 and paragraph.headings:
        return same(": ".join(paragraph.headings[-2:]), paragraph.text, [f"docs {' '.join(paragraph.headings)}"])
    if form < 0.6 and len(paragraph.sentences) > 1:
        at = rng.randrange(len(paragraph.sentences))
        others = [sentence for place, sentence in enumerate(paragraph.sentences) if place != at]
        return same(paragraph.sentences[at], " ".join(others), [f"docs {' '.join(paragraph.headings)}", paragraph.key])
    words = content_words(paragraph.text)
    start = rng.randrange(max(1, len(words) - 8))
    chosen = rng.sample(words[start : start + 10], min(len(words[start : start + 10]), rng.randint(3, 5)))
    return Pair(" ".join(chosen), paragraph.text, frozenset(chosen), frozenset(words))


def docs_sentence(rng: Random, split: str) -> Pair:
    """Return a sentence of a paragraph and the rest of the paragraph."""
    longer = [paragraph for paragraph in paragraphs(split) if len(paragraph.sentences) > 1]
    paragraph = rng.choice(longer)
    at = rng.randrange(len(paragraph.sentences))
    others = " ".join(sentence for place, sentence in enumerate(paragraph.sentences) if place != at)
    return same(paragraph.sentences[at], others, [paragraph.key])
