"""Names of the parsers of answers; what they do is in `quire.api`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, WithJsonSchema

ToolCallParser = Literal[
    "auto", "none", "hermes", "llama3_json", "llama4_pythonic", "pythonic", "mistral", "qwen3_coder", "qwen3_xml",
    "deepseek_v3", "deepseek_v31", "glm45", "kimi_k2", "granite", "internlm", "jamba", "hunyuan_a13b", "xlam",
    "phi4mini", "minimax_m2", "seed_oss", "gemma", "openai",
]  # fmt: skip
REASONING_PARSERS = (
    "deepseek_r1", "deepseek_v3", "qwen3", "glm45", "glm4_moe", "granite", "mistral", "hunyuan_a13b", "minimax_m2",
    "step3", "kimi_k2", "seed_oss", "ernie45", "olmo3", "nemotron_v3", "openai_gptoss",
)  # fmt: skip
_TAKES = f"auto, none, {', '.join(REASONING_PARSERS)} or START...END"


def _known(text: str) -> str:
    start, dots, end = text.partition("...")
    if text in ("auto", "none", *REASONING_PARSERS) or (start and dots and end):
        return text
    raise ValueError(f"takes {_TAKES}")


ReasoningParser = Annotated[str, AfterValidator(_known), WithJsonSchema({"takes": _TAKES})]
