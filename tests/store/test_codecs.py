"""Chunks decoded outside HDF5 are what HDF5 reads, and damaged ones are errors."""

from __future__ import annotations

import itertools
import pickle
import struct
import tracemalloc
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import h5py
import hdf5plugin
import imagecodecs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.damaged_chunks import libraries_found_again, no_imagecodecs
from support.foreign import values

import h5chunk
from h5chunk.native import filters
from h5chunk.store.hdf5 import codecs
from h5chunk.store.hdf5.codecs import ChunkDecoder, DecodeError, NoDecoder

__all__ = ["no_imagecodecs"]

OPTIONAL = h5py.h5z.FLAG_OPTIONAL
NUMBERS = itertools.count()  # open files need names of their own
FILTERS: dict[str, tuple[int, tuple[int, ...]]] = {
    "gzip": (1, (4,)),
    "fletcher32": (3, ()),
    "lzf": (32000, ()),
    "zstd": (32015, (3,)),
    "lz4": (32004, (0,)),
    "lz4 in small blocks": (32004, (64,)),
    "bitshuffle": (32008, (0, 2)),
    "bitshuffle in small blocks": (32008, (16, 2)),
    "bitshuffle, zstd": (32008, tuple(hdf5plugin.Bitshuffle(cname="zstd").filter_options)),
    "bitshuffle alone": (32008, (0, 0)),
    "blosc2": (32026, tuple(hdf5plugin.Blosc2().filter_options)),
    "unknown": (40000, ()),
} | {
    f"blosc, {name}, {shuffle}": (32001, tuple(hdf5plugin.Blosc(cname=name, shuffle=shuffle).filter_options))
    for name in ("blosclz", "lz4", "zlib", "zstd")
    for shuffle in range(3)
}
PIPELINES = [
    [],
    ["shuffle"],
    ["gzip"],
    ["fletcher32"],
    ["shuffle", "gzip"],
    ["shuffle", "gzip", "fletcher32"],
    ["gzip", "shuffle"],
    ["fletcher32", "shuffle", "gzip"],
    ["shuffle", "shuffle", "fletcher32", "fletcher32", "shuffle"],
    ["gzip", "shuffle", "gzip", "fletcher32"],
    ["lzf"],
    ["shuffle", "lzf"],
    ["shuffle", "lzf", "fletcher32"],
    ["shuffle", "zstd"],
    ["zstd", "gzip", "lz4"],
    ["lzf", "fletcher32", "shuffle", "lz4 in small blocks"],
    ["bitshuffle", "gzip"],
    ["bitshuffle alone", "shuffle", "zstd"],
    *([name] for name in FILTERS if name.startswith(("zstd", "lz4", "blosc,", "bitshuffle"))),
]
CASES = [
    (pipeline, dtype)
    for pipeline in PIPELINES
    for dtype in ["u1", "<u2", ">i4", "f4", "f8", *([] if "bitshuffle" in "".join(pipeline) else ["S5", "S12"])]
]
SHAPES = [((1,), (1,)), ((7,), (3,)), ((10, 7), (4, 7)), ((6, 50), (4, 33)), ((110, 301), (100, 301))]


def id_of(pipeline: list[str]) -> str:
    return " + ".join(pipeline) or "none"


class Chunks:
    """A dataset in memory with any pipeline of filters, and its decoder."""

    def __init__(self, data: np.ndarray, chunks: tuple[int, ...], pipeline: list[str], write: bool = True) -> None:
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        properties.set_chunk(chunks)
        for name in pipeline:
            if name == "shuffle":
                properties.set_shuffle()
            else:
                properties.set_filter(FILTERS[name][0], OPTIONAL, FILTERS[name][1])
        self.file = h5py.File(f"chunks {next(NUMBERS)}", "w", driver="core", backing_store=False)
        space = h5py.h5s.create_simple(data.shape)
        made = h5py.h5d.create(self.file.id, b"x", h5py.h5t.py_create(data.dtype), space, properties)
        self.dataset, self.chunks = h5py.Dataset(made), chunks
        if write:
            self.dataset[...] = data
        self.chunk_bytes = int(np.prod(chunks)) * data.itemsize
        self.decoder = ChunkDecoder(self.dataset.id.get_create_plist(), self.chunk_bytes, data.itemsize)

    def stored(self) -> Iterator[tuple[tuple[int, ...], int, bytes]]:
        """Place, filter mask and stored bytes of each chunk."""
        for number in range(self.dataset.id.get_num_chunks()):
            place = self.dataset.id.get_chunk_info(number).chunk_offset
            yield (place, *self.dataset.id.read_direct_chunk(place))

    def decode(self, mask: int, stored: bytes) -> bytes:
        out = np.full(self.chunk_bytes, 0xAA, np.uint8)
        self.decoder.decode(memoryview(stored), mask, out)
        return out.tobytes()

    def check(self) -> None:
        """What is decoded is what HDF5 reads; an edge chunk counts as far as the dataset reaches."""
        everything = self.dataset[...]
        for place, mask, stored in self.stored():
            assert 0 < len(stored) <= self.decoder.max_stored_bytes
            decoded = np.frombuffer(self.decode(mask, stored), self.dataset.dtype).reshape(self.chunks)
            wanted = everything[tuple(slice(o, o + n) for o, n in zip(place, self.chunks, strict=True))]
            assert decoded[tuple(slice(n) for n in wanted.shape)].tobytes() == wanted.tobytes()


