"""The file format's fixed types, and an example of a specification."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np

from h5chunk.store.format.spec import ArraySpec, FileSpec, field_spec

ATTRIBUTES = {
    "format_version": np.int64(1), "h5chunk_version": "0.1", "num_samples": np.int64(10), "chunk_samples": np.int64(4),
    "window_chunks": np.int64(2), "rdcc_nslots": np.int64(3), "rdcc_nbytes": np.int64(2000), "rdcc_w0": 0.75,
    "seed": np.uint64((1 << 64) - 1), "shuffled": np.uint8(1), "options": '{"é": 1}',
}  # fmt: skip


def spec(num_samples: int = 10, height: int = 5, **attributes: object) -> FileSpec:
    return FileSpec(
        {
            "images": field_spec(num_samples, 4, (3, height, 7), np.dtype(np.uint8)),
            "score": field_spec(num_samples, 4, (), np.dtype(np.float64)),
            "word": field_spec(num_samples, 4, (), np.dtype("S5")),
            "h5chunk/source_index": ArraySpec((num_samples,), np.dtype(np.int64)),
            "h5chunk/class_names": ArraySpec((2,), np.dtype("S3")),
        },
        {"images": {"axes": "NCHW"}, "h5chunk": {**ATTRIBUTES, **attributes}},
    )


def check_fixed_types_only(path: Path) -> None:
    """No variable-length type, no link but hard ones, no filter, no time stamp."""

    def check_type(kind: h5py.h5t.TypeID) -> None:
        assert isinstance(kind, h5py.h5t.TypeIntegerID | h5py.h5t.TypeFloatID | h5py.h5t.TypeStringID), kind
        assert not (isinstance(kind, h5py.h5t.TypeStringID) and kind.is_variable_str())

    def visit(item: h5py.Group | h5py.Dataset) -> None:
        for name in item.attrs:
            check_type(h5py.h5a.open(item.id, name.encode()).get_type())
        assert not item.id.get_create_plist().get_obj_track_times(), item.name
        if isinstance(item, h5py.Dataset):
            check_type(item.id.get_type())
            assert item.id.get_create_plist().get_nfilters() == 0
            assert item.maxshape == item.shape
            return
        for name in item:
            assert isinstance(item.get(name, getlink=True), h5py.HardLink)
            visit(item[name])

    with h5py.File(path) as file:
        visit(file["/"])
