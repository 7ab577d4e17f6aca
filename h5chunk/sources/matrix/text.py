"""Read text in pieces of whole lines, also from files compressed with gzip, bzip2, xz or zstd.

Memory is bounded, because pieces and lines have a maximum length. Pieces are in UTF-8, whatever the encoding of the
file.
"""

from __future__ import annotations

import bz2
import codecs
import contextlib
import gzip
import io
import lzma
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from typing import IO, Any, ClassVar, NoReturn

from h5chunk.errors import SourceError, printable
from h5chunk.sample_source import OpenContext
from h5chunk.sources.arrow import csv, pyarrow
from h5chunk.sources.matrix.block import RegularFile, SparseSource
from h5chunk.sources.recognise import UTF16_MARKS

NOT_UTF8 = "not UTF-8: pass its encoding, such as --encoding latin-1"
UTF8_MARK = b"\xef\xbb\xbf"
MAX_ID_BYTES = 256
MAX_LINE_BYTES = 64 << 20  # a row of libsvm with five million entries
MIN_LINE_BYTES, PIECES_OF_LINE = 1 << 20, 16  # a line may be 16 times as long as a piece, or 1 MiB if that is more
MAX_SHOWN = 120  # characters of a line that a message shows
HEAD_BYTES = 1 << 18
MIN_PART_BYTES = 4 << 20  # minimum size of the parts of a split file; more than the head, which has its header
MIN_PIECE_BYTES, MAX_PIECE_BYTES = 1 << 14, 32 << 20
XZ_MEMORY_BYTES = 128 << 20  # xz -9 takes half of it
ARROW_BLOCKS = 8  # parts of a piece that are parsed in parallel


@dataclass(frozen=True)
class Piece:
    """Whole lines of a text, the number of the first line (from 1), and the number of bytes of the file read so far."""

    data: bytes
    line: int
    consumed_bytes: int


