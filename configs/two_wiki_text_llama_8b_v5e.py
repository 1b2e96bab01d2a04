"""Train Llama-3.1-8B with MyGO on 2WikiMultihopQA over passages, on 32 chips (v5e:4x8).

    python -m mujica_jax.index build --corpus DIR/corpus_6119.json.gz --kind scann --out INDEX
    python -m mujica_jax.train configs/two_wiki_text_llama_8b_v5e.py --init CHECKPOINT --task.data-dir DIR \\
        --task.index INDEX

Scores in the paper (Mujica-MyGO, table 1): EM 58.88 and F1 65.88 after MyGO, 58.03 and 64.81 after
the warm-up, 37.83 and 46.53 with few-shot prompts.

This configuration was never run. Learning takes about 1.3 hours, estimated from its number of
operations (docs/guides/evaluation.md). The training step compiles for this topology and fits in
memory (`tests/models/test_tpu_compile.py`). The engine splits the eight key heads of Llama-3.1-8B
over the four chips of a host. All settings except the model are those of `two_wiki_text_v5e.py`,
which lists the paper's settings and ours.
"""

import dataclasses

from mujica_jax.config.files import load_config
from mujica_jax.config.schema import Config, ModelConfig


def get_config() -> Config:
    return dataclasses.replace(
        load_config("two_wiki_text_v5e"),
        name="two_wiki_text_llama_8b_v5e",
        model=ModelConfig(
            family="llama",
            vocab_tokens=128256,
            hidden_size=4096,
            intermediate_size=14336,
            num_layers=32,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            rope_theta=5e5,
        ),
    )
