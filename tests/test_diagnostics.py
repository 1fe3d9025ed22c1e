"""What diagnose says: figures against brute force, no false alarm, and each symptom of the README by its name."""

import json
import math
import random
import tracemalloc
from unittest import mock

import ml_dtypes
import numpy as np
import pytest

import cuscan
from cuscan import _compare, _figures, diagnostics, ssm
from cuscan.__main__ import main
from cuscan._plan import Schedule, forced
from cuscan.testing import problems

F32, BF16 = np.float32, ml_dtypes.bfloat16
TINY = 2.0**-126
OPTIONS = {"delta_softplus": True, "delta_limit": None, "reverse": False, "layout": "bld"}
ABSENT = dict.fromkeys(("h0", "mask", "reset", "cu_seqlens"))


def mamba(batch=2, length=300, channels=8, state=4, dtype=F32, seed=0):
    """A layer as Mamba initialises it, with random activations."""
    r = np.random.default_rng(seed)
    draw = lambda *shape: r.standard_normal(shape, F32).astype(dtype)  # noqa: E731
    return {
        "u": draw(batch, length, channels),
        "delta": (0.5 * r.standard_normal((batch, length, channels), F32)).astype(dtype),
        "A": ssm.A_from_A_log(ssm.s4d_real_A_log(channels, state)),
        "B": draw(batch, length, state),
        "C": draw(batch, length, state),
        "D": np.ones(channels, F32),
        "z": draw(batch, length, channels),
        "delta_bias": ssm.delta_bias(channels, seed=1),
        "delta_softplus": True,
    }


def turned(given):
    """The same in layout "bdl"."""
    names = ("u", "delta", "B", "C", "z")
    return given | {name: np.ascontiguousarray(np.swapaxes(given[name], 1, 2)) for name in names} | {"layout": "bdl"}


def names(report):
    return [x.name for x in report.findings]


def found(report, name):
    matching = [x for x in report.findings if x.name == name]
    assert matching, f"{name!r} is not among {names(report)}"
    return matching[0]


# --- figures ------------------------------------------------------------------------------------------------------


def brute_gates(given, reverse=False, mask=None):
    """exp(delta A) of every step that counts, (batch, time, channel, state), and delta."""
    delta = np.logaddexp(given["delta"].astype(float) + given["delta_bias"].astype(float), 0)
    delta = delta if mask is None else np.where(mask[..., None], delta, 0)
    delta = delta[:, ::-1] if reverse else delta
    return np.exp(delta[..., None] * given["A"].astype(float)), delta


def brute_steps(gates, start, level):
    """Steps from `start` until the product of gates is below `level`."""
    product = np.cumprod(gates[:, start + 1 :], axis=1)
    below = product < level
    beyond = math.log(level) / np.log(product[:, -1]) * product.shape[1]  # at the same pace
    return np.where(below.any(axis=1), below.argmax(axis=1) + 1, beyond)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("block", [_figures.BLOCK, (1, 1)])
def test_figures_are_those_of_every_gate(reverse, masked, block):
    given = mamba(2, 90, 5, 3, seed=3)
    given["delta_bias"] += F32(2.5)
    given["delta"][1, 7, 2] = 60
    mask = np.random.default_rng(0).random((2, 90)) < 0.8 if masked else None
    if masked:
        mask[1, 7] = True
    with mock.patch.object(_figures, "BLOCK", block):
        report = cuscan.diagnose(**given, reverse=reverse, mask=mask)
    gates, delta = brute_gates(given, reverse, mask)
    counts = np.ones((2, 90), bool) if mask is None else mask[:, ::-1] if reverse else mask
    counting = gates[counts]
    g = report.gates
    assert g.largest == pytest.approx(counting.max(), rel=1e-12)
    assert g.smallest == pytest.approx(counting.min(), rel=1e-9)
    assert g.smallest_at == {"batch": 1, "time": 7, "channel": 2, "state": 2}
    assert g.zero_share == pytest.approx((counting < TINY).mean())
    assert g.zero_share > 0
    assert g.one_share == (counting.astype(F32) == 1).mean()
    assert g.below_1e_30 == (counting < 1e-30).sum() > 0
    assert (g.above_one, g.growth) == (0, 0)
    assert g.histogram.sum() == gates.size

    for level, known in ((1e-3, report.memory.steps), (2.0**-24, report.memory.resolution)):
        steps = np.stack([brute_steps(gates, s, level) for s in np.linspace(0, 89, 16, endpoint=False).astype(int)])
        np.testing.assert_allclose(known, np.median(steps, axis=(0, 1)), rtol=1e-9)
    assert report.memory.quantiles[0] == report.memory.steps.min()

    tail = np.cumprod(gates[:, ::-1], axis=1)[:, ::-1]  # of the gates from t on
    after = np.concatenate((tail[:, 1:], np.ones_like(tail[:, :1])), axis=1)
    hidden = (after < 2.0**-24).sum(axis=1)
    assert report.memory.hidden_from_all == hidden.min() / 90
    assert report.memory.hidden[-1] == hidden.max() / 90

    d, used = report.delta, delta[counts]
    assert d.quantiles == pytest.approx((used.min(), *np.quantile(used, [0.1, 0.5, 0.9]), used.max()))
    assert d.largest_at == {"batch": 1, "time": 7, "channel": 2}
    raw = (given["delta"].astype(float) + given["delta_bias"])[np.ones((2, 90), bool) if mask is None else mask]
    assert (d.linear, d.underflow, d.negative) == ((raw > 20).sum(), 0, 0)


