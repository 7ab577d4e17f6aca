"""Find the files of a source that the paths of a manifest name, also if these lack a suffix or come from Windows."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from h5chunk.sources.container import Container, Folder, open_archive
from h5chunk.sources.recognise import EXTENSIONS


class NamedFiles:
    """The files of a container. ``numbers`` has the index of each path in an archive; None for a folder at ``root``."""

    def __init__(self, container: Container, numbers: Mapping[bytes, int] | None, root: bytes = b"") -> None:
        self.container, self._numbers, self._root = container, numbers, root
        self._images: dict[bytes, dict[bytes, list[bytes]]] = {}  # by folder and name without suffix
        self.guessed = b""  # an example of a path that was found by another spelling

    def number(self, path: bytes) -> int | None:
        """Return the index of a path in its archive, -1 in a folder; None if there is no such file."""
        if self._numbers is not None:
            return self._numbers.get(path)
        return -1 if os.path.exists(os.path.join(self._root, path)) else None

    def inside(self, path: bytes) -> bytes:
        """Return an absolute path relative to the folder, if it is inside it."""
        root = os.path.join(os.path.abspath(self._root), b"") if self._numbers is None else path
        return path.removeprefix(root) or path

    def spellings(self, path: bytes) -> Iterable[bytes]:
        """Yield the paths that a path may mean: itself, or that of the only image of this name with a suffix."""
        for slashed in dict.fromkeys((path, posixpath.normpath(path.replace(b"\\", b"/")))):
            yield slashed
            folder, stem = posixpath.split(slashed)
            images = self._images_in(folder).get(stem, [])
            if len(images) == 1:
                yield posixpath.join(folder, images[0])

    def _images_in(self, folder: bytes) -> dict[bytes, list[bytes]]:
        if not self._images and self._numbers is not None:
            for path in self._numbers:
                self._add(*posixpath.split(path))
        if folder not in self._images and self._numbers is None:
            self._images[folder] = {}
            with suppress(OSError, ValueError):
                for name in os.listdir(os.path.join(self._root, folder)):
                    self._add(folder, name)
        return self._images.get(folder, {})

    def _add(self, folder: bytes, name: bytes) -> None:
        if name.lower().endswith(EXTENSIONS):
            self._images.setdefault(folder, {}).setdefault(posixpath.splitext(name)[0], []).append(name)


def open_files(source: Path) -> NamedFiles:
    """Open a folder or an archive."""
    if source.is_dir():
        return NamedFiles(Folder(source), None, os.fsencode(source))
    container, members = open_archive(source)
    return NamedFiles(container, {posixpath.normpath(name): i for name, i in members if not name.endswith(b"/")})
