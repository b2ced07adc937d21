"""whisper.cpp as a peer of ``benchmarks.speech``: its model file, and runs of it by the package pywhispercpp."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import transformers
from numpy.typing import NDArray
from torch import Tensor

_MAGIC = 0x67676D6C  # "ggml"
_F32, _F16, _Q8_0 = 0, 1, 8  # ggml's tensor types
_FILE_TYPES = {"float16": 1, "q8_0": 7}
_GROUP = 32  # values that share a scale in Q8_0
_NAMES = (
    ("self_attn_layer_norm", "attn_ln"), ("encoder_attn_layer_norm", "cross_attn_ln"), ("final_layer_norm", "mlp_ln"),
    ("self_attn", "attn"), ("encoder_attn", "cross_attn"), ("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value"),
    ("out_proj", "out"), ("fc1", "mlp.0"), ("fc2", "mlp.2"), ("layers", "blocks"),
    ("embed_positions.weight", "positional_embedding"), ("embed_tokens", "token_embedding"),
    ("encoder.layer_norm", "encoder.ln_post"), ("decoder.layer_norm", "decoder.ln"),
)  # fmt: skip


def write_model(path: Path, model: transformers.WhisperForConditionalGeneration, file_type: str) -> None:
    """Write a whisper in whisper.cpp's format.

    Args:
        path: of the file to write.
        model: a whisper with at least 51,865 tokens, which whisper.cpp takes to be multilingual.
        file_type: "float16" or "q8_0", the type of the matrices.
    """
    config = model.config
    with path.open("wb") as file:
        file.write(struct.pack("<I", _MAGIC))
        file.write(
            struct.pack(
                "<11i",
                config.vocab_size,
                config.max_source_positions,
                config.d_model,
                config.encoder_attention_heads,
                config.encoder_layers,
                config.max_target_positions,
                config.d_model,
                config.decoder_attention_heads,
                config.decoder_layers,
                config.num_mel_bins,
                _FILE_TYPES[file_type],
            )
        )
        filters = transformers.WhisperFeatureExtractor(feature_size=config.num_mel_bins).mel_filters.T
        file.write(struct.pack("<2i", *filters.shape))
        file.write(np.ascontiguousarray(filters, np.float32).tobytes())
        file.write(struct.pack("<i", config.vocab_size))
        for token in range(config.vocab_size):
            text = b" %d" % token
            file.write(struct.pack("<i", len(text)) + text)
        for name, tensor in _tensors(model):
            _write_tensor(file, name, tensor.float().numpy(), file_type)


def _tensors(model: transformers.WhisperForConditionalGeneration) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in model.state_dict().items():
        if name == "proj_out.weight":  # tied with the embedding
            continue
        name = name.removeprefix("model.")
        for original, renaming in _NAMES:
            name = name.replace(original, renaming)
        yield name, tensor


def _write_tensor(file: BinaryIO, name: str, values: NDArray[np.float32], file_type: str) -> None:
    kind, data = _F32, values.tobytes()
    if name.startswith("encoder.conv") and name.endswith("bias"):
        values = values[:, None]
    elif values.ndim == 3 or (values.ndim == 2 and file_type == "float16" and "positional" not in name):
        kind, data = _F16, values.astype(np.float16).tobytes()
    elif values.ndim == 2 and "positional" not in name:
        kind, data = _Q8_0, _q8_0(values)
    header = struct.pack("<3i", values.ndim, len(name), kind)
    file.write(header + struct.pack(f"<{values.ndim}i", *values.shape[::-1]) + name.encode() + data)


def _q8_0(values: NDArray[np.float32]) -> bytes:
    """Groups of 32 values, each as a float16 scale and 32 bytes."""
    groups = values.reshape(-1, _GROUP)
    scales = np.abs(groups).max(axis=1, keepdims=True) / 127
    rounded = np.round(groups / np.maximum(scales, 1e-12)).astype(np.int8)
    both = np.empty(len(groups), np.dtype([("scale", np.float16), ("values", np.int8, _GROUP)]))
    both["scale"], both["values"] = scales[:, 0], rounded
    return both.tobytes()


def whisper_cpp_run(path: Path, tokens: int, threads: int) -> Callable[[list[NDArray[np.float32]]], None]:
    """Return a function that transcribes samples at 16 kHz, of which whisper.cpp computes features.

    The row of the end token in the embedding has to be 0, so that greedy decoding of random weights does not end early.

    Raises:
        RuntimeError: whisper.cpp made another number of tokens.
    """
    import _pywhispercpp as whisper  # type: ignore[import-not-found]  # noqa: PLC0415 where it is installed

    context = whisper.whisper_init_from_file_with_params(str(path), whisper.whisper_context_default_params())
    params = whisper.whisper_full_default_params(whisper.whisper_sampling_strategy.WHISPER_SAMPLING_GREEDY)
    params.n_threads, params.max_tokens, params.language = threads, tokens, "en"
    params.no_timestamps = params.single_segment = params.no_context = True
    params.print_progress = params.suppress_blank = False
    params.temperature_inc, params.no_speech_thold = 0.0, 1.0

    def run(files: list[NDArray[np.float32]]) -> None:
        for samples in files:
            if whisper.whisper_full(context, params, samples, len(samples)):
                raise RuntimeError("whisper.cpp failed")
            made = sum(
                whisper.whisper_full_n_tokens(context, index)
                for index in range(whisper.whisper_full_n_segments(context))
            )
            if abs(made - tokens) > 2:
                raise RuntimeError(f"whisper.cpp made {made} tokens, not {tokens}")

    return run
