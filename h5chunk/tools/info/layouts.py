"""Recognise published layouts of episodes, series and keyed samples, and write the Python code that opens them."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

from h5chunk.tools.info.summary import options_text, order_key
from h5chunk.tools.report import python_text

if TYPE_CHECKING:
    from h5chunk.tools.info.report import DatasetInfo

MAX_FIELDS = 8  # fields in the line of Python
BATCH = 64
MIN_SIDE, PATCH = 16, 64  # smallest side of a volume, and largest side of the patches that are suggested
MAX_CHANNELS = 8  # of a volume
FIELD_NAMES = re.compile(r"mask|label|seg|raw|image|img|target|gt$")  # are names of fields rather than volumes
TESTS_OR_TRAIN = re.compile(r"(^|[_.])(train|training|test|val|valid|validation|dev)($|[_.])")
EPISODES = re.compile(
    r"(^|[/_])(actions?|obs|observations?|rewards?|qpos|qvel|states?|dones?|traj\w*|episode|demo)($|[/_\d])"
)
VIDEOS = re.compile(rf"{EPISODES.pattern}|(^|[/_])(frames?|video|rgb|cam\w*)($|[/_\d])")  # are no volumes
CLOUDS = re.compile(r"point|cloud|token|mesh|vert|face|particle|hits")  # samples of several lengths, not episodes
NUM_STEPS = 16  # time steps of the windows that are suggested for episodes of unknown layouts
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
    """Recognise volumes: 3-D datasets such as ``image/NAME`` and ``mask/NAME``, ``NAME/image`` or ``scan_1``.

    They may have channels, too. Paths differ in the name of the volume, at one place.
    """
    volumes = {name: shape for name, shape in shapes.items() if _space(shape)[1] and not VIDEOS.search(name.lower())}
    paths = {name: name.split("/") for name in volumes}
    if len(volumes) < 2 or len({len(parts) for parts in paths.values()}) > 1:
        return None
    found = []
    for place in range(len(next(iter(paths.values())))):
        fields: dict[tuple[str, ...], dict[str, tuple[int, ...]]] = {}  # the shape of each volume, by field
        for name, parts in paths.items():
            rest = (*parts[:place], "*", *parts[place + 1 :])
            fields.setdefault(rest, {})[parts[place]] = volumes[name]
        first, *others = fields.values()
        if (
            len(first) > 1
            and all(own.keys() == first.keys() for own in others)  # otherwise, some volumes lack a field
            and all(_space(own[key])[1] == _space(first[key])[1] for own in others for key in first)
            and (others or place < len(rest) - 1 or _num_numbered(first) == len(first))  # no fields of one sample
            and not all(TESTS_OR_TRAIN.search(key) for key in first)
        ):
            is_fields = sum(FIELD_NAMES.search(key) is not None for key in first)
            found.append(((-is_fields, len(first), _num_numbered(first), place), place, fields))
    if not found:
        return None
    _, place, fields = max(found, key=lambda each: each[0])
    at_level = {name.split("/")[place] for name in shapes if name.count("/") >= place}
    keys = {key for own in fields.values() for key in own}
    star = _star(keys, at_level - keys if place == 0 else set())
    if not star:
        return None
    named = {"/".join((*rest[:place], star, *rest[place + 1 :])): own for rest, own in fields.items()}
    order = sorted(named, key=lambda name: (re.search("mask|label|seg", name) is not None, name))
    names = dict(zip(_short(order), order, strict=True))
    return names, _patch_arguments({name: [*named[path].values()] for name, path in names.items()})


def _patch_arguments(volumes: Mapping[str, Sequence[tuple[int, ...]]]) -> str:
    """Return the arguments of Patches other than the datasets: the size, and which of them have channels where."""
    side = min(PATCH, *(min(_space(shape)[1]) for own in volumes.values() for shape in own))
    channels = {name: _space(own[0])[0] for name, own in volumes.items() if _space(own[0])[0]}
    places = {*channels.values()}
    text = f", channels={python_text(min(places))}" if len(places) == 1 else ""
    if len(places) > 1:
        text = f", channels={{{', '.join(f'{python_text(name)}: {python_text(of)}' for name, of in channels.items())}}}"
    return f"({side}, {side}, {side}){text}"


def _space(shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Return where a volume has channels (first, last or "") and its shape in space, which is empty for other shapes.

    The first axis of many grey images is far longer than the others. An array with 1 or 3 last channels is a video.
    """
    channels, space = "", shape
    if len(shape) == 4 and shape[-1] <= min(shape[0], MAX_CHANNELS) and shape[-1] not in (1, 3):
        channels, space = "last", shape[:-1]
    elif len(shape) == 4 and shape[0] <= MAX_CHANNELS < shape[-1]:
        channels, space = "first", shape[1:]
    is_volume = len(space) == 3 and min(space) >= MIN_SIDE and space[0] <= 4 * max(space[1:])
    return (channels, space) if is_volume else ("", ())


