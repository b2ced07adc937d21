"""`quire bench accuracy` against Quire, and against servers that answer as others do."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

from quire.app.bench.accuracy import run
from quire.app.bench.comparison import divergence
from quire.config.command import ConfigError
from quire.config.commands import BenchAccuracy
from tests.support.models import make_model
from tests.support.process import serving, tiny_model

TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind. " * 5
ALPHABET = sorted(set(TEXT))
Answer = Callable[[str, dict[str, Any]], dict[str, Any] | None]


def logprobs(tokens: Sequence[int], place: int, sharpness: float) -> dict[int, float]:
    """What a model of letters says at a place: the letter before and the next one in the alphabet are more probable."""
    weights = dict.fromkeys(range(len(ALPHABET)), 0.0)
    weights[(tokens[place - 1] + 1) % len(ALPHABET)] += sharpness
    weights[tokens[place]] += sharpness / 2
    total = math.log(sum(math.exp(weight) for weight in weights.values()))
    return {token: weight - total for token, weight in weights.items()}


def most_probable(entries: dict[int, float], count: int) -> dict[int, float]:
    return dict(sorted(entries.items(), key=lambda pair: -pair[1])[:count])


def letters(body: dict[str, Any], *, pairs: bool) -> dict[str, Any]:
    """Tokens of letters; `pairs`: of two letters each."""
    text = body.get("prompt", body.get("content"))
    return {"tokens": [ALPHABET.index(letter) for letter in text][:: 2 if pairs else 1]}


def vllm(sharpness: float, *, pairs: bool = False) -> Answer:
    """A server with `prompt_logprobs`."""

    def answer(path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        if path == "/tokenize":
            return letters(body, pairs=pairs)
        if path == "/detokenize":
            return {"prompt": "".join(ALPHABET[token] for token in body["tokens"])}
        tokens = body["prompt"]
        entries: list[Any] = [None]
        for place in range(1, len(tokens)):
            entry = logprobs(tokens, place, sharpness)
            top = {tokens[place]: entry[tokens[place]], **most_probable(entry, body["prompt_logprobs"])}
            entries.append({str(token): {"logprob": value} for token, value in top.items()})
        return {"choices": [{"text": "", "prompt_logprobs": entries}]}

    return answer


def openai(sharpness: float, *, ids: bool = True) -> Answer:
    """A server with `echo` that does not know `prompt_logprobs`."""

    def answer(path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        if path != "/v1/completions":
            return vllm(sharpness)(path, body)
        if not body.get("echo"):
            return {"choices": [{"text": ""}]}
        tokens = body["prompt"]
        places = [logprobs(tokens, place, sharpness) for place in range(1, len(tokens))]
        name = (lambda token: f"token_id:{token}") if ids else (lambda token: ALPHABET[token])
        return {
            "choices": [
                {
                    "logprobs": {
                        "token_logprobs": [
                            None,
                            *(entry[token] for entry, token in zip(places, tokens[1:], strict=True)),
                            -1.0,
                        ],
                        "top_logprobs": [
                            None,
                            *(
                                {name(token): value for token, value in most_probable(entry, body["logprobs"]).items()}
                                for entry in places
                            ),
                            {},
                        ],
                    }
                }
            ]
        }

    return answer


def llama(sharpness: float) -> Answer:
    """llama-server, of which only the next token's probabilities are known."""

    def answer(path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        if path == "/tokenize":
            return letters(body, pairs=False)
        if path == "/detokenize":
            return {"content": "".join(ALPHABET[token] for token in body["tokens"])}
        if path != "/completion":
            return None
        tokens = body["prompt"]
        following = ALPHABET.index(TEXT[len(tokens)])  # the text is read from its start in one window
        top = most_probable(logprobs([*tokens, following], len(tokens), sharpness), min(body["n_probs"], 7))
        if body["n_probs"] > 1000:
            top = logprobs([*tokens, following], len(tokens), sharpness)
        entries = [{"id": token, "logprob": value} for token, value in top.items()]
        return {"content": "", "completion_probabilities": [{"id": 0, "top_logprobs": entries}]}

    return answer


@contextmanager
def answering(answer: Answer, **card: Any) -> Iterator[str]:
    """Run a server, and yield its URL. `card`: of its model."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.reply({"data": [{"id": "letters", **card}]})

        def do_POST(self) -> None:
            self.reply(answer(self.path, json.loads(self.rfile.read(int(self.headers["content-length"])))))

        def reply(self, content: dict[str, Any] | None) -> None:
            data = json.dumps(content or {"error": {"message": "not supported here"}}).encode()
            self.send_response(400 if content is None else 200)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "fox.txt"
    path.write_text(TEXT)
    return path


def accuracy(
    tmp_path: Path, text: Path, *runs: str, flags: Sequence[str] = (), status: int = 0
) -> list[dict[str, Any]]:
    """The figures of runs."""
    result = tmp_path / "result.json"
    words = [word for name in runs for word in ("--run", name)]
    assert run(BenchAccuracy.parse([str(text), *words, "--result", str(result), *flags])) == status
    rows: list[dict[str, Any]] = json.loads(result.read_text())["runs"]
    return rows


def test_figures_of_quire_are_those_of_the_model(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also in windows, of which each scores only what the one before has not."""
    model = make_model("llama").float().eval()
    with serving(str(tiny_model(tmp_path / "tiny")), "--dtype", "float32") as server:
        names = [server.url, f"{server.url}/v1"]
        flags = ["--window", "64", "--stride", "40"]
        before, after = accuracy(tmp_path, text, *names, flags=flags)
        with server.http as client:
            tokens = torch.tensor(client.post("/tokenize", json={"prompt": TEXT}).json()["tokens"])
    losses: list[float] = []
    scored = 1
    for start in range(0, len(tokens), 40):
        window = tokens[start : start + 64]
        with torch.no_grad():
            predicted = model(window[None]).logits[0].double().log_softmax(-1)
        losses += [-predicted[i - start - 1, tokens[i]].item() for i in range(scored, start + len(window))]
        scored = start + len(window)
        if scored == len(tokens):
            break
    assert len(losses) == before["tokens"] == len(tokens) - 1
    assert before["perplexity"] == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-4)
    assert before["bits_per_byte"] == pytest.approx(sum(losses) / len(losses) / math.log(2), rel=1e-4)
    assert (after["difference_percent"], after["top1_agreement"]) == (0, 1)
    assert after["kl_lower_bound"] == pytest.approx(0, abs=1e-9)
    assert "+0.00 ± 0.00 %" in capsys.readouterr().out