def one_chunk(pipeline: list[str], data: np.ndarray) -> tuple[Chunks, int, bytes]:
    made = Chunks(data, data.shape, pipeline)
    ((_, mask, stored),) = made.stored()
    return made, mask, stored


def chunk_as_stored(pipeline: list[str], data: np.ndarray, stored: bytes, mask: int = 0) -> Chunks:
    """A dataset of two chunks stored as these bytes; of one alone, HDF5 2.0 forgets the mask until it is reopened."""
    made = Chunks(np.concatenate((data, data)), data.shape, pipeline, write=False)
    for place in (0, len(data)):
        made.dataset.id.write_direct_chunk((place,), stored, mask)
    return made


def smooth(count: int, dtype: Any = np.uint8) -> np.ndarray:
    """Values that every filter compresses."""
    return np.cumsum(np.random.default_rng(1).integers(0, 3, count)).astype(dtype)


# What HDF5 reads


@pytest.mark.parametrize(("pipeline", "dtype"), CASES, ids=lambda each: each if isinstance(each, str) else id_of(each))
def test_decodes_what_hdf5_reads(pipeline, dtype):
    for shape, chunks in SHAPES:
        Chunks(values(shape, dtype), chunks, pipeline).check()
        if dtype[0] != "S":
            Chunks(smooth(int(np.prod(shape)), dtype).reshape(shape), chunks, pipeline).check()


@given(
    pipeline=st.sampled_from(PIPELINES),
    dtype=st.sampled_from(["u1", "u2", "f4", "f8"]),
    data=st.binary(min_size=8, max_size=3000) | st.integers(1, 400).map(lambda n: bytes(8 * n)),
)
@settings(max_examples=150, deadline=None)
def test_round_trip(pipeline, dtype, data):
    array = np.frombuffer(data[: len(data) // 8 * 8], np.uint8).view(dtype)
    made, mask, stored = one_chunk(pipeline, array)
    assert made.decode(mask, stored) == array.tobytes()


@pytest.mark.parametrize("pipeline", [["shuffle", "gzip", "fletcher32"], ["lzf", "shuffle", "zstd"]], ids=id_of)
def test_skipped_filters(pipeline):
    data = smooth(501, "u2")
    for mask in range(8):
        active = [name for bit, name in enumerate(pipeline) if not mask >> bit & 1]
        _, skipped, stored = one_chunk(active, data)
        assert not skipped
        made = chunk_as_stored(pipeline, data, stored, mask)
        made.check()
        assert made.decode(mask | 1 << 20, stored) == data.tobytes()


def test_filters_that_do_not_pay_are_skipped():
    made, mask, stored = one_chunk(["shuffle", "lzf"], values((1000,), "u1"))
    assert mask == 2
    assert made.decode(mask, stored) == values((1000,), "u1").tobytes()
    with pytest.raises(DecodeError, match="lzf: "):
        made.decode(0, stored)


def test_arrays_and_read_only_bytes_at_odd_places():
    for pipeline in PIPELINES:
        made, mask, stored = one_chunk(pipeline, smooth(2001, "u4"))
        out = np.zeros(made.chunk_bytes + 1, np.uint8)
        padded = np.frombuffer(b"x" + stored, np.uint8)[1:]
        made.decoder.decode(padded, mask, out[1:])
        assert out[1:].tobytes() == smooth(2001, "u4").tobytes()
        assert padded.tobytes() == stored


def test_pickles_and_says_its_filters():
    made, mask, stored = one_chunk(["shuffle", "gzip", "fletcher32"], smooth(100, "f4"))
    assert repr(made.decoder) == "shuffle + gzip + fletcher32"
    assert repr(Chunks(smooth(5), (5,), []).decoder) == "no filter"
    made.decoder = pickle.loads(pickle.dumps(made.decoder))
    assert repr(made.decoder) == "shuffle + gzip + fletcher32"
    assert made.decode(mask, stored) == smooth(100, "f4").tobytes()


@pytest.mark.parametrize("pipeline", [["fletcher32", "shuffle", "gzip"], ["bitshuffle"], ["shuffle", "lz4"]], ids=id_of)
def test_many_threads_share_one_decoder(pipeline):
    made = Chunks(smooth(40 * 5000, "u4").reshape(40, 5000), (1, 5000), pipeline)
    stored = list(made.stored())

    def work(number: int) -> bool:
        place, mask, data = stored[number % 40]
        return made.decode(mask, data) == smooth(40 * 5000, "u4")[place[0] * 5000 :][:5000].tobytes()

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(200)))


