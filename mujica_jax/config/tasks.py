"""Settings of tasks over passages and of QALD-10, and their union `OpenDomain`.

`OpenDomain` is part of the union of all tasks in `schema.py`.
"""

import dataclasses
from typing import ClassVar, Literal

from mujica_jax.config.bounds import Percent, PositiveFloat, PositiveInt

# Key in a field's metadata. Its value is used where a stored configuration lacks the field because
# it was written by an earlier release.
STORED_WITHOUT = "stored_without"
# The embedder of the Mujica-MyGO paper.
DEFAULT_EMBEDDER = "BAAI/bge-large-en-v1.5"
# Number of passages that the search gives to a reranker.
DEFAULT_CANDIDATES = 50


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reranking:
    """Settings of the reranker of passages."""

    # Over passages: cross-encoder that reranks what a search finds. A folder, or a Hugging Face name
    # such as cross-encoder/ms-marco-MiniLM-L6-v2. None: no reranking.
    reranker: str | None = None
    # With a reranker: number of passages that the search finds for it. The top_k best of them are
    # shown.
    rerank_candidates: PositiveInt = DEFAULT_CANDIDATES


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassageSearch(Reranking):
    """Settings of the search: the collection, the retriever and the reranker."""

    # Fields of earlier releases, which a stored configuration may have.
    retired: ClassVar[tuple[str, ...]] = ("index_rows",)

    # Maximum number of passages or triples that one search returns.
    top_k: PositiveInt
    # How passages are ranked. In a graph: how the triples of an entity are ranked if it has more
    # than top_k. bm25: by words. dense: by embeddings. http: by any server with POST /retrieve, as
    # Search-R1 and verl use them, at the address in task.index.
    retriever: Literal["bm25", "dense", "http"] = "bm25"
    # Index to search: a directory made by `python -m mujica_jax.index build`, or the http://
    # address of a running `python -m mujica_jax.index serve`. None: the passages in task.data_dir,
    # by BM25 in memory.
    index: str | None = None
    # With retriever dense: the embedder with which the index was built. A folder, minilm, or a
    # Hugging Face name.
    embedder: str = DEFAULT_EMBEDDER


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenDomainConfig(PassageSearch):
    """Questions from official files, answered from passages.

    Questions of files with `train` in their name are for training. The others are dev or test
    questions, as `dev_percent` determines.
    """

    # Task. `--task.kind NAME --help` shows the settings of another task.
    kind: str
    environment: ClassVar[Literal["text"]] = "text"
    implementation: ClassVar[str] = "mujica_jax.tasks.open_domain.task:build"
    # Folder with the official files, plain or .gz (docs/guides/evaluation.md). Or tfds:NAME, a data
    # set prepared by `python -m mujica_jax.tasks.prepare`. With kind questions: your own file or
    # folder, or hf:NAME.
    data_dir: str
    # Percentage of the questions outside training that are dev questions, by the hash of their ids.
    # The others are test questions.
    dev_percent: Percent = 30
    # Maximum number of questions in each split, the first by the hash of their ids. None: all.
    max_questions: PositiveInt | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiHopConfig(OpenDomainConfig):
    """A data set that gives passages with each question, some of them gold."""

    # What is searched. open: one index for all questions (task.index, or the passages of all
    # questions). distractor: only the passages given with the question, the gold passages among
    # them.
    setting: Literal["open", "distractor"] = "open"
    # In the distractor setting: whether to also ask questions whose own passages lack a gold
    # passage.
    keep_incomplete: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class HotpotConfig(MultiHopConfig):
    """HotpotQA, with ten passages for each question."""

    # Task. `--task.kind NAME --help` shows the settings of another task.
    kind: Literal["hotpotqa"] = "hotpotqa"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MusiqueConfig(MultiHopConfig):
    """MuSiQue, with twenty passages for each question."""

    # Task. `--task.kind NAME --help` shows the settings of another task.
    kind: Literal["musique"] = "musique"


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnQuestionsConfig(MultiHopConfig):
    """Questions of your own with their answers, over an index of passages.

    `data_dir` is a file or a folder of files: JSON, JSON Lines, CSV, TSV or Parquet, also in the
    forms of FlashRAG, verl, Search-R1, HotpotQA and BEIR. `hf:NAME` is a data set of the Hugging
    Face Hub, which needs the package datasets. A file with the word train, dev or test in its
    name belongs to the split of that name.
    """

    # Task. `--task.kind NAME --help` shows the settings of another task.
    kind: Literal["questions"] = "questions"
    implementation: ClassVar[str] = "mujica_jax.tasks.open_domain.own_questions:build"
    # Percentage of the questions without a split that are held out for dev and test, by the hash of
    # their ids.
    hold_out_percent: Percent = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class NaturalQuestionsConfig(OpenDomainConfig):
    """Natural Questions, the open-domain version (NQ-open)."""

    # Task. `--task.kind NAME --help` shows the settings of another task.
    kind: Literal["nq"] = "nq"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TriviaQaConfig(OpenDomainConfig):
    """TriviaQA, unfiltered."""

    # Task. `--task.kind NAME --help` shows the settings of another task.
    kind: Literal["triviaqa"] = "triviaqa"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PopQaConfig(OpenDomainConfig):
    """PopQA."""

    # Task. `--task.kind NAME --help` shows the settings of another task.
    kind: Literal["popqa"] = "popqa"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AmbigQaConfig(OpenDomainConfig):
    """AmbigQA."""

    # Task. `--task.kind NAME --help` shows the settings of another task.
    kind: Literal["ambigqa"] = "ambigqa"


