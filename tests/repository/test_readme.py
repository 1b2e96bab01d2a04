"""The commands that the documents print are commands that work: make's targets exist, arguments are
taken, links lead somewhere.

Every command line in README, docs/start and docs/guides is checked, or has a reason why it is not.
`tests/runs` runs the two programs for real.
"""

import functools
import itertools
import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from docs.hooks import PAGE
from mujica_jax.commands import (
    ask,
    conversations,
    export,
    index,
    plan,
    report,
    sample,
    serve,
    view,
)
from mujica_jax.commands import eval as evaluation
from mujica_jax.commands.main import COMMANDS as PROGRAMS
from mujica_jax.commands.train import DEFAULT_CONFIG
from mujica_jax.config.checks import check
from mujica_jax.config.command_line import command_line
from mujica_jax.config.files import load_config
from mujica_jax.config.kinds import stored_kind
from mujica_jax.config.schema import Config
from mujica_jax.config.stored import to_dict
from mujica_jax.tasks import prepare
from tests.helpers.paths import ROOT
from tests.helpers.shared_data import TWO_WIKI

GENERATED = ROOT / "docs" / PAGE  # by `make docs`
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]
# The pages for users: every line of their blocks of commands is covered here.
USER_PAGES = [
    ROOT / "README.md",
    *(
        path
        for folder in ("start", "guides")
        for path in sorted((ROOT / "docs" / folder).glob("*.md"))
    ),
    ROOT / "docs" / "reference" / "commands.md",
    *sorted((ROOT / "examples").rglob("*.md")),
]
# of every language, or pairs go wrong
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def shell_blocks(path: Path) -> list[str]:
    """Return the blocks of commands in a document, a continued line as one."""
    return [
        text.replace("\\\n", " ")
        for language, text in FENCED.findall(path.read_text())
        if language in ("", "bash")
    ]


BLOCKS = [block for path in DOCUMENTS for block in shell_blocks(path)]
LINES = [line.split("  #")[0].strip() for block in BLOCKS for line in block.splitlines()]
MAKE = sorted({line for line in LINES if line.startswith("make ")})
TRAIN = sorted(
    {
        line
        for line in LINES
        if line.startswith("python -m mujica_jax.train") and "--help" not in line
    }
)


def test_the_readme_prints_both_commands():
    assert {"make train", "make test"} <= set(MAKE)
    assert TRAIN


@pytest.mark.parametrize("line", MAKE)
def test_make_knows_the_target(line):
    shown = subprocess.run(
        ["make", "--dry-run", *shlex.split(line)[1:]], cwd=ROOT, capture_output=True, text=True
    )
    assert shown.returncode == 0, shown.stderr


# What a reader replaces, and what these tests put there.
PLACEHOLDERS = {
    "DIR": str(TWO_WIKI),
    "CONFIG": "configs/two_wiki_text_smollm2.py",
    "mine.py": "configs/tiny_world_grpo.py",
}


def arguments(line: str) -> list[str]:
    """Return the words after `python -m mujica_jax.NAME`, with placeholders filled in.

    "..." stands for those of any other command.
    """
    return [PLACEHOLDERS.get(word, word) for word in shlex.split(line)[3:] if word != "..."]


def value_of(flag: str, config: Config) -> object:
    """Return what a configuration holds under a flag of the command line."""
    names = flag.removeprefix("--").replace("-", "_").split(".")
    value = functools.reduce(getattr, names, config)
    # The flag names a plug-in by its place. Its short name is in the field.
    return stored_kind(getattr(config, names[0])) if names[-1] == "kind" else value


def training_by_make() -> list[str]:
    """Return the commands that the documented `make train ARGS="..."` start."""
    matches = [re.search(r'train ARGS="(.*)"', line) for line in MAKE]
    return [f"python -m mujica_jax.train {match[1]}" for match in matches if match]


