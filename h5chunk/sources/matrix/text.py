"""Read text, compressed with gzip or not, in pieces of whole lines with their line numbers.

Knows lines, not what they mean. Decoding is bounded: a piece has a size, a line has a limit, and what inflates without
end is a line without end.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import stat
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, NoReturn, cast

from h5chunk.errors import SourceError, printable
from h5chunk.stamp import stamp_of

GZIP_MAGIC = b"\x1f\x8b"
OTHER_PACKERS = {b"BZh": "bunzip2", b"\xfd7zXZ": "unxz", b"\x28\xb5\x2f\xfd": "unzstd"}
WIDE_TEXT = (b"\xff\xfe", b"\xfe\xff")
UTF8_MARK = b"\xef\xbb\xbf"
MAX_ID_BYTES = 256
MAX_LINE_BYTES = 64 << 20  # a row of libsvm with five million entries
MIN_LINE_BYTES, PIECES_OF_LINE = 1 << 20, 16  # of the limit on a line where pieces are small
MAX_SHOWN = 120  # characters of a line in a message
HEAD_BYTES = 1 << 18


@dataclass(frozen=True)
class Piece:
    """Whole lines of a text.

    Attributes
    ----------
    data : bytes
        Ends with a line feed.
    line : int
        Number of the first line, from 1.
    consumed_bytes : int
        Bytes of the file read so far.
    """

    data: bytes
    line: int
    consumed_bytes: int


class TextFile:
    """A text file that is read from its start as often as needed.

    Raises
    ------
    SourceError
        It is missing, empty, no regular file, or no text that we read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._stamp = check_regular(self.path)
        self.num_bytes = self._stamp[2]
        with self._open() as raw:
            start = raw.read(8)
        for magic, tool in OTHER_PACKERS.items():
            if start.startswith(magic):
                self.fail(f"packed in a way that is not read: unpack it first ({tool})")
        self.is_packed = start.startswith(GZIP_MAGIC)
        self.head = self._head()
        if self.head.startswith(WIDE_TEXT):
            self.fail("text of 16-bit characters (UTF-16): save it as UTF-8")
        if not self.head.strip(b" \t\r\n"):
            self.fail("holds nothing but blanks")
        if self.head.lstrip().startswith(b"<"):
            self.fail("starts with '<': this is a web page or XML, not the data")
        if b"\r" in self.head and b"\n" not in self.head:
            self.fail("its lines end with carriage returns only: turn them into line feeds (tr '\\r' '\\n')")

    def fail(self, what: str, line: int | None = None) -> NoReturn:
        """Raise the error that names file and line."""
        where = printable(self.path) + (f", line {line}" if line else "")
        raise SourceError(f"{where}: {what}") from None

    def _open(self) -> IO[bytes]:
        try:
            raw = open(self.path, "rb")  # noqa: PTH123
        except OSError as error:
            raise SourceError(f"{printable(self.path)}: cannot be read: {error.strerror}") from None
        if stamp_of(os.fstat(raw.fileno())) != self._stamp:
            raw.close()
            self.fail("changed while it was read")
        return raw

    def _unpacked(self, raw: IO[bytes]) -> IO[bytes]:
        return cast("IO[bytes]", gzip.GzipFile(fileobj=raw)) if self.is_packed else raw

    def _head(self) -> bytes:
        """The first lines, without the mark of UTF-8; the last one may be cut."""
        with self._open() as raw, self._naming_damage(lambda: 1):
            head = self._unpacked(raw).read(HEAD_BYTES)
        self._check_text(head, 1)
        return head.removeprefix(UTF8_MARK)

    def head_lines(self) -> list[bytes]:
        """The first lines, whole, without their ends."""
        lines = self.head.split(b"\n")
        if len(lines) > 1 and (len(self.head) >= HEAD_BYTES - len(UTF8_MARK) or not lines[-1]):
            lines.pop()
        return [line.removesuffix(b"\r") for line in lines]

    def probes(self, num_probes: int, num_bytes: int) -> Iterator[bytes]:
        """Whole lines from places spread over a text that is not packed."""
        if self.is_packed or self.num_bytes <= HEAD_BYTES:
            return
        with self._open() as raw:
            for number in range(1, num_probes + 1):
                raw.seek(max(0, self.num_bytes * number // num_probes - num_bytes))
                lines = raw.read(num_bytes).split(b"\n")[1:]
                yield b"\n".join(lines if number == num_probes else lines[:-1])

    def pieces(self, num_bytes: int) -> Iterator[Piece]:
        """All lines, in order, about ``num_bytes`` at a time.

        Raises
        ------
        SourceError
            The file changed, is damaged or cut short, holds a zero byte or a line of more than `PIECES_OF_LINE` pieces.
        """
        line = 1
        limit = min(MAX_LINE_BYTES, max(MIN_LINE_BYTES, PIECES_OF_LINE * num_bytes))
        rest: list[bytes] = []  # the start of a line that goes on
        with self._open() as raw, self._naming_damage(lambda: line):
            file = self._unpacked(raw)
            while data := self._read_unchanged(file, raw, num_bytes):
                if line == 1 and not rest:  # the very start
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
                yield Piece(data, line, raw.tell())
                line += data.count(b"\n")
            if last := b"".join(rest):
                yield Piece(last + b"\n", line, raw.tell())

    def _read_unchanged(self, file: IO[bytes], raw: IO[bytes], num_bytes: int) -> bytes:
        """The next bytes; looks each time, as what grows while it is read may have no end."""
        data = file.read(num_bytes)
        if stamp_of(os.fstat(raw.fileno())) != self._stamp:
            self.fail("changed while it was read")
        return data

    def _check_text(self, data: bytes, line: int) -> None:
        if b"\0" in data and not data.startswith(WIDE_TEXT):
            line += data.count(b"\n", 0, data.index(b"\0"))
            self.fail("holds a zero byte: this is no text, or it is damaged", line)

    @contextlib.contextmanager
    def _naming_damage(self, line: Callable[[], int]) -> Iterator[None]:
        try:
            yield
        except EOFError:
            self.fail("cut short: its gzip stream has no end; copy or download it again", line())
        except (gzip.BadGzipFile, zlib.error) as error:
            self.fail(f"its gzip stream is damaged: {error}", line())
        except OSError as error:
            self.fail(f"cannot be read: {error.strerror or error}", line())


def check_regular(path: str) -> tuple[int, ...]:
    """Return the stamp of a regular file that is not empty.

    Raises
    ------
    SourceError
        It is not.
    """
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:
        raise SourceError(f"{printable(path)}: cannot be read: {getattr(error, 'strerror', error)}") from None
    if not stat.S_ISREG(status.st_mode):
        raise SourceError(f"{printable(path)}: not a regular file")
    if not status.st_size:
        raise SourceError(f"{printable(path)}: is empty (0 bytes)")
    return stamp_of(status)


def first_bad_line(data: bytes, line: int, works: Callable[[bytes], bool]) -> tuple[int, bytes]:
    """Find the number and text of the first invalid line by bisection.

    Parameters
    ----------
    data : bytes
        Whole lines, one of which does not work.
    line : int
        Number of the first.
    works : callable
        Whether some whole lines are all well.
    """
    lines = data.splitlines(keepends=True) if b"\r" not in data else [part + b"\n" for part in data.split(b"\n")[:-1]]
    low, high = 0, len(lines)  # lines[:low] work
    while high - low > 1:
        middle = (low + high) // 2
        if works(b"".join(lines[low:middle])):
            low = middle
        else:
            high = middle
    return line + low, lines[low].removesuffix(b"\n").removesuffix(b"\r")


def shown(text: bytes) -> str:
    """Quote a line for a message, and cut it if it is long."""
    words = text.decode("utf-8", "backslashreplace")
    return repr(words if len(words) <= MAX_SHOWN else words[:MAX_SHOWN] + "...")
