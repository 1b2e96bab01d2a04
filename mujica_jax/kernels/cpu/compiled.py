"""The CPU kernels, compiled by numba and called by XLA.

There are three: attention over a KV cache (decoding), products of few rows (decoding), and
attention over packed rows (training). `calls.py` turns them into JAX functions.
docs/lab/experiments.md reports their speed.

**Paged attention.** XLA computes a separate matrix product for the few queries of each request, and
packing its operands takes longer than multiplying. Here a thread takes a group of requests and one
key and value head. The queries of all requests of the group are multiplied with the shared prefix
together. Then each request reads its own row, only up to its last token.

**Products.** XLA packs the matrix in every call. Here the matrix is read once, in the order of
memory. While some rows of the matrix are multiplied, later rows are prefetched into the second-level
cache, which supports more prefetches at the same time than the first-level cache. Products of few
rows are computed as dot products over the inner dimension, and products of more rows in tiles.

**Packed attention.** XLA runs each of its small matrix products on one core. Here a thread takes one
head of one segment, and computes one block of queries after the other. Keys after the block are
skipped. Only the scores of one block exist at a time, [keys, queries], so that all arrays are read
in the order of memory. The gradient computes the scores again (FlashAttention, Dao et al. 2022,
algorithm 4).

**Threads.** A decode step runs five kernels per layer, and some of them take less time than waking a
thread. OpenMP is not suitable: each calling thread of XLA gets its own team of threads, and with two
teams the threads sleep between calls. The threads of this module are shared by all callers. They
look for work for a while before they sleep, and take parts of a kernel one by one. If a second
caller arrives while they are busy, it computes its kernel alone.

All kernels are in one file, because numba's cache on disk checks only the file of a function. It
would miss changes in other files that the function uses.
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

CACHE_LINE_BYTES = 64
# Floats (32 bits) in a vector register. With AVX2, the twelve sums of a tile and its operands fill
# all registers.
LANES = 8

# Products of few rows are computed as dot products. DOT_OUTPUTS outputs (rows of the matrix) are
# computed together, and the matrix is prefetched PAIRS_AHEAD such pairs ahead.
DOT_OUTPUTS = 2
PAIRS_AHEAD = 3
# With more rows than this, tiles are faster than dot products.
MAX_DOT_ROWS = 12

# Products of more rows are computed in tiles of PANEL_OUTPUTS outputs and PANEL_ROWS rows. At most
# CACHED_FLOATS floats of the rows are used in one pass over the matrix, so that they stay in the
# cache of a core.
PANEL_OUTPUTS = 4
PANEL_ROWS = 3 * LANES
CACHED_FLOATS = 98_304
# Into how many parts a product is split, for each thread.
PARTS_PER_THREAD = 4

# The tiles of attention, [rows, columns]. A low tile has fewer rows and twice as many columns.
TILE_ROWS = 6
TILE_COLUMNS = 2 * LANES
LOW_TILE_ROWS = 3
# Steps along the inner dimension between two prefetches.
TILE_STEPS = 16

# Paged attention: largest number of queries per key and value head in a group of requests. A single
# request may have more.
QUERIES_PER_GROUP = 12
# Packed attention: queries per block, a multiple of the tile sizes.
BLOCK_TOKENS = 48

# LLVM may only fuse a multiplication with an addition ("contract"). Other fast-math flags would be
# wrong here. With "nnan", NaN could turn into an ordinary number. With "reassoc", LLVM may sum in
# any order. The order would differ between an inner function that is compiled alone and the same
# function inlined into its caller. A process that compiles may run either version, but a process
# that reads numba's cache runs only the inlined one. So the first run on a machine would round
# differently from later runs. Therefore sums that should use vectors are written with explicit
# lanes.
FAST_MATH = {"contract"}

# Constants of `_exp`: log2(e), ln(2) in two parts, and the Taylor coefficients of x^2 to x^6.
LOG2_E = np.float32(1.4426950408889634)
LN_2_HIGH = np.float32(0.693359375)
LN_2_LOW = np.float32(-2.12194440e-4)
EXP_FACTORS = tuple(np.float32(1 / factorial) for factorial in (2, 6, 24, 120, 720))
# Smaller arguments of `_exp` are replaced by this. e^-87 is about the smallest normal float32.
MIN_EXPONENT = np.float32(-87)
MANTISSA_BITS = np.int32(23)
EXPONENT_BIAS = np.int32(127)

# LLVM types.
FLOAT32 = ir.FloatType()
INT32 = ir.IntType(32)
INT64 = ir.IntType(64)
VECTOR = ir.VectorType(FLOAT32, LANES)
ZERO_VECTOR = ir.Constant(VECTOR, [0.0] * LANES)

# XLA's foreign function interface, version 0.1 (xla/ffi/api/c_api.h in jax.ffi.include_dir()). The
# numbers are offsets into its structures, in words of eight bytes.
FRAME_EXTENSION = 1
FRAME_ARGUMENTS = 9
FRAME_RESULT_COUNT = 12
FRAME_RESULTS = 14
EXTENSION_KIND = 1
EXTENSION_METADATA = 3
METADATA_API_VERSION = 3
BUFFER_DATA = 3
BUFFER_DIMENSIONS = 5
METADATA_KIND = 1
VERSION_0_1 = 1 << 32

# The board is an array of words of eight bytes that all threads share. The constants are indices of
# its words. Words that several threads write are in different cache lines.
# How many callers are running a kernel.
CALLERS = 0
# How many parts of the current kernel no thread has taken yet.
PARTS_LEFT = 16
# How many parts of the current kernel are finished.
PARTS_DONE = 32
# The current kernel: the address of the function that computes one part, and its first three
# arguments.
PART_FUNCTION = 48
CALL_FRAME = 49
SHARED_ARRAY = 50
EXTRA = 51
# 1 if the threads should end.
HAS_ENDED = 64
# How many threads compute a kernel, including the caller.
THREAD_COUNT = 65
# First of the words with the addresses of all part functions, in the order of the numbers below.
PART_FUNCTIONS = 80

# The numbers of the part functions.
PAGED_ATTENTION = 0
PRODUCT_BY_DOTS = 1
TRANSPOSE_PANEL = 2
PRODUCT_BY_TILES = 3
PACKED_ATTENTION = 4
PACKED_GRADIENT = 5

# A thread looks for work this many times before it sleeps. Each sleep is longer than the one before
# by NAP_STEP_MICROSECONDS, up to MAX_NAP_MICROSECONDS.
LOOKS_BEFORE_NAP = 2_000
NAP_STEP_MICROSECONDS = 20
MAX_NAP_MICROSECONDS = 5_000

# Keeps the compiled functions alive.
COMPILED: list[Any] = []
BOARD = np.zeros(128, np.int64)
BOARD_NAME = "mujica_jax_board"
binding.add_symbol(BOARD_NAME, BOARD.ctypes.data)
# Never free the board, because XLA's threads may run longer than the Python interpreter.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(BOARD))
_sched_yield = types.ExternalFunction("sched_yield", types.int32())
_usleep = types.ExternalFunction("usleep", types.int32(types.uint32))


def compiled(**options) -> Callable[[Callable], Callable]:
    """Return numba's `njit` decorator, applied to the original function of the source.

    In tests, a type checker has wrapped the function. numba cannot compile the wrapper.
    """
    return lambda function: njit(**options)(inspect.unwrap(function))


def instruction(result, *arguments) -> Callable[[Callable], Any]:
    """Return a decorator for a function `emit(builder, *values)` that emits LLVM instructions.

    Code compiled by numba can call the decorated function. `result` and `arguments` are the numba
    types of its result and its arguments.
    """

    def decorate(emit: Callable) -> Any:
        # numba reads the names of the parameters from the wrapped function.
        @functools.wraps(emit)
        def typed(context, *_):
            del context
            return result(*arguments), lambda _, builder, __, values: emit(builder, *values)

        return intrinsic(typed)

    return decorate


# Threads ------------------------------------------------------------------------------------------


@instruction(types.float32, types.int32)
def _float_of_bits(builder, bits):
    return builder.bitcast(bits, FLOAT32)


@instruction(types.voidptr, types.int64)
def _pointer(builder, address):
    return builder.inttoptr(address, cgutils.voidptr_t)


def _emit_board_word(builder, word):
    """Emit the address of a word of the board.

    The code refers to the board by its symbol name. A numeric address would be wrong in another
    process that reads this code from numba's cache.
    """
    board = builder.module.globals.get(BOARD_NAME)
    if board is None:
        board = ir.GlobalVariable(builder.module, INT64, BOARD_NAME)
    return builder.gep(board, [word])


@instruction(types.int64, types.int64)
def _read_board(builder, word):
    return builder.load_atomic(_emit_board_word(builder, word), "seq_cst", 8)


@instruction(types.void, types.int64, types.int64)
def _write_board(builder, word, value):
    builder.store_atomic(value, _emit_board_word(builder, word), "seq_cst", 8)


@instruction(types.int64, types.int64, types.int64)
def _add_to_board(builder, word, amount):
    """Add to a word of the board, and return its previous value."""
    return builder.atomic_rmw("add", _emit_board_word(builder, word), amount, "seq_cst")


@instruction(types.void, *[types.int64] * 5)
def _call_part(builder, function, frame_address, array_address, extra, part):
    function_type = ir.FunctionType(ir.VoidType(), [INT64] * 4)
    pointer = builder.inttoptr(function, function_type.as_pointer())
    builder.call(pointer, [frame_address, array_address, extra, part])


@compiled()
def _take_parts():
    """Compute parts of the current kernel until none is left.

    If other threads take the last parts first, the part number is negative and nothing is computed.
    """
    while _read_board(PARTS_LEFT) > 0:
        part = _add_to_board(PARTS_LEFT, -1) - 1
        if part >= 0:
            _call_part(
                _read_board(PART_FUNCTION),
                _read_board(CALL_FRAME),
                _read_board(SHARED_ARRAY),
                _read_board(EXTRA),
                part,
            )
            _add_to_board(PARTS_DONE, 1)


@compiled()
def _run_parts(function_number, parts, frame_address, array, extra):
    """Compute all parts of a kernel.

    The other threads help, unless they work for another caller. Each call of the part function gets
    the call frame, the address of `array`, `extra` and the number of the part.
    """
    function = _read_board(PART_FUNCTIONS + function_number)
    if _add_to_board(CALLERS, 1) == 0:
        _write_board(PART_FUNCTION, function)
        _write_board(CALL_FRAME, frame_address)
        _write_board(SHARED_ARRAY, array.ctypes.data)
        _write_board(EXTRA, extra)
        _write_board(PARTS_DONE, 0)
        _write_board(PARTS_LEFT, parts)
        _take_parts()
        while _read_board(PARTS_DONE) < parts:
            _sched_yield()
    else:
        for part in range(parts):
            _call_part(function, frame_address, array.ctypes.data, extra, part)
    _add_to_board(CALLERS, -1)


def _work_until_end():
    """Run a thread: compute parts of kernels until the program ends.

    The thread yields its core to other threads each time it finds no work.
    """
    idle_looks = 0
    while not _read_board(HAS_ENDED):
        if _read_board(PARTS_LEFT) > 0:
            _take_parts()
            idle_looks = 0
        elif idle_looks < LOOKS_BEFORE_NAP:
            idle_looks += 1
            _sched_yield()
        else:
            idle_looks += NAP_STEP_MICROSECONDS
            _usleep(min(idle_looks - LOOKS_BEFORE_NAP, MAX_NAP_MICROSECONDS))


# Vectors ------------------------------------------------------------------------------------------


def _emit_prefetch(builder, address, level=1):
    """Emit a prefetch of the cache line at `address` into the caches from `level` on."""
    prefetch_type = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, INT32, INT32, INT32])
    prefetch = cgutils.get_or_insert_function(builder.module, prefetch_type, "llvm.prefetch.p0")
    # The flags mean: for reading, with this locality, into the data caches.
    flags = [INT32(0), INT32(4 - level), INT32(1)]
    builder.call(prefetch, [builder.inttoptr(address, cgutils.voidptr_t), *flags])


@instruction(types.void, types.int64)
def _prefetch_line(builder, address):
    _emit_prefetch(builder, address, level=2)


@compiled()
def _prefetch_rows(matrix, rows, columns):
    """Prefetch the first columns of the first rows of a matrix."""
    for row in range(rows):
        address = matrix[row].ctypes.data
        for line in range(0, 4 * columns, CACHE_LINE_BYTES):
            _prefetch_line(address + line)


@compiled(fastmath=FAST_MATH, inline="always")
def _exp(x):
    """Return e^x with a relative error of 2e-7.

    The result is 2^k times a polynomial of the remainder, so a loop over it can use vector
    instructions.
    """
    x = MIN_EXPONENT if x < MIN_EXPONENT else x
    k = np.floor(x * LOG2_E + np.float32(0.5))
    r = x - k * LN_2_HIGH - k * LN_2_LOW
    series = EXP_FACTORS[3] + r * EXP_FACTORS[4]
    series = EXP_FACTORS[0] + r * (EXP_FACTORS[1] + r * (EXP_FACTORS[2] + r * series))
    power_of_two = _float_of_bits((np.int32(k) + EXPONENT_BIAS) << MANTISSA_BITS)
    return (np.float32(1) + r * (np.float32(1) + r * series)) * power_of_two


def _emit_load(builder, address, kind: Any = VECTOR):
    """Emit a load of a vector, or of another type, from an address."""
    loaded = builder.load(builder.inttoptr(address, kind.as_pointer()))
    loaded.align = 4
    return loaded


def _emit_multiply_add(builder, left, right, total):
    """Emit total += left * right, where `total` is a pointer to a vector."""
    fma_type = ir.FunctionType(VECTOR, [VECTOR] * 3)
    fma = cgutils.get_or_insert_function(builder.module, fma_type, f"llvm.fma.v{LANES}f32")
    builder.store(builder.call(fma, [left, right, builder.load(total)]), total)


def _emit_vector_sum(builder, vector):
    """Emit the sum of the floats of a vector."""
    sum_type = ir.FunctionType(FLOAT32, [FLOAT32, VECTOR])
    name = f"llvm.vector.reduce.fadd.v{LANES}f32"
    add_up = cgutils.get_or_insert_function(builder.module, sum_type, name)
    return builder.call(add_up, [FLOAT32(0.0), vector], fastmath=("reassoc",))


def _emit_offset(builder, base, count, distance):
    """Emit base + count * distance."""
    count = INT64(count) if isinstance(count, int) else count
    return builder.add(base, builder.mul(count, distance))


@instruction(types.float32, types.int64, types.int64)
def _sum_floats(builder, address, count):
    """Return the sum of `count` floats at an address. `count` is a multiple of TILE_COLUMNS."""
    totals = [cgutils.alloca_once_value(builder, ZERO_VECTOR) for _ in range(TILE_COLUMNS // LANES)]
    stop = builder.mul(count, INT64(4))
    step = INT64(4 * TILE_COLUMNS)
    with cgutils.for_range_slice(builder, INT64(0), stop, step, inc=True) as (place, _):
        for number, total in enumerate(totals):
            offset = builder.add(place, INT64(4 * LANES * number))
            loaded = _emit_load(builder, builder.add(address, offset))
            builder.store(builder.fadd(builder.load(total), loaded), total)
    vectors = [builder.load(total) for total in totals]
    return _emit_vector_sum(builder, functools.reduce(builder.fadd, vectors))


def _make_dots(rows: int) -> Any:
    """Return a function that computes sums[m, r] = matrix[m] . activations[r].

    m runs over DOT_OUTPUTS outputs, and r over `rows` rows. Each row of `matrix` and `activations`
    has `count` floats, and the rows are `stride` bytes apart. The other arguments are addresses.
    The vector instructions and the prefetching are written out here and in `_make_tile`, because
    LLVM does not find them itself.
    """

    @instruction(types.void, *[types.int64] * 5)
    def compute_dots(builder, matrix, activations, sums, count, stride):
        totals = [
            cgutils.alloca_once_value(builder, ZERO_VECTOR) for _ in range(DOT_OUTPUTS * rows)
        ]
        stop = builder.mul(count, INT64(4))
        step = INT64(CACHE_LINE_BYTES)
        with cgutils.for_range_slice(builder, INT64(0), stop, step, inc=True) as (line, _):
            for number in range(DOT_OUTPUTS):
                later_row = PAIRS_AHEAD * DOT_OUTPUTS + number
                later = _emit_offset(builder, matrix, later_row, stride)
                _emit_prefetch(builder, builder.add(later, line), level=2)
            for vector_offset in range(0, CACHE_LINE_BYTES, 4 * LANES):
                place = builder.add(line, INT64(vector_offset))
                matrix_place = builder.add(matrix, place)
                activations_place = builder.add(activations, place)
                matrix_vectors = [
                    _emit_load(builder, _emit_offset(builder, matrix_place, number, stride))
                    for number in range(DOT_OUTPUTS)
                ]
                for row in range(rows):
                    address = _emit_offset(builder, activations_place, row, stride)
                    activation = _emit_load(builder, address)
                    for number in range(DOT_OUTPUTS):
                        total = totals[number * rows + row]
                        _emit_multiply_add(builder, matrix_vectors[number], activation, total)
        for number, total in enumerate(totals):
            added = _emit_vector_sum(builder, builder.load(total))
            home = builder.add(sums, INT64(4 * number))
            builder.store(added, builder.inttoptr(home, FLOAT32.as_pointer()))

    return compute_dots


def _make_tile(rows: int, vectors: int) -> Any:
    """Return a function that computes sums[r, c] += left[r, s] right[s, c], summed over s.

    r runs over `rows` rows, c over `vectors` vectors, and s over `steps` steps, a multiple of
    TILE_STEPS. `left`, `right` and `sums` are addresses. The other arguments are distances in bytes:
    in `left` from r to r + 1 (`row_bytes`) and from s to s + 1 (`step_bytes`), in `right` from s to
    s + 1 (`right_bytes`), and in `sums` from r to r + 1 (`sum_bytes`). The rows of `left` after the
    next tile are prefetched.
    """

    @instruction(types.void, *[types.int64] * 8)
    def add_tile(builder, left, row_bytes, step_bytes, right, right_bytes, steps, sums, sum_bytes):
        first_lane = ir.Constant(ir.VectorType(INT32, LANES), [0] * LANES)

        def vector_addresses(base):
            return [builder.add(base, INT64(4 * LANES * number)) for number in range(vectors)]

        homes = []
        for row in range(rows):
            homes.extend(vector_addresses(_emit_offset(builder, sums, row, sum_bytes)))
        totals = [cgutils.alloca_once_value(builder, _emit_load(builder, home)) for home in homes]
        with cgutils.for_range(builder, builder.udiv(steps, INT64(TILE_STEPS))) as outer:
            first_step = builder.mul(outer.index, INT64(TILE_STEPS))
            for row in range(2 * rows, 3 * rows):
                later = _emit_offset(builder, left, first_step, step_bytes)
                _emit_prefetch(builder, _emit_offset(builder, later, row, row_bytes), level=2)
            with cgutils.for_range(builder, INT64(TILE_STEPS)) as inner:
                step = builder.add(first_step, inner.index)
                right_row = _emit_offset(builder, right, step, right_bytes)
                right_vectors = [
                    _emit_load(builder, address) for address in vector_addresses(right_row)
                ]
                left_column = _emit_offset(builder, left, step, step_bytes)
                for row in range(rows):
                    address = _emit_offset(builder, left_column, row, row_bytes)
                    number = _emit_load(builder, address, FLOAT32)
                    inserted = builder.insert_element(ZERO_VECTOR, number, INT64(0))
                    spread = builder.shuffle_vector(inserted, ZERO_VECTOR, first_lane)
                    row_totals = totals[row * vectors : (row + 1) * vectors]
                    for vector, total in zip(right_vectors, row_totals, strict=True):
                        _emit_multiply_add(builder, spread, vector, total)
        for total, home in zip(totals, homes, strict=True):
            stored = builder.store(builder.load(total), builder.inttoptr(home, VECTOR.as_pointer()))
            stored.align = 4

    return add_tile


_dots_of_four_rows = _make_dots(4)
_dots_of_six_rows = _make_dots(6)
_add_tile = _make_tile(TILE_ROWS, TILE_COLUMNS // LANES)
_add_low_tile = _make_tile(LOW_TILE_ROWS, 2 * TILE_COLUMNS // LANES)
_add_panel_of_one_vector = _make_tile(PANEL_OUTPUTS, 1)
_add_panel_of_two_vectors = _make_tile(PANEL_OUTPUTS, 2)
_add_panel_of_three_vectors = _make_tile(PANEL_OUTPUTS, 3)


# XLA's buffers ------------------------------------------------------------------------------------


@compiled(inline="always")
def _words(address, count):
    """Return the `count` integers of eight bytes at an address, as an array."""
    return carray(_pointer(address), (count,), np.int64)


@compiled(inline="always")
def _data_and_dimensions(buffer, rank):
    """Return the data pointer and the dimensions of one of XLA's buffers."""
    words = _words(buffer, BUFFER_DIMENSIONS + 1)
    return _pointer(words[BUFFER_DATA]), _words(words[BUFFER_DIMENSIONS], rank)


