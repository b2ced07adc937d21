"""Files that are read again: when they change, and on SIGHUP."""

from __future__ import annotations

import asyncio
import json
import signal
import ssl
from pathlib import Path

import httpx
import pytest

from quire.app.reload import WatchedFiles
from quire.config.key_file import KeyFileError, read_key_file
from tests.support.certificates import Pair, make_pair
from tests.support.keys import bearer, write_keys
from tests.support.process import eventually, serving, tiny_model
from tests.support.server import until


async def test_a_problem_is_logged_once_until_somebody_asks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "quire")
    path = write_keys(tmp_path / "keys.toml", alice={})
    attempts = 0

    def read() -> None:
        nonlocal attempts
        attempts += 1
        read_key_file(path)

    files = WatchedFiles("keys", [path], read)
    watching = asyncio.create_task(files.watch(0.001))
    path.write_text("nonsense")
    await until(lambda: attempts >= 5)
    assert caplog.text.count("keys: changed, but cannot be used yet") == 1
    files.reload()
    assert caplog.text.count("keys: changed, but cannot be used yet") == 2
    write_keys(path, alice={}, bob={})
    await until(lambda: "keys: read again" in caplog.text)
    last = attempts
    path.unlink()
    await until(lambda: attempts > last)
    assert "No such file" in caplog.text
    watching.cancel()
    with pytest.raises(KeyFileError):
        read()


def test_sighup_renews_certificate_and_keys_under_a_stream(tmp_path: Path) -> None:
    first, second = make_pair(tmp_path, "first"), make_pair(tmp_path, "second")
    served = Pair(tmp_path / "served.pem", tmp_path / "served.key")

    def install(pair: Pair) -> ssl.SSLContext:
        served.certificate.write_bytes(pair.certificate.read_bytes())
        served.key.write_bytes(pair.key.read_bytes())
        return ssl.create_default_context(cafile=pair.certificate)

    keys = write_keys(tmp_path / "keys.toml", alice={})
    trusting_first = install(first)
    flags = ("--ssl-certfile", str(served.certificate), "--ssl-keyfile", str(served.key), "--api-key-file", str(keys))
    body = {"prompt": "abc", "max_tokens": 240, "ignore_eos": True, "stream": True}
    with (
        serving(str(tiny_model(tmp_path / "tiny")), *flags) as server,
        httpx.Client(base_url=server.url, verify=trusting_first, headers=bearer("alice")) as client,
        client.stream("POST", "/v1/completions", json=body) as stream,
    ):
        lines = stream.iter_lines()
        next(lines)
        trusting_second = install(second)
        write_keys(keys, bob={})
        server.process.send_signal(signal.SIGHUP)
        eventually(lambda: server.log.count(": read again") == 2)
        remaining = [line for line in lines if line]
        assert remaining[-1] == "data: [DONE]"
        assert json.loads(remaining[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert client.get("/v1/models").status_code == 401, "over the old connection"
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health", verify=trusting_first)
        assert httpx.get(f"{server.url}/v1/models", verify=trusting_second, headers=bearer("bob")).status_code == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        assert "key-alice" not in server.log
