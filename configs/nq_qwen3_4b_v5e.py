"""Evaluate Qwen3-4B on Natural Questions over Wikipedia, on 4 chips (v5e:2x2).

    python -m mujica_jax.index build --corpus wiki-18.jsonl.gz --kind scann --embedder intfloat/e5-base-v2 --out INDEX
    python -m mujica_jax.eval configs/nq_qwen3_4b_v5e.py --init CHECKPOINT --task.data-dir DIR --task.index INDEX \\
        --agents direct rag

A single agent decides when to search. To evaluate a trained policy, give it as --checkpoint.

Scores in the paper (Learning When to Search, table 1), as the share of answers that a judge accepts
(--judge.base-url ..., docs/guides/evaluation.md):

- Qwen3-4B: 0.32 without a search (direct), 0.55 with one search (rag), and 0.57 after both stages
  of training, with 1.07 searches for each question;
- Qwen3-8B: 0.39, 0.62, and 0.64 with 1.13 searches.

Flags for other rows of the papers:

- The other data sets of the paper: --task.kind with --task.data-dir DIR and --eval.questions 20000.
  The columns are the scores of direct, of rag and after both stages, and the searches for each
  question after both stages. The first four columns are for Qwen3-4B, the others for Qwen3-8B:

      triviaqa    0.48  0.73  0.83  1.03     0.61  0.70  0.81  1.01
      popqa       0.20  0.51  0.54  1.06     0.25  0.52  0.53  1.01
      hotpotqa    0.28  0.56  0.55  1.11     0.35  0.54  0.55  1.15
      musique     0.12  0.19  0.24  1.25     0.14  0.18  0.27  2.15
      bamboogle   0.37  0.50  0.61  1.44     0.48  0.54  0.56  1.22

- Qwen3-8B and Qwen2.5-7B: give another checkpoint as --init. Both models fit four chips too.
- The prompt-based rows of DecEx-RAG, table 1: --task.top-k 3 --agents direct chain_of_thought rag
  iter_retgen ircot flare search_o1.
- Search-R1: --agent.style search_r1.

This configuration was never run. It is for evaluation only, because a training step does not fit
four chips. The limits are those of the paper's table 5. The embedder is that of DecEx-RAG. ScaNN
searches its 21 million embeddings in the memory of the host.
"""

import dataclasses

from mujica_jax.config.files import load_config
from mujica_jax.config.schema import Config, EngineConfig, EvalConfig, ModelConfig, SingleConfig
from mujica_jax.config.tasks import NaturalQuestionsConfig


def get_config() -> Config:
    base = load_config("two_wiki_text_v5e")
    return dataclasses.replace(
        base,
        name="nq_qwen3_4b_v5e",
        task=NaturalQuestionsConfig(
            data_dir="data/nq",
            dev_percent=0,
            top_k=5,
            retriever="dense",
            index="data/wikipedia/index",
            embedder="intfloat/e5-base-v2",
        ),
        model=ModelConfig(
            family="qwen3",
            vocab_tokens=151936,
            hidden_size=2560,
            intermediate_size=9728,
            num_layers=36,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            rope_theta=1e6,
        ),
        agent=SingleConfig(
            prompt="zero_shot",
            style="reflect",
            # There are at most five turns, and the last one answers.
            max_searches=4,
            max_turn_tokens=8192,
            # The paper's limits of a prompt and of a response.
            max_trajectory_tokens=2048 + 16384,
            max_observation_tokens=4096,
        ),
        engine=EngineConfig(
            max_num_seqs=64,
            decode_steps_per_call=16,
            prefill_tokens=4096,
            tensor_parallel_size=4,
            cache_gigabytes=2.0,
        ),
        trainer=dataclasses.replace(base.trainer, fsdp=1),
        eval=EvalConfig(questions=3_610, split="test"),
    )
