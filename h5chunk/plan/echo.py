"""Echoing: windows are trained more than once before they go, for when reading is slower than training.

After the batches of a window have come, its samples are shuffled again and cut into other batches: a pass. With 2.0
each sample comes twice, with 1.25 every fifth batch is one of an echo, from a pass that is not finished.

Source: Choi et al., "Faster Neural Network Training with Data Echoing", arXiv:1907.05550.

>>> [num_echoed(1.5, fresh) for fresh in range(5)]
[0, 0, 1, 1, 2]
"""

from __future__ import annotations

from fractions import Fraction

from h5chunk.errors import OptionError
from h5chunk.plan.permute import ECHO, Indices, permutation

AUTO = "auto"
MAX_AUTO_PASSES = 4  # of a window with "auto": beyond it waiting does less harm (figure 5 of the source)


def check_echo(echo: float | str) -> None:
    """Raise OptionError unless it is a number of at least 1, or "auto"."""
    if echo == AUTO:
        return
    if isinstance(echo, (bool, str)) or not isinstance(echo, (int, float)) or not 1 <= echo < 1000:
        raise OptionError(f"echo is {echo!r}: give how often each sample is trained, 1 or more, or 'auto'")


def num_echoed(echo: float, fresh: int) -> int:
    """Batches of echoes that are due after so many fresh ones."""
    return int((Fraction(str(echo)) - 1) * fresh)


def echo_pass(num_samples: int, seed: int, epoch: int, window: int, number: int) -> Indices:
    """Pass ``number``, from 0 on, of a window: its samples in another order, (num_samples,) int64."""
    return permutation(num_samples, seed, stream=(ECHO + number, epoch, window))
