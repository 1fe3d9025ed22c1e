"""The elementary functions of cuda_src/activations.cuh against extended precision: 2 units in the last place each.

The bounds are those that `cuscan.testing.oracle` counts with: 4 eps a function, one a further operation. Inputs are
exact there, so that no function may magnify the rounding of its own argument.
"""

import numpy as np
import pytest

from cuscan import _source
from cuscan._source import KernelSource, _flatten
from cuscan.testing import Host, host

try:
    host.compiler()
except host.CompileError as error:
    pytest.skip(str(error), allow_module_level=True)

LONG = np.longdouble
FUNCTIONS = {
    "exp2_of": (lambda x: np.exp2(x), 4),
    "log1p_share": (lambda x: np.where(x == 0, 1, np.log1p(x) / np.where(x == 0, 1, x)), 4),
    "softplus": (lambda x: np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))), 9),
    "silu": (lambda x: x / (1 + np.exp(-x)), 10),
}
RANGES = {"exp2_of": (-1000, 100), "log1p_share": (0, 1), "softplus": (-700, 700), "silu": (-700, 700)}
pytestmark = pytest.mark.skipif(np.finfo(LONG).eps > 2.0**-60, reason="long double is double here")


def module(kind):
    body = "for (int i = threadIdx.x; i < n; i += blockDim.x)"
    entries = [
        f'extern "C" __global__ void {name}_items(const {kind}* x, {kind}* y, int n) {{ {body} y[i] = {name}(x[i]); }}'
        for name in FUNCTIONS
    ]
    entries.append(
        f'extern "C" __global__ void clip_items(const {kind}* x, {kind}* y, int n) '
        f"{{ {body} y[i] = clip(x[i], {kind}(-2), {kind}(3)); }}"
    )
    if kind == "float":
        entries.append(
            'extern "C" __global__ void unit_items(const float* x, complex<float>* y, int n) '
            f"{{ {body} y[i] = unit_at_angle(x[i]); }}"
        )
    return KernelSource("\n".join([*_flatten("activations.cuh", set()), '#line 1 "entries"', *entries]) + "\n", ())


def values_of(name, x, out=None):
    kind = "float" if x.dtype == np.float32 else "double"
    y = np.zeros(x.shape, x.dtype if out is None else out)
    return Host("fast").launch(module(kind), f"{name}_items", (1,), (32,), (x, y, np.int32(x.size)))[1]


def inputs(name, dtype):
    low, high = RANGES[name]
    if dtype == np.float32:
        low, high = max(low, -125 if name == "exp2_of" else -86), min(high, 88)
    random = np.random.default_rng(0)
    x = np.concatenate((np.linspace(low, high, 4001), random.normal(0, 1, 2000)))
    x = np.concatenate((x, random.choice([-1, 1], 2000) * 10.0 ** random.uniform(-30, 0, 2000), [0.0, -0.0, low, high]))
    return x[(x >= low) & (x <= high)].astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_relative_error(name, dtype):
    right, roundings = FUNCTIONS[name]
    x = inputs(name, dtype)
    y, expected = values_of(name, x), right(x.astype(LONG))
    eps = np.finfo(dtype).eps / 2
    tiny = np.finfo(dtype).tiny
    error = np.abs(y - expected)
    allowed = roundings * eps * np.abs(expected) + tiny
    worst = np.argmax(error / allowed)
    assert error[worst] <= allowed[worst], (x[worst], y[worst], expected[worst])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_ends(dtype):
    x = np.array([np.nan, np.inf, -np.inf, 1e30, -1e30], dtype)
    nan, inf = np.nan, np.inf
    np.testing.assert_array_equal(values_of("exp2_of", x), [nan, inf, 0, inf, 0])
    np.testing.assert_array_equal(values_of("softplus", x), np.array([nan, inf, 0, 1e30, 0], dtype))
    np.testing.assert_array_equal(values_of("silu", x)[[0, 1, 3, 4]], np.array([nan, inf, 1e30, 0], dtype))
    np.testing.assert_array_equal(values_of("clip", x), [nan, 3, -2, 3, -2])
    np.testing.assert_array_equal(values_of("clip", np.array([-2.5, -2, 0, 3, 3.5], dtype)), [-2, -2, 0, 3, 3])


def test_subnormal_powers_of_two_are_right_in_float64():
    x = np.arange(-1022.0, -900)
    np.testing.assert_array_equal(values_of("exp2_of", x), np.exp2(x))


def test_unit_at_an_angle():
    random = np.random.default_rng(0)
    x = np.concatenate([scale * random.uniform(-1, 1, 2000) for scale in (1e-3, 4, 100, 8192, 1e6, 1e9, 1e12)])
    x = np.append(x, [8192, 1e12])  # the last of its range each
    x = np.concatenate((x, np.pi / 4 * np.arange(-40, 41))).astype(np.float32)
    z = values_of("unit", x, np.complex64)
    # Not a long double: its library reduces angles with a pi of 66 bits.
    expected = np.exp(1j * x.astype(np.float64))
    assert np.abs(z - expected).max() <= 2.0**-23
    ends = values_of("unit", np.array([np.nan, np.inf, 0, 3e12], np.float32), np.complex64)
    assert np.isnan(ends[:2]).all()
    np.testing.assert_array_equal(ends[2:], [1, 1])


def check_all():
    """Every test of this file, for mutants of what it tests."""
    for dtype in (np.float32, np.float64):
        for name in FUNCTIONS:
            test_relative_error(name, dtype)
        test_ends(dtype)
    test_subnormal_powers_of_two_are_right_in_float64()
    test_unit_at_an_angle()


def test_the_file_is_all_covered():
    text = (_source.folder() / "activations.cuh").read_text()
    assert all(f" {name}(" in text for name in [*FUNCTIONS, "clip", "unit_at_angle"])
