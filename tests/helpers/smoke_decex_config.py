"""The smoke run by DecEx-RAG: over passages, with search trees, SFT and DPO in the place of MyGO's
rounds.
"""

import dataclasses

from mujica_jax.config.agents import DecexConfig
from mujica_jax.config.files import load_config
from mujica_jax.config.methods import DecexTreeConfig
from mujica_jax.config.schema import Config


def get_config() -> Config:
    smoke = load_config(__file__.replace("smoke_decex_config", "smoke_config"))
    return dataclasses.replace(
        smoke,
        name="smoke_decex",
        task=dataclasses.replace(smoke.task, environment="text", top_k=1, common_knowledge=0.6),
        model=dataclasses.replace(smoke.model, vocab_tokens=1536),
        agent=DecexConfig(
            prompt="brief",
            max_iterations=3,
            max_turn_tokens=160,
            max_trajectory_tokens=384,
            max_observation_tokens=96,
        ),
        trainer=dataclasses.replace(smoke.trainer, sequence_length=768, batch_size=2),
        method=DecexTreeConfig(
            branches=2,
            rollouts=2,
            min_reward=0.1,
            learning_rate=2e-3,
            end_learning_rate=2e-4,
            epochs=2,
            dpo_learning_rate=1e-4,
            dpo_epochs=2,
        ),
        eval=dataclasses.replace(smoke.eval, control=True),
    )
