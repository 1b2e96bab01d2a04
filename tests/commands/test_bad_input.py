"""Mistakes of users: one sentence on stderr with both values and what to do, exit status 2, no
traceback, and nothing written or lost.
"""

import dataclasses
import errno
import json
import os
import re
import shutil
import subprocess
import sys
import types
from io import FileIO
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from mujica_jax.agents.faults import FaultGuard
from mujica_jax.commands import eval as evaluation
from mujica_jax.commands import sample, train
from mujica_jax.config.checks import check
from mujica_jax.config.command_line import command_line
from mujica_jax.config.files import load_config
from mujica_jax.config.schema import Config, DistributedConfig
from mujica_jax.errors import UserError
from mujica_jax.inference.engine import factory as engines
from mujica_jax.methods import supervised as warmup
from mujica_jax.models.sharding import MESH_AXES
from mujica_jax.models.tokenizer import Tokenizer
from mujica_jax.models.weights import save_checkpoint
from mujica_jax.records import Conversation, Question, Turn
from mujica_jax.report.metrics_log import MetricsLog
from mujica_jax.rewards.reward import find_reward
from mujica_jax.runs import setup as start
from mujica_jax.runs.lead import TRAINER
from mujica_jax.runs.learning import rows_that_fit
from mujica_jax.runs.parts import make_agent
from mujica_jax.runtime import provenance
from mujica_jax.runtime.preemption import Preemption
from mujica_jax.storage import run_directory
from mujica_jax.storage.leases import Leases
from mujica_jax.storage.local import require_space
from mujica_jax.trajectories.store import Store, open_run
from tests.helpers.packed_rows import MODEL
from tests.helpers.paths import HELPERS, ROOT
from tests.helpers.tiny_models import filled_decoder

SMOKE = str(HELPERS / "smoke_config.py")
GRPO = str(ROOT / "configs" / "tiny_world_grpo.py")
TWO_WIKI = str(HELPERS / "smoke_two_wiki_config.py")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Go to an empty working directory.

    The programs leave this process's compilation cache and allocator alone.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(start, "use_compilation_cache", lambda: None)


@pytest.fixture
def refused(capsys):
    """Call a program that must refuse, and return the sentence it printed."""

    def call(program, *arguments: str) -> str:
        capsys.readouterr()
        assert program.main(list(arguments)) == 2
        message = capsys.readouterr().err
        assert message.startswith("error: "), message
        assert message.count("\n") == 1, message
        return message

    return call


