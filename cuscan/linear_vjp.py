"""linear_scan_vjp: the gradients of linear_scan."""

from __future__ import annotations

import struct
from functools import partial
from math import prod
from typing import Any, NamedTuple

import numpy as np

from . import _arrays, _calls, _linear_backward, _shards, reference_vjp
from ._arrays import Array, Place
from .interop import routed
from .linear import _broadcast, _check_axis, _check_broadcasts


class LinearGradients(NamedTuple):
    """The gradient of each input of `linear_scan`; None for a scalar `a`, and for an `h0` that was not given."""

    a: Any
    b: Any
    h0: Any


@routed
def linear_scan_vjp(
    a: Any,
    h: Any,
    grad_h: Any = None,
    h0: Any = None,
    *,
    grad_last_state: Any = None,
    axis: int | None = None,
    reverse: bool = False,
    mask: Any = None,
    reset: Any = None,
    cu_seqlens: Any = None,
    grad_dtype: Any = None,
) -> LinearGradients:
    """Gradients of `linear_scan` (the vector-Jacobian product), from those of its results.

    With p after the last step the gradient of the last state, and conjugates where the numbers are complex::

        g[t] = p[t+1] + grad_h[t]        p[t] = conj(a[t]) * g[t]
        db[t] = g[t]        da[t] = g[t] * conj(h[t-1])        dh0 = p[0]

    which is a linear recurrence from the last step to the first, evaluated like `linear_scan` and fused with the
    products. There are no atomic additions: the same call gives the same bits every time.

    Parameters
    ----------
    a, h0, axis, reverse, mask, reset, cu_seqlens
        As they were given to `linear_scan`.
    h : array
        What that returned, in a's dtype or in the accumulation type. Beside a scalar `a` its dtype counts as b's.
    grad_h : array, of h's shape, optional
        Gradient of h, in a's dtype or the accumulation type. Zero if absent. Broadcast views are read as they are.
    grad_last_state : array, of the last state's shape, optional
        Gradient of the last state, in the accumulation type. Zero if absent. One of the two must be there.
    grad_dtype : dtype, optional
        Dtype of all gradients: any real one for real inputs, any complex one for complex inputs. Default: that of
        `a` (of `h` beside a scalar) for a and b, the accumulation type for h0.

    Returns
    -------
    LinearGradients
        A named tuple (a, b, h0) of fresh C-contiguous arrays of the inputs' shapes, b's that of h. `a` is None for a
        scalar, and summed over the axes that it was broadcast along; `h0` is None where it was not given, and of the
        state's shape for a scalar. Complex gradients follow torch's convention: for a real loss L of x = u + iv they
        are dL/du + i dL/dv, JAX's are the conjugates. The gradients of a step's inputs are 0 where it is masked or
        outside of all sequences, that of a gate also where no state enters. A sequence without steps hands
        grad_last_state on to h0.

    Raises
    ------
    TypeError
        An argument of the wrong kind or dtype.
    ValueError
        An argument of the wrong shape, an axis out of range, or neither grad_h nor grad_last_state.

    Notes
    -----
    Accumulation and scratch are as in `linear_scan`. Where `a` is broadcast there are sums in the accumulation type
    beside it: if it does not vary in time, at most 8 for each row and chunk; else one for each step of each row, or of
    32 rows if those that lie side by side share their gates and are a multiple of 32.

    Examples
    --------
    >>> import numpy as np
    >>> import cuscan
    >>> a, b = np.array([0.5, 2.0, -1.0]), np.array([1.0, 2.0, 3.0])
    >>> h = cuscan.linear_scan(a, b)
    >>> cuscan.linear_scan_vjp(a, h, np.ones(3))
    LinearGradients(a=array([0., 0., 4.]), b=array([1., 0., 1.]), h0=None)
    """
    reverse = _arrays.check_flag("reverse", reverse)
    if a is None:
        raise TypeError("a must be an array or a scalar, got None")
    if grad_h is None and grad_last_state is None and _shards.current() is None:
        raise ValueError("grad_h or grad_last_state must be given: without both all gradients are zero")
    gate = complex(a) if _arrays.is_python_scalar(a) else None
    initial = complex(h0) if _arrays.is_python_scalar(h0) else None
    inputs = (a if gate is None else None, h, grad_h, h0 if initial is None else None)
    arrays = (*inputs, grad_last_state, mask, reset, cu_seqlens)
    options = _Options(axis, reverse, grad_dtype, gate, initial)
    bits = [None if x is None else struct.pack("2d", x.real, x.imag) for x in (gate, initial)]
    given = _calls.Given(_NAMES, arrays, (type(axis), *options[:3], *bits))
    ready = _READY.get(given.signature) or _READY.put(given.signature, _make_ready(given, options))
    if cu_seqlens is not None and (offsets := given.values(_OFFSETS)) is not None:
        _arrays.check_offsets(offsets, _shards.whole(ready.length))
    gradients = iter(_run_numpy(given.arrays, ready) if given.in_numpy else ready.launches.run(given))
    return LinearGradients(*(None if dtype is None else next(gradients) for dtype in ready.dtypes))


