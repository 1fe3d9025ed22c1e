"""mask, reset and cu_seqlens of both functions, against the oracle and by what they promise.

Each test takes both functions by way of `Call`: what is given beside mask, reset and cu_seqlens. Rows are the first
axis of every result, mask and reset are (rows, length), and results are looked at as (rows, length, ...).
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial

import ml_dtypes
import numpy as np
import pytest
import test_linear
import test_selective

import cuscan
from cuscan import _arrays, _source
from cuscan._plan import Lanes, Schedule, forced, is_usual, selective_kinds
from cuscan.testing import _bounds, oracle

F32, BF16 = np.float32, ml_dtypes.bfloat16
full_on_host = pytest.mark.full_on_host
DIRECTIONS = pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
PER_STEP = ("u", "delta", "B", "C", "z")


@dataclass(frozen=True)
class Call:
    """The arguments of one call; `time` is the axis of time in each of the inputs that have one."""

    function: Callable
    inputs: dict
    time: dict
    options: dict
    out_dtype: type  # the accumulation type, so that exact results stay exact
    plans: Callable  # of the executor and the steps of a chunk

    @property
    def is_linear(self):
        return self.function is cuscan.linear_scan

    @property
    def sizes(self):
        name = "b" if self.is_linear else "u"
        shape = self.inputs[name].shape
        return shape[0], shape[self.time[name]]

    def h0(self, sequences=None, seed=0):
        """Integers, one state for each sequence where rows are packed."""
        lead = () if sequences is None else (sequences,)
        state = self.sizes[:1] if self.is_linear or sequences is None else ()
        if not self.is_linear:
            state += self.inputs["A"].shape
        dtype = np.result_type(self.inputs["b" if self.is_linear else "A"].dtype, self.out_dtype)
        return np.random.default_rng(seed).integers(-8, 9, (*lead, *state)).astype(dtype)

    def run(self, executor, plan=None, h0=None, **more):
        with forced(**(plan or {})):
            h, last = executor(
                self.function, **self.inputs, h0=h0, return_last_state=True,
                **{"out_dtype": self.out_dtype, **self.options, **more},
            )  # fmt: skip
        return self.by_time(h), last

    def by_time(self, h):
        return np.moveaxis(h, self.time["b" if self.is_linear else "u"], 1)

    def expected(self, h0=None, **segments):
        eps = 2.0**-53 if self.out_dtype in (np.float64, np.complex128) else 2.0**-24
        loop = oracle.linear_scan if self.is_linear else oracle.selective_scan
        scan = loop(**self.inputs, h0=h0, eps=eps, **self.options, **segments)
        return scan._replace(value=self.by_time(scan.value), bound=self.by_time(scan.bound))

    def part(self, steps):
        """The same call on some of the steps."""
        cut = {name: np.take(self.inputs[name], steps, axis) for name, axis in self.time.items()}
        return replace(self, inputs=self.inputs | cut)

    def holding(self, value, where, names=None):
        """The same call with `value` in inputs that go along time, where `where` (rows, length) says."""
        changed = {}
        for name in self.time if names is None else names:
            x = self.inputs[name].copy()
            np.moveaxis(x, self.time[name], 1)[where] = value
            changed[name] = x
        return replace(self, inputs=self.inputs | changed)

    def check(self, executor, every_plan, h0=None, **segments):
        """The oracle's values by each plan, exactly."""
        expected = self.expected(h0, **segments)
        for plan in every_plan:
            h, last = self.run(executor, plan, h0, **segments)
            np.testing.assert_array_equal(h, expected.value, err_msg=f"{plan} {segments}")
            np.testing.assert_array_equal(last, expected.last, err_msg=f"last state, {plan} {segments}")
            assert last.shape == expected.last.shape


def linear(rows, length, dtype=F32, *, real=False, seed=0):
    shape, dtype = (rows, length), np.dtype(dtype)
    a, b = (test_linear.real_inputs if real else test_linear.exact_inputs)(shape, np.float64, seed)
    if dtype.kind == "c":
        r = np.random.default_rng(seed)
        a, b = (x * np.array([1, 1j, -1, -1j])[r.integers(0, 4, shape)] for x in (a, b))
    return Call(
        cuscan.linear_scan, {"a": a.astype(dtype), "b": b.astype(dtype)}, {"a": 1, "b": 1}, {"axis": 1},
        test_linear.accumulation(dtype).type, test_linear.plans,
    )  # fmt: skip


def selective(rows, length, state=1, *, channels=3, layout="bld", real=False, **choices):
    names = ("D", "z", "delta_bias", "delta_softplus", "delta_limit") if real else ("D",)
    case = test_selective.Case(
        rows, length, channels, state, layout=layout, options=names, exact=not real, **choices
    )  # fmt: skip
    inputs = dict(zip(("u", "delta", "A", "B", "C"), case.inputs, strict=True))
    options = {"layout": layout}
    for name, x in case.given.items():
        (inputs if isinstance(x, np.ndarray) else options)[name] = x
    if case.complex and not real:
        inputs["A"] = inputs["A"].real.astype(inputs["A"].dtype)
    constant = choices.get("constant", ())
    time = {name: 1 if layout == "bld" else -1 for name in PER_STEP if name in inputs and name not in constant}
    return Call(
        cuscan.selective_scan, inputs, time, options, np.float64 if case.item is np.float64 else F32,
        lambda executor, chunk=32: test_selective.plans(executor, case, chunk),
    )  # fmt: skip


def calls(quick, full=()):
    """What a test runs with, `full` in the full tier only."""
    params = [pytest.param(make, id=name) for name, make in quick.items()]
    params += [pytest.param(make, id=name, marks=pytest.mark.full) for name, make in dict(full).items()]
    return pytest.mark.parametrize("make", params)


LINEAR = {"linear float32": linear, "linear bfloat16": partial(linear, dtype=BF16)}
LINEAR_TYPES = {
    f"linear {np.dtype(dtype)}": partial(linear, dtype=dtype)
    for dtype in (np.float16, np.float64, np.complex64, np.complex128)
}
# A thread with one state is the cheapest to run on the CPU.
ONE = {"selective bld": selective, "selective bdl": partial(selective, layout="bdl")}
MORE = {
    "selective 4 states bld": partial(selective, state=4, channels=5),
    "selective 4 states bdl": partial(selective, state=4, channels=5, layout="bdl"),
}
SLICES = {
    f"selective {state} states {layout}": partial(selective, state=state, layout=layout)
    for state in (9, 20, 192, 256)  # two slices of 8 single states, of 16 in fours, more of 64 and of 128
    for layout in ("bld", "bdl")
}
SELECTIVE_TYPES = {
    **{
        f"selective {np.dtype(item)} {layout}": partial(selective, item=item, layout=layout)
        for item in (np.float16, F32, np.float64)
        for layout in ("bld", "bdl")
    },
    **{
        f"selective complex {'constant ' * bool(constant)}{''.join(constant)}": partial(
            selective, rates=np.complex64, constant=constant, state=state
        )
        for constant, state in (((), 4), (("B",), 1), (("C",), 5), (("B", "C"), 4))
    },
    **{
        f"selective constant {''.join(constant)} {layout}": partial(selective, constant=constant, layout=layout)
        for constant in (("B",), ("C",), ("B", "C"))
        for layout in ("bld", "bdl")
    },
    "selective in groups bld": partial(selective, state=4, channels=6, groups=2),
    "selective in groups bdl": partial(selective, state=4, channels=6, groups=3, layout="bdl"),
}
BOTH = calls(
    {"linear": linear, "selective bld": selective},
    {"linear bfloat16": LINEAR["linear bfloat16"], "selective bdl": ONE["selective bdl"], **MORE},
)

