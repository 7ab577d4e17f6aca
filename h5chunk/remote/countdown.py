"""Call a function after several parts of a task have ended, without a waiting thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Error = TypeVar("Error")


class Countdown(Generic[Error]):
    """A countdown that calls ``then`` once all parts of a task have ended, with the first error, or with an empty one.

    ``end`` must be called once for each ``add``, and once more after the last ``add``.
    """

    def __init__(self, then: Callable[[Error], None]) -> None:
        self._then, self._left, self._lock = then, 1, threading.Lock()
        self._errors: list[Error] = []

    def add(self) -> Callable[[Error], None]:
        """Add a part, and return the function to call when it ends."""
        with self._lock:
            self._left += 1
        return self.end

    def end(self, error: Error) -> None:
        with self._lock:
            if error:
                self._errors.append(error)
            self._left -= 1
            is_last = not self._left
        if is_last:
            self._then(self._errors[0] if self._errors else error)
