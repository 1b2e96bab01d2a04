"""A tiny decoder and made-up conversations, for the tests of packing, losses and training."""

import numpy as np
from flax import nnx

from mujica_jax.config.schema import TrainerConfig
from mujica_jax.learning.optimizer import schedule
from mujica_jax.models.decoder import Decoder
from mujica_jax.models.families import DecoderConfig
from mujica_jax.records import Conversation, Turn

MODEL = DecoderConfig(
    family="qwen3",
    vocab_size=48,
    hidden_size=16,
    intermediate_size=24,
    num_layers=1,
    num_heads=2,
    num_kv_heads=2,
    head_dim=8,
    rope_theta=100.0,
    rope_scaling=None,
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
    max_position_embeddings=2048,  # room for the conversations of whole runs
    eos_token_ids=(0,),
    bos_token_id=None,
    initializer_range=0.2,
)
TRAINER = TrainerConfig(sequence_length=32, batch_size=8)
SHORT_SCHEDULE = schedule(peak=1e-2, end_value=1e-3, total_steps=3)


def conversation(*turns: tuple[int, ...], trained: tuple[bool, ...] | None = None) -> Conversation:
    """Return a conversation of these turns, which alternate between context and model.

    By default the model's turns are trained.
    """
    trained = tuple(index % 2 == 1 for index in range(len(turns))) if trained is None else trained
    return Conversation(
        role="worker",
        turns=tuple(
            Turn(
                role="model" if is_trained else "context",
                token_ids=ids,
                text="",
                trained=is_trained,
            )
            for ids, is_trained in zip(turns, trained, strict=True)
        ),
    )


def random_conversations(count: int, seed: int = 0, longest: int = 30) -> list[Conversation]:
    """Return conversations of four turns, each of one token to a quarter of `longest` tokens."""
    random = np.random.default_rng(seed)

    def turn() -> tuple[int, ...]:
        return tuple(
            random.integers(0, MODEL.vocab_size, random.integers(1, longest // 4 + 1)).tolist()
        )

    return [conversation(turn(), turn(), turn(), turn()) for _ in range(count)]


def tiny_decoder(config: DecoderConfig = MODEL, seed: int = 0) -> Decoder:
    """Return a decoder drawn in one compiled program: op by op it would take seconds."""
    return nnx.jit(lambda: Decoder(config, rngs=nnx.Rngs(seed)))()
