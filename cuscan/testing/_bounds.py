"""What `oracle` computes, with arrays: the same equations and bounds for a fuzzer that has no time for scalars.

Only the loops over sequences and time are left. `oracle` says where the bound comes from, and the tests hold the two
together. With `exact` the inputs are those for which every state is exact in any association: no state has an error.

Gradients have their bounds here. g[t], what a loss does with h[t], is a scan against time, with the gate of the step
after, and so has a scan's bound. All else is products and sums of values that have bounds already: a product is off by
what its factors are off by and one rounding, and a sum of n terms, in any association, by what they are off by and n
roundings of the sum of their sizes. The states that a kernel starts from are those of its own scan, and have its bound.
With `exact`, integers up to 1 / eps are not rounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cuscan._plan import STATE_INTERVAL

from .oracle import FUNCTION, Scan, _Arithmetic, _arithmetic, _exact, _spans, _time_second

Array = NDArray[Any]
Limits = tuple[float, float]


class Bounded(NamedTuple):
    """Values, and what each may be off by before it is stored."""

    value: Array
    bound: Array

    @property
    def size(self) -> Array:
        """What no computed value is above."""
        return np.asarray(np.abs(self.value) + self.bound)

    def map(self, function: Callable[[Array], Array]) -> Bounded:
        """Rearranged."""
        return Bounded(function(self.value), function(self.bound))

    def where(self, condition: Array | None) -> Bounded:
        """0 where the condition, without the last axes, is False."""
        if condition is None:
            return self
        condition = condition.reshape(condition.shape + (1,) * (self.value.ndim - condition.ndim))
        return self.map(lambda x: np.where(condition, x, 0))


def _given(x: Array) -> Bounded:
    return Bounded(x, np.zeros(x.shape))


class _Rounding(NamedTuple):
    """Products and sums."""

    arithmetic: _Arithmetic
    exact: bool

    def error(self, size: Array, roundings: float) -> Array:
        relative = roundings * self.arithmetic.eps
        error = size * (relative / (1 - relative))
        return np.where(size > 1 / self.arithmetic.eps, error, 0) if self.exact else error

    def product(self, x: Bounded, y: Bounded) -> Bounded:
        complexes = x.value.dtype.kind == y.value.dtype.kind == "c"
        error = x.size * y.bound + np.abs(y.value) * x.bound
        error = error + self.error(x.size * y.size, math.sqrt(5) if complexes else 1)
        if not self.exact:
            error = error + 4 * self.arithmetic.tiny * (1 + x.size) * (1 + y.size)
        return Bounded(x.value * y.value, error)

    def total(self, x: Bounded, axis: tuple[int, ...]) -> Bounded:
        terms = math.prod(x.value.shape[d] for d in axis)
        error = x.bound.sum(axis) + self.error(x.size.sum(axis), terms)
        return Bounded(x.value.sum(axis), error + (0 if self.exact else terms * self.arithmetic.tiny))


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
    steps: _Steps, start: Array | None, spans: list[tuple[int, int]], arithmetic: _Arithmetic, exact: bool
) -> tuple[Array, Array, Array, Array]:
    """As `_scan` of each sequence; `start` and what is last have a leading axis of sequences."""
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


def _spans_in_turn(cu_seqlens: ArrayLike | None, length: int, *, reverse: bool) -> list[tuple[int, int]]:
    """Where each sequence begins and ends in the order of the scan."""
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
    spans = _spans_in_turn(cu_seqlens, len(inputs), reverse=reverse)
    start = None if h0 is None else np.broadcast_to(_exact(h0), (len(spans), *inputs.shape[1:]))
    arithmetic = _arithmetic(eps, len(inputs), is_complex=np.result_type(gates, inputs).kind == "c")
    none = np.broadcast_to(0.0, inputs.shape)
    counts, resets = (None if x is None else time_first(x) for x in (mask, reset))
    h, bound, last, last_bound = _scan_sequences(
        _Steps(gates, inputs, none, none, counts, resets), start, spans, arithmetic, exact
    )
    if cu_seqlens is None:
        last, last_bound = last[0], last_bound[0]
    return Scan(np.moveaxis(h[turn], 0, axis), np.moveaxis(bound[turn], 0, axis), last, last_bound)


@np.errstate(all="ignore")
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
    eps: float = 2.0**-24,
    exact: bool = False,
) -> dict[str, Bounded]:
    """As `oracle.linear_scan_vjp`, with bounds."""
    turn = slice(None, None, -1 if reverse else 1)
    shape = np.shape(h)

    def time_first(x: ArrayLike) -> Array:
        return np.moveaxis(np.broadcast_to(x, shape), axis, 0)[turn]

    def in_place(x: Array) -> Array:
        return np.moveaxis(x[turn], 0, axis)

    gates, states, received = (time_first(0.0 if x is None else _exact(x)) for x in (a, h, grad_h))
    counts, resets = (None if x is None else time_first(x) for x in (mask, reset))
    length = len(states)
    spans = _spans_in_turn(cu_seqlens, length, reverse=reverse)
    lead = (len(spans), *states.shape[1:])
    start, ending = (None if x is None else np.broadcast_to(_exact(x), lead) for x in (h0, grad_last_state))
    arithmetic = _arithmetic(eps, length, is_complex=np.result_type(gates, states).kind == "c")
    rounding = _Rounding(arithmetic, exact)

    inside = _inside(spans, length).reshape(-1, *(1,) * (states.ndim - 1))
    counts = np.broadcast_to(inside if counts is None else inside & counts, states.shape)
    gates = np.where(counts, gates, 1).conj()
    received = np.where(inside, received, 0)
    none = np.zeros(states.shape)
    g = _received(gates, none, _given(received), resets, ending, spans, rounding)
    before, enters = _before(_given(states), start, resets, spans)
    p = rounding.product(g, _given(gates)).where(enters)
    of_a = rounding.product(g, before.map(np.conj)).where(enters & counts)
    gradients = {
        "a": _summed(of_a.map(in_place), np.shape(a), rounding),
        "b": g.where(counts).map(in_place),
    }
    if h0 is not None:
        gradients["h0"] = _of_start(p, ending, spans).map(lambda x: x[0] if cu_seqlens is None else x)
    return gradients


def _summed(x: Bounded, shape: tuple[int, ...], rounding: _Rounding) -> Bounded:
    """The sum over the axes along which an array of `shape` was broadcast."""
    wide = (1,) * (x.value.ndim - len(shape)) + shape
    axes = tuple(d for d, size in enumerate(wide) if size == 1 and x.value.shape[d] != 1)
    return (rounding.total(x, axes) if axes else x).map(lambda each: each.reshape(shape))


def _inside(spans: list[tuple[int, int]], length: int) -> Array:
    inside = np.zeros(length, np.bool_)
    for begin, end in spans:
        inside[begin:end] = True
    return inside


def _received(
    gates: Array,
    gate_error: Array,
    inputs: Bounded,
    resets: Array | None,
    ending: Array | None,
    spans: list[tuple[int, int]],
    rounding: _Rounding,
) -> Bounded:
    """g[t] = gates[t+1] g[t+1] + inputs[t] in each sequence, from `ending` on, across no reset; time first."""
    resets = np.zeros((len(gates), *(1,) * (gates.ndim - 1)), np.bool_) if resets is None else resets
    later = [np.concatenate((x[1:], x[:1])) for x in (gates, gate_error, resets)]
    for begin, end in spans:
        if begin < end:
            later[0][end - 1], later[1][end - 1], later[2][end - 1] = 1, 0, False
    turned = [x[::-1] for x in (later[0], inputs.value, later[1], inputs.bound, later[2])]
    length = len(gates)
    g, bound, _, _ = _scan_sequences(
        _Steps(turned[0], turned[1], turned[2], turned[3], None, turned[4]),
        ending,
        [(length - end, length - begin) for begin, end in spans],
        rounding.arithmetic,
        rounding.exact,
    )
    return Bounded(g[::-1], bound[::-1])


def _before(
    h: Bounded, start: Array | None, resets: Array | None, spans: list[tuple[int, int]]
) -> tuple[Bounded, Array]:
    """The states that enter the steps, time first, and where any does."""
    before = h.map(lambda x: np.concatenate((x[:1], x[:-1])))
    enters = np.ones((len(h.value), *(1,) * (h.value.ndim - 1)), np.bool_)
    enters = enters if resets is None else enters & ~resets
    for s, (begin, end) in enumerate(spans):
        if begin < end:
            before.value[begin], before.bound[begin] = 0 if start is None else start[s], 0
            enters[begin] &= start is not None
    return before.where(enters), enters


def _of_start(p: Bounded, ending: Array | None, spans: list[tuple[int, int]]) -> Bounded:
    """What each sequence's first state receives: what enters its first step, or all that it ends with."""
    lead = (len(spans), *p.value.shape[1:])
    value = np.zeros(lead, p.value.dtype) if ending is None else ending.astype(p.value.dtype)
    bound = np.zeros(lead)
    for s, (begin, end) in enumerate(spans):
        if begin < end:
            value[s], bound[s] = p.value[begin], p.bound[begin]
    return Bounded(value, bound)


