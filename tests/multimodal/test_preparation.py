"""Media of several kinds are prepared in memory that is reserved for all of them at once."""

from __future__ import annotations

import asyncio

import pytest

from quire.multimodal.errors import PromptError
from quire.multimodal.memory import MediaMemory, Reservation
from quire.multimodal.preparation import MemoryNeed, NeedsMore, prepare_together


class Media:
    """Media that take a moment to prepare, and may need more memory than they seem to."""

    def __init__(self, name: str, seems: int, needs: int | None = None) -> None:
        self.name = name
        self._seems = seems
        self._needs = seems if needs is None else needs

    @property
    def need(self) -> MemoryNeed:
        return MemoryNeed(self._seems, self._seems // 2, self.name)

    async def run(self, _: Reservation) -> str:
        await asyncio.sleep(0)
        if self._seems < self._needs:
            raise NeedsMore
        return self.name

    async def renew(self) -> None:
        self._seems = self._needs


async def test_two_requests_never_wait_for_each_other() -> None:
    """Each needs more for both of its kinds than is left when the other has what one kind needs."""
    memory = MediaMemory(1000, patience=10)
    requests = [[Media(f"sound {name}", 600), Media(f"picture {name}", 600)] for name in "ab"]
    results = await asyncio.gather(*(prepare_together(memory, media, "") for media in requests))
    assert results == [["sound a", "picture a"], ["sound b", "picture b"]]
    assert memory.held == 0


async def test_who_needs_more_than_was_thought_waits_for_it_without_holding_any() -> None:
    memory = MediaMemory(1000, patience=10)
    with await memory.reserve(500, "b"):
        preparing = asyncio.create_task(prepare_together(memory, [Media("sound", 100, 700)], "a"))
        while not memory.waiting:
            await asyncio.sleep(0)
        assert memory.held == 500
    assert await preparing == ["sound"]
    with pytest.raises(PromptError) as caught:
        await prepare_together(memory, [Media("sound", 100), Media("picture", 1000)], "a")
    assert caught.value.param == "picture"
