"""The gradients of linear_scan on a Place: layouts, plan and launches."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import IntEnum
from math import prod
from typing import Any

import numpy as np

from . import _shards
from ._arrays import ITEM_CODE, Array, Place, accumulation, copy_of, item_name, merge_axes
from ._calls import chosen, do
from ._launch import (
    NOWHERE,
    ROW_DIMS,
    LinearCall,
    Marks,
    Rows,
    Segments,
    _start,
    launch_chunks,
    linear_args,
    linear_blocks,
    make_marks,
    may_pair,
)
from ._plan import ITEM_BYTES, Lanes, LinearPlan, LinearProblem, plan_linear, with_summaries
from ._selective_backward import add_partials
from ._source import LINEAR_BACKWARD_TAIL, linear_backward_name, linear_backward_source

BLOCK_WARPS = 4  # of a block whose rows have no more: three or four such blocks have registers on a multiprocessor
SUM_PARTS, SUM_ITEMS = 32, 1 << 16  # parts that are added at once, where there are fewer than so many sums


class GateSums(IntEnum):
    """GateSums in linear_backward_args.cuh."""

    EACH_STEP = 0
    OVER_TIME = 1
    OVER_LANES = 2


@dataclass(frozen=True)
class BackwardCall:
    """The arrays of one linear_scan_vjp, of which none is empty.

    gate, mask and reset are broadcast to the shape of states; `grad_gate` has the gate's own, which is 1 or missing
    along the axes `shared`. The gradients are fresh, and `grad_initial` is in the accumulation type.
    """

    item: str
    gate: Array | complex
    states: Array
    grad: Array | None
    initial: Array | None
    grad_last: Array | None
    grad_input: Array
    grad_gate: Array | None
    grad_initial: Array | None
    shared: tuple[int, ...]
    axis: int
    reverse: bool
    mask: Array | None
    reset: Array | None
    offsets: Array | None


def backward(place: Place, call: BackwardCall, *, copied: bool = False) -> None:
    """Run it: in one launch, or in three where the plan cuts time into chunks.

    With segments their marks are made first, and the gradients of shared gates are summed at the end. `copied`: all
    arrays are contiguous, because their row axes could not be merged to as few as the kernels count.

    As a shard of several, what reaches the last states of packed sequences is added to the gradient of these states
    itself, so that only the row's own end is open.
    """
    states, axis = call.states, call.axis
    shape, length = states.shape, states.shape[axis]
    others = [d for d in range(states.ndim) if d != axis]
    by_stride = sorted((d for d in others if shape[d] > 1), key=lambda d: -abs(states.strides[d]))
    fastest = by_stride[-1] if by_stride else None
    state = np.dtype(accumulation(call.item))
    read = [x for x in (states, call.gate, call.grad) if x is not None and not isinstance(x, complex)]
    unmarked = call.mask is None and call.reset is None and call.offsets is None
    pairs = unmarked and call.grad is not None and ITEM_BYTES[call.item] == 2 and may_pair(call.item, axis, read)
    problem = LinearProblem(
        item_bytes=ITEM_BYTES[call.item],
        state_bytes=state.itemsize,
        rows=prod(shape[d] for d in others),
        length=length,
        time_fast=fastest is None or abs(states.strides[axis]) < abs(states.strides[fastest]),
        pairs=pairs,
    )
    shard = _shards.linked()
    with _shards.split(shard):
        plan = with_summaries(plan_linear(problem, place.limits), problem, place.limits)
    plan = replace(plan, fit=replace(plan.fit, warps=max(plan.order.row_warps, min(plan.fit.warps, BLOCK_WARPS))))
    chosen(place, plan)

    # What is left of the gradients of shared gates: parts along the shared axes, which come first in memory.
    sums, left, parts, lanes = GateSums.EACH_STEP, call.grad_gate, list(shape), None
    order = [*call.shared, *(d for d in range(len(shape)) if d not in call.shared)]
    if left is not None and call.shared:
        if axis in call.shared:
            sums, parts[axis] = GateSums.OVER_TIME, plan.chunks * plan.order.row_warps
        elif fastest in call.shared and plan.order.lanes is Lanes.ROWS and shape[fastest] % 32 == 0 and not copied:
            sums, parts[fastest], lanes = GateSums.OVER_LANES, shape[fastest] // 32, others.index(fastest)
        if prod(parts[d] for d in call.shared) > 1:
            left = place.allocate(tuple(parts) if copied else tuple(parts[d] for d in order), state)
    of_gates = _contiguous_strides(parts, range(len(shape)) if copied else order, state if left is None else left.dtype)

    packed, offsets = call.offsets is not None, call.offsets
    grad = call.grad
    at_ends = {"initial": call.initial, "grad_last": call.grad_last, "grad_initial": call.grad_initial}
    carry = before = None  # the gradient that comes from the step after the shard, the state before it
    if shard is not None:
        rest = tuple(shape[d] for d in others)
        carry, before = (
            place.allocate(rest, state) if shard.before(reverse=reverse) else None
            for reverse in (not call.reverse, call.reverse)
        )
        if packed:
            offsets = _shards.local_offsets(place, shard, offsets)
            if call.grad_last is not None:
                added = place.allocate((length + 1, *rest), state)
                do(place, _shards.add_last, [added], [call.grad_last, offsets, *([] if grad is None else [grad])],
                   axis=axis, reverse=call.reverse)  # fmt: skip
                grad = np.moveaxis(added[:-1], 0, axis)
            at_ends["grad_last"] = None
            if before is not None and call.initial is not None:
                at_ends["initial"] = copy_of(place, call.initial)
        elif before is not None:
            at_ends |= {"initial": None, "grad_initial": None}
        if carry is not None:
            at_ends["grad_last"] = None
    in_sequence = {*at_ends} if packed else set()  # their first axis is that of sequences
    at_ends |= {"carry": carry, "before": before}

    in_time = {"states": states, "grad_input": call.grad_input, "grad": grad, "mask": call.mask}
    in_time |= {"reset": call.reset, "gate": None if isinstance(call.gate, complex) else call.gate}
    strides = {name: tuple(x.strides[d] for d in others) for name, x in in_time.items() if x is not None}
    strides |= {name: x.strides[name in in_sequence :] for name, x in at_ends.items() if x is not None}
    strides["message"] = _shards.in_order([shape[d] for d in others], state)
    strides["grad_gate"] = tuple(of_gates[d] for d in others)
    sizes = tuple(shape[d] for d in others)
    if lanes is not None:
        # The lanes of a warp are an axis of their own, along which there is one sum.
        sizes = (*sizes[:lanes], sizes[lanes] // 32, 32, *sizes[lanes + 1 :])
        for name, each in strides.items():
            pair = (each[lanes], 0) if name == "grad_gate" else (32 * each[lanes], each[lanes])
            strides[name] = (*each[:lanes], *pair, *each[lanes + 1 :])
    sizes, strides = merge_axes(sizes, strides, by="states")
    if len(sizes) > ROW_DIMS:
        names = ("gate", "states", "grad", "initial", "grad_last", "mask", "reset")
        given = {name: getattr(call, name) for name in names}
        copies = {name: copy_of(place, x) for name, x in given.items() if x is not None and not isinstance(x, complex)}
        backward(place, replace(call, **copies), copied=True)
        return

    def rows(name: str, x: Array | None, time: int, *, turned: bool) -> Rows | None:
        if x is None:
            return None
        start = place.pointer(x) + ((length - 1) * time if turned else 0)
        return Rows(start, -time if turned else time, strides[name], item_name(x))

    def in_order(name: str, *, walked: bool) -> Rows | None:
        x = in_time[name]
        return None if x is None else rows(name, x, x.strides[axis], turned=call.reverse != walked)

    def at_end(name: str) -> Rows | None:
        x = at_ends[name]
        return None if x is None else rows(name, x, x.strides[0] if name in in_sequence else 0, turned=False)

    segments = None
    if call.mask is not None or call.reset is not None or call.offsets is not None:
        mask, reset = (in_order(name, walked=False) for name in ("mask", "reset"))
        segments = Segments(mask, reset, offsets, call.reverse)
    walk = LinearCall(
        item=call.item,
        gate=call.gate if isinstance(call.gate, complex) else in_order("gate", walked=True) or NOWHERE,
        input=in_order("grad", walked=True) or NOWHERE,
        initial=at_end("grad_last") or at_end("carry"),
        output=in_order("grad_input", walked=True) or NOWHERE,
        last=at_end("grad_initial"),
        length=length,
        sizes=sizes,
        segments=segments,
        pairs=pairs,
    )
    turned = sums is not GateSums.OVER_TIME and not call.reverse
    grad_gate = rows("grad_gate", left, of_gates[axis], turned=turned)
    entering = at_end("initial") or at_end("before")
    if shard is None:
        marks = _marks(place, walk, enters=entering is not None)
        _launch(place, plan, walk, in_order("states", walked=True), entering, grad_gate, sums, marks, marks)
    else:
        closed = opened = _marks(place, walk, enters=entering is not None and not packed, leaves=not packed)
        start, end = (length, 0) if call.reverse else (0, length)  # of the scan, in time
        if packed and closed is not None:
            do(place, _shards.no_ends, [closed.words], [])
            if call.initial is not None and (opened := _marks(place, walk, enters=True)) is not None:
                # With states for sequences the walk begins with nothing, and takes up the carry where one ends.
                do(place, _shards.open_end, [opened.words], [offsets], at=end, step=length - 1)
                if before is not None:
                    do(place, _shards.open_start, [opened.words], [offsets], at=start)

        def finish(message: Array, layout: _shards.Layout) -> None:
            if closed is not None:
                by_item = tuple(stride // state.itemsize for stride in strides["message"])
                do(place, _shards.cut_edge, [message], [closed.words], layout=layout, own=closed.sizes, sizes=sizes,
                   strides=by_item)  # fmt: skip
            do(place, _shards.put_last, [message], [states], at=layout.extras, axis=axis, dtype=state,
               step=0 if call.reverse else length - 1)  # fmt: skip

        wanted = before

        def arrived(received: Array, layout: _shards.Layout, members: _shards.Shard) -> None:
            nonlocal wanted
            nearest = members.nearest(reverse=call.reverse)
            if wanted is None or nearest is None:
                return
            wanted = None
            do(place, _shards.take_last, [before], [received], rank=nearest, at=layout.extras)
            if packed and at_ends["initial"] is not None:
                do(place, _shards.enter_sequence, [at_ends["initial"]], [before, offsets], at=start)

        link = _shards.Link(
            place, shard, not call.reverse, strides["message"], at_end("grad_last"), at_end("carry"),
            prod(shape[d] for d in others) * state.itemsize, finish, arrived,
        )  # fmt: skip
        _launch(place, plan, walk, in_order("states", walked=True), entering, grad_gate, sums, closed, opened, link)
    if left is not None and call.grad_gate is not None and left is not call.grad_gate:
        if copied:
            moved = place.allocate(tuple(parts[d] for d in order), state)
            place.assign(moved, left.transpose(order))
            left = moved
        add(place, left.reshape(-1, *call.grad_gate.shape), call.grad_gate)


def _contiguous_strides(sizes: list[int], order: Iterable[int], dtype: np.dtype[Any]) -> list[int]:
    """Strides of an array with its axes in this order, slowest first."""
    strides, stride = [0] * len(sizes), dtype.itemsize
    for d in reversed(list(order)):
        strides[d] = stride
        stride *= sizes[d]
    return strides


def _marks(place: Place, walk: LinearCall, *, enters: bool, leaves: bool = True) -> Marks | None:
    if walk.segments is None:
        return None
    return make_marks(place, walk.segments, walk.length, walk.sizes, enters=enters, leaves=leaves, backward=True)


def _launch(
    place: Place,
    plan: LinearPlan,
    walk: LinearCall,
    states: Rows | None,
    initial: Rows | None,
    grad_gate: Rows | None,
    sums: GateSums,
    closed: Marks | None,
    opened: Marks | None,
    link: _shards.Link | None = None,
) -> None:
    """Launch the walk from the last step to the first; its segments are in the order of the scan.

    The marks of its summaries, and those of the walk itself.
    """
    source = linear_backward_source(walk.item, segmented=closed is not None)
    own = [states if grad_gate else None, initial, grad_gate]
    pairs = walk.pairs and plan.order.lanes is Lanes.ROWS and walk.aligned()
    pairs = pairs and all(x.adjacent(x.start) for x in own if x is not None)
    now = walk.paired() if pairs else walk
    read, entering, written = ((x.paired() if pairs else x) if x else NOWHERE for x in own)
    wide = [x.start != 0 and x.item != walk.item for x in (walk.input, read)]
    name = linear_backward_name(plan.order.lanes, walk.item, segmented=closed is not None, pairs=pairs)

    def launch(*, summarise: bool, summaries: tuple[int, int, int]) -> None:
        packed = linear_args(plan, now, closed if summarise else opened, summaries)
        packed += b"".join(x.packed(plan.order.chunk, x.item) for x in (read, entering))
        packed += written.packed(plan.order.chunk, walk.item) + struct.pack(
            LINEAR_BACKWARD_TAIL, ITEM_CODE[written.item], *wide, sums, summarise
        )
        _start(place, source, name, linear_blocks(plan, now), 32 * plan.fit.warps, packed)

    launch_chunks(place, plan, walk, launch, link=link)


def add(place: Place, left: Array, to: Array) -> None:
    """Sum over the first axis, SUM_PARTS at a time where it is long and there are few sums."""
    real = {"complex64": "float32", "complex128": "float64"}.get(item_name(left), item_name(left))
    while len(left) > SUM_PARTS and to.size < SUM_ITEMS:
        # The sums take the place of the last of what they are of, and what is left over follows them.
        groups = len(left) // SUM_PARTS
        some = left[: SUM_PARTS * groups].reshape(SUM_PARTS, groups, *left.shape[1:])
        add_partials(place, [(some, some[-1])], real)
        left = left[(SUM_PARTS - 1) * groups :]
    add_partials(place, [(left, to)], real)
