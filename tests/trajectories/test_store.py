import dataclasses
import errno
import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pyarrow.parquet
import pytest

from mujica_jax.errors import RunMismatchError, StoreError, UserError
from mujica_jax.records import Conversation, Search, StopReason, Trajectory, Turn
from mujica_jax.runtime import provenance
from mujica_jax.storage.run_directory import RunPath, run_path
from mujica_jax.trajectories import shards
from mujica_jax.trajectories.store import RoundSummary, Store, open_run, shard_name
from tests.helpers.fake_bucket import use
from tests.helpers.paths import ROOT


def trajectory(number: int = 0, tokens: int = 6, workers: int = 2) -> Trajectory:
    random = np.random.default_rng(number)

    def turn(role: str, trained: bool = False) -> Turn:
        logprobs = tuple(
            float(value) for value in -random.exponential(size=tokens).astype(np.float32)
        )
        return Turn(
            role=role,  # pyright: ignore[reportArgumentType]
            token_ids=tuple(int(token) for token in random.integers(0, 150_000, tokens)),
            text=f"text {number} with an accent: é",
            logprobs=logprobs if role == "model" else None,
            trained=trained,
        )

    def search(iteration: int) -> Search:
        return Search(
            iteration=iteration,
            query="Who directed The Silent Harbor?",
            entity="The Silent Harbor",
            materials=("The Silent Harbor, director, Ada Crane", "The Silent Harbor, genre, crime"),
            selected=(0,),
            sentence="Ada Crane directed The Silent Harbor.",
            found=True,
        )

    return Trajectory(
        question_id=f"tiny-train-{number:06d}",
        attempt=number % 3,
        policy_version=2,
        seed=2**62 + number,
        conversations=(
            Conversation(
                role="planner",
                turns=(turn("context"), turn("model", trained=True), turn("context")),
            ),
            *(
                Conversation(role="worker", turns=(turn("context"), turn("model", True)))
                for _ in range(workers)
            ),
        ),
        answer="Ada Crane",
        reward=0.1 + number,
        rewards_by_part={"em": 1.0, "f1": 1 / 3},
        counts={"turns": 2.0},
        stop_reason=StopReason.ANSWERED,
        searches=tuple(search(iteration) for iteration in range(workers)),
        seconds=0.25,
    )


@pytest.fixture(params=["disk", "bucket"])
def root(request, tmp_path, monkeypatch) -> RunPath:
    """Return a run directory that is not there yet, on local disk and on gs://."""
    if request.param == "disk":
        return tmp_path / "run"
    use(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return run_path("gs://bucket/some/run")


@pytest.fixture
def store(root) -> Store:
    return Store(root)


@pytest.fixture
def on_disk(tmp_path) -> Store:
    return Store(tmp_path / "run")


@pytest.fixture
def rows() -> list[Trajectory]:
    return [trajectory(number) for number in range(4)]


def files(root: RunPath) -> list[str]:
    """Return everything below a folder."""
    if isinstance(root, Path):
        return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())
    return list(root.objects())


# Objects


def test_an_object_is_created_once_and_the_second_bytes_are_dropped(store):
    assert store.create("rounds/0001/x", b"first")
    assert not store.create("rounds/0001/x", b"second")
    assert store.read("rounds/0001/x") == b"first"
    # No temporary file stays.
    assert files(store.root) == ["rounds/0001/x"]


def test_of_many_writers_exactly_one_wins(store):
    barrier = threading.Barrier(8)

    def write(number: int) -> bool:
        barrier.wait()
        return store.create("x", bytes([number]) * 10_000)

    with ThreadPoolExecutor(8) as threads:
        won = list(threads.map(write, range(8)))
    assert won.count(True) == 1
    assert store.read("x") == bytes([won.index(True)]) * 10_000


def test_a_writer_killed_in_the_middle_leaves_no_object(tmp_path):
    program = (
        "import os, pathlib, signal\n"
        "from mujica_jax.storage.local import create\n"
        "os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"create(pathlib.Path({str(tmp_path)!r}) / 'x', b'never whole')\n"
    )
    killed = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False)
    assert killed.returncode < 0
    store = Store(tmp_path)
    assert not store.exists("x")
    assert store.create("x", b"whole")


