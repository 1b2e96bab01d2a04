"""The examples of plug-ins: the guide quotes them as they are, and they run as a user starts them."""

import re
import subprocess
import sys

import pytest

from tests.helpers.paths import ROOT

GUIDE = ROOT / "docs" / "guides" / "extending.md"
QUOTED = re.compile(r"```python\n# (\S+)\n(.*?)```", re.DOTALL)
EXAMPLES = sorted(path.parent for path in (ROOT / "examples").glob("*/README.md"))
MAX_LINES = 140  # of one example, formatted at 100 columns

AGENT = "--agent.kind examples.retry_agent.agents:RetryConfig --agent.max-tries 3"
TASK = "--task.kind examples.facts_task.tasks:FactsConfig"
METHOD = "--method.kind examples.own_method.methods:BestOfNConfig --method.attempts 2"
# With this, a model that knows nothing still has attempts to learn.
METHOD_OF_TEST = f"{METHOD} --method.min-reward 0 --method.rounds 1"
REWARD = "--reward examples.brevity_reward.rewards:brevity"
LOSS = "--method.loss examples.own_loss.losses:EqualConversations"
# As little as a run can be.
SMALL = """--eval.split test --eval.questions 8 --eval.no-control --warmup.steps 2
    --pretraining.steps 2 --sampling.questions-per-round 4 --metrics.logging-steps 1"""
SMOKE = "tests/helpers/smoke_config.py"
# A script writes what this run learns, so that even a model that knows nothing has rows to learn.
SMOKE_EVIPATH = "tests/helpers/smoke_evipath_config.py"


def start(program: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a program in the checkout, as the guide says."""
    command = [sys.executable, "-m", f"mujica_jax.{program}", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def quotes() -> list[tuple[str, str]]:
    """Return the file and the code of each example that the guide quotes."""
    return QUOTED.findall(GUIDE.read_text())


def test_the_guide_quotes_the_files_as_they_are():
    assert [name.split("/")[1] for name, _ in quotes()] == [
        "brevity_reward",
        "own_loss",
        "retry_agent",
    ]
    for name, code in quotes():
        assert code in (ROOT / name).read_text(), f"{GUIDE.name} quotes another {name}"


@pytest.mark.parametrize("folder", EXAMPLES, ids=lambda folder: folder.name)
def test_each_example_is_short_and_the_guide_leads_to_it(folder):
    (file,) = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
    assert file.read_text().count("\n") <= MAX_LINES
    assert f"../../{file.relative_to(ROOT)}" in GUIDE.read_text()


def test_the_guide_names_each_example_in_a_command():
    module = re.compile(r"examples\.(\w+)\.\w+:\w+")
    for page in (GUIDE, *(folder / "README.md" for folder in EXAMPLES)):
        named = set(module.findall(page.read_text()))
        expected = {folder.name for folder in EXAMPLES} if page == GUIDE else {page.parent.name}
        assert named == expected


def test_a_run_of_four_plug_ins_trains_resumes_and_is_evaluated(tmp_path):
    run = str(tmp_path / "run")
    words = [*f"{SMOKE} {SMALL} {AGENT} {TASK} {METHOD_OF_TEST} {REWARD}".split(), "--run", run]
    trained = start("train", *words)
    assert trained.returncode == 0, trained.stderr
    assert re.search(r"^warm-up .*\n(.*\n)?round 1 ", trained.stdout, re.MULTILINE), trained.stdout
    assert "round 1: no attempt has a reward of 0" not in trained.stdout

    # The run opens again without the flags of its plug-ins.
    evaluated = start("eval", "--checkpoint", run, "--eval.questions", "2", "--no-sampled")
    assert evaluated.returncode == 0, evaluated.stderr
    assert "facts (graph, retry), test" in evaluated.stdout, evaluated.stderr

    resumed = start("train", *words)
    table = trained.stdout[trained.stdout.index("phase ") :]
    assert resumed.stdout.endswith(table), (
        f"{resumed.stdout}\n{resumed.stderr}\nis not resumed to\n{table}"
    )


@pytest.mark.slow
def test_a_run_learns_with_the_loss_of_the_example(tmp_path):
    trained = start(
        "train", *f"{SMOKE_EVIPATH} {SMALL} {LOSS}".split(), "--run", str(tmp_path / "run")
    )
    assert trained.returncode == 0, trained.stderr
    metrics = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert '"conversations"' in metrics
