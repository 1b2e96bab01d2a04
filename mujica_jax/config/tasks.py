"""Sections of tasks over passages, and their union, which is part of the one in `schema.py`."""

import dataclasses
from typing import ClassVar, Literal

from mujica_jax.config.bounds import Percent, PositiveFloat, PositiveInt

# Key in a field's metadata: the value to assume in a stored configuration that is older than the
# field.
STORED_WITHOUT = "stored_without"
DEFAULT_EMBEDDER = "BAAI/bge-large-en-v1.5"  # of the Mujica-MyGO paper


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassageSearch:
    """The collection that is searched, and how."""

    # Fields of earlier releases. A stored configuration may have them.
    retired: ClassVar[tuple[str, ...]] = ("index_rows",)

    top_k: PositiveInt  # materials shown to the worker
    # Of passages, and of a graph's crowded entity's triples: by their words, or by embeddings.
    retriever: Literal["bm25", "dense"] = "bm25"
    # What is searched instead of the passages that data_dir holds (by BM25, in memory): a directory
    # made by `python -m mujica_jax.index build`, or the http:// address of `index serve`.
    index: str | None = None
    # With retriever dense, the embedder the index was built with: a folder, minilm, or a Hugging
    # Face name.
    embedder: str = DEFAULT_EMBEDDER


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenDomainConfig(PassageSearch):
    """Questions of an official file, answered from passages.

    Training questions are those of files with `train` in their name. Of all others, `dev_percent`
    (by the hash of their ids) are for choices and the rest for reports.
    """

    kind: str
    environment: ClassVar[Literal["text"]] = "text"
    implementation: ClassVar[str] = "mujica_jax.tasks.open_domain.task:build"
    data_dir: str  # folder with the official files, plain or .gz, or tfds:NAME (docs/guides/evaluation.md)
    # share of the questions held out that are dev; the rest is test
    dev_percent: Percent = 30
    max_questions: PositiveInt | None = None  # of each split, the first by the hash of their ids


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiHopConfig(OpenDomainConfig):
    """With passages given for each question, some of them gold."""

    # open: one index of all (`index`, or the passages of all questions); distractor: only the
    # question's own passages, gold ones among them
    setting: Literal["open", "distractor"] = "open"
    # In the distractor setting, also ask questions whose gold passages are not all among their own.
    keep_incomplete: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class HotpotConfig(MultiHopConfig):
    kind: Literal["hotpotqa"] = "hotpotqa"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MusiqueConfig(MultiHopConfig):
    kind: Literal["musique"] = "musique"


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnQuestionsConfig(MultiHopConfig):
    """Questions of your own with their answers, over an index of passages.

    `data_dir` is a file or a folder of files: JSON, JSON Lines, CSV, TSV or Parquet, also in the
    forms of FlashRAG, verl, Search-R1, HotpotQA and BEIR. `hf:NAME` is a data set of the Hugging
    Face Hub, which needs the package datasets. Files with train, dev (or valid) or test in their
    name are for that split.
    """

    kind: Literal["questions"] = "questions"
    implementation: ClassVar[str] = "mujica_jax.tasks.open_domain.own_questions:build"
    # Percentage of the questions without a split that is held out for dev and test, by the hash of
    # their ids.
    hold_out_percent: Percent = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class NaturalQuestionsConfig(OpenDomainConfig):
    kind: Literal["nq"] = "nq"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TriviaQaConfig(OpenDomainConfig):
    kind: Literal["triviaqa"] = "triviaqa"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PopQaConfig(OpenDomainConfig):
    kind: Literal["popqa"] = "popqa"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AmbigQaConfig(OpenDomainConfig):
    kind: Literal["ambigqa"] = "ambigqa"


@dataclasses.dataclass(frozen=True, kw_only=True)
class BamboogleConfig(OpenDomainConfig):
    kind: Literal["bamboogle"] = "bamboogle"


@dataclasses.dataclass(frozen=True, kw_only=True)
class QaldConfig:
    """QALD-10 over a knowledge graph."""

    kind: Literal["qald10"] = "qald10"
    environment: ClassVar[Literal["graph"]] = "graph"
    implementation: ClassVar[str] = "mujica_jax.tasks.open_domain.qald:build"
    data_dir: str  # folder with qald_10.json, plain or .gz, or tfds:qald10
    top_k: PositiveInt  # triples shown to the worker
    # The graph: a directory made by `python -m mujica_jax.index build --kind graph`, or
    # sparql+https://HOST/sparql.
    index: str | None = None
    queries_per_second: PositiveFloat = 10.0  # what a SPARQL endpoint is asked at most
    # How the triples of an entity that has more than top_k are ranked: by their words, or by
    # embeddings.
    retriever: Literal["bm25", "dense"] = "bm25"
    # With retriever dense: a folder, minilm, or a Hugging Face name.
    embedder: str = DEFAULT_EMBEDDER
    # Of the questions, and of the labels of entities where the graph has them.
    language: Literal["en", "de", "zh", "ru"] = "en"
    dev_percent: Percent = 30  # the rest, by the hash of the ids, is test
    max_questions: PositiveInt | None = None  # of each split, the first by the hash of their ids


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
