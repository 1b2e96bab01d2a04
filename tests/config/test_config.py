"""Every field is read and has an effect.

Configurations survive JSON, and flags reach their fields.
"""

import ast
import dataclasses
import functools
import itertools
import json
import math
import re
import subprocess
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

from mujica_jax.agents.faults import FaultGuard
from mujica_jax.config import schema as config_module
from mujica_jax.config.checks import check
from mujica_jax.config.command_line import command_line
from mujica_jax.config.files import CONFIG_FOLDER, load_config
from mujica_jax.config.kinds import of_kind
from mujica_jax.config.schema import (
    AgentConfig,
    Config,
    DapoConfig,
    DecexTreeConfig,
    DistributedConfig,
    DpoConfig,
    EngineConfig,
    EvalConfig,
    EviPathConfig,
    FaultConfig,
    GrpoConfig,
    JudgeConfig,
    MetricsConfig,
    ModelConfig,
    MujicaConfig,
    MygoConfig,
    PassageSearch,
    PretrainingConfig,
    ProfileConfig,
    RemoteConfig,
    Reranking,
    SamplingConfig,
    SftConfig,
    StagedRewardConfig,
    TaskConfig,
    TinyWorldConfig,
    TrainerConfig,
    TwoWikiConfig,
    WarmupConfig,
)
from mujica_jax.config.stored import from_dict
from mujica_jax.errors import UserError
from mujica_jax.inference.engine import factory as engines
from mujica_jax.inference.engine.base import EngineOptions
from mujica_jax.learning.optimizer import make_optimizer
from mujica_jax.learning.packing import PackedRows
from mujica_jax.learning.trainer import Trainer
from mujica_jax.methods import grpo as policy_gradient
from mujica_jax.methods import mygo
from mujica_jax.methods import supervised as warmup
from mujica_jax.methods.evipath import authors as evipath_teacher
from mujica_jax.methods.evipath import method as evipath
from mujica_jax.models.decoder import Decoder
from mujica_jax.models.tokenizer import Tokenizer
from mujica_jax.records import Conversation, Trajectory, Turn
from mujica_jax.report.results import PhaseRow
from mujica_jax.report.stage_clock import StageClock
from mujica_jax.rewards.reward import find_reward
from mujica_jax.runs import evaluation as scoring
from mujica_jax.runs import learning, model, parts
from mujica_jax.runs import setup as start
from mujica_jax.runs.learning import LearningPlan
from mujica_jax.runs.phases import Phase, PhaseCost, PhaseResult
from mujica_jax.runs.run import Run
from mujica_jax.runs.versions import use_policy
from mujica_jax.runtime.preemption import Preemption
from mujica_jax.tasks.task import Task
from mujica_jax.trajectories.store import Store
from tests.helpers.episodes import episode
from tests.helpers.extras import needs
from tests.helpers.fake_runs import call_fakes
from tests.helpers.packed_rows import MODEL, TRAINER
from tests.helpers.paths import HELPERS, ROOT

PACKAGE = ROOT / "mujica_jax"
SMOKE = HELPERS / "smoke_config.py"
FILES = [
    *sorted(CONFIG_FOLDER.glob("*.py")),
    *sorted(HELPERS.glob("*_config.py")),
]
# The last names of the expressions that hold a section.
SECTIONS: dict[type, tuple[str, ...]] = {
    Config: ("config",),
    TinyWorldConfig: ("config", "_config"),
    TwoWikiConfig: ("config",),
    ModelConfig: ("model",),
    MujicaConfig: ("agent", "_config"),
    EngineConfig: ("engine",),
    TrainerConfig: ("trainer", "config"),
    PretrainingConfig: ("pretraining", "config"),
    WarmupConfig: ("warmup", "config"),
    SamplingConfig: ("sampling",),
    MygoConfig: ("method", "config", "method_of(run, MygoConfig)"),
    EviPathConfig: ("method", "config"),
    GrpoConfig: ("config", "method", "method_of(run, PolicyGradientConfig)"),
    DapoConfig: ("config", "method", "method_of(run, PolicyGradientConfig)"),
    StagedRewardConfig: ("config", "staged"),
    JudgeConfig: ("judge", "remote"),
    FaultConfig: ("faults", "_config"),
    DecexTreeConfig: ("method", "config", "_config", "method_of(run, DecexTreeConfig)"),
    SftConfig: ("method", "config"),
    DpoConfig: ("method", "config"),
    EvalConfig: ("eval",),
    DistributedConfig: ("config",),
    MetricsConfig: ("metrics", "config"),
    ProfileConfig: ("profile", "config"),
    RemoteConfig: ("remote",),
    PassageSearch: ("config",),
    Reranking: ("config",),
}
SECTIONS |= {
    kind: ("config", "_config", "limits", "agent")
    for kind in (*AgentConfig.__args__, *TaskConfig.__args__)
    if kind not in SECTIONS
}
# Without `kind`, which says which section it is.
FIELDS = [
    (kind, field.name)
    for kind in SECTIONS
    for field in dataclasses.fields(kind)
    if field.name != "kind"
]


