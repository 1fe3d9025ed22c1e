"""selective_scan: the state-space layer of Mamba, everything between its inputs and y fused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from . import _arrays, _calls, _launch, _plan, _shards, reference
from ._arrays import Array, Place
from ._plan import SelectiveKind, is_usual, states_a_thread
from .interop import routed

_AXES = {
    "bld": ("(batch, length, channels)", "(batch, length, state)", "(batch, length, groups, state)"),
    "bdl": ("(batch, channels, length)", "(batch, state, length)", "(batch, groups, state, length)"),
}


@routed
def selective_scan(
    u: Any,
    delta: Any,
    A: Any,
    B: Any,
    C: Any,
    D: Any = None,
    z: Any = None,
    delta_bias: Any = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    *,
    h0: Any = None,
    reverse: bool = False,
    mask: Any = None,
    reset: Any = None,
    cu_seqlens: Any = None,
    delta_limit: tuple[float, float] | None = None,
    layout: str = "bld",
    return_states: bool = False,
    out: Any = None,
    out_dtype: Any = None,
) -> Any:
    """Selective state-space scan (Gu and Dao, "Mamba", 2023, algorithm 2)::

        delta = clip(softplus(delta + delta_bias), *delta_limit)        each part optional
        h[t]  = exp(delta[t] * A) * h[t-1] + delta[t] * B[t] * u[t]
        y[t]  = (sum over the state of C[t] * h[t]  +  D * u[t]) * silu(z[t])

    The input matrix is delta * B, Mamba's form, and not exact zero-order hold. With complex A, B and C the state
    stands for conjugate pairs: y = 2 * Re(sum) + D * u. Nothing of shape (batch, length, channels, state) is ever
    built. The same call gives the same bits every time.

    Parameters
    ----------
    u : array (batch, length, channels)
        Inputs: float16, bfloat16, float32 or float64. With layout "bdl": (batch, channels, length).
    delta : array, of u's shape
        Step sizes, in u's dtype or float32.
    A : array (channels, state)
        Rates, of any real floating dtype (read in the accumulation type), or complex64.
    B, C : array (batch, length, state), (batch, length, groups, state) or (channels, state)
        Input and output couplings, in u's dtype or float32, or complex64 with complex A. Channel d uses group
        d // (channels / groups). With layout "bdl": (batch, state, length) or (batch, groups, state, length). Of
        shape (channels, state) they are constant in time.
    D : array (channels,), optional
        Skip connection, of any real floating dtype.
    z : array, of u's shape and dtype, optional
        Gate: y is multiplied by silu(z).
    delta_bias : array (channels,), optional
        Added to delta, of any real floating dtype.
    delta_softplus : bool
        Apply softplus to delta (after the bias).
    return_last_state : bool
        Also return the state after the last step (the first with `reverse`).
    h0 : array (batch, channels, state), optional
        State before the first step (the last with `reverse`), in the accumulation type. Zero if absent.
    reverse : bool
        Run from the last step to the first.
    mask : array of bool (batch, length), optional
        True where a step counts (as Hugging Face's attention_mask); elsewhere it leaves the state unchanged, whatever
        the inputs hold, NaN included, and y is 0. The same shape in both layouts.
    reset : array of bool (batch, length), optional
        The state that enters such a step is zero, `h0` too. It acts also where `mask` is False.
    cu_seqlens : array (sequences + 1,), optional
        Offsets, int32 or int64, of sequences packed along time, in a batch of 1: number i is steps cu_seqlens[i] to
        cu_seqlens[i + 1] - 1, and may be empty. `h0` and the last state are (sequences, channels, state); an empty
        one returns its h0, or 0. Steps outside of all have y = 0. The offsets ascend in [0, length]: on NumPy arrays
        that is checked, on a GPU only with CUSCAN_CHECK=1 in the environment, because it costs a synchronisation.
    return_states : bool
        Also return the states that `selective_scan_vjp` starts from.
    delta_limit : (float, float), optional
        Clip delta (after softplus) to this range; NaN stays NaN.
    layout : "bld" or "bdl"
        Order of the axes of u, delta, z, B, C and the result; "bdl" is mamba_ssm's.
    out : array, of u's shape, optional
        Where to write y. Must not overlap an input.
    out_dtype : dtype, optional
        Dtype of y: float16, bfloat16, float32 or float64. Default: out's or u's.

    Returns
    -------
    y : array, of u's shape
        A fresh C-contiguous array of the caller's kind, or `out`.
    last_state : array (batch, channels, state)
        Only with `return_last_state`, in the accumulation type.
    states : array (batch, ceil(length / STATE_INTERVAL), channels, state)
        Only with `return_states`, in the accumulation type: entry k is the state that enters step k * STATE_INTERVAL,
        counted along the (packed) time axis in the direction of the scan: h0 at a sequence's first step, zero at a
        reset and outside of all sequences.

    Raises
    ------
    TypeError
        An argument of the wrong kind or dtype.
    ValueError
        An argument of the wrong shape or value, or an `out` that overlaps an input.

    Notes
    -----
    Accumulation is in float32 for float16, bfloat16 and float32, in float64 for float64 (then u, delta, B, C and z
    are all float64), and in complex64 with complex A. Scratch: where the plan cuts time into chunks, two arrays
    (batch, chunks, state, channels) in the accumulation type; where the states take several slices, one array of
    u's shape in float32 (float64 for float64). With `mask`, `reset` or `cu_seqlens` 16 bytes more for each 32 of their
    steps, with `cu_seqlens` 4 bytes a step, and where time is cut a byte a (batch, chunk) and 16 bytes for each 32
    chunks.

    Examples
    --------
    >>> import numpy as np
    >>> import cuscan
    >>> rng = np.random.default_rng(0)
    >>> u, delta = rng.random((2, 3, 64, 5), dtype=np.float32)     # batch 3, length 64, 5 channels
    >>> B, C = rng.random((2, 3, 64, 16), dtype=np.float32)        # 16 states
    >>> y, h = cuscan.selective_scan(u, delta, -np.ones((5, 16), np.float32), B, C, return_last_state=True)
    >>> y.shape, h.shape
    ((3, 64, 5), (3, 5, 16))
    """
    delta_softplus = _arrays.check_flag("delta_softplus", delta_softplus)
    return_last_state = _arrays.check_flag("return_last_state", return_last_state)
    reverse = _arrays.check_flag("reverse", reverse)
    return_states = _arrays.check_flag("return_states", return_states)
    check_layout(layout)
    limits = _arrays.check_limits("delta_limit", delta_limit)
    arrays = (u, delta, A, B, C, D, z, delta_bias, h0, mask, reset, cu_seqlens, out)
    # 0.0 and -0.0 are equal, and not the same.
    key = repr(limits), delta_softplus, reverse, return_last_state, return_states, out_dtype, layout
    given = _calls.Given(_NAMES, arrays, key)
    ready = _READY.get(given.signature)
    if ready is None:
        wanted = _Wanted(return_last_state, return_states, out_dtype, layout)
        ready = _make_ready(given, Options(delta_softplus, limits, reverse), wanted)
        _READY.put(given.signature, ready)
    ready.launches.check_apart(given)
    results = results_of(given, cu_seqlens, ready, _run_numpy, _launch_all)
    return results if len(results) > 1 else results[0]


def results_of(
    given: _calls.Given,
    cu_seqlens: Any,
    ready: Any,
    in_numpy: Callable[[dict[str, Any], Any], tuple[Array, ...]],
    launch_all: Callable[[Place, dict[str, Any], Any], tuple[Array, ...]],
) -> tuple[Array, ...]:
    """Of a call, of selective_scan_vjp too, whose signature is ready."""
    if cu_seqlens is not None and (offsets := given.values(_OFFSETS)) is not None:
        _arrays.check_offsets(offsets, _shards.whole(ready.sizes.length))
    if given.in_numpy:
        return in_numpy(given.by_name(), ready)
    if ready.launches.steps:
        results: tuple[Array, ...] = ready.launches.run(given)
        return results
    with given.current() as place:
        return launch_all(place, given.by_name(), ready)


_NAMES = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias", "h0", "mask", "reset", "cu_seqlens", "out")
_REQUIRED, _OFFSETS = _NAMES[:5], 11


class Sizes(NamedTuple):
    """What the shapes say."""

    batch: int
    length: int
    channels: int
    state: int
    groups: int
    states: int  # states that enter and leave: batch, or packed sequences

    @property
    def empty(self) -> bool:
        """Whether there is nothing to launch."""
        return 0 in self[:5]

    @property
    def saved(self) -> tuple[int, ...]:
        """Shape of the saved states."""
        return self.batch, -(-self.length // _plan.STATE_INTERVAL), self.channels, self.state

    @property
    def at_once(self) -> bool:
        """Whether a call does all there is to do itself."""
        return self.empty and not (_shards.linked() and all((*self[:1], *self[2:5])))


class Options(NamedTuple):
    """What is not an array."""

    softplus: bool
    limits: tuple[float, float] | None
    reverse: bool


class _Wanted(NamedTuple):
    last_state: bool
    states: bool
    out_dtype: Any
    layout: str


class _Ready(NamedTuple):
    """What every call of a signature shares."""

    launches: _calls.Launches
    options: Options
    wanted: _Wanted
    kind: SelectiveKind
    sizes: Sizes
    output: np.dtype[Any]


_READY: _calls.Cache[_Ready] = _calls.Cache()


def _make_ready(given: _calls.Given, options: Options, wanted: _Wanted) -> _Ready:
    """Check what the signature tells, plan and pack."""
    arrays = given.check(_REQUIRED)
    sizes = check_shapes(arrays, wanted.layout)
    kind = check_types(arrays)
    output = _arrays.output_item(kind.item, wanted.out_dtype, arrays["out"])
    if arrays["out"] is not None:
        _arrays.check_out(arrays["out"], tuple(arrays["u"].shape))
    ready = _Ready(_calls.Launches.of(given, written=("out",)), options, wanted, kind, sizes, output)
    if sizes.at_once:
        return ready
    return ready._replace(launches=ready.launches.recorded(given, partial(_launch_all, ready=ready)))


def _run_numpy(x: dict[str, Any], ready: _Ready) -> tuple[Array, ...]:
    options, wanted = ready.options, ready.wanted
    result = np.empty(x["u"].shape, ready.output) if x["out"] is None else x["out"]
    states = np.empty(ready.sizes.saved, ready.kind.state) if wanted.states else None
    y: Array = time_second(result, wanted.layout)
    x, sizes = views(x, wanted.layout), ready.sizes
    last = reference.selective_scan(
        x["u"], x["delta"], x["A"], x["B"], x["C"], x["D"], x["z"], x["delta_bias"], x["h0"], y,
        delta_softplus=options.softplus, delta_limit=options.limits, reverse=options.reverse,
        accumulate=np.dtype(ready.kind.state),
        segments=_plan.plan_segments(sizes.batch * sizes.channels * sizes.state, sizes.length),
        mask=x["mask"], reset=x["reset"], cu_seqlens=x["cu_seqlens"], states=states,
        reach=_shards.reach(reverse=options.reverse),
    )  # fmt: skip
    _shards.only_ours(None, last, x["cu_seqlens"], at_end=not options.reverse)
    return _present(result, last if wanted.last_state else None, states)


def _launch_all(place: Place, x: dict[str, Any], ready: _Ready) -> tuple[Array, ...]:
    """Copy what kernels cannot take as it is, allocate and launch; gives the results."""
    sizes, wanted, out = ready.sizes, ready.wanted, x.pop("out")
    x = dict(zip(x, _arrays.usable(place, *x.values()), strict=True))
    target = out if out is not None and _arrays.is_aligned(out) else place.allocate(x["u"].shape, ready.output)
    last, states = (
        place.allocate(shape, ready.kind.state) if is_wanted else None
        for is_wanted, shape in (
            (wanted.last_state, (sizes.states, sizes.channels, sizes.state)),
            (wanted.states, sizes.saved),
        )
    )
    y = time_second(target, wanted.layout)
    run(place, views(x, wanted.layout), y, last, states, ready.kind, sizes, ready.options)
    if out is not None and target is not out:
        place.assign(out, target)
    return _present(target if out is None else out, last, states)


def _present(*results: Array | None) -> tuple[Array, ...]:
    return tuple(x for x in results if x is not None)


def run(
    place: Place,
    x: dict[str, Any],
    y: Array,
    last: Array | None,
    states: Array | None,
    kind: SelectiveKind,
    sizes: Sizes,
    options: Options,
) -> None:
    """Plan and launch; y, last and states are written."""
    size = (sizes.batch, sizes.length, sizes.channels, sizes.state, sizes.groups)
    shard, packed = _shards.linked(), x["cu_seqlens"] is not None
    if last is not None and (0 in size or packed):
        place.assign(last, 0 if x["h0"] is None else x["h0"])  # what an empty sequence returns
    if 0 in size:
        if sizes.at_once:
            _stateless(x, y)
        elif shard is not None:
            flags = sizes.batch * any(x[name] is not None for name in ("mask", "reset", "cu_seqlens"))
            rows = sizes.batch * sizes.channels * sizes.state
            layout = _shards.Layout(rows, np.dtype(kind.state), flags, 0)
            _shards.pass_by(place, shard, layout, reverse=options.reverse)
        if last is not None:
            _shards.only_ours(place, last, x["cu_seqlens"], at_end=not options.reverse)
        return
    carry, ending = None, last
    if shard is not None:
        if shard.before(reverse=options.reverse):
            carry = place.allocate((sizes.batch, sizes.channels, sizes.state), kind.state)
            x = x | {"h0": _arrays.copy_of(place, x["h0"]) if packed and x["h0"] is not None else None}
        if not (packed or shard.holds(0 if options.reverse else -1)):
            ending = None
    segments = segments_of(place, x, options.reverse)
    kind = _plan.fitting_kind(oriented(kind, x["u"]), place.limits)
    sequences = sizes.states if x["cu_seqlens"] is not None else 1
    with _shards.split(shard):
        plan = _plan.plan_selective(_plan.SelectiveProblem(kind, *size, sequences), place.limits)
    call = _launch.SelectiveCall(
        kind=kind, u=x["u"], delta=x["delta"], A=x["A"], B=x["B"], C=x["C"], D=x["D"], z=x["z"],
        delta_bias=x["delta_bias"], initial=x["h0"], output=y, last=ending, groups=sizes.groups,
        softplus=options.softplus, limits=options.limits, segments=segments,
        states=states,
    )  # fmt: skip
    _launch.selective(place, plan, call, -1 if options.reverse else 1, shard, carry)
    if last is not None:
        _shards.only_ours(place, last, x["cu_seqlens"], at_end=not options.reverse)


def segments_of(place: Place, x: dict[str, Any], reverse: bool) -> _launch.Segments | None:
    """What cuts the rows, if anything does."""
    if all(x[name] is None for name in ("mask", "reset", "cu_seqlens")):
        return None
    mask, reset = (_flags(place, x[name], reverse) for name in ("mask", "reset"))
    offsets, shard = x["cu_seqlens"], _shards.linked()
    if offsets is not None and shard is not None:
        offsets = _shards.local_offsets(place, shard, offsets)
    return _launch.Segments(mask, reset, offsets, reverse)


def _flags(place: Place, x: Array | None, reverse: bool) -> _launch.Rows | None:
    """mask or reset, (batch, length), from its first step in the direction of the scan."""
    if x is None:
        return None
    batch, time = x.strides
    start = place.pointer(x)
    return _launch.Rows(
        start + (x.shape[1] - 1) * time if reverse else start, -time if reverse else time, (batch,), "bool"
    )


@np.errstate(all="ignore")
def _stateless(x: dict[str, Any], y: Array) -> None:
    """No state or no step, so nothing to launch: y is D u silu(z)."""
    if not y.size:
        return
    value = 0.0 if x["D"] is None else x["u"].astype("float64") * x["D"].astype("float64")
    if x["z"] is not None:
        gate = x["z"].astype("float64")
        value = value * gate / (1 + np.exp(-gate))
    y[...] = value
    if (counts := counted(x)) is not None:
        y[~counts] = 0


def counted(x: dict[str, Any]) -> Array | None:
    """Whether a step (batch, length) counts: where there is a mask or an outside of all sequences."""
    mask, offsets = x["mask"], x["cu_seqlens"]
    if offsets is None:
        return mask
    counts = x["u"][..., 0].astype(bool) if mask is None else mask.copy()
    if mask is None:
        counts[...] = True
    shard = _shards.current()
    first, last = (max(int(bound) - (0 if shard is None else shard.offset), 0) for bound in (offsets[0], offsets[-1]))
    counts[:, :first] = False
    counts[:, last:] = False
    return counts


def check_layout(layout: object) -> None:
    """A name of an order of axes."""
    if layout not in _AXES:
        raise ValueError(f"layout must be 'bld' or 'bdl', got {layout!r}")


def check_are_arrays(given: dict[str, Any]) -> None:
    """Scalars are no arrays, and five of them must be there."""
    for name, x in given.items():
        if _arrays.is_python_scalar(x) or (x is None and name in ("u", "delta", "A", "B", "C")):
            raise TypeError(f"{name} must be an array, got {type(x).__name__}")


def check_types(arrays: dict[str, Array]) -> SelectiveKind:
    """The dtype rules of the docstring."""
    u = arrays["u"]
    item = _arrays.check_item("u", u, _arrays.REAL)
    is_complex = _arrays.item_name(arrays["A"]) == "complex64"
    if is_complex and item == "float64":
        raise TypeError("A is complex64 and u is float64: complex states take u of float32, bfloat16 or float16")
    wide = ("float32",) if item != "float64" else ()
    _arrays.check_same_item(("u", u), ("delta", arrays["delta"]), wide)
    if arrays["z"] is not None:
        _arrays.check_same_item(("u", u), ("z", arrays["z"]))
    for name in ("B", "C"):
        if is_complex or arrays[name].dtype.kind == "c":
            _arrays.check_same_item(("A", arrays["A"]), (name, arrays[name]))
        else:
            _arrays.check_same_item(("u", u), (name, arrays[name]), wide)
    for name in ("A", "D", "delta_bias"):
        if arrays[name] is not None and not (is_complex and name == "A"):
            _arrays.check_item(name, arrays[name], (*_arrays.REAL, "complex64") if name == "A" else _arrays.REAL)
    vary = arrays["B"].ndim != 2, arrays["C"].ndim != 2
    state_item = "complex64" if is_complex else _arrays.accumulation(item)
    states = states_a_thread(state_item, all(vary), arrays["A"].shape[-1])
    segmented = any(arrays[name] is not None for name in ("mask", "reset", "cu_seqlens"))
    kind = SelectiveKind(
        item, is_complex, time_fast=False, time_B=vary[0], time_C=vary[1], states=states, segmented=segmented
    )
    if arrays["h0"] is not None and _arrays.item_name(arrays["h0"]) != kind.state:
        raise TypeError(f"h0 must be {kind.state}, the accumulation type here, got {_arrays.item_name(arrays['h0'])}")
    return kind


def check_shapes(arrays: dict[str, Array], layout: str) -> Sizes:
    """The shape rules of the docstring."""
    u, A = arrays["u"], arrays["A"]
    _arrays.check_marks(arrays["mask"], arrays["reset"], arrays["cu_seqlens"])
    sequence_axes, couple_axes, grouped_axes = _AXES[layout]
    if u.ndim != 3:
        raise ValueError(f"u must have three axes {sequence_axes}, got shape {tuple(u.shape)}")
    if A.ndim != 2:
        raise ValueError(f"A must have two axes (channels, state), got shape {tuple(A.shape)}")
    batch, length, channels = (u.shape[d] for d in ((0, 1, 2) if layout == "bld" else (0, 2, 1)))
    state = A.shape[1]
    other = "bdl" if layout == "bld" else "bld"
    swapped = f"; with layout={other!r} u would have {length} channels and fit A" if A.shape[0] == length else ""
    _arrays.check_shape("A", A, (channels, state), "(channels, state)", swapped)
    for name in ("delta", "z"):
        if arrays[name] is not None:
            x = arrays[name]
            turned = tuple(x.shape) == (u.shape[0], u.shape[2], u.shape[1])
            hint = "; its last two axes are in the other layout's order" if turned else ""
            _arrays.check_shape(name, x, tuple(u.shape), f"u's {sequence_axes}", hint)
    for name in ("D", "delta_bias"):
        if arrays[name] is not None:
            _arrays.check_shape(name, arrays[name], (channels,), "(channels,)")
    for name in ("mask", "reset"):
        if arrays[name] is not None:
            _arrays.check_shape(name, arrays[name], (batch, length), "(batch, length)")
    states = batch
    if (offsets := arrays["cu_seqlens"]) is not None:
        if batch != 1:
            raise ValueError(f"with cu_seqlens the batch must be 1, got u of shape {tuple(u.shape)}")
        states = len(offsets) - 1
    if arrays["h0"] is not None:
        axes = "(batch, channels, state)" if offsets is None else "(sequences, channels, state)"
        _arrays.check_shape("h0", arrays["h0"], (states, channels, state), axes)
    groups = {}
    for name in ("B", "C"):
        x = arrays[name]
        if x.ndim == 2:
            _arrays.check_shape(name, x, (channels, state), "(channels, state)")
            continue
        if x.ndim not in (3, 4):
            raise ValueError(
                f"{name} must have shape {couple_axes}, {grouped_axes} or (channels, state), got {tuple(x.shape)}"
            )
        count = 1 if x.ndim == 3 else int(x.shape[2 if layout == "bld" else 1])
        axes = couple_axes if x.ndim == 3 else grouped_axes
        expected = {"batch": batch, "length": length, "state": state, "groups": count}
        here, there = (
            tuple(expected[axis] for axis in names[1 if x.ndim == 3 else 2].strip("()").split(", "))
            for names in (_AXES[layout], _AXES[other])
        )
        hint = f"; its axes are in the order of layout={other!r}" if tuple(x.shape) == there else ""
        _arrays.check_shape(name, x, here, axes, hint)
        if count == 0 or channels % count:
            raise ValueError(f"{name} has {count} groups, which must divide the {channels} channels")
        groups[name] = count
    if len(set(groups.values())) > 1:
        raise ValueError(f"B and C must have the same number of groups, got {groups['B']} and {groups['C']}")
    return Sizes(batch, length, channels, state, groups.get("B", groups.get("C", 1)), states)


def views(arrays: dict[str, Any], layout: str) -> dict[str, Any]:
    """The arrays with those of u's shape as (batch, length, channels), B and C as (batch, length, groups, state)."""
    sequences = {name: time_second(arrays[name], layout) for name in ("u", "delta", "z", "grad_out") if name in arrays}
    return arrays | sequences | {name: _grouped(arrays[name], layout) for name in ("B", "C")}


def oriented(kind: SelectiveKind, u: Array) -> SelectiveKind:
    """The kind whose pairs lie along the axis of u, (batch, length, channels), whose neighbours are closest."""
    length, channels = u.shape[1:]
    closer = length > 1 and (channels == 1 or abs(u.strides[1]) < abs(u.strides[2]))
    return replace(kind, time_fast=closer and is_usual(kind.item, kind.complex, kind.time_B and kind.time_C))


def time_second(x: Array | None, layout: str) -> Array | None:
    """(batch, length, channels), whatever the layout."""
    return x if x is None or layout == "bld" else x.transpose(0, 2, 1)


def _grouped(x: Array, layout: str) -> Array:
    """(batch, length, groups, state) or (channels, state), whatever the layout."""
    if x.ndim == 2:
        return x
    if layout == "bdl":
        x = x.transpose(0, 2, 1) if x.ndim == 3 else x.transpose(0, 3, 1, 2)
    return x[:, :, None, :] if x.ndim == 3 else x
