"""HDF5 files of all kinds to be repacked, and a look at whether everything of them is there afterwards."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import h5py
import numpy as np


def raw(dataset: h5py.Dataset) -> np.ndarray:
    """Elements as the bytes that HDF5 gives, (*shape) of void; those of variable length as objects."""
    kind = dataset.id.get_type()
    fixed = not dataset.dtype.hasobject
    values = np.empty(dataset.shape, f"V{kind.get_size()}" if fixed else dataset.dtype)
    if values.size:
        dataset.id.read(h5py.h5s.ALL, h5py.h5s.ALL, values, kind if fixed else None)
    return values


def plain(value: Any, file: h5py.File) -> Any:
    """A value that can be compared: references by the name, and the region, that they lead to."""
    if isinstance(value, h5py.RegionReference):
        return (file[value].name, h5py.h5r.get_region(value, file.id).get_select_bounds()) if value else None
    if isinstance(value, h5py.Reference):
        return file[value].name if value else None
    if isinstance(value, h5py.Empty):
        return ("empty", str(value.dtype))
    if isinstance(value, np.void) and value.dtype.hasobject:
        return tuple(plain(value[name], file) for name in value.dtype.names)
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return [value.shape, str(value.dtype), value.tobytes()]
    if isinstance(value, np.ndarray):
        return [value.shape, str(value.dtype), [plain(each, file) for each in value.reshape(-1)]]
    return value.tobytes() if isinstance(value, (np.generic, np.void)) else value


def check_attributes(old: Any, new: Any) -> None:
    """Names in order, types, shapes, and values."""
    assert list(old.attrs) == list(new.attrs), old.name
    for name in old.attrs:
        x, y = old.attrs.get_id(name), new.attrs.get_id(name)
        assert x.get_type().equal(y.get_type()) and x.shape == y.shape, (old.name, name)
        assert x.get_type().committed() == y.get_type().committed(), (old.name, name)
        assert plain(old.attrs[name], old.file) == plain(new.attrs[name], new.file), (old.name, name)


def tree(group: h5py.Group, seen: dict[int, str] | None = None) -> dict[str, Any]:
    """Links of a group and of those in it, in order; of an object with several names, the first one of them."""
    links: dict[str, Any] = {}
    seen = {h5py.h5o.get_info(group.id).addr: "/"} if seen is None else seen
    for name in group:
        link = group.get(name, getlink=True)
        path = f"{group.name.rstrip('/')}/{name}"
        if isinstance(link, h5py.SoftLink):
            links[path] = ("soft", link.path)
            continue
        item = group[name]
        first = seen.setdefault(h5py.h5o.get_info(item.id).addr, path)
        links[path] = type(item).__name__ if first == path else ("again", first)
        if isinstance(item, h5py.Group) and first == path:
            links |= tree(item, seen)
    return links


def check_same(old: Path, new: Path, order: np.ndarray | None = None, permuted: set[str] | None = None) -> None:
    """All of a file is in another; rows of the datasets ``permuted`` (None: of that length) in another order."""
    with h5py.File(old) as a, h5py.File(new) as b:
        links = tree(a)
        mine = {path: link for path, link in tree(b).items() if path in links or not path.startswith("/h5chunk")}
        assert list(mine.items()) == list(links.items())
        check_attributes(a, b)
        assert a.userblock_size == b.userblock_size
        for path, link in links.items():
            if isinstance(link, tuple):
                continue
            x, y = a[path], b[path]
            check_attributes(x, y)
            if not isinstance(x, h5py.Dataset):
                continue
            assert x.id.get_type().equal(y.id.get_type()) and x.shape == y.shape, path
            assert x.id.get_type().committed() == y.id.get_type().committed(), path
            if x.shape is None:
                continue
            u, v = raw(x), raw(y)
            if order is not None and (path in permuted if permuted else x.shape[:1] == (len(order),)):
                u = u[order]
            assert plain(u, a) == plain(v, b), path
            if not x.dtype.hasobject:
                assert plain(np.asarray(x.fillvalue), a) == plain(np.asarray(y.fillvalue), b), path


def check_checksums(path: Path) -> set[str]:
    """Those of all datasets are of their stored chunks; gives the names."""
    names: set[str] = set()
    with h5py.File(path) as file:

        def check(name: str, table: Any) -> None:
            if not isinstance(table, h5py.Dataset):
                return
            names.add(name)
            dataset = file[name]
            if dataset.chunks is None:
                stored = [path.read_bytes()[dataset.id.get_offset() :][: dataset.nbytes]]
            else:
                stored = [dataset.id.read_direct_chunk(start)[1] for start in starts(dataset)]
            assert table[()].tolist() == [zlib.crc32(data) for data in stored], name

        file["h5chunk/checksums"].visititems(check)
    return names


def starts(dataset: h5py.Dataset) -> list[tuple[int, ...]]:
    """The first element of each chunk; of the offsets in the file, HDF5 1.14.2 leaves out the user block."""
    found: list[tuple[int, ...]] = []
    dataset.id.chunk_iter(lambda chunk: found.append(chunk.chunk_offset))
    return found


def make_everything(path: Path, num_samples: int = 100) -> Path:
    """A file with one of everything that h5py can write."""
    rng = np.random.default_rng(0)
    n = num_samples
    with h5py.File(path, "w", track_order=True, userblock_size=1024) as file:
        images = file.create_dataset(
            "images",
            data=rng.integers(0, 256, (n, 9, 7, 3), np.uint8),
            chunks=(30, 4, 4, 1),
            maxshape=(None, 9, 7, 3),
            compression="gzip",
            shuffle=True,
            fletcher32=True,
        )
        images.attrs["axes"] = "NHWC"
        file.create_dataset("labels", data=rng.integers(0, 10, n), track_order=True)
        _fixed(file, rng, n)
        _objects(file, n)
        _attributes(file, n)
        file["meta/soft"], file["meta/nowhere"] = h5py.SoftLink("/images"), h5py.SoftLink("not/there")
        file["meta/hard"], file["meta/loop"] = file["labels"], file["meta"]
        for scale, axis in (("time", 0), ("row", 1)):
            file[f"scales/{scale}"] = np.arange(float(images.shape[axis]))
            file[f"scales/{scale}"].make_scale(f"the {scale}")
            images.dims[axis].attach_scale(file[f"scales/{scale}"])
        images.dims[2].label = "column"
    with path.open("r+b") as block:
        block.write(b"a user block")
    return path


def _fixed(file: h5py.File, rng: np.random.Generator, n: int) -> None:
    file["kind"] = np.dtype([("x", ">i2"), ("y", "<f8", (2,)), ("z", "S3")])
    pairs = np.zeros(n, file["kind"].dtype)
    pairs["x"], pairs["y"], pairs["z"] = np.arange(n), rng.random((n, 2)), b"ab"
    file.create_dataset("train/pairs", dtype=file["kind"], shape=(n,))[...] = pairs
    file.create_dataset("train/big", data=rng.random((n, 3)).astype(">f8"), chunks=(7, 2))
    file.create_dataset("train/flag", data=rng.integers(0, 2, n).astype(bool))
    file.create_dataset("train/enum", data=rng.integers(0, 2, n), dtype=h5py.enum_dtype({"no": 0, "yes": 1}, "i4"))
    file.create_dataset("train/complex", data=rng.random(n) + 1j, compression="lzf")
    file.create_dataset("train/opaque", data=np.frombuffer(rng.bytes(5 * n), "V5"))
    file.create_dataset("train/array", shape=(n,), dtype=np.dtype(("<i4", (2, 2))))[...] = rng.integers(0, 9, (n, 2, 2))
    file.create_dataset("train/fixed", data=np.array([f"{i:06}".encode() for i in range(n)]))
    file.create_dataset("train/unwritten", (n, 5), "i4", chunks=(4, 5), fillvalue=7)
    part = file.create_dataset("train/part", (n, 5), ">i4", chunks=(4, 3), fillvalue=-2)
    part[10:13] = 5
    file.create_dataset("train/scaled", data=rng.integers(0, 50, (n, 4)), scaleoffset=0, chunks=(9, 2))
    file.create_dataset("other/scalar", data=5.0)
    file.create_dataset("other/nothing", data=h5py.Empty("f4"))
    file.create_dataset("other/zero", (0, 3), "i4", maxshape=(None, 3))
    file.create_dataset("other/named", (n + 1,), file["kind"], chunks=(8,), compression="gzip")[3:9] = pairs[3:9]
    file.create_dataset("other/table", data=rng.random((n + 1, 2)), compression="gzip")


def _objects(file: h5py.File, n: int) -> None:
    file["train/names"] = [f"sample {i} é" for i in range(n)]
    ragged = file.create_dataset("train/ragged", (n,), h5py.vlen_dtype("i4"), chunks=(16,))
    for i in range(n):
        ragged[i] = np.arange(i % 5)
    mixed = np.dtype([("text", h5py.string_dtype()), ("number", "i4"), ("to", h5py.ref_dtype)])
    table = file.create_dataset("train/mixed", (n,), mixed)
    for i in range(0, n, 3):
        table[i] = (f"text {i}", i, file["labels"].ref if i % 2 else file.ref)
    file.create_dataset("train/refs", data=np.array([file["images"].ref] * n, h5py.ref_dtype))
    file.create_dataset("other/refs", (3,), h5py.ref_dtype)[0] = file["train"].ref
    file.create_dataset("other/ref", (), h5py.ref_dtype)[()] = file["train/big"].ref


def _attributes(file: h5py.File, n: int) -> None:
    meta = file.create_group("meta", track_order=True)
    for item in (file, meta, file["images"], file["other/table"], file["kind"]):
        item.attrs["zebra"] = "a string é"
        item.attrs["ant"] = np.arange(6, dtype=">i2").reshape(2, 3)
        item.attrs["texts"] = ["a", "bb"]
        item.attrs["empty"] = h5py.Empty("f4")
        item.attrs.create("none", np.empty((0,), "f4"))
        item.attrs["fixed"] = np.bytes_(b"abc")
        item.attrs["bool"] = True
        item.attrs["to"] = file["labels"].ref
        item.attrs["pair"] = np.array((1, (2.0, 3.0), b"z"), file["kind"].dtype)
        item.attrs.create("typed", (5, (1.0, 2.0), b"q"), dtype=file["kind"])
    meta.attrs["names"] = np.arange(3 * n)
    meta.attrs["large"] = np.arange(20_000.0)
    meta.attrs["lists"] = np.array([np.arange(2), np.arange(3)], object).astype(h5py.vlen_dtype("i8"))
