"""The recurrences in NumPy: what NumPy arrays run on.

Time is a Python loop; everything that has the same step is one array operation. `segments` cuts the time axis
into pieces of equal length (the last may be shorter) that are worked on side by side, in three phases:

    summaries      of each segment: the product of its gates, its state when nothing enters, and whether a reset
                   in it hides what does
    seeds          the scan of the summaries: the state that enters each segment
    application    the recurrence in every segment from its seed

The segment is the last axis of every work array. One segment has no summaries and is the plain loop. Inputs
are staged a few steps at a time (a tile), time first, contiguous and in the accumulation type. What a tile
holds past the end of a shorter last segment is computed with and thrown away: a last state is taken when the
last step of its sequence has been done.

What is special about a step enters where it is formed, by select, since 0 * NaN is NaN. A masked step has gate 1
and input 0. The first step of a sequence is a reset to the state that h0 leads to there. So packed sequences are
one scan of the whole axis.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from itertools import pairwise, repeat
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ._plan import STATE_INTERVAL
from ._shards import Reach

Array = NDArray[Any]
Steps = Callable[[], Iterator[tuple[Array, Array]]]

TILE_ELEMENTS = 1 << 16
TILE_STEPS = 64


class _Cut(NamedTuple):
    """The time axis in `segments` pieces of `size` steps, the last maybe shorter; `tile` steps are staged."""

    segments: int
    size: int
    tile: int
    segments_inside: bool
    length: int

    def tiles(self) -> list[tuple[int, int]]:
        return [(start, min(start + self.tile, self.size)) for start in range(0, self.size, self.tile)]

    def views(self, x: Array, start: int, stop: int) -> tuple[Array, Array]:
        """Steps start to stop: (steps, ..., segments - 1) of the whole segments, (steps, ...) of the last."""
        whole = (self.segments - 1) * self.size
        head = x[:whole].reshape(self.segments - 1, self.size, *x.shape[1:])[:, start:stop]
        return head.transpose(*range(1, head.ndim), 0), x[whole + start : whole + stop]

    def empty(self, steps: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """(steps, *shape, segments); in memory too, or with the segments before the shape."""
        if self.segments_inside:
            return np.empty((steps, *shape, self.segments), dtype)
        return np.empty((steps, self.segments, *shape), dtype).transpose(0, *range(2, len(shape) + 2), 1)

    def stage(self, x: Array, start: int, stop: int, dtype: np.dtype[Any]) -> Array:
        """(steps, ..., segments)."""
        head, tail = self.views(x, start, stop)
        tile = self.empty(stop - start, x.shape[1:], dtype)
        tile[..., :-1] = head
        tile[: len(tail), ..., -1] = tail
        tile[len(tail) :, ..., -1] = 0
        return tile

    def flags(self, x: Array | None) -> Iterator[Array | None]:
        """(..., segments) for each step."""
        if x is None:
            return repeat(None)
        return (row for start, stop in self.tiles() for row in self.stage(x, start, stop, x.dtype))

    def store(self, tile: Array, out: Array, start: int, stop: int) -> None:
        if out.dtype.name == "bfloat16" and tile.dtype == np.float64:
            tile = _round_to_odd(tile)
        head, tail = self.views(out, start, stop)
        head[...] = tile[..., :-1]
        tail[...] = tile[: len(tail), ..., -1]


def _round_to_odd(x: Array) -> Array:
    """float64 as float32 that rounds to 16 bits like x itself; ml_dtypes' cast goes through the nearest float32."""
    nearest = x.astype(np.float32)
    bits = nearest.view(np.int32)
    inexact = (nearest.astype(np.float64) != x) & (x == x) & (bits & 1 == 0)
    toward = np.where(np.abs(nearest.astype(np.float64)) < np.abs(x), 1, -1).astype(np.int32)
    rounded: Array = (bits + np.where(inexact, toward, 0).astype(np.int32)).view(np.float32)
    return rounded


