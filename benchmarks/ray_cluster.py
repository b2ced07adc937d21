"""A Ray cluster of this machine, and applications on it that `serve run` starts from a config."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

CONFIG = Path(__file__).parents[1] / "deploy" / "ray" / "serve.yaml"
CALLBACK = "quire.ray.proxy.middlewares"
_RAY = "from ray.scripts.scripts import main; main()"
_SERVE = "from ray.serve.scripts import cli; cli()"
_UNTIL_RUNNING = """
import collections, sys, time, ray
from ray import serve
ray.init(address=sys.argv[1], log_to_driver=False)
while True:
    states = collections.Counter()
    for application in serve.status().applications.values():
        for deployment in application.deployments.values():
            states.update(deployment.replica_states)
    if states == {"RUNNING": int(sys.argv[2])}:
        break
    time.sleep(0.2)
"""
_PATIENCE = 900  # seconds for a start on a busy machine
_REPLICA = "ray::ServeReplica:"


@dataclass(frozen=True)
class Cluster:
    """A cluster that runs.

    Attributes:
        address: of its head.
        port: of the proxy's HTTP server.
        log: what its applications print.
    """

    address: str
    port: int
    log: Path
    _env: Mapping[str, str]

    @property
    def url(self) -> str:
        """Where clients find its applications."""
        return f"http://127.0.0.1:{self.port}"

    @contextmanager
    def serving(self, config: Mapping[str, Any]) -> Iterator[None]:
        """Run the applications of a config, on this cluster's port."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "serve.yaml"
            options = {"host": "127.0.0.1", "port": self.port}
            path.write_text(yaml.safe_dump({**config, "http_options": options}), encoding="utf-8")
            arguments = (_SERVE, "run", "--address", self.address, str(path))
            with _process(arguments, self._env, self.log) as process:
                ready = f"{self.url}{config['applications'][0]['route_prefix'].rstrip('/')}/ready"
                _wait(lambda: process.poll() is not None or _answers(ready))
                if process.poll() is not None:
                    raise RuntimeError(self.log.read_text(encoding="utf-8")[-4000:])
                yield

    def wait_for_replicas(self, number: int) -> None:
        """Wait until so many replicas of all applications may get requests, and none starts or ends."""
        command = [sys.executable, "-c", _UNTIL_RUNNING, self.address, str(number)]
        subprocess.run(command, env=dict(self._env), check=True, timeout=_PATIENCE)

    @staticmethod
    def replicas() -> list[psutil.Process]:
        """The processes of replicas on this machine."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            command = process.info["cmdline"] or [""]
            if command[0].startswith(_REPLICA) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        return found


def quire_config(**deployment: Any) -> dict[str, Any]:
    """Return the config of deploy/ray with other options of its deployment; `args` of the application in `args`."""
    config: dict[str, Any] = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    (application,) = config["applications"]
    application["args"] = deployment.pop("args", application["args"])
    application["deployments"][0].update(deployment)
    if "autoscaling_config" in deployment:
        application["deployments"][0].pop("num_replicas", None)
    return config


@contextmanager
def cluster(cpus: int = 4) -> Iterator[Cluster]:
    """Start a cluster on this machine, without a dashboard, and end it afterwards; or use that of RAY_ADDRESS."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, (str(Path.cwd()), os.environ.get("PYTHONPATH")))),
            "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": CALLBACK,
            "RAY_AUTH_MODE": "disabled",  # it would write a token into the home directory
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_agent_register_timeout_ms": str(_PATIENCE * 1000),
            "RAY_raylet_start_wait_time_s": str(_PATIENCE),
        }
        log = Path(folder) / "serve.log"
        if "RAY_ADDRESS" in os.environ:  # its processes need the variable of the callback
            yield Cluster(os.environ["RAY_ADDRESS"], _free_port(), log, env)
            return
        with _head(folder, env, cpus) as address:
            yield Cluster(address, _free_port(), log, env)


@contextmanager
def _head(folder: str, env: Mapping[str, str], cpus: int) -> Iterator[str]:
    """Start a cluster; yields its address."""
    port, log = _free_port(), Path(folder) / "log"
    arguments = ("start", "--head", f"--port={port}", "--include-dashboard=False", f"--num-cpus={cpus}")
    # The raylet waits for ports that its agents choose themselves, and ends if a busy machine is slow to start them.
    names = (
        "dashboard-agent-grpc-port",
        "dashboard-agent-listen-port",
        "metrics-export-port",
        "runtime-env-agent-port",
    )
    ports = [f"--{name}={_free_port()}" for name in names]
    more = (f"--temp-dir={folder}", "--object-store-memory=100000000", "--node-ip-address=127.0.0.1", *ports, "--block")
    with _process((_RAY, *arguments, *more), env, log) as process:
        _wait(lambda: process.poll() is not None or "Ray runtime started" in log.read_text(encoding="utf-8"))
        if process.poll() is not None:
            raise RuntimeError(log.read_text(encoding="utf-8")[-4000:])
        yield f"127.0.0.1:{port}"


@contextmanager
def _process(arguments: tuple[str, ...], env: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("ab") as output:
        command = [sys.executable, "-c", *arguments]
        process = subprocess.Popen(command, env=dict(env), stdout=output, stderr=output, stdin=subprocess.DEVNULL)
    children: list[psutil.Process] = []
    try:
        yield process
        children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for child in children:
            if child.is_running():
                child.kill()


def _wait(condition: Any) -> None:
    end = time.monotonic() + _PATIENCE
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.2)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
