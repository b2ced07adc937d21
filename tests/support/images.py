"""Images of docker/, built on Debian's own Python and run, by podman and as root."""

from __future__ import annotations

import json
import os
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

from tests.support.deployment import DOCKER, ROOT
from tests.support.patience import PATIENCE
from tests.support.process import free_port

# In place of Docker's image of Python, as no registry of images may be at hand: the same Debian, with its own Python.
_BASE = "localhost/quire-test-base"
_PACKAGES = ("ca-certificates", "libpython3-dev", "python-is-python3", "python3", "python3-pip", "python3-venv")
_SETTINGS = (
    Path("/etc/ssl/certs/ca-certificates.crt"),
    Path("/etc/pip.conf"),
    Path("/etc/xdg/pip"),
    Path.home() / ".config" / "pip",
)


def build(dockerfile: str) -> str:
    """Build an image with a CPU build of torch; its name."""
    _build_base()
    image = f"localhost/quire-test:{dockerfile.lower()}"
    arguments = {"PYTHON": _BASE, "TORCH_INDEX": "", "VERSION": "test"}
    wheels = os.environ.get("PIP_FIND_LINKS")
    _podman(
        "build",
        "--format=docker",  # OCI's has no health check
        "--network=host",
        "--isolation=chroot",  # the others need more rights than sandboxes have
        "--layers",
        "--no-cache",  # buildah 1.28 cannot mount a stage that it takes from its cache
        f"--file={DOCKER / dockerfile}",
        f"--tag={image}",
        *([f"--volume={wheels}:{wheels}:ro"] if wheels else []),
        *(f"--build-arg={name}={value}" for name, value in arguments.items()),
        str(ROOT),
    )
    return image


def _build_base() -> None:
    """Make the base of Debian's packages, unless it exists, with settings of pip and certificates of this machine."""
    if subprocess.run(["podman", "image", "exists", _BASE], check=False).returncode == 0:
        return
    with TemporaryDirectory() as folder:
        root, archive = Path(folder) / "root", Path(folder) / "root.tar"
        command = ["debootstrap", "--variant=minbase", f"--include={','.join(_PACKAGES)}", "bookworm", str(root)]
        subprocess.run(command, check=True, capture_output=True)
        for path in filter(Path.exists, _SETTINGS):
            copy = root / path.relative_to("/")
            copy.parent.mkdir(parents=True, exist_ok=True)
            subprocess.run(["cp", "--recursive", "--dereference", "--no-target-directory", path, copy], check=True)
        subprocess.run(["tar", "--create", f"--file={archive}", f"--directory={root}", "."], check=True)
        variables = [f"--change=ENV={name}={value}" for name, value in os.environ.items() if name.startswith("PIP_")]
        _podman("import", *variables, str(archive), _BASE)


@dataclass
class Container:
    """A container that serves."""

    name: str
    url: str

    @property
    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=PATIENCE)

    @property
    def log(self) -> str:
        ran = subprocess.run(["podman", "logs", self.name], check=False, capture_output=True, text=True)
        return ran.stdout + ran.stderr

    def execute(self, *command: str, **variables: str) -> tuple[int, str]:
        """Status and output of a command in the container."""
        options = [f"--env={name}={value}" for name, value in variables.items()]
        ran = subprocess.run(
            ["podman", "--runtime=runc", "exec", *options, self.name, *command],
            check=False,
            capture_output=True,
            text=True,
        )
        return ran.returncode, ran.stdout + ran.stderr

    def is_healthy(self) -> bool:
        """Whether the image's own health check succeeds."""
        ran = subprocess.run(["podman", "healthcheck", "run", self.name], check=False, capture_output=True)
        return ran.returncode == 0

    def terminate(self) -> None:
        _podman("kill", "--signal=TERM", self.name)

    def wait(self) -> int:
        """Wait for the end; the exit status."""
        return int(_podman("wait", self.name))


@contextmanager
def running(image: str, *arguments: str, volumes: bool = True) -> Iterator[Container]:
    """Run an image with a read-only root file system and without capabilities, and remove it afterwards.

    Args:
        image: its name.
        arguments: of `quire serve`.
        volumes: mount named ones at /cache and /state.
    """
    name, port = f"quire-test-{uuid.uuid4().hex[:8]}", free_port()
    mounts = [f"--volume={name}-{folder}:/{folder}" for folder in ("cache", "state")] if volumes else []
    try:
        _podman(
            "run",
            "--detach",
            f"--name={name}",
            "--read-only",
            "--read-only-tmpfs=false",  # Docker mounts no file systems that nobody asked for
            "--tmpfs=/tmp:size=1g",
            "--cap-drop=ALL",
            "--security-opt=no-new-privileges",
            "--network=host",
            "--ulimit=nofile=4096:4096",  # podman's own limits are higher than those of many sandboxes
            "--ulimit=nproc=4096:4096",
            f"--env=QUIRE_PORT={port}",
            "--env=QUIRE_NUM_THREADS=1",
            *mounts,
            image,
            *arguments,
        )
        container = Container(name, f"http://127.0.0.1:{port}")
        _wait_until_ready(container)
        yield container
    finally:
        subprocess.run(["podman", "rm", "--force", "--volumes", name], check=False, capture_output=True)
        for mount in mounts:
            volume = mount.removeprefix("--volume=").partition(":")[0]
            subprocess.run(["podman", "volume", "rm", "--force", volume], check=False, capture_output=True)


def layer_sizes(image: str) -> list[int]:
    """Bytes of the layers of an image that are not empty, the newest first."""
    layers = json.loads(_podman("history", "--format=json", image))
    return [layer["size"] for layer in layers if layer["size"]]


def _wait_until_ready(container: Container) -> None:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        assert _podman("inspect", "--format={{.State.Status}}", container.name) == "running", container.log
        try:
            if httpx.get(f"{container.url}/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)  # between two questions
    raise AssertionError(container.log)


def _podman(*arguments: str) -> str:
    """The output of a podman command that succeeds."""
    ran = subprocess.run(["podman", "--runtime=runc", *arguments], check=False, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-10_000:] + ran.stderr[-10_000:]
    return ran.stdout.strip()