# mask, reset and cu_seqlens of `rows` rows and `length` steps, at least 21; r is a generator.
MARKS = {
    "padding left": lambda r, rows, length: {"mask": np.arange(length) >= r.integers(1, length, (rows, 1))},
    "padding right": lambda r, rows, length: {"mask": np.arange(length) < r.integers(1, length, (rows, 1))},
    "scattered": lambda r, rows, length: {"mask": r.random((rows, length)) < 0.6},
    "nothing counts": lambda rows, length, **_: {"mask": np.zeros((rows, length), bool)},
    "resets": lambda r, rows, length: {"reset": r.random((rows, length)) < 0.1},
    "always reset": lambda rows, length, **_: {"reset": np.ones((rows, length), bool)},
    "mask and reset": lambda r, rows, length: {
        "mask": r.random((rows, length)) < 0.6,
        "reset": r.random((rows, length)) < 0.15,
    },
    "packed": lambda length, **_: {"cu_seqlens": np.array([0, 0, 5, 5, 9, length])},
    "packed, ends uncovered": lambda length, **_: {"cu_seqlens": np.array([3, 20, 20, length - 1])},
    "packed single steps": lambda length, **_: {"cu_seqlens": np.arange(length + 1)},
    "packed, no sequence": lambda **_: {"cu_seqlens": np.array([7])},
    "packed, all empty": lambda **_: {"cu_seqlens": np.array([4, 4, 4])},
    "packed, mask and reset": lambda r, rows, length: {
        "mask": r.random((rows, length)) < 0.7,
        "reset": r.random((rows, length)) < 0.1,
        "cu_seqlens": np.sort(r.integers(0, length + 1, 7)),
    },
}


def marked(make, marks, rows, length, seed=0, **more):
    """A call and its marks; where they pack sequences, selective_scan has one row."""
    call = make(rows, length, seed=seed, **more)
    if marks.startswith("packed") and not call.is_linear:
        rows, call = 1, make(1, length, seed=seed, **more)
    return call, MARKS[marks](r=np.random.default_rng(seed), rows=rows, length=length)


def initial(call, segments):
    offsets = segments.get("cu_seqlens")
    return call.h0(None if offsets is None else len(offsets) - 1)


def as_offsets(values, how):
    """int32, int64, or int64 with other numbers in between, backwards in memory."""
    if how == "strided":
        apart = np.full(3 * len(values), -99)
        apart[::3] = values[::-1]
        return apart[::3][::-1]
    return np.asarray(values, how)


def bits(results):
    return [np.ascontiguousarray(x).view(np.uint8) for x in results]


def assert_same_bits(results, others, message=""):
    for x, y in zip(bits(results), bits(others), strict=True):
        np.testing.assert_array_equal(x, y, err_msg=str(message))


def unread(segments, rows, length):
    """Steps (rows, length) whose inputs are not looked at."""
    nothing = ~segments["mask"] if "mask" in segments else np.zeros((rows, length), bool)
    if (offsets := segments.get("cu_seqlens")) is not None:
        nothing = nothing | (np.arange(length) < offsets[0]) | (np.arange(length) >= offsets[-1])
    return nothing


def without_gate(segments, length, *, starts, reverse):
    """Steps (rows, length) that nothing enters: resets and, with `starts`, the first one of each sequence."""
    steps, offsets = segments["reset"].copy(), segments.get("cu_seqlens", np.array([0, length]))
    if starts:
        steps[:, [end - 1 if reverse else begin for begin, end in itertools.pairwise(offsets) if begin < end]] = True
    return steps


# values


@DIRECTIONS
@pytest.mark.parametrize("marks", MARKS)
@calls(LINEAR | MORE, LINEAR_TYPES | ONE)
def test_exact_inputs_give_the_same_bits_by_every_plan(executor, make, marks, reverse):
    call, segments = marked(make, marks, 2, 45)
    turn = (list(MARKS).index(marks) + reverse) % 2  # the quick tier has half of these on the CPU executor
    for with_h0 in (False, True) if executor.every_type else (turn == 1,):
        h0 = initial(call, segments) if with_h0 else None
        if "cu_seqlens" in segments:
            how = ("int32", "strided", "int64")[turn + with_h0]
            segments["cu_seqlens"] = as_offsets(segments["cu_seqlens"], how)
        call.check(executor, call.plans(executor), h0, reverse=reverse, **segments)


@DIRECTIONS
@pytest.mark.parametrize("marks", MARKS)
@calls(LINEAR, LINEAR_TYPES)
def test_warps_over_many_rows(executor, make, marks, reverse):
    call, segments = marked(make, marks, 35, 67)
    every_plan = [plan for plan in call.plans(executor) if plan.get("lanes") is not Lanes.TIME]
    call.check(executor, every_plan, initial(call, segments), reverse=reverse, **segments)


@DIRECTIONS
@calls(
    {"16 states bld": partial(selective, state=16, channels=64)},
    {
        "16 states bdl": partial(selective, state=16, channels=64, layout="bdl"),
        "64 states bld": partial(selective, state=64, channels=32),
        "64 states bdl": partial(selective, state=64, channels=32, layout="bdl"),
        "128 states bld": partial(selective, state=128, channels=16),
        "128 states bdl": partial(selective, state=128, channels=16, layout="bdl"),
    },
)
def test_whole_tiles_of_channels_and_states(executor, make, reverse):
    # Tiles with another whole one on both sides are worked on by code of their own. Channels do not see each other.
    # 128 states have runs of 32 steps with "bdl", and so no ragged end.
    length = 224 if make.keywords["state"] == 128 else 208
    call, segments = marked(make, "packed, mask and reset", 1, length)
    segments["mask"] |= np.arange(length) > 100  # tiles without marks too
    segments["reset"] &= segments["mask"] & (np.arange(length) < 130)
    h0, some = initial(call, segments), [0, 1, -2, -1]
    axis = 2 if call.options["layout"] == "bld" else 1
    few = {name: np.take(call.inputs[name], some, axis) for name in ("u", "delta")}
    few |= {name: call.inputs[name][some] for name in ("A", "D")}
    expected = replace(call, inputs=call.inputs | few).expected(h0[:, some], reverse=reverse, **segments)
    for plan, dtype in itertools.product(call.plans(executor, chunk=96), (BF16, F32)):  # u's, for the short cuts
        h, last = call.run(executor, plan, h0, reverse=reverse, **segments, out_dtype=dtype)
        np.testing.assert_array_equal(h[..., some], expected.value.astype(dtype), err_msg=f"{plan}")
        np.testing.assert_array_equal(last[:, some], expected.last, err_msg=f"{plan}")


@DIRECTIONS
@pytest.mark.parametrize("marks", ["mask and reset", "packed, mask and reset"])
@calls(LINEAR | ONE, LINEAR_TYPES | MORE | SLICES | SELECTIVE_TYPES)
def test_real_inputs_are_within_the_bound(executor, make, marks, reverse):
    call, segments = marked(make, marks, 2, 60, real=True)
    for h0 in (None, initial(call, segments)):
        expected = call.expected(h0, reverse=reverse, **segments)
        for plan in call.plans(executor):
            h, last = call.run(executor, plan, h0, reverse=reverse, **segments)
            oracle.assert_scan_close(h, expected.value, expected.bound)
            oracle.assert_scan_close(last, expected.last, expected.last_bound)


def _kernels():
    """A call for each module with segments, and the module."""
    for name, make in (LINEAR | LINEAR_TYPES).items():
        source = _source.linear_source(name.removeprefix("linear "), segmented=True)
        yield pytest.param(make, source, id=name, marks=[full_on_host] * (name in LINEAR_TYPES))
    for kind in selective_kinds():
        if not kind.segmented:
            continue
        make = partial(
            selective,
            state={1: 3, 4: 20, 8: 64, 16: 128}[kind.states],
            item=BF16 if kind.item == "bfloat16" else np.dtype(kind.item).type,
            rates=np.complex64 if kind.complex else None,
            constant=[name for name in "BC" if not getattr(kind, f"time_{name}")],
            layout="bdl" if kind.time_fast else "bld",
        )
        source = _source.selective_source(kind)
        quick = kind.item == "bfloat16" and is_usual(kind.item, kind.complex, kind.time_B and kind.time_C)
        yield pytest.param(make, source, id=source.names[0], marks=[full_on_host] * (not quick))


