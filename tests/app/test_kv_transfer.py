"""`quire serve --kv-transfer-config`: two servers share the work as llm-d's sidecar divides it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.process import ServerProcess, eventually, failing, serving, tiny_model

PROMPT = "You answer in one word. " * 20 + "Why?"
MESSAGES = [{"role": "system", "content": "You answer in one word. " * 20}, {"role": "user", "content": "Why?"}]
_EMPTY = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")


def config(role: str, **fields: Any) -> str:
    return json.dumps({"kv_connector": "NixlConnector", "kv_role": role, "kv_port": 0, **fields})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), max_position_embeddings=1024, num_hidden_layers=2)


@dataclass
class Proxy:
    """Send a request to a prefiller first, then to a decoder, in the order and with the fields of llm-d's sidecar."""

    prefiller: ServerProcess
    decoder: ServerProcess

    def prefill(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return what the decoder gets to know."""
        params = {"do_remote_decode": True, "do_remote_prefill": False, **dict.fromkeys(_EMPTY)}
        sent = {**body, "kv_transfer_params": params, "stream": False, "max_tokens": 1}
        sent.pop("stream_options", None)
        if "messages" in body:
            sent["max_completion_tokens"] = 1
        answer = post(self.prefiller, path, sent)
        assert answer.status_code == 200, answer.text
        kept: dict[str, Any] = answer.json()["kv_transfer_params"]
        return kept

    def answer(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return post(self.decoder, path, {**body, "kv_transfer_params": self.prefill(path, body)})


def post(server: ServerProcess, path: str, body: dict[str, Any]) -> httpx.Response:
    with server.http as client:
        return client.post(path, json=body)


@contextmanager
def servers(model: Path, *more: str, **fields: Any) -> Iterator[Proxy]:
    options = (str(model), "--dtype", "float32", "--kv-cache-memory-bytes", "16MiB", *more)
    with ExitStack() as stack:
        prefiller = stack.enter_context(serving(*options, "--kv-transfer-config", config("kv_producer", **fields)))
        decoder = stack.enter_context(serving(*options, "--kv-transfer-config", config("kv_consumer", **fields)))
        yield Proxy(prefiller, decoder)


def test_answers_are_those_of_one_server(model: Path) -> None:
    completion = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    chat = {"messages": MESSAGES, "max_tokens": 12, "temperature": 0}
    with servers(model) as proxy:
        alone = post(proxy.prefiller, "/v1/completions", completion).json()
        assert alone["kv_transfer_params"] is None
        both = proxy.answer("/v1/completions", completion).json()
        assert both["choices"][0]["text"] == alone["choices"][0]["text"]
        assert both["usage"]["prompt_tokens_details"]["cached_tokens"] == 480  # of 484
        assert both["kv_transfer_params"] is None
        told = post(proxy.prefiller, "/v1/chat/completions", chat).json()["choices"][0]["message"]["content"]
        stream = proxy.answer("/v1/chat/completions", {**chat, "stream": True})
        chunks = [json.loads(line[6:]) for line in stream.text.splitlines() if line.startswith("data: {")]
        assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == told
        eventually(lambda: proxy.prefiller.metric("kv_transfer_held_blocks") == 0)
        assert proxy.decoder.metric("nixl_xfer_time_seconds_count") == 2
        assert proxy.decoder.metric("nixl_bytes_transferred_sum") > 480 * 512
        assert proxy.decoder.metric("nixl_num_failed_transfers_total") == 0
        assert proxy.decoder.metric("external_prefix_cache_hits_total") > 900
        sampling = {"max_tokens": 12, "temperature": 0}
        tokens = {"token_ids": list(range(3, 103)), "sampling_params": sampling}
        kept = post(
            proxy.prefiller,
            "/inference/v1/generate",
            {**tokens, "sampling_params": {"max_tokens": 1}, "kv_transfer_params": {"do_remote_decode": True}},
        ).json()["kv_transfer_params"]
        answer = post(proxy.decoder, "/inference/v1/generate", {**tokens, "kv_transfer_params": kept}).json()
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 96
        assert answer["choices"] == post(proxy.prefiller, "/inference/v1/generate", tokens).json()["choices"]
        check_death_of_prefiller(proxy, {**completion, "cache_salt": "new"}, recomputes=False)


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
