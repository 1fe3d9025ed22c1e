"""selective_scan on NumPy arrays and by its kernels, against the oracle and by the properties it promises."""

import functools
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuscan
from cuscan._plan import Schedule, SelectiveKind, forced, selective_tiles, states_a_thread
from cuscan.testing import Layout, Plan, SelectiveProblem, _bounds, oracle

BF16 = ml_dtypes.bfloat16
full_on_host = pytest.mark.full_on_host
# bfloat16 first: the one type of u that the quick tier compiles for the CPU.
ITEMS = [BF16, *(pytest.param(item, marks=full_on_host) for item in (np.float16, np.float32, np.float64))]
LAYOUTS = pytest.mark.parametrize("layout", ["bld", "bdl"])
STATES = [1, 2, 3, 8, 16, 17, 64, 70, 128, *(pytest.param(n, marks=full_on_host) for n in (192, 256, 257))]
OPTIONS = ("D", "z", "delta_bias", "delta_softplus", "delta_limit", "h0", "reverse")


def rng(seed=0):
    return np.random.default_rng(seed)


def plans(executor, one, chunk=32):
    """Each schedule with each tile on kernels, numbers of segments in NumPy; {} is the plan's own choice."""
    if not executor.kernels:
        return [{"segments": segments} for segments in (1, 3)]
    schedules = {"schedule": Schedule.SERIAL}, {"schedule": Schedule.SPLIT, "chunk": chunk}
    return [{}] + [{**schedule, "tile": tile} for tile in selective_tiles(one.kind) for schedule in schedules]


class Case:
    """The arguments of one call, and what the oracle makes of them, worked out once."""

    def __init__(self, batch, length, channels, state, *, groups=1, item=BF16, wide=(), constant=(), layout="bld",
                 options=OPTIONS, rates=None, exact=False, grouped=False, seed=0):  # fmt: skip
        r = rng((seed, batch, length, channels, state))
        self.layout, self.item, self.options = layout, item, options
        accumulation = np.float64 if item is np.float64 else np.float32
        rates = accumulation if rates is None else rates
        self.complex = np.dtype(rates).kind == "c"
        state_type = rates if self.complex else accumulation
        draw = (lambda *shape: r.integers(-4, 5, shape)) if exact else (lambda *shape: r.normal(size=shape))

        def time_last(x):
            return np.ascontiguousarray(np.moveaxis(x, 1, -1)) if layout == "bdl" else x

        def sequence(name, values):
            return time_last(values.astype(np.float32 if name in wide else item))

        def couple(name):
            if name in constant:
                values = draw(channels, state)
            elif groups == 1 and not grouped:
                values = draw(batch, length, state)
            else:
                values = draw(batch, length, groups, state)
            if self.complex:
                values = values + 1j * draw(*values.shape)
                return values.astype(rates) if name in constant else time_last(values.astype(rates))
            values = values.astype(np.float32 if name in wide else item)
            return values if name in constant else time_last(values)

        u = sequence("u", draw(batch, length, channels))
        if exact:
            delta, A = r.integers(0, 2, (batch, length, channels)), r.choice([0, -1e4], (channels, state), p=[0.7, 0.3])
        else:
            softplus = "delta_softplus" in options
            delta = (
                r.normal(-1, 1, (batch, length, channels)) if softplus else r.uniform(0, 0.5, (batch, length, channels))
            )
            A = -r.uniform(0.05, 3, (channels, state))
        if self.complex:
            A = A + 1j * r.normal(size=A.shape)
        self.inputs = u, sequence("delta", delta), A.astype(rates), couple("B"), couple("C")
        small = np.float32 if "small" not in wide else BF16
        given = {
            "D": draw(channels).astype(small),
            "z": sequence("z", draw(batch, length, channels)),
            "delta_bias": (
                r.normal(-1, 1, channels) if "delta_softplus" in options else r.uniform(0, 0.5, channels)
            ).astype(small),
            "delta_softplus": True,
            "delta_limit": (0.01, 1.5),
            "h0": (draw(batch, channels, state) * (1 + (1j if self.complex else 0))).astype(state_type),
            "reverse": True,
        }
        self.given = {name: given[name] for name in OPTIONS if name in options}

    @property
    def kind(self):
        _, _, A, B, C = self.inputs
        flags = {"complex": self.complex, "time_fast": False, "time_B": B.ndim > 2, "time_C": C.ndim > 2}
        state_item = A.dtype.name if self.complex else "float64" if self.item is np.float64 else "float32"
        states = states_a_thread(state_item, flags["time_B"] and flags["time_C"], A.shape[1])
        return SelectiveKind(np.dtype(self.item).name, **flags, states=states)

    def run(self, executor, plan=None, **more):
        with forced(**(plan or {})):
            return executor(
                cuscan.selective_scan, *self.inputs, return_last_state=True, layout=self.layout, **self.given, **more
            )

    @functools.cached_property
    def expected(self):
        eps = 2.0**-53 if self.item is np.float64 else 2.0**-24
        return oracle.selective_scan(*self.inputs, **self.given, layout=self.layout, eps=eps)

    def check(self, executor, every_plan=(None,), **more):
        for plan in every_plan:
            y, last = self.run(executor, plan, **more)
            out = more.get("out")
            assert y.dtype == np.dtype(more.get("out_dtype") or (self.item if out is None else out.dtype))
            assert last.dtype == (
                self.inputs[2].dtype if self.complex else "float64" if self.item is np.float64 else "float32"
            )
            assert (y is out) == (out is not None)
            try:
                oracle.assert_scan_close(y, self.expected.value, self.expected.bound)
                oracle.assert_scan_close(last, self.expected.last, self.expected.last_bound)
            except AssertionError as error:
                raise AssertionError(f"with {plan}: {error}") from error
        return y, last


