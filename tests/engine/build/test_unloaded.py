"""What a front end without an engine is told of a model is what an engine tells, though its weights are not there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from quire.config.options import EngineOptions, ModelOptions, ParallelOptions
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


def each(cases: Iterable[str], write: Callable[[str, Path], object], prefix: str = "") -> dict[str, Write]:
    """What writes the folder of each case, by a name for it."""
    return {prefix + case: partial(write, case) for case in cases}


MODELS: dict[str, Write] = {
    **each([*DECODERS, *FALLBACKS], lambda case, folder: save_model(make_model(case), folder)),
    **each(ENCODERS, lambda case, folder: make_encoder(case).save_pretrained(folder)),
    **each(SEES, lambda case, folder: save_seeing(make_composite(case), case, folder), "sees-"),
    **each(READ_BY_TRANSFORMERS, lambda case, folder: save_fallback(make_fallback(case), case, folder), "other-"),
    **each(KINDS, lambda kind, folder: save_audio_model(make_audio_model(kind), folder), "hears-"),
    **each(DUAL_ENCODERS, lambda kind, folder: save_dual_encoder(make_dual_encoder(kind), kind, folder)),
    **each(
        ("paligemma", "qwen2_vl"),
        lambda inner, folder: save_late_interaction(make_late_interaction(inner), inner, folder),
        "late-",
    ),
    **each(("wav2vec2", "parakeet"), lambda kind, folder: save_ctc(make_ctc(kind), folder), "ctc-"),
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
    info = info_of_unloaded(read_model_config(tmp_path), limit, EngineOptions(**options), ParallelOptions())
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
        info_of_unloaded(config, ModelOptions(), EngineOptions(), ParallelOptions())
    assert (
        info_of_unloaded(config, ModelOptions(max_model_len=32), EngineOptions(), ParallelOptions()).max_model_len == 32
    )


def test_a_prompt_that_is_read_at_once_is_no_longer_than_a_step(tmp_path: Path) -> None:
    save_late_interaction(make_late_interaction("paligemma"), "paligemma", tmp_path)
    config = read_model_config(tmp_path, pooling=PoolingOptions())
    assert (
        info_of_unloaded(
            config, ModelOptions(), EngineOptions(max_num_batched_tokens=99), ParallelOptions()
        ).max_model_len
        == 99
    )
