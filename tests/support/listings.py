"""List the images of a source with the options of images."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from h5chunk.sources.images import list_source
from h5chunk.sources.kinds import ImageSourceOptions
from h5chunk.sources.listing import Listing


def list_images(source: Path, report_found: Callable[[int], None] = lambda count: None, **options: Any) -> Listing:
    return list_source(source, ImageSourceOptions(**options), report_found)
