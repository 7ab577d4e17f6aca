"""Which of several training processes this is."""

from __future__ import annotations

from typing import NamedTuple

import torch

from h5chunk.errors import OptionError
from h5chunk.plan.order import Order


class Ranks(NamedTuple):
    """One of ``world_size`` processes, and the lanes that all of them share out."""

    lanes: int
    rank: int
    world_size: int


ALONE = Ranks(1, 0, 1)


def find_ranks(lanes: int | None, rank: int | None, world_size: int | None) -> Ranks:
    """As given, or as torch.distributed says where it is initialised; a lane for each rank, if not more are asked for.

    Raises
    ------
    OptionError
        Only one of ``rank`` and ``world_size`` is given.
    """
    if (rank is None) != (world_size is None):
        raise OptionError(f"rank is {rank} and world_size {world_size}: give both, or none")
    if rank is None or world_size is None:
        rank, world_size = 0, 1
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return Ranks(world_size if lanes is None else lanes, rank, world_size)


def check_ranks(order: Order, rank: int | None) -> None:
    """Raise OptionError if torch.distributed was initialised after it was asked: all ranks would read the same.

    ``rank`` is what was given by hand; then nothing is looked at.
    """
    now = find_ranks(None, None, None)
    if rank is None and (order.rank, order.world_size) != (now.rank, now.world_size) and now.world_size > 1:
        raise OptionError(
            f"made as rank {order.rank} of {order.world_size}, but torch.distributed says rank {now.rank} of "
            f"{now.world_size} now: make it after init_process_group, or give rank= and world_size="
        )
