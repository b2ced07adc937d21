"""The deployment: a replica is an app with its engines, in an actor of Ray."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig
from starlette.types import ASGIApp

from quire.app.cli import prepare_process
from quire.config.commands import Serve
from quire.engine.client.replicas.prefix_index import PrefixIndex
from quire.ray.arguments import read_arguments
from quire.ray.autoscaling import RUNNING, WAITING
from quire.ray.ingress import Ingress
from quire.ray.prefixes import PIECE, packed
from quire.ray.router import CAPACITY, RECENT

_ROUTER = "quire.ray.router.PrefixRouter"
_STATS_SECONDS = 2.0  # between two reports of what a replica holds
_REPORTED = 2048  # prefixes in a report
_BYTES_PER_TOKEN = 4  # of text, for the size of a cache in pieces of text
_FORCE_SECONDS = 5.0  # from the end of --shutdown-timeout until a replica is ended by force


class Replica:
    """One replica. Ray calls its methods on the event loop that also answers requests."""

    async def __init__(self, arguments: Mapping[str, Any]) -> None:  # type: ignore[misc]  # Ray awaits it
        prepare_process()
        settings = _with_threads(arguments)
        self._failure: str | None = None
        self._end = asyncio.Event()
        opened: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._running = asyncio.create_task(self._run(settings, opened))
        await asyncio.wait([opened, self._running], return_when=asyncio.FIRST_COMPLETED)
        if self._running.done():
            await self._running  # raises what has failed
        self._application = opened.result()
        models = self._application.state.models
        capacity = sum(model.info.num_blocks * model.info.block_size for model in models) * _BYTES_PER_TOKEN // PIECE
        self._held = PrefixIndex(max(1, capacity))

    async def _run(self, settings: Serve, opened: asyncio.Future[Any]) -> None:
        """Hold the app open until the replica ends."""
        from quire.app.engines import start_engines  # noqa: PLC0415 imports torch
        from quire.app.lifecycle import open_application  # noqa: PLC0415 like it
        from quire.app.serve import check_settings, find_models  # noqa: PLC0415
        from quire.engine.models.config_reader import ConfigReader  # noqa: PLC0415

        check_settings(settings)
        configs = ConfigReader()
        sources = await asyncio.to_thread(find_models, settings, configs)
        start = partial(start_engines, settings, sources, configs)
        async with open_application(settings, start) as application, application.running(self._fail):
            opened.set_result(application)
            await self._end.wait()

    def _fail(self, reason: str) -> None:
        self._failure = reason

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the app; Ray calls it once `__init__` has returned."""
        return Ingress(self._application.asgi, self._held)

    async def check_health(self) -> None:
        """Tell Ray whether the engines run and make progress; it replaces replicas that raise.

        Raises:
            RuntimeError: they do not.
        """
        reason = self._failure or self._application.state.unhealthy_reason()
        if reason is not None:
            raise RuntimeError(reason)

    async def record_routing_stats(self) -> dict[str, Any]:
        """Report to routers which prefixes were used last, by whatever proxy they came."""
        return {CAPACITY: self._held.capacity, RECENT: packed(self._held.recent(_REPORTED))}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Report to the autoscaler what the engines have to do."""
        stats = [model.client.stats for model in self._application.state.models]
        return {RUNNING: sum(step.running for step in stats), WAITING: sum(step.waiting for step in stats)}

    async def __del__(self) -> None:
        """End the engines; Ray calls it when the replica's requests have ended, and only once."""
        if not hasattr(self, "_end"):
            return
        self._end.set()
        await asyncio.wait([self._running])


def build_application(arguments: Mapping[str, Any]) -> serve.Application:
    """Return the application for the `args` of a Serve config."""
    settings = read_arguments(arguments)
    ranks = settings.tensor_parallel_size * settings.pipeline_parallel_size
    cpus = settings.num_threads or 1
    options: dict[str, Any] = {"ray_actor_options": {"num_cpus": cpus}}
    if settings.device == "cuda":
        # Ray shows a replica the GPUs of its own bundle only, and the ranks are processes of the replica.
        options["ray_actor_options"]["num_gpus"] = ranks
    if ranks > 1:
        options["placement_group_bundles"] = _bundles(options["ray_actor_options"], cpus, ranks)
        options["placement_group_strategy"] = "STRICT_PACK"  # ranks share memory
    deployment = serve.deployment(
        name="Quire",
        max_ongoing_requests=settings.limit_concurrency,
        max_queued_requests=settings.limit_concurrency,
        graceful_shutdown_timeout_s=math.ceil(settings.shutdown_timeout + _FORCE_SECONDS),
        request_router_config=RequestRouterConfig(
            request_router_class=_ROUTER, request_routing_stats_period_s=_STATS_SECONDS
        ),
        **options,
    )(serve.ingress()(Replica))
    return deployment.bind(dict(arguments))


def _bundles(actor: Mapping[str, float], cpus: int, ranks: int) -> list[dict[str, float]]:
    """One bundle for the replica with the first rank, and one for each other rank."""
    first = {"CPU": actor["num_cpus"], **({"GPU": actor["num_gpus"]} if "num_gpus" in actor else {})}
    return [first] + [{"CPU": float(cpus)} for _ in range(ranks - 1)]


def _with_threads(arguments: Mapping[str, Any]) -> Serve:
    """The settings, with as many threads as Ray has given CPUs to the replica, unless they say how many."""
    settings = read_arguments(arguments)
    cpus = int(ray.get_runtime_context().get_assigned_resources().get("CPU", 0))
    if settings.num_threads is not None or not cpus:
        return settings
    return read_arguments({**arguments, "num_threads": cpus})
