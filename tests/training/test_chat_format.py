"""The chat template, and the tokens and loss masks of conversations."""

from __future__ import annotations

from pathlib import Path
from random import Random

import jinja2
import pytest
from tokenizers import Tokenizer

from training.chat import NO_THINKING, encode, render_prompt, template
from training.generators.conversations import THEMES, make_conversation
from training.generators.turn import Conversation, Message, Turn
from training.tokens import MARKERS, SPECIAL

NANO = Path(__file__).parents[2] / "quire" / "bundled" / "nano"
PARAMETERS = {
    "type": "object",
    "required": ["city"],
    "properties": {"city": {"type": "string"}, "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}},
}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Weather of a city", "parameters": PARAMETERS},
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(NANO / "tokenizer.json"))


def test_plain_conversation() -> None:
    messages: list[Message] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "<think>\nx\n</think>\n\nHello!", "reasoning": "x"},
        {"role": "user", "content": [{"type": "text", "text": "what is "}, {"type": "text", "text": "quire"}]},
    ]
    assert render_prompt(messages) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n"
        "<|im_start|>user\nwhat is quire<|im_end|>\n<|im_start|>assistant\n"
    )
    assert render_prompt(messages, thinking=False).endswith("<|im_start|>assistant\n" + NO_THINKING)


def test_no_generation_prompt_and_developer_role() -> None:
    text = template().render(messages=[{"role": "developer", "content": "Be kind."}, {"role": "user", "content": None}])
    assert text == "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n<|im_end|>\n"


def test_tools_and_results() -> None:
    messages: list[Message] = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "weather in Oslo?"},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}},
            {"id": "2", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Åre"}}}]},
        {"role": "tool", "tool_call_id": "1", "content": "3"},
        {"role": "tool", "tool_call_id": "2", "content": "4"},
    ]  # fmt: skip
    assert render_prompt(messages, [WEATHER]) == (
        "<|im_start|>system\nBe kind.\n<tools>\n"
        '{"name": "get_weather", "description": "Weather of a city", "parameters": {"city": "string", '
        '"unit": ["celsius", "fahrenheit"]}, "optional": ["unit"]}\n</tools><|im_end|>\n'
        "<|im_start|>user\nweather in Oslo?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Åre"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    "parameters", [None, {}, {"type": "object"}, {"properties": {"a": {}, "b": {"type": ["string", "null"]}}}]
)
def test_odd_schemas(parameters: object) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    assert '{"name": "f", "parameters": {' in render_prompt([{"role": "user", "content": "x"}], [tool])


def test_unknown_role() -> None:
    with pytest.raises(jinja2.exceptions.TemplateError, match="role"):
        render_prompt([{"role": "nobody", "content": "x"}])


@pytest.mark.parametrize("theme", list(THEMES))
def test_loss_mask_covers_only_replies(theme: str, tokenizer: Tokenizer) -> None:
    rng = Random(4)
    for _ in range(10):
        conversation = make_conversation(theme, rng)
        encoded = encode(conversation, tokenizer)
        assert encoded.loss_mask[-1]
        ids = [token for token, flag in zip(encoded.ids, encoded.loss_mask, strict=True) if flag]
        reply_text = tokenizer.decode(ids, skip_special_tokens=False)
        if conversation.given:
            continue
        marked = zip(conversation.trained, conversation.messages, strict=True)
        ends = sum(flag for flag, message in marked if message["role"] == "assistant")
        assert reply_text.count("<|im_end|>") == ends
        assert "<|im_start|>" not in reply_text


def test_keys_that_the_grammar_writes_are_not_in_the_loss(tokenizer: Tokenizer) -> None:
    conversation = Conversation("schema")
    turn = Turn("schema", "Anna is 31.", '{"full_name": "Anna", "years": 31}', given=((0, 1), (2, 11), (22, 27)))
    conversation.add(turn.messages(), True, turn.given)
    encoded = encode(conversation, tokenizer)
    ids = [token for token, flag in zip(encoded.ids, encoded.loss_mask, strict=True) if flag]
    assert tokenizer.decode(ids, skip_special_tokens=False) == '": "Anna", "": 31}<|im_end|>'


def test_markers_are_single_tokens(tokenizer: Tokenizer) -> None:
    for token in (*SPECIAL, *MARKERS):
        assert tokenizer.encode(token, add_special_tokens=False).tokens == [token]
    ids = tokenizer.encode("<|im_start|>a<think>b<tool_call>", add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<think>b<tool_call>"


@pytest.mark.parametrize(
    "text", ["Grüße aus Zürich, 42 €!", "a  b\n\n c\td", '{"a": [1, "x"]}', "日本語 text", "it's o'clock", ""]
)
def test_tokenizer_round_trip(text: str, tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text


def test_tokens_of_a_word_do_not_depend_on_context(tokenizer: Tokenizer) -> None:
    for word in ("Anna", "Oslo", "Quillfeather", "zorp", "blockchain"):
        alone = tokenizer.encode(word, add_special_tokens=False).tokens
        for context in ("in {}", '"{}"', "({},", "x_{}"):
            tokens = tokenizer.encode(context.format(word), add_special_tokens=False).tokens
            assert "".join(alone) in "".join(tokens)
            joined = [token.removeprefix("Ġ") for token in tokens]
            assert any(joined[at : at + len(alone)] == alone for at in range(len(joined)))