@pytest.fixture(scope="module")
def smoke() -> Config:
    return load_config(str(SMOKE))


def changed(config: Config, section: str, **fields: Any) -> Config:
    changed_section = dataclasses.replace(getattr(config, section), **fields)
    return dataclasses.replace(config, **{section: changed_section})


def reads() -> Iterator[tuple[str, str]]:
    """Return (last name of the expression, field) of every attribute that the package reads outside
    of its own package for configurations.
    """
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name == "config":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                yield ast.unparse(node.value).rpartition(".")[2], node.attr


def test_every_section_is_looked_at():
    known = {kind for kind in vars(config_module).values() if dataclasses.is_dataclass(kind)}
    assert known | {*AgentConfig.__args__, *TaskConfig.__args__} == set(SECTIONS)


def test_every_field_is_read():
    fields_read = set(reads())
    unread = [
        f"{kind.__name__}.{name}"
        for kind, name in FIELDS
        if not any((end, name) in fields_read for end in SECTIONS[kind])
    ]
    assert not unread


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_configuration_survives_json_and_agrees_with_itself(path):
    config = load_config(str(path))
    assert from_dict(Config, json.loads(json.dumps(dataclasses.asdict(config)))) == config
    check(config)


def test_flags_reach_their_fields():
    two_wiki = str(SMOKE.with_name("smoke_two_wiki_config.py"))
    flags = [
        "--seed",
        "3",
        "--run",
        "runs/a",
        "--task.data-dir",
        "elsewhere",
        "--engine.no-prefix-reuse",
    ]
    config = command_line([two_wiki, *flags], default="tiny_world")
    assert isinstance(config.task, TwoWikiConfig)
    assert config.seed == 3
    assert config.run == "runs/a"
    assert config.task.data_dir == "elsewhere"
    assert config.engine.prefix_reuse is False


def test_a_section_of_another_kind_keeps_what_was_chosen_and_no_default():
    chosen: dict[str, Any] = {
        "rounds": 7,
        "rounds_per_evaluation": 1,
        "group_size": 4,
        "epochs": 2,
        "clip_low": 0.1,
        "learning_rate": 1e-3,
        "end_learning_rate": 1e-4,
    }
    grpo = GrpoConfig(**chosen)
    dapo = of_kind(
        dataclasses.replace(load_config("tiny_world"), method=grpo), "method", "dapo"
    ).method
    assert dapo == DapoConfig(**chosen)
    assert isinstance(dapo, DapoConfig)
    assert dapo.dynamic_sampling
    assert dapo.clip_high > grpo.clip_high


@pytest.mark.parametrize(
    "flag", ["--method.fixed-threshold", "--method.fixed_threshold", "--method.initial-threshold"]
)
def test_the_first_threshold_is_set_by_its_flag_and_by_that_of_the_last_release(flag):
    for words in ([flag, "0.5"], [f"{flag}=0.5"]):
        method = command_line([str(SMOKE), *words], default="tiny_world").method
        assert isinstance(method, MygoConfig)
        assert method.initial_threshold == 0.5


def test_a_run_of_the_last_release_is_read_with_its_threshold():
    stored = json.loads(json.dumps(dataclasses.asdict(load_config(str(SMOKE)))))
    del stored["method"]["initial_threshold"]
    stored["method"] |= {"threshold": "fixed", "fixed_threshold": 0.25}
    method = from_dict(Config, stored).method
    assert isinstance(method, MygoConfig)
    assert (method.keeps_threshold, method.initial_threshold) == (True, 0.25)


def test_a_field_that_is_gone_is_left_out_of_a_stored_configuration():
    config = load_config("two_wiki_text_smollm2")
    stored = json.loads(json.dumps(dataclasses.asdict(config)))
    stored["task"]["index_rows"] = "host"
    assert from_dict(Config, stored) == config


def test_a_file_may_stand_behind_flags():
    config = command_line(["--seed", "3", str(SMOKE), "--run", "runs/a"], default="tiny_world")
    assert config == dataclasses.replace(load_config(str(SMOKE)), seed=3, run="runs/a")
    assert command_line(["--seed=3", str(SMOKE), "--run=runs/a"], default="tiny_world") == config
    assert command_line(["--run", "odd.py"], default="tiny_world").run == "odd.py", (
        "a flag's value stays one"
    )


