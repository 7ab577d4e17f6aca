"""Samples that are datasets of a file: values, indexes that are made once, and damaged, stale and hostile indexes."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from support import odd_files
from support.loaders import loader_by
from torch.utils.data import DataLoader

import h5chunk
from h5chunk.store.hdf5 import keyed_list
from h5chunk.transforms import Normalize, Pack, Pad

COUNT = 23
STORAGE: dict[str, Mapping[str, Any]] = {
    "contiguous": {},
    "chunked": {"chunks": (4, 2)},
    "compressed": {"chunks": (4, 2), "compression": "gzip", "shuffle": True, "fletcher32": True},
    "whole": {"chunks": (7, 3), "compression": "gzip"},
    "unwritten": {},
    "unwritten chunks": {},
    "plain edges": {},
    "big-endian": {"dtype": ">f4"},
}


def _values(number: int, length: int = 7) -> np.ndarray:
    return np.random.default_rng(number).normal(size=(length, 3)).astype(np.float32)


def _write(group: h5py.Group, name: str, values: np.ndarray, storage: str) -> None:
    if storage == "compact":
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        properties.set_layout(h5py.h5d.COMPACT)
        space = h5py.h5s.create_simple(values.shape)
        dataset = h5py.h5d.create(group.id, name.encode(), h5py.h5t.NATIVE_FLOAT, space, properties)
        dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, values)
    elif storage.startswith("unwritten"):
        group.create_dataset(
            name, values.shape, np.float32, fillvalue=2.5, chunks=(4, 2) if "chunks" in storage else None
        )
    elif storage == "plain edges":
        gzip, kind = [odd_files.GZIP], h5py.h5t.NATIVE_FLOAT
        path, options = f"{group.name}/{name}", {"shape": values.shape, "chunks": (4, 2), "kind": kind}
        odd_files.create(group.file, name=path, filters=gzip, partial_plain=True, **options)[...] = values
    else:
        group.create_dataset(name, data=values, **STORAGE[storage])


def _make(path: Path, storage: str = "contiguous", *, count: int = COUNT, **options: Any) -> Path:
    """Write a file whose samples are groups, each with its values and attributes."""
    with h5py.File(path, "w", **options) as file:
        for number in range(count):
            group = file.create_group(f"traces/{number:04}")
            kinds = [*(kind for kind in STORAGE if kind != "big-endian"), "compact"]
            _write(group, "data", _values(number), kinds[number % len(kinds)] if storage == "all" else storage)
            group["pick"] = np.int64(number * 10)
            group.attrs["magnitude"], group.attrs["station"] = number / 4, np.bytes_(f"st{number % 3}")
    return path


def _expected(path: Path) -> np.ndarray:
    with h5py.File(path) as file:
        return np.stack([group["data"][()] for group in file["traces"].values()])


def _open(path: Path, **options: Any) -> h5chunk.Keyed:
    return h5chunk.Keyed(path, ["traces/*/data", "traces/*/pick"], attributes=["magnitude"], **options)


@pytest.mark.parametrize("storage", [*STORAGE, "compact", "all"])
@pytest.mark.parametrize("block", [0, 512])
def test_values_are_those_of_h5py(tmp_path: Path, storage: str, block: int) -> None:
    path = _make(tmp_path / "traces.h5", storage, userblock_size=block)
    dataset, expected = _open(path), _expected(path)
    data, picks, magnitudes = dataset[[5, 2, 22]]
    np.testing.assert_array_equal(data, expected[[5, 2, 22]])
    assert picks.tolist() == [50, 20, 220] and magnitudes.tolist() == [1.25, 0.5, 5.5]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of what only HDF5 reads
        for reader in ("auto", "h5py"):
            batches = list(loader_by(dataset, 4, reader=reader, resident=False))
            order = torch.cat([batch[1] for batch in batches]).numpy() // 10
            assert sorted(order) == list(range(COUNT)) and order.tolist() != list(range(COUNT))
            np.testing.assert_array_equal(torch.cat([batch[0] for batch in batches]), expected[order])
            assert torch.cat([batch[2] for batch in batches]).tolist() == (order / 4).tolist()


def test_info_prints_the_line_that_opens_a_dataset_per_sample(tmp_path: Path) -> None:
    path = _make(tmp_path / "traces.h5", count=120)
    info = h5chunk.info(path)
    assert info.layout in str(info) and "for each sample" in info.layout
    space: dict[str, Any] = {}
    exec("\n".join(info.code), space)
    assert len(space["data"]) == 120 and next(iter(space["loader"]))[0].shape[1:] == (7, 3)
    with h5py.File(path, "a") as file:
        file["images"] = np.zeros((100, 3, 32, 32), np.uint8)  # most of the bytes are elsewhere
    assert h5chunk.info(path).layout == ""


def test_names_values_subsets_and_several_files(tmp_path: Path) -> None:
    paths = [_make(tmp_path / f"{name}.h5", count=4) for name in "ab"]
    dataset = _open(paths)  # type: ignore[arg-type]
    assert dataset.source_names.tolist() == [f"{number:04}" for number in range(4)] * 2
    part = dataset.subset(dataset.values("magnitude") > 0.3)
    assert part.source_names.tolist() == ["0002", "0003"] * 2 and part.values("pick").tolist() == [20, 30] * 2
    assert h5chunk.Keyed(paths[0], "traces/*/data", attributes=["station"]).values("station")[1] == "st1"


def _index_of(path: Path) -> Path:
    (found,) = path.parent.glob(f"{path.name}.h5chunk-index-*")
    return found


def test_an_index_is_made_once_and_again_if_the_file_changes(tmp_path: Path) -> None:
    path, told = _make(tmp_path / "traces.h5"), list[tuple[str, int, int | None]]()

    def tell(stage: str, done: int, total: int | None) -> None:
        told.append((stage, done, total))

    first = _open(path, progress=tell)
    assert told[-1] == ("index", COUNT, COUNT)
    told.clear()
    assert _open(path, progress=tell).fingerprint == first.fingerprint and not told
    with h5py.File(path, "a") as file:
        file["traces/0003/data"][0] = 7
        file.create_dataset("traces/0003b/data", data=_values(1))
        file["traces/0003b/pick"], file["traces/0003b"].attrs["magnitude"] = np.int64(35), 9.0
    with pytest.raises(h5chunk.FileError, match="changed"):
        first[0]
    with pytest.warns(UserWarning, match="has changed since it was indexed"):
        dataset = _open(path, progress=tell)
    assert told and len(dataset) == COUNT + 1 and dataset[4][1] == 35 and dataset[3][0][0, 0] == 7


def test_another_file_of_the_same_size_and_time_is_indexed_again(tmp_path: Path) -> None:
    path, other = _make(tmp_path / "traces.h5"), tmp_path / "other.h5"
    _open(path)
    with h5py.File(other, "w") as file:
        for number in reversed(range(COUNT)):
            group = file.create_group(f"traces/{number:04}")
            group["data"], group["pick"] = _values(number + 1), np.int64(number * 10)
            group.attrs["magnitude"], group.attrs["station"] = number / 4, np.bytes_(f"st{number % 3}")
    before = path.stat()
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert other.stat().st_size == before.st_size
    os.replace(other, path)
    with pytest.warns(UserWarning, match="has changed since it was indexed"):
        np.testing.assert_array_equal(_open(path)[list(range(COUNT))][0], _expected(path))


@pytest.mark.parametrize("obstacle", ["pipe", "folder", "long name"])
def test_what_prevents_an_index_does_not_prevent_reading(
    tmp_path: Path, obstacle: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = _make(tmp_path / ("a" * 250 if obstacle == "long name" else "traces.h5"))
    if obstacle == "long name":
        (tmp_path / "cache").write_text("not a folder")
    else:
        index = _index_of(Path(_open(path).path))
        index.unlink()
        os.mkfifo(index) if obstacle == "pipe" else index.mkdir()
    with pytest.warns(UserWarning, match="is rebuilt, because|is rebuilt each time"):
        np.testing.assert_array_equal(_open(path)[list(range(COUNT))][0], _expected(path))


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([np.uint64(2**63 + 1), 5], "uint64"),
        ([-1, 2.5], "float64"),
        ([np.uint64(2**63 + 1), -1], None),
        ([2**53 + 1, 2.5], None),
    ],
)
@pytest.mark.parametrize("part", [1, 5])
def test_attributes_are_exact_or_an_error(
    tmp_path: Path, values: list[Any], dtype: str | None, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyed_list, "PART_SAMPLES", part)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for number, value in enumerate(values):
            file[f"{number}/data"] = [number]
            file[f"{number}"].attrs["id"] = value
    if dtype is None:
        with pytest.raises(h5chunk.FieldError, match="no type represents all values exactly"):
            h5chunk.Keyed(tmp_path / "a.h5", "*/data", attributes=["id"])
        with pytest.raises(h5chunk.SourceError, match="no type represents all values exactly"):
            h5chunk.convert(tmp_path / "a.h5", tmp_path / "b.h5", samples=["*/data"], attributes=["id"])
        return
    found = h5chunk.Keyed(tmp_path / "a.h5", "*/data", attributes=["id"]).values("id")
    assert found.dtype == dtype and found.tolist() == values


def test_an_index_goes_to_the_cache_folder_if_the_file_is_in_a_folder_that_is_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    path = _make(tmp_path / "data" / "traces.h5")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "access", lambda folder, _mode: Path(folder) != path.parent)
    _open(path)
    assert [each.name for each in path.parent.iterdir()] == ["traces.h5"]
    told: list[Any] = []
    assert _open(path, progress=lambda *args: told.append(args))[2][1] == 20 and not told


def test_a_killed_build_leaves_nothing_and_the_next_one_is_whole(tmp_path: Path) -> None:
    path = _make(tmp_path / "traces.h5")

    def stop(_stage: str, done: int, _total: int | None) -> None:
        if done:
            os._exit(9)

    if (child := os.fork()) == 0:
        _open(path, progress=stop)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    np.testing.assert_array_equal(_open(path)[list(range(COUNT))][0], _expected(path))


def _rewrite(index: Path, change: Any) -> None:
    """Change the header and the arrays of an index, which then has valid checksums."""
    arrays = dict(np.load(index).items())
    header = json.loads(arrays["header"].tobytes())
    change(header, arrays)
    arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    with index.open("wb") as file:
        np.savez(file, **arrays)


def _set(array: str, value: Any) -> Any:
    return lambda _, arrays: arrays[array].__setitem__(0, value)


@pytest.mark.parametrize(
    "change",
    [
        _set("0 offsets", -5),
        _set("0 sizes", -1),
        lambda header, _: header["fields"][0].__setitem__(1, [[[1, 1], 0, 4, ""]]),
        _set("0 kinds", 3),
        _set("0 kinds", -2),
        _set("0 shapes", (1 << 60, 3)),
        _set("0 shapes", (-1, 3)),
        _set("ends", 1 << 50),
        _set("starts", 1),
        lambda _, arrays: arrays.__setitem__("0 dtype", np.empty(0, ">f4")),
        lambda _, arrays: arrays.__setitem__("0 dtype", np.empty(0, object)),
        lambda header, _: header["fields"][0].__setitem__(0, "other"),
        lambda header, _: header.__setitem__("fields", []),
        lambda header, _: header.__setitem__("files", []),
        lambda header, _: header.__setitem__("version", 1),
        lambda _, arrays: arrays.__setitem__("0 shapes", arrays["0 shapes"][:, :1].repeat(3, 1)),
        lambda _, arrays: arrays.__setitem__("0 shapes", arrays["0 shapes"].astype("f8")),
        lambda _, arrays: arrays.__setitem__("0 masks", arrays["0 masks"][1:]),
        lambda _, arrays: arrays.__setitem__("column magnitude", arrays["column magnitude"][1:]),
        lambda _, arrays: arrays.pop("names"),
        lambda _, arrays: arrays.__setitem__("names", np.array([{}])),
    ],
)
def test_a_hostile_index_is_made_again(tmp_path: Path, change: Any) -> None:
    path = _make(tmp_path / "traces.h5")
    _open(path)
    _rewrite(_index_of(path), change)
    with pytest.warns(UserWarning, match="the index is rebuilt"):
        dataset = _open(path)
    np.testing.assert_array_equal(dataset[list(range(COUNT))][0], _expected(path))


def test_a_damaged_index_is_made_again(tmp_path: Path) -> None:
    path = _make(tmp_path / "traces.h5", "compressed")
    _open(path)
    whole = _index_of(path).read_bytes()
    flipped = bytearray(whole)
    flipped[-9] ^= 1
    for content in (b"", b"\n", b"{}\n", b"[" * 100_000, whole[:-1], whole[:50], bytes(flipped)):
        _index_of(path).write_bytes(content)
        with pytest.warns(UserWarning, match="the index is rebuilt"):
            np.testing.assert_array_equal(_open(path)[list(range(COUNT))][0], _expected(path))


def test_a_damaged_chunk_is_an_error_that_names_the_sample(tmp_path: Path) -> None:
    path = _make(tmp_path / "traces.h5", "whole")
    with h5py.File(path) as file:
        chunk = file["traces/0007/data"].id.get_chunk_info(0)
    with path.open("r+b") as raw:
        raw.seek(chunk.byte_offset)
        raw.write(bytes(chunk.size))
    with pytest.raises(h5chunk.FileError, match=r"traces/0007/data.*damaged"):
        list(h5chunk.ChunkLoader(_open(path), 4))


def _break(path: Path, how: str) -> None:
    with h5py.File(path, "a") as file:
        group = file["traces/0011"]
        if how == "no dataset":
            del group["data"]
        elif how == "no attribute":
            del group.attrs["magnitude"]
        elif how == "two numbers":
            group.attrs["magnitude"] = [1.0, 2.0]
        elif how == "no attribute value":
            group.attrs["magnitude"] = h5py.Empty("f4")
        elif how == "named type":
            del file["traces/0011"]
            file["traces/0011"] = np.dtype("f4")
        else:
            del group["data"]
            if how == "link":
                group["data"] = h5py.SoftLink("/traces/0000/data")
            elif how == "type":
                group["data"] = _values(1).astype(np.float64)
            elif how == "shape":
                group["data"] = np.zeros((7, 4), np.float32)
            elif how == "strings":
                group["data"] = ["a"]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("no dataset", "0011 has no dataset 'data'"),
        ("no attribute", "0011 has no attribute 'magnitude' .it has station"),
        ("two numbers", r"0011: attribute 'magnitude' has the shape \[2\], but \[\] in .*0000"),
        ("link", "soft link"),
        ("type", "has float64 .* in 'data'"),
        ("shape", r"\[7, 4\] in \'data\', but the first sample has float32 \[7, 3\]"),
        ("strings", "variable length"),
        ("no attribute value", "is empty, but must be numbers"),
        ("named type", "has no dataset 'data'"),
    ],
)
def test_samples_that_differ_are_errors_that_name_them(tmp_path: Path, how: str, message: str) -> None:
    path = _make(tmp_path / "traces.h5")
    _break(path, how)
    with pytest.raises((h5chunk.FieldError, h5chunk.TrustError), match=message):
        _open(path)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("traces/data", "path is one file"),
        ("tra*/data", "in place of a whole name"),
        ([], "empty"),
        (["a/*", "b/*"], "only after"),
    ],
)
def test_invalid_patterns(tmp_path: Path, pattern: Any, message: str) -> None:
    with pytest.raises(h5chunk.OptionError, match=message):
        h5chunk.Keyed(_make(tmp_path / "x.h5"), pattern)


LENGTHS = np.random.default_rng(1).integers(0, 9, COUNT)
LENGTHS[0] = 5


def _make_ragged(path: Path, storage: str = "contiguous") -> Path:
    with h5py.File(path, "w") as file:
        for number, length in enumerate(LENGTHS.tolist()):
            group = file.create_group(f"traces/{number:04}")
            kind = ("contiguous", "chunked", "whole", "compact")[number % 4] if storage == "all" else storage
            values = _values(number, length)
            kind = "contiguous" if kind == "compact" and not length else kind
            if kind == "whole" and length:
                group.create_dataset("data", data=values, chunks=values.shape, compression="gzip")
            else:
                _write(group, "data", values, "contiguous" if kind in ("chunked", "whole") and length < 4 else kind)
            group["pick"] = np.int64(number)
    return path


def _ragged(path: Path, **options: Any) -> h5chunk.Keyed:
    return h5chunk.Keyed(path, ["traces/*/data", "traces/*/pick"], **options)


@pytest.mark.parametrize("storage", ["contiguous", "all", "big-endian"])
@pytest.mark.parametrize("settings", [{}, {"resident": True}, {"resident": False}, {"reader": "h5py"}, {"reuse": True}])
@pytest.mark.filterwarnings("ignore:field .* is read through h5py")
def test_samples_of_several_lengths_are_padded_or_packed(tmp_path: Path, storage: str, settings: Any) -> None:
    dataset = _ragged(_make_ragged(tmp_path / "traces.h5", storage))
    for transforms in ([], [Pad(-1)], [Pack()]):
        seen = []
        for (values, where), picks in loader_by(dataset, 4, transforms=transforms, **settings):
            _check_batch(values, where, picks.tolist(), -1 if transforms else 0)
            seen += picks.tolist()
        assert sorted(seen) == list(range(COUNT))


def _check_batch(values: torch.Tensor, where: torch.Tensor, numbers: list[int], padding: float) -> None:
    expected = [_values(number, LENGTHS[number]) for number in numbers]
    lengths = LENGTHS[numbers]
    if len(where) > len(numbers):
        assert where.tolist() == [0, *np.cumsum(lengths)]
        np.testing.assert_array_equal(values, np.concatenate(expected))
        return
    assert where.tolist() == lengths.tolist() and values.shape == (len(numbers), lengths.max(), 3)
    for row, own in zip(values.numpy(), expected, strict=True):
        np.testing.assert_array_equal(row[: len(own)], own)
        assert (row[len(own) :] == padding).all()


@pytest.mark.parametrize("transform", [None, Pad(-1), Pack()])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_data_loader_pads_or_packs(tmp_path: Path, transform: Any, num_workers: int) -> None:
    dataset = _ragged(_make_ragged(tmp_path / "traces.h5"), transforms=transform)
    sampler = h5chunk.ChunkSampler(dataset, 4)
    for (values, where), picks in DataLoader(dataset, batch_sampler=sampler, num_workers=num_workers):
        _check_batch(values, where, picks.tolist(), 0 if transform is None else -1)
    (values, length), pick = dataset[3]
    np.testing.assert_array_equal(values, _values(3, LENGTHS[3]))
    assert length == LENGTHS[3] and pick == 3


def test_functions_after_padding_get_the_padded_values(tmp_path: Path) -> None:
    dataset = _ragged(_make_ragged(tmp_path / "traces.h5"))
    loader = h5chunk.ChunkLoader(dataset, 4, transforms=[Pad(), lambda values: values.abs() + 1], shuffle=False)
    (values, lengths), _ = next(iter(loader))
    assert (values >= 1).all() and lengths.tolist() == LENGTHS[:4].tolist()


@pytest.mark.parametrize(
    ("transforms", "message"),
    [
        ([Normalize((0.5,), (0.5,))], "differ in length"),
        ([Pad(), Pack()], "Pack.* does not fit"),
        ([Pad("x")], "pass a number"),
        ({"pick": [Pad()]}, "one shape"),
    ],
)
def test_transforms_that_do_not_fit_several_lengths(tmp_path: Path, transforms: Any, message: str) -> None:
    dataset = _ragged(_make_ragged(tmp_path / "traces.h5"))
    with pytest.raises(h5chunk.OptionError, match=message):
        h5chunk.ChunkLoader(dataset, 4, transforms=transforms)


@pytest.mark.parametrize("options", [{"compression": "gzip"}, {}])
def test_chunks_that_differ_between_samples(tmp_path: Path, options: Mapping[str, Any]) -> None:
    shapes, chunks = ((6,), (4,), (7,), (4,), (6, 6), (6, 6)), ((6,), (4,), (3,), (2,), (3, 2), (3, 4))
    values = [np.arange(np.prod(shape)).reshape(shape) + number for number, shape in enumerate(shapes)]
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for number, (own, chunk) in enumerate(zip(values, chunks, strict=True)):
            file.create_dataset(f"{own.ndim}/{number}/data", data=own, chunks=chunk, **options)
    for axes in (1, 2):
        dataset = h5chunk.Keyed(tmp_path / "a.h5", f"{axes}/*/data")
        expected = [own for own in values if own.ndim == axes]
        found = [dataset[number][0] if axes == 2 else dataset[number][0].values for number in range(len(expected))]
        assert all(map(np.array_equal, found, expected))


def test_fields_of_strings_or_without_values_are_errors(tmp_path: Path) -> None:
    path = _make(tmp_path / "traces.h5")
    with pytest.raises(h5chunk.FieldError, match="'station' has strings"):
        h5chunk.ChunkLoader(h5chunk.Keyed(path, "traces/*/data", attributes=["station"]), 4)
    with h5py.File(tmp_path / "empty.h5", "w") as file:
        for number in range(3):
            file[f"{number}/data"] = np.empty((number, 0))
    with pytest.raises(h5chunk.FieldError, match="has no values in any sample"):
        h5chunk.Keyed(tmp_path / "empty.h5", "*/data")


def test_several_fields_differ_in_length(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for number in range(30):
            file[f"{number:02}/boxes"] = rng.normal(size=(rng.integers(0, 5), 4))
            file[f"{number:02}/wave"] = rng.integers(0, 9, rng.integers(1, 60), np.int16)
    dataset = h5chunk.Keyed(tmp_path / "a.h5", ["*/boxes", "*/wave", "sample_number"])
    transforms = {"boxes": [Pack()], "wave": [Pad(-1)]}
    with h5py.File(tmp_path / "a.h5") as file, h5chunk.ChunkLoader(dataset, 8, transforms=transforms) as loader:
        assert dataset.sample_lengths.tolist() == [len(each["boxes"]) for each in file.values()]
        for (boxes, offsets), (waves, lengths), numbers in loader:
            for place, number in enumerate(numbers.tolist()):
                expected = file[f"{number:02}"]
                np.testing.assert_array_equal(boxes[offsets[place] : offsets[place + 1]], expected["boxes"])
                np.testing.assert_array_equal(waves[place, : lengths[place]], expected["wave"])
                assert (waves[place, lengths[place] :] == -1).all()


def test_attributes_of_datasets(tmp_path: Path) -> None:
    """An attribute is that of the group or, if the group lacks it, of a dataset."""
    path, packed = tmp_path / "a.h5", tmp_path / "packed.h5"
    with h5py.File(path, "w") as file:
        for number in range(5):
            dataset = file.create_dataset(f"traces/{number}/data", data=np.full(3, number))
            dataset.attrs["magnitude"], dataset.attrs["both"] = number / 2, -1
            file[f"traces/{number}"].attrs["both"] = number
    names = ["magnitude", "both"]
    dataset = h5chunk.Keyed(path, "traces/*/data", attributes=names)
    assert [dataset.values(name).tolist() for name in names] == [[0, 0.5, 1, 1.5, 2], [0, 1, 2, 3, 4]]
    h5chunk.convert(path, packed, samples=["traces/*/data"], attributes=names)
    with h5py.File(packed) as file:
        rows = file["data"][:, 0].tolist()
        assert sorted(zip(rows, file["magnitude"][:], file["both"][:], strict=True)) == [
            (number, number / 2, number) for number in range(5)
        ]


def test_a_default_stands_for_an_attribute_that_a_sample_lacks(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for number in range(3):
            file[f"{number}/data"] = np.arange(4.0)
        file["1"].attrs["magnitude"], file["1"].attrs["station"] = 2.5, "x"
    for default in (-1, 7, float("nan"), 7):
        dataset = h5chunk.Keyed(tmp_path / "a.h5", "*/data", attributes={"magnitude": default, "station": "none"})
        assert np.array_equal(dataset.values("magnitude"), [default, 2.5, default], equal_nan=True)
        assert list(dataset.values("station")) == ["none", "x", "none"]
    for attributes in (["magnitude"], {"magnitude": None}):
        with pytest.raises(h5chunk.FieldError, match="gets a default, as in attributes="):
            h5chunk.Keyed(tmp_path / "a.h5", "*/data", attributes=attributes)
    with pytest.raises(h5chunk.OptionError, match="pass a number"):
        h5chunk.Keyed(tmp_path / "a.h5", "*/data", attributes={"magnitude": [1]})


@pytest.mark.parametrize("lengths", [([5, 5], [7, 7]), ([5, 6], [7]), ([7], [5, 6]), ([4], [4, 4])])
def test_files_whose_samples_differ_in_length_from_those_of_others(tmp_path: Path, lengths: Any) -> None:
    """It does not matter whether the samples that differ in length are in the same file."""
    paths = [tmp_path / "a.h5", tmp_path / "b.h5"]
    expected = []
    for path, own in zip(paths, lengths, strict=True):
        with h5py.File(path, "w") as file:
            for number, length in enumerate(own):
                expected.append(_values(len(expected), length))
                file[f"traces/{number}/data"] = expected[-1]
    dataset = h5chunk.Keyed(paths, "traces/*/data")
    padded = max(map(len, expected)) > min(map(len, expected))
    loader = h5chunk.ChunkLoader(dataset, 2, shuffle=False)
    rows = [row for batch in loader for row in zip(*(batch[0] if padded else batch), strict=True)]
    assert len(rows) == len(expected)
    for (values, *length), wanted in zip(rows, expected, strict=True):
        assert len(length) == padded and (not padded or int(length[0]) == len(wanted))
        assert np.array_equal(values.numpy()[: len(wanted)], wanted) and not values[len(wanted) :].any()


@pytest.mark.parametrize("default", [2**70, "\udc80", [1]])
def test_invalid_defaults_of_attributes(tmp_path: Path, default: Any) -> None:
    path = _make(tmp_path / "traces.h5", count=2)
    with pytest.raises(h5chunk.OptionError, match="attributes has the default"):
        h5chunk.Keyed(path, "traces/*/data", attributes={"weight": default})


def _make_bags(folder: Path, *, count: int = 12, compressed: bool = True) -> list[Path]:
    """Write files of which each is a sample: an image, a mask, and features of several lengths."""
    files = []
    for number in range(count):
        files.append(folder / f"volume_{number // 4}" / f"slice_{number}.h5")
        files[-1].parent.mkdir(exist_ok=True, parents=True)
        with h5py.File(files[-1], "w") as file:
            options: dict[str, Any] = {"compression": "gzip"} if compressed and number % 2 else {}
            file.create_dataset("image", data=np.full((4, 4, 2), number / 2), **options)
            file["label/mask"] = np.full((4, 4), number, np.uint8)
            file["features"] = _values(number, 1 + number % 3)
            file.attrs["grade"] = number % 5
    return files


@pytest.mark.parametrize("settings", [{}, {"resident": True}, {"resident": False}])
def test_each_file_is_a_sample(tmp_path: Path, settings: Any) -> None:
    files = _make_bags(tmp_path / "bags")
    fields = ["image", "label/mask", "features"]
    dataset = h5chunk.Keyed(tmp_path / "bags/*/*.h5", fields, attributes=["grade"])
    assert len(dataset) == 12 and dataset.fields == ("image", "label_mask", "features", "grade")
    assert dataset.source_names.tolist() == [f"volume_{n // 4}/slice_{n}" for n in range(12)]
    assert dataset.files == tuple(map(str, files)) and dataset.values("grade").tolist() == [n % 5 for n in range(12)]
    seen = []
    for image, mask, (features, lengths), grade in loader_by(dataset, 5, **settings):
        for row, number in enumerate(mask[:, 0, 0].tolist()):
            assert (image[row] == number / 2).all() and (mask[row] == number).all() and grade[row] == number % 5
            np.testing.assert_array_equal(features[row, : lengths[row]], _values(number, 1 + number % 3))
            seen.append(number)
    assert sorted(seen) == list(range(12))
    again = DataLoader(dataset, batch_sampler=h5chunk.ChunkSampler(dataset, 5), num_workers=1)
    assert sorted(int(number) for batch in again for number in batch[1][:, 0, 0]) == list(range(12))


def test_the_index_of_a_folder_is_stored_once_and_only_files_that_changed_are_listed_again(tmp_path: Path) -> None:
    files, told = _make_bags(tmp_path / "bags"), list[int]()

    def listed(paths: Any) -> tuple[h5chunk.Keyed, int]:
        told.clear()
        dataset = h5chunk.Keyed(paths, ["image"], progress=lambda _stage, done, _total: told.append(done))
        return dataset, max(told, default=0)

    assert listed(files[:8])[1] == 8 and listed(files[4:])[1] == 4
    part, count = listed(files[5:1:-1])
    assert count == 0 and [int(part[number][0][0, 0, 0] * 2) for number in range(4)] == [5, 4, 3, 2]
    with h5py.File(files[3], "a") as file:
        file["image"][...] = 50
    with pytest.raises(h5chunk.FileError, match=r"slice_3\.h5: the file was replaced or changed"):
        part[2]
    with pytest.warns(UserWarning, match=r"slice_3\.h5: the index is rebuilt"):
        whole, count = listed(files)
    assert (
        count == 1
        and whole.source_names[3] == "volume_0/slice_3"
        and (whole[3][0] == 50).all()
        and (whole[11][0] == 5.5).all()
    )
    assert len([*(tmp_path / "bags").glob(".h5chunk-index-*")]) == 1
    with h5py.File(tmp_path / "bags/other.h5", "w") as file:
        file["image"] = np.zeros((5, 5, 2))
    assert listed([tmp_path / "bags/other.h5"])[1] == 1
    with pytest.raises(h5chunk.FieldError, match=r"but the first sample has float64 \[4, 4, 2\]"):
        listed([*files, tmp_path / "bags/other.h5"])


def test_keys_of_several_parts(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name, count in (("cat", 3), ("dog", 2)):
            for number in range(count):
                file[f"images/{name}/{number}/pixels"] = np.full((2, 2), ord(name[0]) + number)
            file[f"images/{name}"].attrs["legs"] = len(name) + count
        file["images/names"] = np.arange(3)  # not a group, so it has no samples
        file.attrs["rate"] = 2.5
    dataset = h5chunk.Keyed(tmp_path / "a.h5", "images/*/*/pixels", attributes=["legs", "rate"])
    assert dataset.source_names.tolist() == ["cat/0", "cat/1", "cat/2", "dog/0", "dog/1"]
    assert [dataset[number][0][0, 0].item() for number in (1, 4)] == [ord("c") + 1, ord("d") + 1]
    assert dataset.values("legs").tolist() == [6, 6, 6, 5, 5] and dataset.values("rate").tolist() == [2.5] * 5


def test_attributes_that_are_empty_or_numbers_as_strings_or_several_numbers(tmp_path: Path) -> None:
    arrivals, ratios = [700, "", b"701.5", np.array([[3.0]]), "None"], [[1.0, 2.0], [3, 4], None, [5.5, 6.0], ""]
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for number, (arrival, ratio) in enumerate(zip(arrivals, ratios, strict=True)):
            item = file.create_dataset(f"data/{number}", data=np.zeros(2))
            item.attrs["arrival"] = arrival
            if ratio is not None:
                item.attrs["snr"] = ratio
    dataset = h5chunk.Keyed(tmp_path / "a.h5", "data/*", attributes={"arrival": -1.0, "snr": -1})
    assert dataset.values("arrival").tolist() == [700, -1, 701.5, 3, -1]
    batch = next(iter(h5chunk.ChunkLoader(dataset, 5, shuffle=False)))
    assert batch[2].tolist() == [[1, 2], [3, 4], [-1, -1], [5.5, 6], [-1, -1]]
    with pytest.raises(h5chunk.FieldError, match="pass a number for the samples with an empty string"):
        h5chunk.Keyed(tmp_path / "a.h5", "data/*", attributes=["arrival"])
    with h5py.File(tmp_path / "a.h5", "a") as file:
        file["data/1"].attrs["arrival"] = "soon"
    with pytest.raises(h5chunk.FieldError, match=r"data/1: attribute 'arrival' is 'soon', but its default -1\.0"):
        h5chunk.Keyed(tmp_path / "a.h5", "data/*", attributes={"arrival": -1.0})


def test_samples_are_numbered_and_split_by_an_attribute(tmp_path: Path) -> None:
    for number in range(2):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            for sample in range(12):
                file[f"t/{number}-{sample:02}/x"] = np.full(3, sample)
                file[f"t/{number}-{sample:02}"].attrs["class"] = ("cat", "elephant")[(sample + number) % 3 == 0]
    fields = ["t/*/x", "sample_number"]
    with h5chunk.Keyed([tmp_path / "0.h5", tmp_path / "1.h5"], fields, attributes=["class"]) as dataset:
        assert dataset.fields == ("x", "sample_number", "class") and dataset[13][1:] == (13, "cat")
        for part in dataset.split((0.5, 0.5), stratify="class"):
            x, numbers, classes = part[:]
            assert numbers.tolist() == [*range(12)] and sorted(classes) == ["cat"] * 8 + ["elephant"] * 4
            assert [int(name[2:]) for name in part.source_names] == x[:, 0].tolist()
        with pytest.raises(h5chunk.FieldError, match="pass one of x, class"):
            dataset.values("y")
    with pytest.raises(h5chunk.OptionError, match="no checksums: leave checksums out"):
        h5chunk.Keyed(tmp_path / "0.h5", "t/*/x", checksums="first")


def test_parts_of_keys_are_labels(tmp_path: Path) -> None:
    for split in ("train", "val"):
        with h5py.File(tmp_path / f"{split}.h5", "w") as file:
            for name in ("dog", "ant", "cat")[: 3 if split == "train" else 2]:
                for number in range(2):
                    file[f"{name}/{number}/pixels"] = np.full((2, 2), ord(name[0]))
    labels = {"label": 0, "number": -1}
    dataset = h5chunk.Keyed([tmp_path / "train.h5", tmp_path / "val.h5"], "*/*/pixels", labels=labels)
    assert dataset.categories("label").tolist() == ["ant", "cat", "dog"] and dataset.classes == ()
    for pixels, label, number in h5chunk.ChunkLoader(dataset, 3):
        assert label.dtype == torch.int64 and set(number.tolist()) <= {0, 1}
        assert pixels[:, 0, 0].tolist() == [ord("acd"[each]) for each in label.tolist()]
    parts = dataset.split([0.5, 0.5], stratify="label")
    assert [sorted(part.values("label")) for part in parts] == [[0, 0, 1, 2, 2]] * 2
    files = _make_bags(tmp_path / "bags")
    bags = h5chunk.Keyed(files, ["image"], labels={"volume": 0})
    assert bags.classes == ("volume_0", "volume_1", "volume_2") and bags.values("volume").tolist() == [
        number // 4 for number in range(12)
    ]
    with pytest.raises(h5chunk.OptionError, match="labels has 2 for 'label', but the key 'ant/0' has only parts"):
        h5chunk.Keyed(tmp_path / "val.h5", "*/*/pixels", labels={"label": 2})
    with pytest.raises(h5chunk.OptionError, match="labels has 'pixels', which is also the name of a field"):
        h5chunk.Keyed(tmp_path / "val.h5", "*/*/pixels", labels={"pixels": 0})


def test_a_folder_of_images_is_named_by_info_and_by_a_warning(tmp_path: Path) -> None:
    for number in range(4):
        with h5py.File(tmp_path / f"slice{number}.h5", "w") as file:
            file["image"], file["mask"] = np.full((24, 24, 4), number), np.zeros((24, 24, 3), np.uint8)
    info = h5chunk.info(tmp_path)
    space: dict[str, Any] = {}
    exec("\n".join(info.code), space)
    assert info.layout == "an image in each file" and len(space["data"]) == 4
    assert next(iter(space["loader"]))[0].shape == (4, 24, 24, 4)
    with pytest.warns(UserWarning, match=r"seems to be an image.*h5chunk\.Keyed\(path, \['image', 'mask'\]\)"):
        assert len(h5chunk.ChunkDataset(tmp_path, fields=["image", "mask"])) == 96
    for number in range(4):
        with h5py.File(tmp_path / f"slice{number}.h5", "w") as file:
            file["features"] = np.zeros((10 + number, 8))
    assert "each file is one sample instead: data = h5chunk.Keyed(" in str(h5chunk.info(tmp_path))
