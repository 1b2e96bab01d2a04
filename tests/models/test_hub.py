"""Names of the Hugging Face Hub: which ones are names, what is downloaded, and what is said if
nothing can be.

The Hub is `tests/helpers/fake_hub.py`, spoken to by huggingface_hub itself.
"""

import shutil

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError

from mujica_jax.errors import UserError
from mujica_jax.models import hub
from mujica_jax.models.hub import hub_name, model_folder, tokenizer_folder, why_local
from tests.helpers.fake_hub import TOKEN, served_hub, use_hub

NAME = "someone/tiny-1B"


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def fake(monkeypatch, cache):
    """A Hub with one model, which has weights in several forms."""
    with served_hub() as served:
        use_hub(monkeypatch, served.address, cache)
        served.commit(NAME, files_of_a_model())
        yield served


def files_of_a_model(weights: bytes = b"first") -> dict[str, bytes]:
    return {
        "config.json": b"{}",
        "tokenizer.json": b"{}",
        "chat_template.jinja": b"{{ messages }}",
        "model.safetensors": weights,
        "pytorch_model.bin": b"pickled",
        "original/consolidated.safetensors": b"for another program",
        "onnx/model.json": b"{}",
        "README.md": b"---\nlicense: mit\n---\n",
    }


def files_in(folder) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6B", "a/b.c_d", "owner/name@main", "o/n@refs/pr/1"])
def test_owner_and_model_are_a_name_of_the_hub(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert str(hub_name(name)) == name


@pytest.mark.parametrize(
    "name",
    ["./a/b", "../a", "/a/b", "~/models", "one", "a/b/c", "gs://bucket/x", "a b/c", "a/.hidden"],
)
def test_a_path_is_no_name_of_the_hub(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert hub_name(name) is None
    assert why_local(name) == ""


def test_a_local_folder_of_that_name_wins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen" / "Qwen3-0.6B").mkdir(parents=True)
    assert hub_name("Qwen/Qwen3-0.6B") is None


def test_a_name_below_a_local_folder_is_a_local_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    assert hub_name("runs/first") is None
    assert why_local("runs/first") == (
        " (the Hugging Face Hub is not asked, because there is a local runs)"
    )


def test_weights_tokenizer_and_template_are_downloaded_and_nothing_pickled(fake):
    folder = model_folder(NAME, setting="--init")
    assert files_in(folder) == {
        "config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "model.safetensors",
    }
    assert (folder / "model.safetensors").read_bytes() == b"first"


def test_the_commit_is_known_afterwards(fake):
    model_folder(NAME, setting="--init")
    commit = fake.branches[NAME]["main"]
    assert hub.used_commits() == {NAME: commit}
    assert hub.commit_of(NAME) == commit
    assert hub.commit_of("./local") is None


def test_a_tokenizer_needs_no_weights(fake):
    folder = tokenizer_folder(NAME, setting="--remote.tokenizer")
    assert "model.safetensors" not in files_in(folder)
    assert (model_folder(NAME, setting="--init") / "model.safetensors").exists()


def test_a_complete_copy_in_the_cache_is_used_without_asking(fake):
    folder = model_folder(NAME, setting="--init")
    fake.requests.clear()
    hub._used_commits.clear()
    fake.commit(NAME, files_of_a_model(b"second"))
    assert model_folder(NAME, setting="--init") == folder
    assert fake.requests == []


def test_a_branch_is_asked_for_again(fake):
    model_folder(f"{NAME}@main", setting="--init")
    hub._used_commits.clear()
    second = fake.commit(NAME, files_of_a_model(b"second"))
    folder = model_folder(f"{NAME}@main", setting="--init")
    assert folder.name == second
    assert (folder / "model.safetensors").read_bytes() == b"second"


def test_a_branch_does_not_move_within_a_program(fake):
    folder = model_folder(f"{NAME}@main", setting="--init")
    fake.commit(NAME, files_of_a_model(b"second"))
    assert model_folder(f"{NAME}@main", setting="--init") == folder


def test_a_commit_can_be_named(fake):
    first = fake.branches[NAME]["main"]
    fake.commit(NAME, files_of_a_model(b"second"))
    folder = model_folder(f"{NAME}@{first}", setting="--init")
    assert (folder / "model.safetensors").read_bytes() == b"first"


def test_a_required_commit_is_used_although_the_branch_has_moved(fake):
    first = fake.branches[NAME]["main"]
    fake.commit(NAME, files_of_a_model(b"second"))
    hub.use_commits({NAME: first})
    folder = model_folder(NAME, setting="--init")
    assert (folder / "model.safetensors").read_bytes() == b"first"


def test_a_copy_that_lacks_a_file_of_the_index_is_completed(fake, cache):
    parts = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    files = files_of_a_model()
    del files["model.safetensors"]
    files["model.safetensors.index.json"] = str(parts).replace("'", '"').encode()
    files |= {"model-1.safetensors": b"1", "model-2.safetensors": b"2"}
    fake.commit("someone/parts", files)
    folder = model_folder("someone/parts", setting="--init")
    (folder / "model-2.safetensors").unlink()
    # Earlier versions of huggingface_hub keep no list of the files of a commit.
    shutil.rmtree(folder.parent.parent / "trees", ignore_errors=True)
    assert (model_folder("someone/parts", setting="--init") / "model-2.safetensors").exists()


def test_the_cache_serves_a_branch_without_a_connection(fake, monkeypatch):
    folder = model_folder(f"{NAME}@main", setting="--init")
    hub._used_commits.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert model_folder(f"{NAME}@main", setting="--init") == folder


def test_offline_mode_without_a_copy_is_one_sentence(fake, cache, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError) as raised:
        model_folder(NAME, setting="--init")
    assert str(raised.value) == (
        f"--init is {NAME}, but there is no local folder of this name, and the model cannot be "
        f"downloaded (HF_HUB_OFFLINE is set, and {cache} has no complete copy): run `hf download "
        f"{NAME} --local-dir DIR` on a machine with a connection, and give its folder in place of "
        "the name"
    )
    assert fake.requests == []


def test_no_connection_is_one_sentence_with_the_address(monkeypatch, cache):
    use_hub(monkeypatch, "http://127.0.0.1:9", cache)
    with pytest.raises(UserError) as raised:
        model_folder(f"{NAME}@v1", setting="--checkpoint", otherwise=", or do without")
    assert str(raised.value) == (
        f"--checkpoint is {NAME}@v1, but there is no local folder of this name, and the model "
        "cannot be downloaded (http://127.0.0.1:9: [Errno 111] Connection refused): run `hf "
        f"download {NAME} --revision v1 --local-dir DIR` on a machine with a connection, and give "
        "its folder in place of the name, or do without"
    )


def test_an_unknown_model_is_one_sentence(fake):
    with pytest.raises(
        UserError,
        match=r"^--init is someone/else, but there is no local folder .* has no such model that",
    ):
        model_folder("someone/else", setting="--init")


def test_an_unknown_revision_is_one_sentence(fake):
    with pytest.raises(UserError, match=f"{NAME} has no revision v9 at the Hugging Face Hub"):
        model_folder(f"{NAME}@v9", setting="--init")


def test_an_unknown_commit_is_one_sentence(fake):
    with pytest.raises(UserError, match=f"{NAME} has no revision 0000"):
        model_folder(f"{NAME}@{'0' * 40}", setting="--init")


def test_a_gated_model_asks_for_its_licence(fake):
    fake.gated.add(NAME)
    with pytest.raises(
        UserError, match=f"accept its licence at {fake.address}/{NAME}, and set HF_TOKEN to a token"
    ):
        model_folder(NAME, setting="--init")


def test_a_gated_model_is_downloaded_with_a_token(fake, monkeypatch):
    fake.gated.add(NAME)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert (model_folder(NAME, setting="--init") / "model.safetensors").exists()


def test_a_model_without_safetensors_is_refused(fake):
    files = files_of_a_model()
    del files["model.safetensors"]
    del files["original/consolidated.safetensors"]
    fake.commit("someone/pickled", files)
    with pytest.raises(UserError, match=r"someone/pickled has no \*\.safetensors files"):
        model_folder("someone/pickled", setting="--init")


def test_a_full_disk_is_one_sentence(fake, monkeypatch, cache):
    def full(*_, local_files_only, **__):
        if local_files_only:
            raise LocalEntryNotFoundError("nothing is there")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    with pytest.raises(
        UserError, match=rf"cannot be written to {cache} \(No space left on device\): free some"
    ):
        model_folder(NAME, setting="--init")


def test_processes_with_other_commits_are_told(monkeypatch):
    monkeypatch.setattr(hub, "_used_commits", {NAME: "b" * 40})
    monkeypatch.setattr(hub.distributed, "broadcast", lambda name, decide: {NAME: "a" * 40})
    with pytest.raises(UserError, match=f"has commit b+ of {NAME}, but process 0 has commit a+"):
        hub.check_same_commits()
