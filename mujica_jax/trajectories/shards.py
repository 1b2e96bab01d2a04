"""Shards: trajectories as one Parquet file that proves by itself that it is whole. The run directory's `store.py` names
and keeps them.

One row a trajectory: scalars in plain columns, conversations and searches nested. The file's own key-value metadata
hold the schema version, the row count and the SHA-256 of all its bytes, taken while the digest's own place was filled
with zeros. So a shard needs no second file to be checked, and a damaged one is refused before a Parquet reader sees it.
"""

import hashlib
import itertools
import json
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from mujica_jax.errors import StoreError
from mujica_jax.records import Conversation, Search, StopReason, Trajectory, Turn

if TYPE_CHECKING:
    import pyarrow

SCHEMA_VERSION = "2"
DIGEST_MARK = b"sha256 of this file with zeros here: "
DIGEST_HOLE = b"0" * 64  # the hexadecimal digest takes its place
COMPRESSION = "zstd"
SCALARS = {  # columns that carry a field of Trajectory as it is, with their Arrow types
    "question_id": "string",
    "attempt": "int32",
    "policy_version": "int32",
    "seed": "int64",
    "answer": "string",
    "reward": "float64",
    "seconds": "float64",
}
MAPS = ("rewards_by_part", "counts")  # from names to numbers


def encode(trajectories: Sequence[Trajectory]) -> bytes:
    """A Parquet file. Log-probabilities are stored as float32, which is exact for those an engine made."""
    import pyarrow
    import pyarrow.parquet

    table = _table(trajectories)
    sink = pyarrow.BufferOutputStream()
    # Dictionaries would double the time and save nothing: tokens and log-probabilities are most of the bytes.
    with pyarrow.parquet.ParquetWriter(sink, table.schema, compression=COMPRESSION, use_dictionary=False) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata(
            {
                "schema_version": SCHEMA_VERSION,
                "rows": str(len(trajectories)),
                "file_check": (DIGEST_MARK + DIGEST_HOLE).decode(),
            }
        )
    data = sink.getvalue().to_pybytes()
    start = data.rindex(DIGEST_MARK) + len(DIGEST_MARK)
    digest = hashlib.sha256(data).hexdigest().encode()
    return data[:start] + digest + data[start + len(digest) :]


def decode(data: bytes, name: str) -> list[Trajectory]:
    """The trajectories of a file that `encode` made; StoreError, beginning with `name`, for anything else."""
    import pyarrow
    import pyarrow.parquet

    check_digest(data, name)
    file = pyarrow.parquet.ParquetFile(pyarrow.BufferReader(data))
    metadata = {key.decode(): value.decode() for key, value in (file.metadata.metadata or {}).items()}
    if metadata.get("schema_version") != SCHEMA_VERSION:
        found = metadata.get("schema_version")
        raise StoreError(
            f"{name} has schema version {found} and this program reads {SCHEMA_VERSION}; use the program that wrote it"
        )
    table = file.read()
    if metadata.get("rows") != str(table.num_rows):
        raise StoreError(
            f"{name} holds {table.num_rows} rows and its metadata say {metadata.get('rows')}; sample it again"
        )
    return _trajectories(table)


def check_digest(data: bytes, name: str) -> None:
    """Compares all bytes with the digest among them."""
    mark = data.rfind(DIGEST_MARK)
    start = mark + len(DIGEST_MARK)
    stop = start + len(DIGEST_HOLE)
    if mark < 0 or len(data) < stop:
        raise StoreError(f"{name} is no whole shard: its {len(data)} bytes hold no checksum; sample it again")
    expected = data[start:stop].decode("ascii", errors="replace")
    found = hashlib.sha256(data[:start] + DIGEST_HOLE + data[stop:]).hexdigest()
    if found != expected:
        raise StoreError(
            f"{name} is damaged: its bytes have SHA-256 {found} and should have {expected}; sample it again"
        )


def content_sha256(trajectories: Sequence[Trajectory]) -> str:
    """Digest of what was sampled: the same for two runs that sampled the same, however long each took."""
    digest = hashlib.sha256()
    for trajectory in trajectories:
        turns = [turn for conversation in trajectory.conversations for turn in conversation.turns]
        shape = [(conversation.role, len(conversation.turns)) for conversation in trajectory.conversations]
        scalars = {name: getattr(trajectory, name) for name in SCALARS if name != "seconds"}
        texts = [(turn.role, turn.text, turn.trained, len(turn.token_ids), turn.logprobs is None) for turn in turns]
        searches = [list(vars(search).values()) for search in trajectory.searches]
        maps = [sorted(getattr(trajectory, name).items()) for name in MAPS]
        digest.update(json.dumps([scalars, trajectory.stop_reason, maps, shape, texts, searches]).encode())
        for turn in turns:
            digest.update(array("i", turn.token_ids).tobytes())
            digest.update(array("f", turn.logprobs or ()).tobytes())
    return digest.hexdigest()


