"""What is launched for which plan: names, grids, blocks, shared memory and packed arguments, with nothing run."""

import itertools
import struct
from math import prod

import ml_dtypes
import numpy as np
import pytest

import cuscan
from cuscan import _arrays, _launch, _source
from cuscan._plan import DeviceLimits, Lanes, Schedule, SelectiveKind, forced, selective_tiles, states_a_thread
from cuscan.testing import Layout

F32, BF16 = np.float32, ml_dtypes.bfloat16


class Function:
    """Stands for a kernel, with CuPy's call form."""

    def __init__(self, place, source, name):
        self._place, self.source, self.name = place, source, name
        self.max_dynamic_shared_size_bytes = 48 * 1024

    def __call__(self, grid, block, arguments, *, shared_mem=0):
        (argument,) = arguments
        assert argument.ndim == 0
        assert argument.dtype.kind == "V"
        assert shared_mem <= self.max_dynamic_shared_size_bytes
        self._place.launches.append((self.name, *grid, *block, shared_mem, argument.tobytes()))
        self._place.events.append("launch")


class RecordingPlace:
    """A place and its provider of modules; memory is made up, so sizes may be anything."""

    limits = DeviceLimits(90, 132, 227 * 1024)

    def __init__(self):
        self.modules = self
        self.launches, self.events, self.kept, self.allocated = [], [], [], []
        self._functions = {}

    def get_function(self, source, name):
        assert name in source.names
        return self._functions.setdefault(name, Function(self, source, name))

    def allocate(self, shape, dtype):
        array = np.broadcast_to(np.zeros((), dtype), shape)
        strides = [prod(shape[d + 1 :]) * array.itemsize for d in range(len(shape))]
        array = np.lib.stride_tricks.as_strided(array, shape, strides)
        self.allocated.append(array)
        return array

    def keep(self, *arrays):
        self.kept += arrays
        self.events.append("keep")

    def pointer(self, array):
        return array.ctypes.data

    def done(self):
        self.events.append("done")


@pytest.fixture
def place():
    place = RecordingPlace()
    token = _arrays.host_place.set(lambda: place)
    yield place
    _arrays.host_place.reset(token)


def huge(shape, dtype=np.float32):
    """An array of any size, of one item."""
    return np.broadcast_to(np.ones((), dtype), shape)


def names(place):
    return [launch[0] for launch in place.launches]


LINEAR_FIELDS = 5 * 9 * 8
COUNTS = "<2q2d2f8q4q3i4x"  # after the five arrays of LinearArgs


def linear_tail(packed):
    return struct.unpack_from(COUNTS, packed, LINEAR_FIELDS)


def linear_array(packed, index):
    """(start, time, rows, packs) of gate, input, initial, output or last."""
    start, time, *rows, packs = struct.unpack_from("<9q", packed, index * 72)
    return start, time, rows, packs


# linear_scan


@pytest.mark.parametrize("item", _source._CPP)
def test_linear_without_split_is_one_launch(place, item):
    dtype = np.dtype(BF16 if item == "bfloat16" else item)
    b = np.ones((70, 100), dtype)
    for plan, name in (
        ({"schedule": Schedule.SERIAL}, f"linear_scan_rows_apply_{item}"),
        ({"schedule": Schedule.BLOCK, "lanes": Lanes.ROWS}, f"linear_scan_rows_apply_{item}"),
        ({"schedule": Schedule.BLOCK, "lanes": Lanes.TIME}, f"linear_scan_time_apply_{item}"),
    ):
        place.launches.clear()
        with forced(**plan):
            cuscan.linear_scan(b, b, axis=1)
        assert names(place) == [name]
        assert len(place.launches[0][-1]) == _source.LINEAR_ARGS