@pytest.mark.parametrize("line", [*TRAIN, *training_by_make()])
def test_the_arguments_are_taken(line, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = arguments(line)
    config = command_line(words, default=DEFAULT_CONFIG)
    check(config)
    for word, value in itertools.pairwise([*words, "--"]):
        if not word.startswith("--"):
            continue
        taken = value_of(word, config)
        # A flag with several values, such as --method.data, has one on the pages.
        if isinstance(taken, tuple):
            (taken,) = taken
        if isinstance(taken, bool):
            assert value.startswith("--"), "a switch has no value"
            assert taken
        else:
            assert str(taken) == (str(float(value)) if isinstance(taken, float) else value)
    named = [word for word in words if word.startswith("configs/")]
    # A configuration in examples/ has a name of its own.
    if not any(word.startswith("examples/") for word in words):
        assert config.name == (Path(named[0]).stem if named else DEFAULT_CONFIG)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    targets = [
        target for target in re.findall(r"\]\(([^)#]+)", path.read_text()) if "://" not in target
    ]
    missing = [target for target in targets if not (path.parent / target).exists()]
    assert [target for target in missing if (path.parent / target).resolve() != GENERATED] == []


# --- every command line of the pages for users ---

MODULE = "python -m mujica_jax."
# `mujica train` and `python -m mujica_jax.train` are the same.
NAMES = "|".join(program.name for program in PROGRAMS)
# Lines that no parser of ours reads, by how they begin, with the reason why they are not checked.
UNCHECKED = {
    "source .venv/bin/activate": "the shell's own",
    "git clone REPOSITORY ": "needs a place to clone from",
    "cd mujica_jax": "the shell's own",
    "python3 -m venv .venv": "Python's own; tests/repository/test_make.py makes an environment",
    "export OPENAI_API_KEY=": "the shell's own",
    "until COMMAND; do sleep 10; done": "the shell's own",
    "cp launch/env.example launch/env": "copies a file; tests/launch reads its lines",
    "launch/": "tests/launch/test_launch.py calls each of these lines",
    "pip install": "tests/repository/test_packaging.py compares the extras and the packages",
    'python -c "import jax; print(jax.devices())"': "JAX's own",
    "hf download ": "the program of huggingface_hub, which needs a connection",
    "oxigraph serve-read-only ": "the program of another package, which serves until it is ended",
    "vllm serve ": "the program of another package, which serves until it is ended",
    "gcloud storage buckets update ": "the program of Google Cloud, which needs a bucket",
    "curl http://HOST:8600/": "asks a service that runs",
}


class Command(NamedTuple):
    """A line of a page."""

    page: Path
    line: str

    @property
    def module(self) -> str:
        """The program of this package that the line starts, as `eval`; empty for other lines."""
        _, marker, rest = self.line.partition(MODULE)
        return rest.split()[0] if marker else ""

    @property
    def words(self) -> list[str]:
        """The arguments of the program.

        A prompt such as `host-a$` may stand before the program, and a quotation mark of the command
        that sends the line to another machine around it.
        """
        before, marker, rest = self.line.partition(MODULE)
        return arguments(marker + (rest.rstrip('"') if '"' in before else rest))


def commands_of(page: Path) -> list[Command]:
    """Return the command lines of a page: those of its blocks, and programs in its sentences."""
    text = page.read_text()
    lines = [line for block in shell_blocks(page) for line in block.splitlines()]
    if any(line.startswith("# DIR/") for line in lines):
        # A file that stands on the page, not a command.
        lines = [line for line in lines if not line.startswith(("# DIR/", "{"))]
    lines = [re.split(r"\s+# ", line)[0].strip() for line in lines]
    sentences = " ".join(FENCED.sub("", text).split())
    lines += re.findall(r"`(python -m mujica_jax\.[^`\s]+ [^`]+)`", sentences)
    lines += re.findall(rf"`(mujica (?:{NAMES}) [^`]+)`", sentences)
    lines = [re.sub(rf"^mujica ({NAMES})\b", rf"{MODULE}\1", line) for line in lines]
    return [Command(page, line) for line in lines if line and not line.startswith("#")]


COMMANDS = sorted({command for page in USER_PAGES for command in commands_of(page)})


def started(module: str) -> list[Command]:
    """Return the commands that start this program."""
    return [command for command in COMMANDS if command.module == module]


def ids_of(commands: list[Command]) -> list[str]:
    return [f"{command.page.stem}: {command.line}" for command in commands]


CHECKED = (
    "train",
    "eval",
    "ask",
    "sample",
    "conversations",
    "export",
    "index",
    "serve",
    "plan",
    "report",
    "tasks.prepare",
    "view",
)


@pytest.mark.parametrize("page", USER_PAGES, ids=lambda page: page.name)
def test_every_command_line_is_checked_or_has_a_reason(page):
    unknown = [
        command.line
        for command in commands_of(page)
        if command.module not in CHECKED and not command.line.startswith(("make ", *UNCHECKED))
    ]
    assert unknown == [], "check these lines too, put output into a block of ```text, or say why"


def test_no_reason_is_left_over():
    begins = {begin for begin in UNCHECKED if any(line.startswith(begin) for _, line in COMMANDS)}
    assert begins == set(UNCHECKED)
    assert {command.module for command in COMMANDS} - {""} == set(CHECKED)


TRAINED = [command for command in started("train") if command.line not in TRAIN]


@pytest.mark.parametrize("command", TRAINED, ids=ids_of(TRAINED))
def test_the_arguments_of_train_are_taken_wherever_they_stand(command, monkeypatch):
    """The lines of `TRAIN` are checked above.

    These stand in a sentence, go to another machine, or ask for help.
    """
    monkeypatch.chdir(ROOT)
    if "--help" in command.words:
        with pytest.raises(SystemExit, match="0"):
            command_line(command.words, default=DEFAULT_CONFIG)
    else:
        check(command_line(command.words, default=DEFAULT_CONFIG))


def config_of_run(page: Path, run: str) -> Config:
    """Return the configuration of a run that a page evaluates.

    It is the one that the page's own `train --run RUN` begins, and otherwise the tiny world.
    """
    for command in commands_of(page):
        if command.module == "train" and ["--run", run] in map(
            list, itertools.pairwise(command.words)
        ):
            return command_line(command.words, default=DEFAULT_CONFIG)
    return load_config(DEFAULT_CONFIG)


def write_run(folder: Path, config: Config) -> None:
    """Write what `eval` reads of a run's folder, or of an adapter's, before it loads weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"config": to_dict(config)}))


def with_runs(command: Command, folder: Path, words: list[str] | None = None) -> list[str]:
    """Return the words of a command with runs and adapters that are in `folder`.

    `words` stand in the place of the command's own.
    """
    words = command.words if words is None else words
    for position, flag in enumerate(words[:-1]):
        name = words[position + 1]
        names_run = flag in ("--checkpoint", "--adapter", "--worker")
        if not names_run or name in PLACEHOLDERS.values() or (ROOT / name).exists():
            continue
        own_folder = folder / name.removeprefix("gs://")
        write_run(own_folder, config_of_run(command.page, name.partition("/policies/")[0]))
        words[position + 1] = str(own_folder)
    return words


@pytest.mark.parametrize("command", started("eval"), ids=ids_of(started("eval")))
def test_the_arguments_of_eval_are_taken(command, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    # Whether a set is prepared for TensorFlow Datasets is a matter of the machine.
    monkeypatch.setattr(evaluation, "check_data_dir", lambda task: None)
    options, config = evaluation.command_line(with_runs(command, tmp_path))
    assert len(evaluation.all_configs(options, config)) >= 1


@pytest.mark.parametrize("command", started("ask"), ids=ids_of(started("ask")))
def test_the_arguments_of_ask_are_taken(command, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(evaluation, "check_data_dir", lambda task: None)
    words = with_runs(command, tmp_path, ask.eval_arguments(command.words))
    options, config = evaluation.command_line(words)
    assert len(evaluation.all_configs(options, config)) == 1
    assert options.ask


@pytest.mark.parametrize("command", started("sample"), ids=ids_of(started("sample")))
def test_the_arguments_of_sample_are_taken(command, monkeypatch):
    taken = []
    monkeypatch.setattr(sample, "sample", lambda options, preemption: taken.append(options))
    assert sample.main(command.words) == 0
    assert len(taken) == 1


@pytest.mark.parametrize("command", started("conversations"), ids=ids_of(started("conversations")))
def test_the_arguments_of_conversations_are_taken(command):
    options = conversations._parser().parse_args(command.words)
    assert options.out.endswith(".jsonl")


@pytest.mark.parametrize("command", started("serve"), ids=ids_of(started("serve")))
def test_the_arguments_of_serve_are_taken(command, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(serve, "check_data_dir", lambda task: None)
    words = command.words
    model = "" if words[0].startswith("-") else words.pop(0)
    # A run brings its configuration. Other models are not looked for before they are loaded.
    if model in ("smollm2", "HF_DIR"):
        words = [model, *with_runs(command, tmp_path, words)]
    else:
        words = with_runs(command, tmp_path, ["--checkpoint", model, *words] if model else words)
    options, config = serve.parse(words)
    assert config is not None
    assert options.checkpoint is not None or options.remote.base_url is not None


@pytest.mark.parametrize("command", started("plan"), ids=ids_of(started("plan")))
def test_the_arguments_of_plan_are_taken(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    options = plan.parse(command.words)
    for target in plan.targets_of(options):
        check(plan.with_mesh(options, target))


@pytest.mark.parametrize("command", started("export"), ids=ids_of(started("export")))
def test_the_arguments_of_export_are_taken(command):
    assert export._parser().parse_args(command.words).to


@pytest.mark.parametrize("command", started("view"), ids=ids_of(started("view")))
def test_the_arguments_of_view_are_taken(command):
    assert view._parser().parse_args(command.words).runs


@pytest.mark.parametrize("command", started("report"), ids=ids_of(started("report")))
def test_the_arguments_of_report_are_taken(command):
    assert report._parser().parse_args(command.words).runs


@pytest.mark.parametrize("command", started("index"), ids=ids_of(started("index")))
def test_the_arguments_of_index_are_taken(command):
    options = index._parser().parse_args(command.words)
    assert options.run in (index.build, index.estimate, index.query, index.recall, index.serve)
    # An index that is opened has its own kind, which is not known here.
    if hasattr(options, "kind"):
        index._refuse_unread(options, options.kind)


@pytest.mark.parametrize("command", started("tasks.prepare"), ids=ids_of(started("tasks.prepare")))
def test_the_arguments_of_prepare_are_taken(command):
    if "--help" in command.words:
        with pytest.raises(SystemExit, match="0"):
            prepare._parser().parse_args(command.words)
    else:
        prepare._parser().parse_args(command.words)


def test_a_run_that_began_with_an_adapter_is_evaluated_by_its_name_alone(tmp_path):
    """Its policies already include the adapter, so that nothing is added to them."""
    config = load_config(str(ROOT / "examples/documents/config.py"))
    assert config.adapter is not None
    write_run(tmp_path / "run", config)
    options, _ = evaluation.command_line(["--checkpoint", str(tmp_path / "run")])
    assert options.adapter is None
