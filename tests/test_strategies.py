"""Problems as values, and the strategies that draw them."""

import random
import subprocess
import sys
from collections import Counter
from math import inf  # noqa: F401 in reprs

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from cuscan._plan import SelectiveTile  # noqa: F401 in reprs
from cuscan.testing import (
    Layout,
    LinearProblem,
    Numpy,
    Plan,
    SelectiveProblem,  # noqa: F401 in reprs
    linear_problems,
    problems,
    selective_problems,
)

QUICK = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
DRAWS = [problems.draw_linear, problems.draw_selective]


@QUICK
@given(linear_problems(largest=2000))
def test_numpy_runs_every_linear_problem(problem):
    problem.check(Numpy())


@QUICK
@given(selective_problems(largest=2000))
def test_numpy_runs_every_selective_problem(problem):
    problem.check(Numpy())


@QUICK
@given(linear_problems(dtype=("float64",), values=("real",), plans=0))
def test_a_strategy_draws_what_it_is_asked_for(problem):
    assert (problem.dtype, problem.values, problem.plans) == ("float64", "real", (Plan(),))


def same_arguments(x, y):
    return all(
        np.array_equal(x[name], y[name], equal_nan=True)
        and x[name].dtype == y[name].dtype
        and x[name].strides == y[name].strides
        if isinstance(x[name], np.ndarray)
        else x[name] == y[name]
        for name in x
    )


@pytest.mark.parametrize("draw", DRAWS)
def test_a_repr_is_python_and_the_arrays_come_from_it(draw):
    source = random.Random(5)
    for _ in range(60):
        problem = draw(source.choice, source.randint, largest=500)
        pasted = eval(repr(problem))
        assert pasted == problem
        assert same_arguments(pasted.arguments(), problem.arguments())
    assert repr(LinearProblem(shape=(3, 4), axis=1)) == "LinearProblem(shape=(3, 4), axis=1)"


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
    names += ["reverse", "h0", "out_dtype", *problems.VALUES]
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
