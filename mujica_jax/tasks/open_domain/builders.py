"""TensorFlow Datasets builders of the question sets, and what reads a folder that they have filled.

    python -m mujica_jax.tasks.prepare hotpotqa --from DIR
    python -m mujica_jax.eval ... --task.kind hotpotqa --task.data-dir tfds:hotpotqa

The builders read official files in `manual_dir`, or download them: `checksums.tsv` holds sizes and
SHA-256 as other collections of data sets recorded them, and a file that differs is refused. A
prepared folder gives the questions that its official files give. Further files that a task reads,
such as the aliases of 2WikiMultihopQA, are copied into it.

This module imports TensorFlow Datasets. A run imports this module when it reads a prepared folder,
after `data_folder.require_tensorflow`.
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import tensorflow_datasets as tfds

from mujica_jax.errors import UserError
from mujica_jax.retrieval.text.corpus_records import records_of
from mujica_jax.tasks.data_folder import (
    BUILDER_PREFIX,
    SOURCES_FILE,
    VERSION,
    builder_name,
    damaged,
    without_root_handler,
)
from mujica_jax.tasks.official_files import DOWNLOADS, OFFICIAL_FILES
from mujica_jax.tasks.open_domain import records
from mujica_jax.tasks.open_domain.qald import official_records, read_qald
from mujica_jax.tasks.sources import describe_sources, further_files, question_files
from mujica_jax.tasks.two_wiki.aliases import alias_file, official_aliases
from mujica_jax.tasks.two_wiki.records import read_questions

RECORD_KINDS = ("two_wiki", "qald10")  # tasks that read more of a record than an OpenRecord holds

Example = tuple[str, dict[str, Any]]  # key and fields


class _Questions(tfds.core.GeneratorBasedBuilder):
    """The questions of one set, by the files that they stand in: train, and all others as
    validation."""

    VERSION = tfds.core.Version(VERSION)
    RELEASE_NOTES: ClassVar = {
        "2.0.0": "Gold passages with their texts, aliases of 2WikiMultihopQA.",
        "2.1.0": "The order of the official files, and the further files of 2WikiMultihopQA.",
    }
    SKIP_REGISTERING = True

    def _info(self) -> tfds.core.DatasetInfo:
        text = tfds.features.Text()
        features: dict[str, Any]
        if self._kind in RECORD_KINDS:
            features = {"id": text, "record": text}  # JSON, as the official file has it
        else:
            features = {
                name: text for name in ("id", "text", "answer_sets", "gold", "context", "kind")
            }  # of `as_row`
            features["answers"] = tfds.features.Sequence(text)
            features["position"] = tfds.features.Scalar(np.int64)
        return self.dataset_info_from_configs(features=tfds.features.FeaturesDict(features))

    def _split_generators(
        self, dl_manager: tfds.download.DownloadManager
    ) -> dict[str, Iterator[Example]]:
        try:
            folder = Path(dl_manager.manual_dir)
        except AssertionError:  # there is none, or it is empty
            if self._kind not in DOWNLOADS:
                raise
            files, training_files = self._downloaded(dl_manager)
        else:
            files = question_files(folder, self._kind)
            if not files:
                raise UserError(
                    f"{folder} has no file of questions: put {OFFICIAL_FILES[self._kind].summary} "
                    "there"
                )
            training_files = [file for file in files if records.is_training_file(file.name)]
            self._keep_beside(folder)

        examples: dict[str, list[Example]] = {"train": [], "validation": []}
        if self._kind in RECORD_KINDS:
            for is_training, example in self._record_examples(files, training_files):
                examples["train" if is_training else "validation"].append(example)
        else:
            read = records.read_question_files(files, self._kind, training_files)
            for position, (is_training, record) in enumerate(read):
                example = (record.id, records.as_row(record) | {"position": position})
                examples["train" if is_training else "validation"].append(example)
        if not any(examples.values()):
            raise UserError(
                f"{files[0].parent} has no question with an answer: give the official files"
            )
        return {
            split: self._generate_examples(of_split)
            for split, of_split in examples.items()
            if of_split
        }

    def _generate_examples(self, examples: Sequence[Example]) -> Iterator[Example]:
        yield from examples

    def _record_examples(
        self, files: Sequence[Path], training_files: Sequence[Path]
    ) -> Iterator[tuple[bool, Example]]:
        """Yield the official records as they are, each with whether it is for training. Malformed
        ones are refused."""
        if self._kind == "qald10":
            folder = files[0].parent
            for _ in read_qald(str(folder), "en"):
                pass
            for number, (place, value) in enumerate(official_records(folder)):
                yield False, _record_example(number, place, value)
            return
        questions = read_questions(files)
        aliases = alias_file(files[0].parent)
        if aliases is not None:
            official_aliases(aliases, questions)
        number = 0
        for file in files:
            for place, value in records_of([file]):
                yield file in training_files, _record_example(number, place, value)
                number += 1

    def _downloaded(
        self, dl_manager: tfds.download.DownloadManager
    ) -> tuple[list[Path], list[Path]]:
        """Download the official files. Return all of them, and those with training questions."""
        wanted = DOWNLOADS[self._kind]
        places = dl_manager.download_and_extract(
            {split: address for split, (address, _) in wanted.items()}
        )
        by_split: dict[str, list[Path]] = {}
        for split, (address, member) in wanted.items():
            place = Path(places[split])
            by_split[split] = sorted(place.rglob(member)) if member else [place]
            if not by_split[split]:
                raise UserError(
                    f"{address} has no file {member}: put {OFFICIAL_FILES[self._kind].summary} "
                    "into a folder and give it with --from"
                )
        return [file for files in by_split.values() for file in files], by_split["train"]

    def _keep_beside(self, folder: Path) -> None:
        """Copy what the task reads beside the questions, and write down what the set is made of.

        The folder has a temporary name here. TensorFlow Datasets renames it when it is complete.
        """
        target = Path(self.data_dir)
        for file in further_files(folder, self._kind):
            shutil.copyfile(file, target / file.name)
        (target / SOURCES_FILE).write_text(json.dumps(describe_sources(folder, self._kind)))

    @property
    def _kind(self) -> str:
        return self.name.removeprefix(BUILDER_PREFIX)


def _builder(kind: str) -> type[_Questions]:
    instructions = f"Put {OFFICIAL_FILES[kind].summary} into the manual folder, plain or .gz"
    instructions += ", or leave it empty: they are downloaded." if kind in DOWNLOADS else "."
    members = {
        "__doc__": f"Questions of {kind}.",
        "__module__": __name__,
        "MANUAL_DOWNLOAD_INSTRUCTIONS": instructions,
        "SKIP_REGISTERING": False,
        "name": builder_name(kind),
    }
    return type(f"Mujica{kind.capitalize()}", (_Questions,), members)


BUILDERS = {kind: _builder(kind) for kind in OFFICIAL_FILES}


def read_prepared(folder: Path, kind: str) -> list[tuple[bool, records.OpenRecord]]:
    """Return the questions of a prepared folder in the order of their files, each with whether it
    is for training."""
    positioned: list[tuple[int, bool, records.OpenRecord]] = []
    for is_training, row in prepared_rows(folder, kind):
        if "gold" not in row:
            raise damaged(
                folder,
                kind,
                "an earlier version made it, which kept gold passages by their titles alone",
            )
        position = int(row.pop("position", 0))
        answers = [text.decode() for text in row.pop("answers")]
        texts = {name: value.decode() for name, value in row.items()}
        positioned.append((position, is_training, records.from_row({"answers": answers} | texts)))
    positioned.sort(key=lambda entry: entry[0])
    return [(is_training, record) for _, is_training, record in positioned]


def prepared_rows(folder: Path, kind: str) -> Iterator[tuple[bool, dict[str, Any]]]:
    """Yield the rows of a prepared folder, each with whether it is for training. Raises UserError
    for a damaged one."""
    try:
        with without_root_handler():
            builder = tfds.builder_from_directory(folder)
        for split, info in builder.info.splits.items():
            with without_root_handler():
                dataset = builder.as_dataset(split=split)  # pyright: ignore[reportCallIssue] - a decorator hides it
            count = 0
            for row in tfds.as_numpy(dataset):
                count += 1
                yield split == "train", row
            if count != info.num_examples:
                raise ValueError(
                    f"{split} has {count:,} examples and should have {info.num_examples:,}"
                )
    except Exception as error:  # TensorFlow and TensorFlow Datasets raise errors of many kinds
        reason = (str(error).splitlines() or [""])[0]
        raise damaged(folder, kind, f"{type(error).__name__}: {reason}") from error


def _record_example(number: int, place: str, value: object) -> Example:
    """Return the example of an official record. Its key sorts as the files do, and ends in the
    record's place."""
    key = f"{number:07} {Path(place).name}"
    return key, {"id": key, "record": json.dumps(value)}
