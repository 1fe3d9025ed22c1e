"""The figures of `cuscan.diagnose`: exact reductions over the arrays where they are, some channels at a time.

Both recurrences are one here: log|gate| = x * rate, with x (batch, length, channels) and rate (channels, state). In
selective_scan x is delta after bias, softplus and limits, and rate is A; in linear_scan x is log|a|, its rows are the
channels, and rate is 1. So sums of log gates over time are sums of x, and nothing of shape (batch, length, channels,
state) is needed. Time is counted in the direction of the scan.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import _arrays, selective
from ._arrays import Array

LARGEST = float(np.finfo(np.float32).max)
TINY = 2.0**-126  # what a GPU flushes
DECAYED = 1e-3
RESOLUTION = 2.0**-24  # half a unit in the last place of float32
_MOST = 1e6  # of |x|: beyond this a gate is 0 for any rate
_BEGIN = 1e8  # added to x where a state is forgotten
_SAMPLE = 1 << 20
BLOCK = 1 << 22, 1 << 25  # items that are looked at together, on the CPU and on a GPU
HISTOGRAM = np.linspace(-9, 0.5, 39)  # log10(1 - gate)

Where = dict[str, int]


@dataclass
class Problem:
    """The arguments of a call as (batch, time, channels) views in the direction of the scan.

    `arrays` has u, delta, z (batch, length, channels), B, C (batch, length, groups, state) or (channels, state), A, D,
    delta_bias, h0; or a, b (1, length, rows), gates (as a, not broadcast) and h0; and mask and reset. `counted` and
    `begins` are (batch, length, 1 or rows) or None: packed sequences are in them.
    """

    function: str
    xp: Any
    arrays: dict[str, Any]
    options: dict[str, Any]
    shape: tuple[int, int, int, int]  # batch, length, channels, state
    rates: Array
    counted: Array | None
    begins: Array | None
    offsets: np.ndarray[Any, Any] | None
    item: str  # of u or b

    @property
    def length(self) -> int:
        return self.shape[1]

    def where(self, batch: int, time: int, channel: int, state: int | None = None) -> Where:
        """A place in the caller's terms: time from the beginning of the arrays, whatever the direction."""
        time = self.length - 1 - time if self.options["reverse"] else time
        if self.function == "linear_scan":
            return {"time": time, "row": channel}
        return {"batch": batch, "time": time, "channel": channel} | ({} if state is None else {"state": state})

    def blocks(self, channels: int | None = None) -> Iterator[slice]:
        """Channels (those of x) of which an array of all steps is of bounded size."""
        most = BLOCK[0] if self.xp is np else BLOCK[1]
        channels = self.gate_rows if channels is None else channels
        size = max(1, most // max(1, self.shape[0] * self.length))
        return (slice(first, min(first + size, channels)) for first in range(0, channels, size))

    @property
    def gate_rows(self) -> int:
        """Channels that x has; fewer than the result where gates are broadcast."""
        return int(self.arrays["gates"].shape[2] if self.function == "linear_scan" else self.shape[2])

    def sizes(self, block: slice) -> tuple[Array, Array, Array]:
        """Delta with its bias, after softplus, and after the limits, in float64."""
        bias = self.arrays["delta_bias"]
        raw = self.arrays["delta"][:, :, block].astype(np.float64)
        raw = raw if bias is None else raw + bias[block].astype(np.float64)
        soft = self.xp.logaddexp(raw, np.float64(0)) if self.options["delta_softplus"] else raw
        limits = self.options["delta_limit"]
        return raw, soft, soft if limits is None else self.xp.clip(soft, *map(float, limits))

    def x(self, block: slice, used: Array | None = None) -> Array:
        """log|gate| over rate, finite, 0 where a step does not count."""
        if self.function == "linear_scan":
            with np.errstate(divide="ignore", invalid="ignore"):
                x = self.xp.log(abs(self.arrays["gates"][:, :, block].astype(self.wide)))
        else:
            x = self.sizes(block)[2] if used is None else used
        x = self.xp.nan_to_num(x, nan=0.0, posinf=_MOST, neginf=-_MOST).clip(-_MOST, _MOST)
        return x if self.counted is None else self.xp.where(_of(self.counted, block), x, 0.0)

    @property
    def wide(self) -> Any:
        """Float64, or complex128."""
        return np.complex128 if self.item.startswith("complex") else np.float64


def _of(flags: Array, block: slice) -> Array:
    return flags if flags.shape[2] == 1 else flags[:, :, block]


def selective_problem(xp: Any, given: dict[str, Any], options: dict[str, Any]) -> Problem:
    """Of a selective_scan whose shapes were checked."""
    sizes = selective.check_shapes(given, options["layout"])
    turn = slice(None, None, -1 if options["reverse"] else 1)
    x = selective.views(given, options["layout"])
    arrays = {name: x[name] for name in ("A", "D", "delta_bias", "h0")}
    arrays |= {name: None if x[name] is None else x[name][:, turn] for name in ("u", "delta", "z")}
    arrays |= {name: x[name] if x[name].ndim == 2 else x[name][:, turn] for name in ("B", "C")}
    arrays |= {name: None if x[name] is None else x[name][:, turn, None] for name in ("mask", "reset")}
    offsets = _host_offsets(given["cu_seqlens"], sizes.length, options["reverse"])
    counted, begins = _marks(xp, given["mask"], given["reset"], offsets, sizes.length, turn)
    rates = xp.nan_to_num(given["A"].real.astype(np.float64)).clip(-1e30, 1e30)
    shape = (sizes.batch, sizes.length, sizes.channels, sizes.state)
    item = _arrays.item_name(given["u"])
    return Problem("selective_scan", xp, arrays, options, shape, rates, counted, begins, offsets, item)


def linear_problem(xp: Any, given: dict[str, Any], options: dict[str, Any]) -> Problem:
    """Of a linear_scan: `axis` is in the options, a scalar `a` an array."""
    b, axis, reverse = given["b"], options["axis"], options["reverse"]
    length = b.shape[axis]
    turn = slice(None, None, -1 if reverse else 1)
    along = tuple(length if d == axis else 1 for d in range(b.ndim))
    cut = given["mask"] is not None or given["reset"] is not None
    shape = b.shape if cut else np.broadcast_shapes(along, given["a"].shape)

    def rows(x: Array, shape: tuple[int, ...]) -> Array:
        return xp.moveaxis(xp.broadcast_to(x, shape), axis, 0).reshape(length, -1)[None, turn]

    offsets = _host_offsets(given["cu_seqlens"], length, reverse)
    mask, reset = (None if x is None else rows(x, shape)[0].T for x in (given["mask"], given["reset"]))
    flags = _marks(xp, mask, reset, offsets, length, slice(None))
    counted, begins = (None if x is None else x[:, :, 0].T[None] for x in flags)
    arrays = {"gates": rows(given["a"], shape), "a": rows(given["a"], b.shape), "b": rows(b, b.shape)}
    marked = {name: None if given[name] is None else rows(given[name], b.shape) for name in ("mask", "reset")}
    arrays |= {"h0": given["h0"], **marked}
    count = b.size // length
    return Problem(
        "linear_scan", xp, arrays, options, (1, length, count, 1), xp.ones((arrays["gates"].shape[2], 1)), counted,
        begins, offsets, _arrays.item_name(b),
    )  # fmt: skip


def _host_offsets(offsets: Array | None, length: int, reverse: bool) -> np.ndarray[Any, Any] | None:
    if offsets is None:
        return None
    values = np.asarray(offsets if isinstance(offsets, np.ndarray) else offsets.get()).astype(np.int64)
    return length - values[::-1] if reverse else values


def _marks(
    xp: Any,
    mask: Array | None,
    reset: Array | None,
    offsets: np.ndarray[Any, Any] | None,
    length: int,
    turn: slice,
) -> tuple[Array | None, Array | None]:
    """Which steps count and which forget, (batch, length, 1), in the direction of the scan."""
    counted = None if mask is None else mask[:, turn]
    begins = None if reset is None else reset[:, turn]
    if offsets is not None:
        inside, first = np.zeros(length, bool), np.zeros(length, bool)
        for low, high in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
            inside[low:high] = True
            first[low : low + (low < high)] = True
        counted = xp.asarray(inside)[None] & (True if counted is None else counted)
        begins = xp.asarray(first)[None] | (False if begins is None else begins)
    return tuple(None if x is None else x[:, :, None] for x in (counted, begins))  # type: ignore[return-value]


# --- gates and memory ------------------------------------------------------------------------------------------------


@dataclass
class Gates:
    """The gates a = exp(delta A), or a, of all steps that count.

    Attributes
    ----------
    largest, smallest : float
        Of |a|, with `largest_at` and `smallest_at`.
    above_one, below_1e_30 : int
        How many gates are.
    zero_share, one_share : float
        Shares of gates that are exactly 0 (flushed below 2^-126) or exactly 1 in float32.
    growth : float
        The largest factor by which any state grows between two of 33 even steps, as its logarithm.
    growth_at, growth_rate
        Where it ends, and the logarithm a step.
    overflow_predicted : int, optional
        The step at which the fastest state passes float32's largest number, in float64, extrapolated beyond the length.
    histogram : array
        Counts of log10(1 - a) in the bins of HISTOGRAM, of an even sample of steps.
    """

    largest: float = -math.inf
    largest_at: Where = field(default_factory=dict)
    smallest: float = math.inf
    smallest_at: Where = field(default_factory=dict)
    above_one: int = 0
    below_1e_30: int = 0
    zero_share: float = 0.0
    one_share: float = 0.0
    growth: float = 0.0
    growth_at: Where = field(default_factory=dict)
    growth_rate: float = 0.0
    growth_row: tuple[int, int] = 0, 0  # batch and channel
    overflow_predicted: int | None = None
    histogram: Any = field(default_factory=lambda: np.zeros(len(HISTOGRAM) - 1), repr=False)
    constant: bool = True  # in time


QUANTILES = (0.0, 0.1, 0.5, 0.9, 1.0)


@dataclass
class Memory:
    """Steps until a unit input has decayed: to 1e-3, and below float32's resolution (2^-24).

    Attributes
    ----------
    steps, resolution : array (channels, state)
        Medians over batch and starting steps; gates above 1 count as 1; beyond the length extrapolated.
    quantiles, resolution_quantiles : tuple
        Of them: least, a tenth, median, nine tenths, largest.
    hidden : tuple, optional
        Quantiles of the share of the first steps that the last output cannot see any more. None where steps forget.
    hidden_from_all : float, optional
        The share that it cannot see through any channel and state.
    """

    steps: Any = field(repr=False)
    resolution: Any = field(repr=False)
    quantiles: tuple[float, ...]
    resolution_quantiles: tuple[float, ...]
    hidden: tuple[float, ...] | None
    hidden_from_all: float | None


@dataclass
class Delta:
    """Delta after bias, softplus and limits.

    Attributes
    ----------
    quantiles : tuple
        Least, a tenth, median, nine tenths, largest (the middle ones of an even sample of at most 2^20).
    at_limit : int
        Steps that the limits changed.
    linear, underflow, negative : int
        Raw values above 20, where softplus is the identity; below -87.3, where it is 0 in float32; used values below 0.
    raw_least : float
        The least raw value.
    """

    quantiles: tuple[float, ...]
    least_at: Where
    largest_at: Where
    at_limit: int
    linear: int
    underflow: int
    negative: int
    raw_least: float
    constant: bool
    count: int


@dataclass
class Passed:
    """What one pass over the channels gives."""

    gates: Gates
    memory: Memory
    delta: Delta | None
    pads_change: int  # masked steps that would change the state without the mask


def gate_figures(p: Problem) -> Passed:
    """One pass over all channels."""
    gates, pads, delta = Gates(), None, _DeltaParts()
    batch, length, _, state = p.shape
    few = slice(None, None, max(1, batch * p.gate_rows * state >> 20))
    starts_count = max(1, min(16, length, (1 << 22) // max(1, len(range(*few.indices(batch))) * p.gate_rows * state)))
    starts = np.linspace(0, length - 1, starts_count, endpoint=False).astype(int)
    memory: list[Any] = []
    zero = one = counted = 0
    for block in p.blocks():
        used = None
        if p.function == "selective_scan":
            raw, soft, used = p.sizes(block)
            delta.add(p, block, raw, soft, used)
            if p.counted is not None:
                changes = (~p.counted[:, :, 0]) & (used != 0).any(axis=2)
                pads = changes if pads is None else pads | changes
        x = p.x(block, used)
        gates.constant &= bool((x == x[:, :1]).all())
        steps = x.size if p.counted is None else int(p.xp.broadcast_to(_of(p.counted, block), x.shape).sum())
        counted += steps * state
        rates = p.rates[block]
        for n in range(state):
            zeros, ones = _count(p, gates, block, x * rates[:, n], n)
            zero, one = zero + zeros, one + ones
        _grow(p, gates, block, x, rates)
        memory.append(_memory(p, x[few], rates, starts))
    gates.zero_share, gates.one_share = zero / max(1, counted), one / max(1, counted)
    if gates.growth > 0:
        gates.overflow_predicted = overflow(p, gates, *gates.growth_row)
    steps, resolution, hidden = [np.concatenate(x, axis=-1) for x in zip(*memory, strict=True)]
    medians = [np.median(x, axis=(0, 1)).T for x in (steps, resolution)]
    seen = p.begins is None
    share = hidden / length
    return Passed(
        gates,
        Memory(
            steps=medians[0], resolution=medians[1], quantiles=_quantiles(medians[0]),
            resolution_quantiles=_quantiles(medians[1]), hidden=_quantiles(share) if seen else None,
            hidden_from_all=float(share.min()) if seen else None,
        ),
        delta.done() if p.function == "selective_scan" else None,
        0 if pads is None else int(pads.sum()),
    )  # fmt: skip


def _quantiles(x: Any) -> tuple[float, ...]:
    """Nearest, as some may be infinite."""
    return tuple(float(q) for q in np.quantile(x, QUANTILES, method="nearest"))


def _place(p: Problem, x: Array, index: int, block: slice, state: int | None) -> Where:
    b, t, d = np.unravel_index(index, x.shape)
    return p.where(int(b), int(t), int(d) + block.start, state)


def _count(p: Problem, gates: Gates, block: slice, log: Array, state: int) -> tuple[int, int]:
    """Extremes and histogram of one state's gates; how many are exactly 0, and exactly 1."""
    xp = p.xp
    wide = p.item in ("float64", "complex128")
    low, high = log, log
    if p.counted is not None:
        low, high = (xp.where(_of(p.counted, block), log, other) for other in (np.inf, -np.inf))
    lowest, highest = float(low.min()), float(high.max())
    if math.exp(min(highest, 709)) > gates.largest:
        gates.largest = math.exp(min(highest, 709))
        gates.largest_at = _place(p, high, int(high.argmax()), block, state)
    if lowest < 709 and math.exp(lowest) < gates.smallest:
        gates.smallest, gates.smallest_at = math.exp(lowest), _place(p, low, int(low.argmin()), block, state)
    half = 2.0**-54 if wide else 2.0**-25  # below 1 half a unit in the last place, twice that above
    gates.above_one += int((high > 2 * half).sum()) if highest > 2 * half else 0
    gates.below_1e_30 += int((low < math.log(1e-30)).sum()) if lowest < math.log(1e-30) else 0
    floor = math.log(2.0**-1022 if wide else TINY)
    zeros = int((low < floor).sum()) if lowest < floor else 0
    ones = int(((high >= -half) & (high <= 2 * half)).sum()) if highest >= -half else 0
    sample = log[:, :: max(1, log.size >> 16)]
    bins = xp.log10(xp.maximum(-xp.expm1(xp.minimum(sample, 0)), 1e-9)).ravel()
    gates.histogram += to_host(xp.histogram(bins, bins=xp.asarray(HISTOGRAM))[0])
    return zeros, ones


def _grow(p: Problem, gates: Gates, block: slice, x: Array, rates: Array) -> None:
    """The largest growth of a state between two of some steps."""
    cuts = np.unique(np.linspace(0, p.length - 1, 33).astype(int))
    highest, lowest = (to_host(each(axis=(0, 1)))[:, None] * to_host(rates) for each in (x.max, x.min))
    for n in np.flatnonzero(np.maximum(highest, lowest).max(axis=0) > 0).tolist():
        log = x * rates[:, n]
        if p.begins is not None:
            log = p.xp.where(_of(p.begins, block), -_BEGIN, log)
        total = log.cumsum(axis=1)[:, p.xp.asarray(cuts)]
        least, start = total[:, 0], p.xp.zeros(total[:, 0].shape, int)
        for k in range(1, len(cuts)):
            grown = total[:, k] - least
            best = float(grown.max())
            if best > gates.growth:
                b, d = (int(i) for i in np.unravel_index(int(grown.argmax()), grown.shape))
                gates.growth, gates.growth_rate = best, best / int(cuts[k] - cuts[int(start[b, d])])
                gates.growth_row = b, d + block.start
                gates.growth_at = p.where(b, int(cuts[k]), d + block.start, n)
            lower = total[:, k] < least
            least, start = p.xp.where(lower, total[:, k], least), p.xp.where(lower, k, start)


def overflow(p: Problem, gates: Gates, batch: int, channel: int) -> int | None:
    """The step at which the first state of a channel, or what C makes of them, passes float32's largest number."""
    from .linear import linear_scan

    b, d, one = batch, channel, slice(channel, channel + 1)
    wide = channel if p.gate_rows > 1 else 0
    log = to_host(p.x(slice(wide, wide + 1)))[b, :, :1] * to_host(p.rates[wide])  # (length, state)
    if p.function == "linear_scan":
        C: np.ndarray[Any, Any] = np.ones(1)
        drive = to_host(p.arrays["b"][b, :, one]).astype(p.wide)
    else:
        B, C = (
            to_host(x[d] if x.ndim == 2 else x[b, :, d * x.shape[2] // p.shape[2]]).astype(
                np.complex128 if x.dtype.kind == "c" else np.float64
            )
            for x in (p.arrays["B"], p.arrays["C"])
        )
        drive = to_host(p.sizes(one)[2])[b] * to_host(p.arrays["u"][b, :, one]).astype(np.float64) * B
    begins = None if p.begins is None else to_host(p.begins)[b, :, [min(d, p.begins.shape[2] - 1)]].T
    with np.errstate(all="ignore"):
        h = linear_scan(np.exp(log).astype(drive.dtype), np.nan_to_num(drive), axis=0, reset=begins)
        h = np.maximum(abs(h).max(axis=1), abs((C * h).sum(axis=1)))
    beyond = np.flatnonzero(~(h <= LARGEST))
    if len(beyond):
        return int(beyond[0])
    left = math.log(LARGEST) - math.log(max(float(h[-1]), TINY))
    return None if gates.growth_rate <= 0 or gates.growth < 1 else p.length + int(left / gates.growth_rate)


def _memory(p: Problem, x: Array, rates: Array, starts: np.ndarray[Any, Any]) -> tuple[Any, Any, Any]:
    """Steps to 1e-3 and to the resolution (batch, starts, state, channels), and hidden first steps."""
    xp = p.xp
    found = None
    for sign in (-1, 1):
        if not bool((rates <= 0 if sign < 0 else rates > 0).any()):
            continue
        decay = xp.maximum(-sign * x, 0).cumsum(axis=1)
        per = xp.maximum(abs(rates), 1e-300).T  # (state, channels)
        mine = tuple(to_host(each) for each in _decays(xp, decay, per, starts))
        if found is None:
            found = mine
        else:
            use = to_host((rates <= 0 if sign < 0 else rates > 0).T)
            found = tuple(np.where(use, new, old) for new, old in zip(mine, found, strict=True))
    assert found is not None
    return found  # type: ignore[return-value]


def _decays(xp: Any, decay: Array, per: Array, starts: np.ndarray[Any, Any]) -> tuple[Array, ...]:
    batch, length, channels = decay.shape
    state = len(per)
    base = decay[:, xp.asarray(starts)][:, :, None, :]  # (batch, starts, 1, channels)
    first = xp.asarray(starts)[None, :, None, None]
    results = []
    for level in (DECAYED, RESOLUTION):
        need = -math.log(level) / per
        at = _first_above(xp, decay, (base + need).reshape(batch, -1, channels)).reshape(batch, -1, state, channels)
        slope = (decay[:, -1:, None] - base) / xp.maximum(length - 1 - first, 1)
        beyond = xp.where(slope > 0, need / xp.maximum(slope, 1e-300), np.inf)
        results.append(xp.where(at < length, at - first, beyond))
    gone = (decay[:, -1:, None] + math.log(RESOLUTION) / per).reshape(batch, state, channels)
    results.append(_first_above(xp, decay, gone).reshape(batch, 1, state, channels))
    return tuple(results)


def _first_above(xp: Any, rising: Array, level: Array) -> Array:
    """The first index along axis 1 at which `rising` is above `level` (batch, any, channels); the length if none."""
    length = rising.shape[1]
    low, high = xp.zeros(level.shape, np.int64), xp.full(level.shape, length, np.int64)
    for _ in range(length.bit_length()):
        middle = (low + high) // 2
        above = xp.take_along_axis(rising, xp.minimum(middle, length - 1), axis=1) > level
        done = low >= high
        high = xp.where(above & ~done, middle, high)
        low = xp.where(above | done, low, middle + 1)
    return low


class _DeltaParts:
    """What is known of delta after some channels."""

    def __init__(self) -> None:
        self.least = self.raw = math.inf
        self.largest = -math.inf
        self.at: list[Where] = [{}, {}]
        self.limited = self.linear = self.underflow = self.negative = self.count = 0
        self.constant = True
        self.sample: list[Any] = []

    def add(self, p: Problem, block: slice, raw: Array, soft: Array, used: Array) -> None:
        xp = p.xp
        known = xp.isfinite(used) if p.counted is None else xp.isfinite(used) & p.counted
        low, high = xp.where(known, used, np.inf), xp.where(known, used, -np.inf)
        if float(low.min()) < self.least:
            self.least, self.at[0] = float(low.min()), _place(p, low, int(low.argmin()), block, None)
        if float(high.max()) > self.largest:
            self.largest, self.at[1] = float(high.max()), _place(p, high, int(high.argmax()), block, None)
        self.raw = min(self.raw, float(xp.where(known, raw, np.inf).min()))
        self.limited += int((known & (soft != used)).sum())
        if p.options["delta_softplus"]:
            self.linear += int((known & (raw > 20)).sum())
            self.underflow += int((known & (raw < math.log(TINY))).sum())
        self.negative += int((known & (used < 0)).sum())
        self.count += int(known.sum())
        self.constant &= bool((raw == raw[:, :1]).all())
        stride = max(1, math.prod(p.shape[:3]) // _SAMPLE)
        self.sample.append(to_host(xp.where(known, used, np.nan)[:, ::stride]).ravel())

    def done(self) -> Delta:
        sample = np.concatenate(self.sample)
        sample = sample[~np.isnan(sample)]
        middle = np.quantile(sample, QUANTILES[1:-1]) if sample.size else [math.nan] * 3
        quantiles = (self.least, *map(float, middle), self.largest)
        return Delta(
            quantiles, self.at[0], self.at[1], self.limited, self.linear, self.underflow, self.negative, self.raw,
            self.constant, self.count,
        )  # fmt: skip


# --- what is not finite, pads --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NotFinite:
    """NaN and inf of one array: how many of each, and where the first one in time is, (batch, time, ...) indices."""

    nan: int
    inf: int
    first: tuple[int, ...]
    kind: str


def not_finite(p: Problem, x: Array, *, marks: bool = True) -> NotFinite | None:
    """Of an array with time as its second axis, where its steps count; None if all is finite."""
    xp = p.xp
    step = max(1, (BLOCK[0] if xp is np else 2 * BLOCK[1]) // max(1, x.size // max(1, x.shape[1])))
    nan = inf = 0
    first: tuple[int, ...] | None = None
    kind = ""
    for begin in range(0, x.shape[1], step):
        part = x[:, begin : begin + step]
        part = part if part.dtype.kind in "fc" else part.astype(np.float32)
        bad = ~xp.isfinite(part)
        if marks and p.counted is not None:
            inside = p.counted[:, begin : begin + step]
            bad &= inside.reshape(*inside.shape[:2], *(1,) * (bad.ndim - 3), inside.shape[2])
        if not bool(bad.any()):
            continue
        nans = int((xp.isnan(part) & bad).sum())
        nan, inf = nan + nans, inf + int(bad.sum()) - nans
        if first is None:
            turned = xp.moveaxis(bad, 1, 0)
            t, b, *rest = (int(i) for i in np.unravel_index(int(turned.argmax()), turned.shape))
            first = (b, begin + t, *rest)
            kind = "NaN" if bool(xp.isnan(part[(b, t, *rest)])) else "inf"
    return None if first is None else NotFinite(nan, inf, first, kind)


def constant_ends(p: Problem, x: Array) -> tuple[int, int]:
    """The row of the batch whose steps are all alike at the end for longest, and how many; what pads look like."""
    xp = p.xp
    same = None
    for block in p.blocks(x.shape[2]):
        part = bits(x[:, :, block])
        alike = (part[:, 1:] == part[:, :-1]).all(axis=2)
        same = alike if same is None else same & alike
    if same is None or same.shape[1] == 0:
        return 0, 0
    if p.options["reverse"]:
        same = same[:, ::-1]
    run = xp.where(same.all(axis=1), 0, (~same[:, ::-1]).argmax(axis=1))
    row = int(run.argmax())
    return row, int(run[row]) + 1 if int(run[row]) else 0


def bits(x: Array) -> Array:
    """What can be compared: bfloat16 as integers."""
    return x.view(np.uint16) if x.dtype.kind == "V" else x


def to_host(x: Array) -> np.ndarray[Any, Any]:
    return np.asarray(x.get() if hasattr(x, "get") else x)