def test_a_constant_gate_decays_and_overflows_when_it_should():
    length = 3000
    report = cuscan.diagnose(0.999, np.ones((2, length), F32), axis=1)
    assert report.memory.steps.item() == pytest.approx(math.log(1e-3) / math.log(0.999), rel=1e-3)
    assert report.memory.resolution.item() == pytest.approx(math.log(2.0**-24) / math.log(0.999), rel=1e-3)
    report = cuscan.diagnose(1.01, np.ones(9000, F32))  # (1.01^(t+1) - 1) / 0.01 is above 2^128
    assert report.gates.overflow_predicted == math.ceil((math.log(2.0**128 * 0.01)) / math.log(1.01)) - 1
    assert report.not_finite["result"].first == (0, report.gates.overflow_predicted, 0)
    short = cuscan.diagnose(1.01, np.ones(8000, F32))
    assert abs(short.gates.overflow_predicted - report.gates.overflow_predicted) <= 1
    assert "diverges" not in str(short)
    assert "would overflow float32 at step 8" in found(short, "a state grows").figure


def test_linear_gates_by_row():
    r = np.random.default_rng(0)
    a, b = r.uniform(-1, 1, (3, 50, 2)).astype(F32), r.standard_normal((3, 50, 2), F32)
    a[1, 20, 1], a[2, 3, 0], a[0, 5, 0], a[0, 6, 0] = -1.5, 0, 1, -1
    report = cuscan.diagnose(a, b, axis=1)
    g = report.gates
    assert (g.largest, g.smallest) == (pytest.approx(1.5), pytest.approx(0, abs=1e-30))
    assert (g.largest_at, g.smallest_at) == ({"time": 20, "row": 3}, {"time": 3, "row": 4})
    assert (g.zero_share, g.one_share, g.above_one) == (1 / 300, 2 / 300, 1)
    assert report.precision.of_bound < 1


def test_growth_stops_where_a_state_is_forgotten():
    b, reset = np.ones(400, F32), np.zeros(400, bool)
    reset[::50] = True
    report = cuscan.diagnose(1.5, b, reset=reset)
    assert 40 < report.gates.growth / math.log(1.5) < 50
    assert "the state diverges" not in names(report)
    packed = cuscan.diagnose(1.5, b, cu_seqlens=np.arange(0, 401, 50))
    assert packed.gates.growth == report.gates.growth
    assert "the state diverges" in names(cuscan.diagnose(1.5, b))


def test_nothing_with_an_axis_of_states_is_made():
    problem = _figures.selective_problem(np, ABSENT | mamba(1, 4096, 16, 64), OPTIONS)
    tracemalloc.start()
    _figures.gate_figures(problem)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4096 * 16 * 64 * 8 / 2