def test_json_comes_back(store):
    assert store.write_json_once("a.json", {"x": [1, 2.5, None, "é"]})
    assert not store.write_json_once("a.json", {"x": 0})
    assert store.read_json("a.json") == {"x": [1, 2.5, None, "é"]}


@pytest.mark.parametrize(
    ("content", "complaint"), [("{", "is not JSON"), ("[1]", "holds no JSON object")]
)
def test_json_that_was_changed_is_named(store, content, complaint):
    (store.root / "a.json").write_text(content)
    with pytest.raises(StoreError, match=rf"a\.json {complaint}"):
        store.read_json("a.json")


def test_a_missing_object_is_named(store):
    with pytest.raises(StoreError, match=r"plan\.json is missing"):
        store.read_json("plan.json")


def test_json_refuses_what_is_not_a_number(store):
    with pytest.raises(ValueError, match="not JSON compliant"):
        store.write_json_once("a.json", {"x": float("nan")})


# Shards


def test_trajectories_come_back(store, rows):
    entry = store.write_shard(3, 7, rows)
    assert entry.name == "rounds/0003/shard-00007.parquet"
    assert entry.rows == 4
    assert store.read_shard(entry) == rows
    assert store.find_shard(3, 7) == entry
    assert store.find_shard(3, 8) is None


@pytest.mark.parametrize(
    "odd",
    [
        dataclasses.replace(
            trajectory(), conversations=(), searches=(), rewards_by_part={}, counts={}, answer=""
        ),
        dataclasses.replace(trajectory(), conversations=(Conversation(role="single", turns=()),)),
        dataclasses.replace(
            trajectory(),
            conversations=(
                Conversation(
                    role="planner",
                    turns=(
                        Turn(role="model", token_ids=(), text="", logprobs=(), trained=True),
                        Turn(role="model", token_ids=(5,), text="a", logprobs=None, trained=True),
                        Turn(role="context", token_ids=(0, 2**31 - 1), text="\x00 line\nbreak"),
                    ),
                ),
            ),
        ),
        dataclasses.replace(trajectory(), searches=(Search(iteration=1, query="?"),)),
        *(dataclasses.replace(trajectory(), stop_reason=reason) for reason in StopReason),
    ],
)
def test_odd_trajectories_come_back(odd):
    assert shards.decode(shards.encode([odd, trajectory(1), odd]), "x") == [odd, trajectory(1), odd]


def test_a_shard_without_trajectories_comes_back(store):
    assert store.read_shard(store.write_shard(0, 0, [])) == []


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    logprobs=st.lists(st.floats(max_value=0, width=32, allow_nan=False), max_size=20),
    text=st.text(st.characters(exclude_categories=["Cs"])),
    seed=st.integers(-(2**63), 2**63 - 1),
    reward=st.floats(allow_nan=False),
)
def test_float32_logprobs_and_everything_else_are_exact(logprobs, text, seed, reward):
    turn = Turn(
        role="model",
        token_ids=tuple(range(len(logprobs))),
        text=text,
        logprobs=tuple(logprobs),
        trained=True,
    )
    row = dataclasses.replace(
        trajectory(),
        conversations=(Conversation(role="planner", turns=(turn, turn)),),
        seed=seed,
        reward=reward,
        rewards_by_part={text: reward},
    )
    assert shards.decode(shards.encode([row]), "x") == [row]


def test_other_tools_read_plain_columns_and_metadata(store, rows):
    entry = store.write_shard(0, 0, rows)
    table = pyarrow.parquet.read_table(io.BytesIO(store.read(entry.name)))
    assert table.column("question_id").to_pylist() == [row.question_id for row in rows]
    assert table.column("search_count").to_pylist() == [2, 2, 2, 2]
    assert table.column("reward").to_pylist() == [row.reward for row in rows]
    turn = table.column("conversations").to_pylist()[0][0]["turns"][1]
    assert turn["role"] == "model"
    assert turn["trained"] is True
    assert turn["token_ids"] == list(rows[0].conversations[0].turns[1].token_ids)
    metadata = pyarrow.parquet.read_metadata(io.BytesIO(store.read(entry.name))).metadata
    assert metadata[b"schema_version"] == b"3"
    assert metadata[b"rows"] == b"4"


