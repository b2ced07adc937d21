"""`quire chat` and `quire bench serve` with what other servers send."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from quire.app.cli import main

Run = Callable[..., tuple[int, str]]
ODD = b"""data: {"error": null, "choices": [{"delta": {"role": "assistant", "content": null}}]}

: a comment

data: {"object": "chat.completion.chunk"}

data: {"choices": null, "usage": null}

data: {"choices": [{"delta": null}, null], "usage": {"prompt_tokens": null}}

data: {"choices": [{"delta": {"content": "hello"}, "text": "hello"}], "usage": {"prompt_tokens_details": 5}}

data: [DONE]

"""
BROKEN = {
    b'data: {"error": "boom"}\n\n': "boom",
    b'data: {"error": {"message": "bang"}}\n\n': "bang",
    b'data: {"error": {}}\n\n': "{}",
    b"data: <html>\n\n": "not JSON: <html>",
    b"data: [1]\n\n": "not a JSON object: [1]",
    b"data: \xff\n\n": "not JSON",
}


class Server(ThreadingHTTPServer):
    """Answer every POST with the same stream."""

    stream: bytes


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Server)
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.server.stream)

    def do_GET(self) -> None:
        status, message = (401, "Who are you?") if self.path == "/v1/models" else (404, "Not Found")
        self.send_response(status)
        self.end_headers()
        self.wfile.write(b'{"error": {"message": "%b"}}' % message.encode())

    def log_message(self, *_: object) -> None:
        """Keep quiet."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.01,))
        thread.start()
        yield made
        made.shutdown()
        thread.join()


@pytest.fixture
def quire(server: Server, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as left:
            main([*arguments, "--url", f"http://127.0.0.1:{server.server_port}/v1", "--model-name", "m"])
        shown = capsys.readouterr()
        assert isinstance(left.value.code, int)
        return left.value.code, shown.out + shown.err

    return run


@pytest.mark.parametrize(
    ("path", "complaint"),
    [("/v1", "401: Who are you?\n"), ("", "404: Not Found; the base URL of most servers ends in /v1\n")],
)
def test_models_that_are_not_listed(
    server: Server, capsys: pytest.CaptureFixture[str], path: str, complaint: str
) -> None:
    url = f"http://127.0.0.1:{server.server_port}"
    with pytest.raises(SystemExit):
        main(["chat", "--message", "x", "--url", url + path])
    assert capsys.readouterr().err.endswith(complaint)


def test_odd_streams_are_understood(server: Server, quire: Run) -> None:
    server.stream = ODD
    assert quire("chat", "--message", "x") == (0, "hello\n")
    for endpoint in ("chat", "completions"):
        status, said = quire("bench", "serve", "--num-requests", "3", "--endpoint", endpoint)
        assert status == 0
        assert "3 completed, 0 aborted, 0 failed" in said


@pytest.mark.parametrize(("stream", "complaint"), BROKEN.items())
def test_a_broken_stream_is_an_error_in_words(server: Server, quire: Run, stream: bytes, complaint: str) -> None:
    server.stream = stream
    status, said = quire("chat", "--message", "x")
    assert status == 1
    assert said.strip().startswith("quire chat: ")
    assert complaint in said


@pytest.mark.parametrize(("stream", "complaint"), BROKEN.items())
def test_a_broken_stream_fails_one_request_of_a_load(server: Server, quire: Run, stream: bytes, complaint: str) -> None:
    server.stream = stream
    status, said = quire("bench", "serve", "--num-requests", "3")
    assert status == 1
    assert "0 completed, 0 aborted, 3 failed" in said
    assert complaint in said


def test_a_stream_without_an_answer_is_an_error(server: Server, quire: Run) -> None:
    server.stream = b""
    status, said = quire("chat", "--message", "x")
    assert status == 1
    assert "the stream contained no answer" in said
    assert "the response contained no text" in quire("bench", "serve", "--num-requests", "1")[1]
