"""Damaged files: a short version of mutated.py, that it notices what must not be, and what it once found."""

from __future__ import annotations

import mmap
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import h5py
import numpy as np
import pytest
from support.attack_files import read_all
from support.children import Outcome, in_children
from support.good_files import make_good
from support.hdf5_blocks import blocks, lookup3, seal
from torture.mutated import Findings, Torture, judge

import h5chunk
from h5chunk.errors import H5ChunkError
from h5chunk.store.read.reader import H5Reader
from h5chunk.tools.measure.disk import locate
from h5chunk.tools.repack.repack import repack
from h5chunk.tools.verify.verify import verify

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="forks, limits and counts as only Linux can"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]
KINDS = {
    *("superblock", "OHDR", "OCHK", "BTHD", "BTIN", "BTLF", "FRHP", "FHIB", "FHDB", "FSHD", "FSSE", "FAHD", "FADB"),
    *("FADB page", "EAHD", "EAIB", "EASB", "EADB", "EADB page", "SMTB", "SMLI", "GCOL"),
}


def misbehave(what: str) -> str:
    if what == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if what == "hang":
        time.sleep(60)
    if what == "spin":
        while True:
            pass
    if what == "raise":
        raise KeyError("images")
    if what == "grow":  # in new memory: the heap that a child inherits may have as much to give
        memory = np.frombuffer(mmap.mmap(-1, 100 << 20), "u1")
        memory.fill(1)
        return str(len(memory))
    return what


def test_children_that_misbehave_are_told_apart() -> None:
    items = ["fine", "crash", "fine", "hang", "raise", "grow", "fine"]
    found = list(in_children(misbehave, items, timeout_s=1.0, memory_bytes=1 << 30))
    assert [item for item, _ in found] == items
    assert [outcome.ended for _, outcome in found] == ["", "SIGSEGV", "", "timeout", "raised", "", ""]
    assert "KeyError: 'images'" in found[4][1].value
    assert 100 << 20 <= found[5][1].peak_bytes < 200 << 20 and found[6][1].peak_bytes < 10 << 20


def test_limits_of_children() -> None:
    [(_, spun)] = in_children(misbehave, ["spin"], cpu_s=0)
    [(_, grown)] = in_children(misbehave, ["grow"], memory_bytes=10 << 20)
    assert spun.ended == "SIGXCPU" and grown.ended == "raised" and "allocate memory" in grown.value


@pytest.mark.parametrize(
    ("outcome", "what"),
    [
        (Outcome("SIGSEGV"), "crashes"),
        (Outcome("timeout"), "hangs"),
        (Outcome("SIGXCPU"), "hangs"),
        (Outcome("raised", "KeyError"), "not our errors"),
        (Outcome("", {"verify": "whole", "h5py": "same"}, 500 << 20), "over 400 MiB"),
        (Outcome("", {"verify": "whole", "h5py": "other"}), "wrong and verify says whole"),
        (Outcome("", {"verify": "damaged", "h5py, checked": "other"}), "wrong though checked"),
        (Outcome("", {"verify": "damaged", "h5py": "other"}), ""),
    ],
)
def test_what_must_not_be_is_noticed(outcome: Outcome, what: str) -> None:
    found = Findings()
    judge(found, "a file", True, outcome)
    assert [each.split(":")[0] for each in found.bad] == ([what] if what else [])


def test_every_kind_of_block_is_sealed(tmp_path: Path) -> None:
    """All checksums of good files fit; and where a block is changed, only its own does not."""
    assert hex(lookup3(b"Four score and seven years ago")) == "0x17770551"  # of its author
    kinds = set()
    for good in make_good(tmp_path):
        data = bytearray(good.data)
        assert seal(data) == 0, good.name
        for block in {block.kind: block for block in blocks(data)}.values():
            kinds.add(block.kind)
            at = block.start + 4 if block.kind.isupper() and block.kind != "GCOL" else block.stop - 1
            data[at] ^= 1  # the version, or a value: nothing that says where other blocks are
            assert seal(data) == 1 and data != good.data
            data[at] ^= 1
            assert seal(data) == 1 and data == good.data, (good.name, block)
    assert kinds == KINDS


