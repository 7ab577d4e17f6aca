"""Conversions that are stopped at a stage, and image sources of each kind."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Stop(BaseException):
    """As Ctrl-C, but nobody else's."""


def stop_at(stage: str, least: int) -> Callable[[str, int, int | None], None]:
    """Progress that stops a conversion after so many samples or entries."""

    def progress(current: str, done: int, total: int | None) -> None:
        if current == stage and done >= least:
            raise Stop

    return progress


def packed(kind: str, root: Path) -> dict[str, Any]:
    """Arguments of convert for the images of a folder, in this kind of source."""
    if kind == "zip":
        return {"source": shutil.make_archive(str(root), "zip", root)}
    if kind == "tar":
        return {"source": shutil.make_archive(str(root), "tar", root)}
    if kind == "manifest":
        names = sorted(str(path.relative_to(root)) for path in root.rglob("*.png"))
        root.with_suffix(".csv").write_text("path,number\n" + "".join(f"{name},{i}\n" for i, name in enumerate(names)))
        return {"source": root, "manifest": root.with_suffix(".csv")}
    return {"source": root}
