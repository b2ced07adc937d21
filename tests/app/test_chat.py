"""`quire chat` against a real server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.process import ServerProcess, quire, serving, tiny_model


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serving(str(tiny_model(tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=4096))) as running:
        yield running


def test_chat_streams_answers_and_remembers(server: ServerProcess) -> None:
    single = quire("chat", "--url", f"{server.url}/v1", "--message", "hi", "--max-tokens", "5", "--temperature", "0")
    assert single.strip()
    talk = quire(
        *("chat", "--url", f"{server.url}/v1", "--max-tokens", "5", "--temperature", "0", "--system", "be brief"),
        stdin="/help\nhi\nagain\n/clear\nhi\n/exit\n",
    )
    assert talk.startswith("Chatting with tiny.")
    _, *answers = [line.replace("> ", "") for line in talk.split("\n") if line.startswith("> ")]
    first, second, after_clearing, end = answers
    assert first == after_clearing != second
    assert end == ""
