"""List the images of a folder or an archive in order, with their classes and splits.

No image is opened. The order and the labels are those of torchvision's ImageFolder, except that .gif files, which
ImageFolder ignores, are also listed: classes are sorted by name, the folders of a class by path, and the files of a
folder by name.

The top folders may be splits rather than classes, as in ``train/cat/1.png`` and ``val/cat/2.png``. Their names
determine whether they are; ambiguous names raise an error.
"""

from __future__ import annotations

import os
import posixpath
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from heapq import nsmallest
from pathlib import Path
from typing import Any

import numpy as np

from h5chunk.errors import SourceError, as_text, count_text, names_text, printable
from h5chunk.sample_source import Names, split_of
from h5chunk.sources import foreign
from h5chunk.sources.container import Container, Folder, open_archive
from h5chunk.sources.pairs import (
    IMAGE_FOLDERS,
    MASK_FOLDERS,
    MASKS,
    Directory,
    at_level,
    depth_of,
    find_pairs,
    has_mask_name,
    just_count,
    stem_of,
    take_masks,
)
from h5chunk.sources.recognise import EXTENSIONS, SYSTEM
from h5chunk.urls import hint_for_url

MAX_PAIRED = 8  # largest number of folders that are compared by the names of their files
MAX_STEMS = 1000  # number of names that are compared
MIN_PAIRS = 3  # smallest number of names that folders must share
MANIFESTS = (b".csv", b".tsv", b".jsonl")  # suffixes of tables that may list images
TABLES = (b"metadata.csv", b"metadata.jsonl")  # metadata of Hugging Face's imagefolder

ReportFound = Callable[[int], None]  # called with the number of images found so far


@dataclass
class Listing:
    """The paths of the images of a source, with their labels and other columns, but without pixels."""

    container: Container
    names: Names  # path of the main image of each sample, relative to the source, with slashes
    others: dict[str, Names] = field(default_factory=dict)  # paths of masks and other images by field; b"" if missing
    columns: dict[str, np.ndarray] = field(default_factory=dict)  # (num_samples,): labels, split, and further columns
    class_names: list[str] = field(default_factory=list)
    unusable: dict[int, str] = field(default_factory=dict)  # why a sample cannot be used, by its index
    ignored: list[str] = field(default_factory=list)  # descriptions of files that are left out
    notes: list[str] = field(default_factory=list)

    def select(self, *members: Any) -> None:
        """Set the archive members of all images: (num_samples,) integers for ``names``, then for each of ``others``."""
        self.container.select(np.concatenate([np.asarray(numbers, np.int64) for numbers in members]))

    def parts(self, index: int) -> Iterator[tuple[str, int, bytes]]:
        """Yield (field, index in the container, path) for each other image of sample ``index``, such as its mask."""
        for i, (name, paths) in enumerate(self.others.items(), 1):
            yield name, i * len(self.names) + index, paths[index]


@dataclass
class Tree:
    """The contents of a folder or an archive."""

    label: str  # its path, for messages
    container: Container
    directories: dict[bytes, Directory]  # its folders, by path
    tables: list[tuple[bytes, int]]  # path, and number in the archive, of each table of metadata
    ignored: list[str]  # descriptions of files that are left out, for the report
    others: list[bytes] = field(default_factory=list)  # an example of each kind of file that is left out
    notes: list[str] = field(default_factory=list)


def read_tree(source: str | os.PathLike[str], report_found: ReportFound) -> Tree:
    """List all files of a folder, a .zip or a .tar. Raises SourceError if it cannot be read."""
    path = Path(source)
    check_source(path)
    report_found(0)
    if path.is_dir():
        container: Container = Folder(path)
        files = _walk(os.fsencode(path))
    else:
        container, members = open_archive(path)
        files = _split_paths(members)
    tree = Tree(printable(path), container, {}, [], [])
    _add_files(tree, files, report_found)
    if not path.is_dir():
        _strip_top(tree)
    report_found(sum(len(directory.files) for directory in tree.directories.values()))
    return tree


def _strip_top(tree: Tree) -> None:
    """Leave out the folder that contains all images of an archive; also one in it, if that contains only splits."""
    is_first = True
    while True:
        tops = {name.partition(b"/")[0] for name, directory in tree.directories.items() if directory.files}
        top = b"/".join([*tops, b""])
        inside = {name[len(top) :]: found for name, found in tree.directories.items() if (name + b"/").startswith(top)}
        names = at_level(0, (name for name, directory in inside.items() if directory.files))
        if len(tops) != 1 or b"" in tops or not (is_first or (names and all(split_of(as_text(n))[1] for n in names))):
            return
        tree.directories, is_first = inside, False
        tree.tables = [(name[len(top) :], number) for name, number in tree.tables if name.startswith(top)]


