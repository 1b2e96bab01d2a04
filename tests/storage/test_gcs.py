"""A bucket that answers 503, hangs, cuts what is sent and loses answers: what is in it at the end
is what an undisturbed one holds.
"""

import dataclasses
import functools
import itertools
import json
import random
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import get_args

import hypothesis
import hypothesis.strategies as st
import pytest

from mujica_jax.commands import eval
from mujica_jax.errors import StoreError, StoreUnavailableError, UserError
from mujica_jax.report.metrics_log import MetricsLog
from mujica_jax.storage import gcs, run_directory
from mujica_jax.storage.run_directory import local_folder, open_to_append
from mujica_jax.trajectories.store import Store, open_run, shard_name
from tests.helpers.fake_bucket import FakeBucket, Fault, Request, use
from tests.helpers.patience import HANG_SECONDS
from tests.trajectories.test_store import trajectory, write_weights

FAULTS: tuple[Fault, ...] = get_args(Fault)
UNANSWERED: tuple[Fault, ...] = (
    "503",
    "hang",
    "lost answer",
)  # for requests that carry next to nothing
QUICK = tuple(fault for fault in FAULTS if fault != "hang")


@pytest.fixture
def fake(tmp_path, monkeypatch) -> FakeBucket:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # No request is late on a busy machine, but those that hang are: see `once`.
    monkeypatch.setattr(gcs, "REQUEST_SECONDS", HANG_SECONDS)
    monkeypatch.setattr(gcs, "DEADLINE_SECONDS", HANG_SECONDS)
    return use(monkeypatch)


@pytest.fixture
def store(fake) -> Store:
    return Store("gs://bucket/run")


def once(kind: str, *faults: Fault) -> Callable[[Request], Fault | None]:
    """Let the first requests of a kind meet these faults, one each.

    Where one hangs, a request may take a second until then, and any time afterwards.
    """
    faults_to_come = list(faults)
    # the fixture `fake` restores it
    gcs.REQUEST_SECONDS = 1.0 if "hang" in faults else HANG_SECONDS

    def next_fault(request: Request) -> Fault | None:
        if not faults_to_come or request.kind != kind:
            return None
        fault = faults_to_come.pop(0)
        if not faults_to_come:
            gcs.REQUEST_SECONDS = HANG_SECONDS
        return fault

    return next_fault


def repeated(fake: FakeBucket, times: int, kind: str, fault: Fault | None = None) -> bool:
    """Return whether requests were repeated as often as expected.

    Where one hangs, the short deadline may pass for others too on a busy machine, so that it is at
    least as often.
    """
    counted = gcs.open_bucket("bucket").retries
    if fault != "hang":
        return counted == times
    return counted >= times and sum(request.kind == kind for request in fake.requests) > times


def damage_first_answer(fake: FakeBucket, name: str) -> None:
    """Make the first download of an object give another content under its checksum."""
    stored = fake.objects["bucket", name]
    wrong = dataclasses.replace(stored, content=b"wrong")
    answers = itertools.chain(
        [dataclasses.replace(_Lying(**vars(wrong)), says=stored.crc32c)], itertools.repeat(stored)
    )

    def faults(request: Request) -> None:
        if request.kind == "download":
            fake.objects["bucket", name] = next(answers)

    fake.faults = faults


# One request


@pytest.mark.parametrize("fault", FAULTS)
def test_a_create_that_meets_a_fault_is_repeated_and_wins(fake, store, fault):
    fake.faults = once("upload", fault)
    assert store.create("x", b"content" * 1000)
    assert fake.names("bucket") == ["run/x"]
    assert fake.content("bucket", "run/x") == b"content" * 1000
    assert repeated(fake, 1, "upload", fault)


def test_a_create_whose_answer_was_lost_and_another_writers_object_are_told_apart(fake, store):
    fake.faults = once("upload", "lost answer", "503")
    assert store.create("x", b"same"), "its own object answers the repeated request"
    fake.faults = once("upload", "503")
    assert not store.create("x", b"same"), "another writer's object, with the same bytes"


