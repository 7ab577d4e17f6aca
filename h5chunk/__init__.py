"""h5chunk: keep training data in plain HDF5 and feed the GPU from it as fast as the machine can move bytes.

>>> import h5chunk
>>> report = h5chunk.convert("photos/", "photos.h5")              # doctest: +SKIP
>>> dataset = h5chunk.ChunkDataset("photos.h5")                   # doctest: +SKIP
>>> sampler = h5chunk.ChunkSampler(dataset, batch_size=256)       # doctest: +SKIP
>>> loader = DataLoader(dataset, batch_sampler=sampler)           # doctest: +SKIP

Names are loaded when they are first used: importing h5chunk imports neither torch nor h5py.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from h5chunk import errors as _errors

__version__ = "0.1.0"

_HOMES = {
    "BenchReport": "h5chunk.tools.bench.bench",
    "CacheSettings": "h5chunk.plan.cache",
    "ChunkDataset": "h5chunk.feed.dataset",
    "ChunkLoader": "h5chunk.feed.loader",
    "ChunkSampler": "h5chunk.feed.sampler",
    "ConvertReport": "h5chunk.tools.convert.report",
    "DoctorReport": "h5chunk.tools.doctor.report",
    "FolderReport": "h5chunk.tools.verify.report",
    "Keyed": "h5chunk.feed.keyed",
    "MatrixReport": "h5chunk.tools.convert.report",
    "Mix": "h5chunk.feed.mix",
    "Patches": "h5chunk.feed.patches",
    "Recommendation": "h5chunk.tools.tune.report",
    "RepackReport": "h5chunk.tools.repack.report",
    "Stitcher": "h5chunk.feed.stitch",
    "VerifyReport": "h5chunk.tools.verify.report",
    "Windows": "h5chunk.feed.windows",
    "bench": "h5chunk.tools.bench.bench",
    "collate": "h5chunk.feed.collate",
    "convert": "h5chunk.tools.convert.convert",
    "doctor": "h5chunk.tools.doctor.doctor",
    "info": "h5chunk.tools.info.info",
    "repack": "h5chunk.tools.repack.repack",
    "tune": "h5chunk.tools.tune.tune",
    "verify": "h5chunk.tools.verify.verify",
    **{name: "h5chunk.errors" for name in vars(_errors) if name.endswith("Error")},
}

# who uses these opens a file soon: the process that tests it first starts while this one imports torch and h5py
_DATA = {"ChunkDataset", "ChunkLoader", "Keyed", "Patches", "Windows"}

__all__ = ["__version__", *sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        if name in _DATA:
            import_module("h5chunk.store.hdf5.helper_start").start_ahead()
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'h5chunk' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
