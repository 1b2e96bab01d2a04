"""2WikiMultihopQA over passages with SmolLM2-135M and EviPath's prompts. docs/lab/claims.md has a
shortened run.

    python -m mujica_jax.train configs/two_wiki_text_smollm2_evipath.py --task.data-dir DIR --init smollm2

SmolLM2 follows no prompt untrained, so no language model is the teacher here: the script is, which
replays the demonstrations that a warm-up would show. It reads the paragraphs that the data set
gives with each question, as far as `agent.max_observation_tokens` has room, and MiniLM chooses the
passages that a worker must name. A language model teaches with `--method.teacher remote` (an
endpoint) or `checkpoint`.

There is no warm-up: the first row of the table is SmolLM2 as it is. Rates and rows are those of the
warm-up of `two_wiki_text_smollm2.py`. The `model` section is not read with --init.
"""

import dataclasses
from pathlib import Path

from mujica_jax.config.files import load_config
from mujica_jax.config.schema import Config, EviPathConfig, MujicaConfig


def get_config() -> Config:
    base = load_config(str(Path(__file__).with_name("two_wiki_text_smollm2.py")))
    assert isinstance(base.agent, MujicaConfig), "passages are read by planner and workers there"
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
