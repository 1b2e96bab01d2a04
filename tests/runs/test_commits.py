"""A run keeps the commits of its models."""

import pytest

from mujica_jax.models import hub
from mujica_jax.models.hub import model_folder
from mujica_jax.runs.commits import record_commits, recorded_commits, use_recorded_commits
from mujica_jax.storage.run_directory import RunDirectory
from tests.helpers.fake_hub import served_hub, use_hub

NAME = "someone/tiny@main"


@pytest.fixture
def fake(monkeypatch, tmp_path):
    with served_hub() as served:
        use_hub(monkeypatch, served.address, tmp_path / "cache")
        served.commit("someone/tiny", {"model.safetensors": b"first"})
        yield served


def test_a_resumed_run_uses_the_commit_of_its_start(fake, tmp_path):
    run = RunDirectory(tmp_path / "run")
    first = model_folder(NAME, setting="--init")
    record_commits(run)
    assert recorded_commits(run) == {NAME: first.name}

    # Another process starts after the branch has moved.
    fake.commit("someone/tiny", {"model.safetensors": b"second"})
    hub._used_commits.clear()
    use_recorded_commits(run)
    assert model_folder(NAME, setting="--init") == first


def test_a_new_run_uses_the_newest_commit(fake, tmp_path):
    second = fake.commit("someone/tiny", {"model.safetensors": b"second"})
    use_recorded_commits(RunDirectory(tmp_path / "run"))
    assert model_folder(NAME, setting="--init").name == second


def test_what_was_recorded_first_stays(fake, tmp_path, monkeypatch):
    run = RunDirectory(tmp_path / "run")
    run.write_json_once("models/someone--tiny@main.json", {"name": NAME, "commit": "a" * 40})
    model_folder(NAME, setting="--init")
    record_commits(run)
    assert recorded_commits(run) == {NAME: "a" * 40}


def test_a_commit_that_the_hub_lost_is_one_sentence(fake, tmp_path):
    run = RunDirectory(tmp_path / "run")
    run.write_json_once("models/someone--tiny@main.json", {"name": NAME, "commit": "a" * 40})
    use_recorded_commits(run)
    with pytest.raises(hub.UserError, match=f"someone/tiny has no revision {'a' * 40}"):
        model_folder(NAME, setting="--init")
