"""Streams, devices, graphs, threads and processes: where and when a call runs on a GPU."""

import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest

import cuscan
from cuscan import _arrays, _compile
from cuscan._plan import Schedule, forced

SPIN = """
extern "C" __global__ void spin(long long cycles) {
  const long long start = clock64();
  while (clock64() - start < cycles) {}
}
"""
SECOND = 2_000_000_000  # cycles, about


@pytest.fixture
def cupy(cuda_executor):
    return cuda_executor.xp


@pytest.fixture
def spin(cupy):
    kernel = cupy.RawKernel(SPIN, "spin")
    kernel((1,), (1,), (np.int64(1),))
    return lambda cycles=SECOND // 5: kernel((1,), (1,), (np.int64(cycles),))


def selective_inputs(cupy, seed=0, length=500):
    r = cupy.random.RandomState(seed)
    u, delta = (r.uniform(size=(1, length, 64)).astype("float32") for _ in range(2))
    B, C = (r.uniform(size=(1, length, 16)).astype("float32") for _ in range(2))
    return [u, delta, -r.uniform(size=(64, 16)).astype("float32"), B, C]


CASES = {
    "serial": {"schedule": Schedule.SERIAL},
    "split": {"schedule": Schedule.SPLIT, "chunk": 64},
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("plan", CASES.values(), ids=CASES)
def test_a_graph_replays_on_changed_data(cupy, plan, packed):
    inputs = selective_inputs(cupy)
    offsets = cupy.array([0, 100, 100, 333, 500]) if packed else None

    def call():
        y, last = cuscan.selective_scan(*inputs, cu_seqlens=offsets, return_last_state=True)
        return y, last, cuscan.linear_scan(0.5, inputs[0], 1.0, axis=1, return_last_state=True)[0]

    with forced(**plan):
        call()  # compiles
        stream = cupy.cuda.Stream(non_blocking=True)
        with cuscan.Workspace() as workspace, stream:
            stream.begin_capture()
            results = call()
            graph = stream.end_capture()
        assert workspace.nbytes > 0
        # Whatever was given back to the pool would be handed out and overwritten here.
        others = [cupy.full(1 << size, 255, "uint8") for size in range(9, 29) for _ in range(3)]
        for seed in (1, 2):
            for to, new in zip(inputs, selective_inputs(cupy, seed), strict=True):
                to[...] = new
            cupy.cuda.Device().synchronize()
            graph.launch(stream)
            stream.synchronize()
            for replayed, expected in zip(results, call(), strict=True):
                assert (replayed == expected).all()
        assert all(int(x.min()) == 255 for x in others)
    workspace.release()
    assert workspace.nbytes == 0


def test_a_call_runs_on_the_current_stream(cupy, spin):
    inputs = selective_inputs(cupy)
    expected = cuscan.selective_scan(*inputs)
    late = [cupy.zeros_like(x) for x in inputs]
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        spin()
        for to, x in zip(late, inputs, strict=True):
            to[...] = x
        y = cuscan.selective_scan(*late)
    stream.synchronize()
    assert (y == expected).all()


class Producer:
    """An array of another library, which a slow kernel on a stream of its own has yet to fill."""

    def __init__(self, cupy, spin, values):
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.array = cupy.zeros_like(values)
        cupy.cuda.Device().synchronize()
        with self.stream:
            spin()
            self.array[...] = values


class ByDlpack(Producer):
    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options):
        with self.stream:
            return self.array.__dlpack__(**options)


class ByInterface(Producer):
    @property
    def __cuda_array_interface__(self):
        with self.stream:
            return self.array.__cuda_array_interface__ | {"stream": self.stream.ptr}


@pytest.mark.parametrize("kind", [ByDlpack, ByInterface])
def test_an_input_of_another_stream_is_waited_for(cupy, spin, kind):
    values = cupy.random.uniform(size=(3, 1000)).astype("float32")
    expected = cuscan.linear_scan(0.5, values, axis=1)
    assert (cuscan.linear_scan(0.5, kind(cupy, spin, values), axis=1) == expected).all()


