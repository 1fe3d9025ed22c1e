"""From a problem's sizes and a device's limits to a plan: pure values, no arrays, no CuPy.

A plan has two halves. `order` fixes the association and so the bits; `fit` is how the work is laid on the chip, and
the bits do not depend on it. Everything that chooses stands here; `_launch` only obeys.

What is a template argument of a kernel, and what a run-time value:

    linear_scan      template   item type; lanes over rows or time; summarise or apply; with segments (mask, reset,
                     cu_seqlens) or not
                     run time   output type, strides, packs, direction, h0, last state, scalar gate, chunk, warps a row
    selective_scan   template   item type of u and z; type of the state; orientation; whether B and C vary in time;
                     tile; summarise or apply; with segments or not
                     run time   types of delta, B, C (float32 or u's), A, D, delta_bias, output; softplus, limits, D, z,
                     h0, last state, strides, vectors, direction, slice of the states, chunk
    selective_state_update
                     template   item type of x and z; item type of the state; vectors or single states
                     run time   types of dt, B, C (float32 or x's), A, D, dt_bias, output; softplus, limits, D, z,
                     slots, strides, lanes on a channel, channels a block
    causal_conv1d, rms_norm, matrix_vector
                     template   one row of matrix_vector's x, or up to 8
                     run time   all else: the item type chooses among instantiations once a thread
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from enum import Enum
from math import isqrt
from types import MappingProxyType
from typing import Any, TypeVar


class Schedule(Enum):
    """How time is laid on the chip."""

    SERIAL = "serial"  # time in the thread, lanes over rows or channels
    BLOCK = "block"  # segments in registers, warp scan, shared memory between warps
    SPLIT = "split"  # time across blocks: summaries, scan of the summaries, application


@dataclass(frozen=True)
class DeviceLimits:
    """What a plan needs to know of a device."""

    architecture: int  # 90 for compute capability 9.0
    multiprocessors: int
    shared_memory: int  # bytes a block can have


# Measured thresholds. Each row: value, and the measurement it comes from (bench/NOTES.md has the tables).
_H200 = "H200, 2026-11: "
THRESHOLDS: dict[str, tuple[int, str]] = {
    "linear: rows side by side from which lanes go over rows": (32, "the width of a warp"),
    "linear: length up to which contiguous rows go one a thread": (16, "a row of float32 is then two sectors at most"),
    "linear: warps a multiprocessor that fill it": (
        11,
        _H200 + "(8, 4096, 1536) axis 1: 1621, 2240, 3236, 3034 GB/s with 1, 2, 4, 8 warps on 32 rows (2.9 to 23 each)",
    ),
    "linear: warps a multiprocessor below which to split": (
        5,
        _H200 + "(1, 131072, 512) axis 1: 2145 GB/s split; a split moves 20 bytes for 12",
    ),
    "linear: warps a multiprocessor from which blocks are large": (
        32,
        _H200
        + "(8, 4096, 1536) axis 1, 12 warps each: 3.0 TB/s in 192 blocks of 8 warps, which 132 do not share evenly",
    ),
    "linear: blocks a multiprocessor in one pass": (
        2,
        _H200
        + "as many as are resident; in three launches and in one pass: 1.42, 1.08 ms 2**28 in a row, 0.351, 0.225 ms"
        " (1, 16, 4194304), 0.372, 0.266 ms (1, 131072, 512) axis 1",
    ),
    "linear: steps a chunk at least": (
        4096,
        _H200 + "(1000000, 2) axis 0: 46 us in chunks of 4096, of which three launches are most",
    ),
    "linear: warps a multiprocessor that a split aims at": (
        124,
        _H200 + "2**28 in a row: 2450 GB/s in 16384 chunks, 2408 in 4096",
    ),
    "selective: warps a multiprocessor below which time is split": (
        5,
        _H200 + "serial against split: 1.85, 1.68 ms with 3.9 warps (1, 65536, 2048, 16); 9.7 are enough",
    ),
    "selective: the same, of threads with more than 4 states": (
        3,
        _H200 + "serial against split: 0.627, 0.942 ms with 3.9 warps (2, 4096, 1024, 128)",
    ),
    "selective: the same, of packed sequences": (
        20,
        _H200 + "serial against split: 0.71, 0.57 ms with 4.8 warps, 64 sentences in (1, 11124, 5120, 16)",
    ),
    "selective: warps a multiprocessor that fill it": (
        6,
        _H200 + "2 against 4 states a thread: 0.310, 0.265 ms with 7.8 warps (8, 4096, 1024, 16), 0.126, 0.138 with 4.8"
        " (1, 2048, 5120, 16)",
    ),
    "selective: warps a multiprocessor that a split aims at": (
        16,
        _H200 + "as many as are resident; (1, 65536, 2048, 16): 1.78, 1.79, 1.82 ms in chunks of 2048, 4096, 8192",
    ),
    "selective: steps a chunk at least": (
        64,
        _H200 + "(1, 2048, 256, 16): 0.038, 0.031, 0.029 ms in chunks of 256, 128, 64",
    ),
    "selective: steps below which time is not split": (
        512,
        _H200 + "serial against split: 0.038, 0.023 ms with 1024 (1, 1024, 64, 16); not measured below",
    ),
    "selective: steps for each warp below which time is not split": (
        9,
        _H200 + "serial against split, 192 warps: 0.026, 0.042 ms with 512 steps (1, 512, 1536, 16), 0.054, 0.064 with"
        " 1536, 0.075, 0.067 with 2048",
    ),
    "selective: steps a chunk of packed sequences at most": (
        960,
        _H200 + "64 sentences in (1, 11124, 5120, 16): 0.553, 0.527, 0.551 ms in chunks of 704, 960, 1312; 64 and 8"
        " sequences in (1, 32768, 1024, 16): 0.42 and 0.52, 0.44 and 0.60 in chunks of 960, 2048",
    ),
    "selective backward: blocks a multiprocessor that are resident": (
        2,
        _H200 + "(1, 65536, 256, 16): 0.762, 0.788, 0.811 ms in chunks of 2016, 1024, 512",
    ),
    "selective backward: time of the summaries, in percent of the gradients'": (
        20,
        _H200 + "(1, 2048, 5120, 16), 1.2 blocks a multiprocessor: 0.559, 0.605, 0.498, 0.518 ms in 1 to 4 chunks",
    ),
    "selective backward: blocks a multiprocessor that summaries aim at": (
        4,
        _H200 + "(1, 65536, 256, 16): 0.734, 0.707, 0.716 ms with 1.9, 3.8, 7.5; (4, 4096, 1024, 64): 2.91, 2.71, 2.66"
        " with 1, 1.9, 3.9",
    ),
    "selective backward: steps that are summarised together at least": (
        256,
        _H200 + "(1, 65536, 256, 16) with 256: 0.726 ms; not measured below",
    ),
    "selective backward: blocks a multiprocessor at most": (
        16,
        _H200 + "(4096, 16, 1024, 16): 6.57, 5.19, 38.3 ms in 1, 63, 4096 parts of the batch",
    ),
    "selective backward: steps a chunk at least": (
        256,
        _H200 + "(1, 65536, 256, 16) in chunks of 512, 256: 0.81, 0.86 ms",
    ),
    "convolution: threads a multiprocessor that a cut of time aims at": (
        2048,
        _H200
        + "(1, 2048, 1536): 10.9, 8.8, 11.7, 18.3 us with 8, 16, 32, 64 steps a thread, 16 being as many as that gives",
    ),
    "convolution: steps a thread at most": (
        64,
        _H200 + "(8, 2048, 5120): 112, 109, 108, 107 us with 32, 64, 128, 256",
    ),
    "product: warps a multiprocessor that rows are shared for": (
        32,
        _H200 + "1, 2, 4, 8 warps a row: 19.3, 20.6, 22.6, 38.0 us (10240, 2560), 7.0, 4.6, 3.7, 3.1 (192, 5120)",
    ),
}


def _threshold(name: str) -> int:
    return THRESHOLDS[name][0]


# Steps from one saved state of selective_scan to the next. No plan, device or table changes it: shapes depend on it.
STATE_INTERVAL = 32

# What tests and tuning force: fields of an order or a fit, by name.
_forced: ContextVar[Mapping[str, Any]] = ContextVar("forced", default=MappingProxyType({}))


@contextlib.contextmanager
def forced(**choices: Any) -> Iterator[None]:
    """Force parts of every plan made inside, by name: schedule, lanes, chunk, one_pass, row_warps, warps, tile, ..."""
    token = _forced.set({**_forced.get(), **choices})
    try:
        yield
    finally:
        _forced.reset(token)


# What `watched` gives, if anything is.
_watching: ContextVar[list[Any] | None] = ContextVar("watching", default=None)


@contextlib.contextmanager
def watched() -> Iterator[list[Any]]:
    """The plans made inside, each as (name of its function, problem, device limits, plan).

    A call is planned once for all calls of its signature.
    """
    made: list[Any] = []
    token = _watching.set(made)
    try:
        yield made
    finally:
        _watching.reset(token)


Problem = TypeVar("Problem")
Plan = TypeVar("Plan")
_Planner = Callable[[Problem, DeviceLimits], Plan]


def _tunable(plan: _Planner[Problem, Plan]) -> _Planner[Problem, Plan]:
    """Planned as is forced, else in the order of the user's CUSCAN_PLANS and with the fit found on this chip."""
    name = plan.__name__

    @functools.wraps(plan)
    def tuned(problem: Problem, limits: DeviceLimits) -> Plan:
        made: Any
        if _forced.get():
            made = plan(problem, limits)
        else:
            from . import _tuned  # needs this module

            order = _tuned.order(name, problem)
            with forced(**order):
                made = plan(problem, limits)
            if fit := _tuned.fit(name, problem, limits, made.order):
                with forced(**{**_tuned.order_choices(problem, made.order), **fit}):
                    fitted: Any = plan(problem, limits)
                made = fitted if fitted.order == made.order else made  # a fit never changes a bit
        if (watching := _watching.get()) is not None:
            watching.append((name, problem, limits, made))
        return made  # type: ignore[no-any-return]

    return tuned


