"""2WikiMultihopQA (Ho et al., 2020) as a task: questions over its knowledge graph or over a corpus
of passages.

- `environment="graph"` (2Wiki-KG): every question with evidences. Its candidates are the topic
  entities that the question itself names, under the graph's labels, in the order of the question. A
  search returns the triples of one entity, in both directions, from the data folder's graph or the
  one that `index` names. Demonstrations are always played in the data folder's.
- `environment="text"` (2Wiki-Text): the questions made for the corpus (`questions*.jsonl`, with
  aliases) whose gold passages it holds; without such a file, all of them. A search is BM25 over the
  corpus, or what the index that `index` names does with its own. The official files come with ten
  passages a question: they are the corpus where there is no other, and else what training questions
  are answered from whose gold passages the corpus lacks. Training questions with evidences whose
  gold passages no file has can be demonstrated (`triple_demonstrations`) and are never sampled.

A question's own `split` decides where it has one. Otherwise the official split does: questions of
`train*` are trained on, those of `dev*` never. A hash of the id decides about the others, and which
half of all that is held out is dev and which is test. Gold passages are told apart by title and
text. Answers have the official aliases of `id_aliases.json`, where the folder has it
(`aliases.py`).

Held-out questions, and triples or passages that no training question uses, appear neither in
demonstrations' new names nor in the tokenizer's text. The graph and the corpus that are searched
are the whole ones.
"""

import dataclasses
import functools
import itertools
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from mujica_jax.config.schema import TwoWikiConfig
from mujica_jax.errors import UserError
from mujica_jax.metrics import Rule
from mujica_jax.records import Entity, GoldPassage, Question
from mujica_jax.retrieval.graph.tables import read_triples
from mujica_jax.retrieval.graph.triples import Triple, TripleGraph
from mujica_jax.retrieval.retriever import IndexRetriever
from mujica_jax.retrieval.text.bm25 import Bm25Index
from mujica_jax.retrieval.text.corpus import Passage
from mujica_jax.tasks.data_folder import with_data_folder
from mujica_jax.tasks.environment import (
    GraphEnvironment,
    TextEnvironment,
    WithGoldPassages,
    WrittenPassages,
)
from mujica_jax.tasks.passages import (
    GoldInCorpus,
    OwnPassages,
    fetched_index,
    is_service,
    leave_incomplete_out,
    open_passages,
    titled,
)
from mujica_jax.tasks.pretraining_text import Vocabulary, documents
from mujica_jax.tasks.task import Environment, Split, hash_of
from mujica_jax.tasks.two_wiki.aliases import ALIAS_FILE, alias_file, official_aliases, with_aliases
from mujica_jax.tasks.two_wiki.augmentation import NameParts
from mujica_jax.tasks.two_wiki.chains import (
    answer_from_evidence,
    follows_from_evidence,
    with_printed_dates,
)
from mujica_jax.tasks.two_wiki.demonstrations import CopyPlan, copy_plan, renamed_copy
from mujica_jax.tasks.two_wiki.records import (
    GRAPH_FILES,
    Record,
    chain_evidences,
    data_files,
    mentions,
    passages_of,
    read_corpus_questions,
    read_folder,
    with_known_ids,
)
from mujica_jax.tasks.two_wiki.search import corpus_of, open_knowledge_graph, ranking

PRETRAINING_COPIES = 4  # of each training question
PRETRAINING_FACTS = 5  # most facts a document lists
WORK_RELATIONS = {
    "director",
    "performer",
    "composer",
    "publication date",
    "country of origin",
    "producer",
    "publisher",
}
PRETRAINING_YEARS = (1000, 2020)  # the years that dates of copies lie in


