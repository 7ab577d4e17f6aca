"""ChunkLoader: the batches of ChunkSampler and ChunkDataset, whatever happens, and nothing left behind."""

from __future__ import annotations

import gc
import os
import pickle
import threading
import time
import warnings
import weakref
from itertools import islice

import h5py
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.damaged_chunks import FILTERS, damage, half_smooth, no_imagecodecs
from support.faults import failure, nth, small, watch
from support.foreign import make_file, values
from support.leftovers import WAIT_S, are_readers_again, in_fork, nothing_is_left, readers_of_files, reading_threads
from support.loader_files import CHANNELS_LAST, IMAGES, LABELS, N, large, least_memory, path, slots_of, windows_bytes
from support.loaders import loader_by
from support.orders import ordered

from h5chunk.errors import FieldError, FileError, H5ChunkError, OptionError, StateError, TrustError
from h5chunk.feed.batches import EpochReport
from h5chunk.feed.dataset import ChunkDataset
from h5chunk.feed.loader import ChunkLoader
from h5chunk.feed.memory import KEPT
from h5chunk.feed.sampler import ChunkSampler
from h5chunk.store.read.field_readers import read_rows
from h5chunk.store.read.reader import H5Reader
from h5chunk.transforms import Normalize, ToDtype

__all__ = ["large", "no_imagecodecs", "nothing_is_left", "path"]

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
ORDER = {"window_chunks": 4, "seed": 1}
RESIDENT = pytest.mark.parametrize("resident", [False, True])


def as_lists(batches) -> list[list[list]]:
    return [[field.tolist() for field in batch] for batch in batches]


def expected_epochs(path, batch_size: int, num_epochs: int = 1, fields=None, **order) -> list[list[list[list]]]:
    """What the sampler and the dataset give."""
    dataset = ChunkDataset(path, fields=fields)
    sampler = ChunkSampler(dataset, batch_size, num_workers=0, **order)
    epochs = [as_lists(dataset[rows] for rows in sampler) for _ in range(num_epochs)]
    dataset.close()
    return epochs


def numbers(batches) -> list[int]:
    return [label for batch in batches for label in batch[-1].tolist()]


# The same batches


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    num_samples=st.integers(1, 120),
    chunk_samples=st.integers(0, 130),
    label_chunk=st.integers(0, 40),
    batch_size=st.integers(1, 130),
    window_chunks=st.integers(1, 40) | st.none(),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
    seed=st.sampled_from([0, 1, (1 << 64) - 1]),
    reader=st.sampled_from(["auto", "direct", "h5py"]),
    reuse=st.booleans(),
    num_threads=st.sampled_from([None, 1, 3]),
)
def test_same_batches_as_sampler_and_dataset(
    tmp_path, num_samples, chunk_samples, label_chunk, batch_size, reader, reuse, num_threads, **order
):
    path = make_file(
        tmp_path / "a.h5",
        images=(
            IMAGES[:1].repeat(num_samples, 0) + np.arange(num_samples, dtype=np.uint8)[:, None, None, None],
            {"chunks": (chunk_samples, 3, 5, 6), "maxshape": (None, 3, 5, 6)} if chunk_samples else {},
        ),
        labels=(LABELS[:num_samples], {"chunks": (label_chunk,), "maxshape": (None,)} if label_chunk else {}),
    )
    order["drop_last"] &= batch_size <= num_samples
    expected = expected_epochs(path, batch_size, 3, **order)
    with loader_by(**ordered(path, batch_size, **order), reader=reader, reuse=reuse, num_threads=num_threads) as loader:
        for epoch in expected:
            assert len(loader) == len(epoch)
            assert as_lists(loader) == epoch


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    num_samples=st.integers(1, 120),
    chunk_samples=st.integers(1, 130),
    label_chunk=st.integers(1, 130),
    batch_size=st.integers(1, 130),
    window_chunks=st.integers(1, 10) | st.none(),
    shuffle=st.booleans(),
    name=st.sampled_from(["gzip", "lzf, shuffle, fletcher32", "zstd"]),
    kept_whole=st.booleans(),
    reader=st.sampled_from(["auto", "direct", "h5py"]),
    reuse=st.booleans(),
    num_threads=st.sampled_from([1, 2, 7]),
)
def test_same_batches_of_compressed_files(
    tmp_path, monkeypatch, num_samples, chunk_samples, label_chunk, batch_size, name, kept_whole, reader, reuse,
    num_threads, **order
):  # fmt: skip
    small(monkeypatch, whole_bytes=1 << 20 if kept_whole else 0)
    path = make_file(
        tmp_path / "a.h5",
        images=(
            half_smooth((num_samples, 3, 5, 6), np.uint8),
            {"chunks": (chunk_samples, 3, 5, 6), "maxshape": (None, 3, 5, 6), **FILTERS[name]},
        ),
        labels=(LABELS[:num_samples], {"chunks": (label_chunk,), "maxshape": (None,), **FILTERS[name]}),
    )
    expected = expected_epochs(path, batch_size, 3, **order)
    with loader_by(**ordered(path, batch_size, **order), reader=reader, reuse=reuse, num_threads=num_threads) as loader:
        for epoch in expected:
            assert as_lists(loader) == epoch


