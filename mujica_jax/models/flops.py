"""Floating-point operations of a training step, by formula and without what is recomputed:

    slots x 6 x weights of the layers              (a multiply-add is two, the backward pass twice the forward pass)
    + trained tokens x 6 x weights of the head     (untrained positions never meet the head)
    + 12 x layers x heads x head_dim x sum over conversations of length x (length + 1) / 2

With LoRA a frozen weight has no gradient of its own and counts 4 in the place of 6; the adapters beside it count 6.
What XLA says of a program is not used: it counts the body of a scan once.
"""

import math

import numpy as np
from jaxtyping import Int

from mujica_jax.models.families import DecoderConfig
from mujica_jax.models.layers import projections

TRAINED, FROZEN = 6.0, 4.0  # operations a weight and token


def training_flops(
    model: DecoderConfig, *, slots: int, trained_tokens: float | int, pairs: float | int, lora_rank: int = 0
) -> float:
    """Of one step over this many slots, padding included; `pairs` of `attended_pairs`."""
    matrices = projections(model)
    each = FROZEN if lora_rank else TRAINED
    in_layers = each * sum(math.prod(weight.shape) for weight in matrices)
    for weight in matrices:
        sides = math.prod(weight.shape[: weight.inputs]) + math.prod(weight.shape[weight.inputs :])
        in_layers += TRAINED * lora_rank * sides
    return (
        slots * model.num_layers * in_layers
        + trained_tokens * each * model.vocab_size * model.hidden_size
        + 12.0 * model.num_layers * model.num_heads * model.head_dim * pairs
    )


def attended_pairs(segment_ids: Int[np.ndarray, "rows time"]) -> int:
    """Pairs of a token and one that it attends to, itself included, in the conversations of all rows; 0 marks
    padding."""
    total = 0
    for row in segment_ids:
        lengths = np.bincount(row[row > 0])
        total += int(np.sum(lengths * (lengths + 1) // 2))
    return total
