"""KVEventsConfig: the value of --kv-events-config, with vLLM's names."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from quire.config.types import JsonObject, json_object_of

_TCP = re.compile(r"tcp://(?:[^\s/:]+|\[[0-9a-fA-F:.]+\]|::):\d{1,5}")


def _check_endpoint(value: str) -> str:
    is_tcp = _TCP.fullmatch(value) is not None and int(value.rpartition(":")[2]) < 1 << 16
    if not is_tcp and not (value.startswith("ipc://") and len(value) > len("ipc://")):
        raise ValueError("an endpoint is tcp://HOST:PORT, with * for all interfaces, or ipc://PATH")
    return value


Endpoint = Annotated[str, AfterValidator(_check_endpoint)]


class KVEventsConfig(BaseModel):
    """How the events of the prefix cache are published.

    Attributes:
        enable_kv_cache_events: they are.
        publisher: "null": they are not after all; None: "zmq" if they are enabled.
        endpoint: where the PUB socket binds, or connects if it names a host.
        replay_endpoint: where batches that a subscriber has missed can be asked for; None: nowhere.
        buffer_steps: most batches that are kept for that.
        hwm: most messages that wait for a subscriber; further ones are not sent to it.
        max_queue_size: most batches that wait for the publisher.
        topic: the first frame of each message.
        encoding: how an event is written: as a map with the key "type", or as an array, for old consumers. Not in vLLM.
        buffer_bytes: most bytes of the batches that are kept, and of those that wait. Not in vLLM.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    enable_kv_cache_events: bool = False
    publisher: Literal["null", "zmq"] | None = None
    endpoint: Endpoint = "tcp://*:5557"
    replay_endpoint: Endpoint | None = None
    buffer_steps: Annotated[int, Field(ge=1, le=10_000_000)] = 10_000
    hwm: Annotated[int, Field(ge=1, le=10_000_000)] = 4096
    max_queue_size: Annotated[int, Field(ge=1, le=10_000_000)] = 100_000
    topic: Annotated[str, Field(max_length=1024)] = ""
    encoding: Literal["map", "array"] = "map"
    buffer_bytes: Annotated[int, Field(ge=1 << 16, le=1 << 40)] = 64 << 20

    @property
    def publishes(self) -> bool:
        """Whether events are published."""
        return self.enable_kv_cache_events and self.publisher != "null"


KVEventsOption = Annotated[JsonObject, *json_object_of(KVEventsConfig)]
