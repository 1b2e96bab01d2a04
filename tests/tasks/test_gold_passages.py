"""Gold passages are paragraphs: told apart by title and text, wherever they are looked for."""

import asyncio
import dataclasses
import gzip
import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest

from mujica_jax.commands import index
from mujica_jax.config.schema import TwoWikiConfig
from mujica_jax.config.tasks import HotpotConfig, MusiqueConfig
from mujica_jax.methods.evipath.evidence import pieces, place_in
from mujica_jax.records import GoldPassage, Question, Search, StopReason, Trajectory
from mujica_jax.retrieval.text.corpus import Passage
from mujica_jax.runs.evaluation import summarise
from mujica_jax.tasks.environment import WithAllGoldPassages, WithGoldPassages
from mujica_jax.tasks.open_domain import task as open_domain
from mujica_jax.tasks.passages import GoldInCorpus
from mujica_jax.tasks.task import Environment, Material
from mujica_jax.tasks.two_wiki import task as two_wiki
from tests.helpers.shared_data import DATA, needs_data

QUESTION = Question(id="q", text="When was the harbour opened?", answers=("1911",))
GOLD = "Ferries first called in 1911, says the chronicle."
OTHER = "The harbour of Lisma was opened; it is a harbour."
LISMA = [{"title": "Lisma", "paragraph_text": GOLD, "is_supporting": True}]
LISMA += [{"title": "Lisma", "paragraph_text": OTHER, "is_supporting": False}]


def musique(
    folder: Path, paragraphs: list[dict[str, Any]], **changes: Any
) -> open_domain.OpenDomain:
    asked = "When was the harbour of Lisma opened to ferries?"
    numbered = [paragraph | {"idx": number} for number, paragraph in enumerate(paragraphs)]
    record = {
        "id": "2hop__1_2",
        "question": asked,
        "answer": "1911",
        "answerable": True,
        "paragraphs": numbered,
    }
    (folder / "musique_ans_v1.0_dev.jsonl").write_text(json.dumps(record) + "\n")
    return open_domain.build(
        MusiqueConfig(data_dir=str(folder), **{"top_k": 1, "dev_percent": 0} | changes)
    )


def own(folder: Path, records: list[dict[str, Any]], **changes: Any) -> two_wiki.TwoWiki:
    rows = [
        {"_id": f"q{n}", "answer": "x", "split": "test"} | record
        for n, record in enumerate(records)
    ]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields = {
        "environment": "text",
        "data_dir": str(folder),
        "hold_out_percent": 50,
        "top_k": 1,
    } | changes
    return two_wiki.build(TwoWikiConfig(**fields))


def shown(environment: Environment, query: str) -> list[str]:
    return [material.text for material in asyncio.run(environment.search(query, None))]


def figures(question: Question, *searches: Search) -> dict[str, Any]:
    """Return the figures of an evaluation of one episode with these searches."""
    played = Trajectory(
        question_id=question.id,
        attempt=0,
        policy_version=0,
        seed=0,
        conversations=(),
        answer="1911",
        stop_reason=StopReason.ANSWERED,
        searches=searches,
        seconds=0.0,
    )
    return summarise([question], [played], "musique").summary()


def read(*materials: str) -> Search:
    return Search(iteration=0, query="x", materials=materials)


@pytest.mark.parametrize("setting", ["open", "distractor"])
@pytest.mark.parametrize("paragraphs", [LISMA, LISMA[::-1]])
def test_of_two_paragraphs_with_one_title_only_the_supporting_one_is_gold(
    tmp_path, setting, paragraphs
):
    task = musique(tmp_path, paragraphs, setting=setting)
    (question,) = task.questions("test")
    assert question.gold_passages == (GoldPassage(title="Lisma", text=GOLD),)
    materials = shown(task.environment(question), question.text)
    assert materials == [f"Lisma: {OTHER}"], "the other one is found first"
    missed = figures(question, read(*materials))
    assert missed["gold_found"] == 0.0
    assert missed["support_em"] == 0.0
    assert missed["support_f1"] == 0.0
    both = figures(question, read(f"Lisma: {OTHER}", f"Lisma: {GOLD}"))
    # one of one gold passage was found; of the two that were read one is gold
    assert both["gold_found"] == 100.0
    assert both["support_em"] == 0.0
    assert both["support_f1"] == 66.67
    selected = Search(
        iteration=0, query="x", materials=(f"Lisma: {OTHER}", f"Lisma: {GOLD}"), selected=(1,)
    )
    assert figures(question, selected)["support_em"] == 100.0


@pytest.mark.parametrize("setting", ["open", "distractor"])
def test_two_supporting_paragraphs_with_one_title_stay_two(tmp_path, setting):
    task = musique(
        tmp_path,
        [paragraph | {"is_supporting": True} for paragraph in LISMA],
        setting=setting,
        top_k=2,
    )
    (question,) = task.questions("test")
    assert [passage.text for passage in question.gold_passages] == [GOLD, OTHER]
    assert len(shown(task.environment(question), "the harbour of Lisma, ferries")) == 2
    assert figures(question, read(f"Lisma: {OTHER}"))["gold_found"] == 50.0


