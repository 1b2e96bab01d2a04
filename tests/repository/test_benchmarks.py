"""The benchmarks run, and print what their formulas say."""

import dataclasses
import json
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mujica_jax.config.checks import check, check_demonstrations
from mujica_jax.config.command_line import command_line
from mujica_jax.config.schema import DapoConfig
from mujica_jax.models.weights import save_checkpoint
from tests.helpers.packed_rows import MODEL, tiny_decoder
from tests.helpers.paths import ROOT
from tests.helpers.patience import HANG_SECONDS
from tests.helpers.tiny_embedder import WORDS, tiny_embedder


def printed(program: str, *arguments: str, status: int = 0) -> str:
    command = [sys.executable, str(ROOT / "benchmarks" / program), *arguments]
    finished = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, timeout=HANG_SECONDS
    )
    assert finished.returncode == status, finished.stderr
    return finished.stdout if status == 0 else finished.stderr


@pytest.mark.slow
def test_the_training_step_is_measured(tmp_path):
    save_checkpoint(tiny_decoder(), tmp_path / "model")
    sizes = ["--rows", "2", "--sequence-length", "128", "--repeats", "1"]
    checkpoint = ["--checkpoint", str(tmp_path / "model")]
    measured = json.loads(printed("train_tokens.py", "step", *checkpoint, *sizes))
    assert 0 < measured["tokens"] <= 256
    assert measured["tokens_per_second"] > 0
    assert measured["share_of_matmul"] < 1
    nowhere = str(tmp_path / "nowhere")
    refused = printed("train_tokens.py", "step", "--checkpoint", nowhere, status=2)
    assert "nowhere/config.json is missing" in refused


@pytest.mark.slow
def test_tokens_a_second_of_training_are_measured_beside_a_peer(tmp_path):
    save_checkpoint(tiny_decoder(), tmp_path / "model")
    sizes = ["--seconds", "1", "--rows", "1", "--conversations", "12"]
    peers = ["peers", "--checkpoint", str(tmp_path / "model")]
    measured = json.loads(printed("train_tokens.py", *peers, *sizes))
    assert measured["ours_steps"] > 0
    assert measured["transformers_steps"] > 0
    assert measured["by_transformers"] == pytest.approx(
        measured["ours_tokens_per_second"] / measured["transformers_tokens_per_second"], abs=0.02
    )
    assert measured["packing"] > 0.5
    nowhere = str(tmp_path / "nowhere")
    refused = printed("train_tokens.py", "peers", "--checkpoint", nowhere, status=2)
    assert "nowhere/config.json is missing" in refused
    without_tunix = ["--tunix-python", sys.executable, "--without", "transformers"]
    failed = printed("train_tokens.py", *peers, *sizes, *without_tunix, status=1)
    assert "tunix_training.py ended with status 1" in failed
    assert "No module named" in failed


def test_the_conversations_to_train_on_are_those_that_are_promised():
    program = runpy.run_path(str(ROOT / "benchmarks" / "train_tokens.py"))
    workload, repeated = (program["workload"](1000, seed=0) for _ in range(2))
    assert all(np.array_equal(workload[name], repeated[name]) for name in workload)
    lengths = workload["lengths"]
    assert lengths.size == 2000
    assert 320 < np.median(lengths) < 380
    assert 1500 < lengths.max() <= 2048
    assert workload["tokens"].size == workload["trained"].size == lengths.sum()
    conversations = program["conversations"](workload)
    assert [len(conversation.token_ids) for conversation in conversations] == lengths.tolist()
    loss_masks = [conversation.loss_mask for conversation in conversations]
    assert np.array_equal(np.concatenate(loss_masks), workload["trained"])
    assert 0.32 < workload["trained"].mean() < 0.36


