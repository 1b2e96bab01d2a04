"""The routes of trajectories: the runs with their sets, the list, one trajectory, the attempts.

GET /api/runs
GET /api/runs/RUN/trajectories?set=round-1&reward_min=0.5&text=...&sort=reward&offset=0&limit=50
GET /api/runs/RUN/trajectories/SET/SHARD/ROW
"""

import dataclasses
from typing import Annotated, Any

import pyarrow
from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field

from mujica_jax.errors import StoreError, UserError, nearest
from mujica_jax.trajectories import shards
from mujica_jax.web.run_library import RunLibrary, UnknownNameError
from mujica_jax.web.trajectory_detail import detail, question_of
from mujica_jax.web.trajectory_table import (
    SORT_COLUMNS,
    Damage,
    Filter,
    TrajectoryTables,
    choices_of,
    matching,
    page_of,
)
from mujica_jax.web.viewed_run import TrajectorySet, ViewedRun

MAX_PAGE_ROWS = 500
MAX_TEXT_CHARACTERS = 1000


class ListQuery(BaseModel):
    """The query of a list: filters, order, page."""

    model_config = ConfigDict(extra="forbid")

    set: list[str] = Field(default=[], max_length=1000)
    is_kept: bool | None = Field(default=None, alias="kept")
    reward_min: float | None = None
    reward_max: float | None = None
    searches_min: int | None = Field(default=None, ge=0, lt=2**31)
    searches_max: int | None = Field(default=None, ge=0, lt=2**31)
    stop_reason: list[str] = Field(default=[], max_length=100)
    kind: list[str] = Field(default=[], max_length=1000)
    text: str = Field(default="", max_length=MAX_TEXT_CHARACTERS)
    question: str = Field(default="", max_length=MAX_TEXT_CHARACTERS)
    sort: str = ""
    descending: bool = False
    offset: int = Field(default=0, ge=0, lt=2**31)
    limit: int = Field(default=50, ge=1, le=MAX_PAGE_ROWS)

    def condition(self) -> Filter:
        """Return the filter of the query."""
        return Filter(
            is_kept=self.is_kept,
            min_reward=self.reward_min,
            max_reward=self.reward_max,
            stop_reasons=self.stop_reason,
            kinds=self.kind,
            min_searches=self.searches_min,
            max_searches=self.searches_max,
            text=self.text,
            question_id=self.question,
        )


def router(library: RunLibrary) -> APIRouter:
    """Return the routes of the trajectories of these runs."""
    routes = APIRouter(prefix="/api/runs")
    tables = TrajectoryTables()

    @routes.get("")
    def runs() -> dict[str, Any]:
        return {"runs": [_run_facts(run) for run in library.runs.values()]}

    @routes.get("/{run_name}/trajectories")
    def trajectories(run_name: str, query: Annotated[ListQuery, Query()]) -> dict[str, Any]:
        run = library.run(run_name)
        if query.sort and query.sort not in SORT_COLUMNS:
            raise UserError(f"unknown sort {query.sort!r}; {nearest(query.sort, SORT_COLUMNS)}")
        sets = list(run.sets().values())
        if query.set:
            sets = [library.set_of(run, set_id) for set_id in query.set]
        rows = tables.rows(run, sets)
        matches = matching(rows.table, query.condition())
        page = page_of(
            matches,
            sort=query.sort,
            descending=query.descending,
            offset=query.offset,
            limit=query.limit,
        )
        return {
            "all": rows.table.num_rows,
            "matching": matches.num_rows,
            "offset": query.offset,
            "rows": page,
            "choices": choices_of(rows.table),
            "damaged": [dataclasses.asdict(damage) for damage in rows.damages],
            "open_rounds": [dataclasses.asdict(entry) for entry in run.open_rounds()],
        }

    @routes.get("/{run_name}/trajectories/{set_id}/{shard}/{row}")
    def trajectory(run_name: str, set_id: str, shard: int, row: int) -> dict[str, Any]:
        run = library.run(run_name)
        return _one_trajectory(run, library.set_of(run, set_id), shard, row, tables)

    return routes


def _one_trajectory(
    run: ViewedRun, trajectory_set: TrajectorySet, shard: int, row: int, tables: TrajectoryTables
) -> dict[str, Any]:
    """Return the trajectory in one row of a shard. `shard` and `row` count from 0.

    Raises UnknownNameError if there is no such row, and StoreError if the shard is damaged.
    """
    if not 0 <= shard < len(trajectory_set.shards):
        raise UnknownNameError(
            f"{trajectory_set.id} of run {run.name} has {len(trajectory_set.shards)} shards, and no "
            f"shard {shard}; count from 0"
        )
    shard_file = trajectory_set.shards[shard]
    try:
        file = shards.open_file(run.shard_bytes(shard_file), shard_file.name)
    except pyarrow.ArrowException as error:
        raise StoreError(f"{shard_file.name} cannot be read ({error}); restore it") from error
    rows = file.metadata.num_rows
    if not 0 <= row < rows:
        raise UnknownNameError(
            f"shard {shard} of {trajectory_set.id} has {rows} trajectories, and no number {row}; count "
            "from 0"
        )
    record = shards.read_row(file, row)
    listed = tables.rows(run, [trajectory_set]).table
    attempts = matching(listed, Filter(question_id=record.question_id))
    marks = [
        entry["kept"]
        for entry in attempts.to_pylist()
        if entry["shard"] == shard and entry["row"] == row
    ]
    try:
        question = question_of(run.questions(trajectory_set), record.question_id)
        questions_damage = None
    except StoreError as error:
        question = None
        questions_damage = Damage(name=trajectory_set.questions_file, reason=str(error))
    return {
        "run": run.name,
        "set": trajectory_set.id,
        "set_title": trajectory_set.title,
        "shard": shard,
        "row": row,
        "kept": marks[0] if marks else None,
        "threshold": trajectory_set.threshold,
        "damaged": [dataclasses.asdict(questions_damage)] if questions_damage else [],
        **detail(record, question, run.tokenizer()),
    }


def _run_facts(run: ViewedRun) -> dict[str, Any]:
    """Return what the page shows of a run before anything is chosen."""
    sets = [
        {
            "id": trajectory_set.id,
            "title": trajectory_set.title,
            "kind": trajectory_set.kind,
            "threshold": trajectory_set.threshold,
            "fault": trajectory_set.fault,
        }
        for trajectory_set in run.sets().values()
    ]
    settings = run.settings
    return {
        "name": run.name,
        "directory": run.directory,
        "is_finished": run.is_finished,
        "task": settings.get("task", {}).get("kind"),
        "method": settings.get("method", {}).get("kind"),
        "agent": settings.get("agent", {}).get("kind"),
        "git_revision": run.config.get("git_revision"),
        "sets": sets,
        "open_rounds": [dataclasses.asdict(entry) for entry in run.open_rounds()],
    }