KERNELS = list(_kernels())


@pytest.mark.parametrize(("make", "source"), KERNELS)
def test_every_kernel_with_segments(executor, monkeypatch, make, source):
    run = set()
    if executor.name == "host":
        get = executor.modules.get_function
        monkeypatch.setattr(executor.modules, "get_function", lambda text, name: run.add(name) or get(text, name))
    call, segments = marked(make, "packed, mask and reset", 1, 33, seed=1)
    for reverse in (False, True):
        call.check(executor, call.plans(executor), initial(call, segments), reverse=reverse, **segments)
    assert run >= set(source.names) or executor.name != "host"


def test_no_kernel_with_segments_is_left_out():
    sources = _source.all_sources().items()
    modules = {source.text for name, source in sources if "segmented" in name and "backward" not in name}
    assert {parameters.values[1].text for parameters in KERNELS} == modules


# boundaries


@DIRECTIONS
@BOTH
def test_rows_may_be_cut_at_every_step(executor, make, reverse):
    # Four cuts, wherever they are in a thread's segment, a warp, a tile and a chunk; by offsets, and by reset.
    call, every_plan = make(1, 70), make(1, 70).plans(executor)
    for first in range(17):
        cuts = np.arange(first, 68, 17)
        call.check(executor, every_plan, call.h0(5), reverse=reverse, cu_seqlens=np.array([0, *cuts, 70]))
        reset = np.zeros((1, 70), bool)
        reset[:, cuts - 1 if reverse else cuts] = True
        call.check(executor, every_plan[first % 2 :: 2], call.h0(), reverse=reverse, reset=reset)


@pytest.mark.full
@DIRECTIONS
@calls(LINEAR | ONE)
def test_two_sequences_cut_at_every_step(executor, make, reverse):
    call = make(1, 70)
    for cut in range(71):
        every_plan = call.plans(executor)
        call.check(executor, every_plan, call.h0(2), reverse=reverse, cu_seqlens=np.array([0, cut, 70]))
        call.check(executor, every_plan, None, reverse=reverse, cu_seqlens=np.array([0, cut, 70]))


# 16 bytes x 32 lanes are a round of a warp, 2 or 4 of those its tile, 8 of those a block's; chunks have 700 steps.
EDGES = np.array([128, 256, 512, 700, 1024, 2048, 4096])


@cache
def long_rows(*, reverse):
    """Rows that are reset around an edge each, and rows of two sequences that meet at one."""
    around = (EDGES[:, None] + [-1, 0, 1]).ravel()
    resets, packed = linear(len(around), 4200), linear(1, 4200)
    cases = [(resets, resets.h0(), {"reset": np.arange(4200) == around[:, None] - reverse})]
    cases += [(packed, packed.h0(2), {"cu_seqlens": np.array([0, edge, 4200])}) for edge in EDGES]
    return [(*case, case[0].expected(case[1], reverse=reverse, **case[2])) for case in cases]


@DIRECTIONS
@pytest.mark.parametrize("dtype", [F32, *(pytest.param(x, marks=pytest.mark.full) for x in (BF16, np.float64))])
def test_long_rows_cut_at_the_edges_of_warps_tiles_and_chunks(executor, dtype, reverse):
    time, split = {"lanes": Lanes.TIME}, {"schedule": Schedule.SPLIT, "chunk": 700, "row_warps": 1}
    every_plan = [
        *({**time, "schedule": Schedule.BLOCK, "row_warps": warps} for warps in (1, 8)),
        {**time, **split},
        {**split, "lanes": Lanes.ROWS},
    ]
    accumulation = test_linear.accumulation(dtype)
    for call, h0, segments, expected in long_rows(reverse=reverse):
        inputs = {name: x.astype(dtype) for name, x in call.inputs.items()}
        other = replace(call, inputs=inputs, out_dtype=accumulation.type)
        for plan in every_plan if executor.kernels else [{}]:
            h, last = other.run(executor, plan, h0.astype(accumulation), reverse=reverse, **segments)
            np.testing.assert_array_equal(h, expected.value, err_msg=f"{plan}")
            np.testing.assert_array_equal(last, expected.last, err_msg=f"{plan}")


# masks


@DIRECTIONS
@pytest.mark.parametrize("marks", ["padding left", "padding right", "scattered", "nothing counts"])
@BOTH
def test_masked_steps_leave_no_trace(executor, make, marks, reverse):
    call, segments = marked(make, marks, 1, 50)
    counts = segments["mask"][0]
    poisoned, rest = call.holding(np.nan, ~segments["mask"]), call.part(np.flatnonzero(counts))
    for plan, h0 in itertools.product(call.plans(executor), (None, call.h0())):
        h, last = poisoned.run(executor, plan, h0, reverse=reverse, **segments)
        alone, last_alone = rest.run(executor, plan, h0, reverse=reverse)
        np.testing.assert_array_equal(h[:, counts], alone, err_msg=f"{plan}")
        np.testing.assert_array_equal(last, last_alone, err_msg=f"{plan}")
        states = carried(h, counts, h0, reverse=reverse) if call.is_linear else 0
        np.testing.assert_array_equal(h[:, ~counts], states, err_msg=f"{plan}")


def carried(h, counts, h0, *, reverse):
    """The state at each masked step: h at the last step before that counts."""
    state, states = np.zeros(1) if h0 is None else h0, {}
    for t in range(len(counts))[:: -1 if reverse else 1]:
        state = h[:, t] if counts[t] else state
        states[t] = state
    return np.stack([states[t] for t in np.flatnonzero(~counts)], axis=1)


@DIRECTIONS
@BOTH
def test_real_masked_steps_leave_no_trace(executor, make, reverse):
    call, segments = marked(make, "scattered", 1, 50, real=True)
    counts = segments["mask"][0]
    poisoned, rest = call.holding(np.inf, ~segments["mask"]), call.part(np.flatnonzero(counts))
    for h0 in (None, call.h0()):
        expected = rest.expected(h0, reverse=reverse)
        padded = call.expected(h0, reverse=reverse, **segments)  # a tree of more steps, with a wider bound
        for plan in call.plans(executor):
            h, last = poisoned.run(executor, plan, h0, reverse=reverse, **segments)
            oracle.assert_scan_close(h[:, counts], expected.value, padded.bound[:, counts])
            oracle.assert_scan_close(last, expected.last, padded.last_bound)


@DIRECTIONS
@pytest.mark.parametrize("marks", ["mask and reset", "packed, mask and reset"])
@BOTH
def test_what_is_not_read_changes_no_bit(executor, make, marks, reverse):
    call, segments = marked(make, marks, 2, 60, real=True)
    for h0 in (None, initial(call, segments)):
        for plan in call.plans(executor):
            results = []
            for poison in (np.nan, np.inf, 7):
                other = call.holding(poison, unread(segments, *call.sizes))
                if call.is_linear:
                    other = other.holding(poison, without_gate(segments, 60, starts=h0 is None, reverse=reverse), ["a"])
                results.append(other.run(executor, plan, h0, reverse=reverse, **segments))
                assert_same_bits(results[-1], results[0], f"{plan}, {poison}")
            assert np.isfinite(results[0][1]).all()


@pytest.mark.parametrize("reverse", [False, True])
def test_a_masked_first_step_leaves_zero_and_not_nothing(executor, reverse):
    # Where no state had entered, the next gate is read, and meets 0.
    a, b = np.array([1, np.inf, 1, 1], F32), np.array([5, 1, 1, 1], F32)
    a, b, mask = (x[::-1] if reverse else x for x in (a, b, np.array([False, True, True, True])))
    for plan in test_linear.plans(executor, chunk=2):
        h, _ = test_linear.scan(executor, a, b, plan=plan, mask=mask, reverse=reverse)
        np.testing.assert_array_equal(h[::-1] if reverse else h, [0, np.nan, np.nan, np.nan], err_msg=f"{plan}")


