"""Problems as values, and the strategies that draw them."""

import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from math import inf  # noqa: F401 in reprs

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from cuscan._plan import SelectiveTile  # noqa: F401 in reprs
from cuscan.testing import (
    Layout,
    LinearGradientProblem,
    LinearProblem,
    Numpy,
    Plan,
    SelectiveGradientProblem,
    SelectiveProblem,
    gradient_problems,
    linear_problems,
    problems,
    selective_problems,
)

QUICK = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
DRAWS = [problems.draw_linear, problems.draw_selective]


def draw_linear_gradients(*draw, **options):
    return problems.draw_gradients(*draw, problems.draw_linear(*draw, **options))


def draw_selective_gradients(*draw, **options):
    return problems.draw_gradients(*draw, problems.draw_selective(*draw, **options))


GRADIENT_DRAWS = [draw_linear_gradients, draw_selective_gradients]


@QUICK
@given(linear_problems(largest=2000))
def test_numpy_runs_every_linear_problem(problem):
    problem.check(Numpy())


@QUICK
@given(selective_problems(largest=2000))
def test_numpy_runs_every_selective_problem(problem):
    problem.check(Numpy())


@QUICK
@given(gradient_problems(linear_problems(largest=1000) | selective_problems(largest=1000)))
def test_numpy_runs_every_problem_of_gradients(problem):
    problem.check(Numpy())


@QUICK
@given(linear_problems(dtype=("float64",), values=("real",), plans=0))
def test_a_strategy_draws_what_it_is_asked_for(problem):
    assert (problem.dtype, problem.values, problem.plans) == ("float64", "real", (Plan(),))


@pytest.mark.parametrize("grad", [None, Layout()])
@pytest.mark.parametrize("gated", [None, Layout()])
def test_numpy_runs_problems_of_gradients_without_states(grad, gated):
    for seed in range(4):
        of = SelectiveProblem(seed, length=2, state=0, values="nan", D=Layout(), z=gated, softplus=bool(seed % 2))
        SelectiveGradientProblem(of, grad, Layout()).check(Numpy())


def same_arguments(x, y):
    return all(
        np.array_equal(x[name], y[name], equal_nan=True)
        and x[name].dtype == y[name].dtype
        and x[name].strides == y[name].strides
        if isinstance(x[name], np.ndarray)
        else x[name] == y[name]
        for name in x
    )


@pytest.mark.parametrize("draw", DRAWS + GRADIENT_DRAWS)
def test_a_repr_is_python_and_the_arrays_come_from_it(draw):
    source = random.Random(5)
    for _ in range(60):
        problem = draw(source.choice, source.randint, largest=500)
        pasted = eval(repr(problem))
        assert pasted == problem
        assert same_arguments(pasted.arguments(), problem.arguments())
    assert repr(LinearProblem(shape=(3, 4), axis=1)) == "LinearProblem(shape=(3, 4), axis=1)"


def length_of(problem):
    return problem.shape[problem.axis] if isinstance(problem, LinearProblem) else problem.length


