"""HotpotQA with EviPath's hyper-parameters: Llama-3.1-8B learns what Llama-3.1-70B writes behind an endpoint.

    python -m mujica_jax.train configs/hotpot_evipath_llama_8b_v5e.py --init CHECKPOINT --task.data-dir DIR \\
        --task.index INDEX --method.remote.base-url URL --method.remote.tokenizer CHECKPOINT

The main row of the paper's table 1. Threshold, learning rate, epochs and warm-up ratio are those of table 7, whose end
of the learning rate is not said; ours is a tenth. Its step has 64 conversations (4 GPUs, 2 each, 8 times); ours has 32
rows, of several conversations each. The training step is that of `two_wiki_text_llama_8b_v5e.py`; a whole run is still
to come. The `model` section is not read with --init.
"""

import dataclasses
from pathlib import Path

from mujica_jax.config.files import load_config
from mujica_jax.config.remote import RemoteConfig
from mujica_jax.config.schema import Config, EviPathConfig, HotpotConfig


def get_config() -> Config:
    base = load_config(str(Path(__file__).with_name("two_wiki_text_llama_8b_v5e.py")))
    return dataclasses.replace(
        base,
        name="hotpot_evipath_llama_8b_v5e",
        task=HotpotConfig(data_dir="data/hotpotqa", top_k=5, retriever="dense", index="data/hotpotqa/index"),
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
