"""Encoding of trajectories as shards: Parquet files that contain their own checksum.

`store.py` names the shards and keeps them in the run directory.

Each row is a trajectory. Scalars are plain columns, and conversations and searches are nested
columns. The key-value metadata of the file hold the schema version, the number of rows, and the
SHA-256 of all bytes of the file. This digest was computed while its own place in the file was
filled with zeros. A shard can therefore be checked without a second file, and a damaged shard is
rejected before a Parquet reader opens it.
"""

import hashlib
import json
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mujica_jax.errors import StoreError
from mujica_jax.records import Conversation, Search, StopReason, Trajectory, Turn

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet

SCHEMA_VERSION = "3"
# Files of version 2 do not record which turns a length limit cut.
READ_VERSIONS = ("2", SCHEMA_VERSION)
DIGEST_MARK = b"sha256 of this file with zeros here: "
# The zeros that the hexadecimal digest replaces.
DIGEST_HOLE = b"0" * 64
COMPRESSION = "zstd"
# Columns that hold a field of `Trajectory` unchanged, with their Arrow types.
SCALARS = {
    "question_id": "string",
    "attempt": "int32",
    "policy_version": "int32",
    "seed": "int64",
    "answer": "string",
    "reward": "float64",
    "seconds": "float64",
}
# Columns that map names to numbers.
MAPS = ("rewards_by_part", "counts")


def encode(trajectories: Sequence[Trajectory]) -> bytes:
    """Return the bytes of a Parquet file with these trajectories.

    Log-probabilities are stored as float32. This is exact, because engines compute them in float32.
    """
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist([_row(trajectory) for trajectory in trajectories], _schema())
    sink = pyarrow.BufferOutputStream()
    # Tokens and log-probabilities take most of the bytes. Parquet's dictionary encoding would not
    # make them smaller and would double the time.
    with pyarrow.parquet.ParquetWriter(
        sink, table.schema, compression=COMPRESSION, use_dictionary=False
    ) as writer:
        writer.write_table(table)
        metadata = {
            "schema_version": SCHEMA_VERSION,
            "rows": str(len(trajectories)),
            "file_check": (DIGEST_MARK + DIGEST_HOLE).decode(),
        }
        writer.add_key_value_metadata(metadata)

    # Put the digest in the place of the zeros with which it was computed.
    data = sink.getvalue().to_pybytes()
    start = data.rindex(DIGEST_MARK) + len(DIGEST_MARK)
    digest = hashlib.sha256(data).hexdigest().encode()
    return data[:start] + digest + data[start + len(digest) :]


def decode(data: bytes, name: str) -> list[Trajectory]:
    """Return the trajectories of a file that `encode` made. For `name` and errors see `read_table`."""
    return _trajectories(read_table(data, name))


def read_table(data: bytes, name: str) -> "pyarrow.Table":
    """Return the table in a file that `encode` made, after a check of its digest.

    Raises StoreError if the file is damaged or has another schema version. The message begins with
    `name`.
    """
    check_digest(data, name)
    return open_file(data, name).read()


def open_file(data: bytes, name: str) -> "pyarrow.parquet.ParquetFile":
    """Open the bytes of a shard, so that single columns can be read.

    The caller has checked the bytes against a checksum. Raises StoreError if the file has another
    schema version, or another number of rows than its metadata say.
    """
    import pyarrow
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(pyarrow.BufferReader(data))
    metadata: dict[str, str] = {}
    for key, value in (file.metadata.metadata or {}).items():
        metadata[key.decode()] = value.decode()
    version = metadata.get("schema_version")
    if version not in READ_VERSIONS:
        raise StoreError(
            f"{name} has schema version {version}, but this program reads "
            f"{' and '.join(READ_VERSIONS)}; read it with the release that wrote it"
        )
    rows = file.metadata.num_rows
    if metadata.get("rows") != str(rows):
        raise StoreError(
            f"{name} has {rows} rows, but its metadata say {metadata.get('rows')}; sample it again"
        )
    return file


def read_row(file: "pyarrow.parquet.ParquetFile", row: int) -> Trajectory:
    """Return the trajectory in one row of an opened shard. `row` counts from 0."""
    (trajectory,) = _trajectories(file.read().slice(row, 1))
    return trajectory


def check_digest(data: bytes, name: str) -> None:
    """Check the bytes of a shard against the digest that they contain.

    Raises StoreError if the digest is missing or does not match.
    """
    mark = data.rfind(DIGEST_MARK)
    start = mark + len(DIGEST_MARK)
    stop = start + len(DIGEST_HOLE)
    if mark < 0 or len(data) < stop:
        raise StoreError(
            f"{name} is not a complete shard: its {len(data)} bytes contain no checksum; sample it "
            "again"
        )
    expected = data[start:stop].decode("ascii", errors="replace")
    digest = hashlib.sha256(data[:start] + DIGEST_HOLE + data[stop:]).hexdigest()
    if digest != expected:
        raise StoreError(
            f"{name} is damaged: its bytes have SHA-256 {digest}, but should have {expected}; "
            "sample it again"
        )