@pytest.mark.slow
def test_under_overload_every_request_is_answered_or_refused_and_memory_is_bounded(tmp_path):
    save_checkpoint(tiny_decoder(), tmp_path / "model")
    sizes = [
        "--slots",
        "3",
        "--queue-size",
        "5",
        "--rounds",
        "3",
        "--prompt-tokens",
        "24",
        "--new-tokens",
        "6",
    ]
    measured = json.loads(printed("serving_overload.py", str(tmp_path / "model"), *sizes))
    assert measured["requests"] == 4 * (3 + 5) * 3
    assert measured["answered"] + measured["refused"] == measured["requests"]
    assert measured["faults"] == []
    assert measured["answered"] >= 3 + 5
    assert measured["refused"] > 0
    assert 0 < measured["max_running_and_waiting"] <= measured["room"] == 8
    middle, slowest = measured["answer_seconds_p50_p99"]
    assert 0 < middle <= slowest < 60
    assert measured["first_token_seconds_p50_p99"][1] <= slowest
    assert measured["memory_growth_mebibytes"] < 100


@pytest.mark.slow
def test_rollouts_are_measured_and_their_work_is_counted_by_the_formula(tmp_path, monkeypatch):
    # a cache of compiled programs that is empty at first
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    wide = dataclasses.replace(MODEL, vocab_size=400, max_position_embeddings=1024)
    save_checkpoint(tiny_decoder(wide), tmp_path / "model")
    sizes = ["--sessions", "3", "--turns", "2", "--slots", "2", "--runs", "1"]
    work, repeated = (
        json.loads(printed("rollout.py", "--checkpoint", str(tmp_path / "model"), *sizes))
        for _ in range(2)
    )
    assert repeated["recompiles"] == [0, 0], (
        "what the first program compiled, the second one finds on disk"
    )
    program = runpy.run_path(str(ROOT / "benchmarks" / "rollout.py"))
    sessions = program["workload"](400, sessions=3, turns=2, seed=0)
    assert work["generated_tokens"] == sum(
        turn.generated_tokens for session in sessions for turn in session.turns
    )
    assert work["saved_tokens"] >= 3 * 384, "the second turn of each begins as the first did"
    assert work["recompiles"][0] > 0 == work["recompiles"][1]
    refused = printed("rollout.py", "--checkpoint", str(tmp_path / "nowhere"), status=2)
    assert "nowhere/config.json is missing" in refused
    # One session, one turn of 1 token after 24 questions: a layer has 4 x 256 + 3 x 384 weights,
    # the head 400 x 16.
    turn = program["Turn"](1, [])
    operations, read = program["work"](wide, [program["Session"]([], [turn])])
    in_layers = 4 * 256 + 3 * 384
    tokens = 384 + 25
    pairs = 384**2 / 2 + sum(range(384, 409))
    assert operations == 2 * in_layers * tokens + 2 * 400 * 16 + 4 * 2 * 8 * pairs
    assert read == 8 * 2 * 8 * 24


def test_the_run_directory_is_measured_on_disk_and_in_a_bucket():
    sizes = ["--shards", "3", "--rows", "4", "--turn-tokens", "20", "--policy-bytes", "10000"]
    measured = json.loads(printed("store.py", *sizes))
    assert measured["shards"] == 3
    assert measured["rows_per_shard"] == 4
    assert measured["policy_bytes"] == 10_000
    for place in ("disk", "bucket"):
        rates = measured[place]
        assert len(rates) == 6
        assert min(rates.values()) > 0
        for kind in ("read", "write"):
            megabytes = rates[f"{kind}_shards_per_second"] * measured["bytes_per_shard"] / 1e6
            assert rates[f"{kind}_megabytes_per_second"] == pytest.approx(
                megabytes, rel=0.05, abs=0.02
            )
    refused = printed("store.py", *sizes, "--bucket", "s3://bucket", status=2)
    assert "is neither a local directory nor gs://BUCKET/NAME" in refused


