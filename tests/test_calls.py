"""Calls of a signature that was seen before: the same as first calls, at other addresses, and nothing else is."""

import contextlib
import ctypes
import gc
import struct
import sys
import threading
import types
import weakref
from collections import deque

import ml_dtypes
import numpy as np
import pytest

import cuscan
from cuscan import _arrays, _calls, _compile, _launch, _source, linear, selective, selective_vjp
from cuscan._plan import DeviceLimits, Lanes, Schedule, forced

BF16, F32 = ml_dtypes.bfloat16, np.float32
CACHED = {"linear_scan": linear, "selective_scan": selective, "selective_scan_vjp": selective_vjp}


@pytest.fixture(autouse=True)
def caches(monkeypatch):
    """Empty caches, by function."""
    made = {name: _calls.Cache() for name in CACHED}
    for name, cache in made.items():
        monkeypatch.setattr(CACHED[name], "_READY", cache)
    return made


def known(caches):
    return sum(len(cache._ready) for cache in caches.values())


def at(x, by=0):
    """A copy at an address that is `by` modulo 16."""
    memory = np.zeros(x.nbytes + 48, np.uint8)
    view = np.ndarray(x.shape, x.dtype, memory, (by - memory.ctypes.data) % 16)
    view[...] = x
    return view


def placed(arguments, by=0):
    return {name: at(x, by) if isinstance(x, np.ndarray) else x for name, x in arguments.items()}


# --- what is called ------------------------------------------------------------------------------------------------


def linear_arguments(seed, shape=(3, 130), dtype=F32, **more):
    r = np.random.default_rng(seed)
    a, b = (r.uniform(-1, 1, shape).astype(dtype) for _ in range(2))
    made = {"a": a, "b": b, "axis": 1, "return_last_state": True}
    for name, x in more.items():
        made[name] = x(r) if callable(x) else x
    return made


def selective_arguments(seed, batch=2, length=47, channels=6, state=4, dtype=BF16, layout="bld", **more):
    r = np.random.default_rng(seed)

    def sequence(size):
        x = r.uniform(-1, 1, (batch, length, size)).astype(dtype)
        return x if layout == "bld" else np.ascontiguousarray(x.transpose(0, 2, 1))

    made = {"u": sequence(channels), "delta": sequence(channels), "B": sequence(state), "C": sequence(state)}
    made["A"] = -r.uniform(0.1, 2, (channels, state)).astype(F32)
    made |= {"layout": layout, "delta_softplus": True, "return_last_state": True}
    for name, x in more.items():
        made[name] = x(r) if callable(x) else x
    return made


def gradient_arguments(seed, dtype=F32, **more):
    made = selective_arguments(seed, dtype=dtype, **more)
    del made["return_last_state"]
    made["grad_out"] = np.random.default_rng(seed + 100).uniform(-1, 1, made["u"].shape).astype(dtype)
    return made


def draw(*shape, dtype=F32):
    return lambda r: r.uniform(-1, 1, shape).astype(dtype)


def flags(*shape):
    return lambda r: r.random(shape) < 0.8


def offsets(*most):
    return lambda r: np.array([0, *np.sort(r.integers(0, most[0], 3)), most[0]])


