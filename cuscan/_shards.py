"""One sequence over several ranks: where a rank's shard of the time axis lies, and what the ranks tell each other.

All steps of a shard together are one map, the gates' product and the state that it reaches from nothing, or it forgets
what enters. It is the fold of the summaries of its chunks. Every rank gets the maps of all (one all-gather) and folds
those of the ranks before it, first rank first, to the state that enters its own shard. From there on it does what it
would do alone. In the gradients the same goes from the last step to the first.

A rank's row of the all-gather, each part at a multiple of 16 bytes:

    gates     (rows,)  the products
    inputs    (rows,)  the states reached from nothing
    hides     (flags,) bytes, 1 where the shard forgets; only with mask, reset or cu_seqlens
    extra              for the gradients of linear_scan the last state of the shard

Rows are in the order of the axes without time, however the arrays lie in memory.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from . import _arrays, _calls, _plan
from ._arrays import Array, Place

if TYPE_CHECKING:
    from ._launch import LinearCall, Rows

_PART = 16  # bytes that parts of a message are aligned to
_MARK_RESETS, _MARK_STARTS, _MARK_ENDS = 4, 8, 12  # bytes of a word of step_marks.cuh


class Shard(NamedTuple):
    """The shard of a rank; `lengths` are those of all.

    `one_gate`: the gates of a linear_scan are broadcast along time, also where a shard has but one step. `levels`: of
    how many the groups are whose members exchange, of neighbouring ranks first, then of such groups; one of all if
    empty.
    """

    rank: int
    lengths: tuple[int, ...]
    one_gate: bool = False
    levels: tuple[int, ...] = ()

    @property
    def offset(self) -> int:
        """Steps before it in time."""
        return sum(self.lengths[: self.rank])

    @property
    def total(self) -> int:
        """Steps of all."""
        return sum(self.lengths)

    @property
    def length(self) -> int:
        """Steps of this one."""
        return self.lengths[self.rank]

    def at(self, level: int) -> Shard:
        """The members of a group of this level as ranks, and which of them this rank is in."""
        if not self.levels:
            return self
        size, count = prod(self.levels[:level]), self.levels[level]
        first = self.rank // (size * count) * size * count
        lengths = (sum(self.lengths[at : at + size]) for at in range(first, first + size * count, size))
        return Shard((self.rank - first) // size, tuple(lengths))

    @property
    def top(self) -> int:
        """The highest level."""
        return max(len(self.levels) - 1, 0)

    def _from_first(self, ranks: range) -> range:
        """Without the empty ones at the beginning."""
        return ranks[next((i for i, rank in enumerate(ranks) if self.lengths[rank]), len(ranks)) :]

    def before(self, *, reverse: bool) -> range:
        """The ranks that come before in this direction, but for empty ones at the very beginning."""
        return self._from_first(range(len(self.lengths) - 1, self.rank, -1) if reverse else range(self.rank))

    def together(self, *, reverse: bool) -> range:
        """All ranks in this direction, but for empty ones at the very beginning."""
        ranks = range(len(self.lengths))
        return self._from_first(ranks[::-1] if reverse else ranks)

    def nearest(self, *, reverse: bool) -> int | None:
        """The last one with steps of those before."""
        return next((rank for rank in reversed(self.before(reverse=reverse)) if self.lengths[rank]), None)

    def last(self, *, reverse: bool) -> int | None:
        """The last one with steps of all."""
        return next(iter(self.together(reverse=not reverse)), None)

    def holds(self, edge: int) -> bool:
        """Whether an edge of the whole lies in this shard: its first (0) or its last step (-1)."""
        step = edge % self.total if self.total else 0
        return self.offset <= step < self.offset + self.length or (
            self.total == 0 and self.rank == len(self.lengths) - 1
        )


def current() -> Shard | None:
    """The shard of the call that is under way, if it is one of several."""
    team = _calls.team.get()
    return None if team is None else team.shard


def linked() -> Shard | None:
    """The same where there is more than one."""
    shard = current()
    return shard if shard is not None and len(shard.lengths) > 1 else None


def whole(length: int) -> int:
    """Steps that cu_seqlens counts."""
    shard = current()
    return length if shard is None else shard.total


@contextlib.contextmanager
def split(shard: Shard | None) -> Iterator[None]:
    """Plans made inside cut time into chunks that are summarised first, if there is a shard."""
    with _plan.forced(schedule=_plan.Schedule.SPLIT) if shard is not None else contextlib.nullcontext():
        yield


def in_order(sizes: Sequence[int], dtype: np.dtype[Any]) -> tuple[int, ...]:
    """Strides of a C-contiguous array."""
    return tuple(prod(sizes[d + 1 :]) * dtype.itemsize for d in range(len(sizes)))


def _up(size: int) -> int:
    return -(-size // _PART) * _PART


def _numpy(x: Array) -> Any:
    """The array module of x."""
    return np if isinstance(x, np.ndarray) else sys.modules["cupy"]


# --- packed sequences: cu_seqlens count from the first step of all shards -------------------------------------------


def shift(to: Array, offsets: Array, *, by: int) -> None:
    """Offsets as this shard counts; sequences that reach beyond it have some below 0 or above its length."""
    to[...] = offsets
    to -= by


def local_offsets(place: Place, shard: Shard, offsets: Array) -> Array:
    """The same on a place."""
    to = place.allocate(offsets.shape, np.int64)
    _calls.do(place, shift, [to], [offsets], by=shard.offset)
    return to


def _spans(offsets: Array, at: int) -> Array:
    """Which sequences (n,) have steps on both sides of a local time."""
    return (offsets[:-1] < at) & (offsets[1:] > at)


def _column(values: Array, like: Array) -> Array:
    return values.reshape(-1, *(1,) * (like.ndim - 1))


def zero_foreign(to: Array, offsets: Array, *, length: int, total: int, last_rank: bool, at_end: bool) -> None:
    """What belongs to the first, or with `at_end` the last, step in time of sequences of other shards becomes 0.

    `total`: the end of all shards, as this one counts. An empty sequence is where its offset is.
    """
    begin, end = offsets[:-1], offsets[1:]
    xp = _numpy(to)
    edge = xp.where(begin == end, begin, end - 1 if at_end else begin)
    ours = (edge >= 0) & (edge < length)
    if last_rank:
        ours |= (begin == end) & (begin >= total)
    for part in (to.real, to.imag) if to.dtype.kind == "c" else (to,):
        bits = part.view(f"u{part.dtype.itemsize}")  # NaN times 0 is NaN
        bits *= _column(ours, to)


def only_ours(place: Place | None, to: Array, offsets: Array | None, *, at_end: bool) -> None:
    """`zero_foreign` of the call under way, if it is one of several; `offsets` are global, or None for one sequence.

    Without a place the arrays are NumPy's.
    """
    shard = current()
    if shard is None or not to.size:
        return
    if offsets is None:
        if not shard.holds(-1 if at_end else 0):
            _arrays.assign(to, 0) if place is None else place.assign(to, 0)
        return
    where: dict[str, Any] = {"length": shard.length, "total": shard.total - shard.offset, "at_end": at_end}
    where["last_rank"] = shard.rank == len(shard.lengths) - 1
    if place is None:
        zero_foreign(to, offsets.astype(np.int64) - shard.offset, **where)
    else:
        _calls.do(place, zero_foreign, [to], [local_offsets(place, shard, offsets)], **where)


def enter_sequence(to: Array, carry: Array, offsets: Array, *, at: int) -> None:
    """What enters (n, ...), with `carry` for the sequence that goes on across a local time."""
    inside = _column(_spans(offsets, at), to)
    to[...] = _numpy(to).where(inside, carry, to)


def open_start(marks: Array, offsets: Array, *, at: int) -> None:
    """Mark the first step in the order of the scan as a start, if a sequence goes on there and it does not reset."""
    marks[:, 0, _MARK_STARTS] |= ~marks[:, 0, _MARK_RESETS] & 1 & _spans(offsets, at).any()


def open_end(marks: Array, offsets: Array, *, at: int, step: int) -> None:
    """Mark the last step as the only end, if a sequence goes on after it."""
    marks[:, :, _MARK_ENDS : _MARK_ENDS + 4] = 0
    word, bit = divmod(step, 32)
    marks[:, word, _MARK_ENDS + bit // 8] |= _spans(offsets, at).any().astype(np.uint8) << bit % 8


def no_ends(marks: Array) -> None:
    """Mark no end."""
    marks[:, :, _MARK_ENDS : _MARK_ENDS + 4] = 0


def add_last(to: Array, grad_last: Array, offsets: Array, *grad: Array, axis: int, reverse: bool) -> None:
    """grad, 0 if there is none, with what reaches the sequences' last states, time first; one step more is scratch."""
    xp, length = _numpy(to), len(to) - 1
    to[...] = 0
    for x in grad:
        to[:-1] = xp.moveaxis(x, axis, 0)
    begin, end = offsets[:-1], offsets[1:]
    step = begin if reverse else end - 1
    step = xp.where((begin < end) & (step >= 0) & (step < length), step, length)
    to[step] = to[step] + grad_last


