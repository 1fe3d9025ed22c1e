"""linear_scan on NumPy arrays and by its kernels, against the oracle and by the properties it promises."""

import functools
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuscan
from cuscan import _launch
from cuscan._plan import Lanes, Schedule, forced, watched
from cuscan.testing import oracle

BF16 = ml_dtypes.bfloat16
on_host_full = pytest.mark.full_on_host
DTYPES = [
    np.float32,
    pytest.param(BF16, marks=on_host_full),
    *(pytest.param(dtype, marks=on_host_full) for dtype in (np.float16, np.float64, np.complex64, np.complex128)),
]
ACCUMULATION = {np.float16: np.float32, BF16: np.float32}

# Every schedule, with lanes over rows and over time, and one to all warps on a row; {} is the plan's own choice.
SERIAL, BLOCK, SPLIT = ({"schedule": schedule} for schedule in Schedule)
KERNEL_PLANS = [
    {},
    SERIAL,
    *({**BLOCK, "lanes": Lanes.ROWS, "row_warps": warps} for warps in (2, 8)),
    *({**BLOCK, "lanes": Lanes.TIME, "row_warps": warps} for warps in (1, 4, 8)),
    *({**SPLIT, "lanes": lanes, "row_warps": 2} for lanes in Lanes),
    *({**SPLIT, "lanes": lanes, "row_warps": 1, "one_pass": True} for lanes in Lanes),
]
LANES = pytest.mark.parametrize("lanes", Lanes, ids=[lanes.value for lanes in Lanes])
ROWS_AND_TIME = [SERIAL, {**BLOCK, "lanes": Lanes.TIME}]
NUMPY_PLANS = [{"segments": segments} for segments in (1, 2, 7)]


def plans(executor, chunk=20):
    """All that may be forced on this executor; a split has chunks of `chunk` steps."""
    return [{**plan, "chunk": chunk} for plan in KERNEL_PLANS] if executor.kernels else NUMPY_PLANS


def rng(seed=0):
    return np.random.default_rng(seed)


def accumulation(dtype):
    return np.dtype(ACCUMULATION.get(np.dtype(dtype).type, dtype))


def scan(executor, a, b, h0=None, plan=None, **options):
    with forced(**(plan or {})):
        return executor(cuscan.linear_scan, a, b, h0, return_last_state=True, **options)


def roundoff(b):
    return 2.0**-53 if b.dtype.name in ("float64", "complex128") else 2.0**-24


def check(executor, a, b, h0=None, *, every_plan=(None,), out=None, out_dtype=None, **options):
    """Within the oracle's bound with each plan; gives the last result."""
    axis = options.get("axis")
    known = {name: x for name, x in options.items() if name == "reverse"}
    expected = oracle.linear_scan(a, b, h0, axis=0 if axis is None else axis, eps=roundoff(b), **known)
    for plan in every_plan:
        h, last = scan(executor, a, b, h0, plan, out=out, out_dtype=out_dtype, **options)
        assert h.dtype == np.dtype(out_dtype or (b.dtype if out is None else out.dtype))
        assert last.dtype == accumulation(b.dtype)
        assert (h is out) == (out is not None)
        oracle.assert_scan_close(h, expected.value, expected.bound)
        oracle.assert_scan_close(last, expected.last, expected.last_bound)
    return h


def real_inputs(shape, dtype=np.float32, seed=0):
    r = rng(seed)
    a, b = r.uniform(-1.05, 1.05, shape), r.normal(size=shape)
    if np.dtype(dtype).kind == "c":
        a, b = a * np.exp(1j * r.normal(size=shape)), b + 1j * r.normal(size=shape)
    return a.astype(dtype), b.astype(dtype)


def exact_inputs(shape, dtype=np.float32, seed=0):
    """Gates in {-1, 0, 1} and small integers: no operation rounds."""
    r = rng(seed)
    a = r.choice([-1, 0, 1], shape, p=[0.48, 0.04, 0.48])
    return a.astype(dtype), r.integers(-8, 9, shape).astype(dtype)


def without(shape, axis):
    return tuple(size for d, size in enumerate(shape) if d != axis % len(shape))


