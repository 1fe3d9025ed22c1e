"""Plans are pure values that cover each step once, within the limits of the device."""

import dataclasses
import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuscan import _plan
from cuscan._plan import DeviceLimits, Lanes, LinearProblem, Schedule, SelectiveKind, SelectiveProblem, forced

H200 = DeviceLimits(architecture=90, multiprocessors=132, shared_memory=227 * 1024)
SMALL = DeviceLimits(architecture=75, multiprocessors=14, shared_memory=64 * 1024)
SHARED_MEMORY = [99 * 1024, 163 * 1024, 227 * 1024]  # bytes a block on 8.6, 8.9 and 12.0; 8.0; 9.0

sizes = st.one_of(st.integers(1, 100), st.integers(1, 2**20), st.integers(2**31 - 2, 2**40))
devices = st.builds(DeviceLimits, st.just(90), st.integers(1, 300), st.sampled_from(SHARED_MEMORY))
# Bytes of an item and of its accumulation type.
linear_problems = st.builds(
    lambda item, rows, length, fast: LinearProblem(*item, rows, length, fast),
    st.sampled_from([(2, 4), (4, 4), (8, 8), (16, 16)]), sizes, sizes, st.booleans(),
)  # fmt: skip
selective_problems = st.builds(
    lambda kind, batch, length, channels, state, groups, sequences: SelectiveProblem(
        kind, batch, length, channels * groups, state * kind.states, groups, sequences
    ),
    st.sampled_from(_plan.selective_kinds()),
    sizes,
    sizes,
    st.integers(1, 10_000),
    st.integers(1, 300),
    st.integers(1, 64),
    st.sampled_from([0, 1, 2, 1000, 2**40]),
)


def covers_once(plan, length):
    """Chunks of plan.order.chunk steps cut the length: the last one has a step, and reaches the end."""
    assert plan.chunks >= 1
    assert plan.order.chunk >= 1
    assert (plan.chunks - 1) * plan.order.chunk < length <= plan.chunks * plan.order.chunk


def is_a_value(make):
    plan, again = make(), make()
    assert plan == again
    assert hash(plan) == hash(again)
    assert dataclasses.asdict(plan) == dataclasses.asdict(again)
    for part in (plan, plan.order, plan.fit):
        with pytest.raises(dataclasses.FrozenInstanceError):
            part.reason = ""
    assert repr(plan.order.schedule) in repr(plan)
    return plan


@given(problem=linear_problems, limits=devices)
def test_linear_plans(problem, limits):
    plan = is_a_value(lambda: _plan.plan_linear(problem, limits))
    order = plan.order
    covers_once(plan, problem.length)
    assert plan.reason.startswith(order.schedule.value + ":")
    assert order.row_warps in (1, 2, 4, 8, *[16] * order.one_pass)
    assert plan.fit.warps in (1, 2, 4, 8, *[16] * order.one_pass)
    assert plan.fit.warps % order.row_warps == 0
    assert (plan.chunks > 1) == (order.schedule is Schedule.SPLIT)
    assert (order.schedule is Schedule.SERIAL) <= (order.lanes is Lanes.ROWS and order.row_warps == 1)
    if plan.chunks > 1:
        # Whole tiles, so that the packs of every chunk lie as those of the first.
        assert order.chunk % _plan.linear_tile(problem, order.lanes, order.row_warps, one_pass=order.one_pass) == 0


@given(chunks=sizes, lanes=st.sampled_from(Lanes))
def test_plans_of_summaries_are_not_split_again(chunks, lanes):
    plan = is_a_value(lambda: _plan.plan_linear_summaries(chunks, lanes))
    covers_once(plan, chunks)
    assert plan.chunks == 1
    assert plan.order.lanes is lanes
    assert plan.fit.warps % plan.order.row_warps == 0


@given(problem=selective_problems, limits=devices)
def test_selective_plans(problem, limits):
    problem = dataclasses.replace(problem, kind=_plan.fitting_kind(problem.kind, limits))
    plan = is_a_value(lambda: _plan.plan_selective(problem, limits))
    order, tile = plan.order, plan.fit.tile
    covers_once(plan, problem.length)
    assert plan.reason.startswith(order.schedule.value + ":")
    assert (order.states, order.groups) == (tile.states, tile.groups)
    assert tile in _plan.selective_tiles(problem.kind)
    assert problem.state % tile.states == 0
    assert tile.shared_memory(problem.kind) <= limits.shared_memory
    assert (plan.slices - 1) * tile.slice < problem.state <= plan.slices * tile.slice
    assert (plan.chunks > 1) == (order.schedule is Schedule.SPLIT)
    if plan.chunks > 1:
        assert order.chunk % _plan.TILE_STEPS == 0