LAYOUTS = {
    "contiguous": {},
    "whole samples": {"chunks": (4, 3, 5, 6)},
    "edge": {"chunks": (8, 3, 5, 6), "maxshape": (None, 3, 5, 6)},
    "one sample a chunk": {"chunks": (1, 3, 5, 6)},
    "compressed": {"chunks": (8, 3, 5, 6), **FILTERS["gzip, shuffle, fletcher32"]},
    "pieces of samples": {"chunks": (8, 2, 5, 3)},
    "compressed pieces": {"chunks": (16, 3, 2, 4), **FILTERS["gzip, shuffle, fletcher32"]},
}
FALLBACKS = {"scaled": {"chunks": (4, 3, 5, 6), "scaleoffset": 8}}
DTYPES = ["u1", "i2", "i4", "i8", "f2", "f4", "f8", "?"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_readers_give_the_same_bytes(tmp_path, layout, dtype):
    path = make_file(
        tmp_path / "a.h5", file={"userblock_size": 512}, images=(values((50, 3, 5, 6), dtype), LAYOUTS[layout])
    )
    [expected] = expected_epochs(path, 16)
    for reader in ("direct", "h5py", "auto"):
        with loader_by(path, 16, reader=reader) as loader:
            batches = list(loader)
            assert batches[0][0].dtype == torch.from_numpy(np.empty(0, dtype)).dtype
            assert as_lists(batches) == expected


@pytest.mark.parametrize(("layout", "reason"), [("scaled", "scale")])
def test_falls_back_to_hdf5_and_says_why(tmp_path, layout, reason):
    path = make_file(tmp_path / "a.h5", images=(IMAGES, FALLBACKS[layout]), labels=(LABELS, {}))
    [expected] = expected_epochs(path, 16)
    with pytest.warns(UserWarning, match=f"field 'images' is read through h5py, .*{reason}") as caught:
        loader = ChunkLoader(path, 16)
    assert len(caught) == 1
    assert "images: h5py, labels: direct" in repr(loader)
    with loader:
        assert as_lists(loader) == expected
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with loader_by(path, 16, reader="h5py") as asked:
            assert as_lists(asked) == expected
    with pytest.raises(OptionError, match=rf"'images' cannot be read directly: .*{reason}"):
        loader_by(path, 16, reader="direct")


def test_a_variable_chooses_how_files_are_read(path, monkeypatch):
    [expected] = expected_epochs(path, 16)
    monkeypatch.setenv("H5CHUNK_READER", "h5py")
    with ChunkLoader(path, 16) as loader:
        assert "images: h5py, labels: h5py" in repr(loader) and as_lists(loader) == expected
    monkeypatch.setenv("H5CHUNK_READER", "fast")
    with pytest.raises(OptionError, match="H5CHUNK_READER is 'fast': set it to 'auto', 'direct' or 'h5py'"):
        ChunkLoader(path, 16)


def test_the_warning_points_at_the_caller(tmp_path):
    path = make_file(tmp_path / "a.h5", images=(IMAGES, FALLBACKS["scaled"]))
    with pytest.warns(UserWarning, match="h5py") as caught:
        ChunkLoader(path, 16)
    assert caught[0].filename == __file__


def test_huge_compressed_chunks_go_through_hdf5(tmp_path, monkeypatch):
    small(monkeypatch, max_decoded_bytes=359)
    path = make_file(tmp_path / "a.h5", images=(IMAGES, {"chunks": (4, 3, 5, 6), **FILTERS["gzip"]}))
    [expected] = expected_epochs(path, 16)
    with pytest.warns(UserWarning, match="'images' is read through h5py, .*threads decode chunks of at most"):
        loader = ChunkLoader(path, 16)
    with loader:
        assert as_lists(loader) == expected


def test_codecs_that_are_not_installed(tmp_path, no_imagecodecs):
    """HDF5 has what it needs, and the message says what would be faster."""
    options = {"chunks": (4, 3, 5, 6), **FILTERS["zstd"]}
    path = make_file(tmp_path / "a.h5", images=(IMAGES, options), labels=(LABELS, {"chunks": (9,)}))
    [expected] = expected_epochs(path, 16)
    with pytest.warns(UserWarning, match=r"'images' is read through h5py, .*needs imagecodecs.*pip install") as caught:
        loader = ChunkLoader(path, 16)
    assert len(caught) == 1 and "labels: direct" in repr(loader)
    with loader:
        assert as_lists(loader) == expected


def test_fewer_threads_decode_large_chunks(tmp_path, monkeypatch, python_threads):
    path = make_file(tmp_path / "a.h5", images=(IMAGES, {"chunks": (4, 3, 5, 6), "compression": "gzip"}))
    monkeypatch.setattr("h5chunk.feed.source.available_cores", lambda: 8)
    small(monkeypatch, decoding_bytes=2 * 3 * 360)
    assert " 2 threads" in repr(ChunkLoader(path, 16))
    assert " 5 threads" in repr(ChunkLoader(path, 16, num_threads=5))
    small(monkeypatch, decoding_bytes=1)
    with ChunkLoader(path, 16) as loader:
        assert " 1 threads" in repr(loader)
        assert sum(len(images) for (images,) in loader) == N


@pytest.mark.parametrize("kind", ["images", "labels"])
@pytest.mark.parametrize("kept_whole", [True, False])
def test_a_damaged_chunk_is_an_error_in_the_loop(tmp_path, monkeypatch, kind, kept_whole):
    """Where its samples would come, or those that are read together with it; what was read before it is right."""
    small(monkeypatch, whole_bytes=1 << 20 if kept_whole else 0)
    options = {"chunks": (20, 3, 5, 6), **FILTERS["gzip, shuffle, fletcher32"]}
    path = make_file(tmp_path / "a.h5", images=(IMAGES, options), labels=(LABELS, {"chunks": (20,), **FILTERS["gzip"]}))
    damage(path, 5, kind)
    found: list[int] = []
    loader = ChunkLoader(path, 10, shuffle=False)
    with pytest.raises(FileError, match=rf"a\.h5: field '{kind}', chunk 5 is damaged ."):
        for images, labels in loader:
            np.testing.assert_array_equal(images, IMAGES[labels])
            found += labels.tolist()
    assert found == list(range(len(found))) and (0 if kind == "labels" and kept_whole else 10) <= len(found) <= 100
    assert not reading_threads()
    loader.close()


def test_what_hdf5_cannot_read_is_an_error_that_names_it(tmp_path):
    options = {"chunks": (20, 3, 5, 6), **FILTERS["fletcher32"]}
    path = make_file(tmp_path / "a.h5", images=(IMAGES, options), labels=(LABELS, {}))
    damage(path, 5, "images")
    loader = loader_by(path, 10, shuffle=False, reader="h5py")
    with pytest.raises(FileError, match=r"a\.h5: field 'images', chunk 5 cannot be read: .*(filter|Fletcher32)"):
        list(loader)
    loader.close()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_while_chunks_are_decoded(tmp_path, monkeypatch, python_threads):
    """Its threads do not wait for locks of threads that it does not have: chunks that windows share have such."""
    options = {"chunks": (40, 3, 5, 6), **FILTERS["gzip"]}
    path = make_file(tmp_path / "a.h5", images=(IMAGES, options), labels=(LABELS, {}))
    epochs = expected_epochs(path, 16, 2, window_chunks=1)
    loader = ChunkLoader(**ordered(path, 16, window_chunks=1))
    begun, go_on, parent = threading.Event(), threading.Event(), os.getpid()

    def wait(*_):
        if os.getpid() == parent:
            begun.set()
            assert go_on.wait(WAIT_S)

    def iterate():
        loader.close()
        loader.set_epoch(0)
        assert as_lists(loader) == epochs[0]
        loader.close()

    watch(monkeypatch, "decode chunk", wait)
    found: list[list[list]] = []
    thread = threading.Thread(target=lambda: found.append(as_lists(loader)))
    thread.start()
    assert begun.wait(WAIT_S)
    status = in_fork(iterate)
    go_on.set()
    thread.join(WAIT_S)
    assert (status, found) == (0, [epochs[0]])
    loader.close()


@pytest.mark.parametrize(
    "fields", [["labels", "images"], {"a": "images", "b": "labels", "c": "more/z"}, ["labels"], "labels", ["more/z"]]
)
def test_fields(tmp_path, fields):
    path = make_file(
        tmp_path / "a.h5",
        images=(IMAGES, {"chunks": (4, 3, 5, 6)}),
        labels=(LABELS, {"chunks": (7,)}),
        more__z=(values((N, 30), np.float32), {"chunks": (10, 30)}),
    )
    expected = expected_epochs(path, 16, 2, fields, **ORDER)
    with ChunkLoader(**ordered(ChunkDataset(path, fields=fields), 16, **ORDER)) as loader:
        for epoch in expected:
            assert as_lists(loader) == epoch


def test_a_link_into_another_file(tmp_path):
    make_file(tmp_path / "other.h5", images=(IMAGES, {"chunks": (4, 3, 5, 6)}))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["images"] = h5py.ExternalLink("other.h5", "images")
    with pytest.raises(TrustError, match="'images' is an external link to 'images'"):
        ChunkLoader(tmp_path / "a.h5", 16)


def test_a_sampler_takes_the_order_of_its_loader(path):
    """Windows alternate for the workers of a DataLoader only."""
    dataset = ChunkDataset(path)
    in_turn = ChunkSampler(dataset, 8, num_workers=0, **ORDER)
    expected = [rows for _ in range(3) for rows in in_turn]
    sampler, alternating = (ChunkSampler(dataset, 8, **ORDER) for _ in range(2))
    assert sampler.order.interleave > 1
    with ChunkLoader(dataset, batch_sampler=sampler) as loader:
        found = [labels.tolist() for _ in range(2) for _, labels in loader]
        assert found + list(sampler) == expected != [rows for _ in range(3) for rows in alternating]
    next(iter(alternating))
    state = alternating.state_dict()
    with pytest.raises(StateError, match="with 0, it has the order of a ChunkLoader"):
        loader.load_state_dict(state)
    alternating.load_state_dict(state)
    for wrong in (alternating, ChunkSampler(dataset, 8, num_workers=2, **ORDER)):
        with pytest.raises(OptionError, match=r"windows alternate, .*: pass num_workers=0 to the ChunkSampler"):
            ChunkLoader(dataset, batch_sampler=wrong)


# Numbers of samples and epochs


@RESIDENT
def test_fewer_samples_than_a_batch(path, resident):
    with ChunkLoader(path, 500, resident=resident) as loader:
        for _ in range(2):
            batches = list(loader)
            assert len(batches) == len(loader) == 1
            assert sorted(numbers(batches)) == list(range(N))
    with pytest.raises(OptionError, match=f"drop_last leaves out all {N} samples, which do not fill a batch of 500"):
        ChunkLoader(path, 500, drop_last=True, resident=resident)


@pytest.mark.filterwarnings("ignore:field .* is read through h5py:UserWarning")
@RESIDENT
@pytest.mark.parametrize("options", [{}, {"chunks": (4, 2), "maxshape": (None, 2)}])
def test_no_samples(tmp_path, options, resident):
    path = make_file(tmp_path / "a.h5", images=(values((0, 2), np.uint8), options))
    loader = ChunkLoader(path, 4, resident=resident)
    assert len(loader) == 0 and not loader.is_resident
    for _ in range(2):
        assert list(loader) == []
    assert "0 batches" in repr(loader)
    loader.close()


@pytest.mark.parametrize(("drop_last", "length"), [(False, 13), (True, 12)])
def test_length(path, drop_last, length):
    loader = ChunkLoader(path, 16, drop_last=drop_last)
    assert len(loader) == length == len(list(loader))


@RESIDENT
def test_set_epoch(path, resident):
    epochs = expected_epochs(path, 16, 8, **ORDER)
    loader = ChunkLoader(**ordered(path, 16, **ORDER), resident=resident)
    for epoch in (5, 0, 0, 7):  # forward, backward, once more
        loader.set_epoch(epoch)
        assert loader.order.epoch == epoch
        assert as_lists(loader) == epochs[epoch]
    loader.set_epoch(2)
    assert as_lists(loader) == epochs[2]
    assert as_lists(loader) == epochs[3]  # and on by itself
    loader.close()
    with pytest.raises(OptionError, match="epoch"):
        loader.set_epoch(-1)


@pytest.mark.parametrize("epoch", [0, 1, 2, 5])
def test_set_epoch_in_mid_epoch_is_for_the_next(path, epoch):
    epochs = expected_epochs(path, 16, 8, **ORDER)
    with ChunkLoader(**ordered(path, 16, **ORDER)) as loader:
        found = []
        for number, batch in enumerate(loader):
            if number == 4:
                loader.set_epoch(epoch)
            found.append([field.tolist() for field in batch])
        assert found == epochs[0]
        assert as_lists(loader) == epochs[epoch]


def test_after_a_break_the_next_epoch_comes(path):
    """As with ChunkSampler."""
    epochs = expected_epochs(path, 16, 3, **ORDER)
    with ChunkLoader(**ordered(path, 16, **ORDER)) as loader:
        for _ in loader:
            break
        assert as_lists(loader) == epochs[1]
        assert as_lists(loader) == epochs[2]


def test_epochs_have_no_seam(path):
    """The threads and the read-ahead go on from one epoch to the next."""
    with ChunkLoader(**ordered(path, 16, **ORDER)) as loader:
        list(loader)
        threads = set(reading_threads())
        list(loader)
        assert threads and set(reading_threads()) == threads


def test_two_loaders_at_once(path):
    [one], [two] = (expected_epochs(path, 16, window_chunks=4, seed=seed) for seed in (1, 2))
    first, second = (ChunkLoader(**ordered(path, 16, window_chunks=4, seed=seed)) for seed in (1, 2))
    with first, second:
        pairs = list(zip(first, second, strict=True))
        assert as_lists(batch for batch, _ in pairs) == one
        assert as_lists(batch for _, batch in pairs) == two


@RESIDENT
@pytest.mark.parametrize("reuse", [False, True])
def test_iterating_twice_at_the_same_time_is_refused(path, reuse, resident):
    """And the older iteration goes on as if nothing had happened."""
    [expected] = expected_epochs(path, 16, **ORDER)
    with ChunkLoader(**ordered(path, 16, **ORDER), reuse=reuse, resident=resident) as loader:
        older, newer = iter(loader), iter(loader)
        found = as_lists(next(older) for _ in range(2))
        for other in (newer, loader):
            with pytest.raises(OptionError, match="already being iterated"):
                list(other)
        assert found + as_lists(older) == expected


def test_closing_ends_an_iteration(path):
    loader = ChunkLoader(**ordered(path, 16, **ORDER))
    batches = iter(loader)
    next(batches)
    loader.close()
    with pytest.raises(H5ChunkError, match="close"):
        list(batches)


# Memory


@RESIDENT
def test_batches_that_are_held_are_never_overwritten(large, resident):
    [expected] = expected_epochs(large, 40, window_chunks=5)
    with ChunkLoader(**ordered(large, 40, window_chunks=5), resident=resident) as loader:
        held = list(loader)
        list(loader)  # another epoch
        assert as_lists(held) == expected


def test_parts_of_batches_that_are_held_are_never_overwritten(large):
    with ChunkLoader(**ordered(large, 40, window_chunks=5)) as loader:
        held = [(images[:1], images[:1].clone()) for _ in range(2) for images, _ in loader]
        assert all(part.equal(copy) for part, copy in held)


def test_memory_is_used_again_without_reuse(large):
    with ChunkLoader(**ordered(large, 101, window_chunks=1, shuffle=False)) as loader:
        places = [images.data_ptr() for _ in range(12) for images, _ in loader]
    assert len(set(places)) < len(places) / 2


@pytest.mark.parametrize("shuffle", [True, False])
def test_reuse_gives_right_data_when_it_is_used_at_once(large, shuffle):
    options = {"window_chunks": 5, "shuffle": shuffle}
    expected = expected_epochs(large, 40, 2, **options)
    with ChunkLoader(**ordered(large, 40, **options), reuse=True) as loader:
        for epoch in expected:
            assert as_lists(loader) == epoch


def test_reuse_takes_no_new_memory(large):
    with ChunkLoader(**ordered(large, 40, window_chunks=5), reuse=True) as loader:
        places = [{images.data_ptr() for images, _ in loader} for _ in range(4)]
        num_places = slots_of(loader) * loader.order.window_batches
    assert len(set().union(*places)) <= num_places


@pytest.mark.parametrize("window_chunks", [1, 2, 7])
def test_memory_bytes(path, window_chunks):
    loose = ChunkLoader(**ordered(path, 8, window_chunks=window_chunks), memory_bytes=1 << 30)
    least = None
    for memory_bytes in range(0, 200_000, 2500):
        try:
            loader = ChunkLoader(**ordered(path, 8, window_chunks=window_chunks), memory_bytes=memory_bytes)
        except OptionError as error:
            assert least is None and str(memory_bytes) in str(error)
            named = int(str(error).split("need ")[1].split(":")[0])
            assert named > memory_bytes
            continue
        least = least or memory_bytes
        assert least - 2500 < named <= least
        assert windows_bytes(loader) <= 1.01 * memory_bytes
    assert least is not None and slots_of(loose) >= slots_of(loader)
    with ChunkLoader(**ordered(path, 8, window_chunks=window_chunks), memory_bytes=named) as tight:
        assert sorted(numbers(tight)) == list(range(N))


def test_memory_bytes_makes_windows_smaller(tmp_path):
    """No smaller than it must, and as the repr says; what was asked for stays."""
    path = make_file(tmp_path / "a.h5", images=(values((2000, 500), np.uint8), {"chunks": (10, 500)}))
    wide = ChunkLoader(path, 10).order.window_batches
    seen: list[int] = []
    for memory_bytes in (150_000, 300_000, 600_000, 1_200_000, 1 << 30):
        loader = ChunkLoader(path, 10, memory_bytes=memory_bytes)
        seen.append(loader.order.window_batches)
        assert windows_bytes(loader) <= 1.01 * memory_bytes
        assert f"{slots_of(loader)} windows of {seen[-1]} batch" in repr(loader)
        with loader:
            assert sorted(row[0] for batch in loader for row in batch[0].tolist()) == sorted(
                row[0] for row in values((2000, 500), np.uint8).tolist()
            )
    assert seen == sorted(seen) and seen[0] < wide == seen[-1]
    with pytest.raises(OptionError, match=f"windows of {wide} batches need"):
        ChunkLoader(**ordered(path, 10, window_chunks=wide), memory_bytes=150_000)


def test_memory_beside_windows_counts(tmp_path):
    """Labels that are kept, and what chunks are decoded in."""
    plain = make_file(tmp_path / "a.h5", images=(IMAGES, {}), labels=(values((N, 8), np.int64), {}))
    packed = make_file(
        tmp_path / "b.h5",
        images=(IMAGES, {"chunks": (40, 3, 5, 6), "compression": "gzip"}),
        labels=(values((N, 8), np.int64), {}),
    )
    needed = []
    for each in (plain, packed):
        options = {**ordered(each, 10, window_chunks=1, shuffle=False), "num_threads": 4}
        needed.append(least_memory(**options))
        with ChunkLoader(**options, memory_bytes=needed[-1]) as loader:
            assert len(list(loader)) == 21
    assert needed[0] == (2 + KEPT) * 2048 + N * 64  # two fields of 1 KiB in each window
    assert needed[1] >= needed[0] + 2 * 4 * 3600


def test_small_files_take_little_memory(tmp_path):
    """Not as many windows as may alternate, nor larger ones than they have."""
    for chunk, most in ((10, 2 * 100 * 512), (100, 2 * 100 * 512)):
        path = make_file(tmp_path / f"{chunk}.h5", images=(values((100, 500), np.uint8), {"chunks": (chunk, 500)}))
        loader = ChunkLoader(path, 10)
        assert windows_bytes(loader) <= most


def test_huge_windows_are_read_ahead_too(path, monkeypatch):
    small(monkeypatch, ahead_bytes=1000)
    for order, echo in (({"window_chunks": 17}, 1), ({"shuffle": False}, 1), ({"window_chunks": 17}, 2)):
        with ChunkLoader(**ordered(path, 16, **order), echo=echo) as loader:
            assert slots_of(loader) == 2
            assert len(list(loader)) == len(loader)


@pytest.mark.parametrize("transform", [Normalize(MEAN, STD), ToDtype(torch.int32), CHANNELS_LAST])
def test_reuse_converts_into_the_same_memory(large, transform):
    """A batch is there until the next one; none takes new memory."""
    options = {**ordered(large, 40, window_chunks=5), "transforms": [transform]}
    with ChunkLoader(**options, reuse=True) as loader:
        with ChunkLoader(**{**options, **ordered(large, 40, window_chunks=5)}) as plain:
            for (images, labels), (expected, numbers) in zip(loader, plain, strict=True):
                assert images.equal(expected) and labels.equal(numbers)
                assert images.stride() == expected.stride()
        assert len({images.data_ptr() for _ in range(3) for images, _ in loader}) == 1


def test_windows_are_used_again_once_they_were_converted(large):
    """As many as the bound counts, whatever the loop holds."""
    with ChunkLoader(large, 70, transforms=[ToDtype(torch.float16, scale=True)]) as loader:
        places: dict[int, set[int]] = {}  # by the number of samples: those of the last window are fewer

        def note(_, slot, samples):
            places.setdefault(len(samples), set()).add(slot.window[0].data_ptr())

        with pytest.MonkeyPatch.context() as patch:
            watch(patch, "begin slot", after=note)
            held = [batch[0] for _ in range(4) for batch in loader]
    assert len(held) == 4 * len(loader) and 1 < len(places[max(places)]) <= slots_of(loader)


def test_closing_frees_what_is_kept_for_batches(large):
    loader = ChunkLoader(large, 40, reuse=True, transforms=[ToDtype(torch.float16, scale=True)])
    gc.collect()
    storage = weakref.ref(next(iter(loader))[0].untyped_storage())
    list(loader)
    loader.close()
    gc.collect()
    assert storage() is None


@pytest.mark.usefixtures("python_threads")
def test_report(path, monkeypatch):
    """What the loop waited for, and nothing else; it is there while an epoch lasts."""
    small(monkeypatch, whole_bytes=0)
    asked = threading.Event()

    def slowly(*_):
        assert asked.wait(WAIT_S)
        time.sleep(0.01)

    with monkeypatch.context() as patch:
        watch(patch, "wait for window", lambda *_: asked.set())
        watch(patch, "read part", slowly)
        with ChunkLoader(path, 16, num_threads=1) as loader:
            assert loader.report == EpochReport() and loader.report.samples_per_s == 0
            start = time.perf_counter()
            for number, (_, labels) in enumerate(loader, 1):
                report = loader.report
                assert report.batches == number and report.samples == report.fresh_samples
                assert number > 1 or report.samples == len(labels)
            assert time.perf_counter() - start >= report.seconds >= report.waited_s >= 0.01
            assert report.samples == N and report.samples_per_s == N / report.seconds == report.fresh_samples_per_s
    with ChunkLoader(path, 16) as loader:
        watch(
            monkeypatch, "feed.read_pool.ReadPool.finish_ready", lambda _, read=None: read and read.wait_for_threads()
        )
        list(loader)
        assert loader.report.waited_s > 0  # opening it
        assert len(list(loader)) == 13 and loader.report.waited_s < loader.report.seconds / 2
        assert loader.report is not report


def test_repr(path):
    loader = ChunkLoader(**ordered(path, 16, window_chunks=4, drop_last=True), num_threads=3, memory_bytes=1 << 30)
    shown = repr(loader)
    for part in (str(path), "12 batches of 16", "windows of 1 batch ", "KiB", " threads", "images: direct", "cpu"):
        assert part in shown
    assert f"{loader.read_ahead_samples // 16} windows of 1 batch (" in shown


# What the network takes


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("reuse", [False, True])
def test_normalize(path, dtype, channels_last, reuse):
    """As torchvision states it, in float64."""
    transforms = [Normalize(MEAN, STD)]
    if dtype or channels_last:
        transforms.append(ToDtype(dtype or torch.float32, channels_last=channels_last))
    means, stds = (torch.tensor(numbers, dtype=torch.float64).reshape(3, 1, 1) for numbers in (MEAN, STD))
    with ChunkLoader(**ordered(path, 16, **ORDER), transforms=transforms, reuse=reuse) as loader:
        for images, labels in loader:
            expected = (torch.from_numpy(IMAGES[labels.numpy()]).double() / 255 - means) / stds
            assert images.dtype == (dtype or torch.float32)
            allowed = torch.finfo(images.dtype).eps / 2 * expected.abs() + 2e-6
            assert ((images.double() - expected).abs() <= allowed).all()
            assert images.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


def test_only_the_first_field_is_converted(path):
    with ChunkLoader(
        ChunkDataset(path, fields=["labels", "images"]), 16, shuffle=False, transforms=[ToDtype(torch.int32)]
    ) as loader:
        labels, images = next(iter(loader))
    assert (labels.dtype, images.dtype) == (torch.int32, torch.uint8)
    assert labels.tolist() == list(range(16))


def test_axes_of_the_file(tmp_path):
    images = np.ascontiguousarray(IMAGES.transpose(0, 2, 3, 1))
    path = make_file(tmp_path / "a.h5", images=(images, {}))
    with h5py.File(path, "a") as file:
        file["images"].attrs["axes"] = np.bytes_("NHWC")
    with ChunkLoader(path, 16, shuffle=False, transforms=[Normalize(MEAN, STD)]) as loader:
        found = torch.cat([batch for (batch,) in loader])
    expected = (torch.from_numpy(images).double() / 255 - torch.tensor(MEAN)) / torch.tensor(STD)
    assert torch.allclose(found.double(), expected, atol=1e-5)


@pytest.mark.parametrize(("shape", "axis"), [((5, 6, 3), 2), ((3, 5, 6), 0), ((3, 5, 4), 0), ((5, 6, 7), 0)])
def test_axes_of_files_that_do_not_say(tmp_path, shape, axis):
    images = values((20, *shape), np.uint8)
    path = make_file(tmp_path / "a.h5", images=(images, {}))
    mean = np.linspace(0.1, 0.5, shape[axis])
    with ChunkLoader(path, 20, shuffle=False, transforms=[Normalize(mean.tolist(), 0.5)]) as loader:
        [(found,)] = loader
    sizes = [1, 1, 1]
    sizes[axis] = -1
    np.testing.assert_allclose(found.numpy(), (images / 255 - mean.reshape(sizes)) / 0.5, rtol=1e-5, atol=1e-5)


def test_a_loader_stays_in_its_process(path):
    with pytest.raises(OptionError, match="cannot be sent to another process"):
        pickle.dumps(ChunkLoader(path, 16))


def test_windows_asked_for_are_windows_had(tmp_path):
    """A file sorted by class, in a short epoch."""
    labels = np.arange(1200) // 100
    path = make_file(
        tmp_path / "a.h5", images=(values((1200, 70), np.uint8), {"chunks": (50, 70)}), labels=(labels, {})
    )
    for window_chunks in (2, 24):
        with ChunkLoader(**ordered(path, 10, window_chunks=window_chunks)) as loader:
            classes = np.mean([len(batch[1].unique()) for batch in loader])
            assert f"windows of {5 * window_chunks} batches" in repr(loader)
        assert (classes <= 2) == (window_chunks == 2) and (classes > 5) == (window_chunks == 24)


@RESIDENT
def test_functions_as_transforms(path, resident):
    [expected] = expected_epochs(path, 16, **ORDER)
    transforms = {"labels": [lambda labels: labels + 1, lambda labels: {"n": labels}]}
    with ChunkLoader(**ordered(path, 16, **ORDER), transforms=transforms, resident=resident) as loader:
        found = [labels["n"].tolist() for _, labels in loader]
    assert found == [(np.array(labels) + 1).tolist() for _, labels in expected]


# Errors


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"num_workers": 4}, "num_threads"),
        ({"collate_fn": list}, "pass transforms"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": 1.5}, "batch_size"),
        ({"seed": -1}, "seed"),
        ({"memory_bytes": 0}, "memory_bytes is 0"),
        ({"transforms": [Normalize((1, 2), 1)]}, "2 values of mean for 3 channels"),
        ({"transforms": [Normalize(0.5, 0.5), ToDtype(torch.int32)]}, "floating"),
        ({"transforms": {"labels": [CHANNELS_LAST]}}, "channels_last"),
        (
            {"groups": "labels"},
            r"ChunkLoader has no groups: pass it .*batch_sampler=ChunkSampler\(dataset, 256, groups=",
        ),
        ({"num_threads": -1}, "num_threads"),
        ({"num_threads": 0}, "num_threads"),
        ({"device": "meta"}, "device is 'meta'"),
        pytest.param({"device": "cuda"}, "no CUDA", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA")),
    ],
)
def test_options_that_cannot_be(path, options, match):
    with pytest.raises(OptionError, match=match):
        ChunkLoader(path, **{"batch_size": 16, **options})