def _table(trajectories: Sequence[Trajectory]) -> "pyarrow.Table":
    """Built column by column: turning nested rows into Arrow takes five times as long."""
    import pyarrow as pa

    conversations = [conversation for trajectory in trajectories for conversation in trajectory.conversations]
    turns = [turn for conversation in conversations for turn in conversation.turns]
    searches = [search for trajectory in trajectories for search in trajectory.searches]
    turn_column = _structs(
        role=pa.array([turn.role for turn in turns], pa.string()),
        token_ids=_numbers([turn.token_ids for turn in turns], "i"),
        text=pa.array([turn.text for turn in turns], pa.string()),
        logprobs=_numbers([turn.logprobs for turn in turns], "f"),
        trained=pa.array([turn.trained for turn in turns], pa.bool_()),
    )
    conversation_column = _structs(
        role=pa.array([conversation.role for conversation in conversations], pa.string()),
        turns=_lists([len(conversation.turns) for conversation in conversations], turn_column),
    )
    search_column = _structs(
        iteration=pa.array([search.iteration for search in searches], pa.int32()),
        query=pa.array([search.query for search in searches], pa.string()),
        entity=pa.array([search.entity for search in searches], pa.string()),
        materials=pa.array([list(search.materials) for search in searches], pa.list_(pa.string())),
        selected=_numbers([search.selected for search in searches], "i"),
        sentence=pa.array([search.sentence for search in searches], pa.string()),
        found=pa.array([search.found for search in searches], pa.bool_()),
    )
    return pa.table(
        {
            **{name: pa.array([getattr(t, name) for t in trajectories], kind) for name, kind in SCALARS.items()},
            "stop_reason": pa.array([trajectory.stop_reason.value for trajectory in trajectories], pa.string()),
            "search_count": pa.array([len(trajectory.searches) for trajectory in trajectories], pa.int32()),
            **{
                name: pa.array(
                    [list(getattr(t, name).items()) for t in trajectories], pa.map_(pa.string(), pa.float64())
                )
                for name in MAPS
            },
            "conversations": _lists(
                [len(trajectory.conversations) for trajectory in trajectories], conversation_column
            ),
            "searches": _lists([len(trajectory.searches) for trajectory in trajectories], search_column),
        }
    )


def _structs(**columns: "pyarrow.Array") -> "pyarrow.StructArray":
    import pyarrow

    return pyarrow.StructArray.from_arrays(list(columns.values()), names=list(columns))


def _numbers(rows: Sequence[Sequence[int] | Sequence[float] | None], code: Literal["i", "f"]) -> "pyarrow.ListArray":
    """Lists of int32 ("i") or float32 ("f"); None stays null."""
    import numpy as np
    import pyarrow

    values = array(code)
    for row in rows:
        values.extend(row or ())  # pyright: ignore[reportArgumentType]
    flat = pyarrow.array(np.frombuffer(values, dtype=code))
    return _lists([len(row or ()) for row in rows], flat, [row is None for row in rows])


def _lists(
    lengths: Sequence[int], values: "pyarrow.Array", absent: Sequence[bool] | None = None
) -> "pyarrow.ListArray":
    """Cuts `values` into lists of these lengths."""
    import pyarrow as pa

    offsets = pa.array([0, *itertools.accumulate(lengths)], pa.int32())
    return pa.ListArray.from_arrays(offsets, values, mask=None if absent is None else pa.array(absent, pa.bool_()))


def _trajectories(table: "pyarrow.Table") -> list[Trajectory]:
    conversations, searches = _whole(table, "conversations"), _whole(table, "searches")
    roles, turns = conversations.values.field("role").to_pylist(), conversations.values.field("turns")
    by_turn = _cut(turns, _turns(turns.values))
    built = [Conversation(role=role, turns=members) for role, members in zip(roles, by_turn, strict=True)]
    rows = table.drop_columns(["conversations", "searches", "search_count"]).to_pylist()
    found = _cut(searches, [_search(value) for value in searches.values.to_pylist()])
    trajectories = []
    for row, own, asked in zip(rows, _cut(conversations, built), found, strict=True):
        row |= {"stop_reason": StopReason(row["stop_reason"])} | {name: dict(row[name]) for name in MAPS}
        trajectories.append(Trajectory(**row, conversations=own, searches=asked))
    return trajectories


def _turns(column: "pyarrow.StructArray") -> list[Turn]:
    tokens, logprobs = column.field("token_ids"), column.field("logprobs")
    fields = zip(
        column.field("role").to_pylist(),
        _cut(tokens, tokens.values.to_numpy().tolist()),
        column.field("text").to_pylist(),
        _cut(logprobs, logprobs.values.to_numpy().tolist()),
        logprobs.is_valid().to_pylist(),
        column.field("trained").to_pylist(),
        strict=True,
    )
    return [
        Turn(role=role, token_ids=token_ids, text=text, logprobs=values if sampled else None, trained=trained)
        for role, token_ids, text, values, sampled, trained in fields
    ]


def _search(value: dict[str, Any]) -> Search:
    return Search(**{**value, "materials": tuple(value["materials"]), "selected": tuple(value["selected"])})


def _cut(lists: "pyarrow.ListArray", values: list[Any]) -> list[tuple[Any, ...]]:
    """`values` in tuples as the list array has them; an empty tuple where it is null."""
    return [tuple(values[start:stop]) for start, stop in itertools.pairwise(lists.offsets.to_pylist())]


def _whole(table: "pyarrow.Table", name: str) -> "pyarrow.ListArray":
    column = table.column(name).combine_chunks()
    return column.chunk(0) if hasattr(column, "chunk") else column
