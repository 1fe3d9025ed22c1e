"""The oracle against what is known without a loop, and its bound against arithmetic that is known to err."""

from itertools import pairwise, starmap

import ml_dtypes
import numpy as np
import pytest

from cuscan.testing import oracle

F32 = np.float32
GATES = [1 / 2, 2, -1, 0, 1 / 2, 2, -1, 1]
INPUTS = [1, 2, 3, 4, 5, 6, 7, 8]


def rng(seed=0):
    return np.random.default_rng(seed)


def accepted(actual, scan):
    try:
        oracle.assert_scan_close(actual, scan.value, scan.bound)
    except AssertionError:
        return False
    return True


# linear_scan: values


def test_constant_gate_is_a_geometric_sum():
    scan = oracle.linear_scan(np.full(8, 0.5), np.ones(8))
    np.testing.assert_array_equal(scan.value, [2 - 0.5**t for t in range(8)])
    assert scan.last == 2 - 0.5**7


def test_changing_gates_worked_by_hand():
    forward, backward = oracle.linear_scan(GATES, INPUTS), oracle.linear_scan(GATES, INPUTS, reverse=True)
    np.testing.assert_array_equal(forward.value, [1, 4, -1, 4, 7, 20, -13, -5])
    np.testing.assert_array_equal(backward.value, [1, 0, -1, 4, 7, 4, -1, 8])
    assert forward.last == -5
    assert backward.last == 1


def test_h0_enters_through_the_first_gate():
    np.testing.assert_array_equal(oracle.linear_scan(GATES, INPUTS, 6.0).value, [4, 10, -7, 4, 7, 20, -13, -5])
    reversed_ = oracle.linear_scan(GATES, INPUTS, 6.0, reverse=True)
    np.testing.assert_array_equal(reversed_.value, [1, 0, -1, 4, 1, -8, -7, 14])


def test_no_state_enters_without_h0():
    with_zero = oracle.linear_scan([np.inf, 1.0], [2.0, 1.0], 0.0)
    np.testing.assert_array_equal(oracle.linear_scan([np.inf, 1.0], [2.0, 1.0]).value, [2, 3])
    assert np.isnan(with_zero.value).all()


def test_no_steps_leave_h0():
    scan = oracle.linear_scan(np.zeros((2, 0)), np.zeros((2, 0)), [3.0, 4.0])
    np.testing.assert_array_equal(scan.last, [3, 4])
    np.testing.assert_array_equal(scan.last_bound, [0, 0])
    np.testing.assert_array_equal(oracle.linear_scan(np.zeros(0), np.zeros(0)).last, 0)


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("reverse", [False, True])
def test_lower_triangular_matrix(axis, reverse):
    # Integers, so the matrix product is exact: m[t, s] = a[s+1] ... a[t].
    shape = (7, 7, 3)
    a, b = (rng(seed).integers(-2, 3, shape).astype(float) for seed in (1, 2))
    scan = oracle.linear_scan(a, b, axis=axis, reverse=reverse)
    for row in np.ndindex(tuple(n for i, n in enumerate(shape) if i != axis % 3)):
        gates, inputs = (np.moveaxis(x, axis, -1)[row] for x in (a, b))
        if reverse:
            gates, inputs = gates[::-1], inputs[::-1]
        n = len(inputs)
        matrix = np.array([[np.prod(gates[s + 1 : t + 1]) if s <= t else 0 for s in range(n)] for t in range(n)])
        expected = matrix @ inputs
        np.testing.assert_array_equal(np.moveaxis(scan.value, axis, -1)[row], expected[::-1] if reverse else expected)
        assert scan.last[row] == expected[-1]


def test_a_scalar_gate_broadcasts():
    np.testing.assert_array_equal(oracle.linear_scan(2.0, [[1, 1, 1], [1, 0, 2]]).value, [[1, 3, 7], [1, 2, 6]])


def test_complex_rotation():
    # Eight turns by an eighth: a^t sums to (1 - a^n) / (1 - a).
    a = np.exp(2j * np.pi / 8)
    scan = oracle.linear_scan(np.full(9, a), np.ones(9), eps=2.0**-53)
    oracle.assert_scan_close((1 - a ** np.arange(1, 10)) / (1 - a), scan.value, scan.bound)
    assert abs(scan.value[7]) < 1e-15


def test_scipy_lfilter():
    signal = pytest.importorskip("scipy.signal")
    b = rng().normal(size=(3, 200))
    np.testing.assert_allclose(
        oracle.linear_scan(0.97, b).value, signal.lfilter([1.0], [1.0, -0.97], b), rtol=1e-12, atol=1e-13
    )


# linear_scan: mask, reset, cu_seqlens. Gates [1/2, 2, -1, 0, 1/2, 2, -1, 1], inputs 1 to 8.

MASK = np.array([1, 1, 0, 1, 0, 0, 1, 1], bool)
RESET = np.array([0, 0, 1, 0, 0, 1, 0, 0], bool)


@pytest.mark.parametrize(
    ("options", "value", "last"),
    [
        ({"mask": MASK}, [1, 4, 4, 4, 4, 4, 3, 11], 11),
        ({"mask": MASK, "reverse": True}, [6, 10, 4, 4, -1, -1, -1, 8], 6),
        ({"mask": MASK, "h0": 6.0}, [4, 10, 10, 4, 4, 4, 3, 11], 11),
        ({"mask": MASK, "h0": 6.0, "reverse": True}, [6, 10, 4, 4, -7, -7, -7, 14], 6),
        # Masked at first: 0 without h0, and h0 with it.
        ({"mask": ~MASK}, [0, 0, 3, 3, 6.5, 19, 19, 19], 19),
        ({"mask": ~MASK, "reverse": True}, [-5, -5, -5, 8, 8, 6, 0, 0], -5),
        ({"mask": ~MASK, "h0": 6.0}, [6, 6, -3, -3, 3.5, 13, 13, 13], 13),
        ({"mask": ~MASK, "h0": 6.0, "reverse": True}, [-11, -11, -11, 14, 14, 18, 6, 6], -11),
        ({"mask": False}, [0] * 8, 0),
        ({"mask": False, "h0": 6.0}, [6] * 8, 6),
        ({"reset": RESET}, [1, 4, 3, 4, 7, 6, 1, 9], 9),
        ({"reset": RESET, "reverse": True}, [5, 8, 3, 4, 8, 6, -1, 8], 5),
        ({"reset": RESET, "h0": 6.0}, [4, 10, 3, 4, 7, 6, 1, 9], 9),
        ({"reset": True, "h0": 6.0}, INPUTS, 8),
        ({"reset": True, "h0": 6.0, "reverse": True}, INPUTS, 1),
        # Both resets are where the mask is False.
        ({"mask": MASK, "reset": RESET}, [1, 4, 0, 4, 4, 0, 7, 15], 15),
        ({"mask": MASK, "reset": RESET, "reverse": True}, [2, 2, 0, 4, 0, 0, -1, 8], 2),
        ({"mask": MASK, "reset": ~RESET, "h0": 6.0}, [1, 2, 2, 4, 0, 0, 7, 8], 8),
        ({"cu_seqlens": [0, 2, 5, 8]}, [1, 4, 3, 4, 7, 6, 1, 9], [4, 7, 9]),
        ({"cu_seqlens": [0, 2, 5, 8], "reverse": True}, [2, 2, -1, 4, 5, 4, -1, 8], [2, -1, 4]),
        ({"cu_seqlens": [0, 2, 5, 8], "h0": [6, 7, 8]}, [4, 10, -4, 4, 7, 22, -15, -7], [10, 7, -7]),
        # Two empty ones, and a step outside at either end.
        ({"cu_seqlens": [1, 1, 4, 4, 7]}, [0, 2, 1, 4, 5, 16, -9, 0], [0, 4, 0, -9]),
        (
            {"cu_seqlens": [1, 1, 4, 4, 7], "h0": [10, 20, 30, 40]},
            [0, 42, -39, 4, 25, 56, -49, 0],
            [10, 4, 30, -49],
        ),
        (
            {"cu_seqlens": [1, 1, 4, 4, 7], "h0": [10, 20, 30, 40], "reverse": True},
            [0, 0, -1, 4, -25, -60, -33, 0],
            [10, 0, 30, -25],
        ),
        ({"cu_seqlens": [0, 4, 8], "mask": MASK, "reset": RESET}, [1, 4, 0, 4, 0, 0, 7, 15], [4, 15]),
        ({"cu_seqlens": [3]}, [0] * 8, []),
    ],
)
def test_segments_worked_by_hand(options, value, last):
    scan = oracle.linear_scan(GATES, INPUTS, **options)
    np.testing.assert_array_equal(scan.value, value)
    np.testing.assert_array_equal(scan.last, last)


