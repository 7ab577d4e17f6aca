"""``on_error="skip"``: samples that cannot be read are replaced by others of their batch, counted and named."""

from __future__ import annotations

import copy
import errno
import os
import pickle
from collections.abc import Iterable
from itertools import chain, islice
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from PIL import Image
from support.damaged_chunks import damage
from support.encoded import encoded
from support.faults import failure
from support.flipped_bits import flip, places
from support.foreign import make_file, values
from support.loaders import loader_by
from support.matrices import random_matrix, write
from torch.utils.data import DataLoader

from h5chunk import ChunkDataset, ChunkLoader, ChunkSampler, Keyed, Mix, Patches, Windows, convert
from h5chunk.errors import ChangedError, FileError, OptionError
from h5chunk.stamp import stamp_of
from h5chunk.transforms import Csr, Dense, MixUp, Normalize, RandomResizedCrop

N, CHUNK, BATCH = 200, 5, 16
SHAPE = (3, 4)
IMAGES = values((N, *SHAPE), np.float32)
BAD = {*range(15, 20), *range(100, 105)}  # chunks 3 and 20

pytestmark = pytest.mark.filterwarnings("ignore:sample .* cannot be read, so that another sample:UserWarning")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    images = IMAGES, {"chunks": (CHUNK, *SHAPE), "compression": "gzip"}
    made = make_file(tmp_path_factory.mktemp("skip") / "a.h5", images=images, labels=(np.arange(N), {}))
    for chunk in (3, 20):
        damage(made, chunk, "images")
    return made


def opened(path: Path, **options: Any) -> ChunkDataset:
    given = {"fields": ["images", "labels", "sample_number"], "on_error": "skip", "max_skipped": 0.1, **options}
    return ChunkDataset(path, **given)


def checked(batches: Iterable[Any]) -> list[list[int]]:
    """The sample numbers of each batch, whose images and labels are those of the samples."""
    found = []
    for images, labels, numbers in batches:
        np.testing.assert_array_equal(images, IMAGES[numbers.numpy()])
        assert (labels == numbers).all()
        found.append(numbers.tolist())
    return found


def loaded(dataset: ChunkDataset, epochs: int = 2, **options: Any) -> list[list[int]]:
    with loader_by(dataset, BATCH, **options) as loader:
        return [numbers for _ in range(epochs) for numbers in checked(loader)]


def test_batches(path):
    """A batch keeps its size, its good samples and their places; the others are random ones of these."""
    dataset = opened(path)
    sampler = ChunkSampler(dataset, BATCH, num_workers=0)
    replacements = set()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        batches = [batch.tolist() for batch in sampler.order.batches()]
        with ChunkLoader(dataset, batch_sampler=sampler) as loader:
            found = checked(loader)
            assert loader.report.skipped == len(BAD)
            assert {sample.number for sample in loader.report.bad_samples} == BAD
        for own, planned in zip(found, batches, strict=True):
            for one, other in zip(own, planned, strict=True):
                assert one == other if other not in BAD else one in {*planned} - BAD
                replacements |= {one} if other in BAD else set()
    assert len(replacements) > 10
    assert sorted(sample.number for sample in dataset.skipped) == sorted(BAD)
    assert all("a.h5: field 'images', chunk" in sample.reason for sample in dataset.skipped)


@pytest.mark.parametrize(
    "options", [{"num_threads": 1}, {"reuse": True}, {"reader": "h5py"}, {"resident": True}, {"memory_bytes": 200_000}]
)
@pytest.mark.filterwarnings("ignore:field .* is read through h5py")
def test_all_loaders_have_the_same_batches(path, options):
    assert loaded(opened(path), **options) == loaded(opened(path))