# Damage


def is_refused(made: Chunks, mask: int, stored: bytes) -> bool:
    try:
        made.decode(mask, stored)
    except DecodeError:
        return True
    return False


@pytest.mark.parametrize("pipeline", PIPELINES, ids=id_of)
def test_cut_or_longer_bytes_are_errors(pipeline):
    made, mask, stored = one_chunk(pipeline, smooth(300, "u2"))
    assert made.decode(mask, stored) == smooth(300, "u2").tobytes()
    for length in range(len(stored)):
        assert is_refused(made, mask, stored[:length]), length
    for more in (b"\0", b"\xff", stored[:1], stored[:4], stored + b".", bytes(1000)):
        assert is_refused(made, mask, stored + more), more
    assert is_refused(made, mask, bytes(made.decoder.max_stored_bytes + 1))


def check_flips(pipeline: list[str]) -> None:
    made, mask, stored = one_chunk(pipeline, smooth(300, "u2"))
    for bit in range(8 * len(stored)):
        flipped = bytearray(stored)
        flipped[bit // 8] ^= 1 << bit % 8
        assert is_refused(made, mask, bytes(flipped)) or made.decode(mask, flipped) == smooth(300, "u2").tobytes(), bit


SUMMED = [pipeline for pipeline in PIPELINES if {"gzip", "fletcher32"} & set(pipeline)]


@pytest.mark.parametrize("pipeline", SUMMED, ids=id_of)
def test_no_flipped_bit_passes_a_checksum(pipeline):
    check_flips(pipeline)


@pytest.mark.parametrize("pipeline", [each for each in PIPELINES if each not in SUMMED], ids=id_of)
def test_damage_without_a_checksum_is_an_error_or_a_whole_chunk(pipeline):
    """And nothing else: no other exception, no crash."""
    rng = np.random.default_rng(2)
    made, mask, stored = one_chunk(pipeline, smooth(3000, "u2"))
    for _ in range(200):
        damaged = bytearray(stored)
        for place in rng.integers(0, len(stored) if rng.integers(2) else min(len(stored), 40), rng.integers(1, 9)):
            damaged[place] = rng.choice([0, 1, 127, 128, 255, rng.integers(256)])
        assert is_refused(made, mask, bytes(damaged)) or len(made.decode(mask, bytes(damaged))) == 6000


ZEROS = imagecodecs.lz4_encode(bytes(50))
MESSAGES = [
    ([], b"x" * 99, r"stored in 99 bytes, but 100 are expected"),
    (["gzip"], b"", r"stored in 0 bytes, but 1 to "),
    (["fletcher32"], b"x" * 100, r"stored in 100 bytes, but 104 are expected"),
    (["fletcher32"], bytes(101) + b"abc", r"the checksum of 100 bytes is [0-9a-f]{8}, but 63626100 is stored"),
    (["fletcher32", "gzip"], zlib.compress(bytes(100)), r"gzip gives 100 bytes, but 104 are expected"),
    (["gzip", "fletcher32"], b"abc", r"fletcher32: 3 bytes are too few for a checksum"),
    (["gzip"], zlib.compress(bytes(99)), r"gzip gives 99 bytes, but 100 are expected"),
    (["gzip"], zlib.compress(bytes(100)) + b"..", r"gzip: bytes follow the end"),
    (["zstd"], b"PK\3\4....", r"zstd: starts with 504b0304"),
    (["zstd"], imagecodecs.zstd_encode(bytes(101)), r"zstd: does not decode into 100 bytes"),
    (["lz4"], struct.pack(">QI", 1 << 60, 100), r"lz4: claims 1152921504606846976 bytes, more than the 100 "),
    (["lz4"], struct.pack(">QI", 100, 0), r"lz4: .* 100 bytes in blocks of 0"),
    (
        ["lz4"],
        struct.pack(">QII", 100, 100, 1 << 31),
        r"lz4: block 0 is empty or ends at byte 2147483664, beyond the 16 bytes",
    ),
    (["lz4"], struct.pack(">QII", 100, 100, 100) + bytes(102), r"lz4: 2 bytes follow its last block"),
    (["lz4"], struct.pack(">QII", 100, 100, 0), r"lz4: block 0 is empty or ends at byte 16"),
    (["bitshuffle"], struct.pack(">QI", 100, 12), r"bitshuffle: blocks of 12 bytes, 100 in total"),
    (
        ["bitshuffle"],
        struct.pack(">QII", 100, 96, len(ZEROS)) + ZEROS + bytes(4),
        r"its blocks decode to 50 bytes, but 96 are",
    ),
    (["bitshuffle, zstd"], struct.pack(">QII", 100, 96, 4) + b"PK.." + bytes(4), r"bitshuffle: a block does not start"),
    (["bitshuffle alone"], bytes(99), r"stored in 99 bytes, but 100 are expected"),
    (["shuffle", "shuffle"], bytes(100), r"shuffle: its element size is missing"),
    (
        ["blosc, lz4, 0"],
        struct.pack("<4B3I", 2, 1, 2, 1, 1 << 31, 100, 16),
        r"blosc: claims 2147483648 bytes, more than the 100 ",
    ),
    (["blosc, lz4, 0"], struct.pack("<4B3I", 2, 1, 2, 1, 100, 100, 99), r"blosc: 16 bytes are stored, .* claims 99"),
    (["blosc, lz4, 0"], struct.pack("<4B3I", 2, 1, 2, 1, 100, 101, 16), r"blosc: its header is invalid"),
]


@pytest.mark.parametrize(("pipeline", "stored", "message"), MESSAGES)
def test_messages(pipeline, stored, message):
    with pytest.raises(DecodeError, match=message):
        Chunks(smooth(100), (100,), pipeline).decode(0, stored)


def test_bombs():
    bomb = zlib.compress(bytes(64 << 20))
    decoders = [Chunks(smooth(100_000), (100_000,), pipeline) for pipeline in (["gzip"], ["gzip", "gzip"])]
    tracemalloc.start()
    try:
        for made in decoders:
            with pytest.raises(DecodeError):
                made.decode(0, bomb)
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "wrong", [np.zeros(99, "u1"), np.zeros(25, "u4"), np.zeros(200, "u1")[::2], np.zeros(100, "i1")]
)
def test_only_takes_memory_for_one_chunk(wrong):
    made, mask, stored = one_chunk(["gzip"], smooth(100))
    with pytest.raises(ValueError, match=r"must be contiguous uint8 \(100,\)"):
        made.decoder.decode(memoryview(stored), mask, wrong)


