"""Options of `h5chunk.convert`, except those for reading a kind of source."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from h5chunk.errors import OptionError
from h5chunk.sources.kinds import DEFAULT_MEMORY_BYTES, MATRICES
from h5chunk.sources.kinds import KIND_OPTIONS as KIND_OPTIONS
from h5chunk.sources.options import Options, option

if TYPE_CHECKING:
    from h5chunk.sources.matrix.codes import Coding, FloatCoding

MIN_MEMORY_BYTES = 1 << 20
MAX_SHARDS = 99_999  # shard numbers have five digits
AUTO = "auto"
FLOATS = ("float16", "float32")  # types that the values of a matrix may have in a file
UNIQUE = ("csv", "ratings", "libsvm")  # kinds of sources whose duplicates are an error by default
DUPLICATES = {  # ways to combine duplicates, with their descriptions in reports
    "error": "are an error",
    "sum": "summed",
    "last": "reduced to the last",
    "first": "reduced to the first",
    "max": "reduced to the largest",
    "mean": "averaged",
}
IN_ORDER = ("last", "first")  # ways to combine duplicates that depend on the order of the entries


@dataclass(frozen=True)
class WriteOptions(Options):
    """Options for writing a file of any kind."""

    heading: ClassVar[str] = "Layout"

    seed: int = option(0, "Random seed for shuffling the samples.", minimum=0, maximum=(1 << 64) - 1)
    shuffle: bool = option(True, "Keep the order of SOURCE.")
    chunk_samples: int | None = option(
        None, "Number of samples per HDF5 chunk.", minimum=1, metavar="N|auto", shown_default="auto"
    )


@dataclass(frozen=True)
class NewOptions(WriteOptions):
    """Options for writing a new file, or a folder of files."""

    shards: int | None = option(
        None, "Make OUTPUT a folder of N files that form one data set.", minimum=1, maximum=MAX_SHARDS
    )

    @property
    def is_sharded(self) -> bool:
        """True if the output is a folder of files."""
        return self.shards is not None


@dataclass(frozen=True)
class SampleOptions(NewOptions):
    """Options for converting samples: images, arrays or tables."""

    heading: ClassVar[str] = "Samples"
    noun: ClassVar[str] = "images and other samples"

    workers: int | None = option(
        None,
        "Number of processes that read samples. 0: read in the main process.",
        minimum=0,
        shown_default="one per core",
    )
    on_error: str = option(
        "fail",
        "How to treat an unusable sample. fail: stop. skip: leave it out, and list it in a .skipped.csv file beside "
        "the output.",
        choices=("fail", "skip"),
    )
    memory_bytes: int = option(
        DEFAULT_MEMORY_BYTES,
        "For tables and compressed arrays: upper limit on the memory of their numbers and strings.",
        heading=MATRICES,
        minimum=MIN_MEMORY_BYTES,
        unit="bytes",
        shown_default="1GiB",
    )

    shard_bytes: int | None = option(
        None, "Make OUTPUT a folder of files of at most this size, such as 1GiB.", minimum=1, unit="bytes"
    )
    split_files: bool = option(
        False, "Make OUTPUT a folder with one file per split (train.h5, val.h5, ...). All files have the same classes."
    )
    like: str | os.PathLike[str] | None = option(
        None,
        "Make OUTPUT one more file of the data set FILE, an earlier output of convert: with its fields, types, "
        "classes, chunks and options for images.",
        metavar="FILE",
        is_path=True,
    )
    new_classes: bool = option(False, "With --like: add classes that FILE lacks after its classes.")

    def __post_init__(self) -> None:
        super().__post_init__()
        names = [name for name in ("shards", "shard_bytes", "split_files") if getattr(self, name)]
        if len(names) > 1:
            values = " and ".join(f"{name} is {getattr(self, name)}" for name in names)
            raise OptionError(f"{values}: use only one of them")
        if self.new_classes and self.like is None:
            raise OptionError(
                "new_classes (--new-classes) requires like (--like): name the file whose classes keep their labels"
            )

    @property
    def is_sharded(self) -> bool:
        """True if the output is a folder of files."""
        return super().is_sharded or self.shard_bytes is not None or self.split_files

    def recorded(self) -> dict[str, Any]:
        """Return the options to record in the file, besides those for the order of the samples."""
        return {"split_files": True} if self.split_files else {}


@dataclass(frozen=True)
class MatrixOptions(NewOptions):
    """Options for converting sparse matrices."""

    heading: ClassVar[str] = MATRICES
    noun: ClassVar[str] = "sparse matrices"

    values: str = option(
        AUTO,
        "Type of the stored values. auto: the smallest of uint8 (scaled if necessary), float16 and float32 that stores "
        "all values exactly. uint8: fail if it cannot store a value exactly. float16, float32: round values.",
        choices=(AUTO, "uint8", *FLOATS),
    )
    scale: float | None = option(
        None,
        "Multiply values by S, and store them as uint8.",
        metavar="S",
        shown_default="the smallest S that stores all values exactly",
    )
    clip: bool = option(
        False, "Clip values to the range that uint8 can store: from 0 to 255, or from 0 to 255 / S with --scale S."
    )
    binarize: float | None = option(None, "Store values of at least MIN as 1, and drop all others.", metavar="MIN")
    min_row_count: int | None = option(
        None, "Leave out rows with fewer than N entries.", minimum=0, shown_default="1 if rows have ids, else 0"
    )
    min_column_count: int | None = option(
        None,
        "Leave out columns with fewer than N entries. This is applied before --min-row-count.",
        minimum=0,
        shown_default="1 if columns have ids, else 0",
    )
    duplicates: str = option(
        AUTO,
        "How to combine several entries for the same row and column. last and first are determined by time or, if "
        "SOURCE has no times, by its order. auto: error for ratings and libsvm, sum for other sources.",
        choices=(AUTO, *DUPLICATES),
    )
    time_order: bool = option(
        False,
        "Sort the entries of each row by time, as sequence models and h5chunk.transforms.HoldOut(last=N) require.",
    )
    ids_from: str | os.PathLike[str] | None = option(
        None,
        "Match columns by id with OLD.h5, an earlier output of convert, and give them the same indices. New columns "
        "follow.",
        metavar="OLD.h5",
        is_path=True,
    )
    keep_rows: bool = option(
        False, "Also give rows the same indices as in the file of --ids-from. Rows with new ids follow."
    )
    transpose: bool = option(False, "Make the columns of SOURCE the samples.")
    dense: bool = option(False, "Store dense rows, with their zeros, instead of compressed sparse rows.")
    compression: str | None = option(
        None, "Compression of --dense rows.", choices=("gzip", "none"), shown_default="gzip"
    )
    memory_bytes: int = option(
        DEFAULT_MEMORY_BYTES,
        "Upper limit on host memory, such as 512M. Data that does not fit is written to temporary files beside OUTPUT.",
        minimum=MIN_MEMORY_BYTES,
        unit="bytes",
        shown_default="1GiB",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.compression is not None and not self.dense:
            raise OptionError(
                f"compression is {self.compression!r}, but only dense rows are compressed: add dense=True (--dense)"
            )
        if self.dense and self.time_order:
            raise OptionError(
                "time_order (--time-order) does not apply to dense rows, whose entries have no order: leave out dense"
            )
        if self.keep_rows and self.ids_from is None:
            raise OptionError(
                "keep_rows (--keep-rows) requires ids_from (--ids-from): name the file whose rows keep their indices"
            )
        self.coding()

    @property
    def needs_times(self) -> bool:
        """True if the options depend on the times of entries."""
        return self.time_order or self.duplicates in IN_ORDER

    def min_counts(self, has_ids: bool) -> tuple[int, int]:
        """Return the minimum number of entries of rows and of columns; by default 1 if the source has ids, else 0."""
        counts = self.min_row_count, self.min_column_count
        rows, columns = (int(has_ids) if count is None else count for count in counts)
        return rows, columns

    def coding(self) -> Coding | FloatCoding:
        """Return the coding to try first; its method ``fallback`` returns the next one, if any."""
        from h5chunk.sources.matrix.codes import Coding, FloatCoding

        codes = Coding(self.scale, self.clip, self.binarize, strict=self.values != AUTO)
        if self.values not in FLOATS:
            return codes
        if self.scale is not None or self.binarize is not None:
            raise OptionError(f"values is {self.values!r}, but scale and binarize store uint8: leave them out")
        return FloatCoding(self.values, self.clip)

    def for_kind(self, kind: str) -> MatrixOptions:
        """Return options in which the default for a kind of source replaces ``auto`` as the value of ``duplicates``."""
        return self if self.duplicates != AUTO else replace(self, duplicates="error" if kind in UNIQUE else "sum")

    def duplicates_text(self, time_name: str | None) -> str:
        """Describe for reports how duplicates are combined.

        >>> MatrixOptions(duplicates="last").duplicates_text("timestamp")
        'reduced to the last by timestamp'
        """
        order = f" by {time_name}" if time_name else " in the order of the source"
        return DUPLICATES[self.duplicates] + (order if self.duplicates in IN_ORDER else "")

    def recorded(self) -> dict[str, Any]:
        """Return the options to record in the file: those that determine its bytes."""
        excluded = ("memory_bytes", "ids_from", "shards", *(() if self.dense else ("compression",)))
        return {name: value for name, value in vars(self).items() if name not in excluded}


def convert_options() -> list[type[Options]]:
    groups = [*KIND_OPTIONS.values(), SampleOptions, MatrixOptions]
    return sorted(groups, key=lambda group: group.heading == MATRICES)
