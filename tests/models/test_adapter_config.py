"""Every field of PEFT's adapter_config.json: applied as PEFT's formula has it, or refused by
name.
"""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from mujica_jax.errors import UserError
from mujica_jax.models.adapters import read_adapter, with_adapter, with_trained_adapters
from mujica_jax.models.decoder import Decoder
from mujica_jax.models.layers import projections
from mujica_jax.models.lora import adapted
from tests.helpers.tiny_models import filled_decoder
from tests.models.test_lora import MODEL, logits

RANK = 4
ALPHA = 12
PROJECTIONS = {weight.hugging_face.removesuffix(".weight"): weight for weight in projections(MODEL)}
MODULES = [
    f"model.layers.{layer}.{name}" for layer in range(MODEL.num_layers) for name in PROJECTIONS
]
QUERY_AND_VALUE = [module for module in MODULES if module.endswith(("q_proj", "v_proj"))]
CONFIG = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": "some/base",
    "r": RANK,
    "lora_alpha": ALPHA,
    "target_modules": [name.rpartition(".")[2] for name in PROJECTIONS],
    # As PEFT writes the rest.
    "alpha_pattern": {},
    "auto_mapping": None,
    "bias": "none",
    "corda_config": None,
    "eva_config": None,
    "exclude_modules": None,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "layer_replication": None,
    "layers_pattern": None,
    "layers_to_transform": None,
    "loftq_config": {},
    "lora_bias": False,
    "lora_dropout": 0.05,
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "peft_version": "0.17.1",
    "qalora_group_size": 16,
    "rank_pattern": {},
    "revision": None,
    "target_parameters": None,
    "trainable_token_indices": None,
    "use_dora": False,
    "use_qalora": False,
    "use_rslora": False,
}


@pytest.fixture(scope="module")
def plain() -> Decoder:
    return filled_decoder(MODEL)


Matrices = dict[str, tuple[np.ndarray, np.ndarray]]


def matrices(modules: list[str], rank: Callable[[str], int] = lambda module: RANK) -> Matrices:
    """Return A and B of each module, as PEFT keeps them."""
    draw = np.random.default_rng(0)
    tensors: Matrices = {}
    for module in modules:
        inputs, outputs = PROJECTIONS[module.split(".", 3)[3]].sides
        a = draw.normal(size=(rank(module), inputs))
        b = draw.normal(size=(outputs, rank(module)))
        tensors[module] = a.astype(np.float32), b.astype(np.float32)
    return tensors


def written(folder: Path, of_modules: Matrices, **fields: object) -> Path:
    tensors = {}
    for module, (a, b) in of_modules.items():
        tensors[f"base_model.model.{module}.lora_A.weight"] = a
        tensors[f"base_model.model.{module}.lora_B.weight"] = b
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | fields))
    return folder


def check(
    plain: Decoder, folder: Path, of_modules: Matrices, scales: Mapping[str, float] | float
) -> None:
    """Check that every kernel is W + scale * B A, written out in numpy.

    A kernel without matrices is W.
    """
    merged = with_adapter(nnx.clone(plain), folder)
    for layer in range(MODEL.num_layers):
        for name, weight in PROJECTIONS.items():
            module = f"model.layers.{layer}.{name}"
            before = np.asarray(getattr(plain.layers, weight.name)[...][layer], np.float64)
            after = np.asarray(getattr(merged.layers, weight.name)[...][layer], np.float64)
            expected = before
            if module in of_modules:
                a, b = of_modules[module]
                scale = scales if isinstance(scales, int | float) else scales[module]
                expected = before + scale * (b.astype(np.float64) @ a).T.reshape(before.shape)
            np.testing.assert_allclose(after, expected, rtol=1e-5, atol=1e-5, err_msg=module)


def refused(decoder: Decoder, folder: Path) -> str:
    with pytest.raises(UserError) as error:
        with_adapter(nnx.clone(decoder), folder)
    return str(error.value)


def test_the_scale_is_alpha_by_rank(plain, tmp_path):
    tensors = matrices(MODULES)
    check(plain, written(tmp_path, tensors), tensors, ALPHA / RANK)


def test_the_scale_of_rank_stabilised_adapters_is_alpha_by_the_root_of_the_rank(plain, tmp_path):
    tensors = matrices(MODULES)
    check(plain, written(tmp_path, tensors, use_rslora=True), tensors, ALPHA / math.sqrt(RANK))


