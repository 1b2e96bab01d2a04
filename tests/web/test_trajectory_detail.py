"""One trajectory for the page, on the attempt at q1 of `tests/helpers/viewed_runs.py`."""

import dataclasses

import pytest

from mujica_jax.trajectories.question_records import question_record
from mujica_jax.web.trajectory_detail import detail, token_texts
from tests.helpers.viewed_runs import QUESTIONS, byte_tokenizer, solved

QUESTION = question_record(QUESTIONS["q1"])


def shown(trajectory=None, tokenizer=None):
    return detail(trajectory or solved(), QUESTION, tokenizer)


def test_the_tree_has_a_turn_with_its_searches_for_each_iteration():
    iterations = shown()["iterations"]
    assert [iteration["number"] for iteration in iterations] == [1, 2, 3]
    queries = [[search["query"] for search in entry["searches"]] for entry in iterations]
    assert queries == [["Who directed Snow?"], ["Where was Ada Crane born?"], []]
    assert iterations[2]["turn"] == "<answer> Oslo </answer>"


def test_parallel_searches_stand_in_one_turn():
    searches = [dataclasses.replace(search, iteration=0) for search in solved().searches]
    iterations = shown(dataclasses.replace(solved(), searches=tuple(searches)))["iterations"]
    assert [len(iteration["searches"]) for iteration in iterations] == [2, 0, 0]


def test_materials_say_whether_they_are_selected_and_gold():
    first, second = (entry["searches"][0]["materials"] for entry in shown()["iterations"][:2])
    assert [(line["selected"], line["gold"]) for line in first] == [(True, True), (False, False)]
    # "Ada Crane" is gold by its title alone.
    assert [(line["selected"], line["gold"]) for line in second] == [(False, False), (True, True)]


def test_a_search_names_the_conversation_of_its_worker():
    searches = [entry["searches"][0] for entry in shown()["iterations"][:2]]
    assert [search["conversation"] for search in searches] == [1, 2]


def test_a_search_names_no_conversation_where_a_worker_wrote_nothing():
    trajectory = solved()
    silent = dataclasses.replace(trajectory, conversations=trajectory.conversations[:2])
    searches = [entry["searches"][0] for entry in shown(silent)["iterations"][:2]]
    assert [search["conversation"] for search in searches] == [None, None]


def test_tokens_have_the_mask_and_the_log_probabilities_of_the_engine():
    turns = shown(tokenizer=byte_tokenizer())["conversations"][0]["turns"]
    assert [turn["trained"] for turn in turns] == [False, True, False, True, False, True]
    assert turns[0]["logprobs"] is None
    assert turns[5]["logprobs"][:3] == [0.0, -1.0, -2.0]
    assert "".join(turns[5]["texts"]) == "<answer> Oslo </answer>"


def test_special_tokens_are_marked_and_shown():
    turn = shown(tokenizer=byte_tokenizer())["conversations"][0]["turns"][1]
    assert turn["texts"][-1] == "<end>"
    assert turn["special"] == [False] * (len(turn["ids"]) - 1) + [True]


def test_without_a_tokenizer_tokens_have_ids_and_no_text():
    content = shown()
    turn = content["conversations"][0]["turns"][1]
    assert not content["has_tokenizer"]
    assert turn["texts"] is None
    assert turn["ids"][-1] == 256
    assert turn["text"].startswith("<search>")


def test_a_trajectory_without_a_reward_says_so():
    assert shown(solved().without_verdict())["reward"] is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ab", ["a", "b"]),
        ("é", ["", "é"]),
        ("a🌲b", ["a", "", "", "", "🌲", "b"]),
        ("", []),
    ],
)
def test_the_last_token_of_a_character_has_it(text, expected):
    tokenizer = byte_tokenizer()
    assert token_texts(tokenizer.encode(text).ids, tokenizer) == expected


def test_bytes_that_are_no_character_are_shown_as_such():
    tokenizer = byte_tokenizer()
    tree = tokenizer.encode("🌲").ids
    assert token_texts([*tree[:2]], tokenizer) == ["", "\ufffd"]
    assert "".join(token_texts([*tree[:2], *tokenizer.encode("ab").ids], tokenizer)).endswith("ab")
