"""Turn a question in a user's own words into a question of a task.

Such a question has no topic entities and no passages of its own. Over a graph, the entities that it
names become its candidates. Over passages it is searched like every question of the task. If it is
one of the task's questions, word for word, it is asked exactly as that question.
"""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Protocol, runtime_checkable

from mujica_jax.errors import UserError
from mujica_jax.records import Entity, Question
from mujica_jax.retrieval.errors import RetrievalError
from mujica_jax.tasks.environment import GraphEnvironment
from mujica_jax.tasks.named_entities import (
    MAX_NAMESAKES,
    NEAREST_LABELS,
    Mention,
    Names,
    find_mentions,
    names_of,
    nearest_labels,
)
from mujica_jax.tasks.ranking import DenseRanking
from mujica_jax.tasks.task import Environment, Split, Task

# The id of a question that is none of the task's.
ASKED_ID = "asked"
# With more labels than this, only those that are written similarly to the question are embedded.
MAX_EMBEDDED_LABELS = 2000
MIN_EMBEDDED_SIMILARITY = 0.3
SPLITS: tuple[Split, ...] = ("dev", "test", "train")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AskedQuestion:
    """A user's question, ready to be asked.

    Attributes:
        question: The question with its candidates. It has no gold answers.
        environment: The environment that the agent searches.
        notes: Sentences for the user. They say which entities the question names, for example.
    """

    question: Question
    environment: Environment
    notes: tuple[str, ...] = ()


@runtime_checkable
class AskableTask(Protocol):
    """A task that takes questions in a user's own words.

    A task over passages that all of its questions share does not have to implement it.
    """

    async def asked(self, text: str) -> AskedQuestion:
        """Return the question with its candidates and its environment.

        Raises UserError if the question cannot be asked, and RetrievalError if a graph fails.
        """
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraphSearch:
    """A graph as a user's question needs it.

    Attributes:
        environment: The environment that searches the graph.
        names: The names of the graph's entities.
        embedder: A ranking by embeddings, or None if the task has no embedder.
    """

    environment: Environment
    names: Names
    embedder: DenseRanking | None = None


async def asked_question(task: Task, text: str) -> AskedQuestion:
    """Return a user's question as a question of the task.

    Raises UserError if it cannot be asked: it is empty, it names no entity of the graph, or the
    task has only the passages of its own questions.
    """
    if not text.strip():
        raise UserError(f"the question is {text!r}, which is empty: write a question in quotes")
    own_question = _own_question(task, text)
    if own_question is not None:
        return own_question
    try:
        if isinstance(task, AskableTask):
            return await task.asked(text)
    except RetrievalError as error:
        raise UserError(f"the entities of the question cannot be looked up: {error}") from error
    if task.environment_kind == "text":
        return over_passages(text, task.environment(Question(id=ASKED_ID, text=text, answers=())))
    raise UserError(
        f"task {task.name} searches a graph and does not say how to find the entities of your own "
        "question: give the task the method `asked` (mujica_jax/tasks/asked.py), or ask one of its "
        "questions"
    )


def search_of(environment: GraphEnvironment) -> GraphSearch:
    """Return the search of a graph environment, with the names of its graph."""
    ranking = environment.ranking
    return GraphSearch(
        environment=environment,
        names=names_of(environment.graph),
        embedder=ranking if isinstance(ranking, DenseRanking) else None,
    )


def over_passages(text: str, environment: Environment) -> AskedQuestion:
    """Return a question that is answered from the passages of an environment."""
    question = Question(id=ASKED_ID, text=text, answers=())
    return AskedQuestion(question=question, environment=environment)


async def over_graph(text: str, search: GraphSearch, *, language: str = "en") -> AskedQuestion:
    """Return a question whose candidates are the entities that it names.

    If it names none and the search has an embedder, the labels that are most similar to the
    question become candidates. `language` is the language of the question.

    Raises UserError if there is no candidate, and RetrievalError.
    """
    mentions = await find_mentions(text, search.names, language)
    notes = [describe(mention) for mention in mentions]
    candidates = candidates_of(mentions)
    if not candidates:
        labels = await search.names.labels_near(text)
        candidates = await _most_similar(text, search, labels)
        if not candidates:
            raise UserError(without_entity(text, nearest_labels(text, labels)))
        shown = ", ".join(_described_entity(entity) for entity in candidates)
        notes = [f"the question names no entity; it may start from the most similar ones: {shown}"]
    question = Question(id=ASKED_ID, text=text, answers=(), candidates=tuple(candidates))
    return AskedQuestion(question=question, environment=search.environment, notes=tuple(notes))


