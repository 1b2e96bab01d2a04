"""Fingerprints of a task's questions and of what it searches.

Episodes that were already played are only valid for the same questions and the same collection. So
an interrupted evaluation and a resumed run compare the present task with the task at their start.
They compare the content, not the names, sizes or times of files.
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

    A passage service reports the version of its index when it is opened. A SPARQL endpoint is
    identified by its address.
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
    """Return the version of an environment's index, service or graph, and of its reranker.

    The result is empty if none of these has a version.
    """
    retriever = getattr(environment, "retriever", None)
    index = getattr(retriever, "index", None)
    graph = getattr(environment, "graph", None)
    searched = index or graph or retriever
    version = getattr(searched, "version", None) or ""
    reranker = getattr(retriever, "reranker", None)
    return version if reranker is None else f"{version}-{reranker.version}"
