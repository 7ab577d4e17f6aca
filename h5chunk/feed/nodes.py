"""Determine the nodes of a distributed training run."""

from __future__ import annotations

import os

from h5chunk.errors import OptionError, check_whole


def find_nodes(locality: str | int, world_size: int) -> int:
    """Return the number of nodes: ``locality`` itself, or for "node" the number of nodes that torchrun uses."""
    if locality != "node":
        if isinstance(locality, str):
            raise OptionError(f"locality is {locality!r}: pass 'node' or a number of nodes")
        return check_whole("locality", locality, 1)
    if not (each := _ranks_per_node(world_size)):
        raise OptionError(
            "locality is 'node', but LOCAL_WORLD_SIZE, the number of processes per node, is "
            f"{os.environ.get('LOCAL_WORLD_SIZE', '')!r}, which does not divide the world_size of {world_size}: start "
            "training with torchrun, or pass the number of nodes, as in locality=2"
        )
    return world_size // each


def _ranks_per_node(world_size: int) -> int:
    """Return the number of ranks on each node; 0 if it is unknown."""
    each = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(each) if each.isdecimal() and int(each) and world_size % int(each) == 0 else 0
