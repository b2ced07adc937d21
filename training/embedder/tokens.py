"""The tokenizer of quire-nano-embed: byte-level BPE of lower-case words, each with a leading space.

So a word has the same tokens at the start of a text, behind a bracket and in another case. Each digit is one token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from training.embedder.pairs.docs import paragraphs
from training.embedder.pairs.themes import THEMES, make_pair

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORD = r"\p{L}+\p{M}*|\p{N}|[^\s\p{L}\p{N}]"
SAMPLES = 60_000


def sample_texts(seed: int, count: int = SAMPLES) -> list[str]:
    """Return texts to train the tokenizer on."""
    rng = Random(f"tokens-{seed}")
    texts = [paragraph.text for paragraph in paragraphs("train")]
    for _ in range(count):
        pair = make_pair(rng.choice(list(THEMES)), rng)
        texts += [pair.query, pair.text]
    return texts


def build_tokenizer(texts: Iterable[str], size: int) -> Tokenizer:
    """Train a tokenizer of ``size`` tokens on the texts."""
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))  # noqa: S106
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFD(), normalizers.Lowercase(), normalizers.StripAccents()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(WORD), "removed", invert=True),
        pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, min_frequency=2, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
    )  # fmt: skip
    tokenizer.train_from_iterator(_weighted(texts), trainer)
    first, last = tokenizer.token_to_id("[CLS]"), tokenizer.token_to_id("[SEP]")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0", pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", first), ("[SEP]", last)],
    )  # fmt: skip
    return tokenizer


def _weighted(texts: Iterable[str]) -> Iterable[str]:
    """Yield the words; frequent ones less often than they occur, so that rare ones get tokens too."""
    counts = Counter(word for text in texts for word in text.lower().split())
    for word, count in sorted(counts.items()):
        yield from [word] * max(1, round(count**0.8))


def load_or_build(path: Path, seed: int, size: int) -> Tokenizer:
    """Load the tokenizer at ``path``; train it first if the file does not exist."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        build_tokenizer(sample_texts(seed), size).save(str(path))
    return Tokenizer.from_file(str(path))
