"""`quire serve --enable-sleep-mode` with the bundled model."""

from __future__ import annotations

import signal
from contextlib import suppress

import psutil
import pytest

from tests.support.process import ServerProcess, serving

CHAT = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0, "max_tokens": 12}


def resident(server: ServerProcess) -> int:
    """Memory of the server and of its child processes, in MiB, without that of files: libraries come page by page."""
    process = psutil.Process(server.process.pid)
    processes = (process, *process.children(recursive=True))
    total = 0
    for child in processes:
        with suppress(psutil.NoSuchProcess):  # it has ended since
            memory = child.memory_info()
            total += memory.rss - memory.shared
    return total >> 20


@pytest.mark.parametrize("flags", [[], ["--engine-process"]], ids=["thread", "process"])
def test_answers_are_the_same_after_sleep(flags: list[str]) -> None:
    with serving("quire-nano", "--enable-sleep-mode", *flags) as server, server.http as client:
        expected = client.post("/v1/chat/completions", json=CHAT).json()["choices"][0]["message"]
        for level in (1, 2, 1):
            before = resident(server)
            assert client.post(f"/sleep?level={level}").status_code == 200
            assert client.get("/is_sleeping").json() == {"is_sleeping": True}
            asleep = resident(server)
            refused = client.post("/v1/chat/completions", json=CHAT)
            assert refused.status_code == 503
            assert "/wake_up" in refused.json()["error"]["message"]
            assert client.post("/wake_up").status_code == 200
            assert client.get("/is_sleeping").json() == {"is_sleeping": False}
            answer = client.post("/v1/chat/completions", json=CHAT).json()
            assert answer["choices"][0]["message"] == expected
            assert asleep < max(before, resident(server))  # while memory is mapped ahead, it is less before
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        client.post("/sleep?level=2")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0  # a server that sleeps can be stopped
    assert "Traceback" not in server.log