@dataclasses.dataclass(frozen=True, kw_only=True)
class BamboogleConfig(OpenDomainConfig):
    """Bamboogle."""

    # Task. `--task.kind NAME --help` shows the settings of another task.
    kind: Literal["bamboogle"] = "bamboogle"


@dataclasses.dataclass(frozen=True, kw_only=True)
class QaldConfig:
    """QALD-10: questions over a knowledge graph."""

    # Task. `--task.kind NAME --help` shows the settings of another task.
    kind: Literal["qald10"] = "qald10"
    environment: ClassVar[Literal["graph"]] = "graph"
    implementation: ClassVar[str] = "mujica_jax.tasks.open_domain.qald:build"
    # Folder with qald_10.json, plain or .gz. Or tfds:qald10, prepared by `python -m
    # mujica_jax.tasks.prepare`.
    data_dir: str
    # Maximum number of triples that one search returns.
    top_k: PositiveInt
    # Knowledge graph to search: a directory made by `python -m mujica_jax.index build --kind
    # graph`, or a SPARQL endpoint as sparql+https://HOST/sparql.
    index: str | None = None
    # Maximum number of queries sent to a SPARQL endpoint in one second.
    queries_per_second: PositiveFloat = 10.0
    # How the triples of an entity are ranked if it has more than top_k. bm25: by words. dense: by
    # embeddings.
    retriever: Literal["bm25", "dense"] = "bm25"
    # With retriever dense: the embedder. A folder, minilm, or a Hugging Face name.
    embedder: str = DEFAULT_EMBEDDER
    # Language of the questions, and of entity labels if the graph has labels in it.
    language: Literal["en", "de", "zh", "ru"] = "en"
    # Percentage of the questions that are dev questions, by the hash of their ids. The others are
    # test questions.
    dev_percent: Percent = 30
    # Maximum number of questions, dev and test together: the first by the hash of their ids. None:
    # all.
    max_questions: PositiveInt | None = None


OpenDomain = (
    HotpotConfig
    | MusiqueConfig
    | OwnQuestionsConfig
    | NaturalQuestionsConfig
    | TriviaQaConfig
    | PopQaConfig
    | AmbigQaConfig
    | BamboogleConfig
    | QaldConfig
)
