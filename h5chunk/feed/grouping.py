"""Read the groups of samples, and resolve the arguments of batches by group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from h5chunk.errors import OptionError, check_whole, count_text, names_text
from h5chunk.feed.filter import read_column
from h5chunk.plan.groups import GroupSelection

if TYPE_CHECKING:
    from h5chunk.feed.dataset import ChunkDataset

EQUAL = "equal"


def group_selection(
    dataset: ChunkDataset,
    chunks: np.ndarray,
    groups: Any,
    *,
    groups_per_batch: int | None,
    proportions: Any,
    controls: Any,
    batch_size: Any,
    **options: Any,
) -> GroupSelection:
    """Return the sets of groups of an epoch. ``chunks``, (n,), is the chunk of each sample of the data set.

    The other arguments are those of `ChunkSampler`, and ``options`` those of `GroupSelection.of`.
    """
    if not len(dataset):
        raise OptionError("groups are given, but the data set is empty: pass a data set with samples")
    batch_size = check_whole("batch_size", batch_size, 1)
    if groups_per_batch is not None:
        groups_per_batch = check_whole("groups_per_batch", groups_per_batch, 1)
    if proportions is not None and (groups_per_batch is not None or controls is not None):
        raise OptionError(
            "proportions and groups_per_batch or controls exclude each other: with groups_per_batch, all groups are "
            "equally often in a batch, as far as their samples suffice; leave out one of them"
        )
    mixture = dataset.mixture if groups is None else None
    names, codes = read_groups(dataset, groups) if mixture is None else (list(mixture.names), mixture.codes)
    control_of = None
    if controls is not None:
        control_of = _controls(names, groups, controls)
        groups_per_batch = groups_per_batch or 1
    noun = "group" if mixture is None else "member"
    shares = None if proportions is None else shares_of(names, proportions, noun=noun)
    if mixture is not None:
        shares = mixture.shares if shares is None else shares
        for number in np.flatnonzero((shares > 0) & (np.bincount(codes, minlength=len(names)) == 0))[:1].tolist():
            raise OptionError(f"proportions has member {names[number]!r}, which has no samples here: give it 0")
        if not shares.any():
            raise OptionError("all members that have a weight above 0 have no samples here: select other samples")
        options["length"] = mixture.epoch
    return GroupSelection.of(
        codes,
        chunks,
        names=names,
        batch_size=batch_size,
        groups_per_batch=groups_per_batch,
        proportions=shares,
        controls=control_of,
        **options,
    )


def read_groups(dataset: ChunkDataset, groups: Any) -> tuple[list[Any], np.ndarray]:
    """Return the names of the groups, and the number of the group of each sample: (n,) int64.

    ``groups`` is an array, (n,), or the name of a field, or several names; then a group is a combination of values,
    and its name is a tuple.
    """
    if isinstance(groups, str):
        return _groups_of_field(dataset, groups)
    if isinstance(groups, (list, tuple)) and groups and all(isinstance(name, str) for name in groups):
        names, codes = [()], np.zeros(len(dataset), np.int64)
        for field in groups:
            own_names, own = _groups_of_field(dataset, field)
            found, codes = np.unique(codes * len(own_names) + own, return_inverse=True)
            names = [(*names[pair // len(own_names)], own_names[pair % len(own_names)]) for pair in found.tolist()]
        return names, codes
    array = np.asarray(groups)
    if array.shape != (len(dataset),) or array.dtype.kind not in "biuUS":
        raise OptionError(
            f"groups is {array.dtype} of shape {array.shape}: pass the name of a field, a list of names, or a whole "
            f"number or a string for each of {count_text(len(dataset), 'sample')}"
        )
    found, codes = np.unique(array, return_inverse=True)
    return found.tolist(), codes


def _groups_of_field(dataset: ChunkDataset, name: str) -> tuple[list[Any], np.ndarray]:
    numbers, codes, categories = dict[Any, int](), np.empty(len(dataset), np.int64), None
    for start, column in read_column(dataset, name):
        missing = np.flatnonzero(~np.broadcast_to(column.has_value, len(column.values)))
        if len(missing):
            quoted = name if name.isidentifier() else f"`{name}`"
            raise OptionError(
                f"groups is {name!r}, which has no value for sample {start + missing[0]}: leave out such samples by "
                f"dataset.where({f'{quoted} == {quoted}'!r})"
            )
        found, own = np.unique(column.values, return_inverse=True)
        of_found = [numbers.setdefault(value, len(numbers)) for value in found.tolist()]
        codes[start : start + len(own)] = np.array(of_found, np.int64)[own]
        categories = column.categories
    values = sorted(numbers)
    ranks = np.empty(len(values), np.int64)
    ranks[[numbers[value] for value in values]] = np.arange(len(values))
    if categories is not None:
        words = categories().tolist()
        values = [words[code] if code < len(words) else code for code in values]
    return values, ranks[codes]


def shares_of(names: Sequence[Any], proportions: Any, argument: str = "proportions", noun: str = "group") -> np.ndarray:
    """Return the proportion of each group: (num_groups,) float64. A list, as in a saved state, has them in order."""
    if isinstance(proportions, str) and proportions == EQUAL:
        return np.ones(len(names))
    if isinstance(proportions, list) and len(proportions) == len(names):
        proportions = dict(zip(names, proportions, strict=True))
    if not isinstance(proportions, Mapping):
        raise OptionError(f"{argument} is {proportions!r}: pass a mapping of {noun}s to numbers, or {EQUAL!r}")
    for group in [group for group in proportions if group not in names][:1]:
        raise OptionError(f"{argument} has {group!r}, but the {noun}s are {names_text(names)}: name one of them")
    for group in [group for group in names if group not in proportions][:1]:
        raise OptionError(f"{argument} lacks the {noun} {group!r}: add it, with 0 to leave its samples out")
    try:
        shares = np.array([float(proportions[group]) for group in names])
    except (TypeError, ValueError):
        shares = np.array([np.nan])
    if not (np.isfinite(shares).all() and (shares >= 0).all() and shares.any()):
        raise OptionError(f"{argument} is {dict(proportions)!r}: pass finite numbers, 0 or more, and one above 0")
    return shares


def _controls(names: list[Any], groups: Any, controls: Any) -> np.ndarray:
    """Return the number of the control group of each group, (num_groups,), which is its own for a control group."""
    if isinstance(groups, (list, tuple)) and isinstance(controls, Mapping):
        for field in [field for field in controls if field not in groups][:1]:
            raise OptionError(f"controls has {field!r}, but groups is {list(groups)!r}: name one of these fields")
        wanted = [tuple(map(controls.get, groups, name)) for name in names]
    elif isinstance(controls, Mapping):
        values = set(controls.values())
        for name in [name for name in names if name not in controls and name not in values][:1]:
            raise OptionError(f"controls lacks the group {name!r}: add it, or leave it out by dataset.where")
        wanted = [controls.get(name, name) for name in names]
    elif isinstance(groups, (list, tuple)):
        raise OptionError(f"controls is {controls!r}, but groups has several fields: pass a mapping of a field to it")
    else:
        wanted = [controls] * len(names)
    numbers = {name: number for number, name in enumerate(names)}
    for name, control in zip(names, wanted, strict=True):
        if control not in numbers:
            raise OptionError(
                f"the controls of group {name!r} are {control!r}, which has no samples; the groups are "
                f"{names_text(names)}: name one of them, or leave the group out by dataset.where"
            )
    found = np.array([numbers[control] for control in wanted], np.int64)
    treated = np.flatnonzero(found != np.arange(len(names)))
    for group in treated[np.isin(found[treated], treated)].tolist()[:1]:
        raise OptionError(f"controls says that {wanted[group]!r} is a control group, but also has controls: choose one")
    if not len(treated):
        raise OptionError(f"controls is {controls!r}, which leaves no other group: name the control group only")
    return found