# values


@functools.cache
def exact_case(length, *, reverse):
    a, b = exact_inputs((2, length), seed=length)
    h0 = np.array([3, -5], np.float32) if length % 3 else None
    return a, b, h0, oracle.linear_scan(a, b, h0, reverse=reverse)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_exact_inputs_give_the_same_bits_by_every_plan(executor, dtype, reverse):
    # The lengths where a warp, a tile of the block schedule (16 bytes x 32 lanes x 4 rounds x 1 to 8 warps) or a
    # buffer of the serial one (32 steps) is full, and all small ones; 300 in chunks of 20 are 15 summaries.
    edges = [127, 128, 129, 300, 511, 512, 513, 1023, 1025, 2049, 4095, 4096, 4097, 8193]
    for length in [*range(71), *edges]:
        a, b, h0, expected = exact_case(length, reverse=reverse)
        a, b = a.astype(dtype), b.astype(dtype)
        h0 = None if h0 is None else h0.astype(accumulation(dtype))
        for plan in plans(executor, chunk=20 if length <= 300 else 700):
            h, last = scan(executor, a, b, h0, plan, axis=1, reverse=reverse, out_dtype=accumulation(dtype))
            np.testing.assert_array_equal(h, expected.value, err_msg=f"{length} {plan}")
            np.testing.assert_array_equal(last, expected.last, err_msg=f"{length} {plan}")


@pytest.mark.full
def test_every_length(executor):
    a, b = exact_inputs((2, 1100))
    expected = oracle.linear_scan(a, b, [1, -2])
    h0 = np.array([1, -2], np.float32)
    every = plans(executor, chunk=100)
    for length in range(1101):
        plan = every[length % len(every)]
        h, last = scan(executor, a[:, :length], b[:, :length], h0, plan, axis=1)
        np.testing.assert_array_equal(h, expected.value[:, :length], err_msg=f"{length} {plan}")
        np.testing.assert_array_equal(last, h[:, -1] if length else h0, err_msg=f"{length} {plan}")


@LANES
@pytest.mark.parametrize("reverse", [False, True])
def test_summaries_of_many_chunks_fill_many_tiles(executor, lanes, reverse):
    # A tile of eight warps over time is 4096 steps, and of a warp over rows 8.
    a, b = exact_inputs((1, 4500 if lanes is Lanes.TIME else 900))
    h0 = np.array([7], np.float32)
    expected = oracle.linear_scan(a, b, h0, reverse=reverse)
    plan = {**SPLIT, "lanes": lanes, "chunk": 1, "row_warps": 1, "segments": b.size}
    h, last = scan(executor, a, b, h0, plan, axis=1, reverse=reverse)
    np.testing.assert_array_equal(h, expected.value)
    np.testing.assert_array_equal(last, expected.last)


def test_changing_gates_by_hand(executor):
    a = np.array([0.5, 2, -1, 0, 0.5, 2, -1, 1], np.float32)
    b = np.arange(1, 9, dtype=np.float32)
    for plan in plans(executor, chunk=3):
        h, last = scan(executor, a, b, plan=plan)
        np.testing.assert_array_equal(h, [1, 4, -1, 4, 7, 20, -13, -5])
        assert last == -5
        h, last = scan(executor, a, b, plan=plan, reverse=True)
        np.testing.assert_array_equal(h, [1, 0, -1, 4, 7, 4, -1, 8])
        assert last == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_real_inputs_are_within_the_bound(executor, dtype, axis):
    a, b = real_inputs((3, 37, 33) if axis == 1 else (35, 2, 37) if axis == 0 else (5, 2, 67), dtype)
    h0 = rng(1).normal(size=without(b.shape, axis)).astype(accumulation(dtype))
    for options in ({}, {"reverse": True}):
        check(executor, a, b, h0, axis=axis, every_plan=plans(executor), **options)
        check(executor, a, b, axis=axis, **options)


def test_long_rows_are_within_the_bound(executor):
    a, b = real_inputs((2, 20_011))
    a = np.sqrt(np.abs(a)).clip(0, 0.9999)  # long memory
    check(executor, a, b, axis=1, every_plan=plans(executor, chunk=2000))


