"""Shards: trajectories as one Parquet file that proves by itself that it is whole. The run
directory's `store.py` names and keeps them.

One row a trajectory: scalars in plain columns, conversations and searches nested. The file's own
key-value metadata hold the schema version, the row count and the SHA-256 of all its bytes, taken
while the digest's own place was filled with zeros. So a shard needs no second file to be checked,
and a damaged one is refused before a Parquet reader sees it.
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

SCHEMA_VERSION = "3"
READ_VERSIONS = (
    "2",
    SCHEMA_VERSION,
)  # a file of version 2 does not say which turns a length limit cut
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
    """A Parquet file. Log-probabilities are stored as float32, which is exact for those an engine
    made."""
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist([_row(trajectory) for trajectory in trajectories], _schema())
    sink = pyarrow.BufferOutputStream()
    # Dictionaries would double the time and save nothing: tokens and log-probabilities are most of
    # the bytes.
    with pyarrow.parquet.ParquetWriter(
        sink, table.schema, compression=COMPRESSION, use_dictionary=False
    ) as writer:
        writer.write_table(table)
        check = (DIGEST_MARK + DIGEST_HOLE).decode()
        about = {
            "schema_version": SCHEMA_VERSION,
            "rows": str(len(trajectories)),
            "file_check": check,
        }
        writer.add_key_value_metadata(about)
    data = sink.getvalue().to_pybytes()
    start = data.rindex(DIGEST_MARK) + len(DIGEST_MARK)
    digest = hashlib.sha256(data).hexdigest().encode()
    return data[:start] + digest + data[start + len(digest) :]


def decode(data: bytes, name: str) -> list[Trajectory]:
    """The trajectories of a file that `encode` made; StoreError, beginning with `name`, for
    anything else."""
    import pyarrow
    import pyarrow.parquet

    check_digest(data, name)
    file = pyarrow.parquet.ParquetFile(pyarrow.BufferReader(data))
    metadata = {
        key.decode(): value.decode() for key, value in (file.metadata.metadata or {}).items()
    }
    if metadata.get("schema_version") not in READ_VERSIONS:
        found = metadata.get("schema_version")
        raise StoreError(
            f"{name} has schema version {found} and this program reads "
            f"{' and '.join(READ_VERSIONS)}; use the program that wrote it"
        )
    table = file.read()
    if metadata.get("rows") != str(table.num_rows):
        raise StoreError(
            f"{name} holds {table.num_rows} rows and its metadata say {metadata.get('rows')}; "
            "sample it again"
        )
    return _trajectories(table)


def check_digest(data: bytes, name: str) -> None:
    """Compares all bytes with the digest among them."""
    mark = data.rfind(DIGEST_MARK)
    start = mark + len(DIGEST_MARK)
    stop = start + len(DIGEST_HOLE)
    if mark < 0 or len(data) < stop:
        raise StoreError(
            f"{name} is no whole shard: its {len(data)} bytes hold no checksum; sample it again"
        )
    expected = data[start:stop].decode("ascii", errors="replace")
    found = hashlib.sha256(data[:start] + DIGEST_HOLE + data[stop:]).hexdigest()
    if found != expected:
        raise StoreError(
            f"{name} is damaged: its bytes have SHA-256 {found} and should have {expected}; sample "
            "it again"
        )


def content_sha256(trajectories: Sequence[Trajectory]) -> str:
    """Digest of what was sampled: the same for two runs that sampled the same, however long each
    took."""
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
        digest.update(
            json.dumps([scalars, trajectory.stop_reason, maps, shape, texts, searches]).encode()
        )
        for turn in turns:
            digest.update(array("i", turn.token_ids).tobytes())
            digest.update(array("f", turn.logprobs or ()).tobytes())
    return digest.hexdigest()


def _turn_content(turn: Turn) -> tuple[str | bool | int, ...]:
    """Return what the digest of a turn covers beside its numbers. A turn that is not cut has the
    digest that earlier versions gave it."""
    content = (turn.role, turn.text, turn.trained, len(turn.token_ids), turn.logprobs is None)
    return (*content, "cut") if turn.cut else content


def _schema() -> "pyarrow.Schema":
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
    return pa.schema(
        {
            **{name: getattr(pa, kind)() for name, kind in SCALARS.items()},
            "stop_reason": pa.string(),
            "search_count": pa.int32(),
            **{name: pa.map_(pa.string(), pa.float64()) for name in MAPS},
            "conversations": pa.list_(pa.struct(conversation)),
            "searches": pa.list_(pa.struct(search)),
        }
    )


def _row(trajectory: Trajectory) -> dict[str, Any]:
    conversations = [
        {"role": conversation.role, "turns": [vars(turn) for turn in conversation.turns]}
        for conversation in trajectory.conversations
    ]
    return {
        **vars(trajectory),
        **{name: list(getattr(trajectory, name).items()) for name in MAPS},
        "stop_reason": trajectory.stop_reason.value,
        "search_count": len(trajectory.searches),
        "conversations": conversations,
        "searches": [vars(search) for search in trajectory.searches],
    }


def _trajectories(table: "pyarrow.Table") -> list[Trajectory]:
    """Nested columns by way of numpy: `to_pylist` makes a Python object of each number, and is five
    times slower."""
    plain = table.drop_columns(["conversations", "searches", "search_count"]).to_pylist()
    nested = (table.column(name).to_numpy() for name in ("conversations", "searches"))
    trajectories = []
    for row, conversations, searches in zip(plain, *nested, strict=True):
        row |= {name: dict(row[name]) for name in MAPS} | {
            "stop_reason": StopReason(row["stop_reason"])
        }
        row["conversations"] = tuple(
            Conversation(
                role=one["role"], turns=tuple(Turn(**_with_tuples(turn)) for turn in one["turns"])
            )
            for one in conversations
        )
        row["searches"] = tuple(Search(**_with_tuples(search)) for search in searches)
        trajectories.append(Trajectory(**row))
    return trajectories


def _with_tuples(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        name: tuple(value.tolist()) if hasattr(value, "tolist") else value
        for name, value in fields.items()
    }