@DIRECTIONS
@calls(ONE, MORE)
def test_the_gate_of_a_first_step_or_a_reset_is_not_read(executor, make, reverse):
    call = make(1, 45)
    growing = {name: np.ones_like(x) for name, x in call.inputs.items()} | {"A": 100 * np.ones_like(call.inputs["A"])}
    call = replace(call, inputs=growing)  # exp(100) is inf
    for segments in ({"reset": np.ones((1, 45), bool)}, {"cu_seqlens": np.arange(46)}):
        call.check(executor, call.plans(executor), None, reverse=reverse, **segments)


def test_by_hand(executor):
    a, b = np.array([2, np.nan, np.inf, 3, np.nan], F32), np.array([1, 5, 2, 1, 7], F32)
    mask, reset = np.array([1, 0, 1, 1, 0], bool), np.array([0, 0, 1, 0, 1], bool)
    gates, ones, offsets = np.arange(2, 8, dtype=F32), np.ones(6, F32), np.array([1, 3, 3, 5])
    for plan in test_linear.plans(executor, chunk=2):
        run = partial(test_linear.scan, executor, plan=plan)
        h, last = run(a, b, F32(10), mask=mask, reset=reset)
        np.testing.assert_array_equal(h, [21, 21, 2, 7, 0])
        assert last == 0
        h, last = run(a, b, F32(10), mask=mask, reset=np.roll(reset, 1), reverse=True)
        np.testing.assert_array_equal(h, [1, np.inf, np.inf, 1, 10])
        assert last == 1
        for reverse, h0, values, states in (
            (False, np.array([10, 15, 20], F32), [0, 31, 125, 101, 607, 0], [125, 15, 607]),
            (True, np.array([10, 15, 20], F32), [0, 124, 41, 606, 121, 0], [124, 15, 606]),
            (False, 10, [0, 31, 125, 51, 307, 0], [125, 10, 307]),
            (False, None, [0, 1, 5, 1, 7, 0], [5, 0, 7]),
            (True, None, [0, 4, 1, 6, 1, 0], [4, 0, 6]),
        ):
            h, last = run(gates, ones, h0, cu_seqlens=offsets, reverse=reverse)
            np.testing.assert_array_equal(h, values)
            np.testing.assert_array_equal(last, states)


# sequences do not see each other


@DIRECTIONS
@pytest.mark.parametrize("poison", [np.nan, np.inf])
@BOTH
def test_what_is_not_finite_stays_in_its_sequence(executor, make, poison, reverse):
    call = make(1, 53, real=True)
    segments = {"cu_seqlens": np.array([2, 9, 9, 30, 41]), "reverse": reverse}
    h0, inside = call.h0(4), (np.arange(53) >= 9) & (np.arange(53) < 30)
    for plan in call.plans(executor):
        h, last = call.run(executor, plan, h0, **segments)
        for name in (*call.time, "h0"):
            entering, other = h0.copy(), call
            if name == "h0":
                entering[2] = poison
            else:
                other = call.holding(poison, inside[None], [name])
            again, last_again = other.run(executor, plan, entering, **segments)
            assert not np.isfinite(again[:, inside]).all() or name == "delta"  # which is clipped
            others = h[:, ~inside], np.delete(last, 2, 0)
            assert_same_bits((again[:, ~inside], np.delete(last_again, 2, 0)), others, f"{plan}, {name}")


@DIRECTIONS
@pytest.mark.parametrize("poison", [np.nan, np.inf])
@BOTH
def test_nothing_gets_past_a_reset(executor, make, poison, reverse):
    # A reset at another step in each row, and what must not come through in all steps before it and in h0.
    at = np.array([0, 7, 20, 52])
    call, reset = make(len(at), 53, real=True), np.arange(53) == at[:, None]
    before = (np.arange(53) > at[:, None]) if reverse else np.arange(53) < at[:, None]
    for plan in call.plans(executor):
        h, last = call.run(executor, plan, call.h0(), reset=reset, reverse=reverse)
        again, last_again = call.holding(poison, before).run(
            executor, plan, np.full_like(call.h0(), poison), reset=reset, reverse=reverse
        )
        assert not np.isfinite(again[before]).any()
        assert_same_bits((again[~before], last_again), (h[~before], last), f"{plan}")


@DIRECTIONS
@pytest.mark.parametrize("real", [False, True], ids=["exact", "real"])
@BOTH
def test_packed_equals_one_by_one(executor, make, real, reverse):
    lengths = [0, 1, 100_000 if executor.name == "cuda" else 3000, 0, 7, 1, 0]
    offsets = np.cumsum([0, *lengths])
    call = make(1, offsets[-1], real=real)
    h0 = call.h0(len(lengths))
    every_plan = [{}, {"schedule": Schedule.SPLIT, "chunk": 704}] if executor.kernels else [{}]
    expected = call.expected(h0, reverse=reverse, cu_seqlens=offsets) if real else None
    alone = [
        call.part(range(begin, end)).run(executor, None, h0[s].reshape(call.h0().shape), reverse=reverse)
        for s, (begin, end) in enumerate(itertools.pairwise(offsets))
    ]
    together = np.concatenate([h for h, _ in alone], axis=1), np.stack([last.reshape(h0[0].shape) for _, last in alone])
    for plan in every_plan:
        results = call.run(executor, plan, h0, reverse=reverse, cu_seqlens=offsets)
        if real:
            for x, y, bound in zip(results, together, expected[1::2], strict=True):
                oracle.assert_scan_close(x, y, 2 * bound)
        else:
            assert_same_bits([x + 0 for x in results], [x + 0 for x in together], f"{plan}")


# laws


@DIRECTIONS
@pytest.mark.parametrize("marks", ["mask and reset", "packed, mask and reset"])
@BOTH
def test_a_scan_may_be_cut_anywhere(executor, make, marks, reverse):
    length = 23 if make(1, 1).is_linear else 67
    call, segments = marked(make, marks, 2, length)
    h0, every_plan = initial(call, segments), call.plans(executor, chunk=5 if call.is_linear else 32)
    whole, last = call.run(executor, None, h0, reverse=reverse, **segments)
    few = 3 if executor.every_type else len(every_plan)  # of the plans at each cut
    for cut in range(length + 1) if call.is_linear else (0, 1, 15, 31, 32, 33, 40, 63, 64, 66, 67):
        steps = [range(cut), range(cut, length)]
        for plan in every_plan[cut % few :: few]:
            state, parts = h0, []
            for part in steps[::-1] if reverse else steps:
                now = {name: x[:, part] for name, x in segments.items() if name != "cu_seqlens"}
                if "cu_seqlens" in segments:  # a sequence on the other side of the cut is empty, and keeps its state
                    now["cu_seqlens"] = (segments["cu_seqlens"] - part.start).clip(0, len(part))
                h, state = call.part(part).run(executor, plan, state, reverse=reverse, **now)
                parts.append(h)
            np.testing.assert_array_equal(np.concatenate(parts[:: -1 if reverse else 1], axis=1), whole)
            np.testing.assert_array_equal(state, last)


@BOTH
def test_reverse_is_flip_scan_flip(executor, make):
    call, segments = marked(make, "packed, mask and reset", 2, 53, real=True)
    flipped = call.part(range(53)[::-1])
    turned = {name: x[:, ::-1] for name, x in segments.items() if name != "cu_seqlens"}
    turned["cu_seqlens"] = 53 - segments["cu_seqlens"][::-1]
    h0 = initial(call, segments)
    for plan in call.plans(executor):
        h, last = call.run(executor, plan, h0, **segments)
        again, last_again = flipped.run(executor, plan, h0[::-1], reverse=True, **turned)
        assert_same_bits((again[:, ::-1], last_again[::-1]), (h, last), f"{plan}")