def _star(keys: Collection[str], others: Collection[str]) -> str:
    """Return a name with * that matches these names, and none of the others; empty if there is none."""
    if not others:
        return "*"
    first, last = min(keys), max(keys)  # all have the letters that these have in common
    same = takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))
    start = "".join(letter for letter, _ in same).rstrip("0123456789")
    return f"{start}*" if start and not any(name.startswith(start) for name in others) else ""


def _short(patterns: Sequence[str]) -> list[str]:
    """Return a name for each path of a field: its last name without *, or else all names that have none."""
    plain = [
        [name for name in pattern.split("/") if "*" not in name] or [pattern.partition("*")[0].rstrip("_-") or "data"]
        for pattern in patterns
    ]
    last = [names[-1] for names in plain]
    return last if len({*last}) == len(last) else ["_".join(names) for names in plain]


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
    datasets: Sequence[DatasetInfo],
    path: str,
    num_steps: int | None = None,
    *,
    trusted: bool = False,
    attributes_of: Callable[[str, Collection[str]], Sequence[str]] = lambda pattern, keys: (),
) -> Recognised | None:
    """Return the layout of episodes or a series that a file has, with the code that opens its windows, or None.

    ``path`` is a Python literal. ``num_steps`` is the number of time steps of a window. Default: the usual number for
    the layout. ``attributes_of(pattern, keys)`` returns the attributes that samples have as numbers.
    """
    shapes = {item.name.strip("/"): item.shape for item in datasets if item.can_train}
    shapes |= {item.name.strip("/"): (*item.shape[:1], 0, 0, 0) for item in datasets if item.has_images}
    for layout in LAYOUTS:
        if (found := layout.find(shapes, num_steps or layout.usual_steps)) is not None and found[0]:
            fields = ", ".join(f"{python_text(name)}: {python_text(of)}" for name, of in found[0].items())
            more = options_text(datasets, found[0].values(), trusted=trusted)
            data = f"data = h5chunk.{layout.reader}({path}, {{{fields}}}, {found[1]}{more}){layout.method}"
            return Recognised(layout.name, list(found[0].values()), loader_code(data), notes=layout.notes)
    if _are_classes(datasets):
        keyed = _keyed_code(["*/*"], path, f', labels={{"label": 0}}{options_text(datasets, ["*/*"], trusted=trusted)}')
        code = loader_code(keyed)
        return Recognised("a group for each class, and in it a dataset for each sample", [], code, ["*/*"])
    similar = _keyed(datasets)
    is_many = similar is not None
    similar = similar or _keyed(datasets, 2)
    if similar is None:
        return None
    patterns = similar.patterns
    more = options_text(datasets, patterns, trusted=trusted)
    names = attributes_of(patterns[0], similar.keys) if similar.is_alone else ()
    attributes = f", attributes=[{', '.join(map(python_text, names))}]" if names else ""
    keyed = _keyed_code(patterns, path, f"{attributes}{more}") if similar.is_alone else ""
    windows = similar.windows_code(path, num_steps, more)
    if keyed and (is_many or not windows or not similar.are_episodes) and not (is_many and similar.has_actions):
        notes = [f"if each is an episode of time steps: {windows}"] if windows and not is_many else []
        name = "a dataset or group for each sample"
        return Recognised(name, [], loader_code(keyed), patterns if is_many else (), notes)
    if not windows:
        return None
    notes = [f"if each of the similar datasets is one sample instead: {keyed}"] if keyed else []
    if similar.are_equal and not similar.are_episodes:
        notes = ["each window is a whole dataset: * of h5chunk.Keyed would match others, too"]
    name = "similar datasets, whose rows are read as time steps"
    return Recognised(name, similar.episode_patterns(), loader_code(windows), notes=notes)


def note_on_volume(
    datasets: Sequence[DatasetInfo], fields: Sequence[str], path: str, *, trusted: bool = False
) -> list[str]:
    """Return a note on how to read patches if the main field may be a volume, or one of several; empty otherwise."""
    items = {item.name: item for item in datasets if item.can_train}
    if not fields or fields[0] not in items or VIDEOS.search(fields[0].lower()):
        return []
    main, space = fields[0], _space(items[fields[0]].shape)[1]
    others = [name for name, item in items.items() if item.num_axes == 3 and _is_beside(name, main)]
    if items[main].num_axes == 3 and others and not any(map(TESTS_OR_TRAIN.search, main.split("/"))):
        pairs = zip(main.split("/"), others[0].split("/"), strict=True)
        volumes = ["/".join(one if one == two else "*" for one, two in pairs)]
        what = f"{others[0]!r} is like it, and not opened; if they are volumes"
        shapes = [items[name].shape for name in (main, *others)]
    elif space and min(space) >= 2 * MIN_SIDE:
        volumes = [name for name in fields if name in items and _space(items[name].shape)[1] == space]
        what, shapes = f"if {main!r} is a volume instead of {space[0]:,} images", [items[main].shape]
    else:
        return []
    names = dict(zip(_short(volumes), volumes, strict=True))
    size = min(PATCH, *(min(_space(shape)[1] or shape) for shape in shapes))
    channels = _space(shapes[0])[0]
    arguments = f"({size}, {size}, {size})" + (f", channels={python_text(channels)}" if channels else "")
    listed = ", ".join(f"{python_text(name)}: {python_text(of)}" for name, of in names.items())
    code = (
        f"data = h5chunk.Patches({path}, {{{listed}}}, {arguments}{options_text(datasets, volumes, trusted=trusted)})"
    )
    return [f"{what}: {code}"]


