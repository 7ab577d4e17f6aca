"""Other loaders, one per module, with the same interface, so that `bench_loader.py` can compare them.

A contender is a class::

    class Contender:
        FILE_SETTINGS = ("chunk",)                       # settings that change its file
        TRIED = ({"workers": 0}, {"workers": 2})         # what `bench_loader.py --tune` times

        @staticmethod
        def make(source, path, **settings): ...          # writes its file or folder of the source's images
        def __init__(self, source, path, batch_size, **settings): ...
        def epoch(self, number): ...                     # yields (images, labels), each sample once

Images are uint8 (n, C, H, W). Labels are int64 (n,): the number of each sample in the source, which proves that an
epoch is complete. With ``REUSED`` settings a batch may become invalid when the next one is requested.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

REUSED = "reused"


@dataclass(frozen=True)
class Source:
    """The images that all contenders pack, as contiguous bytes in a file.

    Attributes
    ----------
    path : Path
        A plain HDF5 file whose dataset ``images`` is contiguous; ``labels`` beside it.
    offset : int
        Where the images' bytes begin in the file.
    shape : tuple of int
        (count, C, H, W).
    seed : int
    """

    path: Path
    offset: int
    shape: tuple[int, ...]
    seed: int = 0

    @property
    def count(self) -> int:
        return self.shape[0]

    @property
    def sample_shape(self) -> tuple[int, ...]:
        return self.shape[1:]

    @property
    def sample_bytes(self) -> int:
        return int(np.prod(self.sample_shape))

    @property
    def images(self) -> np.memmap:
        """The images as a memory map: uint8 (count, C, H, W)."""
        return np.memmap(self.path, np.uint8, "r", self.offset, self.shape)

    def order(self, epoch: int) -> np.ndarray:
        """Return a random permutation of the samples: int64 (count,)."""
        return np.random.default_rng([self.seed, epoch]).permutation(self.count)

    def batches(self, epoch: int, batch_size: int) -> list[np.ndarray]:
        """Split the order into batches. The last one may be smaller."""
        order = self.order(epoch)
        return [order[start : start + batch_size] for start in range(0, self.count, batch_size)]


@dataclass(frozen=True)
class Entry:
    """One row of the table.

    Attributes
    ----------
    module, label : str
    best : dict
        The best settings found with ``--tune``, by image size; other sizes take those of the nearest.
    distribution : str
        Its name for pip; its version is printed.
    """

    module: str
    label: str
    distribution: str
    best: dict[int, dict]

    def settings(self, size: int) -> dict:
        return self.best[min(self.best, key=lambda known: abs(known - size))]

    def load(self) -> type:
        """Import the contender's class. Raises ImportError if its library is not installed."""
        return importlib.import_module(f"peers.{self.module}").Contender


CONTENDERS = {
    "ours": Entry("ours", "ChunkLoader", "h5chunk", {224: {}}),
    "ours-reuse": Entry("ours", "ChunkLoader, reuse=True", "h5chunk", {224: {"memory": REUSED}}),
    "ffcv-random": Entry(
        "ffcv",
        "FFCV, RANDOM",
        "ffcv",
        {
            224: {"order": "RANDOM", "memory": REUSED, "ahead": 1, "page_bytes": 2 << 20},
            32: {"order": "RANDOM", "memory": REUSED, "ahead": 1},
            28: {"order": "RANDOM", "memory": REUSED, "ahead": 1, "field": "array"},
        },
    ),
    "ffcv-quasi": Entry(
        "ffcv",
        "FFCV, QUASI_RANDOM",
        "ffcv",
        {
            224: {"order": "QUASI_RANDOM", "memory": REUSED, "ahead": 1, "page_bytes": 2 << 20},
            32: {"order": "QUASI_RANDOM", "memory": REUSED},
            28: {"order": "QUASI_RANDOM", "memory": REUSED, "ahead": 1, "field": "array"},
        },
    ),
    "memmap": Entry("memmap", "np.memmap, images[indices]", "numpy", {224: {"threads": 2}, 32: {}}),
    "memmap-take": Entry(
        "memmap",
        "np.memmap, np.take(out=)",
        "numpy",
        {
            224: {"how": "Into", "threads": 2, "memory": REUSED},
            32: {"how": "Into", "memory": REUSED},
        },
    ),
    "lmdb": Entry("lmdb", "LMDB", "lmdb", {224: {"memory": REUSED}}),
    "tensorstore": Entry(
        "tensorstore",
        "TensorStore",
        "tensorstore",
        {
            224: {"chunk": 1, "ahead": 2, "memory": REUSED, "io": 2, "copies": 2},
            32: {"chunk": 1000, "ahead": 2, "memory": REUSED, "cache_bytes": 1 << 28},
        },
    ),
    "hf": Entry(
        "hf", "Hugging Face datasets", "datasets", {224: {"threads": 2, "memory": REUSED}, 32: {"layout": "binary"}}
    ),
    "litdata": Entry("litdata", "LitData", "litdata", {224: {"batch_decode": 0}}),
    "h5py-rows": Entry("h5py_rows", "h5py, a batch at once", "h5py", {224: {"fancy": True, "memory": REUSED}}),
    "h5py": Entry("h5py", "h5py Dataset in a DataLoader", "h5py", {224: {"workers": 2}}),
    "mds": Entry("mds", "MosaicML Streaming", "mosaicml-streaming", {224: {"indexed": True, "threads": 2}}),
    "webdataset": Entry("webdataset", "WebDataset", "webdataset", {224: {"workers": 2}}),
}
WAYS = {  # for one loader: name, label, settings, and the row that it is compared with
    "plain": ("ChunkLoader", {}, ""),
    "plain-again": ("the same again, to show noise", {}, "plain"),
    "alone": ("rank 0 of 1", {"way": "alone"}, "plain"),
    "lanes": ("4 lanes, on one rank", {"way": "lanes"}, "plain"),
    "rank": ("rank 1 of 2, its half", {"way": "rank"}, "plain"),
    "lists": ("a random permutation as lists", {"way": "lists"}, "plain"),
    "saved": ("state_dict() with each batch", {"way": "saved"}, "plain"),
    "begun": ("started anew, first half", {"way": "begun"}, ""),
    "resumed": ("resumed from a state, second half", {"way": "resumed"}, "begun"),
}
