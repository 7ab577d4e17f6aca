"""Find the columns of a table of entries, such as ratings, that hold the row, column, value and time of an entry.

They are found by their names, which are compared in lower case, without separators: ``User-ID`` is ``userid``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import numpy as np

from h5chunk.errors import OptionError, count_text, names_text, printable

ROWS = re.compile(
    "user|userid|uid|reviewerid|customer|customerid|row|rowid|cell|cellid|barcode|query|doc|document|from|fromnodeid|"
    "source|src|i|u"
)
COLUMNS = re.compile(
    "item|itemid|iid|movie|movieid|product|productid|isbn|asin|artist|artistid|track|trackid|song|songid|book|bookid|"
    "business|businessid|column|columnid|col|gene|geneid|feature|term|word|to|tonodeid|target|dst|j"
)
VALUES = re.compile("rating|bookrating|score|value|val|count|counts|weight|stars|plays|overall|data|umi|r|v")
RATINGS = re.compile("rating|bookrating|stars|plays|umi")  # which only entries have
TIMES = re.compile("timestamp|time|date|datetime|ts|unixreviewtime|reviewtime")
PARTS = ("row", "column", "value", "time")
AS_STRING = ":str"
MAX_ENTRY_NAMES = 30
TYPE = re.compile(r":(token|float|token_seq|float_seq)$")  # follows the names of columns in RecBole's atomic files


def plain(name: str) -> str:
    """Return a name in lower case, without separators and without a type such as ``:token``."""
    return "".join(letter for letter in TYPE.sub("", name.lower()) if letter.isalnum())


def plain_names(names: Sequence[str]) -> list[str]:
    """Return all names as `plain` does, except that an ``i`` beside a column of users becomes ``item``.

    >>> plain_names(["U", "i", "r"]), plain_names(["i", "j", "value"])
    (['u', 'item', 'r'], ['i', 'j', 'value'])
    """
    known = [plain(name) for name in names]
    has_users = bool({"u", "uid", "user", "userid"} & {*known})
    return ["item" if name == "i" and has_users else name for name in known]


def names_show_entries(names: Sequence[str]) -> bool:
    """Return whether some of the names are known names for the row and the column of an entry.

    Many names are those of a table, such as a matrix of cells by genes, where SRC and DST are genes.
    """
    known = plain_names(names) if len(names) <= MAX_ENTRY_NAMES else []
    return any(map(ROWS.fullmatch, known)) and any(map(COLUMNS.fullmatch, known))


def are_entries(names: Sequence[str]) -> bool:
    """Return whether all names are known names for distinct parts of an entry, including its row and its column."""
    kinds = (ROWS, COLUMNS, VALUES, TIMES)
    known = [[part for part in kinds if part.fullmatch(name)] for name in plain_names(names)]
    parts = [matches[0] for matches in known if matches]
    return len(parts) == len(names) == len(set(parts)) and {ROWS, COLUMNS} <= set(parts)


def order_of_floats(times: np.ndarray) -> np.ndarray:
    """Map (n,) float64 to (n,) int64 that sort in the same order."""
    bits = (times + 0.0).view(np.int64)  # -0.0 becomes 0.0
    return bits ^ (bits >> 63 & np.int64((1 << 63) - 1))


def without_type(name: str) -> str:
    """Remove the suffix ``:str``, which declares ids to be strings, from the name of a column."""
    return name.removesuffix(AS_STRING)


def choose_columns(
    header: Sequence[str] | None,
    width: int,
    requested: Sequence[str] | None,
    path: str,
    fail: Callable[[str], NoReturn],
    is_guessed: bool = False,
) -> list[int]:
    """Return the indices of the columns that hold the row, the column and, optionally, the value and the time.

    Parameters
    ----------
    header
        Names of all columns; None if the table has no header.
    width
        Number of columns.
    requested
        Names or indices of the columns that the user chose, in this order; None to choose them by their names. A column
        of times is returned only if it is requested.
    path
        The table, for messages.
    fail
        Raises SourceError with the message that it is given, if the header is ambiguous.
    is_guessed
        Whether lines may be samples instead of entries, because the user did not choose the format.

    Raises
    ------
    OptionError
        ``requested`` has the wrong length, names a column twice, or names a missing column.
    """
    if requested is not None:
        if not 2 <= len(requested) <= len(PARTS):
            raise OptionError(
                f"columns has {count_text(len(requested), 'name')}, but must have 2 to 4: those of the row, the column "
                "and, optionally, the value and the time"
            )
        chosen = [_number(name, header, width, path) for name in requested]
        if len(set(chosen)) < len(chosen):
            raise OptionError(f"columns is {tuple(requested)!r}, which names a column twice: name it once")
        return chosen
    if header is None:
        return list(range(min(width, 3)))
    known = plain_names(header)
    parts = [next((i for i, name in enumerate(known) if part.fullmatch(name)), -1) for part in (ROWS, COLUMNS, VALUES)]
    others = [i for i, name in enumerate(known) if name and not TIMES.fullmatch(name)]
    if parts[0] >= 0 and parts[1] >= 0:
        unknown = [i for i in others if i not in parts]
        if parts[2] >= 0 or not unknown:
            return [i for i in parts if i >= 0]
        if len(unknown) == 1 and unknown[0] == others[-1]:  # the value follows the row and the column
            return [*parts[:2], *unknown]
    says_nothing = all(name.isdecimal() for name in known)
    if width == 2 and max(parts[:1] if is_guessed else parts[:2]) >= 0:
        return [1, 0] if parts[0] == 1 or parts[1] == 0 else [0, 1]
    has_value = parts[2] in others
    if is_guessed:
        has_value &= parts[0] >= 0 or RATINGS.fullmatch(known[parts[2]]) is not None
    if not ((width == 2 and says_nothing) or (len(others) == 3 and (has_value or says_nothing))):
        names = names_text(map(repr, header))
        fail(
            f"the names of the columns {names} do not show which are row, column and value: name these three, or the "
            "row and the column, with --columns; or pass --format table if each line is a sample, and not an entry of "
            "a sparse matrix"
        )
    return [i for i in others if i != parts[2]] + [i for i in others if i == parts[2]]


def describe_choice(names: Sequence[str], columns: Mapping[str, int]) -> str:
    """Describe for a report which column is the value, and which columns are left out.

    ``columns`` are the numbers of the columns that are read, by their roles.

    >>> describe_choice(["user", "item", "stars", "age"], {"row": 0, "column": 1, "value": 2})
    "value 'stars'; columns left out: 'age'"
    """
    value = f"value {names[columns['value']]!r}" if "value" in columns else "no value, so that entries become ones"
    others = [repr(name) for i, name in enumerate(names) if name and i not in columns.values()]
    return value + (f"; columns left out: {names_text(others)}" if others else "")


def time_columns(header: Sequence[str], chosen: Sequence[int]) -> list[int]:
    """Return the indices of the columns with names of times, except the chosen columns."""
    return [i for i, name in enumerate(header) if i not in chosen and TIMES.fullmatch(plain(name))]


def _number(name: str, header: Sequence[str] | None, width: int, path: str) -> int:
    for word in (name, without_type(name)):
        if header and word in header:
            return list(header).index(word)
        if word.isdecimal():
            if int(word) < width:
                return int(word)
            raise OptionError(f"column {word} is missing: {printable(path)} has {width} columns, counted from 0")
    existing = f"the columns {names_text(header)}" if header else f"no header, but columns 0 to {width - 1}"
    raise OptionError(f"column {name!r} is not in {printable(path)}, which has {existing}")
