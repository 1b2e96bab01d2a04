"""QALD-10: questions over Wikidata whose answers are what a SPARQL query finds, answered over a knowledge graph.

A question's candidates are the entities that its query names, and its answers what the query found: labels of entities,
values as they read, yes or no. Labels come from the graph that is searched, so that an answer is called what the graph
calls it; a question with an answer or without a candidate that the graph does not know is left out, and counted.
"""

import asyncio
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mujica_jax.config.tasks import QaldConfig
from mujica_jax.errors import UserError
from mujica_jax.records import Entity, Question
from mujica_jax.retrieval.errors import RetrievalError
from mujica_jax.retrieval.graph.knowledge_graph import KnowledgeGraph
from mujica_jax.retrieval.text.corpus_records import open_text
from mujica_jax.storage.local import visible_files
from mujica_jax.tasks.environment import GraphEnvironment
from mujica_jax.tasks.open_domain.records import is_prepared, prepared_records
from mujica_jax.tasks.open_domain.task import OpenDomain
from mujica_jax.tasks.passages import fetched_index
from mujica_jax.tasks.task import Split, hash_of
from mujica_jax.tasks.two_wiki.search import open_knowledge_graph

WIKIDATA = "http://www.wikidata.org/entity/"
MIDNIGHT = "T00:00:00Z"  # the time of day that Wikidata gives every date
PATTERNS = ("qald*.json", "qald*.json.gz")
_named = re.compile(r"\bwd:(Q\d+)\b|<http://www\.wikidata\.org/entity/(Q\d+)>")


def build(config: QaldConfig) -> OpenDomain:
    if config.index is None:
        raise UserError(
            "task.kind qald10 is answered over Wikidata and task.index is None: give the directory of a graph or "
            "sparql+https://HOST/sparql (docs/graphs.md)"
        )
    records = sorted(read_qald(config.data_dir, config.language), key=lambda record: hash_of(record["id"]))
    graph = open_knowledge_graph(str(fetched_index(config.index)), config.queries_per_second)
    if not isinstance(graph, KnowledgeGraph):
        raise UserError(f"the index {config.index} is no knowledge graph: give one of kind graph")
    try:
        found = asyncio.run(_asked_of(graph, records[: config.max_questions]))
    except RetrievalError as error:
        raise UserError(f"the labels of QALD's entities could not be looked up: {error}") from error
    questions: dict[Split, list[Question]] = {"train": [], "dev": [], "test": []}
    for question in (question for question in found if question is not None):
        questions["dev" if hash_of(question.id) % 100 < config.dev_percent else "test"].append(question)
    if not any(questions.values()):
        raise UserError(
            f"the graph {config.index} knows the entities of none of {len(records)} questions: give Wikidata's"
        )
    lost = [
        str(record["id"])
        for record, question in zip(records[: config.max_questions], found, strict=True)
        if question is None
    ]
    return OpenDomain(config, questions, GraphEnvironment(graph, config.top_k), {}, left_out=lost)


def read_qald(data_dir: str, language: str) -> Iterator[dict[str, Any]]:
    """`id`, `text`, `entities` (Q-ids) and `answers`: (kind, value) each. Raises UserError naming file and question."""
    folder = Path(data_dir)
    for place, value in prepared_records(folder) if is_prepared(folder) else official_records(folder):
        try:
            yield _record(value, language)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise UserError(
                f"{place}: this is no question of QALD ({type(error).__name__}: {error}); use the official format, "
                "and a task.language that it has"
            ) from error


def official_records(folder: Path) -> Iterator[tuple[str, Any]]:
    """Each question with the place it stands at."""
    files = [file for pattern in PATTERNS for file in visible_files(folder, pattern)]
    if not files:
        raise UserError(
            f"task.data_dir {folder} has no file of questions: put qald_10.json from KGQA/QALD-10 there, plain or .gz"
        )
    for file in files:
        try:
            with open_text(file) as text:
                listed = json.load(text)["questions"]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{file} is no file of QALD ({type(error).__name__}: {error}): use the official format"
            ) from error
        yield from ((f"{file}, question {number}", value) for number, value in enumerate(listed))


def _record(value: Mapping[str, Any], language: str) -> dict[str, Any]:
    texts = {entry["language"]: entry["string"] for entry in value["question"]}
    (answer,) = value["answers"]
    if "boolean" in answer:
        answers = [("literal", "yes" if answer["boolean"] else "no")]
    else:
        (name,) = answer["head"]["vars"]
        answers = [(row[name]["type"], row[name]["value"]) for row in answer["results"]["bindings"]]
    named = dict.fromkeys(short or long for short, long in _named.findall(value["query"]["sparql"]))
    asked = {"id": f"qald-{value['id']}", "text": texts[language].strip()}
    return asked | {"entities": tuple(named), "answers": tuple(answers)}


async def _asked_of(graph: KnowledgeGraph, records: Sequence[Mapping[str, Any]]) -> list[Question | None]:
    labels: dict[str, str | None] = {}

    async def label(key: str) -> str | None:
        if key not in labels:
            ends = await graph.ends_of(key)
            end = ends[0] if ends else None
            labels[key] = None if end is None else (end.triple.object if end.as_object else end.triple.subject)
        return labels[key]

    found: list[Question | None] = []
    for record in records:
        answers = []
        for kind, value in record["answers"]:
            is_entity = kind == "uri" and value.startswith(WIKIDATA)
            answers.append(await label(value.removeprefix(WIKIDATA)) if is_entity else value.removesuffix(MIDNIGHT))
        named = [(key, await label(key)) for key in record["entities"]]
        candidates = tuple(Entity(id=key, label=known) for key, known in named if known is not None)
        known_answers = tuple(answer for answer in answers if answer is not None)
        if not candidates or not known_answers or len(known_answers) < len(answers):
            found.append(None)
            continue
        sets = (tuple((answer,) for answer in known_answers),)
        asked = {"id": record["id"], "text": record["text"], "answer_sets": sets}
        found.append(Question(**asked, answers=known_answers, candidates=candidates))
    return found
