"""How a query and a document become one prompt of a causal reranker."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from quire.engine.client.json_file import read_json
from quire.multimodal.errors import ModelFileError, PromptError
from quire.rendering.chat_template import ChatTemplate
from quire.rendering.messages import normalize
from quire.rendering.tokenizer import Tokenizer

_ROLES = [re.compile(f"""["']{role}["']""") for role in ("query", "document")]
_QWEN3_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_QWEN3_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)


_PARTS = (
    '{% for part in message.content %}{% if part.type == "image" %}<|vision_start|><|image_pad|><|vision_end|>'
    '{% elif part.type == "video" %}<|vision_start|><|video_pad|><|vision_end|>'
    "{% else %}{{ part.text }}{% endif %}{% endfor %}"
)
# The prompt that Qwen3-VL-Reranker was trained with.
_QWEN3_VL = (
    f"<|im_start|>system\n{_QWEN3_SYSTEM}<|im_end|>\n<|im_start|>user\n<Instruct>: "
    f'{{% for message in messages if message.role == "system" %}}{_PARTS}{{% else %}}'
    "Given a search query, retrieve relevant candidates that answer the query.{% endfor %}"
    f'{{% for message in messages if message.role == "query" %}}<Query>:{_PARTS}{{% endfor %}}'
    f'{{% for message in messages if message.role == "document" %}}{{{{ "\\n" }}}}<Document>:{_PARTS}{{% endfor %}}'
    '<|im_end|>{{ "\\n" }}<|im_start|>assistant{{ "\\n" }}'
)


class PairTemplate(Protocol):
    """Make the text of a prompt. The query comes first, so that prompts with the same query share a prefix."""

    def text(self, query: str, document: str, instruction: str | None, variables: Mapping[str, Any]) -> str:
        """The prompt.

        Args:
            query: the first text.
            document: the second text.
            instruction: description of relevant documents; None: the template's own.
            variables: the request's variables for a chat template.

        Raises:
            PromptError: the template refuses them.
        """


class ChatPairTemplate:
    """A chat template with the roles `query` and `document`. The instruction is its system message.

    Attributes:
        template: the template.
    """

    def __init__(self, template: ChatTemplate, special: Mapping[str, str], defaults: Mapping[str, Any]) -> None:
        self.template = template
        self._variables = {**special, **defaults}

    def text(self, query: str, document: str, instruction: str | None, variables: Mapping[str, Any]) -> str:
        system = [] if instruction is None else [{"role": "system", "content": instruction}]
        texts = [{"role": "query", "content": query}, {"role": "document", "content": document}]
        values = {
            **self._variables,
            **variables,
            "messages": normalize([*system, *texts], as_parts=self.template.wants_parts),
            "add_generation_prompt": True,
        }
        return self.template.render(values)


class Qwen3Template:
    """The prompt that Qwen3-Reranker was trained with."""

    def text(self, query: str, document: str, instruction: str | None, variables: Mapping[str, Any]) -> str:
        if variables:
            raise PromptError(
                "chat_template_kwargs is not supported: the prompt of this model has no template variables.",
                "chat_template_kwargs",
            )
        return (
            f"<|im_start|>system\n{_QWEN3_SYSTEM}<|im_end|>\n<|im_start|>user\n"
            f"<Instruct>: {instruction or _QWEN3_INSTRUCTION}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
            "<|im_start|>assistant\n<think>\n\n</think>\n\n"
        )


def pair_template(
    folder: Path, tokenizer: Tokenizer, chat_template: str | None, defaults: Mapping[str, Any]
) -> PairTemplate | None:
    """The prompt template of a model for pairs; None: the tokenizer joins two texts.

    Args:
        folder: the model's directory.
        tokenizer: the model's tokenizer.
        chat_template: the source of its main chat template.
        defaults: the operator's variables of chat templates.

    Raises:
        ModelFileError: config.json cannot be read.
        PromptError: the chat template is not valid.
    """
    if chat_template is not None and knows_sides(chat_template):
        return ChatPairTemplate(ChatTemplate(chat_template), tokenizer.special, defaults)
    kind = read_json(folder / "config.json", ModelFileError).get("model_type")
    if tokenizer.token_id("<|im_start|>") is None:
        return None
    if kind in ("qwen3_vl", "qwen3_vl_moe"):
        return ChatPairTemplate(ChatTemplate(_QWEN3_VL), tokenizer.special, defaults)
    return Qwen3Template() if kind == "qwen3" else None


def knows_sides(chat_template: str) -> bool:
    """Whether a chat template has messages of the roles `query` and `document`."""
    return all(role.search(chat_template) for role in _ROLES)
