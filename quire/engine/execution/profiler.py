"""StepProfiler: records steps with torch's profiler, and writes a trace for chrome://tracing and Perfetto."""

from __future__ import annotations

import gc
import logging
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from quire.config.profiler import ProfilerConfig
from quire.engine.scheduling.plan import StepPlan

logger = logging.getLogger(__name__)
_IN_USE = threading.Lock()  # torch's profiler records a whole process


class ProfilerError(Exception):
    """The profiler cannot do what it was asked; the message says why."""


class StepProfiler:
    """Record the operators of one rank's steps.

    Attributes:
        config: what is recorded; None: nothing ever is.
        is_recording: it records now.
    """

    def __init__(self, config: ProfilerConfig | None, name: str) -> None:
        """`name`: of the rank, for names of files."""
        self.config = config
        self.is_recording = False
        self._name = name
        self._profile: profile | None = None

    def start(self) -> None:
        """Record from now on, in the calling thread and in all that it starts work in.

        Raises:
            ProfilerError: there is no config, another model of this process is being recorded, or torch refuses.
        """
        if self.config is None:
            raise ProfilerError("The server was started without --profiler-config.")
        if not _IN_USE.acquire(blocking=False):
            raise ProfilerError("Another model in the same process is being profiled: POST /stop_profile ends that.")
        try:
            self._profile = _new_profile(self.config)
            self._profile.start()
        except BaseException as error:
            self._profile = None
            _IN_USE.release()
            if isinstance(error, RuntimeError):  # as of another profiler in the process
                raise ProfilerError(f"The profiler cannot start: {error}") from error
            raise
        self.is_recording = True

    def stop(self) -> None:
        """Write what was recorded.

        Raises:
            ProfilerError: the file cannot be written.
        """
        recorded, self._profile, self.is_recording = self._profile, None, False
        if recorded is None:
            return
        assert self.config is not None
        try:
            recorded.stop()
        finally:
            _IN_USE.release()
        suffix = ".pt.trace.json" + (".gz" if self.config.torch_profiler_use_gzip else "")
        name = f"{self._name}.{time.time_ns()}{suffix}"
        try:
            where = _write(recorded, self.config.torch_profiler_dir, name)
        except (OSError, ImportError, ValueError, RuntimeError) as error:
            raise ProfilerError(f"The profile cannot be written to torch_profiler_dir: {error}") from error
        del recorded
        gc.collect()  # its events are in cycles
        logger.info("a profile was written to %s", where)

    def discard(self) -> None:
        """End without writing what was recorded."""
        recorded, self._profile, self.is_recording = self._profile, None, False
        if recorded is not None:
            try:
                recorded.stop()
            finally:
                _IN_USE.release()

    @contextmanager
    def step(self, plan: StepPlan) -> Iterator[None]:
        """Name a step in the profile."""
        if not self.is_recording:
            yield
            return
        requests = len(plan.scheduled) + len(plan.encoder_requests)
        with record_function(f"step of {plan.stats.step_tokens} tokens, {requests} requests"):
            yield


def _new_profile(config: ProfilerConfig) -> profile:
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    return profile(
        activities=activities,
        record_shapes=config.torch_profiler_record_shapes,
        profile_memory=config.torch_profiler_with_memory,
        with_stack=config.torch_profiler_with_stack,
        with_flops=config.torch_profiler_with_flops,
        experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True),
    )


def _write(recorded: profile, folder: str, name: str) -> str:
    """Write a trace completely before it has its name; returns where it is."""
    if "://" in folder:
        return _upload(recorded, f"{folder.rstrip('/')}/{name}")
    target = Path(folder) / name
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"part-{name}")
    try:
        recorded.export_chrome_trace(str(part))
        part.rename(target)
    finally:
        part.unlink(missing_ok=True)
    return str(target)


def _upload(recorded: profile, uri: str) -> str:
    import fsspec  # noqa: PLC0415 for few servers

    with tempfile.TemporaryDirectory(prefix="quire-profile-") as folder:
        path = Path(folder) / uri.rpartition("/")[2]
        recorded.export_chrome_trace(str(path))
        try:
            with path.open("rb") as trace, fsspec.open(uri, "wb") as target:
                shutil.copyfileobj(trace, target)
        except Exception as error:  # each store has its own, such as those of credentials; none may end the engine
            raise OSError(f"{type(error).__name__}: {error}") from error
    return uri
