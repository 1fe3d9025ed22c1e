"""The NumPy gradients against the oracle's with its bound, against torch's, and by properties that need neither."""

import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from test_reference import (
    ACCUMULATE,
    exact_layer,
    exact_row,
    flags,
    gates_and_inputs,
    layer,
    poison,
    poison_steps,
    random_bounds,
    rng,
    roundoff,
    saved_states,
)

import cuscan
from cuscan import STATE_INTERVAL, reference_vjp
from cuscan.testing import _bounds, oracle

BF16 = ml_dtypes.bfloat16
EDGES = [0, 1, 2, 31, 32, 33, 64, 65, 97]


def linear_scan_vjp(
    a, h, grad_h=None, h0=None, *, grad_last_state=None, axis=-1, reverse=False, mask=None, reset=None, cu_seqlens=None
):
    """Without the gradient of an h0 that is None, and with that of a broadcast `a` for each step."""
    accumulate = np.dtype(ACCUMULATE[h.dtype.type])
    results = reference_vjp.linear_scan_vjp(
        np.asarray(a), h, grad_h, h0, grad_last_state, axis=axis, reverse=reverse, accumulate=accumulate,
        **flags(mask, reset, cu_seqlens, h.shape),
    )  # fmt: skip
    assert all(x.dtype == accumulate for x in results)
    return {name: x for name, x in zip(("a", "b", "h0"), results, strict=True) if name != "h0" or h0 is not None}


def check(actual, expected):
    assert set(actual) == set(expected)
    for name, (value, bound) in expected.items():
        try:
            oracle.assert_scan_close(actual[name], value, bound)
        except AssertionError as error:
            raise AssertionError(f"gradient of {name}: {error}") from None


def check_linear(a, h, *args, **options):
    expected = _bounds.linear_scan_vjp(np.broadcast_to(a, h.shape), h, *args, **options, eps=roundoff(h.dtype.type))
    check(linear_scan_vjp(a, h, *args, **options), expected)


def draw(r, shape, dtype):
    x = r.normal(size=shape)
    return (x + 1j * r.normal(size=shape) if np.dtype(dtype).kind == "c" else x).astype(dtype)


# linear_scan_vjp


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("absent", ["grad_h", "h0", "grad_last_state", "nothing"])
def test_linear_every_length(reverse, absent):
    for length in (0, 1, 2, 3, 20, 63, 64, 65, 129):
        a, h = gates_and_inputs((3, length), seed=length)
        r = rng(length)
        given = {name: draw(r, 3, np.float32) for name in ("h0", "grad_last_state")}
        given["grad_h"] = draw(r, (3, length), np.float32)
        given.pop(absent, None)
        check_linear(a, h, **given, reverse=reverse)


@pytest.mark.parametrize("dtype", ACCUMULATE)
@pytest.mark.parametrize("wide", [False, True])
def test_linear_types(dtype, wide):
    # h and grad_h may have the accumulation type.
    a, h = gates_and_inputs((2, 90, 3), dtype)
    state = ACCUMULATE[dtype]
    h = h.astype(state if wide else dtype)
    r = rng()
    received = draw(r, h.shape, dtype if wide else state)
    marks = {"mask": r.random(h.shape) < 0.8, "reset": r.random(h.shape) < 0.05}
    h0, last = draw(r, (2, 2, 3), state)
    check_linear(a, h, received, h0, grad_last_state=last, axis=1, **marks)
    h0, last = draw(r, (2, 4, 2, 3), state)
    check_linear(a, h, received, h0, grad_last_state=last, axis=1, **marks, cu_seqlens=[5, 30, 30, 31, 85])


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("reverse", [False, True])
def test_linear_axes_and_views(axis, reverse):
    big_a, big_h = gates_and_inputs((10, 14, 12))
    h, received = big_h[::-2, ::2, 1::2], big_h.T[::2, ::2, ::2].transpose(2, 1, 0)[:, :7, :6]
    r = rng()
    last = draw(r, np.delete(h.shape, axis), np.float32)
    for shape in ((5, 7, 6), (1, 7, 1), (6,), ()):
        a = np.array(big_a[: shape[0] if shape else 1]).ravel()[: int(np.prod(shape))].reshape(shape)
        mask, reset = r.random((5, 7, 1)) < 0.7, r.random((7, 6)) < 0.2
        for x in (a, h, received):
            x.flags.writeable = False
        check_linear(a, h, received, last, grad_last_state=last, axis=axis, reverse=reverse, mask=mask, reset=reset)


