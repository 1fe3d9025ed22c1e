"""The laws catch what is no monoid, and the struct that every kernel uses is one."""

import re

import numpy as np
import pytest
from hypothesis import strategies as st

import cuscan
from cuscan import _source
from cuscan.testing import Host, Monoid, Plan, affine_monoid, check_monoid, cuda_monoid, host, segmented_monoid

try:
    host.compiler()
except host.CompileError as error:
    pytest.skip(str(error), allow_module_level=True)

small = st.integers(-8, 8)


def affine(earlier, later):
    return later[0] * earlier[0], later[0] * earlier[1] + later[1]


def act(item, state):
    return item[0] * state + item[1]


maps = st.tuples(st.sampled_from([1, -1, 0]), small)


@pytest.mark.parametrize(
    "monoid",
    [
        Monoid(max, -100, small),
        Monoid(lambda x, y: x + y, "", st.text("ab", max_size=3)),
        Monoid(affine, (1, 0), maps, apply=act, states=small, later_only=st.just((np.inf, 1.0))),
    ],
)
def test_monoids_pass(monoid):
    check_monoid(monoid)


@pytest.mark.parametrize(
    ("law", "monoid"),
    [
        ("associativity", Monoid(lambda x, y: x - y, 0, small)),
        ("later identity", Monoid(max, 0, small)),
        ("later identity", Monoid(max, 0, st.integers(0, 8), later_only=small)),
        ("earlier identity", Monoid(lambda x, _: x, 0, small)),
        ("homomorphism", Monoid(affine, (1, 0), maps, fold=lambda xs: xs[0] if len(xs) < 3 else affine(xs[1], xs[0]))),
        ("homomorphism", Monoid(max, -100, small, fold=lambda xs: max(xs[:3]))),
        ("action", Monoid(lambda x, y: affine(y, x), (1, 0), maps, apply=act, states=small)),
        # What is mapped is mapped rightly, but a negative state is mapped as if it were 0.
        ("neutral action", Monoid(affine, (1, 0), st.tuples(st.integers(0, 1), st.integers(0, 8)),
                                  apply=lambda item, state: act(item, max(state, 0)), states=small)),
    ],
)  # fmt: skip
def test_what_is_broken_is_named(law, monoid):
    with pytest.raises(AssertionError, match=f"^{law} is broken by "):
        check_monoid(monoid, longest=4)


def test_the_simplest_items_are_shown():
    with pytest.raises(AssertionError, match=re.escape("associativity is broken by 0, 0, 1: -1 is not 1")):
        check_monoid(Monoid(lambda x, y: x - y, 0, small))


@pytest.mark.parametrize(
    "item", ["float32", "complex64", *(pytest.param(x, marks=pytest.mark.full) for x in ("float64", "complex128"))]
)
def test_the_struct_of_the_kernels_is_a_monoid(item):
    check_monoid(affine_monoid(item, Host()), examples=50)


@pytest.mark.parametrize("item", ["float32", pytest.param("float64", marks=pytest.mark.full)])
def test_the_struct_that_resets_is_a_monoid(item):
    check_monoid(segmented_monoid(item, Host()), examples=50)


def test_nothing_comes_through_a_reset():
    monoid = segmented_monoid("float32", Host())
    assert monoid.combine((np.nan, np.inf, 0), (np.nan, 3, 1))[1:] == (3, 1)
    assert monoid.combine((np.nan, np.inf, 0), (2, 3, 1)) == (2, 3, 1)
    assert monoid.combine((np.nan, 3, 1), (2, 5, 0))[1:] == (11, 1)
    assert monoid.apply((np.nan, 3, 1), (np.inf,)) == (3,)


def test_the_identity_is_not_neutral_before_an_infinite_gate():
    monoid = affine_monoid("float32", Host())
    assert monoid.combine((np.inf, 3.0), monoid.identity) == (np.inf, 3.0)
    assert np.isnan(monoid.combine(monoid.identity, (np.inf, 3.0))[1])


