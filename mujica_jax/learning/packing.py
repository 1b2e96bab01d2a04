"""Pack conversations of different lengths into rows of one length.

A row holds several whole conversations, one after the other, and padding behind them. Here is a row
of 7 tokens with two conversations, a and b:

    tokens        a1  a2  a3  b1  b2   0   0
    segment_ids    1   1   1   2   2   0   0
    positions      0   1   2   0   1   0   0

`segment_ids` number the conversations of a row from 1, and 0 marks padding. `positions` count the
tokens of each conversation from 0. Attention stays inside a segment and rotary angles follow from
the positions. So the model computes the same for a packed conversation as for the conversation
alone. The loss mask marks the tokens that are trained. It comes from the turns of a conversation
(`Conversation.loss_mask`). The methods pack their conversations before they call
`learning.trainer.fit`.

Which conversation goes into which row is a pure function of the lengths and the seed:

1. Shuffle the conversations.
2. Cut the shuffled order into windows of `WINDOW_CONVERSATIONS`.
3. In each window, put the longest conversation first into the first row with room, then the second
   longest, and so on (first-fit decreasing).
4. Shuffle the rows.

Processes with the same conversations and the same seed make the same rows.

A conversation longer than a row is never cut. Its later turns were sampled with the earlier ones in
view, and without them the policy would learn to say things out of context. `pack` raises UserError
for it. The methods count such conversations with `too_long` and leave them out before they pack. A
console line and the metrics of the phase report the count.

Some losses need more numbers, such as advantages. A column holds one such number for each token, in
float32, and 0 for padding. The loss of preference pairs needs `pairs`: the conversations then come
in the order chosen, rejected, chosen, rejected, and so on. The two conversations of a pair are side
by side in one row, and the column `pairs` tells them apart.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Float, Int

from mujica_jax.errors import UserError
from mujica_jax.records import Conversation

# Conversations that are packed together. First-fit compares every conversation of a window with
# every open row, so a larger window takes more time. The last rows of a window stay partly empty,
# so a smaller window has more padding. At this size, 1024 conversations of 100 tokens fill about
# 200 rows of 512 tokens. This takes 10 ms, and less than 2% of the tokens are padding.
WINDOW_CONVERSATIONS = 1024


class Batch(NamedTuple):
    """The input of one training step or one scoring call.

    It is a pytree of arrays, on the host or on the mesh. All arrays have the shape [rows, time]:
    `time` is the sequence length, and a slot is one place of a row.
    """

    # Token ids, and 0 in padding.
    tokens: Int[np.ndarray | Array, "rows time"]
    # Number of the conversation within its row, from 1. 0 marks padding.
    segment_ids: Int[np.ndarray | Array, "rows time"]
    # Position of the token within its conversation, from 0.
    positions: Int[np.ndarray | Array, "rows time"]
    # Whether the token in this slot is trained. The model predicts it in the slot before.
    loss_mask: Bool[np.ndarray | Array, "rows time"]
    # The extra columns that the loss reads, by name (`Loss.columns`).
    columns: Mapping[str, Float[np.ndarray | Array, "rows time"]] = {}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PackedRows:
    """All rows that one call of `learning.trainer.fit` trains on, in host memory.

    The arrays have the same meaning as in `Batch`.
    """

    tokens: Int[np.ndarray, "rows time"]
    segment_ids: Int[np.ndarray, "rows time"]
    positions: Int[np.ndarray, "rows time"]
    loss_mask: Bool[np.ndarray, "rows time"]
    # Row and first slot of each conversation, in the order of the argument of `pack`.
    placements: Int[np.ndarray, "conversations 2"]
    columns: Mapping[str, Float[np.ndarray, "rows time"]] = dataclasses.field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return self.tokens.shape[0]

    @property
    def sequence_length(self) -> int:
        """Length of a row in tokens, with padding."""
        return self.tokens.shape[1]

    @property
    def efficiency(self) -> float:
        """Share of slots that hold a token. Without any rows it is 1.0."""
        return float(np.mean(self.segment_ids > 0)) if self.segment_ids.size else 1.0

    @property
    def trained_tokens(self) -> int:
        """Number of trained tokens in all rows."""
        return int(self.loss_mask.sum())

    def with_columns(self, **columns: Float[np.ndarray, "rows time"]) -> "PackedRows":
        """Return the rows with more columns, such as the scores of `Trainer.score`."""
        return dataclasses.replace(self, columns={**self.columns, **columns})

    def with_empty_rows(self, num_rows: int) -> "PackedRows":
        """Return the rows, with empty rows added at the end until there are `num_rows` rows.

        An empty row has only padding. If there are more rows already, nothing is added.
        """
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
        """Return a batch with the rows of these numbers, and with the named columns."""
        missing = sorted(set(columns) - set(self.columns))
        assert not missing, (
            f"the loss needs the columns {missing}, and the rows have only "
            f"{sorted(self.columns)}; add them with PackedRows.with_columns"
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
    """Pack every conversation exactly once and whole into rows of `sequence_length` tokens.

    `seed` shuffles conversations and rows. `columns` maps the name of a column to its values. These
    are, for each conversation, either one number for all of its tokens or a list with one number
    for each token. With `pairs` the conversations come in the order chosen, rejected, chosen,
    rejected, and so on.

    Raises UserError if a conversation, or a pair, is longer than a row. `too_long` counts them.
    """
    lengths = _lengths(conversations, pairs)
    if lengths.size and lengths.max() > sequence_length:
        raise UserError(
            f"a {'pair' if pairs else 'conversation'} of {lengths.max()} tokens does not fit into "
            f"a row of {sequence_length} tokens: raise trainer.sequence_length or lower "
            "agent.max_trajectory_tokens"
        )
    assert not lengths.size or lengths.min() > 0, "a conversation needs at least one token"

    random = np.random.default_rng(seed)
    rows = _assign(lengths, sequence_length, random.permutation(lengths.size))
    rows = [rows[index] for index in random.permutation(len(rows))]
    columns = dict(columns or {})
    if pairs:
        columns["pairs"] = _pair_numbers(rows, pairs=len(lengths))
        rows = [_conversations_of_pairs(row) for row in rows]
    return _fill(rows, conversations, sequence_length, columns)


def _pair_numbers(rows: list[list[int]], *, pairs: int) -> list[int]:
    """Return the values of the column `pairs`, one number for each conversation.

    In the n-th pair of a row, the chosen conversation has n and the rejected one has -n. `rows`
    holds the indexes of the pairs of each row, and `pairs` is the number of all pairs.
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
    """Return the indexes of both conversations of each pair: 2 n and 2 n + 1 for pair n."""
    indexes = []
    for pair in pairs:
        indexes += [2 * pair, 2 * pair + 1]
    return indexes


