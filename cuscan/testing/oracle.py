"""The recurrences as loops over scalars, in float64, and beside each value a bound on its rounding error.

Everything else is tested against this module, so it is slow and plain on purpose: no array arithmetic, one
step after the other, from the equation. Inputs count as exact: a bfloat16 is a float64 too. Gradients come as values
alone.

Where the bound comes from
--------------------------
A state is a sum of terms, each an input times every gate that came after it:

    h[t] = sum over s <= t of  b[s] a[s+1] ... a[t]          (h0 is b[-1])

An implementation may associate the affine maps as it likes, but it rounds every operation by a relative eps
at most. Count the roundings that the term of step s meets:

* t - s multiplications: joining n factors takes n - 1, in any association;
* at most t - s additions as the *earlier* operand of a combine, because each of those moves the right end of
  its range to the right;
* some additions as the *later* operand: one in a serial loop, in a tree one for each serial segment, shuffle
  round and prefix on the way up. Joining n things takes at most log2(n) + 2 of them, and a tile that hands
  one summary on joins at least 32 things, so later_operand = 2 ceil(log2(length + 1)) is enough.

So the term's relative error is 2 (t - s) eps plus later_operand eps plus the errors eps_a of its t - s gates
and that of b[s] itself. The first is summed over the terms by a recurrence of its own, with c = 2 for one
multiplication and one addition a step, and the second is added where a state is read:

    H[t] = |a| H[t-1] + |b|
    E[t] = |a| E[t-1] + eps_a |a| H[t-1] + error of b + c eps H[t]
    bound[t] = E[t] + later_operand eps H[t]

A step that the mask leaves out multiplies by 1 and adds 0, which is exact, and a reset begins anew: what came
before it is in no term. What has only been carried is exact. The tree is that of the whole axis of time, packed
sequences or not.

H + E in place of H on the right covers the second order. A complex product is within sqrt(5) eps of its
modulus instead of eps, hence c = 1 + sqrt(5). A GPU flushes what is below `tiny` = 2^-126: each of the three
operations of a combine may then be off by tiny times what multiplies it, which is 1 or an earlier state.

Elementary functions may be off by 2 units in the last place, 4 eps. So a gate exp(delta A) has
eps_a = 4 eps + |delta A| (4 eps + (length eps)^2 + eps_delta): the argument is rounded once for the product and
once where A is scaled for exp2, and the gates of many steps may be one exponential of A times the sum of their
deltas. That sum has to keep what its additions round off, and is then off by (length eps)^2, a rounding at its
end and one of each delta that is larger than the sum before it; a plain sum, off by length eps, will not do. The
inputs' values are exact, but the oracle's own float64 arithmetic is not: eps grows by 2^-53.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise, product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = [
    "Scan", "assert_scan_close", "linear_scan", "linear_scan_vjp", "selective_scan", "selective_scan_vjp",
]  # fmt: skip

FUNCTION = 4  # eps of an exp, log1p or reciprocal that is right to 2 units in the last place


class Scan(NamedTuple):
    """A scan's values and last state, and what each may be off by before it is stored."""

    value: NDArray[Any]
    bound: NDArray[np.float64]
    last: NDArray[Any]
    last_bound: NDArray[np.float64]


class _Arithmetic(NamedTuple):
    eps: float
    tiny: float
    is_complex: bool
    step: float  # c eps
    exponent: float  # relative, of the argument of a gate or of many
    later_operand: float  # times eps
    underflow: float


class _State(NamedTuple):
    h: Any
    size: float  # H
    error: float  # E
    largest: float  # of all H so far: a flushed product of gates may multiply any of them


_ZERO = _State(0.0, 0.0, 0.0, 0.0)
_NO_LIMIT = (-math.inf, math.inf)


def _arithmetic(eps: float, length: int, *, is_complex: bool) -> _Arithmetic:
    tiny = 2.0**-126 if eps > 2.0**-40 else 2.0**-1022
    eps = (eps + 2.0**-53) * (1 + 2.0**-20)  # (1 + eps)^2 is a little more than 1 + 2 eps
    later_operand = 2 * length.bit_length()
    return _Arithmetic(
        eps,
        tiny,
        is_complex,
        step=(1 + (math.sqrt(5) if is_complex else 1)) * eps,
        exponent=4 * eps + (length * eps) ** 2,
        later_operand=later_operand * eps,
        underflow=3 * (later_operand + 1) * tiny,
    )


