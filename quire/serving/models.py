"""The served models, and the state that all endpoints share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict, TypeVar

from typing_extensions import override

from quire.config.commands import Serve
from quire.config.options import AudioOptions, LimitOptions, MediaOptions, PictureOptions, VideoOptions
from quire.engine.client.audio import AudioInfo
from quire.engine.client.engine import Engine
from quire.engine.client.model_info import Generates, ModelInfo, Pools, Transcribes
from quire.engine.client.origin import current_origin
from quire.engine.client.pictures import Color, PictureInfo
from quire.engine.client.pooling_params import PoolingTask
from quire.engine.client.replicas.scaling import Scaling
from quire.engine.client.streaming import Streams
from quire.multimodal.audio.reader import AudioReader
from quire.multimodal.documents import DocumentReader
from quire.multimodal.memory import MediaMemory
from quire.multimodal.picture_reader import PictureReader
from quire.multimodal.picture_settings import background_color, with_frame_settings, with_settings
from quire.multimodal.pictures.decode import WHITE
from quire.multimodal.sources import MediaSources
from quire.parsing.parsers import parser_tokens, reasoning_tags, tool_format
from quire.parsing.reasoning import ReasoningTags
from quire.parsing.structured.checker import GrammarChecker
from quire.parsing.tools.registry import ToolFormat
from quire.protocol.errors import InvalidRequest, NotFound, shorten
from quire.rendering.renderer import Renderer
from quire.serving.defaults import GenerationDefaults
from quire.serving.malloc_trim import MallocTrimmer
from quire.serving.result_memory import ResultMemory
from quire.serving.siblings import NoOtherProcesses, OtherProcesses
from quire.workers.threads import FairThreads


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A model, its engine and its names. Its class says what it does.

    Attributes:
        names: the first one is in responses.
        root: the model as it was given on the command line.
        priority_scheduling: the engine runs with the priority policy.
        scaling: changes the number of its replicas; None: it has none.
    """

    names: tuple[str, ...]
    root: str
    client: Engine
    renderer: Renderer
    info: ModelInfo
    defaults: GenerationDefaults
    priority_scheduling: bool = False
    scaling: Scaling | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    async def close(self) -> None:
        """Close the threads and worker processes that prepare requests. `RunningEngine` closes the engine."""
        await self.renderer.close()

    def reset_media_cache(self) -> None:
        """Let media be read and prepared anew."""

    @property
    def tasks(self) -> tuple[str, ...]:
        """Tasks of the model; see `ModelInfo.tasks`."""
        return self.info.tasks

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """End-of-sequence tokens of the model's files that are in its vocabulary."""
        return self.defaults.known_eos_token_ids(self.info.vocab_size)


@dataclass(frozen=True, slots=True)
class AudioInput:
    """How a model that generates reads audio: its items, and what decodes the files."""

    info: AudioInfo
    reader: AudioReader


@dataclass(frozen=True, slots=True)
class PictureInput:
    """How a model reads pictures and videos: facts with the operator's settings, and what prepares the files.

    Attributes:
        background: colour behind transparent pixels.
    """

    info: PictureInfo
    reader: PictureReader
    background: Color


@dataclass(frozen=True, kw_only=True)
class GeneratingModel(ServedModel):
    """A model that generates text.

    Attributes:
        grammars: checks the grammars of its requests.
        reasoning: the tags around its reasoning; None if it does not reason.
        tools: the format of its tool calls; None if it is not known.
        parser_tokens: special tokens that are kept in the text of answers because parsers look for them.
        audio: None if it does not read audio.
        pictures: None if it does not read pictures.
    """

    grammars: GrammarChecker
    reasoning: ReasoningTags | None = None
    tools: ToolFormat | None = None
    parser_tokens: tuple[int, ...] = ()
    audio: AudioInput | None = None
    pictures: PictureInput | None = None

    @override
    def reset_media_cache(self) -> None:
        if self.pictures is not None:
            self.pictures.reader.cache.clear()

    @override
    async def close(self) -> None:
        await super().close()
        await self.grammars.close()
        if self.audio is not None:
            await self.audio.reader.close()
        if self.pictures is not None:
            await self.pictures.reader.close()


@dataclass(frozen=True, kw_only=True)
class PoolingModel(ServedModel):
    """A model that pools.

    Attributes:
        pools: facts about it.
        pictures: None if it does not read pictures.
        scorer: compares embeddings of many tokens, and averages those of chunks, in threads, off the event loop. A
            request that waits for it holds a slot of the engine.
    """

    pools: Pools
    pictures: PictureInput | None = None
    scorer: FairThreads = field(default_factory=lambda: FairThreads("score", size=1, max_queued=1 << 20))

    @override
    def reset_media_cache(self) -> None:
        if self.pictures is not None:
            self.pictures.reader.cache.clear()

    @override
    async def close(self) -> None:
        self.scorer.close()
        await super().close()
        if self.pictures is not None:
            await self.pictures.reader.close()


