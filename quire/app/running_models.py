"""RunningModel: a model that a server has started, with or without an engine of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Protocol

from quire.app.models import ModelSource
from quire.config.commands import Serve
from quire.config.options import ChatOptions, EngineOptions
from quire.engine.build.core_config import with_room_for_pictures
from quire.engine.client.engine import Engine
from quire.engine.client.model_info import ModelInfo
from quire.engine.client.records import Observer
from quire.engine.client.replicas.scaling import Scaling
from quire.engine.client.step_observer import StepObserver
from quire.engine.models.model_config import ModelConfig
from quire.multimodal.memory import MediaMemory
from quire.otlp.settings import TraceSettings
from quire.rendering.renderer import Renderer
from quire.rendering.tokenizer import Tokenizer
from quire.serving.defaults import read_defaults
from quire.serving.models import ModelParts, ServedModel, ServerState, served_model

NewObserver = Callable[[int], Observer]  # of the core with a rank


class RunningModel(Protocol):
    """A model that has been started."""

    async def loaded(self, media_memory: MediaMemory | None = None) -> ServedModel:
        """The model, once it can answer requests.

        Args:
            media_memory: the memory for media, which all models of a server share; None: the model has its own.

        Raises:
            EngineDead: it could not be loaded.
        """

    def observe(self, new_observer: NewObserver, number: int) -> None:
        """Have each core observed.

        Args:
            new_observer: gives the observer of a core, by its rank.
            number: of the model, which is its rank if there are no replicas.
        """

    async def watch(self, state: ServerState, give_up: Callable[[str], None]) -> None:
        """Start cores again that die, until that is hopeless; then call `give_up` with the reason."""

    async def stop(self) -> None:
        """Stop all that runs, loaded or not, and wait until it has ended, but not for long."""


@dataclass(frozen=True, slots=True)
class StepTraces:
    """How the steps of engines are traced.

    Attributes:
        settings: for engines in processes of their own.
        new_observer: watches the steps of an engine in a thread.
    """

    settings: TraceSettings
    new_observer: Callable[[], StepObserver]


StartModels = Callable[[StepTraces | None], AsyncIterator[RunningModel]]  # None: steps are not traced


def engine_options(settings: Serve, config: ModelConfig) -> EngineOptions:
    """Return the options of a model's engine: where no number of tokens of a step is set, its pictures fit."""
    options = EngineOptions.of(settings)
    return options if "max_num_batched_tokens" in settings.model_fields_set else with_room_for_pictures(options, config)


def front_end_of(
    source: ModelSource,
    settings: Serve,
    tokenizer: Tokenizer,
    engine: Engine,
    info: ModelInfo,
    scaling: Scaling | None = None,
    media_memory: MediaMemory | None = None,
) -> ServedModel:
    """Return what prepares the requests of a model: its chat template, tokenizer and sampling defaults.

    Args:
        source: the model.
        settings: settings of the server.
        tokenizer: the model's.
        engine: runs its requests.
        info: facts about it.
        scaling: changes the number of its replicas; None: it has none.
        media_memory: see `RunningModel.loaded`.
    """
    folder = source.folder
    renderer = Renderer(
        folder,
        tokenizer,
        ChatOptions.of(settings),
        info.max_model_len,
        media_tokens=info.media_tokens,
        finds_messages=info.saves_states,
        max_queued=engine.capacity,
        share=settings.max_client_share,
    )
    defaults = read_defaults(
        folder,
        tokenizer,
        settings.generation_config,
        settings.override_generation_config,
        settings.hf_overrides,
    )
    parts = ModelParts(
        names=source.names,
        root=source.root,
        client=engine,
        renderer=renderer,
        info=info,
        defaults=defaults,
        priority_scheduling=settings.scheduling_policy == "priority",
        scaling=scaling,
    )
    return served_model(parts, folder, settings, media_memory)