def test_servers_of_other_kinds_say_the_same(tmp_path: Path, text: Path) -> None:
    with (
        answering(vllm(2.0), max_model_len=2000) as first,
        answering(openai(2.0)) as second,
        answering(llama(2.0), owned_by="llamacpp", meta={"n_ctx": 2000}) as third,
    ):
        before, *others = accuracy(tmp_path, text, first, second, third)
    for row in others:
        assert row["perplexity"] == pytest.approx(before["perplexity"])
        assert row["difference_percent"] == pytest.approx(0, abs=1e-9)
        assert row["top1_agreement"] == 1
        assert row["kl_lower_bound"] == pytest.approx(0, abs=1e-9)


def test_a_model_that_predicts_worse(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "plot.svg"
    with answering(vllm(2.0)) as first, answering(vllm(1.5)) as second:
        before, after = accuracy(tmp_path, text, first, second, flags=["--plot", str(plot)])
    assert after["perplexity"] > before["perplexity"]
    assert after["difference_percent"] == pytest.approx(100 * (after["perplexity"] / before["perplexity"] - 1))
    assert 0 < after["standard_error_percent"] < after["difference_percent"]
    assert after["kl_lower_bound"] > 0.01
    assert "<svg" in plot.read_text()
    assert f"{after['difference_percent']:+.2f} ±" in capsys.readouterr().out


def test_other_tokens_are_compared_by_bytes_only(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(vllm(2.0)) as first, answering(vllm(2.0, pairs=True)) as second:
        _, after = accuracy(tmp_path, text, first, second)
    assert "difference_percent" not in after
    assert "top1_agreement" not in after
    assert after["bits_per_byte"] > 0
    assert "its tokenizer splits the texts into other tokens" in capsys.readouterr().out


def test_names_of_tokens_are_not_compared_with_ids(tmp_path: Path, text: Path) -> None:
    with answering(vllm(2.0)) as first, answering(openai(2.0, ids=False)) as second:
        _, after = accuracy(tmp_path, text, first, second)
    assert "gives ids of tokens" in after["not_compared"]
    assert after["difference_percent"] == pytest.approx(0, abs=1e-9)
    assert "top1_agreement" not in after


def test_a_server_that_fails_leaves_the_others(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def without(path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        return vllm(2.0)(path, body) if path != "/v1/completions" else None

    with answering(vllm(2.0)) as first, answering(without) as second, answering(vllm(2.0), max_model_len=64) as third:
        before, after, small, last = accuracy(tmp_path, text, first, second, third, f"{first} letters", status=1)
    assert before["perplexity"] == last["perplexity"]
    assert "gives no log probabilities of prompts" in after["error"]
    assert "not supported here" in after["error"]
    assert "--window may be 63" in small["error"]
    assert "failed" in capsys.readouterr().out


def test_refusals(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = tmp_path / "short.txt"
    short.write_text(TEXT[:50])
    with answering(vllm(2.0)) as url:
        assert run(BenchAccuracy.parse([str(short), "--run", url])) == 1
        assert "short.txt is too short: it has 50 tokens" in capsys.readouterr().err
        assert run(BenchAccuracy.parse([str(text), "--run", f"{url} other"])) == 1
        assert "has the models letters, but not other" in capsys.readouterr().err
    for flags, reason in (
        ([], "--run is missing"),
        (["--run", "model 'x"], "not a valid shell command line"),
        (["--run", " "], "not an empty string"),
        (["--run", "http://x/v1 model --dtype float32"], "and nothing else"),
        (["--run", "model", "--window", "64", "--stride", "64"], "must be below --window"),
        (["--run", "model", "--plot", str(tmp_path / "plot.doc")], "plots are written as"),
        (["--run", "model", str(tmp_path / "nothing.txt")], "TEXTS expects readable files"),
    ):
        with pytest.raises(ConfigError, match=reason):
            run(BenchAccuracy.parse(flags))


def test_the_divergence_is_a_lower_bound() -> None:
    before, after = (torch.randn(50, generator=torch.Generator().manual_seed(seed)).double() for seed in (1, 2))
    first, second = (values.log_softmax(-1) for values in (before, after))
    exact = (first.exp() * (first - second)).sum().item()
    bounds = []
    for count in (1, 5, 20, 50):
        tops = [{int(i): float(values[i]) for i in values.topk(count).indices} for values in (first, second)]
        bounds.append(divergence(tops[0], tops[1]))
    assert all(0 <= bound <= exact + 1e-9 for bound in bounds)
    assert bounds[-1] == pytest.approx(exact)


@pytest.mark.slow
def test_models_that_the_command_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The bundled text, and a model that does not exist."""
    folder = tiny_model(tmp_path / "tiny", max_position_embeddings=2048)
    runs = [str(folder), f"{folder} --dtype bfloat16", str(tmp_path / "nothing")]
    words = [word for name in runs for word in ("--run", name)]
    assert run(BenchAccuracy.parse([*words, "--window", "512", "--stride", "256"])) == 1
    said = capsys.readouterr().out
    assert "tiny --dtype bfloat16" in said
    assert "nothing: `quire serve` ended" in said
