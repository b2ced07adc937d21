"""Drafter: n-gram drafts from earlier tokens, with a length that adapts to acceptance."""

from __future__ import annotations

from quire.engine.scheduling.drafter import Drafter


def test_a_draft_is_the_continuation_of_the_last_match() -> None:
    assert Drafter(8).draft([1, 2, 3, 9, 8, 7, 6, 1, 2, 3], 8) == (9, 8, 7, 6)


def test_the_longest_match_is_used() -> None:
    tokens = [5, 1, 2, 40, 41, 6, 1, 2, 50, 51, 5, 1, 2]
    assert Drafter(2).draft(tokens, 2) == (40, 41)  # after 5 1 2, not after the later 1 2


def test_a_repetition_is_drafted_beyond_its_end() -> None:
    drafter = Drafter(8)
    assert drafter.draft([7, 8, 7, 8], 8) == (7, 8, 7, 8)


def test_no_draft_without_a_match_or_room() -> None:
    assert Drafter(8).draft([1, 2, 3, 4], 8) == ()
    assert Drafter(8).draft([1], 8) == ()
    assert Drafter(8).draft([1, 2, 1, 2], 0) == ()


def test_drafts_grow_while_they_are_accepted() -> None:
    drafter, tokens = Drafter(16), [1, 2] * 20
    assert len(drafter.draft(tokens, 99)) == 4
    drafter.update(4, 4)
    assert len(drafter.draft(tokens, 99)) == 8
    drafter.update(8, 8)
    drafter.update(16, 16)
    assert len(drafter.draft(tokens, 99)) == 16
    drafter.update(16, 2)
    assert len(drafter.draft(tokens, 99)) == 3


def test_rejected_drafts_pause_drafting_for_longer() -> None:
    drafter, tokens = Drafter(4), [1, 2] * 20
    pauses = []
    for _ in range(4):
        drafter.update(4, 0)
        pause = 0
        while not drafter.draft(tokens, 99):
            pause += 1
        pauses.append(pause)
    assert pauses == [1, 2, 4, 8]
