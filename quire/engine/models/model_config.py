"""What a model folder's config says.

Read without torch: transformers' config classes drag in much more of torch where it is there (two seconds), so a
server reads them in a process beside it while it imports torch itself.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from quire.engine.models.archs import ARCHITECTURES
from quire.engine.models.errors import BrokenFolder, UnknownArchitecture, UnsupportedModel
from quire.engine.models.spec import DecoderSpec

ModelImplementation = Literal["auto", "quire", "transformers"]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A model as its config describes it.

    Attributes:
        spec: the decoder; none: transformers' own implementation runs it.
        extra_layers: layers in the checkpoint behind the decoder's (multi-token prediction); they are not loaded.
    """

    model_type: str
    spec: DecoderSpec | None
    extra_layers: int


def read_model_config(folder: Path, implementation: ModelImplementation = "auto") -> ModelConfig:
    """Read a folder's config.

    Raises:
        BrokenFolder: there is no readable one.
        UnknownArchitecture: transformers does not know its model type, it is no causal LM, or `implementation` cannot
            run it.
        UnsupportedModel: a variant that nobody here runs.
    """
    config = read_config(folder)
    known = config.model_type in ARCHITECTURES
    if implementation == "quire" and not known:
        raise UnknownArchitecture(f"Quire's decoder does not know model type {config.model_type!r}")
    _check_quantisation(config)
    ours = known and implementation != "transformers"
    extra = getattr(config, "num_nextn_predict_layers", 0) or getattr(config, "num_mtp_layers", 0)
    return ModelConfig(config.model_type, ARCHITECTURES[config.model_type](config) if ours else None, extra)


def read_config(folder: Path) -> Any:
    """The folder's Hugging Face config.

    Raises:
        BrokenFolder: there is no readable one.
        UnknownArchitecture: transformers does not know its model type, or it is no causal LM.
    """
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BrokenFolder(f"{path} cannot be read: {error}") from error
    from transformers import AutoConfig  # noqa: PLC0415 most of a second

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnknownArchitecture(f"transformers cannot read {path}: {error}") from error
    names = raw.get("architectures") or []
    if names and not any("CausalLM" in name or "LMHead" in name or "ConditionalGeneration" in name for name in names):
        raise UnknownArchitecture(f"{', '.join(names)} is not a causal language model")
    return config


def _check_quantisation(config: Any) -> None:
    """Refuse checkpoints packed in a way that nobody here can unpack."""
    section = getattr(config, "quantization_config", None)
    if section is None:
        return
    method = section.get("quant_method") if isinstance(section, Mapping) else section.quant_method
    name = str(getattr(method, "value", method))
    if name not in ("mxfp4", "fp8"):
        raise UnsupportedModel(f"checkpoints quantized with {name!r} are not supported; mxfp4 and block-wise fp8 are")


def start_reading_configs(folders: Sequence[Path], implementation: ModelImplementation) -> list[Future[ModelConfig]]:
    """Read the configs of folders in a process beside this one, which ends when it is done; see `model_config_of`."""
    pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), initializer=_hide_torch)
    reading = [pool.submit(read_model_config, folder, implementation) for folder in folders]
    pool.shutdown(wait=False)
    return reading


def model_config_of(reading: Future[ModelConfig]) -> ModelConfig:
    """What came of a reading.

    Raises:
        ModelError: as `read_model_config` does.
    """
    try:
        return reading.result()
    except BrokenProcessPool as error:
        raise BrokenFolder(f"the process that reads configs has died: {error}") from error


def _hide_torch() -> None:
    sys.modules["torch"] = None  # type: ignore[assignment]  # Python's own way to make an import fail
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # it would say that torch is missing