@pytest.mark.filterwarnings("ignore:num_workers is 2")  # the order of a loader does not suit workers
@pytest.mark.filterwarnings("ignore:num_workers is 2")  # the order of a loader does not suit workers
@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataloader_has_the_batches_of_a_loader(path, workers):
    dataset = opened(path)
    sampler = ChunkSampler(dataset, BATCH, num_workers=0)
    loader = DataLoader(dataset, batch_sampler=sampler, num_workers=workers)
    found = checked(loader) + checked(loader)
    assert {sample.number for sample in dataset.skipped} == BAD
    with ChunkLoader(dataset, batch_sampler=ChunkSampler(dataset, BATCH)) as own:
        assert found == checked(own) + checked(own)


def test_a_single_sample_and_a_shuffled_dataloader(path):
    dataset = opened(path)
    with pytest.raises(FileError, match="chunk 3 is damaged"):
        dataset[17]
    assert checked(DataLoader(dataset, BATCH, shuffle=True)) and dataset.skipped
    assert dataset[[17, 3]][2].tolist() == [3, 3]


def test_echoes_are_of_good_samples(path):
    for resident in (False, True):
        found = loaded(opened(path), echo=2, resident=resident)
        assert len(found) == 4 * (N // BATCH + 1) and not BAD & {number for batch in found for number in batch}


def test_the_last_batch_and_small_batches(path):
    """If all samples of a batch are bad, the next batch of the window has replacements."""
    dataset = opened(path)
    with ChunkLoader(dataset, batch_sampler=ChunkSampler(dataset, 2, window_chunks=4)) as loader:
        found = checked(loader)
    assert len(found) == N // 2 and not BAD & {number for batch in found for number in batch}
    lists = [[1, 2], [16, 17], [3]]
    with ChunkLoader(dataset, batch_sampler=lists) as loader:
        found = checked(loader)
        assert found[::2] == [[1, 2], [3]] and {*found[1]} <= {1, 2, 3}
    lists = [[1, 2], [16, 5, 17], [3]]
    for resident in (False, True):
        with ChunkLoader(dataset, batch_sampler=lists, resident=resident) as loader:
            assert checked(loader) == [[1, 2], [5, 5, 5], [3]]
    with (
        ChunkLoader(dataset, batch_sampler=[[16, 17], [103]]) as loader,
        pytest.raises(FileError, match=r"are bad: .*3 is"),
    ):
        list(loader)
    with pytest.raises(FileError, match=r"all samples that are read together are bad: .*chunk 3 is damaged"):
        dataset[[16, 17]]


@pytest.mark.filterwarnings("ignore:num_workers is 2")
@pytest.mark.parametrize("options", [{}, {"resident": True}, {"workers": 0}, {"workers": 2}], ids=str)
@pytest.mark.parametrize("kind", ["controls", "sets", "stratified"])
def test_replacements_are_of_the_same_group(path, kind, options):
    dataset = opened(path).subset(range(5, N))
    first = dataset.samples[0]
    groups = np.where(np.arange(first, N) < 100, "drug", "DMSO") if kind == "controls" else np.arange(first, N) // 50
    how = {"controls": {"controls": "DMSO"}, "sets": {"groups_per_batch": 2}, "stratified": {}}[kind]
    sampler = ChunkSampler(dataset, 20, groups=groups, num_workers=0, **how)
    planned = [groups[batch].tolist() for batch in sampler.order.batches()]
    if "workers" in options:
        loader = DataLoader(dataset, batch_sampler=sampler, num_workers=options["workers"])
    else:
        loader = ChunkLoader(dataset, batch_sampler=sampler, **options)
    found = [(numbers + first).numpy() for _, _, numbers in loader]
    assert not BAD & {*np.concatenate(found).tolist()} and len(dataset.skipped) > 5
    assert [groups[numbers - first].tolist() for numbers in found] == planned


def test_replacements_are_of_the_same_member(path, tmp_path):
    good = make_file(tmp_path / "b.h5", images=(IMAGES, {}), labels=(np.arange(N), {}))
    parts = {name: ChunkDataset(each, fields=["images", "labels"]) for name, each in {"a": path, "b": good}.items()}
    mix = Mix(parts, weights={"a": 1, "b": 3}, on_error="skip", max_skipped=0.1, fields=["images", "labels", "member"])
    with ChunkLoader(mix, BATCH, drop_last=True) as loader:
        members = [np.bincount(member).tolist() for _, _, member in loader]
        assert members == [[4, 12]] * len(members) and loader.report.skipped


def test_a_group_without_good_samples(path):
    groups = np.where(np.isin(np.arange(N), [*BAD]), "rare", "usual")
    for make in (
        lambda *of: DataLoader(of[0], batch_sampler=of[1]),
        lambda *of: ChunkLoader(of[0], batch_sampler=of[1]),
    ):
        dataset = opened(path)
        with pytest.raises(
            FileError, match=r"sample 1\d+ of group 'rare' cannot be read, .*repair the file, .*is damaged"
        ):
            list(make(dataset, ChunkSampler(dataset, BATCH, groups=groups, num_workers=0)))


def test_resuming(path):
    expected = loaded(opened(path))
    for taken in (1, 5, 11):
        with ChunkLoader(opened(path), BATCH) as loader:
            assert checked(islice(loader, taken)) == expected[:taken]
            state = loader.state_dict()
        with ChunkLoader(opened(path), BATCH) as loader:
            loader.load_state_dict(pickle.loads(pickle.dumps(state)))
            assert checked(loader) + checked(loader) == expected[taken:]


def test_ranks(path):
    """All have as many batches as without bad samples, and no good sample is lost."""
    found = []
    for rank in range(2):
        dataset = opened(path)
        sampler = ChunkSampler(dataset, BATCH // 2, rank=rank, world_size=2)
        with ChunkLoader(dataset, batch_sampler=sampler) as loader:
            found.append(checked(loader))
        assert [*map(len, found[-1])] == [len(batch) for batch in sampler.order.batches()]
    assert {number for batches in found for batch in batches for number in batch} == {*range(N)} - BAD


def test_subsets_count_their_own(path):
    dataset = opened(path)
    part = dataset.subset(range(90, N))
    with ChunkLoader(part, BATCH) as loader:
        for images, labels, numbers in loader:
            np.testing.assert_array_equal(images, IMAGES[labels])
            assert (labels == numbers + 90).all()
    assert sorted(sample.number for sample in part.skipped) == [10, 11, 12, 13, 14]
    assert sorted(sample.number for sample in dataset.skipped) == [*range(100, 105)]
    assert not dataset.subset(range(90)).skipped
    with pytest.raises(FileError, match=r"2 samples of 10 .* max_skipped=0.1 allows"):
        loaded(dataset.subset([*range(92, 100), 100, 101]))


def test_too_many(path):
    with pytest.raises(FileError, match=r"samples of 200 cannot be read, .* max_skipped=0.01 allows: .*chunk \d+ is"):
        loaded(ChunkDataset(path, on_error="skip"))
    with pytest.raises(FileError, match=r"max_skipped=0.01 allows"):
        list(DataLoader(ChunkDataset(path, on_error="skip"), BATCH))
    with pytest.raises(FileError, match=r"max_skipped=0.04 allows"):
        loaded(opened(path, max_skipped=0.04), resident=True)


@pytest.mark.filterwarnings("error")
def test_one_warning(path):
    dataset = opened(path)
    with pytest.warns(
        UserWarning, match="cannot be read, so that another sample .*chunk .* is damaged.*no warning about"
    ):
        dataset[:32]
    with ChunkLoader(dataset, BATCH) as loader:  # no other one
        list(loader)


def test_labels_that_are_damaged(tmp_path):
    """A small field is otherwise read once, as a whole."""
    labels = np.arange(N), {"chunks": (CHUNK,), "compression": "gzip"}
    made = make_file(tmp_path / "a.h5", images=(IMAGES, {}), labels=labels)
    damage(made, 3, "labels")
    for options in ({}, {"resident": True}):
        assert not {*range(15, 20)} & {number for batch in loaded(opened(made), **options) for number in batch}
    assert checked(DataLoader(opened(made), BATCH))


@pytest.mark.parametrize("checksums", ["first", "always"])
def test_checksums(tmp_path, checksums):
    convert({"images": IMAGES, "labels": np.arange(N)}, tmp_path / "a.h5", chunk_samples=CHUNK)
    whole = {tuple(images.ravel().tolist()): int(label) for images, label in ChunkDataset(tmp_path / "a.h5")}
    chunk = next(offset for name, number, offset, _ in places(tmp_path / "a.h5") if (name, number) == ("images", 2))
    flip(tmp_path / "a.h5", chunk)
    dataset = opened(tmp_path / "a.h5", checksums=checksums)
    with ChunkLoader(dataset, BATCH) as loader:
        for _ in range(2):
            for images, labels, numbers in loader:
                assert [whole[tuple(each.ravel().tolist())] for each in images] == labels.tolist()
                assert not {10, 11, 12, 13, 14} & {*numbers.tolist()}
            assert loader.report.skipped == CHUNK
    assert all("does not match its checksum" in sample.reason for sample in dataset.skipped)


@pytest.mark.parametrize("options", [{}, {"reuse": True}, {"resident": True}])
def test_rows_that_point_outside(tmp_path, options):
    """As if the file had always been shorter. Rows without filters are read in another way than chunks."""
    images = np.repeat(IMAGES, 32, axis=1)
    made = make_file(tmp_path / "a.h5", labels=(np.arange(N), {}), images=(images, {}))
    loader, strict = (loader_by(opened(made, on_error=each), BATCH, **options) for each in ("skip", "raise"))
    os.truncate(made, made.stat().st_size - 3 * images[0].nbytes)
    for each in (loader, strict):
        each._source.reader.stamp = stamp_of(made)
    with strict, pytest.raises(FileError, match="cut short"):
        list(strict)
    with loader:
        for own, labels, numbers in chain(loader, loader):
            np.testing.assert_array_equal(own, images[labels.numpy()])
            assert (labels == numbers).all() and not {197, 198, 199} & {*numbers.tolist()}
        assert loader.report.skipped == 3


@pytest.mark.parametrize("transform", [Dense(), Csr()])
def test_rows_of_a_matrix(tmp_path, transform):
    """In the chunk of each bad row, good ones can be read."""
    matrix = random_matrix(N, 30, 5)
    made, bad = write(tmp_path / "a.h5", matrix), {40, 41, 150}
    with h5py.File(made, "r+") as file:
        for row in bad:
            file["X/indices"][matrix.indptr[row]] = 30
    dense = matrix.toarray()
    dataset = opened(made, fields=["X", "sample_number"], transforms=transform)
    for batches in (ChunkLoader(dataset, BATCH), DataLoader(dataset, batch_sampler=ChunkSampler(dataset, BATCH))):
        seen = []
        for rows, numbers in chain(batches, batches):
            np.testing.assert_array_equal(rows.to_dense(), dense[numbers.numpy()])
            seen += numbers.tolist()
        assert {*seen} == {*range(N)} - bad and len(seen) == 2 * N
    assert {sample.number for sample in dataset.skipped} == bad


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 images of several sizes, two of which are not images."""
    folder, random = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for number in range(60):
        image = folder / f"photos/{number % 3}/{number:02}.jpg"
        image.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 255, (40 + number % 5, 50, 3), np.uint8)).save(image)
    convert(folder / "photos", folder / "a.h5", chunk_samples=4, keep_encoded=True)
    with h5py.File(folder / "a.h5", "r+") as file:
        for number in (7, 33):
            file["images/data"][file["images/offsets"][number] :][:60] = 0
            start = int(file["images/offsets"][number])
            file["images/data"][start : start + 60] = 0
    return folder / "a.h5"


@pytest.mark.parametrize("options", [{}, {"num_threads": 1}, {"reuse": True}, {"resident": True}, {"echo": 2.0}])
def test_images_that_cannot_be_decoded(photos, options):
    dataset = opened(photos, transforms=[RandomResizedCrop(16)])
    names, labels = dataset.source_names, dataset.values("labels")
    with loader_by(dataset, 8, **options) as loader:
        found = [tuple(map(copy.deepcopy, batch)) for _ in range(2) for batch in loader]
        assert {sample.name for sample in loader.report.bad_samples} == {*names[[7, 33]]}
        assert loader.report.skipped == 2
    for images, own, numbers in found:
        assert images.shape[1:] == (3, 16, 16) and (labels[numbers] == own.numpy()).all()
        assert not {7, 33} & {*numbers.tolist()}
        assert len({image.numpy().tobytes() for image in images}) == len(images)  # each is cut out at random
    if "echo" not in options:
        batches = DataLoader(dataset, batch_sampler=ChunkSampler(dataset, 8, num_workers=0))
        for one, other in zip(found, [*batches, *batches], strict=True):
            for field, same in zip(one, other, strict=True):
                assert torch.equal(field, same)


def test_good_images_are_mixed(photos):
    """A mixture of samples is made of those that replace others."""
    transforms = [RandomResizedCrop(16), Normalize(0.5, 0.5), MixUp(num_classes=3)]
    dataset = opened(photos, fields=["images", "labels"], transforms=transforms)
    with ChunkLoader(dataset, 8) as loader:
        found = [tuple(map(copy.deepcopy, batch)) for batch in loader]
        assert loader.report.skipped == 2
    for one, other in zip(
        found, DataLoader(dataset, batch_sampler=ChunkSampler(dataset, 8, num_workers=0)), strict=True
    ):
        for field, same in zip(one, other, strict=True):
            assert torch.isfinite(field).all() and torch.equal(field, same)


@pytest.mark.parametrize("change", [-30_000, -2000, 4])
def test_files_that_change_are_not_skipped(tmp_path, change):
    images = np.repeat(IMAGES, 32, axis=1)
    made = make_file(tmp_path / "a.h5", labels=(np.arange(N), {}), images=(images, {}))
    dataset = opened(made, max_skipped=1)
    dataset[[0]]
    with ChunkLoader(dataset, BATCH) as loader:
        next(iter(loader))
        os.truncate(made, made.stat().st_size + change)
        with pytest.raises(ChangedError, match="changed"):
            list(loader), list(loader)
    for batches in (DataLoader(dataset, BATCH), DataLoader(dataset, BATCH, num_workers=1)):
        with pytest.raises(ChangedError, match="changed"):
            list(batches)
    assert not dataset.skipped


@pytest.mark.parametrize("limit", [False, True])
def test_files_that_cannot_be_opened_are_not_skipped(tmp_path, monkeypatch, limit):
    """Each file is a sample, and is opened when it is read."""
    for number in range(20):
        make_file(tmp_path / f"{number:02}.h5", image=(IMAGES[number], {}))
    dataset = Keyed(tmp_path, ["image"], on_error="skip", max_skipped=0.5)
    error = "the file was removed"
    if limit:
        error = "Too many open files.*ulimit -n"
        failed = FileError(f"a.h5: cannot be opened: {os.strerror(errno.EMFILE)}")
        monkeypatch.setattr("h5chunk.store.read.open_files.open_descriptor", failure(failed))
    else:
        (tmp_path / "07.h5").unlink()
    with ChunkLoader(dataset, 4) as loader, pytest.raises(ChangedError, match=error):
        list(loader)
    with pytest.raises(ChangedError, match=error):
        dataset[:]
    assert not dataset.skipped


def test_errors_of_transforms_are_not_skipped(path):
    def fail(_: torch.Tensor) -> torch.Tensor:
        raise OSError("a bug")

    with pytest.raises(OSError, match="a bug"):
        list(DataLoader(opened(path, transforms=[fail]), BATCH))
    with ChunkLoader(opened(path), BATCH, transforms=[fail]) as loader, pytest.raises(OSError, match="a bug"):
        list(loader)


def test_samples_are_not_replaced_by_longer_ones(tmp_path):
    """So that a limit on the elements of a batch, and memory that was planned for it, suffice."""
    random = np.random.default_rng(0)
    lengths = random.permutation(np.arange(N) % 50 + 1)
    tokens = np.repeat(np.arange(N), lengths)
    made = make_file(
        tmp_path / "a.h5", tokens=(tokens, {"chunks": (40,), "compression": "gzip"}), lengths=(lengths, {})
    )
    for chunk in range(5, len(tokens) // 40, 8):
        damage(made, chunk, "tokens")
    dataset = ChunkDataset(
        made, fields=["tokens", "sample_number"], lengths={"tokens": "lengths"}, on_error="skip", max_skipped=0.5
    )
    sampler = ChunkSampler(dataset, batch_elements=600)
    batches = [batch.tolist() for batch in sampler.order.batches()]
    for options in ({}, {"reuse": True}):
        with ChunkLoader(dataset, batch_elements=600, **options) as loader:
            for ((own, sizes), numbers), planned in zip(loader, batches, strict=True):
                assert (sizes.numpy() == lengths[numbers.numpy()]).all() and own.numel() <= 600
                for row, size, number, other in zip(own, sizes, numbers.tolist(), planned, strict=True):
                    assert (row[:size] == number).all() and lengths[number] <= lengths[other]
    assert len(dataset.skipped) > 2


def test_the_limit_is_of_an_epoch_if_samples_are_drawn_anew(tmp_path):
    volumes = {name: (values((40, 40), np.uint8), {"chunks": (8, 8), "compression": "gzip"}) for name in "ab"}
    made = make_file(tmp_path / "a.h5", **volumes)
    damage(made, 12, "a")
    fields = {"image": "*", "sample_number": "sample_number"}
    dataset = Patches(made, fields, (4, 4), on_error="skip", max_skipped=0.1)
    with ChunkLoader(dataset, BATCH) as loader:
        counts = []
        for _ in range(8):
            assert sum(map(len, (numbers for *_, numbers in loader))) == len(dataset)
            counts.append(loader.report.skipped)
    assert sum(counts) > 0.1 * len(dataset) > max(counts) and len({*counts}) > 1


def test_rows_that_were_never_written(tmp_path):
    """It is found out before a window is read."""
    frames = values((40, 8, 6, 3), np.uint8)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        rows = file.create_dataset("frames", (40,), h5py.vlen_dtype(np.uint8))
        for number in {*range(40)} - {17}:
            rows[number] = encoded(frames[number], "PNG")
    dataset = Windows(
        tmp_path / "a.h5", {"frames": "frames", "sample_number": "sample_number"}, 4, on_error="skip", max_skipped=0.2
    )
    for batches in (ChunkLoader(dataset, 8), DataLoader(dataset, 8)):
        for own, numbers in batches:
            np.testing.assert_array_equal(own, frames[numbers.numpy()[:, None] + np.arange(4)])
    assert {sample.number for sample in dataset.skipped} == {14, 15, 16, 17}


def test_arguments(path):
    for options in ({"on_error": "ignore"}, {"on_error": None}):
        with pytest.raises(OptionError, match=r"on_error is .*: pass 'raise' or 'skip'"):
            ChunkDataset(path, **options)
    for share in (0, -1, 1.5, True, "1", None):
        with pytest.raises(OptionError, match=r"max_skipped is .*: pass a share"):
            ChunkDataset(path, max_skipped=share)
    with pytest.raises(OptionError, match=r"on_error='skip'.*pass on_error= to the Mix"):
        Mix({"a": ChunkDataset(path, on_error="skip")})
    assert ChunkDataset(path).on_error == "raise" and ChunkDataset(path).skipped == []
