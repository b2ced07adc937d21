#!/usr/bin/env python3
"""Write the endpoints file of llm-d's picker: those of some servers that are ready, again whenever that changes.

    endpoints.py /etc/epp/endpoints.yaml 10.0.0.5:8000 10.0.0.6:8000 --every 2

A server that drains, sleeps or is gone leaves the file, and comes back when `/ready` says so. The file is replaced as a
whole, so that the picker never reads half of it. It needs nothing but Python.
"""

from __future__ import annotations

import argparse
import ipaddress
import json
import os
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

LABELS = {"llm-d.ai/engine-type": "quire", "llm-d.ai/inference-serving": "true"}
_TIMEOUT = 2.0  # seconds for an answer of /ready
_MOST = 4096  # servers; the picker reads at most 1 MiB


def address(server: str) -> tuple[str, int]:
    """Return the address and the port of IPv4:PORT; the picker knows no others.

    Raises:
        argparse.ArgumentTypeError: it is something else.
    """
    host, _, port = server.rpartition(":")
    try:
        ipaddress.IPv4Address(host)
        number = int(port)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{server!r} is not an IPv4 address with a port, such as 10.0.0.5:8000"
        ) from None
    if not 0 < number < 1 << 16:
        raise argparse.ArgumentTypeError(f"{server!r} has no port from 1 to 65535")
    return host, number


def is_ready(server: tuple[str, int]) -> bool:
    """Return whether a server should get requests."""
    try:
        with urllib.request.urlopen(f"http://{server[0]}:{server[1]}/ready", timeout=_TIMEOUT) as answer:
            return bool(answer.status == 200)
    except (OSError, ValueError):
        return False


def document(servers: Sequence[tuple[str, int]]) -> str:
    """Return the file: JSON, which is YAML as well."""
    endpoints = [
        {"name": f"quire-{host.replace('.', '-')}-{port}", "address": host, "port": str(port), "labels": LABELS}
        for host, port in servers
    ]
    return json.dumps({"endpoints": endpoints}, indent=2) + "\n"


def replace(path: Path, content: str) -> None:
    """Write a file as a whole."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(content)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("servers", type=address, nargs="+", metavar="IPv4:PORT")
    parser.add_argument("--every", type=float, help="seconds between two looks; default: look once")
    options = parser.parse_args(arguments)
    if len(options.servers) > _MOST:
        parser.error(f"the file has room for {_MOST} servers")
    written = None
    with ThreadPoolExecutor(min(32, len(options.servers))) as threads:
        while True:
            answers = zip(options.servers, threads.map(is_ready, options.servers), strict=True)
            ready = [server for server, answer in answers if answer]
            if ready != written:
                replace(options.file, document(ready))
                print(f"{len(ready)} of {len(options.servers)} servers are ready", flush=True)
                written = ready
            if options.every is None:
                return
            time.sleep(options.every)


if __name__ == "__main__":
    main()
