"""What a CPU spends its time with, compiled by numba and called by XLA: in decoding attention over rows and shared
prefixes and products of few rows with a matrix, in training attention of packed rows. `cpu_calls` calls it; docs/LOG.md
has what it gains.

Attention: XLA multiplies each row's few queries with its keys by a product of its own, which packs more than it
multiplies. Here a thread takes a few rows of one head of keys: their queries meet the prefix together and each its own
row, of which no more is read than the row holds.

Products: XLA packs the matrix in every call. Here it is read once, in the order in which it lies, and while some of its
rows are multiplied the next ones are fetched. Few rows are multiplied along the inner length, more in tiles.

Packed rows: of XLA's small products none uses two cores. Here a thread takes a head of a segment, block after block of
queries, and no key after them. Only a block's scores exist at a time, keys by queries, so that all lies in the order in
which it is read; the gradient computes them again (FlashAttention, Dao et al. 2022, algorithm 4).

All of it is one file: numba's cache on disk asks whether the file of a kernel has changed, and not those that it uses.
"""

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, cfunc, get_num_threads, njit, prange, types  # pyright: ignore[reportPrivateImportUsage]
from numba.core import cgutils
from numba.extending import intrinsic as _intrinsic

TOGETHER = 12  # queries of one head of keys that a thread takes at a time, if a row has no more
UNROLLED = 8  # keys, or values, that are added up in one walk along what lies together
LANES = 8  # numbers of a vector: with AVX2 twelve sums and what they need fill the registers
MATRIX_ROWS = 2  # of a product of few rows that are multiplied together
MAX_UNTILED_ROWS = 12  # with more, tiles are faster
PANEL_ROWS, PANEL = 4, 3 * LANES  # of a tile of a product of more rows: of the matrix, and of the rows
CACHED = 98_304  # numbers of rows that stay in a core's cache while the matrix passes
PARTS = 64  # of a product, for threads to share
ROWS, COLUMNS = 6, 2 * LANES  # of a tile of attention
LINE = 64  # bytes of a cache's line
STEPS = 16  # of a tile, between two that fetch ahead
BLOCK = 48  # queries that meet their keys together, of packed rows: whole tiles
# Sums in any order, and no more: with "nnan" a broken number could look like a good one.
FAST = {"reassoc", "contract", "nsz", "arcp"}
ZERO, ONE, HALF, NOTHING = np.float32(0), np.float32(1), np.float32(0.5), np.float32(-np.inf)
LOG2_E, LN_2_HIGH, LN_2_LOW = np.float32(1.4426950408889634), np.float32(0.693359375), np.float32(-2.12194440e-4)
LEAST = np.float32(-87)  # e to this is about the least float32 that is not denormal
TERMS = tuple(np.float32(1 / factorial) for factorial in (2, 6, 24, 120, 720))
EXPONENT_BITS, BIAS = np.int32(23), np.int32(127)

VECTOR, SINGLE, LONG, WORD = ir.VectorType(ir.FloatType(), LANES), ir.FloatType(), ir.IntType(64), ir.IntType(32)
NONE = ir.Constant(VECTOR, [0.0] * LANES)

# XLA's foreign function interface, version 0.1 (xla/ffi/api/c_api.h, in jax.ffi.include_dir()): places in structures,
# counted in words of eight bytes.
EXTENSION, ARGUMENTS, RESULT_COUNT, RESULTS = 1, 9, 12, 14  # of a call frame
EXTENSION_KIND, METADATA, API_VERSION = 1, 3, 3
DATA, DIMENSIONS = 3, 5  # of a buffer
METADATA_KIND, VERSION_0_1 = 1, 1 << 32

intrinsic: Any = _intrinsic  # who calls one leaves out the context that it gets from numba


def compiled(**options) -> Callable[[Callable], Callable]:
    """numba's decorator, for what stands in the source: a checker of types may have wrapped it."""
    return lambda function: njit(**options)(inspect.unwrap(function))


@intrinsic
def _float_of_bits(context, bits):
    del context, bits
    return types.float32(types.int32), lambda _, builder, __, given: builder.bitcast(given[0], ir.FloatType())