def list_tree(tree: Tree, split_folders: str, masks: Sequence[str] | None) -> Listing:
    """List the images of a tree as samples, with labels if there is one folder per class, and with their masks.

    ``split_folders`` tells whether the top folders are splits: yes, no, or auto, which decides by their names.
    ``masks`` are the names of the folders of masks beside the folder of images; None uses the usual names.
    """
    with_images = [name for name, directory in tree.directories.items() if directory.files]
    pairs = find_pairs(tree.label, with_images, masks)
    if pairs is None:
        return _list_one_folder(tree, split_folders)
    directories, mask_members = tree.directories, []
    listing, members = sort_and_label(
        replace(tree, directories=pairs.directories_in(directories, pairs.images)), split_folders
    )
    inner_names = listing.names
    listing.names = Names(pairs.full_path(name, pairs.images) for name in inner_names)
    for name, folder in pairs.masks.items():
        paths, numbers, unused = pairs.match(inner_names, pairs.directories_in(directories, folder), folder)
        listing.others[name] = Names(paths)
        mask_members.append(numbers)
        if unused:
            listing.ignored.append(
                f"{count_text(len(unused), 'mask')} in {as_text(folder)!r} without an image, such as {unused[0]}"
            )
    outside = [name for name in with_images if not pairs.contain(name)]
    if loose := [posixpath.join(name, file) for name in outside for file in directories[name].files]:
        listing.ignored.append(
            f"{count_text(len(loose), 'image')} outside of the paired folders, such as {as_text(min(loose))}"
        )
    listing.notes.append(pairs.note())
    listing.select(members, *mask_members)
    return listing


def _list_one_folder(tree: Tree, split_folders: str) -> Listing:
    """List the images of a tree without folders of masks; a mask may be in the same folder as its image."""
    images, masks = take_masks(tree.label, tree.directories)
    listing, members = sort_and_label(replace(tree, directories=images), split_folders)
    if not masks:
        listing.select(members)
        return listing
    found = [masks.get(posixpath.splitext(name)[0], (b"", -1)) for name in listing.names]
    listing.others[MASKS] = Names(path for path, _ in found)
    example, _ = next(mask for mask in found if mask[0])
    listing.notes.append(f"files such as {as_text(example)} are the masks of the images beside them (field {MASKS!r})")
    listing.select(members, [number for _, number in found])
    return listing