@pytest.mark.parametrize("stabilised", [False, True])
def test_patterns_give_modules_ranks_and_alphas_of_their_own(plain, tmp_path, stabilised):
    """A key fits the end of a module's name, behind a point. The first that fits counts."""
    ranks = {"model.layers.1.self_attn.q_proj": 2, "down_proj": 8, "q_proj": 1}
    alphas = {
        r"layers\.0\.self_attn\.(k|v)_proj": 5,
        "^model.layers.1.mlp.up_proj": 7.5,
        "roj": 1,
        "proj": 2,
    }

    def rank(module: str) -> int:
        if module == "model.layers.1.self_attn.q_proj":
            return 2
        return {"down_proj": 8, "q_proj": 1}.get(module.rpartition(".")[2], RANK)

    alpha = dict.fromkeys(MODULES, ALPHA)
    alpha |= {"model.layers.0.self_attn.k_proj": 5, "model.layers.0.self_attn.v_proj": 5}
    alpha |= {"model.layers.1.mlp.up_proj": 7.5}
    scales = {
        module: alpha[module] / (math.sqrt(rank(module)) if stabilised else rank(module))
        for module in MODULES
    }
    tensors = matrices(MODULES, rank)
    folder = written(
        tmp_path, tensors, rank_pattern=ranks, alpha_pattern=alphas, use_rslora=stabilised
    )
    check(plain, folder, tensors, scales)


@pytest.mark.parametrize(
    ("targets", "modules"),
    [
        (None, QUERY_AND_VALUE),
        (["q_proj", "v_proj"], QUERY_AND_VALUE),
        (["self_attn.q_proj", "v_proj", "lm_head_of_another_family"], QUERY_AND_VALUE),
        (["model.layers.1.mlp.up_proj"], ["model.layers.1.mlp.up_proj"]),
        (r".*\.self_attn\.(q|v)_proj", QUERY_AND_VALUE),
        (r"model\.layers\.0\..*proj", MODULES[:7]),
        ("all-linear", MODULES),
        ("All-Linear", MODULES),
    ],
)
def test_targets_are_names_their_ends_or_an_expression_for_whole_names(
    plain, tmp_path, targets, modules
):
    tensors = matrices(modules)
    check(plain, written(tmp_path, tensors, target_modules=targets), tensors, ALPHA / RANK)


@pytest.mark.parametrize(
    ("fields", "modules"),
    [
        (
            {"exclude_modules": ["mlp.up_proj", "k_proj"]},
            [m for m in MODULES if not m.endswith(("up_proj", "k_proj"))],
        ),
        ({"exclude_modules": r".*layers\.1.*", "target_modules": "all-linear"}, MODULES[:7]),
        ({"exclude_modules": []}, MODULES),
        ({"layers_to_transform": [1]}, MODULES[7:]),
        ({"layers_to_transform": 0}, MODULES[:7]),
        ({"layers_to_transform": []}, MODULES),
        ({"layers_to_transform": [1], "layers_pattern": "layers"}, MODULES[7:]),
        ({"layers_to_transform": [1], "layers_pattern": ["h", "layers"]}, MODULES[7:]),
    ],
)
def test_modules_and_layers_can_be_left_out(plain, tmp_path, fields, modules):
    tensors = matrices(modules)
    check(plain, written(tmp_path, tensors, **fields), tensors, ALPHA / RANK)