@intrinsic
def _pointer(context, address):
    del context, address
    return types.voidptr(types.int64), lambda _, builder, __, given: builder.inttoptr(given[0], cgutils.voidptr_t)


def _fetch(builder, address):
    """What is to be read soon, to be kept in all caches."""
    of_type = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, *[WORD] * 3])
    fetch = cgutils.get_or_insert_function(builder.module, of_type, "llvm.prefetch.p0")
    builder.call(fetch, [builder.inttoptr(address, cgutils.voidptr_t), *(WORD(flag) for flag in (0, 3, 1))])


@intrinsic
def _fetch_line(context, address):
    del context, address
    return types.void(types.int64), lambda _, builder, __, given: _fetch(builder, given[0])


@compiled()
def _fetch_rows(matrix, rows, columns):
    """What of a matrix is to be read soon."""
    for row in range(rows):
        address = matrix[row].ctypes.data
        for line in range(0, 4 * columns, LINE):
            _fetch_line(address + line)


@compiled(fastmath=FAST, inline="always")
def _exp(x):
    """To 2e-7 of itself: 2^k times the polynomial of what is left, so that a loop over it runs in vectors."""
    x = LEAST if x < LEAST else x
    k = np.floor(x * LOG2_E + HALF)
    r = x - k * LN_2_HIGH - k * LN_2_LOW
    series = TERMS[0] + r * (TERMS[1] + r * (TERMS[2] + r * (TERMS[3] + r * TERMS[4])))
    return (ONE + r * (ONE + r * series)) * _float_of_bits((np.int32(k) + BIAS) << EXPONENT_BITS)


@compiled(fastmath=FAST)
def _softmax(scores, count):
    """exp(scores - their maximum) in place; their sum, and the maximum."""
    peak = scores[0]
    for place in range(1, count):
        peak = max(peak, scores[place])
    total = ZERO
    for place in range(count):
        weight = _exp(scores[place] - peak)
        scores[place] = weight
        total += weight
    return total, peak


@compiled(fastmath=FAST)
def _add_scores(scores, chosen, queries, keys, begin, count):
    """scores[chosen, begin : begin + count] = queries[chosen] @ keys[:, :count]"""
    for query in chosen:
        scores[query, begin : begin + count] = ZERO
    for dim in range(0, queries.shape[1], UNROLLED):
        k0, k1, k2, k3 = keys[dim][:count], keys[dim + 1][:count], keys[dim + 2][:count], keys[dim + 3][:count]
        k4, k5, k6, k7 = keys[dim + 4][:count], keys[dim + 5][:count], keys[dim + 6][:count], keys[dim + 7][:count]
        for query in chosen:
            of = queries[query]
            q0, q1, q2, q3 = of[dim], of[dim + 1], of[dim + 2], of[dim + 3]
            q4, q5, q6, q7 = of[dim + 4], of[dim + 5], of[dim + 6], of[dim + 7]
            row = scores[query][begin : begin + count]
            for at in range(count):
                first = (q0 * k0[at] + q1 * k1[at]) + (q2 * k2[at] + q3 * k3[at])
                row[at] += first + ((q4 * k4[at] + q5 * k5[at]) + (q6 * k6[at] + q7 * k7[at]))


@compiled(fastmath=FAST)
def _add_values(mixed, chosen, weights, values, begin, count):
    """mixed[chosen] += weights[chosen, begin : begin + count] @ values[:count]"""
    whole = count - count % UNROLLED
    for at in range(0, whole, UNROLLED):
        v0, v1, v2, v3 = values[at], values[at + 1], values[at + 2], values[at + 3]
        v4, v5, v6, v7 = values[at + 4], values[at + 5], values[at + 6], values[at + 7]
        for query in chosen:
            of = weights[query][begin + at : begin + at + UNROLLED]
            w0, w1, w2, w3, w4, w5, w6, w7 = of[0], of[1], of[2], of[3], of[4], of[5], of[6], of[7]
            row = mixed[query]
            for dim in range(row.size):
                first = (w0 * v0[dim] + w1 * v1[dim]) + (w2 * v2[dim] + w3 * v3[dim])
                row[dim] += first + ((w4 * v4[dim] + w5 * v5[dim]) + (w6 * v6[dim] + w7 * v7[dim]))
    for at in range(whole, count):
        for query in chosen:
            for dim in range(mixed.shape[1]):
                mixed[query, dim] += weights[query, begin + at] * values[at, dim]


