"""Size of the KV cache, free memory, and mapping of cache pages."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import NoReturn

import numpy as np
import psutil
import pytest
import torch

from quire.config.options import EngineOptions
from quire.engine.execution.cache import (
    CacheMemory,
    DeviceKVCache,
    HostKVCache,
    KVCache,
    OutOfCacheMemory,
    count_blocks,
    count_slots,
)
from quire.engine.execution.cache_layout import CacheLayout, scale_bytes
from quire.engine.execution.devices.host import ReferenceDevice
from quire.engine.execution.memory import MemoryShare, free_memory
from quire.engine.models.specs.cache import CacheGroup, CacheShape, FullCache, StateArray, StateCache, WindowCache
from quire.kernels.int8_pages import SCALE

SHAPES = [CacheShape(2, 8, 8), CacheShape(1, 12, 8, values_in_keys=True)]


def layout(*shapes: CacheShape) -> CacheLayout:
    """Layers that have one block table."""
    return CacheLayout.of_one_group(shapes, CacheGroup(FullCache(), tuple(range(len(shapes)))))


def test_block_bytes() -> None:
    assert layout(*SHAPES).block_bytes(16, torch.bfloat16) == (2 * (8 + 8) + 12) * 16 * 2


def never() -> NoReturn:
    pytest.fail("no step has to run")


def test_kv_cache_memory_sets_the_number_of_blocks() -> None:
    assert count_blocks(EngineOptions(kv_cache_memory_bytes=1000), 90, 10_000, None) == 11
    with pytest.raises(OutOfCacheMemory, match="needs 1001 bytes, 1000 are available; raise --kv-cache-memory-bytes"):
        count_blocks(EngineOptions(kv_cache_memory_bytes=1000), 1001, 10_000, None)


@pytest.mark.parametrize("setting", ["kv_cache_free_memory_fraction", "gpu_memory_utilization"])
def test_memory_fraction_is_limited_to_what_max_num_seqs_needs(setting: str) -> None:
    options = EngineOptions(**{setting: 0.5}, max_num_seqs=4, block_size=16)

    def count(per_block: int, context_len: int, share: int, reserved: int = 0) -> int:
        available = ReferenceDevice().cache_memory(options, MemoryShare(share), reserved, never)
        return count_blocks(options, per_block, -(-context_len // options.block_size), available)

    assert count(1000, 100_000, 1_000_000) == 500
    assert count(1000, 100_000, 1_000_000, 200_000) == 400
    assert count(1000, 100_000, 300_000) == 150
    assert count(1000, 100, 1_000_000) == 4 * 7
    with pytest.raises(OutOfCacheMemory, match=f"raise --{setting.replace('_', '-')}"):
        count(600_000, 100, 1_000_000)


def test_pages_of_a_device_are_one_allocation() -> None:
    layers = DeviceKVCache(layout(*SHAPES), 4, 16, torch.float32, torch.device("cpu")).layers
    assert [tuple(layer.keys.shape) for layer in layers.values()] == [(2, 4, 16, 8), (1, 4, 16, 12)]
    assert len({layer.keys.untyped_storage().data_ptr() for layer in layers.values()}) == 1
    assert layers[1].values.data_ptr() == layers[1].keys.data_ptr()
    for number, pages in enumerate((layers[0].keys, layers[0].values, layers[1].keys)):
        assert not pages.any()
        pages.fill_(number + 1)
    assert [pages.unique().tolist() for pages in (layers[0].keys, layers[0].values)] == [[1.0], [2.0]]
    int8 = DeviceKVCache(layout(SHAPES[0]), 4, 16, torch.int8, torch.device("cpu")).layers[0]
    assert int8.keys.shape[-1] == 8 + SCALE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("dim", [48, 20, 112])
def test_rows_are_aligned_on_gpus(dtype: torch.dtype, latent: bool, dim: int) -> None:
    shape = CacheShape(2, dim, 13, values_in_keys=latent, row_alignment=16)
    (layer,) = DeviceKVCache(layout(shape), 4, 3, dtype, torch.device("cpu")).layers.values()
    assert layer.keys.untyped_storage().nbytes() == 4 * layout(shape).block_bytes(3, dtype)
    for pages, elements in ((layer.keys, dim), (layer.values, 13)):
        extra = scale_bytes(elements, dtype)
        assert pages.shape == (2, 4, 3, extra + elements)
        assert pages[..., extra:].data_ptr() % 16 == 0
        assert all(stride * dtype.itemsize % 16 == 0 for stride in pages.stride()[:3])
        pages.fill_(elements)
    assert layer.values.float().unique().tolist() == [13]
    assert layer.keys.float().unique().tolist() == ([13, dim] if latent else [dim])


STATE = StateCache((StateArray((2, 3), "float32"), StateArray((50,), "bfloat16")))
GROUPS = (
    CacheGroup(FullCache(), (1, 4)),
    CacheGroup(WindowCache(8), (0, 5)),
    CacheGroup(WindowCache(8), (6,)),
    CacheGroup(STATE, (2, 3, 7)),
)


def caches(layout: CacheLayout, blocks: int) -> list[KVCache]:
    return [
        HostKVCache(layout, blocks, 4, torch.float32, slots=5),
        DeviceKVCache(layout, blocks, 4, torch.float32, torch.device("cpu"), slots=5),
    ]


@pytest.mark.parametrize("device", [0, 1])
def test_groups_share_blocks_and_never_overlap_where_these_differ(device: int) -> None:
    """Each block belongs to one group: what a layer of another group writes to another block changes nothing."""
    shapes = dict.fromkeys((0, 1, 4, 5, 6), CacheShape(2, 8, 8))
    grouped = CacheLayout(shapes, GROUPS)
    cache = caches(grouped, 16)[device]
    assert grouped.block_bytes(4, torch.float32) == 2 * 2 * 4 * 2 * 8 * 4  # of two layers
    assert [cache.layers[layer].group for layer in (1, 4, 0, 5, 6)] == [0, 0, 1, 1, 2]
    assert grouped.windows == (None, 8, 8)
    block = {0: 3, 1: 4, 2: 5}
    for layer, pages in cache.layers.items():
        pages.keys[:, block[pages.group]] = layer + 1
        pages.values[:, block[pages.group]] = -layer - 1
    for layer, pages in cache.layers.items():
        assert (pages.keys[:, block[pages.group]] == layer + 1).all()
        assert (pages.values[:, block[pages.group]] == -layer - 1).all()
        assert not pages.keys[:, 11:].any()


@pytest.mark.parametrize("device", [0, 1])
def test_states_have_slots_that_never_overlap(device: int) -> None:
    """Of each layer's arrays, whose bytes need not be a multiple of those of an element of another."""
    cache = caches(CacheLayout({}, (CacheGroup(STATE, (0, 1)),)), 3)[device]
    states = cache.states
    assert states is not None
    assert len(states) == 5
    assert not states.memory.any()
    arrays = [(layer, array) for layer, both in states.arrays.items() for array in both]
    assert [tuple(array.shape) for _, array in arrays] == [(5, 2, 3), (5, 50)] * 2
    for number, (_, array) in enumerate(arrays):
        assert array[0].is_contiguous()
        assert array.data_ptr() % 64 == 0
        for slot in range(5):
            array[slot] = 10 * slot + number
    for number, (_, array) in enumerate(arrays):
        for slot in range(5):
            assert (array[slot] == 10 * slot + number).all()


