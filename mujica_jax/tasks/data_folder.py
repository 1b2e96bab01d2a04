"""Find the folder that `task.data_dir` names.

`task.data_dir` is a folder of official files, or the name of a data set that `python -m
mujica_jax.tasks.prepare` has prepared for TensorFlow Datasets:

    tfds:NAME            in $TFDS_DATA_DIR, or in ~/tensorflow_datasets without that variable
    tfds:FOLDER/NAME     in another folder, which may be in a bucket
    tfds:NAME:VERSION    one version; without it the newest version is used

TensorFlow is needed to read a folder (`open_domain/builders.py`), but not to find it.
"""

import contextlib
import dataclasses
import difflib
import json
import logging
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

from mujica_jax.errors import UserError
from mujica_jax.runtime import distributed
from mujica_jax.runtime.extras import import_extra, require_extra
from mujica_jax.storage.run_directory import local_folder, run_path
from mujica_jax.tasks.official_files import OFFICIAL_FILES

PREFIX = "tfds:"
# The names of our data sets in TensorFlow Datasets begin with this prefix.
BUILDER_PREFIX = "mujica_"
# Version of the data sets that this program prepares.
VERSION = "2.1.0"
# This file is written last, so a folder with this file is complete.
PREPARED = "dataset_info.json"
FEATURES = "features.json"
# Bytes that a TFRecord file adds to each record: its length and two checksums.
TFRECORD_BYTES = 16
# This file of a prepared folder lists the size and the checksum of each official file.
SOURCES_FILE = "official_files.json"
PREPARE = "python -m mujica_jax.tasks.prepare"
# The extra that installs TensorFlow Datasets and TensorFlow.
EXTRA = "tfds"
# Other names of the data sets, in lower case and without punctuation.
OTHER_NAMES = {
    "2wiki": "two_wiki",
    "2wikimultihop": "two_wiki",
    "2wikimultihopqa": "two_wiki",
    "hotpot": "hotpotqa",
    "qald": "qald10",
    "naturalquestions": "nq",
    "nqopen": "nq",
}
_version = re.compile(r"\d+\.\d+\.\d+")


class _HasData(Protocol):
    """The part of a task's configuration that names its data."""

    @property
    def kind(self) -> str: ...
    @property
    def data_dir(self) -> str: ...


Task = TypeVar("Task", bound=_HasData)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreparedName:
    """The parts of `tfds:FOLDER/NAME:VERSION`."""

    folder: str
    # The task's kind, such as `hotpotqa`.
    kind: str
    # None: the newest version.
    version: str | None
    # Whether no folder was named, so that `folder` is the default one.
    is_default_folder: bool


def with_data_folder(task: Task) -> Task:
    """Return the task's configuration, with `data_dir` replaced by the folder that it names."""
    folder = data_folder(task.data_dir, task.kind)
    return dataclasses.replace(task, data_dir=str(folder))  # type: ignore[type-var]


def data_folder(data_dir: str, kind: str) -> Path:
    """Return the folder with the questions of a task of this kind.

    Raises UserError for a data set that is unknown, not prepared, of another kind or damaged. The
    files of a plain folder are not checked here; the task checks them.
    """
    folder = _prepared_folder(data_dir, kind) if data_dir.startswith(PREFIX) else Path(data_dir)
    if is_prepared(folder) or (folder / FEATURES).is_file():
        check_prepared(folder, kind)
    return folder


def check_data_dir(task: object) -> None:
    """Check a `data_dir` that names a data set of TensorFlow Datasets, before the task is built.

    A data set in a bucket is not checked here, but when the task is built. Raises UserError.
    """
    data_dir = getattr(task, "data_dir", None)
    kind = getattr(task, "kind", "")
    if not isinstance(data_dir, str) or not data_dir.startswith(PREFIX):
        return
    if parse_name(data_dir).folder.startswith("gs://"):
        return
    data_folder(data_dir, kind)
    require_extra("tensorflow", f"task.data_dir {data_dir}", extra=EXTRA)
    require_extra("tensorflow_datasets", f"task.data_dir {data_dir}", extra=EXTRA)


def is_prepared(folder: Path) -> bool:
    """Return whether TensorFlow Datasets has written this folder."""
    return (folder / PREPARED).is_file()