class TwoWiki:
    """Implements `Task`. Building it reads the files once: half a second for the graph, two for the
    corpus's index."""

    name = "two_wiki"
    rule: Rule = "two_wiki"

    def __init__(
        self,
        config: TwoWikiConfig,
        environment: Environment,
        questions: Sequence[Question],
        splits: Mapping[str, Split],
        *,
        demonstrated_in: GraphEnvironment | None = None,
        elsewhere: Mapping[str, TextEnvironment] | None = None,
        demonstrated: Sequence[Question] = (),
        left_out: Sequence[str] = (),
        notes: Sequence[str] = (),
        shown: str = "",
    ) -> None:
        """`demonstrated_in` is where demonstrations are played, for graphs; `elsewhere` where
        questions are answered, by id, whose passages `environment` lacks; `demonstrated` are
        questions for demonstrations alone. `left_out` cannot be asked, `notes` are sentences about
        the questions, and `shown` says how many of a question's own passages a search shows.
        """
        ordered = sorted(questions, key=lambda question: hash_of(question.id))
        self.config, self._environment, self.left_out = config, environment, left_out
        self.notes = tuple(notes)
        self.shown = shown
        self.environment_kind = environment.kind
        self._demonstrated_in, self._elsewhere = demonstrated_in, elsewhere or {}
        sizes: dict[Split, int | None] = {
            "train": None,
            "dev": config.dev_questions,
            "test": config.test_questions,
        }
        self._questions = {
            split: [question for question in ordered if splits[question.id] == split][:size]
            for split, size in sizes.items()
        }
        self._train = self._questions["train"]
        self._demonstrated = tuple(demonstrated)

    def environment(self, question: Question) -> Environment:
        return self._elsewhere.get(question.id, self._environment)

    def own_paragraphs(self, question: Question) -> Sequence[GoldPassage]:
        """Return the paragraphs that the files give with the question."""
        return self._paragraphs.get(question.id, ())

    @functools.cached_property
    def _paragraphs(self) -> Mapping[str, Sequence[GoldPassage]]:
        """The paragraphs of all questions. The files are read when the first is asked for."""
        return {record.id: record.context for record in read_folder(self.config.data_dir)}

    def questions(self, split: Split) -> Sequence[Question]:
        """In the order of the hash of their ids, so a prefix is a random sample and stays one when
        files are added."""
        return self._questions[split]

    def demonstrations(self) -> Iterator[tuple[Question, Environment]]:
        """Training questions whose gold answer follows from their evidence, then the first renamed
        copy of each, and so on for `augmented_copies`.

        The answer of a demonstration is written as its evidence labels it: questions write names In
        Title Case. Gold passages that a search misses are put among what it finds, in `gold_share`
        of the cases.
        """
        usable = [
            question
            for question in (*self._train, *self._demonstrated)
            if follows_from_evidence(question)
        ]
        originals = [_with_label_as_answer(question) for question in usable]
        if self.environment_kind == "text":
            for question in originals:
                environment = self.environment(question)
                if not isinstance(environment, WrittenPassages):
                    environment = WithGoldPassages(environment, question, self.config.gold_share)
                yield question, environment
            return
        environment = self._environment if self._demonstrated_in is None else self._demonstrated_in
        yield from ((question, environment) for question in originals)
        plans = self._plans(originals) if self.config.augmented_copies else []
        for number in range(self.config.augmented_copies):
            yield from (
                renamed_copy(plan, self._parts, number, self.config.top_k) for plan in plans
            )

    def pretraining_documents(self, seed: int) -> Iterator[str]:
        """Graph: facts combined from renamed copies (`pretraining_text.py`). Text: passages of the
        training side."""
        if self._demonstrated_in is not None:
            return documents(self._vocabulary, seed)
        passages = self._training_passages()
        draw = random.Random(f"reading {seed}")
        return (draw.choice(passages) for _ in itertools.repeat(None))

    def tokenizer_text(self) -> Iterator[str]:
        """Questions of the training side, and the labels and triples (or the passages) that they
        use."""
        yield from (question.text for question in self._train)
        yield from self._training_passages()
        yield from dict.fromkeys(
            entity.label for question in self._train for entity in question.candidates
        )
        for triple in self._training_triples():
            yield triple.text

    @functools.cached_property
    def _parts(self) -> NameParts:
        return NameParts(self._training_triples())

    def _plans(self, questions: Sequence[Question]) -> list[CopyPlan]:
        assert self._demonstrated_in is not None, "only graphs have copies"
        graph = self._demonstrated_in.graph
        assert isinstance(graph, TripleGraph), "demonstrations are played in memory"
        return [plan for question in questions if (plan := copy_plan(question, graph)) is not None]

    @functools.cached_property
    def _vocabulary(self) -> Vocabulary:
        """Labels and values of renamed copies that no demonstration uses. A work has a maker, a
        person none."""
        labels: dict[str, list[str]] = {"work": [], "other": []}
        values: dict[str, dict[str, list[str]]] = {"work": {}, "other": {}}
        usable = [question for question in self._train if follows_from_evidence(question)]
        for plan in self._plans(usable):
            for number in range(PRETRAINING_COPIES):
                question, _ = renamed_copy(plan, self._parts, -1 - number, self.config.top_k)
                relations: dict[str, set[str]] = {}
                for evidence in question.evidences:
                    relations.setdefault(evidence.subject, set()).add(evidence.relation)
                for evidence in question.evidences:
                    kind = "work" if relations[evidence.subject] & WORK_RELATIONS else "other"
                    labels[kind].append(evidence.subject)
                    values[kind].setdefault(evidence.relation, []).append(evidence.object)
        return Vocabulary(
            labels=labels, values=values, years=PRETRAINING_YEARS, max_facts=PRETRAINING_FACTS
        )

    def _training_passages(self) -> list[str]:
        """Gold passages of the training questions; none for graphs."""
        passages = dict.fromkeys(
            passage for question in self._train for passage in question.gold_passages
        )
        return [f"{passage.title}: {passage.text}" for passage in passages if passage.text]

    def _training_triples(self) -> list[Triple]:
        """What the training questions' evidences say, without the bridge's second name."""
        evidences = dict.fromkeys(
            evidence for question in self._train for evidence in question.evidences
        )
        return [
            triple for triple in evidences if isinstance(triple, Triple)
        ]  # `chain_evidences` made them all


