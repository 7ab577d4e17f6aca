"""Write samples into a folder of files: shuffled once over all of them, each a complete file by itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from h5chunk.errors import OptionError
from h5chunk.plan.layout import Layout, human_bytes, plan_layout
from h5chunk.store.format.shard_names import shard_name
from h5chunk.store.format.spec import HEADER_BYTES
from h5chunk.store.write.fill import Filled
from h5chunk.store.write.fill_task import Failure
from h5chunk.store.write.new_file import NewFile, check_room
from h5chunk.store.write.new_folder import NewFolder
from h5chunk.store.write.samples import SampleJob, write_samples
from h5chunk.tools.convert.resume import Notify, TaskLog, command_id, job_key, keeping
from h5chunk.tools.convert.samples import count_written
from h5chunk.tools.progress import Progress

MAX_SHARDS = 99_999  # their numbers have five digits


def check_shards(shards: int | None, shard_bytes: int | None) -> None:
    """Raise OptionError if both are given, or one is out of its range."""
    if shards is not None and shard_bytes is not None:
        raise OptionError(f"shards is {shards} and shard_bytes is {shard_bytes}: give one of them")
    if shards is not None and not 1 <= shards <= MAX_SHARDS:
        raise OptionError(f"shards is {shards}: give 1 to {MAX_SHARDS}")
    if shard_bytes is not None and shard_bytes < 1:
        raise OptionError(f"shard_bytes is {shard_bytes}: give at least 1")


def split_job(job: SampleJob, shards: int | None, shard_bytes: int | None, *, chosen: bool) -> list[SampleJob]:
    """Divide a job into those of its shards: equal numbers of whole chunks, as far as possible.

    Parameters
    ----------
    job : SampleJob
        Of all of them.
    shards, shard_bytes : int, optional
        How many; or the most bytes of each, about.
    chosen : bool
        Whether we chose the chunk size; then it may become smaller.

    Raises
    ------
    OptionError
        There is not a chunk for each of them, or a chunk is larger than a shard may be.
    """
    layout = job.layout
    if shards is not None and chosen and layout.num_chunks < shards <= layout.num_samples:
        smaller = plan_layout(layout.num_samples, layout.sample_bytes, layout.num_samples // shards)
        layout = replace(smaller, reasons=(f"{smaller.chunk_samples} samples a chunk, so that each shard has one",))
    if shards is None:
        assert shard_bytes is not None
        shards = _num_shards(job, layout, shard_bytes)
    if layout.num_chunks < shards:
        raise OptionError(
            f"shards is {shards} but there are {layout.num_chunks} chunks of {layout.chunk_samples} samples: give "
            "fewer shards, or fewer samples a chunk"
        )
    least, more = divmod(layout.num_chunks, shards)
    made, first = [], 0
    for number in range(shards):
        last = min(first + (least + (number < more)) * layout.chunk_samples, layout.num_samples)
        name = shard_name(job.path.name.removesuffix(".h5"), number, shards)
        options = {**job.options, "shard": number, "shards": shards}
        shard = replace(job, path=job.path / name, layout=layout, options=options)
        made.append(shard.with_order(job.order[first:last]))
        first = last
    return made


def _num_shards(job: SampleJob, layout: Layout, shard_bytes: int) -> int:
    """Return the number of shards of which none is larger than ``shard_bytes``."""
    sample_bytes = (job.spec().num_bytes - HEADER_BYTES) / layout.num_samples  # with all fields and tables
    chunk_bytes = int(sample_bytes * layout.chunk_samples) + 1
    per_shard = (shard_bytes - HEADER_BYTES) // chunk_bytes
    if per_shard < 1:
        raise OptionError(
            f"shard_bytes is {shard_bytes} but a file of one chunk of {layout.chunk_samples} samples takes "
            f"{chunk_bytes + HEADER_BYTES}: give more, or fewer samples a chunk"
        )
    shards = -(-layout.num_chunks // per_shard)
    if shards > MAX_SHARDS:
        raise OptionError(f"shard_bytes is {shard_bytes}, which makes {shards} shards: give more, for {MAX_SHARDS}")
    return shards


def describe(made: list[SampleJob]) -> str:
    """Return the plan as a sentence."""
    first = made[0]
    size = human_bytes(first.spec().num_bytes)
    return f"{len(made)} shards of up to {len(first.order):,} samples, {size}, such as {first.path.name}"


def write_shards(
    job: SampleJob, made: list[SampleJob], overwrite: bool, progress: Progress | None, notify: Notify
) -> tuple[list[SampleJob], Filled]:
    """Write all shards and put their folder in its place.

    Returns
    -------
    list of SampleJob
        With the samples that were not skipped.
    Filled
        What came of all of them; rows are those of all shards, one behind the other.
    """
    written = count_written(len(job.order), progress)
    filled, left = Filled(), []
    folder = NewFolder(job.path, overwrite)
    with keeping(folder, job, notify), folder:
        folder.open_journal(job_key(job, len(made)))
        log = TaskLog(folder.journal, made, notify)
        taken = sum(file.stat().st_blocks * 512 for file in folder.part.iterdir())
        check_room(job.path, sum(each.spec().num_bytes for each in made) - taken)
        for number, (first_row, each) in enumerate(_with_first_rows(made)):
            folder.reopen(each.path.name)
            with NewFile(folder.part / each.path.name, journal=folder.journal) as new:
                kept, of_each = write_samples(
                    new, each, claims=log.claims(number), finished=log.adder(number), written=written
                )
                new.commit()
            left.append(kept)
            filled.notes.update(of_each.notes)
            filled.stamp ^= of_each.stamp
            filled.failures += [Failure(first_row + f.row, f.reason, f.kind) for f in of_each.failures]
        log.finish()
        folder.command_id = command_id(job, len(made), filled.stamp)
        folder.commit()
    return left, filled


def _with_first_rows(made: list[SampleJob]) -> Iterator[tuple[int, SampleJob]]:
    first = 0
    for each in made:
        yield first, each
        first += len(each.order)


def folder_bytes(path: Path) -> int:
    """Return the bytes of all shards."""
    return sum(file.stat().st_size for file in path.iterdir())
