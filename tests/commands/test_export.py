"""The program `export`: exit statuses, and uploads to a Hub on this machine."""

from pathlib import Path

import pytest
from huggingface_hub import constants

from mujica_jax.commands.export import main
from tests.helpers.exported_runs import trained_run
from tests.helpers.fake_hub import TOKEN, served_hub, use_hub


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> str:
    return str(trained_run(tmp_path_factory.mktemp("runs") / "run").root)


@pytest.fixture
def fake(monkeypatch, tmp_path):
    with served_hub() as served:
        use_hub(monkeypatch, served.address, tmp_path / "cache")
        yield served


def test_an_export_says_what_it_wrote(run, tmp_path, capsys):
    folder = tmp_path / "out"
    assert main([run, "--to", str(folder)]) == 0
    assert capsys.readouterr().out == f"wrote the model of {run}, policy 1, into {folder}\n"
    assert (folder / "README.md").read_text().count("# out\n") == 1


def test_a_pushed_folder_is_at_the_hub(run, fake, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    folder = tmp_path / "out"
    assert main([run, "--to", str(folder), "--push", "someone/agent"]) == 0
    assert f"uploaded it to {fake.address}/someone/agent" in capsys.readouterr().out
    assert fake.files("someone/agent") == {
        path.name: path.read_bytes() for path in folder.iterdir()
    }
    assert "# someone/agent\n" in (folder / "README.md").read_text()
    assert fake.private == set()


def test_a_private_model_is_made_private(run, fake, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    arguments = [run, "--to", str(tmp_path / "out"), "--push", "someone/agent", "--private"]
    assert main(arguments) == 0
    assert fake.private == {"someone/agent"}


def test_a_push_without_a_token_is_one_sentence_and_writes_nothing(run, fake, tmp_path, capsys):
    assert main([run, "--to", str(tmp_path / "out"), "--push", "someone/agent"]) == 2
    assert capsys.readouterr().err == (
        f"error: --push is someone/agent, but there is no token for {fake.address}: set HF_TOKEN "
        "to a token that may write, or run `hf auth login`\n"
    )
    assert not (tmp_path / "out").exists()
    assert fake.requests == []


def test_a_push_in_offline_mode_is_one_sentence(run, fake, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert main([run, "--to", str(tmp_path / "out"), "--push", "someone/agent"]) == 2
    assert "HF_HUB_OFFLINE is set: unset it" in capsys.readouterr().err


def test_a_token_that_is_refused_is_one_sentence_and_the_folder_stays(
    run, fake, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("HF_TOKEN", "hf_of_somebody_else")
    assert main([run, "--to", str(tmp_path / "out"), "--push", "someone/agent"]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"error: the upload to someone/agent failed ({fake.address}: ")
    assert message.endswith(f"then run `hf upload someone/agent {tmp_path / 'out'}`\n")
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_a_push_without_a_connection_is_one_sentence(run, tmp_path, monkeypatch, capsys):
    use_hub(monkeypatch, "http://127.0.0.1:9", tmp_path / "cache")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert main([run, "--to", str(tmp_path / "out"), "--push", "someone/agent"]) == 2
    assert "the upload to someone/agent failed (http://127.0.0.1:9: " in capsys.readouterr().err


@pytest.mark.parametrize("name", ["agent", "someone/agent@main", "a/b/c"])
def test_a_malformed_name_is_refused(run, tmp_path, capsys, name):
    assert main([run, "--to", str(tmp_path / "out"), "--push", name]) == 2
    assert "is not the name of a model at the Hugging Face Hub: write" in capsys.readouterr().err


def test_private_needs_push(run, tmp_path, capsys):
    assert main([run, "--to", str(tmp_path / "out"), "--private"]) == 2
    assert "--private is given without --push" in capsys.readouterr().err


def test_a_bucket_is_no_place_for_an_export(run, capsys):
    assert main([run, "--to", "gs://bucket/export"]) == 2
    assert "--to is gs://bucket/export, but an export is a local folder" in capsys.readouterr().err


def test_the_working_folder_can_be_the_export(run, tmp_path, monkeypatch):
    (tmp_path / "agent").mkdir()
    monkeypatch.chdir(tmp_path / "agent")
    assert main([run, "--to", "."]) == 0
    assert Path("README.md").exists(), "the folder itself is not replaced"
    assert "# agent\n" in (tmp_path / "agent" / "README.md").read_text()


def test_adapter_and_merge_exclude_each_other(run, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([run, "--to", str(tmp_path / "out"), "--adapter", "--merge"])
    assert "--merge: not allowed with argument --adapter" in capsys.readouterr().err
