"""Passages on disk: an Arrow file that is mapped, not read, so that a corpus of any size costs the memory of what is
looked at.

A passage's position in the file is its position in every index made of it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import overload

from mujica_jax.errors import UserError
from mujica_jax.retrieval.manifest import again
from mujica_jax.retrieval.text.corpus import Passage

FILE = "passages.arrow"
BATCH_ROWS = 4096  # of every record batch but the last, so that a position says which batch it is in


class PassageFile(Sequence[Passage]):
    """The passages of one Arrow file. Reading one takes a few tens of microseconds."""

    def __init__(self, path: Path) -> None:
        import pyarrow

        try:
            self._reader = pyarrow.ipc.open_file(pyarrow.memory_map(str(path)))
        except (pyarrow.ArrowException, OSError) as error:
            raise UserError(
                f"{path} cannot be read as an Arrow file ({error}): it is damaged, so {again(path.parent)}"
            ) from error
        batches = self._reader.num_record_batches
        last = self._reader.get_batch(batches - 1).num_rows if batches else 0
        self._rows = max(0, batches - 1) * BATCH_ROWS + last

    def __len__(self) -> int:
        return self._rows

    @overload
    def __getitem__(self, position: int) -> Passage: ...
    @overload
    def __getitem__(self, position: slice) -> list[Passage]: ...
    def __getitem__(self, position: int | slice) -> Passage | list[Passage]:
        if isinstance(position, slice):
            return [self[row] for row in range(*position.indices(self._rows))]
        if not -self._rows <= position < self._rows:
            raise IndexError(f"passage {position} of {self._rows}")
        batch, row = divmod(position % self._rows, BATCH_ROWS)
        columns = self._reader.get_batch(batch)
        return Passage(**{name: columns.column(name)[row].as_py() for name in ("id", "title", "text")})

    def __iter__(self) -> Iterator[Passage]:
        for batch in range(self._reader.num_record_batches):
            for row in self._reader.get_batch(batch).to_pylist():
                yield Passage(**row)

    def titled(self, titles: Iterable[str]) -> list[Passage]:
        """The passages with one of these titles, in order."""
        import pyarrow.compute

        wanted = pyarrow.array(sorted(set(titles)), pyarrow.string())
        found: list[Passage] = []
        for number in range(self._reader.num_record_batches):
            batch = self._reader.get_batch(number)
            matches = pyarrow.compute.call_function(
                "is_in", [batch.column("title")], pyarrow.compute.SetLookupOptions(wanted)
            )
            kept = batch.filter(matches)
            found += [Passage(**row) for row in kept.to_pylist()]
        return found


def write_passages(passages: Iterable[Passage], path: Path, on_rows: Callable[[int], None] = lambda done: None) -> int:
    """How many were written. Holds one batch at a time."""
    import pyarrow

    schema = pyarrow.schema([(name, pyarrow.string()) for name in ("id", "title", "text")])
    rows, batch = 0, []
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_file(file, schema) as writer:

        def write() -> None:
            nonlocal rows, batch
            columns = [[getattr(passage, name) for passage in batch] for name in schema.names]
            writer.write_batch(pyarrow.record_batch(columns, schema=schema))
            rows, batch = rows + len(batch), []
            on_rows(rows)

        for passage in passages:
            batch.append(passage)
            if len(batch) == BATCH_ROWS:
                write()
        if batch:
            write()
    return rows