def _cut(length: int, segments: int, step_elements: int, *, segments_inside: bool) -> _Cut:
    size = -(-length // min(max(segments, 1), length))
    segments = -(-length // size)
    tile = TILE_ELEMENTS // max(step_elements * segments, 1)
    return _Cut(segments, size, min(max(tile, 1), TILE_STEPS), segments_inside, length)


def _bounds(length: int, cu_seqlens: Array | None, reach: Reach | None = None, *, reverse: bool) -> list[int]:
    """cu_seqlens in the direction of the scan; of a shard some lie beyond its steps."""
    whole = [0, length if reach is None else reach.total] if cu_seqlens is None else cu_seqlens.tolist()
    bounds = whole if reach is None else [bound - reach.offset for bound in whole]
    return [length - bound for bound in reversed(bounds)] if reverse else bounds


def _clear_outside(x: Array, bounds: list[int], interval: int = 1) -> None:
    """Zero what lies before the first and after the last sequence, time first, in steps or intervals."""
    x[: -(-max(bounds[0], 0) // interval)] = x[-(-max(bounds[-1], 0) // interval) :] = 0


class _Marks(NamedTuple):
    """What is special about steps: mask and reset, time first, and where sequences start and end.

    The keys of `starts` and `ends` are steps of a segment, the values pairs of a segment and a sequence.
    """

    mask: Array | None
    reset: Array | None
    starts: dict[int, list[tuple[int, int]]]
    ends: dict[int, list[tuple[int, int]]]


def _marks(cut: _Cut, mask: Array | None, reset: Array | None, bounds: list[int]) -> _Marks:
    marks = _Marks(mask, reset, {}, {})
    for sequence, (start, stop) in enumerate(pairwise(bounds)):
        if start < stop and 0 <= start < cut.length:
            marks.starts.setdefault(start % cut.size, []).append((start // cut.size, sequence))
        if start < stop and 0 < stop <= cut.length:
            marks.ends.setdefault((stop - 1) % cut.size, []).append(((stop - 1) // cut.size, sequence))
    return marks


def _former(cut: _Cut, marks: _Marks, entering: Array | None) -> Callable[[int, Array, Array], Array | None]:
    """A function to call on every special step in turn: it edits gate and input and returns the step's reset.

    `entering` (sequences, ...) is h0.
    """
    flags = zip(cut.flags(marks.mask), cut.flags(marks.reset), strict=False)

    def form(t: int, gate: Array, drive: Array) -> Array | None:
        counts, reset = next(flags)
        if counts is not None:
            masked = ~counts
            np.copyto(gate, 1, where=masked)
            np.copyto(drive, 0, where=masked)
        if t not in marks.starts:
            return reset
        first = np.zeros(cut.segments, bool)
        for segment, sequence in marks.starts[t]:
            first[segment] = True
            if entering is not None:
                h = gate[..., segment] * entering[sequence] + drive[..., segment]
                np.copyto(drive[..., segment], h, where=True if reset is None else ~reset[..., segment])
        return first if reset is None else reset | first

    return form


def _states(
    steps: Steps, cut: _Cut, marks: _Marks, h: Array, last: Array, reach: Reach | None = None, *, enters: bool
) -> Iterator[None]:
    """Run the three phases with `h` (..., segments) as the state, stopping after each step.

    `last` (sequences, ...) is filled; with `enters` it holds h0 before. Where no state enters, a first step takes
    the input as it is, and not gate * 0 + input, which is NaN for an infinite gate and loses -0.0. In a shard of
    several the summaries give what enters the first segment, too.
    """
    # A copy, because a sequence that reaches into the next segment may end before the step in which it starts.
    entering = last.copy() if enters else None
    special: Container[int] = marks.starts if marks.mask is None and marks.reset is None else range(cut.size)
    h[..., 0] = 0
    if cut.segments > 1 or reach is not None:
        product, local = np.empty_like(h), np.empty_like(h)
        hides: Array = np.zeros(cut.segments, bool)
        form = _former(cut, marks, entering)
        for t, (gate, drive) in enumerate(steps()):
            reset = form(t, gate, drive) if t in special else None
            if reset is not None:
                hides = hides | reset
            if t >= cut.length - (cut.segments - 1) * cut.size:  # past the end
                gate[..., -1], drive[..., -1] = 1, 0
            if t == 0:
                product[...], local[...] = gate, drive
                continue
            np.multiply(product, gate, out=product)
            np.multiply(local, gate, out=local)
            np.add(local, drive, out=local)
            if reset is not None:
                np.copyto(local, drive, where=reset)
        hidden = np.logical_or.reduce(hides.reshape(-1, cut.segments)).tolist()
        if reach is not None:
            carry = reach.enter(*_fold(product, local, np.broadcast_to(hides, product.shape)))
            if carry is not None:
                h[..., 0] = carry
        for k in range(cut.segments - 1):
            h[..., k + 1] = product[..., k] * h[..., k] + local[..., k]
            if hidden[k]:
                np.copyto(h[..., k + 1], local[..., k], where=hides[..., k])
    form = _former(cut, marks, entering)
    for t, (gate, drive) in enumerate(steps()):
        reset = form(t, gate, drive) if t in special else None
        np.multiply(h, gate, out=h)
        np.add(h, drive, out=h)
        if reset is not None:
            np.copyto(h, drive, where=reset)
        if t in marks.ends:
            for segment, sequence in marks.ends[t]:
                last[sequence] = h[..., segment]
        yield


def _fold(product: Array, local: Array, hides: Array) -> tuple[Array, Array, Array]:
    """The map of all segments, the last axis, one after the other."""
    gate, state, hidden = (x[..., 0].copy() for x in (product, local, hides))
    for k in range(1, product.shape[-1]):
        np.multiply(gate, product[..., k], out=gate)
        state[...] = np.where(hides[..., k], local[..., k], product[..., k] * state + local[..., k])
        hidden |= hides[..., k]
    return gate, state, hidden


def nothing(shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[Array, Array, Array]:
    """The map of no steps."""
    return np.ones(shape, dtype), np.zeros(shape, dtype), np.zeros(shape, bool)


@np.errstate(all="ignore")
def linear_scan(
    a: Array,
    b: Array,
    h0: Array | None,
    out: Array,
    *,
    axis: int,
    reverse: bool,
    accumulate: np.dtype[Any],
    segments: int,
    mask: Array | None = None,
    reset: Array | None = None,
    cu_seqlens: Array | None = None,
    reach: Reach | None = None,
) -> Array:
    """Write h[t] = a[t] h[t-1] + b[t] to `out` and return the last state in the accumulation type.

    `a` broadcasts to b's shape, and mask and reset have it; `out` may be the memory of `a` or `b`. With
    cu_seqlens, the first axis of h0 and the last state counts the sequences.
    """
    a, b, out = (_time_first(x, axis, reverse=reverse) for x in (np.broadcast_to(a, b.shape), b, out))
    mask, reset = (x if x is None else _time_first(x, axis, reverse=reverse) for x in (mask, reset))
    length, shape = len(b), b.shape[1:]
    bounds = _bounds(length, cu_seqlens, reach, reverse=reverse)
    last = np.zeros((len(bounds) - 1, *shape), accumulate)
    result = last[0, ...] if cu_seqlens is None else last
    if h0 is not None:
        result[...] = h0
    if b.size == 0:
        if reach is not None and 0 not in shape:
            reach.enter(*nothing(shape, accumulate))
        return result
    cut = _cut(length, segments, b[0].size, segments_inside=False)
    marks = _marks(cut, mask, reset, bounds)

    def steps() -> Iterator[tuple[Array, Array]]:
        for start, stop in cut.tiles():
            yield from zip(cut.stage(a, start, stop, accumulate), cut.stage(b, start, stop, accumulate), strict=True)

    h = cut.empty(1, shape, accumulate)[0]
    states = _states(steps, cut, marks, h, last[:: -1 if reverse else 1], reach, enters=h0 is not None)
    for start, stop in cut.tiles():
        # The states stage a whole tile before its first step, so out may be what they are read from.
        tile = cut.empty(stop - start, shape, accumulate)
        for row in tile:
            next(states)
            row[...] = h
        cut.store(tile, out, start, stop)
    _clear_outside(out, bounds)
    return result


@np.errstate(all="ignore")
def selective_scan(
    u: Array,
    delta: Array,
    A: Array,
    B: Array,
    C: Array,
    D: Array | None,
    z: Array | None,
    delta_bias: Array | None,
    h0: Array | None,
    out: Array,
    *,
    delta_softplus: bool,
    delta_limit: tuple[float, float] | None,
    reverse: bool,
    accumulate: np.dtype[Any],
    segments: int,
    mask: Array | None = None,
    reset: Array | None = None,
    cu_seqlens: Array | None = None,
    states: Array | None = None,
    reach: Reach | None = None,
) -> Array:
    """Write the selective scan to `out` and return the last state (batch, channels, state).

    u, delta, z and out are (batch, length, channels), B and C (batch, length, groups, state) or
    (channels, state), mask and reset (batch, length). The state's work arrays are (batch, state, channels,
    segments). With cu_seqlens, batch is 1 and the first axis of h0 and the last state counts the sequences.
    The state that enters every STATE_INTERVAL-th step is written to `states` (batch, intervals, channels, state).
    """
    batch, length, channels = u.shape
    state = A.shape[1]
    bounds = _bounds(length, cu_seqlens, reach, reverse=reverse)
    last = np.zeros((len(bounds) - 1, batch, channels, state), accumulate)
    result = last[0, ...] if cu_seqlens is None else last[:, 0]
    if h0 is not None:
        result[...] = h0
    if u.size == 0:
        if reach is not None and batch * channels:
            reach.enter(*nothing((batch, state, channels), accumulate))
        return result
    cut = _cut(length, segments, batch * channels, segments_inside=True)
    real = np.empty(0, accumulate).real.dtype
    u, delta, out = (_time_first(x, 1, reverse=reverse) for x in (u, delta, out))
    mask, reset = (x if x is None else _time_first(x[..., None, None], 1, reverse=reverse) for x in (mask, reset))
    marks = _marks(cut, mask, reset, bounds)
    rates = A.T.astype(accumulate)[..., None]
    B_steps, C_steps = (_matrix(x, cut, channels, accumulate, reverse=reverse) for x in (B, C))
    h = cut.empty(1, (batch, state, channels), accumulate)[0]

    def steps() -> Iterator[tuple[Array, Array]]:
        gate, drive = np.empty_like(h), np.empty_like(h)
        for start, stop in cut.tiles():
            step = _activated(cut.stage(delta, start, stop, real), delta_bias, delta_softplus, delta_limit)
            scaled = step * cut.stage(u, start, stop, real)
            for i, matrix in enumerate(B_steps(start, stop)):
                np.multiply(step[i][:, None], rates, out=gate)
                np.exp(gate, out=gate)
                np.multiply(scaled[i][:, None], matrix, out=drive)
                yield gate, drive

    work = np.empty_like(h)
    by_sequence = last[:: -1 if reverse else 1].swapaxes(2, 3)
    if reach is not None and states is not None:
        reach = reach._replace(enter=_saved(reach.enter, states))
    running = _states(steps, cut, marks, h, by_sequence, reach, enters=h0 is not None)
    saves = _saves(cut, 0 if states is None else states.shape[1])
    for start, stop in cut.tiles():
        y = cut.empty(stop - start, (batch, channels), real)
        for t, (row, matrix) in enumerate(zip(y, C_steps(start, stop), strict=True), start):
            next(running)
            np.multiply(h, matrix, out=work)
            np.add.reduce(work.real, axis=1, out=row)
            if states is not None and t in saves:
                for segment, interval in saves[t]:
                    states[:, interval] = h[..., segment].swapaxes(1, 2)
        if accumulate.kind == "c":
            y *= 2
        if D is not None:
            y += cut.stage(u, start, stop, real) * D.astype(real)[:, None]
        if z is not None:
            y *= _silu(cut.stage(_time_first(z, 1, reverse=reverse), start, stop, real))
        if mask is not None:
            np.copyto(y, 0, where=~cut.stage(mask, start, stop, mask.dtype)[:, :, 0])
        cut.store(y, out, start, stop)
    _clear_outside(out, bounds)
    if states is not None:
        entering = np.zeros_like(last) if h0 is None else h0.reshape(last.shape)
        _begin(states, entering[:: -1 if reverse else 1], bounds, reset)
    return result


def _saves(cut: _Cut, intervals: int) -> dict[int, list[tuple[int, int]]]:
    """After which step of a segment the state that enters an interval is there: pairs of segment and interval."""
    saves: dict[int, list[tuple[int, int]]] = {}
    for interval in range(1, intervals):
        segment, t = divmod(interval * STATE_INTERVAL - 1, cut.size)
        saves.setdefault(t, []).append((segment, interval))
    return saves


def _saved(enter: Callable[..., Array | None], states: Array) -> Callable[..., Array | None]:
    """The same, and what enters the first step is saved."""

    def entered(*maps: Array) -> Array | None:
        carry = enter(*maps)
        states[:, 0] = 0 if carry is None else carry.swapaxes(1, 2)
        return carry

    return entered


def _begin(states: Array, entering: Array, bounds: list[int], reset: Array | None) -> None:
    """Fill in what no step before leads to: h0 at a sequence's first step, 0 at a reset and outside."""
    for (start, stop), h in zip(pairwise(bounds), entering, strict=True):
        if start < stop and start >= 0 and start % STATE_INTERVAL == 0 and start // STATE_INTERVAL < states.shape[1]:
            states[:, start // STATE_INTERVAL] = h
    _clear_outside(states.swapaxes(0, 1), bounds, STATE_INTERVAL)
    if reset is not None:
        np.copyto(states, 0, where=reset[::STATE_INTERVAL].swapaxes(0, 1))


def _time_first(x: Array, axis: int, *, reverse: bool) -> Array:
    x = np.moveaxis(x, axis, 0)
    return x[::-1] if reverse else x


def _matrix(
    x: Array, cut: _Cut, channels: int, dtype: np.dtype[Any], *, reverse: bool
) -> Callable[[int, int], Iterator[Array]]:
    """B or C as a function from (start, stop) to its steps, (batch, state, channels or 1, segments) each."""
    if x.ndim == 2:
        constant = x.T.astype(dtype)[..., None]
        return lambda start, stop: iter([constant] * (stop - start))
    x = _time_first(x, 1, reverse=reverse).swapaxes(2, 3)
    groups = x.shape[3]

    def rows(start: int, stop: int) -> Iterator[Array]:
        for row in cut.stage(x, start, stop, dtype):
            yield row if groups in (1, channels) else np.repeat(row, channels // groups, axis=2)

    return rows


def _activated(delta: Array, bias: Array | None, softplus: bool, limit: tuple[float, float] | None) -> Array:
    """Delta after bias, softplus and limits, in place; NaN stays NaN."""
    if bias is not None:
        delta += bias.astype(delta.dtype)[:, None]
    if softplus:
        # log(exp(x) + 1) is 6 % off at x = -16 in float32, and 0 below -17.
        tail = np.log1p(np.exp(-np.abs(delta)))
        np.maximum(delta, 0, out=delta)
        delta += tail
    if limit is not None:
        np.clip(delta, *limit, out=delta)
    return delta


def _silu(z: Array) -> Array:
    return np.asarray(z / (1 + np.exp(-z)))
