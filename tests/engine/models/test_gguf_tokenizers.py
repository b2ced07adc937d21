"""Tokenizers in the metadata of GGUF files give the tokens that the tokenizers they were made from give."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers.integrations.gguf import gguf_tokenizer_mapping as reference

from quire.engine.models.checkpoint.gguf.facts import GgufFacts
from quire.engine.models.checkpoint.gguf.pre_tokenizers import PRE_TOKENIZERS
from quire.engine.models.checkpoint.gguf.tokenizer import GgufTokenizer
from quire.engine.models.errors import BrokenFolder, UnsupportedModel

TEXTS = (
    "Hello, world! It's 12345.67 o'clock; they'LL see.",
    "  two spaces\n\n\nand\tlines \r\n  ",
    "Größe naïve Éclair e\u0301a ΑΒΓ αβγ привет Ⅷ ½ ²",
    "日本語のテキスト、ひらがな カタカナ 한국어 텍스트 中文。",
    "def f(x):\n    return x**2  # $5 + 3 <= 8 ^ ~ `code` | \\n",
    "<|im_start|>user\nHi<|im_end|>\n<think> a </think>",
    "emoji 👩‍👩‍👧 🙂 \u200b zero\u00a0width",
    "",
    " ",
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
USER = ("<think>", "</think>")
WORDS = ["the quick brown fox jumps over the lazy dog", "hello world, it's 12345 and 67890", *TEXTS]


def facts(architecture: str = "llama", **metadata: Any) -> GgufFacts:
    """The facts of a file whose tokenizer has some metadata."""
    keys = {f"tokenizer.ggml.{name}": value for name, value in metadata.items() if name != "chat"}
    return GgufFacts("m.gguf", {"general.architecture": architecture, **keys, **metadata.get("chat", {})}, {}, _none)


def _none(_: str) -> Sequence[float]:
    return ()


def read(**metadata: Any) -> tokenizers.Tokenizer:
    """The tokenizer of a file."""
    return tokenizers.Tokenizer.from_str(json.dumps(GgufTokenizer(facts(**metadata)).tokenizer()))


def stored(tokenizer: tokenizers.Tokenizer) -> dict[str, Any]:
    """The tokens and merges of a byte-level tokenizer, as files have them."""
    ids = tokenizer.get_vocab(with_added_tokens=True)
    tokens = sorted(ids, key=lambda token: ids[token])
    kinds = [3 if token in SPECIAL else 4 if token in USER else 1 for token in tokens]
    merges = [" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
    return {"model": "gpt2", "tokens": tokens, "token_type": kinds, "merges": merges}


def trained(pre: str) -> tokenizers.Tokenizer:
    """A byte-level tokenizer that splits as one does that transformers makes of a file."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    split = reference.GGUF_PRE_TOKENIZER_SPLITS[pre]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(WORDS, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in USER])
    return tokenizer


@pytest.mark.parametrize("pre", sorted(reference.GGUF_PRE_TOKENIZER_SPLITS))
def test_text_is_split_as_transformers_splits_it(pre: str) -> None:
    expected = pre_tokenizers.Split(tokenizers.Regex(reference.GGUF_PRE_TOKENIZER_SPLITS[pre]), behavior="isolated")
    split = PRE_TOKENIZERS[pre].steps[0]["pattern"]["Regex"]
    got = pre_tokenizers.Split(tokenizers.Regex(split), behavior="isolated")
    for text in TEXTS:
        assert got.pre_tokenize_str(text) == expected.pre_tokenize_str(text)


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "gpt-4o"])
def test_byte_level_tokens(pre: str) -> None:
    original = trained(pre)
    if (normalizer := PRE_TOKENIZERS[pre].normalizer) is not None:
        assert normalizer == {"type": "NFC"}
        original.normalizer = normalizers.NFC()
    got = read(**stored(original), pre=pre, add_bos_token=False)
    for text in TEXTS:
        ids = got.encode(text).ids
        assert ids == original.encode(text).ids
        assert got.decode(ids, skip_special_tokens=False) == original.decode(ids, skip_special_tokens=False)


