"""The bounds as array operations against the scalar oracle, element for element."""

import random

import ml_dtypes
import numpy as np
import pytest
from test_oracle import hillis_steele, serial

from cuscan.testing import _bounds, oracle, problems


def draw(kind, seed):
    source = random.Random(seed)
    return kind(source.choice, source.randint, values=("real", "nan"), largest=300)


def inputs_of(problem):
    outputs = ("return_last_state", "return_states", "out", "out_dtype")
    return {name: x for name, x in problem.arguments().items() if name not in outputs}


def both(problem, eps):
    given, name = inputs_of(problem), problem.function.__name__
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


def gradients_call(problem):
    """The name and the arguments of the vjp of a drawn problem's call: integers to receive for exact values."""
    given = inputs_of(problem)
    r = np.random.default_rng((problem.seed, 9))
    linear = isinstance(problem, problems.LinearProblem)
    is_complex = problem.dtype.startswith("complex") if linear else problem.complex

    def draw(shape, is_complex):
        x = r.integers(-3, 4, (2, *shape)) if problem.values == "exact" else r.normal(size=(2, *shape))
        return x[0] + 1j * x[1] if is_complex else x[0]

    lead = () if given["cu_seqlens"] is None else (len(given["cu_seqlens"]) - 1,)
    if linear:
        b = given.pop("b")
        given["h"] = oracle.linear_scan(b=b, **given).value
        last, received, name = np.delete(b.shape, problem.axis), "grad_h", "linear_scan_vjp"
    else:
        b, lead = given["u"], lead or (problem.batch,)
        last, received, name = (problem.channels, problem.state), "grad_out", "selective_scan_vjp"
    given[received] = draw(b.shape, is_complex and linear)
    given["grad_last_state"] = draw((*lead, *last), is_complex)
    given[(received, "grad_last_state", "h0")[r.integers(3)]] = None
    return name, given


@pytest.mark.parametrize("kind", [problems.draw_linear, problems.draw_selective])
@pytest.mark.parametrize("seed", range(60))
def test_gradients_are_the_oracles(kind, seed):
    problem = draw(kind, seed)
    name, given = gradients_call(problem)
    fast, slow = getattr(_bounds, name)(**given, eps=2.0**-53), getattr(oracle, name)(**given)
    assert set(fast) == set(slow)
    for each, (value, bound) in fast.items():
        oracle.assert_scan_close(value, slow[each], bound)
        assert bound.dtype == np.float64
        assert np.isfinite(bound[np.isfinite(value)]).all()


@pytest.mark.parametrize("kind", [problems.draw_linear, problems.draw_selective])
def test_exact_gradients_have_no_bound(kind):
    source = random.Random(0)
    for _ in range(60):
        problem = kind(source.choice, source.randint, values=("exact",), largest=300)
        if getattr(problem, "z", None) is not None:
            continue
        name, given = gradients_call(problem)
        fast, slow = getattr(_bounds, name)(**given, exact=True), getattr(oracle, name)(**given)
        for each, (value, bound) in fast.items():
            np.testing.assert_array_equal(value, slow[each])
            # Rates are scaled for exp2 and back.
            if name == "linear_scan_vjp" or not each.startswith("delta"):
                np.testing.assert_array_equal(bound, 0)


@pytest.mark.parametrize("rubbish", [np.nan, np.inf])
@pytest.mark.parametrize("received", ["grad_out", "grad_last_state"])
def test_gradients_without_states_are_the_oracles(rubbish, received):
    given = ordinary(A=np.zeros((4, 0)), B=np.zeros((2, 20, 0)), C=np.zeros((2, 20, 0)), h0=None)
    given |= {"grad_last_state": np.zeros((2, 4, 0)), "delta": rubbish * given["delta"]} | {received: None}
    given["u"][0, 3, 1] = rubbish
    fast, slow = _bounds.selective_scan_vjp(**given, eps=2.0**-53), oracle.selective_scan_vjp(**given)
    for name, (value, bound) in fast.items():
        oracle.assert_scan_close(value, slow[name], bound)
    assert not fast["delta"].value.any()
    assert not fast["delta_bias"].value.any()


def test_exact_gradients_have_a_bound_where_integers_are_rounded():
    r = np.random.default_rng(0)
    u, received = r.integers(-3, 4, (2, 1, 40, 2))
    delta, rates = r.integers(0, 2, u.shape), -1024.0 * r.integers(0, 2, (2, 3))
    B, C = r.integers(-3, 4, (2, 1, 40, 3))
    for factor in (1, 2**24):
        gradients = _bounds.selective_scan_vjp(
            u, delta, rates, B, C, D=[1, 2], delta_bias=[0, 0], grad_out=factor * received, exact=True
        )
        for name, (value, bound) in gradients.items():
            if factor > 1 or not name.startswith("delta"):
                assert (bound[value != 0] > 0).all() if factor > 1 else not bound.any()
            assert value.any()