def said(look: Callable[[Path], object], path: Path) -> str:
    """What a tool says of a file, or its error, if that is one of ours."""
    try:
        return str(look(path))
    except H5ChunkError as error:
        return str(error)


LOOKS = {"read": partial(said, read_all), "info": partial(said, h5chunk.info), "verify": partial(said, h5chunk.verify)}


def make_damaged(path: Path, signature: bytes, at: int, libver: str = "latest") -> Path:
    """A good file but for a byte behind the first such signature."""
    with h5py.File(path, "w", libver=libver) as file:
        file.create_dataset("images", data=np.ones((40, 9), "u1"), chunks=(4, 3), maxshape=(None, None))
        file["group/labels"] = np.arange(40)
    data = bytearray(path.read_bytes())
    data[data.index(signature) + at] ^= 1
    path.write_bytes(data)
    return path


def test_a_damaged_index_of_chunks_is_no_crash(tmp_path: Path) -> None:
    """HDF5 crashes on it when it is asked how much room the index takes."""
    path = make_damaged(tmp_path / "a.h5", b"BTHD", 20)
    for name, look in LOOKS.items():
        [(_, outcome)] = in_children(look, [path])
        assert outcome.ended == "" and (name == "info" or "images" in outcome.value), outcome


def test_objects_are_told_apart_without_what_hdf5_crashes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`h5o.get_info` reads the indexes of chunks and of attributes: a damaged one is a segmentation fault."""
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("images", data=np.ones((40, 9), "u1"), chunks=(4, 9))
        file["group/labels"] = np.arange(40)
    monkeypatch.delattr(h5py.h5o, "get_info")
    assert verify(path).ok
    assert locate(H5Reader(path))[-1].first_sample == 36


def test_attributes_that_are_fewer_than_they_claim_are_no_crash(tmp_path: Path) -> None:
    """HDF5 crashes when it lists them."""
    [good] = make_good(tmp_path, ["images, gzip"])
    data = bytearray(good.data)
    data[data.index(b"BTHD\0\x08") + 24] = 3  # of 11
    assert seal(data) == 2  # its leaf as well, which has as many records as it says
    good.path.write_bytes(data)
    for look in LOOKS.values():
        [(_, outcome)] = in_children(look, [good.path])
        assert outcome.ended == "", outcome


CRASHES = {
    "an attribute that is said to be shared": (b"BTLF\0\x08", 6 + 5 * 17 + 8, 2),  # the flags of a record
    "an index of attributes whose records have no bytes": (b"BTHD\0\x08", 10, 0),
}


@pytest.mark.parametrize("what", CRASHES)
def test_files_that_crash_hdf5_are_errors(tmp_path: Path, what: str) -> None:
    """With HDF5 2.0.0, each crashes the process that opens it."""
    [good] = make_good(tmp_path, ["images, gzip"])
    signature, offset, value = CRASHES[what]
    data = bytearray(good.data)
    data[data.index(signature) + offset] = value
    assert seal(data)
    good.path.write_bytes(data)
    readers = {"dataset": h5chunk.ChunkDataset, "loader": partial(h5chunk.ChunkLoader, batch_size=4)}
    tools = {"info": h5chunk.info, "verify": h5chunk.verify, "tune": partial(h5chunk.tune, budget_s=0.1)}
    for name, look in {**readers, **tools, "repack": lambda path: repack(path, tmp_path / "out.h5")}.items():
        [(_, outcome)] = in_children(partial(said, look), [good.path])
        assert outcome.ended == "", (name, outcome)
        if h5py.version.hdf5_version == "2.0.0":
            assert f"{good.path}: this file crashes HDF5" in outcome.value, (name, outcome)


@pytest.mark.parametrize("look", [h5chunk.info, h5chunk.verify, h5chunk.ChunkDataset])
def test_a_group_that_cannot_be_listed(tmp_path: Path, look: Callable[[Path], object]) -> None:
    path = make_damaged(tmp_path / "a.h5", b"SNOD", 0, "earliest")
    text = said(look, path)
    assert "cannot list its members" in text or "is damaged" in text


def test_mutated_files(tmp_path: Path) -> None:
    found = Torture(tmp_path, seed=5, sealed=0.5).run(range(20))
    assert found.cases == 20 and not found.bad, found.bad
    assert found.counts["refused by all"] > 3