def test_gates_that_underflow_in_product(executor):
    # A ratio of cumulative products would be 0 / 0 here.
    a = np.tile(np.array([1e-30, 1], np.float32), 75)
    b = rng().normal(size=150).astype(np.float32)
    check(executor, a, b, np.array(1e30, np.float32), every_plan=plans(executor))


def test_sums_are_in_the_accumulation_type(executor):
    # A running sum in bfloat16 sticks at 256.
    for plan in plans(executor, chunk=1000):
        h, last = scan(executor, 1.0, np.ones(4096, BF16), plan=plan)
        assert h[-1] == last == 4096


def test_without_h0_no_state_enters_the_first_step(executor):
    a = np.array([np.inf, 1, 0.5, 1], np.float32)
    for plan in plans(executor, chunk=2):
        h, _ = scan(executor, a, np.array([-0.0, 1, 1, 1], np.float32), plan=plan)
        np.testing.assert_array_equal(h, [0, 1, 1.5, 2.5], err_msg=f"{plan}")
        assert np.signbit(h[0])
        h, _ = scan(executor, a, np.zeros(4, np.float32), np.zeros((), np.float32), plan=plan)
        assert np.isnan(h).all()


# axes, strides, alignment


def views(shape):
    """Pairs (a, b) of this shape over memory of every kind; a may have fewer items."""
    a, b = real_inputs(tuple(2 * size + 3 for size in shape))
    front, back = tuple(slice(size) for size in shape), tuple(slice(-size, None) for size in shape)
    step = tuple(slice(0, 2 * size, 2) for size in shape)
    down = tuple(slice(2 * size, 0, -2) for size in shape)
    yield a[front], b[back]
    yield a[step], b[down]
    yield a[down], b[step]
    yield np.asfortranarray(a[front]), b[front].copy()
    yield a[front].copy(), np.asfortranarray(b[front])
    yield np.asfortranarray(a[back]), np.asfortranarray(b[back])[tuple(slice(None, None, -1) for _ in shape)]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_views(executor, axis, reverse):
    shape = (3, 37, 34) if axis == 1 else (37, 2, 5)
    h0 = np.asfortranarray(rng(2).normal(size=without(shape, axis)[::-1]).astype(np.float32)).T
    wide = np.full((shape[0] + 1, 2 * shape[1], 2 * shape[2] + 2), 7, np.float32)
    for n, (a, b) in enumerate(views(shape)):
        before = a.copy(), b.copy()
        every_plan = plans(executor) if n == 1 else ROWS_AND_TIME if executor.kernels else (None,)
        check(executor, a, b, h0, axis=axis, reverse=reverse, every_plan=every_plan)
        out = wide[:-1, ::-2, 1:-1:2]
        check(executor, a, b, h0, axis=axis, reverse=reverse, out=out)
        np.testing.assert_array_equal(a, before[0])
        np.testing.assert_array_equal(b, before[1])
    for untouched in (wide[-1], wide[:, ::2], wide[:, :, ::2], wide[:, :, -1]):
        np.testing.assert_array_equal(untouched, 7)


@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_every_alignment_of_a_pack(executor, dtype):
    # Packs are 16 bytes. Lengths that fill them and that do not, from each item within one, up and down.
    items = 16 // np.dtype(dtype).itemsize
    a, b = real_inputs((3, 2 * items + 2080), dtype)
    for start in range(items):
        for length in (16 * items, 16 * items + 3):
            for way in (1, -1):
                gates, inputs = a[:, start : start + length][:, ::way], b[:, 1 : 1 + length][:, ::way]
                every_plan = [{**BLOCK, "lanes": Lanes.TIME, "row_warps": 1}] if executor.kernels else (None,)
                check(executor, gates, inputs, axis=1, reverse=way < 0, every_plan=every_plan)


