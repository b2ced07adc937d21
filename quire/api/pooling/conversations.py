"""Inputs as conversations that the chat template renders: a query, a document, or both of a pair.

Inputs with pictures are read one after the other, and each goes to the engine before the next one is read, so that no
request holds memory for some of its pictures while it waits for that of others. Those of a query are prepared once for
all documents, unless somebody needs their memory meanwhile.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from quire.api.chat.media import MediaSettings, ReadMedia, prepare_media, read_media, take_media
from quire.api.chat.media_inputs import MediaInputs
from quire.api.chat.media_parts import PartPlace, place_of, title_fields
from quire.api.chat.prepare import render_conversation
from quire.multimodal.errors import PromptError
from quire.multimodal.pictures.cache import RequestCache
from quire.protocol.errors import InvalidRequest
from quire.protocol.pooling.inputs import Content
from quire.rendering.pooling_prompts import InputNames, PoolingPrompt, TextsJob, Truncation, check_length
from quire.rendering.prompts import Conversation
from quire.serving.models import PoolingModel, ServerState
from quire.workers.tenant import current_tenant

Side = Literal["query", "document"]
Input = str | Content
_NOT_ALONE = "This model embeds a text or one picture, not several or both."
_OF_CONVERSATIONS = ("messages", "input_text")  # what errors of the renderer name


@dataclass(frozen=True, slots=True)
class ReadInput:
    """An input whose files are read: the content of its message, and its path in the request, for errors."""

    content: Sequence[Any]
    media: ReadMedia
    where: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InputOptions:
    """What all conversations of a request have in common.

    Attributes:
        truncation: of shorter prompts, the padding.
        instruction: text of the system message; None: there is none.
        variables: of the chat template.
    """

    truncation: Truncation
    instruction: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class InputReader:
    """Read the media of a request's inputs, and render conversations of them.

    Attributes:
        settings: of pictures.
        unused_fields: paths of fields that have no effect.
    """

    model: PoolingModel
    state: ServerState
    settings: MediaSettings
    unused_fields: dict[str, None] = field(default_factory=dict)

    @property
    def renders(self) -> bool:
        """Whether texts, too, are rendered by the chat template: the model compares them with pictures."""
        return self.model.pictures is not None and not self.alone and self.model.renderer.default_template is not None

    @property
    def alone(self) -> bool:
        """Whether a prompt is either a text or one picture."""
        return self.model.pictures is not None and self.model.pictures.info.alone

    def check(self, inputs: Sequence[Input], names: InputNames) -> None:
        """Check that the model reads all content parts.

        Raises:
            InvalidRequest: it does not.
        """
        reads = MediaInputs.of(self.model)
        reads.check_settings(self.settings.names)
        for index, value in enumerate(inputs):
            for place in _places(value, names.at(index)):
                reads.check(place)

    async def each(
        self, inputs: Sequence[Input], side: Side, names: InputNames, options: InputOptions
    ) -> AsyncGenerator[Sequence[PoolingPrompt], None]:
        """The prompt of each input, as a message of its own.

        Raises:
            InvalidRequest: a content part is not valid.
            PromptError: a part cannot be read, the template refuses it, or the prompt is too long.
            QueueFull: there is no memory for pictures for too long.
        """
        role: str = side if self.model.renderer.knows_sides else "user"
        for index, value in enumerate(inputs):
            if self.alone:
                yield [await self._alone(value, names.at(index), options)]
            else:
                yield [await self._message(value, names.at(index), role, options)]

    async def pairs(
        self,
        queries: Sequence[Input],
        documents: Sequence[Input],
        names: tuple[InputNames, InputNames],
        options: InputOptions,
    ) -> AsyncGenerator[Sequence[PoolingPrompt], None]:
        """The prompt of each document with its query, or with the only one; see `each`."""
        query_names, document_names = names
        if not self.model.renderer.renders_pairs:
            raise InvalidRequest(
                "The model has no prompt for pairs with media: its chat template must have messages of the roles "
                "`query` and `document`.",
                document_names.field,
            )
        with ExitStack() as stack, RequestCache(self.state.media_memory, current_tenant()) as cache:
            is_repeated = len(queries) < len(documents)
            query = await self._read(queries[0], query_names.at(0), stack, cache if is_repeated else None)
            for index, document in enumerate(documents):
                with ExitStack() as files:
                    if index and len(queries) > 1:
                        query = await self._read(queries[index], query_names.at(index), files)
                    yield [
                        await self._pair(query, await self._read(document, document_names.at(index), files), options)
                    ]

    async def picture(self, value: Content, where: str) -> PoolingPrompt:
        """The prompt of an input that is one picture.

        Raises:
            InvalidRequest: it is not.
            PromptError: it cannot be read.
            QueueFull: there is no memory for pictures for too long.
        """
        if len(value.parts) != 1:
            raise InvalidRequest(_NOT_ALONE, where)
        places = _places(value, where)
        self._name_unused([name for place in places for name in title_fields(place)])
        media = await take_media(places, self.settings, self.model, self.state, 1)
        self._name_unused(media.unused_fields)
        pictures = () if media.pictures is None else media.pictures.pictures
        if len(pictures) != 1:
            raise InvalidRequest(_NOT_ALONE, where)
        (item,) = pictures[0].items
        info = self.model.pictures.info if self.model.pictures is not None else None
        assert info is not None
        return PoolingPrompt(np.full(item.length, info.placeholder, np.int32), items=(item,))

    async def _alone(self, value: Input, where: str, options: InputOptions) -> PoolingPrompt:
        """The prompt of a text, or of a picture."""
        if isinstance(value, Content):
            return await self.picture(value, where)
        names = InputNames(where, several=False)
        job = TextsJob(texts=[value], truncation=options.truncation, names=names, prefix=options.instruction or "")
        prompts = [prompt async for part in self.model.renderer.batch(job, tenant=current_tenant()) for prompt in part]
        return prompts[0]

    async def _message(self, value: Input, where: str, role: str, options: InputOptions) -> PoolingPrompt:
        """The prompt of an input that is a message of its own."""
        with ExitStack() as stack:
            read = await self._read(value, where, stack)
            return await self._prompt([{"role": role, "content": read.content}], [read], options, pair=False)

    async def _pair(self, query: ReadInput, document: ReadInput, options: InputOptions) -> PoolingPrompt:
        """The prompt of a query and a document."""
        messages = [{"role": "query", "content": query.content}, {"role": "document", "content": document.content}]
        return await self._prompt(messages, [query, document], options, pair=True)

    async def _read(
        self, value: Input, where: str, stack: ExitStack, request_cache: RequestCache | None = None
    ) -> ReadInput:
        """Read the files of an input.

        Args:
            value: the input.
            where: its path in the request.
            stack: closes the files.
            request_cache: keeps its pictures for the next prompts; None: it is in one prompt.
        """
        if isinstance(value, str):
            return ReadInput([value], ReadMedia(), where)
        media = await read_media(_places(value, where), self.settings, self.model, self.state, stack)
        return ReadInput(value.parts, replace(media, request_cache=request_cache), where)

    def _name_unused(self, names: Sequence[str]) -> None:
        self.unused_fields.update(dict.fromkeys(names))

    async def _prompt(
        self, messages: list[dict[str, Any]], inputs: Sequence[ReadInput], options: InputOptions, *, pair: bool
    ) -> PoolingPrompt:
        """The prompt of messages with these inputs, of which the last one is named by errors."""
        where = inputs[-1].where
        media = await prepare_media([read.media for read in inputs], self.settings, self.model, self.state, 1)
        if any(read.media.parts for read in inputs):
            self._name_unused(media.unused_fields)
        system = [] if options.instruction is None else [{"role": "system", "content": options.instruction}]
        conversation = Conversation(
            messages=[*system, *messages],
            is_pair=pair,
            variables=options.variables,
            media=media.placeholder_texts,
            pictures=media.picture_texts,
        )
        try:
            rendered = await render_conversation(conversation, media, self.model)
        except PromptError as error:
            if error.param not in _OF_CONVERSATIONS:
                raise
            raise PromptError(str(error), where) from error
        tokens = rendered.prompt.token_ids
        if not len(tokens):
            raise InvalidRequest("The input is empty: it has no tokens.", where)
        check_length(len(tokens), self.model.info.max_model_len, where)
        return options.truncation.padded(PoolingPrompt(tokens, items=rendered.items))


def has_media(inputs: Sequence[Input]) -> bool:
    """Whether some of the inputs are not text."""
    return any(isinstance(value, Content) for value in inputs)


def _places(value: Input, where: str) -> list[PartPlace]:
    """The parts of an input that are not text."""
    if isinstance(value, str):
        return []
    return [
        place_of(value.parts, index, value.path(where, index))
        for index, part in enumerate(value.parts)
        if not isinstance(part, str)
    ]
