"""linear_scan: the recurrence h[t] = a[t] * h[t-1] + b[t] along an axis."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import _arrays, _launch, _plan, reference
from ._arrays import Array, Call, Place


def linear_scan(
    a: Any,
    b: Any,
    h0: Any = None,
    *,
    axis: int | None = None,
    reverse: bool = False,
    mask: Any = None,
    reset: Any = None,
    cu_seqlens: Any = None,
    return_last_state: bool = False,
    out: Any = None,
    out_dtype: Any = None,
) -> Any:
    """First-order linear recurrence along an axis::

        h[t] = a[t] * h[t-1] + b[t]

    Every other axis holds independent rows. The recurrence is evaluated by an associative scan over the affine maps
    (a, b) (Blelloch, "Prefix sums and their applications", 1990), in an order that depends on the shapes and the
    device alone: the same call gives the same bits every time.

    Parameters
    ----------
    a : array or scalar
        Gates; broadcasts to the shape of `b` without being materialised, and has its dtype. A Python or NumPy scalar
        is a constant gate, taken in the accumulation type: ``linear_scan(0.99, 0.01 * x)`` is an exponential average.
    b : array
        Inputs, of any shape and strides: float16, bfloat16, float32, float64, complex64 or complex128.
    h0 : array or scalar, optional
        State before the first step (the last with `reverse`), of b's shape without `axis`, in the accumulation type.
        A scalar is that state in every row. If absent, the first state is b itself.
    axis : int, optional
        The axis of time. May be left out for one-dimensional `b` only.
    reverse : bool
        Run from the last step to the first: ``h[t] = a[t] * h[t+1] + b[t]``.
    mask, reset, cu_seqlens
        Not supported in this version.
    return_last_state : bool
        Also return the state after the last step (the first with `reverse`), in the accumulation type.
    out : array, optional
        Where to write the result. May be exactly `b`, or exactly `a` where `a` is not broadcast.
    out_dtype : dtype, optional
        Dtype of the result: any real one for real `b`, any complex one for complex `b`. Default: out's or b's.

    Returns
    -------
    h : array
        The states, of b's shape: a fresh C-contiguous array of the caller's kind, or `out`.
    last_state : array
        Only with `return_last_state`: of b's shape without `axis`.

    Raises
    ------
    TypeError
        An argument of the wrong kind or dtype.
    ValueError
        An argument of the wrong shape, an axis out of range, or an `out` that overlaps an input otherwise.

    Notes
    -----
    Accumulation is in float32 for float16, bfloat16 and float32, and in the dtype itself for the others. Scratch is
    two arrays of (rows, chunks) in the accumulation type where the plan cuts time into chunks, else none.

    Examples
    --------
    >>> import numpy as np
    >>> import cuscan
    >>> cuscan.linear_scan(np.array([0.5, 2.0, -1.0]), np.array([1.0, 2.0, 3.0]))
    array([ 1.,  4., -1.])
    >>> x = np.ones((2, 4))
    >>> cuscan.linear_scan(0.5, x, axis=1)
    array([[1.   , 1.5  , 1.75 , 1.875],
           [1.   , 1.5  , 1.75 , 1.875]])
    """
    _arrays.check_not_yet(mask=mask, reset=reset, cu_seqlens=cu_seqlens)
    reverse = _arrays.check_flag("reverse", reverse)
    return_last_state = _arrays.check_flag("return_last_state", return_last_state)
    if b is None or _arrays.is_python_scalar(b):
        raise TypeError(f"b must be an array, got {type(b).__name__}")
    if a is None:
        raise TypeError("a must be an array or a scalar, got None")
    call = Call(a=a, b=b, h0=h0, out=out)
    scalar_h0: complex | None = complex(h0) if _arrays.is_python_scalar(h0) else None
    a_array, b, h0, out = (call.array(name) for name in ("a", "b", "h0", "out"))
    item = _arrays.check_item("b", b, tuple(_arrays.ITEM_CODE))
    state_item = np.dtype(_arrays.accumulation(item))
    axis = _check_axis(axis, b)
    shape = tuple(b.shape)
    rest = shape[:axis] + shape[axis + 1 :]

    if a_array is None:
        gate = complex(a)
        if not item.startswith("complex"):
            _real("a", gate, item)
    else:
        _arrays.check_same_item(("b", b), ("a", a_array))
        try:
            a_array = call.xp.broadcast_to(a_array, shape)
        except ValueError:
            raise ValueError(f"a must broadcast to b's shape {shape}, got {tuple(a_array.shape)}") from None
    if scalar_h0 is not None and not item.startswith("complex"):
        scalar_h0 = _real("h0", scalar_h0, item)
    if h0 is not None:
        if h0.dtype != state_item:
            raise TypeError(
                f"h0 must be {state_item.name}, the accumulation type of {item}, got {_arrays.item_name(h0)}"
            )
        _arrays.check_shape("h0", h0, rest, "b's shape without axis")
    out_item = _arrays.output_item(item, out_dtype, out)
    if out is not None:
        inputs = {name: x for name, x in (("b", b), ("a", call.array("a")), ("h0", h0)) if x is not None}
        _arrays.check_out(out, shape, inputs, may_be=("b", "a"))

    with call.place() as place:
        if scalar_h0 is not None:
            h0 = call.xp.full(rest, scalar_h0, state_item)
        if place is None:
            result = np.empty(shape, out_item) if out is None else out
            last = _run_numpy(gate if a_array is None else a_array, b, h0, result, axis, reverse)
            return (result, last) if return_last_state else result
        result = out if out is not None else place.allocate(shape, out_item)
        last = place.allocate(rest, state_item) if return_last_state else None
        if b.size:
            a_array, b, h0 = _arrays.usable(place, a_array, b, h0)
            target = result if _arrays.is_aligned(result) else place.allocate(shape, out_item)
            _run(place, gate if a_array is None else a_array, b, h0, target, last, axis, reverse)
            if target is not result:
                _arrays.assign(result, target)
        elif last is not None:
            last[...] = 0 if h0 is None else h0
    return (result, last) if return_last_state else result


def _real(name: str, value: complex, item: str) -> float:
    """The value, which must be real."""
    if value.imag != 0:
        raise TypeError(f"{name} is complex and b is {item}: make b complex, or {name} real")
    return value.real


def _check_axis(axis: int | None, b: Array) -> int:
    if axis is None:
        if b.ndim != 1:
            raise ValueError(f"axis must be given for b of {b.ndim} dimensions; it may be left out for 1-D b only")
        return 0
    if isinstance(axis, (bool, np.bool_)) or not isinstance(axis, (int, np.integer)):
        raise TypeError(f"axis must be an int, got {type(axis).__name__}")
    if not -b.ndim <= axis < b.ndim:
        raise ValueError(f"axis must be in [{-b.ndim}, {b.ndim}) for b of shape {tuple(b.shape)}, got {axis}")
    return int(axis) % int(b.ndim)


def _run_numpy(a: Any, b: Array, h0: Array | None, out: Array, axis: int, reverse: bool) -> Array:
    state_item = np.dtype(_arrays.accumulation(_arrays.item_name(b)))
    if isinstance(a, complex):
        a = np.broadcast_to(np.array(a if state_item.kind == "c" else a.real, state_item), b.shape)
    length = b.shape[axis]
    segments = _plan.plan_segments(b.size // length if length else 0, length)
    return reference.linear_scan(a, b, h0, out, axis=axis, reverse=reverse, accumulate=state_item, segments=segments)


def _run(
    place: Place,
    a: Any,
    b: Array,
    h0: Array | None,
    out: Array,
    last: Array | None,
    axis: int,
    reverse: bool,
) -> None:
    """Merge the row axes, plan and launch."""
    arrays = {"input": b, "output": out}
    if not isinstance(a, complex):
        arrays["gate"] = a
    without_time = {"initial": h0, "last": last}
    rest = tuple(size for d, size in enumerate(b.shape) if d != axis)
    strides = {name: tuple(s for d, s in enumerate(x.strides) if d != axis) for name, x in arrays.items()}
    strides.update({name: x.strides for name, x in without_time.items() if x is not None})
    sizes, strides = _arrays.merge_axes(rest, strides, by="input")
    if len(sizes) > _launch.ROW_DIMS:
        # More row axes than the kernels count, none of which can be merged: work on contiguous copies.
        copies = [None if x is None or isinstance(x, complex) else _arrays.copy_of(place, x) for x in (a, b, h0)]
        place.keep(*(x for x in copies if x is not None))
        target = place.allocate(b.shape, out.dtype)
        _run(place, a if copies[0] is None else copies[0], copies[1], copies[2], target, last, axis, reverse)
        _arrays.assign(out, target)
        return

    item, length = _arrays.item_name(b), b.shape[axis]

    def rows(name: str, x: Array, time: int) -> _launch.Rows:
        start = place.pointer(x)
        if reverse and time:
            start, time = start + (length - 1) * time, -time
        return _launch.Rows(start, time, strides[name], _arrays.item_name(x))

    views = {name: rows(name, x, x.strides[axis]) for name, x in arrays.items()}
    views.update({name: rows(name, x, 0) for name, x in without_time.items() if x is not None})
    call = _launch.LinearCall(
        item=item,
        gate=a if isinstance(a, complex) else views["gate"],
        input=views["input"],
        initial=views.get("initial"),
        output=views["output"],
        last=views.get("last"),
        length=length,
        sizes=sizes,
    )
    fastest = abs(strides["input"][-1]) if sizes else None
    problem = _plan.LinearProblem(
        item_bytes=b.dtype.itemsize,
        state_bytes=np.dtype(_arrays.accumulation(item)).itemsize,
        rows=call.rows,
        length=length,
        time_fast=fastest is None or abs(b.strides[axis]) < fastest,
    )
    _launch.linear(place, _plan.plan_linear(problem, place.limits), call)
