"""`quire serve` as users run it: real processes, real models, real clients."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from tests.support.patience import PATIENCE
from tests.support.process import ServerProcess, cores_and_ranks, eventually, failing, free_port, serving, tiny_model

PROMPT = {"prompt": "abc", "max_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module", params=["thread", "process"])
def server(request: pytest.FixtureRequest, folder: Path) -> Iterator[ServerProcess]:
    flags = ["--engine-process"] if request.param == "process" else []
    with serving(str(folder), "--dtype", "float32", *flags) as running:
        yield running


def lines_of(answer: httpx.Response) -> list[str]:
    return [line.removeprefix("data: ") for line in answer.iter_lines() if line]


def test_the_start_up_line_says_all(server: ServerProcess) -> None:
    line = next(line for line in server.lines if "serves" in line)
    for word in ("tiny", "llama", "cpu", "float32 (--dtype)", "blocks of 16", "context 256", "kernels", server.url):
        assert word in line
    for word in ("attention Quire's own", "weights ", "prefix caching on", "--max-num-seqs can use", "engine in a "):
        assert word in line


def test_the_log_can_be_json(folder: Path) -> None:
    with serving(str(folder), "--log-format", "json") as server, server.http as client:
        client.post("/v1/completions", json=PROMPT, headers={"x-request-id": "mine"})
        eventually(lambda: "/v1/completions" in server.log)
        assert "Warning" not in server.log  # of a library, about what is Quire's matter
    lines = [json.loads(line) for line in server.lines]
    assert {"timestamp", "level", "logger", "message"} <= set.intersection(*(set(line) for line in lines))
    (start,) = (line for line in lines if "kv_cache" in line)
    assert (start["model"], start["prefix_caching"]) == ("tiny", "on")
    (access,) = (line for line in lines if line["logger"] == "quire.access")
    assert (access["request_id"], access["status"], access["output_tokens"]) == ("mine", 200, 12)


def test_the_openai_client_completes_and_streams(server: ServerProcess) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        assert client.models.list().data[0].id == "tiny"
        whole = client.completions.create(model="tiny", prompt="abc", max_tokens=12, temperature=0)
        stream = client.completions.create(model="tiny", prompt="abc", max_tokens=12, temperature=0, stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text
        chat = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=5, logprobs=True, top_logprobs=3
        )
        assert chat.usage is not None
        assert chat.usage.completion_tokens == 5
        assert chat.choices[0].logprobs is not None


def test_thread_and_process_and_batch_give_the_same_tokens(server: ServerProcess, folder: Path) -> None:
    """What one request gets alone, by the offline engine, many get at once, by either transport."""
    from tests.support.engine import Engine, greedy

    ids = httpx.post(f"{server.url}/tokenize", json={"prompt": "abc"}, timeout=PATIENCE).json()["tokens"]
    expected = Engine(folder).generate(ids, greedy(12)).tokens
    with server.http as client, client.stream("POST", "/v1/completions", json={**PROMPT, "n": 8, "stream": True}):
        body = client.post("/v1/completions", json={**PROMPT, "n": 4, "return_token_ids": True}).json()
    assert [choice["token_ids"] for choice in body["choices"]] == [expected] * 4


def test_the_same_seed_gives_the_same_text_in_a_crowd(server: ServerProcess) -> None:
    body = {"prompt": "xyz", "max_tokens": 20, "temperature": 1.3, "seed": 42, "ignore_eos": True}
    with server.http as client:
        alone = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
        crowd = {**body, "seed": None, "n": 10, "max_tokens": 60}
        other = threading.Thread(target=lambda: httpx.post(f"{server.url}/v1/completions", json=crowd, timeout=60))
        other.start()
        assert client.post("/v1/completions", json=body).json()["choices"][0]["text"] == alone
        other.join()


def test_clients_that_leave_hold_no_blocks(server: ServerProcess) -> None:
    with server.http as client:
        for _ in range(5):
            body = {**PROMPT, "max_tokens": 200, "stream": True, "n": 4}
            with client.stream("POST", "/v1/completions", json=body) as answer:
                next(answer.iter_lines())
        eventually(lambda: server.metric("kv_cache_blocks_used") == 0)
        eventually(lambda: server.metric("num_requests_running") == 0)
        eventually(lambda: client.get("/load").json() == {"server_load": 0})
        assert client.post("/v1/completions", json=PROMPT).status_code == 200


def kill_engine(server: ServerProcess) -> None:
    """Kill the engine's process, while a stream runs, which is told so."""
    body = {**PROMPT, "max_tokens": 240, "stream": True}
    with server.http as client, client.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        (engine,) = cores_and_ranks(server)
        engine.kill()
        events = [line.removeprefix("data: ") for line in lines if line]
    assert events[-1] == "[DONE]"
    assert "engine" in json.loads(events[-2])["error"]["message"]


