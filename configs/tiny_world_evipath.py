"""The tiny world with EviPath: a small language model teaches itself from answers and evidence.

    python -m mujica_jax.train configs/tiny_world_evipath.py

The warm-up stands in for a language model that follows prompts. It shows the agent's own prompts
(EviPath's tags) and those of the teacher. Then the warmed-up policy is the teacher: told answer and
evidence, it writes trajectories, and the right ones are learnt.

`--method.mode deductive` has the same warm-up and therefore the same teacher, which is told
neither; `--method.trajectories N` gives both modes the same number of right trajectories (the
paper's table 4).

`--method.teacher scripted` has no language model as teacher: the script replays the demonstrations
of the warm-up for all questions, without mistakes.
"""

import dataclasses

from mujica_jax.config.files import load_config
from mujica_jax.config.schema import Config, EviPathConfig, MujicaConfig


def get_config() -> Config:
    base = load_config("tiny_world")
    assert isinstance(base.agent, MujicaConfig), "the tiny world is played by planner and workers"
    return dataclasses.replace(
        base,
        name="tiny_world_evipath",
        # A conversation with the teacher also holds the answer and up to four triples.
        agent=dataclasses.replace(base.agent, protocol="evipath", max_trajectory_tokens=400),
        trainer=dataclasses.replace(base.trainer, sequence_length=320, batch_size=7),
        warmup=dataclasses.replace(base.warmup, steps=300),
        sampling=dataclasses.replace(base.sampling, questions_per_round=2_000),
        method=EviPathConfig(
            teacher="policy",
            embedder="words",
            learning_rate=1e-3,
            end_learning_rate=1e-4,
            epochs=2,
        ),
    )
