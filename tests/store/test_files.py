"""Several files as one data set: what one file of the same samples gives, and errors that name the file."""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import shutil
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.faults import watch
from support.file_sets import EVEN, IMAGES, UNEVEN, Sizes, make_set, total
from support.foreign import chunk_table, make_file, read_epochs, values
from support.leftovers import nothing_is_left
from support.loaders import loader_by
from support.orders import ordered, read_alone
from torch.utils.data import DataLoader

import h5chunk
from h5chunk.errors import FieldError, FileError, OptionError, StateError
from h5chunk.feed.dataset import ChunkDataset
from h5chunk.feed.loader import ChunkLoader
from h5chunk.feed.sampler import ChunkSampler
from h5chunk.store.read.field_readers import scratch_bytes
from h5chunk.store.read.files import list_files, open_reader
from h5chunk.store.read.fileset import FileSet

__all__ = ["nothing_is_left"]

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),  # fewer cores than workers
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


def epoch_of(batches: Any) -> list[list[int]]:
    """The labels of each batch; the images are those of the labels."""
    found = []
    for images, labels in batches:
        assert images.numpy().tobytes() == IMAGES[labels.numpy()].tobytes()
        found.append(labels.tolist())
    return found


@pytest.fixture(params=["uneven", "even"])
def paths(tmp_path: Path, request: pytest.FixtureRequest) -> list[Path]:
    return make_set(tmp_path / "set", UNEVEN if request.param == "uneven" else EVEN)


def flat(batches: list[list[int]]) -> list[int]:
    return [label for batch in batches for label in batch]


# ---- what comes out of it


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), min_size=2, max_size=6),
    batch_size=st.integers(1, 40),
    shuffle=st.booleans(),
    gzip=st.booleans(),
    seed=st.integers(0, 5),
)
def test_every_sample_once_the_same_by_every_reader(tmp_path_factory, sizes, batch_size, shuffle, gzip, seed) -> None:
    folder = tmp_path_factory.mktemp("sets") / "set"
    make_set(folder, sizes, **({"compression": "gzip"} if gzip else {}))
    count = total(sizes)
    dataset = ChunkDataset(folder)
    assert len(dataset) == count
    if not count:
        return
    rows = np.random.default_rng(seed).integers(-count, count, 30)
    images, labels = dataset[rows]
    np.testing.assert_array_equal(labels, rows % count)
    np.testing.assert_array_equal(images, IMAGES[rows % count])
    sampler = ChunkSampler(dataset, batch_size, shuffle=shuffle, seed=seed, window_chunks=3, num_workers=0)
    epochs = [epoch_of(dataset[batch] for batch in sampler) for _ in range(2)]
    for epoch in epochs:
        assert sorted(flat(epoch)) == list(range(count))
        assert shuffle or flat(epoch) == list(range(count))
    for reader in ("direct", "h5py"):
        with loader_by(
            **ordered(folder, batch_size, window_chunks=3, shuffle=shuffle, seed=seed), reader=reader
        ) as loader:
            assert [epoch_of(loader) for _ in range(2)] == epochs
    dataset.close()


@pytest.mark.parametrize("options", [{}, {"lanes": 3}, {"shuffle": False}, {"drop_last": True}], ids=str)
def test_even_chunks_give_the_order_of_one_file(tmp_path: Path, options: dict[str, Any]) -> None:
    make_set(tmp_path / "set", EVEN)
    (one,) = make_set(tmp_path / "one", [(total(EVEN), 8)])
    reader = open_reader(tmp_path / "set")
    assert isinstance(reader, FileSet) and reader.chunk_starts is None and reader.chunk_samples == 8
    for window in (None, 3):
        with h5chunk.ChunkLoader(**ordered(one, 24, window_chunks=window, **options)) as whole:
            expected = [epoch_of(whole) for _ in range(2)]
        with h5chunk.ChunkLoader(**ordered(tmp_path / "set", 24, window_chunks=window, **options)) as loader:
            assert [epoch_of(loader) for _ in range(2)] == expected


@pytest.mark.parametrize(
    ("sizes", "even"),
    [
        ([(8, 4), (12, 4)], True),
        ([(8, 4), (13, 4)], True),  # the last chunk of all is short
        ([(8, 4), (0, 7), (3, 3), (0, 9)], True),  # or is a file of its own
        ([(0, 7), (8, 4)], True),
        ([(9, 4), (12, 4)], False),
        ([(8, 4), (12, 6)], False),
        ([(8, 4), (3, 2)], False),
        ([(0, 4), (0, 5)], True),
    ],
)
def test_when_chunks_are_even(tmp_path: Path, sizes: Sizes, even: bool) -> None:
    make_set(tmp_path / "set", sizes)
    reader = open_reader(tmp_path / "set")
    assert isinstance(reader, FileSet) and (reader.chunk_starts is None) == even
    if not even:
        expected, first = [], 0
        for count, chunk in sizes:
            expected += list(range(first, first + count, chunk))
            first += count
        assert reader.chunk_starts.tolist() == [*expected, first]