def build(config: TwoWikiConfig) -> TwoWiki:
    config = with_data_folder(config)
    config = dataclasses.replace(config, index=fetched_index(config.index))
    records, notes = _read_records(config)
    splits = splits_of(records, config)
    if config.environment == "text":
        return _text_task(config, records, splits, notes)
    graph = TripleGraph(with_known_ids(_read_graph(config.data_dir, records), records))
    questions = [
        question for record in records if (question := graph_question(record, graph)) is not None
    ]
    lost = _left_out(
        records, questions, config, "have no evidences, or are about an entity that the graph lacks"
    )
    ranked = ranking(config)
    demonstrated_in = GraphEnvironment(graph, config.top_k, ranked)
    searched = demonstrated_in
    if config.index is not None:
        searched = GraphEnvironment(
            open_knowledge_graph(config.index, config.queries_per_second), config.top_k, ranked
        )
    return TwoWiki(
        config,
        searched,
        questions,
        splits,
        demonstrated_in=demonstrated_in,
        left_out=lost,
        notes=notes,
    )


def _read_records(config: TwoWikiConfig) -> tuple[list[Record], list[str]]:
    """Return the questions with the official aliases of their answers, and notes about them for the
    user."""
    folder = Path(config.data_dir)
    records = read_folder(folder)
    notes: list[str] = []
    of_id = [record for record in records if record.answer_id]
    if (file := alias_file(folder)) is not None:
        aliases = official_aliases(file, records)
        records = with_aliases(records, aliases)
        known = sum(record.answer_id in aliases for record in records)
        notes.append(
            f"the aliases of {file.name} count as gold answers of {known:,} of {len(records):,} "
            "questions"
        )
    elif of_id and all(len(record.answers) == 1 for record in of_id):
        notes.append(
            f"{len(of_id):,} answers have an id and {config.data_dir} has no {ALIAS_FILE}: the "
            "official script counts aliases too, and these scores do not"
        )
    if _splits_dev_files(records, config):
        notes.append(
            "a hash splits the questions of dev* into training and held-out ones "
            "(task.split_dev_files is True): these scores are not those of the official dev set"
        )
    return records, notes


