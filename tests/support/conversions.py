"""Expected samples of a converted image folder, and the check of the file."""

from __future__ import annotations

import sys
import zlib
from pathlib import Path

import h5py
import numpy as np
import pytest
from support.pictures import pixels
from support.specification import check_fixed_types_only


def check_file(path: Path, samples: dict[str, np.ndarray], labels: dict[str, int] | None, layout: str = "nchw") -> None:
    """Every sample once, with its own pixels, name and label; checksums of the bytes as they are stored.

    ``samples``: pixels (H, W, C) by name.
    """
    with h5py.File(path) as file:
        group = file["h5chunk"]
        ends = group["source_name_ends"][()]
        blob = group["source_names"][()].tobytes()
        starts = np.concatenate([[0], ends[:-1]])
        names = [blob[start:end].decode() for start, end in zip(starts, ends, strict=True)]
        assert sorted(names) == sorted(samples)
        assert len(blob) == ends[-1]
        axes = (2, 0, 1) if layout == "nchw" else (0, 1, 2)
        np.testing.assert_array_equal(file["images"][()], np.stack([samples[n].transpose(axes) for n in names]))
        assert file["images"].dtype == np.uint8 and file["images"].attrs["axes"] == layout.upper().encode()
        if labels is None:
            assert "labels" not in file and "class_names" not in group
        else:
            assert file["labels"].dtype == np.int64
            assert file["labels"][()].tolist() == [labels[name] for name in names]
        num_samples, chunk_samples = int(group.attrs["num_samples"]), int(group.attrs["chunk_samples"])
        assert num_samples == len(samples) == len(np.unique(group["source_index"][()]))
        fields = [name for name in file if name != "h5chunk"]
        assert sorted(group["checksums"]) == sorted(fields)
        data = path.read_bytes()
        for name in fields:
            dataset = file[name]
            assert len(dataset) == num_samples and dataset.chunks[0] == chunk_samples
            places: list[tuple[int, int]] = []
            dataset.id.chunk_iter(lambda chunk, places=places: places.append((chunk.byte_offset, chunk.size)))
            size = places[0][1]
            assert [offset for offset, _ in places] == [places[0][0] + i * size for i in range(len(places))]
            checksums = [zlib.crc32(data[offset : offset + size]) for offset, size in places]
            assert group[f"checksums/{name}"][()].tolist() == checksums
            whole = data[places[0][0] : places[-1][0] + size]
            assert whole == dataset[()].tobytes() + bytes(len(whole) - dataset.nbytes), "padding is not zeros"
    check_fixed_types_only(path)


def expectation(count: int = 20, classes: int = 3) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    names = {i: f"class{i % classes}/{i:04d}.png" for i in range(count)}
    return {name: pixels(i) for i, name in names.items()}, {name: i % classes for i, name in names.items()}


def source_index(path: Path) -> list[int]:
    with h5py.File(path) as file:
        return file["h5chunk/source_index"][()].tolist()


def skipping(root: Path, bad: list[int], classes: int = 3) -> None:
    for i in bad:
        (root / f"class{i % classes}" / f"{i:04d}.png").write_bytes(b"broken")


linux = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
