"""Whole runs, started as a user starts them: what they print and leave, what they tell of
themselves, and what Ctrl-C leaves.

One file: the run that its default tests look at is waited for by one worker, while the other one
does other tests.
"""

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mujica_jax.report.results import PhaseRow
from tests.helpers.paths import ROOT
from tests.helpers.whole_runs import (
    ENVIRONMENT,
    EVAL,
    SECONDS,
    TRAIN,
    TWO_WIKI_CONFIG,
    closing,
    finished,
    json_lines,
    outcome,
    rest,
)


@pytest.mark.slow
@pytest.mark.fault
def test_a_run_prints_the_table_and_writes_the_summary(undisturbed):
    value = json.loads((undisturbed.directory / "summary.json").read_text())
    assert set(value) == {"task", "method", "reward", "split", "seed", "phases", "seconds"}
    assert value["task"] == "tiny_world"
    assert value["method"] == "mygo"
    assert value["seed"] == 0
    expected = ["warm-up", "control", "round 1", "round 2"]
    assert [phase["name"] for phase in value["phases"]] == expected
    expected = [False, False, True, True]
    # A script plays the first two.
    assert [phase["tokens"] > 0 for phase in value["phases"]] == expected
    promised = (
        "name em f1 em_sampled f1_sampled questions trajectories accepted tokens seconds".split()
    )
    for phase in value["phases"]:
        assert set(phase) >= set(promised)
        assert PhaseRow(**phase).questions == 12
    table = closing(undisturbed.output).splitlines()
    assert [line[:7] for line in table if line.startswith(("warm", "control", "round"))] == [
        phase["name"] for phase in value["phases"]
    ]


@pytest.mark.slow
@pytest.mark.fault
def test_the_small_run_goes_through_everything_it_is_to_measure(undisturbed):
    """Without this the comparisons below compare nothing."""
    numbers = undisturbed.outcome
    # first attempts and later ones
    assert len(set(numbers["shards"].values())) == len(numbers["shards"]) >= 5
    models = [files["model/model.safetensors"] for files in numbers["policies"].values()]
    assert len(set(models)) == len(models) == 3, "the warm-up and both rounds learnt"
    assert [phase["accepted"] > 0 for phase in numbers["summary"]["phases"][2:]] == [True, True]
    assert len(set(numbers["evaluations"].values())) == 4
    assert any(phase["searches"] > 0 for phase in numbers["summary"]["phases"]), "workers took part"