def test_no_call_waits_for_the_device(cupy, spin):
    inputs = selective_inputs(cupy)
    offsets, reset = cupy.array([0, 100, 500]), cupy.ones((500, 1), bool)

    def call():
        cuscan.selective_scan(*inputs, cu_seqlens=offsets)
        cuscan.linear_scan(0.5, inputs[0], axis=1, reset=reset)

    call()  # compiles, and loads the kernels, which waits
    cupy.cuda.Device().synchronize()
    spin(SECOND)
    busy = cupy.cuda.Event()
    busy.record()
    call()
    assert not busy.done


def test_arrays_of_a_second_device(cupy):
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs a second CUDA device")
    expected = cuscan.selective_scan(*selective_inputs(cupy)).get()
    with cupy.cuda.Device(1):
        inputs = selective_inputs(cupy)
    with cupy.cuda.Device(0):
        y = cuscan.selective_scan(*inputs)
        assert cupy.cuda.Device().id == 0
    assert y.device.id == 1
    np.testing.assert_array_equal(y.get(), expected)
    with pytest.raises(ValueError, match="one device, but u on device 1"):
        cuscan.selective_scan(inputs[0], cupy.ones((1, 500, 64), "float32"), *inputs[2:])


FIRST_CALLS = """
    import threading
    import cupy, cuscan
    b = cupy.arange(30000, dtype="float32").reshape(3, 10000) % 7
    barrier, right = threading.Barrier({threads}), []
    def call():
        barrier.wait()
        h = cuscan.linear_scan(cupy.float32(1), b, axis=1, mask=cupy.ones((1, 10000), bool))
        right.append(bool((h == cupy.cumsum(b, axis=1)).all()))
    threads = [threading.Thread(target=call) for _ in range({threads})]
    [t.start() for t in threads], [t.join() for t in threads]
    assert right == [True] * {threads}
"""


def first_calls(folder, threads):
    code = textwrap.dedent(FIRST_CALLS).format(threads=threads)
    environment = {**os.environ, "CUPY_CACHE_DIR": str(folder), "CUSCAN_CACHE_DIR": str(folder)}
    return subprocess.Popen([sys.executable, "-W", "error", "-c", code], env=environment, stderr=subprocess.PIPE)


@pytest.mark.usefixtures("cupy")
def test_the_first_call_from_many_threads(tmp_path):
    process = first_calls(tmp_path, 32)
    _, errors = process.communicate()
    assert process.returncode == 0, errors.decode()


@pytest.mark.usefixtures("cupy")
def test_processes_that_race_on_a_cold_cache(tmp_path):
    processes = [first_calls(tmp_path, 1) for _ in range(8)]
    for process in processes:
        _, errors = process.communicate()
        assert process.returncode == 0, errors.decode()


class FakeCupy:
    """What CupyPlace asks of CuPy."""

    empty, ptr = staticmethod(np.empty), 0

    def __init__(self):
        self.cuda = self
        self.capturing = True

    def get_current_stream(self):
        return self

    def is_capturing(self):
        return self.capturing


def test_a_workspace_keeps_what_is_allocated_during_a_capture(monkeypatch):
    monkeypatch.setattr(_compile, "cupy_limits", lambda _: None)
    monkeypatch.setattr(_compile, "cupy_modules", lambda _: None)
    cupy, foreign = FakeCupy(), np.zeros(3, np.float32)

    def allocate():
        place = _arrays.CupyPlace(cupy, 0, (foreign,) if cupy.capturing else ())
        place.allocate((10,), np.float32)
        place.done()

    with cuscan.Workspace() as outer:
        allocate()
        assert outer.nbytes == 40 + 12
        with cuscan.Workspace() as inner:
            allocate()
        assert (inner.nbytes, outer.nbytes) == (52, 52)
        cupy.capturing = False
        allocate()
        assert outer.nbytes == 52
    cupy.capturing = True
    allocate()  # kept by the process
    assert outer.nbytes == 52
    outer.release()
    assert (inner.nbytes, outer.nbytes) == (52, 0)
