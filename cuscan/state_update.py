"""selective_state_update: one step of selective_scan, for decoding, with the state changed in place."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from . import _arrays, _calls, _launch, _plan, reference
from ._arrays import Array, Place
from ._plan import UpdateKind
from .interop import routed

_NAMES = ("state", "x", "dt", "A", "B", "C", "D", "z", "dt_bias", "state_batch_indices", "out")
_REQUIRED, _INDICES, _OUT = _NAMES[:6], 9, 10


@routed
def selective_state_update(
    state: Any,
    x: Any,
    dt: Any,
    A: Any,
    B: Any,
    C: Any,
    D: Any = None,
    z: Any = None,
    dt_bias: Any = None,
    dt_softplus: bool = False,
    *,
    state_batch_indices: Any = None,
    dt_limit: tuple[float, float] | None = None,
    out: Any = None,
    out_dtype: Any = None,
) -> Any:
    """One step of the selective state-space scan, in place (Gu and Dao, "Mamba", 2023, algorithm 2)::

        dt    = clip(softplus(dt + dt_bias), *dt_limit)        each part optional
        state = exp(dt * A) * state + dt * B * x
        y     = (sum over the state of C * state  +  D * x) * silu(z)

    It is `selective_scan` of length 1 with h0 = state, by the same arithmetic: a float32 state has the very bits that
    a scan with its time in the thread gives it. y is made of the state before that is rounded to its own dtype. The
    same call gives the same bits every time.

    Parameters
    ----------
    state : array (slots, channels, state)
        Changed in place: float32, bfloat16 or float16, float64 if x is, complex64 if A is.
    x : array (batch, channels)
        Inputs: float16, bfloat16, float32 or float64.
    dt : array (batch, channels)
        Step sizes, in x's dtype or float32.
    A : array (channels, state)
        Rates, of any real floating dtype (read in the accumulation type), or complex64.
    B, C : array (batch, state) or (batch, groups, state)
        Input and output couplings, in x's dtype or float32, or complex64 with complex A. Channel d uses group
        d // (channels / groups).
    D : array (channels,), optional
        Skip connection, of any real floating dtype.
    z : array (batch, channels), optional
        Gate, in x's dtype: y is multiplied by silu(z).
    dt_bias : array (channels,), optional
        Added to dt, of any real floating dtype.
    dt_softplus : bool
        Apply softplus to dt (after the bias).
    state_batch_indices : array (batch,), optional
        The slot of each row's state, int32 or int64. A row whose slot is negative or out of range has no state: none
        is read or written, and its y is 0. The same slot twice is undefined, and an error for NumPy arrays and with the
        environment variable CUSCAN_CHECK=1. Without it row i has slot i, and there are as many slots as rows.
    dt_limit : (float, float), optional
        Clip dt (after softplus) to this range; NaN stays NaN.
    out : array (batch, channels), optional
        Where to write y. Must not overlap an input or the state.
    out_dtype : dtype, optional
        Dtype of y: float16, bfloat16, float32 or float64. Default: out's or x's.

    Returns
    -------
    y : array (batch, channels)
        A fresh C-contiguous array of the caller's kind, or `out`.

    Raises
    ------
    TypeError
        An argument of the wrong kind or dtype, or a state that cannot be written to.
    ValueError
        An argument of the wrong shape or value, or one that overlaps the state or `out`.

    Notes
    -----
    Accumulation is in float32 for float16, bfloat16 and float32, in float64 for float64 (then x, dt, B, C, z and state
    are all float64), and in complex64 with complex A, where the state stands for conjugate pairs: y = 2 * Re(sum) +
    D * x. No scratch, unless items lie at addresses that are no multiple of their size: those arrays are copied, and
    the state is copied back.

    Examples
    --------
    >>> import numpy as np
    >>> import cuscan
    >>> rng = np.random.default_rng(0)
    >>> state = np.zeros((10, 5, 16), np.float32)             # 10 slots, 5 channels, 16 states
    >>> x, dt = rng.random((2, 3, 5), dtype=np.float32)       # batch 3
    >>> B, C = rng.random((2, 3, 16), dtype=np.float32)
    >>> A = -np.ones((5, 16), np.float32)
    >>> y = cuscan.selective_state_update(state, x, dt, A, B, C, state_batch_indices=np.array([7, 2, -1]))
    >>> y.shape, np.flatnonzero(state.any((1, 2)))
    ((3, 5), array([2, 7]))
    """
    dt_softplus = _arrays.check_flag("dt_softplus", dt_softplus)
    limits = _arrays.check_limits("dt_limit", dt_limit)
    arrays = (state, x, dt, A, B, C, D, z, dt_bias, state_batch_indices, out)
    return _update(arrays, _Options(dt_softplus, limits, out_dtype))


class _Options(NamedTuple):
    softplus: bool
    limits: tuple[float, float] | None
    out_dtype: Any


class _Ready(NamedTuple):
    """What every call of a signature shares."""

    launches: _calls.Launches
    kind: UpdateKind
    slots: int
    output: np.dtype[Any]


_READY: _calls.Cache[_Ready] = _calls.Cache()


def _update(arrays: _calls.Arrays, options: _Options) -> Any:
    key = repr(options.limits), options.softplus, options.out_dtype  # 0.0 and -0.0 are equal, and not the same
    given = _calls.Given(_NAMES, arrays, key, _refuse_jax)
    ready = _READY.get(given.signature) or _READY.put(given.signature, _make_ready(given, options))
    ready.launches.check_apart(given)
    if arrays[_INDICES] is not None and (indices := given.values(_INDICES)) is not None:
        _check_slots(indices, ready.slots)
    result = _run_numpy(given.arrays, ready, options) if given.in_numpy else ready.launches.run(given)[0]
    return result if arrays[_OUT] is None else arrays[_OUT]


def _make_ready(given: _calls.Given, options: _Options) -> _Ready:
    """Check what the signature tells, plan and pack."""
    arrays = given.check(_REQUIRED)
    state, x, out = arrays["state"], arrays["x"], arrays["out"]
    _check_shapes(arrays)
    kind = _check_types(arrays)
    _check_state(state, read_only="state" in given.read_only)
    shape = tuple(x.shape)
    item = _arrays.output_item(kind.item, options.out_dtype, out)
    if out is not None:
        _arrays.check_out(out, shape)
    launches = _calls.Launches.of(given, changed=("state",), written=("out",))
    ready = _Ready(launches, kind, int(state.shape[0]), item)
    return ready._replace(launches=launches.recorded(given, partial(_launch_all, ready=ready, options=options)))


def _launch_all(place: Place, arrays: dict[str, Any], ready: _Ready, options: _Options) -> tuple[Array]:
    """Copy what kernels cannot take as it is, allocate and launch; gives y."""
    x, A = arrays["x"], arrays["A"]
    y = place.allocate(x.shape, ready.output) if arrays["out"] is None else arrays["out"]
    if x.size:
        output = y if _arrays.is_aligned(y) else place.allocate(x.shape, ready.output)
        inputs = [arrays[name] for name in _NAMES if name != "out"]
        state, x, dt, A, B, C, D, z, bias, slots = _arrays.usable(place, *inputs)
        call = _launch.UpdateCall(
            ready.kind, state, x, dt, A, _grouped(B), _grouped(C), D, z, bias, slots, output, options.softplus,
            options.limits,
        )  # fmt: skip
        call = replace(call, kind=replace(ready.kind, vector=call.vector()))
        plan = _plan.plan_update(_plan.UpdateProblem(call.kind, x.shape[0], x.shape[1], A.shape[1]))
        _launch.update(place, plan, call)
        for to, value in ((arrays["state"], state), (y, output)):
            if to is not value:
                place.assign(to, value)
    return (y,)


def _refuse_jax(arguments: dict[str, Any]) -> None:
    """A state that JAX owns is never written to, and one that it does not own is not JAX's business."""
    for name, x in arguments.items():
        if type(x).__module__.partition(".")[0] in ("jax", "jaxlib"):
            if name == "state":
                raise TypeError(
                    "state is a JAX array, which cannot be changed in place; interop.jax.selective_state_update "
                    "returns the new state beside y"
                )
            raise TypeError(f"{name} is a {type(x).__module__}.{type(x).__name__}, and state is not a JAX array")