SPLIT = {"schedule": Schedule.SPLIT, "chunk": 32}
LINEAR = {
    "array gate": ({}, {}),
    "rows": ({}, {"schedule": Schedule.SERIAL}),
    "split": ({}, {**SPLIT, "lanes": Lanes.TIME}),
    "bfloat16": ({"dtype": BF16, "reverse": True}, {**SPLIT, "lanes": Lanes.ROWS}),
    "scalar gate": ({"a": 0.5, "h0": 2.0}, {}),
    "gate that broadcasts": ({"a": draw(1, 130), "h0": draw(3)}, {}),
    "mask and reset": ({"mask": flags(1, 130), "reset": flags(3, 130)}, SPLIT),
    "packed": ({"cu_seqlens": offsets(130), "h0": draw(4, 3)}, SPLIT),
    "packed, a number before": ({"cu_seqlens": offsets(130), "h0": -1.5, "reverse": True}, {}),
    "no step": ({"shape": (3, 0), "h0": draw(3)}, {}),
    "seven row axes": (
        {"shape": (2, 5, 2, 2, 2, 2, 2, 2), "a": lambda r: r.random((2, 5, 2, 2, 2, 2, 2, 4), F32)[..., ::2],
         "b": lambda r: r.random((4, 5, 4, 4, 4, 4, 4, 4), F32)[::2, :, ::2, ::2, ::2, ::2, ::2, ::2]}, {}
    ),
}  # fmt: skip
SELECTIVE = {
    "plain": ({}, {"schedule": Schedule.SERIAL}),
    "split": ({"h0": draw(2, 6, 4), "reverse": True}, SPLIT),
    "everything": (
        {"D": draw(6), "z": draw(2, 47, 6, dtype=BF16), "delta_bias": draw(6), "delta_limit": (0.1, 1.0)}, {}
    ),
    "slices": ({"state": 20, "length": 21}, {}),
    "bdl": ({"layout": "bdl", "D": draw(6)}, SPLIT),
    "mask": ({"mask": flags(2, 47)}, {}),
    "packed": ({"batch": 1, "cu_seqlens": offsets(47), "h0": draw(4, 6, 4), "reset": flags(1, 47)}, SPLIT),
    "no state": ({"state": 0, "D": draw(6)}, {}),
}  # fmt: skip
SAVED = {"states": draw(2, 2, 6, 4)}
GRADIENTS = {
    "plain": (SAVED, {"schedule": Schedule.SERIAL}),
    "split": ({**SAVED, "h0": draw(2, 6, 4), "grad_last_state": draw(2, 6, 4), "reverse": True}, SPLIT),
    "rounded": ({**SAVED, "D": draw(6), "h0": draw(2, 6, 4), "z": draw(2, 47, 6), "grad_dtype": "float16"}, {}),
    "slices": ({"states": draw(2, 1, 6, 20), "state": 20, "length": 21, "D": draw(6), "delta_bias": draw(6)}, {}),
    "states with strides": ({"states": lambda r: draw(2, 2, 4, 6)(r).transpose(0, 1, 3, 2)}, {}),
    "packed, without states": (
        {"dtype": BF16, "batch": 1, "cu_seqlens": offsets(47), "h0": draw(4, 6, 4), "reset": flags(1, 47)}, SPLIT
    ),
    "no state": ({"state": 0, "D": draw(6)}, {}),
}  # fmt: skip
CASES = [
    pytest.param(function, make, more, plan, id=f"{function.__name__}, {name}")
    for function, make, cases in (
        (cuscan.linear_scan, linear_arguments, LINEAR),
        (cuscan.selective_scan, selective_arguments, SELECTIVE),
        (cuscan.selective_scan_vjp, gradient_arguments, GRADIENTS),
    )
    for name, (more, plan) in cases.items()
]


def same(results, others):
    assert isinstance(results, tuple)
    for x, y in zip(results, others, strict=True):
        if x is None:
            assert y is None
            continue
        np.testing.assert_array_equal(np.ascontiguousarray(x).view(np.uint8), np.ascontiguousarray(y).view(np.uint8))


@pytest.fixture(params=["numpy", "host"])
def executor(request):
    if request.param == "host":
        return request.getfixturevalue("host_executor")
    return lambda function, *args, **kwargs: function(*args, **kwargs)


# --- second calls ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", [0, 8, 1])
@pytest.mark.parametrize(("function", "make", "more", "plan"), CASES)
def test_other_data_at_other_addresses(executor, caches, function, make, more, plan, by):
    with forced(**plan):
        results = []
        kept = [placed(make(seed, **more), by) for seed in range(3)]
        for arguments in kept:
            caches[function.__name__]._ready.clear()
            results.append(executor(function, **arguments))
        for arguments, expected in [*zip(kept, results, strict=True)] * 2:
            same(executor(function, **arguments), expected)
        assert known(caches) == 1


@pytest.mark.parametrize(("function", "make", "more", "plan"), CASES[: -len(GRADIENTS)])
@pytest.mark.parametrize("by", [0, 1])
def test_out_at_other_addresses(executor, caches, function, make, more, plan, by):
    arguments = placed(make(0, **more))
    with forced(**plan):
        expected = executor(function, **arguments)
        caches[function.__name__]._ready.clear()
        for _ in range(3):
            out = at(np.zeros_like(expected[0]), by)
            results = executor(function, **arguments, out=out)
            assert results[0] is out
            same(results, expected)
    assert known(caches) == 1