_NAMES = ("a", "h", "grad_h", "h0", "grad_last_state", "mask", "reset", "cu_seqlens")
_OFFSETS = 7


class _Options(NamedTuple):
    axis: Any
    reverse: bool
    grad_dtype: Any
    gate: complex | None  # a, if it is a scalar
    initial: complex | None  # h0, if it is a scalar


class _Ready(NamedTuple):
    """What every call of a signature shares."""

    launches: _calls.Launches
    options: _Options
    item: str
    axis: int
    length: int
    states: tuple[int, ...]  # shape of what enters and leaves
    shared: tuple[int, ...]  # the axes that `a` is broadcast along
    dtypes: tuple[np.dtype[Any] | None, ...]  # of the gradients, None for those that there are not


_READY: _calls.Cache[_Ready] = _calls.Cache()


def _make_ready(given: _calls.Given, options: _Options) -> _Ready:
    """Check what the signature tells, plan and pack."""
    x = given.check(required=("h",))
    a, h = x["a"], x["h"]
    _arrays.check_marks(x["mask"], x["reset"], x["cu_seqlens"])
    leading = ("h", h) if a is None else ("a", a)
    item = _arrays.check_item(*leading, tuple(_arrays.ITEM_CODE))
    state_item = _arrays.accumulation(item)
    axis = _check_axis(options.axis, h, "h")
    shape = tuple(h.shape)
    states, axes = shape[:axis] + shape[axis + 1 :], "h's shape without axis"
    if x["cu_seqlens"] is not None:
        states, axes = (len(x["cu_seqlens"]) - 1, *states), f"sequences and {axes}"
    for name in ("h", "grad_h"):
        if x[name] is not None:
            _arrays.check_same_item(leading, (name, x[name]), (state_item,))
    if x["grad_h"] is not None:
        _arrays.check_shape("grad_h", x["grad_h"], shape, "h's shape")
    for name in ("a", "mask", "reset"):
        if x[name] is not None:
            _check_broadcasts(name, x[name], shape, "h")
    if not item.startswith("complex"):
        for name, scalar in (("a", options.gate), ("h0", options.initial)):
            if scalar is not None and scalar.imag != 0:
                raise TypeError(f"{name} is complex and {leading[0]} is {item}: make that complex, or {name} real")
        if options.initial is not None:
            options = options._replace(initial=options.initial.real)
    for name in ("h0", "grad_last_state"):
        if x[name] is not None:
            if _arrays.item_name(x[name]) != state_item:
                raise TypeError(
                    f"{name} must be {state_item}, the accumulation type of {item}, got {_arrays.item_name(x[name])}"
                )
            _arrays.check_shape(name, x[name], states, axes)
    wide = shape if a is None else (1,) * (len(shape) - a.ndim) + tuple(a.shape)
    shard = _shards.current()
    one_gate = shard is not None and shard.one_gate
    shared = tuple(d for d, size in enumerate(wide) if size == 1 != shape[d] or (d == axis and one_gate))
    wanted = (item, a is not None), (item, True), (state_item, x["h0"] is not None or options.initial is not None)
    dtypes = tuple(
        _arrays.output_item(of, options.grad_dtype, None, "grad_dtype") if there else None for of, there in wanted
    )
    launches = _calls.Launches.of(given)
    ready = _Ready(launches, options, item, axis, shape[axis], states, shared, dtypes)
    return ready._replace(launches=launches.recorded(given, partial(_launch_all, ready=ready)))