def refused_by_tyro(capsys, program, *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        program.main(list(arguments))
    assert ended.value.code == 2
    output = capsys.readouterr()
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", output.out + output.err).split())


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    """Return a small Hugging Face directory whose tokenizer and model belong together."""
    tokenizer = Tokenizer.train(iter(["Who is the director of The Purple Shore?"]), 300)
    tokens = {"vocab_size": tokenizer.vocab_size, "eos_token_ids": tokenizer.stop_token_ids}
    config = dataclasses.replace(MODEL, num_kv_heads=1, **tokens)
    save_checkpoint(filled_decoder(config), tmp_path / "checkpoint", tokenizer=tokenizer)
    return tmp_path / "checkpoint"


def written(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in tmp_path.iterdir())


# What argparse-like errors look like is tyro's; that they name the right word is ours.


@pytest.mark.parametrize("program", [train, evaluation])
def test_a_mistyped_flag_is_answered_with_the_nearest(capsys, program):
    checkpoint = ["--checkpoint", "nowhere"] if program is evaluation else []
    message = refused_by_tyro(capsys, program, SMOKE, *checkpoint, "--engine.max-num-seq", "3")
    assert "--engine.max-num-seq" in message
    assert "--engine.max-num-seqs" in message


def test_an_unknown_choice_is_answered_with_the_choices(capsys):
    message = refused_by_tyro(capsys, train, TWO_WIKI, "--task.environment", "web")
    assert "web" in message
    assert "graph" in message
    assert "text" in message


def test_a_task_without_demonstrations_needs_a_checkpoint(refused, tmp_path, monkeypatch):
    bare = types.SimpleNamespace(name="bare", rule="two_wiki", environment_kind="text")
    monkeypatch.setattr(start, "build_task", lambda config: bare)
    message = refused(train, SMOKE, "--run", "run")
    lacking = (
        "task bare has no scripted demonstrations (it lacks demonstrations, pretraining_documents, "
        "tokenizer_text)"
    )
    assert f"{lacking}: start from a checkpoint with --init" in message
    none = ("--pretraining.steps", "0", "--init", "nowhere", "--warmup.steps", "0")
    # A control learns demonstrations.
    assert lacking in refused(train, SMOKE, "--run", "run", *none)
    none = (*none, "--eval.no-control")
    assert "there is no directory nowhere" in refused(train, SMOKE, "--run", "run", *none)
    assert written(tmp_path) == []


@pytest.mark.parametrize(
    ("mistake", "sentence"),
    [
        ({"name": None}, "task tiny_world: its name is None and must be a string"),
        ({"rule": "exakt"}, "its rule is 'exakt' and must be hotpot or two_wiki"),
        (
            {"environment_kind": "text"},
            "environment_kind is text, but its environment has the kind graph",
        ),
        (
            {"questions": list},
            r"questions\('train'\) returned a list and must return a list of Question objects",
        ),
        ({"ids": [7]}, "id of a question is 7 and must be a string"),
        (
            {"answers": "Ghent"},
            "answers of question 'q' are 'Ghent' and must be a tuple of strings",
        ),
        ({"answers": ()}, r"answers of question 'q' are \(\) and must be a tuple of strings"),
        ({"ids": "qq"}, "several train questions have the id 'q': give each question its own"),
    ],
)
def test_mistakes_of_a_task_of_ones_own_are_named(monkeypatch, mistake, sentence):
    answers = mistake.get("answers", ("Ghent",))
    asked = [Question(id=id, text="Where?", answers=answers) for id in mistake.get("ids", "q")]
    right = {"name": "own", "rule": "two_wiki", "environment_kind": "graph"}
    right |= {
        "questions": lambda split: asked,
        "environment": lambda question: types.SimpleNamespace(kind="graph"),
    }
    task = types.SimpleNamespace(**right | mistake)
    monkeypatch.setattr(start, "implementation", lambda section: lambda section: task)
    with pytest.raises(UserError, match=sentence):
        start.build_task(load_config(SMOKE))


def test_eval_refuses_what_only_training_reads(capsys):
    message = refused_by_tyro(
        capsys, evaluation, SMOKE, "--checkpoint", "nowhere", "--method.rounds", "2"
    )
    assert "--method.rounds" in message


@pytest.mark.parametrize("program", [train, evaluation])
def test_an_unknown_configuration_is_answered_with_the_nearest(refused, program):
    for name in ("tiny_wrold", "confgs/tiny_world.py", "runs/tiny_world", "tiny_world.yaml"):
        message = refused(program, name)
        assert f"unknown configuration '{name}'; did you mean tiny_world?" in message


IMPOSSIBLE = {  # flags -> what the sentence says
    "--method.learning-rate 0": "method.learning_rate is 0.0 and must be above 0",
    "--method.learning-rate -1e-3": "method.learning_rate is -0.001 and must be above 0",
    "--method.learning-rate nan": "method.learning_rate is nan",
    "--warmup.end-learning-rate 1": (
        "warmup.end_learning_rate is 1.0 and must be between 0 and warmup.learning_rate 0.02"
    ),
    "--pretraining.learning-rate inf": "pretraining.learning_rate is inf",
    "--pretraining.steps -1": "pretraining.steps is -1 and must be at least 0",
    "--pretraining.documents 0": "pretraining.documents is 0, but pretraining.steps is 20",
    "--warmup.steps -5": "warmup.steps is -5 and must be at least 0",
    "--warmup.few-shot-attempts 0": "warmup.few_shot_attempts is 0 and must be at least 1",
    "--method.rounds -1": "method.rounds is -1",
    "--sampling.questions-per-round 0": "sampling.questions_per_round is 0 and must be at least 1",
    "--method.max-attempts 0": "method.max_attempts is 0 and must be at least 1",
    "--method.keep-per-question 0": "method.keep_per_question is 0",
    "--method.keep-per-question 9": "method.keep_per_question is 9, but method.max_attempts is 2 and each attempt",
    "--method.initial-threshold 2": (
        "method.initial_threshold is 2.0, but the highest reward is 1: give a threshold from 0 to 1"
    ),
    "--method.initial-threshold -0.1": (
        "method.initial_threshold is -0.1, but the highest reward is 1: give a threshold from 0"
    ),
    "--method.initial-threshold nan": (
        "method.initial_threshold is nan, but the highest reward is 1: give a threshold from 0 to 1"
    ),
    "--method.schedule offline --keep-policies 1": "keep_policies is 1, but method.schedule offline",
    "--reward staged --staged.no-format --method.initial-threshold 1.5": (
        "1.5, but the highest reward is 1: give a threshold"
    ),
    "--sampling.questions-per-shard 0": "sampling.questions_per_shard is 0",
    "--method.epochs 0": "method.epochs is 0",
    "--method.replay -0.5": "method.replay is -0.5",
    "--sampling.temperature 0": "sampling.temperature is 0.0 and must be above 0",
    "--eval.questions 0": "eval.questions is 0",
    "--eval.temperature 0": "eval.temperature is 0.0",
    "--engine.max-num-seqs 0": (
        "engine.max_num_seqs is 0 and must be at least 1: change it in the configuration or pass "
        "--engine.max-num-seqs"
    ),
    "--agent.max-iterations 0": "agent.max_iterations is 0",
    "--agent.max-observation-tokens 400": "400 and agent.max_turn_tokens 80 are 480 tokens together",
    "--agent.max-turn-tokens 384": "leave no room for a prompt in agent.max_trajectory_tokens 384",
    "--trainer.clip-norm 0": "trainer.clip_norm is 0.0",
    "--trainer.b2 1": "trainer.b2 is 1.0 and must be at least 0 and below 1",
    "--warmup.miss_rate 1": "warmup.miss_rate is 1.0 and must be at least 0 and below 1",
    "--trainer.attention splash --trainer.sequence-length 200": (
        "trainer.sequence_length is 200: use 256, or trainer.attention auto"
    ),
    "--trainer.attention splash": "trainer.attention splash runs on tpu, but this is cpu: use auto",
    "--trainer.attention cudnn": "trainer.attention cudnn runs on gpu, but this is cpu: use auto",
    "--trainer.lora-rank -1": "trainer.lora_rank is -1 and must be at least 0",
    "--trainer.lora-alpha 0": "trainer.lora_alpha is 0.0 and must be above 0",
    "--trainer.lora-rank 4": "trainer.lora_rank is 4, but no checkpoint is given",
    "--trainer.data-parallel-size 3": (
        "trainer.batch_size 4 cannot be split over data_parallel_size x fsdp = 3 devices"
    ),
    "--trainer.tensor-parallel-size 0": "trainer.tensor_parallel_size is 0",
    "--seed -1": "seed is -1",
    # Names of kinds and rewards are answered with the nearest.
    "--agent.kind mujca": "unknown agent 'mujca'; did you mean mujica?",
    "--method.kind=mygoo": "unknown method 'mygoo'; did you mean mygo?",
    "--task.kind two_wikki": "unknown task 'two_wikki'; did you mean two_wiki?",
    "--task.kind web": "unknown task 'web'; choose from tiny_world, two_wiki",
    "--reward f1_fromat": "unknown reward 'f1_fromat'; did you mean f1_format?",
    "--task.hold-out-percent 9": (
        "--task.hold-out-percent is a setting of task.kind two_wiki and questions, but task.kind is"
    ),
    # What is not here, or not possible together, is refused before the run is begun.
    "--task.facts-per-entity 99": "task.facts_per_entity is 99 and must be from 4 to 13",
    "--pretraining.steps 0 --init nowhere": "there is no directory nowhere: give the folder",
    "--engine.tensor-parallel-size 64": (
        "engine.tensor_parallel_size is 64, but only 1 devices are available: use at most 1"
    ),
    "--engine.cache-gigabytes 1e-6": "but engine.cache_gigabytes allows only 1e-06 GB",
}


@pytest.mark.parametrize("flags", IMPOSSIBLE)
def test_what_cannot_be_is_refused_before_anything_is_written(refused, tmp_path, flags):
    assert IMPOSSIBLE[flags] in refused(train, SMOKE, "--run", "run", *flags.split())
    assert written(tmp_path) == []


def test_eval_checks_what_it_is_given(refused):
    message = refused(evaluation, SMOKE, "--checkpoint", "nowhere", "--eval.questions", "-3")
    assert "eval.questions is -3 and must be at least 1" in message


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        (
            "engine=replace(given.engine, max_num_seqs='many')",
            "engine.max_num_seqs is 'many' and must be int",
        ),
        (
            "trainer=replace(given.trainer, clip_norm=None)",
            "trainer.clip_norm is None and must be float",
        ),
        ("eval=replace(given.eval, control=1)", "eval.control is 1 and must be bool"),
        (
            "model=replace(given.model, family='mistral')",
            "model.family is 'mistral' and must be one of qwen2, qwen3,",
        ),
        ("seed=1.5", "seed is 1.5 and must be int: change it in the configuration"),
        (
            "profile=replace(given.profile, steps=('a', 2))",
            "profile.steps is ('a', 2) and must be tuple[int, int] or None",
        ),
        ("method={'rounds': 2}", "method is {'rounds': 2} and must be MygoConfig or GrpoConfig"),
    ],
)
def test_a_configuration_file_of_impossible_values_is_refused(refused, tmp_path, changed, sentence):
    """Flags cannot say these values, because flags have the right type."""
    config = tmp_path / "config.py"
    config.write_text(
        "from dataclasses import replace\n"
        "from mujica_jax.config.files import load_config\n"
        "def get_config():\n"
        f"    given = load_config({SMOKE!r})\n"
        f"    return replace(given, {changed})\n"
    )
    assert sentence in refused(train, str(config), "--run", "run")
    assert not (tmp_path / "run").exists()


