"""Choose uint8 codes that represent the values of a sparse matrix exactly.

A value is ``code / scale``. While entries are read they are counted in *units*, a fraction that all candidate scales
share: 1/400 (or 1/scale, if a scale is given), so that duplicates are summed exactly. The sums decide the scale: the
smallest scale that makes all of them whole numbers up to 255.

>>> coding = Coding()
>>> units, unfit = coding.units(np.array([0.5, 3.0, 5.0]))
>>> units.tolist(), unfit
([200, 1200, 2000], None)
>>> coding.choose_scale(np.unique(units)), coding.codes(2.0)[units].tolist()
(2.0, [1, 6, 10])
>>> coding.units(np.array([0.5, 0.3333]))[1]
1
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from h5chunk.errors import OptionError

SCALES = (1, 2, 4, 5, 8, 10, 16, 20, 100)
UNITS = math.lcm(*SCALES)  # in a one
MAX_CODE = 255
ROUNDING = 1e-12  # relative error of a sum or mean of decimal fractions: 0.7 + 0.1 is to be 0.8
HUGE = float(1 << 40)  # with clip: far above any code, and small enough that sums of entries do not overflow

Values = npt.NDArray[Any]


@dataclass(frozen=True)
class Coding:
    """Convert values to codes. Raises OptionError if an option is invalid, or two options exclude each other.

    With ``clip``, values below 0 become 0, and values above 255 (above 255 / scale, if a scale is given) become that
    limit. The automatic scale never makes more values exceed the limit.
    """

    scale: float | None = None  # a value is its code over this; chosen among `SCALES` if not given
    clip: bool = False
    binarize: float | None = None  # values of at least this become 1, all others 0

    def __post_init__(self) -> None:
        for name, value in (("scale", self.scale), ("binarize", self.binarize)):
            if value is not None and not 0 < value < math.inf:
                raise OptionError(f"{name} is {value}: give a number above 0")
        if self.binarize is not None and (self.scale is not None or self.clip):
            raise OptionError("binarize makes all values 1: give no scale and no clip with it")

    @property
    def units_per_one(self) -> float:
        return UNITS if self.scale is None else self.scale

    @property
    def max_unit(self) -> int:
        """The maximum of a sum of entries, in units."""
        return UNITS * MAX_CODE if self.scale is None and self.binarize is None else MAX_CODE

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the result of `units`, in which sums must be exact."""
        if self.binarize is not None:
            return np.dtype(np.float64)
        return np.dtype(np.int64 if self.clip else np.uint32)

    @property
    def num_bits(self) -> int | None:
        """Bits of an entry's units; None if they are unbounded."""
        return self.max_unit.bit_length() if self.dtype == np.uint32 else None

    def units(self, values: Values) -> tuple[Values, int | None]:
        """Count (n,) entries of any real type in units: (n,) of `dtype`; with ``binarize``, return the values.

        The second result is the first entry that has no units; the first result is meaningless then.
        """
        with np.errstate(over="ignore", invalid="ignore"):  # what overflows does not fit
            return self._units(values.astype(np.uint8) if values.dtype.kind == "b" else values)

    def _units(self, values: Values) -> tuple[Values, int | None]:
        real = values.astype(np.float64)
        unfit = ~np.isfinite(real)
        if unfit.any():
            return real, int(unfit.argmax())
        if self.binarize is not None:
            if values.dtype.kind == "f":
                real[values == values.dtype.type(self.binarize)] = self.binarize  # 0.7 of float32 is 0.7
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

    def settle(self, sums: Values) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Clip or binarise (n,) sums of units: (n,) int64 units, and (n,) bool, whether above `max_unit`.

        0 marks entries to drop. The sums are uint64, int64 or float64.
        """
        if self.binarize is not None:
            return (sums >= self.binarize * (1 - ROUNDING)).astype(np.int64), np.zeros(len(sums), bool)
        units = sums.astype(np.int64)
        if self.clip:
            return np.clip(units, 0, self.max_unit), np.zeros(len(sums), bool)
        return units, units > self.max_unit

    def choose_scale(self, units: npt.NDArray[np.int64]) -> float | None:
        """Return the smallest scale that makes codes of all occurring units (ascending); None if none does."""
        if self.scale is not None or self.binarize is not None:
            return 1.0 if self.scale is None else float(self.scale)
        for scale in SCALES:
            step = UNITS // scale
            if not (units % step).any() and (not len(units) or int(units[-1]) // step <= MAX_CODE):
                return float(scale)
        return None

    def unfit_units(self, units: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the units that keep the others from having a scale, where `choose_scale` found none.

        If a smallest scale makes all units whole, these are the units above 255 with it. Otherwise it is the first unit
        that shares no scale with the smaller units.
        """
        scales = list(SCALES)
        for unit in units.tolist():
            fitting = [scale for scale in scales if unit * scale % UNITS == 0]
            if not fitting:
                return np.array([unit], np.int64)
            scales = fitting
        return units[units // (UNITS // scales[0]) > MAX_CODE]

    def codes(self, scale: float) -> npt.NDArray[np.uint8]:
        """Return the code of every number of units: (max_unit + 1,) uint8; arbitrary for a unit without a code."""
        units = np.arange(self.max_unit + 1, dtype=np.int64)
        if self.scale is None and self.binarize is None:
            units //= UNITS // int(scale)
        return np.minimum(units, MAX_CODE).astype(np.uint8)
