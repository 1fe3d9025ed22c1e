"""selective_state_update on NumPy arrays and by its kernels, against the oracle and against selective_scan."""

import functools
import gc
import itertools
import struct
import sys
import threading
import types
import weakref

import ml_dtypes
import numpy as np
import pytest
from conftest import HostExecutor
from hypothesis import given, settings
from hypothesis import strategies as st

import cuscan
from cuscan import _arrays, _calls, _source, state_update
from cuscan._plan import DeviceLimits, Schedule, UpdateKind, UpdateProblem, forced, plan_update, update_kinds
from cuscan.testing import host, oracle

BF16 = ml_dtypes.bfloat16
F16, F32, F64, C64 = np.float16, np.float32, np.float64, np.complex64
full_on_host = pytest.mark.full_on_host
OPTIONS = ("D", "z", "dt_bias", "dt_softplus", "dt_limit", "indices")
STATES = [1, 3, 4, 8, 16, 17, 64, 128, 132, 257]
# Types of x and of the state; the quick tier compiles the first three for the CPU.
TYPES = [(BF16, F32), (F32, F32), (BF16, BF16)]
MORE_TYPES = [(F16, F32), (F32, BF16), (F32, F16), (BF16, F16), (F16, BF16), (F16, F16), (F64, F64)]
MORE_TYPES += [(item, C64) for item in (F32, BF16, F16)]
ALL_TYPES = TYPES + [pytest.param(*each, marks=full_on_host) for each in MORE_TYPES]
each_type = pytest.mark.parametrize(("item", "state_item"), ALL_TYPES)


@pytest.fixture(scope="module")
def host_executor():
    """The CPU executor in checked mode, which compiles what a test needs."""
    try:
        host.compiler()
    except host.CompileError as error:
        pytest.skip(str(error))
    return HostExecutor(host.HostModules("checked"), every_type=True)


def rng(*seed):
    return np.random.default_rng(seed)


def bits(x):
    return np.ascontiguousarray(x).view(f"u{min(x.itemsize, 8)}")


def step(state, *arguments, **options):
    """What an executor calls: y, and the state afterwards."""
    return cuscan.selective_state_update(state, *arguments, **options), state


class Case:
    """The arguments of one call, and what the oracle makes of them, worked out once."""

    def __init__(self, batch, channels, state, *, item=BF16, state_item=F32, groups=None, wide=(), options=OPTIONS,
                 exact=False, rates=None, indices=None, seed=0):  # fmt: skip
        r = rng(seed, batch, channels, state)
        self.item, self.state_item, self.complex = item, state_item, state_item is C64
        accumulation = F64 if item is F64 else F32
        if rates is None:
            rates = C64 if self.complex else accumulation
        draw = (lambda *shape: r.integers(-4, 5, shape)) if exact else (lambda *shape: r.normal(size=shape))
        couple = (batch, state) if groups is None else (batch, groups, state)

        def complexes(*shape):
            return draw(*shape) + (1j * draw(*shape) if self.complex else 0)

        def of(name, values):
            if self.complex and name in "BC":
                return values.astype(C64)
            return values.real.astype(F32 if name in wide else item)

        softplus = "dt_softplus" in options
        if exact:
            dt, A = r.integers(0, 2, (batch, channels)), r.choice([0, -1e4], (channels, state), p=[0.7, 0.3])
        else:
            dt = r.normal(-1, 1, (batch, channels)) if softplus else r.uniform(0, 0.5, (batch, channels))
            A = -r.uniform(0.05, 3, (channels, state))
        if self.complex:
            A = A + 1j * r.normal(size=A.shape)
        small = BF16 if "small" in wide else F32
        slots = batch + 3 if "indices" in options else batch
        self.state = complexes(slots, channels, state).astype(state_item)
        self.inputs = (
            draw(batch, channels).astype(item), of("dt", dt), A.astype(rates), of("B", complexes(*couple)),
            of("C", complexes(*couple)),
        )  # fmt: skip
        self.given = {
            "D": draw(channels).astype(small),
            "z": draw(batch, channels).astype(item),
            "dt_bias": (r.normal(-1, 1, channels) if softplus else r.uniform(0, 0.5, channels)).astype(small),
            "dt_softplus": True,
            "dt_limit": (0.01, 1.5),
            "indices": r.permutation(slots)[:batch].astype(np.int32) if indices is None else indices,
        }
        self.given = {name: self.given[name] for name in OPTIONS if name in options}
        if "indices" in self.given:
            self.given["state_batch_indices"] = self.given.pop("indices")

    @property
    def rows(self):
        """The rows that have a state, and their slots."""
        indices = self.given.get("state_batch_indices", np.arange(len(self.inputs[0])))
        rows = np.flatnonzero((indices >= 0) & (indices < len(self.state)))
        return rows, indices[rows]

    @functools.cached_property
    def expected(self):
        """A scan of length 1 over the rows that have a state."""
        rows, slots = self.rows
        x, dt, A, B, C = self.inputs
        options = {name: x for name, x in self.given.items() if name != "state_batch_indices"}
        options = {name.replace("dt_", "delta_"): x for name, x in options.items()}
        if "z" in options:
            options["z"] = options["z"][rows, None]
        eps = 2.0**-53 if self.item is F64 else 2.0**-24
        sequences = (array[rows, None] for array in (x, dt))
        return oracle.selective_scan(
            *sequences, A, B[rows, None], C[rows, None], **options, h0=self.state[slots], eps=eps
        )

    def run(self, executor, **more):
        return executor(step, self.state.copy(), *self.inputs, **self.given, **more)

    def check(self, executor, **more):
        y, state = self.run(executor, **more)
        rows, slots = self.rows
        out = more.get("out")
        assert y.dtype == np.dtype(more.get("out_dtype") or (self.item if out is None else out.dtype))
        assert y.shape == self.inputs[0].shape
        assert (y is out) == (out is not None)
        oracle.assert_scan_close(y[rows], self.expected.value[:, 0], self.expected.bound[:, 0])
        assert state.dtype == self.state_item
        oracle.assert_scan_close(state[slots], self.expected.last, self.expected.last_bound)
        np.testing.assert_array_equal(bits(np.delete(y, rows, 0)), 0)
        np.testing.assert_array_equal(bits(np.delete(state, slots, 0)), bits(np.delete(self.state, slots, 0)))
        return y, state


@functools.cache
def case(*sizes, **choices):
    return Case(*sizes, **choices)


# values


def test_by_hand(executor):
    # Gates exp(-ln 2) = 1/2 and exp(0) = 1, dt = 1: h = a h + B x, y = (C . h + D x) silu(z).
    state = np.array([[[8, -3]]], F32)
    A = np.array([[-np.log(2), 0]], F32)
    x, dt = np.array([[2]], F32), np.array([[1]], F32)
    B, C = np.array([[1, 3]], F32), np.array([[10, 100]], F32)
    y, after = executor(step, state.copy(), x, dt, A, B, C, np.array([0.5], F32))
    np.testing.assert_allclose(after, [[[4 + 2, -3 + 6]]], rtol=2**-22)
    np.testing.assert_allclose(y, [[10 * 6 + 100 * 3 + 1]], rtol=2**-22)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize(("item", "state_item"), TYPES)
def test_exact_inputs_give_exact_results(executor, state, item, state_item):
    one = case(5, 6, state, item=item, state_item=state_item, options=("D", "indices"), exact=True)
    y, after = one.run(executor, out_dtype=F32)
    rows, slots = one.rows
    np.testing.assert_array_equal(y[rows], one.expected.value[:, 0])
    np.testing.assert_array_equal(after[slots].astype(F64), one.expected.last)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize(("item", "state_item"), TYPES)
