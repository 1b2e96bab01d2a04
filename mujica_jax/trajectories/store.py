"""The class `Store`: the run directory with its files, and the rules that say which are valid.

    config.json                      configuration, command, git revision, versions of packages
    models/                          commits of models of the Hugging Face Hub (`runs/commits.py`)
    questions.json                   counts and checksums of questions, and what is searched
    metrics.jsonl                    one line for each event, append-only (`report/metrics_log.py`)
    tokenizer/                       tokenizer of a new model; its file COMMITTED is written last
    policies/000003/                 files of a policy; its file COMMITTED is written last
    rounds/0003/plan.json            the questions and attempts that the round samples
    rounds/0003/shard-00007.parquet  trajectories, one in each row
    rounds/0003/DONE.json            the round's valid shards, with sizes and checksums; written last
    quarantine/                      damaged shards, each with a file that says why

All files except the metrics are created once and never changed (`storage/`). Readers trust the
files that DONE.json and COMMITTED list. While a round has no DONE.json, a shard is valid if its own
checksum matches (`shards.py`). A sampler can therefore die at any time and be restarted on any
machine.
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
# The final table of scores. A run that has this file is finished.
SUMMARY = "summary.json"
QUARANTINE = "quarantine"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardEntry:
    """The entry of a shard in DONE.json."""

    # The file name in the run directory, for example rounds/0003/shard-00007.parquet.
    name: str
    rows: int
    bytes: int
    # The checksum of the file. It covers the durations of the episodes too.
    sha256: str
    # The checksum of the sampled content. Equal samples have equal checksums.
    content_sha256: str
    # The versions of the policies that sampled the shard. It is a single one, unless a user's own
    # program mixes them.
    policy_versions: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundSummary:
    """The content of DONE.json, which describes a finished round."""

    round_number: int
    # The number of trajectories in all shards.
    trajectories: int
    mean_reward: float
    # The threshold K of MyGO, or None for methods without a threshold.
    threshold: float | None
    shards: tuple[ShardEntry, ...]


def open_run(
    root: str | PurePath, config: Mapping[str, Any], ignore: Collection[str] = ("run",)
) -> "Store":
    """Return the store of a new run, or of an existing run with the same configuration.

    Raises RunMismatchError if the configuration differs from config.json in any key that is not in
    `ignore`. The message names all such keys. Keys that an earlier version wrote under an old name
    are compared under their new name. A setting that is younger than the run may be None, which means
    that nothing is set.
    """
    store = Store(root)
    # Bring the configuration into the form that JSON reads back, with lists in place of tuples.
    new_config = json.loads(json.dumps(config, allow_nan=False))
    if not store.exists(CONFIG):
        facts = {"command": provenance.command(), **provenance.environment()}
        store.write_json_once(CONFIG, {"config": new_config, **facts})
    stored_config = with_new_keys(store.read_json(CONFIG).get("config", {}), new_config)
    stored_config = _with_unset_settings(stored_config, new_config)
    differences = provenance.differences(stored_config, new_config, ignore)
    if differences:
        raise RunMismatchError(
            f"{store.root} was started with another configuration: {'; '.join(differences)}; "
            "use the old values or choose another --run directory"
        )
    return store


def _with_unset_settings(stored: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored configuration with None for settings that it lacks and that are None now."""
    completed = dict(stored)
    for name, value in current.items():
        if value is None:
            completed.setdefault(name, None)
        elif isinstance(value, Mapping) and isinstance(stored.get(name), Mapping):
            completed[name] = _with_unset_settings(stored[name], value)
    return completed


