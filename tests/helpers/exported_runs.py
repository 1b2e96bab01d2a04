"""Run directories with a policy, made without training, to export them."""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from mujica_jax.config.schema import Config
from mujica_jax.models.adapters import (
    BaseModel,
    adapter_tensors,
    fingerprint,
    read_adapter,
    save_adapter,
    trained_adapters,
    with_trained_adapters,
)
from mujica_jax.models.decoder import Decoder
from mujica_jax.models.gguf import SMOLLM2, checkpoint_folder
from mujica_jax.models.lora import adapted, merged
from mujica_jax.models.tokenizer import Tokenizer
from mujica_jax.models.weights import load_checkpoint, save_checkpoint
from mujica_jax.trajectories.store import Store, open_run
from tests.helpers.packed_rows import MODEL
from tests.helpers.paths import ROOT
from tests.helpers.smoke_config import get_config
from tests.helpers.tiny_models import filled_decoder

RANK = 2
ALPHA = 4.0
SMOLLM2_ADAPTER = ROOT / "adapters" / "two_wiki_text_smollm2"
TEXTS = ["Who is the director of The Purple Shore?"]
SCORES = {
    "em": 50.0,
    "em_interval": [25.0, 75.0],
    "f1": 62.5,
    "f1_interval": [40.0, 80.25],
    "questions": 12,
}


def tokenizer_and_decoder() -> tuple[Tokenizer, Decoder]:
    """Return a tokenizer with a chat template, and a decoder with random weights for it."""
    tokenizer = Tokenizer.train(iter(TEXTS), 300)
    size = dataclasses.replace(
        MODEL,
        vocab_size=tokenizer.vocab_size,
        eos_token_ids=tuple(tokenizer.stop_token_ids),
        num_layers=2,
        # vLLM's attention on CPUs has no smaller heads.
        head_dim=32,
    )
    return tokenizer, filled_decoder(size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weights:
    """A policy, and the model that it was trained from. Without adapters both are the same."""

    tokenizer: Tokenizer
    base: Decoder
    policy: Decoder


def trained_run(folder: Path, *, init: str | None = None, rank: int = 0) -> Store:
    """Write a run with the policies 0 and 1. With a `rank` they have adapters too."""
    tokenizer, decoder = tokenizer_and_decoder()
    policy = with_random_adapter(decoder, rank) if rank else decoder
    weights = Weights(tokenizer=tokenizer, base=decoder, policy=policy)
    store = write_run(folder, config_with(init, rank=rank, alpha=ALPHA), weights, versions=(0, 1))
    add_scores(store, "warm-up", policy=0)
    add_scores(store, "round-1", policy=1, em=75.0)
    return store


def smollm2_run(folder: Path) -> Store:
    """Write a run whose policy 0 is SmolLM2 with the trained adapter in `adapters/`."""
    model = checkpoint_folder(SMOLLM2)
    base = load_checkpoint(model)
    adapter = read_adapter(base, SMOLLM2_ADAPTER)
    rank, alpha = adapter.rank_and_alpha()
    policy = adapted(base, rank=rank, alpha=alpha, key=jax.random.key(0))
    nnx.update(policy, with_trained_adapters(nnx.state(policy), adapter))
    weights = Weights(tokenizer=Tokenizer.load(model), base=base, policy=policy)
    store = write_run(folder, config_with(SMOLLM2, rank=rank, alpha=alpha), weights, versions=(0,))
    add_scores(store, "warm-up", policy=0)
    return store


def config_with(init: str | None, *, rank: int, alpha: float) -> Config:
    config = get_config()
    trainer = dataclasses.replace(config.trainer, lora_rank=rank, lora_alpha=alpha)
    return dataclasses.replace(config, init=init, trainer=trainer)


def write_run(folder: Path, config: Config, weights: Weights, *, versions: Iterable[int]) -> Store:
    """Write a run whose policies have these numbers and are all the same."""
    store = open_run(folder, dataclasses.asdict(config))
    rank = config.trainer.lora_rank

    def write(target: Path) -> None:
        plain = weights.policy
        if rank:
            plain = merged(plain, rank=rank, alpha=config.trainer.lora_alpha)
            write_adapter(target / "adapter", weights.base, weights.policy, config)
        save_checkpoint(plain, target / "model", tokenizer=weights.tokenizer)

    for version in versions:
        store.commit_policy(version, write)
    return store


def with_random_adapter(decoder: Decoder, rank: int) -> Decoder:
    """Return the decoder with adapters whose product is not zero."""
    result = adapted(decoder, rank=rank, alpha=ALPHA, key=jax.random.key(0))
    state = nnx.state(result, nnx.LoRAParam)
    numbers = jax.tree.map(lambda leaf: jax.random.normal(jax.random.key(1), leaf.shape) / 8, state)
    nnx.update(result, numbers)
    return result


def write_adapter(folder: Path, plain: Decoder, trained: Decoder, config: Config) -> None:
    tensors = adapter_tensors(plain, trained_adapters(nnx.state(trained)))
    base = BaseModel(fingerprint=fingerprint(plain), name=str(config.init))
    save_adapter(tensors, folder, alpha=config.trainer.lora_alpha, base=base)
    (folder / "config.json").write_text(json.dumps({"config": dataclasses.asdict(config)}))


def add_scores(store: Store, name: str, *, policy: int | None, **changes: Any) -> None:
    """Write the scores of an evaluation, which are not given for a run of an earlier release."""
    summary = {"greedy": SCORES | changes, "sampled": SCORES}
    if policy is not None:
        summary = {"policy": policy, **summary}
    store.write_json_once(f"eval/{name}.json", summary)
