"""Look at the trajectories and the curves of runs in a browser.

    python -m mujica_jax.view RUN [RUN ...] [--port 8700] [--host 127.0.0.1]

The program needs no model and does not start JAX. It only reads the run directories. It serves one
page, with the address that it prints, until Ctrl-C.
"""

import argparse
import contextlib
import sys
from collections.abc import Sequence

from mujica_jax.config.program_help import program_name
from mujica_jax.errors import UserError

DEFAULT_PORT = 8700
LOOPBACK = "127.0.0.1"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit status: 0, or 2 for a mistake of the user."""
    options = _parser().parse_args(arguments)
    try:
        _serve(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _serve(options: argparse.Namespace) -> None:
    """Serve the runs until SIGTERM or SIGINT."""
    # These imports take a second. They come late so that mistakes are reported fast.
    from mujica_jax.retrieval.service import address_of, open_port, serve_until_told
    from mujica_jax.web.app import LOOPBACK_HOSTS, create_app

    # A page on another site can reach this port under a name of its own. The names of this machine
    # are therefore the only ones that are answered, unless the user opened the port to others.
    hosts = LOOPBACK_HOSTS if options.host == LOOPBACK else ("*",)
    app = create_app(options.runs, allowed_hosts=hosts)

    server_socket = open_port(options.host, options.port)
    with contextlib.closing(server_socket):
        count = "1 run" if len(options.runs) == 1 else f"{len(options.runs)} runs"
        announcement = f"showing {count} at {address_of(server_socket)} (Ctrl-C ends the program)"
        serve_until_told(app, server_socket, announcement)


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog=program_name("view"),
        description="Look at the trajectories and the curves of runs in a browser.",
    )
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="a run directory, on local disk or gs://BUCKET/NAME"
    )
    parser.add_argument(
        "--port",
        type=int,
        default=DEFAULT_PORT,
        help=f"port to listen on; 0 takes any free one (default: {DEFAULT_PORT})",
    )
    parser.add_argument(
        "--host",
        default=LOOPBACK,
        help="address to listen on; 0.0.0.0 lets other machines read the runs (default: "
        f"{LOOPBACK})",
    )
    return parser
