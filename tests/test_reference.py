"""The NumPy implementation against the oracle, and by properties that need none."""

import tracemalloc
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuscan import STATE_INTERVAL, reference
from cuscan.testing import oracle

BF16 = ml_dtypes.bfloat16
ACCUMULATE = {
    np.float16: np.float32,
    BF16: np.float32,
    np.float32: np.float32,
    np.float64: np.float64,
    np.complex64: np.complex64,
    np.complex128: np.complex128,
}
SEGMENTS = [1, 2, 3, 7, 1000]
# Every length around the edges of 1, 2, 3 and 7 segments, and of the tiles that are staged (64 steps).
LENGTHS = [0, 1, 2, 3, 4, 6, 7, 8, 13, 14, 15, 20, 21, 22, 63, 64, 65, 129]


def rng(seed=0):
    return np.random.default_rng(seed)


def roundoff(dtype):
    return 2.0**-53 if dtype in (np.float64, np.complex128) else 2.0**-24


def flags(mask, reset, cu_seqlens, shape):
    """The options as the reference takes them."""
    given = {name: np.broadcast_to(x, shape) for name, x in (("mask", mask), ("reset", reset)) if x is not None}
    return given if cu_seqlens is None else given | {"cu_seqlens": np.asarray(cu_seqlens, np.int64)}


def linear_scan(
    a, b, h0=None, *, axis=-1, reverse=False, segments=1, out=None, accumulate=None, mask=None, reset=None,
    cu_seqlens=None
):  # fmt: skip
    b = np.asarray(b)
    accumulate = np.dtype(accumulate or ACCUMULATE[b.dtype.type])
    out = np.empty_like(b) if out is None else out
    h0 = None if h0 is None else np.asarray(h0, accumulate)
    last = reference.linear_scan(
        np.asarray(a), b, h0, out, axis=axis, reverse=reverse, accumulate=accumulate, segments=segments,
        **flags(mask, reset, cu_seqlens, b.shape),
    )  # fmt: skip
    assert last.dtype == accumulate
    return out, last


def check_linear(a, b, h0=None, *, segments=1, out=None, **options):
    expected = oracle.linear_scan(a, b, h0, **options, eps=roundoff(b.dtype.type))
    out, last = linear_scan(a, b, h0, segments=segments, out=out, **options)
    oracle.assert_scan_close(out, expected.value, expected.bound)
    oracle.assert_scan_close(last, expected.last, expected.last_bound)


def check_linear_exact(a, b, h0=None, **options):
    """For inputs whose every intermediate is exact: the oracle's values in any number of segments."""
    expected = oracle.linear_scan(a, b, h0, **options)
    for segments in (1, 2, 3, 7):
        out, last = linear_scan(a, b, h0, segments=segments, out=np.full_like(b, 99), **options)
        np.testing.assert_array_equal(out, expected.value)
        np.testing.assert_array_equal(last, expected.last)


def gates_and_inputs(shape, dtype=np.float32, seed=0):
    r = rng(seed)
    a, b = r.uniform(-1.05, 1.05, shape), r.normal(size=shape)
    if np.dtype(dtype).kind == "c":
        a, b = a * np.exp(1j * r.normal(size=shape)), b + 1j * r.normal(size=shape)
    return a.astype(dtype), b.astype(dtype)


# linear_scan


@pytest.mark.parametrize("segments", SEGMENTS)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("with_h0", [False, True])
def test_linear_every_length(segments, reverse, with_h0):
    for length in LENGTHS:
        a, b = gates_and_inputs((3, length), seed=length)
        h0 = np.array([1.0, -2.0, 3.0], np.float32) if with_h0 else None
        check_linear(a, b, h0, reverse=reverse, segments=segments)


@pytest.mark.parametrize("dtype", ACCUMULATE)
@pytest.mark.parametrize("segments", [1, 3])
def test_linear_types(dtype, segments):
    a, b = gates_and_inputs((2, 90, 3), dtype)
    h0 = np.full((2, 3), 1.25 + (0.5j if np.dtype(dtype).kind == "c" else 0))
    check_linear(a, b, h0, axis=1, segments=segments)


def test_linear_out_type_is_rounded_once():
    a, b = np.full(300, 0.999, np.float32), np.ones(300, np.float32)
    wide, _ = linear_scan(a, b)
    narrow, last = linear_scan(a, b, out=np.empty(300, BF16))
    np.testing.assert_array_equal(narrow, wide.astype(BF16))
    assert last == wide[-1]
    # A running sum in bfloat16 sticks at 256.
    total, _ = linear_scan(np.ones(4096, BF16), np.ones(4096, BF16), segments=3)
    assert total[-1] == 4096


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -3])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("segments", [1, 2])
def test_linear_axes_and_views(axis, reverse, segments):
    big_a, big_b = gates_and_inputs((9, 14, 10))
    h0_shape = tuple(n for i, n in enumerate((5, 7, 5)) if i != axis % 3)
    views = [
        (big_a[:5, :7, :5], big_b[4:, 7:, 5:]),
        (big_a[::2, ::-2, ::2], big_b[::-2, ::2, 1::2]),
        (big_a.T[::2, ::2, ::2].transpose(2, 1, 0)[:5], big_b[::2, :7, ::2]),
        (big_a[:1, :7, :1], big_b[:5, :7, :5]),
        (big_a[0, 0, 0], np.asfortranarray(big_b[:5, :7, :5])),
    ]
    for a, b in views:
        before = b.copy()
        out = np.full((10, 7, 10), 7, np.float32)
        check_linear(
            a,
            b,
            rng().normal(size=h0_shape),
            axis=axis,
            reverse=reverse,
            segments=segments,
            out=out[::-2, :, ::2],
        )
        np.testing.assert_array_equal(b, before)
        np.testing.assert_array_equal(out[::2], 7)
        np.testing.assert_array_equal(out[:, :, 1::2], 7)