@functools.cache
def case(*sizes, **choices):
    return Case(*sizes, **choices)


# values


@LAYOUTS
@pytest.mark.parametrize("reverse", [False, True])
def test_exact_inputs_give_the_same_bits_by_every_plan(executor, layout, reverse):
    options = ("D", "h0", "reverse") if reverse else ("D", "h0")
    for channels, state, groups in ((70, 17, 1), (6, 70, 3), (34, 36, 1), (6, 72, 2), (6, 64, 1), (5, 128, 1)):
        one = case(2, 37, channels, state, groups=groups, layout=layout, options=options, exact=True)
        for plan in plans(executor, one):
            y, last = one.run(executor, plan, out_dtype=np.float32)
            np.testing.assert_array_equal(y, one.expected.value, err_msg=str(plan))
            np.testing.assert_array_equal(last, one.expected.last, err_msg=str(plan))


@LAYOUTS
def test_every_ragged_length(executor, layout):
    for length in range(71):
        options, channels = ("h0",) if length % 2 else ("h0", "reverse"), 3 + length // 2 % 2  # four are a run
        one = case(1, length, channels, 2, layout=layout, options=options, exact=True)
        for plan in plans(executor, one):
            y, last = one.run(executor, plan, out_dtype=np.float32)
            np.testing.assert_array_equal(y, one.expected.value, err_msg=f"{length} {plan}")
            np.testing.assert_array_equal(last, one.expected.last, err_msg=f"{length} {plan}")


@pytest.mark.full
def test_every_length(executor):
    channels, state = 3, 4
    one = Case(1, 1100, channels, state, options=("h0",), exact=True)
    u, delta, A, B, C = (x.astype(np.float32) for x in one.inputs)
    h = one.given["h0"][0]
    states, values = [h], []
    for t in range(1100):
        h = np.exp(delta[0, t][:, None] * A) * h + (delta[0, t] * u[0, t])[:, None] * B[0, t]
        states.append(h)
        values.append(h @ C[0, t])
    every = plans(executor, one, chunk=96)
    for length in (*range(140), *range(140, 1101, 7 if executor.name == "host" else 1)):
        plan = every[length % len(every)]
        u, delta, A, B, C = one.inputs
        cut = [x[:, :length] for x in (u, delta, B, C)]
        with forced(**plan):
            y, last = executor(
                cuscan.selective_scan, cut[0], cut[1], A, *cut[2:],
                h0=one.given["h0"], return_last_state=True, out_dtype=np.float32,
            )  # fmt: skip
        np.testing.assert_array_equal(y[0], np.reshape(values[:length], (length, channels)), err_msg=f"{length} {plan}")
        np.testing.assert_array_equal(last[0], states[length], err_msg=f"{length} {plan}")


