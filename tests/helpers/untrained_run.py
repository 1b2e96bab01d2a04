"""A run directory with a policy of random weights and a few trajectories, made without training."""

import dataclasses
from pathlib import Path

from mujica_jax.config.schema import Config
from mujica_jax.records import Conversation, Search, Turn
from mujica_jax.trajectories import shards
from mujica_jax.trajectories.store import Store, open_run
from tests.helpers import smoke_config
from tests.helpers.episodes import episode


def smoke() -> Config:
    return smoke_config.get_config()


def write_trajectories(folder: Path) -> Store:
    """Make a run directory with the configuration `smoke` and with trajectories of two phases."""
    store = open_run(folder, dataclasses.asdict(smoke()))
    turns = (
        Turn(role="context", token_ids=(1, 2), text="Who made Taxi!?"),
        Turn(role="model", token_ids=(3,), text="Roy Ruth", trained=True),
    )
    played = episode(
        Conversation(role="planner", turns=turns),
        question_id="q-1",
        answer="Roy Ruth",
        reward=0.5,
        searches=(Search(iteration=0, query="Who?", materials=("a", "b"), selected=(1,)),),
    )
    unanswered = episode(question_id="q-2")
    store.write_shard(0, 0, [unanswered])
    store.write_shard(1, 0, [played])
    store.write_shard(1, 1, [played, unanswered])
    store.create("eval/warm-up.parquet", shards.encode([unanswered]))
    store.create("eval/round-1.parquet", shards.encode([played]))
    return store


def write_run(folder: Path) -> Store:
    """Make a run directory with trajectories and with two policies of random weights."""
    # These imports start JAX, which tests of trajectories do not need.
    import jax
    from flax import nnx

    from mujica_jax.models.decoder import Decoder
    from mujica_jax.models.weights import save_checkpoint
    from mujica_jax.runs.model import decoder_config
    from tests.helpers.little_agent import tokenizer

    store = write_trajectories(folder)
    words = tokenizer()
    size = decoder_config(smoke(), words.vocab_size, words.stop_token_ids)
    decoder = nnx.jit(lambda: Decoder(size, rngs=nnx.Rngs(0)))()
    jax.block_until_ready(nnx.state(decoder))
    for version in (0, 1):
        store.commit_policy(
            version, lambda policy: save_checkpoint(decoder, policy / "model", tokenizer=words)
        )
    return store
