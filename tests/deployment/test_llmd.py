"""The writer of llm-d's endpoints file, and the patch for pods that publish KV events."""

from __future__ import annotations

import http.server
import json
import runpy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from quire.config.kv_events import KVEventsConfig
from tests.support.deployment import MANIFESTS, ROOT

WRITER: dict[str, Any] = runpy.run_path(str(ROOT / "deploy" / "llm-d" / "endpoints.py"))


@contextmanager
def answering(status: int) -> Iterator[str]:
    """The address of a server whose /ready has a status."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/ready" else 404)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def test_the_file_has_the_servers_that_are_ready(tmp_path: Path) -> None:
    file = tmp_path / "endpoints.yaml"
    with answering(200) as ready, answering(503) as draining:
        WRITER["main"]([str(file), ready, draining, "127.0.0.1:1"])
    (endpoint,) = yaml.safe_load(file.read_text())["endpoints"]
    assert f"{endpoint['address']}:{endpoint['port']}" == ready
    assert endpoint["labels"]["llm-d.ai/engine-type"] == "quire"
    assert isinstance(endpoint["port"], str)
    assert [path.name for path in tmp_path.iterdir()] == ["endpoints.yaml"]


@pytest.mark.parametrize("server", ["localhost:8000", "10.0.0.5", "[::1]:8000", "10.0.0.5:0", "10.0.0.5:99999"])
def test_other_addresses_than_the_picker_reads_are_refused(
    tmp_path: Path, server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        WRITER["main"]([str(tmp_path / "endpoints.yaml"), server])
    assert server in capsys.readouterr().err


def test_the_patch_has_settings_that_the_server_accepts() -> None:
    patch = yaml.safe_load((MANIFESTS / "optional" / "kv-events.yaml").read_text())
    (container,) = patch["spec"]["template"]["spec"]["containers"]
    arguments = container["args"]
    config = KVEventsConfig.model_validate(json.loads(arguments[arguments.index("--kv-events-config") + 1]))
    assert config.publishes
    assert config.topic.split("@") == ["kv", "$(POD_IP):8000", "MODEL"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert [f"tcp://*:{port}" for port in ports.values()] == [config.endpoint, config.replay_endpoint]
