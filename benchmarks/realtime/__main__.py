"""Realtime sessions of a running server, with audio at the pace at which people speak, by OpenAI's client.

    python -m benchmarks.realtime --url http://127.0.0.1:8000 --model quire-nano-hear --sessions 1 --minutes 1
    python -m benchmarks.realtime --url ... --sessions 32 --minutes 10 --pid PID --out benchmarks/results/FILE.json

Each session has a dialogue of its own: held-out sentences by held-out voices of espeak-ng. Latencies are those of the
events: speech_started after the onset, the first delta before the end, completed after the end (half a second of it is
the silence that ends an utterance). `--pid`: the server, whose memory is read every half minute. At the end half of the
sessions, if there are several, are cut off while somebody speaks, and the server is asked what it still holds.
`slowest_session_completed_p95_s`: of the session that is furthest behind, which percentiles over all do not show.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import re
import time
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
from numpy.typing import NDArray
from openai import AsyncOpenAI
from openai.resources.realtime.realtime import AsyncRealtimeConnection
from websockets.exceptions import ConnectionClosed

from benchmarks.realtime.dialogue import RATE, Listener, Utterance, make_dialogue, word_errors

_CHUNK = RATE // 10
_SESSION: Any = {
    "type": "transcription",
    "audio": {"input": {"format": {"type": "audio/pcm", "rate": RATE}, "transcription": {"language": "en"}}},
}
_PATIENCE = 30.0  # seconds after the end of the audio
_HELD = re.compile(
    r"^quire:(num_requests_running|num_requests_waiting|kv_cache_blocks_used|websocket_connections_active)"
    r"(?:\{[^}]*\})? (\S+)",
    re.MULTILINE,
)


async def send(connection: AsyncRealtimeConnection, samples: NDArray[np.int16], started: float) -> float:
    """Send audio as it would be spoken; return by how many seconds the slowest piece was late."""
    late = 0.0
    for at in range(0, len(samples), _CHUNK):
        due = started + min(at + _CHUNK, len(samples)) / RATE
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        piece = base64.b64encode(samples[at : at + _CHUNK].tobytes()).decode()
        await connection.input_audio_buffer.append(audio=piece)
        late = max(late, time.monotonic() - due)
    return late


async def listen(connection: AsyncRealtimeConnection, listener: Listener, started: float) -> None:
    """Take events until the connection ends."""
    with suppress(ConnectionClosed):
        async for event in connection:
            listener.take(event, time.monotonic() - started)


async def session(
    client: AsyncOpenAI, model: str, audio: NDArray[np.int16], listener: Listener, delay: float, *, cut_off: bool
) -> float:
    """Hold a session that begins after `delay` seconds. `cut_off`: its connection is aborted while somebody speaks."""
    await asyncio.sleep(delay)
    async with client.realtime.connect(model=model) as connection:
        await connection.session.update(session=_SESSION)
        started = time.monotonic()
        listening = asyncio.create_task(listen(connection, listener, started))
        late = await send(connection, audio, started)
        with suppress(TimeoutError):
            await asyncio.wait_for(listener.complete.wait(), _PATIENCE)
        if cut_off:
            last = listener.utterances[-1]
            half = audio[int(last.start * RATE) : int((last.start + last.end) / 2 * RATE)]
            await send(connection, half, time.monotonic())
            connection._connection.transport.abort()
        else:
            await connection.close()
        await listening
    return late


async def watch_memory(pid: int | None) -> list[float]:
    """MiB of the server every half minute, until cancelled."""
    sizes: list[float] = []
    with suppress(asyncio.CancelledError):
        while pid is not None:
            sizes.append(round(psutil.Process(pid).memory_info().rss / 2**20, 1))
            await asyncio.sleep(30)
    return sizes


def held(url: str) -> dict[str, float]:
    """Requests and KV blocks of all engines, and open sessions."""
    totals: dict[str, float] = {}
    for name, value in _HELD.findall(httpx.get(f"{url}/metrics").text):
        totals[name] = totals.get(name, 0.0) + float(value)
    return totals


def seconds_until_idle(url: str) -> float:
    """Seconds until the server holds nothing."""
    began = time.monotonic()
    while any(held(url).values()) and time.monotonic() - began < _PATIENCE:
        time.sleep(0.02)
    return time.monotonic() - began


def percentiles(values: list[float]) -> dict[str, float]:
    """Median, 95th percentile and maximum."""
    if not values:
        return {}
    return {name: round(float(np.percentile(values, at)), 3) for name, at in (("p50", 50), ("p95", 95), ("max", 100))}


def latencies(utterances: list[Utterance]) -> dict[str, dict[str, float]]:
    """Seconds between what is said and the server's events."""
    return {
        "speech_started_after_onset": percentiles([u.started - u.start for u in utterances if u.started is not None]),
        "first_delta_after_end": percentiles([u.first_delta - u.end for u in utterances if u.first_delta is not None]),
        "completed_after_end": percentiles([u.completed - u.end for u in utterances if u.completed is not None]),
    }


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Hold the sessions and return the report."""
    dialogues = [make_dialogue(f"{options.seed}-{index}", options.minutes * 60) for index in range(options.sessions)]
    listeners = [Listener(utterances) for _, utterances in dialogues]
    client = AsyncOpenAI(base_url=f"{options.url}/v1", api_key="none")
    watching = asyncio.create_task(watch_memory(options.pid))
    late = await asyncio.gather(
        *(
            session(client, options.model, audio, listener, index * options.stagger, cut_off=index % 2 == 1)
            for index, ((audio, _), listener) in enumerate(zip(dialogues, listeners, strict=True))
        )
    )
    idle = await asyncio.to_thread(seconds_until_idle, options.url)
    watching.cancel()
    utterances = [utterance for listener in listeners for utterance in listener.utterances]
    errors, words = word_errors(utterances)
    late_deltas = sorted(
        (round(u.end - u.start, 2), u.text) for u in utterances if u.first_delta is None or u.first_delta > u.end
    )
    return {
        "date": date.today().isoformat(),
        "model": options.model,
        "sessions": options.sessions,
        "minutes": options.minutes,
        "utterances": len(utterances),
        "faults": [fault for listener in listeners for fault in listener.faults()],
        "without_delta_before_end": len(late_deltas),
        "shortest_without_delta_before_end": late_deltas[:20],
        "word_error_rate": round(errors / max(1, words), 4),
        "seconds": latencies(utterances),
        "slowest_session_completed_p95_s": max(
            (latencies(listener.utterances)["completed_after_end"].get("p95", _PATIENCE) for listener in listeners),
            default=0.0,
        ),
        "slowest_send_s": round(max(late), 3),
        "memory_mib": await watching,
        "seconds_until_idle_after_cut": round(idle, 3),
        "held_at_end": held(options.url),
    }


def main() -> None:
    """Run the benchmark and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="quire-nano-hear")
    parser.add_argument("--sessions", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--stagger", type=float, default=0.31, help="seconds between the beginnings of two sessions")
    parser.add_argument("--seed", default="dialogue")
    parser.add_argument("--pid", type=int, help="process id of the server")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    report = asyncio.run(measure(options))
    print(json.dumps(report, indent=1))
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