def test_flags_broadcast_and_follow_the_axis():
    inputs = np.stack([INPUTS, 2 * np.array(INPUTS)], axis=1)  # time first
    scan = oracle.linear_scan(np.array(GATES)[:, None], inputs, axis=0, mask=MASK[:, None], reset=[False, True])
    np.testing.assert_array_equal(scan.value[:, 0], [1, 4, 4, 4, 4, 4, 3, 11])
    np.testing.assert_array_equal(scan.value[:, 1], [2, 4, 0, 8, 0, 0, 14, 16])
    packed = oracle.linear_scan(np.array(GATES)[:, None], inputs, [[6, 6], [7, 8]], axis=0, cu_seqlens=[0, 2, 5])
    np.testing.assert_array_equal(packed.value, [[4, 5], [10, 14], [-4, -2], [4, 8], [7, 14], [0, 0], [0, 0], [0, 0]])
    np.testing.assert_array_equal(packed.last, [[10, 14], [7, 14]])


@pytest.mark.parametrize("rubbish", [np.nan, np.inf, -np.inf])
def test_a_masked_step_reads_nothing_and_a_reset_no_gate_and_no_state(rubbish):
    gates, inputs = np.array(GATES), np.array(INPUTS, float)
    gates[~MASK] = inputs[~MASK] = rubbish
    scan = oracle.linear_scan(gates, inputs, mask=MASK)
    np.testing.assert_array_equal(scan.value, [1, 4, 4, 4, 4, 4, 3, 11])
    assert scan.bound.max() < 1e-4

    gates, inputs = np.array(GATES), np.array(INPUTS, float)
    gates[RESET] = inputs[4] = rubbish
    scan = oracle.linear_scan(gates, inputs, rubbish, reset=RESET)
    assert not np.isfinite(scan.value[[0, 1, 4]]).any()
    np.testing.assert_array_equal(scan.value[[2, 3, 5, 6, 7]], [3, 4, 6, 1, 9])
    assert scan.bound[[2, 3, 5, 6, 7]].max() < 1e-4
    assert scan.last == 9


def test_what_is_only_carried_is_exact():
    scan = oracle.linear_scan(0.3, np.ones(4), 0.7, mask=[False, False, True, False])
    np.testing.assert_array_equal(scan.bound[:2], 0)
    assert scan.bound[2] == scan.bound[3] == scan.last_bound > 0
    assert oracle.linear_scan(0.3, np.ones(4), 0.7, mask=False).last_bound == 0


# selective_scan: values


def layer(batch=2, length=12, channels=4, state=3, *, groups=None, constant="", is_complex=False, seed=0):
    """Inputs in layout "bld"; groups None leaves the axis out, `constant` names B, C or both."""
    r = rng(seed)

    def parameter(*shape):
        x = r.normal(size=shape)
        return x + 1j * r.normal(size=shape) if is_complex else x

    middle = () if groups is None else (groups,)
    return {
        "u": r.normal(size=(batch, length, channels)),
        "delta": r.normal(size=(batch, length, channels)),
        "A": -np.exp(r.normal(size=(channels, state))) + (1j * parameter(channels, state) if is_complex else 0),
        "B": parameter(*((channels, state) if "B" in constant else (batch, length, *middle, state))),
        "C": parameter(*((channels, state) if "C" in constant else (batch, length, *middle, state))),
        "D": r.normal(size=channels),
        "z": r.normal(size=(batch, length, channels)),
        "delta_bias": r.normal(size=channels),
        "delta_softplus": True,
    }