@pytest.mark.parametrize("reverse", [False, True])
def test_linear_marks_are_exact_and_read_nothing(reverse):
    for seed in range(60):
        r = rng(seed)
        length = int(r.integers(1, 100))
        a, b = exact_row((2, length), seed)
        mask, reset = r.random((2, length)) < 0.7, r.random((2, length)) < 0.1
        cu_seqlens = random_bounds(length, seed) if seed % 3 else None
        states = (2,) if cu_seqlens is None else (5, 2)
        h0, last = r.integers(-8, 9, (2, *states)).astype(np.float32)
        received = r.integers(-8, 9, b.shape).astype(np.float32)
        marks = {"mask": mask, "reset": reset, "cu_seqlens": cu_seqlens, "reverse": reverse}
        given = {"h0": h0 if seed % 2 else None, "grad_last_state": last if seed % 5 else None}
        h = oracle.linear_scan(a, b, given["h0"], **marks).value.astype(np.float32)
        expected = oracle.linear_scan_vjp(a, h, received, **given, **marks)
        outside = np.zeros(b.shape, bool)
        if cu_seqlens is not None:
            outside[:, : cu_seqlens[0]] = outside[:, cu_seqlens[-1] :] = True
        poison(a, ~mask | reset | outside)
        poison(received, outside)
        poison(h, outside)
        gradients = linear_scan_vjp(a, h, received, **given, **marks)
        for name, x in expected.items():
            np.testing.assert_array_equal(gradients[name], x)


def test_linear_gradients_stay_in_their_sequence():
    a, h = gates_and_inputs((2, 40))
    options = {"cu_seqlens": [2, 9, 9, 25, 36], "h0": draw(rng(), (4, 2), np.float32)}
    received = draw(rng(1), h.shape, np.float32)
    clean = linear_scan_vjp(a, h, received, **options)
    for x in (a, h, received):
        poison(x[:, 9:25], np.ones((2, 16), bool))
    gradients = linear_scan_vjp(a, h, received, **options)
    for name in ("a", "b"):
        np.testing.assert_array_equal(
            np.delete(gradients[name], slice(9, 25), 1), np.delete(clean[name], slice(9, 25), 1)
        )
        assert not np.isfinite(gradients[name][:, 9:25]).any()
    np.testing.assert_array_equal(np.delete(gradients["h0"], 2, 0), np.delete(clean["h0"], 2, 0))


@pytest.mark.parametrize("marks", [{}, {"cu_seqlens": [0, 3, 6]}, {"reset": [[True, False, False]] * 2}])
def test_linear_a_gate_that_is_not_read_receives_nothing(marks):
    a, h = gates_and_inputs((2, 6))
    marks = {k: np.tile(x, 2) if k == "reset" else x for k, x in marks.items()}
    a[:, 0] = np.inf
    gradients = linear_scan_vjp(a, h, np.full_like(h, np.nan), **marks)
    np.testing.assert_array_equal(gradients["a"] == 0, np.broadcast_to(np.arange(6) % (3 if marks else 6) == 0, (2, 6)))
    assert np.isnan(gradients["b"]).all()


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 3)])
def test_linear_empty(shape):
    for axis in range(len(shape)):
        empty = np.empty(shape, np.float32)
        last = np.full(np.delete(shape, axis), 2, np.float32)
        gradients = linear_scan_vjp(empty, empty, empty, last, grad_last_state=last, axis=axis)
        np.testing.assert_array_equal(gradients["h0"], last)
        np.testing.assert_array_equal(linear_scan_vjp(empty, empty, empty, last, axis=axis)["h0"], 0 * last)
        assert gradients["a"].shape == gradients["b"].shape == shape


def test_gradients_are_rounded_once():
    # The nearest float32 is a tie of two bfloat16.
    x = np.array([0.08666991894247822])
    assert x.astype(BF16) == BF16(0.0869140625)
    assert cuscan.linear_scan_vjp(0.5, x, x, grad_dtype=BF16).b == BF16(0.08642578125)
    x, one = x.reshape(1, 1, 1), np.ones((1, 1, 1))
    gradients = cuscan.selective_scan_vjp(x, one, -one[0], one, one, one[0, 0], grad_out=one, grad_dtype=BF16)
    np.testing.assert_array_equal(gradients.D, [BF16(0.08642578125)])


# selective_scan_vjp


