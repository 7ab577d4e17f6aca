"""Recognise published layouts of episodes, series and keyed samples, and write the Python code that opens them."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from h5chunk.tools.info.summary import TRUSTED, order_key
from h5chunk.tools.report import python_text

if TYPE_CHECKING:
    from h5chunk.tools.info.report import DatasetInfo

MAX_FIELDS = 8  # fields in the line of Python
BATCH = 64
MIN_SIDE, PATCH = 32, 64  # smallest side of a volume, and largest side of the patches that are suggested
MIN_SAMPLES = 100  # fewer similar datasets are not regarded as samples
FEW_SAMPLES = 9  # but a note says how to read them if they are; also how to read fewer that differ in length
LOOKED_AT = 1000  # datasets from which the paths of samples are guessed
PARTS = ("action", "observations/")  # beginnings of the names of fields in the file of an episode
Shapes = Mapping[str, tuple[int, ...]]  # shapes of the datasets that suit training, by name
Found = tuple[dict[str, str], str]  # dataset of each field, and the other arguments of the reader


class Layout(NamedTuple):
    """A published layout.

    ``find(shapes, num_steps)`` returns the datasets by field and the other arguments of ``reader``, a class of
    `h5chunk`; None if a file has another layout. ``num_steps`` is the number of time steps of a window. Default:
    ``usual_steps``. ``method`` is a call on the object that ``reader`` returns. ``notes`` say what is left out.
    """

    name: str
    find: Callable[[Shapes, int], Found | None]
    usual_steps: int = 1
    reader: str = "Windows"
    method: str = ""
    notes: Sequence[str] = ()


def _groups(shapes: Shapes, num_steps: int) -> Found | None:
    """Recognise robomimic: a group per episode, with ``data/demo_0/actions`` and ``data/demo_0/obs/NAME``."""
    episodes: dict[str, set[str]] = {}
    for name in shapes:
        if match := re.fullmatch(r"data/([^/]+)/(actions|obs/[^/]+)", name):
            episodes.setdefault(match[1], set()).add(match[2])
    if not episodes:
        return None
    own = {name: [shapes[f"data/{each}/{name}"] for each in episodes] for name in set.intersection(*episodes.values())}
    rows = [shape[0] for shape in own.get("actions", ())]
    alike = [
        name for name, of in own.items() if [each[0] for each in of] == rows and len({each[1:] for each in of}) == 1
    ]
    if "actions" not in alike or len(alike) < 2:
        return None
    first = next(iter(episodes))
    named = _ordered({name: shapes[f"data/{first}/{name}"] for name in alike})
    return {name.rpartition("/")[2]: f"data/*/{name}" for name in named}, f"length={num_steps}"


def _ordered(shapes: Shapes) -> list[str]:
    """Return at most MAX_FIELDS names of fields: those with most axes, such as images, first, then actions."""
    return sorted(shapes, key=lambda name: (-len(shapes[name]), not name.startswith("action"), name))[:MAX_FIELDS]


def _one_file_each(shapes: Shapes, num_steps: int) -> Found | None:
    """Recognise ALOHA and ACT: a file per episode, with ``action`` and ``observations/NAME``."""
    if "action" not in shapes or not any(name.startswith("observations/") for name in shapes):
        return None
    rows = shapes["action"][0]
    named = _ordered({name: shape for name, shape in shapes.items() if shape[0] == rows and name.startswith(PARTS)})
    fields = {name.rpartition("/")[2]: name for name in named}
    strides = ", ".join(f"{python_text(name)}: {num_steps}" for name in fields if name != "action")
    return fields, f'length=1, stride={{{strides}}}, padding="edge"'


def _minari(shapes: Shapes, num_steps: int) -> Found | None:
    """Recognise Minari: groups ``episode_0/NAME``, in which observations have one time step more than actions."""
    episodes: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        if match := re.fullmatch(r"(episode_\d+)/(.+)", name):
            episodes.setdefault(match[1], {})[match[2]] = shape
    if not episodes:
        return None
    first = next(iter(episodes.values()))
    names = [
        name
        for name in first
        if all(name in own and "actions" in own and own[name][1:] == first[name][1:] for own in episodes.values())
        and {own[name][0] - own["actions"][0] for own in episodes.values()} in ({0}, {1})
    ]
    fields = {name.rpartition("/")[2]: f"episode_*/{name}" for name in sorted(names)[:MAX_FIELDS]}
    return fields, f"length={num_steps}"


def _flat(shapes: Shapes, num_steps: int) -> Found | None:
    """Recognise stable-worldmodel: the steps of all episodes in one dataset per field, and a list of their lengths."""
    lengths = next((name for name in ("ep_len", "episode_lengths", "ep_lens") if name in shapes), None)
    if lengths is None:
        return None
    others = {name: shape for name, shape in shapes.items() if "/" not in name and not name.startswith("ep_")}
    rows = max((shape[0] for shape in others.values()), default=0)
    names = _ordered({name: shape for name, shape in others.items() if shape[0] == rows})
    return {name: name for name in names}, f"length={num_steps}, episode_lengths={python_text(lengths)}"


def _flags(shapes: Shapes, num_steps: int) -> Found | None:
    """Recognise D4RL: the steps of all episodes in one dataset per field, and flags that mark the last steps."""
    if "observations" not in shapes or "actions" not in shapes:
        return None
    rows = shapes["actions"][0]
    ends = [name for name in ("terminals", "timeouts") if shapes.get(name) == (rows,)]
    names = _ordered(
        {name: shape for name, shape in shapes.items() if "/" not in name and shape[0] == rows and name not in ends}
    )
    arguments = f"length={num_steps}, episode_ends={python_text(ends[0]) if len(ends) == 1 else ends}"
    return ({name: name for name in names}, arguments) if ends else None


def _series(shapes: Shapes, num_steps: int) -> Found | None:
    """Recognise makani: one long series ``fields``, (time, channel, lat, lon)."""
    history = min(1, num_steps - 1)
    arguments = f"length={num_steps - history}, history={history}"
    return ({"fields": "fields"}, arguments) if len(shapes.get("fields", ())) == 4 else None


def _trajectories(shapes: Shapes, num_steps: int) -> Found | None:
    """Recognise The Well: fields ``t0_fields/NAME`` to ``t2_fields/NAME``, (trajectory, time, coordinates...)."""
    named = _ordered({name: shape for name, shape in shapes.items() if re.fullmatch(r"t[012]_fields/[^/]+", name)})
    steps = [shapes[name][:2] for name in named if len(shapes[name]) > 2 and shapes[name][1] >= 5]
    alike = [name for name in named if shapes[name][:2] == steps[0]] if steps else []
    return ({name.partition("/")[2]: name for name in alike}, '(1, 5), channels="last"') if alike else None


def _volumes(shapes: Shapes, _num_steps: int) -> Found | None:
    """Recognise volumes: 3-D datasets ``image/NAME`` and ``mask/NAME``, or ``NAME/image`` and ``NAME/mask``."""
    pairs = {name: name.split("/") for name, shape in shapes.items() if _is_volume(shape)}
    if len(pairs) < 2 or any(len(parts) != 2 for parts in pairs.values()):
        return None
    firsts, lasts = (Counter(parts[place] for parts in pairs.values()) for place in (0, 1))
    if len(pairs) != len(firsts) * len(lasts):  # some volumes lack a field
        return None
    key = int((len(lasts), _num_numbered(lasts)) >= (len(firsts), _num_numbered(firsts)))  # place of the volume's name
    by_volume: dict[str, set[tuple[int, ...]]] = {}
    for name, parts in pairs.items():
        by_volume.setdefault(parts[key], set()).add(shapes[name])
    if len(by_volume) < 2 or any(len(sizes) > 1 for sizes in by_volume.values()):
        return None
    names = sorted(firsts if key else lasts, key=lambda name: (re.search("mask|label|seg", name) is not None, name))
    fields = {name: f"{name}/*" if key else f"*/{name}" for name in names}
    side = min(PATCH, *(min(shapes[name]) for name in pairs))
    return fields, f"({side}, {side}, {side})"


def _is_volume(shape: tuple[int, ...]) -> bool:
    """Return whether a shape is that of a volume rather than of many grey images, whose first axis is far longer."""
    return len(shape) == 3 and min(shape) >= MIN_SIDE and shape[0] <= 4 * max(shape[1:])


def _num_numbered(names: Iterable[str]) -> int:
    return sum(any(letter.isdigit() for letter in name) for name in names)


LAYOUTS = (
    Layout("layout of robomimic, with a group per episode", _groups, 10),
    Layout("layout of ALOHA and ACT, with a file per episode", _one_file_each, 100),
    Layout(
        "layout of Minari, with a group per episode",
        _minari,
        10,
        notes=("observations have one step more than actions: for the next ones, read them again, with shift",),
    ),
    Layout("layout of D4RL, with all episodes one after another, and flags at their ends", _flags, 10),
    Layout("layout of stable-worldmodel, with all episodes one after another", _flat, 4),
    Layout("layout of makani, with a series of channels on a grid", _series, 2),
    Layout(
        "layout of The Well, with trajectories of fields",
        _trajectories,
        reader="Patches",
        method=".tiles(overlap=(0, 4))",
    ),
    Layout("volumes, each of which is a dataset per field", _volumes, reader="Patches"),
)


class Recognised(NamedTuple):
    """A layout that a file has, the datasets of its fields, and lines of Python that create a loader.

    ``samples`` has the paths of datasets, with * for the name of a sample, if each sample is a dataset or group.
    ``notes`` say what the code leaves out.
    """

    name: str
    fields: list[str]
    code: list[str]
    samples: Sequence[str] = ()
    notes: Sequence[str] = ()


def recognise(
    datasets: Sequence[DatasetInfo], path: str, num_steps: int | None = None, *, trusted: bool = False
) -> Recognised | None:
    """Return the layout of episodes or a series that a file has, with the code that opens its windows, or None.

    ``path`` is a Python literal. ``num_steps`` is the number of time steps of a window. Default: the usual number for
    the layout.
    """
    shapes = {item.name.strip("/"): item.shape for item in datasets if item.can_train}
    shapes |= {item.name.strip("/"): (*item.shape[:1], 0, 0, 0) for item in datasets if item.has_images}
    more = TRUSTED if trusted else ""
    for layout in LAYOUTS:
        if (found := layout.find(shapes, num_steps or layout.usual_steps)) is not None and found[0]:
            fields = ", ".join(f"{python_text(name)}: {python_text(of)}" for name, of in found[0].items())
            data = f"data = h5chunk.{layout.reader}({path}, {{{fields}}}, {found[1]}{more}){layout.method}"
            return Recognised(layout.name, list(found[0].values()), loader_code(data), notes=layout.notes)
    if _are_classes(datasets):
        keyed = _keyed_code(["*/*"], path, f', labels={{"label": 0}}{more}')
        code = loader_code(keyed)
        return Recognised("a group for each class, and in it a dataset for each sample", [], code, ["*/*"])
    patterns = _keyed(datasets)
    if not patterns:
        return None
    code = loader_code(_keyed_code(patterns, path, more))
    return Recognised("a dataset or group for each sample", [], code, patterns)


def note_on_samples(datasets: Sequence[DatasetInfo], path: str, *, trusted: bool = False) -> list[str]:
    """Return a note on how to read similar datasets that may be samples, or may be fields with samples as rows."""
    patterns = _keyed(datasets, 2)
    if not patterns:
        return []
    more = TRUSTED if trusted else ""
    notes = [f"if each of the similar datasets is one sample instead: {_keyed_code(patterns, path, more)}"]
    if not any(pattern.endswith("*") for pattern in patterns):  # episodes are groups
        fields = ", ".join(f"{python_text(pattern.split('/')[-1])}: {python_text(pattern)}" for pattern in patterns)
        notes.append(f"if each is an episode of time steps: data = h5chunk.Windows({path}, {{{fields}}}, 16{more})")
    return notes


def _keyed_code(patterns: Sequence[str], path: str, more: str) -> str:
    argument = python_text(patterns[0]) if len(patterns) == 1 else f"[{', '.join(map(python_text, patterns))}]"
    return f"data = h5chunk.Keyed({path}, {argument}{more})"


def loader_code(data: str) -> list[str]:
    return ["import h5chunk", data, f"loader = h5chunk.ChunkLoader(data, {BATCH})"]


def _keyed(datasets: Sequence[DatasetInfo], min_samples: int = MIN_SAMPLES) -> list[str]:
    """Return the paths that many datasets of one type match, with * for the name of a sample.

    The paths are those of fields that `h5chunk.Keyed` can read together: each sample has all of them. They must have at
    least half of the bytes of all datasets in the file.
    """
    items = {item.name.strip("/"): item for item in datasets if item.can_train or item.is_number}
    some = random.Random(0).sample(sorted(items), min(len(items), LOOKED_AT))
    likely = Counter(pattern for name in some for pattern in _patterns(name)).most_common(MAX_FIELDS)
    found: dict[str, dict[str, DatasetInfo]] = {pattern: {} for pattern, _ in sorted(likely)}
    for name, item in items.items():
        for pattern in found.keys() & _patterns(name):
            found[pattern][name[pattern.index("*") : len(name) - len(pattern) + pattern.index("*") + 1]] = item
    alike = {
        pattern: of
        for pattern, of in found.items()
        if len({(item.dtype, len(item.shape), item.shape[1:]) for item in of.values()}) == 1
    }
    most = max(map(len, alike.values()), default=0)
    largest = {pattern: sum(item.num_bytes for item in of.values()) for pattern, of in alike.items() if len(of) == most}
    if most < min_samples:
        return []
    main = max(largest, key=lambda pattern: largest[pattern])
    shapes = {item.shape for item in alike[main].values()}
    if most < (MIN_SAMPLES if all(len(shape) == 1 for shape in shapes) else FEW_SAMPLES) and len(shapes) == 1:
        return []  # columns of a table, or fields of one shape
    if most < FEW_SAMPLES and not all(re.search(r"\d", name) for name in alike[main]):
        return []  # fields of different lengths
    own = {
        pattern: of
        for pattern, of in alike.items()
        if of.keys() == alike[main].keys() and pattern.partition("*")[0] == main.partition("*")[0]
    }
    if 2 * sum(item.stored_bytes for of in own.values() for item in of.values()) < sum(
        item.stored_bytes for item in datasets
    ):
        return []
    return sorted(own, key=lambda pattern: order_key(next(iter(own[pattern].values()))))


def _are_classes(datasets: Sequence[DatasetInfo]) -> bool:
    """Return whether all datasets are numbered samples of one type, in groups such as classes."""
    groups = Counter(item.name.strip("/").rpartition("/")[0] for item in datasets)
    return (
        len(groups) > 1
        and min(groups.values()) >= FEW_SAMPLES
        and all(group and "/" not in group for group in groups)
        and all(item.can_train and len(item.shape) > 1 and re.search(r"\d", item.name[-8:]) for item in datasets)
        and len({(item.dtype, len(item.shape), item.shape[1:]) for item in datasets}) == 1
    )


def _patterns(name: str) -> set[str]:
    """Return the path of a dataset with * in place of each of its names."""
    parts = name.split("/")
    return {"/".join([*parts[:at], "*", *parts[at + 1 :]]) for at in range(len(parts))}
