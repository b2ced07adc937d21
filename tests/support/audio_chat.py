"""The tokenizer and chat templates of small models that read audio, and a core that tells what it has got."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import msgspec
import tokenizers
from tokenizers import AddedToken

from quire.engine.client.audio import AudioInfo, AudioLengths, WindowLengths
from quire.engine.client.model_info import Generates
from quire.engine.client.protocol import AddRequest
from tests.support.audio import Samples, wav
from tests.support.fake_core import INFO, FakeCore
from tests.support.server import Server, running_server
from tests.support.tokenizer import byte_level

_TOKENS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"),
    *("<|audio_start|>", "<|audio_pad|>", "<|audio_end|>", "<s>", "</s>", "[INST]", "[/INST]", "[BEGIN_AUDIO]"),
    *("[AUDIO]", "[TRANSCRIBE]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "<|audio|>", "<|end_of_text|>"),
    *("<|endoftext11|>", "<|end|>", "<asr_text>"),
)
TOKEN = {text: 256 + index for index, text in enumerate(_TOKENS)}
VOCAB = 300
PLACEHOLDERS = {
    "granite_speech": "<|audio|>",
    "phi4_multimodal": "<|endoftext11|>",
    "qwen2_audio": "<|AUDIO|>",
    "qwen3_asr": "<|audio_pad|>",
    "voxtral": "[AUDIO]",
}
ENDS = {
    "granite_speech": "<|end_of_text|>",
    "phi4_multimodal": "<|end|>",
    "qwen2_audio": "<|im_end|>",
    "qwen3_asr": "<|im_end|>",
    "voxtral": "</s>",
}
KINDS = tuple(PLACEHOLDERS)
SPANS = {
    "granite_speech": "<|audio|>",
    "phi4_multimodal": "<|endoftext11|>",
    "qwen2_audio": "<|audio_bos|><|AUDIO|><|audio_eos|>",
    "qwen3_asr": "<|audio_start|><|audio_pad|><|audio_end|>",
    "voxtral": "[BEGIN_AUDIO][AUDIO]",
}
_CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for c in m.content %}{% if c.type == 'audio' %}AUDIO"
    "{% else %}{{ c.text }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@lru_cache(maxsize=1)
def audio_tokenizer() -> tokenizers.Tokenizer:
    """Bytes, then the special tokens of all kinds."""
    tokenizer = byte_level(_TOKENS[:-1])
    tokenizer.add_tokens([AddedToken(_TOKENS[-1], special=False)])
    return tokenizer


def write_audio_tokenizer(kind: str, folder: Path, *, parts: bool = True) -> None:
    """Write the tokenizer and the chat template of a kind. `parts`: the template loops over content parts."""
    folder.mkdir(parents=True, exist_ok=True)
    audio_tokenizer().save(str(folder / "tokenizer.json"))
    config = {"eos_token": ENDS[kind], "bos_token": "<s>" if kind == "voxtral" else None}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    plain = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    parts = parts and kind not in ("granite_speech", "phi4_multimodal")  # whose templates want texts
    if not (kind == "voxtral" and parts):
        template = _CHAT.replace("AUDIO", SPANS[kind]) if parts else plain
        (folder / "chat_template.jinja").write_text(template)


def _write_folder(kind: str, parts: bool, folder: Path) -> None:
    """The files of a model without weights."""
    write_audio_tokenizer(kind, folder, parts=parts)
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))


def audio_info(kind: str) -> AudioInfo:
    """As real models of the kind have it, with few mel bins."""
    fields: dict[str, Any] = {
        "granite_speech": {
            "features": "stacked_log_mel",
            "column_samples": 320,
            "item_columns": 15_000,
            "lengths": WindowLengths(15, 3),
            "max_items": 1,
        },
        "phi4_multimodal": {
            "features": "kaldi_log_mel",
            "item_columns": 4000,
            "lengths": AudioLengths(4000, 3, 1),
            "columns_before": 8,
        },
        "qwen2_audio": {
            "lengths": AudioLengths(3000, 1, 2),
            "padded_columns": 3000,
            "columns_after": 2,
            "max_items": 1,
        },
        "voxtral": {"lengths": AudioLengths(3000, 1, 4), "padded_columns": 3000, "encodes_padding": True},
        "qwen3_asr": {"lengths": AudioLengths(100, 3, 1), "min_samples": 8000, "item_columns": 800},
    }[kind]
    defaults: dict[str, Any] = {
        "kind": kind,
        "placeholder": TOKEN[PLACEHOLDERS[kind]],
        "placeholder_text": SPANS[kind],
        "sample_rate": 16_000,
        "num_mel_bins": 8,
        "item_columns": 3000,
    }
    return AudioInfo(**{**defaults, **fields})


def described(message: AddRequest) -> list[int]:
    """How many items a request has, and where."""
    spans = " ".join(f"{item.start}+{item.length}" for item in message.items)
    return [*audio_tokenizer().encode(spans or "nothing").ids, TOKEN["<|im_end|>"]]


@dataclass
class AudioCore(FakeCore):
    """A core that says which items it has got."""

    kind: str = "qwen2_audio"
    context: int = 4096
    answer: Callable[[AddRequest], list[int]] = field(default=described)

    def __post_init__(self) -> None:
        self.info = msgspec.structs.replace(
            INFO,
            vocab_size=VOCAB,
            max_model_len=self.context,
            kind=Generates(audio=audio_info(self.kind)),
        )


@asynccontextmanager
async def audio_server(
    folder: Path, core: AudioCore | None = None, *others: FakeCore, parts: bool = True, **options: Any
) -> AsyncIterator[Server]:
    """A server of the model; `others` are further ones."""
    core = core or AudioCore()
    write = partial(_write_folder, core.kind, parts)
    async with running_server(folder, core, *others, write=write, **options) as server:
        yield server


def requests_of(core: FakeCore) -> list[AddRequest]:
    """What the core has got."""
    return [message for message in core.received if isinstance(message, AddRequest)]


def encoded(samples: Samples) -> str:
    """1-D samples as a wav file in base64."""
    return base64.b64encode(wav(samples[:, None])).decode()


def input_audio(data: str, form: str | None = "wav") -> dict[str, Any]:
    """A content part."""
    return {"type": "input_audio", "input_audio": {"data": data, **({} if form is None else {"format": form})}}


def audio_url(url: str) -> dict[str, Any]:
    """A content part."""
    return {"type": "audio_url", "audio_url": {"url": url}}


def asked(*parts: dict[str, Any] | str, **fields: Any) -> dict[str, Any]:
    """The body of a chat with one message."""
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"messages": [{"role": "user", "content": content}], **fields}
