"""System calls that fail with a given errno."""

from __future__ import annotations

import os
from collections.abc import Callable


def failing(error: int) -> Callable[..., object]:
    def fail(*args: object, **kwargs: object) -> object:
        raise OSError(error, os.strerror(error))

    return fail
