"""How many samples go into one chunk."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from h5chunk.errors import OptionError
from h5chunk.plan.cache import DIRECT_BYTES
from h5chunk.plan.layout import (
    MAX_CHUNK_BYTES,
    MIN_CHUNK_BYTES,
    MIN_CHUNKS,
    OPEN_WINDOWS_BYTES,
    TARGET_CHUNK_BYTES,
    human_bytes,
    plan_layout,
)
from h5chunk.plan.order import INTERLEAVE, Order


@given(st.integers(1, 10**10), st.integers(1, MAX_CHUNK_BYTES))
def test_chosen_chunks(num_samples, sample_bytes):
    layout = plan_layout(num_samples, sample_bytes)
    size = layout.chunk_samples
    assert size == num_samples or size.bit_count() == 1 if hasattr(size, "bit_count") else True
    assert 1 <= size <= num_samples
    assert layout.chunk_bytes <= max(TARGET_CHUNK_BYTES, sample_bytes)
    assert layout.num_chunks * size >= num_samples > (layout.num_chunks - 1) * size
    assert layout.num_chunks >= MIN_CHUNKS or size == 1 or layout.chunk_bytes <= MIN_CHUNK_BYTES
    assert 1 <= layout.window_chunks <= layout.num_chunks
    assert layout.window_chunks == 1 or INTERLEAVE * layout.window_chunks * layout.chunk_bytes <= OPEN_WINDOWS_BYTES
    if sample_bytes >= DIRECT_BYTES:
        assert layout.cache.nbytes == 0
    else:
        room = layout.cache.nbytes // layout.chunk_bytes
        assert room >= min(INTERLEAVE * layout.window_chunks, layout.num_chunks)
        assert layout.cache.nslots >= min(layout.num_chunks, 1 << 20)
    assert len(layout.reasons) >= 2 or size == num_samples


@pytest.mark.parametrize(
    ("num_samples", "sample_bytes", "chunk_samples", "why"),
    [
        (12_000, 150_528, 8, "1.1 MiB, the largest power of two of samples within 2.0 MiB"),
        (1_281_167, 150_528, 8, "the largest power of two"),
        (60_000, 784, 256, "196.0 KiB, small enough for 235 chunks to shuffle"),
        (50_000, 3072, 256, "small enough for 196 chunks"),
        (1_000_000, 784, 2048, "1.5 MiB, the largest power of two"),
        (100, 100, 100, "100 samples per chunk: all of them, 9.8 KiB"),
        (1000, 50_000_000, 1, "one sample is 47.7 MiB, more than the target of 2.0 MiB"),
        (1, 1, 1, "all of them"),
    ],
)
def test_choices_and_their_reasons(num_samples, sample_bytes, chunk_samples, why):
    layout = plan_layout(num_samples, sample_bytes)
    assert layout.chunk_samples == chunk_samples
    assert why in layout.reasons[0]


def test_window_reason_gives_the_memory():
    assert plan_layout(50_000, 3072).reasons[-1] == (
        "windows of 14 chunks are shuffled; the 24 open windows need a cache of 147.0 MiB over all processes"
    )
    assert plan_layout(12_000, 150_528).reasons[-1] == (
        "windows of 9 chunks are shuffled; no chunk cache: samples of 147.0 KiB are read directly, "
        "and a cache would copy them twice"
    )


@pytest.mark.parametrize("num_samples", [12_000, 60_001, 1_281_167])
def test_the_recommended_cache_holds_the_recommended_windows(num_samples):
    layout = plan_layout(num_samples, 3072)
    for batch_size in (1, 8, 32, 256):
        order = Order(num_samples, layout.chunk_samples, batch_size, layout.window_chunks)
        assert layout.cache.nbytes // layout.chunk_bytes >= order.open_chunks


def test_a_given_size():
    layout = plan_layout(1000, 100, 30)
    assert (layout.chunk_samples, layout.num_chunks, layout.chunk_bytes) == (30, 34, 3000)
    assert layout.reasons[0] == "30 samples per chunk, as requested: 2.9 KiB"
    assert plan_layout(10, 100, 30).chunk_samples == 10


@pytest.mark.parametrize("wrong", [0, -3])
def test_a_size_that_cannot_be(wrong):
    with pytest.raises(OptionError, match=f"chunk_samples is {wrong}: pass at least 1"):
        plan_layout(1000, 100, wrong)


def test_hdf5s_limit():
    sample_bytes = 1 << 20
    assert plan_layout(10_000, sample_bytes, 4095).chunk_bytes <= MAX_CHUNK_BYTES
    with pytest.raises(OptionError, match="4294967296 bytes, but HDF5's limit is 4294967295: use at most 4095 samples"):
        plan_layout(10_000, sample_bytes, 4096)
    with pytest.raises(OptionError, match=r"one sample has 4294967296 bytes, but HDF5's limit"):
        plan_layout(2, 1 << 32)


@pytest.mark.parametrize(
    ("num_bytes", "shown"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1024, "1.0 KiB"), (5 << 30, "5.0 GiB"), (3 << 40, "3.0 TiB")],
)
def test_human_bytes(num_bytes, shown):
    assert human_bytes(num_bytes) == shown