# --- the message ----------------------------------------------------------------------------------------------------


class Layout(NamedTuple):
    """Where the parts of a message are."""

    rows: int
    item: np.dtype[Any]
    flags: int
    extra: int  # bytes

    @property
    def inputs(self) -> int:
        return _up(self.rows * self.item.itemsize)

    @property
    def hides(self) -> int:
        return 2 * self.inputs

    @property
    def extras(self) -> int:
        return self.hides + _up(self.flags)

    @property
    def nbytes(self) -> int:
        return self.extras + _up(self.extra)


def identity(message: Array, *, layout: Layout) -> None:
    """What a shard without steps does."""
    message[...] = 0
    message[: layout.rows * layout.item.itemsize].view(layout.item)[...] = 1


def fold_flags(message: Array, resets: Array, *, at: int, shape: tuple[int, ...], chunks: int,
               sizes: tuple[int, ...], strides: tuple[int, ...]) -> None:  # fmt: skip
    """Whether any chunk forgets: of `resets`, seen as `shape` with its axis `chunks` of chunks, to rows of `sizes`."""
    to = _arrays.view(message[at:], sizes, strides)
    to[...] = resets.reshape(shape).any(axis=chunks).reshape(sizes)


def cut_edge(message: Array, marks: Array, *, layout: Layout, own: tuple[int, ...], sizes: tuple[int, ...],
             strides: tuple[int, ...]) -> None:  # fmt: skip
    """Nothing goes from a row to the shard before where its first step forgets; rows by items' `strides`."""
    forgets = ((marks[:, 0, _MARK_RESETS] | marks[:, 0, _MARK_STARTS]) & 1).reshape(own)
    flags = _arrays.view(message[layout.hides :], sizes, strides)
    flags |= forgets
    size = layout.item.itemsize
    inputs = _arrays.view(message[layout.inputs :], (*sizes, size), (*(size * s for s in strides), 1))
    inputs *= (forgets == 0)[..., None]