def test_every_number_of_states(executor, state, item, state_item):
    case(3, 5, state, item=item, state_item=state_item, wide=("dt",)).check(executor, out_dtype=F32)


@pytest.mark.parametrize("channels", [1, 3, 31, 32, 33, 97])
@pytest.mark.parametrize("batch", [1, 4, 5, 11])
def test_every_number_of_channels_and_rows(executor, batch, channels):
    for state in (4, 16, 3):
        case(batch, channels, state).check(executor, out_dtype=F32)


@pytest.mark.parametrize("groups", [None, 1, 2, 3, 12])
@pytest.mark.parametrize("state", [8, 5])
def test_groups(executor, groups, state):
    case(6, 12, state, groups=groups).check(executor, out_dtype=F32)


@pytest.mark.parametrize("left_out", [*OPTIONS, "all"])
@pytest.mark.parametrize("state", [16, 5])
def test_every_option_absent(executor, left_out, state):
    options = () if left_out == "all" else tuple(name for name in OPTIONS if name != left_out)
    case(5, 6, state, options=options).check(executor, out_dtype=F32)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("state", [16, 5])
def test_every_option_alone(executor, option, state):
    case(5, 6, state, options=(option,), wide=("B",)).check(executor)


@each_type
def test_types(executor, item, state_item):
    mixed = [()] if item is F64 else [(), ("dt",), ("B", "C"), ("small",), ("dt", "C"), ("dt", "B", "C", "small")]
    for wide in mixed:
        for state in (8, 5):
            one = case(3, 6, state, item=item, state_item=state_item, wide=wide, groups=3)
            one.check(executor)
            for out_dtype in (F32, F64, BF16, F16):
                one.check(executor, out_dtype=out_dtype)


@each_type
def test_types_without_options(executor, item, state_item):
    case(3, 6, 8, item=item, state_item=state_item, options=()).check(executor)


@pytest.mark.parametrize("kind", [BF16, F16, F32, F64])
@pytest.mark.parametrize("state", [8, 5])
def test_parameters_of_any_real_type_are_read_in_the_accumulation_type(executor, kind, state):
    one = case(3, 4, state)
    x, dt, A, B, C = one.inputs
    parameters = {"A": A, "D": one.given["D"], "dt_bias": one.given["dt_bias"]}
    rounded = {name: x.astype(kind) for name, x in parameters.items()}
    given = {name: x for name, x in one.given.items() if name not in parameters}
    results = [
        executor(step, one.state.copy(), x, dt, B=B, C=C, **given, **which)
        for which in (rounded, {name: x.astype(F32) for name, x in rounded.items()})
    ]
    for result, expected in zip(*results, strict=True):
        np.testing.assert_array_equal(bits(result), bits(expected))


def test_dt_in_closed_form(executor):
    # A = 0, x = B = C = 1, no state so far: y is dt as it is used.
    dt = np.array([[-20, -1, 0, 1, 30, np.nan]], F32).astype(BF16)
    one, zero = np.ones((1, 6), BF16), np.zeros((6, 1), F32)
    couple = np.ones((1, 1), BF16)

    def y(**options):
        y, state = executor(step, np.zeros((1, 6, 1), F32), one, dt, zero, couple, couple, out_dtype=F32, **options)
        np.testing.assert_array_equal(state[..., 0], y)
        return y[0]

    x = dt.astype(F64)[0, :5]
    bias = np.full(6, 0.5, F32)
    for options, used in (
        ({}, x),
        ({"dt_bias": bias}, x + 0.5),
        ({"dt_softplus": True}, np.log1p(np.exp(x))),
        ({"dt_bias": bias, "dt_softplus": True}, np.log1p(np.exp(x + 0.5))),
        ({"dt_softplus": True, "dt_limit": (0.25, 2)}, np.log1p(np.exp(x)).clip(0.25, 2)),
        ({"dt_limit": (-np.inf, 0.0)}, x.clip(None, 0)),
    ):
        values = y(**options)
        np.testing.assert_allclose(values[:5], used, rtol=3e-7, atol=0)
        assert np.isnan(values[5])


@pytest.mark.parametrize("state", [4, 3])
def test_what_is_not_finite_stays_in_its_row(executor, state):
    clean = case(6, 5, state, options=("D", "z"))
    y, after = clean.run(executor, out_dtype=F32)
    for poison in (np.nan, np.inf):
        for name in ("x", "dt", "B", "C", "state"):
            poisoned = Case(6, 5, state, options=("D", "z"))
            arrays = dict(zip(("x", "dt", "A", "B", "C"), poisoned.inputs, strict=True), state=poisoned.state)
            arrays[name][2] = poison
            y_poisoned, after_poisoned = poisoned.run(executor, out_dtype=F32)
            rows = np.arange(6) != 2
            np.testing.assert_array_equal(bits(y_poisoned[rows]), bits(y[rows]))
            np.testing.assert_array_equal(bits(after_poisoned[rows]), bits(after[rows]))
            assert not np.isfinite(y_poisoned[2]).any(), name


@pytest.mark.parametrize("dt", [np.inf, 200.0])
def test_a_gate_of_0_forgets(executor, dt):
    # 5 states leave lanes with some of their states and with none: these must not turn 0 * inf into NaN.
    ones, couple = np.ones((1, 2), F32), np.ones((1, 5), F32)
    state = np.full((1, 2, 5), 1e30, F32)
    y, after = executor(step, state, ones, dt * ones, -np.ones((2, 5), F32), couple, couple)
    np.testing.assert_array_equal(after, dt)
    np.testing.assert_array_equal(y, 5 * dt)


@given(data=st.data(), seed=st.integers(0, 2**32))
@settings(max_examples=40)
def test_the_whole_signature(executor, data, seed):
    item, state_item = data.draw(st.sampled_from(TYPES))
    groups = data.draw(st.sampled_from([None, 1, 2, 3]))
    batch, channels, state = data.draw(st.tuples(st.integers(0, 6), st.integers(0, 12), st.integers(0, 40)))
    options = data.draw(st.lists(st.sampled_from(OPTIONS), unique=True))
    choices = np.array([*range(-2, 9), -(2**31), 2**31 - 1])
    one = Case(
        batch, channels * (groups or 1), state, item=item, state_item=state_item, groups=groups, seed=seed,
        options=options, wide=data.draw(st.lists(st.sampled_from(["dt", "B", "C", "small"]), unique=True)),
    )  # fmt: skip
    if "indices" in options:
        valid = choices[(choices >= 0) & (choices < batch + 3)]
        drawn = data.draw(st.lists(st.sampled_from(choices.tolist()), min_size=batch, max_size=batch))
        seen = set()
        drawn = [-1 if slot in seen and slot in valid else (seen.add(slot), slot)[1] for slot in drawn]
        one.given["state_batch_indices"] = np.array(drawn, data.draw(st.sampled_from([np.int32, np.int64])))
    one.check(executor, out_dtype=data.draw(st.sampled_from([None, F32, F64])))


# against the scan


