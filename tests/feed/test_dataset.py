"""ChunkDataset as a map-style dataset, in one process."""

from __future__ import annotations

import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import h5py
import numpy as np
import pytest
import torch
from support.faults import small
from support.foreign import make_file, make_images, values
from support.leftovers import descriptors

import h5chunk
from h5chunk.errors import FieldError, FileError, OptionError
from h5chunk.feed import sample_reader
from h5chunk.feed.dataset import ChunkDataset
from h5chunk.feed.sampler import ChunkSampler
from h5chunk.plan.cache import CacheSettings

N = 37


def check_dataset(dataset: ChunkDataset, expected: dict[str, np.ndarray]) -> None:
    """Every way of indexing gives what NumPy would, as tensors."""
    assert dataset.fields == tuple(expected)
    length = len(next(iter(expected.values())))
    assert len(dataset) == length

    def check(found, rows):
        assert isinstance(found, tuple) and len(found) == len(expected)
        for got, data in zip(found, expected.values(), strict=True):
            want = data[rows]
            if data.dtype.kind == "S":
                assert got == np.char.decode(want).tolist()
            else:
                assert isinstance(got, torch.Tensor)
                np.testing.assert_array_equal(got.numpy(), want)
                assert got.numpy().dtype == data.dtype.newbyteorder("=")

    for index in (0, length - 1, -1, -length, np.int32(3), torch.tensor(2)):
        check(dataset[index], int(index))
    for rows in ([3, 1, 2], [5, 5, 0, -1, 5], np.array([length - 1, 0]), torch.tensor([1, 2]), (4,), []):
        check(dataset[rows], np.asarray(rows, np.int64))
    for rows in (slice(3, 9), slice(None), slice(None, None, -7), slice(5, 5)):
        check(dataset[rows], rows)
    check(dataset[range(2, 9, 3)], np.arange(2, 9, 3))
    batch = dataset.__getitems__([7, 2, 7])
    assert len(batch) == 3
    for sample, row in zip(batch, [7, 2, 7], strict=True):
        check(sample, row)


FILES = {
    "contiguous": ("u1", {}),
    "auto-chunked": ("u1", {"chunks": True}),
    "whole samples": ("u1", {"chunks": (4, 3, 6, 5)}),
    "gzip": ("u1", {"chunks": (8, 3, 6, 5), "compression": "gzip"}),
    "lzf": ("u1", {"chunks": (8, 3, 6, 5), "compression": "lzf"}),
    "float32": ("f4", {"chunks": (8, 3, 6, 5)}),
    "float64 big-endian": (">f8", {"chunks": (8, 3, 6, 5)}),
    "float16": ("f2", {}),
    "int16": (">i2", {}),
    "bool": ("?", {"chunks": (8, 3, 6, 5)}),
    "resizable": ("i4", {"maxshape": (None, 3, 6, 5)}),
}


@pytest.mark.parametrize("kind", FILES)
def test_any_file(tmp_path, kind):
    dtype, options = FILES[kind]
    images, labels = values((N, 3, 6, 5), dtype), values((N,), "i8")
    path = make_file(tmp_path / "a.h5", images=(images, options), labels=(labels, {}))
    check_dataset(ChunkDataset(path), {"images": images, "labels": labels})
    check_dataset(ChunkDataset(path, fields=["labels"]), {"labels": labels})


def test_fields_by_name_and_order(tmp_path):
    x, y, name = values((N, 4), "f4"), values((N,), "u1"), values((N,), "S6")
    path = make_file(tmp_path / "a.h5", train__x=(x, {"chunks": (5, 4)}), y=(y, {}), name=(name, {}))
    fields = {"name": "name", "target": "y", "input": "train/x"}
    check_dataset(ChunkDataset(path, fields=fields), {"name": name, "target": y, "input": x})
    check_dataset(ChunkDataset(path, fields="y"), {"y": y})
    check_dataset(ChunkDataset(str(path), fields=("y", "name")), {"y": y, "name": name})


def test_strings_are_str_everywhere(tmp_path):
    """values(), samples, batches, subsets, splits and weights agree on what a string field holds."""
    split = np.array([name.encode() for name in ["train", "val", "été", ""] * 5])
    split[-1] = b"\xff"
    images = values((20, 4), "u1")
    path = make_file(
        tmp_path / "a.h5", images=(images, {"chunks": (4, 4)}), split=(split, {}), h5chunk__row_ids=(split, {})
    )
    dataset = ChunkDataset(path, fields=["images", "split"])
    names = dataset.values("split")
    assert (
        names.tolist()
        == [dataset[i][1] for i in range(20)]
        == dataset[:][1]
        == [*(["train", "val", "été", ""] * 5)[:-1], "\\xff"]
    )
    batches = torch.utils.data.DataLoader(dataset, batch_size=8)
    assert [name for _, batch in batches for name in batch] == names.tolist()
    assert dataset.values("h5chunk/row_ids").tolist() == names.tolist()
    train = dataset.subset(names == "train")
    assert train.samples.tolist() == [0, 4, 8, 12, 16] and set(train.values("split")) == {"train"}
    assert dataset.subset([]).values("split").tolist() == []
    parts = dataset.subset(names != "\\xff").split((0.8, 0.2), stratify="split")
    assert [sum(part.values("split") == "train") for part in parts] == [4, 1]
    drawn = [i for batch in ChunkSampler(dataset, 4, weights="split") for i in batch]
    assert sum(name == "\\xff" for name in names[drawn]) == 4


