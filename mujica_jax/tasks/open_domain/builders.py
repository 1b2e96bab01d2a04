"""TensorFlow Datasets builders of the question sets.

    python -m mujica_jax.tasks.prepare hotpotqa --from DIR
    python -m mujica_jax.eval ... --task.kind hotpotqa --task.data-dir tfds:hotpotqa

A builder reads the official files in `manual_dir`, or downloads them. A downloaded file must have
the size and SHA-256 checksum in `checksums.tsv`, which other collections of data sets recorded. A
prepared folder gives the same questions as its official files. Further files that a task reads,
such as the aliases of 2WikiMultihopQA, are copied into the folder.

This module imports TensorFlow Datasets, so `prepare` only imports it after `require_tensorflow`.
Runs read prepared folders with `tasks/prepared.py`.
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
)
from mujica_jax.tasks.official_files import DOWNLOADS, OFFICIAL_FILES
from mujica_jax.tasks.open_domain import records
from mujica_jax.tasks.open_domain.qald import official_records, read_qald
from mujica_jax.tasks.sources import describe_sources, further_files, question_files
from mujica_jax.tasks.two_wiki.aliases import alias_file, official_aliases
from mujica_jax.tasks.two_wiki.records import read_questions

# Tasks that read more fields of a record than an OpenRecord has.
RECORD_KINDS = ("two_wiki", "qald10")

# The key and the fields of an example.
Example = tuple[str, dict[str, Any]]


class _Questions(tfds.core.GeneratorBasedBuilder):
    """A builder of one question set. Training files fill `train`, all others `validation`."""

    VERSION = tfds.core.Version(VERSION)
    RELEASE_NOTES: ClassVar = {
        "2.0.0": "Gold passages with their texts, aliases of 2WikiMultihopQA.",
        "2.1.0": "The order of the official files, and the further files of 2WikiMultihopQA.",
    }
    SKIP_REGISTERING = True

    def _info(self) -> tfds.core.DatasetInfo:
        """Return the columns of the data set."""
        text = tfds.features.Text()
        if self._kind in RECORD_KINDS:
            # `record` is the official record as JSON.
            features = {"id": text, "record": text}
        else:
            # The columns of `records.as_row`, and the position of the question in the set.
            features = {
                "id": text,
                "text": text,
                "answer_sets": text,
                "gold": text,
                "context": text,
                "kind": text,
                "answers": tfds.features.Sequence(text),
                "position": tfds.features.Scalar(np.int64),
            }
        return self.dataset_info_from_configs(features=tfds.features.FeaturesDict(features))

    def _split_generators(
        self, dl_manager: tfds.download.DownloadManager
    ) -> dict[str, Iterator[Example]]:
        """Return the examples of each split. Raises UserError if there is no question."""
        files, training_files = self._question_files(dl_manager)

        examples: dict[str, list[Example]] = {"train": [], "validation": []}
        for is_training, example in self._read_examples(files, training_files):
            split = "train" if is_training else "validation"
            examples[split].append(example)
        if not any(examples.values()):
            raise UserError(
                f"{files[0].parent} has no question with an answer: give the official files"
            )

        # Without training questions there is no split `train`.
        generators: dict[str, Iterator[Example]] = {}
        for split, split_examples in examples.items():
            if split_examples:
                generators[split] = self._generate_examples(split_examples)
        return generators

    def _generate_examples(self, examples: Sequence[Example]) -> Iterator[Example]:
        """Yield the examples of a split."""
        yield from examples

    def _question_files(
        self, dl_manager: tfds.download.DownloadManager
    ) -> tuple[list[Path], list[Path]]:
        """Return all official files, and the files with training questions among them.

        They are read from the manual folder. If the folder is missing or empty, they are
        downloaded. Raises UserError.
        """
        try:
            folder = Path(dl_manager.manual_dir)
        # `manual_dir` raises it if the folder is missing or empty.
        except AssertionError:
            if self._kind not in DOWNLOADS:
                raise
            return self._download(dl_manager)

        files = question_files(folder, self._kind)
        if not files:
            raise UserError(
                f"{folder} has no file with questions: put {OFFICIAL_FILES[self._kind].summary} "
                "there"
            )
        self._copy_further_files(folder)
        training_files = [file for file in files if records.is_training_file(file.name)]
        return files, training_files

    def _download(self, dl_manager: tfds.download.DownloadManager) -> tuple[list[Path], list[Path]]:
        """Download the official files. Return all files, and the files with training questions."""
        downloads = DOWNLOADS[self._kind]
        addresses = {split: address for split, (address, _) in downloads.items()}
        paths: Any = dl_manager.download_and_extract(addresses)

        files: list[Path] = []
        training_files: list[Path] = []
        for split, (address, member) in downloads.items():
            path = Path(paths[split])
            split_files = sorted(path.rglob(member)) if member else [path]
            if not split_files:
                raise UserError(
                    f"{address} has no file {member}: put {OFFICIAL_FILES[self._kind].summary} "
                    "into a folder and give it with --from"
                )
            files += split_files
            if split == "train":
                training_files = split_files
        return files, training_files

    def _read_examples(
        self, files: Sequence[Path], training_files: Sequence[Path]
    ) -> Iterator[tuple[bool, Example]]:
        """Yield (is for training, example) for each question, in the order of the files.

        Raises UserError for a malformed record.
        """
        if self._kind == "qald10":
            yield from _qald_examples(files[0].parent)
        elif self._kind == "two_wiki":
            yield from _two_wiki_examples(files, training_files)
        else:
            questions = records.read_question_files(files, self._kind, training_files)
            for position, (is_training, record) in enumerate(questions):
                row = records.as_row(record)
                row["position"] = position
                yield is_training, (record.id, row)

    def _copy_further_files(self, folder: Path) -> None:
        """Copy the files that the task reads besides the questions, and list all official files.

        At this time the folder has a temporary name. TensorFlow Datasets renames it when it is
        complete.
        """
        target = Path(self.data_dir)
        for file in further_files(folder, self._kind):
            shutil.copyfile(file, target / file.name)
        (target / SOURCES_FILE).write_text(json.dumps(describe_sources(folder, self._kind)))

    @property
    def _kind(self) -> str:
        """The task's kind, such as `hotpotqa`."""
        return self.name.removeprefix(BUILDER_PREFIX)


