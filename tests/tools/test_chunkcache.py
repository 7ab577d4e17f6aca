"""The model of HDF5's chunk cache: each rule by hand, pruning as HDF5 words it, and HDF5 itself."""

from __future__ import annotations

import doctest
import itertools
import json
import sys

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scripts import load

from h5chunk.errors import OptionError
from h5chunk.plan.cache import CacheSettings, ChunkGrid

check_cache_model, model = load("check_cache_model"), load("hdf5_cache")
Accesses, ChunkCache, HDF5_1_14, HDF5_2 = model.Accesses, model.ChunkCache, model.HDF5_1_14, model.HDF5_2
range_accesses, sample_accesses = model.range_accesses, model.sample_accesses
HIT, MISS, BYPASS = model.HIT, model.MISS, model.BYPASS

ROWS = ChunkGrid((40, 5), (4, 5), 2)  # ten chunks of four rows, 40 bytes each


def accesses_to(chunks: str, wanted: int = 10) -> Accesses:
    """Accesses to the chunks of these letters, one selection each."""
    numbers = np.array(["ABCDEFGHIJ".index(letter) for letter in chunks], np.int64)
    ones = np.ones(len(numbers), np.int64)
    return Accesses(numbers, wanted * ones, ones)


def outcomes(cache: ChunkCache, chunks: str, wanted: int = 10) -> str:
    """A dot for a hit, M for a miss, B for a bypass."""
    return "".join(".MB"[outcome] for outcome in cache.access(accesses_to(chunks, wanted)).outcomes)


def rows_cache(room: int, w0: float = 0.0, nslots: int = 10) -> ChunkCache:
    return ChunkCache(ROWS, (nslots, room * 40, w0))


def test_a_hit_moves_one_step_only():
    cache = rows_cache(room=3)
    assert outcomes(cache, "ABC A DE".replace(" ", "")) == "MMM.MM"  # BAC, then BAC loses B, ACD loses A
    assert outcomes(cache, "CDE") == "..."
    assert outcomes(cache, "A") == "M"  # which the least recently used order would have kept
    cache = rows_cache(room=3)
    assert outcomes(cache, "ABCAADEA") == "MMM..MM."  # two hits, two steps: BCA


def test_a_hit_at_the_end_stays_there():
    cache = rows_cache(room=2)
    assert outcomes(cache, "ABBBC") == "MM..M"
    assert outcomes(cache, "BCA") == "..M"


def test_one_slot_one_chunk():
    cache = rows_cache(room=10, nslots=4)
    assert outcomes(cache, "ABEABEF") == "MMMM.MM"  # A and E share slot 0, B and F slot 1
    assert outcomes(cache, "CDEF") == "MM.."
    assert cache.held_bytes == 4 * 40  # no more than slots
    assert cache.slots(np.arange(10)).tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]


def test_a_collision_makes_room_so_that_nothing_else_goes():
    cache = rows_cache(room=2, nslots=4)
    assert outcomes(cache, "ABF") == "MMM"  # F takes the place of B, and A stays
    assert outcomes(cache, "AF") == ".."


def test_slots_are_made_of_the_bits_of_the_coordinates():
    grid = ChunkGrid((3, 5, 4), (1, 1, 1), 1)
    chunk = int(np.ravel_multi_index((2, 4, 3), grid.shape))
    assert ChunkCache(grid, (1000, 9, 0.0)).slots(np.array([chunk])).tolist() == [0b10_100_11]
    assert ChunkCache(grid, (7, 9, 0.0)).slots(np.array([chunk])).tolist() == [0b10_100_11 % 7]
    every = ChunkCache(grid, (grid.num_slots, 9, 0.0)).slots(np.arange(60))
    assert len(set(every.tolist())) == 60 and every.max() == grid.num_slots - 1


