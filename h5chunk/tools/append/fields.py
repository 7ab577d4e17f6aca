"""Whether the fields of new samples are those of a file, and what their labels are called there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from h5chunk.errors import SourceError


@dataclass(frozen=True)
class Matched:
    """Names of classes, old and new.

    Attributes
    ----------
    names : list of str
        Those of the file, then those that are new.
    numbers : (num_new,) int64
        Of each name of the source among them.
    added : list of str
    """

    names: list[str]
    numbers: np.ndarray
    added: list[str]

    def relabel(self, labels: np.ndarray) -> np.ndarray:
        """Labels of the source as those of the file; -1, which is no class, stays."""
        return np.where(labels < 0, labels, self.numbers[np.maximum(labels, 0)]) if len(self.numbers) else labels


def match_classes(old: Sequence[str], new: Sequence[str], *, new_classes: bool, shown: str, source: str) -> Matched:
    """Find the classes of a source among those of a file, by their names.

    Parameters
    ----------
    old, new : sequence of str
    new_classes : bool
        Whether those that the file does not have go behind its own; old labels keep their numbers.
    shown, source : str
        The file and the source, for messages.

    Raises
    ------
    SourceError
        The source has others, or the names are not all different.
    """
    numbers = {name: number for number, name in enumerate(old)}
    if len(numbers) < len(old):
        twice = next(name for name in old if list(old).count(name) > 1)
        raise SourceError(f"{shown}: two of its class names are {twice!r}: which of them is meant cannot be told")
    added = [name for name in new if name not in numbers]
    if added and not new_classes:
        raise SourceError(
            f"{source}: has class {added[0]!r}, which {shown} does not ({len(added)} such of {len(new)}): "
            "--new-classes (new_classes=True) puts them behind the others"
        )
    numbers |= {name: len(old) + number for number, name in enumerate(added)}
    return Matched([*old, *added], np.array([numbers[name] for name in new], np.int64), added)


def fit_columns(
    old: Mapping[str, np.dtype], new: Mapping[str, np.ndarray], *, shown: str, source: str
) -> dict[str, np.ndarray]:
    """The columns of a source in the types that the file has them in, and in its order.

    The type of a column follows from its values, and those of a part may all be small: what the file's type holds
    exactly becomes that.

    Parameters
    ----------
    old : dict of str to np.dtype
    new : dict of str to (num_samples,) array
    shown, source : str

    Raises
    ------
    SourceError
        Fields are missing, or there are more, or a value does not fit.
    """
    lacking = [name for name in old if name not in new]
    more = [name for name in new if name not in old]
    if lacking or more:
        which = f"lacks the field {lacking[0]!r} that" if lacking else f"has the field {more[0]!r}, which"
        does = "has" if lacking else "does not have"
        raise SourceError(
            f"{source}: {which} {shown} {does}: fields must be equal: give a manifest (--manifest) with the columns "
            f"{', '.join(old) or 'none'}, or a source like the first one"
        )
    return {name: _fit(name, new[name], dtype, shown, source) for name, dtype in old.items()}


def _fit(name: str, values: np.ndarray, dtype: np.dtype, shown: str, source: str) -> np.ndarray:
    if values.dtype == dtype:
        return values
    strings = values.dtype.kind == "S", dtype.kind == "S"
    if any(strings):
        if not all(strings):
            raise SourceError(f"{source}: field {name!r} is {_text(values.dtype)} but in {shown} {_text(dtype)}")
        if values.dtype.itemsize > dtype.itemsize:
            longest = max(map(len, values.tolist()))
            if longest > dtype.itemsize:
                raise SourceError(
                    f"{source}: field {name!r} has a string of {longest} bytes but {shown} has room for "
                    f"{dtype.itemsize}: shorten it, or convert all sources together"
                )
        return values.astype(dtype)
    with np.errstate(all="ignore"):
        fitted = values.astype(dtype)
        same = (fitted.astype(values.dtype) == values) | ((values != values) & (fitted != fitted))
        if values.dtype.kind in "iu" and dtype.kind in "iu":
            same &= (fitted < 0) == (values < 0)
        if values.dtype.kind in "iu" and dtype.kind == "f":
            same &= np.abs(fitted) < 2.0**63  # beyond, some processors give the largest number back
    if not same.all():
        first = int((~same).argmax())
        raise SourceError(
            f"{source}: field {name!r} has the value {values[first]} (sample {first}) but in {shown} it is {dtype}, "
            "which does not hold that: convert all sources together"
        )
    return fitted


def _text(dtype: np.dtype) -> str:
    return f"strings of {dtype.itemsize} bytes" if dtype.kind == "S" else str(dtype)
