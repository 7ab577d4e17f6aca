"""FFCV: compiled threads gather raw pixels from the mapped file into reused batches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from ffcv.fields import IntField, NDArrayField, RGBImageField
from ffcv.fields.basics import IntDecoder
from ffcv.fields.decoders import NDArrayDecoder, SimpleRGBImageDecoder
from ffcv.loader import Loader, OrderOption
from ffcv.transforms import ToTensor, ToTorchImage
from ffcv.writer import DatasetWriter

from peers import REUSED, Source
from peers.reading import Batch


class Samples:
    """Images as (H, W, C) for FFCV's writer, which stores them unchanged."""

    def __init__(self, source: Source, field: str) -> None:
        self.images, self.field = source.images, field

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        image = np.asarray(self.images[index])
        return (np.ascontiguousarray(image.transpose(1, 2, 0)) if self.field == "image" else image), int(index)


class Contender:
    FILE_SETTINGS = ("field", "page_bytes")
    # Fastest: two threads, few batches ahead, small pages. 28 x 28 x 1 needs NDArrayField, which one thread reads.
    # numba allows no more threads than cores.
    TRIED = tuple(
        {"order": order, "memory": REUSED} | settings
        for order in ("RANDOM", "QUASI_RANDOM")
        for settings in (
            {},
            {"workers": 1},
            {"ahead": 1},
            {"ahead": 2},
            {"ahead": 5},
            {"field": "array"},
            {"page_bytes": 2 << 20},
            {"page_bytes": 2 << 20, "ahead": 1},
        )
    )

    @staticmethod
    def make(source: Source, path: Path, field: str = "image", page_bytes: int = 8 << 20) -> None:
        array = NDArrayField(np.dtype(np.uint8), source.sample_shape)
        images = RGBImageField(write_mode="raw") if field == "image" else array
        writer = DatasetWriter(str(path), {"image": images, "label": IntField()}, page_size=page_bytes, num_workers=2)
        writer.from_indexed_dataset(Samples(source, field))

    def __init__(
        self,
        source: Source,
        path: Path,
        batch_size: int,
        *,
        order: str,
        memory: str,
        workers: int = 2,
        ahead: int = 3,
        field: str = "image",
        page_bytes: int = 8 << 20,
    ) -> None:
        del memory, page_bytes
        decode = (
            [SimpleRGBImageDecoder(), ToTensor(), ToTorchImage()]
            if field == "image"
            else [NDArrayDecoder(), ToTensor()]
        )
        self.loader = Loader(
            str(path),
            batch_size,
            num_workers=workers,
            os_cache=True,
            order=OrderOption[order],
            seed=source.seed,
            drop_last=False,
            batches_ahead=ahead,
            pipelines={"image": decode, "label": [IntDecoder(), ToTensor()]},
        )

    def epoch(self, number: int) -> Iterator[Batch]:
        del number  # each iteration is the next epoch
        for images, labels in self.loader:
            yield images, labels.view(-1)
