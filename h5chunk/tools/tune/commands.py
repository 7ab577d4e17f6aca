"""Turn a recommendation into shell commands and lines of Python that run as printed."""

from __future__ import annotations

from pathlib import Path

from h5chunk.store.read.ragged import ImagesField
from h5chunk.tools.measure.checks import CROP
from h5chunk.tools.model.settings import LOADER, Setting
from h5chunk.tools.report import python_text, shell_command
from h5chunk.tools.tune.study import Study

CROPS = "from h5chunk.transforms import RandomResizedCrop"


def tuned_path(study: Study) -> Path:
    """Return the path of the file that the recommended command writes."""
    return study.reader.path.with_name(f"{study.reader.path.stem}-tuned.h5")


def rewrite_command(study: Study, setting: Setting | None = None, *, shuffle: bool = False) -> str:
    """Return the command that rewrites the file, with the chunks of ``setting`` or default chunks.

    Repack cannot shuffle AnnData files, so they are converted if they need shuffling.
    """
    source, target = str(study.reader.path), str(tuned_path(study))
    if study.anndata and shuffle:
        return shell_command(["h5chunk", "convert", source, target])
    parts = ["h5chunk", "repack", source, target]
    if setting is not None and not study.is_ragged:
        parts += ["--chunk-samples", str(setting.chunk_samples)]
    if setting is not None and not study.anndata:
        parts += ["--window-chunks", str(setting.window_chunks)]
    parts += ["--shuffle"] if shuffle else []
    if not {"images", "X"} & {dataset.strip("/") for dataset in study.fields.values()}:
        parts += ["--fields", study.reader.main.dataset]
    return shell_command(parts)


def code_for(study: Study, setting: Setting, device: str) -> list[str]:
    """Return the lines of Python that create the loader of a setting."""
    rewritten = setting.repack
    is_converted = study.anndata and setting.shuffle  # convert renames the fields
    stored = not study.anndata if rewritten else setting.window_chunks == study.facts.window_chunks
    path = python_text(str(tuned_path(study) if rewritten else study.reader.path))
    fields = study.fields if (study.requested_fields or rewritten) and not is_converted else {}
    argument = list(fields) if all(key == fields[key] for key in fields) else fields
    named = f", fields={argument!r}" if fields else ""
    trusted = ", trusted=True" if study.reader.trusted and not rewritten else ""
    window = "" if stored else f", window_chunks={setting.window_chunks}"
    has_images = isinstance(study.reader.ragged, ImagesField)
    crop, crops = (f"[RandomResizedCrop({CROP})]", [CROPS]) if has_images else ("", [])
    transform = f", transforms={crop}" if crop else ""
    data = f"data = h5chunk.ChunkDataset({path}{named}{trusted}{transform})"
    sampler = f"h5chunk.ChunkSampler(data, {study.facts.batch_size}{window})"
    if setting.reader == LOADER:
        target = "" if device == "cpu" else f", device={device!r}"
        if stored:
            opened = "data" if named or trusted else path
            made = f"loader = h5chunk.ChunkLoader({opened}, {study.facts.batch_size}{target})"
            if crop and opened == path:
                made = f"{made[:-1]}, transforms={crop})"
        else:
            made = f"loader = h5chunk.ChunkLoader(data, batch_sampler={sampler}{target})"
        return ["import h5chunk", *crops, *([data] if named or trusted or not stored else []), made]
    workers = f"num_workers={setting.num_workers}" + (", persistent_workers=True" if setting.num_workers else "")
    return [
        "import h5chunk, torch",
        *crops,
        data,
        f"loader = torch.utils.data.DataLoader(data, batch_sampler={sampler}, {workers})",
    ]