@pytest.mark.parametrize("plan", ROWS_AND_TIME, ids=["rows", "time"])
def test_items_at_odd_addresses(executor, plan):
    record = np.dtype([("tag", np.uint8), ("a", np.float32), ("b", np.float32)])
    rows = np.zeros((3, 40), record)
    rows["a"], rows["b"] = real_inputs((3, 40))
    assert not rows["b"].flags.aligned
    h = check(executor, rows["a"], rows["b"], axis=1, every_plan=[plan])
    out = np.zeros((3, 40), record)["b"]
    np.testing.assert_array_equal(check(executor, rows["a"], rows["b"], axis=1, every_plan=[plan], out=out), h)


def test_axes_of_size_one_may_have_any_stride(executor):
    a, b = real_inputs((3, 40))
    odd = np.lib.stride_tricks.as_strided(b, (1, 3, 1, 40, 1), (7, *b.strides[:1], -13, b.strides[1], 2**40))
    check(executor, a[None, :, None, :, None], odd, axis=3, every_plan=plans(executor))


@pytest.mark.parametrize("dims", [6, 7, 8])
def test_row_axes_that_cannot_be_merged(executor, dims):
    # Gates and inputs with opposite orders of the axes: none are neighbours in both.
    shape = (2,) * dims
    a, b = real_inputs((*shape[::-1], 5))
    a = a.transpose(*range(dims)[::-1], dims)
    h0 = rng(3).normal(size=shape).astype(np.float32)
    for reverse in (False, True):
        check(executor, a, b, h0, axis=dims, reverse=reverse, every_plan=plans(executor, chunk=2))
    out = np.zeros((*shape, 10), np.float32)
    check(executor, a, b, h0, axis=dims, out=out[..., ::2])
    np.testing.assert_array_equal(out[..., 1::2], 0)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 3), (1,), (1, 1), (1, 5), (5, 1)])
def test_sizes_0_and_1(executor, shape):
    for axis in range(len(shape)):
        a, b = exact_inputs(shape)
        rest = without(shape, axis)
        for h0 in (None, np.full(rest, 2, np.float32)):
            expected = oracle.linear_scan(a, b, h0, axis=axis)
            for plan in plans(executor):
                h, last = scan(executor, a, b, h0, plan, axis=axis)
                np.testing.assert_array_equal(h, expected.value)
                np.testing.assert_array_equal(last, expected.last)
                assert h.shape == shape
                assert last.shape == rest


@pytest.mark.parametrize("rows", [65_536, 70_001])
def test_many_rows(executor, rows):
    a, b = exact_inputs((5, rows))
    expected = np.zeros_like(b)
    state = np.zeros(rows, np.float32)
    for t in range(5):
        expected[t] = state = a[t] * state + b[t]
    for axis, turned in ((0, lambda x: x), (1, lambda x: np.ascontiguousarray(x.T))):
        h = executor(cuscan.linear_scan, turned(a), turned(b), axis=axis)
        np.testing.assert_array_equal(h, turned(expected))


def test_rows_past_element_2_to_31(cuda_executor):
    cupy = cuda_executor.xp
    big = cupy.zeros(2**31 + 4096, np.float16)
    a, b = exact_inputs((2, 700), np.float16)
    apart = cupy.lib.stride_tricks.as_strided(big, (2, 700), (2**32 + 2000, 2))
    apart[...] = cupy.asarray(b)
    h = cuscan.linear_scan(cupy.asarray(a), apart, axis=1)
    np.testing.assert_array_equal(h.get(), oracle.linear_scan(a, b, axis=1).value)
    cuscan.linear_scan(cupy.asarray(a), apart, axis=1, out=apart)
    np.testing.assert_array_equal(apart.get(), h.get())


# gates that broadcast


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_gates_broadcast(executor, axis):
    a, b = real_inputs((3, 21, 5))
    few = a[:1], a[:, :1], a[:, :, :1], a[0], a[0, 0], a[:1, :, :1], a[0, :, :1], a[:1, :1, :1], np.array(a[0, 0, 0])
    for gates in few:
        check(executor, gates, b, axis=axis, every_plan=plans(executor))


