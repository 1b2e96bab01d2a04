"""A task over passages searches with the reranker that its configuration names."""

import asyncio
import dataclasses
import json

import pytest

from mujica_jax.config.tasks import OwnQuestionsConfig
from mujica_jax.errors import UserError
from mujica_jax.retrieval.embedding.find_cross_encoder import find_cross_encoder
from mujica_jax.tasks.content import fingerprint_of_searches
from mujica_jax.tasks.open_domain import own_questions
from mujica_jax.tasks.task import Task
from mujica_jax.tasks.tiny_world import world as tiny_world
from tests.helpers.tiny_cross_encoder import tiny_cross_encoder
from tests.helpers.tiny_embedder import WORDS, tiny_embedder
from tests.helpers.tiny_worlds import small_world

PARAGRAPHS = [
    {"title": f"title {n}", "paragraph_text": " ".join(["word1", *WORDS[n : n + 6]])}
    for n in range(6)
]
QUERY = "word1 word9"


@pytest.fixture
def model(tmp_path, monkeypatch) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return str(tiny_cross_encoder(tmp_path / "model"))


@pytest.fixture
def questions(tmp_path) -> OwnQuestionsConfig:
    """The settings of a task with one question, which brings six paragraphs with `word1`."""
    record = {"question": "Which one?", "answer": "word2", "paragraphs": PARAGRAPHS}
    (tmp_path / "train.jsonl").write_text(json.dumps(record))
    return OwnQuestionsConfig(data_dir=str(tmp_path / "train.jsonl"), top_k=3)


def shown(task: Task, query: str = QUERY) -> list[str]:
    """Return the texts that a search of the first training question shows."""
    environment = task.environment(task.questions("train")[0])
    return [material.text for material in asyncio.run(environment.search(query, None))]


def best_texts(model: str, k: int) -> list[str]:
    """Return the texts of the k paragraphs with the best scores."""
    pairs = [(QUERY, f"{entry['title']}\n{entry['paragraph_text']}") for entry in PARAGRAPHS]
    scores = find_cross_encoder(model).load().scores(pairs)
    places = sorted(range(len(pairs)), key=lambda place: -scores[place])
    return [pairs[place][1].replace("\n", ": ") for place in places[:k]]


@pytest.mark.parametrize("setting", ["open", "distractor"])
def test_a_search_shows_the_best_passages_by_the_reranker(questions, model, setting):
    config = dataclasses.replace(questions, setting=setting, reranker=model)
    if setting == "distractor":
        config = dataclasses.replace(config, keep_incomplete=True)
    task = own_questions.build(config)
    assert shown(task) == best_texts(model, 3)
    assert task.environment(task.questions("train")[0]).statistics.reranked == 6


def test_fewer_candidates_leave_the_first_stage_more_say(questions, model):
    first_stage = shown(own_questions.build(questions))
    config = dataclasses.replace(questions, reranker=model, rerank_candidates=3)
    assert sorted(shown(own_questions.build(config))) == sorted(first_stage)


def test_the_fingerprint_of_searches_names_the_reranker(questions, model, tmp_path):
    other = str(tiny_cross_encoder(tmp_path / "other", seed=1))
    changes = (
        {},
        {"reranker": model},
        {"reranker": other},
        {"reranker": model, "rerank_candidates": 5},
    )
    fingerprints = set()
    for change in changes:
        task = own_questions.build(dataclasses.replace(questions, **change))
        fingerprints.add(fingerprint_of_searches(task, task.questions("train")))
    assert len(fingerprints) == len(changes)


def test_an_embedder_is_refused(questions, tmp_path):
    config = dataclasses.replace(questions, reranker=str(tiny_embedder(tmp_path / "embedder")))
    with pytest.raises(UserError, match="cannot score pairs: give a cross-encoder"):
        own_questions.build(config)


def test_the_passages_of_the_tiny_world_are_reranked(model):
    config = dataclasses.replace(
        small_world(20, 10, 10, facts=4).config,
        environment="text",
        reranker=model,
        rerank_candidates=7,
    )
    task = tiny_world.build(config)
    question = task.questions("dev")[0]
    environment = task.environment(question)
    assert len(asyncio.run(environment.search(question.text, None))) == config.top_k
    assert environment.statistics.reranked == 7
