"""Questions of your own with their answers, over passages, as a task.

The files may have any form that `own_records.py` reads. Gold passages are optional: without them
there are no scores of retrieval, and nothing else is lost.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mujica_jax.config.tasks import OwnQuestionsConfig
from mujica_jax.errors import UserError
from mujica_jax.runtime.extras import import_extra
from mujica_jax.tasks.open_domain.own_records import (
    FORMATS,
    SPLIT_NAMES,
    OwnRecord,
    read_own_records,
    read_record,
)
from mujica_jax.tasks.open_domain.records import OpenRecord
from mujica_jax.tasks.open_domain.task import OpenDomain, task_of
from mujica_jax.tasks.task import Split, hash_of

HUB_PREFIX = "hf:"


def build(config: OwnQuestionsConfig) -> OpenDomain:
    """Return the task of a configuration. Raises UserError where its files do not allow it."""
    if config.data_dir.startswith(HUB_PREFIX):
        own_records = read_hub_dataset(config.data_dir.removeprefix(HUB_PREFIX))
    else:
        own_records = read_own_records(Path(config.data_dir))
    split_records = split_questions(own_records, config)
    paragraphs = {
        id: record.context
        for records in split_records.values()
        for id, record in records.items()
        if record.context
    }
    return task_of(config, split_records, lambda: paragraphs)


def split_questions(
    own_records: Iterator[OwnRecord], config: OwnQuestionsConfig
) -> dict[Split, dict[str, OpenRecord]]:
    """Return the records of each split by id.

    A split that the data say counts. For all other questions a hash of the id decides:
    `hold_out_percent` are held out, and of these `dev_percent` are dev and the rest test.
    """
    split_records: dict[Split, dict[str, OpenRecord]] = {"train": {}, "dev": {}, "test": {}}
    first_records: dict[str, OwnRecord] = {}
    for own in own_records:
        first = first_records.setdefault(own.record.id, own)
        if first is not own:
            _check_same(first, own)
            continue
        split = own.split or _split_by_hash(own.record.id, config)
        split_records[split][own.record.id] = own.record
    if not first_records:
        raise UserError(f"task.data_dir {config.data_dir} holds no question: give {FORMATS}")
    return split_records


def _split_by_hash(id: str, config: OwnQuestionsConfig) -> Split:
    hashed = hash_of(id)
    if hashed % 100 >= config.hold_out_percent:
        return "train"
    return "dev" if hashed // 100 % 100 < config.dev_percent else "test"


def _check_same(first: OwnRecord, second: OwnRecord) -> None:
    """Check that two records with one id are the same question in the same split."""
    if first.record.text != second.record.text:
        raise UserError(
            f"{second.place}: the question {second.record.id} is {second.record.text!r} here and "
            f"{first.record.text!r} in {first.place}; give each question its own id"
        )
    if first.split != second.split:
        raise UserError(
            f"{second.place}: the question {second.record.id} is for {second.split or 'no split'} "
            f"here and for {first.split or 'no split'} in {first.place}; keep it in one split, or "
            "the run would be tested on what it learned"
        )


def read_hub_dataset(name: str) -> Iterator[OwnRecord]:
    """Yield the questions of a Hugging Face data set, `NAME` or `NAME:CONFIGURATION`.

    Needs the package datasets and, the first time, the network. Raises UserError without them.
    """
    datasets = import_extra(
        "datasets",
        f"task.data_dir {HUB_PREFIX}{name}",
        otherwise=", or download the data set and give its folder",
    )
    path, _, configuration = name.partition(":")
    try:
        splits: Mapping[str, Any] = datasets.load_dataset(path, configuration or None)
    # What the package raises without a network differs from version to version.
    except Exception as error:
        raise UserError(
            f"the data set {name} cannot be loaded ({type(error).__name__}: {error}): check its "
            "name and the network, or download it and give its folder"
        ) from error
    for split_name, rows in splits.items():
        for number, row in enumerate(rows):
            place = f"{HUB_PREFIX}{name}, {split_name} {number}"
            record, split = read_record(row, place)
            yield OwnRecord(place=place, split=split or SPLIT_NAMES.get(split_name), record=record)
