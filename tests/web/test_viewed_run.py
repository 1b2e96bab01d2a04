"""A run as the viewer reads it."""

import httpx
import pytest

from mujica_jax.errors import StoreError
from mujica_jax.storage.run_directory import RunDirectory
from mujica_jax.web.app import create_app
from mujica_jax.web.viewed_run import ViewedRun
from tests.helpers.fake_bucket import use
from tests.helpers.served_app import app_served


@pytest.fixture
def run(run_directory):
    return ViewedRun("little", str(run_directory))


def test_a_run_is_finished_when_its_closing_table_is_there(run):
    assert not run.is_finished
    run.store.write_json_once("summary.json", {"phases": []})
    assert run.is_finished


def test_evaluations_stand_in_the_order_of_the_run(run, run_directory):
    for name in ("round-10", "control", "tiny_world-text-test", "round-2"):
        for suffix in ("json", "parquet"):
            (run_directory / "eval" / f"{name}.{suffix}").write_bytes(b"{}")
    titles = [entry.title for entry in run.sets().values() if entry.kind == "evaluation"]
    assert titles == [
        "evaluation after warm-up",
        "evaluation after control",
        "evaluation after round 2",
        "evaluation after round 10",
        "evaluation tiny_world-text-test",
    ]


def test_parts_of_an_evaluation_are_no_evaluation(run, run_directory):
    part = run_directory / "eval" / "parts" / "warm-up-greedy-0-of-2.parquet"
    part.parent.mkdir()
    part.write_bytes(b"")
    assert list(run.sets()) == ["round-1", "eval-warm-up"]


def test_a_folder_of_eval_is_shown_without_a_run(run_directory):
    folder = run_directory / "eval"
    shown = ViewedRun("eval", str(folder))
    assert list(shown.sets()) == ["eval-warm-up"]
    assert shown.settings == {}
    with app_served(create_app([str(folder)])) as address:
        rows = httpx.get(f"{address}/api/runs/eval/trajectories?set=eval-warm-up").json()["rows"]
        assert [row["question_id"] for row in rows] == ["q3"]
        detail = httpx.get(f"{address}/api/runs/eval/trajectories/eval-warm-up/0/0").json()
        assert (detail["answer"], detail["has_tokenizer"]) == ("Oslo", False)
        (report,) = httpx.get(f"{address}/api/report?run=eval").json()["runs"]
        assert report["phases"] == []


def test_a_shard_that_the_manifest_does_not_describe_is_refused(run, run_directory):
    """Another intact shard in its place has a checksum of its own that is right."""
    folder = run_directory / "rounds" / "0001"
    (folder / "shard-00000.parquet").write_bytes((folder / "shard-00001.parquet").read_bytes())
    with pytest.raises(StoreError, match=r"shard-00000\.parquet is damaged"):
        run.shard_bytes(run.sets()["round-1"].shards[0])


def test_a_run_without_a_tokenizer_has_none_yet(run, run_directory):
    (run_directory / "tokenizer" / "tokenizer.json").unlink()
    assert run.tokenizer() is None


def test_the_tokenizer_of_a_policy_is_used_where_the_run_made_none(run, run_directory):
    folder = run_directory / "policies" / "000000" / "model"
    folder.mkdir(parents=True)
    (run_directory / "tokenizer" / "tokenizer.json").rename(folder / "tokenizer.json")
    tokenizer = run.tokenizer()
    assert tokenizer is not None
    assert tokenizer.token_to_id("<end>") == 256


def test_a_run_in_a_bucket_is_shown(run_directory, monkeypatch):
    use(monkeypatch)
    copy_to_bucket(run_directory)
    with app_served(create_app(["gs://shown/runs/little"])) as address:
        answer = httpx.get(f"{address}/api/runs/little/trajectories?text=oslo").json()
        assert [row["question_id"] for row in answer["rows"]] == ["q1", "q3"]
        place = f"{address}/api/runs/little/trajectories/round-1/0/0"
        assert httpx.get(place).json()["answer"] == "Oslo"
        report = httpx.get(f"{address}/api/report?run=little").json()
        assert report["runs"][0]["phases"][0]["em"] == 10.0


def copy_to_bucket(directory):
    """Copy a run into the bucket."""
    target = RunDirectory("gs://shown/runs/little")
    for file in directory.rglob("*"):
        if file.is_file():
            target.create(str(file.relative_to(directory)), file.read_bytes())
