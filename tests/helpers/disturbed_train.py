"""Starts of `mujica_jax.train` in which something happens on the way.

    python -m tests.helpers.disturbed_train \\
        '[{"words": ["CONFIG", "--run", "DIR"], "signal": "SIGKILL", "phase": "warm-up: learning", "update": 40}]'

Every start is a process of its own, forked from one that has imported everything and built the
world: both together take longer than most starts. What becomes of each is printed as one JSON line:
status, output, messages, and the seconds from the signal to the end.

A model of this size answers nothing right, so no round would keep or learn anything. Here every
third planner conversation, by its tokens, is worth the best reward. A start may name

    signal      and where it comes: at the `update`-th progress report of a `phase` (0: as it begins), or instead of
                the `write`-th time that something is brought to the disk or renamed
    saved       a pattern of files in the run directory: the signal waits until there is one
    then_write  SIGKILL follows instead of that-th write after the signal
    full        "disk": from the `write`-th such time on the disk takes nothing more
    file_bytes  what one file may hold at most (RLIMIT_FSIZE)
    stretch     updates between two saves of the learner
    rows        a file to which the rows of every update are written down, by their checksums
    own_rewards episodes earn what the configuration says
    program     "sample": a worker of `mujica_jax.sample`, with the same rewards, in the place of a trainer
"""

import errno
import functools
import hashlib
import importlib
import itertools
import json
import os
import pkgutil
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orbax.checkpoint  # noqa: F401 - imported late by the program
import transformers

import mujica_jax
from mujica_jax.commands import sample, train
from mujica_jax.config.files import load_config
from mujica_jax.learning.trainer import Trainer
from mujica_jax.records import Reward, Trajectory
from mujica_jax.report.progress import Stage
from mujica_jax.runs import learning as learning_phase
from mujica_jax.runs import setup as start
from mujica_jax.runtime.preemption import Preemption
from mujica_jax.tasks.checks import from_scratch

SECONDS_TO_WAIT = 900.0  # for what must come, on a busy machine too
# names the file that holds how many CPU seconds were used when the signal came
NOTED = "MUJICA_SIGNALLED"
LISTENING: list[Preemption] = []  # to signals


def import_all() -> None:
    """Import all that a run needs, so that no start imports it again."""
    folders = ("agents", "learning", "methods", "models", "report", "tasks", "trajectories")
    for module in pkgutil.walk_packages(mujica_jax.__path__, "mujica_jax."):
        if module.name.split(".")[1] in folders:
            importlib.import_module(module.name)
    _ = transformers.PreTrainedTokenizerFast  # this one is lazy


def build_once(path: str) -> None:
    """Build the task of a configuration file here, for all starts.

    An index of passages starts JAX, whose threads do not survive a fork, so there each start builds
    its own.
    """
    config = load_config(path).task
    if getattr(config, "environment", None) == "text":
        return
    build = start.build_task
    task = build(load_config(path))
    if config.environment == "graph":  # bm25s starts JAX's threads, which no fork survives
        list(from_scratch(task).demonstrations())

    def build_or_reuse(config_of_run: Any) -> Any:
        return task if config_of_run.task == config else build(config_of_run)

    start.build_task = build_or_reuse


def send(name: str) -> None:
    sys.stdout.flush()
    Path(os.environ[NOTED]).write_text(str(time.process_time()))
    os.kill(os.getpid(), signal.Signals[name])
    until = time.monotonic() + SECONDS_TO_WAIT
    # A thread hears it.
    while LISTENING and not LISTENING[-1]._asked and time.monotonic() < until:
        time.sleep(0.01)


def reward_by_tokens() -> None:
    rewarded = Trajectory.with_reward

    def by_tokens(trajectory: Trajectory, reward: Reward) -> Trajectory:
        return rewarded(
            trajectory, Reward(total=float(sum(trajectory.conversations[0].token_ids) % 3 == 0))
        )

    Trajectory.with_reward = by_tokens


