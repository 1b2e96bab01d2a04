"""The run directory: what its files are called, in which order they come to be, and which of them a
reader may trust.

    config.json                      configuration, git revision, versions
    questions.json                   counts and checksums of the questions, and what is searched
    metrics.jsonl                    one line an event, append-only (`report/metrics_log.py`)
    tokenizer/                       of a model from scratch, and COMMITTED, written last
    policies/000003/                 what the policy's writer made, and COMMITTED, written last
    rounds/0003/plan.json            what the round is to sample
    rounds/0003/shard-00007.parquet  one row a trajectory
    rounds/0003/DONE.json            the shards that count, with sizes and checksums; written last
    quarantine/                      damaged shards, each with the reason

Everything but the metrics is created once and never changed (`storage/`). Readers trust what
DONE.json and COMMITTED list. Before a round has DONE.json, a shard counts when it proves to be
whole by itself (`shards.py`), so a sampler may die and be started anywhere.
"""

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from mujica_jax.errors import RunMismatch, StoreError
from mujica_jax.records import Trajectory
from mujica_jax.runtime import provenance
from mujica_jax.storage.manifest import COMMITTED
from mujica_jax.storage.run_directory import RunDirectory, RunPath
from mujica_jax.trajectories import shards

CONFIG = "config.json"
DONE = "DONE.json"
SUMMARY = "summary.json"  # the closing table; a run that has it is finished
QUARANTINE = "quarantine"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardEntry:
    """A shard as DONE.json lists it. Equal samples have equal `content_sha256`; `sha256` covers
    seconds too."""

    name: str  # rounds/0003/shard-00007.parquet
    rows: int
    bytes: int
    sha256: str  # of the file
    content_sha256: str  # of what was sampled
    # those that sampled it: one, unless a program of the user's own mixed them
    policy_versions: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundSummary:
    """DONE.json: a finished round."""

    round_number: int
    trajectories: int
    mean_reward: float
    threshold: float | None  # K of MyGO; None for methods without one
    shards: tuple[ShardEntry, ...]


def open_run(
    root: str | PurePath, config: Mapping[str, Any], ignore: Collection[str] = ("run",)
) -> "Store":
    """The store of a new run, or of one that was begun with the same configuration.

    RunMismatch names every key, except those in `ignore`, whose value differs from the one in
    config.json.
    """
    store = Store(root)
    wanted = json.loads(json.dumps(config, allow_nan=False))  # as it reads back: tuples are lists
    if not store.exists(CONFIG):
        store.write_json_once(CONFIG, {"config": wanted, **provenance.environment()})
    begun = store.read_json(CONFIG).get("config", {})
    if different := provenance.differences(begun, wanted, ignore):
        raise RunMismatch(
            f"{store.root} was begun with another configuration: {'; '.join(different)}; "
            "repeat the old values or choose another --run directory"
        )
    return store


