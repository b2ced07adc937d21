"""Makes prompts: fills chat templates and tokenizes. Called in threads and in worker processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import tokenizers

from quire.config.options import ChatOptions
from quire.config.types import read_template
from quire.engine.client.protocol import TokenArray
from quire.multimodal.errors import PromptError
from quire.rendering.chat_template import ChatTemplate, load_templates
from quire.rendering.control_texts import ControlTexts, TextGuard
from quire.rendering.message_ends import NEXT_TURN, MessageEnds, common_beginning, ends_in, with_marks
from quire.rendering.messages import normalize, with_arguments
from quire.rendering.picture_texts import PictureTexts
from quire.rendering.pooling_prompts import (
    PairsJob,
    PoolingPrompt,
    TextsJob,
    token_array,
    tokenize_pairs,
    tokenize_texts,
)
from quire.rendering.reranker_prompts import ChatPairTemplate, knows_sides, pair_template
from quire.rendering.sentence_transformers_files import read_sentence_transformers_files
from quire.rendering.tokenizer import Tokenizer

THINKING_SWITCHES = ("enable_thinking", "thinking")  # variables by which templates let models reason or not
EFFORT, NO_EFFORT = "reasoning_effort", "none"  # another variable, and its value that lets them not reason
_NO_THINK = "no_think"  # the same value in Hunyuan's templates
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})
_MIN_CHARACTER_LIMIT = 1 << 20  # of texts that need not fit into the context; raised for longer contexts
_MAX_BATCH_CHARACTERS = 1 << 26  # more than a body has: prompts and queries count for each input
_END_OF_CONTENT = "\ue000quire:cut\ue000"  # inserted after the text of a message that is continued
_LONG_RENDERING = 0.5  # seconds; a chat that takes longer is not rendered again


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids of a prompt.

    Attributes:
        text: None if the client sent token ids.
        message_ends, next_turn: see `RequestFields`.
    """

    token_ids: TokenArray
    text: str | None = None
    message_ends: TokenArray | None = None
    next_turn: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """The input of a chat template: messages, tools and options.

    Attributes:
        media: texts that stand for media in messages that are texts, by the types of media that there are. See
            `normalize`.
        separator: what stands between the parts of a content in messages that are texts.
        pictures: its pictures; None if there are none.
        is_pair: its messages are a query and a document, for the template of pairs.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    template: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    media: Mapping[str, str] = field(default_factory=dict)
    separator: str = "\n"
    pictures: PictureTexts | None = None
    is_pair: bool = False


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A rendered conversation.

    Attributes:
        final_text: text of the last message, as it was passed to the template.
        variables: names that the template reads.
        keys: keys of objects that the template reads; None: all fields of messages have an effect.
        thinking: whether the template was asked to let the model reason; None: it was not told.
    """

    prompt: Prompt
    final_text: str
    variables: frozenset[str]
    keys: frozenset[str] | None
    thinking: bool | None


@dataclass(frozen=True, slots=True)
class TextJob:
    """A text to tokenize. `max_tokens`: a text that certainly has more tokens is refused; None: no limit."""

    text: str
    add_special_tokens: bool
    max_tokens: int | None


@dataclass(frozen=True, slots=True)
class ChatJob:
    """A conversation to render and tokenize. `max_tokens`: as in `TextJob`."""

    conversation: Conversation
    max_tokens: int | None


Job = TextJob | ChatJob | TextsJob | PairsJob


