"""A sampler whose tokens stay on the device until they are read, so that the next step need not wait for them.

Each request is sampled in one place, whatever else is in the batch: on the device if `fits_device`, else on the host,
from a copy of its logits. A step with a request of the host waits for its logits. A step with a grammar waits for the
tokens of the step before, from which the host computes masks. Other steps do not wait for the device.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from quire.engine.client.protocol import TokenLogprobs
from quire.engine.client.sampling_params import SamplingParams
from quire.engine.execution.pinned import Event, new_event, pinned_empty, to_device
from quire.engine.execution.request_table import RequestTable, Row
from quire.engine.execution.sampling.device_settings import DeviceSettings, NewRow
from quire.engine.execution.sampling.grammar import GrammarProcessor
from quire.engine.execution.sampling.pending import PendingTokens, SampledToken, TokenSampler
from quire.engine.execution.sampling.row_settings import RowUse, fits_device
from quire.engine.execution.sampling.sampler import GrammarStates, Sampler, verify_in_rounds
from quire.engine.scheduling.plan import NOT_FINITE, SequenceError
from quire.kernels.adjust_logits import add_biases, penalize
from quire.kernels.choose_tokens import argmax, choose_tokens
from quire.kernels.sampling import NO_TOKEN
from quire.kernels.sampling_state import record_tokens
from quire.kernels.token_bitmask import mask_logits
from quire.kernels.token_logprobs import Logprobs, token_logprobs

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Batch:
    """Rows of logits on the device; those of a sequence follow each other. See `record_tokens` and `penalize`.

    Attributes:
        rows: (n,) int64 rows of the table; depths: (n,) int32; inputs: (n,) int64.
        starts: (sequences,) int32; drafted: (sequences,) int32; holders: (sequences,) int64 rows of the table.
    """

    rows: Tensor
    depths: Tensor
    inputs: Tensor
    starts: Tensor
    drafted: Tensor
    holders: Tensor


@dataclass(frozen=True, slots=True)
class _Sampled:
    """What a device sampled, in host memory that holds it when `ready` is reached.

    Attributes:
        tokens: (n,) int64.
        taken: (sequences,) int32 tokens that each sequence takes.
        logprobs: of the rows of logits at the indices `reported`.
        counts: number of top tokens that each of these reports.
    """

    ready: Event
    tokens: Tensor
    taken: Tensor
    logprobs: Logprobs | None
    reported: Sequence[int]
    counts: Sequence[int]

    def read(self) -> list[SampledToken]:
        """Wait for the device; returns a token of each row of logits."""
        self.ready.synchronize()
        tokens = self.tokens.tolist()
        reports: dict[int, TokenLogprobs] = {}
        if self.logprobs is not None:
            lists = zip(*(part.tolist() for part in self.logprobs), strict=True)
            for i, count, (logprob, rank, ids, top) in zip(self.reported, self.counts, lists, strict=True):
                reports[i] = _report(tokens[i], logprob, rank, ids[:count], top[:count])
        return [
            SampledToken(0, None, NOT_FINITE) if token == NO_TOKEN else SampledToken(token, reports.get(i))
            for i, token in enumerate(tokens)
        ]


@dataclass(frozen=True, slots=True)
class DeviceTokens(PendingTokens):
    """Tokens that a device samples, and those of requests that the host has sampled.

    Attributes:
        rows: rows of the table that are sampled on the device.
        holders: what these rows held when their tokens were sampled.
        positions: where their tokens are in the table.
        errors: of these rows.
        on_host: other tokens, by index.
    """

    table: RequestTable
    sampled: _Sampled
    rows: Sequence[int]
    holders: Sequence[Row | None]
    positions: Sequence[int]
    errors: Mapping[int, SequenceError]
    on_host: Mapping[int, SampledToken]

    @override
    def is_done(self) -> bool:
        return self.sampled.ready.query()

    @override
    def result(self) -> list[SampledToken]:
        tokens = [
            sampled_token
            if row not in self.errors or sampled_token.error is not None
            else sampled_token._replace(error=self.errors[row])
            for row, sampled_token in zip(self.rows, self.sampled.read(), strict=True)
        ]
        for row, holder, position, sampled_token in zip(self.rows, self.holders, self.positions, tokens, strict=True):
            if self.table.holder(row) is holder:  # else its sequence has left the batch meanwhile
                self.table.set_token(row, position, sampled_token.token)
        order = iter(tokens)
        return [self.on_host.get(i) or next(order) for i in range(len(tokens) + len(self.on_host))]


class DeviceSampler(TokenSampler):
    """Samples on the device of the logits; see `Sampler` for what it computes."""

    max_steps_in_flight = 2

    def __init__(
        self,
        table: RequestTable,
        vocab_size: int,
        device: torch.device,
        last_tokens: Tensor | None = None,
        grammar_states: GrammarStates = lambda _: None,
    ) -> None:
        """`last_tokens`: (rows,) int64 on the device, where the last token of each row is kept; None for own memory."""
        rows = len(table.lengths)
        self._table = table
        self._device = device
        self._host = Sampler(table, vocab_size, grammar_states)
        self._grammars = GrammarProcessor(grammar_states, vocab_size)
        self._failed: dict[int, SequenceError] = {}  # rows whose grammar has no state
        self._unseen: list[tuple[_Sampled, list[tuple[int, int, Row | None]]]] = []  # tokens of rows with grammars
        self._settings = DeviceSettings(rows, vocab_size, device)
        self._last_tokens = torch.zeros(rows, dtype=torch.int64, device=device) if last_tokens is None else last_tokens
        self._zeros = torch.zeros(rows, dtype=torch.int64, device=device)
        self._zeros32, self._numbers = self._zeros.int(), torch.arange(rows, dtype=torch.int32, device=device)

    @override
    def update(self, freed: Iterable[int], filled: Iterable[int]) -> None:
        freed, on_host, new = [*freed], list[int](), list[NewRow]()
        for row in freed:
            self._settings.remove(row)
            self._grammars.remove(row)
            self._failed.pop(row, None)
        for row in filled:
            params = self._table[row].params
            if isinstance(params, SamplingParams) and fits_device(params):
                prompt, output = np.split(self._table.known_tokens(row), [self._table[row].prompt_len])
                new.append(NewRow(row, params, prompt, output))
            else:
                on_host.append(row)
        self._settings.add(new)
        for new_row in new:
            self._add_grammar(new_row.row, new_row.params)
        self._grammars.start_masks()
        self._host.update(freed, on_host)

    @override
    def start(self, logits: Tensor, rows: Sequence[int]) -> PendingTokens:
        on_device, on_host = self._divide(rows)
        if len(on_host) == len(rows):
            return self._host.start(logits, rows)
        host_logits = self._select(logits, on_host).cpu() if on_host else None
        device_rows = [rows[i] for i in on_device]
        by_grammar = [
            (i, row, self._table.holder(row)) for i, row in enumerate(device_rows) if row in self._grammars.rows
        ]
        if by_grammar:
            self._observe()
        sampled = self._sample(self._select(logits, on_device), device_rows, [()] * len(device_rows))
        errors = {**self._failed}
        if by_grammar:
            self._unseen.append((sampled, by_grammar))
            errors |= self._grammars.errors_of([row for _, row, _ in by_grammar])
        holders = [self._table.holder(row) for row in device_rows]
        positions = [self._table.append_unknown(row) for row in device_rows]
        known: dict[int, SampledToken] = {}
        if host_logits is not None:
            known = dict(zip(on_host, self._host.sample(host_logits, [rows[i] for i in on_host]), strict=True))
        return DeviceTokens(self._table, sampled, device_rows, holders, positions, errors, known)

    @override
    def verify(self, logits: Tensor, rows: Sequence[int], drafts: Sequence[Sequence[int]]) -> list[list[SampledToken]]:
        """Sample the tokens of sequences with drafts, as `Sampler.verify`; on the device all at once."""
        # What a grammar allows depends on the tokens of the draft, so it is asked for each of them.
        ends = np.cumsum([1 + len(draft) for draft in drafts]).tolist()
        at_once = [i for i, row in enumerate(rows) if row in self._settings.uses and row not in self._grammars.rows]
        in_rounds = sorted({*range(len(rows))} - {*at_once})
        accepted: dict[int, list[SampledToken]] = {}
        for part, verify in ((at_once, self._verify), (in_rounds, partial(verify_in_rounds, self.start))):
            if part:
                places = [place for i in part for place in range(ends[i] - 1 - len(drafts[i]), ends[i])]
                choices = verify(self._select(logits, places), [rows[i] for i in part], [drafts[i] for i in part])
                accepted.update(zip(part, choices, strict=True))
        return [accepted[i] for i in range(len(rows))]

    @override
    def close(self) -> None:
        self._host.close()
        self._grammars.close()

    def _verify(self, logits: Tensor, rows: Sequence[int], drafts: Sequence[Sequence[int]]) -> list[list[SampledToken]]:
        sampled = self._sample(logits, rows, drafts)
        tokens, begin, accepted = sampled.read(), 0, list[list[SampledToken]]()
        for row, draft, taken in zip(rows, drafts, sampled.taken.tolist(), strict=True):
            accepted.append(tokens[begin : begin + taken])
            begin += 1 + len(draft)
            for sampled_token in accepted[-1]:
                self._table.append(row, sampled_token.token)
        return accepted

    def _add_grammar(self, row: int, params: SamplingParams) -> None:
        try:
            self._grammars.add(row, params, self._table)
        except Exception as error:  # error boundary: only this sequence fails
            logger.exception("the grammar of request %s failed", self._table[row].request_id)
            self._failed[row] = SequenceError(f"sampling failed: {type(error).__name__}: {error}")

    def _observe(self) -> None:
        """Let grammars consume the tokens that were sampled, and start to compute the masks of the next ones."""
        for sampled, places in self._unseen:
            sampled.ready.synchronize()
            for place, row, holder in places:
                if self._table.holder(row) is holder and int(sampled.tokens[place]) != NO_TOKEN:
                    self._grammars.observe(row, int(sampled.tokens[place]))
        self._unseen.clear()
        self._grammars.start_masks()

    def _divide(self, rows: Sequence[int]) -> tuple[list[int], list[int]]:
        """Indices of the rows that are sampled on the device, and of those that are sampled on the host."""
        uses = self._settings.uses
        return (
            [i for i, row in enumerate(rows) if row in uses],
            [i for i, row in enumerate(rows) if row not in uses],
        )

    def _select(self, logits: Tensor, indices: Sequence[int]) -> Tensor:
        if len(indices) == len(logits):
            return logits
        return logits.index_select(0, to_device(np.array(indices, np.int64), self._device))

    def _sample(self, logits: Tensor, rows: Sequence[int], drafts: Sequence[Sequence[int]]) -> _Sampled:
        """Submit the sampling of rows on the device: of the last token of each, and of its draft."""
        uses = [
            self._settings.uses[row] for row, draft in zip(rows, drafts, strict=True) for _ in range(1 + len(draft))
        ]
        batch = self._batch(rows, drafts)
        reported = [i for i, use in enumerate(uses) if use.logprobs is not None]
        raw = self._select(logits, reported) if reported else None
        if any(use.adjusts for use in uses):
            raw = raw.clone() if raw is logits else raw
            self._adjust(logits, rows, batch, uses)
        tokens = self._choose(logits, batch, uses)
        taken = record_tokens(
            tokens,
            batch.inputs,
            batch.starts,
            batch.drafted,
            batch.holders,
            self._settings.positions,
            self._last_tokens,
            self._settings.seen if any(use.penalized for use in uses) else None,
        )
        logprobs, counts = None, [use.logprobs or 0 for use in uses if use.logprobs is not None]
        if raw is not None:
            chosen = tokens if len(reported) == len(tokens) else self._select(tokens, reported)
            logprobs = Logprobs(*map(self._to_host, token_logprobs(raw, chosen, max(counts))))
        sampled = _Sampled(
            new_event(self._device), self._to_host(tokens), self._to_host(taken), logprobs, reported, counts
        )
        sampled.ready.record()
        return sampled

    def _batch(self, rows: Sequence[int], drafts: Sequence[Sequence[int]]) -> _Batch:
        count, holders = len(rows), to_device(np.array(rows, np.int64), self._device)
        if not any(drafts):
            zeros = self._zeros32[:count]
            return _Batch(holders, zeros, self._zeros[:count], self._numbers[:count], zeros, holders)
        lengths = np.array([1 + len(draft) for draft in drafts])
        starts = np.cumsum(lengths) - lengths
        depths = np.arange(lengths.sum()) - np.repeat(starts, lengths)
        inputs = np.concatenate([np.array([0, *draft], np.int64) for draft in drafts])
        return _Batch(
            rows=to_device(np.repeat(np.array(rows, np.int64), lengths), self._device),
            depths=to_device(depths.astype(np.int32), self._device),
            inputs=to_device(inputs, self._device),
            starts=to_device(starts.astype(np.int32), self._device),
            drafted=to_device((lengths - 1).astype(np.int32), self._device),
            holders=holders,
        )

    def _adjust(self, logits: Tensor, rows: Sequence[int], batch: _Batch, uses: Sequence[RowUse]) -> None:
        """Change logits in place, in the order of `Sampler`. Sequences with grammars have one row of logits each."""
        settings = self._settings
        if any(use.masked for use in uses):
            mask_logits(logits, settings.masks, settings.mask_of_row(batch.rows))
        if any(use.biased for use in uses):
            add_biases(logits, batch.rows, self._positions(batch), settings.biases)
        if any(use.penalized for use in uses):
            penalize(logits, batch.rows, batch.depths, batch.inputs, settings.seen, settings.penalties)
        if any(use.grammar for use in uses):
            self._apply_grammars(logits, rows)

    def _apply_grammars(self, logits: Tensor, rows: Sequence[int]) -> None:
        """Send the masks of grammars and apply them; `rows` of the table, of all rows of logits."""
        indices = [i for i, row in enumerate(rows) if row in self._grammars.rows]
        if not indices:  # their grammars have failed
            return
        mask_of_row = np.full(len(rows), -1, np.int32)
        mask_of_row[indices] = np.arange(len(indices))
        masks = self._grammars.masks_of([rows[i] for i in indices]).view(np.int32)
        mask_logits(logits, to_device(masks, self._device), to_device(mask_of_row, self._device))

    def _choose(self, logits: Tensor, batch: _Batch, uses: Sequence[RowUse]) -> Tensor:
        if not any(use.random or use.ranked for use in uses):
            return argmax(logits)
        return choose_tokens(logits, self._settings.choice(batch.rows, self._positions(batch), uses))

    def _positions(self, batch: _Batch) -> Tensor:
        """(n,) int64: tokens that were generated before each row of logits."""
        return self._settings.positions.index_select(0, batch.rows) + batch.depths

    def _to_host(self, tensor: Tensor) -> Tensor:
        """A copy in host memory, which the device makes in the background."""
        return pinned_empty(tuple(tensor.shape), tensor.dtype, self._device).copy_(tensor, non_blocking=True)


def _report(token: int, logprob: float, rank: int, ids: list[int], top: list[float]) -> TokenLogprobs:
    return TokenLogprobs([token, *ids], [logprob, *top], [rank, *range(1, len(ids) + 1)])
