import dataclasses
import io
import json
import math
import re
import subprocess
import sys
import time

import pytest

from mujica_jax.records import Conversation, Question, Search, StopReason, Trajectory, Turn
from mujica_jax.report.progress import Progress
from mujica_jax.report.results import PhaseRow, closing_table, question_tree, summary_dict
from mujica_jax.report.text import plain, visible
from tests.helpers.episodes import episode
from tests.helpers.patience import HANG_SECONDS


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class AsciiFile(io.StringIO):
    encoding = "ascii"


WARM_UP = PhaseRow(
    name="warm-up",
    em=38.256,
    f1=41.0,
    em_sampled=30.0,
    f1_sampled=33.333,
    questions=500,
    searches=2.5,
    seconds=120.0,
)
ROUND = PhaseRow(
    name="round 1",
    em=45.5,
    f1=50.25,
    questions=500,
    trajectories=12_345,
    accepted=678,
    by_kind={"bridge": {"em": 18.18181, "f1": 20.0, "questions": 11}},
    seconds=90.0,
)


def trajectory(**changes: object) -> Trajectory:
    searches = (
        Search(
            iteration=0,
            query="Who directed Blue Lantern?",
            entity="Blue Lantern",
            materials=("Blue Lantern, year, 1971", "Blue Lantern, director, Mara Voss"),
            selected=(1,),
            sentence="Mara Voss directed it.",
            found=True,
        ),
        Search(iteration=0, query="Who wrote it?", materials=("a", "b"), found=False),
        Search(
            iteration=1,
            query="Where was Mara Voss born?",
            materials=("[0] Ilmen",),
            selected=(0,),
            sentence="Ilmen.",
        ),
    )
    fields = {"question_id": "q1", "answer": "Ilmen", "reward": 1.0, "rewards_by_part": {"em": 1.0}}
    return episode(
        Conversation(role="planner", turns=()), **fields | {"searches": searches} | changes
    )


QUESTION = Question(
    id="q1", text="Where was the director of Blue Lantern born?", answers=("Ilmen", "Old Ilmen")
)


# Progress


def run_stage(stream: io.StringIO, seconds: float, updates: int) -> list[str]:
    clock = Clock()
    with Progress(stream, clock=clock).stage("warm-up", total=updates) as stage:
        for step in range(1, updates + 1):
            clock.now += seconds / updates
            stage.update(
                step,
                loss=1.0 / step,
                tokens_per_second=41_234.0,
                k=0.75,
                acceptance=0.256,
                em=12.34,
            )
    return stream.getvalue().splitlines()


def test_a_pipe_gets_a_line_every_five_seconds_and_one_at_the_end():
    lines = run_stage(io.StringIO(), seconds=60, updates=1000)
    # Eleven whole intervals after the first and the last line.
    assert len(lines) == 12
    assert not any("\x1b" in line for line in lines)


def test_a_line_holds_count_rate_time_left_and_figures():
    lines = run_stage(io.StringIO(), seconds=20, updates=40)
    assert lines[0] == (
        "warm-up: 10/40 steps, 2 steps/s, eta 0:15, 0:05 so far, "
        "loss 0.1, tokens/s 41.2k, threshold K 0.75, acceptance 26%, EM 12.3"
    )
    assert lines[-1].startswith("warm-up: 40/40 steps in 0:20 (2 steps/s), loss 0.025")


def test_a_short_stage_leaves_one_line():
    assert len(run_stage(io.StringIO(), seconds=4, updates=100)) == 1


def test_the_rate_is_that_of_the_last_half_minute():
    clock = Clock()
    with Progress(io.StringIO(), clock=clock).stage("slow start", total=1000) as stage:
        # The wait stands for compilation.
        clock.now += 100
        stage.update(1)
        for step in range(2, 402):
            clock.now += 0.1
            stage.update(step)
        assert stage.rate() == pytest.approx(10.0, rel=0.01)


def test_the_time_left_is_shown_when_a_twentieth_of_what_is_left_is_done():
    clock = Clock()
    with Progress(io.StringIO(), clock=clock).stage("resumed", total=1000, done=900) as stage:
        for done, shown in ((904, False), (905, True)):
            clock.now += 10
            stage.update(done)
            assert ("eta" in stage.counts()) == shown


def test_units_of_an_earlier_run_do_not_count_as_speed():
    clock = Clock()
    with Progress(io.StringIO(), clock=clock).stage("resumed", total=100, done=90) as stage:
        clock.now += 10
        stage.update(95)
        assert stage.rate() == pytest.approx(0.5)
        assert stage.summary() == "95/100 steps in 0:10 (0.5 steps/s)"


def test_a_figure_stays_until_a_newer_one_and_none_hides_it():
    with Progress(io.StringIO()).stage("round", unit="questions") as stage:
        stage.update(1, em=10.0, loss=math.nan)
        stage.update(2, loss=0.5)
        assert stage.figures() == ["EM 10.0", "loss 0.5"]
        stage.update(3, em=None)
        assert stage.figures() == ["loss 0.5"]


