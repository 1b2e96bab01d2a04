"""HotpotQA over the introductions of all Wikipedia articles, with EviPath and Llama-3.1-8B on 32
chips (v5e:4x8).

    python -m mujica_jax.index build --corpus enwiki-20171001-pages-meta-current-withlinks-abstracts.tar.bz2 \\
        --kind scann --out INDEX
    python -m mujica_jax.train configs/hotpotqa_evipath_llama_8b_v5e.py --init CHECKPOINT --task.data-dir DIR \\
        --task.index INDEX --method.remote.base-url http://HOST:8000/v1 --method.remote.tokenizer TEACHER

EviPath, table 1: EM 53.8 and F1 66.4 with a teacher of 70 billion parameters; 50.9 and 63.5 where
the untuned model is the teacher (table 3: `--method.teacher policy`, without the endpoint:
`--method.remote.base-url None --method.remote.model None --method.remote.mode None
--method.remote.tokenizer None --method.remote.concurrency 8`).

Rows by flags:

- table 1: `--method.mode no_evidence` (51.8 and 65.0); a run with `--method.tune planner`,
  evaluated with `--worker CHECKPOINT` (48.9 and 61.8); CHECKPOINT evaluated with a run of
  `--method.tune executor` as `--worker` (41.6 and 54.3);
- table 4: `--method.teacher policy` with `--method.mode abductive` (50.9 and 63.5) and `deductive`
  (39.7 and 51.2), both with the same `--method.trajectories N`;
- table 5: a run of `--method.tune planner`, evaluated with a run of `--method.tune executor` as
  `--worker` (53.3 and 65.9).

Not run. Planner and executor have EviPath's tags and prompts (`agent.protocol`). The synthesis
reads the ten paragraphs that HotpotQA gives with a question, as far as
`agent.max_observation_tokens` has room, and searches nothing: the index is for the evaluation.
Threshold, learning rate, epochs and warm-up ratio are those of table 7, which does not say where
the learning rate ends; ours is a tenth. Its step has 64 conversations (4 GPUs, 2 each, 8 times);
ours has 32 rows, of several conversations each. Task and training step are those of
`hotpotqa_v5e.py` with the model of `two_wiki_text_llama_8b_v5e.py`, and all training questions.
"""

import dataclasses

from mujica_jax.config.files import load_config
from mujica_jax.config.methods import RemoteConfig
from mujica_jax.config.schema import Config, EviPathConfig, MujicaConfig


def get_config() -> Config:
    base = load_config("hotpotqa_v5e")
    assert isinstance(base.agent, MujicaConfig), "HotpotQA is played by planner and workers there"
    return dataclasses.replace(
        base,
        name="hotpotqa_evipath_llama_8b_v5e",
        task=dataclasses.replace(base.task, max_questions=None),
        model=load_config("two_wiki_text_llama_8b_v5e").model,
        agent=dataclasses.replace(base.agent, protocol="evipath", max_observation_tokens=2048),
        warmup=dataclasses.replace(base.warmup, steps=0),
        sampling=dataclasses.replace(base.sampling, questions_per_round=90_447),
        method=EviPathConfig(
            teacher="remote",
            remote=RemoteConfig(
                base_url="http://localhost:8000/v1",
                model="meta-llama/Llama-3.1-70B-Instruct",
                mode="chat",
                tokenizer="checkpoints/Llama-3.1-70B-Instruct",
                concurrency=64,
            ),
            learning_rate=2e-6,
            end_learning_rate=2e-7,
            epochs=2,
        ),
    )
