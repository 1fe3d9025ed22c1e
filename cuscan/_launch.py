"""From a plan to launches on a Place's stream. Obeys the plan; no branch on the schedule's name.

The argument structs are packed here, field by field as in cuda_src/*_args.cuh; the kernels assert their sizes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from ._arrays import ITEM_CODE, Array, Place, _address, accumulation, item_name
from ._calls import chosen, do, start
from ._plan import (
    ITEM_BYTES,
    TILE_STEPS,
    UPDATE_THREADS,
    Lanes,
    LinearPlan,
    SelectiveKind,
    SelectivePlan,
    UpdateKind,
    UpdatePlan,
    linear_slots,
    pass_slots,
    plan_linear_summaries,
    selective_tiles,
)
from ._source import (
    LINEAR_ARRAY,
    LINEAR_SEGMENTS,
    LINEAR_TAIL,
    MARK_ARGS,
    MARK_THREADS,
    SELECTIVE_HEAD,
    SELECTIVE_TAIL,
    UPDATE_ARGS,
    KernelSource,
    linear_name,
    linear_source,
    marks_source,
    selective_name,
    selective_source,
    update_name,
    update_source,
)

if TYPE_CHECKING:
    from ._shards import Link, Shard

ROW_DIMS = 6  # kRowDims in linear_args.cuh
LARGEST_GRID = 2**31 - 1


def _start(
    place: Place, source: KernelSource, name: str, blocks: int, threads: int, packed: bytes, shared: int = 0
) -> None:
    start(place.modules.get_function(source, name), (min(blocks, LARGEST_GRID),), (threads,), packed, shared)


def _ceil_div(x: int, y: int) -> int:
    return -(-x // y)


# --- arrays along time ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """One array as the linear kernels see it: address of its first step, strides in bytes along time and rows."""

    start: int
    time: int
    rows: tuple[int, ...]
    item: str = "float32"

    def packed(self, chunk: int, item: str, sizes: tuple[int, ...] | None = None, pair: int = 1) -> bytes:
        """The argument's fields; packs are of items of type `item`, `pair` rows each. `sizes` are those of the rows."""
        size = pair * ITEM_BYTES[self.item]
        rows = self.rows if sizes is None else [x for x, n in zip(self.rows, sizes, strict=False) if n > 1]
        # Packs are 16 consecutive bytes; in reverse the first step is the highest item of one.
        lowest = self.start if self.time > 0 else self.start - (16 - size)
        packs = (
            self.item == item
            and abs(self.time) == size
            and (pair == 1 or self.rows[-1:] == (size,))  # the rows of a pair lie side by side
            and lowest % 16 == 0
            and all(stride % 16 == 0 for stride in rows)
            and chunk * size % 16 == 0
        )
        return struct.pack(LINEAR_ARRAY, self.start, self.time, *_pad(self.rows), packs)

    def adjacent(self, *more: int) -> bool:
        """Whether rows lie side by side, in pairs by these numbers and all strides but the last."""
        size = ITEM_BYTES[self.item]
        return self.rows[-1] == size and all(x % (2 * size) == 0 for x in (*more, self.time, *self.rows[:-1]))

    def paired(self) -> Rows:
        """The same with two neighbouring rows as one."""
        return replace(self, rows=(*self.rows[:-1], 2 * self.rows[-1]))


NOWHERE = Rows(0, 0, ())


def _pad(values: tuple[int, ...]) -> tuple[int, ...]:
    return (*values, *(0,) * (ROW_DIMS - len(values)))


# --- marks: mask, reset and packed sequences ------------------------------------------------------------------------

_MARK_STEPS, _MARK_BYTES, _ID_BYTES = 32, 16, 4  # a word of step_marks.cuh, and the sequence of a step


@dataclass(frozen=True)
class Segments:
    """What cuts the rows of one call: mask and reset as bytes, the offsets of packed sequences, the direction."""

    mask: Rows | None
    reset: Rows | None
    offsets: Array | None
    reverse: bool


