"""Match masks with images by name: ``images/1.jpg`` and ``masks/1.png`` are one sample.

The folders of images and masks are at the top, or in each split, as in ``train/images`` and ``train/masks``. They may
contain the same folders of splits and classes, as in ``images/cat/1.jpg`` and ``masks/cat/1.png``. A mask has the name
of its image, with any suffix, or that name followed by ``_mask``. Masks may also be in the same folder as their images,
as in ``cat/1.jpg`` and ``cat/1_mask.png`` or ``cat/1.seg.png``.
"""

from __future__ import annotations

import os
import posixpath
import re
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from h5chunk.errors import SourceError, as_text
from h5chunk.sample_source import WORD

MASKS = "masks"  # name of the field of masks from a folder with one of the `MASK_FOLDERS` names
IMAGE_FOLDERS = (b"images", b"image", b"imgs", b"img", b"jpegimages")
MASK_FOLDERS = (
    b"masks", b"mask", b"annotations", b"labels", b"gt", b"ground_truth", b"groundtruth", b"segmentation",
    b"segmentations", b"segmentationclass",
)  # fmt: skip
MASK_NAME = re.compile(rb"(.+)[._-](?:mask|segmentation|seg|label|labels|gt|annotation)(?:[_-]?[0-9]+)?")
MASK_WORDS = {
    "mask", "masks", "label", "labels", "annotation", "annotations", "annot", "segmentation", "segmentations", "gt",
    "groundtruth", "truth", "trimap", "trimaps",
}  # fmt: skip
LOSSY = (b".jpg", b".jpeg")


@dataclass
class Directory:
    """The images of a folder: their names, and their indices in the archive (-1 if they are not in an archive)."""

    files: list[bytes] = field(default_factory=list)
    members: array[int] = field(default_factory=lambda: array("q"))


def has_mask_name(folder: bytes) -> bool:
    """Return whether the name of a folder contains a word for masks, as in ``train_masks`` or ``gtFine``."""
    return not MASK_WORDS.isdisjoint(word.lower() for word in WORD.findall(as_text(folder)))


def stem_of(file: bytes, folder: bytes, is_mask: bool) -> bytes:
    """Return the name that a file shares with its mask: without suffix, ``_mask``, and the name of its folder."""
    stem = file.rpartition(b".")[0]
    stem = stem.partition(b"_" + folder)[0] or stem
    match = MASK_NAME.fullmatch(stem) if is_mask else None
    return match[1] if match else stem


def just_count(stems: Collection[bytes]) -> bool:
    """Return whether the names of files are consecutive numbers, perhaps with the same words around them.

    >>> just_count([b"cat_1", b"cat_3", b"cat_2"]), just_count([b"c21", b"c3", b"c94"]), just_count([b"a", b"b"])
    (True, False, False)
    """
    found = [re.fullmatch(rb"(\D*)(\d+)(\D*)", posixpath.basename(stem)) for stem in stems]
    values = sorted(int(match[2]) for match in found if match)
    return len(values) == len(found) and values[-1] - values[0] < 2 * len(values)


def depth_of(name: bytes) -> int:
    """Return the number of folders in the path of a folder, including itself; 0 for the root."""
    return name.count(b"/") + 1 if name else 0


def at_level(level: int, names: Iterable[bytes]) -> set[bytes]:
    """Return the distinct folder names at a level, counted from 0, of the paths ``names`` of folders."""
    return {name.split(b"/")[level] for name in names if depth_of(name) > level}


