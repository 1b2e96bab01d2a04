"""Checkpoints come back as they were written, and each way in which one can be wrong is named."""

import dataclasses
import json
import os
import re
import sys

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from mujica_jax.errors import UserError
from mujica_jax.models import weights
from mujica_jax.models.decoder import Decoder
from mujica_jax.models.families import from_hugging_face
from mujica_jax.models.weights import load_checkpoint, save_checkpoint
from tests.helpers.packed_rows import MODEL, tiny_decoder
from tests.helpers.tiny_models import filled_decoder
from tests.helpers.whole_runs import finished

CONFIG = from_hugging_face(
    {
        "model_type": "qwen3",
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "eos_token_id": [3, 5],
    }
)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return filled_decoder(CONFIG)


@pytest.fixture
def directory(decoder, tmp_path):
    save_checkpoint(decoder, tmp_path / "model")
    return tmp_path / "model"


def _rewrite(directory, change) -> None:
    """Apply `change` to the tensors of a checkpoint."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def _same(first: Decoder, second: Decoder) -> bool:
    pairs = zip(jax.tree.leaves(nnx.state(first)), jax.tree.leaves(nnx.state(second)), strict=True)
    return first.config == second.config and all((a == b).all() for a, b in pairs)


def test_a_checkpoint_comes_back_as_it_was(decoder, directory):
    assert _same(load_checkpoint(directory), decoder)
    assert sorted(p.name for p in directory.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    assert [p.name for p in directory.parent.iterdir()] == ["model"], (
        "no partial directory may stay behind"
    )


def test_a_large_checkpoint_is_split_and_comes_back(decoder, tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "MAX_FILE_BYTES", 3000)
    save_checkpoint(decoder, tmp_path / "split")
    assert len(list((tmp_path / "split").glob("model-*-of-*.safetensors"))) > 2
    assert _same(load_checkpoint(tmp_path / "split"), decoder)


def test_stop_tokens_of_the_generation_config_win(directory):
    (directory / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert load_checkpoint(directory).config.eos_token_ids == (7, 9)
    (directory / "generation_config.json").unlink()
    assert load_checkpoint(directory).config.eos_token_ids == (3, 5)


def test_a_half_written_checkpoint_is_never_seen(decoder, tmp_path, monkeypatch):
    def fail(*_arguments, **_options):
        raise OSError("disk full")

    monkeypatch.setattr(weights, "save_file", fail)
    with pytest.raises(OSError, match=r"disk full"):
        save_checkpoint(decoder, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_an_existing_checkpoint_is_not_overwritten(decoder, directory):
    with pytest.raises(UserError, match=r"exists and is not empty"):
        save_checkpoint(decoder, directory)


@pytest.mark.parametrize(
    ("name", "shape", "sentence"),
    [
        ("model.layers.0.mlp.experts.weight", (2, 2), ".* its config.json does not expect it"),
        ("model.layers.2.input_layernorm.weight", (16,), ".* its config.json does not expect it"),
        ("model.layers.0.self_attn.q_proj.bias", (16,), ".* its config.json does not expect it"),
        ("model.norm.weight", (15,), r".* shape \(15,\), .* \(16,\)"),
    ],
)
def test_a_tensor_that_is_not_expected_or_of_another_shape_is_refused(
    directory, name, shape, sentence
):
    _rewrite(directory, lambda tensors: tensors.update({name: np.ones(shape, np.float32)}))
    with pytest.raises(UserError, match=f"{name}{sentence}"):
        load_checkpoint(directory)


def test_a_tensor_set_twice_is_refused(directory):
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").rename(directory / "a.safetensors")
    save_file({"model.norm.weight": tensors["model.norm.weight"]}, directory / "b.safetensors")
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"model.norm.weight is set twice"):
        load_checkpoint(directory)


def test_a_missing_tensor_is_named(directory):
    _rewrite(directory, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(UserError, match=r"lacks the tensor model.layers.1.mlp.up_proj.weight"):
        load_checkpoint(directory)


def test_a_truncated_file_is_named(directory):
    os.truncate(directory / "model.safetensors", 3000)
    with pytest.raises(UserError, match=r"model.safetensors is truncated or damaged"):
        load_checkpoint(directory)


def test_a_file_that_the_index_names_must_exist(directory):
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors.index.json").write_text(
        '{"weight_map": {"x": "model-00001-of-00002.safetensors"}}'
    )
    with pytest.raises(
        UserError, match=r"model-00001-of-00002.safetensors is named by .* but is missing"
    ):
        load_checkpoint(directory)


def test_pickled_weights_are_refused(directory):
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model.bin.*convert them to safetensors"):
        load_checkpoint(directory)


def test_a_directory_without_checkpoint_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"config.json is missing"):
        load_checkpoint(tmp_path)


def test_a_second_copy_of_a_tied_embedding_is_ignored_and_another_head_is_not(decoder, directory):
    _rewrite(
        directory,
        lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"]}),
    )
    assert _same(load_checkpoint(directory), decoder)
    _rewrite(
        directory, lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"] + 1})
    )
    with pytest.raises(UserError, match=r"lm_head.weight, .* its config.json does not expect it"):
        load_checkpoint(directory)


def test_bfloat16_tensors_are_read_as_float32(decoder, directory):
    import ml_dtypes

    narrow = {}
    _rewrite(
        directory,
        lambda tensors: narrow.update(
            {n: v.astype(ml_dtypes.bfloat16) for n, v in tensors.items()}
        ),
    )
    save_file(narrow, directory / "model.safetensors")
    loaded = load_checkpoint(directory)
    assert loaded.embedding[...].dtype == np.float32
    np.testing.assert_allclose(loaded.embedding[...], decoder.embedding[...], rtol=1e-2)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_importing_peaks_below_1_3_times_the_weights(tmp_path):
    wide = dataclasses.replace(
        MODEL,
        vocab_size=100_000,
        hidden_size=384,
        intermediate_size=1536,
        num_layers=12,
        num_heads=6,
        head_dim=64,
    )
    save_checkpoint(tiny_decoder(wide), tmp_path / "model")
    measured = re.search(
        r"([\d.]+) MiB of weights, peak ([\d.]+) times",
        finished([sys.executable, "-m", "tests.helpers.import_memory", str(tmp_path / "model")]),
    )
    assert measured is not None
    assert float(measured[1]) > 200
    assert 1.0 <= float(measured[2]) < 1.3