@pytest.mark.parametrize("filtered", [False, True])
def test_chunks_at_the_edge_cost_as_much(filtered):
    grid = ChunkGrid((5, 6), (4, 4), 1, filtered)  # only the first of four is whole
    everything = range_accesses(grid, [0], [5])
    assert everything.bytes_each.tolist() == [16, 8, 4, 2]
    cache = ChunkCache(grid, (grid.num_slots, 63, 0.0))
    assert cache.access(everything).outcomes.tolist() == [MISS] * 4
    assert cache.held_bytes == 48
    assert cache.access(everything).outcomes.tolist() == [MISS] * 4
    cache = ChunkCache(grid, (grid.num_slots, 64, 0.0))
    assert (cache.access(everything).misses, cache.access(everything).hits) == (4, 4)
    assert cache.access(everything).bytes_read == 0


def test_too_large_chunks_pass_by():
    grid = ChunkGrid((40, 5), (4, 3), 2)
    some = range_accesses(grid, [0, 0], [6, 1])
    cache = ChunkCache(grid, (521, 23, 0.75))
    unfiltered = cache.access(some)
    assert unfiltered.outcomes.tolist() == [BYPASS] * 6
    assert (unfiltered.bytes_read, unfiltered.num_reads) == (60 + 10, 4 + 4 + 2 + 2 + 1 + 1)
    assert cache.held_bytes == 0
    filtered = ChunkCache(ChunkGrid((40, 5), (4, 3), 2, filtered=True), (521, 23, 0.75)).access(some)
    assert filtered.outcomes.tolist() == [BYPASS] * 6  # at every access, whole
    assert (filtered.bytes_read, filtered.num_reads) == (6 * 24, 6)
    assert ChunkCache(grid, (521, 48, 0.75)).access(some).misses == 6
    assert ChunkCache(grid, (521, 0, 0.75)).access(some).bypasses == 6


def test_what_was_read_in_full_goes_first():
    cache = rows_cache(room=4, w0=0.5)  # three are searched
    assert outcomes(cache, "ABCD") == "MMMM"
    assert outcomes(cache, "C", wanted=30) == "."  # in full now; ABDC
    assert outcomes(cache, "E") == "M"  # the fourth is not searched: A goes
    assert outcomes(cache, "F") == "M"  # of BDCE, C goes
    assert outcomes(cache, "BDEFC") == "....M"


def test_the_last_searched_is_looked_at_before_the_first_is_given_up():
    cache = rows_cache(room=4, w0=0.5)
    outcomes(cache, "AB")
    outcomes(cache, "C", wanted=40)
    assert outcomes(cache, "DE") == "MM"  # C is int(4 * 0.5) steps from the front, and goes
    assert outcomes(cache, "ABC") == "..M"


def test_without_w0_the_first_goes():
    cache = rows_cache(room=2, w0=0.0)
    outcomes(cache, "A")
    outcomes(cache, "B", wanted=40)
    assert outcomes(cache, "CBA") == "M.M"


def test_a_row_read_twice_counts_twice():
    cache = rows_cache(room=3, w0=0.99)
    outcomes(cache, "ABBBB")
    assert outcomes(cache, "CDAB") == "MM.M"


def test_a_chunk_read_past_its_end_is_just_read_in_full():
    cache = rows_cache(room=3, w0=0.99)
    outcomes(cache, "AB")
    outcomes(cache, "B", wanted=40)
    assert outcomes(cache, "CDAB") == "MM.M"


def test_the_chunk_at_the_edge_is_never_read_in_full():
    grid = ChunkGrid((10, 5), (4, 5), 2)
    cache = ChunkCache(grid, (3, 80, 0.99))
    cache.access(range_accesses(grid, [4, 8], [6, 10]))  # half of B, all that there is of C
    assert cache.access(sample_accesses(grid, [0, 8, 4])).outcomes.tolist() == [MISS, HIT, MISS]  # B went


def test_counting_starts_anew_for_a_chunk_that_comes_back():
    cache = rows_cache(room=2, w0=0.99)
    outcomes(cache, "A", wanted=40)
    assert outcomes(cache, "BCAD") == "MMMM"  # A went, then B, then C: nobody read in full, the first goes
    assert outcomes(cache, "AD") == ".."