def selective_scan_vjp(
    u, delta, A, B, C, D=None, z=None, delta_bias=None, *, grad_out=None, grad_last_state=None, h0=None, states=None,
    delta_softplus=True, delta_limit=None, reverse=False, mask=None, reset=None, cu_seqlens=None
):  # fmt: skip
    """Without the gradient of an h0 that is None."""
    accumulate = np.dtype(np.complex64 if A.dtype.kind == "c" else ACCUMULATE[u.dtype.type])
    gradients = reference_vjp.selective_scan_vjp(
        u, delta, A, B, C, D, z, delta_bias, h0, grad_out, grad_last_state, states, delta_softplus=delta_softplus,
        delta_limit=delta_limit, reverse=reverse, accumulate=accumulate, **flags(mask, reset, cu_seqlens, u.shape[:2]),
    )  # fmt: skip
    for name, x in gradients.items():
        assert x.dtype == (accumulate if name in ("A", "B", "C", "h0") else np.empty(0, accumulate).real.dtype)
    return {name: x for name, x in gradients.items() if name != "h0" or h0 is not None}


def received_by(inputs, cu_seqlens=None, seed=0):
    """grad_out, grad_last_state and h0."""
    r = rng((seed, 1))
    state = np.complex64 if inputs["A"].dtype.kind == "c" else ACCUMULATE[inputs["u"].dtype.type]
    n = len(inputs["u"]) if cu_seqlens is None else len(cu_seqlens) - 1
    last, h0 = draw(r, (2, n, *inputs["A"].shape), state)
    return {"grad_out": draw(r, inputs["u"].shape, inputs["u"].dtype), "grad_last_state": last, "h0": h0}


def check_selective(inputs, *, delta_softplus=True, **options):
    """With the states of a forward and without."""
    options["delta_softplus"] = delta_softplus
    expected = _bounds.selective_scan_vjp(**inputs, **options, eps=roundoff(inputs["u"].dtype.type))
    forward = {name: x for name, x in options.items() if not name.startswith("grad_")}
    for states in (None, saved_states(inputs, segments=3, **forward)):
        check(selective_scan_vjp(**inputs, **options, states=states), expected)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("absent", ["grad_out", "h0", "grad_last_state", "nothing"])
def test_selective_every_edge_of_an_interval(reverse, absent):
    for length in EDGES:
        inputs = layer(2, length, 2, 3, seed=length)
        received = received_by(inputs, seed=length)
        received.pop(absent, None)
        check_selective(inputs, **received, reverse=reverse)


@pytest.mark.parametrize("present", range(8))
@pytest.mark.parametrize("delta_softplus", [False, True])
@pytest.mark.parametrize("delta_limit", [None, (0.05, 0.5), (0.0, np.inf)])
def test_selective_options(present, delta_softplus, delta_limit):
    inputs = layer(length=40)
    inputs |= {name: None for i, name in enumerate(("D", "z", "delta_bias")) if not present >> i & 1}
    if not delta_softplus:
        inputs["delta"] = np.abs(inputs["delta"])
    check_selective(inputs, **received_by(inputs), delta_softplus=delta_softplus, delta_limit=delta_limit)


@pytest.mark.parametrize("B", [None, 1, 2, 3, 6])
@pytest.mark.parametrize("C", [None, 1, 2, 6])
@pytest.mark.parametrize("parameter", [np.float32, np.complex64])
def test_selective_groups_and_constants(B, C, parameter):
    inputs = layer(2, 33, B=B, C=C, parameter=parameter)
    check_selective(inputs, **received_by(inputs), reverse=True)


@pytest.mark.parametrize(
    ("dtype", "parameter"),
    [(t, p) for t in (np.float16, BF16) for p in (t, np.float32)]
    + [(np.float32, np.float32), (np.float64, np.float64), (np.float32, np.complex64), (BF16, np.complex64)],
)
@pytest.mark.parametrize("reverse", [False, True])
def test_selective_types_with_marks(dtype, parameter, reverse):
    r = rng()
    for batch, cu_seqlens in ((2, None), (1, [3, 9, 9, 64, 67])):
        inputs = layer(batch, 70, B=2, C=3, dtype=dtype, parameter=parameter)
        mask, reset = r.random((batch, 70)) < 0.7, r.random((batch, 70)) < 0.1
        poison_steps(inputs, ~mask)
        received = received_by(inputs, cu_seqlens)
        received["grad_out"][~mask] = np.nan
        marks = {"mask": mask, "reset": reset, "cu_seqlens": cu_seqlens, "reverse": reverse}
        check_selective(inputs, **received, delta_limit=(1e-3, 1.0), **marks)
        check_selective(inputs, grad_out=received["grad_out"], **marks)


