"""Write the report of runs as one HTML file.

    python -m mujica_jax.report RUN [RUN ...] --out report.html

The file needs no server and no other file. The program needs no model and does not start JAX.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mujica_jax.config.program_help import program_name
from mujica_jax.errors import UserError
from mujica_jax.storage.local import as_user_error, atomic_write

DEFAULT_OUT = "report.html"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit status: 0, or 2 for a mistake of the user."""
    options = _parser().parse_args(arguments)
    try:
        _write(options.runs, Path(options.out))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _write(runs: Sequence[str], out: Path) -> None:
    """Write the report of the runs to a file, and say where it is."""
    # This import takes a second. It comes late so that wrong arguments are reported fast.
    from mujica_jax.web.report_file import report_file

    if out.is_dir():
        raise UserError(f"--out {out} is a directory; give the name of a file, such as report.html")
    text = report_file(runs)
    with as_user_error(out):
        atomic_write(out, text.encode())
    print(f"report: {out}", flush=True)


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog=program_name("report"), description="Write the report of runs as one HTML file."
    )
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="a run directory, on local disk or gs://BUCKET/NAME"
    )
    parser.add_argument(
        "--out",
        default=DEFAULT_OUT,
        metavar="FILE",
        help=f"file to write; an older one is replaced (default: {DEFAULT_OUT})",
    )
    return parser
