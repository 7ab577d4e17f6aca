"""Read the encoded bytes of images from a folder, or from an archive without unpacking it.

A container is sent to worker processes, so it opens files only when bytes are requested. Members of an archive are read
with ``pread`` at their offsets in the archive, so that workers do not share a file position.
"""

from __future__ import annotations

import io
import os
import posixpath
import stat
import struct
import tarfile
import zipfile
import zlib
from array import array
from pathlib import Path

import numpy as np

from h5chunk.errors import SampleError, SourceError, printable
from h5chunk.stamp import source_stamp, stamp_of

MAX_FILE_BYTES = 1 << 30  # of an encoded image
MAX_DIRECTORY_BYTES = 1 << 30  # of a zip directory: about 15 million members, which need ten times as much memory
MAX_HEADER_BYTES = 1 << 20  # of the header of a tar member
SPARSE, UNKNOWN = 1, 2  # in addition to the file types of `stat`
MAX_LINKS = 40  # length of a chain of links that is followed
KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a link whose target is not a file in its archive",
    SPARSE: "a sparse file, stored without its zeros",
    UNKNOWN: "of an unknown type",
}
DAMAGES = (
    tarfile.TarError, zipfile.BadZipFile, zlib.error, struct.error, EOFError, ValueError, OverflowError,
    NotImplementedError, RuntimeError,
)  # fmt: skip
PACKED_MAGICS = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")  # first bytes of gzip, bzip2, xz and zstd
ZIP_MAGICS = (b"PK\x03\x04", b"PK\x07\x08")
OTHERS = (  # first bytes of other files that are called archives, and what to do
    (b"7z\xbc\xaf\x27\x1c", "is a .7z archive: unpack it (7z x), and convert the folder"),
    (b"Rar!\x1a\x07", "is a .rar archive: unpack it (unrar x), and convert the folder"),
    (b"version https://git-lfs", "is a pointer of Git LFS instead of the data: run git lfs pull"),
    (b"<", "is text, such as the web page of an error or a login, instead of an archive: download it again"),
)
ZIP_UNIX = 3  # code of Unix as the operating system that made a zip
IN_TAR = -1  # in addition to the compression methods of `zipfile`
_TAR_KINDS = {
    **dict.fromkeys(tarfile.REGULAR_TYPES, stat.S_IFREG),
    tarfile.FIFOTYPE: stat.S_IFIFO,
    tarfile.CHRTYPE: stat.S_IFCHR,
    tarfile.BLKTYPE: stat.S_IFBLK,
    tarfile.DIRTYPE: stat.S_IFDIR,
    tarfile.SYMTYPE: stat.S_IFLNK,
    tarfile.LNKTYPE: stat.S_IFLNK,
}
ZIP_LOCAL_HEADER = struct.Struct("<26x2H")  # unpacks the lengths of the name and extra field, which follow the header


class Folder:
    """Image files in a folder and its subfolders."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = os.fsencode(root)

    def select(self, members: np.ndarray) -> None:
        """Do nothing, because files in a folder are read by name rather than by index."""

    def stamp(self, index: int, name: bytes) -> tuple[int, ...]:
        try:
            return source_stamp(os.path.join(self._root, name))[-3:]
        except OSError as error:
            return -1, error.errno or 0, 0

    def read(self, index: int, name: bytes) -> bytes:
        try:
            descriptor = os.open(os.path.join(self._root, name), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise SampleError(f"cannot be opened: {error.strerror}") from None
        try:
            before = os.fstat(descriptor)
            _check_member(stat.S_IFMT(before.st_mode), before.st_size)
            data = read_at(descriptor, 0, before.st_size)
            if len(data) != before.st_size or stamp_of(os.fstat(descriptor)) != stamp_of(before):
                raise SampleError("changed while it was read")
            return data
        except OSError as error:
            raise SampleError(f"cannot be read: {error.strerror}") from None
        finally:
            os.close(descriptor)


def _check_member(kind: int, num_bytes: int) -> None:
    """Raise SampleError unless the file type ``kind`` is `stat.S_IFREG`, a regular file, and its size is valid."""
    if kind != stat.S_IFREG:
        raise SampleError(f"is {KINDS.get(kind, KINDS[UNKNOWN])}, not a regular file")
    if num_bytes == 0:
        raise SampleError("is empty (0 bytes)")
    if num_bytes > MAX_FILE_BYTES:
        raise SampleError(f"has {num_bytes} bytes, over the limit of {MAX_FILE_BYTES} for one encoded image")


def read_at(descriptor: int, offset: int, num_bytes: int) -> bytes:
    """Read ``num_bytes`` at an offset, or fewer at the end of the file."""
    data = os.pread(descriptor, num_bytes, offset)
    while len(data) < num_bytes and (more := os.pread(descriptor, num_bytes - len(data), offset + len(data))):
        data += more
    return data


class StoredFile:
    """A file that is read at arbitrary offsets, and must not change meanwhile. Each process opens it once."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        self._opened: tuple[int, int] | None = None  # (process, descriptor)
        status = os.stat(path)
        self._stamp, self.whole_stamp = stamp_of(status), source_stamp(path)[-3:]
        self._num_bytes = status.st_size

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_opened": None}

    def read_at(self, offset: int, num_bytes: int) -> bytes:
        """Read ``num_bytes`` at an offset. Raises SampleError if the file is too short, changed, or unreadable."""
        if not 0 <= offset <= offset + num_bytes <= self._num_bytes:  # check before memory is allocated
            raise SampleError("extends past the end of the file that contains it")
        try:
            if self._opened is None or self._opened[0] != os.getpid():
                self._opened = os.getpid(), os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            data = read_at(self._opened[1], offset, num_bytes)
            if stamp_of(os.fstat(self._opened[1])) != self._stamp:
                raise SampleError("cannot be read, because the file that contains it changed meanwhile")
        except OSError as error:
            raise SampleError(f"cannot be read: {error.strerror}") from None
        if len(data) != num_bytes:
            raise SampleError("extends past the end of the file that contains it")
        return data

    def __del__(self) -> None:
        opened = getattr(self, "_opened", None)
        if opened is not None and opened[0] == os.getpid():
            os.close(opened[1])