def test_a_server_whose_engine_was_killed_ends_with_status_1(folder: Path) -> None:
    with serving(str(folder), "--engine-process") as server:
        kill_engine(server)
        assert server.process.wait(60) == 1
        eventually(lambda: "the server stops: The engine has stopped: its process ended with" in server.log)
        assert "Traceback" not in server.log


def test_an_engine_that_was_killed_is_restarted(folder: Path) -> None:
    with serving(str(folder), "--engine-process", "--on-engine-death", "restart") as server, server.http as client:
        before = client.post("/v1/completions", json=PROMPT).json()["choices"][0]["text"]
        kill_engine(server)
        red = client.get("/ready")
        assert red.status_code == 503
        assert "being restarted (attempt 1 of 5)" in red.json()["error"]["message"]
        assert client.post("/v1/completions", json=PROMPT).headers["retry-after"]
        eventually(lambda: client.get("/ready").status_code == 200, 60)
        assert client.post("/v1/completions", json=PROMPT).json()["choices"][0]["text"] == before
        assert server.metric("engine_restarts_total") == 1
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0


def test_an_engine_does_not_outlive_its_server(folder: Path) -> None:
    with serving(str(folder), "--engine-process") as server:
        children = psutil.Process(server.process.pid).children(recursive=True)
        assert children
        server.process.kill()
        server.process.wait()
        _, alive = psutil.wait_procs(children, timeout=60)
        assert not alive


def test_several_models_answer_by_name(folder: Path, tmp_path: Path) -> None:
    other = tiny_model(tmp_path / "other", "qwen3")
    with serving(str(folder), str(other), "--served-model-name", f"second={other}") as server, server.http as client:
        names = [card["id"] for card in client.get("/v1/models").json()["data"]]
        assert names == ["tiny", str(folder), "second"]
        texts = {
            name: client.post("/v1/completions", json={**PROMPT, "model": name}).json()["choices"][0]["text"]
            for name in names
        }
        assert texts["tiny"] == texts[str(folder)]
        assert texts["tiny"] != texts["second"]
        assert client.post("/v1/completions", json={**PROMPT, "model": "third"}).status_code == 404
        assert server.metric("generation_tokens_total") == 36


def test_a_model_that_cannot_be_loaded_is_explained_in_a_line(folder: Path, tmp_path: Path) -> None:
    broken = tiny_model(tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"short")
    said = failing(str(broken), "--port", "0")
    assert "cannot serve" in said
    assert "model.safetensors is not a safetensors file" in said
    assert "Traceback" not in said
    assert "--max-model-len is 9999" in failing(str(folder), "--port", "0", "--max-model-len", "9999")
    said = failing(str(folder), str(broken), "--served-model-name", f"second={broken}", "--port", "0")
    assert "cannot serve: second: The engine has stopped: " in said


def test_a_port_in_use_is_explained_before_a_model_is_looked_for() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = failing("no/such-model", "--port", str(port))
    assert said == f"quire: cannot listen at --host 127.0.0.1 --port {port}: Address already in use\n"


def test_a_socket_file_and_settings_of_vllm(folder: Path, tmp_path: Path) -> None:
    """As a container beside a proxy would start it."""
    path = tmp_path / "quire.sock"
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(path))
    overrides = ["--hf-overrides", '{"max_position_embeddings": 128}', "--override-generation-config", '{"top_k": 1}']
    with serving(str(folder), "--uds", str(path), "--swap-space", "4", *overrides) as server:
        assert "--swap-space 4 has no effect" in server.log
        assert "context 128" in server.log
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url="http://quire.test", timeout=60) as client:
            texts = {client.post("/v1/completions", json={"prompt": "abc"}).json()["choices"][0]["text"] for _ in "12"}
            assert len(texts) == 1  # as top_k is 1
        second = failing(str(folder), "--uds", str(path))
        assert second == f"quire: cannot listen at --uds {path}: Address already in use\n"
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
    assert not path.exists()


