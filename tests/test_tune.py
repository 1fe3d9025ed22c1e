"""Tuning: what is tried, what wins, and what later plans make of it."""

import json
import sys
import types
from pathlib import Path

import numpy as np
import pytest

import cuscan
from cuscan import _plan, _selftest, _source, _tuned, mamba, tune
from cuscan.__main__ import main
from cuscan._plan import DeviceLimits, LinearFit, LinearProblem, Schedule, SelectiveKind, SelectiveProblem, forced

H200 = DeviceLimits(architecture=90, multiprocessors=132, shared_memory=227 * 1024)
KIND = SelectiveKind("bfloat16", complex=False, time_fast=False, time_B=True, time_C=True, states=4)
PROBLEMS = {
    "plan_linear": LinearProblem(4, 4, rows=12288, length=4096, time_fast=False),
    "plan_selective": SelectiveProblem(KIND, 1, 65536, 256, 16, groups=1),
    "plan_backward": SelectiveProblem(KIND, 8, 4096, 256, 16, groups=1),
}


@pytest.fixture(autouse=True)
def untuned(monkeypatch, tmp_path):
    """Neither a file of plans nor fits, before and after."""
    monkeypatch.delenv("CUSCAN_PLANS", raising=False)
    monkeypatch.setattr(_tuned, "fits_file", lambda: tmp_path / "cache" / "fits.json")
    for read in (_tuned.user_orders, _tuned.known_fits):
        read.cache_clear()
    yield
    for read in (_tuned.user_orders, _tuned.known_fits):
        read.cache_clear()


def plan_of(planner):
    return getattr(_plan, planner)(PROBLEMS[planner], H200)


def name_plans(monkeypatch, tmp_path, entries):
    path = tmp_path / "plans.json"
    path.write_text(json.dumps({"plans": entries}))
    monkeypatch.setenv("CUSCAN_PLANS", str(path))
    _tuned.user_orders.cache_clear()


def entry_of(planner, order):
    function = _tuned.FUNCTIONS[planner][0]
    return {"function": function, "problem": _tuned.as_json(PROBLEMS[planner]), "order": _tuned.as_json(order)}


# What is tried


@pytest.mark.parametrize("planner", PROBLEMS)
def test_every_candidate_is_an_order_that_can_be_forced(planner):
    problem, own = PROBLEMS[planner], plan_of(planner)
    found = tune.order_candidates(planner, problem, H200, own)
    assert found[0].order == own.order
    assert len({x.order for x in found}) == len(found) > 5
    for each in found:
        with forced(**each.choices):
            assert plan_of(planner).order == each.order
    chunks = {x.order.chunk for x in found}
    assert {128, 256, 512, 1024} <= chunks
    if planner != "plan_backward":
        assert {x.order.schedule for x in found} >= {Schedule.SERIAL, Schedule.SPLIT}


def test_other_blocks_of_one_pass_are_tried():
    problem = LinearProblem(4, 4, rows=1, length=1 << 28, time_fast=True)
    found = tune.order_candidates("plan_linear", problem, H200, _plan.plan_linear(problem, H200))
    assert {x.order.row_warps for x in found if x.order.one_pass} == {1, 2, 4, 8, 16}


def test_tiles_and_warps_are_tried():
    found = tune.order_candidates("plan_selective", PROBLEMS["plan_selective"], H200, plan_of("plan_selective"))
    tiles = {(tile.states, tile.groups) for tile in _plan.selective_tiles(KIND)}
    assert {(x.order.states, x.order.groups) for x in found} == tiles
    own = plan_of("plan_linear")
    found = tune.order_candidates("plan_linear", PROBLEMS["plan_linear"], H200, own)
    assert {x.order.row_warps for x in found} == {1, 2, 4, 8}
    two = next(x for x in found if x.order.row_warps == 2)
    fits = tune.fit_candidates("plan_linear", PROBLEMS["plan_linear"], H200, two)
    assert {x.fit for x in fits} == {LinearFit(2), LinearFit(4), LinearFit(8)}
    assert {x.order for x in fits} == {two.order}


# What wins


def candidate(name, *runs):
    return tune.Candidate(name, None, {}, [{"forward": ms} for ms in runs])


def test_within_the_spread_the_steadier_wins():
    shaky, steady = candidate("shaky", 1.00, 0.90, 1.10), candidate("steady", 1.06, 1.05, 1.07)
    assert tune.choose([shaky, steady]) is steady
    assert (shaky.median, round(shaky.spread, 6)) == (1.0, 0.2)


