"""What `oracle` computes, with arrays: the same equations and bounds for a fuzzer that has no time for scalars.

Only the loop over time is left. `oracle` says where the bound comes from, and the tests hold the two together.
With `exact` the inputs are those for which every state is exact in any association: no state has an error.
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .oracle import FUNCTION, Scan, _Arithmetic, _arithmetic, _exact, _time_second

Array = NDArray[Any]
Limits = tuple[float, float]

FEW_COLUMNS = 10  # up to which Python's loop over scalars is faster than NumPy's over time


def _recurrence(gates: Array, inputs: Array, start: Any) -> Array:
    states = np.empty(inputs.shape, np.result_type(gates, inputs, start))
    flat_gates, flat_inputs, flat = (
        x.reshape(len(x), -1) for x in (np.broadcast_to(gates, inputs.shape), inputs, states)
    )
    state = np.broadcast_to(start, inputs.shape[1:]).reshape(-1)
    if flat.shape[1] <= FEW_COLUMNS:
        for column, entering in enumerate(state.tolist()):
            steps = zip(flat_gates[:, column].tolist(), flat_inputs[:, column].tolist(), strict=True)
            flat[:, column] = list(accumulate(steps, lambda h, step: step[0] * h + step[1], initial=entering))[1:]
        return states
    for gate, drive, to in zip(flat_gates, flat_inputs, flat, strict=True):
        np.multiply(gate, state, out=to)
        to += drive
        state = to
    return states


def _scan(
    gates: Array,
    inputs: Array,
    start: Array | None,
    gate_error: Any,
    input_error: Any,
    arithmetic: _Arithmetic,
    exact: bool,
) -> tuple[Array, Array, Array, Array]:
    """States and bounds, time first, and those of the last step."""
    entering: Any = 0.0 if start is None else start
    rest = inputs.shape[1:]
    if len(inputs) == 0:
        last = np.broadcast_to(entering, rest)
        return inputs, np.zeros(inputs.shape), last, np.zeros(rest)
    if start is None:
        gates = gates.copy()
        gates[0] = 0
    if exact:
        h = _recurrence(gates, inputs, entering)
        return h, np.zeros(h.shape), h[-1], np.zeros(rest)
    strength = np.abs(gates)
    both = _recurrence(
        np.stack((gates, strength), 1),
        np.stack((inputs, np.abs(inputs)), 1),
        np.stack(np.broadcast_arrays(entering, np.abs(entering))) if start is not None else entering,
    )
    h, size = both[:, 0], both[:, 1].real
    carried = np.concatenate((np.broadcast_to(np.abs(entering), rest)[None], size[:-1])) * strength
    largest = np.maximum(np.maximum.accumulate(size), np.abs(entering))
    grown = 1 + arithmetic.step
    added = (gate_error * carried + input_error) * grown + arithmetic.step * size
    added += arithmetic.underflow * (1 + largest)
    error = _recurrence(strength * ((1 + gate_error) * grown), added, 0.0)
    bound = error + arithmetic.later_operand * (size + error)
    return h, bound, h[-1], bound[-1]


@np.errstate(all="ignore")
def linear_scan(
    a: ArrayLike,
    b: ArrayLike,
    h0: ArrayLike | None = None,
    *,
    axis: int = -1,
    reverse: bool = False,
    eps: float = 2.0**-24,
    exact: bool = False,
) -> Scan:
    """As `oracle.linear_scan`."""
    inputs = np.moveaxis(_exact(b), axis, 0)
    gates = np.moveaxis(np.broadcast_to(_exact(a), np.shape(b)), axis, 0)
    start = None if h0 is None else _exact(h0)
    if reverse:
        gates, inputs = gates[::-1], inputs[::-1]
    kind = np.result_type(gates, inputs)
    arithmetic = _arithmetic(eps, len(inputs), is_complex=kind.kind == "c")
    h, bound, last, last_bound = _scan(gates, inputs, start, 0.0, 0.0, arithmetic, exact)
    if reverse:
        h, bound = h[::-1], bound[::-1]
    return Scan(np.moveaxis(h, 0, axis), np.moveaxis(bound, 0, axis), last, last_bound)


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
    h, h_bound, last, last_bound = _scan(gates, inputs, start, gate_error, input_error, arithmetic, exact)

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