def many_steps(executor, item, state_item, state, options, steps=200):
    """A sequence by steps, its scan's arguments, and y and the state after each step."""
    batch, channels = 2, 5
    r = rng(7, state)
    u, delta, z = (r.normal(size=(batch, steps, channels)).astype(item) for _ in range(3))
    B, C = (r.normal(size=(batch, steps, state)).astype(item) for _ in range(2))
    # Gates from 0.5 to almost 1: a state that is kept for hundreds of steps.
    A = -np.geomspace(1e-3, 1, channels * state).reshape(channels, state).astype(F32)
    D, bias = r.normal(size=(2, channels)).astype(F32)
    h0 = r.normal(size=(batch, channels, state)).astype(state_item)
    given = {"D": D, "z": z, "delta_bias": bias, "delta_softplus": True, "delta_limit": (0.01, 1.0)}
    given = {name: x for name, x in given.items() if name in options}
    if "delta_softplus" not in options:
        delta = np.abs(delta)
    scan = {"u": u, "delta": delta, "A": A, "B": B, "C": C, **given}
    renamed = {name.replace("delta_", "dt_"): x for name, x in given.items() if name != "z"}
    now, ys, states = h0.copy(), [], []
    for t in range(steps):
        if "z" in given:
            renamed["z"] = z[:, t]
        y, now = executor(step, now, u[:, t], delta[:, t], A, B[:, t], C[:, t], **renamed, out_dtype=F32)
        ys.append(y)
        states.append(now.copy())
    return scan, h0, np.stack(ys, 1), np.stack(states, 1)


@pytest.mark.parametrize(
    ("item", "state"),
    [(BF16, 16), (BF16, 3), *(pytest.param(F32, state, marks=full_on_host) for state in (16, 64))],
)
@pytest.mark.parametrize(
    "options", [("D", "z", "delta_bias", "delta_softplus", "delta_limit"), ()], ids=["all", "none"]
)
def test_200_steps_are_the_scan_bit_for_bit(executor, item, state, options):
    scan, h0, ys, states = many_steps(executor, item, F32, state, options)
    expected = oracle.selective_scan(**scan, h0=h0)
    oracle.assert_scan_close(ys, expected.value, expected.bound)
    oracle.assert_scan_close(states[:, -1], expected.last, expected.last_bound)
    if executor.kernels:
        for length in (1, 77, 200):
            part = {name: x[:, :length] if name in ("u", "delta", "B", "C", "z") else x for name, x in scan.items()}
            with forced(schedule=Schedule.SERIAL):
                y, last = executor(cuscan.selective_scan, **part, h0=h0, return_last_state=True, out_dtype=F32)
            np.testing.assert_array_equal(bits(states[:, length - 1]), bits(last))
            # y differs by the order of its sum over the states.
            np.testing.assert_allclose(ys[:, :length], y, rtol=1e-4, atol=1e-4)


def state_of_a_scan(scan, h0):
    """Every state of a scan and what it may be off by: y where C picks one state after the other."""
    scan = {name: x for name, x in scan.items() if name not in ("D", "z")}
    picked = []
    for n in range(h0.shape[2]):
        C = np.zeros(scan["C"].shape)
        C[..., n] = 1
        picked.append(oracle.selective_scan(**{**scan, "C": C}, h0=h0))
    return np.stack([each.value for each in picked], -1), np.stack([each.bound for each in picked], -1)


@pytest.mark.parametrize(
    ("item", "state_item", "unit"),
    [
        (BF16, BF16, 2.0**-8),
        pytest.param(F32, BF16, 2.0**-8, marks=full_on_host),
        pytest.param(F16, F16, 2.0**-11, marks=full_on_host),
    ],
)
def test_200_steps_of_a_rounded_state(executor, item, state_item, unit):
    """A stored state is off by the rounding of each step, carried on by the gates.

    Let the state that a step reads be off by E. The step makes one that is off by |gate| E beside what a scan may be
    off by, and storing that rounds all of it: E <- |gate| E + unit (|h| + bound + |gate| E), or half of the smallest
    item. The step's y is off by |C| |gate| E, times what z makes of it, beside the scan's. What float32 arithmetic
    makes of E itself is far below 2^-10 of it.
    """
    scan, h0, ys, states = many_steps(
        executor, item, state_item, 4, ("z", "delta_bias", "delta_softplus", "delta_limit")
    )
    expected = oracle.selective_scan(**scan, h0=h0)
    h, bound = state_of_a_scan(scan, h0)
    dt = np.log1p(np.exp(scan["delta"].astype(F64) + scan["delta_bias"])).clip(*scan["delta_limit"])
    gates = np.exp(dt[..., None] * scan["A"].astype(F64)) * (1 + 2.0**-10)
    z, C = scan["z"].astype(F64), np.abs(scan["C"].astype(F64))
    gate_of_y = np.abs(z / (1 + np.exp(-z)))
    E, beyond = np.zeros(h0.shape), 0
    for t in range(200):
        E *= gates[:, t]
        y_bound = expected.bound[:, t] + gate_of_y[:, t] * np.einsum("bn,bcn->bc", C[:, t], E)
        oracle.assert_scan_close(ys[:, t], expected.value[:, t], y_bound)
        beyond += np.sum(np.abs(ys[:, t] - expected.value[:, t]) > 2 * expected.bound[:, t] + 2.0**-22)
        E += unit * (np.abs(h[:, t]) + bound[:, t] + E) + 2.0**-25
        error = np.abs(states[:, t].astype(F64) - h[:, t])
        assert (error <= bound[:, t] + E).all(), t
    assert beyond > 1000, "what the rounding of the state adds is what is seen here"


# slots


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("state", [16, 5])
def test_rows_without_a_slot_touch_nothing(executor, dtype, state):
    indices = np.array([3, -1, 0, 7, 8, -(2**31), 2**31 - 1, 2, -8], dtype)
    one = Case(9, 6, state, indices=indices)
    one.state = one.state[:8]
    for x in (*one.inputs[:2], *one.inputs[3:], one.given["z"]):
        x[[1, 4, 5, 6, 8]] = np.nan
    one.state[[1, 4, 5, 6]] = np.nan  # of another request; its bits stay
    one.state.view(np.uint32)[1] = 0x7FC01234
    y, after = one.check(executor, out_dtype=F32)
    assert not np.isnan(y).any()
    assert np.isnan(after[[1, 4, 5, 6]]).all()


@pytest.mark.parametrize("slot", [2**32, -(2**32), 2**63 - 1, -(2**63), 2**32 + 1])
def test_slots_of_64_bits_are_not_cut_to_32(executor, slot):
    one = Case(4, 6, 16, indices=np.array([1, slot, 0, 2], np.int64))
    y, _ = one.check(executor, out_dtype=F32)
    np.testing.assert_array_equal(y[1], 0)


def test_no_slot_at_all(executor):
    one = Case(4, 6, 16, indices=np.array([0, -1, 1, 5], np.int32))
    one.state = one.state[:0]
    y, _ = one.run(executor)
    np.testing.assert_array_equal(y.astype(F32), 0)


@pytest.mark.parametrize("how", ["by 3", "backwards", "broadcast"])
def test_strided_slots(executor, how):
    indices = np.zeros(13, np.int32)
    view = {"by 3": indices[::3], "backwards": indices[4::-1], "broadcast": np.broadcast_to(indices[:1], 5)}[how]
    if how != "broadcast":
        view[...] = [4, 0, -1, 6, 2]
    else:
        indices[0] = -7
    case(5, 6, 16, indices=None)
    Case(5, 6, 16, indices=view).check(executor)


def test_slot_order_does_not_matter(executor):
    one = case(6, 5, 16, options=("z",))
    y, after = one.run(executor, out_dtype=F32)
    order = np.array([4, 1, 5, 0, 2, 3])
    x, dt, A, B, C = one.inputs
    moved = (x[order], dt[order], A, B[order], C[order])
    y_moved, after_moved = executor(
        step, one.state.copy(), *moved, z=one.given["z"][order], state_batch_indices=order, out_dtype=F32
    )
    np.testing.assert_array_equal(bits(y_moved), bits(y[order]))
    np.testing.assert_array_equal(bits(after_moved), bits(after))