class Store(RunDirectory):
    """The directory of one run. Rounds, shards and policies are identified by their numbers."""

    def write_plan(self, round_number: int, plan: Mapping[str, Any]) -> bool:
        """Write the plan of a round. Return False if the round has a plan already."""
        return self.write_json_once(f"{_round_name(round_number)}/plan.json", plan)

    def write_shard(
        self, round_number: int, shard: int, trajectories: Sequence[Trajectory]
    ) -> ShardEntry:
        """Store the trajectories of a unit of work as a shard, and return its entry.

        If another sampler has already written this shard, it is not changed, and its entry is
        returned. Raises StoreError if that shard is damaged.
        """
        name = shard_name(round_number, shard)
        data = shards.encode(trajectories)
        if self.create(name, data):
            return _entry(name, data, trajectories)
        earlier_shard = self.find_shard(round_number, shard)
        assert earlier_shard is not None, "the object exists, because it could not be created"
        return earlier_shard

    def find_shard(self, round_number: int, shard: int) -> ShardEntry | None:
        """Return the entry of a shard, or None if the shard does not exist.

        Reads and checks the whole file. Raises StoreError if it is damaged.
        """
        name = shard_name(round_number, shard)
        if not self.exists(name):
            return None
        data = self.read(name)
        return _entry(name, data, shards.decode(data, str(self.root / name)))

    def read_shard(self, entry: ShardEntry) -> list[Trajectory]:
        """Return the trajectories of a shard.

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
        """Return the entries of the shards of finished rounds, in order.

        `round_number` limits them to one round, and `policy_version` to one policy.
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

        If DONE.json lists the shard, DONE.json is moved too. The round is then open again. Return
        the path of the file that holds the reason.
        """
        name = shard if isinstance(shard, str) else shard.name
        done = str(Path(name).with_name(DONE))
        summary = self._read_summary(done)
        is_listed = summary is not None and name in {entry.name for entry in summary.shards}

        # The same shard may be damaged more than once, so each case gets a new folder.
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
        """Finish a round with these shards, and return its summary.

        If the round is finished already, its existing summary is returned unchanged.
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
        assert earlier_summary is not None, "the object exists, because it could not be created"
        return earlier_summary

    def read_done(self, round_number: int) -> RoundSummary | None:
        """Return the summary of a finished round, or None while the round is open."""
        return self._read_summary(f"{_round_name(round_number)}/{DONE}")

    def _read_summary(self, name: str) -> RoundSummary | None:
        """Return the summary in a file, or None. Raises StoreError if the file is damaged."""
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
                f"{self.root / name} does not have the fields that this program writes ({error}); "
                "read it with the release that wrote it"
            ) from error

    def commit_policy(self, version: int, write: Callable[[Path], None]) -> bool:
        """Store a policy. `write` gets an empty directory and writes the files of the policy there.

        Only one process of a run may do this. If the version exists already, return False without
        calling `write`.
        """
        return self.commit_folder(_policy_name(version), write, {"version": version})

    def remove_policy(self, version: int) -> None:
        """Remove a policy from the run directory."""
        self.remove_folder(_policy_name(version))

    def policy_path(self, version: int) -> Path:
        """Return a local directory with the files of a committed policy.

        Each file is checked against COMMITTED. Raises StoreError if the policy does not exist or a
        file is damaged.
        """
        name = _policy_name(version)
        if not self.exists(f"{name}/{COMMITTED}"):
            raise StoreError(
                f"{self.root / name} is not a committed policy; choose from the committed "
                f"versions: {self.policies() or 'none'}"
            )
        return self.folder(name)

    def policy_place(self, version: int) -> RunPath:
        """Return the path of a policy in the run directory, which may be in a bucket."""
        return self.root / _policy_name(version)

    def policies(self) -> list[int]:
        """Return the versions of all committed policies, oldest first."""
        versions = []
        for name in self.names("policies/"):
            match = re.fullmatch(rf"policies/(\d{{6,}})/{COMMITTED}", name)
            if match:
                versions.append(int(match[1]))
        return sorted(versions)


def shard_name(round_number: int, shard: int) -> str:
    """Return the file name of a shard in the run directory."""
    return f"{_round_name(round_number)}/shard-{shard:05d}.parquet"


def _round_name(round_number: int) -> str:
    """Return the name of a round's folder in the run directory."""
    return f"rounds/{round_number:04d}"


def _policy_name(version: int) -> str:
    """Return the name of a policy's folder in the run directory."""
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
