"""Train Llama-3.1-8B with EviPath on HotpotQA, on 32 chips (v5e:4x8).

    python -m mujica_jax.index build --corpus enwiki-20171001-pages-meta-current-withlinks-abstracts.tar.bz2 \\
        --kind scann --out INDEX
    python -m mujica_jax.train configs/hotpotqa_evipath_llama_8b_v5e.py --init CHECKPOINT --task.data-dir DIR \\
        --task.index INDEX --method.remote.base-url http://HOST:8000/v1 --method.remote.tokenizer TEACHER

The agent searches the introductions of all Wikipedia articles.

Scores in the paper (EviPath): EM 53.8 and F1 66.4 with a teacher of 70 billion parameters (table
1), and 50.9 and 63.5 with the untrained model as the teacher (table 3). The untrained model needs
no endpoint. Use the flags `--method.teacher policy --method.remote.base-url None
--method.remote.model None --method.remote.mode None --method.remote.tokenizer None
--method.remote.concurrency 8`.

Flags for other rows of the paper, with EM and F1:

- Table 1, without evidence: `--method.mode no_evidence` (51.8 and 65.0).
- Table 1, only the planner is trained: a run with `--method.tune planner`, evaluated with `--worker
  CHECKPOINT` (48.9 and 61.8).
- Table 1, only the executor is trained: CHECKPOINT, evaluated with a run of `--method.tune
  executor` as `--worker` (41.6 and 54.3).
- Table 4: `--method.teacher policy` with `--method.mode abductive` (50.9 and 63.5) or `deductive`
  (39.7 and 51.2), both with the same `--method.trajectories N`.
- Table 5: a run of `--method.tune planner`, evaluated with a run of `--method.tune executor` as
  `--worker` (53.3 and 65.9).

This configuration was never run. Planner and executor have EviPath's tags and prompts
(`agent.protocol`). The synthesis reads the ten paragraphs that HotpotQA gives with a question, up
to `agent.max_observation_tokens` tokens. It does not search. Only the evaluation uses the index.

Threshold, learning rate, epochs and warm-up ratio are those of table 7. The table does not give the
final learning rate; ours is a tenth of the first one. A step in the paper has 64 conversations
(8 times 2 on each of 4 GPUs). A step here has 32 rows with several conversations in each row. Task
and training step are those of `hotpotqa_v5e.py`, with all training questions and with the model of
`two_wiki_text_llama_8b_v5e.py`.
"""

import dataclasses

from mujica_jax.config.files import load_config
from mujica_jax.config.methods import RemoteConfig
from mujica_jax.config.schema import Config, EviPathConfig, MujicaConfig


def get_config() -> Config:
    base = load_config("hotpotqa_v5e")
    assert isinstance(base.agent, MujicaConfig), "EviPath needs an agent with planner and workers"
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
