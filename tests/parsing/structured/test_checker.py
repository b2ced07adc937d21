"""Grammars are compiled in worker processes: what is too deep, too large or too slow is refused, and only that."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from quire.parsing.structured import checker as checker_module
from quire.parsing.structured.checker import GrammarChecker
from quire.parsing.structured.constraint import grammar_of
from quire.protocol.errors import InvalidRequest, Overloaded
from quire.protocol.structured import StructuredOutputs
from quire.workers.limits import WorkerLimits
from quire.workers.pool import WorkerPool
from tests.support.tokenizer import EOS, VOCAB_SIZE, write_tokenizer

CHAIN = 3000
KEYS = [f"k{i}" for i in range(CHAIN)]


def nested_properties(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


TOO_DEEP: dict[str, dict[str, Any]] = {
    "lark rules": {"grammar": "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(CHAIN)) + f'r{CHAIN}: "a"'},
    "lark terminals": {
        "grammar": "start: R0\n" + "".join(f"R{i}: R{i + 1}\n" for i in range(CHAIN)) + f'R{CHAIN}: "a"'
    },
    "gbnf": {"grammar": "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(CHAIN)) + f'r{CHAIN} ::= "a"'},
    "$ref": {
        "json": {
            "$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(CHAIN)} | {f"d{CHAIN}": {"type": "null"}},
            "$ref": "#/$defs/d0",
        }
    },
    "allOf": {
        "json": {
            "$defs": {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(CHAIN)}
            | {f"d{CHAIN}": {"type": "null"}},
            "$ref": "#/$defs/d0",
        }
    },
    "properties": {"json": nested_properties(150)},
}
TOO_EXPENSIVE: dict[str, dict[str, Any]] = {
    "optional characters": {"regex": "a?" * 100_000},
    "nested repetitions": {"regex": "(((a{100}){100}){100}){100}"},
    "repeated repetitions": {"regex": "(a{1000}){1000}"},
}
GOOD = {"json": {"type": "object", "properties": {"a": {"type": "integer"}}}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tokenizer(folder)
    return folder


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The jobs that all pools get."""
    results: list[Any] = []
    run = WorkerPool.run

    async def recording(self: WorkerPool, job: Any, *, tenant: str = "") -> Any:
        results.append(job)
        return await run(self, job, tenant=tenant)

    monkeypatch.setattr(WorkerPool, "run", recording)
    return results


@asynccontextmanager
async def running_checker(
    folder: Path, waiting: Callable[[], AbstractContextManager[None]] = nullcontext
) -> AsyncIterator[Callable[..., Any]]:
    checker = GrammarChecker(folder, VOCAB_SIZE, (EOS,), waiting=waiting)

    async def check(**kind: Any) -> Any:
        structure = StructuredOutputs.model_construct(
            **{"json_schema" if k == "json" else k: v for k, v in kind.items()}
        )
        return await checker.check(lambda special: grammar_of(structure, special), "structured_outputs")

    try:
        yield check
    finally:
        await checker.close()


@pytest.mark.parametrize("name", TOO_DEEP)
async def test_deep_grammars_are_refused(folder: Path, name: str) -> None:
    async with running_checker(folder) as check:
        with pytest.raises(InvalidRequest, match="levels deep; at most 256"):
            await check(**TOO_DEEP[name])
        assert (await check(**GOOD)).size > 0


@pytest.mark.parametrize("name", TOO_EXPENSIVE)
async def test_expensive_grammars_are_refused_once(
    folder: Path, jobs: list[Any], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(checker_module, "_LIMITS", WorkerLimits(64 << 20, 2.0, 64 << 20))
    async with running_checker(folder) as check:
        for _ in range(2):
            with pytest.raises(InvalidRequest, match=r"needs too much memory|MiB when it is compiled|to compile"):
                await check(**TOO_EXPENSIVE[name])
        assert (await check(**GOOD)).size > 0
    assert len([job for job in jobs if job is not None]) == 2


async def test_the_server_keeps_nothing_of_refused_grammars(folder: Path) -> None:
    async with running_checker(folder) as check:
        await check(**GOOD)
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        for number in range(20):
            with pytest.raises(InvalidRequest):
                await check(grammar=f"start: missing{number}\n// " + "x" * 1_000_000)
        held = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        assert held < 5_000_000


async def test_a_grammar_is_checked_once(folder: Path, jobs: list[Any]) -> None:
    waiting = list[int]()  # how many requests wait, after each change

    @contextmanager
    def count() -> Iterator[None]:
        waiting.append(sum(waiting[-1:]) + 1)
        yield
        waiting.append(waiting[-1] - 1)

    async with running_checker(folder, count) as check:
        first, *others = await asyncio.gather(*(check(**GOOD) for _ in range(100)))
        assert all(other == first for other in others)
        await check(**GOOD)
    assert len([job for job in jobs if job is not None]) == 1
    assert (max(waiting), waiting[-1]) == (100, 0)


async def test_expensive_grammars_do_not_delay_others(folder: Path) -> None:
    async with running_checker(folder) as check:
        await check(**GOOD)
        slow = [asyncio.create_task(check(regex="a?" * (100_000 + number))) for number in range(3)]
        await asyncio.sleep(0)
        for number in range(5):
            await check(json={"const": number})
        assert not all(task.done() for task in slow)
        for task in slow:
            task.cancel()
        await asyncio.wait(slow)


async def test_a_full_queue_is_not_the_fault_of_the_grammar(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = WorkerPool.__init__

    def small(self: WorkerPool, *args: Any, **settings: Any) -> None:
        made(self, *args, **settings, size=1, max_queued=2)

    monkeypatch.setattr(WorkerPool, "__init__", small)
    async with running_checker(folder) as check:
        await check(**GOOD)
        results = await asyncio.gather(*(check(json={"const": n}) for n in range(20)), return_exceptions=True)
        refused = [result for result in results if isinstance(result, BaseException)]
        assert all(isinstance(error, Overloaded) and error.headers["Retry-After"] for error in refused)
        assert 0 < len(refused) < 20
        assert (await check(json={"const": 1})).size > 0


async def test_a_gbnf_grammar_that_takes_too_long_to_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checker_module, "_LIMITS", WorkerLimits(256 << 20, 0.3, 64 << 20))
    groups = "\n".join(f'r{i} ::= ("a" | "b") r{i}?' for i in range(8_000))
    async with running_checker(folder) as check:
        with pytest.raises(InvalidRequest, match=r"more than 0\.3 s"):
            await check(grammar=f"root ::= r0\n{groups}")


@pytest.mark.parametrize("count", [1, 1999, 4096])
async def test_as_many_choices_as_documented(folder: Path, count: int) -> None:
    async with running_checker(folder) as check:
        assert (await check(choice=[f"text number {number}" for number in range(count)])).size > 0


async def test_a_model_without_a_fitting_tokenizer(tmp_path: Path) -> None:
    async with running_checker(tmp_path) as check:
        for _ in range(2):
            with pytest.raises(InvalidRequest, match=r"need a model with a tokenizer\.json"):
                await check(**GOOD)