@DIRECTIONS
@BOTH
def test_marks_that_say_nothing_change_no_bit(executor, make, reverse):
    call = make(1, 60, real=True)
    everything, never = np.ones((1, 60), bool), np.zeros((1, 60), bool)
    # With marks no row is taken in one pass, whose association is another.
    plans = [plan for plan in call.plans(executor) if not plan.get("one_pass")]
    for plan, h0 in itertools.product(plans, (None, call.h0())):
        h, last = call.run(executor, plan, h0, reverse=reverse)
        for segments in ({"mask": everything}, {"reset": never}, {"mask": everything, "reset": never}):
            assert_same_bits(call.run(executor, plan, h0, reverse=reverse, **segments), (h, last), f"{plan}")
        if h0 is None:  # with it, one sequence takes it in at its first step, and so in another association
            packed, last_packed = call.run(executor, plan, reverse=reverse, cu_seqlens=np.array([0, 60]))
            assert_same_bits((packed, last_packed.reshape(last.shape)), (h, last), f"{plan}")


@BOTH
def test_the_same_call_gives_the_same_bits(executor, make):
    call, segments = marked(make, "packed, mask and reset", 2, 60, real=True)
    other, more = marked(make, "mask and reset", 2, 33, real=True)
    for plan in call.plans(executor):
        results = call.run(executor, plan, **segments)
        other.run(executor, plan, **more)
        assert_same_bits(call.run(executor, plan, **segments), results)
        for warps in (1, 2, 4, 8) if plan and call.is_linear and executor.kernels else ():
            if warps >= plan.get("row_warps", 1):
                assert_same_bits(call.run(executor, {**plan, "warps": warps}, **segments), results, f"{plan} {warps}")


@DIRECTIONS
@pytest.mark.parametrize("kernels", ["host", "cuda"])
@calls(
    {"selective bld": selective, "selective 4 states bdl": partial(selective, state=4, channels=8, layout="bdl")},
    {
        "selective 64 states bld": partial(selective, state=64, channels=8),
        "selective 128 states bdl": partial(selective, state=128, channels=4, layout="bdl"),
    },
)
def test_a_sequence_has_the_bits_that_it_has_alone(request, kernels, make, reverse):
    # Without a split: neither its neighbours nor marks, padding and the place of its steps in a tile change a bit.
    executor = request.getfixturevalue(f"{kernels}_executor")
    call, offsets = make(1, 160, real=True), np.array([0, 7, 40, 40, 71, 160])
    counts, h0 = np.random.default_rng(0).random(160) < 0.8, call.h0(5)
    counts[90:140] = False
    every_plan = [plan for plan in call.plans(executor) if plan.get("schedule") is Schedule.SERIAL]
    short_cuts = {"out_dtype": BF16, "delta_limit": None}
    for plan, more in itertools.product(every_plan, ({}, short_cuts)):
        h, last = call.run(executor, plan, h0, reverse=reverse, cu_seqlens=offsets, mask=counts[None], **more)
        for s, (begin, end) in enumerate(itertools.pairwise(offsets)):
            steps = begin + np.flatnonzero(counts[begin:end])
            alone = call.part(steps).run(executor, plan, h0[s : s + 1], reverse=reverse, **more)
            assert_same_bits((h[:, steps], last[s : s + 1]), alone, f"{plan}, {s}")


# What is forgotten at these steps, in the direction of the scan; of 192 in chunks of 32 and of 64.
FORGETS = {
    "nowhere": [],
    "at the first step of a chunk": [64],
    "at the last step of a chunk": [127],
    "at the last step of every chunk": [31, 63, 95, 127, 159],
    "inside a chunk": [66, 70, 90],
    "in the first chunk": [0, 30],
    "at steps that cut runs of B and C alone": [36, 88, 144],
    "everywhere for a while": list(range(50, 100)),
    "at the last step of all": [100, 191],
}