@dataclass(frozen=True)
class Marks:
    """The marks of step_marks.cu in device memory; `ids` is 0 or the address of the sequence of each position."""

    rows: Rows
    ids: int
    words: Array  # (rows, words, bytes)
    sizes: tuple[int, ...]  # of the row axes, 1 where marks are the same along one


def make_marks(
    place: Place,
    segments: Segments,
    length: int,
    sizes: tuple[int, ...],
    *,
    enters: bool,
    leaves: bool = True,
    backward: bool = False,
) -> Marks:
    """Make the marks of rows of `sizes`, or of their gradients.

    Does a state enter a row or sequence (`enters`), and is the one that leaves it wanted?
    """
    mask, reset = (_pad(x.rows) if x else _pad(()) for x in (segments.mask, segments.reset))
    own = [size if m or r else 1 for size, m, r in zip(sizes, mask, reset, strict=False)]
    words = _ceil_div(length, _MARK_STEPS)
    marks = place.allocate((prod(own), words, _MARK_BYTES), np.uint8)
    needs_ids = segments.offsets is not None and (enters or leaves)
    ids = place.allocate((length,), np.int32) if needs_ids else None
    offsets, pointer = segments.offsets, place.pointer(marks)
    packed = struct.pack(
        MARK_ARGS,
        *(
            field
            for x in (segments.mask, segments.reset)
            for field in ((x.start, x.time, *_pad(x.rows)) if x else _NONE)
        ),
        *((place.pointer(offsets), offsets.strides[0], len(offsets) - 1) if offsets is not None else (0, 0, 0)),
        *(length, prod(own), *_pad(tuple(own)), pointer, 0 if ids is None else place.pointer(ids)),
        *(len(own), offsets is not None and offsets.dtype.itemsize == 8, segments.reverse),
        2 * backward if enters else 1,
    )
    _start(place, marks_source(), "step_marks", _ceil_div(prod(own) * words, MARK_THREADS), MARK_THREADS, packed)
    strides = tuple(prod(own[d + 1 :]) * words * _MARK_BYTES if own[d] > 1 else 0 for d in range(len(own)))
    return Marks(Rows(pointer, 0, strides), 0 if ids is None else place.pointer(ids), marks, tuple(own))


_NONE = (0,) * (2 + ROW_DIMS)


