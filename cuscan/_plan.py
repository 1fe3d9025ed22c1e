"""From a problem's sizes and a device's limits to a plan: pure values, no arrays, no CuPy.

A plan has two halves. `order` fixes the association and so the bits; `fit` is how the work is laid on the chip, and
the bits do not depend on it. Everything that chooses stands here; `_launch` only obeys.

What is a template argument of a kernel, and what a run-time value:

    linear_scan      template   item type; lanes over rows or time; summarise or apply
                     run time   output type, strides, packs, direction, h0, last state, scalar gate, chunk, warps a row
    selective_scan   template   item type of u and z; type of the state; orientation; whether B and C vary in time;
                     tile; summarise or apply
                     run time   types of delta, B, C (float32 or u's), A, D, delta_bias, output; softplus, limits, D, z,
                     h0, last state, strides, vectors, direction, slice of the states, chunk
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from math import isqrt
from typing import Any



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


# Measured thresholds. Each row: value, and the measurement it comes from (bench/NOTES.md).
THRESHOLDS: dict[str, tuple[int, str]] = {
    "linear: rows side by side from which lanes go over rows": (32, "a warp's width"),
    "linear: length up to which contiguous rows go one a thread": (16, "to be measured"),
    "linear: warps a multiprocessor that fill it": (16, "to be measured"),
    "linear: warps a multiprocessor below which to split": (8, "to be measured"),
    "linear: tiles a chunk at least": (2, "to be measured"),
    "selective: blocks a multiprocessor, in percent, from which time is not split": (50, "to be measured"),
    "selective: blocks a multiprocessor that a split aims at": (2, "to be measured"),
    "selective: steps a chunk at least": (256, "to be measured"),
}


def _threshold(name: str) -> int:
    return THRESHOLDS[name][0]


# What tests and tuning force: fields of an order or a fit, by name.
_forced: ContextVar[dict[str, Any]] = ContextVar("forced", default={})


@contextlib.contextmanager
def forced(**choices: Any) -> Iterator[None]:
    """Force parts of every plan made inside: schedule, lanes, chunk, row_warps, warps, tile, segments."""
    token = _forced.set({**_forced.get(), **choices})
    try:
        yield
    finally:
        _forced.reset(token)


def _ceil_div(x: int, y: int) -> int:
    return -(-x // y)


def _round_up(x: int, multiple: int) -> int:
    return _ceil_div(x, multiple) * multiple


# --- linear_scan -------------------------------------------------------------------------------------------------

BLOCK_WARPS = 8  # kMostWarps in linear_scan.cu
_WARPS = (1, 2, 4, 8)


class Lanes(Enum):
    """What the lanes of a warp lie along."""

    ROWS = "rows"
    TIME = "time"


@dataclass(frozen=True)
class LinearProblem:
    """Sizes of a linear_scan; time_fast: time is the axis whose items are closest in memory."""

    item_bytes: int
    state_bytes: int
    rows: int
    length: int
    time_fast: bool


@dataclass(frozen=True)
class LinearOrder:
    """What fixes the bits."""

    schedule: Schedule
    lanes: Lanes
    chunk: int  # steps a chunk; the whole length without split
    row_warps: int  # warps that share a row


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


def linear_tile(problem: LinearProblem, lanes: Lanes, row_warps: int) -> int:
    """Steps that `row_warps` warps take at once."""
    if lanes is Lanes.ROWS:
        return row_warps * 32 // problem.state_bytes  # kSteps steps a thread
    items = 16 // problem.item_bytes  # a pack
    return row_warps * (2 if items == 8 else 4) * 32 * items  # kRounds packs a thread


def plan_linear(problem: LinearProblem, limits: DeviceLimits) -> LinearPlan:
    """Choose the schedule of a linear_scan with at least one row and one step."""
    force = _forced.get()
    rows, length = problem.rows, problem.length
    beside = not problem.time_fast and rows >= _threshold("linear: rows side by side from which lanes go over rows")
    short = length <= _threshold("linear: length up to which contiguous rows go one a thread")
    schedule = force.get("schedule")
    lanes = force.get("lanes", Lanes.ROWS if beside or short or schedule is Schedule.SERIAL else Lanes.TIME)
    teams = _ceil_div(rows, 32) if lanes is Lanes.ROWS else rows  # what row_warps warps share

    # More warps on a row until the row is covered, or for rows side by side until the chip is full.
    full = limits.multiprocessors * _threshold("linear: warps a multiprocessor that fill it")
    row_warps = next(
        (w for w in _WARPS if linear_tile(problem, lanes, w) >= length or (lanes is Lanes.ROWS and teams * w >= full)),
        BLOCK_WARPS,
    )
    if schedule is Schedule.SERIAL:
        row_warps = 1
    row_warps = force.get("row_warps", row_warps)

    tile = linear_tile(problem, lanes, row_warps)
    few = teams * row_warps < limits.multiprocessors * _threshold("linear: warps a multiprocessor below which to split")
    least = tile * _threshold("linear: tiles a chunk at least")
    if schedule is None:
        serial = lanes is Lanes.ROWS and row_warps == 1
        schedule = Schedule.SPLIT if few and length >= 2 * least else Schedule.SERIAL if serial else Schedule.BLOCK

    shape = f"{row_warps} warp{'s' * (row_warps > 1)} on each {'32 rows' if lanes is Lanes.ROWS else 'row'}"
    if schedule is Schedule.SPLIT:
        wanted = max(1, min(_ceil_div(full, teams * row_warps), length // least))
        chunk = force.get("chunk", _round_up(_ceil_div(length, wanted), tile))
        chunks = _ceil_div(length, chunk)
        reason = f"split: {shape} would leave the chip idle, so time is cut into {chunks} chunks"
    else:
        chunk, chunks = length, 1
        reason = f"{schedule.value}: lanes over {lanes.value}, {shape}"
    warps = BLOCK_WARPS if teams * chunks * row_warps >= full else row_warps
    order = LinearOrder(schedule, lanes, chunk, row_warps)
    return LinearPlan(order, LinearFit(force.get("warps", warps)), chunks, reason)


def plan_linear_summaries(chunks: int, lanes: Lanes) -> LinearPlan:
    """The scan over the chunks of a split, on summaries that lie as the lanes do: short, and never split again."""
    row_warps = BLOCK_WARPS if lanes is Lanes.TIME else 1
    order = LinearOrder(Schedule.SERIAL if row_warps == 1 else Schedule.BLOCK, lanes, chunks, row_warps)
    return LinearPlan(order, LinearFit(max(row_warps, 4)), 1, "over the summaries of a split")


# --- selective_scan ----------------------------------------------------------------------------------------------


_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex64": 8}


@dataclass(frozen=True)
class SelectiveKind:
    """What a selective_scan's module is specialised for: types, orientation, and which of B and C vary in time."""

    item: str  # of u and z
    complex: bool
    time_fast: bool  # pairs of a tile lie along time ("bdl"), not along channels ("bld")
    time_B: bool
    time_C: bool

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
        return _BYTES[self.item]

    @property
    def real_bytes(self) -> int:
        """Bytes of `real`."""
        return _BYTES[self.real]

    @property
    def state_bytes(self) -> int:
        """Bytes of `state`."""
        return _BYTES[self.state]