@pytest.mark.parametrize("segments", SEGMENTS)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_linear_out_is_an_input(segments, reverse, dtype):
    a, b = gates_and_inputs((2, 150, 3), dtype)
    expected, last = linear_scan(a, b, axis=1, reverse=reverse, segments=segments)
    for index in range(2):
        inputs = [a.copy(), b.copy()]
        _, again = linear_scan(*inputs, axis=1, reverse=reverse, segments=segments, out=inputs[index])
        np.testing.assert_array_equal(inputs[index], expected)
        np.testing.assert_array_equal(again, last)


@pytest.mark.parametrize("reverse", [False, True])
def test_linear_segments_agree_bit_for_bit_on_exact_inputs(reverse):
    r = rng()
    a = r.choice(np.array([-1, 0, 1], np.float32), (200, 5), p=[0.45, 0.1, 0.45])
    b = r.integers(-8, 9, (200, 5)).astype(np.float32)
    h0 = r.integers(-8, 9, 5).astype(np.float32)
    plain, last = linear_scan(a, b, h0, axis=0, reverse=reverse)
    np.testing.assert_array_equal(plain, oracle.linear_scan(a, b, h0, axis=0, reverse=reverse).value)
    for segments in SEGMENTS:
        out, again = linear_scan(a, b, h0, axis=0, reverse=reverse, segments=segments)
        np.testing.assert_array_equal(out, plain)
        np.testing.assert_array_equal(again, last)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (0, 0), (2, 0, 3)])
@pytest.mark.parametrize("segments", [1, 2])
def test_linear_empty(shape, segments):
    for axis in range(len(shape)):
        rest = shape[:axis] + shape[axis + 1 :]
        empty = np.empty(shape, np.float32)
        _, last = linear_scan(empty, empty, np.full(rest, 2.0), axis=axis, segments=segments)
        np.testing.assert_array_equal(last, np.full(rest, 2.0))
        _, last = linear_scan(empty, empty, axis=axis, segments=segments)
        np.testing.assert_array_equal(last, np.zeros(rest))


@pytest.mark.parametrize("segments", [1, 2, 3, 4])
def test_linear_no_state_enters_without_h0(segments):
    a = np.array([np.inf, 1, 0.5, 1], np.float32)
    out, _ = linear_scan(a, np.array([-0.0, 1, 1, 1], np.float32), segments=segments)
    np.testing.assert_array_equal(out, [0, 1, 1.5, 2.5])
    assert np.signbit(out[0])
    out, _ = linear_scan(a, np.zeros(4, np.float32), 0.0, segments=segments)
    assert np.isnan(out).all()


@pytest.mark.parametrize("segments", SEGMENTS)
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_linear_what_is_not_finite_stays_in_its_row_and_behind_it(segments, poison):
    a, b = gates_and_inputs((40, 3))
    a = np.abs(a) + np.float32(0.1)
    clean, _ = linear_scan(a, b, axis=0, segments=segments)
    for array in (a, b):
        before = array[17, 1]
        array[17, 1] = poison
        out, last = linear_scan(a, b, axis=0, segments=segments)
        array[17, 1] = before
        np.testing.assert_array_equal(out[:, [0, 2]], clean[:, [0, 2]])
        np.testing.assert_array_equal(out[:17], clean[:17])
        np.testing.assert_array_equal(np.isnan(out[17:, 1]), np.isnan(poison))
        assert not np.isfinite(out[17:, 1]).any()
        assert not np.isfinite(last[1])


@pytest.mark.parametrize("segments", SEGMENTS)
def test_linear_gates_that_underflow(segments):
    # A ratio of cumulative products would be 0 / 0 here.
    a = np.tile(np.array([1e-30, 1.0], np.float32), 60)
    b = rng().normal(size=120).astype(np.float32)
    check_linear(a, b, 1e30, segments=segments)


# linear_scan: mask, reset and packed sequences


def exact_row(shape, seed=0):
    """Gates of -1, 0 and 1 and small integers; h0 of -8 to 8 may stand before them."""
    r = rng(seed)
    a = r.choice(np.array([-1, 0, 1], np.float32), shape, p=[0.45, 0.1, 0.45])
    return a, r.integers(-8, 9, shape).astype(np.float32)


def poison(x, where):
    """NaN, inf and -inf in turn."""
    x[where] = np.resize(np.array([np.nan, np.inf, -np.inf], x.dtype), np.count_nonzero(where))


def masks(rows, length, seed=0):
    """Padding on the left and on the right, a different one in each row; scattered; nothing counts."""
    r = rng(seed)
    t, edge = np.arange(length), r.integers(0, length + 1, (rows, 1))
    return t >= edge, t < edge, r.random((rows, length)) < 0.6, np.zeros((rows, length), bool)


def random_bounds(length, seed=0):
    """Five sequences in 0 to length; some may be empty, and the ends need not be covered."""
    return np.sort(rng(seed).integers(0, length + 1, 6))