@pytest.mark.full_on_host
@pytest.mark.parametrize("channels", [65_536, 70_001])
def test_many_channels(executor, channels):
    # Every channel does the same, so that the oracle does one.
    one = Case(1, 5, 1, 3, options=("h0",), exact=True)
    u, delta, A, B, C = one.inputs
    expected = one.expected
    y, last = executor(
        cuscan.selective_scan, np.repeat(u, channels, 2), np.repeat(delta, channels, 2), np.repeat(A, channels, 0),
        B, C, h0=np.repeat(one.given["h0"], channels, 1), return_last_state=True, out_dtype=np.float32,
    )  # fmt: skip
    np.testing.assert_array_equal(y, np.repeat(expected.value, channels, 2))
    np.testing.assert_array_equal(last, np.repeat(expected.last, channels, 1))


def test_chunks_of_every_raggedness(executor):
    every_plan = [{"segments": n} for n in (1, 2, 7, 15, 16, 17, 35, 69, 70, 71)]
    if executor.kernels:
        every_plan = [{"schedule": Schedule.SPLIT, "chunk": chunk} for chunk in (32, 64, 96, 128)]
    for length in (33, 63, 64, 65, 70, 96, 97):
        one = case(1, length, 5, 3, options=("h0",), exact=True)
        for plan in every_plan:
            y, last = one.run(executor, plan, out_dtype=np.float32)
            np.testing.assert_array_equal(y, one.expected.value)
            np.testing.assert_array_equal(last, one.expected.last)


def test_summaries_of_many_chunks(executor):
    one = case(1, 1100, 2, 3, options=("h0",), exact=True)
    y, last = one.run(executor, {"schedule": Schedule.SPLIT, "chunk": 32, "segments": 600}, out_dtype=np.float32)
    np.testing.assert_array_equal(y, one.expected.value)
    np.testing.assert_array_equal(last, one.expected.last)


@LAYOUTS
@pytest.mark.parametrize("state", STATES)
def test_every_number_of_states(executor, layout, state):
    one = case(2, 37, 5, state, layout=layout, wide=("delta",))
    one.check(executor, plans(executor, one), out_dtype=np.float32)
    one.check(executor)


@pytest.mark.parametrize("item", ITEMS)
@LAYOUTS
def test_sums_over_slices_of_the_states(executor, item, layout):
    # 70 states take nine slices, whose sums so far lie in scratch; runs along time exist in whole ones only.
    for length in (35, 36):
        one = case(2, length, 6, 70, item=item, layout=layout)
        one.check(executor, plans(executor, one), out_dtype=np.float32)


@LAYOUTS
@pytest.mark.parametrize("groups", [1, 2, 3, 12])
@pytest.mark.parametrize("channels", [12, 36, 132])
def test_groups_and_channels(executor, layout, channels, groups):
    one = case(1, 19, channels, 4, groups=groups, layout=layout, grouped=True)
    one.check(executor, plans(executor, one), out_dtype=np.float32)


@pytest.mark.parametrize("channels", [1, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 65])
def test_channels_that_fill_no_tile(executor, channels):
    # A block has 32 where a thread has 4 states, and else 16.
    for layout, state in (("bld", 3), ("bdl", 3), ("bld", 4), ("bdl", 4)):
        one = case(2, 18, channels, state, layout=layout)
        one.check(executor, plans(executor, one), out_dtype=np.float32)


@pytest.mark.parametrize("left_out", [*OPTIONS, "all"])
@LAYOUTS
def test_every_option_absent(executor, layout, left_out):
    options = () if left_out == "all" else tuple(name for name in OPTIONS if name != left_out)
    one = case(2, 33, 6, 5, layout=layout, options=options, groups=2)
    one.check(executor, plans(executor, one), out_dtype=np.float32)


@pytest.mark.parametrize("option", OPTIONS)
@LAYOUTS
def test_every_option_alone(executor, layout, option):
    one = case(2, 34, 6, 5, layout=layout, options=(option,), wide=("B",))
    one.check(executor, plans(executor, one))


@pytest.mark.parametrize("item", ITEMS)
@LAYOUTS
def test_types(executor, item, layout):
    mixed = [()] if item is np.float64 else [(), ("delta",), ("B", "C"), ("delta", "C"), ("delta", "B", "C", "small")]
    for wide in mixed:
        one = case(2, 35, 6, 5, item=item, layout=layout, wide=wide, groups=3)
        one.check(executor, plans(executor, one))
        for out_dtype in (np.float32, np.float64, BF16, np.float16):
            one.check(executor, out_dtype=out_dtype)