def test_figures_of_the_moment_are_asked_for_when_they_are_shown_and_left_out_at_the_end():
    clock = Clock()
    stream = io.StringIO()
    asked = []

    def live() -> dict:
        asked.append(clock.now)
        return {"running": 3, "cached": "75%"}

    with Progress(stream, clock=clock).stage(
        "sampling", total=9, unit="questions", live=live
    ) as stage:
        for done in range(1, 9):
            clock.now += 1
            stage.update(done, k=0.5)
    first, last = stream.getvalue().splitlines()
    assert first.endswith("threshold K 0.5, running 3, cached 75%")
    assert last.endswith("threshold K 0.5")
    assert asked == [105.0]


def test_an_interrupted_stage_says_where_it_stopped():
    stream = io.StringIO()
    with (
        pytest.raises(KeyboardInterrupt),
        Progress(stream).stage("sampling", total=9, unit="questions") as stage,
    ):
        stage.update(4)
        raise KeyboardInterrupt
    assert stream.getvalue().startswith("sampling: stopped at 4/9 questions in ")


def test_a_terminal_shows_both_open_stages_and_keeps_one_line_each(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    stream = Terminal()
    report = Progress(stream)
    with report.stage("round 1", total=2, unit="shards") as outer:
        outer.update(1, k=0.5)
        with report.stage("sampling", total=64, unit="questions") as inner:
            inner.update(32, acceptance=0.5)
            # The display's own thread writes it.
            until = time.monotonic() + HANG_SECONDS
            while "32/64" not in stream.getvalue() and time.monotonic() < until:
                time.sleep(0.01)
        report.line("a [bold]note[/bold]")
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue()).replace("\r", "\n")
    assert "32/64 questions" in text
    assert "acceptance 50%" in text
    assert "a [bold]note[/bold]" in text
    assert re.search(r"^sampling: 32/64 questions in \d+:\d\d", text, re.MULTILINE)
    assert "\x1b[?25h" in stream.getvalue(), "the cursor comes back"


@pytest.mark.parametrize("live", [False, True])
def test_an_update_costs_microseconds(live):
    with Progress(Terminal(), live=live).stage("warm-up", total=20_000) as stage:
        start_time = time.thread_time()
        for step in range(20_000):
            stage.update(step, loss=0.5, tokens_per_second=40_000.0)
        seconds = (time.thread_time() - start_time) / 20_000
    # A step of a millisecond would still lose less than a twentieth.
    assert seconds < 50e-6


def test_one_refresh_of_the_live_display_takes_less_than_its_share_of_a_second():
    report = Progress(Terminal(), live=True)
    with report.stage("warm-up", total=100) as stage:
        stage.update(50, loss=0.5, tokens_per_second=40_000.0, k=0.5, acceptance=0.5, em=50.0)
        console = report._console()
        costs = []
        for _ in range(20):
            start_time = time.thread_time()
            console.render_lines(report._stages())
            costs.append(time.thread_time() - start_time)
    assert min(costs) * 4 < 0.01, "four refreshes a second cost more than one percent"


def test_names_that_a_stream_cannot_encode_are_escaped():
    stream = AsciiFile()
    Progress(stream).line("Zoë")
    assert stream.getvalue() == "Zo\\xeb\n"


def test_importing_report_loads_neither_tensorboard_nor_jax():
    program = (
        "import sys; from mujica_jax.report import metrics_log, progress, results\n"
        "print([m for m in ('tensorboardX', 'jax') if m in sys.modules])"
    )
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert output.strip() == "[]"


# Table and summary


def test_the_table_is_aligned_plain_text_of_80_columns_in_a_pipe():
    stream = io.StringIO()
    Progress(stream).show(closing_table([WARM_UP, ROUND]))
    lines = stream.getvalue().splitlines()
    assert lines[0].split() == ["EM", "F1"]
    expected = [
        "phase",
        "EM",
        "F1",
        "sampled",
        "sampled",
        "trajectories",
        "accepted",
        "searches",
        "minutes",
    ]
    assert lines[1].split() == expected
    assert lines[3].split() == ["warm-up", "38.3", "41.0", "30.0", "33.3", "-", "-", "2.50", "2.0"]
    assert lines[4].split() == ["round", "1", "45.5", "50.2", "-", "-", "12,345", "678", "-", "1.5"]
    assert len(lines[3]) == len(lines[4]) == len(lines[1]) <= 80, (
        "right-aligned columns end together"
    )


