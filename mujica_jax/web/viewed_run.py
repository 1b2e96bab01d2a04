"""A run directory as the viewer reads it: its sets of trajectories, its questions, its tokenizer.

A folder that `eval --out` wrote can be read too. It has evaluations alone: no rounds, no settings and
no tokenizer.

The viewer trusts what the run itself trusts. A round is shown when its DONE.json lists the shards,
and an evaluation when its scores are written. Files of a round that is still being sampled are
counted and not read.
"""

import dataclasses
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.json
import tokenizers

from mujica_jax.errors import StoreError, UserError
from mujica_jax.storage.run_directory import run_path
from mujica_jax.trajectories import shards
from mujica_jax.trajectories.store import CONFIG, DONE, SUMMARY, Store

# The fields of a question that a run may record beside its trajectories.
PASSAGE = pyarrow.struct(
    {"title": pyarrow.string(), "text": pyarrow.string(), "by_title": pyarrow.bool_()}
)
QUESTION_SCHEMA = pyarrow.schema(
    {
        "id": pyarrow.string(),
        "kind": pyarrow.string(),
        "question": pyarrow.string(),
        "answers": pyarrow.list_(pyarrow.string()),
        "gold_passages": pyarrow.list_(PASSAGE),
    }
)
# The largest line of a file of questions.
QUESTION_BLOCK_BYTES = 64 * 2**20
ROUND = re.compile(rf"rounds/(\d{{4,}})/{DONE}")
OPEN_SHARD = re.compile(r"rounds/(\d{4,})/shard-\d+\.parquet")
EVALUATION = re.compile(r"([^/]+)\.parquet")
# The folder of a run that has its evaluations.
EVALUATIONS = "eval/"
TOKENIZER = re.compile(r"(tokenizer|policies/\d+/model)/tokenizer\.json")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardFile:
    """A file of trajectories. `sha256` is what the manifest says; empty if it has no manifest."""

    name: str
    sha256: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrajectorySet:
    """The trajectories of one round or of one evaluation.

    Attributes:
        id: The name in addresses, such as "round-2" or "eval-warm-up".
        title: The name on the page.
        kind: "round" or "evaluation".
        shards: The files, in the order of their rows.
        questions_file: The file with the questions. It may be missing.
        kept_file: The file that lists what training kept; empty for an evaluation.
        threshold: MyGO's threshold K of the round; None without one.
        fault: Why the set cannot be read; empty if it can.
    """

    id: str
    title: str
    kind: str
    shards: tuple[ShardFile, ...] = ()
    questions_file: str
    kept_file: str = ""
    threshold: float | None = None
    fault: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenRound:
    """A round that is still being sampled. It has no manifest, so its shards are not shown."""

    title: str
    shards: int