def _ceil_div(x: int, y: int) -> int:
    return -(-x // y)


def _round_up(x: int, multiple: int) -> int:
    return _ceil_div(x, multiple) * multiple


# --- linear_scan -------------------------------------------------------------------------------------------------

BLOCK_WARPS = 8  # kMostWarps in linear_tile.cuh
PASS_WARPS, PASS_STEPS, PASS_ROUNDS = 16, 24, (6, 5)  # kPassWarps, ... in linear_scan.cu, which has 5 for pairs
_WARPS = (1, 2, 4, 8)


class Lanes(Enum):
    """What the lanes of a warp lie along."""

    ROWS = "rows"
    TIME = "time"


@dataclass(frozen=True)
class LinearProblem:
    """Sizes of a linear_scan.

    time_fast: time is the axis whose items are closest in memory. pairs: two neighbouring rows may be one,
    as may_pair has it.
    """

    item_bytes: int
    state_bytes: int
    rows: int
    length: int
    time_fast: bool
    pairs: bool = False


@dataclass(frozen=True)
class LinearOrder:
    """What fixes the bits."""

    schedule: Schedule
    lanes: Lanes
    chunk: int  # steps a chunk; the whole length without split
    row_warps: int  # warps that share a row
    one_pass: bool = False  # a split whose chunks are tiles, and each looks back at those before it


@dataclass(frozen=True)
class LinearFit:
    """What the bits do not depend on."""

    warps: int  # a block


@dataclass(frozen=True)
class LinearPlan:
    """How a linear_scan runs, and why."""

    order: LinearOrder
    fit: LinearFit
    chunks: int
    reason: str


def linear_tile(problem: LinearProblem, lanes: Lanes, row_warps: int, *, one_pass: bool = False) -> int:
    """Steps that `row_warps` warps take at once."""
    if lanes is Lanes.ROWS:
        return row_warps * (PASS_STEPS if one_pass else _steps(problem.state_bytes))
    pairs = one_pass and _turns(problem, lanes)
    rounds = PASS_ROUNDS[pairs] if one_pass else _pack_rounds(problem.item_bytes)
    return row_warps * rounds * 32 * (16 // problem.item_bytes // (1 + pairs))


def _steps(state_bytes: int) -> int:
    """Steps of a thread in a tile; kSteps in linear_scan.cu."""
    return 2 if state_bytes == 16 else 64 // state_bytes


def _pack_rounds(item_bytes: int) -> int:
    """Packs of a thread in a tile; kRounds in linear_tile.cuh."""
    return 4 if item_bytes == 4 else 2


def linear_slots(item_bytes: int, state_bytes: int, lanes: Lanes) -> int:
    """Bytes of a thread's gates and inputs in a tile."""
    steps = _steps(state_bytes) * item_bytes
    return 2 * (steps if lanes is Lanes.ROWS else 16 * _pack_rounds(item_bytes))


def _turns(problem: LinearProblem, lanes: Lanes) -> bool:
    """Whether one pass takes two rows that take turns as one."""
    return problem.pairs and problem.item_bytes == 4 and lanes is Lanes.TIME


def pass_slots(lanes: Lanes, *, pairs: bool) -> int:
    """linear_slots of one pass."""
    return 2 * (4 * PASS_STEPS if lanes is Lanes.ROWS else 16 * PASS_ROUNDS[pairs])


def _pass_memory(problem: LinearProblem, lanes: Lanes, row_warps: int) -> int:
    """Bytes of shared memory of a block in one pass: slots, maps, and a KiB for what else there is."""
    maps = PASS_WARPS * 2 * problem.state_bytes * (2 * 32 if lanes is Lanes.ROWS else 1)
    return row_warps * 32 * pass_slots(lanes, pairs=_turns(problem, lanes)) + maps + 1024


def _pass_warps(problem: LinearProblem, lanes: Lanes, limits: DeviceLimits) -> int:
    """Warps of a block in one pass: as many as leave memory for a second one and tiles for half of the chip."""
    pairs = _turns(problem, lanes)
    teams = _ceil_div(problem.rows, 32 if lanes is Lanes.ROWS else 1 + pairs)
    blocks = _threshold("linear: blocks a multiprocessor in one pass")

    def fits(warps: int) -> bool:
        tiles = teams * _ceil_div(problem.length, linear_tile(problem, lanes, warps, one_pass=True))
        memory = blocks * (_pass_memory(problem, lanes, warps) + 1024)  # what the chip takes for itself
        return 2 * tiles >= limits.multiprocessors and memory <= limits.shared_memory

    most = BLOCK_WARPS if pairs else PASS_WARPS  # of pairs a thread has twice the registers
    return next((warps for warps in (PASS_WARPS, *reversed(_WARPS)) if warps <= most and fits(warps)), 1)


@_tunable
def plan_linear(problem: LinearProblem, limits: DeviceLimits) -> LinearPlan:
    """Choose the schedule of a linear_scan with at least one row and one step."""
    force = _forced.get()
    rows, length = problem.rows, problem.length
    beside = not problem.time_fast and rows >= _threshold("linear: rows side by side from which lanes go over rows")
    short = length <= _threshold("linear: length up to which contiguous rows go one a thread")
    schedule = force.get("schedule")
    lanes = force.get("lanes", Lanes.ROWS if beside or short or schedule is Schedule.SERIAL else Lanes.TIME)
    pairs = problem.pairs and problem.item_bytes == 2 and lanes is Lanes.ROWS
    teams = _ceil_div(rows, 64 if pairs else 32) if lanes is Lanes.ROWS else rows  # what row_warps warps share

    full = limits.multiprocessors * _threshold("linear: warps a multiprocessor that fill it")
    if schedule is None:
        least = limits.multiprocessors * _threshold("linear: warps a multiprocessor below which to split")
        long = length >= 2 * _threshold("linear: steps a chunk at least")
        split = teams * BLOCK_WARPS < least and long
    else:
        split = schedule is Schedule.SPLIT

    chunk, chunks = length, 1
    in_one = problem.item_bytes == 4 or (problem.item_bytes == 2 and lanes is Lanes.TIME)
    if split and in_one and force.get("one_pass", "chunk" not in force):
        row_warps = force.get("row_warps", _pass_warps(problem, lanes, limits))
        row_warps = min(row_warps, BLOCK_WARPS if _turns(problem, lanes) else PASS_WARPS)
        if (needed := _pass_memory(problem, lanes, row_warps)) > limits.shared_memory:
            raise ValueError(
                f"one pass with {row_warps} warps on a row needs {needed} bytes of shared memory a block, and this "
                f"device has {limits.shared_memory}"
            )
        chunk = linear_tile(problem, lanes, row_warps, one_pass=True)
        chunks = _ceil_div(length, chunk)
        reason = (
            f"split: {rows} rows would leave the chip idle, so blocks share their {chunks} tiles in one pass, "
            f"{row_warps} warp{'s' * (row_warps > 1)} on each"
        )
        order = LinearOrder(Schedule.SPLIT, lanes, chunk, row_warps, one_pass=True)
        return LinearPlan(order, LinearFit(row_warps), chunks, reason)
    if split:
        aim = limits.multiprocessors * _threshold("linear: warps a multiprocessor that a split aims at")
        chunk = max(_threshold("linear: steps a chunk at least"), _ceil_div(length * teams, aim))
        chunk = force.get("chunk", _round_up(chunk, linear_tile(problem, lanes, BLOCK_WARPS)))
        chunks = _ceil_div(length, chunk)
    # More warps on a row until the chip is full, or the row covered. A block of eight over rows takes the registers of
    # a multiprocessor, half of them over pairs, and one over time 64 KiB of shared memory and some.
    large = teams * chunks <= limits.multiprocessors if lanes is Lanes.ROWS else limits.shared_memory > 66 << 10
    row_warps = next(
        (w for w in _WARPS if teams * chunks * w >= full or linear_tile(problem, lanes, w) >= chunk), BLOCK_WARPS
    )
    row_warps = min(row_warps, BLOCK_WARPS if large or pairs else BLOCK_WARPS // 2)
    row_warps = min(force.get("row_warps", 1 if schedule is Schedule.SERIAL else row_warps), BLOCK_WARPS)
    if schedule is None:
        serial = lanes is Lanes.ROWS and row_warps == 1
        schedule = Schedule.SPLIT if split else Schedule.SERIAL if serial else Schedule.BLOCK

    shape = f"{row_warps} warp{'s' * (row_warps > 1)} on each {'32 rows' if lanes is Lanes.ROWS else 'row'}"
    if split:
        reason = f"split: {rows} rows would leave the chip idle, so time is cut into {chunks} chunks, {shape}"
    else:
        reason = f"{schedule.value}: lanes over {lanes.value}, {shape}"
    # Small blocks spread evenly; many large ones cost fewer launches of blocks.
    many = limits.multiprocessors * _threshold("linear: warps a multiprocessor from which blocks are large")
    warps = max(BLOCK_WARPS // 2, row_warps) if teams * chunks * row_warps >= many else row_warps
    order = LinearOrder(schedule, lanes, chunk, row_warps)
    return LinearPlan(order, LinearFit(force.get("warps", warps)), chunks, reason)


def with_summaries(plan: LinearPlan, problem: LinearProblem, limits: DeviceLimits) -> LinearPlan:
    """The plan of a caller that needs the summaries of chunks: three launches in the place of one pass."""
    if not plan.order.one_pass:
        return plan
    with forced(schedule=Schedule.SPLIT, lanes=plan.order.lanes, one_pass=False):
        return plan_linear(problem, limits)


def plan_linear_summaries(chunks: int, lanes: Lanes) -> LinearPlan:
    """The scan over the chunks of a split, on summaries that lie as the lanes do: short, and never split again."""
    row_warps = BLOCK_WARPS // 2 if lanes is Lanes.TIME else 1
    order = LinearOrder(Schedule.SERIAL if row_warps == 1 else Schedule.BLOCK, lanes, chunks, row_warps)
    return LinearPlan(order, LinearFit(max(row_warps, 4)), 1, "over the summaries of a split")


# --- selective_scan ----------------------------------------------------------------------------------------------


ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16}


@dataclass(frozen=True)
class SelectiveKind:
    """What a selective_scan's module is specialised for: types, orientation, and which of B and C vary in time."""

    item: str  # of u and z
    complex: bool
    time_fast: bool  # a thread's items lie along time ("bdl"), not along channels ("bld")
    time_B: bool
    time_C: bool
    states: int  # a thread's; see states_a_thread
    segmented: bool = False  # mask, reset or cu_seqlens; where the kind is not the usual one, always

    def __post_init__(self) -> None:
        if not is_usual(self.item, self.complex, self.time_B and self.time_C):
            object.__setattr__(self, "segmented", True)

    @property
    def state(self) -> str:
        """Item type of the state."""
        return "complex64" if self.complex else self.real

    @property
    def real(self) -> str:
        """Accumulation type of what is never complex."""
        return "float64" if self.item == "float64" else "float32"

    @property
    def item_bytes(self) -> int:
        """Bytes of an item of u."""
        return ITEM_BYTES[self.item]

    @property
    def real_bytes(self) -> int:
        """Bytes of `real`."""
        return ITEM_BYTES[self.real]

    @property
    def state_bytes(self) -> int:
        """Bytes of `state`."""
        return ITEM_BYTES[self.state]


TILE_STEPS = 32  # kTileSteps in selective_tile.cuh


@dataclass(frozen=True)
class SelectiveTile:
    """One instantiation's shape: states a thread, groups of states a warp, warps a block."""

    states: int
    groups: int
    warps: int
    blocks: int  # blocks a multiprocessor that the registers are bounded for

    @property
    def abreast(self) -> int:
        """Channels a warp, and items of a sequence that a thread moves together."""
        return 32 // self.groups

    @property
    def channels(self) -> int:
        """Channels a block."""
        return self.warps * self.abreast

    @property
    def threads(self) -> int:
        """Threads a block."""
        return 32 * self.warps

    @property
    def slice(self) -> int:
        """States a block."""
        return self.states * self.groups

    @property
    def couples(self) -> int:
        """Items of B or C that a thread moves together."""
        return self.slice // self.warps

    def shared_memory(self, kind: SelectiveKind) -> int:
        """Bytes of SelectiveTile::Shared in selective_tile.cuh; selective_scan.cu asserts them."""
        item, real, state = kind.item_bytes, kind.real_bytes, kind.state_bytes
        drive = 2 * TILE_STEPS * (self.channels + 1) * 2 * real
        couples = [2 * (TILE_STEPS if varies else 1) * self.slice * state for varies in (kind.time_B, kind.time_C)]
        sums = 2 * TILE_STEPS * (self.channels + self.abreast) * real
        marks = 16 * (8 if kind.segmented else 1)
        slots = 6 * TILE_STEPS * self.channels * item
        couple_slots = 2 * TILE_STEPS * self.slice * (state if kind.complex else item)
        parts = (drive, *couples, sums, *2 * [self.channels * real], marks, slots, couple_slots)
        return sum(_round_up(part, 16) for part in parts)


_TILES = {
    1: (SelectiveTile(1, 8, 4, 4),),
    4: (SelectiveTile(4, 4, 4, 4), SelectiveTile(2, 8, 4, 4)),
    8: (SelectiveTile(8, 8, 4, 3),),
    16: (SelectiveTile(16, 8, 4, 2),),
}
_OTHER_TILES = {1: (SelectiveTile(1, 8, 2, 4),), 4: (SelectiveTile(4, 4, 2, 4),)}


def states_a_thread(state_item: str, both_vary: bool, state: int) -> int:
    """States that a thread has: a divisor of the state, so that all of them exist."""
    if state > 0 and state_item == "float32" and both_vary:
        for many in (16, 8):
            if state % (8 * many) == 0:
                return many
    return 4 if state % 4 == 0 else 1


def fitting_kind(kind: SelectiveKind, limits: DeviceLimits) -> SelectiveKind:
    """The kind itself, or with fewer states a thread where a chip has too little shared memory for its tile."""
    for states in (16, 8, 4, 1):
        if states <= kind.states:
            smaller = replace(kind, states=states)
            if selective_tiles(smaller)[0].shared_memory(kind) <= limits.shared_memory:
                return smaller
    return kind


def is_usual(item: str, is_complex: bool, both_vary: bool) -> bool:
    """Whether there are kernels whose pairs lie along time, and kernels without segments.

    The others read "bdl" one item at a time, and look for marks where there are none.
    """
    return item != "float64" and not is_complex and both_vary


def selective_tiles(kind: SelectiveKind) -> tuple[SelectiveTile, ...]:
    """The instantiations of a kind, those that fit every chip first. Summaries use the first."""
    usual = is_usual(kind.item, kind.complex, kind.time_B and kind.time_C)
    return (_TILES if usual else _OTHER_TILES)[kind.states]


def selective_kinds() -> list[SelectiveKind]:
    """Every kind there is."""
    kinds = []
    for item in ("float32", "bfloat16", "float16", "float64"):
        for is_complex in (False, True) if item != "float64" else (False,):
            for time_B in (True, False):
                for time_C in (True, False):
                    usual = is_usual(item, is_complex, time_B and time_C)
                    for time_fast in (False, True) if usual else (False,):
                        kinds += [
                            SelectiveKind(item, is_complex, time_fast, time_B, time_C, states, segmented)
                            for states in (_TILES if usual else _OTHER_TILES)
                            for segmented in (False, *[True] * usual)
                        ]
    return kinds


@dataclass(frozen=True)
class SelectiveProblem:
    """Kind and sizes of a selective_scan."""

    kind: SelectiveKind
    batch: int
    length: int
    channels: int
    state: int
    groups: int
    sequences: int = 1  # packed in a row


@dataclass(frozen=True)
class SelectiveOrder:
    """What fixes the bits."""

    schedule: Schedule
    chunk: int  # steps a chunk; the whole length without split
    states: int  # states a thread, which it adds into y one after another
    groups: int  # of them, whose sums are added by halves


@dataclass(frozen=True)
class SelectiveFit:
    """What the bits do not depend on."""

    tile: SelectiveTile


@dataclass(frozen=True)
class SelectivePlan:
    """How a selective_scan runs, and why."""

    order: SelectiveOrder
    fit: SelectiveFit
    chunks: int
    slices: int  # launches that the states take, one after another
    reason: str


@_tunable
def plan_selective(problem: SelectiveProblem, limits: DeviceLimits) -> SelectivePlan:
    """Choose the schedule of a selective_scan of which no size is 0."""
    force = _forced.get()
    schedule = force.get("schedule")
    tiles = selective_tiles(problem.kind)
    least = _threshold("selective: steps a chunk at least")
    warps = _warps(problem, tiles[0])
    wave = limits.multiprocessors * _threshold("selective: warps a multiprocessor that a split aims at") // warps
    chunk = _ceil_div(problem.length, max(1, min(wave, problem.length // least)))  # a whole wave, and no more
    if problem.sequences > 1:  # more chunks, as they are uneven: they begin where sequences do
        chunk = min(chunk, _threshold("selective: steps a chunk of packed sequences at most"))
    chunk = force.get("chunk", _round_up(chunk, TILE_STEPS))
    chunks = _ceil_div(problem.length, chunk)
    if schedule is None:
        enough = _threshold("selective: warps a multiprocessor below which time is split")
        if problem.sequences > 1:
            enough = _threshold("selective: the same, of packed sequences")
        elif tiles[-1].states > 4:
            enough = _threshold("selective: the same, of threads with more than 4 states")
        few = _warps(problem, tiles[-1]) < limits.multiprocessors * enough
        steps = _threshold("selective: steps for each warp below which time is not split") * warps
        steps = max(steps, _threshold("selective: steps below which time is not split"))
        long = problem.length >= steps or problem.sequences > 1 or "chunk" in force
        schedule = Schedule.SPLIT if few and long and chunks > 1 else Schedule.SERIAL
    if schedule is Schedule.SPLIT:
        reason = f"split: {warps} warps over batch and channels leave the chip idle, so time is in {chunks} chunks"
    elif schedule is Schedule.SERIAL:
        chunk, chunks, reason = problem.length, 1, "serial: time in the thread"
    else:
        raise ValueError(f"selective_scan has the schedules serial and split, got {schedule.value}")
    full = limits.multiprocessors * _threshold("selective: warps a multiprocessor that fill it")
    tile = next((tile for tile in tiles if _warps(problem, tile) * chunks >= full), tiles[-1])
    if force.get("tile") in tiles:
        tile = force["tile"]
    slices = _ceil_div(problem.state, tile.slice)
    order = SelectiveOrder(schedule, chunk, tile.states, tile.groups)
    return SelectivePlan(order, SelectiveFit(tile), chunks, slices, reason)


def _warps(problem: SelectiveProblem, tile: SelectiveTile) -> int:
    blocks = problem.batch * problem.groups * _ceil_div(problem.channels // problem.groups, tile.channels)
    return blocks * tile.warps


# --- selective_scan_vjp ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BackwardTile:
    """One instantiation's shape. A warp has 4 groups of states."""

    states: int  # a thread
    channels: int  # a block
    steps: int  # whose gates and states are in registers

    @property
    def threads(self) -> int:
        """Threads a block."""
        return 4 * self.channels

    @property
    def slice(self) -> int:
        """States a block."""
        return 4 * self.states

    @property
    def run(self) -> int:
        """Neighbouring items of a sequence that a thread moves."""
        return STATE_INTERVAL * self.channels // self.threads

    @property
    def couple_run(self) -> int:
        """Neighbouring items of B or C that a thread moves."""
        return STATE_INTERVAL * self.slice // self.threads

    def _slots(self, kind: SelectiveKind, arrays: int, more: int) -> int:
        """Bytes of the slots of so many arrays, of `more` that have one set of them, and of one of B and C."""
        sets = arrays * (2 if kind.item_bytes <= 2 else 1) + more
        couple = STATE_INTERVAL * self.slice * (kind.state_bytes if kind.complex else kind.item_bytes)
        return sets * STATE_INTERVAL * self.channels * kind.item_bytes + couple

    def summary_memory(self, kind: SelectiveKind) -> int:
        """Bytes of BackwardTile::Summary in selective_scan_backward.cu, which asserts them."""
        padding = 2 * 1 + 9 if kind.time_fast else 2 * 8 + 8  # of drive and dy
        sequences = STATE_INTERVAL * (3 * self.channels + padding) + self.channels
        item, inputs = _round_up(5 * 8 + 8 * 4, 16), self.threads * (6 * 8 + 4)
        return item + inputs + sequences * kind.real_bytes + self._orders(kind, kind.time_C) + self._slots(kind, 2, 1)

    def _orders(self, kind: SelectiveKind, varies: bool) -> int:
        """Bytes of B or C in all orders."""
        return self.states * (STATE_INTERVAL * self.slice * kind.state_bytes + 32) if varies else 16

    def shared_memory(self, kind: SelectiveKind) -> int:
        """Bytes of BackwardTile::Shared, which holds Summary."""
        real, state = kind.real_bytes, kind.state_bytes
        row, more = (9, 18) if kind.time_fast else (8, 16)
        sums = 2 * (STATE_INTERVAL * (self.channels + row) + more) + self.channels
        couples = sum(STATE_INTERVAL if varies else 1 for varies in (kind.time_B, kind.time_C))
        couples *= (self.threads // 32) * self.slice
        parts = (STATE_INTERVAL // 2 if state == 4 else STATE_INTERVAL) // self.steps  # kParts
        entering = (parts + 1) * self.threads * self.states
        totals = self.threads * (self.run + 2 * (1 if kind.time_fast else self.run))
        gradients = 5 * self.threads * 8
        of_thread = self.threads if real > 4 else 1  # dA, next_saved and constant_C
        gradients += _round_up(of_thread * self.states * state, 16) + _round_up(of_thread * 8, 16)
        gradients += _round_up((1 if kind.time_C else of_thread) * self.states * state, 16)
        own = (sums + totals) * real + (couples + entering) * state + gradients
        return self.summary_memory(kind) + own + self._orders(kind, kind.time_B) + self._slots(kind, 1, 0)


def backward_tile(kind: SelectiveKind) -> BackwardTile:
    """The instantiation of a kind: gates and states of a tile's steps fit a thread's registers."""
    return BackwardTile(4, 32, 4) if kind.state == "float32" else BackwardTile(2, 16, 4)


def backward_kind(kind: SelectiveKind) -> SelectiveKind:
    """The kind whose kernels do the gradients of another: the states a thread has do not depend on their number."""
    return replace(kind, states=4 if kind.state == "float32" else 2)


@dataclass(frozen=True)
class BackwardOrder:
    """What fixes the bits."""

    chunk: int  # steps a chunk, whole intervals
    summary: int  # steps of a chunk that are summarised together, a divisor of it
    part: int  # rows of the batch whose sums of dA, dD and d(delta_bias) are one
    channels: int  # channels whose sums of dB and dC are one


@dataclass(frozen=True)
class BackwardPlan:
    """How a selective_scan_vjp runs, and why."""

    order: BackwardOrder
    chunks: int
    parts: int
    reason: str


@_tunable
def plan_backward(problem: SelectiveProblem, limits: DeviceLimits) -> BackwardPlan:
    """Choose chunks and parts of the batch for a problem without a size of 0."""
    force = _forced.get()
    tile = backward_tile(problem.kind)
    if tile.shared_memory(problem.kind) > limits.shared_memory:
        raise ValueError(
            f"selective_scan_vjp needs {tile.shared_memory(problem.kind)} bytes of shared memory a block for "
            f"{problem.kind.item}, and this device has {limits.shared_memory}"
        )
    tiles = problem.groups * _ceil_div(problem.channels // problem.groups, tile.channels)
    resident = limits.multiprocessors * _threshold("selective backward: blocks a multiprocessor that are resident")
    most = limits.multiprocessors * _threshold("selective backward: blocks a multiprocessor at most")
    parts = force.get("parts", min(problem.batch, max(1, most // tiles)))
    part = _ceil_div(problem.batch, parts)
    parts = _ceil_div(problem.batch, part)
    blocks = tiles * parts
    summaries = _threshold("selective backward: time of the summaries, in percent of the gradients'") / 100

    def cost(chunks: int) -> float:  # the rounds in which blocks are resident, and the summaries of all but one chunk
        return (_ceil_div(blocks * chunks, resident) + summaries * (chunks - 1)) / chunks

    chunk = problem.length
    if "chunk" in force:
        chunk = min(chunk, _round_up(force["chunk"], STATE_INTERVAL))
    else:
        longest = problem.length // _threshold("selective backward: steps a chunk at least")
        several = min(longest, max(8, resident // blocks), most // blocks)
        chunks = min(range(1, max(1, several) + 1), key=cost)
        chunk = min(chunk, _round_up(_ceil_div(problem.length, chunks), STATE_INTERVAL))
    chunks, summary = _ceil_div(problem.length, chunk), chunk
    if chunks > 1:
        aim = limits.multiprocessors * _threshold("selective backward: blocks a multiprocessor that summaries aim at")
        least = _threshold("selective backward: steps that are summarised together at least")
        pieces = min(_ceil_div(aim, blocks * (chunks - 1)), max(1, chunk // least))
        summary = _round_up(_ceil_div(chunk, force.get("pieces", pieces)), STATE_INTERVAL)
        chunk = summary * _ceil_div(chunk, summary)
        chunks = _ceil_div(problem.length, chunk)
    cut = f"time is cut into {chunks} chunks" if chunks > 1 else "time in the thread"
    reason = f"{blocks} blocks over batch and channels, {part} rows of the batch each: {cut}"
    return BackwardPlan(BackwardOrder(chunk, summary, part, tile.channels), chunks, parts, reason)


# --- selective_state_update --------------------------------------------------------------------------------------

UPDATE_THREADS = 128  # kUpdateThreads in selective_state_update.cu
UPDATE_ROWS = 4  # kRows: rows of the batch that a team of lanes works on at once, and its least size
_LARGEST_GRID = (2**31 - 1, 65535)


@dataclass(frozen=True)
class UpdateKind:
    """What a selective_state_update's kernel is specialised for: types, and whether states come in vectors."""

    item: str  # of x and z
    state: str  # of the state in memory
    vector: bool

    @property
    def real(self) -> str:
        """Accumulation type of what is never complex."""
        return "float64" if self.item == "float64" else "float32"

    @property
    def computed(self) -> str:
        """Item type of the state as computed."""
        return "complex64" if self.state == "complex64" else self.real

    @property
    def piece(self) -> int:
        """States a lane has at once."""
        return 16 // ITEM_BYTES[self.computed]

    @property
    def blocks(self) -> int:
        """Blocks a multiprocessor that the registers are bounded for."""
        return 6 if self.computed == "float32" else 5


def update_kinds() -> list[UpdateKind]:
    """Every kind there is."""
    small = ("float32", "bfloat16", "float16")
    types = [*((item, state) for item in small for state in (*small, "complex64")), ("float64", "float64")]
    return [UpdateKind(*each, vector) for each in types for vector in (True, False)]


@dataclass(frozen=True)
class UpdateProblem:
    """Kind and sizes of a selective_state_update."""

    kind: UpdateKind
    batch: int
    channels: int
    state: int


@dataclass(frozen=True)
class UpdateOrder:
    """What fixes the bits."""

    team: int  # lanes on a channel, a power of two


@dataclass(frozen=True)
class UpdateFit:
    """What the bits do not depend on."""

    columns: int  # channels side by side in a block, a power of two
    grid: tuple[int, int]  # over channels, over rows of the batch


@dataclass(frozen=True)
class UpdatePlan:
    """How a selective_state_update runs, and why."""

    order: UpdateOrder
    fit: UpdateFit
    reason: str


def plan_update(problem: UpdateProblem) -> UpdatePlan:
    """Lay out a selective_state_update with at least one row and one channel."""
    team = min(max(_power_of_two(_ceil_div(problem.state, problem.kind.piece)), UPDATE_ROWS), 32)
    teams = UPDATE_THREADS // team
    columns = min(teams, _power_of_two(problem.channels))
    rows = UPDATE_ROWS * teams // columns
    blocks = _ceil_div(problem.channels, columns), _ceil_div(problem.batch, rows)
    grid = _forced.get().get("grid", (min(blocks[0], _LARGEST_GRID[0]), min(blocks[1], _LARGEST_GRID[1])))
    how = "vectors of" if problem.kind.vector else "single"
    reason = f"{team} lanes on a channel, {how} states; a block has {columns} channels of {rows} rows"
    return UpdatePlan(UpdateOrder(team), UpdateFit(columns, grid), reason)


def _power_of_two(x: int) -> int:
    """The least that is not below x."""
    return 1 << max(x - 1, 0).bit_length()


# --- what stands around a scan -------------------------------------------------------------------------------------

CONV_THREADS = 128  # a block
CONV_BLOCKS, CONV_BACKWARD_BLOCKS = 5, 4  # a multiprocessor, that the registers are bounded for
CONV_WIDTH = 4  # kConvWidth in causal_conv1d.cuh: the width that comes in vectors
CONV_STEPS = 8  # kConvSteps in causal_conv1d.cu: what a thread has under way
NORM_ITEMS = 4  # kNormItems in rms_norm.cuh: columns a thread
NORM_THREADS = 1024  # a block at most
NORM_SUMS = 32  # partial sums that are added at once
PRODUCT_WARPS = 8  # kProductWarps in matrix_vector.cu
MOST_PRODUCTS = 8  # rows of x at most


@dataclass(frozen=True)
class ConvPlan:
    """How a causal_conv1d or its backward runs, and why. Only the backward's bits depend on it."""

    chunk: int  # steps a thread
    part: int  # rows of the batch a thread
    reason: str


def plan_conv(batch: int, length: int, groups: int, limits: DeviceLimits) -> ConvPlan:
    """Cut time; `groups` threads stand side by side over the channels."""
    aim = limits.multiprocessors * _threshold("convolution: threads a multiprocessor that a cut of time aims at")
    most = _threshold("convolution: steps a thread at most")
    chunk = min(max(_round_up(batch * length * groups // aim, CONV_STEPS), 2 * CONV_STEPS), most)
    chunk = max(_forced.get().get("conv_chunk", chunk), CONV_WIDTH - 1)  # as few as a thread may have
    return ConvPlan(chunk, 1, f"a thread has {chunk} steps")


def plan_conv_backward(batch: int, length: int, groups: int, limits: DeviceLimits) -> ConvPlan:
    """Cut batch and time into at most as many parts as are resident at once: each has its sums in scratch."""
    parts = max(1, limits.multiprocessors * CONV_BACKWARD_BLOCKS * CONV_THREADS // groups)
    part = _ceil_div(batch, min(batch, parts))
    chunk = _ceil_div(length, max(1, parts // _ceil_div(batch, part)))
    chunk = max(_forced.get().get("conv_chunk", max(chunk, 4 * CONV_STEPS)), CONV_WIDTH - 1)
    part = _forced.get().get("conv_part", part)
    return ConvPlan(chunk, part, f"a thread has {chunk} steps of {part} rows")


@dataclass(frozen=True)
class NormPlan:
    """How an rms_norm or its backward runs, and why. It fixes the bits."""

    threads: int  # a row
    parts: int  # that the rows fall into, in the backward: each has a sum for the weight
    reason: str


def plan_norm(rows: int, width: int, limits: DeviceLimits) -> NormPlan:
    """A block on each row; a multiple of NORM_SUMS parts, where there are so many rows."""
    threads = min(_round_up(_ceil_div(width, NORM_ITEMS), 32), NORM_THREADS)
    aim = _round_up(limits.multiprocessors * (2048 // threads), NORM_SUMS)
    parts = min(rows, aim) // NORM_SUMS * NORM_SUMS or rows
    parts = _forced.get().get("norm_parts", parts)
    return NormPlan(threads, parts, f"{threads} threads on a row")


@dataclass(frozen=True)
class ProductPlan:
    """How a matrix_vector runs, and why. It fixes the bits."""

    row_warps: int  # on a row of the matrix, a power of two
    reason: str


def plan_product(rows: int, pieces: int, limits: DeviceLimits) -> ProductPlan:
    """More warps on a row until there are enough, or each lane has one piece."""
    aim = limits.multiprocessors * _threshold("product: warps a multiprocessor that rows are shared for")
    row_warps = 1
    while row_warps < PRODUCT_WARPS and rows * row_warps < aim and pieces > 32 * row_warps:
        row_warps *= 2
    row_warps = _forced.get().get("product_warps", row_warps)
    return ProductPlan(row_warps, f"{row_warps} warp{'s' * (row_warps > 1)} on a row")


# --- NumPy -------------------------------------------------------------------------------------------------------


def plan_segments(rows: int, length: int) -> int:
    """Segments that reference.py cuts time into: 1 is the plain loop over time.

    The three phases do about twice the arithmetic in 2 sqrt(length) steps instead of length, so they win where a
    step is too small to fill NumPy's loops.
    """
    if "segments" in _forced.get():
        return int(_forced.get()["segments"])
    return isqrt(length) if rows <= 2048 and length >= 64 else 1
