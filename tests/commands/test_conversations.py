"""`python -m mujica_jax.conversations`: what it writes, and what it refuses."""

import dataclasses
import json
from pathlib import Path

import pytest

from mujica_jax.agents.dialogue import Dialogue
from mujica_jax.commands.conversations import main
from mujica_jax.config.files import load_config
from mujica_jax.inference.requests import Completion
from mujica_jax.learning.conversations import conversation_of
from mujica_jax.models.tokenizer import Tokenizer
from mujica_jax.records import Conversation, StopReason, Trajectory
from mujica_jax.tasks.tiny_world.world import build
from mujica_jax.trajectories import shards
from mujica_jax.trajectories.messages import read_conversations, read_preferences
from mujica_jax.trajectories.store import Store, open_run
from tests.helpers.episodes import episode
from tests.helpers.paths import HELPERS

TOKENIZER = Tokenizer.train(["Rome Oslo Who directed it"], 400)
SMOKE = load_config(str(HELPERS / "smoke_config.py"))
# Two questions of the smoke run's world.
FIRST, SECOND = build(SMOKE.task).questions("train")[:2]
# Rome, as a policy may sample it: one token for each letter.
LETTERS = tuple(TOKENIZER._backend.token_to_id(letter) for letter in "Rome")


def conversation(role: str, *replies: str, ids: tuple[int, ...] = ()) -> Conversation:
    """Return a conversation with these replies, the last of which may have tokens of its own."""
    talk = Dialogue(TOKENIZER, role, "Answer.")
    for number, reply in enumerate(replies, start=1):
        talk.add_user("Who directed <answer>?", tag="information")
        own_ids = tuple(TOKENIZER.encode_model(reply))
        is_last = number == len(replies)
        completion = Completion(
            token_ids=(*(ids or own_ids), TOKENIZER.end_of_turn_id) if is_last else own_ids,
            logprobs=(),
            finish_reason="stop" if is_last else "stop_string",
            stop_string=None if is_last else "</search>",
        )
        talk.add_model(completion)
    return talk.record()


def of_question(question_id: str, answer: str, reward: float, *conversations: Conversation, **more):
    fields = {"question_id": question_id, "answer": answer, "reward": reward, **more}
    return episode(*conversations, **fields)


PLANNER = conversation("planner", "<search>it</search>", "<answer>Rome</answer>")
WORKER = conversation("worker", "Rome", ids=LETTERS)
RIGHT = of_question(FIRST.id, FIRST.answers[0], 1.0, PLANNER, WORKER)
WRONG = of_question(SECOND.id, "nobody", 0.25, PLANNER)
FAULT = of_question(SECOND.id, "", 0.0, PLANNER, stop_reason=StopReason.RETRIEVER_FAILED)
PAIR = of_question(
    FIRST.id,
    "",
    1.0,
    conversation("decision", "<search>it</search>", "<answer>Rome</answer>"),
    conversation("decision", "<search>it</search>", "<answer>Oslo</answer>"),
    counts={"chosen_mean": 1.0, "rejected_mean": 0.0},
)


@pytest.fixture
def run(tmp_path) -> Path:
    """Return a run with two rounds, the second of them with a pair, and an evaluation."""
    directory = tmp_path / "run"
    store = open_run(directory, dataclasses.asdict(SMOKE))
    store.commit_folder("tokenizer", TOKENIZER.save, {})
    add_round(store, 1, [RIGHT, WRONG, FAULT])
    add_round(store, 2, [RIGHT, PAIR])
    store.create("eval/round-2.parquet", shards.encode([WRONG]))
    return directory


def add_round(store: Store, number: int, trajectories: list[Trajectory]) -> None:
    entry = store.write_shard(number, 0, trajectories)
    store.write_done(number, [entry], mean_reward=0.0, threshold=None)


def lines(run: Path, *flags: str) -> list[dict]:
    out = run.parent / "out.jsonl"
    out.unlink(missing_ok=True)
    assert main([str(run), "--out", str(out), *flags]) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_each_conversation_of_a_rewarded_episode_is_a_line(run):
    written = lines(run)
    assert [(line["phase"], line["question_id"], line["role"]) for line in written] == [
        ("round 1", FIRST.id, "planner"),
        ("round 1", FIRST.id, "worker"),
        ("round 1", SECOND.id, "planner"),
        ("round 2", FIRST.id, "planner"),
        ("round 2", FIRST.id, "worker"),
    ]
    assert (written[0]["answer"], written[0]["reward"]) == (FIRST.answers[0], 1.0)


