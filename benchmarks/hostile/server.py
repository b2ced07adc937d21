"""`quire serve` on the bundled model, watched from outside."""

from __future__ import annotations

import http.client
import json
import re
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import psutil

_START_TIMEOUT = 120.0
_SAMPLE_SECONDS = 0.1
_GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_blocks_used")


class Server:
    """A server, whose memory is sampled, and which is killed before it takes the whole machine's."""

    host = "127.0.0.1"

    def __init__(self, folder: Path, port: int, max_memory: int, flags: Sequence[str] = ()) -> None:
        """Start it and wait until it listens. `max_memory`: of all its processes, in bytes."""
        self.log_file = folder / f"server-{time.monotonic_ns()}.log"
        store = f"sqlite:///{folder / 'responses.db'}"
        command = [sys.executable, "-m", "quire", "serve", "--port", str(port), "--response-store", store, *flags]
        with self.log_file.open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        resource.prlimit(self.process.pid, resource.RLIMIT_AS, (2 * max_memory, 2 * max_memory))
        self.max_memory = max_memory
        self.samples: list[tuple[float, int]] = []
        self.ended: str | None = None
        self._closing = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        self._sampler.start()
        try:
            self.port = self._wait_for_port()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill all its processes."""
        self._closing.set()
        self._sampler.join()
        self._kill()
        self.process.wait()

    @property
    def log(self) -> str:
        """All that it has logged."""
        return self.log_file.read_text(encoding="utf-8", errors="replace")

    def memory(self) -> int:
        """Resident bytes of all its processes."""
        return sum(self.memory_by_process())

    def memory_by_process(self) -> list[int]:
        """Resident bytes of each of its processes, of the main process first."""
        sizes = []
        for process in self._processes():
            try:
                sizes.append(process.memory_info().rss)
            except psutil.Error:
                continue
        return sizes

    def peak(self, start: float, end: float) -> int:
        """Largest sample of the memory in a window."""
        return max((size for when, size in list(self.samples) if start <= when <= end), default=0)

    def counts(self) -> dict[str, int]:
        """Processes, threads and open files."""
        processes = self._processes()
        return {
            "processes": len(processes),
            "threads": sum(process.num_threads() for process in processes),
            "files": sum(process.num_fds() for process in processes),
        }

    def load(self) -> int | None:
        """The number of requests that it answers; None if it does not say so within 10 s."""
        try:
            load: int = json.loads(self.get("/load"))["server_load"]
            return load
        except (OSError, http.client.HTTPException, ValueError, KeyError):
            return None

    def held(self) -> dict[str, Any]:
        """What running requests hold, and whether all places can be taken by one request."""
        places = {"prompt": ["x"] * 9, "n": 64, "max_tokens": 1}  # 64 that run and 512 that wait
        connection = http.client.HTTPConnection(self.host, self.port, timeout=120)
        connection.request("POST", "/v1/completions", json.dumps(places), {"content-type": "application/json"})
        status = connection.getresponse().status
        connection.close()
        page = self.get("/metrics")
        gauges = {name: _sum(page, name) for name in _GAUGES}
        return {"requests": self.load(), **gauges, "all_places_free": status == http.client.OK}

    def get(self, path: str) -> str:
        """The answer to a GET request."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=10)
        try:
            connection.request("GET", path)
            return connection.getresponse().read().decode()
        finally:
            connection.close()

    def _processes(self) -> list[psutil.Process]:
        try:
            main = psutil.Process(self.process.pid)
            return [main, *main.children(recursive=True)]
        except psutil.Error:
            return []

    def _kill(self) -> None:
        for process in self._processes():
            process.kill()

    def _wait_for_port(self) -> int:
        end = time.monotonic() + _START_TIMEOUT
        while time.monotonic() < end and self.ended is None:
            if match := re.search(r"at https?://\S+:(\d+)", self.log):
                return int(match[1])
            time.sleep(0.05)
        raise RuntimeError(f"the server did not start:\n{self.log}")

    def _sample(self) -> None:
        while not self._closing.wait(_SAMPLE_SECONDS):
            size = self.memory()
            self.samples.append((time.monotonic(), size))
            if size > self.max_memory:
                self.ended = f"killed at {size / 1e9:.1f} GB"
                self._kill()
            if (status := self.process.poll()) is not None:
                self.ended = self.ended or f"exit status {status}"
                return


def _sum(page: str, name: str) -> float:
    return sum(float(line.split()[-1]) for line in page.splitlines() if re.match(rf"quire:{name}[{{ ]", line))
