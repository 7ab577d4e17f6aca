"""Read delimited text whose lines are samples, such as iris.csv, as an Arrow table.

Text whose lines are entries of a sparse matrix is read by `h5chunk.sources.matrix.delimited`.

| column | becomes |
| --- | --- |
| numbers | int64, uint64 or float64 |
| integers that do not fit 64 bits, and columns in ``text_columns`` | as strings |
| strings, at most 50 distinct ones | categories |
| other strings | strings |
| a column without a name, as pandas and R write row names | a field called ``index`` |

Without a header, columns are called ``column_0``, ``column_1`` and so on.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from h5chunk.errors import OptionError, SourceError, allowing, human_bytes, names_text, printable
from h5chunk.sources.arrow import compute, has_type, pyarrow
from h5chunk.sources.arrow import csv as arrow_csv
from h5chunk.sources.cells import WHOLE, LostDigitsError, check_floats, may_be_lost, note_zeros
from h5chunk.sources.kinds import TableOptions, TextOptions
from h5chunk.sources.matrix.columns import names_show_entries
from h5chunk.sources.matrix.dialect import Dialect, dialect_of, is_number, num_comments
from h5chunk.sources.matrix.text import TextFile, check_utf8
from h5chunk.sources.recognise import has_suffix, text_lines

SUFFIXES = (".csv", ".tsv", ".psv", ".dat", ".data", ".txt")
MAX_ENTRY_COLUMNS = 4  # row, column, value and time
HEAD_LINES = 100
PIECE_BYTES = 16 << 20
MISSING = ("", "?", "-", "NA", "N/A", "None", "null")
DECIMAL_COMMA = re.compile(r"[+-]?[0-9]+,[0-9]+")
DETECTED = TextOptions()
ODD_LINE = (
    "its first line has {} cells but the others have {}: if it is neither column names nor data, skip it "
    "(--header skip)"
)


class TextTable(NamedTuple):
    """The format of a table in a text file."""

    dialect: Dialect
    names: list[str]
    num_skipped: int  # lines above the first sample
    has_header: bool
    decimal: str
    has_numbers: bool  # in any column
    problem: str = ""  # the reason why the table cannot be read with the options, if any


def detect_format(lines: list[bytes], options: TextOptions = DETECTED) -> TextTable | None:
    """Detect the format of a table from its first lines.

    Returns None unless they have several columns.
    """
    lines = without_comments(lines, options.comment)
    num_skipped = num_comments(lines)
    data_lines = [line for line in lines[num_skipped:] if line.strip()][:HEAD_LINES]
    if options.header == "skip":
        num_skipped, data_lines = num_skipped + 1, data_lines[1:]
    if len(data_lines) < 2:
        return None
    dialect = dialect_of(options, data_lines)
    first, *below = _rows(dialect, data_lines)
    is_even = len(below) > 1 and len({len(row) for row in below}) == 1
    width = len(below[0]) if is_even else len(first)
    whole = [row for row in below if len(row) == width]  # other rows raise an error when the table is read
    decimal = options.decimal or _guess_decimal(dialect, whole)
    columns = [[cell.replace(decimal, ".") for cell in column] for column in zip(*whole, strict=True)]
    numbers = [any(map(is_number, column)) for column in columns]
    if width < 2 or 2 * len(whole) <= len(below):
        return None
    words = [not is_number(cell.replace(decimal, ".")) and cell not in MISSING for cell in first]
    if all(words) and len(first) == width - 1:  # R leaves out the name of the column of row names
        first, words = ["", *first], [True, *words]
    has_header = all(words) or any(word and number for word, number in zip(words, numbers, strict=False))
    has_header |= _counts_up(first) and not _counts_up(below[0])
    if options.header != "auto":
        has_header = options.header == "yes"
    problem = "" if len(first) == width else ODD_LINE.format(len(first), width)
    names = [f"column_{number}" for number in range(width)]
    if has_header and not problem:
        names = [cell.strip("'").replace("/", "_") or "index" for cell in first]
    return TextTable(dialect, names, num_skipped + has_header, has_header, decimal, any(numbers), problem)


def _counts_up(row: list[str]) -> bool:
    """Return whether the numbers in a row are consecutive, such as years, and thus probably column names."""
    numbers = [cell for cell in row if is_number(cell)]
    is_counted = len(numbers) > 2 and numbers[0].isdecimal()
    return is_counted and numbers == [str(int(numbers[0]) + step) for step in range(len(numbers))]


def _guess_decimal(dialect: Dialect, rows: list[list[str]]) -> str:
    is_comma = dialect.separator == b";" and any(DECIMAL_COMMA.fullmatch(cell) for row in rows for cell in row)
    return "," if is_comma else "."


def without_comments(lines: list[bytes], mark: str | None) -> list[bytes]:
    """Return the lines that do not begin with the comment mark."""
    return [line for line in lines if not line.startswith(mark.encode())] if mark else lines


def is_table(source: Any, head: bytes) -> bool:
    """Return whether a file is delimited text whose lines are samples rather than entries of a matrix.

    Lines are entries if their columns have names such as user and item, or if there are two to four columns, the first
    two without fractions.
    """
    lines = text_lines(source, head) if has_suffix(source, *SUFFIXES) else []
    form = detect_format(lines)
    if form is None or not form.has_numbers or (form.has_header and names_show_entries(form.names)):
        return False
    return len(form.names) > MAX_ENTRY_COLUMNS or _has_fractions(form, lines, form.names[:2])


def may_be_entries(source: Any, options: TableOptions) -> bool:
    """Return whether the chosen columns may be the rows, columns, values and times of matrix entries."""
    columns = options.columns or ()
    if not 2 <= len(columns) <= MAX_ENTRY_COLUMNS or options.non_defaults().keys() - {"columns", *TextOptions.names()}:
        return False
    lines = TextFile(source, options.encoding).head_lines()
    form = detect_format(lines, options)
    return form is None or not _has_fractions(form, lines, columns[:2])


def _has_fractions(form: TextTable, lines: list[bytes], names: Sequence[str]) -> bool:
    """Return whether any of the named columns has fractions in the first lines."""
    places = [form.names.index(name) for name in names if name in form.names]
    rows = _rows(form.dialect, lines[form.num_skipped :][:HEAD_LINES])
    cells = (row[place].replace(form.decimal, ".") for row in rows for place in places if place < len(row))
    return any(map(_is_fraction, cells))


def _rows(dialect: Dialect, lines: list[bytes]) -> list[list[str]]:
    """Split lines into cells; a quoted cell may contain line breaks."""
    text = dialect.translate(b"\n".join(lines)).decode("utf-8", "backslashreplace")
    rows = csv.reader(
        io.StringIO(text, newline=""),
        delimiter=dialect.mark.decode(),
        quoting=csv.QUOTE_MINIMAL if dialect.has_quotes else csv.QUOTE_NONE,
    )
    try:
        return [[cell.strip() for cell in row] for row in rows if row]
    except csv.Error:  # such as an unterminated quote
        return [[]]


def _is_fraction(cell: str) -> bool:
    return "." in cell and is_number(cell) and not float(cell).is_integer()


def read_text_table(path: str, options: TextOptions, memory_bytes: int) -> tuple[Any, TextTable, list[tuple[str, str]]]:
    """Read a text file as an Arrow table, and return it with its format, and the names of columns with notes on them.

    Raises SourceError if the file is not a table, or has more than half of ``memory_bytes`` of text.
    """
    text = TextFile(path, options.encoding)
    form = detect_format(text.head_lines(), options)
    if form is None:
        text.fail("its first lines are not a table: all lines need the same number of columns, at least two")
    if form.problem:
        text.fail(form.problem)
    data = io.BytesIO()
    for piece in text.pieces(PIECE_BYTES):
        lines = piece.data
        check_utf8(text, piece)
        if options.comment:
            lines = b"".join(without_comments(lines.splitlines(keepends=True), options.comment))
        data.write(form.dialect.translate(lines))
        if data.tell() > memory_bytes // 2:
            needed = allowing(2 * max(text.num_bytes, data.tell()))
            text.fail(
                f"is over {human_bytes(memory_bytes // 2)} of text, half of the memory limit: allow more memory "
                f"(--memory-bytes {needed}), or save it as .parquet, and convert that"
            )
    if repeated := [name for name in form.names if form.names.count(name) > 1]:
        text.fail(f"two columns are called {printable(repeated[0])!r}: rename one of them")
    for name in options.text_columns or ():
        if name not in form.names:
            raise OptionError(f"{printable(path)}: has no column {name!r}: it has {names_text(form.names)}")
    table = _parse(data, form, dict.fromkeys(options.text_columns or (), pyarrow.string()))
    notes: list[tuple[str, str]] = []
    for number, name in enumerate(form.names):
        floats = table.column(number)
        if floats.type == pyarrow.float64() and may_be_lost(floats.to_numpy()):
            try:
                table = table.set_column(number, name, _exact(data, form, name, floats.to_numpy()))
            except LostDigitsError as error:
                raise SourceError(f"{printable(path)}: column {name!r} {error}") from None
            if table.column(number).type == pyarrow.string():
                notes.append((name, f"column {name!r} became text, because its integers do not fit 64 bits"))
    return table, form, notes + _zeros(data, form, table)


def _zeros(data: io.BytesIO, form: TextTable, table: Any) -> list[tuple[str, str]]:
    """Return the names of columns of integers that had leading zeros in the text, with notes."""
    mark = re.escape(form.dialect.mark)
    whole = [field.name for field in table.schema if has_type(field.type, "integer")]
    if not whole or re.search(rb"(?:^|[\"\n" + mark + rb"])[ +-]*0[0-9]", data.getbuffer()) is None:
        return []
    texts = _parse(data, form, dict.fromkeys(whole, pyarrow.string()), whole)
    notes = []
    for name in whole:
        cells = compute.utf8_ltrim_whitespace(texts.column(name))
        padded = cells.filter(compute.match_substring_regex(cells, "^0[0-9]"))
        notes += [(name, note) for note in note_zeros(name, padded[:1].to_numpy().astype("S"))]
    return notes


def _exact(data: io.BytesIO, form: TextTable, name: str, floats: np.ndarray) -> Any:
    """Read a column of large numbers again: as integers, as text if they do not fit 64 bits, or else as ``floats``.

    Raises `LostDigitsError` if float64 does not hold the numbers.
    """
    texts = _parse(data, form, {name: pyarrow.string()}, [name]).column(0)
    cells = [(cell or "").replace(form.decimal, ".").encode() for cell in texts.to_pylist()]
    if not all(map(WHOLE.fullmatch, filter(None, cells))):
        check_floats(name, floats, cells)
        return pyarrow.array(floats, from_pandas=True)
    try:
        return texts.cast(pyarrow.uint64())
    except pyarrow.ArrowInvalid:
        return texts


def _parse(data: io.BytesIO, form: TextTable, types: dict[str, Any], columns: list[str] | None = None) -> Any:
    """Parse lines as an Arrow table. ``types`` are those of columns whose type is not to be detected."""
    data.seek(0)
    return arrow_csv.read_csv(
        data,
        arrow_csv.ReadOptions(column_names=form.names, skip_rows=form.num_skipped),
        arrow_csv.ParseOptions(
            delimiter=form.dialect.mark.decode(),
            quote_char='"' if form.dialect.has_quotes else False,
            newlines_in_values=form.dialect.has_quotes,
        ),
        arrow_csv.ConvertOptions(
            decimal_point=form.decimal,
            null_values=[*arrow_csv.ConvertOptions().null_values, *MISSING],
            strings_can_be_null=columns is not None,
            column_types=types,
            include_columns=columns,
        ),
    )