@pytest.mark.parametrize("segments", [1, 2, 3, 4])
def test_linear_marks_by_hand(segments):
    a, b = np.array([2, np.nan, np.inf, 3, np.nan], np.float32), np.array([1, 5, 2, 1, 7], np.float32)
    mask, reset = np.array([1, 0, 1, 1, 0], bool), np.array([0, 0, 1, 0, 1], bool)
    out, last = linear_scan(a, b, 10, segments=segments, mask=mask, reset=reset)
    np.testing.assert_array_equal(out, [21, 21, 2, 7, 0])
    assert last == 0
    out, last = linear_scan(a, b, 10, segments=segments, mask=mask)
    np.testing.assert_array_equal(out, [21, 21, np.inf, np.inf, np.inf])
    out, last = linear_scan(a, b, 10, segments=segments, mask=mask, reset=np.roll(reset, 1), reverse=True)
    np.testing.assert_array_equal(out, [1, np.inf, np.inf, 1, 10])
    assert last == 1
    # The empty sequence returns its h0.
    a, b = np.arange(2, 8, dtype=np.float32), np.ones(6, np.float32)
    packed = {"cu_seqlens": [1, 3, 3, 5], "segments": segments}
    for reverse, h0, values, states in (
        (False, [10, 15, 20], [0, 31, 125, 101, 607, 0], [125, 15, 607]),
        (True, [10, 15, 20], [0, 124, 41, 606, 121, 0], [124, 15, 606]),
        (False, None, [0, 1, 5, 1, 7, 0], [5, 0, 7]),
        (True, None, [0, 4, 1, 6, 1, 0], [4, 0, 6]),
    ):
        out, last = linear_scan(a, b, h0, **packed, reverse=reverse)
        np.testing.assert_array_equal(out, values)
        np.testing.assert_array_equal(last, states)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("h0", [None, np.array([5, -6, 7], np.float32)])
def test_linear_mask(reverse, h0):
    for length in range(1, 41):
        for mask in masks(3, length, seed=length):
            a, b = exact_row((3, length), seed=length)
            poison(a, ~mask)
            poison(b, ~mask)
            check_linear_exact(a, b, h0, reverse=reverse, mask=mask)


def test_linear_a_masked_first_step_leaves_zero_and_not_nothing():
    a, b = np.array([1, np.inf, 1, 1], np.float32), np.array([5, 1, 1, 1], np.float32)
    for segments in (1, 2, 3, 4):
        out, _ = linear_scan(a, b, mask=np.array([0, 1, 1, 1], bool), segments=segments)
        np.testing.assert_array_equal(out, [0, np.nan, np.nan, np.nan])


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("with_h0", [False, True])
def test_linear_nothing_gets_past_a_reset_at_any_step(reverse, with_h0):
    for length in range(1, 41):
        # Row t has its reset at step t, NaN and inf before it, h0 included, and a gate there that must not be read.
        a, b = exact_row((length, length), seed=length)
        reset = np.eye(length, dtype=bool)
        before = np.triu(np.ones((length, length), bool), 1) if reverse else np.tri(length, k=-1, dtype=bool)
        h0 = np.full(length, np.nan, np.float32) if with_h0 else None
        poison(a, before | reset)
        poison(b, before)
        expected = oracle.linear_scan(a, b, h0, reverse=reverse, reset=reset)
        for segments in (1, 2, 3, 7):
            out, last = linear_scan(a, b, h0, reverse=reverse, reset=reset, segments=segments)
            np.testing.assert_array_equal(out[~before], expected.value[~before])
            np.testing.assert_array_equal(last, expected.last)
            assert np.isfinite(last).all()
            assert not np.isfinite(out[before]).any()
        check_linear_exact(np.full_like(a, np.nan), np.nan_to_num(b), h0, reverse=reverse, reset=True)