# Fletcher-32


def test_checksums_of_old_versions():
    data = values((101,), np.uint8)
    made, mask, stored = one_chunk(["fletcher32"], data)
    old = stored[:-4] + bytes(stored[-4:][place] for place in (1, 0, 3, 2))
    assert old != stored
    chunk_as_stored(["fletcher32"], data, old).check()
    for order in itertools.permutations(range(4)):
        if order not in ((0, 1, 2, 3), (1, 0, 3, 2)):
            assert is_refused(made, mask, stored[:-4] + bytes(stored[-4:][place] for place in order))


# Single filters


def test_a_bitshuffled_block_that_compresses_to_its_own_size():
    """The LZ4 filter would take it for one that is not compressed."""
    for repeated in range(200):
        planes = values((8192,), np.uint8)
        planes[4000 : 4000 + repeated] = planes[:repeated]
        block = imagecodecs.lz4_encode(planes)
        if len(block) == 8192:
            break
    assert len(block) == 8192
    stored = struct.pack(">QII", 8192, 8192, 8192) + block
    made = chunk_as_stored(["bitshuffle"], smooth(8192), stored)
    made.check()
    assert made.decode(0, stored) == imagecodecs.bitshuffle_decode(planes.tobytes())


def test_unshuffling_ignores_what_the_elements_are():
    """The size of an element is the filter's, and what follows whole elements stays."""
    for item in (1, 2, 3, 4, 7, 8, 9, 200, 2000):
        for length in (1, 7, 8, 40, 1001):
            data = values((length,), np.uint8, seed=item)
            whole = length // item * item
            shuffled = np.concatenate((data[:whole].reshape(-1, item).T.ravel(), data[whole:]))
            got = codecs._unshuffle(shuffled, (item,), np.empty(length, np.uint8))
            np.testing.assert_array_equal(got, data)


# What is left to HDF5