@pytest.mark.parametrize("rates", [BF16, np.float16, np.float32, np.float64])
def test_rates_of_any_real_type_are_read_in_the_accumulation_type(executor, rates):
    one = case(2, 20, 4, 3, rates=np.float32)
    u, delta, A, B, C = one.inputs
    D, bias = one.given["D"], one.given["delta_bias"]
    rounded = A.astype(rates), D.astype(rates), bias.astype(rates)
    given = {name: x for name, x in one.given.items() if name not in ("D", "delta_bias")}
    expected = executor(
        cuscan.selective_scan, u, delta, rounded[0].astype(np.float32), B, C,
        D=rounded[1].astype(np.float32), delta_bias=rounded[2].astype(np.float32), **given,
    )  # fmt: skip
    y = executor(cuscan.selective_scan, u, delta, rounded[0], B, C, D=rounded[1], delta_bias=rounded[2], **given)
    np.testing.assert_array_equal(y, expected)


@pytest.mark.full_on_host
@pytest.mark.parametrize("item", [BF16, np.float16, np.float32])
@pytest.mark.parametrize("constant", [(), ("B",), ("C",), ("B", "C")])
@LAYOUTS
def test_complex_states(executor, item, constant, layout):
    for state in (1, 5, 17):
        one = case(2, 35, 5, state, item=item, rates=np.complex64, constant=constant, layout=layout)
        one.check(executor, plans(executor, one), out_dtype=np.float32)


@pytest.mark.full_on_host
@pytest.mark.parametrize("item", [BF16, np.float16, np.float32, np.float64])
@pytest.mark.parametrize("constant", [("B",), ("C",), ("B", "C")])
@LAYOUTS
def test_couplings_that_are_constant_in_time(executor, item, constant, layout):
    for state, groups in ((1, 1), (5, 2), (17, 1)):
        one = case(2, 35, 6, state, item=item, constant=constant, layout=layout, groups=groups)
        one.check(executor, plans(executor, one))


def test_delta_in_closed_form(executor):
    # A = 0, u = B = C = 1: y is the running sum of delta as it is used.
    delta = np.array([-20, -1, 0, 1, 30, np.nan], np.float32).reshape(1, 6, 1).astype(BF16)
    one, zero = np.ones((1, 6, 1), BF16), np.zeros((1, 1), np.float32)
    bias = np.full(1, 0.5, np.float32)

    def y(**options):
        return executor(cuscan.selective_scan, one, delta, zero, one, one, out_dtype=np.float32, **options)[0, :, 0]

    x = delta.astype(np.float64)[0, :5, 0]
    for options, used in (
        ({}, x),
        ({"delta_bias": bias}, x + 0.5),
        ({"delta_softplus": True}, np.log1p(np.exp(x))),
        ({"delta_bias": bias, "delta_softplus": True}, np.log1p(np.exp(x + 0.5))),
        ({"delta_softplus": True, "delta_limit": (0.25, 2)}, np.log1p(np.exp(x)).clip(0.25, 2)),
        ({"delta_limit": (-np.inf, 0.0)}, x.clip(None, 0)),
    ):
        values = y(**options)
        np.testing.assert_allclose(values[:5], np.cumsum(used), rtol=3e-7, atol=0)
        assert np.isnan(values[5])


@pytest.mark.parametrize("gate", [-1e4, -88.0, -1e-6])
def test_strong_and_weak_decay(executor, gate):
    one = case(1, 60, 4, 3, options=())
    u, delta, A, B, C = one.inputs
    A = np.where(np.arange(3) % 2, np.float32(gate), A)
    expected = oracle.selective_scan(u, delta, A, B, C)
    for plan in plans(executor, one):
        with forced(**plan):
            y = executor(cuscan.selective_scan, u, delta, A, B, C, out_dtype=np.float32)
        oracle.assert_scan_close(y, expected.value, expected.bound)


@given(data=st.data(), seed=st.integers(0, 2**32))
@settings(max_examples=40)
def test_the_whole_signature(executor, data, seed):
    groups = data.draw(st.sampled_from([1, 2, 3]))
    sizes = data.draw(st.tuples(st.integers(1, 3), st.integers(0, 70), st.integers(1, 20), st.integers(1, 20)))
    batch, length, channels, state = sizes
    one = Case(
        batch, length, channels * groups if channels < 8 else groups, state, groups=groups, seed=seed,
        layout=data.draw(st.sampled_from(["bld", "bdl"])),
        options=data.draw(st.lists(st.sampled_from(OPTIONS), unique=True)),
        wide=data.draw(st.lists(st.sampled_from(["delta", "B", "C", "small"]), unique=True)),
        constant=data.draw(st.sampled_from([(), (), ("B",), ("C",), ("B", "C")])) if executor.every_type else (),
    )  # fmt: skip
    plan = data.draw(st.sampled_from(plans(executor, one)))
    one.check(executor, [plan], out_dtype=data.draw(st.sampled_from([None, np.float32, np.float64])))