def test_matrices_in_bfloat16_are_read(plain, tmp_path):
    rounded = {
        module: (a.astype(ml_dtypes.bfloat16), b.astype(ml_dtypes.bfloat16))
        for module, (a, b) in matrices(MODULES).items()
    }
    folder = written(tmp_path, rounded)
    exact = {
        module: (a.astype(np.float32), b.astype(np.float32)) for module, (a, b) in rounded.items()
    }
    check(plain, folder, exact, ALPHA / RANK)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("peft_type", "LOHA"),
        ("peft_type", "ADALORA"),
        ("peft_type", None),
        ("use_dora", True),
        ("bias", "all"),
        ("bias", "lora_only"),
        ("fan_in_fan_out", True),
        ("modules_to_save", ["lm_head", "embed_tokens"]),
        ("lora_bias", True),
        ("layer_replication", [[0, 2]]),
        ("target_parameters", ["mlp.experts.gate_up_proj"]),
        ("trainable_token_indices", [1, 2]),
        ("alora_invocation_tokens", [3]),
        ("use_qalora", True),
        ("megatron_config", {"tensor_parallel": 2}),
        ("use_bdlora", {"nblocks": 2}),
        ("arrow_config", {"top_k": 3}),
        ("a_field_of_a_later_release", 0.5),
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "pissa_niter_16"),
        ("init_lora_weights", "olora"),
        ("init_lora_weights", "loftq"),
        ("init_lora_weights", "corda"),
        ("init_lora_weights", "mica"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(plain, tmp_path, field, value):
    message = refused(plain, written(tmp_path, matrices(MODULES), **{field: value}))
    assert message.startswith(f"{tmp_path / 'adapter_config.json'} sets {field} to {value!r}")


@pytest.mark.parametrize("value", [True, False, None, "gaussian", "eva", "orthogonal"])
def test_ways_to_begin_that_keep_the_base_are_no_matter(plain, tmp_path, value):
    tensors = matrices(MODULES)
    check(plain, written(tmp_path, tensors, init_lora_weights=value), tensors, ALPHA / RANK)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"r": 0}, "sets r to 0, which must be a whole number from 1"),
        ({"r": "4"}, "sets r to '4', which must be a whole number"),
        ({"r": 2.5}, "sets r to 2.5, which must be a whole number"),
        ({"r": True}, "sets r to True, which must be a whole number"),
        ({"lora_alpha": "big"}, "sets lora_alpha to 'big', which must be a finite number"),
        ({"lora_alpha": float("nan")}, "sets lora_alpha to nan, which must be a finite number"),
        ({"use_rslora": "yes"}, "sets use_rslora to 'yes', which must be true or false"),
        ({"rank_pattern": ["q_proj"]}, "sets rank_pattern to ['q_proj'], which must be an object"),
        (
            {"rank_pattern": {"q_proj": 0}},
            "sets rank_pattern of q_proj to 0, which must be a whole number",
        ),
        (
            {"alpha_pattern": {"q_proj": None}},
            "sets alpha_pattern of q_proj to None, which must be a finite number",
        ),
        (
            {"alpha_pattern": {"(q_proj": 3}},
            "has '(q_proj' in alpha_pattern, which is not a regular expression",
        ),
        (
            {"target_modules": "*.q_proj"},
            "has '*.q_proj' in target_modules, which is not a regular expression",
        ),
        (
            {"target_modules": {"q_proj": 1}},
            "sets target_modules to {'q_proj': 1}, which must be a string or a list of strings",
        ),
        ({"target_modules": [1]}, "sets target_modules to [1], which must be a string or a list"),
        ({"exclude_modules": "("}, "has '(' in exclude_modules, which is not a regular expression"),
        (
            {"layers_to_transform": "0"},
            "sets layers_to_transform to '0', which must be a list of the numbers of layers",
        ),
        (
            {"layers_to_transform": [True]},
            "sets layers_to_transform to [True], which must be a list of the numbers of layers",
        ),
        ({"layers_to_transform": [1], "layers_pattern": "["}, "has '[' in layers_pattern"),
        ({"layers_to_transform": [1], "target_modules": "all-linear"}, "PEFT does not allow"),
    ],
)
def test_a_field_with_a_wrong_value_is_one_sentence(plain, tmp_path, fields, message):
    assert message in refused(plain, written(tmp_path, matrices(MODULES), **fields))


@pytest.mark.parametrize(
    ("fields", "modules", "message"),
    [
        (
            {"target_modules": ["q_proj"]},
            QUERY_AND_VALUE,
            "v_proj.lora_A.weight, but adapter_config.json does not select",
        ),
        (
            {"layers_to_transform": [0]},
            MODULES,
            "layers.1.mlp.down_proj.lora_A.weight, but adapter_config.json does not",
        ),
        (
            {"target_modules": ["q_proj", "v_proj"]},
            QUERY_AND_VALUE[:-1],
            "has no tensor base_model.model.model.layers.1",
        ),
        (
            {"rank_pattern": {"q_proj": 8}},
            MODULES,
            "a tensor of 4 x 16 as base_model.model.model.layers.0.self_attn.q_proj",
        ),
        (
            {"target_modules": ["c_attn"]},
            [],
            "has target_modules ['c_attn'], which names no projection of this model's",
        ),
    ],
)
def test_matrices_and_configuration_must_fit_each_other(plain, tmp_path, fields, modules, message):
    tensors = matrices(modules)
    folder = written(tmp_path, tensors, **fields)
    if not tensors:
        save_file({}, folder / "adapter_model.safetensors")
    assert message in refused(plain, folder)