OPTIONS = {"max_num_seqs": 8, "max_num_batched_tokens": 8}


@pytest.mark.parametrize(
    ("memory", "slots", "blocks"),
    [
        (10_000, 8, 80),  # all that all sequences can need
        (8_799, 8, 79),
        (1_300, 6, 7),  # half of the memory for slots
        (300, 1, 2),  # at least one
    ],
)
def test_slots_take_memory_before_blocks(memory: int, slots: int, blocks: int) -> None:
    """A slot has 100 bytes and a block as well, and a sequence has up to ten blocks."""
    options, available = EngineOptions(**OPTIONS), CacheMemory(memory, "the setting")
    assert count_slots(options, 100, 1_000, available) == slots
    assert count_blocks(options, 100, 10, available, slots * 100) == blocks


def test_a_start_without_memory_for_one_state_says_so() -> None:
    options = EngineOptions(**OPTIONS, kv_cache_memory_bytes=4096)
    with pytest.raises(OutOfCacheMemory, match="states of one sequence: they need 5000 bytes, 4096 are available"):
        count_slots(options, 5000, 0, None)
    assert count_slots(options, 4000, 1000, None) == 1
    with pytest.raises(OutOfCacheMemory, match="96 are available beside 4000 bytes of states; raise --kv-cache"):
        count_blocks(options, 1000, 10, None, 4000)


