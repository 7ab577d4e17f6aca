"""What info says about files whose frames are stored as JPEG or PNG, and the statistics of their pixels."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
from support.encoded import by_pillow, flat, frames, put, robot

import h5chunk


@pytest.mark.parametrize("form", ["vlen", "padded", "text"])
@pytest.mark.parametrize("make", [robot, flat])
def test_info_prints_the_line_that_opens_images_and_computes_statistics_of_pixels(
    make: type, form: str, tmp_path: Path
) -> None:
    episodes = frames("PNG")
    report = h5chunk.info(make(tmp_path / "a.h5", episodes, form), stats=True)
    assert "JPEG or PNG images, which h5chunk.Windows decodes" in str(report)
    space: dict[str, h5chunk.Windows] = {}
    exec("\n".join(report.code[:2]).replace("length=10", "length=4"), {}, space)
    windows = space["data"]
    assert windows.fields[0] == "image"
    assert windows[0][0].shape == (4, 24, 20, 3)
    found = windows.statistics("image")
    pixels = np.stack([by_pillow(image) for images in episodes for image in images]).reshape(-1, 3) / 255
    np.testing.assert_allclose(found.mean, pixels.mean(0), rtol=1e-6)
    np.testing.assert_allclose(found.std, pixels.std(0), rtol=1e-6)


def test_bytes_that_are_no_images_are_not_called_images(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.zeros((9, 64), np.uint8)
        put(file, "vlen", [np.arange(5, dtype=np.uint8)] * 3, "vlen")
        file["names"] = np.array([b"a", b"b"])
        file.create_dataset("unwritten", (9,), h5py.vlen_dtype(np.uint8))
    report = str(h5chunk.info(tmp_path / "a.h5"))
    assert "JPEG or PNG images" not in report
    assert "arrays of variable length, a field that must be named" in report
