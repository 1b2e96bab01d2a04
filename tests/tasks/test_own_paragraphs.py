"""The pool of EviPath's synthesis: the paragraphs that a data set gives with a question."""

import asyncio
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from mujica_jax.config.schema import TwoWikiConfig
from mujica_jax.config.tasks import HotpotConfig, MusiqueConfig, PopQaConfig
from mujica_jax.methods.evipath.evidence import pieces, place_in
from mujica_jax.records import GoldPassage, Question
from mujica_jax.tasks.open_domain.task import build
from mujica_jax.tasks.own_paragraphs import OwnParagraphs
from mujica_jax.tasks.task import Material, ParagraphTask
from mujica_jax.tasks.two_wiki.task import build as build_two_wiki

GOLD = GoldPassage(title="Amber Tide", text="A film by Ilse Vand.")
TWIN = GoldPassage(title="Amber Tide", text="A song of 1990.")  # a distractor of the same title
BIRTH = GoldPassage(title="Ilse Vand", text="Born in Ghent.")
NOISE = GoldPassage(title="Tin Orchard", text="Another film.")
QUESTION = Question(
    id="q", text="Where was the director born?", answers=("Ghent",), gold_passages=(GOLD, BIRTH)
)


def all_fit(materials: Sequence[Material]) -> Sequence[Material]:
    return materials


def shown(pool: OwnParagraphs, query: str) -> list[str]:
    return [material.text for material in asyncio.run(pool.search(query, None))]


def test_every_search_shows_all_paragraphs_of_the_question_in_an_order_of_its_own():
    pool = OwnParagraphs(QUESTION, [NOISE, TWIN, GOLD, BIRTH], all_fit)
    everything = {
        "Amber Tide: A film by Ilse Vand.",
        "Amber Tide: A song of 1990.",
        "Ilse Vand: Born in Ghent.",
        "Tin Orchard: Another film.",
    }
    orders = {tuple(shown(pool, query)) for query in ("Who?", "Where?", "When?", "What?", "Why?")}
    assert all(set(order) == everything for order in orders)
    assert len(orders) > 1
    assert shown(pool, "Who?") == shown(pool, "Who?"), "the same query shows the same order"


def test_where_room_is_short_gold_paragraphs_come_first_by_title_and_text():
    pool = OwnParagraphs(QUESTION, [NOISE, TWIN, GOLD, BIRTH], lambda materials: materials[:2])
    assert set(shown(pool, "Who?")) == {
        "Amber Tide: A film by Ilse Vand.",
        "Ilse Vand: Born in Ghent.",
    }
    alone = OwnParagraphs(QUESTION, [NOISE, TWIN, GOLD, BIRTH], lambda materials: materials[:1])
    assert shown(alone, "Where was Ilse Vand born?") == ["Ilse Vand: Born in Ghent."], (
        "what the query names"
    )


def test_a_gold_passage_that_the_paragraphs_lack_is_added_where_its_text_is_known():
    pool = OwnParagraphs(QUESTION, [NOISE, BIRTH], all_fit)
    assert "Amber Tide: A film by Ilse Vand." in shown(pool, "Who?")
    unknown = dataclasses.replace(QUESTION, gold_passages=(GoldPassage(title="Amber Tide"), BIRTH))
    assert set(shown(OwnParagraphs(unknown, [NOISE, BIRTH], all_fit), "Who?")) == {
        "Ilse Vand: Born in Ghent.",
        "Tin Orchard: Another film.",
    }


def test_a_paragraph_without_a_title_is_shown_as_its_text_alone():
    untitled = GoldPassage(title="", text="Ilse Vand was born in Ghent.")
    question = dataclasses.replace(QUESTION, gold_passages=(untitled,))
    pool = OwnParagraphs(question, [NOISE, untitled], all_fit)
    assert "Ilse Vand was born in Ghent." in shown(pool, "Who?")
    (piece,) = pieces(question, "text")
    materials = asyncio.run(pool.search("Who?", None))
    place = place_in(materials, piece)
    assert place is not None
    assert materials[place].text == "Ilse Vand was born in Ghent."


def test_a_gold_passage_of_an_index_is_found_by_its_title():
    """An index may hold another version of the text."""
    indexed = dataclasses.replace(
        QUESTION, gold_passages=(GoldPassage(title="Ilse Vand", text="Ilse Vand, b. Ghent."),)
    )
    pool = OwnParagraphs(indexed, [NOISE, BIRTH], lambda materials: materials[:1])
    assert shown(pool, "Who?") == ["Ilse Vand: Born in Ghent."]


