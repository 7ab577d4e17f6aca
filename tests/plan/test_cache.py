"""The chunk cache's settings, and what drawing a sample costs, against brute force and against HDF5."""

from __future__ import annotations

import itertools
import math
import pickle

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.foreign import chunk_table, counting_file, make_file, values

from h5chunk.errors import OptionError
from h5chunk.plan.cache import MAX_SLOTS, CacheSettings, ChunkGrid, cache_for


@pytest.mark.parametrize(
    ("triple", "message"),
    [
        ((0, 1, 0.5), "cache nslots is 0: pass at least 1"),
        ((1, -1, 0.5), "cache nbytes is -1: pass 0"),
        ((1, 1, -0.1), "cache w0 is -0.1: pass a number of at least 0 and below 1"),
        ((1, 1, 1.5), "cache w0 is 1.5"),
        ((1, 1, math.nan), "cache w0 is nan"),
        (
            (1, 1, 1.0),
            "w0 is 1.0, with which HDF5 never evicts partly read chunks, and memory grows without limit",
        ),
        ((1, 1, 1), "use 0 .oldest first.|use 0, or"),
        ((1, 1), r"cache is \(1, 1\): pass \(nslots, nbytes, w0\)"),
        (5, "cache is 5: pass"),
        (("many", 1, 0.5), "cache is .*'many'"),
    ],
)
def test_settings_that_cannot_be(triple, message):
    with pytest.raises(OptionError, match=message):
        CacheSettings.of(triple)


def test_settings():
    settings = CacheSettings.of((521, 1 << 20, 0.75))
    assert settings == CacheSettings(521, 1 << 20, 0.75) == CacheSettings.of(settings)
    assert pickle.loads(pickle.dumps(settings)) == settings
    CacheSettings(1, 0, 0.0)
    CacheSettings(1, 0, 0.999)


def test_cache_for():
    assert cache_for(9, 100, 1000) == CacheSettings(1000, 1000, 0.0)  # one chunk more than asked for
    assert cache_for(9, 100, 5) == CacheSettings(5, 500, 0.0)  # never more than there are
    assert cache_for(0, 100, 0) == CacheSettings(1, 100, 0.0)
    assert cache_for(9, 100, 10**9).nslots == MAX_SLOTS


grids = st.integers(1, 3).flatmap(
    lambda rank: st.tuples(
        st.tuples(st.integers(1, 30), *[st.integers(1, 6)] * rank), st.tuples(*[st.integers(1, 8)] * (rank + 1))
    )
)


