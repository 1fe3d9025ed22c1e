import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from cuscan import ssm


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_a_is_minus_exp_in_float32_or_wider(dtype):
    A_log = np.array([[0.0, -1.5], [2.7109375, 0.5]]).astype(dtype)
    A = ssm.A_from_A_log(A_log)
    wide = np.float64 if dtype is np.float64 else np.float32
    assert A.dtype == wide
    # 2 units in the last place; a bfloat16 exponential would be off by 2^-9.
    np.testing.assert_allclose(A, -np.exp(A_log.astype(np.float64)), rtol=2 * np.finfo(wide).eps)


def test_a_log_vjp_is_the_derivative():
    r = np.random.default_rng(0)
    A_log, grad_A = r.normal(size=(3, 4)), r.normal(size=(3, 4))
    step = 1e-6
    expected = np.zeros((3, 4))
    for i in np.ndindex(3, 4):
        shift = np.zeros((3, 4))
        shift[i] = step
        upper, lower = ((grad_A * ssm.A_from_A_log(A_log + s)).sum() for s in (shift, -shift))
        expected[i] = (upper - lower) / (2 * step)
    np.testing.assert_allclose(ssm.A_from_A_log_vjp(A_log, grad_A), expected, rtol=1e-7, atol=1e-8)


def test_a_log_vjp_has_the_type_of_a_log_and_rounds_once():
    A_log = np.array([0.3, 0.4]).astype(ml_dtypes.bfloat16)
    grad_A = np.array([1.0, 1 / 3], np.float32)
    grad = ssm.A_from_A_log_vjp(A_log, grad_A)
    assert grad.dtype == A_log.dtype
    exact = -grad_A.astype(np.float64) * np.exp(A_log.astype(np.float64))
    np.testing.assert_array_equal(grad, exact.astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("bad", [[1.0, 2.0], 1.0, np.arange(3), np.ones(2, complex), np.ones(2, object), None])
def test_a_log_must_be_a_real_float_array(bad):
    with pytest.raises(TypeError, match="expected a NumPy or CuPy array of a real float type, got "):
        ssm.A_from_A_log(bad)
    with pytest.raises(TypeError, match="real float type"):
        ssm.A_from_A_log_vjp(np.ones(2), bad)


def test_a_log_vjp_names_both_shapes():
    with pytest.raises(ValueError, match=r"grad_A has shape \(3,\), expected A_log's \(2,\)"):
        ssm.A_from_A_log_vjp(np.ones(2), np.ones(3))


def test_s4d_real():
    A_log = ssm.s4d_real_A_log(3, 5)
    assert A_log.dtype == np.float32
    np.testing.assert_allclose(ssm.A_from_A_log(A_log), -np.array([[1, 2, 3, 4, 5]] * 3, np.float32), rtol=3e-7)
    assert ssm.s4d_real_A_log(0, 5).shape == (0, 5)
    assert ssm.s4d_real_A_log(2, 0).shape == (2, 0)
    with pytest.raises(ValueError, match="got 2 and -1"):
        ssm.s4d_real_A_log(2, -1)


def test_delta_bias_is_log_uniform_after_softplus():
    delta = np.logaddexp(ssm.delta_bias(20_000, 1e-3, 1e-1, seed=0).astype(np.float64), 0)
    assert delta.min() >= 1e-3 * (1 - 1e-5)
    assert delta.max() <= 1e-1 * (1 + 1e-5)
    # A fifth of the values in each fifth of the logarithm; 5 standard deviations are 283.
    counts, _ = np.histogram(np.log(delta), bins=5, range=(np.log(0.999e-3), np.log(1.001e-1)))
    np.testing.assert_allclose(counts, 4000, atol=283)


def test_delta_bias_floor_and_far_ends():
    floored = np.logaddexp(ssm.delta_bias(100, 1e-9, 1e-8, delta_floor=1e-4, seed=0).astype(np.float64), 0)
    np.testing.assert_allclose(floored, 1e-4, rtol=1e-5)
    small = np.logaddexp(ssm.delta_bias(100, 1e-9, 1e-9, delta_floor=1e-12, seed=0).astype(np.float64), 0)
    np.testing.assert_allclose(small, 1e-9, rtol=2e-6)
    large = ssm.delta_bias(100, 200.0, 200.0, seed=0)
    np.testing.assert_array_equal(large, np.float32(200))


def test_delta_bias_seed():
    np.testing.assert_array_equal(ssm.delta_bias(7, seed=3), ssm.delta_bias(7, seed=3))
    np.testing.assert_array_equal(ssm.delta_bias(7, seed=np.random.default_rng(3)), ssm.delta_bias(7, seed=3))
    assert (ssm.delta_bias(7, seed=3) != ssm.delta_bias(7, seed=4)).all()


@pytest.mark.parametrize("options", [(0.0, 0.1), (0.1, 0.01), (-1.0, 0.1), (np.nan, 0.1), (0.1, np.inf)])
def test_delta_bias_range(options):
    with pytest.raises(ValueError, match="0 < delta_min <= delta_max"):
        ssm.delta_bias(3, *options)
    with pytest.raises(ValueError, match="delta_floor=0"):
        ssm.delta_bias(3, delta_floor=0.0)


def test_cupy_is_not_imported():
    code = (
        "import sys, numpy; from cuscan import ssm; ssm.A_from_A_log(numpy.ones(1)); "
        "assert not {'cupy', 'ml_dtypes'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
