"""Which file of a model is served, of several in different quantizations."""

from __future__ import annotations

import pytest

from quire.app.repositories.gguf_choice import choose_gguf, label_of

_SPLIT = [f"Q8_0/Big-Q8_0-0000{part}-of-00002.gguf" for part in (1, 2)]
_USUAL = ["Big-IQ2_XXS.gguf", "Big-Q4_K_M.gguf", "Big-BF16.gguf", "mmproj-F16.gguf", "imatrix_unsloth.gguf", *_SPLIT]


@pytest.mark.parametrize(
    ("file", "label"),
    [
        ("Qwen3-4B-Q4_K_M.gguf", "Q4_K_M"),
        ("Llama-3.2-1B.i1-IQ3_XXS.gguf", "IQ3_XXS"),
        ("qwen2.5-7b-instruct-q5_k_m-00001-of-00002.gguf", "Q5_K_M"),
        ("Qwen3-4B-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("BF16/Qwen3-4B-BF16-00001-of-00002.gguf", "BF16"),
        ("Q6_K/model.gguf", "Q6_K"),
        ("model-fp16.gguf", "F16"),
        ("Meta-Llama-3-8B-Instruct-Q4_0_4_4.gguf", "Q4_0_4_4"),
        ("gpt-oss-20b-MXFP4.gguf", "MXFP4"),
        ("phi-3-mini-4k-instruct-q4.gguf", "Q4"),
        ("model-Q4_K_M-imat.gguf", "Q4_K_M"),
        ("bitnet-TQ2_0.gguf", "TQ2_0"),
        ("gemma-2b-it.gguf", ""),
        ("Q2model.gguf", ""),
    ],
)
def test_labels(file: str, label: str) -> None:
    assert label_of(file) == label


@pytest.mark.parametrize(
    ("names", "variant", "file", "reason"),
    [
        (["a.gguf", "mmproj-a.gguf"], "", "a.gguf", "the only GGUF file"),
        (_USUAL, "", "Big-Q4_K_M.gguf", "as Q4_K_M is taken where no quantization is named"),
        (_USUAL, "q8_0", _SPLIT[0], "as q8_0 was named, of IQ2_XXS, Q4_K_M, BF16, Q8_0"),
        (_USUAL, "bf16", "Big-BF16.gguf", "as bf16 was named"),
        (_USUAL, "Big-BF16.gguf", "Big-BF16.gguf", "was named"),
        (_USUAL, "Q4_K", "Big-Q4_K_M.gguf", "was named"),
        (["x-UD-Q4_K_XL.gguf", "x-Q8_0.gguf"], "Q4_K_XL", "x-UD-Q4_K_XL.gguf", "was named"),
        (["x-Q5_K_M.gguf", "x-Q6_K.gguf", "x-F16.gguf", "x-F32.gguf"], "", "x-Q6_K.gguf", "the most exact one"),
        (["x-Q5_K_S.gguf", "x-Q5_K_M.gguf", "x-IQ4_XS.gguf", "x-Q5_0.gguf"], "", "x-Q5_K_M.gguf", "the most exact one"),
        (["x-F16.gguf", "x-F32.gguf"], "", "x-F16.gguf", "the most exact one"),
        (["x-Q4_K_M.gguf", "y-Q8_0.gguf"], "Q8_0", "y-Q8_0.gguf", "was named"),
    ],
)
def test_choice(names: list[str], variant: str, file: str, reason: str) -> None:
    choice = choose_gguf(reversed(names), variant)
    assert choice is not None
    assert choice.file == file
    assert reason.split(", of ", maxsplit=1)[0] in choice.reason


def test_no_choice() -> None:
    assert choose_gguf(["mmproj-F16.gguf", "imatrix.gguf", "config.json", *_SPLIT[1:]]) is None
    with pytest.raises(ValueError, match=r"no GGUF file 'Q3_K_M'; it has BF16, IQ2_XXS, Q4_K_M, Q8_0"):
        choose_gguf(_USUAL, "Q3_K_M")
    with pytest.raises(ValueError, match=r"several models; name the file of one: x-Q8_0\.gguf, y-Q8_0\.gguf"):
        choose_gguf(["x-Q8_0.gguf", "y-Q8_0.gguf"])
    with pytest.raises(ValueError, match="several models in Q8_0"):
        choose_gguf(["x-Q8_0.gguf", "y-Q8_0.gguf"], "Q8_0")
