"""selective_scan_vjp: the gradients of selective_scan."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np

from . import _arrays, _calls, _plan, _selective_backward, _shards, reference_vjp, selective
from ._arrays import Array, Place
from ._plan import SelectiveKind
from .interop import routed


class SelectiveGradients(NamedTuple):
    """The gradient of each input of `selective_scan`, None where there was none."""

    u: Any
    delta: Any
    A: Any
    B: Any
    C: Any
    D: Any
    z: Any
    delta_bias: Any
    h0: Any


@routed
def selective_scan_vjp(
    u: Any,
    delta: Any,
    A: Any,
    B: Any,
    C: Any,
    D: Any = None,
    z: Any = None,
    delta_bias: Any = None,
    delta_softplus: bool = False,
    *,
    grad_out: Any = None,
    grad_last_state: Any = None,
    states: Any = None,
    h0: Any = None,
    reverse: bool = False,
    mask: Any = None,
    reset: Any = None,
    cu_seqlens: Any = None,
    delta_limit: tuple[float, float] | None = None,
    layout: str = "bld",
    grad_dtype: Any = None,
) -> SelectiveGradients:
    """Gradients of `selective_scan` (the vector-Jacobian product), from those of its results.

    With dy = grad_out * silu(z), p after the last step that of the last state, and the equations of `selective_scan`::

        g[t] = p[t+1] + C[t] * dy[t]        p[t] = exp(delta[t] * A) * g[t]        q[t] = p[t] * h[t-1]
        dC = dy * h     dB = sum over the group's channels (g * delta * u)     du = delta * sum(B * g) + D * dy
        ddelta = sum(A * q) + u * sum(B * g), through delta_limit, softplus and delta_bias
        dA = sum(delta * q)     dD = sum(dy * u)     dz = grad_out * (sum(C * h) + D * u) * silu'(z)     dh0 = p[0]

    The states in between are computed again from the saved ones, STATE_INTERVAL steps at a time. There are no atomic
    additions: the same call gives the same bits every time.

    Parameters
    ----------
    u, delta, A, B, C, D, z, delta_bias, delta_softplus, h0, reverse, mask, reset, cu_seqlens, delta_limit, layout
        As they were given to `selective_scan`.
    grad_out : array, of u's shape, optional
        Gradient of y, in u's dtype or the real accumulation type. Zero if absent.
    grad_last_state : array, of the last state's shape, optional
        Gradient of the last state, in the accumulation type. Zero if absent. One of the two must be there.
    states : array (batch, ceil(length / STATE_INTERVAL), channels, state), optional
        What `selective_scan` gave with `return_states`. Without it the scan is run again.
    grad_dtype : dtype, optional
        Dtype of the gradients of real inputs: float16, bfloat16, float32 or float64. Default: each its input's.

    Returns
    -------
    SelectiveGradients
        A named tuple (u, delta, A, B, C, D, z, delta_bias, h0) of fresh C-contiguous arrays of the inputs' shapes,
        None where the input was None. Gradients of complex inputs follow torch's convention: for a real loss L of
        x = a + ib they are dL/da + i dL/db; JAX's are the conjugates. The gradients of a step's inputs are 0 where it
        is masked or outside of all sequences; delta's is 0 where delta_limit clips. A sequence without steps hands
        grad_last_state on to h0.

    Raises
    ------
    TypeError, ValueError
        As `selective_scan`.

    Notes
    -----
    Scratch, in the accumulation type: an array of B's and one of C's shape for each 32 channels of a group (16 in
    complex64 and float64); an array (parts, channels, state + 2), twice the state more where B and C are constant
    in time, where parts * channels / 32 is at most 16 a multiprocessor; two arrays (batch, summaries, state,
    channels) where time is cut into chunks, each of one to some summaries; where there are more than 16 states (8
    in complex64 and float64) three arrays (parts, channels, state + 32), twice the state more for each of B and C that
    is constant in time, of whole tiles; and the marks of `selective_scan`. Where the states are not given, they and
    what the scan itself takes; where they are not contiguous, a copy; with `grad_dtype` an array of h0's shape.

    Examples
    --------
    >>> import numpy as np
    >>> import cuscan
    >>> rng = np.random.default_rng(0)
    >>> u, delta, grad_y = rng.random((3, 3, 64, 5), dtype=np.float32)     # batch 3, length 64, 5 channels
    >>> B, C = rng.random((2, 3, 64, 16), dtype=np.float32)                # 16 states
    >>> A = -np.ones((5, 16), np.float32)
    >>> y, states = cuscan.selective_scan(u, delta, A, B, C, return_states=True)
    >>> grads = cuscan.selective_scan_vjp(u, delta, A, B, C, grad_out=grad_y, states=states)
    >>> grads.u.shape, grads.A.shape, grads.B.shape, grads.D
    ((3, 64, 5), (5, 16), (3, 64, 16), None)
    """
    delta_softplus = _arrays.check_flag("delta_softplus", delta_softplus)
    reverse = _arrays.check_flag("reverse", reverse)
    selective.check_layout(layout)
    limits = _arrays.check_limits("delta_limit", delta_limit)
    arrays = (u, delta, A, B, C, D, z, delta_bias, h0, mask, reset, cu_seqlens, grad_out, grad_last_state, states)
    # 0.0 and -0.0 are equal, and not the same.
    given = _calls.Given(_NAMES, arrays, (repr(limits), delta_softplus, reverse, layout, grad_dtype))
    ready = _READY.get(given.signature)
    if ready is None:
        options = selective.Options(delta_softplus, limits, reverse)
        ready = _READY.put(given.signature, _make_ready(given, options, layout, grad_dtype))
    gradients = iter(selective.results_of(given, cu_seqlens, ready, _run_numpy, _launch_all))
    return SelectiveGradients(*(None if dtype is None else next(gradients) for dtype in ready.dtypes))


_NAMES = (
    *SelectiveGradients._fields, "mask", "reset", "cu_seqlens", "grad_out", "grad_last_state", "states"
)  # fmt: skip
_REQUIRED = _NAMES[:5]


class _Ready(NamedTuple):
    """What every call of a signature shares."""

    launches: _calls.Launches
    options: selective.Options
    layout: str
    kind: SelectiveKind
    sizes: selective.Sizes
    dtypes: tuple[np.dtype[Any] | None, ...]  # of the gradients, None where there is no input


_READY: _calls.Cache[_Ready] = _calls.Cache()


def _make_ready(given: _calls.Given, options: selective.Options, layout: str, grad_dtype: Any) -> _Ready:
    """Check what the signature tells, plan and pack."""
    x = given.check(_REQUIRED)
    if x["grad_out"] is None and x["grad_last_state"] is None and _shards.current() is None:
        raise ValueError("grad_out or grad_last_state must be given: without both all gradients are zero")
    sizes = selective.check_shapes(x, layout)
    kind = selective.check_types(x)
    inputs = (x[name] for name in SelectiveGradients._fields)
    dtypes = tuple(None if each is None else _gradient_dtype(each, grad_dtype) for each in inputs)
    ready = _Ready(_calls.Launches.of(given), options, layout, kind, sizes, dtypes)
    _check_gradients(x, sizes, kind)
    if sizes.at_once:
        return ready
    return ready._replace(launches=ready.launches.recorded(given, partial(_launch_all, ready=ready)))


def _check_gradients(arrays: dict[str, Array], sizes: selective.Sizes, kind: SelectiveKind) -> None:
    grad_out, last, states = (arrays[name] for name in ("grad_out", "grad_last_state", "states"))
    if grad_out is not None:
        _arrays.check_shape("grad_out", grad_out, tuple(arrays["u"].shape), "u's")
        _arrays.check_same_item(("u", arrays["u"]), ("grad_out", grad_out), (kind.real,))
    if last is not None:
        shape = (sizes.states, sizes.channels, sizes.state)
        rows = "batch" if arrays["cu_seqlens"] is None else "sequences"
        _arrays.check_shape("grad_last_state", last, shape, f"({rows}, channels, state)")
        _arrays.check_item("grad_last_state", last, (kind.state,))
    if states is not None:
        _arrays.check_shape("states", states, sizes.saved, "(batch, ceil(length / STATE_INTERVAL), channels, state)")
        _arrays.check_item("states", states, (kind.state,))


def _gradient_dtype(x: Array, grad_dtype: Any) -> np.dtype[Any]:
    if x.dtype.kind == "c" or grad_dtype is None:
        dtype: np.dtype[Any] = x.dtype
        return dtype
    return _arrays.output_item(_arrays.item_name(x), grad_dtype, None, "grad_dtype")


def _ordered(name: str, gradient: Array, x: Array, layout: str) -> Array:
    """A gradient of views(x) as one of x."""
    if gradient.ndim == 4 and layout == "bdl":
        gradient = gradient.transpose(0, 2, 3, 1)
    elif name in ("u", "delta", "z") and layout == "bdl":
        gradient = gradient.transpose(0, 2, 1)
    return np.ascontiguousarray(gradient.reshape(x.shape))


def _run_numpy(x: dict[str, Any], ready: _Ready) -> tuple[Array, ...]:
    options, views = ready.options, selective.views(x, ready.layout)
    found = reference_vjp.selective_scan_vjp(
        *(views[name] for name in (*SelectiveGradients._fields, "grad_out", "grad_last_state", "states")),
        delta_softplus=options.softplus, delta_limit=options.limits, reverse=options.reverse,
        accumulate=np.dtype(ready.kind.state), mask=x["mask"], reset=x["reset"], cu_seqlens=x["cu_seqlens"],
    )  # fmt: skip
    sums = [name for name, each in found.items() if _is_sum(name, each)]
    found |= zip(sums, _shards.totals(*(found[name] for name in sums)), strict=True)
    _shards.only_ours(None, found["h0"], x["cu_seqlens"], at_end=options.reverse)
    return tuple(
        reference_vjp.rounded(_ordered(name, found[name], x[name], ready.layout), dtype)
        for name, dtype in zip(SelectiveGradients._fields, ready.dtypes, strict=True)
        if dtype is not None
    )


def _launch_all(place: Place, x: dict[str, Any], ready: _Ready) -> tuple[Array, ...]:
    """Copy what kernels cannot take as it is, allocate, plan and launch; gives the gradients."""
    sizes, options, layout = ready.sizes, ready.options, ready.layout
    x = dict(zip(x, _arrays.usable(place, *x.values()), strict=True))
    gradients = {
        name: place.allocate(tuple(x[name].shape), dtype)
        for name, dtype in zip(SelectiveGradients._fields, ready.dtypes, strict=True)
        if dtype is not None
    }
    results, shard = tuple(gradients.values()), _shards.linked()
    sums: dict[str, Array] = {}
    if shard is not None:
        sums = {name: each for name, each in gradients.items() if _is_sum(name, each)}
        types = [np.dtype(ready.kind.real if name in ("D", "delta_bias") else ready.kind.state) for name in sums]
        ours = _shards.Sums(place, shard, [(x.shape, dtype) for x, dtype in zip(sums.values(), types, strict=True)])
        gradients |= zip(sums, ours.parts, strict=True)
    for name in {"u", "delta", "z"} & gradients.keys():
        gradients[name] = selective.time_second(gradients[name], layout)
    x = selective.views(x, layout)
    if sizes.at_once:
        _stateless(x, gradients)
    else:
        _launch_gradients(place, x, gradients, ready)
        if sums and not sizes.length:
            ours.clear()
    if sums:
        ours.add([*sums.values()])
    if "h0" in gradients:
        _shards.only_ours(place, gradients["h0"], x["cu_seqlens"], at_end=options.reverse)
    return results


def _is_sum(name: str, x: Array) -> bool:
    """Whether a gradient is a sum over time."""
    return name in ("A", "D", "delta_bias") or (name in ("B", "C") and x.ndim == 2)


def _launch_gradients(place: Place, x: dict[str, Any], gradients: dict[str, Array], ready: _Ready) -> None:
    """The same without copies and sums over ranks."""
    sizes, options, shard = ready.sizes, ready.options, _shards.linked()
    size = (sizes.batch, sizes.length, sizes.channels, sizes.state, sizes.groups)
    states = x["states"]
    if states is None:
        # y goes where the gradient of u will be.
        states = place.allocate(sizes.saved, ready.kind.state)
        selective.run(place, x, gradients["u"], None, states, ready.kind, sizes, options)
    elif not states.flags.c_contiguous:
        states = _arrays.copy_of(place, states)
    if not sizes.length and shard is not None:
        flags = sizes.batch * any(x[name] is not None for name in ("mask", "reset", "cu_seqlens"))
        layout = _shards.Layout(sizes.batch * sizes.channels * sizes.state, np.dtype(ready.kind.state), flags, 0)
        _shards.pass_by(place, shard, layout, reverse=not options.reverse)
        if "h0" in gradients:
            place.assign(gradients["h0"], 0)
        return
    segments = selective.segments_of(place, x, options.reverse)
    kind = _plan.backward_kind(selective.oriented(ready.kind, x["u"]))
    plan = _plan.plan_backward(_plan.SelectiveProblem(kind, *size), place.limits)
    call = _selective_backward.BackwardCall(
        kind=kind, u=x["u"], delta=x["delta"], A=x["A"], B=x["B"], C=x["C"], D=x["D"], z=x["z"],
        delta_bias=x["delta_bias"], initial=x["h0"], states=states, grad_output=x["grad_out"],
        grad_last=x["grad_last_state"], gradients=gradients, time_last=ready.layout == "bdl", groups=sizes.groups,
        softplus=options.softplus, limits=options.limits, segments=segments,
    )  # fmt: skip
    _selective_backward.backward(place, plan, call, -1 if options.reverse else 1)


@np.errstate(all="ignore")
def _stateless(x: dict[str, Any], gradients: dict[str, Array]) -> None:
    """No state or no step, so nothing to launch: y is D u silu(z), and h0 the last state."""
    for gradient in gradients.values():
        gradient[...] = 0
    if "h0" in gradients and x["grad_last_state"] is not None:
        gradients["h0"][...] = x["grad_last_state"]
    if not x["u"].size:
        return
    counts = selective.counted(x)
    # Without grad_out dy is 0, as the gradient of u so far, and D's gradient 0 * u: NaN where u is.
    received = gradients["u"] if x["grad_out"] is None else x["grad_out"]
    u, dy = (each.astype("float64") for each in (x["u"], received))
    y = 0.0 if x["D"] is None else x["D"].astype("float64") * u
    if x["z"] is not None:
        z = x["z"].astype("float64")
        rises = 1 / (1 + np.exp(-z))
        gradients["z"][...] = _where(counts, dy * y * (rises * (1 + z / (1 + np.exp(z)))))
        dy = dy * z * rises
    if x["D"] is not None:
        gradients["u"][...] = _where(counts, dy * x["D"].astype("float64"))
        gradients["D"][...] = _where(counts, dy * u).sum((0, 1))


def _where(counts: Array | None, values: Array) -> Array:
    if counts is not None:
        values[~counts] = 0
    return values