@compiled()
def _queries_of_prefix(places, first, stop, each, prefix):
    """Numbers of the queries of these rows that read a prefix."""
    chosen = np.empty((stop - first) * each, np.int64)
    count = 0
    for row in range(first, stop):
        if places[row, 2] == prefix and places[row, 3] > 0 and places[row, 1] > 0:
            for query in range(each):
                chosen[count] = (row - first) * each + query
                count += 1
    return chosen[:count]


@compiled(fastmath=FAST)
def _attend_rows(query, keys, values, prefix_keys, prefix_values, places, mixed, first, stop, kv_head):
    time, heads, head_dim = query.shape[1:]
    sharing = heads // keys.shape[1]
    from_head, each = kv_head * sharing, time * sharing
    scores = np.empty(((stop - first) * each, prefix_keys.shape[3] + keys.shape[3]), np.float32)
    queries = np.empty((scores.shape[0], head_dim), np.float32)
    totals = np.ones(scores.shape[0], np.float32)
    scale = ONE / np.sqrt(np.float32(head_dim))
    for row in range(first, stop):
        for step in range(time):
            for head in range(sharing):
                of = queries[(row - first) * each + step * sharing + head]
                for dim in range(head_dim):
                    of[dim] = query[row, step, from_head + head, dim] * scale
    for row in range(first, stop):
        place, seen = places[row, 0], places[row, 1]
        if seen > 0:
            held = min(seen + time - 1, keys.shape[3])
            _fetch_rows(keys[place, kv_head], head_dim, held)
            _fetch_rows(values[place, kv_head], held, head_dim)
    for prefix in range(prefix_keys.shape[0]):
        chosen = _queries_of_prefix(places, first, stop, each, prefix)
        if chosen.size:
            length = places[first + chosen[0] // each, 3]
            _add_scores(scores, chosen, queries, prefix_keys[prefix, kv_head], 0, length)
    results = np.zeros_like(queries)
    for row in range(first, stop):
        place, seen, _, length = places[row]
        if seen <= 0:
            continue
        held = min(seen + time - 1, keys.shape[3])  # of the row, seen by the last step
        chosen = np.arange((row - first) * each, (row - first + 1) * each)
        _add_scores(scores, chosen, queries, keys[place, kv_head], length, held)
        for number in chosen:
            visible = length + min(seen + (number - chosen[0]) // sharing, keys.shape[3])
            totals[number], _ = _softmax(scores[number], visible)
            scores[number, visible : length + held] = ZERO
        _add_values(results, chosen, scores, values[place, kv_head], length, held)
    for prefix in range(prefix_keys.shape[0]):
        chosen = _queries_of_prefix(places, first, stop, each, prefix)
        if chosen.size:
            length = places[first + chosen[0] // each, 3]
            _add_values(results, chosen, scores, prefix_values[prefix, kv_head], 0, length)
    for number in range(results.shape[0]):
        row, step = first + number // each, number % each // sharing
        for dim in range(head_dim):
            mixed[row, step, from_head + number % sharing, dim] = results[number, dim] / totals[number]


def _has_threads() -> bool:
    """Two engines of a process may decode at once, which numba's threads stand with OpenMP alone. (Not by the number of
    cores, which numba's cache does not look at.)"""
    try:
        importlib.import_module("numba.np.ufunc.omppool")
    except ImportError:
        return False
    get_num_threads()  # which starts them: what comes from numba's cache relies on it
    return True


THREADS = _has_threads()


@compiled(cache=True, parallel=THREADS)
def attend(query, keys, values, prefix_keys, prefix_values, places, mixed):
    """See `cpu_calls.attention`; all are float32 but places."""
    rows, kv_heads = query.shape[0], keys.shape[1]
    together = max(1, TOGETHER // (query.shape[1] * query.shape[2] // kv_heads))
    groups = -(-rows // together)
    for part in prange(groups * kv_heads):
        first = part % groups * together
        stop, kv_head = min(rows, first + together), part // groups
        _attend_rows(query, keys, values, prefix_keys, prefix_values, places, mixed, first, stop, kv_head)


def _load(builder, address, kind: Any = VECTOR):
    found = builder.load(builder.inttoptr(address, kind.as_pointer()))
    found.align = 4
    return found


def _multiply_add(builder, left, right, total):
    """Add left * right to what `total` points to."""
    of_type = ir.FunctionType(VECTOR, [VECTOR] * 3)
    both = cgutils.get_or_insert_function(builder.module, of_type, f"llvm.fma.v{LANES}f32")
    builder.store(builder.call(both, [left, right, builder.load(total)]), total)


def _offset(builder, base, count, distance):
    return builder.add(base, builder.mul(LONG(count) if isinstance(count, int) else count, distance))


def _dot_adder(rows: int) -> Any:
    """sums[m, r] = matrix[m] . rows[r] for MATRIX_ROWS and so many vectors of `count` floats, which lie `stride` bytes
    apart, as an instruction for numba; the others are addresses. Written in vectors, as below: LLVM finds neither the
    form nor the fetching ahead itself."""

    def emit(_, builder, __, given):
        matrix, activations, sums, count, stride = given
        totals = [cgutils.alloca_once_value(builder, NONE) for _ in range(MATRIX_ROWS * rows)]
        zero, step, stop = LONG(0), LONG(4 * LANES), builder.mul(count, LONG(4))
        with cgutils.for_range_slice(builder, zero, stop, step, inc=True) as (place, _):
            matrix_at, rows_at = builder.add(matrix, place), builder.add(activations, place)
            for number in range(MATRIX_ROWS):
                _fetch(builder, _offset(builder, matrix_at, MATRIX_ROWS + number, stride))
            held = [_load(builder, _offset(builder, matrix_at, number, stride)) for number in range(MATRIX_ROWS)]
            for row in range(rows):
                loaded = _load(builder, _offset(builder, rows_at, row, stride))
                for number in range(MATRIX_ROWS):
                    _multiply_add(builder, held[number], loaded, totals[number * rows + row])
        of_type = ir.FunctionType(SINGLE, [SINGLE, VECTOR])
        add_up = cgutils.get_or_insert_function(builder.module, of_type, f"llvm.vector.reduce.fadd.v{LANES}f32")
        for number, total in enumerate(totals):
            added = builder.call(add_up, [SINGLE(0.0), builder.load(total)], fastmath=("reassoc",))
            builder.store(added, builder.inttoptr(builder.add(sums, LONG(4 * number)), SINGLE.as_pointer()))

    def add_dots(context, matrix, activations, sums, count, stride):
        del context, matrix, activations, sums, count, stride
        return types.void(*[types.int64] * 5), emit

    return intrinsic(add_dots)


def _tile_adder(rows: int, vectors: int) -> Any:
    """sums[r, c] += left[r, s] right[s, c] over s, for so many r and vectors of c. All are addresses and distances in
    bytes, on the left `row_bytes` from r to r and `step_bytes` from s to s. The next rows of the left side are fetched
    ahead; steps are a multiple of STEPS."""

    def emit(_, builder, __, given):
        left, row_bytes, step_bytes, right, right_bytes, steps, sums, sum_bytes = given
        everywhere = ir.Constant(ir.VectorType(WORD, LANES), [0] * LANES)

        def vectors_at(base):
            return [builder.add(base, LONG(4 * LANES * part)) for part in range(vectors)]

        homes = [home for row in range(rows) for home in vectors_at(_offset(builder, sums, row, sum_bytes))]
        totals = [cgutils.alloca_once_value(builder, _load(builder, home)) for home in homes]
        with cgutils.for_range(builder, builder.udiv(steps, LONG(STEPS))) as outer:
            begun = builder.mul(outer.index, LONG(STEPS))
            for row in range(rows, 2 * rows):
                _fetch(builder, _offset(builder, _offset(builder, left, begun, step_bytes), row, row_bytes))
            with cgutils.for_range(builder, LONG(STEPS)) as inner:
                step = builder.add(begun, inner.index)
                parts = [_load(builder, part) for part in vectors_at(_offset(builder, right, step, right_bytes))]
                from_left = _offset(builder, left, step, step_bytes)
                for row in range(rows):
                    one = _load(builder, _offset(builder, from_left, row, row_bytes), SINGLE)
                    spread = builder.shuffle_vector(builder.insert_element(NONE, one, LONG(0)), NONE, everywhere)
                    for part, total in zip(parts, totals[row * vectors :], strict=False):
                        _multiply_add(builder, spread, part, total)
        for total, home in zip(totals, homes, strict=True):
            builder.store(builder.load(total), builder.inttoptr(home, VECTOR.as_pointer())).align = 4

    def add_tile(context, left, row_bytes, step_bytes, right, right_bytes, steps, sums, sum_bytes):
        del context, left, row_bytes, step_bytes, right, right_bytes, steps, sums, sum_bytes
        return types.void(*[types.int64] * 8), emit

    return intrinsic(add_tile)


_add_four_dots, _add_six_dots = _dot_adder(4), _dot_adder(6)
_add_tile = _tile_adder(ROWS, COLUMNS // LANES)
_add_one_vector, _add_two_vectors, _add_panel = (_tile_adder(PANEL_ROWS, vectors) for vectors in (1, 2, 3))


@compiled(inline="always")
def _words(address, count):
    return carray(_pointer(address), (count,), np.int64)


@compiled(inline="always")
def _buffer(buffer, rank):
    """The data of a buffer and its dimensions."""
    of = _words(buffer, DIMENSIONS + 1)
    return _pointer(of[DATA]), _words(of[DIMENSIONS], rank)


@compiled()
def _matrix(buffer):
    data, dims = _buffer(buffer, 2)
    return carray(data, (dims[0], dims[1]), np.float32)


@compiled()
def _integers(buffer):
    data, dims = _buffer(buffer, 2)
    return carray(data, (dims[0], dims[1]), np.int32)


@compiled()
def _four_dimensions(buffer):
    data, dims = _buffer(buffer, 4)
    return carray(data, (dims[0], dims[1], dims[2], dims[3]), np.float32)


@compiled()
def _one_row(buffer):
    return _four_dimensions(buffer)[0]


@compiled(parallel=THREADS)
def _multiply_few(rows, matrices, results, many):
    count, inner = rows.shape
    together = 6 if count > 8 else 4
    filled = np.zeros((-(-count // together) * together, inner), np.float32)
    filled[:count] = rows
    for part in prange(PARTS):
        sums = np.empty(MATRIX_ROWS * together, np.float32)
        for which in range(many):
            matrix, products = _matrix(matrices[which]), _matrix(results[which])
            outputs = matrix.shape[0]
            pairs = -(-outputs // MATRIX_ROWS)
            for pair in range(pairs * part // PARTS, pairs * (part + 1) // PARTS):
                output = min(pair * MATRIX_ROWS, outputs - MATRIX_ROWS)
                from_matrix, home = matrix[output:].ctypes.data, sums.ctypes.data
                for row in range(0, count, together):
                    if together == 4:
                        _add_four_dots(from_matrix, filled[row:].ctypes.data, home, inner, 4 * inner)
                    else:
                        _add_six_dots(from_matrix, filled[row:].ctypes.data, home, inner, 4 * inner)
                    for number in range(MATRIX_ROWS):
                        for place in range(min(together, count - row)):
                            products[row + place, output + number] = sums[number * together + place]


@compiled(parallel=THREADS)
def _multiply_many(rows, matrices, results, many):
    count, inner = rows.shape
    together = max(1, CACHED // inner // PANEL) * PANEL
    for first in range(0, count, together):
        some = min(together, count - first)
        panels = -(-some // PANEL)
        turned = np.zeros((panels, inner, PANEL), np.float32)
        for panel in prange(panels):
            start = panel * PANEL
            for row in range(min(PANEL, some - start)):
                turned[panel, :, row] = rows[first + start + row]
        for part in prange(PARTS):
            sums = np.empty((PANEL_ROWS, PANEL), np.float32)
            for which in range(many):
                matrix, products = _matrix(matrices[which]), _matrix(results[which])
                outputs = matrix.shape[0]
                groups = -(-outputs // PANEL_ROWS)
                for group in range(groups * part // PARTS, groups * (part + 1) // PARTS):
                    output = min(group * PANEL_ROWS, outputs - PANEL_ROWS)
                    left, home, wide = matrix[output:].ctypes.data, sums.ctypes.data, 4 * PANEL
                    for panel in range(panels):
                        start = first + panel * PANEL
                        size = min(PANEL, count - start)
                        right = turned[panel].ctypes.data
                        sums[:] = ZERO
                        if size <= LANES:
                            _add_one_vector(left, 4 * inner, 4, right, wide, inner, home, wide)
                        elif size <= 2 * LANES:
                            _add_two_vectors(left, 4 * inner, 4, right, wide, inner, home, wide)
                        else:
                            _add_panel(left, 4 * inner, 4, right, wide, inner, home, wide)
                        for row in range(size):
                            for number in range(PANEL_ROWS):
                                products[start + row, output + number] = sums[number, row]


@compiled(cache=True)
def multiply(rows, matrices, results, many):
    """results = rows @ matrix.T for so many matrices, float32; these and the results are XLA's buffers. The inner
    length is a multiple of STEPS, and a matrix has PANEL_ROWS rows at least."""
    if rows.shape[0] <= MAX_UNTILED_ROWS:
        _multiply_few(rows, matrices, results, many)
    else:
        _multiply_many(rows, matrices, results, many)


@compiled()
def _add_tiles(left, row_bytes, step_bytes, right, right_bytes, steps, sums, sum_bytes, rows, columns):
    """`_add_tile` for more rows and columns, rounded up to whole tiles."""
    for column in range(0, columns, COLUMNS):
        for row in range(0, rows, ROWS):
            _add_tile(
                left + row * row_bytes,
                row_bytes,
                step_bytes,
                right + 4 * column,
                right_bytes,
                steps,
                sums + row * sum_bytes + 4 * column,
                sum_bytes,
            )


@compiled()
def _add_product(left, right, sums):
    """sums += left @ right, of whole tiles; `right` may have more columns."""
    _add_tiles(
        left.ctypes.data,
        left.strides[0],
        left.strides[1],
        right.ctypes.data,
        right.strides[0],
        left.shape[1],
        sums.ctypes.data,
        sums.strides[0],
        sums.shape[0],
        sums.shape[1],
    )


@compiled()
def _whole(count, of):
    return -(-count // of) * of


@compiled()
def _gathered(source, start, stop, head, scale):
    """A head of these tokens, in whole blocks: beyond the last one there are zeros."""
    found = np.zeros((_whole(stop - start, BLOCK), _whole(source.shape[2], COLUMNS)), np.float32)
    for number in range(stop - start):
        for dim in range(source.shape[2]):
            found[number, dim] = source[start + number, head, dim] * scale
    return found


@compiled()
def _set_later(scores, value):
    """Of a block that meets itself [keys, queries], what lies after a query."""
    for key in range(1, BLOCK):
        scores[key, :key] = value


@compiled(fastmath=FAST)
def _mix_segment(query, key, value, mixed, normalizers, head, start, stop):
    head_dim, from_head = query.shape[2], head * key.shape[1] // query.shape[1]
    keys, values = _gathered(key, start, stop, from_head, ONE), _gathered(value, start, stop, from_head, ONE)
    scores = np.empty((keys.shape[0], BLOCK), np.float32)
    results, totals = np.empty((BLOCK, keys.shape[1]), np.float32), np.empty(BLOCK, np.float32)
    peaks = np.empty(BLOCK, np.float32)
    for begin in range(start, stop, BLOCK):
        tokens = min(BLOCK, stop - begin)
        seen, across, down = begin - start + BLOCK, _whole(tokens, COLUMNS), _whole(tokens, ROWS)
        queries = _gathered(query, begin, begin + tokens, head, ONE / np.sqrt(np.float32(head_dim)))
        scores[:seen] = ZERO
        _add_product(keys[:seen], queries.T.copy()[:, :across], scores[:seen, :across])
        _set_later(scores[seen - BLOCK :], NOTHING)
        peaks[:] = scores[0]
        for place in range(1, seen):
            for number in range(BLOCK):
                score = scores[place, number]
                peaks[number] = score if score > peaks[number] else peaks[number]
        totals[:] = ZERO
        for place in range(seen):
            for number in range(BLOCK):
                weight = _exp(scores[place, number] - peaks[number])
                scores[place, number] = weight
                totals[number] += weight
        _set_later(scores[seen - BLOCK :], ZERO)
        results[:] = ZERO
        _add_product(scores[:seen].T, values[:seen], results[:down])
        for number in range(tokens):
            normalizers[head, begin + number, 0], share = peaks[number] + np.log(totals[number]), ONE / totals[number]
            for dim in range(head_dim):
                mixed[begin + number, head, dim] = results[number, dim] * share


@compiled(fastmath=FAST)
def _pull_segment(query, key, value, mixed, normalizers, gradient, of_query, of_key, of_value, head, start, stop):
    head_dim, from_head = query.shape[2], head * key.shape[1] // query.shape[1]
    scale = ONE / np.sqrt(np.float32(head_dim))
    keys, values = _gathered(key, start, stop, from_head, ONE), _gathered(value, start, stop, from_head, ONE)
    of_keys, of_values = np.zeros_like(keys), np.zeros_like(keys)
    weights, slopes = np.empty((BLOCK, BLOCK), np.float32), np.empty((BLOCK, BLOCK), np.float32)
    results, totals = np.empty((BLOCK, keys.shape[1]), np.float32), np.zeros(BLOCK, np.float32)
    inner = np.empty(BLOCK, np.float32)
    for begin in range(start, stop, BLOCK):
        tokens = min(BLOCK, stop - begin)
        across, down = _whole(tokens, COLUMNS), _whole(tokens, ROWS)
        queries = _gathered(query, begin, begin + tokens, head, scale)
        pulls = _gathered(gradient, begin, begin + tokens, head, ONE)
        turned, turned_pulls = queries.T.copy()[:, :across], pulls.T.copy()[:, :across]
        inner[:] = ZERO
        for number in range(tokens):
            totals[number] = normalizers[head, begin + number, 0]
            for dim in range(head_dim):
                inner[number] += pulls[number, dim] * mixed[begin + number, head, dim]
        results[:] = ZERO
        for first in range(0, begin - start + BLOCK, BLOCK):
            seen = slice(first, first + BLOCK)
            weights[:] = ZERO
            slopes[:] = ZERO
            _add_product(keys[seen], turned, weights[:, :across])
            _add_product(values[seen], turned_pulls, slopes[:, :across])
            for place in range(BLOCK):
                for number in range(BLOCK):
                    weight = _exp(weights[place, number] - totals[number])
                    weights[place, number] = weight
                    slopes[place, number] = weight * (slopes[place, number] - inner[number])
            if first == begin - start:
                _set_later(weights, ZERO)
                _set_later(slopes, ZERO)
            _add_product(slopes.T, keys[seen], results[:down])
            _add_product(slopes[:, :across], queries, of_keys[seen])
            _add_product(weights[:, :across], pulls, of_values[seen])
        for number in range(tokens):
            for dim in range(head_dim):
                of_query[begin + number, head, dim] = results[number, dim] * scale
    of_key[start:stop, head] = of_keys[: stop - start, :head_dim]
    of_value[start:stop, head] = of_values[: stop - start, :head_dim]


@compiled()
def _bounds(begins):
    """Where each segment starts, and where the last one stops."""
    return np.append(np.flatnonzero(begins == np.arange(begins.size)), begins.size)


@compiled(cache=True, parallel=THREADS)
def mix_packed(query, key, value, begins, mixed, normalizers):
    """See `cpu_calls.packed_attention`. `begins`: of each token, the first one of its segment."""
    bounds = _bounds(begins)
    segments = bounds.size - 1
    for part in prange(query.shape[1] * segments):
        head, segment = part // segments, part % segments
        _mix_segment(query, key, value, mixed, normalizers, head, bounds[segment], bounds[segment + 1])


@compiled(cache=True, parallel=THREADS)
def pull_packed(query, key, value, begins, mixed, normalizers, gradient, of_query, of_key, of_value):
    """The gradient of `mix_packed`; that of a head of keys in parts, one for each head of queries."""
    bounds = _bounds(begins)
    segments = bounds.size - 1
    for part in prange(query.shape[1] * segments):
        head, segment = part // segments, part % segments
        given = query, key, value, mixed, normalizers, gradient, of_query, of_key, of_value
        _pull_segment(*given, head, bounds[segment], bounds[segment + 1])


@compiled()
def _asked_for_version(frame):
    """XLA asks once, in place of a call."""
    if not frame[EXTENSION]:
        return False
    extension = _words(frame[EXTENSION], METADATA + 1)
    if extension[EXTENSION_KIND] & 0xFFFFFFFF != METADATA_KIND:
        return False
    _words(extension[METADATA], API_VERSION + 1)[API_VERSION] = VERSION_0_1
    return True


def _for_xla(function: Callable) -> Callable[[], Any]:
    """Compiled when it is called for: a run that only samples need not wait for what trains."""
    return functools.cache(lambda: cfunc(types.int64(types.int64), cache=True)(inspect.unwrap(function)))


@_for_xla
def attend_target(frame_address):
    """`attend` as XLA calls it: 0 is no error."""
    frame = _words(frame_address, RESULTS + 1)
    if not _asked_for_version(frame):
        given = _words(frame[ARGUMENTS], 6)
        query, keys, values = _four_dimensions(given[0]), _four_dimensions(given[1]), _four_dimensions(given[2])
        prefix_keys, prefix_values = _four_dimensions(given[3]), _four_dimensions(given[4])
        mixed = _four_dimensions(_words(frame[RESULTS], 1)[0])
        attend(query, keys, values, prefix_keys, prefix_values, _integers(given[5]), mixed)
    return 0


@_for_xla
def multiply_target(frame_address):
    """`multiply` as XLA calls it: 0 is no error."""
    frame = _words(frame_address, RESULTS + 1)
    if not _asked_for_version(frame):
        many = frame[RESULT_COUNT]
        given = _words(frame[ARGUMENTS], 1 + many)
        multiply(_matrix(given[0]), given[1:], _words(frame[RESULTS], many), many)
    return 0


@_for_xla
def mix_packed_target(frame_address):
    """`mix_packed` as XLA calls it: 0 is no error."""
    frame = _words(frame_address, RESULTS + 1)
    if not _asked_for_version(frame):
        given, results = _words(frame[ARGUMENTS], 4), _words(frame[RESULTS], 2)
        query, key, value = _one_row(given[0]), _one_row(given[1]), _one_row(given[2])
        mix_packed(query, key, value, _integers(given[3])[0], _one_row(results[0]), _one_row(results[1]))
    return 0


@_for_xla
def pull_packed_target(frame_address):
    """`pull_packed` as XLA calls it: 0 is no error."""
    frame = _words(frame_address, RESULTS + 1)
    if not _asked_for_version(frame):
        given, results = _words(frame[ARGUMENTS], 7), _words(frame[RESULTS], 3)
        query, key, value, begins = _one_row(given[0]), _one_row(given[1]), _one_row(given[2]), _integers(given[3])[0]
        saved = _one_row(given[4]), _one_row(given[5]), _one_row(given[6])
        found = _one_row(results[0]), _one_row(results[1]), _one_row(results[2])
        pull_packed(query, key, value, begins, *saved, *found)
    return 0
