"""LangChain: chat, streaming, tool calls and structured outputs."""
# needs: langchain-openai>=1.7,<2

from __future__ import annotations

from forecast import Forecast
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from questions import DEGREES, LONG, MODEL, NAME, SUM, TOTAL, URL, WEATHER, get_weather


class Sum(BaseModel):
    """A sum."""

    total: int


chat = ChatOpenAI(base_url=URL, api_key="none", model=MODEL, temperature=0, max_retries=0)
assert TOTAL in chat.invoke(SUM).text

pieces = [chunk.text for chunk in chat.stream(LONG)]
assert len(pieces) > 2
assert NAME in "".join(pieces)

bound = chat.bind_tools([get_weather])
said = bound.invoke(WEATHER)
(call,) = said.tool_calls
result = ToolMessage(get_weather(**call["args"]), tool_call_id=call["id"])
assert DEGREES in bound.invoke([HumanMessage(WEATHER), said, result]).text

nested = chat.bind_tools([Forecast], tool_choice="required").invoke(WEATHER)
assert "Paris" in Forecast.model_validate(nested.tool_calls[0]["args"]).city

for method in ("json_schema", "function_calling"):
    assert isinstance(chat.with_structured_output(Sum, method=method).invoke(SUM), Sum)

responses = ChatOpenAI(base_url=URL, api_key="none", model=MODEL, temperature=0, use_responses_api=True)
assert TOTAL in responses.invoke(SUM).text
