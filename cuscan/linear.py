"""linear_scan: the recurrence h[t] = a[t] * h[t-1] + b[t] along an axis."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, NamedTuple

import numpy as np

from . import _arrays, _calls, _launch, _plan, _shards, reference
from ._arrays import Array, Place
from .interop import routed


@routed
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
    Accumulation is in float32 for float16, bfloat16 and float32, and in the dtype itself for the others. Where
    the plan cuts time into tiles that blocks take in one pass, which is for float32 and, along time, for 16-bit types,
    scratch is 16 bytes, 16 more a (row, tile) and 8 a (row, group of 32 tiles; of 1 to 16 where rows lie side by side);
    where it cuts time into chunks, two arrays of (rows, chunks) in the accumulation type. With `mask`, `reset` or
    `cu_seqlens`, 16 bytes more for each 32 of their steps, before they are broadcast, with `cu_seqlens` 4 bytes a step
    of `axis`, and with chunks a byte a (row, chunk) and 16 bytes for each 32 chunks of a row.

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
    if a is None:
        raise TypeError("a must be an array or a scalar, got None")
    gate = complex(a) if _arrays.is_python_scalar(a) else None
    initial = complex(h0) if _arrays.is_python_scalar(h0) else None
    arrays = (a if gate is None else None, b, h0 if initial is None else None, out, mask, reset, cu_seqlens)
    # What is equal need not be the same: 0.0 and -0.0, 1 and True.
    key = type(axis), axis, reverse, return_last_state, out_dtype, repr(gate), repr(initial)
    given = _calls.Given(_NAMES, arrays, key)
    ready = _READY.get(given.signature)
    if ready is None:
        options = _Options(axis, reverse, return_last_state, out_dtype, gate, initial)
        ready = _READY.put(given.signature, _make_ready(given, options))
    ready.launches.check_apart(given)
    if cu_seqlens is not None and (offsets := given.values(_OFFSETS)) is not None:
        _arrays.check_offsets(offsets, _shards.whole(ready.length))
    results = _run_numpy(given.arrays, ready) if given.in_numpy else ready.launches.run(given)
    return results if return_last_state else results[0]


_NAMES = ("a", "b", "h0", "out", "mask", "reset", "cu_seqlens")
_OFFSETS = 6


class _Options(NamedTuple):
    axis: Any
    reverse: bool
    return_last_state: bool
    out_dtype: Any
    gate: complex | None  # a, if it is a scalar
    initial: complex | None  # h0, if it is a scalar


class _Ready(NamedTuple):
    """What every call of a signature shares."""

    launches: _calls.Launches
    options: _Options
    axis: int
    length: int
    output: np.dtype[Any]
    states: tuple[int, ...]  # shape of what enters and leaves


_READY: _calls.Cache[_Ready] = _calls.Cache()


def _make_ready(given: _calls.Given, options: _Options) -> _Ready:
    """Check what the signature tells, plan and pack."""
    x = given.check(required=("b",))
    a, b, h0, out = (x[name] for name in ("a", "b", "h0", "out"))
    _arrays.check_marks(x["mask"], x["reset"], x["cu_seqlens"])
    item = _arrays.check_item("b", b, tuple(_arrays.ITEM_CODE))
    state_item = _arrays.accumulation(item)
    axis = _check_axis(options.axis, b)
    shape = tuple(b.shape)
    states = shape[:axis] + shape[axis + 1 :]
    axes = "b's shape without axis"
    if x["cu_seqlens"] is not None:
        states, axes = (len(x["cu_seqlens"]) - 1, *states), f"sequences and {axes}"
    if a is not None:
        _arrays.check_same_item(("b", b), ("a", a))
    for name in ("a", "mask", "reset"):
        if x[name] is not None:
            _check_broadcasts(name, x[name], shape)
    if not item.startswith("complex"):
        for name, scalar in (("a", options.gate), ("h0", options.initial)):
            if scalar is not None and scalar.imag != 0:
                raise TypeError(f"{name} is complex and b is {item}: make b complex, or {name} real")
        if options.initial is not None:
            options = options._replace(initial=options.initial.real)
    if h0 is not None:
        if _arrays.item_name(h0) != state_item:
            raise TypeError(f"h0 must be {state_item}, the accumulation type of {item}, got {_arrays.item_name(h0)}")
        _arrays.check_shape("h0", h0, states, axes)
    output = _arrays.output_item(item, options.out_dtype, out)
    if out is not None:
        _arrays.check_out(out, shape)
    launches = _calls.Launches.of(given, written=("out",), may_be=("b", "a"))
    ready = _Ready(launches, options, axis, shape[axis], output, states)
    return ready._replace(launches=launches.recorded(given, partial(_launch_all, ready=ready)))


def _check_broadcasts(name: str, x: Array, shape: tuple[int, ...], of: str = "b") -> None:
    try:
        broadcasts = np.broadcast_shapes(x.shape, shape) == shape
    except ValueError:
        broadcasts = False
    if not broadcasts:
        raise ValueError(f"{name} must broadcast to {of}'s shape {shape}, got {tuple(x.shape)}")


def _launch_all(place: Place, x: dict[str, Any], ready: _Ready) -> tuple[Array, Array | None]:
    """Copy what kernels cannot take as it is, allocate and launch; gives the result and the last state."""
    options, b = ready.options, x["b"]
    state_item = np.dtype(_arrays.accumulation(_arrays.item_name(b)))
    result = place.allocate(b.shape, ready.output) if x["out"] is None else x["out"]
    last = place.allocate(ready.states, state_item) if options.return_last_state else None
    h0 = x["h0"]
    if options.initial is not None:
        h0 = place.allocate(ready.states, state_item)
        place.assign(h0, options.initial)
    if last is not None and (x["cu_seqlens"] is not None or not b.size):
        place.assign(last, 0 if h0 is None else h0)  # what an empty sequence returns
    if b.size:
        a, mask, reset = (_broadcast(x[name], b.shape) for name in ("a", "mask", "reset"))
        a, b, h0, *marks = _arrays.usable(place, a, b, h0, mask, reset, x["cu_seqlens"])
        named = dict(zip(("mask", "reset", "cu_seqlens"), marks, strict=True))
        target = result if _arrays.is_aligned(result) else place.allocate(result.shape, ready.output)
        _run(place, options.gate if a is None else a, b, h0, target, last, ready.axis, options.reverse, named)
        if target is not result:
            place.assign(result, target)
    elif (shard := _shards.linked()) is not None and (rows := prod(b.shape[: ready.axis] + b.shape[ready.axis + 1 :])):
        flagged = any(x[name] is not None for name in ("mask", "reset", "cu_seqlens"))
        layout = _shards.Layout(rows, state_item, rows * flagged, 0)
        _shards.pass_by(place, shard, layout, reverse=options.reverse)
    if last is not None:
        _shards.only_ours(place, last, x["cu_seqlens"], at_end=not options.reverse)
    return result, last


def _broadcast(x: Array | None, shape: tuple[int, ...]) -> Array | None:
    return None if x is None else np.broadcast_to(x, shape)


def _check_axis(axis: int | None, x: Array, name: str = "b") -> int:
    if axis is None:
        if x.ndim != 1:
            raise ValueError(
                f"axis must be given for {name} of {x.ndim} dimensions; it may be left out for 1-D {name} only"
            )
        return 0
    if isinstance(axis, (bool, np.bool_)) or not isinstance(axis, (int, np.integer)):
        raise TypeError(f"axis must be an int, got {type(axis).__name__}")
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis must be in [{-x.ndim}, {x.ndim}) for {name} of shape {tuple(x.shape)}, got {axis}")
    return int(axis) % int(x.ndim)


def _run_numpy(arrays: _calls.Arrays, ready: _Ready) -> tuple[Array, Array]:
    a, b, h0, out, mask, reset, offsets = arrays
    options = ready.options
    state_item = np.dtype(_arrays.accumulation(_arrays.item_name(b)))
    if options.gate is not None:
        a = np.array(options.gate if state_item.kind == "c" else options.gate.real, state_item)
    if options.initial is not None:
        h0 = np.full(ready.states, options.initial, state_item)
    result = np.empty(b.shape, ready.output) if out is None else out
    last = reference.linear_scan(
        np.broadcast_to(a, b.shape), b, h0, result, axis=ready.axis, reverse=options.reverse, accumulate=state_item,
        segments=_plan.plan_segments(b.size // ready.length if ready.length else 0, ready.length),
        mask=_broadcast(mask, b.shape), reset=_broadcast(reset, b.shape), cu_seqlens=offsets,
        reach=_shards.reach(reverse=options.reverse),
    )  # fmt: skip
    _shards.only_ours(None, last, offsets, at_end=not options.reverse)
    return result, last


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
    offsets, shard = marks["cu_seqlens"], _shards.linked()
    packed = offsets is not None
    flags = {name: x for name in ("mask", "reset") if (x := marks[name]) is not None}
    arrays = {"input": b, "output": out, **flags}
    if not isinstance(a, complex):
        arrays["gate"] = a
    rest = tuple(size for d, size in enumerate(b.shape) if d != axis)
    strides = {name: tuple(s for d, s in enumerate(x.strides) if d != axis) for name, x in arrays.items()}
    without_time, carry = {"initial": h0, "last": last}, None
    if shard is not None:
        state = np.dtype(_arrays.accumulation(_arrays.item_name(b)))
        strides["message"] = _shards.in_order(rest, state)
        if shard.before(reverse=reverse):
            carry = without_time["carry"] = place.allocate(rest, state)
        if packed:
            offsets = _shards.local_offsets(place, shard, offsets)
            if carry is not None and h0 is not None:
                without_time["initial"] = _arrays.copy_of(place, h0)
        else:
            without_time["initial"] = h0 if carry is None else carry
            without_time["last"] = last if shard.holds(0 if reverse else -1) else None
    first = {name: 1 if packed and name in ("initial", "last") else 0 for name in without_time}  # the axis of sequences
    strides.update({name: x.strides[first[name] :] for name, x in without_time.items() if x is not None})
    sizes, strides = _arrays.merge_axes(rest, strides, by="input")
    if len(sizes) > _launch.ROW_DIMS:
        # More row axes than the kernels count, none of which can be merged: work on contiguous copies.
        given = (a, b, h0, *flags.values())
        copies = [x if x is None or isinstance(x, complex) else _arrays.copy_of(place, x) for x in given]
        place.keep(*(x for x in copies if x is not None and not isinstance(x, complex)))
        target = place.allocate(b.shape, out.dtype)
        a, b, h0, *values = copies
        _run(place, a, b, h0, target, last, axis, reverse, marks | dict(zip(flags, values, strict=True)))
        place.assign(out, target)
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
            views[name] = rows(name, x, x.strides[0] if first[name] else 0)
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
        pairs=segments is None and _launch.may_pair(item, axis, [b] if isinstance(a, complex) else [b, a]),
    )
    fastest = abs(strides["input"][-1]) if sizes else None
    problem = _plan.LinearProblem(
        item_bytes=b.dtype.itemsize,
        state_bytes=np.dtype(_arrays.accumulation(item)).itemsize,
        rows=call.rows,
        length=length,
        time_fast=fastest is None or abs(b.strides[axis]) < fastest,
        pairs=call.pairs,
    )
    with _shards.split(shard):
        plan = _plan.plan_linear(problem, place.limits)
    if shard is not None or segments is not None:
        plan = _plan.with_summaries(plan, problem, place.limits)
    if shard is None:
        _launch.linear(place, plan, call)
        return
    own = None if packed or carry is not None else views.get("initial")
    link = _shards.Link(place, shard, reverse, strides["message"], own, views.get("carry"))

    def enter(made: _launch.Marks | None) -> _launch.Rows | None:
        if not packed or carry is None or made is None:
            return call.initial
        if made.ids:
            # Packed rows take up states where sequences start, and so does the one that goes on here.
            at = length if reverse else 0
            _calls.do(place, _shards.open_start, [made.words], [offsets], at=at)
            if (initial := without_time["initial"]) is not None:
                _calls.do(place, _shards.enter_sequence, [initial], [carry, offsets], at=at)
                return call.initial
        return link.carry

    _launch.linear(place, plan, call, link=link, linked=enter)