class Archive(StoredFile):
    """A zip, or an uncompressed tar.

    ``index``, (num_members, 6) int64, has a row per member: its offset, its compressed and uncompressed sizes in bytes,
    its compression method (`IN_TAR` in a tar), CRC-32 and file type. The offset points to the local header in a zip,
    and to the data in a tar.
    """

    def __init__(self, path: Path, index: np.ndarray) -> None:
        super().__init__(path)
        self._index = index

    def select(self, members: np.ndarray) -> None:
        """Keep only ``members``, (num_samples,) int64, in this order. `stamp` and `read` then expect sample indices."""
        self._index = self._index[members]

    def stamp(self, index: int, name: bytes) -> tuple[int, ...]:
        """Return 64-bit integers that change when the bytes of sample ``index`` change; ``name`` is not used."""
        start, _, size, method, crc, _ = self._index[index].tolist()
        return (*self.whole_stamp, start, size) if method == IN_TAR else (size, crc)

    def read(self, index: int, name: bytes) -> bytes:
        """Read the bytes of sample ``index``; ``name`` is not used.

        Raises SampleError if the sample cannot be read, or the archive has changed.
        """
        start, stored, size, method, crc, kind = self._index[index].tolist()
        _check_member(kind, size)
        if method == IN_TAR:
            return self.read_at(start, size)
        if stored > MAX_FILE_BYTES:
            raise SampleError(f"occupies {stored} bytes in its archive, over the limit of {MAX_FILE_BYTES}")
        header = self.read_at(start, ZIP_LOCAL_HEADER.size)
        if not header.startswith(b"PK\x03\x04"):
            raise SampleError("has no local header in its archive: the archive is damaged")
        data = self.read_at(start + len(header) + sum(ZIP_LOCAL_HEADER.unpack(header)), stored)
        if method == zipfile.ZIP_DEFLATED:
            try:
                data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, size + 1)
            except zlib.error as error:
                raise SampleError(f"cannot be decompressed: {error}") from None
        elif method != zipfile.ZIP_STORED:
            raise SampleError(f"is compressed with zip method {method}, but only stored and deflated are supported")
        if len(data) != size or zlib.crc32(data) != crc:
            raise SampleError("does not match its length and checksum in the archive: the archive is damaged")
        return data


Container = Folder | Archive


def open_archive(path: Path) -> tuple[Archive, list[tuple[bytes, int]]]:
    """Open a zip or tar; return it with the name and index of each member. Names of folders end with a slash.

    Raises SourceError if the file cannot be read, is compressed as a whole, or is not an archive.
    """
    label = printable(path)
    if not path.is_file():
        raise SourceError(f"{label}: is neither a folder nor a regular file")
    try:
        with path.open("rb") as file:
            start = file.read(262)
        if start.startswith(PACKED_MAGICS):
            raise SourceError(
                f"{label}: is compressed as a whole, so its files cannot be read one by one: decompress it first "
                "(gunzip, bunzip2, unxz, unzstd)"
            )
        if start[257:262] == b"ustar":  # tried first, because a tar whose last member is a zip also looks like a zip
            return _with_slashes(*_open_tar(path))
        if zipfile.is_zipfile(path):
            return _with_slashes(*_open_zip(path))
    except SourceError:
        raise
    except OSError as error:
        raise SourceError(f"{label}: cannot be read: {error.strerror or error}") from None
    except DAMAGES as error:
        raise SourceError(
            f"{label}: cannot be read as an archive ({error}): it is probably incomplete or damaged, so copy or "
            "download it again"
        ) from None
    if start.startswith(ZIP_MAGICS):
        raise SourceError(
            f"{label}: begins like a .zip, but its directory at the end is damaged or missing: the file is probably "
            "incomplete, so copy or download it again"
        )
    what = "is empty (0 bytes): copy or download it again" if not start else "is not a folder, .zip or .tar of images"
    raise SourceError(f"{label}: {next((text for magic, text in OTHERS if start.startswith(magic)), what)}")


