"""The decoder against transformers: the same weights give the same logits and gradients, in both
directions.
"""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mujica_jax.errors import UserError
from mujica_jax.models.attention import causal_self_attention
from mujica_jax.models.weights import load_checkpoint, save_checkpoint

torch = pytest.importorskip("torch")

TOKENS = np.random.default_rng(0).integers(0, 96, (2, 24))
SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,  # large, so that a wrong factor anywhere shows in the logits
}
SCALING = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
# Another value for every field of a config.json that has a say in the mathematics, with what has to
# go with it.
OTHER = {
    "architectures": {"architectures": ["GPT2LMHeadModel"]},
    "attention_bias": {"attention_bias": True},
    "head_dim": {"head_dim": 4},
    "hidden_act": {"hidden_act": "gelu"},
    "hidden_size": {"hidden_size": 64},
    "intermediate_size": {"intermediate_size": 64},
    "layer_types": {"layer_types": ["full_attention", "sliding_attention"]},
    "mlp_bias": {"mlp_bias": True},
    "model_type": {"model_type": "gpt2"},
    "num_attention_heads": {"num_attention_heads": 8},
    "num_hidden_layers": {"num_hidden_layers": 3},
    "num_key_value_heads": {"num_key_value_heads": 4},
    "rms_norm_eps": {"rms_norm_eps": 0.1},
    "rope_parameters": {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
    "tie_word_embeddings": {},  # the other one of two
    "use_sliding_window": {
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 0,
        "layer_types": None,
    },
    "vocab_size": {"vocab_size": 128},
}
# of a forward pass: limits, names of tokens, what only training or transformers itself reads
NO_MATHEMATICS = {
    "attention_dropout",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "initializer_range",
    "max_position_embeddings",
    "max_window_layers",  # with use_sliding_window only
    "pad_token_id",
    "pretraining_tp",
    "sliding_window",  # with use_sliding_window only
    "transformers_version",
    "use_cache",
}


def _config(case: str):
    import transformers

    if case.startswith("qwen2"):
        return transformers.Qwen2Config(
            **SIZES, tie_word_embeddings=case.endswith("tied"), rope_theta=1e6
        )
    if case == "qwen3":
        return transformers.Qwen3Config(
            **SIZES, head_dim=16, tie_word_embeddings=True, rms_norm_eps=1e-5
        )
    scaling = {"rope_scaling": dict(SCALING)} if case == "llama3_scaled" else {}
    return transformers.LlamaConfig(**SIZES, rope_theta=500.0, eos_token_id=[3, 4], **scaling)


@pytest.fixture(
    scope="module", params=["qwen2_tied", "qwen2_own_head", "qwen3", "llama3", "llama3_scaled"]
)
def reference(request, tmp_path_factory):
    """Return a random model of transformers, and the directory it was saved to."""
    import transformers

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        _config(request.param), dtype=torch.float32
    )
    with torch.no_grad():
        for (
            name,
            parameter,
        ) in (
            model.named_parameters()
        ):  # biases start at zero and norms at one: a swap would not show
            if name.endswith(".bias") or "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    directory = tmp_path_factory.mktemp(request.param) / "theirs"
    model.save_pretrained(directory)
    return model.eval(), directory


@nnx.jit
def _logits(decoder) -> jax.Array:
    tokens = jnp.asarray(TOKENS)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return decoder.logits(decoder(tokens, positions, causal_self_attention(jnp.ones_like(tokens))))


def test_logits_agree_after_import_and_after_export(reference, tmp_path):
    import transformers

    theirs, directory = reference
    ours = load_checkpoint(directory)
    expected = theirs(torch.asarray(TOKENS)).logits.detach().numpy()
    np.testing.assert_allclose(_logits(ours), expected, atol=1e-4)
    save_checkpoint(ours, tmp_path / "ours")
    exported_model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", dtype=torch.float32
    )
    np.testing.assert_allclose(
        exported_model(torch.asarray(TOKENS)).logits.detach().numpy(), expected, atol=1e-6
    )
    assert load_checkpoint(tmp_path / "ours").config == ours.config


def test_gradient_of_mean_nll_agrees(reference, tmp_path):
    theirs, directory = reference
    ours = load_checkpoint(directory)

    @nnx.jit
    @nnx.grad
    def gradient_of_mean_nll(decoder):
        log_probabilities = jax.nn.log_softmax(_logits(decoder)[:, :-1])
        return -jnp.take_along_axis(
            log_probabilities, jnp.asarray(TOKENS)[:, 1:, None], axis=-1
        ).mean()

    save_checkpoint(
        nnx.merge(nnx.graphdef(ours), gradient_of_mean_nll(ours)), tmp_path / "gradient"
    )
    theirs.zero_grad()
    theirs(torch.asarray(TOKENS), labels=torch.asarray(TOKENS)).loss.backward()
    from safetensors.numpy import load_file

    gradients = load_file(tmp_path / "gradient" / "model.safetensors")
    expected = {name: parameter.grad.numpy() for name, parameter in theirs.named_parameters()}
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        difference = np.linalg.norm(gradients[name] - gradient) / np.linalg.norm(gradient)
        assert difference < 1e-3, f"{name} differs by {difference:.1e}"


def test_a_sharded_checkpoint_of_transformers_is_read(reference, tmp_path):
    theirs, directory = reference
    theirs.save_pretrained(tmp_path / "sharded", max_shard_size="30KB")
    assert not (tmp_path / "sharded" / "model.safetensors").exists()
    np.testing.assert_array_equal(
        _logits(load_checkpoint(tmp_path / "sharded")), _logits(load_checkpoint(directory))
    )


def test_every_field_that_counts_changes_the_logits_or_is_refused(reference, tmp_path):
    _, directory = reference
    fields = json.loads((directory / "config.json").read_text())
    assert set(fields) <= set(OTHER) | NO_MATHEMATICS, "a field that nobody has thought about"
    expected = np.asarray(_logits(load_checkpoint(directory)))
    unnoticed = []
    for name in sorted(set(fields) & set(OTHER)):
        shutil.copytree(directory, tmp_path / name)
        changed = fields | (OTHER[name] or {name: not fields[name]})
        (tmp_path / name / "config.json").write_text(json.dumps(changed))
        try:
            logits = np.asarray(_logits(load_checkpoint(tmp_path / name)))
        except UserError:
            continue
        if np.abs(logits - expected).max() < 1e-3:
            unnoticed.append(name)
    assert unnoticed == []