def _advance(
    state: _State | None, a: Any, gate_error: float, b: Any, input_error: float, arithmetic: _Arithmetic
) -> _State:
    """h = a h + b, or b where no state enters; gate_error is relative, input_error absolute."""
    if state is None:
        h, size, error, largest = b, abs(b), input_error, abs(b)
    else:
        size, error = abs(a) * state.size, abs(a) * state.error
        error += gate_error * (size + error) + input_error
        h = a * state.h + b
        size += abs(b)
        largest = max(state.largest, size)
    error += arithmetic.step * (size + error) + arithmetic.underflow * (1 + largest)
    return _State(h, size, error, largest)


def _bound(state: _State, arithmetic: _Arithmetic) -> float:
    if state.error == 0:  # never advanced
        return 0.0
    return state.error + arithmetic.later_operand * (state.size + state.error)


def _entering(h: Any) -> _State:
    return _State(h, abs(h), 0.0, abs(h))


def _spans(cu_seqlens: ArrayLike | None, length: int) -> list[tuple[int, int]]:
    """Where each sequence begins and ends."""
    return [(0, length)] if cu_seqlens is None else list(pairwise(np.asarray(cu_seqlens).tolist()))


def _steps(begin: int, end: int, *, reverse: bool) -> Sequence[int]:
    return range(begin, end)[::-1] if reverse else range(begin, end)


