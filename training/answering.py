"""Sources of answers for the evaluation: a model folder, or an OpenAI-compatible server."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import httpx
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from training.chat import render_prompt
from training.constrained import SchemaProcessor, load_tokens
from training.generators.turn import Message
from training.heldout import Case

MAX_NEW_TOKENS = 160
MAX_SCHEMA_TOKENS = 256
TIMEOUT = 120.0


class Answerer(Protocol):
    """Interface of a source of answers."""

    def answer(self, cases: list[Case]) -> list[str]:
        """Return the text of each answer."""
        ...


class FolderAnswerer:
    """Run a Hugging Face folder with transformers: float32, greedy decoding, in batches."""

    def __init__(self, folder: Path, batch: int = 40) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model.generation_config.temperature = None
        self.batch = batch
        self.grammar_tokens, self.ends = load_tokens(folder)

    def answer(self, cases: list[Case]) -> list[str]:
        """Return the answers in the order of the cases."""
        prompts = [render_prompt(case.messages, case.tools, case.thinking) for case in cases]
        order = sorted(range(len(prompts)), key=lambda at: len(prompts[at]))
        answers = [""] * len(prompts)
        for start in range(0, len(order), self.batch):
            chosen = order[start : start + self.batch]
            inputs = self.tokenizer(
                [prompts[at] for at in chosen], return_tensors="pt", padding=True, add_special_tokens=False
            )
            inputs.pop("token_type_ids", None)
            schemas = [cases[at].schema for at in chosen]
            held = any(schema is not None for schema in schemas)
            output = self.model.generate(
                **inputs, max_new_tokens=MAX_SCHEMA_TOKENS if held else MAX_NEW_TOKENS, do_sample=False,
                logits_processor=[SchemaProcessor(self.grammar_tokens, schemas, self.ends)] if held else None,
            )  # fmt: skip
            texts = self.tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            for at, text in zip(chosen, texts, strict=True):
                answers[at] = text
        return answers


class ServerAnswerer:
    """Send concurrent requests to a server."""

    def __init__(self, url: str, model: str, api_key: str | None = None, concurrency: int = 16) -> None:
        self.concurrency = concurrency
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.client = httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT)
        self.model = model

    def answer(self, cases: list[Case]) -> list[str]:
        """Return the answers in the order of the cases."""
        with ThreadPoolExecutor(self.concurrency) as pool:
            return list(pool.map(self._ask, cases))

    def _ask(self, case: Case) -> str:
        messages = [_openai_message(message) for message in case.messages]
        body: dict[str, Any] = {"model": self.model, "messages": messages,
                                "temperature": 0, "max_tokens": MAX_NEW_TOKENS}  # fmt: skip
        if case.tools:
            body |= {"tools": case.tools, "tool_choice": "none"}
        if case.schema is not None:
            named = {"name": "answer", "schema": case.schema}
            body |= {"response_format": {"type": "json_schema", "json_schema": named}, "max_tokens": MAX_SCHEMA_TOKENS}
        if not case.thinking:
            body["chat_template_kwargs"] = {"enable_thinking": False}
        response = self.client.post("chat/completions", json=body)
        response.raise_for_status()
        return response.json()["choices"][0]["message"]["content"] or ""


def _openai_message(message: Message) -> Message:
    """Return a message in OpenAI's format: the arguments of tool calls are a JSON string."""
    if not message.get("tool_calls"):
        return {key: value for key, value in message.items() if message["role"] != "tool" or key != "name"}
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        arguments = json.dumps(function["arguments"], ensure_ascii=False)
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return {**message, "tool_calls": calls}