@needs_data
@pytest.mark.parametrize("setting", ["open", "distractor"])
def test_gold_passages_of_musique_are_its_supporting_paragraphs(setting):
    with gzip.open(DATA / "musique" / "dev_visible.jsonl.gz", "rt", encoding="utf-8") as file:
        records = {record["id"]: record for record in map(json.loads, file)}
    task = open_domain.build(
        MusiqueConfig(data_dir=str(DATA / "musique"), top_k=20, setting=setting)
    )
    asked = [*task.questions("dev"), *task.questions("test")]
    assert len(asked) == 74
    assert not task.left_out
    for question in asked:
        paragraphs = records[question.id]["paragraphs"]
        supporting = {
            (paragraph["title"], paragraph["paragraph_text"].strip())
            for paragraph in paragraphs
            if paragraph["is_supporting"]
        }
        assert {(passage.title, passage.text) for passage in question.gold_passages} == supporting
        assert len(question.gold_passages) == len(supporting) == int(question.id[0])


def test_passages_of_two_questions_with_one_title_are_both_searched(tmp_path):
    records = [
        {
            "question": f"Who built the {building} of Lisma?",
            "supporting_facts": [["Lisma", 0]],
            "context": [
                ["Lisma", [f"The {building} of Lisma was built by {who}."]],
                ["Kolm", ["Kolm is a hill."]],
            ],
        }
        for building, who in (("mill", "Ann Ode"), ("pier", "Bo Rask"))
    ]
    task = own(tmp_path, records)
    mill, pier = sorted(task.questions("test"), key=lambda question: question.id)
    assert pier.gold_passages == (
        GoldPassage(title="Lisma", text="The pier of Lisma was built by Bo Rask."),
    )
    assert shown(task.environment(pier), pier.text) == [
        "Lisma: The pier of Lisma was built by Bo Rask."
    ]
    assert (
        figures(pier, read("Lisma: The mill of Lisma was built by Ann Ode."))["gold_found"] == 0.0
    )
    assert (
        figures(mill, read("Lisma: The mill of Lisma was built by Ann Ode."))["gold_found"] == 100.0
    )


def test_a_sentence_number_tells_which_paragraph_of_a_title_is_meant(tmp_path):
    context = [["Lisma", ["A.", "B."]], ["Lisma", ["C.", "D.", "E."]]]
    task = own(
        tmp_path,
        [
            {
                "question": "Who?",
                "supporting_facts": [["Lisma", 2], ["Lisma", 0]],
                "context": context,
            }
        ],
    )
    (question,) = task.questions("test")
    assert question.gold_passages == (GoldPassage(title="Lisma", text="C. D. E."),)


def test_a_title_alone_counts_for_every_passage_that_has_it(tmp_path):
    passages = [("Lisma", "The mill."), ("Lisma", "The pier."), ("Lisma: a history", "The mill.")]
    rows = [json.dumps({"title": title, "text": text}) + "\n" for title, text in passages]
    (tmp_path / "corpus.jsonl").write_text("".join(rows))
    task = own(tmp_path, [{"question": "Who built the mill?", "supporting_facts": ["Lisma"]}])
    (question,) = task.questions("test")
    for text in ("The mill.", "The pier."):
        assert figures(question, read(f"Lisma: {text}"))["gold_found"] == 100.0
    assert figures(question, read("Kolm: The mill."))["gold_found"] == 0.0


def test_a_title_that_begins_like_a_gold_one_is_another():
    gold = GoldPassage(title="Lisma", text="A town.")
    question = dataclasses.replace(QUESTION, gold_passages=(gold,))
    assert figures(question, read("Lisma: a history: A town."))["gold_found"] == 0.0
    assert not Material(text="Lisma: a history: A town.", title="Lisma: a history").shows(
        GoldPassage(title="Lisma")
    )


def test_a_gold_passage_that_was_cut_to_fit_was_found():
    gold = GoldPassage(title="Lisma", text="A town on the Quina. It has a mill.")
    question = dataclasses.replace(QUESTION, gold_passages=(gold,))
    assert figures(question, read("Lisma: A town on the Qui"))["gold_found"] == 100.0
    assert (
        figures(question, read("Lisma: A town on the Qui", "Kolm: A hill."))["gold_found"] == 0.0
    ), "none is cut beside"


