"""Checkpoints on disk and in a bucket: what is restored, removed, refused and repeated."""

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mujica_jax.errors import StoreUnavailableError, UserError
from mujica_jax.learning import checkpoints as checkpoints_module
from mujica_jax.learning.checkpoints import COMMITTED, ORBAX_COMMITTED, Checkpoints
from mujica_jax.storage.run_directory import RunPath, run_path
from tests.helpers.fake_bucket import FakeBucket, use
from tests.helpers.paths import ROOT


class State(NamedTuple):
    step: jax.Array
    params: dict[str, nnx.Param]


def state(step: int, width: int = 4, **extra: nnx.Param) -> State:
    kernel = np.random.default_rng(step).normal(size=(3, width))
    return State(jnp.int32(step), {"kernel": nnx.Param(jnp.asarray(kernel, jnp.float32)), **extra})


def assert_same(restored: State, expected: State) -> None:
    assert jax.tree.structure(restored) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, restored, expected)


def folders(checkpoints: Checkpoints) -> list[str]:
    return sorted(path.name for path in checkpoints.directory.iterdir())


def largest_file(folder: RunPath) -> RunPath:
    if isinstance(folder, Path):
        paths = [path for path in (folder / "arrays").rglob("*") if path.is_file()]
        return max(paths, key=lambda path: path.stat().st_size)
    objects = folder.objects("arrays/")
    return folder / max(objects, key=lambda name: objects[name].bytes)


@pytest.fixture(params=["disk", "bucket"])
def place(request, tmp_path, monkeypatch) -> RunPath:
    """Return a folder for checkpoints, on local disk and in a bucket."""
    if request.param == "disk":
        return tmp_path / "run"
    use(monkeypatch)
    return run_path("gs://bucket/run/learning/warm-up")


@pytest.fixture
def three_saved(place) -> Checkpoints:
    checkpoints = Checkpoints(place, keep=3)
    for step in (1, 2, 3):
        checkpoints.save(state(step), {"round": step})
    checkpoints.finish()
    return checkpoints


def save(checkpoints: Checkpoints, *arguments: Any) -> None:
    """Save a checkpoint and wait until it is committed."""
    with checkpoints:
        checkpoints.save(*arguments)


def test_a_state_comes_back_bit_for_bit_with_its_loop_state(place):
    loop_state = {"phase": "round", "round": 3, "k": 0.1 + 0.2, "done": [1, 2]}
    save(Checkpoints(place, keep=1), state(7), loop_state)
    restored, loop_restored = Checkpoints(place, keep=1).restore_latest(
        jax.eval_shape(lambda: state(0))
    )
    assert_same(restored, state(7))
    assert loop_restored == loop_state


def test_nothing_saved_restores_nothing(place):
    assert Checkpoints(place, keep=1).restore_latest(state(0)) is None


def test_the_newest_is_restored_whatever_its_step(three_saved):
    three_saved.save(state(0), {"round": 4})
    restored, loop_state = three_saved.restore_latest(state(9))
    assert_same(restored, state(0))
    assert loop_state == {"round": 4}


def test_the_last_ones_are_kept_and_numbers_go_on_in_a_new_process(three_saved):
    reopened = Checkpoints(three_saved.directory, keep=2)
    save(reopened, state(4), {})
    assert folders(reopened) == ["000003", "000004"]


@pytest.mark.parametrize("mark", [COMMITTED, ORBAX_COMMITTED])
def test_a_checkpoint_without_its_mark_is_removed_and_its_number_used_again(
    three_saved, caplog, mark
):
    (three_saved.directory / "000003" / mark).unlink()
    reopened = Checkpoints(three_saved.directory, keep=3)
    assert "000003 is incomplete and is removed" in caplog.text
    assert_same(reopened.restore_latest(state(0))[0], state(2))
    save(reopened, state(4), {"round": 4})
    assert folders(three_saved) == ["000001", "000002", "000003"]
    assert Checkpoints(three_saved.directory, keep=3).restore_latest(state(0))[1] == {"round": 4}


def test_a_truncated_checkpoint_is_ignored(three_saved):
    file = largest_file(three_saved.directory / "000003")
    file.write_bytes(file.read_bytes()[:-7])
    assert_same(three_saved.restore_latest(state(0))[0], state(2))