# What steps make of text that tells them apart; as their models' tokenizers split it.
SPLITS = {
    "gpt-2": ("it's 123 a", ["it", "'s", "Ġ123", "Ġa"]),
    "starcoder": ("x = 123", ["x", "Ġ=", "Ġ", "1", "2", "3"]),
    "command-r": ("a 12", ["a", "Ġ", "1", "2"]),
    "falcon": ("a+b, 12345", ["a", "+", "b", ",", "Ġ", "123", "45"]),
    "deepseek-llm": ("a b 12\n", ["a", "Ġb", "Ġ", "1", "2", "Ċ"]),
    "deepseek-coder": ("a,b 12\n", ["a", ",", "b", "Ġ", "1", "2", "Ċ"]),
    "deepseek-v3": ("ab 1234中文 x", ["ab", "Ġ", "123", "4", "ä¸Ńæĸĩ", "Ġx"]),
    "tekken": ("fooBar 123", ["foo", "Bar", "Ġ", "1", "2", "3"]),
    "bloom": ("it's, ok", ["it's", ",", "Ġok"]),
    "poro-chat": ("it's 12, ok", ["it's", "Ġ12", ",", "Ġok"]),
    "viking": ("it's 12", ["it's", "Ġ", "1", "2"]),
    "superbpe": ("by the way 1234567", ["byĠtheĠwayĠ", "1", "234", "567"]),
    "bailingmoe": ("a\n\n12", ["a", "ĊĊ", "1", "2"]),
    "jais-2": ("a" + " " * 8 + "b 1234", ["a", "ĠĠĠĠ", "ĠĠ", "Ġ", "Ġb", "Ġ", "123", "4"]),
    "solar-open": ("it's 12", ["it", "'s", "Ġ", "1", "2"]),
    "joyai-llm": ("ab 1234", ["ab", "Ġ", "123", "4"]),
    "exaone-moe": ("a big 12", ["aĠbig", "Ġ", "1", "2"]),
    "kimi-k2": ("中文abc 1234", ["ä¸Ńæĸĩ", "abc", "Ġ", "123", "4"]),
    "glm5": ("it's 1234", ["it", "'s", "Ġ", "123", "4"]),
    "minicpm5": ("it's 1234", ["it", "'s", "Ġ", "123", "4"]),
    "granite-embed-multi-97m": ("fooBar's 1234", ["foo", "Bar's", "Ġ", "123", "4"]),
    "youtu": ("fooBar 12가나", ["foo", "Bar", "Ġ", "1", "2", "ê°ĢëĤĺ"]),
    "tiny_aya": ("fooBar 1234", ["foo", "Bar", "Ġ", "1", "234"]),
}


@pytest.mark.parametrize("pre", SPLITS)
def test_splits_of_other_names(pre: str) -> None:
    text, expected = SPLITS[pre]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    got = read(model="gpt2", tokens=[*alphabet, "ab"], merges=["a b"], pre=pre).pre_tokenizer
    assert [piece for piece, _ in got.pre_tokenize_str(text)] == expected


# Names with which llama.cpp takes a word that is a token as that token, and one of a model whose tokens tiktoken made.
WHOLE_WORDS = {
    *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
    *("glm4", "glm5", "granite-embed-multi-97m", "minicpm5", "tekken", "youtu"),
    "kimi-k2",
}


def merged_pairs(word: str, tokens: dict[str, int], merges: list[tuple[str, str]], *, whole_words: bool) -> list[int]:
    """The tokens of a word, in the order in which llama.cpp merges: of all neighbours, those with the first merge."""
    if whole_words and word in tokens:
        return [tokens[word]]
    parts, ranks = list(word), {pair: rank for rank, pair in enumerate(merges)}
    while pairs := [(ranks[pair], index) for index, pair in enumerate(pairwise(parts)) if pair in ranks]:
        _, index = min(pairs)
        parts[index : index + 2] = [parts[index] + parts[index + 1]]
    return [tokens[part] for part in parts]


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS.keys() - {"superbpe"}))  # whose words are whole sentences
def test_words_that_no_merges_make(pre: str) -> None:
    """A vocabulary that lacks every fifth merge has words that only those find who look for whole words."""
    metadata = stored(trained("qwen2"))
    metadata["merges"] = [merge for index, merge in enumerate(metadata["merges"]) if index % 5]
    got = read(**metadata, pre=pre, add_bos_token=False)
    tokens = {token: index for index, token in enumerate(metadata["tokens"])}
    merges = [(first, second) for first, _, second in (merge.partition(" ") for merge in metadata["merges"])]
    differs = False
    for text in ("the 1 quick 2 brown 3 fox 4 jumps 5 over 6 the 7 lazy 8 dog", "hello world, it's 12345"):
        words = [word for word, _ in got.pre_tokenizer.pre_tokenize_str(text)]
        ids = {
            whole: [token for word in words for token in merged_pairs(word, tokens, merges, whole_words=whole)]
            for whole in (False, True)
        }
        assert got.encode(text).ids == ids[pre in WHOLE_WORDS]
        differs = differs or ids[False] != ids[True]
    assert differs