@dataclass(frozen=True)
class SelectiveTile:
    """One instantiation's shape: states a thread, groups of states and channels a block."""

    states: int
    groups: int
    channels: int
    steps: int  # steps a tile
    blocks: int  # blocks a multiprocessor that the registers are bounded for

    @property
    def threads(self) -> int:
        """Threads a block."""
        return self.channels * self.groups

    @property
    def slice(self) -> int:
        """States a block."""
        return self.states * self.groups

    def shared_memory(self, kind: SelectiveKind) -> int:
        """Bytes of SelectiveTile::Shared in selective_scan.cu, which asserts them."""
        item, real, state = kind.item_bytes, kind.real_bytes, kind.state_bytes
        row = self.channels + 2
        drive = 2 * self.steps * row * 2 * real
        couples = sum(2 * (self.steps if varies else 1) * self.slice * state for varies in (kind.time_B, kind.time_C))
        partial = 2 * self.groups * self.steps * row * real
        channels = 2 * self.channels * real
        slots = 4 * self.steps * self.channels * item
        along, rows = (self.steps, self.slice) if kind.time_fast else (self.slice, self.steps)
        hop = self.threads // (along // 2)
        couple_slots = 2 * _ceil_div(rows, hop) * self.threads * 2 * (state if kind.complex else item)
        return drive + couples + partial + channels + slots + couple_slots