def test_a_slot_twice_is_refused(executor, monkeypatch):
    monkeypatch.setenv("CUSCAN_CHECK", "1")
    one = Case(4, 6, 16, indices=np.array([2, -1, 0, 2]))
    kept = one.state.copy()
    with pytest.raises(ValueError, match=r"state_batch_indices must have each slot once, got slot 2 2 times"):
        one.run(executor)
    np.testing.assert_array_equal(one.state, kept)
    one.given["state_batch_indices"] = np.array([2, -1, 0, -1])
    one.check(executor)
    one.given["state_batch_indices"] = np.array([2, 99, 0, 99])
    one.check(executor)


# strides, alignment, sizes


def spaced(x, step):
    """X with its items `step` apart on every axis, or backwards in memory where that is negative, 7s between them."""
    big = np.full(tuple(abs(step) * size + 1 for size in x.shape), 7, x.dtype)
    view = big[tuple(slice(1, None, abs(step)) for _ in x.shape)][tuple(slice(size) for size in x.shape)]
    view = view[tuple(slice(None, None, int(np.sign(step))) for _ in x.shape)]
    view[...] = x
    return view


def odd(x):
    """X at an address that is no multiple of its items' size."""
    memory = np.zeros(x.nbytes + 1, np.uint8)
    view = np.ndarray(x.shape, x.dtype, memory, 1)
    view[...] = x
    return view


CHANGES = {
    "by 2": lambda x: spaced(x, 2),
    "by 3 backwards": lambda x: spaced(x, -3),
    "fortran": lambda x: np.asfortranarray(x.copy()),
    "one off": lambda x: spaced(x, 1),
    "odd": odd,
}


def changed(one, change, names):
    """A call's arguments, some of them changed."""
    arrays = dict(zip(("state", "x", "dt", "A", "B", "C"), (one.state.copy(), *one.inputs), strict=True), **one.given)
    return {name: change(x) if name in names else x for name, x in arrays.items()}


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("state", [16, 5])
def test_strides_do_not_change_bits(executor, how, state):
    one = case(6, 8, state, groups=2, wide=("dt",))
    y, after = one.check(executor, out_dtype=F32)
    arrays = [name for name in changed(one, None, ()) if name not in ("dt_softplus", "dt_limit")]
    for names in (*([name] for name in arrays), arrays):
        given = changed(one, CHANGES[how], names)
        out = CHANGES[how](np.zeros(y.shape, F32)) if len(names) > 1 else None
        before = {name: x.copy() for name, x in given.items() if isinstance(x, np.ndarray)}
        state_given = given.pop("state")
        y_changed, after_changed = executor(step, state_given, **given, out=out, out_dtype=F32)
        np.testing.assert_array_equal(bits(y_changed), bits(y), err_msg=f"{names}")
        np.testing.assert_array_equal(bits(after_changed), bits(after), err_msg=f"{names}")
        for name, x in given.items():
            if isinstance(x, np.ndarray):
                np.testing.assert_array_equal(x, before[name])
        base = state_given.base
        if how in ("by 2", "by 3 backwards", "one off") and "state" in names:
            while base.base is not None:
                base = base.base
            assert np.count_nonzero(base == 7) >= base.size - state_given.size


@pytest.mark.parametrize(("item", "state_item"), TYPES)
def test_items_at_odd_addresses(executor, item, state_item):
    one = Case(3, 5, 16, item=item, state_item=state_item)
    y, after = one.check(executor)
    for names in (["state"], ["x", "z"], ["state", "state_batch_indices", "B"]):
        given = changed(one, odd, names)
        memory = np.zeros(y.nbytes + 2, np.uint8)
        out = np.ndarray(y.shape, y.dtype, memory, 1)
        result, after_odd = executor(step, given.pop("state"), **given, out=out)
        assert result is out
        np.testing.assert_array_equal(bits(result), bits(y))
        np.testing.assert_array_equal(bits(after_odd), bits(after))
        np.testing.assert_array_equal(memory[[0, -1]], 0)


def test_broadcast_inputs_are_read_in_place(executor):
    one = Case(4, 6, 16, options=("z",))
    one.inputs = tuple(np.broadcast_to(x[:1], x.shape) for x in one.inputs)
    one.given["z"] = np.broadcast_to(one.given["z"][:, :1], (4, 6))
    one.check(executor, out_dtype=F32)


@pytest.mark.parametrize(
    "sizes", [(0, 3, 4), (2, 0, 4), (2, 3, 0), (0, 0, 0), (1, 1, 1), (1, 1, 4), (0, 3, 0), (5, 1, 0)]
)
@pytest.mark.parametrize("options", [(), OPTIONS])
def test_sizes_0_and_1(executor, sizes, options):
    case(*sizes, options=options).check(executor)


def test_without_states_only_the_skip_is_left(executor):
    one = case(2, 3, 0, options=("D", "z"))
    y, _ = one.run(executor, out_dtype=F32)
    x, z = one.inputs[0].astype(F64), one.given["z"].astype(F64)
    np.testing.assert_allclose(y, one.given["D"] * x * z / (1 + np.exp(-z)), rtol=1e-6)


def test_axes_of_size_1_may_have_any_stride(executor):
    one = Case(1, 1, 16, options=("D", "z", "dt_bias"))
    y, after = one.run(executor)
    arrays = dict(zip(("state", "x", "dt", "A", "B", "C"), (one.state, *one.inputs), strict=True), **one.given)
    strange = {
        name: np.lib.stride_tricks.as_strided(
            x.copy(), x.shape, [stride if size > 1 else 12345 for size, stride in zip(x.shape, x.strides, strict=True)]
        )
        for name, x in arrays.items()
    }
    y_strange, after_strange = executor(step, strange.pop("state"), **strange)
    np.testing.assert_array_equal(bits(y_strange), bits(y))
    np.testing.assert_array_equal(bits(after_strange), bits(after))


def test_a_slot_past_element_2_to_31(cuda_executor):
    cupy = cuda_executor.xp
    one = Case(3, 4, 16, indices=np.array([2, 0, 1], np.int32))
    big = cupy.zeros(2**32 + 2**13, np.uint8)
    apart = cupy.lib.stride_tricks.as_strided(big.view(np.float32), (3, 4, 16), (2**31 + 1024, 64, 4))
    apart[...] = cupy.asarray(one.state[:3])
    given = {name: cupy.asarray(x) if isinstance(x, np.ndarray) else x for name, x in one.given.items()}
    one.state = one.state[:3]
    y = cuscan.selective_state_update(apart, *map(cuda_executor.asarray, one.inputs), **given, out_dtype=F32)
    oracle.assert_scan_close(y.get(), one.expected.value[:, 0], one.expected.bound[:, 0])
    oracle.assert_scan_close(apart.get()[[2, 0, 1]], one.expected.last, one.expected.last_bound)


def test_a_captured_step_can_be_replayed(cuda_executor):
    cupy = cuda_executor.xp
    one = case(3, 4, 16)
    state, out = cuda_executor.asarray(one.state), cupy.zeros((3, 4), F32)
    inputs = [cuda_executor.asarray(x) for x in one.inputs]
    given = {name: cuda_executor.asarray(x) if isinstance(x, np.ndarray) else x for name, x in one.given.items()}
    kept = state.copy()
    for _ in range(3):
        expected = cuscan.selective_state_update(state, *inputs, **given, out_dtype=F32)
    replayed = kept.copy()
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with cuscan.Workspace(), stream:
        stream.begin_capture()
        cuscan.selective_state_update(replayed, *inputs, **given, out=out)
        graph = stream.end_capture()
        for _ in range(3):
            graph.launch(stream)
    stream.synchronize()
    np.testing.assert_array_equal(bits(out.get()), bits(expected.get()))
    np.testing.assert_array_equal(bits(replayed.get()), bits(state.get()))


# bits


