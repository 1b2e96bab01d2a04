"""Prepare a question set for TensorFlow Datasets from its official files.

    python -m mujica_jax.tasks.prepare hotpotqa --from DIR
    python -m mujica_jax.eval ... --task.kind hotpotqa --task.data-dir tfds:hotpotqa

`--help` lists the question sets and the official files that each one needs. If a preparation is
killed, start the same command again.
"""

import argparse
import contextlib
import fcntl
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from mujica_jax.errors import UserError
from mujica_jax.runtime.standard_output import run_program
from mujica_jax.storage.local import visible_files
from mujica_jax.tasks import data_folder
from mujica_jax.tasks.official_files import DOWNLOADS, OFFICIAL_FILES
from mujica_jax.tasks.sources import describe_sources, question_files

LOCK = ".lock"
# Pattern of the folders that TensorFlow Datasets is still writing.
INCOMPLETE = "incomplete.*"
# Messages of other libraries are cut to this length.
MAX_REASON_CHARACTERS = 200
ARCHIVES = ("*.zip", "*.tar", "*.tar.gz", "*.tgz")


def main(arguments: Sequence[str] | None = None) -> int:
    """Prepare the question set that the arguments name, and return the exit status.

    0: the set is prepared, or was prepared before. 2: a mistake of the user. 130: interrupted.
    """
    options = _parser().parse_args(arguments)
    try:
        kind = data_folder.kind_of(options.name)
        print(prepare(kind, official_folder=options.official_folder, data_dir=options.data_dir))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted, nothing was kept: start the same command again", file=sys.stderr)
        return 130
    return 0


def prepare(kind: str, *, official_folder: str | None, data_dir: str | None) -> str:
    """Prepare a question set in `data_dir`, unless it is already there. Return a sentence about it.

    Without `official_folder` the official files are downloaded. This is possible for some sets
    only. Raises UserError.
    """
    root = _local_folder(data_dir or data_folder.default_folder())
    source = None if official_folder is None else Path(official_folder).expanduser()
    if source is None and kind not in DOWNLOADS:
        raise UserError(
            f"{kind} cannot be downloaded: {how_to_get(kind)} and give it with --from DIR"
        )
    if source is not None:
        _check_official_folder(source, kind)

    home = root / data_folder.builder_name(kind)
    folder = home / data_folder.VERSION
    with _errors_of_disk(kind, root):
        existed_before = folder.exists()
        if not existed_before:
            data_folder.require_tensorflow(f"preparing {kind}")
            with _locked(home):
                _download_and_prepare(kind, source, root)
        sizes = data_folder.check_prepared(folder, kind)
        if existed_before and source is not None:
            _check_same_sources(folder, source, kind)

    # Describe the prepared set, and the flags with which a run reads it.
    examples = ", ".join(f"{size:,} in {split}" for split, size in sizes.items())
    if data_dir is None:
        name = f"{data_folder.PREFIX}{kind}"
    else:
        name = f"{data_folder.PREFIX}{root}/{kind}"
    state = "was already prepared" if existed_before else "is prepared"
    return f"{folder} {state} ({examples}): --task.kind {kind} --task.data-dir {name}"


def how_to_get(kind: str) -> str:
    """Return the advice where to get the official files of a set and where to put them."""
    official = OFFICIAL_FILES[kind]
    names = " and ".join(official.names)
    return f"put {names} (about {official.size}, from {official.page}), plain or .gz, into a folder"


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog=data_folder.PREPARE,
        description="Prepare a question set for TensorFlow Datasets from its official files.",
        epilog=_help_of_sets(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "name", metavar="NAME", help=f"question set to prepare: {', '.join(OFFICIAL_FILES)}"
    )
    parser.add_argument(
        "--from",
        dest="official_folder",
        metavar="DIR",
        help="folder with the official files, plain or .gz (default: download them)",
    )
    parser.add_argument(
        "--data-dir",
        metavar="DATA",
        help="folder for prepared data sets (default: $TFDS_DATA_DIR, or ~/tensorflow_datasets)",
    )
    return parser


def _help_of_sets() -> str:
    """Return the part of the help text that lists the question sets and their files."""
    lines = ["official files:"]
    for kind, official in OFFICIAL_FILES.items():
        lines.append(f"  {kind}: {' and '.join(official.names)} (about {official.size})")
        if official.optional:
            lines.append(f"      also read, if present: {official.optional}")
        lines.append(f"      from {official.page}")
    lines.append(f"Without --from, these sets can be downloaded: {', '.join(DOWNLOADS)}.")
    return "\n".join(lines)


