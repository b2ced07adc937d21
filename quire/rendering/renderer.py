"""Renders chat templates and tokenizes off the event loop: small jobs in threads, large ones in worker processes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from quire.config.options import ChatOptions
from quire.engine.client.origin import current_origin
from quire.engine.client.protocol import TokenArray
from quire.multimodal.errors import PromptError
from quire.rendering.pooling_prompts import PairsJob, PoolingPrompt, TextsJob
from quire.rendering.prompts import ChatJob, Conversation, Job, Prompt, PromptBuilder, RenderedChat, TextJob
from quire.rendering.sentence_transformers_files import SentenceTransformersFiles
from quire.rendering.tokenizer import Tokenizer
from quire.workers.errors import JobKilled, JobTimedOut, QueueFull
from quire.workers.limits import WorkerLimits
from quire.workers.pool import WorkerPool
from quire.workers.threads import FairThreads

Result = TypeVar("Result")
# Above these a conversation or a text goes to a worker process. Templates may take time that is quadratic in the number
# of values, 0.1 s for this many; tokenizers are linear in the characters, 0.1 s for this many.
_LARGE_VALUES = 4096
_LARGE_CHARACTERS = 1 << 18
_TINY_CHARACTERS = 1 << 10  # are tokenized on the event loop: 0.3 ms, less than it takes to wait for a thread
MAX_VALUES = 1 << 17  # of messages, tools, documents and variables: they are sent to a process within 50 ms
# of chat_template_kwargs
_MAX_PAIR_VALUES = 256
_MAX_PAIR_CHARACTERS = 1 << 12
_MAX_DECODED = 1 << 20  # tokens; raised for longer contexts
_LIMITS = WorkerLimits(memory=1 << 30, seconds=10.0, stack=1 << 24)


class Renderer:
    """Make the prompts of one model."""

    def __init__(
        self,
        folder: Path,
        tokenizer: Tokenizer,
        options: ChatOptions,
        max_model_len: int,
        *,
        media_tokens: frozenset[str] = frozenset(),
        finds_messages: bool = False,
        max_queued: int = 1024,
        share: float = 1.0,
        limits: WorkerLimits = _LIMITS,
    ) -> None:
        """Read the model's chat templates.

        Args:
            folder: the model's directory.
            tokenizer: the model's tokenizer.
            options: the operator's template and its variables.
            max_model_len: context length in tokens.
            media_tokens: texts of the tokens that stand for media: in texts of users they are texts. Beside media, so
                are those of all special tokens, but in messages of an assistant.
            finds_messages: tell the engine where messages end.
            max_queued: jobs that may wait for the threads, and for the processes.
            share: the largest part of these for one tenant; see `Shares`.
            limits: limits of a job in a process.

        Raises:
            PromptError: --chat-template is not a valid template.
        """
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self._limits = limits
        self._builder = PromptBuilder(
            folder, tokenizer, options, max_model_len, media_tokens, finds_messages=finds_messages
        )
        # With two threads, one long prompt does not delay all others.
        self._threads = FairThreads("render", size=2, max_queued=max_queued, share=share)
        backend = None if tokenizer.in_file else tokenizer.backend
        arguments = (folder, backend, ChatOptions.of(options), max_model_len, media_tokens, finds_messages)
        self._processes = WorkerPool(
            "render",
            "quire.rendering.prompts:worker",
            arguments,
            limits,
            size=2,
            max_queued=max_queued,
            share=share,
        )

    async def text(
        self, text: str, *, add_special_tokens: bool, max_tokens: int | None = None, tenant: str = ""
    ) -> Prompt:
        """Tokenize a text.

        Args:
            text: the prompt.
            add_special_tokens: add the special tokens that the model expects at the start and end.
            max_tokens: a text that certainly has more tokens is refused without being tokenized; None: no limit.
            tenant: the tenant that sent the text; tenants take turns.

        Raises:
            PromptError: the text is too long, contains lone surrogates, or takes too long.
            QueueFull: too many jobs wait.
        """
        self._builder.check_length(text, max_tokens)
        job = TextJob(text, add_special_tokens, max_tokens)
        if len(text) <= _LARGE_CHARACTERS:
            return await self._in_thread(partial(self._builder.text, job), tenant)
        prompt: Prompt = await self._in_process(job, "Tokenizing the text", "input_text", tenant)
        return prompt

    async def chat(
        self, conversation: Conversation, *, max_tokens: int | None = None, tenant: str = ""
    ) -> RenderedChat:
        """Render and tokenize a conversation. `max_tokens`, `tenant`: as in `text`.

        Raises:
            PromptError: the template refuses it, the prompt is too long, or rendering takes too long.
            QueueFull: too many jobs wait.
        """
        job = ChatJob(conversation, max_tokens)
        parts = {
            "messages": _with_arguments(measured(conversation.messages), conversation.messages),
            "tools": measured(conversation.tools or ()),
            "documents": measured(conversation.documents or ()),
            "chat_template_kwargs": measured(conversation.variables),
        }
        values, characters = (sum(sizes) for sizes in zip(*parts.values(), strict=True))
        field = max(parts, key=lambda name: parts[name])
        if values > MAX_VALUES:
            raise PromptError(
                f"Messages, tools, documents and chat_template_kwargs may have at most {MAX_VALUES} values in total "
                "(strings, numbers, objects, arrays and their entries).",
                field,
            )
        if conversation.template is None and values <= _LARGE_VALUES and characters <= _LARGE_CHARACTERS:
            return await self._in_thread(partial(self._builder.chat, job), tenant)
        field = field if conversation.template is None else "chat_template"
        rendered: RenderedChat = await self._in_process(job, "Rendering the chat", field, tenant)
        return rendered

    async def batch(self, job: TextsJob | PairsJob, *, tenant: str = "") -> AsyncGenerator[list[PoolingPrompt], None]:
        """Tokenize texts or pairs for a model that pools, slice by slice.

        Raises:
            PromptError: one of them is too long or has no tokens.
            QueueFull: too many jobs wait.
        """
        if isinstance(job, PairsJob):
            _check_variables(job)
        self._builder.check_batch(job)
        if sum(job.sizes()) <= _TINY_CHARACTERS:
            yield self._builder.batch(job)
            return
        for part in job.slices():
            if sum(part.sizes()) <= _LARGE_CHARACTERS:
                yield await self._in_thread(partial(self._builder.batch, part), tenant)
            else:
                yield await self._in_process(part, "Tokenizing the text", part.names.at(part.first), tenant)

    @property
    def sentence_transformers(self) -> SentenceTransformersFiles:
        """The settings in the model's files of sentence-transformers."""
        return self._builder.sentence_transformers

    def prompt_length(self, prompt: str) -> int:
        """Tokens of a prompt at the start of a text, with the special tokens before it."""
        return self._builder.prompt_length(prompt)

    async def decode(self, tokens: TokenArray, *, tenant: str = "") -> str:
        """Text of tokens, with special tokens.

        Raises:
            PromptError: there are too many.
            QueueFull: too many jobs wait.
        """
        limit = max(_MAX_DECODED, self.max_model_len)
        if len(tokens) > limit:
            raise PromptError(f"There are {len(tokens)} tokens; at most {limit} can be decoded.", "tokens")
        return await self._threads.run(partial(self._decode, tokens), tenant=tenant)

    def _decode(self, tokens: TokenArray) -> str:
        return self.tokenizer.decode(tokens.tolist(), skip_special_tokens=False)

    @property
    def template(self) -> str:
        """Sources of all templates, concatenated."""
        return "\n".join(self._builder.sources.values())

    @property
    def renders_pairs(self) -> bool:
        """Whether a chat template makes the prompt of a query and a document."""
        return self._builder.pair_template is not None

    @property
    def knows_sides(self) -> bool:
        """See `PromptBuilder.knows_sides`."""
        return self._builder.knows_sides

    @property
    def default_template(self) -> str | None:
        """Source of the template for conversations without tools; None if there is none."""
        return self._builder.sources.get("default")

    async def close(self) -> None:
        """End the threads and processes. A job in a thread is not waited for."""
        self._threads.close()
        await self._processes.close()

    async def _in_thread(self, work: Callable[[], Result], tenant: str) -> Result:
        with current_origin().timeline.tokenizing:
            return await self._threads.run(work, tenant=tenant)

    async def _in_process(self, job: Job, what: str, field: str, tenant: str) -> Any:
        try:
            with current_origin().timeline.tokenizing:
                return await self._processes.run(job, tenant=tenant)
        except JobTimedOut as error:
            if error.stalled:
                raise QueueFull("the prompt waited too long for processor time") from error
            raise PromptError(f"{what} took more than {self._limits.seconds:g} s.", field) from error
        except JobKilled as error:
            raise PromptError(f"{what} failed: {error}.", field) from error