def test_beyond_the_spread_the_faster_wins():
    fast, steady = candidate("fast", 1.00, 0.98, 1.02), candidate("steady", 1.05, 1.05, 1.05)
    assert tune.choose([steady, fast]) is fast


def test_what_was_dropped_after_a_run_does_not_win():
    assert tune.choose([candidate("dropped", 0.1), candidate("whole", 1, 1, 1)]).order == "whole"
    assert tune.choose([candidate("dropped", 0.1)]).order == "dropped", "of fits of an order that was"


def clock(call):
    """Four warps on a row are fastest, two chunks far too slow, and blocks do not matter."""
    call()
    choices = _plan._forced.get()
    if choices["schedule"] is Schedule.SPLIT:
        return 9.0
    return 1.0 + abs(choices["row_warps"] - 4)


def test_a_sweep_runs_the_kernels_and_says_what_it_found(host_executor, tmp_path):
    lines = []
    case = tune.Case((3, 300), 1, "float32")
    rows = host_executor(tune.sweep, lines.append, np, [case], clock)
    (row,) = json.loads(json.dumps(rows))
    assert row["function"] == "linear_scan"
    assert row["directions"] == ["forward", "backward"]
    assert row["problem"] == {
        "item_bytes": 4,
        "state_bytes": 4,
        "rows": 3,
        "length": 300,
        "time_fast": True,
        "pairs": False,
    }
    assert row["best"]["order"]["row_warps"] == 4
    assert (row["best"]["ms"], row["best"]["spread_ms"]) == (2, 0)
    assert row["own"]["order"] == row["tried"][0]["order"]
    runs = {x["order"]["schedule"]: len(x["runs"]) for x in row["tried"] if x["order"]["row_warps"] == 4}
    assert runs == {"block": 3, "split": 1}
    assert "order {'schedule': 'block'" in lines[0]

    tune.keep(lines.append, rows, None)
    assert "1 orders are better" in lines[-1]
    plans = tmp_path / "plans.json"
    other = entry_of("plan_selective", plan_of("plan_selective").order)
    plans.write_text(json.dumps({"plans": [other]}))
    for _ in range(2):  # again does not double
        tune.keep(lines.append, rows, plans)
        kept = json.loads(plans.read_text())["plans"]
        assert kept == [{**{name: row[name] for name in ("function", "problem")}, "order": row["best"]["order"]}, other]


def small_model(tmp_path):
    config = mamba.Config(vocab=20, width=8, layers=2)
    mamba.save(tmp_path / "model", config, mamba.initial_parameters(config, 0))
    return tmp_path / "model"


def test_a_model_is_timed_as_a_whole(tmp_path):
    folder = small_model(tmp_path)
    (job,) = tune.Prefill((2, 70), folder=folder).jobs(np)
    assert job.name == "prefill (2, 70) float32"
    assert job.calls["prefill"]().shape == (2, 20)
    (job,) = tune.Prefill((2, 70), dtype="bfloat16", folder=folder).jobs(np)
    assert job.name == "prefill (2, 70) bfloat16"


@pytest.mark.full
def test_the_order_that_makes_a_model_fast_is_kept(host_executor, tmp_path):
    layers = []

    def prefill_clock(call):
        with _plan.watched() as plans:
            call()
        layers.append({plan.order for name, *_, plan in plans if name == "plan_selective"})
        choices = _plan._forced.get()
        return 1.0 + (choices["schedule"] is not Schedule.SPLIT) + (choices["tile"].states == 4)

    lines, plans = [], tmp_path / "plans.json"
    case = tune.Prefill((1, 130), dtype="bfloat16", folder=small_model(tmp_path))
    (row,) = rows = host_executor(tune.sweep, lines.append, np, [case], prefill_clock)
    assert all(len(orders) <= 1 for orders in layers), "one plan for all layers"
    assert (row["function"], row["directions"], row["shape"]) == ("selective_scan", ["prefill"], [1, 130])
    assert (row["dtype"], row["problem"]["length"], row["problem"]["channels"]) == ("bfloat16", 130, 16)
    assert (row["best"]["ms"], row["best"]["order"]["schedule"], row["best"]["order"]["states"]) == (1, "split", 2)
    tune.keep(lines.append, rows, plans)
    (entry,) = json.loads(plans.read_text())["plans"]
    assert entry["order"] == row["best"]["order"]


