"""Policies that are named by a model of the Hugging Face Hub."""

import dataclasses
import json

import pytest

from mujica_jax.commands.eval import command_line, find_checkpoint
from mujica_jax.errors import UserError
from mujica_jax.models import hub
from mujica_jax.models.hub import model_folder
from mujica_jax.runs.policies import find_policy
from mujica_jax.trajectories.store import Store
from tests.helpers.fake_hub import served_hub, use_hub
from tests.helpers.smoke_config import get_config

NAME = "someone/tiny"


def write_run(folder) -> None:
    """Write the configuration that a run leaves in its folder and in those of its adapters."""
    folder.mkdir()
    stored = {"config": dataclasses.asdict(get_config())}
    (folder / "config.json").write_text(json.dumps(stored))


@pytest.fixture
def fake(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with served_hub() as served:
        use_hub(monkeypatch, served.address, tmp_path / "cache")
        served.commit(NAME, {"model.safetensors": b"first", "config.json": b"{}"})
        yield served


def test_a_model_of_the_hub_is_a_policy_with_its_commit(fake):
    policy = find_policy(NAME, policy=None, adapter=None)
    commit = fake.branches[NAME]["main"]
    assert policy.name == NAME
    assert policy.place == f"{NAME}@{commit}"
    assert (policy.model / "model.safetensors").read_bytes() == b"first"
    assert policy.run is None


def test_an_adapter_of_the_hub_is_added_to_a_model(fake):
    files = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"a"}
    fake.commit("someone/adapter", files)
    policy = find_policy(NAME, policy=None, adapter="someone/adapter")
    assert policy.adapter is not None
    assert (policy.adapter / "adapter_model.safetensors").read_bytes() == b"a"


def test_an_adapter_is_no_checkpoint(fake):
    files = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"a"}
    fake.commit("someone/adapter", files)
    with pytest.raises(UserError, match="is an adapter: use --adapter"):
        find_policy("someone/adapter", policy=None, adapter=None)


def test_the_setting_with_the_name_is_in_the_message(fake):
    with pytest.raises(UserError, match=r"^--worker is someone/else, but there is no local folder"):
        find_policy("someone/else", policy=None, adapter=None, setting="--worker")


def test_a_worker_of_the_hub_is_found_by_its_name(fake, tmp_path):
    write_run(tmp_path / "run")
    options, _ = command_line(["--checkpoint", "run", "--worker", NAME])
    worker = find_checkpoint(dataclasses.replace(options, checkpoint=options.worker), "--worker")
    assert worker.about()["checkpoint"] == f"{NAME}@{fake.branches[NAME]['main']}"


def test_an_adapter_of_the_hub_brings_the_configuration_of_its_run(fake, tmp_path):
    write_run(tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter" / "adapter_model.safetensors").write_bytes(b"a")
    fake.add("someone/adapter", tmp_path / "adapter")
    _, config = command_line(["--init", NAME, "--adapter", "someone/adapter"])
    assert config.name == "smoke"


def test_a_model_without_a_configuration_asks_for_one(fake):
    with pytest.raises(
        UserError, match=f"^--checkpoint is {NAME}, a model of the Hugging Face Hub"
    ):
        command_line(["--checkpoint", NAME])
    assert fake.requests == [], "the model is not downloaded before"


def test_a_missing_path_below_a_local_folder_says_why_the_hub_is_not_asked(fake, tmp_path):
    (tmp_path / "runs").mkdir()
    with pytest.raises(
        UserError,
        match=r"^there is no directory runs/frist \(the Hugging Face Hub is not asked, because",
    ):
        find_policy("runs/frist", policy=None, adapter=None)
    assert fake.requests == []


def test_an_evaluation_of_a_run_uses_the_commits_of_the_run(fake, tmp_path):
    first = fake.branches[NAME]["main"]
    write_run(tmp_path / "run")
    store = Store(tmp_path / "run")
    store.write_json_once("models/x.json", {"name": f"{NAME}@main", "commit": first})
    store.commit_policy(0, lambda folder: (folder / "model").mkdir())
    fake.commit(NAME, {"model.safetensors": b"second"})
    find_policy(str(tmp_path / "run"), policy=None, adapter=None)
    assert model_folder(f"{NAME}@main", setting="--embedder").name == first
    assert hub.used_commits() == {f"{NAME}@main": first}
