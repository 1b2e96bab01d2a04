"""2WikiMultihopQA (Ho et al., 2020) as a task, over a knowledge graph or over passages.

`environment="graph"` (2Wiki-KG):

- Every question with evidences is asked. Its candidates are the topic entities that the question
  names. They have the labels of the graph and the order of the question.
- A search returns the triples of one entity, in both directions. They come from the graph in the
  data folder, or from the graph that `index` names.
- Demonstrations are always played in the graph of the data folder.

`environment="text"` (2Wiki-Text):

- The questions are those that were made for the corpus (`questions*.jsonl`, with aliases) and whose
  gold passages the corpus holds. Without such a file they are all questions whose gold passages the
  corpus holds.
- A search uses BM25 over the corpus, or the index that `index` names.
- The official files have ten passages with each question. Without a corpus file, these passages are
  the corpus. With a corpus file, training questions whose gold passages the corpus lacks are
  answered from the passages that are given with training questions.
- Training questions with evidences whose gold passages are in no file can be demonstrated
  (`triple_demonstrations`). They are never sampled.

Splits: if a question has its own `split`, it is used. Otherwise questions of `train*` are training
questions, and those of `dev*` are held out. For the other questions a hash of the id decides. A
hash also divides the held-out questions into dev and test.

Gold passages are identified by title and text. Answers have the official aliases if the folder has
`id_aliases.json` (`aliases.py`).

The names in demonstrations and the tokenizer's text are only taken from training questions, and
from triples and passages that training questions use. Searches cover the whole graph or corpus.
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
from mujica_jax.records import Entity, Evidence, GoldPassage, Question
from mujica_jax.retrieval.graph.tables import read_triples
from mujica_jax.retrieval.graph.triples import Triple, TripleGraph
from mujica_jax.retrieval.reranker import Reranker
from mujica_jax.retrieval.retriever import IndexRetriever
from mujica_jax.retrieval.text.bm25 import Bm25Index
from mujica_jax.retrieval.text.corpus import Passage
from mujica_jax.tasks.asked import (
    AskedQuestion,
    GraphSearch,
    distractor_refusal,
    over_graph,
    over_passages,
    search_of,
)
from mujica_jax.tasks.data_folder import with_data_folder
from mujica_jax.tasks.environment import (
    GraphEnvironment,
    TextEnvironment,
    WithGoldPassages,
    WrittenPassages,
)
from mujica_jax.tasks.graphs import open_knowledge_graph, ranking
from mujica_jax.tasks.passages import (
    GoldInCorpus,
    OwnPassages,
    fetched_index,
    is_service,
    leave_incomplete_out,
    open_passages,
    reranker_of,
    titled,
)
from mujica_jax.tasks.pretraining_text import Vocabulary, documents
from mujica_jax.tasks.task import Environment, Remarks, Split, hash_of
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
    corpus_of,
    data_files,
    mentions,
    passages_of,
    read_corpus_questions,
    read_folder,
    with_known_ids,
)

# Number of renamed copies of each training question from which pre-training documents are made.
PRETRAINING_COPIES = 4
# Maximum number of facts that a pre-training document lists.
PRETRAINING_FACTS = 5
# An entity with one of these relations is a work.
WORK_RELATIONS = {
    "director",
    "performer",
    "composer",
    "publication date",
    "country of origin",
    "producer",
    "publisher",
}
# First and last year of the dates in pre-training documents.
PRETRAINING_YEARS = (1000, 2020)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Environments:
    """The environments in which questions are answered and demonstrations are played."""

    # The environment of all questions that `elsewhere` does not list.
    searched: Environment
    # The environments of questions whose passages `searched` lacks, by question id.
    elsewhere: Mapping[str, TextEnvironment] = dataclasses.field(default_factory=dict)
    # Over graphs: the environment in which demonstrations are played.
    demonstrated_in: GraphEnvironment | None = None


class TwoWiki:
    """The task 2WikiMultihopQA. It implements `Task` and `FromScratchTask`.

    Building it takes half a second for the graph, or two seconds for the index of the corpus.
    """

    name = "two_wiki"
    rule: Rule = "two_wiki"

    def __init__(
        self,
        config: TwoWikiConfig,
        environments: Environments,
        questions: Sequence[Question],
        splits: Mapping[str, Split],
        remarks: Remarks,
        demonstrated: Sequence[Question] = (),
    ) -> None:
        """Assemble the task.

        `splits` maps question ids to splits. `demonstrated` holds questions that are only used for
        demonstrations.
        """
        self.config = config
        self.left_out = remarks.left_out
        self.notes = tuple(remarks.notes)
        self.shown = remarks.shown
        self.environment_kind = environments.searched.kind
        self._environment = environments.searched
        self._demonstration_environment = environments.demonstrated_in
        self._other_environments = environments.elsewhere

        sizes: dict[Split, int | None] = {
            "train": None,
            "dev": config.dev_questions,
            "test": config.test_questions,
        }
        self._questions: dict[Split, list[Question]] = {"train": [], "dev": [], "test": []}
        for question in sorted(questions, key=lambda question: hash_of(question.id)):
            split = splits[question.id]
            size = sizes[split]
            if size is None or len(self._questions[split]) < size:
                self._questions[split].append(question)
        self._training_questions = self._questions["train"]
        self._demonstration_questions = tuple(demonstrated)

    def environment(self, question: Question) -> Environment:
        """Return the environment in which this question is answered."""
        return self._other_environments.get(question.id, self._environment)

    async def asked(self, text: str) -> AskedQuestion:
        """Return a user's question as a question of this task.

        Raises UserError in the distractor setting, or if the question names no entity of the graph.
        """
        if self._graph_search is not None:
            return await over_graph(text, self._graph_search)
        if self.config.setting == "distractor":
            raise distractor_refusal(text)
        return over_passages(text, self._environment)

    @functools.cached_property
    def _graph_search(self) -> GraphSearch | None:
        """The graph as questions of users need it. None over passages."""
        if not isinstance(self._environment, GraphEnvironment):
            return None
        return search_of(self._environment)

    def own_paragraphs(self, question: Question) -> Sequence[GoldPassage]:
        """Return the paragraphs that the files give with the question."""
        return self._paragraphs.get(question.id, ())

    @functools.cached_property
    def _paragraphs(self) -> Mapping[str, Sequence[GoldPassage]]:
        """The paragraphs of all questions, by question id. They are read on first use."""
        return {record.id: record.context for record in read_folder(self.config.data_dir)}

    def questions(self, split: Split) -> Sequence[Question]:
        """Return the questions of a split, ordered by the hash of their ids.

        So the first questions are a random sample. They still are one when files are added.
        """
        return self._questions[split]

    def demonstrations(self) -> Iterator[tuple[Question, Environment]]:
        """Yield the demonstrations, each with its environment.

        First come the training questions whose gold answer follows from their evidence. Over graphs
        the first renamed copy of each question follows, then the second copies, and so on up to
        `augmented_copies`.

        The answer of a demonstration is the label in its evidence, because questions write names In
        Title Case. Over passages a gold passage that a search misses is added to its results, with
        the probability `gold_share`.
        """
        questions = [
            _with_label_as_answer(question)
            for question in (*self._training_questions, *self._demonstration_questions)
            if follows_from_evidence(question)
        ]
        if self.environment_kind == "text":
            yield from self._text_demonstrations(questions)
        else:
            yield from self._graph_demonstrations(questions)

    def _text_demonstrations(
        self, questions: Sequence[Question]
    ) -> Iterator[tuple[Question, Environment]]:
        """Yield the demonstrations over passages."""
        for question in questions:
            environment = self.environment(question)
            if not isinstance(environment, WrittenPassages):
                environment = WithGoldPassages(environment, question, self.config.gold_share)
            yield question, environment

    def _graph_demonstrations(
        self, questions: Sequence[Question]
    ) -> Iterator[tuple[Question, Environment]]:
        """Yield the demonstrations over the graph, followed by their renamed copies."""
        environment = self._environment
        if self._demonstration_environment is not None:
            environment = self._demonstration_environment
        for question in questions:
            yield question, environment

        if not self.config.augmented_copies:
            return
        plans = self._copy_plans(questions)
        for number in range(self.config.augmented_copies):
            for plan in plans:
                yield renamed_copy(plan, self._name_parts, number, self.config.top_k)

    def pretraining_documents(self, seed: int) -> Iterator[str]:
        """Return documents without end, made from the training split.

        Over graphs they list facts of renamed copies (`pretraining_text.py`). Over passages they
        are gold passages of training questions.
        """
        if self._demonstration_environment is not None:
            return documents(self._vocabulary, seed)
        passages = self._training_passages()
        draw = random.Random(f"reading {seed}")
        return (draw.choice(passages) for _ in itertools.repeat(None))

    def tokenizer_text(self) -> Iterator[str]:
        """Yield the training questions, and the passages, labels and triples that they use."""
        labels: dict[str, None] = {}
        for question in self._training_questions:
            yield question.text
            labels |= dict.fromkeys(entity.label for entity in question.candidates)
        yield from self._training_passages()
        yield from labels
        for triple in self._training_triples():
            yield triple.text

    @functools.cached_property
    def _name_parts(self) -> NameParts:
        """The words from which new names are made."""
        return NameParts(self._training_triples())

    def _copy_plans(self, questions: Sequence[Question]) -> list[CopyPlan]:
        """Return the copy plan of each question that can be copied."""
        assert self._demonstration_environment is not None, "only graphs have copies"
        graph = self._demonstration_environment.graph
        assert isinstance(graph, TripleGraph), "demonstrations are played in memory"
        plans = [copy_plan(question, graph) for question in questions]
        return [plan for plan in plans if plan is not None]

    @functools.cached_property
    def _vocabulary(self) -> Vocabulary:
        """The labels and values of renamed copies that no demonstration uses.

        A work is recognised by its relations. For example, it has a director, and a person has
        none.
        """
        labels: dict[str, list[str]] = {"work": [], "other": []}
        values: dict[str, dict[str, list[str]]] = {"work": {}, "other": {}}
        questions = [
            question for question in self._training_questions if follows_from_evidence(question)
        ]
        for plan in self._copy_plans(questions):
            for copy in range(PRETRAINING_COPIES):
                # Negative numbers, because copies for demonstrations are numbered from 0.
                number = -1 - copy
                question, _ = renamed_copy(plan, self._name_parts, number, self.config.top_k)
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
        """Return the gold passages of the training questions. Over graphs they have no texts."""
        passages: dict[GoldPassage, None] = {}
        for question in self._training_questions:
            passages |= dict.fromkeys(question.gold_passages)
        return [f"{passage.title}: {passage.text}" for passage in passages if passage.text]

    def _training_triples(self) -> list[Triple]:
        """Return the evidences of the training questions as triples, each once.

        A bridge entity has the same name as an object and as a subject (see `chain_evidences`).
        """
        evidences: dict[Evidence, None] = {}
        for question in self._training_questions:
            evidences |= dict.fromkeys(question.evidences)
        # `chain_evidences` made all of them, so they are triples.
        return [evidence for evidence in evidences if isinstance(evidence, Triple)]


def build(config: TwoWikiConfig) -> TwoWiki:
    """Return the task of a configuration. Raises UserError if it cannot be built."""
    config = with_data_folder(config)
    config = dataclasses.replace(config, index=fetched_index(config.index))
    records, notes = _read_records(config)
    splits = splits_of(records, config)
    if config.environment == "text":
        return _text_task(config, records, splits, notes)
    return _graph_task(config, records, splits, notes)


def _graph_task(
    config: TwoWikiConfig,
    records: Sequence[Record],
    splits: Mapping[str, Split],
    notes: Sequence[str],
) -> TwoWiki:
    """Return the task over a knowledge graph."""
    graph = TripleGraph(with_known_ids(_read_graph(config.data_dir, records), records))
    questions: list[Question] = []
    for record in records:
        question = graph_question(record, graph)
        if question is not None:
            questions.append(question)
    left_out = _left_out(
        records, questions, config, "have no evidences, or are about an entity that the graph lacks"
    )

    triple_ranking = ranking(config)
    demonstration_environment = GraphEnvironment(graph, config.top_k, triple_ranking)
    if config.index is None:
        environment = demonstration_environment
    else:
        indexed_graph = open_knowledge_graph(config.index, config.queries_per_second)
        environment = GraphEnvironment(indexed_graph, config.top_k, triple_ranking)
    return TwoWiki(
        config,
        Environments(searched=environment, demonstrated_in=demonstration_environment),
        questions,
        splits,
        Remarks(left_out=left_out, notes=notes),
    )


def _read_records(config: TwoWikiConfig) -> tuple[list[Record], list[str]]:
    """Return the records with the official aliases of their answers, and notes for the user."""
    folder = Path(config.data_dir)
    records = read_folder(folder)
    notes: list[str] = []
    with_answer_id = [record for record in records if record.answer_id]
    file = alias_file(folder)
    if file is not None:
        aliases = official_aliases(file, records)
        records = with_aliases(records, aliases)
        questions_with_aliases = sum(record.answer_id in aliases for record in records)
        notes.append(
            f"{file.name} adds aliases to the gold answers of {questions_with_aliases:,} of "
            f"{len(records):,} questions"
        )
    elif with_answer_id and all(len(record.answers) == 1 for record in with_answer_id):
        notes.append(
            f"{config.data_dir} has no {ALIAS_FILE}, but {len(with_answer_id):,} answers have an "
            "id: the official script accepts their aliases as answers, and these scores do not"
        )
    if _splits_dev_files(records, config):
        notes.append(
            "the questions of dev* are split into training and held-out questions, because "
            "task.split_dev_files is True: these scores are not scores of the official dev set"
        )
    return records, notes


def splits_of(records: Sequence[Record], config: TwoWikiConfig) -> dict[str, Split]:
    """Return the split of every question, by question id."""
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
    """Return whether `hold_out_percent` also splits the questions of dev*."""
    sources = {record.source for record in records}
    return config.split_dev_files and "dev" in sources and "train" not in sources


def split_of(question_id: str, hold_out_percent: int, test_percent: int = 50) -> Split:
    """Return the split of a question without an official one, by the hash of its id."""
    if hash_of(question_id) % 100 >= hold_out_percent:
        return "train"
    return held_out_split(question_id, test_percent)


def held_out_split(question_id: str, test_percent: int = 50) -> Split:
    """Return whether a held-out question is dev or test, by the hash of its id.

    In the order of positions, questions with an even hash come first. So at 50 percent all
    questions with an odd hash are test questions.
    """
    rank, is_odd = divmod(hash_of(question_id) // 100 % 100, 2)
    # From 0 to 99.
    position = 50 * is_odd + rank
    return "test" if position >= 100 - test_percent else "dev"


def graph_question(record: Record, graph: TripleGraph) -> Question | None:
    """Return the question of a record over the graph.

    The result is None if the record has no evidences, or if the graph lacks an entity that the
    question names.
    """
    evidences = chain_evidences(record.triples)
    labels = {evidence.subject_id: evidence.subject for evidence in evidences}
    candidates = []
    for topic_id in record.topic_ids:
        label = labels[topic_id]
        key = graph.find(topic_id) or graph.find(label)
        if key is None:
            return None
        candidates.append(Entity(id=key, label=label))
    if not candidates:
        return None

    # Put the candidates into the order in which the question names them.
    candidate_labels = [candidate.label for candidate in candidates]
    places = mentions(record.text, candidate_labels, record.titles)
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
    """Return the task over passages."""
    if config.augmented_copies:
        raise UserError(
            f"task.augmented_copies is {config.augmented_copies}, but task.environment is text and "
            "copies are made from triples: set task.augmented_copies to 0, or task.environment to "
            "graph"
        )
    if config.setting == "distractor":
        return _distractor_task(config, records, splits, notes)
    reranker = reranker_of(config)
    retriever, passages = open_passages(config, lambda: corpus_of(config, records), reranker)
    titles = {title for record in records for title in record.titles}
    corpus = GoldInCorpus(passages, titles, by_title=is_service(config.index))
    corpus_ids = {record.id for record in read_corpus_questions(config.data_dir) or records}

    # The questions that were made for the corpus, and training questions whose gold passages the
    # corpus has.
    supported_questions, unsupported_records = _with_gold_passages(records, corpus)
    questions = [
        question
        for question in supported_questions
        if question.id in corpus_ids or splits[question.id] == "train"
    ]

    # Training questions whose gold passages are among the passages given with training questions.
    training_records = [record for record in records if splits[record.id] == "train"]
    training_passages = passages_of(training_records)
    all_passages = GoldInCorpus([*titled(passages, titles), *training_passages], titles)
    lacking_records = [record for record in unsupported_records if splits[record.id] == "train"]
    questions_elsewhere, unread_records = _with_gold_passages(lacking_records, all_passages)
    questions += questions_elsewhere
    elsewhere: dict[str, TextEnvironment] = {}
    if questions_elsewhere:
        environment = TextEnvironment(_bm25_retriever(training_passages, reranker), config.top_k)
        elsewhere |= dict.fromkeys([question.id for question in questions_elsewhere], environment)

    # Training questions whose gold passages are in no file are only used for demonstrations.
    demonstration_questions, environment = _triple_demonstrations(config, unread_records, reranker)
    elsewhere |= dict.fromkeys([question.id for question in demonstration_questions], environment)

    left_out = _left_out(
        records, questions, config, "name no supporting_facts, or a title that no passage has"
    )
    return TwoWiki(
        config,
        Environments(searched=TextEnvironment(retriever, config.top_k), elsewhere=elsewhere),
        questions,
        splits,
        Remarks(left_out=left_out, notes=notes),
        demonstrated=demonstration_questions,
    )


def _with_gold_passages(
    records: Sequence[Record], corpus: GoldInCorpus
) -> tuple[list[Question], list[Record]]:
    """Return the questions whose gold passages the corpus has, and the records of the others."""
    questions: list[Question] = []
    other_records: list[Record] = []
    for record in records:
        gold = corpus.find_all(record.gold)
        if gold is None:
            other_records.append(record)
        else:
            questions.append(_question(record, gold))
    return questions, other_records


def _triple_demonstrations(
    config: TwoWikiConfig, records: Sequence[Record], reranker: Reranker | None
) -> tuple[list[Question], WrittenPassages]:
    """Return questions for demonstrations, and the environment of passages for them.

    The passages are written from the triples of the records.
    """
    records_with_triples = [record for record in records if record.triples]
    written_passages = _written_passages(records_with_triples)
    environment = WrittenPassages(_bm25_retriever(written_passages, reranker), config.top_k)

    records_with_triples.sort(key=lambda record: hash_of(record.id))
    demonstrated_records = records_with_triples[: config.triple_demonstrations]
    return [_question(record, gold=()) for record in demonstrated_records], environment


def _bm25_retriever(passages: Sequence[Passage], reranker: Reranker | None) -> IndexRetriever:
    """Return a retriever of passages that are held in memory."""
    return IndexRetriever(Bm25Index(passages, "default"), inline=True, reranker=reranker)


def _distractor_task(
    config: TwoWikiConfig,
    records: Sequence[Record],
    splits: Mapping[str, Split],
    notes: Sequence[str],
) -> TwoWiki:
    """Return the task in the distractor setting, where a search covers a question's own passages.

    All gold passages are among these, unless `keep_incomplete` is set.
    """
    candidates = [
        record for record in records if record.context and (record.gold or config.keep_incomplete)
    ]
    incomplete_ids = [record.id for record in candidates if not record.has_gold_in_context]
    ids_left_out, further_notes = leave_incomplete_out(config, incomplete_ids, len(candidates))
    excluded_ids = set(ids_left_out)
    asked_records = [record for record in candidates if record.id not in excluded_ids]

    questions = [_question(record, record.gold) for record in asked_records]
    left_out = _left_out(records, questions, config, "have no supporting_facts or no context")
    contexts = {record.id: record.context for record in asked_records}
    own_passages = OwnPassages(contexts, config.top_k, reranker_of(config))
    return TwoWiki(
        config,
        Environments(searched=own_passages[asked_records[0].id], elsewhere=own_passages),
        questions,
        splits,
        Remarks(left_out=left_out, notes=[*notes, *further_notes], shown=own_passages.describe()),
    )


def _written_passages(records: Sequence[Record]) -> list[Passage]:
    """Return a passage for each subject of the records' triples, with a sentence for each triple."""
    # The sentences of each subject. The inner dictionaries are used as ordered sets.
    sentences: dict[str, dict[str, None]] = {}
    for record in records:
        for evidence in chain_evidences(record.triples):
            sentence = f"The {evidence.relation} of {evidence.subject} is {evidence.object}."
            sentences.setdefault(evidence.subject, {})[sentence] = None

    passages: list[Passage] = []
    for subject, subject_sentences in sentences.items():
        text = " ".join(subject_sentences)
        passages.append(Passage(id=str(len(passages)), title=subject, text=text))
    return passages


