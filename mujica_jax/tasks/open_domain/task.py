"""Tasks with open-domain and multi-hop questions over passages.

The environment searches one index for all questions, or the passages that are given with each
question.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mujica_jax.config.tasks import MultiHopConfig, OpenDomainConfig, QaldConfig
from mujica_jax.errors import UserError
from mujica_jax.metrics import Rule
from mujica_jax.records import GoldPassage, Question
from mujica_jax.tasks.asked import (
    AskedQuestion,
    GraphSearch,
    distractor_refusal,
    over_graph,
    over_passages,
    search_of,
)
from mujica_jax.tasks.data_folder import with_data_folder
from mujica_jax.tasks.environment import GraphEnvironment, TextEnvironment
from mujica_jax.tasks.open_domain.records import OpenRecord, read_set
from mujica_jax.tasks.passages import (
    GoldInCorpus,
    OwnPassages,
    as_passages,
    fetched_index,
    is_service,
    leave_incomplete_out,
    open_passages,
    reranker_of,
)
from mujica_jax.tasks.task import Environment, EnvironmentKind, Remarks, Split, hash_of

# The scoring rule of each task. The rule `musique` has the normalisation of SQuAD and plain token
# F1, which open-domain papers use.
RULES: Mapping[str, Rule] = {
    "hotpotqa": "hotpot",
    "musique": "musique",
    "nq": "musique",
    "triviaqa": "triviaqa",
    "popqa": "cover_em",
    "ambigqa": "musique",
    "bamboogle": "musique",
    "qald10": "musique",
    "questions": "musique",
}


NO_REMARKS = Remarks()
# The paragraphs given with each question, by the question's id.
Paragraphs = Mapping[str, Sequence[GoldPassage]]


class OpenDomain:
    """A `Task` without demonstrations. Runs have to start from a checkpoint."""

    def __init__(
        self,
        config: OpenDomainConfig | QaldConfig,
        questions: Mapping[Split, Sequence[Question]],
        environment: Environment | None,
        own_environments: Mapping[str, Environment],
        remarks: Remarks = NO_REMARKS,
        read_paragraphs: Callable[[], Paragraphs] = dict,
    ) -> None:
        """Take the questions, and the environments in which they are answered.

        `environment` serves all questions. If it is None, `own_environments` has the environment
        of each question, by question id.

        `read_paragraphs` returns the paragraphs that the data set gives with each question, by id.
        It is called when they are first needed, because they may take much memory.
        """
        self.name = config.kind
        self.rule = RULES[config.kind]
        self.left_out = tuple(remarks.left_out)
        self.notes = tuple(remarks.notes)
        self.shown = remarks.shown
        self.environment_kind: EnvironmentKind = config.environment
        self._language = config.language if isinstance(config, QaldConfig) else "en"
        self._questions = questions
        self._environment = environment
        self._own_environments = own_environments
        self._read_paragraphs = read_paragraphs

    def questions(self, split: Split) -> Sequence[Question]:
        """Return the questions of a split, ordered by the hash of their ids.

        So the first questions are a random sample.
        """
        return self._questions[split]

    def environment(self, question: Question) -> Environment:
        """Return the environment in which this question is answered."""
        if self._environment is None:
            return self._own_environments[question.id]
        return self._environment

    async def asked(self, text: str) -> AskedQuestion:
        """Return a user's question as a question of this task.

        Raises UserError in the distractor setting, or if the question names no entity of the graph.
        """
        if self._environment is None:
            raise distractor_refusal(text)
        if self._graph_search is not None:
            return await over_graph(text, self._graph_search, language=self._language)
        return over_passages(text, self._environment)

    @functools.cached_property
    def _graph_search(self) -> GraphSearch | None:
        """The graph as questions of users need it. None over passages."""
        if not isinstance(self._environment, GraphEnvironment):
            return None
        return search_of(self._environment)

    def own_paragraphs(self, question: Question) -> Sequence[GoldPassage]:
        """Return the paragraphs that the data set gives with the question. Some sets give none."""
        return self._paragraphs.get(question.id, ())

    @functools.cached_property
    def _paragraphs(self) -> Paragraphs:
        return self._read_paragraphs()


def build(config: OpenDomainConfig) -> OpenDomain:
    """Return the task of a configuration. Raises UserError if it cannot be built."""
    config = with_data_folder(config)
    read_paragraphs: Callable[[], Paragraphs] = dict
    if isinstance(config, MultiHopConfig):
        read_paragraphs = functools.partial(_paragraphs_of_files, config)
    return task_of(config, _read_splits(config), read_paragraphs)


def _paragraphs_of_files(config: MultiHopConfig) -> Paragraphs:
    """Return the paragraphs of all questions by id, read from the files."""
    paragraphs: dict[str, Sequence[GoldPassage]] = {}
    for _, record in read_set(Path(config.data_dir), config.kind):
        paragraphs.setdefault(record.id, record.context)
    return paragraphs


def task_of(
    config: OpenDomainConfig,
    split_records: Mapping[Split, Mapping[str, OpenRecord]],
    read_paragraphs: Callable[[], Paragraphs],
) -> OpenDomain:
    """Return the task that asks these records over the passages that the configuration names.

    `split_records` has the records of each split by id. `read_paragraphs` returns the paragraphs
    that the data set gives with each question. Raises UserError if there is nothing to search.
    """
    if isinstance(config, MultiHopConfig) and config.setting == "distractor":
        return _distractor_task(config, split_records, read_paragraphs)

    # Choose the questions.
    split_records = _first_by_hash(split_records, config.max_questions)
    records = _all_records(split_records)

    # Open the index, and find the gold passages in it.
    own_passages = [passage for record in records for passage in record.context]
    config = dataclasses.replace(config, index=fetched_index(config.index))
    if config.index is None and not own_passages:
        raise UserError(
            f"task.kind {config.kind} has no passages of its own, but task.index is None: give "
            "--task.index with an index of passages, as docs/guides/passages.md builds it"
        )
    retriever, passages = open_passages(
        config, lambda: as_passages(dict.fromkeys(own_passages)), reranker_of(config)
    )
    titles = {title for record in records for title in record.titles}
    corpus = GoldInCorpus(passages, titles, by_title=is_service(config.index))
    questions = _questions(split_records, corpus)
    return OpenDomain(
        config,
        questions,
        TextEnvironment(retriever, config.top_k),
        own_environments={},
        read_paragraphs=read_paragraphs,
    )


def _distractor_task(
    config: MultiHopConfig,
    split_records: Mapping[Split, Mapping[str, OpenRecord]],
    read_paragraphs: Callable[[], Paragraphs],
) -> OpenDomain:
    """Return the task in the distractor setting, where a search covers a question's own passages.

    Questions whose own passages lack a gold passage are left out, unless `keep_incomplete` is set.
    """
    all_records = _all_records(split_records)
    incomplete = [record.id for record in all_records if not record.has_gold_in_context]
    left_out, notes = leave_incomplete_out(config, incomplete, len(all_records))

    ids_left_out = set(left_out)
    complete_records: dict[Split, dict[str, OpenRecord]] = {}
    for split, records in split_records.items():
        complete_records[split] = {
            id: record for id, record in records.items() if id not in ids_left_out
        }
    chosen_records = _first_by_hash(complete_records, config.max_questions)

    contexts = {record.id: record.context for record in _all_records(chosen_records)}
    own_passages = OwnPassages(contexts, config.top_k, reranker_of(config))
    return OpenDomain(
        config,
        _questions(chosen_records, corpus=None),
        None,
        own_passages,
        Remarks(left_out=left_out, notes=notes, shown=own_passages.describe()),
        read_paragraphs=read_paragraphs,
    )


def _read_splits(config: OpenDomainConfig) -> dict[Split, dict[str, OpenRecord]]:
    """Return the records of each split, by id. No record of dev or test is in train."""
    split_records: dict[Split, dict[str, OpenRecord]] = {"train": {}, "dev": {}, "test": {}}
    for is_training, record in read_set(Path(config.data_dir), config.kind):
        split: Split
        if is_training:
            split = "train"
        elif hash_of(record.id) % 100 < config.dev_percent:
            split = "dev"
        else:
            split = "test"
        split_records[split].setdefault(record.id, record)

    # If a file is there under two names, its questions may be both for training and held out.
    training_records = split_records["train"]
    for held_out_split in ("dev", "test"):
        for id in training_records.keys() & split_records[held_out_split].keys():
            del training_records[id]

    if not any(split_records.values()):
        raise UserError(
            f"task.data_dir {config.data_dir} has no question with an answer: give the official "
            "files"
        )
    return split_records


def _first_by_hash(
    split_records: Mapping[Split, Mapping[str, OpenRecord]], max_questions: int | None
) -> dict[Split, dict[str, OpenRecord]]:
    """Return the first `max_questions` records of each split, ordered by the hash of their ids."""
    chosen_records: dict[Split, dict[str, OpenRecord]] = {}
    for split, records in split_records.items():
        ids = sorted(records, key=hash_of)[:max_questions]
        chosen_records[split] = {id: records[id] for id in ids}
    return chosen_records


def _all_records(split_records: Mapping[Split, Mapping[str, OpenRecord]]) -> list[OpenRecord]:
    """Return the records of all splits, one split after the other."""
    return [record for records in split_records.values() for record in records.values()]


def _questions(
    split_records: Mapping[Split, Mapping[str, OpenRecord]], corpus: GoldInCorpus | None
) -> dict[Split, Sequence[Question]]:
    """Return the questions of the records by split, in the order of the records."""
    questions: dict[Split, Sequence[Question]] = {}
    for split, records in split_records.items():
        questions[split] = [_question(record, corpus) for record in records.values()]
    return questions


def _question(record: OpenRecord, corpus: GoldInCorpus | None) -> Question:
    """Return the question of a record.

    Its gold passages are in the version of the corpus. Without a corpus, or if the corpus lacks a
    passage, the version of the record is used.
    """
    gold: list[GoldPassage] = []
    for passage in record.gold:
        corpus_passage = None if corpus is None else corpus.find(passage)
        gold.append(corpus_passage or passage)
    return Question(
        id=record.id,
        text=record.text,
        answers=record.answers,
        answer_sets=record.answer_sets,
        gold_passages=tuple(dict.fromkeys(gold)),
        kind=record.kind,
    )
