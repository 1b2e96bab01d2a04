"""What a CPU spends its time with, compiled by numba and called by XLA: in decoding attention over
rows and shared prefixes and products of few rows with a matrix, in training attention of packed
rows. `calls.py` calls it; docs/LOG.md has what it gains.

Attention: XLA multiplies each row's few queries with its keys by a product of its own, which packs
more than it multiplies. Here a thread takes a few rows of one head of keys: their queries meet the
prefix together and each its own row, of which no more is read than the row holds.

Products: XLA packs the matrix in every call. Here it is read once, in the order in which it lies,
and while some of its rows are multiplied later ones are fetched into the second cache, which has
more fetches on their way than the first. Few rows are multiplied along the inner length, more in
tiles.

Packed rows: of XLA's small products none uses two cores. Here a thread takes a head of a segment,
block after block of queries, and no key after them. Only a block's scores exist at a time, keys by
queries, so that all lies in the order in which it is read; the gradient computes them again
(FlashAttention, Dao et al. 2022, algorithm 4).

Threads: a decode step has five kernels a layer, some of them shorter than it takes to wake a
thread. Those of OpenMP sleep as soon as two of XLA's threads have called them, each of which gets a
team. Ours are shared, look for work for a while before they sleep, and take parts of a kernel as
they come; a caller who finds them busy works alone.

All of it is one file: numba's cache on disk asks whether the file of a kernel has changed, and not
those that it uses.
"""

import atexit
import ctypes
import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import carray, cfunc, njit, types  # pyright: ignore[reportPrivateImportUsage]
from numba.core import cgutils
from numba.extending import intrinsic

from mujica_jax.runtime.cores import usable_cores

TOGETHER = 12  # queries of one head of keys that a thread takes at a time, if a row has no more
LANES = 8  # numbers of a vector: with AVX2 twelve sums and what they need fill the registers
MATRIX_ROWS = 2  # of a product of few rows that are multiplied together
MAX_UNTILED_ROWS = 12  # with more, tiles are faster
PANEL_ROWS, PANEL = (
    4,
    3 * LANES,
)  # of a tile of a product of more rows: of the matrix, and of the rows
CACHED = 98_304  # numbers of rows that stay in a core's cache while the matrix passes
PARTS_EACH = 4  # of a product, for each thread
ROWS, COLUMNS = 6, 2 * LANES  # of a tile of attention
FEW_ROWS = 3  # of one twice as wide
LINE = 64  # bytes of a cache's line
AHEAD = 3  # pairs of a matrix's rows that are on their way to the second cache
STEPS = 16  # of a tile, between two that fetch ahead
BLOCK = 48  # queries that meet their keys together, of packed rows: whole tiles
# Products are added without rounding in between, and no more: with "nnan" a broken number could
# look like a good one, and a sum in any order ("reassoc") has another one where an inner function
# is compiled alone than where it is part of its caller. A process that compiles may run either, one
# that reads numba's cache only the second, so that the first run on a machine would round otherwise
# than the next ones and not go on bit for bit. So sums are written in lanes.
FAST = {"contract"}
ZERO, ONE, HALF, NOTHING = np.float32(0), np.float32(1), np.float32(0.5), np.float32(-np.inf)
LOG2_E, LN_2_HIGH, LN_2_LOW = (
    np.float32(1.4426950408889634),
    np.float32(0.693359375),
    np.float32(-2.12194440e-4),
)
LEAST = np.float32(-87)  # e to this is about the least float32 that is not denormal
TERMS = tuple(np.float32(1 / factorial) for factorial in (2, 6, 24, 120, 720))
EXPONENT_BITS, BIAS = np.int32(23), np.int32(127)

VECTOR, SINGLE, LONG, WORD = (
    ir.VectorType(ir.FloatType(), LANES),
    ir.FloatType(),
    ir.IntType(64),
    ir.IntType(32),
)
NONE = ir.Constant(VECTOR, [0.0] * LANES)

# XLA's foreign function interface, version 0.1 (xla/ffi/api/c_api.h, in jax.ffi.include_dir()):
# places in structures, counted in words of eight bytes.
EXTENSION, ARGUMENTS, RESULT_COUNT, RESULTS = 1, 9, 12, 14  # of a call frame
EXTENSION_KIND, METADATA, API_VERSION = 1, 3, 3
DATA, DIMENSIONS = 3, 5  # of a buffer
METADATA_KIND, VERSION_0_1 = 1, 1 << 32