def test_without_labels_there_are_only_images(tmp_path):
    dataset = ChunkDataset(make_images(tmp_path / "a.h5", 20, 4))
    assert dataset.fields == ("images",)
    (image,) = dataset[3]
    assert image.tolist()[:2] == [0, 3]


def test_converted(tmp_path, class_folder):
    path = tmp_path / "a.h5"
    h5chunk.convert(class_folder(30), path, workers=0, chunk_samples=4)
    dataset = ChunkDataset(path)
    with h5py.File(path) as file:
        check_dataset(dataset, {"images": file["images"][:], "labels": file["labels"][:]})
    assert dataset.classes == ("class0", "class1", "class2")
    assert dataset.header is not None
    assert (dataset.chunk_samples, dataset.window_chunks) == (4, dataset.header.window_chunks)
    assert dataset.cache == dataset.header.cache
    assert "30 samples of images uint8[3, 10, 12], labels int64[]; chunks of 4 samples" in repr(dataset)


@pytest.mark.parametrize("index", [N, -N - 1, 10**9])
def test_out_of_range(tmp_path, index):
    dataset = ChunkDataset(make_images(tmp_path / "a.h5", N, 4))
    for call in (lambda: dataset[index], lambda: dataset[[0, index]], lambda: dataset.__getitems__([index])):
        with pytest.raises(IndexError, match=f"sample {index} is out of range: .* has samples 0 to 36"):
            call()


def test_iterating_ends(tmp_path):
    """Python's own protocol: __getitem__ from 0 on until IndexError."""
    assert len(list(ChunkDataset(make_images(tmp_path / "a.h5", 5, 2)))) == 5


@pytest.mark.parametrize("index", [[True, False] * 5, [0.5], np.zeros((2, 2), int), [[1]], [None]])
def test_what_is_no_index(tmp_path, index):
    with pytest.raises(IndexError, match=r"indices (are of type|have 2 axes)"):
        ChunkDataset(make_images(tmp_path / "a.h5", 10, 4))[index]


def double(image: torch.Tensor) -> torch.Tensor:
    return image.double() * 2


def test_transform_is_applied_per_sample(tmp_path):
    images, labels = values((N, 3, 4), "u1"), values((N,), "i8")
    path = make_file(tmp_path / "a.h5", images=(images, {"chunks": (4, 3, 4)}), labels=(labels, {}))
    shapes = []

    def transform(image):
        shapes.append(tuple(image.shape))
        return double(image)

    dataset = ChunkDataset(path, transforms=transform)
    image, label = dataset[5]
    np.testing.assert_array_equal(image, images[5] * 2.0)
    assert label == labels[5]
    found = dataset[[4, 2]]
    np.testing.assert_array_equal(found[0], images[[4, 2]] * 2.0)
    np.testing.assert_array_equal(found[1], labels[[4, 2]])
    batch = dataset.__getitems__([7, 7, 1])
    np.testing.assert_array_equal(np.stack([sample[0] for sample in batch]), images[[7, 7, 1]] * 2.0)
    assert shapes == [(3, 4)] * 6


def test_pickles_without_handles(tmp_path):
    path = make_images(tmp_path / "a.h5", 20, 4)
    dataset = ChunkDataset(path, transforms=double)
    before = dataset[3]
    again = pickle.loads(pickle.dumps(dataset))
    assert again[3][0].equal(before[0])
    assert again.cache == dataset.cache


def test_batches_are_not_overwritten(tmp_path):
    dataset = ChunkDataset(make_images(tmp_path / "a.h5", 200, 4))
    kept = [dataset[[i, i + 1]][0] for i in range(0, 200, 2)]
    assert [int(tensor[0, 1]) for tensor in kept] == list(range(0, 200, 2))


# Cache


