"""The file as format.py's docstring specifies it, read with plain h5py."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import h5py
import numpy as np
import pytest
from support.odd_files import index_of
from support.specification import ATTRIBUTES, check_fixed_types_only, spec

from h5chunk.errors import FileError
from h5chunk.store.format.header import read_header
from h5chunk.store.format.spec import GROUP, create_file
from h5chunk.store.hdf5.chunk_table import list_chunks
from h5chunk.store.hdf5.open import open_file


@pytest.mark.parametrize("height", [5, 2000])
def test_regions_are_where_hdf5_reads(tmp_path: Path, height: int) -> None:
    path = tmp_path / "x.h5"
    regions = create_file(path, spec(height=height))
    num_bytes = {"images": 12 * 3 * height * 7, "score": 12 * 8, "word": 12 * 5, "h5chunk/source_index": 80}
    assert {name: region.num_bytes for name, region in regions.items()} == num_bytes | {"h5chunk/class_names": 6}
    data = {name: os.urandom(region.num_bytes) for name, region in regions.items()}
    with path.open("r+b") as file:
        for name, region in regions.items():
            file.seek(region.offset)
            file.write(data[name])
    assert regions["images"].offset % 4096 == 0 or height == 5
    with h5py.File(path) as file:
        assert file["images"].chunks == (4, 3, height, 7) and file["score"].chunks == (4,)
        assert file["images"][()].tobytes() == data["images"][: 10 * 3 * height * 7]
        assert file["score"][()].tobytes() == data["score"][:80]
        assert file["h5chunk/source_index"][()].tobytes() == data["h5chunk/source_index"]
        assert file["word"].dtype == h5py.string_dtype("utf-8", 5)
        assert file["images"].attrs["axes"] == b"NCHW"
        for name in ("images", "score", "word"):
            places: list[tuple[int, int]] = []
            file[name].id.chunk_iter(lambda chunk, places=places: places.append((chunk.byte_offset, chunk.size)))
            size = regions[name].num_bytes // 3
            assert places == [(regions[name].offset + i * size, size) for i in range(3)]
    check_fixed_types_only(path)


def test_the_check_of_types_finds_what_it_should(tmp_path: Path) -> None:
    for number, spoil in enumerate((lambda f: f.attrs.update(x="text"), lambda f: f.update(a=h5py.SoftLink("/b")))):
        path = tmp_path / f"{number}.h5"
        with h5py.File(path, "w") as file:
            spoil(file)
        with pytest.raises(AssertionError):
            check_fixed_types_only(path)


@pytest.mark.parametrize("num_samples", [4, 5, 8, 9])
def test_index_holds_one_address(tmp_path: Path, num_samples: int) -> None:
    """Implicit, or, of one chunk, that of a single chunk: never a table that could say other places."""
    regions = create_file(tmp_path / "x.h5", spec(num_samples, height=2000))
    with h5py.File(tmp_path / "x.h5") as file:
        for name in ("images", "score", "word"):
            single, implicit = 1, 2
            assert index_of(file[name]) == (single if num_samples == 4 else implicit)
            assert list_chunks(file[name]).is_one_run
    assert regions["images"].offset % 4096 == 0


def test_index_is_implicit_and_takes_no_room(tmp_path: Path) -> None:
    """The file does not grow with the number of chunks, beyond its data."""
    overheads = []
    for num_samples in (400, 40_000):
        regions = create_file(tmp_path / "x.h5", spec(num_samples, height=1))
        overheads.append((tmp_path / "x.h5").stat().st_size - sum(region.num_bytes for region in regions.values()))
    assert abs(overheads[1] - overheads[0]) < 5 * 4096  # alignment


def test_bytes_do_not_depend_on_the_time_or_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create_file(tmp_path / "one", spec())
    first = (tmp_path / "one").read_bytes()
    os.utime(tmp_path / "one", (1, 1))
    create_file(tmp_path / "another-name", spec())
    assert (tmp_path / "another-name").read_bytes() == first


@pytest.mark.parametrize(("num_samples", "height"), [(10, 5), (1000, 200)])
def test_num_bytes_is_near_that_of_the_file(tmp_path: Path, num_samples: int, height: int) -> None:
    create_file(tmp_path / "x.h5", spec(num_samples, height))
    real = (tmp_path / "x.h5").stat().st_size
    assert real <= spec(num_samples, height).num_bytes <= real + 20_000


def test_header_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    create_file(path, spec())
    with h5py.File(path, "r+") as file:
        table = file["h5chunk/class_names"]
        table[...] = np.array([b"cat", "é".encode()], table.dtype)
    with open_file(path) as file:
        header = read_header(file)
    assert header is not None
    assert (header.format_version, header.num_samples, header.chunk_samples, header.window_chunks) == (1, 10, 4, 2)
    assert (header.cache.nslots, header.cache.nbytes, header.cache.w0) == (3, 2000, 0.75)
    assert header.shuffled is True and header.seed == (1 << 64) - 1
    assert header.options == {"é": 1} and header.class_names == ("cat", "é")


def test_files_of_others_have_no_header(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        assert read_header(file) is None
        file.create_group(GROUP)
        assert read_header(file) is None
    with h5py.File(tmp_path / "y.h5", "w") as file:
        file[GROUP] = 5
        assert read_header(file) is None


def test_newer_format_is_refused(tmp_path: Path) -> None:
    create_file(tmp_path / "x.h5", spec(format_version=np.int64(3)))
    with (
        open_file(tmp_path / "x.h5") as file,
        pytest.raises(
            FileError, match=r"x\.h5: the file has format version 3, but this h5chunk reads only versions up to 2"
        ),
    ):
        read_header(file)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, None) for name in ATTRIBUTES if name not in ("format_version", "h5chunk_version")),
        ("format_version", "one"),
        ("num_samples", np.array([1, 2])),
        ("num_samples", 0),
        ("chunk_samples", 0),
        ("window_chunks", -1),
        ("window_chunks", np.inf),
        ("rdcc_nbytes", "much"),
        ("seed", np.nan),
    ],
)
def test_damaged_header_is_an_error_of_ours(tmp_path: Path, name: str, value: object) -> None:
    create_file(tmp_path / "x.h5", spec())
    with h5py.File(tmp_path / "x.h5", "r+") as file:
        del file[GROUP].attrs[name]
        if value is not None:
            file[GROUP].attrs[name] = value
    with (
        open_file(tmp_path / "x.h5") as file,
        pytest.raises(FileError, match=r"x\.h5: its group /h5chunk is damaged"),
    ):
        read_header(file)


@pytest.mark.parametrize("value", [["a", "b"], 5, None])
def test_class_names_of_another_type_are_not_read(tmp_path: Path, value: object) -> None:
    create_file(tmp_path / "x.h5", spec())
    with h5py.File(tmp_path / "x.h5", "r+") as file:
        del file["h5chunk/class_names"]
        if value is None:
            file.create_group("h5chunk/class_names")
        else:
            file["h5chunk/class_names"] = value
    with open_file(tmp_path / "x.h5") as file, pytest.raises(FileError, match=r"x\.h5: its group /h5chunk is damaged"):
        read_header(file)


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    create_file(tmp_path / "x.h5", spec())
    whole = (tmp_path / "x.h5").read_bytes()
    cases = {"cut.h5": whole[:-100], "text.h5": b"hello" * 1000, "empty.h5": b""}
    for name, data in cases.items():
        (tmp_path / name).write_bytes(data)
    os.mkfifo(tmp_path / "pipe.h5")
    for name, reason in (
        ("cut.h5", r"the file is cut short \(its header claims a larger size\)"),
        ("text.h5", "not an HDF5 file"),
        ("empty.h5", "not an HDF5 file"),
        ("none.h5", "no such file"),
        ("pipe.h5", "not a regular file"),
        (".", "not a regular file"),
    ):
        with pytest.raises(FileError, match=reason) as caught:
            open_file(tmp_path / name)
        assert str(caught.value).startswith(str(tmp_path / name))


def test_a_file_that_is_being_written_to(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["x"] = 1
    descriptor = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # as HDF5 does in a process that writes
        with pytest.raises(FileError, match="is locked by another process that is writing to it: wait for that"):
            open_file(path)
    finally:
        os.close(descriptor)


def test_a_file_that_a_program_writes_in_swmr_mode_is_refused_as_that(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w", libver="latest") as file:
        file.create_dataset("images", (30, 4), "u1", maxshape=(None, 4))
        file.swmr_mode = True
        file.flush()
        (tmp_path / "copy.h5").write_bytes(path.read_bytes())
    with pytest.raises(FileError, match="a program is writing to the file, or did not close it"):
        open_file(tmp_path / "copy.h5")