# What threads share, in words that lie some cache lines apart: who asks for work, how many of its
# parts nobody has taken, how many are done, the work itself, whether to end; and of each kernel the
# address of the function for a part.
CALLERS, LEFT, DONE, FUNCTION, FRAME, KEPT_AT, MORE, ENDED, THREADS, FUNCTIONS = (
    0,
    16,
    32,
    48,
    49,
    50,
    51,
    64,
    65,
    80,
)
ATTEND, MULTIPLY_FEW, TURN, MULTIPLY_MANY, MIX, PULL = range(6)
LOOKS, NAP, LONGEST_NAP = (
    2_000,
    20,
    5_000,
)  # for work before a thread sleeps, and microseconds that it sleeps
KEPT: list[Any] = []  # what numba compiled
BOARD, BOARD_NAME = np.zeros(128, np.int64), "mujica_jax_board"
binding.add_symbol(BOARD_NAME, BOARD.ctypes.data)
ctypes.pythonapi.Py_IncRef(ctypes.py_object(BOARD))  # never freed: XLA's threads may outlive Python
_sched_yield = types.ExternalFunction("sched_yield", types.int32())
_usleep = types.ExternalFunction("usleep", types.int32(types.uint32))


def compiled(**options) -> Callable[[Callable], Callable]:
    """numba's decorator, for what stands in the source: a checker of types may have wrapped it."""
    return lambda function: njit(**options)(inspect.unwrap(function))


def instruction(result, *given) -> Callable[[Callable], Any]:
    """What numba's code calls like a function of these types, from what emits it: `emit(builder,
    *values)`."""

    def decorate(emit: Callable) -> Any:
        @functools.wraps(emit)  # numba looks at the parameters
        def found(context, *_):
            del context
            return result(*given), lambda _, builder, __, values: emit(builder, *values)

        return intrinsic(found)

    return decorate


@instruction(types.float32, types.int32)
def _float_of_bits(builder, bits):
    return builder.bitcast(bits, SINGLE)


@instruction(types.voidptr, types.int64)
def _pointer(builder, address):
    return builder.inttoptr(address, cgutils.voidptr_t)


def _on_board(builder, word):
    """Of the board. By name: an address would be another one when numba's cache is read."""
    board = builder.module.globals.get(BOARD_NAME) or ir.GlobalVariable(
        builder.module, LONG, BOARD_NAME
    )
    return builder.gep(board, [word])


@instruction(types.int64, types.int64)
def _read(builder, word):
    return builder.load_atomic(_on_board(builder, word), "seq_cst", 8)


@instruction(types.void, types.int64, types.int64)
def _write(builder, word, value):
    builder.store_atomic(value, _on_board(builder, word), "seq_cst", 8)


@instruction(types.int64, types.int64, types.int64)
def _add(builder, word, amount):
    """What was there before."""
    return builder.atomic_rmw("add", _on_board(builder, word), amount, "seq_cst")


@instruction(types.void, *[types.int64] * 5)
def _call(builder, function, frame_at, kept_at, more, part):
    of_type = ir.FunctionType(ir.VoidType(), [LONG] * 4)
    builder.call(builder.inttoptr(function, of_type.as_pointer()), [frame_at, kept_at, more, part])


@compiled()
def _take_parts():
    """Who finds some left when all are taken gets a number below 0."""
    while _read(LEFT) > 0:
        part = _add(LEFT, -1) - 1
        if part >= 0:
            _call(_read(FUNCTION), _read(FRAME), _read(KEPT_AT), _read(MORE), part)
            _add(DONE, 1)


@compiled()
def _share(kernel, parts, frame_at, kept, more):
    """Do a kernel's work in so many parts, with the threads that wait; alone, if another caller has
    them."""
    function = _read(FUNCTIONS + kernel)
    if _add(CALLERS, 1) == 0:
        _write(FUNCTION, function)
        _write(FRAME, frame_at)
        _write(KEPT_AT, kept.ctypes.data)
        _write(MORE, more)
        _write(DONE, 0)
        _write(LEFT, parts)
        _take_parts()
        while _read(DONE) < parts:
            _sched_yield()
    else:
        for part in range(parts):
            _call(function, frame_at, kept.ctypes.data, more, part)
    _add(CALLERS, -1)