@pytest.mark.slow
def test_interrupted_it_says_how_to_go_on_and_another_seed_gives_another_run(undisturbed, tmp_path):
    running = subprocess.Popen(
        [*TRAIN, "--seed", "1"],
        cwd=tmp_path,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A background job of a shell ignores Ctrl-C, and so would what it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        until = time.monotonic() + SECONDS
        while not list(tmp_path.glob("runs/*/rounds/0001/plan.json")) and time.monotonic() < until:
            assert running.poll() is None, running.communicate()[1]
            time.sleep(0.02)
        running.send_signal(signal.SIGINT)
        _, messages = running.communicate(timeout=SECONDS)
    finally:
        running.kill()
    assert running.returncode == 130
    assert "Traceback" not in messages
    command = shlex.split(messages.strip().splitlines()[-1].partition("continue with: ")[2])
    assert command[:3] == ["python", "-m", "mujica_jax.train"]
    assert "--run" in command
    finished([sys.executable, *command[1:]], cwd=tmp_path)
    (directory,) = tmp_path.glob("runs/smoke-*")
    numbers = outcome(directory)
    measure = undisturbed.outcome
    assert numbers["summary"]["seed"] == 1
    for key in ("evaluations", "policies"):
        assert all(numbers[key][name] != value for name, value in measure[key].items()), key


@pytest.mark.slow
@pytest.mark.fault
def test_a_finished_run_prints_its_table_again_and_changes_nothing(undisturbed):
    def content() -> dict[Path, bytes]:
        return {
            path: path.read_bytes() for path in undisturbed.directory.rglob("*") if path.is_file()
        }

    before = content()
    # rewarded as the run was, or its replay holds other demonstrations
    output = rest(undisturbed.directory)
    assert closing(output) == closing(undisturbed.output)
    assert content() == before


@pytest.mark.slow
def test_eval_repeats_what_the_run_found(copy):
    printed = finished([*EVAL, "--checkpoint", str(copy)])
    result = json.loads((copy / "eval" / "tiny_world-graph-dev.json").read_text())
    own = json.loads((copy / "eval" / "round-2.json").read_text())
    for scores in (result, own):
        del scores["greedy"]["seconds"]
        del scores["sampled"]["seconds"]
    assert result["policy"] == 2
    assert result["greedy"] == own["greedy"]
    assert result["sampled"] == own["sampled"]
    lines = json_lines(copy / "eval" / "tiny_world-graph-dev.predictions.jsonl")
    earlier = json_lines(copy / "eval" / "round-2.predictions.jsonl")
    compared = ("id", "prediction", "stop_reason", "searches")
    for line, earlier_line in zip(lines, earlier, strict=True):
        assert [line[key] for key in compared] == [earlier_line[key] for key in compared]
    rows = dict(line.split()[:2] for line in printed.splitlines() if len(line.split()) == 8)
    questions = {kind: str(score["questions"]) for kind, score in own["greedy"]["by_kind"].items()}
    assert rows == questions | {"all": "12"}


@pytest.mark.slow
def test_without_demonstrations_the_rounds_begin_with_the_checkpoint(undisturbed, tmp_path):
    """Nothing is played by a script and nothing is sampled with worked examples.

    A task may have neither.
    """
    model = undisturbed.directory / "policies" / "000002" / "model"
    directory = tmp_path / "run"
    flags = (
        "--warmup.source few_shot --warmup.steps 0 --pretraining.steps 0 --eval.no-control "
        "--method.rounds 1"
    )
    finished([*TRAIN, "--init", str(model), "--run", str(directory), *flags.split()])
    assert outcome(directory)["evaluations"].keys() == {"warm-up.parquet", "round-1.parquet"}
    phases = json.loads((directory / "summary.json").read_text())["phases"]
    assert [phase["trajectories"] > 0 for phase in phases] == [False, True]


@pytest.mark.slow
def test_a_policy_that_was_trained_on_a_graph_is_evaluated_on_passages(undisturbed, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    title = "The Purple Shore"
    (data / "corpus.json").write_text(
        json.dumps([{"title": title, "text": "A film of 1950 by Ada Moss."}])
    )
    asked = {
        "question": f"Who directed {title}?",
        "answer": "Ada Moss",
        "type": "inference",
        "supporting_facts": [title],
    }
    questions = [json.dumps(asked | {"id": f"question {number}"}) for number in range(40)]
    (data / "questions.jsonl").write_text("\n".join(questions) + "\n")
    of_run = [
        "--checkpoint",
        str(undisturbed.directory),
        "--policy",
        "0",
        "--out",
        str(tmp_path / "results"),
    ]
    on_text = [
        "--task.environment",
        "text",
        "--task.data-dir",
        str(data),
        "--eval.questions",
        "1000",
        "--seed",
        "5",
    ]
    output = finished([*EVAL, str(TWO_WIKI_CONFIG), *of_run, *on_text])
    result = json.loads((tmp_path / "results" / "two_wiki-text-dev.json").read_text())
    predictions = json_lines(tmp_path / "results" / "two_wiki-text-dev.predictions.jsonl")
    expected = ["two_wiki", "text", 0, 5]
    assert [result[key] for key in ("task", "environment", "policy", "seed")] == expected
    assert 0 < result["greedy"]["questions"] == len(predictions) <= 20
    assert (
        f"eval.questions is 1000, but there are only {len(predictions)} held-out questions; "
        "all of them are evaluated" in output
    )


OOD = """--task.top-k 3 --engine.tensor-parallel-size 1 --engine.max-num-seqs 16
--engine.cache-gigabytes 0 --agent.prompt brief --agent.max-iterations 4 --agent.max-turn-tokens 80
--agent.max-trajectory-tokens 384 --agent.max-observation-tokens 160""".split()


@pytest.mark.slow
def test_a_policy_is_scored_on_tasks_that_it_was_not_trained_on(undisturbed, tmp_path):
    """The tasks are those of the paper's out-of-domain rows, with passages and with a graph."""
    run = shutil.copytree(undisturbed.directory, tmp_path / "run")
    asked = {
        "id": "2hop__1_2",
        "question": "Where was the director of The Purple Shore born?",
        "answer": "Ghent",
    }
    paragraph = {
        "title": "The Purple Shore",
        "paragraph_text": "A film by Ada Moss.",
        "is_supporting": True,
    }
    asked |= {"answer_aliases": [], "answerable": True, "paragraphs": [paragraph]}
    passages = tmp_path / "musique"
    graphs = tmp_path / "qald"
    passages.mkdir()
    graphs.mkdir()
    (passages / "musique_ans_v1.0_dev.jsonl").write_text(json.dumps(asked) + "\n")
    query = {"sparql": "SELECT ?uri WHERE { wd:Q1 wdt:P57 ?uri . }"}
    rows = {"bindings": [{"uri": {"type": "uri", "value": "http://www.wikidata.org/entity/Q2"}}]}
    wordings = [{"language": "en", "string": "Who directed The Purple Shore?"}]
    record = {
        "id": 1,
        "question": wordings,
        "query": query,
        "answers": [{"head": {"vars": ["uri"]}, "results": rows}],
    }
    (graphs / "qald_10.json").write_text(json.dumps({"questions": [record]}))
    (tmp_path / "triples.tsv").write_text(
        "subject\trelation\tobject\tsubject_qid\tobject_qid\n"
        "The Purple Shore\tdirector\tAda Moss\tQ1\tQ2\n"
    )
    graph = [
        "build",
        "--corpus",
        str(tmp_path / "triples.tsv"),
        "--kind",
        "graph",
        "--out",
        str(tmp_path / "graph"),
    ]
    finished([sys.executable, "-m", "mujica_jax.index", *graph])
    of_run = ["--checkpoint", str(run), *OOD, "--task.retriever", "bm25"]
    output = finished(
        [*EVAL, "musique_v5e", *of_run, "--task.data-dir", str(passages), "--task.index", "None"]
    )
    assert "trained with other settings" not in output
    graph_flags = ["--task.data-dir", str(graphs), "--task.index", str(tmp_path / "graph")]
    finished([*EVAL, "qald10_v5e", *of_run, *graph_flags])
    for task, question, answer in (
        ("musique-text", asked["question"], "Ghent"),
        ("qald10-graph", wordings[0]["string"], "Ada Moss"),
    ):
        result = json.loads((run / "eval" / f"{task}-test.json").read_text())
        assert result["policy"] == 2
        assert result["greedy"]["questions"] == 1
        (line,) = json_lines(run / "eval" / f"{task}-test.predictions.jsonl")
        assert line["question"] == question
        assert line["answers"] == [answer]


def documented(heading: str) -> set[str]:
    """Return the names in the table under a heading of docs/reference/metrics.md."""
    part = (
        (ROOT / "docs" / "reference" / "metrics.md")
        .read_text()
        .partition(f"\n## {heading}")[2]
        .partition("\n## ")[0]
    )
    return set(re.findall(r"^\| `(\w+)` \|", part, re.MULTILINE))


@pytest.mark.slow
@pytest.mark.fault
def test_every_metric_that_is_written_is_documented_and_the_other_way_round(undisturbed):
    headings = {
        "learn": "Learning",
        "sampling": "The engine",
        "evaluating": "The engine",
        "mygo": "MyGO",
    }
    headings |= {
        "mismatch": "Train-inference mismatch",
        "time": "Where the time goes",
        "store": "The run directory",
    }
    headings |= {"retrieval": "Searches"}
    written: dict[str, set[str]] = {heading: set() for heading in headings.values()}
    for line in json_lines(undisturbed.directory / "metrics.jsonl"):
        written[headings[line["phase"].rpartition("/")[2]]] |= set(line) - {"phase", "step", "time"}
    # a CPU does not say
    assert written == {heading: documented(heading) - {"device_peak_bytes"} for heading in written}


@pytest.mark.slow
@pytest.mark.fault
def test_engine_and_trainer_agree_on_what_was_sampled(undisturbed):
    lines = [
        line
        for line in json_lines(undisturbed.directory / "metrics.jsonl")
        if line["phase"] == "mismatch"
    ]
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert line["compared_tokens"] > 100
        assert line["logprob_difference_max_absolute"] < 1e-4
        assert abs(line["logprob_kl"]) < 1e-6


@pytest.mark.slow
@pytest.mark.fault
def test_the_split_of_the_time_names_every_stage(undisturbed):
    lines = [
        line
        for line in json_lines(undisturbed.directory / "metrics.jsonl")
        if line["phase"] == "time"
    ]
    assert [line["step"] for line in lines] == [0, 1, 2]
    for line in lines[1:]:
        stages = {
            name: value
            for name, value in line.items()
            if name.endswith("_seconds") and name != "total_seconds"
        }
        assert sum(stages.values()) == pytest.approx(line["total_seconds"])
        assert line["other_seconds"] < 0.5 * line["total_seconds"]
