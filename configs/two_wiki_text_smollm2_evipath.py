"""Train SmolLM2-135M with EviPath on 2WikiMultihopQA over passages, on two CPU cores.

    python -m mujica_jax.train configs/two_wiki_text_smollm2_evipath.py --task.data-dir DIR --init smollm2

Without training SmolLM2 cannot follow the teacher's prompts. The teacher is therefore a script,
which plays the same demonstrations as a warm-up. It reads the paragraphs that the data set gives
with each question, up to `agent.max_observation_tokens` tokens. MiniLM chooses the passages that a
worker must name. To use a language model as the teacher, set `--method.teacher remote`, with an
endpoint, or `--method.teacher checkpoint`.

There is no warm-up, so the first row of the final table is SmolLM2 without training. Learning rates
and rows are those of the warm-up of `two_wiki_text_smollm2.py`. With --init the section `model` is
not read. docs/lab/claims.md has the scores of a shorter run.
"""

import dataclasses
from pathlib import Path

from mujica_jax.config.files import load_config
from mujica_jax.config.schema import Config, EviPathConfig, MujicaConfig


def get_config() -> Config:
    base = load_config(str(Path(__file__).with_name("two_wiki_text_smollm2.py")))
    assert isinstance(base.agent, MujicaConfig), "EviPath needs an agent with planner and workers"
    return dataclasses.replace(
        base,
        name="two_wiki_text_smollm2_evipath",
        agent=dataclasses.replace(base.agent, protocol="evipath"),
        warmup=dataclasses.replace(base.warmup, steps=0),
        sampling=dataclasses.replace(
            base.sampling, questions_per_round=2_000, questions_per_shard=100
        ),
        method=EviPathConfig(
            teacher="scripted",
            embedder="minilm",
            learning_rate=1e-3,
            end_learning_rate=1e-4,
            epochs=2,
        ),
    )