def _help():
    """What a thread does until the program ends. It gives its core to whoever wants it, at each
    look."""
    idle = 0
    while not _read(ENDED):
        if _read(LEFT) > 0:
            _take_parts()
            idle = 0
        elif idle < LOOKS:
            idle += 1
            _sched_yield()
        else:
            idle += NAP
            _usleep(min(idle - LOOKS, LONGEST_NAP))


def _fetch(builder, address, level=1):
    """What is to be read soon, into the caches from this level on."""
    of_type = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, *[WORD] * 3])
    fetch = cgutils.get_or_insert_function(builder.module, of_type, "llvm.prefetch.p0")
    builder.call(
        fetch,
        [builder.inttoptr(address, cgutils.voidptr_t), *(WORD(flag) for flag in (0, 4 - level, 1))],
    )


@instruction(types.void, types.int64)
def _fetch_line(builder, address):
    _fetch(builder, address, level=2)


@compiled()
def _fetch_rows(matrix, rows, columns):
    """What of a matrix is to be read soon."""
    for row in range(rows):
        address = matrix[row].ctypes.data
        for line in range(0, 4 * columns, LINE):
            _fetch_line(address + line)


@compiled(fastmath=FAST, inline="always")
def _exp(x):
    """To 2e-7 of itself: 2^k times the polynomial of what is left, so that a loop over it runs in
    vectors."""
    x = LEAST if x < LEAST else x
    k = np.floor(x * LOG2_E + HALF)
    r = x - k * LN_2_HIGH - k * LN_2_LOW
    series = TERMS[0] + r * (TERMS[1] + r * (TERMS[2] + r * (TERMS[3] + r * TERMS[4])))
    return (ONE + r * (ONE + r * series)) * _float_of_bits((np.int32(k) + BIAS) << EXPONENT_BITS)


def _load(builder, address, kind: Any = VECTOR):
    found = builder.load(builder.inttoptr(address, kind.as_pointer()))
    found.align = 4
    return found


def _multiply_add(builder, left, right, total):
    """Add left * right to what `total` points to."""
    of_type = ir.FunctionType(VECTOR, [VECTOR] * 3)
    both = cgutils.get_or_insert_function(builder.module, of_type, f"llvm.fma.v{LANES}f32")
    builder.store(builder.call(both, [left, right, builder.load(total)]), total)


def _add_up(builder, vector):
    of_type = ir.FunctionType(SINGLE, [SINGLE, VECTOR])
    add_up = cgutils.get_or_insert_function(
        builder.module, of_type, f"llvm.vector.reduce.fadd.v{LANES}f32"
    )
    return builder.call(add_up, [SINGLE(0.0), vector], fastmath=("reassoc",))


