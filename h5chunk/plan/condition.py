"""Conditions on samples, such as ``label in [1, 2] and quality > 3``: parse the text, and evaluate it on arrays.

The text is parsed by Python's ``ast``, but no part of it is run. A condition consists of names of fields, numbers,
strings, comparisons, ``in`` and ``not in`` with a list, ``and``, ``or``, ``not``, parentheses, and the operators ``+ -
* / %``. A name that is no Python identifier is in backticks.

A comparison with a missing value is False, also ``!=`` and ``not in``. Missing are NaN, the code of no category, and
what is divided by zero. ``not x == x`` is therefore True where ``x`` is missing.

>>> columns = {"label": Column(np.array([0, 1, 2, 2])), "quality": Column(np.array([5.0, 4.0, np.nan, 1.0]))}
>>> Condition("label in [1, 2] and not quality > 3").mask(columns.__getitem__, 4).tolist()
[False, False, True, True]
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from h5chunk.errors import OptionError, names_text, printable

MAX_DEPTH = 100  # limit on operators inside of each other
QUOTED = re.compile(r"""('(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")|`([^`\n]+)`""", re.DOTALL)
LANGUAGE = "use names of fields, numbers, strings, comparisons, in, and, or, not, + - * / % and parentheses"
COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: np.add,
    ast.Sub: np.subtract,
    ast.Mult: np.multiply,
    ast.Div: np.true_divide,
    ast.Mod: np.remainder,
}
LIMIT = 2.0**63  # of int64


class Column(NamedTuple):
    """The values of samples: (n,) numbers, bool or str; or a constant, which is a Python object or has the shape ().

    ``missing``, (n,) bool, marks missing values other than NaN. If the values are codes of categories, ``categories``
    returns their names, (num_categories,) of str.
    """

    values: Any
    missing: Any = False
    categories: Callable[[], np.ndarray] | None = None

    @property
    def kind(self) -> str:
        """The type of the values, for messages: "numbers", "strings" or "truth values"."""
        return {"U": "strings", "b": "truth values"}.get(np.asarray(self.values).dtype.kind, "numbers")

    @property
    def has_value(self) -> Any:
        """Whether each value is not missing: (n,) bool."""
        is_float = np.asarray(self.values).dtype.kind == "f"
        return ~(np.isnan(self.values) | self.missing) if is_float else np.logical_not(self.missing)

    def named(self) -> Column:
        """Return the names of the categories of codes, (n,) of str. The code of no category is missing."""
        assert self.categories is not None
        names = np.append(self.categories(), "")
        valid = (self.values >= 0) & (self.values < len(names) - 1)
        return Column(names[np.where(valid, self.values, -1)], ~valid | self.missing)


