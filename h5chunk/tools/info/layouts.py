"""Recognise published layouts of episodes and series, and write the line of Python that opens one as windows."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from h5chunk.tools.report import python_text

if TYPE_CHECKING:
    from h5chunk.tools.info.report import DatasetInfo

MAX_FIELDS = 8  # fields in the line of Python
BATCH = 64
PARTS = ("action", "observations/")  # of the names in an episode's file
Lengths = Mapping[str, tuple[int, ...]]  # the shapes of datasets that suit training, by name
Found = tuple[dict[str, str], str]  # datasets by field, and the other arguments of `h5chunk.Windows`


class Layout(NamedTuple):
    """A published layout: its name, and a function that returns what opens a file as windows, None if it differs."""

    name: str
    find: Callable[[Lengths], Found | None]


def _groups(shapes: Lengths) -> Found | None:
    """Find a group for each episode, as robomimic has them: ``data/demo_0/actions``, ``data/demo_0/obs/NAME``."""
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
    return {name.rpartition("/")[2]: f"data/*/{name}" for name in named}, "length=10"


def _ordered(shapes: Lengths) -> list[str]:
    """Return the names of fields, images first, and no more than a line can have."""
    return sorted(shapes, key=lambda name: (-len(shapes[name]), not name.startswith("action"), name))[:MAX_FIELDS]


def _one_file_each(shapes: Lengths) -> Found | None:
    """Find the parts of an episode that is a file, as ALOHA and ACT have them: ``action``, ``observations/...``."""
    if "action" not in shapes or not any(name.startswith("observations/") for name in shapes):
        return None
    rows = shapes["action"][0]
    named = _ordered({name: shape for name, shape in shapes.items() if shape[0] == rows and name.startswith(PARTS)})
    fields = {name.rpartition("/")[2]: name for name in named}
    strides = ", ".join(f"{python_text(name)}: 100" for name in fields if name != "action")
    return fields, f'length=1, stride={{{strides}}}, padding="edge"'


def _flat(shapes: Lengths) -> Found | None:
    """Find fields of all episodes, one after another, beside a list of lengths, as stable-worldmodel has them."""
    lengths = next((name for name in ("ep_len", "episode_lengths", "ep_lens") if name in shapes), None)
    if lengths is None:
        return None
    others = {name: shape for name, shape in shapes.items() if "/" not in name and not name.startswith("ep_")}
    rows = max((shape[0] for shape in others.values()), default=0)
    names = _ordered({name: shape for name, shape in others.items() if shape[0] == rows})
    return {name: name for name in names}, f"length=4, episode_lengths={python_text(lengths)}"


def _series(shapes: Lengths) -> Found | None:
    """Find one long series of channels on a grid, as makani has it: ``fields``, (time, channel, lat, lon)."""
    return ({"fields": "fields"}, "length=1, history=1") if len(shapes.get("fields", ())) == 4 else None


LAYOUTS = (
    Layout("robomimic: a group for each episode", _groups),
    Layout("ALOHA and ACT: a file for each episode", _one_file_each),
    Layout("stable-worldmodel: all episodes, one after another", _flat),
    Layout("makani: a series of channels on a grid", _series),
)


def recognise(datasets: Sequence[DatasetInfo], path: str) -> tuple[str, list[str]]:
    """Return the name of a file's layout, and lines of Python that make a loader of its windows; empty if unknown."""
    shapes = {item.name.strip("/"): item.shape for item in datasets if item.can_train}
    for layout in LAYOUTS:
        if (found := layout.find(shapes)) is not None and found[0]:
            fields = ", ".join(f"{python_text(name)}: {python_text(of)}" for name, of in found[0].items())
            data = f"data = h5chunk.Windows({python_text(path)}, {{{fields}}}, {found[1]})"
            return layout.name, ["import h5chunk", data, f"loader = h5chunk.ChunkLoader(data, {BATCH})"]
    return "", []