@pytest.mark.parametrize(("function", "make", "more", "plan"), CASES)
def test_blocks_take_turns_where_a_grid_is_too_large(host_executor, caches, monkeypatch, function, make, more, plan):
    arguments = placed(make(0, **more))
    with forced(**plan):
        expected = host_executor(function, **arguments)
        caches[function.__name__]._ready.clear()
        monkeypatch.setattr(_launch, "LARGEST_GRID", 1)
        same(host_executor(function, **arguments), expected)


def test_every_call_is_checked_for_what_overlaps(caches):
    memory = np.ones(200, F32)
    start = -memory.ctypes.data // 4 % 4
    out = memory[start + 100 :][:15].reshape(1, 3, 5)
    scan = {"A": -np.ones((5, 2), F32), "B": np.ones((1, 3, 2), F32), "C": np.ones((1, 3, 2), F32)}
    for function, x, others, allowed in (
        (cuscan.linear_scan, "b", {"a": 0.5, "axis": 1}, [0, 100]),
        (cuscan.selective_scan, "u", {"delta": at(np.ones((1, 3, 5), F32)), **scan}, [0]),
    ):
        expected = function(**{x: np.ones((1, 3, 5), F32)}, **others)
        caches[function.__name__]._ready.clear()
        for where in (0, 100, 104, 96, 112, 0):
            memory[:] = 1
            given = {x: memory[start + where :][:15].reshape(1, 3, 5), **others, "out": out}
            if where in allowed:
                np.testing.assert_array_equal(function(**given), expected)
            else:
                with pytest.raises(ValueError, match=f"out overlaps {x} in memory"):
                    function(**given)
                assert (memory == 1).all()
        assert len(caches[function.__name__]._ready) == 1


def test_out_may_become_the_input_and_be_it_no_more(executor, caches):
    a, b = (np.random.default_rng(i).uniform(-1, 1, (3, 40)).astype(F32) for i in range(2))
    expected = executor(cuscan.linear_scan, a, b, axis=1)
    for which in ("apart", "b", "a", "apart"):
        gates, inputs, out = at(a), at(b), at(np.zeros_like(b))
        out = {"apart": out, "a": gates, "b": inputs}[which]
        assert executor(cuscan.linear_scan, gates, inputs, axis=1, out=out) is out
        np.testing.assert_array_equal(out, expected)
    assert known(caches) == 2
    small = at(a[:1])
    cuscan.linear_scan(small, at(b), axis=1, out=at(b))
    for _ in range(2):  # a gate that broadcasts is not what may be written to
        with pytest.raises(ValueError, match="out overlaps a in memory; it may only be exactly b or a"):
            cuscan.linear_scan(small, at(b), axis=1, out=np.lib.stride_tricks.as_strided(small, (3, 40), (160, 4)))


def test_offsets_are_looked_at_in_every_call(executor):
    b = np.ones((1, 9), F32)
    u, A, B = np.ones((1, 9, 2), BF16), -np.ones((2, 4), F32), np.ones((1, 9, 4), BF16)
    good, bad = at(np.array([0, 4, 9])), at(np.array([0, 4, 10]))
    for function, given in ((cuscan.linear_scan, {"a": 0.5, "b": b, "axis": 1}),
                            (cuscan.selective_scan, {"u": u, "delta": u, "A": A, "B": B, "C": B})):  # fmt: skip
        for _ in range(2):
            executor(function, **given, cu_seqlens=good)
            with pytest.raises(ValueError, match=r"cu_seqlens must lie in \[0, 9\]"):
                executor(function, **given, cu_seqlens=bad)