@pytest.mark.parametrize("state", [16, 5, 257])
def test_how_it_is_laid_out_does_not_change_bits(host_executor, state):
    one = case(9, 70, state)
    y, after = one.run(host_executor, out_dtype=F32)
    for grid in ((1, 1), (2, 1), (1, 2), (3, 2)):
        with forced(grid=grid):
            y_again, after_again = one.run(host_executor, out_dtype=F32)
        np.testing.assert_array_equal(bits(y_again), bits(y))
        np.testing.assert_array_equal(bits(after_again), bits(after))


@pytest.mark.parametrize("state", [16, 3, 64, 257])
def test_where_a_row_and_a_channel_are_does_not_change_bits(executor, state):
    r = rng(1)
    batch, channels = 7, 5
    x, dt = r.normal(size=(2, 1, 1)).astype(F32) * np.ones((2, batch, channels), F32)
    B, C = (r.normal(size=(1, state)).astype(F32) * np.ones((batch, 1), F32) for _ in range(2))
    A = -r.uniform(size=(1, state)).astype(F32) * np.ones((channels, 1), F32)
    h = r.normal(size=(1, 1, state)).astype(F32) * np.ones((batch, channels, 1), F32)
    y, after = executor(step, h, x, dt, A, B, C)
    assert len(np.unique(bits(y))) == 1
    np.testing.assert_array_equal(bits(after), np.broadcast_to(bits(after)[:1, :1], after.shape))


def test_y_is_the_same_for_a_state_of_another_type(executor):
    one = case(5, 6, 16, state_item=BF16)
    y, _ = one.run(executor)
    wide, _ = executor(step, one.state.astype(F32), *one.inputs, **one.given)
    np.testing.assert_array_equal(bits(y), bits(wide))


def test_the_same_call_gives_the_same_bits(executor):
    one, other = case(5, 6, 17), case(2, 33, 4)
    first = one.run(executor, out_dtype=F32)
    other.run(executor)
    for x, again in zip(first, one.run(executor, out_dtype=F32), strict=True):
        np.testing.assert_array_equal(bits(again), bits(x))


# out


def test_out_receives_what_a_fresh_result_would(executor):
    one = case(5, 6, 16)
    for dtype in (BF16, F32, F64, F16):
        y, after = one.check(executor, out_dtype=dtype)
        assert y.flags.c_contiguous
        frame = np.full((5, 8), 7, dtype)
        result, after_again = one.check(executor, out=frame[:, 1:-1])
        np.testing.assert_array_equal(bits(result), bits(y))
        np.testing.assert_array_equal(bits(after_again), bits(after))
        np.testing.assert_array_equal(frame[:, [0, -1]], 7)


def test_out_dtype_keeps_what_float16_cannot(executor):
    ones = np.ones((1, 3), F32)
    y, _ = executor(step, np.zeros((1, 2, 3), F32), np.full((1, 2), 200, F32), np.ones((1, 2), F32),
                    np.zeros((2, 3), F32), 100 * ones, ones, out_dtype="float32")  # fmt: skip
    np.testing.assert_array_equal(y, 60_000)


# errors


def ones(*shape, dtype=F32):
    return np.ones(shape, dtype)


def read_only(x):
    x.flags.writeable = False
    return x


class OfJax:
    """Looks as if JAX had made it."""


OfJax.__module__ = "jaxlib._jax"


def wrong(**changes):
    """A right call with some arguments changed: batch 2, 4 channels, 3 states."""
    right = {
        "state": ones(2, 4, 3),
        "x": ones(2, 4),
        "dt": ones(2, 4),
        "A": ones(4, 3),
        "B": ones(2, 3),
        "C": ones(2, 3),
    }
    return {**right, **changes}