def test_a_line_holds_what_the_model_read_and_wrote(run):
    planner, worker, *_ = lines(run, "--phase", "round 1")
    assert planner["messages"] == [
        {"role": "system", "content": "Answer."},
        {"role": "user", "content": "Who directed ‹answer›?"},
        {"role": "assistant", "content": "<search>it</search>", "ends_turn": False},
        {
            "role": "user",
            "content": "<information>\nWho directed ‹answer›?\n</information>",
            "tag": "information",
        },
        {"role": "assistant", "content": "<answer>Rome</answer>"},
    ]
    assert worker["messages"][-1] == {
        "role": "assistant",
        "content": "Rome",
        "token_ids": list(LETTERS),
    }


def test_the_file_is_learnt_with_the_tokens_and_the_mask_that_are_stored(run, capsys):
    lines(run, "--phase", "round 1")
    records = read_conversations([str(run.parent / "out.jsonl")])
    read = [conversation_of(TOKENIZER, record.messages) for record in records]
    stored = [PLANNER, WORKER, PLANNER]
    assert [row.token_ids for row in read] == [row.token_ids for row in stored]
    assert [row.loss_mask for row in read] == [row.loss_mask for row in stored]
    assert "3 conversations of 2 trajectories; 3 of them read back" in capsys.readouterr().out


def test_a_conversation_with_an_empty_turn_is_left_out_and_said(run, capsys):
    add_round(
        Store(run), 3, [of_question(FIRST.id, "", 0.0, conversation("planner", " "), PLANNER)]
    )
    assert len(lines(run, "--phase", "round 3")) == 1
    assert "1 are left out, because the model wrote an empty turn" in capsys.readouterr().out


def test_only_correct_answers_are_written(run):
    assert {line["question_id"] for line in lines(run, "--correct-only")} == {FIRST.id}


def test_only_rewards_from_a_limit_on_are_written(run):
    assert {line["reward"] for line in lines(run, "--min-reward", "0.5")} == {1.0}


def test_an_evaluation_is_written_if_it_is_named(run):
    (line,) = lines(run, "--phase", "evaluation of round-2")
    assert line["question_id"] == SECOND.id


def test_pairs_are_written_for_dpo(run):
    (line,) = lines(run, "--pairs")
    assert line["role"] == "decision"
    (pair,) = read_preferences([str(run.parent / "out.jsonl")])
    chosen, rejected = PAIR.conversations
    assert conversation_of(TOKENIZER, pair.chosen).token_ids == chosen.token_ids
    assert conversation_of(TOKENIZER, pair.rejected).token_ids == rejected.token_ids
    # Only the last turn differs, so only it is learnt.
    assert [message.trained for message in pair.chosen] == [False] * 4 + [True]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--phase", "round 3"], "no trajectories of the phase 'round 3'; did you mean round"),
        (["--min-reward", "2"], "no trajectory of round 1, round 2 is left to write"),
        (["--out", "RUN/config.json"], "config.json exists already: remove it"),
    ],
)
def test_what_cannot_be_written_is_named(run, flags, sentence, capsys):
    words = [word.replace("RUN", str(run)) for word in flags]
    assert main([str(run), "--out", str(run.parent / "out.jsonl"), *words]) == 2
    assert sentence in capsys.readouterr().err
    assert not (run.parent / "out.jsonl").exists()


def test_a_folder_that_is_no_run_is_named(tmp_path, capsys):
    assert main([str(tmp_path), "--out", str(tmp_path / "out.jsonl")]) == 2
    assert f"there is no run in {tmp_path}" in capsys.readouterr().err


def test_a_run_without_a_round_offers_its_evaluations(tmp_path, capsys):
    store = open_run(tmp_path / "run", dataclasses.asdict(SMOKE))
    store.create("eval/warm-up.parquet", shards.encode([WRONG]))
    assert main([str(tmp_path / "run"), "--out", str(tmp_path / "out.jsonl")]) == 2
    assert "only evaluation of warm-up: choose an evaluation" in capsys.readouterr().err
