"""The list of trajectories as an Arrow table: read from shards, filtered, sorted, cut into pages.

A shard is read once. Only the columns of the list are kept, and the nested ones (conversations and
searches) stay on the disk. All work on rows is done by Arrow's functions, so a list of 100,000 rows
is filtered in milliseconds.
"""

import dataclasses
import json
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow
import pyarrow.compute

from mujica_jax.errors import StoreError
from mujica_jax.trajectories import shards
from mujica_jax.web.viewed_run import ShardFile, TrajectorySet, ViewedRun

# Columns of a shard that the list reads.
SHARD_COLUMNS = (
    "question_id",
    "attempt",
    "policy_version",
    "answer",
    "reward",
    "seconds",
    "stop_reason",
    "search_count",
)
# Columns by which the list can be sorted.
SORT_COLUMNS = ("set", "kind", "kept", "question", *SHARD_COLUMNS)
# Separates the question's id from the attempt in a combined key. Ids hold no such character.
KEY_SEPARATOR = "\x1f"
READING_THREADS = 2
# Arrow makes these functions when it is imported, so a type checker does not see them.
compute: Any = pyarrow.compute


@dataclasses.dataclass(frozen=True, kw_only=True)
class Filter:
    """What the rows of a list must fulfil. None and empty values allow everything."""

    is_kept: bool | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    stop_reasons: Sequence[str] = ()
    kinds: Sequence[str] = ()
    min_searches: int | None = None
    max_searches: int | None = None
    text: str = ""
    question_id: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Damage:
    """A file that the list leaves out, and the sentence that says why."""

    name: str
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class ListedRows:
    """The table of one or several sets, and the files that are not in it."""

    table: pyarrow.Table
    damages: tuple[Damage, ...]


