"""What trace records: launches, copies, bytes, streams, gaps; and that it costs nothing when it is closed."""

import threading
import time
import types

import numpy as np
import pytest
from test_diagnostics import BF16, mamba

import cuscan
from cuscan import _calls, _compile, _figures, _limits, _performance, _source
from cuscan._plan import Lanes, Schedule, forced
from cuscan.testing import host

F32 = np.float32
SPLIT = {"schedule": Schedule.SPLIT, "chunk": 32, "lanes": Lanes.TIME}


def linear(host_executor, b, **options):
    with forced(**SPLIT):
        return host_executor(cuscan.linear_scan, 0.5, b, **options)


def test_launches_and_bytes(host_executor):
    b = np.ones((3, 100), F32)
    with cuscan.trace() as t:
        h, last = linear(host_executor, b, axis=1, return_last_state=True)
    (call,) = t.calls
    assert [x.kernel for x in t.launches] == [
        "linear_scan_time_summarise_float32", "linear_scan_time_apply_float32", "linear_scan_time_apply_float32",
    ]  # fmt: skip
    assert call.plans[0].order.schedule is Schedule.SPLIT
    assert t.result_bytes == h.nbytes + last.nbytes
    assert t.scratch_bytes == 2 * 3 * 4 * 4  # two arrays of (rows, chunks)
    assert t.scratch_bytes + t.result_bytes == sum(host_executor.allocated)
    assert t.copies == []
    assert all(x.milliseconds > 0 for x in t.launches)
    assert 0 < t.busy[0] <= 1
    text = str(t)
    assert "2 x linear_scan_time_apply_float32" in text
    assert "96 bytes" in text


def test_nothing_is_recorded_when_it_is_closed(host_executor):
    b = np.ones((3, 100), F32)
    with cuscan.trace() as outer:
        linear(host_executor, b, axis=1)
        with cuscan.trace() as inner:
            linear(host_executor, b, axis=1)
    linear(host_executor, b, axis=1)
    assert (len(outer.calls), len(inner.calls)) == (2, 1)
    assert _calls.watcher is None
    with cuscan.trace() as numpy_alone:
        cuscan.linear_scan(0.5, b, axis=1)
    assert numpy_alone.calls == []
    assert "nothing is launched" in str(numpy_alone)


def test_an_error_leaves_it_closed():
    with pytest.raises(KeyError), cuscan.trace():
        raise KeyError
    assert _calls.watcher is None


def test_symptom_copies(host_executor):
    memory = np.zeros(3 * 100 * 4 + 1, np.uint8)
    b = np.ndarray((3, 100), F32, memory, 1)
    b[...] = 1
    with cuscan.trace() as t:
        for _ in range(3):
            linear(host_executor, b, axis=1, return_last_state=True, h0=None)
    assert [(x.what, x.nbytes) for x in t.copies] == [("b", 1200)] * 3
    (finding,) = [x for x in t.findings if "copy" in x.name]
    assert finding.name == "a copy of b in 3 of 3 calls"
    assert finding.figure == "3600 bytes"
    aligned = b.copy()
    with cuscan.trace() as t:
        linear(host_executor, aligned, axis=1)
    assert [x.name for x in t.findings if "copy" in x.name] == []


def test_numbers_that_are_filled_in_are_no_copies(host_executor):
    with cuscan.trace() as t:
        linear(host_executor, np.ones((3, 100), F32), axis=1, h0=2.0)
    assert [x.what for x in t.copies] == ["fill with 2.0"]
    assert t.findings == []


def test_symptom_one_layer_fast_the_model_slow(host_executor):
    b = np.ones((3, 100), F32)
    linear(host_executor, b, axis=1)
    with cuscan.trace() as t:
        for _ in range(3):
            linear(host_executor, b, axis=1)
            time.sleep(0.1)
    assert t.busy[0] < 0.5
    (finding,) = t.findings
    assert finding.name == "the stream waits between kernels"
    assert "fill" in str(t)


def test_symptom_new_shapes_in_every_call(host_executor):
    with cuscan.trace() as t:
        for length in range(51, 57):
            host_executor(cuscan.linear_scan, 0.25, np.ones(length, F32))
    assert t.new_signatures == 6
    assert "most calls are of a new signature" in [x.name for x in t.findings]
    with cuscan.trace() as t:
        for _ in range(6):
            host_executor(cuscan.linear_scan, 0.25, np.ones(51, F32))
    assert t.new_signatures == 0


class OnStream(host.HostPlace):
    """The CPU executor, told that it works on some stream."""

    stream = 1


def test_symptom_an_array_of_an_unordered_stream(host_executor, monkeypatch):
    place = OnStream(host_executor.modules, _performance._DryPlace.limits)
    monkeypatch.setattr(host_executor, "place", lambda: place)
    b = np.ones((3, 100), F32)
    with cuscan.trace() as t:
        h = linear(host_executor, b, axis=1)
        place.stream = 2
        linear(host_executor, h, axis=1)
    (finding,) = [x for x in t.findings if "stream" in x.name and "waits" not in x.name]
    assert finding.name == "b is read on another stream than it was written on"
    assert finding.figure == "call 0 wrote it on stream 1, call 1 reads it on stream 2"
    assert set(t.busy) == {1, 2}
    place.stream = 1
    with cuscan.trace() as t:
        linear(host_executor, linear(host_executor, b, axis=1), axis=1)
    assert [x for x in t.findings if "another stream" in x.name] == []