def test_the_table_has_colours_on_a_terminal_only(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal = Terminal()
    Progress(terminal).show(closing_table([WARM_UP]))
    assert "\x1b[" in terminal.getvalue()
    assert "\x1b[" not in plain(closing_table([WARM_UP]))


def summary_of(*phases: PhaseRow) -> dict:
    return summary_dict(phases, task="t", method="m", reward="f1", split="dev", seed=0)


def test_summary_has_the_promised_fields():
    summary = summary_of(WARM_UP, ROUND)
    assert list(summary) == ["task", "method", "reward", "split", "seed", "phases", "seconds"]
    promised = [
        "name",
        "em",
        "f1",
        "em_sampled",
        "f1_sampled",
        "questions",
        "trajectories",
        "accepted",
        "seconds",
    ]
    assert all(field in phase for phase in summary["phases"] for field in promised)
    assert json.loads(json.dumps(summary)) == summary


def test_summary_rounds_to_two_decimals_at_every_depth():
    summary = summary_of(WARM_UP, ROUND)
    assert summary["phases"][0]["em"] == 38.26
    assert summary["phases"][1]["by_kind"]["bridge"] == {"em": 18.18, "f1": 20.0, "questions": 11}
    assert summary["seconds"] == 210.0
    assert summary_of(dataclasses.replace(WARM_UP, seconds=1.005001))["seconds"] == 1.01


def test_a_phase_comes_back_from_the_summary():
    summary = summary_of(ROUND)
    restored = PhaseRow(**summary["phases"][0])
    assert summary_of(restored) == summary


# Tree


def test_the_tree_shows_iterations_searches_evidence_answer_and_reward():
    assert plain(question_tree(QUESTION, trajectory())).splitlines() == [
        "Where was the director of Blue Lantern born?",
        "├── iteration 1",
        "│   ├── [Blue Lantern] Who directed Blue Lantern?",
        "│   │   ├── evidence: Blue Lantern, director, Mara Voss",
        "│   │   └── worker: Mara Voss directed it.",
        "│   └── Who wrote it?",
        "│       └── worker: nothing found in 2 materials",
        "├── iteration 2",
        "│   └── Where was Mara Voss born?",
        "│       ├── evidence: [0] Ilmen",
        "│       └── worker: Ilmen.",
        "├── answer: Ilmen",
        "├── gold: Ilmen | Old Ilmen",
        "└── reward: 1.00 (em 1.00)",
    ]


def test_a_failed_trajectory_says_why():
    failed = trajectory(
        answer="", reward=0.0, stop_reason=StopReason.ITERATION_LIMIT, rewards_by_part={}
    )
    lines = plain(question_tree(QUESTION, failed)).splitlines()
    assert "├── no answer: iteration_limit" in lines
    assert lines[-1] == "└── reward: 0.00"


def test_markup_and_control_characters_in_data_are_shown_literally():
    hostile = Search(
        iteration=0,
        query="[bold]who[/bold] [0]",
        entity="[red]x[/]",
        materials=("a\x1b[2Jb\r\nc", "\u202eright to left"),
        selected=(0, 1, 7),
        sentence=":smile: [link=http://x]y[/link]",
        found=True,
    )
    text = plain(question_tree(QUESTION, trajectory(searches=(hostile,))))
    assert "[[red]x[/]] [bold]who[/bold] [0]" in text
    assert "evidence: a\\x1b[2Jb\\r\\nc\n" in text
    assert "evidence: \\u202eright to left" in text
    assert "evidence: number 7 of 2 (does not exist)" in text
    assert "worker: :smile: [link=http://x]y[/link]" in text


def test_a_tree_becomes_ascii_where_the_stream_is():
    stream = AsciiFile()
    Progress(stream).show(question_tree(QUESTION, trajectory()))
    assert stream.getvalue().isascii()
    assert "+-- answer: Ilmen" in stream.getvalue()


def test_what_an_agent_without_workers_found_is_shown_and_its_last_turn_where_there_is_no_answer():
    last_turn = Turn(role="model", token_ids=(1,), text="It is \x1b[31mIlmen.", trained=True)
    search = Search(iteration=0, query="Where?", materials=("a [bold]", "b"), found=True)
    ended = trajectory(searches=(search,), answer="", stop_reason=StopReason.NO_ACTION)
    silent = dataclasses.replace(ended, conversations=(), stop_reason=StopReason.RETRIEVER_FAILED)
    trajectory_with_turn = dataclasses.replace(
        ended, conversations=(Conversation(role="planner", turns=(last_turn,)),)
    )
    shown = plain(question_tree(QUESTION, trajectory_with_turn))
    assert "found: a [bold]" in shown
    assert "found: b" in shown
    assert "worker" not in shown
    assert "last turn: It is \\x1b[31mIlmen." in shown
    assert "no answer: retriever_failed" in plain(question_tree(QUESTION, silent))


def test_a_tree_of_another_question_is_refused():
    with pytest.raises(AssertionError, match="belongs to question q2, not to q1"):
        question_tree(QUESTION, trajectory(question_id="q2"))


def test_visible_keeps_ordinary_text():
    for text in (
        "Zoë \u4e2d\u6587",
        "no\u00a0break",
        "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645",
    ):
        assert visible(text) == text
