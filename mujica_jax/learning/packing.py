"""Packing: conversations of any length become rows of one length, several conversations a row.

A row holds whole conversations one after the other. `segment_ids` number them from 1 (0 is
padding), `positions` start at 0 in each, so attention and rotary angles are those of the
conversation alone: packed equals unpacked. The loss mask comes from the turns
(`Conversation.loss_mask`), made where the tokens were made. Called by the methods before
`learning.trainer.fit`.

The order is a pure function of the seed: shuffle, then first-fit decreasing inside windows of the
shuffled order (a window mixes lengths well enough to fill rows and keeps the search short), then
the rows are shuffled. Processes that are given the same conversations make the same rows.

A conversation longer than a row is never cut: its later turns were sampled after the earlier ones,
and half of it would teach them without. `pack` refuses it; the methods leave it out first
(`too_long` counts, and a line and the metrics of the phase say how many).

What a loss needs beside tokens stands in named columns of numbers, float32, 0 in padding. With
`pairs` the conversations are chosen, rejected, chosen, rejected, ...: the two of a pair stand in
one row, side by side, and the column `pairs` tells which they are.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Float, Int

from mujica_jax.errors import UserError
from mujica_jax.records import Conversation

# First-fit looks at every open row for every conversation of a window: 1024 conversations of 100
# tokens open about 200 rows of 512 tokens and take 10 ms; the last rows of a window stay part
# empty, under 2% of the slots at this size.
WINDOW_CONVERSATIONS = 1024


class Batch(NamedTuple):
    """The input of one training step or one scoring call.

    It is a pytree of arrays, on the host or on the mesh.
    """

    tokens: Int[np.ndarray | Array, "rows time"]
    # 0 is padding, 1.. number the conversations of a row
    segment_ids: Int[np.ndarray | Array, "rows time"]
    positions: Int[np.ndarray | Array, "rows time"]  # restart at 0 in each segment
    # the token itself is a target: position t-1 predicts it
    loss_mask: Bool[np.ndarray | Array, "rows time"]
    # those that the loss asks for
    columns: Mapping[str, Float[np.ndarray | Array, "rows time"]] = {}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PackedRows:
    """All rows of one fit, on the host."""

    tokens: Int[np.ndarray, "rows time"]
    segment_ids: Int[np.ndarray, "rows time"]
    positions: Int[np.ndarray, "rows time"]
    loss_mask: Bool[np.ndarray, "rows time"]
    # row and first slot of each, in the order they were given
    placements: Int[np.ndarray, "conversations 2"]
    columns: Mapping[str, Float[np.ndarray, "rows time"]] = dataclasses.field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        return self.tokens.shape[0]

    @property
    def sequence_length(self) -> int:
        return self.tokens.shape[1]

    @property
    def efficiency(self) -> float:
        """Share of slots that hold a token; 1.0 for no rows at all."""
        return float(np.mean(self.segment_ids > 0)) if self.segment_ids.size else 1.0

    @property
    def trained_tokens(self) -> int:
        return int(self.loss_mask.sum())

    def with_columns(self, **columns: Float[np.ndarray, "rows time"]) -> "PackedRows":
        """Return the rows with more columns, such as the scores of `Trainer.score`."""
        return dataclasses.replace(self, columns={**self.columns, **columns})

    def with_empty_rows(self, num_rows: int) -> "PackedRows":
        """Return at least `num_rows` rows, with rows of padding behind the others."""
        missing = max(0, num_rows - self.num_rows)

        def padded(values: np.ndarray) -> np.ndarray:
            return np.pad(values, ((0, missing), (0, 0)))

        return dataclasses.replace(
            self,
            tokens=padded(self.tokens),
            segment_ids=padded(self.segment_ids),
            positions=padded(self.positions),
            loss_mask=padded(self.loss_mask),
            columns={name: padded(values) for name, values in self.columns.items()},
        )

    def batch(self, rows: Int[np.ndarray, "chosen"] | slice, columns: Sequence[str] = ()) -> Batch:
        """Return these rows, with the named columns."""
        missing = sorted(set(columns) - set(self.columns))
        assert not missing, (
            f"the loss needs the columns {missing}, and the rows have {sorted(self.columns)}"
        )
        return Batch(
            tokens=self.tokens[rows],
            segment_ids=self.segment_ids[rows],
            positions=self.positions[rows],
            loss_mask=self.loss_mask[rows],
            columns={name: self.columns[name][rows] for name in columns},
        )


def pack(
    conversations: Sequence[Conversation],
    *,
    sequence_length: int,
    seed: int,
    columns: Mapping[str, Sequence[Any] | np.ndarray] | None = None,
    pairs: bool = False,
) -> PackedRows:
    """Pack every conversation exactly once, whole.

    Raises UserError for a conversation longer than a row: `too_long` counts them, so filter first.

    A column has for each conversation a number for all of its tokens, or one number a token.
    """
    lengths = _lengths(conversations, pairs)
    if lengths.size and lengths.max() > sequence_length:
        raise UserError(
            f"a {'pair' if pairs else 'conversation'} of {lengths.max()} tokens does not fit into "
            f"a row of {sequence_length} tokens: raise trainer.sequence_length or lower "
            "agent.max_trajectory_tokens"
        )
    assert not lengths.size or lengths.min() > 0, "a conversation holds at least one token"

    random = np.random.default_rng(seed)
    rows = _assign(lengths, sequence_length, random.permutation(lengths.size))
    rows = [rows[index] for index in random.permutation(len(rows))]
    columns = dict(columns or {})
    if pairs:
        columns["pairs"] = _pair_numbers(rows, pairs=len(lengths))
        rows = [_conversations_of_pairs(row) for row in rows]
    return _fill(rows, conversations, sequence_length, columns)


def _pair_numbers(rows: list[list[int]], *, pairs: int) -> list[int]:
    """Return the column `pairs`, with two numbers for each pair.

    They are n for the chosen conversation of a row's n-th pair, and -n for the rejected one. `rows`
    holds the indexes of each row's pairs.
    """
    number_in_row = [0] * pairs
    for row in rows:
        for number, pair in enumerate(row, start=1):
            number_in_row[pair] = number

    column = []
    for number in number_in_row:
        column += [number, -number]
    return column


def _conversations_of_pairs(pairs: list[int]) -> list[int]:
    """Return the indexes of both conversations of each pair."""
    indexes = []
    for pair in pairs:
        indexes += [2 * pair, 2 * pair + 1]
    return indexes


def too_long(
    conversations: Sequence[Conversation], sequence_length: int, *, pairs: bool = False
) -> int:
    """Return how many conversations, or pairs of them, `pack` would refuse."""
    return int(np.sum(_lengths(conversations, pairs) > sequence_length))


def sampled_log_probs(conversations: Sequence[Conversation]) -> list[list[float]]:
    """Return the column of the log-probabilities under the policy that sampled.

    They are those that its engine stored; 0 for a turn without any.
    """
    column = []
    for conversation in conversations:
        values: list[float] = []
        for turn in conversation.turns:
            if turn.trained and turn.logprobs is None:
                raise UserError(
                    f"a trained turn of {len(turn.token_ids)} tokens carries no log-probabilities: "
                    "train on turns that an engine sampled, or score them (Trainer.score)"
                )
            values += turn.logprobs or [0.0] * len(turn.token_ids)
        column.append(values)
    return column


def _lengths(
    conversations: Sequence[Conversation], pairs: bool
) -> Int[np.ndarray, "conversations_or_pairs"]:
    """Return the tokens of each conversation, or of each pair."""
    lengths = np.zeros(len(conversations), np.int64)
    for index, conversation in enumerate(conversations):
        lengths[index] = sum(len(turn.token_ids) for turn in conversation.turns)
    return lengths.reshape(-1, 2).sum(axis=1) if pairs else lengths


def _assign(
    lengths: Int[np.ndarray, "conversations"],
    sequence_length: int,
    order: Int[np.ndarray, "conversations"],
) -> list[list[int]]:
    """Return the indexes of each row's conversations.

    They are packed first-fit decreasing in each window of `order`.
    """
    rows: list[list[int]] = []
    for start in range(0, len(order), WINDOW_CONVERSATIONS):
        # The longest come first. A stable sort keeps the shuffled order among equal lengths.
        window = order[start : start + WINDOW_CONVERSATIONS]
        window = window[np.argsort(-lengths[window], kind="stable")]

        # One row for each conversation always suffices.
        free_tokens = np.full(len(window), sequence_length)
        window_rows: list[list[int]] = [[] for _ in window]
        for index in window:
            row = int(np.argmax(free_tokens >= lengths[index]))  # the first one with room
            free_tokens[row] -= lengths[index]
            window_rows[row].append(int(index))
        rows.extend(row for row in window_rows if row)
    return rows


def _fill(
    rows: list[list[int]],
    conversations: Sequence[Conversation],
    sequence_length: int,
    columns: Mapping[str, Any],
) -> PackedRows:
    """Return the rows that hold these conversations, by their indexes."""
    shape = (len(rows), sequence_length)
    packed = PackedRows(
        tokens=np.zeros(shape, np.int32),
        segment_ids=np.zeros(shape, np.int32),
        positions=np.zeros(shape, np.int32),
        loss_mask=np.zeros(shape, bool),
        placements=np.zeros((len(conversations), 2), np.int32),
        columns={name: np.zeros(shape, np.float32) for name in columns},
    )
    for row, indexes in enumerate(rows):
        start = 0
        for segment, index in enumerate(indexes, start=1):
            token_ids = conversations[index].token_ids
            slots = slice(start, start + len(token_ids))
            packed.tokens[row, slots] = token_ids
            packed.segment_ids[row, slots] = segment
            packed.positions[row, slots] = np.arange(len(token_ids))
            packed.loss_mask[row, slots] = conversations[index].loss_mask
            # Nothing stands before the first token that could predict it.
            packed.loss_mask[row, start] = False
            packed.placements[index] = row, start
            for name, values in columns.items():
                packed.columns[name][row, slots] = values[index]
            start = slots.stop
    return packed
