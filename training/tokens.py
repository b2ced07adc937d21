"""The tokenizer of quire-nano: byte-level BPE in which a word has the same tokens in any context.

Copying names and arguments is hard for a small model, so the tokens of a word must not depend on its context. Merges
are trained on words without their leading space. Merging the space with the first token of a word comes after all
other merges. A space is never merged with a capitalised word, and each digit is one token.
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

from training.chat import END_OF_TURN, render_prompt, render_reply
from training.generators.conversations import THEMES, make_conversation

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = (
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
TRAIN_PATTERN = rf"\p{{L}}+|{REST}"
ENCODE_PATTERN = rf" ?\p{{L}}+|{REST}"
SAMPLES = 20_000
VOCAB_MULTIPLE = 64


def _pre_tokenizer(pattern: str) -> Any:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level])


def sample_texts(seed: int, count: int = SAMPLES) -> list[str]:
    """Return texts to train the tokenizer on."""
    rng = Random(f"tokens-{seed}")
    texts = []
    for _ in range(count):
        conversation = make_conversation(rng.choice(list(THEMES)), rng)
        prompt = render_prompt(conversation.messages[:-1], conversation.tools)
        texts.append(prompt + render_reply(conversation.messages[-1], conversation.think) + END_OF_TURN)
    return texts


def _train_merges(texts: list[str], pieces: int) -> list[tuple[str, str]]:
    """Train the merges within words and punctuation.

    Frequent words have a reduced weight, so that rare spellings get tokens too.
    """
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(regex.findall(TRAIN_PATTERN, _without_markers(text)))

    def weighted() -> Iterable[str]:
        for word, count in sorted(counts.items()):
            yield from [word] * max(1, round(count**0.8))

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = _pre_tokenizer(TRAIN_PATTERN)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=pieces, initial_alphabet=alphabet, show_progress=False, min_frequency=4)
    tokenizer.train_from_iterator(weighted(), trainer)
    return [(left, right) for left, right in json.loads(tokenizer.to_str())["model"]["merges"]]


def _without_markers(text: str) -> str:
    for marker in (*SPECIAL, *MARKERS):
        text = text.replace(marker, "\n")
    return text


def _frequent_first_tokens(texts: list[str], merges: list[tuple[str, str]], count: int) -> list[str]:
    """Return the most frequent first tokens of lower-case words after a space."""
    plain = _assemble(merges, ENCODE_PATTERN)
    starts: Counter[str] = Counter()
    words: Counter[str] = Counter()
    for text in texts:
        words.update(regex.findall(r"(?<= )\p{Ll}+", _without_markers(text)))
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
    """Train the tokenizer: ``pieces`` base tokens, and ``spaced`` of them also with a leading space."""
    texts = sample_texts(seed)
    merges = _train_merges(texts, pieces)
    known = {left + right for left, right in merges}
    merges += [(SPACE, piece) for piece in _frequent_first_tokens(texts, merges, spaced) if SPACE + piece not in known]
    tokenizer = _assemble(merges, ENCODE_PATTERN)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKERS])
    return tokenizer


def with_fewer_merges(tokenizer: Tokenizer, share: float, rng: Random) -> Tokenizer:
    """Return the tokenizer without a random share of its merges: same token ids, different segmentation."""
    state = json.loads(tokenizer.to_str())
    state["model"]["merges"] = [merge for merge in state["model"]["merges"] if rng.random() >= share]
    return Tokenizer.from_str(json.dumps(state))


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """Return the id of a token; raise KeyError if the tokenizer does not have it."""
    number = tokenizer.token_to_id(token)
    if number is None:
        raise KeyError(f"the tokenizer has no token {token!r}")
    return number


def padded_size(tokenizer: Tokenizer) -> int:
    """Return the rows of the embedding: the vocabulary size rounded up."""
    size = tokenizer.get_vocab_size()
    return (size + VOCAB_MULTIPLE - 1) // VOCAB_MULTIPLE * VOCAB_MULTIPLE


def load_or_build(path: Path, seed: int, pieces: int, spaced: int) -> Tokenizer:
    """Load the tokenizer at ``path``; train it first if the file does not exist."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        build_tokenizer(seed, pieces, spaced).save(str(path))
    return Tokenizer.from_file(str(path))
