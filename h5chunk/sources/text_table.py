"""Read delimited text whose lines are samples, such as iris.csv, as an Arrow table.

Text whose lines are entries of a sparse matrix is read by `h5chunk.sources.matrix.delimited`.

| column | becomes |
| --- | --- |
| numbers | int64 or float64 |
| strings, at most 50 distinct ones | categories |
| other strings | strings |
| a column without a name, as pandas and R write row names | a field called ``index`` |

Without a header, columns are called ``column_0``, ``column_1`` and so on.
"""

from __future__ import annotations

import csv
import io
import re
from typing import Any, NamedTuple

from h5chunk.errors import SourceError, human_bytes, printable
from h5chunk.sources.arrow import csv as arrow_csv
from h5chunk.sources.arrow import pyarrow
from h5chunk.sources.matrix.columns import names_show_entries
from h5chunk.sources.matrix.dialect import Dialect, guess_dialect, is_number, num_comments
from h5chunk.sources.matrix.text import TextFile
from h5chunk.sources.recognise import has_suffix, text_lines

SUFFIXES = (".csv", ".tsv", ".psv", ".dat", ".data", ".txt")
MAX_ENTRY_COLUMNS = 4  # row, column, value and time
HEAD_LINES = 100
MAX_CATEGORIES = 50
PIECE_BYTES = 16 << 20
MISSING = ("", "?", "-", "NA", "N/A", "None", "null")
DECIMAL_COMMA = re.compile(r"[+-]?[0-9]+,[0-9]+")


class TextTable(NamedTuple):
    """The format of a table in a text file."""

    dialect: Dialect
    names: list[str]
    num_skipped: int  # lines above the first sample
    has_header: bool
    decimal: str


def detect_format(lines: list[bytes]) -> TextTable | None:
    """Detect the format of a table from its first lines; None without several columns, of which one has numbers."""
    num_skipped = num_comments(lines)
    lines_of_data = [line for line in lines[num_skipped:] if line.strip()][:HEAD_LINES]
    if len(lines_of_data) < 2:
        return None
    dialect = guess_dialect(lines_of_data)
    first, *below = _rows(dialect, lines_of_data)
    whole = [row for row in below if len(row) == len(first)]  # others are errors of the table
    has_commas = dialect.separator == b";" and any(DECIMAL_COMMA.fullmatch(cell) for row in whole for cell in row)
    has_numbers = has_commas or any(is_number(cell) for row in whole for cell in row)
    if len(first) < 2 or 2 * len(whole) <= len(below) or not has_numbers:
        return None
    numbers = [any(map(is_number, column)) for column in zip(*whole, strict=True)]
    words = [not is_number(cell) and cell not in MISSING and not DECIMAL_COMMA.fullmatch(cell) for cell in first]
    has_header = all(words) or any(word and number for word, number in zip(words, numbers, strict=True))
    names = [cell.strip("'").replace("/", "_") or "index" for cell in first]
    if not has_header:
        names = [f"column_{number}" for number in range(len(first))]
    return TextTable(dialect, names, num_skipped + has_header, has_header, "," if has_commas else ".")


def is_table(source: Any, head: bytes) -> bool:
    """Return whether a file is delimited text whose lines are samples rather than entries of a matrix.

    Entries have well-known column names, or two to four columns of which the first two have no fractions.
    """
    lines = text_lines(source, head) if has_suffix(source, *SUFFIXES) else []
    form = detect_format(lines)
    if form is None or (form.has_header and names_show_entries(form.names)):
        return False
    rows = _rows(form.dialect, lines[form.num_skipped :][:HEAD_LINES])
    firsts = (cell.replace(form.decimal, ".") for row in rows for cell in row[:2])
    return len(form.names) > MAX_ENTRY_COLUMNS or any(map(_is_fraction, firsts))


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
    except csv.Error:  # such as a cell without end
        return [[]]


def _is_fraction(cell: str) -> bool:
    return "." in cell and is_number(cell) and not float(cell).is_integer()


def read_text_table(path: str, memory_bytes: int) -> tuple[Any, TextTable]:
    """Read a text file as an Arrow table, and return it with its format. Raises SourceError if it is too large."""
    text = TextFile(path)
    form = detect_format(text.head_lines())
    if form is None:
        text.fail("its first lines are not a table: give several columns, one of them numbers, in all lines")
    data = io.BytesIO()
    for piece in text.pieces(PIECE_BYTES):
        data.write(form.dialect.translate(piece.data))
        if data.tell() > memory_bytes // 2:
            text.fail(f"takes over {human_bytes(memory_bytes // 2)} as text: save it as .parquet and convert that")
    if repeated := [name for name in form.names if form.names.count(name) > 1]:
        text.fail(f"two columns are called {printable(repeated[0])!r}: rename one")
    data.seek(0)
    table = arrow_csv.read_csv(
        data,
        arrow_csv.ReadOptions(column_names=form.names, skip_rows=form.num_skipped),
        arrow_csv.ParseOptions(
            delimiter=form.dialect.mark.decode(),
            quote_char='"' if form.dialect.has_quotes else False,
            newlines_in_values=form.dialect.has_quotes,
        ),
        arrow_csv.ConvertOptions(
            decimal_point=form.decimal, auto_dict_encode=True, auto_dict_max_cardinality=MAX_CATEGORIES
        ),
    )
    for field in table.schema:
        kind = field.type.value_type if pyarrow.types.is_dictionary(field.type) else field.type
        if pyarrow.types.is_binary(kind):
            raise SourceError(f"{printable(path)}: column {field.name!r} is not UTF-8: convert the file (iconv)")
    return table, form
