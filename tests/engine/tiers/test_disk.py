"""The disk tier: what survives a restart and a crash, what is noticed of damage, and the bound of its bytes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from quire.engine.tiers.budget import FolderBudget, FolderBusy, stored_files
from quire.engine.tiers.disk import DiskTier
from quire.engine.tiers.records import record_bytes

BLOCK = 5000  # bytes, which take two pages of the disk
TAKEN = record_bytes(BLOCK)


def content(number: int) -> bytes:
    return bytes((number + index) % 256 for index in range(BLOCK))


def key(number: int) -> bytes:
    return bytes((number % 256,)) + number.to_bytes(31, "big")


def open_tier(folder: Path, blocks: int = 100, model: str = "model") -> DiskTier:
    return DiskTier(folder, model, BLOCK, blocks * TAKEN)


def taken(folder: Path) -> int:
    return sum(file.nbytes for file in stored_files(folder))


def path_of(folder: Path, number: int) -> Path:
    (path,) = folder.glob(f"model/*/{key(number).hex()}.kv")
    return path


def use_at(folder: Path, number: int, seconds: float) -> None:
    os.utime(path_of(folder, number), (seconds, seconds))


def test_blocks_survive_a_restart(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    assert tier.put(key(1), content(1))
    tier.close()
    again = open_tier(tmp_path)
    assert again.has(key(1))
    assert not again.has(key(2))
    assert again.get(key(1)) == content(1)
    assert again.get(key(2)) is None


def test_a_block_of_another_model_is_not_there(tmp_path: Path) -> None:
    open_tier(tmp_path, model="other").put(key(1), content(1))
    tier = open_tier(tmp_path)
    assert not tier.has(key(1))
    assert tier.nbytes == TAKEN  # both share the bound


@pytest.mark.parametrize("damage", ["end", "header", "byte", "longer", "swapped", "empty"])
def test_a_damaged_file_is_noticed_and_removed(tmp_path: Path, damage: str) -> None:
    tier = open_tier(tmp_path)
    tier.put(key(1), content(1))
    tier.put(key(2), content(2))
    path = path_of(tmp_path, 1)
    whole = path.read_bytes()
    path.write_bytes(
        {
            "end": whole[:-1],
            "header": whole[:10],
            "byte": whole[:-1] + bytes((whole[-1] ^ 1,)),
            "longer": whole + b"\0",
            "swapped": path_of(tmp_path, 2).read_bytes(),
            "empty": b"",
        }[damage]
    )
    for found in (tier, open_tier(tmp_path)):
        assert found.get(key(1)) is None
        assert not found.has(key(1))
    assert not path.exists()
    assert tier.get(key(2)) == content(2)
    assert open_tier(tmp_path).nbytes == taken(tmp_path) == TAKEN


def test_files_that_are_not_blocks_stay(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, blocks=2)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "model" / "00").mkdir()
    (tmp_path / "model" / "00" / "notes.txt").write_text("mine")
    for number in range(6):
        tier.put(key(number), content(number))
    open_tier(tmp_path, blocks=1).clear()
    assert [path.name for path in tmp_path.rglob("*.txt")] == ["notes.txt", "notes.txt"]


def test_blocks_used_least_recently_are_removed(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, blocks=10)
    for number in range(10):
        tier.put(key(number), content(number))
        use_at(tmp_path, number, 1000 + number)
    tier.touch([key(0)])
    assert tier.put(key(10), content(10))
    assert not tier.has(key(1))
    assert tier.get(key(1)) is None
    assert all(tier.get(key(number)) == content(number) for number in (0, 3, 9, 10))
    assert tier.nbytes == taken(tmp_path) <= 10 * TAKEN


def test_a_smaller_bound_is_kept_from_the_start(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, blocks=10)
    for number in range(10):
        tier.put(key(number), content(number))
    tier.close()
    assert open_tier(tmp_path, blocks=4).nbytes == taken(tmp_path) <= 4 * TAKEN


def test_a_block_larger_than_the_bound_is_not_kept(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, "model", BLOCK, TAKEN - 1)
    assert not tier.put(key(1), content(1))
    assert (tier.nbytes, taken(tmp_path)) == (0, 0)


def test_servers_share_a_folder(tmp_path: Path) -> None:
    first, second = open_tier(tmp_path, blocks=6), open_tier(tmp_path, blocks=6)
    first.put(key(1), content(1))
    assert not second.has(key(1))
    second.refresh()
    assert second.get(key(1)) == content(1)
    assert second.put(key(1), content(1))
    assert first.nbytes == TAKEN
    for number in range(2, 12):
        (first, second)[number % 2].put(key(number), content(number))
        assert first.nbytes == second.nbytes == taken(tmp_path) <= 6 * TAKEN
    second.clear()
    assert (first.nbytes, first.get(key(11))) == (0, None)
    first.refresh()
    assert not any(first.has(key(number)) for number in range(12))


def test_a_disk_that_cannot_be_written_costs_no_block_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tier = open_tier(tmp_path)
    tier.put(key(1), content(1))

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "writev", full)
    assert not tier.put(key(2), content(2))
    assert not tier.put(key(3), content(3))
    assert caplog.text.count("No space left on device") == 1
    assert tier.get(key(1)) == content(1)
    assert tier.nbytes == taken(tmp_path) == TAKEN


def test_as_much_of_the_disk_stays_free_as_may_be_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, free = open_tier(tmp_path, blocks=4), 6 * TAKEN

    def disk_usage(_: Path) -> SimpleNamespace:
        return SimpleNamespace(free=free - taken(tmp_path))

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    assert [tier.put(key(number), content(number)) for number in range(4)] == [True, True, False, False]


def test_a_folder_that_another_process_holds_is_not_waited_for(tmp_path: Path) -> None:
    first, second = FolderBudget(tmp_path, TAKEN), FolderBudget(tmp_path, TAKEN)
    with first._locked(), pytest.raises(FolderBusy):
        second.add(1, lambda: None)


def test_blocks_are_forgotten_while_another_process_holds_the_folder(tmp_path: Path) -> None:
    """The count is too high then, and right again when room is made."""
    tier, other = open_tier(tmp_path, 4), FolderBudget(tmp_path, 4 * TAKEN)
    for number in range(3):
        tier.put(key(number), content(number))
    path_of(tmp_path, 1).write_bytes(b"torn")
    with other._locked():
        tier.evict([key(0)])
        find_again(tier)
    assert not tier.has(key(0))
    assert not tier.has(key(1))
    assert not list(tmp_path.glob(f"model/*/{key(1).hex()}.kv"))
    for number in range(3, 6):
        assert tier.put(key(number), content(number))
        assert taken(tmp_path) <= tier.nbytes <= 4 * TAKEN


def find_again(tier: DiskTier) -> None:
    """Look at all parts of a tier's folder."""
    tier._times.clear()
    tier.refresh()


