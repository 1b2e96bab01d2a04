"""QALD-10: questions over Wikidata whose answers are what a SPARQL query finds, answered over a
knowledge graph.

A question's candidates are the entities that its query names. Its answers are what the query found:
labels of entities, values, yes or no. Each is written as the graph that is searched prints it, so
that an answer copied from a search result is correct: values as `retrieval/graph/values.py` prints
them, entities by their labels in the question's language (`sparql.languages_for`). Other spellings
of a value (1996-06-15, June 15, 1996) are its aliases.

A question with an answer or without a candidate that the graph does not know is left out, and
counted.
"""

import asyncio
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pyoxigraph import Literal, NamedNode

from mujica_jax.config.tasks import QaldConfig
from mujica_jax.errors import UserError
from mujica_jax.records import Entity, Question
from mujica_jax.retrieval.errors import RetrievalError
from mujica_jax.retrieval.graph.knowledge_graph import KnowledgeGraph
from mujica_jax.retrieval.graph.sparql import term_of
from mujica_jax.retrieval.graph.values import BOOLEANS, readable_iri, spellings
from mujica_jax.retrieval.text.corpus_records import open_text
from mujica_jax.storage.local import visible_files
from mujica_jax.tasks.data_folder import is_prepared, with_data_folder
from mujica_jax.tasks.environment import GraphEnvironment
from mujica_jax.tasks.open_domain.records import prepared_records
from mujica_jax.tasks.open_domain.task import OpenDomain
from mujica_jax.tasks.passages import fetched_index
from mujica_jax.tasks.question_fields import check_characters, read_id, read_question
from mujica_jax.tasks.task import Split, hash_of
from mujica_jax.tasks.two_wiki.search import open_knowledge_graph, ranking

PATTERNS = ("qald*.json", "qald*.json.gz")
_named = re.compile(r"\bwd:(Q\d+)\b|<http://www\.wikidata\.org/entity/(Q\d+)>")
# An entity or a property of Wikidata, under its own address, as a page or as a predicate.
_wikidata_key = re.compile(
    r"https?://www\.wikidata\.org/(?:entity|wiki|prop(?:/[a-z-]+)*)/(?:Property:)?([QP]\d+)",
    re.ASCII,
)


def build(config: QaldConfig) -> OpenDomain:
    config = with_data_folder(config)
    if config.index is None:
        raise UserError(
            "task.kind qald10 is answered over Wikidata and task.index is None: give the directory "
            "of a graph or sparql+https://HOST/sparql (docs/graphs.md)"
        )
    records = sorted(
        read_qald(config.data_dir, config.language), key=lambda record: hash_of(record["id"])
    )
    ranked = ranking(config)
    graph = open_knowledge_graph(str(fetched_index(config.index)), config.queries_per_second)
    if not isinstance(graph, KnowledgeGraph):
        raise UserError(f"the index {config.index} is no knowledge graph: give one of kind graph")
    graph.prefer_language(config.language)
    try:
        found = asyncio.run(_asked_of(graph, records[: config.max_questions]))
    except RetrievalError as error:
        raise UserError(f"the labels of QALD's entities could not be looked up: {error}") from error
    questions: dict[Split, list[Question]] = {"train": [], "dev": [], "test": []}
    for question in (question for question in found if question is not None):
        questions["dev" if hash_of(question.id) % 100 < config.dev_percent else "test"].append(
            question
        )
    if not any(questions.values()):
        raise UserError(
            f"the graph {config.index} knows the entities of none of {len(records)} questions: "
            "give Wikidata's"
        )
    lost = [
        str(record["id"])
        for record, question in zip(records[: config.max_questions], found, strict=True)
        if question is None
    ]
    return OpenDomain(
        config, questions, GraphEnvironment(graph, config.top_k, ranked), {}, left_out=lost
    )


def read_qald(data_dir: str, language: str) -> Iterator[dict[str, Any]]:
    """Read the questions: `id`, `text`, `entities` (Q-ids), `answers` and `spellings`.

    An answer is ("uri", its IRI) or ("literal", its printed form). `spellings` has for each answer
    the other ways to write it. A question that is given twice counts once. Raises UserError naming
    file and question.
    """
    folder = Path(data_dir)
    first_places: dict[
        str, tuple[dict[str, Any], str]
    ] = {}  # of an id: its record and where it stands
    placed = prepared_records(folder, "qald10") if is_prepared(folder) else official_records(folder)
    for place, value in placed:
        check_characters(value, place)
        try:
            record = _record(value, language)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise UserError(
                f"{place}: this is no question of QALD ({type(error).__name__}: {error}); use the "
                "official format, and a task.language that it has"
            ) from error
        if record["id"] not in first_places:
            first_places[record["id"]] = (record, place)
            yield record
            continue
        first, first_place = first_places[record["id"]]
        if first != record:
            raise UserError(
                f"{place}: the question {value['id']} is {record['text']!r} here and "
                f"{first['text']!r} in {first_place}, or has other answers there; give each "
                "question its own id"
            )