def test_batches_are_of_few_chunks(tmp_path: Path) -> None:
    make_set(tmp_path / "set", UNEVEN)
    sampler = ChunkSampler(ChunkDataset(tmp_path / "set"), 16, window_chunks=2, num_workers=1)
    starts = open_reader(tmp_path / "set").chunk_starts
    touched = [len(np.unique(np.searchsorted(starts, batch, "right"))) for batch in sampler]
    assert np.mean(touched) < 8  # of 53


def test_ranks_read_all_samples_once(paths: list[Path]) -> None:
    count = len(ChunkDataset(paths))
    loaders = [h5chunk.ChunkLoader(**ordered(paths, 8, lanes=4, rank=rank, world_size=2)) for rank in range(2)]
    alone = h5chunk.ChunkLoader(**ordered(paths, 16, lanes=4, rank=0, world_size=1))
    parts = [epoch_of(loader) for loader in loaders]
    assert sorted(flat([*parts[0], *parts[1]])) == list(range(count))
    for mine, theirs, whole in zip(*parts, epoch_of(alone), strict=True):
        assert sorted(mine + theirs) == sorted(whole)
    for loader in (*loaders, alone):
        loader.close()


def test_parts(paths: list[Path]) -> None:
    dataset = ChunkDataset(paths)
    count = len(dataset)
    some = np.flatnonzero(np.arange(count) % 3 == 1)
    assert dataset.subset(some)[[0, 5]][1].tolist() == some[[0, 5]].tolist()
    with h5chunk.ChunkLoader(**ordered(ChunkDataset(paths).subset(some), 10, window_chunks=2)) as loader:
        assert sorted(flat(epoch_of(loader))) == some.tolist()
    parts = dataset.split((0.5, 0.3, 0.2), seed=2)
    assert sorted(np.concatenate([part.samples for part in parts])) == list(range(count))
    with ChunkLoader(parts[1], 10) as loader:
        assert sorted(flat(epoch_of(loader))) == parts[1].samples.tolist()
    weights = np.zeros(count)
    weights[[3, count - 1]] = 1, 3
    with h5chunk.ChunkLoader(**ordered(dataset, 10, weights=weights)) as loader:
        drawn = flat(epoch_of(loader))
    assert len(drawn) == count and abs(drawn.count(3) - count / 4) < 1 and set(drawn) == {3, count - 1}


@pytest.mark.parametrize("context", ["fork", pytest.param("forkserver", marks=pytest.mark.nightly)])
def test_workers(paths: list[Path], context: str) -> None:
    dataset, order = ChunkDataset(paths), {"window_chunks": 4, "num_workers": 2, "seed": 1}
    expected = [dataset[batch][1].tolist() for batch in ChunkSampler(dataset, 16, **order)]
    sampler = ChunkSampler(dataset, 16, **order)
    loader = DataLoader(dataset, batch_sampler=sampler, num_workers=2, multiprocessing_context=context)
    assert epoch_of(loader) == expected


def test_text_and_other_fields(tmp_path: Path) -> None:
    names = [values((count,), "S5", seed=count) for count in (7, 11)]
    for number, some in enumerate(names):
        numbers = np.arange(len(some), dtype=np.float32) + 10 * number
        make_file(tmp_path / f"{number}.h5", images=(IMAGES[: len(some)], {}), names=(some, {}), x=(numbers, {}))
    dataset = ChunkDataset(tmp_path, fields=["images", "names"])
    rows = [17, 0, 7, 6]
    assert dataset[rows][1] == [np.concatenate(names)[row].decode() for row in rows]
    assert dataset.values("x").tolist() == [*range(7), *range(10, 21)]


def test_contiguous_files(tmp_path: Path) -> None:
    for number, some in enumerate((IMAGES[:50], IMAGES[50:90])):
        make_file(tmp_path / f"{number}.h5", images=(some, {}), labels=(np.arange(50 * number, 50 + 40 * number), {}))
    with ChunkLoader(tmp_path, 16) as loader:
        assert sorted(flat(epoch_of(loader))) == list(range(90))


