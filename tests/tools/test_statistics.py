"""Statistics of fields: computed in one pass by info, stored beside the file, and used by Normalize."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from support.commands import check_error, run
from support.foreign import make_file, values
from support.object_server import object_server

import h5chunk
from h5chunk.transforms import Normalize

RNG = np.random.default_rng(0)


def write(path: Path, data: np.ndarray, **options: Any) -> Path:
    return make_file(path, images=(data, options))


def expected(data: np.ndarray, axis: int | None) -> tuple[np.ndarray, np.ndarray]:
    channels = data.reshape(1, -1) if axis is None else np.moveaxis(data, axis + 1, 0).reshape(data.shape[axis + 1], -1)
    channels = channels.astype(np.float64) / (255 if data.dtype == np.uint8 else 1)
    channels = np.where(np.isfinite(channels), channels, np.nan)
    return np.nanmean(channels, 1), np.nanstd(channels, 1)


DATA = {
    "uint8 pixels": (values((40, 3, 9, 7), "u1"), 0),
    "uint8 pixels, channels last": (values((40, 9, 7, 3), "u1"), 2),
    "fields of weather far from zero": ((RNG.normal(size=(30, 20, 6, 5)) + 50_000).astype(np.float32), 0),
    "float64 vectors": (RNG.normal(size=(50, 11)), 0),
    "one value": (RNG.normal(size=300), None),
    "int16 signals": (RNG.integers(-3000, 3000, (20, 3, 50)).astype(np.int16), None),
    "missing values": (np.where(RNG.random((30, 4, 5, 5)) < 0.3, np.nan, RNG.normal(size=(30, 4, 5, 5))), 0),
}


@pytest.mark.parametrize("kind", DATA)
def test_statistics_are_those_of_numpy(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("h5chunk.tools.measure.statistics.BATCH_BYTES", 2000)  # several batches, and merges
    monkeypatch.setattr("h5chunk.tools.measure.statistics.MAX_MERGED", 3)
    data, axis = DATA[kind]
    path = write(tmp_path / "a.h5", data, chunks=(4, *data.shape[1:]), compression="gzip")
    report = h5chunk.info(path, stats=True)
    found = h5chunk.ChunkDataset(path).statistics("images")
    assert report.statistics == {"images": found}
    mean, std = expected(data, axis)
    np.testing.assert_allclose(found.mean, mean, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(found.std, std, rtol=1e-9)
    assert found.num_missing == np.sum(~np.isfinite(data)) and sum(found.count) + found.num_missing == data.size
    if np.isfinite(data).all() and data.dtype.kind == "f" and data.ndim > 1:
        ((batch,),) = h5chunk.ChunkLoader(path, len(data), transforms=[Normalize(found.mean, found.std)])
        assert abs(float(batch.double().mean())) < 0.01 and float(batch.double().std()) == pytest.approx(1, abs=0.01)


def test_several_files_and_subsets_share_the_statistics_of_all_samples(tmp_path: Path) -> None:
    parts = [RNG.normal(size=(size, 3, 4, 4)) + size for size in (10, 30)]
    for number, part in enumerate(parts):
        write(tmp_path / f"{number}.h5", part)
    assert "Normalize(mean=(" in run("info", tmp_path, "--stats").stdout
    found = h5chunk.ChunkDataset(tmp_path).subset([1, 2]).statistics("images")
    mean, std = expected(np.concatenate(parts), 0)
    np.testing.assert_allclose(found.mean, mean)
    np.testing.assert_allclose(found.std, std)


def test_statistics_of_an_earlier_version_of_a_file_are_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5", values((20, 3, 4, 4), "u1"))
    with pytest.raises(h5chunk.FieldError, match=r"h5chunk info --stats .*a\.h5"):
        h5chunk.ChunkDataset(path).statistics("images")
    report = json.loads(run("info", path, "--stats", "--json").stdout)
    assert len(report["statistics"]["images"]["mean"]) == 3
    with pytest.raises(h5chunk.FieldError, match="no statistics of 'labels'"):
        h5chunk.ChunkDataset(path).statistics("labels")
    os.utime(path, ns=(1, 1))
    with pytest.raises(h5chunk.FieldError, match="earlier version"):
        h5chunk.ChunkDataset(path).statistics("images")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 1}', '{"fields": {"images": {"count": [1]}}}'])
def test_damaged_statistics_are_an_error_with_a_remedy(tmp_path: Path, text: str) -> None:
    path = write(tmp_path / "a.h5", values((20, 3, 4, 4), "u1"))
    (tmp_path / "a.h5.h5chunk-stats.json").write_text(text)
    with pytest.raises(h5chunk.FileError, match="damaged"):
        h5chunk.ChunkDataset(path).statistics("images")
    h5chunk.info(path, stats=True)
    assert torch.tensor(h5chunk.ChunkDataset(path).statistics("images").std).shape == (3,)


def test_a_file_without_dense_fields_has_no_statistics(tmp_path: Path) -> None:
    path = make_file(tmp_path / "a.h5", labels=(np.arange(20), {}))
    with pytest.raises(h5chunk.FieldError, match="no dense field"):
        h5chunk.info(path, stats=True)


def test_a_report_recommends_no_normalisation_that_is_an_error(tmp_path: Path) -> None:
    fields = {"a": np.full((9, 2), np.nan), "b": np.full((9, 2), 7.0), "c": np.arange(18.0).reshape(9, 2)}
    report = str(
        h5chunk.info(make_file(tmp_path / "a.h5", **{name: (own, {}) for name, own in fields.items()}), stats=True)
    )
    assert "a  all values are NaN or infinite" in report
    assert "b  mean=(7, 7), std=(0, 0): Normalize needs each std to be positive" in report
    assert "c  Normalize(mean=(8, 9)" in report


@pytest.mark.parametrize("kind", ["column", "dense member", "volumes", "episodes", "shards"])
def test_the_command_that_an_error_names_computes_the_statistics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = RNG.normal(size=(12, 9, 8)), RNG.normal(size=(12, 10, 8))
    table = np.zeros(30, [("pt", "f4"), ("n", "i4")])
    table["pt"] = RNG.normal(size=30)
    steps = [RNG.normal(size=(20 + number, 7)) for number in range(3)]
    with h5py.File("a.h5", "w") as file:
        file["events"], file["obsm/X_pca"] = table, RNG.normal(size=(30, 5))
        file["a/raw"], file["b/raw"], file["a/label"], file["b/label"] = first, second, first > 0, second > 0
        for number, part in enumerate(steps):
            file[f"traj_{number}/obs/state"] = part
        member = file["obsm/X_pca"][:]
    (tmp_path / "parts").mkdir()
    for number in range(2):
        write(tmp_path / "parts" / f"part{number}.h5", steps[number])
    both = np.concatenate([first.ravel(), second.ravel()])
    opened: dict[str, tuple[Callable[[], h5chunk.ChunkDataset], str, np.ndarray]] = {
        "column": (lambda: h5chunk.ChunkDataset("a.h5", fields=["events/pt"]), "events/pt", table["pt"]),
        "dense member": (lambda: h5chunk.ChunkDataset("a.h5", fields=["obsm/X_pca"]), "obsm/X_pca", member),
        "volumes": (lambda: h5chunk.Patches("a.h5", ["*/raw", "*/label"], (8, 8, 8)), "raw", both),
        "episodes": (lambda: h5chunk.Windows("a.h5", {"x": "traj_*/obs/state"}, 4), "x", np.concatenate(steps)),
        "shards": (lambda: h5chunk.ChunkDataset("parts"), "images", np.concatenate(steps[:2])),
    }
    open_data, field, content = opened[kind]
    data = open_data()
    with pytest.raises(h5chunk.FieldError, match="no stored statistics: run ") as error:
        data.statistics(field)
    command = shlex.split(str(error.value).partition(": run ")[2])
    assert run(*command[1:]).exit_code == 0
    found = data.statistics(field)
    np.testing.assert_allclose(found.mean, content.reshape(len(content), -1).mean(0), rtol=1e-6)
    run("info", "a.h5", "--stats", "--fields", "b/raw")  # keeps those of other fields
    assert data.statistics(field) == found


def test_samples_that_are_datasets_have_statistics_of_some_of_them(tmp_path: Path) -> None:
    parts = [RNG.normal(size=(4 + number % 3, 5)) for number in range(30)]
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for number, part in enumerate(parts):
            file[f"s/{number:02}"] = part
    data = h5chunk.Keyed(tmp_path / "a.h5", "s/*")
    with pytest.raises(h5chunk.FieldError, match="stores no statistics") as error:
        data.statistics("s")
    scope: dict[str, Any] = {"np": np, "data": data}
    exec(str(error.value).partition("such as ")[2].partition(", and Normalize")[0], scope)
    assert scope["values"].mean() == pytest.approx(np.concatenate(parts).mean())


def test_statistics_of_a_url_are_printed(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    content = RNG.normal(size=(20, 3, 4, 4))
    path = write(tmp_path / "a.h5", content)
    with object_server({"/a.h5": path.read_bytes()}) as server:
        with pytest.raises(h5chunk.FieldError, match="Normalize") as error:
            h5chunk.ChunkDataset(f"{server.url}/a.h5").statistics("images")
        command = shlex.split(re.search("h5chunk (info .*) prints", str(error.value))[1])
        assert "Normalize(mean=(" in run(*command).stdout
        found = h5chunk.info(f"{server.url}/a.h5", stats=True).statistics["images"]
    np.testing.assert_allclose(found.mean, expected(content, 0)[0])


def test_fields_of_statistics_are_numbers(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["names"], file["x"] = ["a", "b"], np.zeros((2, 3))
    check_error(run("info", tmp_path / "a.h5", "--stats", "--fields", "names"), "'names' has strings")
    check_error(run("info", tmp_path / "a.h5", "--fields", "x"), "pass stats")
