"""linear_scan_vjp on NumPy arrays and by its kernels, within its bounds and by the properties it promises."""

from dataclasses import replace
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_linear import BLOCK, DTYPES, LANES, SERIAL, SPLIT, accumulation, on_host_full, plans, roundoff, views, without
from test_segments import MARKS, as_offsets

import cuscan
from cuscan import LinearGradients, _linear_backward
from cuscan._plan import Lanes, forced
from cuscan.testing import Layout, LinearGradientProblem, LinearProblem, Plan, _bounds, oracle

F32, BF16 = np.float32, ml_dtypes.bfloat16
DIRECTIONS = pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
NAMES = LinearGradients._fields


def rng(seed=0):
    return np.random.default_rng(seed)


def case(shape, axis, dtype=F32, *, exact=False, a_shape=None, sequences=(), seed=0, **more):
    """Arguments of a call with every gradient. Exact ones have gates in {-1, 0, 1} and small integers."""
    r, dtype, state = rng(seed), np.dtype(dtype), accumulation(dtype)
    is_complex = dtype.kind == "c"

    def draw(shape, dtype):
        x = r.integers(-4, 5, shape) if exact else r.normal(size=shape)
        y = r.integers(-4, 5, shape) if exact else r.normal(size=shape)
        return (x + 1j * y if is_complex else x).astype(dtype)

    a_shape = shape if a_shape is None else a_shape
    gates = r.choice([-1, 0, 1], a_shape, p=[0.49, 0.02, 0.49]) if exact else r.uniform(-1.05, 1.05, a_shape)
    if is_complex:
        gates = gates * (np.array([1, 1j, -1, -1j])[r.integers(0, 4, a_shape)] if exact else np.exp(1j * gates))
    ends = (*sequences, *without(shape, axis))
    return {
        "a": gates.astype(dtype), "h": draw(shape, dtype), "grad_h": draw(shape, dtype), "h0": draw(ends, state),
        "grad_last_state": draw(ends, state), "axis": axis, **more,
    }  # fmt: skip


def run(executor, arguments, plan=None, **more):
    with forced(**(plan or {})):
        return executor(cuscan.linear_scan_vjp, **{**arguments, **more})


def check(executor, arguments, every_plan=(None,), *, exact=False, grad_dtype=None):
    """Each gradient with each plan, and its shape and type; gives the last ones."""
    first = arguments["h"] if np.isscalar(arguments["a"]) else arguments["a"]
    given = dict(arguments)
    if np.isscalar(given["a"]):
        given["a"] = np.asarray(given["a"], accumulation(first.dtype))
    expected = _bounds.linear_scan_vjp(**given, eps=roundoff(first), exact=exact)
    before = {name: x.copy() for name, x in arguments.items() if isinstance(x, np.ndarray)}
    for plan in every_plan:
        gradients = run(executor, arguments, plan, grad_dtype=grad_dtype)
        types = {"a": first.dtype, "b": first.dtype, "h0": accumulation(first.dtype)}
        there = {"a": not np.isscalar(arguments["a"]), "b": True, "h0": arguments["h0"] is not None}
        for name, x in zip(NAMES, gradients, strict=True):
            assert (x is not None) == there[name], name
            if x is None:
                continue
            value, bound = expected[name]
            assert (x.shape, x.dtype) == (value.shape, np.dtype(grad_dtype or types[name])), name
            assert x.flags.c_contiguous
            assert x.flags.writeable
            if exact:
                assert not bound.any()
                np.testing.assert_array_equal(x, value, err_msg=f"{name} {plan}")
            else:
                try:
                    oracle.assert_scan_close(x, value, bound)
                except AssertionError as error:
                    raise AssertionError(f"{name} {plan}: {error}") from None
    for name, x in before.items():
        np.testing.assert_array_equal(arguments[name], x, err_msg=name)
    return gradients


def bits(gradients):
    return [None if x is None else np.ascontiguousarray(x).view(np.uint8) for x in gradients]


