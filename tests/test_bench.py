"""The benchmark, on small arrays of NumPy where a GPU's would be: what it checks, counts, writes and draws."""

import json
import sys
import types

import numpy as np
import pytest

import bench.__main__ as command
import cuscan
from bench import ladder, limits, peers, workloads
from bench.workloads import Linear, LinearBackward, Selective, SelectiveBackward, Update
from cuscan import _arrays, _limits, _plan, _source
from cuscan.testing import host

CEILINGS = _limits.Limits(copy=4e12, exponentials=4e12, multiply_adds=3e13)
# Of an issue on this benchmark's record.
KEYS = {
    "op", "direction", "dtype", "layout", "batch", "length", "channels", "state", "ms", "limit_ms", "bound_by", "ratio",
    "bytes_per_s", "blocks_per_sm", "waves", "registers", "frame_bytes", "schedule",
}  # fmt: skip
SMALL = [
    Selective(2, 300, 4, 16, dtype="float32"),
    Selective(2, 300, 4, 16, layout="bdl", z=True, mask=True),
    Selective(1, 300, 4, 16, sequences=5, h0=True),
    Selective(2, 4, 4, 64, h0=True, last=True, states=True),
    SelectiveBackward(2, 300, 4, 16, z=True),
    SelectiveBackward(2, 300, 4, 16, dtype="float32", mask=True, layout="bdl"),
    SelectiveBackward(3, 4, 4, 16, h0=True),
    Linear((2, 300, 3), 1),
    Linear((300, 2), 0, dtype="bfloat16"),
    Linear((3, 300), 1, scalar=True),
    LinearBackward((2, 3, 300), 2),
    Update(3, 8, 16),
]


class Cupy(types.SimpleNamespace):
    """CuPy's names with NumPy's arrays, whose kernels run on the CPU; no time passes."""

    def __init__(self):
        class Stream:
            def __init__(self, non_blocking):
                assert non_blocking

            def __enter__(self):
                return self

            __exit__ = begin_capture = synchronize = lambda *_: None

            def end_capture(self):
                return types.SimpleNamespace(launch=lambda _: None)

        device = types.SimpleNamespace(id=0, attributes=_limits.H200, synchronize=lambda: None)
        runtime = types.SimpleNamespace(getDeviceProperties=lambda _: {"name": b"NumPy"})
        self.cuda = types.SimpleNamespace(Device=lambda: device, Stream=Stream, runtime=runtime)
        self.get_default_memory_pool = lambda: types.SimpleNamespace(total_bytes=lambda: 0)
        self.ndarray = ()  # no array is one of CuPy's

    def __getattr__(self, name):
        return getattr(np, name)


@pytest.fixture
def cupy(monkeypatch):
    """A stand-in for CuPy, with a clock that says 1, 2 or 3 ms."""

    def milliseconds(_cupy, call, repeats=21, _warm=3):
        call()
        return [1.0 + i % 3 for i in range(repeats)]

    for module in (command, limits):
        monkeypatch.setattr(module, "milliseconds", milliseconds)
    resident = _limits.Residence(registers=64, frame_bytes=0, blocks_per_sm=4, waves=0.5)
    monkeypatch.setattr(_limits, "residence", lambda *_: resident)
    return Cupy()


# Workloads


@pytest.mark.parametrize("load", SMALL, ids=repr)
def test_right_results_pass_and_wrong_ones_do_not(load):
    inputs = load.inputs(np)
    result = load.call(inputs)()
    load.check(inputs, result)
    if isinstance(load, Update):
        return  # its check makes a step of its own
    part = result[0] if isinstance(result, tuple) else result
    first = part.astype(np.float64)
    part[..., 1:, :] = part[..., :-1, :].copy()  # late by a step, or by a channel
    assert (first != part.astype(np.float64)).any()
    with pytest.raises(AssertionError):
        load.check(inputs, result)