def test_the_first_shard_stays(store, rows):
    first = store.write_shard(0, 0, rows)
    second = store.write_shard(0, 0, [dataclasses.replace(row, seconds=9.0) for row in rows])
    assert second == first
    assert store.read_shard(second) == rows


def test_content_does_not_depend_on_seconds(rows):
    slower = [dataclasses.replace(row, seconds=9.0) for row in rows]
    assert shards.content_sha256(slower) == shards.content_sha256(rows)
    assert shards.encode(slower) != shards.encode(rows)


def changed_contents() -> Iterator[Trajectory]:
    row = trajectory()
    planner, *workers = row.conversations
    first, second, third = planner.turns
    yield dataclasses.replace(row, question_id="x")
    yield dataclasses.replace(row, attempt=9)
    yield dataclasses.replace(row, policy_version=9)
    yield dataclasses.replace(row, seed=9)
    yield dataclasses.replace(row, answer="x")
    yield dataclasses.replace(row, reward=9.0)
    yield dataclasses.replace(row, rewards_by_part={"em": 0.0, "f1": 1 / 3})
    yield dataclasses.replace(row, counts={"turns": 3.0})
    yield dataclasses.replace(row, stop_reason=StopReason.NO_ACTION)
    yield dataclasses.replace(row, conversations=row.conversations[:2])
    yield dataclasses.replace(row, searches=row.searches[:1])
    yield dataclasses.replace(
        row, searches=(dataclasses.replace(row.searches[0], selected=()), row.searches[1])
    )
    for changed in (
        dataclasses.replace(second, token_ids=second.token_ids[::-1]),
        dataclasses.replace(second, logprobs=tuple(value - 1 for value in second.logprobs or ())),
        dataclasses.replace(second, logprobs=None),
        dataclasses.replace(second, text="x"),
        dataclasses.replace(second, trained=False),
        dataclasses.replace(second, trained=False, cut=True),
    ):
        altered = dataclasses.replace(planner, turns=(first, changed, third))
        yield dataclasses.replace(row, conversations=(altered, *workers))


def test_content_depends_on_everything_else():
    digests = [shards.content_sha256([row]) for row in (trajectory(), *changed_contents())]
    assert len(digests) == len(set(digests))


def test_every_flipped_bit_is_found_before_a_manifest_exists():
    data = shards.encode([trajectory(tokens=2, workers=0)])
    for place in range(len(data)):
        damaged = bytearray(data)
        damaged[place] ^= 1 << (place % 8)
        with pytest.raises(StoreError, match="shard-x"):
            shards.decode(bytes(damaged), "shard-x")


@pytest.mark.parametrize("length", [0, 1, 100, -1])
def test_a_truncated_shard_is_found_before_a_manifest_exists(store, rows, length):
    path = store.root / store.write_shard(1, 2, rows).name
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(StoreError, match=r"shard-00002\.parquet is .*sample it again"):
        store.find_shard(1, 2)


def test_a_foreign_parquet_file_is_no_shard(store):
    foreign = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"x": [1]}), foreign)
    store.create(shard_name(0, 0), foreign.getvalue())
    with pytest.raises(StoreError, match="contain no checksum"):
        store.find_shard(0, 0)


def test_a_shard_of_another_schema_is_refused(monkeypatch, rows):
    monkeypatch.setattr(shards, "SCHEMA_VERSION", "7")
    data = shards.encode(rows)
    monkeypatch.undo()
    with pytest.raises(
        StoreError, match="shard-x has schema version 7, but this program reads 2 and 3"
    ):
        shards.decode(data, "shard-x")


def test_a_turn_that_a_limit_cut_stays_marked(store):
    row = trajectory()
    planner, *workers = row.conversations
    first, second, third = planner.turns
    cut = dataclasses.replace(second, trained=False, cut=True)
    written = dataclasses.replace(
        row, conversations=(dataclasses.replace(planner, turns=(first, cut, third)), *workers)
    )
    assert store.read_shard(store.write_shard(0, 0, [written])) == [written]