class _Selective(NamedTuple):
    """What y and the gradients are formed of, time first, in the order of the scan; no NaN where nothing counts."""

    u: Array
    A: Array
    B: Array
    C: Array
    x: Bounded  # delta with bias
    unlimited: Bounded  # after softplus
    step: Bounded  # after limits
    gates: Array
    gate_error: Array
    h: Bounded
    last: Bounded
    y: Bounded  # not yet gated
    start: Array | None  # it and `last` have an axis of sequences in front of that of batch
    counts: Array | None  # (time, batch), False outside of all sequences too
    resets: Array | None
    spans: list[tuple[int, int]]
    rounding: _Rounding
    is_complex: bool


def _selective(
    u: ArrayLike,
    delta: ArrayLike,
    A: ArrayLike,
    B: ArrayLike,
    C: ArrayLike,
    D: ArrayLike | None,
    delta_bias: ArrayLike | None,
    h0: ArrayLike | None,
    mask: ArrayLike | None,
    reset: ArrayLike | None,
    cu_seqlens: ArrayLike | None,
    *,
    delta_softplus: bool,
    delta_limit: Limits | None,
    reverse: bool,
    layout: str,
    eps: float,
    exact: bool,
) -> _Selective:
    turn = slice(None, None, -1 if reverse else 1)
    u_, delta_ = (_sequence(x, layout, turn) for x in (u, delta))
    A_ = _exact(A)
    B_, C_ = (_matrix(_exact(x), layout, len(A_), turn) for x in (B, C))
    start = _by_sequence(h0, cu_seqlens)
    is_complex = np.result_type(A_, B_, C_).kind == "c"
    arithmetic = _arithmetic(eps, len(u_), is_complex=is_complex)
    eps, tiny = arithmetic.eps, arithmetic.tiny

    # (time, batch), and for the states (time, batch, 1, 1).
    counts, resets = (None if x is None else np.swapaxes(np.asarray(x), 0, 1)[turn] for x in (mask, reset))
    spans = _spans_in_turn(cu_seqlens, len(u_), reverse=reverse)
    if cu_seqlens is not None:
        inside = _inside(spans, len(u_))[:, None]
        counts = inside if counts is None else counts & inside
    u_, delta_ = (_given(x).where(counts).value for x in (u_, delta_))
    B_, C_ = (x if x.ndim == 2 else _given(x).where(counts).value for x in (B_, C_))
    x, unlimited, used = _delta(
        delta_, None if delta_bias is None else _exact(delta_bias), delta_softplus, delta_limit, arithmetic
    )
    if exact:
        x, unlimited, used = (_given(each.value) for each in (x, unlimited, used))

    step, step_error, drive = used.value[..., None], used.bound[..., None], u_[..., None]
    exponent = step * A_
    gates, inputs = np.exp(exponent), step * B_ * drive
    if exact:
        gates = np.rint(gates)  # what float32 flushes is 0
    gate_error: Any = 0.0
    input_error: Any = 0.0
    if not exact:
        gate_error = (2 * FUNCTION + 1 if is_complex else FUNCTION) * eps
        gate_error = gate_error + arithmetic.exponent * np.abs(exponent) + step_error * np.abs(A_)
        input_error = (step_error + 2 * eps * np.abs(step)) * np.abs(B_) * np.abs(drive)
        input_error += tiny * (1 + np.abs(step)) * (1 + np.abs(B_)) * (1 + np.abs(drive))
    gate_error = np.broadcast_to(gate_error, inputs.shape)
    steps = _Steps(
        gates,
        inputs,
        gate_error,
        np.broadcast_to(input_error, inputs.shape),
        *(None if x is None else x[..., None, None] for x in (counts, resets)),
    )
    h, h_bound, last, last_bound = _scan_sequences(steps, start, spans, arithmetic, exact)

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
    return _Selective(
        u_, A_, B_, C_, x, unlimited, used, gates, gate_error, Bounded(h, h_bound), Bounded(last, last_bound),
        Bounded(y, error + roundings * eps * size), start, counts, resets, spans, _Rounding(arithmetic, exact),
        is_complex,
    )  # fmt: skip


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
    scan = _selective(
        u, delta, A, B, C, D, delta_bias, h0, mask, reset, cu_seqlens, delta_softplus=delta_softplus,
        delta_limit=delta_limit, reverse=reverse, layout=layout, eps=eps, exact=exact,
    )  # fmt: skip
    turn = slice(None, None, -1 if reverse else 1)
    y, error = scan.y
    if z is not None:
        gate = _sequence(z, layout, turn)
        eps, tiny = scan.rounding.arithmetic.eps, scan.rounding.arithmetic.tiny
        silu = gate / (1 + np.exp(-gate))
        size = np.abs(y) + error
        error = np.abs(silu) * (error + (2 * FUNCTION + 3) * eps * size) + tiny * (1 + size) * (1 + np.abs(gate))
        y = y * silu
    y, error = Bounded(y, error).where(scan.counts).map(lambda x: _caller(x, layout, turn))
    last, last_bound = scan.last.map(lambda x: x[0] if cu_seqlens is None else x[:, 0])
    return Scan(y, error, last, last_bound)


