"""Two engines in this process, one of which computes prompts for the other; both are stepped by the test."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quire.engine.client.kv_transfer import RemoteBlocks
from quire.engine.client.sampling_params import SamplingParams
from quire.engine.scheduling.scheduler import Scheduler
from tests.support.engine import Engine, Result, greedy


def transfer_config(role: str = "kv_both", policy: str = "fail", **extra: Any) -> dict[str, Any]:
    """The value of --kv-transfer-config, with a free port."""
    return {
        "kv_connector": "QuireConnector",
        "kv_role": role,
        "kv_port": 0,
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": extra,
    }


def scheduler_of(engine: Engine) -> Scheduler:
    scheduler = engine.core.scheduler
    assert isinstance(scheduler, Scheduler)
    return scheduler


def held_blocks(engine: Engine) -> int:
    """Blocks that an engine keeps for others."""
    held = scheduler_of(engine).held
    return 0 if held is None else held.num_blocks


def step(engine: Engine) -> None:
    """Let an engine copy blocks, and run a step if it has work; it never waits."""
    engine.core.take_loaded()
    if engine.core.has_work:
        engine.core.step()
    engine.core.check()
    engine._collect()


class Pair:
    """A prefiller and a decoder."""

    def __init__(self, prefiller: Engine, decoder: Engine) -> None:
        self.prefiller = prefiller
        self.decoder = decoder

    def prefill(self, name: str, prompt: Sequence[int], **fields: Any) -> RemoteBlocks:
        """Compute a prompt; returns what the decoder needs to know."""
        self.prefiller.add(name, prompt, greedy(1), is_held=True, **fields)
        self.prefiller.run()
        kept = self.prefiller.results[name].outputs[-1].held_blocks
        assert kept is not None
        return kept

    def turn(self) -> None:
        """Let both copy blocks, and run a step of each that has work."""
        for engine in (self.prefiller, self.decoder):
            step(engine)

    def run(self) -> None:
        """Run until the decoder has no request."""
        while self.decoder.busy:
            self.turn()

    def generate(self, name: str, prompt: Sequence[int], params: SamplingParams, **fields: Any) -> Result:
        """Compute a prompt in one engine, and the answer in the other."""
        self.decoder.add(name, prompt, params, remote=self.prefill(name, prompt, **fields), **fields)
        self.run()
        return self.decoder.results[name]

    def wait_until_released(self) -> None:
        """Wait until the prefiller keeps nothing."""
        while held_blocks(self.prefiller):
            self.turn()


@contextmanager
def pair_of(
    folder: Path, *, policy: str = "fail", extra: dict[str, Any] | None = None, **options: Any
) -> Iterator[Pair]:
    """A pair of engines with the same model. `extra`: what --kv-transfer-config leaves to the connector."""
    options = {"block_size": 4, **options}
    config = transfer_config(policy=policy, **(extra or {}))
    prefiller = Engine(folder, kv_transfer_config=config, **options)
    try:
        decoder = Engine(folder, kv_transfer_config=config, **options)
        try:
            yield Pair(prefiller, decoder)
        finally:
            decoder.core.close()
    finally:
        prefiller.core.close()
