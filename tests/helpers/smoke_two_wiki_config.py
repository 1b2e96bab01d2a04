"""The smoke run over 2WikiMultihopQA's files; `--task.data-dir` names their folder."""

import dataclasses
from pathlib import Path

from mujica_jax.config.files import load_config
from mujica_jax.config.schema import Config, TwoWikiConfig


def get_config() -> Config:
    task = TwoWikiConfig(
        environment="graph",
        data_dir="data",
        hold_out_percent=30,
        dev_questions=20,
        test_questions=20,
        split_dev_files=True,
        top_k=4,
        augmented_copies=1,
    )
    smoke = load_config(str(Path(__file__).with_name("smoke_config.py")))
    return dataclasses.replace(smoke, name="smoke_two_wiki", task=task)