class Store(RunDirectory):
    """One run. Rounds, shards and policies are named by their numbers."""

    def write_plan(self, round_number: int, plan: Mapping[str, Any]) -> bool:
        return self.write_json_once(f"{_round_name(round_number)}/plan.json", plan)

    def write_shard(
        self, round_number: int, shard: int, trajectories: Sequence[Trajectory]
    ) -> ShardEntry:
        """Stores a unit of work. Where another sampler was first, its shard stays and is the one
        returned.

        Raises StoreError when that one is damaged.
        """
        name = shard_name(round_number, shard)
        data = shards.encode(trajectories)
        if self.create(name, data):
            return _entry(name, data, trajectories)
        found = self.find_shard(round_number, shard)
        assert found is not None, "an object that exists stays"
        return found

    def find_shard(self, round_number: int, shard: int) -> ShardEntry | None:
        """The shard on disk, read and checked as a whole, or None. Raises StoreError for one that
        is damaged."""
        name = shard_name(round_number, shard)
        if not self.exists(name):
            return None
        data = self.read(name)
        return _entry(name, data, shards.decode(data, str(self.root / name)))

    def read_shard(self, entry: ShardEntry) -> list[Trajectory]:
        """Raises StoreError where the file is missing or differs from the entry."""
        path = self.root / entry.name
        data = self.read(entry.name)
        found = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for what, value in found.items():
            if value != (expected := getattr(entry, what)):
                differs = f"its {what} is {value} and the manifest says {expected}"
                raise StoreError(f"{path} is damaged: {differs}; sample it again")
        return shards.decode(data, str(path))

    def shards(
        self, *, round_number: int | None = None, policy_version: int | None = None
    ) -> list[ShardEntry]:
        """The shards of finished rounds, in order: all, or those of one round or of one policy."""
        entries = []
        for name in self.names("rounds/"):
            found = re.fullmatch(rf"rounds/(\d{{4,}})/{DONE}", name)
            if (
                found
                and round_number in (None, int(found[1]))
                and (summary := self._read_summary(name))
            ):
                entries += summary.shards
        return [
            entry
            for entry in entries
            if policy_version is None or policy_version in entry.policy_versions
        ]

    def quarantine(self, shard: ShardEntry | str, reason: str) -> RunPath:
        """Moves a damaged shard out of its round, so that it is sampled again, and returns where
        the reason stands.

        A DONE.json that counts on it goes along: the round is open again.
        """
        name = shard if isinstance(shard, str) else shard.name
        done = str(Path(name).with_name(DONE))
        summary = self._read_summary(done)
        listed = summary is not None and name in {entry.name for entry in summary.shards}
        # the same shard may be damaged twice
        case = f"{QUARANTINE}/{name.replace('/', '-')}.{os.urandom(4).hex()}"
        self.write_json_once(f"{case}/reason.json", {"shard": name, "reason": reason})
        for moved in (name, done) if listed else (name,):
            self.move(moved, f"{case}/{Path(moved).name}")
        return self.root / case / "reason.json"

    def write_done(
        self,
        round_number: int,
        entries: Sequence[ShardEntry],
        *,
        mean_reward: float,
        threshold: float | None,
    ) -> RoundSummary:
        """Closes a round over these shards. Where it is closed already, that summary stays and is
        the one returned."""
        shards, rows = tuple(entries), sum(entry.rows for entry in entries)
        summary = RoundSummary(
            round_number=round_number,
            trajectories=rows,
            mean_reward=mean_reward,
            threshold=threshold,
            shards=shards,
        )
        if self.write_json_once(f"{_round_name(round_number)}/{DONE}", dataclasses.asdict(summary)):
            return summary
        found = self.read_done(round_number)
        assert found is not None, "an object that exists stays"
        return found

    def read_done(self, round_number: int) -> RoundSummary | None:
        """None while the round is open."""
        return self._read_summary(f"{_round_name(round_number)}/{DONE}")

    def _read_summary(self, name: str) -> RoundSummary | None:
        if not self.exists(name):
            return None
        value = self.read_json(name)
        try:
            of_shards = [
                {**entry, "policy_versions": tuple(entry["policy_versions"])}
                for entry in value["shards"]
            ]
            return RoundSummary(
                **{**value, "shards": tuple(ShardEntry(**entry) for entry in of_shards)}
            )
        except (KeyError, TypeError) as error:
            raise StoreError(
                f"{self.root / name} has other fields than this program writes ({error})"
            ) from error

    def commit_policy(self, version: int, write: Callable[[Path], None]) -> bool:
        """Calls `write` with an empty directory and makes what it left there a policy; one process
        of a run does this.

        False, without calling it, where the version exists already.
        """
        return self.commit_folder(_policy_name(version), write, {"version": version})

    def remove_policy(self, version: int) -> None:
        self.remove_folder(_policy_name(version))

    def policy_path(self, version: int) -> Path:
        """A local directory with a committed policy, each file checked against COMMITTED. Raises
        StoreError."""
        name = _policy_name(version)
        if not self.exists(f"{name}/{COMMITTED}"):
            raise StoreError(
                f"{self.root / name} is no committed policy; the versions that are: "
                f"{self.policies() or 'none'}"
            )
        return self.folder(name)

    def policy_place(self, version: int) -> RunPath:
        """Where a policy is kept."""
        return self.root / _policy_name(version)

    def policies(self) -> list[int]:
        """Committed versions, oldest first."""
        found = (
            re.fullmatch(rf"policies/(\d{{6,}})/{COMMITTED}", name)
            for name in self.names("policies/")
        )
        return sorted(int(match[1]) for match in found if match)


def shard_name(round_number: int, shard: int) -> str:
    return f"{_round_name(round_number)}/shard-{shard:05d}.parquet"


def _round_name(round_number: int) -> str:
    return f"rounds/{round_number:04d}"


def _policy_name(version: int) -> str:
    return f"policies/{version:06d}"


def _entry(name: str, data: bytes, trajectories: Sequence[Trajectory]) -> ShardEntry:
    return ShardEntry(
        name=name,
        rows=len(trajectories),
        bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        content_sha256=shards.content_sha256(trajectories),
        policy_versions=tuple(sorted({trajectory.policy_version for trajectory in trajectories})),
    )