def test_a_shard_that_does_not_say_which_turns_were_cut_is_read(monkeypatch, rows):
    """Schema version 2 wrote it without the column, so no turn of it counts as cut.

    Its digest is the same.
    """
    before = shards.content_sha256(rows)
    schema = shards._schema()
    place = schema.get_field_index("conversations")
    conversation = schema.field("conversations").type.value_type
    turn = conversation.field("turns").type.value_type
    old_fields = [field for field in turn if field.name != "cut"]
    old = pyarrow.list_(
        pyarrow.struct(
            [
                conversation.field("role"),
                pyarrow.field("turns", pyarrow.list_(pyarrow.struct(old_fields))),
            ]
        )
    )
    monkeypatch.setattr(
        shards, "_schema", lambda: schema.set(place, pyarrow.field("conversations", old))
    )
    monkeypatch.setattr(shards, "SCHEMA_VERSION", "2")
    data = shards.encode(rows)
    monkeypatch.undo()
    assert b"cut" not in data
    read = shards.decode(data, "shard-x")
    assert read == rows
    assert shards.content_sha256(read) == before


@pytest.mark.parametrize("damage", ["missing", "truncated", "flipped", "replaced"])
def test_a_damaged_shard_is_named(store, rows, damage):
    entry = store.write_shard(1, 2, rows)
    path = store.root / entry.name
    data = path.read_bytes()
    match damage:
        case "missing":
            path.unlink()
        case "truncated":
            path.write_bytes(data[:-7])
        case "flipped":
            path.write_bytes(bytes([*data[:50], data[50] ^ 1, *data[51:]]))
        case "replaced":
            path.write_bytes(shards.encode(rows[:1]))
    with pytest.raises(StoreError, match=r"rounds/0001/shard-00002\.parquet is (missing|damaged)"):
        store.read_shard(entry)


def test_a_quarantined_shard_can_be_sampled_again(store, rows):
    damaged = store.write_shard(1, 2, rows)
    (store.root / damaged.name).write_bytes(b"rubbish")
    reason = store.quarantine(damaged, "its size is 7")
    assert json.loads(reason.read_text()) == {"shard": damaged.name, "reason": "its size is 7"}
    assert (reason.parent / "shard-00002.parquet").read_bytes() == b"rubbish"
    assert store.find_shard(1, 2) is None
    sampled_anew = store.write_shard(1, 2, rows)
    assert store.read_shard(sampled_anew) == rows
    assert sampled_anew.content_sha256 == damaged.content_sha256


def test_quarantine_opens_the_round_again(store, rows):
    entries = [store.write_shard(1, shard, rows) for shard in (0, 1)]
    store.write_done(1, entries, mean_reward=0.5, threshold=0.7)
    unlisted = store.write_shard(1, 2, rows)
    store.quarantine(unlisted, "nobody listed it")
    assert store.read_done(1) is not None
    (store.root / entries[0].name).unlink()
    store.quarantine(entries[0].name, "missing")
    assert store.read_done(1) is None
    assert store.find_shard(1, 1) == entries[1]


def test_the_same_shard_may_be_quarantined_twice(store, rows):
    reasons = [store.quarantine(store.write_shard(0, 0, rows), "again") for _ in range(2)]
    assert reasons[0] != reasons[1]


# Rounds


def test_a_plan_is_written_once(store):
    assert store.write_plan(3, {"policy_version": 2, "shards": [["q1"], ["q2"]]})
    assert not store.write_plan(3, {"policy_version": 3})
    assert store.read_json("rounds/0003/plan.json") == {
        "policy_version": 2,
        "shards": [["q1"], ["q2"]],
    }


def test_a_round_is_done_once(store, rows):
    assert store.read_done(3) is None
    entries = [store.write_shard(3, shard, rows[:shard]) for shard in (1, 2)]
    summary = store.write_done(3, entries, mean_reward=0.25, threshold=None)
    assert summary == RoundSummary(
        round_number=3, trajectories=3, mean_reward=0.25, threshold=None, shards=tuple(entries)
    )
    assert store.read_done(3) == summary
    assert store.write_done(3, [], mean_reward=0.0, threshold=1.0) == summary


