"""Hugging Face datasets: a memory-mapped Arrow file, from which ``dataset[indices]`` reads a batch."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import torch

from peers import Source
from peers.reading import WAYS, Allocate, Indexed

BLOCK = 100


def features(layout: str, source: Source) -> datasets.Features:
    pixels = {
        "array": datasets.Array3D(source.sample_shape, "uint8"),
        "list": datasets.List(datasets.Value("uint8"), length=source.sample_bytes),
        "binary": datasets.Value("binary"),
    }[layout]
    return datasets.Features({"image": pixels, "label": datasets.Value("int64")})


class Rows:
    def __init__(self, path: Path, source: Source, layout: str, form: str) -> None:
        self.source, self.layout, self.form = source, layout, form
        dataset = datasets.load_from_disk(str(path))
        dtype = {"torch": {"dtype": torch.uint8}, "numpy": {"dtype": np.uint8}}.get(
            form, {}
        )  # without it, they return int64
        self.images = dataset.select_columns("image").with_format(form, **dtype)
        self.labels = dataset.data.column("label").to_numpy()

    def read(self, indices: np.ndarray, allocate: Allocate) -> tuple[Any, Any]:
        images, labels = self.images[indices]["image"], self.labels[indices]
        if self.form != "arrow":
            return images.reshape(-1, *self.source.sample_shape), labels
        out = allocate(len(indices))
        flat, start = out.reshape(len(indices), -1), 0
        if self.layout == "list":  # each chunk of the table, of one or more rows, is contiguous
            for chunk in images.chunks:
                flat[start : start + len(chunk)] = chunk.flatten().to_numpy().reshape(len(chunk), -1)
                start += len(chunk)
        else:
            for place, value in enumerate(images):
                flat[place] = np.frombuffer(value.as_buffer(), np.uint8)
        return out, labels


class Contender(Indexed):
    FILE_SETTINGS = ("layout",)
    # Fastest: Arrow columns copied row by row (fixed lists for large images, binary for small). "torch" and "numpy"
    # formats, as in the documentation, return int64 by default, and copy more than once.
    TRIED = (
        {"layout": "array", "form": "torch"},
        {"layout": "array", "form": "numpy"},
        *({"layout": "list", "form": form, "workers": workers} for form in ("torch", "numpy") for workers in (0, 2)),
        *({"layout": "list", "form": "arrow"} | way for way in WAYS),
        *({"layout": "binary", "form": "arrow"} | way for way in WAYS),
    )

    @staticmethod
    def make(source: Source, path: Path, layout: str = "list") -> None:
        images = source.images

        def rows() -> Any:
            for index in range(source.count):
                image = np.asarray(images[index])
                yield {"image": image.tobytes() if layout == "binary" else image, "label": index}

        if layout == "list":  # directly from arrays, because Python lists would take an hour
            tables = []
            for start in range(0, source.count, BLOCK):
                block = np.asarray(images[start : start + BLOCK])
                pixels = pa.FixedSizeListArray.from_arrays(pa.array(block.reshape(-1)), source.sample_bytes)
                tables.append(pa.table({"image": pixels, "label": np.arange(start, start + len(block))}))
            dataset = datasets.Dataset(pa.concat_tables(tables).cast(features(layout, source).arrow_schema))
        else:
            cache = path.with_name(path.name + "-cache")
            dataset = datasets.Dataset.from_generator(rows, features=features(layout, source), cache_dir=str(cache))
        dataset.save_to_disk(str(path), num_shards=1)
        if layout != "list":
            shutil.rmtree(cache)

    def __init__(
        self, source: Source, path: Path, batch_size: int, layout: str = "list", form: str = "arrow", **way: Any
    ) -> None:
        super().__init__(lambda: Rows(path, source, layout, form), source, batch_size, **way)