# strides, alignment, sizes


def strided(x, step):
    """X with its items `step` apart on every axis, or backwards in memory where that is negative."""
    big = np.zeros(tuple(abs(step) * size + 1 for size in x.shape), x.dtype)
    view = big[tuple(slice(1, None, abs(step)) for _ in x.shape)][tuple(slice(size) for size in x.shape)]
    view = view[tuple(slice(None, None, int(np.sign(step))) for _ in x.shape)]
    view[...] = x
    return view


@LAYOUTS
@pytest.mark.parametrize("how", ["by 2", "by 3 backwards", "fortran", "one off"])
def test_strides(executor, layout, how):
    change = {
        "by 2": lambda x: strided(x, 2),
        "by 3 backwards": lambda x: strided(x, -3),
        "fortran": np.asfortranarray,
        "one off": lambda x: strided(x, 1),
    }[how]
    one = case(2, 34, 6, 5, layout=layout, groups=2, wide=("C",))
    copied = Case(2, 34, 6, 5, layout=layout, groups=2, wide=("C",))
    copied.inputs = tuple(map(change, copied.inputs))
    copied.given = {name: change(x) if isinstance(x, np.ndarray) else x for name, x in copied.given.items()}
    before = [x.copy() for x in copied.inputs]
    for plan in plans(executor, one):
        expected, last_expected = one.run(executor, plan)
        out = change(np.zeros(expected.shape, BF16))
        y, last = copied.run(executor, plan, out=out)
        assert y is out
        if plan:
            np.testing.assert_array_equal(y, expected)
            np.testing.assert_array_equal(last, last_expected)
        copied.check(executor, [plan])
    for x, was in zip(copied.inputs, before, strict=True):
        np.testing.assert_array_equal(x, was)


@LAYOUTS
def test_broadcast_inputs_are_read_in_place(executor, layout):
    u, delta, A, B, C = case(2, 20, 4, 3, layout=layout, options=()).inputs
    inputs = [np.broadcast_to(x[:1], x.shape) for x in (u, delta, A, B, C)]
    expected = oracle.selective_scan(*inputs, layout=layout)
    y = executor(cuscan.selective_scan, *inputs, layout=layout, out_dtype=np.float32)
    oracle.assert_scan_close(y, expected.value, expected.bound)


@LAYOUTS
@pytest.mark.parametrize("sizes", [(0, 5, 3, 2), (2, 0, 3, 2), (2, 5, 0, 2), (2, 5, 3, 0), (1, 1, 1, 1), (0, 0, 0, 0)])
def test_sizes_0_and_1(executor, layout, sizes):
    one = case(*sizes, layout=layout)
    for plan in [{}] if executor.kernels else plans(executor, one):
        y, last = one.check(executor, [plan])
        batch, _, channels, state = sizes
        assert y.shape == one.inputs[0].shape
        assert last.shape == (batch, channels, state)


def test_a_view_past_element_2_to_31(cuda_executor):
    cupy = cuda_executor.xp
    one = case(2, 40, 4, 3, options=())
    u, *rest = (cuda_executor.asarray(x) for x in one.inputs)
    big = cupy.zeros(2**31 + 2**12, u.dtype)
    apart = cupy.lib.stride_tricks.as_strided(big, u.shape, (2**32 + 1024, 8, 2))
    apart[...] = u
    y = cuscan.selective_scan(apart, *rest, out_dtype=np.float32)
    oracle.assert_scan_close(y.get(), one.expected.value, one.expected.bound)


# out


@LAYOUTS
def test_out_receives_what_a_fresh_result_would(executor, layout):
    one = case(2, 34, 6, 5, layout=layout)
    for dtype in (BF16, np.float32, np.float64, np.float16):
        for plan in plans(executor, one):
            expected, _ = one.run(executor, plan, out_dtype=dtype)
            frame = np.full((*expected.shape[:2], expected.shape[2] + 2), 7, dtype)
            y, _ = one.run(executor, plan, out=frame[:, :, 1:-1])
            np.testing.assert_array_equal(y, expected)
            np.testing.assert_array_equal(frame[:, :, [0, -1]], 7)
            assert expected.flags.c_contiguous


