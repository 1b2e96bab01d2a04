"""Whether a task keeps what `tasks.task.Task` promises, as far as its questions show. Called before
a run begins."""

from collections.abc import Sequence
from typing import get_args

from mujica_jax.errors import UserError
from mujica_jax.metrics import Rule
from mujica_jax.records import Question
from mujica_jax.retrieval.text.corpus_records import check_text
from mujica_jax.tasks.task import EnvironmentKind, Split, Task


def check_task(task: Task, kind: str, splits: Sequence[Split]) -> None:
    """Raises UserError for mistakes that would give wrong figures, or end a run late."""
    known = {"rule": get_args(Rule), "environment_kind": get_args(EnvironmentKind)}
    for name in ("name", *known):
        value = getattr(task, name, None)
        if not isinstance(value, str) or value not in known.get(name, (value,)):
            wanted = " or ".join(known.get(name, ("a text",)))
            raise UserError(f"task {kind}: its {name} is {value!r} and must be {wanted}")
    for split in splits:
        questions = task.questions(split)
        if not isinstance(questions, Sequence) or not all(
            isinstance(question, Question) for question in questions
        ):
            gave = f"questions({split!r}) gave a {type(questions).__name__}"
            raise UserError(f"task {kind}: {gave}; it must return a list of Question")
        seen: set[str] = set()
        for question in questions:
            _check_question(question, kind)
            if question.id in seen:
                raise UserError(
                    f"task {kind}: several {split} questions have the id {question.id!r}: each "
                    "needs its own"
                )
            seen.add(question.id)
        found = (
            getattr(task.environment(questions[0]), "kind", None)
            if questions
            else task.environment_kind
        )
        if found != task.environment_kind:
            raise UserError(
                f"task {kind}: its environment_kind is {task.environment_kind} and its environment "
                f"has kind {found}: both must be the same"
            )


def _check_question(question: Question, kind: str) -> None:
    for name in ("id", "text"):
        if not isinstance(value := getattr(question, name), str):
            raise UserError(f"task {kind}: {name} of a question is {value!r} and must be a text")
    answers = question.answers
    if not (
        isinstance(answers, tuple | list)
        and answers
        and all(isinstance(answer, str) for answer in answers)
    ):
        raise UserError(
            f"task {kind}: answers of question {question.id!r} are {answers!r}; give a tuple of "
            "texts"
        )
    for text in (question.id, question.text, *answers):
        try:
            check_text(text)
        except UserError as error:
            raise UserError(f"task {kind}, question {question.id!a}: {error}") from error
