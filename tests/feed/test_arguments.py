"""Arguments that cannot be: errors of ours that name the argument, never a traceback from below."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from support.foreign import make_file, values
from torch.utils.data import DataLoader, Subset

from h5chunk.errors import FieldError, OptionError
from h5chunk.feed.dataset import ChunkDataset
from h5chunk.feed.keyed import Keyed
from h5chunk.feed.loader import ChunkLoader
from h5chunk.feed.sampler import ChunkSampler

N = 20
RAGGED = [[1], [1, 2]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return make_file(
        tmp_path / "a.h5",
        images=(values((N, 4), np.uint8), {}),
        labels=(np.arange(N), {}),
        waves=(np.zeros((N, 3), np.complex64), {}),
    )


@pytest.mark.parametrize(
    "fields", [5, [5], b"images", {"a": 5}, {5: "images"}, [None], [["images"]], Ellipsis], ids=str
)
def test_fields(path: Path, fields: Any) -> None:
    with pytest.raises(OptionError, match=r"fields (is|contains) .*: pass names of datasets"):
        ChunkDataset(path, fields=fields)


@pytest.mark.parametrize("pattern", ["", "/", None, [""], {"a": ""}, 5], ids=str)
def test_patterns_of_samples(path: Path, pattern: Any) -> None:
    with pytest.raises(OptionError, match=r"pattern is .*: pass the path of the samples' datasets, as in"):
        Keyed(path, pattern)


def test_names_that_do_not_exist(path: Path) -> None:
    with pytest.raises(OptionError, match=r"missing is 'x': pass 'drop' or 'error'"):
        ChunkDataset(path, missing="x")
    with pytest.raises(OptionError, match=r"path is \{\}: name the file of each field"):
        ChunkDataset({})
    with pytest.raises(FieldError, match=r"no field 'zz' in this data set; it has images, labels"):
        ChunkDataset(path, fields=["images", "labels"]).field("zz")


def test_fields_that_come_twice(path: Path) -> None:
    with pytest.raises(OptionError, match=r"fields has 'images' twice: name each field, as in .*\{'name': 'images'\}"):
        ChunkDataset(path, fields=["images", "labels", "images"])
    assert ChunkDataset(path, fields={"a": "images", "b": "images"}).fields == ("a", "b")


def test_numbers_that_are_complex(path: Path) -> None:
    with h5py.File(path) as file:
        assert np.array_equal(ChunkDataset(path, fields=["waves"])[:][0], file["waves"][()])


@pytest.mark.parametrize("weights", [RAGGED, ["a"] * N, np.ones(N) * 1j, [None] * N, b"labels", {}, Ellipsis], ids=str)
def test_weights(path: Path, weights: Any) -> None:
    match = r"weights (have the dtype .*: pass numbers, or the name of a field|cannot be converted to an array)"
    with pytest.raises(OptionError, match=match):
        ChunkSampler(ChunkDataset(path), 4, weights=weights)


@pytest.mark.parametrize(("name", "value"), [("transforms", 5), ("batch_sampler", 5), ("timeout", None)])
def test_of_a_loader(path: Path, name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=name):
        ChunkLoader(path, 4, **{name: value})


@pytest.mark.parametrize(("name", "value"), [("transforms", 5), ("trusted", 5), ("trusted", [5]), ("checksums", 5)])
def test_of_a_data_set(path: Path, name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=name):
        ChunkDataset(path, **{name: value})


@pytest.mark.parametrize("wrong", [5, None, [5], Ellipsis], ids=str)
def test_paths(wrong: Any) -> None:
    with pytest.raises(OptionError, match=r"path is .*: pass a path, a pattern, or a list"):
        ChunkDataset(wrong)


@pytest.mark.parametrize("fractions", ["x", RAGGED, 0.5, [0.5j]], ids=str)
def test_fractions(path: Path, fractions: Any) -> None:
    with pytest.raises(OptionError, match="fractions"):
        ChunkDataset(path).split(fractions)


def test_indices(path: Path) -> None:
    with pytest.raises(OptionError, match="subset"):
        ChunkDataset(path).subset(RAGGED)
    with pytest.raises(IndexError, match="lists of different lengths"):
        ChunkDataset(path)[RAGGED]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize(("num_workers", "start"), [(0, None), (1, "fork"), (1, "forkserver")])
def test_a_loader_in_a_dataloader(path: Path, num_workers: int, start: str | None) -> None:
    match = "cannot be sent to another process" if start == "forkserver" else "cannot be indexed: iterate it directly"
    loader = DataLoader(ChunkLoader(path, 4), batch_size=None, num_workers=num_workers, multiprocessing_context=start)
    with pytest.raises(OptionError, match=match):
        next(iter(loader))


class Doubled(ChunkDataset):
    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index)[0] * 2


def test_what_a_loader_would_leave_out(path: Path) -> None:
    with pytest.raises(OptionError, match="Doubled overrides __getitem__, which a ChunkLoader does not call"):
        ChunkLoader(Doubled(path), 4)
    with pytest.raises(OptionError, match="data is a Subset: pass a ChunkDataset, whose subset"):
        ChunkLoader(Subset(ChunkDataset(path), [1, 2]), 4)  # type: ignore[arg-type]


def test_a_loader_is_neither_copied_nor_sent(path: Path) -> None:
    for take in (pickle.dumps, copy.copy):
        with pytest.raises(OptionError, match="cannot be sent to another process: create it in that process"):
            take(ChunkLoader(path, 4))