def _flags(x: ArrayLike | None, shape: tuple[int, ...], *, absent: bool) -> NDArray[np.bool_]:
    return np.broadcast_to(np.asarray(absent if x is None else x, np.bool_), shape)


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
) -> Scan:
    """h[t] = a[t] h[t-1] + b[t] along `axis`; without h0 the first state is b's.

    A step where `mask` is False leaves the state as it is, or 0 where none had entered yet.

    Parameters
    ----------
    a, b : array_like
        Gates, broadcast to the shape of b, and inputs.
    h0 : array_like, optional
        The state that enters, of b's shape without `axis`; with `cu_seqlens` (n, *b's shape without axis).
    axis : int
        The axis of time.
    reverse : bool
        Run from the last step to the first, of each sequence.
    mask, reset : array_like of bool, optional
        Broadcast to the shape of b: where a step counts, and where nothing enters it and its gate is not read.
    cu_seqlens : array_like of int, optional
        (n + 1,): sequence s is the steps cu_seqlens[s] to cu_seqlens[s + 1] - 1. The value of others is 0.
    eps : float
        Unit roundoff of the arithmetic under test: 2**-24 for float32, 2**-53 for float64.

    Returns
    -------
    Scan
        float64 or complex128 values and float64 bounds; `last` has b's shape without `axis`, with `cu_seqlens`
        (n, *b's shape without axis).
    """
    inputs = _exact(b)
    counts, resets = _flags(mask, inputs.shape, absent=True), _flags(reset, inputs.shape, absent=False)
    gates, inputs, counts, resets = (
        np.moveaxis(x, axis, -1) for x in (np.broadcast_to(_exact(a), inputs.shape), inputs, counts, resets)
    )
    rows, length = inputs.shape[:-1], inputs.shape[-1]
    spans = _spans(cu_seqlens, length)
    start = None if h0 is None else np.broadcast_to(_exact(h0), (len(spans), *rows))
    kind = np.result_type(gates, inputs, np.float64 if start is None else start)
    arithmetic = _arithmetic(eps, length, is_complex=kind.kind == "c")

    value, bound = np.zeros(inputs.shape, kind), np.zeros(inputs.shape)
    last, last_bound = np.zeros((len(spans), *rows), kind), np.zeros((len(spans), *rows))
    for row in np.ndindex(rows):
        row_gates, row_inputs = gates[row].tolist(), inputs[row].tolist()
        for s, (begin, end) in enumerate(spans):
            state = None if start is None else _entering(start[(s, *row)].item())
            for t in _steps(begin, end, reverse=reverse):
                if resets[(*row, t)]:
                    state = None
                if counts[(*row, t)]:
                    state = _advance(state, row_gates[t], 0.0, row_inputs[t], 0.0, arithmetic)
                elif state is None:
                    state = _ZERO
                value[(*row, t)], bound[(*row, t)] = state.h, _bound(state, arithmetic)
            state = state or _ZERO
            last[(s, *row)], last_bound[(s, *row)] = state.h, _bound(state, arithmetic)
    if cu_seqlens is None:
        last, last_bound = last[0], last_bound[0]
    return Scan(np.moveaxis(value, -1, axis), np.moveaxis(bound, -1, axis), last, last_bound)


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
    delta_limit: tuple[float, float] | None = None,
    layout: str = "bld",
    eps: float = 2.0**-24,
) -> Scan:
    """h[t] = exp(delta[t] A) h[t-1] + delta[t] B[t] u[t]; y[t] = (sum of C[t] h[t] + D u[t]) silu(z[t]).

    The shapes are those of :func:`cuscan.selective_scan`. With a complex A, B or C, the sum is 2 Re(sum).
    A step where `mask` is False leaves the state as it is, or 0 where none had entered yet, and has y = 0.

    Parameters
    ----------
    u, delta, z : array_like
        (batch, length, channels), or (batch, channels, length) in layout "bdl".
    A : array_like
        (channels, state).
    B, C : array_like
        (channels, state), (batch, length, state) or (batch, length, groups, state); in layout "bdl"
        (channels, state), (batch, state, length) or (batch, groups, state, length).
    D, delta_bias : array_like, optional
        (channels,).
    delta_softplus : bool
        delta is softplus(delta + delta_bias).
    h0 : array_like, optional
        The state that enters, (batch, channels, state); with `cu_seqlens` (n, channels, state).
    reverse : bool
        Run from the last step to the first, of each sequence.
    mask, reset : array_like of bool, optional
        (batch, length) in both layouts: where a step counts, and where nothing enters it: h[t] = delta[t] B[t] u[t].
    cu_seqlens : array_like of int, optional
        (n + 1,), with batch 1: sequence s is the steps cu_seqlens[s] to cu_seqlens[s + 1] - 1. y of others is 0.
    delta_limit : tuple of float, optional
        (lo, hi), applied to delta after bias and softplus.
    layout : {"bld", "bdl"}
        The order of the axes.
    eps : float
        Unit roundoff of the arithmetic under test: 2**-24 for float32, 2**-53 for float64.

    Returns
    -------
    Scan
        `value` is y in the layout of u, float64; `last` the last state (batch, channels, state), with
        `cu_seqlens` (n, channels, state).
    """
    u_, delta_ = (_time_second(_exact(x), layout) for x in (u, delta))
    gate_ = None if z is None else _time_second(_exact(z), layout).tolist()
    A_ = _exact(A)
    channels, states = A_.shape
    batch, length, _ = u_.shape
    B_, C_ = (_Matrix(_exact(x), layout, channels) for x in (B, C))
    start = None if h0 is None else _exact(h0)
    kind = np.result_type(A_, B_.array, C_.array, np.float64 if start is None else start)
    arithmetic = _arithmetic(eps, length, is_complex=kind.kind == "c")
    limit = _NO_LIMIT if delta_limit is None else delta_limit
    bias = None if delta_bias is None else _exact(delta_bias).tolist()
    skip = [None] * channels if D is None else _exact(D).tolist()

    counts = _flags(mask, (batch, length), absent=True).tolist()
    resets = _flags(reset, (batch, length), absent=False).tolist()
    # Sequences and the batch entry that they are in.
    spans = _spans(cu_seqlens, length)
    sequences = [(i, *span) for i in range(batch) for span in spans]

    value, bound = np.zeros(u_.shape), np.zeros(u_.shape)
    last = np.zeros((len(sequences), channels, states), kind)
    last_bound = np.zeros(last.shape)
    u_rows, delta_rows, A_rows = u_.tolist(), delta_.tolist(), A_.tolist()
    for s, (i, begin, end) in enumerate(sequences):
        for d in range(channels):
            state: list[_State | None] = [None] * states
            if start is not None:
                state = [_entering(h) for h in start[s, d].tolist()]
            for t in _steps(begin, end, reverse=reverse):
                if resets[i][t]:
                    state = [None] * states
                if not counts[i][t]:
                    state = [each or _ZERO for each in state]
                    continue
                drive = u_rows[i][t][d]
                shift = None if bias is None else bias[d]
                step, step_error = _delta(delta_rows[i][t][d], shift, delta_softplus, limit, arithmetic)
                B_row, C_row = B_.row(i, t, d), C_.row(i, t, d)
                now = [
                    _selective_step(state[n], A_rows[d][n], B_row[n], drive, step, step_error, arithmetic)
                    for n in range(states)
                ]
                state = [*now]
                h, h_bound = [each.h for each in now], [_bound(each, arithmetic) for each in now]
                y, error = _contract(h, h_bound, C_row, skip[d], drive, arithmetic)
                if gate_ is not None:
                    y, error = _gated(y, error, gate_[i][t][d], arithmetic)
                value[i, t, d], bound[i, t, d] = y, error
            final = [each or _ZERO for each in state]
            last[s, d], last_bound[s, d] = [each.h for each in final], [_bound(each, arithmetic) for each in final]
    return Scan(_caller_order(value, layout), _caller_order(bound, layout), last, last_bound)