def test_plans_that_are_forced_in_between(host_executor, caches):
    arguments = placed(linear_arguments(0, shape=(3, 700)))
    plans = [{}, {"schedule": Schedule.SERIAL}, {**SPLIT, "lanes": Lanes.TIME, "chunk": 100},
             {**SPLIT, "lanes": Lanes.TIME, "chunk": 200}]  # fmt: skip
    scratch = [0, 0, 2 * 3 * 7 * 4, 2 * 3 * 4 * 4]
    for _ in range(2):
        for plan, more in zip(plans, scratch, strict=True):
            with forced(**plan):
                host_executor(cuscan.linear_scan, **arguments)
            assert sum(host_executor.allocated) == arguments["b"].nbytes + 3 * 4 + more
    assert known(caches) == len(plans)


# --- what makes another signature -----------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [cuscan.linear_scan, cuscan.selective_scan], ids=lambda f: f.__name__)
def test_whatever_a_launch_depends_on_makes_another_signature(host_executor, caches, function):
    make = linear_arguments if function is cuscan.linear_scan else selective_arguments
    more = {"h0": draw(3)} if function is cuscan.linear_scan else {"h0": draw(2, 6, 4), "D": draw(6)}
    arguments = placed(make(0, **more))

    def run(different, **changes):
        before = known(caches)
        results = host_executor(function, **{**arguments, **changes})
        assert known(caches) == before + different, changes
        return results

    expected = run(1)
    run(0)
    for name, x in arguments.items():
        if isinstance(x, np.ndarray):
            for change in (at(x, 4), at(x, 8), at(x, 1), np.asfortranarray(x)):
                if change.strides != x.strides or change.ctypes.data % 16:
                    same(run(1, **{name: change}), expected)
    options = [{"reverse": True}, {"return_last_state": False}, {"out_dtype": F32}, {"out_dtype": np.float64}]
    if function is cuscan.linear_scan:
        options += [{"a": 0.0}, {"a": -0.0}, {"a": np.nan}, {"a": 2.0}, {"h0": 0.0}, {"h0": -0.0}, {"h0": np.nan},
                    {"h0": None}, {"mask": np.ones((3, 130), bool)}, {"reset": np.ones((3, 130), bool)},
                    {"b": at(arguments["b"].astype(BF16)), "a": at(arguments["a"].astype(BF16))}]  # fmt: skip
        options[2]["out_dtype"] = BF16  # F32 is the type without it, said in another way
    else:
        options += [{"delta_softplus": False}, {"delta_limit": (0.0, 1.0)}, {"delta_limit": (-0.0, 1.0)}, {"D": None},
                    {"h0": None}, {"mask": at(np.ones((2, 47), bool))}, {"delta": at(arguments["delta"].astype(F32))},
                    {"return_states": True}]  # fmt: skip
    for change in options:
        run(1, **change)
        run(0, **change)


def test_a_number_that_is_nan_or_negative_zero_stays_so(host_executor):
    b = at(np.array([[-0.0, 1.0, 2.0]], F32))
    for _ in range(2):
        np.testing.assert_array_equal(host_executor(cuscan.linear_scan, 0.5, b, np.nan, axis=1), [[np.nan] * 3])
        np.testing.assert_array_equal(host_executor(cuscan.linear_scan, np.nan, b, axis=1), [[-0.0, np.nan, np.nan]])
        signs = [np.signbit(host_executor(cuscan.linear_scan, 1.0, b, zero, axis=1)[0, 0]) for zero in (0.0, -0.0)]
        assert signs == [False, True]


def test_what_equals_a_right_option_is_refused_after_it():
    b, (_, given) = np.ones((3, 5), F32), ((), selective_arguments(0))
    cuscan.linear_scan(0.5, b, axis=1, reverse=True)
    for wrong in ({"axis": True}, {"axis": 1.0}, {"axis": 1, "reverse": 1}):
        with pytest.raises(TypeError, match="must be"):
            cuscan.linear_scan(0.5, b, **{"axis": 1, "reverse": True, **wrong})
    cuscan.selective_scan(**given)
    with pytest.raises(TypeError, match="delta_softplus must be True or False"):
        cuscan.selective_scan(**given | {"delta_softplus": 1})


def test_an_out_that_becomes_read_only_is_refused():
    b, out = np.ones((3, 5), F32), np.ones((3, 5), F32)
    cuscan.linear_scan(0.5, b, axis=1, out=out)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="out must be writable"):
        cuscan.linear_scan(0.5, b, axis=1, out=out)


