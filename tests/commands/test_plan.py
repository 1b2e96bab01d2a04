"""What `plan` prints before a run: counted by hand, and the check's own sentence where it does not fit."""

import dataclasses
import importlib.util
import os
import subprocess
import sys

import pytest

from mujica_jax.commands import plan
from mujica_jax.config.files import load_config
from mujica_jax.config.methods import GrpoConfig
from mujica_jax.errors import UserError
from mujica_jax.runs.memory import PhaseMemory
from tests.helpers.paths import ROOT


def planned(*words: str) -> plan.PlanConfig:
    return plan.parse([*words])


def test_without_chips_every_known_chip_is_compared_as_many_as_the_mesh_has():
    names = [target.name for target in plan.targets_of(planned("two_wiki_text_v5e"))]
    assert names == ["32 x v4", "32 x v5e", "32 x v5p", "32 x v6e", "32 x v7x"]


def test_a_topology_has_as_many_chips_as_its_grid():
    options = planned("tiny_world", "--chips", "v5e:4x8", "v5p:2x2x4", "v6e:1")
    targets = plan.targets_of(options)
    assert [(target.chip.name, target.count) for target in targets] == [
        ("v5e", 32),
        ("v5p", 16),
        ("v6e", 1),
    ]


@pytest.mark.parametrize(
    ("chips", "sentence"),
    [
        ("v5ee:4x8", "unknown chip 'v5ee' in --chips; did you mean v5e?"),
        ("h100:8", "unknown chip 'h100' in --chips; choose from v4, v5e, v5p, v6e, v7x"),
        ("v5e", "--chips v5e is not a topology: write the chip and its grid, as in v5e:4x8"),
        (
            "v5e:4y8",
            "--chips v5e:4y8 is not a topology: write the chip and its grid, as in v5e:4x8",
        ),
        (
            "v5e:0x8",
            "--chips v5e:0x8 is not a topology: write the chip and its grid, as in v5e:4x8",
        ),
    ],
)
def test_chips_that_do_not_exist_are_refused(chips, sentence, capsys):
    assert plan.main(["tiny_world", "--chips", chips]) == 2
    assert capsys.readouterr().err == f"error: {sentence}\n"


def test_fsdp_follows_the_number_of_chips():
    options = planned(
        "two_wiki_text_v5e", "--chips", "v5e:2x4", "--trainer.tensor-parallel-size", "2"
    )
    (target,) = plan.targets_of(options)
    assert plan.with_mesh(options, target).trainer.fsdp == 4


def test_chips_that_the_other_axes_do_not_divide_are_refused():
    options = planned("tiny_world", "--chips", "v5e:2x4", "--trainer.data-parallel-size", "3")
    (target,) = plan.targets_of(options)
    with pytest.raises(UserError, match="= 3 devices, which does not divide 8 chips"):
        plan.with_mesh(options, target)


def test_an_engine_that_needs_more_chips_is_refused():
    options = planned("tiny_world", "--chips", "v5e:1x2", "--engine.tensor-parallel-size", "4")
    (target,) = plan.targets_of(options)
    with pytest.raises(UserError, match=r"engine.tensor_parallel_size is 4, but there are 2 chips"):
        plan.with_mesh(options, target)


def test_a_mistake_in_the_configuration_ends_with_status_2(capsys):
    assert plan.main(["tiny_world", "--trainer.clip-norm", "0"]) == 2
    assert "trainer.clip_norm is 0.0 and must be above 0" in capsys.readouterr().err


def test_compiling_needs_a_topology(capsys):
    assert plan.main(["tiny_world", "--compile"]) == 2
    assert "--compile compiles for a topology, but --chips names none" in capsys.readouterr().err


