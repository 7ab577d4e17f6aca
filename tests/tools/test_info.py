"""Info: one screen that says what can be trained on, how, and why the rest cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from support.commands import run
from support.foreign import make_file
from support.info_code import run_code

import h5chunk


def samples_of(path: Path) -> int:
    """The samples of an epoch of the lines that info prints, run as they are."""
    return sum(len(fields[0]) for fields in run_code(path)["loader"])


def write_fields(path: Path, **fields: Any) -> Path:
    return make_file(path, **{name: (data, {}) for name, data in fields.items()})


def test_what_convert_made_is_ready_and_not_scolded(tmp_path: Path, class_folder) -> None:
    h5chunk.convert(class_folder(count=40), tmp_path / "a.h5", workers=0, chunk_samples=16)
    text = run("info", tmp_path / "a.h5").stdout
    assert samples_of(tmp_path / "a.h5") == 40 and "  classes 3: class0, class1, class2\n" in text
    assert " x " in text and "plain h5py" not in text and "repack" not in text


def test_many_alike_share_a_line(tmp_path: Path) -> None:
    """And everything fits on a screen, unless all is asked for."""
    path = tmp_path / "demos.h5"
    with h5py.File(path, "w") as file:
        for demo in range(120):
            length = 50 + demo % 7
            file[f"data/demo_{demo}/obs/pos"] = np.zeros((length, 3 + (demo == 60)))
            file[f"data/demo_{demo}/actions"] = np.zeros((length, 2), np.float32)
            file[f"meta/{demo}"] = 1.0
        file.create_dataset("names", data=["a"], dtype=h5py.string_dtype())
    text = run("info", path).stdout
    assert len(text.splitlines()) < 24 and len(run("info", path, "--all").stdout.splitlines()) > 700
    assert "data/demo_0/obs/pos to data/demo_99/obs/pos (119 datasets)  float64, 50 to 56 samples each of 3," in text
    assert "data/demo_60/obs/pos  float64, 54 samples of 4," in text
    assert "not for training (a single value, which has no axis of samples): 120: meta/0, " in text
    assert "usable if named (has strings of variable length" in text
    assert "data/demo_60/obs/pos" in str(h5chunk.info(path, show_all=True)).partition("classes")[0]
    assert 'fields=["data/demo_60/obs/pos", "data/demo_60/actions"]' in text and samples_of(path) == 54


def test_what_is_left_out_is_counted(tmp_path: Path) -> None:
    path = write_fields(tmp_path / "a.h5", **{f"{chr(97 + n)}{chr(98 + n)}": np.arange(n + 1) for n in range(20)})
    assert "  8 more datasets (--all)" in run("info", path).stdout
    assert "more" not in run("info", path, "--all").stdout


def test_nothing_to_train_on(tmp_path: Path) -> None:
    path = write_fields(tmp_path / "a.h5", one=1.0, none=np.zeros((0, 3)))
    text = run("info", path).stdout
    assert "import h5chunk" not in text and text.count("not for training (") == 2


def test_a_type_that_numpy_does_not_have(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["images"] = np.ones((4, 2), "u1")
        h5py.h5d.create(file.id, b"time", h5py.h5t.UNIX_D32LE.copy(), h5py.h5s.create_simple((4,)))
    report = h5chunk.info(tmp_path / "a.h5")
    assert [each.name for each in report.datasets] == ["images"]
    assert "not read: 'time' has a type that NumPy does not have" in str(report)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["image/p0", "image/p1", "mask/p0", "mask/p1"], '{"image": "image/*", "mask": "mask/*"}, (40, 40, 40)'),
        (["v0/label", "v0/raw", "v1/label", "v1/raw"], '{"raw": "*/raw", "label": "*/label"}, (40, 40, 40)'),
        (["image/p0", "image/p1", "mask/p0"], ""),  # a volume without a mask
        (["image/p0"], ""),
    ],
)
def test_volumes_are_recognised_and_their_line_opens_them(tmp_path, names, expected):
    path = tmp_path / "ct.h5"
    with h5py.File(path, "w") as file:
        for name in names:
            file[name] = np.zeros((40, 48, 50), "u1")
    code = h5chunk.info(path).code
    assert (f"{expected})" in code[1]) if expected else "ChunkDataset" in code[1]
    space: dict[str, object] = {}
    exec("\n".join(code), space)
    assert len(space["data"]) > 0


def test_many_grey_images_are_no_volumes(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name in ("train/images", "test/images"):
            file.create_dataset(name, (500, 32, 32), "u1")
    assert "Patches" not in str(h5chunk.info(tmp_path / "a.h5").code)