def put_last(message: Array, states: Array, *, at: int, axis: int, step: int, dtype: np.dtype[Any]) -> None:
    """The states after one step."""
    part = states[(slice(None),) * axis + (step,)]
    message[at : at + part.size * dtype.itemsize].view(dtype).reshape(part.shape)[...] = part


def take_last(to: Array, received: Array, *, rank: int, at: int) -> None:
    """Those of another rank."""
    to[...] = received[rank, at : at + to.nbytes].view(to.dtype).reshape(to.shape)


def fold_ranks(message: Array, received: Array, *, layout: Layout, members: range, last: int) -> None:
    """Of a group's message whether any member forgets, and what the last one says besides."""
    first, count = min(members), len(members)
    flags = slice(layout.hides, layout.hides + layout.flags)
    if layout.flags:
        message[flags] = received[first : first + count, flags].any(axis=0)
    message[layout.extras :] = received[last, layout.extras :]


def all_gather(received: Array, message: Array, *, level: int) -> None:
    """Every rank's message to every rank of a group."""
    team = _calls.team.get()
    assert team is not None
    communicator = getattr(team.communicator, "levels", (team.communicator,))[level]
    communicator.all_gather(message, received, team.timeout)


def gathered(place: Place, shard: Shard, message: Array, level: int) -> Array:
    """The messages of all ranks of a group (ranks, bytes)."""
    received = place.allocate((len(shard.at(level).lengths), message.size), np.uint8)
    _calls.do(place, all_gather, [received], [message], level=level)
    return received


