"""Paged attention equals explicit attention over whole sequences."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels import native, paged_attention
from quire.kernels.int8_pages import dequantize_rows, scale_bytes
from quire.kernels.paged_attention import (
    AttentionMetadata,
    AttentionParams,
    paged_decode,
    paged_prefill,
    paged_varlen,
)
from quire.kernels.write_pages import write_pages
from tests.support.variants import slow_but
from tests.support.visible import visible_bounds, visible_mask

BLOCK = 4


def explicit_attention(q: Tensor, k: Tensor, v: Tensor, params: AttentionParams, seen: Tensor | None = None) -> Tensor:
    """Causal attention of the queries at the last len(q) positions, one head at a time, with all scores written out.

    `seen`: which positions each query attends to, if that is said otherwise.
    """
    tokens, heads, _ = q.shape
    length, kv_heads, _ = k.shape
    distance = torch.arange(length - tokens, length)[:, None] - torch.arange(length)
    hidden = (distance < 0) | (distance >= (length if params.window is None else params.window))
    hidden = hidden if seen is None else ~seen
    out = torch.zeros(tokens, heads, v.shape[2])
    for head in range(heads):
        shared = head // (heads // kv_heads)
        scores = q[:, head] @ k[:, shared].T * params.scale
        if params.softcap is not None:
            scores = torch.tanh(scores / params.softcap) * params.softcap
        if params.alibi is not None:
            scores = scores - params.alibi[head] * distance
        scores = scores.masked_fill(hidden, -torch.inf)
        if params.sinks is not None:
            weights = torch.cat((scores, params.sinks[head].expand(tokens, 1)), 1).softmax(1)[:, :-1]
        else:
            weights = scores.softmax(1)
        out[:, head] = weights @ v[:, shared]
    return out


def paged(sequences: list[tuple[Tensor, Tensor]], blocks: int = 40) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Pages with the keys and values of all sequences in shuffled blocks, and noise elsewhere; their block tables.

    The heads of a block are contiguous, as in the engine's cache.
    """
    kv_heads, dim, value_dim = sequences[0][0].shape[1], sequences[0][0].shape[2], sequences[0][1].shape[2]
    keys, values = (torch.randn(blocks, kv_heads, BLOCK, size).transpose(0, 1) for size in (dim, value_dim))
    free = torch.randperm(blocks).tolist()
    tables = []
    for k, v in sequences:
        table = torch.tensor([free.pop() for _ in range(-(-len(k) // BLOCK))])
        position = torch.arange(len(k))
        slots = table[position // BLOCK] * BLOCK + position % BLOCK
        write_pages(keys, values, slots, k, v)
        tables.append(table)
    return keys, values, tables


def all_params(heads: int) -> list[AttentionParams]:
    sinks = torch.randn(heads)
    return [
        AttentionParams(0.3),
        AttentionParams(0.3, window=5),
        AttentionParams(0.3, softcap=2.0),
        AttentionParams(0.3, sinks=sinks),
        AttentionParams(0.3, window=6, softcap=3.0, sinks=sinks),
    ]


def alibi_params(heads: int) -> list[AttentionParams]:
    slopes = torch.rand(heads)
    return [
        AttentionParams(0.3, window, softcap, alibi=slopes) for window, softcap in ((None, None), (6, None), (6, 3.0))
    ]


def packed(tables: list[Tensor]) -> Tensor:
    """Block tables padded to one tensor."""
    width = max(map(len, tables))
    return torch.stack([F.pad(table, (0, width - len(table))) for table in tables]).int()


SIZES = [(4, 4, 8, 8), (6, 2, 8, 8), (4, 1, 12, 8), (6, 2, 32, 96), (8, 1, 96, 64), (5, 1, 64, 128), (3, 3, 32, 32)]


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "value_dim"), SIZES)
@pytest.mark.parametrize("which", range(8))
def test_decode(heads: int, kv_heads: int, dim: int, value_dim: int, which: int) -> None:
    torch.manual_seed(0)
    params = [*all_params(heads), *alibi_params(heads)][which]
    lengths = [1, 4, 5, 13, 16]
    sequences = [(torch.randn(n, kv_heads, dim), torch.randn(n, kv_heads, value_dim)) for n in lengths]
    keys, values, tables = paged(sequences)
    q = torch.randn(len(lengths), heads, dim)
    out = paged_decode(q, keys, values, packed(tables), torch.tensor(lengths), params)
    for i, (k, v) in enumerate(sequences):
        torch.testing.assert_close(out[i : i + 1], explicit_attention(q[i : i + 1], k, v, params))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 300, 256, 7])
@pytest.mark.parametrize("alibi", [False, True])
def test_long_sequences_read_in_place(dtype: torch.dtype, window: int | None, alibi: bool) -> None:
    """Sequences of several chunks: each alone is bitwise equal to all together, and close to the reference."""
    torch.manual_seed(0)
    lengths = [700, 255, 256, 257, 1, 513]
    sequences = [(torch.randn(n, 2, 64), torch.randn(n, 2, 32)) for n in lengths]
    keys, values, tables = paged(sequences, blocks=600)
    keys, values, q = keys.to(dtype), values.to(dtype), torch.randn(len(lengths), 6, 64).to(dtype)
    params = AttentionParams(0.2, window=window, softcap=20.0, sinks=torch.randn(6))
    if alibi:
        params = AttentionParams(0.2, window=window, alibi=torch.tensor([0.5, 0.25, 0.1, 0.05, 0.01, 0.001]))
    out = paged_decode(q, keys, values, packed(tables), torch.tensor(lengths), params)
    for i, length in enumerate(lengths):
        alone = paged_decode(q[i : i + 1], keys, values, tables[i][None].int(), torch.tensor([length]), params)
        assert torch.equal(alone, out[i : i + 1])
    with native.disabled():
        expected = paged_decode(q, keys, values, packed(tables), torch.tensor(lengths), params)
    tolerance = 2e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_chunk_whose_scores_are_all_minus_infinity_changes_nothing(dtype: torch.dtype) -> None:
    """All positions past the first 256, which are a chunk, have a score of minus infinity."""
    torch.manual_seed(0)
    k, v, q = torch.randn(260, 1, 64), torch.randn(260, 1, 64), torch.randn(1, 1, 64)
    q[..., 0], k[256:, :, 0] = -1.0, torch.inf
    keys, values, tables = paged([(k, v)], blocks=65)
    keys, values, q = keys.to(dtype), values.to(dtype), q.to(dtype)
    table, params = packed(tables), AttentionParams(0.125)
    out = paged_decode(q, keys, values, table, torch.tensor([260]), params)
    torch.testing.assert_close(out, paged_decode(q, keys, values, table, torch.tensor([256]), params))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2), (5, 1), (64, 1)])
