"""The gradients of selective_scan on a Place: which tiles, chunks and parts of the batch, and the launches."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from . import _shards
from ._arrays import ITEM_CODE, Array, Place, copy_of, item_name
from ._calls import chosen
from ._launch import (
    _MARK_BYTES,
    _NO_SEQUENCE,
    Segments,
    _start,
    couple_fields,
    make_marks,
    scan_summaries,
    sequence_fields,
)
from ._plan import (
    ITEM_BYTES,
    BackwardPlan,
    SelectiveKind,
    backward_tile,
)
from ._source import (
    BACKWARD_HEAD,
    BACKWARD_TAIL,
    SUM_ARGS,
    SUM_JOB,
    SUM_JOBS,
    SUM_THREADS,
    backward_name,
    backward_source,
    sum_source,
)


@dataclass(frozen=True)
class BackwardCall:
    """The arrays of one selective_scan_vjp: inputs and gradients, seen as SelectiveCall sees them.

    `gradients` has fresh arrays for all inputs that are there; B's and C's are contiguous in the order (batch, groups,
    state, length) if `time_last`, else (batch, length, groups, state).
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
    states: Array
    grad_output: Array | None
    grad_last: Array | None
    gradients: dict[str, Array]
    time_last: bool
    groups: int
    softplus: bool
    limits: tuple[float, float] | None
    segments: Segments | None


