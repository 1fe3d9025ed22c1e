"""Rows of a result against float64, and what a wrong one looks like: the comparisons of `cuscan.diagnose`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._arrays import host_place
from ._figures import Problem, to_host
from .linear import linear_scan
from .selective import selective_scan
from .testing import _bounds

BOUNDED = 4096  # first steps that are held to the bound
GUESSED = 4096  # steps from which guesses are made
Array = NDArray[Any]


@dataclass
class Rows:
    """Some channels of one batch entry, in float64 and the direction of the scan: time first, (length, rows, state)."""

    p: Problem
    batch: int
    channels: list[int]

    def __post_init__(self) -> None:
        p, b, chosen = self.p, self.batch, self.channels

        def rows(x: Any, axis: int) -> Any:
            """The channels along an axis, or what all of them share; one by one, because views of any type are."""
            if x is None:
                return None
            before = (slice(None),) * axis
            return np.stack([to_host(x[(*before, d if x.shape[axis] > 1 else 0)]) for d in chosen], axis=axis)

        def of(name: str) -> Any:
            x = p.arrays.get(name)
            return None if x is None else rows(x[b], 1)

        def couples(x: Any) -> Array:
            if x.ndim == 2:
                return _wide(rows(x, 0))
            return _wide(np.stack([to_host(x[b, :, d * x.shape[2] // p.shape[2]]) for d in chosen], axis=1))

        self.mask, self.reset, h0 = of("mask"), of("reset"), p.arrays["h0"]
        if p.function == "linear_scan":
            self.a, self.b = of("a").astype(p.wide), of("b").astype(p.wide)
            sequences = 1 if p.offsets is None else len(p.offsets) - 1
            h0 = None if h0 is None else rows(h0.reshape(sequences, p.shape[2]), 1)[..., None]
        else:
            self.u, self.delta, z = of("u").astype(float), of("delta").astype(float), of("z")
            self.z = None if z is None else z.astype(float)
            self.A = _wide(rows(p.arrays["A"], 0))
            self.D, self.bias = (
                None if (x := p.arrays[name]) is None else _wide(rows(x, 0)) for name in ("D", "delta_bias")
            )
            self.B, self.C = couples(p.arrays["B"]), couples(p.arrays["C"])
            h0 = None if h0 is None else rows(h0[b : b + 1] if p.offsets is None else h0, 1)
        if h0 is not None and p.offsets is not None and p.options["reverse"]:
            h0 = h0[::-1]
        self.h0: Array | None = None if h0 is None else _wide(h0)

    def of_result(self, y: Any) -> Array:
        """These rows of an array of the result's shape: (length, rows)."""
        return np.stack([to_host(y[self.batch, :, d]) for d in self.channels], axis=1)

    def truth(self) -> Array:
        """The result (length, rows) of float64 arithmetic."""
        token = host_place.set(None)
        try:
            value: Array = self._call(linear_scan, selective_scan, self.p.length)
        finally:
            host_place.reset(token)
        return value

    def bounded(self) -> tuple[Array, Array]:
        """The first steps, and what each may be off by before it is stored."""
        eps = {"eps": 2.0**-53} if self.p.item in ("float64", "complex128") else {}
        scan = self._call(_bounds.linear_scan, _bounds.selective_scan, BOUNDED, **eps)
        if self.p.function == "linear_scan":
            return scan.value.T, scan.bound.T
        return scan.value[0], scan.bound[0]

    def _call(self, linear: Any, selective: Any, steps: int, **more: Any) -> Any:
        p, cut = self.p, slice(0, steps)
        mask, reset = (None if x is None else x[cut] for x in (self.mask, self.reset))
        offsets = None if p.offsets is None else np.minimum(p.offsets, min(steps, p.length))
        if p.function == "linear_scan":
            h0 = None if self.h0 is None else self.h0[..., 0][slice(None) if offsets is not None else 0]
            more |= {"mask": None if mask is None else mask.T, "reset": None if reset is None else reset.T}
            result = linear(self.a[cut].T, self.b[cut].T, h0, axis=1, cu_seqlens=offsets, **more)
            return result.T if linear is linear_scan else result
        complexes = np.iscomplexobj(self.A)
        if complexes and selective is selective_scan:  # which computes these in complex64
            return self._call(linear, _bounds.selective_scan, steps).value[0]
        z = None if self.z is None else self.z[None, cut]
        couples = [x if self.p.arrays[name].ndim == 2 else x[None, cut] for name, x in (("B", self.B), ("C", self.C))]
        more |= {
            "mask": None if mask is None else mask[None, :, 0],
            "reset": None if reset is None else reset[None, :, 0],
        }
        options = {name: p.options[name] for name in ("delta_softplus", "delta_limit")}
        result = selective(
            self.u[None, cut], self.delta[None, cut], self.A, *couples, self.D, z, self.bias, h0=self.h0,
            cu_seqlens=offsets, **options, **more,
        )  # fmt: skip
        return result[0] if selective is selective_scan else result

    # --- the same step by step, with mistakes ---------------------------------------------------------------------

    def walk(self, steps: int, mistake: str = "") -> Array:
        """The first steps in plain NumPy, with a mistake."""
        p, cut = self.p, slice(0, steps)
        left_out = mistake.removesuffix(" left out")
        mask = None if self.mask is None or left_out == "mask" else self.mask[cut, :, None]
        if p.function == "linear_scan":
            gates, drives = self.a[cut, :, None], self.b[cut, :, None]
        else:
            delta = self.delta[cut] + (0 if self.bias is None or left_out == "delta_bias" else self.bias)
            if mistake == "delta_bias added twice":
                delta = delta + self.bias
            for _ in range(
                (p.options["delta_softplus"] and left_out != "softplus") + (mistake == "softplus applied twice")
            ):
                delta = np.logaddexp(delta, 0)
            if (limits := p.options["delta_limit"]) is not None and left_out != "delta_limit":
                delta = delta.clip(*limits)
            A = np.log(-self.A) if mistake == "A_log in the place of A" else self.A
            B = self.B if self.B.ndim == 2 else self.B[cut]
            exponent = delta[..., None] * A
            gates, drives = np.exp(exponent), delta[..., None] * B * self.u[cut, :, None]
            if mistake == "exact zero-order hold in the place of delta B":
                drives = np.expm1(exponent) / A * B * self.u[cut, :, None]
        if mistake == "the gate of the step before":
            gates = np.concatenate((gates[:1], gates[:-1]))
        if mistake == "the gate of the step after":
            gates = np.concatenate((gates[1:], gates[-1:]))
        if mask is not None:
            gates, drives = np.where(mask, gates, 1), np.where(mask, drives, 0)
        gates, drives = self._begin(gates.copy(), drives.copy(), left_out)
        if mistake == "combine with earlier and later swapped":
            before = np.concatenate((np.ones_like(gates[:1]), np.cumprod(gates, axis=0)[:-1]))
            h = np.cumsum(before * drives, axis=0)
        elif mistake == "time reversed":
            h = _recurrence(gates[::-1], drives[::-1])[::-1]
        else:
            h = _recurrence(gates, drives, _bfloat16 if mistake == STATE_NARROW else None)
        if p.function == "linear_scan":
            return np.asarray(h[..., 0])
        C = self.C if self.C.ndim == 2 else self.C[cut]
        y = np.real(C * h).sum(-1) * (2 if np.iscomplexobj(self.A) else 1)
        if self.D is not None and left_out != "D":
            y = y + self.D * self.u[cut]
        if self.z is not None and left_out != "z":
            y = y * self.z[cut] / (1 + np.exp(-self.z[cut]))
        return y if mask is None else np.where(mask[..., 0], y, 0)

    def _begin(self, gates: Array, drives: Array, left_out: str) -> tuple[Array, Array]:
        """What enters, and what is forgotten, in the steps themselves."""
        spans = [(0, len(gates))]
        if self.p.offsets is not None and left_out != "cu_seqlens":
            bounds = np.minimum(self.p.offsets, len(gates)).tolist()
            spans = list(pairwise(bounds))
        if self.reset is not None and left_out != "reset":
            gates = np.where(self.reset[: len(gates), :, None], 0, gates)
        for s, (low, high) in enumerate(spans):
            if low < high:
                if self.h0 is not None and left_out != "h0":
                    drives[low] = drives[low] + gates[low] * self.h0[s]
                gates[low] = 0
        return gates, drives

    def mistakes(self) -> Iterator[str]:
        """What may have gone wrong with these arguments."""
        p = self.p
        yield "combine with earlier and later swapped"
        if p.function == "selective_scan":
            yield from (f"{name} left out" for name in ("D", "z") if p.arrays[name] is not None)
            if self.bias is not None:
                yield from ("delta_bias left out", "delta_bias added twice")
            if p.options["delta_softplus"]:
                yield from ("softplus left out", "softplus applied twice")
            yield from ["delta_limit left out"] * (p.options["delta_limit"] is not None)
            if not np.iscomplexobj(self.A) and (self.A < 0).all():
                yield from ("A_log in the place of A", "exact zero-order hold in the place of delta B")
        yield from (f"{name} left out" for name in ("mask", "reset", "h0") if p.arrays[name] is not None)
        yield from ["cu_seqlens left out"] * (p.offsets is not None)
        yield from ("the gate of the step before", "the gate of the step after", "time reversed")

    def guess(self, theirs: Array, truth: Array) -> str:
        """The mistake that gives `theirs`, or nothing."""
        steps = min(GUESSED, self.p.length)
        theirs, truth = theirs[:steps], truth[:steps]
        off = _rms(theirs - truth)
        with np.errstate(all="ignore"):
            tried = [(_rms(theirs - self.walk(steps, mistake)), mistake) for mistake in self.mistakes()]
            best, mistake = min((x for x in tried if math.isfinite(x[0])), default=(math.inf, ""))
            if best < 0.05 * off:
                return mistake
            narrow = _rms(self.walk(steps, STATE_NARROW) - truth)
        return STATE_NARROW if narrow / 3 < off < 3 * narrow else ""