def test_the_time_is_kept():
    lines = []
    assert tune.sweep(lines.append, np, [tune.Case((3, 3), 1, "float32")], clock, minutes=-1) == []
    assert "left out" in lines[0]


def test_a_fit_that_changes_bits_is_refused():
    job = tune.Job(tune.Case((1,), 0), {"forward": lambda: np.array([1.0 + _plan._forced.get().get("warps", 0)])})
    same = [tune.Candidate("order", LinearFit(n), {"schedule": n}) for n in (1, 2)]
    tune._same_bits(job, same)
    with pytest.raises(AssertionError, match=r"forward has other bits with LinearFit\(warps=2\b"):
        tune._same_bits(job, [tune.Candidate("order", LinearFit(n), {"warps": n}) for n in (1, 2)])


def test_a_run_on_a_gpu_writes_what_it_timed(host_executor, monkeypatch, tmp_path):
    """With NumPy for CuPy: the file that CUSCAN_PLANS names is made, and followed in the next process."""
    runtime = types.SimpleNamespace(getDeviceProperties=lambda _: {"name": b"NumPy"})
    device = types.SimpleNamespace(id=0)
    cupy = types.SimpleNamespace(random=np.random, ndarray=(), cuda=types.SimpleNamespace(
        runtime=runtime, Device=lambda: device))  # fmt: skip
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(tune, "milliseconds", lambda _cupy, call, *_: [clock(call)])
    plans, record, lines = tmp_path / "plans.json", tmp_path / "record.json", []
    monkeypatch.setenv("CUSCAN_PLANS", str(plans))
    host_executor(tune.run, lines.append, record=record, linear=["3,300@1"])
    found = json.loads(record.read_text())
    assert (found["device"], found["digest"], found["runs"]) == ("NumPy", _source.digest(), 3)
    assert f"orders are in {plans}" in lines[-1]
    (entry,) = json.loads(plans.read_text())["plans"]
    assert entry["order"] == found["rows"][0]["best"]["order"]
    problem = LinearProblem(4, 4, rows=3, length=300, time_fast=True)
    assert _tuned.as_json(_plan.plan_linear(problem, H200).order) == entry["order"]
    plans.write_text("{")
    _tuned.user_orders.cache_clear()
    with pytest.raises(ValueError, match="must be JSON"):
        tune.run(lines.append, linear=["3,300@1"])
    plans.unlink()
    with pytest.raises(ValueError, match="--selective takes batch,length,channels,state"):
        tune.run(lines.append, selective=["3,300"])
    with pytest.raises(ValueError, match="--prompt takes batch,length"):
        tune.run(lines.append, model=tmp_path, prompt="300")


def test_the_command_takes_shapes(monkeypatch, capsys):
    taken = {}
    monkeypatch.setattr(tune, "run", lambda write, **options: (write("tuned"), taken.update(options)))
    monkeypatch.setattr(_selftest, "gpu", lambda: ("", "no driver"))
    assert main(["tune"]) == 1
    assert capsys.readouterr().err == "tune needs a GPU: no driver\n"
    monkeypatch.setattr(_selftest, "gpu", lambda: ("a GPU", ""))
    assert main(["tune", "--selective", "1,2,3,4", "--linear", "8,100@0", "--minutes", "2"]) == 0
    assert capsys.readouterr().out == "tuned\n"
    assert taken == {"selective": ["1,2,3,4"], "linear": ["8,100@0"], "minutes": 2, "dtype": None, "layout": "bld",
                     "record": None, "model": None, "prompt": "1,2048"}  # fmt: skip


def test_the_command_takes_a_model(monkeypatch, capsys):
    taken = {}
    monkeypatch.setattr(tune, "run", lambda _, **options: taken.update(options))
    monkeypatch.setattr(_selftest, "gpu", lambda: ("", "no driver"))
    assert main(["tune", "--model", "folder"]) == 1
    assert capsys.readouterr().err == "tune needs a GPU: no driver\n"
    monkeypatch.setattr(_selftest, "gpu", lambda: ("a GPU", ""))
    monkeypatch.setattr(mamba, "has_cublas", lambda: False)
    assert main(["tune", "--model", "folder"]) == 1
    assert "needs cuBLAS: install cuscan with the extra" in capsys.readouterr().err
    monkeypatch.setattr(mamba, "has_cublas", lambda: True)
    assert main(["tune", "--model", "folder", "--prompt", "4,512", "--dtype", "float16"]) == 0
    assert (taken["model"], taken["prompt"], taken["dtype"]) == (Path("folder"), "4,512", "float16")


