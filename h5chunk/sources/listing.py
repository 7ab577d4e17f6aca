"""List the images of a folder or an archive in order, with their classes and splits.

Knows names only; opens no image. The order and the labels are those of torchvision's ImageFolder: classes sorted
by name, within a class the folders sorted by path, within a folder the files sorted by name.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from h5chunk.errors import SourceError, as_text, printable
from h5chunk.sources.container import Container, Folder, open_archive
from h5chunk.sources.splits import has_split_folders

EXTENSIONS = (b".jpg", b".jpeg", b".png", b".ppm", b".bmp", b".pgm", b".tif", b".tiff", b".webp")

Found = Callable[[int], None]  # told how many images were found so far


class Names:
    """Many byte strings in two blocks of memory, as a Python list would take five times as much.

    >>> names = Names([b"a/1.jpg", b"b/2.jpg"])
    >>> len(names), names[1]
    (2, b'b/2.jpg')
    """

    def __init__(self, names: Iterable[bytes]) -> None:
        blob, ends = bytearray(), array("q", [0])
        for name in names:
            blob += name
            ends.append(len(blob))
        self.blob = bytes(blob)
        self.offsets = np.frombuffer(ends, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> bytes:
        return self.blob[self.offsets[index] : self.offsets[index + 1]]

    def __iter__(self) -> Iterator[bytes]:
        return (self[i] for i in range(len(self)))


@dataclass
class Listing:
    """The samples of a source, without their pixels.

    Attributes
    ----------
    container : Container
        Gets the bytes of sample ``i``, called ``names[i]``.
    names : Names
        Paths below the source, with slashes, as bytes.
    columns : dict of str to (num_samples,) array
        ``labels`` int64 if there are classes; ``split`` if there are splits; further columns of a manifest.
    class_names : list of str
        ``class_names[label]``; empty if there are no classes.
    ignored : list of str
        What lies in the source and is not packed, for people to read.
    notes : list of str
        What else they should know.
    """

    container: Container
    names: Names
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    class_names: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass
class Directory:
    """Files of one folder: their names, and their numbers in the archive (empty for a folder on disk).

    ``others`` counts files that are not called like images; ``other`` is one of them.
    """

    files: list[bytes] = field(default_factory=list)
    members: array[int] = field(default_factory=lambda: array("q"))
    others: int = 0
    other: bytes = b""

    def pass_over(self, name: bytes) -> None:
        """Count a file whose name has no suffix of an image."""
        self.others += 1
        self.other = min(self.other or name, name)


def list_images(source: str | os.PathLike[str], found: Found | None = None, *, split_folders: str = "auto") -> Listing:
    """List the images of a folder, a .zip or a .tar, with labels if they lie in one folder per class.

    Where the top folders are splits (`h5chunk.sources.splits`), classes are the folders in those, the same for all
    splits, and the column ``split`` has the name of the top folder.

    Parameters
    ----------
    source : path
    found : callable, optional
        Called now and then with the number of images found so far.
    split_folders : {"auto", "yes", "no"}
        Whether the top folders are splits; ``auto``: as their names say.

    Raises
    ------
    SourceError
        The source is missing, unreadable or holds no images, a class has none, or splits cannot be told from classes.
    """
    path = Path(source)
    found = found or (lambda count: None)
    check_source(path)
    found(0)
    if path.is_dir():
        container: Container = Folder(path)
        directories = scan_folder(os.fsencode(path), found)
    else:
        container, members = open_archive(path)
        directories = _group(members, found)
    listing = _arrange(printable(path), directories, container, split_folders)
    found(len(listing.names))
    return listing


def check_source(path: Path) -> None:
    """Raise SourceError unless there is something at ``path``."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        raise SourceError(f"{printable(path)}: no such file or folder") from None
    except OSError as error:
        raise SourceError(f"{printable(path)}: cannot be read: {error.strerror}") from None
    except ValueError as error:  # a byte 0 in it
        raise SourceError(f"{printable(path)}: is no path: {error}") from None


