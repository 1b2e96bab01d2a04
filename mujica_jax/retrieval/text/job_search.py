"""Exact search where each process of a job holds a share of the rows on its own devices: a corpus
that no host could hold alone.

A search asks every process for the best of its share and merges what comes. The processes search
when their episodes do, so that no program can span them: queries and results go over TCP. A caller
proves that it has the job's secret, which came through the job's own store, before a byte of it is
read as a query; who reads that store, at the coordinator's port, knows it.
"""

import contextlib
import itertools
import secrets
import struct
import threading
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import (
    Client,
    Connection,
    Listener,
    answer_challenge,
    deliver_challenge,
)

import numpy as np

from mujica_jax.errors import UserError
from mujica_jax.retrieval.text.exact import ExactSearch
from mujica_jax.retrieval.text.vectors import Embeddings
from mujica_jax.runtime import distributed

HEADER = struct.Struct("<II")  # number of queries, and k
ANSWER_SECONDS = 60.0  # for the best of a share
CALLER_SECONDS = 10.0  # for the proof: one that connects and says nothing is none of the job


class JobSearch:
    """Implements `VectorSearch`; made by all processes of a job at the same place of their
    program."""

    def __init__(self, embeddings: Embeddings, recall_target: float | None = None) -> None:
        processes, self.rows = distributed.processes(), len(embeddings)
        if self.rows < processes:
            raise UserError(
                f"task.index_rows is job and the index has {self.rows} rows for {processes} "
                "processes: set it to host"
            )
        bounds = [self.rows * number // processes for number in range(processes + 1)]
        shares = [slice(*pair) for pair in itertools.pairwise(bounds)]
        self._share = shares[distributed.process()]
        scales = None if embeddings.scales is None else embeddings.scales[self._share]
        self._own = ExactSearch(
            Embeddings(embeddings.vectors[self._share], scales), recall_target=recall_target
        )
        self._dimension = embeddings.dimension
        self._connections: dict[int, Connection] = {}
        self._searching, self._on_devices = threading.Lock(), threading.Lock()
        self._secret = distributed.broadcast(
            "the secret of searches", lambda: secrets.token_hex(32)
        ).encode()
        listener = Listener((distributed.address(), 0), backlog=processes)
        threading.Thread(
            target=self._listen, args=(listener,), name="searches", daemon=True
        ).start()
        addresses = distributed.exchange("where searches are answered", listener.address)
        self._others = {
            number: (tuple(address), shares[number])
            for number, address in enumerate(addresses)
            if number != distributed.process()
        }
        for number, (address, _) in self._others.items():
            try:
                with self._naming(number):
                    self._connection(number)
            except OSError as error:
                raise UserError(
                    f"process {distributed.process()} on {distributed.host()} cannot search with "
                    f"process {number} at {address[0]}:{address[1]} ({error.__cause__}): let the "
                    "hosts reach each other's free ports by the addresses that their names stand "
                    "for, or set task.index_rows to host"
                ) from error

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Scores and positions of the k best rows of all shares, best first, ties in the order of
        the corpus. Raises OSError where a process does not answer.
        """
        assert 1 <= k <= self.rows, f"k is {k} of {self.rows} rows"
        queries = np.ascontiguousarray(queries, np.float32)
        with self._searching:
            try:
                found = self._best_of_all(queries, k)
            except BaseException:
                # an answer that was not read would be taken for that to the next search
                for connection in self._connections.values():
                    connection.close()
                self._connections.clear()
                raise
        # in the order of the shares: of equal scores the first position wins
        scores, positions = (
            np.concatenate([found[number][of] for number in sorted(found)], axis=1) for of in (0, 1)
        )
        best = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        return np.take_along_axis(scores, best, axis=1), np.take_along_axis(positions, best, axis=1)

    def _best_of_all(self, queries: np.ndarray, k: int) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """By process; all are asked before any answer is waited for."""
        found = {}
        for number in self._others:
            with self._naming(number):
                self._connection(number).send_bytes(
                    HEADER.pack(len(queries), k) + queries.tobytes()
                )
        found[distributed.process()] = self._best_of_share(queries, k)
        for number, (_, share) in self._others.items():
            with self._naming(number):
                if not self._connection(number).poll(ANSWER_SECONDS):
                    raise TimeoutError(f"no answer within {ANSWER_SECONDS:g} s")
                answer = np.frombuffer(self._connection(number).recv_bytes(), np.float32)
                scores, positions = answer.reshape(
                    2, len(queries), min(k, share.stop - share.start)
                )
            found[number] = scores, positions.view(np.int32)
        return found

    def _best_of_share(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        # programs of several devices, begun by several threads, could wait for each other
        with self._on_devices:
            scores, positions = self._own.search(queries, min(k, self._own.rows))
        return scores, positions + np.int32(self._share.start)

    def _connection(self, number: int) -> Connection:
        if number not in self._connections:
            self._connections[number] = Client(self._others[number][0], authkey=self._secret)
        return self._connections[number]

    @contextlib.contextmanager
    def _naming(self, number: int):
        """An error says which process it was."""
        try:
            yield
        except (OSError, EOFError, AuthenticationError, ValueError) as error:
            raise OSError(
                f"process {number} of the job does not answer searches: {error!r}"
            ) from error

    def _listen(self, listener: Listener) -> None:
        while True:
            try:
                connection = listener.accept()
            except OSError:  # as many files are open as may be
                time.sleep(1.0)
                continue
            threading.Thread(
                target=self._answer, args=(connection,), name="search", daemon=True
            ).start()

    def _answer(self, connection: Connection) -> None:
        """Until the caller leaves; one that is none of the job's hears nothing."""
        with contextlib.suppress(OSError, EOFError, AuthenticationError), connection:
            silent = threading.Timer(CALLER_SECONDS, connection.close)
            silent.daemon = True
            silent.start()
            deliver_challenge(connection, self._secret)
            answer_challenge(connection, self._secret)
            silent.cancel()
            while True:
                asked = connection.recv_bytes()
                count, k = HEADER.unpack_from(asked)
                queries = np.frombuffer(asked, np.float32, offset=HEADER.size).reshape(
                    count, self._dimension
                )
                scores, positions = self._best_of_share(queries, k)
                connection.send_bytes(scores.tobytes() + positions.astype(np.int32).tobytes())
