"""Transcription by the engine beside transformers, CTranslate2, which faster-whisper runs, and whisper.cpp.

python -m benchmarks.speech --size tiny --out benchmarks/results/FILE.json

Weights are random, files are 30 s of noise and become --tokens tokens each. Rounds alternate between all; a result is
the fastest round. CTranslate2 (package ctranslate2) and whisper.cpp (package pywhispercpp) are left out where they are
not installed, and a peer that fails is reported by its error. transformers runs as `generate` on all files at once, and
as pipeline with each of --pipeline-batches as batch size, of which the report names the fastest. The pipeline and
whisper.cpp compute features from samples, and so does Quire in one run; features are given to all others. Files are not
decoded, and Quire makes no texts.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from benchmarks.cpu.limits import Limits
from benchmarks.cpu.steps import RecordingChannel
from benchmarks.pipeline import pipeline_run, write_processor
from benchmarks.whisper_cpp import whisper_cpp_run, write_model
from quire.config.options import EngineOptions, ModelOptions
from quire.engine.build.core_config import CoreConfig
from quire.engine.build.engine import build_core
from quire.engine.client.protocol import AddRequest, AudioItem
from quire.engine.client.sampling_params import SamplingParams
from quire.engine.models.model_config import read_model_config
from quire.kernels import native
from quire.multimodal.audio.features import SAMPLE_RATE, log_mel

SECONDS = 30  # of audio in a file
SIZES = {"tiny": (384, 4, 6), "base": (512, 6, 8), "small": (768, 12, 12)}  # hidden size, layers, heads
_MELS, _COLUMNS, _POSITIONS, _VOCAB, _END, _PROMPT = 80, 3000, 1500, 51865, 50257, (50258, 50259, 50359, 50363)


@dataclass(frozen=True, slots=True)
class File:
    """Samples at 16 kHz, 1-D, and their features, of shape (80, 3000)."""

    samples: NDArray[np.float32]
    features: NDArray[np.float32]


Files = list[File]
Run = Callable[[Files], object]


def make_folder(folder: Path, size: str) -> Path:
    """Write a whisper of a size with random weights."""
    hidden, layers, heads = SIZES[size]
    torch.manual_seed(0)
    stacks = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in (
        ("layers", layers), ("attention_heads", heads), ("ffn_dim", 4 * hidden),
    )}  # fmt: skip
    config = transformers.WhisperConfig(
        vocab_size=_VOCAB, d_model=hidden, pad_token_id=_END, eos_token_id=_END, bos_token_id=_END, **stacks
    )
    model = transformers.WhisperForConditionalGeneration(config).to(torch.bfloat16)
    # Greedy decoding makes text only: no end, and no timestamps, after which transformers encodes a file's rest again.
    model.get_output_embeddings().weight.data[_END:] = 0.0
    model.generation_config = transformers.GenerationConfig(eos_token_id=_END, pad_token_id=_END, max_length=448)
    for name, value in {
        "no_timestamps_token_id": _PROMPT[-1],
        "decoder_start_token_id": _PROMPT[0],
        "is_multilingual": True,
        "lang_to_id": {"<|en|>": _PROMPT[1]},
        "task_to_id": {"transcribe": _PROMPT[2], "translate": _PROMPT[2] - 1},
    }.items():
        setattr(model.generation_config, name, value)
    model.save_pretrained(folder)
    write_processor(folder, _VOCAB)
    return folder


def make_files(count: int) -> Files:
    """Noise."""
    generator = np.random.default_rng(0)
    samples = [generator.normal(scale=0.1, size=SECONDS * SAMPLE_RATE).astype(np.float32) for _ in range(count)]
    return [File(sample, log_mel(sample, _MELS, SECONDS)) for sample in samples]


def encoder_operations(size: str) -> float:
    """Multiplications and additions of encoding one file."""
    hidden, layers, _ = SIZES[size]
    stem = _COLUMNS * 3 * _MELS * hidden + _POSITIONS * 3 * hidden * hidden
    layer = _POSITIONS * (4 + 8) * hidden * hidden + 2 * _POSITIONS * _POSITIONS * hidden
    return 2.0 * (stem + layers * layer)


class Quire:
    """The engine core; its steps are called directly. `from_samples`: features are computed, too."""

    def __init__(
        self,
        folder: Path,
        quantization: str,
        tokens: int,
        *,
        cache_dtype: Literal["auto", "int8"] = "auto",
        from_samples: bool = False,
    ) -> None:
        self._from_samples = from_samples
        self._channel = RecordingChannel()
        config = CoreConfig(
            folder=folder,
            model_config=read_model_config(folder),
            model=ModelOptions(quantization=quantization, dtype="bfloat16"),
            engine=EngineOptions(
                kv_cache_memory_bytes=3 << 30,
                kv_cache_dtype=cache_dtype,
                max_num_seqs=32,
                enable_prefix_caching=False,
            ),
        )
        self._core, _ = build_core(config, self._channel)  # type: ignore[arg-type]
        self._params = SamplingParams(max_tokens=tokens, temperature=0.0)

    def __call__(self, files: Files) -> None:
        """Transcribe files, which arrive together."""
        for index, file in enumerate(files):
            features = log_mel(file.samples, _MELS, SECONDS) if self._from_samples else file.features
            item = AudioItem(hash=hashlib.sha256(features.tobytes()).digest(), features=features)
            prompt = np.array(_PROMPT, np.int32)
            self._core._handle(AddRequest(str(index), prompt, self._params, items=(item,)))
        while self._core.has_work:
            self._core.step()


def transformers_run(folder: Path, dtype: torch.dtype, tokens: int) -> Run:
    """`generate` of transformers on all files in one batch."""
    model = transformers.WhisperForConditionalGeneration.from_pretrained(folder, dtype=dtype).eval()

    @torch.inference_mode()
    def run(files: Files) -> object:
        return transformers.GenerationMixin.generate(
            model,
            torch.from_numpy(np.stack([file.features for file in files])).to(dtype),
            decoder_input_ids=torch.tensor([_PROMPT] * len(files)),
            decoder_start_token_id=_PROMPT[0],
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
        )

    return run


def ctranslate2_run(folder: Path, compute_type: str, tokens: int, threads: int) -> Run:
    """`Whisper.generate` of CTranslate2 on all files in one batch."""
    import ctranslate2  # type: ignore[import-not-found]  # noqa: PLC0415 where it is installed
    from ctranslate2.converters.transformers import WhisperLoader  # type: ignore[import-not-found]  # noqa: PLC0415

    spec = WhisperLoader().get_model_spec(
        transformers.WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    )
    names = {_END: "<|endoftext|>", 50258: "<|startoftranscript|>", 50363: "<|notimestamps|>", 50362: "<|nospeech|>"}
    spec.register_vocabulary([names.get(token, f"token-{token}") for token in range(_VOCAB)])
    spec.config.suppress_ids, spec.config.suppress_ids_begin, spec.config.lang_ids = [], [], [50259]
    spec.config.alignment_heads = [[1, 1]]
    spec.validate()
    spec.optimize(quantization=compute_type)
    converted = folder / compute_type
    converted.mkdir()
    spec.save(str(converted))
    model = ctranslate2.models.Whisper(str(converted), compute_type=compute_type, intra_threads=threads)

    def run(files: Files) -> object:
        answers = model.generate(
            ctranslate2.StorageView.from_array(np.stack([file.features for file in files])),
            [list(_PROMPT)] * len(files),
            beam_size=1,
            max_length=2 * tokens,  # it counts half of a limit
            suppress_blank=False,
            suppress_tokens=[_END],
        )
        made = {len(answer.sequences_ids[0]) for answer in answers}
        assert all(abs(count - tokens) <= len(_PROMPT) for count in made), f"{made} tokens instead of {tokens}"
        return answers

    return run


def _pipelines(folder: Path, batches: Sequence[int], tokens: int) -> dict[str, Run]:
    """Runs of transformers' pipeline with each type and batch size."""
    return {
        f"transformers pipeline {name}, batch {batch}": _on_samples(pipeline_run(folder, dtype, tokens, batch))
        for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16))
        for batch in batches
    }


