"""The `quire` command: what has to be set before anything is imported, and what takes long, come first."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING

from quire import __version__
from quire.allocator import use_one_arena

if TYPE_CHECKING:
    from quire.engine.client.launch import PreparedProcess

_INTERRUPTED = 130  # exit status, as of a shell
_HELP = frozenset({"--help", "-h"})


def prepare_process() -> None:
    """Set what NumPy, torch and the C library read when they are loaded."""
    # Idle OpenMP threads must sleep: spinning ones would delay the event loop and the kernels' own threads.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # NumPy's products are short, and run in threads already: helpers would only spin, on cores that others need.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # torch uses huge pages, with which weights are read at least a third faster.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    use_one_arena()


def end_on_early_signals() -> None:
    """End the process on SIGTERM, SIGINT or SIGHUP while it imports what `quire.app.exits` needs.

    Python itself would end with status 143, or with a traceback. A signal that is ignored, as by nohup, stays ignored.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)


def _end(number: int, _: FrameType | None) -> None:
    os._exit(_INTERRUPTED if number == signal.SIGINT else 0)  # the process that reads configs ends with this one


def may_have_engine_process(words: Sequence[str]) -> bool:
    """Whether there may be a single engine in a process of its own: `quire serve` alone serves several models."""
    return words[0] == "serve" and len(words) > 1 and "--no-engine-process" not in words


def start_engine_process() -> PreparedProcess:
    """Start the engine's process, which imports torch beside the imports of the server."""
    from quire.app.core_process import import_engine  # noqa: PLC0415 for one command only
    from quire.engine.client.launch import PreparedProcess  # noqa: PLC0415 like it

    return PreparedProcess(import_engine)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit with its status. `arguments`: those after `quire`; None for those of this process."""
    prepare_process()
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] in (["--version"], ["-v"]):
        print(f"quire {__version__}")
        return
    serves = words[:1] in (["serve"], ["render"])
    if serves:
        end_on_early_signals()
    starts = arguments is None and serves and _HELP.isdisjoint(words)
    prepared = start_engine_process() if starts and may_have_engine_process(words) else None
    gc.disable()  # imports leave little garbage, and each full collection would search all modules
    try:
        from quire.app.schemas import defer_schemas  # noqa: PLC0415 as all imports, after the process has been prepared

        defer_schemas()
        configs = None
        if starts:
            # Both take long, and begin before the server's own modules are imported.
            from quire.engine.models.config_cache import ConfigCache  # noqa: PLC0415 for these commands only
            from quire.engine.models.config_reader import ConfigReader  # noqa: PLC0415 like it
            from quire.engine.models.torch_import import start_loading_libraries  # noqa: PLC0415 like it

            configs = ConfigReader()
            if not ConfigCache().has_any():
                configs.begin(forks=True)
            if words[0] == "serve" and prepared is None:
                start_loading_libraries()
        from quire.app.commands import run_command  # noqa: PLC0415 a quarter of a second of imports

        run_command(words, configs, prepared)
    finally:
        gc.enable()
