"""A data set that mixes several data sets with the same fields in given proportions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from h5chunk.errors import FieldError, OptionError, names_text, printable
from h5chunk.feed.dataset import ChunkDataset
from h5chunk.feed.grouping import shares_of
from h5chunk.feed.skipping import MAX_SKIPPED, RAISE
from h5chunk.plan.groups import LONGEST, SHORTEST
from h5chunk.store.read.fields import SAMPLE_NUMBER
from h5chunk.store.read.files import Paths
from h5chunk.store.read.fileset import FileSet, set_name
from h5chunk.store.read.joined import Joined
from h5chunk.store.read.source import Computed, Source, by_part, of_all_parts
from h5chunk.store.read.windows import WindowReader
from h5chunk.transforms.compile import Transforms

MEMBER = "member"  # the field with the number of a sample's member


class Mixture(NamedTuple):
    """The members of which each batch has samples, as groups of a data set.

    ``codes``, (n,) int64, is the member of each sample, and ``shares``, (num_members,), their proportions. ``epoch`` is
    the length of an epoch, as for `Mix`.
    """

    names: Sequence[str]
    codes: np.ndarray
    shares: np.ndarray
    epoch: str | int


class Mix(ChunkDataset):
    """A `ChunkDataset` of several data sets with the same fields, its members, which each batch mixes in proportion.

    ::

        code = h5chunk.ChunkDataset("code.h5", fields=["tokens"]).where("stars > 10")
        data = {"web": "web.h5", "code": code}
        mix = h5chunk.Mix(data, weights={"web": 3, "code": 1}, fields=["tokens", "member"])
        for tokens, member in h5chunk.ChunkLoader(mix, 256):
            ...

    `ChunkLoader` and `ChunkSampler` make batches by member, without further arguments. Proportions hold in each batch,
    to less than two samples of a member, except for an incomplete last batch; those of an epoch are rounded to whole
    samples. A member that an epoch uses several times is used in passes: all of its samples are used once before one is
    used again. Samples are numbered member after member. `ChunkSampler.set_proportions` changes the proportions between
    epochs. `statistics` are those of the files, in which each sample counts once. The arguments ``weights``,
    ``batch_elements``, ``bucket_batches``, ``locality`` and ``lanes`` of a sampler are not supported; with ``groups``,
    its batches are by these groups instead.

    Parameters
    ----------
    members : mapping of str to ChunkDataset or path
        The data sets, or subsets of them, by name. They may be subsets of the same file. All must be rows of datasets,
        or all `Keyed`, or all `Windows`, or all have the same fields in different files. `Patches`, and files that are
        joined by a key, are not supported.
    weights : mapping of str to number, optional
        The proportion of each member, relative to their sum, and 0 to leave a member out. Default: its number of
        samples.
    temperature : number, optional
        T above 0: the proportions are those of ``weights ** (1 / T)``. The larger T is, the more equal are the members,
        as in multilingual training. Default: 1.
    epoch : {"longest", "shortest"} or int
        An epoch ends when the longest member, relative to its proportion, has been used once, and repeats the others;
        or when the shortest one has been used once, and uses a part of the others; or after a number of batches. The
        parts are random, and differ between epochs.
    fields : sequence of str, optional
        The order of the members' fields. ``member`` may be added, which is the number of a sample's member in
        `members`, int64, and ``sample_number``, the number of a sample in this data set. Default: the fields of the
        first member. A member that is a path is opened with these fields.
    transforms, as_dict, on_error, max_skipped
        As for `ChunkDataset`. Members must have no transforms, and raise errors.

    Raises
    ------
    FieldError
        The fields of the members differ.
    OptionError
        An argument is invalid, or a member is of a kind that cannot be mixed.
    """

    def __init__(
        self,
        members: Mapping[str, ChunkDataset | Paths],
        *,
        weights: Mapping[str, float] | None = None,
        temperature: float | None = None,
        epoch: str | int = LONGEST,
        fields: Sequence[str] | None = None,
        transforms: Transforms | None = None,
        as_dict: bool = False,
        on_error: str = RAISE,
        max_skipped: float = MAX_SKIPPED,
    ) -> None:
        if not isinstance(members, Mapping) or not members or not all(isinstance(name, str) for name in members):
            raise OptionError(f"members is {members!r:.200}: pass a mapping of names to data sets")
        self._members = tuple(members)
        own = [name for name in _checked(fields) if name not in (MEMBER, SAMPLE_NUMBER)] or None
        self._parts = tuple(
            part if isinstance(part, ChunkDataset) else ChunkDataset(part, fields=own) for part in members.values()
        )
        for name, part in zip(self._members, self._parts, strict=True):
            _check_member(name, part)
        self._weights = None if weights is None else shares_of(self._members, weights, "weights", "member")
        self._temperature = 1.0 if temperature is None else _check_temperature(temperature)
        self._epoch = _check_epoch(epoch)
        sources = [part.new_reader() for part in self._parts]
        self._starts = np.cumsum([0, *(source.num_samples for source in sources)])
        self._check_alike()
        super().__init__(
            _joined(sources, self._members),
            fields=self._order_of(fields),
            transforms=transforms,
            as_dict=as_dict,
            on_error=on_error,
            max_skipped=max_skipped,
        )
        self._decode = self._parts[0]._decode
        if any(part.subset_samples is not None for part in self._parts):
            self._samples = self._numbers_of(self._parts)

    def _check_alike(self) -> None:
        """Raise an error unless all members have the same computed fields, and their codes the same meaning."""
        first = self._parts[0]
        for name, part in zip(self._members, self._parts, strict=True):
            where = f"member {name!r}", f"member {self._members[0]!r}"
            if part._decode != first._decode:
                raise OptionError(
                    f"{where[0]} has decode={part._decode or None!r}, but {where[1]} has {first._decode or None!r}: "
                    "open all members with the same decode"
                )
            if {*_stored(part)} != {*_stored(first)}:
                raise FieldError(
                    f"{where[0]} has the fields {names_text(_stored(part))}, but {where[1]} has "
                    f"{names_text(_stored(first))}: choose the same fields with fields=..."
                )
            for field in part._reader.computed:
                one, other = part.field(field), first.field(field)
                kinds = one.dtype.kind in "SU" and other.dtype.kind == one.dtype.kind
                if one.sample_shape != other.sample_shape or (one.dtype != other.dtype and not kinds):
                    raise FieldError(
                        f"{where[0]}: field {field!r} is {one.dtype} of shape {one.sample_shape}, but in {where[1]} it "
                        f"is {other.dtype} of shape {other.sample_shape}: leave it out"
                    )
                coded = [each.has_categories(field) for each in (part, first)]
                if any(coded) and not (all(coded) and np.array_equal(part.categories(field), first.categories(field))):
                    raise FieldError(
                        f"{where[0]}: field {field!r} has other classes than in {where[1]}, so that its numbers would "
                        "have several meanings: leave it out"
                    )

    def _order_of(self, fields: Sequence[str] | None) -> dict[str, str]:
        """Return the fields in the given order, with what is stored of each of them."""
        first = self._parts[0]
        if fields is None:
            return {name: SAMPLE_NUMBER if name in first._numbered else name for name in first.fields}
        known = [*_stored(first), MEMBER, SAMPLE_NUMBER]
        for name in [name for name in fields if name not in known][:1]:
            raise OptionError(f"fields has {name!r}, which is none of {names_text(known)}: open the members with it")
        for name in [name for name in _stored(first) if name not in fields][:1]:
            raise OptionError(f"fields lacks {name!r}, which the members have: open the members without it, or add it")
        return {name: name for name in fields}

    @property
    def members(self) -> tuple[str, ...]:
        """The names of the members; the field ``member`` is an index of this tuple."""
        return self._members

    @property
    def proportions(self) -> dict[str, float]:
        """The proportion of each member in a batch. Their sum is 1. It is 0 for a member without samples."""
        shares = self.mixture.shares
        return dict(zip(self._members, (shares / (shares.sum() or 1)).tolist(), strict=True))

    @property
    def mixture(self) -> Mixture:
        sizes = np.array([len(part) for part in self._parts])
        weights = sizes.astype(float) if self._weights is None else np.where(sizes > 0, self._weights, 0)
        shares = (weights / (weights.max() or 1)) ** (1 / self._temperature)
        return Mixture(self._members, self._member_of(self.samples), shares, self._epoch)

    @property
    def _computed(self) -> dict[str, Computed]:
        shape = (self._reader.num_samples,)
        return {**super()._computed, MEMBER: Computed.described(MEMBER, shape, np.int64, self._member_of)}

    def _member_of(self, rows: np.ndarray) -> np.ndarray:
        """Return the number of the member of samples, given their numbers in the files: (n,) int64."""
        return np.asarray(np.searchsorted(self._starts, self._rows_of(rows), "right") - 1)

    def _rows_of(self, samples: np.ndarray) -> np.ndarray:
        """Return the numbers in the files without what an epoch has added to them: (n,) int64."""
        return samples % self.epoch_samples if self.epoch_samples else samples

    def _numbers_of(self, parts: Sequence[ChunkDataset]) -> np.ndarray:
        """Return the numbers in the files of the samples of subsets of all members: (n,) int64, ascending."""
        return np.concatenate([part.samples + start for part, start in zip(parts, self._starts.tolist(), strict=False)])

    def _of_parts(self, samples: np.ndarray, compute: Callable[[int, np.ndarray], np.ndarray]) -> np.ndarray:
        """Return what a function computes from the number of a member and the numbers of samples in its files."""
        if not len(samples):
            return compute(0, samples)
        by_member = by_part(self._starts, self._rows_of(samples))
        return of_all_parts(by_member, lambda code, own: compute(code, samples[own] - self._starts[code]))

    def _selected(self, numbers: np.ndarray) -> Mix:
        firsts = np.cumsum([0, *map(len, self._parts)])
        borders = np.searchsorted(numbers, firsts).tolist()
        return self._with_parts(
            part if stop - start == len(part) else part._selected(numbers[start:stop] - first)
            for part, first, (start, stop) in zip(self._parts, firsts.tolist(), pairwise(borders), strict=False)
        )

    def _with_parts(self, parts: Iterable[ChunkDataset]) -> Mix:
        """Return a subset that consists of these subsets of the members."""
        mix = copy(self)
        mix._parts = tuple(parts)
        mix._samples = self._numbers_of(mix._parts)
        return mix

    def split(self, fractions: Sequence[float], *, seed: int = 0, stratify: str | None = None) -> list[ChunkDataset]:
        of_members = (
            part.split(fractions, seed=seed, stratify=stratify) if len(part) else [part] * len(fractions)
            for part in self._parts
        )
        return [self._with_parts(each) for each in zip(*of_members, strict=True)]

    split.__doc__ = (ChunkDataset.split.__doc__ or "").replace(
        "Split into random parts, such as for training and validation.",
        "Split each member into random parts, such as for training and validation, and mix them as before.",
    )

    def reader_of(self, name: str) -> Callable[[np.ndarray], np.ndarray]:
        if not isinstance(name, str) or name in self._numbered or name == MEMBER:
            return super().reader_of(name)
        readers = [part.reader_of(name) for part in self._parts]
        return lambda samples: self._of_parts(samples, lambda code, own: readers[code](own))

    def _source_names(self, samples: np.ndarray) -> np.ndarray:
        return self._of_parts(samples, lambda code, own: self._parts[code]._source_names(own))

    def _of_samples(self, name: str, samples: np.ndarray) -> np.ndarray:
        return self._of_parts(samples, lambda code, own: self._parts[code]._of_samples(name, own))

    def categories(self, field: str) -> np.ndarray:
        """Return the names of a field's categories; those of ``member`` are the `members`."""
        if field == MEMBER:
            return np.array(self._members)
        if field in self._reader.fields:
            return super().categories(field)
        first, *others = [part.categories(field) for part in self._parts]
        for name, other in zip(self._members[1:], others, strict=True):
            if not np.array_equal(first, other):
                raise FieldError(f"member {name!r}: {field!r} has other categories than in {self._members[0]!r}")
        return first

    def has_categories(self, field: str) -> bool:
        if field in self._reader.fields:
            return super().has_categories(field)
        return field == MEMBER or (field not in self._numbered and all(p.has_categories(field) for p in self._parts))

    @property
    def classes(self) -> tuple[str, ...]:
        return super().classes or self._parts[0].classes

    def __repr__(self) -> str:
        shares = ", ".join(f"{name} {share:.1%}" for name, share in self.proportions.items())
        epoch = f"{self._epoch:,} batches" if isinstance(self._epoch, int) else f"the {self._epoch} member"
        return f"{super().__repr__()[:-1]}; {printable(shares)} in each batch; an epoch is {epoch})"