def test_evidence_stands_where_its_text_stands_and_not_at_a_namesake():
    gold, birth = pieces(QUESTION, "text")
    pool = [
        Material(text=f"{passage.title}: {passage.text}", title=passage.title)
        for passage in (TWIN, NOISE, GOLD)
    ]
    assert place_in(pool, gold) == 2
    assert place_in(pool, birth) is None
    cut = [Material(text="Ilse Vand: Born", title="Ilse Vand")]
    assert place_in(cut, birth) == 0, "a passage that was cut is found by its title"


def test_hotpotqa_gives_ten_paragraphs_and_their_question_brings_them_from_the_file(tmp_path: Path):
    context = [[f"Title {number}", [f"Sentence {number}.", " Another."]] for number in range(10)]
    record = {"_id": "h", "question": "Who?", "answer": "x", "type": "bridge", "level": "hard"}
    record |= {"supporting_facts": [["Title 3", 0], ["Title 7", 1]], "context": context}
    (tmp_path / "hotpot_train_v1.1.json").write_text(json.dumps([record]))
    task = build(HotpotConfig(data_dir=str(tmp_path), top_k=3))
    (question,) = task.questions("train")
    assert isinstance(task, ParagraphTask)
    paragraphs = task.own_paragraphs(question)
    assert len(paragraphs) == 10
    assert paragraphs[3] == GoldPassage(title="Title 3", text="Sentence 3. Another.")
    pool = OwnParagraphs(question, paragraphs, lambda materials: materials[:2])
    assert sorted(text[:7] for text in shown(pool, "Who?")) == ["Title 3", "Title 7"]


def test_musique_gives_twenty_and_sets_without_paragraphs_none(tmp_path: Path):
    paragraphs = [
        {
            "idx": number,
            "title": f"Title {number % 5}",
            "paragraph_text": f"Text {number}.",
            "is_supporting": number == 9,
        }
        for number in range(20)
    ]
    record = {
        "id": "2hop__1",
        "question": "Who?",
        "answer": "x",
        "answer_aliases": [],
        "answerable": True,
    }
    (tmp_path / "musique_ans_v1.0_train.jsonl").write_text(
        json.dumps(record | {"paragraphs": paragraphs})
    )
    task = build(MusiqueConfig(data_dir=str(tmp_path), top_k=3))
    (question,) = task.questions("train")
    assert [passage.text for passage in task.own_paragraphs(question)] == [
        f"Text {number}." for number in range(20)
    ]
    other = tmp_path / "popqa"
    other.mkdir()
    (other / "popQA.tsv").write_text(
        'id\tquestion\tpossible_answers\tprop\n1\tWho?\t["x"]\tauthor\n'
    )
    corpus = build_index(tmp_path)
    lone = build(PopQaConfig(data_dir=str(other), top_k=1, index=corpus, dev_percent=0))
    assert lone.own_paragraphs(lone.questions("test")[0]) == ()


def build_index(folder: Path) -> str:
    from mujica_jax.commands.index import main

    (folder / "corpus.jsonl").write_text(
        json.dumps({"id": "1", "title": "T", "text": "Some words."}) + "\n"
    )
    out = str(folder / "index")
    assert (
        main(["build", "--corpus", str(folder / "corpus.jsonl"), "--kind", "bm25", "--out", out])
        == 0
    )
    return out


def test_two_wiki_brings_the_contexts_of_its_records(tmp_path: Path):
    record = {
        "_id": "w",
        "question": "Who is the director of Amber Tide?",
        "answer": "Ilse Vand",
        "type": "compositional",
        "supporting_facts": [["Amber Tide", 0]],
        "context": [["Amber Tide", ["A film by Ilse Vand."]], ["Tin Orchard", ["Another film."]]],
        "evidences": [["Amber Tide", "director", "Ilse Vand"]],
    }
    (tmp_path / "train.json").write_text(json.dumps([record]))
    config = TwoWikiConfig(
        environment="text",
        data_dir=str(tmp_path),
        hold_out_percent=1,
        dev_questions=1,
        test_questions=1,
        top_k=2,
    )
    task = build_two_wiki(config)
    (question,) = [asked for split in ("train", "dev", "test") for asked in task.questions(split)]
    assert task.own_paragraphs(question) == (GOLD, NOISE)
