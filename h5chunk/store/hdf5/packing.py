"""Numbers that are packed by the conventions of netCDF: value = stored value * ``scale_factor`` + ``add_offset``.

Sources: CF conventions 1.11, sections 8.1 (packed data) and 2.5.1 (missing data, valid and actual range of data),
https://cfconventions.org/cf-conventions/cf-conventions.html; NetCDF Users Guide, attribute conventions (`_Unsigned`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import h5py
import numpy as np

from h5chunk.errors import FieldError, OptionError
from h5chunk.store.hdf5.guard import small_attribute
from h5chunk.store.hdf5.strings import read_words

CF = "cf"
SCALES, FILLS = ("scale_factor", "add_offset"), ("_FillValue", "missing_value")
RANGE, LIMITS, UNSIGNED = "valid_range", ("valid_min", "valid_max"), "_Unsigned"


@dataclass(frozen=True)
class Packing:
    """The conversion of a dataset's stored numbers to values, which the attributes of the dataset define.

    Stored numbers have the dtype ``stored``, and values have ``dtype``. All dtypes are in native byte order.
    ``numbers`` is the dtype of the stored bits, which differs from ``stored`` if these are those of unsigned integers.
    Numbers in ``missing``, below ``low`` and above ``high`` stand for missing values.
    """

    stored: np.dtype
    numbers: np.dtype
    dtype: np.dtype
    scale: float = 1.0
    offset: float = 0.0
    missing: tuple[Any, ...] = ()
    low: Any = None
    high: Any = None

    @property
    def is_scaled(self) -> bool:
        return (self.scale, self.offset) != (1, 0)

    @property
    def stored_missing(self) -> tuple[Any, ...]:
        """The stored numbers in ``missing``."""
        return tuple(np.array(self.missing, self.numbers).view(self.stored).tolist())

    def __str__(self) -> str:
        """Describe the packing, as CF conventions define it."""
        parts = []
        if self.is_scaled:
            parts.append(
                f"values are packed: value = stored * {self.scale:g} (scale_factor) + {self.offset:g} (add_offset)"
            )
        if self.numbers != self.stored:
            parts.append("stored integers are unsigned (_Unsigned), but read as signed")
        if self.missing:
            parts.append(f"{' and '.join(map(str, self.missing))} means missing (_FillValue or missing_value)")
        return "; ".join([*parts, 'pass decode="cf" to the data set to get the values'])

    def unpack(self, stored: np.ndarray) -> np.ndarray:
        """Convert stored numbers. Missing ones become NaN."""
        numbers = stored.view(self.numbers)
        has_missing = bool(self.missing) or self.low is not None or self.high is not None
        if self.dtype == self.numbers and not has_missing and not self.is_scaled:
            return numbers
        if not self.is_scaled:
            values = numbers.astype(self.dtype)
        else:
            product = np.multiply(numbers, self.scale, dtype=np.float64)
            product += self.offset
            values = product.astype(self.dtype, copy=False)
        for each in self.missing:
            values[numbers == each] = np.nan
        if self.low is not None:
            values[numbers < self.low] = np.nan
        if self.high is not None:
            values[numbers > self.high] = np.nan
        return values


def check_decode(decode: Any) -> str:
    """Validate the argument ``decode``. Returns `CF`, or an empty string for None."""
    if decode not in (None, "", CF):
        raise OptionError(f"decode is {decode!r}: pass 'cf' for numbers that are packed as in netCDF, or leave it out")
    return decode or ""


def packing_of(dataset: h5py.Dataset, stored: np.dtype, where: str) -> Packing | None:
    """Return how the numbers of a dataset, of the native dtype ``stored``, are packed; None if they are not.

    Raises FieldError if an attribute has an impossible value.
    """
    if stored.kind not in "iuf" or stored.names:
        return None
    names = (*SCALES, *FILLS, RANGE, *LIMITS, UNSIGNED)
    if not any(h5py.h5a.exists(dataset.id, name.encode()) for name in names):
        return None
    numbers = stored
    if stored.kind == "i":
        words = read_words(dataset, UNSIGNED, lambda problem: FieldError(f"{where}: {problem}"))
        numbers = np.dtype(f"u{stored.itemsize}") if [word.lower() for word in words] == ["true"] else stored
    scales = [_numbers(dataset, name, where, 1) for name in SCALES]
    missing = [each for name in FILLS for each in _as_stored(_numbers(dataset, name, where), stored, numbers)]
    missing = [each for each in missing if each == each]  # not NaN, which needs no conversion
    low, high = (_as_stored(_numbers(dataset, name, where, 1), stored, numbers) for name in LIMITS)
    both = _as_stored(_numbers(dataset, RANGE, where, 2), stored, numbers)
    if len(both) == 2:
        low, high = both[:1], both[1:]
    is_scaled = any(len(each) for each in scales)
    if not is_scaled and not missing and not low and not high:
        return None if numbers == stored else Packing(stored, numbers, numbers)
    wide = stored.itemsize > (2 if stored.kind in "iu" else 4)
    are_single = is_scaled and all(each.dtype.itemsize <= 4 and each.dtype.kind == "f" for each in scales if len(each))
    dtype = np.dtype(np.float64 if wide and not (are_single and stored.kind in "iu") else np.float32)
    scale, offset = (float(each[0]) if len(each) else default for each, default in zip(scales, (1.0, 0.0), strict=True))
    if not np.isfinite([scale, offset]).all():
        raise FieldError(f"{where} has the scale_factor {scale} and the add_offset {offset}: leave decode out")
    limits = low[0] if low else None, high[0] if high else None
    return Packing(stored, numbers, dtype, scale, offset, tuple(dict.fromkeys(missing)), *limits)


def _numbers(dataset: h5py.Dataset, name: str, where: str, count: int = 0) -> np.ndarray:
    """Return the numbers of an attribute, (n,), or none if there is no such attribute. ``count`` is how many it needs.

    Strings, which some files have for missing values, are no numbers.
    """
    value = np.ravel(small_attribute(dataset, name, ()))
    if value.dtype.kind not in "iuf" or not len(value):
        if name in SCALES and h5py.h5a.exists(dataset.id, name.encode()):
            raise FieldError(f"{where} has an attribute {name!r} that is no number: leave decode out")
        return np.empty(0)
    if count and len(value) != count:
        raise FieldError(
            f"{where} has an attribute {name!r} with {len(value)} values instead of {count}: leave decode out"
        )
    return value


def _as_stored(values: np.ndarray, stored: np.dtype, numbers: np.dtype) -> list[Any]:
    """Return values of an attribute as numbers of the stored dtype, without those that it cannot represent."""
    found = []
    for value in values:
        with np.errstate(all="ignore"):
            if stored.kind != "f" and not np.isfinite(value):
                continue
            for dtype in dict.fromkeys((stored, numbers)):
                if stored.kind == "f" or np.iinfo(dtype).min <= value <= np.iinfo(dtype).max:
                    own = np.array(value).astype(dtype)
                    if stored.kind == "f" or own == value:
                        found.append(own.view(numbers)[()].item())
                        break
    return found