@np.errstate(all="ignore")
def selective_states(
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
) -> Bounded:
    """What `cuscan.selective_scan` saves: the states that enter every STATE_INTERVAL-th step, 0 where none does."""
    del z
    scan = _selective(
        u, delta, A, B, C, D, delta_bias, h0, mask, reset, cu_seqlens, delta_softplus=delta_softplus,
        delta_limit=delta_limit, reverse=reverse, layout=layout, eps=eps, exact=exact,
    )  # fmt: skip
    resets = None if scan.resets is None else scan.resets[..., None, None]
    before, _ = _before(scan.h, scan.start, resets, scan.spans)
    before = before.where(_inside(scan.spans, len(scan.u)))
    return before.map(lambda x: np.swapaxes(x[::STATE_INTERVAL], 0, 1))


@np.errstate(all="ignore")
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
    delta_limit: Limits | None = None,
    layout: str = "bld",
    eps: float = 2.0**-24,
    exact: bool = False,
) -> dict[str, Bounded]:
    """As `oracle.selective_scan_vjp`, with bounds; z leaves nothing exact."""
    scan = _selective(
        u, delta, A, B, C, D, delta_bias, h0, mask, reset, cu_seqlens, delta_softplus=delta_softplus,
        delta_limit=delta_limit, reverse=reverse, layout=layout, eps=eps, exact=exact and z is None,
    )  # fmt: skip
    turn = slice(None, None, -1 if reverse else 1)
    rounding, counts, is_complex = scan.rounding, scan.counts, scan.is_complex
    product, total = rounding.product, rounding.total
    shape = scan.u.shape
    gradients: dict[str, Bounded] = {}

    def states(x: Bounded) -> Bounded:
        return x.map(lambda each: each[..., None])

    def couple(x: Bounded) -> Bounded:
        """Of C h or the like."""
        return x.map(lambda each: 2 * each) if is_complex else x

    def real(x: Bounded) -> Bounded:
        return Bounded(x.value.real, x.bound)

    dy = _given(np.zeros(shape) if grad_out is None else _sequence(grad_out, layout, turn)).where(counts)
    if z is not None:
        gate = _given(_sequence(z, layout, turn)).where(counts).value
        silu, slope = _silu(gate, rounding.arithmetic)
        gradients["z"] = product(product(dy, scan.y), slope).where(counts)
        dy = product(dy, silu)
    if D is not None:
        gradients["D"] = total(product(dy, _given(scan.u)).where(counts), (0, 1))

    # The scan against time.
    spans, ending = scan.spans, _by_sequence(grad_last_state, cu_seqlens)
    resets = None if scan.resets is None else scan.resets[..., None, None]
    gates, gate_error = scan.gates.conj(), scan.gate_error
    if counts is not None:
        gates = np.where(counts[..., None, None], gates, 1)
        gate_error = _given(gate_error).where(counts).value
    inputs = couple(product(states(dy), _given(scan.C.conj()))).where(counts)
    g = _received(gates, gate_error, inputs, resets, ending, spans, rounding)
    before, enters = _before(scan.h, scan.start, resets, spans)
    flushed = 0.0 if rounding.exact else rounding.arithmetic.tiny
    p = product(Bounded(gates, gate_error * np.abs(gates) + flushed), g).where(enters)
    if h0 is not None:
        gradients["h0"] = _of_start(p, ending, spans).map(lambda x: x[0] if cu_seqlens is None else x[:, 0])

    # What the steps receive.
    q = product(p, before.map(np.conj)).where(enters)
    gradients["A"] = total(product(q, states(scan.step)).where(counts), (0, 1))
    gradients["C"] = couple(product(states(dy), scan.h.map(np.conj))).where(counts)
    gradients["B"] = product(g, states(product(scan.step, _given(scan.u)))).where(counts)
    for name, x in (("B", B), ("C", C)):
        gradients[name] = _of_matrix(gradients[name], np.shape(x), layout, turn, rounding)
    through_B = real(product(_given(scan.B.conj()), g))
    of_u = product(through_B, states(scan.step))
    if D is not None:
        of_u = _joined(of_u, states(product(dy, _given(_exact(D)))))
    gradients["u"] = total(of_u, (3,)).where(counts)
    through_A = real(product(_given(scan.A.conj()), q))
    # Scaling a rate for exp2 and scaling it back are two roundings each, on exact values too.
    scaling = rounding._replace(exact=False).error(through_A.size, 4)
    through_A = Bounded(through_A.value, through_A.bound + scaling)
    of_step = _joined(through_A, product(through_B, _given(scan.u[..., None])))
    of_delta = total(of_step, (3,))
    if delta_limit is not None:
        of_delta = _limited(of_delta, scan.unlimited, delta_limit, rounding)
    if delta_softplus and scan.A.size:  # without states 0, whatever delta is
        of_delta = product(of_delta, _sigmoid(scan.x, rounding.arithmetic))
    gradients["delta"] = of_delta.where(counts)
    if delta_bias is not None:
        gradients["delta_bias"] = total(gradients["delta"], (0, 1))
    for name in ("u", "delta", "z"):
        if name in gradients:
            gradients[name] = gradients[name].map(lambda x: _caller(x, layout, turn))
    return gradients


