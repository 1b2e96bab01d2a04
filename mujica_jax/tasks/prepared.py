"""Read a folder that TensorFlow Datasets prepared (see `tasks/open_domain/builders.py`)."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mujica_jax.tasks.data_folder import damaged, require_tensorflow, without_root_handler


def prepared_rows(folder: Path, kind: str) -> Iterator[tuple[bool, dict[str, Any]]]:
    """Yield (is for training, row) for each row of a prepared folder.

    Raises UserError for a damaged folder.
    """
    require_tensorflow(f"reading {folder}")
    import tensorflow_datasets as tfds

    try:
        with without_root_handler():
            builder = tfds.builder_from_directory(folder)
        for split, info in builder.info.splits.items():
            with without_root_handler():
                # A decorator hides the parameter from pyright.
                dataset = builder.as_dataset(split=split)  # pyright: ignore[reportCallIssue]
            is_training = split == "train"
            count = 0
            for row in tfds.as_numpy(dataset):
                count += 1
                yield is_training, row
            if count != info.num_examples:
                raise ValueError(
                    f"{split} has {count:,} examples but should have {info.num_examples:,}"
                )
    # TensorFlow and TensorFlow Datasets raise errors of many kinds.
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        raise damaged(folder, kind, f"{type(error).__name__}: {reason}") from error


def prepared_records(folder: Path, kind: str) -> list[tuple[str, Any]]:
    """Return (place, record) for each official record of a prepared folder, in the files' order.

    The place names the folder and the record for error messages.
    """
    rows = sorted((row["id"].decode(), row["record"]) for _, row in prepared_rows(folder, kind))
    return [(f"{folder}, {place}", json.loads(record)) for place, record in rows]
