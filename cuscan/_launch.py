"""From a plan to launches on a Place's stream. Obeys the plan; no branch on the schedule's name.

The argument structs are packed here, field by field as in cuda_src/*_args.cuh; the kernels assert their sizes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from ._arrays import ITEM_CODE, Array, Place, accumulation, item_name
from ._plan import ITEM_BYTES, Lanes, LinearPlan, SelectiveKind, SelectivePlan, plan_linear_summaries, selective_tiles
from ._source import (
    LINEAR_ARRAY,
    LINEAR_TAIL,
    SELECTIVE_HEAD,
    SELECTIVE_TAIL,
    KernelSource,
    linear_name,
    linear_source,
    selective_name,
    selective_source,
)

ROW_DIMS = 6  # kRowDims in linear_args.cuh
LARGEST_GRID = 2**31 - 1
_STATIC_LIMIT = 48 * 1024  # dynamic shared memory that a kernel may have unasked


def _start(
    place: Place, source: KernelSource, name: str, blocks: int, threads: int, packed: bytes, shared: int = 0
) -> None:
    function: Any = place.modules.get_function(source, name)
    if shared > _STATIC_LIMIT and function.max_dynamic_shared_size_bytes < shared:
        function.max_dynamic_shared_size_bytes = shared
    argument = np.ndarray((), f"V{len(packed)}", packed)
    function((min(blocks, LARGEST_GRID),), (threads,), (argument,), shared_mem=shared)


def _ceil_div(x: int, y: int) -> int:
    return -(-x // y)


# --- linear_scan -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """One array as the linear kernels see it: address of its first step, strides in bytes along time and rows."""

    start: int
    time: int
    rows: tuple[int, ...]
    item: str = "float32"

    def packed(self, chunk: int, item: str) -> bytes:
        """The argument's fields; packs are of items of type `item`."""
        size = ITEM_BYTES[self.item]
        # Packs are 16 consecutive bytes; in reverse the first step is the highest item of one.
        lowest = self.start if self.time > 0 else self.start - (16 - size)
        packs = (
            self.item == item
            and abs(self.time) == size
            and lowest % 16 == 0
            and all(stride % 16 == 0 for stride in self.rows)
            and chunk * size % 16 == 0
        )
        return struct.pack(LINEAR_ARRAY, self.start, self.time, *_pad(self.rows), packs)


_NOWHERE = Rows(0, 0, ())


def _pad(values: tuple[int, ...]) -> tuple[int, ...]:
    return (*values, *(0,) * (ROW_DIMS - len(values)))


@dataclass(frozen=True)
class LinearCall:
    """The arrays of one linear_scan and the sizes that they share."""

    item: str
    gate: Rows | complex
    input: Rows
    initial: Rows | None
    output: Rows
    last: Rows | None
    length: int
    sizes: tuple[int, ...]  # of the row axes

    @property
    def rows(self) -> int:
        """How many recurrences there are."""
        return prod(self.sizes)


def linear(place: Place, plan: LinearPlan, call: LinearCall) -> None:
    """Run a linear_scan: in one launch, or in three where the plan cuts time into chunks."""
    if plan.chunks == 1:
        _linear_launch(place, plan, call, summarise=False, source_item=call.item)
        return
    state = np.dtype(accumulation(call.item))
    summaries = [place.allocate((call.rows * plan.chunks,), state) for _ in range(2)]
    gate, entering = (place.pointer(x) for x in summaries)
    _linear_launch(place, plan, call, summarise=True, source_item=call.item, summaries=(gate, entering))

    # The summaries are a linear_scan of their own, in place: the states that leave the chunks.
    row, chunk = summary_strides(plan, call.rows)
    strides = tuple(prod(call.sizes[d + 1 :]) * row * state.itemsize for d in range(len(call.sizes)))
    along = Rows(entering, chunk * state.itemsize, strides, state.name)
    scan = replace(call, item=state.name, gate=replace(along, start=gate), input=along, output=along,
                   last=None, length=plan.chunks)  # fmt: skip
    inner = plan_linear_summaries(plan.chunks, plan.order.lanes)
    _linear_launch(place, inner, scan, summarise=False, source_item=call.item)
    _linear_launch(place, plan, call, summarise=False, source_item=call.item, summaries=(gate, entering))