@pytest.mark.parametrize("lanes", Lanes)
@pytest.mark.parametrize(
    ("dtype", "state"), [(BF16, "float32"), (np.float32, "float32"), (np.complex128, "complex128")]
)
def test_linear_split_is_three_launches(place, lanes, dtype, state):
    b = np.ones((70, 1000), dtype)
    with forced(schedule=Schedule.SPLIT, lanes=lanes, chunk=128):
        cuscan.linear_scan(b, b, axis=1)
    kernel, item = f"linear_scan_{lanes.value}", np.dtype(dtype).name
    assert names(place) == [f"{kernel}_summarise_{item}", f"{kernel}_apply_{state}", f"{kernel}_apply_{item}"]
    (_, *summaries) = place.allocated  # after the output: gates and states
    assert [x.size for x in summaries] == [70 * 8] * 2
    tails = [linear_tail(launch[-1]) for launch in place.launches]
    assert [(tail[6], tail[7], *tail[14:16]) for tail in tails] == [
        (1000, 70, 128, 8),
        (8, 70, 8, 1),
        (1000, 70, 128, 8),
    ]
    # The middle one works on the summaries in place.
    gate, states = (x.ctypes.data for x in summaries)
    middle = place.launches[1][-1]
    assert [linear_array(middle, index)[0] for index in (0, 1, 3)] == [gate, states, states]
    assert tails[0][:2] == tails[2][:2] == (gate, states)