def _check_state(state: Array, *, read_only: bool) -> None:
    if read_only:
        raise TypeError(
            "state is changed in place and must be writable, got a read-only array; interop.jax.selective_state_update "
            "returns the new state beside y"
        )
    _arrays.check_places("state", state)


def _check_slots(indices: Array, slots: int) -> None:
    """No slot is there twice."""
    found, counts = np.unique(indices[(indices >= 0) & (indices < slots)], return_counts=True)
    if (counts > 1).any():
        slot, count = found[counts > 1][0], counts[counts > 1][0]
        raise ValueError(f"state_batch_indices must have each slot once, got slot {slot} {count} times")


def _check_shapes(arrays: dict[str, Array]) -> None:
    x, A = arrays["x"], arrays["A"]
    for name, axes in (("x", "(batch, channels)"), ("A", "(channels, state)")):
        if arrays[name].ndim != 2:
            raise ValueError(f"{name} must have two axes {axes}, got shape {tuple(arrays[name].shape)}")
    batch, channels = x.shape
    states = A.shape[1]
    _arrays.check_shape("A", A, (channels, states), "(channels, state)")
    state, indices = arrays["state"], arrays["state_batch_indices"]
    slots = state.shape[0] if indices is not None and state.ndim == 3 else batch
    axes = "(slots, channels, state)" if indices is not None else "(batch, channels, state)"
    _arrays.check_shape("state", state, (slots, channels, states), axes)
    for name, shape, axes in (
        ("dt", (batch, channels), "x's (batch, channels)"),
        ("z", (batch, channels), "x's (batch, channels)"),
        ("D", (channels,), "(channels,)"),
        ("dt_bias", (channels,), "(channels,)"),
        ("state_batch_indices", (batch,), "(batch,)"),
    ):
        if arrays[name] is not None:
            _arrays.check_shape(name, arrays[name], shape, axes)
    groups = []
    for name in ("B", "C"):
        couple = arrays[name]
        if couple.ndim not in (2, 3):
            raise ValueError(
                f"{name} must have shape (batch, state) or (batch, groups, state), got {tuple(couple.shape)}"
            )
        if couple.ndim == 2:
            _arrays.check_shape(name, couple, (batch, states), "(batch, state)")
        count = 1 if couple.ndim == 2 else int(couple.shape[1])
        if couple.ndim == 3:
            _arrays.check_shape(name, couple, (batch, count, states), "(batch, groups, state)")
        if count == 0 or channels % count:
            raise ValueError(f"{name} has {count} groups, which must divide the {channels} channels")
        groups.append(count)
    if groups[0] != groups[1]:
        raise ValueError(f"B and C must have the same number of groups, got {groups[0]} and {groups[1]}")


