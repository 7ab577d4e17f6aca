"""Delimited files of (row, column[, value]) in any number of lines: ratings.csv, ratings.dat, u.data, edge lists.

| question | answer |
| --- | --- |
| delimiter | what separates the cells of the first lines: ``::``, tab, semicolon, comma, or runs of blanks |
| header | the first line, if it names columns: words where the second line has numbers, or well-known names |
| columns | by their names (userId, movieId, rating, timestamp and the like), else the first, second and third; others \
are left out |
| ids | int64 if those that are looked at (the start of the file and places all over it) are whole numbers as int64 \
writes them, but for one in 200 that is taken for broken; else bytes as they stand; ``007`` is a string |
| values | float64, finite |
| times | only if asked for: the column with such a name, or the fourth of four without a header if it looks like Unix \
times; whole numbers, real numbers or ISO 8601 dates |

Lines at the start that begin with ``#`` or ``%`` are comments; comments further down are an error. Blank lines are
skipped. Source: pyarrow.csv reads the numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NoReturn

import numpy as np

from h5chunk.errors import OptionError, printable
from h5chunk.source import OpenContext
from h5chunk.sources.arrow import byte_lengths, pyarrow, to_fixed_bytes
from h5chunk.sources.kinds import DelimitedOptions
from h5chunk.sources.matrix.block import Block
from h5chunk.sources.matrix.dialect import guess_dialect, is_number, is_whole, time_type
from h5chunk.sources.matrix.text import MAX_ID_BYTES, TextSource, read_columns, shown
from h5chunk.sources.recognise import has_suffix, text_lines

# names of columns, in small letters and without anything between them
ROWS = re.compile(
    "user|userid|uid|reviewerid|customer|customerid|row|rowid|cell|cellid|barcode|query|doc|document|from|fromnodeid|"
    "source|src|i|u"
)
COLUMNS = re.compile(
    "item|itemid|iid|movie|movieid|product|productid|isbn|asin|artist|artistid|track|trackid|song|songid|book|bookid|"
    "business|businessid|column|columnid|col|gene|geneid|feature|term|word|to|tonodeid|target|dst|j"
)
VALUES = re.compile("rating|bookrating|score|value|val|count|counts|weight|stars|plays|overall|data|umi")
TIMES = re.compile("timestamp|time|date|datetime|ts|unixreviewtime|reviewtime")

MAX_BROKEN_PART = 0.005  # of the ids looked at: so few words among whole numbers are taken for broken lines
UNIX_TIMES = range(10**8, 10**14)  # from 1973 in seconds to 5138 in milliseconds
NUM_PROBES, PROBE_BYTES = 16, 1 << 14
COMMENTS = (b"#", b"%")
PARTS = ("row", "column", "value", "time")
AS_STRING = ":str"


class DelimitedSource(TextSource):
    """A delimited file. Ids that are strings are fixed-length bytes (``S``) in the blocks.

    The option ``columns`` names the columns for row, column and optionally value and time, by the header or by numbers
    from 0; a name that ends with ``:str`` declares its ids to be strings.
    """

    kind = "csv"
    shape = (None, None)
    has_ids = True
    Options = DelimitedOptions
    pieces_in_memory = 6  # text, its translation, pyarrow's columns, the block, masks

    @classmethod
    def recognises(cls, source: Any, head: bytes) -> bool:
        """Whether the name is of this kind, or all first lines have one form: two whole numbers, then other cells."""
        if has_suffix(source, ".csv", ".tsv", ".dat"):
            return True
        lines = text_lines(source, head)
        lines = [line for line in lines[_num_comments(lines) :] if line.strip()][:100]
        if not lines:
            return False
        dialect = guess_dialect(lines)
        table = [dialect.cells(line) for line in lines]
        return all(2 <= len(row) == len(table[0]) <= 4 and is_whole(row[0]) and is_whole(row[1]) for row in table)

    def __init__(self, path: str, options: DelimitedOptions, context: OpenContext) -> None:
        super().__init__(path, options, context)
        columns = None if options.columns is None else tuple(map(str, options.columns))
        lines = self._text.head_lines()
        self.num_skipped = _num_comments(lines)
        marks = [line[:1] for line in lines[: self.num_skipped] if line.startswith(COMMENTS)]
        self._comment = marks[0] if marks else None  # a file without comments may have ids that look like one
        lines = [line for line in lines[self.num_skipped :] if line.strip()]
        if not lines:
            self._text.fail("holds no line of data")
        self._dialect = guess_dialect(lines)
        table = [self._dialect.cells(line) for line in lines[:1000]]
        self._width = len(table[0])
        if self._width < 2:
            self._text.fail(
                f"one column only, {shown(lines[0])}: at least row and column must be there, parted by a comma, tab, "
                "semicolon, blank or '::'",
                self.num_skipped + 1,
            )
        self.header = self._find_header(table, columns)
        if self.header is None and columns is None and self._width > 4:
            self._text.fail(f"{self._width} columns and no header: say which are row, column and value (--columns)")
        chosen = self._choose(columns)
        self.num_skipped += self.header is not None
        table = table[self.header is not None :]
        probes = [line for lines in self._text.probes(NUM_PROBES, PROBE_BYTES) for line in lines.split(b"\n")]
        probed = map(self._dialect.cells, filter(bytes.strip, probes))
        sample = [row for row in (*table, *probed) if len(row) == self._width]
        self._columns = dict(zip(PARTS, chosen, strict=False))  # numbers of the columns that are read, by their part
        self._types = {part: pyarrow.float64() for part in self._columns}
        for place, part in enumerate(PARTS[:2]):
            cells = [row[chosen[place]] for row in sample if row[chosen[place]].strip()]
            has_words = sum(not is_whole(cell) for cell in cells) > MAX_BROKEN_PART * len(cells)
            name = columns[place] if columns is not None else ""
            is_text = name.endswith(AS_STRING) and name not in (self.header or ())
            self._types[part] = pyarrow.binary() if is_text or has_words else pyarrow.int64()
        if context.with_times:
            self._find_time([row for row in table if len(row) == self._width])
        else:
            self._columns.pop("time", None)
        self.axes = self._name(chosen[0]), self._name(chosen[1])

    def _find_header(self, table: list[list[bytes]], columns: tuple[str, ...] | None) -> list[str] | None:
        first = table[0]
        names = [cell.decode("utf-8", "backslashreplace").strip() for cell in first]
        known = [_plain(name) for name in names]
        named = columns is not None and not all(_without_type(name).isdecimal() for name in columns)
        second = table[1] if len(table) > 1 and len(table[1]) == len(first) else None
        words = second is not None and any(
            is_number(below) and cell.strip() and not is_number(cell) for cell, below in zip(first, second, strict=True)
        )
        if not (words or named or (ROWS.fullmatch(known[0]) and COLUMNS.fullmatch(known[1]))):
            return None
        if any(is_number(cell) for cell in first) and not named:
            return None  # a broken line, not a header
        repeated = next((name for name in names if name and names.count(name) > 1), None)
        if repeated is not None:
            self._text.fail(f"two columns are called {repeated!r}: rename one", self.num_skipped + 1)
        return names

    def _choose(self, columns: tuple[str, ...] | None) -> list[int]:
        """Return the numbers of the columns for row, column[, value]."""
        if columns is not None:
            if not 2 <= len(columns) <= len(PARTS):
                raise OptionError(
                    f"columns names {len(columns)} columns: name row, column and, if they exist, value and time"
                )
            chosen = [self._number(name) for name in columns]
            if len(set(chosen)) < len(chosen):
                raise OptionError(f"columns {columns!r} names a column twice")
            return chosen
        if self.header is None:
            return list(range(min(self._width, 3)))
        known = [_plain(name) for name in self.header]
        parts = [
            next((i for i, name in enumerate(known) if part.fullmatch(name)), -1) for part in (ROWS, COLUMNS, VALUES)
        ]
        left = [i for i, name in enumerate(known) if name and not TIMES.fullmatch(name)]
        if parts[0] >= 0 and parts[1] >= 0 and (parts[2] >= 0 or self._width <= 4):
            value = parts[2] if parts[2] >= 0 else next((i for i in left if i not in parts), -1)
            return [i for i in (*parts[:2], value) if i >= 0]
        if not 2 <= len(left) <= 3:
            names = ", ".join(repr(name) for name in self.header)
            self._text.fail(
                f"it cannot be told which of the columns {names} are row, column and value: say it (--columns)"
            )
        return left

    def _number(self, name: str) -> int:
        for word in (name, _without_type(name)):
            if self.header and word in self.header:
                return self.header.index(word)
            if word.isdecimal():
                if int(word) < self._width:
                    return int(word)
                raise OptionError(f"column {word} is not there: {printable(self.path)} has {self._width}, from 0")
        there = ", ".join(self.header) if self.header else f"no header, but columns 0 to {self._width - 1}"
        raise OptionError(f"column {name!r} is not in {printable(self.path)}: it has {there}")

    def _find_time(self, table: list[list[bytes]]) -> None:
        """Choose the column of times, if there is one, and its type, from the first lines."""
        if "time" in self._columns:
            candidates = [self._columns["time"]]
        elif self.header is not None:
            taken = self._columns.values()
            candidates = [i for i, name in enumerate(self.header) if i not in taken and TIMES.fullmatch(_plain(name))]
        else:
            has_fourth = len(self._columns) == 3 == self._width - 1
            are_times = has_fourth and all(is_whole(row[3]) and int(row[3]) in UNIX_TIMES for row in table)
            candidates = [3] if are_times else []
        for number in candidates:
            kind = time_type([row[number] for row in table])
            if kind is not None:
                self._columns["time"], self._types["time"] = number, kind
                self.time_name = self._name(number)
                return
        if candidates:
            cells = [row[candidates[0]] for row in table]
            strange = next((cell for cell in cells if time_type([cell]) is None), cells[-1])
            self._text.fail(
                f"{self._name(candidates[0])} holds times that are neither numbers nor ISO 8601 dates, such as "
                f"{shown(strange)}: write them so, or sort the lines by time and leave that column out"
            )

    def _name(self, number: int) -> str:
        return f"column {number}" if self.header is None else self.header[number]

    def blocks(self, max_bytes: int) -> Iterator[tuple[Block, int]]:
        num_rows = 0
        for piece in self._pieces(max_bytes):
            columns = self._parse(piece, self._read)
            wide = [int(byte_lengths(c).max()) for c in columns.values() if c.type == pyarrow.binary() and len(c)]
            step = max(1, len(columns["row"]) if not wide else max_bytes // 4 // (3 * sum(wide) + 32))
            count = len(columns["row"])
            num_rows += count
            has_gaps = piece.data.count(b"\n") != count
            for start in range(0, count, step):
                arrays = {part: _to_numpy(column.slice(start, step), part) for part, column in columns.items()}
                line = None if has_gaps else piece.line + start
                block = Block(arrays["row"], arrays["column"], arrays.get("value"), arrays.get("time"), line)
                yield block, piece.consumed_bytes
        if not num_rows:
            self._text.fail("holds no line of data below its header")

    def _read(self, data: bytes) -> dict[str, pyarrow.Array]:
        """Parse the columns of whole lines; raise ArrowInvalid if anything is wrong."""
        if self._comment is not None and (data.startswith(self._comment) or b"\n" + self._comment in data):
            raise pyarrow.ArrowInvalid("a comment")
        data = self._dialect.translate(data)
        types = {number: self._types[part] for part, number in self._columns.items()}
        read = read_columns(data, self._dialect.mark.decode(), self._dialect.has_quotes, self._width, types)
        columns = dict(zip(self._columns, read, strict=True))
        num_lines = data.count(b"\n")
        if data.startswith((b"\n", b"\r\n")) or b"\n\n" in data or b"\n\r\n" in data:  # some are empty
            num_lines = sum(1 for line in data.split(b"\n") if line.strip(b"\r"))
        if len(columns["row"]) != num_lines:
            raise pyarrow.ArrowInvalid("a line end where none should be")
        for column in columns.values():
            if column.type == pyarrow.binary() and len(column):
                lengths = byte_lengths(column)
                if not 0 < lengths.min() <= lengths.max() <= MAX_ID_BYTES:
                    raise pyarrow.ArrowInvalid("an id is empty or too long")
            if column.type == pyarrow.float64() and not np.isfinite(column.to_numpy()).all():
                raise pyarrow.ArrowInvalid("a value or time is not finite")
        return columns

    def _refuse_line(self, line: int, text: bytes) -> NoReturn:
        cells = self._dialect.cells(text)
        if self._comment is not None and text.startswith(self._comment):
            self._text.fail(f"a comment below the first line of data: remove it: {shown(text)}", line)
        if b"\r" in text:
            self._text.fail(f"holds a carriage return that ends no line: {shown(text)}", line)
        if self._dialect.has_quotes and text.count(b'"') % 2:
            self._text.fail(f"a quote is not closed in {shown(text)}", line)
        if len(cells) != self._width:
            self._text.fail(f"{len(cells)} columns where the lines above have {self._width}: {shown(text)}", line)
        for part, number in self._columns.items():
            kind = self._types[part]
            name = f"{part} {self.header[number]!r}" if self.header else part
            cell = cells[number]
            what = f"{name} is {shown(cell)}"
            if not cell.strip():
                self._text.fail(f"{name} is empty: {shown(text)}", line)
            as_read = pyarrow.float64() if kind == pyarrow.float64() and is_number(cell) else time_type([cell])
            if part == "time" and as_read != kind:
                self._text.fail(f"{what}, no time as those above: {shown(text)}", line)
            if kind == pyarrow.binary() and len(cell) > MAX_ID_BYTES:
                self._text.fail(f"{name} takes {len(cell)} bytes but the limit for an id is {MAX_ID_BYTES}", line)
            if kind == pyarrow.int64() and not is_whole(cell):
                told = self.header[number] if self.header else number
                self._text.fail(
                    f"{what}, no whole number of 64 bits as the ids above: if ids are strings, say so with the column "
                    f"'{told}{AS_STRING}' (--columns): {shown(text)}",
                    line,
                )
            if kind == pyarrow.float64() and not is_number(cell):
                self._text.fail(f"{what}, no number: {shown(text)}", line)
            if kind == pyarrow.float64() and not np.isfinite(float(cell)):
                row, column = (shown(cells[self._columns[axis]]) for axis in PARTS[:2])
                self._text.fail(f"{name} at row {row}, column {column} is {shown(cell)}: values must be finite", line)
        self._text.fail(f"cannot be read: {shown(text)}", line)


def _num_comments(lines: list[bytes]) -> int:
    """Count comments and blank lines before the first line of data."""
    return next((i for i, line in enumerate(lines) if line.strip() and not line.startswith(COMMENTS)), len(lines))


def _without_type(name: str) -> str:
    return name.removesuffix(AS_STRING)


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def _to_numpy(column: pyarrow.Array, part: str) -> np.ndarray:
    """Convert strings to bytes of fixed length, and times to whole numbers of the same order."""
    if column.type == pyarrow.binary():
        return to_fixed_bytes(column)
    if pyarrow.types.is_timestamp(column.type):
        return column.cast(pyarrow.int64()).to_numpy()
    values: np.ndarray = column.to_numpy()
    if part == "time" and values.dtype.kind == "f":
        bits = (values + 0.0).view(np.int64)  # -0.0 becomes 0.0
        return bits ^ (bits >> 63 & np.int64((1 << 63) - 1))
    return values