def _stored(part: ChunkDataset) -> list[str]:
    """Return the names of the fields of a data set, except for sample numbers."""
    return [name for name in part.fields if name not in part._numbered]


def _checked(fields: Sequence[str] | None) -> Sequence[str]:
    """Return the names of fields; none of them if they are not given."""
    if isinstance(fields, (str, Mapping)) or not all(isinstance(name, str) for name in fields or ()):
        raise OptionError(f"fields is {fields!r}: pass a list of names; members may have other names for fields")
    return fields or ()


def _check_member(name: str, part: ChunkDataset) -> None:
    if part.mixture is not None:
        raise OptionError(f"member {name!r} is a Mix itself: name its members in this Mix, with weights")
    if part.transforms is not None:
        raise OptionError(f"member {name!r} has transforms, which a Mix does not call: pass transforms= to the Mix")
    if part.on_error != RAISE:
        raise OptionError(f"member {name!r} has on_error={part.on_error!r}: pass on_error= to the Mix instead")
    if type(part).__getitem__ is not ChunkDataset.__getitem__ or type(part).__len__ is not ChunkDataset.__len__:
        raise OptionError(
            f"member {name!r} is a {type(part).__name__}, whose __getitem__ or __len__ a Mix does not call: pass a "
            "ChunkDataset, and transforms= to the Mix"
        )
    if not len(part):
        raise OptionError(f"member {name!r} has no samples: leave it out")
    if MEMBER in part.fields:
        raise OptionError(
            f"member {name!r} has a field named {MEMBER!r}, as the field with the number of the member: rename it, as "
            "in fields={'other_name': 'member'}"
        )