def test_only_a_phase_that_is_left_out_needs_no_learning_rate():
    config = load_config(SMOKE)
    left_out = dataclasses.replace(config.warmup, steps=0, learning_rate=0.0, end_learning_rate=0.0)
    assert refusal(dataclasses.replace(config, warmup=left_out)) is None
    done = dataclasses.replace(left_out, steps=1)
    assert "warmup.learning_rate is 0.0 and must be above 0" in str(
        refusal(dataclasses.replace(config, warmup=done))
    )


def refusal(config: Config) -> UserError | None:
    try:
        check(config)
    except UserError as error:
        return error
    return None


def test_a_task_without_data_or_without_held_out_questions_is_refused(refused, tmp_path):
    missing = refused(train, TWO_WIKI, "--run", "run", "--task.data-dir", "nowhere")
    assert "folder nowhere does not exist; set task.data_dir" in missing
    assert written(tmp_path) == []
    data = tmp_path / "data"
    data.mkdir()
    record = {
        "_id": "a",
        "question": "Who made Taxi!?",
        "answer": "Roy Del Ruth",
        "supporting_facts": [["Taxi!", 0]],
    }
    (data / "questions.jsonl").write_text(json.dumps(record) + "\n")
    (data / "corpus.json").write_text(
        json.dumps([{"title": "Taxi!", "text": "A film by Roy Del Ruth."}])
    )
    flags = ["--task.environment", "text", "--task.augmented-copies", "0"]
    assert "1 training questions and 0 dev questions, but training needs both" in refused(
        train, TWO_WIKI, "--run", "run", *flags
    )
    assert written(tmp_path) == ["data"]