def test_a_done_file_with_other_fields_is_named(store):
    store.write_json_once("rounds/0003/DONE.json", {"shards": [{"name": "x"}]})
    with pytest.raises(StoreError, match=r"DONE\.json does not have the fields"):
        store.read_done(3)


def test_shards_are_listed_by_round_and_by_the_policy_that_sampled_them(store, rows):
    assert store.shards() == []
    later = [dataclasses.replace(row, policy_version=3) for row in rows]
    entries = [
        store.write_shard(1, 0, rows),
        store.write_shard(1, 1, later),
        store.write_shard(2, 0, [*rows, *later]),
    ]
    assert [entry.policy_versions for entry in entries] == [(2,), (3,), (2, 3)]
    store.write_done(1, entries[:2], mean_reward=0.5, threshold=0.7)
    assert store.shards() == entries[:2], "a round that is not done has no shards that count"
    store.write_done(2, entries[2:], mean_reward=0.5, threshold=0.7)
    assert store.shards(round_number=2) == entries[2:]
    assert store.shards(policy_version=3) == entries[1:]
    assert store.shards(round_number=1, policy_version=2) == entries[:1]
    assert store.shards(round_number=7) == store.shards(policy_version=7) == []


def test_what_was_written_and_read_is_counted_in_bytes_and_seconds(store, rows):
    entry = store.write_shard(0, 0, rows)
    store.read_shard(entry)
    store.read_shard(entry)
    counts = store.io_statistics.summary()
    assert counts["writes"] == 1
    assert counts["write_bytes"] == entry.bytes
    assert counts["reads"] == 2
    assert counts["read_bytes"] == 2 * entry.bytes
    assert counts["write_seconds"] > 0
    assert counts["read_seconds"] > 0
    store.io_statistics.reset()
    store.commit_policy(1, write_weights)
    store.policy_path(1)
    counts = store.io_statistics.summary()
    committed = len(store.read("policies/000001/COMMITTED"))
    assert counts["write_bytes"] == 10
    assert counts["read_bytes"] == 10 + committed


# Policies


def write_weights(path: Path) -> None:
    (path / "params").mkdir()
    (path / "params" / "weights").write_bytes(b"0123456789")


def test_a_policy_is_committed_once(store):
    assert store.policies() == []
    assert store.commit_policy(3, write_weights)
    assert not store.commit_policy(3, lambda path: pytest.fail("the version exists"))
    assert store.commit_policy(12, write_weights)
    assert store.policies() == [3, 12]
    assert (store.policy_path(3) / "params" / "weights").read_bytes() == b"0123456789"
    assert files(store.root / "policies" / "000003") == ["COMMITTED", "params/weights"]
    assert store.read_json("policies/000003/COMMITTED")["version"] == 3


def test_a_policy_that_fails_half_way_is_not_there(store):
    def fail(path: Path) -> None:
        write_weights(path)
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError):
        store.commit_policy(1, fail)
    assert store.policies() == []
    assert files(store.root) == []
    assert store.commit_policy(1, write_weights)


def test_a_policy_that_a_killed_writer_left_is_written_anew(on_disk):
    store = on_disk
    torn = store.root / "policies" / "000001"
    torn.mkdir(parents=True)
    (torn / "old").write_bytes(b"half")
    assert store.policies() == []
    assert store.commit_policy(1, write_weights)
    assert files(store.root / "policies") == ["000001/COMMITTED", "000001/params/weights"]


def test_a_policy_without_committed_is_no_policy(store):
    store.commit_policy(1, write_weights)
    store.create("policies/000002/params/weights", b"01234")
    assert store.policies() == [1]
    with pytest.raises(
        StoreError,
        match=r"000002 is not a committed policy; choose from the committed versions: \[1\]",
    ):
        store.policy_path(2)


@pytest.mark.parametrize("content", [None, b"01234", b"0123456780"])
def test_a_damaged_policy_is_named(store, content):
    store.commit_policy(1, write_weights)
    weights = store.root / "policies" / "000001" / "params" / "weights"
    weights.unlink()
    if content is not None:
        weights.write_bytes(content)
    assert store.policies() == [1]
    with pytest.raises(StoreError, match=r"params/weights is (missing|damaged)"):
        store.policy_path(1)