def test_options_that_cannot_be_hashed_are_refused():
    with pytest.raises(TypeError, match="axis must be an int, got list"):
        cuscan.linear_scan(0.5, np.ones((3, 5), F32), axis=[1])


# --- the cache ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("function", "make", "size"), [
    (cuscan.linear_scan, linear_arguments, lambda n: {"shape": (n, 30)}),
    (cuscan.selective_scan, selective_arguments, lambda n: {"batch": n}),
], ids=["linear_scan", "selective_scan"])  # fmt: skip
def test_the_cache_is_bounded_and_keeps_no_arrays(executor, monkeypatch, function, make, size):
    cache = _calls.Cache(3)
    monkeypatch.setattr(CACHED[function.__name__], "_READY", cache)
    watched = []
    expected = {}
    for n in [1, 2, 3, 4, 5, 1, 5, 2]:
        arguments = placed(make(0, **size(n)))
        results = executor(function, **arguments)
        same(results, expected.setdefault(n, [x.copy() for x in results]))
        watched += [weakref.ref(x) for x in (*arguments.values(), *results) if isinstance(x, np.ndarray)]
        assert len(cache._ready) <= 3
    del arguments, results
    if hasattr(executor, "modules"):
        executor.modules.memory.clear()
    gc.collect()
    assert [ref() for ref in watched] == [None] * len(watched)


class PackingPlace:
    """A place of its own for each thread: what is launched, with nothing run."""

    limits = DeviceLimits(90, 132, 227 * 1024)

    def __init__(self):
        self.modules, self.packed, self.allocated = self, [], []

    def get_function(self, source, name):
        assert name in source.names
        return self

    max_dynamic_shared_size_bytes = 1 << 20

    def __call__(self, _grid, _block, arguments, **_):
        self.packed.append(arguments[0].tobytes())

    def allocate(self, shape, dtype):
        self.allocated.append(np.empty(shape, dtype))
        return self.allocated[-1]

    def keep(self, *arrays):
        pass

    def pointer(self, array):
        return array.ctypes.data


def test_threads_launch_with_their_own_addresses(monkeypatch):
    monkeypatch.setattr(linear, "_READY", _calls.Cache(4))
    failures = []
    barrier = threading.Barrier(8)

    def work(seed):
        r = np.random.default_rng(seed)
        try:
            barrier.wait()
            for rows in r.permutation(np.repeat(np.arange(1, 9), 12)):
                place = PackingPlace()
                token = _arrays.host_place.set(lambda place=place: place)
                a, b = np.ones((rows, 40), F32), np.ones((rows, 40), F32)
                with forced(**SPLIT, lanes=Lanes.TIME):
                    h = cuscan.linear_scan(a, b, axis=1)
                _arrays.host_place.reset(token)
                assert h is place.allocated[0]
                for packed in (place.packed[0], place.packed[2]):
                    starts = [struct.unpack_from("<q", packed, 72 * i)[0] for i in range(4)]
                    assert starts == [a.ctypes.data, b.ctypes.data, 0, h.ctypes.data]
                    assert list(struct.unpack_from("<2q", packed, 5 * 72)) == [
                        x.ctypes.data for x in place.allocated[1:]
                    ]
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# --- recording ------------------------------------------------------------------------------------------------------


def record(body):
    """What is launched on arrays x and y, y 8 bytes beyond a multiple of 16."""
    place = PackingPlace()
    token = _arrays.host_place.set(lambda: place)
    try:
        given = _calls.Given(("x", "none", "y"), (at(np.ones(8, F32)), None, at(np.ones(8, F32), 8)), ())
        launches = _calls.Launches.of(given).recorded(given, body)
        results = launches.run(given)
    finally:
        _arrays.host_place.reset(token)
    return given, launches, place, results


def launch(place, *words, grid=1):
    function = place.modules.get_function(_source.marks_source(), "step_marks")
    _calls.start(function, (grid,), (128,), struct.pack(f"<{len(words)}q", *words))