def test_more_devices_than_there_are_are_refused(refused, tmp_path):
    devices = len(jax.devices())
    message = refused(
        train, SMOKE, "--run", "run", "--trainer.tensor-parallel-size", str(4 * devices)
    )
    assert f"needs {4 * devices} devices, but {devices} are available" in message
    assert written(tmp_path) == []


def test_heads_that_the_engines_devices_cannot_share_are_refused(refused, tmp_path, monkeypatch):
    devices = np.array(jax.devices() * 3)
    monkeypatch.setattr(
        engines, "engine_mesh", lambda engine: Mesh(devices.reshape(1, 1, 3), MESH_AXES)
    )
    message = refused(train, SMOKE, "--run", "run", "--engine.tensor-parallel-size", "3")
    assert (
        "key and value heads cannot be split over engine.tensor_parallel_size 3: use a divisor of"
        in message
    )
    assert written(tmp_path) == []


def test_a_mesh_that_does_not_divide_the_model_is_refused(refused, tmp_path, monkeypatch):
    devices = np.array(jax.devices() * 4)[:4]
    monkeypatch.setattr(start, "make_mesh", lambda *shape: Mesh(devices.reshape(shape), MESH_AXES))
    message = refused(
        train, SMOKE, "--run", "run", "--trainer.fsdp", "4", "--model.hidden-size", "30"
    )
    assert (
        "axis embed of size 30 cannot be split over fsdp of size 4: use fsdp of size 1, 2 or 3"
        in message
    )
    assert written(tmp_path) == []


