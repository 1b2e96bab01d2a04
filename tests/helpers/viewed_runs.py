"""A small run that is written by the package's own writers, for the tests of what shows runs.

Round 1 has two shards:

    place  question  attempt  reward  answer     ended by   searches  kept
    0/0    q1        0        1.0     Oslo       answered   2         yes
    0/1    q2        0        0.0                no_action  1         no
    1/0    q2        1        0.5     Ada Crane  answered   0         no

The evaluation after the warm-up has one trajectory, of question q3.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import tokenizers

from mujica_jax.config.files import load_config
from mujica_jax.records import (
    Conversation,
    GoldPassage,
    Question,
    Search,
    StopReason,
    Trajectory,
    Turn,
)
from mujica_jax.report.metrics_log import MetricsLog
from mujica_jax.trajectories import shards
from mujica_jax.trajectories.question_records import encode_questions, question_record
from mujica_jax.trajectories.store import Store, open_run

QUESTIONS = {
    question.id: question
    for question in (
        Question(
            id="q1",
            text="In which city was the director of Snow born?",
            answers=("Oslo", "Kristiania"),
            kind="compositional",
            gold_passages=(
                GoldPassage(title="Snow", text="Snow is a film by Ada Crane."),
                GoldPassage(title="Ada Crane", by_title=True),
            ),
        ),
        Question(id="q2", text="Who directed Snow?", answers=("Bo Dahl",), kind="comparison"),
        Question(id="q3", text="When was Ada Crane born?", answers=("1901",), kind="compositional"),
    )
}
FIRST_SEARCH = Search(
    iteration=0,
    query="Who directed Snow?",
    materials=("Snow: Snow is a film by Ada Crane.", "Snow (band): Snow is a band."),
    selected=(0,),
    sentence="Ada Crane directed Snow.",
    found=True,
)
SECOND_SEARCH = Search(
    iteration=1,
    query="Where was Ada Crane born?",
    entity="Ada Crane",
    materials=("Oslo: Oslo is a city.", "Ada Crane: Ada Crane was born in Oslo."),
    selected=(1,),
    sentence="Ada Crane was born in Oslo.",
    found=True,
)


def byte_tokenizer() -> tokenizers.Tokenizer:
    """Return a tokenizer whose tokens are single bytes, and the special token <end> with id 256."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: number for number, character in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken("<end>", special=True)])
    return tokenizer


def turn(role: Any, text: str, *, trained: bool = False) -> Turn:
    """Return a turn with the byte tokenizer's tokens. Token n of a model turn has log-prob -n."""
    ids = tuple(byte_tokenizer().encode(text).ids)
    logprobs = tuple(-float(place) for place in range(len(ids))) if role == "model" else None
    return Turn(role=role, token_ids=ids, text=text, logprobs=logprobs, trained=trained)


def solved() -> Trajectory:
    """Return the solved attempt at q1: two turns of the planner with a search each, and an answer."""
    planner = Conversation(
        role="planner",
        turns=(
            turn("context", "Question: In which city ...?"),
            turn("model", "<search> Who directed Snow? </search><end>", trained=True),
            turn("context", "Obs: Ada Crane directed Snow."),
            turn("model", "<search> Where was Ada Crane born? </search>", trained=True),
            turn("context", "Obs: Ada Crane was born in Oslo."),
            turn("model", "<answer> Oslo </answer>", trained=True),
        ),
    )
    workers = tuple(
        Conversation(
            role="worker",
            turns=(
                turn("context", search.query),
                turn("model", search.sentence, trained=True),
            ),
        )
        for search in (FIRST_SEARCH, SECOND_SEARCH)
    )
    return Trajectory(
        question_id="q1",
        attempt=0,
        policy_version=0,
        seed=7,
        conversations=(planner, *workers),
        answer="Oslo",
        reward=1.0,
        rewards_by_part={"f1": 0.75, "format": 0.25},
        counts={"malformed_searches": 0.0},
        stop_reason=StopReason.ANSWERED,
        searches=(FIRST_SEARCH, SECOND_SEARCH),
        seconds=2.0,
    )


