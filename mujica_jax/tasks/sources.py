"""Find and describe the official files of a question set."""

from pathlib import Path
from typing import Any

from mujica_jax.storage.manifest import sha256_of
from mujica_jax.tasks.open_domain import records
from mujica_jax.tasks.open_domain.qald import qald_files
from mujica_jax.tasks.two_wiki.aliases import alias_file
from mujica_jax.tasks.two_wiki.records import CORPUS_FILES, GRAPH_FILES, QUESTION_FILES, data_files


def question_files(folder: Path, kind: str) -> list[Path]:
    """Return the files with questions in a folder, in a fixed order."""
    if kind == "two_wiki":
        return data_files(folder, QUESTION_FILES, "questions", needed=False)
    if kind == "qald10":
        return qald_files(folder)
    return records.find_question_files(folder)


def further_files(folder: Path, kind: str) -> list[Path]:
    """Return the files that the task reads besides the questions.

    2WikiMultihopQA has files with aliases, triples and passages. The other sets have none.
    """
    if kind != "two_wiki":
        return []
    aliases = alias_file(folder)
    files = data_files(folder, (*GRAPH_FILES, *CORPUS_FILES), "further files", needed=False)
    return files if aliases is None else [aliases, *files]


def describe_sources(folder: Path, kind: str) -> dict[str, Any]:
    """Return a description of each file of the set, by file name.

    A description holds the size in bytes, the SHA-256 checksum, and whether the file is copied into
    the prepared data set.
    """
    copied_files = further_files(folder, kind)
    descriptions: dict[str, Any] = {}
    for file in (*question_files(folder, kind), *copied_files):
        descriptions[file.name] = {
            "bytes": file.stat().st_size,
            "sha256": sha256_of(file),
            "is_copied": file in copied_files,
        }
    return descriptions
