"""Stories of a file (`tests/test_story.py`): random sequences of operations against a model in NumPy, many and long."""

from __future__ import annotations

import traceback

from hypothesis import HealthCheck, seed, settings
from hypothesis.database import InMemoryExampleDatabase
from hypothesis.stateful import run_state_machine_as_test
from torture_result import Result, share_tests

share_tests()

from test_story import STEPS, Story  # noqa: E402

LONGEST = 20  # steps of a story


def run(stories: int, number: int) -> Result:
    """So many stories; the first one that fails is shown at its shortest."""
    result = Result("stories")

    @seed(number)
    class Told(Story):
        def __init__(self) -> None:
            super().__init__()
            result.cases += 1

    chosen = settings(
        max_examples=stories,
        stateful_step_count=LONGEST,
        deadline=None,
        database=InMemoryExampleDatabase(),
        suppress_health_check=list(HealthCheck),
    )
    STEPS.clear()
    try:
        run_state_machine_as_test(Told, settings=chosen)
    except Exception:
        result.bad.append(traceback.format_exc())
    result.counts.update(sorted(STEPS.items()))
    return result