def linear_scan_vjp(
    a: ArrayLike,
    h: ArrayLike,
    grad_h: ArrayLike | None = None,
    h0: ArrayLike | None = None,
    *,
    grad_last_state: ArrayLike | None = None,
    axis: int = -1,
    reverse: bool = False,
    mask: ArrayLike | None = None,
    reset: ArrayLike | None = None,
    cu_seqlens: ArrayLike | None = None,
) -> dict[str, NDArray[Any]]:
    """The gradients of a loss with respect to a, b and h0, from that with respect to h and the last state.

    g[t], the gradient with respect to h[t], is grad_h[t], plus grad_last_state at the end, plus what h[t] does to
    h[t+1], which is conj(a[t+1]) g[t+1]. Then b[t] has g[t] and a[t] has g[t] conj(h[t-1]). A complex gradient is
    twice that with respect to the conjugate.

    Parameters
    ----------
    a, h : array_like
        Gates, broadcast to the shape of h, and states, those that :func:`linear_scan` gives.
    grad_h, grad_last_state : array_like, optional
        Of the shapes of h and of the last state.
    h0, axis, reverse, mask, reset, cu_seqlens
        As :func:`linear_scan` takes them.

    Returns
    -------
    dict
        "a" of the shape of a, "b" of that of h and, with h0, "h0" of that of the last state: float64 or complex128.
    """
    states = _exact(h)
    arrays = (
        np.broadcast_to(_exact(a), states.shape),
        states,
        np.zeros(states.shape) if grad_h is None else _exact(grad_h),
        _flags(mask, states.shape, absent=True),
        _flags(reset, states.shape, absent=False),
    )
    gates, states, received, counts, resets = (np.moveaxis(x, axis, -1) for x in arrays)
    rows, length = states.shape[:-1], states.shape[-1]
    spans = _spans(cu_seqlens, length)
    start, ending = (
        None if x is None else np.broadcast_to(_exact(x), (len(spans), *rows)) for x in (h0, grad_last_state)
    )
    kind = np.result_type(*(x for x in (gates, states, received, start, ending) if x is not None))
    grad_a, grad_b = np.zeros((2, *states.shape), kind)
    grad_h0 = np.zeros((len(spans), *rows), kind)
    for row in np.ndindex(rows):
        for s, (begin, end) in enumerate(spans):
            g: Any = 0.0 if ending is None else ending[(s, *row)].item()
            before: int | None = None
            for t in _steps(begin, end, reverse=not reverse):
                at = (*row, t)
                before = t + 1 if reverse else t - 1
                entering = states[(*row, before)].item() if begin <= before < end else None
                if entering is None and start is not None:
                    entering = start[(s, *row)].item()
                if resets[at]:
                    entering = None
                g += received[at].item()
                if counts[at]:
                    grad_b[at] = g
                    if entering is not None:
                        grad_a[at] = g * entering.conjugate()
                    g *= gates[at].item().conjugate()
                if entering is None:
                    g = 0.0
            grad_h0[(s, *row)] = g
    gradients = {"a": _summed(np.moveaxis(grad_a, -1, axis), np.shape(a)), "b": np.moveaxis(grad_b, -1, axis)}
    if h0 is not None:
        gradients["h0"] = grad_h0[0] if cu_seqlens is None else grad_h0
    return gradients


