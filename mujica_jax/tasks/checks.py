"""Check that a task keeps what `tasks.task.Task` promises, as far as its questions show.

This is called before a run begins.
"""

from collections.abc import Sequence
from typing import Any, get_args

from mujica_jax.errors import UserError
from mujica_jax.metrics import Rule
from mujica_jax.records import Question
from mujica_jax.retrieval.text.corpus_records import check_text
from mujica_jax.tasks.task import EnvironmentKind, FromScratchTask, Split, Task


def check_task(task: Task, kind: str, splits: Sequence[Split]) -> None:
    """Raise UserError for mistakes that would give wrong figures, or end a run late."""
    _check_attributes(task, kind)
    for split in splits:
        questions = task.questions(split)
        _check_questions(questions, kind, split)
        if not questions:
            continue
        environment_kind = getattr(task.environment(questions[0]), "kind", None)
        if environment_kind != task.environment_kind:
            raise UserError(
                f"task {kind}: its environment_kind is {task.environment_kind} and its environment "
                f"has kind {environment_kind}: both must be the same"
            )


def from_scratch(task: Task) -> FromScratchTask:
    """Return the task as one with demonstrations and texts. Raises UserError if it has none."""
    if not isinstance(task, FromScratchTask):
        methods = ("demonstrations", "pretraining_documents", "tokenizer_text")
        lacking = ", ".join(name for name in methods if not hasattr(task, name))
        raise UserError(
            f"task {task.name} lacks {lacking}, which a model from scratch begins with: start from "
            "a checkpoint with --init and --warmup.steps 0 or --warmup.source few_shot"
        )
    return task


def _check_attributes(task: Task, kind: str) -> None:
    name = getattr(task, "name", None)
    if not isinstance(name, str):
        raise UserError(f"task {kind}: its name is {name!r} and must be a text")
    allowed_values = {"rule": get_args(Rule), "environment_kind": get_args(EnvironmentKind)}
    for attribute, allowed in allowed_values.items():
        value = getattr(task, attribute, None)
        if not isinstance(value, str) or value not in allowed:
            raise UserError(
                f"task {kind}: its {attribute} is {value!r} and must be {' or '.join(allowed)}"
            )


def _check_questions(questions: Any, kind: str, split: Split) -> None:
    is_list_of_questions = isinstance(questions, Sequence) and all(
        isinstance(question, Question) for question in questions
    )
    if not is_list_of_questions:
        raise UserError(
            f"task {kind}: questions({split!r}) gave a {type(questions).__name__}; it must return "
            "a list of Question"
        )
    ids: set[str] = set()
    for question in questions:
        _check_question(question, kind)
        if question.id in ids:
            raise UserError(
                f"task {kind}: several {split} questions have the id {question.id!r}: each needs "
                "its own"
            )
        ids.add(question.id)


def _check_question(question: Question, kind: str) -> None:
    for name in ("id", "text"):
        value = getattr(question, name)
        if not isinstance(value, str):
            raise UserError(f"task {kind}: {name} of a question is {value!r} and must be a text")

    answers: object = question.answers
    is_list_of_texts = isinstance(answers, tuple | list) and all(
        isinstance(answer, str) for answer in answers
    )
    if not is_list_of_texts or not answers:
        raise UserError(
            f"task {kind}: answers of question {question.id!r} are {answers!r}; give a tuple of "
            "texts"
        )

    for text in (question.id, question.text, *question.answers):
        try:
            check_text(text)
        except UserError as error:
            raise UserError(f"task {kind}, question {question.id!a}: {error}") from error