def test_free_memory_respects_a_containers_limit(tmp_path: Path) -> None:
    total = psutil.virtual_memory().total
    assert 0 < free_memory(tmp_path) <= total
    (tmp_path / "memory.current").write_text("300\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory(tmp_path) > 10_000
    (tmp_path / "memory.max").write_text("1000\n")
    assert free_memory(tmp_path) == 700


def test_the_page_cache_of_a_container_counts_as_free(tmp_path: Path) -> None:
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.stat").write_text("anon 300\ninactive_file 400\nactive_file 200\nfile 600\n")
    assert free_memory(tmp_path) == 700
    older = tmp_path / "memory"
    older.mkdir()
    for name in ("memory.current", "memory.max"):
        (tmp_path / name).unlink()
    (older / "memory.usage_in_bytes").write_text("900\n")
    (older / "memory.limit_in_bytes").write_text("1000\n")
    (older / "memory.stat").write_text("active_file 7\ntotal_inactive_file 500\ntotal_active_file 50\n")
    assert free_memory(tmp_path) == 650


def test_pages_are_not_resident_until_they_are_written() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    caches = HostKVCache(layout(*[CacheShape(8, 64, 64)] * 4), 4096, 16, torch.bfloat16).layers
    size = sum(cache.keys.nbytes + cache.values.nbytes for cache in caches.values())
    assert size == 512 << 20
    assert process.memory_info().rss - before < size / 10
    assert not caches[0].keys[3, 77].any()


def test_latent_values_are_a_view_of_the_keys() -> None:
    (latent,) = HostKVCache(layout(SHAPES[1]), 4, 16, torch.float32).layers.values()
    assert latent.values.shape == (1, 4, 16, 8)
    latent.keys[0, 1, 2] = 5
    assert latent.values[0, 1, 2].tolist() == [5] * 8


def resident(cache: HostKVCache) -> int:
    """Bytes of a cache that are in memory. (Those of the whole process change while the system reclaims others.)"""
    storage = cache.layers[0].keys.untyped_storage()
    first, last = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    with Path("/proc/self/pagemap").open("rb") as entries:  # neighbouring memory may be of the same mapping
        entries.seek(first // mmap.PAGESIZE * 8)
        pages = np.frombuffer(entries.read((last - first) // mmap.PAGESIZE * 8), np.uint64)
    return int((pages >> np.uint64(63)).sum()) * mmap.PAGESIZE


@pytest.mark.skipif(not Path("/proc/self/pagemap").exists(), reason="needs Linux")
def test_ensure_mapped_and_prefault_map_pages_ahead() -> None:
    cache = HostKVCache(
        layout(*[CacheShape(8, 64, 64)] * 4), 4096, 16, torch.bfloat16, 256 << 20
    )  # 512 MiB, 128 KiB a block
    cache.ensure_mapped(1023)
    assert 128 << 20 <= resident(cache) < 160 << 20
    cache.layers[3].values[:, 1023] = 7
    while cache.prefault():
        pass
    assert 384 << 20 <= resident(cache) < 432 << 20
    assert (cache.layers[3].values[:, 1023] == 7).all()
    cache.ensure_mapped(4095)
    assert not cache.prefault()
