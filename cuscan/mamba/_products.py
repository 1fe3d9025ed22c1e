"""Matrix products on NumPy and CuPy arrays, with float32 sums whatever the items are (NumPy: float64 for float64).

CuPy's own matmul copies rows that do not lie back to back, and gives its result the operands' type. cuBLAS takes rows
at any distance, writes float32 from 16-bit operands, and adds to what is there: this calls it directly.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np

from cuscan import _arrays

Array = Any
_TYPES = {"float32": 0, "float16": 2, "bfloat16": 14}  # cudaDataType_t
_ONE_TYPE_OF_SUMS = 16  # CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION
_SCALARS = np.array([0, 1], np.float32)  # alpha and beta are read from the host
_ZERO, _ONE = _SCALARS.ctypes.data, _SCALARS.ctypes.data + 4


def module(x: Array) -> Any:
    """NumPy or CuPy, whichever the array belongs to."""
    return sys.modules[type(x).__module__.partition(".")[0]]


def has_cublas() -> bool:
    """Whether CuPy finds cuBLAS, which the extras cuda12 and cuda13 do not install."""
    try:
        from cupy_backends.cuda.libs import cublas  # noqa: F401
    except ImportError:
        return False
    return True


def wide(dtype: Any) -> Any:
    """What items of this dtype are added up in."""
    return np.float64 if dtype == np.float64 else np.float32


def product(a: Array, b: Array, *, dtype: Any = None, out: Array = None, add: bool = False) -> Array:
    """a @ b of two matrices of one type: float32, float16 or bfloat16, NumPy's also float64.

    Each has its rows or its columns at a fixed distance with items back to back, as slices and transposes of C-ordered
    arrays have; others are copied.

    Parameters
    ----------
    a, b : array (rows, inner), array (inner, columns)
        The operands.
    dtype : dtype, optional
        Of the result: the operands' or float32. Default: the operands'.
    out : array (rows, columns), optional
        Where to write, its items of a row back to back.
    add : bool
        Add to what `out` holds, before rounding.

    Returns
    -------
    array
        A fresh one, or `out`.
    """
    xp = module(a)
    rows, columns = a.shape[0], b.shape[1]
    if out is None:
        out = xp.empty((rows, columns), dtype or a.dtype)
    if xp is np:
        real = wide(a.dtype)
        total = np.matmul(a.astype(real, copy=False), b.astype(real, copy=False))
        out[...] = out.astype(real) + total if add else total
    elif out.size:
        _gemm(xp, a, b, out, add=add)
    return out


def _gemm(xp: Any, a: Array, b: Array, out: Array, *, add: bool) -> None:
    """The transpose of out, column by column in memory: b.T @ a.T."""
    from cupy_backends.cuda.libs import cublas

    a, a_turned, a_step = _laid(xp, a)
    b, b_turned, b_step = _laid(xp, b)
    item = _TYPES[_arrays.item_name(a)]
    cublas.gemmEx(
        _handle(xp.cuda.runtime.getDevice()), b_turned, a_turned, b.shape[1], a.shape[0], a.shape[1],
        _ONE, b.data.ptr, item, b_step, a.data.ptr, item, a_step,
        _ONE if add else _ZERO, out.data.ptr, _TYPES[_arrays.item_name(out)], _laid(xp, out)[2],
        cublas.CUBLAS_COMPUTE_32F, cublas.CUBLAS_GEMM_DEFAULT,
    )  # fmt: skip


_handles = threading.local()


def _handle(device: int) -> int:
    """cuBLAS's for this thread and device: CuPy's own may add up parts of a sum in 16 bits, or in TF32 if told to."""
    handle: int | None = getattr(_handles, f"of{device}", None)
    if handle is None:
        from cupy_backends.cuda.libs import cublas

        handle = cublas.create()
        cublas.setMathMode(handle, _ONE_TYPE_OF_SUMS)
        setattr(_handles, f"of{device}", handle)
    return handle


def _laid(xp: Any, x: Array) -> tuple[Array, int, int]:
    """A matrix, whether its columns rather than its rows lie in memory, and their distance in items."""
    for turned, lines in enumerate((x, x.T)):
        step, rest = divmod(int(lines.strides[0]), int(x.itemsize))
        count, length = lines.shape
        if lines.strides[1] == x.itemsize and (count <= 1 or (rest == 0 and step >= length)):
            return x, turned, max(step, length, 1)
    return _laid(xp, xp.array(x, order="C"))


def linear(x: Array, weight: Array, bias: Array = None, *, dtype: Any = None) -> Array:
    """x @ weight.T + bias over the last axis of x (..., in), weight (out, in); rounded once."""
    flat = x.reshape(-1, x.shape[-1])
    out = None
    if bias is not None:
        out = module(x).empty((len(flat), len(weight)), dtype or x.dtype)
        out[...] = bias
    return product(flat, weight.T, dtype=dtype, out=out, add=bias is not None).reshape(*x.shape[:-1], len(weight))
