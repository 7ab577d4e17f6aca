"""Attributes that are computed at their first use."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import TypeVar

T = TypeVar("T")


class cached_property(functools.cached_property[T]):
    """Like that of functools, without the lock that Python before 3.12 shares among all objects of a class.

    A fork would wait forever for a lock that another thread held. Threads that are first at the same time all compute
    the attribute.
    """

    def __init__(self, compute: Callable[..., T]) -> None:
        super().__init__(compute)
        self.lock = nullcontext()