@pytest.mark.parametrize("pre", [None, "something-new"])
def test_other_names_are_refused(pre: str | None) -> None:
    metadata = {} if pre is None else {"pre": pre}
    with pytest.raises(
        UnsupportedModel, match=r"(no tokenizer\.ggml\.pre|pre 'something-new').*tokenizer\.json.*qwen2"
    ):
        read(model="gpt2", tokens=["a"], merges=["a b"], **metadata)


def merged(text: str, scores: dict[str, float]) -> list[str]:
    """The pieces of sentencepiece: of all neighbours that make a piece, those with the best score first."""
    pieces = list(text)
    while True:
        pairs = [(-scores[a + b], i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in scores]
        if not pairs:
            return pieces
        _, index = min(pairs)
        pieces[index : index + 2] = [pieces[index] + pieces[index + 1]]


PIECES = ["a", "b", "c", "\u2581", "ab", "bc", "\u2581a", "abc", "\u2581ab", "\u2581abc", "ca", "\u2581\u2581"]


def pieces(**metadata: Any) -> tokenizers.Tokenizer:
    """A tokenizer of a few pieces, of which later ones are worse."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(PIECES)]
    scores = [0.0] * 259 + [-float(index) for index in range(len(PIECES))]
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return read(model="llama", tokens=tokens, token_type=kinds, scores=scores, **{**ids, **metadata})


@pytest.mark.parametrize("text", ["abcab", "ab abc  ca", "cabcab bca"])
def test_sentencepiece_merges_the_best_scores_first(text: str) -> None:
    scores = {piece: -float(index) for index, piece in enumerate(PIECES)}
    encoding = pieces().encode(text)
    assert encoding.tokens == ["<s>", *merged("\u2581" + text.replace(" ", "\u2581"), scores)]
    assert pieces().decode(encoding.ids) == text


def test_sentencepiece_without_what_it_adds() -> None:
    got = pieces(add_space_prefix=False, add_bos_token=False, add_eos_token=True)
    assert got.encode("abc é").tokens == ["abc", "\u2581", "<0xC3>", "<0xA9>", "</s>"]
    assert got.decode(got.encode("abc é").ids) == "abc é"


def test_word_pieces() -> None:
    """Files mark beginnings of words, and BERT's vocabulary what is inside of them."""
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "wor", "##ld", "##s", ",", "[", "é", "e"]
    original = tokenizers.Tokenizer(models.WordPiece({t: i for i, t in enumerate(vocab)}, unk_token="[UNK]"))
    original.normalizer = normalizers.BertNormalizer(lowercase=True)
    original.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    original.decoder = decoders.WordPiece()
    original.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokens = [
        token if token.startswith("[") and token.endswith("]") else token[2:] if token[:2] == "##" else f"\u2581{token}"
        for token in vocab
    ]
    got = read(
        architecture="bert",
        model="bert",
        tokens=tokens,
        token_type=[3] * 5 + [1] * 8,
        unknown_token_id=1,
        seperator_token_id=3,
        cls_token_id=2,
    )
    for text in ("Hello, worlds!", "é [ hello world", "xyz", ""):
        assert got.encode(text).ids == original.encode(text).ids
        assert got.encode(text, "world").type_ids == original.encode(text, "world").type_ids


def test_unigrams() -> None:
    vocab = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    vocab += [("\u2581", -2.0), ("\u2581hello", -1.0), ("h", -4.0), ("ell", -3.0), ("o", -4.0), ("\u2581w", -3.0)]
    got = read(
        architecture="bert",
        model="t5",
        tokens=[token for token, _ in vocab],
        scores=[score for _, score in vocab],
        token_type=[3, 3, 3, 2, 1, 1, 1, 1, 1, 1],
        bos_token_id=0,
        eos_token_id=2,
        unknown_token_id=3,
        add_bos_token=True,
        add_eos_token=True,
    )
    assert got.encode("hello  w").tokens == ["<s>", "\u2581hello", "\u2581w", "</s>"]
    assert got.encode("ello").tokens == ["<s>", "\u2581", "ell", "o", "</s>"]


