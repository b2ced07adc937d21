"""`quire render`: the same prompts as a server with the model, from folders without weights."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

import quire
from quire.app.models import Lookup, find_folder
from quire.config.command import ConfigError
from quire.config.commands import Render
from quire.config.options import EngineOptions, ModelOptions, ParallelOptions
from quire.engine.build.unloaded import info_of_unloaded
from quire.engine.models.model_config import read_model_config
from tests.support.bodies import BODIES
from tests.support.gguf_models import write_gguf
from tests.support.models import make_model, save_model
from tests.support.picture_chat import base64_of
from tests.support.pictures import encoded
from tests.support.process import quire as command
from tests.support.process import serving, tiny_model

BUNDLED = {"quire-nano": "nano", "quire-nano-embed": "nano_embed", "quire-nano-see": "nano_see"}
RENDERS = tuple(f"/v1/{name}/render" for name in ("chat/completions", "completions", "messages", "responses"))
TEXTS = (*RENDERS, "/v1/messages/count_tokens", "/tokenize", "/detokenize")
# The same flags for both servers, some of which an engine alone needs.
FLAGS = ("--enable-tokenizer-info-endpoint", "--scheduling-policy", "priority", "--max-num-seqs", "4")
GENERATED_ID = re.compile(r"resp_[0-9a-f]+")
# Imports what `quire render` imports before it serves, and prints what it must not have imported.
START = """
import sys
from quire.app.cli import prepare_process
prepare_process()
import quire.app.commands, quire.app.render, quire.app.lifecycle
print(*({"torch", "transformers", "triton", "safetensors"} & sys.modules.keys()))
"""


def without_weights(name: str, folder: Path) -> Path:
    """A bundled model without its weights."""
    source = Path(quire.__file__).parent / "bundled" / BUNDLED[name]
    return shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("*.safetensors"))


@pytest.fixture(scope="module", name="servers")
def _servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, httpx.Client]]:
    """Clients of a server of the bundled models, and of one that has no weights."""
    folder = tmp_path_factory.mktemp("render")
    store = "--response-store", f"sqlite:///{folder / 'responses.db'}"
    bare = [str(without_weights(name, folder)) for name in BUNDLED]
    full = serving(*BUNDLED, *FLAGS, *store)
    alone = serving(*bare, *FLAGS, *store, command="render")
    with full as loaded, alone as rendered, loaded.http as first, rendered.http as second:
        yield first, second


def check_equal(servers: tuple[httpx.Client, httpx.Client], path: str, body: Any) -> httpx.Response:
    """Check that both answer with the same bytes, but for random ids; return the answer."""
    answers = [client.post(path, json=body, headers={"x-request-id": "same"}) for client in servers]
    contents = [GENERATED_ID.sub("resp", answer.text) for answer in answers]
    assert contents[0] == contents[1], (path, body)
    assert answers[0].status_code == answers[1].status_code
    for name in ("x-quire-ignored-fields", "content-type"):
        assert answers[0].headers.get(name) == answers[1].headers.get(name)
    return answers[1]


@pytest.mark.parametrize("path", TEXTS)
def test_it_answers_as_a_server_with_the_model(servers: tuple[httpx.Client, httpx.Client], path: str) -> None:
    """Errors are the same as well, such as those of fields that the bundled model does not support."""
    answers = [check_equal(servers, path, {**body, "model": "quire-nano"}) for body in BODIES[path]]
    assert any(answer.is_success for answer in answers)


@pytest.mark.parametrize("path", RENDERS)
def test_requests_of_a_plain_kind(servers: tuple[httpx.Client, httpx.Client], path: str) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Once upon a time"}], "max_tokens": 5}
    if path.startswith("/v1/responses"):
        body = {"input": "Once upon a time", "instructions": "Be brief.", "max_output_tokens": 5}
    elif path.startswith("/v1/completions"):
        body = {"prompt": ["Once", "upon"], "return_token_offsets": True, "n": 2, "max_tokens": 5}
    answer = check_equal(servers, path, {**body, "model": "quire-nano"}).raise_for_status().json()
    first = answer[0] if isinstance(answer, list) else answer
    assert first["token_ids"]
    assert first["sampling_params"]["max_tokens"] == 5
    for wrong in ({"model": "other"}, {"priority": 3}, {"n": 10_000}, {"max_tokens": 100_000}):
        check_equal(servers, path, {**body, "model": "quire-nano", **wrong})


@pytest.mark.parametrize("path", RENDERS)
def test_pictures(servers: tuple[httpx.Client, httpx.Client], path: str) -> None:
    picture = base64_of(encoded(Image.new("RGB", (90, 40), (200, 30, 30))))
    url = f"data:image/png;base64,{picture}"
    text = {"type": "text", "text": "What is it?"}
    body: dict[str, Any] = {"max_tokens": 5}
    if path.startswith("/v1/responses"):
        parts = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": "What is it?"}]
        body = {"input": [{"role": "user", "content": parts}]}
    elif path.startswith("/v1/messages"):
        source = {"type": "base64", "media_type": "image/png", "data": picture}
        body["messages"] = [{"role": "user", "content": [{"type": "image", "source": source}, text]}]
    else:
        image = {"type": "image_url", "image_url": {"url": url}}
        body["messages"] = [{"role": "user", "content": [image, text, image]}]
    answer = check_equal(servers, path, {**body, "model": "quire-nano-see"})
    if not path.startswith("/v1/completions"):
        features = answer.raise_for_status().json()["features"]
        assert len(features["mm_hashes"]["image"]) == len(features["mm_placeholders"]["image"]) > 0
    check_equal(servers, path, {**body, "model": "quire-nano"})  # it reads none


def test_stored_responses_are_found_in_the_same_store(servers: tuple[httpx.Client, httpx.Client]) -> None:
    first = {"model": "quire-nano", "input": "What is 27 + 58?", "max_output_tokens": 4}
    stored = servers[0].post("/v1/responses", json=first).raise_for_status().json()["id"]
    body = {"model": "quire-nano", "input": "And 2 more?", "previous_response_id": stored}
    rendered = check_equal(servers, "/v1/responses/render", body).raise_for_status().json()
    assert "27 + 58" in rendered["prompt"]
    missing = check_equal(servers, "/v1/responses/render", {**body, "previous_response_id": "resp_0"})
    assert missing.status_code == 404


def test_models_and_their_tokenizers(servers: tuple[httpx.Client, httpx.Client]) -> None:
    loaded, rendered = ({card["id"]: card for card in client.get("/v1/models").json()["data"]} for client in servers)
    for model in BUNDLED:
        assert {**loaded[model], "created": 0, "root": ""} == {**rendered[model], "created": 0, "root": ""}
    for model in BUNDLED:
        paths = f"/tokenizer_info?model={model}", f"/v1/models/{model}"
        assert servers[0].get(paths[0]).raise_for_status().json() == servers[1].get(paths[0]).json()
        assert servers[1].get(paths[1]).is_success
        check_equal(servers, "/tokenize", {"model": model, "prompt": "Once upon", "return_token_strs": True})
        check_equal(servers, "/tokenize", {"model": model, "messages": [{"role": "user", "content": "Once"}]})
        check_equal(servers, "/detokenize", {"model": model, "tokens": [1, 2, 3]})
        check_equal(servers, "/detokenize", {"model": model, "tokens": [1 << 20]})


def test_it_has_no_other_routes(servers: tuple[httpx.Client, httpx.Client]) -> None:
    client = servers[1]
    for path in ("/health", "/ready", "/ping", "/version", "/load", "/metrics"):
        assert client.get(path).is_success
    routes = client.get("/openapi.json").json()["paths"]
    assert {path for path, methods in routes.items() if "post" in methods} == {*TEXTS, "/ping"}
    chat = {"model": "quire-nano", "messages": [{"role": "user", "content": "a"}]}
    for path in ("/v1/chat/completions", "/v1/embeddings", "/inference/v1/generate", "/sleep", "/v1/realtime", "/"):
        refused = client.post(path, json=chat)
        assert refused.status_code == 404
        assert "renders prompts (quire render) and runs no model" in refused.json()["error"]["message"]
    assert client.post("/v1/messages", json=chat).json()["type"] == "error"  # Anthropic's form
    assert client.get("/v1/chat/completions/render").status_code == 405


def test_what_only_an_engine_needs_is_named_at_start(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "tiny")
    (folder / "model.safetensors").unlink()
    with serving(str(folder), "--dtype", "bfloat16", "--max-model-len", "100", command="render") as server:
        assert "without effect, as no engine runs: --dtype" in server.log
        assert "renders prompts for tiny: architecture llama, context 100 (--max-model-len)" in server.log
        with server.http as client:
            long = client.post("/v1/completions/render", json={"prompt": [5] * 100})
        assert "maximum context length is 100 tokens" in long.json()["error"]["message"]
    assert "--max-model-len is 1000, but the model supports at most 256" in rendering_fails(
        str(folder), "--max-model-len", "1000"
    )
    assert "without effect" not in "".join(Render.parse(["model", "--max-model-len", "5"]).notes)


def rendering_fails(*arguments: str) -> str:
    """What `quire render` prints that cannot start."""
    return command("render", *arguments, status=1)


def test_the_head_of_a_gguf_file_is_enough(tmp_path: Path) -> None:
    file = write_gguf(save_model(make_model("llama"), tmp_path / "twin"), tmp_path / "tiny.gguf")
    whole = file.read_bytes()
    head = tmp_path / "head" / "tiny.gguf"
    head.parent.mkdir()
    head.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match="the file is truncated"):
        find_folder(str(head), Lookup())
    config = read_model_config(find_folder(str(head), Lookup(with_weights=False)))
    assert config == read_model_config(find_folder(str(file), Lookup()))
    assert info_of_unloaded(config, ModelOptions(), EngineOptions(), ParallelOptions()).max_model_len == 256


def test_it_imports_neither_torch_nor_transformers() -> None:
    printed = subprocess.run([sys.executable, "-c", START], capture_output=True, text=True, check=True).stdout
    assert printed == "\n"