# Runs

CONFIG = {
    "name": "tiny",
    "run": None,
    "seed": 0,
    "task": {"paraphrases": 3, "kinds": ("a", "b")},
    "eval": {"control": True},
}


def test_a_run_keeps_its_configuration_and_where_it_came_from(root):
    store = open_run(root, CONFIG)
    saved = store.read_json("config.json")
    assert saved["config"]["task"] == {"paraphrases": 3, "kinds": ["a", "b"]}
    assert saved["python"].startswith("3.")
    assert saved["packages"]["numpy"] == np.__version__
    assert "git_revision" in saved


def test_a_run_is_opened_again_with_the_same_configuration(root):
    open_run(root, CONFIG)
    before = (root / "config.json").read_bytes()
    open_run(root, {**CONFIG, "run": "elsewhere"})
    assert (root / "config.json").read_bytes() == before


def test_another_configuration_is_refused_with_both_values_of_every_key(root):
    open_run(root, CONFIG)
    other = {**CONFIG, "seed": 1, "task": {"paraphrases": 1, "kinds": ["a", "b"], "missing": 0.5}}
    with pytest.raises(RunMismatchError) as caught:
        open_run(root, other)
    assert str(caught.value) == (
        f"{root} was started with another configuration: seed was 0 and is now 1; task.paraphrases "
        "was 3 and is now 1; task.missing was 'unset' and is now 0.5; use the old values or "
        "choose another --run directory"
    )


def test_a_setting_that_is_younger_than_the_run_may_be_unset(root):
    open_run(root, CONFIG)
    open_run(root, {**CONFIG, "younger": None, "task": {**CONFIG["task"], "newer": None}})
    with pytest.raises(RunMismatchError, match=r"task.newer was 'unset' and is now 2"):
        open_run(root, {**CONFIG, "task": {**CONFIG["task"], "newer": 2}})


def test_ignored_keys_may_differ(root):
    open_run(root, CONFIG)
    open_run(root, {**CONFIG, "name": "x", "eval": {"control": False}}, ignore=("name", "eval"))
    with pytest.raises(RunMismatchError, match="named"):
        open_run(root, {**CONFIG, "named": 1}, ignore=("name",))


def test_a_section_that_became_empty_is_a_difference():
    assert provenance.differences({"task": {"a": 1}}, {"task": None}, ignore=()) == [
        "task.a was 1 and is now 'unset'",
        "task was 'unset' and is now None",
    ]


@pytest.mark.parametrize(
    "address", ["s3://bucket/run", "gs://", "gs:///run", "gs://Bucket/run", "gs://b/run"]
)
def test_what_is_no_address_of_a_bucket_is_refused(address):
    with pytest.raises(
        UserError, match=rf"^{address} is neither a local directory nor gs://BUCKET/NAME"
    ):
        open_run(address, CONFIG)


def test_a_file_in_the_place_of_the_run_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    for root in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(
            UserError, match=r"cannot use .*file.*: there is a file where a directory is needed"
        ):
            open_run(root, CONFIG)


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        (errno.ENOSPC, "no space is left"),
        (errno.EROFS, "read-only"),
        (errno.EACCES, "permission is denied"),
    ],
)
def test_a_disk_that_cannot_be_written_is_one_sentence(on_disk, monkeypatch, code, sentence):
    store = on_disk

    def fail(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(
        UserError, match=rf"cannot use .*config\.json: .*{sentence}.*--run directory"
    ):
        open_run(store.root, CONFIG)
    with pytest.raises(UserError, match=rf"cannot use .*000001: .*{sentence}"):
        store.commit_policy(1, write_weights)
    monkeypatch.undo()
    assert files(store.root) == []


def test_other_errors_of_the_operating_system_keep_their_traceback(on_disk, monkeypatch):
    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="input/output error"):
        on_disk.create("x", b"")


def test_importing_the_store_loads_no_arrow_and_nothing_of_google():
    heavy = "{'pyarrow', 'jax', 'google.cloud', 'google.auth', 'etils', 'requests'}"
    program = f"import sys, mujica_jax.trajectories.store; print({heavy} & sys.modules.keys())"
    shown = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert shown.stdout == "set()\n"