def _check_epoch(epoch: Any) -> str | int:
    if isinstance(epoch, str) and epoch in (LONGEST, SHORTEST):
        return epoch
    if not isinstance(epoch, (int, np.integer)) or isinstance(epoch, bool) or epoch < 1:
        raise OptionError(f"epoch is {epoch!r}: pass {LONGEST!r}, {SHORTEST!r} or a number of batches, at least 1")
    return int(epoch)


def _check_temperature(temperature: Any) -> float:
    is_number = isinstance(temperature, (int, float, np.number)) and not isinstance(temperature, bool)
    if not is_number or not 0 < temperature < math.inf:
        raise OptionError(f"temperature is {temperature!r}: pass a number above 0")
    return float(temperature)


def _joined(sources: Sequence[Source], names: Sequence[str]) -> Source:
    """Return a source of the samples of all sources, one after the other."""
    for name, source in zip(names, sources, strict=True):
        if not source.joined_as:
            raise OptionError(
                f"member {name!r} has patches, files that are joined by a key, or windows of fields in different "
                "files, which cannot be mixed: use a loader for each member"
            )
        if source.joined_as != sources[0].joined_as:
            raise OptionError(
                f"member {name!r} has {source.joined_as}, but member {names[0]!r} has {sources[0].joined_as}: open all "
                "members in the same way"
            )
    path = set_name([path for source in sources for path in source.paths])
    kind: Any = next((kind for kind in (WindowReader, Joined) if isinstance(sources[0], kind)), FileSet)
    return sources[0] if len(sources) == 1 else kind.of_several(sources, path)
