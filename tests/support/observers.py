"""Observers of engines."""

from __future__ import annotations

from typing_extensions import override

from quire.engine.client.records import Observer, RequestRecord


class Records(Observer):
    """Keeps the records of finished requests, as traces would."""

    def __init__(self) -> None:
        self.records: list[RequestRecord] = []

    @override
    def on_finish(self, record: RequestRecord) -> None:
        self.records.append(record)
