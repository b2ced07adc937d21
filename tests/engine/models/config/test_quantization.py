"""--quantization with the names that vLLM has for the formats of checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from quire.config.options import CheckpointQuantization, ModelOptions, OnlineQuantization
from quire.engine.models.checkpoint.formats import FORMATS
from quire.engine.models.checkpoint.gguf.folder import METHOD
from quire.engine.models.config.quantization import chosen_quantization, vllm_names
from quire.engine.models.errors import UnsupportedModel
from tests.support.engine import Engine
from tests.support.models import make_model, save_model


def chosen(quantization: str, section: dict[str, Any] | None, *, has_float8: bool = False) -> str:
    options = ModelOptions(quantization=quantization)
    return chosen_quantization(options, section, has_float8=has_float8).quantization


def test_all_formats_have_names() -> None:
    names = {name for method in (*FORMATS, METHOD) for name in vllm_names({"quant_method": method})}
    assert names - {"fp8"} == set(get_args(CheckpointQuantization))
    assert not set(get_args(CheckpointQuantization)) & set(get_args(OnlineQuantization))


@pytest.mark.parametrize(
    ("quantization", "method"),
    [("gptq_marlin", "gptq"), ("awq", "awq"), ("moe_wna16", "awq"), ("inc", "auto-round"), ("gguf", "gguf")],
)
def test_names_that_describe_the_checkpoint(quantization: str, method: str) -> None:
    assert chosen(quantization, {"quant_method": method}) == "none"


def test_fp8_describes_a_checkpoint_where_nothing_else_is_possible() -> None:
    assert chosen("fp8", {"quant_method": "fp8"}) == "none"
    assert chosen("fp8", {"quant_method": "fp8"}, has_float8=True) == "fp8"
    assert chosen("fp8", None) == "fp8"
    assert chosen("int8", {"quant_method": "fp8"}) == "int8"


def test_names_of_other_formats_are_refused(tmp_path: Path) -> None:
    folder = save_model(make_model("llama"), tmp_path)
    with pytest.raises(UnsupportedModel, match="gptq does not describe the checkpoint: it is not quantized; accepted"):
        Engine(folder, model=ModelOptions(quantization="gptq"))
    with pytest.raises(UnsupportedModel, match="its quantization is awq; accepted are auto_awq, awq, awq_marlin"):
        chosen("gptq", {"quant_method": "awq"})
