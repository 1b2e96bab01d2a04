"""The platform's attention kernel beside XLA's own, values and gradients, in bfloat16; prints one
JSON line.

    python benchmarks/attention_parity.py [--rows 4 --row-tokens 2048]

Both are compared with float32: a kernel is right if it is no further from that than twice XLA in
bfloat16 is. On a CPU there is no kernel and both are the same.
"""

import argparse
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np

from mujica_jax.models.attention import resolve, segment_attention
from mujica_jax.runtime.chips import fastest_seconds

HEADS, KV_HEADS, HEAD_DIM = 28, 4, 128  # Qwen2.5-7B
SEGMENTS = 5  # in each row, the last one padding


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--row-tokens", type=int, default=2048)
    given = parser.parse_args()
    draw = np.random.default_rng(0)
    wide = [
        jnp.asarray(
            draw.standard_normal((given.rows, given.row_tokens, heads, HEAD_DIM)), jnp.float32
        )
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    ends = np.sort(draw.integers(1, given.row_tokens, (given.rows, SEGMENTS - 1)))
    passed = (ends[:, :, None] <= np.arange(given.row_tokens)).sum(axis=1)
    segments = jnp.asarray((passed + 1) % SEGMENTS, jnp.int32)  # 1, 2, ..., and 0 at the end

    @functools.partial(jax.jit, static_argnums=0)
    def values_and_gradients(implementation, *inputs):
        mixed, pull = jax.vjp(
            lambda *inputs: segment_attention(*inputs, segments, implementation), *inputs
        )
        return mixed, *pull(jnp.sin(mixed))

    kernel = resolve("auto", time=given.row_tokens)
    exact = values_and_gradients("xla", *wide)
    narrow = [array.astype(jnp.bfloat16) for array in wide]
    result = {"kernel": kernel, "device": jax.devices()[0].device_kind}
    right = True
    for name, implementation in (("xla", "xla"), ("kernel", kernel)):
        found = values_and_gradients(implementation, *narrow)
        off = [
            float(jnp.max(jnp.abs(one.astype(jnp.float32) - same)))
            for one, same in zip(found, exact, strict=True)
        ]
        result[f"{name}_off"] = [round(one, 4) for one in off]
        call = functools.partial(values_and_gradients, implementation, *narrow)
        seconds = fastest_seconds(lambda call=call: jax.block_until_ready(call()))
        result[f"{name}_milliseconds"] = round(1e3 * seconds, 2)
        right &= name == "xla" or all(np.asarray(off) <= 2 * np.asarray(result["xla_off"]) + 1e-3)
    print(json.dumps(result | {"right": right}))
    return 0 if right else 1


if __name__ == "__main__":
    raise SystemExit(main())
