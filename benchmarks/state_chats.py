"""Chats with a hybrid model at servers with OpenAI's API: how many tokens of prompts are computed, over the least.

    python -m benchmarks.state_chats MODEL --out FILE.json quire='COMMAND' llama='COMMAND' vllm='COMMAND'
    python -m benchmarks.state_chats MODEL --out FILE.json --budget 50 quire='COMMAND'

In commands {model}, {name} and {port} stand for the folder of the model (see benchmarks.tiny_hybrids), the name that
requests have, and the port. A trace is sent one request after another to a server that has just started:

- 12 turns with reasoning, which the template drops from earlier answers
- 20 agents with a system prompt of 4,000 tokens, each with other tools behind it, of two turns: tools are a part of the
  system prompt's text, or `tools` of the request
- 12 turns, then the seventh message of the user is edited, and six more turns

At least those tokens of a prompt have to be computed that follow its longest common beginning with an earlier prompt
and answer, the last one always. Answers of earlier turns in the messages are not those of the model, which has random
weights: so in each trace a prompt parts from those before it at the latest where an answer begins.

With `--budget` 500 chats of two turns, and a third of 100 of them, eight at a time, are sent to the first server, which
is to keep at most so many states; then to the same with --no-enable-prefix-caching: all answers have to be equal.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import httpx
import tokenizers

from benchmarks.picture_chats import wait_until_it_answers
from benchmarks.processes import Server
from quire.rendering.chat_template import ChatTemplate

NAME = "bench"
Messages = list[dict[str, str]]
Tools = list[dict[str, Any]]
Chat = tuple[Messages, Tools]


class Texts:
    """Texts of random words, and the tokens of chats."""

    def __init__(self, model: Path, seed: int = 1) -> None:
        self._tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
        self._template = ChatTemplate((model / "chat_template.jinja").read_text(encoding="utf-8"))
        names = sorted(self._tokenizer.get_vocab())
        self._words = [name[1:] for name in names if re.fullmatch("\u0120[a-z]{3,8}", name)]
        self._random = random.Random(seed)

    def words(self, count: int) -> str:
        """Return a text of about so many tokens."""
        return " ".join(self._random.choices(self._words, k=count))

    def number(self, begin: int, end: int) -> int:
        """Return a random number."""
        return self._random.randrange(begin, end)

    def tokens(self, messages: Messages, tools: Tools) -> list[int]:
        """Return the prompt of a chat."""
        text = self._template.render({"messages": messages, "tools": tools, "add_generation_prompt": True})
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)


def _turns(
    texts: Texts, messages: Messages, count: int, asked: int = 120, answered: int = 150, tools: Tools | None = None
) -> Iterator[Chat]:
    """Yield each turn of a chat, to which `messages` grows. `asked`, `answered`: tokens of a message."""
    for _ in range(count):
        messages.append({"role": "user", "content": texts.words(asked)})
        yield list(messages), tools or []
        reasoning, content = texts.words(200), texts.words(answered)
        messages.append({"role": "assistant", "content": content, "reasoning_content": reasoning})


def conversation(texts: Texts) -> Iterator[Chat]:
    """Yield 12 turns."""
    yield from _turns(texts, [{"role": "system", "content": texts.words(400)}], 12)


def agents(texts: Texts) -> Iterator[Chat]:
    """Yield two turns of each of 20 agents."""
    system = texts.words(4000)
    for _ in range(20):
        tools = texts.words(texts.number(200, 600))
        yield from _turns(texts, [{"role": "system", "content": f"{system}\n\n# Tools\n\n{tools}"}], 2)


def agents_with_tools(texts: Texts) -> Iterator[Chat]:
    """Yield two turns of each of 20 agents, whose tools are in `tools`."""
    system = texts.words(4000)
    for number in range(20):
        function = {"name": f"tool_{number}", "description": texts.words(texts.number(200, 600)), "parameters": {}}
        tools = [{"type": "function", "function": function}]
        yield from _turns(texts, [{"role": "system", "content": system}], 2, tools=tools)


def edit(texts: Texts) -> Iterator[Chat]:
    """Yield 12 turns, then six others behind the first six."""
    before = list(conversation(texts))
    yield from before
    yield from _turns(texts, before[6][0][:-1], 6)


TRACES: dict[str, Callable[[Texts], Iterator[Chat]]] = {
    "12 turns, reasoning dropped": conversation,
    "20 agents, one system prompt, other tools in its text": agents,
    "the same, in `tools`": agents_with_tools,
    "an edit in the middle": edit,
}


def request(chat: Chat, max_tokens: int) -> dict[str, Any]:
    """Return the body of a request."""
    messages, tools = chat
    body = {"model": NAME, "messages": messages, "max_tokens": max_tokens, "temperature": 0}
    return body | ({"tools": tools} if tools else {})


def computed_tokens(answer: dict[str, Any]) -> int:
    """Return how many tokens of its prompt a server computed."""
    if "timings" in answer:  # llama-server's
        return int(answer["timings"]["prompt_n"])
    details = answer["usage"].get("prompt_tokens_details") or {}
    return int(answer["usage"]["prompt_tokens"]) - int(details.get("cached_tokens") or 0)


@dataclass
class Count:
    """Tokens of the prompts of a trace."""

    texts: Texts
    prompts: int = 0
    computed: int = 0
    least: int = 0
    seconds: float = 0.0
    other_prompts: int = 0  # that the server has rendered to another number of tokens
    _before: list[list[int]] = field(default_factory=list)

    def add(self, chat: Chat, answer: dict[str, Any], seconds: float) -> None:
        """Count a request."""
        tokens = self.texts.tokens(*chat)
        shared = max((_common(tokens, other) for other in self._before), default=0)
        self._before.append(tokens)
        self.least += len(tokens) - min(shared, len(tokens) - 1)
        self.computed += computed_tokens(answer)
        self.prompts += 1
        self.seconds += seconds
        self.other_prompts += answer["usage"]["prompt_tokens"] != len(tokens)

    def report(self) -> dict[str, Any]:
        """Return the figures."""
        return {
            "prompts": self.prompts,
            "computed": self.computed,
            "least": self.least,
            "ratio": round(self.computed / self.least, 3),
            "seconds": round(self.seconds, 2),
            "other_prompts": self.other_prompts,
        }


def _common(tokens: list[int], other: list[int]) -> int:
    pairs = zip(tokens, other, strict=False)
    return next((index for index, (left, right) in enumerate(pairs) if left != right), min(len(tokens), len(other)))


def run_trace(
    server: Server, texts: Texts, trace: Callable[[Texts], Iterator[Chat]], max_tokens: int
) -> dict[str, Any]:
    """Send a trace, and return its figures."""
    count = Count(texts)
    with httpx.Client(base_url=server.url, timeout=600) as client:
        for chat in trace(texts):
            begin = time.monotonic()
            response = client.post("/chat/completions", json=request(chat, max_tokens))
            response.raise_for_status()
            count.add(chat, response.json(), time.monotonic() - begin)
    return count.report()


def compare(options: argparse.Namespace, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Return the figures of each trace at each server; those that the file has are not measured again."""
    rows = json.loads(options.out.read_text(encoding="utf-8"))["rows"] if options.out.exists() else []
    measured = {(row["server"], row["trace"]) for row in rows}
    port = options.port
    for label, command in (text.split("=", 1) for text in options.servers):
        for name, trace in TRACES.items():
            if (label, name) in measured:
                continue
            log = options.out.with_suffix(f".{label}.log")
            with Server(command, port, log, model=options.model, name=NAME) as server:
                row: dict[str, Any] = {"server": label, "trace": name}
                try:
                    first = request(([{"role": "user", "content": "Hello."}], []), 1)
                    wait_until_it_answers(server, first, options.start_timeout)
                    row |= run_trace(server, Texts(options.model), trace, options.max_tokens)
                except (RuntimeError, httpx.HTTPError) as error:  # the others are measured all the same
                    row["error"] = str(error)
            say(str(row))
            rows.append(row)
            write_report(options, {"rows": rows})
            port += 1
    return rows


