"""From the fields of a pooling request to its inputs: prompts, lengths, tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request

from quire.api.chat.conversation import UNTRUSTED_TEMPLATE, unused_template_fields
from quire.api.chat.media_parts import media_places
from quire.api.chat.prepare import render_chat, settings_of
from quire.api.pooling.conversations import InputReader
from quire.api.pooling.run import InputGroup, check_count
from quire.engine.client.pooling_params import PoolingParams, PoolingTask
from quire.engine.client.protocol import MediaItem
from quire.multimodal.errors import PromptError
from quire.protocol import fields
from quire.protocol.errors import InvalidRequest
from quire.protocol.pooling.inputs import PromptInput, parts_of
from quire.protocol.pooling.requests import (
    ChatInput,
    ClassifyChatRequest,
    ClassifyTextRequest,
    EmbeddingChatRequest,
    EmbeddingTextRequest,
    EmbedFields,
    PoolingChatRequest,
    PoolingTextRequest,
    TextInput,
)
from quire.rendering.pooling_prompts import InputNames, PoolingPrompt, TextsJob, Truncation, check_length
from quire.serving.models import PoolingModel, ServerState

Ids = NDArray[np.int32]
InputRequest = (
    EmbeddingTextRequest
    | EmbeddingChatRequest
    | ClassifyTextRequest
    | ClassifyChatRequest
    | PoolingTextRequest
    | PoolingChatRequest
)
Side = Literal["left", "right"]
# Fields of conversations that have no effect where no template renders them.
_OF_TEMPLATES = ("add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs")
_RENDERED = "input_text"  # as chats call their prompt, see docs/api/errors-and-limits.md
_MAX_PADDED = 1 << 22  # tokens of a request, 16 MiB
_UNLIMITED = (1 << 31) - 1  # the size of the body and of the results are limits


def longest_input(model: PoolingModel, *, embeds: bool = False) -> int:
    """Tokens of the longest input; `embeds`: for embeddings of texts, which may be made of chunks."""
    limit, facts = model.info.max_model_len, model.pools
    if not embeds:
        return limit
    if facts.chunked:
        return facts.max_embed_len or _UNLIMITED
    return min(limit, facts.max_embed_len or limit)


def truncation_of(model: PoolingModel, keep: int | None, side: Side | None, *, embeds: bool = False) -> Truncation:
    """The maximum length of prompts.

    Args:
        model: the model that gets the prompts.
        keep: number of tokens to which longer prompts are truncated; -1: the context length; None: they are refused.
        side: the side that is cut; None: the tokenizer's.
        embeds: see `longest_input`.

    Raises:
        InvalidRequest: `keep` is more than the context length, or the model needs a padding token and has none.
    """
    limit = longest_input(model, embeds=embeds)
    if keep is not None and keep > limit:
        raise InvalidRequest(
            f"`truncate_prompt_tokens` must be at most the context length of {limit} tokens, not {keep}. "
            "Please request a smaller truncation size.",
            "truncate_prompt_tokens",
        )
    default: Side = "left" if model.renderer.tokenizer.config.get("truncation_side") == "left" else "right"
    truncation = Truncation(
        limit if keep in (None, -1) else keep or limit, truncate=keep is not None, side=side or default
    )
    return _padded_to(model, truncation, model.pools.padded_to)


def with_padding(
    model: PoolingModel, truncation: Truncation, padding: Literal["max_length", "do_not_pad"] | None, count: int
) -> Truncation:
    """The truncation, and padding of shorter prompts to the maximum length if it is asked for.

    Padding is computed like other tokens, as in vLLM. `count`: number of prompts.

    Raises:
        InvalidRequest: the model has no padding token, or the padded prompts are too long together.
    """
    if padding != "max_length":
        return truncation
    length = min(longest_input(model, embeds=True), model.info.max_model_len)
    padded = _padded_to(model, truncation, length)
    if count * length > _MAX_PADDED:
        raise InvalidRequest(
            f"`padding` to {length} tokens would make {count * length} tokens of {count} inputs; at most {_MAX_PADDED} "
            "are accepted. Please send fewer inputs.",
            "padding",
        )
    return padded


def _padded_to(model: PoolingModel, truncation: Truncation, length: int) -> Truncation:
    """The truncation, and padding to a length; 0: no padding."""
    if not length:
        return truncation
    pad_id = model.renderer.tokenizer.pad_id
    if pad_id is None:
        raise InvalidRequest("`padding` is not supported by this model: its tokenizer has no padding token.", "padding")
    return replace(truncation, pad_to=length, pad_id=pad_id)


def embed_params(
    model: PoolingModel,
    task: PoolingTask,
    dimensions: int | None,
    activation: bool | None,
    field: str = "dimensions",
) -> PoolingParams:
    """Parameters of embeddings. `field`: the request's name for `dimensions`.

    Raises:
        InvalidRequest: the model does not support this number of dimensions.
    """
    if dimensions is not None:
        _check_dimensions(model, dimensions, field)
    return PoolingParams(task=task, dimensions=dimensions, use_activation=activation)


def prefix_of(model: PoolingModel, prompt_name: str | None, input_type: str | None, instruction: str | None) -> str:
    """The prompt of the model that is put before each text.

    Raises:
        PromptError: the model has no such prompt, or the prompt takes no instruction.
    """
    sentences = model.renderer.sentence_transformers
    if input_type is None and prompt_name is None and instruction is not None:
        input_type = "query"
    prompt = sentences.prompt(prompt_name) if input_type is None else sentences.prompt_for(input_type)
    return prompt if instruction is None else sentences.with_instruction(prompt, instruction)


def text_group(
    model: PoolingModel,
    inputs: PromptInput | Sequence[str] | Sequence[Ids],
    params: PoolingParams,
    truncation: Truncation,
    field: str,
    *,
    prefix: str = "",
    add_special_tokens: bool = True,
) -> InputGroup:
    """Texts or token ids of a request.

    Raises:
        PromptError: token ids are too many or outside of the vocabulary.
    """
    names = InputNames(field, several=not isinstance(inputs, str | np.ndarray))
    listed = [inputs] if isinstance(inputs, str | np.ndarray) else list(inputs)
    texts = [entry for entry in listed if isinstance(entry, str)]
    if not texts:
        ids = [entry for entry in listed if isinstance(entry, np.ndarray)]
        return InputGroup(
            [_token_prompt(model, entry, truncation, names.at(i)) for i, entry in enumerate(ids)], params, names
        )
    if prefix and not model.renderer.sentence_transformers.pools_prompt:
        params = PoolingParams(
            task=params.task,
            dimensions=params.dimensions,
            use_activation=params.use_activation,
            skip_tokens=model.renderer.prompt_length(prefix),
        )
    job = TextsJob(
        texts=texts, truncation=truncation, names=names, prefix=prefix, add_special_tokens=add_special_tokens
    )
    return InputGroup(job, params, names)


def count_inputs(inputs: PromptInput | Sequence[str] | Sequence[Ids]) -> int:
    """The number of inputs."""
    return 1 if isinstance(inputs, str | np.ndarray) else len(inputs)


async def input_group(
    body: InputRequest, request: Request, state: ServerState, model: PoolingModel, params: PoolingParams
) -> InputGroup:
    """The inputs of a request with `input` or `messages`.

    Raises:
        InvalidRequest: a field is not valid.
        PromptError: the conversation cannot be rendered, or token ids are not valid.
    """
    embeds = params.task == "embed"
    truncation = truncation_of(model, body.truncate_prompt_tokens, body.truncation_side, embeds=embeds)
    count = count_inputs(body.input) if isinstance(body, TextInput) else 1
    truncation = with_padding(model, truncation, body.padding, count)
    if isinstance(body, TextInput):
        prefix = ""
        if isinstance(body, EmbedFields):
            prefix = prefix_of(model, body.prompt_name, body.input_type, body.instruction)
            if not _has_texts(body):
                _refuse_prompts(body)
        special = body.add_special_tokens
        return text_group(model, body.input, params, truncation, "input", prefix=prefix, add_special_tokens=special)
    if isinstance(body, EmbedFields):
        _refuse_prompts(body)
    if truncation.truncate and media_places(body.messages):
        raise InvalidRequest(
            "`truncate_prompt_tokens` is not supported for conversations with media.", "truncate_prompt_tokens"
        )
    if model.pictures is not None and model.pictures.info.alone:
        reader = InputReader(model, state, settings_of(body))
        return await _alone_group(reader, body, request, params, truncation)
    try:
        chat = await render_chat(body, model, state, 1)
    except PromptError as error:
        if error.param != _RENDERED:
            raise
        raise PromptError(str(error), "messages") from error
    fields.ignore(request, [*unused_template_fields(body, chat.rendered), *chat.unused_fields])
    prompt = _token_prompt(model, chat.prompt.token_ids, truncation, "messages", chat.items)
    return InputGroup([prompt], params, InputNames("messages", several=False))


async def _alone_group(
    reader: InputReader, body: ChatInput, request: Request, params: PoolingParams, truncation: Truncation
) -> InputGroup:
    """The one message of a request to a model that embeds a text or a picture.

    Raises:
        InvalidRequest: there are several messages, or a picture and something else.
        PromptError: the picture cannot be read.
    """
    if body.chat_template is not None and not reader.state.trust_request_chat_template:
        raise InvalidRequest(UNTRUSTED_TEMPLATE, "chat_template")
    value = parts_of(body.messages[0].content, "messages[0].content")
    if len(body.messages) > 1:
        raise InvalidRequest("This model embeds one message: a text, or a picture.", "messages")
    unused = [name for name in _OF_TEMPLATES if getattr(body, name)]
    names = InputNames("messages[0]", several=False)
    if isinstance(value, str):
        reader.check([], names)
        fields.ignore(request, [*unused, *reader.settings.names])
        return text_group(reader.model, value, params, truncation, "messages")
    reader.check([value], names)
    prompt = await reader.picture(value, names.field)
    fields.ignore(request, [*unused, *reader.unused_fields])
    return InputGroup([prompt], params, InputNames("messages", several=False))


def check_inputs(body: TextInput | ChatInput, state: ServerState) -> None:
    """Refuse a request with too many inputs.

    Raises:
        InvalidRequest: there are too many.
    """
    if isinstance(body, TextInput):
        check_count(count_inputs(body.input), state, "input")


def _has_texts(body: TextInput) -> bool:
    return isinstance(body.input, str) or (isinstance(body.input, list) and isinstance(body.input[0], str))


def _refuse_prompts(body: EmbedFields) -> None:
    for name in ("prompt_name", "instruction"):
        if getattr(body, name) is not None:
            raise InvalidRequest(f"`{name}` applies to texts only, not to token ids or conversations.", name)


def _token_prompt(
    model: PoolingModel, ids: Ids, truncation: Truncation, name: str, items: tuple[MediaItem, ...] = ()
) -> PoolingPrompt:
    if not len(ids):
        raise InvalidRequest("The input is empty: it has no tokens.", name)
    if int(ids.max()) >= model.info.vocab_size:
        raise InvalidRequest(
            f"The input has a token id outside of the vocabulary of {model.info.vocab_size} tokens.", name
        )
    if items:
        check_length(len(ids), min(truncation.tokens, model.info.max_model_len), name)
    elif not truncation.truncate:
        check_length(len(ids), truncation.tokens, name)
    elif len(ids) > truncation.tokens:
        ids = ids[: truncation.tokens] if truncation.side == "right" else ids[-truncation.tokens :]
    return truncation.padded(PoolingPrompt(ids, items=items))


def _check_dimensions(model: PoolingModel, dimensions: int, field: str) -> None:
    pooling = model.pools
    if dimensions == pooling.embedding_size:
        return
    if not pooling.matryoshka:
        raise InvalidRequest(
            f"`{field}` is not supported by this model: its embeddings are not Matryoshka embeddings, so they cannot "
            f"be shortened from {pooling.embedding_size} values.",
            field,
        )
    if pooling.dimensions and dimensions not in pooling.dimensions:
        listed = ", ".join(map(str, pooling.dimensions))
        raise InvalidRequest(f"`{field}` must be one of {listed} for this model, not {dimensions}.", field)
    if not 1 <= dimensions <= pooling.embedding_size:
        raise InvalidRequest(
            f"`{field}` must be from 1 to {pooling.embedding_size} for this model, not {dimensions}.", field
        )