def content_sha256(trajectories: Sequence[Trajectory]) -> str:
    """Return the digest of the sampled content. It does not cover the durations of the episodes."""
    digest = hashlib.sha256()
    for trajectory in trajectories:
        turns = [turn for conversation in trajectory.conversations for turn in conversation.turns]
        shape = [
            (conversation.role, len(conversation.turns))
            for conversation in trajectory.conversations
        ]
        scalars = {name: getattr(trajectory, name) for name in SCALARS if name != "seconds"}
        texts = [_turn_content(turn) for turn in turns]
        searches = [list(vars(search).values()) for search in trajectory.searches]
        maps = [sorted(getattr(trajectory, name).items()) for name in MAPS]
        content = [scalars, trajectory.stop_reason, maps, shape, texts, searches]
        digest.update(json.dumps(content).encode())
        for turn in turns:
            digest.update(array("i", turn.token_ids).tobytes())
            digest.update(array("f", turn.logprobs or ()).tobytes())
    return digest.hexdigest()


def _turn_content(turn: Turn) -> tuple[str | bool | int, ...]:
    """Return the values of a turn that the digest covers, besides tokens and log-probabilities.

    The digest of a turn without a cut is the same as in earlier versions.
    """
    content = (turn.role, turn.text, turn.trained, len(turn.token_ids), turn.logprobs is None)
    return (*content, "cut") if turn.cut else content


def _schema() -> "pyarrow.Schema":
    """Return the Arrow schema of a shard."""
    import pyarrow as pa

    turn = {
        "role": pa.string(),
        "token_ids": pa.list_(pa.int32()),
        "text": pa.string(),
        "logprobs": pa.list_(pa.float32()),
        "trained": pa.bool_(),
        "cut": pa.bool_(),
    }
    search = {
        "iteration": pa.int32(),
        "query": pa.string(),
        "entity": pa.string(),
        "materials": pa.list_(pa.string()),
        "selected": pa.list_(pa.int32()),
        "sentence": pa.string(),
        "found": pa.bool_(),
    }
    conversation = {"role": pa.string(), "turns": pa.list_(pa.struct(turn))}

    # The columns in the order in which they are in the file.
    columns = {name: getattr(pa, kind)() for name, kind in SCALARS.items()}
    columns["stop_reason"] = pa.string()
    columns["search_count"] = pa.int32()
    for name in MAPS:
        columns[name] = pa.map_(pa.string(), pa.float64())
    columns["conversations"] = pa.list_(pa.struct(conversation))
    columns["searches"] = pa.list_(pa.struct(search))
    return pa.schema(columns)


def _row(trajectory: Trajectory) -> dict[str, Any]:
    """Return a trajectory as a row of the table."""
    conversations = []
    for conversation in trajectory.conversations:
        turns = [vars(turn) for turn in conversation.turns]
        conversations.append({"role": conversation.role, "turns": turns})
    row = dict(vars(trajectory))
    for name in MAPS:
        row[name] = list(getattr(trajectory, name).items())
    row["stop_reason"] = trajectory.stop_reason.value
    row["search_count"] = len(trajectory.searches)
    row["conversations"] = conversations
    row["searches"] = [vars(search) for search in trajectory.searches]
    return row


def _trajectories(table: "pyarrow.Table") -> list[Trajectory]:
    """Return the trajectories of a table.

    Nested columns are converted to NumPy arrays. Arrow's `to_pylist` would make a Python object of
    each number and is five times slower.
    """
    rows = table.drop_columns(["conversations", "searches", "search_count"]).to_pylist()
    conversation_column = table.column("conversations").to_numpy()
    search_column = table.column("searches").to_numpy()

    trajectories = []
    for row, conversations, searches in zip(rows, conversation_column, search_column, strict=True):
        for name in MAPS:
            row[name] = dict(row[name])
        row["stop_reason"] = StopReason(row["stop_reason"])
        row["conversations"] = tuple(_conversation(fields) for fields in conversations)
        row["searches"] = tuple(Search(**_with_tuples(fields)) for fields in searches)
        trajectories.append(Trajectory(**row))
    return trajectories


def _conversation(fields: dict[str, Any]) -> Conversation:
    """Return the conversation that a nested value of the table holds."""
    turns = tuple(Turn(**_with_tuples(turn)) for turn in fields["turns"])
    return Conversation(role=fields["role"], turns=turns)


def _with_tuples(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a record with tuples in place of NumPy arrays."""
    return {
        name: tuple(value.tolist()) if hasattr(value, "tolist") else value
        for name, value in fields.items()
    }