def write_report(options: argparse.Namespace, figures: dict[str, Any]) -> None:
    """Write what was measured so far."""
    head = {"date": date.today().isoformat(), "model": options.model.name, "max_tokens": options.max_tokens}
    options.out.write_text(json.dumps(head | figures, indent=1) + "\n", encoding="utf-8")


def table(rows: list[dict[str, Any]]) -> str:
    """Return the ratios as a Markdown table."""
    servers = list(dict.fromkeys(row["server"] for row in rows))
    lines = [f"| trace | at least | {' | '.join(servers)} |", "|---" * (len(servers) + 2) + "|"]
    for name in TRACES:
        by_server = {row["server"]: row for row in rows if row["trace"] == name}
        least = next((f"{row['least']:,}" for row in by_server.values() if "least" in row), "-")
        cells = [
            f"{row['computed']:,} ({row['ratio']:.2f})" if "ratio" in row else "-"
            for row in (by_server[server] for server in servers)
        ]
        lines.append(f"| {name} | {least} | {' | '.join(cells)} |")
    return "\n".join(lines)


async def _send_chats(server: Server, chats: list[list[Chat]], max_tokens: int) -> list[list[str]]:
    """Return the answers to all turns of all chats, eight chats at a time."""
    answers: list[list[str]] = [[] for _ in chats]
    async with httpx.AsyncClient(base_url=server.url, timeout=600) as client:
        for turn in range(max(map(len, chats))):
            left = iter([number for number, turns in enumerate(chats) if len(turns) > turn])

            async def work(left: Iterator[int] = left, turn: int = turn) -> None:
                for number in left:
                    response = await client.post("/chat/completions", json=request(chats[number][turn], max_tokens))
                    response.raise_for_status()
                    answers[number].append(response.json()["choices"][0]["message"]["content"])

            await asyncio.gather(*(work() for _ in range(8)))
    return answers