@pytest.mark.parametrize("draw", DRAWS)
def test_draws_cover_strides_dtypes_options_and_plans(draw):
    source = random.Random(0)
    seen = Counter()
    for _ in range(400):
        problem = draw(source.choice, source.randint)
        arguments = problem.arguments()
        arrays = [x for x in arguments.values() if isinstance(x, np.ndarray)]
        seen["negative stride"] += any(stride < 0 for x in arrays for stride in x.strides)
        seen["broadcast"] += any(s == 0 and n > 1 for x in arrays for s, n in zip(x.strides, x.shape, strict=True))
        seen["odd row stride"] += any(stride // x.itemsize % 2 for x in arrays for stride in x.strides[:-1])
        seen["not of 16 bytes"] += any(x.ctypes.data % 16 for x in arrays if x.size)
        seen["misaligned"] += any(x.ctypes.data % x.itemsize for x in arrays if x.size)
        seen["not contiguous"] += any(not x.flags.c_contiguous for x in arrays)
        seen["empty"] += any(x.size == 0 for x in arrays)
        seen["out"] += arguments["out"] is not None
        mask, reset, offsets = (arguments[name] for name in ("mask", "reset", "cu_seqlens"))
        for name, flags in (("mask", mask), ("reset", reset)):
            if flags is not None and flags.size > 1:
                seen[f"{name} everywhere"] += bool(flags.all())
                seen[f"{name} nowhere"] += not flags.any()
                seen[f"{name} in places"] += flags.any() and not flags.all()
        seen["mask and reset"] += mask is not None and reset is not None
        if offsets is not None:
            assert (offsets.dtype, len(offsets)) == (problem.offsets, len(problem.lengths) + 1)
            lengths = np.diff(offsets)
            seen["packed with both"] += mask is not None and reset is not None
            seen["packed with h0"] += arguments["h0"] is not None
            seen["no sequence"] += lengths.size == 0
            seen["empty sequence"] += 0 in lengths
            seen["sequence of one step"] += 1 in lengths
            seen["many sequences"] += lengths.size > 32
            seen["ends on an edge"] += any(end % 32 == 0 for end in offsets[1:] if end)
            seen["ends next to an edge"] += any(end % 32 in (1, 31) for end in offsets[1:])
            seen["long sequence"] += lengths.max(initial=0) > 100
            seen["gaps at both ends"] += offsets[0] > 0 and offsets[-1] < length_of(problem)
        seen.update(problem.kinds())
    names = [
        "negative stride",
        "broadcast",
        "odd row stride",
        "not of 16 bytes",
        "misaligned",
        "not contiguous",
        "empty",
        "out",
        "last",
    ]
    names += ["reverse", "h0", "out_dtype", *problems.VALUES, "mask and reset", "cu_seqlens", "head", "offsets"]
    names += [f"{name} {where}" for name in ("mask", "reset") for where in ("everywhere", "nowhere", "in places")]
    names += ["packed with both", "packed with h0", "no sequence", "empty sequence", "sequence of one step"]
    names += ["many sequences", "ends on an edge", "ends next to an edge", "long sequence", "gaps at both ends"]
    if draw is problems.draw_linear:
        names += [
            *problems.dtypes(),
            *(f"{s} {lanes}" for s in ("block", "split") for lanes in ("rows", "time")),
            "serial",
        ]
    else:
        names += ["float32", "bfloat16", "float16", "float64", "complex", "wide", "parameters", "constant", "groups"]
        names += ["D", "z", "delta_bias", "softplus", "limit", "layout", "serial", "split"]
    assert {name: seen[name] for name in names if seen[name] < 3} == {}
    for name, share in (("mask", 1 / 3), ("reset", 1 / 3), ("cu_seqlens", 1 / 4)):
        assert share - 0.1 < seen[name] / 400 < share + 0.1


@pytest.mark.parametrize("draw", GRADIENT_DRAWS)
def test_draws_of_gradients_cover_their_options(draw):
    source = random.Random(0)
    seen = Counter()
    for _ in range(300):
        problem = draw(source.choice, source.randint, largest=1000)
        arguments = problem.arguments()
        received = arguments["grad_h" if isinstance(problem, LinearGradientProblem) else "grad_out"]
        last = arguments["grad_last_state"]
        assert received is not None or last is not None
        seen["result alone"] += last is None
        seen["last alone"] += received is None
        wide = received is not None and received.dtype != arguments.get("h", arguments.get("u")).dtype
        seen["gradient of another type"] += wide
        for x in (received, last, arguments.get("states", arguments.get("h"))):
            if x is not None:
                seen["broadcast"] += any(s == 0 and n > 1 for s, n in zip(x.strides, x.shape, strict=True))
                seen["not contiguous"] += not x.flags.c_contiguous
                assert not x.flags.writeable
        seen.update(problem.kinds())
        seen["states computed again"] += isinstance(problem, SelectiveGradientProblem) and problem.saved is None
        seen["exact"] += problem.values == "exact" and all(
            not bound.any() for name, (_, bound) in problem.expected(arguments).items() if not name.startswith("delta")
        )
        if isinstance(problem, LinearGradientProblem):
            seen["gate of its own shape"] += np.shape(arguments["a"]) not in ((), arguments["h"].shape)
            seen["scalar gate"] += not isinstance(arguments["a"], np.ndarray)
    names = ["result alone", "last alone", "gradient of another type", "broadcast", "not contiguous", "exact", "nan"]
    names += ["wide", "grad_dtype", "saved", "mask", "reset", "cu_seqlens", "h0", "reverse", "real"]
    linear = draw is draw_linear_gradients
    names += ["gate of its own shape", "scalar gate"] if linear else ["states computed again", "complex", "constant"]
    assert {name: seen[name] for name in names if seen[name] < 3} == {}


@pytest.mark.parametrize("reverse", [False, True])
def test_what_no_gradient_is_made_of_is_nan_for_half_of_the_seeds(reverse):
    hidden = Counter()
    for seed in range(40):
        of = LinearProblem(
            seed, (3, 20), 1, reverse, values="real", h0=Layout(), mask=Layout(), reset=Layout(),
            cu_seqlens=Layout(), lengths=(5, 0, 9), head=2,
        )  # fmt: skip
        arguments = LinearGradientProblem(of).arguments()
        outside = (np.arange(20) < 2) | (np.arange(20) >= 16)
        received, h = (np.isnan(arguments[name]) for name in ("grad_h", "h"))
        hidden[bool(received.any())] += 1
        if received.any():
            assert (received == outside).all()
            # A state is read by the next step of its sequence, unless that is masked or reset.
            ends = np.isin(np.arange(20), (2, 7) if reverse else (6, 15))
            reads = arguments["mask"] & ~arguments["reset"]
            unread = ~np.roll(reads, 1 if reverse else -1, 1) | ends | outside
            np.testing.assert_array_equal(h, unread)
        else:
            assert not h.any()
        selective = SelectiveProblem(seed, 2, 20, 3, 2, values="real", mask=Layout(), reverse=reverse)
        arguments = SelectiveGradientProblem(selective).arguments()
        assert not np.isnan(arguments["grad_out"][arguments["mask"]]).any()
    assert min(hidden.values()) > 10


def test_problems_of_gradients_become_simpler():
    layout = Layout(order=(2, 0, 1))
    of = LinearProblem(shape=(4, 40, 3), axis=1, h0=layout, cu_seqlens=Layout(), lengths=(9, 21), head=3)
    problem = LinearGradientProblem(of, Layout(pad=1), layout, Layout(skew=2), ("grad",), "float64")
    simpler = list(problem.simpler())
    changes = ({"grad": Layout()}, {"grad_last": None}, {"grad_last": Layout()}, {"saved": None}, {"saved": Layout()})
    for change in (*changes, {"wide": ()}, {"grad_dtype": None}, {"of": replace(of, lengths=(9,))}):
        assert replace(problem, **change) in simpler
    plain = {"grad": Layout(), "grad_last": Layout(), "saved": Layout()}
    assert replace(problem, of=LinearProblem(shape=(4, 40, 3), axis=1, h0=Layout()), **plain) in simpler
    for each in simpler:
        each.check(Numpy())


def test_check_sees_a_wrong_gradient_and_names_it():
    of = SelectiveProblem(length=40, channels=3, state=2, plans=(Plan(), Plan(chunk=32)), D=Layout())
    for values, by in (("exact", 1), ("real", 1e-3)):
        problem = SelectiveGradientProblem(replace(of, values=values))
        calls = []

        def executor(function, arguments, by=by, calls=calls):
            gradients = function(**arguments)
            calls.append(arguments)
            gradients.D[1] += by * (len(calls) == 2)
            return gradients

        with pytest.raises(AssertionError, match=r"D under Plan\(chunk=32\): 1 of 3 .* at \(1,\)"):
            problem.check(executor)


def test_saved_states_are_checked():
    problem = SelectiveProblem(length=70, channels=3, state=2, h0=Layout(), states=True)

    def executor(function, arguments):
        *results, states = function(**arguments)
        states[0, 1] += 1
        return (*results, states)

    with pytest.raises(AssertionError, match=r"states under Plan\(\): 6 of 18 "):
        problem.check(executor)


def test_offsets_are_those_of_the_lengths_and_end_with_time():
    def offsets(**fields):
        return LinearProblem(shape=(3, 8), axis=1, cu_seqlens=Layout(), **fields).arguments()["cu_seqlens"]

    np.testing.assert_array_equal(offsets(lengths=(3, 0, 2), head=1), [1, 4, 4, 6])
    np.testing.assert_array_equal(offsets(lengths=(3, 0, 9, 4), head=2, offsets="int32"), [2, 5, 5, 8, 8])
    np.testing.assert_array_equal(offsets(), [0])
    packed = LinearProblem(shape=(3, 8), axis=1, h0=Layout(), cu_seqlens=Layout(steps=(-1,)), lengths=(4, 4))
    assert packed.arguments()["h0"].shape == (2, 3)
    assert packed.arguments()["cu_seqlens"].strides == (-8,)
    assert packed.expected().last.shape == (2, 3)


def test_some_flags_are_as_they_were_before_they_were_broadcast():
    along_time = Layout(steps=(0, 1, 0))
    problem = LinearProblem(shape=(3, 8, 5), axis=1, mask=along_time, reset=Layout(steps=(0, 0, 1)))
    shapes = {
        tuple(x.shape for x in (arguments["mask"], arguments["reset"]))
        for arguments in (replace(problem, seed=seed).arguments() for seed in range(20))
    }
    assert shapes == {((3, 8, 5), (3, 8, 5)), ((8, 1), (5,))}
    selective = SelectiveProblem(batch=3, channels=2, layout="bdl", mask=Layout(steps=(0, 1)))
    assert selective.arguments()["mask"].shape == (3, 8)


def per_step(problem, arguments):
    """Arrays that vary in time, with time first and rows last."""
    if isinstance(problem, LinearProblem):
        return [np.moveaxis(arguments[name], problem.axis, 0) for name in "ab" if np.ndim(arguments[name])]
    time = 1 if problem.layout == "bld" else -1
    names = {"u", "delta", "z", "B", "C"} - set(problem.constant)
    return [np.moveaxis(arguments[name], time, 0) for name in names if arguments[name] is not None]


@pytest.mark.parametrize("draw", DRAWS)
def test_half_of_the_seeds_hide_nan_where_nothing_may_depend_on_it(draw):
    source = random.Random(2)
    hidden = Counter()
    for _ in range(400):
        problem = draw(source.choice, source.randint, values=("exact",), largest=500)
        arguments = problem.arguments()
        outside = np.ones(length_of(problem), bool)
        if arguments["cu_seqlens"] is not None:
            offsets = arguments["cu_seqlens"]
            outside[offsets[0] : offsets[-1]] = False
            if outside.any() and outside.size:
                arrays = per_step(problem, arguments)
                hidden["outside", any(np.isnan(x[outside]).any() for x in arrays)] += 1
                if (problem.mask, problem.reset, problem.h0) == (None, None, Layout()):
                    assert not any(np.isnan(x[~outside]).any() for x in arrays)
        elif problem.mask is not None and not arguments["mask"].all():
            hidden["mask", any(np.isnan(x).any() for x in per_step(problem, arguments))] += 1
        elif problem.mask is None and problem.reset is None and problem.h0 is not None:
            assert not any(np.isnan(x).any() for x in per_step(problem, arguments))
        expected = problem.expected(arguments)
        assert np.isfinite(expected.value).all()
        assert np.isfinite(expected.last).all()
    for name in ("mask", "outside"):
        assert hidden[name, True] > 10, hidden
        assert hidden[name, False] > 10, hidden


def test_nan_lies_only_where_no_step_that_shares_an_item_is_read():
    shared = LinearProblem(shape=(2, 8), axis=1, mask=Layout(), a=Layout(steps=(0, 1)))
    problem = next(
        problem
        for problem in (replace(shared, seed=seed) for seed in range(100))
        if np.isnan(problem.arguments()["a"]).any() and (problem.arguments()["mask"].sum(0) == 1).any()
    )
    arguments = problem.arguments()
    masked = ~arguments["mask"]
    np.testing.assert_array_equal(np.isnan(arguments["b"]), masked)
    unread = masked.all(axis=0)
    unread[0] = True  # no state enters the first step
    np.testing.assert_array_equal(np.isnan(arguments["a"]), np.stack([unread, unread]))


def test_a_simpler_problem_without_packing_has_an_h0_that_fits():
    layout = Layout(order=(2, 0, 1))
    packed = LinearProblem(
        shape=(4, 40, 3), axis=1, h0=layout, mask=Layout(), cu_seqlens=Layout(skew=2), lengths=(9, 0, 21), head=3
    )
    simpler = list(packed.simpler())
    assert LinearProblem(shape=(4, 40, 3), axis=1, h0=Layout(), mask=Layout()) in simpler
    assert replace(packed, mask=None) in simpler
    assert replace(packed, cu_seqlens=Layout()) in simpler
    assert replace(packed, head=0) in simpler
    lengths = {problem.lengths for problem in simpler}
    assert {(9,), (0, 21), (9, 21), (9, 0), (9, 0, 10), (9, 0, 0), (0, 0, 21)} <= lengths
    for problem in simpler:
        problem.check(Numpy())


def test_inputs_are_read_only_and_out_is_not():
    arguments = LinearProblem(shape=(4, 5), axis=1, out=Layout(order=(1, 0))).arguments()
    assert arguments["out"].strides == (4, 16)
    assert not arguments["a"].flags.writeable
    assert not arguments["b"].flags.writeable
    arguments["out"][...] = 1
    in_place = LinearProblem(out="b").arguments()
    assert in_place["out"] is in_place["b"]
    assert in_place["b"].flags.writeable


@pytest.mark.parametrize(
    ("layout", "strides", "first"),
    [
        (Layout(), (60, 20, 4), 0),
        (Layout(order=(2, 0, 1)), (12, 4, 24), 0),
        (Layout(steps=(-1, 2, 0)), (-20, 8, 0), 20),
        (Layout(pad=3), (96, 32, 4), 12),
        (Layout(order=(1, 0, 2), skew=1), (20, 40, 4), 1),
    ],
)
def test_a_layout_says_where_items_lie(layout, strides, first):
    shape = (2, 3, 5)
    values = np.arange(30, dtype=np.float32).reshape(shape)[tuple(map(slice, layout.inner(shape)))]
    placed = layout.place(values, shape)
    assert placed.strides == strides
    base = placed
    while base.base is not None:
        base = base.base  # bytes
    assert placed.ctypes.data - base.ctypes.data == first
    np.testing.assert_array_equal(placed, np.broadcast_to(values, shape))
    items = base[layout.skew :].view(np.float32)
    assert np.isnan(items).sum() == items.size - values.size


def test_between_offsets_lies_what_no_offset_is():
    placed = Layout(steps=(2,)).place(np.array([3, 4, 9], np.int32), (3,))
    np.testing.assert_array_equal(np.lib.stride_tricks.as_strided(placed, (5,), (4,)), [3, -(2**31), 4, -(2**31), 9])


def off_in_call(number, by):
    """An executor that is off at (3,) the `number`-th time."""
    calls = []

    def executor(function, arguments):
        calls.append(arguments)
        h = function(**arguments)
        h[3] += by * (len(calls) == number)
        return h

    return executor


def test_check_sees_a_wrong_value_and_under_which_plan():
    problem = LinearProblem(values="real", last=False, plans=(Plan(), Plan("serial")))
    with pytest.raises(AssertionError, match=r"under Plan\(\): 1 of 8 .* at \(3,\)"):
        problem.check(off_in_call(1, 1e-5))
    with pytest.raises(AssertionError, match=r"under Plan\(schedule='serial'\): 1 of 8 .* at \(3,\)"):
        problem.check(off_in_call(2, 1e-5))
    problem.check(off_in_call(2, 1e-8))


def test_check_compares_bits_of_exact_values():
    problem = LinearProblem(last=False, plans=(Plan(), Plan("serial")))
    with pytest.raises(AssertionError, match=r"under Plan\(\): 1 of 8 .* error 9.54e-06"):
        problem.check(off_in_call(1, 1e-5))
    with pytest.raises(AssertionError, match=r"Plan\(\) and Plan\(schedule='serial'\) differ on exact values"):
        problem.check(off_in_call(2, 1e-6))
    problem.check(off_in_call(3, 1))


def test_only_strategies_need_hypothesis_and_nothing_needs_more_than_numpy():
    code = """
import sys
for name in ("hypothesis", "cupy", "ml_dtypes", "torch", "jax"):
    sys.modules[name] = None
from cuscan.testing import LinearProblem, Monoid, Numpy, assert_scan_close, check_monoid, linear_problems
from cuscan.testing.fuzz import run
LinearProblem().check(Numpy())
assert run(print, on="numpy", count=5, seed=0)
for call in (linear_problems, lambda: check_monoid(Monoid(max, 0, None))):
    try:
        call()
    except ImportError as error:
        assert "pip install hypothesis" in str(error)
    else:
        raise AssertionError
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
