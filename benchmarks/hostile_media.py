"""What hostile pictures, videos, files and URLs do to a server that reads them: are they refused, and who waits?

    python -m benchmarks.hostile_media --out benchmarks/results/FILE.json

Nearly 1,000 of them are sent in chats, a few at a time, to a tiny model with random weights that reads them, beside
four streams of the bundled model. Each must be answered with a status from 400 to 499 within two seconds, unless it is
within the limits of the server or may be intact. The memory of the server and its processes must stay below a bound,
and the time between chunks of the streams (ITL, p99) below three times the undisturbed one. `--only` selects some by a
part of their names, `--every N` takes each Nth. The exit status is 0 if all of this holds.
"""

from __future__ import annotations

import argparse
import http.server
import json
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import override

from benchmarks.hostile.body import CHAT, Hostile, encode
from benchmarks.hostile.media import REDIRECTS, Medium, chat_of, media
from benchmarks.hostile.send import Answer, send
from benchmarks.hostile.server import Server
from benchmarks.hostile.session import itl_of, longest
from benchmarks.hostile.tensors import tensors
from benchmarks.hostile.videos import videos
from benchmarks.hostile.watch import Span, Watcher, probe_health, stream_answers
from tests.support.served_pictures import answering_model

MAX_SECONDS, MAX_ITL_RATIO = 2.0, 3.0
MAX_ERROR = 1000  # bytes of an answer: an error never has the content that was sent
STREAMS = 4
_WITHIN = range(400, 500)
_TIMEOUT = 60.0
_SETTLE_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """The answer to a medium, and what is wrong with it."""

    kind: str
    name: str
    status: int
    seconds: float
    problem: str | None


class _BadWeb(http.server.BaseHTTPRequestHandler):
    """A web server that redirects to where it should not, and sends what nobody wants."""

    bodies: ClassVar = {"/empty": b"", "/html": b"<html>", "/cut": b"\x89PNG\r\n\x1a\n"}

    @override
    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        """Answer by the path."""
        path = self.path.partition("?")[0]
        if path in REDIRECTS or path == "/loop":
            self._head(302, {"Location": REDIRECTS.get(path, self.path)})
        elif path in ("/404", "/500"):
            self._head(int(path[1:]), {})
        elif path == "/silent":
            time.sleep(10)
        elif path in ("/endless", "/slow"):
            self._endless(b"x" * (1 << 16 if path == "/endless" else 1), 0.0 if path == "/endless" else 0.2)
        else:
            body = self.bodies.get(path, b"")
            encoding = {"Content-Encoding": "gzip"} if path == "/packed" else {}
            self._head(200, {"Content-Length": str(len(body)), **encoding})
            self.wfile.write(body)

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def _endless(self, piece: bytes, pause: float) -> None:
        self._head(200, {})
        try:
            while True:
                self.wfile.write(piece)
                time.sleep(pause)
        except OSError:  # the client has had enough
            return


