"""Whether images can be added to a file: what the file has, and how new samples fit into it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from h5chunk.errors import FileError, SourceError, printable
from h5chunk.sources.images import shape_text
from h5chunk.store.format import GROUP, checksums_of
from h5chunk.store.write.appended import OldDataset, OldFile
from h5chunk.store.write.journal import key_of
from h5chunk.tools.append.fields import Matched, fit_columns, match_classes
from h5chunk.tools.convert.images import IMAGES, Conversion

OPTIONS = ("size", "fit", "color", "layout", "animated")  # of decoding, as the file records them
TABLES = ("source_index", "source_names", "source_name_ends", "class_names")


class OldImages:
    """A file of images as convert wrote it.

    Parameters
    ----------
    old : OldFile

    Attributes
    ----------
    images : OldDataset
    sample_shape : tuple of int
    columns : dict of str to np.dtype
        Of all other fields.

    Raises
    ------
    FileError
        It is none, or has more in it.
    """

    def __init__(self, old: OldFile) -> None:
        self.old = old
        known = {*(f"{GROUP}/{name}" for name in TABLES), *old.fields}
        known |= {f"{GROUP}/checksums/{name}" for name in old.fields}
        old.check_known(lambda name: name in known)
        lacking = [name for name in (IMAGES, *(f"{GROUP}/{table}" for table in TABLES[:3])) if name not in old.datasets]
        if lacking or any(name not in old.options for name in OPTIONS):
            what = repr(lacking[0]) if lacking else "what its images were converted with"
            raise FileError(f"{old.shown}: lacks {what}: only what h5chunk convert made can be appended to")
        self.images = OldDataset(old, IMAGES)
        dataset, size = self.images.dataset, old.header.chunk_samples
        self.sample_shape: tuple[int, ...] = dataset.shape[1:]
        self.columns = {name: old.datasets[name].dtype for name in old.fields if name != IMAGES}
        odd = [name for name in self.columns if old.datasets[name].shape != (old.header.num_samples,)]
        whole = dataset.shape[0] == old.header.num_samples and dataset.chunks == (size, *self.sample_shape)
        if odd or not whole or dataset.dtype != np.uint8 or dataset.ndim != 4 or self.images.filtered:
            raise FileError(
                f"{old.shown}: its fields are not plain chunks of {size} whole samples, as h5chunk convert writes "
                "them: repack it (--compression none), or convert all sources together"
            )

    @property
    def num_samples(self) -> int:
        return self.old.header.num_samples

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the images."""
        shape = self.sample_shape[1:] if self.old.options["layout"] == "nchw" else self.sample_shape[:2]
        return int(shape[0]), int(shape[1])

    @property
    def split_folders(self) -> str:
        """Whether the top folders of the file's source were splits, for `h5chunk.sources.listing.list_images`."""
        return str(self.old.options.get("split_folders", "auto"))

    def image_options(self, fit: str | None) -> dict[str, Any]:
        """How new images are to be decoded, for `h5chunk.tools.convert.images.prepare`."""
        options = {name: self.old.options[name] for name in OPTIONS}
        return options | {"size": self.size, "fit": options["fit"] if fit is None else fit}

    def first_index(self) -> int:
        """The ``source_index`` of what is sample 0 of the new source."""
        index = self.old.table("source_index")
        return 0 if index is None else int(index.max()) + 1


@dataclass(frozen=True)
class Addition:
    """New samples, and how they fit.

    Attributes
    ----------
    before : OldImages
    job : Conversion
        Of the new samples alone; its order is that in which they come.
    columns : dict of str to (num_new,) array
        In the order of the source, as the file has them.
    classes : Matched
    fit : str
    """

    before: OldImages
    job: Conversion
    columns: dict[str, np.ndarray]
    classes: Matched
    fit: str

    def key(self) -> str:
        """What stands for all that decides the bytes of new chunks but the bytes of the samples."""
        old = self.before.old
        was = {"num_samples": old.header.num_samples, "chunk_samples": old.header.chunk_samples}
        return key_of({"append": was, "checksums": checksums_of(old.file), "source": self.job.key(1)})

    def come_again(self) -> list[str]:
        """What is to be said of new images with names that the file has, as if they had been appended before."""
        listing, old = self.job.listing, self.before.old
        ends, table = old.table("source_name_ends"), old.table("source_names")
        assert ends is not None and table is not None
        blob, new = table.tobytes(), {listing.names[i] for i in self.job.order}
        borders = [0, *ends.tolist()]
        again = {name for name in (blob[start:stop] for start, stop in pairwise(borders)) if name in new}
        if not again:
            return []
        return [
            f"{len(again):,} of {len(self.job.order):,} new names, such as {printable(min(again))}, were in the file "
            "before: if they are the same images, these come twice"
        ]

    @property
    def first_chunk(self) -> int:
        """The first one that has new samples."""
        return self.before.num_samples // self.before.old.header.chunk_samples

    @property
    def carried_bytes(self) -> int:
        """Of images in chunks before that."""
        size = self.before.old.header.chunk_samples
        return self.first_chunk * size * int(np.prod(self.before.sample_shape))


def plan_addition(before: OldImages, job: Conversion, fit: str, new_classes: bool, source: str) -> Addition:
    """Compare a listed source with the file.

    Raises
    ------
    SourceError
        They do not agree.
    """
    shown, listing = before.old.shown, job.listing
    if job.sample_shape != before.sample_shape:
        raise SourceError(
            f"{source}: its images are {shape_text(job.sample_shape)} but those in {shown} "
            f"{shape_text(before.sample_shape)}: images must be alike"
        )
    columns = fit_columns(before.columns, listing.columns, shown=shown, source=source)
    old_names = before.old.header.class_names
    if "labels" in columns and bool(old_names) != bool(listing.class_names):
        named, other = (shown, source) if old_names else (source, shown)
        raise SourceError(f"{source}: labels have names in {named} but are numbers in {other}: give both alike")
    classes = match_classes(old_names, listing.class_names, new_classes=new_classes, shown=shown, source=source)
    if listing.class_names:
        columns["labels"] = classes.relabel(columns["labels"])
    return Addition(before, job, columns, classes, fit)