@pytest.mark.usefixtures("python_threads")
@pytest.mark.parametrize("sizes", [[(96, 4)] * 4, [(99, 4), (120, 2), (80, 8), (85, 5)]], ids=["even", "uneven"])
def test_each_chunk_is_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: Sizes) -> None:
    paths = make_set(tmp_path / "set", sizes, compression="gzip")
    num_chunks = sum(len(chunk_table(path)) for path in paths)
    decoded = watch(monkeypatch, "decode chunk")
    dataset = ChunkDataset(paths, fields=["images"])
    read_epochs(dataset, ChunkSampler(dataset, 8, window_chunks=4, num_workers=2))
    assert num_chunks <= len(decoded) <= 1.1 * num_chunks
    for num_threads in (1, 3):
        decoded.clear()
        read_alone(h5chunk.ChunkLoader(**ordered(dataset, 8, window_chunks=4), num_threads=num_threads))
        assert num_chunks <= len(decoded) <= 1.1 * num_chunks  # windows may cut chunks


def test_memory_is_bounded_and_counted(tmp_path: Path) -> None:
    paths = make_set(tmp_path / "set", [(40, 8)] * 8, compression="gzip")
    with ChunkLoader(paths, 16, num_threads=4) as loader:
        fields = loader._source.fields
        chunk_bytes = 8 * IMAGES[0].nbytes
        assert scratch_bytes([fields["images"]], 4) <= (3 * 4 + 2 * 8) * chunk_bytes
        assert len({id(field.cache) for field in fields.values()}) == 1  # of all fields and files
        epoch_of(loader)
        cache = fields["images"].cache
        assert cache._num_bytes <= cache.limit_bytes


# ---- which files


def test_ways_to_name_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    for name in ("s10.h5", "s9.h5", "s1.hdf5", ".s0.h5", "notes.txt", "s09.h5"):
        shutil.copy(make_file(tmp_path / "a.h5", images=(IMAGES[:3], {})), folder / name)
    assert [path.name for path in list_files(folder)] == ["s1.hdf5", "s09.h5", "s9.h5", "s10.h5"]
    assert [path.name for path in list_files(str(folder / "s*.h5"))] == ["s09.h5", "s9.h5", "s10.h5"]
    assert [path.name for path in list_files([folder / "s9.h5", str(folder / "s?.hdf5")])] == ["s9.h5", "s1.hdf5"]
    monkeypatch.chdir(folder)
    assert [str(path) for path in list_files("s[0-9].h5")] == ["s9.h5"]
    assert list_files("../*/s9.h5")[0].samefile(folder / "s9.h5")
    (folder / "s[0-9].h5").write_bytes(b"")
    assert list_files("s[0-9].h5") == [Path("s[0-9].h5")]  # a file of that very name
    assert [Path(name).name for name in ChunkDataset("s1*").files] == ["s1.hdf5", "s10.h5"]


def test_one_file_is_read_as_such(tmp_path: Path) -> None:
    (path,) = make_set(tmp_path / "set", [(20, 4)])
    for given_path in (path, str(path), [path], tmp_path / "set", tmp_path / "set" / "*.h5"):
        dataset = ChunkDataset(given_path)
        assert not isinstance(open_reader(given_path), FileSet)
        assert dataset.path == str(path) and dataset.files == (str(path),)


def test_a_field_of_another_type(tmp_path: Path) -> None:
    """NumPy takes None for float64."""
    for name, dtype in (("a", "i8"), ("b", "f8")):
        make_file(tmp_path / f"{name}.h5", x=(np.arange(5, dtype=dtype), {}))
    with pytest.raises(FieldError, match=r"b.h5: field 'x' has the dtype float64, but in .*a.h5 it is int64"):
        ChunkDataset(tmp_path, fields=["x"])


def test_no_files(tmp_path: Path) -> None:
    for name in ("", "a\0b"):
        with pytest.raises(OptionError, match=r"path is .*: pass a path, a pattern, or a list of them"):
            list_files(name)
    with pytest.raises(FileError, match="x: cannot be opened: File name too long"):
        list_files("x" * 300)
    with pytest.raises(OptionError, match="path is an empty list: name at least one file"):
        ChunkDataset([])
    with pytest.raises(FileError, match=r"no file in this folder ends in .h5"):
        ChunkDataset(tmp_path)
    with pytest.raises(FileError, match=r"x\*.h5: no file matches"):
        ChunkDataset(tmp_path / "x*.h5")
    with pytest.raises(FileError, match=r"nothing.h5: no such file"):
        ChunkDataset([tmp_path / "nothing.h5", tmp_path / "a.h5"])


