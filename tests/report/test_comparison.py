"""Agents side by side: what is written and shown, and by how much one is better on the same
questions.
"""

import dataclasses
import json

import pytest

from mujica_jax import metrics
from mujica_jax.commands import eval as evaluation
from mujica_jax.config.agents import DirectConfig
from mujica_jax.errors import UserError
from mujica_jax.report import comparison
from mujica_jax.report.comparison import Compared
from mujica_jax.report.text import plain
from tests.helpers.little_agent import CONFIG, QUESTION

SUMMARY = {"em": 50.0, "em_interval": [0.0, 100.0], "f1": 60.0, "f1_interval": [10.0, 100.0]}
SUMMARY |= {"searches": 1.5, "tokens": 41.2, "seconds": 0.25, "questions": 4}


def scored(agent: str, *em: float, task: str = "musique text") -> Compared:
    return Compared(task=task, agent=agent, summary=SUMMARY, em=em)


def test_a_difference_is_of_the_same_questions():
    better = metrics.paired_bootstrap([0, 0, 0, 0], [1, 1, 1, 1])
    assert better == (100.0, (100.0, 100.0), 0.0)
    same = metrics.paired_bootstrap([0, 1, 0, 1], [0, 1, 0, 1])
    assert same == (0.0, (0.0, 0.0), 1.0)
    difference, (low, high), worse = metrics.paired_bootstrap(
        [0] * 50 + [1] * 50, [1] * 10 + [0] * 40 + [1] * 50
    )
    # 10 of 100 won and none lost: a binomial of mean 10 and standard deviation 3
    assert difference == pytest.approx(10)
    assert 3 < low < 6
    assert 14 < high < 18
    assert worse == 0.0
    with pytest.raises(ValueError, match=r"the same number of scores, .* and got 2 and 1"):
        metrics.paired_bootstrap([0, 1], [0])


def test_every_row_is_compared_with_the_first_agent_of_its_task():
    compared = [
        scored("mujica", 1, 1, 0, 0),
        scored("rag", 0, 0, 0, 0),
        scored("mujica", 1, task="nq text"),
    ]
    rows = comparison.rows(compared)
    assert [("against" in row) for row in rows] == [False, True, False]
    assert rows[1]["against"]["agent"] == "mujica"
    assert rows[1]["against"]["em"] == -50.0
    assert rows[1]["against"]["share_not_better"] == 1.0
    assert comparison.markdown(rows).splitlines()[2:4] == [
        "| musique text | mujica | 50.0 (0.0-100.0) | 60.0 (10.0-100.0) | 1.50 | 41 | 0.2 |  |",
        "| musique text | rag | 50.0 (0.0-100.0) | 60.0 (10.0-100.0) | 1.50 | 41 | 0.2 | -50.0 "
        "(-100.0 to +0.0) |",
    ]
    assert comparison.table(rows).row_count == 3


def predictions(*rows: tuple) -> bytes:
    """Return the file of rows of id, em, f1, and em and f1 of the sampled answers."""
    lines = []
    for question_id, em, f1, em_sampled, f1_sampled in rows:
        sampled = {"prediction": "a", "em": em_sampled, "f1": f1_sampled}
        row = {"id": question_id, "em": em, "f1": f1, "sampled": sampled}
        lines.append(json.dumps(row) + "\n")
    return "".join(lines).encode()


FIRST = predictions(("0", 0.0, 0.5, 0.25, 0.5), ("1", 1.0, 1.0, 0.5, 0.5), ("2", 0, 0, 0, 0.5))
SECOND = predictions(("2", 0, 0, 0.25, 0.5), ("0", 1.0, 0.5, 0.5, 0.5), ("1", 1.0, 1.0, 0.75, None))


