"""The served models, and the state that all endpoints share."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from quire.config.options import LimitOptions
from quire.engine.client.engine_client import EngineClient
from quire.engine.client.model_info import ModelInfo
from quire.multimodal.audio.reader import AudioReader
from quire.multimodal.sources import MediaPolicy
from quire.parsing.reasoning import ReasoningTags
from quire.parsing.structured.checker import GrammarChecker
from quire.parsing.tools.registry import ToolFormat
from quire.protocol.errors import InvalidRequest, NotFound, shorten
from quire.rendering.renderer import Renderer
from quire.serving.defaults import GenerationDefaults
from quire.serving.malloc_trim import MallocTrimmer
from quire.serving.result_memory import ResultMemory
from quire.workers.threads import FairThreads


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model, its engine and its names.

    Attributes:
        names: the first one is in responses.
        root: the model as it was given on the command line.
        reasoning: the tags around its reasoning; None if it does not reason.
        tools: the format of its tool calls; None if it is not known.
        parser_tokens: special tokens that are kept in the text of answers because parsers look for them.
        audio: decodes the audio of its requests; None if it takes none.
        grammars: None if the model cannot be constrained by grammars.
        priority_scheduling: the engine runs with the priority policy.
        scorer: compares embeddings of many tokens, and averages those of chunks, in threads, off the event loop. A
            request that waits for it holds a slot of the engine.
    """

    names: tuple[str, ...]
    root: str
    client: EngineClient
    renderer: Renderer
    info: ModelInfo
    defaults: GenerationDefaults
    reasoning: ReasoningTags | None = None
    tools: ToolFormat | None = None
    parser_tokens: tuple[int, ...] = ()
    audio: AudioReader | None = None
    grammars: GrammarChecker | None = None
    priority_scheduling: bool = False
    scorer: FairThreads = field(default_factory=lambda: FairThreads("score", size=1, max_queued=1 << 20))
    created: int = field(default_factory=lambda: int(time.time()))

    async def close(self) -> None:
        """Close the threads and worker processes that prepare requests. `RunningEngine` closes the engine."""
        self.scorer.close()
        await self.renderer.close()
        if self.audio is not None:
            await self.audio.close()
        if self.grammars is not None:
            await self.grammars.close()

    @property
    def tasks(self) -> tuple[str, ...]:
        """Tasks of the model: "generate", "transcribe" or pooling tasks; "score" also if it compares embeddings."""
        tasks, pooling = self.info.tasks, self.info.pooling
        scores = pooling is not None and pooling.score_method is not None
        return (*tasks, "score") if scores and "score" not in tasks else tasks

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """End-of-sequence tokens of the model's files that are in its vocabulary."""
        return tuple(token for token in self.defaults.eos_token_ids if token < self.info.vocab_size)


@dataclass(slots=True)
class ServerState:
    """State that all endpoints share.

    Attributes:
        stall_timeout: seconds without progress of an engine after which the server is unhealthy.
        tokenizer_info: /tokenizer_info is served.
        include_usage: streams of completions and chats always end with their token counts.
        tokens_as_ids: tokens of log-probabilities are written as ids unless a request asks for their text.
        sse_keep_alive_interval: seconds of silence after which a stream sends a comment; 0: never.
        transcription_events: default format of streamed transcriptions.
        media: policy for URLs in messages.
        max_audio_parts: most pieces of audio in a chat.
        in_flight: number of HTTP requests that are being answered.
        draining: the server is shutting down and should get no new requests.
        sleep_mode: the engines can sleep.
        degraded: each gives a reason why a part of the server does not work, or None.
        results: memory for pooled results that clients have not read.
    """

    models: Sequence[ServedModel]
    limits: LimitOptions
    strict_fields: bool = False
    trust_request_chat_template: bool = False
    tokenizer_info: bool = False
    include_usage: bool = False
    tokens_as_ids: bool = False
    stall_timeout: float = 120.0
    sse_keep_alive_interval: float = 15.0
    transcription_events: Literal["openai", "vllm"] = "openai"
    media: MediaPolicy = field(default_factory=MediaPolicy)
    max_audio_parts: int = 16
    in_flight: int = 0
    draining: bool = False
    sleep_mode: bool = False
    degraded: list[Callable[[], str | None]] = field(default_factory=list)
    malloc_trimmer: MallocTrimmer = field(default_factory=MallocTrimmer)
    results: ResultMemory = field(default_factory=ResultMemory)

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

    def generating_model(self, name: str | None) -> ServedModel:
        """The model of this name, which generates text; the first one that does if the name is None or empty.

        Raises:
            InvalidRequest: it does not generate.
            NotFound: no model has this name.
        """
        return self.model_for(name, "generate")

    def model_for(self, name: str | None, task: str) -> ServedModel:
        """The model of this name, which has this task; the first one that has it if the name is None or empty.

        Raises:
            InvalidRequest: it does not have this task.
            NotFound: no model has this name.
        """
        if not name:
            found = next((model for model in self.models if task in model.tasks), None)
            if found is not None:
                return found
        model = self.model(name)
        if task not in model.tasks:
            raise InvalidRequest(
                f"Unsupported task: {shorten(task)!r}. The model `{shorten(name or model.names[0])}` supports: "
                f"{', '.join(model.tasks)}.",
                "model",
            )
        return model

    @property
    def is_sleeping(self) -> bool:
        """Whether the engine of a model sleeps, in whole or in part."""
        return any(model.client.sleeping.asleep for model in self.models)

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