def _joined(x: Bounded, y: Bounded) -> Bounded:
    """The terms of two sums over the last axis as those of one."""
    return Bounded(*(np.concatenate(both, axis=-1) for both in zip(x, y, strict=True)))


def _of_matrix(x: Bounded, shape: tuple[int, ...], layout: str, turn: slice, rounding: _Rounding) -> Bounded:
    """The gradient of B or C of `shape` from what each (time, batch, channel, state) adds to it."""
    if len(shape) == 2:
        return rounding.total(x, (0, 1))
    groups = 1 if len(shape) == 3 else shape[2 if layout == "bld" else 1]
    time, batch, channels, state = x.value.shape
    x = x.map(lambda each: each.reshape(time, batch, groups, channels // groups, state))
    x = rounding.total(x, (3,)).map(lambda each: np.swapaxes(each[turn], 0, 1))
    return x.map(lambda each: (each if layout == "bld" else np.moveaxis(each, 1, -1)).reshape(shape))


def _silu(z: Array, arithmetic: _Arithmetic) -> tuple[Bounded, Bounded]:
    """z sigmoid(z) and its slope, sigmoid(z) (1 + z sigmoid(-z))."""
    (sigmoid, error), (other, other_error) = (_sigmoid(_given(x), arithmetic) for x in (z, -z))
    eps, tiny, size = arithmetic.eps, arithmetic.tiny, np.abs(z)
    silu = Bounded(z * sigmoid, size * error + eps * size * sigmoid + tiny)
    bracket = Bounded(1 + z * other, size * other_error + 2 * eps * (1 + size * other) + tiny)
    return silu, Bounded(
        sigmoid * bracket.value,
        (sigmoid + error) * bracket.bound + error * np.abs(bracket.value) + eps * sigmoid * bracket.size + tiny,
    )


def _sigmoid(x: Bounded, arithmetic: _Arithmetic) -> Bounded:
    """1 / (1 + exp(-x)), in one of the ways that do not cancel: two functions, an addition and maybe a product."""
    value, other = (1 / (1 + np.exp(-each)) for each in (x.value, -x.value))
    # Its relative slope is sigmoid(-x), which is below 1.
    return Bounded(value, value * ((2 * FUNCTION + 2) * arithmetic.eps + other * x.bound) + arithmetic.tiny)


def _limited(x: Bounded, unlimited: Bounded, limit: Limits, rounding: _Rounding) -> Bounded:
    """The gradient behind the limits, of which rounding may take a step to the other side."""
    passes = (unlimited.value >= limit[0]) & (unlimited.value <= limit[1])
    either = np.zeros(passes.shape, np.bool_)
    for each in limit:
        reach = unlimited.bound + (0 if rounding.exact else rounding.arithmetic.eps * abs(each))
        either |= (np.abs(unlimited.value - each) <= reach) & (reach > 0)
    return Bounded(np.where(passes, x.value, 0), np.where(either, x.size, np.where(passes, x.bound, 0)))


def _sequence(x: ArrayLike, layout: str, turn: slice) -> Array:
    """(time, batch, channels), in the order of the scan."""
    return np.swapaxes(_time_second(_exact(x), layout), 0, 1)[turn]


def _by_sequence(x: ArrayLike | None, cu_seqlens: ArrayLike | None) -> Array | None:
    """Of (batch, channels, state), or (sequences, channels, state): (sequences, batch, channels, state)."""
    if x is None:
        return None
    return _exact(x)[None] if cu_seqlens is None else _exact(x)[:, None]


def _caller(x: Array, layout: str, turn: slice) -> Array:
    return _time_second(np.swapaxes(x[turn], 0, 1), layout)


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
) -> tuple[Bounded, Bounded, Bounded]:
    """Delta with bias, then after softplus, then after limits."""
    eps, error = arithmetic.eps, np.zeros(x.shape)
    if bias is not None:
        x = x + bias
        error = eps * np.abs(x)
    biased = Bounded(x, error)
    if softplus:
        small = np.exp(-np.abs(x))
        slope = np.where(x > 0, 1.0, small) / (1 + small)
        x = np.maximum(x, 0.0) + np.log1p(small)
        error = slope * error + (2 * FUNCTION + 1) * eps * x + arithmetic.tiny
    error = np.where(np.isinf(x), 0.0, error)
    low, high = (-math.inf, math.inf) if limit is None else limit
    used = np.clip(x, low, high)
    moved = np.maximum(np.clip(x + error, low, high) - used, used - np.clip(x - error, low, high))
    return biased, Bounded(x, error), Bounded(used, np.where(used != x, moved + eps * np.abs(used), error))