def is_hidden(name: bytes) -> bool:
    """Whether a file or folder is one that systems leave behind (dot files, macOS's resource folder)."""
    return name.startswith(b".") or name == b"__MACOSX"


def scan_folder(root: bytes, found: Found) -> dict[bytes, Directory]:
    """Find image files below ``root``, by folder; links are followed, but not into a folder that contains the link.

    Whatever is called like an image and is no folder is taken for one, so that a broken link or a pipe is an error
    of that sample and not a sample that is missing.
    """
    directories: dict[bytes, Directory] = {}
    stack: list[tuple[bytes, tuple[tuple[int, int], ...]]] = [(b"", ())]  # folders, and those that each lies in
    count = 0
    while stack:
        relative, above = stack.pop()
        path = os.path.join(root, relative) if relative else root
        try:
            status = os.stat(path)
            here = status.st_dev, status.st_ino
            if here in above:
                continue
            directory = directories.setdefault(relative, Directory())
            with os.scandir(path) as entries:
                for entry in entries:
                    if is_hidden(entry.name):
                        continue
                    if _is_folder(entry):
                        stack.append((relative + b"/" + entry.name if relative else entry.name, (*above, here)))
                    elif entry.name.lower().endswith(EXTENSIONS):
                        directory.files.append(entry.name)
                        count += 1
                        if count % 4096 == 0:
                            found(count)
                    else:
                        directory.pass_over(entry.name)
        except OSError as error:
            raise SourceError(f"{printable(path)}: cannot be listed: {error.strerror}") from None
        found(count)
    return directories


