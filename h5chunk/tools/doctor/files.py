"""Look at the files that a process reads: how much of them is in the page cache, and how HDF5 cuts them into chunks."""

from __future__ import annotations

import ctypes
import mmap
import stat
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

MIN_BYTES = 1 << 20  # smaller files are not looked at
MAX_FILES = 64


def open_files() -> list[dict[str, Any]]:
    """Describe the regular files that this process holds open, and the largest dataset of each HDF5 file."""
    found = []
    datasets = largest_datasets() if "h5py" in sys.modules else {}
    for entry in list(Path("/proc/self/fd").iterdir())[: 16 * MAX_FILES]:
        with suppress(OSError, ValueError):
            path, status = entry.readlink(), entry.stat()
            is_data = stat.S_ISREG(status.st_mode) and status.st_size >= MIN_BYTES and "deleted" not in str(path)
            if is_data and not str(path).startswith(("/dev/shm/torch_", "/proc")):
                found.append({"path": str(path), "bytes": status.st_size, **datasets.get(str(path), {})})
    return found[:MAX_FILES]


def _append(items: list[Any], name: str, item: Any) -> None:
    items.append(item)


def cached_share(path: str, size: int) -> float:
    """Return the share of a file's pages that are in the page cache, by mincore(2)."""
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    with open(path, "rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as mapped:  # noqa: PTH123
        memory, states = np.frombuffer(mapped, np.uint8), np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
        failed = mincore(memory.ctypes.data, size, states.ctypes.data)
        del memory
    if failed:
        raise OSError(f"{path}: mincore failed")
    return float(np.mean(states & 1))


def largest_datasets() -> dict[str, dict[str, Any]]:
    """Describe the chunks and the chunk cache of the largest dataset of each HDF5 file that is open here."""
    import h5py

    found: dict[str, dict[str, Any]] = {}
    identifiers = h5py.h5f.get_obj_ids(h5py.h5f.OBJ_ALL, h5py.h5f.OBJ_FILE)
    datasets = h5py.h5f.get_obj_ids(h5py.h5f.OBJ_ALL, h5py.h5f.OBJ_DATASET)
    for identifier in [*identifiers, *map(h5py.h5i.get_file_id, datasets)]:
        file = h5py.File(identifier)
        items: list[h5py.Dataset | h5py.Group] = []
        file.visititems(partial(_append, items))
        numeric = [item for item in items if isinstance(item, h5py.Dataset) and item.ndim and item.dtype.kind in "biuf"]
        if not numeric:
            continue
        data = max(numeric, key=lambda item: item.nbytes)
        found[str(Path(file.filename).resolve())] = {
            "dataset": data.name,
            "shape": data.shape,
            "chunks": data.chunks,
            "itemsize": data.dtype.itemsize,
            "filtered": bool(data.id.get_create_plist().get_nfilters()),
            "cache": file.id.get_access_plist().get_cache()[1:],
        }
    return found
