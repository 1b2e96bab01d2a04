"""QALD-10: questions over Wikidata, answered from a knowledge graph.

The data set gives a SPARQL query and its result with each question. The candidates of a question
are the entities that its query names. The gold answers are the result of the query: entity labels,
values, yes or no.

Answers are written as searches of the graph show them, so that an answer copied from a search
result is correct. Values are printed by `retrieval/graph/values.py`. Entities have their labels in
the language of the question (`sparql.languages_for`). Other spellings of a value (1996-06-15, June
15, 1996) are aliases.

A question is left out and counted if the graph lacks one of its answers or all of its candidates.
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
from mujica_jax.tasks.graphs import open_knowledge_graph, ranking
from mujica_jax.tasks.open_domain.task import OpenDomain
from mujica_jax.tasks.passages import fetched_index
from mujica_jax.tasks.prepared import prepared_records
from mujica_jax.tasks.question_fields import check_characters, read_id, read_question
from mujica_jax.tasks.task import Remarks, Split, hash_of

PATTERNS = ("qald*.json", "qald*.json.gz")
_wikidata_entity = re.compile(r"\bwd:(Q\d+)\b|<http://www\.wikidata\.org/entity/(Q\d+)>")
# The address of an entity or property of Wikidata: its own address, its page or its predicate.
_wikidata_key = re.compile(
    r"https?://www\.wikidata\.org/(?:entity|wiki|prop(?:/[a-z-]+)*)/(?:Property:)?([QP]\d+)",
    re.ASCII,
)


def build(config: QaldConfig) -> OpenDomain:
    """Return the task of a configuration. Raises UserError if it cannot be built."""
    config = with_data_folder(config)
    if config.index is None:
        raise UserError(
            "task.kind qald10 needs a graph of Wikidata, but task.index is None: give the "
            "directory of a graph or sparql+https://HOST/sparql (docs/guides/graphs.md)"
        )
    all_records = list(read_qald(config.data_dir, config.language))
    all_records.sort(key=lambda record: hash_of(record["id"]))
    records = all_records[: config.max_questions]

    triple_ranking = ranking(config)
    graph = open_knowledge_graph(str(fetched_index(config.index)), config.queries_per_second)
    if not isinstance(graph, KnowledgeGraph):
        raise UserError(
            f"task.index {config.index} is not a knowledge graph: give an index of kind graph"
        )
    graph.prefer_language(config.language)
    try:
        labelled_questions = asyncio.run(_label_questions(graph, records))
    except RetrievalError as error:
        raise UserError(f"could not look up the labels of QALD's entities: {error}") from error

    questions: dict[Split, list[Question]] = {"train": [], "dev": [], "test": []}
    left_out: list[str] = []
    for record, question in zip(records, labelled_questions, strict=True):
        if question is None:
            left_out.append(str(record["id"]))
            continue
        is_dev = hash_of(question.id) % 100 < config.dev_percent
        questions["dev" if is_dev else "test"].append(question)
    if not any(questions.values()):
        raise UserError(
            f"the graph {config.index} lacks the entities of all {len(all_records)} questions: give "
            "a graph of Wikidata"
        )
    environment = GraphEnvironment(graph, config.top_k, triple_ranking)
    return OpenDomain(
        config, questions, environment, own_environments={}, remarks=Remarks(left_out=left_out)
    )


def read_qald(data_dir: str, language: str) -> Iterator[dict[str, Any]]:
    """Yield the questions as dictionaries, each question once.

    The keys are `id`, `text`, `entities` (Q-ids), `answers` and `spellings`. An answer is ("uri",
    its IRI) or ("literal", its printed form). `spellings` holds the other ways to write each
    answer. Raises UserError with file and question for a malformed question.
    """
    folder = Path(data_dir)
    if is_prepared(folder):
        placed_values = iter(prepared_records(folder, "qald10"))
    else:
        placed_values = official_records(folder)

    # The first record of each id, and its place.
    first_records: dict[str, tuple[dict[str, Any], str]] = {}
    for place, value in placed_values:
        check_characters(value, place)
        try:
            record = _record(value, language)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise UserError(
                f"{place}: this is not a question of QALD ({type(error).__name__}: {error}); use "
                "the official format, and a task.language in which the question is given"
            ) from error
        if record["id"] not in first_records:
            first_records[record["id"]] = (record, place)
            yield record
            continue
        first, first_place = first_records[record["id"]]
        if first != record:
            raise UserError(
                f"{place}: the question {value['id']} is {record['text']!r} here and "
                f"{first['text']!r} in {first_place}, or has other answers there; give each "
                "question its own id"
            )


def qald_files(folder: Path) -> list[Path]:
    """Return the files with questions, in a fixed order."""
    files: list[Path] = []
    for pattern in PATTERNS:
        files += visible_files(folder, pattern)
    return files


def official_records(folder: Path) -> Iterator[tuple[str, Any]]:
    """Yield (place, record) for each question of the official files. Raises UserError."""
    files = qald_files(folder)
    if not files:
        raise UserError(
            f"task.data_dir {folder} has no file with questions: put qald_10.json from KGQA/QALD-10 "
            "there, plain or .gz"
        )
    for file in files:
        try:
            with open_text(file) as text:
                values = json.load(text)["questions"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(
                f"{file} is not a file of QALD ({type(error).__name__}: {error}): use the official "
                "format"
            ) from error
        for number, value in enumerate(values):
            yield f"{file}, question {number}", value


def _record(value: Mapping[str, Any], language: str) -> dict[str, Any]:
    """Return the fields of a question, as `read_qald` describes them."""
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
    other_spellings: list[tuple[str, ...]] = []
    for term in terms:
        if isinstance(term, Literal) and term.value.strip():
            printed_form, *other_forms = spellings(term)
            answers.append(("literal", printed_form))
            other_spellings.append(tuple(other_forms))
        elif isinstance(term, NamedNode):
            answers.append(("uri", term.value))
            other_spellings.append(())
        else:
            # A blank node has no name, and a blank text is no answer. So the answer is unknown.
            answers.append(("unknown", ""))
            other_spellings.append(())

    # The pattern has two groups and matches the Q-id in one of them. The other one is empty.
    matches = _wikidata_entity.findall(value["query"]["sparql"])
    entities = dict.fromkeys(short or long for short, long in matches)
    return {
        "id": f"qald-{read_id(value['id'])}",
        "text": text,
        "entities": tuple(entities),
        "answers": tuple(answers),
        "spellings": tuple(other_spellings),
    }


async def _label_questions(
    graph: KnowledgeGraph, records: Sequence[Mapping[str, Any]]
) -> list[Question | None]:
    """Return the question of each record, with the labels of the graph.

    The question is None if the graph lacks one of its answers or all of its candidates.
    """
    labels = _Labels(graph)
    return [await _label_question(labels, record) for record in records]


async def _label_question(labels: "_Labels", record: Mapping[str, Any]) -> Question | None:
    """Return the question of one record, or None as in `_label_questions`."""
    # Look up the labels of all answers and of all candidates.
    # For each answer its printed form, then its aliases.
    answers: list[tuple[str, ...]] = []
    for (kind, value), other_forms in zip(record["answers"], record["spellings"], strict=True):
        answers.append(await labels.answer(kind, value, other_forms))
    candidates: list[Entity] = []
    for key in record["entities"]:
        label = await labels.of_key(key)
        if label is not None:
            candidates.append(Entity(id=key, label=label))
    if not candidates or not answers or not all(answers):
        return None

    # Printed forms come first, so that they are the gold answers.
    names = [forms[0] for forms in answers]
    for forms in answers:
        names += forms[1:]
    return Question(
        id=record["id"],
        text=record["text"],
        answers=tuple(dict.fromkeys(names)),
        answer_sets=(tuple(answers),),
        candidates=tuple(candidates),
    )


class _Labels:
    """The labels of a graph's entities. Each label is looked up once."""

    def __init__(self, graph: KnowledgeGraph) -> None:
        self._graph = graph
        self._labels: dict[str, str | None] = {}

    async def of_key(self, key: str) -> str | None:
        """Return the label of an entity, or None if the graph has none."""
        if key not in self._labels:
            self._labels[key] = await self._graph.label_of(key)
        return self._labels[key]

    async def answer(self, kind: str, value: str, other_forms: tuple[str, ...]) -> tuple[str, ...]:
        """Return an answer in the form of the graph's search results, then its aliases.

        The result is empty if the graph does not know the answer.
        """
        if kind == "literal":
            return (value, *other_forms)
        if kind != "uri":
            return ()

        wikidata_match = _wikidata_key.fullmatch(value)
        if wikidata_match is not None:
            label = await self.of_key(wikidata_match[1])
            return () if label is None else (label,)
        label = await self.of_key(value) or readable_iri(value)
        return (label, value) if label else ()