def too_long(
    conversations: Sequence[Conversation], sequence_length: int, *, pairs: bool = False
) -> int:
    """Return how many conversations, or pairs with `pairs`, are too long for a row."""
    return int(np.sum(_lengths(conversations, pairs) > sequence_length))


def sampled_log_probs(conversations: Sequence[Conversation]) -> list[list[float]]:
    """Return the values of the column `sampled_log_probs`, one list for each conversation.

    Each list has one number for each token: the log-probability that the engine stored when it
    sampled the token. The tokens of a turn that the engine did not sample, such as a prompt, have
    0. Raises UserError if a trained turn has no log-probabilities.
    """
    column = []
    for conversation in conversations:
        values: list[float] = []
        for turn in conversation.turns:
            if turn.trained and turn.logprobs is None:
                raise UserError(
                    f"a trained turn of {len(turn.token_ids)} tokens has no log-probabilities: "
                    "train on turns that an engine sampled, or score them with Trainer.score"
                )
            values += turn.logprobs or [0.0] * len(turn.token_ids)
        column.append(values)
    return column


def _lengths(
    conversations: Sequence[Conversation], pairs: bool
) -> Int[np.ndarray, "conversations_or_pairs"]:
    """Return the length of each conversation in tokens, or with `pairs` of each pair."""
    lengths = np.zeros(len(conversations), np.int64)
    for index, conversation in enumerate(conversations):
        lengths[index] = sum(len(turn.token_ids) for turn in conversation.turns)
    return lengths.reshape(-1, 2).sum(axis=1) if pairs else lengths


def _assign(
    lengths: Int[np.ndarray, "conversations"],
    sequence_length: int,
    order: Int[np.ndarray, "conversations"],
) -> list[list[int]]:
    """Return the indexes of the conversations, or pairs, that each row holds.

    `lengths` are in tokens, and `order` is the shuffled order of the indexes. Each window of it is
    packed first-fit decreasing.
    """
    rows: list[list[int]] = []
    for start in range(0, len(order), WINDOW_CONVERSATIONS):
        # Sort by length, longest first. A stable sort keeps the shuffled order of equal lengths.
        window = order[start : start + WINDOW_CONVERSATIONS]
        window = window[np.argsort(-lengths[window], kind="stable")]

        # Start with one empty row for each conversation: a window never needs more.
        free_tokens = np.full(len(window), sequence_length)
        window_rows: list[list[int]] = [[] for _ in window]
        for index in window:
            # argmax returns the first row that has room.
            row = int(np.argmax(free_tokens >= lengths[index]))
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
    """Return the arrays of rows whose conversations are assigned.

    `rows` holds the indexes of the conversations of each row. `columns` has the values of each
    column, as for `pack`.
    """
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
            # The first token of a conversation has no token before it that could predict it.
            packed.loss_mask[row, start] = False
            packed.placements[index] = row, start
            for name, values in columns.items():
                packed.columns[name][row, slots] = values[index]
            start = slots.stop
    return packed
