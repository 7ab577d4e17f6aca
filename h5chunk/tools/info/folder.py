"""What is in several HDF5 files, and whether they read as one data set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from h5chunk.errors import FileError, H5ChunkError, printable
from h5chunk.plan.layout import human_bytes
from h5chunk.store.guard.guard import Trusted
from h5chunk.store.read.fields import Field
from h5chunk.store.read.files import Paths, list_files, open_reader
from h5chunk.store.read.reader import H5Reader
from h5chunk.tools.report import Report, list_some

if TYPE_CHECKING:
    from h5chunk.tools.info.info import FileInfo

SHOWN = 20  # files in what people read; JSON has all


@dataclass(frozen=True)
class FolderInfo(Report):
    """What `info` found in a folder, or in files that match a pattern.

    Attributes
    ----------
    path : str
    num_bytes : int
        Of all files.
    files : tuple of FileInfo
        By name, with numbers in it by their value; without those that cannot be opened.
    broken : dict of str to str
        Those, and why.
    num_samples : tuple of int
        Of each of the files in the set; empty if they are none.
    fields : tuple of str
        Of a sample of the set.
    class_names : tuple of str
        Of the set.
    chunk_samples : tuple of int
        Samples that are read together, in each file of the set.
    is_shuffled : bool
        Whether the samples of all files were shuffled together when they were packed.
    why_not : str
        Why the files are no data set; empty if they are one.
    """

    path: str
    num_bytes: int
    files: tuple[FileInfo, ...]
    broken: dict[str, str]
    num_samples: tuple[int, ...]
    fields: tuple[str, ...]
    class_names: tuple[str, ...]
    chunk_samples: tuple[int, ...]
    is_shuffled: bool
    why_not: str

    def facts(self) -> dict[str, Any]:
        """The report for programs, with the samples of all files."""
        return {**super().facts(), "total_samples": sum(self.num_samples)}

    def lines(self) -> list[str]:
        number = len(self.files) + len(self.broken)
        lines = [f"{self.path}: {number} file{'' if number == 1 else 's'}, {human_bytes(self.num_bytes)}"]
        if self.why_not:
            lines.append(f"  not one data set: {self.why_not}")
        else:
            lines += self._as_one()
        lines += [f"  cannot be opened: {path}: {why}" for path, why in list(self.broken.items())[:SHOWN]]
        lines += [f"  {self._line(number)}" for number in range(len(self.files))[:SHOWN]]
        left = max(0, len(self.files) - SHOWN) + max(0, len(self.broken) - SHOWN)
        return [*lines, *([f"  {left} more (--json has all)"] if left else [])]

    def _as_one(self) -> list[str]:
        order = "shuffled as one" if self.is_shuffled else "not shuffled as one: take large window_chunks"
        sizes = Counter(self.chunk_samples).most_common()
        chunks = ", ".join(f"{size} in {count} file{'' if count == 1 else 's'}" for size, count in sizes)
        return [
            f"  read as one: {sum(self.num_samples):,} samples of {', '.join(self.fields)}; {order}",
            *([f"  classes {list_some(self.class_names)}"] if self.class_names else []),
            f"  samples that are read together: {chunks}",
        ]

    def _line(self, number: int) -> str:
        each = self.files[number]
        samples = f"{self.num_samples[number]:,} samples, " if self.num_samples else ""
        refused = f"; {len(each.refused)} not looked at" if each.refused else ""
        return f"{each.path}: {samples}{human_bytes(each.num_bytes)}{refused}"


def info_folder(path: Paths, look: Callable[[Path], FileInfo], trusted: Trusted) -> FolderInfo:
    """Look at all files that are meant, one by one and together.

    Parameters
    ----------
    path : path or sequence of paths
    look : callable
        Looks at one file.
    trusted : bool, path or sequence of paths

    Raises
    ------
    FileError
        There are none.
    """
    files, broken = [], {}
    num_bytes = 0
    for file in list_files(path):
        num_bytes += file.stat().st_size if file.is_file() else 0
        try:
            files.append(look(file))
        except FileError as error:
            broken[str(file)] = str(error).removeprefix(f"{printable(file)}: ")
    shown = str(path) if isinstance(path, (str, Path)) else f"{len(files) + len(broken)} files"
    return FolderInfo(path=shown, num_bytes=num_bytes, files=tuple(files), broken=broken, **_together(path, trusted))


def _together(path: Paths, trusted: Trusted) -> dict[str, Any]:
    """What is true of the set, or why it is none."""
    try:
        reader = open_reader(path, trusted=trusted)
    except H5ChunkError as error:
        nothing: tuple[int, ...] = ()
        return {
            "num_samples": nothing,
            "fields": (),
            "class_names": (),
            "chunk_samples": nothing,
            "is_shuffled": False,
            "why_not": str(error),
        }
    each = getattr(reader, "readers", (reader,))
    return {
        "num_samples": tuple(one.num_samples for one in each),
        "fields": tuple(_field(reader, name) for name in reader.fields),
        "class_names": reader.header.class_names if reader.header else (),
        "chunk_samples": tuple(one.chunk_samples for one in each),
        "is_shuffled": bool(reader.header and reader.header.shuffled),
        "why_not": "",
    }


def _field(reader: H5Reader, name: str) -> str:
    field = reader.fields[name]
    shape = " x ".join(map(str, field.sample_shape))
    kind = str(field.dtype) if isinstance(field, Field) else "sparse row of"
    return f"{name} ({f'{kind} {shape}'.strip()})"