def test_a_run_directory_of_another_configuration_is_kept_and_the_differences_are_listed(
    refused, tmp_path
):
    config = load_config(SMOKE)
    open_run("run", dataclasses.asdict(config))
    before = (tmp_path / "run" / "config.json").read_bytes()
    message = refused(train, SMOKE, "--run", "run", "--seed", "3", "--engine.max-num-seqs", "8")
    assert "seed was 0 and is now 3" in message
    assert "engine.max_num_seqs was 16 and is now 8" in message
    assert "choose another --run directory" in message
    assert (tmp_path / "run" / "config.json").read_bytes() == before


def warming_up(**changes) -> Any:
    """Return as much of a Run as the warm-up needs before it learns."""
    config = load_config(SMOKE)
    sections = {
        section: dataclasses.replace(getattr(config, section), **fields)
        for section, fields in changes.items()
    }
    config = dataclasses.replace(config, **sections)
    task: Any = start.build_task(config)
    tokenizer = Tokenizer.train(task.tokenizer_text(), 768)
    progress = types.SimpleNamespace(lines=[], line=lambda text: progress.lines.append(text))
    run = types.SimpleNamespace(
        config=config, task=task, tokenizer=tokenizer, progress=progress, preemption=Preemption()
    )
    run.agent = make_agent(config.agent, tokenizer)
    run.faults = FaultGuard(config.faults)
    run.reward = find_reward(config.reward, task.rule)
    return run


def test_rows_too_short_or_limits_too_small_for_any_demonstration_are_said():
    with pytest.raises(
        UserError,
        match=r"of the 3 .* trainer.sequence_length 32; the shortest has \d+ tokens: raise",
    ):
        warmup.warm_up(warming_up(task={"demonstrations": 3}, trainer={"sequence_length": 32}))
    with pytest.raises(
        UserError,
        match=r"none of 3 scripted .* raise agent.max_turn_tokens \(now 9\) or the agent's limit",
    ):
        warmup.warm_up(warming_up(task={"demonstrations": 3}, agent={"max_turn_tokens": 9}))


def test_rows_too_short_for_some_conversations_are_said():
    lines = []
    run: Any = types.SimpleNamespace(
        config=load_config(SMOKE), progress=types.SimpleNamespace(line=lines.append)
    )
    assert run.config.trainer.sequence_length == 384

    def conversation(tokens: int) -> Conversation:
        context = Turn(role="context", token_ids=(1,), text="")
        written = (2,) * (tokens - 1)
        return Conversation(
            role="planner",
            turns=(context, Turn(role="model", token_ids=written, text="", trained=True)),
        )

    short = conversation(384)
    long = conversation(385)
    assert rows_that_fit(run, [short, long, short]) == [short, short]
    assert lines == ["1 of 3 conversations exceed 384 tokens and are left out"]


GROUPS = ("--method.rounds-per-evaluation", "1", "--method.group-size", "2")
PRETRAINED = ("--pretraining.steps", "0")


def test_a_configuration_for_a_model_from_scratch_takes_no_checkpoint(
    refused, checkpoint, tmp_path
):
    message = refused(train, SMOKE, "--run", "run", "--init", str(checkpoint))
    assert "pre-trains for 20 steps, and its learning rates are for a model from scratch" in message
    assert "configs/two_wiki_text_smollm2.py" in message
    assert not (tmp_path / "run").exists()