def test_linear_reset_takes_the_input_as_it_is():
    for segments in (1, 2, 4):
        out, _ = linear_scan(
            np.ones(4, np.float32), np.full(4, -0.0, np.float32), 0, reset=[False, True, True, False], segments=segments
        )
        np.testing.assert_array_equal(np.signbit(out), [False, True, True, True])


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("with_h0", [False, True])
@pytest.mark.parametrize(
    ("length", "cu_seqlens"),
    [
        (9, [0, 0, 5, 5, 9]), (9, [0, 9]), (9, [2, 2, 4, 7]), (9, [4, 4]), (9, [9, 9, 9]), (9, [3]), (40, [3, 4, 38]),
        (40, list(range(41))), (1, [0, 1]), (1, [0, 0]), (0, [0, 0, 0]), (12, [0, 0, 0, 0, 12, 12]),
    ],
)  # fmt: skip
def test_linear_packed(reverse, with_h0, length, cu_seqlens):
    a, b = exact_row((3, length))
    h0 = rng().integers(-8, 9, (len(cu_seqlens) - 1, 3)).astype(np.float32) if with_h0 else None
    t = np.arange(length)
    outside = np.broadcast_to((t < cu_seqlens[0]) | (t >= cu_seqlens[-1]), a.shape)
    poison(a, outside)
    poison(b, outside)
    if not with_h0:
        starts = [stop - 1 if reverse else start for start, stop in pairwise(cu_seqlens) if start < stop]
        a[:, starts] = np.inf
    check_linear_exact(a, b, h0, reverse=reverse, cu_seqlens=cu_seqlens)
    check_linear_exact(a.T, b.T, h0, axis=0, reverse=reverse, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("reverse", [False, True])
def test_linear_marks_together(reverse):
    for seed in range(150):
        r = rng(seed)
        length = int(r.integers(1, 41))
        a, b = exact_row((2, length), seed)
        mask, reset = r.random((2, length)) < 0.7, r.random((2, length)) < 0.1
        cu_seqlens = random_bounds(length, seed) if seed % 3 else None
        h0 = r.integers(-8, 9, (2,) if cu_seqlens is None else (5, 2)).astype(np.float32) if seed % 2 else None
        a[reset] = np.nan
        poison(a, ~mask)
        poison(b, ~mask)
        check_linear_exact(a, b, h0, reverse=reverse, mask=mask, reset=reset, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("segments", [1, 2, 3, 7])
def test_linear_sequences_do_not_see_each_other(segments):
    a, b = gates_and_inputs((2, 40))
    options = {"cu_seqlens": [2, 9, 9, 25, 36], "segments": segments}
    h0 = rng().normal(size=(4, 2))
    clean, last = linear_scan(a, b, h0, **options)
    poison(a[:, 9:25], np.ones((2, 16), bool))
    a[:, :2] = b[:, 36:] = h0[2] = np.nan
    out, again = linear_scan(a, b, h0, **options)
    np.testing.assert_array_equal(np.delete(out, slice(9, 25), axis=1), np.delete(clean, slice(9, 25), axis=1))
    np.testing.assert_array_equal(np.delete(again, 2, axis=0), np.delete(last, 2, axis=0))
    assert np.isnan(out[:, 9:25]).all()
    assert np.isnan(again[2]).all()


@pytest.mark.parametrize("dtype", ACCUMULATE)
@pytest.mark.parametrize("segments", [1, 3])
@pytest.mark.parametrize("reverse", [False, True])
def test_linear_marks_types(dtype, segments, reverse):
    a, b = gates_and_inputs((2, 90, 3), dtype)
    r = rng()
    mask, reset = r.random((2, 90, 3)) < 0.8, r.random((2, 90, 3)) < 0.05
    h0 = r.normal(size=(4, 2, 3)) + (1j * r.normal(size=(4, 2, 3)) if np.dtype(dtype).kind == "c" else 0)
    poison(a, ~mask | reset)
    poison(b, ~mask)
    options = {"axis": 1, "segments": segments, "reverse": reverse}
    check_linear(a, b, h0[0].astype(ACCUMULATE[dtype]), **options, mask=mask, reset=reset)
    cu_seqlens = [5, 30, 30, 31, 85]
    check_linear(a, b, h0.astype(ACCUMULATE[dtype]), **options, mask=mask, reset=reset, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("segments", [1, 3])
def test_linear_marks_axes_and_views(axis, segments):
    big_a, big_b = gates_and_inputs((10, 14, 12))
    a, b = big_a[::2, ::-2, ::2], big_b[::-2, ::2, 1::2]
    r = rng()
    for shape in ((5, 7, 6), (1, 7, 1), (7, 6), (5, 1, 1), ()):
        mask, reset = r.random(shape) < 0.7, r.random(shape) < 0.2
        before = mask.copy(), reset.copy()
        check_linear(a, b, axis=axis, segments=segments, mask=mask, reset=reset, reverse=True)
        check_linear(a, b, axis=axis, segments=segments, mask=mask, reset=reset, cu_seqlens=[1, 3, 4])
        np.testing.assert_array_equal(mask, before[0])
        np.testing.assert_array_equal(reset, before[1])


@pytest.mark.parametrize("segments", SEGMENTS)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_linear_marks_where_out_is_an_input(segments, reverse, dtype):
    a, b = gates_and_inputs((2, 150, 3), dtype)
    mask, reset = rng().random((2, 2, 150, 3)) < 0.5
    options = {"axis": 1, "reverse": reverse, "segments": segments, "mask": mask, "reset": reset}
    for more in ({}, {"cu_seqlens": [3, 70, 70, 140]}):
        expected, last = linear_scan(a, b, **options, **more)
        for index in range(2):
            inputs = [a.copy(), b.copy()]
            _, again = linear_scan(*inputs, **options, **more, out=inputs[index])
            np.testing.assert_array_equal(inputs[index], expected)
            np.testing.assert_array_equal(again, last)


# linear_scan: laws

rows = st.integers(0, 60).flatmap(
    lambda n: st.tuples(*[st.lists(st.sampled_from(v), min_size=n, max_size=n) for v in ([-1, 0, 1], range(-8, 9))])
)
exact = settings(max_examples=60, deadline=None, derandomize=True)


def scan_exact(a, b, h0=None, **options):
    return linear_scan(np.array(a, np.float32), np.array(b, np.float32), h0, **options)


@exact
@given(rows, st.integers(0, 60), st.integers(1, 9), st.booleans())
def test_law_a_scan_may_be_cut_anywhere(row, cut, segments, with_h0):
    a, b = row
    h0 = 3.0 if with_h0 else None
    whole, last = scan_exact(a, b, h0, segments=segments)
    first, middle = scan_exact(a[:cut], b[:cut], h0)
    entering = middle if cut > 0 or with_h0 else None
    second, end = scan_exact(a[cut:], b[cut:], entering)
    np.testing.assert_array_equal(np.concatenate([first, second]), whole)
    assert (end if cut < len(b) or entering is not None else middle) == last


@exact
@given(rows, st.integers(1, 9))
def test_law_reverse_is_flip_scan_flip(row, segments):
    a, b = row
    backward, first = scan_exact(a, b, 2.0, reverse=True, segments=segments)
    forward, last = scan_exact(a[::-1], b[::-1], 2.0)
    np.testing.assert_array_equal(backward, forward[::-1])
    assert first == last


@exact
@given(rows, st.integers(1, 9), st.integers(0, 9))
def test_law_the_identity_changes_nothing(row, segments, padding):
    a, b = row
    out, last = scan_exact(a, b, 2.0, segments=segments)
    padded, still = scan_exact(a + [1] * padding, b + [0] * padding, 2.0, segments=segments)
    np.testing.assert_array_equal(padded[: len(b)], out)
    np.testing.assert_array_equal(padded[len(b) :], np.full(padding, last))
    assert still == last


# selective_scan


def layer(batch=2, length=10, channels=6, state=3, *, B=1, C=1, dtype=np.float32, parameter=None, seed=0):
    """B and C are their number of groups, or None where constant in time."""
    r = rng(seed)
    parameter = np.dtype(parameter or dtype)

    def draw(*shape):
        x = r.normal(size=shape)
        return (x + 1j * r.normal(size=shape) if parameter.kind == "c" else x).astype(parameter)

    def matrix(groups):
        return draw(channels, state) if groups is None else draw(batch, length, groups, state)

    A = -np.exp(r.normal(size=(channels, state)))
    real = np.float32 if parameter.kind == "c" else parameter
    return {
        "u": r.normal(size=(batch, length, channels)).astype(dtype),
        "delta": (r.normal(size=(batch, length, channels)) - 1).astype(dtype),
        "A": (A + 3j * r.normal(size=A.shape) if parameter.kind == "c" else A).astype(parameter),
        "B": matrix(B),
        "C": matrix(C),
        "D": r.normal(size=channels).astype(real),
        "z": 3 * r.normal(size=(batch, length, channels)).astype(dtype),
        "delta_bias": r.normal(size=channels).astype(real),
    }


def selective_scan(
    u, delta, A, B, C, D=None, z=None, delta_bias=None, *, h0=None, out=None, segments=1, reverse=False,
    delta_softplus=True, delta_limit=None, mask=None, reset=None, cu_seqlens=None, states=None
):  # fmt: skip
    accumulate = np.dtype(np.complex64 if A.dtype.kind == "c" else ACCUMULATE[u.dtype.type])
    out = np.empty(u.shape, u.dtype) if out is None else out
    last = reference.selective_scan(
        u, delta, A, B, C, D, z, delta_bias, None if h0 is None else h0.astype(accumulate), out,
        delta_softplus=delta_softplus, delta_limit=delta_limit, reverse=reverse, accumulate=accumulate,
        segments=segments, **flags(mask, reset, cu_seqlens, u.shape[:2]), states=states,
    )  # fmt: skip
    assert last.dtype == accumulate
    return out, last


def check_selective(inputs, *, segments=(1, 3), delta_softplus=True, **options):
    expected = oracle.selective_scan(
        **inputs, **options, delta_softplus=delta_softplus, eps=roundoff(inputs["u"].dtype.type)
    )
    for n in segments:
        out, last = selective_scan(**inputs, **options, segments=n, delta_softplus=delta_softplus)
        oracle.assert_scan_close(out, expected.value, expected.bound)
        oracle.assert_scan_close(last, expected.last, expected.last_bound)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("with_h0", [False, True])
def test_selective_every_length(reverse, with_h0):
    for length in LENGTHS:
        inputs = layer(1, length, 2, 2, seed=length)
        h0 = rng().normal(size=(1, 2, 2)).astype(np.float32) if with_h0 else None
        check_selective(inputs, segments=SEGMENTS, reverse=reverse, h0=h0)


OPTIONS = ["D", "z", "delta_bias"]


@pytest.mark.parametrize("present", range(8))
@pytest.mark.parametrize("delta_softplus", [False, True])
@pytest.mark.parametrize("delta_limit", [None, (0.05, 0.5), (0.0, np.inf)])
def test_selective_options(present, delta_softplus, delta_limit):
    inputs = layer()
    inputs |= {name: None for i, name in enumerate(OPTIONS) if not present >> i & 1}
    if not delta_softplus:
        inputs["delta"] = np.abs(inputs["delta"])
    check_selective(inputs, delta_softplus=delta_softplus, delta_limit=delta_limit)


@pytest.mark.parametrize("B", [None, 1, 2, 3, 6])
@pytest.mark.parametrize("C", [None, 1, 2, 6])
@pytest.mark.parametrize("parameter", [np.float32, np.complex64])
def test_selective_groups_and_constants(B, C, parameter):
    check_selective(layer(1, B=B, C=C, parameter=parameter), reverse=True)


@pytest.mark.parametrize(
    ("dtype", "parameter"),
    [(t, p) for t in (np.float16, BF16) for p in (t, np.float32)] + [(np.float64, np.float64), (BF16, np.complex64)],
)
def test_selective_types(dtype, parameter):
    inputs = layer(dtype=dtype, parameter=parameter, length=20)
    check_selective(inputs, h0=rng().normal(size=(2, 6, 3)), delta_limit=(1e-3, 1.0))


def test_selective_out_type():
    inputs = layer(dtype=np.float16)
    inputs["u"][:] = 60_000
    wide, _ = selective_scan(**inputs, out=np.empty((2, 10, 6), np.float32))
    narrow, _ = selective_scan(**inputs)
    assert np.abs(wide).max() > 66_000
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(narrow, wide.astype(np.float16))


@pytest.mark.parametrize("center", [-80.0, -16.0, 0.0, 16.0, 80.0])
def test_selective_softplus_and_gate_over_their_range(center):
    inputs = layer(length=20, seed=1)
    inputs["delta_bias"] = np.full(6, center, np.float32)
    inputs["z"] += np.float32(center)
    inputs["A"] *= np.float32(1e-3 if center > 0 else 1)
    check_selective(inputs)


@pytest.mark.parametrize("state", [0, 1, 17])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("batch", [1, 3])
def test_selective_sizes(state, channels, batch):
    check_selective(layer(batch, 9, channels, state), reverse=True)


def test_selective_views_are_read_and_written_in_place():
    inputs = layer()
    spread = {k: np.repeat(np.repeat(v, 2, axis=-1), 3, axis=0)[::3, ..., ::2] for k, v in inputs.items() if v.ndim > 1}
    for k in ("u", "delta", "z"):
        spread[k] = np.ascontiguousarray(spread[k].swapaxes(1, 2)).swapaxes(1, 2)
    expected, last = selective_scan(**inputs)
    for x in spread.values():
        x.flags.writeable = False
    out = np.full((2, 6, 21), 7, np.float32)
    _, again = selective_scan(**{**inputs, **spread}, out=out[:, :, ::-2][:, :, :10].swapaxes(1, 2))
    np.testing.assert_array_equal(out[:, :, 2::2][:, :, ::-1].swapaxes(1, 2), expected)
    np.testing.assert_array_equal(out[:, :, :2], 7)
    np.testing.assert_array_equal(out[:, :, 1::2], 7)
    np.testing.assert_array_equal(again, last)


@pytest.mark.parametrize("reverse", [False, True])
def test_selective_segments_agree_bit_for_bit_on_exact_inputs(reverse):
    # Gates are exp(0) = 1 and exp(-1e4) = 0.
    r = rng()
    shape = (2, 130, 4)
    u, delta = r.integers(-4, 5, shape).astype(np.float32), r.integers(0, 2, shape).astype(np.float32)
    A = r.choice(np.array([0, -1e4], np.float32), (4, 3))
    B, C = (r.integers(-3, 4, (2, 130, 2, 3)).astype(np.float32) for _ in range(2))
    h0 = r.integers(-3, 4, (2, 4, 3)).astype(np.float32)
    options = {"h0": h0, "reverse": reverse, "delta_softplus": False}
    plain, last = selective_scan(u, delta, A, B, C, **options)
    np.testing.assert_array_equal(plain, oracle.selective_scan(u, delta, A, B, C, **options).value)
    for segments in SEGMENTS:
        out, again = selective_scan(u, delta, A, B, C, **options, segments=segments)
        np.testing.assert_array_equal(out, plain)
        np.testing.assert_array_equal(again, last)


def exact_layer(batch, length, *, B=1, C=1, seed=0):
    """Gates of 1 and 0, small integers; no softplus, so that z has to stay out."""
    r = rng(seed)
    inputs = layer(batch, length, 4, 3, B=B, C=C)
    inputs |= {k: r.integers(-3, 4, inputs[k].shape).astype(np.float32) for k in ("u", "B", "C", "D")}
    inputs["delta"] = r.integers(0, 2, inputs["u"].shape).astype(np.float32)
    inputs["A"] = r.choice(np.array([0, -1e4], np.float32), (4, 3))
    return inputs | {"z": None, "delta_bias": None}


def poison_steps(inputs, where):
    """All that varies in time holds NaN or inf at the steps `where` (batch, length)."""
    for i, x in enumerate(inputs[k] for k in ("u", "delta", "B", "C", "z")):
        if x is not None and x.ndim > 2:
            x[where] = [np.nan, np.inf][i % 2]


def check_selective_exact(inputs, **options):
    expected = oracle.selective_scan(**inputs, **options)
    for segments in (1, 2, 3, 7):
        out = np.full_like(inputs["u"], 99)
        out, last = selective_scan(**inputs, **options, out=out, delta_softplus=False, segments=segments)
        np.testing.assert_array_equal(out, expected.value)
        np.testing.assert_array_equal(last, expected.last)


@pytest.mark.parametrize("segments", [1, 2, 3])
def test_selective_marks_by_hand(segments):
    # The gate is 1, C is 2, and D is 3 or 0.
    u, delta = np.array([1, 2, 3, 4, 5, 6], np.float32).reshape(1, 6, 1), np.ones((1, 6, 1), np.float32)
    A, B, C = (np.full((1, 1), x, np.float32) for x in (0, 1, 2))
    mask, reset = np.array([[1, 0, 1, 1, 0, 1]], bool), np.array([[0, 0, 0, 1, 0, 0]], bool)
    options = {"delta_softplus": False, "segments": segments, "mask": mask, "reset": reset}
    h0 = np.full((1, 1, 1), 10, np.float32)
    y, last = selective_scan(u, delta, A, B, C, np.full(1, 3, np.float32), h0=h0, **options)
    np.testing.assert_array_equal(y.ravel(), [22 + 3, 0, 28 + 9, 8 + 12, 0, 20 + 18])
    assert last.item() == 10
    y, last = selective_scan(u, delta, A, B, C, cu_seqlens=[1, 3, 3, 5], h0=np.concatenate([h0, h0, h0]), **options)
    np.testing.assert_array_equal(y.ravel(), [0, 0, 26, 8, 0, 0])
    np.testing.assert_array_equal(last.ravel(), [13, 10, 4])


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("with_h0", [False, True])
def test_selective_mask(reverse, with_h0):
    for length in range(1, 41):
        h0 = rng(length).integers(-3, 4, (2, 4, 3)).astype(np.float32) if with_h0 else None
        for mask in masks(2, length, seed=length)[length % 2 :: 2]:
            inputs = exact_layer(2, length, seed=length)
            poison_steps(inputs, ~mask)
            check_selective_exact(inputs, h0=h0, reverse=reverse, mask=mask)


@pytest.mark.parametrize("reverse", [False, True])
def test_selective_nothing_gets_past_a_reset_at_any_step(reverse):
    for length in (1, 2, 3, 7, 20, 21):
        inputs = exact_layer(length, length, seed=length)
        reset = np.eye(length, dtype=bool)
        before = np.triu(np.ones((length, length), bool), 1) if reverse else np.tri(length, k=-1, dtype=bool)
        h0 = np.full((length, 4, 3), np.inf, np.float32)
        poison_steps(inputs, before)
        expected = oracle.selective_scan(**inputs, h0=h0, reverse=reverse, reset=reset)
        for segments in (1, 2, 3, 7):
            out, last = selective_scan(
                **inputs, h0=h0, reverse=reverse, reset=reset, segments=segments, delta_softplus=False
            )
            np.testing.assert_array_equal(out[~before], expected.value[~before])
            np.testing.assert_array_equal(last, expected.last)
            assert np.isfinite(last).all()
            assert np.isnan(out[before]).all()


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("with_h0", [False, True])
@pytest.mark.parametrize(
    ("length", "cu_seqlens"),
    [(9, [0, 0, 5, 5, 9]), (9, [2, 2, 4, 7]), (9, [4, 4]), (9, [3]), (12, list(range(13))), (0, [0, 0, 0])],
)
def test_selective_packed(reverse, with_h0, length, cu_seqlens):
    inputs = exact_layer(1, length)
    h0 = rng().integers(-3, 4, (len(cu_seqlens) - 1, 4, 3)).astype(np.float32) if with_h0 else None
    check_selective_exact(inputs, h0=h0, reverse=reverse, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("B", [None, 1, 2, 4])
@pytest.mark.parametrize("C", [None, 1, 2, 4])
def test_selective_marks_together(B, C):
    for seed in range(12):
        r = rng(seed)
        length = int(r.integers(1, 41))
        batch = 1 if seed % 3 else 2
        inputs = exact_layer(batch, length, B=B, C=C, seed=seed)
        mask, reset = r.random((batch, length)) < 0.7, r.random((batch, length)) < 0.1
        cu_seqlens = random_bounds(length, seed) if batch == 1 else None
        states = (batch if cu_seqlens is None else 5, 4, 3)
        h0 = r.integers(-3, 4, states).astype(np.float32) if seed % 2 else None
        poison_steps(inputs, ~mask)
        marks = {"mask": mask, "reset": reset, "cu_seqlens": cu_seqlens}
        check_selective_exact(inputs, h0=h0, reverse=seed % 4 > 1, **marks)


@pytest.mark.parametrize(
    ("dtype", "parameter"),
    [(np.float32, np.float32), (np.float16, np.float32), (BF16, BF16), (np.float64, np.float64), (BF16, np.complex64)],
)
@pytest.mark.parametrize("reverse", [False, True])
def test_selective_marks_types_and_options(dtype, parameter, reverse):
    r = rng()
    for batch, cu_seqlens in ((2, None), (1, [3, 9, 9, 30, 35])):
        inputs = layer(batch, 40, B=2, C=3, dtype=dtype, parameter=parameter)
        mask, reset = r.random((batch, 40)) < 0.7, r.random((batch, 40)) < 0.1
        poison_steps(inputs, ~mask)
        marks = {"mask": mask, "reset": reset, "cu_seqlens": cu_seqlens}
        states = r.normal(size=(batch if cu_seqlens is None else 4, 6, 3)).astype(np.float32)
        for h0 in (None, states):
            check_selective(inputs, segments=(1, 7), h0=h0, reverse=reverse, delta_limit=(1e-3, 1.0), **marks)


@pytest.mark.parametrize("segments", [1, 2, 3])
def test_selective_sequences_do_not_see_each_other(segments):
    inputs = layer(1, 30)
    options = {"cu_seqlens": [2, 9, 9, 20, 26], "segments": segments}
    clean, last = selective_scan(**inputs, **options)
    poisoned = np.zeros((1, 30), bool)
    poisoned[:, [0, 1, *range(9, 20), *range(26, 30)]] = True
    poison_steps(inputs, poisoned)
    out, again = selective_scan(**inputs, **options)
    np.testing.assert_array_equal(np.delete(out, slice(9, 20), axis=1), np.delete(clean, slice(9, 20), axis=1))
    np.testing.assert_array_equal(np.delete(again, 2, axis=0), np.delete(last, 2, axis=0))
    assert np.isnan(out[:, 9:20]).all()
    assert np.isnan(again[2]).all()


@pytest.mark.parametrize("segments", [1, 3])
def test_selective_continues_from_any_step(segments):
    inputs = layer(length=12)
    whole, last = selective_scan(**inputs)
    in_time = ("u", "delta", "z", "B", "C")
    for cut in range(13):
        first, second = (
            {k: v[:, part] if k in in_time else v for k, v in inputs.items()} for part in (slice(cut), slice(cut, None))
        )
        y1, middle = selective_scan(**first, segments=segments)
        y2, end = selective_scan(**second, h0=middle, segments=segments)
        np.testing.assert_allclose(np.concatenate([y1, y2], axis=1), whole, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(end, last, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("segments", SEGMENTS)
@pytest.mark.parametrize("name", ["u", "delta"])
def test_selective_nan_stays_in_its_row_and_behind_it(segments, name):
    inputs = layer()
    clean, _ = selective_scan(**inputs, delta_limit=(0.0, 0.5), segments=segments)
    inputs[name][1, 4, 2] = np.nan
    out, last = selective_scan(**inputs, delta_limit=(0.0, 0.5), segments=segments)
    poisoned = np.zeros(out.shape, bool)
    poisoned[1, 4:, 2] = True
    np.testing.assert_array_equal(np.isnan(out), poisoned)
    np.testing.assert_array_equal(out[~poisoned], clean[~poisoned])
    assert np.isnan(last[1, 2]).all()
    assert np.isfinite(np.delete(last[1], 2, axis=0)).all()


@pytest.mark.parametrize("shape", [(0, 5, 4, 3), (2, 0, 4, 3), (2, 5, 0, 3), (2, 5, 4, 0)])
def test_selective_empty(shape):
    inputs = layer(*shape)
    h0 = np.ones((shape[0], shape[2], shape[3]))
    out, last = selective_scan(**inputs, h0=h0)
    if shape[1] == 0:
        np.testing.assert_array_equal(last, h0)
        np.testing.assert_array_equal(selective_scan(**inputs)[1], np.zeros_like(h0))
    # Without a state, D u silu(z) is left.
    np.testing.assert_allclose(out, inputs["D"] * inputs["u"] * inputs["z"] / (1 + np.exp(-inputs["z"])), rtol=1e-5)


@pytest.mark.parametrize(
    ("batch", "length", "channels", "state", "segments"),
    [(4, 2000, 32, 32, 1), (1, 2000, 32, 32, 20), (64, 80, 256, 8, 1)],
)
def test_selective_peak_memory(batch, length, channels, state, segments):
    inputs = layer(batch, length, channels, state)
    out = np.empty_like(inputs["u"])
    tracemalloc.start()
    selective_scan(**inputs, out=out, segments=segments)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # Six arrays of one step of every segment, eight staged tiles, 256 KiB of Python and iterator buffers.
    step = 4 * batch * channels * state * segments
    tile = 4 * max(reference.TILE_ELEMENTS, batch * channels * segments)
    assert peak < 6 * step + 8 * tile + (1 << 18)
    assert peak < out.nbytes * state / 3


def saved_states(inputs, *, segments=1, **options):
    batch, length, _ = inputs["u"].shape
    accumulate = np.complex64 if inputs["A"].dtype.kind == "c" else ACCUMULATE[inputs["u"].dtype.type]
    states = np.full((batch, -(-length // STATE_INTERVAL), *inputs["A"].shape), np.nan, accumulate)
    selective_scan(**inputs, **options, segments=segments, states=states)
    return states


def expected_states(inputs, *, h0=None, reverse=False, mask=None, reset=None, cu_seqlens=None, **options):
    """For each interval its index, the oracle's state and its bound: what the steps of its sequence before it leave."""
    batch, length, _ = inputs["u"].shape
    bounds = [0, length] if cu_seqlens is None else cu_seqlens
    for k, t in enumerate(range(0, length, STATE_INTERVAL)):
        step = length - 1 - t if reverse else t
        s = next((s for s, (begin, end) in enumerate(pairwise(bounds)) if begin <= step < end), None)
        if s is None:
            yield k, 0, 0
            continue
        part = slice(step + 1, bounds[s + 1]) if reverse else slice(bounds[s], step)
        before = {name: x[:, part] if name in ("u", "delta", "B", "C", "z") and x is not None and x.ndim > 2 else x
                  for name, x in inputs.items()}  # fmt: skip
        marks = {name: x[:, part] for name, x in (("mask", mask), ("reset", reset)) if x is not None}
        entering = h0 if h0 is None or cu_seqlens is None else h0[s : s + 1]
        scan = oracle.selective_scan(
            **before, **marks, **options, h0=entering, reverse=reverse, eps=roundoff(inputs["u"].dtype.type)
        )
        enters = np.ones((batch, 1, 1)) if reset is None else ~reset[:, step, None, None]
        yield k, np.where(enters, scan.last, 0), np.where(enters, scan.last_bound, 0)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("with_h0", [False, True])
def test_selective_saves_the_state_that_enters_an_interval(reverse, with_h0):
    for length in (0, 1, 31, 32, 33, 64, 65, 97, 130):
        inputs = layer(2, length, 2, 1, B=None if length % 2 else 1, seed=length)
        h0 = rng().normal(size=(2, 2, 1)).astype(np.float32) if with_h0 else None
        options = {"h0": h0, "reverse": reverse, "delta_softplus": True}
        expected = list(expected_states(inputs, **options))
        for segments in (1, 2, 7, 1000):
            states = saved_states(inputs, segments=segments, **options)
            for k, value, bound in expected:
                oracle.assert_scan_close(states[:, k], value * np.ones_like(states[:, k]), bound)


@pytest.mark.parametrize("reverse", [False, True])
def test_selective_saves_states_with_marks(reverse):
    for seed in range(12):
        r = rng(seed)
        length = int(r.integers(1, 140))
        batch = 1 if seed % 2 else 2
        inputs = exact_layer(batch, length, seed=seed)
        mask, reset = r.random((batch, length)) < 0.7, r.random((batch, length)) < 0.05
        reset[:, :: 2 * STATE_INTERVAL] = seed % 4 > 1
        cu_seqlens = None
        if batch == 1:  # ends on an edge, around it, and outside
            cu_seqlens = np.sort(np.minimum([r.integers(0, 40), 32, 32, 65, 96, length - r.integers(0, 2)], length))
        h0 = r.integers(-3, 4, (batch if cu_seqlens is None else 5, 4, 3)).astype(np.float32) if seed % 3 else None
        outside = np.zeros((batch, length), bool)
        if cu_seqlens is not None:
            outside[:, : cu_seqlens[0]] = outside[:, cu_seqlens[-1] :] = True
        poison_steps(inputs, ~mask | outside)
        options = {"h0": h0, "reverse": reverse, "mask": mask, "reset": reset, "cu_seqlens": cu_seqlens}
        expected = list(expected_states(inputs, **options))
        for segments in (1, 3):
            states = saved_states(inputs, segments=segments, delta_softplus=False, **options)
            for k, value, _ in expected:
                np.testing.assert_array_equal(states[:, k], np.broadcast_to(value, states[:, k].shape))


@pytest.mark.parametrize(("dtype", "parameter"), [(BF16, np.float32), (np.float64, np.float64), (BF16, np.complex64)])
def test_selective_saves_states_in_the_accumulation_type(dtype, parameter):
    inputs = layer(2, 70, 2, dtype=dtype, parameter=parameter)
    states = saved_states(inputs, segments=3)
    for k, value, bound in expected_states(inputs, delta_softplus=True):
        oracle.assert_scan_close(states[:, k], value * np.ones((2, 2, 3)), bound)


@pytest.mark.parametrize("tile", [1, 5])
def test_tiles_do_not_change_bits(monkeypatch, tile):
    inputs = layer(1, 70)
    a, b = gates_and_inputs((1, 70))
    mask, reset = rng().random((2, 1, 70)) < 0.5
    for marks in ({}, {"mask": mask, "reset": reset, "cu_seqlens": [3, 3, 20, 69]}):
        for segments in SEGMENTS:

            def both(options):
                return *selective_scan(**inputs, **options), *linear_scan(a, b, **options)

            options = marks | {"segments": segments}
            expected = both(options)
            monkeypatch.setattr(reference, "TILE_STEPS", tile)
            actual = both(options)
            monkeypatch.undo()
            for x, y in zip(actual, expected, strict=True):
                np.testing.assert_array_equal(x, y)


def test_rows_do_not_depend_on_each_other():
    inputs = layer(3, 50, 5, 4)
    for segments in (1, 4):
        whole, _ = selective_scan(**inputs, segments=segments)
        one = {k: v[1:2] if v.ndim > 2 else v for k, v in inputs.items()}
        np.testing.assert_array_equal(selective_scan(**one, segments=segments)[0], whole[1:2])