def test_a_bar_is_drawn_on_terminals_only():
    class Terminal:
        text = ""

        def __init__(self, terminal):
            self.isatty = lambda: terminal

        def write(self, text):
            self.text += text

        def flush(self):
            pass

    for terminal in (True, False):
        file = Terminal(terminal)
        progress = tune.Progress(2, file)
        progress("scan", 0.5)
        progress.next()
        progress.end()
        assert file.text.count("\r[") == 2 * terminal
        assert ("[######                  ]  25 %  scan" in file.text) == terminal
        assert ("[############            ]  50 %" in file.text) == terminal


# What later plans make of it


@pytest.mark.parametrize("planner", PROBLEMS)
def test_orders_are_followed_while_the_user_names_them(planner, monkeypatch, tmp_path):
    own = plan_of(planner)
    found = tune.order_candidates(planner, PROBLEMS[planner], H200, own)
    name_plans(monkeypatch, tmp_path, [entry_of(planner, found[-1].order)])
    assert plan_of(planner).order == found[-1].order != own.order
    small = DeviceLimits(architecture=80, multiprocessors=14, shared_memory=163 * 1024)
    assert getattr(_plan, planner)(PROBLEMS[planner], small).order == found[-1].order, "on every chip"
    with forced(**found[1].choices):
        assert plan_of(planner).order == found[1].order
    # Read once: the file may go, and another be named, and no bit changes in this process.
    (tmp_path / "plans.json").unlink()
    monkeypatch.delenv("CUSCAN_PLANS")
    assert plan_of(planner).order == found[-1].order
    _tuned.user_orders.cache_clear()
    assert plan_of(planner) == own


def test_calls_follow_the_users_orders(host_executor, monkeypatch, tmp_path):
    a, b = np.random.default_rng(0).random((2, 7, 411), dtype=np.float32)
    problem = LinearProblem(4, 4, rows=7, length=411, time_fast=True)
    order = _plan.LinearOrder(Schedule.SPLIT, _plan.Lanes.TIME, chunk=128, row_warps=1)
    entry = {"function": "linear_scan", "problem": _tuned.as_json(problem), "order": _tuned.as_json(order)}
    name_plans(monkeypatch, tmp_path, [entry])
    with _plan.watched() as plans:
        h = host_executor(cuscan.linear_scan, a, b, axis=1)
    name, planned, _, plan = plans[0]
    assert (name, planned, plan.order, plan.chunks) == ("plan_linear", problem, order, 4)
    np.testing.assert_allclose(h, cuscan.linear_scan(a, b, axis=1), rtol=1e-5)