def test_a_folder_must_have_all_its_shards(paths: list[Path], tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    for number in (0, 2):
        shutil.copy(paths[number], folder / f"set-0000{number}-of-00003.h5")
    with pytest.raises(FileError, match=r"shards: shard set-00001-of-00003.h5 is missing: restore all shards, or"):
        h5chunk.ChunkLoader(folder, 4)
    assert "not one data set" in str(h5chunk.info(folder))
    there = len(h5chunk.ChunkDataset(folder / "*.h5"))  # asked for by name
    assert there == len(h5chunk.ChunkDataset(sorted(folder.iterdir()))) > 0
    shutil.copy(paths[1], folder / "set-00001-of-00003.h5")
    assert len(h5chunk.ChunkDataset([folder])) > there
    shutil.copy(paths[1], folder / "set-00000-of-00001.h5")
    with pytest.raises(FileError, match="there are sets of 1 and 3 shards named 'set': keep one set"):
        h5chunk.ChunkDataset([folder])


def test_a_file_twice(paths: list[Path], tmp_path: Path) -> None:
    (tmp_path / "link.h5").symlink_to(paths[1])
    with pytest.raises(OptionError, match=r"link.h5 is the same file as .*s1.h5: name it once, .* weights"):
        ChunkDataset([*paths, tmp_path / "link.h5"])


def test_more_files_than_may_be_open(paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    count = len(paths)
    of_others = resource.getrlimit
    limit = count + 31, 99
    monkeypatch.setattr("resource.getrlimit", lambda kind: limit if kind == resource.RLIMIT_NOFILE else of_others(kind))
    with pytest.raises(
        FileError, match=rf"set has {count} files, but this process may open only {count + 31}: .*ulimit -n"
    ):
        ChunkDataset(paths[0].parent)
    monkeypatch.setattr("resource.getrlimit", lambda _: (count + 32, 99))
    assert len(ChunkDataset(paths))


@pytest.mark.parametrize("reader", ["direct", "h5py"])
def test_no_descriptor_left_for_a_file(paths: list[Path], reader: str) -> None:
    loader = loader_by(paths, 16, reader=reader)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[Any] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(limits[0], 256), limits[1]))
        with contextlib.suppress(OSError):
            while True:
                held.append(Path("/dev/null").open())
        for _ in range(3):
            held.pop().close()
        with pytest.raises(FileError, match=r"s\d.h5: cannot be opened: .*Too many open files.*Raise the limit"):
            for _ in loader:
                pass
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for file in held:
            file.close()
        loader.close()


# ---- files that do not agree


def check_refused(first: dict[str, Any], second: dict[str, Any], tmp_path: Path, match: str) -> None:
    for name, datasets in (("a.h5", first), ("b.h5", second)):
        make_file(tmp_path / name, **{key: (data, {}) for key, data in datasets.items()})
    with pytest.raises(FieldError, match=match):
        ChunkDataset([tmp_path / "a.h5", tmp_path / "b.h5"])


def test_fields_must_agree(tmp_path: Path) -> None:
    images, labels = IMAGES[:5], np.arange(5)
    both = {"images": images, "labels": labels}
    for first, second, match in (
        (both, {"images": images}, r"b.h5 has 'images', but .*a.h5 has 'images', 'labels'"),
        ({"images": images}, both, r"b.h5 has 'images', 'labels', but .*a.h5 has 'images'"),
        (both, {"labels": labels}, r"b.h5 has no dataset 'images'"),
        (both, both | {"images": images[:, :2]}, r"b.h5: field 'images' .*shape \[2, 5, 6\], but .*a.h5 .*\[3, 5, 6\]"),
        (both, both | {"labels": labels.astype("i2")}, r"b.h5: field 'labels' .*dtype int16, but .*a.h5 it is int64"),
        (both, both | {"labels": labels[:, None]}, r"b.h5: field 'labels' .*shape \[1\], but .*a.h5 it is \[\]"),
        (both, both | {"labels": labels[:3]}, r"b.h5: fields differ in length"),
    ):
        check_refused(first, second, tmp_path, match)


def test_axes_must_agree(tmp_path: Path) -> None:
    paths = make_set(tmp_path / "set", EVEN)
    for path, axes in zip(paths[:2], ("NCHW", "NHWC"), strict=True):
        with h5py.File(path, "r+") as file:
            file["images"].attrs["axes"] = np.bytes_(axes)
    with pytest.raises(FieldError, match=r"s1.h5: field 'images' has the axes NHWC, but in .*s0.h5 it is NCHW"):
        ChunkDataset(paths)