def pieces(grid: ChunkGrid, row: int) -> list[tuple[tuple[int, ...], int]]:
    """The chunk, and the place in it, of each element of a sample."""
    found = []
    for index in np.ndindex(*grid.shape[1:]):
        where = (row, *index)
        chunk = tuple(i // c for i, c in zip(where, grid.chunks, strict=True))
        inside = tuple(i % c for i, c in zip(where, grid.chunks, strict=True))
        found.append((chunk, int(np.ravel_multi_index(inside, grid.chunks))))
    return found


@given(grids)
@settings(deadline=None)
def test_grid_against_brute_force(case):
    grid = ChunkGrid(*case, itemsize=2)
    elements = pieces(grid, row=0)
    chunks = {chunk for chunk, _ in elements}
    sample_bytes = 2 * len(elements)
    assert grid.sample_bytes == sample_bytes
    assert grid.chunk_bytes == 2 * math.prod(grid.chunks)
    assert grid.chunks_per_sample == len(chunks)
    assert grid.band_bytes == len(chunks) * grid.chunk_bytes
    assert grid.num_chunks == math.prod(math.ceil(s / c) for s, c in zip(grid.shape, grid.chunks, strict=True))
    assert grid.amplification(cached=True) == pytest.approx(grid.band_bytes / sample_bytes)
    assert grid.amplification(cached=False) == 1
    runs = 1 + sum(a[0] != b[0] or a[1] + 1 != b[1] for a, b in itertools.pairwise(elements))
    assert grid.reads_per_sample(cached=False) == runs
    assert grid.reads_per_sample(cached=True) == len(chunks)
    filtered = ChunkGrid(*case, itemsize=2, filtered=True)
    assert filtered.amplification(cached=False) == grid.amplification(cached=True)
    assert filtered.reads_per_sample(cached=False) == len(chunks)


def slot(scaled: tuple[int, ...], counts: tuple[int, ...]) -> int:
    """HDF5's hash of a chunk, before it is taken modulo nslots. Source: H5D__chunk_hash_val."""
    value = scaled[0]
    for number, count in zip(scaled[1:], counts[1:], strict=True):
        value = (value << (count - 1).bit_length()) ^ number
    return value


@given(grids)
@settings(deadline=None)
def test_num_slots_is_the_least_without_collisions(case):
    grid = ChunkGrid(*case, itemsize=1)
    counts = tuple(math.ceil(s / c) for s, c in zip(grid.shape, grid.chunks, strict=True))
    hashes = [slot(scaled, counts) for scaled in np.ndindex(*counts)]
    assert len(set(hashes)) == len(hashes)
    assert grid.num_slots == max(hashes) + 1


@pytest.mark.parametrize(
    ("shape", "chunks", "filtered", "needed"),
    [
        ((100, 32_768), (8, 32_768), False, False),
        ((100, 32_767), (8, 32_767), False, True),
        ((100, 32_768), (8, 32_768), True, True),
        ((100, 32_768), (8, 16_384), False, True),
        ((100, 10), None, False, False),
    ],
)
def test_what_needs_a_cache(shape, chunks, filtered, needed):
    assert ChunkGrid(shape, chunks, 1, filtered).needs_cache == needed


def test_contiguous():
    grid = ChunkGrid((100, 3, 4), None, 4)
    assert (grid.sample_bytes, grid.chunk_bytes, grid.band_bytes) == (48, 48, 48)
    assert (grid.chunks_per_sample, grid.num_bands, grid.num_chunks, grid.band_samples) == (1, 100, 0, None)
    assert (grid.amplification(True), grid.reads_per_sample(False), grid.num_slots) == (1, 1, 1)


def test_empty():
    grid = ChunkGrid((0, 3), (5, 3), 1)
    assert (grid.num_bands, grid.num_chunks, grid.num_slots) == (0, 0, 1)
    assert ChunkGrid((7, 0), (5, 3), 1).amplification(True) == 1


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("gzip", [True, False])
@pytest.mark.parametrize(
    ("shape", "chunks"),
    [
        ((40, 3, 8, 8), (4, 3, 8, 8)),  # whole samples
        ((40, 8, 8, 3), (4, 8, 8, 1)),  # a channel
        ((40, 8, 8, 3), (10, 4, 4, 3)),
        ((40, 7, 5), (10, 2, 4)),  # edge chunks
        ((40, 5), (8, 9)),  # chunks wider than the data
        ((40,), (7,)),
    ],
)
def test_grid_against_hdf5(tmp_path, shape, chunks, gzip, cached):
    """The bytes that HDF5 really reads for one sample."""
    options = {"chunks": chunks, "maxshape": (None,) * len(shape), **({"compression": "gzip"} if gzip else {})}
    path = make_file(tmp_path / "a.h5", images=(values(shape, np.uint16), options))
    grid = ChunkGrid(shape, chunks, 2, filtered=gzip)
    table = chunk_table(path)
    counting = counting_file(path)
    with h5py.File(
        counting, "r", rdcc_nbytes=grid.chunk_bytes * grid.num_chunks if cached else 1, rdcc_nslots=521, rdcc_w0=0.5
    ) as file:
        dataset = file["images"]
        dataset[0]  # the chunk index
        counting.reads.clear()
        dataset[shape[0] - 1]

    def in_chunk(offset: int) -> bool:
        return any(start <= offset < start + size for start, size in table.items())

    reads = [(offset, size) for offset, size in counting.reads if in_chunk(offset)]
    assert len(reads) == grid.reads_per_sample(cached)
    if gzip:
        assert all(table[offset] == size for offset, size in reads)
    else:
        assert sum(size for _, size in reads) == pytest.approx(grid.amplification(cached) * grid.sample_bytes)
