"""Train SmolLM2-135M with MyGO on 2WikiMultihopQA over a knowledge graph, on two CPU cores.

    python -m mujica_jax.train configs/two_wiki_kg_smollm2.py --task.data-dir DIR --init smollm2

On test it reaches EM 86.0 with greedy and 69.0 with sampled decoding after the warm-up, and 85.5
and 76.5 after one round of MyGO. The control run uses the same amount of computation for more
training on the demonstrations, and reaches 94.0 and 86.0. A longer warm-up is therefore worth more
here (docs/lab/benchmarks.md). The length of the warm-up was not chosen on dev.

The agent searches the graph of DIR. It consists of the file of triples or, if there is none, of the
gold evidences of the questions. The paper searched Wikidata, which is harder.

The warm-up trains on demonstrations that a script plays on the graph. The rounds of MyGO sample at
the same temperature as the evaluation, so that they train against the mistakes made there.
"""

import dataclasses

from mujica_jax.config.files import load_config
from mujica_jax.config.schema import Config


def get_config() -> Config:
    text = load_config("two_wiki_text_smollm2")
    return dataclasses.replace(
        text,
        name="two_wiki_kg_smollm2",
        task=dataclasses.replace(
            text.task, environment="graph", top_k=8, augmented_copies=0, triple_demonstrations=0
        ),
        agent=dataclasses.replace(
            text.agent, max_trajectory_tokens=512, max_observation_tokens=320
        ),
        trainer=dataclasses.replace(text.trainer, sequence_length=512),
        warmup=dataclasses.replace(text.warmup, steps=120),
        sampling=dataclasses.replace(
            text.sampling, questions_per_round=160, questions_per_shard=80, temperature=1.0
        ),
        method=dataclasses.replace(text.method, rounds=1, max_attempts=3),
    )