@pytest.mark.parametrize("dtype", DTYPES)
def test_scalar_gates(executor, dtype):
    _, b = real_inputs((3, 40), dtype)
    one = accumulation(dtype).type
    for gate in (0, 1, -1, True + 1, 0.9, one(0.9)):
        rounded = np.asarray(gate, accumulation(dtype))
        expected = oracle.linear_scan(rounded, b, axis=1, eps=roundoff(b))
        for plan in plans(executor):
            h, last = scan(executor, gate, b, plan=plan, axis=1)
            oracle.assert_scan_close(h, expected.value, expected.bound)
            oracle.assert_scan_close(last, expected.last, expected.last_bound)


@pytest.mark.full_on_host
@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
def test_complex_scalar_gate(executor, dtype):
    _, b = real_inputs((3, 40), dtype)
    gate = np.asarray(0.8 - 0.5j, dtype)
    expected = oracle.linear_scan(gate, b, axis=1, eps=roundoff(b))
    for plan in plans(executor):
        h, _ = scan(executor, 0.8 - 0.5j, b, plan=plan, axis=1)
        oracle.assert_scan_close(h, expected.value, expected.bound)


def test_exponential_average_in_closed_form(executor):
    for plan in plans(executor):
        h, _ = scan(executor, 0.5, np.ones(60, np.float32), plan=plan)
        np.testing.assert_array_equal(h, np.float32(2 - 0.5 ** np.arange(60.0)))


# out


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_out_may_be_exactly_an_input(executor, dtype, reverse):
    for shape, axis in (((3, 150), 1), ((150, 40), 0)):
        a, b = real_inputs(shape, dtype)
        for plan in plans(executor):
            expected, last = scan(executor, a, b, plan=plan, axis=axis, reverse=reverse)
            for index in range(2):
                inputs = [a.copy(), b.copy()]
                h, again = scan(executor, *inputs, plan=plan, axis=axis, reverse=reverse, out=inputs[index])
                assert h is inputs[index]
                np.testing.assert_array_equal(h, expected)
                np.testing.assert_array_equal(again, last)
                np.testing.assert_array_equal(inputs[1 - index], (a, b)[1 - index])


@pytest.mark.parametrize(
    ("dtype", "out_dtype"),
    [
        *((dtype, out) for dtype in (np.float32, BF16) for out in (np.float16, BF16, np.float32, np.float64)),
        *(pytest.param(np.float16, out, marks=on_host_full) for out in (np.float16, BF16, np.float32, np.float64)),
        *(pytest.param(np.float64, out, marks=on_host_full) for out in (np.float16, BF16, np.float32)),
        pytest.param(np.complex64, np.complex128, marks=on_host_full),
        pytest.param(np.complex128, np.complex64, marks=on_host_full),
    ],
)
def test_out_dtype_is_rounded_once(executor, dtype, out_dtype):
    a, b = real_inputs((3, 90), dtype)
    for plan in plans(executor):
        own, _ = scan(executor, a, b, plan=plan, axis=1, out_dtype=accumulation(dtype))
        out = np.zeros((90, 3), out_dtype).T
        for options in ({"out_dtype": out_dtype}, {"out": out}, {"out_dtype": np.dtype(out_dtype).name}):
            h, last = scan(executor, a, b, plan=plan, axis=1, **options)
            np.testing.assert_array_equal(h, own.astype(out_dtype))
            np.testing.assert_array_equal(last, own[:, -1])


def test_a_result_is_fresh_and_contiguous(executor):
    a, b = real_inputs((3, 40, 5))
    h, last = scan(executor, np.asfortranarray(a), np.asfortranarray(b), axis=1)
    assert h.flags.c_contiguous
    assert last.flags.c_contiguous
    assert h.flags.writeable
    assert not np.may_share_memory(h, b)


def test_return_last_state_is_off(executor):
    a, b = exact_inputs((3, 40))
    h = executor(cuscan.linear_scan, a, b, axis=1)
    np.testing.assert_array_equal(h, oracle.linear_scan(a, b, axis=1).value)


# bits


def test_the_same_call_gives_the_same_bits(executor):
    a, b = real_inputs((5, 3000))
    for plan in plans(executor, chunk=700):
        first, last = scan(executor, a, b, plan=plan, axis=1)
        scan(executor, *real_inputs((7, 33), BF16), axis=1)
        again, last_again = scan(executor, a.copy(), b.copy(), plan=plan, axis=1)
        np.testing.assert_array_equal(again.view(np.int32), first.view(np.int32))
        np.testing.assert_array_equal(last_again.view(np.int32), last.view(np.int32))


