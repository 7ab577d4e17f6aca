"""ChunkSampler: epochs, warnings, and chunks that are read once."""

from __future__ import annotations

import bisect
import itertools

import pytest
import torch
from support.faults import as_worker, through_hdf5
from support.foreign import chunk_table, counted, make_file, make_images, read_epochs, values
from torch.utils.data import DataLoader, TensorDataset

import h5chunk
from h5chunk.errors import OptionError
from h5chunk.feed.dataset import ChunkDataset
from h5chunk.feed.sample_reader import SampleReader
from h5chunk.feed.sampler import ChunkSampler
from h5chunk.plan.cache import CacheSettings

__all__ = ["counted"]


@pytest.fixture(autouse=True)
def hdf5_reads(monkeypatch):
    """Plain bytes, too, are read through HDF5's cache, as where a file needs it: it is the cache that is tried here."""
    through_hdf5(monkeypatch)


@pytest.fixture
def dataset(tmp_path):
    return ChunkDataset(make_images(tmp_path / "a.h5", 403, 4))


def test_every_sample_once_an_epoch(dataset):
    sampler = ChunkSampler(dataset, 32, seed=3)
    batches = list(sampler)
    assert len(sampler) == len(batches) == 13
    assert all(isinstance(batch, list) and all(type(i) is int for i in batch) for batch in batches)
    assert [len(batch) for batch in batches] == [32] * 12 + [19]
    assert sorted(itertools.chain(*batches)) == list(range(403))


def test_each_iteration_is_an_epoch(dataset):
    sampler = ChunkSampler(dataset, 32)
    first, second = list(sampler), list(sampler)
    assert first != second
    assert sampler.order.epoch == 2
    sampler.set_epoch(0)
    assert list(sampler) == first
    assert list(sampler) == second
    sampler.set_epoch(1)
    assert list(sampler) == second


def test_iter_alone_does_not_use_an_epoch_up(dataset):
    sampler = ChunkSampler(dataset, 32)
    expected = list(sampler)
    sampler.set_epoch(0)
    iter(sampler)
    started = iter(sampler)
    assert next(started) == expected[0]
    assert sampler.order.epoch == 1


def test_a_running_epoch_is_not_changed_by_set_epoch(dataset):
    sampler = ChunkSampler(dataset, 32)
    expected = list(sampler)
    sampler.set_epoch(0)
    running = iter(sampler)
    first = next(running)
    sampler.set_epoch(7)
    assert [first, *running] == expected


def test_equal_seeds_give_equal_batches(dataset, tmp_path):
    again = ChunkDataset(dataset.path)
    assert list(ChunkSampler(dataset, 32, seed=5)) == list(ChunkSampler(again, 32, seed=5))
    assert list(ChunkSampler(dataset, 32, seed=5)) != list(ChunkSampler(dataset, 32, seed=6))


def test_drop_last_and_file_order(dataset):
    assert [len(batch) for batch in ChunkSampler(dataset, 32, drop_last=True)] == [32] * 12
    assert len(ChunkSampler(dataset, 32, drop_last=True)) == 12
    assert list(itertools.chain(*ChunkSampler(dataset, 32, shuffle=False))) == list(range(403))


def test_defaults(dataset):
    order = ChunkSampler(dataset, 32).order
    assert (order.chunk_samples, order.window_chunks, order.interleave) == (4, dataset.window_chunks, 1)
    assert ChunkSampler(dataset, 32, window_chunks=1).order.interleave == 12  # of 13 windows of a batch each
    assert (order.seed, order.epoch, order.shuffle, order.drop_last) == (0, 0, True, False)
    assert "batch_size=32" in repr(ChunkSampler(dataset, 32))


def test_the_files_window_is_the_default(tmp_path, class_folder):
    h5chunk.convert(class_folder(30), tmp_path / "a.h5", workers=0, chunk_samples=2)
    dataset = ChunkDataset(tmp_path / "a.h5")
    assert ChunkSampler(dataset, 4).order.window_chunks == dataset.header.window_chunks
    assert ChunkSampler(dataset, 4, window_chunks=3).order.window_chunks == 3


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": 4, "window_chunks": 0}, "window_chunks is 0"),
        ({"batch_size": 4, "seed": -1}, "seed is -1"),
        ({"batch_size": 4, "num_workers": -1}, "num_workers is -1"),
    ],
)
def test_what_cannot_be(dataset, wrong, message):
    with pytest.raises(OptionError, match=message):
        ChunkSampler(dataset, **wrong)


