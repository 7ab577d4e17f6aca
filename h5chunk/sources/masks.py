"""Find which images of a sample are masks: their values are numbers of classes, which must not become colours.

Names and pixels are evidence. A field beside an image is a mask if it has one value per pixel (palette indices, grey)
and an image in colour precedes it, or if it has few different values; and also if its name says so. What remains
unclear is an error, if pixels would be mixed by resizing.
"""

from __future__ import annotations

import io
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from PIL import Image

from h5chunk.errors import SourceError, printable
from h5chunk.sample_source import shape_text
from h5chunk.sources.decode import FORMATS, NUMBERS, are_equal

MASK_FIELDS = ("mask", "masks")  # names of images that are masks, whatever their pixels are
NAMED = re.compile(
    r"(?<![a-z])(mask|label|label_?map|annotation|annot|seg|segm|segmentation|gt|ground_?truth|target|trimap|panoptic)"
    r"s?(?![a-z])",
    re.IGNORECASE,
)
EIGHT_BITS = ("1", "L", "P")  # modes of one channel that are also images, if they aren't masks
FEW = 64  # different values of a mask: photographs have more
AS_PICTURES = "pass --mask-column none (in Python, mask_column=())"


class Seen(NamedTuple):
    """Properties of one image that tell masks from pictures."""

    mode: str
    size: tuple[int, ...]  # height and width
    has_equal_channels: bool  # or only one
    has_few_values: bool


def may_have_masks(names: Collection[str]) -> bool:
    """Return whether images of these fields may be masks, besides those of `MASK_FIELDS`."""
    others = [name for name in names if name not in MASK_FIELDS]
    return len(others) > 1 or any(map(NAMED.search, others))


def look_at(image: bytes | Image.Image) -> Seen:
    """Decode an image to see whether it may be a mask. Pillow raises many types of errors if it is damaged."""
    opened = Image.open(io.BytesIO(image), formats=FORMATS) if isinstance(image, bytes) else image
    opened.load()
    few = None
    with suppress(ValueError):  # a mode that Pillow does not count
        few = opened.getcolors(FEW)
    is_equal = opened.mode in NUMBERS or are_equal(opened.split()[: 3 if opened.mode != "LA" else 1])
    return Seen(opened.mode, (opened.height, opened.width), is_equal, few is not None)


def find_masks(samples: Sequence[Mapping[str, Seen]], is_resized: bool) -> tuple[tuple[str, ...], list[str]]:
    """Return the fields that are masks, and notes for the report, from some ``samples`` with the same fields.

    Raises SourceError, which tells both ways, if resizing (``is_resized``) would mix the colours of what may be masks,
    or if what looks like a mask does not have the size of its image.
    """
    seen = {name: [sample[name] for sample in samples] for name in samples[0]}
    in_color = [name for name, images in seen.items() if not all(image.mode in NUMBERS for image in images)]
    unnamed = [name for name in seen if not NAMED.search(name)]
    main = next((name for name in unnamed if name in in_color), next(iter(unnamed), None))
    masks, passed_main = [], False
    for name, images in seen.items():
        passed_main |= name == main
        if name in MASK_FIELDS:
            masks.append(name)
            continue
        may_have_classes = is_few = all(image.has_few_values for image in images)
        is_few &= main is None or not all(image.has_few_values for image in seen[main])
        is_equal = all(image.has_equal_channels for image in images)
        is_mask = is_few and (name not in in_color or (is_equal and main is None))
        if name != main and main is not None:
            is_mask |= all(image.mode in EIGHT_BITS for image in images) and main in in_color and passed_main
            is_mask |= name not in unnamed and is_equal
        if name == main or (main is None and not is_mask):
            continue
        if main is not None and not is_mask and is_resized and (may_have_classes or name not in unnamed):
            raise SourceError(
                f"{printable(name)!r} may be a mask, whose classes resizing or grey would mix: name the field "
                f"(--mask-column {printable(name)}), after replacing each colour by the number of its class, or, if it "
                "is a picture, " + AS_PICTURES
            )
        if is_mask and main is not None and (differing := _difference(samples, name, main)):
            if not (is_few or name not in unnamed or images[0].mode == "P"):
                continue  # a picture of its own size
            raise SourceError(
                f"{printable(name)!r} looks like a mask, but is {shape_text(differing[0])} where {printable(main)!r} "
                f"is {shape_text(differing[1])}: give it the size of its image in the source, or, if it is a picture, "
                + AS_PICTURES
            )
        masks += [name] if is_mask else []
    found = [repr(printable(name)) for name in masks if name not in MASK_FIELDS]
    note = f"stored as masks (mask_column), with one unchanged value per pixel: {', '.join(found)}; if these are "
    note += f"pictures, {AS_PICTURES}"
    return tuple(masks), [note] if found else []


def _difference(
    samples: Sequence[Mapping[str, Seen]], name: str, main: str
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the sizes of an image and its mask that differ, apart from a rotation; None if there are none."""
    sizes = ((sample[name].size, sample[main].size) for sample in samples)
    return next((pair for pair in sizes if sorted(pair[0]) != sorted(pair[1])), None)