def test_two_policies_are_compared_question_by_question():
    """Rows are matched by id, and the numbers worked out by hand.

    EM is better at one question of three, whose resamples lie between none and all. Every sampled
    EM is a quarter better.
    """
    earlier, later = map(comparison.scores_of_predictions, (FIRST, SECOND))
    differences = comparison.differences(earlier, later)
    assert differences == {
        "em": {"questions": 3, "difference": 33.33, "interval": [0.0, 100.0]},
        "f1": {"questions": 3, "difference": 0.0, "interval": [0.0, 0.0]},
        "em_sampled": {"questions": 3, "difference": 25.0, "interval": [25.0, 25.0]},
        "f1_sampled": {"questions": 2, "difference": 0.0, "interval": [0.0, 0.0]},
    }
    shown = plain(comparison.difference_table(differences))
    assert "EM, sampled" in shown
    assert "+25.0 (+25.0 to +25.0)" in shown


def test_an_earlier_result_is_of_the_same_questions(tmp_path):
    result = str(tmp_path / "nq-text-dev.json")
    with pytest.raises(UserError, match=r"nq-text-dev\.predictions\.jsonl cannot be read"):
        comparison.read_scores(result)
    file = tmp_path / "nq-text-dev.predictions.jsonl"
    file.write_text('{"id": "0"}\n')
    with pytest.raises(UserError, match=r"does not hold predictions of mujica_jax\.eval"):
        comparison.read_scores(result)
    file.write_bytes(FIRST)
    earlier = comparison.read_scores(result)
    questions = [dataclasses.replace(QUESTION, id=number) for number in "0123"]
    comparison.check_same_questions(result, earlier, questions[:3])
    with pytest.raises(UserError, match="has 3 questions and this evaluation has 4; 3 are in both"):
        comparison.check_same_questions(result, earlier, questions)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--samples", "0"], "--samples is 0 and must be at least 1"),
        (["--samples", "2", "--no-sampled"], "--samples is 2, but --no-sampled takes no samples"),
        (["--beside", "A", "--agents", "direct"], "--beside is A and compares a single result"),
    ],
)
def test_samples_and_an_earlier_result_are_checked_first(tmp_path, flags, sentence):
    words = ["tiny_world", "--checkpoint", str(tmp_path), *flags]
    with pytest.raises(UserError, match=sentence):
        evaluation.all_configs(*evaluation.command_line(words))


def test_a_picture_is_a_png():
    pytest.importorskip("matplotlib", reason="the extra `plots` is not installed")
    assert comparison.draw(comparison.rows([scored("mujica", 1), scored("rag", 0)])).startswith(
        b"\x89PNG"
    )


def test_agents_and_tasks_are_combined_and_checked_first(tmp_path):
    flags = ["tiny_world", "--checkpoint", str(tmp_path), "--task.environment", "text"]
    options, config = evaluation.command_line(
        [*flags, "--agents", "direct", "single", "--tasks", "two_wiki_text_smollm2"]
    )
    configs = evaluation.all_configs(options, config)
    assert [(chosen.task.kind, chosen.agent.kind) for chosen in configs] == [
        (task, agent)
        for task in ("tiny_world", "two_wiki")
        for agent in ("mujica", "direct", "single")
    ]
    assert isinstance(configs[1].agent, DirectConfig)
    assert (
        configs[1].agent.max_turn_tokens == config.agent.max_turn_tokens != CONFIG.max_turn_tokens
    )
    for words, message in (
        (
            ["--agents", "drect"],
            "unknown agent 'drect'; did you mean direct",
        ),
        (["--agents", "mujica"], "tiny_world text mujica is asked for twice"),
        (["--tasks", "two_wiki_texts"], "unknown configuration 'two_wiki_texts'; did you mean"),
        (
            ["--task.environment", "graph", "--agents", "rag"],
            "agent.kind rag only searches passages",
        ),
        (
            ["--agent.kind", "direct", "--agents", "mujica"],
            "the agent mujica needs prompt, but agent.kind is direct",
        ),
        (
            ["--agents", "direct", "--worker", "w"],
            "--worker is w, and the agents are mujica, direct, but only mujica has workers",
        ),
        (["--plot"], "--plot draws a comparison, but there is only one result"),
    ):
        with pytest.raises(UserError, match=message):
            evaluation.all_configs(*evaluation.command_line([*flags, *words]))
