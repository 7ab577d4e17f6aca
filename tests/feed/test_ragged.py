"""Samples that are runs of a dataset's rows: values, promises of the loader, and tables that cannot be right."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from support.loaders import loader_by
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

import h5chunk
from h5chunk.transforms import Nested, Pack, Pad

NEEDS_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
COUNT = 60
LENGTHS = np.random.default_rng(5).integers(0, 20, COUNT)
STARTS = np.concatenate([[0], np.cumsum(LENGTHS)])
STORAGE: dict[str, Mapping[str, Any]] = {
    "contiguous": {},
    "chunked": {"chunks": (16, 3, 2)},
    "compressed": {"chunks": (16, 3, 2), "compression": "gzip"},
    "in pieces": {"chunks": (10, 2, 1), "compression": "gzip", "shuffle": True},
    "big-endian": {"dtype": ">f4"},
    "flat": {},
}


@pytest.fixture(autouse=True)
def opened_by() -> None:
    """Files are first opened in a child process, as for users."""


def _values(step: tuple[int, ...] = (3, 2)) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(STARTS[-1], *step)).astype(np.float32)


def _make(path: Path, storage: str = "contiguous") -> Path:
    with h5py.File(path, "w") as file:
        file.create_dataset("values", data=_values(() if storage == "flat" else (3, 2)), **STORAGE[storage])
        file["starts"], file["lengths"], file["label"] = STARTS.astype(np.uint32), LENGTHS, np.arange(COUNT)
    return path


def _open(path: Any, **options: Any) -> h5chunk.ChunkDataset:
    options = {"offsets": {"values": "starts"}, **options}
    return h5chunk.ChunkDataset(path, fields=["values", "label"], **options)


def _check(batch: Any, values: np.ndarray, seen: list[int]) -> None:
    """Compare a padded batch with the values in the file, and note its labels."""
    (padded, lengths), labels = batch
    assert lengths.tolist() == LENGTHS[labels % COUNT].tolist() and padded.shape[1] == lengths.max()
    for row, length, label in zip(padded, lengths, (labels % COUNT).tolist(), strict=True):
        np.testing.assert_array_equal(row[:length], values[STARTS[label] : STARTS[label + 1]])
        assert not row[length:].any()
    seen += labels.tolist()


@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.filterwarnings("ignore:field .* is read through h5py")
def test_samples_of_a_flat_dataset_are_read_exactly_once(tmp_path: Path, storage: str) -> None:
    path, values = _make(tmp_path / "a.h5", storage), _values(() if storage == "flat" else (3, 2))
    for table in ({"offsets": {"values": "starts"}}, {"offsets": None, "lengths": {"values": "lengths"}}):
        dataset = _open(path, **table)
        assert dataset.sample_lengths.tolist() == LENGTHS.tolist() and len(dataset) == COUNT
        for options in ({"resident": False}, {"resident": True}, {"reader": "h5py"}):
            seen: list[int] = []
            for batch in loader_by(dataset, 8, **options):
                _check(batch, values, seen)
            assert sorted(seen) == list(range(COUNT)) != seen
        (packed, starts), labels = dataset.with_transforms(Pack())[[7, 2, 50]]
        np.testing.assert_array_equal(packed, np.concatenate([values[STARTS[i] : STARTS[i + 1]] for i in (7, 2, 50)]))
        assert starts.tolist() == [0, *np.cumsum(LENGTHS[[7, 2, 50]])] and labels.tolist() == [7, 2, 50]


def test_a_data_loader_with_a_worker_subsets_weights_and_several_files(tmp_path: Path) -> None:
    paths = [_make(tmp_path / f"{name}.h5", storage) for name, storage in (("a", "chunked"), ("b", "compressed"))]
    dataset, seen = _open(paths), list[int]()
    for batch in DataLoader(dataset, batch_sampler=h5chunk.ChunkSampler(dataset, 8), num_workers=1):
        _check(batch, _values(), seen)
    assert sorted(seen) == sorted([*range(COUNT)] * 2)
    part, seen = dataset.subset(dataset.sample_lengths > 10), []
    for batch in h5chunk.ChunkLoader(part, batch_sampler=h5chunk.ChunkSampler(part, 8, weights=np.ones(len(part)))):
        _check(batch, _values(), seen)
    assert sorted(seen) == sorted([*np.flatnonzero(LENGTHS > 10)] * 2)


def test_training_resumes_and_ranks_share_the_samples(tmp_path: Path) -> None:
    dataset = _open(_make(tmp_path / "a.h5", "compressed"))
    loader = h5chunk.ChunkLoader(dataset, 8, seed=4)
    batches = list(loader)
    state = {**loader.state_dict(), "epoch": 0, "batch": 3}
    again = h5chunk.ChunkLoader(dataset, 8, seed=4)
    again.load_state_dict(state)
    assert all(torch.equal(one[0].values, other[0].values) for one, other in zip(again, batches[3:], strict=True))
    samplers = [h5chunk.ChunkSampler(dataset, 4, rank=rank, world_size=2) for rank in range(2)]
    seen = [batch[1] for own in samplers for batch in h5chunk.ChunkLoader(dataset, batch_sampler=own)]
    assert sorted(torch.cat(seen).tolist()) == list(range(COUNT))


VLEN: dict[str, Mapping[str, Any]] = {
    "contiguous": {},
    "chunked": {"chunks": (16,)},
    "compressed": {"chunks": (16,), "compression": "gzip", "maxshape": (None,)},
}


def _make_vlen(path: Path, storage: str = "contiguous", block: int = 0) -> Path:
    """Write arrays of variable length, one of them larger than the block in which heaps are read."""
    with h5py.File(path, "w", userblock_size=block) as file:
        dataset = file.create_dataset("values", (COUNT,), h5py.vlen_dtype(np.float32), **VLEN[storage])
        for number in range(COUNT):
            dataset[number] = _vlen_sample(number)
        file["label"] = np.arange(COUNT)
    return path


def _vlen_sample(number: int) -> np.ndarray:
    return np.full(40_000 if number == 11 else LENGTHS[number], number, np.float32)


@pytest.mark.parametrize("block", [0, 512])
@pytest.mark.parametrize("storage", VLEN)
def test_arrays_of_variable_length_are_read_without_hdf5(tmp_path: Path, storage: str, block: int) -> None:
    dataset = h5chunk.ChunkDataset(_make_vlen(tmp_path / "a.h5", storage, block), fields=["values", "label"])
    for options in ({"reader": "direct", "resident": False}, {"reader": "h5py"}):
        seen = list[int]()
        for (padded, lengths), labels in loader_by(dataset, 8, **options):
            for row, length, label in zip(padded, lengths.tolist(), labels.tolist(), strict=True):
                np.testing.assert_array_equal(row[:length], _vlen_sample(label))
            seen += labels.tolist()
        assert sorted(seen) == list(range(COUNT))
    loader = DataLoader(dataset, batch_sampler=h5chunk.ChunkSampler(dataset, 8), num_workers=1)
    assert sum(int(lengths.sum()) for (_, lengths), _ in loader) == LENGTHS.sum() - LENGTHS[11] + 40_000


@pytest.mark.parametrize("base", ["?", "c8", "f2"])
def test_arrays_of_variable_length_of_other_types(tmp_path: Path, base: Any) -> None:
    values = np.random.default_rng(0).integers(0, 2, STARTS[-1]).astype(base)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        dataset = file.create_dataset("values", (COUNT,), h5py.vlen_dtype(np.dtype(base)))
        for number in range(COUNT):
            dataset[number] = values[STARTS[number] : STARTS[number + 1]]
        file["label"] = np.arange(COUNT)
    seen = list[int]()
    for batch in h5chunk.ChunkLoader(h5chunk.ChunkDataset(tmp_path / "a.h5", fields=["values", "label"]), 8):
        _check(batch, values, seen)
    assert sorted(seen) == list(range(COUNT))


@pytest.mark.parametrize("base", [h5py.string_dtype(), np.dtype([("a", "i4")]), h5py.vlen_dtype("f4")])
def test_arrays_of_other_types_are_refused(tmp_path: Path, base: Any) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("values", (3,), h5py.vlen_dtype(base))
    with pytest.raises(h5chunk.FieldError, match=": write its values one after the other"):
        h5chunk.ChunkDataset(tmp_path / "a.h5", fields=["values"])


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (b"GCOL", b"GCOX", "heap is damaged"),
        (b"GCOL\x01\0\0\0\0\x10", b"GCOL\x01\0\0\0\xff\xff", "heap is damaged|overlap|beyond the end"),
        (b"", b"\xff\xff\xff\x7f", "claims .* bytes"),
        (b"", b"\x01\0\0\0" + b"\xee" * 8, "heap is damaged|beyond the end"),
        (b"", b"\x40\0\0\0", "not in the heap"),
    ],
)
def test_damaged_heaps_are_errors(tmp_path: Path, place: bytes, value: bytes, message: str) -> None:
    path = _make_vlen(tmp_path / "a.h5")
    data = bytearray(path.read_bytes())
    with h5py.File(path) as file:
        at = data.index(place) if place else file["values"].id.get_offset()
    data[at : at + len(value)] = value
    path.write_bytes(bytes(data))
    with pytest.raises(h5chunk.FileError, match=message):
        list(h5chunk.ChunkLoader(h5chunk.ChunkDataset(path, fields=["values"]), 8))


def _make_jets(path: Path, count: int = COUNT) -> Path:
    with h5py.File(path, "w") as file:
        for number, name in enumerate(("pt", "eta")):
            file[name] = np.arange(STARTS[count], dtype="f4") + number / 2
        file["hits"] = np.arange(5 * count, dtype="i4")
        file["starts"], file["hits_of"], file["label"] = STARTS[: count + 1], np.full(count, 5), np.arange(count)
    return path


NESTED: dict[str, Any] = {
    "streamed": {},
    "reused": {"reuse": True},
    "resident": {"resident": True},
    "of a gpu": pytest.param({"device": "cuda"}, marks=NEEDS_GPU),
}


def _check_nested(batch: Any, as_dict: bool) -> list[int]:
    items = list(batch.values()) if as_dict else list(batch)
    nested, labels = (item.cpu() for item in items)
    assert len(items) == 2 and nested.layout == torch.jagged and nested.shape[0] == len(labels)
    for sample, label in zip(nested.unbind(), labels.tolist(), strict=True):
        np.testing.assert_array_equal(sample, _values()[STARTS[label] : STARTS[label + 1]])
    return labels.tolist()


@pytest.mark.parametrize("options", NESTED.values(), ids=NESTED)
@pytest.mark.parametrize("as_dict", [False, True])
def test_nested_tensors(tmp_path: Path, options: dict[str, Any], as_dict: bool) -> None:
    dataset = _open(_make(tmp_path / "a.h5", "compressed"), transforms=Nested(), as_dict=as_dict)
    with loader_by(dataset, 8, **options) as loader:
        assert sorted(label for batch in loader for label in _check_nested(batch, as_dict)) == list(range(COUNT))
        again = DataLoader(loader.dataset, 8, collate_fn=loader.collate_fn)
        assert [label for batch in again for label in _check_nested(batch, as_dict)] == list(range(COUNT))


@pytest.mark.parametrize("as_dict", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
def test_nested_tensors_of_a_data_loader(tmp_path: Path, workers: int, as_dict: bool) -> None:
    dataset = _open(_make(tmp_path / "a.h5", "chunked"), transforms=Nested(), as_dict=as_dict)
    loader = DataLoader(dataset, batch_sampler=h5chunk.ChunkSampler(dataset, 8), num_workers=workers)
    for _ in range(2):
        assert sorted(label for batch in loader for label in _check_nested(batch, as_dict)) == list(range(COUNT))
    sample = dataset[5]
    values, label = sample.values() if as_dict else sample
    np.testing.assert_array_equal(values, _values()[STARTS[5] : STARTS[6]])
    assert (
        label == 5 and _check_nested(dataset[[7, 2]], as_dict) == [7, 2] and _check_nested(dataset[[]], as_dict) == []
    )
    packed = h5chunk.ChunkSampler(dataset, batch_elements=60)
    assert max(int(LENGTHS[batch].sum()) for batch in packed) > 50


@pytest.mark.parametrize("workers", [0, 1])
def test_packed_and_padded_fields_and_samples_of_a_batch(tmp_path: Path, workers: int) -> None:
    paths = [_make_jets(tmp_path / "a.h5"), _make_jets(tmp_path / "b.h5", 20)]
    tables: Any = {"offsets": {"pt": "starts", "eta": "starts"}, "lengths": {"hits": "hits_of"}}
    transform = {"pt": [Pack()], "hits": [Pack()]}
    dataset = h5chunk.ChunkDataset(paths, fields=["label", "pt", "eta", "hits"], transforms=transform, **tables)
    sampler = h5chunk.ChunkSampler(dataset, 8)
    for collate_fn in (h5chunk.collate, list):
        for batch in DataLoader(dataset, batch_sampler=sampler, num_workers=workers, collate_fn=collate_fn):
            if collate_fn is list:  # each sample has all fields, with their lengths
                for label, (pt, length), (eta, other), (hits, five) in batch:
                    assert len(pt) == length == other == LENGTHS[label] and len(hits) == five == 5
                    np.testing.assert_array_equal(pt + 0.5, eta[:length])
                    assert hits[0] == 5 * label
                continue
            labels, (pt, starts), (eta, lengths), (hits, fives) = batch
            assert lengths.tolist() == starts.diff().tolist() == LENGTHS[labels].tolist()
            np.testing.assert_array_equal(pt + 0.5, torch.cat([row[:n] for row, n in zip(eta, lengths, strict=True)]))
            assert hits[fives[:-1]].tolist() == (5 * labels).tolist()


def test_batches_are_limited_by_the_first_field_that_differs_in_length(tmp_path: Path) -> None:
    path = _make_jets(tmp_path / "a.h5")
    tables: Any = {"offsets": {"pt": "starts"}, "lengths": {"hits": "hits_of"}}
    for fields, lengths in ((["label", "pt", "hits"], LENGTHS), (["hits", "pt", "label"], np.full(COUNT, 5))):
        dataset = h5chunk.ChunkDataset(path, fields=fields, **tables)
        assert (
            dataset.sample_lengths.tolist() == lengths.tolist()
            and dataset.lengths_field == fields[fields[0] == "label"]
        )
        for pack in ([], [Pack()]):
            transforms = {dataset.lengths_field: pack}
            for batch in h5chunk.ChunkLoader(dataset, batch_elements=100, transforms=transforms):
                labels = batch[fields.index("label")].numpy()
                own = lengths[labels]
                assert (own.sum() if pack else len(own) * own.max()) <= 100


def test_fields_that_differ_in_length_in_several_files(tmp_path: Path) -> None:
    first, second, order = _make_jets(tmp_path / "a.h5"), tmp_path / "b.h5", np.random.default_rng(3).permutation(COUNT)
    with h5py.File(second, "w") as file:
        file["label"], file["marks"] = order, np.concatenate([np.full(n % 7, n) for n in order])
        file["counts"] = order % 7
    dataset = h5chunk.ChunkDataset(
        {"pt": first, "marks": second, "label": first},
        offsets={"pt": "starts"},
        lengths={"marks": "counts"},
        key="label",
        fields=["marks", "label", "pt"],
    )
    with h5chunk.ChunkLoader(dataset, 8) as loader:
        seen = list[int]()
        for (marks, counts), labels, (_, lengths) in loader:
            assert counts.tolist() == (labels % 7).tolist() and lengths.tolist() == LENGTHS[labels].tolist()
            assert all((row[: label % 7] == label).all() for row, label in zip(marks, labels.tolist(), strict=True))
            seen += labels.tolist()
        assert sorted(seen) == list(range(COUNT))


def test_lengths_that_contradict_only_one_field_are_errors(tmp_path: Path) -> None:
    path = _make_jets(tmp_path / "a.h5")
    with h5py.File(path, "a") as file:
        file["short"] = file["pt"][:-1]
    with pytest.raises(h5chunk.FileError, match="'short' does not fit: 'starts' runs from"):
        h5chunk.ChunkLoader(h5chunk.ChunkDataset(path, offsets={"pt": "starts", "short": "starts"}), 8)


def _break(path: Path, how: str) -> None:
    with h5py.File(path, "a") as file:
        starts, lengths = file["starts"][()].astype(np.int64), file["lengths"][()]
        changed = {
            "float": starts.astype(np.float64),
            "decreasing": np.where(np.arange(COUNT + 1) == 30, starts[31] + 1, starts),
            "too short": starts[:-1],
            "too far": starts + (np.arange(COUNT + 1) == COUNT),
            "two axes": starts[None],
            "none": starts[:0],
        }
        if how in changed:
            del file["starts"]
            file["starts"] = changed[how]
        elif how == "strings":
            del file["values"]
            file["values"] = np.full(STARTS[-1], b"a")
        else:
            wrong = {"negative": (0, -1), "huge": (0, 1 << 62), "sum": (1, lengths[1] + 1)}
            file["lengths"][wrong[how][0]] = wrong[how][1]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("float", "'starts' is float64 .*must be integers"),
        ("two axes", "must be integers in one dimension"),
        ("none", "must be integers in one dimension"),
        ("strings", "numbers with one row per step"),
        ("decreasing", "decreases after row 30"),
        ("too short", "differ in length .'values' has 59, 'label' has 60"),
        ("too far", "runs from 0 to .* instead of .* It must have the first row"),
        ("negative", "length -1 for sample 0"),
        ("huge", "length .* for sample 0"),
        ("sum", "add up to"),
    ],
)
def test_tables_that_cannot_be_right_are_errors(tmp_path: Path, how: str, message: str) -> None:
    path = _make(tmp_path / "a.h5")
    _break(path, how)
    table = {"offsets": None, "lengths": {"values": "lengths"}} if how in ("negative", "huge", "sum") else {}
    with pytest.raises(h5chunk.H5ChunkError, match=message):
        _open(path, **table)


@pytest.mark.parametrize("fields", [["values"], ["values", "label"]])
def test_lengths_that_are_passed_as_offsets(tmp_path: Path, fields: list[str]) -> None:
    path = _make(tmp_path / "a.h5")
    remedy = r"'lengths' was passed as offsets; if it has .*, pass lengths={'values': 'lengths'}"
    with pytest.raises(h5chunk.H5ChunkError, match=remedy):
        h5chunk.ChunkDataset(path, fields=fields, offsets={"values": "lengths"})[0]
    if "label" in fields:
        with pytest.raises(h5chunk.FieldError, match=r"if it has the offsets of samples, pass offsets={'values': 'st"):
            h5chunk.ChunkDataset(path, fields=fields, lengths={"values": "starts"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"offsets": {"other": "starts"}}, "name the field in fields, too"),
        ({"offsets": {"values": "starts"}, "lengths": {"values": "lengths"}}, "as offsets or as lengths"),
        ({"offsets": "starts"}, "pass a mapping"),
        ({"offsets": {"values": 3}}, "specify one dataset"),
        ({"offsets": {"values": "nothing"}}, "no dataset 'nothing'"),
        ({"checksums": "first"}, "no checksums"),
    ],
)
def test_invalid_arguments(tmp_path: Path, options: Any, message: str) -> None:
    with pytest.raises(h5chunk.H5ChunkError, match=message):
        _open(_make(tmp_path / "a.h5"), **options)


def test_links_and_damaged_chunks_are_errors(tmp_path: Path) -> None:
    path = _make(tmp_path / "a.h5", "compressed")
    with h5py.File(path, "a") as file:
        file["soft"] = h5py.SoftLink("/starts")
        chunk = file["values"].id.get_chunk_info(3)
    with pytest.raises(h5chunk.TrustError, match="soft link"):
        _open(path, offsets={"values": "soft"})
    with path.open("r+b") as raw:
        raw.seek(chunk.byte_offset)
        raw.write(bytes(chunk.size))
    dataset = _open(path)
    with pytest.raises(h5chunk.FileError, match=r"values.*chunk 3"):
        list(h5chunk.ChunkLoader(dataset, 8))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "u1", "u2", "i4", "i8", "?"])
@pytest.mark.parametrize("step", [(), (3, 2)])
@pytest.mark.parametrize("resident", [False, True])
def test_batches_on_a_gpu_are_those_on_the_cpu(
    tmp_path: Path, dtype: str, step: tuple[int, ...], resident: bool
) -> None:
    values = np.random.default_rng(0).integers(0, 200, (STARTS[-1], *step)).astype(dtype)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["values"], file["starts"], file["label"] = values, STARTS, np.arange(COUNT)
    dataset = _open(tmp_path / "a.h5")
    for transforms in ([Pad(1)], [Pack()]):
        for order in ({"batch_size": 8}, {"batch_elements": 60}, {"batch_size": 8, "bucket_batches": 3}):
            samplers = [h5chunk.ChunkSampler(dataset, **order) for _ in range(2)]
            options = {"transforms": transforms, "resident": resident}
            expected = [tree_leaves(batch) for batch in loader_by(dataset, batch_sampler=samplers[0], **options)]
            with loader_by(dataset, batch_sampler=samplers[1], device="cuda", **options) as loader:
                for _ in range(2):
                    batches = [[part.cpu() for part in tree_leaves(batch)] for batch in loader]
                    if loader.batch_sampler.order.epoch == 1:
                        pairs = zip(batches, expected, strict=True)
                        assert all(all(map(torch.equal, own, tree_leaves(other))) for own, other in pairs)
                    assert sorted(torch.cat([batch[-1] for batch in batches]).tolist()) == list(range(COUNT))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("resident", [False, True])
def test_several_fields_on_a_gpu(tmp_path: Path, resident: bool) -> None:
    tables: Any = {"offsets": {"pt": "starts", "eta": "starts"}, "lengths": {"hits": "hits_of"}}
    dataset = h5chunk.ChunkDataset(_make_jets(tmp_path / "a.h5"), fields=["label", "pt", "eta", "hits"], **tables)
    options: Any = {"resident": resident, "transforms": {"eta": [Pack()]}}
    with loader_by(dataset, 8, device="cuda", **options) as loader:
        for batch, expected in zip(loader, loader_by(dataset, 8, **options), strict=True):
            pairs = zip(tree_leaves(batch), tree_leaves(expected), strict=True)
            assert all(torch.equal(own.cpu(), other) for own, other in pairs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_windows_without_any_step_on_a_gpu(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["values"], file["lengths"] = np.zeros((1, 2), "f4"), np.array([*[0] * 20, 1])
    dataset = h5chunk.ChunkDataset(tmp_path / "a.h5", lengths={"values": "lengths"})
    for transforms, shape in (([Pad()], (4, 0, 2)), ([Pack()], (0, 2))):
        loader = h5chunk.ChunkLoader(dataset, 4, transforms=transforms, shuffle=False, device="cuda", resident=False)
        assert [tuple(tree_leaves(batch)[0].shape) for batch in loader][:5] == [shape] * 5
