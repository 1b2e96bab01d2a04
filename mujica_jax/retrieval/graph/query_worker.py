"""A process that answers SPARQL queries from a graph on disk, one at a time: what `graph_readers.py` starts.

    python -m mujica_jax.retrieval.graph.query_worker STORE DEADLINE_SECONDS

A query comes on standard input and its answer goes to standard output, each behind its length in four bytes, before which a byte says of an
answer what it is (ANSWERED, REFUSED, FAILED). A query that takes longer than the deadline, more memory than MOST_BYTES or more stack
than there is ends the process.
"""

import contextlib
import io
import resource
import signal
import struct
import sys
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from pyoxigraph import Store
    from typing_extensions import Buffer

LARGEST_ANSWER_BYTES = 16 * 2**20
MOST_BYTES = 4 * 2**30  # of memory that is no file's
LIMITS = {resource.RLIMIT_DATA: MOST_BYTES, resource.RLIMIT_STACK: 8 * 2**20, resource.RLIMIT_CORE: 0}
TOO_LITTLE = f"the query needs more than {MOST_BYTES / 2**30:g} GiB of memory or is nested too deep: ask for less at once".encode()
ANSWERED, REFUSED, FAILED = b"a", b"r", b"f"
LENGTH, HEADER = struct.Struct(">I"), struct.Struct(">cI")  # of a query; of an answer


class _Bounded(io.BytesIO):
    """What a query found, as long as it is not too much."""

    def write(self, part: "Buffer") -> int:
        if self.tell() + memoryview(part).nbytes > LARGEST_ANSWER_BYTES:
            raise _TooLarge
        return super().write(part)


class _TooLarge(Exception):
    pass


def answered(store: "Store", query: str) -> tuple[bytes, bytes]:
    """What it is, and SPARQL 1.1 results in JSON or a sentence."""
    from pyoxigraph import QueryBoolean, QueryResultsFormat, QuerySolutions

    found = _Bounded()
    try:
        results = store.query(query)
        if not isinstance(results, QuerySolutions | QueryBoolean):
            return REFUSED, b"the query constructs triples: ask with SELECT or ASK"
        results.serialize(found, QueryResultsFormat.JSON)
    except SyntaxError as error:
        return REFUSED, f"the query is no SPARQL ({' '.join(str(error).split())})".encode()
    except _TooLarge:
        return REFUSED, f"the answer has more than {LARGEST_ANSWER_BYTES:,} bytes: ask with LIMIT".encode()
    except MemoryError:
        return REFUSED, TOO_LITTLE
    except (OSError, RuntimeError) as error:
        return FAILED, f"the graph failed ({error})".encode(errors="replace")
    return ANSWERED, found.getvalue()


def answer_all(store: "Store", deadline_seconds: float, queries: BinaryIO, answers: BinaryIO) -> None:
    while len(length := queries.read(LENGTH.size)) == LENGTH.size:
        query = queries.read(LENGTH.unpack(length)[0]).decode()
        # SIGALRM ends the process wherever it is: whoever asked is told of the deadline, or is there no more.
        signal.setitimer(signal.ITIMER_REAL, deadline_seconds)
        kind, content = answered(store, query)
        signal.setitimer(signal.ITIMER_REAL, 0)
        answers.write(HEADER.pack(kind, len(content)) + content)
        answers.flush()


def main() -> None:
    from pyoxigraph import Store

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal; the service ends its readers
    for limit, most in LIMITS.items():
        allowed = resource.getrlimit(limit)[1]
        most = most if allowed == resource.RLIM_INFINITY else min(most, allowed)
        resource.setrlimit(limit, (most, allowed))
    with contextlib.suppress(BrokenPipeError):  # the service has ended
        answer_all(Store.read_only(sys.argv[1]), float(sys.argv[2]), sys.stdin.buffer, sys.stdout.buffer)


if __name__ == "__main__":
    main()