class TrajectoryTables:
    """The tables of all sets that were asked for, kept in memory."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(READING_THREADS)
        # What was read of each shard, by run, name and state of the file.
        self._shards: dict[object, pyarrow.Table | Damage] = {}
        # The finished table of each set, by run and id, with the state of all its files.
        self._sets: dict[tuple[str, str], tuple[object, ListedRows]] = {}

    def rows(self, run: ViewedRun, sets: Sequence[TrajectorySet]) -> ListedRows:
        """Return the rows of these sets, one set after the other."""
        with self._lock:
            parts = [self._set_rows(run, trajectory_set) for trajectory_set in sets]
        damages = tuple(damage for part in parts for damage in part.damages)
        tables = [part.table for part in parts]
        table = pyarrow.concat_tables(tables) if tables else _empty_table()
        return ListedRows(table=table, damages=damages)

    def _set_rows(self, run: ViewedRun, trajectory_set: TrajectorySet) -> ListedRows:
        """Return the rows of one set, from memory if no file has changed."""
        shard_states = [run.shard_state(shard) for shard in trajectory_set.shards]
        further_files = (trajectory_set.questions_file, trajectory_set.kept_file)
        states = (*shard_states, *(run.state_of(name) for name in further_files if name))
        place = (run.name, trajectory_set.id)
        if place in self._sets and self._sets[place][0] == states:
            return self._sets[place][1]

        damages: list[Damage] = []
        if trajectory_set.fault:
            damages.append(Damage(name=trajectory_set.title, reason=trajectory_set.fault))
        tables = []
        read = self._pool.map(
            lambda pair: self._shard(run, *pair),
            zip(trajectory_set.shards, shard_states, strict=True),
        )
        for number, part in enumerate(read):
            if isinstance(part, Damage):
                damages.append(part)
            else:
                tables.append(_with_places(part, number))
        table = pyarrow.concat_tables(tables) if tables else _empty_places()
        try:
            table = _with_questions(table, run.questions(trajectory_set))
        except StoreError as error:
            damages.append(Damage(name=trajectory_set.questions_file, reason=str(error)))
            table = _with_questions(table, None)
        table = _with_kept(table, run, trajectory_set)
        set_column = pyarrow.repeat(trajectory_set.id, table.num_rows)
        table = table.append_column("set", set_column).combine_chunks()

        rows = ListedRows(table=table, damages=tuple(damages))
        self._sets[place] = (states, rows)
        return rows

    def _shard(self, run: ViewedRun, shard: ShardFile, state: object) -> pyarrow.Table | Damage:
        """Return the columns of a shard, or what is wrong with it."""
        key = (run.name, shard, state)
        if key not in self._shards:
            try:
                data = run.shard_bytes(shard)
                file = shards.open_file(data, shard.name)
                self._shards[key] = file.read(columns=list(SHARD_COLUMNS), use_threads=False)
            except (StoreError, pyarrow.ArrowException) as error:
                self._shards[key] = Damage(name=shard.name, reason=str(error))
        return self._shards[key]


def matching(table: pyarrow.Table, condition: Filter) -> pyarrow.Table:
    """Return the rows that fulfil the condition, in their order."""
    masks = [*_masks_of_values(table, condition), *_masks_of_ranges(table, condition)]
    if condition.text:
        masks.append(_mentions(table, condition.text))
    if not masks:
        return table
    mask = masks[0]
    for further in masks[1:]:
        mask = compute.and_kleene(mask, further)
    return table.filter(mask)


def _masks_of_values(table: pyarrow.Table, condition: Filter) -> list[pyarrow.ChunkedArray]:
    """Return a mask for each column whose value is chosen."""
    masks = []
    if condition.is_kept is not None:
        masks.append(compute.equal(table["kept"], condition.is_kept))
    if condition.question_id:
        masks.append(compute.equal(table["question_id"], condition.question_id))
    for column, values in (("stop_reason", condition.stop_reasons), ("kind", condition.kinds)):
        if values:
            value_set = pyarrow.array(list(values), pyarrow.string())
            masks.append(compute.is_in(table[column], value_set=value_set))
    return masks


def _masks_of_ranges(table: pyarrow.Table, condition: Filter) -> list[pyarrow.ChunkedArray]:
    """Return a mask for each bound of a number."""
    masks = []
    for column, minimum, maximum in (
        ("reward", condition.min_reward, condition.max_reward),
        ("search_count", condition.min_searches, condition.max_searches),
    ):
        if minimum is not None:
            masks.append(compute.greater_equal(table[column], minimum))
        if maximum is not None:
            masks.append(compute.less_equal(table[column], maximum))
    return masks


def page_of(
    table: pyarrow.Table, *, sort: str, descending: bool, offset: int, limit: int
) -> list[dict[str, Any]]:
    """Return some rows of the sorted table. An empty `sort` keeps the order of the shards."""
    if sort:
        order = "descending" if descending else "ascending"
        indices = compute.sort_indices(table, sort_keys=[(sort, order)])
        return table.take(indices.slice(offset, limit)).to_pylist()
    if descending:
        end = max(0, table.num_rows - offset)
        start = max(0, end - limit)
        return table.slice(start, end - start).to_pylist()[::-1]
    return table.slice(offset, limit).to_pylist()


def choices_of(table: pyarrow.Table) -> dict[str, Any]:
    """Return what a filter can choose from: values with their counts, and ranges of numbers."""
    ranges = {}
    for column in ("reward", "search_count"):
        bounds = compute.min_max(table[column]).as_py()
        ranges[column] = [bounds["min"], bounds["max"]]
    return {
        "stop_reasons": _counts(table["stop_reason"]),
        "kinds": _counts(table["kind"]),
        "kept": _counts(table["kept"]),
        **ranges,
    }


def _counts(column: pyarrow.ChunkedArray) -> list[dict[str, Any]]:
    """Return the values of a column with their counts, the most frequent value first."""
    counts = [entry for entry in column.value_counts().to_pylist() if entry["values"] is not None]
    ordered = sorted(counts, key=lambda entry: (-entry["counts"], str(entry["values"])))
    return [{"value": entry["values"], "count": entry["counts"]} for entry in ordered]


def _mentions(table: pyarrow.Table, text: str) -> pyarrow.ChunkedArray:
    """Return for each row whether the question, its id or the answer contains the text."""
    masks = []
    for column in ("question", "question_id", "answer"):
        # Many rows share a question, so each different value is looked at once.
        values = table[column].unique().drop_null()
        matches = values.filter(compute.match_substring(values, text, ignore_case=True))
        masks.append(compute.is_in(table[column], value_set=matches))
    return compute.or_kleene(compute.or_kleene(masks[0], masks[1]), masks[2])


def _with_places(table: pyarrow.Table, shard: int) -> pyarrow.Table:
    """Return the table with the place of each row: the number of the shard, and of the row in it.

    The shard's number counts the shards of the manifest.
    """
    rows = table.num_rows
    shard_column = pyarrow.repeat(pyarrow.scalar(shard, pyarrow.int32()), rows)
    row_column = pyarrow.array(range(rows), pyarrow.int32())
    return table.append_column("shard", shard_column).append_column("row", row_column)


def _with_questions(table: pyarrow.Table, questions: pyarrow.Table | None) -> pyarrow.Table:
    """Return the table with the text and the kind of each question, null where none is recorded."""
    nulls = pyarrow.nulls(table.num_rows, pyarrow.string())
    if questions is None or not questions.num_rows:
        return table.append_column("question", nulls).append_column("kind", nulls)
    places = compute.index_in(table["question_id"], value_set=questions["id"].combine_chunks())
    with_text = table.append_column("question", questions["question"].combine_chunks().take(places))
    return with_text.append_column("kind", questions["kind"].combine_chunks().take(places))


def _with_kept(table: pyarrow.Table, run: ViewedRun, place: TrajectorySet) -> pyarrow.Table:
    """Return the table with a column that says whether training kept a trajectory.

    It is null for an evaluation, and for a round whose run has not recorded it (yet).
    """
    names = _kept_names(run, place)
    if names is None:
        nulls = pyarrow.nulls(table.num_rows, pyarrow.bool_())
        return table.append_column("kept", nulls)
    attempts = table["attempt"].cast(pyarrow.string())
    keys = compute.binary_join_element_wise(table["question_id"], attempts, KEY_SEPARATOR)
    is_kept = compute.is_in(keys, value_set=pyarrow.array(names, pyarrow.string()))
    return table.append_column("kept", is_kept)


def _kept_names(run: ViewedRun, place: TrajectorySet) -> list[str] | None:
    """Return the combined keys of the kept trajectories, or None if they are not recorded."""
    if not place.kept_file or not run.store.exists(place.kept_file):
        return None
    try:
        content = json.loads(run.store.read(place.kept_file))
        return [f"{id}{KEY_SEPARATOR}{attempt}" for id, attempt in content["kept"]]
    except (ValueError, KeyError, TypeError):
        return None


def _empty_places() -> pyarrow.Table:
    """Return a table without rows, with the columns that shards and places have."""
    types = {**shards.SCALARS, "stop_reason": "string", "search_count": "int32"}
    columns = {name: getattr(pyarrow, types[name])() for name in SHARD_COLUMNS}
    columns |= {"shard": pyarrow.int32(), "row": pyarrow.int32()}
    return pyarrow.schema(columns).empty_table()


def _empty_table() -> pyarrow.Table:
    """Return a table without rows, with all columns of the list."""
    table = _with_questions(_empty_places(), None)
    table = table.append_column("kept", pyarrow.nulls(0, pyarrow.bool_()))
    return table.append_column("set", pyarrow.array([], pyarrow.string()))
