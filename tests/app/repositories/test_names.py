"""Names of models that are no paths: ids, URLs, and what follows a colon."""

from __future__ import annotations

import pytest

from quire.app.repositories.names import ModelName, parse_name
from quire.config.command import ConfigError


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("gpt2", ModelName("gpt2")),
        ("user/model", ModelName("user/model")),
        ("user/model-GGUF:Q4_K_M", ModelName("user/model-GGUF", variant="Q4_K_M")),
        ("user/model-GGUF:latest", ModelName("user/model-GGUF")),
        ("user/model-GGUF:model-Q4_0.gguf", ModelName("user/model-GGUF", variant="model-Q4_0.gguf")),
        ("user/model-GGUF/BF16/model.gguf", ModelName("user/model-GGUF", path="BF16/model.gguf")),
        ("hf.co/user/model-GGUF:IQ4_XS", ModelName("user/model-GGUF", variant="IQ4_XS")),
        ("huggingface.co/user/model", ModelName("user/model")),
        ("https://huggingface.co/user/model", ModelName("user/model")),
        ("https://hf.co/gpt2", ModelName("gpt2")),
        ("https://hf.co/user/model:Q8_0", ModelName("user/model", variant="Q8_0")),
        ("https://huggingface.co/user/model/tree/main", ModelName("user/model", "main")),
        (
            "https://huggingface.co/user/model/tree/refs%2Fpr%2F1/BF16",
            ModelName("user/model", "refs/pr/1", path="BF16"),
        ),
        (
            "https://huggingface.co/user/model/resolve/v1/a/model-Q8_0.gguf?download=true",
            ModelName("user/model", "v1", path="a/model-Q8_0.gguf"),
        ),
        ("https://huggingface.co/user/model/blob/main/config.json", ModelName("user/model", "main")),
        ("https://huggingface.co/gpt2/blob/main/config.json", ModelName("gpt2", "main")),
        ("http://mirror.test:8080/user/model:Q4_0", ModelName("user/model", variant="Q4_0")),
        ("models/some/folder", ModelName("models/some/folder")),  # the hub says what is wrong with it
    ],
)
def test_names(text: str, name: ModelName, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://mirror.test:8080")
    assert parse_name(text) == name


@pytest.mark.parametrize("text", ["https://example.com/user/model", "s3://bucket/model", "http://[/x"])
def test_urls_of_other_hosts_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="URL"):
        parse_name(text)
