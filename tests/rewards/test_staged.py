"""The rewards of "Learning When to Search" against numbers worked out by hand from its
equations.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import pytest

from mujica_jax.config.methods import StagedRewardConfig
from mujica_jax.config.schema import Config
from mujica_jax.errors import UserError
from mujica_jax.records import Question, Search, StopReason, Trajectory
from mujica_jax.retrieval.embedding.similarity import word_cosines
from mujica_jax.rewards.reward import RewardFunction, find_reward
from mujica_jax.rewards.staged import is_concise, mean_similarity
from mujica_jax.runs.parts import make_reward
from tests.helpers import episodes
from tests.helpers.paths import HELPERS

QUESTION = Question(id="q", text="Where?", answers=("Ghent",))
SWITCH = 10  # first round of the second stage
# Cosines: 0.6 between the first two, 0.8 and 0 with the third.
VECTORS = {"a": (1.0, 0.0), "b": (3.0, 4.0), "c": (0.0, 2.0)}


def episode(
    answer: str, *queries: str, malformed: bool = False, reason=StopReason.ANSWERED
) -> Trajectory:
    counts = {"malformed_shape": float(malformed)}
    searches = tuple(Search(iteration=place, query=query) for place, query in enumerate(queries))
    return episodes.episode(answer=answer, counts=counts, stop_reason=reason, searches=searches)


def reward(**changes) -> RewardFunction:
    config = StagedRewardConfig(stage_two_round=SWITCH, **changes)
    return find_reward("staged", "two_wiki", config, cosines)


def cosines(query: str, others: Sequence[str]) -> list[float]:
    vector = np.array(VECTORS[query])
    rest = np.array([VECTORS[other] for other in others])
    return (rest @ vector / np.linalg.norm(rest, axis=1) / np.linalg.norm(vector)).tolist()


def parts(trajectory: Trajectory, stage: int, **changes) -> dict[str, float]:
    earned = reward(**changes).at(SWITCH - 1 if stage == 1 else SWITCH)(trajectory, QUESTION)
    assert earned.total == pytest.approx(sum(earned.parts.values()))
    return dict(earned.parts)


SIMILAR = -(0.6 + 0.8 + 0.0) / 3  # the mean over the pairs, twice what equation 8 prints

# episode -> answer in the first and in the second stage, search, format
EPISODES = {
    "right from memory": (episode("Ghent"), 1.0, 1.0, 0.0, 1.0),
    "right with a search": (episode("Ghent", "a"), 1.0, 1.0 - 0.3, 0.0, 1.0),
    "right with three": (episode("Ghent", "a", "b", "c"), 1.0, 1.0 - 3 * 0.3, SIMILAR, 1.0),
    "wrong from memory": (episode("Rome"), -1.0, -1.0, 0.0, 1.0),
    "wrong with two": (episode("Rome", "a", "b"), -1.0 + 2 * 0.3, -1.0, -0.6, 1.0),
    "half of it is wrong": (episode("Ghent, Belgium"), -1.0, -1.0, 0.0, 1.0),
    "malformed": (episode("Ghent", malformed=True), 1.0, 1.0, 0.0, -1.0),
    "no answer": (episode("", "a", reason=StopReason.ITERATION_LIMIT), -1.0 + 0.3, -1.0, 0.0, -1.0),
    "a question as query": (episode("Ghent", "who made it?"), 1.0, 1.0 - 0.3, -1.0, 1.0),
}


@pytest.mark.parametrize("episode_name", EPISODES)
def test_what_an_episode_earns_in_each_stage(episode_name):
    trajectory, first, second, search, form = EPISODES[episode_name]
    for stage, answer in ((1, first), (2, second)):
        assert parts(trajectory, stage) == pytest.approx(
            {"answer": answer, "search": search, "format": form}
        )


def test_the_stage_follows_the_round():
    staged = reward()
    searched = episode("Ghent", "a")
    totals = [
        staged.at(number)(searched, QUESTION).total
        for number in (0, SWITCH - 1, SWITCH, SWITCH + 5)
    ]
    assert totals == pytest.approx([2.0, 2.0, 1.7, 1.7])
    assert find_reward("f1", "two_wiki").at(SWITCH)(searched, QUESTION).total == 1.0, (
        "others know no stages"
    )


@pytest.mark.parametrize(
    ("changes", "stage", "expected"),  # of a wrong and of a right answer after two searches
    [
        ({"stage_one": False}, 1, ({"answer": -1.0}, {"answer": 1.0})),
        ({"stage_one": False}, 2, ({"answer": -1.0}, {"answer": 0.4})),
        ({"stage_two": False}, 1, ({"answer": -0.4}, {"answer": 1.0})),
        ({"stage_two": False}, 2, ({"answer": -1.0}, {"answer": 1.0})),
        ({"beta": 0.1}, 2, ({"answer": -1.0}, {"answer": 0.8})),
        ({"answer": False}, 2, ({}, {})),
    ],
)
def test_the_ablations_of_the_answer(changes, stage, expected):
    for guess, answer in zip(("Rome", "Ghent"), expected, strict=True):
        earned = parts(episode(guess, "a", "b"), stage, **changes)
        assert earned == pytest.approx({"search": -0.6, "format": 1.0} | answer)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(
    ("trajectory", "answer"),  # 1 - 0.3 RC where it is right, -1 + 0.3 RC where it is wrong
    [
        (episode("Ghent"), 1.0),
        (episode("Ghent", "a", "b"), 0.4),
        (episode("Rome"), -1.0),
        (episode("Rome", "a", "b", "c"), -0.1),
        (episode("", "a", reason=StopReason.ITERATION_LIMIT), -0.7),
    ],
)
def test_the_unified_reward_has_no_stages(trajectory, answer, stage):
    assert parts(trajectory, stage, unified=True)["answer"] == pytest.approx(answer)
    assert reward(unified=True).best == 2.0


def test_the_ablations_of_search_and_format():
    trajectory = episode("Ghent", "a", "b")
    assert parts(trajectory, 1, search=False) == {"answer": 1.0, "format": 1.0}
    assert parts(trajectory, 1, format=False) == pytest.approx({"answer": 1.0, "search": -0.6})
    assert reward(format=False).best == 1.0
    assert reward().best == 2.0
    # No embedder is asked for one query, or for none.
    with pytest.raises(AssertionError):
        find_reward("staged", "two_wiki", None, raising)(trajectory, QUESTION)
    assert (
        find_reward("staged", "two_wiki", None, raising)(episode("Ghent", "a"), QUESTION).total
        == 2.0
    )


def raising(query, others):
    raise AssertionError("asked")


def test_similarity_of_counts_of_words():
    # "amber tide director" and "amber tide": 2 / (sqrt 3 sqrt 2); "ghent" shares nothing with
    # either.
    queries = ["Amber Tide director", "amber tide", "Ghent"]
    assert mean_similarity(queries, word_cosines) == pytest.approx(2 / math.sqrt(6) / 3)
    assert mean_similarity(["?", "!"], word_cosines) == 0.0


@pytest.mark.parametrize(
    ("query", "concise"),
    [
        ("Amber Tide director", True),
        ("Ilse Vandermark place of birth", True),  # a preposition that joins two words
        ("The Purple Shore composer", True),
        ("Who directed Amber Tide", False),
        ("Amber Tide director?", False),
        ("of Amber Tide", False),
        ("director of", False),
        ("one two three four five six seven eight nine ten eleven", False),
        ("", False),
    ],
)
def test_what_a_concise_query_is(query, concise):
    assert is_concise(query, 10) == concise
    assert not is_concise("Amber Tide director", 2)
    assert (
        reward(max_query_words=2)(episode("Ghent", "one two three"), QUESTION).parts["search"]
        == -1.0
    )


def test_an_embedder_that_does_not_exist_is_named(smoke: Config):
    named = dataclasses.replace(
        smoke, reward="staged", staged=StagedRewardConfig(embedder="nowhere")
    )
    with pytest.raises(UserError, match="the embedder 'nowhere' is not a folder"):
        make_reward(named, "two_wiki")


def test_an_embedder_says_how_alike_queries_are(smoke: Config, tmp_path):
    from tests.helpers.tiny_embedder import WORDS, tiny_embedder

    folder = tiny_embedder(tmp_path / "embedder")
    config = dataclasses.replace(
        smoke, reward="staged", staged=StagedRewardConfig(embedder=str(folder))
    )
    staged = make_reward(config, "two_wiki")
    same, other = (
        staged(episode("Ghent", WORDS[0], word), QUESTION).parts["search"] for word in WORDS[:2]
    )
    assert same == pytest.approx(-1.0, abs=1e-6)
    assert -1.0 < other < 1.0
    assert other != same


@pytest.fixture
def smoke() -> Config:

    from mujica_jax.config.files import load_config

    return load_config(str(HELPERS / "smoke_config.py"))
