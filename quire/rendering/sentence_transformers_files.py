"""Files of sentence-transformers beside a model's own: prompts, and how texts are prepared."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from quire.engine.client.json_file import read_json
from quire.multimodal.errors import ModelFileError, PromptError

# Names of prompts for the two sides of a search, in the order in which they are looked for.
_SIDES: Mapping[str, tuple[str, ...]] = {
    "query": ("query", "search_query", "retrieval.query", "retrieval_query", "s2p_query", "web_search_query"),
    "document": ("document", "passage", "search_document", "retrieval.passage", "retrieval_document", "corpus"),
}
_ALIASES = {"search_query": "query", "search_document": "document", "passage": "document"}
_INSTRUCTION = re.compile(r"(?<=Instruct: )[^\n]*(?=\n ?Query:)")
Side = Literal["query", "document"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SentenceTransformersFiles:
    """Contents of the files.

    Attributes:
        prompts: texts that are put before an input, by name.
        default_prompt: name of the one that is used by default.
        lower_case: texts are lowered before they are tokenized.
        without_punctuation: they lose their punctuation before (SigLIP).
        pools_prompt: the tokens of a prompt take part in the mean.
    """

    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    lower_case: bool = False
    without_punctuation: bool = False
    pools_prompt: bool = True

    def prompt(self, name: str | None) -> str:
        """The prompt of this name, or the default one.

        Raises:
            PromptError: there is none of this name.
        """
        name = self.default_prompt if name is None else name
        if name is None:
            return ""
        if name not in self.prompts:
            known = ", ".join(map(repr, self.prompts)) or "none"
            raise PromptError(f"The model has no prompt {name[:100]!r}; it has: {known}.", "prompt_name")
        return self.prompts[name]

    def prompt_for(self, use: str) -> str:
        """The prompt for a use such as `query`, `document` or `classification`; the default one if there is none."""
        names = _SIDES.get(_ALIASES.get(use, use), (use,))
        name_of_prompt = next((name for name in (use, *names) if name in self.prompts), None)
        return self.prompt(name_of_prompt)

    @staticmethod
    def with_instruction(prompt: str, instruction: str) -> str:
        """A prompt with another instruction.

        Raises:
            PromptError: it has none that could be replaced.
        """
        if _INSTRUCTION.search(prompt) is None:
            raise PromptError(
                "`instruction` is not supported: the prompt of this model has no instruction to replace.", "instruction"
            )
        return _INSTRUCTION.sub(lambda _: instruction, prompt)


def read_sentence_transformers_files(folder: Path) -> SentenceTransformersFiles:
    """Read the files of sentence-transformers in a model's folder, if there are any.

    Raises:
        ModelFileError: one of them cannot be read.
    """
    config = read_json(folder / "config_sentence_transformers.json", ModelFileError)
    prompts = config.get("prompts") or {}
    # PyLate's names, for models that compare the tokens of texts; or the tokens of ColBERT's own training
    prefixes = {**colbert_markers(folder)}
    prefixes |= {side: config[f"{side}_prefix"] for side in _SIDES if config.get(f"{side}_prefix") is not None}
    if not isinstance(prompts, dict):
        raise ModelFileError(f"{folder / 'config_sentence_transformers.json'}: `prompts` must be an object")
    prompts = {name: text for name, text in {**prefixes, **prompts}.items() if isinstance(text, str)}
    default = config.get("default_prompt_name")
    texts = read_json(folder / "sentence_bert_config.json", ModelFileError)
    is_siglip = read_json(folder / "config.json", ModelFileError).get("model_type") in ("siglip", "siglip2")
    tokenizer = read_json(folder / "tokenizer_config.json", ModelFileError).get("tokenizer_class")
    return SentenceTransformersFiles(
        prompts=prompts,
        default_prompt=default if isinstance(default, str) and default in prompts else None,
        lower_case=is_siglip or texts.get("do_lower_case") is True,
        without_punctuation=is_siglip and tokenizer == "SiglipTokenizer",
        pools_prompt=all(
            read_json(path, ModelFileError).get("include_prompt") is not False
            for path in sorted(folder.glob("*_Pooling/config.json"))
        ),
    )


def colbert_markers(folder: Path) -> dict[str, str]:
    """The token before queries and the one before documents, as the file of ColBERT's training names them.

    Raises:
        ModelFileError: the file cannot be read.
    """
    trained = read_json(folder / "artifact.metadata", ModelFileError)
    markers = {"query": trained.get("query_token_id"), "document": trained.get("doc_token_id")}
    return {side: token for side, token in markers.items() if isinstance(token, str) and token}


def static_folder(folder: Path) -> Path | None:
    """Return where the table and the tokenizer of a model of static embeddings are; None for other models."""
    try:
        entries = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
        first = entries[0]
        inner = Path(first["path"]) if str(first["type"]).endswith("StaticEmbedding") else None
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None  # no such file, or a broken one: the engine says so
    return None if inner is None or inner.is_absolute() or ".." in inner.parts else folder / inner
