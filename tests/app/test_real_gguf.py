"""GGUF files that people download: their tokens, their greedy answers, and a chat."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from openai import OpenAI
from tokenizers import Tokenizer, pre_tokenizers

from quire.config.options import ModelOptions
from quire.engine.models.checkpoint.gguf.folder import model_folder
from tests.support.engine import Engine, greedy
from tests.support.oracle import generated, transformers_model
from tests.support.process import serving
from tests.support.real import real_files

pytestmark = pytest.mark.real

NAMES = ("smollm2", "gemma3")
PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a small village at the edge of a forest, where",
    "def fibonacci(n):\n    ",
    "1, 2, 3, 5, 8, 13,",
)
TEXTS = (
    *PROMPTS,
    "It's 12345.67 o'clock — they'LL see…  two  spaces\n\n\n\ttabs \r\n  end ",
    "Größe naïve Éclair ΑΒΓ привет Ⅷ ½ ² e\u0301",
    "日本語のテキスト、ひらがな カタカナ 한국어 中文。 emoji 👩‍👩‍👧 🙂",
    "for i in range(10):\n        print(f'{i:>5}')  # x**2 <= 8 ^ ~ `code` | \\n",
    "<|im_start|>user\nHi<|im_end|>\n<start_of_turn>model\n",
    "",
)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", NAMES)
def test_tokens(name: str) -> None:
    """All texts of the sources of the tests, too: they have many languages in them."""
    folder = model_folder(real_files(f"{name}.gguf"))
    got, expected = (Tokenizer.from_file(str(each / "tokenizer.json")) for each in (folder, real_files(name)))
    if name == "smollm2":  # SmolLM's tokenizer has single digits, which transformers' conversion of the file lacks
        steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        expected.pre_tokenizer = pre_tokenizers.Sequence(steps)
    sources = (path.read_text() for path in sorted(Path(__file__).parents[1].rglob("*.py"))[::20])
    for text in (*TEXTS, *sources):
        for adds in (True, False):
            ids = got.encode(text, add_special_tokens=adds).ids
            assert ids == expected.encode(text, add_special_tokens=adds).ids
        assert got.decode(ids, skip_special_tokens=False) == expected.decode(ids, skip_special_tokens=False)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens(name: str) -> None:
    """Those of transformers on the dequantized weights, which are in bfloat16 in the folder and in float32 here."""
    folder = model_folder(real_files(f"{name}.gguf"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    engine = Engine(folder, model=ModelOptions(dtype="float32", max_model_len=512), kv_cache_memory_bytes=1 << 30)
    twin = transformers_model(real_files(name))
    for index, prompt in enumerate(PROMPTS):
        ids = tokenizer.encode(prompt).ids
        tokens, logits = generated(twin, ids, 20)
        engine.add(f"{index}", ids, greedy(20))
        engine.run()
        got = engine.results[f"{index}"].tokens
        equal = next((i for i, pair in enumerate(zip(got, tokens, strict=True)) if pair[0] != pair[1]), len(tokens))
        if equal < len(tokens):  # bfloat16 may decide which of two likely tokens it is
            best = logits[equal].topk(2).values
            assert best[0] - best[1] < 0.1


@pytest.mark.timeout(900)
def test_chat() -> None:
    """A base model answers with a template that is given; an instructed one with its own."""
    exact = ("--dtype", "float32")  # kernels round inputs to 8 bits, and which answer is the likeliest is close
    with serving(str(real_files("smollm2.gguf")), *exact, new_interpreters=True) as server:
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
        assert [model.id for model in client.models.list()] == ["smollm2", str(real_files("smollm2.gguf"))]
        answer = client.chat.completions.create(
            model="smollm2",
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            temperature=0,
            max_tokens=30,
        )
        assert re.search("Paris", answer.choices[0].message.content or "")
        assert answer.choices[0].finish_reason == "stop"
    with serving(str(real_files("gemma3.gguf")), *exact, new_interpreters=True) as server:
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
        text = client.completions.create(
            model="gemma3", prompt="Monday, Tuesday, Wednesday,", temperature=0, max_tokens=8
        )
        assert "Thursday, Friday" in text.choices[0].text
