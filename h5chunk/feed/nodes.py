"""Find the nodes of a training."""

from __future__ import annotations

import os

from h5chunk.errors import OptionError, check_whole


def find_nodes(locality: str | int, world_size: int) -> int:
    """Return the number of nodes that keep their chunks: those of torchrun for "node"."""
    if locality != "node":
        if isinstance(locality, str):
            raise OptionError(f"locality is {locality!r}: give 'node', or a number of nodes")
        return check_whole("locality", locality, 1)
    if not (each := _ranks_per_node(world_size)):
        raise OptionError(
            "locality='node' needs the number of processes on each node, the same on all, but LOCAL_WORLD_SIZE is "
            f"{os.environ.get('LOCAL_WORLD_SIZE', '')!r} of a world_size of {world_size}: start with torchrun, or give "
            "the number of nodes as locality"
        )
    return world_size // each


def ranks_of_node(rank: int, world_size: int) -> range:
    """Return the ranks on the node of a rank; all ranks unless torchrun says how many a node has."""
    each = _ranks_per_node(world_size) or world_size
    return range(rank - rank % each, rank - rank % each + each)


def _ranks_per_node(world_size: int) -> int:
    """Return the number of ranks on each node; 0 if it is unknown."""
    each = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(each) if each.isdecimal() and int(each) and world_size % int(each) == 0 else 0
