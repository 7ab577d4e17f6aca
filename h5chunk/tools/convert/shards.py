"""Pack images into a folder of files: shuffled once over all of them, each a complete file by itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from h5chunk.errors import OptionError
from h5chunk.plan.layout import Layout, human_bytes, plan_layout
from h5chunk.store.format import HEADER_BYTES
from h5chunk.store.write.fill import Filled
from h5chunk.store.write.filltask import Failure
from h5chunk.store.write.newfile import NewFile, check_room
from h5chunk.store.write.newfolder import NewFolder, shard_name
from h5chunk.tools.convert.images import Conversion, count_written, write_images
from h5chunk.tools.convert.resume import Notify, TaskLog, telling
from h5chunk.tools.progress import Progress

MAX_SHARDS = 99_999  # their numbers have five digits


def check_shards(shards: int | None, shard_bytes: int | None) -> None:
    """Raise OptionError unless one of the two is given, and can be."""
    if shards is not None and shard_bytes is not None:
        raise OptionError(f"shards is {shards} and shard_bytes is {shard_bytes}: give one of them")
    if shards is not None and not 1 <= shards <= MAX_SHARDS:
        raise OptionError(f"shards is {shards}: give 1 to {MAX_SHARDS}")
    if shard_bytes is not None and shard_bytes < 1:
        raise OptionError(f"shard_bytes is {shard_bytes}: give at least 1")


def split_conversion(job: Conversion, shards: int | None, shard_bytes: int | None, *, chosen: bool) -> list[Conversion]:
    """What becomes each of the shards: equal numbers of whole chunks, as far as that goes.

    Parameters
    ----------
    job : Conversion
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
        options = job.options | {"shard": number, "shards": shards}
        part = _part_of(layout, last - first)
        made.append(replace(job, path=job.path / name, layout=part, order=job.order[first:last], options=options))
        first = last
    return made


def _part_of(layout: Layout, num_samples: int) -> Layout:
    part = replace(layout, num_samples=num_samples, chunk_samples=min(layout.chunk_samples, num_samples))
    return replace(part, window_chunks=min(layout.window_chunks, part.num_chunks))


def _num_shards(job: Conversion, layout: Layout, shard_bytes: int) -> int:
    """So many that none is larger than that."""
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


def describe(made: list[Conversion]) -> str:
    """The plan in a sentence."""
    first = made[0]
    size = human_bytes(first.spec().num_bytes)
    return f"{len(made)} shards of up to {len(first.order):,} samples, {size}, such as {first.path.name}"


def write_shards(
    job: Conversion, made: list[Conversion], overwrite: bool, progress: Progress | None, notify: Notify
) -> tuple[list[Conversion], Filled]:
    """Write all shards and put their folder in its place.

    Returns
    -------
    list of Conversion
        With the samples that were not skipped.
    Filled
        What came of all of them; rows are those of all shards, one behind the other.
    """
    written = count_written(len(job.order), progress)
    filled, left = Filled(job.order[:0].astype("uint32")), []
    folder = NewFolder(job.path, overwrite)
    with telling(folder, notify), folder:
        folder.open_journal(job.key(len(made)))
        log = TaskLog(folder.journal, [(len(each.order), each.layout.chunk_samples) for each in made], notify)
        taken = sum(file.stat().st_blocks * 512 for file in folder.part.iterdir())
        check_room(job.path, sum(each.spec().num_bytes for each in made) - taken)
        for number, (first_row, each) in enumerate(_with_first_rows(made)):
            folder.reopen(each.path.name)
            with NewFile(folder.part / each.path.name, journal=folder.journal) as new:
                kept, of_each = write_images(new, each, written, log, number)
                new.commit()
            left.append(kept)
            filled.notes.update(of_each.notes)
            filled.stamp ^= of_each.stamp
            filled.failures += [Failure(first_row + f.row, f.reason, f.kind) for f in of_each.failures]
        log.finish()
        folder.command_id = job.command_id(len(made), filled.stamp)
        folder.commit()
    return left, filled


def _with_first_rows(made: list[Conversion]) -> Iterator[tuple[int, Conversion]]:
    first = 0
    for each in made:
        yield first, each
        first += len(each.order)


def folder_bytes(path: Path) -> int:
    """Bytes of all shards."""
    return sum(file.stat().st_size for file in path.iterdir())
