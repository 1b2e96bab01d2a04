"""The run directory: the names of its files, their order, and which of them to trust.

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

from mujica_jax.config.renamed_fields import with_new_keys
from mujica_jax.errors import RunMismatchError, StoreError
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
    """A shard as DONE.json lists it.

    Equal samples have equal `content_sha256`; `sha256` covers seconds too.
    """

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
    """Return the store of a new run, or of one with the same configuration.

    RunMismatchError names every key, except those in `ignore`, whose value differs from the one in
    config.json. A key that an earlier version wrote under an old name counts under its new one.
    """
    store = Store(root)
    # As it reads back: tuples are lists.
    new_config = json.loads(json.dumps(config, allow_nan=False))
    if not store.exists(CONFIG):
        store.write_json_once(CONFIG, {"config": new_config, **provenance.environment()})
    stored_config = with_new_keys(store.read_json(CONFIG).get("config", {}), new_config)
    differences = provenance.differences(stored_config, new_config, ignore)
    if differences:
        raise RunMismatchError(
            f"{store.root} was begun with another configuration: {'; '.join(differences)}; "
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
        """Store a unit of work and return its entry.

        If another sampler was first, its shard stays and its entry is returned. Raises StoreError
        if that shard is damaged.
        """
        name = shard_name(round_number, shard)
        data = shards.encode(trajectories)
        if self.create(name, data):
            return _entry(name, data, trajectories)
        earlier_shard = self.find_shard(round_number, shard)
        assert earlier_shard is not None, "an object that exists stays"
        return earlier_shard

    def find_shard(self, round_number: int, shard: int) -> ShardEntry | None:
        """Return the entry of a shard, read and checked as a whole, or None if there is none.

        Raises StoreError if it is damaged.
        """
        name = shard_name(round_number, shard)
        if not self.exists(name):
            return None
        data = self.read(name)
        return _entry(name, data, shards.decode(data, str(self.root / name)))

    def read_shard(self, entry: ShardEntry) -> list[Trajectory]:
        """Return a shard's trajectories.

        Raises StoreError if the file is missing or differs from the entry.
        """
        path = self.root / entry.name
        data = self.read(entry.name)
        values = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, value in values.items():
            expected = getattr(entry, name)
            if value != expected:
                raise StoreError(
                    f"{path} is damaged: its {name} is {value} and the manifest says {expected}; "
                    "sample it again"
                )
        return shards.decode(data, str(path))

    def shards(
        self, *, round_number: int | None = None, policy_version: int | None = None
    ) -> list[ShardEntry]:
        """Return the shards of finished rounds, in order.

        They are all, or those of one round or of one policy.
        """
        entries: list[ShardEntry] = []
        for name in self.names("rounds/"):
            match = re.fullmatch(rf"rounds/(\d{{4,}})/{DONE}", name)
            if match is None or round_number not in (None, int(match[1])):
                continue
            summary = self._read_summary(name)
            if summary is not None:
                entries += summary.shards
        if policy_version is None:
            return entries
        return [entry for entry in entries if policy_version in entry.policy_versions]

    def quarantine(self, shard: ShardEntry | str, reason: str) -> RunPath:
        """Move a damaged shard out of its round, so that it is sampled again.

        A DONE.json that lists it is moved too, which opens the round again. Return the path of the
        file with the reason.
        """
        name = shard if isinstance(shard, str) else shard.name
        done = str(Path(name).with_name(DONE))
        summary = self._read_summary(done)
        is_listed = summary is not None and name in {entry.name for entry in summary.shards}

        # The same shard may be damaged twice, so each case has a folder of its own.
        case = f"{QUARANTINE}/{name.replace('/', '-')}.{os.urandom(4).hex()}"
        self.write_json_once(f"{case}/reason.json", {"shard": name, "reason": reason})
        self.move(name, f"{case}/{Path(name).name}")
        if is_listed:
            self.move(done, f"{case}/{Path(done).name}")
        return self.root / case / "reason.json"

    def write_done(
        self,
        round_number: int,
        entries: Sequence[ShardEntry],
        *,
        mean_reward: float,
        threshold: float | None,
    ) -> RoundSummary:
        """Close a round over these shards and return its summary.

        If the round is closed already, its summary stays and is returned.
        """
        summary = RoundSummary(
            round_number=round_number,
            trajectories=sum(entry.rows for entry in entries),
            mean_reward=mean_reward,
            threshold=threshold,
            shards=tuple(entries),
        )
        if self.write_json_once(f"{_round_name(round_number)}/{DONE}", dataclasses.asdict(summary)):
            return summary
        earlier_summary = self.read_done(round_number)
        assert earlier_summary is not None, "an object that exists stays"
        return earlier_summary

    def read_done(self, round_number: int) -> RoundSummary | None:
        """Return the summary of a finished round, or None while the round is open."""
        return self._read_summary(f"{_round_name(round_number)}/{DONE}")

    def _read_summary(self, name: str) -> RoundSummary | None:
        if not self.exists(name):
            return None
        value = self.read_json(name)
        try:
            entries = []
            for fields in value["shards"]:
                policy_versions = tuple(fields["policy_versions"])
                entries.append(ShardEntry(**{**fields, "policy_versions": policy_versions}))
            return RoundSummary(**{**value, "shards": tuple(entries)})
        except (KeyError, TypeError) as error:
            raise StoreError(
                f"{self.root / name} has other fields than this program writes ({error})"
            ) from error

    def commit_policy(self, version: int, write: Callable[[Path], None]) -> bool:
        """Call `write` with an empty directory and make what it left there a policy.

        One process of a run does this. Return False, without calling `write`, if the version exists
        already.
        """
        return self.commit_folder(_policy_name(version), write, {"version": version})

    def remove_policy(self, version: int) -> None:
        self.remove_folder(_policy_name(version))

    def policy_path(self, version: int) -> Path:
        """Return a local directory with a committed policy, each file checked against COMMITTED.

        Raises StoreError.
        """
        name = _policy_name(version)
        if not self.exists(f"{name}/{COMMITTED}"):
            raise StoreError(
                f"{self.root / name} is no committed policy; the versions that are: "
                f"{self.policies() or 'none'}"
            )
        return self.folder(name)

    def policy_place(self, version: int) -> RunPath:
        """Return the path of a policy in the run directory."""
        return self.root / _policy_name(version)

    def policies(self) -> list[int]:
        """Return the committed versions, oldest first."""
        versions = []
        for name in self.names("policies/"):
            match = re.fullmatch(rf"policies/(\d{{6,}})/{COMMITTED}", name)
            if match:
                versions.append(int(match[1]))
        return sorted(versions)


def shard_name(round_number: int, shard: int) -> str:
    return f"{_round_name(round_number)}/shard-{shard:05d}.parquet"


def _round_name(round_number: int) -> str:
    return f"rounds/{round_number:04d}"


def _policy_name(version: int) -> str:
    return f"policies/{version:06d}"


def _entry(name: str, data: bytes, trajectories: Sequence[Trajectory]) -> ShardEntry:
    """Return the entry of a shard with this content."""
    versions = {trajectory.policy_version for trajectory in trajectories}
    return ShardEntry(
        name=name,
        rows=len(trajectories),
        bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        content_sha256=shards.content_sha256(trajectories),
        policy_versions=tuple(sorted(versions)),
    )
