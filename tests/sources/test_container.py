"""Bytes of samples out of folders and archives, and archives that are refused or damaged."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import re
import stat
import struct
import tarfile
import tracemalloc
import warnings
import zipfile
from pathlib import Path

import pytest
from support.faults import small
from support.listings import list_images

from h5chunk.errors import SampleError, SourceError
from h5chunk.sources.container import Container, Folder, open_archive
from h5chunk.sources.open import find_kind


def write_tar(path: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    with tarfile.open(path, "w") as archive:
        for member, data in members:
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def file_member(name: str, data: bytes) -> tuple[tarfile.TarInfo, bytes]:
    return tarfile.TarInfo(name), data


def link_member(name: str, target: str, kind: bytes) -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member, b""


def read_all(path: Path) -> dict[bytes, bytes]:
    listing = list_images(path)
    return {name: listing.container.read(i, name) for i, name in enumerate(listing.names)}


def check_refused(container: Container, name: bytes, reason: str) -> None:
    with pytest.raises(SampleError, match=reason):
        container.read(0, name)


# ---- folders


def test_folder_reads_files(tmp_path: Path) -> None:
    (tmp_path / "1.png").write_bytes(b"abc")
    assert Folder(tmp_path).read(0, b"1.png") == b"abc"


def test_folder_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty.png").touch()
    (tmp_path / "dir.png").mkdir()
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "broken.png").symlink_to("nowhere")
    (tmp_path / "big.png").write_bytes(b"12345")
    folder = Folder(tmp_path)
    check_refused(folder, b"empty.png", r"is empty \(0 bytes\)")
    check_refused(folder, b"dir.png", "is a folder, not a regular file")
    check_refused(folder, b"pipe.png", "is a named pipe, not a regular file")
    check_refused(folder, b"broken.png", "cannot be opened: No such file")
    small(monkeypatch, max_file_bytes=4)
    check_refused(folder, b"big.png", "has 5 bytes, over the limit of 4")


@pytest.mark.parametrize("change", ["grow", "shrink", "touch"])
def test_file_that_changes_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    path = tmp_path / "1.png"
    path.write_bytes(b"12345")
    pread = os.pread

    def changing(descriptor: int, count: int, offset: int) -> bytes:
        if change == "touch":
            os.utime(path, ns=(1, 1))
        elif path.stat().st_size == 5:
            os.truncate(path, 9 if change == "grow" else 2)
        return pread(descriptor, count, offset)

    monkeypatch.setattr(os, "pread", changing)
    check_refused(Folder(tmp_path), b"1.png", "changed while it was read")


# ---- zip


def write_zip(path: Path, method: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("a.png", b"abcdefgh" * 10)
        archive.writestr("b.png", b"12345678" * 10)
    return path


def test_later_of_two_members_of_one_name_counts(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, data in (("a.png", b"old"), ("b.png", b"b"), ("a.png", b"new"), ("./b.png", b"newer b")):
            archive.writestr(name, data)
    assert read_all(tmp_path / "x.zip") == {b"a.png": b"new", b"b.png": b"newer b"}
    write_tar(
        tmp_path / "x.tar", file_member("a.png", b"old"), file_member("b.png", b"b"), file_member("a.png", b"new")
    )
    assert read_all(tmp_path / "x.tar") == {b"a.png": b"new", b"b.png": b"b"}


def test_encrypted_zip_is_refused(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "x.zip")
    data = bytearray(path.read_bytes())
    central = data.index(b"PK\x01\x02")
    data[central + 8] |= 1  # flag bit 0: encrypted
    path.write_bytes(data)
    with pytest.raises(SourceError, match=r"x\.zip: is encrypted: decrypt it first"):
        list_images(path)


def test_method_that_is_not_read(tmp_path: Path) -> None:
    listing = list_images(write_zip(tmp_path / "x.zip", zipfile.ZIP_BZIP2))
    check_refused(listing.container, b"a.png", "compressed with zip method 12, but only stored and deflated")


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_damaged_zip_member_is_found_and_others_are_not_hurt(tmp_path: Path, method: int) -> None:
    path = write_zip(tmp_path / "x.zip", method)
    data = bytearray(path.read_bytes())
    data[30 + len("a.png") + 3] ^= 0xFF
    path.write_bytes(data)
    listing = list_images(path)
    check_refused(listing.container, b"a.png", "the archive is damaged|cannot be decompressed")
    assert listing.container.read(1, b"b.png") == b"12345678" * 10


def test_zip_member_that_inflates_to_more_than_it_says(tmp_path: Path) -> None:
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.png", bytes(10_000_000))
    data = bytearray(path.read_bytes())
    central = data.index(b"PK\x01\x02")
    data[central + 24 : central + 28] = struct.pack("<I", 100)
    path.write_bytes(data)
    container = list_images(path).container
    tracemalloc.start()
    try:
        check_refused(container, b"a.png", "does not match its length")
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_zip_member_that_claims_to_be_huge_takes_no_memory(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "x.zip")
    data = bytearray(path.read_bytes())
    central = data.index(b"PK\x01\x02")
    data[central + 20 : central + 24] = struct.pack("<I", 0xF0000000)
    path.write_bytes(data)
    check_refused(list_images(path).container, b"a.png", "occupies 4026531840 bytes in its archive, over the limit")
    data[central + 20 : central + 24] = struct.pack("<I", 1 << 29)
    path.write_bytes(data)
    tracemalloc.start()
    try:
        check_refused(list_images(path).container, b"a.png", "extends past the end of the file that contains it")
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_what_is_no_regular_file_in_a_zip_is_named(tmp_path: Path) -> None:
    link = zipfile.ZipInfo("a.png")
    link.create_system, link.external_attr = 3, (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr(link, "b.png")
        archive.writestr("b.png", b"b")
    listing = list_images(tmp_path / "x.zip")
    check_refused(listing.container, b"a.png", "is a link whose target is not a file in its archive")
    assert listing.container.read(1, b"b.png") == b"b"


def test_zip_whose_directory_claims_to_be_huge_takes_no_memory(tmp_path: Path) -> None:
    """As long as the file, but all of it a hole."""
    path, hole = write_zip(tmp_path / "x.zip"), 8 << 30
    data = path.read_bytes()
    with path.open("wb") as file:
        file.seek(hole)
        end = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, 2, 2, hole, 0)
        end += struct.pack("<4sLQL", b"PK\6\7", 0, hole, 1)
        file.write(end + data[data.index(b"PK\5\6") :][:8] + b"\xff" * 12 + b"\0\0")
    assert find_kind(path).kind == "images"
    with pytest.raises(SourceError, match="a header claims 8589934592 bytes, over the limit of 1073741824"):
        list_images(path)


def test_zip_without_local_header(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "x.zip")
    path.write_bytes(b"XX" + path.read_bytes()[2:])
    check_refused(list_images(path).container, b"a.png", "has no local header")


def test_zip_cut_short_or_with_a_broken_name(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "x.zip")
    whole = path.read_bytes()
    path.write_bytes(whole[:-30])
    with pytest.raises(SourceError, match=r"x\.zip: begins like a \.zip, .* incomplete, so copy or download it again"):
        list_images(path)
    data = bytearray(whole)
    central = data.index(b"PK\x01\x02")
    data[central + 9] |= 8  # flag bit 11: the name is UTF-8
    data[central + 46] = 0xFF
    path.write_bytes(data)
    with pytest.raises(SourceError, match=r"x\.zip: cannot be read as an archive \('utf-8'"):
        list_images(path)


def test_zip_behind_other_bytes(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "x.zip")
    path.write_bytes(b"#!/bin/sh\n" * 100 + path.read_bytes())
    assert read_all(path)[b"b.png"] == b"12345678" * 10


# ---- tar


def test_links_in_a_tar_are_followed(tmp_path: Path) -> None:
    path = write_tar(
        tmp_path / "x.tar",
        link_member("b/early.png", "../a/1.png", tarfile.SYMTYPE),
        file_member("a/1.png", b"one"),
        link_member("a/2.png", "a/1.png", tarfile.LNKTYPE),
        link_member("b/3.png", "/etc/hostname", tarfile.SYMTYPE),
    )
    listing = list_images(path)
    assert list(listing.names) == [b"a/1.png", b"a/2.png", b"b/3.png", b"b/early.png"]
    assert [listing.container.read(i, b"") for i in (0, 1, 3)] == [b"one"] * 3
    with pytest.raises(SampleError, match="is a link whose target is not a file in its archive"):
        listing.container.read(2, b"b/3.png")


def test_links_to_links_in_a_tar(tmp_path: Path) -> None:
    path = write_tar(
        tmp_path / "x.tar",
        link_member("1.png", "2.png", tarfile.SYMTYPE),
        link_member("2.png", "3.png", tarfile.SYMTYPE),
        file_member("3.png", b"three"),
        link_member("4.png", "5.png", tarfile.SYMTYPE),
        link_member("5.png", "4.png", tarfile.SYMTYPE),
    )
    listing = list_images(path)
    assert [listing.container.read(i, b"") for i in range(3)] == [b"three"] * 3
    for index in (3, 4):
        with pytest.raises(SampleError, match="is a link whose target is not a file in its archive"):
            listing.container.read(index, b"")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (tarfile.FIFOTYPE, "is a named pipe, not a regular file"),
        (tarfile.CHRTYPE, "is a character device, not a regular file"),
        (tarfile.BLKTYPE, "is a block device, not a regular file"),
        (tarfile.GNUTYPE_SPARSE, "is a sparse file, stored without its zeros, not a regular file"),
        (b"Z", "is of an unknown type, not a regular file"),
    ],
)
def test_what_is_no_regular_file_in_a_tar_is_named(tmp_path: Path, kind: bytes, reason: str) -> None:
    path = write_tar(tmp_path / "x.tar", link_member("1.png", "", kind), link_member("2.png", "1.png", tarfile.SYMTYPE))
    listing = list_images(path)
    check_refused(listing.container, b"1.png", reason)
    with pytest.raises(SampleError, match=reason):
        listing.container.read(1, b"2.png")


def test_names_in_a_tar_that_are_not_utf8(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar", "w", format=tarfile.GNU_FORMAT, encoding="latin-1") as archive:
        member, data = file_member("caf\xe9.png", b"x")
        member.size = 1
        archive.addfile(member, io.BytesIO(data))
    assert read_all(tmp_path / "x.tar") == {b"caf\xe9.png": b"x"}


@pytest.mark.parametrize("damage", ["header", "cut", "cut at header", "no end"])
def test_damaged_tar_is_refused_and_no_sample_lost(tmp_path: Path, damage: str) -> None:
    path = write_tar(tmp_path / "x.tar", *(file_member(f"{i}.png", b"x" * 700) for i in range(5)))
    data = bytearray(path.read_bytes())
    third = 2 * (512 + 1024)
    if damage == "header":
        data[third + 3] ^= 0xFF
    path.write_bytes(data[: {"cut": third + 700, "cut at header": third + 100, "no end": third}.get(damage)])
    with pytest.raises(SourceError, match=r"x\.tar: cannot be read as an archive .*: it is probably incomplete"):
        list_images(path)


def test_tar_with_a_header_that_claims_to_be_huge_takes_no_memory(tmp_path: Path) -> None:
    """The file is as long as that, but all of it is a hole."""
    member = tarfile.TarInfo("x")
    member.type, member.size = tarfile.XHDTYPE, 8 << 30
    path = tmp_path / "x.tar"
    path.write_bytes(member.tobuf(tarfile.GNU_FORMAT))
    os.truncate(path, 9 << 30)
    with pytest.raises(SourceError, match="a header claims 8589934592 bytes, over the limit of 1048576"):
        list_images(path)


def test_tar_with_a_member_of_fewer_bytes_than_none(tmp_path: Path) -> None:
    member = tarfile.TarInfo("1.png")
    member.size = -1
    (tmp_path / "x.tar").write_bytes(member.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    with pytest.raises(SourceError, match="a member has the invalid size -1"):
        list_images(tmp_path / "x.tar")


def test_tar_with_a_zip_in_it_is_a_tar(tmp_path: Path) -> None:
    inner = write_zip(tmp_path / "inner.zip").read_bytes()
    path = write_tar(tmp_path / "x.tar", file_member("1.png", b"x"), file_member("inner.zip", inner))
    assert read_all(path) == {b"1.png": b"x"}


@pytest.mark.parametrize("mode", ["w:gz", "w:bz2", "w:xz"])
def test_compressed_tar_is_refused(tmp_path: Path, mode: str) -> None:
    with tarfile.open(tmp_path / "x.tar.z", mode) as archive:
        archive.addfile(tarfile.TarInfo("1.png"))
    with pytest.raises(SourceError, match=r"compressed as a whole.*decompress it first"):
        list_images(tmp_path / "x.tar.z")


# ---- both


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"hello", "is not a folder, .zip or .tar of images"),
        (b"\xff\xd8\xff\xe0", "is not a folder, .zip or .tar of images"),
        (gzip.compress(b"x", mtime=0)[1:], "is not a folder, .zip or .tar of images"),
        (b"", "is empty (0 bytes): copy or download it again"),
        (b"7z\xbc\xaf\x27\x1c", "is a .7z archive: unpack it"),
        (b"Rar!\x1a\x07\x01", "is a .rar archive: unpack it"),
        (
            b"version https://git-lfs.github.com/spec/v1",
            "is a pointer of Git LFS instead of the data: run git lfs pull",
        ),
        (b"<!doctype html>", "is text, such as the web page of an error or a login"),
    ],
)
def test_file_that_is_no_archive(tmp_path: Path, data: bytes, what: str) -> None:
    (tmp_path / "x.zip").write_bytes(data)
    with pytest.raises(SourceError, match=rf"x\.zip: {re.escape(what)}"):
        list_images(tmp_path / "x.zip")


def test_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SourceError, match="neither a folder nor a regular file"):
        open_archive(tmp_path / "pipe")


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_archive_travels_and_notices_that_it_changed(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x"
    write_zip(path) if kind == "zip" else write_tar(path, file_member("a.png", b"abcdefgh" * 10))
    container = list_images(path).container
    assert container.read(0, b"a.png") == b"abcdefgh" * 10
    copy = pickle.loads(pickle.dumps(container))
    assert copy.read(0, b"a.png") == b"abcdefgh" * 10
    os.utime(path, ns=(1, 1))
    check_refused(copy, b"a.png", "the file that contains it changed meanwhile")
    third = pickle.loads(pickle.dumps(container))
    path.unlink()
    check_refused(third, b"a.png", "cannot be read: No such file")


def test_tar_that_is_cut_after_it_was_listed(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", file_member("a.png", b"x" * 2000))
    container = list_images(path).container
    status = path.stat()
    with path.open("r+b") as file:  # same size and time, so that only the bytes can tell
        file.truncate(1000)
    container._stamp = (status.st_dev, status.st_ino, 1000, path.stat().st_mtime_ns)  # type: ignore[attr-defined]
    check_refused(container, b"a.png", "extends past the end of the file that contains it")