def _check_variables(job: PairsJob) -> None:
    """Bound the variables of a template that is rendered for each of many pairs."""
    values, characters = measured(job.variables)
    if values > _MAX_PAIR_VALUES or characters > _MAX_PAIR_CHARACTERS:
        raise PromptError(
            f"chat_template_kwargs may have at most {_MAX_PAIR_VALUES} values and {_MAX_PAIR_CHARACTERS} characters: "
            "they are used for each document.",
            "chat_template_kwargs",
        )


def _with_arguments(size: tuple[int, int], messages: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """The size of messages, with the values in the arguments of tool calls, which are JSON texts."""
    values, characters = size
    for message in messages if values <= MAX_VALUES else ():
        for call in message.get("tool_calls") or ():
            function = call.get("function")
            arguments = function.get("arguments") if isinstance(function, Mapping) else None
            if isinstance(arguments, str):
                values += sum(map(arguments.count, ",[{"))
    return values, characters


def measured(value: Any) -> tuple[int, int]:
    """The number of values in a JSON-like value, and of characters in its strings.

    Counting ends once there are more than `MAX_VALUES` values.
    """
    values = 1
    characters = 0
    left = [value]
    while left and values <= MAX_VALUES:
        node = left.pop()
        if isinstance(node, str):
            characters += len(node)
        elif isinstance(node, dict):
            values += len(node)
            characters += sum(map(len, node))
            left.extend(node.values())
        elif isinstance(node, list | tuple):
            values += len(node)
            left.extend(node)
    return values, characters
