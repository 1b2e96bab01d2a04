"""Adapter folders in PEFT's format: what is read is what was trained, and on another base
nothing.
"""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from mujica_jax.errors import UserError
from mujica_jax.models.adapters import (
    BaseModel,
    adapter_tensors,
    fingerprint,
    save_adapter,
    trained_adapters,
    with_adapter,
)
from mujica_jax.models.decoder import Decoder
from mujica_jax.models.lora import adapted
from tests.helpers.tiny_models import filled_decoder
from tests.models.test_lora import ALPHA, MODEL, RANK, filled, logits

HALF = 2e-3  # of float16, in logits of order 1


@pytest.fixture(scope="module")
def plain() -> Decoder:
    return filled_decoder(MODEL)


@pytest.fixture(scope="module")
def trained(plain) -> Decoder:
    return filled(adapted(plain, rank=RANK, alpha=ALPHA, key=jax.random.key(0)))


@pytest.fixture(scope="module")
def folder(plain, trained, tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("adapter")
    tensors = adapter_tensors(plain, trained_adapters(nnx.state(trained)))
    save_adapter(
        tensors, target, alpha=ALPHA, base=BaseModel(fingerprint=fingerprint(plain), name="base")
    )
    return target


def test_a_decoder_with_the_stored_adapter_is_the_trained_one(plain, trained, folder):
    read = with_adapter(nnx.clone(plain), folder)
    expected = logits(trained)
    assert np.abs(expected - logits(plain)).max() > 100 * HALF
    np.testing.assert_allclose(logits(read), expected, atol=HALF * np.abs(expected).max())


def test_the_files_are_those_of_peft(trained, folder):
    fields = json.loads((folder / "adapter_config.json").read_text())
    assert fields["peft_type"] == "LORA"
    assert fields["r"] == RANK
    assert fields["lora_alpha"] == ALPHA
    expected = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert fields["target_modules"] == expected
    tensors = load_file(folder / "adapter_model.safetensors")
    assert len(tensors) == 2 * 7 * MODEL.num_layers
    a = tensors["base_model.model.model.layers.1.self_attn.k_proj.lora_A.weight"]
    b = tensors["base_model.model.model.layers.1.self_attn.k_proj.lora_B.weight"]
    assert a.shape == (RANK, MODEL.hidden_size)
    assert b.shape == (
        MODEL.num_kv_heads * MODEL.head_dim,
        RANK,
    )
    np.testing.assert_array_equal(
        a.T, np.asarray(trained.layers.key_kernel_lora_a[1]).astype(np.float16)
    )
    np.testing.assert_array_equal(
        b.T, np.asarray(trained.layers.key_kernel_lora_b[1]).astype(np.float16)
    )


def test_an_adapter_of_another_base_is_refused(plain, folder):
    other = nnx.clone(plain)
    other.layers.up_kernel[...] = other.layers.up_kernel[...] + jnp.float32(1e-3)
    with pytest.raises(
        UserError,
        match=f"was trained on base .fingerprint {fingerprint(plain)}.*{fingerprint(other)}",
    ):
        with_adapter(other, folder)


def changed(folder: Path, target: Path, change, **fields) -> Path:
    tensors = load_file(folder / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, target / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text()) | fields
    (target / "adapter_config.json").write_text(json.dumps(config))
    return target


def refused(decoder: Decoder, folder: Path) -> str:
    with pytest.raises(UserError) as error:
        with_adapter(nnx.clone(decoder), folder)
    return str(error.value)


def test_an_adapter_without_a_fingerprint_is_judged_by_its_shapes(folder, tmp_path):
    assert isinstance(
        with_adapter(filled_decoder(MODEL), changed(folder, tmp_path, dict.items)), Decoder
    )
    foreign = changed(folder, tmp_path, dict.items, base_fingerprint=None)
    wider = filled_decoder(
        dataclasses.replace(MODEL, intermediate_size=2 * MODEL.intermediate_size)
    )
    assert "gate_proj.lora_B.weight, but the model needs" in refused(wider, foreign)
    flatter = filled_decoder(dataclasses.replace(MODEL, num_layers=1))
    assert "has a tensor base_model.model.model.layers.1" in refused(flatter, foreign)


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_numbers_that_are_not_finite_are_refused(plain, folder, tmp_path, number):
    name = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"

    def damage(tensors) -> None:
        tensors[name] = np.full_like(tensors[name], number)

    assert f"has numbers that are not finite in {name}" in refused(
        plain, changed(folder, tmp_path, damage)
    )


def test_missing_tensors_files_and_folders_are_named(plain, folder, tmp_path):
    name = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"
    assert f"has no tensor {name}" in refused(
        plain, changed(folder, tmp_path, lambda tensors: tensors.pop(name))
    )
    (tmp_path / "adapter_model.safetensors").write_bytes(b"cut")
    assert "is truncated or damaged" in refused(plain, tmp_path)
    message = refused(plain, tmp_path / "nothing")
    assert "there is no" in message
    assert message.endswith("set --adapter to a folder such as RUN/policies/N/adapter")
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "lacks r or lora_alpha" in refused(plain, tmp_path)