def test_byte_order_may_differ(tmp_path: Path) -> None:
    numbers = np.arange(10, dtype=np.float32)
    for number, order in enumerate("<>"):
        make_file(tmp_path / f"{number}.h5", x=(numbers.astype(f"{order}f4"), {}))
    dataset = ChunkDataset(tmp_path, fields=["x"])
    assert dataset[list(range(20))][0].tolist() == [*numbers, *numbers]
    loader = ChunkLoader(ChunkDataset(tmp_path, fields=["x"]), 7)
    assert sorted(x for (batch,) in loader for x in batch.tolist()) == sorted([*numbers, *numbers])


@pytest.fixture
def converted(class_folder: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """A file of images of so many classes."""

    def make(name: str, classes: int, count: int = 12) -> Path:
        path = tmp_path / f"{name}.h5"
        h5chunk.convert(class_folder(count, classes, name=name), path, workers=0, chunk_samples=4)
        return path

    return make


def test_classes(converted: Callable[..., Path], tmp_path: Path, class_folder: Callable[..., Path]) -> None:
    two, three = converted("two", 2), converted("three", 3)
    dataset = ChunkDataset([two, three])
    assert dataset.classes == ("class0", "class1", "class2")
    assert dataset.header is not None and dataset.header.num_samples == 24
    assert not dataset.header.shuffled  # each was, but not all of it
    folder = class_folder(12, 2, name="others")
    (folder / "class0").rename(folder / "dog")
    h5chunk.convert(folder, tmp_path / "others.h5", workers=0)
    with pytest.raises(FieldError, match=r"others.h5: label 0 means 'class1', but in .*three.h5 it is 'class0'"):
        ChunkDataset([two, three, tmp_path / "others.h5"])


# ---- states


def test_states_go_on_through_another_reader(paths: list[Path]) -> None:
    def loader(**options: Any) -> ChunkLoader:
        return loader_by(**ordered(paths, 16, seed=3, window_chunks=3), **options)

    with loader() as whole:
        expected = epoch_of(whole)
    with loader() as first:
        batches = epoch_of(islice(iter(first), 4))
        state = first.state_dict()
    with loader(reader="h5py", num_threads=1) as second:
        second.load_state_dict(state)
        assert batches + epoch_of(second) == expected
    with (
        h5chunk.ChunkLoader(**ordered(paths[::-1], 16, window_chunks=3, seed=3)) as other,
        pytest.raises(StateError, match="another file"),
    ):
        other.load_state_dict(state)


def test_fingerprints(paths: list[Path], tmp_path: Path) -> None:
    mark = ChunkDataset(paths).fingerprint
    shutil.copytree(paths[0].parent, tmp_path / "copy")
    assert ChunkDataset(tmp_path / "copy").fingerprint == mark
    assert ChunkDataset(paths[1:]).fingerprint != mark != ChunkDataset(paths[::-1]).fingerprint


def test_a_data_set_travels(paths: list[Path]) -> None:
    dataset = ChunkDataset(paths)
    assert dataset[3][1] == 3
    other = pickle.loads(pickle.dumps(dataset))
    assert other[3][1] == 3
    assert all(one is not two for one, two in zip(dataset._reader.readers, dataset.new_reader().readers, strict=True))


# ---- files that change


def replace(path: Path) -> None:
    shutil.copy(path, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("change", [replace, cut, Path.unlink])
@pytest.mark.parametrize("reader", ["direct", "h5py"])
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_file_that_changes(tmp_path: Path, reader: str, change: Callable[[Path], Any], when: str) -> None:
    paths = make_set(tmp_path / "set", EVEN)
    loader = loader_by(**ordered(ChunkDataset(paths, fields=["images"]), 8, window_chunks=1), reader=reader)
    batches = iter(loader)
    if when == "meanwhile":
        next(batches)
    change(paths[1])
    reasons = "the file was (replaced or changed|removed)|not a regular file|.*cut short|no such file|cannot be opened"
    with pytest.raises(FileError, match=rf"s1.h5: ({reasons})"):
        for _ in batches:
            pass
    loader.close()


@pytest.mark.parametrize("change", [replace, cut, Path.unlink])
def test_a_file_that_changes_under_a_data_set(paths: list[Path], change: Callable[[Path], Any]) -> None:
    dataset = ChunkDataset(paths)
    first = open_reader(paths).starts[1]
    assert dataset[first][1] == first
    change(paths[1])
    assert dataset[0][1] == 0
    with pytest.raises(FileError, match=r"s1.h5: "):
        dataset[[0, first]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("resident", [False, True])
def test_on_a_gpu(paths: list[Path], resident: bool) -> None:
    with ChunkLoader(paths, 16) as here, ChunkLoader(paths, 16, device="cuda", resident=resident) as there:
        expected = epoch_of(here)
        assert epoch_of([field.cpu() for field in batch] for batch in there) == expected
