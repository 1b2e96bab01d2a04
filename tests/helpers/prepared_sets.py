"""Prepare question sets, load them by name, and write down what was loaded.

    python -m tests.helpers.prepared_sets FOLDERS.json LOADED.json

TensorFlow starts slowly, so the tests run this once, in a process of its own. FOLDERS has for each
name (as `--task.data-dir` has it, without `tfds:`) the folder of official files that the set is
prepared from.
"""

import dataclasses
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mujica_jax.config.schema import TwoWikiConfig
from mujica_jax.config.tasks import HotpotConfig, MusiqueConfig
from mujica_jax.errors import UserError
from mujica_jax.tasks import prepare
from mujica_jax.tasks.data_folder import data_folder
from mujica_jax.tasks.open_domain import task as open_domain
from mujica_jax.tasks.open_domain.qald import read_qald
from mujica_jax.tasks.open_domain.records import read_set
from mujica_jax.tasks.two_wiki import task as two_wiki
from mujica_jax.tasks.two_wiki.records import read_folder


def as_dicts(items: Iterable[Any]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(item) for item in items]


def loaded(kind: str, data_dir: str) -> Any:
    """Return all that a task reads of a folder or data set, as JSON would give it."""
    folder = data_folder(data_dir, kind)
    content: dict[str, Any]
    if kind == "qald10":
        content = {language: list(read_qald(str(folder), language)) for language in ("en", "de")}
    elif kind == "two_wiki":
        content = {"records": as_dicts(read_folder(folder))}
        for environment in ("text", "graph"):
            for is_split in (False, True):
                task = two_wiki.build(
                    TwoWikiConfig(
                        environment=environment,
                        data_dir=data_dir,
                        hold_out_percent=50,
                        top_k=2,
                        split_dev_files=is_split,
                    )
                )
                content[f"{environment} {is_split}"] = [
                    questions_of(task),
                    task.left_out,
                    task.notes,
                ]
    else:
        config = {"hotpotqa": HotpotConfig, "musique": MusiqueConfig}[kind]
        task = open_domain.build(config(data_dir=data_dir, top_k=2))
        paragraphs = {
            question.id: task.own_paragraphs(question) for question in task.questions("train")
        }
        content = {
            "records": [
                (training, dataclasses.asdict(record))
                for training, record in read_set(folder, kind)
            ],
            "questions": questions_of(task),
            "paragraphs": {id: as_dicts(passages) for id, passages in paragraphs.items()},
        }
    return json.loads(json.dumps(content))


def questions_of(task: Any) -> dict[str, Any]:
    """Return the questions of each split."""
    return {split: as_dicts(task.questions(split)) for split in ("train", "dev", "test")}


def main(folders_file: str, loaded_file: str) -> None:
    results: dict[str, Any] = {}
    for name, folder in json.loads(Path(folders_file).read_text()).items():
        data_dir, _, short_name = name.rpartition("/")
        words = [short_name, "--from", folder] + (["--data-dir", data_dir] if data_dir else [])
        statuses = [prepare.main(words), prepare.main(words)]
        results[name] = {
            "statuses": statuses,
            "loaded": loaded(prepare.data_folder.kind_of(short_name), f"tfds:{name}"),
        }

    # One changed byte of a record: the size is the same, and its checksum is not.
    folder = data_folder("tfds:qald10", "qald10")
    (file,) = folder.glob("*.tfrecord*")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    try:
        list(read_qald(str(folder), "en"))
    except UserError as error:
        results["changed byte"] = str(error)
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    Path(loaded_file).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
