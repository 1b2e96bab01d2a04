"""Open-domain and multi-hop questions over passages: of one index for all, or of those given with
each question."""

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from mujica_jax.config.tasks import MultiHopConfig, OpenDomainConfig, QaldConfig
from mujica_jax.errors import UserError
from mujica_jax.metrics import Rule
from mujica_jax.records import GoldPassage, Question
from mujica_jax.tasks.data_folder import with_data_folder
from mujica_jax.tasks.environment import TextEnvironment
from mujica_jax.tasks.open_domain.records import OpenRecord, read_set
from mujica_jax.tasks.passages import (
    GoldInCorpus,
    OwnPassages,
    as_passages,
    fetched_index,
    is_service,
    leave_incomplete_out,
    open_passages,
)
from mujica_jax.tasks.task import Environment, EnvironmentKind, Split, hash_of

RULES: Mapping[str, Rule] = {
    "hotpotqa": "hotpot",
    "musique": "musique",
    "nq": "musique",  # SQuAD's normalisation and plain token F1, as open-domain papers score them
    "triviaqa": "triviaqa",
    "popqa": "cover_em",
    "ambigqa": "musique",
    "bamboogle": "musique",
    "qald10": "musique",
}


class OpenDomain:
    """Implements `Task`. There are no demonstrations: a run starts from a checkpoint."""

    def __init__(
        self,
        config: OpenDomainConfig | QaldConfig,
        questions: Mapping[Split, Sequence[Question]],
        environment: Environment | None,
        own: Mapping[str, Environment],
        left_out: Collection[str] = (),
        notes: Sequence[str] = (),
        shown: str = "",
    ) -> None:
        """`environment` serves all questions; None: each question has its `own`, by id.

        `left_out` are ids of questions that cannot be asked, `notes` are sentences about the
        questions, and `shown` says how many of a question's own passages a search shows.
        """
        self.name = config.kind
        self.rule = RULES[config.kind]
        self.left_out = tuple(left_out)
        self.notes = tuple(notes)
        self.shown = shown
        self.environment_kind: EnvironmentKind = config.environment
        self._questions, self._environment, self._own = questions, environment, own
        self._config = config

    def questions(self, split: Split) -> Sequence[Question]:
        """In the order of the hash of their ids, so that a prefix is a random sample."""
        return self._questions[split]

    def environment(self, question: Question) -> Environment:
        return self._own[question.id] if self._environment is None else self._environment

    def own_paragraphs(self, question: Question) -> Sequence[GoldPassage]:
        """Return the paragraphs that HotpotQA or MuSiQue gives with the question. The other sets
        give none."""
        return self._paragraphs.get(question.id, ())

    @functools.cached_property
    def _paragraphs(self) -> Mapping[str, Sequence[GoldPassage]]:
        """The paragraphs of all questions. The files are read when the first is asked for."""
        if not isinstance(self._config, MultiHopConfig):
            return {}
        paragraphs: dict[str, Sequence[GoldPassage]] = {}
        for _, record in read_set(Path(self._config.data_dir), self._config.kind):
            paragraphs.setdefault(record.id, record.context)
        return paragraphs


def build(config: OpenDomainConfig) -> OpenDomain:
    config = with_data_folder(config)
    by_split: dict[Split, dict[str, OpenRecord]] = {"train": {}, "dev": {}, "test": {}}
    for training, record in read_set(Path(config.data_dir), config.kind):
        held_out: Split = "dev" if hash_of(record.id) % 100 < config.dev_percent else "test"
        by_split["train" if training else held_out].setdefault(record.id, record)
    for split in (
        "dev",
        "test",
    ):  # a file that was given twice under two names does not train on what it tests
        for id in by_split["train"].keys() & by_split[split].keys():
            del by_split["train"][id]
    if not any(by_split.values()):
        raise UserError(
            f"task.data_dir {config.data_dir} has no question with an answer: give the official "
            "files"
        )

    # In the distractor setting a question's gold passages are among its own: others are left out.
    is_distractor = False
    left_out: Sequence[str] = ()
    notes: Sequence[str] = ()
    if isinstance(config, MultiHopConfig) and config.setting == "distractor":
        is_distractor = True
        records = [record for of_split in by_split.values() for record in of_split.values()]
        incomplete = [record.id for record in records if not record.has_gold_in_context]
        left_out, notes = leave_incomplete_out(config, incomplete, len(records))
    is_left_out = set(left_out)
    chosen: dict[Split, list[OpenRecord]] = {}
    for split, of_split in by_split.items():
        asked = [record for record in of_split.values() if record.id not in is_left_out]
        chosen[split] = sorted(asked, key=lambda record: hash_of(record.id))[: config.max_questions]
    records = [record for of_split in chosen.values() for record in of_split]

    if is_distractor:
        own = OwnPassages({record.id: record.context for record in records}, config.top_k)
        questions = _questions(chosen, None)
        return OpenDomain(
            config, questions, None, own, left_out=left_out, notes=notes, shown=own.describe()
        )

    own_passages = [passage for record in records for passage in record.context]
    config = dataclasses.replace(config, index=fetched_index(config.index))
    if config.index is None and not own_passages:
        raise UserError(
            f"task.kind {config.kind} has questions without passages and index is None: give "
            "--task.index with an index of Wikipedia, as docs/retrieval.md builds one"
        )
    retriever, passages = open_passages(config, lambda: as_passages(dict.fromkeys(own_passages)))
    titles = {title for record in records for title in record.titles}
    corpus = GoldInCorpus(passages, titles, by_title=is_service(config.index))
    questions = _questions(chosen, corpus)
    return OpenDomain(config, questions, TextEnvironment(retriever, config.top_k), {})


def _questions(
    chosen: Mapping[Split, Sequence[OpenRecord]], corpus: GoldInCorpus | None
) -> dict[Split, Sequence[Question]]:
    questions: dict[Split, Sequence[Question]] = {}
    for split, records in chosen.items():
        questions[split] = [_question(record, corpus) for record in records]
    return questions


def _question(record: OpenRecord, corpus: GoldInCorpus | None) -> Question:
    """Return the question with its gold passages as the corpus has them, or else as the record has
    them."""
    gold = [
        passage if corpus is None else corpus.find(passage) or passage for passage in record.gold
    ]
    return Question(
        id=record.id,
        text=record.text,
        answers=record.answers,
        answer_sets=record.answer_sets,
        gold_passages=tuple(dict.fromkeys(gold)),
        kind=record.kind,
    )