def test_every_shape_that_counts_is_measured():
    loads = [load for kind in workloads.LOADS for load in kind]
    assert len(set(loads)) == len(loads)
    for sizes in workloads.TARGETS:
        for make in (Selective, SelectiveBackward):
            assert make(*sizes) in loads
        assert Selective(*sizes, dtype="float32") in loads
    shapes = [((8, n, 1536), 1) for n in (1024, 4096, 16384, 65536)] + [((8, 1536, n), 2) for n in (1024, 4096, 16384)]
    shapes += [((1, 131072, 512), 1), ((1, 16, 1 << 22), 2), ((1 << 28,), 0), ((1 << 27, 2), 0), ((1000000, 2), 0)]
    for shape in shapes:
        assert Linear(*shape) in loads
        assert LinearBackward(*shape) in loads
    for sizes in ((4096, 16, 1024, 16), (64, 512, 2048, 16)):
        assert Selective(*sizes) in loads
        assert SelectiveBackward(*sizes) in loads
    assert any(load.op == "selective_scan" and load.length == 4 and load.h0 for load in loads)


def test_limits_count_what_a_call_must_do():
    first = Selective(8, 4096, 1024, 16)
    elements = 8 * 4096 * 1024
    assert first.work == ("exponentials", elements * 17)
    assert first.useful_bytes == (3 * elements + 2 * 8 * 4096 * 16) * 2
    assert first.least(CEILINGS) == (elements * 17 / 4e12, "exponentials")
    gated = Selective(8, 4096, 1024, 16, z=True)
    assert gated.work[1] - first.work[1] == 2 * elements
    back = SelectiveBackward(8, 4096, 1024, 16)
    assert back.least(CEILINGS) == (13 * 16 * elements / 3e13, "operations")
    assert Linear((100, 10), 0).useful_bytes == 12000
    assert Linear((100, 10), 0, scalar=True).useful_bytes == 8000
    assert LinearBackward((100, 10), 0).useful_bytes == 20000
    assert LinearBackward((100, 10), 0).least(CEILINGS) == (20000 / 4e12, "bytes")


# The command


def only_calls(load):
    """The load, of which the call alone runs kernels; what makes and checks arrays is NumPy's own code."""

    def in_numpy(method):
        def run(self, *args, **kwargs):
            token = _arrays.host_place.set(None)
            try:
                return method(self, *args, **kwargs)
            finally:
                _arrays.host_place.reset(token)

        return run

    kind = type(load)
    return type(kind.__name__, (kind,), {name: in_numpy(getattr(kind, name)) for name in ("inputs", "check")})(
        **vars(load)
    )


@pytest.mark.parametrize(
    "load",
    [
        Linear((2, 70, 33), 1),
        LinearBackward((3, 70), 1),
        Selective(1, 70, 32, 16),
        pytest.param(SelectiveBackward(1, 70, 32, 16), marks=pytest.mark.full),
        pytest.param(Update(3, 8, 16), marks=pytest.mark.full),
    ],
    ids=repr,
)
def test_a_row_has_what_a_record_needs(load, cupy, host_executor):
    slow = _limits.Limits(copy=4e6, exponentials=4e6, multiply_adds=3e7)  # so that 2 ms are no mere multiple
    row = host_executor(command.measure_one, cupy, only_calls(load), slow, others=False, tensors=False)
    assert json.loads(json.dumps(row)) == row
    assert set(row) >= KEYS
    assert (row["op"], row["direction"], row["dtype"]) == (load.op, load.direction, load.dtype)
    assert (row["ms"], row["graph_ms"], row["spread_ms"]) == (2, 2, 2)
    assert row["ratio"] == pytest.approx(2e-3 / load.least(slow)[0], abs=1e-3)
    assert row["bytes_per_s"] == round(load.useful_bytes / 2e-3)
    assert row["copy_share"] == pytest.approx(load.useful_bytes / 2e-3 / 4e6, abs=1e-4)
    assert row["host_us"] > 0
    assert row["launches"] == (2 if isinstance(load, SelectiveBackward) else 1)  # the sums of its parts
    assert row["kernel"].startswith(load.op if load.direction == "forward" else f"{load.op}_backward")
    if load.op == "selective_state_update":
        assert row["schedule"] is None
    else:
        assert row["plan"].startswith(row["schedule"]) or row["direction"] == "backward"
        assert row["schedule"] in {schedule.value for schedule in _plan.Schedule}
    assert f"{row['ms']:.4f} ms" in command.line(row)


