"""The HTTP server, and its graceful shutdown."""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import socket
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from quire import __version__
from quire.api.responses.service import ResponseService
from quire.app.access_log import AccessLog
from quire.app.connections import Connections
from quire.app.exits import end_process, end_process_after, handling_signals
from quire.app.front_end import FrontEnd
from quire.app.http_protocol import BoundedProtocol
from quire.app.listener import accept_connections
from quire.app.sockets import listen_error
from quire.app.tls import Tls, TlsHandshake
from quire.app.websocket import BoundedWebSocket
from quire.config.commands import Serve
from quire.config.options import ConnectionOptions
from quire.realtime.sessions import Sessions
from quire.serving.models import ServedModel, ServerState

logger = logging.getLogger("quire")
_ERROR_GRACE = 2.0  # seconds for clients to read the error that aborts their request
_STOP_GRACE = 5.0  # seconds from the abort of running requests until the process is ended by force


class Server(uvicorn.Server):
    """Uvicorn with a start-up message, and a shutdown that first finishes running requests.

    During this drain the server still listens: probes see that it is not ready, and new requests get status 503.

    Attributes:
        failed: the server stops because an engine has died.
    """

    def __init__(
        self,
        app: ASGIApp,
        state: ServerState,
        responses: ResponseService,
        settings: Serve,
        sessions: Sessions,
        tls: Tls | None = None,
        reloads: Sequence[Callable[[], None]] = (),
        front_end: FrontEnd | None = None,
    ) -> None:
        """Make a server; on the event loop that serves.

        Args:
            app: answers requests.
            state: of the server.
            responses: those in the background.
            settings: of the command.
            sessions: realtime sessions.
            tls: certificate; None: there is none.
            reloads: what to do on SIGHUP, instead of a drain.
            front_end: this process is one of several; None: it is the only one.
        """
        self._front_end = front_end
        self._table = table = Connections(ConnectionOptions.of(settings))
        self._state = state
        self._responses = responses
        self._sessions = sessions
        self._settings = settings
        self._reloads = reloads
        self._scheme = "http" if tls is None else "https"
        self._told_to_stop = False  # a first signal has arrived
        self._aborting = False  # a second signal has arrived
        self._gave_up = False  # on requests whose clients do not read their error
        self._loop = asyncio.get_running_loop()
        self.failed = False
        super().__init__(
            uvicorn.Config(
                app,
                loop="none",
                http=protocol_of(table, tls, AccessLog(settings)),  # type: ignore[arg-type]  # it is only called
                ws=partial(BoundedWebSocket, table),  # type: ignore[arg-type]  # it is only called
                ws_max_size=2
                * int(
                    settings.max_realtime_event_size
                ),  # larger events than accepted are refused, much larger ones not read
                ws_ping_timeout=None,  # the answer to a ping waits while a busy server does not read
                ws_per_message_deflate=False,  # audio does not get smaller, and inflating it would take memory
                timeout_keep_alive=math.ceil(settings.timeout_keep_alive),
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                root_path=settings.root_path,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and log the served models and addresses.

        Raises:
            ConfigError: another process listens on the port since it was bound.
        """
        try:
            for listener in sockets or ():  # the event loop's own error would not name the address
                listener.listen(self.config.backlog)
            await super().startup([])
            accept_connections(self, sockets or (), lambda: self._table.room)
        except OSError as error:
            raise listen_error(self._settings, error) from error
        address = self._address()
        if self._front_end is not None:
            self._front_end.tell_that_it_listens(self._state.models[0].info)
            if self._front_end.index:
                return  # the first one logs for all
        for model in self._state.models:
            fields = _choices(model, self._settings)
            chosen = ", ".join(f"{name.replace('_', ' ')} {text}" for name, text in fields.items())
            does = "renders prompts for" if self._state.renders_only else "serves"
            what = f"Quire {__version__} {does} {model.names[0]}"
            logger.info("%s: %s, at %s", what, chosen, address, extra={"fields": {"model": model.names[0], **fields}})

    def _address(self) -> str:
        """Return where clients find the server."""
        if self._settings.uds is not None:
            return f"unix:{self._settings.uds}"
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        return f"{self._scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    async def on_tick(self, counter: int) -> bool:
        """Return whether to stop listening; called ten times a second."""
        stopping = await super().on_tick(counter)
        return stopping and (self._gave_up or self._running == 0)

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Handle SIGHUP as well; uvicorn would also raise the signals again, before the engines are stopped."""
        with handling_signals(self.handle_exit):
            yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain on the first signal, abort running requests on the second, end the process on the third.

        SIGHUP makes a server read its certificate and keys again, if it has files of them.
        """
        if sig == signal.SIGHUP and self._reloads:
            for reload in self._reloads:
                self._loop.call_soon_threadsafe(reload)
            return
        if self._aborting:
            end_process(1)
        elif self._told_to_stop:
            self._aborting = True
            end_process_after(_STOP_GRACE)
            self._loop.call_soon_threadsafe(self._abort_requests)
        else:
            self._told_to_stop = True
            logger.info("shutting down: running requests have %g s to finish", self._settings.shutdown_timeout)
            if not self.should_exit:  # it is already shutting down if an engine has died
                self._drain()

    def stop_failed(self, reason: str) -> None:
        """Stop because an engine has died. Requests to other models may finish."""
        logger.error("the server stops: %s", reason)
        self.failed = True
        if not self.should_exit:
            self._drain()

    @property
    def _running(self) -> int:
        """Number of requests, responses in the background and realtime sessions that have not ended."""
        return self._state.in_flight + self._responses.running + self._sessions.running

    def _drain(self) -> None:
        self._state.draining = True
        self._loop.call_soon_threadsafe(self._sessions.drain)
        self.should_exit = True
        # In a thread: the event loop may be blocked.
        end_process_after(self._settings.shutdown_timeout + _STOP_GRACE)
        self._loop.call_soon_threadsafe(self._loop.call_later, self._settings.shutdown_timeout, self._abort_requests)

    def _abort_requests(self) -> None:
        """End running requests with an error."""
        logger.info("aborting the requests, responses and realtime sessions that still run: %d", self._running)
        for model in self._state.models:
            model.client.fail("the server is shutting down")
        self._loop.call_later(_ERROR_GRACE, self._close_connections)

    def _close_connections(self) -> None:
        """Close the connections of clients that do not read or send, and do not wait for the store of responses."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        self.force_exit = True
        self._gave_up = True


def protocol_of(table: Connections, tls: Tls | None, access_log: AccessLog) -> Callable[..., asyncio.Protocol]:
    """Return what makes the protocol of a new connection."""
    make = partial(BoundedProtocol, table, access_log)
    return make if tls is None else lambda **uvicorn: TlsHandshake(table, tls.context, make(**uvicorn))


def _choices(model: ServedModel, settings: Serve) -> dict[str, str]:
    """What was chosen for a model, and why."""
    info = model.info
    context = f"{info.max_model_len}{_why(settings, 'max_model_len')}"
    if not info.device:
        return {"architecture": info.architecture, "context": context}
    choices = {
        "architecture": f"{info.architecture} (by {info.implementation})",
        "device": f"{info.device}{_why(settings, 'device')} with {info.kernels}",
        "dtype": f"{info.dtype}{_why(settings, 'dtype')}",
        "weights": " ".join(filter(None, (_size(info.weight_bytes), info.weight_format))),
        "attention": "Quire's own" if info.attention_backend == "auto" else info.attention_backend,
        "context": context,
        "engine": _processes(settings),
    }
    if info.cache_bytes:
        choices["kv_cache"] = (
            f"{info.num_blocks} blocks of {info.block_size} tokens in {info.cache_dtype} ({_size(info.cache_bytes)}, "
            f"{info.cache_limit})"
        )
        choices["prefix_caching"] = "on" if settings.enable_prefix_caching else "off"
    return {name: text for name, text in choices.items() if text}


def _why(settings: Serve, field: str) -> str:
    """The flag that has chosen a value, if it has."""
    chosen = getattr(settings, field) not in ("auto", None)
    return f" ({settings.flag(field)})" if chosen else ""


def _processes(settings: Serve) -> str:
    ranks, nodes = settings.ranks, settings.nnodes
    engine = "in a process" if settings.engine_process else "in a thread"
    if settings.has_replicas:
        engine = f"{settings.replicas} replicas, each in a process"
    if settings.api_server_count > 1:
        engine = f"{engine}, before {settings.api_server_count} that serve HTTP"
    divided = f"{ranks} ranks" + (f" on {nodes} nodes" if nodes > 1 else "")
    return engine if ranks == 1 else f"{engine}, {divided}"


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 1 << 30 else f"{count / 2**20:.0f} MiB"
