"""linear_scan: the recurrence h[t] = a[t] * h[t-1] + b[t] along an axis."""

from __future__ import annotations

from dataclasses import replace
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
    mask : array of bool, optional
        Broadcasts to the shape of `b`. True where a step counts; elsewhere it leaves the state unchanged, whatever
        the inputs hold, NaN included, and the result is the carried state.
    reset : array of bool, optional
        Broadcasts to the shape of `b`. The state that enters such a step is zero, `h0` too: h = b there. It acts
        also where `mask` is False.
    cu_seqlens : array (sequences + 1,), optional
        Offsets, int32 or int64, of sequences packed along `axis`: number i is steps cu_seqlens[i] to
        cu_seqlens[i + 1] - 1, and may be empty. `h0` and the last state get a leading axis of sequences; an empty
        one returns its h0, or 0. Steps outside of all are 0. The offsets ascend in [0, length]: on NumPy arrays that
        is checked, on a GPU only with CUSCAN_CHECK=1 in the environment, because it costs a synchronisation.
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
    two arrays of (rows, chunks) in the accumulation type where the plan cuts time into chunks. With `mask`, `reset`
    or `cu_seqlens`, 16 bytes more for each 32 of their steps, before they are broadcast, with `cu_seqlens` 4 bytes a
    step of `axis`, and where time is cut a byte a (row, chunk) and 16 bytes for each 32 chunks of a row.

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
    >>> cuscan.linear_scan(1.0, x, axis=1, cu_seqlens=np.array([0, 1, 4]))   # a sequence of one step, one of three
    array([[1., 1., 2., 3.],
           [1., 1., 2., 3.]])
    """
    reverse = _arrays.check_flag("reverse", reverse)
    return_last_state = _arrays.check_flag("return_last_state", return_last_state)
    if b is None or _arrays.is_python_scalar(b):
        raise TypeError(f"b must be an array, got {type(b).__name__}")
    if a is None:
        raise TypeError("a must be an array or a scalar, got None")
    given = {"out": out, "mask": mask, "reset": reset, "cu_seqlens": cu_seqlens}
    for name, x in given.items():
        if _arrays.is_python_scalar(x):
            raise TypeError(f"{name} must be an array, got {type(x).__name__}")
    call = Call(a=a, b=b, h0=h0, **given)
    scalar_h0: complex | None = complex(h0) if _arrays.is_python_scalar(h0) else None
    a_array, b, h0, out = (call.array(name) for name in ("a", "b", "h0", "out"))
    marks = {name: call.array(name) for name in ("mask", "reset", "cu_seqlens")}
    _arrays.check_marks(**marks)
    item = _arrays.check_item("b", b, tuple(_arrays.ITEM_CODE))
    state_item = np.dtype(_arrays.accumulation(item))
    axis = _check_axis(axis, b)
    shape = tuple(b.shape)
    rest = shape[:axis] + shape[axis + 1 :]
    offsets = marks["cu_seqlens"]
    states = rest if offsets is None else (len(offsets) - 1, *rest)

    if a_array is None:
        gate = complex(a)
        if not item.startswith("complex"):
            _real("a", gate, item)
    else:
        _arrays.check_same_item(("b", b), ("a", a_array))
        a_array = _broadcast(call, "a", a_array, shape)
    for name in ("mask", "reset"):
        if marks[name] is not None:
            marks[name] = _broadcast(call, name, marks[name], shape)
    if scalar_h0 is not None and not item.startswith("complex"):
        scalar_h0 = _real("h0", scalar_h0, item)
    if h0 is not None:
        if h0.dtype != state_item:
            raise TypeError(
                f"h0 must be {state_item.name}, the accumulation type of {item}, got {_arrays.item_name(h0)}"
            )
        axes = "b's shape without axis" if offsets is None else "sequences and b's shape without axis"
        _arrays.check_shape("h0", h0, states, axes)
    out_item = _arrays.output_item(item, out_dtype, out)
    if out is not None:
        inputs = {"b": b, "a": call.array("a"), "h0": h0, **marks}
        _arrays.check_out(out, shape, {name: x for name, x in inputs.items() if x is not None}, may_be=("b", "a"))
    if offsets is not None:
        _arrays.check_offsets(offsets, shape[axis])

    with call.place() as place:
        if scalar_h0 is not None:
            h0 = (np.empty if place is None else place.allocate)(states, state_item)
            h0[...] = scalar_h0
        if place is None:
            result = np.empty(shape, out_item) if out is None else out
            last = _run_numpy(gate if a_array is None else a_array, b, h0, result, axis, reverse, marks)
            return (result, last) if return_last_state else result
        result = out if out is not None else place.allocate(shape, out_item)
        last = place.allocate(states, state_item) if return_last_state else None
        if last is not None and (offsets is not None or not b.size):
            _arrays.assign(last, 0 if h0 is None else h0)  # what an empty sequence returns
        if b.size:
            a_array, b, h0, *values = _arrays.usable(place, a_array, b, h0, *marks.values())
            target = result if _arrays.is_aligned(result) else place.allocate(shape, out_item)
            marks = dict(zip(marks, values, strict=True))
            _run(place, gate if a_array is None else a_array, b, h0, target, last, axis, reverse, marks)
            if target is not result:
                _arrays.assign(result, target)
    return (result, last) if return_last_state else result


def _broadcast(call: Call, name: str, x: Array, shape: tuple[int, ...]) -> Array:
    try:
        return call.xp.broadcast_to(x, shape)
    except ValueError:
        raise ValueError(f"{name} must broadcast to b's shape {shape}, got {tuple(x.shape)}") from None


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


def _run_numpy(
    a: Any, b: Array, h0: Array | None, out: Array, axis: int, reverse: bool, marks: dict[str, Array | None]
) -> Array:
    state_item = np.dtype(_arrays.accumulation(_arrays.item_name(b)))
    if isinstance(a, complex):
        a = np.broadcast_to(np.array(a if state_item.kind == "c" else a.real, state_item), b.shape)
    length = b.shape[axis]
    segments = _plan.plan_segments(b.size // length if length else 0, length)
    return reference.linear_scan(
        a, b, h0, out, axis=axis, reverse=reverse, accumulate=state_item, segments=segments, **marks
    )


def _run(
    place: Place,
    a: Any,
    b: Array,
    h0: Array | None,
    out: Array,
    last: Array | None,
    axis: int,
    reverse: bool,
    marks: dict[str, Array | None],
) -> None:
    """Merge the row axes, plan and launch."""
    offsets = marks["cu_seqlens"]
    flags = {name: x for name in ("mask", "reset") if (x := marks[name]) is not None}
    arrays = {"input": b, "output": out, **flags}
    if not isinstance(a, complex):
        arrays["gate"] = a
    without_time = {"initial": h0, "last": last}
    rest = tuple(size for d, size in enumerate(b.shape) if d != axis)
    strides = {name: tuple(s for d, s in enumerate(x.strides) if d != axis) for name, x in arrays.items()}
    first = 0 if offsets is None else 1  # the axis of sequences
    strides.update({name: x.strides[first:] for name, x in without_time.items() if x is not None})
    sizes, strides = _arrays.merge_axes(rest, strides, by="input")
    if len(sizes) > _launch.ROW_DIMS:
        # More row axes than the kernels count, none of which can be merged: work on contiguous copies.
        given = (a, b, h0, *flags.values())
        copies = [x if x is None or isinstance(x, complex) else _arrays.copy_of(place, x) for x in given]
        place.keep(*(x for x in copies if x is not None and not isinstance(x, complex)))
        target = place.allocate(b.shape, out.dtype)
        a, b, h0, *values = copies
        _run(place, a, b, h0, target, last, axis, reverse, marks | dict(zip(flags, values, strict=True)))
        _arrays.assign(out, target)
        return

    item, length = _arrays.item_name(b), b.shape[axis]

    def rows(name: str, x: Array, time: int) -> _launch.Rows:
        return _launch.Rows(place.pointer(x), time, strides[name], _arrays.item_name(x))

    def along(name: str, x: Array) -> _launch.Rows:
        view = rows(name, x, x.strides[axis])
        return replace(view, start=view.start + (length - 1) * view.time, time=-view.time) if reverse else view

    views = {name: along(name, x) for name, x in arrays.items()}
    for name, x in without_time.items():
        if x is not None:
            views[name] = rows(name, x, 0 if offsets is None else x.strides[0])
    segments = None
    if flags or offsets is not None:
        segments = _launch.Segments(views.get("mask"), views.get("reset"), offsets, reverse)
    call = _launch.LinearCall(
        item=item,
        gate=a if isinstance(a, complex) else views["gate"],
        input=views["input"],
        initial=views.get("initial"),
        output=views["output"],
        last=views.get("last"),
        length=length,
        sizes=sizes,
        segments=segments,
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