STATE_NARROW = "the state kept in bfloat16"


def _wide(x: Array) -> Array:
    return x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)


def _rms(x: Array) -> float:
    return float(np.sqrt(np.mean(np.abs(x) ** 2)))


def _recurrence(gates: Array, drives: Array, keep: Callable[[Array], Array] | None = None) -> Array:
    h = np.zeros(drives.shape[1:], np.result_type(gates, drives))
    states = np.empty(drives.shape, h.dtype)
    for t in range(len(drives)):
        h = gates[t] * h + drives[t]
        states[t] = h = h if keep is None else keep(h)
    return states


def _bfloat16(x: Array) -> Array:
    """Rounded to 8 bits, at any exponent."""
    if np.iscomplexobj(x):
        return np.asarray(_bfloat16(x.real) + 1j * _bfloat16(x.imag))
    fraction, exponent = np.frexp(x)
    return np.asarray(np.ldexp(np.rint(fraction * 256) / 256, exponent))


# --- what is reported ------------------------------------------------------------------------------------------------


@dataclass
class Precision:
    """The worst rows against float64, relative to the root mean square of the result there.

    Attributes
    ----------
    batch, channels
        Which rows.
    level : float
        The root mean square of the error.
    largest : float
        The largest error.
    of_bound : float
        The largest error over its bound, in the first 4096 steps: above 1 no rounding explains it.
    by_length : list of (int, float)
        Steps, and the error's root mean square in the half that ends there.
    growth : float
        The error in the last quarter over that in the first.
    state_in_bfloat16 : float, optional
        The level, if the state were kept in bfloat16 from step to step.
    """

    batch: int
    channels: list[int]
    level: float
    largest: float
    of_bound: float
    by_length: list[tuple[int, float]] = field(repr=False)
    growth: float
    state_in_bfloat16: float | None


