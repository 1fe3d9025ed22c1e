"""Whole calls as values: a problem makes its arrays from a seed, runs anywhere, and knows what is right.

Two kinds of values. Exact ones (gates 0, 1, -1, small integers) have states that are exact in any association, so that
every schedule gives the same numbers; a gate of 0 is rare, because it hides what came before it. Real ones are compared
with the bound of `oracle`; of these, "nan" have one NaN in them, which must not leave its row.

With a mask, reset or cu_seqlens, half of the seeds put NaN wherever the result may not depend on what is there.

Problems of gradients are made of those of the scans.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

import cuscan
from cuscan import _plan
from cuscan._arrays import COMPLEX, REAL, _dtype, accumulation, item_name

from . import _bounds
from ._bounds import Bounded, _spans_in_turn
from .executors import Executor
from .oracle import Scan, assert_scan_close

Array = NDArray[Any]
T = TypeVar("T")
Pick = Callable[[Sequence[Any]], Any]  # one of these, the simplest first
Whole = Callable[[int, int], int]  # an int between these, both included

_SIZES = ("shape", "axis", "batch", "length", "channels", "state", "lengths", "plans")  # a default is not simpler
VALUES = ("exact", "real", "nan")
BIG_RATE = -1e4  # exp(delta * rate) is 1 for delta 0 and 0 for delta 1


class _Short:
    """A repr that is Python, without what has its default value."""

    def __repr__(self) -> str:
        shown = (
            f"{each.name}={getattr(self, each.name)!r}"
            for each in fields(self)  # type: ignore[arg-type]
            if getattr(self, each.name) != each.default
        )
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True, repr=False)
class Layout(_Short):
    """How an array lies in memory.

    Attributes
    ----------
    order : tuple of int, optional
        The axes, slowest first.
    steps : tuple of int, optional
        From item to item along each axis, counted in items of that axis: 2 leaves gaps, -1 runs backwards, 0 is a
        broadcast axis.
    pad : int
        Items before the first one and between the rows of the fastest axis.
    skew : int
        Bytes that every item is off its alignment.
    """

    order: tuple[int, ...] | None = None
    steps: tuple[int, ...] | None = None
    pad: int = 0
    skew: int = 0

    def inner(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of what `place` takes: 1 along broadcast axes."""
        steps = self.steps or (1,) * len(shape)
        return tuple(size if step else min(size, 1) for size, step in zip(shape, steps, strict=True))

    def place(self, values: Array, shape: tuple[int, ...]) -> Array:
        """An array of `shape` that lies like this, with NaN between its items, or True, or the least integer.

        A broadcast one is read-only.
        """
        order = self.order or tuple(range(len(shape)))
        steps = self.steps or (1,) * len(shape)
        sizes = [(values.shape[d] - 1) * max(abs(steps[d]), 1) + 1 if values.shape[d] else 0 for d in order]
        sizes[-1:] = [size + self.pad for size in sizes[-1:]]
        room = np.empty(math.prod(sizes) * values.itemsize + self.skew, np.uint8)
        memory: Array = np.ndarray(sizes, values.dtype, room, self.skew)
        memory[...] = np.iinfo(values.dtype).min if values.dtype.kind == "i" else np.nan
        if sizes:
            memory = memory[..., self.pad :]
        view = memory.transpose([order.index(d) for d in range(len(shape))])
        cut: tuple[Any, ...] = tuple(slice(None, None, step or 1) for step in steps)
        view = view[(*cut, ...)]  # an array, without axes too
        np.copyto(view, values)
        return view if view.shape == shape else np.broadcast_to(view, shape)


@dataclass(frozen=True, repr=False)
class Plan(_Short):
    """What is forced of a plan; cuscan chooses the rest.

    Attributes
    ----------
    schedule : {"serial", "block", "split"}, optional
        How time is laid on the chip.
    lanes : {"rows", "time"}, optional
        What the lanes of a warp lie along, in linear_scan.
    chunk : int, optional
        Steps a chunk of a split.
    row_warps, warps : int, optional
        Warps a row and warps a block, in linear_scan.
    tile : SelectiveTile, optional
        One of `cuscan._plan.selective_tiles`.
    segments : int, optional
        Of the NumPy path.
    parts, pieces : int, optional
        Parts of the batch, and of a chunk that are summarised apart, in selective_scan_vjp.
    """

    schedule: str | None = None
    lanes: str | None = None
    chunk: int | None = None
    row_warps: int | None = None
    warps: int | None = None
    tile: _plan.SelectiveTile | None = None
    segments: int | None = None
    parts: int | None = None
    pieces: int | None = None

    def forced(self) -> AbstractContextManager[None]:
        """A block in which plans are made like this."""
        choices = {each.name: getattr(self, each.name) for each in fields(self)}
        enums = {"schedule": _plan.Schedule, "lanes": _plan.Lanes}
        return _plan.forced(**{name: enums.get(name, _same)(x) for name, x in choices.items() if x is not None})


def _same(x: T) -> T:
    return x


def _flushed(x: Array) -> float:
    """What a kernel may lose in an output with float32's exponents: it flushes what is below 2**-126."""
    return 2.0**-126 if item_name(x) in ("float32", "bfloat16", "complex64") else 0.0


@np.errstate(over="ignore")
def _assert_rounded(x: Array, value: Array) -> None:
    if not _same_numbers(x, value.astype(x.dtype)):
        raise AssertionError("exact values are not rounded to nearest, ties to even")


def _same_numbers(x: Array, y: Array) -> bool:
    return x.dtype == y.dtype and np.array_equal(x, y, equal_nan=True)