def test_the_samplers_order_decides_the_cache(tmp_path):
    dataset = ChunkDataset(make_images(tmp_path / "a.h5", 2000, 4))
    dataset[0]
    sampler = ChunkSampler(dataset, 8, window_chunks=6, num_workers=4)
    assert sampler.order.open_chunks == 24
    assert dataset.cache == CacheSettings(500, 25 * 4 * 50, 0.0)
    ChunkSampler(dataset, 8, shuffle=False)  # needs less, but the other one may be used, too
    assert dataset.cache == CacheSettings(500, 25 * 4 * 50, 0.0)
    other = ChunkDataset(dataset.path)
    ChunkSampler(other, 8, window_chunks=2)  # windows of one batch: no more than is read in passing
    assert other.cache == CacheSettings(500, 2 * 4 * 50, 0.75)


def test_a_file_with_huge_bands_keeps_memory_bounded(tmp_path, monkeypatch):
    small(monkeypatch, slack_bytes=2 << 30)
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:  # nothing is written: one sample lies in 64 chunks that take 1.2 GB
        file.create_dataset("images", (100_000, 64, 64, 3), "u1", chunks=(100_000, 8, 8, 3))
    dataset = ChunkDataset(path)
    assert dataset.window_chunks == 1
    sampler = ChunkSampler(dataset, 32)
    assert sampler.order.interleave == 1
    assert dataset.cache.nbytes <= 100_000 * 64 * 64 * 3


# Errors


def test_errors_come_at_once(tmp_path):
    path = make_images(tmp_path / "a.h5", 20, 4)
    with pytest.raises(FieldError, match="has no dataset 'labels'; it has images"):
        ChunkDataset(path, fields=["images", "labels"])
    with pytest.raises(FileError, match="no such file"):
        ChunkDataset(tmp_path / "b.h5")
    with pytest.raises(OptionError, match="fields is empty"):
        ChunkDataset(path, fields=[])


def test_a_type_that_torch_lacks(tmp_path):
    path = make_file(tmp_path / "a.h5", x=(values((5,), "f8").astype(np.longdouble), {}))
    with pytest.raises(FieldError, match=r"field 'x' has the type .*, which torch does not support: leave it out"):
        ChunkDataset(path, fields="x")


def test_a_file_replaced_before_the_first_read(tmp_path):
    path = make_images(tmp_path / "a.h5", 20, 4)
    dataset = ChunkDataset(path)
    make_images(tmp_path / "b.h5", 10, 2).replace(path)
    with pytest.raises(FileError, match="replaced or changed since it was first opened"):
        dataset[0]


def test_labels_that_cannot_be_read_are_left_out_with_a_warning(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["images"] = np.ones((6, 2, 2), "u1")
        file.create_dataset("labels", data=["cat", "dog"] * 3, dtype=h5py.string_dtype())
    with pytest.warns(UserWarning, match="'labels' has strings of variable length.*; batches have no labels"):
        dataset = h5chunk.ChunkDataset(tmp_path / "x.h5")
    assert dataset.fields == ("images",) and len(dataset) == 6
    named = h5chunk.ChunkDataset(tmp_path / "x.h5", fields=["images", "labels"])
    assert (named[3][1], named.fields) == ("dog", ("images", "labels"))


def test_indices_may_be_a_reversed_view_of_an_array(tmp_path):
    """The numbers of the samples are a tensor, which a view with negative strides cannot become."""
    dataset = ChunkDataset(make_images(tmp_path / "a.h5", N, 4), fields=["images", "sample_number"])
    images, numbers = dataset[np.arange(9)[::-2]]
    assert images[:, 1].tolist() == numbers.tolist() == [8, 6, 4, 2, 0]


def test_closing_just_before_another_thread_reads(tmp_path, monkeypatch):
    data = np.arange(60 * 2048).reshape(60, 2048)
    make_file(tmp_path / "a.h5", x=(data, {"chunks": (4, 2048), "compression": "gzip"}))
    dataset = ChunkDataset(tmp_path / "a.h5", fields=["x"])
    close = dataset._sample_reader.close
    monkeypatch.setattr(sample_reader, "get_worker_info", lambda: close())  # called once the files are open
    for rows in ([1], [2, 3, 50]):
        np.testing.assert_array_equal(dataset[rows][0], data[rows])
    assert not any(str(tmp_path) in each for each in descriptors())


def test_closing_waits_for_other_threads(tmp_path):
    """A thread never reads another file whose descriptor has the number of the one that was closed."""
    for value in (0, 1):
        with h5py.File(tmp_path / f"{value}.h5", "w") as file:
            file["x"] = np.full((600, 2048), value, np.uint8)
    datasets = [ChunkDataset(tmp_path / f"{value}.h5", fields=["x"]) for value in (0, 1)]
    stop = threading.Event()

    def check(value: int) -> None:
        while not stop.is_set():
            assert (datasets[value][range(0, 600, 3)][0] == value).all()

    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(check, value) for value in (0, 1, 0, 1)]
        for _ in range(300):
            for dataset in datasets:
                dataset.close()
            time.sleep(0.002)
        stop.set()
        for each in running:
            each.result()
