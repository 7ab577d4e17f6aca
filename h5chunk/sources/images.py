"""Read the images of a folder or an archive, with their labels, masks and other columns."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import PIL

from h5chunk.errors import SampleError, SourceError, as_text, printable
from h5chunk.sample_source import OpenContext
from h5chunk.sources.foreign import format_of
from h5chunk.sources.kinds import CellOptions, ImageOptions, ImageSourceOptions
from h5chunk.sources.listing import Listing, ReportFound, list_tree, read_tree
from h5chunk.sources.manifest import list_manifest, list_metadata
from h5chunk.sources.options import flag_of
from h5chunk.sources.pairs import LOSSY
from h5chunk.sources.recognise import ARCHIVES, has_suffix, is_path, may_be_archive
from h5chunk.sources.samples import IMAGES, LABELS, Samples


def list_source(
    source: str | os.PathLike[str],
    options: ImageSourceOptions,
    report_found: ReportFound = lambda count: None,
    skips: bool = False,
) -> Listing:
    """List the images of a source by a manifest, by Hugging Face's metadata in the source, or else by its folders.

    With ``skips``, samples with missing files or empty cells are unusable, rather than errors. Raises SourceError if
    the source cannot be listed, or has no table to which an option applies.
    """
    if options.manifest is not None:
        return list_manifest(source, options, report_found, skips)
    tree = read_tree(source, report_found)
    listing = list_metadata(tree, options, skips) if tree.tables else None
    given = [name for name in ("columns", *CellOptions.names()) if name in options.non_defaults()]
    if listing is None and given:
        raise SourceError(
            f"{tree.label}: has neither a manifest nor a metadata.csv to which {flag_of(given[0])} applies: leave out "
            "the option, or pass the table (--manifest)"
        )
    return listing or list_tree(tree, options.split_folders, options.mask_column)


class ImageSource(Samples):
    """Images of a folder or an archive. ``options`` are recorded in the output, besides those of ``decoding``."""

    kind = IMAGES
    noun = "images"
    Options = ImageSourceOptions

    def __init__(self, listing: Listing, decoding: ImageOptions, **options: Any) -> None:
        self.listing, self.decoding = listing, decoding
        self.names, self.columns = listing.names, listing.columns
        self.categories = {LABELS: listing.class_names} if listing.class_names else {}
        self.options = decoding.recorded() | {"split_folders": "auto"} | options
        if listing.others:
            self.options["fields"] = [IMAGES, *listing.others, *([LABELS] if LABELS in listing.columns else [])]
        self.ignored, self.notes = listing.ignored, listing.notes

    @classmethod
    def recognises(cls, source: Any, head: bytes) -> bool:
        """Return whether a source is a folder, an archive, or a missing path, for which `open` raises an error."""
        if not is_path(source) or not os.path.isfile(source):
            return is_path(source)
        is_other = format_of(os.fspath(source)) is not None  # many formats, such as .xlsx, are packed as a zip
        return has_suffix(source, *ARCHIVES) or (may_be_archive(source, head) and not is_other)

    @classmethod
    def open(cls, source: Any, options: ImageSourceOptions, context: OpenContext) -> ImageSource:
        """List the images, and decode the first one to determine their shape."""
        listing = list_source(source, options, context.report_found, context.skips_bad_samples)
        recorded: dict[str, Any] = {"split_folders": options.split_folders}
        if options.manifest is None and "split" in listing.columns:
            recorded["split_folders"] = "yes"
        for name in ("columns", *CellOptions.names()):
            if name in options.non_defaults():
                recorded[name] = getattr(options, name)
        decoding = ImageOptions(**{name: getattr(options, name) for name in ImageOptions.names()})
        images = cls(listing, decoding, **recorded)
        images.check_parts(context.skips_bad_samples)
        images.find_fields(context.skips_bad_samples)
        return images

    def check_parts(self, skip_bad: bool) -> None:
        """Raise SourceError if an image has no mask, unless ``skip_bad``; add a note if masks are JPEG files."""
        for name, paths in self.listing.others.items():
            missing = np.flatnonzero(np.diff(paths.offsets) == 0)
            if len(missing) and not skip_bad:
                example = printable(self.listing.names[missing[0]])
                raise SourceError(
                    f"{len(missing):,} of {len(self):,} images, such as {example}, have no counterpart in "
                    f"{name!r}: add the missing images, skip such samples (--on-error skip), or list the pairs in a "
                    "manifest (--manifest)"
                )
            if name in self.masks and any(path.lower().endswith(LOSSY) for path in paths):
                self.listing.notes.append(
                    f"{name} are JPEG files, which do not preserve class numbers exactly: save masks as PNG"
                )

    def __len__(self) -> int:
        return len(self.listing.names)

    def name(self, index: int) -> str:
        return as_text(self.listing.names[index])

    def part_name(self, index: int, name: str) -> str:
        return printable(self.listing.others[name][index])

    def stamp(self, index: int) -> tuple[int, ...]:
        container = self.listing.container
        stamp = container.stamp(index, self.listing.names[index])
        for _, number, path in self.listing.parts(index):
            stamp += container.stamp(number, path)
        return stamp

    def identity(self) -> tuple[dict[str, Any], tuple[bytes, ...]]:
        lists = {IMAGES: self.listing.names, **self.listing.others}
        facts = {"decoder": PIL.__version__, "options": vars(self.decoding), "fields": list(lists)}
        return facts, tuple(blob for names in lists.values() for blob in (names.blob, names.offsets.tobytes()))

    def values(self, index: int) -> Mapping[str, bytes]:
        container = self.listing.container
        if index in self.listing.unusable:
            raise SampleError(self.listing.unusable[index])
        values = {IMAGES: container.read(index, self.listing.names[index])}
        for name, number, path in self.listing.parts(index):
            if not path:
                raise SampleError(f"has no image in {name!r}")
            try:
                values[name] = container.read(number, path)
            except SampleError as error:
                raise SampleError(f"{printable(path)} {error}") from None
        return values