@pytest.mark.parametrize("kind", _plan.selective_kinds(), ids=repr)
def test_tiles(kind):
    tiles = _plan.selective_tiles(kind)
    for tile in tiles:
        assert kind.states % tile.states == 0, "all states of a thread exist"
        assert 32 <= tile.threads <= 1024
        assert tile.abreast * tile.groups == 32
        assert tile.channels == tile.warps * tile.abreast
        assert tile.shared_memory(kind) <= max(SHARED_MEMORY)
        # What a thread moves is a run of a tile, a power of two of items.
        for run, width in ((tile.abreast, tile.channels), (tile.couples, tile.slice)):
            assert run * tile.threads == _plan.TILE_STEPS * width
            assert (_plan.TILE_STEPS if kind.time_fast else width) % run == run & (run - 1) == 0


@pytest.mark.parametrize("memory", [64 * 1024, *SHARED_MEMORY])
@pytest.mark.parametrize("kind", _plan.selective_kinds(), ids=repr)
def test_every_chip_has_a_kind_whose_tiles_fit(kind, memory):
    fitting = _plan.fitting_kind(kind, DeviceLimits(90, 132, memory))
    assert fitting in _plan.selective_kinds()
    assert dataclasses.replace(fitting, states=kind.states) == kind
    assert kind.states % fitting.states == 0
    for tile in _plan.selective_tiles(fitting):
        assert tile.shared_memory(fitting) <= memory
    larger = [states for states in (1, 4, 8, 16) if fitting.states < states <= kind.states]
    for states in larger:
        assert _plan.selective_tiles(dataclasses.replace(kind, states=states))[0].shared_memory(kind) > memory


@given(state=st.integers(1, 1000), both_vary=st.booleans(), item=st.sampled_from(["float32", "float64", "complex64"]))
def test_a_threads_states_all_exist_and_have_a_kind(state, both_vary, item):
    states = _plan.states_a_thread(item, both_vary, state)
    assert state % states == 0
    many = item == "float32" and both_vary
    assert states == next(n for n in (16, 8, 4, 1) if (n <= 4 or (many and state % (8 * n) == 0)) and state % n == 0)
    assert any(
        (kind.state, kind.time_B and kind.time_C, kind.states) == (item, both_vary, states)
        for kind in _plan.selective_kinds()
    )


def test_kinds_are_all_and_each_once():
    kinds = _plan.selective_kinds()
    assert len(set(kinds)) == len(kinds)
    types = {(kind.item, kind.complex, kind.time_B, kind.time_C) for kind in kinds}
    assert len(types) == (3 * 2 + 1) * 2 * 2
    for kind in kinds:
        assert not kind.time_fast or _plan.is_usual(kind.item, kind.complex, kind.time_B and kind.time_C)


def linear_problem(rows, length, *, time_fast):
    return LinearProblem(4, 4, rows, length, time_fast)


def selective_problem(batch, length, channels, state=16, sequences=1):
    states = _plan.states_a_thread("float32", both_vary=True, state=state)
    kind = SelectiveKind("bfloat16", complex=False, time_fast=False, time_B=True, time_C=True, states=states)
    return SelectiveProblem(kind, batch, length, channels, state, groups=1, sequences=sequences)


