"""Parameters of diagonal state-space layers: the state matrix A, and the bias of delta.

Sources: Gu & Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces" (2023), section 3.6;
Gu, Gupta, Goel & Re, "On the Parameterization and Initialization of Diagonal State Space Models" (2022),
section 4.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["A_from_A_log", "A_from_A_log_vjp", "delta_bias", "s4d_real_A_log"]


def A_from_A_log(A_log: Any) -> Any:  # noqa: N802
    """State matrix from its stored logarithm, A = -exp(A_log).

    A is negative, so every gate exp(delta A) is less than 1, and training the logarithm keeps it so. A
    bfloat16 or float16 A_log is widened *before* the exponential: the gate has |delta A| times the relative
    error of A.

    Parameters
    ----------
    A_log : array
        NumPy or CuPy array of any real float type and any shape, usually (channels, state).

    Returns
    -------
    array
        A, of the same kind and shape; float64 for float64, float32 for everything else.

    Raises
    ------
    TypeError
        If A_log is not an array of a real float type.

    Examples
    --------
    >>> import numpy as np
    >>> from cuscan import ssm
    >>> ssm.A_from_A_log(np.log(np.array([[1.0, 2.0, 4.0]])))
    array([[-1., -2., -4.]])
    """
    xp = _module(A_log)
    return -xp.exp(A_log.astype(_wide(A_log.dtype)))


def A_from_A_log_vjp(A_log: Any, grad_A: Any) -> Any:  # noqa: N802
    """Gradient of A_log from the gradient of A = -exp(A_log): dA / dA_log = A, so grad_A_log = grad_A * A.

    Parameters
    ----------
    A_log : array
        As given to :func:`A_from_A_log`.
    grad_A : array
        The gradient of a scalar with respect to A, of A_log's shape and kind.

    Returns
    -------
    array
        The gradient with respect to A_log, of A_log's shape and type; computed in the type of A and rounded
        once.

    Raises
    ------
    TypeError
        If A_log or grad_A is not an array of a real float type.
    ValueError
        If the shapes differ.

    Examples
    --------
    >>> import numpy as np
    >>> from cuscan import ssm
    >>> ssm.A_from_A_log_vjp(np.log(np.array([1.0, 2.0])), np.array([3.0, 5.0]))
    array([ -3., -10.])
    """
    for array in (A_log, grad_A):
        _module(array)
    if A_log.shape != grad_A.shape:
        raise ValueError(f"grad_A has shape {grad_A.shape}, expected A_log's {A_log.shape}")
    A = A_from_A_log(A_log)
    return (grad_A.astype(A.dtype) * A).astype(A_log.dtype)


def s4d_real_A_log(channels: int, state: int) -> NDArray[np.float32]:  # noqa: N802
    """S4D-Real initialisation as Mamba stores it: A_log[d, n] = log(n + 1), so that A[d, n] = -(n + 1).

    Parameters
    ----------
    channels, state : int
        The shape of A.

    Returns
    -------
    numpy.ndarray
        (channels, state), float32.

    Raises
    ------
    ValueError
        If channels or state is negative.

    Examples
    --------
    >>> from cuscan import ssm
    >>> ssm.A_from_A_log(ssm.s4d_real_A_log(2, 3)).round(5)
    array([[-1., -2., -3.],
           [-1., -2., -3.]], dtype=float32)
    """
    if channels < 0 or state < 0:
        raise ValueError(f"channels and state are sizes, got {channels} and {state}")
    return np.tile(np.log(np.arange(1, state + 1)).astype(np.float32), (channels, 1))


def delta_bias(
    channels: int,
    delta_min: float = 1e-3,
    delta_max: float = 1e-1,
    *,
    delta_floor: float = 1e-4,
    seed: int | np.random.Generator | None = None,
) -> NDArray[np.float32]:
    """Bias with which softplus(delta_bias) is log-uniform in [delta_min, delta_max] (Mamba's dt_bias).

    A state forgets over about 1 / |delta A| steps, so the range of delta is the range of time scales. With
    s = max(exp(U(log delta_min, log delta_max)), delta_floor), the bias is the inverse of softplus,

        softplus^-1(s) = log(exp(s) - 1) = s + log(1 - exp(-s)).

    Parameters
    ----------
    channels : int
        The number of values.
    delta_min, delta_max : float
        The range of delta, 0 < delta_min <= delta_max.
    delta_floor : float
        The least value of delta, positive.
    seed : int or numpy.random.Generator, optional
        As for :func:`numpy.random.default_rng`.

    Returns
    -------
    numpy.ndarray
        (channels,), float32.

    Raises
    ------
    ValueError
        If the range is empty or not positive.

    Examples
    --------
    >>> import numpy as np
    >>> from cuscan import ssm
    >>> bias = ssm.delta_bias(1000, seed=0)
    >>> delta = np.log1p(np.exp(bias))
    >>> bool(delta.min() >= 0.99e-3), bool(delta.max() <= 1.01e-1)
    (True, True)
    """
    if not (0 < delta_min <= delta_max < np.inf and 0 < delta_floor < np.inf):
        raise ValueError(
            "expected 0 < delta_min <= delta_max and 0 < delta_floor, all finite, got "
            f"delta_min={delta_min}, delta_max={delta_max}, delta_floor={delta_floor}"
        )
    draws = np.random.default_rng(seed).uniform(np.log(delta_min), np.log(delta_max), channels)
    delta = np.maximum(np.exp(draws), delta_floor)
    return (delta + np.log(-np.expm1(-delta))).astype(np.float32)


def _wide(dtype: Any) -> type[np.floating[Any]]:
    return np.float64 if dtype == np.float64 else np.float32


def _module(array: Any) -> Any:
    """NumPy or CuPy, whichever the array belongs to; CuPy is not imported for it."""
    if getattr(array, "dtype", None) is not None:
        package = type(array).__module__.partition(".")[0]
        real = array.dtype.kind == "f" or array.dtype.name == "bfloat16"  # whose kind is "V"
        if package in ("numpy", "cupy") and real:
            return sys.modules[package]
        raise TypeError(f"expected a NumPy or CuPy array of a real float type, got {package} {array.dtype}")
    raise TypeError(f"expected a NumPy or CuPy array of a real float type, got {type(array).__name__}")