@pytest.mark.parametrize("lanes", Lanes)
@pytest.mark.parametrize("rows", [1, 31, 32, 33, 1000, 10**6])
@pytest.mark.parametrize("row_warps", [1, 2, 8])
@pytest.mark.parametrize("chunk", [64, 4096])
def test_grids_are_as_small_as_cover_all(place, lanes, rows, row_warps, chunk):
    b = huge((rows, 4096))
    for warps in (row_warps, 8):
        place.launches.clear()
        with forced(schedule=Schedule.SPLIT, lanes=lanes, chunk=chunk, row_warps=row_warps, warps=warps):
            cuscan.linear_scan(0.5, b, axis=1)
        _, grid, block, shared, _ = place.launches[-1]
        teams = rows if lanes is Lanes.TIME else -(-rows // 32)
        slots = warps // row_warps
        assert block == 32 * warps
        # Two tiles of gates and inputs, of four packs a thread.
        assert shared == (2 * 2 * 4 * 16 * block if lanes is Lanes.TIME else 0)
        assert (grid - 1) * slots < teams * (4096 // chunk) <= grid * slots


def test_grids_stop_at_what_a_launch_takes(place):
    with forced(schedule=Schedule.SERIAL, warps=1):
        cuscan.linear_scan(0.5, huge((2**38, 3)), axis=1)
    assert place.launches[0][1] == 2**31 - 1
    assert linear_tail(place.launches[0][-1])[7] == 2**38


def test_arrays_are_packed_with_their_strides(place):
    b = np.ones((3, 40, 5), np.float32)
    a = np.ones((1, 40, 1), np.float32)
    h0 = np.ones((3, 5), np.float32)
    result, last = cuscan.linear_scan(a, b, h0, axis=1, return_last_state=True)
    packed = place.launches[0][-1]
    assert linear_array(packed, 0)[:3] == (a.ctypes.data, 4, [0, 0, 0, 0, 0, 0])
    assert linear_array(packed, 1)[:3] == (b.ctypes.data, 20, [800, 4, 0, 0, 0, 0])
    assert linear_array(packed, 2)[:3] == (h0.ctypes.data, 0, [20, 4, 0, 0, 0, 0])
    assert linear_array(packed, 3)[:3] == (result.ctypes.data, 20, [800, 4, 0, 0, 0, 0])
    assert linear_array(packed, 4)[:3] == (last.ctypes.data, 0, [20, 4, 0, 0, 0, 0])
    _, _, _, _, _, _, length, rows, *sizes = linear_tail(packed)[:14]
    assert (length, rows, sizes) == (40, 15, [3, 5, 0, 0, 0, 0])


def test_reverse_is_the_last_step_first(place):
    b = np.ones((3, 40), np.float32)
    cuscan.linear_scan(0.5, b, axis=1, reverse=True)
    start, time, rows, _ = linear_array(place.launches[0][-1], 1)
    assert (start, time, rows[0]) == (b.ctypes.data + 39 * 4, -4, 160)


def test_a_scalar_gate_is_packed_in_both_precisions(place):
    cuscan.linear_scan(0.1, np.ones(40, np.float32))
    packed = place.launches[0][-1]
    assert linear_array(packed, 0)[0] == 0
    assert linear_tail(packed)[2:6] == (0.1, 0.0, float(np.float32(0.1)), 0.0)
    cuscan.linear_scan(0.25 + 0.5j, np.ones(40, np.complex64))
    assert linear_tail(place.launches[1][-1])[2:6] == (0.25, 0.5, 0.25, 0.5)


@pytest.mark.parametrize(
    ("offset", "step", "reverse", "packs"),
    [(0, 1, False, 1), (0, 1, True, 1), (1, 1, False, 0), (0, 2, False, 0), (0, -1, True, 1)],
)
def test_packs_are_used_where_16_bytes_are_aligned_and_consecutive(place, offset, step, reverse, packs):
    memory = np.zeros(3 * 400 + 8, np.float32)
    start = -(memory.ctypes.data // 4) % 4 + offset
    b = memory[start : start + 1200].reshape(3, 400)[:, :: abs(step)][:, :: int(np.sign(step))]
    with forced(schedule=Schedule.BLOCK, lanes=Lanes.TIME):
        cuscan.linear_scan(0.5, b, axis=1, reverse=reverse)
    assert linear_array(place.launches[0][-1], 1)[3] == packs


def test_an_output_of_another_type_has_no_packs(place):
    b = np.zeros((4, 512), np.float32)
    with forced(schedule=Schedule.BLOCK, lanes=Lanes.TIME):
        cuscan.linear_scan(0.5, b, axis=1, out_dtype=np.float64)
        cuscan.linear_scan(0.5, b, axis=1, out_dtype=BF16)
    assert [linear_array(launch[-1], 3)[3] for launch in place.launches] == [0, 0]


# selective_scan


def selective(place, batch, length, channels, state, groups=1, dtype=np.float32, layout="bld", **options):
    place.launches.clear()
    place.allocated.clear()
    shapes = {"bld": ((batch, length, channels), (batch, length, groups, state)),
              "bdl": ((batch, channels, length), (batch, groups, state, length))}  # fmt: skip
    sequence, couple = shapes[layout]
    u, B = np.zeros(sequence, dtype), np.zeros(couple, dtype)
    return cuscan.selective_scan(u, u, np.zeros((channels, state), np.float32), B, B, layout=layout, **options)


def kind_of(state, layout="bld"):
    flags = {"complex": False, "time_fast": layout == "bdl", "time_B": True, "time_C": True}
    return SelectiveKind("float32", **flags, states=states_a_thread("float32", both_vary=True, state=state))


@pytest.mark.parametrize("layout", ["bld", "bdl"])
@pytest.mark.parametrize("state", [1, 4, 7, 16, 17, 20, 64, 70, 72, 128, 192, 256])
def test_selective_launches(place, state, layout):
    kind = kind_of(state, layout)
    prefix = "float32_time" if layout == "bdl" else "float32"
    first, *_ = tiles = selective_tiles(kind)

    def name(phase, tile):
        return f"selective_scan_{phase}_{prefix}_{tile.states}x{tile.groups}x{tile.warps}"

    for tile in tiles:
        slices = -(-state // tile.slice)
        with forced(schedule=Schedule.SERIAL, tile=tile):
            selective(place, 2, 90, 70, state, layout=layout)
        assert names(place) == [name("apply", tile)] * slices
        blocks = 2 * -(-70 // tile.channels)
        for _, grid, block, dynamic, packed in place.launches:
            assert (grid, block, dynamic) == (blocks, tile.threads, tile.shared_memory(kind))
            assert len(packed) == _source.SELECTIVE_ARGS
        with forced(schedule=Schedule.SPLIT, chunk=32, tile=tile):
            selective(place, 2, 90, 70, state, layout=layout)
        summarise, scan, *applications = place.launches
        assert summarise[0] == name("summarise", first)
        assert summarise[1:4] == (
            3 * -(-state // first.slice) * 2 * -(-70 // first.channels), first.threads, first.shared_memory(kind)
        )  # fmt: skip
        assert scan[0] == "linear_scan_rows_apply_float32"
        assert len(scan[-1]) == _source.LINEAR_ARGS
        assert [(launch[0], launch[1]) for launch in applications] == [(name("apply", tile), 3 * blocks)] * slices


def test_a_tile_never_straddles_two_groups(place):
    tile = selective_tiles(kind_of(4))[0]
    with forced(schedule=Schedule.SERIAL, tile=tile):
        selective(place, 2, 50, 3 * (tile.channels + 1), 4, groups=3)
    assert place.launches[0][1] == 2 * 3 * 2


def test_much_shared_memory_is_asked_for_first(place):
    # Function.__call__ refuses what was not asked for.
    for state in (1, 4, 64, 128):
        for tile in selective_tiles(kind_of(state)):
            with forced(schedule=Schedule.SERIAL, tile=tile):
                selective(place, 1, 50, 64, state)
            name, *_, shared, _ = place.launches[0]
            assert place._functions[name].max_dynamic_shared_size_bytes == max(shared, 48 * 1024)


@pytest.mark.parametrize(
    ("item", "complex_", "constant", "name"),
    [
        (np.float32, False, "", "float32"),
        (BF16, False, "B", "bfloat16_constB"),
        (np.float16, False, "C", "float16_constC"),
        (np.float64, False, "BC", "float64_constB_constC"),
        (BF16, True, "", "bfloat16_complex"),
        (np.float32, True, "BC", "float32_complex_constB_constC"),
    ],
)
def test_the_kind_is_in_the_name(place, item, complex_, constant, name):
    u = np.zeros((2, 30, 8), item)
    couple = np.complex64 if complex_ else item
    B, C = (np.zeros((8, 4) if each in constant else (2, 30, 4), couple) for each in "BC")
    A = np.zeros((8, 4), np.complex64 if complex_ else np.float32)
    cuscan.selective_scan(u, u, A, B, C)
    assert names(place)[0].startswith(f"selective_scan_apply_{name}_")


def test_chunks_are_whole_tiles(place):
    with forced(schedule=Schedule.SPLIT, chunk=33), pytest.raises(ValueError, match="tiles of 32 steps, got 33"):
        selective(place, 2, 50, 70, 4)
    assert place.launches == []
    with forced(schedule=Schedule.SPLIT, chunk=50):  # one alone may be ragged
        selective(place, 2, 50, 70, 4)
    assert len(place.launches) == 1


def vectors(place):
    """Which arrays move in vectors, and whether all is plain."""
    packed = place.launches[-1][-1]
    fields = struct.unpack_from(_source.SELECTIVE_HEAD, packed)
    flags = {name: fields[6 * i + 5] for i, name in enumerate(("u", "delta", "z", "out"))}
    flags |= {name: fields[30 + 9 * i + 7] for i, name in enumerate("BC")}
    return flags, struct.unpack_from(_source.SELECTIVE_TAIL, packed, struct.calcsize(_source.SELECTIVE_HEAD))[16]


# A run is of 8 steps or channels where a thread has 4 states, and else of 4. One of B and C is of 4 steps or states,
# then, of 2 where a thread has one state, of 16 where it has 8 and of 32 where it has 16.
STEPPED, BACKWARDS = Layout(steps=(1, 1, 2)), Layout(steps=(1, 1, -1))
SEQUENCES = [
    # type of all, states, channels or with "bdl" steps, how they lie, and whether they are vectors
    (F32, 16, 64, Layout(), {"bld", "bdl"}),
    (BF16, 16, 64, Layout(), {"bld", "bdl"}),
    (BF16, 16, 60, Layout(), set()),
    (BF16, 5, 60, Layout(), {"bld", "bdl"}),
    (BF16, 5, 62, Layout(), set()),
    (BF16, 64, 60, Layout(), {"bld", "bdl"}),
    (F32, 16, 64, Layout(skew=16), {"bld", "bdl"}),
    (F32, 16, 64, Layout(skew=8), set()),
    (F32, 5, 64, Layout(skew=8), set()),
    (BF16, 16, 64, Layout(skew=8), set()),
    (BF16, 5, 64, Layout(skew=8), {"bld", "bdl"}),
    (BF16, 5, 64, Layout(skew=4), set()),
    (BF16, 16, 64, Layout(pad=8), {"bld", "bdl"}),
    (BF16, 16, 64, Layout(pad=4), set()),
    (BF16, 5, 64, Layout(pad=4), {"bld", "bdl"}),
    (F32, 5, 64, STEPPED, set()),
    (F32, 5, 64, BACKWARDS, {"bdl"}),
]
COUPLES = [
    # type, states, steps, how they lie, and whether they are vectors
    (F32, 16, 62, Layout(), {"bld"}),
    (F32, 16, 60, Layout(), {"bld", "bdl"}),
    (F32, 5, 64, Layout(), {"bdl"}),
    (F32, 6, 62, Layout(), {"bld", "bdl"}),
    (F32, 6, 61, Layout(), {"bld"}),
    (BF16, 64, 40, Layout(), {"bld"}),
    (BF16, 64, 48, Layout(), {"bld", "bdl"}),
    (BF16, 128, 48, Layout(), {"bld"}),
    (BF16, 128, 64, Layout(), {"bld", "bdl"}),
    (BF16, 128, 64, Layout(skew=8), set()),
    (BF16, 16, 64, Layout(skew=8), {"bld", "bdl"}),
    (BF16, 16, 64, Layout(skew=4), set()),
    (BF16, 6, 64, Layout(skew=4), {"bld", "bdl"}),
    (BF16, 6, 64, Layout(skew=2), set()),
    (BF16, 16, 64, Layout(pad=4), {"bld", "bdl"}),
    (BF16, 16, 64, Layout(pad=2), set()),
    (F32, 16, 64, STEPPED, set()),
    (F32, 16, 64, BACKWARDS, {"bdl"}),
]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("layout", ["bld", "bdl"])
def test_runs_are_vectors_where_they_are_whole_and_aligned(place, layout, reverse):
    for names_, cases in ((("u", "delta", "z", "out"), SEQUENCES), ("BC", COUPLES)):
        for (dtype, state, size, laid, expected), name in itertools.product(cases, names_):
            channels, length = (size, 40) if layout == "bld" and name not in "BC" else (40, size)
            shapes = dict.fromkeys(("u", "delta", "z", "out"), (2, length, channels))
            shapes |= dict.fromkeys("BC", (2, length, state))
            arrays = {}
            for each, (batch, steps, width) in shapes.items():
                shape = (batch, steps, width) if layout == "bld" else (batch, width, steps)
                arrays[each] = (laid if each == name else Layout()).place(np.zeros(shape, dtype), shape)
            cuscan.selective_scan(**arrays, A=np.zeros((channels, state), F32), layout=layout, reverse=reverse)
            flags, plain = vectors(place)
            assert flags[name] == (layout in expected), (name, dtype, state, size, laid)
            assert plain == all(flags.values())


def test_what_is_plain(place):
    selective(place, 2, 64, 32, 16)
    assert vectors(place)[1]
    bf16 = {"u": np.zeros((2, 64, 32), BF16), "A": np.zeros((32, 16), F32)}
    bf16 |= {"delta": bf16["u"], "z": bf16["u"], "B": bf16["u"][..., :16].copy(), "C": bf16["u"][..., :16].copy()}
    cuscan.selective_scan(**bf16)
    assert vectors(place)[1]
    for name in ("delta", "B", "C"):
        cuscan.selective_scan(**bf16 | {name: bf16[name].astype(F32)})
        assert [each for each, flag in vectors(place)[0].items() if not flag] == [name]
        assert not vectors(place)[1]
    cuscan.selective_scan(**bf16, out_dtype=F32)
    assert not vectors(place)[0]["out"]
    cuscan.selective_scan(**bf16, delta_limit=(0, 1))
    assert all(vectors(place)[0].values())
    assert not vectors(place)[1]
    selective(place, 2, 64, 32, 20)  # two slices
    assert all(flag for name, flag in vectors(place)[0].items() if name != "z")
    assert not vectors(place)[1]


# segments


def test_marks_come_first_and_the_kernels_are_segmented(place):
    b = np.ones((70, 1000), np.float32)
    mask = np.ones((1, 1000), bool)
    with forced(schedule=Schedule.SERIAL):
        cuscan.linear_scan(b, b, axis=1, mask=mask)
    assert names(place) == ["step_marks", "linear_scan_rows_apply_segmented_float32"]
    place.launches.clear()
    place.allocated.clear()
    with forced(schedule=Schedule.SPLIT, lanes=Lanes.TIME, chunk=128):
        cuscan.linear_scan(b, b, axis=1, mask=mask)
    kernel = "linear_scan_time_{}_segmented_float32"
    assert names(place) == [
        "step_marks", kernel.format("summarise"), "step_marks", kernel.format("apply"), kernel.format("apply")
    ]  # fmt: skip
    # 32 words of one row, for the mask is the same in all; then 8 chunks of 70 rows, and a word for each row.
    assert [x.nbytes for x in place.allocated[1:]] == [32 * 16, 70 * 8 * 4, 70 * 8 * 4, 70 * 8, 70 * 16]


def test_marks_of_a_selective_scan(place):
    reset = np.ones((2, 50), bool)
    with forced(schedule=Schedule.SPLIT, chunk=32):
        selective(place, 2, 50, 70, 4, reset=reset)
    tile = selective_tiles(kind_of(4))[0]
    shape = f"{tile.states}x{tile.groups}x{tile.warps}"
    first, summarise, second, scan, apply = names(place)
    assert first == second == "step_marks"
    assert summarise == f"selective_scan_summarise_float32_segmented_{shape}"
    assert scan == "linear_scan_rows_apply_segmented_float32"
    assert apply.startswith("selective_scan_apply_float32_segmented_")


# every call


def test_empty_problems_launch_nothing(place):
    cuscan.linear_scan(0.5, np.ones((0, 5), np.float32), axis=1)
    cuscan.linear_scan(
        0.5, np.ones((5, 0), np.float32), np.ones(5, np.float32), axis=1, out=np.ones((5, 0), np.float32)
    )
    for sizes in ((0, 5, 4, 3), (2, 0, 4, 3), (2, 5, 0, 3)):
        selective(place, *sizes)
    assert place.launches == []


def test_inputs_are_kept_before_the_first_launch(place):
    b = np.ones((3, 40), np.float32)
    cuscan.linear_scan(b, b, np.ones(3, np.float32), axis=1)
    selective(place, 2, 30, 8, 4, D=np.ones(8, np.float32))
    assert place.events[0] == "keep"
    assert len(place.kept) >= 3 + 6
    assert "launch" in place.events


def test_the_largest_grid_is_cudas():
    assert _launch.LARGEST_GRID == 2**31 - 1