def test_a_run_writes_a_record_that_is_fresh_until_something_changes(
    cupy, host_executor, monkeypatch, tmp_path, capsys
):
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(command, "measure", lambda _: CEILINGS)
    broken = Linear((3, 3), 7)
    monkeypatch.setattr(command, "LOADS", ((only_calls(Linear((2, 70, 33), 1)), broken), ()))
    path = tmp_path / "record.json"
    assert host_executor(command.main, ["--out", str(path)]) == 1, "a row failed"
    shown = capsys.readouterr()
    assert "failed" in shown.out
    record = json.loads(path.read_text())
    assert set(record) == {"digest", "device", "plans", "limits", "rows"}
    assert (record["digest"], record["device"], len(record["rows"])) == (_source.digest(), "NumPy", 1)
    assert command.main(["--check", str(path)]) == 0
    path.write_text(json.dumps(record | {"digest": "0"}))
    assert command.main(["--check", str(path)]) == 1
    assert "stale" in capsys.readouterr().out
    assert command.main(["show", str(path)]) == 0
    assert "[2, 70, 33]" in capsys.readouterr().out


def test_the_record_that_is_kept_can_be_shown(capsys):
    for path in sorted(command.RECORD.parent.glob("*h200.json")):
        assert command.main(["show", str(path)]) == 0
        assert len(capsys.readouterr().out.splitlines()) >= len(json.loads(path.read_text())["rows"])


def test_a_graph_that_cannot_be_is_written_down(cupy, host_executor, monkeypatch):
    def refused(*_):
        raise RuntimeError("not while a stream is capturing")

    monkeypatch.setattr(command, "graph_milliseconds", refused)
    load = only_calls(Linear((2, 70, 33), 1))
    row = host_executor(command.measure_one, cupy, load, CEILINGS, others=True, tensors=False)
    assert (row["graph_ms"], row["graph_error"]) == (None, "RuntimeError: not while a stream is capturing")
    row["peers"] = [{"name": "one", "ms": 3.0}, {"name": "other", "error": "no"}]
    assert command.line(row).endswith("graph failed  [one 3.0000]  [other failed]")


# Other libraries


def test_peers_are_checked_timed_and_their_errors_written_down(cupy, monkeypatch):
    load = Linear((2, 70, 3), 1)
    inputs = load.inputs(np)

    def make(_cupy, _load, inputs):
        yield lambda: cuscan.linear_scan(**inputs), lambda made: made
        yield lambda: 2 * cuscan.linear_scan(**inputs), lambda made: made
        yield lambda: cuscan.linear_scan(**inputs), None

    clock = ("numpy", make, lambda _: None)
    monkeypatch.setattr(peers, "_PEERS", {"none": ("no_such_module", make, None), "numpy": ("numpy", make, None),
                                          "clocked": clock})  # fmt: skip
    found = [command.timed(cupy, load, inputs, peer) for peer in peers.peers(cupy, load, inputs)]
    assert [x["name"] for x in found] == 3 * ["numpy"] + 3 * ["clocked"]
    right, wrong, unchecked = found[:3]
    assert right == {"name": "numpy", "ms": 2, "checked": True, "clock": False}
    assert unchecked == {"name": "numpy", "ms": 2, "checked": False, "clock": False}
    assert wrong["error"].startswith("AssertionError: largest error")
    assert found[3]["clock"]
    assert found[3]["ms"] > 0


@pytest.mark.parametrize("load", [load for load in SMALL if load.op == "selective_scan"], ids=repr)
def test_mamba_gets_its_layout(load, monkeypatch):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")

    def array(x):
        return None if x is None else np.asarray(x.float() if x.is_floating_point() else x)

    def scan(function, u, delta, A, B, C, D, z, bias, **more):
        given = {"u": u, "delta": delta, "A": A, "B": B[:, 0], "C": C[:, 0], "D": D, "z": z, "delta_bias": bias}
        given = {name: array(x) for name, x in given.items()}
        return function(**given, delta_softplus=True, layout="bdl", **more)

    def forward(u, delta, A, B, C, D, z, bias, softplus):
        assert softplus
        assert u.is_contiguous()
        y, ungated = (torch.from_numpy(scan(cuscan.selective_scan, u, delta, A, B, C, D, x, bias)) for x in (z, None))
        y, ungated = y.to(u.dtype), ungated.to(u.dtype)
        return (ungated, "states", y) if z is not None else (ungated, "states")

    def backward(u, delta, A, B, C, D, z, bias, grad, states, out, grad_z, softplus, again):
        assert (states, grad_z, softplus, again) == ("states", None, True, False)
        assert (out is None) == (z is None)
        made = scan(cuscan.selective_scan_vjp, u, delta, A, B, C, D, z, bias, grad_out=array(grad))
        return [torch.from_numpy(x).to(u.dtype) for x in (made.u, made.delta)]

    fake = types.SimpleNamespace(fwd=forward, bwd=backward)
    monkeypatch.setitem(sys.modules, "selective_scan_cuda", fake)
    inputs = load.inputs(np)
    found = list(peers._mamba(np, load, inputs))
    assert len(found) == (not (load.mask or load.sequences or load.states))
    for call, result in found:
        made = call()
        assert (result is None) == load.h0, "it has no state to enter"
        if result is not None:
            load.check(inputs, result(made), bounded=False)