@DIRECTIONS
@pytest.mark.parametrize("steps", FORGETS.values(), ids=FORGETS)
@calls(
    {
        "selective bld": partial(selective, state=2, channels=4),
        "selective 4 states bdl": partial(selective, state=4, channels=2, layout="bdl"),
    },
    {
        "selective bdl": partial(selective, state=2, channels=2, layout="bdl"),
        "selective 4 states bld": partial(selective, state=4, channels=8),
        "selective 64 states bdl": partial(selective, state=64, channels=1, layout="bdl"),
        "selective 20 states bdl": partial(selective, state=20, channels=6, layout="bdl"),
        "selective 64 states bld": partial(selective, state=64, channels=4),
        "selective 128 states bld": partial(selective, state=128, channels=4),
        "selective 128 states bdl": partial(selective, state=128, channels=1, layout="bdl"),
        "selective constant B": partial(selective, state=4, constant=("B",)),
        "selective complex": partial(selective, state=4, rates=np.complex64),
    },
)
def test_chunks_begin_where_something_is_forgotten(executor, make, steps, reverse):
    steps = np.array(steps, int)
    times = 191 - steps if reverse else steps
    reset = np.zeros((2, 192), bool)
    reset[0, times] = reset[1, 191 - times] = True
    edges = [0, *np.unique(times + reverse), 192]  # sequences that begin at these steps
    gap = [min(20, edges[1]), *edges[1:-1], max(170, edges[-2])]
    counts = np.arange(192) // 32 % 3 != 1  # tiles of padding
    counts[::7] ^= np.arange(192)[::7] > 120
    turns = itertools.count(len(steps) + reverse)
    for segments in (
        {"reset": reset},
        {"reset": reset, "mask": np.stack([counts, counts[::-1]])},
        {"cu_seqlens": np.array(edges)},
        {"cu_seqlens": np.array(gap), "mask": counts[None]},
    ):
        call = make(2 if "reset" in segments else 1, 192)
        chunks = [call.plans(executor, chunk=chunk) for chunk in (32, 64)] if executor.kernels else [[{}]]
        split = [plan for plans in chunks for plan in plans if plan.get("schedule") is not Schedule.SERIAL]
        given = {**call.inputs, **call.options, **segments, "reverse": reverse}
        for h0 in (None, initial(call, segments)):
            expected = call.expected(h0, reverse=reverse, **segments)
            states = _bounds.selective_states(**given, h0=h0, eps=2.0**-24, exact=True).value
            turn = next(turns)
            one = (turn + turn // 2) % len(split)  # of the plans, by turns where they take long
            for i, plan in [(one, split[one])] if executor.name == "host" else enumerate(split):
                dtype = (F32, BF16)[(i + turn) % 2]  # u's, for the short cuts
                with forced(**plan):
                    y, last, saved = executor(
                        cuscan.selective_scan, **given, h0=h0, out_dtype=dtype,
                        return_last_state=True, return_states=True,
                    )  # fmt: skip
                np.testing.assert_array_equal(
                    call.by_time(y), expected.value.astype(dtype), err_msg=f"{plan} {segments}"
                )
                np.testing.assert_array_equal(last, expected.last, err_msg=f"{plan} {segments}")
                np.testing.assert_array_equal(saved, states, err_msg=f"{plan} {segments}")


# shapes and strides


def flag_views(shape):
    """bool arrays that broadcast to `shape` (x, y, z), over memory of every kind."""
    r = np.random.default_rng(8)
    full = r.random(tuple(3 * size for size in shape)) < 0.6
    x, y, z = shape
    contiguous = full[:x, :y, :z].copy()
    for few in ((x, 1, 1), (1, y, 1), (1, 1, z), (x, y, 1), (1, y, z), (y, 1), (1, z), (z,), (y, z), (1,), ()):
        yield np.array(r.random(few) < 0.6)
    yield contiguous
    yield np.asfortranarray(contiguous)
    yield contiguous[::-1, ::-1, ::-1]
    yield full[::3, ::3, ::3]
    yield full[: 2 * x : 2, -y:, 2 * z - 1 :: -2]
    yield np.broadcast_to(contiguous[:, :1], shape)
    yield np.broadcast_to(contiguous[:1, :, :1], shape)[:, ::-1]
    yield np.lib.stride_tricks.as_strided(contiguous, shape, (1, 0, 2))
    frozen = contiguous.copy()
    frozen.flags.writeable = False
    yield frozen


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_flags_broadcast_and_lie_anywhere(executor, axis, reverse):
    shape = (3, 37, 5) if axis == 1 else (37, 3, 5) if axis == 0 else (3, 5, 37)
    a, b = test_linear.exact_inputs(shape)
    h0 = np.full(test_linear.without(shape, axis), 3, F32)
    every_plan = itertools.cycle(test_linear.plans(executor))
    others = list(flag_views(shape))[::-1]
    for mask, reset in zip(flag_views(shape), others, strict=True):
        for given in ({"mask": mask}, {"mask": mask, "reset": reset}):
            before, plan = [x.copy() for x in given.values()], next(every_plan)
            expected = oracle.linear_scan(a, b, h0, axis=axis, reverse=reverse, **given)
            h, last = test_linear.scan(executor, a, b, h0, plan, axis=axis, reverse=reverse, **given)
            np.testing.assert_array_equal(h, expected.value, err_msg=f"{plan}")
            np.testing.assert_array_equal(last, expected.last, err_msg=f"{plan}")
            for x, was in zip(given.values(), before, strict=True):
                np.testing.assert_array_equal(x, was)


@DIRECTIONS
@calls(ONE, MORE)
def test_flags_of_a_batch_lie_anywhere(executor, make, reverse):
    call = make(3, 45)
    full = np.random.default_rng(8).random((9, 135)) < 0.6
    flags = (
        full[:3, :45],
        np.asfortranarray(full[:3, :45]),
        full[::3, ::3],
        full[2::-1, 44::-1],
        full[:3, 90::-2][:, 1:],
    )
    flags += np.broadcast_to(full[0, :45], (3, 45)), np.broadcast_to(full[:3, :1], (3, 45))
    for mask, reset in zip(flags, flags[::-1], strict=True):
        call.check(executor, [None], call.h0(), reverse=reverse, mask=mask, reset=~reset)


@pytest.mark.parametrize("dims", [7, pytest.param(8, marks=pytest.mark.full)])
def test_row_axes_that_cannot_be_merged(executor, dims):
    shape = (2,) * dims
    a, b = test_linear.exact_inputs((*shape[::-1], 5))
    a = a.transpose(*range(dims)[::-1], dims)
    r = np.random.default_rng(1)
    mask, reset = r.random((*shape, 5)) < 0.7, np.asfortranarray(r.random((*shape, 5)) < 0.2)
    few = reset[:, :1, :, :, :1]
    for options in ({"mask": mask, "reset": reset}, {"mask": few}, {"mask": few, "cu_seqlens": np.array([0, 2, 5])}):
        states = (2, *shape) if "cu_seqlens" in options else shape
        h0 = r.integers(-8, 9, states).astype(F32)
        for reverse in (False, True):
            expected = oracle.linear_scan(a, b, h0, reverse=reverse, **options)
            for plan in test_linear.plans(executor, chunk=2)[:: 1 if executor.every_type else 3]:
                h, last = test_linear.scan(executor, a, b, h0, plan, axis=dims, reverse=reverse, **options)
                np.testing.assert_array_equal(h, expected.value)
                np.testing.assert_array_equal(last, expected.last)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_packed_sequences_along_every_axis(executor, axis):
    shape = (3, 37, 5) if axis == 1 else (37, 3, 5) if axis == 0 else (3, 5, 37)
    a, b = test_linear.exact_inputs(shape)
    h0 = np.random.default_rng(2).integers(-8, 9, (4, *test_linear.without(shape, axis)))
    h0 = np.asfortranarray(h0.astype(F32))[::-1]
    for reverse, how in ((False, "int32"), (True, "strided")):
        offsets = as_offsets([1, 15, 15, 30, 36], how)
        for state in (h0, None, 2.0):
            full = np.full(h0.shape, state, F32) if isinstance(state, float) else state
            expected = oracle.linear_scan(a, b, full, axis=axis, reverse=reverse, cu_seqlens=offsets)
            for plan in test_linear.plans(executor):
                h, last = test_linear.scan(
                    executor, a, b, state, plan, axis=axis, reverse=reverse, cu_seqlens=offsets
                )  # fmt: skip
                np.testing.assert_array_equal(h, expected.value, err_msg=f"{plan}")
                np.testing.assert_array_equal(last, expected.last, err_msg=f"{plan}")


def test_gates_that_broadcast_and_scalar_gates(executor):
    _, b = test_linear.exact_inputs((3, 60))
    r = np.random.default_rng(3)
    segments = {"mask": r.random((3, 60)) < 0.7, "reset": r.random(60) < 0.1, "cu_seqlens": np.array([1, 29, 60])}
    for gate in (-1.0, np.full((3, 1), -1, F32), r.choice([1, -1], 60).astype(F32)):
        expected = oracle.linear_scan(gate, b, axis=1, **segments)
        for plan in test_linear.plans(executor):
            h, last = test_linear.scan(executor, gate, b, plan=plan, axis=1, **segments)
            np.testing.assert_array_equal(h, expected.value)
            np.testing.assert_array_equal(last, expected.last)


@DIRECTIONS
@BOTH
def test_out_and_calls_without_the_last_state(executor, make, reverse):
    for marks in ("mask and reset", "packed, mask and reset"):
        call, segments = marked(make, marks, 2, 45)
        options = {**call.options, **segments, "reverse": reverse}
        expected, _ = call.run(executor, None, **options)
        h = executor(call.function, **call.inputs, **options, out_dtype=call.out_dtype)
        np.testing.assert_array_equal(call.by_time(h), expected)
        frame = np.full((*h.shape[:-1], 2 * h.shape[-1] + 1), 7, call.out_dtype)
        out = frame[..., 1::2]
        assert executor(call.function, **call.inputs, **options, out=out) is out
        np.testing.assert_array_equal(call.by_time(out), expected)
        np.testing.assert_array_equal(frame[..., ::2], 7)


@pytest.mark.parametrize("reverse", [False, True])
def test_out_may_be_exactly_an_input(executor, reverse):
    call, segments = marked(linear, "packed, mask and reset", 3, 60)
    expected = call.expected(initial(call, segments), reverse=reverse, **segments)
    for plan in call.plans(executor):
        for name in "ab":
            x = call.inputs[name].copy()
            other = replace(call, inputs=call.inputs | {name: x})
            h, last = other.run(executor, plan, initial(call, segments), reverse=reverse, out=x, **segments)
            assert h.base is x or h is x
            np.testing.assert_array_equal(h, expected.value)
            np.testing.assert_array_equal(last, expected.last)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("shape", [(0,), (1,), (0, 3), (3, 0), (0, 0), (1, 1), (1, 5), (5, 1)])
def test_sizes_0_and_1(executor, shape, reverse):
    a, b = test_linear.exact_inputs(shape)
    for axis in range(len(shape)):
        length, rest = shape[axis], test_linear.without(shape, axis)
        for offsets in ([0], [0, 0], [0, length], [length, length, length]):
            segments = {"mask": np.zeros(shape, bool), "reset": np.ones(shape, bool), "cu_seqlens": np.array(offsets)}
            for names, state in itertools.product((["mask", "reset"], ["cu_seqlens"], segments), (None, 2)):
                given = {name: segments[name] for name in names}
                lead = (len(offsets) - 1,) if "cu_seqlens" in names else ()
                h0 = None if state is None else np.full((*lead, *rest), state, F32)
                expected = oracle.linear_scan(a, b, h0, axis=axis, reverse=reverse, **given)
                for plan in ({}, *test_linear.plans(executor)[-1:]):
                    h, last = test_linear.scan(executor, a, b, h0, plan, axis=axis, reverse=reverse, **given)
                    np.testing.assert_array_equal(h, expected.value)
                    np.testing.assert_array_equal(last, expected.last)
                    assert last.shape == (*lead, *rest)


@pytest.mark.parametrize("layout", ["bld", "bdl"])
@pytest.mark.parametrize("sizes", [(0, 5, 3, 2), (1, 0, 3, 2), (1, 5, 0, 2), (1, 5, 3, 0), (1, 1, 1, 1), (0, 0, 0, 0)])
def test_sizes_0_and_1_of_a_selective_scan(executor, layout, sizes):
    batch, length, channels, state = sizes
    call = selective(batch, length, state, channels=channels, layout=layout)
    flags = {"mask": np.arange(length)[None] % 2 == np.ones((batch, 1)), "reset": np.ones((batch, length), bool)}
    every = [flags]
    if batch == 1:
        every += [{"cu_seqlens": np.array(x)} for x in ([0], [0, 0], [0, length], [min(length, 1), length])]
        every += [flags | {"cu_seqlens": np.array([0, length // 2, length])}]
    for segments, reverse in itertools.product(every, (False, True)):
        call.check(executor, [None], None, reverse=reverse, **segments)
        call.check(executor, [None], initial(call, segments), reverse=reverse, **segments)


# offsets that are wrong


def garbage(length):
    """Offsets of five sequences, each with something wrong."""
    r = np.random.default_rng(9)
    for kind in (np.int32, np.int64):
        low, high = np.iinfo(kind).min, np.iinfo(kind).max
        yield from (r.integers(-2 * length, 3 * length, 6).astype(kind) for _ in range(6))
        yield from (r.integers(0, length + 1, 6).astype(kind) for _ in range(6))  # in no order
        yield np.arange(length, length - 6, -1).astype(kind)
        yield from (np.array(x, kind) for x in ([low] * 6, [high] * 6, [low, high] * 3, [high, low] * 3))
        yield np.array([0, 5, 5, high, 3, length], kind)
        yield np.array([low, 0, 7, length, length + 1, high], kind)
        yield np.array([-1, 0, 1, 0, -1, 0], kind)


@DIRECTIONS
@pytest.mark.parametrize("kernels", ["host", "cuda"])
@BOTH
def test_garbage_in_offsets_touches_nothing_else(request, monkeypatch, kernels, make, reverse):
    executor = request.getfixturevalue(f"{kernels}_executor")
    monkeypatch.setattr(_arrays, "check_offsets", lambda *_: None)
    call = make(1, 45)
    every_plan, h0 = call.plans(executor), call.h0(5)
    for i, offsets in enumerate(garbage(45)):
        frame = np.full((3, *call.inputs["b" if call.is_linear else "u"].shape[1:]), 7, call.out_dtype)
        for plan in every_plan[i % 3 :: 3]:
            h, last = call.run(executor, plan, h0, reverse=reverse, cu_seqlens=offsets, out=frame[1:2])
            assert np.isfinite(h).all()  # written, all of it
            assert np.isfinite(last).all()
        np.testing.assert_array_equal(frame[::2], 7)


@BOTH
def test_offsets_are_not_cut_to_32_bits(executor, monkeypatch, make):
    monkeypatch.setattr(_arrays, "check_offsets", lambda *_: None)
    call, whole = make(1, 45), np.array([0, 45])
    for offsets in ([0, 2**32 + 20], [-(2**32), 45]) if executor.kernels else ():
        for plan in call.plans(executor):
            h, _ = call.run(executor, plan, cu_seqlens=np.array(offsets))
            np.testing.assert_array_equal(h, call.run(executor, plan, cu_seqlens=whole)[0])


def test_garbage_in_offsets_writes_nothing_else_on_a_gpu(cuda_executor):
    cupy = cuda_executor.xp
    for make in (linear, selective):
        call = make(1, 45)
        inputs = {name: cuda_executor.asarray(x) for name, x in call.inputs.items()}
        for plan, offsets in itertools.product(call.plans(cuda_executor), garbage(45)):
            frame = cupy.full((3, *inputs["b" if call.is_linear else "u"].shape[1:]), 7, call.out_dtype)
            with forced(**plan):
                call.function(**inputs, **call.options, cu_seqlens=cupy.asarray(offsets), out=frame[1:2])
            assert (frame[::2] == 7).all()


WRONG_OFFSETS = [
    ([-1, 3], r"must lie in \[0, 5\], got -1 to 3"),
    ([0, 6], r"must lie in \[0, 5\], got 0 to 6"),
    ([0, 4, 2, 5], "must not descend, got 2 at 2 after 4"),
    ([0, 2**31 - 1, 3], "must not descend, got 3 at 2 after 2147483647"),
]


@pytest.mark.parametrize(("offsets", "words"), WRONG_OFFSETS)
@calls({"linear": linear, **ONE})
def test_offsets_of_numpy_arrays_are_checked(make, offsets, words):
    call = make(1, 5)
    for kind in (np.int32, np.int64):
        out = np.full(call.inputs["b" if call.is_linear else "u"].shape, 7, F32)
        with pytest.raises(ValueError, match="cu_seqlens " + words):
            call.function(**call.inputs, **call.options, cu_seqlens=np.array(offsets, kind), out=out)
        np.testing.assert_array_equal(out, 7)


@pytest.mark.parametrize(("offsets", "words"), WRONG_OFFSETS)
@calls({"linear": linear, **ONE})
def test_offsets_on_a_gpu_are_checked_when_asked(cuda_executor, monkeypatch, make, offsets, words):
    call = make(1, 5)
    monkeypatch.delenv("CUSCAN_CHECK", raising=False)
    call.run(cuda_executor, cu_seqlens=np.array(offsets))
    monkeypatch.setenv("CUSCAN_CHECK", "1")
    with pytest.raises(ValueError, match="cu_seqlens " + words):
        call.run(cuda_executor, cu_seqlens=np.array(offsets))


# memory


@pytest.mark.parametrize("lanes", Lanes, ids=[lanes.value for lanes in Lanes])
def test_memory_of_marks_in_a_linear_scan(host_executor, lanes):
    # 700 steps are 22 words of 16 bytes.
    call = linear(12, 700)
    output, last = 12 * 700 * 4, 12 * 4
    mask, offsets = np.ones((12, 700), bool), np.array([0, 300, 300, 700])
    cases = [
        ({"mask": mask}, last, [12 * 22 * 16]),
        ({"mask": mask, "reset": mask[0]}, last, [12 * 22 * 16]),
        ({"mask": mask[0]}, last, [22 * 16]),
        ({"mask": np.broadcast_to(mask[0], (12, 700)), "reset": mask[:1]}, last, [22 * 16]),
        ({"cu_seqlens": offsets}, 3 * last, [22 * 16, 700 * 4]),
        ({"cu_seqlens": offsets, "mask": mask}, 3 * last, [12 * 22 * 16, 700 * 4]),
    ]
    for segments, states, marks in cases:
        call.run(host_executor, {"schedule": Schedule.BLOCK, "lanes": lanes}, **segments)
        assert sorted(host_executor.allocated) == sorted([output, states, *marks])
        call.run(host_executor, {"schedule": Schedule.SPLIT, "lanes": lanes, "chunk": 100}, **segments)
        # A byte for each of the chunks' summaries, and marks of those.
        summaries = [12 * 7 * 4, 12 * 7 * 4, 12 * 7, 12 * 16]
        assert sorted(host_executor.allocated) == sorted([output, states, *marks, *summaries])


@pytest.mark.parametrize("layout", ["bld", "bdl"])
def test_memory_of_marks_in_a_selective_scan(host_executor, layout):
    one, two = (selective(rows, 64, 8, channels=6, layout=layout) for rows in (1, 2))
    output, state = 64 * 6 * 4, 6 * 8 * 4
    flags, offsets = np.ones((2, 64), bool), np.array([0, 30, 30, 64])
    for call, segments, states, marks in (
        (two, {"mask": flags}, 2, [2 * 2 * 16]),
        (two, {"mask": flags, "reset": flags}, 2, [2 * 2 * 16]),
        (one, {"cu_seqlens": offsets}, 3, [2 * 16, 64 * 4]),
        (one, {"cu_seqlens": offsets, "reset": flags[:1]}, 3, [2 * 16, 64 * 4]),
    ):
        batch, outputs = call.sizes[0], [call.sizes[0] * output, states * state]
        call.run(host_executor, {"schedule": Schedule.SERIAL}, **segments)
        assert sorted(host_executor.allocated) == sorted([*outputs, *marks])
        call.run(host_executor, {"schedule": Schedule.SPLIT, "chunk": 32}, **segments)
        # As above: a byte for each chunk, and marks of those.
        summaries = [batch * 2 * state, batch * 2 * state, batch * 2, batch * 16]
        assert sorted(host_executor.allocated) == sorted([*outputs, *marks, *summaries])


# what is refused


def ones(*shape, dtype=F32):
    return np.ones(shape, dtype)


def wrong_linear(**segments):
    """b is (3, 5), and axis 1 is time."""
    return cuscan.linear_scan, {"a": 0.5, "b": ones(3, 5), "axis": 1, "out": np.zeros((3, 5), F32), **segments}


def wrong_selective(batch=2, **segments):
    """Length 5, 4 channels, 3 states."""
    right = {"u": ones(batch, 5, 4), "delta": ones(batch, 5, 4), "A": ones(4, 3), "out": np.zeros((batch, 5, 4), F32)}
    couples = {"B": ones(batch, 5, 3), "C": ones(batch, 5, 3)}
    return cuscan.selective_scan, {**right, **couples, **segments}


TWO = np.array([0, 2, 5])
WRONG = [
    # kinds
    *(
        (wrong(**{name: x}), TypeError, [f"{name} must be", type(x).__name__])
        for wrong in (wrong_linear, wrong_selective)
        for name in ("mask", "reset", "cu_seqlens")
        for x in ([True] * 5, "left", True, 1, 0.5)
    ),
    # dtypes
    *(
        (wrong(**{name: ones(*shape, dtype=dtype)}), TypeError, [f"{name} must be bool", np.dtype(dtype).name])
        for wrong, shape in ((wrong_linear, (3, 5)), (wrong_selective, (2, 5)))
        for name in ("mask", "reset")
        for dtype in (int, np.uint8, F32)
    ),
    *(
        (wrong(cu_seqlens=TWO.astype(dtype)), TypeError, ["cu_seqlens must be int32 or int64", np.dtype(dtype).name])
        for wrong in (wrong_linear, partial(wrong_selective, 1))
        for dtype in (float, np.uint64, np.int16, bool)
    ),
    # shapes
    *(
        (wrong_linear(**{name: ones(*shape, dtype=bool)}), ValueError,
         [f"{name} must broadcast to b's shape (3, 5)", str(shape)])
        for name in ("mask", "reset")
        for shape in ((3, 6), (6,), (5, 3), (3,), (2, 5), (1, 3, 5), (2, 3, 5))
    ),
    *(
        (wrong_selective(**{name: ones(*shape, dtype=bool)}), ValueError,
         [f"{name} must have shape (batch, length) = (2, 5)", str(shape)])
        for name in ("mask", "reset")
        for shape in ((2, 6), (5, 2), (1, 5), (2, 1), (5,), (2, 5, 4), (2, 5, 1), ())
    ),
    *(
        (wrong(cu_seqlens=x), ValueError, ["cu_seqlens must have shape (sequences + 1,)", str(x.shape)])
        for wrong in (wrong_linear, partial(wrong_selective, 1))
        for x in (TWO[None], TWO[:, None], TWO[:0], np.array(3))
    ),
    (wrong_selective(cu_seqlens=TWO), ValueError, ["with cu_seqlens the batch must be 1", "(2, 5, 4)"]),
    (wrong_selective(0, cu_seqlens=TWO), ValueError, ["with cu_seqlens the batch must be 1", "(0, 5, 4)"]),
    *(
        (wrong_linear(cu_seqlens=TWO, h0=ones(*shape)), ValueError,
         ["h0 must have shape sequences and b's shape without axis = (2, 3)", str(shape)])
        for shape in ((3,), (3, 3), (1, 3), (3, 2), (2, 3, 1))
    ),
    *(
        (wrong_selective(1, cu_seqlens=TWO, h0=ones(*shape)), ValueError,
         ["h0 must have shape (sequences, channels, state) = (2, 4, 3)", str(shape)])
        for shape in ((1, 4, 3), (3, 4, 3), (4, 3), (2, 3, 4))
    ),
    (wrong_linear(h0=ones(2, 3)), ValueError, ["h0 must have shape", "(3,)", "(2, 3)"]),
    # values
    *(
        (wrong(cu_seqlens=np.array(x)), ValueError, ["cu_seqlens must", *words])
        for wrong in (wrong_linear, partial(wrong_selective, 1))
        for x, words in (
            ([-1, 3], ["[0, 5]", "-1 to 3"]),
            ([0, 6], ["[0, 5]", "0 to 6"]),
            ([6], ["[0, 5]", "6"]),
            ([0, 3, 2, 5], ["not descend", "2 at 2 after 3"]),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: f"{wrong[0][0].__name__}: {' '.join(wrong[2])}"[:90])
def test_a_wrong_call_is_refused_in_words_and_writes_nothing(wrong):
    (function, arguments), kind, words = wrong
    with pytest.raises(kind) as caught:
        function(**arguments)
    assert type(caught.value) is kind
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"
    np.testing.assert_array_equal(arguments["out"], 0)


@pytest.mark.parametrize("name", ["mask", "reset", "cu_seqlens"])
def test_out_overlaps_none_of_them(name):
    memory = np.zeros(200, F32)
    for function, arguments in (wrong_linear(), wrong_selective(1)):
        out = memory[: arguments["out"].size].reshape(arguments["out"].shape)
        inside = memory[out.size - 1 :]
        flags = inside.view(bool)[: 15 if out.shape == (3, 5) else 5].reshape(-1, 5)
        x = inside.view(np.int32)[:3] if name == "cu_seqlens" else flags
        with pytest.raises(ValueError, match=f"out overlaps {name} in memory"):
            function(**arguments | {"out": out, name: x})
    np.testing.assert_array_equal(memory, 0)


# episodes: as in the README


def returns_and_advantages(rewards, values, last_value, ends, gamma, lam):
    """Of arrays (time, batch); `ends` is True where an episode ends with this step."""
    episodes = {"axis": 0, "reverse": True, "reset": ends}
    returns = cuscan.linear_scan(gamma, rewards, last_value, **episodes)
    next_values = np.where(ends, 0, np.concatenate([values[1:], last_value[None]]))
    advantages = cuscan.linear_scan(gamma * lam, rewards + gamma * next_values - values, **episodes)
    return returns, advantages


def test_returns_and_generalised_advantages_of_episodes(executor):
    time, batch = 40, 6
    r = np.random.default_rng(4)
    rewards, values = r.integers(-4, 5, (2, time, batch)).astype(F32)
    last_value, ends = r.integers(-4, 5, batch).astype(F32), r.random((time, batch)) < 0.2
    ends[::5] = True  # so that gamma to the power of an episode's length is exact
    gamma, lam = 0.5, 0.5
    returns, advantages = executor(returns_and_advantages, rewards, values, last_value, ends, gamma, lam)
    for i in range(batch):
        ahead, value, advantage = last_value[i], last_value[i], 0
        for t in range(time)[::-1]:
            if ends[t, i]:
                ahead = value = advantage = 0
            ahead = rewards[t, i] + gamma * ahead
            advantage = rewards[t, i] + gamma * value - values[t, i] + gamma * lam * advantage
            value = values[t, i]
            assert returns[t, i] == ahead
            assert advantages[t, i] == advantage
