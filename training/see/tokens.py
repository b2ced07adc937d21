"""The tokenizer of quire-nano-see: byte-level BPE in which each digit and each capital is a token of its own.

Words in pictures are in capitals, so reading one is naming its letters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from training.see.questions import ask, ask_without_picture
from training.see.recipe import Recipe
from training.see.scenes import make_scene

END, START, STOP = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# The tokens around a picture are those that the processor of Idefics3 writes.
AROUND, GLOBAL, IMAGE, UTTERANCE = "<fake_token_around_image>", "<global-img>", "<image>", "<end_of_utterance>"
SPECIAL = (END, START, STOP, AROUND, GLOBAL, IMAGE, UTTERANCE)
_WORD = r" ?\p{Ll}+|\p{L}|\p{N}|[^\s\p{L}\p{N}]+|\s+"
_SAMPLES = 12_000
_ROLES = ("user", "assistant", "system", "You are a helpful assistant that answers briefly.")
VOCAB_MULTIPLE = 64


def sample_texts(recipe: Recipe) -> list[str]:
    """Return texts to train the tokenizer on."""
    rng = Random(f"tokens-{recipe.seed}")
    kinds, weights = zip(*recipe.mix, strict=True)
    texts = list(_ROLES) * (_SAMPLES // 4)
    for number in range(_SAMPLES):
        if number % 20 == 0:
            question = ask_without_picture(rng, "train")
        else:
            scene = make_scene(rng, rng.choices(kinds, weights)[0], heldout=False, easy=False)
            question = ask(rng, scene, "train")
        texts += [question.text, question.answer]
    return texts


def build_tokenizer(texts: Iterable[str], size: int) -> Tokenizer:
    """Train a tokenizer of ``size`` text tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(_WORD), "removed", invert=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, min_frequency=2, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    counts = Counter(word for text in texts for word in text.replace(" ", "\n ").split("\n") if word)
    # Frequent words less often than they occur, so that rare ones get tokens too.
    words = (word for word, count in sorted(counts.items()) for _ in range(max(1, round(count**0.7))))
    tokenizer.train_from_iterator(words, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return tokenizer


def load_or_build(path: Path, recipe: Recipe) -> Tokenizer:
    """Load the tokenizer at ``path``; train it first if the file does not exist."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        build_tokenizer(sample_texts(recipe), recipe.shape.text_tokens).save(str(path))
    return Tokenizer.from_file(str(path))


def padded_size(tokenizer: Tokenizer) -> int:
    """Return the rows of the embedding: the vocabulary size rounded up."""
    size = tokenizer.get_vocab_size()
    return (size + VOCAB_MULTIPLE - 1) // VOCAB_MULTIPLE * VOCAB_MULTIPLE


class Ids:
    """The ids of the special tokens, and of texts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.end, self.start, self.stop, self.image = map(self.of, (END, START, STOP, IMAGE))

    def of(self, token: str) -> int:
        """Return the id of a special token."""
        number: int | None = self._tokenizer.token_to_id(token)
        if number is None:
            raise ValueError(f"the tokenizer has no token {token}")
        return number

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, in which special tokens are written out."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids
