"""Every file in configs/ loads and agrees with itself; its commands are taken; the published models
fit their chips.
"""

import dataclasses
import json
import os
import re
import shlex
import subprocess
import sys

import pytest

from mujica_jax.commands import eval as evaluation
from mujica_jax.commands import index
from mujica_jax.config.checks import check
from mujica_jax.config.command_line import command_line
from mujica_jax.config.files import load_config
from mujica_jax.config.methods import GrpoConfig, MygoConfig
from mujica_jax.config.tasks import DEFAULT_EMBEDDER
from mujica_jax.runs import memory
from mujica_jax.trajectories.store import open_run
from tests.helpers.configurations import CONFIGS, checkpoint_of, docstring, programs_of, topology_of
from tests.helpers.paths import ROOT
from tests.models.test_tpu_compile import CONFIGS as COMPILED
from tests.models.test_tpu_compile import memory_bytes

OF_CHIPS = [name for name in CONFIGS if topology_of(name)]
TRAINED = [name for name in OF_CHIPS if CONFIGS[name].trainer.fsdp > 1]
EVALUATED = [name for name in OF_CHIPS if name not in TRAINED]
CONFIGS_OF_ROWS = ("qwen3-4b", "qwen3-8b", "qwen2.5-7b")  # what these are evaluated with
EMBEDDERS = {"BAAI/bge-large-en-v1.5": 335_141_888, "intfloat/e5-base-v2": 109_482_240}  # numbers
BFLOAT16_BYTES = 2
DENSE_ROWS = [
    name
    for name in OF_CHIPS
    if CONFIGS[name].task.environment == "text"
    and getattr(CONFIGS[name].task, "retriever", "bm25") == "dense"
]


def commands_of(name: str) -> list[list[str]]:
    lines = docstring(name).replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines if line.startswith("    python -m mujica_jax.")]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_has_its_names_and_agrees_with_itself(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = CONFIGS[name]
    assert config.name == name
    assert load_config(name) == load_config(f"{name}.py") == config
    check(config)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_commands_of_its_docstring_are_taken(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    commands = commands_of(name)
    trained = [
        command_line(words[3:], default="tiny_world")
        for words in commands
        if words[2] == "mujica_jax.train"
    ]
    scored = [
        evaluation.command_line(words[3:]) for words in commands if words[2] == "mujica_jax.eval"
    ]
    configs = [
        *trained,
        *(
            config
            for options, config in scored
            for config in evaluation.all_configs(options, config)
        ),
    ]
    assert name in {config.name for config in configs}, "its own command is one of them"


@pytest.mark.parametrize("name", OF_CHIPS)
def test_its_model_has_the_published_sizes_of_the_one_it_is_said_to_be(name):
    """The published sizes give the published number of parameters (`test_families.py`)."""
    checkpoint = checkpoint_of(CONFIGS[name])
    assert checkpoint is not None
    assert checkpoint in docstring(name).partition("\n\n")[0].lower()


def test_programs_are_compiled_for_every_configuration_that_trains_on_several_chips():
    several = [
        name
        for name, config in CONFIGS.items()
        if config.trainer.data_parallel_size
        * config.trainer.fsdp
        * config.trainer.tensor_parallel_size
        > 1
    ]
    assert several == TRAINED
    assert set(COMPILED) <= set(several)
    assert {programs_of(name) for name in several} == {programs_of(name) for name in COMPILED}
    assert len({programs_of(name) for name in COMPILED}) == len(COMPILED), "and none of them twice"
    assert {
        name: (checkpoint_of(CONFIGS[name]), topology_of(name)) for name in COMPILED
    } == COMPILED


def test_a_row_out_of_domain_is_scored_with_the_policy_of_another_run(tmp_path):
    trained = CONFIGS["hotpotqa_v5e"]
    trained = dataclasses.replace(trained, agent=dataclasses.replace(trained.agent, prompt="brief"))
    store = open_run(tmp_path / "run", dataclasses.asdict(trained))
    store.commit_policy(20, lambda folder: (folder / "weights").write_text("some"))
    options, config = evaluation.command_line(
        ["musique_v5e", "--checkpoint", str(tmp_path / "run")]
    )
    checkpoint = evaluation.find_checkpoint(options)
    assert checkpoint.version == 20
    assert checkpoint.out == tmp_path / "run" / "eval"
    assert config.task.kind == "musique"
    assert config.agent == trained.agent, "it plays the agent that it was trained as"
    assert checkpoint.trained_otherwise(trained.agent) == []
    named = CONFIGS["musique_v5e"].agent
    assert checkpoint.trained_otherwise(named) == [
        "agent.prompt was 'brief' and is now 'zero_shot'"
    ]
    single = CONFIGS["nq_qwen3_4b_v5e"].agent
    assert checkpoint.trained_otherwise(single) == ["agent.kind was 'mujica' and is now 'single'"]


@pytest.fixture(scope="module")
def planned() -> dict[str, dict[str, dict[str, int]]]:
    """Return phases of a configuration and checkpoint: their parts, in bytes on each chip."""
    words = [f"{name}={checkpoint_of(CONFIGS[name])}" for name in TRAINED]
    words += [f"{name}={model}" for name in EVALUATED for model in CONFIGS_OF_ROWS]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.helpers.memory_of_configurations", *words]
    return json.loads(
        subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, check=True).stdout
    )


@pytest.mark.parametrize("name", TRAINED)
def test_every_phase_of_training_fits_its_chips(name, planned):
    """The sum has the temporaries of docs/concepts/memory.md, and what the search holds."""
    (same,) = [other for other in COMPILED if programs_of(other) == programs_of(name)]
    for phase, parts in planned[f"{name}={checkpoint_of(CONFIGS[name])}"].items():
        (calls, step) = documented_temporaries(same, phase)
        searched = 0 if phase in ("loading", "syncing") else searched_bytes(name)
        assert sum(parts.values()) + calls + step + searched < memory_bytes(topology_of(name)), (
            phase
        )


@pytest.mark.parametrize("name", EVALUATED)
def test_an_evaluation_fits_its_chips_with_each_model_of_its_rows(name, planned):
    for model in CONFIGS_OF_ROWS:
        parts = planned[f"{name}={model}"]["sampling"]
        held_bytes = (
            parts[memory.ENGINE]
            + parts[memory.CACHE]
            + memory.ENGINE_TEMPORARIES
            + searched_bytes(name)
        )
        assert held_bytes < memory_bytes(topology_of(name)), model


def test_the_table_of_rows_has_every_file_and_the_numbers_of_its_docstring():
    part = (
        (ROOT / "docs" / "guides" / "evaluation.md")
        .read_text()
        .partition("## Rows of the papers")[2]
        .partition("\n## ")[0]
    )
    rows = re.findall(r"^\| `(\w+)\.py` \|(.*)$", part, re.MULTILINE)
    assert {name for name, _ in rows} == set(OF_CHIPS)
    number = re.compile(r"\d+\.\d\d?(?!B)")
    absent = {
        name: set(number.findall(cells)) - set(number.findall(docstring(name)))
        for name, cells in rows
    }
    assert {name: numbers for name, numbers in absent.items() if numbers} == {}


def documented_temporaries(name: str, phase: str) -> tuple[float, float]:
    """Return the last two columns of docs/concepts/memory.md: engine calls and step, in bytes."""
    lines = (ROOT / "docs" / "concepts" / "memory.md").read_text().splitlines()
    (row,) = [line for line in lines if line.startswith(f"| `{name}.py` | {phase} |")]
    calls, step = (float(cell or 0) * 1e9 for cell in map(str.strip, row.split("|")[-3:-1]))
    return calls, step


def searched_bytes(name: str) -> float:
    """Return the bytes that the search holds on each chip: the embedder.

    ScaNN holds the index in the host's memory.
    """
    task = CONFIGS[name].task
    if getattr(task, "retriever", "bm25") != "dense":
        return 0
    return BFLOAT16_BYTES * EMBEDDERS[task.embedder]


def test_the_rows_of_papers_over_text_are_those_that_search_passages_by_embeddings():
    """Two kinds of rows do not: HotpotQA's distractor setting, and those over a graph.

    In the distractor setting each question has ten passages.
    """
    over_graphs = {
        "qald10_v5e",
        "two_wiki_kg_grpo_v5e",
        "two_wiki_kg_llama_8b_v5e",
        "two_wiki_kg_v5e",
    }
    assert set(OF_CHIPS) - set(DENSE_ROWS) == {*over_graphs, "hotpotqa_distractor_v5e"}


@pytest.mark.parametrize("name", DENSE_ROWS)
def test_every_dense_text_configuration_of_a_paper_s_row_builds_scann(name):
    """Its docstring builds the index that its own command opens, with the same embedder."""
    task = CONFIGS[name].task
    commands = commands_of(name)
    (build,) = [words for words in commands if words[2] == "mujica_jax.index"]
    own = [words for words in commands if f"configs/{name}.py" in words]
    options = index._parser().parse_args(build[3:])
    assert options.kind == "scann"
    assert (options.embedder or DEFAULT_EMBEDDER) == task.embedder
    assert {words[words.index("--task.index") + 1] for words in own} == {options.out}


@pytest.mark.parametrize(
    "page",
    ["launch/index.sh", "launch/skypilot.yaml", "launch/xpk.yaml", "docs/guides/tpu_pods.md"],
)
def test_what_launch_shows_builds_scann(page):
    """The corpus of 2Wiki has 6,119 passages, so `--kind auto` would make an exact index of it."""
    text = " ".join((ROOT / page).read_text().replace("\n#", " ").split())
    shown = re.findall(r"index\.sh two_wiki ([^`#]*?--corpus[^`#,]*)", text)
    assert shown
    assert all("--kind scann" in flags for flags in shown)


@pytest.mark.parametrize(
    "name", [name for name in TRAINED if isinstance(CONFIGS[name].method, MygoConfig)]
)
def test_paper_sized_runs_of_mygo_follow_the_paper(name):
    """The settings are those of appendix D of the paper's first version.

    There is no replay, the warm-up learns as MyGO does, and the cosine is plain. The docstring says
    what is ours.
    """
    config = CONFIGS[name]
    method = config.method
    warmup = config.warmup
    assert isinstance(method, MygoConfig)
    assert method.replay == 0.0
    assert method.max_attempts == 16
    assert method.keep_per_question == 3
    assert method.rounds * config.sampling.questions_per_round == 20_000
    assert warmup.source == "few_shot"
    assert warmup.few_shot_trajectories == 300
    assert warmup.epochs == method.epochs
    assert warmup.lr_warmup_steps == 0
    assert warmup.learning_rate == 1e-5
    assert warmup.end_learning_rate == 1e-6
    assert method.learning_rate == 5e-7
    assert method.end_learning_rate == 1e-8
    assert "ours" in docstring(name).lower()


@pytest.mark.parametrize("name", [name for name in CONFIGS if name.startswith("two_wiki_kg")])
def test_configurations_of_the_knowledge_graph_say_which_graph_they_search(name):
    text = " ".join(docstring(name).split())
    assert "gold evidences of" in text
    assert re.search("paper('s, which)? searched Wikidata", text)


def test_the_row_of_grpo_has_the_paper_s_kl_term():
    method = CONFIGS["two_wiki_kg_grpo_v5e"].method
    assert isinstance(method, GrpoConfig)
    assert method.kl_coefficient == 0.04
    assert "equation 4" in docstring("two_wiki_kg_grpo_v5e")
