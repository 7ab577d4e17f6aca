"""Choose how the values of a sparse matrix are stored: the smallest of uint8 codes, float16 and float32 that is exact.

A code is a value multiplied by the scale. While entries are read, values are counted in units of 1/400, which all
candidate scales divide, or of 1/scale if a scale is given. Duplicates (entries of the same row and column) can
therefore be added exactly. The chosen scale is the smallest one with which all sums have integer codes from 1 to 255.

>>> coding = Coding()
>>> units, unfit = coding.units(np.array([0.5, 3.0, 5.0]))
>>> units.tolist(), unfit
([200, 1200, 2000], None)
>>> coding.choose_scale(np.unique(units)), coding.codes(2.0)[units].tolist()
(2.0, [1, 6, 10])
>>> coding.units(np.array([0.5, 0.3333]))[1]
1

If a value has no code, all values are kept as float64 while duplicates are added, and are stored as float16 or float32.

>>> coding = coding.fallback()
>>> tally = coding.tally()
>>> tally.add(coding.finish_sums(np.array([-0.5, 300.0]))[0])
>>> tally.storage().dtype
dtype('float16')
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from h5chunk.errors import OptionError

SCALES = (1, 2, 4, 5, 8, 10, 16, 20, 100)
MAX_WHOLE = 1 << 53  # float64 represents all integers up to this exactly
MAX_FLOAT32 = float(np.finfo(np.float32).max)
UNITS = math.lcm(*SCALES)  # units per 1.0
MAX_CODE = 255
ROUNDING = 1e-12  # relative error of a sum or mean of decimal fractions, such as 0.7 + 0.1
NOT_FINITE = "is not finite", "remove it from the source"
HUGE = float(1 << 40)  # limit on the units of a clipped entry: more than any code, but too small for sums to overflow

Values = npt.NDArray[Any]


@dataclass(frozen=True)
class Coding:
    """A conversion of values to codes. Raises OptionError if options are invalid or exclude each other.

    With ``clip``, values below 0 become 0, and values above the maximum become the maximum. The maximum is 255 / scale,
    or 255 if no scale is given.
    """

    scale: float | None = None  # value = code / scale; None: choose one of `SCALES`
    clip: bool = False
    binarize: float | None = None  # values of at least this become 1, all others 0
    strict: bool = False  # fail if a value has no code, instead of storing floats

    def __post_init__(self) -> None:
        for name, value in (("scale", self.scale), ("binarize", self.binarize)):
            if value is not None and not 0 < value < math.inf:
                raise OptionError(f"{name} is {value}: pass a number above 0")
        if self.binarize is not None and (self.scale is not None or self.clip):
            raise OptionError("binarize makes all values 1: leave out scale and clip")

    @property
    def units_per_one(self) -> float:
        return UNITS if self.scale is None else self.scale

    @property
    def max_unit(self) -> int:
        """The maximum sum of duplicates that can have a code, in units."""
        return UNITS * MAX_CODE if self.scale is None and self.binarize is None else MAX_CODE

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype that `units` returns."""
        if self.binarize is not None:
            return np.dtype(np.float64)
        return np.dtype(np.int64 if self.clip else np.uint32)

    @property
    def num_bits(self) -> int | None:
        """Maximum number of bits of an entry's units, or None if there is no limit."""
        return self.max_unit.bit_length() if self.dtype == np.uint32 else None

    def units(self, values: Values) -> tuple[Values, int | None]:
        """Convert (n,) entries of any real type to units, (n,) of `dtype`.

        The second result is None, or the index of the first entry that is not a whole number of units. In this case the
        units are undefined.
        """
        with np.errstate(over="ignore", invalid="ignore"):  # values that overflow have no units
            return self._units(values.astype(np.uint8) if values.dtype.kind == "b" else values)

    def _units(self, values: Values) -> tuple[Values, int | None]:
        real = values.astype(np.float64)
        unfit = ~np.isfinite(real)
        if unfit.any():
            return real, int(unfit.argmax())
        if self.binarize is not None:
            if values.dtype.kind == "f":
                real[values == values.dtype.type(self.binarize)] = self.binarize  # so that float32's 0.7 equals 0.7
            return real, None
        scales = SCALES if self.scale is None else (self.scale,)
        units = np.zeros(len(values), np.float64)
        left = np.ones(len(values), bool)
        for scale in scales:
            codes = np.rint(real * scale)
            fits = (codes / scale).astype(values.dtype) == values if values.dtype.kind == "f" else codes / scale == real
            if not self.clip:
                fits &= (codes >= 0) & (codes <= MAX_CODE)
            per_code = 1 if self.scale is not None else UNITS // scale
            if fits.all():
                units, left = codes * per_code, ~fits
                break
            fits &= left
            units[fits] = codes[fits] * per_code
            left &= ~fits
        if left.any():
            return units, int(left.argmax())
        return np.clip(units, -HUGE, HUGE).astype(self.dtype), None

    def finish_sums(self, sums: Values) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Clip or binarise the sums of duplicates, (n,) uint64, int64 or float64, in units.

        Returns the units, (n,) int64, which are 0 for entries to drop, and a mask, (n,) bool, of the sums above
        `max_unit`.
        """
        if self.binarize is not None:
            return (sums >= self.binarize * (1 - ROUNDING)).astype(np.int64), np.zeros(len(sums), bool)
        units = sums.astype(np.int64)
        if self.clip:
            return np.clip(units, 0, self.max_unit), np.zeros(len(sums), bool)
        return units, units > self.max_unit

    def choose_scale(self, units: npt.NDArray[np.int64]) -> float | None:
        """Return the smallest scale with which all units, (n,) ascending, have codes, or None."""
        if self.scale is not None or self.binarize is not None:
            return 1.0 if self.scale is None else float(self.scale)
        for scale in SCALES:
            step = UNITS // scale
            if not (units % step).any() and (not len(units) or int(units[-1]) // step <= MAX_CODE):
                return float(scale)
        return None

    def tally(self) -> CodeTally:
        return CodeTally(self)

    def fallback(self) -> FloatCoding | None:
        """Return the coding to use if a value has no code, or None if the conversion must then fail."""
        is_strict = self.strict or self.scale is not None or self.binarize is not None
        return None if is_strict else FloatCoding(None, self.clip)

    def explain_unfit(self, value: float) -> tuple[str, str]:
        """Return the reason why a value has no code, and a remedy."""
        scale = self.scale
        if not math.isfinite(value):
            return NOT_FINITE
        if scale is not None and value * scale != round(value * scale):
            return f"times the scale {scale:g} is not a whole number", "leave out --scale, or use --binarize MIN"
        if value < 0:
            return "is negative", "use --clip to make such values 0, --values auto, or --binarize MIN"
        if value * (scale or 1) > MAX_CODE:
            times = f"times the scale {scale:g} " if scale else ""
            remedy = f"use --clip to make such values {MAX_CODE}, --values auto without --scale, or --binarize MIN"
            return f"{times}is more than {MAX_CODE}", remedy
        return f"has no exact code from 1 to {MAX_CODE}", "use --values auto, or --binarize MIN"

    def codes(self, scale: float) -> npt.NDArray[np.uint8]:
        """Return the code for each number of units from 0 to ``max_unit``: (max_unit + 1,) uint8.

        The codes of units that have no exact code are undefined.
        """
        units = np.arange(self.max_unit + 1, dtype=np.int64)
        if self.scale is None and self.binarize is None:
            units //= UNITS // int(scale)
        return np.minimum(units, MAX_CODE).astype(np.uint8)


@dataclass(frozen=True)
class Storage:
    """The form in which values are stored: as codes, as floats, or as a pattern, in which all values are 1."""

    dtype: np.dtype[Any]
    scale: float = 1.0  # value = stored value / scale
    pattern: bool = False
    codes: npt.NDArray[np.uint8] | None = None  # the table that `Coding.codes` returns; None for floats

    def encode(self, units: Values) -> Values:
        """Convert (n,) units to stored values, (n,) of ``dtype``."""
        return units.astype(self.dtype) if self.codes is None else self.codes[units]


class CodeTally:
    """Record the units that occur in a matrix, and choose how to store them."""

    def __init__(self, coding: Coding) -> None:
        self._coding, self._seen = coding, np.zeros(coding.max_unit + 1, bool)

    def add(self, units: Values) -> None:
        self._seen[units] = True

    def examples(self) -> npt.NDArray[np.int64]:
        """Return the units that occur, so that another process can add them to its own tally."""
        return np.flatnonzero(self._seen)

    def storage(self) -> Storage | None:
        """Return the form in which to store all units, or None if no scale has codes for all of them."""
        units = self.examples()
        scale = self._coding.choose_scale(units)
        if scale is None:
            return None
        codes = self._coding.codes(scale)
        pattern = scale == 1 and len(units) > 0 and bool((codes[units] == 1).all())
        return Storage(np.dtype(np.uint8), scale, pattern, codes)


@dataclass(frozen=True)
class FloatCoding:
    """A conversion that keeps values as floats, with the interface of `Coding`. The units are the values in float64.

    If ``dtype_name`` is float16 or float32, values are rounded to this dtype, and cannot be stored if they are beyond
    its range. If it is None, values can only be stored if float32 represents them exactly.
    """

    dtype_name: str | None = None
    clip: bool = False  # whether values are clipped to the range from 0 to 255
    units_per_one: ClassVar[float] = 1.0
    max_unit: ClassVar[int] = MAX_CODE
    num_bits: ClassVar[None] = None
    dtype: ClassVar[np.dtype[Any]] = np.dtype(np.float64)

    def units(self, values: Values) -> tuple[Values, int | None]:
        """Convert (n,) entries to float64.

        The second result is None, or the index of the first entry that cannot be converted.
        """
        real = values.astype(np.float64)
        unfit = ~np.isfinite(real)
        if values.dtype.kind in "iu" and values.dtype.itemsize == 8 and self.dtype_name is None:
            unfit |= (values > MAX_WHOLE) | (values < -MAX_WHOLE)  # float64 would round them
        return real, int(unfit.argmax()) if unfit.any() else None

    def finish_sums(self, sums: Values) -> tuple[Values, npt.NDArray[np.bool_]]:
        """Clip and round sums, (n,).

        Returns the results, (n,) float64, and a mask, (n,) bool, of those that cannot be stored.
        """
        clipped = np.clip(sums, 0, MAX_CODE) if self.clip else sums
        with np.errstate(over="ignore"):
            stored = clipped.astype(self.dtype_name or np.float32).astype(np.float64)
        return stored, stored != clipped if self.dtype_name is None else ~np.isfinite(stored)

    def tally(self) -> FloatTally:
        return FloatTally(self.dtype_name)

    def fallback(self) -> None:
        """Return None, because the conversion must fail if a value cannot be stored."""

    def explain_unfit(self, value: float) -> tuple[str, str]:
        """Return the reason why a value cannot be stored, and a remedy."""
        if not math.isfinite(value):
            return NOT_FINITE
        if self.dtype_name is None and abs(value) <= MAX_FLOAT32:
            rounded = float(np.float32(value))
            remedy = f"use --values float32 to round the values of this sparse matrix (this one to {rounded:.10g})"
            return "is not exact in float32", remedy
        wider = "--values float32, or " if self.dtype_name == "float16" and abs(value) <= MAX_FLOAT32 else ""
        return f"is beyond the range of {self.dtype_name or 'float32'}", f"use {wider}--binarize MIN"


class FloatTally:
    """Record whether float16 represents all values of a matrix exactly."""

    def __init__(self, dtype_name: str | None) -> None:
        self._dtype_name, self._unfit = dtype_name, np.empty(0, np.float64)

    def add(self, values: Values) -> None:
        if self._dtype_name is None and not len(self._unfit):
            with np.errstate(over="ignore"):
                self._unfit = values[values.astype(np.float16) != values][:1]

    def examples(self) -> Values:
        """Return a value that float16 does not represent exactly, if there is one, for the tally of another process."""
        return self._unfit

    def storage(self) -> Storage:
        return Storage(np.dtype(self._dtype_name or ("float32" if len(self._unfit) else "float16")))