def test_out_dtype_keeps_what_float16_cannot(executor):
    u = np.full((1, 8, 2), 200, BF16)
    ones = np.ones((1, 8, 3), BF16)
    y = executor(
        cuscan.selective_scan, u, np.ones_like(u), np.zeros((2, 3), np.float32), 100 * ones, ones, out_dtype="float32"
    )
    np.testing.assert_array_equal(y[0, :, 0], 60_000 * np.arange(1, 9))


# bits


@LAYOUTS
@pytest.mark.parametrize("options", [("D", "z", "delta_bias", "delta_softplus", "h0"), ("reverse",)], ids=len)
@pytest.mark.parametrize("state", [6, 16, *(pytest.param(n, marks=full_on_host) for n in (64, 128))])
def test_what_moves_as_vectors_has_the_bits_of_what_does_not(executor, layout, state, options):
    # Whole tiles among others: their short cuts do what the general code does. 176 steps are five tiles and a half.
    sizes = 1, 192 if state == 128 else 176, 32 if state == 16 else 16, state
    one, apart = (Case(*sizes, layout=layout, options=options) for _ in range(2))
    apart.inputs = tuple(strided(x, 1) for x in apart.inputs)
    apart.given = {name: strided(x, 1) if isinstance(x, np.ndarray) else x for name, x in apart.given.items()}
    for plan in plans(executor, one, chunk=96):
        y, last = one.check(executor, [plan])
        y_again, last_again = apart.run(executor, plan)
        np.testing.assert_array_equal(y_again.view(np.int16), y.view(np.int16), err_msg=f"{plan}")
        np.testing.assert_array_equal(last_again.view(np.int32), last.view(np.int32), err_msg=f"{plan}")


def test_the_same_call_gives_the_same_bits(executor):
    one, other = case(2, 53, 6, 5), case(1, 20, 33, 3)
    for plan in plans(executor, one):
        y, last = one.run(executor, plan, out_dtype=np.float32)
        other.run(executor, plan)
        again, last_again = one.run(executor, plan, out_dtype=np.float32)
        np.testing.assert_array_equal(again.view(np.int32), y.view(np.int32))
        np.testing.assert_array_equal(last_again.view(np.int32), last.view(np.int32))


@pytest.mark.parametrize("which", ["u", "delta", "z", "B", "C"])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_what_is_not_finite_stays_in_its_row_and_behind_it(executor, which, poison):
    options = ("z", "D")
    clean, poisoned = (Case(2, 40, 6, 5, groups=2, options=options) for _ in range(2))
    place = {"u": 0, "delta": 1, "B": 3, "C": 4}.get(which)
    array = poisoned.given["z"] if which == "z" else poisoned.inputs[place]
    array[1, 23, 1] = poison  # a channel, or the group of channels 3 to 5
    touched = np.zeros((2, 40, 6), bool)
    touched[1, 23 : 24 if which in ("z", "C") else None, slice(3, 6) if which in "BC" else 1] = True
    for plan in plans(executor, clean):
        y, last = clean.run(executor, plan, out_dtype=np.float32)
        y_poisoned, last_poisoned = poisoned.run(executor, plan, out_dtype=np.float32)
        np.testing.assert_array_equal(y_poisoned[~touched], y[~touched])
        assert not np.isfinite(y_poisoned[1, 23][touched[1, 23]]).any()
        rows = touched.any(1) & (which not in ("z", "C"))
        np.testing.assert_array_equal(last_poisoned[~rows], last[~rows])


# laws


@LAYOUTS
def test_a_scan_may_be_cut_anywhere(executor, layout):
    one = case(2, 67, 5, 4, layout=layout, options=(), exact=True)
    time = 1 if layout == "bld" else 2
    u, delta, A, B, C = one.inputs

    def piece(steps, h0, **more):
        parts = [np.take(x, steps, time) for x in (u, delta, B, C)]
        return executor(
            cuscan.selective_scan, *parts[:2], A, *parts[2:], return_last_state=True, h0=h0, layout=layout,
            out_dtype=np.float32, **more,
        )  # fmt: skip

    for reverse in (False, True):
        h0 = rng(5).integers(-4, 5, (2, 5, 4)).astype(np.float32)
        whole, last = piece(range(67), h0, reverse=reverse)
        for cut in (0, 1, 31, 32, 33, 36, 66, 67):
            pieces = range(cut), range(cut, 67)
            state, parts = h0, []
            for steps in reversed(pieces) if reverse else pieces:
                y, state = piece(steps, state, reverse=reverse)
                parts.append(y)
            np.testing.assert_array_equal(np.concatenate(parts[::-1] if reverse else parts, time), whole)
            np.testing.assert_array_equal(state, last)