LINEAR = {
    "8 x 4096 x 1536 along the middle axis": (
        linear_problem(8 * 1536, 4096, time_fast=False),
        Schedule.BLOCK,
        Lanes.ROWS,
    ),
    "8 x 1536 x 4096 along the last axis": (linear_problem(8 * 1536, 4096, time_fast=True), Schedule.BLOCK, Lanes.TIME),
    "a million rows of 100, side by side": (linear_problem(10**6, 100, time_fast=False), Schedule.SERIAL, Lanes.ROWS),
    "one row of 4 million": (linear_problem(1, 1 << 22, time_fast=True), Schedule.SPLIT, Lanes.TIME),
    "64 rows of a million, side by side": (linear_problem(64, 1 << 20, time_fast=False), Schedule.SPLIT, Lanes.ROWS),
}
SELECTIVE = {
    "8 x 4096 x 1024 x 16": (selective_problem(8, 4096, 1024), Schedule.SERIAL),
    "8 x 2048 x 2048 x 16": (selective_problem(8, 2048, 2048), Schedule.SERIAL),
    "1 x 1048576 x 64 x 16": (selective_problem(1, 1 << 20, 64), Schedule.SPLIT),
    "1 x 8192 x 4096 x 16": (selective_problem(1, 8192, 4096), Schedule.SERIAL),
    "30 sequences in 1 x 8192 x 4096 x 16": (selective_problem(1, 8192, 4096, sequences=30), Schedule.SPLIT),
}


@pytest.mark.parametrize("name", LINEAR)
def test_named_linear_problems(name):
    problem, schedule, lanes = LINEAR[name]
    order = _plan.plan_linear(problem, H200).order
    assert (order.schedule, order.lanes) == (schedule, lanes)


@pytest.mark.parametrize("name", SELECTIVE)
def test_named_selective_problems(name):
    problem, schedule = SELECTIVE[name]
    assert _plan.plan_selective(problem, H200).order.schedule is schedule


def test_each_schedule_is_chosen_for_some_shape():
    assert {schedule for _, schedule, _ in LINEAR.values()} == set(Schedule)
    assert {schedule for _, schedule in SELECTIVE.values()} == {Schedule.SERIAL, Schedule.SPLIT}


def test_a_split_fills_the_chip_it_is_planned_for():
    problem = SELECTIVE["1 x 1048576 x 64 x 16"][0]
    large, small = (_plan.plan_selective(problem, limits).chunks for limits in (H200, SMALL))
    assert large > small > 1
    problem = linear_problem(8, 1 << 20, time_fast=True)
    with forced(one_pass=False):
        large, small = (_plan.plan_linear(problem, limits).chunks for limits in (H200, SMALL))
    assert large > small > 1


@pytest.mark.parametrize(
    ("lanes", "length", "shared", "warps"),
    [(Lanes.ROWS, 1 << 24, 64, 2), (Lanes.ROWS, 1 << 24, 99, 4), (Lanes.ROWS, 1 << 24, 227, 16),
     (Lanes.TIME, 1 << 24, 64, 4), (Lanes.TIME, 1 << 24, 163, 8), (Lanes.TIME, 1 << 24, 227, 16),
     (Lanes.TIME, 1 << 13, 227, 8)],
)  # fmt: skip
def test_one_pass_has_memory_for_two_blocks_and_work_for_many(lanes, length, shared, warps):
    problem = linear_problem(40, length, time_fast=lanes is Lanes.TIME)
    with forced(schedule=Schedule.SPLIT, lanes=lanes):
        order = _plan.plan_linear(problem, DeviceLimits(90, 132, shared << 10)).order
    assert (order.one_pass, order.row_warps) == (True, warps)
    assert order.chunk == _plan.linear_tile(problem, lanes, warps, one_pass=True)
    assert 2 * 32 * warps * _plan.pass_slots(lanes, pairs=False) < shared << 10


def test_one_pass_that_a_chip_has_no_memory_for_is_an_error():
    problem = linear_problem(64, 1 << 20, time_fast=False)
    with forced(schedule=Schedule.SPLIT, lanes=Lanes.ROWS, row_warps=16):
        assert _plan.plan_linear(problem, H200).order.row_warps == 16
        with pytest.raises(ValueError, match="one pass with 16 warps on a row needs 107520 bytes of shared memory a b"):
            _plan.plan_linear(problem, DeviceLimits(89, 128, 99 << 10))


def test_two_rows_that_take_turns_have_tiles_of_their_own():
    problem = LinearProblem(4, 4, 2, 1 << 27, time_fast=False, pairs=True)
    order = _plan.plan_linear(problem, H200).order
    assert (order.lanes, order.one_pass, order.row_warps, order.chunk) == (Lanes.TIME, True, 8, 8 * 5 * 32 * 2)
    with forced(row_warps=16):
        assert _plan.plan_linear(problem, H200).order == order


