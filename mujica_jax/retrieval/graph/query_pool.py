"""Processes that read one graph, so that nothing a query does can hold up, swell or end the service that it came to.

pyoxigraph cannot stop a query, and one that is nested deep enough ends its process. A reader (`graph_reader.py`) that is late, or at work
when the service ends, is killed, and the next query starts another one.
"""

import asyncio
import os
import signal
import sys
from pathlib import Path

from mujica_jax.retrieval.errors import RetrieverRefused, RetrieverUnavailable
from mujica_jax.retrieval.graph.query_worker import ANSWERED, HEADER, LENGTH, REFUSED, TOO_LITTLE

WAITING_FOR_THE_DISK = 4  # readers, while the others have the processors
MODULE = "mujica_jax.retrieval.graph.query_worker"
ITS_OWN_FAULT = {
    -signal.SIGSEGV,
    -signal.SIGABRT,
    -signal.SIGBUS,
    -signal.SIGILL,
}  # of the query: stack or memory was not enough


class GraphReaders:
    """Processes that are started as they are needed, some more than the host has processors. Use from one event loop."""

    def __init__(self, store: Path, *, deadline_seconds: float) -> None:
        self._command = (sys.executable, "-m", MODULE, str(store), str(deadline_seconds))
        self._places = asyncio.Semaphore((os.cpu_count() or 1) + WAITING_FOR_THE_DISK)
        self._idle: list[asyncio.subprocess.Process] = []

    async def answer(self, query: str) -> bytes:
        """SPARQL 1.1 results in JSON. Raises RetrieverRefused and RetrieverUnavailable. Cancelled, it ends the query."""
        async with self._places:
            reader = await self._reader()
            try:
                kind, content = await _asked(reader, query.encode())
            except (asyncio.IncompleteReadError, ConnectionError) as error:
                status = await reader.wait()
                if status in ITS_OWN_FAULT:
                    raise RetrieverRefused(TOO_LITTLE.decode()) from error
                raise RetrieverUnavailable(f"the graph's reader ended with status {status}: ask again") from error
            except BaseException:
                await _killed(reader)
                raise
            self._idle.append(reader)
        if kind == ANSWERED:
            return content
        raise (RetrieverRefused if kind == REFUSED else RetrieverUnavailable)(content.decode())

    async def close(self) -> None:
        while self._idle:
            await _killed(self._idle.pop())

    async def _reader(self) -> asyncio.subprocess.Process:
        while self._idle:
            if (reader := self._idle.pop()).returncode is None:
                return reader
        # The package is found where this process found it; a reader hears of no Ctrl-C at the terminal before it can ignore it.
        package = str(Path(__file__).resolve().parents[3])
        path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
        return await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": path},
            start_new_session=True,
        )


async def _asked(reader: asyncio.subprocess.Process, query: bytes) -> tuple[bytes, bytes]:
    assert reader.stdin is not None and reader.stdout is not None
    reader.stdin.write(LENGTH.pack(len(query)) + query)
    await reader.stdin.drain()
    kind, length = HEADER.unpack(await reader.stdout.readexactly(HEADER.size))
    return kind, await reader.stdout.readexactly(length)


async def _killed(reader: asyncio.subprocess.Process) -> None:
    if reader.returncode is None:
        reader.kill()
    await reader.wait()
