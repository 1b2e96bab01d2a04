"""The interface between the trainer and a loss.

A loss takes a decoder and a batch of packed rows. It returns the number that the trainer minimises,
and metrics that describe it. `Loss.columns` names the extra columns that the loss reads from the
batch, for example advantages.

Each loss is a frozen dataclass, and its fields are its hyper-parameters. Two losses with equal
fields share one compiled training step. Most losses need only the log-probabilities of the trained
tokens and define only `of`. A loss that needs more of the decoder replaces `__call__`.

A user's own loss is in a module of the user. A method takes it in its `LearningPlan`, or
`--method.loss module:name` names it (`named_loss`).

With gradient accumulation a batch goes through the model part by part:

    loss(batch) = sum over parts of (sum over the part of the terms / count over the whole batch)

So `counts` first counts over the whole batch, for example its trained tokens. Then the loss of each
part is a sum over that part, divided by a count of the whole batch. The losses of the parts add up
to the loss of the batch, and so do their metrics.
"""

import inspect
from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from mujica_jax.config.named_objects import imported_object
from mujica_jax.errors import UserError
from mujica_jax.learning.log_probs import token_log_probs
from mujica_jax.learning.packing import Batch
from mujica_jax.models.attention import Implementation
from mujica_jax.models.decoder import Decoder, Remat

Counts = Mapping[str, Int[Array, ""]]
Metrics = dict[str, Float[Array, ""]]
LossAndMetrics = tuple[Float[Array, ""], Metrics]


def named_loss(place: str | None) -> "Loss | None":
    """Return the loss that `method.loss` names as module:name, or None without a name.

    The name is that of a `Loss`, or of a subclass that needs no arguments. Raises UserError if it is
    another object, or if the loss cannot be used in place of maximum likelihood.
    """
    if place is None:
        return None
    loss = imported_object(place, setting="method.loss")
    if inspect.isclass(loss) and issubclass(loss, Loss):
        try:
            loss = loss()
        except TypeError as error:
            raise UserError(
                f"method.loss is {place}, but it needs arguments ({error}): give its fields "
                "defaults, or name a loss that is already made"
            ) from error
    if not isinstance(loss, Loss):
        raise UserError(
            f"method.loss is {place}, but it is no loss: derive it from "
            "mujica_jax.learning.losses.Loss"
        )
    is_empty = type(loss).of is Loss.of and type(loss).__call__ is Loss.__call__
    if is_empty or type(loss).__hash__ is None:
        raise UserError(
            f"method.loss is {place}, but a loss is a frozen dataclass that defines `of` or "
            "`__call__`: write @dataclasses.dataclass(frozen=True, kw_only=True) above it, and "
            "define one of them"
        )
    if loss.columns:
        raise UserError(
            f"method.loss is {place}, which reads the columns {', '.join(loss.columns)}, but the "
            "rows of this method have none: use a loss without columns, or write a method that "
            "packs them"
        )
    return loss


class Loss:
    """Base of all losses.

    `StepMetrics` and the training log show the counts and the metrics of a loss under their names.
    """

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the extra columns that the loss reads from a batch (`Batch.columns`)."""
        return ()

    def counts(self, batch: Batch) -> dict[str, Int[Array, ""]]:
        """Return the counts that the sums of the loss are divided by.

        `batch` is the whole batch. `trained_tokens`, the number of trained tokens, is always among
        the counts.
        """
        return {"trained_tokens": jnp.sum(jnp.asarray(batch.loss_mask), dtype=jnp.int32)}

    def of(
        self, log_probs: Float[Array, "rows time"], batch: Batch, counts: Counts
    ) -> LossAndMetrics:
        """Return the loss of a batch or of a part of it, and its metrics.

        `log_probs` holds the log-probability of each trained token given its prefix, and 0 for all
        other tokens. `counts` are the counts of the whole batch.
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
        """Return the loss of a decoder on `batch`, and its metrics.

        `batch` may be a part of a larger batch. `counts` are then the counts of the larger batch.
        None counts in `batch` itself. `attention` and `remat` are passed on to
        `learning.log_probs`.
        """
        log_probs = token_log_probs(
            decoder, batch, jnp.asarray(batch.loss_mask), attention=attention, remat=remat
        )
        if counts is None:
            counts = self.counts(batch)
        return self.of(log_probs, batch, counts)


def divided(total: Num[Array, ""], count: Int[Array, ""]) -> Float[Array, ""]:
    """Return total / count, or `total` if the count is 0.

    `total` is a sum over a part of a batch, and `count` counts over the whole batch. If there is
    nothing to count, the sum is 0 too, and so is the result.
    """
    return total / jnp.maximum(count, 1)


def sum_by_id(
    values: Num[Array, "rows time"], ids: Int[Array, "rows time"]
) -> Num[Array, "rows ids"]:
    """Return, for each row and each id, the sum of the values that have this id.

    Ids are between 0 and `time`, so the result has the shape [rows, time + 1].
    """
    num_ids = ids.shape[1] + 1

    def sum_row(row_values: Array, row_ids: Array) -> Array:
        return jax.ops.segment_sum(row_values, row_ids, num_ids)

    return jax.vmap(sum_row)(values, ids)