def test_a_torn_mark_is_ignored(three_saved):
    mark = three_saved.directory / "000003" / COMMITTED
    mark.write_text(mark.read_text()[:50])
    assert_same(three_saved.restore_latest(state(0))[0], state(2))


def test_no_flipped_byte_reaches_a_state(three_saved, caplog):
    file = largest_file(three_saved.directory / "000003")
    whole = file.read_bytes()
    for place in range(0, len(whole), len(whole) // 10):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        caplog.clear()
        assert_same(three_saved.restore_latest(state(0))[0], state(2))
        assert "000003 is damaged and is ignored" in caplog.text
    file.write_bytes(whole)
    assert_same(three_saved.restore_latest(state(0))[0], state(3))


def test_another_model_is_refused_with_both_shapes(three_saved):
    with pytest.raises(
        UserError,
        match=r"params/kernel is of shape \[3, 4\] there and of shape \[3, 5\] in this run",
    ):
        three_saved.restore_latest(state(0, width=5))
    with pytest.raises(
        UserError, match=r"params/bias is absent there and of shape \[2\] in this run"
    ):
        three_saved.restore_latest(state(0, bias=nnx.Param(jnp.zeros(2))))


def test_other_types_are_refused_with_both(place):
    save(Checkpoints(place, keep=1), state(1), {})
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16) if leaf.ndim else leaf, state(1))
    with pytest.raises(
        UserError,
        match=r"keeps params/kernel in float32, and this run in bfloat16: .*parameter_dtype",
    ):
        Checkpoints(place, keep=1).restore_latest(narrow)


@pytest.fixture
def slow_disk(monkeypatch) -> threading.Event:
    """Hold back every commit until the event is set."""
    may_go_on = threading.Event()
    commit = checkpoints_module._commit

    def waiting(folder: Path) -> int:
        assert may_go_on.wait(60)
        return commit(folder)

    monkeypatch.setattr(checkpoints_module, "_commit", waiting)
    return may_go_on


def test_a_save_goes_on_beside_steps_that_reuse_its_buffers(tmp_path, slow_disk):
    step = jax.jit(lambda now: jax.tree.map(lambda leaf: leaf * 2, now), donate_argnums=0)
    now = state(1, width=1 << 20)
    expected = state(1, width=1 << 20)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(now, {"round": 1})
        for _ in range(5):
            now = step(now)
        jax.block_until_ready(now)
        assert not (tmp_path / "000001" / COMMITTED).exists(), (
            "the steps went on before the save was done"
        )
        slow_disk.set()
    assert_same(Checkpoints(tmp_path, keep=1).restore_latest(state(0, width=1 << 20))[0], expected)


def test_one_save_is_under_way_at_a_time(place, slow_disk):
    threading.Timer(0.3, slow_disk.set).start()
    with Checkpoints(place, keep=2) as checkpoints:
        checkpoints.save(state(1), {})
        checkpoints.save(state(2), {})
        assert (place / "000001" / COMMITTED).exists()
    assert folders(checkpoints) == ["000001", "000002"]


def test_a_restore_sees_the_save_under_way(tmp_path, slow_disk):
    threading.Timer(0.3, slow_disk.set).start()
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(state(1), {})
    assert_same(checkpoints.restore_latest(state(0))[0], state(1))


@pytest.mark.parametrize("where", ["next save", "finish", "end of the block"])
def test_what_went_wrong_in_the_background_is_raised_at_the_next_occasion(
    tmp_path, monkeypatch, where
):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoints_module, "_commit", full)
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(state(1), {})
    with pytest.raises(UserError, match="no space is left there"):
        if where == "next save":
            checkpoints.save(state(2), {})
        elif where == "finish":
            checkpoints.finish()
        else:
            with checkpoints:
                pass
    assert checkpoints.restore_latest(state(0)) is None
    checkpoints.finish()


def test_an_error_of_the_loop_is_not_covered_by_one_of_the_save(tmp_path, monkeypatch, caplog):
    def broken(*_: object) -> None:
        raise OSError("broken")

    monkeypatch.setattr(checkpoints_module, "_commit", broken)
    with pytest.raises(ZeroDivisionError), Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(state(1), {})
        raise ZeroDivisionError
    assert "was not written" in caplog.text