def test_fit_strides_and_alignment_do_not_change_bits(executor):
    a, b = real_inputs((40, 300))
    for plan in plans(executor, chunk=70):
        expected, _ = scan(executor, a, b, plan=plan, axis=1)
        if not plan:
            continue  # the order that is chosen may depend on strides
        padded = np.zeros((40, 301), np.float32)
        padded[:, 1:] = b
        h, _ = scan(executor, a[::-1].copy()[::-1], padded[:, 1:], plan=plan, axis=1)
        np.testing.assert_array_equal(h.view(np.int32), expected.view(np.int32))
        for warps in (1, 2, 4, 8) if executor.kernels else ():
            if warps >= plan.get("row_warps", 1):
                h, _ = scan(executor, a, b, plan={**plan, "warps": warps}, axis=1)
                np.testing.assert_array_equal(h.view(np.int32), expected.view(np.int32))


@pytest.mark.parametrize("dtype", [BF16, pytest.param(np.float16, marks=pytest.mark.full)])
def test_rows_in_pairs_have_the_bits_of_single_rows(host_executor, monkeypatch, dtype):
    names, start = set(), _launch._start

    def spy(place, source, name, *rest):
        names.add(name)
        start(place, source, name, *rest)

    monkeypatch.setattr(_launch, "_start", spy)
    item = np.dtype(dtype).name
    # 35 and 32 pairs: lanes without a row, and whole tiles. 150 steps are whole tiles and a tail.
    for shape, out_dtype in (((2, 150, 35), None), ((1, 150, 64), None), ((1, 40, 64), np.float32)):
        every, inputs = 2 * shape[2], []
        for x in real_inputs((*shape[:2], every), dtype):
            apart = np.zeros((*shape[:2], every + 2), dtype)
            apart[..., 1:-1] = x
            inputs.append((x, apart[..., 1:-1]))
        (a, odd_a), (b, odd_b) = inputs
        h0 = rng(1).normal(size=(shape[0], every)).astype(np.float32)
        block, split = ({**schedule, "lanes": Lanes.ROWS} for schedule in (BLOCK, SPLIT))
        for plan in ({}, SERIAL, {**block, "row_warps": 8}, {**split, "chunk": 70}):
            for gates, odd_gates, state in ((a, odd_a, h0), (a, odd_a, None), (0.9, 0.9, None)):
                results = []
                for pairs, arrays in ((True, (gates, b)), (False, (odd_gates, odd_b))):
                    names.clear()
                    results.append(scan(host_executor, *arrays, state, plan, axis=1, out_dtype=out_dtype))
                    assert (f"linear_scan_rows_apply_pairs_{item}" in names) == pairs
                for x, y in zip(*results, strict=True):
                    np.testing.assert_array_equal(x.view(np.uint8), y.view(np.uint8))


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("axis", [0, 1])
def test_what_is_not_finite_stays_in_its_row_and_behind_it(executor, axis, poison):
    a, b = real_inputs((70, 70))
    a = np.abs(a) + np.float32(0.1)
    row = (slice(None), 33) if axis == 0 else (33, slice(None))
    others = np.ones((70, 70), bool)
    others[row] = False
    for plan in plans(executor):
        clean, _ = scan(executor, a, b, plan=plan, axis=axis)
        for which in range(2):
            inputs = [a.copy(), b.copy()]
            inputs[which][row][41] = poison
            h, last = scan(executor, *inputs, plan=plan, axis=axis)
            np.testing.assert_array_equal(h[others], clean[others])
            np.testing.assert_array_equal(h[row][:41], clean[row][:41])
            assert not np.isfinite(h[row][41:]).any()
            assert np.isnan(h[row][41:]).all() == np.isnan(poison)
            assert np.isfinite(np.delete(last, 33)).all()
            assert not np.isfinite(last[33])


# laws