def _question(record: Record, gold: tuple[GoldPassage, ...]) -> Question:
    """Return the question of a record, without candidates."""
    return Question(
        id=record.id,
        text=record.text,
        answers=record.answers,
        gold_passages=gold,
        evidences=chain_evidences(record.triples),
        kind=record.kind,
    )


def _read_graph(data_dir: str | Path, records: Iterable[Record]) -> list[Triple]:
    """Return the triples of the folder's files, or of the records if there are no files."""
    triples: list[Triple] = []
    files = data_files(data_dir, GRAPH_FILES, "triples", needed=False)
    if files:
        for file in files:
            triples += read_triples(file)
    else:
        for record in records:
            triples += record.triples
    return triples


def _left_out(
    records: Sequence[Record], questions: Sequence[Question], config: TwoWikiConfig, reason: str
) -> list[str]:
    """Return the ids of the records that cannot be asked. Raises UserError if none can."""
    if not records:
        raise UserError(
            f"no question in {config.data_dir} has an answer: give each one the field answer, or use "
            "--task.kind questions, which reads answers, golden_answers and more "
            "(docs/guides/own_questions.md)"
        )
    if not questions:
        advice = ""
        if config.environment == "text":
            advice = (
                ", or ask them without gold passages with --task.kind questions --task.index DIR"
            )
        raise UserError(
            f"no question in {config.data_dir} can be asked with task.environment "
            f"{config.environment}: all {len(records)} questions with an answer {reason}; add them "
            f"(docs/guides/own_questions.md){advice}"
        )
    asked_ids = {question.id for question in questions}
    return [record.id for record in records if record.id not in asked_ids]


def _with_label_as_answer(question: Question) -> Question:
    """Return the question with the label in its evidence as the first answer."""
    label = answer_from_evidence(question)
    assert label is not None, (
        "only questions whose answer follows from their evidence are demonstrated"
    )
    return dataclasses.replace(question, answers=tuple(dict.fromkeys((label, *question.answers))))
