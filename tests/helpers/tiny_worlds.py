"""Tiny worlds that are built in a moment."""

import dataclasses

from mujica_jax.config.schema import TinyWorldConfig
from mujica_jax.tasks.tiny_world.world import TinyWorld, build


def small_world(
    train: int, demonstrations: int, held_out: int, *, facts: int, **changes
) -> TinyWorld:
    """Return a world with this many questions to train on, demonstrations, questions of each
    held-out split, and facts an entity.
    """
    config = TinyWorldConfig(
        train_questions=train,
        demonstrations=demonstrations,
        facts_per_entity=facts,
        dev_questions=held_out,
        test_questions=held_out,
        distractor_names=0.0,
    )
    return build(dataclasses.replace(config, **changes))
