"""Every feature of a data set, for every kind of sample: the table of kinds is in `kinds`.

A kind that lacks a feature says why in its ``empty``; the feature must then fail with an error that has a remedy.
"""

from __future__ import annotations

import copy
import functools
import os
import pickle
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kinds import KINDS, Kind, Sample
from support.faults import unreadable
from support.flipped_bits import flip, places
from support.loaders import loader_by
from support.object_server import object_server
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

import h5chunk
from h5chunk.errors import FileError, OptionError
from h5chunk.store.hdf5 import child

BATCH = 4
WAYS: dict[str, dict[str, Any]] = {
    "native": {},
    "python": {},
    "one thread": {"num_threads": 1},
    "HDF5": {"reader": "h5py"},
    "reused": {"reuse": True},
}


class Made:
    """The files of a kind, and what plain h5py reads of them."""

    def __init__(self, kind: Kind, folder: Path) -> None:
        self.kind, self.folder, self.paths = kind, folder, []
        for seed in range(2):
            (folder / str(seed)).mkdir()
            self.paths.append(kind.write(folder / str(seed), seed))
        self.samples = kind.samples(self.paths[0])

    def open(self, paths: Sequence[Any] | None = None, **options: Any) -> Any:
        return self.kind.open(self.paths[0] if paths is None else paths, **options)

    def copied(self, folder: Path) -> list[Path]:
        """A copy of the files that a test may change."""
        shutil.copytree(self.folder / "0", folder / "copy", ignore=shutil.ignore_patterns("*-index-*"))
        return [folder / "copy" / path.relative_to(self.folder / "0") for path in self.paths[0]]

    def epoch(self, dataset: Any) -> Iterator[Any]:
        """The batches of an epoch, from a loader if the kind has them."""
        if "loader" in self.kind.empty:
            yield from DataLoader(dataset, batch_sampler=h5chunk.ChunkSampler(dataset, BATCH, num_workers=0))
            return
        with h5chunk.ChunkLoader(dataset, BATCH) as loader:
            yield from loader

    def check(
        self, dataset: Any, batch: Any, numbers: Iterable[int], epoch: int | None = None, samples: Any = None
    ) -> None:
        """Assert that a batch has these samples, with the types of the file."""
        samples = self.samples if samples is None else samples
        for own, number in zip(rows(dataset, batch, self.kind.sizes), numbers, strict=True):
            same(own, self.kind.expected(samples, dataset, number, epoch, own))

    def check_epoch(
        self, dataset: Any, batches: Iterable[Any], numbers: Iterable[Any], epoch: int = 0, samples: Any = None
    ) -> None:
        for batch, own in zip(batches, numbers, strict=True):
            self.check(dataset, batch, own, epoch, samples)


def rows(dataset: Any, batch: Sequence[Any], sizes: Sequence[str]) -> list[Sample]:
    """The samples of a batch, each field without its padding."""
    columns = []
    for name, column in zip(dataset.fields, batch, strict=True):
        if name in sizes:
            column = [own[:length] for own, length in zip(column.values, column.lengths.tolist(), strict=True)]
        columns.append(column)
    return [tuple(map(plain, sample)) for sample in zip(*columns, strict=True)]


def plain(value: Any) -> Any:
    return value.numpy().copy() if isinstance(value, torch.Tensor) else value


def same(found: Sample, expected: Sample) -> None:
    assert len(found) == len(expected)
    for own, other in zip(found, expected, strict=True):
        if isinstance(other, str):
            assert own == other
            continue
        other = np.asarray(other)
        assert own.dtype == other.dtype.newbyteorder("=") and own.shape == other.shape
        np.testing.assert_array_equal(own, other)