def test_worked_examples_need_a_checkpoint_and_room(refused, checkpoint, tmp_path):
    few_shot = ("--warmup.source", "few_shot")
    message = refused(train, SMOKE, "--run", "run", *PRETRAINED, *few_shot)
    assert "warmup.source is few_shot, but no checkpoint is given" in message
    started = ("--run", "run", *PRETRAINED, *few_shot, "--init", str(checkpoint))
    message = refused(train, SMOKE, *started)
    assert "agent.prompt brief numbers search results in another way than they do" in message
    assert "than they do: add --agent.prompt zero_shot" in message
    message = refused(train, SMOKE, *started, "--agent.prompt", "zero_shot")
    assert re.search(
        r"the planner's prompt \(few_shot\) has \d+ tokens\. .* needs \d+ tokens, .*: raise it to \d+ or more",
        message,
    )
    assert not (tmp_path / "run").exists()


def test_worked_examples_without_room_are_refused_by_an_evaluation_too(refused, checkpoint):
    few_shot = ("--init", str(checkpoint), "--agent.prompt", "few_shot")
    assert "the planner's prompt (few_shot) has" in refused(evaluation, SMOKE, *few_shot)
    single = ("--agent.kind", "single", "--task.environment", "text")
    assert "the single's prompt (few_shot) has" in refused(evaluation, SMOKE, *few_shot, *single)


def test_a_worker_joins_only_a_run_of_its_own_program(refused, monkeypatch):
    words = [str(SMOKE), "--run", "run", "--sampling.workers", "external"]
    described = dataclasses.asdict(command_line(words, default="tiny_world"))
    assert Leases(open_run(Path("run"), described), seconds=30.0, revision="a" * 40).claim(TRAINER)
    monkeypatch.setattr(provenance, "git_revision", lambda: "b" * 40)
    assert f"revision {'a' * 40}, but this program is revision {'b' * 40}" in refused(
        sample, "--run", "run"
    )
    grpo = command_line([str(GRPO), "--run", "other"], default="tiny_world")
    open_run(Path("other"), dataclasses.asdict(grpo))
    assert "method.kind grpo, but workers only sample for mygo" in refused(sample, "--run", "other")
    assert "--lease-seconds is 0.1 and must be between" in refused(
        sample, "--run", "run", "--lease-seconds", "0.1"
    )


def test_a_run_directory_of_another_method_is_refused(refused):
    open_run(Path("run"), dataclasses.asdict(load_config(SMOKE)))
    message = refused(train, SMOKE, "--run", "run", "--method.kind", "dapo", *GROUPS)
    assert "method.kind" in message
    assert "mygo" in message
    assert "dapo" in message


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_an_incomplete_init_directory_is_refused(refused, checkpoint, tmp_path, missing):
    (checkpoint / missing).unlink()
    message = refused(train, SMOKE, "--run", "run", *PRETRAINED, "--init", str(checkpoint))
    assert missing in message
    assert str(checkpoint) in message
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_of_another_model_is_refused(refused, checkpoint, tmp_path):
    texts = iter(
        [
            "Many more words than the other tokenizer has seen: directors, composers, spouses, "
            "dates and films."
        ]
    )
    larger = Tokenizer.train(texts, 330)
    larger.save(checkpoint)
    message = refused(train, SMOKE, "--run", "run", *PRETRAINED, "--init", str(checkpoint))
    embedded = json.loads((checkpoint / "config.json").read_text())["vocab_size"]
    assert (
        f"ids up to {larger.vocab_size - 1}, but the model embeds only {embedded} tokens" in message
    )
    assert not (tmp_path / "run").exists()


def test_adapters_of_a_rank_that_the_checkpoint_cannot_have_are_refused(
    refused, checkpoint, tmp_path
):
    message = refused(
        train,
        SMOKE,
        "--run",
        "run",
        *PRETRAINED,
        "--init",
        str(checkpoint),
        "--trainer.lora-rank",
        "9",
    )
    assert (
        "trainer.lora_rank is 9, but key_kernel of this model is a matrix of 16 x 8: use a rank of "
        "at most 8" in message
    )
    assert not (tmp_path / "run").exists()