@pytest.mark.parametrize("window", [None, 290])
def test_a_shared_prefix_changes_nothing(dtype: torch.dtype, heads: int, kv_heads: int, window: int | None) -> None:
    """Sequences of which some share their first blocks: bitwise equal to each sequence alone."""
    torch.manual_seed(0)
    first, params = 520, AttentionParams(0.3, window=window)
    lengths = torch.tensor([521, 530, 522, 700, 521, 300, 530])
    blocks = -(-int(lengths.max()) // BLOCK)
    keys, values = (torch.randn(1000, kv_heads, BLOCK, 64).transpose(0, 1).to(dtype) for _ in range(2))
    tables = torch.randperm(1000)[: 4 * blocks].view(4, blocks)[[0, 0, 1, 0, 1, 2, 3]].int()
    free = iter(set(range(1000)) - set(tables.flatten().tolist()))
    for table in tables[:5]:
        table[first // BLOCK :] = torch.tensor([next(free) for _ in range(blocks - first // BLOCK)])
    q = torch.randn(len(lengths), heads, 64).to(dtype)
    together = paged_decode(q, keys, values, tables, lengths, params)
    for i in range(len(lengths)):
        alone = paged_decode(q[i : i + 1], keys, values, tables[i : i + 1], lengths[i : i + 1], params)
        assert torch.equal(together[i : i + 1], alone)
    reference = paged_attention.decode_reference(q.float(), keys.float(), values.float(), tables, lengths, params)
    rough = {"rtol": 0.02, "atol": 0.02} if dtype is torch.bfloat16 else {}
    torch.testing.assert_close(together.float(), reference, **rough)  # type: ignore[arg-type]


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "value_dim"), [(4, 4, 8, 8), (6, 2, 8, 8), (4, 1, 12, 8)])
@pytest.mark.parametrize("which", range(5))
@pytest.mark.parametrize(("tokens", "length"), [(7, 7), (3, 14), (14, 15), (2, 2)])
def test_prefill(heads: int, kv_heads: int, dim: int, value_dim: int, which: int, tokens: int, length: int) -> None:
    torch.manual_seed(0)
    params = all_params(heads)[which]
    k, v = torch.randn(length, kv_heads, dim), torch.randn(length, kv_heads, value_dim)
    keys, values, (table,) = paged([(k, v)])
    q = torch.randn(tokens, heads, dim)
    out = paged_prefill(q, keys, values, table, length, params)
    torch.testing.assert_close(out, explicit_attention(q, k, v, params))


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "value_dim"), [(4, 4, 32, 32), (6, 2, 64, 96), (3, 1, 96, 32)])
@pytest.mark.parametrize("which", range(6))
@pytest.mark.parametrize(("tokens", "length"), [(2, 2), (13, 13), (3, 70), (64, 64), (100, 131)])
def test_compiled_prefill(
    heads: int, kv_heads: int, dim: int, value_dim: int, which: int, tokens: int, length: int
) -> None:
    """And the result of a query does not depend on how many queries there are."""
    torch.manual_seed(0)
    params = [*all_params(heads), AttentionParams(0.2, window=40)][which]
    k, v = torch.randn(length, kv_heads, dim).bfloat16(), torch.randn(length, kv_heads, value_dim).bfloat16()
    keys, values, (table,) = paged([(k.float(), v.float())])
    keys[:, [block for block in range(40) if block not in table]] = torch.nan
    keys, values, table = keys.bfloat16(), values.bfloat16(), table.int()
    q = torch.randn(tokens, heads, dim).bfloat16()
    out = paged_prefill(q, keys, values, table, length, params)
    expected = explicit_attention(q.float(), k.float(), v.float(), params)
    torch.testing.assert_close(out.float(), expected, atol=0.03, rtol=0.03)
    part = paged_prefill(q[: tokens // 2 + 1], keys, values, table, length - tokens + tokens // 2 + 1, params)
    if native.instructions() is not None:
        assert torch.equal(part, out[: tokens // 2 + 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("which", range(6))
@pytest.mark.parametrize("ignores_windows", [False, True])
def test_attention_in_both_directions(dtype: torch.dtype, which: int, ignores_windows: bool) -> None:
    """Within two spans, of which one is longer than the windows, and one than a tile of queries.

    In bfloat16 results have the same bits in chunks, also if the first positions of a span are cached; and tokens
    outside of spans those that they have without any.
    """
    torch.manual_seed(0)
    heads, kv_heads, dim, length, spans = 4, 2, 64, 150, ((7, 30), (40, 131))
    params = [*all_params(heads), AttentionParams(0.2, window=40)][which]
    k, v = (torch.randn(length, kv_heads, dim).to(dtype) for _ in range(2))
    keys, values, (table,) = paged([(k.float(), v.float())], blocks=64)
    keys, values, table = keys.to(dtype), values.to(dtype), table.int()
    q = torch.randn(length, heads, dim).to(dtype)
    bounds = visible_bounds(length, spans, ignores_windows=ignores_windows)
    out = paged_prefill(q, keys, values, table, length, params, bounds)
    expected = explicit_attention(q.float(), k.float(), v.float(), params, visible_mask(bounds, params.window))
    tolerance = 2e-5 if dtype is torch.float32 else 0.03
    torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=tolerance)
    if dtype is torch.float32 or native.instructions() is None:
        return
    for begin, end in ((0, 30), (20, 30), (30, 140), (97, 131), (131, 150)):
        part = paged_prefill(q[begin:end], keys, values, table, end, params, bounds[begin:end])
        assert torch.equal(part, out[begin:end])
    causal = paged_prefill(q, keys, values, table, length, params)
    outside = [row for row in range(length) if not any(start <= row < end for start, end in spans)]
    assert torch.equal(causal[outside], out[outside])
    assert not torch.equal(causal[50], out[50])


@pytest.mark.skipif(not native.has_bfloat16(), reason="needs dot products of bfloat16")
@pytest.mark.parametrize(
    ("singles", "counts"),
    [(2, [1, 1]), (0, [7]), (1, [1, 40, 3, 3]), (0, [64, 64, 20, 64]), (1, [1, 1, 40]), (0, [1, 1])],
)
@pytest.mark.parametrize(
    ("size", "shared"), slow_but(product([3, 16, 48], [0, 20, 100]), (3, 100), (16, 0), (48, 20), (16, 100))
)
@pytest.mark.parametrize("which", range(6))
@pytest.mark.parametrize("int8", [False, True])
def test_spans_in_one_call(singles: int, counts: list[int], shared: int, which: int, int8: bool, size: int) -> None:
    """Each span is bitwise equal to the span alone, also if the spans before it share its first blocks.

    Two threads have two heads of keys and values, which they share, or six, of which each packs some.
    """
    torch.manual_seed(shared)
    heads, kv_heads, dim, blocks = 6, (2, 6)[which % 2], 64, -(-480 // size)
    params = [*all_params(heads), AttentionParams(0.3, window=50)][which]
    keys, values = (
        torch.zeros(kv_heads, blocks, size, scale_bytes(dim) + dim, dtype=torch.int8)
        if int8
        else torch.zeros(kv_heads, blocks, size, dim).bfloat16()
        for _ in range(2)
    )
    k, v = torch.randn(2, blocks * size, kv_heads, dim).bfloat16()
    write_pages(keys, values, torch.arange(blocks * size), k, v)
    lengths = [shared + count + 2 * i for i, count in enumerate(counts)]
    tables = torch.stack([torch.randperm(blocks) for _ in counts]).int()
    tables[1:, : shared // size] = tables[:1, : shared // size]
    spans = AttentionMetadata(tables, torch.tensor(lengths), torch.tensor([singles, len(counts), *counts]))
    q = torch.randn(sum(counts), heads, dim).bfloat16()
    together = paged_varlen(q, keys, values, spans, params)
    for i, (part, out) in enumerate(zip(q.split(counts), together.split(counts), strict=True)):
        if i < singles:
            alone = paged_decode(part, keys, values, tables[i : i + 1], spans.seq_lens[i : i + 1], params)
        else:
            alone = paged_prefill(part, keys, values, tables[i], lengths[i], params)
        assert torch.equal(out, alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 40.0, 1e4])
@pytest.mark.parametrize("sink", [None, -torch.inf, -300.0, 0.0, 300.0])
def test_scores_of_any_size(dtype: torch.dtype, scale: float, sink: float | None) -> None:
    """Chunks whose largest scores are far apart: what has no weight adds nothing, and the rest is not off."""
    torch.manual_seed(0)
    length = 1030
    k, v = torch.randn(length, 1, 32), torch.randn(length, 1, 32)
    k *= torch.tensor([0.01, 1.0, 3.0, 0.1, 2.0]).repeat_interleave(256)[:length, None, None]
    keys, values, (table,) = paged([(k, v)], blocks=300)
    keys, values, q, table = keys.to(dtype), values.to(dtype), torch.randn(40, 4, 32).to(dtype), table.int()
    params = AttentionParams(scale, sinks=None if sink is None else torch.full((4,), sink))
    lengths = torch.arange(length - 40, length) + 1
    out = paged_decode(q, keys, values, table.expand(40, -1), lengths, params)
    with native.disabled():
        expected = paged_decode(q.float(), keys.float(), values.float(), table.expand(40, -1), lengths, params)
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=tolerance)
    span = paged_prefill(q, keys, values, table, length, params)
    torch.testing.assert_close(span.float(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.skipif(native.instructions() is None, reason="torch sums in other orders")
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "value_dim"),
    [(6, 2, 64, 64), (3, 1, 96, 32), (4, 4, 128, 128), (2, 1, 256, 256), (2, 1, 576, 512)],
)
@pytest.mark.parametrize("which", range(6))
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("size", [4, 16, 48])
def test_a_token_has_the_same_bits_alone_and_in_a_span(
    heads: int, kv_heads: int, dim: int, value_dim: int, which: int, int8: bool, size: int
) -> None:
    """So generated tokens leave the same keys and values in the cache as the same tokens in a prompt."""
    torch.manual_seed(which)
    length, tokens = 580, 300
    params = [*all_params(heads), AttentionParams(dim**-0.5, window=270)][which]
    blocks = -(-length // size)
    keys, values = (
        torch.zeros(kv_heads, blocks, size, scale_bytes(width) + width, dtype=torch.int8)
        if int8
        else torch.zeros(kv_heads, blocks, size, width).bfloat16()
        for width in (dim, value_dim)
    )
    k, v = torch.randn(length, kv_heads, dim).bfloat16(), torch.randn(length, kv_heads, value_dim).bfloat16()
    table = torch.randperm(blocks).int()
    positions = torch.arange(length)
    write_pages(keys, values, table[positions // size] * size + positions % size, k, v)
    q = torch.randn(tokens, heads, dim).bfloat16()
    span = paged_prefill(q, keys, values, table, length, params)
    lengths = torch.arange(length - tokens, length) + 1
    alone = paged_decode(q, keys, values, table.expand(tokens, -1), lengths, params)
    assert torch.equal(span, alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_with_strides(dtype: torch.dtype) -> None:
    """Some models' queries are a view of a projection with keys and values; NaN is kept."""
    torch.manual_seed(0)
    k, v = torch.randn(40, 2, 32), torch.randn(40, 2, 32)
    keys, values, (table,) = paged([(k, v)])
    keys, values, table = keys.to(dtype), values.to(dtype), table.int()
    rows = torch.randn(5, 4, 96).to(dtype)
    rows[4, 0] = torch.nan
    q = rows[..., 32:64]
    for params in (AttentionParams(0.3), AttentionParams(0.3, softcap=2.0)):
        packed_q = q.contiguous()
        out = paged_prefill(q, keys, values, table, 40, params)
        torch.testing.assert_close(out, paged_prefill(packed_q, keys, values, table, 40, params), equal_nan=True)
        assert out[:4].isfinite().all()
        last = paged_decode(q[4:], keys, values, table[None], torch.tensor([40]), params)
        assert last[0, 0].isnan().all()
        assert last[0, 1:].isfinite().all()
        tolerance = 1e-5 if dtype == torch.float32 else 0.02
        torch.testing.assert_close(last, out[4:], equal_nan=True, atol=tolerance, rtol=tolerance)


def test_prefill_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores that would take too much memory are computed for some queries at a time."""
    torch.manual_seed(0)
    params = AttentionParams(0.3, softcap=2.0)
    k, v = torch.randn(15, 2, 8), torch.randn(15, 2, 8)
    keys, values, (table,) = paged([(k, v)])
    q = torch.randn(11, 4, 8)
    monkeypatch.setattr(paged_attention, "_MAX_SCORES", 4 * 15 * 3)
    torch.testing.assert_close(paged_prefill(q, keys, values, table, 15, params), explicit_attention(q, k, v, params))


@pytest.mark.parametrize(("dim", "part"), [(12, 8), (96, 64)])
def test_values_that_are_a_view_of_the_keys(dim: int, part: int) -> None:
    torch.manual_seed(0)
    k = torch.randn(9, 1, dim)
    keys, _, (table,) = paged([(k, k)])
    q = torch.randn(1, 4, dim)
    params = AttentionParams(0.3)
    out = paged_decode(q, keys, keys[..., :part], table[None].int(), torch.tensor([9]), params)
    torch.testing.assert_close(out, explicit_attention(q, k, k[..., :part], params))


@pytest.mark.parametrize("dim", [8, 32])
@pytest.mark.parametrize("which", range(5))
def test_stale_contents_of_pages_do_not_matter(which: int, dim: int) -> None:
    torch.manual_seed(0)
    params = all_params(4)[which]
    lengths = [5, 14]
    sequences = [(torch.randn(n, 2, dim), torch.randn(n, 2, dim)) for n in lengths]
    keys, values, tables = paged(sequences)
    clean = values.clone()
    table = packed(tables)
    q = torch.randn(2, 4, dim)
    mine = {int(block) for table in tables for block in table}
    for block in range(values.shape[1]):
        if block not in mine:
            keys[:, block], values[:, block] = torch.nan, torch.inf
    values[:, tables[0][1], 1:] = torch.nan  # past the first sequence's last position
    out = paged_decode(q, keys, values, table, torch.tensor(lengths), params)
    torch.testing.assert_close(out, paged_decode(q, keys, clean, table, torch.tensor(lengths), params))
    assert out.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "value_dim"), [(6, 2, 64, 64), (5, 1, 96, 64), (4, 4, 8, 8)])
@pytest.mark.parametrize("which", range(5))
def test_int8_pages(dtype: torch.dtype, heads: int, kv_heads: int, dim: int, value_dim: int, which: int) -> None:
    """Pages of int8: the kernel is close to the reference, and both to what plain pages give."""
    torch.manual_seed(0)
    params, lengths = all_params(heads)[which], [1, 5, 300, 70]
    plain = [torch.zeros(kv_heads, 120, BLOCK, size, dtype=dtype) for size in (dim, value_dim)]
    small, same = ([empty_int8(kv_heads, size) for size in (dim, value_dim)] for _ in range(2))
    free, tables = torch.randperm(120).tolist(), []
    for length in lengths:
        table = torch.tensor([free.pop() for _ in range(-(-length // BLOCK))])
        slots = (table[:, None] * BLOCK + torch.arange(BLOCK)).flatten()[:length]
        k, v = (torch.randn(length, kv_heads, size).to(dtype) for size in (dim, value_dim))
        write_pages(plain[0], plain[1], slots, k, v)
        write_pages(small[0], small[1], slots, k, v)
        with native.disabled():
            write_pages(same[0], same[1], slots, k, v)
        tables.append(table)
    for pages, others in zip(small, same, strict=True):
        torch.testing.assert_close(
            dequantize_rows(pages, torch.float32), dequantize_rows(others, torch.float32), rtol=0, atol=0.04
        )
    q, q_long = torch.randn(4, heads, dim).to(dtype), torch.randn(20, heads, dim).to(dtype)

    def attend(pages: list[Tensor]) -> tuple[Tensor, Tensor]:
        decoded = paged_decode(q, pages[0], pages[1], packed(tables), torch.tensor(lengths), params)
        return decoded.float(), paged_prefill(q_long, pages[0], pages[1], tables[3].int(), 70, params).float()

    compiled, exact = attend(small), attend(plain)
    with native.disabled():
        reference = attend(small)
    for actual, expected, plain_result in zip(compiled, reference, exact, strict=True):
        is_rough = dtype is torch.bfloat16  # whose products are of integers: see TOLERANCE in test_int8_attention.py
        torch.testing.assert_close(actual, expected, rtol=0.02, atol=0.08 if is_rough else 1e-5)
        torch.testing.assert_close(actual, plain_result, rtol=0.05, atol=0.15 if is_rough else 0.05)


def empty_int8(kv_heads: int, size: int) -> Tensor:
    return torch.zeros(kv_heads, 120, BLOCK, scale_bytes(size) + size, dtype=torch.int8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("dim", "value_dim"), [(64, 64), (96, 160), (256, 256)])
def test_int8_pages_are_plain_pages_of_their_numbers(dtype: torch.dtype, dim: int, value_dim: int) -> None:
    """Bit for bit, but where products are of integers.

    Each 64 elements have a scale: small ones beside large ones are not lost.
    """
    if dtype is torch.bfloat16 and native.instructions() in ("avx512bf16", "avx512vnni"):
        pytest.skip("queries are quantized, see test_int8_attention.py")
    torch.manual_seed(0)
    lengths = torch.tensor([7, 70])
    small = (empty_int8(2, dim), empty_int8(2, value_dim))
    k, v = (torch.randn(120 * BLOCK, 2, size) for size in (dim, value_dim))
    k[..., 64:] *= 1000
    v[..., 64:] *= 1000
    write_pages(*small, torch.arange(len(k)), k.to(dtype), v.to(dtype))
    plain = (dequantize_rows(small[0], dtype), dequantize_rows(small[1], dtype))
    stored = plain[0].flatten(1, 2).transpose(0, 1).float()
    assert (stored - k)[..., :64].abs().amax() < 0.04
    tables, params = torch.randperm(120)[: 2 * 40].view(2, 40).int(), AttentionParams(0.05 if dim == 64 else 1e-6)
    q = torch.randn(30, 6, dim).to(dtype)
    decoded = [paged_decode(q[:2], *pages, tables, lengths, params) for pages in (small, plain)]
    prefilled = [paged_prefill(q, *pages, tables[1], 70, params) for pages in (small, plain)]
    assert torch.equal(*decoded)
    assert torch.equal(*prefilled)


def test_int8_values_that_are_a_view_of_the_keys() -> None:
    torch.manual_seed(0)
    keys = empty_int8(1, 96)
    values = keys[..., scale_bytes(96) - scale_bytes(64) : scale_bytes(96) + 64]
    k = torch.randn(9, 1, 96)
    write_pages(keys, values, torch.arange(9), k, None)
    q = torch.randn(1, 4, 96)
    out = paged_decode(q, keys, values, torch.arange(3)[None].int(), torch.tensor([9]), AttentionParams(0.1))
    torch.testing.assert_close(out, explicit_attention(q, k, k[..., :64], AttentionParams(0.1)), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("odd", [torch.inf, torch.nan])
def test_an_int8_row_with_nan_or_inf_is_not_finite(compiled: bool, odd: float) -> None:
    keys, values = empty_int8(1, 32), empty_int8(1, 32)
    k, v = torch.zeros(2, 1, 32), torch.ones(2, 1, 32)
    v[1, 0, 3] = odd
    tables, q = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1, 32)
    with nullcontext() if compiled else native.disabled():
        write_pages(keys, values, torch.arange(2), k, v)
        whole = paged_decode(q, keys, values, tables, torch.tensor([1]), AttentionParams(1.0))
        spoiled = paged_decode(q, keys, values, tables, torch.tensor([2]), AttentionParams(1.0))
    torch.testing.assert_close(whole, torch.ones(1, 1, 32))
    assert not spoiled.isfinite().any()