def test_it_remembers():
    trace = accesses_to("ABCABDEFABCAAGHBCDIJ" * 3)
    together, apart = (ChunkCache(ROWS, (7, 130, 0.75)) for _ in range(2))
    found = together.access(trace)
    parts = []
    for start, stop in itertools.pairwise([0, 1, 1, 17, 40, 60]):
        arrays = (each[start:stop] for each in (trace.chunks, trace.bytes_each, trace.runs))
        parts.append(apart.access(Accesses(*arrays)))
    assert np.concatenate([part.outcomes for part in parts]).tolist() == found.outcomes.tolist()
    assert sum(part.hits for part in parts) == found.hits > 0
    assert sum(part.bytes_read for part in parts) == found.bytes_read == found.misses * 40
    assert apart.held_bytes == together.held_bytes == 120


def test_a_replay_prints():
    cache = rows_cache(room=3)
    replay = cache.access(accesses_to("ABAC"))
    assert repr(replay) == "CacheReplay(hits=1, misses=3, bypasses=0, bytes_read=120, num_reads=3)"
    assert cache.access(accesses_to("")).misses == 0
    assert replay.outcomes.dtype == np.uint8


def test_the_defaults_are_those_of_the_library():
    with h5py.File("defaults.h5", "w", driver="core", backing_store=False) as file:
        dataset = file.create_dataset("data", (10,), "u1", chunks=(5,))
        triple = dataset.id.get_access_plist().get_chunk_cache()
    assert CacheSettings.of(triple) == (HDF5_2 if h5py.version.hdf5_version_tuple >= (2, 0, 0) else HDF5_1_14)
    assert ChunkCache(ROWS).settings == HDF5_2


def test_what_cannot_be():
    with pytest.raises(OptionError, match="is contiguous: it has no chunks and no chunk cache"):
        ChunkCache(ChunkGrid((40, 5), None, 2))
    with pytest.raises(OptionError, match=r"w0 is 1\.0"):
        ChunkCache(ROWS, (10, 100, 1.0))


def test_a_dataset_without_samples():
    grid = ChunkGrid((0, 5), (4, 5), 2)
    assert ChunkCache(grid).access(range_accesses(grid, [0], [0])).hits == 0


class AsHDF5Says:
    """H5D__chunk_lock, _unlock and _cache_prune, step by step: entries are [chunk, bytes left], foremost first."""

    def __init__(self, room: int, nslots: int, w0: float, chunk_bytes: int) -> None:
        self.room, self.nslots, self.w0, self.chunk_bytes = room, nslots, w0, chunk_bytes
        self.entries: list[list[int]] = []

    def access(self, chunk: int, wanted: int) -> int:
        found = [i for i, entry in enumerate(self.entries) if entry[0] == chunk]
        if found:
            i = found[0]
            entry = self.entries[i]
            self.entries[i : i + 2] = self.entries[i : i + 2][::-1]
        else:
            self.entries = [other for other in self.entries if (other[0] - chunk) % self.nslots]
            self.prune()
            entry = [chunk, self.chunk_bytes]
            self.entries.append(entry)
        entry[1] -= min(entry[1], wanted)
        return HIT if found else MISS

    def prune(self) -> None:
        start = list(self.entries)
        steps = int(len(start) * self.w0)
        first, second = 0, None  # places in `start`
        while (first is not None or second is not None) and len(self.entries) >= self.room:
            if steps == 0:
                second = start.index(self.entries[0])
            ahead = [self.after(start, place) for place in (first, second)]
            if first is not None and start[first][1] == 0:
                self.entries.remove(start[first])
                second = None if second == first else second
            if second is not None and len(self.entries) >= self.room:
                self.entries.remove(start[second])
            first, second = ahead
            steps -= 1

    def after(self, start: list[list[int]], place: int | None) -> int | None:
        later = [] if place is None else [i for i in range(place + 1, len(start)) if start[i] in self.entries]
        return later[0] if later else None


