"""The list of entries of HDF5's chunk cache, and which of them is evicted: a part of `h5chunk.tools.model.hdf5_cache`.

Entries are named by their slots. Slots 4, 7 and 2 come in this order; a hit on the foremost lets the next one pass:

>>> entries = Entries(num_slots=8, chunk_bytes=100, depth=1)
>>> for slot in (4, 7, 2):
...     entries.append(slot)
>>> entries.promote(4)  # 7, 4, 2
>>> entries.victim()
7
>>> entries.take_off(4, 60)
>>> entries.take_off(4, 60)  # read in full, and the second of the depth + 1 that are searched
>>> entries.victim()
4
"""

from __future__ import annotations

import heapq

_NOTHING = -1


class Entries:
    """The entries, foremost first. Every step takes O(1) time, or O(log n) where ``depth`` is not 0.

    They form a ring of ``after`` and ``before``, which the index behind the last slot closes. Where ``depth`` is not 0,
    an entry has a rank that grows along the list, ``edge`` is the last entry to be searched, and a heap has the ranks
    of the entries that were read in full, among ranks that are out of date.

    Parameters
    ----------
    num_slots : int
    chunk_bytes : int
        What each entry has to be read before it counts as read in full.
    depth : int
        How many entries behind the foremost are searched for one that was read in full.
    """

    def __init__(self, num_slots: int, chunk_bytes: int, depth: int) -> None:
        self.size = 0
        self.depth = depth
        self._end = self._edge = num_slots
        self._chunk_bytes = chunk_bytes
        self._before = [num_slots] * (num_slots + 1)
        self._after = [num_slots] * (num_slots + 1)
        self._left = [0] * num_slots
        self._rank = [_NOTHING] * num_slots
        self._next_rank = 0
        self._finished: list[tuple[int, int]] = []

    def append(self, slot: int) -> None:
        """Add an entry at the end, with nothing read of it."""
        before, after, end = self._before, self._after, self._end
        last = before[end]
        after[last] = before[end] = slot
        before[slot], after[slot] = last, end
        self.size += 1
        if self.depth:
            self._left[slot] = self._chunk_bytes
            self._rank[slot] = self._next_rank
            self._next_rank += 1
            if self.size == self.depth + 1:
                self._edge = slot

    def remove(self, slot: int) -> None:
        """Take an entry out."""
        if self.depth:
            if self._edge != self._end and self._rank[slot] <= self._rank[self._edge]:
                self._edge = self._after[self._edge]
            self._rank[slot] = _NOTHING
        leader, follower = self._before[slot], self._after[slot]
        self._after[leader], self._before[follower] = follower, leader
        self.size -= 1

    def promote(self, slot: int) -> None:
        """Let the next one pass."""
        before, after = self._before, self._after
        follower = after[slot]
        if follower == self._end:
            return
        leader, beyond = before[slot], after[follower]
        after[leader], before[follower] = follower, leader
        after[follower], before[slot] = slot, follower
        after[slot], before[beyond] = beyond, slot
        if self.depth:
            self._swap_ranks(slot, follower)

    def _swap_ranks(self, slot: int, follower: int) -> None:
        rank = self._rank
        rank[slot], rank[follower] = rank[follower], rank[slot]
        if self._edge == slot:
            self._edge = follower
        elif self._edge == follower:
            self._edge = slot
        for each in (slot, follower):
            if not self._left[each]:
                self._note_finished(each)

    def take_off(self, slot: int, wanted: int) -> None:
        """Count bytes that were read."""
        left = self._left[slot]
        if left:
            self._left[slot] = left = max(0, left - wanted)
            if not left:
                self._note_finished(slot)

    def _note_finished(self, slot: int) -> None:
        if len(self._finished) > 4 * self.size + 64:  # mostly out of date: hits move entries that are never evicted
            self._finished = [each for each in set(self._finished) if self._is_finished(*each)]
            heapq.heapify(self._finished)
        heapq.heappush(self._finished, (self._rank[slot], slot))

    def _is_finished(self, rank: int, slot: int) -> bool:
        return self._rank[slot] == rank and not self._left[slot]

    def victim(self) -> int:
        """The entry that pruning evicts: the list has more than ``depth`` entries."""
        finished = self._finished
        while finished and not self._is_finished(*finished[0]):
            heapq.heappop(finished)
        if finished and finished[0][0] <= self._rank[self._edge]:
            return finished[0][1]
        return self._after[self._end]
