"""The tokenizer of quire-nano-hear: byte-level BPE with single digits, whisper's special tokens, and timestamps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from training.hear.sentences import LANGUAGES

PRECISION = 0.02  # seconds of a step of the timestamps
END, START, PREVIOUS, NO_SPEECH = "<|endoftext|>", "<|startoftranscript|>", "<|startofprev|>", "<|nospeech|>"
TRANSCRIBE, NO_TIMESTAMPS = "<|transcribe|>", "<|notimestamps|>"
# There is no <|translate|>, so that a server refuses to translate.
SPECIAL = (END, START, *(f"<|{code}|>" for code in LANGUAGES), TRANSCRIBE, "<|startoflm|>", PREVIOUS, NO_SPEECH,
           NO_TIMESTAMPS)  # fmt: skip
_WORD = r" ?\p{L}+| ?\p{N}|[^\s\p{L}\p{N}]+|\s+"


def timestamps(seconds: float) -> list[str]:
    """The tokens of all times of a window."""
    return [f"<|{step * PRECISION:.2f}|>" for step in range(round(seconds / PRECISION) + 1)]


def build_tokenizer(texts: Iterable[str], size: int, seconds: float) -> Tokenizer:
    """Train a tokenizer of ``size`` text tokens. ``seconds``: length of the model's windows."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(_WORD), "removed", invert=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, min_frequency=2, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    counts = Counter(word for text in texts for word in f" {text}".replace(" ", "\n ").split("\n") if word)
    # Frequent words less often than they occur, so that rare ones get tokens too.
    words = (word for word, count in sorted(counts.items()) for _ in range(max(1, round(count**0.7))))
    tokenizer.train_from_iterator(words, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in timestamps(seconds)])
    return tokenizer


def load_or_build(path: Path, texts: Sequence[str], size: int, seconds: float) -> Tokenizer:
    """Load the tokenizer at ``path``; train it first if the file does not exist."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        build_tokenizer(texts, size, seconds).save(str(path))
    return Tokenizer.from_file(str(path))


class Ids:
    """The ids of the special tokens, and of texts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.end, self.start, self.previous, self.no_speech = map(self.of, (END, START, PREVIOUS, NO_SPEECH))
        self.transcribe, self.no_timestamps = self.of(TRANSCRIBE), self.of(NO_TIMESTAMPS)
        self.languages = {code: self.of(f"<|{code}|>") for code in LANGUAGES}
        self.first_time = self.no_timestamps + 1
        self.text_count = self.end  # text tokens come first

    def of(self, token: str) -> int:
        """The id of a special token."""
        token_id: int | None = self._tokenizer.token_to_id(token)
        if token_id is None:
            raise ValueError(f"the tokenizer has no token {token}")
        return token_id

    def text(self, text: str) -> list[int]:
        """The tokens of a text, with a leading space as whisper writes them."""
        ids: list[int] = self._tokenizer.encode(f" {text}", add_special_tokens=False).ids
        return ids

    def time(self, seconds: float) -> int:
        """The token of a time."""
        return self.first_time + round(seconds / PRECISION)
