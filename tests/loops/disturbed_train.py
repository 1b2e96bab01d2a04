"""`mujica_jax.train` as a program that earns rewards and, if asked to, kills itself with SIGKILL.

    python disturbed_train.py [--kill-in STAGE UPDATE | --kill-at-write NUMBER] [arguments of mujica_jax.train]

A model of this size answers nothing right, so no round would keep or learn anything. Here every third planner conversation, by its
tokens, is worth the best reward. The kill comes at the UPDATE-th progress report of a stage ("round 1: sampling"), or instead of the
NUMBER-th time that something is brought to the disk or renamed.
"""

import dataclasses
import os
import signal
import sys
from typing import NoReturn

from mujica_jax import train
from mujica_jax.agents.mujica import Mujica
from mujica_jax.methods import run
from mujica_jax.records import Trajectory
from mujica_jax.report.progress import Stage


def die() -> NoReturn:
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("SIGKILL cannot be caught")


def reward_by_tokens() -> None:
    play = Mujica.run

    async def rewarded(*arguments, **options) -> Trajectory:
        trajectory = await play(*arguments, **options)
        return dataclasses.replace(trajectory, reward=float(sum(trajectory.planner.token_ids) % 3 == 0))

    Mujica.run = rewarded


def kill_in(stage_name: str, number: int) -> None:
    update, seen = Stage.update, 0

    def counted(stage: Stage, done: int, **figures) -> None:
        nonlocal seen
        update(stage, done, **figures)
        seen += stage.name == stage_name
        if seen == number:
            die()

    Stage.update = counted


def kill_at_write(number: int) -> None:
    seen = 0

    def counted(call):
        def instead(*arguments, **options):
            nonlocal seen
            seen += 1
            if seen == number:
                die()
            return call(*arguments, **options)

        return instead

    for name in ("fsync", "link", "rename", "replace"):
        setattr(os, name, counted(getattr(os, name)))


def main() -> int:
    words = sys.argv[1:]
    reward_by_tokens()
    run.SAVE_EVERY_SECONDS = 0.0  # so that a kill within a phase finds something to go on from
    if words[0] == "--kill-in":
        kill_in(words[1], int(words[2]))
        words = words[3:]
    elif words[0] == "--kill-at-write":
        kill_at_write(int(words[1]))
        words = words[2:]
    return train.main(words)


if __name__ == "__main__":
    raise SystemExit(main())