def feature(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test for the kinds that have a feature; the others must raise what their empty cell says."""
    name = test.__name__.removeprefix("test_")

    @functools.wraps(test)
    def run(made: Made, **fixtures: Any) -> None:
        cell = made.kind.empty.get(name)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*(is|are) read through h5py|.*skipped, because a window needs")
            if cell is None:
                test(made, **fixtures)
                return
            with pytest.raises(cell.kind, match=cell.error):
                test(made, **fixtures)

    return run


@pytest.fixture(scope="module", params=KINDS, ids=repr)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    yield Made(request.param, tmp_path_factory.mktemp("kind"))


@pytest.fixture(scope="session")
def server() -> Iterator[Any]:
    with object_server() as running:
        yield running


def test_files_are_tested_without_torch(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that opens a file first would take seconds to import it, each time."""
    needed: list[str] = []
    started = child.start_child
    monkeypatch.setattr(child, "start_child", lambda modules: needed.append(modules) or started(modules))
    monkeypatch.setattr(child, "_tried", set())
    monkeypatch.setattr(child, "_is_child", False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made.open()
    assert needed and not re.search(r"h5chunk\.(feed|transforms)", ",".join(needed))


@pytest.fixture(params=[0, 2])
def workers(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    if request.param == "python":
        monkeypatch.setenv("H5CHUNK_NATIVE", "0")
    return WAYS[request.param]


def batches_of(dataset: Any, seed: int = 0, epoch: int = 0, **options: Any) -> list[list[int]]:
    sampler = h5chunk.ChunkSampler(dataset, BATCH, seed=seed, **{"num_workers": 0, **options})
    sampler.set_epoch(epoch)
    return [list(batch) for batch in sampler]


def kept(batches: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Batches, copied before the next one may take their memory."""
    return [tuple(copy.deepcopy(field) for field in batch) for batch in batches]


def as_batch(item: Any) -> Any:
    """An item of a sample as that of a batch of one sample."""
    if isinstance(item, tuple):
        return type(item)(*map(as_batch, item))
    return [item] if isinstance(item, str) else torch.as_tensor(item)[None]


@feature
def test_one_sample(made: Made) -> None:
    dataset = made.open()
    for number in (0, 5, len(dataset) - 1, -1, -len(dataset), np.int32(3), torch.tensor(2)):
        found = [as_batch(item) for item in dataset[number]]
        made.check(dataset, found, [int(number) % len(dataset)])
    for number in (len(dataset), -len(dataset) - 1):
        with pytest.raises(IndexError, match="out of range"):
            dataset[number]


@feature
def test_samples(made: Made) -> None:
    dataset = made.open()
    for numbers in ([3, 1, 2], [5, 5, 0, 5], [-1, 4], [7], range(len(dataset))):
        made.check(dataset, dataset[numbers], [number % len(dataset) for number in numbers])
    made.check(dataset, dataset[np.array([9, 8])], [9, 8])
    made.check(dataset, dataset[2:11:3], [2, 5, 8])
    made.check(dataset, dataset[[]], [])
    for number in (len(dataset), -len(dataset) - 1):
        with pytest.raises(IndexError, match="out of range"):
            dataset[[0, number]]


@feature
def test_dataloader(made: Made, workers: int) -> None:
    dataset = made.open()
    numbers = np.random.default_rng(0).permutation(len(dataset)).tolist()
    loader = DataLoader(dataset, BATCH, sampler=numbers, num_workers=workers)
    for start, batch in zip(range(0, len(dataset), BATCH), loader, strict=True):
        made.check(dataset, batch, numbers[start : start + BATCH])


@feature
def test_sampler(made: Made, workers: int) -> None:
    dataset = made.open()
    sampler = h5chunk.ChunkSampler(dataset, BATCH, seed=1, num_workers=max(1, workers))
    loader = DataLoader(dataset, batch_sampler=sampler, num_workers=workers)
    for epoch in range(2):
        expected = batches_of(dataset, 1, epoch, num_workers=max(1, workers))
        assert sorted(chain(*expected)) == list(range(len(dataset)))
        made.check_epoch(dataset, loader, expected, epoch)


@feature
def test_loader(made: Made, way: dict[str, Any]) -> None:
    dataset = made.open()
    with loader_by(dataset, BATCH, seed=1, **way) as loader:
        for epoch in range(2):
            made.check_epoch(dataset, loader, batches_of(dataset, 1, epoch), epoch)


def own_batches(num_samples: int) -> list[list[int]]:
    """Batches of several sizes in any order, with samples that are repeated."""
    random = np.random.default_rng(0)
    sizes = [5, *random.integers(1, 9, 20), 3 * num_samples, 2]
    return [random.integers(0, num_samples, size).tolist() for size in sizes]


@feature
def test_own_batches(made: Made, way: dict[str, Any]) -> None:
    dataset = made.open()
    lists = own_batches(len(dataset))
    with loader_by(dataset, batch_sampler=lists, **way) as loader:
        for epoch in range(2):
            made.check_epoch(dataset, loader, lists, epoch)


@feature
def test_own_batches_of_a_subset(made: Made) -> None:
    """From the file, and from memory unless each epoch has other samples."""
    dataset = made.open()
    numbers = [5, 1, 9, 8, 2]
    part, lists = dataset.subset(numbers), own_batches(len(numbers))
    in_file = np.sort(numbers)
    for resident in (False, True) if made.kind.empty.get("resident") is None else (False,):
        with h5chunk.ChunkLoader(part, batch_sampler=lists, resident=resident) as loader:
            made.check_epoch(part, loader, [in_file[batch].tolist() for batch in lists])


@feature
def test_own_batches_of_a_url(made: Made, server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    server.objects.update({f"/{path.name}": path.read_bytes() for path in made.paths[0]})
    dataset = made.open([f"{server.url}/{path.name}" for path in made.paths[0]])
    lists = own_batches(len(dataset))
    with h5chunk.ChunkLoader(dataset, batch_sampler=lists) as loader:
        for epoch in range(2):  # in the second one, all is in the cache
            made.check_epoch(dataset, loader, lists, epoch)


@feature
def test_direct(made: Made) -> None:
    dataset = made.open()
    with loader_by(dataset, BATCH, reader="direct") as loader:
        made.check_epoch(dataset, loader, batches_of(dataset))


@feature
def test_one_order(made: Made) -> None:
    def epoch(**options: Any) -> list[Any]:
        with loader_by(made.open(), BATCH, **options) as loader:
            return [plain(tensor).tobytes() for batch in kept(loader) for tensor in tree_leaves(batch)]

    assert epoch(seed=2) == epoch(seed=2, num_threads=1) != epoch(seed=3)
    assert epoch(shuffle=False) == epoch(shuffle=False, seed=3)


@feature
def test_resume_loader(made: Made) -> None:
    dataset = made.open()
    with h5chunk.ChunkLoader(dataset, BATCH) as loader:
        next(iter(loader))
        taken = islice(loader, 3)  # of the second epoch
        assert len(kept(taken)) == 3
        state = loader.state_dict()
    with h5chunk.ChunkLoader(made.open(), BATCH) as loader:
        loader.load_state_dict(pickle.loads(pickle.dumps(state)))
        made.check_epoch(dataset, loader, batches_of(dataset, epoch=1)[3:], 1)
        made.check_epoch(dataset, loader, batches_of(dataset, epoch=2), 2)


@feature
def test_resume_sampler(made: Made) -> None:
    dataset = made.open()
    sampler = h5chunk.ChunkSampler(dataset, BATCH, num_workers=0)
    assert len([*islice(sampler, 2)]) == 2
    later = h5chunk.ChunkSampler(dataset, BATCH, num_workers=0)
    later.load_state_dict(sampler.state_dict())
    made.check_epoch(dataset, DataLoader(dataset, batch_sampler=later), batches_of(dataset)[2:])


@feature
def test_split(made: Made) -> None:
    dataset = made.open()
    parts = dataset.split([0.5, 0.5], seed=4)
    assert sorted(np.concatenate([part.subset_samples for part in parts])) == list(range(len(dataset)))
    for part in parts:
        assert len(part)
        made.check(part, part[range(len(part))], part.subset_samples)
        same_part, _ = made.open().split([0.5, 0.5], seed=4)
        assert part is not parts[0] or (same_part.subset_samples == part.subset_samples).all()


@feature
def test_subset(made: Made) -> None:
    dataset = made.open()
    wanted = np.arange(len(dataset)) % 3 == 1
    part = dataset.subset(wanted)
    rest = dataset.subset(np.flatnonzero(wanted)).subset(range(1, wanted.sum()))
    made.check(part, part[[2, 0, 1]], part.subset_samples[[2, 0, 1]])
    made.check(rest, rest[range(len(rest))], np.flatnonzero(wanted)[1:])
    with pytest.raises(OptionError):
        dataset.subset([0, 0])
    for batch, numbers in zip(
        DataLoader(part, batch_sampler=h5chunk.ChunkSampler(part, BATCH, num_workers=0)), batches_of(part), strict=True
    ):
        made.check(part, batch, part.subset_samples[numbers], 0 if part.epoch_samples else None)


@feature
def test_where(made: Made) -> None:
    dataset = made.open()
    part = dataset.where("sample_number % 3 == 1 and sample_number < 20")
    numbers = np.arange(len(dataset))
    wanted = numbers[(numbers % 3 == 1) & (numbers < 20)]
    assert part.subset_samples.tolist() == wanted.tolist()
    made.check(part, part[range(len(part))], wanted)
    made.check_epoch(part, made.epoch(part), [wanted[numbers] for numbers in batches_of(part)])


@feature
def test_groups(made: Made) -> None:
    dataset = made.open()
    groups = np.arange(len(dataset)) // 2 % 3

    def sampler() -> Any:
        return h5chunk.ChunkSampler(dataset, BATCH, num_workers=0, groups=groups, groups_per_batch=2, seed=3)

    batches = list(sampler())
    assert all(len(set(groups[batch])) == 2 for batch in batches)
    made.check_epoch(dataset, DataLoader(dataset, batch_sampler=sampler()), batches)
    if "loader" not in made.kind.empty:
        with h5chunk.ChunkLoader(dataset, batch_sampler=sampler()) as loader:
            made.check_epoch(dataset, loader, batches)


@feature
def test_values(made: Made) -> None:
    dataset, single = made.open(), made.kind.single
    at = dataset.fields.index(single)
    found = dataset.values(single)
    assert found.tolist() == [sample[at] for sample in made.samples]
    assert dataset.subset([2, 4]).values(single).tolist() == [made.samples[i][at] for i in (2, 4)]


@feature
def test_statistics(made: Made, tmp_path: Path) -> None:
    paths = made.copied(tmp_path)
    for path in paths:
        h5chunk.info(path, stats=True)
    dataset = made.open(paths)
    found = dataset.statistics(made.kind.numbers)
    counts = np.array(found.count)
    assert found.mean and (counts > 0).all()
    values = made.kind.stored(paths).astype(np.float64)
    if dataset.field(made.kind.numbers).dtype == np.uint8:
        values /= 255  # as of images in [0, 1]
    np.testing.assert_allclose(np.average(found.mean, weights=counts), values.mean())
    np.testing.assert_allclose((min(found.minimum), max(found.maximum)), (values.min(), values.max()))


@feature
def test_sample_number(made: Made) -> None:
    dataset = made.open(numbered=True)
    at = dataset.fields.index("sample_number")
    assert dataset[[3, 1]][at].tolist() == [3, 1] and int(dataset[2][at]) == 2
    part = dataset.subset(range(4, 9))
    assert part[[1, 0]][at].tolist() == [1, 0]
    for epoch in range(2):
        seen = torch.cat([batch[at] for batch in kept(made.epoch(part))])
        assert sorted(seen.tolist()) == list(range(5)), epoch


BAD = 5
SKIP = {"on_error": "skip", "max_skipped": 0.5}


def numbers_in(made: Made, dataset: Any, batches: Iterable[Any], epoch: int) -> list[list[int]]:
    """The sample numbers in batches, all of whose samples are those with these numbers."""
    at, found = dataset.fields.index("sample_number"), []
    for batch in batches:
        found.append([])
        for own in rows(dataset, batch, made.kind.sizes):
            found[-1].append(int(own[at]))
            own = (*own[:at], *own[at + 1 :])
            same(own, made.kind.expected(made.samples, dataset, found[-1][-1], epoch, own))
    return found


@feature
def test_skip(made: Made, monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    """A sample that cannot be read is replaced by another one of its batch, with its labels, always the same one."""
    unreadable(monkeypatch, BAD)
    with pytest.raises(FileError, match=f"row {BAD} is damaged"):
        list(made.epoch(made.open()))
    dataset, batches = made.open(numbered=True, **SKIP), batches_of(made.open(), 1, 1)
    sampler = h5chunk.ChunkSampler(dataset, BATCH, num_workers=0, seed=1)
    sampler.set_epoch(1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* cannot be read, so that another sample|num_workers is")
        found = numbers_in(made, dataset, DataLoader(dataset, batch_sampler=sampler, num_workers=workers), 1)
    bad = {sample.number for sample in dataset.skipped}
    assert BAD in bad and all("is damaged" in sample.reason for sample in dataset.skipped)
    for own, expected in zip(found, batches, strict=True):
        assert set(own) == set(expected) - bad or len(expected) == 1
        assert [number for number in own if number in expected and number not in bad] == own
        assert all(one == other or other in bad for one, other in zip(own, expected, strict=True))
    with pytest.raises(FileError, match="is damaged"):
        dataset[BAD]


@feature
def test_skip_loader(made: Made, monkeypatch: pytest.MonkeyPatch, way: dict[str, Any]) -> None:
    """A loader has the batches of a DataLoader."""
    unreadable(monkeypatch, BAD)
    dataset = made.open(numbered=True, **SKIP)
    sampler = h5chunk.ChunkSampler(dataset, BATCH, num_workers=0, seed=1)
    text = f"sample .*cannot be read, so that another.*row {BAD} is damaged"
    with pytest.warns(UserWarning, match=text):
        dataset[range(len(dataset))]
    for resident in (False, True) if made.kind.empty.get("resident") is None else (False,):
        with loader_by(dataset, BATCH, seed=1, resident=resident, **way) as loader:
            for epoch in range(2):
                sampler.set_epoch(epoch)
                expected = numbers_in(made, dataset, DataLoader(dataset, batch_sampler=sampler), epoch)
                assert numbers_in(made, dataset, loader, epoch) == expected
                assert loader.report.skipped == len(loader.report.bad_samples) > 0
                assert {*loader.report.bad_samples} <= {*dataset.skipped}


@feature
def test_checksums(made: Made, tmp_path: Path) -> None:
    for checksums in ("first", "always"):
        dataset = made.open(checksums=checksums)
        made.check(dataset, dataset[range(len(dataset))], range(len(dataset)))
    paths = made.copied(tmp_path)
    for path in paths:
        flip(path, places(path)[-1][2])
    for checksums in ("first", "always"):
        with pytest.raises(FileError, match="h5chunk verify"):
            made.open(paths, checksums=checksums)[range(len(made.samples))]
        loader = h5chunk.ChunkLoader(made.open(paths, checksums=checksums), BATCH)
        with pytest.raises(FileError, match="h5chunk verify"):
            list(loader)


def alike(named: dict[str, Any], plainly: Sequence[Any]) -> None:
    assert type(named) is dict and [*map(type, named.values())] == [*map(type, plainly)]
    for own, other in zip(tree_leaves([*named.values()]), tree_leaves([*plainly]), strict=True):
        assert type(own) is type(other)
        if isinstance(own, torch.Tensor):
            torch.testing.assert_close(own, other, rtol=0, atol=0, equal_nan=True)
        else:
            assert own == other


@feature
def test_as_dict(made: Made) -> None:
    dataset, named = made.open(numbered=True), made.open(numbered=True, as_dict=True)
    sample = named[3]
    assert (*sample,) == dataset.fields and len(sample) == len(dataset[3])
    if not dataset.epoch_samples:
        alike(sample, dataset[3])
        alike(named[[3, 1]], dataset[[3, 1]])
    for one, other in zip(made.epoch(named), kept(made.epoch(dataset)), strict=True):
        alike(one, other)
    batches = (
        DataLoader(own, batch_sampler=h5chunk.ChunkSampler(own, BATCH, num_workers=0)) for own in (named, dataset)
    )
    for one, other in zip(*batches, strict=True):
        alike(one, other)


def total(value: torch.Tensor) -> torch.Tensor:
    return value.to(torch.complex128).sum()


@feature
def test_transform(made: Made) -> None:
    dataset, changed = made.open(), made.open().with_transforms([*made.kind.transforms, total])
    if not dataset.epoch_samples:
        torch.testing.assert_close(changed[3][0], total(torch.as_tensor(dataset[3][0])))
    sampler = h5chunk.ChunkSampler(changed, BATCH, num_workers=0)
    plainly = DataLoader(dataset, batch_sampler=h5chunk.ChunkSampler(dataset, BATCH, num_workers=0))
    for batch, other in zip(DataLoader(changed, batch_sampler=sampler), plainly, strict=True):
        torch.testing.assert_close(batch[0], torch.stack([total(each) for each in other[0]]))


def reversed_batch(batch: torch.Tensor) -> torch.Tensor:
    return batch.flip(0)


@feature
def test_batch_transform(made: Made) -> None:
    dataset = made.open()
    transforms = [*made.kind.transforms, reversed_batch]
    with h5chunk.ChunkLoader(dataset.with_transforms(None), BATCH, transforms=transforms) as loader:
        for batch, numbers in zip(loader, batches_of(dataset), strict=True):
            first = batch[0]
            back = first._replace(values=first.values.flip(0)) if isinstance(first, tuple) else first.flip(0)
            made.check(dataset, (back, *batch[1:]), numbers, 0)


@feature
def test_copies(made: Made) -> None:
    dataset = made.open()
    dataset[0]
    part = dataset.subset([1, 3, 5])
    for copied in (pickle.loads(pickle.dumps(dataset)), copy.copy(dataset), copy.deepcopy(dataset)):
        made.check(copied, copied[[4, 2]], [4, 2])
        assert copied.fingerprint == dataset.fingerprint and copied.fields == dataset.fields
    copied = pickle.loads(pickle.dumps(part))
    made.check(copied, copied[[2, 0]], [5, 1])


@feature
def test_several_files(made: Made) -> None:
    paths = [*made.paths[0], *made.paths[1]]
    dataset, samples = made.open(paths), made.kind.samples(paths)
    assert sorted(dataset.files) == sorted(map(str, paths))
    made.check(dataset, dataset[range(len(dataset))], range(len(dataset)), samples=samples)
    made.check_epoch(dataset, made.epoch(dataset), batches_of(dataset), samples=samples)


@feature
def test_url(made: Made, server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    server.objects.update({f"/{path.name}": path.read_bytes() for path in made.paths[0]})
    dataset = made.open([f"{server.url}/{path.name}" for path in made.paths[0]])
    made.check(dataset, dataset[range(len(dataset))], range(len(dataset)))
    made.check_epoch(dataset, made.epoch(dataset), batches_of(dataset))


@feature
def test_memory_bytes(made: Made) -> None:
    dataset = made.open()
    with pytest.raises(OptionError, match=r"memory_bytes is 1, but .* need") as error:
        h5chunk.ChunkLoader(dataset, BATCH, memory_bytes=1)
    enough = int(re.findall(r"need (\d+)", str(error.value))[-1])
    with pytest.raises(OptionError):
        h5chunk.ChunkLoader(dataset, BATCH, memory_bytes=enough - 1)
    with h5chunk.ChunkLoader(dataset, BATCH, memory_bytes=enough) as loader:
        made.check_epoch(dataset, loader, [numbers.tolist() for numbers in loader.order.batches()])


@feature
def test_resident(made: Made) -> None:
    dataset = made.open()
    with h5chunk.ChunkLoader(dataset, BATCH, resident=True) as loader:
        assert loader.is_resident
        made.check_epoch(dataset, loader, batches_of(dataset))


@feature
def test_repr(made: Made) -> None:
    dataset = made.open()
    text = repr(dataset)
    assert text.startswith(type(dataset).__name__) and "\n" not in text
    assert f"{len(dataset)} samples" in text and dataset.path in text


@feature
def test_reopen(made: Made) -> None:
    dataset = made.open()
    for _ in range(2):
        made.check(dataset, dataset[[1, 0]], [1, 0])
        dataset.close()
        dataset.close()


def change(paths: Sequence[Path]) -> None:
    for path in paths:
        with path.open("ab") as file:
            file.write(b"more")
        os.utime(path, ns=(1, path.stat().st_mtime_ns + 10**9))


@feature
def test_changed(made: Made, tmp_path: Path) -> None:
    paths = made.copied(tmp_path)
    dataset = made.open(paths)
    dataset[0]
    change(paths)
    with pytest.raises(FileError, match="changed"):
        dataset[[1, 2]]


@feature
def test_changed_loader(made: Made, tmp_path: Path) -> None:
    paths = made.copied(tmp_path)
    with h5chunk.ChunkLoader(made.open(paths), BATCH) as loader:
        next(iter(loader))
        change(paths)
        with pytest.raises(FileError, match="changed"):
            for _ in range(20):
                list(loader)


@feature
def test_read_amplification(made: Made) -> None:
    dataset = made.open()
    assert dataset.read_amplification == 1
    some = dataset.subset(range(0, len(dataset), 5))
    assert some.read_amplification > 1 if made.kind.is_coded else some.read_amplification >= 1


def test_empty_cells_name_features() -> None:
    features = {name.removeprefix("test_") for name in globals()}
    assert not {name for kind in KINDS for name in kind.empty} - features
    assert len({str(kind) for kind in KINDS}) == len(KINDS)
