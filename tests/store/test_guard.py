"""Files that somebody made to do harm: each is refused by a message of its own, and nothing is followed."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from support.attack_files import ATTACKS, SAME, N, make_good, read_all
from support.foreign import make_images, values

import h5chunk
from h5chunk.errors import FieldError, FileError, OptionError, TrustError
from h5chunk.store.format.header import read_header
from h5chunk.store.format.spec import create_file
from h5chunk.store.hdf5.guard import Guard
from h5chunk.store.read.reader import H5Reader
from h5chunk.tools.info.info import info


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return make_good(tmp_path / "a.h5")


def test_the_good_file_is_read(good: Path) -> None:
    with h5py.File(good) as file:
        assert (read_all(good) == file["images"][:]).all()
    assert info(good).refused == [] and h5chunk.verify(good).ok


@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_are_refused(good: Path, name: str) -> None:
    attack = ATTACKS[name]
    attack.make(good)
    with pytest.raises(FileError, match=f"(?s)a\\.h5.*({attack.message})"):
        read_all(good)


@pytest.mark.parametrize("name", ATTACKS)
def test_info_and_verify_survive_them(good: Path, name: str) -> None:
    """They say what they do not look at; only what is no file of HDF5, or of ours, is an error."""
    attack = ATTACKS[name]
    attack.make(good)
    for look in (info, h5chunk.verify):
        try:
            report = look(good)
        except FileError as error:
            assert re.search(attack.message, str(error), re.DOTALL)
        else:
            assert str(report) and report.to_json()


def test_verify_says_the_same(good: Path) -> None:
    seen = 0
    for name, attack in ATTACKS.items():
        path = make_good(good.with_name(f"{len(name)}-{name[:3]}.h5"))
        for left in ("pipe", "secret", "other.h5"):
            path.with_name(left).unlink(missing_ok=True)
        attack.make(path)
        try:
            found = h5chunk.verify(path).to_json()
        except FileError as error:
            found = str(error)
        seen += bool(re.search(attack.message.replace("'", "[\"']"), found.replace("\\", ""), re.DOTALL))
    assert seen >= len(ATTACKS) - 8  # types that are no fields, and damage that plain chunks do not show


def test_each_has_a_message_of_its_own() -> None:
    messages = [attack.message for attack in ATTACKS.values() if attack.message not in SAME]
    assert len(set(messages)) == len(messages) >= 28


FOLLOWED = ["soft link", "external link", "virtual dataset", "external storage"]


@pytest.mark.parametrize("name", FOLLOWED)
def test_plain_h5py_follows(good: Path, name: str) -> None:
    ATTACKS[name].make(good)
    with h5py.File(good) as file:
        assert file["images"][:].size >= N


@pytest.mark.parametrize("name", FOLLOWED)
def test_trusted_files_are_followed(good: Path, monkeypatch, name: str) -> None:
    monkeypatch.chdir(good.parent)
    ATTACKS[name].make(good)
    with h5py.File(good) as file:
        assert (read_all(good, trusted=True) == file["images"][:]).all()


def test_trusted_files_may_lead_anywhere(good: Path, tmp_path: Path) -> None:
    """As with h5py: into another folder, through another file."""
    (tmp_path / "data").mkdir()
    path = make_images(tmp_path / "data" / "a.h5", N, 4)
    with h5py.File(path.with_name("b.h5"), "w") as file:
        file["images"] = h5py.ExternalLink(str(good), "images")
    with h5py.File(path, "r+") as file:
        del file["images"]
        file["images"] = h5py.ExternalLink("b.h5", "images")
        file["nothing"] = h5py.ExternalLink("c.h5", "images")
    with h5py.File(good) as other:
        assert (read_all(path, trusted=True) == other["images"][:]).all()
    with pytest.raises(FieldError, match="'nothing' cannot be opened"):
        H5Reader(path, {"nothing": "nothing"}, trusted=True)


def test_a_filter_that_the_user_knows(good: Path) -> None:
    ATTACKS["unknown filter"].make(good)
    assert H5Reader(good, {"images": "images"}, trusted=True).num_samples == N


def test_trusted_is_true_or_false(good: Path) -> None:
    with pytest.raises(OptionError, match=r"trusted is .*: pass True to follow links"):
        H5Reader(good, trusted=good.parent)  # type: ignore[arg-type]


def test_groups_in_a_circle_are_walked_once(good: Path) -> None:
    with h5py.File(good, "r+") as file:
        file["group/inner"] = file["/"]
        file["group/again"] = file["images"]
        file["group/link"] = h5py.SoftLink("/images")
    with h5py.File(good) as file:
        found = dict(Guard(good).walk(file))
    assert sum(isinstance(item, h5py.Dataset) for item in found.values()) == 2
    assert isinstance(found["group/link"], TrustError)


def test_what_is_missing_is_said_without_following(good: Path) -> None:
    with h5py.File(good, "r+") as file:
        file["outside"] = h5py.ExternalLink("pipe", "/")
    os.mkfifo(good.with_name("pipe"))
    with pytest.raises(FieldError, match="has no dataset 'nothing'; it has images, labels:"):
        H5Reader(good, {"x": "nothing"})


def test_files_of_ours_pass(tmp_path: Path) -> None:
    from support.specification import spec

    create_file(tmp_path / "x.h5", spec())
    with h5py.File(tmp_path / "x.h5") as file:
        assert read_header(file) is not None


def test_partly_written_files_pass(tmp_path: Path) -> None:
    data = values((N, 50), "u1")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        dataset = file.create_dataset("images", (N, 50), "u1", chunks=(4, 50))
        dataset[:5] = data[:5]
    assert (read_all(tmp_path / "a.h5")[:5] == data[:5]).all()


def _zero_bytes(path: Path, dataset: str) -> None:
    """Make the second chunk of a dataset have 0 bytes in the B-tree of its chunks."""
    with h5py.File(path) as file:
        chunk = file[dataset].id.get_chunk_info(1)
    data = bytearray(path.read_bytes())
    key = struct.pack("<IIQQQ", chunk.size, chunk.filter_mask, chunk.chunk_offset[0], 0, chunk.byte_offset)
    at = data.index(key)
    data[at : at + 4] = bytes(4)
    path.write_bytes(data)


def _runs(path: Path) -> Any:
    return h5chunk.ChunkDataset(path, fields="t/1/x", lengths={"t/1/x": "n"})[0]


KINDS: dict[str, tuple[str, Any, Callable[[Path], Any]]] = {
    "ChunkDataset": ("t/1/x", "f4", lambda path: h5chunk.ChunkDataset(path, fields="t/1/x")[4]),
    "Keyed": ("t/1/x", "f4", lambda path: h5chunk.Keyed(path, "t/*/x")[1]),
    "Keyed through HDF5": ("t/1/x", ">f4", lambda path: h5chunk.Keyed(path, "t/*/x")[1]),
    "Windows": ("t/1/x", ">f4", lambda path: h5chunk.Windows(path, {"x": "t/*/x"}, 2)[19]),
    "Patches": ("t/1/x", ">f4", lambda path: h5chunk.Patches(path, {"x": "t/*/x"}, (2,))[12]),
    "values of runs": ("t/1/x", ">f4", _runs),
    "lengths of runs": ("n", "f4", _runs),
}


@pytest.mark.filterwarnings("ignore:.*read through h5py")
@pytest.mark.filterwarnings("ignore:.*index is rebuilt")
@pytest.mark.parametrize("kind", KINDS)
def test_a_chunk_of_no_bytes_is_an_error_for_all_kinds_of_samples(tmp_path: Path, kind: str) -> None:
    dataset, dtype, read = KINDS[kind]
    with h5py.File(tmp_path / "a.h5", "w", libver="earliest") as file:
        options = {"chunks": (4,), "compression": "gzip", "fletcher32": True}
        for number in range(3):
            file.create_dataset(f"t/{number}/x", data=np.arange(16, dtype=dtype) + number, **options)
        file.create_dataset("n", data=np.full(8, 2), **options)
    read(tmp_path / "a.h5")
    _zero_bytes(tmp_path / "a.h5", dataset)
    with pytest.raises(h5chunk.FileError, match=rf"a\.h5.*{dataset.removesuffix('/x')}.* 0 .*bytes"):
        read(tmp_path / "a.h5")