DOUBLE = {name: ones(2, 4, dtype=F64) for name in ("x", "dt")} | {name: ones(2, 3, dtype=F64) for name in "BC"}
# The exception, and what the message must say: the argument, what came, what was expected.
WRONG = [
    # kinds
    *((wrong(**{name: None}), TypeError, [f"{name} must be an array", "NoneType"])
      for name in ("state", "x", "dt", "A", "B", "C")),
    *((wrong(**{name: 1.0}), TypeError, [f"{name} must be an array", "float"])
      for name in ("state", "x", "dt", "D", "z", "dt_bias", "state_batch_indices", "out")),
    (wrong(D=[1.0] * 4), TypeError, ["D must be", "CuPy or NumPy", "list"]),
    (wrong(state_batch_indices=[0, 1]), TypeError, ["state_batch_indices must be", "list"]),
    (wrong(dt_softplus=1), TypeError, ["dt_softplus must be True or False", "int"]),
    (wrong(dt_softplus=ones(4)), TypeError, ["dt_softplus must be True or False", "ndarray"]),
    (wrong(dt_limit=1.0), TypeError, ["dt_limit must be a pair of numbers", "1.0"]),
    (wrong(dt_limit=(1.0, 2.0, 3.0)), TypeError, ["dt_limit must be a pair of numbers", "(1.0, 2.0, 3.0)"]),
    (wrong(state=read_only(ones(2, 4, 3))), TypeError, ["state", "writable", "interop.jax.selective_state_update"]),
    (wrong(state=OfJax()), TypeError, ["state is a JAX array", "interop.jax.selective_state_update"]),
    (wrong(x=OfJax()), TypeError, ["x is a jaxlib._jax.OfJax"]),
    # dtypes
    (wrong(x=ones(2, 4, dtype=int)), TypeError, ["x must be", "float32", "int64"]),
    (wrong(x=ones(2, 4, dtype=C64)), TypeError, ["x must be", "complex64"]),
    (wrong(dt=ones(2, 4, dtype=F64)), TypeError, ["dt must be x's float32", "float64"]),
    (wrong(x=ones(2, 4, dtype=BF16), dt=ones(2, 4, dtype=F16)), TypeError,
     ["dt must be x's bfloat16 or float32", "float16"]),
    (wrong(z=ones(2, 4, dtype=BF16)), TypeError, ["z must be x's float32", "bfloat16"]),
    (wrong(x=ones(2, 4, dtype=BF16), z=ones(2, 4)), TypeError, ["z must be x's bfloat16", "float32"]),
    (wrong(B=ones(2, 3, dtype=F64)), TypeError, ["B must be x's float32", "float64"]),
    (wrong(C=ones(2, 3, dtype=BF16)), TypeError, ["C must be x's float32", "bfloat16"]),
    (wrong(C=ones(2, 3, dtype=C64)), TypeError, ["C must be A's float32", "complex64"]),
    (wrong(A=ones(4, 3, dtype=C64)), TypeError, ["B must be A's complex64", "float32"]),
    (wrong(A=ones(4, 3, dtype="complex128")), TypeError, ["A must be", "complex128"]),
    (wrong(A=ones(4, 3, dtype=int)), TypeError, ["A must be", "int64"]),
    (wrong(D=ones(4, dtype=int)), TypeError, ["D must be", "int64"]),
    (wrong(dt_bias=ones(4, dtype=C64)), TypeError, ["dt_bias must be", "complex64"]),
    (wrong(state=ones(2, 4, 3, dtype=F64)), TypeError, ["state must be float32, bfloat16 or float16", "float64"]),
    (wrong(state=ones(2, 4, 3, dtype=int)), TypeError, ["state must be", "int64"]),
    (wrong(**DOUBLE), TypeError, ["state must be x's float64", "float32"]),
    (wrong(A=ones(4, 3, dtype=C64), B=ones(2, 3, dtype=C64), C=ones(2, 3, dtype=C64)), TypeError,
     ["state must be A's complex64", "float32"]),
    (wrong(**DOUBLE, A=ones(4, 3, dtype=C64)), TypeError, ["A is complex64", "x is float64"]),
    (wrong(x=ones(2, 4, dtype=">f4")), TypeError, ["x must be of this machine's byte order", ">f4"]),
    (wrong(state_batch_indices=ones(2)), TypeError, ["state_batch_indices must be int32 or int64", "float32"]),
    (wrong(state_batch_indices=ones(2, dtype=np.uint32)), TypeError, ["state_batch_indices must be", "uint32"]),
    (wrong(out_dtype=int), TypeError, ["out_dtype must be", "int64"]),
    (wrong(out_dtype="complex64"), TypeError, ["out_dtype must be", "complex64"]),
    (wrong(out=ones(2, 4), out_dtype=F64), TypeError, ["out must have out_dtype's float64", "float32"]),
    (wrong(out=ones(2, 4, dtype=int)), TypeError, ["out must be", "int64"]),
    # shapes and values
    (wrong(x=ones(2, 1, 4)), ValueError, ["x must have two axes (batch, channels)", "(2, 1, 4)"]),
    (wrong(A=ones(4)), ValueError, ["A must have two axes (channels, state)", "(4,)"]),
    (wrong(A=ones(3, 4)), ValueError, ["A must have shape (channels, state) = (4, 4)", "(3, 4)"]),
    (wrong(state=ones(2, 3, 4)), ValueError,
     ["state must have shape (batch, channels, state) = (2, 4, 3)", "(2, 3, 4)"]),
    (wrong(state=ones(5, 4, 3)), ValueError,
     ["state must have shape (batch, channels, state) = (2, 4, 3)", "(5, 4, 3)"]),
    (wrong(state=ones(4, 3)), ValueError, ["state must have shape", "(4, 3)"]),
    (wrong(state=ones(4, 3), state_batch_indices=np.arange(2)), ValueError, ["state must have shape", "(4, 3)"]),
    (wrong(state=ones(9, 3, 4), state_batch_indices=np.arange(2)), ValueError,
     ["state must have shape (slots, channels, state) = (9, 4, 3)", "(9, 3, 4)"]),
    (wrong(dt=ones(2, 1)), ValueError, ["dt must have shape x's (batch, channels) = (2, 4)", "(2, 1)"]),
    (wrong(z=ones(4, 2)), ValueError, ["z must have shape x's (batch, channels) = (2, 4)", "(4, 2)"]),
    (wrong(D=ones(4, 1)), ValueError, ["D must have shape (channels,) = (4,)", "(4, 1)"]),
    (wrong(dt_bias=ones(3)), ValueError, ["dt_bias must have shape (channels,) = (4,)", "(3,)"]),
    (wrong(B=ones(4, 3)), ValueError, ["B must have shape (batch, state) = (2, 3)", "(4, 3)"]),
    (wrong(B=ones(3)), ValueError, ["B must have shape (batch, state) or (batch, groups, state)", "(3,)"]),
    (wrong(C=ones(2, 2, 4)), ValueError, ["C must have shape (batch, groups, state) = (2, 2, 3)", "(2, 2, 4)"]),
    (wrong(C=ones(2, 3, 3)), ValueError, ["C has 3 groups", "divide the 4 channels"]),
    (wrong(C=ones(2, 0, 3)), ValueError, ["C has 0 groups"]),
    (wrong(C=ones(2, 2, 3)), ValueError, ["B and C must have the same number of groups", "1 and 2"]),
    (wrong(state_batch_indices=np.arange(3)), ValueError,
     ["state_batch_indices must have shape (batch,) = (2,)", "(3,)"]),
    (wrong(state_batch_indices=np.array([1, 1])), ValueError, ["each slot once", "slot 1 2 times"]),
    (wrong(dt_limit=(2, 1)), ValueError, ["dt_limit must be (lowest, highest)", "(2, 1)"]),
    (wrong(dt_limit=(np.nan, 1)), ValueError, ["dt_limit must be (lowest, highest)"]),
    (wrong(out=ones(4, 2)), ValueError, ["out must have the result's shape (2, 4)", "(4, 2)"]),
    (wrong(out=read_only(ones(2, 4))), ValueError, ["out must be writable"]),
    (wrong(out=np.lib.stride_tricks.as_strided(ones(4), (2, 4), (0, 4))), ValueError,
     ["out must have a place for each item"]),
    (wrong(state=np.lib.stride_tricks.as_strided(ones(12), (2, 4, 3), (0, 12, 4))), ValueError,
     ["state must have a place for each item"]),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "error", "words"), WRONG)
def test_what_is_wrong_is_named_and_nothing_written(arguments, error, words):
    before = {name: x.copy() for name, x in arguments.items() if isinstance(x, np.ndarray)}
    for _ in range(2):  # what was refused once is not taken for ready
        with pytest.raises(error) as caught:
            cuscan.selective_state_update(**arguments)
        for word in words:
            assert word in str(caught.value)
    for name, x in before.items():
        np.testing.assert_array_equal(arguments[name], x)


def test_the_right_call_is_right():
    cuscan.selective_state_update(**wrong())
    cuscan.selective_state_update(**wrong(state=ones(9, 4, 3), state_batch_indices=np.arange(2)))


@pytest.mark.parametrize("name", ["x", "dt", "A", "B", "C", "D", "z", "dt_bias", "state_batch_indices", "out"])
def test_nothing_overlaps_the_state_or_out(name):
    shapes = {"A": (4, 3), "B": (2, 3), "C": (2, 3), "D": (4,), "dt_bias": (4,), "state_batch_indices": (2,)}
    shape = shapes.get(name, (2, 4))
    memory = ones(200)
    inside = memory[23 : 23 + np.prod(shape)].reshape(shape)  # the state's last item
    if name == "state_batch_indices":
        inside = inside.view(np.int32)
        inside[...] = 0, 1
    kept = memory.copy()
    state = memory[:24].reshape(2, 4, 3)
    with pytest.raises(ValueError, match=rf"(state overlaps {name}|{name} overlaps state) in memory"):
        cuscan.selective_state_update(**wrong(state=state, **{name: inside}))
    if name != "out":
        with pytest.raises(ValueError, match=f"out overlaps {name} in memory"):
            cuscan.selective_state_update(**wrong(**{name: inside}, out=memory[17:25].reshape(2, 4)))
    np.testing.assert_array_equal(memory, kept)
    # What is side by side, or interleaved, does not overlap.
    beside = memory[24 : 24 + np.prod(shape)].reshape(shape)
    apart = np.lib.stride_tricks.as_strided(memory, (2, 4, 3), (96, 24, 8))
    between = memory[1 : 1 + 2 * int(np.prod(shape)) : 2].reshape(shape)
    assert np.lib.array_utils.byte_bounds(between)[0] < np.lib.array_utils.byte_bounds(apart)[1]
    for target, x in ((state, beside), (apart, between)):
        if name == "state_batch_indices":
            x = x.view(np.int32)
            x[...] = 0, 1
        cuscan.selective_state_update(**wrong(state=target, **{name: x}))


def test_a_call_that_is_ready_still_looks_at_addresses():
    memory = ones(64)
    state, apart, on_it = memory[:24].reshape(2, 4, 3), memory[32:40].reshape(2, 4), memory[16:24].reshape(2, 4)
    cuscan.selective_state_update(**wrong(state=state, x=apart))
    with pytest.raises(ValueError, match="state overlaps x"):
        cuscan.selective_state_update(**wrong(state=state, x=on_it))


# whose arrays


class Exporter:
    """Has __dlpack__ and nothing else of an array."""

    def __init__(self, x):
        self._x = x

    def __dlpack__(self, **options):
        return self._x.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._x.__dlpack_device__()