def test_calls_of_other_threads_are_seen(host_executor):
    b = np.ones((3, 100), F32)
    with cuscan.trace() as t:
        thread = threading.Thread(target=lambda: linear(host_executor, b, axis=1))
        thread.start()
        thread.join()
    assert len(t.calls) == 1


def test_a_closed_trace_costs_nothing():
    class Bare(_calls.Launches):
        def _run(self, given, place):
            if given.device is None:
                raise AssertionError
            arrays, addresses = [*(given.tensors if place is given.torch else given.arrays)], [*given.addresses]
            made = [place.allocate(shape, dtype) for shape, dtype in self.allocated]
            for i, start in self.parts:
                arrays.append(made[i])
                addresses.append(place.pointer(made[i]) + start)
            for step in self.steps:
                step.run(place, arrays, addresses)
            return tuple([arrays[i] for i in self.results])

    given = types.SimpleNamespace(device=0, arrays=(), addresses=(), torch=0)
    watching, bare = (kind((), (), (), "", ()) for kind in (_calls.Launches, Bare))
    times = {watching: [], bare: []}
    for _ in range(20):
        for launches, taken in times.items():
            begin = time.perf_counter()
            for _ in range(2000):
                launches._run(given, None)
            taken.append((time.perf_counter() - begin) / 2000)
    assert min(times[watching]) - min(times[bare]) < 0.3e-6


# --- on a GPU, faked ------------------------------------------------------------------------------------------------


class FakeCuda:
    """CuPy's names over NumPy arrays: a device, and events that take the host's time."""

    class Event:
        def record(self):
            self.at = time.perf_counter()

        def synchronize(self):
            pass

    def __init__(self):
        self.cuda = types.SimpleNamespace(
            Event=self.Event,
            Device=lambda: types.SimpleNamespace(id=0, attributes=_limits.H200, synchronize=lambda: None),
            get_elapsed_time=lambda begin, end: 1e3 * (end.at - begin.at),
            runtime=types.SimpleNamespace(getDeviceProperties=lambda _: {"name": b"a chip"}),
        )

    def __getattr__(self, name):
        return getattr(np, name)


def test_a_plan_with_measured_times(host_executor, monkeypatch):
    for name, value in (("num_regs", 100), ("local_size_bytes", 8), ("shared_size_bytes", 1024)):
        monkeypatch.setattr(host.HostKernel, name, value, raising=False)
    given = mamba(1, 70, 4, 4, BF16)
    options = {"delta_softplus": True, "delta_limit": None, "reverse": False, "layout": "bld"}
    absent = dict.fromkeys(("h0", "mask", "reset", "cu_seqlens"))
    problem = _figures.selective_problem(np, absent | given, options)
    plan = host_executor(lambda: _performance.plan_of(FakeCuda(), cuscan.selective_scan, given, problem))
    assert plan.device == "a chip"
    assert (plan.registers, plan.frame_bytes, plan.blocks_per_sm) == (100, 8, 4)
    assert plan.waves == 0
    assert plan.measured_ms > plan.limit_ms > 0
    assert plan.host_us == pytest.approx(1e3 * plan.measured_ms, rel=0.5)
    assert plan.expected_ms == max(plan.limit_ms * 132 * 8 * 32 / (plan.blocks * plan.threads), 70 * 25e-6)


def test_residence():
    kernel = types.SimpleNamespace(num_regs=65, local_size_bytes=0, shared_size_bytes=0)
    seen = _limits.residence(_limits.H200, kernel, blocks=1056, threads=128, shared=20 * 1024)
    assert seen == _limits.Residence(65, 0, 7, 1.14)  # 72 registers each; shared memory would let 10 be


# --- CUSCAN_LOG and CUSCAN_DUMP --------------------------------------------------------------------------------------


def test_each_new_plan_is_printed_once(host_executor, monkeypatch, capsys):
    monkeypatch.setenv("CUSCAN_LOG", "plan")
    monkeypatch.setattr(_calls.Told, "plans", set())
    for length in (77, 77, 77):
        host_executor(cuscan.linear_scan, 0.125, np.ones((5, length), F32), axis=1)
    first = capsys.readouterr().err
    assert first.count("LinearPlan(") == 1
    assert "reason='block: lanes over time" in first
    assert "launches linear_scan_time_apply_float32" in first
    host_executor(cuscan.linear_scan, 0.125, np.ones((5, 78), F32), axis=1)
    assert capsys.readouterr().err.count("LinearPlan(") == 1
    monkeypatch.delenv("CUSCAN_LOG")
    host_executor(cuscan.linear_scan, 0.125, np.ones((5, 79), F32), axis=1)
    assert capsys.readouterr().err == ""


def test_the_compilers_output_is_dumped(tmp_path):
    if not list(_compile.nvrtc_libraries()):
        pytest.skip("NVRTC is not installed")
    source = _source.sum_source()
    _compile.dump(source, tmp_path / "new", 90)
    files = {path.suffix: path for path in (tmp_path / "new").iterdir()}
    assert files.keys() == {".cu", ".cubin", ".txt"}
    assert files[".cu"].read_text() == source.text
    assert files[".cubin"].read_bytes()[:4] == b"\x7fELF"
    assert "sum_partials_float64" in files[".txt"].read_text()
    assert files[".cu"].name.startswith("sum_partials_float32-")