def test_an_order_and_fields_that_cannot_be(path):
    with pytest.raises(TypeError, match="unexpected keyword argument 'shufle'"):
        ChunkLoader(path, 16, shufle=False)
    with pytest.raises(OptionError, match="window_chunks"):
        ChunkSampler(ChunkDataset(path), 16, window_chunks=0)
    with pytest.raises(OptionError, match="fields is empty"):
        ChunkDataset(path, fields=[])


@pytest.mark.parametrize(("name", "value"), [("num_threads", 2.5), ("device", "nonsense"), ("memory_bytes", "1 GiB")])
def test_options_of_a_wrong_type(path, name, value):
    with pytest.raises(OptionError, match=name):
        ChunkLoader(path, 16, **{name: value})


def test_files_that_cannot_be(tmp_path):
    with pytest.raises(FileError, match=r"none\.h5: no such file"):
        ChunkLoader(tmp_path / "none.h5", 16)
    path = make_file(tmp_path / "a.h5", images=(IMAGES, {}), names=(values((N,), "S3"), {}))
    with pytest.raises(FieldError, match="strings"):
        ChunkLoader(ChunkDataset(path, fields=["images", "names"]), 16)
    with pytest.raises(FieldError, match="no dataset 'labels'"):
        ChunkLoader(ChunkDataset(path, fields=["labels"]), 16)