# Names that mean a separator where files do not say it, what files say, and the special tokens of a pair.
PAIRS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "XLM-RoBERTa": ({"model": "t5"}, ["<s>", "A", "</s>", "</s>", "B", "</s>"]),
    "XLM-RoBERTa, said": ({"model": "t5", "add_sep_token": True}, ["<s>", "A", "</s>", "</s>", "B", "</s>"]),
    "one separator": ({"model": "t5", "add_sep_token": False}, ["<s>", "A", "</s>", "B", "</s>"]),
    "RoBERTa": ({"pre": "roberta-bpe"}, ["<s>", "A", "</s>", "</s>", "B", "</s>"]),
    "Jina's reranker": (
        {"pre": "jina-v1-en", "architecture": "jina-bert-v2"},
        ["<s>", "A", "</s>", "</s>", "B", "</s>"],
    ),
    "ModernBERT": (
        {"pre": "modern-bert", "architecture": "modern-bert", "add_sep_token": True},
        ["<s>", "A", "</s>", "B", "</s>"],
    ),
}


@pytest.mark.parametrize("case", PAIRS)
def test_pairs_of_texts(case: str) -> None:
    """A reranker's query and document, with the types of RoBERTa, which has one."""
    metadata, expected = PAIRS[case]
    tokens = ["<s>", "<pad>", "</s>", "<unk>", "\u2581A" if metadata.get("model") == "t5" else "A", "B", "\u2581B"]
    got = read(
        **{"model": "gpt2", "merges": [], **metadata},
        tokens=tokens,
        scores=[-float(index) for index in range(len(tokens))],
        token_type=[3, 3, 3, 2, 1, 1, 1],
        bos_token_id=0,
        eos_token_id=2,
        seperator_token_id=2,
        unknown_token_id=3,
        add_bos_token=True,
        add_eos_token=True,
    )
    encoding = got.encode("A", "B")
    assert [token.removeprefix("\u2581") for token in encoding.tokens] == expected
    assert set(encoding.type_ids) == {0}


def test_chat_templates_and_ends_of_texts() -> None:
    original = trained("qwen2")
    templates = {
        "tokenizer.chat_template": "main",
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template.tool_use": "tools",
        "general.sampling.temp": 0.5,
        "general.sampling.top_k": 20,
    }
    ids = {token: original.token_to_id(token) for token in SPECIAL}
    tokenizer = GgufTokenizer(
        facts(**stored(original), pre="qwen2", eos_token_id=ids["<|endoftext|>"], padding_token_id=0, chat=templates)
    )
    config = tokenizer.config()
    assert config["chat_template"] == [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "main"},
    ]
    assert config["eos_token"] == "<|endoftext|>"
    # A turn ends with a token that the file names for nothing.
    assert tokenizer.generation() == {
        "eos_token_id": [ids["<|endoftext|>"], ids["<|im_end|>"]],
        "temperature": 0.5,
        "top_k": 20,
    }


def broken() -> Iterator[tuple[dict[str, Any], str]]:
    """Metadata with a mistake, and what is said about it."""
    valid = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b", "ab"], "merges": ["a b"]}
    yield {**valid, "tokens": []}, "no tokenizer.ggml.tokens"
    yield {**valid, "tokens": ["a", 3]}, "tokens must be an array of texts"
    yield {**valid, "tokens": ["a", "a"]}, "the tokens 0 and 1 are both 'a'"
    yield {**valid, "token_type": [1]}, "token_type has 1 values for 3 tokens"
    yield {**valid, "merges": ["ab"]}, "'ab', which is no pair"
    yield {**valid, "merges": 4}, "merges must be an array"
    yield {**valid, "model": "rwkv"}, "type 'rwkv', which is not supported; supported are bert, gemma4, gpt2, llama, t5"
    yield {**valid, "model": "t5"}, "no tokenizer.ggml.scores"


@pytest.mark.parametrize(("metadata", "message"), list(broken()))
def test_broken_metadata_is_named(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises((BrokenFolder, UnsupportedModel), match=message):
        read(**metadata)
