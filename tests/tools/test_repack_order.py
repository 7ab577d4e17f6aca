"""A shuffle moves what belongs to samples, and refuses whatever it cannot prove independent of their order."""

from __future__ import annotations

import json
import pickle
import shlex
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import h5py
import numpy as np
import pytest
import scipy.sparse
from support.commands import run

import h5chunk
from h5chunk.errors import FieldError, OptionError
from h5chunk.plan.permutation import permutation

N = 200
LENGTHS = np.random.default_rng(0).integers(0, 9, N)
ROWS = np.random.default_rng(1).permutation(N)
Make = Callable[[h5py.File], object]


def put(name: str, values: object, **options: object) -> Make:
    return lambda file: file.create_dataset(name, data=values, **options)


def attribute(name: str, values: object) -> Make:
    return lambda file: file.attrs.__setitem__(name, values)


def add_runs(file: h5py.File) -> None:
    file["boxes"], file["num_boxes"] = np.random.default_rng(0).random((int(LENGTHS.sum()), 4)), LENGTHS


def add_few_runs(file: h5py.File) -> None:
    counts = np.zeros(N, int)
    counts[::3] = 1
    file["boxes"], file["num_boxes"] = np.random.default_rng(0).random((int(counts.sum()), 4)), counts


def add_table(file: h5py.File) -> None:
    table = np.zeros(3, [("name", "S5"), ("start", "i4"), ("stop", "i4")])
    table["start"], table["stop"] = (0, 120, 160), (120, 160, 200)
    file["parts"] = table


def add_lists(file: h5py.File) -> None:
    lists = file.create_dataset("groups", (2,), h5py.vlen_dtype("i4"))
    lists[0], lists[1] = ROWS[:10], ROWS[10:]


def add_group_per_sample(file: h5py.File) -> None:
    for number in (3, 17, 150):
        file[f"boxes/{number}"] = np.random.default_rng(0).random((2, 4))


def add_region(file: h5py.File) -> None:
    file["regions"] = np.array([file["images"].regionref[3:5]] * N, h5py.regionref_dtype)


def add_scale(file: h5py.File) -> None:
    file["bands"], file["time"] = np.random.default_rng(0).random((3, N)), np.arange(float(N))
    file["time"].make_scale("time")
    file["images"].dims[0].attach_scale(file["time"])
    file["bands"].dims[1].attach_scale(file["time"])


def add_sparse(kind: str, name: str = "m") -> Make:
    def make(file: h5py.File) -> None:
        matrix = scipy.sparse.random(N if kind == "csr" else 30, N, 0.1, kind, rng=np.random.default_rng(0))
        group = file.create_group(name)
        group.attrs["encoding-type"], group.attrs["shape"] = f"{kind}_matrix", matrix.shape
        for part in ("data", "indices", "indptr"):
            group[part] = getattr(matrix, part)

    return make


def add_index(file: h5py.File) -> None:
    """PyTables indexes a column of the table ``t`` in the group ``_i_t``, in whatever shapes."""
    file["t"] = np.zeros(N, [("x", "f8")])
    file["_i_t/x/sorted"], file["_i_t/x/indicesLR"] = np.random.default_rng(0).random((1, 10)), np.zeros(N, "u8")


DEPENDENT: list[tuple[str, Make]] = [
    ("y", put("y", np.arange(float(N))[None])),
    ("y", put("y", np.random.default_rng(0).random((3, N)))),
    ("labels", put("labels", np.zeros((20, 10), "u1"))),
    ("points", put("points", np.zeros((3 * N, 2)))),
    ("names", put("names", np.array([b"x"] * 2 * N))),
    ("offsets", put("offsets", np.r_[0, np.cumsum(LENGTHS)])),
    ("boxes", add_runs),
    ("boxes", add_few_runs),
    ("train_idx", put("train_idx", np.arange(80))),
    ("trainIdx", put("trainIdx", np.arange(1.0, 81)[None])),
    ("chosen", put("chosen", ROWS[:12].astype("u1"))),
    ("val", put("val", np.array([7, 150]))),
    ("splits/a", put("splits/a", [7, 150])),
    ("pairs", put("pairs", ROWS[:100].reshape(50, 2))),
    ("padded", put("padded", np.r_[ROWS[:9], -1, -1])),
    ("amounts", put("amounts", [120, 40, 40])),
    ("bounds", put("bounds", [0, 120, 200])),
    ("bits", put("bits", np.full(25, 255, "u1"))),
    ("per_ten", put("per_ten", np.random.default_rng(0).random((20, 5)))),
    ("per_ten", put("per_ten", [b"cat", b"dog"] * 10)),
    ("parts", add_table),
    ("groups", add_lists),
    ("spans", put("spans", np.array([(0, 50), (50, N)], [("a", "i4"), ("b", "i4")]))),
    ("nearest", put("nearest", np.r_[ROWS[:20], -999])),
    ("folds", put("folds", [json.dumps(ROWS[:30].tolist()), json.dumps(ROWS[30:].tolist())])),
    ("text", put("text", " ".join(map(str, ROWS[:30])))),
    ("lines", put("lines", "\n".join(f"{i}.png" for i in range(N)))),
    ("boxes", add_group_per_sample),
    ("regions", add_region),
    ("bands", add_scale),
    ("m", add_sparse("csr")),
    ("m", add_sparse("csc")),
    ("_i_t/x/sorted", add_index),
    ("distances", put("distances", np.random.default_rng(0).random((N, N)))),
    ("neighbors", put("neighbors", ROWS[:, None].repeat(3, 1))),
    ("class_names", put("class_names", np.array([f"class {i}".encode() for i in range(N)]))),
    ("json", put("json", json.dumps({"split": {"train": ROWS[:30].tolist()}}))),
    ("info", put("info", json.dumps([{"label": "cat"}] * N))),
    ("info", put("info", json.dumps({f"{i}.png": "cat" for i in range(N)}))),
    ("pickle", put("pickle", np.void(pickle.dumps(ROWS)))),
    ("hard_negatives", put("hard_negatives", ROWS[:, None].repeat(3, 1))),
    ("duplicate_of", put("duplicate_of", np.where(ROWS % 3, ROWS, -1))),
    ("class_first", put("class_first", [0, 120])),
    ("@pickle", attribute("pickle", np.void(pickle.dumps(ROWS)))),
    ("@weights", attribute("weights", np.random.default_rng(0).random(N))),
    ("@train", attribute("train", [5, 6])),
    ("@rows", attribute("rows", ROWS[:30])),
    ("@split", attribute("split", json.dumps({"test": ROWS[:30].tolist()}))),
]


