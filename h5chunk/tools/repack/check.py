"""Whether what is to be moved is what was written: its new checksums would else say that damaged values are right."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import h5py
import numpy as np
from h5py import h5d

from h5chunk.errors import FileError
from h5chunk.store.guard.checks import CheckedDataset, check_parts
from h5chunk.store.rewrite.survey import Survey, damages
from h5chunk.tools.repack.header import CHECKSUMS, checksum_name
from h5chunk.tools.repack.plan import RepackPlan
from h5chunk.tools.repack.run import Source


def bytes_to_check(plan: RepackPlan, survey: Survey) -> int:
    """Stored bytes of all that is moved and has checksums in the source."""
    return sum(survey.datasets[path].stored_bytes for path in _with_checksums(plan, survey))


def check_moved(plan: RepackPlan, survey: Survey, source: Source, told: Callable[[int], None]) -> None:
    """Compare the chunks of all that is moved with the checksums that the source holds of them, if it does.

    Parameters
    ----------
    plan : RepackPlan
    survey : Survey
    source : Source
    told : callable
        Told the bytes that were read since the last call.

    Raises
    ------
    FileError
        A chunk is not what its checksum says, or there are not as many checksums as chunks.
    """
    with damages(source.shown):
        for path in _with_checksums(plan, survey):
            name = checksum_name(path, source.shown)
            dataset = h5py.Dataset(h5d.open(source.file.id, path))
            expected = source.file[f"{CHECKSUMS}/{name}"][()]
            checked = CheckedDataset(source.path, dataset, expected)
            if checked.num_chunks != len(expected):
                raise FileError(
                    f"{source.shown}: {name!r} has {checked.num_chunks} chunks but {len(expected)} checksums: it is "
                    "damaged: h5chunk verify says what is wrong"
                )
            shares = plan.shares
            threads = max(1, min(shares.num_threads, shares.memory_bytes // checked.thread_bytes()))
            for came in check_parts(checked.parts(np.arange(checked.num_chunks)), source.descriptor, threads):
                if came.damages:
                    raise _damaged(source, name, came.damages[0].chunk, came.damages[0].what)
                told(came.num_bytes)


def _with_checksums(plan: RepackPlan, survey: Survey) -> Iterator[bytes]:
    """What is moved, and has a table of checksums."""
    for move in plan.moves:
        table = survey.datasets.get(f"{CHECKSUMS}/".encode() + move.facts.path)
        if move.checked and move.facts.num_bytes and table is not None and len(table.shape or ()) == 1:
            yield move.facts.path


def _damaged(source: Source, name: str, chunk: int, what: str) -> FileError:
    return FileError(
        f"{source.shown}: chunk {chunk} of {name!r} {what}: nothing was repacked: h5chunk verify names all that is "
        f"damaged, and repairs it with --repair; if values were changed on purpose, remove {CHECKSUMS}/{name} from it"
    )
