"""HDF5 files with a dataset, or a group of datasets, for each sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from support.commands import run

import h5chunk
from h5chunk.errors import SourceError

RNG = np.random.default_rng(0)
COUNT = 37
TRACES = RNG.normal(size=(COUNT, 3, 50)).astype("f4")
STORAGE: dict[str, dict[str, Any]] = {
    "contiguous": {},
    "chunked": {"chunks": (2, 20)},
    "compressed": {"chunks": (3, 50), "compression": "gzip"},
    "big-endian": {"dtype": ">f4"},
}


def make(path: Path, *, userblock: int = 0, **options: Any) -> Path:
    with h5py.File(path, "w", userblock_size=userblock) as file:
        for number, trace in enumerate(TRACES):
            group = file.create_group(f"traces/event{number:03}")
            group.create_dataset("data", data=trace, **options)
            group.create_dataset("pick", data=np.int32(number))
            group.attrs.update({"magnitude": number / 4, "station": f"S{number % 3}", "fixed": np.bytes_(b"ab")})
    return path


def values_of(path: Path, *fields: str) -> list[np.ndarray]:
    ((*batch,),) = h5chunk.ChunkLoader(h5chunk.ChunkDataset(path, fields=fields), COUNT, shuffle=False)
    return [values.numpy() if hasattr(values, "numpy") else np.array(values) for values in batch]


@pytest.mark.parametrize("storage", STORAGE)
def test_samples_and_attributes_become_fields(tmp_path: Path, storage: str) -> None:
    source, output = make(tmp_path / "a.h5", **STORAGE[storage]), tmp_path / "b.h5"
    patterns = "traces/*/data,traces/*/pick"
    done = run("convert", source, output, "--samples", patterns, "--attributes", "magnitude,station", "--no-shuffle")
    assert done.exit_code == 0, done.output
    assert not list(tmp_path.glob("*index*"))
    data, pick, magnitude = values_of(output, "data", "pick", "magnitude")
    np.testing.assert_array_equal(data, TRACES)
    np.testing.assert_array_equal(pick, np.arange(COUNT))
    np.testing.assert_array_equal(magnitude, np.arange(COUNT) / 4)
    dataset = h5chunk.ChunkDataset(output, fields=["data"])
    assert dataset.values("station").tolist() == [f"S{number % 3}" for number in range(COUNT)]
    assert dataset.source_names[-1] == "event036" and h5chunk.verify(output).ok


def test_datasets_without_groups_workers_and_a_user_block(tmp_path: Path) -> None:
    source = tmp_path / "a.h5"
    with h5py.File(source, "w", userblock_size=512) as file:
        for number, trace in enumerate(TRACES):
            file[f"{number:03}"] = trace
    report = h5chunk.convert(source, tmp_path / "b.h5", samples=("*",), workers=2)
    assert report.num_samples == COUNT
    (found,) = values_of(tmp_path / "b.h5", "data")
    np.testing.assert_array_equal(np.sort(found, axis=0), np.sort(TRACES, axis=0))


def lacking(file: h5py.File) -> None:
    del file["traces/event005/data"]


def longer(file: h5py.File) -> None:
    del file["traces/event005/data"]
    file["traces/event005/data"] = np.zeros((3, 51), "f4")


def of_more_rows(file: h5py.File) -> None:
    del file["traces/event005/data"]
    file["traces/event005/data"] = np.zeros((4, 50), "f4")


def linked(file: h5py.File) -> None:
    del file["traces/event005/data"]
    file["traces/event005/data"] = h5py.ExternalLink("/etc/passwd", "data")


def of_variable_length(file: h5py.File) -> None:
    del file["traces/event000/data"]
    file["traces/event000/data"] = ["text"]


def without_magnitude(file: h5py.File) -> None:
    del file["traces/event005"].attrs["magnitude"]


def mixed(file: h5py.File) -> None:
    file["traces/event005"].attrs["magnitude"] = "large"


def several(file: h5py.File) -> None:
    file["traces/event005"].attrs["magnitude"] = [1.0, 2.0]


WRONG = {
    lacking: "event005 has no dataset 'data'",
    longer: r"event005 has float32 \[3, 51\] in 'data', but the first sample has float32 \[3, 50\]",
    of_more_rows: r"event005/data: 'data' has length 4, but 3 in the first sample: .*h5chunk\.Keyed reads samples that",
    linked: "external link",
    of_variable_length: "variable length",
    without_magnitude: "event005 has no attribute 'magnitude'",
    mixed: "number in some samples",
    several: "must be one number",
}


@pytest.mark.parametrize("damage", WRONG, ids=lambda damage: damage.__name__)
def test_samples_that_differ_are_an_error_that_names_them(tmp_path: Path, damage: Any) -> None:
    source = make(tmp_path / "a.h5")
    with h5py.File(source, "r+") as file:
        damage(file)
    with pytest.raises(h5chunk.SourceError, match=WRONG[damage]):
        h5chunk.convert(source, tmp_path / "b.h5", samples=("traces/*/data",), attributes=("magnitude",))
    assert not (tmp_path / "b.h5").exists()


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (("traces/data",), r"use a \* in place of the names of samples"),
        (("traces/*/*",), "samples may differ only in"),
        (("tr*/data",), r"use a \* in place of a whole name"),
        (("traces/*/data", "others/*/pick"), "differ only after the"),
        (("traces/*/data", "traces/*/data"), "differ only after the"),
        (("nothing/*/data",), "has no group 'nothing'"),
        (("traces/*/nothing",), "has no dataset 'nothing'"),
    ],
)
def test_patterns_that_fit_nothing_are_an_error(tmp_path: Path, samples: tuple[str, ...], message: str) -> None:
    with pytest.raises(h5chunk.H5ChunkError, match=message):
        h5chunk.convert(make(tmp_path / "a.h5"), tmp_path / "b.h5", samples=samples)


def test_without_a_pattern_the_error_says_how_to_give_one(tmp_path: Path) -> None:
    done = run("convert", make(tmp_path / "a.h5"), tmp_path / "b.h5")
    assert done.exit_code == 1 and "--samples 'traces/*/data'" in done.output and "h5chunk repack" in done.output
    with pytest.raises(h5chunk.OptionError, match="attributes requires samples"):
        h5chunk.convert(tmp_path / "a.h5", tmp_path / "b.h5", attributes=("magnitude",))


def test_a_loom_file_is_told_how_to_be_converted(tmp_path):
    with h5py.File(tmp_path / "a.loom", "w") as file:
        file["matrix"] = np.eye(3, 5)
        file["row_attrs/Gene"], file["col_attrs/CellID"] = np.arange(3), np.arange(5)
    with pytest.raises(
        h5chunk.SourceError, match="is a loom file, in which genes are rows and cells are columns: save its cells"
    ):
        h5chunk.convert(tmp_path / "a.loom", tmp_path / "x.h5")


def test_columns_of_a_table_are_converted_in_python(tmp_path: Path) -> None:
    """As the error about the file says."""
    table = np.zeros(30, [("pt", "f4"), ("label", "i8")])
    table["pt"] = np.arange(30)
    with h5py.File(tmp_path / "events.h5", "w") as file:
        file["events"] = table
    with pytest.raises(SourceError, match=r"h5chunk\.convert\(\{'pt': file\['TABLE'\]\['pt'\]\}, OUTPUT\)"):
        h5chunk.convert(tmp_path / "events.h5", tmp_path / "o.h5")
    with h5py.File(tmp_path / "events.h5") as file:
        h5chunk.convert({"pt": file["events"]["pt"]}, tmp_path / "o.h5", shuffle=False)
    assert h5chunk.ChunkDataset(tmp_path / "o.h5").values("pt").tolist() == list(range(30))