def assert_same_bits(gradients, others, message=""):
    for name, x, y in zip(NAMES, bits(gradients), bits(others), strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            np.testing.assert_array_equal(x, y, err_msg=f"{name} {message}")


# values


@DIRECTIONS
@pytest.mark.parametrize("dtype", DTYPES)
def test_exact_inputs_give_the_same_bits_by_every_plan(executor, dtype, reverse):
    # A thread has 4 steps over rows; over time a pack 16 bytes, a round 32 packs, a tile 4 rounds of 1 to 8 warps.
    edges = [31, 32, 33, 127, 128, 129, 256, 511, 512, 513, 1024, 1025, 2049, 4097]
    for length in [*range(1, 19), *edges]:
        one = case((2, length), 1, dtype, exact=True, seed=length, reverse=reverse)
        if length % 3 == 0:
            one["h0"] = None
        if length % 5 == 0:
            one["grad_last_state"] = None
        wide = accumulation(dtype)
        check(executor, one, plans(executor, chunk=20 if length <= 300 else 700), exact=True, grad_dtype=wide)


@pytest.mark.full
@DIRECTIONS
@pytest.mark.parametrize("rows", [1, 31, 32, 33, 70])
def test_rows_that_fill_warps_and_do_not(executor, rows, reverse):
    for length in (5, 32):
        one = case((length, rows), 0, exact=True, seed=rows, reverse=reverse)
        check(executor, one, plans(executor), exact=True)


@LANES
@DIRECTIONS
def test_summaries_of_many_chunks_fill_many_tiles(executor, lanes, reverse):
    one = case((1, 4500 if lanes is Lanes.TIME else 900), 1, exact=True, reverse=reverse)
    plan = {**SPLIT, "lanes": lanes, "chunk": 1, "row_warps": 1, "segments": one["h"].size}
    check(executor, one, [plan], exact=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_real_inputs_are_within_the_bound(executor, dtype, axis):
    shape = (3, 37, 33) if axis == 1 else (35, 2, 37) if axis == 0 else (5, 2, 67)
    for reverse in (False, True):
        check(executor, case(shape, axis, dtype, reverse=reverse), plans(executor))


def test_long_rows_are_within_the_bound(executor):
    one = case((2, 20_011), 1)
    one["a"] = np.sqrt(np.abs(one["a"])).clip(0, 0.9999)  # long memory
    check(executor, one, plans(executor, chunk=2000))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_argument_absent(executor, dtype):
    for shape, axis in (((3, 150), 1), ((41, 34), 0)):
        one = case(shape, axis, dtype)
        for absent in ({"h0": None}, {"grad_h": None}, {"grad_last_state": None}):
            check(executor, one | absent, plans(executor))
        check(executor, one | {"grad_h": None, "h0": None}, plans(executor))
        check(executor, one | {"grad_last_state": None, "h0": None}, plans(executor))


@pytest.mark.parametrize("dtype", [pytest.param(np.float16, marks=on_host_full), BF16])
def test_h_and_its_gradient_in_the_accumulation_type(executor, dtype):
    # Whole packs of 16 bytes, and others.
    for length in (1040, 37):
        for wide in (["h"], ["grad_h"], ["h", "grad_h"]):
            for reverse in (False, True):
                one = case((2, length), 1, dtype, reverse=reverse)
                one |= {name: rng(1).normal(size=one[name].shape).astype(F32) for name in wide}
                check(executor, one, plans(executor, chunk=320))


@pytest.mark.parametrize(
    ("dtype", "grad_dtype"),
    [
        *((dtype, to) for dtype in (F32, BF16) for to in (np.float16, BF16, F32, np.float64)),
        *(pytest.param(np.float16, to, marks=on_host_full) for to in (BF16, F32)),
        pytest.param(np.float64, F32, marks=on_host_full),
        pytest.param(np.complex64, np.complex128, marks=on_host_full),
        pytest.param(np.complex128, np.complex64, marks=on_host_full),
    ],
)
def test_grad_dtype_is_rounded_to_once(executor, dtype, grad_dtype):
    one = case((3, 90), 1, dtype)
    for plan in plans(executor):
        own = run(executor, one, plan, grad_dtype=accumulation(dtype))
        for name in (grad_dtype, np.dtype(grad_dtype).name):
            gradients = run(executor, one, plan, grad_dtype=name)
            for x, exact in zip(gradients, own, strict=True):
                np.testing.assert_array_equal(x, exact.astype(grad_dtype))
                assert x.dtype == np.dtype(grad_dtype)


def test_by_hand(executor):
    # L = h[0] + 10 h[1] + 100 h[2] + 1000 h[2]
    one = {
        "a": np.array([2, 3, -1], F32), "h": np.array([7, 26, -23], F32), "h0": np.array(3, F32),
        "grad_h": np.array([1, 10, 100], F32), "grad_last_state": np.array(1000, F32),
    }  # fmt: skip
    for plan in plans(executor, chunk=2):
        a, b, h0 = run(executor, one, plan)
        np.testing.assert_array_equal(b, [1 + 3 * (10 - 1100), 10 - 1100, 1100])
        np.testing.assert_array_equal(a, b * [3, 7, 26])
        np.testing.assert_array_equal(h0, 2 * b[0])


@DIRECTIONS
@LANES
def test_it_is_the_adjoint_of_the_scan(executor, lanes, reverse):
    # h is linear in b and h0: <grad_h, h> + <grad_last, last> = <grad_b, b> + <grad_h0, h0>, exactly on integers.
    one = case((40, 50), 1, exact=True, reverse=reverse)
    b = rng(1).integers(-4, 5, (40, 50)).astype(F32)
    for plan in [plan for plan in plans(executor) if plan.get("lanes", lanes) is lanes]:
        _, of_b, of_h0 = run(executor, one, plan)
        h, last = cuscan.linear_scan(one["a"], b, one["h0"], axis=1, reverse=reverse, return_last_state=True)
        left = np.vdot(one["grad_h"], h) + np.vdot(one["grad_last_state"], last)
        assert left == np.vdot(of_b, b) + np.vdot(of_h0, one["h0"])


def test_gates_that_underflow_in_product(executor):
    one = case((150,), 0) | {"a": np.tile(np.array([1e-30, 1], F32), 75)}
    check(executor, one, plans(executor))


def test_infinite_gates_where_nothing_enters(executor):
    # Neither 0 * inf of what does not enter, nor the gate that acts on no state.
    h = np.array([1, 2, 4, 8, 16, 32], F32)
    ones, resets = np.ones(6, F32), np.array([0, 0, 0, 1, 0, 0], bool)
    for plan in plans(executor, chunk=2):
        gates = np.array([np.inf, 1, 1, 1, 1, np.inf], F32)
        a, b, _ = run(executor, {"a": gates, "h": h, "grad_h": ones}, plan)
        np.testing.assert_array_equal(b, [np.inf] * 5 + [1], err_msg=f"{plan}")
        np.testing.assert_array_equal(a, [0, np.inf, np.inf, np.inf, np.inf, 16], err_msg=f"{plan}")
        gates = np.array([1, 1, np.inf, np.nan, 1, 1], F32)
        a, b, _ = run(executor, {"a": gates, "h": h, "grad_h": ones, "reset": resets}, plan)
        np.testing.assert_array_equal(b, [np.inf, np.inf, 1, 3, 2, 1], err_msg=f"{plan}")
        np.testing.assert_array_equal(a, [0, np.inf, 2, 0, 16, 16], err_msg=f"{plan}")


# axes, strides, alignment


@pytest.mark.full
@DIRECTIONS
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_views(executor, axis, reverse):
    shape = (3, 37, 34) if axis == 1 else (37, 2, 5)
    ends = np.asfortranarray(rng(2).normal(size=(2, *without(shape, axis)[::-1])).astype(F32))
    kinds = list(views(shape))
    for n, (a, h) in enumerate(kinds):
        one = {"a": a, "h": h, "grad_h": kinds[n - 1][1], "h0": ends[0].T, "grad_last_state": ends[1].T}
        every_plan = plans(executor) if n == 1 else [SERIAL, {**BLOCK, "lanes": Lanes.TIME}]
        check(executor, one | {"axis": axis, "reverse": reverse}, every_plan if executor.kernels else (None,))


@DIRECTIONS
def test_gradients_of_h_that_are_broadcast(executor, reverse):
    for shape, axis in (((3, 150), 1), ((41, 34), 0), ((5, 4, 33), 1)):
        one = case(shape, axis, reverse=reverse)
        for view in (one["grad_h"][..., :1], one["grad_h"][:1], np.ones((), F32)):
            check(executor, one | {"grad_h": np.broadcast_to(view, shape)}, plans(executor)[::3])


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_every_alignment_of_a_pack(executor, dtype):
    # Packs are 16 bytes. Rows that fill them and that do not, from each item within one, up and down.
    items = 16 // np.dtype(dtype).itemsize
    full = case((3, 17 * items + 1030), 1, dtype)
    for start in range(items):
        for length in (16 * items + 1024, 16 * items + 3):
            for way in (1, -1):
                cut = {name: full[name][:, start : start + length][:, ::way] for name in ("a", "grad_h")}
                one = full | cut | {"h": full["h"][:, 1 : 1 + length][:, ::way], "reverse": way < 0}
                check(executor, one, [{**BLOCK, "lanes": Lanes.TIME, "row_warps": 1}] if executor.kernels else (None,))


@pytest.mark.parametrize("plan", [SERIAL, {**BLOCK, "lanes": Lanes.TIME}], ids=["rows", "time"])
def test_items_at_odd_addresses(executor, plan):
    names = ("a", "h", "grad_h")
    rows = np.zeros((3, 40), np.dtype([("tag", np.uint8), *((name, F32) for name in names)]))
    ends = np.zeros(3, np.dtype([("tag", np.uint8), ("h0", F32), ("grad_last_state", F32)]))
    one = case((3, 40), 1)
    for name in names:
        rows[name] = one[name]
    for name in ("h0", "grad_last_state"):
        ends[name] = one[name]
    odd = {name: rows[name] for name in names} | {name: ends[name] for name in ("h0", "grad_last_state")}
    assert not odd["h"].flags.aligned
    assert_same_bits(check(executor, one | odd, [plan]), run(executor, one, plan))


@pytest.mark.full
@pytest.mark.parametrize("dims", [6, 7, pytest.param(8, marks=on_host_full)])
def test_row_axes_that_cannot_be_merged(executor, dims):
    shape = (2,) * dims
    one = case((*shape, 5), dims)
    one["a"] = case((*shape[::-1], 5), dims)["a"].transpose(*range(dims)[::-1], dims)
    for reverse in (False, True):
        check(executor, one | {"reverse": reverse}, plans(executor, chunk=2)[::4])
    for first, time in ((1, 5), (2, 5), (2, 1)):  # shared along every other axis, which cannot be merged either
        few = (*(first if d % 2 else 3 - first for d in range(dims)), time)
        check(executor, case((*shape, 5), dims, exact=True, a_shape=few), plans(executor, chunk=2)[::4], exact=True)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 3), (1,), (1, 1), (1, 5), (5, 1)])