def _local_folder(data_dir: str) -> Path:
    """Return a folder as a path. Raises UserError if it is not on a local disk."""
    if "://" in data_dir:
        raise UserError(
            f"a data set is prepared on a local disk, but the folder is {data_dir}: give a local "
            "folder with --data-dir, and copy it afterwards"
        )
    return Path(data_dir).expanduser()


def _check_official_folder(folder: Path, kind: str) -> None:
    """Check that a folder has files with questions.

    Raises UserError. The message says which files the set needs.
    """
    if not folder.exists():
        problem = "does not exist"
    elif not folder.is_dir():
        problem = "is a file"
    elif not question_files(folder, kind):
        problem = f"has no file with questions of {kind}"
    else:
        return

    archives: list[str] = []
    for pattern in ARCHIVES:
        archives += [file.name for file in visible_files(folder, pattern)]
    if archives:
        advice = f"unpack {', '.join(archives)} there"
    else:
        advice = f"{how_to_get(kind)} and give that folder"
    raise UserError(f"--from is {folder}, which {problem}: {advice}")


@contextlib.contextmanager
def _locked(home: Path) -> Iterator[None]:
    """Lock the folder of a data set for this process, and remove remains of a killed process.

    Raises UserError if another process holds the lock.
    """
    home.mkdir(parents=True, exist_ok=True)
    with (home / LOCK).open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"another process is preparing {home}: wait for it, or give another --data-dir"
            ) from error
        for leftover in home.glob(INCOMPLETE):
            shutil.rmtree(leftover)
        yield


@contextlib.contextmanager
def _errors_of_disk(kind: str, root: Path) -> Iterator[None]:
    """Turn OSError, as a full or read-only disk raises it, into UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{kind} could not be prepared in {root} ({_shortened(error)}): free space, make the "
            "official files readable and the folder writable, or give another --data-dir"
        ) from error


def _download_and_prepare(kind: str, source: Path | None, root: Path) -> None:
    """Prepare the set with TensorFlow Datasets. The folder gets its final name when complete.

    `source` is the folder with the official files, or None to download them. Raises UserError, or
    OSError for an error of the disk.
    """
    import tensorflow
    import tensorflow_datasets
    from tensorflow_datasets.core.download.download_manager import NonMatchingChecksumError

    from mujica_jax.tasks.open_domain.builders import BUILDERS

    if not sys.stderr.isatty():
        tensorflow_datasets.disable_progress_bar()
    config = tensorflow_datasets.download.DownloadConfig(manual_dir=source)
    download_errors: tuple[type[Exception], ...] = ()
    if source is None:
        download_errors = (
            OSError,
            tensorflow_datasets.download.DownloadError,
            NonMatchingChecksumError,
        )
    try:
        # stdout is for the command's result, so progress messages go to stderr.
        with contextlib.redirect_stdout(sys.stderr), data_folder.without_root_handler():
            builder = BUILDERS[kind](data_dir=root)
            builder.download_and_prepare(download_config=config)
    except download_errors as error:
        raise UserError(
            f"{kind} could not be downloaded ({_shortened(error)}): {how_to_get(kind)}, and give "
            "it with --from DIR"
        ) from error
    except UserError:
        raise
    except Exception as error:
        # For a full disk TensorFlow has its own errors, which TensorFlow Datasets wraps.
        for cause in _causes(error):
            if isinstance(cause, (OSError, tensorflow.errors.OpError)):
                raise OSError(str(cause)) from error
        raise


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error, its cause, the cause of that, and so on."""
    while error is not None:
        yield error
        error = error.__cause__


def _shortened(error: Exception) -> str:
    """Return the message of an error, cut to MAX_REASON_CHARACTERS."""
    return textwrap.shorten(str(error), MAX_REASON_CHARACTERS) or type(error).__name__


def _check_same_sources(folder: Path, source: Path, kind: str) -> None:
    """Check that an existing prepared folder was made from the same official files.

    Raises UserError.
    """
    prepared_sources = data_folder.sources_of(folder, kind)
    new_sources = describe_sources(source, kind)
    names = sorted(prepared_sources.keys() | new_sources.keys())
    different = [name for name in names if prepared_sources.get(name) != new_sources.get(name)]
    if prepared_sources and different:
        raise UserError(
            f"{folder} was already prepared, but from other files than those in {source} "
            f"({', '.join(different)}): remove {folder} first, or give another --data-dir"
        )


if __name__ == "__main__":
    raise SystemExit(run_program(main))