def test_other_producers_are_taken_and_written_to():
    one = case(3, 4, 5, item=F32, options=("D",))
    y, after = one.run(lambda function, *args, **kwargs: function(*args, **kwargs))
    state, out = one.state.copy(), np.zeros((3, 4), F32)
    result = cuscan.selective_state_update(
        Exporter(state), *map(Exporter, one.inputs), D=Exporter(one.given["D"]), out=(exporter := Exporter(out))
    )
    assert result is exporter
    np.testing.assert_array_equal(out, y)
    np.testing.assert_array_equal(state, after)


def test_subclasses_of_numpys_arrays(tmp_path):
    one = case(3, 4, 5, item=F32, options=())
    y, after = one.run(lambda function, *args, **kwargs: function(*args, **kwargs))
    state = np.memmap(tmp_path / "state", F32, "w+", shape=one.state.shape)
    state[...] = one.state
    np.testing.assert_array_equal(cuscan.selective_state_update(state, *one.inputs), y)
    np.testing.assert_array_equal(state, after)


class CudaArray:
    """An array of another library, read-only."""

    __cuda_array_interface__ = types.MappingProxyType(
        {"shape": (2, 4, 3), "typestr": "<f4", "data": (4096, True), "version": 3, "strides": None}
    )


def test_a_read_only_array_of_a_gpu_is_refused(monkeypatch):
    # CuPy forgets the flag: its asarray gives an array like any other.
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(asarray=lambda _: ones(2, 4, 3), ndarray=OfJax))
    monkeypatch.setattr(_calls, "Call", lambda **arguments: types.SimpleNamespace(
        array=lambda name: ones(2, 4, 3) if name == "state" else arguments[name]))  # fmt: skip
    with pytest.raises(TypeError, match=r"state .* must be writable.* interop\.jax\.selective_state_update"):
        cuscan.selective_state_update(**wrong(state=CudaArray()))


# what is ready


@pytest.fixture
def prepared(monkeypatch):
    """Every signature that was made ready, with an empty cache at the start."""
    made = []
    make = state_update._make_ready

    def counted(given, options):
        ready = make(given, options)
        made.append(ready)
        return ready

    monkeypatch.setattr(state_update, "_READY", _calls.Cache())
    monkeypatch.setattr(state_update, "_make_ready", counted)
    return made


def test_a_signature_is_made_ready_once(executor, prepared):
    one = case(3, 4, 16)
    for _ in range(3):
        one.check(executor)
    # Copies lie at other addresses; those of CuPy, and of NumPy mostly, at the same place within 16 bytes.
    assert len(prepared) <= 2
    known = len(prepared)
    one.check(executor, out_dtype=F32)
    assert len(prepared) > known


def aligned(x, by=0):
    """A copy at an address that is `by` modulo 16."""
    memory = np.zeros(x.nbytes + 32, np.uint8)
    start = (by - memory.ctypes.data) % 16
    view = np.ndarray(x.shape, x.dtype, memory, start)
    view[...] = x
    return view


def test_whatever_the_plan_depends_on_makes_another_signature(host_executor, prepared):
    one = Case(4, 8, 16, item=F32)
    arrays = {name: aligned(x) if isinstance(x, np.ndarray) else x for name, x in changed(one, None, ()).items()}
    expected = None

    def run(different, **changes):
        nonlocal expected
        known = len(prepared)
        given = {**arrays, **changes}
        if "state" not in changes:
            given["state"] = aligned(arrays["state"])
        y, after = host_executor(step, given.pop("state"), **given)
        assert len(prepared) == known + different, changes
        return y, after

    y, after = run(1)
    run(0)
    for name, x in arrays.items():
        if not isinstance(x, np.ndarray):
            continue
        for change in (aligned(x, 4), aligned(x, 8), np.asfortranarray(x)):
            if change.strides == x.strides and change.ctypes.data % 16 == 0:
                continue
            y_changed, after_changed = run(1, **{name: change})
            np.testing.assert_array_equal(bits(y_changed), bits(y))
            np.testing.assert_array_equal(bits(after_changed), bits(after))
    for change in (
        {"dt_softplus": False}, {"dt_limit": None}, {"dt_limit": (0.0, 1.5)}, {"dt_limit": (-0.0, 1.5)}, {"D": None},
        {"z": None}, {"dt_bias": None}, {"out_dtype": F32}, {"out_dtype": F64}, {"out": aligned(np.zeros((4, 8), F32))},
        {"state": aligned(arrays["state"].astype(BF16))}, {"D": aligned(one.given["D"].astype(BF16))},
        {"state_batch_indices": aligned(one.given["state_batch_indices"].astype(np.int64))},
    ):  # fmt: skip
        run(1, **change)
        run(0, **change)
    with forced(grid=(1, 1)):
        run(1)
    run(0)


def test_a_flag_that_equals_true_is_refused_after_it():
    given = wrong()
    cuscan.selective_state_update(**given, dt_softplus=True)
    with pytest.raises(TypeError, match="dt_softplus must be True or False"):
        cuscan.selective_state_update(**given, dt_softplus=1)


def test_a_state_that_becomes_read_only_is_refused():
    given = wrong()
    cuscan.selective_state_update(**given)
    read_only(given["state"])
    with pytest.raises(TypeError, match="writable"):
        cuscan.selective_state_update(**given)


def test_the_cache_is_bounded_and_keeps_no_arrays(monkeypatch):
    cache = _calls.Cache(5)
    monkeypatch.setattr(state_update, "_READY", cache)

    watched = []
    for batch in range(1, 12):
        given = wrong(state=ones(batch, 4, 3), x=ones(batch, 4), dt=ones(batch, 4), B=ones(batch, 3), C=ones(batch, 3))
        y = cuscan.selective_state_update(**given)
        watched += map(weakref.ref, (y, *given.values()))
        assert len(cache._ready) == min(batch, 5)
    del given, y
    gc.collect()
    assert [ref() for ref in watched] == [None] * len(watched)


def test_many_threads_at_once(monkeypatch):
    cache = _calls.Cache(8)
    monkeypatch.setattr(state_update, "_READY", cache)
    cases = [Case(batch, 4, 3, item=F32, options=("D",)) for batch in range(1, 25)]
    expected = [cuscan.selective_state_update(one.state.copy(), *one.inputs, **one.given) for one in cases]
    failures = []

    def work(seed):
        for i in rng(seed).permutation(np.repeat(np.arange(24), 6)):
            one = cases[i]
            try:
                y = cuscan.selective_state_update(one.state.copy(), *one.inputs, **one.given)
                np.testing.assert_array_equal(y, expected[i])
            except BaseException as error:
                failures.append(error)
                raise

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(cache._ready) <= 8


# launches


class RecordingPlace:
    """A place and its provider of modules: what is launched, with nothing run."""

    limits = DeviceLimits(90, 132, 227 * 1024)

    def __init__(self):
        self.modules, self.launches, self.allocated = self, [], []

    def get_function(self, source, name):
        assert name in source.names
        return lambda grid, block, arguments, **_: self.launches.append((name, grid, block, arguments[0].tobytes()))

    def allocate(self, shape, dtype):
        self.allocated.append((shape, np.dtype(dtype)))
        return np.broadcast_to(np.zeros((), dtype), shape)

    def keep(self, *arrays):
        pass

    def update(self, *arrays):
        pass

    def pointer(self, array):
        return array.ctypes.data


@pytest.fixture
def place(monkeypatch):
    # The memory of arrays that are not there overlaps.
    monkeypatch.setattr(_calls, "_overlap", lambda *_: False)
    place = RecordingPlace()
    token = _arrays.host_place.set(lambda: place)
    yield place
    _arrays.host_place.reset(token)