@contextmanager
def bad_web() -> Iterator[str]:
    """The address of a running `_BadWeb`."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _BadWeb) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def seeing_model(folder: Path) -> Path:
    """The folder of a tiny model with random weights that reads pictures and videos."""
    return answering_model("qwen2_5_vl", folder)


def judged(medium: Medium, answer: Answer) -> Outcome:
    """An answer, and what is wrong with it."""
    problem = answer.problem
    if problem is None and answer.status not in _WITHIN and not (medium.may_be_read and answer.status == 200):
        problem = f"status {answer.status}"
    elif problem is None and answer.status in _WITHIN and answer.size > MAX_ERROR:
        problem = f"an error of {answer.size} bytes"
    elif problem is None and answer.seconds > MAX_SECONDS and answer.status != 200:
        problem = f"refused after {answer.seconds:.1f} s"
    return Outcome(medium.kind, medium.name, answer.status, answer.seconds, problem)


def send_all(
    server: Server, streams: Watcher, chosen: Sequence[Medium], at_once: int, model: str
) -> tuple[list[Outcome], list[Span], list[Span]]:
    """Send media, a few at a time. Bodies are made before, so that this takes no time of the streams.

    Returns:
        The outcomes, the times between chunks of the streams, and when something was sent.
    """

    def send_one(sent: tuple[Medium, bytes]) -> Outcome:
        medium, body = sent
        hostile = Hostile(medium.name, CHAT, lambda: body)
        outcome = judged(medium, send(server.host, server.port, hostile, body, _TIMEOUT))
        if outcome.problem is not None:
            print(f"{outcome.kind} {outcome.name}: {outcome.problem}", flush=True)
        return outcome

    outcomes: list[Outcome] = []
    gaps: list[Span] = []
    windows: list[Span] = []
    with ThreadPoolExecutor(at_once) as senders:
        for first in range(0, len(chosen), at_once):
            group = [(medium, encode(chat_of(medium.make(), model))) for medium in chosen[first : first + at_once]]
            start = time.monotonic()
            outcomes += senders.map(send_one, group)
            windows.append((start, time.monotonic()))
            gaps += streams.spans(*windows[-1])
            if server.ended is not None:
                break
    return outcomes, gaps, windows


def run(chosen: Sequence[Medium], folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Send everything and return the report."""
    seeing = options.model or str(seeing_model(folder / "seeing"))
    flags = (
        "quire-nano",
        seeing,
        "--kv-cache-memory-bytes",
        "256MiB",
        "--no-access-log",
        "--max-client-share",
        "1",
        "--enable-mm-embeds",
    )
    urls = ("--allowed-media-domains", "*,127.0.0.1", "--media-fetch-timeout", "1")
    limits = ("--max-body-size", "64MiB", "--max-media-memory", options.media_memory)
    max_memory = int(options.max_memory * 1e9)
    with (
        Server(folder, 0, 2 * max_memory, (*flags, *urls, *limits)) as server,
        Watcher(probe_health, server.host, server.port) as health,
        Watcher(stream_answers, server.host, server.port, STREAMS) as streams,
    ):
        time.sleep(3)
        before = server.memory()
        start = time.monotonic()
        time.sleep(options.quiet_seconds)
        window = start, time.monotonic()
        quiet = itl_of(streams.spans(*window), window)
        outcomes, gaps, windows = send_all(server, streams, chosen, options.at_once, seeing)
        seconds = sum(end - start for start, end in windows)
        itl = itl_of(gaps, (0.0, seconds))
        window = windows[0][0], windows[-1][1]
        unhealthy, peak = longest(health.spans(*window)), server.peak(*window)
        time.sleep(_SETTLE_SECONDS if server.ended is None else 0)
        memory = {"before": before / 1e6, "max": peak / 1e6, "after": server.memory() / 1e6}
        return {
            "sent": len(outcomes),
            "ended": server.ended,
            "seconds": seconds,
            "itl_quiet": quiet,
            "itl": itl,
            "itl_ratio": itl["p99"] / quiet["p99"],
            "health_max_ms": unhealthy,
            "memory_mb": memory,
            "max_memory_mb": max_memory / 1e6,
            "tracebacks": server.log.count("Traceback (most recent call last)"),
            "outcomes": [asdict(outcome) for outcome in outcomes],
        }


def table(outcomes: Sequence[dict[str, Any]]) -> str:
    """A line for each kind."""
    kinds: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for outcome in outcomes:
        kinds[outcome["kind"]].append(outcome)
    lines = [f"{'kind':12}{'sent':>6}{'2xx':>6}{'4xx':>6}{'slowest':>9}{'wrong':>7}  slowest one"]
    for kind, several in kinds.items():
        slowest = max(several, key=lambda outcome: outcome["seconds"])
        counts = [sum(outcome["status"] // 100 == hundreds for outcome in several) for hundreds in (2, 4)]
        wrong = sum(outcome["problem"] is not None for outcome in several)
        lines.append(
            f"{kind:12}{len(several):6}{counts[0]:6}{counts[1]:6}{slowest['seconds']:9.2f}{wrong:7}  {slowest['name']}"
        )
    return "\n".join(lines)


def criteria(report: dict[str, Any]) -> dict[str, bool]:
    """What has to hold, and whether it does."""
    return {
        f"refused within {MAX_SECONDS:g} s": not any(outcome["problem"] for outcome in report["outcomes"]),
        "the server lives, without a traceback": report["ended"] is None and not report["tracebacks"],
        f"memory below {report['max_memory_mb']:.0f} MB": report["memory_mb"]["max"] < report["max_memory_mb"],
        f"ITL p99 below {MAX_ITL_RATIO:g} x undisturbed": report["itl_ratio"] < MAX_ITL_RATIO,
    }


def main() -> int:
    """Run the benchmark, print and store the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model that reads pictures; default: a tiny one with random weights")
    parser.add_argument("--at-once", type=int, default=4, help="chats at the same time")
    parser.add_argument("--quiet-seconds", type=float, default=10.0, help="seconds without hostile media")
    parser.add_argument("--media-memory", default="1GiB", help="--max-media-memory of the server")
    parser.add_argument("--max-memory", type=float, default=4.0, help="gigabytes that the server may take")
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT")
    parser.add_argument("--every", type=int, default=1, metavar="N")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with bad_web() as address, tempfile.TemporaryDirectory() as folder:
        everything = [
            medium
            for medium in (*media(address), *videos(address), *tensors())
            if not options.only or any(text in f"{medium.kind} {medium.name}" for text in options.only)
        ]
        chosen = everything[:: options.every]
        if options.list:
            print("\n".join(f"{medium.kind} {medium.name}" for medium in chosen))
            return 0
        report = run(chosen, Path(folder), options)
    print(table(report["outcomes"]))
    print(json.dumps({name: value for name, value in report.items() if name != "outcomes"}, indent=1))
    for name, holds in criteria(report).items():
        print(f"{'pass' if holds else 'FAIL'}  {name}")
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0 if all(criteria(report).values()) else 1


if __name__ == "__main__":
    sys.exit(main())
