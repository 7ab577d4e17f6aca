"""One contract for all kinds of sources: each on the list keeps it, and nothing else has to be registered."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from PIL import Image
from support.check_source import check_kind, check_source
from support.matrix_files import write_10x, write_h5ad

from h5chunk.sources.kinds import KIND_OPTIONS
from h5chunk.sources.open import all_kinds

sp = pytest.importorskip("scipy.sparse")
KINDS = all_kinds()
MATRIX = sp.random(30, 8, 0.4, "csr", random_state=0, data_rvs=lambda n: np.arange(n) % 5 + 1)


NEEDED = {"keyed": {"samples": ("*/data",)}}  # options without which a source cannot be opened


def test_options_that_help_lists_are_those_of_the_readers() -> None:
    assert {kind.kind: kind.Options for kind in KINDS} == KIND_OPTIONS


def example(kind: str, folder: Path) -> Any:
    """Data of a kind."""
    if kind == "images":
        for number in range(4):
            (folder / "photos" / "class").mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (6, 8), (number, 0, 0)).save(folder / "photos" / "class" / f"{number}.png")
        return folder / "photos"
    if kind == "mapping":
        return [{"x": np.ones(3) * number, "name": "a" * number} for number in range(5)]
    if kind == "joined":
        return [write_h5ad(folder / f"{name}.h5ad", MATRIX) for name in "ab"]
    if kind == "keyed":
        with h5py.File(folder / "k.h5", "w") as file:
            for number in range(5):
                file[f"{number}/data"] = np.full((2, 3), number)
        return folder / "k.h5"
    if kind == "ratings":
        pa, coo = pytest.importorskip("pyarrow"), MATRIX.tocoo()
        table = pa.table({"user_id": coo.row, "item_id": [f"i{column}" for column in coo.col], "rating": coo.data})
        pytest.importorskip("pyarrow.parquet").write_table(table, folder / "r.parquet")
        return folder / "r.parquet"
    if kind == "table":
        pa = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(
            pa.table({"v": [[1.0, 2.0], [3.0, 4.0]], "n": [1, 2]}), folder / "t.parquet"
        )
        return folder / "t.parquet"
    suffix = {"arrays": "npy", "libsvm": "svm"}.get(kind, kind)
    path = folder / f"x.{suffix}"
    if kind in ("arrays", "npy"):
        np.save(path, MATRIX.toarray())
    elif kind == "npz":
        sp.save_npz(path, MATRIX)
    elif kind == "h5ad":
        write_h5ad(path, MATRIX)
    elif kind == "10x":
        write_10x(path, MATRIX)
    else:
        path.write_bytes(text_of(kind))
    return path


def text_of(kind: str) -> bytes:
    coo = MATRIX.tocoo()
    entries = list(zip(coo.row.tolist(), coo.col.tolist(), coo.data.tolist(), strict=True))
    if kind == "csv":
        return b"user,item,rating\n" + b"".join(b"%d,%d,%d\n" % entry for entry in entries)
    if kind == "mtx":
        file = io.BytesIO()
        pytest.importorskip("scipy.io").mmwrite(file, coo)
        return file.getvalue()
    rows = [[f"{column + 1}:{value}" for row, column, value in entries if row == number] for number in range(30)]
    return "".join(" ".join(["1", *row]) + "\n" for row in rows).encode()


@pytest.mark.parametrize("kind", KINDS, ids=[kind.kind for kind in KINDS])
def test_what_a_kind_says_of_itself(kind: Any) -> None:
    check_kind(kind)


@pytest.mark.parametrize("kind", KINDS, ids=[kind.kind for kind in KINDS])
def test_an_example_of_each_kind(kind: Any, tmp_path: Path) -> None:
    check_source(kind, example(kind.kind, tmp_path), tmp_path, **NEEDED.get(kind.kind, {}))


def test_kinds_have_different_names() -> None:
    assert len({kind.kind for kind in KINDS}) == len(KINDS)