@pytest.mark.slow
def test_sampling_by_many_workers_is_simulated_over_a_measured_store(tmp_path):
    """Workers that wait for nothing are as fast as they are many."""
    words = [
        "--unit-seconds",
        "60",
        "--units",
        "200",
        "--rounds",
        "2",
        "--workers",
        "1",
        "10",
        "400",
    ]
    one_worker, ten_workers, many_workers = map(
        json.loads, printed("samplers.py", "--latency", "0", *words).splitlines()[1:]
    )
    assert 0.9 < one_worker["share_of_linear"] < 1.1
    assert 0.85 < ten_workers["share_of_linear"] < 1.1
    assert many_workers["idle_share"] > 0.5, "two workers a unit"
    store = json.loads(
        printed(
            "samplers.py", "--store", str(tmp_path), "--workers", "1", "--units", "2"
        ).splitlines()[0]
    )
    assert 0 < store["read"] < 1
    assert 0 < store["create"] < 1
    assert not list(tmp_path.glob("*/*"))


def test_graphs_are_measured_beside_the_graph_in_memory(tmp_path):
    rows = [f"Film {n}\tdirector\tAnn {n % 7}\tQ{n + 100}\tQ{n % 7 + 10}" for n in range(300)]
    (tmp_path / "t.tsv").write_text(
        "subject\trelation\tobject\tsubject_qid\tobject_qid\n" + "\n".join(rows)
    )
    sizes = ["--entities", "500", "--facts", "3", "--searches", "50"]
    measured = json.loads(printed("graph.py", "--table", str(tmp_path / "t.tsv"), *sizes))
    assert measured["table"]["triples"] == 300
    assert measured["dump"]["triples"] == 2000
    assert (
        measured["table"]["searches_per_second"] < measured["table"]["memory_searches_per_second"]
    )
    assert measured["dump"]["build_peak_mib"] > 20
    assert measured["dump"]["index_bytes"] > 100_000


@pytest.mark.slow
def test_searching_is_measured_and_indexes_are_found_again(tmp_path):
    words = [
        "search",
        "--work",
        str(tmp_path),
        "--rows",
        "4000",
        "--rounds",
        "1",
        "--engines",
        "scann",
        "exact",
    ]

    def rows_printed() -> list[dict]:
        return [json.loads(line) for line in printed("retrieval.py", *words).splitlines()]

    first = rows_printed()
    second = rows_printed()
    by_the_rule = first[0]
    exact = first[-1]
    assert by_the_rule["engine"] == "scann"
    assert by_the_rule["setting"] is None
    assert exact["engine"] == "exact"
    assert by_the_rule["recall@10"] > 0.95
    assert exact["recall@10"] > 0.999
    assert all(row["queries_per_second"] > 0 < row["one_by_one_per_second"] for row in first)
    assert [row["build_seconds"] for row in second] == [row["build_seconds"] for row in first], (
        "none is built again"
    )
    assert [row["recall@10"] for row in second] == [row["recall@10"] for row in first]
    refused = printed("retrieval.py", *words[:3], "--rows", "5000", status=1)
    assert "holds 4,000 vectors and --rows is 5,000: give another --work" in refused


@pytest.mark.slow
def test_exact_search_is_measured_beside_the_speed_of_memory():
    words = ["exact", "--rows", "5000", "--dimension", "16", "--queries", "8", "--k", "3"]
    row = json.loads(printed("retrieval.py", *words))
    assert row["rows"] == 5000
    assert row["dimension"] == 16
    assert row["queries_per_second"] > 0
    assert row["memory_gigabytes_per_second"] > 0


