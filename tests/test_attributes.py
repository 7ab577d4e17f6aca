"""Attributes that are computed at their first use."""

from __future__ import annotations

import threading

from support.leftovers import WAIT_S, in_fork

from h5chunk.attributes import cached_property


def test_in_a_fork_while_a_thread_computes_an_attribute() -> None:
    """Also one that is another object's."""
    begun, go_on, computed = threading.Event(), threading.Event(), []

    class Slow:
        @cached_property
        def value(self) -> int:
            if threading.current_thread() is thread:
                begun.set()
                go_on.wait(WAIT_S)
            computed.append(self)
            return 7

    thread = threading.Thread(target=lambda: Slow().value)
    thread.start()
    assert begun.wait(WAIT_S)
    assert in_fork(lambda: Slow().value) == 0
    go_on.set()
    thread.join()
    one = Slow()
    assert one.value == one.value == 7 and computed.count(one) == 1