def _with_slashes(archive: Archive, names: list[tuple[bytes, int]]) -> tuple[Archive, list[tuple[bytes, int]]]:
    """Replace backslashes in names by slashes if no name has a slash: the archive was made on Windows."""
    if any(b"/" in name for name, _ in names):
        return archive, names
    return archive, [(name.replace(b"\\", b"/"), number) for name, number in names]


class BoundedFile(io.FileIO):
    """A file that refuses reads of more than ``limit`` bytes, which a damaged header may cause.

    Such a read raises an exception of type ``damage``. If ``limit`` is set to None, reads are unlimited.
    """

    def __init__(self, path: str | os.PathLike[str], limit: int, damage: type[Exception]) -> None:
        super().__init__(path)
        self.limit: int | None = limit
        self._damage = damage

    def read(self, size: int | None = -1) -> bytes:
        if size is not None and self.limit is not None and size > self.limit:
            raise self._damage(f"a header claims {size} bytes, over the limit of {self.limit}")
        return super().read(size) or b""


def _open_zip(path: Path) -> tuple[Archive, list[tuple[bytes, int]]]:
    with BoundedFile(path, MAX_DIRECTORY_BYTES, zipfile.BadZipFile) as file, zipfile.ZipFile(file) as archive:
        members = archive.infolist()
    if any(info.flag_bits & 1 for info in members):
        raise SourceError(f"{printable(path)}: is encrypted: decrypt it first")
    index = array("q")
    for info in members:
        kind = stat.S_IFMT(info.external_attr >> 16) if info.create_system == ZIP_UNIX else 0
        sizes = info.header_offset, info.compress_size, info.file_size
        index.extend((*sizes, info.compress_type, info.CRC, kind or stat.S_IFREG))
    rows = np.frombuffer(index, np.int64).reshape(-1, 6)
    names = [
        os.fsencode(info.filename if info.create_system == ZIP_UNIX else info.filename.replace("\\", "/"))
        for info in members
    ]
    return Archive(path, rows), [(name, i) for i, name in enumerate(names)]


def _open_tar(path: Path) -> tuple[Archive, list[tuple[bytes, int]]]:
    index = array("q")
    names: list[tuple[bytes, int]] = []
    links: dict[int, bytes] = {}  # the name of the target, by the index of the link
    with (
        BoundedFile(path, MAX_HEADER_BYTES, tarfile.ReadError) as file,
        tarfile.open(fileobj=file, mode="r:", errors="surrogateescape") as archive,
    ):
        for member in archive:
            archive.members = []  # type: ignore[attr-defined]  # tarfile would keep a kilobyte per member
            name = os.fsencode(member.name)
            if member.islnk() or member.issym():
                folder = b"" if member.islnk() else posixpath.dirname(name)
                links[len(names)] = posixpath.normpath(posixpath.join(folder, os.fsencode(member.linkname)))
            if member.size < 0:
                raise tarfile.ReadError(f"a member has the invalid size {member.size}")
            kind = SPARSE if member.issparse() else _TAR_KINDS.get(member.type, UNKNOWN)
            names.append((name + b"/" if member.isdir() else name, len(names)))
            index.extend((member.offset_data, member.size, member.size, IN_TAR, 0, kind))
        file.seek(archive.offset)
        if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):  # tarfile stops at a damaged header silently
            raise tarfile.ReadError(f"damaged or truncated at byte {file.tell()}, after {len(names)} members")
    followed = _follow_links(links, names)
    return Archive(path, np.frombuffer(index, np.int64).reshape(-1, 6)[followed]), names


def _follow_links(links: dict[int, bytes], names: list[tuple[bytes, int]]) -> np.ndarray:
    """Return, for each member, the index of the member with its data: the target of a link, or the member itself."""
    numbers = {posixpath.normpath(name): number for name, number in names} if links else {}
    following = {link: numbers.get(target, link) for link, target in links.items()}
    followed = np.arange(len(names))
    for link, number in following.items():
        for _ in range(MAX_LINKS):
            if number not in following:
                break
            number = following[number]
        followed[link] = number
    return followed