def test_sizes_0_and_1(executor, shape):
    for axis in range(len(shape)):
        for a_shape in (shape, (1,) * len(shape), ()):
            one = case(shape, axis, exact=True, a_shape=a_shape)
            check(executor, one, plans(executor), exact=True)
            check(executor, one | {"h0": None}, exact=True)
            of_h0 = check(executor, one, exact=True, grad_dtype=np.float64).h0
            if shape[axis] == 0:
                np.testing.assert_array_equal(of_h0, one["grad_last_state"])
                np.testing.assert_array_equal(run(executor, one | {"grad_last_state": None}).h0, 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_lies_between_and_behind_items_is_not_read(executor, dtype):
    # A Layout has NaN there.
    apart = [Layout(steps=(2, 3)), Layout((1, 0), (1, -2)), Layout(pad=3), Layout((1, 0), pad=1)]
    for n, layout in enumerate(apart):
        for axis in (0, 1):
            steps = Plan("serial"), Plan("split", "rows", 20, 2), Plan("split", "time", 20, 2), Plan("block", "time")
            of = LinearProblem(n, (33, 70), axis, dtype=dtype, values="real", a=layout, h0=Layout(pad=1), plans=steps)
            LinearGradientProblem(of, layout, Layout(steps=(-2,)), layout).check(lambda f, x: executor(f, **x))


# shared and scalar gates


SHARED = [(3, 21, 5), (1, 21, 5), (3, 1, 5), (3, 21, 1), (1, 1, 5), (1, 21, 1), (3, 1, 1), (5,), (21, 1), (1,), ()]
# Lanes that share their gates: along the only row axis, the fastest of two, and two that are one.
LANES_SHARE = [((9, 64), 0, (9, 1)), ((2, 9, 32), 1, (2, 9, 1)), ((9, 3, 32), 0, (9, 1, 1)), ((9, 3, 32), 0, (3, 1))]


@pytest.mark.full
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("a_shape", SHARED)
def test_gradients_of_shared_gates_are_summed(executor, a_shape, axis):
    one = case((3, 21, 5), axis, exact=True, a_shape=a_shape, reverse=axis == len(a_shape) % 3)
    check(executor, one, plans(executor), exact=True)
    check(executor, case((3, 21, 5), axis, a_shape=a_shape))


@pytest.mark.full
@DIRECTIONS
@pytest.mark.parametrize(("shape", "axis", "a_shape"), LANES_SHARE)
def test_lanes_that_share_their_gates(executor, shape, axis, a_shape, reverse):
    one = case(shape, axis, exact=True, a_shape=a_shape, reverse=reverse)
    check(executor, one, plans(executor, chunk=4), exact=True)
    check(executor, one | {"mask": rng().random(shape) < 0.7}, exact=True)
    check(executor, case(shape, axis, a_shape=a_shape))


@pytest.mark.parametrize("dtype", DTYPES)
def test_shared_gates_of_every_type(executor, dtype):
    for shape, axis, a_shape in (((3, 150), 1, (3, 1)), ((41, 64), 0, (64,)), ((41, 64), 0, (41, 1)), ((3, 70), 1, ())):
        check(executor, case(shape, axis, dtype, a_shape=a_shape), plans(executor))
        for to in (accumulation(dtype), np.complex128 if np.dtype(dtype).kind == "c" else np.float64):
            check(executor, case(shape, axis, dtype, a_shape=a_shape, exact=True), exact=True, grad_dtype=to)


def test_gates_shared_by_so_many_that_parts_are_added_in_steps(executor):
    for rows in (31, 32, 33, 64, 65, 1024, 1100, 33_000):
        for a_shape in ((1, 3), (1, 1)):
            one = case((rows, 3), 1, exact=True, a_shape=a_shape)
            check(executor, one, exact=True)


def test_a_sum_is_in_the_accumulation_type(executor):
    # In bfloat16 it sticks at 256.
    ones = np.ones((2048, 3), BF16)
    for plan in plans(executor, chunk=500):
        of_a = run(executor, {"a": np.zeros((1, 3), BF16), "h": ones, "grad_h": ones, "axis": 0}, plan).a
        np.testing.assert_array_equal(of_a, 2048)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scalar_gates(executor, dtype):
    for shape, axis in (((3, 40), 1), ((40, 34), 0)):
        one = case(shape, axis, dtype)
        for gate in (0, -1, 0.9, *([0.8 - 0.5j] if np.dtype(dtype).kind == "c" else [])):
            check(executor, one | {"a": gate}, plans(executor))
    if dtype is BF16:  # beside a scalar the type is h's
        for wide in (["h", "grad_h"], ["grad_h"]):
            check(executor, one | {"a": 0.5} | {name: one[name].astype(F32) for name in wide}, plans(executor))


def test_scalar_h0_has_a_gradient_of_the_states_shape(executor):
    one = case((3, 40), 1)
    for plan in plans(executor):
        for h0 in (2.5, 0):
            expected = run(executor, one | {"h0": np.full(3, h0, F32)}, plan)
            assert_same_bits(run(executor, one | {"h0": h0}, plan), expected)
            assert expected.h0.shape == (3,)


# mask, reset and packed sequences


def marked(marks, shape, axis, *, exact, dtype=F32, seed=0, how="int64", **more):
    """A case of (rows, length) or (length, rows) with marks."""
    rows, length = shape[1 - axis], shape[axis]
    segments = MARKS[marks](r=rng(seed), rows=rows, length=length)
    for name in ("mask", "reset"):
        if name in segments and axis == 0:
            segments[name] = np.broadcast_to(segments[name], (rows, length)).T
    sequences = ()
    if "cu_seqlens" in segments:
        segments["cu_seqlens"] = as_offsets(segments["cu_seqlens"], how)
        sequences = (len(segments["cu_seqlens"]) - 1,)
    return case(shape, axis, dtype, exact=exact, sequences=sequences, seed=seed, **segments, **more)


@DIRECTIONS
@pytest.mark.parametrize("marks", MARKS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_marked_exact_inputs_give_the_same_bits_by_every_plan(executor, dtype, marks, reverse):
    turn = list(MARKS).index(marks) + reverse  # the quick tier has some of these on the CPU executor
    for n, (shape, axis) in enumerate((((2, 45), 1), ((37, 33), 0))):
        how = ("int32", "strided", "int64")[(turn + n) % 3]
        one = marked(marks, shape, axis, exact=True, dtype=dtype, how=how, reverse=reverse)
        for absent in ("", "h0", "grad_last_state") if executor.every_type else ((("", "h0")[turn // 2 % 2],)):
            if executor.every_type or turn % 2 == n:
                check(executor, one | ({absent: None} if absent else {}), plans(executor), exact=True,
                      grad_dtype=accumulation(dtype))  # fmt: skip


@DIRECTIONS
@pytest.mark.parametrize("marks", ["mask and reset", "packed, mask and reset"])
def test_marked_real_inputs_are_within_the_bound(executor, marks, reverse):
    for shape, axis in (((2, 1100), 1), ((70, 37), 0)):
        one = marked(marks, shape, axis, exact=False, reverse=reverse)
        check(executor, one, plans(executor, chunk=320))
        for change in ({"h0": None, "grad_h": None}, {"a": 0.9}, {"a": one["a"][:1]}):
            check(executor, one | change)


@pytest.mark.full
@DIRECTIONS
def test_few_marks_in_long_rows(executor, reverse):
    # Most tiles have none. The marked steps are around the edges of words, rounds and tiles.
    edges = [0, 1, 31, 32, 127, 128, 511, 512, 513, 1024, 1599]
    for n, edge in enumerate(edges):
        one = case((1, 1600), 1, exact=True, seed=n, reverse=reverse)
        one["reset"] = np.arange(1600) == edge
        one["mask"] = np.arange(1600) != edges[n - 1]
        check(executor, one, plans(executor, chunk=200), exact=True)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_hidden_is_not_read(executor, dtype, seed):
    # Half of the seeds put NaN wherever nothing may depend on it.
    laid, steps = Layout(), (Plan("serial"), Plan("block", "rows", row_warps=2), Plan("block", "time"))
    steps = (Plan(), *steps, Plan("split", "rows", 20, 2), Plan("split", "time", 20, 2))
    packed = {"cu_seqlens": laid, "lengths": (9, 0, 23, 1, 32, 18), "head": 3} if seed % 2 else {}
    for axis, shape in ((1, (3, 90)), (0, (90, 34))):
        of = LinearProblem(seed, shape, axis, dtype=dtype, h0=laid, mask=laid, reset=laid, reverse=seed > 2, **packed)
        of = replace(of, plans=steps)
        LinearGradientProblem(of, laid, laid, laid).check(lambda f, x: executor(f, **x))


@DIRECTIONS
def test_nothing_gets_from_one_sequence_to_another(executor, reverse):
    offsets = np.array([0, 7, 7, 30, 31, 60])
    one = case((4, 60), 1, sequences=(5,), cu_seqlens=offsets, reverse=reverse)
    for plan in plans(executor):
        clean = run(executor, one, plan)
        for name in ("a", "h", "grad_h"):
            poisoned = one | {name: one[name].copy()}
            poisoned[name][:, 7:30] = np.nan
            gradients = run(executor, poisoned, plan)
            for x, y in zip(gradients[:2], clean[:2], strict=True):
                outside = np.r_[0:7, 30:60]
                np.testing.assert_array_equal(x[:, outside], y[:, outside], err_msg=f"{name} {plan}")
            np.testing.assert_array_equal(gradients.h0[[0, 1, 3, 4]], clean.h0[[0, 1, 3, 4]])
        last = one["grad_last_state"].copy()
        last[2] = np.nan
        np.testing.assert_array_equal(run(executor, one | {"grad_last_state": last}, plan).h0[[0, 1, 3, 4]],
                                      clean.h0[[0, 1, 3, 4]])  # fmt: skip


@DIRECTIONS
def test_packed_sequences_are_calls_of_their_own(executor, reverse):
    offsets = [3, 20, 20, 21, 57]
    one = case((2, 60), 1, exact=True, sequences=(4,), cu_seqlens=np.array(offsets), reverse=reverse)
    for plan in plans(executor):
        whole = run(executor, one, plan)
        for s, (begin, end) in enumerate(pairwise(offsets)):
            cut = {name: one[name][:, begin:end] for name in ("a", "h", "grad_h")}
            cut |= {name: one[name][s] for name in ("h0", "grad_last_state")}
            alone = run(executor, one | cut | {"cu_seqlens": None})
            np.testing.assert_array_equal(whole.a[:, begin:end], alone.a)
            np.testing.assert_array_equal(whole.b[:, begin:end], alone.b)
            np.testing.assert_array_equal(whole.h0[s], alone.h0)
        for x in whole[:2]:
            assert not x[:, :3].any()
            assert not x[:, 57:].any()


@DIRECTIONS
def test_a_reset_at_the_first_step_hides_h0(executor, reverse):
    for offsets in (None, np.array([2, 9, 9, 30, 44])):
        sequences = () if offsets is None else (4,)
        one = case((3, 45), 1, sequences=sequences, cu_seqlens=offsets, reverse=reverse)
        bounds = [0, 45] if offsets is None else offsets
        reset = np.zeros(45, bool)
        reset[[(end - 1 if reverse else begin) for begin, end in pairwise(bounds)]] = True
        for plan in plans(executor):
            of_h0 = run(executor, one | {"reset": reset}, plan).h0
            if offsets is not None:
                np.testing.assert_array_equal(of_h0[1], one["grad_last_state"][1])
                of_h0 = of_h0[[0, 2, 3]]
            assert not of_h0.any()


@given(data=st.data(), length=st.integers(0, 90), reverse=st.booleans(), chunk=st.integers(1, 40))
@settings(max_examples=40)
def test_a_gradient_may_be_cut_anywhere(executor, data, length, reverse, chunk):
    axis, cut = data.draw(st.integers(0, 1)), data.draw(st.integers(0, length))
    plan = data.draw(st.sampled_from(plans(executor, chunk)))
    shape = (length, 3) if axis == 0 else (3, length)
    one = case(shape, axis, exact=True, seed=length, reverse=reverse)
    whole = run(executor, one, plan)

    def part(steps, **more):
        return run(
            executor, one | {name: np.take(one[name], steps, axis) for name in ("a", "h", "grad_h")} | more, plan
        )

    # What reaches the state between the two is the gradient of the later one's h0.
    earlier, later = (range(cut, length), range(cut)) if reverse else (range(cut), range(cut, length))
    between = np.take(one["h"], earlier[0 if reverse else -1], axis) if earlier else one["h0"]
    second = part(later, h0=between.astype(F32))
    first = part(earlier, grad_last_state=second.h0)
    pieces = (second, first) if reverse else (first, second)
    for n in range(2):
        np.testing.assert_array_equal(np.concatenate([piece[n] for piece in pieces], axis), whole[n])
    np.testing.assert_array_equal(first.h0, whole.h0)


# bits


def test_the_same_call_gives_the_same_bits(executor):
    one, shared = case((5, 3000), 1), case((5, 3000), 1, a_shape=(5, 1))
    for plan in plans(executor, chunk=700):
        for each in (one, shared):
            first = run(executor, each, plan)
            run(executor, case((7, 33), 1, BF16))
            again = {name: x.copy() if isinstance(x, np.ndarray) else x for name, x in each.items()}
            assert_same_bits(run(executor, again, plan), first, plan)


@pytest.mark.full
def test_fit_strides_and_alignment_do_not_change_bits(executor):
    for a_shape in ((34, 150), (34, 1), (1, 150)):
        one = case((34, 150), 1, a_shape=a_shape)
        for plan in plans(executor, chunk=40):
            if not plan:
                continue  # the order that is chosen may depend on strides
            expected = run(executor, one, plan)
            padded = np.zeros((34, 151), F32)
            padded[:, 1:] = one["h"]
            moved = one | {"h": padded[:, 1:], "grad_h": one["grad_h"][::-1].copy()[::-1]}
            assert_same_bits(run(executor, moved, plan), expected, plan)
            for warps in (1, 2, 4, 8) if executor.kernels else ():
                if warps >= plan.get("row_warps", 1):
                    assert_same_bits(run(executor, one, {**plan, "warps": warps}), expected, plan)


@pytest.mark.parametrize("dtype", [BF16, pytest.param(np.float16, marks=pytest.mark.full)])
def test_rows_in_pairs_have_the_bits_of_single_rows(host_executor, monkeypatch, dtype):
    names, start = set(), _linear_backward._start

    def spy(place, source, name, *rest):
        names.add(name)
        start(place, source, name, *rest)

    monkeypatch.setattr(_linear_backward, "_start", spy)
    item = np.dtype(dtype).name
    # 35 and 32 pairs: lanes without a row, and whole tiles. 150 steps are whole tiles and a tail.
    for shape, grad_dtype in (((2, 150, 70), None), ((1, 150, 128), None), ((1, 40, 128), F32)):
        one = case(shape, 1, dtype, reverse=shape[0] == 2)
        odd = {}
        for name in ("a", "h", "grad_h"):
            apart = np.zeros((*shape[:2], shape[2] + 2), dtype)
            apart[..., 1:-1] = one[name]
            odd[name] = apart[..., 1:-1]
        block, split = ({**schedule, "lanes": Lanes.ROWS} for schedule in (BLOCK, SPLIT))
        shared = {"a": one["a"][:, :1]}, {"a": odd["a"][:, :1]}
        changes = (({}, {}), ({"h0": None, "grad_last_state": None},) * 2, ({"a": 0.9},) * 2, shared)
        for plan in ({}, SERIAL, {**block, "row_warps": 8}, {**split, "chunk": 70}):
            for change, odd_change in changes:
                results = []
                for pairs, arguments in ((True, one | change), (False, one | odd | odd_change)):
                    names.clear()
                    results.append(run(host_executor, arguments, plan, grad_dtype=grad_dtype))
                    assert (f"linear_scan_backward_rows_pairs_{item}" in names) == pairs
                assert_same_bits(*results, plan)
        check(host_executor, one, [{}, {**split, "chunk": 70}], grad_dtype=grad_dtype)


@DIRECTIONS
@pytest.mark.parametrize("dtype", [BF16, pytest.param(np.float16, marks=pytest.mark.full)])
def test_whole_tiles_have_the_bits_of_others(host_executor, dtype, reverse):
    # No tile is whole where the gradients have another type. Those that are may lack whole packs of h.
    for shape, axis, lanes, chunk in (((2, 1600), 1, Lanes.TIME, 1040), ((150, 64), 0, Lanes.ROWS, 70)):
        mask = np.arange(shape[axis]) != 1100  # in the second tile
        for change in ({}, {"h0": None, "grad_last_state": None}, {"a": 0.9}, {"a": "shared"}, {"mask": mask}):
            one = case(shape, axis, dtype, reverse=reverse) | change
            if change.get("a") == "shared":
                one["a"] = case(shape, axis, dtype)["a"].take([0], axis)
            if axis == 0:
                one.pop("mask", None)
            apart = np.zeros((shape[0], shape[1] + 1), dtype)
            apart[:, 1:] = one["h"]
            one_warp, two_warps = ({"lanes": lanes, "row_warps": warps} for warps in (1, 2))
            for plan in ({**BLOCK, **one_warp}, {**BLOCK, **two_warps}, {**SPLIT, **one_warp, "chunk": chunk}):
                whole = check(host_executor, one, [plan])
                assert_same_bits(run(host_executor, one | {"h": apart[:, 1:]}, plan), whole, plan)
                wide = run(host_executor, one, plan, grad_dtype=F32)
                rounded = (x if x is None else x.astype(dtype) for x in wide[:2])
                assert_same_bits((*rounded, wide[2]), whole, plan)


def test_other_rows_do_not_change_bits(executor):
    one = case((70, 40), 1)
    for plan in plans(executor):
        clean = run(executor, one, plan)
        for name in ("a", "h", "grad_h"):
            poisoned = one | {name: one[name].copy()}
            poisoned[name][33, 20] = np.nan
            for x, y in zip(run(executor, poisoned, plan), clean, strict=True):
                np.testing.assert_array_equal(np.delete(x, 33, 0), np.delete(y, 33, 0))


# memory


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_scratch_is_what_the_docstring_says(host_executor, dtype):
    rows, length, chunks = 64, 700, 7
    one = case((length, rows), 0, dtype, a_shape=(length, rows))
    gradients = [one["h"].nbytes] * 2 + [rows * 4]
    summaries = [rows * chunks * 4] * 2
    split = {**SPLIT, "lanes": Lanes.ROWS, "chunk": 100, "row_warps": 2}
    of = one["h"].itemsize
    for plan, a_shape, scratch in (
        (SERIAL, (length, rows), []),
        (split, (length, rows), summaries),
        (split, (1, rows), [*summaries, 2 * chunks * rows * 4]),  # a sum for each warp of each chunk
        (SERIAL, (1, rows), []),
        (SERIAL, (length, 1), [length * rows // 32 * 4]),
        ({**BLOCK, "lanes": Lanes.TIME, "row_warps": 1}, (length, 1), [length * rows * 4]),
    ):
        run(host_executor, one | {"a": one["a"][: a_shape[0], : a_shape[1]]}, plan)
        expected = [np.prod(a_shape) * of, *gradients[1:], *scratch]
        assert sorted(host_executor.allocated) == sorted(expected), (plan, a_shape)


# errors


ARRAY = np.ones((3, 5), F32)
ENDS = np.ones(3, F32)


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (TypeError, "a must be an array or a scalar, got None", {"a": None}),
        (TypeError, "h must be an array", {"h": None}),
        (TypeError, "h must be an array", {"h": 1.0}),
        (TypeError, "grad_h must be an array, got float", {"grad_h": 1.0}),
        (TypeError, "reverse must be True or False, got ndarray", {"reverse": ARRAY}),
        (ValueError, "grad_h or grad_last_state must be given: without both", {"grad_h": None}),
        (TypeError, "a must be float32, bfloat16, .* got int64", {"a": np.ones((3, 5), int)}),
        (TypeError, "h must be a's float32, got float64", {"h": ARRAY.astype(float)}),
        (TypeError, "h must be a's bfloat16 or float32, got float16",
         {"a": ARRAY.astype(BF16), "h": ARRAY.astype(np.float16)}),
        (TypeError, "grad_h must be a's float32, got bfloat16", {"grad_h": ARRAY.astype(BF16)}),
        (TypeError, "grad_h must be h's float32, got bfloat16", {"a": 0.5, "grad_h": ARRAY.astype(BF16)}),
        (TypeError, "h0 must be float32, the accumulation type of float32, got float64", {"h0": ENDS.astype(float)}),
        (TypeError, "grad_last_state must be float32, the accumulation type of bfloat16, got bfloat16",
         {"a": ARRAY.astype(BF16), "grad_last_state": ENDS.astype(BF16)}),
        (TypeError, "a is complex and h is float32: make that complex, or a real", {"a": 1j}),
        (TypeError, "h0 is complex and a is float32: make that complex, or h0 real", {"h0": 1j}),
        (TypeError, "grad_dtype must be float16, bfloat16, .* for inputs of float32, got complex64",
         {"grad_dtype": np.complex64}),
        (TypeError, "axis must be an int, got float", {"axis": 1.0}),
        (ValueError, "axis must be given for h of 2 dimensions; it may be left out for 1-D h only", {"axis": None}),
        (ValueError, r"axis must be in \[-2, 2\) for h of shape \(3, 5\), got 2", {"axis": 2}),
        (ValueError, r"a must broadcast to h's shape \(3, 5\), got \(5, 3\)", {"a": ARRAY.reshape(5, 3)}),
        (ValueError, r"a must broadcast to h's shape \(3, 5\), got \(1, 3, 5\)", {"a": ARRAY[None]}),
        (ValueError, r"grad_h must have shape h's shape = \(3, 5\), got \(5,\)", {"grad_h": ARRAY[0]}),
        (ValueError, r"h0 must have shape h's shape without axis = \(3,\), got \(5,\)", {"h0": ARRAY[0]}),
        (ValueError, r"grad_last_state must have shape .* = \(3,\), got \(3, 5\)", {"grad_last_state": ARRAY}),
        (ValueError, r"h0 must have shape sequences and h's shape without axis = \(1, 3\), got \(3,\)",
         {"h0": ENDS, "cu_seqlens": np.array([0, 5])}),
        (ValueError, r"grad_last_state must have shape sequences and .* = \(2, 3\), got \(3,\)",
         {"grad_last_state": ENDS, "cu_seqlens": np.array([0, 2, 5])}),
        (TypeError, "mask must be bool, got float32", {"mask": ARRAY}),
        (ValueError, r"reset must broadcast to h's shape \(3, 5\), got \(3,\)", {"reset": np.ones(3, bool)}),
        (TypeError, "cu_seqlens must be int32 or int64, got float32", {"cu_seqlens": ENDS}),
        (ValueError, r"cu_seqlens must lie in \[0, 5\], got 0 to 6", {"cu_seqlens": np.array([0, 6])}),
        (ValueError, "cu_seqlens must not descend, got 1 at 2 after 3", {"cu_seqlens": np.array([0, 3, 1, 5])}),
    ],
)  # fmt: skip
def test_wrong_calls(executor, monkeypatch, error, message, change):
    monkeypatch.setenv("CUSCAN_CHECK", "1")  # values on a GPU are looked at
    arguments = {"a": ARRAY, "h": ARRAY, "grad_h": ARRAY, "axis": 1} | change
    with pytest.raises(error, match=message):
        executor(cuscan.linear_scan_vjp, **arguments)
