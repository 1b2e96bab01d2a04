"""EviPath's teachers: how they are found, opened and asked, and what a model from scratch is shown
to be one.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mujica_jax.agents.protocol import one_line
from mujica_jax.config.agents import DecexConfig
from mujica_jax.config.checks import check, is_taught
from mujica_jax.config.files import load_config
from mujica_jax.config.schema import Config, EviPathConfig
from mujica_jax.errors import UserError
from mujica_jax.methods.evipath import authors as evipath_teacher
from mujica_jax.methods.evipath import method as evipath
from mujica_jax.models.tokenizer import Tokenizer
from mujica_jax.models.weights import save_checkpoint
from mujica_jax.runs import model
from mujica_jax.runs import setup as start
from mujica_jax.runs.run import Run
from mujica_jax.runtime.preemption import Preemption
from mujica_jax.trajectories.store import Store, open_run
from tests.helpers.little_agent import tokenizer
from tests.helpers.packed_rows import MODEL
from tests.helpers.paths import HELPERS
from tests.helpers.tiny_models import filled_decoder

SMOKE = str(HELPERS / "smoke_evipath_config.py")


def checkpoint(directory: Path, words: str, vocab_tokens: int) -> Tokenizer:
    """Save a small decoder of random weights with a tokenizer of its own."""
    tokenizer = Tokenizer.train([words], vocab_tokens)
    model = dataclasses.replace(
        MODEL,
        vocab_size=tokenizer.vocab_size,
        eos_token_ids=tuple(tokenizer.stop_token_ids),
        num_layers=2,
    )
    save_checkpoint(filled_decoder(model), directory, tokenizer=tokenizer)
    return tokenizer


def method_of(config: Config) -> EviPathConfig:
    assert isinstance(config.method, EviPathConfig)
    return config.method


def with_method(config: Config, **changes: Any) -> Config:
    return dataclasses.replace(config, method=dataclasses.replace(method_of(config), **changes))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("teachers")
    checkpoint(folder / "student", "Who is the director of The Purple Shore?", 300)
    checkpoint(
        folder / "teacher", "Where was the director of Amber Tide born? Ghent. Ilse Vand.", 330
    )
    return folder


@pytest.fixture(scope="module")
def run(folder) -> Iterator[Run]:
    """A run that begins with one checkpoint and has another one as teacher."""
    smoke = load_config(SMOKE)
    config = dataclasses.replace(
        smoke,
        init=str(folder / "student"),
        pretraining=dataclasses.replace(smoke.pretraining, steps=0),
        warmup=dataclasses.replace(smoke.warmup, steps=0),
        engine=dataclasses.replace(smoke.engine, max_num_seqs=2),
        agent=dataclasses.replace(
            smoke.agent, protocol="evipath", max_turn_tokens=8, max_trajectory_tokens=1024
        ),
        eval=dataclasses.replace(smoke.eval, control=False),
    )
    config = with_method(
        config,
        teacher="checkpoint",
        teacher_checkpoint=str(folder / "teacher"),
        teacher_max_tokens=2048,
        max_tries=1,
        teacher_prompt="zero_shot",
    )
    check(config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start, "use_compilation_cache", lambda: None)
        with start.open_training(config, folder / "run", Preemption()) as opened:
            yield opened


def test_a_second_checkpoint_with_another_tokenizer_writes_the_trajectories(run, folder):
    """The weights are random, so what the teacher writes is refused with its reasons.

    The run's own model is not asked.
    """
    author = evipath_teacher.find_author(run)()
    teacher = author.synthesizer._synthesis.teacher
    assert author.generator is not None
    assert author.generator is not run.generator
    assert teacher.tokenizer.vocab_size != run.tokenizer.vocab_size
    assert teacher.plans
    assert author.synthesizer._synthesis.prompt == "zero_shot"
    before = run.generator.statistics.generated_tokens
    with pytest.raises(
        UserError, match=r"nothing that the teacher checkpoint wrote for 1 questions can be used"
    ):
        evipath._synthesize(run, None, lambda: author, run.task.questions("train")[:1])  # pyright: ignore
    assert author.generator.statistics.generated_tokens > 0
    assert run.generator.statistics.generated_tokens == before


def test_a_teachers_prompt_without_room_is_refused_with_the_limit_before_anything_is_learnt(
    run, monkeypatch
):
    monkeypatch.setattr(run, "config", with_method(run.config, teacher_max_tokens=0))
    with pytest.raises(
        UserError, match=r"method.teacher_max_tokens is 1024: raise method.teacher_max_tokens"
    ):
        evipath_teacher.find_author(run)
    own = with_method(run.config, teacher="policy", mode="deductive", teacher_prompt="few_shot")
    monkeypatch.setattr(run, "config", own)
    with pytest.raises(UserError, match=r"agent.max_trajectory_tokens is 1024: raise agent"):
        evipath_teacher.find_author(run)


def test_a_teacher_that_is_not_there_is_named_before_anything_is_learnt(run, monkeypatch, tmp_path):
    monkeypatch.setattr(
        run, "config", with_method(run.config, teacher_checkpoint=str(tmp_path / "nowhere"))
    )
    with pytest.raises(UserError, match=r"there is no directory .*nowhere"):
        evipath_teacher.find_author(run)


def saved_run(directory: Path, config: Config) -> str:
    open_run(directory, dataclasses.asdict(config))
    Store(directory).commit_policy(0, lambda folder: tokenizer().save(folder / "model"))
    return str(directory)


def test_a_run_that_was_trained_as_another_agent_is_no_teacher(run, monkeypatch, tmp_path):
    agent = DecexConfig(
        prompt="brief", max_turn_tokens=8, max_trajectory_tokens=64, max_observation_tokens=8
    )
    other = saved_run(tmp_path / "run", dataclasses.replace(load_config(SMOKE), agent=agent))
    monkeypatch.setattr(run, "config", with_method(run.config, teacher_checkpoint=other))
    with pytest.raises(
        UserError,
        match="was trained as the agent decex, but a teacher of EviPath must be the agent mujica",
    ):
        evipath_teacher.find_author(run)


def test_what_a_teachers_run_says_otherwise_is_said(run, monkeypatch, tmp_path):
    other = saved_run(tmp_path / "run", load_config(SMOKE))
    messages: list[str] = []
    monkeypatch.setattr(run, "config", with_method(run.config, teacher_checkpoint=other))
    monkeypatch.setattr(run.progress, "line", messages.append)
    evipath_teacher.find_author(run)
    assert len(messages) == 1
    assert "the teacher was trained with other settings" in messages[0]
    assert "agent.protocol was 'mujica' and is now 'evipath'" in messages[0]


@pytest.mark.parametrize(
    ("chosen", "trained", "expected"),
    [("auto", "brief", "brief"), ("auto", None, "few_shot"), ("zero_shot", "brief", "zero_shot")],
)
def test_a_teacher_reads_prompts_as_it_was_trained_unless_told_otherwise(
    run, monkeypatch, chosen, trained, expected
):
    monkeypatch.setattr(run, "config", with_method(run.config, teacher_prompt=chosen))
    assert evipath_teacher._prompt(run, trained) == expected


@pytest.mark.parametrize("mode", ["abductive", "deductive"])
def test_a_policy_from_scratch_is_taught_the_teachers_prompts_in_every_mode(mode):
    """Two modes that are compared begin with the same policy and have the same teacher."""
    config = with_method(load_config("tiny_world_evipath"), mode=mode)
    check(config)
    assert is_taught(config)
    assert not is_taught(with_method(config, teacher="scripted"))
    assert not is_taught(dataclasses.replace(config, init="checkpoint"))
    assert not is_taught(
        dataclasses.replace(config, warmup=dataclasses.replace(config.warmup, steps=0))
    )


def test_the_lessons_of_the_tiny_world_are_told_conversations(tmp_path):
    """Every demonstration of the script is a lesson in each of the teacher's steps."""
    config = load_config("tiny_world_evipath")
    config = dataclasses.replace(
        config,
        task=dataclasses.replace(
            config.task, demonstrations=6, train_questions=50, augmented_copies=0
        ),
    )

    class Bare:
        def __init__(self) -> None:
            self.config = config
            self.preemption = Preemption()
            self.task = start.build_task(config)
            self.tokenizer = model._trained_tokenizer(config, self.task, Store(tmp_path))

    bare: Any = Bare()
    rows = evipath_teacher.lessons(bare)
    planners = [row for row in rows if row.role == "planner"]
    workers = [row for row in rows if row.role == "worker"]
    assert len(planners) == 6
    assert len(workers) % 2 == 0
    assert len(workers) >= 12
    for row in planners:
        opening = one_line(row.turns[0].text)
        first = row.turns[1]
        assert opening.startswith("Answer: ")
        assert "Supporting evidences:" in opening
        assert first.trained
    answers = [row for row in workers if "Golden evidence" not in row.turns[0].text]
    assert len(answers) == len(workers) // 2
    assert all("<answer>" in row.turns[1].text for row in answers)
    longest = max(len(row.token_ids) for row in rows)
    assert longest <= config.trainer.sequence_length <= config.agent.max_trajectory_tokens
