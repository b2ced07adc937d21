"""Inputs of steps on a device: as the reference builder makes them, with padding; block tables follow the plans."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from quire.engine.client.sampling_params import SamplingParams
from quire.engine.execution.device_inputs import DeviceInputBuilder
from quire.engine.execution.inputs import DeviceMetadata, NumpyInputBuilder, StepInputs
from quire.engine.execution.pinned import PinnedBuffers
from quire.engine.execution.request_table import RequestTable
from quire.engine.scheduling.plan import NewSequence, RotaryPositions, ScheduledSequence, StepPlan

CPU = torch.device("cpu")
BLOCK = 4


@pytest.fixture(params=[(None,), (None, 5, 6)], ids=str, autouse=True)
def windows(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let all tests run with one group of layers, and with several."""
    Batch.windows = request.param
    yield
    Batch.windows = (None,)


class Batch:
    """A request table with sequences whose blocks are numbered as they come."""

    windows: tuple[int | None, ...] = (None,)

    def __init__(self, *sizes: int, rows: int = 6, rope_switch: int | None = None) -> None:
        self.table = RequestTable(rows, 64, BLOCK, rope_switch, windows=self.windows)
        self.builder = DeviceInputBuilder(self.table, CPU, sizes)
        self.reference = NumpyInputBuilder(self.table)
        self._next_block = 1

    def apply(self, *scheduled: ScheduledSequence, new: list[NewSequence] | None = None) -> list[ScheduledSequence]:
        self.table.apply(StepPlan(new=new or [], scheduled=list(scheduled)))
        return list(scheduled)

    def item(self, name: str, start: int, count: int, held: int, *, samples: bool = True) -> ScheduledSequence:
        """Tokens of a sequence that holds blocks for `held` tokens."""
        needed = (-(-(start + count) // BLOCK) - -(-held // BLOCK)) * len(self.windows)
        blocks = tuple(range(self._next_block, self._next_block + needed))
        self._next_block += needed
        return ScheduledSequence(name, start, count, blocks, samples)

    def enter(self, name: str, prompt: int, output: int = 0, *, long_rope: bool = False) -> NewSequence:
        tokens = np.arange(10, 10 + prompt + output, dtype=np.int32)
        return NewSequence(name, tokens, prompt, SamplingParams(max_tokens=9), None, uses_long_rope=long_rope)

    def check(self, scheduled: list[ScheduledSequence]) -> tuple[StepInputs, DeviceMetadata]:
        """Build a step twice, and compare all that both builders make."""
        actual, expected = self.builder.build(scheduled), self.reference.build(scheduled)
        count = expected.num_tokens
        assert actual.spans == expected.spans
        for name in ("token_ids", "positions"):
            torch.testing.assert_close(getattr(actual.model, name)[:count], getattr(expected.model, name))
        assert actual.last_block == expected.last_block
        assert actual.num_logits == expected.num_logits
        if actual.model.logits_indices is not None and expected.model.logits_indices is not None:
            torch.testing.assert_close(actual.model.logits_indices, expected.model.logits_indices)
        assert len(actual.groups) == len(expected.groups) == len(self.windows)
        for group, (inputs, of_group) in enumerate(zip(actual.groups, expected.groups, strict=True)):
            torch.testing.assert_close(inputs.slots[:count], of_group.slots)
            assert inputs.slots.data_ptr() % 16 == 0
            assert isinstance(inputs.attention, DeviceMetadata)
            self._check_tables(actual, group, inputs.attention)
        metadata = actual.groups[0].attention
        assert isinstance(metadata, DeviceMetadata)
        return actual, metadata

    def _check_tables(self, inputs: StepInputs, group: int, metadata: DeviceMetadata) -> None:
        """Each query's block table is that of its row, and its length that of its last position."""
        queries = [
            (span.row, length - 1, length)
            for span in inputs.spans
            if span.generated
            for length in range(span.start + 1, span.length + 1)
        ]
        queries += [(0, 0, 0)] * (len(metadata.singles.seq_lens) - len(queries))
        prompts = [(span.row, span.start, span.length) for span in inputs.spans if not span.generated]
        sampling = [span for span in inputs.spans if span.samples] if inputs.model.logits_indices is not None else []
        pairs = []
        for expected, part in (
            (queries, metadata.singles),
            (prompts, metadata.spans),
            ([(span.row, span.length - 1, span.length) for span in sampling], metadata.logits),
        ):
            assert part.seq_lens.tolist() == [length for *_, length in expected]
            assert part.seq_lens.data_ptr() % 16 == part.block_tables.data_ptr() % 16 == 0
            pairs += [*zip(expected, part.block_tables, strict=True)]
        window = self.windows[group]
        for (row, start, length), table in pairs:
            seen = slice(0 if window is None else max(0, start - window + 1) // BLOCK, -(-length // BLOCK))
            np.testing.assert_array_equal(table[seen].numpy(), self.table.blocks[group, row, seen])


def test_prompts_and_generated_tokens() -> None:
    """A recomputed output is a query for each token, whatever else is in the step."""
    batch = Batch(2, 4)
    scheduled = batch.apply(
        batch.item("a", 0, 7, 0),
        batch.item("b", 0, 1, 0),
        batch.item("c", 5, 3, 0),
        batch.item("d", 0, 5, 0, samples=False),
        new=[batch.enter("a", 7), batch.enter("b", 1), batch.enter("c", 5, 3), batch.enter("d", 9)],
    )
    actual, metadata = batch.check(scheduled)
    assert not actual.static
    assert len(metadata.singles.seq_lens) == 3
    assert metadata.query_starts.tolist() == [0, 7, 8, 13]


def test_prompts_with_three_rotary_positions() -> None:
    """Steps with such a prompt have three rows; what is generated behind it has one position, which is less far on."""
    batch = Batch(2, 4)
    positions = np.array([[0, 1, 1, 1, 1, 3], [0, 1, 1, 2, 2, 3], [0, 1, 2, 1, 2, 3]], np.int32)
    placed = replace(batch.enter("a", 6), positions=RotaryPositions(positions, 4))
    first = batch.apply(
        batch.item("a", 0, 4, 0, samples=False), batch.item("b", 0, 2, 0), new=[placed, batch.enter("b", 2)]
    )
    actual, _ = batch.check(first)
    assert sorted(zip(*actual.model.positions.tolist(), strict=True)) == [
        (0, 0, 0),
        (0, 0, 0),
        (1, 1, 1),
        (1, 1, 1),
        (1, 1, 2),
        (1, 2, 1),
    ]
    assert not actual.model.is_replayable
    batch.table.append(batch.table.row_of("b"), 50)
    actual, _ = batch.check(batch.apply(batch.item("a", 4, 2, 4), batch.item("b", 2, 1, 2)))
    assert actual.model.positions.tolist() == [[2, 1, 3], [2, 2, 3], [2, 2, 3]]
    batch.table.append(batch.table.row_of("a"), 50)
    actual, _ = batch.check(batch.apply(batch.item("a", 6, 1, 6)))
    assert actual.model.positions[0] == 4
    assert actual.static
    assert actual.model.is_replayable


def test_decode_steps_are_padded_and_stay_where_they_are() -> None:
    batch = Batch(2, 4)
    names = ["a", "b", "c"]
    batch.builder.build(
        batch.apply(*(batch.item(name, 0, 4, 0) for name in names), new=[batch.enter(name, 4) for name in names])
    )
    addresses = set()
    for position in range(4, 7):
        for name in names:
            batch.table.append(batch.table.row_of(name), 50 + position)
        actual, metadata = batch.check(batch.apply(*(batch.item(name, position, 1, position) for name in names)))
        assert actual.static
        assert actual.num_tokens == len(metadata.singles.seq_lens) == 4
        assert actual.groups[-1].slots[3:].tolist() == [-1]
        assert metadata.singles.seq_lens.tolist() == [position + 1] * 3 + [0]
        tensors = (
            actual.model.token_ids,
            actual.model.positions,
            actual.groups[-1].slots,
            metadata.singles.seq_lens,
            metadata.singles.block_tables,
        )
        addresses.add(tuple(tensor.data_ptr() for tensor in tensors))
    blank = batch.builder.blank(4)
    assert (blank.num_tokens, blank.num_logits) == (4, 0)
    assert blank.groups[-1].slots.tolist() == [-1] * 4
    addresses.add(
        (blank.model.token_ids.data_ptr(), blank.model.positions.data_ptr(), blank.groups[-1].slots.data_ptr())
    )
    assert (
        len({tensors[:3] for tensors in addresses}) == len({tensors for tensors in addresses if len(tensors) > 3}) == 1
    )


def test_adapters_are_sent_only_in_steps_that_use_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """All other inputs stay where they are."""
    sent, original = list[int](), PinnedBuffers.next

    def recording(self: PinnedBuffers, nbytes: int) -> Any:
        sent.append(nbytes)
        return original(self, nbytes)

    monkeypatch.setattr(PinnedBuffers, "next", recording)
    batch = Batch(2)
    entering = [replace(batch.enter("a", 5), lora_id=0), batch.enter("b", 5)]
    batch.builder.build(batch.apply(*(batch.item(name, 0, 5, 0) for name in "ab"), new=entering))

    def decode(names: str, position: int) -> StepInputs:
        for name in names:
            batch.table.append(batch.table.row_of(name), 50)
        return batch.builder.build(batch.apply(*(batch.item(name, position, 1, position) for name in names)))

    both, single = decode("ab", 5), decode("b", 6)
    assert both.model.lora_ids is not None
    adapted = batch.table.row_of("a")
    assert both.model.lora_ids.tokens.tolist() == [0 if span.row == adapted else -1 for span in both.spans]
    assert single.model.lora_ids is None
    assert single.static
    for tensors in (
        [step.model.token_ids for step in (both, single)],
        [step.groups[-1].slots for step in (both, single)],
    ):
        assert tensors[0].data_ptr() == tensors[1].data_ptr()
    assert sent[1] - sent[2] == 16  # two indices of 4 bytes, and padding


@pytest.mark.parametrize("sizes", [(), (1, 2)])
def test_more_sequences_than_the_largest_padded_size(sizes: tuple[int, ...]) -> None:
    batch = Batch(*sizes)
    names = ["a", "b", "c"]
    batch.builder.build(
        batch.apply(*(batch.item(name, 0, 3, 0) for name in names), new=[batch.enter(name, 3) for name in names])
    )
    for name in names:
        batch.table.append(batch.table.row_of(name), 60)
    actual, _ = batch.check(batch.apply(*(batch.item(name, 3, 1, 3) for name in names)))
    assert not actual.static
    assert actual.model.logits_indices is None


def test_tokens_that_only_the_device_knows() -> None:
    batch = Batch(4)
    batch.builder.build(
        batch.apply(batch.item("a", 0, 3, 0), batch.item("b", 0, 3, 0), new=[batch.enter("a", 3), batch.enter("b", 3)])
    )
    a, b = batch.table.row_of("a"), batch.table.row_of("b")
    batch.table.append(a, 70)
    position = batch.table.append_unknown(b)
    batch.builder.last_tokens[b] = 71
    actual = batch.builder.build(batch.apply(batch.item("a", 3, 1, 3), batch.item("b", 3, 1, 3)))
    by_row = dict(zip([span.row for span in actual.spans], actual.model.token_ids.tolist(), strict=False))
    assert by_row == {a: 70, b: 71}
    batch.table.set_token(b, position, 71)
    assert batch.table.known_tokens(b).tolist()[-1] == 71


def test_blocks_out_of_sight_are_forgotten_before_another_sequence_has_them() -> None:
    """Kernels that gather whole sequences would multiply what it writes there by 0, and NaN stays NaN."""
    batch = Batch()
    batch.check(batch.apply(batch.item("a", 0, 16, 0), new=[batch.enter("a", 40)]))
    row = batch.table.row_of("a")
    batch.check(batch.apply(batch.item("a", 16, 9, 16)))
    for group, window in enumerate(batch.windows):
        first = 0 if window is None else (16 - window + 1) // BLOCK
        table = batch.table.blocks[group, row, :7].tolist()
        assert table[:first] == [table[first]] * first
        assert len({*table[first:]}) == 7 - first
        assert {*table[first:]} <= {*batch.table.blocks_of(row)}


def test_a_row_that_is_filled_again_has_the_blocks_of_its_new_sequence() -> None:
    batch = Batch(1)
    batch.builder.build(batch.apply(batch.item("a", 0, 9, 0), new=[batch.enter("a", 9)]))
    batch.table.apply(StepPlan(removed=["a"]))
    batch.check(batch.apply(batch.item("b", 0, 6, 0), new=[batch.enter("b", 6)]))


def test_positions_of_a_long_rope_are_moved() -> None:
    batch = Batch(2, rope_switch=16)
    batch.check(batch.apply(batch.item("a", 0, 20, 0), new=[batch.enter("a", 20, long_rope=True)]))