def sources_of(folder: Path, kind: str) -> dict[str, dict[str, Any]]:
    """Return the descriptions of the official files of a prepared folder, by file name.

    The result is empty for a downloaded data set. Raises UserError for a damaged folder.
    """
    try:
        sources = json.loads((folder / SOURCES_FILE).read_text())
        return {name: {**source} for name, source in sources.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise damaged(
            folder, kind, f"{SOURCES_FILE} cannot be read: {type(error).__name__}: {error}"
        ) from error


def builder_name(kind: str) -> str:
    """Return the name of a data set in TensorFlow Datasets, such as `mujica_hotpotqa`."""
    return f"{BUILDER_PREFIX}{kind}"


def kind_of(name: str) -> str:
    """Return the kind of the data set with this name, such as `hotpotqa` or `mujica_hotpotqa`.

    Raises UserError for an unknown name.
    """
    plain_name = re.sub(r"[^a-z0-9]", "", name.lower().removeprefix(BUILDER_PREFIX))
    kinds = {kind.replace("_", ""): kind for kind in OFFICIAL_FILES}
    kinds |= OTHER_NAMES
    if plain_name in kinds:
        return kinds[plain_name]
    close_names = difflib.get_close_matches(plain_name, kinds, n=1)
    hint = f"did you mean {kinds[close_names[0]]}? " if close_names else ""
    raise UserError(f"unknown data set {name!r}: {hint}choose from {', '.join(OFFICIAL_FILES)}")


def default_folder() -> str:
    """Return the folder in which TensorFlow Datasets keeps its data sets."""
    return os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"


def parse_name(data_dir: str) -> PreparedName:
    """Return the parts of `tfds:FOLDER/NAME:VERSION` or `tfds:FOLDER/NAME/VERSION`.

    Raises UserError for an unknown name.
    """
    folder, _, last_part = data_dir.removeprefix(PREFIX).rpartition("/")
    version: str | None
    if _version.fullmatch(last_part) and folder:
        version = last_part
        folder, _, name = folder.rpartition("/")
    else:
        name, colon, version = last_part.partition(":")
        if not colon:
            version = None
    try:
        kind = kind_of(name)
    except UserError as error:
        raise UserError(f"task.data_dir is {data_dir}: {error}") from error
    return PreparedName(
        folder=folder or default_folder(), kind=kind, version=version, is_default_folder=not folder
    )


def check_prepared(folder: Path, kind: str) -> dict[str, int]:
    """Check the data set and the file sizes of a prepared folder.

    Return the number of examples of each split. The contents of the files are checked when they are
    read. Raises UserError.
    """
    try:
        info = json.loads((folder / PREPARED).read_text())
        name = info["name"]
        splits = [_read_split(name, info["fileFormat"], split) for split in info["splits"]]
    except FileNotFoundError as error:
        raise damaged(folder, kind, f"{PREPARED} is missing") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(
            folder, kind, f"{PREPARED} cannot be read: {type(error).__name__}: {error}"
        ) from error
    if name != builder_name(kind):
        kind_of_folder = str(name).removeprefix(BUILDER_PREFIX)
        if kind_of_folder in OFFICIAL_FILES:
            advice = f"or --task.kind {kind_of_folder}"
        else:
            advice = f"as `{PREPARE}` makes it"
        raise UserError(
            f"{folder} holds the data set {name} of TensorFlow Datasets, but task.kind is {kind}: "
            f"give the folder of {builder_name(kind)}, {advice}"
        )
    if not splits:
        raise damaged(folder, kind, f"{PREPARED} lists no examples")

    _size_of(folder / FEATURES, kind)
    for split in splits:
        bytes_on_disk = sum(_size_of(folder / file, kind) for file in split.files)
        if split.bytes is not None and bytes_on_disk != split.bytes:
            raise damaged(
                folder,
                kind,
                f"{split.name} has {bytes_on_disk:,} bytes but should have {split.bytes:,}",
            )
    for file, source in sources_of(folder, kind).items():
        if source.get("is_copied") and _size_of(folder / file, kind) != source.get("bytes"):
            raise damaged(folder, kind, f"{file} should have {source.get('bytes')} bytes")
    return {split.name: split.examples for split in splits}


def damaged(folder: Path, kind: str, reason: str) -> UserError:
    """Return the error for a prepared folder that cannot be read.

    `reason` is the part of the message in parentheses.
    """
    command = f"{PREPARE} {kind} --from DIR"
    if folder.parent.name == builder_name(kind):
        command += f" --data-dir {shlex.quote(str(folder.parent.parent))}"
    return UserError(
        f"the prepared data set {folder} is damaged ({reason}): remove this folder and prepare it "
        f"again with `{command}`"
    )


def require_tensorflow(purpose: str) -> None:
    """Import TensorFlow and TensorFlow Datasets. Raises UserError if they are not installed.

    `purpose` is the subject of the message.
    """
    # At a lower level TensorFlow reports missing GPUs and CPU instructions. JAX sets level 1.
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL", "1") == "1":
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    tensorflow = import_extra("tensorflow", purpose, extra=EXTRA)
    import_extra("tensorflow_datasets", purpose, extra=EXTRA)
    # TensorFlow only reads files here. Hide the GPUs from it, or it would take all of their memory,
    # which JAX needs. It raises RuntimeError if another library has already started it.
    with contextlib.suppress(RuntimeError):
        tensorflow.config.set_visible_devices([], "GPU")


@contextlib.contextmanager
def without_root_handler() -> Iterator[None]:
    """Prevent absl from adding a handler to the root logger.

    The handler would print the debug lines of all libraries.
    """
    handler = logging.NullHandler()
    logging.root.addHandler(handler)
    try:
        yield
    finally:
        logging.root.removeHandler(handler)


def _prepared_folder(data_dir: str, kind: str) -> Path:
    """Return the local folder of `tfds:FOLDER/NAME:VERSION`.

    A folder in a bucket is first copied to this host. Raises UserError.
    """
    name = parse_name(data_dir)
    if name.kind != kind:
        raise UserError(
            f"task.data_dir is {data_dir}, but task.kind is {kind}: give --task.kind {name.kind}, "
            f"or --task.data-dir {PREFIX}{kind}"
        )
    root = name.folder
    if "://" in root and not root.startswith("gs://"):
        raise UserError(
            f"task.data_dir is {data_dir}, but {root} is neither a local folder nor a bucket: give "
            "a local folder or gs://BUCKET/FOLDER"
        )
    if "://" not in root:
        root = str(Path(root).expanduser())

    # Choose the version.
    home = f"{root.rstrip('/')}/{builder_name(kind)}"
    versions = _versions(home)
    if not versions:
        raise _not_prepared(data_dir, name, root)
    if name.version is not None and name.version not in versions:
        raise UserError(
            f"task.data_dir is {data_dir}, but {home} has no version {name.version!r}: choose from "
            f"{', '.join(versions)}, or leave out the version"
        )
    folder = f"{home}/{name.version or versions[-1]}"

    if folder.startswith("gs://"):
        return distributed.primary_first("the data set", lambda: local_folder(folder))
    if not is_prepared(Path(folder)):
        raise damaged(Path(folder), kind, f"{PREPARED} is missing")
    return Path(folder)


def _not_prepared(data_dir: str, name: PreparedName, root: str) -> UserError:
    """Return the error for a data set of which `root` has no version."""
    command = f"{PREPARE} {name.kind} --from DIR"
    further_step = ""
    if root.startswith("gs://"):
        command += " --data-dir FOLDER"
        further_step = f" and copy FOLDER to {root}"
    elif not name.is_default_folder:
        command += f" --data-dir {shlex.quote(root)}"
    return UserError(
        f"task.data_dir is {data_dir}, but {root} holds no prepared {builder_name(name.kind)}: "
        f"prepare it with `{command}`{further_step}, where DIR holds "
        f"{OFFICIAL_FILES[name.kind].summary}; to use another folder, set TFDS_DATA_DIR or give "
        f"{PREFIX}FOLDER/{name.kind}"
    )


def _versions(home: str) -> list[str]:
    """Return the versions in the folder of a data set, from the oldest to the newest."""
    folder = run_path(home)
    if not isinstance(folder, Path):
        entries = {key.partition("/")[0] for key in folder.objects()}
    elif folder.is_dir():
        entries = {path.name for path in folder.iterdir() if path.is_dir()}
    else:
        entries = set()
    versions = [entry for entry in entries if _version.fullmatch(entry)]
    return sorted(versions, key=lambda version: [int(part) for part in version.split(".")])


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Split:
    """A split of a prepared data set."""

    name: str
    files: list[str]
    examples: int
    # Size of all files together. None if the file format does not tell it.
    bytes: int | None


def _read_split(name: str, file_format: str, split_info: dict[str, Any]) -> _Split:
    """Return a split as `dataset_info.json` describes it.

    `name` is the data set's name in TensorFlow Datasets. `file_format` is the ending of its files.
    """
    shard_lengths = [int(length) for length in split_info["shardLengths"]]
    shard_count = len(shard_lengths)
    example_count = sum(shard_lengths)
    prefix = f"{name}-{split_info['name']}.{file_format}"
    bytes_on_disk = None
    if file_format == "tfrecord":
        bytes_on_disk = int(split_info["numBytes"]) + TFRECORD_BYTES * example_count
    return _Split(
        name=split_info["name"],
        files=[f"{prefix}-{number:05}-of-{shard_count:05}" for number in range(shard_count)],
        examples=example_count,
        bytes=bytes_on_disk,
    )


def _size_of(file: Path, kind: str) -> int:
    """Return the size of a file in bytes. Raises UserError if it is missing."""
    try:
        return file.stat().st_size
    except FileNotFoundError as error:
        raise damaged(file.parent, kind, f"{file.name} is missing") from error