def test_reverse_is_flip_scan_flip(executor):
    one = case(2, 53, 6, 5, options=("D", "z", "h0"))
    u, delta, A, B, C = (np.ascontiguousarray(x[:, ::-1]) if x.ndim == 3 else x for x in one.inputs)
    given = {**one.given, "z": one.given["z"][:, ::-1].copy()}
    for plan in plans(executor, one):
        with forced(**plan):
            y, last = executor(cuscan.selective_scan, u, delta, A, B, C, return_last_state=True, reverse=True, **given)
        expected, last_expected = one.run(executor, plan)
        np.testing.assert_array_equal(y[:, ::-1], expected)
        np.testing.assert_array_equal(last, last_expected)


def test_the_two_layouts_agree(executor):
    one = case(2, 53, 6, 5, groups=2)
    u, delta, A, B, C = one.inputs
    z = one.given["z"].transpose(0, 2, 1).copy()
    turned = (
        u.transpose(0, 2, 1).copy(),
        delta.transpose(0, 2, 1).copy(),
        A,
        *(x.transpose(0, 2, 3, 1).copy() for x in (B, C)),
    )
    for plan in plans(executor, one):
        expected, last_expected = one.run(executor, plan)
        with forced(**plan):
            y, last = executor(
                cuscan.selective_scan, *turned, return_last_state=True, layout="bdl", **{**one.given, "z": z}
            )
        if plan:
            np.testing.assert_array_equal(y.transpose(0, 2, 1), expected)
            np.testing.assert_array_equal(last, last_expected)


# memory


@LAYOUTS
@pytest.mark.parametrize("split", [False, True], ids=["serial", "split"])
@pytest.mark.parametrize("state", [8, 70])
def test_memory_is_outputs_and_the_scratch_of_the_plan(host_executor, layout, split, state):
    one = case(2, 64, 6, state, layout=layout)
    plan = {"schedule": Schedule.SPLIT, "chunk": 32} if split else {"schedule": Schedule.SERIAL}
    one.check(host_executor, [plan], out_dtype=np.float32)
    tile = selective_tiles(one.kind)[0]
    output, last = 2 * 64 * 6 * 4, 2 * 6 * state * 4
    partial = [output] if state > tile.slice else []
    summaries = [2 * 2 * state * 6 * 4] * 2 if split else []
    assert sorted(host_executor.allocated) == sorted([output, last, *partial, *summaries])
    assert sum(host_executor.allocated) < 2 * 64 * 6 * state * 4


def test_peak_on_a_gpu(cuda_executor):
    cupy = cuda_executor.xp
    batch, length, channels, state = 2, 4096, 256, 16
    u = cupy.ones((batch, length, channels), np.float32)
    A, B = -cupy.ones((channels, state), np.float32), cupy.ones((batch, length, state), np.float32)
    for plan, scratch in (
        ({"schedule": Schedule.SERIAL}, 0),
        ({"schedule": Schedule.SPLIT, "chunk": 512}, 2 * batch * 8 * state * channels * 4),
    ):
        pool = cupy.cuda.MemoryPool()
        with cupy.cuda.using_allocator(pool.malloc), forced(**plan):
            y = cuscan.selective_scan(u, u, A, B, B)
            assert float(y[0, 0, 0]) == state
            assert pool.total_bytes() <= y.nbytes + scratch + 4 * 512


def test_peak_of_numpy_is_far_below_all_states():
    u = np.ones((1, 1 << 16, 8), np.float32)
    A, B = -np.ones((8, 64), np.float32), np.ones((1, 1 << 16, 64), np.float32)
    tracemalloc.start()
    try:
        cuscan.selective_scan(u, u, A, B, B)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < u.nbytes * 64 / 8


# saved states


