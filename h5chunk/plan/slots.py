"""Choose how many windows are held in memory at a time, and compute the batches that data echoing repeats.

>>> order = Order(num_samples=960, chunk_samples=8, batch_size=16, window_chunks=4, interleave=1)
>>> plan = plan_slots(order, window_bytes=lambda samples: (4 << 20) * samples, other_bytes=lambda order: 0)
>>> plan.num_slots, plan.window_samples  # one is used, and six are read ahead
(7, 32)

Data echoing uses the samples of a window more than once, which helps if reading is slower than training. After the
batches of a window were used, its samples are shuffled again and cut into new batches, called echoes. Each repetition
of a window is a pass. With a factor of 2 every sample is used twice. With 1.25 every fifth batch is an echo, and passes
are not completed.

Source: Choi et al., "Faster Neural Network Training with Data Echoing", arXiv:1907.05550.

>>> [num_echoed(1.5, fresh) for fresh in range(5)]
[0, 0, 1, 1, 2]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import islice
from typing import Any

import numpy as np

from h5chunk.errors import OptionError, count_text
from h5chunk.plan.order import Order
from h5chunk.plan.permutation import ECHO, Indices, permutation

AHEAD = 6  # windows to read ahead; scripts/LOG.md has measurements
SMALL_AHEAD = 47  # windows to read ahead, if they are small
SMALL_BYTES = 128 << 20  # limit in bytes on small windows that are read ahead
AHEAD_BYTES = 1 << 30  # limit in bytes on windows that are read ahead, unless ``memory_bytes`` is set
TOGETHER_BYTES = 32 << 20  # small windows are read together up to this size, because each read has a fixed cost
MIN_GROUPS = 3  # of windows that are read together: one is used, and two are read ahead


@dataclass(frozen=True)
class SlotPlan:
    """The number and size of slots. A slot is a buffer for one window, or for several small windows."""

    order: Any  # the `Order`, with windows small enough to fit, or another `h5chunk.plan.order.Epoch`
    num_slots: int
    num_local: int  # slots to use once all data is on this machine, where fewer windows are read ahead
    window_samples: int  # maximum number of samples in a slot
    window_bytes: int  # size of a slot in bytes, including all copies
    together: int = 1  # windows per slot

    @property
    def num_bytes(self) -> int:
        """Total size of all slots in bytes."""
        return self.num_slots * self.window_bytes


def plan_slots(
    order: Order,
    window_bytes: Callable[[int], int],
    other_bytes: Callable[[Order], int],
    *,
    memory_bytes: int | None = None,
    min_chunks: int | None = None,
    ahead_bytes: int = 0,
    small_bytes: int = SMALL_BYTES,
) -> SlotPlan:
    """Choose how many windows are held at a time: the one that is used, and some that are read ahead.

    ``window_bytes(n)`` returns the size in bytes of all copies of a window of n samples, and ``other_bytes(order)``
    the size of everything else. At least ``ahead_bytes`` are read ahead if the epoch is long enough and the memory
    suffices, and of small windows up to ``small_bytes``. If ``min_chunks`` is set, windows may shrink to that
    many chunks to fit into ``memory_bytes``. Raises OptionError if the windows do not fit.
    """
    while True:
        window_samples = largest_window(order)
        slot_bytes = max(1, window_bytes(window_samples))
        extra_bytes = 0
        room = max(1, AHEAD_BYTES // slot_bytes)  # slots to read ahead
        if memory_bytes is not None:
            extra_bytes = other_bytes(order)
            room = max(0, memory_bytes - extra_bytes) // slot_bytes - 1
        if room > 0:
            num_slots, num_local = (
                1 + min(room, num_ahead(order, slot_bytes, some_bytes, small_bytes)) for some_bytes in (ahead_bytes, 0)
            )
            return SlotPlan(order, num_slots, num_local, window_samples, slot_bytes)
        fewer = max(order.window_chunks // 2, min_chunks or order.window_chunks)
        if fewer >= order.window_chunks:
            break
        order = replace(order, window_chunks=fewer)
    needed = 2 * slot_bytes
    remedy = "use fewer num_threads, " if extra_bytes and needed <= (memory_bytes or 0) else ""
    raise OptionError(
        f"memory_bytes is {memory_bytes}, but 2 windows of {count_text(order.window_batches, 'batch')} "
        f"need {needed + extra_bytes}: pass that much, {remedy}or use a smaller window_chunks or batch_size"
    )


def with_windows_together(plan: SlotPlan, max_bytes: int, num_reserved: int = 0) -> SlotPlan:
    """Join small windows into groups that are read together, if the memory still allows reading two groups ahead.

    A group has at most ``max_bytes``. ``num_reserved`` is the number of windows that are held outside the slots.

    >>> order = Order(num_samples=9600, chunk_samples=8, batch_size=16, window_chunks=4, interleave=1)
    >>> plan = plan_slots(order, window_bytes=lambda samples: 1000 * samples, other_bytes=lambda order: 0)
    >>> together = with_windows_together(plan, 1 << 20)
    >>> plan.num_slots, plan.window_samples, together.num_slots, together.window_samples
    (48, 32, 3, 512)
    """
    fitting = (plan.num_local + num_reserved) // (MIN_GROUPS + num_reserved)
    count = max(1, min(max_bytes // plan.window_bytes, fitting))
    num_slots, num_local = ((n + num_reserved) // count - num_reserved for n in (plan.num_slots, plan.num_local))
    samples, held = plan.window_samples * count, plan.window_bytes * count
    return SlotPlan(plan.order, num_slots, num_local, samples, held, count)


def num_ahead(order: Order, slot_bytes: int, ahead_bytes: int = 0, small_bytes: int = SMALL_BYTES) -> int:
    """Return how many windows of ``slot_bytes`` to read ahead, at most all windows of an epoch."""
    wanted = max(AHEAD, -(-ahead_bytes // slot_bytes), min(SMALL_AHEAD, small_bytes // slot_bytes))
    return max(1, sum(1 for _ in islice(order.rounds(), wanted)))


def largest_window(order: Order) -> int:
    """Return the number of samples of the largest window."""
    batches = 1
    for round_ in order.rounds():  # in a short epoch, a later round may have larger windows than the first
        batches = max(batches, round_.window_batches)
        if batches == order.window_batches:
            break
    samples = batches * order.batch_size
    return max(1, samples if order.pad else min(samples, order.num_samples))


def check_echo(echo: object) -> None:
    """Raise OptionError unless the echo factor is a number of at least 1."""
    number = isinstance(echo, (int, float, np.integer, np.floating)) and not isinstance(echo, bool)
    if not number or not 1 <= echo < 1000:  # type: ignore[operator]
        raise OptionError(f"echo is {echo!r}: pass the number of times that each sample is used, from 1 to 999")


def num_echoed(echo: float, fresh: int) -> int:
    """Return how many echoes are due in total after ``fresh`` batches of new samples."""
    return int((Fraction(str(echo)) - 1) * fresh)


def echo_pass(num_samples: int, seed: int, epoch: int, window: int, number: int) -> Indices:
    """Return the order of a window's samples in pass ``number``, counted from 0: (num_samples,) int64."""
    return permutation(num_samples, seed, stream=(ECHO + number, epoch, window))
