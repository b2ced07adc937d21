"""Any body at any POST route: 2xx, 4xx in the right shape, or 503 with Retry-After; and nothing is held afterwards.

`bin/fuzz` runs the slow test, which sends random bodies to the bundled model.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.bodies import BODIES
from tests.support.fake_core import INFO, FakeCore
from tests.support.mutations import encode, mutated, mutated_text
from tests.support.pooling import pooling_info
from tests.support.process import serving
from tests.support.realtime import FakeSpeech
from tests.support.responses import REASONING_AND_CALL, answers_with, reasoning_server
from tests.support.server import Server, until
from tests.support.speech import SPEECH

JSON = {"content-type": "application/json"}
MAX_ERROR = 8192  # characters: an error does not quote much of the body
ROUTES = sorted(BODIES)
FIELDS = sorted({name for bodies in BODIES.values() for body in bodies for name in body})
Post = Callable[[str, bytes], httpx.Response]


@dataclass
class Fake:
    """A server over the fake core, on an event loop that only runs while the test waits."""

    runner: asyncio.Runner
    server: Server

    def post(self, path: str, content: bytes) -> httpx.Response:
        return self.runner.run(self.server.http.post(path, content=content, headers=JSON))


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fake]:
    cores = (  # a request that names no model finds one for its task
        answers_with(REASONING_AND_CALL),
        FakeCore(info=pooling_info(INFO, sparse=True)),
        FakeCore(info=msgspec.structs.replace(INFO, kind=SPEECH)),
    )
    folder = tmp_path_factory.mktemp("fuzz")
    prompts = {"prompts": {"query": "Instruct: find\nQuery: "}}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    with asyncio.Runner() as runner:
        running = reasoning_server(folder, *cores, speech=FakeSpeech())
        server = runner.run(running.__aenter__())
        try:
            yield Fake(runner, server)
            runner.run(until(lambda: not server.state.in_flight))
            runner.run(until(lambda: not any(model.client.slots_in_use for model in server.state.models)))
            runner.run(until(lambda: not any(core.active for core in cores)))
            assert runner.run(server.http.get("/health")).status_code == 200
        finally:
            runner.run(running.__aexit__(None, None, None))


def check(path: str, answer: httpx.Response) -> None:
    """Assert that this answer is one of the three that are allowed."""
    status, text = answer.status_code, answer.text
    if 200 <= status < 300:
        events = answer.headers.get("content-type", "").startswith("text/event-stream")
        assert not (events and ('"code":500' in text or '"code":"500"' in text or '"api_error"' in text)), text[-2000:]
        return
    assert status == 503 or 400 <= status < 500, (status, text[:2000])
    assert status != 503 or int(answer.headers["retry-after"]) > 0
    assert answer.headers["content-type"] == "application/json"
    assert len(answer.text) <= MAX_ERROR
    body = answer.json()
    error = body["error"]
    assert error["message"]
    if path.startswith("/v1/messages"):
        assert set(body) == {"type", "error"}
        assert body["type"] == "error"
        assert set(error) == {"type", "message"}
    else:
        assert set(body) == {"error"}
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] == status
        assert error["param"] is None or isinstance(error["param"], str)


def bodies_for(path: str) -> st.SearchStrategy[bytes]:
    return st.one_of(mutated(BODIES[path], FIELDS), mutated(BODIES[path], FIELDS), mutated_text(BODIES[path]))


def fuzz(path: str, post: Post, examples: int, *, random: bool) -> None:
    """Send so many bodies; they are the same in every run unless `random`."""

    @settings(
        max_examples=examples,
        derandomize=not random,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(body=bodies_for(path))
    def send(body: bytes) -> None:
        answer = post(path, body)
        try:
            check(path, answer)
        except AssertionError as error:
            error.add_note(f"{path} answered {answer.status_code} to {len(body)} bytes: {body[:5000]!r}")
            raise

    send()


def test_every_route_and_every_field_has_a_valid_body(fake: Fake) -> None:
    """A new route or field must be added to the bodies that are mutated."""
    document = fake.runner.run(fake.server.http.get("/openapi.json")).json()
    with_body = {
        path: operations["post"]["requestBody"]["content"]["application/json"]["schema"]
        for path, operations in document["paths"].items()
        if "application/json" in operations.get("post", {}).get("requestBody", {}).get("content", {})
    }
    assert set(with_body) == set(BODIES)
    for path, schema in with_body.items():
        members = [member["$ref"].rpartition("/")[2] for member in schema.get("oneOf", [schema])]
        members = [member for member in members if member != "SessionRequest"]  # each is refused
        declared = {name for member in members for name in document["components"]["schemas"][member]["properties"]}
        assert declared - {name for body in BODIES[path] for name in body} == set(), path


@pytest.mark.parametrize(
    ("path", "body"),
    [pytest.param(path, body, id=f"{path}-{n}") for path in ROUTES for n, body in enumerate(BODIES[path])],
)
def test_bodies_without_mutations_are_accepted(fake: Fake, path: str, body: Any) -> None:
    answer = fake.post(path, encode(body))
    if path.startswith("/update_weights"):  # read completely, and then refused: no directory is allowed
        assert answer.status_code == 403, answer.text
        return
    if path == "/scale_elastic_ep":  # read completely, and then refused: there is one engine
        assert "--data-parallel-size" in answer.json()["error"]["message"]
        return
    assert answer.status_code == 200, answer.text
    if answer.headers.get("content-type") != "application/octet-stream":
        assert answer.content == b"" or answer.text.startswith(("data: ", "event: ")) or json.loads(answer.text)
    check(path, answer)


@pytest.mark.filterwarnings("ignore:Generating overly large repr")
@pytest.mark.parametrize("examples", [12, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("path", ROUTES)
def test_mutated_bodies_are_answered_or_refused(fake: Fake, path: str, examples: int) -> None:
    fuzz(path, fake.post, examples, random=False)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore:Generating overly large repr")
def test_random_bodies_against_the_bundled_model(tmp_path_factory: pytest.TempPathFactory) -> None:
    """For FUZZ_SECONDS seconds; a failure prints the smallest body that was found."""
    end = time.monotonic() + float(os.environ.get("FUZZ_SECONDS", "60"))
    store = f"sqlite:///{tmp_path_factory.mktemp('store')}/responses.db"
    with serving(
        "--response-store", store, "--served-model-name", "fake", "fake-1", "fake-2", "--no-access-log"
    ) as server:
        with server.http as http:

            def post(path: str, content: bytes) -> httpx.Response:
                return http.post(path, content=content, headers=JSON)

            while time.monotonic() < end:
                for path in ROUTES:
                    fuzz(path, post, 20, random=True)
            assert http.get("/health").status_code == 200
            assert http.get("/load").json() == {"server_load": 0}
        assert "Traceback" not in server.log
