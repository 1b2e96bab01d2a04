"""A cache of search results on disk, in SQLite.

The same query is searched only once in one version of an index. If the cache cannot be read or
written, it is switched off for the rest of the process, with one line on the console. Searches then
take longer, but their results are the same.
"""

import logging
import sqlite3
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

# The largest size of a cache file. When it is reached, the older half of the rows is deleted. A
# result with twenty hits takes about 700 bytes.
MAX_BYTES = 2**30
# Results of longer queries are not stored.
MAX_QUERY_CHARACTERS = 2**14
# How long to wait for a lock that another process holds.
SECONDS_FOR_A_LOCK = 2.0
_log = logging.getLogger(__name__)


class SearchCache:
    """A map from (query, k) to the text of the answer, for one version of an index or a graph.

    It can be used from any thread. The file is `FOLDER/VERSION.sqlite`.
    """

    def __init__(self, folder: Path, version: str) -> None:
        self.path = folder / f"{version}.sqlite"
        self._lock = threading.Lock()
        self._database: sqlite3.Connection | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            database = sqlite3.connect(
                self.path, timeout=SECONDS_FOR_A_LOCK, check_same_thread=False
            )
            self._database = database
            # SQLite wants its connections closed. This one lasts as long as the cache.
            weakref.finalize(self, database.close)
            database.execute("PRAGMA journal_mode=WAL")
            # Do not wait for the disk. Rows lost in a power failure are searched again.
            database.execute("PRAGMA synchronous=OFF")
            columns = "query TEXT, k INTEGER, found TEXT, PRIMARY KEY (query, k)"
            database.execute(f"CREATE TABLE IF NOT EXISTS hits ({columns})")
            (page_bytes,) = database.execute("PRAGMA page_size").fetchone()
            database.execute(f"PRAGMA max_page_count={MAX_BYTES // page_bytes}")
        except (sqlite3.Error, OSError) as error:
            self._give_up(error)

    def read(self, query: str, k: int = 0) -> str | None:
        """Return the text of a stored answer, or None if there is none."""
        if len(query) > MAX_QUERY_CHARACTERS:
            return None
        with self._lock:
            if self._database is None:
                return None
            try:
                row = self._database.execute(
                    "SELECT found FROM hits WHERE query = ? AND k = ?", (query, k)
                ).fetchone()
                return None if row is None else row[0]
            except (sqlite3.Error, UnicodeEncodeError) as error:
                self._give_up(error)
                return None

    def write(self, rows: Sequence[tuple[str, int, str]]) -> None:
        """Store answers. A row holds the query, k, and the text of the answer."""
        cached_rows = [row for row in rows if len(row[0]) <= MAX_QUERY_CHARACTERS]
        with self._lock:
            if self._database is None or not cached_rows:
                return
            try:
                try:
                    _insert(self._database, cached_rows)
                except sqlite3.OperationalError as error:
                    if error.sqlite_errorcode != sqlite3.SQLITE_FULL:
                        raise
                    _delete_older_half(self._database)
                    _insert(self._database, cached_rows)
            except (sqlite3.Error, UnicodeEncodeError) as error:
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """Close the database for good, and log one warning."""
        _log.warning(
            "the search cache %s is switched off (%s): queries are searched again", self.path, error
        )
        if self._database is not None:
            self._database.close()
            self._database = None


def _insert(database: sqlite3.Connection, rows: Sequence[tuple[str, int, str]]) -> None:
    """Insert rows in one transaction."""
    with database:
        database.executemany("INSERT OR REPLACE INTO hits VALUES (?, ?, ?)", rows)


def _delete_older_half(database: sqlite3.Connection) -> None:
    """Delete the older half of the rows."""
    with database:
        oldest = "SELECT rowid FROM hits ORDER BY rowid LIMIT (SELECT (count(*) + 1) / 2 FROM hits)"
        database.execute(f"DELETE FROM hits WHERE rowid IN ({oldest})")
