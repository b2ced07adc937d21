"""LangChain, with chats, responses and messages: pictures and a PDF file, in messages and results of tools."""
# needs: langchain-openai>=1.7,<2 langchain-anthropic>=1,<2

from __future__ import annotations

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pictures import ANSWER, MODEL, PDF, PICTURE, PICTURE_URL, QUESTION, SERVER, TOKENS, TOOL, URL

question = {"type": "text", "text": QUESTION}
file = {"type": "file", "base64": PDF, "mime_type": "application/pdf", "filename": "a.pdf"}
pictures = [
    {"type": "image", "base64": PICTURE, "mime_type": "image/png"},
    {"type": "image", "url": PICTURE_URL},
]
common = {"model": MODEL, "temperature": 0, "max_tokens": TOKENS, "max_retries": 0, "api_key": "none"}
for chat in (
    ChatOpenAI(base_url=URL, **common),
    ChatOpenAI(base_url=URL, use_responses_api=True, **common),
    ChatAnthropic(base_url=SERVER, **common),
):
    text = chat.invoke([HumanMessage([question])]).usage_metadata["input_tokens"]
    for picture in pictures:
        answer = chat.invoke([HumanMessage([picture, question])])
        assert answer.text == ANSWER
        assert answer.usage_metadata["input_tokens"] > text

    call = {"name": TOOL, "args": {}, "id": "call_1"}
    for picture in pictures:
        result = ToolMessage([picture], tool_call_id="call_1")
        told = chat.invoke([HumanMessage([question]), AIMessage("", tool_calls=[call]), result])
        assert told.text
        assert told.usage_metadata["input_tokens"] >= answer.usage_metadata["input_tokens"]

    of_pdf = chat.invoke([HumanMessage([file, question])])
    assert of_pdf.text
    assert of_pdf.usage_metadata["input_tokens"] > answer.usage_metadata["input_tokens"]
