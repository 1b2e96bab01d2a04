"""The run directory: what its files are called, in which order they come to be, and which of them a reader may trust.

    config.json                      configuration, git revision, versions
    metrics.jsonl                    one line an event, append-only
    policies/000003/                 what the policy's writer made, and COMMITTED, written last
    rounds/0003/plan.json            what the round is to sample
    rounds/0003/shard-00007.parquet  one row a trajectory
    rounds/0003/DONE.json            the shards that count, with sizes and checksums; written last
    quarantine/                      damaged shards, each with the reason

Everything but the metrics is created once and never changed (`objects.py`). Readers trust what DONE.json and COMMITTED list. Before a
round has DONE.json, a shard counts when it proves to be whole by itself (`shards.py`), so a sampler may die and be started anywhere.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from mujica_jax.errors import RunMismatch, StoreError
from mujica_jax.records import Trajectory
from mujica_jax.trajectories import provenance, shards
from mujica_jax.trajectories.objects import Objects, explained, file_description, sync

CONFIG = "config.json"
METRICS = "metrics.jsonl"
DONE = "DONE.json"
COMMITTED = "COMMITTED"
QUARANTINE = "quarantine"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardEntry:
    """A shard as DONE.json lists it. Two runs that sampled the same agree in `content_sha256` alone: the file holds seconds too."""

    name: str  # rounds/0003/shard-00007.parquet
    rows: int
    bytes: int
    sha256: str  # of the file
    content_sha256: str  # of what was sampled


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundSummary:
    """DONE.json: a finished round."""

    round_number: int
    trajectories: int
    mean_reward: float
    threshold: float | None  # K of MyGO; None for methods without one
    shards: tuple[ShardEntry, ...]


def open_run(root: str | Path, config: Mapping[str, Any], ignore: Collection[str] = ("run",)) -> "Store":
    """The store of a new run, or of one that was begun with the same configuration.

    RunMismatch names every key, except those in `ignore`, whose value differs from the one in config.json.
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