def test_of_many_writers_behind_a_bad_network_exactly_one_wins(fake, store, monkeypatch):
    # Which request meets which fault is up to the threads: a writer may meet any number of them in
    # a row.
    monkeypatch.setattr(gcs, "MAX_ATTEMPTS", 1000)
    monkeypatch.setattr(gcs, "MAX_WAIT_SECONDS", 0.01)
    draw = random.Random(0)
    lock = threading.Lock()

    def faults(request: Request) -> Fault | None:
        with lock:
            return draw.choice([*QUICK, None, None, None, None])

    fake.faults = faults
    with ThreadPoolExecutor(8) as threads:
        won = list(threads.map(lambda number: store.create("x", bytes([number])), range(8)))
    fake.faults = lambda request: None
    assert won.count(True) == 1
    assert store.read("x") == bytes([won.index(True)])


@pytest.mark.parametrize("fault", FAULTS)
def test_a_read_that_meets_a_fault_is_repeated(fake, store, fault):
    content = random.Random(0).randbytes(300_000)
    store.create("x", content)
    fake.faults = once("download", fault, fault)
    assert store.read("x") == content
    assert repeated(fake, 2, "download", fault)


def test_content_that_changed_on_its_way_is_read_again(fake, store):
    store.create("x", b"right")
    damage_first_answer(fake, "run/x")
    assert store.read("x") == b"right"
    assert repeated(fake, 1, "download")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_large_file_is_uploaded_whole(fake, store, fault):
    # Above the size that goes up in one request.
    content = random.Random(0).randbytes(9_000_000)

    def write(folder: Path) -> None:
        (folder / "weights").write_bytes(content)

    fake.faults = once("upload", fault, fault)
    assert store.commit_policy(1, write)
    assert fake.content("bucket", "run/policies/000001/weights") == content
    fake.faults = once("download", fault)
    assert (store.policy_path(1) / "weights").read_bytes() == content


@pytest.mark.parametrize("fault", UNANSWERED)
@pytest.mark.parametrize("kind", ["upload", "download", "delete"])
def test_an_interrupted_quarantine_is_finished(fake, store, kind, fault):
    store.create(shard_name(1, 2), b"rubbish")
    fake.faults = once(kind, fault)
    reason = store.quarantine(shard_name(1, 2), "it is rubbish")
    assert json.loads(reason.read_text()) == {"shard": shard_name(1, 2), "reason": "it is rubbish"}
    assert (reason.parent / "shard-00002.parquet").read_bytes() == b"rubbish"
    assert store.find_shard(1, 2) is None


def test_a_shard_that_came_meanwhile_is_not_quarantined(fake, store):
    store.create("x", b"rubbish")

    def another_process(request: Request) -> None:
        if request.kind == "delete":
            fake.put("bucket", "run/x", b"sampled again")

    fake.faults = another_process
    assert store.move("x", "quarantine/x")
    assert store.read("x") == b"sampled again"


# Errors


def test_a_bucket_that_hangs_for_ever_is_one_sentence_within_the_deadline(fake, store, monkeypatch):
    monkeypatch.setattr(gcs, "DEADLINE_SECONDS", 1.2)
    monkeypatch.setattr(gcs, "REQUEST_SECONDS", 1.0)
    fake.faults = lambda request: "hang"
    with pytest.raises(
        StoreUnavailableError,
        match=r"^gs://bucket/run/x could not be written in \d attempts within 1 seconds",
    ) as error:
        store.create("x", b"")
    assert "start the same command again" in str(error.value)
    assert "\n" not in str(error.value)


def test_retries_are_counted_and_many_are_on_the_console(fake, store, caplog):
    fake.faults = once("upload", "503", "429")
    store.create("x", b"")
    assert store.io_statistics.summary()["repeated_requests"] == 2
    assert not caplog.text
    store.io_statistics.reset()
    fake.faults = once("upload", "503", "429", "503")
    store.create("y", b"")
    assert store.io_statistics.summary()["repeated_requests"] == 3
    assert "retrying gs://bucket/run/y after 3 failed attempts" in caplog.text


def test_attempts_are_bounded(fake, store):
    fake.faults = lambda request: "503"
    with pytest.raises(
        StoreUnavailableError,
        match=rf"x could not be read in {gcs.MAX_ATTEMPTS} attempts .*try again",
    ):
        store.read("x")
    assert [request.kind for request in fake.requests].count("download") == gcs.MAX_ATTEMPTS