class ViewedRun:
    """A run directory that is only read."""

    def __init__(self, name: str, directory: str) -> None:
        """Open the directory. Raises UserError if it holds neither a run nor an evaluation.

        `name` is the name of the run on the page and in addresses.
        """
        place = run_path(directory)
        is_run = (place / CONFIG).exists()
        # This is checked before the store is opened, because opening it makes the directory.
        if not is_run and not any(place.glob("*.predictions.jsonl")):
            raise UserError(
                f"{directory} is not the directory of a run: it has no {CONFIG} and no result of "
                "eval; give a directory that train wrote, such as runs/NAME, or a folder of eval --out"
            )
        self.name = name
        self.directory = directory
        self.store = Store(directory)
        # What train recorded of the run. Empty for a folder of `eval --out`.
        self.config: dict[str, Any] = self.store.read_json(CONFIG) if is_run else {}
        # The folder of the evaluations, relative to the directory.
        self._evaluations_folder = EVALUATIONS if is_run else ""
        self._tokenizer: tokenizers.Tokenizer | None = None
        # The questions of each file, with the state of the file at which they were read.
        self._questions: dict[str, tuple[object, pyarrow.Table]] = {}

    @property
    def is_finished(self) -> bool:
        """Whether the run has written its closing table."""
        return self.store.exists(SUMMARY)

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings of the run, section by section."""
        settings = self.config.get("config", {})
        return settings if isinstance(settings, dict) else {}

    def sets(self) -> dict[str, TrajectorySet]:
        """Return the finished rounds and evaluations by their id, rounds first."""
        sets = [*self._rounds(), *self._evaluations()]
        return {trajectory_set.id: trajectory_set for trajectory_set in sets}

    def open_rounds(self) -> list[OpenRound]:
        """Return the rounds that have shards and no manifest yet."""
        names = self.store.names("rounds/")
        finished = {match[1] for match in map(ROUND.fullmatch, names) if match}
        counts: dict[str, int] = {}
        for match in map(OPEN_SHARD.fullmatch, names):
            if match and match[1] not in finished:
                counts[match[1]] = counts.get(match[1], 0) + 1
        return [
            OpenRound(title=f"round {int(number)}", shards=count)
            for number, count in sorted(counts.items())
        ]

    def state_of(self, name: str) -> object:
        """Return a value that changes when a file of the run is replaced."""
        path = self.store.root / name
        if isinstance(path, Path):
            try:
                status = path.stat()
            except FileNotFoundError:
                return None
            return status.st_size, status.st_mtime_ns, status.st_ino
        info = path.bucket.find(path.key)
        return info.generation if info else None

    def shard_state(self, shard: ShardFile) -> object:
        """Return a value that changes when a shard is replaced.

        In a bucket, a shard of a manifest is known by its checksum. This saves a request to the
        service for each shard and each list.
        """
        if shard.sha256 and not isinstance(self.store.root, Path):
            return shard.sha256
        return self.state_of(shard.name)

    def shard_bytes(self, shard: ShardFile) -> bytes:
        """Return the checked bytes of a shard. Raises StoreError if it is missing or damaged."""
        data = self.store.read(shard.name)
        if not shard.sha256:
            shards.check_digest(data, shard.name)
            return data
        digest = hashlib.sha256(data).hexdigest()
        if digest != shard.sha256:
            raise StoreError(
                f"{shard.name} is damaged: its {len(data)} bytes have SHA-256 {digest[:12]}..., "
                f"but the manifest says {shard.sha256[:12]}...; start the run again, and it samples "
                "the shard again"
            )
        return data

    def questions(self, trajectory_set: TrajectorySet) -> pyarrow.Table:
        """Return the recorded questions of a set, with the columns of QUESTION_SCHEMA.

        The table is empty if the run has not recorded them.
        """
        name = trajectory_set.questions_file
        state = self.state_of(name)
        if name in self._questions and self._questions[name][0] == state:
            return self._questions[name][1]
        table = QUESTION_SCHEMA.empty_table()
        if state is not None:
            data = self.store.read(name)
            if data.strip():
                table = _read_questions(data, name)
        self._questions[name] = (state, table)
        return table

    def tokenizer(self) -> tokenizers.Tokenizer | None:
        """Return the tokenizer of the run's policy, or None if the run has not stored one yet."""
        if self._tokenizer is None:
            names = [*self.store.names("tokenizer/"), *self.store.names("policies/")]
            for name in names:
                if TOKENIZER.fullmatch(name):
                    text = self.store.read(name).decode()
                    self._tokenizer = tokenizers.Tokenizer.from_str(text)
                    break
        return self._tokenizer

    def _rounds(self) -> list[TrajectorySet]:
        """Return the finished rounds, in order."""
        rounds = []
        for name in self.store.names("rounds/"):
            match = ROUND.fullmatch(name)
            if match is None:
                continue
            number = int(match[1])
            folder = f"rounds/{match[1]}"
            files: tuple[ShardFile, ...] = ()
            threshold = None
            fault = ""
            try:
                summary = self.store.read_done(number)
            except StoreError as error:
                summary = None
                fault = str(error)
            if summary is not None:
                threshold = summary.threshold
                files = tuple(
                    ShardFile(name=entry.name, sha256=entry.sha256) for entry in summary.shards
                )
            trajectory_set = TrajectorySet(
                id=f"round-{number}",
                title=f"round {number}",
                kind="round",
                shards=files,
                questions_file=f"{folder}/questions.jsonl",
                kept_file=f"{folder}/kept.json",
                threshold=threshold,
                fault=fault,
            )
            rounds.append(trajectory_set)
        return rounds

    def _evaluations(self) -> list[TrajectorySet]:
        """Return the evaluations whose scores are written, in the order of the run."""
        folder = self._evaluations_folder
        names = {name.removeprefix(folder) for name in self.store.names(folder)}
        evaluations = []
        for name in sorted(names, key=_natural_order):
            match = EVALUATION.fullmatch(name)
            if match is None or f"{match[1]}.json" not in names:
                continue
            evaluation = TrajectorySet(
                id=f"eval-{match[1]}",
                title=_evaluation_title(match[1]),
                kind="evaluation",
                shards=(ShardFile(name=f"{folder}{name}"),),
                questions_file=f"{folder}{match[1]}.predictions.jsonl",
            )
            evaluations.append(evaluation)
        return evaluations


def _evaluation_title(stem: str) -> str:
    """Return the name of an evaluation on the page. `stem` is the name of its files."""
    round_name = re.fullmatch(r"round-(\d+)", stem)
    if round_name:
        return f"evaluation after round {round_name[1]}"
    if stem in ("warm-up", "control", "evipath", "sft", "dpo"):
        return f"evaluation after {stem}"
    return f"evaluation {stem}"


def _natural_order(name: str) -> tuple[Any, ...]:
    """Return a sort key: the warm-up first, then numbers by their value."""
    parts = re.split(r"(\d+)", name)
    numbers = [(int(part), "") if part.isdigit() else (-1, part) for part in parts]
    return (not name.startswith("warm-up."), *numbers)


def _read_questions(data: bytes, name: str) -> pyarrow.Table:
    """Return the questions in a file of JSON lines. Raises StoreError if it cannot be read."""
    try:
        return pyarrow.json.read_json(
            pyarrow.BufferReader(data),
            read_options=pyarrow.json.ReadOptions(block_size=QUESTION_BLOCK_BYTES),
            parse_options=pyarrow.json.ParseOptions(
                explicit_schema=QUESTION_SCHEMA, unexpected_field_behavior="ignore"
            ),
        ).select(QUESTION_SCHEMA.names)
    except (pyarrow.ArrowInvalid, KeyError) as error:
        raise StoreError(
            f"{name} is not a file of questions ({str(error).splitlines()[0]}); restore it"
        ) from error