@compiled()
def _float_matrix(buffer):
    """Return a buffer of rank 2 as an array of float32."""
    data, dimensions = _data_and_dimensions(buffer, 2)
    return carray(data, (dimensions[0], dimensions[1]), np.float32)


@compiled()
def _integer_matrix(buffer):
    """Return a buffer of rank 2 as an array of int32."""
    data, dimensions = _data_and_dimensions(buffer, 2)
    return carray(data, (dimensions[0], dimensions[1]), np.int32)


@compiled()
def _float_array_of_rank_4(buffer):
    """Return a buffer of rank 4 as an array of float32."""
    data, dimensions = _data_and_dimensions(buffer, 4)
    shape = (dimensions[0], dimensions[1], dimensions[2], dimensions[3])
    return carray(data, shape, np.float32)


@compiled()
def _packed_row(buffer):
    """Return a buffer [1, tokens, heads, head_dim] as an array [tokens, heads, head_dim]."""
    return _float_array_of_rank_4(buffer)[0]


@compiled()
def _is_question_for_version(frame_address):
    """Return whether a call only asks for the version of the interface, and answer it then.

    XLA makes such a call once for each kernel.
    """
    frame = _words(frame_address, FRAME_RESULTS + 1)
    if not frame[FRAME_EXTENSION]:
        return False
    extension = _words(frame[FRAME_EXTENSION], EXTENSION_METADATA + 1)
    if extension[EXTENSION_KIND] & 0xFFFFFFFF != METADATA_KIND:
        return False
    metadata = _words(extension[EXTENSION_METADATA], METADATA_API_VERSION + 1)
    metadata[METADATA_API_VERSION] = VERSION_0_1
    return True