def test_a_package_that_is_not_installed_is_named_with_its_extra_by_eval_too(
    refused, checkpoint, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "qwix", None)
    message = refused(
        train,
        SMOKE,
        "--run",
        "run",
        *PRETRAINED,
        "--init",
        str(checkpoint),
        "--engine.weights=int8",
    )
    assert "needs the package qwix, but qwix is not installed: install the extra `qwix`" in message
    assert not (tmp_path / "run").exists()
    message = refused(evaluation, SMOKE, "--checkpoint", str(checkpoint), "--engine.weights", "fp8")
    assert "engine.weights fp8 needs the package qwix" in message


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.EROFS, "read-only"),
        (errno.ENOSPC, "no space is left"),
        (errno.EACCES, "permission is denied"),
    ],
)
def test_a_disk_that_takes_nothing_is_explained(refused, monkeypatch, code, words):
    def fails(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", fails)
    message = refused(train, SMOKE, "--run", "run")
    assert words in message
    assert "run/config.json" in message
    assert "--run directory" in message


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts a small file system")
def test_a_disk_that_fills_up_is_explained_where_a_library_says_it_in_words(refused, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=48k", "tmpfs", str(disk)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting is not allowed here")
    try:
        assert "disk/run/tokenizer: no space is left there; free some space" in refused(
            train, SMOKE, "--run", "disk/run"
        )
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_too_small_for_a_checkpoint_is_refused_with_both_sizes(tmp_path):
    with pytest.raises(
        UserError, match=r"1,000,000,000,000,000,000 bytes are needed, but only [\d,]+ are free"
    ):
        require_space(tmp_path, 10**18)


def test_a_full_disk_ends_the_metrics_with_a_sentence(tmp_path, monkeypatch):
    class Full(FileIO):
        def write(self, data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(run_directory, "FileIO", Full)
    with (
        MetricsLog(tmp_path) as log,
        pytest.raises(UserError, match=r"metrics\.jsonl: no space is left there"),
    ):
        log.write("warm-up", 1, {"loss": 1.0})


def test_eval_names_a_checkpoint_that_does_not_exist(refused, tmp_path):
    assert "there is no directory nowhere" in refused(evaluation, "--checkpoint", "nowhere")
    assert "there is no directory nowhere" in refused(evaluation, SMOKE, "--checkpoint", "nowhere")
    assert written(tmp_path) == []


def test_eval_without_a_checkpoint_says_what_is_missing(capsys):
    assert "--checkpoint" in refused_by_tyro(capsys, evaluation)


def test_eval_of_a_hugging_face_directory_needs_a_configuration(refused, checkpoint):
    message = refused(evaluation, "--checkpoint", str(checkpoint))
    assert f"{checkpoint} is not a run directory" in message
    assert "mujica_jax.eval tiny_world --checkpoint" in message
    shutil.copytree(checkpoint, "run/policies/000001/model")
    policy = refused(evaluation, "--checkpoint", "run/policies/000001")
    assert "run/policies/000001 is one policy of a run: give --checkpoint RUN --policy N" in policy


def test_eval_of_a_hugging_face_directory_has_no_policies_to_choose_from(refused, checkpoint):
    message = refused(evaluation, SMOKE, "--checkpoint", str(checkpoint), "--policy", "2")
    assert "--policy is 2" in message
    assert "is not a run directory" in message


def test_eval_of_an_adapter_names_what_it_needs(refused, checkpoint, tmp_path):
    assert "there is no directory nowhere" in refused(
        evaluation, "--init", str(checkpoint), "--adapter", "nowhere"
    )
    (tmp_path / "alone").mkdir()
    message = refused(evaluation, "--init", str(checkpoint), "--adapter", "alone")
    assert "alone has no config.json of the run" in message
    assert "mujica_jax.eval tiny_world --init" in message
    open_run(tmp_path / "run", dataclasses.asdict(load_config(SMOKE)))
    assert "run is a run, and the policies of a run already include their adapters" in refused(
        evaluation, SMOKE, "--checkpoint", "run", "--adapter", "alone"
    )


def test_eval_of_a_run_names_the_policies_there_are(refused, tmp_path):
    store = open_run(tmp_path / "run", dataclasses.asdict(load_config(SMOKE)))
    assert "has no policy yet" in refused(evaluation, "--checkpoint", "run")
    store.commit_policy(0, lambda folder: (folder / "weights").write_text("some"))
    assert "000003 is not a committed policy; choose from the committed versions: [0]" in refused(
        evaluation, "--checkpoint", "run", "--policy", "3"
    )


def test_eval_of_a_damaged_policy_names_the_file(refused, tmp_path):
    store = open_run(tmp_path / "run", dataclasses.asdict(load_config(SMOKE)))
    store.commit_policy(0, lambda folder: (folder / "weights").write_text("some"))
    (tmp_path / "run" / "policies" / "000000" / "weights").write_text("same")
    assert "policies/000000/weights is damaged" in refused(evaluation, "--checkpoint", "run")


def test_eval_takes_the_latest_policy(tmp_path):
    store = Store(tmp_path / "run")
    open_run(tmp_path / "run", dataclasses.asdict(load_config(SMOKE)))
    for version in (0, 1, 2):
        store.commit_policy(version, lambda folder: (folder / "weights").write_text("some"))
    options, _ = evaluation.command_line(["--checkpoint", "run"])
    checkpoint = evaluation.find_checkpoint(options)
    assert checkpoint.version == 2
    assert checkpoint.model == Path("run/policies/000002/model")


def test_eval_joins_no_job_that_trained_the_run(tmp_path):
    where = DistributedConfig(coordinator="10.0.0.2:8476", num_processes=4)
    trained = dataclasses.replace(load_config(SMOKE), distributed=where)
    open_run(tmp_path / "run", dataclasses.asdict(trained))
    options, _ = evaluation.command_line(["--checkpoint", "run"])
    assert options.distributed == DistributedConfig()


def test_eval_that_may_not_write_says_so_before_it_evaluates(refused, checkpoint):
    Path("results").touch()
    message = refused(evaluation, SMOKE, "--checkpoint", str(checkpoint), "--out", "results")
    assert "results" in message
    assert "--out" in message


def test_a_run_whose_configuration_this_program_does_not_know_is_refused(refused, tmp_path):
    values = dataclasses.asdict(load_config(SMOKE))
    open_run(tmp_path / "run", values | {"engine": values["engine"] | {"max_num_seqz": 1}})
    assert (
        "unknown field 'max_num_seqz' of a stored EngineConfig; did you mean max_num_seqs?"
        in refused(evaluation, "--checkpoint", "run")
    )


def test_a_run_without_its_configuration_is_refused(refused, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text("{")
    assert "config.json is not JSON" in refused(evaluation, "--checkpoint", "run")
    shutil.rmtree(run)
    run.mkdir()
    assert "run is not a run directory" in refused(evaluation, "--checkpoint", "run")


@pytest.mark.parametrize(
    ("section", "field", "value", "named"),
    [
        ("trainer", "dtype", "bfloat16", "trainer.dtype needs bfloat16"),
        ("engine", "cache_dtype", "fp8", "engine.cache_dtype needs float8_e4m3fn"),
        ("engine", "weights", "int8", "engine.weights needs int8"),
    ],
)
def test_a_type_that_the_platform_does_not_compute_with_is_refused(
    monkeypatch, section, field, value, named
):
    """CPUs compute with all types.

    Here one of them raises as XLA does where it is not implemented.
    """
    plain = load_config(SMOKE)
    start.check_dtypes(plain)
    config = dataclasses.replace(
        plain, **{section: dataclasses.replace(getattr(plain, section), **{field: value})}
    )
    start.check_dtypes(config)
    possible = start._product_in

    def product_in(dtype):
        if dtype != jnp.float32:
            raise NotImplementedError(f"no {dtype.name} here")
        return possible(dtype)

    monkeypatch.setattr(start, "_product_in", product_in)
    start.check_dtypes(plain)
    with pytest.raises(
        UserError,
        match=rf"{named}, but cpu cannot compute with it \(no .* here\): choose another type",
    ):
        start.check_dtypes(config)