def check_source(path: Path) -> None:
    """Raise SourceError if ``path`` does not exist or cannot be accessed."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        raise SourceError(f"{printable(path)}: no such file or folder{hint_for_url(path)}") from None
    except OSError as error:
        raise SourceError(f"{printable(path)}: cannot be read: {error.strerror}") from None
    except ValueError as error:  # the path contains a NUL byte
        raise SourceError(f"{printable(path)}: is not a valid path: {error}") from None


def _is_hidden(name: bytes) -> bool:
    return name.startswith(b".") or name.lower() in SYSTEM


def _walk(root: bytes) -> Iterator[tuple[bytes, bytes, int]]:
    """Yield (folder, file name, -1) for all files below ``root``, and (folder, b"", -1) for the folders.

    Links are followed, except to folders that contain them. Broken links and pipes are yielded like files, so that they
    become errors of a sample rather than missing samples.
    """
    stack: list[tuple[bytes, tuple[tuple[int, int], ...]]] = [(b"", ())]  # folders to list, with their parents
    while stack:
        folder, parents = stack.pop()
        path = os.path.join(root, folder) if folder else root
        try:
            status = os.stat(path)
            folder_id = status.st_dev, status.st_ino
            if folder_id in parents:
                continue
            yield folder, b"", -1
            with os.scandir(path) as entries:
                for entry in entries:
                    if _is_hidden(entry.name):
                        yield folder, entry.name, -1
                        continue
                    is_folder = False
                    with suppress(OSError):  # a link to itself
                        is_folder = entry.is_dir()
                    if is_folder:
                        stack.append((folder + b"/" + entry.name if folder else entry.name, (*parents, folder_id)))
                    else:
                        yield folder, entry.name, -1
        except OSError as error:
            raise SourceError(f"{printable(path)}: cannot be listed: {error.strerror}") from None


def _split_paths(members: Iterable[tuple[bytes, int]]) -> Iterator[tuple[bytes, bytes, int]]:
    """Yield (folder, file name, number) for the members of an archive; the file name of a folder is empty."""
    for name, number in members:
        parts = [part for part in name.split(b"/") if part not in (b"", b".")]
        hidden = next(filter(_is_hidden, parts), None)
        if hidden is not None or not parts:
            yield b"", hidden or b"", number
            continue
        file = b"" if name.endswith(b"/") else parts.pop()
        yield b"/".join(parts), file, number


def _add_files(tree: Tree, files: Iterable[tuple[bytes, bytes, int]], report_found: ReportFound) -> None:
    """Add files to an empty tree: images, tables of metadata, and descriptions of all other files."""
    others, examples = Counter[str](), dict[str, bytes]()
    beside: list[tuple[bytes, bytes]] = []  # folders and names of some other files
    count, hidden = 0, b""
    for folder, file, number in files:
        if _is_hidden(file):
            if file.lower() not in SYSTEM and not file.startswith(b"._"):
                hidden = min(hidden or file, file)
            continue
        directory = tree.directories.get(folder)
        if directory is None:
            directory = tree.directories[folder] = Directory()
        if file.lower().endswith(EXTENSIONS):
            directory.files.append(file)
            directory.members.append(number)
            count += 1
            if count % 4096 == 0:
                report_found(count)
        elif file in TABLES:
            tree.tables.append((posixpath.join(folder, file), number))
        elif file:
            kind = as_text(os.path.splitext(file)[1].lower()) or "without a suffix"
            others[kind] += 1
            examples[kind] = min(examples.get(kind, file), file)
            if len(beside) < MAX_STEMS:
                beside.append((folder, file))
    tree.others = [examples[kind] for kind, _ in others.most_common()]
    _add_notes(tree, beside)
    if others:
        kinds = ", ".join(f"{num:,} {kind}" for kind, num in others.most_common(5)) + ", ..." * (len(others) > 5)
        tree.ignored.append(f"files without the suffix of an image ({kinds}), such as {as_text(min(tree.others))}")
    if hidden:
        tree.ignored.append(f"hidden files and folders, such as {as_text(hidden)}")


def _add_notes(tree: Tree, beside: Sequence[tuple[bytes, bytes]]) -> None:
    """Add notes on files that are left out, but are images of other formats, or belong to the images beside them."""
    if images := [name for name in tree.others if name.lower().endswith(foreign.OTHER_IMAGES)]:
        tree.notes.append(f"images such as {as_text(images[0])} are left out: in Python, {foreign.AS_PICTURES}")
    if tables := [name for name in tree.others if name.lower().endswith(MANIFESTS)]:
        tree.notes.append(f"if {as_text(tables[0])} lists the images with their labels, pass it as --manifest")
    folders = {folder for folder, _ in beside}
    stems = {(folder, os.path.splitext(file)[0]) for folder in folders for file in tree.directories[folder].files}
    paired = [file for folder, file in beside if (folder, os.path.splitext(file)[0]) in stems]
    if not tree.tables and 2 * len(paired) > len(beside):
        tree.notes.append(
            f"files such as {as_text(min(paired))} have the names of images, but what they contain is not stored: "
            'write it into a metadata.jsonl beside the images, in lines like {"file_name": "1.jpg", "text": "a dog"}, '
            "or a table (--manifest), or convert a data set in Python: h5chunk.convert(dataset, path)"
        )


def sort_and_label(tree: Tree, split_folders: str, min_classes: float = 1) -> tuple[Listing, array[int]]:
    """Sort and label the images of a tree as torchvision's ImageFolder does, split by split.

    Folders are classes if there are at least ``min_classes`` of them. Returns the listing, and the index of each image
    in the archive. Raises SourceError if there are no images, or if a class or split has none.
    """
    source, directories, ignored = tree.label, tree.directories, [*tree.ignored]
    with_images = {name: directory for name, directory in directories.items() if directory.files}
    if not with_images:
        suffixes = names_text((suffix.decode() for suffix in EXTENSIONS), 10)
        hint = "; it has " + " and ".join(ignored) if ignored else ""
        is_archive = tree.label.lower().endswith((".zip", ".tar"))
        names = [*tree.others] if is_archive else [os.fsencode(tree.label), *tree.others]
        raise SourceError(
            f"{source}: contains no images: no file in it or its subfolders ends in {suffixes} (in any case){hint}; "
            + foreign.way_for(names)
        )
    level = _class_level(source, with_images, split_folders)
    if level and (empty := sorted(at_level(0, directories) - at_level(0, with_images))):
        ignored.append(f"folders without images, which are not treated as splits: {names_text(map(as_text, empty))}")
        directories = {name: kept for name, kept in directories.items() if name.split(b"/")[0] not in empty}
    classes = sorted(at_level(level, with_images))
    classes = classes if len(classes) >= min_classes else []
    if classes and (empty := sorted(at_level(level, directories) - set(classes))):
        if labels := [name for name in empty if name.lower() in MASK_FOLDERS]:
            images = as_text(next((name for name in classes if name.lower() in IMAGE_FOLDERS), classes[0]))
            raise SourceError(
                f"{source}: {as_text(labels[0])!r} has no images, and other labels, such as boxes of YOLO and COCO, "
                f"are not read: convert the images alone (h5chunk convert {source}/{images} OUTPUT.h5), or a data set "
                "in Python that returns each image with its boxes, padded to a fixed number: h5chunk.convert(dataset, "
                "path)"
            )
        raise SourceError(
            f"{source}: {len(empty)} of {len(empty) + len(classes)} class folders have no images, such as "
            f"{as_text(empty[0])!r}: remove them, or add images; if they belong to the images in other folders, pass a "
            "table of the images with further columns (--manifest), or convert a data set in Python: "
            "h5chunk.convert(dataset, path)"
        )
    notes = check_pairs(source, with_images, level) if split_folders == "auto" and classes else []
    if split_folders == "auto" and len(classes) == 1 and not level:
        _check_only_class(source, with_images, classes[0])
    depth = level + bool(classes)  # minimum depth of a folder whose images are samples
    kept = {name: directory for name, directory in with_images.items() if depth_of(name) >= depth}
    if loose := {name: directory for name, directory in with_images.items() if name not in kept}:
        kind, count = "class" if classes else "split", sum(len(directory.files) for directory in loose.values())
        example = min(posixpath.join(name, min(directory.files)) for name, directory in loose.items())
        images = count_text(count, "image")
        ignored.append(f"{images} without a {kind}, outside of the {kind} folders, such as {as_text(example)}")
    members = array("q")
    listing = Listing(tree.container, Names(_names(kept, depth, members)), ignored=ignored, notes=[*tree.notes, *notes])
    if classes:
        listing.columns["labels"] = _numbers(listing.names, level, classes)
        listing.class_names = [as_text(name) for name in classes]
    if len(classes) == 1:
        listing.notes.append(
            f"all images are of one class, {listing.class_names[0]!r}: check that there is a folder per class"
        )
    if level:
        _add_splits(listing, kept, level)
    return listing, members


def _class_level(source: str, folders: Collection[bytes], choice: str) -> int:
    """Return the index of the class folder in a path, given the paths of all folders with images.

    It is 0 if the top folders are classes, and 1 if they are splits, or more if each split contains only one folder,
    as in ``seg_train/seg_train/cat``. Raises SourceError if the names and contents of folders do not tell.

    >>> _class_level("data", [b"train/cat", b"train/dog", b"val/cat"], "auto")
    1
    >>> _class_level("data", [b"car", b"bus", b"train"], "auto")
    0
    """
    tops = sorted(at_level(0, folders))
    if choice == "no" or (choice == "auto" and not _are_splits(source, tops, folders)):
        return 0
    if not tops:
        raise SourceError(f"{source}: has no folders that could be splits: leave out --split-folders")
    inside: dict[bytes, list[list[bytes]]] = {top: [] for top in tops}
    for parts in (name.split(b"/") for name in folders if name):
        inside[parts[0]].append(parts)
    found = {top: _level_in(top, inside[top]) for top in tops}
    nested = [top for top in tops if found[top][1]]
    if len(nested) not in (0, len(tops)):
        flat = next(top for top in tops if top not in nested)
        raise SourceError(
            f"{source}: of the splits {_listed(tops)}, {as_text(nested[0])!r} has class folders but {as_text(flat)!r} "
            "has none: convert each split separately, or pass --split-folders no if they are classes"
        )
    levels = {level for level, _ in found.values()} if nested else {1}
    if len(levels) > 1:
        raise SourceError(
            f"{source}: the splits {_listed(tops)} have their class folders at different depths: convert each split "
            "separately, or pass --split-folders no if they are classes"
        )
    return levels.pop()


def _level_in(top: bytes, folders: Sequence[Sequence[bytes]]) -> tuple[int, bool]:
    """Return the index of the class folder in the paths of the folders in ``top``, a split, and whether it exists."""
    level = 1
    while True:
        names = {parts[level] for parts in folders if len(parts) > level}
        only = next(iter(names), b"")
        is_wrapper = only == top or only.lower() in IMAGE_FOLDERS or split_of(as_text(only))[1]
        if len(names) != 1 or not is_wrapper or any(len(parts) == level for parts in folders):
            return level, bool(names)
        level += 1


def _are_splits(source: str, tops: list[bytes], folders: Collection[bytes]) -> bool:
    """Return whether the top folders, with these names, are splits. Raises SourceError if this is unclear."""
    inner: dict[bytes, set[bytes]] = {top: set() for top in tops}
    for top, _, rest in (name.partition(b"/") for name in folders if b"/" in name):
        inner[top].add(rest)
    found = {top: split_of(as_text(top)) for top in tops}
    named = [top for top in tops if found[top][1]]
    kinds = {found[top][0] for top in tops}
    if tops and len(named) == len(tops):
        if len(kinds) == 1 < len(tops):
            raise unclear(source, tops, "which have names of one split")
        return True
    if len(tops) == 1:
        inside = at_level(0, inner[tops[0]])
        if inside and tops[0] not in folders and all(split_of(as_text(name))[1] for name in inside):
            raise SourceError(
                f"{source}: has images only in the folder {as_text(tops[0])!r}, in splits ({_listed(sorted(inside))}): "
                f"pass {source}/{as_text(tops[0])}, or pass --split-folders no if all its images are of one class"
            )
        return False
    is_one_class = len(named) == 1 and not inner[named[0]]  # such as trains among vehicles
    if named and not is_one_class:
        raise unclear(source, tops, f"of which {as_text(named[0])!r} has the name of a split")
    if "" not in kinds and tops:
        raise unclear(source, tops, "whose names contain those of splits")
    children = [at_level(0, inner[top]) for top in tops]
    while children and len(only := set.union(*children)) == 1:  # such as images in each of them
        prefix = b"".join(only) + b"/"
        inner = {
            top: {name.removeprefix(prefix) for name in names if name.startswith(prefix)}
            for top, names in inner.items()
        }
        children = [at_level(0, inner[top]) for top in tops]
    shared = set.intersection(*children) if children else set()
    are_inner_splits = bool(shared) and all(split_of(as_text(name))[1] for name in set.union(*children))
    if are_inner_splits or (len(shared) > 1 and 2 * len(shared) >= len(set.union(*children))):
        raise unclear(source, tops, f"which contain the same folders {_listed(sorted(shared))}")
    return False


def _check_only_class(source: str, folders: Collection[bytes], label: bytes) -> None:
    """Raise SourceError if the only folder of a source contains only folders, which are probably the classes."""
    inside = sorted(at_level(1, folders))
    if len(inside) > 1 and label not in folders:
        is_folder = os.path.isdir(source)
        way = f"pass {source}/{as_text(label)}" if is_folder else f"unpack it, and pass its folder {as_text(label)!r}"
        raise SourceError(
            f"{source}: has images only in the folder {as_text(label)!r}, in its folders {_listed(inside)}: if these "
            f"are classes, {way}; or pass --split-folders no if all its images are of one "
            "class"
        )


def check_pairs(source: str, directories: Mapping[bytes, Directory], level: int) -> list[str]:
    """Raise SourceError if the class folders, at a level of the paths, may be the images and masks of one sample.

    They may if one of a few has the name of a mask, or if names of files, which do not just count, are the same in all.
    Returns a note, in a list, if all have the same names, which just count.
    """
    folders = sorted(at_level(level, directories))
    if not 2 <= len(folders) <= MAX_PAIRED:
        return []
    inside: dict[bytes, list[tuple[bytes, Directory]]] = {folder: [] for folder in folders}
    for name, directory in directories.items():
        parts = name.split(b"/")
        if depth_of(name) > level:
            inside[parts[level]].append((b"/".join(parts[:level] + parts[level + 1 :]), directory))
    masks = [folder for folder in folders if has_mask_name(folder)]
    if len(masks) == len(folders):
        masks = []
    smallest = min(masks or folders, key=lambda folder: sum(len(directory.files) for _, directory in inside[folder]))
    all_stems = _stems(inside[smallest], smallest, bool(masks))
    sample = set(nsmallest(MAX_STEMS, all_stems, key=lambda stem: (len(stem), stem)))  # 2 before 10
    found = [{stem for stem in _stems(inside[folder], folder, False) if stem in sample} for folder in folders]
    found = [stems for folder, stems in zip(folders, found, strict=True) if folder != smallest and folder not in masks]
    if masks and 2 * len(set.union(*found)) >= len(sample):
        reason = f"and the files in {as_text(smallest)!r} have the names of other images"
        raise unclear(source, folders, reason, smallest)
    common = set.intersection(*found)
    if not masks and len(common) >= max(MIN_PAIRS, 0.9 * len(sample)) and not just_count(common):
        raise unclear(
            source,
            folders,
            f"which contain files of the same names, such as {as_text(posixpath.basename(min(common)))}",
        )
    counts = {sum(len(directory.files) for _, directory in inside[folder]) for folder in folders}
    if masks or len(counts) > 1 or len(common) < max(MIN_PAIRS, len(sample)):
        return []
    return [
        f"the class folders contain files of the same names, such as {as_text(posixpath.basename(min(common)))}: if "
        "these are pairs, and not classes, list them in a manifest (--manifest)"
    ]


def _stems(directories: Iterable[tuple[bytes, Directory]], folder: bytes, is_mask: bool) -> Iterator[bytes]:
    """Yield the path of each file in a ``folder``, by which it may be paired with another file."""
    for inner, directory in directories:
        yield from (inner + b"/" + stem_of(file, folder, is_mask) for file in directory.files)


def unclear(source: str, folders: Sequence[bytes], reason: str, mask: bytes = b"") -> SourceError:
    """Return the error for folders that may be splits, classes, or images and their masks."""
    masks = [mask] if mask else [folder for folder in folders if has_mask_name(folder)]
    pairs = "list the pairs in a manifest (--manifest)"
    if len(folders) - len(masks or [mask]) == 1:
        name = ",".join(map(as_text, masks)) or "NAME"
        pairs += f", or, for masks, name their folder (--mask-column {name})"
    return SourceError(
        f"{source}: contains the folders {_listed(folders)}, {reason}: pass --split-folders yes if all are splits, "
        "with classes one level down, or no if they are classes; or convert one of them alone; or, if files of the "
        f"same names belong together, {pairs}"
    )


def _listed(names: Iterable[bytes]) -> str:
    return names_text((repr(as_text(name)) for name in names), 5)


def _names(directories: dict[bytes, Directory], depth: int, members: array[int]) -> Iterator[bytes]:
    """Yield the paths of all images in order, and append their indices in the archive to ``members``."""
    for name in sorted(directories, key=lambda name: (name.split(b"/")[:depth], name)):
        directory = directories[name]
        last = dict(sorted(zip(directory.files, directory.members, strict=True)))  # keep the last of equal names
        members.extend(last.values())
        yield from (posixpath.join(name, file) for file in last)


def _numbers(names: Names, level: int, folders: list[bytes]) -> np.ndarray:
    """Return the index in ``folders`` of each image's folder at a level of its path: (num_images,) int64."""
    number = {folder: i for i, folder in enumerate(folders)}
    return np.fromiter((number[name.split(b"/", level + 1)[level]] for name in names), np.int64, len(names))


def _add_splits(listing: Listing, directories: dict[bytes, Directory], level: int) -> None:
    """Add the column ``split``, a note on its values, and notes on classes that a split lacks."""
    splits = sorted(at_level(0, directories))
    numbers = _numbers(listing.names, 0, splits)
    listing.columns["split"] = np.array([as_text(split).encode() for split in splits])[numbers]
    counts = zip(splits, np.bincount(numbers).tolist(), strict=True)
    listing.notes.append(
        f"the top folders are splits: {names_text(f'{as_text(split)} ({count:,})' for split, count in counts)}: "
        "the field 'split' has the split of each sample (to treat them as classes, pass --split-folders no)"
    )
    for split in splits:
        in_split = at_level(level, (name for name in directories if name.partition(b"/")[0] == split))
        present = {as_text(name) for name in in_split}
        lacking = [name for name in listing.class_names if name not in present]
        if lacking:
            listing.notes.append(
                f"{len(lacking):,} of {len(listing.class_names):,} classes have no images in split {as_text(split)!r}, "
                f"such as {lacking[0]}"
            )