@pytest.mark.parametrize(
    ("pipeline", "dtype", "message"),
    [
        (["blosc2"], "u1", r"filter blosc2 \(32026\) is decoded only by HDF5"),
        (["unknown"], "u1", r"filter '.*' \(40000\) is decoded only by HDF5"),
        (["gzip", "bitshuffle"], "S5", r"filter bitshuffle \(32008\) with parameters .* is decoded only by HDF5"),
    ],
)
def test_what_is_left_to_hdf5(pipeline, dtype, message):
    with pytest.raises(NoDecoder, match=message):
        Chunks(values((10,), dtype), (10,), pipeline)


def test_filters_of_numbers_are_left_to_hdf5():
    with h5py.File("other chunks", "w", driver="core", backing_store=False) as file:
        made = file.create_dataset("x", data=smooth(10), chunks=(10,), scaleoffset=0)
        with pytest.raises(NoDecoder, match=r"filter scaleoffset \(6\)"):
            ChunkDecoder(made.id.get_create_plist(), 10, 1)


@pytest.mark.parametrize(("chunk_bytes", "item_bytes"), [(0, 1), (10, 4), (10, 0), ((1 << 30) + 4, 4)])
def test_sizes_that_are_left_to_hdf5(chunk_bytes, item_bytes):
    with pytest.raises(NoDecoder, match=rf"chunks .*{chunk_bytes} bytes"):
        ChunkDecoder(h5py.h5p.create(h5py.h5p.DATASET_CREATE), chunk_bytes, item_bytes)


@pytest.mark.parametrize("name", ["zstd", "lz4", "blosc, lz4, 1", "bitshuffle", "bitshuffle, zstd"])
def test_without_imagecodecs_it_says_what_to_install(no_imagecodecs, name):
    with pytest.raises(NoDecoder, match=r'needs imagecodecs with \w+: pip install "h5chunk\[codecs\]"'):
        Chunks(smooth(10), (10,), [name])


@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize("dtype", ["u1", "u2", "f4", "f8", "S3"])
@pytest.mark.parametrize(
    "pipeline", [["gzip"], ["shuffle", "gzip", "fletcher32"], ["fletcher32"], ["shuffle", "lzf"], ["lzf", "fletcher32"]]
)
def test_filters_of_hdf5_and_h5py_need_no_imagecodecs(no_imagecodecs, monkeypatch, pipeline, dtype, is_native):
    if not is_native:
        monkeypatch.setenv("H5CHUNK_NATIVE", "0")
    elif not filters.available():
        pytest.skip("the library was not built")
    for count in 1, 2, 719, 5001:
        some = smooth(8 * count).view("u1")[: count * np.dtype(dtype).itemsize].view(dtype)
        for array in some, np.zeros(count, dtype):
            if not is_native and "lzf" in pipeline:
                with pytest.raises(NoDecoder, match="needs imagecodecs with lzf_decode"):
                    one_chunk(pipeline, array)
                continue
            made, mask, stored = one_chunk(pipeline, array)
            assert made.decode(mask, stored) == array.tobytes()
            for wrong in (stored[:-5], stored + b"x") if pipeline[0] != "lzf" else ():
                with pytest.raises(DecodeError):
                    made.decode(mask, wrong)


@pytest.mark.parametrize("compression", ["gzip", "lzf"])
def test_a_loader_reads_gzip_and_lzf_without_imagecodecs_and_a_warning(no_imagecodecs, tmp_path, compression):
    data = smooth(400 * 16, "i4").reshape(400, 16)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        options = {"chunks": (7, 16), "compression": compression, "shuffle": True, "fletcher32": True}
        file.create_dataset("images", data=data, **options)
    with h5chunk.ChunkLoader(tmp_path / "a.h5", 64, shuffle=False) as loader:
        np.testing.assert_array_equal(np.concatenate([np.asarray(batch[0]).copy() for batch in loader]), data)


def test_a_decoder_that_travels_to_where_imagecodecs_is_not(request):
    made, mask, stored = one_chunk(["zstd"], smooth(100))
    request.getfixturevalue("no_imagecodecs")
    with pytest.raises(DecodeError, match=r"needs imagecodecs with zstd_decode: pip install"):
        made.decode(mask, stored)


def test_an_imagecodecs_built_without_a_codec(monkeypatch):
    monkeypatch.setattr(imagecodecs.ZSTD, "available", False)
    with libraries_found_again():
        with pytest.raises(NoDecoder, match="zstd_decode"):
            Chunks(smooth(10), (10,), ["zstd"])
        Chunks(smooth(10), (10,), ["lzf"])
