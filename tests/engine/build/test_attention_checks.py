"""--attention-backend for models that the library does not run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.config.options import EngineOptions, ModelOptions
from quire.engine.build.attention_checks import with_attention_backend
from quire.engine.build.core_config import CoreConfig
from quire.engine.models.model_config import read_model_config
from tests.support.ctc import make_ctc, save_ctc
from tests.support.encoders import tiny_embedder
from tests.support.streaming_models import make_streaming_model, save_streaming_model
from tests.support.transducer_models import make_transducer, save_transducer
from tests.support.triton_device import InterpretedDevice
from tests.support.whisper import make_whisper, save_whisper

OTHER_KINDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "embedder": (tiny_embedder, "it has no KV cache"),
    "ctc": (lambda folder: save_ctc(make_ctc("wav2vec2"), folder), "it has no KV cache"),
    "transducer": (lambda folder: save_transducer(make_transducer(), folder), "it has no KV cache"),
    "whisper": (lambda folder: save_whisper(make_whisper(), folder), "the library has no cross-attention"),
    "voxtral": (lambda folder: save_streaming_model(make_streaming_model(), folder), "audio arrives while it"),
}


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_models_of_other_kinds_can_be_served_beside_a_decoder(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Their own attention runs them, with any options and without the library."""
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    save_kind, reason = OTHER_KINDS[kind]
    (folder := tmp_path / kind).mkdir()
    save_kind(folder)
    options = EngineOptions(attention_backend="flash_attn", block_size=16, kv_cache_dtype="int8")
    config = CoreConfig(folder=folder, model_config=read_model_config(folder), model=ModelOptions(), engine=options)
    used = with_attention_backend(config, InterpretedDevice())
    assert used.engine == options.model_copy(update={"attention_backend": "auto"})
    assert f"--attention-backend flash_attn has no effect for {kind}: {reason}" in caplog.text