ORDER = {"schedule": "split", "chunk": 1024, "states": 4, "groups": 4}
WRONG = {
    "no object": (lambda _: 5, "it must be an object with function, problem and order, got 5"),
    "a name": (lambda entry: entry | {"fit": {}}, "an object with function, problem and order"),
    "function": (lambda entry: entry | {"function": "scan"}, "function must be one of linear_scan, selective_scan, "),
    "twice": (lambda _: entry_of("plan_linear", plan_of("plan_linear").order), "an earlier entry is of the same"),
    "no problem": (lambda entry: entry | {"problem": None}, "problem must be an object with kind, batch, length"),
    "less problem": (lambda entry: entry | {"problem": {"batch": 1}}, "problem must have kind, .*, and has batch"),
    "size": (
        lambda entry: entry | {"problem": entry["problem"] | {"batch": "1"}},
        "problem.batch must be int, got '1'",
    ),
    "sign": (
        lambda entry: entry | {"problem": entry["problem"] | {"batch": -1}},
        "problem.batch must be at least 0, got -1",
    ),
    "flag": (lambda entry: entry | {"problem": entry["problem"] | {"batch": True}}, "problem.batch must be int"),
    "schedule": (
        lambda entry: entry | {"order": ORDER | {"schedule": "fast"}},
        "order.schedule must be one of serial,",
    ),
    "other": (
        lambda entry: entry | {"order": ORDER | {"schedule": "block"}},
        "the schedules serial and split, got block",
    ),
    "tile": (lambda entry: entry | {"order": ORDER | {"states": 3}}, "no kernel has 3 states a thread and 4 groups"),
    "serial": (
        lambda entry: entry | {"order": ORDER | {"schedule": "serial"}},
        "no plan has this order; the nearest is",
    ),
    "chunk": (
        lambda entry: entry | {"order": ORDER | {"chunk": 1000}},
        "order.chunk must be a multiple of 32, got 1000",
    ),
    "chunks": (lambda entry: entry | {"order": ORDER | {"chunk": 65536}}, "a split has more than one chunk"),
    "zero": (lambda entry: entry | {"order": ORDER | {"chunk": 0}}, "order.chunk must be at least 1, got 0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named_with_its_entry(name, monkeypatch, tmp_path):
    change, message = WRONG[name]
    right = entry_of("plan_selective", plan_of("plan_selective").order)
    first = entry_of("plan_linear", plan_of("plan_linear").order)
    name_plans(monkeypatch, tmp_path, [first, right | {"order": ORDER}])
    assert _tuned.as_json(plan_of("plan_selective").order) == ORDER
    name_plans(monkeypatch, tmp_path, [first, change(right)])
    with pytest.raises(ValueError, match=rf"plans.json, whose plans\[1\] is wrong: .*{message}"):
        plan_of("plan_selective")


def test_an_order_of_linear_scan_has_a_number_of_warps_that_kernels_have(monkeypatch, tmp_path):
    order = _tuned.as_json(plan_of("plan_linear").order) | {"row_warps": 3}
    name_plans(monkeypatch, tmp_path, [entry_of("plan_linear", plan_of("plan_linear").order) | {"order": order}])
    with pytest.raises(ValueError, match=r"plans\[0\] is wrong: order.row_warps must be one of \(1, 2, 4, 8\), got 3"):
        plan_of("plan_linear")


@pytest.mark.parametrize("text", [None, "{", "[]", '{"plan": []}'])
def test_a_file_of_plans_that_cannot_be_read_is_an_error(text, monkeypatch, tmp_path):
    path = tmp_path / "plans.json"
    if text is not None:
        path.write_text(text)
    monkeypatch.setenv("CUSCAN_PLANS", str(path))
    with pytest.raises(ValueError, match=r"CUSCAN_PLANS names .*plans.json, which must be JSON like"):
        plan_of("plan_linear")


def test_fits_are_used_on_their_chip_in_their_order():
    own = plan_of("plan_linear")
    other = LinearFit(2 * own.fit.warps)
    found = entry_of("plan_linear", own.order)
    fits = [{**found, "fit": _tuned.as_json(other)}, {**found, "order": {}, "fit": {}}, {"function": "no such"}]
    assert _tuned.keep_fits([90, 132], fits).is_file()
    tuned = plan_of("plan_linear")
    assert (tuned.order, tuned.fit) == (own.order, other)
    assert _plan.plan_linear(PROBLEMS["plan_linear"], DeviceLimits(90, 130, 227 * 1024)).fit != other
    with forced(chunk=own.order.chunk):
        assert plan_of("plan_linear").fit == own.fit
    # Again, another fit of the same: it takes its place; that of another chip stays.
    _tuned.keep_fits([80, 108], [{**found, "fit": _tuned.as_json(other)}])
    _tuned.keep_fits([90, 132], [{**found, "fit": _tuned.as_json(own.fit)}])
    assert plan_of("plan_linear") == own
    chips = [entry["chip"] for entry in _tuned.read_fits() if entry["function"] == "linear_scan" and entry["order"]]
    assert sorted(chips) == [[80, 108], [90, 132]]


@pytest.mark.parametrize("planner", ["plan_linear", "plan_selective"])
def test_a_fit_that_is_the_plans_own_changes_nothing(planner):
    own = plan_of(planner)
    _tuned.keep_fits([90, 132], [{**entry_of(planner, own.order), "fit": _tuned.as_json(own.fit)}])
    assert _tuned.fit(planner, PROBLEMS[planner], H200, own.order)
    assert plan_of(planner) == own


@pytest.mark.parametrize("text", ["", "{", "[]", '{"fits": 3}', '{"fits": [3, {}, {"function": "linear_scan"}]}'])
def test_fits_that_cannot_be_read_are_not_there(text):
    own = plan_of("plan_linear")
    _tuned.known_fits.cache_clear()
    _tuned.fits_file().parent.mkdir()
    _tuned.fits_file().write_text(text)
    assert plan_of("plan_linear") == own


def test_a_fit_that_the_order_does_not_have_is_not_used():
    own = plan_of("plan_linear")
    assert own.order.row_warps > 1
    found = entry_of("plan_linear", own.order)
    for warps in (0, 3, own.order.row_warps // 2, "8", None):
        _tuned.keep_fits([90, 132], [{**found, "fit": {"warps": warps}}])
        assert plan_of("plan_linear") == own