@instruction(types.float32, types.int64, types.int64)
def _sum(builder, address, count):
    """Of so many floats, pairs of whole vectors."""
    totals = [cgutils.alloca_once_value(builder, NONE) for _ in range(COLUMNS // LANES)]
    stop, step = builder.mul(count, LONG(4)), LONG(4 * COLUMNS)
    with cgutils.for_range_slice(builder, LONG(0), stop, step, inc=True) as (place, _):
        for number, total in enumerate(totals):
            found = _load(
                builder, builder.add(address, builder.add(place, LONG(4 * LANES * number)))
            )
            builder.store(builder.fadd(builder.load(total), found), total)
    return _add_up(builder, functools.reduce(builder.fadd, map(builder.load, totals)))


def _offset(builder, base, count, distance):
    return builder.add(
        base, builder.mul(LONG(count) if isinstance(count, int) else count, distance)
    )


def _dot_adder(rows: int) -> Any:
    """sums[m, r] = matrix[m] . rows[r] for MATRIX_ROWS and so many vectors of `count` floats, which
    lie `stride` bytes apart, as an instruction for numba; the others are addresses. Written in
    vectors, as below: LLVM finds neither the form nor the fetching ahead itself."""

    @instruction(types.void, *[types.int64] * 5)
    def add_dots(builder, matrix, activations, sums, count, stride):
        totals = [cgutils.alloca_once_value(builder, NONE) for _ in range(MATRIX_ROWS * rows)]
        zero, step, stop = LONG(0), LONG(LINE), builder.mul(count, LONG(4))
        with cgutils.for_range_slice(builder, zero, stop, step, inc=True) as (line, _):
            for number in range(MATRIX_ROWS):
                ahead = _offset(builder, matrix, AHEAD * MATRIX_ROWS + number, stride)
                _fetch(builder, builder.add(ahead, line), level=2)
            for part in range(0, LINE, 4 * LANES):
                place = builder.add(line, LONG(part))
                matrix_at, rows_at = builder.add(matrix, place), builder.add(activations, place)
                held = [
                    _load(builder, _offset(builder, matrix_at, number, stride))
                    for number in range(MATRIX_ROWS)
                ]
                for row in range(rows):
                    loaded = _load(builder, _offset(builder, rows_at, row, stride))
                    for number in range(MATRIX_ROWS):
                        _multiply_add(builder, held[number], loaded, totals[number * rows + row])
        for number, total in enumerate(totals):
            added = _add_up(builder, builder.load(total))
            builder.store(
                added, builder.inttoptr(builder.add(sums, LONG(4 * number)), SINGLE.as_pointer())
            )

    return add_dots


def _tile_adder(rows: int, vectors: int) -> Any:
    """sums[r, c] += left[r, s] right[s, c] over s, for so many r and vectors of c. All are
    addresses and distances in bytes, on the left `row_bytes` from r to r and `step_bytes` from s to
    s. The rows of the left side after the next ones are fetched ahead; steps are a multiple of
    STEPS."""

    @instruction(types.void, *[types.int64] * 8)
    def add_tile(builder, left, row_bytes, step_bytes, right, right_bytes, steps, sums, sum_bytes):
        everywhere = ir.Constant(ir.VectorType(WORD, LANES), [0] * LANES)

        def vectors_at(base):
            return [builder.add(base, LONG(4 * LANES * part)) for part in range(vectors)]

        homes = [
            home
            for row in range(rows)
            for home in vectors_at(_offset(builder, sums, row, sum_bytes))
        ]
        totals = [cgutils.alloca_once_value(builder, _load(builder, home)) for home in homes]
        with cgutils.for_range(builder, builder.udiv(steps, LONG(STEPS))) as outer:
            begun = builder.mul(outer.index, LONG(STEPS))
            for row in range(2 * rows, 3 * rows):
                _fetch(
                    builder,
                    _offset(builder, _offset(builder, left, begun, step_bytes), row, row_bytes),
                    level=2,
                )
            with cgutils.for_range(builder, LONG(STEPS)) as inner:
                step = builder.add(begun, inner.index)
                parts = [
                    _load(builder, part)
                    for part in vectors_at(_offset(builder, right, step, right_bytes))
                ]
                from_left = _offset(builder, left, step, step_bytes)
                for row in range(rows):
                    one = _load(builder, _offset(builder, from_left, row, row_bytes), SINGLE)
                    spread = builder.shuffle_vector(
                        builder.insert_element(NONE, one, LONG(0)), NONE, everywhere
                    )
                    for part, total in zip(parts, totals[row * vectors :], strict=False):
                        _multiply_add(builder, spread, part, total)
        for total, home in zip(totals, homes, strict=True):
            builder.store(
                builder.load(total), builder.inttoptr(home, VECTOR.as_pointer())
            ).align = 4

    return add_tile


_add_four_dots, _add_six_dots = _dot_adder(4), _dot_adder(6)
_add_tile, _add_low_tile = (
    _tile_adder(ROWS, COLUMNS // LANES),
    _tile_adder(FEW_ROWS, 2 * COLUMNS // LANES),
)
_add_one_vector, _add_two_vectors, _add_panel = (
    _tile_adder(PANEL_ROWS, vectors) for vectors in (1, 2, 3)
)


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


@compiled()
def _operands(frame_at):
    """Of products: how many matrices, buffers of the rows and of these, buffers of the results, how
    many rows."""
    frame = _words(frame_at, RESULTS + 1)
    many = frame[RESULT_COUNT]
    given = _words(frame[ARGUMENTS], 1 + many)
    return many, given, _words(frame[RESULTS], many), _matrix(given[0]).shape[0]


@compiled()
def _of_part(part, outputs, each):
    """Which groups of `each` rows of a matrix: no two parts write into one line of a cache."""
    lines, parts = -(-outputs * 4 // LINE), PARTS_EACH * _read(THREADS)
    start, stop = (
        lines * part // parts * LINE // 4 // each,
        lines * (part + 1) // parts * LINE // 4 // each,
    )
    return start, min(stop, -(-outputs // each))


@compiled()
def _together(count):
    return 6 if count > 8 else 4


@compiled()
def _in_cache(inner):
    return max(1, CACHED // inner // PANEL) * PANEL


def _multiply_few(frame_at, filled_at, _, part):
    many, given, results, count = _operands(frame_at)
    together = _together(count)
    sums = np.empty(MATRIX_ROWS * together, np.float32)
    for which in range(many):
        matrix, products = _matrix(given[1 + which]), _matrix(results[which])
        outputs, inner = matrix.shape
        for pair in range(*_of_part(part, outputs, MATRIX_ROWS)):
            output = min(pair * MATRIX_ROWS, outputs - MATRIX_ROWS)
            from_matrix, home = matrix[output:].ctypes.data, sums.ctypes.data
            for row in range(0, count, together):
                if together == 4:
                    _add_four_dots(from_matrix, filled_at + 4 * row * inner, home, inner, 4 * inner)
                else:
                    _add_six_dots(from_matrix, filled_at + 4 * row * inner, home, inner, 4 * inner)
                for number in range(MATRIX_ROWS):
                    for place in range(min(together, count - row)):
                        products[row + place, output + number] = sums[number * together + place]


def _turn(frame_at, turned_at, first, panel):
    rows = _matrix(_operands(frame_at)[1][0])
    start, inner = first + panel * PANEL, rows.shape[1]
    turned = carray(_pointer(turned_at + 4 * PANEL * inner * panel), (inner, PANEL), np.float32)
    for row in range(min(PANEL, rows.shape[0] - start)):
        turned[:, row] = rows[start + row]


def _multiply_many(frame_at, turned_at, first, part):
    many, given, results, count = _operands(frame_at)
    sums = np.empty((PANEL_ROWS, PANEL), np.float32)
    for which in range(many):
        matrix, products = _matrix(given[1 + which]), _matrix(results[which])
        outputs, inner = matrix.shape
        for group in range(*_of_part(part, outputs, PANEL_ROWS)):
            output = min(group * PANEL_ROWS, outputs - PANEL_ROWS)
            left, home, wide = matrix[output:].ctypes.data, sums.ctypes.data, 4 * PANEL
            for start in range(first, min(count, first + _in_cache(inner)), PANEL):
                size = min(PANEL, count - start)
                right = turned_at + 4 * inner * (start - first)
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


@compiled()
def _multiply(frame_at):
    """results = rows @ matrix.T for so many matrices, float32. The inner length is a multiple of
    STEPS, and a matrix has PANEL_ROWS rows at least."""
    rows = _matrix(_operands(frame_at)[1][0])
    count, inner = rows.shape
    if count <= MAX_UNTILED_ROWS:
        filled = np.zeros((_whole(count, _together(count)), inner), np.float32)
        filled[:count] = rows
        _share(MULTIPLY_FEW, PARTS_EACH * _read(THREADS), frame_at, filled, 0)
        return
    together = _in_cache(inner)
    for first in range(0, count, together):
        panels = -(-min(together, count - first) // PANEL)
        turned = np.zeros((panels * inner, PANEL), np.float32)
        _share(TURN, panels, frame_at, turned, first)
        _share(MULTIPLY_MANY, PARTS_EACH * _read(THREADS), frame_at, turned, first)


@compiled()
def _add_tiles(
    left, row_bytes, step_bytes, right, right_bytes, steps, sums, sum_bytes, rows, columns
):
    """`_add_tile` for more rows and columns, rounded up to whole tiles."""
    column = 0
    while rows <= FEW_ROWS and column + 2 * COLUMNS <= columns:
        from_right, home = right + 4 * column, sums + 4 * column
        _add_low_tile(left, row_bytes, step_bytes, from_right, right_bytes, steps, home, sum_bytes)
        column += 2 * COLUMNS
    while column < columns:
        for row in range(0, rows, ROWS):
            from_left, from_right = left + row * row_bytes, right + 4 * column
            home = sums + row * sum_bytes + 4 * column
            _add_tile(
                from_left, row_bytes, step_bytes, from_right, right_bytes, steps, home, sum_bytes
            )
        column += COLUMNS


@compiled()
def _add_product(left, right, sums):
    """sums += left @ right, of whole tiles; `right` may have more columns."""
    given = (
        left.ctypes.data,
        left.strides[0],
        left.strides[1],
        right.ctypes.data,
        right.strides[0],
        left.shape[1],
    )
    _add_tiles(*given, sums.ctypes.data, sums.strides[0], sums.shape[0], sums.shape[1])


@compiled()
def _whole(count, of):
    return -(-count // of) * of


@compiled()
def _in_tiles(matrix):
    """What whole tiles cover: the matrix, or a copy that zeros surround."""
    rows, columns = _whole(matrix.shape[0], STEPS), _whole(matrix.shape[1], COLUMNS)
    if rows == matrix.shape[0] and columns == matrix.shape[1]:
        return matrix
    found = np.zeros((rows, columns), np.float32)
    found[: matrix.shape[0], : matrix.shape[1]] = matrix
    return found


@compiled(fastmath=FAST)
def _softmax(scores, lanes):
    """exp(scores - their maximum) in place, of whole vectors; their sum."""
    lanes[:] = scores[:COLUMNS]
    for place in range(0, scores.size, COLUMNS):
        for lane in range(COLUMNS):
            score = scores[place + lane]
            lanes[lane] = score if score > lanes[lane] else lanes[lane]
    peak = lanes.max()
    for place in range(scores.size):
        scores[place] = _exp(scores[place] - peak)
    return _sum(scores.ctypes.data, scores.size)


@compiled(fastmath=FAST)
def _add_values(weights, values, count, results):
    """results += weights[:, :count] @ values[:count]: what lies behind may be broken, and is not
    read."""
    whole = count - count % STEPS
    _add_product(weights[:, :whole], values, results)
    for place in range(whole, count):
        for number in range(weights.shape[0]):
            for dim in range(results.shape[1]):
                results[number, dim] += weights[number, place] * values[place, dim]


@compiled(fastmath=FAST)
def _attend_rows(
    query, keys, values, prefix_keys, prefix_values, places, mixed, first, stop, kv_head
):
    """Rows that read as much of the same prefix. A tile may reach beyond a row's scores, into what
    is written later."""
    time, heads, head_dim = query.shape[1:]
    sharing, most = heads // keys.shape[1], keys.shape[3]
    each, from_head, length = time * sharing, kv_head * sharing, places[first, 3]
    count, own = (stop - first) * each, _whole(length, COLUMNS)
    longest = min(places[first:stop, 1].max() + time - 1, most)
    queries = np.zeros((_whole(count, ROWS) + ROWS, _whole(head_dim, STEPS)), np.float32)
    scores = np.zeros((queries.shape[0], own + _whole(longest, COLUMNS)), np.float32)
    results, of_row = np.zeros_like(queries), np.empty_like(queries[: each + ROWS])
    lanes = np.empty(COLUMNS, np.float32)
    totals, scale = np.ones(count, np.float32), ONE / np.sqrt(np.float32(head_dim))
    for row in range(first, stop):
        for step in range(time):
            for head in range(sharing):
                of = queries[(row - first) * each + step * sharing + head]
                for dim in range(head_dim):
                    of[dim] = query[row, step, from_head + head, dim] * scale
        place, held = places[row, 0], min(places[row, 1] + time - 1, most)
        if places[row, 1] > 0:
            _fetch_rows(keys[place, kv_head], head_dim, held)
            _fetch_rows(values[place, kv_head], held, head_dim)
    prefix = places[first, 2]
    if length > 0:
        _add_product(queries[:count], _in_tiles(prefix_keys[prefix, kv_head]), scores[:count, :own])
    for row in range(first, stop):
        place, seen, begin = places[row, 0], places[row, 1], (row - first) * each
        if seen <= 0:
            continue
        held, chosen = min(seen + time - 1, most), slice(begin, begin + each)
        scores[chosen, own:] = ZERO
        of_own = scores[chosen, own : own + _whole(held, COLUMNS)]
        _add_product(queries[chosen], _in_tiles(keys[place, kv_head]), of_own)
        for number in range(each):
            visible, weights = min(seen + number // sharing, most), scores[begin + number]
            weights[length:own] = NOTHING
            weights[own + visible :] = NOTHING
            totals[begin + number] = _softmax(weights, lanes)
            weights[length:own] = ZERO
            weights[own + visible :] = ZERO
        of_row[:] = ZERO
        _add_values(of_own, _in_tiles(values[place, kv_head]), held, of_row[:each])
        results[chosen] = of_row[:each]
    if length > 0:
        _add_values(
            scores[:count], _in_tiles(prefix_values[prefix, kv_head]), length, results[:count]
        )
    for number in range(count):
        row, step = first + number // each, number % each // sharing
        share = ONE / totals[number] if places[row, 1] > 0 else ZERO
        for dim in range(head_dim):
            mixed[row, step, from_head + number % sharing, dim] = results[number, dim] * share


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
    keys, values = (
        _gathered(key, start, stop, from_head, ONE),
        _gathered(value, start, stop, from_head, ONE),
    )
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
            normalizers[head, begin + number, 0], share = (
                peaks[number] + np.log(totals[number]),
                ONE / totals[number],
            )
            for dim in range(head_dim):
                mixed[begin + number, head, dim] = results[number, dim] * share


@compiled(fastmath=FAST)
def _pull_segment(
    query, key, value, mixed, normalizers, gradient, of_query, of_key, of_value, head, start, stop
):
    head_dim, from_head = query.shape[2], head * key.shape[1] // query.shape[1]
    scale = ONE / np.sqrt(np.float32(head_dim))
    keys, values = (
        _gathered(key, start, stop, from_head, ONE),
        _gathered(value, start, stop, from_head, ONE),
    )
    of_keys, of_values = np.zeros_like(keys), np.zeros_like(keys)
    weights, slopes = np.empty((BLOCK, BLOCK), np.float32), np.empty((BLOCK, BLOCK), np.float32)
    results, totals = np.zeros((BLOCK, keys.shape[1]), np.float32), np.zeros(BLOCK, np.float32)
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
                results[number, dim] = pulls[number, dim] * mixed[begin + number, head, dim]
            inner[number] = _sum(results[number].ctypes.data, results.shape[1])
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
def _asked_for_version(frame_at):
    """XLA asks once, in place of a call."""
    frame = _words(frame_at, RESULTS + 1)
    if not frame[EXTENSION]:
        return False
    extension = _words(frame[EXTENSION], METADATA + 1)
    if extension[EXTENSION_KIND] & 0xFFFFFFFF != METADATA_KIND:
        return False
    _words(extension[METADATA], API_VERSION + 1)[API_VERSION] = VERSION_0_1
    return True


@compiled()
def _attend(frame_at):
    """See `calls.paged_attention`."""
    given = _words(_words(frame_at, RESULTS)[ARGUMENTS], 2)
    query, kv_heads = _four_dimensions(given[0]), _four_dimensions(given[1]).shape[1]
    groups = -(-query.shape[0] // _rows_together(query.shape, kv_heads))
    _share(ATTEND, groups * kv_heads, frame_at, given, groups)


@compiled()
def _rows_together(shape, kv_heads):
    return max(1, TOGETHER // (shape[1] * shape[2] // kv_heads))


def _attend_part(frame_at, _, groups, part):
    frame = _words(frame_at, RESULTS + 1)
    given = _words(frame[ARGUMENTS], 6)
    query, keys, values = (
        _four_dimensions(given[0]),
        _four_dimensions(given[1]),
        _four_dimensions(given[2]),
    )
    prefix_keys, prefix_values = _four_dimensions(given[3]), _four_dimensions(given[4])
    mixed, together = (
        _four_dimensions(_words(frame[RESULTS], 1)[0]),
        _rows_together(query.shape, keys.shape[1]),
    )
    first, kv_head = part % groups * together, part // groups
    stop, places = min(query.shape[0], first + together), _integers(given[5])
    for row in range(first + 1, stop + 1):
        if row == stop or (places[row, 2:] != places[first, 2:]).any():
            _attend_rows(
                query, keys, values, prefix_keys, prefix_values, places, mixed, first, row, kv_head
            )
            first = row


@compiled()
def _share_segments(kernel, frame_at):
    """See `calls.packed_attention`: a part is a head of a segment."""
    given = _words(_words(frame_at, RESULTS)[ARGUMENTS], 4)
    begins = _integers(given[3])[0]  # of each token, the first one of its segment
    bounds = np.append(np.flatnonzero(begins == np.arange(begins.size)), begins.size)
    heads, segments = _one_row(given[0]).shape[1], bounds.size - 1
    _share(kernel, heads * segments, frame_at, bounds, segments)


def _mix_part(frame_at, bounds_at, segments, part):
    frame = _words(frame_at, RESULTS + 1)
    given, results = _words(frame[ARGUMENTS], 4), _words(frame[RESULTS], 2)
    of_row = (
        _one_row(given[0]),
        _one_row(given[1]),
        _one_row(given[2]),
        _one_row(results[0]),
        _one_row(results[1]),
    )
    bounds, head, segment = _words(bounds_at, segments + 1), part // segments, part % segments
    _mix_segment(*of_row, head, bounds[segment], bounds[segment + 1])


def _pull_part(frame_at, bounds_at, segments, part):
    """The gradient of that; a head of keys has it in parts, one for each head of queries."""
    frame = _words(frame_at, RESULTS + 1)
    given, results = _words(frame[ARGUMENTS], 7), _words(frame[RESULTS], 3)
    of_row = _one_row(given[0]), _one_row(given[1]), _one_row(given[2])
    saved = _one_row(given[4]), _one_row(given[5]), _one_row(given[6])
    found = _one_row(results[0]), _one_row(results[1]), _one_row(results[2])
    bounds, head, segment = _words(bounds_at, segments + 1), part // segments, part % segments
    _pull_segment(*of_row, *saved, *found, head, bounds[segment], bounds[segment + 1])


def attend(frame_at):
    """As XLA calls it, like the next ones: 0 is no error."""
    if not _asked_for_version(frame_at):
        _attend(frame_at)
    return 0


def multiply(frame_at):
    if not _asked_for_version(frame_at):
        _multiply(frame_at)
    return 0


def mix_packed(frame_at):
    if not _asked_for_version(frame_at):
        _share_segments(MIX, frame_at)
    return 0


def pull_packed(frame_at):
    if not _asked_for_version(frame_at):
        _share_segments(PULL, frame_at)
    return 0


PARTS_OF = {
    attend: {ATTEND: _attend_part},
    multiply: {MULTIPLY_FEW: _multiply_few, TURN: _turn, MULTIPLY_MANY: _multiply_many},
    mix_packed: {MIX: _mix_part},
    pull_packed: {PULL: _pull_part},
}


@functools.cache
def address(kernel: Callable) -> int:
    """Of what XLA calls. Compiled when it is asked for: a run that only samples need not wait for
    what trains."""
    _start_threads()
    for number, part in PARTS_OF[kernel].items():
        BOARD[FUNCTIONS + number] = _compiled_for_c(types.void(*[types.int64] * 4), part)
    return _compiled_for_c(types.int64(types.int64), kernel)


@functools.cache
def _start_threads() -> None:
    """One for each core but one, so that whoever calls a kernel works too. They end before Python
    does."""
    cores = usable_cores()
    target = ctypes.CFUNCTYPE(None)(_compiled_for_c(types.void(), _help))
    BOARD[THREADS] = cores
    threads = [threading.Thread(target=target, daemon=True) for _ in range(cores - 1)]
    for thread in threads:
        thread.start()

    @atexit.register
    def end() -> None:
        BOARD[ENDED] = 1
        for thread in threads:
            thread.join()


@functools.cache
def _compiled_for_c(signature, function: Callable) -> int:
    made: Any = cfunc(signature, cache=True)(inspect.unwrap(function))
    KEPT.append(made)
    return made.address
