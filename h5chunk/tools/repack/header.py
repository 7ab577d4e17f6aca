"""Plan and write the header of a repacked file: the group ``/h5chunk``, new or updated.

An h5chunk file keeps its group. Another HDF5 file gets one if it is shuffled, or if a window or cache is recommended.
Its fields may then lie in groups; ``checksums`` names them by their paths.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import h5py
import numpy as np

from h5chunk.errors import FileError, OptionError, printable
from h5chunk.plan.cache import CacheSettings
from h5chunk.plan.csr import CsrLayout
from h5chunk.plan.layout import Layout
from h5chunk.store.format.header import Header, header_attributes
from h5chunk.store.format.spec import GROUP, ArraySpec, create_dataset, make_group
from h5chunk.store.rewrite.survey import Survey
from h5chunk.tools.repack.fields import Samples
from h5chunk.tools.repack.options import RepackOptions

SOURCE_INDEX = f"{GROUP}/source_index"
CHECKSUMS = f"{GROUP}/checksums"


@dataclass
class NewHeader:
    """The group ``/h5chunk`` of the new file.

    Attributes
    ----------
    attributes : dict
        Those that are set; others of the old group stay.
    tables : dict of str to (shape, dtype)
        Datasets below the group that are new.
    """

    attributes: dict[str, Any]
    tables: dict[str, tuple[tuple[int, ...], np.dtype]] = field(default_factory=dict)

    def add_checksums(self, name: str, num_chunks: int) -> None:
        """Reserve the table of a dataset's checksums."""
        self.tables[f"checksums/{name}"] = ((num_chunks,), np.dtype(np.uint32))

    def write(self, file: h5py.File) -> Mapping[str, h5py.Dataset]:
        """Create or update the group; return its new datasets by path, to be filled."""
        group = make_group(file, GROUP)
        for name, value in self.attributes.items():
            group.attrs[name] = np.bytes_(value.encode()) if isinstance(value, str) else value
        make_group(group, "checksums")
        made = {}
        for name, (shape, dtype) in self.tables.items():
            parent, _, last = name.rpartition("/")
            holder = make_group(group, parent) if parent else group
            made[f"{GROUP}/{name}"] = create_dataset(holder, last, ArraySpec(shape, dtype))
        return made


def plan_header(
    header: Header | None, survey: Survey, samples: Samples, options: RepackOptions, shown: str
) -> NewHeader | None:
    """Plan the group ``/h5chunk`` of the new file; None if it needs none.

    Raises
    ------
    OptionError
        It is needed but cannot be.
    """
    wanted = options.shuffle or options.window_chunks is not None or options.cache is not None
    if header is None and not wanted:
        return None
    what = "shuffle" if options.shuffle else "window_chunks" if options.window_chunks is not None else "cache"
    if samples.anndata:
        raise OptionError(
            f"{shown}: {what} would add the group /{GROUP}, but readers of AnnData's files refuse groups that they do "
            "not know: leave it out"
        )
    layout = samples.layout
    if layout is None:
        raise OptionError(f"{shown}: {what} was given, but no dataset in it counts samples along its first axis")
    if len(samples.layouts) > 1:
        lengths = ", ".join(map(str, sorted(samples.layouts)))
        raise OptionError(f"{shown}: {what} was given, but the fields differ in length ({lengths}): name those of one")
    if header is None and any(node.path == GROUP.encode() for node in survey.nodes):
        raise FileError(f"{shown}: has a group /{GROUP} that h5chunk did not write: rename it")
    new = NewHeader(_attributes(header, layout, options))
    if options.shuffle and SOURCE_INDEX.encode() not in survey.datasets:  # repack gives headers without
        new.tables["source_index"] = ((samples.num_samples,), np.dtype(np.int64))
    return new


def _attributes(header: Header | None, layout: Layout | CsrLayout, options: RepackOptions) -> dict[str, Any]:
    layout = layout if options.window_chunks is None else replace(layout, window_chunks=options.window_chunks)
    cache: CacheSettings = layout.cache if options.cache is None else options.cache
    numbers: dict[str, Any] = {"chunk_samples": layout.chunk_samples, "window_chunks": layout.window_chunks}
    if header is None:
        numbers["num_samples"] = layout.num_rows if isinstance(layout, CsrLayout) else layout.num_samples
    if header is None or options.shuffle:
        numbers |= {"seed": options.seed if options.shuffle else 0, "shuffled": options.shuffle}
    before = header.options if header is not None else {}
    return header_attributes(cache=cache, options={**before, "repack": options.recorded()}, **numbers)


def checksum_name(path: bytes, shown: str) -> str:
    """Return the name of a dataset in the table of checksums.

    Raises
    ------
    FileError
        It is not UTF-8.
    """
    try:
        return path.decode()
    except UnicodeDecodeError:
        raise FileError(
            f"{shown}: the name {printable(path)!r} is not UTF-8, and checksums are kept by name: rename it"
        ) from None
