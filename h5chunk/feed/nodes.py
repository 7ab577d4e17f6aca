"""Find the number of nodes of a training."""

from __future__ import annotations

import os

from h5chunk.errors import OptionError, check_whole


def find_nodes(locality: str | int, world_size: int) -> int:
    """Return the number of nodes that keep their chunks: those of torchrun for "node"."""
    if locality != "node":
        if isinstance(locality, str):
            raise OptionError(f"locality is {locality!r}: give 'node', or a number of nodes")
        return check_whole("locality", locality, 1)
    each = os.environ.get("LOCAL_WORLD_SIZE", "")
    if not each.isdecimal() or not int(each) or world_size % int(each):
        raise OptionError(
            f"locality='node' needs the number of processes on each node, the same on all, but LOCAL_WORLD_SIZE is "
            f"{each!r} of a world_size of {world_size}: start with torchrun, or give the number of nodes as locality"
        )
    return world_size // int(each)
