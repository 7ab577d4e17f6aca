"""Convert a source of any kind into one HDF5 file, or a folder of files."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from h5chunk.errors import OptionError
from h5chunk.paths import takes_paths
from h5chunk.sample_source import OpenContext
from h5chunk.sources.matrix.block import SparseSource
from h5chunk.sources.open import choose_options, describe, find_kind
from h5chunk.sources.recognise import is_path
from h5chunk.store.write.journal import has_command_id
from h5chunk.store.write.output import check_folder
from h5chunk.store.write.part_file import check_not_source, check_output, parse_output
from h5chunk.tools.convert.like import Like
from h5chunk.tools.convert.matrix import convert_matrix, explain_memory_error
from h5chunk.tools.convert.options import MatrixOptions, SampleOptions
from h5chunk.tools.convert.report import ConvertReport, MatrixReport
from h5chunk.tools.convert.run import Notify, SampleRun
from h5chunk.tools.convert.samples import open_context, prepare, split_job
from h5chunk.tools.progress import Progress
from h5chunk.tools.repack.options import TUNED, read_tuned
from h5chunk.tools.sources import downloads
from h5chunk.tools.upload import uploads


@takes_paths("source", "output")
@uploads
@downloads
def convert(
    source: Any,
    output: str | os.PathLike[str],
    *,
    format: str | None = None,
    tuned: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
    notify: Notify | None = None,
    client: Any = None,
    **options: Any,
) -> ConvertReport | MatrixReport:
    """Convert a source of any kind into one HDF5 file, or a folder of several files.

    The output appears under its name once it is complete and on disk. The same source and options give the same bytes,
    with any number of workers. If a conversion is stopped by Ctrl-C, a full disk, an unusable sample or a signal, the
    finished work is kept in ``.NAME.h5chunk-part`` beside the output, and the same call continues it. The conversion of
    a matrix starts over, unless it is written as shards.

    Parameters
    ----------
    source : path or object
        Images: a folder with one folder per class, a flat folder, or either in a .zip or .tar; folders ``images`` and
        ``masks`` side by side; or a folder with Hugging Face's ``metadata.csv`` or ``.jsonl``. A sparse matrix: a file
        of (row, column[, value]) lines or columns, such as MovieLens' ratings.csv, .npz of scipy, Matrix Market,
        libsvm, .h5ad, 10x .h5, or a 10x folder (its cells become the samples). Several matrices as one: a folder of
        .h5ad files, of files of entries or of 10x folders, a glob pattern, or a list of paths. Arrays: .npy, .npz, an
        array, or a dict of arrays. A table: .parquet, or delimited text with one sample per line, such as iris.csv; or
        a folder of such files. A data set in Python: any object with ``len()`` and indexing, such as those of
        torchvision and Hugging Face. Or the URL of a file, or of a folder or pattern in an object store, or a list of
        URLs: the files are downloaded to a hidden folder beside the output, which is kept until the conversion
        succeeds.
    output : path
        The file to create, or the folder if ``shards``, ``shard_bytes`` or ``split_files`` is set. It may be a URL in
        an object store (``s3://``, ``gs://``, ``az://``): files are first written to ``~/.cache/h5chunk``, and uploaded
        as soon as they are complete, the first shard last.
    format : str, optional
        Kind of the source, if its name and first bytes do not identify it: see `h5chunk.sources.kinds.KINDS`.
    tuned : path, optional
        JSON file saved by `h5chunk.tune`. Its ``chunk_samples`` is used unless that option is set.
    overwrite : bool
        Whether to replace a file at ``output``, or a folder that contains only shards or split files.
    dry_run : bool
        Write nothing, and predict the report from the source and a few of its samples.
    progress : callable, optional
        Called as ``progress(stage, done, total)``; ``total`` is None while it is unknown.
    notify : callable, optional
        Called with each message for the user, for example that an unfinished conversion is continued.
    client : optional
        Dask cluster that writes the shards: a ``distributed.Client``, the address of a scheduler, the path of a
        scheduler file, or ``local:N`` for N processes. All workers must see the source and the output. If the output is
        a URL, each worker uploads its shards, and temporary files are stored beside the output until the end. A source
        that is a URL is downloaded once, by the calling process. All workers must see the download, which is beside the
        output, or in ``h5chunk`` in ``$XDG_CACHE_HOME`` (default ``~/.cache``) if the output is a URL, too. Several
        workers read a matrix together if it is .h5ad, 10x .h5, .npy, .parquet, uncompressed text with ids, or several
        files; one worker reads .npz, .mtx, libsvm and compressed text, and the others only sort and write.
    **options
        Options for reading the source: the fields of its class of options, such as
        `h5chunk.sources.kinds.ImageSourceOptions`. Options for writing: the fields of
        `h5chunk.tools.convert.options.SampleOptions`, or of `MatrixOptions` for a sparse matrix.
        ``h5chunk convert --help`` lists all of them.

    Returns
    -------
    ConvertReport or MatrixReport

    Raises
    ------
    SourceError, SampleError
        The source cannot be used; the message names the sample and the reason.
    OutputError
        The output cannot be written, or ``output`` exists and was made by another call; then it is left unchanged.
    OptionError
        An option does not exist, does not apply to the source, or has an invalid value.
    """
    started = time.perf_counter()
    if tuned is not None:
        settings, _ = read_tuned(tuned)
        if settings.chunks:
            raise OptionError(
                f"{os.fspath(tuned)}: recommends chunks of parts of samples, which only repack writes: convert without "
                "tuned, and pass the file to h5chunk repack --tuned"
            )
        options = {"chunk_samples": settings.chunk_samples, **options}
        unused = [name for name in TUNED if name != "chunk_samples" and getattr(settings, name) is not None]
        if unused and notify is not None:
            notify(f"{os.fspath(tuned)}: convert does not use {', '.join(unused)}, which only repack uses")
    if client is not None:  # workers may run in other folders
        source = _absolute(source)
    like = Like.of(options["like"]) if options.get("like") is not None else None
    opened, path, write_options, source_options = _open(source, output, format, overwrite, options, progress, like)
    if client is not None and not write_options.is_sharded:
        raise OptionError("client (--dask) requires shards, because each task writes one: add shards (--shards N)")
    if isinstance(write_options, MatrixOptions):
        return convert_matrix(
            opened,
            path,
            write_options,
            source_options=source_options,
            overwrite=overwrite,
            dry_run=dry_run,
            progress=progress,
            notify=notify,
            client=client,
        )
    job = prepare(opened, path, write_options)
    if like is not None:
        job = like.fit(job, describe(source), new_classes=write_options.new_classes)
    files = split_job(job, write_options)
    run = SampleRun(job, files, overwrite, dry_run, progress, notify, started, client=client)
    return run.report(opened.notes)


def _absolute(source: Any) -> Any:
    if isinstance(source, (list, tuple)) and all(map(is_path, source)):
        return [os.path.abspath(path) for path in source]
    return os.path.abspath(source) if is_path(source) else source


def _open(
    source: Any,
    output: str | os.PathLike[str],
    format: str | None,
    overwrite: bool,
    options: dict[str, Any],
    progress: Progress | None,
    like: Like | None,
) -> tuple[Any, Path, SampleOptions | MatrixOptions, dict[str, Any]]:
    """Validate the options and the output path, and open the source.

    Returns the source, the output path, the options for writing, and the options for reading that differ from their
    defaults.
    """
    kind = find_kind(source, format)
    if like is not None:
        options = {"chunk_samples": like.chunk_samples, **like.options_for(kind, options)}
    groups = (MatrixOptions, SampleOptions) if issubclass(kind, SparseSource) else (SampleOptions, MatrixOptions)
    source_options, write_options = choose_options(kind, source, options, (kind.Options, groups[0]), groups[1])
    is_folder = write_options.is_sharded
    path = parse_output(output, folder=is_folder)
    check_not_source(path, *([source] if is_path(source) else []), *source_options.paths(), *write_options.paths())
    (check_folder if is_folder else check_output)(path, overwrite=overwrite or has_command_id(path))
    if isinstance(write_options, SampleOptions):
        context = replace(open_context(write_options, path, progress), is_guessed=format is None)
        opened = kind.open(source, source_options, context)
        if like is not None:  # their dtypes and codes change, so they must be known before samples are read
            opened.read_columns()
    else:
        with explain_memory_error(write_options.memory_bytes):
            context = OpenContext(
                write_options.memory_bytes,
                with_times=write_options.needs_times,
                is_guessed=format is None,
                format=format,
            )
            opened = kind.open(source, source_options, context)
        check_not_source(path, *opened.files())
    return opened, path, write_options, source_options.non_defaults()