def test_a_server_that_is_not_there_is_one_sentence(fake, monkeypatch):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{listener.getsockname()[1]}")
        gcs.open_bucket.cache_clear()
        with pytest.raises(
            StoreUnavailableError, match=r"gs://bucket/run/config\.json could not be found"
        ):
            open_run("gs://bucket/run", {})


def test_an_absent_bucket_is_named(fake):
    with pytest.raises(UserError, match="there is no bucket no-such-bucket: create it"):
        open_run("gs://no-such-bucket/run", {})


def test_an_unreachable_store_is_no_damaged_shard(fake, store):
    """StoreError means damage, upon which a shard is set aside."""
    store.write_shard(0, 0, [trajectory()])
    fake.faults = lambda request: "503" if request.kind == "download" else None
    with pytest.raises(StoreUnavailableError) as error:
        store.find_shard(0, 0)
    assert not isinstance(error.value, StoreError)


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("gs://bucket/nothing", "there is no directory gs://bucket/nothing"),
        ("gs://bucket/model", "gs://bucket/model is not a run directory"),
        ("gs://no-such-bucket/run", "there is no bucket no-such-bucket"),
        ("s3://bucket/run", "s3://bucket/run is neither a local directory nor"),
    ],
)
def test_eval_answers_what_is_no_run_in_one_sentence(fake, capsys, address, sentence):
    fake.put("bucket", "model/config.json", b"{}")
    assert eval.main(["--checkpoint", address]) == 2
    assert sentence in capsys.readouterr().err


# Folders


def test_a_torn_policy_is_ignored_and_replaced(fake, store):
    fake.put("bucket", "run/policies/000001/params/weights", b"torn")
    fake.put("bucket", "run/policies/000001/params/of another version", b"old")
    assert store.policies() == []
    with pytest.raises(StoreError, match="000001 is not a committed policy"):
        store.policy_path(1)
    assert store.commit_policy(1, write_weights)
    assert fake.names("bucket", "run/policies") == [
        "run/policies/000001/COMMITTED",
        "run/policies/000001/params/weights",
    ]
    assert (store.policy_path(1) / "params" / "weights").read_bytes() == b"0123456789"


def test_a_writer_that_dies_between_two_files_leaves_no_policy(fake, store):
    def die(request: Request) -> None:
        if request.kind == "upload" and fake.names("bucket"):
            raise ConnectionResetError("as if the process had died here")

    fake.faults = die
    with pytest.MonkeyPatch.context() as patch, pytest.raises(StoreUnavailableError):
        patch.setattr(gcs, "MAX_ATTEMPTS", 1)
        store.commit_policy(1, write_weights)
    fake.faults = lambda request: None
    assert fake.names("bucket") == ["run/policies/000001/params/weights"]
    assert store.policies() == []
    assert store.commit_policy(1, write_weights)
    assert store.policies() == [1]


def test_the_first_of_two_writers_wins_and_the_other_notices(fake, store):
    def write(folder: Path) -> None:
        (folder / "weights").write_bytes(b"mine")
        assert Store("gs://bucket/run").commit_policy(1, write_weights)

    assert not store.commit_policy(1, write)
    assert fake.names("bucket") == [
        "run/policies/000001/COMMITTED",
        "run/policies/000001/params/weights",
    ]


def test_files_of_two_writers_are_never_taken_for_those_of_one(fake, store):
    store.commit_policy(1, write_weights)
    name = "run/policies/000001/COMMITTED"
    theirs = fake.content("bucket", name)
    del fake.objects["bucket", name]

    def another_process(request: Request) -> None:
        # This request is the file; COMMITTED comes next.
        if request.kind == "upload":
            fake.put("bucket", name, theirs)

    def write(folder: Path) -> None:
        (folder / "params").mkdir()
        (folder / "params" / "weights").write_bytes(b"012345678X")

    fake.faults = another_process
    assert not store.commit_policy(1, write)
    with pytest.raises(StoreError, match="params/weights is damaged"):
        store.policy_path(1)