def make_file(path: Path, make: Make) -> Path:
    with h5py.File(path, "w") as file:
        file["images"] = np.arange(N, dtype=np.uint8)[:, None, None] + np.zeros((1, 30, 40), np.uint8)
        make(file)
    return path


@pytest.mark.parametrize(("name", "make"), DEPENDENT, ids=[f"{i}-{name}" for i, (name, _) in enumerate(DEPENDENT)])
def test_what_may_depend_on_the_order_is_refused_by_name_and_can_be_kept(tmp_path: Path, name: str, make: Make) -> None:
    source, out = make_file(tmp_path / "a.h5", make), tmp_path / "b.h5"
    with pytest.raises(OptionError) as error:
        h5chunk.repack(source, out, shuffle=True)
    assert f"{name!r} " in str(error.value) and f"--keep {name}" in str(error.value) and not out.exists()
    kept = shlex.split(str(error.value).partition("unchanged (")[2].partition(";")[0].replace(",", " "))
    kept = [value for option, value in pairwise(kept) if option == "--keep"]
    result = run("repack", source, out, "--shuffle", *(part for value in kept for part in ("--keep", value)))
    assert result.exit_code == 0, result.output
    with h5py.File(out) as file, h5py.File(source) as old:
        np.testing.assert_array_equal(file["images"][:, 0, 0], permutation(N, 0))
        if name in old and isinstance(old[name], h5py.Dataset) and not old[name].dtype.hasobject:
            np.testing.assert_array_equal(file[name], old[name])


@pytest.mark.parametrize("name", ["distances", "neighbors", "class_names"])
def test_a_named_field_moves(tmp_path: Path, name: str) -> None:
    source = make_file(tmp_path / "a.h5", next(make for known, make in DEPENDENT if known == name))
    h5chunk.repack(source, tmp_path / "b.h5", shuffle=True, fields=[name])
    with h5py.File(source) as old, h5py.File(tmp_path / "b.h5") as new:
        np.testing.assert_array_equal(new[name], old[name][()][permutation(N, 0)])


def test_runs_of_rows_are_refused_whatever_is_named(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["tokens"], file["length"], file["label"] = np.repeat(np.arange(N), LENGTHS), LENGTHS, np.arange(N) % 7
    for fields, name in (((), "length"), (("label",), "tokens"), (("tokens",), "length")):
        with pytest.raises(OptionError, match=f"'{name}' .*--keep {name}"):
            h5chunk.repack(tmp_path / "a.h5", tmp_path / "b.h5", shuffle=True, fields=fields)


def test_what_does_not_depend_on_the_order_is_no_obstacle(tmp_path: Path) -> None:
    path, rng = tmp_path / "a.h5", np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        file["x"], file["y"], file["id"] = rng.random((N, 3, 30, 40)), rng.integers(0, 10, N), np.arange(N)
        file["text"], file["class_idx"] = [f"{i}" for i in range(N)], rng.integers(0, 10, (N, 5))
        file["top/flags"], file["tokens"] = rng.integers(0, 2, N).astype(bool), rng.integers(0, 150, (N, 64))
        file["class_names"], file["notes"] = ["cat", "dog", "owl"], json.dumps({"size": [30, 40], "mean": [0.5, 0.2]})
        file["mean"], file["mean_image"], file["size"] = rng.random(3), rng.random((3, 30, 40)), [30, 40]
        file["camera"] = np.eye(4)
        file["fps"], file["palette"], file["none"] = 25, rng.integers(0, 256, (64, 3), np.uint8), h5py.Empty("f4")
        file["opaque"] = np.void(b"few bytes")
        file["column"] = np.arange(40.0)
        file["column"].make_scale("column")
        file["x"].dims[3].attach_scale(file["column"])
        file.attrs["author"], file.attrs["version"], file.attrs["size"] = "me", 3, [30, 40]
        file["x"].attrs["valid_range"], file["x"].attrs["scale"] = [0, 100], 0.5
    report = h5chunk.repack(path, tmp_path / "b.h5", shuffle=True)
    moved = {"x", "y", "id", "text", "class_idx", "top/flags", "tokens"}
    assert {field.name for field in report.fields if field.shuffled} == moved
    order = permutation(N, 0)
    with h5py.File(path) as old, h5py.File(tmp_path / "b.h5") as new:
        for name in moved:
            np.testing.assert_array_equal(new[name][()], old[name][()][order])


def test_kept_names_must_exist(tmp_path: Path) -> None:
    source = make_file(tmp_path / "a.h5", attribute("x", 1))
    for name in ("nope", "@nope", "images@nope", "nope@x"):
        with pytest.raises(FieldError, match=f"has no dataset, group or attribute .*'{name}'"):
            h5chunk.repack(source, tmp_path / "b.h5", keep=[name])