def _metric(server: Server, name: str) -> float:
    text = httpx.get(server.url.removesuffix("/v1") + "/metrics", timeout=60).text
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if re.match(rf"{name}[{{ ]", line))


def crowd(options: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """Return what 500 chats find of what fits for fewer, and whether each answer is that without a cache."""
    texts = Texts(options.model)
    system = texts.words(100)
    chats = [
        list(_turns(texts, [{"role": "system", "content": system}], 3 if number % 5 == 0 else 2, 40, 30))
        for number in range(500)
    ]
    command = options.servers[0].split("=", 1)[1]
    commands = {"with a cache": command, "without": f"{command} --no-enable-prefix-caching"}
    answers: dict[str, list[list[str]]] = {}
    report: dict[str, Any] = {"chats": len(chats), "budget": options.budget}
    for index, (label, line) in enumerate(commands.items()):
        log = options.out.with_suffix(f".{index}.log")
        with Server(line, options.port + index, log, model=options.model, name=NAME) as server:
            wait_until_it_answers(
                server, request(([{"role": "user", "content": "Hello."}], []), 1), options.start_timeout
            )
            answers[label] = asyncio.run(_send_chats(server, chats, options.max_tokens))
            if not index:
                names = ("snapshot_hits_total", "snapshots_saved_total", "snapshots_evicted_total", "snapshot_bytes")
                report |= {name: _metric(server, f"quire:state_{name}") for name in names}
        say(f"{label}: {sum(map(len, answers[label]))} answers")
    pairs = zip(*answers.values(), strict=True)
    report["answers"] = sum(map(len, answers["without"]))
    report["different"] = sum(one != other for left, right in pairs for one, other in zip(left, right, strict=True))
    return report


def main() -> None:
    """Measure, print the table and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("servers", nargs="+", metavar="NAME=COMMAND", help="ours first")
    parser.add_argument("--budget", type=int, help="send 500 chats; the states that the server is to keep")
    parser.add_argument("--max-tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--start-timeout", type=float, default=600)
    parser.add_argument("--port", type=int, default=8180)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()

    def say(line: str) -> None:
        print(line, flush=True)

    if options.budget is None:
        print(table(compare(options, say)))
    else:
        figures = crowd(options, say)
        print(json.dumps(figures, indent=1))
        write_report(options, figures)


if __name__ == "__main__":
    main()