def test_a_fetched_policy_is_kept_and_compared_each_time(fake, store):
    store.commit_policy(1, write_weights)
    local = store.policy_path(1) / "params" / "weights"
    before = len([request for request in fake.requests if "weights" in request.path])
    assert store.policy_path(1) / "params" / "weights" == local
    assert len([request for request in fake.requests if "weights" in request.path]) == before, (
        "nothing is fetched twice"
    )
    local.write_bytes(b"damaged")
    assert (store.policy_path(1) / "params" / "weights").read_bytes() == b"0123456789"


def downloads(fake: FakeBucket) -> list[str]:
    return [
        request.path.rpartition("%2F")[2] for request in fake.requests if request.kind == "download"
    ]


def test_a_checkpoint_in_a_bucket_is_fetched_once_and_follows_what_changes_there(fake):
    fake.put("bucket", "models/a/config.json", b"{}")
    fake.put("bucket", "models/a/weights", b"0123456789")
    copy = local_folder("gs://bucket/models/a")
    assert (copy / "weights").read_bytes() == b"0123456789"
    assert local_folder("gs://bucket/models/a") == copy
    assert sorted(downloads(fake)) == ["config.json", "weights"], "nothing is fetched twice"
    (copy / "config.json").write_bytes(b"cut")
    fake.put("bucket", "models/a/weights", b"9876543210")
    fake.put("bucket", "models/a/more", b"more")
    local_folder("gs://bucket/models/a")
    assert sorted(downloads(fake)[2:]) == ["config.json", "more", "weights"]
    assert [(copy / name).read_bytes() for name in ("config.json", "weights")] == [
        b"{}",
        b"9876543210",
    ]


def test_a_checkpoint_that_was_damaged_on_its_way_is_fetched_again(fake):
    fake.put("bucket", "models/a/weights", b"right")
    damage_first_answer(fake, "models/a/weights")
    assert (local_folder("gs://bucket/models/a") / "weights").read_bytes() == b"right"


def test_a_bucket_without_the_checkpoint_is_one_sentence(fake):
    fake.put("bucket", "models/b/weights", b"other")
    with pytest.raises(UserError, match="there is nothing in gs://bucket/models/a"):
        local_folder("gs://bucket/models/a")


# Metrics


def lines(fake: FakeBucket, name: str = "run/metrics.jsonl") -> list[dict]:
    return [json.loads(line) for line in fake.content("bucket", name).decode().splitlines()]


@pytest.mark.parametrize("fault", UNANSWERED)
@pytest.mark.parametrize("kind", ["upload", "compose", "delete"])
def test_lines_are_appended_once_whatever_happens(fake, store, kind, fault):
    with MetricsLog(store.root) as metrics:
        for step in range(4):
            fake.faults = once(kind, fault)
            metrics.write("learn", step, {"loss": 1.0})
            metrics.flush()
    assert [line["step"] for line in lines(fake)] == [0, 1, 2, 3]
    assert [name for name in fake.names("bucket") if ".part-" in name] == []


def test_a_resumed_run_adds_only_what_is_new(fake, store):
    with MetricsLog(store.root) as metrics:
        metrics.write("learn", 1, {"loss": 1.0})
    fake.put("bucket", "run/metrics.jsonl.part-of-a-killed-process", b"half")
    with MetricsLog(store.root) as metrics:
        assert not metrics.write("learn", 1, {"loss": 1.0})
        assert metrics.write("learn", 2, {"loss": 0.5})
    assert [line["step"] for line in lines(fake)] == [1, 2]
    events = [name for name in fake.names("bucket") if "/events." in name]
    assert len(events) == 1
    assert fake.content("bucket", events[0]).count(b"learn/loss") == 2
    assert len(fake.names("bucket")) == 2


def test_lines_are_held_for_some_seconds_and_not_longer(fake, store, monkeypatch):
    metrics = MetricsLog(store.root)
    metrics.write("learn", 1, {"note": "held"})
    assert fake.names("bucket") == []
    monkeypatch.setattr(run_directory, "HELD_SECONDS", 0.0)
    metrics.write("learn", 2, {"note": "the last one"})
    assert [line["step"] for line in lines(fake)] == [1, 2]
    metrics.close()