@given(
    data=st.data(),
    shape=st.lists(st.integers(1, 6), max_size=2),
    length=st.integers(0, 90),
    reverse=st.booleans(),
    chunk=st.integers(1, 40),
)
@settings(max_examples=40)
def test_a_scan_may_be_cut_anywhere(executor, data, shape, length, reverse, chunk):
    axis = data.draw(st.integers(0, len(shape)))
    cut = data.draw(st.integers(0, length))
    plan = data.draw(st.sampled_from(plans(executor, chunk)))
    shape = (*shape[:axis], length, *shape[axis:])
    a, b = exact_inputs(shape, seed=length)
    h0 = rng(cut).integers(-8, 9, without(shape, axis)).astype(np.float32)
    whole, last = scan(executor, a, b, h0, plan, axis=axis, reverse=reverse)
    pieces = [np.take(x, range(cut), axis) for x in (a, b)], [np.take(x, range(cut, length), axis) for x in (a, b)]
    state, parts = h0, []
    for piece in reversed(pieces) if reverse else pieces:
        part, state = scan(executor, *piece, state, plan, axis=axis, reverse=reverse)
        parts.append(part)
    np.testing.assert_array_equal(np.concatenate(parts[::-1] if reverse else parts, axis), whole)
    np.testing.assert_array_equal(state, last)


def test_reverse_is_flip_scan_flip(executor):
    a, b = real_inputs((4, 130))
    for plan in plans(executor):
        expected, last = scan(executor, a[:, ::-1].copy(), b[:, ::-1].copy(), plan=plan, axis=1)
        h, last_again = scan(executor, a, b, plan=plan, axis=1, reverse=True)
        np.testing.assert_array_equal(h[:, ::-1], expected)
        np.testing.assert_array_equal(last_again, last)


@LANES
@pytest.mark.parametrize("reverse", [False, True])
def test_one_pass_over_many_groups(executor, lanes, reverse):
    # A group is 32 tiles of 768 steps a warp over time, and a tile of 24 steps for each warp over rows.
    shape = (2, 2 * 32 * 768 + 700) if lanes is Lanes.TIME else (37, 3 * 2 * 48 + 21)
    a, b = exact_inputs(shape)
    h0 = np.arange(-3, shape[0] - 3, dtype=np.float32)
    expected, last = cuscan.linear_scan(a, b, h0, axis=1, return_last_state=True, reverse=reverse)
    for warps in (1, 2):
        plan = {**SPLIT, "lanes": lanes, "row_warps": warps}
        h, end = scan(executor, a, b, h0, plan, axis=1, reverse=reverse)
        np.testing.assert_array_equal(h, expected)
        np.testing.assert_array_equal(end, last)


def test_one_pass_of_16_bit_items(executor):
    # A group is 32 tiles of 1536 steps; whole tiles, a tail, and items that are not aligned.
    length = 32 * 1536 + 700
    a, b = exact_inputs((2, length + 1), BF16)
    for start in (0, 1):
        now = [x[:, start : start + length] for x in (a, b)]
        expected, last = cuscan.linear_scan(*now, axis=1, return_last_state=True, out_dtype="float32")
        h, end = scan(executor, *now, plan={**SPLIT, "lanes": Lanes.TIME, "row_warps": 1}, axis=1, out_dtype="float32")
        np.testing.assert_array_equal(h, expected)
        np.testing.assert_array_equal(end, last)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("number", [False, True])
def test_two_rows_that_take_turns_are_one(executor, number, reverse):
    # A tile is 320 steps of a warp. Arrays that are not aligned, and those read or written once, need not be pairs.
    length = 32 * 320 + 500
    a, b = exact_inputs((length, 2, 2))
    a = -1.0 if number else a
    wide = np.zeros((2, 5), np.float32)
    h0 = wide[:, 1:4:2]
    h0[:] = [[3, -2], [1, 4]]
    expected, last = cuscan.linear_scan(a, b, h0, axis=0, return_last_state=True, reverse=reverse)
    plan = {**SPLIT, "lanes": Lanes.TIME, "row_warps": 1}
    for start in (0, 1):
        memory = np.zeros((2, length * 4 + 1), np.float32)
        rows = [memory[i, start : start + length * 4].reshape(2, length, 2).transpose(1, 0, 2) for i in range(2)]
        rows[0][:], rows[1][:] = a, b
        gate = a if number else rows[0]
        out = np.zeros((length, 2, 4), np.float32)[:, :, ::2] if start else None
        h, end = scan(executor, gate, rows[1], h0, plan, axis=0, reverse=reverse, out=out)
        np.testing.assert_array_equal(h, expected)
        np.testing.assert_array_equal(end, last)