class Store(Objects):
    """One run. Rounds, shards and policies are named by their numbers."""

    def append_metrics(self, values: Mapping[str, Any]) -> None:
        self.append_line(METRICS, values)

    def read_metrics(self) -> list[dict[str, Any]]:
        return self.read_lines(METRICS)

    def write_plan(self, round_number: int, plan: Mapping[str, Any]) -> bool:
        return self.write_json_once(f"{_round_name(round_number)}/plan.json", plan)

    def read_plan(self, round_number: int) -> dict[str, Any] | None:
        name = f"{_round_name(round_number)}/plan.json"
        return self.read_json(name) if self.exists(name) else None

    def shard_exists(self, round_number: int, shard: int) -> bool:
        """Whether there is a file, whole or not: `find_shard` looks inside."""
        return self.exists(shard_name(round_number, shard))

    def write_shard(self, round_number: int, shard: int, trajectories: Sequence[Trajectory]) -> ShardEntry:
        """Stores a unit of work. Where another sampler was first, its shard stays and is the one returned.

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
        """The shard on disk, read and checked as a whole, or None. Raises StoreError for one that is damaged."""
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
            expected = getattr(entry, what)
            if value != expected:
                raise StoreError(
                    f"{path} is damaged: its {what} is {value} and the manifest says {expected}; sample it again"
                )
        trajectories = shards.decode(data, str(path))
        if len(trajectories) != entry.rows:
            raise StoreError(
                f"{path} holds {len(trajectories)} rows and the manifest says {entry.rows}; sample it again"
            )
        return trajectories

    def quarantine(self, shard: ShardEntry | str, reason: str) -> Path:
        """Moves a damaged shard out of its round, so that it is sampled again, and returns where the reason stands.

        A DONE.json that counts on it goes along: the round is open again.
        """
        name = shard if isinstance(shard, str) else shard.name
        done = str(Path(name).with_name(DONE))
        summary = self._read_summary(done)
        listed = summary is not None and name in {entry.name for entry in summary.shards}
        case = f"{QUARANTINE}/{name.replace('/', '-')}.{os.urandom(4).hex()}"  # the same shard may be damaged twice
        self.write_json_once(f"{case}/reason.json", {"shard": name, "reason": reason})
        for moved in (name, done) if listed else (name,):
            with contextlib.suppress(FileNotFoundError), explained(self.root / moved):
                os.rename(self.root / moved, self.root / case / Path(moved).name)
                sync((self.root / moved).parent)
        return self.root / case / "reason.json"

    def write_done(
        self, round_number: int, entries: Sequence[ShardEntry], *, mean_reward: float, threshold: float | None
    ) -> RoundSummary:
        """Closes a round over these shards. Where it is closed already, that summary stays and is the one returned."""
        summary = RoundSummary(
            round_number=round_number,
            trajectories=sum(entry.rows for entry in entries),
            mean_reward=mean_reward,
            threshold=threshold,
            shards=tuple(entries),
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
            entries = tuple(ShardEntry(**entry) for entry in value["shards"])
            return RoundSummary(**{**value, "shards": entries})
        except (KeyError, TypeError) as error:
            raise StoreError(f"{self.root / name} has other fields than this program writes ({error})") from error

    def commit_policy(self, version: int, write: Callable[[Path], None]) -> bool:
        """Calls `write` with an empty directory and makes what it left there a policy; one process of a run does this.

        False, without calling it, where the version exists already.
        """
        target = self.root / "policies" / f"{version:06d}"
        if (target / COMMITTED).exists():
            return False
        partial = target.with_name(f".partial-{target.name}")  # one name: what a killed writer left is removed here
        with explained(target):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            try:
                write(partial)
                self._commit(partial, version)
                os.rename(partial, target)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
            sync(target.parent)
        return True

    def _commit(self, directory: Path, version: int) -> None:
        """Brings everything in the directory to the disk, and then the list of it."""
        found = sorted(directory.rglob("*"))
        for path in (*found, directory):
            sync(path)
        files = [file_description(path, str(path.relative_to(directory))) for path in found if path.is_file()]
        self.write_json_once(str((directory / COMMITTED).relative_to(self.root)), {"version": version, "files": files})

    def policy_path(self, version: int) -> Path:
        """The directory of a committed policy, every file compared with COMMITTED. Raises StoreError naming what is wrong."""
        directory = self.root / "policies" / f"{version:06d}"
        if not (directory / COMMITTED).exists():
            raise StoreError(f"{directory} is no committed policy; the versions that are: {self.policies() or 'none'}")
        for expected in self.read_json(str((directory / COMMITTED).relative_to(self.root)))["files"]:
            path = directory / expected["name"]
            if not path.exists():
                raise StoreError(
                    f"{path} is missing and COMMITTED lists it; restore it or remove this policy's directory"
                )
            found = file_description(path, expected["name"])
            if found != expected:
                raise StoreError(
                    f"{path} is damaged: it has {found} and COMMITTED lists {expected}; restore it or remove {directory}"
                )
        return directory

    def policies(self) -> list[int]:
        """Committed versions, oldest first."""
        found = (self.root / "policies").glob(f"*/{COMMITTED}")
        return sorted(int(path.parent.name) for path in found if re.fullmatch(r"\d{6,}", path.parent.name))

    def latest_policy(self) -> int | None:
        return max(self.policies(), default=None)


def shard_name(round_number: int, shard: int) -> str:
    return f"{_round_name(round_number)}/shard-{shard:05d}.parquet"


def _round_name(round_number: int) -> str:
    return f"rounds/{round_number:04d}"


def _entry(name: str, data: bytes, trajectories: Sequence[Trajectory]) -> ShardEntry:
    return ShardEntry(
        name=name,
        rows=len(trajectories),
        bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        content_sha256=shards.content_sha256(trajectories),
    )
