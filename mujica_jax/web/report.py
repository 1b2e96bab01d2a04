"""The routes of the run report: curves, the closing table, times, settings and warnings.

GET /api/report?run=first&run=second

The page asks again while a run is under way. An answer has an ETag, and nothing is sent if nothing
has changed.
"""

import hashlib
import json
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from mujica_jax.web.report_data import ReportReader, setting_differences
from mujica_jax.web.run_library import RunLibrary


def router(library: RunLibrary) -> APIRouter:
    """Return the routes of the reports of these runs."""
    routes = APIRouter(prefix="/api/report")
    readers: dict[str, ReportReader] = {}

    def reader_of(name: str) -> ReportReader:
        run = library.run(name)
        return readers.setdefault(name, ReportReader(run))

    @routes.get("")
    def report(request: Request, run: Annotated[list[str], Query(min_length=1)]) -> Response:
        names = list(dict.fromkeys(run))
        content = report_of([reader_of(name) for name in names])
        body = json.dumps(content, allow_nan=False).encode()
        tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers={"ETag": tag})
        return Response(body, media_type="application/json", headers={"ETag": tag})

    return routes


def report_of(readers: list[ReportReader]) -> dict[str, Any]:
    """Return the report of several runs, with the settings in which they differ."""
    reports = [reader.read() for reader in readers]
    settings = {reader.run.name: reader.run.settings for reader in readers}
    return {"runs": reports, "differences": setting_differences(settings)}