class _Checked(_Short):
    """A call with results that are known."""

    values: str
    out: Any = None
    plans: tuple[Plan, ...]
    function: Callable[..., Any]
    _summed = False  # whether results are sums that exact values can be too large for

    def arguments(self) -> dict[str, Any]:
        """The call's keyword arguments, with NumPy arrays; those that are not `out` are read-only."""
        raise NotImplementedError

    def _results(self, arguments: dict[str, Any]) -> dict[str, Bounded]:
        """What the call gives, in order."""
        raise NotImplementedError

    def run(self, executor: Executor, plan: Plan = Plan(), arguments: dict[str, Any] | None = None) -> list[Array]:
        """The call's results as NumPy arrays, computed by `executor` (see `executors`) with `plan` forced."""
        with plan.forced():
            results = executor(self.function, self.arguments() if arguments is None else arguments)
        return [np.asarray(x) for x in (results if isinstance(results, tuple) else (results,)) if x is not None]

    def check(self, executor: Executor) -> None:
        """Run under every plan and compare with the expected values; on exact values bit for bit.

        Raises
        ------
        AssertionError
            A value is further off than its bound, or on exact values not the expected one rounded once, or two plans
            differ; zeros of both signs are equal.
        """
        arguments = self.arguments()
        expected = self._results(arguments)
        first: list[Array] | None = None
        for plan in self.plans:
            # `out` may be an input, which the call before has overwritten.
            results = self.run(executor, plan, arguments if self.out is None or first is None else None)
            if self.values == "exact" and first is not None and not self._summed:
                if not all(map(_same_numbers, results, first)):
                    raise AssertionError(f"{self.plans[0]} and {plan} differ on exact values")
                continue
            for x, (name, (value, bound)) in zip(results, expected.items(), strict=True):
                try:
                    assert_scan_close(x, value, bound + _flushed(x))
                    if self.values == "exact" and not bound.any():
                        _assert_rounded(x, value)
                except AssertionError as error:
                    raise AssertionError(f"{name} under {plan}: {error}") from None
            first = first or results


class _Problem(_Checked):
    """What the problems of both scans share."""

    seed: int
    dtype: str
    h0: Layout | None
    mask: Layout | None
    reset: Layout | None
    cu_seqlens: Layout | None
    lengths: tuple[int, ...]
    head: int
    offsets: str
    last: bool

    def _scan(self, arguments: dict[str, Any]) -> Scan:
        raise NotImplementedError

    def _segments(self, shape: tuple[int, ...], time: int) -> dict[str, Array | None]:
        """Mask and reset of `shape`, of which the axis `time` is time, and cu_seqlens.

        Each has a stream of values of its own, so that a simpler problem keeps the rest.
        """
        given: dict[str, Array | None] = {}
        for stream, (name, draw) in enumerate((("mask", _mask), ("reset", _reset)), start=1):
            layout: Layout | None = getattr(self, name)
            given[name] = None
            if layout is not None:
                inner = layout.inner(shape)
                random = np.random.default_rng((self.seed, stream))
                drawn = draw(random, inner[:time] + inner[time + 1 :], inner[time])
                given[name] = layout.place(np.moveaxis(drawn, -1, time), shape)
        given["cu_seqlens"] = None
        if self.cu_seqlens is not None:
            offsets = np.minimum(self.head + np.cumsum((0, *self.lengths)), shape[time]).astype(self.offsets)
            given["cu_seqlens"] = self.cu_seqlens.place(offsets, offsets.shape)
        return given

    def unread(self, shape: tuple[int, ...], time: int, segments: dict[str, Array | None]) -> Array | None:
        """Steps of which nothing is read, as an array of `shape`, for half of the seeds with any of `segments`."""
        if all(x is None for x in segments.values()) or np.random.default_rng((self.seed, 3)).random() < 0.5:
            return None
        mask, offsets = segments["mask"], segments["cu_seqlens"]
        unread = np.zeros(shape, np.bool_) if mask is None else np.broadcast_to(~mask, shape).copy()
        if offsets is not None:
            steps = np.moveaxis(unread, time, 0)
            steps[: offsets[0]] = True
            steps[offsets[-1] :] = True
        return unread

    def expected(self, arguments: dict[str, Any] | None = None) -> Scan:
        """Values and last state in float64, and their bounds: what `cuscan.testing.oracle` gives.

        On exact values nothing but an elementwise function of the result has a bound.
        """
        return self._scan(self.arguments() if arguments is None else arguments)

    def _results(self, arguments: dict[str, Any]) -> dict[str, Bounded]:
        scan = self.expected(arguments)
        results = {"the result": Bounded(scan.value, scan.bound)}
        return results | ({"the last state": Bounded(scan.last, scan.last_bound)} if self.last else {})

    def simpler(self) -> Iterator[Any]:
        """Problems with one thing less each; some may not be valid calls."""
        for i in range(len(self.plans)):
            if len(self.plans) > 1:
                yield replace(self, plans=self.plans[:i] + self.plans[i + 1 :])  # type: ignore[type-var]
        yield from self._smaller()
        for lengths in _shrunk_lengths(self.lengths):
            yield replace(self, lengths=lengths)  # type: ignore[type-var]
        for each in fields(self):  # type: ignore[arg-type]
            if each.name not in _SIZES and getattr(self, each.name) != each.default:
                yield self._without(each.name, each.default)
                if each.default is None and _plain(getattr(self, each.name)) != getattr(self, each.name):
                    yield replace(self, **{each.name: Layout()})  # type: ignore[type-var]
        for i, plan in enumerate(self.plans):
            for each in fields(plan):
                if getattr(plan, each.name) is not None:
                    less = replace(plan, **{each.name: None})
                    yield replace(self, plans=(*self.plans[:i], less, *self.plans[i + 1 :]))  # type: ignore[type-var]

    def _smaller(self) -> Iterator[Any]:
        raise NotImplementedError

    def _without(self, name: str, default: Any) -> Any:
        change = {name: default}
        if name == "cu_seqlens":  # h0 has an axis less
            change |= {"lengths": (), "head": 0, "offsets": "int64", "h0": _plain(self.h0)}
        return replace(self, **change)  # type: ignore[type-var]

    def kinds(self) -> list[str]:
        """What this problem covers, for a record."""
        plans = [f"{plan.schedule} {plan.lanes or ''}".strip() for plan in self.plans if plan.schedule]
        options = [
            each.name
            for each in fields(self)  # type: ignore[arg-type]
            if each.name not in (*_SIZES, "seed", "dtype", "values") and getattr(self, each.name) != each.default
        ]
        return [self.dtype, self.values, *plans, *options]


