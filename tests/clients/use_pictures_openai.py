"""OpenAI's client library: pictures and a PDF file in chats and responses, in messages and results of tools."""
# needs: openai>=2.9,<3

from __future__ import annotations

from openai import OpenAI
from pictures import ANSWER, DATA_URL, MODEL, PDF, PICTURE_URL, QUESTION, TOKENS, TOOL, URL

client = OpenAI(base_url=URL, api_key="none", max_retries=0)
file = {"filename": "a.pdf", "file_data": f"data:application/pdf;base64,{PDF}"}


def chat(*messages):
    return client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=TOKENS)


def user(*parts):
    return {"role": "user", "content": [*parts, {"type": "text", "text": QUESTION}]}


text = chat(user())
for url in (DATA_URL, PICTURE_URL):
    picture = {"type": "image_url", "image_url": {"url": url}}
    answer = chat(user(picture))
    assert answer.choices[0].message.content == ANSWER
    pictures = answer.usage.prompt_tokens_details.multimodal_tokens["image"]
    assert 0 < pictures <= answer.usage.prompt_tokens - text.usage.prompt_tokens

call = {"id": "call_1", "type": "function", "function": {"name": TOOL, "arguments": "{}"}}
asked = [user(), {"role": "assistant", "tool_calls": [call]}]
told = chat(*asked, {"role": "tool", "tool_call_id": "call_1", "content": [picture]})
assert told.choices[0].message.content
assert told.usage.prompt_tokens_details.multimodal_tokens["image"] == pictures

of_pdf = chat(user({"type": "file", "file": file}))
assert of_pdf.choices[0].message.content
assert of_pdf.usage.prompt_tokens_details.multimodal_tokens["image"] > 0

stream = client.chat.completions.create(
    model=MODEL,
    messages=[user(picture)],
    temperature=0,
    max_tokens=TOKENS,
    stream=True,
    stream_options={"include_usage": True},
)
chunks = list(stream)
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER
assert chunks[-1].usage.prompt_tokens == answer.usage.prompt_tokens


def respond(*items):
    return client.responses.create(model=MODEL, input=items, temperature=0, max_output_tokens=TOKENS, store=False)


def asked_for(*parts):
    return {"role": "user", "content": [*parts, {"type": "input_text", "text": QUESTION}]}


text = respond(asked_for())
for url in (DATA_URL, PICTURE_URL):
    image = {"type": "input_image", "image_url": url, "detail": "auto"}
    response = respond(asked_for(image))
    assert response.output_text == ANSWER
    assert response.usage.input_tokens - text.usage.input_tokens >= pictures

call = {"type": "function_call", "call_id": "call_1", "name": TOOL, "arguments": "{}"}
result = {"type": "function_call_output", "call_id": "call_1", "output": [image]}
told = respond(asked_for(), call, result)
assert told.output_text
assert told.usage.input_tokens - text.usage.input_tokens >= pictures

of_pdf = respond(asked_for({"type": "input_file", **file}))
assert of_pdf.output_text
assert of_pdf.usage.input_tokens - text.usage.input_tokens > pictures
