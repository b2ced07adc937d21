"""What an observer of an engine learns of the HTTP request for which the engine runs one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from quire.engine.client.records import Observer, RequestRecord
from quire.engine.client.trace_context import TraceContext
from tests.support.fake_core import INFO, FakeCore
from tests.support.pooling import pooling_info
from tests.support.server import running_server, until

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
MESSAGES = [{"role": "user", "content": "Once"}]


class Records(Observer):
    def __init__(self) -> None:
        self.records: list[RequestRecord] = []

    @override
    def on_finish(self, record: RequestRecord) -> None:
        self.records.append(record)


@pytest.mark.parametrize(
    ("path", "body", "records"),
    [
        ("/v1/completions", {"prompt": ["a", "b"], "n": 2}, 4),
        ("/v1/chat/completions", {"messages": MESSAGES, "stream": True}, 1),
        ("/v1/responses", {"input": "Once"}, 1),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 5}, 1),
        ("/v1/embeddings", {"input": ["a", "b", "c"]}, 3),
    ],
)
async def test_records_have_the_ids_and_the_trace_of_their_request(
    path: str, body: dict[str, Any], records: int, tmp_path: Path
) -> None:
    async with running_server(tmp_path, FakeCore(), FakeCore(info=pooling_info(INFO))) as server:
        observer = Records()
        for model in server.state.models:
            model.client.observers.add(observer)
        answer = await server.post(path, body, headers={"x-request-id": "mine", "traceparent": PARENT})
        assert answer.status_code == 200, answer.text
        await until(lambda: len(observer.records) == records)
        for record in observer.records:
            assert (record.origin.request_id, record.origin.client_span) == ("mine", TraceContext.parse(PARENT))
            assert 0.0 < record.times.arrived <= record.times.rendered <= record.times.queued <= record.times.sent
        assert len({record.request_id for record in observer.records}) == records


@pytest.mark.parametrize(
    "headers", [{}, {"traceparent": "x" * 200}, [("traceparent", PARENT), ("traceparent", PARENT)]]
)
async def test_a_request_without_a_usable_trace_has_none(headers: Any, tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        server.state.models[0].client.observers.add(observer := Records())
        answer = await server.post("/v1/completions", {"prompt": "a"}, headers=headers)
        await until(lambda: observer.records)
        (record,) = observer.records
        assert record.origin.client_span is None
        assert record.origin.request_id == answer.headers["x-request-id"]
