"""The kernels that decode on a CPU, compared with XLA."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mujica_jax import kernels
from mujica_jax.errors import UserError
from mujica_jax.inference.engine import contiguous_programs as programs
from mujica_jax.kernels.cpu import calls
from mujica_jax.models.attention import check_platform, resolve
from tests.helpers.patience import HANG_SECONDS
from tests.helpers.tiny_engine import decoder, make_engine

EXACT = 2e-6  # float32, the same sums in another order


def drawn(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def memory(
    places: int, kv_heads: int, head_dim: int, width: int, prefixes: int, length: int
) -> list[np.ndarray]:
    """Return keys and values of places, then keys and values of prefixes."""
    shapes = [(places, kv_heads, head_dim, width), (places, kv_heads, width, head_dim)]
    shapes += [(prefixes, kv_heads, head_dim, length), (prefixes, kv_heads, length, head_dim)]
    return [drawn(seed, *shape) for seed, shape in enumerate(shapes)]


def by_xla(query: np.ndarray, memory_arrays: list[np.ndarray], row_table: np.ndarray) -> np.ndarray:
    keys, values, prefix_keys, prefix_values = map(jnp.asarray, memory_arrays)
    place, seen, prefix, shared = row_table.T
    readable = np.arange(keys.shape[3]) < (seen[:, None] + np.arange(query.shape[1]))[:, :, None]
    inside = np.arange(prefix_keys.shape[3]) < shared[:, None, None]
    visible = inside & (prefix[:, None, None] == np.arange(prefix_keys.shape[0])[None, :, None])
    mixed = programs._attention(
        jnp.asarray(query),
        keys[place],
        values[place],
        jnp.asarray(readable),
        prefix_keys,
        prefix_values,
        jnp.asarray(visible),
    )
    return np.asarray(mixed)


@pytest.mark.parametrize(
    ("rows", "time", "heads", "kv_heads", "head_dim", "width", "prefixes", "length"),
    [(13, 1, 9, 3, 64, 96, 2, 64), (7, 16, 4, 4, 8, 64, 1, 0), (6, 3, 8, 1, 16, 40, 2, 32)],
)
def test_rows_anywhere_over_several_prefixes_get_the_numbers_of_xla(
    rows: int,
    time: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    width: int,
    prefixes: int,
    length: int,
):
    random = np.random.default_rng(0)
    memory_arrays = memory(rows + 1, kv_heads, head_dim, width, prefixes, length)
    shared = random.integers(0, length + 1, prefixes)
    prefix = random.integers(0, prefixes, rows)
    places = random.permutation(rows + 1)[:rows]
    seen = random.integers(1, width - time + 2, rows)
    row_table = np.stack([places, seen, prefix, shared[prefix]], axis=1).astype(np.int32)
    query = drawn(9, rows, time, heads, head_dim)
    mixed = jax.jit(calls.paged_attention)(query, *memory_arrays, row_table)
    np.testing.assert_allclose(mixed, by_xla(query, memory_arrays, row_table), atol=EXACT)


def test_a_row_that_sees_nothing_is_zero_and_what_is_broken_stays_in_its_row():
    """A number that is not finite reaches only the row that reads it, where it is then detected.

    Positions that no row may see are not read.
    """
    memory_arrays = memory(4, 1, 8, 16, 1, 16)
    memory_arrays[0][1, :, :, 5:] = np.nan  # beyond what is seen
    memory_arrays[1][1, :, 5:] = np.nan
    memory_arrays[0][2, 0, 3, 1] = np.nan
    memory_arrays[1][3, 0, 0, 0] = np.inf
    row_table = np.asarray([[0, 0, 0, 16], [1, 5, 0, 16], [2, 5, 0, 16], [3, 5, 0, 16]], np.int32)
    mixed = np.asarray(
        jax.jit(calls.paged_attention)(drawn(9, 4, 1, 2, 8), *memory_arrays, row_table)
    )
    assert not mixed[0].any()
    assert np.isfinite(mixed[1]).all()
    assert mixed[1].any()
    assert np.isnan(mixed[2]).all()
    assert not np.isfinite(mixed[3]).all()


def test_scores_far_apart_weigh_as_they_should():
    memory_arrays = memory(1, 1, 8, 24, 1, 0)
    memory_arrays[0] *= 100
    row_table = np.asarray([[0, 24, 0, 0]], np.int32)
    query = drawn(9, 1, 1, 1, 8)
    mixed = jax.jit(calls.paged_attention)(query, *memory_arrays, row_table)
    np.testing.assert_allclose(
        mixed, by_xla(query, memory_arrays, row_table), atol=1e-4
    )  # scores of hundreds


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"),
    [
        (1, 7, 64),
        (6, 576, 1536),
        (9, 4, 16),
        (13, 1001, 48),
        (24, 30, 16),
        (40, 5, 32),
        (171, 577, 1040),
    ],
)
def test_products_of_few_rows_are_exact(rows: int, outputs: int, inputs: int):
    rows_of_left = drawn(0, rows, inputs)
    matrices = (drawn(1, outputs, inputs), drawn(2, 5, inputs))
    for product, matrix in zip(
        jax.jit(calls.products)(rows_of_left, *matrices), matrices, strict=True
    ):
        np.testing.assert_allclose(product, rows_of_left.astype(np.float64) @ matrix.T, atol=3e-4)


def test_callers_at_once_get_their_own_numbers():
    """One caller has the threads. The others work alone."""
    call = jax.jit(calls.products)
    factors = [(drawn(seed, 8, 64), drawn(9 + seed, 640, 64)) for seed in range(4)]
    with ThreadPoolExecutor(len(factors)) as pool:
        products = pool.map(lambda pair: [np.asarray(call(*pair)[0]) for _ in range(100)], factors)
        for (rows, matrix), results in zip(factors, products, strict=True):
            np.testing.assert_allclose(results, np.stack([rows @ matrix.T] * 100), atol=1e-4)


@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="the system does not bind a process to a core"
)
def test_one_core_is_enough_and_threads_end_with_the_program():
    program = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))} if %d else "
        "os.sched_getaffinity(0))\n"
        "import jax.numpy as jnp; from mujica_jax.kernels.cpu import calls\n"
        "print(float(calls.products(jnp.ones((8, 64)), jnp.ones((640, 64)))[0].sum()))"
    )
    for alone in (0, 1):
        command = [sys.executable, "-c", program % alone]
        finished = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS)
        assert finished.returncode == 0, finished.stderr
        assert float(finished.stdout) == 8 * 64 * 640


@pytest.mark.slow
def test_what_compiles_the_kernels_rounds_as_what_finds_them_compiled(tmp_path):
    """Otherwise the first run on a machine would not resume bit for bit."""
    program = """
