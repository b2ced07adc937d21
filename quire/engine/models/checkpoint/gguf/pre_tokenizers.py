"""How byte-level tokenizers split text before they merge: GGUF files only name it, in `tokenizer.ggml.pre`.

A name stands for the splits that the `tokenizer.json` of the models behind it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.engine.models.errors import UnsupportedModel

Step = dict[str, Any]  # a pre-tokenizer or normalizer in tokenizer.json
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_MARKS_AND_SPACES = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LETTER_OF_ASIA = "[一-龥ࠀ-一가-퟿]+"


def _words(digits: str) -> str:
    """Words with what precedes them, and numbers as `digits` splits them (cl100k and its relatives)."""
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}|{_MARKS_AND_SPACES}"


def _cased_words(digits: str, contractions: str) -> str:
    """Words in which upper case precedes lower case (o200k and its relatives)."""
    before, marks = r"[^\r\n\p{L}\p{N}]?", r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    return f"{before}{_UPPER}*{_LOWER}+{contractions}|{before}{_UPPER}+{_LOWER}*{contractions}|{digits}|{marks}"


def _split(pattern: str) -> Step:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _digits(*, individual: bool) -> Step:
    return {"type": "Digits", "individual_digits": individual}


def _byte_level(*, splits: bool) -> Step:
    """Bytes as letters; with `splits`, text is split as in GPT-2 first."""
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": splits}


_BYTES, _GPT2_STEP = _byte_level(splits=False), _byte_level(splits=True)
NFC: Step = {"type": "NFC"}


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """Steps before the merges.

    Attributes:
        steps: pre-tokenizers, one behind the other.
        normalizer: of the text before; None: there is none.
        ignore_merges: a word that is a token is that token, whatever merges say.
        adds_bos: texts begin with the token of the beginning, unless the file says otherwise.
        adds_sep: a separator is before the second text of a pair, unless the file says otherwise.
    """

    steps: Sequence[Step]
    normalizer: Step | None = None
    ignore_merges: bool = False
    adds_bos: bool = False
    adds_sep: bool = False


_GPT2 = PreTokenizer((_GPT2_STEP,))
_ROBERTA = PreTokenizer((_GPT2_STEP,), adds_sep=True)
_LLAMA3 = PreTokenizer((_split(_words(r"\p{N}{1,3}")), _BYTES), ignore_merges=True, adds_bos=True)
_CL100K = PreTokenizer(_LLAMA3.steps)
_GLM4 = PreTokenizer(_LLAMA3.steps, ignore_merges=True)
_MINICPM5 = PreTokenizer((_split(r"\p{N}{1,3}"), _split(_words(r"\p{N}+")), _BYTES), ignore_merges=True)
_QWEN2 = PreTokenizer((_split(_words(r"\p{N}")), _BYTES), NFC)
_GPT4O = PreTokenizer((_split(_cased_words(r"\p{N}{1,3}", f"{_CONTRACTIONS}?")), _BYTES))
_GRANITE_EMBEDDING = PreTokenizer(_GPT4O.steps, ignore_merges=True)
_STARCODER = PreTokenizer((_digits(individual=True), _GPT2_STEP))
_FALCON = PreTokenizer(
    (
        {"type": "Punctuation", "behavior": "Contiguous"},
        _GPT2_STEP,
        _digits(individual=False),
        _split("[0-9][0-9][0-9]"),
    )
)
_DEEPSEEK_CODER = PreTokenizer(
    (
        _split(r"[\r\n]"),
        _split(r"\s?\p{L}+"),
        _split(r"\s?\p{P}+"),
        _split(_LETTER_OF_ASIA),
        _digits(individual=True),
        _BYTES,
    )
)
# Letters of Latin, Greek, Cyrillic and others with case; those that text editors would normalize have escapes.
_CASED = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚ\u1e00-\u1f15\u1f18-\u1f1d"
    "\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe"
    "\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107"
    "\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149"
    "\u214e\u2183\u2184Ⰰ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_DEEPSEEK_LLM = PreTokenizer(
    (
        _split(r"[\r\n]"),
        _split(rf"\s?[{_CASED}]+"),
        _split(r"\s?[!-/:-~！-／：-～‘-‟　-。]+"),
        _split(r"\s+$"),
        _split(_LETTER_OF_ASIA),
        _digits(individual=True),
        _BYTES,
    )
)
_DEEPSEEK_V3 = PreTokenizer(
    (
        _split(r"\p{N}{1,3}"),
        _split("[一-龥぀-ゟ゠-ヿ]+"),
        _split(
            r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
            r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
        ),
        _BYTES,
    )
)
_TEKKEN = PreTokenizer((_split(_cased_words(r"\p{N}", "")), _BYTES), ignore_merges=True, adds_bos=True)
_WITH_MARKS = PreTokenizer(
    (
        _split(
            rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
            r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
        _BYTES,
    ),
    NFC,
)
_TINY_AYA = PreTokenizer(
    (
        _split(r"\d{1,3}(?=(?:\d{3})*\b)"),
        _split(_cased_words(r"\p{N}{1,3}", f"{_CONTRACTIONS}?")),
        _BYTES,
    )
)
# Words of Korean, marks of Asia, Bopomofo, and Chinese and Japanese characters are apart from other text.
_YOUTU = PreTokenizer(
    (
        _split("[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+"),
        _split(_cased_words(r"\p{N}", f"{_CONTRACTIONS}?")),
        _BYTES,
    ),
    ignore_merges=True,
)
# As in Qwen 2, but line breaks do not belong to the marks before them.
_SEED = PreTokenizer(
    (
        _split(
            rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
            r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
        _BYTES,
    )
)
_WORDS_AND_MARKS = _split(r" ?[^(\s|.,!?…。，、।۔،)]+")
_BLOOM = PreTokenizer((_WORDS_AND_MARKS, _BYTES))
_VIKING = PreTokenizer((_WORDS_AND_MARKS, _split(r"\p{N}"), _BYTES))
# Words may have several parts: only digits are apart, in threes from the end.
_SUPERBPE = PreTokenizer((_split(r"\p{N}+"), _split(r"(?=(\d{3})+(?!\d))"), _BYTES))
# As in Llama 3, but spaces before a word are in powers of two.
_JAIS2 = PreTokenizer(
    (
        _split(
            rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|"
            + "".join(rf"\s{{{count}}}(?!\S)|" for count in (512, 256, 128, 64, 32, 16, 8, 4))
            + r"\s{1,2}(?!\S)|\s"
        ),
        _BYTES,
    )
)
# As o200k, but Chinese characters are words of their own.
_NO_HAN_UPPER, _NO_HAN_LOWER = f"[{_UPPER[1:-1]}&&[^\\p{{Han}}]]", f"[{_LOWER[1:-1]}&&[^\\p{{Han}}]]"
_KIMI = PreTokenizer(
    (
        _split(
            rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{_NO_HAN_UPPER}*{_NO_HAN_LOWER}+{_CONTRACTIONS}?"
            rf"|[^\r\n\p{{L}}\p{{N}}]?{_NO_HAN_UPPER}+{_NO_HAN_LOWER}*{_CONTRACTIONS}?"
            rf"|\p{{N}}{{1,3}}|{_MARKS_AND_SPACES}"
        ),
        _BYTES,
    ),
    ignore_merges=True,  # as in tiktoken, which made the model's tokens; llama.cpp merges
)
# Words with spaces between them are one.
_EXAONE_MOE = PreTokenizer(
    (
        _split(
            rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
        ),
        _BYTES,
    )
)
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    **dict.fromkeys(("gpt-2", "phi-2", "mellum", "gigachat", "a.x-4.0", "exaone4", "trillion"), _GPT2),
    **dict.fromkeys(("jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "jais", "granite-docling"), _GPT2),
    **dict.fromkeys(("jina-v1-en", "jina-v2-code", "roberta-bpe"), _ROBERTA),
    **dict.fromkeys(("mpt", "olmo", "modern-bert"), PreTokenizer((_GPT2_STEP,), NFC)),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0"), _LLAMA3),
    **dict.fromkeys(("lfm2", "jina-v5-nano"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), _CL100K),
    **dict.fromkeys(("glm4", "glm5"), _GLM4),
    "granite-embed-multi-97m": _GRANITE_EMBEDDING,
    "minicpm5": _MINICPM5,
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan"), _QWEN2),
    "qwen35": _WITH_MARKS,
    **dict.fromkeys(("grok-2", "solar-open", "bailingmoe", "bailingmoe2", "llada-moe"), PreTokenizer(_QWEN2.steps)),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), _BLOOM),
    "viking": _VIKING,
    "superbpe": _SUPERBPE,
    "jais-2": _JAIS2,
    "exaone-moe": _EXAONE_MOE,
    "kimi-k2": _KIMI,
    "seed-coder": _SEED,
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _GPT4O),
    "tekken": _TEKKEN,
    "tiny_aya": _TINY_AYA,
    "youtu": _YOUTU,
    **dict.fromkeys(("starcoder", "refact", "smollm", "codeshell", "exaone", "minerva-7b"), _STARCODER),
    "command-r": PreTokenizer(_STARCODER.steps, NFC),
    **dict.fromkeys(("falcon", "default"), _FALCON),
    "deepseek-llm": _DEEPSEEK_LLM,
    "deepseek-coder": _DEEPSEEK_CODER,
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK_V3),
}


def pre_tokenizer(file: str, name: str | None) -> PreTokenizer:
    """The pre-tokenizer of a name.

    Raises:
        UnsupportedModel: it is unknown, or the file has none: a guess would give other tokens than the model knows.
    """
    if name in PRE_TOKENIZERS:
        return PRE_TOKENIZERS[name]
    has = "has no tokenizer.ggml.pre" if name is None else f"has tokenizer.ggml.pre {name!r}"
    raise UnsupportedModel(
        f"{file} {has}, so that it is not known how its tokenizer splits text; put the tokenizer.json of the model "
        f"that it was made from beside it, or use a file with one of {', '.join(sorted(PRE_TOKENIZERS))}"
    )
