"""TensorFlow Datasets builders of the question sets, from the official files in a manual folder.

    tfds build mujica_hotpotqa --imports mujica_jax.tasks.open_domain.builders --manual_dir DIR --data_dir DATA
    python -m mujica_jax.eval ... --task.kind hotpotqa --task.data-dir DATA/mujica_hotpotqa/1.0.0

TensorFlow is imported here alone, and by a run only the first time that it reads such a folder (`records.read_set`).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tensorflow_datasets as tfds

from mujica_jax.tasks.open_domain.records import (
    SOURCES,
    OpenRecord,
    as_row,
    from_row,
    question_files,
    read_open_records,
)


class _Questions(tfds.core.GeneratorBasedBuilder):
    """The questions of one set, by the files that they stand in: train, and all others as validation."""

    VERSION = tfds.core.Version("1.0.0")
    SKIP_REGISTERING = True

    def _info(self) -> tfds.core.DatasetInfo:
        text = tfds.features.Text()
        features = {
            "id": text,
            "text": text,
            "answers": tfds.features.Sequence(text),
            "answer_sets": text,  # JSON, as `as_row` writes it
            "titles": tfds.features.Sequence(text),
            "context": text,
            "kind": text,
        }
        return self.dataset_info_from_configs(features=tfds.features.FeaturesDict(features))

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Iterator[tuple[str, Any]]]:
        folder = Path(dl_manager.manual_dir)
        files = question_files(folder, self._kind)
        training = [file for file in files if "train" in file.name.lower()]
        parts = {"train": training, "validation": [file for file in files if file not in training]}
        return {split: self._generate_examples(of_split) for split, of_split in parts.items() if of_split}

    def _generate_examples(self, files: list[Path]) -> Iterator[tuple[str, dict[str, Any]]]:
        seen = set()
        for file in files:
            for record in read_open_records(file, self._kind):
                if record.id not in seen:
                    seen.add(record.id)
                    yield record.id, as_row(record)

    @property
    def _kind(self) -> str:
        return self.name.removeprefix("mujica_")


def _builder(kind: str) -> type[_Questions]:
    said = f"Put {SOURCES[kind]} into the manual folder, plain or .gz."
    about = {"__doc__": f"Questions of {kind}.", "MANUAL_DOWNLOAD_INSTRUCTIONS": said, "__module__": __name__}
    about |= {"name": f"mujica_{kind}", "SKIP_REGISTERING": False}
    return type(f"Mujica{kind.capitalize()}", (_Questions,), about)


BUILDERS = {kind: _builder(kind) for kind in SOURCES}


def read_prepared(folder: Path) -> Iterator[tuple[bool, OpenRecord]]:
    """The questions of a prepared folder, each with whether it is for training."""
    builder = tfds.builder_from_directory(folder)
    for split, examples in tfds.as_numpy(builder.as_dataset()).items():
        for row in examples:
            lists = {name: [text.decode() for text in row[name]] for name in ("answers", "titles")}
            texts = {name: of.decode() for name, of in row.items() if name not in lists}
            yield split == "train", from_row(lists | texts)
