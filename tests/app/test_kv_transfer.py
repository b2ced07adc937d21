"""`quire serve --kv-transfer-config`: two servers share the work as llm-d's sidecar divides it."""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx
import psutil
import pytest

from tests.support.patience import PATIENCE
from tests.support.process import (
    ServerProcess,
    assert_all_have_ended,
    cores_and_ranks,
    eventually,
    failing,
    serving,
    tiny_model,
)
from tests.support.sidecar import Sidecar

ROLES = ("kv_producer", "kv_consumer")
PROMPT = "You answer in one word. " * 20 + "Why?"
MESSAGES = [{"role": "system", "content": "You answer in one word. " * 20}, {"role": "user", "content": "Why?"}]


def config(role: str, **fields: Any) -> str:
    return json.dumps({"kv_connector": "NixlConnector", "kv_role": role, "kv_port": 0, **fields})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), max_position_embeddings=1024, num_hidden_layers=2)


@dataclass
class Proxy:
    """Two servers, and llm-d's sidecar before the second."""

    prefiller: ServerProcess
    decoder: ServerProcess
    sidecar: Sidecar

    def prefill(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return what the decoder gets to know."""
        answer = self.sidecar.prefill(path, body)
        assert answer.status_code == 200, answer.text
        kept: dict[str, Any] = answer.json()["kv_transfer_params"]
        return kept


def post(server: ServerProcess, path: str, body: dict[str, Any]) -> httpx.Response:
    with server.http as client:
        return client.post(path, json=body)


@contextmanager
def servers(model: Path, *more: str, **fields: Any) -> Iterator[Proxy]:
    options = (str(model), "--dtype", "float32", "--kv-cache-memory-bytes", "16MiB", *more)
    with ExitStack() as stack:
        prefiller = stack.enter_context(serving(*options, "--kv-transfer-config", config("kv_producer", **fields)))
        decoder = stack.enter_context(serving(*options, "--kv-transfer-config", config("kv_consumer", **fields)))
        clients = [stack.enter_context(server.http) for server in (prefiller, decoder)]
        yield Proxy(prefiller, decoder, Sidecar(clients[0], clients[1]))


def test_answers_are_those_of_one_server(model: Path) -> None:
    completion = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    chat = {"messages": MESSAGES, "max_tokens": 12, "temperature": 0}
    with servers(model) as proxy:
        alone = post(proxy.prefiller, "/v1/completions", completion).json()
        assert alone["kv_transfer_params"] is None
        both = proxy.sidecar.post("/v1/completions", completion).json()
        assert both["choices"][0]["text"] == alone["choices"][0]["text"]
        assert both["usage"]["prompt_tokens_details"]["cached_tokens"] == 480  # of 484, at the prefiller
        assert both["kv_transfer_params"] is None
        assert proxy.decoder.metric("external_prefix_cache_hits_total") == 480
        told = post(proxy.prefiller, "/v1/chat/completions", chat).json()["choices"][0]["message"]["content"]
        stream = proxy.sidecar.post("/v1/chat/completions", {**chat, "stream": True})
        chunks = [json.loads(line[6:]) for line in stream.text.splitlines() if line.startswith("data: {")]
        assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == told
        eventually(lambda: proxy.prefiller.metric("kv_transfer_held_blocks") == 0)
        assert proxy.decoder.metric("nixl_xfer_time_seconds_count") == 2
        assert proxy.decoder.metric("nixl_bytes_transferred_sum") > 480 * 512
        assert proxy.decoder.metric("nixl_num_failed_transfers_total") == 0
        assert proxy.decoder.metric("external_prefix_cache_hits_total") > 900
        check_other_calls_of_the_sidecar(proxy)
        check_death_of_prefiller(proxy, {**completion, "cache_salt": "new"}, recomputes=False)


def check_other_calls_of_the_sidecar(proxy: Proxy) -> None:
    """Tokens instead of text, no limit, an id of the client, tokens some at a time, APIs without transfers, errors."""
    sidecar, loaded = proxy.sidecar, proxy.decoder.metric("external_prefix_cache_hits_total")
    tokens: dict[str, Any] = {"token_ids": list(range(3, 103)), "sampling_params": {"max_tokens": 12, "temperature": 0}}
    answer = sidecar.post("/inference/v1/generate", tokens, {"x-request-id": "mine"}).json()
    assert answer["choices"] == post(proxy.prefiller, "/inference/v1/generate", tokens).json()["choices"]
    assert proxy.decoder.metric("external_prefix_cache_hits_total") == loaded + 96
    chat = {"messages": [*MESSAGES, {"role": "user", "content": "And?"}], "max_completion_tokens": 11, "temperature": 0}
    sidecar.chunk_size = 4  # the text of random tokens is not read as the same tokens again, so it is not compared
    assert sidecar.post("/v1/chat/completions", {**chat, "min_tokens": 3, "ignore_eos": True}).status_code == 200
    sidecar.chunk_size = 0
    assert [server for server, _ in sidecar.calls[-4:]] == ["prefiller", "decoder", "decoder", "decoder"]
    message = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 5, "temperature": 0}
    loaded = proxy.decoder.metric("external_prefix_cache_hits_total")
    answer = sidecar.post("/v1/messages", message).json()
    assert answer["content"] == post(proxy.prefiller, "/v1/messages", message).json()["content"]
    assert "kv_transfer_params" not in answer
    assert proxy.decoder.metric("external_prefix_cache_hits_total") > loaded + 400
    response = {"input": PROMPT, "max_output_tokens": 5, "temperature": 0}
    loaded = proxy.decoder.metric("external_prefix_cache_hits_total")
    answer = sidecar.post("/v1/responses", {**response, "instructions": "Do it."}).json()
    alone = post(proxy.prefiller, "/v1/responses", {**response, "instructions": "Do it."}).json()
    assert answer["output"][0]["content"] == alone["output"][0]["content"]
    assert "kv_transfer_params" not in answer
    assert proxy.decoder.metric("external_prefix_cache_hits_total") > loaded + 400
    for field, value in (
        ("background", True),
        ("tools", [{"type": "mcp", "server_label": "one", "server_url": "http://one", "require_approval": "never"}]),
    ):
        refused = sidecar.post("/v1/responses", {**response, field: value})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == field
    refused = sidecar.post("/v1/completions", {"prompt": PROMPT, "n": 2, "temperature": 1})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "n"
    eventually(lambda: proxy.prefiller.metric("kv_transfer_held_blocks") == 0)


def check_death_of_prefiller(proxy: Proxy, body: dict[str, Any], *, recomputes: bool) -> None:
    """Kill a prefiller whose blocks a decoder is to read."""
    kept = proxy.prefill("/v1/completions", body)
    proxy.prefiller.process.kill()
    proxy.prefiller.process.wait()
    answer = post(proxy.decoder, "/v1/completions", {**body, "kv_transfer_params": kept})
    if recomputes:
        assert answer.json()["choices"] == post(proxy.decoder, "/v1/completions", body).json()["choices"]
    else:
        assert answer.status_code == 503
        assert "Retry-After" in answer.headers
        assert answer.json()["error"]["message"].startswith("The KV blocks of the prompt could not be read")
    assert proxy.decoder.metric("nixl_num_failed_transfers_total") == 1
    assert proxy.decoder.metric("kv_cache_blocks_used") == 0
    assert post(proxy.decoder, "/v1/completions", body).status_code == 200


@pytest.mark.slow  # starts two servers
def test_prompts_of_a_dead_prefiller_are_computed_if_the_policy_says_so(model: Path) -> None:
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    with servers(model, kv_load_failure_policy="recompute") as proxy:
        check_death_of_prefiller(proxy, body, recomputes=True)


@pytest.mark.slow  # starts two servers
def test_the_death_of_a_decoder(model: Path) -> None:
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    with servers(model, kv_connector_extra_config={"abort_request_timeout": 5.0}) as proxy:
        proxy.prefill("/v1/completions", body)
        assert proxy.prefiller.metric("kv_transfer_held_blocks") == 30
        proxy.decoder.process.kill()
        eventually(lambda: proxy.prefiller.metric("kv_transfer_held_blocks") == 0)
        assert proxy.prefiller.metric("nixl_num_kv_expired_reqs_total") == 1
        assert proxy.prefiller.metric("kv_cache_blocks_used") == 0


@pytest.mark.slow  # starts two servers of two replicas
def test_replicas_listen_at_ports_of_their_own(model: Path) -> None:
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    with servers(model, "--data-parallel-size", "2") as proxy:
        expected = post(proxy.prefiller, "/v1/completions", body).json()["choices"]
        for salt in "abc":
            kept = proxy.prefill("/v1/completions", {**body, "cache_salt": salt})
            answer = post(proxy.decoder, "/v1/completions", {**body, "cache_salt": salt, "kv_transfer_params": kept})
            assert answer.json()["choices"] == expected
            assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 480


class Replaced:
    """A prefiller and a decoder, each of which is replaced by another process after it was killed."""

    def __init__(self, model: Path, policy: str) -> None:
        self._model = model
        self._fields = {"kv_load_failure_policy": policy, "kv_connector_extra_config": {"abort_request_timeout": 3.0}}
        self._stacks: dict[str, ExitStack] = {}
        self._kills: Counter[str] = Counter()
        self._both_run = threading.Condition()
        self.servers: dict[str, ServerProcess] = {}

    def __enter__(self) -> Self:
        for role in ROLES:
            self._start(role)
        return self

    def __exit__(self, *_: object) -> None:
        for stack in self._stacks.values():
            stack.close()

    def _start(self, role: str) -> None:
        stack = self._stacks[role] = ExitStack()
        flags = ("--kv-cache-memory-bytes", "16MiB", "--kv-transfer-config", config(role, **self._fields))
        server = stack.enter_context(serving(str(self._model), "--dtype", "float32", *flags))
        with self._both_run:
            self.servers[role] = server
            self._both_run.notify_all()

    def kill(self, role: str, *, only_engine: bool) -> None:
        """Kill a server, or the engine in it, and start another one."""
        with self._both_run:
            server = self.servers.pop(role)
            self._kills[role] += 1
        process = psutil.Process(server.process.pid)
        processes = [process, *process.children(recursive=True)]
        (cores_and_ranks(server)[0] if only_engine else process).kill()
        assert_all_have_ended(processes)
        self._stacks[role].close()
        self._start(role)

    def transfer(self, body: dict[str, Any]) -> httpx.Response | None:
        """Answer a request with both. None: it has failed, as it had to."""
        with self._both_run:
            assert self._both_run.wait_for(lambda: len(self.servers) == 2, PATIENCE)
            prefiller, decoder = (self.servers[role] for role in ROLES)
            before = Counter(self._kills)
        with prefiller.http as first, decoder.http as second:
            sidecar = Sidecar(first, second)
            try:
                answer = sidecar.post("/v1/completions", body)
                if answer.is_success:
                    return answer
                assert answer.status_code in (500, 503), answer.text
            except httpx.TransportError:
                pass
        is_prefilled = "decoder" in {server for server, _ in sidecar.calls}
        if not is_prefilled:
            excuses = {"kv_producer"}
        elif self._fields["kv_load_failure_policy"] == "recompute":
            excuses = {"kv_consumer"}
        else:
            excuses = {*ROLES}
        assert excuses & (self._kills - before).keys(), "a request has failed, although what it needs was not killed"
        return None


@pytest.mark.slow  # kills and starts servers for minutes
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_200_transfers_while_either_server_is_killed(model: Path, policy: str) -> None:
    """Four at a time. Servers, or the engines in them, are killed (SIGKILL) while transfers are under way."""
    choices = random.Random(0)
    bodies = [{"prompt": f"{index} {PROMPT}", "max_tokens": 40, "temperature": 0} for index in range(6)]
    outcomes: list[bool] = []
    with Replaced(model, policy) as servers, ThreadPoolExecutor(4) as pool:
        texts = [post(servers.servers["kv_producer"], "/v1/completions", body).json()["choices"] for body in bodies]

        def transfer(number: int) -> None:
            index = number % len(bodies)
            answer = servers.transfer({**bodies[index], "cache_salt": f"{number}"})
            assert answer is None or answer.json()["choices"] == texts[index]
            outcomes.append(answer is not None)

        for _ in range(16):
            begun = len(outcomes)
            transfers = [pool.submit(transfer, number) for number in range(begun, begun + 12)]
            eventually(lambda: len(outcomes) >= begun + 4 or all(each.done() for each in transfers), PATIENCE)  # noqa: B023
            servers.kill(choices.choice(ROLES), only_engine=choices.random() < 0.5)
            for each in transfers:
                each.result()
        for number in range(192, 200):
            transfer(number)
        assert outcomes[192:] == [True] * 8
        assert sum(outcomes) > 120
        for server in servers.servers.values():
            eventually(lambda: server.metric("kv_cache_blocks_used") == server.metric("kv_transfer_held_blocks") == 0)  # noqa: B023
            assert server.metric("num_requests_running") == server.metric("num_requests_waiting") == 0


def test_an_address_that_is_not_available(model: Path) -> None:
    value = json.dumps({"kv_connector": "QuireConnector", "kv_role": "kv_producer", "kv_ip": "192.0.2.1"})
    assert "192.0.2.1:14579 (kv_ip, kv_port) is not available" in failing(str(model), "--kv-transfer-config", value)


@pytest.mark.slow  # starts two servers
@pytest.mark.parametrize(
    "options", [("--no-enable-prefix-caching",), ("--tensor-parallel-size", "2")], ids=["no cache", "ranks"]
)
def test_engines_whose_blocks_are_not_sent(model: Path, options: tuple[str, ...]) -> None:
    output = failing(str(model), *options, "--kv-transfer-config", config("kv_both"))
    assert "--kv-transfer-config is not supported: " in output
