"""Check a CSR file against the specification of the format."""

from __future__ import annotations

import zlib
from pathlib import Path

import h5py
import numpy as np
import pytest
from support.specification import check_fixed_types_only

from h5chunk.plan.csr import index_dtype

sp = pytest.importorskip("scipy.sparse")


def check_csr_file(path: Path) -> sp.csr_matrix:
    """Everything that the specification says of a CSR file; returns the matrix of stored numbers."""
    data = path.read_bytes()
    check_fixed_types_only(path)
    with h5py.File(path) as file:
        group, own = file["X"], file["h5chunk"]
        assert group.attrs["encoding-type"] == b"csr_matrix" and group.attrs["encoding-version"] == b"0.1.0"
        num_rows, num_columns = group.attrs["shape"].tolist()
        indptr, indices, codes = (group[name] for name in ("indptr", "indices", "data"))
        assert indptr.shape == (num_rows + 1,) and indptr.dtype == np.int64 and indptr.chunks is None
        assert indices.dtype == index_dtype(num_columns)
        floats = codes.dtype in (np.float16, np.float32)
        assert floats or codes.dtype == np.uint8
        assert not floats or (group.attrs["scale"], group.attrs["pattern"]) == (1, 0)
        assert indices.shape == codes.shape == (indptr[-1],) and indices.chunks == codes.chunks
        assert own.attrs["kind"] == b"csr" and own.attrs["num_samples"] == num_rows
        expected = {"indptr", "indices"} | (set() if group.attrs["pattern"] else {"data"})
        assert set(own["checksums/X"]) == expected
        for name in expected:
            dataset = group[name]
            if not dataset.size:
                assert own[f"checksums/X/{name}"].shape == (0,)
                continue
            places: list[tuple[int, int]] = [(dataset.id.get_offset(), dataset.nbytes)] if name == "indptr" else []
            if name != "indptr":
                dataset.id.chunk_iter(lambda chunk, places=places: places.append((chunk.byte_offset, chunk.size)))
            first, size = places[0]
            assert [offset for offset, _ in places] == [first + i * size for i in range(len(places))]
            checksums = [zlib.crc32(data[offset : offset + size]) for offset, size in places]
            assert own[f"checksums/X/{name}"][()].tolist() == checksums
            run = data[first : first + len(places) * size]
            assert run == dataset[()].tobytes() + bytes(len(run) - dataset.nbytes), "padding is not zeros"
        if group.attrs["pattern"]:
            assert codes.id.get_storage_size() == 0 and (codes[()] == 1).all()
        assert indptr[0] == 0 and (np.diff(indptr[()]) >= 0).all()
        values = codes[()].astype(np.float32 if floats else np.uint8)
        it = sp.csr_matrix((values, indices[()].astype(np.int64), indptr[()]), (num_rows, num_columns))
        assert it.has_canonical_format and it.data.all() and np.isfinite(it.data).all()
        return it