@pytest.mark.parametrize("center", [-80.0, -16.0, 0.0, 16.0, 80.0])
def test_selective_activations_over_their_range(center):
    inputs = layer(length=20, seed=1)
    inputs["delta_bias"] = np.full(6, center, np.float32)
    inputs["z"] += np.float32(center)
    inputs["A"] *= np.float32(1e-3 if center > 0 else 1)
    check_selective(inputs, **received_by(inputs))


@pytest.mark.parametrize("reverse", [False, True])
def test_selective_marks_are_exact_and_read_nothing(reverse):
    for seed in range(30):
        r = rng(seed)
        length = int(r.integers(1, 80))
        batch = 1 if seed % 3 else 2
        inputs = exact_layer(batch, length, B=(None, 1, 2)[seed % 3], C=(4, None)[seed % 2], seed=seed)
        inputs["A"] = np.maximum(inputs["A"], -1024)
        mask, reset = r.random((batch, length)) < 0.7, r.random((batch, length)) < 0.1
        cu_seqlens = random_bounds(length, seed) if batch == 1 else None
        h0, last = r.integers(-3, 4, (2, batch if cu_seqlens is None else 5, 4, 3)).astype(np.float32)
        received = r.integers(-3, 4, inputs["u"].shape).astype(np.float32)
        marks = {"mask": mask, "reset": reset, "cu_seqlens": cu_seqlens, "reverse": reverse, "delta_limit": (0.0, 1.0)}
        marks |= {"h0": h0 if seed % 2 else None, "grad_last_state": last if seed % 5 else None}
        expected = _bounds.selective_scan_vjp(**inputs, **marks, grad_out=received, exact=True)
        outside = ~mask
        if cu_seqlens is not None:
            outside[:, : cu_seqlens[0]] = outside[:, cu_seqlens[-1] :] = True
        poison_steps(inputs, outside)
        received[outside] = np.nan
        gradients = selective_scan_vjp(**inputs, **marks, grad_out=received, delta_softplus=False)
        for name, (value, bound) in expected.items():
            assert not bound.any() or name.startswith("delta")  # whose rates a kernel may scale
            np.testing.assert_array_equal(gradients[name], value)


def test_selective_gradient_of_the_last_state_alone():
    # A loss of nothing but the sum of the last state, through one gate of 1/2 after another.
    inputs = layer(1, 40, 1, 1, B=None, C=None) | {"D": None, "z": None, "delta_bias": None}
    inputs["A"][:], inputs["delta"][:] = -1, np.log(2)
    one = np.ones((1, 1, 1), np.float32)
    gradients = selective_scan_vjp(**inputs, grad_last_state=one, h0=one, delta_softplus=False)
    np.testing.assert_allclose(
        gradients["u"][0, :, 0], np.log(2) * inputs["B"].item() * 0.5 ** np.arange(39, -1, -1), rtol=1e-5
    )
    np.testing.assert_allclose(gradients["h0"], 0.5**40, rtol=1e-5)
    np.testing.assert_array_equal(gradients["C"], 0)


def test_selective_gradients_stay_in_their_sequence():
    inputs = layer(1, 70)
    options = {"cu_seqlens": [2, 9, 9, 40, 66], **received_by(inputs, [0] * 5)}
    spared = np.r_[2:9, 40:66]
    clean = selective_scan_vjp(**inputs, **options)
    poisoned = np.ones((1, 70), bool)
    poisoned[:, spared] = False
    poison_steps(inputs, poisoned)
    gradients = selective_scan_vjp(**inputs, **options)
    outside = np.r_[0:2, 66:70]
    for name in ("u", "delta", "B", "C", "z"):
        np.testing.assert_array_equal(gradients[name][:, spared], clean[name][:, spared])
        np.testing.assert_array_equal(gradients[name][:, outside], 0)
        assert np.isnan(gradients[name][:, 9:40]).all()
    np.testing.assert_array_equal(np.delete(gradients["h0"], 2, 0), np.delete(clean["h0"], 2, 0))
    # A loss of one sequence has no gradient in another.
    inputs = layer(1, 70)
    options["grad_out"][:, spared] = options["grad_last_state"][[0, 1, 3]] = 0
    gradients = selective_scan_vjp(**inputs, **options)
    for name in ("u", "delta", "B", "C", "z"):
        np.testing.assert_array_equal(gradients[name][:, spared], 0)
        assert gradients[name][:, 9:40].all()
    np.testing.assert_array_equal(gradients["h0"][[0, 1, 3]], 0)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("with_h0", [False, True])