def pass_by(place: Place, shard: Shard, layout: Layout, *, reverse: bool) -> None:
    """What a rank without steps takes part in."""
    message = place.allocate((layout.nbytes,), np.uint8)
    _calls.do(place, identity, [message], [], layout=layout)
    sizes = (layout.flags, layout.rows // layout.flags) if layout.flags else (layout.rows,)
    link = Link(place, shard, reverse, in_order(sizes, layout.item), None, None)
    folds = _Folds(link, layout, sizes, sizes[:1], (1,), layout.item.name)
    folds.others(0, message, None)


@dataclass
class Link:
    """What ties the launches of a shard to those of other ranks.

    Attributes
    ----------
    reverse : bool
        The direction in time in which states go.
    strides : tuple of int
        Of the row axes in a message, in bytes.
    own : Rows, optional
        What enters the first of all shards.
    carry : Rows, optional
        Where what enters this shard is put; None for the first of all.
    extra : int
        Bytes of it in a message.
    finish : callable, optional
        Called with (message, layout) when the maps are in the message.
    arrived : callable, optional
        Called with (received, layout, members of the group), of each level.
    flags : tuple, optional
        Sizes and strides of the row axes that shards forget by, in bytes of flags; of all rows if None.
    """

    place: Place
    shard: Shard
    reverse: bool
    strides: tuple[int, ...]
    own: Rows | None
    carry: Rows | None
    extra: int = 0
    finish: Callable[[Array, Layout], None] | None = None
    arrived: Callable[[Array, Layout, Shard], None] | None = None
    flags: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def enter(
        self, scan: LinearCall, resets: tuple[Array, tuple[int, ...], int] | None, source_item: str
    ) -> Rows | None:
        """Fold the chunks' summaries, of which `scan` is the scan, exchange, and fold those before to `carry`.

        `resets`, their flags, come with the shape that they have and its axis of chunks.
        """
        item = np.dtype(scan.item)
        sizes, strides = self.flags or (scan.sizes, tuple(s // item.itemsize for s in self.strides))
        layout = Layout(scan.rows, item, prod(sizes) if resets is not None else 0, self.extra)
        message = self.place.allocate((layout.nbytes,), np.uint8)
        folds = _Folds(self, layout, scan.sizes, sizes, strides, source_item)
        folds.to_map(replace(scan, initial=self.own), message)
        if resets is not None:
            x, shape, chunks = resets
            _calls.do(self.place, fold_flags, [message], [x], at=layout.hides, shape=shape, chunks=chunks, sizes=sizes,
                      strides=strides)  # fmt: skip
        if self.finish is not None:
            self.finish(message, layout)
        return self.carry if folds.others(0, message, self.carry) and self.carry is not None else self.own


class _Folds:
    """Folds of maps in messages, of rows of `sizes`, whose flags are rows of `flags`, `strides` bytes apart."""

    def __init__(
        self,
        link: Link,
        layout: Layout,
        sizes: tuple[int, ...],
        flags: tuple[int, ...],
        strides: tuple[int, ...],
        source_item: str,
    ) -> None:
        self.link, self.layout, self.sizes, self.source_item = link, layout, sizes, source_item
        self.flags = (*strides, *(0,) * (len(sizes) - len(flags)))
        self.place = link.place
        self._scratch: Array = ()
        item = layout.item
        numbers = [self.place.allocate((1,), item) for _ in range(2)]
        for value, x in enumerate(numbers):
            self.place.assign(x, float(value))
        self.zero, self.one = (self.rows(x, 0, 0, (0,) * len(sizes)) for x in numbers)

    def rows(self, of: Array, at: int, time: int = 0, strides: tuple[int, ...] = (), item: str = "") -> Rows:
        """Rows of a message from a byte on."""
        from ._launch import Rows  # needs this module

        return Rows(self.place.pointer(of) + at, time, strides or self.link.strides, item or self.layout.item.name)

    def fold(self, call: LinearCall) -> None:
        """The state after the last map."""
        from ._launch import linear

        layout = self.layout
        if len(self._scratch) < call.length:
            self._scratch = self.place.allocate((call.length, layout.rows), layout.item)
        output = self.rows(self._scratch, 0, layout.rows * layout.item.itemsize, in_order(self.sizes, layout.item))
        plan = _plan.plan_linear_summaries(call.length, _plan.Lanes.ROWS)
        linear(self.place, plan, replace(call, output=output), self.source_item)

    def to_map(self, call: LinearCall, message: Array) -> None:
        """All maps as one, but for the flags."""
        self.fold(replace(call, last=self.rows(message, self.layout.inputs)))
        self.fold(replace(call, input=self.zero, initial=self.one, segments=None, last=self.rows(message, 0)))

    def of(self, received: Array, ranks: range, initial: Rows | None) -> LinearCall:
        """The scan over the maps of some ranks."""
        from ._launch import LinearCall, Segments

        layout = self.layout
        start, time = ranks[0] * layout.nbytes, ranks.step * layout.nbytes
        gate, state = (self.rows(received, start + at, time) for at in (0, layout.inputs))
        segments = None
        if layout.flags:
            hides = self.rows(received, start + layout.hides, time, self.flags, "bool")
            segments = Segments(None, hides, None, reverse=False)
        return LinearCall(layout.item.name, gate, state, initial, gate, None, len(ranks), self.sizes, segments)

    def others(self, level: int, message: Array, to: Rows | None) -> bool:
        """Exchange in this rank's group and those that it is in, and fold what is before to `to`; is there anything?"""
        link, layout = self.link, self.layout
        members, received = link.shard.at(level), gathered(self.place, link.shard, message, level)
        if link.arrived is not None:
            link.arrived(received, layout, members)
        before, outside = members.before(reverse=link.reverse), False
        entering = to
        if level < link.shard.top:
            group = self.place.allocate((layout.nbytes,), np.uint8)
            together = members.together(reverse=link.reverse)
            last = members.last(reverse=not link.reverse)  # against the direction of the states
            if last is None:
                _calls.do(self.place, identity, [group], [], layout=layout)
            else:
                self.to_map(self.of(received, together, None), group)
                _calls.do(self.place, fold_ranks, [group], [received], layout=layout, members=together, last=last)
            if before and to is not None:
                entering = self.rows(self.place.allocate((layout.rows,), layout.item), 0)
            outside = self.others(level + 1, group, entering)
        if before and to is not None:
            self.fold(replace(self.of(received, before, entering if outside else None), last=to))
        return outside or len(before) > 0


# --- sums over time ------------------------------------------------------------------------------------------------


def pick(to: Array, received: Array, *, at: int) -> None:
    """One part of all ranks' messages, contiguous."""
    size = to.nbytes // len(to)
    to[...] = _numpy(to).ascontiguousarray(received[:, at : at + size]).view(to.dtype).reshape(to.shape)


class Sums:
    """Sums over the steps of this shard, in the accumulation type, and their totals over the ranks."""

    def __init__(self, place: Place, shard: Shard, wanted: Sequence[tuple[tuple[int, ...], np.dtype[Any]]]) -> None:
        self._place, self._shard = place, shard
        self._wanted = wanted
        starts = [0]
        for shape, dtype in wanted:
            starts.append(starts[-1] + _up(prod(shape) * dtype.itemsize))
        self._starts = starts
        self._message = place.allocate((starts[-1],), np.uint8)
        self.parts = [
            self._message[at : at + prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
            for at, (shape, dtype) in zip(starts, wanted, strict=False)
        ]

    def clear(self) -> None:
        """Sums over no steps."""
        self._place.assign(self._message, 0)

    def add(self, totals: Sequence[Array]) -> None:
        """Add up the parts of all ranks, first rank first; of groups, those of each and then the groups'."""
        from ._linear_backward import add  # needs this module

        for level in range(self._shard.top + 1):
            received = gathered(self._place, self._shard, self._message, level)
            targets = totals if level == self._shard.top else self.parts
            for at, (shape, dtype), to in zip(self._starts, self._wanted, targets, strict=False):
                parts = self._place.allocate((len(received), *shape), dtype)
                _calls.do(self._place, pick, [parts], [received], at=at)
                add(self._place, parts, to)


# --- NumPy -----------------------------------------------------------------------------------------------------------


def exchange(arrays: Sequence[Array], level: int = 0) -> list[list[Array]]:
    """The arrays of every rank of a group, by rank."""
    shard = linked()
    assert shard is not None
    message = np.concatenate([np.frombuffer(x.tobytes(), np.uint8) for x in arrays])
    received = np.empty((len(shard.at(level).lengths), message.size), np.uint8)
    all_gather(received, message, level=level)
    ends = np.cumsum([0, *(x.nbytes for x in arrays)])
    return [
        [row[at:end].copy().view(x.dtype).reshape(x.shape)
         for at, end, x in zip(ends, ends[1:], arrays, strict=False)]
        for row in received
    ]  # fmt: skip


def arriving(own: Sequence[Array], *, reverse: bool, level: int = 0) -> tuple[Array | None, list[Array]]:
    """The state that enters a shard, None for the first, from the (gate, input, hides, ...) of all.

    Also the rest of the nearest one with steps before it in the other direction, its own if there is none.
    """
    shard = linked()
    assert shard is not None
    members, maps = shard.at(level), exchange(own, level)
    state: Array | None = None
    rest = list(own[3:])
    if level < shard.top:
        group = maps[members.rank]
        if (last := members.last(reverse=not reverse)) is not None:
            together = members.together(reverse=reverse)
            gate, reached, hides = maps[together[0]][:3]
            for rank in together[1:]:
                later = maps[rank]
                reached = np.where(later[2], later[1], later[0] * reached + later[1])
                gate, hides = later[0] * gate, hides | later[2]
            group = [gate, reached, hides, *maps[last][3:]]
        state, rest = arriving(group, reverse=reverse, level=level + 1)
    for rank in members.before(reverse=reverse):
        gate, reached, hides = maps[rank][:3]
        state = reached if state is None else np.where(hides, reached, gate * state + reached)
    nearest = members.nearest(reverse=not reverse)
    return state, rest if nearest is None else maps[nearest][3:]


class Reach(NamedTuple):
    """How a shard's steps lie in the whole, and where what enters the first of them comes from."""

    offset: int
    total: int
    enter: Callable[[Array, Array, Array], Array | None]  # from the shard's own gate, input and whether it hides


def reach(*, reverse: bool) -> Reach | None:
    """That of the call under way, with states that go in this direction in time."""
    shard = linked()
    if shard is None:
        return None
    return Reach(shard.offset, shard.total, lambda *own: arriving(own, reverse=reverse)[0])


def totals(*sums: Array) -> list[Array]:
    """Sums over the steps of all ranks, first rank first; of groups, those of each and then the groups'."""
    shard, found = linked(), list(sums)
    if shard is not None and found:
        for level in range(shard.top + 1):
            found = [functools.reduce(np.add, each) for each in zip(*exchange(found, level), strict=True)]
    return found