def double_sum(u, delta, A, B, C, D, z, delta_bias, delta_softplus, delta_limit=(-np.inf, np.inf)):
    """The same layer without a recurrence: all pairs of steps s <= t, gates by the sum of delta between."""
    batch, length, channels = u.shape
    delta = np.logaddexp(delta + delta_bias, 0) if delta_softplus else delta + delta_bias
    delta = np.clip(delta, *delta_limit)

    def spread(x):  # (batch, length, channels, state)
        if x.ndim == 2:
            return np.broadcast_to(x, (batch, length, *x.shape))
        x = x[:, :, None] if x.ndim == 3 else x
        return x[:, :, np.arange(channels) * x.shape[2] // channels]

    B, C = spread(B), spread(C)
    y = np.zeros((batch, length, channels), B.dtype)
    for t in range(length):
        for s in range(t + 1):
            gate = np.exp(delta[:, s + 1 : t + 1].sum(axis=1)[..., None] * A)
            y[:, t] += (C[:, t] * gate * (delta[:, s] * u[:, s])[..., None] * B[:, s]).sum(axis=-1)
    y = 2 * y.real if np.iscomplexobj(y) else y
    return (y + D * u) * z / (1 + np.exp(-z))


@pytest.mark.parametrize("groups", [None, 1, 2, 4])
@pytest.mark.parametrize("constant", ["", "B", "C", "BC"])
@pytest.mark.parametrize("is_complex", [False, True])
def test_selective_against_the_double_sum(groups, constant, is_complex):
    inputs = layer(groups=groups, constant=constant, is_complex=is_complex)
    scan = oracle.selective_scan(**inputs, eps=2.0**-53)
    np.testing.assert_allclose(scan.value, double_sum(**inputs), rtol=1e-11, atol=1e-12)
    limited = oracle.selective_scan(**inputs, delta_limit=(0.1, 0.7), eps=2.0**-53)
    np.testing.assert_allclose(limited.value, double_sum(**inputs, delta_limit=(0.1, 0.7)), rtol=1e-11, atol=1e-12)
    assert np.abs(limited.value - scan.value).max() > 0.1


def test_layout_bdl_and_reverse_are_index_maps():
    inputs = layer(groups=2)
    bld = oracle.selective_scan(**inputs)
    swapped = {**inputs, **{k: inputs[k].swapaxes(1, 2) for k in ("u", "delta", "z")}}
    swapped |= {k: np.moveaxis(inputs[k], 1, -1) for k in "BC"}
    bdl = oracle.selective_scan(**swapped, layout="bdl")
    np.testing.assert_array_equal(bdl.value, bld.value.swapaxes(1, 2))
    np.testing.assert_array_equal(bdl.bound, bld.bound.swapaxes(1, 2))
    np.testing.assert_array_equal(bdl.last, bld.last)

    one_group = {k: v[:, :, 0] if k in "BC" else v for k, v in inputs.items()}
    one_swapped = {**swapped, **{k: one_group[k].swapaxes(1, 2) for k in "BC"}}
    np.testing.assert_array_equal(
        oracle.selective_scan(**one_swapped, layout="bdl").value.swapaxes(1, 2),
        oracle.selective_scan(**one_group).value,
    )
    flipped = {k: v[:, ::-1] if k in ("u", "delta", "z", "B", "C") else v for k, v in inputs.items()}
    backward = oracle.selective_scan(**flipped, reverse=True)
    np.testing.assert_array_equal(backward.value, bld.value[:, ::-1])
    np.testing.assert_array_equal(backward.last, bld.last)


def test_selective_worked_by_hand():
    # One channel, gates 1/2 and 1/4 from A = log 2 and -delta; h = 3, then 3/4 + 2*5 = 10.75.
    scan = oracle.selective_scan(
        np.array([[[3.0], [5.0]]]),
        np.array([[[1.0], [2.0]]]),
        np.array([[-np.log(2.0)]]),
        np.array([[[1.0], [1.0]]]),
        np.array([[[2.0], [-1.0]]]),
        D=[10.0],
        h0=np.array([[[4.0]]]),
    )
    # h0 = 4 enters: h = 4/2 + 3 = 5, then 5/4 + 10 = 11.25.
    np.testing.assert_allclose(scan.value, [[[2 * 5 + 30], [-11.25 + 50]]], rtol=1e-15)
    np.testing.assert_allclose(scan.last, [[[11.25]]], rtol=1e-15)


# Gates 2^-delta from A = -log 2, delta [1, 2, 1, 1], u [3, 5, 6, 1], C [2, -1, 1, 1], D = 10 and h0 = 4: the inputs
# delta u are [3, 10, 6, 1].
@pytest.mark.parametrize(
    ("options", "h", "y"),
    [
        ({}, [5, 11.25, 11.625, 6.8125], [40, 38.75, 71.625, 16.8125]),
        ({"mask": [[1, 0, 1, 1]]}, [5, 5, 8.5, 5.25], [40, 0, 68.5, 15.25]),
        ({"mask": [[0, 1, 1, 0]], "h0": None}, [0, 10, 11, 11], [0, 40, 71, 0]),
        ({"mask": [[1, 0, 1, 1]], "reverse": True}, [6.75, 7.5, 7.5, 3], [43.5, 0, 67.5, 13]),
        ({"reset": [[0, 0, 1, 0]]}, [5, 11.25, 6, 4], [40, 38.75, 66, 14]),
        ({"reset": [[1, 0, 1, 0]], "reverse": True}, [3, 11.5, 6, 3], [36, 38.5, 66, 13]),
        ({"reset": [[0, 1, 0, 0]], "mask": [[1, 0, 1, 1]]}, [5, 0, 6, 4], [40, 0, 66, 14]),
        ({"cu_seqlens": [0, 1, 3], "h0": [4, 8]}, [[5], [12, 12]], [40, 38, 72, 0]),
        ({"cu_seqlens": [1, 1, 3, 4], "h0": [4, 8, 16], "reverse": True}, [[4], [12.5, 10], [9]], [0, 37.5, 70, 19]),
        ({"cu_seqlens": [1, 3, 3], "h0": None}, [[10, 11], [0]], [0, 40, 71, 0]),
    ],
)
def test_selective_segments_worked_by_hand(options, h, y):
    options = {"h0": [4.0], **options}
    if options["h0"] is not None:
        options["h0"] = np.reshape(options["h0"], (-1, 1, 1))
    column = np.reshape([[3.0, 5.0, 6.0, 1.0], [1.0, 2.0, 1.0, 1.0], [2.0, -1.0, 1.0, 1.0]], (3, 1, 4, 1))
    u, delta, C = column
    scan = oracle.selective_scan(u, delta, [[-np.log(2.0)]], [[1.0]], C, [10.0], **options)
    np.testing.assert_allclose(scan.value[0, :, 0], y, rtol=1e-15)
    end = 0 if options.get("reverse") else -1
    lasts = [each[end] for each in h] if "cu_seqlens" in options else [h[end]]
    np.testing.assert_allclose(scan.last[:, 0, 0], lasts, rtol=1e-15)


def test_selective_reads_nothing_of_a_masked_step_and_no_state_at_a_reset():
    mask = np.array([[1, 0, 1, 1, 0, 1], [0, 1, 1, 0, 1, 1]], bool)
    reset = np.array([[0, 0, 0, 0, 0, 1], [0, 0, 1, 0, 0, 0]], bool)
    inputs = layer(length=6)
    clean = oracle.selective_scan(**inputs, mask=mask, reset=reset)
    for name in ("u", "delta", "B", "C", "z"):
        inputs[name][~mask] = np.nan
    inputs["u"][0, 2] = inputs["u"][1, 1] = np.nan  # before the resets
    scan = oracle.selective_scan(**inputs, mask=mask, reset=reset)
    hit = np.zeros((2, 6), bool)
    hit[0, 2:4] = hit[1, 1] = True
    assert np.isnan(scan.value[hit]).all()
    np.testing.assert_array_equal(scan.value[~hit], clean.value[~hit])
    np.testing.assert_array_equal(scan.bound[~hit], clean.bound[~hit])
    np.testing.assert_array_equal(scan.value[~mask], 0)
    np.testing.assert_array_equal(scan.bound[~mask], 0)
    np.testing.assert_array_equal(scan.last, clean.last)
    assert np.isfinite(scan.last_bound).all()


@pytest.mark.parametrize("offsets", [[0, 0, 5, 5, 9], [2, 2, 7, 7, 11]])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("with_h0", [False, True])
def test_packed_is_one_by_one(offsets, reverse, with_h0):
    length, n = 12, len(offsets) - 1
    spans = list(starmap(slice, pairwise(offsets)))
    mask, reset = rng(7).random(length) < 0.7, rng(8).random(length) < 0.2
    a, b = rng(9).normal(size=(2, 3, length))
    h0 = rng(10).normal(size=(n, 3)) if with_h0 else None
    packed = oracle.linear_scan(a, b, h0, reverse=reverse, mask=mask, reset=reset, cu_seqlens=offsets)
    inputs, layered = layer(batch=1, length=length, groups=2), rng(11).normal(size=(n, 4, 3)) if with_h0 else None
    flags = {"mask": mask[None], "reset": reset[None]}
    layers = oracle.selective_scan(**inputs, **flags, h0=layered, reverse=reverse, cu_seqlens=offsets)
    for s, span in enumerate(spans):
        one = oracle.linear_scan(
            a[:, span], b[:, span], h0[s] if with_h0 else None, reverse=reverse, mask=mask[span], reset=reset[span]
        )
        np.testing.assert_array_equal(packed.value[:, span], one.value)
        np.testing.assert_array_equal(packed.last[s], one.last)
        one = oracle.selective_scan(
            **{name: x[:, span] if name in ("u", "delta", "B", "C", "z") else x for name, x in inputs.items()},
            **{name: x[:, span] for name, x in flags.items()},
            h0=layered[s : s + 1] if with_h0 else None,
            reverse=reverse,
        )
        np.testing.assert_array_equal(layers.value[:, span], one.value)
        np.testing.assert_array_equal(layers.last[s], one.last[0])
    outside = np.ones(length, bool)
    outside[offsets[0] : offsets[-1]] = False
    for scan in (packed, layers):
        for x in (scan.value, scan.bound):
            np.testing.assert_array_equal(x[:, outside], 0)
        np.testing.assert_array_equal(scan.last_bound[[0, 2]], 0)


def test_fft_convolution_only_when_nothing_selects():
    length = 64
    r = rng()
    A, B, C = -np.exp(r.normal(size=(2, 3))), r.normal(size=(2, 3)), r.normal(size=(2, 3))
    u, delta = r.normal(size=(1, length, 2)), np.full((1, length, 2), 0.1)
    kernel = (C * B * 0.1 * np.exp(0.1 * A * np.arange(length)[:, None, None])).sum(axis=-1)
    spectrum = np.fft.rfft(kernel, 2 * length, axis=0) * np.fft.rfft(u[0], 2 * length, axis=0)
    convolved = np.fft.irfft(spectrum, axis=0)[:length]
    np.testing.assert_allclose(oracle.selective_scan(u, delta, A, B, C).value[0], convolved, atol=1e-13)
    delta[0, 20:] *= 2
    selective = oracle.selective_scan(u, delta, A, B, C).value[0]
    np.testing.assert_allclose(selective[:20], convolved[:20], atol=1e-13)
    assert np.abs(selective - convolved)[20:].max() > 0.05


def test_no_steps_leave_h0_selective():
    h0 = np.arange(6.0).reshape(1, 2, 3)
    empty = np.zeros((1, 0, 2))
    scan = oracle.selective_scan(empty, empty, -np.ones((2, 3)), np.ones((2, 3)), np.ones((2, 3)), h0=h0)
    assert scan.value.shape == (1, 0, 2)
    np.testing.assert_array_equal(scan.last, h0)


def test_nan_and_infinity_pass_through():
    one = np.ones((1, 3, 1))
    u = np.array([1.0, np.nan, 1.0]).reshape(1, 3, 1)
    scan = oracle.selective_scan(u, one, -one[0, :1], one, one)
    np.testing.assert_array_equal(np.isnan(scan.value[0, :, 0]), [False, True, True])
    u[0, 1] = np.inf
    np.testing.assert_array_equal(
        np.isinf(oracle.selective_scan(u, one, -one[0, :1], one, one).value[0, :, 0]), [False, True, True]
    )
    delta = np.array([np.nan, np.inf, 1.0]).reshape(1, 3, 1)
    scan = oracle.selective_scan(
        one, delta, -one[0, :1], one, one, delta_softplus=True, delta_limit=(0.0, 2.0), h0=one[:, :1]
    )
    np.testing.assert_array_equal(np.isnan(scan.value[0, :, 0]), [True, True, True])
    delta = np.array([np.inf, -np.inf]).reshape(1, 2, 1)
    scan = oracle.selective_scan(one[:, 1:], delta, -one[0, :1], one, one, delta_bias=[0.0], delta_limit=(0.5, 2.0))
    assert np.isfinite(scan.bound).all()
    np.testing.assert_allclose(scan.value[0, :, 0], [2, 2 * np.exp(-0.5) + 0.5])


# linear_scan_vjp. The states are those of the gates and inputs above.

STATES = [1, 4, -1, 4, 7, 20, -13, -5]


@pytest.mark.parametrize(
    ("options", "of_b", "of_a", "of_h0"),
    [
        # From the last step on: 1, then 1 * 1 + 1, -1 * 2 + 1, 2 * -1 + 1, 1/2 * -1 + 1, 0 * 1/2 + 1 and so on.
        ({"grad_h": 1}, [1, 0, 1, 0.5, -1, -1, 2, 1], [0, 0, 4, -0.5, -4, -7, 40, -13], None),
        ({"grad_h": 1, "h0": 6.0}, [1, 0, 1, 0.5, -1, -1, 2, 1], [6, 0, 4, -0.5, -4, -7, 40, -13], 0.5),
        ({"grad_last_state": 3, "h0": 6.0}, [0, 0, 0, -3, -6, -3, 3, 3], [0, 0, 0, 3, -24, -21, 60, -39], 0),
        ({"grad_h": 1, "grad_last_state": -1}, [1, 0, 1, 1.5, 1, 0, 1, 0], [0, 0, 4, -1.5, 4, 0, 20, 0], None),
        (
            {"grad_h": 1, "h0": 6.0, "reverse": True},
            [1, 1.5, 4, -3, 1, 1.5, 4, -3],
            [4, -1.5, 16, -21, 20, -19.5, -20, -18],
            -3,
        ),
        ({"grad_h": 1, "mask": MASK, "h0": 6.0}, [5, 2, 0, 1, 0, 0, 2, 1], [30, 2, 0, -1, 0, 0, 40, -13], 2.5),
        ({"grad_h": 1, "reset": RESET, "h0": 6.0}, [3, 1, 1, 1.5, 1, -1, 2, 1], [18, 1, 0, -1.5, 4, 0, 40, -13], 1.5),
        ({"grad_h": 1, "mask": MASK, "reset": RESET}, [3, 1, 0, 2, 0, 0, 2, 1], [0, 1, 0, -2, 0, 0, 40, -13], None),
        ({"grad_h": 1, "reset": True, "h0": 6.0}, [1] * 8, [0] * 8, 0),
        ({"grad_h": 1, "mask": False, "h0": 6.0, "grad_last_state": 2}, [0] * 8, [0] * 8, 10),
        (
            {"grad_h": 1, "cu_seqlens": [1, 1, 4, 7], "h0": [5, 6, 7], "grad_last_state": [10, 20, 30]},
            [0, 0, 1, 21, -59, -30, 31, 0],
            [0, 0, 4, -21, -413, -210, 620, 0],
            [10, 0, -29.5],
        ),
    ],
)
def test_linear_gradients_worked_by_hand(options, of_b, of_a, of_h0):
    given = {name: np.broadcast_to(x, 8) if name == "grad_h" else x for name, x in options.items()}
    gradients = oracle.linear_scan_vjp(GATES, STATES, **given)
    np.testing.assert_array_equal(gradients["b"], of_b)
    np.testing.assert_array_equal(gradients["a"], of_a)
    assert set(gradients) == {"a", "b"} | ({"h0"} if "h0" in options else set())
    np.testing.assert_array_equal(gradients.get("h0"), of_h0)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("reverse", [False, True])
def test_linear_gradient_is_the_transposed_matrix(axis, reverse):
    # h = m b, so that b has m^T grad_h; the matrix of integers by unit inputs.
    a, b, received = (rng(seed).integers(-2, 3, (6, 6)).astype(float) for seed in (1, 2, 3))
    h = oracle.linear_scan(a, b, axis=axis, reverse=reverse).value
    gradients = oracle.linear_scan_vjp(a, h, received, axis=axis, reverse=reverse)
    for unit in np.ndindex(6, 6):
        one = np.zeros((6, 6))
        one[unit] = 1
        column = oracle.linear_scan(a, one, axis=axis, reverse=reverse).value
        assert gradients["b"][unit] == (column * received).sum()
    before = np.roll(h, -1 if reverse else 1, axis)
    np.moveaxis(before, axis, 0)[-1 if reverse else 0] = 0
    np.testing.assert_array_equal(gradients["a"], gradients["b"] * before)


def test_a_gate_that_broadcasts_receives_the_sum():
    h, received = (rng(seed).integers(-3, 4, (2, 3, 4)).astype(float) for seed in (1, 2))
    for shape in ((), (4,), (3, 1), (2, 1, 4), (1, 1, 1)):
        a = rng(3).integers(-1, 2, shape).astype(float)
        full = oracle.linear_scan_vjp(np.broadcast_to(a, h.shape), h, received)["a"]
        of_a = oracle.linear_scan_vjp(a, h, received)["a"]
        assert of_a.shape == shape
        wide = full.sum(axis=tuple(d for d in range(3) if np.broadcast_to(a, h.shape).strides[d] == 0))
        np.testing.assert_array_equal(of_a.ravel(), wide.ravel())


def differences(loss, x, step=1e-6):
    """The gradient of a real loss at x by central differences, of both parts of a complex x."""
    gradient = np.zeros_like(x)
    for at in np.ndindex(x.shape):
        for unit in (1, 1j) if x.dtype.kind == "c" else (1,):
            moved = [x.copy(), x.copy()]
            moved[0][at] += step * unit
            moved[1][at] -= step * unit
            gradient[at] += unit * (loss(moved[0]) - loss(moved[1])) / (2 * step)
    return gradient


def against_differences(scan, vjp, inputs, received, received_last, fixed):
    """All gradients of a weighted sum of the outputs and last states."""

    def loss(name, x):
        result = scan(**{**inputs, name: x}, **fixed)
        return sum((np.conj(w) * x).sum().real for w, x in ((received, result.value), (received_last, result.last)))

    gradients = vjp(inputs)
    assert set(gradients) == {name for name, x in inputs.items() if x is not None}
    for name, gradient in gradients.items():
        assert gradient.shape == inputs[name].shape
        expected = differences(lambda x, name=name: loss(name, x), inputs[name])
        np.testing.assert_allclose(gradient, expected, rtol=1e-6, atol=1e-8 * (1 + abs(loss(name, inputs[name]))))


@pytest.mark.parametrize("cu_seqlens", [None, [1, 1, 4, 8, 8]])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("is_complex", [False, True])
def test_linear_gradients_against_differences(is_complex, reverse, cu_seqlens):
    r = rng(5)

    def draw(*shape):
        x = r.normal(size=shape)
        return x + 1j * r.normal(size=shape) if is_complex else x

    lead = () if cu_seqlens is None else (4,)
    inputs = {"a": draw(1, 9, 2), "b": draw(2, 9, 2), "h0": draw(*lead, 2, 2)}
    received, last = draw(2, 9, 2), draw(*lead, 2, 2)
    fixed = {"axis": 1, "reverse": reverse, "cu_seqlens": cu_seqlens}
    fixed |= {"mask": r.random((2, 9, 1)) < 0.8, "reset": r.random((1, 9, 2)) < 0.2}

    def vjp(inputs):
        h = oracle.linear_scan(**inputs, **fixed).value
        return oracle.linear_scan_vjp(inputs["a"], h, received, inputs["h0"], grad_last_state=last, **fixed)

    against_differences(oracle.linear_scan, vjp, inputs, received, last, fixed)


@pytest.mark.parametrize("rubbish", [np.nan, np.inf])
def test_linear_gradients_of_steps_that_are_not_read(rubbish):
    gates, h, received = np.array(GATES), np.array(STATES, float), np.ones(8)
    clean = oracle.linear_scan_vjp(gates, h, received, 6.0, mask=MASK, reset=RESET)
    gates[~MASK | RESET] = rubbish
    dirty = oracle.linear_scan_vjp(gates, h, received, 6.0, mask=MASK, reset=RESET)
    for name, x in clean.items():
        np.testing.assert_array_equal(dirty[name], x)
    # What comes after a reset, or in another sequence or outside, is in no other gradient.
    received[5:] = h[5:] = rubbish
    for marks, h0 in (
        ({"reset": RESET}, 6.0),
        ({"cu_seqlens": [0, 5]}, [6.0]),
        ({"cu_seqlens": [0, 5, 8]}, None),
        ({"cu_seqlens": [0, 5, 8]}, [6.0, 7.0]),
    ):
        behind = oracle.linear_scan_vjp(GATES, h, received, h0, **marks)
        assert np.isfinite(behind["a"][:5]).all()
        assert np.isfinite(behind["b"][:5]).all()
        assert np.isfinite(np.ravel(behind.get("h0", 0.0))[0])
        assert (behind["a"][5] == 0) == (h0 != [6.0, 7.0])


# selective_scan_vjp


def test_the_slope_of_silu_where_a_sigmoid_is_nearly_1():
    # 1 + (z - 1) exp(-z), which is 18 roundings from 1.
    one, z = np.ones((1, 1, 1)), 36.7
    none = np.zeros((1, 0))
    couple = np.zeros((1, 1, 0))
    gradients = oracle.selective_scan_vjp(one, one, none, couple, couple, np.ones(1), z * one, grad_out=one)
    assert abs(gradients["z"].item() - 1 - (z - 1) * np.exp(-z)) < 3e-16


def test_selective_gradients_worked_by_hand():
    # The two steps above: gates 1/2 and 1/4, states 4, 5, 11.25. g = [2 + 1/4, -1 + 2], p = [1.125, 0.25].
    u, delta, C = np.reshape([[3.0, 5.0], [1.0, 2.0], [2.0, -1.0]], (3, 1, 2, 1))
    log2 = np.log(2.0)
    gradients = oracle.selective_scan_vjp(
        u, delta, [[-log2]], np.ones((1, 2, 1)), C, [10.0], h0=[[[4.0]]], grad_out=np.ones((1, 2, 1)),
        grad_last_state=[[[2.0]]],
    )  # fmt: skip
    expected = {
        "u": [2.25 + 10, 2 + 10], "delta": [-log2 * 4.5 + 2.25 * 3, -log2 * 1.25 + 5], "A": [4.5 + 2 * 1.25],
        "B": [2.25 * 3, 10], "C": [5, 11.25], "D": [8], "h0": [1.125],
    }  # fmt: skip
    assert set(gradients) == set(expected)
    for name, x in expected.items():
        np.testing.assert_allclose(gradients[name].ravel(), x, rtol=1e-14)


OPTIONS = [
    {}, {"reverse": True}, {"layout": "bdl", "groups": 2}, {"delta_limit": (0.3, 1.0)}, {"constant": "B", "groups": 1},
    {"is_complex": True}, {"constant": "C", "is_complex": True, "reverse": True}, {"constant": "BC", "marks": True},
    {"marks": True, "layout": "bdl"}, {"marks": True, "is_complex": True, "groups": 2},
    {"cu_seqlens": [0, 2, 2, 5], "reverse": True}, {"cu_seqlens": [1, 3, 5], "marks": True, "is_complex": True},
    {"without": ("D", "z", "delta_bias")}, {"without": ("z", "h0"), "marks": True}, {"delta_softplus": False},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS)
def test_selective_gradients_against_differences(options):
    options = dict(options)
    cu_seqlens, marks, layout = (options.pop(k, x) for k, x in (("cu_seqlens", None), ("marks", 0), ("layout", "bld")))
    kinds = {k: options.pop(k) for k in ("groups", "constant", "is_complex") if k in options}
    without = options.pop("without", ())
    inputs = layer(2 if cu_seqlens is None else 1, 5, 2, 2, **kinds, seed=len(str(options)))
    softplus = options.pop("delta_softplus", inputs.pop("delta_softplus"))
    r = rng(6)
    if not softplus:
        inputs |= {name: np.abs(inputs[name]) for name in ("delta", "delta_bias")}

    def states(n):
        x = r.normal(size=(n, 2, 2))
        return x + 1j * r.normal(size=x.shape) if kinds.get("is_complex") else x

    sequences = 2 if cu_seqlens is None else len(cu_seqlens) - 1
    inputs["h0"], last = states(sequences), states(sequences)
    inputs |= dict.fromkeys(without)
    flags = r.random((2, *inputs["u"].shape[:2])) < [[[0.8]], [[0.2]]]
    received = r.normal(size=inputs["u"].shape)
    if layout == "bdl":
        received = received.swapaxes(1, 2)
        inputs |= {k: np.moveaxis(x, 1, -1) for k, x in inputs.items() if k in ("u", "delta", "z", "B", "C")}
    fixed = {**options, "delta_softplus": softplus, "cu_seqlens": cu_seqlens, "layout": layout}
    if marks:
        fixed |= {"mask": flags[0], "reset": flags[1]}

    def vjp(inputs):
        return oracle.selective_scan_vjp(**inputs, **fixed, grad_out=received, grad_last_state=last)

    against_differences(oracle.selective_scan, vjp, inputs, received, last, fixed)


@pytest.mark.parametrize("is_complex", [False, True])
def test_gradients_of_the_last_state_and_of_y_add_up(is_complex):
    inputs = {**layer(is_complex=is_complex), "mask": rng(1).random((2, 12)) < 0.8}
    received, last = rng(2).normal(size=(2, 12, 4)), rng(3).normal(size=(2, 4, 3))
    both = oracle.selective_scan_vjp(**inputs, grad_out=received, grad_last_state=last)
    of_y = oracle.selective_scan_vjp(**inputs, grad_out=received)
    of_last = oracle.selective_scan_vjp(**inputs, grad_last_state=last)
    for name, x in both.items():
        np.testing.assert_allclose(of_y[name] + of_last[name], x, rtol=1e-12, atol=1e-13)
    # y alone has C, D and z in it.
    for name in ("C", "D", "z"):
        np.testing.assert_array_equal(of_last[name], 0)


def test_gradient_of_delta_passes_inside_its_limits_only():
    one, delta = np.ones((1, 5, 1)), np.array([0.5, 1.0, 1.5, 2.0, 2.5]).reshape(1, 5, 1)
    gradients = oracle.selective_scan_vjp(
        one, delta, [[-1.0]], one, one, delta_bias=[0.0], grad_out=one, delta_limit=(1, 2)
    )
    np.testing.assert_array_equal(gradients["delta"].ravel() != 0, [False, True, True, True, False])
    assert gradients["delta_bias"] == gradients["delta"].sum()
    delta[0, 2] = np.nan
    for limit, passes in (((1, 2), False), (None, True)):
        gradients = oracle.selective_scan_vjp(one, delta, [[-1.0]], one, one, grad_out=one, delta_limit=limit)
        assert np.isnan(gradients["delta"][0, 2, 0]) == passes


IN_TIME = ("u", "delta", "B", "C", "z")


@pytest.mark.parametrize("constant", ["", "BC"])
def test_selective_gradients_of_masked_steps_are_those_of_zeros(constant):
    mask, reset = rng(1).random((2, 12)) < 0.7, rng(2).random((2, 12)) < 0.2
    inputs = layer(constant=constant)
    received, last = rng(3).normal(size=(2, 12, 4)), rng(4).normal(size=(2, 4, 3))
    gradients = []
    for value in (0.0, np.nan):
        given = {k: x.copy() for k, x in (inputs | {"grad_out": received}).items() if k != "delta_softplus"}
        for name in (*IN_TIME, "grad_out"):
            if given[name].ndim == 3:
                given[name][~mask] = value
        gradients.append(
            oracle.selective_scan_vjp(**given, delta_softplus=True, grad_last_state=last, mask=mask, reset=reset)
        )
    for name, x in gradients[0].items():
        np.testing.assert_array_equal(gradients[1][name], x)
        assert np.isfinite(x).all()
        if name in IN_TIME and x.ndim == 3:
            np.testing.assert_array_equal(x[~mask], 0)


@pytest.mark.parametrize("reverse", [False, True])
def test_selective_gradients_stay_in_their_sequence(reverse):
    inputs = layer(batch=1)
    options = {"cu_seqlens": [1, 4, 4, 9], "reverse": reverse, "h0": rng(1).normal(size=(3, 4, 3))}
    received = np.zeros((1, 12, 4))
    received[0, 4:9] = 1
    gradients = oracle.selective_scan_vjp(**inputs, **options, grad_out=received)
    for name in IN_TIME:
        np.testing.assert_array_equal(gradients[name][0, [0, 1, 2, 3, 9, 10, 11]], 0)
    np.testing.assert_array_equal(gradients["h0"][:2], 0)
    assert (gradients["h0"][2] != 0).all()
    # An empty sequence hands on what it returns.
    last = rng(2).normal(size=(3, 4, 3))
    np.testing.assert_array_equal(
        oracle.selective_scan_vjp(**inputs, **options, grad_last_state=last)["h0"][1], last[1]
    )
    # NaN in one, and outside.
    clean = oracle.selective_scan_vjp(**inputs, **options, grad_out=np.ones((1, 12, 4)))
    for name in IN_TIME:
        inputs[name][0, [0, 6, 9, 10, 11]] = np.nan
    gradients = oracle.selective_scan_vjp(**inputs, **options, grad_out=np.ones((1, 12, 4)))
    for name in IN_TIME:
        np.testing.assert_array_equal(gradients[name][0, 1:4], clean[name][0, 1:4])
        np.testing.assert_array_equal(gradients[name][0, [0, 9, 10, 11]], 0)
        assert np.isnan(gradients[name][0, 4:9]).any()
    np.testing.assert_array_equal(gradients["h0"][:2], clean["h0"][:2])


def test_no_steps_hand_on_the_gradient_of_the_last_state():
    last = np.arange(6.0).reshape(1, 2, 3)
    empty = np.zeros((1, 0, 2))
    gradients = oracle.selective_scan_vjp(
        empty, empty, -np.ones((2, 3)), np.ones((2, 3)), np.ones((1, 0, 3)), h0=last, grad_last_state=last
    )
    np.testing.assert_array_equal(gradients["h0"], last)
    np.testing.assert_array_equal(gradients["A"], np.zeros((2, 3)))
    assert gradients["C"].shape == (1, 0, 3)
    gradients = oracle.linear_scan_vjp(np.zeros((2, 0)), np.zeros((2, 0)), None, [1, 2], grad_last_state=[3, 4])
    np.testing.assert_array_equal(gradients["h0"], [3, 4])


@pytest.mark.parametrize("grad_out", [None, 2 * np.ones((1, 1, 2))])
@pytest.mark.parametrize("delta", [1.0, np.nan, np.inf])
def test_without_states_delta_receives_nothing(grad_out, delta):
    u, none = np.array([[[np.nan, 3]]]), np.zeros((2, 0))
    gradients = oracle.selective_scan_vjp(
        u, delta * np.ones((1, 1, 2)), none, none, none, [5, 7], delta_bias=[1, 1], delta_softplus=True,
        grad_out=grad_out, grad_last_state=none[None],
    )  # fmt: skip
    dy = 0 if grad_out is None else 2
    np.testing.assert_array_equal(gradients["u"], [[[5 * dy, 7 * dy]]])
    np.testing.assert_array_equal(gradients["D"], [np.nan, 3 * dy])  # 0 * NaN too: absent gradients are zeros
    for name in ("delta", "delta_bias"):
        np.testing.assert_array_equal(gradients[name], np.zeros_like(gradients[name]))


# The bound holds


def serial(a, b, h0=None, state=None):
    """h = a h + b with two roundings a step; the state is kept in the type `state`, b's if None."""
    out = np.empty_like(b)
    h = None if h0 is None else b.dtype.type(h0)
    for t in range(len(b)):
        h = b[t] if h is None else a[t] * h + b[t]
        if state is not None:
            h = h.astype(state).astype(b.dtype)
        out[t] = h
    return out


def hillis_steele(a, b, *, swapped=False):
    """log2(n) rounds over all pairs, each combined with the one `distance` before it."""
    a, b = a.copy(), b.copy()
    distance = 1
    while distance < len(b):
        a1, b1, a2, b2 = a[:-distance], b[:-distance], a[distance:], b[distance:]
        combined = a1 * b2 + b1 if swapped else a2 * b1 + b2
        b[distance:], a[distance:] = combined, a1 * a2
        distance *= 2
    return b


def random_tree(a, b, r):
    """One (gate, state) of the whole range, split anywhere."""
    if len(b) == 1:
        return a[0], b[0]
    cut = r.integers(1, len(b))
    (a1, b1), (a2, b2) = random_tree(a[:cut], b[:cut], r), random_tree(a[cut:], b[cut:], r)
    return a1 * a2, a2 * b1 + b2


def test_bound_covers_slow_gates_where_a_sum_of_terms_does_not():
    n = 100_000
    a, b = np.full(n, 0.9999, F32), np.ones(n, F32)
    scan = oracle.linear_scan(a, b)
    error = np.abs(serial(a, b) - scan.value)
    terms = scan.value  # all positive
    assert (error / (2 * 2.0**-24 * terms)).max() > 1000
    assert accepted(serial(a, b), scan)
    assert accepted(hillis_steele(a, b), scan)


@pytest.mark.parametrize("low", [-1.0, 0.5, 0.999])
@pytest.mark.parametrize("kind", [F32, np.complex64, np.float64])
def test_bound_covers_any_association(low, kind):
    r = rng(3)
    n, eps = 300, 2.0**-53 if kind is np.float64 else 2.0**-24
    a, b = r.uniform(low, 1, n).astype(kind), r.normal(size=n).astype(kind)
    if kind is np.complex64:
        a, b = a * np.exp(1j * r.normal(size=n)).astype(kind), b * kind(1 + 2j)
    scan = oracle.linear_scan(a, b, eps=eps)
    assert accepted(serial(a, b), scan)
    assert accepted(hillis_steele(a, b), scan)
    trees = np.array([random_tree(a, b, r)[1] for _ in range(50)], kind)
    oracle.assert_scan_close(trees, np.full(50, scan.value[-1]), np.full(50, scan.bound[-1]))


def test_bound_covers_a_flushed_product_of_gates():
    # As a product of gates, 1e-30 * 1e-30 is 0 in float32, and 1e30 behind it is gone.
    a, b = np.array([1e-30, 1e-30, 1.0], F32), np.array([0.0, 0.0, 1.0], F32)
    scan = oracle.linear_scan(a, b, 1e38)
    with np.errstate(under="ignore"):
        product = a[0] * a[1]
    assert product == 0
    assert scan.value[1] > 1e-23
    assert accepted(np.array([a[0] * F32(1e38), 0, 1], F32), scan)
    assert not accepted(np.array([0, 0, 1], F32), scan)


def softplus_log1p(x):
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def softplus_naive(x):
    return np.log(np.exp(x) + F32(1))


def float32_layer(softplus, delta, bias):
    """State 1, channel 1, in float32 step by step."""
    step = softplus(delta + bias)
    return step, serial(np.exp(-step), step)


@pytest.mark.parametrize("center", [-16.0, -5.0, 0.0, 5.0])
def test_bound_covers_softplus_but_not_its_naive_form(center):
    r = rng(4)
    delta = r.normal(size=400).astype(F32)
    bias = F32(center)
    one = np.ones((1, 400, 1))
    scan = oracle.selective_scan(one, delta[None, :, None], [[-1.0]], one, one, delta_bias=[bias], delta_softplus=True)
    _, good = float32_layer(softplus_log1p, delta, bias)
    assert accepted(good[None, :, None], scan)
    if center == -16:
        _, bad = float32_layer(softplus_naive, delta, bias)
        assert not accepted(bad[None, :, None], scan)


def test_bound_follows_a_rounding_through_softplus():
    # At x = -16 one rounding of delta + bias is 16 roundings of softplus.
    def relative_bound(**options):
        one = np.ones((1, 1, 1))
        scan = oracle.selective_scan(one, -15 * one, -one[0], one, one, delta_softplus=True, **options)
        return (scan.bound / scan.value).item() * 2**24

    assert 15 < relative_bound(delta_bias=[-1.0]) - relative_bound() < 18


def test_bound_of_limited_delta_is_that_of_the_limit():
    one = np.ones((1, 1, 1))
    inside = oracle.selective_scan(one, 5 * one, -one[0], one, one, delta_bias=[95.0], delta_limit=(0.0, 1e3))
    outside = oracle.selective_scan(one, 5 * one, -one[0], one, one, delta_bias=[95.0], delta_limit=(0.0, 1e-3))
    assert outside.value == 1e-3
    np.testing.assert_allclose(outside.bound / outside.value, inside.bound / inside.value, rtol=1e-4)


# The bound is not vacuous


@pytest.fixture(scope="module", params=[0.5, 0.9, 0.99])
def ordinary(request):
    r = rng(5)
    a = r.uniform(request.param, 1, 1000).astype(F32)
    b = r.normal(size=1000).astype(F32)
    return a, b, oracle.linear_scan(a, b)


def test_right_float32_is_accepted(ordinary):
    a, b, scan = ordinary
    assert accepted(serial(a, b), scan)
    assert accepted(hillis_steele(a, b), scan)


def test_mistakes_are_rejected(ordinary):
    a, b, scan = ordinary
    good = serial(a, b)
    assert not accepted(hillis_steele(a, b, swapped=True), scan)
    assert not accepted(serial(np.roll(a, 1), b), scan)
    assert not accepted(serial(a, b, h0=1e-4), scan)
    assert not accepted(good[::-1], scan)
    assert not accepted(serial(a.astype(ml_dtypes.bfloat16).astype(F32), b), scan)
    assert not accepted(serial(a, b, state=ml_dtypes.bfloat16), scan)


def test_bound_is_a_few_roundings_where_gates_decay():
    scan = oracle.linear_scan(np.full(1000, 0.5), np.ones(1000))
    # Terms 2^-k with 2 (k + 1) roundings, and 2 * 10 for the tree: 8 + 20 * 2.
    np.testing.assert_allclose(scan.bound[-1], 48 * 2.0**-24, rtol=1e-3)


# One step from h0 = 1 or from u = 1, all values 1 but for the gate. In eps: the state has c = 2 and
# later_operand = 2; the gate 4 + 4 |delta A| + |delta A| eps_delta; b = delta B u 2 + eps_delta; C h has 2.
@pytest.mark.parametrize(
    ("options", "roundings"),
    [
        ({"h0": 1.0}, 4 + 4 + (2 + 2) + 2),
        ({"h0": 1.0, "delta": 3.0}, 4 + 3 * 4 + (2 + 2) + 2),
        ({"h0": 1.0, "delta": 2.0, "delta_bias": [1.0]}, 4 + 3 * (4 + 1) + (2 + 2) + 2),
        ({"h0": 1.0, "z": 1.0}, 4 + 4 + (2 + 2) + 2 + (4 + 4 + 3)),
        ({"h0": 1.0, "A": -1.0 + 0.0j}, 9 + 4 + (1 + 5**0.5 + 2) + 3),
        ({"h0": 1.0, "A": -1.0 + 4.0j}, 9 + 4 * 17**0.5 + (1 + 5**0.5 + 2) + 3),
        ({"u": 1.0}, 2 + (2 + 2) + 2),
        ({"u": 1.0, "h0": 0.0}, 2 + (2 + 2) + 2),
        ({"u": 1.0, "delta_softplus": True}, (8 + 1) + 2 + (2 + 2) + 2),
        ({"u": 1.0, "D": [1.0]}, (2 + (2 + 2) + 2 * 2) / 2),
        ({"u": 1.0, "B": 1.0, "state": 5}, 2 + (2 + 2) + 6),
    ],
)
@pytest.mark.parametrize("eps", [2.0**-24, 2.0**-53])
def test_bound_counts_roundings(options, roundings, eps):
    options = dict(options)
    states = options.pop("state", 1)
    ones = np.ones((1, 1, 1))
    wide = np.ones((1, 1, states))
    if "h0" in options:
        options["h0"] *= wide
    scan = oracle.selective_scan(
        options.pop("u", 0.0) * ones,
        options.pop("delta", 1.0) * ones,
        options.pop("A", -1.0) * wide[0],
        options.pop("B", 1.0) * wide,
        wide,
        z=options.pop("z") * ones if "z" in options else None,
        **options,
        eps=eps,
    )
    # A complex y is 2 Re: what its bound is relative to is twice the modulus of the state.
    size = abs(scan.value.item()) if np.isrealobj(scan.last) else 2 * abs(scan.last.item())
    np.testing.assert_allclose(scan.bound.item() / size, roundings * (eps + 2.0**-53), rtol=1e-4)


def test_bound_covers_gates_that_are_all_off_the_same_way():
    one = np.ones((1, 500, 1))
    scan = oracle.selective_scan(0 * one, 0.01 * one, [[-1.0]], one, one, h0=one[:, :1])
    gates = np.exp(-0.01) * (1 + 4 * 2.0**-24)
    assert accepted(gates ** np.arange(1, 501)[None, :, None], scan)
    gates = np.exp(-0.01) * (1 + 8 * 2.0**-24)
    assert not accepted(gates ** np.arange(1, 501)[None, :, None], scan)


def test_bound_covers_one_gate_for_many_steps_if_their_sum_keeps_what_is_rounded_off():
    delta, A, n = F32(0.1), np.complex64(-1e-3 + 300j), 500
    one = np.ones((1, n, 1))
    scan = oracle.selective_scan(0 * one, delta * one, [[A]], one, one, h0=one[:, :1])
    plain = kept = rest = F32(0)
    for _ in range(n):
        plain += delta
        after = kept + delta
        rest += delta - (after - kept)
        kept = after

    def covered(total):
        error = np.abs(np.exp(A * np.float64(total)) - scan.last)
        return (error <= scan.last_bound).all()

    assert covered(kept + rest)
    assert not covered(plain)


# assert_scan_close


@pytest.mark.parametrize(
    ("dtype", "half_ulp"),
    [(np.float16, 2.0**-11), (ml_dtypes.bfloat16, 2.0**-8), (F32, 2.0**-24), (np.float64, 2.0**-53)],
)
def test_close_allows_the_rounding_of_the_type_and_no_more(dtype, half_ulp):
    actual = np.array([1.0]).astype(dtype)
    zero = np.zeros(1)
    oracle.assert_scan_close(actual, np.array([1.0]) + half_ulp, zero)
    with pytest.raises(AssertionError, match="1 of 1 elements"):
        oracle.assert_scan_close(actual, np.array([1.0]) + 2.5 * half_ulp, zero)
    oracle.assert_scan_close(actual, np.array([1.0]) + 2.5 * half_ulp, zero + 1.6 * half_ulp)


def test_close_knows_subnormal_spacing_and_overflow():
    zero = np.zeros(1)
    smallest = np.array([2.0**-24], np.float16)
    oracle.assert_scan_close(smallest, np.array([2.0**-24 * 1.5]), zero)
    with pytest.raises(AssertionError):
        oracle.assert_scan_close(smallest, np.array([2.0**-24 * 1.6]), zero)
    infinity = np.array([np.inf], np.float16)
    oracle.assert_scan_close(infinity, np.array([65520.0]), zero)
    for value in (65519.0, -65520.0):
        with pytest.raises(AssertionError):
            oracle.assert_scan_close(infinity, np.array([value]), zero)


def test_close_rounds_where_the_bound_may_reach():
    # Below 1 the spacing is half of that above, and the bound reaches above.
    unit = 2.0**-23
    actual, value, bound = (
        np.array([1 + 8 * unit], np.float32),
        np.array([1 - 0.3 * unit]),
        np.array([8 * unit]),
    )
    oracle.assert_scan_close(actual, value, bound)
    with pytest.raises(AssertionError):
        oracle.assert_scan_close(actual, value - 0.3 * unit, bound)


def test_close_allows_both_parts_of_a_complex_number_to_round():
    value = np.array([1 + 1j]) * (1 + 0.99 * 2.0**-24)
    oracle.assert_scan_close(np.array([1 + 1j], np.complex64), value, np.zeros(1))
    with pytest.raises(AssertionError):
        oracle.assert_scan_close(np.array([1 + 1j], np.complex64), value + 2.0**-24, np.zeros(1))


@pytest.mark.parametrize(
    ("actual", "value"),
    [(np.nan, 1.0), (1.0, np.nan), (np.inf, 1.0), (1.0, np.inf), (-np.inf, np.inf), (np.nan, np.inf)],
)
def test_close_is_strict_about_what_is_not_finite(actual, value):
    with pytest.raises(AssertionError):
        oracle.assert_scan_close(np.array([actual]), np.array([value]), np.zeros(1))
    oracle.assert_scan_close(np.array([value]), np.array([value]), np.array([np.nan if value != 1 else 0]))


def test_close_never_passes_on_a_bound_that_is_nan():
    with pytest.raises(AssertionError):
        oracle.assert_scan_close(np.ones(1), np.ones(1), np.array([np.nan]))


def test_close_names_the_worst():
    actual = np.zeros((2, 3))
    actual[1, 2], actual[0, 1] = 4.0, 1.0
    with pytest.raises(AssertionError, match=r"2 of 6 .* at \(1, 2\): actual .*4\.0.* error 4, allowed 0\.5"):
        oracle.assert_scan_close(actual, np.zeros((2, 3)), np.full((2, 3), 0.5))
    with pytest.raises(AssertionError, match=r"shape \(2, 3\), expected \(3, 2\)"):
        oracle.assert_scan_close(actual, np.zeros((3, 2)), np.zeros((3, 2)))
