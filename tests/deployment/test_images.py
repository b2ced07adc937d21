"""The images serve the bundled models without rights, on a read-only file system, and end running requests first."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.deployment import CHART, DOCKERFILES
from tests.support.images import Container, build, layer_sizes, running
from tests.support.picture_chat import base64_of
from tests.support.pictures import drawn, encoded

pytestmark = [pytest.mark.containers, pytest.mark.timeout(3600)]

_MODELS = {"quire-nano", "quire-nano-embed", "quire-nano-hear", "quire-nano-see"}
_RECORDING = Path(__file__).parents[1] / "app" / "recordings" / "english.flac"
_TOKENS = 400  # of a stream that is running when the container is told to stop
_MEGABYTE = 10**6


@pytest.fixture(scope="module", name="image", params=DOCKERFILES)
def _image(request: pytest.FixtureRequest) -> str:
    return build(request.param)


@pytest.fixture(scope="module", name="container")
def _container(image: str) -> Iterator[Container]:
    with running(image) as started:
        yield started


def test_it_serves_the_bundled_models(container: Container) -> None:
    with container.http as client:
        assert {card["id"] for card in client.get("/v1/models").json()["data"]} == _MODELS
        body = {"model": "quire-nano", "messages": [{"role": "user", "content": "What is 27 + 58?"}], "temperature": 0}
        answer = client.post("/v1/chat/completions", json=body).json()
        assert "85" in answer["choices"][0]["message"]["content"]
        embedded = client.post("/v1/embeddings", json={"model": "quire-nano-embed", "input": "Where is the port?"})
        assert embedded.status_code == 200
        url = f"data:image/png;base64,{base64_of(encoded(drawn(64, 64)))}"
        content = [{"type": "text", "text": "What is in it?"}, {"type": "image_url", "image_url": {"url": url}}]
        seen = client.post(
            "/v1/chat/completions", json={"model": "quire-nano-see", "messages": [{"role": "user", "content": content}]}
        )
        assert seen.json()["choices"][0]["message"]["content"]
        with _RECORDING.open("rb") as file:
            heard = client.post("/v1/audio/transcriptions", data={"model": "quire-nano-hear"}, files={"file": file})
        assert heard.json()["text"]


def test_its_health_check_succeeds(container: Container) -> None:
    assert container.is_healthy()


def test_the_test_of_the_chart_succeeds(container: Container) -> None:
    script = (CHART / "files" / "chat.py").read_text(encoding="utf-8")
    status, output = container.execute("python", "-c", script, URL=container.url)
    assert status == 0, output
    assert "quire-nano answers:" in output


def test_it_is_an_ordinary_user_with_a_read_only_file_system(container: Container) -> None:
    assert container.execute("id", "-u") == (0, "1000\n")
    for folder in ("/", "/home/quire", "/opt/quire"):
        status, output = container.execute("touch", f"{folder}/file")
        assert status != 0
        assert "Read-only file system" in output
    for folder in ("/cache", "/state", "/tmp"):  # noqa: S108 the container's
        assert container.execute("touch", f"{folder}/file") == (0, "")
    _, status_of_process = container.execute("cat", "/proc/1/status")
    fields = dict(line.split(":\t", 1) for line in status_of_process.splitlines() if ":\t" in line)
    assert int(fields["CapEff"], 16) == int(fields["CapBnd"], 16) == 0
    assert fields["NoNewPrivs"] == "1"


def test_stored_responses_are_on_the_volume(container: Container) -> None:
    assert "memory only" not in container.log
    with container.http as client:
        stored = client.post("/v1/responses", json={"model": "quire-nano", "input": "Hello", "store": True}).json()
        assert client.get(f"/v1/responses/{stored['id']}").status_code == 200
    assert container.execute("test", "-s", "/state/quire/responses.db")[0] == 0


def test_no_process_remains_as_a_zombie(container: Container) -> None:
    """Neither those of the start nor those of requests."""
    count = "grep -l '^State:.Z' /proc/[0-9]*/status | wc -l"
    url = f"data:image/png;base64,{base64_of(encoded(drawn(64, 64)))}"
    content = [{"type": "text", "text": "What is in it?"}, {"type": "image_url", "image_url": {"url": url}}]
    with container.http as client:
        for _ in range(5):
            body = {"model": "quire-nano-see", "messages": [{"role": "user", "content": content}]}
            assert client.post("/v1/chat/completions", json=body).status_code == 200
    assert container.execute("sh", "-c", count) == (0, "0\n")


def test_modules_are_compiled(container: Container) -> None:
    script = (
        "import os; from importlib.util import find_spec;"
        "print(*(os.path.exists(find_spec(name).cached) for name in ('quire.app.serve', 'torch', 'transformers')))"
    )
    assert container.execute("python", "-c", script) == (0, "True True True\n")


def test_it_has_no_compiler_but_the_one_that_triton_needs(container: Container, image: str) -> None:
    compilers = "for name in cc gcc g++ c++ make; do command -v $name; done; true"
    _, output = container.execute("sh", "-c", compilers)
    expected = ["/usr/bin/cc", "/usr/bin/gcc"] if image.endswith("cuda") else []
    assert output.split() == expected
    if expected:
        script = (
            "from triton.runtime.build import compile_module_from_src as compiled;"
            'source = \'#include <Python.h>\\nstatic struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "made"};'
            "PyMODINIT_FUNC PyInit_made(void) { return PyModule_Create(&module); }';"
            "print(compiled(source, 'made').__file__)"
        )
        status, output = container.execute("python", "-c", script)
        assert status == 0, output
        assert output.startswith("/cache/triton/")


def test_a_new_version_of_quire_is_a_small_layer(image: str) -> None:
    newest, dependencies, *_ = layer_sizes(image)
    print(f"{image}: layers of {newest / _MEGABYTE:.0f} and {dependencies / _MEGABYTE:.0f} MB")
    assert newest < 100 * _MEGABYTE < dependencies


def test_it_starts_without_volumes(image: str) -> None:
    with running(image, "--model", "quire-nano", volumes=False) as container:
        assert "responses are stored in memory only" in container.log


def test_a_running_stream_ends_completely_when_the_container_is_stopped(image: str) -> None:
    body = {
        "model": "quire-nano",
        "prompt": "one two three",
        "max_tokens": _TOKENS,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    with running(image) as container, container.http as client:
        with client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            container.terminate()
            events = [line.removeprefix("data: ") for line in lines if line]
        assert events.pop() == "[DONE]"
        assert json.loads(events[-1])["usage"]["completion_tokens"] == _TOKENS
        assert container.wait() == 0
