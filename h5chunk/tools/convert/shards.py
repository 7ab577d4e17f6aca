"""Write samples into a folder of files: shuffled once over all of them, each a complete file by itself."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from h5chunk.errors import OptionError, human_bytes
from h5chunk.plan.layout import Layout, plan_layout
from h5chunk.store.format.shard_names import shard_name
from h5chunk.store.format.spec import HEADER_BYTES
from h5chunk.store.write.fill import Filled
from h5chunk.store.write.new_file import NewFile, check_room
from h5chunk.store.write.output import NewFolder
from h5chunk.store.write.samples import SampleJob, write_samples
from h5chunk.tools.convert.options import MAX_SHARDS
from h5chunk.tools.convert.samples import Notify, TaskLog, command_id, count_written, job_key, keeping
from h5chunk.tools.progress import Progress


def split_job(job: SampleJob, shards: int | None, shard_bytes: int | None, *, chosen: bool) -> list[SampleJob]:
    """Divide a job into those of its shards: equal numbers of whole chunks, as far as possible.

    A chunk size that was chosen, not asked for, may become smaller. Raises OptionError if there is not a chunk for each
    shard, or a chunk is larger than a shard may be.
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
    jobs, first = [], 0
    for number in range(shards):
        last = min(first + (least + (number < more)) * layout.chunk_samples, layout.num_samples)
        name = shard_name(job.path.name.removesuffix(".h5"), number, shards)
        options = {**job.options, "shard": number, "shards": shards}
        shard = replace(job, path=job.path / name, layout=layout, options=options)
        jobs.append(shard.with_order(job.order[first:last]))
        first = last
    return jobs


def folder_layout(jobs: list[SampleJob]) -> Layout:
    """Return the layout of all shards together, with the plan as its last reason."""
    first, num_samples = jobs[0], sum(len(job.order) for job in jobs)
    size = human_bytes(first.spec().num_bytes)
    reason = f"{len(jobs)} shards of up to {len(first.order):,} samples, {size}, such as {first.path.name}"
    return replace(first.layout, num_samples=num_samples, reasons=(*first.layout.reasons, reason))


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


def write_shards(
    job: SampleJob, jobs: list[SampleJob], overwrite: bool, progress: Progress | None, notify: Notify
) -> tuple[list[SampleJob], Filled]:
    """Write all shards and put their folder in its place.

    Returns their jobs without the samples that were skipped, and what came of all of them: rows are those of all
    shards, one behind the other.
    """
    written = count_written(job, progress)
    filled, kept, first_row = Filled(), [], 0
    folder = NewFolder(job.path, overwrite)
    with keeping(folder, job, notify), folder:
        folder.open_journal(job_key(job, len(jobs)))
        log = TaskLog(folder.journal, jobs, notify)
        taken = sum(file.stat().st_blocks * 512 for file in folder.part.iterdir())
        check_room(job.path, sum(shard.spec().num_bytes for shard in jobs) - taken)
        for number, shard in enumerate(jobs):
            folder.reopen(shard.path.name)
            with NewFile(folder.part / shard.path.name, journal=folder.journal) as new:
                claims, finished = log.claims[number], partial(log.add, number)
                left, of_shard = write_samples(new, shard, claims=claims, finished=finished, written=written)
                new.commit()
            kept.append(left)
            filled.notes.update(of_shard.notes)
            filled.stamp ^= of_shard.stamp
            filled.failures += [failure._replace(row=first_row + failure.row) for failure in of_shard.failures]
            first_row += len(shard.order)
        log.finish()
        folder.command_id = command_id(job, len(jobs), filled.stamp)
        folder.commit()
    return kept, filled
