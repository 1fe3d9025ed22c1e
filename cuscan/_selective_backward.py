"""The gradients of selective_scan on a Place: which tiles, chunks and parts of the batch, and the launches."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from ._arrays import ITEM_CODE, Array, Place, item_name
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

    One launch a slice of the states, where the plan cuts time into chunks those of the summaries before them, and one
    that adds what the blocks left.
    """
    chosen(place, plan)
    batch, length, channels = call.u.shape
    state = call.A.shape[1]
    kind, tile, gradients = call.kind, backward_tile(call.kind), call.gradients
    item, real, state_dtype = kind.item, np.dtype(kind.real), np.dtype(kind.state)
    tiles = -(-(channels // call.groups) // tile.channels)
    slices = -(-state // tile.slice)

    def sequence(x: Array | None, item: str = item) -> tuple[int, ...]:
        return _NO_SEQUENCE if x is None else sequence_fields(place, x, item, time_step, kind, call.groups, 2)

    def pointer(x: Array | None) -> int:
        return 0 if x is None else place.pointer(x)

    of_u = [gradients.get(name) for name in ("u", "delta", "z")]
    partial = None
    if slices > 1:
        partial = place.allocate((3 if call.z is not None else 2, batch, length, channels), real)
    sequences = [
        sequence(call.u),
        sequence(call.delta, item_name(call.delta)),
        sequence(call.z),
        sequence(call.grad_output, item if call.grad_output is None else item_name(call.grad_output)),
        *(sequence(x, item if x is None else item_name(x)) for x in of_u),
        (*sequence(None if partial is None else partial[0], real.name)[:5], 0),
    ]
    couples = [
        couple_fields(place, x, varies, time_step, kind, 2)
        for x, varies in ((call.B, kind.time_B), (call.C, kind.time_C))
    ]
    rows = plan.parts * plan.chunks
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
    marks, resets = None, None
    if call.segments is not None:
        marks = make_marks(place, call.segments, length, (batch,), enters=call.initial is not None, backward=True)
        if plan.chunks > 1:
            resets = place.allocate((batch, plan.chunks), np.bool_)
    gate = seed = 0
    if plan.chunks > 1:
        kept = [place.allocate((batch, plan.chunks, state, channels), state_dtype) for _ in range(2)]
        gate, seed = (place.pointer(x) for x in kept)

    head = struct.pack(
        BACKWARD_HEAD,
        *(field for fields in (*sequences, *couples) for field in fields),
        *(field for x in of_couples for field in _couple_sums(place, x, call, time_step)),
        *(pointer(x) for x in (call.A, call.D, call.delta_bias, call.states)),
        *((0, 0) if packed else (pointer(call.grad_last), pointer(initial))),
        *(pointer(x) for x in of_parts),
        *(seed, gate, seed),
        *call.A.strides,
        *(0 if x is None else x.strides[0] for x in (call.D, call.delta_bias)),
        *((0, 0, 0) if call.grad_last is None else call.grad_last.strides),
        *(0 if partial is None else partial.strides[0], batch, length, channels, state, call.groups),
    )
    limits = call.limits or (0.0, 0.0)
    with np.errstate(over="ignore"):
        single = [np.float32(x) for x in limits]
    plain = (
        all(fields[-1] for fields in sequences[:7] if fields[0])
        and all(fields[7] for fields, varies in zip(couples, (kind.time_B, kind.time_C), strict=True) if varies)
        and slices == 1
    )
    segmented: tuple[int, ...] = (0,) * 10
    if marks is not None:
        own = (call.initial, call.grad_last, initial) if packed else (None, None, None)
        strides = call.initial.strides if packed and call.initial is not None else (0, 0, 0)
        where = marks.rows.start, marks.rows.rows[0] // _MARK_BYTES, marks.ids
        segmented = (*where, *(pointer(x) for x in own), *strides, pointer(resets))

    def launch(s: int, *, summarise: bool) -> None:
        coded = (call.A, call.D, call.delta_bias, *of_u)
        fields = struct.pack(
            BACKWARD_TAIL, s * tile.slice, plan.order.chunk, plan.chunks, plan.order.part, plan.parts,
            *limits, *single, *(0 if x is None else ITEM_CODE[item_name(x)] for x in coded), s > 0, s < slices - 1,
            call.softplus, call.limits is not None, call.initial is None, plain, *segmented,
        )  # fmt: skip
        blocks = plan.parts * call.groups * tiles * plan.chunks
        name = backward_name(kind, tile, summarise)
        _start(place, backward_source(kind), name, blocks, tile.threads, head + fields, tile.shared_memory(kind))

    if plan.chunks > 1:
        for s in range(slices):
            launch(s, summarise=True)
        last = None if packed else call.grad_last
        scan_summaries(place, last, batch, plan.chunks, state, channels, state_dtype, gate, seed, resets)
    for s in range(slices):
        launch(s, summarise=False)
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