def other_attempts() -> tuple[Trajectory, Trajectory]:
    """Return the two attempts at q2."""
    single = Conversation(
        role="planner", turns=(turn("context", "Question"), turn("model", "hm", trained=True))
    )
    failed = dataclasses.replace(
        solved(),
        question_id="q2",
        conversations=(single,),
        answer="",
        reward=0.0,
        rewards_by_part={},
        stop_reason=StopReason.NO_ACTION,
        searches=(FIRST_SEARCH,),
        seconds=3.0,
    )
    answered = dataclasses.replace(
        failed,
        attempt=1,
        answer="Ada Crane",
        reward=0.5,
        stop_reason=StopReason.ANSWERED,
        searches=(),
        seconds=1.0,
    )
    return failed, answered


def write_run(directory: Path, *, seed: int = 0) -> Store:
    """Write the run, and return its store."""
    config = dataclasses.replace(load_config("tiny_world"), name="little", seed=seed)
    store = open_run(directory, dataclasses.asdict(config))
    store.commit_folder(
        "tokenizer", lambda folder: byte_tokenizer().save(str(folder / "tokenizer.json")), {}
    )
    failed, answered = other_attempts()
    write_round(store, 1, [[solved(), failed], [answered]], kept=[solved()], threshold=0.6)
    write_evaluation(store, "warm-up", dataclasses.replace(solved(), question_id="q3"))
    write_phase(store, "warm-up", em=10.0)
    with MetricsLog(store.root) as log:
        log.write("warm-up/learn", 10, {"loss": 2.5, "tokens_per_second": 100.0})
        log.write("warm-up/learn", 20, {"loss": 1.5, "tokens_per_second": 200.0})
        log.write("time", 0, {"learning_seconds": 3.0, "other_seconds": 1.0, "total_seconds": 4.0})
        log.write("mygo", 1, {"k": 0.6, "acceptance": 0.25, "reward_p50": 0.5, "left_out": 2})
    return store


def write_round(
    store: Store,
    number: int,
    shard_rows: list[list[Trajectory]],
    *,
    kept: list[Trajectory],
    threshold: float | None = None,
) -> None:
    """Write a finished round with its questions."""
    entries = [store.write_shard(number, index, rows) for index, rows in enumerate(shard_rows)]
    ids = dict.fromkeys(row.question_id for rows in shard_rows for row in rows)
    folder = f"rounds/{number:04d}"
    store.create(f"{folder}/questions.jsonl", encode_questions(QUESTIONS[id] for id in ids))
    names = [[trajectory.question_id, trajectory.attempt] for trajectory in kept]
    store.write_json_once(f"{folder}/kept.json", {"kept": names})
    store.write_done(number, entries, mean_reward=0.5, threshold=threshold)


def write_evaluation(store: Store, name: str, trajectory: Trajectory) -> None:
    """Write the files of an evaluation with one question."""
    record = question_record(QUESTIONS[trajectory.question_id])
    prediction = {**record, "prediction": trajectory.answer, "em": 0.0, "f1": 0.0}
    store.write_json_once(f"eval/{name}.json", {"greedy": {"em": 0.0, "questions": 1}})
    store.create(f"eval/{name}.predictions.jsonl", (json.dumps(prediction) + "\n").encode())
    store.create(f"eval/{name}.parquet", shards.encode([trajectory]))


def write_phase(store: Store, name: str, *, em: float) -> None:
    """Write the row of the closing table of a phase."""
    row = {
        "name": name,
        "em": em,
        "f1": em + 5,
        "em_sampled": em - 5,
        "f1_sampled": None,
        "questions": 20,
        "left_out": 0,
        "trajectories": 40,
        "accepted": 8,
        "tokens": 1000,
        "searches": 1.5,
        "by_kind": {},
        "seconds": 90.0,
    }
    content = {"row": row, "forward_tokens": 0, "trained_slots": 0}
    store.write_json_once(f"phases/{name.replace(' ', '-')}.json", content)