def ordinary(**more):
    r = np.random.default_rng(1)
    u, delta, z = r.normal(size=(3, 2, 20, 4))
    B, C = r.normal(size=(2, 2, 20, 3))
    return {
        "u": u, "delta": delta - 1, "A": -np.exp(r.normal(size=(4, 3))), "B": B, "C": C, "D": r.normal(size=4), "z": z,
        "delta_bias": r.normal(size=4), "h0": r.normal(size=(2, 4, 3)), "grad_out": r.normal(size=u.shape),
        "grad_last_state": r.normal(size=(2, 4, 3)), "delta_softplus": True, **more,
    }  # fmt: skip


def rejected(actual, expected):
    """The gradients that are further off than their bound."""
    names = set()
    for name, (value, bound) in expected.items():
        try:
            oracle.assert_scan_close(actual[name], value, bound)
        except AssertionError:
            names.add(name)
    return names


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        ({"grad_last_state": None}, {"u", "delta", "A", "B", "delta_bias", "h0"}),
        ({"mask": np.arange(20) != 19}, {"u", "delta", "A", "B", "C", "D", "z", "delta_bias", "h0"}),
        ({"reset": np.arange(20) == 10}, {"u", "delta", "A", "B", "C", "z", "delta_bias", "h0"}),
        ({"delta_limit": (0.0, 1.0)}, {"u", "delta", "A", "B", "C", "z", "delta_bias", "h0"}),
    ],
)
def test_gradients_of_another_call_are_rejected(change, seen):
    change = {k: np.broadcast_to(x, (2, 20)) if k in ("mask", "reset") else x for k, x in change.items()}
    assert rejected(oracle.selective_scan_vjp(**ordinary(**change)), _bounds.selective_scan_vjp(**ordinary())) == seen


EVERYTHING = {"u", "delta", "A", "B", "C", "D", "z", "delta_bias", "h0"}


@pytest.mark.parametrize(
    ("name", "independent"),
    [
        ("u", {"u", "h0"}), ("delta", {"D"}), ("A", {"D"}), ("B", {"B", "D", "h0"}), ("C", {"C", "D"}),
        ("D", EVERYTHING - {"u", "z"}), ("z", set()), ("delta_bias", {"D"}), ("h0", {"u", "B", "D", "h0"}),
        ("grad_out", set()), ("grad_last_state", {"C", "D", "z"}),
    ],
)  # fmt: skip
def test_every_gradient_shows_a_rounding_of_what_it_depends_on(name, independent):
    given = ordinary()
    rounded = given | {name: given[name].astype(ml_dtypes.bfloat16).astype(float)}
    seen = rejected(oracle.selective_scan_vjp(**rounded), _bounds.selective_scan_vjp(**given))
    assert seen == EVERYTHING - independent


@pytest.mark.parametrize("low", [-1.0, 0.5, 0.999])
@pytest.mark.parametrize("kind", [np.float32, np.complex64])
def test_linear_gradients_may_be_associated_in_any_way(low, kind):
    r = np.random.default_rng(3)
    a, h, received = r.uniform(low, 1, 300).astype(kind), *r.normal(size=(2, 300)).astype(kind)
    if kind is np.complex64:
        a, received = a * np.exp(1j * r.normal(size=300)).astype(kind), received * kind(1 + 2j)
    expected = _bounds.linear_scan_vjp(a, h, received)
    gates = a.conj()
    # What each step receives, or first what it passes on, from the last step to the first.
    for scan in (serial, hillis_steele):
        g = scan(np.append(kind(1), gates[:0:-1]), received[::-1])[::-1]
        passed = scan(gates[::-1], (gates * received)[::-1])[::-1]
        for of_b in (g, received + np.append(passed[1:], kind(0))):
            of_a = of_b * np.append(kind(0), h[:-1]).conj()
            assert not rejected({"a": of_a, "b": of_b}, expected)
    shifted = serial(gates[::-1], received[::-1])[::-1]
    assert rejected({"a": shifted, "b": shifted}, expected) == {"a", "b"}


def test_sums_may_be_in_any_order_but_not_in_16_bits():
    r = np.random.default_rng(4)
    u, received = r.normal(size=(2, 3, 200, 1)).astype(np.float32)
    one = np.ones((3, 200, 1), np.float32)
    expected = _bounds.selective_scan_vjp(u, one, -one[0, :1], one, one, D=[1.0], grad_out=received)["D"]
    terms = (u * received).ravel()
    for _ in range(20):
        r.shuffle(terms)
        oracle.assert_scan_close(np.cumsum(terms)[-1:], *expected)
    with pytest.raises(AssertionError):
        oracle.assert_scan_close(np.cumsum(terms.astype(np.float16))[-1:].astype(np.float32), *expected)