_FLOAT_TILES = (
    SelectiveTile(1, 8, 32, 16, 2),
    SelectiveTile(2, 8, 32, 32, 2),
    SelectiveTile(4, 4, 32, 32, 3),
    SelectiveTile(4, 4, 64, 16, 2),
    SelectiveTile(4, 4, 64, 32, 1),
    SelectiveTile(8, 2, 64, 16, 3),
    SelectiveTile(8, 8, 32, 16, 2),
)
_OTHER_TILES = (SelectiveTile(1, 8, 32, 16, 1), SelectiveTile(4, 4, 32, 16, 1))


def selective_tiles(state: str, both_vary: bool) -> tuple[SelectiveTile, ...]:
    """The instantiations for a type of state; B and C that are constant in time have fewer."""
    return _FLOAT_TILES if state == "float32" and both_vary else _OTHER_TILES


@dataclass(frozen=True)
class SelectiveProblem:
    """Sizes of a selective_scan."""

    state_item: str
    both_vary: bool
    batch: int
    length: int
    channels: int
    state: int
    groups: int


@dataclass(frozen=True)
class SelectiveOrder:
    """What fixes the bits."""

    schedule: Schedule
    chunk: int  # steps a chunk; the whole length without split
    states: int  # states a partial sum of y


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


def plan_selective(problem: SelectiveProblem, limits: DeviceLimits) -> SelectivePlan:
    """Choose the schedule of a selective_scan of which no size is 0."""
    force = _forced.get()
    tiles = selective_tiles(problem.state_item, problem.both_vary)
    tile = force.get("tile") or _choose_tile(problem, tiles, limits)
    slices = _ceil_div(problem.state, tile.slice)
    blocks = _blocks(problem, tile)
    schedule = force.get("schedule")
    least = _threshold("selective: steps a chunk at least")
    if schedule is None:
        percent = _threshold("selective: blocks a multiprocessor, in percent, from which time is not split")
        few = 100 * blocks < percent * limits.multiprocessors
        schedule = Schedule.SPLIT if few and problem.length >= 2 * least else Schedule.SERIAL
    if schedule is Schedule.SPLIT:
        aim = limits.multiprocessors * _threshold("selective: blocks a multiprocessor that a split aims at")
        wanted = max(1, min(_ceil_div(aim, blocks), problem.length // least))
        chunk = force.get("chunk", _round_up(_ceil_div(problem.length, wanted), tile.steps))
        chunks = _ceil_div(problem.length, chunk)
        reason = f"split: {blocks} blocks over batch and channels leave the chip idle, so time is cut into {chunks} chunks"
    elif schedule is Schedule.SERIAL:
        chunk, chunks = problem.length, 1
        reason = f"serial: {blocks} blocks over batch and channels, time in the thread"
    else:
        raise ValueError(f"selective_scan has the schedules serial and split, got {schedule.value}")
    order = SelectiveOrder(schedule, chunk, tile.states)
    return SelectivePlan(order, SelectiveFit(tile), chunks, slices, reason)


def _blocks(problem: SelectiveProblem, tile: SelectiveTile) -> int:
    return problem.batch * problem.groups * _ceil_div(problem.channels // problem.groups, tile.channels)


def _choose_tile(
    problem: SelectiveProblem, tiles: tuple[SelectiveTile, ...], limits: DeviceLimits
) -> SelectiveTile:
    # A thread's states must all exist, so `states` divides the state; few states take few a thread.
    fitting = [t for t in tiles if problem.state % t.states == 0 and (t.states == 1 or t.slice <= problem.state)]
    most = max(t.states for t in fitting if t.states <= (8 if problem.state >= 64 else 4))
    fitting = [t for t in fitting if t.states == most]
    wide = [t for t in fitting if _blocks(problem, t) >= limits.multiprocessors * 3 // 4]
    return max(wide or fitting, key=lambda t: (t.channels if wide else -t.channels, t.slice))


# --- NumPy -------------------------------------------------------------------------------------------------------


def plan_segments(rows: int, length: int) -> int:
    """Segments that reference.py cuts time into: 1 is the plain loop over time.

    The three phases do about twice the arithmetic in 2 sqrt(length) steps instead of length, so they win where a
    step is too small to fill NumPy's loops.
    """
    if "segments" in _forced.get():
        return int(_forced.get()["segments"])
    return isqrt(length) if rows <= 2048 and length >= 64 else 1
