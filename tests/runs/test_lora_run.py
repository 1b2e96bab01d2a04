"""The parts of a run with adapters and eight-bit weights: what is learnt from a checkpoint is what
is sampled from and what is written.
"""

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mujica_jax.agents.agent import Attempt
from mujica_jax.commands.eval import command_line, find_checkpoint
from mujica_jax.config.files import load_config
from mujica_jax.config.schema import Config
from mujica_jax.errors import UserError
from mujica_jax.learning.log_probs import token_log_probs
from mujica_jax.learning.packing import pack
from mujica_jax.models.adapters import with_adapter
from mujica_jax.models.decoder import unstacked
from mujica_jax.models.quantization import engine_weights
from mujica_jax.models.tokenizer import Tokenizer
from mujica_jax.models.weights import load_checkpoint, save_checkpoint
from mujica_jax.runs import setup as start
from mujica_jax.runs.learning import LearningPlan, train
from mujica_jax.runs.run import Run
from mujica_jax.runs.sampling import play_attempts
from mujica_jax.runs.versions import commit_policy, use_policy
from mujica_jax.runtime.preemption import Preemption
from tests.helpers.packed_rows import MODEL, random_conversations
from tests.helpers.paths import HELPERS
from tests.helpers.tiny_models import filled_decoder

SMOKE = HELPERS / "smoke_config.py"


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Config:
    """Return a configuration that starts from a checkpoint.

    It has adapters of rank 4 and an int8 engine.
    """
    directory = tmp_path_factory.mktemp("lora") / "checkpoint"
    tokenizer = Tokenizer.train(iter(["Who is the director of The Purple Shore?"]), 300)
    model = dataclasses.replace(
        MODEL,
        vocab_size=tokenizer.vocab_size,
        eos_token_ids=tuple(tokenizer.stop_token_ids),
        num_layers=2,
    )
    save_checkpoint(filled_decoder(model), directory, tokenizer=tokenizer)
    smoke = load_config(str(SMOKE))
    return dataclasses.replace(
        smoke,
        init=str(directory),
        pretraining=dataclasses.replace(smoke.pretraining, steps=0),
        trainer=dataclasses.replace(smoke.trainer, lora_rank=4, lora_alpha=8.0),
        engine=dataclasses.replace(smoke.engine, max_num_seqs=2, weights="int8"),
        agent=dataclasses.replace(smoke.agent, max_turn_tokens=8, max_trajectory_tokens=1024),
    )


@pytest.fixture(scope="module")
def run(config, tmp_path_factory) -> Iterator[Run]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start, "use_compilation_cache", lambda: None)
        with start.open_training(
            config, tmp_path_factory.mktemp("run") / "run", Preemption()
        ) as opened:
            yield opened


@pytest.fixture(scope="module")
def learnt(run):
    return learn(run)


def learn(run: Run):
    rows = pack(
        random_conversations(20), sequence_length=run.config.trainer.sequence_length, seed=0
    )
    return train(
        run,
        "some phase",
        run.initial_state,
        rows,
        plan=LearningPlan(steps=3, peak=0.1, end_value=0.01),
    )


def test_the_policy_that_is_written_is_the_merged_one(run, learnt, config, tmp_path):
    commit_policy(run, learnt, 0)
    written = load_checkpoint(run.store.policy_path(0) / "model")
    merged = nnx.state(run.trainer.decoder(learnt()))
    jax.tree.map(np.testing.assert_array_equal, nnx.state(written), merged)
    before = load_checkpoint(config.init)
    np.testing.assert_array_equal(written.embedding[...], before.embedding[...])
    assert np.abs(written.layers.up_kernel[...] - before.layers.up_kernel[...]).max() > 1e-3


def test_the_adapter_that_is_written_gives_the_policy_back_and_brings_its_configuration(
    run, learnt, config, tmp_path
):
    commit_policy(run, learnt, 0)
    adapter = run.store.policy_path(0) / "adapter"
    policy = nnx.state(with_adapter(load_checkpoint(config.init), adapter))
    # Numbers are float16.
    close = functools.partial(np.testing.assert_allclose, atol=1e-3)
    jax.tree.map(close, policy, nnx.state(run.trainer.decoder(learnt())))
    arguments = [
        "--init",
        config.init,
        "--adapter",
        str(adapter),
        "--out",
        str(tmp_path),
        "--eval.split",
        "dev",
    ]
    options, found_config = command_line(arguments)
    assert found_config.agent == config.agent
    assert found_config.trainer.lora_rank == 4
    assert found_config.eval.split == "dev"
    checkpoint = find_checkpoint(options)
    assert checkpoint.about() == {"checkpoint": config.init, "policy": 0, "adapter": str(adapter)}
    opened = checkpoint.open(found_config)[1]
    expected = engine_weights(policy, load_checkpoint(config.init).config, "int8", jnp.float32)
    apart = unstacked(expected, opened._engine.config, output_major=frozenset())
    jax.tree.map(np.testing.assert_array_equal, opened._engine._weights, apart)


def test_another_run_goes_on_from_the_adapter(run, learnt, config, tmp_path, monkeypatch):
    monkeypatch.setattr(start, "use_compilation_cache", lambda: None)
    commit_policy(run, learnt, 0)
    adapter = str(run.store.policy_path(0) / "adapter")
    going_on = dataclasses.replace(config, adapter=adapter)
    with start.open_training(going_on, tmp_path / "next", Preemption()) as opened:
        begun = opened.trainer.decoder(opened.initial_state())
        assert int(opened.initial_state().step) == 0
    expected = nnx.state(with_adapter(load_checkpoint(config.init), Path(adapter)))
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, atol=1e-6), nnx.state(begun), expected
    )
    narrower = dataclasses.replace(config.trainer, lora_rank=2)
    with (
        pytest.raises(
            UserError,
            match=r"has rank 4 and alpha 8, but trainer.lora_rank is 2.*--trainer.lora-rank 4",
        ),
        start.open_training(
            dataclasses.replace(going_on, trainer=narrower), tmp_path / "other", Preemption()
        ),
    ):
        pass
    assert not (tmp_path / "other").exists()


def test_a_started_again_phase_gives_the_same_state(run, learnt):
    jax.tree.map(np.testing.assert_array_equal, learn(run)(), learnt())


def test_episodes_are_sampled_from_the_merged_policy_in_eight_bits(run, learnt, monkeypatch):
    published = []
    set_weights = run.generator.set_weights

    def recorded_set_weights(weights, version):
        published.append(weights)
        return set_weights(weights, version)

    monkeypatch.setattr(run.generator, "set_weights", recorded_set_weights)
    use_policy(run, learnt, 3)
    model = run.trainer.decoder(learnt())
    expected = engine_weights(nnx.state(model), model.config, "int8", jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, published[0], expected)
    (question, *_) = run.task.questions("train")
    attempts = [Attempt(question=question, number=0, seed=0, temperature=1.0)]
    _, (trajectory,) = play_attempts(run, 0, 0, attempts, lambda trajectory: None)
    assert trajectory.policy_version == 3
    planner = trajectory.conversations[0]
    last = planner.turns[-1]
    assert last.role == "model"
    assert last.logprobs is not None
    sampled_by = nnx.merge(nnx.graphdef(model), published[0])
    scores = nnx.jit(token_log_probs)(
        sampled_by, pack([planner], sequence_length=1024, seed=0).batch(slice(None))
    )
    end = len(planner.token_ids)
    np.testing.assert_allclose(last.logprobs, scores[0, end - len(last.token_ids) : end], atol=1e-4)