def test_who_needs_summaries_gets_a_split_in_three_launches():
    for problem, _, _ in LINEAR.values():
        plan = _plan.plan_linear(problem, H200)
        other = _plan.with_summaries(plan, problem, H200)
        assert plan.order.one_pass == (plan.order.schedule is Schedule.SPLIT) == (plan != other)
        assert not other.order.one_pass
        with forced(row_warps=16):  # as only one pass has them
            assert _plan.with_summaries(_plan.plan_linear(problem, H200), problem, H200).order.row_warps <= 8
        assert (other.order.schedule, other.order.lanes) == (plan.order.schedule, plan.order.lanes)


def test_short_packed_sequences_are_cut_into_more_chunks():
    few, many = (_plan.plan_selective(selective_problem(1, 65536, 256, sequences=n), H200).chunks for n in (1, 1000))
    assert 4 * few >= many > few > 1


def test_threads_have_fewer_states_where_there_are_few():
    for batch, tile in ((8, (4, 4)), (2, (2, 8))):
        plan = _plan.plan_selective(selective_problem(batch, 2048, 2048), H200)
        assert (plan.order.schedule, plan.order.states, plan.order.groups) == (Schedule.SERIAL, *tile)


def test_thresholds_say_where_they_come_from_and_are_used():
    text = inspect.getsource(_plan)
    for name, (value, source) in _plan.THRESHOLDS.items():
        assert value > 0, name
        assert len(source) > 10, name
        assert "to be measured" not in source, name
        assert text.count(f'"{name}"') >= 2, f"{name} is not used"


# forced


def test_forced_parts_are_in_the_plan_and_gone_afterwards():
    problem = LINEAR["one row of 4 million"][0]
    free = _plan.plan_linear(problem, H200)
    with forced(schedule=Schedule.SPLIT, lanes=Lanes.ROWS):
        with forced(chunk=50, row_warps=2, warps=4):
            plan = _plan.plan_linear(problem, H200)
        assert _plan.plan_linear(problem, H200).order.chunk != 50
    assert plan.order == _plan.LinearOrder(Schedule.SPLIT, Lanes.ROWS, 50, 2)
    assert plan.fit == _plan.LinearFit(4)
    covers_once(plan, problem.length)
    with pytest.raises(KeyError), forced(chunk=50):
        raise KeyError
    assert _plan.plan_linear(problem, H200) == free


@given(problem=linear_problems, schedule=st.sampled_from(Schedule))
def test_a_forced_schedule_of_linear_scan(problem, schedule):
    with forced(schedule=schedule):
        plan = _plan.plan_linear(problem, H200)
    assert plan.order.schedule is schedule
    covers_once(plan, problem.length)


@given(problem=selective_problems, data=st.data(), chunk=st.integers(1, 1000))
def test_a_forced_tile_and_schedule_of_selective_scan(problem, data, chunk):
    tile = data.draw(st.sampled_from(_plan.selective_tiles(problem.kind)))
    with forced(schedule=Schedule.SPLIT, tile=tile, chunk=chunk):
        plan = _plan.plan_selective(problem, H200)
    assert (plan.fit.tile, plan.order.chunk) == (tile, chunk)
    covers_once(plan, problem.length)
    with forced(schedule=Schedule.SPLIT):
        covers_once(_plan.plan_selective(problem, H200), problem.length)
    with forced(schedule=Schedule.SERIAL):
        assert _plan.plan_selective(problem, H200).chunks == 1


def test_selective_scan_has_no_block_schedule():
    with forced(schedule=Schedule.BLOCK), pytest.raises(ValueError, match="serial and split, got block"):
        _plan.plan_selective(SELECTIVE["8 x 4096 x 1024 x 16"][0], H200)


# NumPy


@given(rows=sizes, length=sizes)
def test_segments(rows, length):
    segments = _plan.plan_segments(rows, length)
    assert 1 <= segments <= length
    # Segments and the steps in them are about as many.
    assert segments == 1 or segments**2 <= length < (segments + 1) ** 2


def test_few_long_rows_are_cut_and_many_or_short_ones_are_not():
    assert _plan.plan_segments(1, 65536) == 256
    assert _plan.plan_segments(100_000, 65536) == 1
    assert _plan.plan_segments(1, 10) == 1
    with forced(segments=7):
        assert _plan.plan_segments(100_000, 65536) == 7
