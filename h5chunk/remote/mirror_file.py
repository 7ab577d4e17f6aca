"""A file object through which HDF5 reads the metadata of a remote object, with few requests.

HDF5 reads metadata in small pieces, one after the other. `MirrorFile` therefore fetches more than it is asked for: what
follows while HDF5 reads on in the file, and all nodes to which a node of a B-tree refers. `fetched` fetches objects
whose addresses are known.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import numpy as np

from h5chunk.remote.mirror import Hold, Mirror
from h5chunk.remote.pages import PAGE

AHEAD_BYTES, MAX_AHEAD_BYTES = 256 << 10, 32 << 20  # minimum fetch, doubled while HDF5 reads on in the file
OBJECT_BYTES = 64 << 10  # fetched at the address of an object, whose parts are often close to each other
NODE_BYTES = 16 << 10  # fetched at the address of a node
JOINED_BYTES = 256 << 10  # distance of objects that share a request: these bytes take less time than another request
GROUP_KEY_BYTES, CHUNK_NODES = 8, 64  # size of a key in the B-tree of a group, and children of a node of chunks
NONE = np.empty(0, np.int64)


class MirrorFile:
    """A file object through which h5py reads a mirror."""

    def __init__(self, mirror: Mirror) -> None:
        self._mirror, self._at, self._num_bytes = mirror, 0, mirror.pages.num_bytes
        self._next, self._ahead = -1 << 62, AHEAD_BYTES  # end of the latest fetch, and the bytes of the next one
        limit = mirror.cache_bytes
        self._max_ahead = MAX_AHEAD_BYTES if limit is None else max(AHEAD_BYTES, min(MAX_AHEAD_BYTES, limit // 8))
        self._hold: Hold | None = None  # on what was fetched last
        self._of_levels: dict[bytes, list[Hold]] = {}  # on the nodes below the latest node of each level of B-trees

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._num_bytes - self._at)]
        if not view:
            return 0
        mirror, stop = self._mirror, self._at + len(view)
        if not mirror.is_kept(self._at, stop):
            if not mirror.is_held(self._at, stop):
                self._fetch(self._at, stop)
            mirror.keep(self._at, stop)
        done = os.preadv(mirror.pages.descriptor, [view], self._at)
        if view[:4] == b"TREE":
            self._fetch_children(view[:done])
        self._at += done
        return done

    def read(self, size: int = -1) -> bytes:
        data = bytearray(size)
        return bytes(data[: self.readinto(data)])

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._num_bytes}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def _fetch(self, offset: int, stop: int) -> None:
        """Hold bytes until the next call, and fetch more than them if they are absent."""
        if self._hold is not None:
            self._mirror.release(self._hold)
            self._hold = None
        end = stop
        if self._mirror.are_absent(offset, stop):
            reads_on = self._next <= stop and offset <= self._next + self._ahead
            self._ahead = min(2 * self._ahead, self._max_ahead) if reads_on else AHEAD_BYTES
            end = self._next = min(max(stop, offset + self._ahead), self._num_bytes)
        self._hold = self._mirror.hold_metadata(np.array([offset]), np.array([end - offset]))

    def _fetch_children(self, node: memoryview) -> None:
        """Fetch all nodes below a node of a B-tree, and hold them until another node of its level is read.

        If they are too large, only some levels are fetched.
        """
        kind = bytes(node[4:6])  # whether it is of a group, and its level
        for latest in self._of_levels.pop(kind, ()):
            self._mirror.release(latest)
        held, num_bytes, limit = self._of_levels.setdefault(kind, []), 0, 8 * self._max_ahead
        children = _children(node)
        while num_bytes < limit and len(missing := self._mirror.missing(children)):
            held.append(_held_objects(self._mirror, missing, NODE_BYTES))
            num_bytes += PAGE * sum(stop - first for first, stop in held[-1].runs[self._mirror])
            descriptor = self._mirror.pages.descriptor
            nodes = (os.pread(descriptor, len(node), child) for child in children.tolist() if child >= 0)
            children = np.concatenate([_children(memoryview(each)) for each in nodes if each[:4] == b"TREE"] or [NONE])

    def __del__(self) -> None:
        for hold in (*([] if self._hold is None else [self._hold]), *chain(*self._of_levels.values())):
            self._mirror.release(hold)

    def __repr__(self) -> str:  # h5py uses this as the name of the file
        return str(self._mirror.path)


def _children(node: memoryview) -> np.ndarray:
    """Return the addresses of the nodes to which a node of a B-tree (version 1) refers: (n,) int64.

    A node of the lowest level has the addresses of chunks, or of the tables of a group's members. Addresses in a
    damaged file may be wrong. Sizes are those that HDF5 uses by default.
    """
    if len(node) < 24:
        return NONE
    is_group, level, count = node[4] == 0, node[5], int.from_bytes(node[6:8], "little")
    if not is_group and not level:
        return NONE
    key = GROUP_KEY_BYTES if is_group else (len(node) - 24 - 8 * CHUNK_NODES) // (CHUNK_NODES + 1)
    pairs = np.frombuffer(node[24 : 24 + count * max(0, key + 8)], np.uint8)
    if key < GROUP_KEY_BYTES or len(pairs) < count * (key + 8):
        return NONE
    return pairs.reshape(count, key + 8)[:, key:].copy().view("<i8").ravel()


def _held_objects(mirror: Mirror, addresses: np.ndarray, num_bytes: int) -> Hold:
    """Fetch ``num_bytes`` at each address, and hold them. Objects that are close to each other share a request."""
    places = np.unique(addresses)
    gaps = np.diff(places, append=mirror.pages.num_bytes)
    return mirror.hold_metadata(places, np.where(gaps <= JOINED_BYTES, gaps, np.minimum(gaps, num_bytes)))


@contextmanager
def fetched(mirror: Mirror, addresses: np.ndarray) -> Iterator[None]:
    """Fetch the objects at addresses of an HDF5 file, (n,) int64, and hold them within a context."""
    hold = _held_objects(mirror, mirror.missing(addresses), OBJECT_BYTES)
    try:
        yield
    finally:
        mirror.release(hold)
