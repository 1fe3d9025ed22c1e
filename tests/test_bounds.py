"""The bounds as array operations against the scalar oracle, element for element."""

import random

import numpy as np
import pytest

from cuscan.testing import _bounds, oracle, problems


def draw(kind, seed):
    source = random.Random(seed)
    return kind(source.choice, source.randint, values=("real", "nan"), largest=300)


def both(problem, eps):
    names = set(problem.arguments()) - {"return_last_state", "out", "out_dtype"}
    given = {name: x for name, x in problem.arguments().items() if name in names}
    name = problem.function.__name__
    return getattr(_bounds, name)(**given, eps=eps), getattr(oracle, name)(**given, eps=eps)


@pytest.mark.parametrize("kind", [problems.draw_linear, problems.draw_selective])
@pytest.mark.parametrize("seed", range(60))
def test_values_and_bounds_are_the_oracles(kind, seed):
    problem = draw(kind, seed)
    for eps in (2.0**-24, 2.0**-53):
        fast, slow = both(problem, eps)
        for bound, expected, value in (
            (fast.bound, slow.bound, slow.value),
            (fast.last_bound, slow.last_bound, slow.last),
        ):
            finite = np.isfinite(expected)
            assert finite[np.isfinite(value)].all()
            np.testing.assert_allclose(bound[finite], expected[finite], rtol=1e-9, atol=0)
    # Both compute in float64, so that what they may differ by is its bound.
    oracle.assert_scan_close(fast.value, slow.value, slow.bound)
    oracle.assert_scan_close(fast.last, slow.last, slow.last_bound)


@pytest.mark.parametrize("kind", [problems.draw_linear, problems.draw_selective])
def test_exact_values_have_no_bound_but_that_of_the_gate(kind):
    source = random.Random(0)
    for _ in range(60):
        problem = kind(source.choice, source.randint, values=("exact",), largest=300)
        fast, slow = problem.expected(), both(problem, 2.0**-24)[1]
        assert not fast.last_bound.any()
        np.testing.assert_array_equal(fast.last, slow.last)
        assert np.array_equal(fast.last, np.rint(fast.last.real) + 1j * np.rint(fast.last.imag))
        if getattr(problem, "z", None) is None:
            np.testing.assert_array_equal(fast.value, slow.value)
            assert fast.bound.max(initial=0) <= 2.0**-20 * np.abs(slow.value).max(initial=0)
