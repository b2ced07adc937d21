"""What followers of the prefix cache are told of a tier is what it has, whatever happens between two messages."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quire.engine.tiers.published import PublishedBlocks

KEYS = st.sampled_from([b"a", b"b", b"c"])
DOINGS = st.lists(st.tuples(st.sampled_from(["stored", "removed", "take", "forget"]), KEYS))


@given(DOINGS)
def test_followers_know_what_is_there(doings: list[tuple[str, bytes]]) -> None:
    published, followed, there = PublishedBlocks(), set[bytes](), set[bytes]()

    def take() -> None:
        changes = published.take()
        assert followed.isdisjoint(changes.stored)
        assert followed.issuperset(changes.removed)
        followed.update(changes.stored)
        followed.difference_update(changes.removed)

    for doing, key in doings:
        match doing:
            case "stored":
                published.stored(key)
                there.add(key)
            case "removed":
                published.removed(key)
                there.discard(key)
            case "forget":
                published.forget()
                followed.clear()
                there.clear()
            case _:
                take()
                assert followed == there
    take()
    assert followed == there