def before(owner: Any, name: str, act: Callable[..., None]) -> None:
    """Call `act` before each call of a method, with the same arguments."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def instead(*arguments, **options):
        act(*arguments, **options)
        return original(*arguments, **options)

    setattr(owner, name, instead)


def in_phase(phase: str, number: int, act: Callable[[], None]) -> None:
    """Act at the number-th progress report of a phase, or, for 0, as the phase begins."""
    reports = itertools.count(1)

    def reported(stage: Stage, done: int, **figures) -> None:
        if stage.name == phase and next(reports) == number:
            act()

    def entered(preemption: Preemption, name: str, **options) -> None:
        if name == phase and number == 0:
            act()

    before(Stage, "update", reported)
    before(Preemption, "enter", entered)


def at_write(number: int, act: Callable[[], None], *, once: bool) -> None:
    """Act at the number-th write to a disk and, unless `once`, at every later one."""
    writes = itertools.count(1)

    def counted(*_, **__) -> None:
        write = next(writes)
        if write == number or (write > number and not once):
            act()

    for name in ("fsync", "link", "rename", "replace"):
        before(os, name, counted)


def no_space() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def then_kill(name: str, directory: Path, saved: str | None, write: int | None) -> None:
    until = time.monotonic() + SECONDS_TO_WAIT
    while saved is not None and not any(directory.glob(saved)) and time.monotonic() < until:
        time.sleep(0.01)
    send(name)
    if write is not None:
        at_write(write, functools.partial(send, "SIGKILL"), once=True)


def write_rows_down(file: Path) -> None:
    def drawn(trainer: Trainer, state: Any, batch: Any, schedule: Any) -> None:
        rows = [hashlib.sha256(row.tobytes()).hexdigest()[:12] for row in batch.tokens]
        with file.open("a") as log:
            log.write(json.dumps(rows) + "\n")

    before(Trainer, "train_step", drawn)


def disturbed(
    words: list[str],
    *,
    signal: str | None = None,
    phase: str | None = None,
    update: int = 0,
    write: int | None = None,
    saved: str | None = None,
    then_write: int | None = None,
    full: str | None = None,
    file_bytes: int | None = None,
    stretch: int | None = None,
    rows: str | None = None,
    program: str = "train",
    own_rewards: bool = False,
) -> int:
    directory = Path(words[words.index("--run") + 1])
    before(Preemption, "__enter__", LISTENING.append)
    if not own_rewards:
        reward_by_tokens()
    if signal is None or signal == "SIGKILL":
        # so that a kill within a phase finds something to go on from
        learning_phase.SAVE_EVERY_SECONDS = 0.0
    if stretch is not None:
        learning_phase.STEPS_A_STRETCH = stretch
    if rows is not None:
        write_rows_down(Path(rows))
    if file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    if full == "disk" and write is not None:
        at_write(write, no_space, once=False)
    elif write is not None and signal is not None:
        at_write(write, functools.partial(send, signal), once=True)
    elif phase is not None and signal is not None:
        in_phase(phase, update, functools.partial(then_kill, signal, directory, saved, then_write))
    return (sample if program == "sample" else train).main(words)


def started(chosen: dict[str, Any]) -> int | None:
    """Fork a start and print a report on it.

    In the forked process, return the exit status of the program.
    """
    folder = Path(tempfile.mkdtemp())
    output = folder / "output"
    messages = folder / "messages"
    noted = folder / "noted"
    child = os.fork()
    if child == 0:
        os.environ[NOTED] = str(noted)
        for number, file in ((1, output), (2, messages)):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
        return disturbed(**chosen)
    _, status, used = os.wait4(child, 0)
    cpu_seconds_after_signal = None
    if noted.exists():
        cpu_seconds_at_signal = float(noted.read_text())
        cpu_seconds_after_signal = used.ru_utime + used.ru_stime - cpu_seconds_at_signal
    report = {
        "status": os.waitstatus_to_exitcode(status),
        "output": output.read_text(),
        "messages": messages.read_text(),
        "cpu_seconds_after_signal": cpu_seconds_after_signal,
    }
    shutil.rmtree(folder)
    print(json.dumps(report), flush=True)
    return None


def wait_for_the_job(folder: Path, processes: int) -> None:
    """Wait until the other processes of a job are here too: on a busy machine one may need much
    longer to import.
    """
    (folder / str(os.getpid())).touch()
    until = time.monotonic() + SECONDS_TO_WAIT
    while len(list(folder.iterdir())) < processes and time.monotonic() < until:
        time.sleep(0.01)


def main() -> int:
    import_all()
    starts = json.loads(sys.argv[1])
    if starts[0].get("program") != "sample":
        build_once(starts[0]["words"][0])
    job = starts[0].pop("job", None)
    if job is not None:
        wait_for_the_job(Path(job["folder"]), job["processes"])
    for chosen in starts:
        status = started(chosen)
        if status is not None:
            return status
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