def _is_beside(name: str, other: str) -> bool:
    """Return whether two paths differ in the name of one group."""
    parts, own = other.split("/"), name.split("/")
    return len(own) == len(parts) and own[-1] == parts[-1] and sum(map(str.__ne__, own, parts)) == 1


def _keyed_code(patterns: Sequence[str], path: str, more: str) -> str:
    argument = python_text(patterns[0]) if len(patterns) == 1 else f"[{', '.join(map(python_text, patterns))}]"
    return f"data = h5chunk.Keyed({path}, {argument}{more})"


def loader_code(data: str) -> list[str]:
    return ["import h5chunk", data, f"loader = h5chunk.ChunkLoader(data, {BATCH})"]


class Similar(NamedTuple):
    """Similar datasets, by the paths that they match, with * for the name of a sample or an episode.

    ``is_alone`` says whether nothing else matches the *. The datasets of each path are in the order of ``keys``.
    """

    datasets: dict[str, list[DatasetInfo]]
    keys: list[str]
    others: set[str]  # names beside those that * stands for

    @property
    def patterns(self) -> list[str]:
        return [*self.datasets]

    @property
    def is_alone(self) -> bool:
        return not self.others

    @property
    def lengths(self) -> list[int]:
        """The lengths of the datasets of the first path that have any."""
        return next(([item.shape[0] for item in of] for of in self.datasets.values() if of[0].shape), [])

    @property
    def are_equal(self) -> bool:
        return len({*self.lengths}) == 1

    @property
    def has_actions(self) -> bool:
        """Whether the names are those of episodes, and no sample has a label."""
        if not all(of[0].shape for of in self.datasets.values()):
            return False
        return any(EPISODES.search(pattern.lower()) for pattern in (*self.datasets, self.keys[0]))

    @property
    def are_episodes(self) -> bool:
        """Whether the datasets seem to be episodes of time steps rather than samples."""
        if all(pattern.endswith("*") for pattern in self.datasets) or CLOUDS.search(" ".join(self.datasets).lower()):
            return False
        return self.has_actions or (not self.are_equal and any(of[0].num_axes > 1 for of in self.datasets.values()))

    def episode_patterns(self) -> list[str]:
        """Return the paths for Windows: those of datasets that have equally many rows in each episode."""
        star = _star(self.keys, self.others)
        rows = self.lengths
        alike = [
            pattern for pattern, of in self.datasets.items() if [item.shape[:1] for item in of] == [(n,) for n in rows]
        ]
        return [pattern.replace("*", star) for pattern in alike[:MAX_FIELDS]] if star else []

    def windows_code(self, path: str, num_steps: int | None, more: str) -> str:
        """Return the line that opens windows; empty if there are none."""
        patterns = self.episode_patterns()
        if not patterns or (self.is_alone and all(pattern.endswith("*") for pattern in patterns)):
            return ""
        most = self.lengths[0] if self.are_equal and not self.are_episodes else NUM_STEPS
        fields = zip(_short(patterns), patterns, strict=True)
        listed = ", ".join(f"{python_text(name)}: {python_text(pattern)}" for name, pattern in fields)
        return f"data = h5chunk.Windows({path}, {{{listed}}}, {num_steps or min(most, *self.lengths)}{more})"


def _keyed(datasets: Sequence[DatasetInfo], min_samples: int = MIN_SAMPLES) -> Similar | None:
    """Return the similar datasets of a file, of which each may be a sample; None if there are none.

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
        return None
    main = max(largest, key=lambda pattern: largest[pattern])
    shapes = {item.shape for item in alike[main].values()}
    if most < (MIN_SAMPLES if all(len(shape) == 1 for shape in shapes) else FEW_SAMPLES) and len(shapes) == 1:
        return None  # columns of a table, or fields of one shape
    if most < FEW_SAMPLES and not all(re.search(r"\d", name) for name in alike[main]):
        return None  # fields of different lengths
    own = {
        pattern: of
        for pattern, of in alike.items()
        if of.keys() == alike[main].keys() and pattern.partition("*")[0] == main.partition("*")[0]
    }
    if 2 * sum(item.stored_bytes for of in own.values() for item in of.values()) < sum(
        item.stored_bytes for item in datasets
    ):
        return None
    keys, start = [*alike[main]], main.partition("*")[0]
    beside = {
        item.name.strip("/")[len(start) :].partition("/")[0]
        for item in datasets
        if item.name.strip("/").startswith(start)
    }
    patterns = sorted(own, key=lambda pattern: order_key(next(iter(own[pattern].values()))))
    return Similar({pattern: [own[pattern][key] for key in keys] for pattern in patterns}, keys, beside - {*keys})


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
