"""Fingerprints of what a task asks and searches.

Played episodes count only for the questions they were played on. So an interrupted evaluation and a resumed run compare
the task they are given now with the one they began with: by content, not by the names, sizes or times of files.
"""

import hashlib
from collections.abc import Iterable, Sequence

from mujica_jax.records import Question
from mujica_jax.tasks.task import Environment, Task


def fingerprint_of_questions(questions: Iterable[Question]) -> str:
    """Return a hash of all fields of the questions, in their order."""
    digest = hashlib.sha256()
    for question in questions:
        digest.update(repr(question).encode(errors="surrogatepass"))
    return digest.hexdigest()[:16]


def fingerprint_of_searches(task: Task, questions: Sequence[Question]) -> str:
    """Return a hash of what is searched for these questions.

    The content behind an address is not known before it has answered, so a remote retriever adds nothing to the hash.
    """
    versions = dict.fromkeys(content_version(task.environment(question)) for question in questions)
    return hashlib.sha256("\n".join(versions).encode()).hexdigest()[:16]


def content_version(environment: Environment) -> str:
    """Return the version of an environment's index or graph, or "" where it does not say one."""
    retriever = getattr(environment, "retriever", None)
    searched = getattr(retriever, "index", None) or getattr(environment, "graph", None)
    return getattr(searched, "version", "")