@LAYOUTS
@pytest.mark.parametrize("length", [0, 1, 31, 32, 33, 64, 65, 97, 130])
def test_saved_states_are_the_last_states_of_what_comes_before(executor, layout, length):
    one = case(2, length, 5, 3, layout=layout, options=("D", "h0"), exact=True)
    time = 1 if layout == "bld" else 2
    u, delta, A, B, C = one.inputs
    for plan in plans(executor, one):
        _, _, states = one.run(executor, plan, return_states=True)
        assert (states.shape, states.dtype) == ((2, -(-length // 32), 5, 3), np.float32)
        assert states.flags.c_contiguous
        for k in range(states.shape[1]):
            before = [np.take(x, range(32 * k), time) for x in (u, delta, B, C)]
            expected = oracle.selective_scan(before[0], before[1], A, *before[2:], h0=one.given["h0"], layout=layout)
            np.testing.assert_array_equal(states[:, k], expected.last, err_msg=f"{k} {plan}")


@pytest.mark.parametrize("item", ITEMS)
@pytest.mark.parametrize("state", [5, 17, *(pytest.param(n, marks=full_on_host) for n in (16, 70))])
@LAYOUTS
def test_saved_states_of_real_inputs(executor, item, state, layout):
    one = case(2, 70, 6, state, item=item, layout=layout, groups=2)
    eps = 2.0**-53 if item is np.float64 else 2.0**-24
    value, bound = _bounds.selective_states(*one.inputs, **one.given, layout=layout, eps=eps)
    for plan in plans(executor, one):
        y, last, states = one.run(executor, plan, return_states=True)
        oracle.assert_scan_close(states, value, bound)
        for x, expected in zip(one.run(executor, plan), (y, last), strict=True):
            np.testing.assert_array_equal(x.view(np.uint8), expected.view(np.uint8))


@pytest.mark.full_on_host
@pytest.mark.parametrize("constant", [(), ("B",), ("C",), ("B", "C")])
def test_saved_states_are_complex_where_the_state_is(executor, constant):
    one = case(2, 70, 5, 5, item=np.float32, rates=np.complex64, constant=constant)
    value, bound = _bounds.selective_states(*one.inputs, **one.given)
    for plan in plans(executor, one):
        _, _, states = one.run(executor, plan, return_states=True)
        assert states.dtype == np.complex64
        oracle.assert_scan_close(states, value, bound)


@LAYOUTS
@pytest.mark.parametrize("reverse", [False, True])
def test_saved_states_with_masks_resets_and_packed_sequences(executor, layout, reverse):
    laid = Layout()
    every_plan = (Plan(), Plan("serial"), Plan("split", chunk=32), Plan(segments=3))
    for seed in range(6):
        packed = {"batch": 1, "cu_seqlens": laid, "lengths": (29, 0, 32, 1, 6), "head": 3} if seed % 2 else {"batch": 2}
        problem = SelectiveProblem(
            seed, length=74, channels=5, state=3, dtype="bfloat16", layout=layout, mask=laid, reset=laid,
            h0=laid if seed % 3 else None, reverse=reverse, states=True, plans=every_plan, **packed,
        )  # fmt: skip
        problem.check(lambda function, arguments: executor(function, **arguments))


def test_a_saved_state_is_what_enters_that_step(executor):
    # Step 32 is reset, step 64 begins a sequence, and step 96 is outside of all.
    ones = np.ones((1, 100, 2), BF16)
    reset = np.arange(100)[None] == 32
    given = {"u": ones, "delta": ones, "A": np.zeros((2, 1), np.float32), "B": ones[..., :1], "C": ones[..., :1]}
    given |= {"reset": reset, "cu_seqlens": np.array([0, 64, 95]), "h0": np.full((2, 2, 1), 1000, np.float32)}
    given["h0"][1] = 2000
    _, states = executor(cuscan.selective_scan, **given, return_states=True)
    np.testing.assert_array_equal(states[0, :, 0, 0], [1000, 0, 2000, 0])
    # Against time the sequences begin at steps 94 and 63; states are saved before steps 99, 67, 35 and 3.
    _, last, states = executor(cuscan.selective_scan, **given, return_last_state=True, return_states=True, reverse=True)
    np.testing.assert_array_equal(states[0, :, 0, 0], [0, 2027, 1028, 29])
    np.testing.assert_array_equal(last[:, 0, 0], [33, 2031])


@pytest.mark.parametrize("wrong", [1, None, "yes"])
def test_return_states_is_a_flag(wrong):
    with pytest.raises(TypeError, match="return_states must be True or False"):
        cuscan.selective_scan(*case(1, 3, 2, 2, options=()).inputs, return_states=wrong)