def test_an_own_length_is_refused(dataset):
    class Longer(ChunkDataset):
        def __len__(self):
            return 1000

    for make in (ChunkSampler, h5chunk.ChunkLoader):
        with pytest.raises(OptionError, match="Longer has its own __len__, which returns 1000"):
            make(Longer(dataset.path), 4)


def test_what_is_no_chunk_dataset():
    with pytest.raises(OptionError, match="dataset is a TensorDataset: pass a ChunkDataset, whose chunks are needed"):
        ChunkSampler(TensorDataset(torch.zeros(3)), 2)


@pytest.mark.parametrize(("num_workers", "as_sampler"), [(0, False), (0, True), (1, False)])
def test_batches_of_one_part_are_not_read_from_another(dataset, num_workers, as_sampler):
    def numbers(sampler, data):
        options = {"sampler": sampler, "batch_size": None} if as_sampler else {"batch_sampler": sampler}
        loader = DataLoader(data, num_workers=num_workers, **options)
        return sorted(number for (images,) in loader for number in (images[:, 0].int() * 256 + images[:, 1]).tolist())

    size = len(dataset)
    train, val = dataset.subset(range(size // 2)), dataset.subset(range(size - size // 2, size))
    for of, data, message in (
        (val, dataset, f"drawn from a data set of {size // 2} samples, but is read from one of {size}: pass"),
        (dataset, val, f"drawn from a data set of {size} samples, but is read from one of {size // 2}: pass"),
        (
            val,
            train,
            f"drawn from a data set of {size // 2} samples, but is read from one of {size // 2} other samples: pass",
        ),
    ):
        with pytest.raises(OptionError, match=message):
            numbers(ChunkSampler(of, 7), data)
    again = ChunkDataset(dataset.path).subset(range(size - size // 2, size))
    assert numbers(ChunkSampler(val, 7), again) == val.samples.tolist()
    assert numbers(ChunkSampler(dataset.subset(range(size)), 7), dataset) == list(range(size))
    assert val.subset([0]).numbering not in (val.numbering, train.subset([0]).numbering)


def test_set_epoch_checks(dataset):
    with pytest.raises(OptionError, match="epoch is -1"):
        ChunkSampler(dataset, 4).set_epoch(-1)


# What is read


def amplification(path, counted, num_epochs=2, fields=("images",), drop_last=False, **options) -> float:
    """Stored bytes of chunks that HDF5 read, over those that each epoch needs once."""
    dataset = ChunkDataset(path, fields=fields)
    sampler = ChunkSampler(dataset, drop_last=drop_last, **options)
    dataset[0]
    counted[-1].reads.clear()
    read_epochs(dataset, sampler, num_epochs)
    return chunk_bytes_read(path, counted[-1]) / (num_epochs * sum(chunk_table(path).values()))


def chunk_bytes_read(path, counting) -> int:
    """Bytes that were read of chunks, whole ones or parts."""
    table = sorted(chunk_table(path).items())
    starts = [offset for offset, _ in table]
    total = 0
    for offset, size in counting.reads:
        number = bisect.bisect_right(starts, offset) - 1
        total += size if number >= 0 and offset < sum(table[number]) else 0
    return total


SHAPES = {
    "powers of two": (4096, 8),
    "a short chunk": (4001, 8),
    "tens": (4003, 10),
    "few chunks": (4000, 64),
    "large chunks": (10_000, 128),
    "samples": (500, 1),
}
DRAWS = {
    "one batch a window": {"batch_size": 64, "window_chunks": 4},
    "two batches a window": {"batch_size": 32, "window_chunks": 8, "num_workers": 8},
    "a chunk of several batches": {"batch_size": 16, "window_chunks": 4, "num_workers": 8},
    "borders": {"batch_size": 30, "window_chunks": 9, "num_workers": 8},
    "one batch with borders": {"batch_size": 100, "window_chunks": 4},
    "large windows": {"batch_size": 24, "window_chunks": 12, "num_workers": 6, "drop_last": True},
    "file order": {"batch_size": 24, "shuffle": False},
}


def combinations():
    """Of large samples, which take large files, two shapes with every draw; the others nightly."""
    for sample_bytes in (100, 20_000, 33_000, 100_000):  # read together, one by one, and uncached
        for shape, draw in itertools.product(SHAPES, DRAWS):
            seldom = sample_bytes > 100 and shape not in ("a short chunk", "tens")
            yield pytest.param(shape, draw, sample_bytes, marks=[pytest.mark.nightly] if seldom else [])


@pytest.mark.parametrize(("shape", "draw", "sample_bytes"), list(combinations()))
def test_each_chunk_is_read_once(tmp_path, counted, shape, draw, sample_bytes):
    num_samples, chunk_samples = SHAPES[shape]
    if sample_bytes > 100:
        num_samples = max(3, 12_000_000 // sample_bytes // chunk_samples) * chunk_samples + num_samples % chunk_samples
    path = make_images(tmp_path / "a.h5", num_samples, chunk_samples, (sample_bytes,))
    assert amplification(path, counted, **DRAWS[draw]) <= 1.02


@pytest.mark.parametrize("draw", DRAWS)
def test_each_gzip_chunk_is_decoded_once(tmp_path, counted, draw):
    path = make_images(tmp_path / "a.h5", 2003, 8, (300,), compression="gzip", compression_opts=1)
    assert amplification(path, counted, **DRAWS[draw]) <= 1.02


def test_chunks_that_are_pieces_of_samples(tmp_path, counted):
    images = values((1500, 12, 12, 3), "u1")
    path = make_file(tmp_path / "a.h5", images=(images, {"chunks": (10, 5, 4, 1), "compression": "lzf"}))
    assert amplification(path, counted, batch_size=32, window_chunks=8, num_workers=4) <= 1.02


def test_labels_are_read_once(tmp_path, counted):
    path = make_file(
        tmp_path / "a.h5",
        images=(values((2000, 500), "u1"), {"chunks": (8, 500)}),
        labels=(values((2000,), "i8"), {"chunks": (250,), "compression": "gzip"}),
    )
    dataset = ChunkDataset(path)
    sampler = ChunkSampler(dataset, 32, window_chunks=8, num_workers=8)
    dataset[0]
    counted[-1].reads.clear()
    read_epochs(dataset, sampler)
    table = chunk_table(path, "labels")
    assert sum(offset in table for offset, _ in counted[-1].reads) <= len(table)


def test_a_cache_that_is_too_small_reads_more(tmp_path, counted, monkeypatch):
    """The measurement notices."""
    path = make_images(tmp_path / "a.h5", 4000, 8, (20_000,))
    monkeypatch.setattr(SampleReader, "cache", CacheSettings(500, 320_000, 0.0))
    assert amplification(path, counted, **DRAWS["two batches a window"]) > 1.5


def test_converted_files_are_read_once(tmp_path, counted, class_folder):
    path = tmp_path / "a.h5"
    h5chunk.convert(class_folder(203, classes=2), path, workers=0, chunk_samples=4)
    for batch_size in (8, 10, 16):
        assert amplification(path, counted, batch_size=batch_size, window_chunks=6, num_workers=4) <= 1.04  # 51 chunks


@pytest.mark.filterwarnings("ignore:num_workers is ., which does not divide the sampler's:UserWarning")
@pytest.mark.parametrize(("num_workers", "bound"), [(2, 1.02), (3, 1.02), (4, 1.02), (5, 5), (6, 2.02)])
def test_workers_read_each_chunk_once(tmp_path, counted, monkeypatch, num_workers, bound):
    """Each worker's share of the batches through its share of the cache; workers that cannot share well, bounded."""
    path = make_images(tmp_path / "a.h5", 9600, 8, (100,))
    table = chunk_table(path)
    total = memory = 0
    for worker in range(num_workers):
        dataset = ChunkDataset(path)
        sampler = ChunkSampler(dataset, 32, window_chunks=8, num_workers=12 if num_workers != 6 else 3)
        as_worker(monkeypatch, worker, num_workers)
        dataset[0]
        memory += dataset.cache.nbytes
        counted[-1].reads.clear()
        for batch in list(sampler)[worker::num_workers]:
            dataset.__getitems__(batch)
        total += sum(size for offset, size in counted[-1].reads if offset in table)
    assert total <= bound * 9600 * 100 + num_workers * 800
    if num_workers in (2, 3, 4):
        whole = 12 * 8 * 800
        assert memory <= whole + num_workers * 800


def test_loaders_of_other_data_are_left_alone():
    batches = list(DataLoader(TensorDataset(torch.arange(6)), batch_size=3))
    assert [batch[0].tolist() for batch in batches] == [[0, 1, 2], [3, 4, 5]]


def test_too_few_samples_to_pad_are_refused_at_once(tmp_path):
    dataset = ChunkDataset(make_images(tmp_path / "a.h5", 5, 2))
    with pytest.raises(OptionError, match=r"5 samples are too few for 8 lanes"):
        ChunkSampler(dataset, 4, pad=True, rank=7, world_size=8)
    dataset.close()