def _summed(x: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """The sum over the axes along which an array of `shape` was broadcast."""
    wide = (1,) * (x.ndim - len(shape)) + shape
    axes = tuple(d for d in range(x.ndim) if wide[d] == 1)
    total: NDArray[Any] = x.sum(axis=axes, keepdims=True).reshape(shape)
    return total


def selective_scan_vjp(
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
    grad_out: ArrayLike | None = None,
    grad_last_state: ArrayLike | None = None,
    h0: ArrayLike | None = None,
    reverse: bool = False,
    mask: ArrayLike | None = None,
    reset: ArrayLike | None = None,
    cu_seqlens: ArrayLike | None = None,
    delta_limit: tuple[float, float] | None = None,
    layout: str = "bld",
) -> dict[str, NDArray[Any]]:
    """The gradients of a loss with respect to every input, from that with respect to y and the last state.

    With d the delta that is used, y0 the y before it is gated, g[t] the gradient with respect to h[t], and p[t] that
    with respect to the h[t-1] that enters step t:

        dy = grad_out silu(z)        of z: grad_out y0 silu'(z)        of D: sum of dy u
        g[t] = C dy + p[t+1], with grad_last_state for p[t+1] at the end        p[t] = conj(exp(d A)) g[t]
        of C: dy conj(h[t])        of B: g d u        of u: sum over n of conj(B) g d + dy D
        q = p conj(h[t-1])        of A: sum of d q        of d: sum over n of conj(A) q + conj(B) g u

    With a complex A, B or C, the gradients with respect to them and h0 are twice those with respect to their
    conjugates, dy is 2 dy beside a C and an h, and only the real part of a sum over n counts. The gradient with respect
    to delta is 0 where delta_limit changed it, where it met a NaN, and without states, whatever delta is.

    Parameters
    ----------
    u, delta, A, B, C, D, z, delta_bias, delta_softplus, h0, reverse, mask, reset, cu_seqlens, delta_limit, layout
        As :func:`selective_scan` takes them.
    grad_out, grad_last_state : array_like, optional
        Of the shapes of u and of the last state.

    Returns
    -------
    dict
        The gradient with respect to each array that was given, of its shape and by its name: float64 or complex128.
    """
    u_, delta_ = (_time_second(_exact(x), layout) for x in (u, delta))
    received = np.zeros(u_.shape) if grad_out is None else _time_second(_exact(grad_out), layout)
    gate_ = None if z is None else _time_second(_exact(z), layout)
    A_ = _exact(A)
    channels, states = A_.shape
    batch, length, _ = u_.shape
    B_, C_ = (_Matrix(_exact(x), layout, channels) for x in (B, C))
    start, ending = (None if x is None else _exact(x) for x in (h0, grad_last_state))
    kind = np.result_type(*(x for x in (A_, B_.array, C_.array, start, ending) if x is not None))
    twice = 2 if kind.kind == "c" else 1
    arithmetic = _arithmetic(0.0, length, is_complex=kind.kind == "c")
    bias = None if delta_bias is None else _exact(delta_bias)
    skip = None if D is None else _exact(D)
    counts = _flags(mask, (batch, length), absent=True).tolist()
    resets = _flags(reset, (batch, length), absent=False).tolist()
    spans = _spans(cu_seqlens, length)
    sequences = [(i, *span) for i in range(batch) for span in spans]

    grad_u, grad_delta, grad_z = np.zeros((3, *u_.shape))
    grad_D, grad_bias = np.zeros((2, channels))
    grad_A, grad_h0 = np.zeros(A_.shape, kind), np.zeros((len(sequences), channels, states), kind)
    grad_B, grad_C = (np.zeros(x.shape, kind) for x in (B_, C_))
    for (s, (i, begin, end)), d in product(enumerate(sequences), range(channels)):
        rates = A_[d].tolist()
        entering: dict[int, list[Any] | None] = {}  # None where nothing enters
        left: dict[int, list[Any]] = {}
        h: list[Any] | None = None if start is None else start[s, d].tolist()
        for t in _steps(begin, end, reverse=reverse):
            entering[t] = h = None if resets[i][t] else h
            if counts[i][t]:
                x = delta_[i, t, d].item()
                shift = None if bias is None else bias[d].item()
                step, _ = _delta(x, shift, delta_softplus, delta_limit or _NO_LIMIT, arithmetic)
                inputs = [step * B_.row(i, t, d)[n] * u_[i, t, d].item() for n in range(states)]
                h = inputs if h is None else [_exp(step * rates[n]) * h[n] + inputs[n] for n in range(states)]
            left[t] = h = [0.0] * states if h is None else h

        p: list[Any] = [0.0] * states if ending is None else ending[s, d].tolist()
        for t in _steps(begin, end, reverse=not reverse):
            before = entering[t]
            if counts[i][t]:
                at = (i, t, d)
                drive, dy = u_[at].item(), received[at].item()
                B_row, C_row = B_.row(i, t, d), C_.row(i, t, d)
                if gate_ is not None:
                    gate = gate_[at].item()
                    sigmoid, other = 1 / (1 + _exp(-gate)), 1 / (1 + _exp(gate))  # 1 - sigmoid would be 0 from 37 on
                    y0 = twice * sum(C_row[n] * left[t][n] for n in range(states)).real
                    y0 += 0.0 if skip is None else skip[d].item() * drive
                    grad_z[at] = dy * y0 * sigmoid * (1 + gate * other)
                    dy *= gate * sigmoid
                x = delta_[at].item() + (0.0 if bias is None else bias[d].item())
                unlimited, _ = _delta(x, None, delta_softplus, _NO_LIMIT, arithmetic)
                step, _ = _delta(x, None, delta_softplus, delta_limit or _NO_LIMIT, arithmetic)
                of_u = 0.0 if skip is None else dy * skip[d].item()
                of_step = 0.0
                for n in range(states):
                    g = p[n] + twice * dy * C_row[n].conjugate()
                    p[n] = 0.0 if before is None else _exp(step * rates[n]).conjugate() * g
                    q = 0.0 if before is None else p[n] * before[n].conjugate()
                    C_.add(grad_C, i, t, d, n, twice * dy * left[t][n].conjugate())
                    B_.add(grad_B, i, t, d, n, g * step * drive)
                    grad_A[d, n] += step * q
                    of_u += step * (B_row[n].conjugate() * g).real
                    of_step += (rates[n].conjugate() * q + B_row[n].conjugate() * g * drive).real
                grad_u[at] = of_u
                grad_D[d] += dy * drive
                if states and (delta_limit is None or delta_limit[0] <= unlimited <= delta_limit[1]):
                    grad_delta[at] = of_step / (1 + _exp(-x)) if delta_softplus else of_step
                grad_bias[d] += grad_delta[at]
            if before is None:
                p = [0.0] * states
        grad_h0[s, d] = p
    grads = {"A": grad_A, "B": B_.caller_order(grad_B, layout), "C": C_.caller_order(grad_C, layout), "D": grad_D}
    grads |= {"u": grad_u, "delta": grad_delta, "z": grad_z}
    grads |= {name: _caller_order(grads[name], layout) for name in ("u", "delta", "z")}
    grads |= {"delta_bias": grad_bias, "h0": grad_h0}
    absent = {name for name, x in (("D", D), ("z", z), ("delta_bias", delta_bias), ("h0", h0)) if x is None}
    return {name: x for name, x in grads.items() if name not in absent}


def _selective_step(
    state: _State | None,
    A: Any,
    B: Any,
    drive: float,
    step: float,
    step_error: float,
    arithmetic: _Arithmetic,
) -> _State:
    eps = arithmetic.eps
    gate = 0.0 if state is None else _exp(step * A)  # not read
    # A complex gate has an exp, a sine or cosine, and their product.
    gate_error = (2 * FUNCTION + 1 if arithmetic.is_complex else FUNCTION) * eps
    gate_error += arithmetic.exponent * abs(step * A) + step_error * abs(A)
    # delta B u has two products in any order; a flushed factor or product is multiplied by the other factors.
    input_error = (step_error + 2 * eps * abs(step)) * abs(B) * abs(drive)
    input_error += arithmetic.tiny * (1 + abs(step)) * (1 + abs(B)) * (1 + abs(drive))
    return _advance(state, gate, gate_error, step * B * drive, input_error, arithmetic)


def _delta(
    x: float, shift: float | None, softplus: bool, limit: tuple[float, float], arithmetic: _Arithmetic
) -> tuple[float, float]:
    """Delta after bias, softplus and limits, and its absolute error."""
    eps, error = arithmetic.eps, 0.0
    if shift is not None:
        x += shift
        error = eps * abs(x)
    if softplus:
        small = _exp(-abs(x))
        # The slope of softplus carries the error of x over: below 0 it is softplus itself, and so a relative
        # error of eps |x|. log1p(exp) has two functions, which do not magnify, and one addition.
        slope = (1.0 if x > 0 else small) / (1 + small)
        x = max(x, 0.0) + math.log1p(small)
        error = slope * error + (2 * FUNCTION + 1) * eps * x + arithmetic.tiny
    if math.isinf(x):
        error = 0.0

    def clip(v: float) -> float:
        return min(max(v, limit[0]), limit[1])  # in this order NaN stays

    used = clip(x)
    if used != x:
        # Below or above by more than the error, only the rounded limit itself counts.
        error = max(clip(x + error) - used, used - clip(x - error)) + eps * abs(used)
    return used, error


def _contract(
    h: list[Any], h_bound: list[float], C: list[Any], D: float | None, drive: float, arithmetic: _Arithmetic
) -> tuple[float, float]:
    """Sum of C h, plus D u, and its error: a product and at most len(h) additions a term, in any order."""
    y: Any = 0.0
    error = size = 0.0
    for n in range(len(h)):
        y += C[n] * h[n]
        error += abs(C[n]) * h_bound[n] + arithmetic.tiny * (1 + abs(C[n])) * (1 + abs(h[n]))
        size += abs(C[n]) * (abs(h[n]) + h_bound[n])
    roundings = len(h) + 1
    if arithmetic.is_complex:  # the real part of each product is one more addition
        y, error, size, roundings = 2 * y.real, 2 * error, 2 * size, roundings + 1
    if D is not None:
        y += D * drive
        size += abs(D * drive)
        error += arithmetic.tiny * (1 + abs(D)) * (1 + abs(drive))
    return y, error + roundings * arithmetic.eps * size


def _gated(y: float, error: float, z: float, arithmetic: _Arithmetic) -> tuple[float, float]:
    """Y silu(z), silu(z) = z / (1 + exp(-z)): two functions and three operations (1 +, times z, times y)."""
    silu = z / (1 + _exp(-z))
    roundings = 2 * FUNCTION + 3
    size = abs(y) + error
    flushed = arithmetic.tiny * (1 + size) * (1 + abs(z))
    return y * silu, abs(silu) * (error + roundings * arithmetic.eps * size) + flushed


class _Matrix:
    """B or C: `row(i, t, d)` is the list of its state values at a batch entry, a time and a channel."""

    def __init__(self, array: NDArray[Any], layout: str, channels: int) -> None:
        self.array = array
        self.constant = array.ndim == 2
        if array.ndim == 3:  # (batch, length, state) and (batch, state, length) have one group
            array = np.expand_dims(array, 2 if layout == "bld" else 1)
        if not self.constant:
            array = array if layout == "bld" else np.moveaxis(array, -1, 1)
            self.per_group = channels // array.shape[2]
        self.shape = array.shape
        self.rows = array.tolist()

    def row(self, i: int, t: int, d: int) -> list[Any]:
        row: list[Any] = self.rows[d] if self.constant else self.rows[i][t][d // self.per_group]
        return row

    def add(self, total: NDArray[Any], i: int, t: int, d: int, n: int, x: Any) -> None:
        """Add to the item of `total`, of `shape`, that is the n-th of row(i, t, d)."""
        total[(d, n) if self.constant else (i, t, d // self.per_group, n)] += x

    def caller_order(self, x: NDArray[Any], layout: str) -> NDArray[Any]:
        """An array of `shape` in the order and shape of `array`."""
        if not self.constant and layout == "bdl":
            x = np.moveaxis(x, 1, -1)
        return x.reshape(self.array.shape)


def _exact(x: ArrayLike) -> NDArray[Any]:
    array = np.asarray(x)
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def _time_second(array: NDArray[Any], layout: str) -> NDArray[Any]:
    return array if layout == "bld" else np.swapaxes(array, 1, 2)


_caller_order = _time_second  # the swap undoes itself


def _exp(x: Any) -> Any:
    if isinstance(x, complex):
        size = _exp(x.real)
        return complex(size * math.cos(x.imag), size * math.sin(x.imag))
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


# (bits of the mantissa after the point, exponent of the smallest normal number)
_FORMATS = {"float16": (10, -14), "bfloat16": (7, -126), "float32": (23, -126), "float64": (52, -1022)}
_PARTS = {"complex64": "float32", "complex128": "float64"}


def assert_scan_close(actual: ArrayLike, value: ArrayLike, bound: ArrayLike) -> None:
    """Assert |actual - value| <= bound + half a unit in the last place of actual's type.

    Parameters
    ----------
    actual : array_like
        What is tested, of any float or complex type; the oracle's value was rounded to it once, at the end.
    value, bound : array_like
        From the oracle, of actual's shape.

    Raises
    ------
    AssertionError
        If the shapes differ, if NaNs are not in the same places or infinities not the same, or if an element
        is further off; the message names the worst.
    """
    given = np.asarray(actual)
    value_, bound_ = _exact(value), np.asarray(bound, np.float64)
    if given.shape != value_.shape:
        raise AssertionError(f"shape {given.shape}, expected {value_.shape}")
    if given.size == 0:
        return
    mantissa, smallest = _FORMATS[_PARTS.get(given.dtype.name, given.dtype.name)]
    given_ = _exact(given)
    with np.errstate(all="ignore"):
        finite = np.isfinite(value_)
        reach = np.where(finite, np.abs(value_) + bound_, 0.0)  # what is rounded may lie that far out
        exponent = np.maximum(np.frexp(reach)[1] - 1, smallest)
        half_ulp = np.ldexp(0.5, exponent - mantissa)
        if given_.dtype.kind == "c":
            half_ulp = half_ulp * math.sqrt(2)
        allowed = bound_ + half_ulp
        error = np.abs(given_ - value_)
        # An output type's overflow is a rounding too.
        overflow = np.ldexp(2 - 2.0 ** -(mantissa + 1), 1 - smallest)
        close = (error <= allowed) | ((reach >= overflow) & np.isinf(given_) & (np.sign(given_) == np.sign(value_)))
        # Not "error > allowed", which a NaN in either would pass.
        same = np.where(np.isnan(value_), np.isnan(given_), given_ == value_)
        wrong = ~np.where(finite, close, same)
        if not wrong.any():
            return
        excess = np.where(wrong, np.where(np.isnan(error / allowed), np.inf, error / allowed), -1.0)
    worst = np.unravel_index(int(np.argmax(excess)), excess.shape)
    where = tuple(int(i) for i in worst)
    raise AssertionError(
        f"{np.count_nonzero(wrong)} of {wrong.size} elements are further off than their bound; the worst, at "
        f"{where}: actual {given_[worst]!r}, expected {value_[worst]!r}, error {error[worst]:.3g}, allowed "
        f"{allowed[worst]:.3g} (bound {bound_[worst]:.3g} + {half_ulp[worst]:.3g} for {given.dtype.name})"
    )