def test_all_blocks_that_have_gone_are_told(tmp_path: Path) -> None:
    tier, other = open_tier(tmp_path, 10), open_tier(tmp_path, 10)
    for number in range(6):
        tier.put(key(number), content(number))
    assert not tier.take_removed()
    path_of(tmp_path, 0).write_bytes(b"damaged")
    tier.get(key(0))
    tier.evict([key(1)])
    path_of(tmp_path, 2).unlink()
    other.refresh()
    other.evict([key(3)])
    find_again(tier)
    assert sorted(tier.take_removed()) == [key(number) for number in range(4)]
    for number in range(6, 20):
        tier.put(key(number), content(number))
    gone = tier.take_removed()
    assert len(gone) > 5
    assert not any(map(tier.has, gone))


def test_a_folder_that_is_removed_is_made_again(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, 2)
    tier.put(key(1), content(1))
    shutil.rmtree(tmp_path / "model")
    assert tier.get(key(1)) is None
    assert tier.put(key(2), content(2))
    assert tier.put(key(3), content(3))
    assert tier.get(key(3)) == content(3)


_WRITER = """
import sys
from pathlib import Path
from types import SimpleNamespace
from quire.engine.tiers.disk import DiskTier
folder, block, limit, first = Path(sys.argv[1]), *map(int, sys.argv[2:])
tier = DiskTier(folder, "model", block, limit)
print("ready", flush=True)
for number in range(first, 10**6):
    kept, gone = (bytes((n % 64,)) + (n % 64).to_bytes(31, "big") for n in (number, number + 32))
    tier.put(kept, bytes((number % 64 + index) % 256 for index in range(block)))
    tier.evict([gone])
"""  # with the keys and the contents of `key` and `content`