def summary_strides(plan: LinearPlan, rows: int) -> tuple[int, int]:
    """Strides of a summary in items, by row and by chunk."""
    return (1, rows) if plan.order.lanes is Lanes.ROWS else (plan.chunks, 1)


def _linear_launch(
    place: Place,
    plan: LinearPlan,
    call: LinearCall,
    *,
    summarise: bool,
    source_item: str,
    summaries: tuple[int, int] = (0, 0),
) -> None:
    order = plan.order
    gate = call.gate if isinstance(call.gate, Rows) else _NOWHERE
    value = 0j if isinstance(call.gate, Rows) else complex(call.gate)
    with np.errstate(over="ignore"):
        single = np.float32(value.real), np.float32(value.imag)
    arrays = (gate, call.input, call.initial or _NOWHERE, call.output, call.last or _NOWHERE)
    packed = b"".join(x.packed(order.chunk, call.item) for x in arrays) + struct.pack(
        LINEAR_TAIL, *summaries, value.real, value.imag, *single, call.length, call.rows, *_pad(call.sizes),
        order.chunk, plan.chunks, *summary_strides(plan, call.rows), len(call.sizes), ITEM_CODE[call.output.item],
        order.row_warps,
    )  # fmt: skip
    teams = call.rows if order.lanes is Lanes.TIME else _ceil_div(call.rows, 32)
    blocks = _ceil_div(teams * plan.chunks, plan.fit.warps // order.row_warps)
    name = linear_name(order.lanes, summarise, call.item)
    _start(place, linear_source(source_item), name, blocks, 32 * plan.fit.warps, packed)


# --- selective_scan ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SelectiveCall:
    """The arrays of one selective_scan.

    u, delta, z and output are (batch, length, channels) views, B and C (batch, length, groups, state) or
    (channels, state) views.
    """

    kind: SelectiveKind
    u: Array
    delta: Array
    A: Array
    B: Array
    C: Array
    D: Array | None
    z: Array | None
    delta_bias: Array | None
    initial: Array | None
    output: Array
    last: Array | None
    groups: int
    softplus: bool
    limits: tuple[float, float] | None


def selective(place: Place, plan: SelectivePlan, call: SelectiveCall, time_step: int) -> None:
    """Run a selective_scan; `time_step` is 1, or -1 for reverse.

    One launch a slice of the states, and where the plan cuts time into chunks two before them: the summaries of all
    slices, and a linear_scan over the chunks.
    """
    batch, length, channels = call.u.shape
    state = call.A.shape[1]
    kind, tile = call.kind, plan.fit.tile
    item, real, state_dtype = kind.item, np.dtype(kind.real), np.dtype(kind.state)

    def sequence(x: Array | None, item: str) -> tuple[int, ...]:
        return _NO_SEQUENCE if x is None else _sequence(place, x, item, time_step, plan, call)

    scratch = None
    if plan.slices > 1:
        shape = (batch, channels, length) if kind.time_fast else (batch, length, channels)
        scratch = place.allocate(shape, real)
        scratch = scratch.transpose(0, 2, 1) if kind.time_fast else scratch
    summary_gate = seed = 0
    if plan.chunks > 1:
        summaries = [place.allocate((batch, plan.chunks, state, channels), state_dtype) for _ in range(2)]
        summary_gate, seed = (place.pointer(x) for x in summaries)

    sequences = [
        sequence(call.u, item),
        sequence(call.delta, item_name(call.delta)),
        sequence(call.z, item),
        sequence(call.output, item_name(call.output)),
        (*sequence(scratch, real.name)[:5], 0),
    ]
    couples = [
        _couple(place, x, varies, time_step, plan, kind) for x, varies in ((call.B, kind.time_B), (call.C, kind.time_C))
    ]
    head = struct.pack(
        SELECTIVE_HEAD,
        *(field for fields in (*sequences, *couples) for field in fields),
        *(0 if x is None else place.pointer(x) for x in (call.A, call.D, call.delta_bias, call.initial, call.last)),
        *call.A.strides,
        *(0 if x is None else x.strides[0] for x in (call.D, call.delta_bias)),
        *((0, 0, 0) if call.initial is None else call.initial.strides),
        *(seed, summary_gate, seed, batch, length, channels, state, call.groups),
    )
    limits = call.limits or (0.0, 0.0)
    with np.errstate(over="ignore"):
        single = [np.float32(x) for x in limits]
    plain = (
        all(fields[-1] for fields in sequences[:4] if fields[0])
        and all(fields[7] for fields, varies in zip(couples, (kind.time_B, kind.time_C), strict=True) if varies)
        and plan.slices == 1
        and call.limits is None
    )

    def launch(*, summarise: bool, first_state: int, slices: int, adds: bool, leaves: bool) -> None:
        packed = head + struct.pack(
            SELECTIVE_TAIL, first_state, slices, plan.order.chunk, plan.chunks, *limits, *single,
            *(ITEM_CODE[item_name(x)] if x is not None else 0 for x in (call.A, call.D, call.delta_bias, call.output)),
            adds, leaves, call.softplus, call.limits is not None, plain,
        )  # fmt: skip
        shape = selective_tiles(kind)[0] if summarise else tile
        blocks = slices * batch * call.groups * _ceil_div(channels // call.groups, shape.channels) * plan.chunks
        name = selective_name(kind, shape, summarise)
        _start(place, selective_source(kind), name, blocks, shape.threads, packed, shape.shared_memory(kind))

    if plan.chunks > 1:
        launch(summarise=True, first_state=0, slices=plan.slices, adds=False, leaves=False)
        scan_summaries(place, call.initial, batch, plan.chunks, state, channels, state_dtype, summary_gate, seed)
    for s in range(plan.slices):
        launch(summarise=False, first_state=s * tile.slice, slices=1, adds=s > 0, leaves=s < plan.slices - 1)


def scan_summaries(
    place: Place,
    initial: Array | None,
    batch: int,
    chunks: int,
    state: int,
    channels: int,
    dtype: np.dtype[Any],
    gate: int,
    entering: int,
) -> None:
    """Turn the chunks' summaries (batch, chunks, state, channels) into the states that leave them, from `initial`."""
    size = dtype.itemsize
    strides = (chunks * state * channels * size, channels * size, size)
    along = Rows(entering, state * channels * size, strides, dtype.name)
    first = None
    if initial is not None:
        first = Rows(place.pointer(initial), 0, (initial.strides[0], initial.strides[2], initial.strides[1]))
    call = LinearCall(
        dtype.name, replace(along, start=gate), along, first, along, None, chunks, (batch, state, channels)
    )
    linear(place, plan_linear_summaries(chunks, Lanes.ROWS), call)


_NO_SEQUENCE = (0, 0, 0, 0, 0, 0)


def _is_vector(start: int, along: int, others: tuple[int, ...], size: int, even: bool) -> bool:
    """Whether pairs of neighbours `along` an axis are one aligned access each, and none is cut by an edge (`even`)."""
    lowest = start if along > 0 else start - size
    return even and abs(along) == size and lowest % (2 * size) == 0 and all(s % (2 * size) == 0 for s in others)


def _sequence(
    place: Place, x: Array, item: str, time_step: int, plan: SelectivePlan, call: SelectiveCall
) -> tuple[int, ...]:
    batch, time, channel = x.strides
    length, channels = x.shape[1], x.shape[2]
    start = place.pointer(x) + (0 if time_step > 0 else (length - 1) * time)
    time *= time_step
    size = ITEM_BYTES[item]
    if call.kind.time_fast:
        vector = _is_vector(start, time, (batch, channel), size, length % 2 == 0 and plan.order.chunk % 2 == 0)
    else:
        vector = channel > 0 and _is_vector(start, channel, (batch, time), size, channels // call.groups % 2 == 0)
    return start, batch, time, channel, size == 4, vector and item == call.kind.item


def _couple(
    place: Place, x: Array, varies: bool, time_step: int, plan: SelectivePlan, kind: SelectiveKind
) -> tuple[int, ...]:
    wide = x.dtype.itemsize == 4
    code = ITEM_CODE[item_name(x)]
    if not varies:
        channel, state = x.strides
        return place.pointer(x), 0, 0, 0, channel, state, wide, 0, code
    batch, time, group, state = x.strides
    length, size = x.shape[1], x.dtype.itemsize
    start = place.pointer(x) + (0 if time_step > 0 else (length - 1) * time)
    time *= time_step
    if kind.time_fast:
        vector = _is_vector(start, time, (batch, group, state), size, length % 2 == 0 and plan.order.chunk % 2 == 0)
    else:
        vector = state > 0 and _is_vector(start, state, (batch, group, time), size, x.shape[3] % 2 == 0)
    return start, batch, time, group, 0, state, wide, vector and (kind.complex or item_name(x) == kind.item), code