# Products -----------------------------------------------------------------------------------------


@compiled()
def _product_buffers(frame_address):
    """Return (number of matrices, argument buffers, result buffers, number of rows) of a call.

    The first argument buffer holds the rows, and the others hold the matrices.
    """
    frame = _words(frame_address, FRAME_RESULTS + 1)
    matrices = frame[FRAME_RESULT_COUNT]
    arguments = _words(frame[FRAME_ARGUMENTS], 1 + matrices)
    results = _words(frame[FRAME_RESULTS], matrices)
    return matrices, arguments, results, _float_matrix(arguments[0]).shape[0]


@compiled()
def _product_parts():
    """Return into how many parts a product is split."""
    return PARTS_PER_THREAD * _read_board(THREAD_COUNT)


@compiled()
def _groups_of_part(part, outputs, group_outputs):
    """Return the range (first, one after the last) of the groups of outputs of a part.

    A group has `group_outputs` outputs. Different parts never write into the same cache line.
    """
    lines = -(-outputs * 4 // CACHE_LINE_BYTES)
    parts = _product_parts()
    start = lines * part // parts * CACHE_LINE_BYTES // 4 // group_outputs
    stop = lines * (part + 1) // parts * CACHE_LINE_BYTES // 4 // group_outputs
    return start, min(stop, -(-outputs // group_outputs))


@compiled()
def _rows_per_dot(rows):
    """Return how many rows are multiplied together, for a product of `rows` rows."""
    return 6 if rows > 8 else 4


@compiled()
def _rows_in_cache(inputs):
    """Return how many rows are used in one pass over the matrix, a multiple of PANEL_ROWS.

    These rows fit into the cache of a core.
    """
    return max(1, CACHED_FLOATS // inputs // PANEL_ROWS) * PANEL_ROWS


def _product_by_dots_part(frame_address, padded_address, _, part):
    """Compute one part of the outputs of a product of few rows, as dot products.

    `padded_address` is the address of the rows, padded with rows of zeros.
    """
    matrices, arguments, results, count = _product_buffers(frame_address)
    together = _rows_per_dot(count)
    sums = np.empty(DOT_OUTPUTS * together, np.float32)
    sums_address = sums.ctypes.data
    for which in range(matrices):
        matrix = _float_matrix(arguments[1 + which])
        products = _float_matrix(results[which])
        outputs, inputs = matrix.shape
        stride = 4 * inputs
        for pair in range(*_groups_of_part(part, outputs, DOT_OUTPUTS)):
            output = min(pair * DOT_OUTPUTS, outputs - DOT_OUTPUTS)
            matrix_address = matrix[output:].ctypes.data
            for row in range(0, count, together):
                rows_address = padded_address + row * stride
                if together == 4:
                    _dots_of_four_rows(matrix_address, rows_address, sums_address, inputs, stride)
                else:
                    _dots_of_six_rows(matrix_address, rows_address, sums_address, inputs, stride)
                for number in range(DOT_OUTPUTS):
                    for place in range(min(together, count - row)):
                        products[row + place, output + number] = sums[number * together + place]


def _transpose_panel_part(frame_address, panels_address, first_row, panel):
    """Transpose PANEL_ROWS rows of the activations into one panel, [inputs, PANEL_ROWS]."""
    rows = _float_matrix(_product_buffers(frame_address)[1][0])
    start = first_row + panel * PANEL_ROWS
    inputs = rows.shape[1]
    address = panels_address + 4 * PANEL_ROWS * inputs * panel
    transposed = carray(_pointer(address), (inputs, PANEL_ROWS), np.float32)
    for row in range(min(PANEL_ROWS, rows.shape[0] - start)):
        transposed[:, row] = rows[start + row]


def _product_by_tiles_part(frame_address, panels_address, first_row, part):
    """Compute one part of the outputs in tiles, for the rows that are in the panels.

    The panels hold the rows from `first_row` on.
    """
    matrices, arguments, results, count = _product_buffers(frame_address)
    sums = np.empty((PANEL_OUTPUTS, PANEL_ROWS), np.float32)
    home = sums.ctypes.data
    panel_bytes = 4 * PANEL_ROWS
    for which in range(matrices):
        matrix = _float_matrix(arguments[1 + which])
        products = _float_matrix(results[which])
        outputs, inputs = matrix.shape
        stride = 4 * inputs
        last_row = min(count, first_row + _rows_in_cache(inputs))
        for group in range(*_groups_of_part(part, outputs, PANEL_OUTPUTS)):
            output = min(group * PANEL_OUTPUTS, outputs - PANEL_OUTPUTS)
            left = matrix[output:].ctypes.data
            for start in range(first_row, last_row, PANEL_ROWS):
                size = min(PANEL_ROWS, count - start)
                right = panels_address + stride * (start - first_row)
                sums[:] = np.float32(0)
                if size <= LANES:
                    _add_panel_of_one_vector(
                        left, stride, 4, right, panel_bytes, inputs, home, panel_bytes
                    )
                elif size <= 2 * LANES:
                    _add_panel_of_two_vectors(
                        left, stride, 4, right, panel_bytes, inputs, home, panel_bytes
                    )
                else:
                    _add_panel_of_three_vectors(
                        left, stride, 4, right, panel_bytes, inputs, home, panel_bytes
                    )
                for row in range(size):
                    for number in range(PANEL_OUTPUTS):
                        products[start + row, output + number] = sums[number, row]


@compiled()
def _compute_products(frame_address):
    """Compute rows @ matrix.T for all matrices.

    The number of inputs must be a multiple of TILE_STEPS, and each matrix must have at least
    PANEL_OUTPUTS outputs.
    """
    rows = _float_matrix(_product_buffers(frame_address)[1][0])
    count, inputs = rows.shape
    if count <= MAX_DOT_ROWS:
        padded = np.zeros((_round_up(count, _rows_per_dot(count)), inputs), np.float32)
        padded[:count] = rows
        _run_parts(PRODUCT_BY_DOTS, _product_parts(), frame_address, padded, 0)
        return
    cached_rows = _rows_in_cache(inputs)
    for first_row in range(0, count, cached_rows):
        panels = -(-min(cached_rows, count - first_row) // PANEL_ROWS)
        transposed = np.zeros((panels * inputs, PANEL_ROWS), np.float32)
        _run_parts(TRANSPOSE_PANEL, panels, frame_address, transposed, first_row)
        _run_parts(PRODUCT_BY_TILES, _product_parts(), frame_address, transposed, first_row)


# Tiles of attention -------------------------------------------------------------------------------


@compiled()
def _add_tiles(
    left, row_bytes, step_bytes, right, right_bytes, steps, sums, sum_bytes, rows, columns
):
    """Compute sums += left @ right in tiles. Rows and columns are rounded up to whole tiles.

    The arguments are those of `_make_tile`, and the numbers of rows and columns.
    """
    column = 0
    while rows <= LOW_TILE_ROWS and column + 2 * TILE_COLUMNS <= columns:
        _add_low_tile(
            left,
            row_bytes,
            step_bytes,
            right + 4 * column,
            right_bytes,
            steps,
            sums + 4 * column,
            sum_bytes,
        )
        column += 2 * TILE_COLUMNS
    while column < columns:
        for row in range(0, rows, TILE_ROWS):
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
        column += TILE_COLUMNS


@compiled()
def _add_product(left, right, sums):
    """Compute sums += left @ right for arrays of whole tiles. `right` may have more columns."""
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
def _round_up(count, multiple):
    """Round `count` up to a multiple of `multiple`."""
    return -(-count // multiple) * multiple


@compiled()
def _padded_to_tiles(matrix):
    """Return the matrix itself if it consists of whole tiles, otherwise a copy padded with zeros."""
    rows = _round_up(matrix.shape[0], TILE_STEPS)
    columns = _round_up(matrix.shape[1], TILE_COLUMNS)
    if rows == matrix.shape[0] and columns == matrix.shape[1]:
        return matrix
    padded = np.zeros((rows, columns), np.float32)
    padded[: matrix.shape[0], : matrix.shape[1]] = matrix
    return padded


@compiled(fastmath=FAST_MATH)
def _exponentiate(scores, lanes):
    """Replace the scores by exp(score - largest score), and return their sum.

    The number of scores is a multiple of TILE_COLUMNS. `lanes` is working memory, [TILE_COLUMNS].
    """
    lanes[:] = scores[:TILE_COLUMNS]
    for place in range(0, scores.size, TILE_COLUMNS):
        for lane in range(TILE_COLUMNS):
            score = scores[place + lane]
            lanes[lane] = score if score > lanes[lane] else lanes[lane]
    peak = lanes.max()
    for place in range(scores.size):
        scores[place] = _exp(scores[place] - peak)
    return _sum_floats(scores.ctypes.data, scores.size)


@compiled(fastmath=FAST_MATH)
def _add_values(weights, values, count, results):
    """Compute results += weights[:, :count] @ values[:count].

    Values from `count` on may be NaN, so they are not read.
    """
    whole = count - count % TILE_STEPS
    _add_product(weights[:, :whole], values, results)
    for place in range(whole, count):
        for number in range(weights.shape[0]):
            for dim in range(results.shape[1]):
                results[number, dim] += weights[number, place] * values[place, dim]


# Paged attention ----------------------------------------------------------------------------------


@compiled(fastmath=FAST_MATH)
def _attend_requests(
    query, keys, values, prefix_keys, prefix_values, row_table, mixed, first, stop, kv_head
):
    """Compute the attention of requests `first` to before `stop`, for one key and value head.

    All of these requests see the same part of the same prefix. The scores are [queries, tokens],
    where the tokens of the prefix come first, then those of the row. A tile may write beyond the
    scores of its request, into scores that are computed later.
    """
    time, heads, head_dim = query.shape[1:]
    width = keys.shape[3]
    sharing = heads // keys.shape[1]
    first_head = kv_head * sharing
    queries_per_request = time * sharing
    count = (stop - first) * queries_per_request
    prefix = row_table[first, 2]
    prefix_length = row_table[first, 3]
    # The column of the scores where the tokens of the row begin.
    row_start = _round_up(prefix_length, TILE_COLUMNS)
    longest = min(row_table[first:stop, 1].max() + time - 1, width)
    scale = np.float32(1) / np.sqrt(np.float32(head_dim))

    queries = np.zeros(
        (_round_up(count, TILE_ROWS) + TILE_ROWS, _round_up(head_dim, TILE_STEPS)), np.float32
    )
    scores = np.zeros((queries.shape[0], row_start + _round_up(longest, TILE_COLUMNS)), np.float32)
    results = np.zeros_like(queries)
    row_results = np.empty_like(queries[: queries_per_request + TILE_ROWS])
    lanes = np.empty(TILE_COLUMNS, np.float32)
    totals = np.ones(count, np.float32)

    # Gather the scaled queries, and prefetch the keys and values that they will read.
    for request in range(first, stop):
        for step in range(time):
            for head in range(sharing):
                number = (request - first) * queries_per_request + step * sharing + head
                target = queries[number]
                for dim in range(head_dim):
                    target[dim] = query[request, step, first_head + head, dim] * scale
        cache_row = row_table[request, 0]
        length = min(row_table[request, 1] + time - 1, width)
        if row_table[request, 1] > 0:
            _prefetch_rows(keys[cache_row, kv_head], head_dim, length)
            _prefetch_rows(values[cache_row, kv_head], length, head_dim)

    # Compute the scores over the prefix, for all requests together.
    if prefix_length > 0:
        prefix_matrix = _padded_to_tiles(prefix_keys[prefix, kv_head])
        _add_product(queries[:count], prefix_matrix, scores[:count, :row_start])

    # For each request, compute the scores over its row, the softmax, and the mix of the row's
    # values.
    for request in range(first, stop):
        cache_row = row_table[request, 0]
        visible_to_first = row_table[request, 1]
        if visible_to_first <= 0:
            continue
        start = (request - first) * queries_per_request
        length = min(visible_to_first + time - 1, width)
        numbers = slice(start, start + queries_per_request)
        scores[numbers, row_start:] = np.float32(0)
        row_scores = scores[numbers, row_start : row_start + _round_up(length, TILE_COLUMNS)]
        _add_product(queries[numbers], _padded_to_tiles(keys[cache_row, kv_head]), row_scores)
        for number in range(queries_per_request):
            visible = min(visible_to_first + number // sharing, width)
            weights = scores[start + number]
            weights[prefix_length:row_start] = np.float32(-np.inf)
            weights[row_start + visible :] = np.float32(-np.inf)
            totals[start + number] = _exponentiate(weights, lanes)
            weights[prefix_length:row_start] = np.float32(0)
            weights[row_start + visible :] = np.float32(0)
        row_results[:] = np.float32(0)
        row_values = _padded_to_tiles(values[cache_row, kv_head])
        _add_values(row_scores, row_values, length, row_results[:queries_per_request])
        results[numbers] = row_results[:queries_per_request]

    # Add the values of the prefix, for all requests together.
    if prefix_length > 0:
        prefix_matrix = _padded_to_tiles(prefix_values[prefix, kv_head])
        _add_values(scores[:count], prefix_matrix, prefix_length, results[:count])

    for number in range(count):
        request = first + number // queries_per_request
        step = number % queries_per_request // sharing
        head = first_head + number % sharing
        share = np.float32(0)
        if row_table[request, 1] > 0:
            share = np.float32(1) / totals[number]
        for dim in range(head_dim):
            mixed[request, step, head, dim] = results[number, dim] * share


@compiled()
def _requests_per_group(query_shape, kv_heads):
    """Return how many requests a thread takes together."""
    queries_per_request = query_shape[1] * query_shape[2] // kv_heads
    return max(1, QUERIES_PER_GROUP // queries_per_request)


@compiled()
def _compute_paged_attention(frame_address):
    """Compute `kernels.PagedAttention`. A part is one key and value head of a group of requests."""
    arguments = _words(_words(frame_address, FRAME_RESULTS)[FRAME_ARGUMENTS], 2)
    query = _float_array_of_rank_4(arguments[0])
    kv_heads = _float_array_of_rank_4(arguments[1]).shape[1]
    groups = -(-query.shape[0] // _requests_per_group(query.shape, kv_heads))
    _run_parts(PAGED_ATTENTION, groups * kv_heads, frame_address, arguments, groups)


def _paged_attention_part(frame_address, _, groups, part):
    """Compute one part of paged attention."""
    frame = _words(frame_address, FRAME_RESULTS + 1)
    arguments = _words(frame[FRAME_ARGUMENTS], 6)
    query = _float_array_of_rank_4(arguments[0])
    keys = _float_array_of_rank_4(arguments[1])
    values = _float_array_of_rank_4(arguments[2])
    prefix_keys = _float_array_of_rank_4(arguments[3])
    prefix_values = _float_array_of_rank_4(arguments[4])
    row_table = _integer_matrix(arguments[5])
    mixed = _float_array_of_rank_4(_words(frame[FRAME_RESULTS], 1)[0])

    group_size = _requests_per_group(query.shape, keys.shape[1])
    kv_head = part // groups
    first = part % groups * group_size
    stop = min(query.shape[0], first + group_size)
    # Consecutive requests that see the same part of the same prefix are computed together.
    for request in range(first + 1, stop + 1):
        if request == stop or (row_table[request, 2:] != row_table[first, 2:]).any():
            _attend_requests(
                query,
                keys,
                values,
                prefix_keys,
                prefix_values,
                row_table,
                mixed,
                first,
                request,
                kv_head,
            )
            first = request


# Packed attention ---------------------------------------------------------------------------------


@compiled()
def _head_of_tokens(source, start, stop, head, scale):
    """Return one head of the tokens `start` to before `stop`, times `scale`: [tokens, head_dim].

    The result is padded with zeros to whole blocks and tiles.
    """
    rows = _round_up(stop - start, BLOCK_TOKENS)
    gathered = np.zeros((rows, _round_up(source.shape[2], TILE_COLUMNS)), np.float32)
    for number in range(stop - start):
        for dim in range(source.shape[2]):
            gathered[number, dim] = source[start + number, head, dim] * scale
    return gathered


@compiled()
def _set_later_keys(scores, value):
    """Set the scores of keys that come after the query (causal mask).

    `scores` are the scores of a block of tokens with itself, [keys, queries].
    """
    for key in range(1, BLOCK_TOKENS):
        scores[key, :key] = value


@compiled(fastmath=FAST_MATH)
def _attend_segment(query, key, value, mixed, normalizers, head, start, stop):
    """Compute causal attention of one head over one segment, the tokens `start` to before `stop`.

    Writes the mixed values, and the logsumexp of the scores of each query into `normalizers`.
    """
    head_dim = query.shape[2]
    kv_head = head * key.shape[1] // query.shape[1]
    scale = np.float32(1) / np.sqrt(np.float32(head_dim))
    keys = _head_of_tokens(key, start, stop, kv_head, np.float32(1))
    values = _head_of_tokens(value, start, stop, kv_head, np.float32(1))
    scores = np.empty((keys.shape[0], BLOCK_TOKENS), np.float32)
    results = np.empty((BLOCK_TOKENS, keys.shape[1]), np.float32)
    totals = np.empty(BLOCK_TOKENS, np.float32)
    peaks = np.empty(BLOCK_TOKENS, np.float32)
    for block_start in range(start, stop, BLOCK_TOKENS):
        tokens = min(BLOCK_TOKENS, stop - block_start)
        seen = block_start - start + BLOCK_TOKENS
        columns = _round_up(tokens, TILE_COLUMNS)
        rows = _round_up(tokens, TILE_ROWS)
        queries = _head_of_tokens(query, block_start, block_start + tokens, head, scale)

        # Compute the scores, [keys, queries].
        scores[:seen] = np.float32(0)
        _add_product(keys[:seen], queries.T.copy()[:, :columns], scores[:seen, :columns])
        _set_later_keys(scores[seen - BLOCK_TOKENS :], np.float32(-np.inf))

        # Compute the softmax without its division.
        peaks[:] = scores[0]
        for place in range(1, seen):
            for number in range(BLOCK_TOKENS):
                score = scores[place, number]
                peaks[number] = score if score > peaks[number] else peaks[number]
        totals[:] = np.float32(0)
        for place in range(seen):
            for number in range(BLOCK_TOKENS):
                weight = _exp(scores[place, number] - peaks[number])
                scores[place, number] = weight
                totals[number] += weight
        _set_later_keys(scores[seen - BLOCK_TOKENS :], np.float32(0))

        # Mix the values, and divide by the totals of the softmax.
        results[:] = np.float32(0)
        _add_product(scores[:seen].T, values[:seen], results[:rows])
        for number in range(tokens):
            token = block_start + number
            normalizers[head, token, 0] = peaks[number] + np.log(totals[number])
            share = np.float32(1) / totals[number]
            for dim in range(head_dim):
                mixed[token, head, dim] = results[number, dim] * share


@compiled(fastmath=FAST_MATH)
def _add_segment_gradient(
    query,
    key,
    value,
    mixed,
    normalizers,
    gradient,
    query_gradient,
    key_gradient,
    value_gradient,
    head,
    start,
    stop,
):
    """Compute the gradients of one head over one segment, the tokens `start` to before `stop`.

    Notation: query q with mixed values m and upstream gradient g = d m, key k with value v,
    attention weight w and score s of the pair. Summed over all pairs (q, k):

        d v = w g
        d s = w (g . v - g . m)
        d q = scale * d s k
        d k = d s (scale q)
    """
    head_dim = query.shape[2]
    kv_head = head * key.shape[1] // query.shape[1]
    scale = np.float32(1) / np.sqrt(np.float32(head_dim))
    keys = _head_of_tokens(key, start, stop, kv_head, np.float32(1))
    values = _head_of_tokens(value, start, stop, kv_head, np.float32(1))
    by_keys = np.zeros_like(keys)
    by_values = np.zeros_like(keys)
    weights = np.empty((BLOCK_TOKENS, BLOCK_TOKENS), np.float32)
    by_scores = np.empty((BLOCK_TOKENS, BLOCK_TOKENS), np.float32)
    results = np.zeros((BLOCK_TOKENS, keys.shape[1]), np.float32)
    log_totals = np.zeros(BLOCK_TOKENS, np.float32)
    gradient_dot_mixed = np.empty(BLOCK_TOKENS, np.float32)
    for block_start in range(start, stop, BLOCK_TOKENS):
        tokens = min(BLOCK_TOKENS, stop - block_start)
        columns = _round_up(tokens, TILE_COLUMNS)
        rows = _round_up(tokens, TILE_ROWS)
        queries = _head_of_tokens(query, block_start, block_start + tokens, head, scale)
        upstream = _head_of_tokens(gradient, block_start, block_start + tokens, head, np.float32(1))
        transposed_queries = queries.T.copy()[:, :columns]
        transposed_upstream = upstream.T.copy()[:, :columns]
        gradient_dot_mixed[:] = np.float32(0)
        for number in range(tokens):
            token = block_start + number
            log_totals[number] = normalizers[head, token, 0]
            for dim in range(head_dim):
                results[number, dim] = upstream[number, dim] * mixed[token, head, dim]
            gradient_dot_mixed[number] = _sum_floats(results[number].ctypes.data, results.shape[1])

        # Go through all blocks of keys up to the block of the queries.
        results[:] = np.float32(0)
        for first_key in range(0, block_start - start + BLOCK_TOKENS, BLOCK_TOKENS):
            block = slice(first_key, first_key + BLOCK_TOKENS)
            weights[:] = np.float32(0)
            by_scores[:] = np.float32(0)
            _add_product(keys[block], transposed_queries, weights[:, :columns])
            _add_product(values[block], transposed_upstream, by_scores[:, :columns])
            for place in range(BLOCK_TOKENS):
                for number in range(BLOCK_TOKENS):
                    weight = _exp(weights[place, number] - log_totals[number])
                    weights[place, number] = weight
                    by_score = by_scores[place, number] - gradient_dot_mixed[number]
                    by_scores[place, number] = weight * by_score
            if first_key == block_start - start:
                _set_later_keys(weights, np.float32(0))
                _set_later_keys(by_scores, np.float32(0))
            _add_product(by_scores.T, keys[block], results[:rows])
            _add_product(by_scores[:, :columns], queries, by_keys[block])
            _add_product(weights[:, :columns], upstream, by_values[block])
        for number in range(tokens):
            for dim in range(head_dim):
                query_gradient[block_start + number, head, dim] = results[number, dim] * scale
    key_gradient[start:stop, head] = by_keys[: stop - start, :head_dim]
    value_gradient[start:stop, head] = by_values[: stop - start, :head_dim]


@compiled()
def _run_segments(function_number, frame_address):
    """Compute `kernels.PackedAttention` or its gradient. A part is one head of one segment."""
    arguments = _words(_words(frame_address, FRAME_RESULTS)[FRAME_ARGUMENTS], 4)
    # For each token, the index of the first token of its segment.
    segment_starts = _integer_matrix(arguments[3])[0]
    tokens = segment_starts.size
    bounds = np.append(np.flatnonzero(segment_starts == np.arange(tokens)), tokens)
    segments = bounds.size - 1
    heads = _packed_row(arguments[0]).shape[1]
    _run_parts(function_number, heads * segments, frame_address, bounds, segments)


def _packed_attention_part(frame_address, bounds_address, segments, part):
    """Compute one part of packed attention."""
    frame = _words(frame_address, FRAME_RESULTS + 1)
    arguments = _words(frame[FRAME_ARGUMENTS], 4)
    results = _words(frame[FRAME_RESULTS], 2)
    bounds = _words(bounds_address, segments + 1)
    segment = part % segments
    _attend_segment(
        _packed_row(arguments[0]),
        _packed_row(arguments[1]),
        _packed_row(arguments[2]),
        _packed_row(results[0]),
        _packed_row(results[1]),
        part // segments,
        bounds[segment],
        bounds[segment + 1],
    )


def _packed_gradient_part(frame_address, bounds_address, segments, part):
    """Compute one part of the gradient of packed attention.

    The gradients of keys and values are written separately for each query head. `calls.py` adds
    them up.
    """
    frame = _words(frame_address, FRAME_RESULTS + 1)
    arguments = _words(frame[FRAME_ARGUMENTS], 7)
    results = _words(frame[FRAME_RESULTS], 3)
    bounds = _words(bounds_address, segments + 1)
    segment = part % segments
    _add_segment_gradient(
        _packed_row(arguments[0]),
        _packed_row(arguments[1]),
        _packed_row(arguments[2]),
        _packed_row(arguments[4]),
        _packed_row(arguments[5]),
        _packed_row(arguments[6]),
        _packed_row(results[0]),
        _packed_row(results[1]),
        _packed_row(results[2]),
        part // segments,
        bounds[segment],
        bounds[segment + 1],
    )


# The functions that XLA calls. Each returns 0, which means no error. -------------------------------


def paged_attention(frame_address):
    """Compute `kernels.PagedAttention`."""
    if not _is_question_for_version(frame_address):
        _compute_paged_attention(frame_address)
    return 0


def products(frame_address):
    """Compute `kernels.Product`."""
    if not _is_question_for_version(frame_address):
        _compute_products(frame_address)
    return 0


def packed_attention(frame_address):
    """Compute `kernels.PackedAttention`."""
    if not _is_question_for_version(frame_address):
        _run_segments(PACKED_ATTENTION, frame_address)
    return 0


def packed_attention_gradient(frame_address):
    """Compute the gradient of `kernels.PackedAttention`."""
    if not _is_question_for_version(frame_address):
        _run_segments(PACKED_GRADIENT, frame_address)
    return 0


PARTS_OF_KERNEL = {
    paged_attention: {PAGED_ATTENTION: _paged_attention_part},
    products: {
        PRODUCT_BY_DOTS: _product_by_dots_part,
        TRANSPOSE_PANEL: _transpose_panel_part,
        PRODUCT_BY_TILES: _product_by_tiles_part,
    },
    packed_attention: {PACKED_ATTENTION: _packed_attention_part},
    packed_attention_gradient: {PACKED_GRADIENT: _packed_gradient_part},
}


@functools.cache
def address(kernel: Callable) -> int:
    """Return the address of a function that XLA can call. Compile it at the first call.

    Kernels are compiled one by one, so that a program that only samples does not wait for the
    training kernels.
    """
    _start_threads()
    for number, part in PARTS_OF_KERNEL[kernel].items():
        BOARD[PART_FUNCTIONS + number] = _compiled_for_c(types.void(*[types.int64] * 4), part)
    return _compiled_for_c(types.int64(types.int64), kernel)


@functools.cache
def _start_threads() -> None:
    """Start one thread for each core except one. They end before the Python interpreter does.

    The thread that calls a kernel works too, so one core needs no thread of this module.
    """
    cores = usable_cores()
    target = ctypes.CFUNCTYPE(None)(_compiled_for_c(types.void(), _work_until_end))
    BOARD[THREAD_COUNT] = cores
    threads = [threading.Thread(target=target, daemon=True) for _ in range(cores - 1)]
    for thread in threads:
        thread.start()

    @atexit.register
    def end() -> None:
        BOARD[HAS_ENDED] = 1
        for thread in threads:
            thread.join()


@functools.cache
def _compiled_for_c(signature, function: Callable) -> int:
    """Return the address of a C function for `function`, compiled or read from numba's cache."""
    made: Any = cfunc(signature, cache=True)(inspect.unwrap(function))
    COMPILED.append(made)
    return made.address