@dataclass(frozen=True)
class Pairs:
    """A folder of images and the folders of their masks, which have the same parent folder."""

    level: int  # 0: at the top; 1: in each split
    images: bytes  # name of the folder of images
    masks: Mapping[str, bytes]  # name of the folder of masks, by field

    def contain(self, name: bytes) -> bool:
        """Return whether the folder with path ``name`` is one of the paired folders, or inside one."""
        return bool(at_level(self.level, [name]) & {self.images, *self.masks.values()})

    def directories_in(self, directories: Mapping[bytes, Directory], folder: bytes) -> dict[bytes, Directory]:
        """Return the directories in a paired folder, by their paths without the name of that folder.

        With the folder ``images``, ``train/images/cat`` becomes ``train/cat``; `full_path` undoes this.
        """
        return {
            b"/".join(parts[: self.level] + parts[self.level + 1 :]): directory
            for parts, directory in ((name.split(b"/"), directory) for name, directory in directories.items())
            if parts[self.level : self.level + 1] == [folder]
        }

    def full_path(self, path: bytes, folder: bytes) -> bytes:
        """Put the name of a paired folder, which `directories_in` removed, back into a path."""
        parts = path.split(b"/")
        return b"/".join([*parts[: self.level], folder, *parts[self.level :]])

    def match(
        self, names: Iterable[bytes], directories: Mapping[bytes, Directory], folder: bytes
    ) -> tuple[list[bytes], list[int], list[str]]:
        """Return the paths of the masks of all images, their indices in the archive, and the masks without an image.

        ``names`` are the paths of the images, and ``directories`` those in the ``folder`` of masks, both as
        `directories_in` returns them. The path is empty if an image has no mask. Raises SourceError if two images match
        a mask, or two masks match an image.
        """
        masks: dict[bytes, tuple[bytes, int]] = {}
        for name, directory in directories.items():
            for file, number in zip(directory.files, directory.members, strict=True):
                path = posixpath.join(name, file)
                first, _ = masks.setdefault(posixpath.splitext(path)[0], (path, number))
                if first != path:
                    raise self._ambiguous(folder, first, path)
        image_of_mask: dict[bytes, bytes] = {}  # image of each mask
        paths, numbers = [], []
        for name in names:
            stem = posixpath.splitext(name)[0]
            mask, number = masks.get(stem) or masks.get(stem + b"_mask") or (b"", -1)
            if mask and image_of_mask.setdefault(mask, name) != name:
                raise self._ambiguous(self.images, image_of_mask[mask], name)
            paths.append(self.full_path(mask, folder) if mask else b"")
            numbers.append(number)
        return paths, numbers, sorted(as_text(mask) for mask, _ in masks.values() if mask not in image_of_mask)

    def _ambiguous(self, folder: bytes, first: bytes, second: bytes) -> SourceError:
        first, second = (self.full_path(path, folder) for path in (first, second))
        return SourceError(
            f"{as_text(first)} and {as_text(second)} would be paired with the same file, so the masks are ambiguous: "
            "rename one of them"
        )

    def note(self) -> str:
        """Describe the pairs for the report."""
        masks = ", ".join(f"the masks in {as_text(folder)!r} (field {name!r})" for name, folder in self.masks.items())
        return f"images in {as_text(self.images)!r} are paired by name with {masks}"


def find_pairs(source: str, folders: Collection[bytes], requested: Sequence[str] | None) -> Pairs | None:
    """Find a folder of images beside folders of masks.

    ``folders`` are the paths of all folders with images, and ``requested`` the names of the folders of masks (None: a
    usual name). Returns None if no masks are requested or found. Raises SourceError if the folders are ambiguous, or
    requested folders are missing.
    """
    is_usual = requested is None or list(requested) == [MASKS]
    for level in (0, 1):
        names = sorted(at_level(level, folders))
        if is_usual:
            masks = dict.fromkeys([MASKS], next((name for name in names if name.lower() in MASK_FOLDERS), b""))
            masks = {name: folder for name, folder in masks.items() if folder}
            images = [name for name in names if name.lower() in IMAGE_FOLDERS]
        else:
            masks = {name: os.fsencode(name) for name in requested or () if os.fsencode(name) in names}
            images = [name for name in names if name not in masks.values()]
        if not masks or not images or not (is_usual or len(masks) == len(requested or ())):
            continue
        if len(images) > 1 or len(names) > 1 + len(masks):
            listed = ", ".join(repr(as_text(name)) for name in names[:8])
            raise SourceError(
                f"{source}: contains the folders {listed}: name all folders of masks, so that one folder of images "
                "remains (--mask-column NAME[,NAME]), or list the pairs in a manifest (--manifest)"
            )
        return Pairs(level, images[0], masks)
    if requested:
        listed = ", ".join(repr(as_text(name)) for name in sorted(at_level(0, folders))[:8]) or "none"
        raise SourceError(
            f"{source}: has no folder {requested[0]!r} of masks beside a folder of images (folders: {listed})"
        )
    return None


def take_masks(source: str, directories: Mapping[bytes, Directory]) -> tuple[dict[bytes, Directory], dict[bytes, Any]]:
    """Separate masks, such as ``1_mask.png``, from the images beside them, such as ``1.jpg``.

    Returns the images, and a dict with the path and the index in the archive of each mask, by the path of its image
    without suffix. If less than half of the images have a mask, all files count as images. Raises SourceError if an
    image has several masks.
    """
    images: dict[bytes, Directory] = {}
    masks: dict[bytes, tuple[bytes, int]] = {}
    for folder, directory in directories.items():
        images[folder] = rest = Directory()
        stems = {posixpath.splitext(file)[0] for file in directory.files}
        for file, number in zip(directory.files, directory.members, strict=True):
            path, match = posixpath.join(folder, file), MASK_NAME.fullmatch(posixpath.splitext(file)[0])
            if match is None or match[1] not in stems:
                rest.files.append(file)
                rest.members.append(number)
                continue
            image = posixpath.join(folder, match[1])
            if masks.setdefault(image, (path, number))[0] != path:
                raise SourceError(
                    f"{source}: {as_text(masks[image][0])} and {as_text(path)} look like two masks of one image: merge "
                    "them, or list images and masks in a manifest (--manifest)"
                )
    is_usual = 2 * len(masks) >= sum(len(directory.files) for directory in images.values())
    return (images, masks) if masks and is_usual else (dict(directories), {})