def splits_of(records: Sequence[Record], config: TwoWikiConfig) -> dict[str, Split]:
    """Return the split of every question by id."""
    may_train_on_dev = _splits_dev_files(records, config)
    splits: dict[str, Split] = {}
    for record in records:
        if record.split is not None:
            splits[record.id] = record.split
        elif record.source == "train":
            splits[record.id] = "train"
        elif record.source == "dev" and not may_train_on_dev:
            splits[record.id] = held_out_split(record.id, config.test_percent)
        else:
            splits[record.id] = split_of(record.id, config.hold_out_percent, config.test_percent)
    return splits


def _splits_dev_files(records: Sequence[Record], config: TwoWikiConfig) -> bool:
    sources = {record.source for record in records}
    return config.split_dev_files and "dev" in sources and "train" not in sources


def split_of(question_id: str, hold_out_percent: int, test_percent: int = 50) -> Split:
    """Return the split of a question without an official one, by the hash of its id."""
    if hash_of(question_id) % 100 >= hold_out_percent:
        return "train"
    return held_out_split(question_id, test_percent)


def held_out_split(question_id: str, test_percent: int = 50) -> Split:
    """Return dev or test, by the hash of the id.

    Even places come first, so that at 50 percent all odd ones are test."""
    place, is_odd = divmod(hash_of(question_id) // 100 % 100, 2)
    return "test" if 50 * is_odd + place >= 100 - test_percent else "dev"


def graph_question(record: Record, graph: TripleGraph) -> Question | None:
    """None where the record has no evidences, or where the graph does not know an entity that the
    question names."""
    evidences = chain_evidences(record.triples)
    label_of = {evidence.subject_id: evidence.subject for evidence in evidences}
    candidates = []
    for topic in record.topic_ids:
        key = graph.find(topic) or graph.find(label_of[topic])
        if key is None:
            return None
        candidates.append(Entity(id=key, label=label_of[topic]))
    if not candidates:
        return None
    places = mentions(record.text, [candidate.label for candidate in candidates], record.titles)
    if places is not None:
        order = sorted(range(len(candidates)), key=lambda position: places[position].start)
        candidates = [candidates[position] for position in order]
    gold = tuple(GoldPassage(title=title) for title in record.titles)
    question = _question(record, gold)
    answers = with_printed_dates(question.answers)
    return dataclasses.replace(question, answers=answers, candidates=tuple(candidates))


def _text_task(
    config: TwoWikiConfig,
    records: Sequence[Record],
    splits: Mapping[str, Split],
    notes: Sequence[str],
) -> TwoWiki:
    if config.augmented_copies:
        raise UserError(
            f"augmented_copies is {config.augmented_copies} and environment is text; copies are "
            "made of triples: set augmented_copies to 0 or environment to graph"
        )
    if config.setting == "distractor":
        return _distractor_task(config, records, splits, notes)
    retriever, passages = open_passages(config, lambda: corpus_of(config, records))
    titles = {title for record in records for title in record.titles}
    corpus = GoldInCorpus(passages, titles, by_title=is_service(config.index))
    in_corpus = {
        record.id: gold for record in records if (gold := corpus.find_all(record.gold)) is not None
    }

    # The questions made for the corpus, and training questions whose gold passages it has.
    sample = {record.id for record in read_corpus_questions(config.data_dir) or records}
    questions = [
        _question(record, in_corpus[record.id])
        for record in records
        if record.id in in_corpus and (record.id in sample or splits[record.id] == "train")
    ]

    # Training questions whose gold passages are among those that training questions come with.
    training = [record for record in records if splits[record.id] == "train"]
    lacking = [record for record in training if record.id not in in_corpus]
    given = passages_of(training)
    known_passages = GoldInCorpus([*titled(passages, titles), *given], titles)
    given_alone = {
        record.id: gold
        for record in lacking
        if (gold := known_passages.find_all(record.gold)) is not None
    }
    questions += [
        _question(record, given_alone[record.id]) for record in lacking if record.id in given_alone
    ]
    elsewhere: dict[str, TextEnvironment] = {}
    if given_alone:
        searched = TextEnvironment(
            IndexRetriever(Bm25Index(given, "default"), inline=True), config.top_k
        )
        elsewhere |= dict.fromkeys(given_alone, searched)

    # Training questions whose gold passages no file has: for demonstrations alone.
    unread = [record for record in lacking if record.triples and record.id not in given_alone]
    written = _written_passages(unread)
    searched = WrittenPassages(
        IndexRetriever(Bm25Index(written, "default"), inline=True), config.top_k
    )
    first = sorted(unread, key=lambda record: hash_of(record.id))[: config.triple_demonstrations]
    demonstrated = [_question(record, ()) for record in first]
    elsewhere |= {question.id: searched for question in demonstrated}

    lost = _left_out(
        records, questions, config, "name no supporting_facts, or a title that no passage has"
    )
    return TwoWiki(
        config,
        TextEnvironment(retriever, config.top_k),
        questions,
        splits,
        elsewhere=elsewhere,
        demonstrated=demonstrated,
        left_out=lost,
        notes=notes,
    )


def _distractor_task(
    config: TwoWikiConfig,
    records: Sequence[Record],
    splits: Mapping[str, Split],
    notes: Sequence[str],
) -> TwoWiki:
    """Return the task in which each question is asked over its own passages, all gold ones among
    them."""
    with_own = [
        record for record in records if record.context and (record.gold or config.keep_incomplete)
    ]
    incomplete = [record.id for record in with_own if not record.has_gold_in_context]
    left_out, further_notes = leave_incomplete_out(config, incomplete, len(with_own))
    is_left_out = set(left_out)
    asked = [record for record in with_own if record.id not in is_left_out]
    questions = [_question(record, record.gold) for record in asked]
    lost = _left_out(records, questions, config, "have no supporting_facts or no context")
    own = OwnPassages({record.id: record.context for record in asked}, config.top_k)
    return TwoWiki(
        config,
        own[asked[0].id],
        questions,
        splits,
        elsewhere=own,
        left_out=lost,
        notes=[*notes, *further_notes],
        shown=own.describe(),
    )


def _written_passages(records: Sequence[Record]) -> list[Passage]:
    """A passage for each subject of the records' triples, which says in one sentence each what they
    say of it."""
    facts: dict[str, dict[str, None]] = {}
    for evidence in (
        evidence for record in records for evidence in chain_evidences(record.triples)
    ):
        said = f"The {evidence.relation} of {evidence.subject} is {evidence.object}."
        facts.setdefault(evidence.subject, {})[said] = None
    numbered = enumerate(facts.items())
    return [
        Passage(id=str(number), title=subject, text=" ".join(said))
        for number, (subject, said) in numbered
    ]


def _question(record: Record, gold: tuple[GoldPassage, ...]) -> Question:
    return Question(
        id=record.id,
        text=record.text,
        answers=record.answers,
        gold_passages=gold,
        evidences=chain_evidences(record.triples),
        kind=record.kind,
    )


def _read_graph(data_dir: str | Path, records: Iterable[Record]) -> list[Triple]:
    """Of the files of triples, or where there are none of the evidences that come with the
    questions."""
    files = data_files(data_dir, GRAPH_FILES, "triples", needed=False)
    if not files:
        return [triple for record in records for triple in record.triples]
    return [triple for file in files for triple in read_triples(file)]


def _left_out(
    records: Sequence[Record], questions: Sequence[Question], config: TwoWikiConfig, why: str
) -> list[str]:
    """Ids of those that cannot be asked. Raises UserError if none can."""
    if not questions:
        raise UserError(
            f"all {len(records)} questions with an answer in {config.data_dir} {why}, which "
            f"environment={config.environment!r} needs (docs/own_questions.md)"
        )
    asked = {question.id for question in questions}
    return [record.id for record in records if record.id not in asked]


def _with_label_as_answer(question: Question) -> Question:
    label = answer_from_evidence(question)
    assert label is not None, (
        "only questions whose answer follows from their evidence are demonstrated"
    )
    return dataclasses.replace(question, answers=tuple(dict.fromkeys((label, *question.answers))))