def test_selective_nothing_gets_past_a_reset(reverse, with_h0):
    # Step 20 is a reset with a gate of infinity, which is not read; rubbish before it or after.
    inputs = layer(1, 40) | {"z": None}
    inputs["A"] = np.abs(inputs["A"])
    inputs["delta"][0, 20] = 1e4
    received = received_by(inputs)
    h0 = {"h0": received.pop("h0")} if with_h0 else {}
    options = {"reset": np.arange(40)[None] == 20, "delta_softplus": False, "reverse": reverse, "delta_limit": None}
    options |= h0
    inputs["delta"][0, :20] = inputs["delta"][0, 21:] = 0.01
    clean = selective_scan_vjp(**inputs, **received, **options)
    assert all(np.isfinite(x).all() for x in clean.values())
    first, second = (slice(21, 40), slice(20)) if reverse else (slice(20), slice(21, 40))
    inputs["u"][0, first], hidden = np.nan, inputs["u"][0, first].copy()
    behind = selective_scan_vjp(**inputs, **received, **options)
    inputs["u"][0, first] = hidden
    received["grad_out"][0, second] = received["grad_last_state"][...] = np.nan
    before = selective_scan_vjp(**inputs, **received, **options)
    for name in ("u", "delta", "B", "C"):
        for gradients, spared in ((behind, second), (before, first)):
            np.testing.assert_array_equal(gradients[name][0, spared], clean[name][0, spared])
        np.testing.assert_array_equal(behind[name][0, 20], clean[name][0, 20])
        assert np.isnan(behind["C"][0, first]).all()
        assert np.isnan(before["B"][0, second]).all()
    if with_h0:
        np.testing.assert_array_equal(before["h0"], clean["h0"])


def test_selective_a_first_step_without_h0_reads_no_gate():
    inputs = layer(1, 3, 1, 1) | {"z": None, "delta_bias": None}
    inputs["A"], inputs["delta"][...] = np.abs(inputs["A"]), [[[1e4], [0.1], [0.1]]]
    received = received_by(inputs) | {"h0": None}
    check_selective(inputs, **received, delta_softplus=False)
    check_selective(inputs, **received, delta_softplus=False, cu_seqlens=[0, 3])


def test_selective_masked_steps_receive_nothing_from_parameters_that_are_nan():
    inputs = layer(2, 40, B=None, C=None)
    for name in ("A", "B", "C", "D"):
        inputs[name][:] = np.nan
    mask = np.broadcast_to([[True], [False]], (2, 40)).copy()
    mask[0, ::3] = False
    received = received_by(inputs)
    gradients = selective_scan_vjp(**inputs, **received, mask=mask)
    for name in ("u", "delta", "z"):
        np.testing.assert_array_equal(gradients[name][~mask], 0)
        assert np.isnan(gradients[name][mask]).all()
    np.testing.assert_array_equal(gradients["h0"][1], received["grad_last_state"][1])


def test_selective_starts_from_the_states_that_are_given():
    inputs = layer(1, 3 * STATE_INTERVAL)
    received = received_by(inputs)
    states = saved_states(inputs, h0=received["h0"])
    gradients = selective_scan_vjp(**inputs, **received, states=states)
    states[:, 1] += 1
    others = selective_scan_vjp(**inputs, **received, states=states)
    changed = np.arange(3 * STATE_INTERVAL) // STATE_INTERVAL == 1
    np.testing.assert_array_equal((gradients["C"] != others["C"]).any(axis=(0, 2, 3)), changed)
    np.testing.assert_array_equal(gradients["B"], others["B"])


@pytest.mark.parametrize("shape", [(0, 5, 4, 3), (2, 0, 4, 3), (2, 5, 0, 3), (2, 5, 4, 0)])
def test_selective_empty(shape):
    inputs = layer(*shape)
    check_selective(inputs, **received_by(inputs))


@pytest.mark.parametrize("rubbish", [np.nan, np.inf])
@pytest.mark.parametrize("absent", ["grad_out", "grad_last_state"])
@pytest.mark.parametrize("delta_limit", [None, (0.0, 1.0)])
def test_selective_without_states_reads_no_delta(rubbish, absent, delta_limit):
    inputs = layer(2, 5, 4, 0)
    for name in ("u", "delta"):
        inputs[name][0, 2:, 1] = rubbish
    received = received_by(inputs) | {absent: None}
    check_selective(inputs, **received, delta_limit=delta_limit)
    gradients = selective_scan_vjp(**inputs, **received, delta_limit=delta_limit)
    assert not gradients["delta"].any()
    assert np.isfinite(gradients["D"]).tolist() == [True, False, True, True]


