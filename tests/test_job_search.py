"""Rows of an index shared out over the processes of a job: each finds what one process with all
rows finds."""

import json
import os
import subprocess
import sys
from pathlib import Path

from patience import HANG_SECONDS
from whole_runs import free_port

ROOT = Path(__file__).resolve().parent.parent
PROCESSES = 3


def test_each_process_of_a_job_finds_the_best_of_all_rows():
    port = free_port()
    command = [
        sys.executable,
        str(ROOT / "tests" / "search_of_a_job.py"),
        str(port),
        str(PROCESSES),
    ]
    job = [
        subprocess.Popen(
            [*command, str(process)],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(PROCESSES)
    ]
    said = []
    try:
        for process in job:
            output, messages = process.communicate(timeout=HANG_SECONDS)
            assert process.returncode == 0, messages
            said.append(json.loads(output.splitlines()[-1]))
    finally:
        for process in job:
            process.kill()
            process.communicate()
    assert [of["rows_here"] for of in said] == [667, 668, 668]
    assert max(of["largest_difference"] for of in said) < 1e-4
    assert {of["stranger"] for of in said} == {"AuthenticationError"}
    few = "task.index_rows is job and the index has 1 rows for 3 processes: set it to host"
    assert [of["too_few"] for of in said] == [few] * PROCESSES
