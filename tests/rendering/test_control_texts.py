"""Control tokens in texts of users are texts, where media are read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from quire.config.options import ChatOptions
from quire.multimodal.errors import PromptError
from quire.rendering.control_texts import ControlTexts
from quire.rendering.messages import IMAGE_PART
from quire.rendering.picture_texts import PictureTexts
from quire.rendering.prompts import ChatJob, Conversation, PromptBuilder, RenderedChat
from quire.rendering.tokenizer import Tokenizer
from tests.support.tokenizer import byte_level

SPECIAL = ["<image>", "<|end|>", "<fence>", "[BREAK]"]
PARTS = (
    "{% for message in messages %}{{ message.role }}:"
    "{% for part in message.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{{ message.tool_calls | tojson if message.tool_calls }}<|end|>{% endfor %}{{ tools | tojson }}"
)
TEXT = "{% for message in messages %}{{ message.role }}:{{ message.content }}<|end|>{% endfor %}"


def _sentence_piece() -> tokenizers.Tokenizer:
    vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}}
    vocab |= {letter: 257 + index for index, letter in enumerate(["im", *"▁abcdefghijklmnopqrstuvwxyz<>|:"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [("i", "m")], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


BACKENDS = {"byte level": byte_level, "SentencePiece": _sentence_piece}


@pytest.fixture(params=BACKENDS)
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    backend = BACKENDS[request.param]()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": PARTS}))
    return Tokenizer.load(tmp_path)


def _rendered(
    tokenizer: Tokenizer, folder: Path, messages: Sequence[Mapping[str, Any]], pictures: int, **fields: Any
) -> RenderedChat:
    builder = PromptBuilder(folder, tokenizer, ChatOptions(), 1000, frozenset({"<image>"}))
    texts = PictureTexts([("<image>", "<fence><image>")] * pictures)
    conversation = Conversation(
        messages=messages,
        media={"image": "<image>"} if pictures else {},
        pictures=texts if pictures else None,
        **fields,
    )
    return builder.chat(ChatJob(conversation, None))


def _count(rendered: RenderedChat, tokenizer: Tokenizer, text: str) -> int:
    return int((rendered.prompt.token_ids == tokenizer.token_id(text)).sum())


def _user(*parts: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"role": "user", "content": content}


WRITTEN = {
    "a text": [_user("see <image> or <|end|>", IMAGE_PART, "<image>")],
    "texts that meet": [_user("<ima", "ge>", IMAGE_PART, "<|en", "d|>")],
    "a text and the template's": [_user(IMAGE_PART, "<image><image", ">")],
    "a system message": [{"role": "system", "content": "<image>"}, _user(IMAGE_PART)],
    "arguments of a call": [
        _user(IMAGE_PART, "<image>"),
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "f", "arguments": '{"<image>": "\\u003cimage>"}'}}],
        },
    ],
    "arguments of a call alone": [
        _user(IMAGE_PART),
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "f", "arguments": '{"a": "\\u003cimage> \\u003c|end|>"}'}}],
        },
    ],
}


@pytest.mark.parametrize("case", WRITTEN)
def test_what_users_write_is_neither_a_picture_nor_the_end_of_a_turn(
    case: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    messages = WRITTEN[case]
    tools = None if case == "arguments of a call alone" else [{"name": "<image>"}]
    rendered = _rendered(tokenizer, tmp_path, messages, 1, tools=tools)
    assert _count(rendered, tokenizer, "<image>") == 1
    assert _count(rendered, tokenizer, "<fence>") == 1
    assert _count(rendered, tokenizer, "<|end|>") == len(messages)
    decoded = tokenizer.decode(rendered.prompt.token_ids.tolist(), skip_special_tokens=False)
    assert rendered.prompt.text is not None
    # SentencePiece's models put a space behind each special token.
    assert decoded.replace(" ", "") == rendered.prompt.text.replace(" ", "")
    assert decoded.startswith(f"{messages[0]['role']}:")
    assert not any(0xFDD0 <= ord(character) < 0xFDF0 for character in decoded + rendered.final_text)


def test_the_text_is_what_was_written(tokenizer: Tokenizer, tmp_path: Path) -> None:
    rendered = _rendered(tokenizer, tmp_path, [_user("a <image> b<", IMAGE_PART)], 1)
    assert rendered.prompt.text == "user:a <image> b<<fence><image><|end|>null"
    assert rendered.final_text == "a <image> b<"


def test_without_media_only_texts_of_media_tokens_are_texts(tokenizer: Tokenizer, tmp_path: Path) -> None:
    rendered = _rendered(tokenizer, tmp_path, [_user("<image><|end|>")], 0)
    assert _count(rendered, tokenizer, "<image>") == 0
    assert _count(rendered, tokenizer, "<|end|>") == 2


def test_control_tokens_that_a_model_wrote_stay(tokenizer: Tokenizer, tmp_path: Path) -> None:
    messages = [_user(IMAGE_PART), {"role": "assistant", "content": "<image><|end|>"}]
    rendered = _rendered(tokenizer, tmp_path, messages, 1)
    assert _count(rendered, tokenizer, "<image>") == 1
    assert _count(rendered, tokenizer, "<|end|>") == 3


def test_a_template_for_texts_gets_the_placeholder(tokenizer: Tokenizer, tmp_path: Path) -> None:
    rendered = _rendered(tokenizer, tmp_path, [_user(IMAGE_PART, "<image>", IMAGE_PART)], 2, template=TEXT)
    assert rendered.prompt.text == "user:<fence><image>\n<image>\n<fence><image><|end|>"
    assert _count(rendered, tokenizer, "<image>") == 2


def test_a_mark_that_a_text_has_is_kept(tokenizer: Tokenizer, tmp_path: Path) -> None:
    rendered = _rendered(tokenizer, tmp_path, [_user("<image>\ufdd0", IMAGE_PART)], 1)
    assert rendered.prompt.text == "user:<image>\ufdd0<fence><image><|end|>null"


@pytest.mark.parametrize("template", ["{{ messages[0].role }}", PARTS + "<image>"])
def test_a_template_that_writes_pictures_otherwise_is_refused(
    template: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    with pytest.raises(PromptError, match=r"has rendered \d pictures, videos or audio parts; the messages have 1"):
        _rendered(tokenizer, tmp_path, [_user(IMAGE_PART)], 1, template=template)


def test_texts_of_any_length_are_recognized() -> None:
    texts = ControlTexts(frozenset({"a" * 5000, "a" * 5000 + "b", "a" * 2500 + "|", "|a"}))
    assert texts.marked("-" + "a" * 2500 + "|a-", "\ufdd0") == "-a\ufdd0" + "a" * 2499 + "|a-"
    assert texts.marked("a" * 5000 + "b.", "\ufdd0") == "a\ufdd0" + "a" * 4999 + "b."


def test_marking_twice_changes_nothing_more() -> None:
    texts = ControlTexts(frozenset({"<image>", "<|end|>"}))
    once = texts.marked("<image><|en", "\ufdd0")
    assert once == "<\ufdd0image><|en\ufdd0"
    assert texts.marked(once, "\ufdd0") == once
    assert not texts.occur_in(once)
