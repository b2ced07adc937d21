"""The tokenizer of quire-nano: byte-level BPE in which a word has the same pieces wherever it stands.

Copying names and arguments is what a small model finds hard, so spelling must not depend on the place: pieces are
learnt on words without their leading space, and merging the space with the first piece of a word comes after all
other merges. A capitalised word never takes the space in, and digits stand alone.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Any

import regex
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from training.chat import END, render_prompt, render_reply
from training.generators.session import THEMES, make_conversation

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<tools>",
    "</tools>",
)
SPACE = "Ġ"
PUNCTUATION = r" ?[^\s\p{L}\p{N}]+(?: [^\s\p{L}\p{N}]+)*"
REST = rf"\p{{N}}|'(?:s|m|re|ve|ll|d|t)\b|{PUNCTUATION}| *\n+|\s+"
LEARNING = rf"\p{{L}}+|{REST}"
READING = rf" ?\p{{L}}+|{REST}"
SAMPLES = 20_000
ROUND_TO = 64


def _pre_tokenizer(pattern: str) -> Any:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level])


def sample_texts(seed: int, count: int = SAMPLES) -> list[str]:
    """Texts to learn the tokenizer on."""
    rng = Random(f"tokens-{seed}")
    texts = []
    for _ in range(count):
        conversation = make_conversation(rng.choice(list(THEMES)), rng)
        prompt = render_prompt(conversation.messages[:-1], conversation.tools)
        texts.append(prompt + render_reply(conversation.messages[-1], conversation.think) + END)
    return texts


def _learn_pieces(texts: list[str], pieces: int) -> list[tuple[str, str]]:
    """Merges inside words and marks.

    Frequent words count less than their share, so that rare spellings have pieces too.
    """
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(regex.findall(LEARNING, _without_marks(text)))

    def weighted() -> Iterable[str]:
        for word, count in sorted(counts.items()):
            yield from [word] * max(1, round(count**0.8))

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = _pre_tokenizer(LEARNING)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=pieces, initial_alphabet=alphabet, show_progress=False, min_frequency=4)
    tokenizer.train_from_iterator(weighted(), trainer)
    return [(left, right) for left, right in json.loads(tokenizer.to_str())["model"]["merges"]]


def _without_marks(text: str) -> str:
    for mark in (*SPECIAL, *MARKS):
        text = text.replace(mark, "\n")
    return text


def _spaced_starts(texts: list[str], merges: list[tuple[str, str]], count: int) -> list[str]:
    """The most frequent first pieces of lower-case words after a space."""
    plain = _assemble(merges, READING)
    starts: Counter[str] = Counter()
    words: Counter[str] = Counter()
    for text in texts:
        words.update(regex.findall(r"(?<= )\p{Ll}+", _without_marks(text)))
    for word, number in sorted(words.items()):
        starts[plain.encode(word).tokens[0]] += number
    ranked = sorted(starts.items(), key=lambda item: (-item[1], item[0]))
    return [piece for piece, _ in ranked[:count]]


def _assemble(merges: list[tuple[str, str]], pattern: str) -> Tokenizer:
    vocabulary: dict[str, int] = {}
    for token in [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(left + right for left, right in merges)]:
        vocabulary.setdefault(token, len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = _pre_tokenizer(pattern)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def build_tokenizer(seed: int, pieces: int, spaced: int) -> Tokenizer:
    """Learns the tokenizer: ``pieces`` base tokens, and ``spaced`` of them also with a leading space."""
    texts = sample_texts(seed)
    merges = _learn_pieces(texts, pieces)
    known = {left + right for left, right in merges}
    merges += [(SPACE, piece) for piece in _spaced_starts(texts, merges, spaced) if SPACE + piece not in known]
    tokenizer = _assemble(merges, READING)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKS])
    return tokenizer


def with_fewer_merges(tokenizer: Tokenizer, share: float, rng: Random) -> Tokenizer:
    """The tokenizer without a share of its merges, drawn at random: the same ids, words in other pieces."""
    state = json.loads(tokenizer.to_str())
    state["model"]["merges"] = [merge for merge in state["model"]["merges"] if rng.random() >= share]
    return Tokenizer.from_str(json.dumps(state))


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that the tokenizer must have."""
    number = tokenizer.token_to_id(token)
    if number is None:
        raise KeyError(f"the tokenizer has no token {token!r}")
    return number


def padded_size(tokenizer: Tokenizer) -> int:
    """Rows of the embedding: the vocabulary rounded up."""
    size = tokenizer.get_vocab_size()
    return (size + ROUND_TO - 1) // ROUND_TO * ROUND_TO


def load_or_build(path: Path, seed: int, pieces: int, spaced: int) -> Tokenizer:
    """The tokenizer at ``path``, learnt first if it is not there."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        build_tokenizer(seed, pieces, spaced).save(str(path))
    return Tokenizer.from_file(str(path))
