"""Check before a run that a task implements the protocol `tasks.task.Task` correctly."""

from collections.abc import Sequence
from typing import Any, get_args

from mujica_jax.errors import UserError
from mujica_jax.metrics import Rule
from mujica_jax.records import Question
from mujica_jax.retrieval.text.corpus_records import check_text
from mujica_jax.tasks.task import EnvironmentKind, FromScratchTask, Split, Task


def check_task(task: Task, kind: str, splits: Sequence[Split]) -> None:
    """Check the attributes of a task and the questions of these splits.

    `kind` is the name of the task in messages. Raises UserError for mistakes that would otherwise
    give wrong scores or stop the run late.
    """
    _check_attributes(task, kind)
    for split in splits:
        questions = task.questions(split)
        _check_questions(questions, kind, split)
        if not questions:
            continue
        environment_kind = getattr(task.environment(questions[0]), "kind", None)
        if environment_kind != task.environment_kind:
            raise UserError(
                f"task {kind}: environment_kind is {task.environment_kind}, but its environment "
                f"has the kind {environment_kind}: make them the same"
            )


def from_scratch(task: Task) -> FromScratchTask:
    """Return the task as a `FromScratchTask`. Raises UserError if it lacks a method."""
    if not isinstance(task, FromScratchTask):
        methods = ("demonstrations", "pretraining_documents", "tokenizer_text")
        lacking = ", ".join(name for name in methods if not hasattr(task, name))
        raise UserError(
            f"task {task.name} has no scripted demonstrations (it lacks {lacking}): start from a "
            "checkpoint with --init, and give --warmup.steps 0 or --warmup.source few_shot"
        )
    return task


def _check_attributes(task: Task, kind: str) -> None:
    """Check the name, the rule and the environment kind of a task. Raises UserError."""
    name = getattr(task, "name", None)
    if not isinstance(name, str):
        raise UserError(f"task {kind}: its name is {name!r} and must be a string")
    for method in ("questions", "environment"):
        if not callable(getattr(task, method, None)):
            raise UserError(
                f"task {kind}: it has no method {method}: add it (mujica_jax/tasks/task.py "
                "describes it)"
            )
    allowed_values = {"rule": get_args(Rule), "environment_kind": get_args(EnvironmentKind)}
    for attribute, allowed in allowed_values.items():
        value = getattr(task, attribute, None)
        if not isinstance(value, str) or value not in allowed:
            raise UserError(
                f"task {kind}: its {attribute} is {value!r} and must be {' or '.join(allowed)}"
            )


def _check_questions(questions: Any, kind: str, split: Split) -> None:
    """Check that the questions of a split are a list of questions with distinct ids.

    Raises UserError.
    """
    is_list_of_questions = isinstance(questions, Sequence) and all(
        isinstance(question, Question) for question in questions
    )
    if not is_list_of_questions:
        raise UserError(
            f"task {kind}: questions({split!r}) returned a {type(questions).__name__} and must "
            "return a list of Question objects"
        )
    ids: set[str] = set()
    for question in questions:
        _check_question(question, kind)
        if question.id in ids:
            raise UserError(
                f"task {kind}: several {split} questions have the id {question.id!r}: give each "
                "question its own id"
            )
        ids.add(question.id)


def _check_question(question: Question, kind: str) -> None:
    """Check the id, the text and the answers of a question. Raises UserError."""
    for name in ("id", "text"):
        value = getattr(question, name)
        if not isinstance(value, str):
            raise UserError(f"task {kind}: {name} of a question is {value!r} and must be a string")

    answers: object = question.answers
    is_list_of_texts = isinstance(answers, tuple | list) and all(
        isinstance(answer, str) for answer in answers
    )
    if not is_list_of_texts or not answers:
        raise UserError(
            f"task {kind}: the answers of question {question.id!r} are {answers!r} and must be a "
            "tuple of strings"
        )

    for text in (question.id, question.text, *question.answers):
        try:
            check_text(text)
        except UserError as error:
            raise UserError(f"task {kind}, question {question.id!a}: {error}") from error
