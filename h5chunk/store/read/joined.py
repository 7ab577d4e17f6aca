"""Join the fields of several files, or sets of files, by the position of their samples or by a key."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Collection, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from h5chunk.attributes import cached_property
from h5chunk.errors import FieldError, count_text, printable
from h5chunk.store.read.fields import SAMPLE_NUMBER, Field
from h5chunk.store.read.fileset import FileSet, set_name
from h5chunk.store.read.ragged import ImageSizes, RaggedField
from h5chunk.store.read.samples import FieldReader, MappedRows
from h5chunk.store.read.source import Source, SourceFile
from h5chunk.store.read.tables import find_table, has_table

DROP, ERROR = "drop", "error"  # what to do with samples that are missing in some files
SOURCE_INDEX = "source_index"  # the table with the number of each sample in its source
MAX_INT = np.iinfo(np.int64).max
MAX_WHOLE = 1 << 53  # larger whole numbers are not exact as float64


class Joined(Source):
    """Sources whose samples are the same, and whose fields differ.

    ``rows`` has, for each part, the row of each sample, (n,) int64; None means that they are equal. Samples have the
    order of the part with the main field, so that its rows are ascending. ``names`` has the order of the fields.
    """

    def __init__(self, parts: Sequence[Source], rows: Sequence[np.ndarray | None], names: Sequence[str]) -> None:
        self.parts, self._rows = tuple(parts), tuple(rows)
        self._part_of = {name: number for name in names for number, part in enumerate(parts) if name in part.fields}
        self._main_part = main = main_part(parts)
        leading, of_main = parts[main], rows[main]
        num_samples = leading.num_samples if of_main is None else len(of_main)
        chunk_samples, chunk_starts = leading.chunk_samples, leading.chunk_starts
        if of_main is not None:
            if chunk_starts is None:
                chunk_starts = np.arange(0, leading.num_samples + chunk_samples, chunk_samples)
            chunk_starts = np.unique(np.append(np.searchsorted(of_main, chunk_starts), num_samples))
            chunk_samples = max(1, round(num_samples / max(1, len(chunk_starts) - 1)))
        super().__init__(
            set_name([path for part in parts for path in part.paths]),
            {name: self._describe(name, num_samples) for name in self._part_of},
            num_samples,
            trusted=leading.trusted,
            checksums=leading.checksums,
            main=leading.main.name,
            starts=leading.starts if of_main is None else np.searchsorted(of_main, leading.starts),
            chunk_samples=chunk_samples,
            chunk_starts=chunk_starts,
            is_rows=True,
        )
        if leading.header is not None:
            self.header = replace(leading.header, num_samples=num_samples)

    @property
    def joined_as(self) -> str:  # type: ignore[override]
        can_be = all(rows is None for rows in self._rows) and all(part.joined_as for part in self.parts)
        return "fields in different files" if can_be else ""

    @classmethod
    def of_several(cls, sources: Sequence[Joined], name: Path) -> Joined:
        """Return a source of the samples of several sources, one after the other, whose rows are equal in all parts."""
        found = [{tuple(sorted(part.fields)): part for part in source.parts} for source in sources]
        for source, own in zip(sources, found, strict=True):
            if {*own} != {*found[0]}:
                raise FieldError(
                    f"{printable(source.path)} has the fields {[*own]} in its files, but {printable(sources[0].path)} "
                    f"has {[*found[0]]}: open both in the same way"
                )
        parts = [FileSet.of_several([own[names] for own in found], name) for names in found[0]]
        return cls(parts, [None] * len(parts), list(sources[0].fields))

    def _describe(self, name: str, num_samples: int) -> Field | RaggedField:
        number = self._part_of[name]
        field, rows = self.parts[number].fields[name], self._rows[number]
        if rows is None:
            return field
        if isinstance(field, RaggedField):
            lengths = np.diff(self.parts[number].indptr_of(name))
            return replace(field, num_rows=num_samples, num_entries=int(lengths[rows].sum()))
        return replace(field, grid=replace(field.grid, shape=(num_samples, *field.grid.shape[1:])))

    @property
    def readers(self) -> tuple[Source, ...]:
        """The sources of the files of the part with the main field."""
        return self.parts[self._main_part].readers

    @property
    def file_list(self) -> list[SourceFile]:
        return [file for part in self.parts for file in part.file_list]

    @property
    def reads_again(self) -> bool:
        """Whether a block of a part may be read for several windows, because its rows have another order."""
        return any(each is not None for each in self._rows) or any(part.reads_again for part in self.parts)

    def part_of(self, name: str) -> Source:
        """Return the part that has a field, dataset or table; by default, the one with the main field."""
        return self.parts[self._find(name)]

    def _find(self, name: str) -> int:
        if name in self._part_of:
            return self._part_of[name]
        order = sorted(range(len(self.parts)), key=lambda number: number != self._main_part)
        return next((number for number in order if has_table(self.parts[number].readers[0], name)), self._main_part)

    def rows_of_samples(self, name: str, samples: np.ndarray) -> tuple[Source, np.ndarray]:
        number = self._find(name)
        rows = self._rows[number]
        return self.parts[number], samples if rows is None else rows[samples]

    def datasets_of(self, field: str) -> list[tuple[Path, str]]:
        return self.part_of(field).datasets_of(field)

    def check_unchanged(self, descriptor: int | None = None) -> None:
        for part in self.parts if descriptor is None else ():
            part.check_unchanged()

    @cached_property
    def fingerprint(self) -> int:
        """A CRC-32 of the fingerprints of all parts, and of the rows of all samples in them."""
        fingerprint = zlib.crc32(repr([part.fingerprint for part in self.parts]).encode())
        for rows in self._rows:
            fingerprint = fingerprint if rows is None else zlib.crc32(rows.tobytes(), fingerprint)
        return fingerprint

    def _table_of(self, name: str) -> Any:
        number = self._part_of[name]
        return number, self.parts[number]._table_of(name)

    def _read_indptr(self, name: str) -> np.ndarray:
        number = self._part_of[name]
        indptr, rows = self.parts[number].indptr_of(name), self._rows[number]
        return indptr if rows is None else np.append(0, np.cumsum(np.diff(indptr)[rows]))

    def _read_image_sizes(self, name: str) -> ImageSizes:
        number = self._part_of[name]
        sizes, rows = self.parts[number].image_sizes_of(name), self._rows[number]
        return sizes if rows is None else ImageSizes(*(table[rows] for table in sizes))

    @property
    def recommendation(self) -> Any:
        """The recommendation for the part with the main field."""
        return self.parts[self._main_part].recommendation

    def field_readers(self, opening: Any, names: Collection[str]) -> dict[str, FieldReader]:
        found: dict[str, FieldReader] = {}
        first = opening.first_file
        for part, rows in zip(self.parts, self._rows, strict=True):
            wanted = [name for name in names if name in part.fields]
            own = part.field_readers(replace(opening, first_file=first), wanted) if wanted else {}
            found |= own if rows is None else {name: MappedRows(name, each, rows) for name, each in own.items()}
            first += len(part.file_list)
        return {name: found[name] for name in names}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "parts": tuple(copy(part) for part in self.parts)}


def main_part(parts: Sequence[Source]) -> int:
    """Return the number of the part with the main field: see `Source`."""
    ragged = [number for number, part in enumerate(parts) if part.ragged is not None]
    return max(ragged or range(len(parts)), key=lambda each: parts[each].main.grid.sample_bytes)


def check_positions(parts: Sequence[Source]) -> None:
    """Raise FieldError unless all parts have equally many samples, and converted ones the same order.

    Warn if only some of them were shuffled when they were converted.
    """
    if len({part.num_samples for part in parts}) > 1:
        listed = "; ".join(f"{printable(part.path)} has {count_text(part.num_samples, 'sample')}" for part in parts[:8])
        raise FieldError(
            f"files of one data set differ in length ({listed}): if they have a dataset that says which sample is "
            "which, such as an id, name it with key=..., and otherwise name files of equal length"
        )
    shuffled = [part for part in parts if any(file.header and file.header.shuffled for file in part.readers)]
    if not shuffled:
        return
    first, index = shuffled[0], _source_index(shuffled[0])
    others = [(part, _source_index(part)) for part in parts if part is not first]
    own, *_ = first.fields
    for part, numbers in others:
        name, *_ = part.fields
        if numbers is None or index is None:
            warnings.warn(
                f"{printable(first.path)} was shuffled when it was converted, and row i of {printable(part.path)} is "
                f"taken for the same sample: if this is right, pass key={SAMPLE_NUMBER!r}, and if it has the order of "
                f"the source, key={{{own!r}: 'h5chunk/source_index', {name!r}: {SAMPLE_NUMBER!r}}}",
                stacklevel=4,
            )
        elif not np.array_equal(numbers, index):
            raise FieldError(
                f"{printable(first.path)} and {printable(part.path)} have other orders, because convert shuffled "
                "them: pass key='h5chunk/source_index' if their sources have one order, or else the "
                "name of a dataset that says which sample is which"
            )


def _source_index(part: Source) -> np.ndarray | None:
    """Return the number of each sample in its source, (n,) int64, or None if the files do not have it."""
    found = [find_table(file, SOURCE_INDEX) if file.header is not None else None for file in part.readers]
    tables = [table for table in found if table is not None]
    return np.concatenate(tables) if len(tables) == len(found) else None


def rows_by_key(parts: Sequence[Source], keys: Sequence[np.ndarray], missing: str) -> list[np.ndarray | None]:
    """Return the row of each sample in each part, as `Joined` takes them, from the keys of the rows of each part.

    Samples are the rows of the part with the main field whose keys all parts have, in its order. Raises FieldError if
    keys are not comparable, or occur twice in another part. If samples are missing in a part, warn, or raise
    FieldError if ``missing`` is "error".
    """
    keys = [_comparable(part, own) for part, own in zip(parts, keys, strict=True)]
    kinds = ["text" if own.dtype.kind == "U" else "numbers" for own in keys]
    if len({*kinds}) > 1:
        other = kinds.index("text" if kinds[0] == "numbers" else "numbers")
        raise FieldError(
            f"{printable(parts[other].path)}: its key is {kinds[other]} (such as {keys[other][:1].tolist()}), but that "
            f"of {printable(parts[0].path)} is {kinds[0]} (such as {keys[0][:1].tolist()}): store both in one way"
        )
    main = main_part(parts)
    found, has_all = [np.arange(len(keys[main]))] * len(parts), np.ones(len(keys[main]), bool)
    lines = []
    for number, (part, own) in enumerate(zip(parts, keys, strict=True)):
        if number == main:
            continue
        order = np.argsort(own, kind="stable")
        ordered = own[order]
        if (twice := np.flatnonzero(ordered[1:] == ordered[:-1])).size:
            rows = order[twice[0] : twice[0] + 2].tolist()
            raise FieldError(
                f"{printable(part.path)}: its rows {rows[0]} and {rows[1]} have the same key, "
                f"{ordered[twice[0]].item()!r}: remove one of them, or name a key with a value for each sample"
            )
        at = np.minimum(np.searchsorted(ordered, keys[main]), max(0, len(own) - 1))
        has = ordered[at] == keys[main] if len(own) else np.zeros(len(keys[main]), bool)
        found[number] = order[at] if len(own) else at
        has_all &= has
        is_used = np.zeros(len(own), bool)
        is_used[found[number][has]] = True
        lacks, unused = int((~has).sum()), int((~is_used).sum())
        if lacks:
            first = keys[main][~has][0].item()
            lines.append(
                f"{printable(part.path)} lacks {count_text(lacks, 'sample')} of {len(has)} in "
                f"{printable(parts[main].path)}, such as {first!r}"
            )
        if unused:
            lines.append(f"{count_text(unused, 'row')} of {len(own)} in {printable(part.path)} are not used")
    if lines and missing == ERROR:
        raise FieldError(f"missing is {ERROR!r}, but {'; '.join(lines[:8])}: pass missing={DROP!r} to leave them out")
    if not has_all.any():
        raise FieldError(f"no key is in all files ({'; '.join(lines[:8])}): name a key that the files share")
    if lines:
        in_all = count_text(int(has_all.sum()), "sample")
        warnings.warn(f"{in_all} are in all files: {'; '.join(lines[:8])}", stacklevel=4)
    kept = np.flatnonzero(has_all)
    rows = [each[kept] for each in found]
    whole = [len(kept) == part.num_samples and bool((own == kept).all()) for part, own in zip(parts, rows, strict=True)]
    return [None if is_whole else own for is_whole, own in zip(whole, rows, strict=True)]


def _comparable(part: Source, keys: np.ndarray) -> np.ndarray:
    """Return keys as int64 or text. Raises FieldError if they are neither text nor whole numbers."""
    if keys.dtype.kind == "U":
        return keys
    is_whole = keys.dtype.kind in "iu" and not (keys.size and int(keys.max()) > MAX_INT)
    if keys.dtype.kind == "f":  # such as the numbers of MATLAB
        is_whole = bool((np.isfinite(keys) & (np.rint(keys) == keys) & (np.abs(keys) < MAX_WHOLE)).all())
    if not is_whole:
        raise FieldError(f"{printable(part.path)}: its key is {keys.dtype}: name a key of text or of whole numbers")
    return keys.astype(np.int64)