def qald_files(folder: Path) -> list[Path]:
    """Return the files with questions, in a fixed order."""
    return [file for pattern in PATTERNS for file in visible_files(folder, pattern)]


def official_records(folder: Path) -> Iterator[tuple[str, Any]]:
    """Each question with the place it stands at."""
    files = qald_files(folder)
    if not files:
        raise UserError(
            f"task.data_dir {folder} has no file of questions: put qald_10.json from KGQA/QALD-10 "
            "there, plain or .gz"
        )
    for file in files:
        try:
            with open_text(file) as text:
                listed = json.load(text)["questions"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(
                f"{file} is no file of QALD ({type(error).__name__}: {error}): use the official "
                "format"
            ) from error
        yield from ((f"{file}, question {number}", value) for number, value in enumerate(listed))


def _record(value: Mapping[str, Any], language: str) -> dict[str, Any]:
    texts = {entry["language"]: entry["string"] for entry in value["question"]}
    text = read_question(texts[language])
    if not text:
        raise ValueError(f"the question is blank in the language {language}")
    (answer,) = value["answers"]
    if "boolean" in answer:
        terms = [Literal(BOOLEANS[str(answer["boolean"]).lower()])]
    else:
        (name,) = answer["head"]["vars"]
        terms = [term_of(row[name]) for row in answer["results"]["bindings"]]

    answers: list[tuple[str, str]] = []
    others: list[tuple[str, ...]] = []
    for term in terms:
        if isinstance(term, Literal) and term.value.strip():
            printed, *other_forms = spellings(term)
            answers.append(("literal", printed))
            others.append(tuple(other_forms))
        elif isinstance(term, NamedNode):
            answers.append(("uri", term.value))
            others.append(())
        else:
            answers.append(
                ("unknown", "")
            )  # a blank node has no name, and a blank text is no answer
            others.append(())

    named = dict.fromkeys(short or long for short, long in _named.findall(value["query"]["sparql"]))
    return {
        "id": f"qald-{read_id(value['id'])}",
        "text": text,
        "entities": tuple(named),
        "answers": tuple(answers),
        "spellings": tuple(others),
    }


async def _asked_of(
    graph: KnowledgeGraph, records: Sequence[Mapping[str, Any]]
) -> list[Question | None]:
    """Return the question of each record, None where the graph does not know an answer or any
    candidate."""
    labels = _Labels(graph)
    questions: list[Question | None] = []
    for record in records:
        written = [
            await labels.answer(kind, value, other_forms)
            for (kind, value), other_forms in zip(
                record["answers"], record["spellings"], strict=True
            )
        ]
        known = tuple(forms for forms in written if forms)
        candidates = []
        for key in record["entities"]:
            label = await labels.of_key(key)
            if label is not None:
                candidates.append(Entity(id=key, label=label))
        if not candidates or not known or len(known) < len(written):
            questions.append(None)
            continue
        printed = [forms[0] for forms in known]
        aliases = [alias for forms in known for alias in forms[1:]]
        question = Question(
            id=record["id"],
            text=record["text"],
            answers=tuple(dict.fromkeys((*printed, *aliases))),
            answer_sets=(known,),
            candidates=tuple(candidates),
        )
        questions.append(question)
    return questions


class _Labels:
    """Labels of a graph's entities, each looked up once."""

    def __init__(self, graph: KnowledgeGraph) -> None:
        self._graph = graph
        self._labels: dict[str, str | None] = {}

    async def of_key(self, key: str) -> str | None:
        if key not in self._labels:
            self._labels[key] = await self._graph.label_of(key)
        return self._labels[key]

    async def answer(self, kind: str, value: str, other_forms: tuple[str, ...]) -> tuple[str, ...]:
        """Return an answer as the graph prints it, then its aliases. Empty: the graph does not know
        it."""
        if kind == "literal":
            return (value, *other_forms)
        if kind != "uri":
            return ()
        wikidata = _wikidata_key.fullmatch(value)
        if wikidata is not None:
            label = await self.of_key(wikidata[1])
            return () if label is None else (label,)
        label = await self.of_key(value) or readable_iri(value)
        return (label, value) if label else ()
