"""What followers of the prefix cache are told of a tier is what it has, whatever happens between two messages."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quire.engine.tiers.told import ToldBlocks

KEYS = st.sampled_from([b"a", b"b", b"c"])
DOINGS = st.lists(st.tuples(st.sampled_from(["stored", "removed", "take", "forget"]), KEYS))


@given(DOINGS)
def test_followers_know_what_is_there(doings: list[tuple[str, bytes]]) -> None:
    told, followed, there = ToldBlocks(), set[bytes](), set[bytes]()

    def take() -> None:
        changes = told.take()
        assert followed.isdisjoint(changes.stored)
        assert followed.issuperset(changes.removed)
        followed.update(changes.stored)
        followed.difference_update(changes.removed)

    for doing, key in doings:
        match doing:
            case "stored":
                told.stored(key)
                there.add(key)
            case "removed":
                told.removed(key)
                there.discard(key)
            case "forget":
                told.forget()
                followed.clear()
                there.clear()
            case _:
                take()
                assert followed == there
    take()
    assert followed == there
