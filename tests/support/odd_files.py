"""HDF5 files of every layout that the format allows, each with one dataset ``images``, and how they are read."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import hdf5plugin  # noqa: F401  # HDF5 finds its filters from then on
import numpy as np
from h5py import h5d, h5f, h5p, h5s, h5t, h5z
from support.foreign import values

N = 37
SHAPE = (N, 5, 7)
DATA = values(SHAPE, np.uint16)  # 70 bytes a sample: more than what loaders keep whole in the tests
LATEST = {"libver": "latest"}
DIRECT, HDF5, REFUSED = "read directly", "through HDF5", "refused"
OTHER_FILTERS = "n-bit, scale-offset, szip, Blosc2"

GZIP, SHUFFLE, FLETCHER32 = (1, (4,)), (2, ()), (3, ())
SZIP, NBIT, SCALEOFFSET = (4, (4, 8)), (5, ()), (6, (2, 0))
LZF, BLOSC, LZ4, ZSTD, BLOSC2 = (32000, ()), (32001, ()), (32004, ()), (32015, ()), (32026, ())
BITSHUFFLE, BITSHUFFLE_LZ4 = (32008, (0, 0)), (32008, (0, 2))  # a block size of its own choice; nothing, LZ4
FILTERS = {
    "shuffle": [SHUFFLE],
    "Bitshuffle alone": [BITSHUFFLE],
    "Bitshuffle with LZ4": [BITSHUFFLE_LZ4],
    "gzip": [GZIP],
    "Fletcher-32": [FLETCHER32],
    "LZF": [LZF],
    "LZ4": [LZ4],
    "Zstandard": [ZSTD],
    "Blosc": [BLOSC],
    "shuffle, gzip, Fletcher-32": [SHUFFLE, GZIP, FLETCHER32],
    "Fletcher-32, gzip, shuffle": [FLETCHER32, GZIP, SHUFFLE],
    "gzip, Bitshuffle alone": [GZIP, BITSHUFFLE],
    "Bitshuffle, LZF, Zstandard": [BITSHUFFLE, LZF, ZSTD],
}
WHOLE, PARTS = {"chunks": (4, 5, 7)}, {"chunks": (8, 3, 3)}
LARGER = {"chunks": (64, 5, 7), "maxshape": (None, 5, 7)}
WIDER = {"chunks": (8, 5, 9), "maxshape": (None, 5, 9)}

_library = ctypes.CDLL(h5py.h5p.__file__)


def _status(name: str, *arguments: Any) -> None:
    """Call a function of HDF5 that h5py does not offer."""
    function = getattr(_library, name)
    function.restype = ctypes.c_int
    assert function(*arguments) >= 0, name


def set_partial_chunks_plain(properties: h5p.PropDCID) -> None:
    """H5D_CHUNK_DONT_FILTER_PARTIAL_CHUNKS: partial chunks at the edges skip the filters."""
    _status("H5Pset_chunk_opts", ctypes.c_int64(properties.id), ctypes.c_uint(2))


def set_fill_undefined(properties: h5p.PropDCID) -> None:
    """No fill value at all, not even the default of zero."""
    _status("H5Pset_fill_value", ctypes.c_int64(properties.id), ctypes.c_int64(h5t.NATIVE_UINT16.id), None)


def create(
    file: h5py.File,
    *,
    shape: tuple[int, ...] = SHAPE,
    chunks: tuple[int, ...] | None = None,
    kind: h5t.TypeID | None = None,
    maxshape: Sequence[int | None] | None = None,
    filters: Sequence[tuple[int, tuple[int, ...]]] = (),
    alloc: int | None = None,
    fill_time: int | None = None,
    fill: int | None = None,
    partial_plain: bool = False,
    change: Callable[[h5p.PropDCID], Any] = lambda _: None,
    name: str = "images",
) -> h5py.Dataset:
    """A dataset made by the low-level interface, of which nothing is written."""
    properties = h5p.create(h5p.DATASET_CREATE)
    if chunks is not None:
        properties.set_chunk(chunks)
    for code, parameters in filters:
        properties.set_filter(code, h5z.FLAG_OPTIONAL, parameters)
    if alloc is not None:
        properties.set_alloc_time(alloc)
    if fill_time is not None:
        properties.set_fill_time(fill_time)
    if fill is not None:
        properties.set_fill_value(np.array(fill, np.uint16))
    if partial_plain:
        set_partial_chunks_plain(properties)
    change(properties)
    limits = None if maxshape is None else tuple(h5s.UNLIMITED if size is None else size for size in maxshape)
    kind = kind or h5t.STD_U16LE
    return h5py.Dataset(h5d.create(file.id, name.encode(), kind, h5s.create_simple(shape, limits), properties))


def make(
    path: Path,
    *,
    data: np.ndarray = DATA,
    file: dict[str, Any] | None = None,
    then: Callable[[h5py.Dataset], Any] = lambda _: None,
    **options: Any,
) -> None:
    """A file with ``images``, written in full; ``then`` changes it further."""
    with h5py.File(path, "w", **(file or {})) as opened:
        dataset = create(opened, shape=data.shape, **options)
        if data.size:
            dataset[...] = data
        then(dataset)


def make_matrix(path: Path, matrix: Any, **options: Any) -> None:
    """A CSR matrix in ``X``, whose parts have these options, or as the machine has them where ``kind`` is for one."""
    kind = options.pop("kind", None)
    with h5py.File(path, "w", **options.pop("file", {})) as file:
        group = file.create_group("X")
        group.attrs["encoding-type"] = np.bytes_("csr_matrix")
        group.attrs["shape"] = matrix.shape
        for name in ("indptr", "indices", "data"):
            values = getattr(matrix, name).astype(np.int32)
            dataset = create(group, shape=values.shape, name=name, kind=kind or h5t.STD_I32LE, **options)
            dataset[...] = values.astype(dataset.dtype)


def index_of(dataset: h5py.Dataset) -> int:
    """Number of the chunk index in H5Dpublic.h: 0 B-tree 1, 1 single chunk, 2 implicit, 3 and 4 arrays, 5 B-tree 2."""
    index = ctypes.c_int()
    _status("H5Dget_chunk_index_type", ctypes.c_int64(dataset.id.id), ctypes.byref(index))
    return index.value


class Case(NamedTuple):
    """A file of one layout.

    Attributes
    ----------
    row : str
        Of the table of layouts in scripts/PROMISES.md.
    variant : str
    how : {DIRECT, HDF5, REFUSED}
    make : callable
        Writes a file of this path, and others beside it.
    trusted : bool
        Whether it is read so.
    """

    row: str
    variant: str
    how: str
    make: Callable[[Path], Any]
    trusted: bool = False

    def __str__(self) -> str:
        return f"{self.row}: {self.variant}"


def _made(**options: Any) -> Callable[[Path], None]:
    return lambda path: make(path, **options)


def _cases() -> Iterator[Case]:
    yield from _plain_cases()
    yield from _filter_cases()
    yield from _unwritten_cases()
    yield from _type_cases()
    yield from _file_cases()
    yield from _elsewhere_cases()


# Chunks and their indexes


def _plain_cases() -> Iterator[Case]:
    shapes = {"contiguous": {}, "whole samples": WHOLE, "parts of samples": PARTS, "larger": LARGER, "wider": WIDER}
    for name, chunks in shapes.items():
        yield Case("contiguous, or in chunks of any shape", name, DIRECT, _made(**chunks))
    yield Case("compact", "in the header", DIRECT, _made(change=lambda each: each.set_layout(h5d.COMPACT)))
    row = "any chunk index: B-tree of version 1 or 2, single chunk, implicit, fixed or extensible array"
    early = {"alloc": h5d.ALLOC_TIME_EARLY}
    grows, both = {"maxshape": (None, 5, 7)}, {"maxshape": (None, 9, None)}
    indexes = {
        (0, "B-tree of version 1"): {},
        (1, "single chunk"): {"file": LATEST, "chunks": SHAPE},
        (2, "implicit"): {"file": LATEST, **early},
        (3, "fixed array"): {"file": LATEST},
        (3, "fixed array with room"): {"file": LATEST, "maxshape": (99, 5, 7)},
        (4, "extensible array"): {"file": LATEST, **grows},
        (5, "B-tree of version 2"): {"file": LATEST, **both},
    }
    for (number, name), options in indexes.items():
        for chunks in (WHOLE, PARTS):
            for filters in ([], [GZIP]):
                if number != 2 or not filters:
                    made = _indexed(number, **{**chunks, "filters": filters, **options})
                    yield Case(row, f"{name}, {chunks['chunks']}, {'gzip' if filters else 'plain'}", DIRECT, made)
    for chunks in (WHOLE, PARTS):
        made = _indexed(4, file=LATEST, maxshape=(N, None, 7), **chunks)
        one_row = "an extensible array along another axis than the first, for which HDF5 reports wrong chunk addresses"
        yield Case(one_row, str(chunks["chunks"]), HDF5, made)
    for alloc in (h5d.ALLOC_TIME_EARLY, h5d.ALLOC_TIME_LATE, h5d.ALLOC_TIME_INCR):
        for fill_time in (h5d.FILL_TIME_ALLOC, h5d.FILL_TIME_NEVER, h5d.FILL_TIME_IFSET):
            for name, options in {"chunked": WHOLE, "gzip": {**PARTS, "filters": [GZIP]}, "contiguous": {}}.items():
                if name != "contiguous" or alloc != h5d.ALLOC_TIME_INCR:
                    made = _made(alloc=alloc, fill_time=fill_time, fill=7, **options)
                    row = "allocated early, late or step by step, with any fill time, and written in full"
                    yield Case(row, f"{name} {alloc} {fill_time}", DIRECT, made)
    resizes = {
        "smaller": (DIRECT, [30]),
        "to whole chunks": (DIRECT, [32]),
        "smaller, then larger in the last chunk": (DIRECT, [30, 32]),
        "smaller, then larger": (DIRECT, [10, N]),
        "larger in the last chunk": (DIRECT, [N + 2]),
        "larger": (DIRECT, [80]),
    }
    for name, (how, lengths) in resizes.items():
        for version, file in {"": {}, ", latest": LATEST}.items():
            for filters in ([], [SHUFFLE]):
                for plain in (False, True) if filters else (False,):
                    options = {**WHOLE, **grows, "file": file, "filters": filters, "partial_plain": plain, "fill": 9}
                    made = _made(then=_resized(lengths), **options)
                    row = (
                        f"resized, {'not all' if name in ('larger', 'smaller, then larger') else 'all'} chunks written"
                    )
                    yield Case(row, f"{name}{version} {len(filters)} {plain}", how, made)


def _indexed(number: int, **options: Any) -> Callable[[Path], None]:
    """A file whose index is the one that is meant."""

    def check(dataset: h5py.Dataset) -> None:
        assert index_of(dataset) == number

    return _made(then=check, **options)


def _resized(lengths: list[int]) -> Callable[[h5py.Dataset], None]:
    def resize(dataset: h5py.Dataset) -> None:
        for length in lengths:
            dataset.resize(length, axis=0)

    return resize


# Filters


def _filter_cases() -> Iterator[Case]:
    row = "gzip, shuffle, Fletcher-32, LZF, LZ4, Zstandard, Blosc and Bitshuffle, in any order"
    for name, filters in FILTERS.items():
        for chunks in (WHOLE, PARTS):
            yield Case(row, f"{name}, {chunks['chunks']}", DIRECT, _made(filters=filters, **chunks))
            made = _made(filters=filters, partial_plain=True, **chunks)
            yield Case("partial chunks at the edges left unfiltered", f"{name}, {chunks['chunks']}", DIRECT, made)
        made = _made(filters=filters, partial_plain=True, **LARGER)
        yield Case("partial chunks at the edges left unfiltered", f"{name}, larger", DIRECT, made)
    for mask in range(8):
        row = "single chunks that skip filters (filter masks)"
        yield Case(row, f"{mask:03b}", DIRECT, lambda path, mask=mask: _masked(path, mask))
    others = {"n-bit": NBIT, "scale-offset": SCALEOFFSET, "szip": SZIP, "Blosc2": BLOSC2}
    for name, one in others.items():
        if name != "szip" or h5z.get_filter_info(4) & h5z.FILTER_CONFIG_ENCODE_ENABLED:
            for chunks in (WHOLE, PARTS):
                for plain in (False, True):
                    made = _made(filters=[one], partial_plain=plain, **chunks)
                    yield Case(OTHER_FILTERS, f"{name}, {chunks['chunks']}, {plain}", HDF5, made)
    for size in (60, 80):
        row = "a chunk whose decoded length is wrong"
        yield Case(row, f"{size}", REFUSED, lambda path, size=size: _sized(path, size))


def _masked(path: Path, mask: int) -> None:
    """Shuffle, gzip and Fletcher-32, of which one chunk skips some."""
    filters = [SHUFFLE, GZIP, FLETCHER32]
    with h5py.File(path.with_suffix(".some"), "w") as some:
        kept = [each for bit, each in enumerate(filters) if not mask >> bit & 1]
        dataset = create(some, filters=kept, **WHOLE)
        dataset[...] = DATA
        stored = dataset.id.read_direct_chunk((8, 0, 0))[1]
    make(path, filters=filters, then=lambda each: each.id.write_direct_chunk((8, 0, 0), stored, mask), **WHOLE)


def _sized(path: Path, size: int) -> None:
    stored = bytes(range(size)) * 4
    make(path, filters=[SHUFFLE], then=lambda each: each.id.write_direct_chunk((8, 0, 0), stored, 1), **WHOLE)


# Values that were never written


def _unwritten_cases() -> Iterator[Case]:
    never = {"fill_time": h5d.FILL_TIME_NEVER}
    fills = {
        "default": {},
        "a fill value": {"fill": 7},
        "a fill value, time never": {"fill": 7, **never},
        "time never": never,
        "undefined": {"change": set_fill_undefined},
        "undefined, time never": {"change": set_fill_undefined, **never},
    }
    shapes = {
        "whole samples": WHOLE,
        "parts of samples": PARTS,
        "gzip": {**WHOLE, "filters": [GZIP]},
        "n-bit": {**PARTS, "filters": [NBIT]},
        "contiguous": {},
    }
    for name, options in fills.items():
        for shape, chunks in shapes.items():
            made = _part_written(**options, **chunks)
            row = "chunks that were never written, which read as the fill value or as zeros"
            if shape == "contiguous" and name != "undefined":
                yield Case(row, f"{name}, user block", DIRECT, _part_written(file={"userblock_size": 512}, **options))
            if shape == "contiguous" and name == "undefined":
                yield Case("contiguous, never written, and without a fill value", name, REFUSED, made)
            elif shape == "n-bit":
                yield Case(OTHER_FILTERS, f"never written, {name}", HDF5, made)
            else:
                yield Case(row, f"{name}, {shape}", DIRECT, made)


def _part_written(*, file: dict[str, Any] | None = None, **options: Any) -> Callable[[Path], None]:
    def maker(path: Path) -> None:
        with h5py.File(path, "w", **(file or {})) as opened:
            dataset = create(opened, **options)
            if dataset.chunks:
                dataset[4:12] = DATA[4:12]
                dataset[30:33, :2] = 5

    return maker


# Types


def _type_cases() -> Iterator[Case]:
    native = ["u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8", "?"]
    for dtype in native:
        for chunks in ({}, {**PARTS, "filters": [SHUFFLE, GZIP]}):
            made = _typed(h5t.py_create(np.dtype(dtype), logical=True), values(SHAPE, dtype), **chunks)
            row = "integers, floats of 2, 4 and 8 bytes, booleans and enumerations, in the machine's byte order"
            yield Case(row, f"{dtype} {len(chunks)}", DIRECT, made)
    yield Case(row, "enumeration", DIRECT, _typed(_enum(h5t.STD_U8LE), DATA.astype("u1") % 3))
    yield Case(row, "committed", DIRECT, _committed)
    text = values(SHAPE[:1], "S70")
    for chunks in ({}, {"chunks": (4,), "filters": [GZIP]}):
        for strings in (h5py.string_dtype("utf-8", 70), h5py.string_dtype("ascii", 70), np.dtype("S70")):
            kind = h5t.py_create(strings, logical=True)
            made = _typed(kind, text, memory=kind, **chunks)
            yield Case("strings of fixed length", f"{strings} {len(chunks)}", DIRECT, made)
    padded = h5t.C_S1.copy()
    padded.set_size(71)
    padded.set_strpad(h5t.STR_SPACEPAD)
    yield Case("strings of fixed length", "padded", DIRECT, _typed(padded, text, memory=h5t.py_create(text.dtype)))
    row = "big-endian numbers, other precisions and bit offsets, other floats, bit fields"
    odd = {
        ">u2": (h5t.STD_U16BE, DATA),
        ">f4": (h5t.IEEE_F32BE, values(SHAPE, "f4")),
        "big-endian enumeration": (_enum(h5t.STD_U16BE), DATA % 3),
        "12 bits": (bits(h5t.STD_U16LE, 12, 0), DATA & 4095),
        "12 bits from bit 3": (bits(h5t.STD_U16LE, 12, 3), DATA & 4095),
        "signed, 12 bits from bit 3": (bits(h5t.STD_I16LE, 12, 3), (DATA & 2047).astype("i2") - 999),
        "as bfloat16": (_float(h5t.IEEE_F32LE, (15, 7, 8, 0, 7), 16, 2, 127), (DATA % 256).astype("f4")),
        "float of 24 bits": (_float(h5t.IEEE_F32LE, (23, 16, 7, 0, 16), 24, 4, 63), (DATA % 999).astype("f4")),
    }
    for name, (kind, data) in odd.items():
        for chunks in ({}, WHOLE, {**PARTS, "filters": [SHUFFLE, GZIP]}, {**PARTS, "filters": [NBIT]}):
            made, variant = _typed(kind, data, **chunks), f"{name} {len(chunks)} {chunks.get('filters', ())}"
            is_nbit = NBIT in chunks.get("filters", ())
            yield Case(OTHER_FILTERS if is_nbit else row, variant, HDF5 if is_nbit else DIRECT, made)
    made = _typed(h5t.STD_B16LE, DATA, memory=h5t.STD_B16LE, **WHOLE)
    yield Case(row, "bit field", DIRECT, made)
    yield Case(row, "big-endian complex", DIRECT, _typed(h5t.py_create(np.dtype(">c8")), DATA.astype("c8") * 1j))
    nameless = _typed(_enum(h5t.STD_U16BE), DATA.astype(">u2"), memory=_enum(h5t.STD_U16BE))
    yield Case(row, "big-endian enumeration, values without a name", DIRECT, nameless)
    for chunks in ({}, WHOLE, {**PARTS, "filters": [SHUFFLE, GZIP]}):
        for dtype in ("c8", "c16"):
            made = _typed(h5t.py_create(np.dtype(dtype)), DATA.astype(dtype) * (1 - 2j), **chunks)
            yield Case("complex numbers in the machine's byte order", f"{dtype} {len(chunks)}", DIRECT, made)
    row = "opaque and reference types, arrays of variable length with several axes"
    refused = {
        "opaque": (h5t.create(h5t.OPAQUE, 6), np.zeros(SHAPE, "V6")),
        "reference": (h5t.STD_REF_OBJ, np.zeros(SHAPE, "u2")),
        "variable length, two axes": (h5t.py_create(h5py.vlen_dtype("u1"), logical=True), np.zeros(SHAPE, "u2")),
    }
    for name, (kind, data) in refused.items():
        written = name == "opaque"
        yield Case(row, name, REFUSED, _typed(kind, data, written=written, **({} if written else {"chunks": (4,)})))


def _typed(
    kind: h5t.TypeID, data: np.ndarray, *, written: bool = True, memory: h5t.TypeID | None = None, **options: Any
) -> Callable[[Path], None]:
    def maker(path: Path) -> None:
        with h5py.File(path, "w") as file:
            chunks = options.get("chunks")
            some = {**options, "chunks": chunks * data.ndim if chunks == (4,) else chunks}
            dataset = create(file, shape=data.shape, kind=kind, **some)
            if written:
                dataset.id.write(h5s.ALL, h5s.ALL, np.ascontiguousarray(data), memory or _memory(kind, data))

    return maker


def _memory(kind: h5t.TypeID, data: np.ndarray) -> h5t.TypeID:
    same = h5t.py_create(data.dtype, logical=True)
    return _enum(same) if isinstance(kind, h5t.TypeEnumID) and data.dtype.kind != "b" else same


def _enum(base: h5t.TypeID) -> h5t.TypeEnumID:
    kind = h5t.enum_create(base)
    for number, name in enumerate((b"cat", b"dog", b"eel")):
        kind.enum_insert(name, number)
    return kind


def bits(base: h5t.TypeID, precision: int, offset: int) -> h5t.TypeID:
    """Whole numbers of fewer bits than their bytes have, from the bit ``offset`` on."""
    kind = base.copy()
    kind.set_precision(precision)
    kind.set_offset(offset)
    return kind


def _float(base: h5t.TypeID, fields: tuple[int, ...], precision: int, size: int, bias: int) -> h5t.TypeID:
    kind = base.copy()
    kind.set_fields(*fields)
    kind.set_precision(precision)
    kind.set_size(size)
    kind.set_ebias(bias)
    return kind


def _committed(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file["type"] = np.dtype("u2")
        dataset = create(file, kind=file["type"].id, **WHOLE)
        dataset[...] = DATA


# The file as a whole


def _file_cases() -> Iterator[Case]:
    row = "user blocks, pages, free space that is kept, addresses of 4 bytes, shared messages"
    pages = {"fs_strategy": "page", "fs_persist": True, "fs_page_size": 4096}
    for name, file in {
        "user block": {"userblock_size": 1024},
        "user block, latest": {"userblock_size": 512, **LATEST},
        "pages": pages,
        "free space": {"fs_strategy": "fsm", "fs_persist": True},
        "aggregation": {"fs_strategy": "aggregate"},
        "no strategy": {"fs_strategy": "none"},
    }.items():
        for shape, chunks in {"contiguous": {}, "chunks": WHOLE, "gzip": {**PARTS, "filters": [GZIP]}}.items():
            yield Case(
                row, f"{name}, {shape}", DIRECT, lambda path, file=file, chunks=chunks: _with_gaps(path, file, chunks)
            )
    for chunks in (WHOLE, {**PARTS, "filters": [GZIP]}):
        yield Case(
            row,
            f"addresses of 4 bytes {len(chunks)}",
            DIRECT,
            lambda path, chunks=chunks: make_small(path, (4, 4), chunks),
        )
        yield Case(row, f"shared messages {len(chunks)}", DIRECT, lambda path, chunks=chunks: _shared(path, chunks))
    yield Case("part of a file by the family or split driver", "family", REFUSED, _family)
    yield Case("part of a file by the family or split driver", "split", REFUSED, _split)
    for name, shape in {"no samples": (0, 5, 7), "samples of no size": (N, 0, 7)}.items():
        for layout, chunks in {
            "contiguous": {},
            "chunks": {"chunks": (4, 5, 7), "maxshape": (None, None, None)},
        }.items():
            made = _made(data=np.zeros(shape, np.uint16), **chunks)
            yield Case("no samples, or samples of zero bytes", f"{name}, {layout}", DIRECT, made)
    yield Case("a scalar, or an empty dataspace", "scalar", REFUSED, lambda path: _single(path, 5))
    yield Case("a scalar, or an empty dataspace", "null", REFUSED, lambda path: _single(path, h5py.Empty("u2")))


def _with_gaps(path: Path, file: dict[str, Any], options: dict[str, Any]) -> None:
    """A file of which things were deleted before and after the images were written."""
    with h5py.File(path, "w", **file) as opened:
        opened["before"] = np.zeros(5000)
        opened["between"] = np.ones(3000)
        del opened["before"]
        create(opened, **options)[...] = DATA
        del opened["between"]


def _raw_file(path: Path, properties: h5p.PropFCID, options: dict[str, Any]) -> None:
    with h5py.File(h5f.create(bytes(path), h5f.ACC_TRUNC, fcpl=properties)) as file:
        create(file, **options)[...] = DATA
        file["beside"] = np.arange(100)


def make_small(path: Path, sizes: tuple[int, int], options: dict[str, Any]) -> None:
    """A file whose addresses and lengths are of few bytes."""
    properties = h5p.create(h5p.FILE_CREATE)
    properties.set_sizes(*sizes)
    _raw_file(path, properties, options)


def _shared(path: Path, options: dict[str, Any]) -> None:
    """All messages that can be shared lie in one heap: type, shape, fill value, filters."""
    properties = h5p.create(h5p.FILE_CREATE)
    _status("H5Pset_shared_mesg_nindexes", ctypes.c_int64(properties.id), ctypes.c_uint(1))
    _status("H5Pset_shared_mesg_index", ctypes.c_int64(properties.id), *map(ctypes.c_uint, (0, 0x1F, 1)))
    _raw_file(path, properties, options)


def _family(path: Path) -> None:
    with h5py.File(path.with_name("part%d.h5"), "w", driver="family", memb_size=2048) as file:
        create(file, **WHOLE)[...] = DATA
    path.with_name("part0.h5").rename(path)


def _split(path: Path) -> None:
    with h5py.File(path.with_name("two"), "w", driver="split") as file:
        create(file, **WHOLE)[...] = DATA
    path.with_name("two-m.h5").rename(path)


def _single(path: Path, value: Any) -> None:
    with h5py.File(path, "w") as file:
        file["images"] = value


# Values that lie elsewhere


def _elsewhere_cases() -> Iterator[Case]:
    makers = {
        "a view of other datasets": (
            {
                "of a file": _view,
                "of itself": _view_of_itself,
                "of a lost file": lambda path: _view(path, "lost.h5", 9),
                "of a part, no fill value": _view_without_fill,
            },
            HDF5,
        ),
        "values in other files": ({"one file": _external, "two files": _external_two}, HDF5),
        "a link into another file": ({"external": _external_link}, HDF5),
        "a soft link": ({"in the file": _soft_link}, DIRECT),
    }
    for row, (variants, how) in makers.items():
        for variant, maker in variants.items():
            yield Case(row, variant, REFUSED, maker)
            yield Case(f"{row}, trusted", variant, how, maker, trusted=True)


def _view(path: Path, source: str = "source.h5", fill: int = 0) -> None:
    make(path.with_name("source.h5"), filters=[GZIP], **PARTS)
    layout = h5py.VirtualLayout(SHAPE, "u2")
    layout[:20] = h5py.VirtualSource(source, "images", SHAPE)[17:]
    with h5py.File(path, "w", libver="latest") as file:
        file.create_virtual_dataset("images", layout, fillvalue=fill)


def _view_of_itself(path: Path) -> None:
    layout = h5py.VirtualLayout(SHAPE, "u2")
    layout[:] = h5py.VirtualSource(".", "original", SHAPE)
    with h5py.File(path, "w", libver="latest") as file:
        create(file, name="original", **PARTS)[...] = DATA
        file.create_virtual_dataset("images", layout)


def _view_without_fill(path: Path) -> None:
    properties = h5p.create(h5p.DATASET_CREATE)
    properties.set_fill_time(h5d.FILL_TIME_NEVER)
    first = h5s.create_simple(SHAPE)
    first.select_hyperslab((0, 0, 0), (20, 5, 7))
    properties.set_virtual(first, b"source.h5", b"images", first)
    make(path.with_name("source.h5"), **PARTS)
    with h5py.File(path, "w", libver="latest") as file:
        h5d.create(file.id, b"images", h5t.STD_U16LE, h5s.create_simple(SHAPE), properties)


def _external(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file.create_dataset("images", data=DATA, external=[(str(path.with_name("raw")), 100, DATA.nbytes)])


def _external_two(path: Path) -> None:
    files = [(str(path.with_name("raw1")), 0, 1000), (str(path.with_name("raw2")), 50, DATA.nbytes - 1000)]
    with h5py.File(path, "w") as file:
        file.create_dataset("images", data=DATA, external=files)


def _external_link(path: Path) -> None:
    make(path.with_name("source.h5"), **WHOLE)
    with h5py.File(path, "w") as file:
        file["padding"] = np.zeros(10_000)
        file["images"] = h5py.ExternalLink("source.h5", "images")


def _soft_link(path: Path) -> None:
    with h5py.File(path, "w") as file:
        create(file, name="original", **WHOLE)[...] = DATA
        file["images"] = h5py.SoftLink("/original")


CASES = list(_cases())