def _is_folder(entry: os.DirEntry[bytes]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _group(members: Iterable[tuple[bytes, int]], found: Found) -> dict[bytes, Directory]:
    """Group the image members of an archive by folder; a folder that wraps all images is removed from their paths."""
    directories: dict[bytes, Directory] = {}
    folders: set[bytes] = set()
    passed_over = Directory()
    count = 0
    for name, member in members:
        parts = [part for part in name.split(b"/") if part not in (b"", b".")]
        if not parts or any(map(is_hidden, parts)):
            continue
        folders.add(b"/".join(parts if name.endswith(b"/") else parts[:-1]))
        if name.endswith(b"/"):
            continue
        if not parts[-1].lower().endswith(EXTENSIONS):
            passed_over.pass_over(parts[-1])
            continue
        directory = directories.setdefault(b"/".join(parts[:-1]), Directory())
        directory.files.append(parts[-1])
        directory.members.append(member)
        count += 1
        if count % 4096 == 0:
            found(count)
    tops = {name.partition(b"/")[0] for name in directories}
    if len(tops) == 1 and b"" not in directories:
        wrap = tops.pop() + b"/"
        directories = {name[len(wrap) :]: directory for name, directory in directories.items()}
        folders = {name[len(wrap) :] for name in folders if name.startswith(wrap)}
    grouped = {name: Directory() for name in folders} | directories
    first = next(iter(grouped.values()), passed_over)
    first.others, first.other = passed_over.others, passed_over.other
    return grouped


def _arrange(source: str, directories: dict[bytes, Directory], container: Container, split_folders: str) -> Listing:
    """Sort and label images as torchvision's ImageFolder would, split by split."""
    with_images = {name: directory for name, directory in directories.items() if directory.files}
    if not with_images:
        wanted = ", ".join(e.decode() for e in EXTENSIONS)
        raise SourceError(f"{source}: no images found; looked for {wanted} (any case) in it and the folders below")
    level = int(has_split_folders(source, with_images, split_folders))  # of class folders
    ignored = list(_others(directories))
    if level and (empty := sorted(_at(0, directories) - _at(0, with_images))):
        ignored.append(f"folders without images, which are taken for no splits: {', '.join(map(as_text, empty))}")
        directories = {name: each for name, each in directories.items() if name.split(b"/")[0] not in empty}
    classes = _find_classes(source, level, with_images, directories)
    depth = level + bool(classes)  # of the folders that samples lie in, at least
    kept = {name: directory for name, directory in with_images.items() if _depth(name) >= depth}
    if loose := {name: directory for name, directory in with_images.items() if name not in kept}:
        ignored.append(_describe_loose(loose, "class" if classes else "split"))
    members = array("q")
    listing = Listing(container, Names(_names(kept, depth, members)), ignored=ignored)
    container.select(np.frombuffer(members, dtype=np.int64))
    if classes:
        listing.columns["labels"] = _numbers(listing.names, level, classes)
        listing.class_names = [as_text(name) for name in classes]
    if len(classes) == 1:
        listing.notes.append(f"all images are of one class, {listing.class_names[0]!r}: are its folders the classes?")
    if level:
        _add_splits(listing, kept)
    return listing


def _depth(name: bytes) -> int:
    """Return the number of folders on the path of a folder, including itself."""
    return name.count(b"/") + 1 if name else 0


def _at(level: int, names: Iterable[bytes]) -> set[bytes]:
    """Return the names of folders at one level of some paths, counted from 0."""
    return {name.split(b"/")[level] for name in names if _depth(name) > level}


def _find_classes(source: str, level: int, with_images: Iterable[bytes], directories: Iterable[bytes]) -> list[bytes]:
    """The names of the class folders, which all must have images."""
    classes = sorted(_at(level, with_images))
    empty = sorted(_at(level, directories) - set(classes)) if classes else []
    if empty:
        raise SourceError(
            f"{source}: class folder {as_text(empty[0])!r} has no images ({len(empty)} such of "
            f"{len(empty) + len(classes)}): remove it, or put images in it"
        )
    return classes


def _describe_loose(directories: dict[bytes, Directory], what: str) -> str:
    count = sum(len(directory.files) for directory in directories.values())
    example = min(name + b"/" * bool(name) + min(directory.files) for name, directory in directories.items())
    return f"{count} images beside the {what} folders, which have no {what}, such as {as_text(example)}"


def _others(directories: dict[bytes, Directory]) -> Iterator[str]:
    if others := sum(directory.others for directory in directories.values()):
        other = as_text(next(directory.other for directory in directories.values() if directory.others))
        yield f"files whose names do not end like an image's: {others}, such as {other}"


def _names(directories: dict[bytes, Directory], depth: int, members: array[int]) -> Iterator[bytes]:
    """The paths of all images, by their first folders, then by folder, then by name; notes their members."""
    for name in sorted(directories, key=lambda name: (name.split(b"/")[:depth], name)):
        directory = directories[name]
        prefix = name + b"/" if name else b""
        if directory.members:  # of two members with one name, an archive means the later
            last = dict(sorted(zip(directory.files, directory.members, strict=True)))
            members.extend(last.values())
            yield from (prefix + file for file in last)
        else:
            yield from (prefix + file for file in sorted(directory.files))


def _numbers(names: Names, level: int, folders: list[bytes]) -> np.ndarray:
    """Return the number of the folder of each image at one level: (num_images,) int64."""
    number = {folder: number for number, folder in enumerate(folders)}
    return np.fromiter((number[name.split(b"/", level + 1)[level]] for name in names), np.int64, len(names))


def _add_splits(listing: Listing, directories: dict[bytes, Directory]) -> None:
    """Add the column ``split``, and say so, and which classes are not in all of the splits."""
    splits = sorted(_at(0, directories))
    numbers = _numbers(listing.names, 0, splits)
    listing.columns["split"] = np.array([as_text(split).encode() for split in splits])[numbers]
    counts = zip(splits, np.bincount(numbers).tolist(), strict=True)
    listing.notes.append(
        f"the top folders are splits: {', '.join(f'{as_text(split)} ({count:,})' for split, count in counts)}: the "
        "field 'split' says which each sample is of (--split-folders no makes classes of them)"
    )
    for split in splits:
        there = _at(1, (name for name in directories if name.partition(b"/")[0] == split))
        lacking = [name for name in listing.class_names if name not in {as_text(each) for each in there}]
        if lacking:
            listing.notes.append(
                f"{len(lacking):,} of {len(listing.class_names):,} classes have no images in split {as_text(split)!r}, "
                f"such as {lacking[0]}"
            )
