"""Anthropic's client library: pictures and a PDF file in messages and results of tools."""
# needs: anthropic>=0.70,<3

from __future__ import annotations

from anthropic import Anthropic
from pictures import ANSWER, MODEL, PDF, PICTURE, PICTURE_URL, QUESTION, SERVER, TOKENS, TOOL

client = Anthropic(base_url=SERVER, api_key="none", max_retries=0)


def ask(*messages):
    greedy = {"temperature": 0}  # newer versions have no such argument
    return client.messages.create(model=MODEL, messages=messages, max_tokens=TOKENS, extra_body=greedy)


def user(*blocks):
    return {"role": "user", "content": [*blocks, {"type": "text", "text": QUESTION}]}


def prompt_tokens(message):
    return message.usage.input_tokens + message.usage.cache_read_input_tokens


text = prompt_tokens(ask(user()))
for source in (
    {"type": "base64", "media_type": "image/png", "data": PICTURE},
    {"type": "url", "url": PICTURE_URL},
):
    picture = {"type": "image", "source": source}
    answer = ask(user(picture))
    assert answer.content[0].text == ANSWER
    assert prompt_tokens(answer) > text
    counted = client.messages.count_tokens(model=MODEL, messages=[user(picture)])
    assert counted.input_tokens == prompt_tokens(answer)

call = {"type": "tool_use", "id": "call_1", "name": TOOL, "input": {}}
result = {"type": "tool_result", "tool_use_id": "call_1", "content": [picture]}
told = ask(user(), {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]})
assert told.content[0].text
assert prompt_tokens(told) - text >= prompt_tokens(answer) - text

pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": PDF}, "title": "a"}
of_pdf = ask(user(pdf))
assert of_pdf.content[0].text
assert prompt_tokens(of_pdf) > prompt_tokens(answer)