def _on_samples(run: Callable[[list[NDArray[np.float32]]], object]) -> Run:
    return lambda files: run([file.samples for file in files])


def seconds(run: Run, files: Files) -> float:
    """Seconds of a run."""
    started = time.perf_counter()
    run(files)
    return time.perf_counter() - started


def measure(runs: dict[str, Run], files: Files, rounds: int) -> tuple[dict[str, float], dict[str, str]]:
    """Run all in turn, and print each speed as soon as it is known, for runs take minutes.

    Returns:
        The fastest seconds of each run, and the error of each that failed; those are left out from then on.
    """
    times: dict[str, float] = {}
    errors: dict[str, str] = {}
    for _ in range(rounds):
        for name, run in runs.items():
            if name in errors:
                continue
            try:
                spent = seconds(run, files)
            except (RuntimeError, AssertionError) as error:
                errors[name] = str(error)
                times.pop(name, None)
                print(f"{name}: {error}", file=sys.stderr, flush=True)
                continue
            times[name] = min(spent, times.get(name, spent))
            print(f"{name}: {len(files) * SECONDS / spent:.1f} audio s/s", file=sys.stderr, flush=True)
    return times, errors


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="tiny", choices=SIZES)
    parser.add_argument("--files", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--pipeline-batches", type=int, nargs="+", default=[1, 4, 20])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    limits, tokens, threads = Limits.measured(), options.tokens, torch.get_num_threads()
    files = make_files(options.files)
    with tempfile.TemporaryDirectory() as directory:
        folder = make_folder(Path(directory), options.size)
        runs: dict[str, Run] = {
            "quire bfloat16": Quire(folder, "none", tokens),
            "quire int8": Quire(folder, "int8", tokens),
            "quire int8 with int8 KV cache": Quire(folder, "int8", tokens, cache_dtype="int8"),
            "quire bfloat16 from samples": Quire(folder, "none", tokens, from_samples=True),
            "transformers float32": transformers_run(folder, torch.float32, tokens),
            "transformers bfloat16": transformers_run(folder, torch.bfloat16, tokens),
        }
        pipelines = _pipelines(folder, options.pipeline_batches, tokens)
        runs |= pipelines
        if importlib.util.find_spec("ctranslate2") is not None:
            for compute_type in ("float32", "int8"):
                runs[f"ctranslate2 {compute_type}"] = ctranslate2_run(folder, compute_type, tokens, threads)
        if importlib.util.find_spec("_pywhispercpp") is not None:
            model = transformers.WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
            for file_type in ("float16", "q8_0"):
                write_model(folder / f"{file_type}.bin", model, file_type)
                run = whisper_cpp_run(folder / f"{file_type}.bin", tokens, threads)
                runs[f"whisper.cpp {file_type}"] = _on_samples(run)
        times, errors = measure(runs, files, options.rounds)
    speeds = {name: round(len(files) * SECONDS / spent, 1) for name, spent in times.items()}
    report: dict[str, Any] = {
        "date": date.today().isoformat(),
        "size": options.size,
        "files": len(files),
        "tokens": tokens,
        "threads": threads,
        "instructions": native.instructions(),
        "bfloat16_gflops": round(limits.operations / 1e9),
        "encoding_floor_s_per_file": round(encoder_operations(options.size) / limits.operations, 4),
        "audio_seconds_per_second": speeds,
        "fastest_pipeline": max((name for name in pipelines if name in speeds), key=speeds.__getitem__, default=None),
        "failed": errors,
    }
    print(json.dumps(report, indent=1))
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