def test_addresses_are_told_from_all_other_words():
    numbers = [0, 1, -1, 2**63 - 1, -(2**63), 2**48, 128]
    floats = [0.5, -1e308, np.inf, -np.inf, np.nan, -np.nan]
    words = [*numbers, *struct.unpack("<6q", struct.pack("<6d", *floats))]
    words += struct.unpack("<3q", struct.pack("<6f", 1, np.nan, 2, np.inf, 3, -np.nan))

    def body(place, arrays):
        assert place.pointer(arrays["x"]) % 16 == 0
        assert place.pointer(arrays["y"]) % 16 == 8
        scratch = place.allocate((3, 5), np.float64)
        backwards = arrays["y"][::-1]
        launch(place, *words, place.pointer(arrays["x"]), place.pointer(backwards), place.pointer(scratch) - 2**40)
        return (scratch,)

    given, launches, place, (scratch,) = record(body)
    (step,) = launches.steps
    n = len(words)
    assert step.addresses == ((n, 0, 0), (n + 1, 2, 28), (n + 2, 3, -(2**40)))
    x, _, y = given.arrays
    assert scratch.shape == (3, 5)
    assert scratch is place.allocated[0]
    expected = [*words, x.ctypes.data, y.ctypes.data + 28, scratch.ctypes.data - 2**40]
    assert place.packed == [struct.pack(f"<{n + 3}q", *expected)]