def change(path, how: str) -> None:
    """Change a file behind the loader's back."""
    status = path.stat()
    if how == "removed":
        path.unlink()
    elif how == "replaced":
        other = make_file(path.with_name("other.h5"), images=(IMAGES + 1, {}), labels=(LABELS + 1, {}))
        other.replace(path)
    elif how == "truncated":
        with path.open("r+b") as file:
            file.truncate(2000)
    else:
        path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))
    if path.exists():
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1_000_000_000))


@pytest.mark.parametrize("how", ["removed", "replaced", "truncated", "overwritten"])
@pytest.mark.parametrize("when", ["before", "between epochs", "after closing", "in an epoch"])
@pytest.mark.parametrize("kind", ["plain", "compressed", "h5py"])
def test_a_file_that_changes(tmp_path, how, when, kind):
    """An error that names the file, or the data of the file that is still open: never wrong data."""
    options = {"chunks": (4, 3, 5, 6), **({} if kind == "plain" else {"compression": "gzip"})}
    path = make_file(tmp_path / "a.h5", images=(IMAGES, options), labels=(LABELS, {"chunks": (4,)}))
    epochs = expected_epochs(path, 2, 4, window_chunks=1)
    loader = loader_by(**ordered(path, 2, window_chunks=1), reader="h5py" if kind == "h5py" else "auto")
    found: list[list[list]] = []
    if when == "before":
        change(path, how)
    elif when != "in an epoch":
        found.append(as_lists(loader))
        if when == "after closing":
            loader.close()
        change(path, how)
    message = None
    try:
        while len(found) < 4:
            found.append([])
            for number, batch in enumerate(loader):
                if number == 3 and when == "in an epoch" and len(found) == 1:
                    change(path, how)
                found[-1].append([field.tolist() for field in batch])
    except FileError as error:
        message = str(error)
        assert "a.h5" in message
    assert found == [epoch[: len(batches)] for epoch, batches in zip(epochs, found, strict=False)]
    if how in ("truncated", "overwritten") or when in ("before", "after closing"):
        assert message is not None
    loader.close()


