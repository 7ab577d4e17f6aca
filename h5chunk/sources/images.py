"""Images in a folder or an archive: a list of names, a container of their bytes, and the options of decoding."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import PIL

from h5chunk.errors import as_text
from h5chunk.source import OpenContext
from h5chunk.sources.kinds import ImageOptions, ImageSourceOptions
from h5chunk.sources.listing import Listing, list_images
from h5chunk.sources.manifest import list_manifest
from h5chunk.sources.recognise import is_path, may_be_archive
from h5chunk.sources.samples import IMAGES, LABELS, Samples


class ImageSource(Samples):
    """Images of one shape, which is known once `settle` was called; ``split_folders`` is for the file's header."""

    kind = IMAGES
    noun = "images"
    Options = ImageSourceOptions

    def __init__(self, listing: Listing, decoding: ImageOptions, split_folders: str = "auto") -> None:
        self.listing, self.decoding = listing, decoding
        self.names, self.columns = listing.names, listing.columns
        self.categories = {LABELS: listing.class_names} if listing.class_names else {}
        self.options = decoding.recorded() | {"split_folders": split_folders}
        self.ignored, self.notes = listing.ignored, listing.notes

    @classmethod
    def recognises(cls, source: Any, head: bytes) -> bool:
        """Return whether a source is the path of a folder or an archive, or of nothing, of which its error tells."""
        return is_path(source) and (not os.path.isfile(source) or may_be_archive(source, head))

    @classmethod
    def open(cls, source: Any, options: ImageSourceOptions, context: OpenContext) -> ImageSource:
        """List the images, and take the shape of the first one."""
        splits = options.split_folders
        if options.manifest is not None:
            listing = list_manifest(options.manifest, source, context.report_found)
        else:
            listing = list_images(source, context.report_found, split_folders=splits)
            splits = "yes" if "split" in listing.columns else splits
        decoding = ImageOptions(**{name: getattr(options, name) for name in ImageOptions.names()})
        images = cls(listing, decoding, splits)
        images.settle(context.skips_bad_samples)
        return images

    def __len__(self) -> int:
        return len(self.listing.names)

    def name(self, index: int) -> str:
        return as_text(self.listing.names[index])

    def stamp(self, index: int) -> tuple[int, ...]:
        return self.listing.container.stamp(index, self.listing.names[index])

    def identity(self) -> tuple[dict[str, Any], tuple[bytes, ...]]:
        names = self.listing.names
        facts = {"decoder": PIL.__version__, "options": vars(self.decoding)}
        return facts, (names.blob, names.offsets.tobytes())

    def values(self, index: int) -> Mapping[str, bytes]:
        return {IMAGES: self.listing.container.read(index, self.listing.names[index])}