def test_without_a_file_the_default_is_taken():
    config = command_line(["--seed", "3"], default="tiny_world")
    assert config == dataclasses.replace(load_config("tiny_world"), seed=3)


@pytest.mark.parametrize("program", ["train", "eval"])
def test_help_loads_no_framework(program):
    command = (
        f"import sys; from mujica_jax.commands import {program} as program\n"
        "try: program.main(['--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "print([name for name in ('jax', 'tensorflow', 'torch', 'transformers') if name in "
        "sys.modules])"
    )
    shown = subprocess.run(
        [sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert "--engine.max-num-seqs" in shown
    assert shown.splitlines()[-1] == "[]"


@pytest.mark.parametrize("name", ["tiny_world", "tiny_world.py", "configs/tiny_world.py"])
def test_a_configuration_has_several_names(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert load_config(name).name == "tiny_world"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def get_config(:\n", "cannot be loaded"),
        ("import nothing_of_this_name\n", "cannot be loaded"),
        ("x = 1\n", "must define get_config"),
        ("x = {}['a']\n", r"cannot be loaded \(KeyError: 'a'\): it must define get_config"),
        ("def get_config():\n    return 3\n", "returned a int; it must return a Config"),
    ],
)
def test_a_configuration_file_that_is_wrong_is_explained(tmp_path, text, words):
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(UserError, match=words):
        load_config(str(tmp_path / "mine.py"))


@pytest.mark.parametrize(
    ("name", "field", "value", "bound"),
    [
        ("two_wiki_kg_nano", "top_k", 0, "at least 1"),
        ("two_wiki_kg_nano", "dev_questions", 0, "at least 1"),
        ("two_wiki_kg_nano", "triple_demonstrations", -1, "at least 0"),
        ("two_wiki_kg_nano", "hold_out_percent", 0, "at least 1"),
        (
            "two_wiki_kg_nano",
            "hold_out_percent",
            100,
            "below 100, so that both splits have questions",
        ),
        ("two_wiki_kg_nano", "queries_per_second", 0.0, "above 0"),
        ("musique_v5e", "dev_percent", 101, "at most 100"),
        ("musique_v5e", "max_questions", 0, "at least 1"),
    ],
)
def test_settings_of_a_task_without_meaning_are_refused(name, field, value, bound):
    with pytest.raises(UserError, match=rf"task\.{field} is {value} and must be {bound}"):
        check(changed(load_config(name), "task", **{field: value}))


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("musique_v5e", "index", "here"),
        ("musique_v5e", "retriever", "dense"),
        ("two_wiki_kg_nano", "top_k", 3),
    ],
)
def test_own_passages_of_questions_are_searched_by_words_alone(name, field, value):
    config = changed(load_config(name), "task", setting="distractor")
    if name == "musique_v5e":
        config = changed(config, "task", index=None, retriever="bm25")
        check(config)
    with pytest.raises(
        UserError, match=r"task\.setting distractor searches each question's own passages"
    ):
        check(changed(config, "task", **{field: value}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rerank_candidates": 20}, r"rerank_candidates is 20, but there is no reranker"),
        ({"reranker": "here", "environment": "graph"}, r"task\.environment is graph"),
        (
            {"reranker": "here", "top_k": 5, "rerank_candidates": 4},
            r"rerank_candidates is 4, but task\.top_k is 5: set .* to more than 5",
        ),
    ],
    ids=str,
)
def test_a_reranker_without_passages_or_candidates_is_refused(changes, message):
    config = changed(load_config("two_wiki_kg_nano"), "task", environment="text", top_k=3)
    check(changed(config, "task", reranker="here"))
    with pytest.raises(UserError, match=message):
        check(changed(config, "task", **changes))


# What follows perturbs one field at a time and demands that something changes; of the task,
# `tasks/tiny_world/test_world.py` does.


def assert_each_changes(config: Config, section: str, values: Mapping[str, Any], seen_with) -> None:
    """Check that each of `values` changes `seen_with(config)`.

    `values` holds another value for every field of a section that matters to it.
    """
    plain = seen_with(config)
    same = [
        name
        for name, value in values.items()
        if seen_with(changed(config, section, **{name: value})) == plain
    ]
    assert not same, f"{section}: {same} change nothing"


def test_every_field_of_the_model_changes_the_decoder(smoke):
    values = {
        "family": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_layers": 3,
        "rope_theta": 5e5,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
    }
    assert set(values) | {"vocab_tokens", "embedding_range"} == {
        field.name for field in dataclasses.fields(ModelConfig)
    }
    assert_each_changes(
        smoke, "model", values, lambda config: model.decoder_config(config, 300, (1,))
    )


def test_the_embedding_is_drawn_as_wide_as_asked(smoke):
    size = model.decoder_config(smoke, 300, (1,))
    for width in (0.05, 0.15):
        decoder = model.new_decoder(changed(smoke, "model", embedding_range=width), size)
        assert abs(float(decoder.embedding[...].std()) / width - 1) < 0.05
        assert abs(float(decoder.layers.up_kernel[...].std()) / model.INITIALIZER_RANGE - 1) < 0.05


def test_every_field_of_the_engine_reaches_it(smoke, decoder, monkeypatch):
    class Told(engines.ContiguousEngine):
        def __init__(self, decoder: Decoder, options: EngineOptions) -> None:
            self.options = options

    def mesh_of(engine: EngineConfig) -> Mesh:
        """A mesh of the one device that there is, whose name says how many are asked for."""
        return Mesh(np.asarray(jax.devices()[:1]), (f"tensor {engine.tensor_parallel_size}",))

    monkeypatch.setattr(engines, "ContiguousEngine", Told)
    monkeypatch.setattr(engines, "engine_mesh", mesh_of)
    monkeypatch.setattr(
        parts, "BatchedGenerator", lambda engine, **options: (engine.options, options)
    )
    tokenizer: Any = types.SimpleNamespace(stop_token_ids=(1,), token_bytes=None)
    values = {
        "max_num_seqs": 8,
        "decode_steps_per_call": 4,
        "prefill_tokens": 512,
        "prefix_reuse": False,
        "tensor_parallel_size": 2,
        "page_tokens": 16,
        "cache_gigabytes": 2e-4,
        "cache_dtype": "fp8",
    }
    elsewhere = {"weights", "kind", "factory"}  # tested below, and in test_engine_kind.py
    assert set(values) | elsewhere == {field.name for field in dataclasses.fields(EngineConfig)}
    assert_each_changes(
        smoke, "engine", values, lambda config: parts.make_generator(decoder, config, tokenizer)
    )


@needs("qwix", "qwix")
def test_every_storage_of_the_engines_weights_reaches_it(smoke, decoder):
    policy: Any = types.SimpleNamespace(
        policy=lambda state: nnx.state(decoder),
        decoder=decoder,
        clock=StageClock(),
        trainer=None,
        generator=None,
    )
    policy.trainer = policy

    def seen(config: Config) -> str:
        weights_of_engine: list[nnx.State] = []
        policy.config = config
        policy.generator = types.SimpleNamespace(
            set_weights=lambda weights, version: weights_of_engine.append(weights),
            release_weights=lambda: None,
        )
        use_policy(policy, state=lambda: None, version=1)  # pyright: ignore[reportArgumentType]
        return str(jax.tree.map(lambda array: array.dtype, weights_of_engine))

    types_of_storages = {
        seen(changed(smoke, "engine", weights=storage)) for storage in ("compute", "int8", "fp8")
    }
    assert len(types_of_storages) == 3


def test_the_run_draws_adapters_by_its_seed(smoke):
    seeds = []
    policy: Any = types.SimpleNamespace(config=smoke, load_decoder=lambda: None)
    policy.trainer = types.SimpleNamespace(initial_state=lambda decoder, seed: seeds.append(seed))
    Run.initial_state(policy)
    assert seeds == [smoke.seed]


def test_every_field_of_the_optimiser_changes_its_updates(smoke):
    # a matrix, so that it decays and Muon takes it
    params = {"layers": {"up_kernel": jnp.ones((1, 2, 2))}}

    def seen(config: Config) -> list:
        optimizer = make_optimizer(config.trainer)
        state = optimizer.init(params)
        updates = params
        for scale in (3.0, 1.0, 4.0):
            gradient = {"layers": {"up_kernel": jnp.full((1, 2, 2), scale)}}
            updates, state = optimizer.update(gradient, state, params)
        return updates["layers"]["up_kernel"].tolist()

    values = {
        "weight_decay": 0.3,
        "b1": 0.5,
        "b2": 0.5,
        "clip_norm": 3.0,
        "first_moment_dtype": "bfloat16",
        "optimizer": "muon",
    }
    assert_each_changes(smoke, "trainer", values, seen)


def test_a_phase_keeps_as_many_checkpoints_as_configured(smoke, monkeypatch, tmp_path):
    class Asked(Exception):
        pass

    def asked(directory: Path, *, keep: int, **_: object) -> None:
        raise Asked(keep)

    monkeypatch.setattr("mujica_jax.learning.checkpoints.Checkpoints", asked)
    own: Any = types.SimpleNamespace(
        store=Store(tmp_path), config=changed(smoke, "trainer", keep_checkpoints=7), trainer=None
    )
    own.generator = types.SimpleNamespace(release_weights=lambda: None)
    with pytest.raises(Asked, match="7"):
        plan = LearningPlan(steps=1, peak=1.0, end_value=0.0)
        learning.train(own, "warm-up", None, None, plan=plan)  # pyright: ignore


def test_help_texts_stand_where_they_are_looked_for():
    """A help text stands behind a field on its own line, or on whole lines above it: the formatter
    moves a comment that makes a line too long.
    """
    lines = Path(config_module.__file__).read_text().splitlines()
    wrapped = [line for line in lines if re.match(r"    (\w+: .*\($|\).*#)", line)]
    assert wrapped == []


def test_help_says_what_every_field_is():
    """A field without its own comment is shown with that of the field above it, or with none.

    The meaning of a section is its docstring.
    """
    bare = []
    for file in Path(config_module.__file__).parent.glob("*.py"):
        lines = file.read_text().splitlines()
        for section in ast.walk(ast.parse(file.read_text())):
            if not isinstance(section, ast.ClassDef):
                continue
            for field in section.body:
                if not isinstance(field, ast.AnnAssign):
                    continue
                line = lines[field.lineno - 1]
                line_above = lines[field.lineno - 2]
                has_comment = "#" in line or line_above.lstrip().startswith("#")
                if not has_comment and not re.search(r"kind|ClassVar|Config", line):
                    bare.append(f"{section.name}.{ast.unparse(field.target)}")
    assert bare == []


@functools.cache
def program(**fields: Any) -> str:
    """Return the training step as it is lowered with these fields of the trainer."""
    config = dataclasses.replace(TRAINER, sequence_length=16, **fields)
    return Trainer(MODEL, config).lower_step().as_text()


def test_every_field_of_the_step_changes_its_program():
    values = {
        "accumulation_steps": 2,
        "z_loss": 1e-4,
        "parameter_dtype": "bfloat16",
        "dtype": "bfloat16",
    }
    assert [name for name, value in values.items() if program(**{name: value}) == program()] == []


def test_every_choice_of_recomputation_is_another_program():
    assert len({program(remat="none"), program(remat="dots"), program(remat="full")}) == 3
    assert program(remat="none") == program(), "auto, and one layer"


def test_what_counts_as_a_spike_is_part_of_the_program():
    """The permitted number of skips in a row is read with the metrics: `test_spike_guard.py`."""
    watched = [
        {"spike_deviations": 6.0},
        {"spike_deviations": 5.0},
        {"spike_deviations": 6.0, "spike_window_steps": 9},
    ]
    assert len({program(), *(program(**fields) for fields in watched)}) == 4
    assert program(spike_window_steps=9) == program(), "without deviations nothing is watched"


@functools.cache
def task_and_tokenizer(config: Config) -> tuple[Task, Tokenizer, list[Conversation]]:
    """Return a task, its tokenizer and some rows to train on.

    They are made once for all configurations of one task.
    """
    task: Any = start.build_task(config)
    own: Any = types.SimpleNamespace(config=config, task=task)
    own.tokenizer = Tokenizer.train(task.tokenizer_text(), config.model.vocab_tokens)
    question_turn = Turn(
        role="context", token_ids=tuple(own.tokenizer.encode_plain("Who?")), text="Who?"
    )
    documents = list(itertools.islice(warmup._documents(own, stream=0), 40))
    rows = learning.rows_that_fit(own, documents)
    model_turns = [
        dataclasses.replace(row.turns[0], logprobs=(-1.0,) * len(row.token_ids)) for row in rows
    ]
    conversations = [
        dataclasses.replace(row, turns=(question_turn, turn))
        for row, turn in zip(rows, model_turns, strict=True)
    ]
    return task, own.tokenizer, conversations


class SilentProgress:
    def stage(self, name: str, **options: Any):
        return self

    def update(self, done: int, **figures: Any) -> None:
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        pass


class RecordedRun(SilentProgress):
    """A stand-in for a Run.

    It plays scripts instead of a model, learns nothing, and records its calls.
    """

    def __init__(self, config: Config, root: Path) -> None:
        self.config = config
        self.store = Store(root)
        self.task, self.tokenizer, self.rows = task_and_tokenizer(
            dataclasses.replace(load_config(str(SMOKE)), task=config.task)
        )
        self.agent = parts.make_agent(config.agent, self.tokenizer)
        self.faults = FaultGuard(config.faults)
        self.reward = find_reward(config.reward, self.task.rule)
        self.progress = self.metrics = self.clock = self
        self.counters: Any = types.SimpleNamespace(figures=dict)
        self.generator: Any = types.SimpleNamespace(release_weights=lambda: None)
        self.trainer: Any = types.SimpleNamespace(
            score=lambda state, rows: rows.columns["sampled_log_probs"]
        )
        self.preemption = Preemption()
        self.asked: list = []
        self.done = 0

    def line(self, text: str) -> None:
        self.asked.append(text)

    def flush(self) -> None:
        pass

    def write(self, phase: str, step: int, values: Mapping[str, Any]) -> None:
        self.asked.append((phase, step, dict(values)))

    def initial_state(self) -> None:
        return None

    def committed_state(self, version: int) -> None:
        self.asked.append(("reference", version))

    def remove_past_checkpoints(self) -> None:
        pass

    def use_policy(self, state: object, version: int) -> None:
        self.asked.append(("policy", version))

    def commit_policy(self, state: object, version: int) -> None:
        self.asked.append(("commit", version))

    def compare(
        self, state: object, trajectories: list[Trajectory], number: int, version: int
    ) -> None:
        self.asked.append(("compare", len(trajectories), number))

    def counted(self, kind: str, step: int):
        return self

    def read_shards(self, entries: object) -> None:
        return None

    def play_attempts(
        self, number: int, shard: int, attempts, on_episode, *, agent=None, **_
    ) -> tuple[Any, list[Trajectory]]:
        return self.play_waves(
            number, shard, lambda earlier: [] if earlier else attempts, on_episode
        )

    def play_waves(
        self, number: int, shard: int, wave, on_episode, *, agent=None
    ) -> tuple[Any, list[Trajectory]]:
        """Play all waves of attempts. Every third attempt is right."""
        trajectories: list[Trajectory] = []
        while attempts := wave(trajectories):
            described = [
                (attempt.question.id, attempt.number, attempt.seed, attempt.temperature)
                for attempt in attempts
            ]
            self.asked.append((number, shard, described))
            for attempt in attempts:
                self.done += 1
                trajectories.append(self._episode(attempt, right=self.done % 3 == 0))
        entry = self.store.write_shard(number, shard, trajectories) if trajectories else None
        return entry, trajectories

    def train(self, name: str, start, rows: PackedRows, *, plan: LearningPlan):
        start()
        self.asked.append((name, rows.num_rows, rows.trained_tokens, plan))
        return lambda: None

    def finish(self, phase: Phase, state: object, cost: PhaseCost) -> PhaseResult:
        self.asked.append((phase, dataclasses.replace(cost, start_time=0.0)))
        return PhaseResult(
            row=PhaseRow(name=phase.name, em=0, f1=0, questions=1, seconds=0),
            forward_tokens=cost.forward_tokens,
            trained_slots=cost.trained_slots,
        )

    def _episode(self, attempt, *, right: bool) -> Trajectory:
        conversation = self.rows[self.done % len(self.rows)]
        conversations = (
            dataclasses.replace(conversation, role=role) for role in ("planner", "worker")
        )
        return episode(
            *conversations,
            question_id=attempt.question.id,
            attempt=attempt.number,
            seed=attempt.seed,
            answer=attempt.question.answers[0] if right else "",
            reward=float(right),
        )


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """Return the calls that a run would make under a configuration."""
    call_fakes(monkeypatch)
    numbers = iter(range(1000))

    def play(config: Config, method) -> list:
        recorded: Any = RecordedRun(config, tmp_path / str(next(numbers)))
        method(recorded)
        return recorded.asked

    return play


def test_every_field_of_mygo_changes_what_a_run_does(smoke, asked):
    def rounds(config: Config) -> list:
        return asked(config, lambda run: mygo._run_rounds(run, run.initial_state, run.rows))

    values = {
        "rounds": 3,
        "max_attempts": 4,
        "keep_per_question": 2,
        "epochs": 1,
        "replay": 2.0,
        "learning_rate": 1e-3,
        "end_learning_rate": 1e-4,
        "schedule": "offline",
        "threshold": "fixed",
        "initial_threshold": 0.9,
        "loss": "mujica_jax.learning.losses:MLE",
    }
    assert set(values) | {"kind"} == {field.name for field in dataclasses.fields(MygoConfig)}
    assert_each_changes(changed(smoke, "method", max_attempts=3), "method", values, rounds)
    fixed = changed(smoke, "method", max_attempts=3, threshold="fixed")
    assert_each_changes(fixed, "method", {"initial_threshold": 1.0}, rounds)
    sampling = {"questions_per_round": 20, "questions_per_shard": 5, "temperature": 0.7}
    assert set(sampling) | {"workers"} == {
        field.name for field in dataclasses.fields(SamplingConfig)
    }
    assert_each_changes(smoke, "sampling", sampling, rounds)
    assert_each_changes(smoke, "trainer", {"sequence_length": 256, "batch_size": 2}, rounds)
    few = changed(changed(smoke, "task", demonstrations=10), "method", rounds=1)
    assert_each_changes(few, "eval", {"control": False}, lambda config: asked(config, mygo.mygo))


def test_every_field_of_evipath_changes_what_a_run_does(smoke, asked, monkeypatch):
    """Compare what the synthesis receives and what is learnt.

    `test_evipath.py` tests what each field does.
    """

    def seen(config: Config) -> list:
        arguments: list = []
        monkeypatch.setattr(
            evipath_teacher, "Synthesizer", lambda synthesis: arguments.append(synthesis.method)
        )
        monkeypatch.setattr(evipath_teacher, "find_similarity", arguments.append)
        monkeypatch.setattr(evipath, "lessons", lambda run: ())
        return [
            arguments,
            [phase for phase in asked(config, evipath.evipath) if "warm-up" not in phase],
        ]

    config = dataclasses.replace(
        load_config(str(SMOKE.with_name("smoke_evipath_config.py"))),
        task=changed(smoke, "task", demonstrations=10).task,
    )
    values = {
        "mode": "deductive",
        "teacher": "policy",
        "tune": "executor",
        "max_tries": 1,
        "embedder": "minilm",
        "threshold": 0.5,
        "learning_rate": 1e-3,
        "end_learning_rate": 1e-4,
        "epochs": 1,
        "warmup_ratio": 0.5,
        "teacher_prompt": "few_shot",
        "teacher_checkpoint": "runs/other",
        "distractors": "retrieved",
        "trajectories": 3,
        "teacher_max_tokens": 900,
        "remote": RemoteConfig(concurrency=3),
        "loss": "mujica_jax.learning.losses:MLE",
    }
    assert set(values) | {"kind"} == {field.name for field in dataclasses.fields(EviPathConfig)}
    assert_each_changes(config, "method", values, seen)
    assert_each_changes(
        config,
        "sampling",
        {"questions_per_round": 20, "questions_per_shard": 5, "temperature": 0.7},
        seen,
    )


def test_every_field_of_grpo_and_dapo_changes_what_a_run_does(smoke, asked):
    def rounds(config: Config) -> list:
        return asked(config, lambda run: policy_gradient._run_rounds(run, run.initial_state))

    shared = {
        "rounds": 3,
        "rounds_per_evaluation": 2,
        "group_size": 3,
        "learning_rate": 1e-3,
        "epochs": 1,
        "end_learning_rate": 1e-4,
        "mini_batch_size": 2,
        "clip_low": 0.1,
        "clip_high": 0.4,
        "importance_cap": 0.0,
        "overlong_tokens": 40,
        "dynamic_sampling": False,
        "kl_coefficient": 0.1,
    }
    begin: dict[str, Any] = {
        "rounds": 2,
        "rounds_per_evaluation": 1,
        "group_size": 2,
        "epochs": 2,
        "learning_rate": 2e-3,
        "end_learning_rate": 2e-4,
    }
    dapo = DapoConfig(**begin, max_sampled_batches=2, overlong_cache_tokens=30)
    assert set(shared) | {"kind", "max_sampled_batches", "overlong_cache_tokens"} == {
        field.name for field in dataclasses.fields(DapoConfig)
    }
    few = changed(dataclasses.replace(smoke, method=dapo), "sampling", questions_per_round=4)
    assert_each_changes(few, "method", shared | {"max_sampled_batches": 1}, rounds)
    long = changed(few, "method", overlong_tokens=60)
    assert_each_changes(long, "method", {"overlong_cache_tokens": 60}, rounds)
    grpo = dataclasses.replace(few, method=GrpoConfig(**begin))
    assert_each_changes(grpo, "method", {"dynamic_sampling": True}, rounds)
    assert_each_changes(
        grpo,
        "sampling",
        {"questions_per_round": 5, "questions_per_shard": 3, "temperature": 0.7},
        rounds,
    )


def test_every_field_of_pretraining_and_warm_up_changes_what_a_run_does(smoke, asked):
    def warm_up(config: Config) -> list:
        return asked(config, warmup.warm_up)

    few = changed(smoke, "task", demonstrations=10)
    pretraining = {
        "documents": 100,
        "steps": 10,
        "learning_rate": 5e-3,
        "end_learning_rate": 5e-4,
        "row_parts": 2,
    }
    assert set(pretraining) == {field.name for field in dataclasses.fields(PretrainingConfig)}
    assert_each_changes(few, "pretraining", pretraining, warm_up)
    from_scratch = {
        "steps": 60,
        "learning_rate": 1e-2,
        "end_learning_rate": 1e-4,
        "pretraining_share": 0.5,
        "miss_rate": 0.5,
        "epochs": 1,
        "lr_warmup_steps": 0,
    }
    assert_each_changes(few, "warmup", from_scratch, warm_up)
    few_shot = {"source": "scripted", "few_shot_trajectories": 40, "few_shot_attempts": 1}
    assert set(from_scratch | few_shot) == {
        field.name for field in dataclasses.fields(WarmupConfig)
    }
    with_checkpoint = changed(
        dataclasses.replace(few, init="checkpoint"),
        "warmup",
        source="few_shot",
        few_shot_trajectories=30,
    )
    assert_each_changes(with_checkpoint, "warmup", few_shot, warm_up)


@pytest.mark.parametrize(
    ("changes", "passes", "rise"),
    [
        # As MyGO: one pass on a plain cosine.
        ({"steps": 500, "epochs": 1, "lr_warmup_steps": 0}, 1, 0),
        ({"steps": 500, "epochs": 3, "lr_warmup_steps": 2}, 3, 2),
        ({"steps": 2, "epochs": 3}, None, 2),  # no more updates than steps, and no longer a rise
        ({"steps": 30}, None, 20),
    ],
)
def test_a_warm_up_makes_its_steps_or_its_passes_whichever_is_less(
    smoke, asked, changes, passes, rise
):
    few = changed(changed(smoke, "task", demonstrations=10), "warmup", **changes)
    (learnt,) = [phase for phase in asked(few, warmup.warm_up) if phase[0] == "warm-up"]
    _, num_rows, _, plan = learnt
    if passes is None:
        updates = changes["steps"]
    else:
        updates = math.ceil(num_rows * passes / few.trainer.batch_size)
    assert num_rows > few.trainer.batch_size
    assert plan.steps == updates <= changes["steps"]
    assert plan.warmup_steps == rise


def test_every_limit_of_the_agents_changes_demonstrations(smoke, asked):
    def demonstrations(config: Config) -> list:
        def play(recorded: RecordedRun) -> None:
            trajectories, _ = warmup._scripted(recorded)
            for trajectory in trajectories:
                token_ids = [conversation.token_ids for conversation in trajectory.conversations]
                recorded.asked.append((trajectory.stop_reason, token_ids))

        return asked(config, play)

    values = {
        "prompt": "zero_shot",
        "max_iterations": 1,
        "max_searches_per_turn": 1,
        "split": False,
        "parallel": False,
        "protocol": "evipath",
        "max_turn_tokens": 20,
        "max_trajectory_tokens": 100,
        "max_observation_tokens": 20,
    }
    assert set(values) | {"kind"} == {field.name for field in dataclasses.fields(MujicaConfig)}
    assert_each_changes(smoke, "agent", values, demonstrations)


def test_the_fields_of_evaluation_choose_the_questions_and_the_temperature(smoke, monkeypatch):
    async def played(agent, attempts, *_, hooks, **options):
        episodes = [
            types.SimpleNamespace(
                question_id=attempt.question.id,
                final_answer="",
                is_environment_fault=False,
                temperature=attempt.temperature,
            )
            for attempt in attempts
        ]
        for finished in episodes:
            hooks.on_episode(finished)
        return episodes

    monkeypatch.setattr(scoring, "run_episodes", played)
    monkeypatch.setattr(
        scoring,
        "summarise",
        lambda questions, played, *_: types.SimpleNamespace(left_out=0, played=played),
    )

    task, *_ = task_and_tokenizer(smoke)

    def seen(config: Config) -> scoring.Scores:
        generator: Any = types.SimpleNamespace(reset_cache=lambda: None, policy_version=0)
        nothing: Any = None
        return scoring.PolicyEvaluator(
            name="warm-up",
            task=task,
            config=config,
            agent=nothing,
            reward=nothing,
            generator=generator,
            concurrency=2,
            progress=SilentProgress(),
            preemption=Preemption(),
        ).run()

    assert_each_changes(smoke, "eval", {"questions": 5, "split": "test", "temperature": 0.7}, seen)