def _less(size: int) -> list[int]:
    return sorted({n for n in (1, size // 2, size - 16, size - 4, size - 1) if 0 < n < size})


def _shrunk_sizes(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for d, size in enumerate(shape):
        for n in _less(size):
            yield (*shape[:d], n, *shape[d + 1 :])


def _shrunk_lengths(lengths: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    half = len(lengths) // 2
    if half:
        yield lengths[:half]
        yield lengths[half:]
    for i, length in enumerate(lengths):
        yield lengths[:i] + lengths[i + 1 :]
        for n in (0, *_less(length)) if length else ():
            yield (*lengths[:i], n, *lengths[i + 1 :])


@dataclass(frozen=True, repr=False)
class LinearProblem(_Problem):
    """A call of `cuscan.linear_scan`.

    Attributes
    ----------
    seed : int
        Of the arrays' values.
    shape, axis, reverse
        Of b, and along which of its axes and in which direction time runs.
    dtype : str
        Of a and b.
    values : {"exact", "real", "nan"}
        See the module.
    a : Layout or number
        The gates, or the one gate.
    b, h0 : Layout
        None without h0.
    mask, reset : Layout, optional
        Of b's shape, some without their broadcast axes. The seed draws a pattern: padding right, left or on both
        sides, a hole, some, none or all.
    cu_seqlens : Layout, optional
        Sequences are packed along time; h0 has a leading axis of them.
    lengths, head, offsets
        The sequences' lengths, the steps before the first, and the dtype of cu_seqlens. What is past the end of time is
        cut off.
    last : bool
        Whether the last state is asked for.
    out : Layout or {"a", "b"}, optional
        An array to write to, or the input that is overwritten.
    out_dtype : str, optional
        Dtype of the result.
    plans : tuple of Plan
        How `check` runs it.
    """

    seed: int = 0
    shape: tuple[int, ...] = (8,)
    axis: int = 0
    reverse: bool = False
    dtype: str = "float32"
    values: str = "exact"
    a: Any = Layout()
    b: Layout = Layout()
    h0: Layout | None = None
    mask: Layout | None = None
    reset: Layout | None = None
    cu_seqlens: Layout | None = None
    lengths: tuple[int, ...] = ()
    head: int = 0
    offsets: str = "int64"
    last: bool = True
    out: Any = None
    out_dtype: str | None = None
    plans: tuple[Plan, ...] = (Plan(),)
    function = staticmethod(cuscan.linear_scan)

    def arguments(self) -> dict[str, Any]:
        """The call's keyword arguments, with NumPy arrays; those that are not written to are read-only."""
        random = np.random.default_rng(self.seed)
        dtype, state = _dtype(self.dtype), np.dtype(accumulation(self.dtype))
        is_complex = state.kind == "c"
        rest = self.shape[: self.axis] + self.shape[self.axis + 1 :]
        segments = self._segments(self.shape, self.axis)
        unread = self.unread(self.shape, self.axis, segments)
        gates_unread = None if unread is None else self._gates_unread(unread, segments)
        sequences = () if self.cu_seqlens is None else (len(self.lengths),)

        def place(
            layout: Layout, shape: tuple[int, ...], kind: Any, draw: Callable[..., Array], hidden: Array | None = None
        ) -> Array:
            values = _hide(draw(random, layout.inner(shape), is_complex), hidden)
            return layout.place(values.astype(kind), shape)

        gates, inputs = (_exact_gates, _integers) if self.values == "exact" else (_real_gates, _normal)
        b = place(self.b, self.shape, dtype, inputs, unread)
        if self.values == "nan" and b.size:
            b = b.copy() if not b.flags.writeable else b
            b[tuple(random.integers(0, b.shape))] = np.nan
        given = {
            "a": place(self.a, self.shape, dtype, gates, gates_unread) if isinstance(self.a, Layout) else self.a,
            "b": b,
            "h0": None if self.h0 is None else place(self.h0, (*sequences, *rest), state, inputs),
            **segments,
        }
        out = given[self.out] if isinstance(self.out, str) else None
        for x in given.values():
            if isinstance(x, np.ndarray) and x is not out:
                x.flags.writeable = False
        if isinstance(self.out, Layout):
            out = self.out.place(np.zeros(self.shape, _dtype(self.out_dtype or self.dtype)), self.shape)
        return {
            **given, "axis": self.axis, "reverse": self.reverse, "return_last_state": self.last,
            "out": out, "out_dtype": self.out_dtype,
        }  # fmt: skip

    def _segments(self, shape: tuple[int, ...], time: int) -> dict[str, Array | None]:
        given = super()._segments(shape, time)
        if np.random.default_rng((self.seed, 4)).random() < 0.5:
            for name in ("mask", "reset"):
                x = given[name]
                if x is not None:
                    given[name] = _compact(x)
        return given

    def _gates_unread(self, unread: Array, segments: dict[str, Array | None]) -> Array:
        """Beside the steps of which nothing is read, resets and the first step of a sequence that nothing enters."""
        reset, offsets = segments["reset"], segments["cu_seqlens"]
        gates = unread.copy() if reset is None else unread | reset
        if self.h0 is None:
            spans = pairwise((0, self.shape[self.axis]) if offsets is None else offsets.tolist())
            firsts = [(end - 1 if self.reverse else begin) for begin, end in spans if begin < end]
            np.moveaxis(gates, self.axis, 0)[firsts] = True
        return gates

    def _scan(self, arguments: dict[str, Any]) -> Scan:
        names = ("a", "b", "h0", "axis", "reverse", "mask", "reset", "cu_seqlens")
        return _bounds.linear_scan(
            **{name: arguments[name] for name in names}, eps=_eps(self.dtype), exact=self.values == "exact"
        )

    def _smaller(self) -> Iterator[LinearProblem]:
        for shape in _shrunk_sizes(self.shape):
            yield replace(self, shape=shape)
        for d in range(len(self.shape)):
            if d != self.axis:
                less = replace(self, shape=self.shape[:d] + self.shape[d + 1 :], axis=self.axis - (d < self.axis))
                names = ("a", "b", "h0", "mask", "reset", "out")
                yield replace(less, **{name: _plain(getattr(self, name)) for name in names})


def _plain(x: Any) -> Any:
    return Layout() if isinstance(x, Layout) else x


@dataclass(frozen=True, repr=False)
class SelectiveProblem(_Problem):
    """A call of `cuscan.selective_scan`.

    Attributes
    ----------
    seed : int
        Of the arrays' values.
    batch, length, channels, state : int
        Sizes.
    groups : int, optional
        Of B and C; None gives them no axis of groups.
    constant : str
        Which of B and C are constant in time: "", "B", "C" or "BC".
    dtype : str
        Of u and z.
    complex : bool
        Whether A, B and C are.
    wide : tuple of str
        Which of delta, B and C are float32 whatever u is.
    parameters : str
        Dtype of A, D and delta_bias.
    values : {"exact", "real", "nan"}
        See the module.
    layout : {"bld", "bdl"}
        Order of the axes.
    u, delta, A, B, C, D, z, delta_bias, h0 : Layout
        None without D, z, delta_bias, h0.
    mask, reset : Layout, optional
        (batch, length). The seed draws a pattern: padding right, left or on both sides, a hole, some, none or all.
    cu_seqlens : Layout, optional
        Sequences are packed along time; h0 has a leading axis of them, and batch is 1.
    lengths, head, offsets
        The sequences' lengths, the steps before the first, and the dtype of cu_seqlens. What is past the end of time is
        cut off.
    softplus, limit, reverse, last, states
        Options of the call; softplus only on real values. The last two are what is returned.
    out : Layout, optional
        An array to write to.
    out_dtype : str, optional
        Dtype of the result.
    plans : tuple of Plan
        How `check` runs it.
    """

    seed: int = 0
    batch: int = 1
    length: int = 8
    channels: int = 1
    state: int = 1
    groups: int | None = None
    constant: str = ""
    dtype: str = "float32"
    complex: bool = False
    wide: tuple[str, ...] = ()
    parameters: str = "float32"
    values: str = "exact"
    layout: str = "bld"
    u: Layout = Layout()
    delta: Layout = Layout()
    A: Layout = Layout()
    B: Layout = Layout()
    C: Layout = Layout()
    D: Layout | None = None
    z: Layout | None = None
    delta_bias: Layout | None = None
    h0: Layout | None = None
    mask: Layout | None = None
    reset: Layout | None = None
    cu_seqlens: Layout | None = None
    lengths: tuple[int, ...] = ()
    head: int = 0
    offsets: str = "int64"
    softplus: bool = False
    limit: tuple[float, float] | None = None
    reverse: bool = False
    last: bool = True
    states: bool = False
    out: Layout | None = None
    out_dtype: str | None = None
    plans: tuple[Plan, ...] = (Plan(),)
    function = staticmethod(cuscan.selective_scan)

    def arguments(self, big_rate: float = BIG_RATE) -> dict[str, Any]:
        """The call's keyword arguments, with NumPy arrays; those that are not written to are read-only."""
        random = np.random.default_rng(self.seed)
        exact = self.values == "exact"
        wide_range = 20 if random.random() < 0.2 else 1  # where exp, softplus and silu are small or turn often
        item, parameter = _dtype(self.dtype), np.dtype(_dtype(self.parameters))
        state = np.dtype("complex64" if self.complex else accumulation(self.dtype))
        sequence = self.ordered(self.length, self.channels)
        draw = _integers if exact else _normal
        segments = self._segments((self.batch, self.length), 1)
        unread = self.unread((self.batch, self.length), 1, segments)
        sequences = self.batch if self.cu_seqlens is None else len(self.lengths)

        def hide(values: Array) -> Array:
            """Of an array that varies in time."""
            if unread is None:
                return values
            return _hide(values, unread.reshape(self.ordered(self.length, *(1,) * (values.ndim - 2))))

        def wide(name: str) -> Any:
            return state if self.complex and name in "BC" else np.dtype(np.float32) if name in self.wide else item

        def couple(name: str, layout: Layout) -> Array:
            shape: tuple[int, ...] = (self.channels, self.state)
            if name not in self.constant:
                groups = () if self.groups is None else (self.groups,)
                shape = self.ordered(self.length, *groups, self.state)
            values = draw(random, layout.inner(shape), self.complex, most=3)
            return layout.place((values if name in self.constant else hide(values)).astype(wide(name)), shape)

        def optional(
            layout: Layout | None,
            shape: tuple[int, ...],
            kind: Any,
            *,
            positive: bool = False,
            scale: int = 1,
            in_time: bool = False,
        ) -> Array | None:
            if layout is None:
                return None
            values = scale * draw(random, layout.inner(shape), np.dtype(kind).kind == "c", most=3)
            values = hide(values) if in_time else values
            return layout.place((abs(values) if positive else values).astype(kind), shape)

        # Not softplus and a negative delta is growth without a bound.
        bias = optional(self.delta_bias, (self.channels,), parameter, positive=not exact and not self.softplus)
        inner = self.delta.inner(sequence)
        if exact:  # 0 or 1 after the bias
            delta: Array = (random.random(inner) < 0.1).astype(np.float64)
            if bias is not None:
                bias_ = bias if self.layout == "bld" else bias[:, None]
                delta = np.asarray(
                    delta - np.broadcast_to(bias_.astype(np.float64), sequence)[tuple(map(slice, inner))]
                )
            rates = (random.random(self.A.inner((self.channels, self.state))) < 0.7) * big_rate
        else:
            delta = random.normal(-2, 3 * wide_range, inner) if self.softplus else random.random(inner) ** 3
            rates = -np.exp(random.normal(0, 1.5, self.A.inner((self.channels, self.state))))
        if self.complex and not exact:
            rates = rates + 1j * random.normal(0, 3 * wide_range**2, rates.shape)
        u = self.u.place(hide(draw(random, self.u.inner(sequence), is_complex=False, most=3)).astype(item), sequence)
        if self.values == "nan" and u.size:
            u = u.copy() if not u.flags.writeable else u
            u[tuple(random.integers(0, u.shape))] = np.nan
        given = {
            "u": u,
            "delta": self.delta.place(hide(delta).astype(wide("delta")), sequence),
            "A": self.A.place(rates.astype(state if self.complex else parameter), (self.channels, self.state)),
            "B": couple("B", self.B),
            "C": couple("C", self.C),
            "D": optional(self.D, (self.channels,), parameter),
            "z": optional(self.z, sequence, item, scale=1 if exact else wide_range, in_time=True),
            "delta_bias": bias,
            "h0": optional(self.h0, (sequences, self.channels, self.state), state),
            **segments,
        }
        for x in given.values():
            if x is not None:
                x.flags.writeable = False
        out = None
        if self.out is not None:
            out = self.out.place(np.zeros(sequence, _dtype(self.out_dtype or self.dtype)), sequence)
        return {
            **given, "delta_softplus": self.softplus, "delta_limit": self.limit, "reverse": self.reverse,
            "layout": self.layout, "return_last_state": self.last, "return_states": self.states,
            "out": out, "out_dtype": self.out_dtype,
        }  # fmt: skip

    def ordered(self, length: int, *features: int) -> tuple[int, ...]:
        """Sizes of axes as the layout has them."""
        return (self.batch, length, *features) if self.layout == "bld" else (self.batch, *features, length)

    def _scan(self, arguments: dict[str, Any]) -> Scan:
        return _bounds.selective_scan(**self._inputs(arguments))

    def _results(self, arguments: dict[str, Any]) -> dict[str, Bounded]:
        results = super()._results(arguments)
        return results | ({"states": _bounds.selective_states(**self._inputs(arguments))} if self.states else {})

    def _inputs(self, arguments: dict[str, Any]) -> dict[str, Any]:
        given = {name: x for name, x in arguments.items() if name not in _OUTPUTS}
        return given | {"eps": _eps(self.dtype), "exact": self.values == "exact"}

    def _without(self, name: str, default: Any) -> Any:
        less = super()._without(name, default)
        return replace(less, softplus=False, limit=None) if name == "values" else less  # else nothing is exact

    def _smaller(self) -> Iterator[SelectiveProblem]:
        names = ("batch", "length", "channels", "state")
        for name in names:
            for n in _less(getattr(self, name)):
                change: dict[str, Any] = {name: n}
                yield replace(self, **change)
        if self.groups and self.groups > 1:
            yield replace(self, groups=1)
            yield replace(self, groups=1, channels=self.channels // self.groups)


_OUTPUTS = ("return_last_state", "return_states", "out", "out_dtype")


def _eps(dtype: str) -> float:
    return 2.0**-53 if dtype in ("float64", "complex128") else 2.0**-24


# --- gradients ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class _Gradients(_Checked):
    """What the problems of both functions' gradients share: their attributes."""

    of: Any
    grad: Layout | None = Layout()
    grad_last: Layout | None = None
    saved: Layout | None = None
    wide: tuple[str, ...] = ()
    grad_dtype: str | None = None
    _summed = True

    @property
    def values(self) -> str:  # type: ignore[override]
        """Those of the scan."""
        return str(self.of.values)

    @property
    def plans(self) -> tuple[Plan, ...]:  # type: ignore[override]
        """Those of the scan."""
        plans: tuple[Plan, ...] = self.of.plans
        return plans

    def expected(self, arguments: dict[str, Any] | None = None) -> dict[str, Bounded]:
        """The gradients in float64, by their inputs' names, and their bounds.

        On exact values these are 0 where no sum is too large to be exact; of selective_scan, without z.
        """
        given = self.arguments() if arguments is None else arguments
        given = {name: x for name, x in given.items() if name not in ("states", "grad_dtype")}
        known = getattr(_bounds, self.function.__name__)
        gradients: dict[str, Bounded] = known(**given, eps=_eps(self.of.dtype), exact=self.of.values == "exact")
        return gradients

    def _draw(
        self, random: np.random.Generator, layout: Layout | None, shape: tuple[int, ...], kind: Any, hidden: Any = None
    ) -> Array | None:
        if layout is None:
            return None
        draw = _integers if self.values == "exact" else _normal
        values = _hide(draw(random, layout.inner(shape), np.dtype(kind).kind == "c", most=3), hidden)
        x = layout.place(values.astype(kind), shape)
        if hidden is not None or self.values != "nan" or not x.size or random.random() < 0.5:
            return x
        x = x.copy() if not x.flags.writeable else x
        x[tuple(random.integers(0, x.shape))] = np.nan
        return x

    def simpler(self) -> Iterator[Any]:
        """Problems with one thing less each; some may not be valid calls."""
        for of in self.of.simpler():
            less = replace(self, of=of)
            if self._axes(of) != self._axes(self.of):
                less = replace(less, **{name: _plain(getattr(self, name)) for name in ("grad", "grad_last", "saved")})
            yield less
        for each in fields(self):
            x = getattr(self, each.name)
            for other in (each.default, _plain(x)) if each.name != "of" else ():
                change: dict[str, Any] = {each.name: other}
                if x != other:
                    yield replace(self, **change)

    @staticmethod
    def _axes(of: Any) -> tuple[int, bool]:
        return (len(of.shape) if isinstance(of, LinearProblem) else 3), of.cu_seqlens is None

    def kinds(self) -> list[str]:
        """What this problem covers, for a record."""
        own = [each.name for each in fields(self) if each.name != "of" and getattr(self, each.name) != each.default]
        return [*self.of.kinds(), *own]


@dataclass(frozen=True, repr=False)
class LinearGradientProblem(_Gradients):
    """A call of `cuscan.linear_scan_vjp`.

    Attributes
    ----------
    of : LinearProblem
        The call whose gradients these are; `check` runs them with its plans. What it says about results is not read.
    grad, grad_last : Layout, optional
        Gradients of h and of the last state, of which one is there.
    saved : Layout, optional
        h.
    wide : tuple of {"grad", "saved"}
        Which of the gradient of h and h have the accumulation type.
    grad_dtype : str, optional
        Dtype of the gradients of real inputs.
    """

    of: LinearProblem

    @property
    def function(self) -> Callable[..., Any]:  # type: ignore[override]
        """What is called."""
        return cuscan.linear_scan_vjp

    def arguments(self) -> dict[str, Any]:
        """The call's keyword arguments, with NumPy arrays, all read-only."""
        of, random = self.of, np.random.default_rng((self.of.seed, 5))
        given = {name: x for name, x in of.arguments().items() if name not in _OUTPUTS}
        segments = {name: given[name] for name in ("mask", "reset", "cu_seqlens")}
        item, state = _dtype(of.dtype), np.dtype(accumulation(of.dtype))
        outside, unread = None, None
        if of.unread(of.shape, of.axis, segments) is not None:
            outside, unread = self._states_unread(segments)
        saved = self.saved or Layout()
        kinds = [state if name in self.wide else item for name in ("grad", "saved")]
        h = cuscan.linear_scan(**given, out_dtype=state)
        del given["b"]
        if isinstance(given["a"], np.ndarray) and random.random() < 0.5:
            given["a"] = _compact(given["a"])
        rest = of.shape[: of.axis] + of.shape[of.axis + 1 :]
        sequences = () if of.cu_seqlens is None else (len(of.lengths),)
        with np.errstate(over="ignore"):
            given["h"] = saved.place(_hide(h, unread).astype(kinds[1]), of.shape)
        given["grad_h"] = self._draw(random, self.grad, of.shape, kinds[0], outside)
        given["grad_last_state"] = self._draw(random, self.grad_last, (*sequences, *rest), state)
        return _read_only({**given, "grad_dtype": self.grad_dtype})

    def _states_unread(self, segments: dict[str, Array | None]) -> tuple[Array, Array]:
        """Steps outside of all sequences, and those whose state no other step's gradient is made of."""
        of, (mask, reset, offsets) = self.of, segments.values()
        turn = slice(None, None, -1 if of.reverse else 1)
        inside, read = np.zeros((2, *of.shape), np.bool_)
        inside_, read_ = (np.moveaxis(x, of.axis, 0)[turn] for x in (inside, read))
        for begin, end in _spans_in_turn(offsets, of.shape[of.axis], reverse=of.reverse):
            inside_[begin:end] = True
            read_[begin : max(begin, end - 1)] = True
        for flags in (mask, None if reset is None else ~reset):
            if flags is not None:
                read_[:-1] &= np.moveaxis(np.broadcast_to(flags, of.shape), of.axis, 0)[turn][1:]
        return ~inside, ~read

    def _results(self, arguments: dict[str, Any]) -> dict[str, Bounded]:
        gradients = self.expected(arguments)
        there = {name: arguments[name] is not None for name in ("a", "h0")}
        there |= {"a": isinstance(arguments["a"], np.ndarray), "b": True}
        return {name: gradients[name] for name in ("a", "b", "h0") if there[name]}


@dataclass(frozen=True, repr=False)
class SelectiveGradientProblem(_Gradients):
    """A call of `cuscan.selective_scan_vjp`.

    Attributes
    ----------
    of : SelectiveProblem
        The call whose gradients these are; `check` runs them with its plans. What it says about results is not read.
        On exact values its rates are nearer to 0, so that more sums are exact.
    grad, grad_last : Layout, optional
        Gradients of y and of the last state, of which one is there.
    saved : Layout, optional
        The states that the scan saves; None has them computed again.
    wide : tuple of {"grad"}
        Whether the gradient of y has the accumulation type.
    grad_dtype : str, optional
        Dtype of the gradients of real inputs.
    """

    of: SelectiveProblem

    @property
    def function(self) -> Callable[..., Any]:  # type: ignore[override]
        """What is called."""
        return cuscan.selective_scan_vjp

    def arguments(self) -> dict[str, Any]:
        """The call's keyword arguments, with NumPy arrays, all read-only."""
        of, random = self.of, np.random.default_rng((self.of.seed, 5))
        real = np.dtype(accumulation(of.dtype))
        given = of.arguments(-1024.0 if real.itemsize == 8 else -128.0)
        given = {name: x for name, x in given.items() if name not in _OUTPUTS}
        unread = of.unread((of.batch, of.length), 1, {name: given[name] for name in ("mask", "reset", "cu_seqlens")})
        if unread is not None:
            unread = unread.reshape(of.ordered(of.length, 1))
        state, kind = "complex64" if of.complex else real, real if "grad" in self.wide else _dtype(of.dtype)
        rows = of.batch if of.cu_seqlens is None else len(of.lengths)
        states = None
        if self.saved is not None:
            states = cuscan.selective_scan(**given, return_states=True)[-1]
            states = self.saved.place(states, states.shape)
        given |= {
            "grad_out": self._draw(random, self.grad, given["u"].shape, kind, unread),
            "grad_last_state": self._draw(random, self.grad_last, (rows, of.channels, of.state), state),
            "states": states,
        }
        return _read_only({**given, "grad_dtype": self.grad_dtype})

    def _results(self, arguments: dict[str, Any]) -> dict[str, Bounded]:
        gradients = self.expected(arguments)
        return {name: gradients[name] for name in cuscan.SelectiveGradients._fields if arguments[name] is not None}


def _read_only(given: dict[str, Any]) -> dict[str, Any]:
    for x in given.values():
        if isinstance(x, np.ndarray):
            x.flags.writeable = False
    return given


# --- values ------------------------------------------------------------------------------------------------------


def _integers(random: np.random.Generator, shape: tuple[int, ...], is_complex: bool, most: int = 8) -> Array:
    x = random.integers(-most, most + 1, shape)
    return x + 1j * random.integers(-most, most + 1, shape) if is_complex else x


def _normal(random: np.random.Generator, shape: tuple[int, ...], is_complex: bool, most: int = 0) -> Array:
    del most
    x = random.standard_normal(shape)
    return x + 1j * random.standard_normal(shape) if is_complex else x


def _exact_gates(random: np.random.Generator, shape: tuple[int, ...], is_complex: bool) -> Array:
    turns = random.integers(0, 128, shape)
    units = np.array([1, -1, 1j, -1j] if is_complex else [1, -1])
    gates: Array = units[turns % len(units)]
    return np.where(turns == 0, 0, gates)


def _real_gates(random: np.random.Generator, shape: tuple[int, ...], is_complex: bool) -> Array:
    size: Array = 1.02 * random.random(shape) ** 0.1  # mostly near 1: errors stay and grow
    turn = random.random(shape)
    return size * np.exp(2j * np.pi * turn) if is_complex else np.where(turn < 0.3, -size, size)


def _mask(random: np.random.Generator, rows: tuple[int, ...], length: int) -> Array:
    first, second = np.sort(random.integers(0, length + 1, (2, *rows, 1)), axis=0)
    t = np.broadcast_to(np.arange(length), (*rows, length))
    patterns: tuple[Array, ...] = (
        t < first,
        t >= first,
        (t >= first) & (t < second),
        (t < first) | (t >= second),
        random.random(t.shape) < 0.03,
        random.random(t.shape) < 0.5,
        random.random(t.shape) < 0.97,
        t < 0,
        t >= 0,
    )
    return patterns[random.integers(len(patterns))]


def _reset(random: np.random.Generator, rows: tuple[int, ...], length: int) -> Array:
    rates = (0.005, 0.02, 0.02, 0.1, 0.5, 0, 1)
    return random.random((*rows, length)) < rates[random.integers(len(rates))]


def _hide(values: Array, unread: Array | None) -> Array:
    """With NaN where none of the steps that share an item is read."""
    if unread is None:
        return values
    shared = tuple(d for d, size in enumerate(values.shape) if size == 1)
    return np.where(unread.all(axis=shared, keepdims=True), np.nan, values)


def _compact(x: Array) -> Array:
    """As it was before it was broadcast: 1 along broadcast axes, and no axis of 1 in front."""
    x = x[tuple(slice(None if stride else 1) for stride in x.strides)]
    while x.ndim and x.shape[0] == 1:
        x = x[0, ...]
    return x


# --- drawing -----------------------------------------------------------------------------------------------------

# Neighbours of what a warp, a buffer, a tile or a chunk holds.
EDGES = (16, 32, 64, 128, 256, 512)
LONG = (512, 1024, 2048, 4096)
WIDTHS = (1, 2, 3, 5, 31, 32, 33, 64, 65, 4, 8)


@cache
def dtypes() -> tuple[str, ...]:
    """The item types that can be made here: bfloat16 needs ml_dtypes."""
    bfloat16 = importlib.util.find_spec("ml_dtypes") is not None
    return ("float32", *(["bfloat16"] * bfloat16), "float16", "float64", *COMPLEX)


def _length(pick: Pick, whole: Whole, longest: int) -> int:
    kind = pick(("short", "edge", "short", "edge", "edge", "edge", "edge", "long"))
    if kind == "short":
        return whole(1, 20)
    if kind == "edge":
        edges = [edge for edge in EDGES if 2 * edge <= longest]
        return int(pick(edges)) * whole(1, 2) + whole(-1, 1)
    return int(min(pick(LONG) + pick((0, 1, -1, 17, 300)), longest + whole(-1, 1)))


def _draw_layout(pick: Pick, whole: Whole, axes: int, *, broadcast: bool = True) -> Layout:
    kind = pick(("plain", "plain", "plain", "plain", "permuted", "permuted", "stepped", "stepped", "padded", "skewed"))
    if kind == "plain" or axes == 0:
        return Layout()
    if kind == "skewed":
        return Layout(skew=pick((1, 2, 4, 8)))
    order = None
    if kind == "permuted" or pick((False, True)):
        left = list(range(axes))
        order = tuple(left.pop(whole(0, len(left) - 1)) for _ in range(axes))
    if kind == "padded":
        return Layout(order, None, pick((1, 2, 3, 4)))
    steps = None
    if kind == "stepped":
        steps = tuple(pick((1, 1, -1, 2, -3, 0) if broadcast else (1, 1, -1, 2, -3)) for _ in range(axes))
    return Layout(order, steps)


def _maybe(pick: Pick, whole: Whole, axes: int, *, broadcast: bool = True) -> Layout | None:
    return _draw_layout(pick, whole, axes, broadcast=broadcast) if pick((False, True)) else None


def _flags(pick: Pick, whole: Whole, axes: int, time: int) -> Layout | None:
    """Of a mask or reset, which often is one for all rows."""
    kind = pick(("none", "none", "none", "none", "rows", "any"))
    if kind == "none":
        return None
    if kind == "rows":
        return Layout(steps=tuple(int(d == time) for d in range(axes)))
    return _draw_layout(pick, whole, axes)


def _packing(pick: Pick, whole: Whole, length: int) -> dict[str, Any]:
    """Fields for sequences that end on and around edges, are empty, of one step, short or long."""
    head = min(pick((0, 0, 0, 1, 5, 33)), length)
    lengths: list[int] = []
    edges = [edge for edge in EDGES if edge <= length] or [4]
    count = pick((3, 1, 2, 3, 5, 8, 8, 40, 40, 0))
    for _ in range(count):
        at = head + sum(lengths)
        kind = pick(("short", "edge", "to an edge", "to an edge", "empty", "one", "long"))
        edge = pick(edges)
        n = {
            "short": whole(2, 20),
            "edge": edge + whole(-1, 1),
            "to an edge": edge - at % edge + whole(-1, 1),
            "empty": 0,
            "one": 1,
            "long": length - at - whole(0, 3),
        }[kind]
        lengths.append(max(0, min(n, length - at)))
    if lengths and pick((True, False)):
        lengths[-1] += length - head - sum(lengths)
    layout = pick((Layout(), Layout(), Layout(steps=(2,)), Layout(steps=(-1,)), Layout(skew=2)))
    return {"cu_seqlens": layout, "lengths": tuple(lengths), "head": head, "offsets": pick(("int64", "int32"))}


def _chunk(pick: Pick, length: int) -> int:
    """At most 64 chunks."""
    return int(max(pick((16, 20, 32, 7, 64, 100, 512)), -(-length // 64)))


def _whole_tiles(chunk: int) -> int:
    return -(-chunk // _plan.TILE_STEPS) * _plan.TILE_STEPS


def draw_linear(
    pick: Pick,
    whole: Whole,
    *,
    dtype: Sequence[str] | None = None,
    values: Sequence[str] = VALUES,
    largest: int = 16384,
    plans: int = 2,
) -> LinearProblem:
    """A problem of at most about `largest` items, with the plan's own choice and `plans` others."""
    item = pick(dtypes() if dtype is None else dtype)
    length = _length(pick, whole, min(largest, 4500))
    budget = largest // length
    axes = pick((1, 2, 2, 3, 3, 4, 8))
    shape = []
    for _ in range(axes - 1):
        shape.append(pick([n for n in (WIDTHS if axes < 8 else (1, 2)) if n <= budget] or [1]))
        budget //= shape[-1]
    axis = whole(0, axes - 1)
    shape.insert(axis, length)
    if whole(0, 40) == 40:
        shape[whole(0, axes - 1)] = 0
    kind = pick(values)
    a: Any = _draw_layout(pick, whole, axes)
    if whole(0, 6) == 6:
        # The square of a real gate is not exact.
        a = pick((1.0, -1.0, 0.0) if kind == "exact" else (0.5, 0.999, -0.9))
    b = _draw_layout(pick, whole, axes)
    packing = _packing(pick, whole, shape[axis]) if pick((False, False, False, True)) else {}
    others = COMPLEX if item in COMPLEX else REAL
    out: Any = None
    out_dtype = pick((None, None, *(x for x in others if x in dtypes())))
    where = pick(("none", "none", "array", "a", "b"))
    if where == "array":
        out = _draw_layout(pick, whole, axes, broadcast=False)
    elif where in ("a", "b"):
        target = {"a": a, "b": b}[where]
        if isinstance(target, Layout) and 0 not in (target.steps or ()):
            out, out_dtype = where, None
    return LinearProblem(
        seed=whole(0, 2**32 - 1),
        shape=tuple(shape),
        axis=axis,
        reverse=pick((False, True)),
        dtype=item,
        values=kind,
        a=a,
        b=b,
        h0=_maybe(pick, whole, axes if packing else axes - 1),
        mask=_flags(pick, whole, axes, axis),
        reset=_flags(pick, whole, axes, axis),
        **packing,
        last=pick((True, True, False)),
        out=out,
        out_dtype=out_dtype,
        plans=(Plan(), *(_linear_plan(pick, length) for _ in range(plans))),
    )


def _linear_plan(pick: Pick, length: int) -> Plan:
    schedule = pick(("serial", "block", "split", "split"))
    segments = pick((None, 1, 2, 7))
    if schedule == "serial":
        return Plan(schedule, segments=segments)
    row_warps = pick((1, 2, 4, 8))
    warps = pick([n for n in (None, 1, 2, 4, 8) if n is None or n >= row_warps])
    # Without a chunk a split is one pass, where there is one.
    chunk = pick((_chunk(pick, length), None)) if schedule == "split" else None
    return Plan(schedule, pick(("rows", "time")), chunk, row_warps, warps, None, segments)


def draw_selective(
    pick: Pick,
    whole: Whole,
    *,
    dtype: Sequence[str] | None = None,
    values: Sequence[str] = VALUES,
    largest: int = 32768,
    plans: int = 2,
) -> SelectiveProblem:
    """A problem of at most about `largest` states over all steps, with the plan's own choice and `plans` others."""
    item = pick([x for x in dtypes() if x in REAL and (dtype is None or x in dtype)])
    state = pick((4, 16, 1, 2, 3, 5, 8, 17, 24, 64, 65))
    length = _length(pick, whole, min(600, max(64, largest // state)))
    budget = max(1, largest // (state * length))
    batch = pick([n for n in (1, 2, 3) if n <= budget])
    per_group = pick([n for n in WIDTHS if n <= max(1, budget // batch)])
    groups = pick([n for n in (1, 1, 2, 3) if n * per_group <= max(1, budget // batch)])
    channels = per_group * groups
    is_complex = item != "float64" and whole(0, 5) == 5
    kind = pick(values)
    constant = pick(("", "", "", "B", "C", "BC"))
    groups_axis = groups if groups > 1 else pick((None, 1))
    couple_axes = {name: 2 if name in constant else 3 + (groups_axis is not None) for name in "BC"}
    softplus = kind != "exact" and pick((False, True))
    limits = (None, (0.0, 1.0)) if kind == "exact" else (None, None, (0.01, 0.5), (0.0, float("inf")))
    problem = SelectiveProblem(
        seed=whole(0, 2**32 - 1),
        batch=batch,
        length=length,
        channels=channels,
        state=state,
        groups=groups_axis,
        constant=constant,
        dtype=item,
        complex=is_complex,
        wide=() if item == "float64" else pick(((), ("delta",), ("B", "C"), ("C",), ("delta", "B", "C"))),
        parameters=pick([x for x in dtypes() if x in REAL]),
        values=kind,
        layout=pick(("bld", "bdl")),
        u=_draw_layout(pick, whole, 3),
        # The exact deltas hold the bias in them, so no channel may be another's copy.
        delta=_draw_layout(pick, whole, 3, broadcast=kind != "exact"),
        A=_draw_layout(pick, whole, 2),
        B=_draw_layout(pick, whole, couple_axes["B"]),
        C=_draw_layout(pick, whole, couple_axes["C"]),
        D=_maybe(pick, whole, 1),
        z=_maybe(pick, whole, 3),
        delta_bias=_maybe(pick, whole, 1),
        h0=_maybe(pick, whole, 3),
        softplus=softplus,
        limit=pick(limits),
        reverse=pick((False, True)),
        last=pick((True, True, False)),
        out=_draw_layout(pick, whole, 3, broadcast=False) if whole(0, 4) == 4 else None,
        out_dtype=pick((None, None, *(x for x in dtypes() if x in REAL))),
    )
    if largest >= 1024 and whole(0, 5) == 5:
        problem = _usual(pick, whole, problem)
    if whole(0, 40) == 40:
        none: dict[str, Any] = {pick(("batch", "length", "channels", "state")): 0}
        problem = replace(problem, **none)
        if problem.channels == 0 and problem.groups is not None:
            problem = replace(problem, groups=1)
    problem = replace(problem, mask=_flags(pick, whole, 2, 1), reset=_flags(pick, whole, 2, 1))
    if pick((False, False, False, True)):
        problem = replace(problem, batch=1, **_packing(pick, whole, problem.length))
    drawn = (_selective_plan(pick, problem) for _ in range(plans))
    return replace(problem, plans=(Plan(), *drawn), states=pick((False, False, True)))


def _usual(pick: Pick, whole: Whole, problem: SelectiveProblem) -> SelectiveProblem:
    """What kernels have short cuts for: contiguous arrays of one type, whole tiles of channels and states."""
    channels, state = pick((32, 32, 64)) * (problem.groups or 1), pick((16, 8, 16, 64, 128))
    arrays = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias", "h0")
    change: dict[str, Any] = {name: _plain(getattr(problem, name)) for name in arrays}
    length = pick((160, 192, whole(130, 200)))  # five tiles and more, with "bdl" often in whole runs
    change |= {"batch": 1, "length": length, "channels": channels, "state": state}
    return replace(problem, wide=(), limit=None, out=None, out_dtype=None, **change)


def _selective_plan(pick: Pick, problem: SelectiveProblem) -> Plan:
    state_item = "complex64" if problem.complex else accumulation(problem.dtype)
    states = _plan.states_a_thread(state_item, not problem.constant, problem.state)
    time_B, time_C = ("B" not in problem.constant, "C" not in problem.constant)
    kind = _plan.SelectiveKind(
        problem.dtype, problem.complex, time_fast=False, time_B=time_B, time_C=time_C, states=states, segmented=True
    )
    tiles = _plan.selective_tiles(kind)
    schedule = pick(("serial", "split"))
    chunk = _whole_tiles(_chunk(pick, problem.length)) if schedule == "split" else None
    return Plan(schedule, chunk=chunk, tile=pick(tiles), segments=pick((None, 1, 2, 7)))


def draw_gradients(pick: Pick, whole: Whole, of: Any) -> Any:
    """A problem of the gradients of a call, which is changed where these have other options."""
    is_linear = isinstance(of, LinearProblem)
    axes = len(of.shape) if is_linear else 3
    last_axes = axes if not is_linear or of.cu_seqlens is not None else axes - 1
    of = replace(of, last=True, out=None, out_dtype=None)
    which = pick(("both", "both", "result", "last"))
    wide: tuple[tuple[str, ...], ...] = ((), (), ("grad",))
    if is_linear:  # beside a scalar gate, h alone says what the type is
        wide += (("grad", "saved"), *[("saved",)] * isinstance(of.a, Layout))
    given: dict[str, Any] = {
        "grad": None if which == "last" else _draw_layout(pick, whole, axes),
        "grad_last": None if which == "result" else _draw_layout(pick, whole, last_axes),
        "wide": pick(wide),
        "grad_dtype": pick((None, None, *(x for x in dtypes() if x in REAL))),
    }
    if is_linear:
        saved = _draw_layout(pick, whole, axes, broadcast=False)
        return LinearGradientProblem(of, saved=saved, **given | ({"grad_dtype": None} if of.dtype in COMPLEX else {}))
    # Of z nothing is exact.
    plans = tuple(replace(plan, parts=pick((None, 1, 2))) for plan in of.plans)
    of = replace(of, states=False, plans=plans, z=None if of.values == "exact" else of.z)
    saved_states = _draw_layout(pick, whole, 4, broadcast=False) if pick((True, False)) else None
    return SelectiveGradientProblem(of, saved=saved_states, **given)