def _check_types(arrays: dict[str, Array]) -> UpdateKind:
    """The dtype rules of the docstring."""
    x, A, state = arrays["x"], arrays["A"], arrays["state"]
    item = _arrays.check_item("x", x, _arrays.REAL)
    is_complex = _arrays.item_name(A) == "complex64"
    if is_complex and item == "float64":
        raise TypeError("A is complex64 and x is float64: complex states take x of float32, bfloat16 or float16")
    wide = ("float32",) if item != "float64" else ()
    _arrays.check_same_item(("x", x), ("dt", arrays["dt"]), wide)
    if arrays["z"] is not None:
        _arrays.check_same_item(("x", x), ("z", arrays["z"]))
    for name in ("B", "C"):
        if is_complex or arrays[name].dtype.kind == "c":
            _arrays.check_same_item(("A", A), (name, arrays[name]))
        else:
            _arrays.check_same_item(("x", x), (name, arrays[name]), wide)
    for name in ("A", "D", "dt_bias"):
        if arrays[name] is not None and not (is_complex and name == "A"):
            _arrays.check_item(name, arrays[name], (*_arrays.REAL, "complex64") if name == "A" else _arrays.REAL)
    if is_complex:
        _arrays.check_same_item(("A", A), ("state", state))
    elif item == "float64":
        _arrays.check_same_item(("x", x), ("state", state))
    else:
        _arrays.check_item("state", state, ("float32", "bfloat16", "float16"))
    if arrays["state_batch_indices"] is not None:
        _arrays.check_item("state_batch_indices", arrays["state_batch_indices"], ("int32", "int64"))
    return UpdateKind(item, _arrays.item_name(state), vector=False)


def _grouped(x: Array) -> Array:
    """(batch, groups, state)."""
    return x[:, None] if x.ndim == 2 else x


def _run_numpy(arrays: _calls.Arrays, ready: _Ready, options: _Options) -> Array:
    """A scan of one step over the rows that have a state."""
    state, x, dt, A, B, C, D, z, bias, indices, out = arrays
    y = np.empty(x.shape, ready.output) if out is None else out
    rows: Any = slice(None)
    slots: Any = slice(None)
    if indices is not None:
        rows = np.flatnonzero((indices >= 0) & (indices < len(state)))
        slots = indices[rows]
    accumulate = np.dtype(ready.kind.computed)
    h0 = state[slots].astype(accumulate)
    steps = np.empty((len(h0), 1, x.shape[1]), y.dtype)
    last = reference.selective_scan(
        x[rows, None], dt[rows, None], A, _grouped(B)[rows, None], _grouped(C)[rows, None], D,
        None if z is None else z[rows, None], bias, h0, steps,
        delta_softplus=options.softplus, delta_limit=options.limits, reverse=False, accumulate=accumulate, segments=1,
    )  # fmt: skip
    with np.errstate(all="ignore"):  # a state of float16 may overflow
        state[slots] = last
    if indices is not None:
        y[...] = 0
    y[rows] = steps[:, 0]
    return y
