"""The trace of each kind of request, as a collector gets it: whole, nested, with the client's span as its parent."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.engine.client.protocol import AddRequest
from quire.engine.client.trace_context import TraceContext
from quire.tracing.start import start_traces
from tests.support.audio import wav
from tests.support.fake_core import INFO, FakeCore
from tests.support.otlp import Receiver, grpc_receiver, http_receiver, traced_server
from tests.support.patience import PATIENCE
from tests.support.pooling import pooling_info
from tests.support.realtime import pcm, session_of
from tests.support.server import until
from tests.support.speech import SpeechCore, speech_server, spoken
from tests.support.tool_server import ROME, WEATHER, serving

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=1", "user-agent": "me"}
MESSAGES = [{"role": "user", "content": "Once upon"}]
CHAT = "/v1/chat/completions"
PHASES = ["queue", "prefill", "decode"]
BEFORE = ("preprocess", ["render"])
SLOW = pytest.mark.slow  # variants


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with grpc_receiver() as receiver:
        yield receiver


def pools() -> FakeCore:
    return FakeCore(info=pooling_info(INFO))


@pytest.mark.parametrize(
    ("path", "body", "operation", "parts"),
    [
        pytest.param(CHAT, {"messages": MESSAGES}, "chat", [BEFORE, *PHASES, "respond"], marks=SLOW),
        (CHAT, {"messages": MESSAGES, "stream": True}, "chat", [BEFORE, *PHASES, "respond"]),
        (CHAT, {"messages": MESSAGES, "n": 2}, "chat", [BEFORE, *[("sequence", PHASES)] * 2, "respond"]),
        ("/v1/responses", {"input": "Once", "stream": True}, "chat", [BEFORE, *PHASES, "respond"]),
        pytest.param(
            "/v1/messages",
            {"messages": MESSAGES, "max_tokens": 3},
            "chat",
            [BEFORE, *PHASES, "respond"],
            marks=SLOW,
        ),
        (
            "/v1/completions",
            {"prompt": ["a", "b"]},
            "text_completion",
            [BEFORE, *[("sequence", PHASES)] * 2, "respond"],
        ),
        ("/v1/embeddings", {"input": "a"}, "embeddings", ["preprocess", "queue", "prefill", "respond"]),
        pytest.param("/invocations", {"prompt": "a"}, "text_completion", [BEFORE, *PHASES, "respond"], marks=SLOW),
    ],
)
async def test_a_request_has_one_trace_of_all_its_parts(
    path: str, body: dict[str, Any], operation: str, parts: list[Any], receiver: Receiver, tmp_path: Path
) -> None:
    async with traced_server(tmp_path, FakeCore(), pools(), receiver=receiver) as server:
        answer = await server.post(path, body, headers=HEADERS)
        assert answer.status_code == 200, answer.text
    receiver.check()
    root, _ = receiver.tree()
    model = "fake-1" if operation == "embeddings" else "fake"
    assert receiver.names() == (f"{operation} {model}", parts)
    assert (root.trace_id, root.parent_id, root.kind, root.status) == (TRACE, SPAN, "server", "unset")
    assert {span.kind for span in receiver.spans if span is not root} == {"internal"}
    assert {span.state for span in receiver.spans} == {"vendor=1"}
    attributes = root.attributes
    assert attributes["gen_ai.operation.name"] == operation
    assert attributes["gen_ai.request.model"] == attributes["gen_ai.response.model"] == model
    assert attributes["http.route"] == attributes["url.path"] == path
    assert attributes["http.response.status_code"] == 200
    assert attributes["gen_ai.request.id"] == answer.headers["x-request-id"]
    assert "error.type" not in attributes


async def test_the_span_of_a_chat_has_its_parameters_tokens_and_latencies_but_no_text(
    receiver: Receiver, tmp_path: Path
) -> None:
    body = {
        "model": "alias",
        "messages": [{"role": "user", "content": "a secret of more than sixteen letters"}],
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.75,
        "top_k": 4,
        "seed": 3,
    }
    core = FakeCore()
    async with traced_server(tmp_path, core, receiver=receiver) as server:
        answer = await server.post(CHAT, body, headers=HEADERS)
    root, _ = receiver.tree()
    (message,) = (message for message in core.received if isinstance(message, AddRequest))
    assert message.trace == TraceContext(TRACE, root.span_id, state="vendor=1")  # of which the engine makes parts
    attributes, usage = root.attributes, answer.json()["usage"]
    expected = {
        "http.request.method": "POST",
        "url.scheme": "http",
        "server.address": "127.0.0.1",
        "server.port": int(server.url.rpartition(":")[2]),
        "user_agent.original": "me",
        "gen_ai.provider.name": "quire",
        "gen_ai.request.model": "alias",
        "gen_ai.response.model": "fake",
        "gen_ai.response.id": answer.json()["id"],
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.75,
        "gen_ai.request.top_k": 4,
        "gen_ai.request.seed": 3,
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": 9,
        "gen_ai.usage.prompt_tokens": usage["prompt_tokens"],
        "gen_ai.usage.completion_tokens": 9,
        "gen_ai.usage.cache_read.input_tokens": usage["prompt_tokens_details"]["cached_tokens"],
    }
    assert {name: attributes.get(name) for name in expected} == expected
    latencies = {name: value for name, value in attributes.items() if name.startswith("gen_ai.latency.")}
    assert set(latencies) == {
        f"gen_ai.latency.{name}"
        for name in (
            *("e2e", "time_in_queue", "time_to_first_token", "time_in_model_prefill", "time_in_model_decode"),
            "time_in_model_inference",
        )
    }
    assert all(0 <= value <= latencies["gen_ai.latency.e2e"] for value in latencies.values())
    assert not any("secret" in str(value).lower() for span in receiver.spans for value in span.attributes.values())
    assert root.service["service.name"] == "quire"
    assert {"service.version", "telemetry.sdk.name"} <= set(root.service)
    assert root.service["service.instance.id"] == receiver.settings().instance


async def test_phases_have_the_tokens_of_their_sequence(receiver: Receiver, tmp_path: Path) -> None:
    async with traced_server(tmp_path, receiver=receiver) as server:
        headers = {"traceparent": "00-no-trace-01"}
        await server.post("/v1/completions", {"prompt": "x" * 40, "max_tokens": 5}, headers=headers)
    root, _ = receiver.tree()
    assert root.parent_id == ""  # it begins a trace
    spans = {span.name: span.attributes for span in receiver.spans}
    assert spans["prefill"]["gen_ai.usage.input_tokens"] == 40
    assert spans["prefill"]["gen_ai.usage.cache_read.input_tokens"] == 32
    assert spans["decode"] == {"gen_ai.usage.output_tokens": 5}


async def test_a_batch_of_many_inputs_has_a_bounded_number_of_spans(receiver: Receiver, tmp_path: Path) -> None:
    async with traced_server(tmp_path, FakeCore(), pools(), receiver=receiver) as server:
        await server.post("/v1/embeddings", {"input": ["abc"] * 200, "model": "fake-1"}, headers=HEADERS)
    receiver.check()
    root, children = receiver.tree()
    sequences = [child for child in children[root.span_id] if child.name == "sequence"]
    assert len(sequences) == 16
    assert root.attributes["gen_ai.usage.num_sequences"] == 200
    assert root.attributes["quire.sequences_without_spans"] == 184
    assert root.attributes["gen_ai.usage.input_tokens"] == 600


async def test_a_rerank_has_one_trace(receiver: Receiver, tmp_path: Path) -> None:
    async with traced_server(tmp_path, pools(), receiver=receiver, joins=True) as server:
        body = {"query": "a", "documents": ["b", "c"]}
        assert (await server.post("/v1/rerank", body, headers=HEADERS)).status_code == 200
    receiver.check()
    assert receiver.names() == (
        "rerank fake",
        ["preprocess", *[("sequence", ["queue", "prefill"])] * 2, "respond"],
    )


@SLOW
async def test_beam_search_has_one_span_for_all_of_its_steps(receiver: Receiver, tmp_path: Path) -> None:
    body = {"prompt": "abc", "max_tokens": 4, "use_beam_search": True, "n": 2}
    async with traced_server(tmp_path, receiver=receiver) as server:
        assert (await server.post("/v1/completions", body)).status_code == 200
    receiver.check()
    assert receiver.names() == ("text_completion fake", [BEFORE, "beam_search", "respond"])


async def test_a_transcription_has_one_trace(receiver: Receiver, tmp_path: Path) -> None:
    audio = wav(spoken((300.0, 1.0))[:, None])
    async with traced_server(tmp_path, SpeechCore(), receiver=receiver, run=speech_server) as server:
        answer = await server.http.post(
            "/v1/audio/transcriptions",
            files={"file": ("speech.wav", audio)},
            data={"language": "en", "response_format": "json"},
            headers=HEADERS,
        )
        assert answer.json()["text"] == "alpha"
    receiver.check()
    root, _ = receiver.tree()
    assert (root.name, root.parent_id, root.kind) == ("transcription fake", SPAN, "server")
    assert {"preprocess", "queue", "prefill", "decode", "respond"} <= {span.name for span in receiver.spans}


async def test_an_utterance_has_a_trace_that_links_to_its_session(receiver: Receiver, tmp_path: Path) -> None:
    async with (
        traced_server(tmp_path, SpeechCore(), receiver=receiver, run=speech_server) as server,
        session_of(server, turn_detection=None) as client,
    ):
        for _ in range(2):
            await client.append(pcm(spoken((300.0, 0.6))))
            await client.send("input_audio_buffer.commit")
            await client.until("conversation.item.done")
    (session,) = (span for span in receiver.spans if span.name.startswith("realtime"))
    assert session.attributes["http.response.status_code"] == 101
    utterances = [span for span in receiver.spans if span.name.startswith("transcription")]
    assert len({span.trace_id for span in (session, *utterances)}) == 3
    for utterance in utterances:
        assert utterance.links == [(session.trace_id, session.span_id)]
        names = {span.name for span in receiver.spans if span.trace_id == utterance.trace_id}
        assert {"queue", "prefill", "decode", "respond"} <= names


async def test_calls_of_tools_are_a_part_of_the_trace_and_carry_it_on(receiver: Receiver, tmp_path: Path) -> None:
    traces = start_traces(receiver.settings())
    async with serving(tmp_path, ROME, "It rains.", tracing=traces.tracing) as (server, _, tools):
        answer = await server.post("/v1/responses", {"input": "Hi", "tools": [WEATHER]}, headers=HEADERS)
        assert answer.status_code == 200, answer.text
    await asyncio.to_thread(traces.export.close, PATIENCE)
    receiver.check()
    root, children = receiver.tree()
    names = [span.name for span in children[root.span_id]]
    assert names.count("execute_tool get_weather") == 1
    assert names.count("sequence") == 2
    assert {headers.get("traceparent") for headers in tools.headers} == {f"00-{TRACE}-{root.span_id}-01"}
    assert {headers.get("tracestate") for headers in tools.headers} == {"vendor=1"}


@pytest.mark.parametrize(
    ("settings", "path", "body", "status", "name"),
    [
        ({"api_key": ("k",)}, CHAT, {"messages": MESSAGES}, 401, "chat"),
        ({}, CHAT, {"messages": MESSAGES, "max_tokens": 9999}, 400, "chat fake"),
        pytest.param({}, CHAT, {"messages": MESSAGES, "model": "other"}, 404, "chat", marks=SLOW),
        pytest.param({}, "/nowhere", {}, 404, "POST", marks=SLOW),
        pytest.param({}, "/tokenize", {"prompt": "x"}, 200, "POST /tokenize", marks=SLOW),
        pytest.param({"capacity": 1}, CHAT, {"messages": MESSAGES, "n": 2}, 400, "chat fake", marks=SLOW),
    ],
)
async def test_refused_requests_have_a_trace_too(
    settings: dict[str, Any],
    path: str,
    body: dict[str, Any],
    status: int,
    name: str,
    receiver: Receiver,
    tmp_path: Path,
) -> None:
    async with traced_server(tmp_path, receiver=receiver, **settings) as server:
        assert (await server.post(path, body, headers=HEADERS)).status_code == status
    (span,) = (span for span in receiver.spans if span.parent_id == SPAN)
    assert (span.name, span.status) == (name, "unset")
    assert span.attributes["http.response.status_code"] == status
    assert span.attributes.get("error.type") == (None if status == 200 else str(status))


async def test_requests_beyond_the_queue_and_while_draining_have_the_status_error(
    receiver: Receiver, tmp_path: Path
) -> None:
    core = FakeCore()
    core.hold.set()
    async with traced_server(tmp_path, core, receiver=receiver, capacity=1) as server:
        first = asyncio.create_task(server.post(CHAT, {"messages": MESSAGES}))
        await until(lambda: core.active)
        assert (await server.post(CHAT, {"messages": MESSAGES}, headers=HEADERS)).status_code == 503
        server.state.draining = True
        assert (await server.post(CHAT, {"messages": MESSAGES}, headers=HEADERS)).status_code == 503
        core.hold.clear()
        assert (await first).status_code == 200
    refused = [span for span in receiver.spans if span.parent_id == SPAN]
    assert [(span.status, span.attributes["error.type"]) for span in refused] == [("error", "503")] * 2


@pytest.mark.parametrize("stream", [True, pytest.param(False, marks=SLOW)])
async def test_a_request_whose_engine_dies_has_the_status_error(
    stream: bool, receiver: Receiver, tmp_path: Path
) -> None:
    async with traced_server(tmp_path, FakeCore(die_at_step=3), receiver=receiver) as server:
        await server.post(CHAT, {"messages": MESSAGES, "stream": stream}, headers=HEADERS)
    receiver.check()
    root, _ = receiver.tree()
    assert root.status == "error"
    assert root.attributes["error.type"] == (
        "EngineDead" if stream else str(root.attributes["http.response.status_code"])
    )
    assert root.attributes["gen_ai.response.finish_reasons"] == ["error"]
    assert receiver.names() == ("chat fake", [BEFORE, *PHASES, "respond"])


@pytest.mark.parametrize("stream", [True, pytest.param(False, marks=SLOW)])
async def test_a_request_whose_client_leaves_has_a_whole_trace(
    stream: bool, receiver: Receiver, tmp_path: Path
) -> None:
    core = FakeCore()
    core.hold.set()
    async with traced_server(tmp_path, core, receiver=receiver) as server:
        async with httpx.AsyncClient(base_url=server.url) as client:
            task = asyncio.create_task(
                client.post(CHAT, json={"messages": MESSAGES, "stream": stream}, headers=HEADERS)
            )
            await until(lambda: core.active)
            core.allow(2)
            await until(lambda: core.steps == 2)
            task.cancel()
        await until(lambda: not core.active)
    receiver.check()
    root, _ = receiver.tree()
    assert (root.status, root.attributes["error.type"]) == ("unset", "client_disconnected")
    assert root.attributes["gen_ai.response.finish_reasons"] == ["abort"]
    assert receiver.names() == ("chat fake", [BEFORE, *PHASES, "respond"])


async def test_a_response_in_the_background_is_a_part_of_the_trace_of_its_request(
    receiver: Receiver, tmp_path: Path
) -> None:
    core = FakeCore()
    core.hold.set()
    async with traced_server(tmp_path, core, receiver=receiver) as server:
        answer = await server.post("/v1/responses", {"input": "Once", "background": True}, headers=HEADERS)
        core.hold.clear()
        path = f"/v1/responses/{answer.json()['id']}"
        async with asyncio.timeout(60):
            while (await server.http.get(path)).json()["status"] != "completed":
                await asyncio.sleep(0.05)
    spans = [span for span in receiver.spans if span.trace_id == TRACE]
    (request,) = (span for span in spans if span.kind == "server")
    (late,) = (span for span in spans if span.parent_id == request.span_id and span.name.startswith("chat"))
    assert {span.name for span in spans if span.parent_id == late.span_id} == set(PHASES)


async def test_what_the_client_does_not_sample_is_not_exported_but_has_ids(receiver: Receiver, tmp_path: Path) -> None:
    core = FakeCore()
    async with traced_server(tmp_path, core, receiver=receiver) as server:
        headers = {"traceparent": f"00-{TRACE}-{SPAN}-00"}
        assert (await server.post(CHAT, {"messages": MESSAGES}, headers=headers)).status_code == 200
    assert receiver.spans == []
    assert [message.trace for message in core.received if isinstance(message, AddRequest)] == [None]


async def test_probes_and_metrics_and_the_page_are_not_traced(receiver: Receiver, tmp_path: Path) -> None:
    async with traced_server(tmp_path, receiver=receiver) as server:
        for path in ("/health", "/metrics", "/load", "/", "/page/page.js"):
            await server.http.get(path, headers=HEADERS)
    assert receiver.spans == []


async def test_a_collector_may_speak_http(tmp_path: Path) -> None:
    with http_receiver() as receiver:
        async with traced_server(tmp_path, receiver=receiver) as server:
            await server.post(CHAT, {"messages": MESSAGES}, headers=HEADERS)
        receiver.check()
        assert receiver.names() == ("chat fake", [BEFORE, *PHASES, "respond"])


async def test_the_variables_of_the_sdk_set_its_sampler_and_the_service(
    receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test,service.version=7")
    async with traced_server(tmp_path, receiver=receiver) as server:
        await server.post(CHAT, {"messages": MESSAGES})
        await server.post(CHAT, {"messages": MESSAGES}, headers=HEADERS)
    root, _ = receiver.tree()
    assert root.parent_id == SPAN
    assert root.service["service.name"] == "mine"
    assert root.service["service.version"] == "7"
    assert root.service["deployment.environment.name"] == "test"
