"""Open-domain and multi-hop questions over passages: of one index for all, or of those given with each question."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

from mujica_jax.config.tasks import MultiHopConfig, OpenDomainConfig, QaldConfig
from mujica_jax.errors import UserError
from mujica_jax.metrics import Rule
from mujica_jax.records import GoldPassage, Question
from mujica_jax.tasks.environment import TextEnvironment
from mujica_jax.tasks.open_domain.records import OpenRecord, read_set
from mujica_jax.tasks.passages import OwnPassages, as_passages, fetched_index, open_passages, titled
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
        left_out: Sequence[str] = (),
    ) -> None:
        """`environment` is that of all questions; None: each has its `own`, by id. `left_out` cannot be asked."""
        self.name, self.rule, self.left_out = config.kind, RULES[config.kind], left_out
        self.environment_kind: EnvironmentKind = config.environment
        self._questions, self._environment, self._own = questions, environment, own
        self._config = config

    def questions(self, split: Split) -> Sequence[Question]:
        """In the order of the hash of their ids, so that a prefix is a random sample."""
        return self._questions[split]

    def environment(self, question: Question) -> Environment:
        return self._own[question.id] if self._environment is None else self._environment

    def own_paragraphs(self, question: Question) -> Sequence[GoldPassage]:
        """Return the paragraphs that HotpotQA or MuSiQue gives with the question. The other sets give none."""
        return self._paragraphs.get(question.id, ())

    @functools.cached_property
    def _paragraphs(self) -> Mapping[str, Sequence[GoldPassage]]:
        """The paragraphs of all questions, read from the files when they are first asked for."""
        if not isinstance(self._config, MultiHopConfig):
            return {}
        paragraphs: dict[str, Sequence[GoldPassage]] = {}
        for _, record in read_set(Path(self._config.data_dir), self._config.kind):
            paragraphs.setdefault(record.id, record.context)
        return paragraphs


def build(config: OpenDomainConfig) -> OpenDomain:
    by_split: dict[Split, dict[str, OpenRecord]] = {"train": {}, "dev": {}, "test": {}}
    for training, record in read_set(Path(config.data_dir), config.kind):
        held_out: Split = "dev" if hash_of(record.id) % 100 < config.dev_percent else "test"
        by_split["train" if training else held_out].setdefault(record.id, record)
    for split in ("dev", "test"):  # a file that was given twice under two names does not train on what it tests
        for id in by_split["train"].keys() & by_split[split].keys():
            del by_split["train"][id]
    chosen: dict[Split, list[OpenRecord]] = {
        split: sorted(records.values(), key=lambda record: hash_of(record.id))[: config.max_questions]
        for split, records in by_split.items()
    }
    records = [record for of_split in chosen.values() for record in of_split]
    if not records:
        raise UserError(f"task.data_dir {config.data_dir} has no question with an answer: give the official files")
    if isinstance(config, MultiHopConfig) and config.setting == "distractor":
        own: Mapping[str, Environment] = OwnPassages({of.id: of.context for of in records}, config.top_k)
        environment, texts = None, {}
    else:
        given = [passage for record in records for passage in record.context]
        config = dataclasses.replace(config, index=fetched_index(config.index))
        if config.index is None and not given:
            raise UserError(
                f"task.kind {config.kind} has questions without passages and index is None: give --task.index with an "
                "index of Wikipedia, as docs/retrieval.md builds one"
            )
        retriever, passages = open_passages(config, lambda: as_passages(dict.fromkeys(given)))
        own, environment = {}, TextEnvironment(retriever, config.top_k)
        texts = {passage.title: passage.text for passage in titled(passages, {t for r in records for t in r.titles})}
    questions: dict[Split, Sequence[Question]] = {
        split: [_question(record, texts) for record in of_split] for split, of_split in chosen.items()
    }
    return OpenDomain(config, questions, environment, own)


def _question(record: OpenRecord, texts: Mapping[str, str]) -> Question:
    given = {passage.title: passage.text for passage in record.context}
    return Question(
        id=record.id,
        text=record.text,
        answers=record.answers,
        answer_sets=record.answer_sets,
        gold_passages=tuple(
            GoldPassage(title=title, text=texts.get(title, given.get(title, ""))) for title in record.titles
        ),
        kind=record.kind,
    )
