"""WeightUpdate: replaces the weights of an engine's model, on all of its ranks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from quire.engine.client.protocol import UpdateWeights
from quire.engine.execution.devices.device import Device
from quire.engine.execution.ranks.commands import RankCommands
from quire.engine.models.checkpoint.checkpoint import Progress
from quire.engine.models.errors import ModelError
from quire.engine.models.loader import LoadedModel, ProgressBar
from quire.engine.models.source import ReplacedInPart, WeightSource

logger = logging.getLogger(__name__)
Poll = Callable[[], None]


class WeightUpdate:
    """Replace weights in their places in memory, so that executors and captured steps stay as they are."""

    def __init__(
        self,
        source: WeightSource,
        loaded: Callable[[], LoadedModel],
        device: Device,
        ranks: RankCommands | None = None,
    ) -> None:
        """Prepare.

        Args:
            source: where the model was loaded from.
            loaded: returns the model; another one after a sleep in which the weights were dropped.
            device: where it is.
            ranks: the other ranks of the model; None: there are none.
        """
        self._source = source
        self._loaded = loaded
        self._device = device
        self._ranks = ranks

    def run(self, folder: Path, poll: Poll) -> None:
        """Check the folder, then replace the weights. No step is in flight.

        `poll` is called between two tensors.

        Raises:
            ModelError: the folder does not fit to the model, and nothing has changed.
            ReplacedInPart: reading has failed after some weights were replaced.
            RankDied: it has failed on another rank.
        """
        started, loaded = time.monotonic(), self._loaded()
        self._source.check(loaded, folder, lambda _: poll())
        checked = time.monotonic()
        if self._ranks is not None:
            self._ranks.send(UpdateWeights(str(folder)))
        try:
            with self._device.activate():
                self._source.replace_weights(loaded, folder, _progress(poll))
        except ModelError as error:
            if self._ranks is None:
                raise
            raise ReplacedInPart(f"other ranks may have replaced their weights, but not this one: {error}") from error
        if self._ranks is not None:
            self._ranks.wait(poll)
        self._device.release_memory()
        logger.info(
            "the weights are those of %s, checked in %.1f s and replaced in %.1f s",
            folder,
            checked - started,
            time.monotonic() - checked,
        )


def _progress(poll: Poll) -> ProgressBar:
    """Progress that is not shown."""

    @contextmanager
    def bar(_: int) -> Iterator[Progress]:
        yield lambda _: poll()

    return bar
