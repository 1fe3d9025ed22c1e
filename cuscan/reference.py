"""The recurrences in NumPy: what NumPy arrays run on.

Time is a Python loop; everything that has the same step is one array operation. `segments` cuts the time axis
into pieces of equal length (the last may be shorter) that are worked on side by side, in three phases:

    summaries      of each segment: the product of its gates, and its state when it starts from zero
    seeds          the scan of the summaries: the state that enters each segment
    application    the recurrence in every segment from its seed

The segment is the last axis of every work array. One segment has no summaries and is the plain loop. Inputs
are staged a few steps at a time (a tile), time first, contiguous and in the accumulation type. What a tile
holds past the end of a shorter last segment is computed with and thrown away: its last state is taken when
its last step has been done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Steps = Callable[[], Iterator[tuple[Array, Array]]]

TILE_ELEMENTS = 1 << 16
TILE_STEPS = 64


class _Cut(NamedTuple):
    """The time axis in `segments` pieces of `size` steps, the last of `last`; `tile` steps are staged."""

    segments: int
    size: int
    last: int
    tile: int
    segments_inside: bool

    def tiles(self) -> list[tuple[int, int]]:
        return [(start, min(start + self.tile, self.size)) for start in range(0, self.size, self.tile)]

    def views(self, x: Array, start: int, stop: int) -> tuple[Array, Array]:
        """Steps start to stop: (steps, ..., segments - 1) of the whole segments, (steps, ...) of the last."""
        whole = (self.segments - 1) * self.size
        head = x[:whole].reshape(self.segments - 1, self.size, *x.shape[1:])[:, start:stop]
        return np.moveaxis(head, 0, -1), x[whole + start : whole + stop]

    def empty(self, steps: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """(steps, *shape, segments); in memory too, or with the segments before the shape."""
        if self.segments_inside:
            return np.empty((steps, *shape, self.segments), dtype)
        return np.moveaxis(np.empty((steps, self.segments, *shape), dtype), 1, -1)

    def stage(self, x: Array, start: int, stop: int, dtype: np.dtype[Any]) -> Array:
        """(steps, ..., segments)."""
        head, tail = self.views(x, start, stop)
        tile = self.empty(stop - start, x.shape[1:], dtype)
        tile[..., :-1] = head
        tile[: len(tail), ..., -1] = tail
        tile[len(tail) :, ..., -1] = 0
        return tile

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
    last = length - (segments - 1) * size
    return _Cut(segments, size, last, min(max(tile, 1), TILE_STEPS), segments_inside)


def _states(steps: Steps, cut: _Cut, h: Array, h0: Array | None, last: Array) -> Iterator[None]:
    """Run the three phases with `h` (..., segments) as the state, stopping after each step; `last` is filled.

    Without h0 no state enters the first step: it takes the input as it is, and not gate * 0 + input, which is
    NaN for an infinite gate and loses -0.0.
    """
    h[..., 0] = 0 if h0 is None else h0
    if cut.segments > 1:
        product, local = np.empty_like(h), np.empty_like(h)
        for t, (gate, drive) in enumerate(steps()):
            if t == 0:
                product[...], local[...] = gate, drive
                continue
            np.multiply(product, gate, out=product)
            np.multiply(local, gate, out=local)
            np.add(local, drive, out=local)
        for k in range(cut.segments - 1):
            h[..., k + 1] = local[..., k]
            if k > 0 or h0 is not None:
                h[..., k + 1] += product[..., k] * h[..., k]
    for t, (gate, drive) in enumerate(steps()):
        np.multiply(h, gate, out=h)
        np.add(h, drive, out=h)
        if t == 0 and h0 is None:
            h[..., 0] = drive[..., 0]
        if t == cut.last - 1:
            last[...] = h[..., -1]
        yield


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
) -> Array:
    """Write h[t] = a[t] h[t-1] + b[t] to `out` and return the last state in the accumulation type.

    `a` broadcasts to b's shape; `out` may be the memory of `a` or `b`.
    """
    a, b, out = (_time_first(x, axis, reverse=reverse) for x in (np.broadcast_to(a, b.shape), b, out))
    last = np.zeros(b.shape[1:], accumulate)
    if h0 is not None:
        last[...] = h0
    if b.size == 0:
        return last
    cut = _cut(len(b), segments, last.size, segments_inside=False)

    def steps() -> Iterator[tuple[Array, Array]]:
        for start, stop in cut.tiles():
            yield from zip(cut.stage(a, start, stop, accumulate), cut.stage(b, start, stop, accumulate), strict=True)

    h = cut.empty(1, last.shape, accumulate)[0]
    states = _states(steps, cut, h, h0, last)
    for start, stop in cut.tiles():
        # The states stage a whole tile before its first step, so out may be what they are read from.
        tile = cut.empty(stop - start, last.shape, accumulate)
        for row in tile:
            next(states)
            row[...] = h
        cut.store(tile, out, start, stop)
    return last


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
) -> Array:
    """Write the selective scan to `out` and return the last state (batch, channels, state).

    u, delta, z and out are (batch, length, channels), B and C (batch, length, groups, state) or
    (channels, state). The state's work arrays are (batch, state, channels, segments).
    """
    batch, length, channels = u.shape
    states = A.shape[1]
    last = np.zeros((batch, channels, states), accumulate)
    if h0 is not None:
        last[...] = h0
    if u.size == 0:
        return last
    cut = _cut(length, segments, batch * channels, segments_inside=True)
    real = np.empty(0, accumulate).real.dtype
    u, delta, out = (_time_first(x, 1, reverse=reverse) for x in (u, delta, out))
    rates = A.T.astype(accumulate)[..., None]
    B_steps, C_steps = (_matrix(x, cut, channels, accumulate, reverse=reverse) for x in (B, C))
    h = cut.empty(1, (batch, states, channels), accumulate)[0]

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
    entering = None if h0 is None else h0.swapaxes(1, 2)
    running = _states(steps, cut, h, entering, last.swapaxes(1, 2))
    for start, stop in cut.tiles():
        y = cut.empty(stop - start, (batch, channels), real)
        for row, matrix in zip(y, C_steps(start, stop), strict=True):
            next(running)
            np.multiply(h, matrix, out=work)
            np.add.reduce(work.real, axis=1, out=row)
        if accumulate.kind == "c":
            y *= 2
        if D is not None:
            y += cut.stage(u, start, stop, real) * D.astype(real)[:, None]
        if z is not None:
            y *= _silu(cut.stage(_time_first(z, 1, reverse=reverse), start, stop, real))
        cut.store(y, out, start, stop)
    return last


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