def backward(place: Place, plan: BackwardPlan, call: BackwardCall, time_step: int) -> None:
    """Run it; `time_step` is 1, or -1 for reverse.

    One launch, where the plan cuts time into chunks that of the summaries before it, and one that adds what the blocks
    left.
    """
    chosen(place, plan)
    batch, length, channels = call.u.shape
    state = call.A.shape[1]
    kind, tile, gradients = call.kind, backward_tile(call.kind), call.gradients
    item, real, state_dtype = kind.item, np.dtype(kind.real), np.dtype(kind.state)
    tiles = -(-(channels // call.groups) // tile.channels)
    slices = -(-state // tile.slice)

    def sequence(x: Array | None, item: str = item) -> tuple[int, ...]:
        return _NO_SEQUENCE if x is None else sequence_fields(place, x, item, time_step, kind, call.groups, tile.run)

    def pointer(x: Array | None) -> int:
        return 0 if x is None else place.pointer(x)

    of_u = [gradients.get(name) for name in ("u", "delta", "z")]
    sequences = [
        sequence(call.u),
        sequence(call.delta, item_name(call.delta)),
        sequence(call.z),
        sequence(call.grad_output, item if call.grad_output is None else item_name(call.grad_output)),
        *(sequence(x, item if x is None else item_name(x)) for x in of_u),
    ]
    couples = [
        couple_fields(place, x, varies, time_step, kind, tile.couple_run)
        for x, varies in ((call.B, kind.time_B), (call.C, kind.time_C))
    ]
    rows = plan.parts * plan.chunks
    in_chunk = plan.order.chunk // plan.order.summary
    shard = _shards.linked()
    summarised = plan.chunks > 1 or shard is not None
    left_out = in_chunk if shard is None else 0  # the first chunk's are not asked for
    summaries = -(-length // plan.order.summary) - left_out
    sums: list[tuple[Array, Array]] = []  # what is added to what

    def parts(name: str, *shape: int) -> Array | None:
        if name not in gradients:
            return None
        left = place.allocate(shape, real if name in ("D", "delta_bias") else state_dtype)
        sums.append((left, gradients[name]))
        return left

    of_couples = [parts(name, *((tiles, batch, length, call.groups, state) if varies else (rows, channels, state)))
                  for name, varies in (("B", kind.time_B), ("C", kind.time_C))]  # fmt: skip
    of_parts = [parts("A", rows, channels, state), *(parts(name, rows, channels) for name in ("D", "delta_bias"))]

    packed = call.segments is not None and call.segments.offsets is not None
    initial = gradients.get("h0")
    if initial is not None and initial.dtype != state_dtype:
        initial = place.allocate((1, *initial.shape), state_dtype)
        sums.append((initial, gradients["h0"]))
    if packed and initial is not None:  # what an empty sequence has
        place.assign(initial, 0 if call.grad_last is None else call.grad_last)
    # What other ranks have: the gradient that comes from the step after the shard, and whether a state enters it.
    carry, entered, grad_last = None, False, call.grad_last
    if shard is not None:
        entered = len(shard.before(reverse=time_step < 0)) > 0
        if shard.before(reverse=time_step > 0):
            carry = place.allocate((batch, channels, state), state_dtype)
            grad_last = copy_of(place, grad_last) if packed and grad_last is not None else None
    last = grad_last if carry is None and not packed else carry
    row_initial = None if packed else initial
    if row_initial is not None and entered:
        place.assign(row_initial, 0)
        row_initial = None
    starts_from_zero = call.initial is None and not entered
    marks, resets = None, None
    if call.segments is not None:
        enters = call.initial is not None if packed else not starts_from_zero
        marks = make_marks(place, call.segments, length, (batch,), enters=enters, backward=True)
        if summarised:
            resets = place.allocate((batch, summaries), np.bool_)
    blocks = plan.parts * call.groups * tiles
    kept = []  # with several slices: what the threads of a block keep of each, and of their items
    if slices > 1:
        rows = 3 + 2 * (not kind.time_B) + 2 * (not kind.time_C)
        kept = [
            place.allocate((blocks * plan.chunks, slices, rows, tile.threads, tile.states), state_dtype),
            place.allocate((blocks * plan.chunks, 3, tile.threads, tile.run), real),
        ]
    gate = seed = 0
    if summarised:
        maps = [place.allocate((batch, summaries, state, channels), state_dtype) for _ in range(2)]
        gate, seed = (place.pointer(x) for x in maps)

    head = struct.pack(
        BACKWARD_HEAD,
        *(field for fields in (*sequences, *couples) for field in fields),
        *(field for x in of_couples for field in _couple_sums(place, x, call, time_step)),
        *(pointer(x) for x in (call.A, call.D, call.delta_bias, call.states)),
        *(pointer(x) for x in (last, row_initial)),
        *(pointer(x) for x in of_parts),
        *(seed, gate, seed),
        *(pointer(x) for x in (kept or (None, None))),
        *call.A.strides,
        *(0 if x is None else x.strides[0] for x in (call.D, call.delta_bias)),
        *next((x.strides for x in (grad_last, carry) if x is not None), (0, 0, 0)),
        *(batch, length, channels, state, call.groups, slices),
    )
    limits = call.limits or (0.0, 0.0)
    with np.errstate(over="ignore"):
        single = [np.float32(x) for x in limits]
    plain = (
        call.grad_output is not None
        and state % tile.slice == 0
        and call.limits is None
        and all(fields[-1] for fields in sequences if fields[0])
        and all(fields[7] for fields, varies in zip(couples, (kind.time_B, kind.time_C), strict=True) if varies)
    )
    segmented: tuple[int, ...] = (0,) * 10
    if marks is not None:
        own = (call.initial, grad_last, initial) if packed else (None, None, None)
        strides = call.initial.strides if packed and call.initial is not None else (0, 0, 0)
        where = marks.rows.start, marks.rows.rows[0] // _MARK_BYTES, marks.ids
        segmented = (*where, *(pointer(x) for x in own), *strides, pointer(resets))

    def launch(*, summarise: bool) -> None:
        time = (plan.order.chunk, plan.chunks, left_out, summaries, in_chunk)
        if summarise:
            time = (plan.order.summary, summaries, left_out, summaries, 1)
        coded = (call.A, call.D, call.delta_bias, *of_u)
        fields = struct.pack(
            BACKWARD_TAIL, *time, plan.order.part, plan.parts,
            *limits, *single, *(0 if x is None else ITEM_CODE[item_name(x)] for x in coded),
            call.softplus, call.limits is not None, starts_from_zero, plain, *segmented,
        )  # fmt: skip
        name, source = backward_name(kind, tile, summarise), backward_source(kind)
        count = blocks * time[1] * (slices if summarise else 1)
        _start(place, source, name, count, tile.threads, head + fields, source.dynamic_shared[name])

    if summarised:
        launch(summarise=True)
        first = None if packed or carry is not None else last
        linked = None if shard is None else (shard, time_step > 0, carry)
        scan_summaries(place, first, batch, summaries, state, channels, state_dtype, gate, seed, resets, linked)
    launch(summarise=False)
    add_partials(place, sums, kind.real)


def _couple_sums(place: Place, x: Array | None, call: BackwardCall, time_step: int) -> tuple[int, ...]:
    if x is None:
        return (0,) * 6
    if x.ndim == 3:  # constant in time
        return (place.pointer(x), *(0,) * 5)
    batch, length, groups, state = x.shape[1:]
    size = x.dtype.itemsize
    if call.time_last:
        strides = (groups * state * length, 1, state * length, length)
    else:
        strides = (length * groups * state, groups * state, state, 1)
    over_batch, time, group, over_state = (stride * size for stride in strides)
    start = place.pointer(x) + (0 if time_step > 0 else (length - 1) * time)
    return start, batch * length * groups * state * size, over_batch, time * time_step, group, over_state


def add_partials(place: Place, sums: list[tuple[Array, Array]], real: str) -> None:
    """Write the sum over the first axis of each first array to each second, rounded to its type."""
    sums = [each for each in sums if each[1].size]
    for first in range(0, len(sums), SUM_JOBS):
        jobs, items = [], 0
        for left, to in sums[first : first + SUM_JOBS]:
            reals = 2 if left.dtype.kind == "c" else 1
            name = item_name(to)
            code = {"complex64": "float32", "complex128": "float64"}.get(name, name)
            count = to.size * reals
            items += count
            jobs.append((place.pointer(left), place.pointer(to), count, len(left), ITEM_CODE[code], ITEM_BYTES[code]))
        jobs += [(0,) * 6] * (SUM_JOBS - len(jobs))
        packed = b"".join(struct.pack(SUM_JOB, *job) for job in jobs) + struct.pack("<q", items)
        assert len(packed) == SUM_ARGS
        _start(place, sum_source(), f"sum_partials_{real}", -(-items // SUM_THREADS), SUM_THREADS, packed)
