"""Read the encoded bytes of images from a folder, or from an archive in place.

A container travels to worker processes: it holds paths and numbers, and opens files when it is asked for bytes.
Archives are read with ``pread`` at the places that their index gives, so that workers share nothing.
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
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from h5chunk.errors import SampleError, SourceError, printable
from h5chunk.stamp import stamp_of

MAX_FILE_BYTES = 1 << 30  # an encoded image larger than this is no image
MAX_DIRECTORY_BYTES = 1 << 30  # of a zip: 15 million members, about; listing them takes ten times as much memory
MAX_HEADER_BYTES = 1 << 20  # of a member of a tar
SPARSE, UNKNOWN = 1, 2  # beside the types of files that `stat` knows
MAX_LINKS = 40  # from one to the next
KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a link to what is no file in its archive",
    SPARSE: "a sparse file, stored without its zeros",
    UNKNOWN: "of an unknown type",
}
_DAMAGES = (tarfile.TarError, zipfile.BadZipFile, struct.error, ValueError, EOFError, OverflowError)
ZIP_UNIX = 3  # the system that packed it
_TAR_KINDS = {
    **dict.fromkeys(tarfile.REGULAR_TYPES, stat.S_IFREG),
    tarfile.FIFOTYPE: stat.S_IFIFO,
    tarfile.CHRTYPE: stat.S_IFCHR,
    tarfile.BLKTYPE: stat.S_IFBLK,
    tarfile.DIRTYPE: stat.S_IFDIR,
    tarfile.SYMTYPE: stat.S_IFLNK,
    tarfile.LNKTYPE: stat.S_IFLNK,
}
_ZIP_LOCAL_HEADER = struct.Struct("<4s5H3I2H")


class Container(ABC):
    """Base of what reads the bytes of one sample."""

    @abstractmethod
    def select(self, members: np.ndarray) -> None:
        """Say which member of an archive sample ``i`` is: (num_samples,) int64; empty for a folder."""

    @abstractmethod
    def read(self, index: int, name: bytes) -> bytes:
        """Return the bytes of sample ``index``, whose path is ``name``.

        Raises
        ------
        SampleError
            They cannot be had, or changed while they were read.
        """

    @abstractmethod
    def stamp(self, index: int, name: bytes) -> tuple[int, ...]:
        """Return 64-bit integers that change when the bytes of sample ``index`` do."""


def content_stamp(status: os.stat_result) -> tuple[int, ...]:
    """Return size, modification time and inode change time of a file; programs cannot set the last."""
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


class Folder(Container):
    """Files below a folder."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = os.fsencode(root)

    def select(self, members: np.ndarray) -> None:
        pass  # names are all that a folder needs

    def stamp(self, index: int, name: bytes) -> tuple[int, ...]:
        try:
            return content_stamp(os.stat(os.path.join(self._root, name)))
        except OSError as error:
            return -1, error.errno or 0, 0

    def read(self, index: int, name: bytes) -> bytes:
        try:
            descriptor = os.open(os.path.join(self._root, name), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise SampleError(f"cannot be opened: {error.strerror}") from None
        try:
            return _read_whole(descriptor)
        except OSError as error:
            raise SampleError(f"cannot be read: {error.strerror}") from None
        finally:
            os.close(descriptor)


def _read_whole(descriptor: int) -> bytes:
    before = os.fstat(descriptor)
    _check_kind(stat.S_IFMT(before.st_mode))
    _check_size(before.st_size)
    data = _read_at(descriptor, 0, before.st_size)
    after = os.fstat(descriptor)
    if len(data) != before.st_size or (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise SampleError("changed while it was read")
    return data


def _check_kind(kind: int) -> None:
    """Raise SampleError unless a type of file, as `stat.S_IFMT` gives it, is a regular one."""
    if kind != stat.S_IFREG:
        raise SampleError(f"is {KINDS.get(kind, KINDS[UNKNOWN])}, not a regular file")


def _check_size(num_bytes: int) -> None:
    if num_bytes == 0:
        raise SampleError("is empty (0 bytes)")
    if num_bytes > MAX_FILE_BYTES:
        raise SampleError(f"is {num_bytes} bytes, over the limit of {MAX_FILE_BYTES} for one encoded image")


def _read_at(descriptor: int, offset: int, num_bytes: int) -> bytes:
    """Read ``num_bytes`` from ``offset`` on, or fewer at the end of the file."""
    data = os.pread(descriptor, num_bytes, offset)
    while len(data) < num_bytes and (more := os.pread(descriptor, num_bytes - len(data), offset + len(data))):
        data += more
    return data


class StoredFile:
    """A file of which parts are read at offsets, and which must not change; each process opens it once."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        self._opened: tuple[int, int] | None = None  # (process, descriptor)
        status = os.stat(path)
        self._stamp, self.whole_stamp = stamp_of(status), content_stamp(status)
        self._num_bytes = status.st_size

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_opened": None}

    def read_at(self, offset: int, num_bytes: int) -> bytes:
        """Read bytes from an offset on.

        Raises
        ------
        SampleError
            The file is too short, changed, or cannot be read.
        """
        if not 0 <= offset <= offset + num_bytes <= self._num_bytes:  # before memory is taken
            raise SampleError("is cut off by the end of its archive")
        try:
            if self._opened is None or self._opened[0] != os.getpid():
                self._opened = os.getpid(), os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            data = _read_at(self._opened[1], offset, num_bytes)
            if stamp_of(os.fstat(self._opened[1])) != self._stamp:
                raise SampleError("its archive changed while it was read")
            return data
        except OSError as error:
            raise SampleError(f"cannot be read from its archive: {error.strerror}") from None

    def __del__(self) -> None:
        if getattr(self, "_opened", None) is not None and self._opened[0] == os.getpid():  # type: ignore[index]
            os.close(self._opened[1])  # type: ignore[index]


class Archive(StoredFile, Container):
    """Base of archives: one file that holds many."""


class Tar(Archive):
    """An uncompressed tar: each member is a run of bytes; the size of what is no regular file is minus its type."""

    def __init__(self, path: Path, offsets: np.ndarray, sizes: np.ndarray) -> None:
        super().__init__(path)
        self._offsets, self._sizes = offsets, sizes

    def select(self, members: np.ndarray) -> None:
        self._offsets, self._sizes = self._offsets[members], self._sizes[members]

    def stamp(self, index: int, name: bytes) -> tuple[int, ...]:
        return (*self.whole_stamp, int(self._offsets[index]), int(self._sizes[index]))

    def read(self, index: int, name: bytes) -> bytes:
        size = int(self._sizes[index])
        if size < 0:
            _check_kind(-size)
        _check_size(size)
        data = self.read_at(int(self._offsets[index]), size)
        if len(data) != size:
            raise SampleError("is cut off by the end of its archive")
        return data


class Zip(Archive):
    """A zip: each member is a local header and a run of bytes, stored or deflated."""

    # columns of the index
    HEADER, STORED, SIZE, METHOD, CRC, KIND = range(6)

    def __init__(self, path: Path, index: np.ndarray) -> None:
        super().__init__(path)
        self._index = index

    def select(self, members: np.ndarray) -> None:
        self._index = self._index[members]

    def stamp(self, index: int, name: bytes) -> tuple[int, ...]:
        return tuple(int(self._index[index][column]) for column in (self.SIZE, self.CRC))  # the same in a new archive

    def read(self, index: int, name: bytes) -> bytes:
        header, stored, size, method, crc, kind = (int(value) for value in self._index[index])
        _check_kind(kind or stat.S_IFREG)
        _check_size(size)
        if stored > MAX_FILE_BYTES:
            raise SampleError(f"takes {stored} bytes in its archive, over the limit of {MAX_FILE_BYTES}")
        local = self.read_at(header, _ZIP_LOCAL_HEADER.size)
        if len(local) != _ZIP_LOCAL_HEADER.size or not local.startswith(b"PK\x03\x04"):
            raise SampleError("has no local header in its archive: the archive is damaged")
        name_bytes, extra_bytes = _ZIP_LOCAL_HEADER.unpack(local)[-2:]
        data = self.read_at(header + len(local) + name_bytes + extra_bytes, stored)
        if method == zipfile.ZIP_DEFLATED:
            try:
                data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, size + 1)
            except zlib.error as error:
                raise SampleError(f"cannot be inflated: {error}") from None
        elif method != zipfile.ZIP_STORED:
            raise SampleError(f"is packed with zip method {method}: only stored and deflated members are read")
        if len(data) != size or zlib.crc32(data) != crc:
            raise SampleError("does not match its length and checksum in the archive: the archive is damaged")
        return data


def open_archive(path: Path) -> tuple[Archive, Iterable[tuple[bytes, int]]]:
    """Open an archive, and list the (name, number) of its members; names of folders end with a slash.

    Raises
    ------
    SourceError
        Neither zip nor tar, or one that cannot be read in place.
    """
    shown = printable(path)
    if not path.is_file():
        raise SourceError(f"{shown}: neither a folder nor a regular file")
    try:
        with path.open("rb") as file:
            start = file.read(262)
        if start.startswith((b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")):
            raise SourceError(
                f"{shown}: compressed as a whole, so that its files cannot be read one by one: decompress it first "
                "(gunzip, bunzip2, unxz, unzstd)"
            )
        if start[257:262] == b"ustar":  # first, as the last file in a tar may be a zip
            return _open_tar(path)
        if zipfile.is_zipfile(path):
            return _open_zip(path)
    except SourceError:
        raise
    except OSError as error:
        raise SourceError(f"{shown}: cannot be read: {error.strerror or error}") from None
    except (*_DAMAGES, NotImplementedError) as error:
        raise SourceError(f"{shown}: cannot be read as an archive: {error}") from None
    raise SourceError(f"{shown}: not a folder, .zip or .tar of images")


class BoundedFile(io.FileIO):
    """An archive of which headers are read: none of more bytes than ``limit``, whatever it claims."""

    def __init__(self, path: str | os.PathLike[str], limit: int, damage: type[Exception]) -> None:
        super().__init__(path)
        self._limit, self._damage = limit, damage

    def read(self, size: int | None = -1) -> bytes:
        """As of any file.

        Raises
        ------
        TarError, BadZipFile
            More bytes are asked for.
        """
        if size is not None and size > self._limit:
            raise self._damage(f"a header claims {size} bytes, over the limit of {self._limit}")
        return super().read(size) or b""


def _open_zip(path: Path) -> tuple[Zip, list[tuple[bytes, int]]]:
    with BoundedFile(path, MAX_DIRECTORY_BYTES, zipfile.BadZipFile) as file, zipfile.ZipFile(file) as archive:
        members = archive.infolist()
    if any(info.flag_bits & 1 for info in members):
        raise SourceError(f"{printable(path)}: encrypted: decrypt it first")
    index = np.array(
        [(m.header_offset, m.compress_size, m.file_size, m.compress_type, m.CRC, _kind_in_zip(m)) for m in members],
        dtype=np.int64,
    ).reshape(-1, 6)
    return Zip(path, index), [(os.fsencode(info.filename), i) for i, info in enumerate(members)]


def _kind_in_zip(member: zipfile.ZipInfo) -> int:
    """Return the type of file that a member was on a Unix system; 0 if that is unknown."""
    return stat.S_IFMT(member.external_attr >> 16) if member.create_system == ZIP_UNIX else 0


def _kind_in_tar(member: tarfile.TarInfo) -> int:
    """Return the type of file of a member."""
    return SPARSE if member.issparse() else _TAR_KINDS.get(member.type, UNKNOWN)


def _open_tar(path: Path) -> tuple[Tar, list[tuple[bytes, int]]]:
    offsets: list[int] = []
    sizes: list[int] = []
    names: list[tuple[bytes, int]] = []
    links: dict[int, bytes] = {}  # number of a member to the name that it leads to
    with (
        BoundedFile(path, MAX_HEADER_BYTES, tarfile.ReadError) as file,
        tarfile.open(fileobj=file, mode="r:", errors="surrogateescape") as archive,
    ):
        for member in archive:
            archive.members = []  # type: ignore[attr-defined]  # tarfile would keep a kilobyte a member
            name = os.fsencode(member.name)
            if member.islnk() or member.issym():
                folder = b"" if member.islnk() else posixpath.dirname(name)
                links[len(names)] = posixpath.normpath(posixpath.join(folder, os.fsencode(member.linkname)))
            if member.size < 0:
                raise tarfile.ReadError(f"a member claims {member.size} bytes")
            kind = _kind_in_tar(member)
            names.append((name + b"/" if member.isdir() else name, len(names)))
            offsets.append(member.offset_data)
            sizes.append(member.size if kind == stat.S_IFREG else -kind)
        file.seek(archive.offset)
        if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):  # tarfile takes a damaged header for the end
            raise tarfile.ReadError(f"damaged or cut short at byte {file.tell()}, behind {len(names)} members")
    _follow_links(links, names, offsets, sizes)
    return Tar(path, np.array(offsets, np.int64), np.array(sizes, np.int64)), names


def _follow_links(
    links: dict[int, bytes], names: list[tuple[bytes, int]], offsets: list[int], sizes: list[int]
) -> None:
    """Give members that are links the bytes of what they lead to; those that lead to none stay links."""
    numbers = {posixpath.normpath(name): number for name, number in names} if links else {}
    following = {link: numbers.get(target, link) for link, target in links.items()}
    for link, number in following.items():
        for _ in range(MAX_LINKS):
            if number not in following:
                break
            number = following[number]
        offsets[link], sizes[link] = offsets[number], sizes[number]