def test_processes_that_are_killed_while_they_write_leave_whole_blocks(tmp_path: Path) -> None:
    """Two at a time, of which one is killed and replaced. A third reads what they write."""
    limit = 20

    def start(number: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", _WRITER, str(tmp_path), str(BLOCK), str(limit * TAKEN), str(number)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    survivor = start(0)
    reads = 0
    for attempt in range(3):
        victim = start(17 * attempt)
        tier = open_tier(tmp_path, limit)
        for _ in range(20 + attempt):
            tier.refresh()
            for number in range(64):
                if tier.has(key(number)) and (block := tier.get(key(number))) is not None:
                    assert block == content(number)
                    reads += 1
        tier.close()
        os.kill(victim.pid, signal.SIGKILL)
        victim.communicate()
        assert open_tier(tmp_path, limit).nbytes <= limit * TAKEN
    os.kill(survivor.pid, signal.SIGKILL)
    survivor.communicate()
    assert reads
    tier = open_tier(tmp_path, limit)
    assert tier.nbytes == taken(tmp_path) <= limit * TAKEN
    assert all(tier.get(key(number)) == content(number) for number in range(64) if tier.has(key(number)))


class Crashes(RuleBasedStateMachine):
    """Two servers on one folder, of which one dies within a write, and files that lose their ends.

    A block that is returned is the one that was put, and the bound holds after each operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self._temporary = tempfile.TemporaryDirectory()
        self.folder = Path(self._temporary.name)
        self.tiers = [open_tier(self.folder, 5), open_tier(self.folder, 5)]

    @rule(server=st.integers(0, 1), number=st.integers(0, 9))
    def put(self, server: int, number: int) -> None:
        assert self.tiers[server].put(key(number), content(number))
        assert self.tiers[server].has(key(number))

    @rule(server=st.integers(0, 1), number=st.integers(0, 9))
    def get(self, server: int, number: int) -> None:
        block = self.tiers[server].get(key(number))
        assert block in (None, content(number))
        assert block is None or list(self.folder.glob(f"*/*/{key(number).hex()}.kv"))

    @rule(server=st.integers(0, 1), number=st.integers(0, 9))
    def evict(self, server: int, number: int) -> None:
        self.tiers[server].evict([key(number)])
        assert self.tiers[server].get(key(number)) is None

    @rule(server=st.integers(0, 1), numbers=st.lists(st.integers(0, 9), max_size=3))
    def touch(self, server: int, numbers: list[int]) -> None:
        self.tiers[server].touch(map(key, numbers))

    @rule(server=st.integers(0, 1))
    def refresh(self, server: int) -> None:
        self.tiers[server].refresh()

    @rule(server=st.integers(0, 1), number=st.integers(0, 9), share=st.floats(0, 1))
    def die_within_a_write(self, server: int, number: int, share: float) -> None:
        """The process has counted the block, and written a part of the file."""
        tier = self.tiers[server]
        part = self.folder / "model" / key(number)[:1].hex()
        part.mkdir(exist_ok=True)
        tier._budget._write(tier.nbytes + TAKEN)
        (part / f"{key(number).hex()}.unfinished").write_bytes(content(number)[: int(share * BLOCK)])
        self.restart(server)

    @precondition(lambda self: bool(list(self.folder.glob("*/*/*.kv"))))
    @rule(index=st.integers(0, 9), share=st.floats(0, 1, exclude_max=True))
    def lose_the_end_of_a_file(self, index: int, share: float) -> None:
        """The machine has crashed before the file was on the disk."""
        files = sorted(self.folder.glob("*/*/*.kv"))
        path = files[index % len(files)]
        os.truncate(path, int(share * path.stat().st_size))

    @rule(server=st.integers(0, 1))
    def restart(self, server: int) -> None:
        self.tiers[server].close()
        self.tiers[server] = open_tier(self.folder, 5)
        assert self.tiers[server].nbytes == taken(self.folder)

    @invariant()
    def within_the_bound(self) -> None:
        assert taken(self.folder) <= 5 * TAKEN

    def teardown(self) -> None:
        for tier in self.tiers:
            tier.close()
        self._temporary.cleanup()


Crashes.TestCase.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)
TestCrashes = Crashes.TestCase


@given(st.binary(max_size=200))
@settings(max_examples=50, deadline=None)
def test_no_file_is_taken_for_a_block_that_was_not_put(tail: bytes) -> None:
    with tempfile.TemporaryDirectory() as name:
        tier = open_tier(Path(name))
        tier.put(key(1), content(1))
        path = path_of(Path(name), 1)
        path.write_bytes(path.read_bytes()[: len(tail)] + tail)
        assert tier.get(key(1)) is None
        tier.close()