def test_a_matrix_for_the_output_layer_is_refused_by_name(plain, tmp_path):
    folder = written(tmp_path, {}, target_modules=["lm_head"])
    save_file(
        {"base_model.model.lm_head.lora_A.weight": np.zeros((4, 16), np.float32)},
        folder / "adapter_model.safetensors",
    )
    assert (
        "has a tensor base_model.model.lm_head.lora_A.weight, but no projection in the layers of this model"
        in refused(plain, folder)
    )


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 11421896\n"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("adapter_config.json", POINTER, "adapter_config.json is a Git LFS pointer"),
        ("adapter_config.json", '{"r": 4, ', "adapter_config.json is not JSON"),
        ("adapter_config.json", "[4]", "adapter_config.json holds no JSON object"),
        ("adapter_config.json", "", "adapter_config.json is not JSON"),
        ("adapter_model.safetensors", POINTER, "adapter_model.safetensors is a Git LFS pointer"),
        ("adapter_model.safetensors", "", "adapter_model.safetensors is truncated or damaged"),
        (
            "adapter_model.safetensors",
            None,
            "adapter_model.safetensors is missing: download the adapter again",
        ),
        ("adapter_config.json", None, "set --adapter to a folder such as RUN/policies/N/adapter"),
    ],
)
def test_a_damaged_file_is_named(plain, tmp_path, file, content, message):
    folder = written(tmp_path, matrices(MODULES))
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_text(content)
    assert message in refused(plain, folder)


def test_pickled_matrices_are_never_opened(plain, tmp_path):
    folder = written(tmp_path, matrices(MODULES))
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    assert "has its matrices pickled (adapter_model.bin)" in refused(plain, folder)


def test_training_goes_on_with_one_rank_and_one_scale(plain, tmp_path):
    tensors = matrices(QUERY_AND_VALUE)
    rank, alpha = read_adapter(
        plain, written(tmp_path, tensors, target_modules=None)
    ).rank_and_alpha()
    assert rank == RANK
    assert alpha == ALPHA
    rank, alpha = read_adapter(
        plain, written(tmp_path, tensors, target_modules=None, use_rslora=True)
    ).rank_and_alpha()
    assert rank == RANK
    assert alpha == pytest.approx(ALPHA * math.sqrt(RANK))
    mixed = written(tmp_path, tensors, target_modules=None, alpha_pattern={"q_proj": 1})
    with pytest.raises(
        UserError,
        match=r"rank 4 and scale 0\.25, rank 4 and scale 3, but training needs one",
    ):
        read_adapter(plain, mixed).rank_and_alpha()
    some_layers = written(tmp_path, matrices(MODULES[:7]), layers_to_transform=[0])
    with pytest.raises(UserError, match="rank 0 and scale 0, rank 4 and scale 3"):
        read_adapter(plain, some_layers).rank_and_alpha()


@pytest.mark.parametrize("stabilised", [False, True])
def test_training_begins_with_what_the_adapter_computes(plain, tmp_path, stabilised):
    """Kernels that the adapter does not correct begin with fresh adapters, which change nothing."""
    folder = written(
        tmp_path, matrices(QUERY_AND_VALUE), target_modules=None, use_rslora=stabilised
    )
    adapter = read_adapter(plain, folder)
    rank, alpha = adapter.rank_and_alpha()
    trained = adapted(plain, rank=rank, alpha=alpha, key=jax.random.key(0))
    nnx.update(trained, with_trained_adapters(nnx.state(trained), adapter))
    expected = logits(with_adapter(nnx.clone(plain), folder))
    np.testing.assert_allclose(logits(trained), expected, atol=1e-4 * np.abs(expected).max())
    assert np.abs(expected - logits(plain)).max() > 0.1
