"""What `oracle` computes, with arrays: the same equations and bounds for a fuzzer that has no time for scalars.

Only the loops over sequences and time are left. `oracle` says where the bound comes from, and the tests hold the two
together. With `exact` the inputs are those for which every state is exact in any association: no state has an error.
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .oracle import FUNCTION, Scan, _Arithmetic, _arithmetic, _exact, _spans, _time_second

Array = NDArray[Any]
Limits = tuple[float, float]

FEW_COLUMNS = 10  # up to which Python's loop over scalars is faster than NumPy's over time


def _recurrence(gates: Array, inputs: Array, start: Any, enters: Any = True) -> Array:
    """States, time first; where `enters` is False nothing does, and the gate is not read."""
    states = np.zeros(inputs.shape, np.result_type(gates, inputs, start))
    flat = states.reshape(len(inputs), -1)
    flat_gates, flat_inputs, flat_enters = (
        np.broadcast_to(x, inputs.shape).reshape(flat.shape) for x in (gates.astype(states.dtype), inputs, enters)
    )
    state = np.broadcast_to(start, inputs.shape[1:]).reshape(-1).astype(states.dtype)
    if flat.shape[1] <= FEW_COLUMNS:
        for column, entering in enumerate(state.tolist()):
            steps = zip(*(x[:, column].tolist() for x in (flat_gates, flat_inputs, flat_enters)), strict=True)
            flat[:, column] = list(accumulate(steps, _advance, initial=entering))[1:]
        return states
    for gate, drive, where, to in zip(flat_gates, flat_inputs, flat_enters, flat, strict=True):
        np.multiply(gate, state, out=to, where=where)
        to += drive
        state = to
    return states


def _advance(h: Any, step: tuple[Any, Any, bool]) -> Any:
    gate, drive, enters = step
    return gate * h + drive if enters else drive


class _Steps(NamedTuple):
    """What a scan reads, time first; the gates' error is relative, the inputs' absolute."""

    gates: Array
    inputs: Array
    gate_error: Array
    input_error: Array
    counts: Array | None  # False where the mask is
    resets: Array | None

    def cut(self, begin: int, end: int) -> _Steps:
        counts, resets = (None if x is None else x[begin:end] for x in (self.counts, self.resets))
        gates, inputs, gate_error, input_error = (x[begin:end] for x in self[:4])
        return _Steps(gates, inputs, gate_error, input_error, counts, resets)


def _scan(
    steps: _Steps, start: Array | None, arithmetic: _Arithmetic, exact: bool
) -> tuple[Array, Array, Array, Array]:
    """States and bounds, time first, and those of the last step."""
    gates, inputs, gate_error, input_error, counts, resets = steps
    entering: Any = 0.0 if start is None else start
    rest = inputs.shape[1:]
    if len(inputs) == 0:
        last = np.broadcast_to(entering, rest)
        return inputs, np.zeros(inputs.shape), last, np.zeros(rest)
    if start is None:
        gates = gates.copy()
        gates[0] = 0
    if counts is not None:
        gates, inputs = np.where(counts, gates, 1), np.where(counts, inputs, 0)
    enters: Any = True if resets is None else ~resets
    if exact:
        h = _recurrence(gates, inputs, entering, enters)
        return h, np.zeros(h.shape), h[-1], np.zeros(rest)
    strength = np.abs(gates)
    both = _recurrence(
        np.stack((gates, strength), 1),
        np.stack((inputs, np.abs(inputs)), 1),
        np.stack(np.broadcast_arrays(entering, np.abs(entering))) if start is not None else entering,
        enters if resets is None else enters[:, None],
    )
    h, size = both[:, 0], both[:, 1].real
    carried = np.concatenate((np.broadcast_to(np.abs(entering), rest)[None], size[:-1])) * strength * gate_error
    if resets is None:
        largest = np.maximum(np.maximum.accumulate(size), np.abs(entering))
    else:
        carried = np.where(enters, carried, 0)
        largest, before = size.copy(), np.abs(entering)
        for t, where in enumerate(np.broadcast_to(enters, size.shape)):
            np.maximum(before, size[t], out=largest[t, ...], where=where)
            before = largest[t]
    grown = 1 + arithmetic.step
    growth = strength * ((1 + gate_error) * grown)
    added = (carried + input_error) * grown + arithmetic.step * size
    added += arithmetic.underflow * (1 + largest)
    if counts is not None:
        growth, added = np.where(counts, growth, 1), np.where(counts, added, 0)
    error = _recurrence(growth, added, 0.0, enters)
    bound = np.where(error == 0, 0, error + arithmetic.later_operand * (size + error))
    return h, bound, h[-1], bound[-1]


def _scan_sequences(
    steps: _Steps, start: Array | None, spans: list[tuple[int, int]] | None, arithmetic: _Arithmetic, exact: bool
) -> tuple[Array, Array, Array, Array]:
    """As `_scan` of each sequence; `start` and what is last have a leading axis of sequences."""
    if spans is None:
        return _scan(steps, start, arithmetic, exact)
    shape = steps.inputs.shape
    kind = np.result_type(steps.gates, steps.inputs, 0.0 if start is None else start)
    h, bound = np.zeros(shape, kind), np.zeros(shape)
    last, last_bound = np.zeros((len(spans), *shape[1:]), kind), np.zeros((len(spans), *shape[1:]))
    for s, (begin, end) in enumerate(spans):
        entering = None if start is None else start[s]
        h[begin:end], bound[begin:end], last[s], last_bound[s] = _scan(
            steps.cut(begin, end), entering, arithmetic, exact
        )
    return h, bound, last, last_bound


def _spans_in_turn(cu_seqlens: ArrayLike | None, length: int, *, reverse: bool) -> list[tuple[int, int]] | None:
    """Where each sequence begins and ends in the order of the scan."""
    if cu_seqlens is None:
        return None
    return [(length - end, length - begin) if reverse else (begin, end) for begin, end in _spans(cu_seqlens, length)]


@np.errstate(all="ignore")
def linear_scan(
    a: ArrayLike,
    b: ArrayLike,
    h0: ArrayLike | None = None,
    *,
    axis: int = -1,
    reverse: bool = False,
    mask: ArrayLike | None = None,
    reset: ArrayLike | None = None,
    cu_seqlens: ArrayLike | None = None,
    eps: float = 2.0**-24,
    exact: bool = False,
) -> Scan:
    """As `oracle.linear_scan`."""
    turn = slice(None, None, -1 if reverse else 1)
    shape = np.shape(b)

    def time_first(x: ArrayLike) -> Array:
        return np.moveaxis(np.broadcast_to(x, shape), axis, 0)[turn]

    gates, inputs = time_first(_exact(a)), time_first(_exact(b))
    start = None if h0 is None else _exact(h0)
    arithmetic = _arithmetic(eps, len(inputs), is_complex=np.result_type(gates, inputs).kind == "c")
    none = np.broadcast_to(0.0, inputs.shape)
    counts, resets = (None if x is None else time_first(x) for x in (mask, reset))
    spans = _spans_in_turn(cu_seqlens, len(inputs), reverse=reverse)
    h, bound, last, last_bound = _scan_sequences(
        _Steps(gates, inputs, none, none, counts, resets), start, spans, arithmetic, exact
    )
    return Scan(np.moveaxis(h[turn], 0, axis), np.moveaxis(bound[turn], 0, axis), last, last_bound)


@np.errstate(all="ignore")
def selective_scan(
    u: ArrayLike,
    delta: ArrayLike,
    A: ArrayLike,
    B: ArrayLike,
    C: ArrayLike,
    D: ArrayLike | None = None,
    z: ArrayLike | None = None,
    delta_bias: ArrayLike | None = None,
    delta_softplus: bool = False,
    *,
    h0: ArrayLike | None = None,
    reverse: bool = False,
    mask: ArrayLike | None = None,
    reset: ArrayLike | None = None,
    cu_seqlens: ArrayLike | None = None,
    delta_limit: Limits | None = None,
    layout: str = "bld",
    eps: float = 2.0**-24,
    exact: bool = False,
) -> Scan:
    """As `oracle.selective_scan`."""
    turn = slice(None, None, -1 if reverse else 1)

    def sequence(x: ArrayLike) -> Array:
        return np.swapaxes(_time_second(_exact(x), layout), 0, 1)[turn]

    u_, used = sequence(u), sequence(delta)
    A_ = _exact(A)
    B_, C_ = (_matrix(_exact(x), layout, len(A_), turn) for x in (B, C))
    start = None if h0 is None else _exact(h0)
    is_complex = np.result_type(A_, B_, C_).kind == "c"
    arithmetic = _arithmetic(eps, len(u_), is_complex=is_complex)
    eps, tiny = arithmetic.eps, arithmetic.tiny
    used, step_error = _delta(
        used, None if delta_bias is None else _exact(delta_bias), delta_softplus, delta_limit, arithmetic
    )

    step, drive = used[..., None], u_[..., None]
    exponent = step * A_
    gates, inputs = np.exp(exponent), step * B_ * drive
    gate_error: Any = 0.0
    input_error: Any = 0.0
    if not exact:
        gate_error = (2 * FUNCTION + 1 if is_complex else FUNCTION) * eps
        gate_error = gate_error + 2 * eps * np.abs(exponent) + step_error[..., None] * np.abs(A_)
        input_error = (step_error[..., None] + 2 * eps * np.abs(step)) * np.abs(B_) * np.abs(drive)
        input_error += tiny * (1 + np.abs(step)) * (1 + np.abs(B_)) * (1 + np.abs(drive))
    # (time, batch), and for the states (time, batch, 1, 1).
    counts, resets = (None if x is None else np.swapaxes(np.asarray(x), 0, 1)[turn] for x in (mask, reset))
    spans = _spans_in_turn(cu_seqlens, len(u_), reverse=reverse)
    steps = _Steps(
        gates,
        inputs,
        np.broadcast_to(gate_error, inputs.shape),
        np.broadcast_to(input_error, inputs.shape),
        *(None if x is None else x[..., None, None] for x in (counts, resets)),
    )
    if spans is not None and start is not None:
        start = start[:, None]  # a batch of 1
    h, h_bound, last, last_bound = _scan_sequences(steps, start, spans, arithmetic, exact)
    if spans is not None:
        last, last_bound = last[:, 0], last_bound[:, 0]
        inside = np.zeros((len(u_), 1), np.bool_)
        for begin, end in spans:
            inside[begin:end] = True
        counts = inside if counts is None else counts & inside

    y = np.sum(C_ * h, axis=-1)
    error = np.zeros(y.shape)
    size = error
    roundings = A_.shape[1] + 1
    if not exact:
        strength = np.abs(C_)
        error = np.sum(strength * h_bound + tiny * (1 + strength) * (1 + np.abs(h)), axis=-1)
        size = np.sum(strength * (np.abs(h) + h_bound), axis=-1)
    if is_complex:
        y, error, size, roundings = 2 * y.real, 2 * error, 2 * size, roundings + 1
    if D is not None:
        skip = _exact(D)
        y = y + skip * u_
        if not exact:
            size = size + np.abs(skip * u_)
            error = error + tiny * (1 + np.abs(skip)) * (1 + np.abs(u_))
    error = error + roundings * eps * size
    if z is not None:
        gate = sequence(z)
        silu = gate / (1 + np.exp(-gate))
        size = np.abs(y) + error
        error = np.abs(silu) * (error + (2 * FUNCTION + 3) * eps * size) + tiny * (1 + size) * (1 + np.abs(gate))
        y = y * silu
    if counts is not None:
        y, error = (np.where(counts[..., None], x, 0) for x in (y, error))

    def caller(x: Array) -> Array:
        return _time_second(np.swapaxes(x[turn], 0, 1), layout)

    return Scan(caller(y), caller(error), last, last_bound)


def _matrix(x: Array, layout: str, channels: int, turn: slice) -> Array:
    """B or C, (time, batch, channels, state), or (channels, state) as it is."""
    if x.ndim == 2:
        return x
    if layout == "bdl":
        x = np.moveaxis(x, -1, 1)
    x = np.swapaxes(x if x.ndim == 4 else x[:, :, None], 0, 1)[turn]
    return np.repeat(x, channels // x.shape[2], axis=2)


def _delta(
    x: Array, bias: Array | None, softplus: bool, limit: Limits | None, arithmetic: _Arithmetic
) -> tuple[Array, Array]:
    eps, error = arithmetic.eps, np.zeros(x.shape)
    if bias is not None:
        x = x + bias
        error = eps * np.abs(x)
    if softplus:
        small = np.exp(-np.abs(x))
        slope = np.where(x > 0, 1.0, small) / (1 + small)
        x = np.maximum(x, 0.0) + np.log1p(small)
        error = slope * error + (2 * FUNCTION + 1) * eps * x + arithmetic.tiny
    error = np.where(np.isinf(x), 0.0, error)
    low, high = (-math.inf, math.inf) if limit is None else limit
    used = np.clip(x, low, high)
    moved = np.maximum(np.clip(x + error, low, high) - used, used - np.clip(x - error, low, high))
    return used, np.where(used != x, moved + eps * np.abs(used), error)
