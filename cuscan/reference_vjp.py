"""The gradients of reference.py's functions in NumPy.

g[t], what a loss does with the state h[t], is a recurrence against time with the gate of the step after,

    g[t] = conj(a[t+1]) g[t+1] + what is done with h[t] itself

and all else is products of g, the states and the inputs, and sums of those. `selective_scan_vjp` walks time an interval
at a time, the last one first: it computes the interval's states again from the one that enters it, then g, each a loop
over time, and then the rest for the whole interval at once. Nothing is held for all steps and states.

Inside, arrays are time first, in the order of the scan, and what is special about a step enters by select, as in
reference.py. Nothing passes a step that no state enters (a reset, or a first step without h0), and a masked step
passes on what it receives.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from . import _shards, reference
from ._plan import STATE_INTERVAL, plan_segments
from .reference import Array, _activated, _bounds, _clear_outside, _round_to_odd, _silu, _time_first


def rounded(x: Array, dtype: np.dtype[Any]) -> Array:
    """As `dtype`, rounded once; what is too large becomes infinite."""
    with np.errstate(all="ignore"):
        x = _round_to_odd(x) if dtype.name == "bfloat16" and x.dtype == np.float64 else x
        result: Array = x.astype(dtype)
    return result


@np.errstate(all="ignore")
def linear_scan_vjp(
    a: Array,
    h: Array,
    grad_h: Array | None,
    h0: Array | None,
    grad_last: Array | None,
    *,
    axis: int,
    reverse: bool,
    accumulate: np.dtype[Any],
    mask: Array | None = None,
    reset: Array | None = None,
    cu_seqlens: Array | None = None,
) -> tuple[Array, Array, Array]:
    """Return the gradients with respect to a, b and h0 in the accumulation type, the first two of h's shape.

    `a` broadcasts to h's shape, and mask and reset have it. With cu_seqlens, the first axis of h0, grad_last and the
    gradient of h0 counts the sequences. Without h0 that gradient is 0.
    """
    grad_a, grad_b = np.empty(h.shape, accumulate), np.empty(h.shape, accumulate)
    of_a, of_b, gates, h = (
        _time_first(x, axis, reverse=reverse) for x in (grad_a, grad_b, np.broadcast_to(a, h.shape), h)
    )
    received, mask, reset = (x if x is None else _time_first(x, axis, reverse=reverse) for x in (grad_h, mask, reset))
    reach = _shards.reach(reverse=not reverse)
    bounds, turn = _bounds(len(h), cu_seqlens, reach, reverse=reverse), slice(None, None, -1 if reverse else 1)
    lead = (len(bounds) - 1, *h.shape[1:])
    initial, ending = (x if x is None else x.reshape(lead)[turn] for x in (h0, grad_last))
    grad_h0 = np.zeros(lead, accumulate) if grad_last is None else grad_last.reshape(lead).astype(accumulate)
    result = grad_h0[0, ...] if cu_seqlens is None else grad_h0
    if h.size == 0:
        if reach is not None and 0 not in h.shape[1:]:
            own = *reference.nothing(h.shape[1:], accumulate), np.zeros(h.shape[1:], accumulate)
            _shards.arriving(own, reverse=not reverse)
        return grad_a, grad_b, result
    spans = [(s, *ends) for s, ends in enumerate(pairwise(bounds)) if max(ends[0], 0) < min(ends[1], len(h))]
    first = gates[0, ...].conj().astype(accumulate)
    if mask is not None:
        first = np.where(mask[0], first, 1)
    alone = np.zeros((len(h), *(1,) * (h.ndim - 1)), bool) if reset is None else reset.copy()
    if initial is None:
        alone[[start for _, start, _ in spans if start >= 0]] = True
    before: Array = np.zeros(h.shape[1:], accumulate)  # the state that enters the first step

    def enter(gate: Array, state: Array, hides: Array) -> Array | None:
        """Of p, which leaves the first step and comes from the one after the last."""
        nonlocal before
        cut = np.broadcast_to(alone[0], state.shape)
        own = first * gate, np.where(cut, 0, first * state).astype(accumulate), hides | cut
        carry, (before,) = _shards.arriving((*own, h[-1].astype(accumulate)), reverse=not reverse)
        return carry

    # The gate of the step after, and of a last step 1: grad_last enters as it is.
    of_a[:-1] = gates[1:].conj()
    if mask is not None:
        np.copyto(of_a[:-1], 1, where=~mask[1:])
    hides = None if reset is None else np.concatenate((reset[1:], reset[:1]))
    for _, _, stop in spans:
        of_a[min(stop, len(h)) - 1] = 1
        if hides is not None:
            hides[min(stop, len(h)) - 1] = False
    reference.linear_scan(
        of_a, np.broadcast_to(accumulate.type(0), h.shape) if received is None else received, ending, of_b,
        axis=0, reverse=True, accumulate=accumulate, segments=plan_segments(h[0].size, len(h)), reset=hides,
        cu_seqlens=np.array(bounds), reach=None if reach is None else _shards.Reach(0, len(h), enter),
    )  # fmt: skip

    of_a[1:] = h[:-1].conj()
    for s, start, _ in spans:
        of_a[max(start, 0)] = before.conj() if start < 0 else 0 if initial is None else initial[s].conj()
    of_a *= of_b
    np.copyto(of_a, 0, where=alone)
    for s, start, _ in spans:
        if start < 0:
            continue
        g = of_b[start, ...]
        through = g * gates[start, ...].conj().astype(accumulate)
        through = through if mask is None else np.where(mask[start], through, g)
        grad_h0[turn][s] = np.where(alone[start], 0, through)
    for x in (of_a, of_b):
        if mask is not None:
            np.copyto(x, 0, where=~mask)
        _clear_outside(x, bounds)
    return grad_a, grad_b, result


@np.errstate(all="ignore")
def selective_scan_vjp(
    u: Array,
    delta: Array,
    A: Array,
    B: Array,
    C: Array,
    D: Array | None,
    z: Array | None,
    delta_bias: Array | None,
    h0: Array | None,
    grad_out: Array | None,
    grad_last: Array | None,
    states: Array | None,
    *,
    delta_softplus: bool,
    delta_limit: tuple[float, float] | None,
    reverse: bool,
    accumulate: np.dtype[Any],
    mask: Array | None = None,
    reset: Array | None = None,
    cu_seqlens: Array | None = None,
) -> dict[str, Array]:
    """Return the gradients by their inputs' names, without those of inputs that are None but with h0's.

    u, delta, z and grad_out are (batch, length, channels), B and C (batch, length, groups, state) or
    (channels, state), mask and reset (batch, length), states (batch, intervals, channels, state), as
    `reference.selective_scan` fills it. With cu_seqlens, batch is 1 and the first axis of h0, grad_last and the
    gradient of h0 counts the sequences. Without h0 that gradient is 0. The gradients have their inputs' shapes, and the
    accumulation type or, where an input is always real, the real one. Work arrays are (steps, batch, state, channels).
    """
    batch, length, channels = u.shape
    real = np.empty(0, accumulate).real.dtype
    twice = 2 if accumulate.kind == "c" else 1
    if states is None:
        states = np.empty((batch, -(-length // STATE_INTERVAL), *A.shape), accumulate)
        reference.selective_scan(
            u, delta, A, B, C, None, None, delta_bias, h0, np.empty(u.shape, real), delta_softplus=delta_softplus,
            delta_limit=delta_limit, reverse=reverse, accumulate=accumulate,
            segments=plan_segments(batch * A.size, length), mask=mask, reset=reset, cu_seqlens=cu_seqlens,
            states=states, reach=_shards.reach(reverse=reverse),
        )  # fmt: skip
    reach = _shards.reach(reverse=not reverse)
    bounds, turn = _bounds(length, cu_seqlens, reach, reverse=reverse), slice(None, None, -1 if reverse else 1)
    lead = (len(bounds) - 1, batch, *A.shape)
    initial, ending = (None if x is None else x.reshape(lead)[turn].swapaxes(2, 3) for x in (h0, grad_last))
    of_h0 = np.zeros(lead, accumulate) if grad_last is None else grad_last.reshape(lead).astype(accumulate)
    spans = [(s, start, stop) for s, (start, stop) in enumerate(pairwise(bounds)) if start < stop]
    starts, ends = {start: s for s, start, _ in spans}, {stop - 1: s for s, _, stop in spans}
    # (length, batch, 1): where a step counts, and where no state enters.
    counts, alone = (
        np.full((length, batch, 1), absent) if x is None else _time_first(x[..., None], 1, reverse=reverse).copy()
        for x, absent in ((mask, True), (reset, False))
    )
    counts[: max(bounds[0], 0)] = counts[max(bounds[-1], 0) :] = False
    if h0 is None:
        alone[[start for start in starts if 0 <= start < length]] = True

    inputs = {"u": u, "delta": delta, "z": z, "grad_out": grad_out, "B": B, "C": C}
    optional = {"D": D, "z": z, "delta_bias": delta_bias}
    grads = {name: np.zeros(x.shape, accumulate) for name, x in (("A", A), ("B", B), ("C", C))}
    grads |= {name: np.empty(u.shape, real) for name in ("u", "delta")}
    grads |= {name: np.zeros(x.shape, real) for name, x in optional.items() if x is not None}
    in_time, of = (
        {name: _time_first(x, 1, reverse=reverse) for name, x in arrays.items() if x is not None and x.ndim > 2}
        for arrays in (inputs, grads)
    )
    grads["h0"] = of_h0[0] if cu_seqlens is None else of_h0[:, 0]
    of_h0 = of_h0[turn].swapaxes(2, 3)

    def read(name: str, steps: slice) -> Array:
        """(steps, batch, channels), 0 where a step does not count."""
        return np.ascontiguousarray(np.where(counts[steps], in_time[name][steps].astype(real), 0))

    def couple(name: str, x: Array, steps: slice) -> Array:
        """B or C: (steps, batch, state, channels or 1) or (state, channels)."""
        if name not in in_time:
            return x.T.astype(accumulate, order="C")
        x = in_time[name][steps].astype(accumulate, order="C").swapaxes(2, 3)
        return x if x.shape[3] == 1 else np.repeat(x, channels // x.shape[3], axis=3)

    def add(name: str, term: Array, steps: slice) -> None:
        """To the gradient of B or C, of (steps, batch, state, channels)."""
        if name not in of:
            grads[name] += term.sum(axis=(0, 1)).T
            return
        groups = of[name].shape[2]
        term = term.reshape(*term.shape[:3], groups, channels // groups)
        of[name][steps] = term.sum(axis=4).swapaxes(2, 3)

    rates = A.T.astype(accumulate, order="C")

    def activated(steps: slice) -> tuple[Array, Array, Array, Array]:
        """delta before and after softplus, after the limits, and the gates (steps, batch, state, channels)."""
        x = read("delta", steps)
        if delta_bias is not None:
            x += delta_bias.astype(real)
        unlimited = _activated(x.copy(), None, delta_softplus, None)
        d = unlimited if delta_limit is None else np.clip(unlimited, *delta_limit)
        gate = np.exp(d[:, :, None] * rates)
        np.copyto(gate, 1, where=~counts[steps, ..., None])
        np.copyto(gate, 0, where=alone[steps, ..., None])
        return x, unlimited, d, gate

    def received(dy: Array, C_steps: Array, steps: slice) -> Array:
        """What each step's y does with its state."""
        g: Array = twice * dy[:, :, None] * C_steps.conj()
        np.copyto(g, 0, where=~counts[steps, ..., None])
        return g

    intervals = [slice(t, min(t + STATE_INTERVAL, length)) for t in range(0, length, STATE_INTERVAL)][::-1]
    p: Array = np.zeros((batch, *rates.shape), accumulate)
    if reach is not None and batch * channels:
        product, p, hides = reference.nothing(p.shape, accumulate)
        for steps in intervals:
            gate = activated(steps)[-1].conj()
            dy = read("grad_out", steps) if grad_out is not None else np.zeros_like(read("u", steps))
            if z is not None:
                dy *= _silu(read("z", steps))
            g = received(dy, couple("C", C, steps), steps)
            for i, t in reversed(list(enumerate(range(length)[steps]))):
                if t in ends:
                    p, hides[...] = np.zeros_like(p) if ending is None else ending[ends[t]], True
                p, product = gate[i] * (p + g[i]), product * gate[i]
                cut = np.broadcast_to(alone[t, ..., None], p.shape)
                p, hides = np.where(cut, 0, p), hides | cut
        carry = reach.enter(product, p, hides)
        p = np.zeros_like(p) if carry is None else carry
    for steps in intervals:
        times = range(length)[steps]
        interval = steps.start // STATE_INTERVAL
        cut, skipped = alone[steps, ..., None], ~counts[steps, ..., None]

        drive = read("u", steps)
        x, unlimited, d, gate = activated(steps)
        driven, B_steps, C_steps = d * drive, couple("B", B, steps), couple("C", C, steps)
        h, before = driven[:, :, None] * B_steps, np.empty_like(gate)
        np.copyto(h, 0, where=skipped)
        entering = states[:, interval].swapaxes(1, 2)
        for i, t in enumerate(times):
            if t in starts and initial is not None:
                entering = initial[starts[t]]
            before[i] = entering
            np.copyto(before[i], 0, where=cut[i])
            h[i] += gate[i] * before[i]
            entering = h[i]

        dy = read("grad_out", steps) if grad_out is not None else np.zeros_like(drive)
        if z is not None:
            y = twice * (C_steps * h).real.sum(axis=2)
            if D is not None:
                y += D.astype(real) * drive
            gated = read("z", steps)
            sigmoid = 1 / (1 + np.exp(-gated))
            of["z"][steps] = dy * y * (sigmoid * (1 + gated / (1 + np.exp(gated))))
            dy *= gated * sigmoid

        g, q = received(dy, C_steps, steps), np.empty_like(gate)
        for i, t in reversed(list(enumerate(times))):
            if t in ends:
                p = np.zeros_like(p) if ending is None else ending[ends[t]]
            g[i] += p
            np.multiply(gate[i].conj(), g[i], out=q[i])
            np.copyto(q[i], 0, where=cut[i])
            p = q[i]
            if t in starts:
                of_h0[starts[t]] = p
        p = p.copy()

        q *= before.conj()
        for each in (h, g, q):
            np.copyto(each, 0, where=skipped)
        grads["A"] += (q * d[:, :, None]).sum(axis=(0, 1)).T
        add("C", twice * dy[:, :, None] * h.conj(), steps)
        add("B", g * driven[:, :, None], steps)
        through_B = (B_steps.conj() * g).real.sum(axis=2)
        of_u = through_B * d
        of_delta = (rates.conj() * q).real.sum(axis=2) + through_B * drive
        if A.size == 0:  # no term has a delta or, but for D, a u: not NaN, whatever these are
            of_u[...] = of_delta[...] = 0
        if D is not None:
            of_u += dy * D.astype(real)
            grads["D"] += (dy * drive).sum(axis=(0, 1))
        if delta_limit is not None:
            np.copyto(of_delta, 0, where=~((unlimited >= delta_limit[0]) & (unlimited <= delta_limit[1])))
        if delta_softplus and A.size:
            of_delta /= 1 + np.exp(-x)
        of["u"][steps], of["delta"][steps] = of_u, of_delta
        for name in ("u", "delta", "z"):
            if name in of:
                np.copyto(of[name][steps], 0, where=~counts[steps])
        if delta_bias is not None:
            grads["delta_bias"] += of["delta"][steps].sum(axis=(0, 1))
    return grads
