"""The interface between the trainer and a loss.

A loss names the extra columns that it needs in a batch. It returns loss and metrics of a decoder on
a batch. It is a frozen dataclass of its hyper-parameters: equal ones share a compiled step. Most
losses are functions of the log-probabilities of the trained tokens and define only `of`. A loss
that needs more of the decoder replaces `__call__`. To add a loss, add a file here.

A batch may go through the model in parts. So the number by which a sum is divided is counted over
the whole batch first (`counts`). Loss and metrics of a part are sums over the part, each divided by
a count of the whole, and the parts add up to the batch.
"""

from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from mujica_jax.learning.log_probs import token_log_probs
from mujica_jax.learning.packing import Batch
from mujica_jax.models.attention import Implementation
from mujica_jax.models.decoder import Decoder, Remat

Counts = Mapping[str, Int[Array, ""]]
Metrics = dict[str, Float[Array, ""]]
LossAndMetrics = tuple[Float[Array, ""], Metrics]


class Loss:
    """Base of all losses. Counts and metrics reach `StepMetrics` under their names."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the extra columns that batches have to carry (`PackedRows.columns`)."""
        return ()

    def counts(self, batch: Batch) -> dict[str, Int[Array, ""]]:
        """Count what sums are divided by, in the whole batch.

        `trained_tokens` is always among the counts.
        """
        return {"trained_tokens": jnp.sum(jnp.asarray(batch.loss_mask), dtype=jnp.int32)}

    def of(
        self, log_probs: Float[Array, "rows time"], batch: Batch, counts: Counts
    ) -> LossAndMetrics:
        """Return loss and metrics.

        `log_probs` are the log-probabilities of the trained tokens, and 0 elsewhere.
        """
        raise NotImplementedError

    def __call__(
        self,
        decoder: Decoder,
        batch: Batch,
        counts: Counts | None = None,
        *,
        attention: Implementation = "auto",
        remat: Remat | Literal["auto"] = "auto",
    ) -> LossAndMetrics:
        """Return loss and metrics of a decoder on `batch`.

        `counts` are those of the whole batch, of which `batch` may be a part (None: of `batch`).
        """
        log_probs = token_log_probs(
            decoder, batch, jnp.asarray(batch.loss_mask), attention=attention, remat=remat
        )
        if counts is None:
            counts = self.counts(batch)
        return self.of(log_probs, batch, counts)


def divided(total: Num[Array, ""], count: Int[Array, ""]) -> Float[Array, ""]:
    """Divide a sum over a part by a count of the whole; 0 where there is nothing to count."""
    return total / jnp.maximum(count, 1)


def sum_by_id(
    values: Num[Array, "rows time"], ids: Int[Array, "rows time"]
) -> Num[Array, "rows ids"]:
    """Sum each row's values by their ids, which are between 0 and `time`."""
    num_ids = ids.shape[1] + 1

    def sum_row(row_values: Array, row_ids: Array) -> Array:
        return jax.ops.segment_sum(row_values, row_ids, num_ids)

    return jax.vmap(sum_row)(values, ids)
