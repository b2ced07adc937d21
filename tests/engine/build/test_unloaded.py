"""What a front end without an engine is told of a model is what an engine tells, though its weights are not there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from quire.config.options import EngineOptions, ModelOptions
from quire.engine.build.unloaded import info_of_unloaded
from quire.engine.client.model_info import Generates, ModelInfo, Pools
from quire.engine.models.config.pooling import PoolingOptions
from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.model_config import read_model_config
from tests.support.audio_models import KINDS, make_audio_model, save_audio_model
from tests.support.ctc import make_ctc, save_ctc
from tests.support.encoders import tiny_embedder
from tests.support.engine import Engine
from tests.support.fallback_composites import FALLBACKS as READ_BY_TRANSFORMERS
from tests.support.fallback_composites import make_fallback, save_fallback
from tests.support.hf_encoders import ENCODERS, make_encoder
from tests.support.models import DECODERS, FALLBACKS, make_model, save_model
from tests.support.moonshine import make_moonshine, save_moonshine
from tests.support.retrieval_models import (
    DUAL_ENCODERS,
    make_dual_encoder,
    make_late_interaction,
    save_dual_encoder,
    save_late_interaction,
)
from tests.support.streaming_models import make_streaming_model, save_streaming_model
from tests.support.transducer_models import make_transducer, save_transducer
from tests.support.variants import slow_but
from tests.support.vision_models import SEES, make_composite, save_seeing
from tests.support.whisper import make_whisper, save_whisper

Write = Callable[[Path], object]
MODELS: dict[str, Write] = {
    **{case: lambda folder, case=case: save_model(make_model(case), folder) for case in {**DECODERS, **FALLBACKS}},
    **{case: lambda folder, case=case: make_encoder(case).save_pretrained(folder) for case in ENCODERS},
    **{f"sees-{case}": lambda folder, case=case: save_seeing(make_composite(case), case, folder) for case in SEES},
    **{
        f"read-by-transformers-{case}": lambda folder, case=case: save_fallback(make_fallback(case), case, folder)
        for case in READ_BY_TRANSFORMERS
    },
    **{f"hears-{kind}": lambda folder, kind=kind: save_audio_model(make_audio_model(kind), folder) for kind in KINDS},
    **{
        kind: lambda folder, kind=kind: save_dual_encoder(make_dual_encoder(kind), kind, folder)
        for kind in DUAL_ENCODERS
    },
    **{
        f"late-{inner}": lambda folder, inner=inner: save_late_interaction(make_late_interaction(inner), inner, folder)
        for inner in ("paligemma", "qwen2_vl")
    },
    **{f"ctc-{kind}": lambda folder, kind=kind: save_ctc(make_ctc(kind), folder) for kind in ("wav2vec2", "parakeet")},
    "whisper": lambda folder: save_whisper(make_whisper(), folder),
    "moonshine": lambda folder: save_moonshine(make_moonshine(), folder),
    "streaming": lambda folder: save_streaming_model(make_streaming_model(), folder),
    "transducer": lambda folder: save_transducer(make_transducer(), folder),
}
# One of each kind.
QUICK = (
    *("llama", "bert", "sees-qwen2_5_vl", "hears-qwen2_audio", "clip", "late-paligemma", "ctc-wav2vec2", "whisper"),
    *("moonshine", "transducer", next(iter(FALLBACKS))),
)


@pytest.mark.parametrize("model", slow_but(MODELS, *QUICK))
def test_facts_without_weights(model: str, tmp_path: Path) -> None:
    """`Engine` compares what the engine tells with what the config alone says; without weights it is the same."""
    MODELS[model](tmp_path)
    options: dict[str, Any] = {"max_num_seqs": 2, "max_num_batched_tokens": 600}
    engine = Engine(tmp_path, **options)
    for file in tmp_path.rglob("*.safetensors"):
        file.unlink()
    limit = ModelOptions(max_model_len=engine.info.max_model_len)  # a KV cache of this size may have room for less
    info = info_of_unloaded(read_model_config(tmp_path), limit, EngineOptions(**options))
    assert without_room(info) == structs.replace(
        without_room(engine.info), device="", dtype="", num_blocks=0, weight_bytes=0, cache_bytes=0, kernels="",
        attention_backend="", cache_dtype="", cache_limit="", step_bytes=0,
    )  # fmt: skip


def without_room(info: ModelInfo) -> ModelInfo:
    """The facts without how long an item of a picture may be, which an engine's memory limits."""
    if not isinstance(info.kind, Generates | Pools) or info.kind.pictures is None:
        return info
    pictures = structs.replace(info.kind.pictures, item_tokens=0)
    return structs.replace(info, kind=structs.replace(info.kind, pictures=pictures))


def test_lengths_that_only_the_loaded_model_knows_are_asked_for(tmp_path: Path) -> None:
    config = read_model_config(tiny_embedder(tmp_path / "embedder"), "transformers")
    assert config.spec is None
    with pytest.raises(UnsupportedModel, match="set --max-model-len"):
        info_of_unloaded(config, ModelOptions(), EngineOptions())
    assert info_of_unloaded(config, ModelOptions(max_model_len=32), EngineOptions()).max_model_len == 32


def test_a_prompt_that_is_read_at_once_is_no_longer_than_a_step(tmp_path: Path) -> None:
    save_late_interaction(make_late_interaction("paligemma"), "paligemma", tmp_path)
    config = read_model_config(tmp_path, pooling=PoolingOptions())
    assert info_of_unloaded(config, ModelOptions(), EngineOptions(max_num_batched_tokens=99)).max_model_len == 99