@dataclass(frozen=True, kw_only=True)
class SpeechModel(ServedModel):
    """A model that only transcribes.

    Attributes:
        speech: facts about it.
        reader: decodes the audio of its requests.
    """

    speech: Transcribes | Streams
    reader: AudioReader

    @override
    async def close(self) -> None:
        await super().close()
        await self.reader.close()


class ModelParts(TypedDict):
    """What models of all kinds have; see `ServedModel`."""

    names: tuple[str, ...]
    root: str
    client: Engine
    renderer: Renderer
    info: ModelInfo
    defaults: GenerationDefaults
    priority_scheduling: bool
    scaling: NotRequired[Scaling | None]


def served_model(
    parts: ModelParts, folder: Path, settings: Serve, media_memory: MediaMemory | None = None
) -> ServedModel:
    """Return a model with what its kind needs to prepare requests; nothing of that is started.

    Args:
        parts: what models of all kinds have.
        folder: the model's directory.
        settings: settings of the server.
        media_memory: the memory for media, which all models of a server share; None: the model has its own.
    """
    media_memory = media_memory or MediaMemory(int(settings.max_media_memory), settings.max_client_share)
    queued = (settings.max_num_seqs + settings.max_num_queued_seqs) * settings.replicas
    new_reader = partial(
        AudioReader,
        AudioOptions.of(settings),
        media_memory,
        max_video_size=int(settings.max_video_size),
        max_queued=queued,
        share=settings.max_client_share,
    )
    match parts["info"].kind:
        case Pools() as pools:
            picture_input = _picture_input(pools.pictures, parts["client"], settings, media_memory, queued)
            return PoolingModel(**parts, pools=pools, pictures=picture_input)
        case Generates(audio=audio, pictures=pictures):
            audio_input = None if audio is None else AudioInput(audio, new_reader())
            picture_input = _picture_input(pictures, parts["client"], settings, media_memory, queued)
            return _generating_model(parts, folder, settings, audio_input, picture_input)
        case speech:
            return SpeechModel(**parts, speech=speech, reader=new_reader())


def _picture_input(
    info: PictureInfo | None, client: Engine, settings: Serve, memory: MediaMemory, queued: int
) -> PictureInput | None:
    """How a model reads pictures; None if it does not.

    Raises:
        PromptError: a setting of --mm-processor-kwargs is not one of this model, or one of --media-io-kwargs is not
            valid.
    """
    if info is None:
        return None
    share = settings.max_client_share
    reader = PictureReader(
        PictureOptions.of(settings),
        memory,
        max_size=int(settings.max_image_size),
        videos=VideoOptions.of(settings),
        max_queued=queued,
        share=share,
        on_lookup=client.observers.on_media_lookup,
    )
    info = with_settings(info, settings.mm_processor_kwargs)
    if info.video is not None:  # settings of all models may be of others
        info = with_frame_settings(info, settings.media_io_kwargs)
    return PictureInput(info, reader, background_color(settings.media_io_kwargs, WHITE))


def _generating_model(
    parts: ModelParts, folder: Path, settings: Serve, audio: AudioInput | None, pictures: PictureInput | None
) -> GeneratingModel:
    renderer, vocab_size = parts["renderer"], parts["info"].vocab_size
    reasoning = reasoning_tags(settings.reasoning_parser, renderer.template)
    tools = tool_format(settings.tool_call_parser, renderer.template)
    eos_token_ids = parts["defaults"].known_eos_token_ids(vocab_size)
    return GeneratingModel(
        **parts,
        grammars=GrammarChecker(
            folder, vocab_size, eos_token_ids, settings.max_client_share, parts["client"].observers.checking_grammar
        ),
        reasoning=reasoning,
        tools=tools,
        parser_tokens=parser_tokens(reasoning, tools, renderer.tokenizer.special_tokens),
        audio=audio,
        pictures=pictures,
    )


Model = TypeVar("Model", bound=ServedModel)


