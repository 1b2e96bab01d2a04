"""Open the model that a run starts from: a checkpoint, or a model with random weights."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from mujica_jax.agents.mujica import contract_of
from mujica_jax.config.schema import Config
from mujica_jax.demonstrations.policy import sample_text
from mujica_jax.errors import UserError
from mujica_jax.models.decoder import Decoder
from mujica_jax.models.families import DecoderConfig
from mujica_jax.models.gguf import SMOLLM2, checkpoint_folder
from mujica_jax.models.hub import EXAMPLE, why_local
from mujica_jax.models.tokenizer import Tokenizer
from mujica_jax.models.weights import open_checkpoint
from mujica_jax.runtime import distributed
from mujica_jax.storage.manifest import COMMITTED
from mujica_jax.tasks.checks import from_scratch
from mujica_jax.tasks.task import Task
from mujica_jax.trajectories.store import Store

TOKENIZER = "tokenizer"
# The standard deviation of the random initial weights. The usual 0.02 suits hidden sizes in the
# thousands. At hidden size 64, a copying task was learnt three times slower with 0.02, and not at
# all with 0.125.
INITIALIZER_RANGE = 0.05
# How many times the words of prompts and scripts are repeated in the tokenizer's training text, so
# that each of them becomes one token.
SCRIPT_REPEATS = 200


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartingModel:
    """The model that a run starts from.

    Attributes:
        tokenizer: The model's tokenizer.
        decoder: The structure of the model, without its arrays.
        load: Loads the model and returns it with its arrays. Takes the mesh to shard them over, or
            None.
    """

    tokenizer: Tokenizer
    decoder: Decoder
    load: Callable[..., Decoder]


def open_model(directory_or_file: str | Path, dtype: str) -> StartingModel:
    """Open a Hugging Face checkpoint, by its folder or name, or a GGUF file.

    The model computes in `dtype`.

    Raises UserError if there is no such checkpoint, or if the tokenizer has token ids that the
    model does not embed.
    """
    directory = distributed.primary_first(
        "the checkpoint", lambda: checkpoint_folder(directory_or_file)
    )
    if not Path(directory).is_dir():
        raise UserError(
            f"there is no directory {directory}{why_local(directory_or_file)}: give the folder of "
            "a Hugging Face checkpoint, with config.json, tokenizer.json and *.safetensors, a name "
            f"such as {EXAMPLE}, a GGUF file, or {SMOLLM2}"
        )
    tokenizer = Tokenizer.load(directory)
    decoder, load = open_checkpoint(directory, dtype=dtype)
    if tokenizer.vocab_size > decoder.config.vocab_size:
        raise UserError(
            f"the tokenizer in {directory} has token ids up to {tokenizer.vocab_size - 1}, but the "
            f"model embeds only {decoder.config.vocab_size} tokens: take both from the same "
            "checkpoint"
        )
    return StartingModel(tokenizer=tokenizer, decoder=decoder, load=load)


def decoder_config(config: Config, vocab_size: int, stop_token_ids: Sequence[int]) -> DecoderConfig:
    """Return the configuration of a decoder that is trained from scratch."""
    model = config.model
    return DecoderConfig(
        family=model.family,
        vocab_size=vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        rope_theta=model.rope_theta,
        rope_scaling=None,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        max_position_embeddings=config.agent.max_trajectory_tokens,
        eos_token_ids=tuple(stop_token_ids),
        bos_token_id=None,
        initializer_range=INITIALIZER_RANGE,
    )


def new_model(config: Config, task: Task, store: Store) -> StartingModel:
    """Return the run's tokenizer and a decoder of the configured size with random weights."""
    tokenizer = distributed.primary_first(
        "the tokenizer", lambda: _trained_tokenizer(config, task, store)
    )
    size = decoder_config(config, tokenizer.vocab_size, tokenizer.stop_token_ids)

    def draw(mesh: Mesh | None) -> Decoder:
        # The trainer shards the arrays itself.
        del mesh
        return new_decoder(config, size)

    decoder = nnx.eval_shape(lambda: new_decoder(config, size))
    return StartingModel(tokenizer=tokenizer, decoder=decoder, load=draw)


def new_decoder(config: Config, size: DecoderConfig) -> Decoder:
    """Return a decoder with random weights, drawn with the run's seed."""
    decoder = Decoder(size, rngs=nnx.Rngs(config.seed), dtype=jnp.dtype(config.trainer.dtype))
    decoder.embedding[...] *= config.model.embedding_range / INITIALIZER_RANGE
    return decoder


def _trained_tokenizer(config: Config, task: Task, store: Store) -> Tokenizer:
    """Return the run's tokenizer. The first start of the run trains it and stores it.

    It is trained on the task's training text and on the words of our prompts and scripts.
    """
    if not store.exists(f"{TOKENIZER}/{COMMITTED}"):
        words = tuple(sample_text(config.agent.kind, contract_of(config.agent)))
        repeated_words = itertools.repeat(words, SCRIPT_REPEATS)
        texts = itertools.chain(from_scratch(task).tokenizer_text(), *repeated_words)
        tokenizer = Tokenizer.train(texts, config.model.vocab_tokens)
        store.commit_folder(TOKENIZER, tokenizer.save, {})
    return Tokenizer.load(store.folder(TOKENIZER))