@pytest.mark.usefixtures("python_threads")
@pytest.mark.parametrize(("batch", "resident"), [(0, False), (1, False), (0, True)])
def test_an_error_in_a_thread_is_raised_in_the_loop(path, monkeypatch, batch, resident):
    small(monkeypatch, whole_bytes=0)
    loader = ChunkLoader(path, 16, shuffle=False, resident=resident)
    with monkeypatch.context() as patch:
        fail = nth(2 * batch + 1, failure(ZeroDivisionError("on purpose")))  # one part per field
        watch(patch, "read part", fail)
        found = []
        with pytest.raises(ZeroDivisionError, match="on purpose"):
            found += [as_lists([batch])[0] for batch in loader]
        assert not reading_threads()
    loader.set_epoch(0)
    assert numbers(loader) == list(range(N))  # and all is well again
    loader.close()


# Nothing is left: the fixture of test_pipeline looks for threads and open files after each test


def test_before_iterating_nothing_is_open(path):
    loader = ChunkLoader(path, 16)
    assert not reading_threads()
    del loader


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("reader", ["direct", "h5py"])
def test_a_break_keeps_the_threads_for_the_next_epoch(path, reader, reuse):
    with loader_by(path, 16, reader=reader, reuse=reuse) as loader:
        for _ in loader:
            threads = readers_of_files()
            break
        assert threads and are_readers_again(threads)
        loader.set_epoch(0)
        assert sorted(numbers(loader)) == list(range(N))
        assert are_readers_again(threads)
    assert not reading_threads()


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("stop", [1, 2, 12, 13])
def test_after_a_break_it_goes_on_anywhere(path, stop, reuse):
    """At the next epoch, at an earlier one, and in the middle of one, with windows left half used."""
    epochs = expected_epochs(path, 16, 3, **ORDER)
    with ChunkLoader(**ordered(path, 16, **ORDER), reuse=reuse) as loader:
        state = loader.state_dict()
        for _ in range(2):
            assert as_lists(islice(loader, stop)) == epochs[0][:stop]
            assert as_lists(islice(loader, stop)) == epochs[1][:stop]
            middle = loader.state_dict()
            assert as_lists(loader) == epochs[2]
            loader.load_state_dict(middle)
            assert as_lists(loader) == epochs[1][stop:]
            loader.load_state_dict(state)


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_exception_in_the_loop(path, kind):
    def loop():
        for _ in loader:
            raise kind

    with ChunkLoader(path, 16) as loader:
        with pytest.raises(kind):
            loop()
        loader.set_epoch(0)
        assert sorted(numbers(loader)) == list(range(N))
    assert not reading_threads()