def test_overrides_that_are_no_sampling_defaults_are_refused() -> None:
    said = failing("no/such-model", "--port", "0", "--override-generation-config", '{"top_p": 5}')
    assert said.startswith("quire serve: --override-generation-config expects valid values: top_p: ")
    said = failing("no/such-model", "--port", "0", "--override-generation-config", '{"heat": 5}')
    assert "not 'heat'" in said


def test_of_two_starts_on_one_port_one_says_why_it_ends(folder: Path, tmp_path: Path) -> None:
    """Both may bind the port; it is taken once one of them listens."""
    unread = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}  # another process reads the config, which takes seconds
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))
        command = [sys.executable, "-m", "quire", "serve", str(folder), "--port", str(other.getsockname()[1])]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, env=unread, stdout=pipe, stderr=pipe, text=True) as process:
            eventually(lambda: psutil.Process(process.pid).children(), 60)  # far from ready
            other.listen()
            out, said = process.communicate(timeout=120)
    assert process.returncode == 1
    assert said.splitlines()[-1].endswith(": Address already in use")
    assert "Traceback" not in said + out


def test_standard_error_that_nobody_reads_does_not_stop_the_server(folder: Path) -> None:
    """The pipe is full after some dozen lines of the access log."""
    reading, writing = os.pipe()
    size = fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    port = free_port()
    command = [sys.executable, "-m", "quire", "serve", str(folder), "--port", str(port)]
    process = subprocess.Popen(command, stderr=writing)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            eventually(lambda: answers(client), 120)
            for _ in range(size // 40):
                assert client.get("/v1/models").status_code == 200
            assert client.post("/v1/completions", json=PROMPT).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(reading)
        os.close(writing)


def answers(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def test_a_name_with_two_addresses_is_served_at_both(folder: Path) -> None:
    addresses = {address[0] for *_, address in socket.getaddrinfo("localhost", 0, type=socket.SOCK_STREAM)}
    with serving(str(folder), "--host", "localhost") as server:
        port = httpx.URL(server.url).port
        assert "127.0.0.1" in addresses
        assert httpx.get(f"http://127.0.0.1:{port}/health", timeout=PATIENCE).status_code == 200
        if "::1" in addresses:
            assert httpx.get(f"http://[::1]:{port}/health", timeout=PATIENCE).status_code == 200


def test_a_pod_beside_a_service_of_the_same_name_starts_and_keeps_vllms_key(folder: Path) -> None:
    links = {
        "QUIRE_SERVICE_HOST": "10.96.0.12",
        "QUIRE_SERVICE_PORT_HTTP": "8000",
        "QUIRE_PORT": "tcp://10.96.0.12:8000",
        "QUIRE_PORT_8000_TCP_PROTO": "tcp",
    }
    with serving(str(folder), env={**links, "VLLM_API_KEY": "secret", "VLLM_SERVER_DEV_MODE": "1"}) as server:
        with server.http as http:
            assert http.get("/v1/models").status_code == 401
            assert http.get("/v1/models", headers={"authorization": "Bearer secret"}).status_code == 200
        assert "passed over 4 variables that Kubernetes made" in server.log
        assert "VLLM_API_KEY of vLLM is taken as --api-key" in server.log
        assert "WARNING quire: variables of vLLM that have no effect: VLLM_SERVER_DEV_MODE" in server.log
        assert "secret" not in server.log


def test_a_start_that_fails_with_a_store_in_memory_ends_in_order(tmp_path: Path) -> None:
    """The store is being checked when it is closed."""
    folder = tiny_model(tmp_path / "tiny")
    (folder / "model.safetensors").write_bytes(b"x" * 100)
    for _ in range(2):
        assert "cannot serve" in failing(str(folder), "--response-store", "sqlite://", "--port", "0")