def huge(shape, dtype=F32, steps=None):
    """An array of any size, of one item, with the strides of a contiguous one or others."""
    one = aligned(np.ones(2, dtype))
    steps = steps or [int(np.prod(shape[d + 1 :], dtype=np.int64)) for d in range(len(shape))]
    return np.lib.stride_tricks.as_strided(one, shape, [step * one.itemsize for step in steps])


def decode(place, batch, channels, states, item=BF16, state_item=F32, **changes):
    """Launch once; gives the kernel's short name, grid, block and packed argument."""
    arrays = {
        "state": huge((batch, channels, states), state_item), "x": huge((batch, channels), item),
        "dt": huge((batch, channels), item), "A": huge((channels, states)), "B": huge((batch, states), item),
        "C": huge((batch, states), item), **changes,
    }  # fmt: skip
    for name, x in arrays.items():
        if name != "state" and isinstance(x, np.ndarray):
            x.flags.writeable = False
    place.launches.clear()
    cuscan.selective_state_update(**arrays)
    (launch,) = place.launches
    return launch[0].removeprefix("selective_state_update_"), *launch[1:]


def test_one_launch_whose_struct_begins_with_the_addresses(place):
    one = case(3, 4, 16)
    state, out = one.state.copy(), np.zeros((3, 4), F32)
    cuscan.selective_state_update(state, *one.inputs, **one.given, out=out)
    ((name, _, block, packed),) = place.launches
    assert name == "selective_state_update_vector_bfloat16_float32"
    assert block == (128,)
    assert place.allocated == []
    assert len(packed) == struct.calcsize(_source.UPDATE_ARGS)
    given = one.given
    arrays = (state, *one.inputs, given["D"], given["z"], given["dt_bias"], given["state_batch_indices"], out)
    fields = struct.unpack(_source.UPDATE_ARGS, packed)
    assert fields[:11] == tuple(x.ctypes.data for x in arrays)
    assert fields[11:14] == state.strides
    assert fields[33:38] == (3, 4, 16, 4, 6)
    place.launches.clear()
    cuscan.selective_state_update(state[:3], *one.inputs)
    assert place.allocated == [((3, 4), np.dtype(BF16))]
    assert struct.unpack(_source.UPDATE_ARGS, place.launches[0][-1])[6:10] == (0, 0, 0, 0)


def test_empty_results_launch_nothing(place):
    for sizes in ((0, 5, 4), (5, 0, 4), (0, 0, 0)):
        case_ = case(*sizes)
        cuscan.selective_state_update(case_.state.copy(), *case_.inputs, **case_.given)
    assert place.launches == []


def test_vectors_where_everything_lies_as_they_need(place):
    vector = {
        "as it comes": {},
        "dt wide, parameters of either type": {"dt": huge((4, 8)), "D": huge((8,)), "dt_bias": huge((8,), BF16)},
        "groups": {"B": huge((4, 2, 16), BF16), "C": huge((4, 2, 16), BF16)},
        "slots of any size": {"state": huge((4, 8, 16), steps=(2**40, 16, 1))},
        "slots backwards": {"state": huge((4, 8, 16), steps=(-128, 16, 1))},
    }
    single = {
        "a wide B": {"B": huge((4, 16))},
        "a small A": {"A": huge((8, 16), BF16)},
        "a float16 D beside bfloat16": {"D": huge((8,), F16)},
        "the state at 8 bytes": {"state": aligned(np.ones((4, 8, 16), F32), 8)},
        "rows of the state at 8 bytes": {"state": huge((4, 8, 16), steps=(160, 18, 1))},
        "states of the state apart": {"state": huge((4, 8, 16), steps=(512, 32, 2))},
        "rows of B at 2 bytes": {"B": huge((4, 16), BF16, steps=(17, 1))},
        "rows of A at 4 bytes": {"A": huge((8, 16), steps=(17, 1))},
        "x backwards": {"x": huge((4, 8), BF16, steps=(-8, 1))},
        "more than 31 bits of x": {"x": huge((4, 8), BF16, steps=(2**29, 1))},
        "more than 31 bits of a slot": {"state": huge((4, 8, 16), steps=(2**34, 2**28, 1))},
    }
    for kernel, calls in (("vector", vector), ("single", single)):
        names = {why: decode(place, 4, 8, 16, **changes)[0] for why, changes in calls.items()}
        assert names == dict.fromkeys(calls, f"{kernel}_bfloat16_float32")
    names = [decode(place, 4, 8, states)[0] for states in (1, 3, 17, 0)]
    assert names == ["single_bfloat16_float32"] * 4


def test_vectors_of_other_types(place):
    couples = {name: huge((4, 2), C64) for name in "BC"} | {"A": huge((8, 2), C64)}
    names = [
        decode(place, 4, 8, 16, F32, F16)[0],
        decode(place, 4, 8, 2, F64, F64, A=huge((8, 2), F64))[0],
        decode(place, 4, 8, 2, F64, F64)[0],
        decode(place, 4, 8, 2, F32, C64, **couples)[0],
    ]
    assert names == [
        "vector_float32_float16", "vector_float64_float64", "single_float64_float64", "vector_float32_complex64"
    ]  # fmt: skip


@pytest.mark.parametrize("batch", [1, 4, 5, 256, 10**6, 2**33])
@pytest.mark.parametrize("channels", [1, 3, 32, 33, 5120, 2**40])
@pytest.mark.parametrize("states", [1, 16, 64, 128, 300])
def test_grids_are_as_small_as_cover_all(batch, channels, states):
    plan = plan_update(UpdateProblem(UpdateKind("bfloat16", "float32", vector=True), batch, channels, states))
    team, columns = plan.order.team, plan.fit.columns
    assert team in (4, 8, 16, 32)
    assert team == 32 or team * 4 >= states
    assert team == 4 or team * 2 < states
    rows = 4 * 128 // team // columns
    assert columns * rows * team == 4 * 128
    for size, step_, grid, most in zip(
        (channels, batch), (columns, rows), plan.fit.grid, (2**31 - 1, 65535), strict=True
    ):
        assert grid == most or (grid - 1) * step_ < size <= grid * step_
    assert columns <= 2 * channels
    assert str(team) in plan.reason


def test_a_decode_of_a_mamba_layer_fills_the_chip(place):
    name, grid, block, _ = decode(place, 256, 5120, 16)
    assert (name, grid, block) == ("vector_bfloat16_float32", (160, 64), (128,))
    assert decode(place, 1, 5120, 16)[1] == (160, 1)


def test_larger_than_31_bits_is_launched_with_64(place):
    name, grid, _, packed = decode(place, 2**20, 2**12, 16)
    assert name == "single_bfloat16_float32"  # x alone has 2^33 bytes
    fields = struct.unpack(_source.UPDATE_ARGS, packed)
    assert fields[11] == 2**12 * 16 * 4
    assert fields[33:35] == (2**20, 2**12)
    assert grid == (2**12 // 32, 65535)


def test_kinds_are_all_and_each_once():
    kinds = update_kinds()
    assert len(set(kinds)) == len(kinds) == 2 * (3 * 4 + 1)
    for kind in kinds:
        assert kind.piece * np.dtype(kind.computed).itemsize == 16


def check_all(modules):
    """What runs every line of the kernels, for coverage and for mutants."""
    executor = HostExecutor(modules, every_type=True)
    for item, state_item in ((BF16, F32), (BF16, BF16), (F32, C64), (F64, F64)):
        for state, groups, wide in itertools.product((16, 5, 257), (None, 2), ((), ("dt", "B", "small"))):
            wide = wide if item is BF16 else ()
            Case(6, 8, state, item=item, state_item=state_item, groups=groups, wide=wide).check(executor)
    for options in (OPTIONS, ()):  # a lane of a team without states
        Case(6, 8, 12, options=options).check(executor)