# --- linear_scan ---------------------------------------------------------------------------------------------------


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
    segments: Segments | None = None  # packed: the time axis of initial and last goes over the sequences
    pairs: bool = False  # may_pair

    @property
    def rows(self) -> int:
        """How many recurrences there are."""
        return prod(self.sizes)

    @property
    def packed(self) -> bool:
        """Whether each row holds several sequences."""
        return self.segments is not None and self.segments.offsets is not None

    def paired(self) -> LinearCall:
        """The same with two neighbouring rows as one."""
        arrays = {name: getattr(self, name) for name in ("gate", "input", "initial", "output", "last")}
        pairs: dict[str, Any] = {name: x.paired() for name, x in arrays.items() if isinstance(x, Rows)}
        return replace(self, sizes=(*self.sizes[:-1], self.sizes[-1] // 2), **pairs)

    def aligned(self) -> bool:
        """Whether all arrays lie so that two neighbouring rows are one aligned item."""
        arrays = (self.gate, self.input, self.initial, self.output, self.last)
        return all(x.adjacent(x.start) for x in arrays if isinstance(x, Rows))


def may_pair(item: str, axis: int, arrays: Sequence[Array]) -> bool:
    """Whether two neighbouring rows may be one, by the shape and strides of what is read at each step of `axis`.

    Rows of 16-bit items lie side by side, and are one where addresses and the other arrays allow it, too. Two rows of
    float32 take turns along time, and are always one in one pass.
    """
    first, size = arrays[0], ITEM_BYTES[item]
    others = [d for d in range(first.ndim) if d != axis and first.shape[d] > 1]
    if not others or item_name(first) != item:
        return False
    fastest = min(others, key=lambda d: abs(first.strides[d]))

    def lies(x: Array) -> bool:
        if item == "float32":
            return bool(abs(x.strides[axis]) == 2 * size)
        return size == 2 and all(x.strides[d] % (2 * size) == 0 for d in (axis, *others) if d != fastest)

    beside = all(item_name(x) == item and x.strides[fastest] == size and lies(x) for x in arrays)
    return beside and first.shape[fastest] % 2 == 0


def linear(
    place: Place,
    plan: LinearPlan,
    call: LinearCall,
    source_item: str = "",
    link: Link | None = None,
    linked: Callable[[Marks | None], Rows | None] = lambda _: None,
) -> None:
    """Run a linear_scan: in one launch, or where the plan cuts time into chunks in three, or in one pass.

    With segments their marks are made first. `source_item` names the module, call.item's if it is empty. `link` ties it
    to the shards of other ranks: then `linked` gives what enters in the place of call.initial, and may change the
    marks, when the states of the other ranks are there.
    """
    chosen(place, plan)
    source = linear_source(source_item or call.item, segmented=call.segments is not None)
    marks = None
    if call.segments is not None:
        marks = make_marks(place, call.segments, call.length, call.sizes, enters=call.initial is not None)

    def start_part(part: str, blocks: int, slots: int, packed: bytes, *, pairs: bool) -> None:
        name = linear_name(plan.order.lanes, part, call.item, segmented=marks is not None, pairs=pairs)
        threads = 32 * plan.fit.warps
        _start(place, source, name, blocks, threads, packed, threads * slots)

    def launch(*, summarise: bool, summaries: tuple[int, int, int]) -> None:
        now = call if link is None or summarise else replace(call, initial=linked(marks))
        pairs = call.pairs and plan.order.lanes is Lanes.ROWS and call.item != "float32" and now.aligned()
        now = now.paired() if pairs else now
        slots = linear_slots(ITEM_BYTES[call.item], state_bytes, plan.order.lanes)
        stages = 2 if plan.order.lanes is Lanes.TIME else 0
        part = "summarise" if summarise else "apply"
        packed = linear_args(plan, now, marks, summaries)
        start_part(part, linear_blocks(plan, now), stages * slots, packed, pairs=pairs)

    state_bytes = np.dtype(accumulation(call.item)).itemsize
    if not plan.order.one_pass:
        launch_chunks(place, plan, call, launch, source_item, link)
        return
    pairs = call.pairs and plan.order.lanes is Lanes.TIME and call.item == "float32"
    now = call.paired() if pairs else call
    group = plan.order.row_warps if plan.order.lanes is Lanes.ROWS else 32  # LookBack in linear_look_back.cuh
    count = 2 + call.rows * state_bytes // 4 * (2 * plan.chunks + _ceil_div(plan.chunks, group))
    cells = place.allocate((_ceil_div(count, 2), 2), np.uint64)
    slots = pass_slots(plan.order.lanes, pairs=pairs)
    # The first launch clears so many pairs of cells, two a thread.
    clearing = _ceil_div(len(cells), 64 * plan.fit.warps), len(cells)
    for blocks, clear in (clearing, (linear_blocks(plan, now), 0)):
        packed = linear_args(plan, now, None, (0, 0, 0), (place.pointer(cells), clear), pair=1 + pairs)
        start_part("pass", blocks, slots, packed, pairs=pairs)


def launch_chunks(
    place: Place,
    plan: LinearPlan,
    call: LinearCall,
    launch: Callable[..., None],
    source_item: str = "",
    link: Link | None = None,
) -> None:
    """Launch what applies a scan to its chunks, and before it where there are several what summarises them."""
    if plan.chunks == 1 and link is None:
        launch(summarise=False, summaries=(0, 0, 0))
        return
    state = np.dtype(accumulation(call.item))
    types = [state, state] if call.segments is None else [state, state, np.dtype(np.bool_)]
    kept = [place.allocate((call.rows * plan.chunks,), dtype) for dtype in types]
    gate, entering, resets = (*(place.pointer(x) for x in kept), 0)[:3]
    launch(summarise=True, summaries=(gate, entering, resets))

    # The summaries are a linear_scan of their own, in place: the states that leave the chunks.
    row, chunk = summary_strides(plan, call.rows)

    def along(start: int, item: str, size: int) -> Rows:
        strides = tuple(prod(call.sizes[d + 1 :]) * row * size for d in range(len(call.sizes)))
        return Rows(start, chunk * size, strides, item)

    states = along(entering, state.name, state.itemsize)
    scan = replace(call, item=state.name, gate=replace(states, start=gate), input=states, output=states,
                   last=None, length=plan.chunks, pairs=False)  # fmt: skip
    if call.segments is not None:
        segments = Segments(None, along(resets, "bool", 1), None, reverse=False)
        scan = replace(scan, segments=segments, initial=None if call.packed else call.initial)
    if link is not None:
        shape, axis = ((plan.chunks, call.rows), 0) if chunk > 1 else ((call.rows, plan.chunks), 1)
        flags = None if call.segments is None else (kept[2], shape, axis)
        scan = replace(scan, initial=link.enter(scan, flags, source_item or call.item))
    inner = plan_linear_summaries(plan.chunks, plan.order.lanes)
    linear(place, inner, scan, source_item or call.item)
    launch(summarise=False, summaries=(gate, entering, 0))


def summary_strides(plan: LinearPlan, rows: int) -> tuple[int, int]:
    """Strides of a summary in items, by row and by chunk."""
    return (1, rows) if plan.order.lanes is Lanes.ROWS else (plan.chunks, 1)


def linear_args(
    plan: LinearPlan,
    call: LinearCall,
    marks: Marks | None,
    summaries: tuple[int, int, int],
    cells: tuple[int, int] = (0, 0),
    pair: int = 1,
) -> bytes:
    """LinearArgs, packed; `summaries` are addresses, and `cells` an address and how many pairs of cells to clear.

    `pair` neighbouring rows are one item along time.
    """
    order = plan.order
    gate = call.gate if isinstance(call.gate, Rows) else NOWHERE
    value = 0j if isinstance(call.gate, Rows) else complex(call.gate)
    with np.errstate(over="ignore"):
        single = np.float32(value.real), np.float32(value.imag)
    arrays = (gate, call.input, call.initial or NOWHERE, call.output, call.last or NOWHERE)
    items = [call.item if x is call.output else x.item for x in arrays]
    packed = b"".join(x.packed(order.chunk, y, call.sizes, pair) for x, y in zip(arrays, items, strict=True))
    packed += struct.pack(
        LINEAR_TAIL, *summaries[:2], value.real, value.imag, *single, call.length, call.rows, *_pad(call.sizes),
        order.chunk, plan.chunks, *summary_strides(plan, call.rows), len(call.sizes), ITEM_CODE[call.output.item],
        order.row_warps,
    )  # fmt: skip
    packed += (marks.rows if marks else NOWHERE).packed(order.chunk, call.item)
    return packed + struct.pack(LINEAR_SEGMENTS, marks.ids if marks else 0, summaries[2], *cells)


def linear_blocks(plan: LinearPlan, call: LinearCall) -> int:
    """Blocks that have a slot for each chunk of each row or 32 rows."""
    teams = call.rows if plan.order.lanes is Lanes.TIME else _ceil_div(call.rows, 32)
    return _ceil_div(teams * plan.chunks, plan.fit.warps // plan.order.row_warps)


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
    segments: Segments | None  # packed: initial and last have sequences for batch
    states: Array | None = None  # (batch, intervals, channels, state), contiguous, to be filled


def selective(
    place: Place,
    plan: SelectivePlan,
    call: SelectiveCall,
    time_step: int,
    shard: Shard | None = None,
    carry: Array | None = None,
) -> None:
    """Run a selective_scan; `time_step` is 1, or -1 for reverse.

    One launch a slice of the states, and where the plan cuts time into chunks two before them: the summaries of all
    slices, and a linear_scan over the chunks. As a `shard` of several it has these, too, and `carry` (batch, channels,
    state) takes what enters from other ranks; call.initial is what enters packed sequences, or there is no carry.
    """
    chosen(place, plan)
    batch, length, channels = call.u.shape
    state = call.A.shape[1]
    kind, tile = call.kind, plan.fit.tile
    if plan.chunks > 1 and plan.order.chunk % TILE_STEPS:
        raise ValueError(f"chunks must be whole tiles of {TILE_STEPS} steps, got {plan.order.chunk}")
    tiles = selective_tiles(kind)
    run, couple_run = max(x.abreast for x in tiles), max(x.couples for x in tiles)
    item, real, state_dtype = kind.item, np.dtype(kind.real), np.dtype(kind.state)

    def sequence(x: Array | None, item: str) -> tuple[int, ...]:
        return _NO_SEQUENCE if x is None else sequence_fields(place, x, item, time_step, kind, call.groups, run)

    scratch = None
    if plan.slices > 1:
        shape = (batch, channels, length) if kind.time_fast else (batch, length, channels)
        scratch = place.allocate(shape, real)
        scratch = scratch.transpose(0, 2, 1) if kind.time_fast else scratch
    summary_gate = seed = 0
    summarised = plan.chunks > 1 or shard is not None
    if summarised:
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
        couple_fields(place, x, varies, time_step, kind, couple_run)
        for x, varies in ((call.B, kind.time_B), (call.C, kind.time_C))
    ]
    packed_sequences = call.segments is not None and call.segments.offsets is not None
    states = [(None, None), (call.initial, call.last)]
    (initial, last), of_sequences = states if packed_sequences else reversed(states)
    own, initial = initial, initial if carry is None else carry
    marks, resets = None, None
    if call.segments is not None:
        enters = (call.initial if packed_sequences else initial) is not None
        leaves = call.last is not None
        marks = make_marks(place, call.segments, length, (batch,), enters=enters, leaves=leaves)
        if summarised:
            resets = place.allocate((batch, plan.chunks), np.bool_)
    strides = next((x.strides for x in (call.initial, carry) if x is not None), (0, 0, 0))

    def head(first: int, gate: int, seed: int) -> bytes:
        """The steps from `first` on, and where their summaries are.

        What enters later steps is not read, but that it is there: else the first gate would not count.
        """
        moved = ((fields[0] + first * fields[2], *fields[1:]) for fields in (*sequences, *couples))
        enters = call.A if first and initial is None else initial
        return struct.pack(
            SELECTIVE_HEAD,
            *(field for fields in moved for field in fields),
            *(0 if x is None else place.pointer(x) for x in (call.A, call.D, call.delta_bias, enters, last)),
            0 if call.states is None else place.pointer(call.states),
            *call.A.strides,
            *(0 if x is None else x.strides[0] for x in (call.D, call.delta_bias)),
            *strides,
            *(seed, gate, seed, batch, length - first, channels, state, call.groups),
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

    def launch(
        first_state: int = 0, *, summarise: bool, slices: int = 1, chunks: int = plan.chunks, first: int = 0,
        where: tuple[int, int, Array | None] = (summary_gate, seed, resets),
    ) -> None:  # fmt: skip
        segmented: tuple[int, ...] = (0,) * 6
        if marks is not None:
            own = (0 if x is None else place.pointer(x) for x in (*of_sequences, where[2]))
            ids = marks.ids and marks.ids + first * _ID_BYTES
            segmented = (marks.rows.start + first // _MARK_STEPS * _MARK_BYTES, marks.rows.rows[0] // _MARK_BYTES, ids,
                         *own)  # fmt: skip
        packed = head(first, *where[:2]) + struct.pack(
            SELECTIVE_TAIL, first_state, slices, plan.order.chunk, chunks, *limits, *single,
            *(ITEM_CODE[item_name(x)] if x is not None else 0 for x in (call.A, call.D, call.delta_bias, call.output)),
            not summarise and first_state > 0, not summarise and first_state + tile.slice < state, call.softplus,
            call.limits is not None, plain, *segmented,
        )  # fmt: skip
        shape = tiles[0] if summarise else tile
        blocks = slices * batch * call.groups * _ceil_div(channels // call.groups, shape.channels) * chunks
        name = selective_name(kind, shape, summarise)
        _start(place, selective_source(kind), name, blocks, shape.threads, packed, shape.shared_memory(kind))

    if summarised:
        slices = _ceil_div(state, tiles[0].slice)
        launch(summarise=True, slices=slices)
        if shard is not None and marks is not None and plan.chunks > 1:
            # The kernel leaves out the last chunk, which nobody in this row asks for, but where it is the only one.
            ends = [place.allocate((batch, 1, state, channels), state_dtype) for _ in range(2)]
            ends.append(place.allocate((batch, 1), np.bool_))
            where = place.pointer(ends[0]), place.pointer(ends[1]), ends[2]
            launch(summarise=True, slices=slices, chunks=1, first=(plan.chunks - 1) * plan.order.chunk, where=where)
            do(place, _put_chunk, [*summaries, resets], ends)
        scan_summaries(place, own, batch, plan.chunks, state, channels, state_dtype, summary_gate, seed, resets,
                       None if shard is None else (shard, time_step < 0, carry))  # fmt: skip
    for s in range(plan.slices):
        launch(s * tile.slice, summarise=False)


def _put_chunk(*arrays: Array) -> None:
    """The last chunk's part of each of the first half of the arrays is one of the second half."""
    half = len(arrays) // 2
    for all_chunks, last in zip(arrays[:half], arrays[half:], strict=True):
        all_chunks[:, -1:] = last


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
    resets: Array | None,
    linked: tuple[Shard, bool, Array | None] | None = None,
) -> None:
    """Turn the chunks' summaries (batch, chunks, state, channels) into the states that leave them, from `initial`.

    `resets` (batch, chunks), if there: whether a chunk forgets what enters it. `linked`: the shard, whether states go
    back in time, and where what enters from other ranks is put.
    """
    size = dtype.itemsize
    strides = (chunks * state * channels * size, channels * size, size)
    along = Rows(entering, state * channels * size, strides, dtype.name)

    def entering_rows(x: Array | None) -> Rows | None:
        return None if x is None else Rows(place.pointer(x), 0, (x.strides[0], x.strides[2], x.strides[1]))

    first = entering_rows(initial)
    segments = None
    if resets is not None:
        segments = Segments(None, Rows(place.pointer(resets), 1, (chunks, 0, 0), "bool"), None, reverse=False)
    call = LinearCall(
        dtype.name, replace(along, start=gate), along, first, along, None, chunks, (batch, state, channels), segments
    )
    if linked is not None:
        from ._shards import Link  # needs this module

        shard, reverse, carry = linked
        link = Link(place, shard, reverse, (state * channels * size, *strides[1:]), first, entering_rows(carry),
                    flags=((batch,), (1,)))  # fmt: skip
        flags = None if resets is None else (resets, (batch, chunks), 1)
        call = replace(call, initial=link.enter(call, flags, ""))
    linear(place, plan_linear_summaries(chunks, Lanes.ROWS), call)


_NO_SEQUENCE = (0, 0, 0, 0, 0, 0)


def _is_vector(start: int, along: int, others: tuple[int, ...], size: int, count: int, run: int) -> bool:
    """Whether an axis of `count` items falls into runs of `run`, each aligned for accesses of 16 bytes or its own."""
    lowest = start if along > 0 else start - (run - 1) * size
    bytes_ = min(16, run * size)
    return count % run == 0 and abs(along) == size and lowest % bytes_ == 0 and all(s % bytes_ == 0 for s in others)


def sequence_fields(
    place: Place, x: Array, item: str, time_step: int, kind: SelectiveKind, groups: int, run: int
) -> tuple[int, ...]:
    """A SequenceArray whose items move in runs of `run` along the fast axis."""
    batch, time, channel = x.strides
    length, channels = x.shape[1], x.shape[2]
    start = place.pointer(x) + (0 if time_step > 0 else (length - 1) * time)
    time *= time_step
    size = ITEM_BYTES[item]
    if kind.time_fast:
        vector = _is_vector(start, time, (batch, channel), size, length, run)
    else:
        vector = channel > 0 and _is_vector(start, channel, (batch, time), size, channels // groups, run)
    return start, batch, time, channel, size == 4, vector and item == kind.item


def couple_fields(
    place: Place, x: Array, varies: bool, time_step: int, kind: SelectiveKind, run: int
) -> tuple[int, ...]:
    """A CoupleArray whose items move in runs of `run` along the fast axis."""
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
        vector = _is_vector(start, time, (batch, group, state), size, length, run)
    else:
        vector = state > 0 and _is_vector(start, state, (batch, group, time), size, x.shape[3], run)
    return start, batch, time, group, 0, state, wide, vector and (kind.complex or item_name(x) == kind.item), code


# --- selective_state_update --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UpdateCall:
    """The arrays of one selective_state_update.

    B and C are (batch, groups, state) views.
    """

    kind: UpdateKind
    state: Array
    x: Array
    dt: Array
    A: Array
    B: Array
    C: Array
    D: Array | None
    z: Array | None
    dt_bias: Array | None
    slots: Array | None
    output: Array
    softplus: bool
    limits: tuple[float, float] | None

    def vector(self) -> bool:
        """Whether the kernel with vectors can take these arrays, as far as their types and strides go."""
        piece, states = self.kind.piece, self.A.shape[1]
        small = (self.x, self.dt, self.A, self.B, self.C, self.D, self.z, self.dt_bias, self.slots, self.output)
        types: list[tuple[Array, tuple[str, ...]]] = [(self.A, (self.kind.computed,))]
        types += [(x, ("complex64",) if x.dtype.kind == "c" else (self.kind.item,)) for x in (self.B, self.C)]
        types += [(x, (self.kind.item, self.kind.real)) for x in (self.D, self.dt_bias) if x is not None]
        return (
            states > 0
            and states % piece == 0
            and all(item_name(x) in items for x, items in types)
            and all(_in_pieces(x, piece) for x in (self.state, self.A, self.B, self.C))
            and all(_spans_31_bits(x.shape, x.strides) for x in small if x is not None)
            and _spans_31_bits(self.state.shape[1:], self.state.strides[1:])
        )


def _in_pieces(x: Array, piece: int) -> bool:
    """Whether the last axis comes in aligned pieces of so many items."""
    size = x.dtype.itemsize
    rest = zip(x.shape[:-1], x.strides[:-1], strict=True)
    aligned = _address(x) % (piece * size) == 0 and all(s % (piece * size) == 0 for n, s in rest if n > 1)
    return aligned and x.strides[-1] == size


def _spans_31_bits(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    axes = [(n, s) for n, s in zip(shape, strides, strict=True) if n > 1]
    return all(s >= 0 and n < 2**31 for n, s in axes) and sum((n - 1) * s for n, s in axes) < 2**31 - 16


def update(place: Place, plan: UpdatePlan, call: UpdateCall) -> None:
    """Run a selective_state_update, in one launch."""
    chosen(place, plan)
    x, state, kind = call.x, call.state, call.kind
    batch, channels = x.shape
    limits = call.limits or (0.0, 0.0)
    with np.errstate(over="ignore"):
        single = [np.float32(bound) for bound in limits]

    def strides(array: Array | None, axes: int) -> tuple[int, ...]:
        return (0,) * axes if array is None else tuple(array.strides)

    def code(array: Array | None) -> int:
        return 0 if array is None else ITEM_CODE[item_name(array)]

    arrays = (state, x, call.dt, call.A, call.B, call.C, call.D, call.z, call.dt_bias, call.slots, call.output)
    packed = struct.pack(
        UPDATE_ARGS, *(0 if array is None else place.pointer(array) for array in arrays),
        *state.strides, *x.strides, *call.dt.strides, *strides(call.z, 2), *call.output.strides, *call.A.strides,
        *call.B.strides, *call.C.strides, *strides(call.D, 1), *strides(call.dt_bias, 1), *strides(call.slots, 1),
        batch, channels, call.A.shape[1], channels // call.B.shape[1], state.shape[0], *limits, *single,
        *(array.dtype.itemsize == 4 for array in (call.dt, call.B, call.C)),
        *(code(array) for array in (call.A, call.D, call.dt_bias, call.output)),
        call.slots is not None and call.slots.dtype.itemsize == 8, call.softplus, call.limits is not None,
        plan.order.team.bit_length() - 1, plan.fit.columns.bit_length() - 1,
    )  # fmt: skip
    function = place.modules.get_function(update_source(kind.item, kind.state), update_name(kind))
    start(function, plan.fit.grid, (UPDATE_THREADS,), packed)
