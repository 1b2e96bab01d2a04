"""The examples of docs/guides/extending.md, as they stand there: put into a copy of the package, each with
its name in a union, and trained.
"""

import re
import shutil
import subprocess
import sys

from tests.helpers.paths import ROOT

BLOCK = re.compile(r"```python\n# (\S+)\n(.*?)```", re.DOTALL)
SECTION = re.compile(r"^## (.*?)$(.*?)(?=^## |\Z)", re.DOTALL | re.MULTILINE)
MAX_LINES = 80  # of one example, formatted at 100 columns
SCHEMA = "mujica_jax/config/schema.py"
FACTS = "".join(
    f"P{number}\t{relation}\tV{(7 * number + place) % 50}\t\t\n"
    for number in range(50)
    for place, relation in enumerate(("colour", "size", "age"))
)
RUN = """tests/helpers/smoke_config.py --agent.kind retry --task.kind facts --task.file facts.tsv
    --method.kind rejection --method.attempts 2 --eval.split test --eval.questions 8 --eval.no-control
    --warmup.steps 2 --pretraining.steps 2 --sampling.questions-per-round 4 --run run""".split()
EVAL = ["--checkpoint", "run", "--eval.questions", "2", "--no-sampled"]


def examples() -> dict[str, list[tuple[str, str]]]:
    """Return the files of each section that has any, as pairs of name and code."""
    sections = SECTION.findall((ROOT / "docs" / "guides" / "extending.md").read_text())
    files = {title: BLOCK.findall(text) for title, text in sections}
    return {title: blocks for title, blocks in files.items() if blocks}


def test_each_example_is_short():
    lengths = {
        title: sum(code.count("\n") for _, code in blocks) for title, blocks in examples().items()
    }
    assert len(lengths) == 3, lengths
    assert max(lengths.values()) <= MAX_LINES, lengths


def test_the_examples_run_and_touch_one_union_line_each(tmp_path):
    for folder in ("mujica_jax", "configs", "tests/helpers"):
        shutil.copytree(
            ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("*.pyc.*", "*.tmp.*")
        )
    for blocks in examples().values():
        for name, code in blocks:
            file = tmp_path / name
            if name != SCHEMA:
                assert not file.exists(), f"the example must not replace {name}"
                file.write_text(code)
                continue
            # The formatter puts a long union between brackets.
            imported, name_of_union, members = re.fullmatch(
                r"(from \S+ import \w+\n)\n(\w+) = \(?\s*([\w |]+?)\s*\)?\n", code
            ).groups()
            schema = file.read_text()
            before = re.search(rf"^{name_of_union} = (.*)\n", schema, re.MULTILINE)[1]
            assert members.startswith(before), f"{before} in {SCHEMA}, {members} in the page"
            first = schema.index("from mujica_jax.config.agents")
            schema = schema.replace(f"{name_of_union} = {before}", f"{name_of_union} = {members}")
            file.write_text(schema[:first] + imported + schema[first:])
    (tmp_path / "facts.tsv").write_text(
        "subject\trelation\tobject\tsubject_qid\tobject_qid\n" + FACTS
    )
    command = [sys.executable, "-m", "mujica_jax.train", *RUN]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert re.search(r"^warm-up .*\n(.*\n)?rejection ", run.stdout, re.MULTILINE), run.stdout
    evaluated = subprocess.run(
        [*command[:2], "mujica_jax.eval", *EVAL], cwd=tmp_path, capture_output=True, text=True
    )
    assert evaluated.returncode == 0, evaluated.stderr
    assert "facts (graph, retry), test" in evaluated.stdout, evaluated.stderr
    resumed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    table = run.stdout[run.stdout.index("phase ") :]
    assert resumed.stdout.endswith(table), (
        f"{resumed.stdout}\n{resumed.stderr}\nis not resumed to\n{table}"
    )