def test_a_corpus_may_have_another_version_of_a_gold_paragraph():
    paragraph = GoldPassage(
        title="Lisma", text="Lisma is a town on the Quina. Its mill was built by Ann Ode in 1901."
    )
    chunks = [
        Passage(
            id="0", title="Lisma", text="History of trade with many other distant towns and hills."
        ),
        Passage(
            id="1",
            title="Lisma",
            text="Lisma is a small town on the Quina. Its mill was built by Ann Ode in 1901, and",
        ),
    ]
    gold = GoldInCorpus(chunks, ["Lisma"]).find(paragraph)
    assert gold == GoldPassage(title="Lisma", text=chunks[1].text)
    assert GoldInCorpus(chunks[:1], ["Lisma"]).find(paragraph) is None, (
        "another paragraph of the article is no version"
    )
    exact = [*chunks, Passage(id="2", title="Lisma", text=paragraph.text.replace(". ", ".  "))]
    gold = GoldInCorpus(exact, ["Lisma"]).find(paragraph)
    # The same text up to spaces comes first.
    assert gold is not None
    assert gold.text == exact[2].text


def test_behind_an_address_titles_decide():
    """The texts that are searched there are unknown."""
    service = GoldInCorpus([], ["Lisma"], by_title=True)
    gold = service.find(GoldPassage(title="Lisma", text="A town."))
    assert gold is not None
    assert gold.is_shown_by("Lisma: Any other text.")
    assert not gold.is_shown_by("Kolm: A town.")


@pytest.mark.parametrize("on_disk", [False, True])
def test_titles_are_equal_however_their_letters_and_entities_are_written(tmp_path, on_disk):
    written = [("Ch\u00e2teau & Caf\u00e9", "A house."), ("Marks &amp; Spencer", "A shop.")]
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(
        "".join(json.dumps({"title": title, "text": text}) + "\n" for title, text in written)
    )
    changes: dict[str, Any] = {}
    if on_disk:
        status = index.main(
            ["build", "--corpus", str(corpus), "--kind", "bm25", "--out", str(tmp_path / "index")]
        )
        assert status == 0
        changes["index"] = str(tmp_path / "index")
    decomposed = unicodedata.normalize("NFD", "Ch\u00e2teau & Caf\u00e9")
    facts = [decomposed, "Marks & Spencer"]
    task = own(tmp_path, [{"question": "Which house?", "supporting_facts": facts}], **changes)
    (question,) = task.questions("test")
    assert [passage.text for passage in question.gold_passages] == ["A house.", "A shop."]
    materials = shown(task.environment(question), "house")
    assert figures(question, read(*materials))["gold_found"] == 50.0


def test_entities_of_hotpotqa_are_read_and_its_gold_passages_found(tmp_path):
    context = [
        ["Marks &amp; Spencer", ["Founded by &quot;Tom&quot; &amp; Co."]],
        ["Kolm", ["A hill & a mill."]],
    ]
    record = {
        "_id": "h",
        "question": "Who founded Marks &amp; Spencer?",
        "answer": "Tom &amp; Co",
        "supporting_facts": [["Marks &amp; Spencer", 0]],
        "context": context,
    }
    (tmp_path / "hotpot_dev_distractor_v1.json").write_text(json.dumps([record]))
    task = open_domain.build(
        HotpotConfig(data_dir=str(tmp_path), top_k=1, dev_percent=0, setting="distractor")
    )
    (question,) = task.questions("test")
    assert question.text == "Who founded Marks & Spencer?"
    assert question.answers == ("Tom & Co",)
    assert question.gold_passages == (
        GoldPassage(title="Marks & Spencer", text='Founded by "Tom" & Co.'),
    )
    assert shown(task.environment(question), "Spencer") == [
        'Marks & Spencer: Founded by "Tom" & Co.'
    ]


class Found:
    """An environment that always finds the same passages."""

    kind = "text"

    def __init__(self, *materials: Material) -> None:
        self._materials = materials

    async def search(self, query: str, entity: object) -> tuple[Material, ...]:
        del query, entity
        return self._materials


def test_demonstrations_and_syntheses_tell_gold_passages_by_their_texts():
    other = Material(text=f"Lisma: {OTHER}", title="Lisma")
    gold = Material(text=f"Lisma: {GOLD}", title="Lisma")
    question = dataclasses.replace(QUESTION, gold_passages=(GoldPassage(title="Lisma", text=GOLD),))
    world: Any = Found(other)
    assert shown(WithGoldPassages(world, question, 1.0), "Lisma?") == [gold.text], (
        "what was found is not the gold one"
    )
    assert shown(WithAllGoldPassages(world, question, lambda pool: pool), "Lisma?") == [gold.text]
    (piece,) = pieces(question, "text")
    assert place_in([other, gold], piece) == 1
    assert place_in([other], piece) is None


def test_a_paragraph_without_a_title_is_shown_as_it_is(tmp_path):
    task = own(
        tmp_path,
        [
            {
                "question": "Who built the mill?",
                "supporting_facts": [["", 0]],
                "context": [["", ["The mill."]]],
            }
        ],
    )
    (question,) = task.questions("test")
    materials = shown(task.environment(question), "mill")
    assert materials == ["The mill."]
    assert figures(question, read(*materials))["gold_found"] == 100.0
