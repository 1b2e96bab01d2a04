"""The routes of trajectories, on the run of `tests/helpers/viewed_runs.py`."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from mujica_jax.trajectories.store import Store
from tests.helpers.viewed_runs import other_attempts, solved, write_round

LIST = "/api/runs/little/trajectories"
# Places of the rows of round 1 in the list of the whole run, as "set/shard/row".
SOLVED = "round-1/0/0"
FAILED = "round-1/0/1"
ANSWERED = "round-1/1/0"
EVALUATED = "eval-warm-up/0/0"


def places(client, query=""):
    content = client.get(f"{LIST}?{query}").raise_for_status().json()
    return [f"{row['set']}/{row['shard']}/{row['row']}" for row in content["rows"]]


def test_the_runs_are_listed_with_their_rounds_and_evaluations(client):
    (run,) = client.get("/api/runs").json()["runs"]
    assert run["name"] == "little"
    assert run["method"] == "mygo"
    assert run["task"] == "tiny_world"
    assert not run["is_finished"]
    assert [(entry["id"], entry["title"]) for entry in run["sets"]] == [
        ("round-1", "round 1"),
        ("eval-warm-up", "evaluation after warm-up"),
    ]


def test_a_list_has_every_row_once_with_its_question(client):
    content = client.get(LIST).json()
    assert content["all"] == content["matching"] == 4
    assert places(client) == [SOLVED, FAILED, ANSWERED, EVALUATED]
    first = content["rows"][0]
    assert first["question"] == "In which city was the director of Snow born?"
    assert first["kind"] == "compositional"
    assert first["reward"] == 1.0
    assert first["search_count"] == 2


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("kept=true", [SOLVED]),
        ("kept=false", [FAILED, ANSWERED]),
        ("reward_min=0.5", [SOLVED, ANSWERED, EVALUATED]),
        ("reward_max=0.5", [FAILED, ANSWERED]),
        ("reward_min=0.1&reward_max=0.9", [ANSWERED]),
        ("stop_reason=no_action", [FAILED]),
        ("stop_reason=no_action&stop_reason=answered&set=round-1", [SOLVED, FAILED, ANSWERED]),
        ("kind=comparison", [FAILED, ANSWERED]),
        ("searches_min=1&searches_max=1", [FAILED]),
        ("text=oslo", [SOLVED, EVALUATED]),
        ("text=WHO+DIRECTED", [FAILED, ANSWERED]),
        ("text=q3", [EVALUATED]),
        ("text=.*", []),
        ("question=q2", [FAILED, ANSWERED]),
        ("set=eval-warm-up", [EVALUATED]),
        ("set=eval-warm-up&set=round-1&kept=true", [SOLVED]),
    ],
)
def test_a_filter_keeps_the_rows_that_fit(client, query, expected):
    assert places(client, query) == expected


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("sort=reward&set=round-1", [FAILED, ANSWERED, SOLVED]),
        ("sort=reward&descending=true&set=round-1", [SOLVED, ANSWERED, FAILED]),
        ("sort=seconds&set=round-1", [ANSWERED, SOLVED, FAILED]),
        ("sort=question&set=round-1", [SOLVED, FAILED, ANSWERED]),
        ("descending=true", [EVALUATED, ANSWERED, FAILED, SOLVED]),
    ],
)
def test_a_list_is_sorted(client, query, expected):
    assert places(client, query) == expected


def test_a_page_is_a_part_of_the_list(client):
    assert places(client, "offset=1&limit=2") == [FAILED, ANSWERED]
    assert places(client, "descending=true&offset=3&limit=2") == [SOLVED]
    assert places(client, "offset=4") == []
    assert client.get(f"{LIST}?offset=1&limit=2").json()["matching"] == 4


def test_choices_are_counted_over_all_rows(client):
    choices = client.get(f"{LIST}?reward_min=2").json()["choices"]
    assert choices["stop_reasons"] == [
        {"value": "answered", "count": 3},
        {"value": "no_action", "count": 1},
    ]
    assert choices["kinds"] == [
        {"value": "comparison", "count": 2},
        {"value": "compositional", "count": 2},
    ]
    assert choices["kept"] == [{"value": False, "count": 2}, {"value": True, "count": 1}]
    assert choices["reward"] == [0.0, 1.0]
    assert choices["search_count"] == [0, 2]


@pytest.mark.parametrize(
    ("path", "status", "sentence"),
    [
        ("/api/runs/litle/trajectories", 404, "unknown run 'litle'; did you mean little?"),
        (
            f"{LIST}?set=round-2",
            404,
            "run little has no round or evaluation 'round-2'; did you mean round-1?",
        ),
        (
            f"{LIST}/round-1/2/0",
            404,
            "round-1 of run little has 2 shards, and no shard 2; count from 0",
        ),
        (
            f"{LIST}/round-1/0/2",
            404,
            "shard 0 of round-1 has 2 trajectories, and no number 2; count from 0",
        ),
        (
            f"{LIST}/round-1/0/-1",
            404,
            "shard 0 of round-1 has 2 trajectories, and no number -1; count from 0",
        ),
        (f"{LIST}?sort=rewards", 400, "unknown sort 'rewards'; did you mean reward?"),
    ],
)
def test_an_unknown_name_is_answered_with_a_sentence(client, path, status, sentence):
    answer = client.get(path)
    assert answer.status_code == status
    assert answer.json() == {"error": sentence}


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=501", "offset=-1", "rewardmin=1", "reward_min=x"]
)
def test_a_wrong_parameter_is_named(client, query):
    answer = client.get(f"{LIST}?{query}")
    assert answer.status_code == 422
    assert answer.json()["error"].startswith(query.partition("=")[0])


@pytest.mark.parametrize("name", ["..", "..%2F..", "%2Fetc", "little%2F..%2Flittle"])
def test_a_name_is_never_a_path(client, name):
    assert client.get(f"/api/runs/{name}/trajectories").status_code == 404
    assert client.get(f"{LIST}/{name}/0/0").status_code == 404


def test_a_trajectory_has_its_facts(client):
    content = client.get(f"{LIST}/{SOLVED}").json()
    assert content["question"] == "In which city was the director of Snow born?"
    assert content["answers"] == ["Oslo", "Kristiania"]
    assert content["answer"] == "Oslo"
    assert content["kept"] is True
    assert content["threshold"] == 0.6
    assert content["rewards_by_part"] == {"f1": 0.75, "format": 0.25}
    assert client.get(f"{LIST}/{ANSWERED}").json()["kept"] is False
    assert client.get(f"{LIST}/{EVALUATED}").json()["kept"] is None


def test_a_damaged_shard_is_named_and_the_others_are_listed(client, run_directory):
    assert len(places(client)) == 4
    shard = run_directory / "rounds" / "0001" / "shard-00000.parquet"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    content = client.get(LIST).json()
    assert places(client) == [ANSWERED, EVALUATED]
    (damage,) = content["damaged"]
    assert damage["name"] == "rounds/0001/shard-00000.parquet"
    assert "is damaged" in damage["reason"]
    answer = client.get(f"{LIST}/{SOLVED}")
    assert answer.status_code == 409
    assert "rounds/0001/shard-00000.parquet is damaged" in answer.json()["error"]


def test_a_missing_shard_and_a_cut_evaluation_are_named(client, run_directory):
    (run_directory / "rounds" / "0001" / "shard-00001.parquet").unlink()
    evaluation = run_directory / "eval" / "warm-up.parquet"
    evaluation.write_bytes(evaluation.read_bytes()[:100])
    content = client.get(LIST).json()
    assert [damage["name"] for damage in content["damaged"]] == [
        "rounds/0001/shard-00001.parquet",
        "eval/warm-up.parquet",
    ]
    assert places(client) == [SOLVED, FAILED]


def test_a_damaged_manifest_is_named_and_the_others_are_listed(client, run_directory):
    (run_directory / "rounds" / "0001" / "DONE.json").write_text('{"round_number": 1')
    content = client.get(LIST).json()
    assert places(client) == [EVALUATED]
    assert "DONE.json is not JSON" in content["damaged"][0]["reason"]


def test_a_shard_of_a_later_schema_is_named(client, run_directory):
    table = pyarrow.parquet.read_table(run_directory / "eval" / "warm-up.parquet")
    table = table.replace_schema_metadata({"schema_version": "99"})
    other = run_directory / "eval" / "other.parquet"
    pyarrow.parquet.write_table(table, other)
    (run_directory / "eval" / "other.json").write_text("{}")
    (damage,) = client.get(LIST).json()["damaged"]
    assert damage["name"] == "eval/other.parquet"


def test_a_round_without_a_manifest_is_counted_and_not_shown(client, run_directory):
    store = Store(run_directory)
    store.write_shard(2, 0, [solved()])
    (run_directory / "rounds" / "0002" / "shard-00001.parquet").write_bytes(b"PAR1 half writ")
    content = client.get(LIST).json()
    assert content["all"] == 4
    assert content["damaged"] == []
    assert content["open_rounds"] == [{"title": "round 2", "shards": 2}]


def test_an_evaluation_without_its_scores_is_not_shown(client, run_directory):
    (run_directory / "eval" / "warm-up.json").unlink()
    assert places(client, "set=round-1") == places(client)


def test_a_new_round_joins_the_list(client, run_directory):
    assert len(places(client)) == 4
    write_round(Store(run_directory), 2, [list(other_attempts())], kept=[])
    assert places(client, "set=round-2") == ["round-2/0/0", "round-2/0/1"]
    assert places(client, "set=round-2&kept=false") == ["round-2/0/0", "round-2/0/1"]


def test_a_round_whose_selection_is_not_recorded_yet_is_shown_without_it(client, run_directory):
    for name in ("kept.json", "questions.jsonl"):
        (run_directory / "rounds" / "0001" / name).unlink()
    rows = client.get(f"{LIST}?set=round-1").json()["rows"]
    assert [(row["kept"], row["question"], row["kind"]) for row in rows] == [(None, None, None)] * 3
    content = client.get(f"{LIST}/{SOLVED}").json()
    assert content["question"] is None
    assert content["question_id"] == "q1"


def test_a_damaged_file_of_questions_is_named_and_its_rows_are_listed(client, run_directory):
    (run_directory / "rounds" / "0001" / "questions.jsonl").write_text("{not JSON\n")
    content = client.get(f"{LIST}?set=round-1").json()
    assert len(content["rows"]) == 3
    assert content["damaged"][0]["name"] == "rounds/0001/questions.jsonl"
    assert client.get(f"{LIST}/{SOLVED}").json()["question_id"] == "q1"


def test_kinds_of_questions_without_a_name_are_listed(client, run_directory):
    path = run_directory / "rounds" / "0001" / "questions.jsonl"
    record = {"id": "q1", "kind": "", "question": "?", "answers": [], "gold_passages": []}
    path.write_text(json.dumps(record) + "\n")
    assert client.get(f"{LIST}?set=round-1").json()["choices"]["kinds"] == [
        {"value": "", "count": 1}
    ]
