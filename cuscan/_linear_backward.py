"""The gradients of linear_scan on a Place: layouts, plan and launches."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import IntEnum
from math import prod
from typing import Any

import numpy as np

from ._arrays import ITEM_CODE, Array, Place, accumulation, copy_of, item_name, merge_axes
from ._calls import chosen
from ._launch import (
    NOWHERE,
    ROW_DIMS,
    LinearCall,
    Rows,
    Segments,
    _start,
    launch_chunks,
    linear_args,
    linear_blocks,
    make_marks,
)
from ._plan import ITEM_BYTES, Lanes, LinearPlan, LinearProblem, plan_linear
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
    """
    states, axis = call.states, call.axis
    shape, length = states.shape, states.shape[axis]
    others = [d for d in range(states.ndim) if d != axis]
    by_stride = sorted((d for d in others if shape[d] > 1), key=lambda d: -abs(states.strides[d]))
    fastest = by_stride[-1] if by_stride else None
    state = np.dtype(accumulation(call.item))
    problem = LinearProblem(
        item_bytes=ITEM_BYTES[call.item],
        state_bytes=state.itemsize,
        rows=prod(shape[d] for d in others),
        length=length,
        time_fast=fastest is None or abs(states.strides[axis]) < abs(states.strides[fastest]),
    )
    plan = plan_linear(problem, place.limits)
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

    in_time = {"states": states, "grad_input": call.grad_input, "grad": call.grad, "mask": call.mask}
    in_time |= {"reset": call.reset, "gate": None if isinstance(call.gate, complex) else call.gate}
    at_ends = {"initial": call.initial, "grad_last": call.grad_last, "grad_initial": call.grad_initial}
    first = 0 if call.offsets is None else 1  # the axis of sequences
    strides = {name: tuple(x.strides[d] for d in others) for name, x in in_time.items() if x is not None}
    strides |= {name: x.strides[first:] for name, x in at_ends.items() if x is not None}
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
        return None if x is None else rows(name, x, x.strides[0] if first else 0, turned=False)

    segments = None
    if call.mask is not None or call.reset is not None or call.offsets is not None:
        mask, reset = (in_order(name, walked=False) for name in ("mask", "reset"))
        segments = Segments(mask, reset, call.offsets, call.reverse)
    walk = LinearCall(
        item=call.item,
        gate=call.gate if isinstance(call.gate, complex) else in_order("gate", walked=True) or NOWHERE,
        input=in_order("grad", walked=True) or NOWHERE,
        initial=at_end("grad_last"),
        output=in_order("grad_input", walked=True) or NOWHERE,
        last=at_end("grad_initial"),
        length=length,
        sizes=sizes,
        segments=segments,
    )
    turned = sums is not GateSums.OVER_TIME and not call.reverse
    grad_gate = rows("grad_gate", left, of_gates[axis], turned=turned)
    _launch(place, plan, walk, in_order("states", walked=True), at_end("initial"), grad_gate, sums)
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


def _launch(
    place: Place,
    plan: LinearPlan,
    walk: LinearCall,
    states: Rows | None,
    initial: Rows | None,
    grad_gate: Rows | None,
    sums: GateSums,
) -> None:
    """Launch the walk from the last step to the first; its segments are in the order of the scan."""
    marks = None
    if walk.segments is not None:
        marks = make_marks(place, walk.segments, walk.length, walk.sizes, enters=initial is not None, backward=True)
    source = linear_backward_source(walk.item, segmented=marks is not None)
    name = linear_backward_name(plan.order.lanes, walk.item, segmented=marks is not None)
    read = (states or NOWHERE) if grad_gate else NOWHERE
    written = grad_gate or NOWHERE

    def launch(*, summarise: bool, summaries: tuple[int, int, int]) -> None:
        packed = linear_args(plan, walk, marks, summaries)
        packed += b"".join(x.packed(plan.order.chunk, x.item) for x in (read, initial or NOWHERE))
        packed += written.packed(plan.order.chunk, walk.item) + struct.pack(
            LINEAR_BACKWARD_TAIL, ITEM_CODE[written.item], walk.input.item != walk.item, read.item != walk.item,
            sums, summarise,
        )  # fmt: skip
        _start(place, source, name, linear_blocks(plan, walk), 32 * plan.fit.warps, packed)

    launch_chunks(place, plan, walk, launch)


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