# The ladder


def test_every_rung_is_right_where_the_checker_looks():
    module = host.HostModule(ladder.text(), mode="checked")
    for states in ladder.STATES[:2]:
        names = [name for name, _ in ladder.selective_rungs(np, module, (2, 70, 33, states))]
        assert names[:3] == ["a loop over time", "one thread a channel", "a and b materialised"]
    for rows, length in ((3, 700), (1, 5)):
        assert len(list(ladder.block_rungs(np, module, rows, length))) == 2
    for length in (1, ladder.TILE, ladder.TILE * (ladder.GROUP + 3) + 5):  # two groups that look back
        assert [name for name, _ in ladder.row_rungs(np, module, length)][1:3] == ["three kernels", "one pass"]


def test_a_rung_that_is_wrong_is_not_timed():
    with pytest.raises(AssertionError, match="largest error"):
        ladder._check_rows(*np.ones((2, 1, 100), np.float32), np.ones((1, 100), np.float32))


def test_the_ladder_has_a_row_for_each_rung(monkeypatch):
    monkeypatch.setattr(ladder, "SELECTIVE", {"length": [(1, 8, 4, 4)], "batch": [], "state": []})
    monkeypatch.setattr(ladder, "BLOCKS", {"block: batch": [(2, 9)]})
    monkeypatch.setattr(ladder, "ROWS", [10])
    seen = []
    module = host.HostModule(ladder.text(), mode="checked")
    rows = ladder.measure(np, module, lambda call: call() is not None and 0.5, seen.append)
    assert rows == seen
    assert [(row["figure"], row["x"]) for row in rows] == 5 * [("length", 8)] + 2 * [("block: batch", 2)] + 4 * [
        ("row", 10)
    ]
    assert {row["ms"] for row in rows} == {0.5}
    assert rows[0] == {"figure": "length", "rung": "a loop over time", "x": 8, "batch": 1, "length": 8, "channels": 4,
                       "state": 4, "ms": 0.5}  # fmt: skip


# Figures


def fake_record():
    rows = []
    for load in (load for kind in workloads.LOADS for load in kind):
        least, bound_by = load.least(CEILINGS)
        row = load.row() | {"op": load.op, "direction": load.direction, "dtype": load.dtype, "bytes": load.useful_bytes}
        row |= {"ms": 2e3 * least, "limit_ms": 1e3 * least, "bound_by": bound_by, load.work[0]: load.work[1]}
        rows.append(row | {"peers": [{"name": "another", "ms": 5e3 * least}, {"name": "broken", "error": "no"}]})
    return {"device": "none", "limits": vars(CEILINGS), "rows": rows}


@pytest.mark.full
def test_figures_are_small_and_the_same_each_time(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    from bench import plots

    rungs = [{"figure": figure, "rung": rung, "x": x, "ms": 0.1 * x}
             for figure in ("length", "batch", "state", "block: length", "block: batch", "row")
             for rung in ("one", "two") for x in (1, 10, 100)]  # fmt: skip
    records = {"bench": fake_record(), "ladder": {"device": "none", "rows": rungs}, "tune": {}}
    made = []
    for folder in (tmp_path / "once", tmp_path / "again"):
        paths = [path for kind, record in records.items() for path in plots.draw(kind, record, folder)]
        assert [path.name for path in paths] == ["roofline.svg", "lengths.svg", "ladder.svg"]
        made.append([path.read_bytes() for path in paths])
    assert made[0] == made[1]
    assert all(1000 < len(x) < 200_000 for x in made[0])
    (path,) = plots.draw("ladder", records["ladder"], tmp_path, ".png")
    assert path.read_bytes().startswith(b"\x89PNG")
    words = (tmp_path / "once/lengths.svg").read_text()
    assert "forward, another" in words
    assert "broken" not in words