class PromptBuilder:
    """Make the prompts of one model.

    Attributes:
        sources: texts of the model's chat templates by name; the main one is `default`.
        sentence_transformers: settings in the files of sentence-transformers.
    """

    def __init__(
        self,
        folder: Path,
        tokenizer: Tokenizer,
        options: ChatOptions,
        max_model_len: int,
        media_tokens: frozenset[str] = frozenset(),
        *,
        finds_messages: bool = False,
    ) -> None:
        """Read the model's chat templates.

        Args:
            folder: the model's directory.
            tokenizer: the model's tokenizer.
            options: the operator's template and its variables.
            max_model_len: context length in tokens.
            media_tokens: texts of the tokens that stand for media.
            finds_messages: look for the ends of messages in prompts.

        Raises:
            PromptError: --chat-template is not a valid template.
        """
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._media_tokens = media_tokens
        self._finds_messages = finds_messages
        self._defaults = _with_switches(options.default_chat_template_kwargs)
        self.sources = load_templates(folder, tokenizer.config)
        if options.chat_template is not None:
            self.sources = {"default": read_template(options.chat_template)}
        self._compile = lru_cache(maxsize=8)(ChatTemplate)
        if options.chat_template is not None:
            self._compile(self.sources["default"])
        self.sentence_transformers = read_sentence_transformers_files(folder)
        self._pairs = pair_template(folder, tokenizer, self.sources.get("default"), self._defaults)
        self.prompt_length = lru_cache(maxsize=64)(self._prompt_length)

    def text(self, job: TextJob) -> Prompt:
        """Tokenize a text.

        Raises:
            PromptError: it is too long or contains lone surrogates.
        """
        self.check_length(job.text, job.max_tokens)
        return self._encode(job.text, job.add_special_tokens)

    def batch(self, job: TextsJob | PairsJob) -> list[PoolingPrompt]:
        """Tokenize texts or pairs for a model that pools.

        Raises:
            PromptError: one of them is too long, has no tokens, or contains a lone surrogate.
        """
        if isinstance(job, TextsJob):
            return tokenize_texts(
                job,
                self._tokenizer,
                lower_case=self.sentence_transformers.lower_case,
                without_punctuation=self.sentence_transformers.without_punctuation,
            )
        return tokenize_pairs(job, self._tokenizer, self._pairs)

    def _prompt_length(self, prompt: str) -> int:
        """Tokens of a prompt at the start of a text, with the special tokens before it."""
        ids = self._tokenizer.encode(prompt, add_special_tokens=True)
        return len(ids) - (bool(ids) and ids[-1] in self._tokenizer.special_tokens.values())

    def chat(self, job: ChatJob) -> RenderedChat:
        """Render and tokenize a conversation.

        Raises:
            PromptError: the template refuses it, or the prompt is too long.
        """
        conversation = replace(job.conversation, messages=with_arguments(job.conversation.messages))
        reserved = sorted(_RESERVED & set(conversation.variables))
        if reserved:
            raise PromptError(f"chat_template_kwargs cannot set {', '.join(reserved)}.", "chat_template_kwargs")
        template = self._template(conversation)
        guard = self._guard(conversation)
        if guard is not None:
            conversation = _guarded(conversation, guard)
        messages = normalize(
            conversation.messages,
            as_parts=template.wants_parts,
            media=conversation.media,
            separator=conversation.separator,
        )
        final_text = _text_of(messages[-1]) if messages else ""
        variables = {**self._defaults, **_with_switches(conversation.variables)}
        finds_messages = self._finds_messages and guard is None and conversation.pictures is None
        unchanged = [dict(message) for message in messages] if finds_messages else None
        begin = time.monotonic()
        text = self._render(template, conversation, messages, variables)
        if conversation.pictures is not None:
            text = conversation.pictures.put_into(text)
        self.check_length(text, job.max_tokens)
        if guard is None:
            ends = None
            if unchanged is not None and time.monotonic() - begin < _LONG_RENDERING:
                ends = self._message_ends(text, template, replace(conversation, messages=unchanged), variables)
            prompt = self._encode(text, conversation.add_special_tokens, ends)
        else:
            prompt = self._encode_marked(text, guard, conversation.add_special_tokens)
            final_text = guard.unmarked(final_text)
        return RenderedChat(prompt, final_text, template.variables, template.keys, _thinking(variables))

    def check_batch(self, job: TextsJob | PairsJob) -> None:
        """Check that no text is too long to be tokenized. (Some tokenizers drop characters, so that more may fit.)

        Raises:
            PromptError: one is.
        """
        limit = max(_MIN_CHARACTER_LIMIT, self._max_model_len * self._tokenizer.longest_token)
        sizes = job.sizes()
        if sum(sizes) > _MAX_BATCH_CHARACTERS:
            raise PromptError(
                f"The inputs have {sum(sizes)} characters, including prepended prompts; at most "
                f"{_MAX_BATCH_CHARACTERS} are allowed.",
                job.names.field,
            )
        for index, size in enumerate(sizes):
            if size > limit:
                is_query = isinstance(job, PairsJob) and len(job.texts[index][0]) > limit
                raise PromptError(
                    f"The input has {size} characters; at most {limit} are allowed. Please reduce the length of the "
                    "input prompt.",
                    job.name(index, is_query=is_query),
                )

    def check_length(self, text: str, max_tokens: int | None) -> None:
        """Check that a text may fit into `max_tokens` tokens, and that it is not too long to be tokenized.

        Raises:
            PromptError: it is too long.
        """
        if max_tokens is not None and len(text) > max_tokens * self._tokenizer.longest_token:
            raise PromptError(
                f"The prompt has {len(text)} characters, too many for the context of {self._max_model_len} tokens.",
                "input_text",
            )
        limit = max(_MIN_CHARACTER_LIMIT, self._max_model_len * self._tokenizer.longest_token)
        if len(text) > limit:
            raise PromptError(f"The text has {len(text)} characters; at most {limit} are allowed.", "input_text")

    def _guard(self, conversation: Conversation) -> TextGuard | None:
        """What keeps texts of users from becoming tokens of media, or beside media other control tokens.

        None if none would.
        """
        if not self._media_tokens:
            return None
        special = self._tokenizer.special_tokens if conversation.media else ()
        return TextGuard.needed_for(
            conversation.messages,
            (conversation.tools, conversation.documents, conversation.variables),
            ControlTexts.of(self._media_tokens.union(special)),
            ControlTexts.of(self._media_tokens),
        )

    def _message_ends(
        self, text: str, template: ChatTemplate, conversation: Conversation, variables: Mapping[str, Any]
    ) -> MessageEnds | None:
        """Return where messages end in the text of a prompt; None: that cannot be told.

        Args:
            text: of the prompt.
            template: has rendered it.
            conversation: with normalized messages.
            variables: of the template.
        """
        messages = conversation.messages
        try:
            marked = self._render(template, conversation, with_marks(messages), variables)
        except PromptError:  # a template that looks at the ends of texts
            return None
        ends = ends_in(marked, text)
        if not ends:
            return None
        if conversation.continue_final_message:
            return MessageEnds(ends)
        try:
            turn = normalize(NEXT_TURN, as_parts=template.wants_parts)
            following = self._render(template, conversation, [*map(dict, messages), *turn], variables)
        except PromptError:  # a template that needs another order of roles
            return MessageEnds(ends)
        return MessageEnds(ends, common_beginning(text, following))

    def _encode(self, text: str, add_special_tokens: bool, ends: MessageEnds | None = None) -> Prompt:
        """Tokenize a text. `ends`: where messages end in it."""
        _check_characters(text)
        if ends is None:
            return Prompt(token_array(self._tokenizer.encode(text, add_special_tokens=add_special_tokens)), text)
        ids, offsets = self._tokenizer.encode_with_offsets(text, add_special_tokens=add_special_tokens)
        return Prompt(token_array(ids), text, *ends.in_tokens(offsets))

    def _encode_marked(self, text: str, guard: TextGuard, add_special_tokens: bool) -> Prompt:
        """The tokens of a text but those of its marks."""
        _check_characters(text)
        ids = self._tokenizer.encode_without(text, guard.mark, add_special_tokens=add_special_tokens)
        return Prompt(token_array(ids), guard.unmarked(text))

    def _render(
        self,
        template: ChatTemplate,
        conversation: Conversation,
        messages: list[dict[str, Any]],
        variables: Mapping[str, Any],
    ) -> str:
        if conversation.continue_final_message:
            _mark_end(messages)
        text = template.render(
            {
                **self._tokenizer.special,
                **variables,
                "messages": messages,
                "tools": list(conversation.tools) if conversation.tools else None,
                "documents": list(conversation.documents) if conversation.documents else None,
                "add_generation_prompt": conversation.add_generation_prompt,
            }
        )
        if not conversation.continue_final_message:
            return text
        head, mark, _ = text.rpartition(_END_OF_CONTENT)
        if not mark:
            raise PromptError(
                "The chat template does not render the text of the final message, so that it cannot be continued.",
                "continue_final_message",
            )
        return head

    @property
    def pair_template(self) -> ChatTemplate | None:
        """The chat template of a query and a document; None if there is none."""
        return self._pairs.template if isinstance(self._pairs, ChatPairTemplate) else None

    @property
    def knows_sides(self) -> bool:
        """Whether the main chat template has messages of the roles `query` and `document`."""
        return knows_sides(self.sources.get("default", ""))

    def _template(self, conversation: Conversation) -> ChatTemplate:
        if conversation.is_pair:
            assert self.pair_template is not None
            return self.pair_template
        named = "tool_use" if conversation.tools and "tool_use" in self.sources else "default"
        source = conversation.template or self.sources.get(named)
        if source is None:
            raise PromptError(
                "The model has no chat template; start the server with --chat-template, or send a text: `prompt` to "
                "/v1/completions, `input` to endpoints that pool.",
                "messages",
            )
        return self._compile(source)


