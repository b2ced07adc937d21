"""The models that the server answers for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.api.answers.reasoning import ReasoningTags
from quire.api.answers.structured.checker import GrammarChecker
from quire.api.answers.tools.registry import ToolFormat
from quire.api.http.errors import NotFound
from quire.api.serving.defaults import GenerationDefaults
from quire.config.options import LimitOptions
from quire.engine.wire.client import EngineClient
from quire.engine.wire.protocol import ModelInfo
from quire.multimodal.renderer import Renderer


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model, its engine and its names; the first one is in its answers.

    Attributes:
        reasoning: the tags around its reasoning, if it reasons.
        tools: the format that it writes calls in, if that is known.
        shown_tokens: special tokens that stand in an answer's text all the same, as its parsers look for them.
    """

    names: tuple[str, ...]
    root: str
    client: EngineClient
    renderer: Renderer
    info: ModelInfo
    defaults: GenerationDefaults
    reasoning: ReasoningTags | None = None
    tools: ToolFormat | None = None
    shown_tokens: tuple[int, ...] = ()
    grammars: GrammarChecker | None = None
    by_priority: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """What ends an answer; a model's files may name tokens that it does not have."""
        return tuple(token for token in self.defaults.eos_token_ids if token < self.info.vocab_size)


@dataclass(slots=True)
class Services:
    """What the routes work with.

    Attributes:
        sse_keepalive: seconds of silence after which a stream sends a comment; 0: never.
        in_flight: HTTP requests being answered.
        draining: no new requests should come here.
    """

    models: Sequence[ServedModel]
    limits: LimitOptions
    strict_fields: bool = False
    trust_request_chat_template: bool = False
    stall_timeout: float = 120.0
    sse_keepalive: float = 15.0
    in_flight: int = 0
    draining: bool = False

    def model(self, name: str | None) -> ServedModel:
        """The model of a request.

        Raises:
            NotFound: none has that name.
        """
        if name is None or name == "":
            return self.models[0]
        for model in self.models:
            if name in model.names:
                return model
        raise NotFound(f"The model `{name}` does not exist.", "model")

    def ailment(self) -> str | None:
        """Why the server is unhealthy: an engine has ended, or has owed a sign of life for too long."""
        for model in self.models:
            if model.client.dead is not None:
                return str(model.client.dead)
            stalled = model.client.stalled_for()
            if stalled > self.stall_timeout:
                return f"The engine of {model.names[0]} has made no progress for {stalled:.0f} s."
        return None