@pytest.mark.parametrize(
    ("shape", "dtype"), [((2, 300, 8, 4), F32), ((1, 5000, 16, 16), F32), ((3, 64, 32, 16), BF16), ((1, 1, 4, 2), F32)]
)
def test_a_healthy_layer_gives_no_alarm(shape, dtype):
    given = mamba(*shape, dtype)
    mask = np.ones(shape[:2], bool)
    mask[0, shape[1] - shape[1] // 10 :] = False
    for arguments in (given, turned(given), given | {"reverse": True}, given | {"mask": mask}):
        report = cuscan.diagnose(**arguments)
        assert report.severe == [], str(report)
        assert report.precision.of_bound < 1


def test_healthy_scans_give_no_alarm():
    r = np.random.default_rng(0)
    b, done = r.standard_normal((16, 500), F32), r.random((16, 500)) < 0.02
    for call in (
        lambda: cuscan.diagnose(0.99, b, axis=1, reverse=True, reset=done),
        lambda: cuscan.diagnose(r.random((16, 500), F32), b, 0.5, axis=1),
        lambda: cuscan.diagnose(1.0, b, axis=1, cu_seqlens=np.array([0, 3, 3, 500])),
        lambda: cuscan.diagnose(np.full((1, 500), 0.5, BF16), b.astype(BF16), axis=1),
        lambda: cuscan.diagnose(
            (r.random((4, 60)) * np.exp(1j)).astype(np.complex64), np.ones((4, 60), np.complex64), axis=1
        ),
    ):
        report = call()
        assert report.severe == [], str(report)


def test_sizes_of_nothing():
    given = mamba(1, 0, 4, 2)
    assert names(cuscan.diagnose(**given)) == ["the call is empty"]
    assert names(cuscan.diagnose(0.5, np.ones((0, 3)), axis=1)) == ["the call is empty"]
    assert found(cuscan.diagnose(0.5, np.ones((2, 3))), "the call is refused").figure.startswith("ValueError: axis")
    with pytest.raises(TypeError, match="expected the arguments of selective_scan"):
        cuscan.diagnose(np.ones(3))


@pytest.mark.parametrize("seed", range(40))
def test_any_call_can_be_diagnosed(seed):
    source = random.Random(seed)
    draw = problems.draw_linear if seed % 2 else problems.draw_selective
    problem = draw(source.choice, source.randint, values=("real", "nan"), largest=300)
    given = problem.arguments()
    report = cuscan.diagnose(**given)
    expected = problem.expected().value
    bad = expected.size - np.isfinite(expected).sum()
    result = report.not_finite.get("result")
    assert bad == (0 if result is None else result.nan + result.inf)
    assert (report.precision is None) == bool(bad or "the call is empty" in names(report))
    if report.precision is not None:
        assert report.precision.of_bound <= 1
    assert max(map(len, str(report).splitlines())) <= 100


# --- the table of symptoms ------------------------------------------------------------------------------------------


def swapped(given):
    """A scan whose combine(earlier, later) has its operands swapped."""
    return walked(given, "combine with earlier and later swapped")


def walked(given, mistake):
    problem = _figures.selective_problem(np, ABSENT | given, OPTIONS)
    result = np.empty_like(given["u"])
    for b in range(len(result)):
        result[b] = _compare.Rows(problem, b, list(range(result.shape[2]))).walk(result.shape[1], mistake)
    return result


def test_symptom_large_error_without_nan():
    given = mamba()
    report = cuscan.diagnose(**given, result=swapped(given))
    finding = found(report, "the given result is wrong")
    assert finding.cause == "it is what comes out with combine with earlier and later swapped"
    assert {"batch", "time", "channel"} == finding.where.keys()
    right = cuscan.diagnose(**given, result=cuscan.selective_scan(**given))
    assert right.severe == []


def test_symptom_inf_at_the_tail():
    given = mamba(1, 9000, 2, 2) | {"delta": np.full((1, 9000, 2), -4.0, F32), "delta_bias": None, "z": None}
    given["A"] = np.full((2, 2), 0.55, F32)
    report = cuscan.diagnose(**given)
    finding = found(report, "the state diverges")
    assert "A_log was given" in finding.cause
    step = report.gates.overflow_predicted
    assert f"overflows at step {step}, found at {report.not_finite['result'].first[1]}" in finding.figure
    assert abs(report.not_finite["result"].first[1] - step) < 10
    assert "gates above 1" in found(report, "the result has inf").cause


def test_symptom_nan_in_the_data():
    given = mamba()
    given["B"][1, 33, 2] = np.nan
    report = cuscan.diagnose(**given)
    assert found(report, "B has NaN").where == {"batch": 1, "time": 33}
    assert found(report, "the result has NaN").cause == "B has NaN or inf there or before"
    assert found(report, "the result has NaN").where == {"batch": 1, "time": 33, "channel": 0}
    mask = np.ones((2, 300), bool)
    mask[1, 33] = False
    assert cuscan.diagnose(**given, mask=mask).severe == []


def test_symptom_the_head_is_lost():
    given = mamba(1, 2000) | {"delta_bias": None}
    report = cuscan.diagnose(**given)
    assert report.memory.hidden_from_all > 0.9
    assert "any channel or state" in found(report, "the head of the sequence is lost").figure
    assert found(report, "delta is large").cause == "delta_bias is missing"


def test_symptom_worse_than_the_reference():
    given = mamba(1, 1000)
    given["A"] = given["A"].astype(BF16)
    assert "decayed to 1e-3 is off by up to 1.3%" in found(cuscan.diagnose(**given), "A is bfloat16").figure
    given = mamba(1, 1000)
    narrow = walked(given, _compare.STATE_NARROW)
    report = cuscan.diagnose(**given, result=narrow)
    assert found(report, "the given result is wrong").cause.endswith("the state kept in bfloat16")
    assert report.precision.state_in_bfloat16 > 100 * report.precision.level
    stored = cuscan.diagnose(**mamba(), h0=np.ones((2, 8, 4), BF16))
    assert found(stored, "h0 is bfloat16").level == "warning"


def test_symptom_pads_change_real_positions():
    given = mamba()
    for name in ("u", "delta", "B", "C", "z"):
        given[name][1, 200:] = given[name][1, 199:200]
    report = cuscan.diagnose(**given)
    assert found(report, "pads may change the state").where == {"batch": 1}
    assert "last 101 of 300" in found(report, "pads may change the state").figure
    mask = np.ones((2, 300), bool)
    mask[1, 200:] = False
    assert "pads may change the state" not in names(cuscan.diagnose(**given, mask=mask))
    left = np.ones((2, 300), bool)
    left[1, :100] = False
    wrong = cuscan.diagnose(**given, mask=left, result=cuscan.selective_scan(**given))
    assert found(wrong, "the given result is wrong").cause.endswith("mask left out")
    assert found(wrong, "the mask is needed").figure.startswith("100 masked steps")
    left[1] = False
    assert found(cuscan.diagnose(**given, mask=left), "rows are all pad").where == {"batch": 1}


def test_symptom_offsets():
    given = mamba(1)
    lengths = found(
        cuscan.diagnose(**given, cu_seqlens=np.array([100, 50, 150])), "cu_seqlens is out of order or out of range"
    )
    assert lengths.figure == "50 at 1 after 100"
    short = found(cuscan.diagnose(**given, cu_seqlens=np.array([0, 100, 250])), "cu_seqlens does not cover the array")
    assert short.figure.startswith("50 of 300")
    assert cuscan.diagnose(**given, cu_seqlens=np.array([0, 100, 300])).severe == []


@pytest.mark.parametrize("layout", ["bld", "bdl"])
def test_symptom_gradients_are_off(layout):
    given = mamba(2, 120)
    given = turned(given) if layout == "bdl" else given
    grad_out = np.random.default_rng(5).standard_normal(given["u"].shape, F32)
    right = cuscan.selective_scan_vjp(**given, grad_out=grad_out)
    assert cuscan.diagnose(**given, grad_out=grad_out, gradients=right).severe == []
    time = 1 if layout == "bld" else 2
    wrong = {
        "A": 2 * right.A,
        "delta_bias": right.delta_bias + 3,
        "B": np.roll(right.B, 1, axis=time),
        "C": right.C,
        "u": right.u[:, ::-1],
    }
    report = cuscan.diagnose(**given, grad_out=grad_out, gradients=wrong)
    assert found(report, "the gradient of A is off").cause.startswith("it is 2 times cuscan's")
    assert report.differences["delta_bias"].factor == pytest.approx(1)
    scale = np.sqrt(np.mean(right.delta_bias**2))
    assert report.differences["delta_bias"].offset == pytest.approx(3 / scale, rel=1e-4)
    assert "shifted in time" in found(report, "the gradient of B is off").cause
    assert "wrong formula" in found(report, "the gradient of u is off").cause
    assert "the gradient of C is off" not in names(report)


def test_symptom_long_sequences_are_slow():
    given = mamba(1, 65536, 4, 2)
    with forced(schedule=Schedule.SERIAL):
        report = cuscan.diagnose(**given)
    finding = found(report, "the chip is far from its limit")
    assert "a thread walks 65536 steps" in finding.figure
    assert finding.cause.startswith("low occupancy")
    assert report.plan.expected_ms > 20 * report.plan.limit_ms
    assert report.plan.plans[0].order.schedule is Schedule.SERIAL
    own = cuscan.diagnose(**given)
    assert own.plan.chain < 65536
    assert own.plan.reason.startswith("split")
    assert own.plan.scratch_bytes == 2 * 4 * 4 * 2 * own.plan.plans[0].chunks
    assert len(own.plan.kernels) == 3
    assert own.severe == [], str(own)


def test_symptom_low_occupancy():
    report = cuscan.diagnose(**mamba(1, 400))
    assert found(report, "the call is small").figure == f"{report.plan.blocks} blocks on 132 multiprocessors"
    assert report.plan.kernels == ["selective_scan_apply_float32_2x8x4"]


def test_symptom_a_shifted_loss_curve():
    given = mamba()
    for name in ("D", "delta_bias"):
        wrong = cuscan.selective_scan(**given | {name: None})
        assert found(cuscan.diagnose(**given, result=wrong), "the given result is wrong").cause.endswith(
            f"{name} left out"
        )
    report = cuscan.diagnose(**given | {"D": None, "delta_bias": None, "A": -np.ones((8, 4), F32)})
    assert {"there is no skip connection", "delta is large", "all states of a channel decay alike"} <= {*names(report)}
    log = found(cuscan.diagnose(**given | {"A": np.log(-given["A"]) + F32(0.01)}), "a state grows")
    assert "A_log" in log.cause
    twice = cuscan.diagnose(**given | {"delta": np.logaddexp(given["delta"], 0), "delta_bias": None})
    assert "softplus was applied before" in found(twice, "softplus sees only positive values").cause
    none = cuscan.diagnose(**given | {"delta_softplus": False, "delta_bias": None})
    assert found(none, "delta is negative").cause == "softplus was forgotten"


def test_symptom_two_runs_differ(host_executor):
    """The bits are those of the plan, so that another plan, as of another chip, shows in the report."""
    a, b = (np.random.default_rng(0).random((2, 3, 500), F32) for _ in range(2))
    a, b = a[0], b[1]
    results, plans = [], []
    for chunk in (64, 64, 128):
        with forced(schedule=Schedule.SPLIT, chunk=chunk):
            results.append(host_executor(cuscan.linear_scan, a, b, axis=1).tobytes())
            plans.append(cuscan.diagnose(a, b, axis=1).plan.plans[0].order)
    assert results[0] == results[1] != results[2]
    assert plans[0] == plans[1] != plans[2]


def test_underflow_and_gates_of_one():
    given = mamba() | {"delta_bias": None}
    high, low = given | {"delta": given["delta"] + 400}, given | {"delta": given["delta"] - 40}
    assert found(cuscan.diagnose(**high), "gates underflow").level == "warning"
    report = cuscan.diagnose(**high)
    assert report.gates.zero_share == 1
    assert found(report, "raw delta is above 20, where softplus is linear").level == "warning"
    assert found(cuscan.diagnose(**low), "most gates are exactly 1").level == "warning"
    assert found(cuscan.diagnose(**low), "delta is small")
    limited = cuscan.diagnose(**mamba(), delta_limit=(0.02, 1.0))
    delta = np.logaddexp(mamba()["delta"].astype(float) + mamba()["delta_bias"], 0)
    assert limited.delta.at_limit == ((delta < 0.02) | (delta > 1)).sum()
    assert found(limited, "delta is at a limit").level == "warning"


def test_values_at_risk_in_float16():
    given = mamba(dtype=np.float16)
    given["u"] *= np.float16(3000)
    given["z"] += np.float16(8)
    finding = found(cuscan.diagnose(**given), "the result is at risk in float16")
    assert finding.level == "error"
    assert {"batch", "time", "channel"} == finding.where.keys()
    assert cuscan.diagnose(**mamba(dtype=np.float16)).severe == []


def test_gradients_by_distance():
    given = mamba(2, 256) | {"delta_bias": None, "z": None}
    grad_out = np.zeros_like(given["u"])
    grad_out[:, -1] = 1
    grads = cuscan.selective_scan_vjp(**given, grad_out=grad_out)
    report = cuscan.diagnose(**given, gradients=grads)
    bins = report.gradients["u"]
    assert [distance for distance, *_ in bins] == [0, 1, 3, 7, 15, 31, 63, 127, 255]
    sizes = np.abs(grads.u)
    assert bins[2][1] == pytest.approx(np.median(sizes[:, -7:-3]))
    assert found(report, "the gradient of u vanishes").level == "warning"
    a, b = np.full(300, 1.1, F32), np.ones(300, F32)
    h = cuscan.linear_scan(a, b)
    grown = cuscan.linear_scan_vjp(a, h, np.eye(1, 300, 299, dtype=F32)[0])
    assert found(cuscan.diagnose(a, b, gradients=grown), "the gradient of b explodes")


def test_a_convolution_would_do():
    given = mamba()
    given = given | {name: np.repeat(given[name][:, :1], 300, axis=1) for name in ("delta", "B", "C")}
    assert found(cuscan.diagnose(**given), "a convolution would do").level == "note"


def test_a_result_that_cannot_be_compared():
    given = mamba()
    y = cuscan.selective_scan(**given)
    assert cuscan.diagnose(**given, result=(y, 0)).severe == []
    for wrong in (y[:, :-1], y[0]):
        assert found(cuscan.diagnose(**given, result=wrong), "the given result has another shape")
    y[1, 9, 3] = np.nan
    finding = found(cuscan.diagnose(**given, result=y), "the given result has NaN")
    assert finding.where == {"batch": 1, "time": 9, "channel": 3}


def test_arrays_of_other_frameworks():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    jnp = pytest.importorskip("jax.numpy", reason="JAX is not installed")
    known = cuscan.diagnose(**mamba())
    for dtype in (torch.float32, torch.bfloat16):
        tensors = {name: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for name, x in mamba().items()}
        tensors |= {name: tensors[name].to(dtype) for name in ("u", "delta", "B", "C", "z")}
        tensors["A"].requires_grad_()
        report = cuscan.diagnose(**tensors, result=cuscan.selective_scan(**tensors))
        assert report.shapes["u"] == f"{str(dtype).removeprefix('torch.')} (2, 300, 8)"
        assert report.severe == []
    arrays = {name: jnp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in mamba().items()}
    assert cuscan.diagnose(**arrays).gates.largest == known.gates.largest


def test_on_the_kernels(host_executor):
    given = mamba(1, 70, 4, 4, BF16)
    report = host_executor(cuscan.diagnose, **given)
    assert report.severe == [], str(report)
    assert 0 < report.precision.of_bound < 1


# --- files, pictures ------------------------------------------------------------------------------------------------


def test_a_file_is_diagnosed(tmp_path, capsys):
    given = mamba(dtype=BF16)
    np.savez(tmp_path / "call.npz", **given, delta_limit=(0.0, 10.0), grad_u=given["u"])
    assert main(["diagnose", str(tmp_path / "call.npz")]) == 0
    out = capsys.readouterr().out
    assert "u bfloat16 (2, 300, 8)" in out
    assert max(map(len, out.splitlines())) <= 100
    np.savez(tmp_path / "linear.npz", a=1.1, b=np.ones(2000, F32))
    assert main(["diagnose", str(tmp_path / "linear.npz")]) == 1
    assert "the state diverges" in capsys.readouterr().out
    assert json.dumps(diagnostics.read(tmp_path / "linear.npz")["a"]) == "1.1"
    assert main(["diagnose", str(tmp_path / "none.npz")]) == 1
    assert "none.npz: [Errno 2] No such file" in capsys.readouterr().err


def test_pictures(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    figure = cuscan.diagnose(**mamba()).plot()
    assert figure.get_size_inches()[0] * figure.dpi == 1200
    labels = [axes.get_xlabel() for axes in figure.axes]
    assert labels == ["distance / steps", "1 - gate (1e-9: exactly 1 or more)", "length / steps"]
    assert all(axes.lines or axes.patches for axes in figure.axes)
    figure.savefig(tmp_path / "report.png")
    assert (tmp_path / "report.png").stat().st_size > 10000
