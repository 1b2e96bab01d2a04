"""Configurations of published models are read, written back unchanged, and refused where our
mathematics would differ.
"""

import math

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from mujica_jax.config.schema import TrainerConfig
from mujica_jax.errors import UserError
from mujica_jax.learning.optimizer import schedule
from mujica_jax.learning.packing import Batch
from mujica_jax.learning.trainer import Trainer
from mujica_jax.models.decoder import Decoder
from mujica_jax.models.families import Llama3RopeScaling, from_hugging_face, to_hugging_face

QWEN2_5_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "sliding_window": 131072,
    "use_sliding_window": False,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
}
QWEN3_8B = QWEN2_5_7B | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_bias": False,
    "rope_scaling": None,
}
QWEN3_4B = QWEN3_8B | {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
LLAMA3_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
LLAMA3_1_8B = QWEN2_5_7B | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "attention_bias": False,
    "mlp_bias": False,
    "rope_theta": 500000.0,
    "rope_scaling": LLAMA3_ROPE,
    "max_position_embeddings": 131072,
    "eos_token_id": [128001, 128008, 128009],
}
PUBLISHED = {
    "qwen2.5-7b": QWEN2_5_7B,
    "qwen3-4b": QWEN3_4B,
    "qwen3-8b": QWEN3_8B,
    "llama-3.1-8b": LLAMA3_1_8B,
}


@pytest.mark.parametrize(
    ("published", "parameters"),
    [
        (QWEN2_5_7B, 7_615_616_512),
        (QWEN3_4B, 4_022_468_096),
        (QWEN3_8B, 8_190_735_360),
        (LLAMA3_1_8B, 8_030_261_248),
    ],
)
def test_published_models_have_their_published_number_of_parameters(published, parameters):
    config = from_hugging_face(published)
    decoder = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(decoder))) == parameters


@pytest.mark.parametrize("published", [QWEN2_5_7B, QWEN3_8B, LLAMA3_1_8B])
def test_a_training_step_of_a_published_model_keeps_the_shapes_of_its_state(published):
    """No array is made: the state of Qwen2.5-7B alone takes 91 GB."""
    trainer = Trainer(
        from_hugging_face(published),
        TrainerConfig(sequence_length=256, batch_size=2, dtype="bfloat16"),
    )
    state = trainer.abstract_state()
    integers, mask = (jax.ShapeDtypeStruct((2, 256), dtype) for dtype in (jnp.int32, jnp.bool_))
    rate = schedule(peak=1.0, end_value=1.0, total_steps=1)
    after, metrics = jax.eval_shape(
        trainer._program.train_step, state, Batch(integers, integers, integers, mask), rate
    )
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)
    assert {value.shape for value in metrics.values()} == {()}


@pytest.mark.parametrize("published", [QWEN2_5_7B, QWEN3_8B, LLAMA3_1_8B])
def test_writing_and_reading_a_config_changes_nothing(published):
    config = from_hugging_face(published)
    assert from_hugging_face(to_hugging_face(config)) == config


def test_rotary_fields_are_read_in_both_layouts():
    old = from_hugging_face(LLAMA3_1_8B)
    nested = {k: v for k, v in LLAMA3_1_8B.items() if k not in ("rope_theta", "rope_scaling")}
    assert (
        from_hugging_face(nested | {"rope_parameters": LLAMA3_ROPE | {"rope_theta": 500000.0}})
        == old
    )
    assert old.rope_theta == 500000.0
    assert old.rope_scaling == Llama3RopeScaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    )
    plain = {k: v for k, v in QWEN2_5_7B.items() if k != "rope_theta"}
    assert from_hugging_face(plain).rope_theta == 10_000.0
    assert (
        from_hugging_face(
            plain | {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}
        ).rope_theta
        == 7.0
    )


def test_stop_tokens_may_be_absent_one_or_many():
    assert from_hugging_face(QWEN2_5_7B | {"eos_token_id": None}).eos_token_ids == ()
    assert from_hugging_face(QWEN2_5_7B).eos_token_ids == (151645,)
    assert from_hugging_face(LLAMA3_1_8B).eos_token_ids == (128001, 128008, 128009)


@pytest.mark.parametrize(
    ("base", "change", "named"),
    [
        (QWEN2_5_7B, {"model_type": "mistral"}, "mistral"),
        (
            QWEN2_5_7B,
            {"architectures": ["Qwen2ForSequenceClassification"]},
            "Qwen2ForSequenceClassification",
        ),
        (QWEN2_5_7B, {"hidden_act": "gelu"}, "hidden_act"),
        (QWEN2_5_7B, {"use_sliding_window": True, "max_window_layers": 20}, "sliding_attention"),
        (QWEN2_5_7B, {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        (QWEN2_5_7B, {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "yarn"),
        (QWEN2_5_7B, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "linear"),
        (QWEN2_5_7B, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (QWEN2_5_7B, {"quantization_config": {"bits": 4}}, "quantization_config"),
        (QWEN2_5_7B, {"num_key_value_heads": 5}, "num_kv_heads 5"),
        (QWEN2_5_7B, {"hidden_size": None}, "hidden_size"),
        (QWEN3_8B, {"attention_bias": True}, "attention_bias"),
        (LLAMA3_1_8B, {"attention_bias": True}, "attention_bias"),
        (LLAMA3_1_8B, {"mlp_bias": True}, "mlp_bias"),
        (
            LLAMA3_1_8B,
            {"rope_scaling": LLAMA3_ROPE | {"high_freq_factor": 1.0}},
            "high_freq_factor",
        ),
    ],
)
def test_other_mathematics_is_refused_by_name(base, change, named):
    with pytest.raises(UserError, match=named):
        from_hugging_face(base | change)


def test_what_changes_nothing_is_accepted():
    harmless = {
        "attention_dropout": 0.1,
        "use_cache": False,
        "use_sliding_window": True,
        "pretraining_tp": 2,
    }
    assert from_hugging_face(QWEN2_5_7B | harmless) == from_hugging_face(QWEN2_5_7B)