def _launch_all(place: Place, x: dict[str, Any], ready: _Ready) -> tuple[Array | None, ...]:
    """Copy what kernels cannot take as it is, allocate and launch; gives the gradients."""
    options, h, state = ready.options, x["h"], np.dtype(_arrays.accumulation(ready.item))
    shapes = (None if x["a"] is None else x["a"].shape, h.shape, ready.states)
    gradients = [
        None if dtype is None else place.allocate(shape, dtype)
        for shape, dtype in zip(shapes, ready.dtypes, strict=True)
    ]
    of_a, of_b, of_h0 = gradients
    shard, rest = _shards.linked(), h.shape[: ready.axis] + h.shape[ready.axis + 1 :]
    sums = None
    if shard is not None and 0 not in rest and of_a is not None and ready.axis in ready.shared:
        sums = _shards.Sums(place, shard, [(of_a.shape, state)])
    total, of_a = of_a, of_a if sums is None else sums.parts[0]
    h0, last = x["h0"], x["grad_last_state"]
    if options.initial is not None:
        h0 = place.allocate(ready.states, state)
        place.assign(h0, options.initial)
    initial = of_h0 if of_h0 is None or of_h0.dtype == state else place.allocate(ready.states, state)
    if initial is not None and (x["cu_seqlens"] is not None or not h.size):
        place.assign(initial, 0 if last is None else last)  # what an empty sequence has
    if h.size:
        a, mask, reset = (_broadcast(x[name], h.shape) for name in ("a", "mask", "reset"))
        arrays = _arrays.usable(place, a, h, x["grad_h"], h0, last, mask, reset, x["cu_seqlens"])
        a, h, grad_h, h0, last, mask, reset, offsets = arrays
        call = _linear_backward.BackwardCall(
            ready.item, options.gate if a is None else a, h, grad_h, h0, last, of_b, of_a, initial, ready.shared,
            ready.axis, options.reverse, mask, reset, offsets,
        )  # fmt: skip
        _linear_backward.backward(place, call)
    else:
        if shard is not None and 0 not in rest:
            flagged = any(x[name] is not None for name in ("mask", "reset", "cu_seqlens"))
            rows = prod(rest)
            layout = _shards.Layout(rows, state, rows * flagged, rows * state.itemsize)
            _shards.pass_by(place, shard, layout, reverse=not options.reverse)
        if sums is not None:
            sums.clear()
        elif of_a is not None:
            place.assign(of_a, 0)
    if sums is not None:
        sums.add([total])
    if initial is not None:
        _shards.only_ours(place, initial, x["cu_seqlens"], at_end=options.reverse)
    if initial is not None and initial is not of_h0 and initial.size:
        _linear_backward.add(place, initial[None], of_h0)
    return total, of_b, of_h0


def _run_numpy(arrays: _calls.Arrays, ready: _Ready) -> tuple[Array, ...]:
    a, h, grad_h, h0, last, mask, reset, offsets = arrays
    options = ready.options
    state = np.dtype(_arrays.accumulation(ready.item))
    gates = a
    if options.gate is not None:
        gates = np.array(options.gate if state.kind == "c" else options.gate.real, state)
    if options.initial is not None:
        h0 = np.full(ready.states, options.initial, state)
    of_a, of_b, of_h0 = reference_vjp.linear_scan_vjp(
        gates, h, grad_h, h0, last, axis=ready.axis, reverse=options.reverse, accumulate=state,
        mask=_broadcast(mask, h.shape), reset=_broadcast(reset, h.shape), cu_seqlens=offsets,
    )  # fmt: skip
    if a is not None:
        of_a = of_a.sum(axis=ready.shared).reshape(a.shape)
        if ready.axis in ready.shared:
            (of_a,) = _shards.totals(of_a)
    _shards.only_ours(None, of_h0, offsets, at_end=options.reverse)
    every = zip((of_a, of_b, of_h0), ready.dtypes, strict=True)
    return tuple(
        reference_vjp.rounded(np.ascontiguousarray(x), dtype).reshape(x.shape)
        for x, dtype in every
        if dtype is not None
    )