class Condition:
    """A condition on samples.

    Raises
    ------
    OptionError
        The text is not a condition; the message says where and why.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._quoted = {match.start(2) - 1: match[2] for match in QUOTED.finditer(text) if match[2]}
        source = QUOTED.sub(lambda match: match[1] or "_" * len(match[0]), text)
        self._source = re.sub(r"\s", " ", source).lstrip()  # line breaks have no meaning
        self._indent = len(text) - len(self._source)
        try:
            tree = ast.parse(self._source, mode="eval").body
        except SyntaxError as error:
            at = self._indent + error.offset - 1 if error.offset else len(text)
            raise self._error(at, f"this is not valid: {error.msg}", LANGUAGE) from None
        except (ValueError, RecursionError, MemoryError):
            raise self._error(0, "this is not valid", LANGUAGE) from None
        self.names: dict[str, int] = {}  # the fields, and where each is mentioned first
        self._beside_names: set[str] = set()  # names that are compared with another name
        self._check(tree, 0)
        if not self.names:
            raise self._error(0, "this names no field", "compare a field, as in 'label == 1'")
        self._tree = tree

    def mask(self, read: Callable[[str], Column], count: int) -> np.ndarray:
        """Return for which of ``count`` samples the condition is true: (count,) bool. ``read`` returns a field."""
        with np.errstate(all="ignore"):
            return np.broadcast_to(self._truth(self._tree, read), count)

    def error(self, name: str, problem: str) -> str:
        """Return a message about a field that the condition names."""
        return self._message(self.names[name], problem)

    def hint(self, name: str) -> str:
        """Return the remedy if a name that is no field may be a value, and otherwise nothing."""
        return f"; if {name} is a value, put it in quotes: {name!r}" if name in self._beside_names else ""

    def _check(self, node: ast.AST, depth: int) -> None:
        """Raise OptionError for everything that is not part of the language."""
        if depth > MAX_DEPTH:
            raise self._error(self._at(node), f"more than {MAX_DEPTH} operators are inside of each other", "shorten it")
        parts: list[ast.AST]
        match node:
            case ast.Name():
                self.names.setdefault(self._name(node), self._at(node))
                return
            case ast.Constant():
                self._constant(node)
                return
            case ast.BoolOp():
                parts = [*node.values]
            case ast.UnaryOp(op=ast.Not() | ast.USub()):
                parts = [node.operand]
            case ast.BinOp() if type(node.op) in ARITHMETIC:
                parts = [node.left, node.right]
            case ast.Compare():
                parts = [node.left]
                names = [each for each in (node.left, *node.comparators) if isinstance(each, ast.Name)]
                self._beside_names |= {self._name(each) for each in names if len(names) > 1}
                for operation, right in zip(node.ops, node.comparators, strict=True):
                    if isinstance(operation, (ast.In, ast.NotIn)):
                        self._list(right)
                    elif type(operation) in COMPARISONS:
                        parts.append(right)
                    else:
                        raise self._error(self._at(right), "this is compared by 'is'", "use == or !=")
                if len(node.ops) > 1 and any(isinstance(each, (ast.In, ast.NotIn)) for each in node.ops):
                    raise self._error(self._at(node), "'in' is chained", "join the comparisons by 'and'")
            case ast.List() | ast.Tuple() | ast.Set():
                raise self._error(self._at(node), "this is a list", "use lists only after 'in'")
            case _:
                raise self._error(self._at(node), "this is not supported", LANGUAGE)
        for part in parts:
            self._check(part, depth + 1)

    def _list(self, node: ast.AST) -> list[Any]:
        """Return the constants to the right of ``in``."""
        if not isinstance(node, (ast.List, ast.Tuple, ast.Set)):
            raise self._error(self._at(node), "'in' is not followed by a list", "write it as in 'label in [1, 2]'")
        return [self._constant(item) for item in node.elts]

    def _constant(self, node: ast.AST) -> Any:
        match node:
            case ast.Constant(value=int() as number) if number >= 1 << 64:
                raise self._error(self._at(node), "this number exceeds 64 bits", "use a smaller one")
            case ast.Constant(value=bool() | int() | float() | str()):
                return node.value
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float()) as number):
                return -self._constant(number)
        remedy = "not x == x is True where x is missing" if isinstance(node, ast.Constant) else "write the value itself"
        remedy += ", and strings in quotes" if isinstance(node, ast.Name) else ""
        raise self._error(self._at(node), "this is not a number or a string", remedy)

    def _truth(self, node: ast.AST, read: Callable[[str], Column]) -> Any:
        """Return whether a part of the condition is true: (n,) bool."""
        if isinstance(node, ast.BoolOp):
            join = np.logical_and if isinstance(node.op, ast.And) else np.logical_or
            return join.reduce(np.broadcast_arrays(*(self._truth(part, read) for part in node.values)))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return np.logical_not(self._truth(node.operand, read))
        if isinstance(node, ast.Compare):
            left, found = self._value(node.left, read), np.True_
            for operation, right_node in zip(node.ops, node.comparators, strict=True):
                if isinstance(operation, (ast.In, ast.NotIn)):
                    found = self._is_in(node, left, self._list(right_node))
                    found = found if isinstance(operation, ast.In) else ~found
                    return found & left.has_value
                right = self._value(right_node, read)
                found = found & self._compared(right_node, operation, left, right)
                left = right
            return found
        column = self._value(node, read)
        if column.kind != "truth values":
            raise self._error(self._at(node), f"these are {column.kind}, not a condition", "compare them with a value")
        return column.values & column.has_value

    def _compared(self, node: ast.AST, operation: ast.cmpop, left: Column, right: Column) -> Any:
        columns = left, right
        left, right = self._same_kind(node, left, right), self._same_kind(node, right, left)
        if (left is not columns[0] or right is not columns[1]) and not isinstance(operation, (ast.Eq, ast.NotEq)):
            raise self._error(self._at(node), "names of categories have no order", "use ==, != or in")
        if "strings" in (left.kind, right.kind) and left.kind != right.kind:
            raise self._error(
                self._at(node), f"{left.kind} are compared with {right.kind}", "use values of the field's kind"
            )
        found = COMPARISONS[type(operation)](left.values, right.values)
        return found & left.has_value & right.has_value

    def _same_kind(self, node: ast.AST, column: Column, other: Column) -> Column:
        """Return the names of a column of codes if it is compared with names, and otherwise the column."""
        if column.categories is None or (other.kind != "strings" and other.categories is None):
            return column
        if isinstance(other.values, str):
            self._check_category(node, column, other.values)
        return column.named()

    def _check_category(self, node: ast.AST, column: Column, name: str) -> None:
        assert column.categories is not None
        if name not in (names := column.categories().tolist()):
            raise self._error(self._at(node), f"there is no category {name!r}", f"use one of {names_text(names)}")

    def _is_in(self, node: ast.Compare, column: Column, values: list[Any]) -> Any:
        strings = [value for value in values if isinstance(value, str)]
        numbers = [value for value in values if not isinstance(value, str)]
        if column.categories is not None and strings:
            for name in strings:
                self._check_category(node.comparators[0], column, name)
            names = column.categories()
            numbers += np.flatnonzero(np.isin(names, strings)).tolist()
            strings = []
        wrong = numbers if column.kind == "strings" else strings
        if wrong:
            raise self._error(
                self._at(node.comparators[0]),
                f"the list has {wrong[0]!r}, but the field has {column.kind}",
                "list values of the field's kind",
            )
        own = np.asarray(column.values)
        own = own.view(np.uint8) if own.dtype == bool else own
        if column.kind == "strings":
            return np.isin(own, np.array(strings, np.str_))
        if own.dtype.kind in "iu":  # other numbers than those of the field's type are never equal to its values
            limits = np.iinfo(own.dtype)
            numbers = [int(each) for each in numbers if each == each // 1 and limits.min <= each <= limits.max]
        return np.isin(own, np.array(numbers, own.dtype))

    def _value(self, node: ast.AST, read: Callable[[str], Column]) -> Column:
        """Return the values of a part of the condition."""
        match node:
            case ast.Name():
                column = read(self._name(node))
                if column.values.dtype.kind == "c":
                    raise self._error(self._at(node), "these are complex numbers", "pass a function of the values")
                return column._replace(values=_widened(column.values))
            case ast.Constant() | ast.UnaryOp(op=ast.USub(), operand=ast.Constant()):
                return Column(self._constant(node))
            case ast.BinOp():
                return self._computed(node, self._value(node.left, read), self._value(node.right, read))
            case ast.UnaryOp(op=ast.USub()):
                return self._computed(node, Column(0), self._value(node.operand, read), ast.Sub)
        return Column(self._truth(node, read))

    def _computed(
        self, node: ast.AST, left: Column, right: Column, operation: type[ast.operator] | None = None
    ) -> Column:
        """Compute with numbers. Raise OptionError if whole numbers exceed 64 bits."""
        operation = operation or type(node.op)  # type: ignore[attr-defined]
        for column in (left, right):
            if column.kind != "numbers":
                raise self._error(self._at(node), f"this computes with {column.kind}", "compute with numbers only")
        one, two = np.asarray(left.values), np.asarray(right.values)
        if one.dtype.kind in "iuO" and two.dtype.kind in "iuO" and operation is not ast.Div:
            approximate = ARITHMETIC[operation](one.astype(float), two.astype(float))
            sizes = (np.abs(each.astype(float)).max(initial=0) for each in (one, two, np.nan_to_num(approximate)))
            if max(sizes) >= LIMIT:
                raise self._error(
                    self._at(node), "this has whole numbers beyond 64 bits", "multiply one by 1.0 to use floats"
                )
            one, two = one.astype(np.int64), two.astype(np.int64)
        found, missing = ARITHMETIC[operation](one, two), left.missing | right.missing
        if operation in (ast.Div, ast.Mod):
            missing = missing | (two == 0)
        if found.ndim == 0 and not missing:
            return Column(found.item())
        return Column(found, missing)

    def _name(self, node: ast.Name) -> str:
        return self._quoted.get(self._at(node), node.id)

    def _at(self, node: Any) -> int:
        """Return the position in the text at which a part begins."""
        return self._indent + len(self._source.encode()[: node.col_offset].decode())

    def _error(self, at: int, problem: str, remedy: str) -> OptionError:
        return OptionError(self._message(at, f"{problem}: {remedy}"))

    def _message(self, at: int, problem: str) -> str:
        where = f"at character {at + 1}" if at < len(self.text) else "at its end"
        return f"the condition {printable(self.text)!r}, {where} ({printable(self.text[at : at + 20])!r}): {problem}"


def _widened(values: np.ndarray) -> np.ndarray:
    """Return values whose floats have at least 32 bits, so that constants are not rounded to a narrow type."""
    return values.astype(np.float32) if values.dtype.kind in "fV" and values.dtype.itemsize < 4 else values