WRONG = {
    "half an address": lambda place, x: launch(place, place.pointer(x) >> 32),
    "a multiple": lambda place, x: launch(place, place.pointer(x) // 2),
    "a grid": lambda place, x: launch(place, 0, grid=place.pointer(x) >> 40),
    "a distance": lambda place, x: launch(place, place.pointer(x) ^ 1 << 49),
    "what is allocated": lambda place, x: place.allocate((place.pointer(x) >> 48,), np.int8),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_depends_on_addresses_in_another_way_is_seen(wrong):
    def body(place, arrays):
        WRONG[wrong](place, arrays["x"])
        return ()

    with pytest.raises(AssertionError, match="depends on addresses"):
        record(body)


# --- on a GPU that is not there -------------------------------------------------------------------------------------


class FakeCupy:
    """What is asked of CuPy, with NumPy's memory and the kernels on the CPU executor; it has two devices."""

    def __init__(self, modules):
        self.memory, self._get_function = modules.memory, modules.get_function
        self.memory.clear()
        self.device, self.capturing, self.passed, self.ptr = 0, False, False, 4321
        self.launched, self.allocated, self.kernels, self.contexts = [], [], [], set()
        fake = self

        class Array:
            __module__ = "cupy"

            def __init__(self, shape, dtype=F32, memptr=None, strides=None):
                owner = np.empty(shape, dtype)
                self.data = memptr or types.SimpleNamespace(ptr=owner.ctypes.data, device_id=fake.device, owner=owner)
                interface = {"version": 3, "shape": shape, "strides": strides, "typestr": f"|V{owner.itemsize}"}
                interface["data"] = self.data.ptr, False
                x = np.asarray(types.SimpleNamespace(__array_interface__=interface)).view(dtype)
                self.values, self.shape, self.dtype, self.strides = x, x.shape, x.dtype, x.strides
                self.size, self.ndim, self.nbytes = x.size, x.ndim, x.nbytes
                self.device = types.SimpleNamespace(id=self.data.device_id)

            def __len__(self):
                return len(self.values)

            def __setitem__(self, where, value):
                assert self.data.device_id == fake.device
                self.values[where] = getattr(value, "values", value)
                fake.memory.register(self.values)

        self.ndarray = Array
        self.cuda = self.runtime = self.driver = self

    def array(self, x):
        """`x` on the current device, at the same address modulo 16."""
        owner = np.zeros(x.nbytes + 48, np.uint8)
        start = owner.ctypes.data + (x.ctypes.data - owner.ctypes.data) % 16
        made = self.ndarray(
            x.shape, x.dtype, types.SimpleNamespace(ptr=start, device_id=self.device, owner=owner), x.strides
        )
        made[...] = x
        return made

    def empty(self, shape, dtype):
        made = self.ndarray(shape, dtype)
        self.memory.register(made.values, initialised=False)
        self.allocated.append(made)
        return made

    def modules_of(self, device):
        def get_function(source, name):
            kernel = self._get_function(source, name)
            self.kernels.append((device, kernel))
            kernel.kernel = types.SimpleNamespace(ptr=len(self.kernels) - 1)
            return _compile.Kernel(kernel)

        return types.SimpleNamespace(get_function=get_function)

    class CUDADriverError(Exception):
        pass

    def memGetInfo(self):  # noqa: N802
        self.contexts.add(threading.get_ident())

    def launchKernel(self, function, x, y, z, threads, second, third, shared, stream, arguments, extra):  # noqa: N802
        """What a thread launches first is refused, as the driver does where no context is current."""
        assert (z, second, third, stream, extra) == (1, 1, 1, self.ptr, 0)
        if threading.get_ident() not in self.contexts:
            raise self.CUDADriverError
        device, kernel = self.kernels[function]
        self.launched.append((kernel.name, device, self.device))
        size = kernel._parameters[0].size
        struct = ctypes.string_at(ctypes.c_int64.from_address(arguments).value, size)
        kernel((x, y), (threads,), (np.void(struct),), shared_mem=shared)

    def getDevice(self):  # noqa: N802
        return self.device

    @contextlib.contextmanager
    def Device(self, device):  # noqa: N802
        before, self.device = self.device, device
        yield
        self.device = before

    def get_current_stream(self):
        return self

    def is_capturing(self):
        return self.capturing

    def asarray(self, x):
        return x.array

    def Event(self, *, disable_timing):  # noqa: N802
        assert disable_timing
        return types.SimpleNamespace(done=False, record=lambda: self.launched.append("event"))


class Foreign:
    def __init__(self, array):
        self.array = array

    @property
    def __cuda_array_interface__(self):
        return {"data": (self.array.data.ptr, False)}


@pytest.fixture
def cupy(host_executor, monkeypatch):
    fake = FakeCupy(host_executor.modules)
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(_compile, "cupy_limits", lambda _: PackingPlace.limits)
    monkeypatch.setattr(_compile, "cupy_modules", fake.modules_of)
    monkeypatch.setattr(_arrays.CupyPlace, "_held", deque())
    yield fake
    fake.memory.clear()


@pytest.mark.parametrize("by", [0, 1])
@pytest.mark.parametrize(("function", "make", "more", "plan"), CASES)
def test_on_a_device(host_executor, cupy, caches, function, make, more, plan, by):
    if more.get("state") == 0:
        return  # CuPy's own arithmetic
    with forced(**plan):
        for seed in range(2):
            arguments = placed(make(seed, **more), by)
            expected = host_executor(function, **arguments)
            cupy.memory.clear()
            for device in (0, 1):
                with cupy.Device(device):
                    moved = {n: cupy.array(x) if isinstance(x, np.ndarray) else x for n, x in arguments.items()}
                results = function(**moved)
                results, host_results = (tuple(x for x in each if x is not None) for each in (results, expected))
                same(tuple(x.values for x in results), host_results)
                assert {x.data.device_id for x in results} == {device}
                assert {where[1:] for where in cupy.launched} <= {(device, device)}
                assert cupy.device == 0
                cupy.launched.clear()
    assert known(caches) == 3  # the CPU's, and one for each device


def test_arrays_of_others_are_kept_until_an_event_after_the_launches(cupy, caches):
    for _ in range(3):
        a, b = (cupy.array(x) for x in np.ones((2, 3, 40), F32))
        h = cuscan.linear_scan(Foreign(a), b, axis=1)
        assert h.values[0, -1] == 40
        assert [x if x == "event" else x[1:] for x in cupy.launched] == [(0, 0), "event"]
        cupy.launched.clear()
        ((event, (kept,)),) = _arrays.CupyPlace._held
        assert kept is a
        event.done = True
    assert known(caches) == 1


def test_a_workspace_keeps_what_a_captured_call_allocates(cupy):
    a, b = (cupy.array(x) for x in np.ones((2, 3, 40), F32))
    for capturing in (False, True, True):
        cupy.capturing = capturing
        cupy.allocated.clear()
        with cuscan.Workspace() as workspace, forced(**SPLIT):
            cuscan.linear_scan(a, b, axis=1)
        assert len(cupy.allocated) == 2  # the result, and the summaries
        assert workspace.nbytes == sum(x.nbytes for x in cupy.allocated) * capturing
