"""Each client runs a chat, a stream, a tool call round trip and a structured output."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.support.client_scripts import run_script, scripts
from tests.support.encoders import tiny_embedder, tiny_reranker
from tests.support.minilm import model_folder
from tests.support.process import ServerProcess, serving

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1000)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serving("--response-store", f"sqlite:///{tmp_path_factory.mktemp('store')}/r.db") as running:
        yield running


@pytest.fixture(scope="module")
def pooling_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """An embedder and a reranker: random ones, or those that QUIRE_CLIENT_MODELS names with a space between them.

    all-MiniLM-L6-v2 is served beside them, in float32, so that its embeddings can be compared.
    """
    models = os.environ.get("QUIRE_CLIENT_MODELS", "").split()
    if not models:
        folder = tmp_path_factory.mktemp("models")
        models = [str(tiny_embedder(folder / "embedder")), str(tiny_reranker(folder / "reranker"))]
    with serving(*models, str(model_folder()), "--dtype", "float32") as running:
        yield running


@pytest.mark.parametrize("script", sorted(set(scripts()) - set(scripts("pictures_"))))
def test_client_script_succeeds(script: str, request: pytest.FixtureRequest) -> None:
    server = request.getfixturevalue("pooling_server" if script.startswith("use_embeddings_") else "server")
    run_script(script, f"{server.url}/v1")