@given(
    st.integers(1, 12),
    st.integers(1, 20) | st.just(16),
    st.floats(0.0, 1.0, exclude_max=True),
    st.sampled_from((0.02, 0.1, 0.4)),
    st.integers(0, 1 << 32),
)
@settings(deadline=None, max_examples=200)
def test_against_pruning_as_hdf5_words_it(room, nslots, w0, in_full, seed):
    rng = np.random.default_rng(seed)
    chunks = rng.integers(0, 16, 300)
    wanted = np.where(rng.random(300) < in_full, 40, rng.integers(1, 9, 300))
    cache = ChunkCache(ChunkGrid((640,), (40,), 1), (nslots, room * 40, w0))
    replay = cache.access(Accesses(chunks, wanted, np.ones_like(chunks)))
    slow = AsHDF5Says(room, nslots, w0, chunk_bytes=40)
    assert replay.outcomes.tolist() == [slow.access(*visit) for visit in zip(chunks, wanted, strict=True)]
    assert cache.held_bytes == 40 * len(slow.entries)


def test_the_example_of_the_docstring():
    assert doctest.testmod(model) == (0, 5)


def test_entries_that_move_do_not_hide_the_first_that_was_read_in_full():
    entries = model._EntryList(num_slots=5, chunk_bytes=1, depth=4)
    for slot in range(5):
        entries.append(slot)
    for slot in range(1, 5):
        entries.take_off(slot, 1)
    for turn in range(1000):
        entries.promote(2 + turn % 3)
        assert entries.victim() == 1  # never moved


@st.composite
def cases(draw: st.DrawFn):
    rank = draw(st.integers(1, 4))
    chunks = draw(st.tuples(*[st.integers(1, 5)] * rank))
    counts = draw(st.tuples(*[st.integers(1, (20, 6, 4, 3)[rank - 1])] * rank))
    shape = tuple(
        max(1, chunk * count - draw(st.integers(0, chunk - 1))) for chunk, count in zip(chunks, counts, strict=True)
    )
    grid = ChunkGrid(shape, chunks, draw(st.sampled_from((1, 2, 8))), draw(st.booleans()))
    nbytes = draw(st.integers(0, 12)) * grid.chunk_bytes + draw(st.integers(0, grid.chunk_bytes - 1))
    nslots = draw(st.integers(1, 24) | st.just(grid.num_slots))
    cache = CacheSettings(nslots, nbytes, draw(st.sampled_from(check_cache_model.W0)))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    ranges = itertools.islice(check_cache_model.random_ranges(rng, shape[0]), draw(st.integers(1, 60)))
    return check_cache_model.Case(grid, cache, list(ranges))


@given(cases())
@settings(deadline=None, max_examples=150)
def test_against_hdf5(case):
    assert check_cache_model.compare(case).mismatches == []


def test_the_script(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(check_cache_model, "TIMED", 5000)
    arguments = ["--configurations", "4", "--accesses", "400", "--seed", "3", "--json", str(tmp_path / "a.json")]
    monkeypatch.setattr(sys, "argv", ["check_cache_model.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        check_cache_model.main()
    assert ended.value.code == 0
    result = json.loads((tmp_path / "a.json").read_text())
    assert result["accesses"] >= 400 and result["mismatches"] == 0 and result["modelled_per_s"] > 0
    assert "mismatches  0" in capsys.readouterr().out


def test_a_wrong_model_is_noticed(monkeypatch):
    ranges = [(sample, sample + 1) for sample in (0, 4, 0, 8, 4)]
    case = check_cache_model.Case(ROWS, CacheSettings(10, 80, 0.0), ranges)
    assert check_cache_model.compare(case).mismatches == []
    monkeypatch.setattr(model._EntryList, "promote", lambda entries, slot: None)
    [mismatch] = check_cache_model.compare(case).mismatches
    assert "samples 4 to 5: HDF5 reads [(1, 40, 1)], the model []" in mismatch