def test_an_exception_in_a_transform(path):
    loader = ChunkLoader(path, 16, transforms=[lambda _: 1 / 0])
    with pytest.raises(ZeroDivisionError):
        next(iter(loader))
    assert not reading_threads()


@RESIDENT
def test_interrupted_while_waiting(path, monkeypatch, resident):
    """Ctrl-C comes where the loop waits for data."""
    loader = ChunkLoader(path, 16, resident=resident)
    with monkeypatch.context() as patch:
        watch(patch, "wait for window", failure(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            list(loader)
    assert not reading_threads()
    loader.set_epoch(0)
    assert sorted(numbers(loader)) == list(range(N))
    loader.close()


def test_del(path):
    loader = ChunkLoader(path, 16)
    list(loader)
    assert reading_threads()
    del loader
    assert not reading_threads()


@RESIDENT
def test_a_loader_without_a_name(path, resident):
    assert sorted(numbers(ChunkLoader(path, 16, resident=resident))) == list(range(N))
    assert not reading_threads()


@RESIDENT
@pytest.mark.parametrize("how", ["del", "cycle", "transform"])
def test_garbage_collection(path, how, resident):
    known = []
    loader = ChunkLoader(path, 16, resident=resident, transforms=[lambda batch, known=known: batch])
    if how == "cycle":
        loader.itself = loader
    if how == "transform":
        known.append(loader)
    del known
    list(loader)
    gone = weakref.ref(loader)
    del loader
    gc.collect()
    assert gone() is None and not reading_threads()


def test_del_of_an_iteration(path):
    batches = iter(ChunkLoader(path, 16))
    next(batches)
    assert reading_threads()
    del batches
    assert not reading_threads()


def test_context_manager(path):
    with ChunkLoader(path, 16) as loader:
        list(loader)
        assert reading_threads()
    assert not reading_threads()
    with pytest.raises(ValueError, match="on purpose"), loader:
        for _ in loader:
            raise ValueError("on purpose")
    assert not reading_threads()
    loader.close()
    loader.close()


def test_an_error_in_starting_leaves_nothing(path, monkeypatch):
    loader = ChunkLoader(path, 16)
    watch(monkeypatch, "begin slot", failure(MemoryError("no room")))
    with pytest.raises(MemoryError, match="no room"):
        list(loader)


def test_memory_is_free_after_closing(large):
    with ChunkLoader(**ordered(large, 40, window_chunks=5)) as loader:
        kept = [weakref.ref(next(iter(loader))[0].untyped_storage())]
    gc.collect()
    assert all(ref() is None for ref in kept)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("reader", ["direct", "h5py"])
def test_a_fork_while_a_loader_is_open(path, reader):
    """The fork ends as it should, can let go of the loader, and the parent reads on."""
    loader = loader_by(**ordered(path, 16, **ORDER), reader=reader)
    [expected] = expected_epochs(path, 16, **ORDER)
    batches = iter(loader)
    found = [next(batches)]
    assert in_fork(lambda: None) == 0
    assert in_fork(loader.close) == 0
    found += list(batches)
    assert as_lists(found) == expected
    loader.close()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_in_an_epoch_has_no_threads(path):
    """An error at once, and after closing it reads with threads of its own."""
    loader = ChunkLoader(**ordered(path, 16, **ORDER))
    epochs = expected_epochs(path, 16, 2, **ORDER)
    batches = iter(loader)
    next(batches)

    def iterate():
        with pytest.raises(FileError, match=r"a\.h5: .*fork"):
            next(batches)
        loader.close()
        loader.set_epoch(1)
        assert as_lists(loader) == epochs[1]
        loader.close()

    assert in_fork(iterate) == 0
    list(batches)
    assert as_lists(loader) == epochs[1]
    loader.close()


@pytest.mark.parametrize("stop", [1, None])
def test_a_fork_between_epochs_starts_threads_of_its_own(path, stop):
    loader = ChunkLoader(**ordered(path, 16, **ORDER))
    epochs = expected_epochs(path, 16, 2, **ORDER)
    as_lists(islice(loader, stop))

    def iterate():
        assert as_lists(loader) == epochs[1]
        loader.close()

    assert in_fork(iterate) == 0
    assert as_lists(loader) == epochs[1]
    loader.close()


def test_the_loader_is_used_from_another_thread(path):
    found: list[list[int]] = []
    with ChunkLoader(path, 16) as loader:
        thread = threading.Thread(target=lambda: found.append(numbers(loader)))
        thread.start()
        thread.join(60)
        found.append(numbers(loader))
    assert [sorted(each) for each in found] == [list(range(N))] * 2


def test_readers_of_hdf5_do_not_disturb_each_other(path):
    """A dataset and a loader on the same file, in turns."""
    dataset, reader = ChunkDataset(path), H5Reader(path)
    with loader_by(**ordered(path, 16, **ORDER), reader="h5py") as loader:
        for images, labels in loader:
            assert dataset[labels][0].equal(images)
            out = read_rows(reader, "images", labels.numpy())
            np.testing.assert_array_equal(out, images.numpy())
    dataset.close()


@pytest.mark.parametrize("options", [{}, {"compression": "gzip"}, {"compression": "lzf", "fletcher32": True}])
def test_many_tiny_chunks(tmp_path, options):
    images = np.random.default_rng(0).integers(0, 99, (120, 32, 32, 3), dtype=np.uint8)
    path = make_file(tmp_path / "a.h5", images=(images, {"chunks": (1, 4, 4, 3), **options}))
    with ChunkLoader(path, 16, shuffle=False) as loader:
        assert "images: direct" in repr(loader)
        np.testing.assert_array_equal(torch.cat([batch for (batch,) in loader]), images)


def test_a_second_thread_that_takes_batches_is_told_so(path):
    taking, go_on = threading.Event(), threading.Event()

    def wait(images):
        taking.set()
        assert go_on.wait(30)
        return images

    with ChunkLoader(path, 50, transforms=[wait]) as loader:
        batches, taken = iter(loader), []
        thread = threading.Thread(target=lambda: taken.append(next(batches)))
        thread.start()
        assert taking.wait(30)
        with pytest.raises(OptionError, match="another thread"):
            next(batches)
        go_on.set()
        thread.join()
        assert len(taken) == 1 and len(list(batches)) == len(loader) - 1


def test_a_closed_loader_can_be_iterated_again(path):
    loader = ChunkLoader(path, 50)
    first = sum(len(images) for images, *_ in loader)
    loader.close()
    assert sum(len(images) for images, *_ in loader) == first
    loader.close()


def test_what_training_scripts_read_of_a_dataloader(path):
    """As a DataLoader with the same arguments has it."""
    dataset = ChunkDataset(path)
    with ChunkLoader(dataset, 16, drop_last=True) as loader:
        assert loader.dataset is dataset and len(loader.dataset) == N
        assert (loader.batch_size, loader.drop_last, loader.num_workers) == (16, True, 0)
        assert loader.sampler is loader.batch_sampler and len(loader.sampler) == len(loader) == N // 16
        loader.sampler.set_epoch(3)
        assert loader.order.epoch == 3
    with ChunkLoader(path, 16, shuffle=False, transforms=[Normalize(MEAN, STD), torch.abs]) as loader:
        batch = next(iter(loader))
        assert isinstance(loader.sampler, torch.utils.data.SequentialSampler)
        found = loader.collate_fn(loader.dataset.__getitems__(range(16)))
        assert torch.allclose(found[0], batch[0], atol=1e-5) and found[1].equal(batch[1])
        loader.sampler.set_epoch(2)
        assert loader.order.epoch == 2