class _Xz(io.RawIOBase):
    """Decompress xz with a memory limit, which `lzma.LZMAFile` lacks."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw, self._decoder = raw, lzma.LZMADecompressor(memlimit=XZ_MEMORY_BYTES)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = b""
        while not data:
            packed = b""
            if self._decoder.eof or self._decoder.needs_input:
                packed = self._decoder.unused_data or self._raw.read(1 << 16)
                if not packed and self._decoder.eof:
                    return 0
                if not packed:
                    raise EOFError
                if self._decoder.eof:  # another stream follows
                    self._decoder = lzma.LZMADecompressor(memlimit=XZ_MEMORY_BYTES)
            data = self._decoder.decompress(packed, len(buffer))
        buffer[: len(data)] = data
        return len(data)


class _Head:
    """The beginning of a file, up to the end of the line that contains byte ``stop - 1``."""

    def __init__(self, file: IO[bytes], stop: int) -> None:
        self._file, self._stop, self._ended = file, stop, False

    def read(self, size: int) -> bytes:
        left = self._stop - self._file.tell()
        if left > 0:
            data = self._file.read(min(size, left))
            self._ended = data.endswith(b"\n") and len(data) == left
            return data
        data = b"" if self._ended else self._file.readline(size)
        self._ended = not data or data.endswith(b"\n")
        return data


class _Transcoder:
    """Convert a file in another encoding to UTF-8."""

    def __init__(self, file: Any, encoding: str) -> None:
        self._file, self._decoder = file, codecs.getincrementaldecoder(encoding)()

    def read(self, size: int) -> bytes:
        while data := self._file.read(size):
            if text := self._decoder.decode(data):
                return text.encode()
        return self._decoder.decode(b"", True).encode()


PACKINGS: dict[bytes, tuple[str, Callable[[Any], Any]]] = {  # name and opener of a compression, by its first bytes
    b"": ("", lambda raw: raw),
    b"\x1f\x8b": ("gzip", lambda raw: gzip.GzipFile(fileobj=raw)),
    b"BZh": ("bzip2", bz2.BZ2File),
    b"\xfd7zXZ": ("xz", lambda raw: io.BufferedReader(_Xz(raw), 1 << 20)),
    b"\x28\xb5\x2f\xfd": ("zstd", lambda raw: pyarrow.CompressedInputStream(raw, "zstd")),
}


def unpacker(start: bytes) -> tuple[str, Callable[[Any], Any]]:
    """Return the name and the opener of the compression of a file whose first bytes are ``start``."""
    return PACKINGS[max((magic for magic in PACKINGS if start.startswith(magic)), key=len)]


class TextFile(RegularFile):
    """A text file, which may be compressed. UTF-8 and UTF-16 are detected, and other encodings must be passed."""

    def __init__(self, path: str | os.PathLike[str], encoding: str | None = None) -> None:
        super().__init__(path)
        with self.reading() as raw:
            start = raw.read(8)
        self._packing, self._unpack = unpacker(start)
        self._encoding = encoding
        self._span = (0, self.num_bytes)  # the lines that begin in this range of bytes are read
        with self.reading() as raw, self._errors_with_line(lambda: 1):
            if encoding is None and self._unpack(raw).read(2) in UTF16_MARKS:
                self._encoding = "utf-16"
        with self.reading() as raw, self._errors_with_line(lambda: 1):
            file = self._unpacked(raw)
            head, self._goes_on = file.read(HEAD_BYTES), bool(file.read(1))
        self._check_text(head, 1)
        self.head = head.removeprefix(UTF8_MARK)  # its last line may be incomplete
        if not self.head.strip(b" \t\r\n"):
            self.fail("contains only blanks")
        if self.head.lstrip().startswith(b"<"):
            self.fail("starts with '<': this is a web page or XML, not the data")
        if b"\r" in self.head and b"\n" not in self.head:
            self.fail("its lines end with carriage returns: replace them by line feeds (tr '\\r' '\\n')")

    def fail(self, problem: str, line: int | None = None) -> NoReturn:
        """Raise a SourceError that names the file and the line.

        ``line`` is 1 for the first line that this reader reads; the message has its number in the whole file.
        """
        if line and self._span[0]:
            line += self._count_lines(self._span[0] - 1)
        where = printable(self.path) + (f", line {line}" if line else "")
        raise SourceError(f"{where}: {problem}") from None

    @property
    def is_packed(self) -> bool:
        return bool(self._packing)

    def _unpacked(self, raw: IO[bytes]) -> Any:
        file = self._unpack(raw)
        return file if self._encoding is None else _Transcoder(file, self._encoding)

    def part(self, start: int, stop: int) -> TextFile:
        """Return a reader of only those lines of the file that begin at bytes ``start`` to ``stop`` (excluded)."""
        part = copy(self)
        part._span = start, stop
        return part

    @property
    def is_whole(self) -> bool:
        """True unless only a part is read."""
        return self._span == (0, self.num_bytes)

    def can_split(self) -> bool:
        return not self.is_packed and self._encoding is None

    def _count_lines(self, num_bytes: int) -> int:
        """Count the lines of the file that begin at or before byte ``num_bytes``."""
        with self.reading() as raw:
            parts = range(0, num_bytes, MAX_PIECE_BYTES)
            return 1 + sum(raw.read(min(MAX_PIECE_BYTES, num_bytes - first)).count(b"\n") for first in parts)

    def head_lines(self) -> list[bytes]:
        """Return the complete lines in the first bytes of the file, without line ends."""
        lines = self.head.split(b"\n")
        if len(lines) > 1 and (self._goes_on or not lines[-1]):
            lines.pop()
        return [line.removesuffix(b"\r") for line in lines]

    def probes(self, num_probes: int, num_bytes: int) -> Iterator[bytes]:
        """Yield samples of complete lines from across the file, or nothing if it is compressed or not UTF-8."""
        if self.is_packed or self._encoding is not None or self.num_bytes <= HEAD_BYTES:
            return
        with self.reading() as raw:
            for number in range(1, num_probes + 1):
                raw.seek(max(0, self.num_bytes * number // num_probes - num_bytes))
                lines = raw.read(num_bytes).split(b"\n")[1:]
                yield b"\n".join(lines if number == num_probes else lines[:-1])

    def pieces(self, num_bytes: int) -> Iterator[Piece]:
        """Yield all lines in order, in pieces of about ``num_bytes``; a piece with a long line may be longer.

        Raises SourceError for text that cannot be read or decoded, and for a line longer than the limit:
        `PIECES_OF_LINE` times ``num_bytes``, but at least `MIN_LINE_BYTES` and at most `MAX_LINE_BYTES`.
        """
        line = 1
        limit = min(MAX_LINE_BYTES, max(MIN_LINE_BYTES, PIECES_OF_LINE * num_bytes))
        rest: list[bytes] = []  # the start of an unfinished line
        start, stop = self._span
        with self.reading() as raw, self._errors_with_line(lambda: line):
            if start:
                raw.seek(start - 1)
                raw.readline(limit)  # belongs to the part before
            file = self._unpacked(raw) if stop == self.num_bytes else _Head(raw, stop)
            while data := file.read(num_bytes):
                self.check_unchanged(raw.fileno())  # a file that keeps growing would be read without end
                if line == 1 and not rest and not start:  # only at the start of the file
                    data = data.removeprefix(UTF8_MARK)
                self._check_text(data, line)
                cut = data.rfind(b"\n") + 1
                if not cut:
                    rest.append(data)
                    if sum(map(len, rest)) > limit:
                        more = ": allow more memory (--memory-bytes)" if limit < MAX_LINE_BYTES else ""
                        self.fail(f"longer than the limit of {limit} bytes for one line{more}", line)
                    continue
                data, rest = b"".join([*rest, data[:cut]]), [data[cut:]]
                yield Piece(data, line, raw.tell() - start)
                line += data.count(b"\n")
            if last := b"".join(rest):
                yield Piece(last + b"\n", line, raw.tell() - start)

    def _check_text(self, data: bytes, line: int) -> None:
        if b"\0" in data:
            line += data.count(b"\n", 0, data.index(b"\0"))
            self.fail(
                "contains a zero byte: it is not text, or damaged, or in another encoding, such as "
                "--encoding utf-16-le",
                line,
            )

    @contextlib.contextmanager
    def _errors_with_line(self, line: Callable[[], int]) -> Iterator[None]:
        """Convert errors of reading and decoding in a context to SourceErrors that name the line."""
        try:
            yield
        except EOFError:
            self.fail(f"cut short: its {self._packing} stream has no end: copy or download it again", line())
        except (gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
            self.fail(f"its {self._packing} stream is damaged: {error}", line())
        except UnicodeError as error:
            self.fail(f"is not text in the encoding {self._encoding}: {error}: pass another (--encoding)", line())
        except OSError as error:
            self.fail(f"cannot be read: {error.strerror or error}", line())


def check_utf8(text: TextFile, piece: Piece) -> None:
    """Raise a SourceError that names the first line of a piece that is not UTF-8."""
    if piece.data.isascii():
        return
    try:
        piece.data.decode()
    except UnicodeDecodeError as error:
        before = piece.data.rfind(b"\n", 0, error.start) + 1
        line = piece.data[before:].split(b"\n", 1)[0]
        text.fail(
            f"is {NOT_UTF8}: {quote_line(line)}",
            piece.line + piece.data.count(b"\n", 0, error.start),
        )


class TextSource(SparseSource):
    """Base class of matrices in text files, which are parsed piece by piece."""

    pieces_in_memory: ClassVar[int]  # bytes of memory needed per byte of a piece
    num_skipped = 0  # lines above the data

    def __init__(self, path: str, options: Any, context: OpenContext) -> None:
        self._text = TextFile(path, getattr(options, "encoding", None))
        self.path, self.num_bytes = self._text.path, self._text.num_bytes

    def split(self, num_parts: int) -> list[TextSource]:
        """Return sources that each read a part of the lines. Only for formats in which lines are independent."""
        text, size = self._text, max(MIN_PART_BYTES, -(-self.num_bytes // num_parts))
        if not self.has_ids or not text.can_split():
            return [self]
        parts = []
        for start in range(0, self.num_bytes, size):
            part, stop = copy(self), min(start + size, self.num_bytes)
            part._text, part.num_bytes = text.part(start, stop), stop - start
            part.num_skipped = 0 if start else self.num_skipped
            parts.append(part)
        return parts

    def _pieces(self, max_bytes: int) -> Iterator[Piece]:
        """Yield the lines of data, without the skipped lines above them."""
        size = max(MIN_PIECE_BYTES, min(MAX_PIECE_BYTES, max_bytes // self.pieces_in_memory))
        for piece in self._text.pieces(size):
            if piece.line <= self.num_skipped:
                lines = piece.data.split(b"\n", self.num_skipped - piece.line + 1)
                piece = Piece(lines[-1], piece.line + len(lines) - 1, piece.consumed_bytes)
            yield piece

    def _parse(self, piece: Piece, read: Callable[[bytes], Any]) -> Any:
        """Return ``read(piece.data)``; if it raises ValueError, find the first invalid line, and raise its error."""
        try:
            return read(piece.data)
        except ValueError:
            lines = piece.data.split(b"\n")[:-1]
            low, high = 0, len(lines)  # lines[:low] are valid
            while high - low > 1:
                middle = (low + high) // 2
                try:
                    read(b"".join(line + b"\n" for line in lines[low:middle]))
                    low = middle
                except ValueError:
                    high = middle
            self._refuse_line(piece.line + low, lines[low].removesuffix(b"\r"))

    def _refuse_line(self, line: int, text: bytes) -> NoReturn:
        """Raise a SourceError that says what is wrong with an invalid line."""
        raise NotImplementedError


def read_columns(
    data: bytes, mark: str, quotes: bool, width: int, types: Mapping[int, Any], decimal: str = "."
) -> list[Any]:
    """Parse the columns of whole lines whose numbers are the keys of ``types``, as Arrow arrays of the types in it.

    All lines must have ``width`` columns, separated by the character ``mark``, and strings must be UTF-8. ``quotes``
    says whether cells may be in double quotes. ``decimal`` is the decimal mark. Raises ArrowInvalid for other data.
    """
    if not data.strip(b"\r\n"):
        return [pyarrow.array([], kind) for kind in types.values()]
    names = [str(number) for number in range(width)]
    table = csv.read_csv(
        pyarrow.BufferReader(data),
        csv.ReadOptions(column_names=names, block_size=max(1 << 16, len(data) // ARROW_BLOCKS)),
        csv.ParseOptions(delimiter=mark, quote_char='"' if quotes else False),
        csv.ConvertOptions(
            decimal_point=decimal,
            include_columns=[names[number] for number in types],
            column_types={names[number]: kind for number, kind in types.items()},
            null_values=[],
        ),
    )
    return [table[names[number]].combine_chunks() for number in types]


def quote_line(text: bytes) -> str:
    """Quote a line for a message, and cut it if it is long."""
    words = text.decode("utf-8", "backslashreplace")
    return repr(words if len(words) <= MAX_SHOWN else words[:MAX_SHOWN] + "...")