def _manual_instructions(kind: str) -> str:
    """Return the advice which files to put into the manual folder."""
    files = OFFICIAL_FILES[kind].summary
    if kind in DOWNLOADS:
        return (
            f"Put {files} into the manual folder, plain or .gz. If the folder is empty, the files "
            "are downloaded."
        )
    return f"Put {files} into the manual folder, plain or .gz."


class MujicaTwoWiki(_Questions):
    """Questions of two_wiki."""

    name = builder_name("two_wiki")
    MANUAL_DOWNLOAD_INSTRUCTIONS = _manual_instructions("two_wiki")
    SKIP_REGISTERING = False


class MujicaHotpotqa(_Questions):
    """Questions of hotpotqa."""

    name = builder_name("hotpotqa")
    MANUAL_DOWNLOAD_INSTRUCTIONS = _manual_instructions("hotpotqa")
    SKIP_REGISTERING = False


class MujicaMusique(_Questions):
    """Questions of musique."""

    name = builder_name("musique")
    MANUAL_DOWNLOAD_INSTRUCTIONS = _manual_instructions("musique")
    SKIP_REGISTERING = False


class MujicaQald10(_Questions):
    """Questions of qald10."""

    name = builder_name("qald10")
    MANUAL_DOWNLOAD_INSTRUCTIONS = _manual_instructions("qald10")
    SKIP_REGISTERING = False


class MujicaNq(_Questions):
    """Questions of nq."""

    name = builder_name("nq")
    MANUAL_DOWNLOAD_INSTRUCTIONS = _manual_instructions("nq")
    SKIP_REGISTERING = False


class MujicaTriviaqa(_Questions):
    """Questions of triviaqa."""

    name = builder_name("triviaqa")
    MANUAL_DOWNLOAD_INSTRUCTIONS = _manual_instructions("triviaqa")
    SKIP_REGISTERING = False


class MujicaPopqa(_Questions):
    """Questions of popqa."""

    name = builder_name("popqa")
    MANUAL_DOWNLOAD_INSTRUCTIONS = _manual_instructions("popqa")
    SKIP_REGISTERING = False


class MujicaAmbigqa(_Questions):
    """Questions of ambigqa."""

    name = builder_name("ambigqa")
    MANUAL_DOWNLOAD_INSTRUCTIONS = _manual_instructions("ambigqa")
    SKIP_REGISTERING = False


class MujicaBamboogle(_Questions):
    """Questions of bamboogle."""

    name = builder_name("bamboogle")
    MANUAL_DOWNLOAD_INSTRUCTIONS = _manual_instructions("bamboogle")
    SKIP_REGISTERING = False


BUILDERS: dict[str, type[_Questions]] = {
    "two_wiki": MujicaTwoWiki,
    "hotpotqa": MujicaHotpotqa,
    "musique": MujicaMusique,
    "qald10": MujicaQald10,
    "nq": MujicaNq,
    "triviaqa": MujicaTriviaqa,
    "popqa": MujicaPopqa,
    "ambigqa": MujicaAmbigqa,
    "bamboogle": MujicaBamboogle,
}


def _qald_examples(folder: Path) -> Iterator[tuple[bool, Example]]:
    """Yield (False, example) for each official record of QALD-10. None is for training."""
    # Read all questions first, so that a malformed record is refused before anything is written.
    for _ in read_qald(str(folder), "en"):
        pass
    for number, (place, value) in enumerate(official_records(folder)):
        yield False, _record_example(number, place, value)


def _two_wiki_examples(
    files: Sequence[Path], training_files: Sequence[Path]
) -> Iterator[tuple[bool, Example]]:
    """Yield (is for training, example) for each official record of 2WikiMultihopQA."""
    # Read questions and aliases first, so that malformed ones are refused before anything is
    # written.
    questions = read_questions(files)
    aliases = alias_file(files[0].parent)
    if aliases is not None:
        official_aliases(aliases, questions)

    number = 0
    for file in files:
        is_training = file in training_files
        for place, value in records_of([file]):
            yield is_training, _record_example(number, place, value)
            number += 1


def _record_example(number: int, place: str, value: object) -> Example:
    """Return the example of an official record.

    Sorting the keys gives the order of the files. A key ends in the place of its record.
    """
    key = f"{number:07} {Path(place).name}"
    return key, {"id": key, "record": json.dumps(value)}