def test_an_exit_in_the_middle_of_a_save_leaves_it_whole(place, slow_disk):
    threading.Timer(0.3, slow_disk.set).start()
    with pytest.raises(KeyboardInterrupt), Checkpoints(place, keep=1) as checkpoints:
        checkpoints.save(state(1), {})
        raise KeyboardInterrupt
    assert_same(Checkpoints(place, keep=1).restore_latest(state(0))[0], state(1))


def test_what_a_checkpoint_costs_is_counted(place):
    checkpoints = Checkpoints(place, keep=1)
    save(checkpoints, state(1), {})
    checkpoints.restore_latest(state(0))
    summary = checkpoints.io_statistics.summary()
    assert summary["writes"] == summary["reads"] == 1
    assert summary["write_bytes"] == summary["read_bytes"] > 3 * 4 * 4
    assert min(summary["write_seconds"], summary["read_seconds"]) > 0


@pytest.fixture
def fake(monkeypatch) -> FakeBucket:
    return use(monkeypatch)


def test_a_save_that_meets_faults_is_whole(fake):
    whole = Checkpoints("gs://bucket/undisturbed", keep=1)
    save(whole, state(7), {})
    # TensorStore waits a second before it repeats a request, so that it meets one fault of each
    # kind.
    pending_faults = {
        "media": ["503", "lost answer"],
        "multipart": ["429", "cut upload", "lost answer", "503"],
    }

    def faults(request):
        pending = pending_faults.get(request.query.get("uploadType", ""), [])
        return pending.pop() if pending else None

    fake.faults = faults
    disturbed = Checkpoints("gs://bucket/run", keep=1)
    save(disturbed, state(7), {"round": 7})
    assert pending_faults == {"media": [], "multipart": []}
    fake.faults = lambda request: (
        "503" if request.kind == "download" and request.nth % 7 == 0 else None
    )
    restored, loop_state = Checkpoints("gs://bucket/run", keep=1).restore_latest(state(0))
    assert_same(restored, state(7))
    assert loop_state == {"round": 7}


def test_a_bucket_that_tensorstore_gave_up_is_one_sentence(fake):
    import tensorstore

    fake.faults = lambda request: "503"
    patience = {
        "max_retries": 2,
        "initial_delay": "1ms",
        "max_delay": "1ms",
    }  # Orbax's context takes 15 minutes
    store = tensorstore.KvStore.open(
        {"driver": "gcs", "bucket": "bucket", "path": "run/"},
        context=tensorstore.Context({"gcs_request_retries": patience}),
    ).result()
    folder = run_path("gs://bucket/run/000007")
    sentence = r"^gs://bucket/run/000007 could not be .*503.* start the same command"
    with (
        pytest.raises(StoreUnavailableError, match=sentence),
        checkpoints_module._as_user_error(folder),
    ):
        store.write("x", b"").result()
    with pytest.raises(ValueError, match="no shape"), checkpoints_module._as_user_error(folder):
        raise ValueError("no shape")


def test_a_save_that_was_killed_before_its_mark_is_not_used_and_is_removed(fake):
    checkpoints = Checkpoints("gs://bucket/run", keep=1)
    save(checkpoints, state(1), {"round": 1})
    for name in fake.names("bucket", "run/000001/arrays/"):
        fake.put("bucket", name.replace("000001", "000002"), fake.content("bucket", name))
    reopened = Checkpoints("gs://bucket/run", keep=1)
    assert_same(reopened.restore_latest(state(0))[0], state(1))
    assert folders(reopened) == ["000001"]


def test_saving_to_a_bucket_loads_neither_tensorflow_nor_gcsfs(fake):
    program = (
        "import sys, jax.numpy as jnp\n"
        "from mujica_jax.learning.checkpoints import Checkpoints\n"
        "with Checkpoints('gs://bucket/run', keep=1) as checkpoints:\n"
        "    checkpoints.save({'x': jnp.ones(3)}, {})\n"
        "print({'tensorflow', 'gcsfs'} & sys.modules.keys())"
    )
    shown = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=os.environ | fake.environment,
        capture_output=True,
        text=True,
    )
    assert shown.stdout == "set()\n", shown.stderr
    assert "run/000001/COMMITTED" in fake.names("bucket")


def test_a_disk_that_cannot_be_used_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="there is a file where a directory is needed"):
        Checkpoints(tmp_path / "file", keep=1).save(state(1), {})