def test_the_costs_of_a_line_do_not_grow_with_the_file(fake, store):
    # No other test writes a file of this name: what they left running is not counted.
    file = open_to_append(store.root / "costs.jsonl")
    requests = []
    for _ in range(20):
        before = len(fake.requests)
        file.write(b"x" * 1000)
        file.flush()
        mine = [
            request
            for request in fake.requests[before:]
            if request.kind == "upload" or "costs.jsonl" in request.path
        ]
        requests.append([request.kind for request in mine])
    assert requests == [["upload"]] + [["upload", "compose", "delete"]] * 19
    assert len(fake.content("bucket", "run/costs.jsonl")) == 20_000


def test_an_interrupted_append_is_repeated_as_the_same_one(fake, store, monkeypatch):
    file = open_to_append(store.root / "metrics.jsonl")
    file.write(b"1\n")
    file.flush()
    file.write(b"2\n")
    delete = gcs.Bucket.delete

    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(gcs.Bucket, "delete", interrupted)
    with pytest.raises(KeyboardInterrupt):
        # The lines are joined already.
        file.flush()
    monkeypatch.setattr(gcs.Bucket, "delete", delete)
    file.write(b"3\n")
    file.close()
    assert fake.content("bucket", "run/metrics.jsonl") == b"1\n2\n3\n"
    assert fake.names("bucket") == ["run/metrics.jsonl"]


def test_two_programs_in_one_run_are_told(fake, store):
    first, second = (open_to_append(store.root / "metrics.jsonl") for _ in range(2))
    first.write(b"1\n")
    first.flush()
    second.write(b"1\n")
    with pytest.raises(
        StoreError,
        match=r"metrics\.jsonl was changed by another process; train with only one process",
    ):
        second.flush()


# Everything at once


def a_round(store: Store) -> None:
    """Do to a run directory what a round does, without its models."""
    rows = [trajectory(number) for number in range(3)]
    with MetricsLog(store.root) as metrics:
        store.write_plan(1, {"policy_version": 0})
        entries = [store.write_shard(1, shard, rows[:shard]) for shard in (1, 2, 3)]
        metrics.write("round 1", 1, {"rows": 6})
        metrics.flush()
        read = [row for entry in entries for row in store.read_shard(entry)]
        assert len(read) == 6
        store.write_done(1, entries, mean_reward=0.5, threshold=None)
        store.commit_policy(1, write_weights)
        assert (store.policy_path(1) / "params" / "weights").read_bytes() == b"0123456789"
        metrics.write("round 1", 2, {"rows": 6})


def content_of(fake: FakeBucket) -> dict[str, object]:
    """Return all objects, without what a clock said."""
    contents = {
        name: fake.content("bucket", name)
        for name in fake.names("bucket")
        if "/events." not in name
    }
    return contents | {"run/metrics.jsonl": [(line["step"], line["rows"]) for line in lines(fake)]}


@functools.cache
def undisturbed() -> dict[str, object]:
    with pytest.MonkeyPatch.context() as patch:
        fake = use(patch)
        a_round(Store("gs://bucket/run"))
        return content_of(fake)


@hypothesis.settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    suppress_health_check=[
        hypothesis.HealthCheck.function_scoped_fixture,
        hypothesis.HealthCheck.too_slow,
    ],
)
@hypothesis.given(faults=st.dictionaries(st.integers(1, 60), st.sampled_from(QUICK), max_size=15))
def test_faults_at_any_request_change_nothing(fake, monkeypatch, faults) -> None:
    expected = undisturbed()
    fake = use(monkeypatch)
    fake.faults = lambda request: faults.get(request.nth)
    a_round(Store("gs://bucket/run"))
    fake.faults = lambda request: None
    assert content_of(fake) == expected
    a_round(Store("gs://bucket/run"))
    assert content_of(fake) == expected, "a second time nothing is counted twice"


@dataclasses.dataclass(frozen=True)
class _Lying:
    """An object whose answer carries the checksum of another content."""

    content: bytes
    generation: int
    metadata: dict[str, str]
    says: str = ""

    @property
    def crc32c(self) -> str:
        return self.says

    md5 = "1B2M2Y8AsgTpgAmY7PhCfg=="