async def _most_similar(
    text: str, search: GraphSearch, labels: Collection[str]
) -> Sequence[Entity]:
    """Return the entities whose labels are most similar to the question by their embeddings.

    The result is empty without an embedder. If there are too many labels to embed, only those that
    are written similarly to a name in the question are compared.
    """
    if search.embedder is None:
        return ()
    compared = list(labels)
    if len(compared) > MAX_EMBEDDED_LABELS:
        compared = nearest_labels(
            text, labels, limit=MAX_EMBEDDED_LABELS, min_similarity=MIN_EMBEDDED_SIMILARITY
        )
    if not compared:
        return ()
    order = await search.embedder(text, compared)
    nearest = [compared[position] for position in order[:NEAREST_LABELS]]
    entities_of_label = await search.names.find_all(nearest)
    candidates: dict[str, Entity] = {}
    for label in nearest:
        for entity in entities_of_label.get(label, ())[:MAX_NAMESAKES]:
            candidates.setdefault(entity.id, entity)
    return list(candidates.values())


def candidates_of(mentions: Sequence[Mention]) -> Sequence[Entity]:
    """Return the entities of all mentions, each once, with at most MAX_NAMESAKES of each name."""
    candidates: dict[str, Entity] = {}
    for mention in mentions:
        for entity in mention.entities[:MAX_NAMESAKES]:
            candidates.setdefault(entity.id, entity)
    return list(candidates.values())


def describe(mention: Mention) -> str:
    """Return a sentence that says which entities a name in the question may mean."""
    shown = [_described_entity(entity) for entity in mention.entities[:MAX_NAMESAKES]]
    if len(mention.entities) == 1:
        return f"{mention.text!r} in the question is {shown[0]}"
    sentence = f"{mention.text!r} in the question may be {_either(shown)}"
    others = len(mention.entities) - len(shown)
    if others:
        sentence += f", or one of {others} others, which are no candidates"
    return f"{sentence}; name the id in place of the name to choose one"


def without_entity(text: str, nearest: Sequence[str]) -> str:
    """Return the error message for a question that names no entity of the graph."""
    advice = "name an entity as the graph does"
    if nearest:
        advice = f"did you mean {_either(nearest)}?"
    return f"the question {text!r} names no entity of the graph: {advice}"


def distractor_refusal(text: str) -> UserError:
    """Return the error for a question in the distractor setting that is none of the task's."""
    return UserError(
        f"the question {text!r} has no passages of its own, but task.setting is distractor, where "
        "a search covers only the passages given with a question: ask one of the task's questions "
        "word for word, or search all passages with --task.setting open"
    )


def _own_question(task: Task, text: str) -> AskedQuestion | None:
    """Return the question of the task with this text, or None if there is none."""
    wanted = _comparable(text)
    for split in SPLITS:
        for question in task.questions(split):
            if _comparable(question.text) == wanted:
                note = f"this is the question {question.id} of the split {split}"
                if question.answers:
                    note += f"; its gold answer is {question.answers[0]}"
                return AskedQuestion(
                    question=dataclasses.replace(question, answers=(), answer_sets=()),
                    environment=task.environment(question),
                    notes=(note,),
                )
    return None


def _comparable(text: str) -> str:
    """Return a question in a form in which case, spacing and the question mark do not matter."""
    return " ".join(text.casefold().split()).rstrip("?").rstrip()


def _either(texts: Sequence[str]) -> str:
    """Return texts as "A, B or C"."""
    *first_texts, last_text = texts
    return f"{', '.join(first_texts)} or {last_text}" if first_texts else last_text


def _described_entity(entity: Entity) -> str:
    """Return the label and the key of an entity."""
    return entity.label if entity.id == entity.label else f"{entity.label} ({entity.id})"