import hashlib

import jax
import numpy as np

from mujica_jax.kernels.cpu.calls import packed_attention, paged_attention, products


def draw(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


row_table = np.array([[0, 50, 0, 60], [1, 77, 0, 60]], np.int32)
memory = [draw(2, 2, 24, 99), draw(2, 2, 99, 24), draw(1, 2, 24, 64), draw(1, 2, 64, 24)]
results = [jax.jit(paged_attention)(draw(2, 3, 4, 24), *memory, row_table)]

for rows in (4, 12, 30):
    results.append(jax.jit(products)(draw(rows, 576), draw(999, 576)))

packed = [draw(1, 200, 4, 24), draw(1, 200, 2, 24), draw(1, 200, 2, 24)]
segments = (np.arange(200) // 90)[None]


def total(*states):
    return (packed_attention(*states, segments) ** 2).sum()


results.append(jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2)))(*packed))

leaves = jax.tree.leaves(results)
print([hashlib.sha256(np.asarray(leaf).tobytes()).hexdigest() for leaf in leaves])
"""
    command = [sys.executable, "-c", program]
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    starts = [
        subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS
        )
        for _ in range(2)
    ]
    first, second = [start.stdout for start in starts]
    assert first, starts[0].stderr
    assert second == first, starts[1].stderr


def test_the_gradient_of_products():
    def loss(products, factor, *matrices):
        return sum(jnp.sum(jnp.sin(product)) for product in products(factor, *matrices))

    arguments = (
        jnp.asarray(drawn(0, 6, 16)),
        jnp.asarray(drawn(1, 10, 16)),
        jnp.asarray(drawn(2, 4, 16)),
    )
    ours = jax.grad(loss, (1, 2, 3))(calls.products, *arguments)
    theirs = jax.grad(loss, (1, 2, 3))(
        lambda factor, *matrices: [factor @ matrix.T for matrix in matrices], *arguments
    )
    for gradient, expected in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(gradient, expected, atol=1e-5)


def test_the_engine_takes_the_kernel_for_keys_and_values_in_float32():
    engine: object = make_engine(decoder())
    keys = engine._memory.rows.keys[0]  # pyright: ignore[reportAttributeAccessIssue]
    assert kernels.paged_attention(head_dim=keys.shape[2], dtype=keys.dtype) is not None
    assert kernels.paged_attention(head_dim=64, dtype=jnp.bfloat16) is None
    assert kernels.paged_attention(head_dim=12, dtype=jnp.float32) is None


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "multiplies"),
    [
        (12, 576, [1536], calls.products),
        (12, 576, [1536, 1536], calls.products),
        (12, 576, [1536, 64], calls.matrix_first_products),  # the second matrix is small
        (12, 575, [1536], calls.matrix_first_products),
        (12, 576, [15], None),
        (17, 576, [64], None),
        (192, 576, [1536], calls.products),
        (193, 576, [1536], None),
    ],
)
def test_products_are_taken_where_they_are_faster(rows, inputs, outputs, multiplies):
    product = kernels.product(rows=rows, inputs=inputs, outputs=outputs, dtype=jnp.float32)
    assert product is multiplies


def test_a_mesh_leaves_what_it_splits_to_xla():
    with jax.set_mesh(jax.make_mesh((1,), ("data",))):
        assert kernels.paged_attention(head_dim=64, dtype=jnp.float32) is None
        assert not kernels.prefers_output_major(inputs=576, outputs=1536, dtype=jnp.float32)
        multiply = kernels.product(rows=12, inputs=576, outputs=[1536], dtype=jnp.float32)
        assert multiply is calls.matrix_first_products
        # Each device attends over its own packed rows.
        assert kernels.packed_attention() is not None


def test_another_platform_is_left_to_xla(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert kernels.packed_attention() is None
    assert kernels.paged_attention(head_dim=64, dtype=jnp.float32) is None
    assert kernels.product(rows=12, inputs=576, outputs=[1536], dtype=jnp.float32) is None
    assert not kernels.prefers_output_major(inputs=576, outputs=1536, dtype=jnp.float32)


@pytest.mark.parametrize("missing", ["numba", "x86"])
def test_without_numba_or_on_another_processor_everything_is_left_to_xla(monkeypatch, missing):
    if missing == "numba":
        monkeypatch.setattr(calls.importlib.util, "find_spec", lambda name: None)
    else:
        monkeypatch.setattr(calls.platform, "machine", lambda: "aarch64")
    calls.is_available.cache_clear()
    try:
        assert kernels.packed_attention() is None
        assert kernels.paged_attention(head_dim=64, dtype=jnp.float32) is None
        assert kernels.product(rows=12, inputs=576, outputs=[1536], dtype=jnp.float32) is None
        assert not kernels.prefers_output_major(inputs=576, outputs=1536, dtype=jnp.float32)
        assert resolve("auto", time=768) == "xla"
        with pytest.raises(UserError, match=r"trainer\.attention blocks needs an x86 CPU and"):
            check_platform("blocks")
    finally:
        calls.is_available.cache_clear()


def test_only_a_large_matrix_is_stored_output_by_output():
    assert kernels.prefers_output_major(inputs=250, outputs=200, dtype=jnp.float32)
    assert not kernels.prefers_output_major(inputs=249, outputs=200, dtype=jnp.float32)
