"""Tokenizers in the metadata of GGUF files, as tokenizer.json and tokenizer_config.json."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

from quire.engine.models.checkpoint.gguf.encoders import MODERN_BERT
from quire.engine.models.checkpoint.gguf.facts import GgufFacts
from quire.engine.models.checkpoint.gguf.pre_tokenizers import PreTokenizer, Step, pre_tokenizer
from quire.engine.models.errors import BrokenFolder, UnsupportedModel

Json = dict[str, Any]
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6  # kinds of tokens
_SPACE = "\u2581"  # stands for a space in vocabularies of sentencepiece
_GEMMAS = ("gemma", "gemma2", "gemma3", "gemma3n", "gemma4")
_KEYS = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
    "sep_token": "seperator",  # as the format spells it
    "mask_token": "mask",
    "cls_token": "cls",
}
# Tokens that end a turn, which files need not name.
_ENDS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>"),
    *("<EOT>", "<|end_of_text|>", "<end_of_utterance>", "<|END_OF_TURN_TOKEN|>", "<｜end▁of▁sentence｜>"),
)
_HARMONY = {"<|return|>", "<|call|>"}  # with both of them, <|end|> ends a message, and not the turn
_RERANK = "rerank"  # name of what llama.cpp makes prompts of rerankers of; it is no template of a chat
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


class GgufTokenizer:
    """The tokenizer of a file."""

    def __init__(self, facts: GgufFacts) -> None:
        """Read the vocabulary.

        Raises:
            BrokenFolder: it is missing, or its parts do not fit to each other.
        """
        self._facts = facts
        self._tokens = facts.texts("tokenizer.ggml.tokens")
        if not self._tokens:
            raise BrokenFolder(f"{facts.file} has no tokenizer.ggml.tokens in its metadata")
        self._kinds = facts.sequence("tokenizer.ggml.token_type")
        self._scores = facts.sequence("tokenizer.ggml.scores")
        for name, values in (("token_type", self._kinds), ("scores", self._scores)):
            if values and len(values) != len(self._tokens):
                raise BrokenFolder(
                    f"{facts.file}: tokenizer.ggml.{name} has {len(values)} values for {len(self._tokens)} tokens"
                )

    def tokenizer(self) -> Json:
        """The contents of tokenizer.json.

        Raises:
            BrokenFolder: a part is missing or wrong.
            UnsupportedModel: the kind of tokenizer, or how it splits text, is not supported.
        """
        model = self._facts.text("tokenizer.ggml.model")
        make = self._makers.get(model)
        if make is None:
            raise UnsupportedModel(
                f"{self._facts.file} has a tokenizer of type {model!r}, which is not supported; supported are "
                f"{', '.join(sorted(self._makers))}"
            )
        return make()

    @property
    def _makers(self) -> dict[str, Callable[[], Json]]:
        return {
            "gpt2": self._byte_level,
            "llama": self._sentencepiece,
            "gemma4": self._sentencepiece,
            "bert": self._word_pieces,
            "t5": self._unigram,
        }

    @cached_property
    def _ids(self) -> dict[str, int]:
        """Ids by token. Empty tokens, which no text has, get a name."""
        ids: dict[str, int] = {}
        for index, token in enumerate(self._tokens):
            name = self._respelled(token) or f"[EMPTY_{index}]"
            if name in ids:
                raise BrokenFolder(f"{self._facts.file}: the tokens {ids[name]} and {index} are both {name!r}")
            ids[name] = index
        return ids

    def _respelled(self, token: str) -> str:
        """A token as the vocabulary of tokenizer.json has it."""
        is_spaces = self._facts.architecture in _GEMMAS and token and not token.strip(" ")
        return _SPACE * len(token) if is_spaces else token

    def _byte_level(self) -> Json:
        pre = self._pre_tokenizer()
        merges = [self._pair(merge) for merge in self._facts.texts("tokenizer.ggml.merges")]
        if "tokenizer.ggml.merges" not in self._facts.metadata:
            raise BrokenFolder(f"{self._facts.file} has no tokenizer.ggml.merges in its metadata")
        return self._json(
            model={**self._bpe(merges), "ignore_merges": pre.ignore_merges},
            normalizer=pre.normalizer,
            pre_tokenizer={"type": "Sequence", "pretokenizers": list(pre.steps)},
            decoder={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            post_processor=self._template(bos=pre.adds_bos, eos=False, sep=pre.adds_sep),
        )

    def _pre_tokenizer(self) -> PreTokenizer:
        return pre_tokenizer(self._facts.file, self._facts.optional_text("tokenizer.ggml.pre"))

    def _pair(self, merge: str) -> list[str]:
        border = merge.find(" ", 1)  # a token may begin with a space
        if border < 1 or border + 1 == len(merge):
            raise BrokenFolder(
                f"{self._facts.file}: tokenizer.ggml.merges has {merge!r:.40}, which is no pair of tokens"
            )
        return [merge[:border], merge[border + 1 :]]

    def _bpe(self, merges: list[list[str]]) -> Json:
        return {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": self._ids,
            "merges": merges,
        }

    def _sentencepiece(self) -> Json:
        """Byte pairs of sentencepiece, whose merges follow from the vocabulary."""
        has_prefix = self._facts.flag("tokenizer.ggml.add_space_prefix") is not False
        replaced: Step = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
        normalizer: Step | None = replaced
        pre: Step | None = None
        if has_prefix and "[INST]" in self._control_tokens:  # Mistral's vocabularies, in which turns are tokens
            normalizer = None
            pre = {"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": "first", "split": False}
        elif has_prefix:
            normalizer = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": _SPACE}, replaced]}
        decoders: list[Json] = [
            {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]
        if has_prefix:
            decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        unknown = self._special("unk_token") or next(
            (token for token, kind in zip(self._tokens, self._kinds, strict=False) if kind == _UNKNOWN), None
        )
        return self._json(
            model={**self._bpe(self._merges()), "unk_token": unknown, "fuse_unk": True, "byte_fallback": True},
            normalizer=normalizer,
            pre_tokenizer=pre,
            decoder={"type": "Sequence", "decoders": decoders},
            post_processor=self._template(bos=True, eos=False),
        )

    @cached_property
    def _control_tokens(self) -> set[str]:
        return {token for token, kind in zip(self._tokens, self._kinds, strict=False) if kind == _CONTROL}

    def _merges(self) -> list[list[str]]:
        """All pairs of tokens that make a token, the best first: by scores, or, of Gemma's tokens, by their order."""
        if stored := self._facts.texts("tokenizer.ggml.merges"):
            return [self._pair(merge) for merge in stored]
        ids = self._ids
        by_order = self._facts.architecture in _GEMMAS or not self._scores
        ranked: list[tuple[float, int, int, str, str]] = []
        for token, index in ids.items():
            if self._kinds and self._kinds[index] in (_UNKNOWN, _CONTROL, _BYTE):
                continue
            rank = float(index) if by_order else -float(self._scores[index])
            ranked += ((rank, ids[first], ids[second], first, second) for first, second in _halves(token, ids))
        return [[first, second] for *_, first, second in sorted(ranked)]

    def _word_pieces(self) -> Json:
        """BERT's word pieces, which files store with a mark at the beginning of words instead of inside of them."""
        vocab = {_with_marks(token): index for index, token in enumerate(self._tokens)}
        if len(vocab) != len(self._tokens):
            raise BrokenFolder(f"{self._facts.file}: tokenizer.ggml.tokens has the same token twice")
        lower = self._facts.flag("tokenizer.ggml.normalizer.lowercase")
        if lower is None:
            lower = not any(token != token.lower() for token in vocab if not _is_bracketed(token))
        unknown = self._special("unk_token") or "[UNK]"
        return self._json(
            model={
                "type": "WordPiece",
                "unk_token": unknown,
                "continuing_subword_prefix": "##",
                "max_input_chars_per_word": 100,
                "vocab": vocab,
            },
            normalizer={
                "type": "BertNormalizer",
                "clean_text": True,
                "handle_chinese_chars": True,
                "strip_accents": self._facts.flag("tokenizer.ggml.normalizer.strip_accents"),
                "lowercase": lower,
            },
            pre_tokenizer={"type": "BertPreTokenizer"},
            decoder={"type": "WordPiece", "prefix": "##", "cleanup": True},
            post_processor=self._bert_template(),
        )

    def _unigram(self) -> Json:
        """Pieces with scores, of XLM-RoBERTa for example."""
        if not self._scores:
            raise BrokenFolder(f"{self._facts.file} has no tokenizer.ggml.scores in its metadata")
        charsmap = self._facts.sequence("tokenizer.ggml.precompiled_charsmap")
        steps: list[Step] = [{"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": "always", "split": True}]
        if self._facts.flag("tokenizer.ggml.remove_extra_whitespaces") is not False:
            steps.insert(0, {"type": "WhitespaceSplit"})
        unknown = self._facts.optional_integer("tokenizer.ggml.unknown_token_id")
        try:
            normalizer = {
                "type": "Precompiled",
                "precompiled_charsmap": base64.b64encode(bytes(value & 255 for value in charsmap)).decode(),
            }
        except TypeError as error:
            raise BrokenFolder(f"{self._facts.file}: tokenizer.ggml.precompiled_charsmap must be bytes") from error
        return self._json(
            model={
                "type": "Unigram",
                "unk_id": 2 if unknown is None else unknown,
                "vocab": [[token, float(score)] for token, score in zip(self._tokens, self._scores, strict=True)],
                "byte_fallback": False,
            },
            normalizer=normalizer if charsmap else None,
            pre_tokenizer={"type": "Sequence", "pretokenizers": steps},
            decoder={"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": "always", "split": True},
            post_processor=self._template(bos=False, eos=True, sep=True),
        )

    def _json(self, **parts: Any) -> Json:
        return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": self._added(), **parts}

    def _added(self) -> list[Json]:
        """Tokens that are found in texts before these are split: control tokens, and those that users defined."""
        ends = {*self._stops()}
        added: list[Json] = []
        for index, token in enumerate(self._tokens):
            kind = self._kinds[index] if self._kinds else None
            is_special = kind in (_CONTROL, _UNKNOWN) or index in ends
            if not token or not (is_special or kind == _USER_DEFINED) or self._respelled(token) != token:
                continue
            added.append(
                {
                    "id": index,
                    "content": token,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": False,
                    "special": is_special,
                }
            )
        return added

    def _template(self, *, bos: bool, eos: bool, sep: bool = False) -> Json | None:
        """What adds tokens around texts. `bos`, `eos`, `sep`: what holds if the file does not say.

        A separator follows the end of the first text of a pair, as in RoBERTa. ModernBERT has none, whatever files say.
        """
        flags = [self._facts.flag(f"tokenizer.ggml.add_{name}_token") for name in ("bos", "eos", "sep")]
        adds_bos, adds_eos, adds_sep = (
            default if flag is None else flag for flag, default in zip(flags, (bos, eos, sep), strict=True)
        )
        before = self._special("bos_token") if adds_bos else None
        after = self._special("eos_token") if adds_eos else None
        has_separator = adds_sep and self._facts.architecture != MODERN_BERT
        between = (self._special("sep_token") or after) if has_separator else None
        return self._around(before, after, between=between) if before or after else None

    def _bert_template(self) -> Json | None:
        """[CLS] and [SEP] around texts."""
        first = self._special("cls_token") or self._special("bos_token") or self._named("[CLS]")
        last = self._special("sep_token") or self._special("eos_token") or self._named("[SEP]")
        return self._around(first, last, second_type=1)

    def _around(
        self, before: str | None, after: str | None, *, between: str | None = None, second_type: int = 0
    ) -> Json:
        """A template of a text and of a pair of texts.

        Args:
            before: token before the first text.
            after: token behind each text.
            between: a further token of pairs, before the second text.
            second_type: token type of the second text.
        """

        def token(text: str | None, kind: int) -> list[Json]:
            return [] if text is None else [{"SpecialToken": {"id": text, "type_id": kind}}]

        first, second = ({"Sequence": {"id": name, "type_id": kind}} for kind, name in ((0, "A"), (second_type, "B")))
        single = [*token(before, 0), first, *token(after, 0)]
        ids = {text: self._tokens.index(text) for text in (before, after, between) if text is not None}
        return {
            "type": "TemplateProcessing",
            "single": single,
            "pair": [*single, *token(between, 0), second, *token(after, second_type)],
            "special_tokens": {text: {"id": text, "ids": [index], "tokens": [text]} for text, index in ids.items()},
        }

    def _special(self, name: str) -> str | None:
        """The text of a special token by its name in tokenizer_config.json; None if there is none."""
        index = self._facts.optional_integer(f"tokenizer.ggml.{_KEYS[name]}_token_id")
        return self._tokens[index] if index is not None and 0 <= index < len(self._tokens) else None

    def _named(self, token: str) -> str | None:
        return token if token in self._tokens else None

    def config(self) -> Json:
        """The contents of tokenizer_config.json: special tokens, and chat templates."""
        special = {name: text for name in _KEYS if (text := self._special(name)) is not None}
        config: Json = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
        main = self._facts.optional_text("tokenizer.chat_template")
        named = {
            name: template
            for name in self._facts.texts("tokenizer.chat_templates")
            if name != _RERANK
            and (template := self._facts.optional_text(f"tokenizer.chat_template.{name}")) is not None
        }
        if named:
            templates = {**named, **({} if main is None else {"default": main})}
            config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
        elif main is not None:
            config["chat_template"] = main
        return config

    def generation(self) -> Json:
        """The contents of generation_config.json: the tokens that end a text, and sampling defaults."""
        numbers = {
            name: value
            for key, name in _SAMPLING.items()
            if (value := self._facts.optional_number(f"general.sampling.{key}")) is not None
        }
        if "top_k" in numbers:
            numbers["top_k"] = int(numbers["top_k"])
        return {"eos_token_id": list(self._stops()), **numbers}

    def _stops(self) -> Iterator[int]:
        """The ids of tokens that end a text."""
        names = ("eos", "eot", "eom")
        listed = [self._facts.optional_integer(f"tokenizer.ggml.{name}_token_id") for name in names]
        ends = set(_ENDS)
        control = self._control_tokens if self._kinds else set(self._tokens)
        if control >= _HARMONY:
            ends.remove("<|end|>")
        by_text = [index for index, token in enumerate(self._tokens) if token in ends and token in control]
        valid = (index for index in (*listed, *by_text) if index is not None and 0 <= index < len(self._tokens))
        yield from dict.fromkeys(valid)


def _halves(token: str, ids: dict[str, int]) -> Iterator[tuple[str, str]]:
    """The pairs of tokens that make a token."""
    for border in range(1, len(token)):
        first, second = token[:border], token[border:]
        if first in ids and second in ids:
            yield first, second


def _is_bracketed(token: str) -> bool:
    return token.startswith("[") and token.endswith("]")


def _with_marks(token: str) -> str:
    """A word piece as BERT's vocabulary has it."""
    if _is_bracketed(token):
        return token
    return token.removeprefix(_SPACE) if token.startswith(_SPACE) else f"##{token}"
