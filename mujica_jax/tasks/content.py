"""Fingerprints of what a task asks and searches.

Played episodes count only for the questions they were played on. So an interrupted evaluation and a
resumed run compare the task they are given now with the one they began with: by content, not by the
names, sizes or times of files.
"""

import hashlib
from collections.abc import Iterable, Sequence

from mujica_jax.records import Question
from mujica_jax.tasks.task import Environment, ParagraphTask, Task


def fingerprint_of_questions(questions: Iterable[Question]) -> str:
    """Return a hash of all fields of the questions, in their order."""
    digest = hashlib.sha256()
    for question in questions:
        digest.update(repr(question).encode(errors="surrogatepass"))
    return digest.hexdigest()[:16]


def fingerprint_of_searches(task: Task, questions: Sequence[Question]) -> str:
    """Return a hash of what is searched for these questions.

    A service of passages says the version of its index when it is opened. A SPARQL endpoint is
    known by its address.
    """
    versions = dict.fromkeys(content_version(task.environment(question)) for question in questions)
    return hashlib.sha256("\n".join(versions).encode()).hexdigest()[:16]


def fingerprint_of_paragraphs(task: Task, questions: Sequence[Question]) -> str:
    """Return a hash of the paragraphs that the data set gives with these questions."""
    digest = hashlib.sha256()
    if isinstance(task, ParagraphTask):
        for question in questions:
            fields = (question.id, *task.own_paragraphs(question))
            digest.update(repr(fields).encode(errors="surrogatepass"))
    return digest.hexdigest()[:16]


def content_version(environment: Environment) -> str:
    """Return the version of an environment's index, service or graph.

    It is empty where none of these says a version.
    """
    retriever = getattr(environment, "retriever", None)
    index = getattr(retriever, "index", None)
    graph = getattr(environment, "graph", None)
    searched = index or graph or retriever
    return getattr(searched, "version", None) or ""