@pytest.mark.parametrize(
    ("right", "wrong", "law"),
    [
        # A swapped combine is a monoid too, and every fold of it consistent: only what it does to a state shows it.
        ("combine(Affine<S> earlier, Affine<S> later)", "combine(Affine<S> later, Affine<S> earlier)", "action"),
        ("own = combine(earlier, own)", "own = combine(own, earlier)", "homomorphism"),
        ("int distance = 1; distance < 32", "int distance = 2; distance < 32", "homomorphism"),
        ("{Scalar<S>::one(), Scalar<S>::zero()}", "{Scalar<S>::one(), Scalar<S>::one()}", "later identity"),
        ("multiply_add(later.gate, earlier.input", "multiply_add(earlier.gate, earlier.input", "associativity"),
        ("later.resets ? later :", "", "associativity"),
        ("earlier.resets}", "0u}", "associativity"),
        ("map.resets ? map.input :", "", "action"),
        ("if (lane - distance >= head)", "if (lane >= distance)", "homomorphism"),
    ],
)  # fmt: skip
def test_a_fault_in_cuda_src_is_caught(right, wrong, law, tmp_path, monkeypatch):
    assert any(right in path.read_text() for path in _source.folder().iterdir())
    for path in _source.folder().iterdir():
        (tmp_path / path.name).write_text(path.read_text().replace(right, wrong))
    monkeypatch.setattr(_source, "folder", lambda: tmp_path)
    resets = "reset" in right or "head" in right
    monoid = (segmented_monoid if resets else affine_monoid)("float32", Host("fast"))
    with pytest.raises(AssertionError, match=f"^{law} is broken by "):
        check_monoid(monoid, examples=50, longest=10)


def test_cuda_code_of_ones_own_and_its_number_of_fields():
    text = """
struct Largest { int value, count; };
__device__ Largest combine(Largest earlier, Largest later) {
  if (earlier.value == later.value) return {later.value, earlier.count + later.count};
  return earlier.value > later.value ? earlier : later;
}
"""
    options = {"map": "Largest", "dtype": np.int32, "values": st.tuples(small, st.integers(1, 3))}
    monoid = cuda_monoid(text, Host(), fields=2, identity="Largest{-100, 0}", **options)
    assert monoid.fold([(3, 1), (5, 2), (5, 1), (4, 9)]) == (5, 3)
    check_monoid(monoid, examples=30)
    with pytest.raises(host.CompileError, match="fields"):
        cuda_monoid(text, Host(), fields=3, identity="Largest{-100, 0}", **options)


PLANS = [Plan("serial"), Plan("block", "time", row_warps=2), Plan("block", "rows", row_warps=4)]
PLANS += [Plan("split", lanes, chunk=20, row_warps=w) for lanes, w in (("rows", 1), ("time", 2))]


def scan(a, b, plan, **options):
    with plan.forced():
        return Host("fast")(cuscan.linear_scan, {"a": a, "b": b, "axis": 1, **options})


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_scans_flip_with_time_and_take_padding(plan):
    random = np.random.default_rng(0)
    a = random.choice(np.float32([1, -1, 1, -1, 0]), (3, 150))
    b = random.integers(-8, 9, a.shape).astype(np.float32)
    h = scan(a, b, plan)
    flipped = scan(a[:, ::-1].copy(), b[:, ::-1].copy(), plan, reverse=True)
    np.testing.assert_array_equal(flipped[:, ::-1], h)
    padded = [np.pad(x, ((0, 0), (0, 37)), constant_values=value) for x, value in ((a, 1), (b, 0))]
    longer, last = scan(*padded, plan, return_last_state=True)
    np.testing.assert_array_equal(longer[:, :150], h)
    np.testing.assert_array_equal(last, h[:, -1])
    np.testing.assert_array_equal(longer[:, 150:], np.repeat(last[:, None], 37, axis=1))
