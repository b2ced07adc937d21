"""Clients that leave, crowds, keys, large bodies, sick and dead engines."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import openai
import pytest

from quire.engine.wire import client as client_module
from quire.engine.wire.protocol import AddRequest
from tests.api.test_completions import chunks_of
from tests.support.fake_core import FakeCore, says
from tests.support.server import Server, running_server, until

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
LONG = {"prompt": "x", "max_tokens": 400}


async def test_a_client_that_leaves_a_stream_frees_its_request(tmp_path: Path) -> None:
    core = FakeCore(answer=says("x" * 400))
    core.hold.set()
    core.allow(3)
    async with running_server(tmp_path, core) as server:
        async with server.http.stream("POST", COMPLETIONS, json={**LONG, "n": 3, "stream": True}) as answer:
            await anext(answer.aiter_bytes())
            assert server.services.in_flight == 1
        await until(lambda: not core.active)
        await until(lambda: server.services.in_flight == 0)
        await until(lambda: server.services.models[0].client.held == 0)
        assert server.services.models[0].client.in_flight == 0


async def test_a_silent_stream_shows_that_it_is_alive(tmp_path: Path) -> None:
    core = FakeCore(answer=says("late"))
    core.hold.set()
    async with running_server(tmp_path, core, sse_keepalive=0.02) as server:
        body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
        async with server.http.stream("POST", CHAT, json=body) as answer:
            lines = answer.aiter_lines()
            assert await anext(lines) == ": keep-alive"
            core.hold.clear()
            core.allow(10)
            rest = [line async for line in lines]
    assert rest[-2] == "data: [DONE]"
    assert "late" in "".join(json.loads(line[6:])["choices"][0]["delta"].get("content", "") for line in rest
                             if line.startswith("data: {"))  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_before_any_answer_frees_its_request(tmp_path: Path, stream: bool) -> None:
    core = FakeCore()
    core.hold.set()
    async with running_server(tmp_path, core) as server:
        task = asyncio.create_task(
            server.post(CHAT, {"messages": [{"role": "user", "content": "x"}], "stream": stream})
        )
        await until(lambda: core.active)
        task.cancel()
        await until(lambda: not core.active)
        await until(lambda: server.services.in_flight == 0)
        await until(lambda: server.services.models[0].client.held == 0)


async def test_more_than_the_queue_takes_is_answered_503_with_retry_after(tmp_path: Path) -> None:
    core = FakeCore()
    core.hold.set()
    async with running_server(tmp_path, core, capacity=3) as server:
        tasks = [asyncio.create_task(server.post(COMPLETIONS, {"prompt": "x"})) for _ in range(3)]
        await until(lambda: len(core.active) == 3)
        answer = await server.post(COMPLETIONS, {"prompt": "x"})
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["type"] == "ServiceUnavailableError"
        never = await server.post(COMPLETIONS, {"prompt": "x", "n": 4})
        assert never.status_code == 400
        core.hold.clear()
        assert [(await task).status_code for task in tasks] == [200] * 3
        assert (await server.post(COMPLETIONS, {"prompt": "x"})).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_burst_does_not_pass_the_queues_length(tmp_path: Path, stream: bool) -> None:
    core = FakeCore()
    core.hold.set()
    async with running_server(tmp_path, core, capacity=6) as server:
        body = {"prompt": "x", "n": 2, "stream": stream}
        tasks = [asyncio.create_task(server.post(COMPLETIONS, body)) for _ in range(20)]
        await until(lambda: sum(task.done() for task in tasks) == 17)
        core.hold.clear()
        assert sorted([(await task).status_code for task in tasks]) == [200] * 3 + [503] * 17
        await until(lambda: server.services.models[0].client.held == 0)
        assert (await server.post(COMPLETIONS, {"prompt": "x", "n": 6})).status_code == 200


async def test_the_openai_client_comes_again(tmp_path: Path) -> None:
    core = FakeCore()
    core.hold.set()
    async with running_server(tmp_path, core, capacity=1) as server:
        first = asyncio.create_task(server.post(COMPLETIONS, {"prompt": "x"}))
        await until(lambda: core.active)
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=5) as client:
            second = asyncio.create_task(client.completions.create(model="fake", prompt="again"))
            await until(lambda: server.services.in_flight == 1)
            core.hold.clear()
            assert (await second).choices[0].text == "AGAIN"
        await first


async def test_health_is_green_then_red_when_the_engine_dies(tmp_path: Path) -> None:
    core = FakeCore(answer=says("x" * 400), die_at_step=20)
    async with running_server(tmp_path, core) as server:
        for path in ("/health", "/ping", "/ready"):
            answer = await server.http.get(path)
            assert (answer.status_code, answer.content) == (200, b"")
            assert (await server.http.head(path)).status_code == 200
        assert (await server.http.post("/ping")).status_code == 200
        core.hold.set()
        chat = {"messages": [{"role": "user", "content": "x"}], "stream": True}
        bodies = ((COMPLETIONS, {**LONG, "stream": True}), (CHAT, chat), (COMPLETIONS, LONG))
        tasks = [asyncio.create_task(server.post(path, body)) for path, body in bodies]
        await until(lambda: len(core.active) == 3)
        core.hold.clear()
        answers = [await task for task in tasks]
        for answer in answers[:2]:
            assert answer.status_code == 200
            last = chunks_of(answer.text)[-1]
            assert "told to die" in last["error"]["message"]
            assert last["error"]["code"] == 503
        assert answers[2].status_code == 503
        for path in ("/health", "/ping", "/ready"):
            answer = await server.http.get(path)
            assert answer.status_code == 503
            assert "told to die" in answer.json()["error"]["message"]
        assert (await server.post(COMPLETIONS, LONG)).status_code == 503


async def test_a_stuck_engine_is_unhealthy_until_it_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_PING_EVERY", 0.01)
    core = FakeCore()
    async with running_server(tmp_path, core, stall_timeout=0.3) as server:
        assert (await server.http.get("/health")).status_code == 200
        core.deaf.set()
        async with asyncio.timeout(10):
            while (answer := await server.http.get("/health")).status_code == 200:
                await asyncio.sleep(0.02)
        assert "no progress" in answer.json()["error"]["message"]
        core.deaf.clear()
        async with asyncio.timeout(10):
            while (await server.http.get("/health")).status_code != 200:
                await asyncio.sleep(0.02)


async def test_a_draining_server_is_not_ready_but_healthy(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        server.services.draining = True
        assert (await server.http.get("/ready")).status_code == 503
        assert (await server.http.get("/health")).status_code == 200


async def test_keys_are_needed_everywhere_but_for_probes(tmp_path: Path) -> None:
    async with running_server(tmp_path, api_key=("one", "two")) as server:
        for path in ("/health", "/ready", "/ping"):
            assert (await server.http.get(path)).status_code == 200
        for path in ("/v1/models", "/metrics", "/version", "/load", "/docs", "/openapi.json", "/nowhere"):
            answer = await server.http.get(path)
            assert answer.status_code == 401, path
            assert answer.json()["error"]["code"] == 401
        for key in ("", "Bearer", "Bearer three", "one", "Basic one", "Bearer one two"):
            assert (await server.http.get("/v1/models", headers={"authorization": key})).status_code == 401
        for key in ("one", "two"):
            headers = {"authorization": f"Bearer {key}"}
            assert (await server.http.get("/v1/models", headers=headers)).status_code == 200
            assert (await server.post(COMPLETIONS, {"prompt": "x"}, headers=headers)).status_code == 200
            headers = {"authorization": f"bearer {key}"}
            assert (await server.http.get("/v1/models", headers=headers)).status_code == 200
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="three") as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.retrieve("fake")


async def test_large_bodies_are_refused(tmp_path: Path) -> None:
    async with running_server(tmp_path, max_body_size=2000) as server:
        assert (await server.post(COMPLETIONS, {"prompt": "x" * 100})).status_code == 200
        answer = await server.post(COMPLETIONS, {"prompt": "x" * 3000})
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == 413

        async def endless() -> object:
            for _ in range(100):
                yield b"x" * 100

        headers = {"content-type": "application/json"}
        try:
            answer = await server.http.post(COMPLETIONS, content=endless(), headers=headers)  # type: ignore[arg-type]
            assert answer.status_code == 413
        except httpx.WriteError:
            pass  # the server may hang up on a body that nobody wants
        assert (await server.post(COMPLETIONS, {"prompt": "x"})).status_code == 200


async def test_browsers_of_allowed_origins_may_call(tmp_path: Path) -> None:
    async with running_server(tmp_path, allowed_origins=("http://a.example",), api_key=("k",)) as server:
        headers = {"origin": "http://a.example", "access-control-request-method": "POST"}
        answer = await server.http.options(COMPLETIONS, headers=headers)
        assert answer.headers["access-control-allow-origin"] == "http://a.example"
        answer = await server.http.options(COMPLETIONS, headers={**headers, "origin": "http://b.example"})
        assert "access-control-allow-origin" not in answer.headers
        answer = await server.http.get("/v1/models", headers={"origin": "http://a.example"})
        exposed = "x-request-id, x-quire-ignored-fields, retry-after"
        assert (answer.status_code, answer.headers["access-control-expose-headers"]) == (401, exposed)


async def test_request_ids_are_given_or_taken(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        answer = await server.post(COMPLETIONS, {"prompt": "x"}, headers={"x-request-id": "mine-1 \u00e9"[:6]})
        assert answer.headers["x-request-id"] == "mine-1"
        assert answer.json()["id"] == "cmpl-mine-1"
        assert (await server.post(COMPLETIONS, {"prompt": "x", "request_id": "body"})).json()["id"] == "cmpl-body"
        answer = await server.post(COMPLETIONS, {"prompt": "x"}, headers={"x-request-id": "a b\tc"})
        assert answer.headers["x-request-id"] == "a_b_c"


async def test_pages_that_do_not_exist(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        answer = await server.http.get("/nowhere")
        assert (answer.status_code, answer.json()["error"]["type"]) == (404, "NotFoundError")
        answer = await server.http.get(COMPLETIONS)
        assert (answer.status_code, answer.json()["error"]["code"]) == (405, 405)
        answer = await server.http.post(COMPLETIONS, content=b"{}", headers={"content-type": "text/plain"})
        assert answer.status_code == 400


async def test_version_and_load(tmp_path: Path) -> None:
    core = FakeCore()
    core.hold.set()
    async with running_server(tmp_path, core) as server:
        assert set((await server.http.get("/version")).json()) == {"version"}
        assert (await server.http.get("/load")).json() == {"server_load": 0}
        task = asyncio.create_task(server.post(COMPLETIONS, {"prompt": "x"}))
        await until(lambda: core.active)
        assert (await server.http.get("/load")).json() == {"server_load": 1}
        core.hold.clear()
        await task
        assert (await server.http.get("/load")).json() == {"server_load": 0}


async def test_the_models_page(tmp_path: Path) -> None:
    async with running_server(tmp_path, FakeCore(), FakeCore()) as server:
        cards = (await server.http.get("/v1/models")).json()["data"]
        assert [card["id"] for card in cards] == ["fake", "alias", "fake-1"]
        assert {card["root"] for card in cards} == {"root-0", "root-1"}
        assert all(card["max_model_len"] == 512 and card["object"] == "model" for card in cards)
        assert (await server.http.get("/v1/models/alias")).json() == cards[1]
        answer = await server.http.get("/v1/models/some/other")
        assert (answer.status_code, answer.json()["error"]["param"]) == (404, "model")


async def test_tokenize_and_back(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        body = (await server.post("/tokenize", {"prompt": "a\u20ac", "return_token_strs": True})).json()
        assert (body["count"], body["max_model_len"], len(body["tokens"])) == (4, 512, 4)
        assert body["token_strs"][0] == "a"
        assert (await server.post("/detokenize", {"tokens": body["tokens"]})).json() == {"prompt": "a\u20ac"}
        chat = (await server.post("/tokenize", {"messages": [{"role": "user", "content": "x"}]})).json()
        text = (await server.post("/detokenize", {"tokens": chat["tokens"]})).json()["prompt"]
        assert text == "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
        assert chat["token_strs"] is None


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}),
        ("/tokenize", {"messages": []}),
        ("/tokenize", {"prompt": 5}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [1 << 40]}),
        ("/detokenize", {"tokens": [5000]}),
        ("/detokenize", {}),
    ],
)
async def test_what_cannot_be_tokenized_is_refused(tmp_path: Path, path: str, body: dict[str, object]) -> None:
    async with running_server(tmp_path) as server:
        assert (await server.post(path, body)).status_code == 400


async def metrics_of(server: Server) -> dict[str, float]:
    """Samples of the metrics page by name and labels."""
    lines = (await server.http.get("/metrics")).text.splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


async def test_metrics_count_what_happened(tmp_path: Path) -> None:
    core = FakeCore(answer=says("x" * 10))
    async with running_server(tmp_path, core) as server:
        for _ in range(3):
            await server.post(COMPLETIONS, {"prompt": "abcd", "max_tokens": 5})
        labels = '{engine="0",model_name="fake"}'
        for prefix in ("quire:", "vllm:"):
            found = await metrics_of(server)
            expected = {
                "prompt_tokens_total": 12,
                "generation_tokens_total": 15,
                "time_to_first_token_seconds_count": 3,
                "inter_token_latency_seconds_count": 12,
                "e2e_request_latency_seconds_count": 3,
                "request_queue_time_seconds_count": 3,
                "request_prefill_time_seconds_count": 3,
                "request_decode_time_seconds_count": 3,
                "request_inference_time_seconds_count": 3,
                "request_time_per_output_token_seconds_count": 3,
                "request_prompt_tokens_sum": 12,
                "request_generation_tokens_sum": 15,
                "request_params_max_tokens_sum": 15,
            }
            for name, value in expected.items():
                assert found[f"{prefix}{name}{labels}"] == value, name
            ended = f'{prefix}request_success_total{{engine="0",finished_reason="length",model_name="fake"}}'
            assert found[ended] == 3
        handled = 'http_requests_total{handler="/v1/completions",method="POST",status="2xx"}'
        assert found[handled] == 3


async def test_metrics_return_to_nothing_after_clients_left(tmp_path: Path) -> None:
    core = FakeCore(answer=says("x" * 400))
    core.hold.set()
    core.allow(1)
    async with running_server(tmp_path, core) as server:
        async with server.http.stream("POST", COMPLETIONS, json={**LONG, "stream": True}) as answer:
            await anext(answer.aiter_bytes())
        await until(lambda: not core.active)
        found = await metrics_of(server)
        assert found['quire:request_success_total{engine="0",finished_reason="abort",model_name="fake"}'] == 1


async def test_metrics_under_quires_names_only(tmp_path: Path) -> None:
    async with running_server(tmp_path, vllm_metric_names=False) as server:
        answer = await server.http.get("/metrics")
        assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        page = answer.text
        assert "quire:" in page
        assert "vllm:" not in page


async def test_the_openapi_page_describes_every_route(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        spec = json.loads((await server.http.get("/openapi.json")).text)
        assert {CHAT, COMPLETIONS, "/v1/models", "/tokenize", "/detokenize", "/health", "/ready"} <= set(spec["paths"])
        answers = spec["paths"][CHAT]["post"]["responses"]
        assert {"200", "400", "404", "503"} <= set(answers)


async def test_many_streams_at_once_stay_apart(tmp_path: Path) -> None:
    core = FakeCore()
    async with running_server(tmp_path, core, capacity=100) as server:
        texts = [f"text number {i}" for i in range(60)]
        answers = await asyncio.gather(
            *(server.post(COMPLETIONS, {"prompt": text, "stream": True, "max_tokens": 50}) for text in texts)
        )
        for text, answer in zip(texts, answers, strict=True):
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks_of(answer.text)) == text.upper()
    assert len([message for message in core.received if isinstance(message, AddRequest)]) == 60