def test_selective_views_are_read_in_place():
    inputs = layer(length=40)
    received = received_by(inputs)
    expected = selective_scan_vjp(**inputs, **received)
    spread = inputs | received
    spread |= {
        k: np.repeat(np.repeat(v, 2, axis=-1), 3, axis=0)[::3, ..., ::2] for k, v in spread.items() if v.ndim > 1
    }
    for k in ("u", "delta", "z", "grad_out"):
        spread[k] = np.ascontiguousarray(spread[k].swapaxes(1, 2)).swapaxes(1, 2)
    for x in spread.values():
        x.flags.writeable = False
    for name, x in selective_scan_vjp(**spread).items():
        np.testing.assert_array_equal(x, expected[name])


def test_selective_peak_memory():
    inputs = layer(2, 1000, 32, 32)
    received = received_by(inputs)
    tracemalloc.start()
    gradients = selective_scan_vjp(**inputs, **received)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # Twelve arrays of one interval, the gradients, the states and a y to compute them with, and a MiB for tiles.
    interval = 4 * STATE_INTERVAL * 2 * 32 * 32
    states, y = 32 * interval // STATE_INTERVAL, gradients["u"].nbytes
    assert peak < 12 * interval + sum(x.nbytes for x in gradients.values()) + states + y + (1 << 20)
    assert peak < inputs["u"].nbytes * 32


# Autodiff


def torch_leaves(torch, arrays):
    return {k: torch.tensor(x, requires_grad=True) for k, x in arrays.items() if x is not None}


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("is_complex", [False, True])
def test_selective_against_torch(reverse, is_complex):
    torch = pytest.importorskip("torch")
    inputs = layer(2, 40, B=2, parameter=np.complex64 if is_complex else np.float32)
    reset = rng(2).random((2, 40)) < 0.1
    received = received_by(inputs)
    x = torch_leaves(torch, inputs | {"h0": received["h0"]})
    step = torch.nn.functional.softplus(x["delta"] + x["delta_bias"])
    B, C = (x[k].repeat_interleave(6 // x[k].shape[2], dim=2) for k in "BC")
    h, y = x["h0"], [None] * 40
    for t in reversed(range(40)) if reverse else range(40):
        h = torch.where(torch.tensor(reset[:, t, None, None]), 0, h)
        h = torch.exp(step[:, t, :, None] * x["A"]) * h + (step * x["u"])[:, t, :, None] * B[:, t]
        y[t] = (h * C[:, t]).sum(-1)
    y = torch.stack(y, dim=1)
    y = ((2 * y.real if is_complex else y) + x["D"] * x["u"]) * torch.nn.functional.silu(x["z"])
    torch.autograd.backward((y, h), (torch.tensor(received["grad_out"]), torch.tensor(received["grad_last_state"])))
    expected = _bounds.selective_scan_vjp(**inputs, **received, delta_softplus=True, reverse=reverse, reset=reset)
    check({k: leaf.grad.numpy() for k, leaf in x.items()}, expected)
    check(selective_scan_vjp(**inputs, **received, reverse=reverse, reset=reset), expected)


@pytest.mark.parametrize("dtype", [np.float32, np.complex64])
def test_linear_against_torch(dtype):
    torch = pytest.importorskip("torch")
    a, b = gates_and_inputs((3, 50), dtype)
    received, last, h0 = draw(rng(1), (3, 50), dtype), *draw(rng(2), (2, 3), dtype)
    x = torch_leaves(torch, {"a": a, "b": b, "h0": h0})
    h = [x["h0"]]
    for t in range(50):
        h.append(x["a"][:, t] * h[-1] + x["b"][:, t])
    h = torch.stack(h[1:], dim=1)
    torch.autograd.backward((h, h[:, -1]), (torch.tensor(received), torch.tensor(last)))
    h = h.detach().numpy()
    expected = _bounds.linear_scan_vjp(a, h, received, h0, grad_last_state=last)
    check({k: leaf.grad.numpy() for k, leaf in x.items()}, expected)
    check(linear_scan_vjp(a, h, received, h0, grad_last_state=last), expected)