@dataclass(slots=True)
class ServerState:
    """State that all endpoints share.

    Attributes:
        media_memory: memory for the media of all requests and sessions.
        stall_timeout: seconds without progress of an engine after which the server is unhealthy.
        tokenizer_info: /tokenizer_info is served.
        include_usage: streams of completions and chats always end with their token counts.
        include_metrics: answers have timings, and streams that end with their token counts.
        tokens_as_ids: tokens of log-probabilities are written as ids unless a request asks for their text.
        sse_keep_alive_interval: seconds of silence after which a stream sends a comment; 0: never.
        transcription_events: default format of streamed transcriptions.
        media: where media in messages come from.
        documents: reads PDF files in messages.
        max_audio_parts: most pieces of audio in a chat.
        max_image_parts: most pictures in a chat.
        max_video_parts: most videos in a chat.
        in_flight: number of HTTP requests that are being answered.
        draining: the server is shutting down and should get no new requests.
        sleep_mode: the engines can sleep.
        weight_update_path: directory of models whose weights may replace those of the served ones; None: none may.
        profiler: steps can be profiled.
        degraded: each gives a reason why a part of the server does not work, or None.
        results: memory for pooled results that clients have not read.
        renders_only: no engine runs the models: their requests are rendered.
        others: other processes of the server that answer requests.
    """

    models: Sequence[ServedModel]
    limits: LimitOptions
    media_memory: MediaMemory
    strict_fields: bool = False
    trust_request_chat_template: bool = False
    tokenizer_info: bool = False
    include_usage: bool = False
    include_metrics: bool = False
    tokens_as_ids: bool = False
    stall_timeout: float = 120.0
    sse_keep_alive_interval: float = 15.0
    transcription_events: Literal["openai", "vllm"] = "openai"
    media: MediaSources = field(default_factory=lambda: MediaSources(MediaOptions(), AudioOptions(), VideoOptions()))
    documents: DocumentReader = field(default_factory=lambda: DocumentReader(MediaOptions()))
    max_audio_parts: int = 16
    max_image_parts: int = 64
    max_video_parts: int = 4
    in_flight: int = 0
    draining: bool = False
    sleep_mode: bool = False
    weight_update_path: Path | None = None
    profiler: bool = False
    degraded: list[Callable[[], str | None]] = field(default_factory=list)
    malloc_trimmer: MallocTrimmer = field(default_factory=MallocTrimmer)
    results: ResultMemory = field(default_factory=ResultMemory)
    renders_only: bool = False
    others: OtherProcesses = field(default_factory=NoOtherProcesses)

    def model(self, name: str | None) -> ServedModel:
        """The model of this name; the first model if the name is None or empty.

        Raises:
            NotFound: no model has this name.
        """
        if name is None or name == "":
            return self.models[0]
        for model in self.models:
            if name in model.names:
                return model
        raise NotFound(f"The model `{shorten(name)}` does not exist.", "model")

    def generating_model(self, name: str | None) -> GeneratingModel:
        """Return the model of this name, which generates text; see `_model_for`."""
        return self._model_for(name, "generate", GeneratingModel)

    def pooling_model(self, name: str | None, task: PoolingTask) -> PoolingModel:
        """Return the model of this name, which has a pooling task; see `_model_for`."""
        return self._model_for(name, task, PoolingModel)

    def pooling_models(self, name: str | None) -> list[PoolingModel]:
        """Return the model of this name, which pools, or all that pool if the name is None or empty.

        Raises:
            InvalidRequest: it does not pool, or none does.
            NotFound: no model has this name.
        """
        models = [self.model(name)] if name else self.models
        pooling = [model for model in models if isinstance(model, PoolingModel)]
        if not pooling:
            raise InvalidRequest(
                f"The model `{models[0].names[0]}` does not support embeddings or classification; "
                f"it supports: {', '.join(models[0].tasks)}.",
                "model",
            )
        current_origin().notes.model = name or pooling[0].names[0]
        return pooling

    def transcribing_model(self, name: str | None) -> ServedModel:
        """Return the model of this name, which transcribes; see `_model_for`."""
        return self._model_for(name, "transcribe", ServedModel)

    def _model_for(self, name: str | None, task: str, kind: type[Model]) -> Model:
        """Return the model of this name, which has this task; the first that has it if the name is None or empty.

        Raises:
            InvalidRequest: it does not have this task.
            NotFound: no model has this name.
        """
        able = [model for model in self.models if isinstance(model, kind) and task in model.tasks]
        if not name and able:
            current_origin().notes.model = able[0].names[0]
            return able[0]
        named = self.model(name)
        for model in able:
            if model is named:
                current_origin().notes.model = name or named.names[0]
                return model
        raise InvalidRequest(
            f"Unsupported task: {shorten(task)!r}. The model `{shorten(name or named.names[0])}` supports: "
            f"{', '.join(named.tasks)}.",
            "model",
        )

    async def close_media(self) -> None:
        """Close the threads and worker processes that fetch and read media."""
        self.media.close()
        await self.documents.close()

    @property
    def is_sleeping(self) -> bool:
        """Whether the engine of a model sleeps, in whole or in part."""
        return any(model.client.sleeping.asleep for model in self.models)

    @property
    def is_paused(self) -> bool:
        """Whether the engine of a model is paused."""
        return any(model.client.commands.is_paused for model in self.models)

    def degraded_reasons(self) -> list[str]:
        """Why some endpoints do not work, while the server is healthy."""
        return [reason for part in self.degraded if (reason := part()) is not None]

    def unhealthy_reason(self) -> str | None:
        """Why the server is unhealthy: an engine has ended or does not respond. None if it is healthy."""
        for model in self.models:
            if model.client.dead is not None:
                return str(model.client.dead)
            stalled = model.client.unresponsive_seconds()
            if stalled > self.stall_timeout:
                return f"The engine of {model.names[0]} has made no progress for {stalled:.0f} s."
        return None


async def each_model(changes: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Wait until all models have changed, or failed to; raises the first error."""
    done: list[BaseException | None] = await asyncio.gather(*changes, return_exceptions=True)
    for error in done:
        if error is not None:
            raise error
