"""Clients of other projects send pictures and PDF files; each picture is prepared once."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.support.client_scripts import run_script, scripts
from tests.support.pdf import pdf
from tests.support.picture_chat import asked, image_url
from tests.support.pictures import drawn, encoded
from tests.support.process import ServerProcess, serving
from tests.support.served_pictures import answering_model

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1000)]
SCRIPTS = scripts("pictures_")
QUESTION, TOKENS = "What is in it?", 8  # those of the scripts


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A tiny model of random weights, or the one that QUIRE_SEEING_MODEL names."""
    model = os.environ.get("QUIRE_SEEING_MODEL") or str(answering_model("llava", tmp_path_factory.mktemp("seeing")))
    options = ("--served-model-name", "seeing", "--dtype", "float32", "--allowed-media-domains", "127.0.0.1")
    with serving(model, *options) as running:
        yield running


@pytest.fixture
def files(tmp_path: Path) -> Iterator[str]:
    """The address of a server of the files in the test's folder."""
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


@pytest.mark.parametrize("script", SCRIPTS)
def test_clients_send_pictures(server: ServerProcess, files: str, tmp_path: Path, script: str) -> None:
    """All get the same answer about a picture, which is decoded and encoded once."""
    index = SCRIPTS.index(script)
    picture = encoded(drawn(40 + index, 60, seed=index))
    (tmp_path / "a.png").write_bytes(picture)
    (tmp_path / "a.pdf").write_bytes(pdf(f"Page {index}"))
    question = asked(image_url(picture), QUESTION, model="seeing", temperature=0, max_tokens=TOKENS)
    with server.http as client:
        answer = client.post("/v1/chat/completions", json=question).json()["choices"][0]["message"]["content"]
    assert answer

    names = ("mm_cache_queries_total", "mm_cache_hits_total", "encoder_cache_queries_total", "encoder_cache_hits_total")
    before = [server.metric(name) for name in names]
    run_script(
        script, f"{server.url}/v1", "seeing", f"{files}/a.png", str(tmp_path / "a.png"), str(tmp_path / "a.pdf"), answer
    )
    prepared, found, encoded_items, found_items = (
        server.metric(name) - count for name, count in zip(names, before, strict=True)
    )
    assert found >= 3
    assert prepared - found == 1  # the page of the PDF file
    assert encoded_items - found_items <= 1
