"""Records of episodes that print as trees, and stored trajectories as tables."""

import dataclasses

import pytest

from mujica_jax import read_trajectories
from mujica_jax.api.trajectories import AnsweredTrajectory, answered
from mujica_jax.errors import StoreError, UserError
from mujica_jax.records import Question, Search, StopReason
from mujica_jax.report.results import question_tree
from mujica_jax.report.text import plain
from mujica_jax.trajectories import shards
from tests.helpers.episodes import episode
from tests.helpers.untrained_run import write_trajectories

QUESTION = Question(id="asked", text="Who made Taxi!?", answers=())


@pytest.fixture
def run(tmp_path) -> str:
    write_trajectories(tmp_path / "run")
    return str(tmp_path / "run")


def record(answer: str = "Roy Ruth", **changes) -> AnsweredTrajectory:
    searches = (Search(iteration=0, query="Who?", materials=("b",), selected=(0,), sentence="He."),)
    trajectory = episode(question_id="asked", answer=answer, searches=searches, **changes)
    return answered(trajectory, QUESTION, ("'Taxi!' in the question is Taxi! (Q1)",))


def test_a_record_prints_its_notes_and_the_tree_of_eval():
    shown = repr(record())
    note, tree = shown.split("\n", maxsplit=1)
    assert note == "'Taxi!' in the question is Taxi! (Q1)"
    assert f"{tree}\n" == plain(question_tree(QUESTION, record()))
    assert tree.endswith("answer: Roy Ruth")


def test_a_notebook_shows_the_same_with_everything_escaped():
    shown = record("<script>alert('x')</script> & co")._repr_html_()
    assert shown.startswith("<pre>")
    assert "<script>" not in shown
    assert "&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt; &amp; co" in shown


def test_a_record_is_a_trajectory_that_can_be_stored():
    record_of_episode = record()
    [stored] = shards.decode(shards.encode([record_of_episode]), "file")
    fields = {field.name for field in dataclasses.fields(stored)}
    assert all(getattr(stored, name) == getattr(record_of_episode, name) for name in fields)
    assert record(stop_reason=StopReason.NO_ACTION).final_answer is None


def test_all_trajectories_of_a_run_are_one_table(run):
    rows = read_trajectories(run).select(["phase", "kind", "question_id"]).to_pylist()
    assert [tuple(row.values()) for row in rows] == [
        ("warm-up", "sampled", "q-2"),
        ("warm-up", "evaluated", "q-2"),
        ("round 1", "sampled", "q-1"),
        ("round 1", "sampled", "q-1"),
        ("round 1", "sampled", "q-2"),
        ("round 1", "evaluated", "q-1"),
    ]


def test_a_phase_chooses_its_trajectories(run):
    table = read_trajectories(run, phase="warm-up")
    assert table["phase"].to_pylist() == ["warm-up", "warm-up"]


def test_nested_columns_hold_the_tokens_and_the_searches(run):
    row = read_trajectories(run, phase="round 1").to_pylist()[0]
    [conversation] = row["conversations"]
    assert [turn["token_ids"] for turn in conversation["turns"]] == [[1, 2], [3]]
    assert [turn["trained"] for turn in conversation["turns"]] == [False, True]
    assert row["searches"][0]["selected"] == [1]
    assert row["reward"] == 0.5


def test_an_unknown_phase_is_answered_with_the_nearest(run):
    with pytest.raises(UserError, match=r"phase 'round 2'; did you mean round 1\?"):
        read_trajectories(run, phase="round 2")


def test_a_folder_that_is_missing_or_has_no_trajectories_is_named(tmp_path):
    with pytest.raises(UserError, match=r"there is no directory .*nowhere"):
        read_trajectories(str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="has no trajectories: give the directory of a run"):
        read_trajectories(str(tmp_path))


def test_a_damaged_shard_is_named(run, tmp_path):
    shard = tmp_path / "run" / "rounds" / "0001" / "shard-00000.parquet"
    shard.write_bytes(shard.read_bytes()[:-9])
    with pytest.raises(StoreError, match=r"shard-00000\.parquet"):
        read_trajectories(run)