def _check_characters(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # from escapes in JSON, or from templates
        raise PromptError(f"The prompt contains an invalid character: {error}", "input_text") from error


def _guarded(conversation: Conversation, guard: TextGuard) -> Conversation:
    """The conversation with marks in what its users wrote."""
    return replace(
        conversation,
        messages=guard.messages(conversation.messages),
        tools=guard.value(conversation.tools),
        documents=guard.value(conversation.documents),
        variables=guard.value(conversation.variables),
    )


def _with_switches(variables: Mapping[str, Any]) -> dict[str, Any]:
    """The variables, and the switches of reasoning that follow from its effort if they set none."""
    effort = variables.get(EFFORT)
    if effort is None or any(name in variables for name in THINKING_SWITCHES):
        return dict(variables)
    return {**variables, **dict.fromkeys(THINKING_SWITCHES, effort not in (NO_EFFORT, _NO_THINK))}


def _thinking(variables: Mapping[str, Any]) -> bool | None:
    """Return whether these variables let a model reason; None if they do not say."""
    switches = [bool(variables[name]) for name in THINKING_SWITCHES if variables.get(name) is not None]
    return any(switches) if switches else None


def worker(
    folder: Path,
    backend: tokenizers.Tokenizer | None,
    options: ChatOptions,
    max_model_len: int,
    media_tokens: frozenset[str] = frozenset(),
    finds_messages: bool = False,
) -> Callable[[Job], Prompt | RenderedChat | list[PoolingPrompt]]:
    """Make the function that runs the jobs of a worker process.

    Args:
        folder: the model's directory.
        backend: the model's tokenizer; None if it is a file in the directory.
        options: options of `PromptBuilder`.
        max_model_len: context length in tokens.
        media_tokens, finds_messages: as in `PromptBuilder`.
    """
    tokenizer = Tokenizer.load(folder, backend)
    builder = PromptBuilder(folder, tokenizer, options, max_model_len, media_tokens, finds_messages=finds_messages)

    def do(job: Job) -> Prompt | RenderedChat | list[PoolingPrompt]:
        match job:
            case TextJob():
                return builder.text(job)
            case ChatJob():
                return builder.chat(job)
            case _:
                return builder.batch(job)

    return do


def _text_of(message: Mapping[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _mark_end(messages: list[dict[str, Any]]) -> None:
    """Append the marker to the text of the last message."""
    if not messages:
        raise PromptError("There is no final message to continue.", "continue_final_message")
    content = messages[-1]["content"]
    if isinstance(content, str):
        messages[-1]["content"] = content + _END_OF_CONTENT
    else:
        before, last = (content[:-1], content[-1]["text"]) if content and "text" in content[-1] else (content, "")
        messages[-1]["content"] = [*before, {"type": "text", "text": last + _END_OF_CONTENT}]
