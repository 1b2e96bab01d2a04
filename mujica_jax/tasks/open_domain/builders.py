"""TensorFlow Datasets builders of the question sets, from the official files: those of a manual folder, or downloads.

    tfds build mujica_hotpotqa --imports mujica_jax.tasks.open_domain.builders [--manual_dir DIR] --data_dir DATA
    python -m mujica_jax.eval ... --task.kind hotpotqa --task.data-dir DATA/mujica_hotpotqa/2.0.0

`checksums.tsv` holds sizes and SHA-256 of what is downloaded, as other collections of datasets recorded them; a file
that differs is refused. TensorFlow is imported here alone, and by a run only the first time that it reads such a folder
(`records.read_set`). 2WikiMultihopQA keeps the name of the file that a question stood in, which tells its official
split, and its answers get the aliases of an `id_aliases.json` beside the questions.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import tensorflow_datasets as tfds

from mujica_jax.errors import UserError
from mujica_jax.retrieval.text.corpus_records import records_of
from mujica_jax.tasks.open_domain import records
from mujica_jax.tasks.open_domain.qald import official_records
from mujica_jax.tasks.two_wiki.aliases import alias_file, read_aliases, with_record_aliases
from mujica_jax.tasks.two_wiki.records import QUESTION_FILES, data_files, read_questions

_HOTPOT = "http://curtis.ml.cmu.edu/datasets/hotpot"
_NQ = (
    "https://raw.githubusercontent.com/google-research-datasets/natural-questions/"
    "a7a113c9fdc2d9986d624bd43b8a18d6d5779eaa/nq_open"
)
_TRIVIA = "http://nlp.cs.washington.edu/triviaqa/data/triviaqa-unfiltered.tar.gz"
_AMBIG = "https://nlp.cs.washington.edu/ambigqa/data/ambignq_light.zip"
DOWNLOADS: Mapping[str, Mapping[str, tuple[str, str]]] = {  # by kind and split: address, and the file in an archive
    "hotpotqa": {
        "train": (f"{_HOTPOT}/hotpot_train_v1.1.json", ""),
        "validation": (f"{_HOTPOT}/hotpot_dev_distractor_v1.json", ""),
    },
    "nq": {"train": (f"{_NQ}/NQ-open.train.jsonl", ""), "validation": (f"{_NQ}/NQ-open.dev.jsonl", "")},
    "triviaqa": {"train": (_TRIVIA, "unfiltered-web-train.json"), "validation": (_TRIVIA, "unfiltered-web-dev.json")},
    "ambigqa": {"train": (_AMBIG, "train_light.json"), "validation": (_AMBIG, "dev_light.json")},
}


RECORDS = {  # of tasks that read more of a record than questions and answers
    "two_wiki": "train.json and dev.json from Alab-NII/2wikimultihop",
    "qald10": "qald_10.json from KGQA/QALD-10",
}


class _Questions(tfds.core.GeneratorBasedBuilder):
    """The questions of one set, by the files that they stand in: train, and all others as validation."""

    VERSION = tfds.core.Version("2.0.0")
    RELEASE_NOTES: ClassVar = {"2.0.0": "Gold passages with their texts, aliases of 2WikiMultihopQA."}
    SKIP_REGISTERING = True

    def _info(self) -> tfds.core.DatasetInfo:
        text = tfds.features.Text()
        if self._kind in RECORDS:
            features = {"id": text, "record": text}  # JSON, as the official file has it
        else:
            features = {name: text for name in ("id", "text", "answer_sets", "gold", "context", "kind")}  # of `as_row`
            features |= {"answers": tfds.features.Sequence(text)}
        return self.dataset_info_from_configs(features=tfds.features.FeaturesDict(features))

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Iterator[tuple[str, Any]]]:
        try:
            folder = Path(dl_manager.manual_dir)
        except AssertionError:  # there is none, or nothing in it
            if self._kind not in DOWNLOADS:
                raise
            parts = self._downloaded(dl_manager)
        else:
            files = self._files(folder)
            training = [file for file in files if records.is_training_file(file.name)]
            parts = {"train": training, "validation": [file for file in files if file not in training]}
        return {split: self._generate_examples(of_split) for split, of_split in parts.items() if of_split}

    def _downloaded(self, dl_manager: tfds.download.DownloadManager) -> dict[str, list[Path]]:
        wanted, parts = DOWNLOADS[self._kind], {}
        places = dl_manager.download_and_extract({split: address for split, (address, _) in wanted.items()})
        for split, (address, member) in wanted.items():
            place = Path(places[split])
            parts[split] = sorted(place.rglob(member)) if member else [place]
            if not parts[split]:
                raise UserError(f"{address} has no file {member}: put {records.SOURCES[self._kind]} into --manual_dir")
        return parts

    def _files(self, folder: Path) -> list[Path]:
        if self._kind == "two_wiki":
            return data_files(folder, QUESTION_FILES, "questions")
        return [folder] if self._kind == "qald10" else records.question_files(folder, self._kind)

    def _generate_examples(self, files: list[Path]) -> Iterator[tuple[str, dict[str, Any]]]:
        if self._kind in RECORDS:
            for number, (place, value) in enumerate(self._records(files)):
                name = f"{number:07} {Path(place).name}"
                yield name, {"id": name, "record": json.dumps(value)}
            return
        for _, record in records.read_question_files(files, self._kind):
            yield record.id, records.as_row(record)

    def _records(self, files: list[Path]) -> Iterable[tuple[str, object]]:
        if self._kind == "qald10":
            return official_records(files[0])
        questions = read_questions(files)  # names what is malformed
        file = alias_file(files[0].parent)
        if file is None:
            return records_of(files)
        aliases = read_aliases(file, {question.answer_id for question in questions})
        return ((place, with_record_aliases(value, aliases)) for place, value in records_of(files))

    @property
    def _kind(self) -> str:
        return self.name.removeprefix("mujica_")


def _builder(kind: str) -> type[_Questions]:
    said = f"Put {(records.SOURCES | RECORDS)[kind]} into the manual folder, plain or .gz"
    said += ", or leave it empty: they are downloaded." if kind in DOWNLOADS else "."
    about = {"__doc__": f"Questions of {kind}.", "MANUAL_DOWNLOAD_INSTRUCTIONS": said, "__module__": __name__}
    about |= {"name": f"mujica_{kind}", "SKIP_REGISTERING": False}
    return type(f"Mujica{kind.capitalize()}", (_Questions,), about)


BUILDERS = {kind: _builder(kind) for kind in (*records.SOURCES, *RECORDS)}


def read_prepared(folder: Path) -> Iterator[tuple[bool, records.OpenRecord]]:
    """The questions of a prepared folder, each with whether it is for training."""
    for training, row in prepared_rows(folder):
        if "gold" not in row:
            raise UserError(
                f"{folder} was built by an earlier version, which kept gold passages by their titles alone: build it "
                "again with `tfds build` (docs/evaluation.md)"
            )
        answers = [text.decode() for text in row["answers"]]
        texts = {name: value.decode() for name, value in row.items() if name != "answers"}
        yield training, records.from_row({"answers": answers} | texts)


def prepared_rows(folder: Path) -> Iterator[tuple[bool, dict[str, Any]]]:
    builder = tfds.builder_from_directory(folder)
    for split, examples in tfds.as_numpy(builder.as_dataset()).items():
        yield from ((split == "train", row) for row in examples)