def test_attempts_of_mygo_and_of_grpo_with_dynamic_sampling():
    config = load_config("two_wiki_text_v5e")
    assert plan.sampling_in_words(config) == (
        "at most 20 rounds x 1,000 questions x 16 attempts = 320,000 attempts"
    )
    grpo = GrpoConfig(
        rounds=3,
        rounds_per_evaluation=2,
        group_size=4,
        learning_rate=1e-6,
        end_learning_rate=1e-7,
        epochs=1,
        dynamic_sampling=True,
        max_sampled_batches=5,
    )
    config = dataclasses.replace(config, method=grpo)
    assert plan.sampling_in_words(config) == (
        "at most 3 rounds x 1,000 questions x 4 attempts x 5 batches = 60,000 attempts"
    )
    # After the warm-up, after round 2 and after round 3.
    assert plan.num_policies(config) == 3


def test_updates_name_each_phase():
    config = load_config("tiny_world")
    words = plan.updates_in_words(config)
    assert words == (
        f"{config.pretraining.steps:,} of pre-training, at most {config.warmup.steps:,} of warm-up, "
        f"then in each of {config.method.rounds} rounds {config.method.epochs} passes over the packed "
        f"rows, {config.trainer.batch_size} rows in an update"
    )
    from_checkpoint = dataclasses.replace(config, init="smollm2")
    assert "pre-training" not in plan.updates_in_words(from_checkpoint)


def test_the_table_has_a_row_for_each_phase_and_no_empty_part():
    phases = [
        PhaseMemory(name="loading", parts={"checkpoint": 10**9, "KV cache": 0}),
        PhaseMemory(name="learning", parts={"training step": 2_500_000_000}),
    ]
    assert plan.phase_table(phases) == [
        "phase      sum  checkpoint  training step",
        "loading   1.00        1.00",
        "learning  2.50                       2.50",
    ]


COMPILER = ROOT / ".venv" / "tpu"


def run_plan(*words: str) -> str:
    """Return what the program prints in a process of its own, which finds libtpu if it is there."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    paths = [str(COMPILER), *filter(None, [os.environ.get("PYTHONPATH")])]
    ended = subprocess.run(
        [sys.executable, "-m", "mujica_jax.plan", *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment | {"PYTHONPATH": os.pathsep.join(paths)},
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_a_7b_model_is_planned_without_a_device_and_without_weights():
    """The figures of state and engine are those of docs/concepts/memory.md, which libtpu confirms."""
    output = run_plan("two_wiki_text_v5e", "--chips", "v5e:4x8", "--retrieval-gigabytes", "0.67")
    assert "7,615,616,512 parameters, all trained" in output
    assert "32 rows x 4,096 tokens = 131,072 tokens in one update" in output
    assert "21 policies of 15.2 GB, and a checkpoint of 91.4 GB: 411.2 GB" in output
    (loading,) = [line for line in output.splitlines() if line.startswith("loading")]
    assert loading.split()[:2] == ["loading", "8.48"]
    # 16 GB less 7.53 GB of parameters, optimizer state, KV cache and embedder.
    assert "\nfits if the training step takes at most 8.5 GB; --compile measures it\n" in output


def test_a_model_that_does_not_fit_gets_the_sentence_of_the_check():
    output = run_plan("two_wiki_text_v5e", "--chips", "v5e:2x4", "--retrieval-gigabytes", "0.67")
    assert "v5e:2x4, with --trainer.fsdp 8: GB per chip. A v5e has 16.0 GB" in output
    sentence = "does not fit: two_wiki_text_v5e needs 23.2 GB per chip while learning, but a v5e has 16.0 GB"
    assert sentence in output


@pytest.mark.slow
@pytest.mark.skipif(
    not (COMPILER / "libtpu").is_dir() and importlib.util.find_spec("libtpu") is None,
    reason="libtpu is not installed: `make test-slow` does it",
)
def test_a_compiled_plan_has_the_figures_of_the_page_about_memory():
    """They are those of libtpu 0.0.52, as in docs/concepts/memory.md."""
    words = ["--chips", "v5e:4x8", "--compile", "--retrieval-gigabytes", "0.67"]
    output = run_plan("two_wiki_text_v5e", *words)
    (learning,) = [line.split() for line in output.splitlines() if line.startswith("learning")]
    assert (learning[1], learning[-1]) == ("14.39", "6.86")
    assert "\nfits: 1.6 GB are free in the fullest phase\n" in output