def precision(rows: Rows, mine: Array, truth: Array) -> Precision:
    """Of the rows of a float32 result (length, rows)."""
    error, scale = np.abs(mine - truth), max(_rms(truth), 1e-300)
    length = len(truth)
    value, bound = rows.bounded()
    with np.errstate(invalid="ignore", divide="ignore"):
        stored = np.abs(value) * (2.0**-53 if rows.p.item in ("float64", "complex128") else 2.0**-24) + 2.0**-126
        ratio = np.abs(mine[: len(value)] - value) / (bound + stored)
    quarter = max(1, length // 4)
    first, last = _rms(error[:quarter]), _rms(error[-quarter:])
    ends = sorted({min(length, 1 << k) for k in range(3, length.bit_length() + 1)})
    narrow = None
    if length > 1:
        steps = min(GUESSED, length)
        narrow = _rms(rows.walk(steps, STATE_NARROW) - truth[:steps]) / scale
    return Precision(
        rows.batch, rows.channels, _rms(error) / scale, float(error.max()) / scale, float(np.nanmax(ratio, initial=0)),
        [(end, _rms(error[end // 2 : end]) / scale) for end in ends], last / max(first, 1e-300), narrow,
    )  # fmt: skip


@dataclass
class Difference:
    """How a given gradient differs from cuscan's: theirs = factor * ours + offset, as near as that comes."""

    relative: float
    factor: float
    offset: float
    residual: float  # relative, after factor and offset
    shift: int  # steps of time by which it fits instead, or 0


def difference(xp: Any, theirs: Any, ours: Any, time: int | None) -> Difference:
    """Least squares; `time` is the axis of time."""
    x, y = (_real(xp, each) for each in (ours, theirs))
    scale = max(math.sqrt(float((x * x).mean())), 1e-300)

    def rms(z: Any) -> float:
        return math.sqrt(float((z * z).mean())) / scale

    mean_x, mean_y = float(x.mean()), float(y.mean())
    spread = float(((x - mean_x) ** 2).mean())
    factor = float(((x - mean_x) * (y - mean_y)).mean()) / spread if spread > 0 else 1.0
    offset = mean_y - factor * mean_x
    relative, residual, shift = rms(y - x), rms(y - factor * x - offset), 0
    if time is not None and residual > 0.1 * relative:
        for by in (1, -1):
            if rms(xp.roll(x, by, axis=time) - y) < 0.2 * relative:
                shift = by
    return Difference(relative, factor, offset / scale, residual, shift)


def _real(xp: Any, x: Any) -> Any:
    x = x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)
    return xp.stack((x.real, x.imag), -1) if x.dtype.kind == "c" else x
