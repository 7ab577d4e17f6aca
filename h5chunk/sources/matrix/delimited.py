"""Read (row, column[, value[, time]]) entries from delimited text: ratings.csv, ratings.dat, u.data, edge lists.

| property | how it is detected, unless an option of `DelimitedOptions` sets it |
| --- | --- |
| separator | ``::``, tab, ``|``, semicolon, comma or runs of blanks, whichever splits the first lines evenly |
| header | the first line, if it has words where the second line has numbers, or well-known names. If it has one name \
too few, the last column is empty, or the first column has row names, as R writes them |
| columns | by their names (userId, movieId, rating, timestamp and the like), otherwise the first, second and third |
| ids | int64 if at least 199 of 200 ids in a sample of lines are integers without leading zeros (any other id is then \
an error), otherwise strings |
| values | float64, finite |
| times | if requested: the column with such a name, or the fourth of four columns without a header if it looks like \
Unix times; integers, real numbers or ISO 8601 dates |

Lines above the data that begin with ``#`` or ``%`` are comments. If there are any, a line further down that begins with
the same mark is an error, unless the option ``comment`` names it. Blank lines are skipped.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any, NoReturn

import numpy as np

from h5chunk.errors import OptionError, count_text, names_text, printable
from h5chunk.sample_source import OpenContext
from h5chunk.sources.arrow import byte_lengths, pyarrow, to_fixed_bytes
from h5chunk.sources.cells import WHOLE, check_floats, may_be_lost
from h5chunk.sources.kinds import DelimitedOptions
from h5chunk.sources.matrix.block import Block
from h5chunk.sources.matrix.columns import (
    AS_STRING,
    COLUMNS,
    PARTS,
    ROWS,
    are_entries,
    choose_columns,
    describe_choice,
    names_show_entries,
    order_of_floats,
    plain_names,
    time_columns,
    without_type,
)
from h5chunk.sources.matrix.dialect import (
    COMMENTS,
    dialect_of,
    guess_dialect,
    is_number,
    is_whole,
    num_comments,
    time_type,
)
from h5chunk.sources.matrix.text import MAX_ID_BYTES, NOT_UTF8, TextSource, quote_line, read_columns
from h5chunk.sources.recognise import AS_MANIFEST, has_suffix, names_image, text_lines
from h5chunk.sources.text_table import is_table

MAX_BROKEN_PART = 0.005  # ids are integers if at most this fraction of the sampled ids are not
UNIX_TIMES = range(10**8, 10**14)  # from 1973 in seconds to 5138 in milliseconds
NUM_PROBES, PROBE_BYTES = 16, 1 << 14


class DelimitedSource(TextSource):
    """Entries in delimited text.

    The option ``columns`` selects the columns with the row, the column and, optionally, the value and the time of an
    entry, by their names in the header or their numbers from 0. A name that ends with ``:str`` declares the ids of that
    column to be strings.
    """

    kind = "csv"
    shape = (None, None)
    has_ids = True
    Options = DelimitedOptions
    types_remedy = (
        "name the columns; a name that ends with :str is read as strings (--columns user:str,item:str,rating)"
    )
    pieces_in_memory = 6  # bytes of memory per byte read: text, its translation, pyarrow's columns, the block, masks

    @classmethod
    def recognises(cls, source: Any, head: bytes) -> bool:
        """Return whether a source is text with entries, by its suffix, header, or two integers at each line's start."""
        if is_table(source, head):
            return False
        if has_suffix(source, ".csv", ".tsv", ".psv", ".dat", ".inter"):
            return True
        lines = text_lines(source, head)
        lines = [line for line in lines[num_comments(lines) :] if line.strip()][:100]
        if not lines:
            return False
        dialect = guess_dialect(lines)
        table = [dialect.cells(line) for line in lines]
        if are_entries([cell.decode("utf-8", "backslashreplace") for cell in table[0]]):
            return True
        return all(2 <= len(row) == len(table[0]) <= 4 and is_whole(row[0]) and is_whole(row[1]) for row in table)

    def __init__(self, path: str, options: DelimitedOptions, context: OpenContext) -> None:
        super().__init__(path, options, context)
        self._options = options
        lines = self._text.head_lines()
        self.num_skipped = num_comments(lines, options.comment)
        marks = [line[:1] for line in lines[: self.num_skipped] if line.startswith(COMMENTS)]
        self._comment = marks[0] if marks else None  # without comments at the start, ids may begin with such a mark
        lines = [line for line in lines[self.num_skipped :] if line.strip() and not self._is_comment(line)]
        if options.header == "skip":
            lines, self.num_skipped = lines[1:], self.num_skipped + 1
        if not lines:
            self._text.fail("has no line of data")
        self._dialect = dialect_of(options, lines)
        table = [self._dialect.cells(line) for line in lines[:1000]]
        if context.is_guessed and options.columns is None and any(map(names_image, table[-1])):
            self._text.fail(f"contains names of images: {AS_MANIFEST}; or name the format of the table (--format csv)")
        requested = None if options.columns is None else tuple(map(str, options.columns))
        self.header = self._find_header(table, requested)
        self._width = len(self.header or table[0])
        self._check_width(lines[0], requested)
        chosen = choose_columns(self.header, self._width, requested, self.path, self._text.fail, context.is_guessed)
        self._columns = dict(zip(PARTS, chosen, strict=False))  # numbers of the columns that are read, by role
        self.num_skipped += self.header is not None
        table = [row for row in table[self.header is not None :] if len(row) == self._width]
        self._types = {part: pyarrow.float64() for part in self._columns}
        self._choose_id_types(table, requested)
        if context.with_times:
            self._find_time(table)
        else:
            self._columns.pop("time", None)
        self.axes = self._name(chosen[0]), self._name(chosen[1])
        self.entry_types = {part: f"{kind}s" for part, kind in self._types.items() if part != "value"}
        names = [str(number) if self.header is None else self.header[number] for number in chosen[:2]]
        self.pair_option = f"--columns {shlex.quote(','.join(names))}" if len(chosen) > 2 else ""
        self._text.head = b""  # thousands of files may be open
        choice = describe_choice(list(map(self._name, range(self._width))), self._columns)
        if context.is_guessed and requested is None and not names_show_entries(self.header or ()):
            row, column = map(repr, self.axes)
            self.notes = [
                f"each line became an entry of a matrix: row {row}, column {column}, {choice} (--format table: each "
                "line is a sample; --columns: choose the row, column and value)"
            ]
        elif self._width > 2:
            self.notes = [choice]

    def _is_comment(self, line: bytes) -> bool:
        return self._options.comment is not None and line.startswith(self._options.comment.encode())

    def _check_width(self, first: bytes, requested: tuple[str, ...] | None) -> None:
        if self._width < 2:
            self._text.fail(
                f"only one column, {quote_line(first)}: a line needs a row and a column, separated by a comma, tab, "
                "semicolon, '|', blank or '::', or by another separator (--separator)",
                self.num_skipped + 1,
            )
        if self.header is None and requested is None and self._width > 4:
            self._text.fail(
                f"{self._width} columns and no header: pass the numbers of the columns with the row, the column and "
                "the value (--columns)"
            )

    def _choose_id_types(self, table: list[list[bytes]], requested: tuple[str, ...] | None) -> None:
        """Read ids as strings if the option ``columns`` declares this, or if too many sampled ids are not integers."""
        probes = [line for lines in self._text.probes(NUM_PROBES, PROBE_BYTES) for line in lines.split(b"\n")]
        probed = map(self._dialect.cells, filter(bytes.strip, probes))
        ids, texts = [self._name(self._columns[part]) for part in PARTS[:2]], self._options.text_columns or ()
        if unknown := set(texts).difference(ids, requested or ()):
            raise OptionError(
                f"text_columns has {min(unknown)!r}, but only ids can be text, which are in the columns "
                f"{ids[0]!r} and {ids[1]!r}"
            )
        sample = [*table, *(row for row in probed if len(row) == self._width)]
        for axis, part in enumerate(PARTS[:2]):
            cells = [row[self._columns[part]] for row in sample if row[self._columns[part]].strip()]
            has_words = sum(not is_whole(cell) for cell in cells) > MAX_BROKEN_PART * len(cells)
            name = requested[axis] if requested is not None else ""
            is_text = name.endswith(AS_STRING) and name not in (self.header or ())
            is_text |= not {name, ids[axis]}.isdisjoint(texts)
            self._types[part] = pyarrow.string() if is_text or has_words else pyarrow.int64()

    def _find_header(self, table: list[list[bytes]], requested: tuple[str, ...] | None) -> list[str] | None:
        """Return the names of all columns, or None if the first line is not a header."""
        first = table[0]
        names = [cell.decode("utf-8", "backslashreplace").strip() for cell in first]
        below = table[1:]
        if below and all(len(row) == len(first) + 1 for row in below):
            names = ["", *names] if any(row[-1].strip() for row in below) else [*names, ""]
        if not self._has_header(names, below, requested):
            return None
        if any(cell.decode("utf-8", "ignore").encode() != cell for cell in table[0]):
            self._text.fail(
                f"a name of a column is {NOT_UTF8}: {quote_line(b', '.join(table[0]))}", self.num_skipped + 1
            )
        repeated = next((name for name in names if name and names.count(name) > 1), None)
        if repeated is not None:
            self._text.fail(f"two columns are called {repeated!r}: rename one", self.num_skipped + 1)
        return names

    def _has_header(self, names: list[str], below: list[list[bytes]], requested: tuple[str, ...] | None) -> bool:
        if self._options.header != "auto":
            return self._options.header == "yes"
        known = plain_names(names)
        named = requested is not None and not all(without_type(name).isdecimal() for name in requested)
        first = [name.encode() for name in names]
        second = below[0] if below and len(below[0]) == len(first) else []
        words = any(is_number(cell) and name and not is_number(name) for name, cell in zip(first, second, strict=False))
        if not (words or named or (any(map(ROWS.fullmatch, known)) and any(map(COLUMNS.fullmatch, known)))):
            recurs = any(cell in column for cell, column in zip(first, zip(*below, strict=False), strict=False))
            if not recurs and not any(map(is_number, first)):
                quoted = names_text(map(repr, names))
                self._text.fail(
                    f"the first line, {quoted}, may be names of columns or data: say which (--header yes or no), or "
                    "pass --format table if each line is a sample, and not an entry of a sparse matrix",
                    self.num_skipped + 1,
                )
            return False
        return named or not any(map(is_number, first))  # a number is no name: it is in a broken line of data

    def _find_time(self, table: list[list[bytes]]) -> None:
        """Find the column of times and its type from the first lines; without such a column, do nothing."""
        if "time" in self._columns:
            candidates = [self._columns["time"]]
        elif self.header is not None:
            candidates = time_columns(self.header, list(self._columns.values()))
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
                f"{self._name(candidates[0])} must hold times, as numbers or ISO 8601 dates, but has "
                f"{quote_line(strange)}: convert them, or sort the lines by time and leave out that column"
            )

    def _name(self, number: int) -> str:
        return f"column {number}" if self.header is None else self.header[number]

    def blocks(self, max_bytes: int) -> Iterator[tuple[Block, int]]:
        num_rows = 0
        for piece in self._pieces(max_bytes):
            columns = self._parse(piece, self._read)
            wide = [int(byte_lengths(c).max()) for c in columns.values() if c.type == pyarrow.string() and len(c)]
            step = max(1, len(columns["row"]) if not wide else max_bytes // 4 // (3 * sum(wide) + 32))
            count = len(columns["row"])
            num_rows += count
            has_gaps = piece.data.count(b"\n") != count
            for start in range(0, count, step):
                arrays = {part: _to_numpy(column.slice(start, step), part) for part, column in columns.items()}
                line = None if has_gaps else piece.line + start
                block = Block(arrays["row"], arrays["column"], arrays.get("value"), arrays.get("time"), line)
                yield block, piece.consumed_bytes
        if not num_rows and self._text.is_whole:
            self._text.fail("has no line of data below its header")

    def _read(self, data: bytes) -> dict[str, pyarrow.Array]:
        """Parse the columns of whole lines. Raises ArrowInvalid if a line is invalid."""
        if self._options.comment:
            lines = data.splitlines(keepends=True)
            data = b"".join(line for line in lines if not self._is_comment(line))
        if self._comment is not None and (data.startswith(self._comment) or b"\n" + self._comment in data):
            raise pyarrow.ArrowInvalid("a comment")
        data = self._dialect.translate(data)
        types = {number: self._types[part] for part, number in self._columns.items()}
        mark, quotes = self._dialect.mark.decode(), self._dialect.has_quotes
        read = read_columns(data, mark, quotes, self._width, types, self._options.decimal or ".")
        columns = dict(zip(self._columns, read, strict=True))
        num_lines = data.count(b"\n")
        if data.startswith((b"\n", b"\r\n")) or b"\n\n" in data or b"\n\r\n" in data:  # there are blank lines
            num_lines = sum(1 for line in data.split(b"\n") if line.strip(b"\r"))
        if len(columns["row"]) != num_lines:
            raise pyarrow.ArrowInvalid("an unexpected line end")
        for column in columns.values():
            if column.type == pyarrow.string() and len(column):
                lengths = byte_lengths(column)
                if not 0 < lengths.min() <= lengths.max() <= MAX_ID_BYTES:
                    raise pyarrow.ArrowInvalid("an id is empty or too long")
            if column.type == pyarrow.float64() and not np.isfinite(column.to_numpy()).all():
                raise pyarrow.ArrowInvalid("a value or time is not finite")
            if column.type == pyarrow.float64() and may_be_lost(column.to_numpy()):
                number = next(number for part, number in self._columns.items() if columns[part] is column)
                [cells] = read_columns(data, mark, quotes, self._width, {number: pyarrow.string()})
                check_floats(self._name(number), column.to_numpy(), [cell.encode() for cell in cells.to_pylist()])
        return columns

    def _refuse_line(self, line: int, text: bytes) -> NoReturn:
        cells, quoted = self._dialect.cells(text), quote_line(text)
        if self._comment is not None and text.startswith(self._comment):
            mark = self._comment.decode()
            self._text.fail(f"a comment among the data: remove it, or pass --comment '{mark}': {quoted}", line)
        if b"\r" in text:
            self._text.fail(f"contains a carriage return that does not end the line: {quoted}", line)
        if self._dialect.has_quotes and text.count(b'"') % 2:
            self._text.fail(f"a quote is not closed: close it, or pass --no-quotes: {quoted}", line)
        if len(cells) != self._width:
            self._text.fail(
                f"{count_text(len(cells), 'column')} where the lines above have {self._width}: {quoted}", line
            )
        for part, number in self._columns.items():
            self._refuse_cell(line, text, part, number, cells)
        self._text.fail(f"cannot be read: {quoted}", line)

    def _hint_for_empty_cells(self) -> str:
        """Return the call of pandas that leaves out the lines that lack an id or a value, if it reads this format."""
        if not self.header or len(self._dialect.separator) > 1:
            return " (complete or remove such lines)"
        needed = [self.header[number] for part, number in self._columns.items() if part != "time"]
        separator = "" if self._dialect.separator == b"," else f", sep={self._dialect.separator.decode()!r}"
        return (
            f" (complete such lines, or leave them out: pandas.read_csv({printable(self.path)!r}{separator}, dtype=str)"
            f".dropna(subset={needed!r}).to_csv('complete.csv', index=False))"
        )

    def _refuse_cell(self, line: int, text: bytes, part: str, number: int, cells: list[bytes]) -> None:
        """Raise a SourceError that says what is wrong with a cell, if it is invalid."""
        cell, kind = cells[number], self._types[part]
        label = self.header[number] if self.header else number
        name = f"{part} {label!r}" if self.header else part
        problem = ""
        if not cell.strip():
            self._text.fail(f"{name} is empty: {quote_line(text)}{self._hint_for_empty_cells()}", line)
        if kind == pyarrow.string():
            if len(cell) > MAX_ID_BYTES:
                self._text.fail(f"{name} takes {len(cell)} bytes but the limit for an id is {MAX_ID_BYTES}", line)
            if cell.decode("utf-8", "ignore").encode() != cell:
                problem = f"which is {NOT_UTF8}"
        elif part == "time":
            is_right = is_number(cell) if kind == pyarrow.float64() else time_type([cell]) == kind
            problem = "" if is_right else "which is not in the format of the times above"
        elif kind == pyarrow.int64() and not is_whole(cell):
            problem = (
                "which is not a 64-bit integer like the ids above: if ids are strings, name the column "
                f"'{label}{AS_STRING}' (--columns)"
            )
        elif kind == pyarrow.float64():
            as_number = cell.replace(b",", b".") if self._options.decimal == "," else cell
            if not is_number(as_number):
                problem = f"which is not a number{self._number_hint(cell)}"
            elif not np.isfinite(float(as_number)):
                row, column = (quote_line(cells[self._columns[axis]]) for axis in PARTS[:2])
                self._text.fail(
                    f"{name} at row {row}, column {column} is {quote_line(cell)}: values must be finite", line
                )
            elif WHOLE.fullmatch(as_number) and int(as_number) != int(float(as_number)):
                problem = (
                    f"which would be rounded to {float(as_number):.17g}: if it is an id, name the columns of the "
                    "row, the column and the value (--columns); otherwise write values with fewer digits"
                )
        if problem:
            self._text.fail(f"{name} is {quote_line(cell)}, {problem}: {quote_line(text)}", line)

    def _number_hint(self, cell: bytes) -> str:
        if is_number(cell.replace(b",", b".")):
            return ": if commas mark decimals, pass --decimal ,"
        return "" if self.header or self._options.columns else ": if values are in another column, pass --columns"


def _to_numpy(column: pyarrow.Array, part: str) -> np.ndarray:
    """Convert a column to NumPy: strings to fixed-length bytes, and times to int64 that sort in the same order."""
    if column.type == pyarrow.string():
        return to_fixed_bytes(column)
    if pyarrow.types.is_timestamp(column.type):
        return column.cast(pyarrow.int64()).to_numpy()
    values: np.ndarray = column.to_numpy()
    if part == "time" and values.dtype.kind == "f":
        return order_of_floats(values)
    return values