def test_gold_titles_are_counted_by_hand(monkeypatch):
    """One of two titles is found, then the only one of one. Positions of -1 are no passages."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    program = runpy.run_path(str(ROOT / "benchmarks" / "retrieval.py"))
    positions = np.array([[0, 2], [1, -1]])
    gold = [{"a", "b"}, {"b"}]
    assert program["gold_percent"](positions, ["a", "b", "c"], gold) == 75.0
    of_musique = {
        "paragraphs": [
            {"title": "a", "paragraph_text": "A.", "is_supporting": True},
            {"title": "b", "paragraph_text": "B.", "is_supporting": False},
        ]
    }
    of_hotpotqa = {
        "context": [["a", ["A. ", "Also."]], ["b", ["B."]]],
        "supporting_facts": [["a", 0], ["a", 1]],
    }
    for record, text in ((of_musique, "A."), (of_hotpotqa, "A. Also.")):
        assert program["gold_titles_of"](record) == {"a"}
        assert list(program["passages_of"](record)) == [("a", text), ("b", "B.")]


@pytest.mark.slow
def test_embedding_is_measured(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    lines = [json.dumps({"title": word, "text": f"{word} and more"}) for word in WORDS]
    corpus.write_text("\n".join(lines))
    words = [
        "--embedder",
        str(tiny_embedder(tmp_path / "embedder")),
        "--passages",
        "64",
        "--rounds",
        "1",
    ]
    (row,) = map(
        json.loads, printed("retrieval.py", "encode", "--corpus", str(corpus), *words).splitlines()
    )
    assert row["encoder"] == "ours"
    assert row["passages"] == 64
    assert row["passages_per_second"] > 0


def test_every_run_behind_the_claims_has_a_command_that_is_taken(monkeypatch):
    """Each begins with a policy that another run makes."""
    monkeypatch.chdir(ROOT)
    claims = runpy.run_path(str(ROOT / "benchmarks" / "claims.py"))
    named = {}
    for name, experiment in claims["EXPERIMENTS"].items():
        if experiment.roles is not None:
            assert {role.removesuffix("@start") for role in experiment.roles} <= named.keys()
            continue
        assert experiment.start is None or claims["EXPERIMENTS"][experiment.start].start is None
        named[name] = command_line(
            claims["command"](Path("runs"), name, 1)[3:], default="tiny_world"
        )
        check(named[name])
        check_demonstrations(named[name])
        assert named[name].seed == 1
        assert bool(named[name].init) == (experiment.text or bool(experiment.start))
    method = named["dapo"].method
    assert isinstance(method, DapoConfig)
    assert method.dynamic_sampling
    assert set(claims["SECTIONS"]) == set(claims["Tables"]({}).all())


def test_a_table_without_records_stays_as_it_is_on_the_page(tmp_path):
    """Verdicts, conclusions and the commands of its runs stay too."""
    claims = runpy.run_path(str(ROOT / "benchmarks" / "claims.py"))
    page = tmp_path / "claims.md"
    page.write_text((ROOT / "docs" / "lab" / "claims.md").read_text())
    records = {}
    for number, name in enumerate(("evipath", "evipath-deductive")):
        scores = {"em": 12.5, "em_sampled": 2.5, "f1_sampled": 5.0, "searches": 1.0}
        points = [
            claims["Point"](phase, scores, 1.5, 7 * number, 0, 0, 0.5, 0.75)
            for phase in ("warm-up", "evipath")
        ]
        record = claims["Record"]("a machine", "abcdef0", points, evaluating={}, trees={})
        records[name] = {0: record}
    claims["write"](records, page)

    before = (ROOT / "docs" / "lab" / "claims.md").read_text().split("\n\n")
    after = page.read_text().split("\n\n")
    changed = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert len(changed) == 2, "EviPath's table and the commands"
    table, commands = changed
    assert "| deductive, the same teacher | 12.5 | 2.5 | 1.00 | 7 | 0.5 |" in table[1]
    old, new = (dict(line.split(" | ", 1) for line in lines.splitlines()[2:]) for lines in commands)
    assert {name for name in new if old.get(name) != new[name]} == {
        "| evipath",
        "| evipath-deductive",
    }
    assert new["| evipath"].startswith("1 | a machine | abcdef0 | `python -m mujica_jax.train ")
    assert new.keys() == old.keys()


def test_the_records_of_claims_outlive_their_runs(tmp_path):
    """A finished run is recorded once it is seen; later pages are made without its directory.

    By hand: 30 + 6 seconds of sampling and learning are 0.6 minutes; with 12 of evaluation and 12
    of compilation the phase took 1 minute.
    """
    claims = runpy.run_path(str(ROOT / "benchmarks" / "claims.py"))
    run = tmp_path / "runs" / "staged-1"
    (run / "eval").mkdir(parents=True)
    phases = []
    for name, em, trajectories in (("warm-up", 40.0, 0), ("round 1", 50.0, 32)):
        scores = {"em": em, "f1": 60.0, "em_sampled": 30.0, "f1_sampled": 35.0, "searches": 2.0}
        phases.append(
            {"name": name, "questions": 10, "trajectories": trajectories, "accepted": 16, **scores}
        )
        evaluation = {"em_interval": [1.0, 99.0], "searches": 1.25}
        (run / "eval" / f"{name.replace(' ', '-')}.json").write_text(
            json.dumps({"greedy": evaluation, "sampled": evaluation})
        )
    (run / "summary.json").write_text(json.dumps({"phases": phases}))
    (run / "config.json").write_text(json.dumps({"git_revision": "0123456789"}))
    times = {"evaluating_seconds": 12.0, "compiling_seconds": 12.0, "total_seconds": 60.0}
    lines = [
        {"phase": "time", "step": 0, "learning_seconds": 500.0, **times},
        {"phase": "sampling", "step": 1, "generated_tokens": 900},
        {"phase": "time", "step": 1, "sampling_seconds": 30.0, "learning_seconds": 6.0, **times},
    ]
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))

    file = tmp_path / "claims.json"
    claims["collect"](tmp_path / "runs", [0, 1], "a machine", file)
    shutil.rmtree(run)
    claims["collect"](tmp_path / "runs", [0, 1], "another machine", file)
    (record,) = claims["load_records"](file)["staged"].values()
    assert record.machine == "a machine"
    assert record.revision == "0123456"
    start, last = record.points
    assert (start.trajectories, start.minutes, start.scores["em"]) == (0, 0.0, 40.0)
    assert (last.trajectories, last.learnt, last.tokens) == (32, 16, 900)
    assert (last.minutes, last.wall_minutes, last.sampled_searches) == (0.6, 1.0, 1.25)


def test_two_models_are_evaluated_by_one_command_and_cost_what_both_took(tmp_path):
    claims = runpy.run_path(str(ROOT / "benchmarks" / "claims.py"))
    words = claims["command"](Path("runs"), "evipath-two-models", 1)
    assert " ".join(words[1:]) == (
        "-m mujica_jax.eval --checkpoint runs/evipath-planner-1 --worker runs/evipath-executor-1 "
        "--out runs/evipath-two-models-1"
    )
    untuned_worker = claims["command"](Path("runs"), "evipath-planner-beside", 0)
    assert "runs/evipath-0/policies/000000/model" in untuned_worker
    untuned_planner = " ".join(claims["command"](Path("runs"), "evipath-executor-beside", 0))
    assert (
        "--checkpoint runs/evipath-0 --policy 0 --worker runs/evipath-executor-0" in untuned_planner
    )
    scores = {"em": 50.0, "searches": 2.0, "f1": 60.0}
    file = tmp_path / "result.json"
    file.write_text(json.dumps({"greedy": scores, "sampled": scores | {"em": 40.0}}))
    planner = claims["Point"]("evipath", {}, 2.0, 500, 400, 1000, 2.0, 3.0)
    executor = claims["Point"]("evipath", {}, 2.0, 500, 400, 1000, 1.5, 2.5)
    both = claims["of_roles"](file, [planner, executor])
    assert both.trajectories == 500
    assert both.learnt == 400
    assert both.minutes == 3.5
    assert both.wall_minutes == 5.5
    assert both.scores == {"em": 50.0, "searches": 2.0, "em_sampled": 40.0, "f1_sampled": 60.0}