def test_pairs_whose_results_lie_apart(executor):
    # The states of a pair go to rows that are far apart or the other way round, with the strides of packs.
    a, b = exact_inputs((700, 2))
    plan = {**SPLIT, "lanes": Lanes.TIME, "row_warps": 1}
    expected = cuscan.linear_scan(a, b, axis=0)
    memory = np.zeros(2 * 708 * 2, np.float32)
    start = -memory.ctypes.data // 4 % 4
    apart = memory[start : start + 2 * 700 * 2].reshape(2, 700, 2)[..., 0].T
    turned = np.lib.stride_tricks.as_strided(memory[start + 4 :], (700, 2), (8, -4))
    for out in (apart, turned):
        h, _ = scan(executor, a, b, None, plan, axis=0, out=out)
        np.testing.assert_array_equal(h, expected)
    a, b = (np.stack([x] * 5).transpose(2, 0, 1) for x in (a, b))  # (2, 5, 700), of last states (2, 5)
    expected, last = cuscan.linear_scan(a, b, axis=2, return_last_state=True)
    h, end = scan(executor, a, b, None, plan, axis=2)
    np.testing.assert_array_equal(h, expected)
    np.testing.assert_array_equal(end, last)


@pytest.mark.parametrize("shape", [(300, 110, 3), (300, 3, 110)])
def test_a_plan_does_not_depend_on_what_is_not_read_each_step(host_executor, shape):
    a, b = real_inputs(shape, BF16)
    h0 = np.ones(shape[1:], np.float32)
    with watched() as plans:
        for start in (h0, np.asfortranarray(h0)):  # the rows are merged with one of them only
            host_executor(cuscan.linear_scan, a, b, start, axis=0)
    assert len({problem for _, problem, *_ in plans}) == 1


# memory


@LANES
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_memory_is_outputs_and_two_summaries_a_chunk(host_executor, dtype, lanes):
    a, b = real_inputs((12, 700), dtype)
    output, last, summary = b.nbytes, 12 * 4, 12 * 7 * 4
    with forced(**SPLIT, lanes=lanes, chunk=100):
        host_executor(cuscan.linear_scan, a[0], b, axis=1, return_last_state=True)
        assert sorted(host_executor.allocated) == sorted([output, last, summary, summary])
        host_executor(cuscan.linear_scan, a, b, axis=1, out=b)
        assert host_executor.allocated == [summary, summary]
    with forced(**SPLIT, lanes=lanes, row_warps=1):
        if dtype is np.float32 or lanes is Lanes.TIME:
            host_executor(cuscan.linear_scan, a, b, axis=1, out=b)
            tiles = groups = 30 if lanes is Lanes.ROWS else 1
            assert host_executor.allocated == [16 + 12 * (16 * tiles + 8 * groups)]
    with forced(**BLOCK, lanes=lanes):
        host_executor(cuscan.linear_scan, a, b, axis=1)
        assert host_executor.allocated == [output]


def test_peak_on_a_gpu(cuda_executor):
    cupy = cuda_executor.xp
    b = cupy.ones((64, 1 << 16), np.float32)
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc), forced(**SPLIT, lanes=Lanes.TIME, chunk=1 << 12):
        h = cuscan.linear_scan(b[:1], b, axis=1)
        assert float(h[0, -1]) == 1 << 16
        assert pool.total_bytes() <= b.nbytes + 2 * 64 * 16 * 4 + 2 * 512


def test_peak_of_numpy_is_a_tile_beside_the_result():
    _, b = real_inputs((4, 1 << 18))
    tracemalloc.start()
    try:
        cuscan.linear_scan(0.5, b, axis=1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1.5 * b.nbytes
