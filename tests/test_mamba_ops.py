"""The functions around a Mamba block's scan, on NumPy arrays and by their kernels, against sums in float64."""

import re
from itertools import product

import ml_dtypes
import numpy as np
import pytest
from conftest import HostExecutor
from hypothesis import given, settings
from hypothesis import strategies as st

from cuscan import _plan
from cuscan._plan import DeviceLimits, forced
from cuscan.mamba import ops
from cuscan.testing import host

BF16, F16, F32, F64 = ml_dtypes.bfloat16, np.float16, np.float32, np.float64
EPS = {BF16: 2.0**-8, F16: 2.0**-11, F32: 2.0**-24, F64: 2.0**-53}
ITEMS = [BF16, F16, F32]
each_item = pytest.mark.parametrize("item", ITEMS)
H200 = DeviceLimits(architecture=90, multiprocessors=132, shared_memory=227 * 1024)


@pytest.fixture(scope="module")
def host_executor():
    """The CPU executor in checked mode, which compiles what a test needs."""
    try:
        host.compiler()
    except host.CompileError as error:
        pytest.skip(str(error))
    return HostExecutor(host.HostModules("checked"), every_type=True)


def rng(*seed):
    return np.random.default_rng(seed)


def wide(x):
    return None if x is None else np.asarray(x).astype(F64)


def sizes(*terms):
    """The sum of absolute values of products: what an error bound is proportional to."""
    return sum(np.abs(wide(x)) for x in terms)


def assert_close(x, value, size, item, terms, computed=F32):
    """Within the error of a sum of so many terms, of sizes that add up to `size`, rounded once to `item`.

    An item below the smallest normal number of float16 is off by half its spacing.
    """
    error = (terms + 8) * EPS[computed] * size
    bound = error + EPS[item] * (np.abs(value) + error) + 2.0**-25
    off = np.abs(wide(x) - value)
    assert (off <= bound).all(), f"{np.max(off / bound)} times the bound"


# --- causal_conv1d -------------------------------------------------------------------------------------------------


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


class Conv:
    """The arguments of one call, and by loops over the definition what it gives and what its gradients are."""

    def __init__(self, batch, length, channels, width, item=F32, *, bias=True, state=True, silu=True, exact=False,
                 parameters=None, seed=0):  # fmt: skip
        r = rng(seed, batch, length, channels, width)
        draw = (lambda *shape: r.integers(-4, 5, shape)) if exact else (lambda *shape: r.normal(size=shape))
        self.item, parameters = item, parameters or item
        # A slice of the in-projection.
        self.x = draw(batch, length, 2 * channels).astype(item)[..., :channels]
        self.weight = draw(channels, width).astype(parameters)
        self.options = {"activation": "silu"} if silu else {}
        self.bias = draw(channels).astype(parameters) if bias else None
        self.state = draw(batch, channels, width - 1).astype(item) if state else None
        self.grad = draw(batch, length, channels).astype(item)
        self.grad_final = draw(batch, channels, width - 1).astype(item)
        self.silu, self.width, self.computed = silu, width, F64 if item is F64 else F32

    @property
    def inputs(self):
        before = np.zeros((*self.x.shape[::2], self.width - 1)) if self.state is None else wide(self.state)
        return np.concatenate([before.transpose(0, 2, 1), wide(self.x)], axis=1)

    def sums(self):
        """(batch, length, channels) before the activation, and the sizes of what is added."""
        inputs, weight = self.inputs, wide(self.weight)
        bias = 0 if self.bias is None else wide(self.bias)
        total = np.zeros(self.x.shape) + bias
        size = np.abs(total)
        for t, k in product(range(self.x.shape[1]), range(self.width)):
            total[:, t] += weight[:, k] * inputs[:, t + k]
            size[:, t] += np.abs(weight[:, k] * inputs[:, t + k])
        return total, size

    def expected(self):
        total, size = self.sums()
        value = total * sigmoid(total) if self.silu else total
        return value, 1.1 * size  # the slope of silu is below 1.1

    def arguments(self):
        return (self.x, self.weight, self.bias)

    def check(self, executor, **more):
        y, final = executor(
            ops.causal_conv1d, *self.arguments(), initial_state=self.state, return_final_state=True, **self.options,
            **more,
        )  # fmt: skip
        assert y.dtype == self.item
        assert y.shape == self.x.shape
        assert_close(y, *self.expected(), self.item, self.width + 2, self.computed)
        assert final.dtype == self.item
        np.testing.assert_array_equal(wide(final), self.inputs[:, self.x.shape[1] :].transpose(0, 2, 1))
        return y

    def gradients(self, *, final):
        """Values and sizes of the four gradients, by the chain rule on the sums."""
        total, _ = self.sums()
        length, weight, inputs = self.x.shape[1], wide(self.weight), self.inputs
        slope = sigmoid(total) * (1 + total * sigmoid(-total)) if self.silu else np.ones_like(total)
        g = wide(self.grad) * slope
        to_inputs, to_weight = np.zeros_like(inputs), np.zeros_like(weight)
        size_inputs, size_weight = to_inputs.copy(), to_weight.copy()
        for t, k in product(range(length), range(self.width)):
            for to, size, at, term in (
                (to_inputs, size_inputs, (slice(None), t + k), weight[:, k] * g[:, t]),
                (to_weight, size_weight, (slice(None), k), g[:, t] * inputs[:, t + k]),
            ):
                if to is to_weight:
                    to[at] += term.sum(0)
                    size[at] += np.abs(term).sum(0)
                else:
                    to[at] += term
                    size[at] += np.abs(term)
        if final:
            to_inputs[:, length:] += wide(self.grad_final).transpose(0, 2, 1)
            size_inputs[:, length:] += np.abs(wide(self.grad_final)).transpose(0, 2, 1)
        split = self.width - 1
        return (
            (to_inputs[:, split:], size_inputs[:, split:]),
            (to_weight, size_weight),
            (g.sum((0, 1)), np.abs(g).sum((0, 1))),
            tuple(x[:, :split].transpose(0, 2, 1) for x in (to_inputs, size_inputs)),
        )

    def check_gradients(self, executor, *, final=True):
        got = executor(
            ops.causal_conv1d_vjp, *self.arguments(), grad_out=self.grad, initial_state=self.state,
            grad_final_state=self.grad_final if final else None, **self.options,
        )  # fmt: skip
        inputs = {"x": self.x, "weight": self.weight, "bias": self.bias, "initial_state": self.state}
        # A slope's error is that of the sum before it, of which there are some where sizes are far above the value.
        noise = 1 + np.max(self.sums()[1], initial=0)
        for (name, like), (value, size) in zip(inputs.items(), self.gradients(final=final), strict=True):
            x = getattr(got, name)
            assert (x is None) == (like is None)
            if like is not None:
                assert (x.dtype, x.shape) == (like.dtype, like.shape)
                terms = self.width if name in ("x", "initial_state") else self.x.shape[0] * self.x.shape[1]
                assert_close(x, value, size * noise, like.dtype.type, terms + 12, self.computed)
        return got


def test_by_hand(executor):
    x, weight = np.array([1, 2, 3], F32)[None, :, None], np.array([[1, 10]], F32)
    y, final = executor(
        ops.causal_conv1d,
        x,
        weight,
        np.array([100], F32),
        initial_state=np.array([[[7]]], F32),
        return_final_state=True,
    )
    np.testing.assert_array_equal(y.ravel(), [100 + 7 + 10, 100 + 1 + 20, 100 + 2 + 30])
    np.testing.assert_array_equal(final, [[[3]]])
    half = executor(ops.causal_conv1d, x, weight, activation="silu")
    np.testing.assert_allclose(half.ravel(), [v * sigmoid(v) for v in (10, 21, 32)], rtol=1e-6)


@each_item
@pytest.mark.parametrize("width", ops.WIDTHS)
def test_every_width(executor, item, width):
    # 8 channels come in vectors of the usual width, and 5 do not.
    for channels in (8, 5):
        with forced(conv_chunk=8):
            Conv(2, 21, channels, width, item).check(executor)


@pytest.mark.parametrize("length", [0, 1, 2, 3, 7, 8, 9, 16, 17])
def test_every_length(executor, length):
    for channels, width in ((4, 4), (3, 4), (2, 7)):
        for options in ({}, {"bias": False, "state": False, "silu": False}):
            with forced(conv_chunk=8):
                Conv(2, length, channels, width, **options).check(executor)


@each_item
def test_exact_inputs_have_the_same_bits_in_vectors_in_items_and_in_any_chunks(executor, item):
    case = Conv(2, 40, 16, 4, item, silu=False, exact=True)
    first = case.check(executor)
    np.testing.assert_array_equal(wide(first), case.sums()[0])
    real = Conv(2, 40, 16, 4, item)
    (x, *rest), options = real.arguments(), {"initial_state": real.state, **real.options}
    expected = executor(ops.causal_conv1d, x, *rest, **options)
    for chunk in (3, 8, 40):
        with forced(conv_chunk=chunk):
            np.testing.assert_array_equal(executor(ops.causal_conv1d, x, *rest, **options), expected)
    turned = np.ascontiguousarray(x.transpose(2, 0, 1)).transpose(1, 2, 0)
    np.testing.assert_array_equal(executor(ops.causal_conv1d, turned, *rest, **options), expected)


@pytest.mark.parametrize("parameters", [BF16, F16, F32, F64])
def test_parameters_of_every_type(executor, parameters):
    for channels in (4, 3):
        Conv(1, 9, channels, 4, parameters=parameters).check(executor)


def test_an_output_of_any_strides(executor):
    case = Conv(2, 11, 6, 4)
    expected = case.check(executor)
    for memory, axes in (((2, 11, 12), (0, 1, 2)), ((6, 2, 11), (1, 2, 0))):
        out = np.zeros(memory, F32).transpose(axes)[..., :6]
        given = executor(ops.causal_conv1d, *case.arguments(), initial_state=case.state, out=out, activation="silu")
        assert given is out
        np.testing.assert_array_equal(out, expected)


def test_items_at_odd_addresses(executor):
    case = Conv(1, 9, 4, 4)

    def odd(x):
        memory = np.zeros(x.nbytes + 1, np.uint8)
        to = memory[1:].view(x.dtype).reshape(x.shape)
        to[...] = x
        return to

    expected = case.check(executor)
    y = executor(ops.causal_conv1d, *map(odd, case.arguments()), initial_state=odd(case.state), activation="silu",
                 out=odd(np.zeros_like(expected)))  # fmt: skip
    np.testing.assert_array_equal(y, expected)

    def update(state, x, weight):
        ops.causal_conv1d_update(state, x, weight)
        return state

    state = executor(update, odd(case.state), np.ascontiguousarray(case.x[:, 0]), case.weight)
    np.testing.assert_array_equal(state[..., :-1], case.state[..., 1:])
    np.testing.assert_array_equal(state[..., -1], case.x[:, 0])


@each_item
def test_steps_are_the_scan(executor, item):
    for channels in (8, 3):
        case = Conv(2, 6, channels, 4, item)
        expected = case.check(executor)

        def steps(state, x, weight, bias):
            y = [ops.causal_conv1d_update(state, x[t], weight, bias, activation="silu") for t in range(len(x))]
            return (state, *y)

        # A state with something between its rows.
        state = np.zeros((2, channels, 5), item)[..., 1:4]
        state[...] = case.state
        x = np.ascontiguousarray(case.x.transpose(1, 0, 2))
        state, *y = executor(steps, state, x, *case.arguments()[1:])
        np.testing.assert_array_equal(np.stack(y, 1), expected)
        np.testing.assert_array_equal(wide(state), case.inputs[:, -3:].transpose(0, 2, 1))


@each_item
@pytest.mark.parametrize("width", [2, 4, 8])
def test_gradients(executor, item, width):
    for channels in (6, 5):
        with forced(conv_chunk=9, conv_part=2):
            Conv(3, 29, channels, width, item).check_gradients(executor)


@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 5, 8, 9])
def test_gradients_of_every_length(executor, length):
    for channels, width in ((2, 4), (1, 4), (2, 6)):
        for options in ({}, {"bias": False, "state": False, "silu": False}, {"state": False}):
            for final in (False, True):
                with forced(conv_chunk=4, conv_part=1):
                    Conv(2, length, channels, width, **options).check_gradients(executor, final=final)


def test_steps_after_the_last_have_no_gradient_where_their_sum_would_overflow(executor):
    for channels in (2, 1):
        x, weight = np.zeros((1, 4, channels), F32), np.zeros((channels, 4), F32)
        x[:, 3], weight[:, 2:] = 1e20, (1e30, 1e-20)
        got = executor(ops.causal_conv1d_vjp, x, weight, grad_out=np.ones_like(x), activation="silu")
        slope = sigmoid(1) * (1 + sigmoid(-1))
        np.testing.assert_allclose(got.x[:, 2], 1e30 * slope, rtol=1e-6)
        np.testing.assert_allclose(got.x[:, 3], slope * 1e-20, rtol=1e-6)


def test_gradients_of_parameters_of_every_type(executor):
    for parameters in ITEMS:
        Conv(1, 9, 4, 4, BF16, parameters=parameters).check_gradients(executor)


def test_scratch_is_bounded(host_executor):
    for batch, length in ((40, 3), (1, 300)):
        case = Conv(batch, length, 2, 4, state=False)
        case.check_gradients(host_executor, final=False)
        plan = _plan.plan_conv_backward(batch, length, 1, H200)
        parts = -(-batch // plan.part) * -(-length // plan.chunk)
        outputs = case.x.size * 4 + 2 * 5 * 4
        assert sum(host_executor.allocated) - outputs == parts * 5 * 2 * 4
        assert parts * 1 <= 132 * 512


conv_errors = [
    ({"x": np.ones((2, 3))}, ValueError, r"x must have axes \(batch, length, channels\), got shape \(2, 3\)"),
    ({"x": np.ones((2, 3, 4), int)}, TypeError, r"x must be float16, bfloat16, float32 or float64, got int64"),
    ({"weight": np.ones(4)}, ValueError, r"weight must have axes \(channels, width\)"),
    ({"weight": np.ones((3, 4))}, ValueError, r"weight must have shape \(channels, width\) = \(4, 4\), got \(3, 4\)"),
    ({"weight": np.ones((4, 9))}, ValueError, "weight must have a width of 2 to 8, got 9"),
    ({"weight": np.ones((4, 1))}, ValueError, "weight must have a width of 2 to 8, got 1"),
    ({"weight": np.ones((4, 4), int)}, TypeError, "weight must be .*, got int64"),
    ({"weight": None}, TypeError, "weight must be an array, got NoneType"),
    ({"weight": 2.0}, TypeError, "weight must be an array, got float"),
    ({"bias": np.ones(3)}, ValueError, r"bias must have shape \(channels,\) = \(4,\), got \(3,\)"),
    ({"initial_state": np.ones((2, 4, 4))}, ValueError, r"initial_state must have shape .* = \(2, 4, 3\), got"),
    ({"initial_state": np.ones((2, 4, 3), F32)}, TypeError, "initial_state must be x's float64, got float32"),
    ({"out": np.ones((2, 3, 4), F32)}, TypeError, "out must be x's float64, got float32"),
    ({"out": np.ones((2, 3, 5))}, ValueError, r"out must have shape x's \(batch, length, channels\) = \(2, 3, 4\)"),
    ({"out": np.broadcast_to(np.ones(4), (2, 3, 4))}, ValueError, "out must be writable"),
    ({"activation": "gelu"}, ValueError, "activation must be None or 'silu', got 'gelu'"),
    ({"return_final_state": 1}, TypeError, "return_final_state must be True or False, got int"),
    ({"x": [1.0]}, TypeError, "x must be a NumPy or CuPy array, got a builtins.list"),
]


@pytest.mark.parametrize(("wrong", "error", "message"), conv_errors)
def test_errors_of_the_convolution(wrong, error, message):
    arguments = {"x": np.ones((2, 3, 4)), "weight": np.ones((4, 4))} | wrong
    with pytest.raises(error, match=message):
        ops.causal_conv1d(**arguments)


def test_nothing_is_written_over_an_input():
    x, weight = np.ones((2, 3, 4)), np.ones((4, 4))
    with pytest.raises(ValueError, match="out overlaps x in memory"):
        ops.causal_conv1d(x, weight, out=x)
    state = np.zeros((2, 4, 3))
    with pytest.raises(ValueError, match="state overlaps x in memory"):
        ops.causal_conv1d_update(state, state[..., 0], weight)
    state.flags.writeable = False
    with pytest.raises(TypeError, match="state is changed in place and must be writable"):
        ops.causal_conv1d_update(state, x[:, 0], weight)
    with pytest.raises(ValueError, match="state must have a place for each item"):
        ops.causal_conv1d_update(np.lib.stride_tricks.as_strided(np.zeros(3), (2, 4, 3), (0, 0, 8)), x[:, 0], weight)


def test_float64_is_for_numpy_alone(host_executor):
    with pytest.raises(TypeError, match="x is float64, which only NumPy arrays can be here"):
        host_executor(ops.causal_conv1d, np.ones((1, 2, 3)), np.ones((3, 4), F32))
    Conv(1, 9, 4, 4, F64).check_gradients(lambda function, *args, **kwargs: function(*args, **kwargs))


# --- rms_norm ------------------------------------------------------------------------------------------------------


def norm_by_loops(x, weight, eps, item):
    """The definition, row by row, with Hugging Face's casts."""
    y = np.zeros(x.shape)
    for row in np.ndindex(x.shape[:-1]):
        v = wide(x[row])
        quotient = (v / np.sqrt((v * v).sum() / max(len(v), 1) + eps)).astype(F32).astype(item)
        y[row] = wide(quotient) * (1 if weight is None else wide(weight))
    return y


NORM_SHAPES = [(3, 8), (2, 3, 5), (1, 1), (4, 129), (2, 4104), (7,), (2, 0), (0, 8)]


@each_item
@pytest.mark.parametrize("shape", NORM_SHAPES, ids=str)
def test_norm(executor, item, shape):
    r = rng(*shape)
    x = (3 * r.normal(size=shape)).astype(item)
    for weight in (None, r.normal(size=shape[-1:]).astype(item), r.normal(size=shape[-1:]).astype(F64)):
        y = executor(ops.rms_norm, x, weight, eps=1e-5)
        assert (y.dtype, y.shape) == (item, shape)
        expected = norm_by_loops(x, weight, 1e-5, item)
        # The quotient may fall on the other side of a tie.
        assert (np.abs(wide(y) - expected) <= (3 * EPS[item] + 2**-20) * np.abs(expected) + 2.0**-24).all()


@each_item
@pytest.mark.parametrize("width", [8, 5, 4104])
def test_norm_adds_the_residual_first(executor, item, width):
    r = rng(width)
    x, weight = r.normal(size=(2, 3, width)).astype(item), r.normal(size=width).astype(item)
    for residual_item, dtype in product((None, item, F32), (None, item, F32)):
        if residual_item is dtype is None:
            continue
        residual = None if residual_item is None else r.normal(size=(2, 3, width)).astype(residual_item)
        y, new = executor(ops.rms_norm, x, weight, eps=1e-3, residual=residual, residual_dtype=dtype)
        total = x.astype(F32) + (0 if residual is None else residual.astype(F32))
        stored = total.astype(dtype or residual_item)
        assert new.dtype == stored.dtype
        np.testing.assert_array_equal(new, stored)
        # What is normalised has x's dtype, whatever the residual has.
        np.testing.assert_array_equal(y, executor(ops.rms_norm, total.astype(item), weight, eps=1e-3))


def test_norm_is_hugging_faces():
    """Their lines, with NumPy's bfloat16 for torch's."""
    r = rng(5)
    x, weight = r.normal(size=(64, 96)).astype(BF16), r.normal(size=96).astype(BF16)
    hidden = x.astype(F32)
    variance = (hidden * hidden).mean(-1, keepdims=True, dtype=F32)
    expected = weight * (hidden * (1 / np.sqrt(variance + F32(1e-5)))).astype(BF16)
    assert expected.dtype == BF16
    np.testing.assert_array_equal(ops.rms_norm(x, weight, eps=1e-5), expected)


@each_item
def test_norm_of_any_strides(executor, item):
    r = rng(6)
    memory = r.normal(size=(6, 4, 3, 16)).astype(item)
    for x in (memory[:, :, 0], memory[::2, ::-1, :, 3:], memory.transpose(3, 0, 1, 2), memory[:1, 2:3, :, ::2]):
        expected = ops.rms_norm(np.ascontiguousarray(x), None, eps=1e-5)
        residual = ops.rms_norm(np.ascontiguousarray(x), None, eps=1e-5, residual=np.ascontiguousarray(x))
        np.testing.assert_allclose(
            wide(executor(ops.rms_norm, x, None, eps=1e-5)), wide(expected), rtol=3 * EPS[item] + 2.0**-21
        )
        y, new = executor(ops.rms_norm, x, None, eps=1e-5, residual=x)
        np.testing.assert_array_equal(new, residual[1])
        np.testing.assert_allclose(wide(y), wide(residual[0]), rtol=3 * EPS[item] + 2.0**-21)


def mean(x):
    return x.sum(-1, keepdims=True) / max(x.shape[-1], 1)


def norm_gradients(x, weight, grad, extra, eps):
    x, grad = wide(x), wide(grad)
    weight = 1.0 if weight is None else wide(weight)
    share = 1 / np.sqrt(mean(x * x) + eps)
    quotient, weighted = x * share, weight * grad
    products = quotient * weighted
    value = share * (weighted - quotient * mean(products)) + wide(extra)
    size = share * sizes(weighted, np.abs(quotient) * mean(np.abs(products))) + np.abs(wide(extra))
    each, rows = grad * quotient, tuple(range(x.ndim - 1))
    return (value, size), (each.sum(rows), np.abs(each).sum(rows))


@each_item
@pytest.mark.parametrize("shape", [(3, 8), (2, 3, 5), (1, 1), (2, 4104), (7,), (100, 4), (0, 8), (2, 0)], ids=str)
def test_norm_gradients(executor, item, shape):
    r = rng(*shape)
    x, grad, extra = (r.normal(size=shape) for _ in range(3))
    x, rows = x.astype(item), int(np.prod(shape[:-1]))
    for grad_item, extra_item, weight_item in ((item, None, F32), (F32, F32, item), (F16, BF16, None)):
        weight = None if weight_item is None else r.normal(size=shape[-1:]).astype(weight_item)
        given = None if extra_item is None else extra.astype(extra_item)
        got = executor(ops.rms_norm_vjp, x, weight, eps=1e-3, grad_out=grad.astype(grad_item), grad_residual=given)
        want = norm_gradients(x, weight, grad.astype(grad_item), np.zeros(shape) if given is None else given, 1e-3)
        assert (got.x.dtype, got.x.shape) == (item, shape)
        assert_close(got.x, *want[0], item, terms=shape[-1] + 8)
        assert (got.weight is None) == (weight is None)
        if weight is not None:
            assert (got.weight.dtype, got.weight.shape) == (weight_item, shape[-1:])
            assert_close(got.weight, *want[1], weight_item, terms=rows + shape[-1] + 8)


def test_norm_gradients_of_any_parts(executor):
    r = rng(8)
    x, grad, weight = r.normal(size=(70, 9)).astype(F32), r.normal(size=(70, 9)).astype(F32), np.ones(9, F32)
    want = norm_gradients(x, weight, grad, np.zeros_like(x), 1e-5)
    for parts in (1, 7, 32, 64):
        with forced(norm_parts=parts):
            got = executor(ops.rms_norm_vjp, x, weight, eps=1e-5, grad_out=grad)
        assert_close(got.x, *want[0], F32, terms=20)
        assert_close(got.weight, *want[1], F32, terms=90)


norm_errors = [
    ({"x": np.ones(())}, ValueError, r"x must have axes \(..., width\), got a scalar"),
    ({"x": np.ones((2, 3), int)}, TypeError, "x must be .*, got int64"),
    ({"weight": np.ones(2)}, ValueError, r"weight must have shape \(width,\) = \(3,\), got \(2,\)"),
    ({"weight": np.ones(3, int)}, TypeError, "weight must be .*, got int64"),
    ({"residual": np.ones((3, 2), F32)}, ValueError, r"residual must have shape x's = \(2, 3\), got \(3, 2\)"),
    ({"residual": np.ones((2, 3), F16)}, TypeError, "residual must be x's bfloat16 or float32, got float16"),
    ({"residual_dtype": F16}, TypeError, "residual_dtype must be x's bfloat16 or float32, got float16"),
    ({"residual_dtype": "int8"}, TypeError, "residual_dtype must be .*, got int8"),
]


@pytest.mark.parametrize(("wrong", "error", "message"), norm_errors)
def test_errors_of_the_norm(wrong, error, message):
    with pytest.raises(error, match=message):
        ops.rms_norm(**{"x": np.ones((2, 3), BF16), "weight": None, "eps": 1e-5} | wrong)


def test_errors_of_the_norms_gradients():
    x = np.ones((2, 3), F32)
    with pytest.raises(ValueError, match=r"grad_out must have shape x's = \(2, 3\), got \(2,\)"):
        ops.rms_norm_vjp(x, None, eps=1e-5, grad_out=x[:, 0])
    with pytest.raises(TypeError, match=r"grad_residual must be .*, got int64"):
        ops.rms_norm_vjp(x, None, eps=1e-5, grad_out=x, grad_residual=np.ones((2, 3), int))


# --- matrix_vector -------------------------------------------------------------------------------------------------


class Product:
    """The arguments of one call, and what it gives, entry by entry."""

    def __init__(self, rows, columns, batch, item=F32, *, bias=None, add=None, exact=False, seed=0):
        r = rng(seed, rows, columns, batch)
        draw = (lambda *shape: r.integers(-3, 4, shape)) if exact else (lambda *shape: r.normal(size=shape))
        self.weight, self.x = draw(rows, columns).astype(item), draw(batch, columns).astype(item)
        self.item = item
        self.options = {}
        if bias:
            self.options["bias"] = draw(rows).astype(bias)
        if add:
            self.options["add"] = draw(batch, rows).astype(add)

    def check(self, executor, **more):
        y = executor(ops.matrix_vector, self.weight, self.x, **self.options, **more)
        assert y.dtype == more.get("out_dtype", self.item)
        assert y.shape == (len(self.x), len(self.weight))
        value, size = np.zeros(y.shape), np.zeros(y.shape)
        for b, o in np.ndindex(y.shape):
            terms = [wide(self.weight[o]) * wide(self.x[b])]
            terms += [wide(x)[at : at + 1] for x, at in ((self.options.get("bias"), o),) if x is not None]
            terms += [wide(x)[b, o : o + 1] for x in (self.options.get("add"),) if x is not None]
            value[b, o], size[b, o] = sum(x.sum() for x in terms), sum(np.abs(x).sum() for x in terms)
        assert_close(y, value, size, y.dtype.type, terms=self.weight.shape[1])
        return y


@each_item
@pytest.mark.parametrize(("rows", "columns"), [(1, 8), (5, 264), (9, 13), (3, 1), (2, 4096), (17, 16), (3, 0), (0, 8)])
def test_product(executor, item, rows, columns):
    for batch, bias, add in ((1, None, F32), (2, F32, None), (8, item, item)):
        Product(rows, columns, batch, item, bias=bias, add=add).check(executor)
        Product(rows, columns, batch, item, bias=bias, add=add).check(executor, out_dtype=F32)


def test_product_of_no_rows(executor):
    assert executor(ops.matrix_vector, np.ones((3, 8), F32), np.ones((0, 8), F32)).shape == (0, 3)


@each_item
def test_product_of_exact_inputs_is_exact(executor, item):
    for columns, batch in product((40, 39), (1, 5)):
        case = Product(6, columns, batch, item, bias=item, add=F32, exact=True)
        y = case.check(executor, out_dtype=F64)
        expected = wide(case.x) @ wide(case.weight).T + wide(case.options["bias"]) + wide(case.options["add"])
        np.testing.assert_array_equal(y, expected)


@each_item
def test_product_has_the_bits_of_each_row_alone_and_of_any_strides(executor, item):
    case = Product(6, 4096 // 8, 3, item)
    for row_warps in (1, 2, 8):
        with forced(product_warps=row_warps):
            y = case.check(executor, out_dtype=F32)
            if not executor.kernels:
                continue
            for b in range(3):
                alone = executor(ops.matrix_vector, case.weight, case.x[b : b + 1], out_dtype=F32)
                np.testing.assert_array_equal(alone[0], y[b])
            turned = np.asfortranarray(case.weight), case.x[:, ::-1].copy()[:, ::-1]
            np.testing.assert_array_equal(executor(ops.matrix_vector, *turned, out_dtype=F32), y)


product_errors = [
    ({"weight": np.ones(3)}, ValueError, r"weight must have axes \(out, in\), got shape \(3,\)"),
    ({"x": np.ones(3)}, ValueError, r"x must have axes \(batch, in\), got shape \(3,\)"),
    ({"x": np.ones((1, 3), F32)}, TypeError, "x must be weight's float64, got float32"),
    ({"x": np.ones((1, 4))}, ValueError, r"x must have shape \(batch, in\) = \(1, 3\), got \(1, 4\)"),
    ({"x": np.ones((9, 3))}, ValueError, "x must have at most 8 rows, got 9"),
    ({"weight": np.ones((2, 3), int)}, TypeError, "weight must be .*, got int64"),
    ({"bias": np.ones(3)}, ValueError, r"bias must have shape \(out,\) = \(2,\), got \(3,\)"),
    ({"add": np.ones(2)}, ValueError, r"add must have shape \(batch, out\) = \(1, 2\), got \(2,\)"),
    ({"add": np.ones((1, 2), int)}, TypeError, "add must be weight's float64, got int64"),
    ({"out_dtype": "int8"}, TypeError, "out_dtype must be .*, got int8"),
]


@pytest.mark.parametrize(("wrong", "error", "message"), product_errors)
def test_errors_of_the_product(wrong, error, message):
    with pytest.raises(error, match=message):
        ops.matrix_vector(**{"weight": np.ones((2, 3)), "x": np.ones((1, 3))} | wrong)


# --- coverage ------------------------------------------------------------------------------------------------------


def check_all(modules):
    """Every line of the kernels."""
    executor = HostExecutor(modules, every_type=True)
    for item, other in zip(ITEMS, (F16, F64, BF16), strict=True):
        for channels, parameters in ((8, item), (8, F32), (8, other), (5, item)):
            with forced(conv_chunk=9, conv_part=2):
                case = Conv(3, 29, channels, 4, item, parameters=parameters)
                case.check(executor)
                case.check_gradients(executor)
        test_norm(executor, item, (2, 4104))
        test_norm_adds_the_residual_first(executor, item, 5)
        test_norm_gradients(executor, item, (2, 4104))
        test_norm_gradients(executor, item, (3, 5))
        test_product_has_the_bits_of_each_row_alone_and_of_any_strides(executor, item)
        Product(3, 13, 2, item, bias=item, add=F32).check(executor)
    test_steps_after_the_last_have_no_gradient_where_their_sum_would_overflow(executor)


# --- kinds, plans --------------------------------------------------------------------------------------------------


def test_other_kinds_are_named():
    class Tensor:
        __module__ = "torch"

    with pytest.raises(TypeError, match=re.escape("x must be a NumPy or CuPy array, got a torch.Tensor")):
        ops.rms_norm(Tensor(), None, eps=1e-5)


@given(st.integers(1, 5000), st.integers(0, 10**6), st.integers(1, 20000), st.integers(1, 200))
@settings(max_examples=50)
def test_plans_of_the_convolution(batch, length, groups, multiprocessors):
    limits = DeviceLimits(architecture=90, multiprocessors=multiprocessors, shared_memory=1 << 16)
    assert _plan.plan_conv(batch, length, groups, limits).chunk % _plan.CONV_STEPS == 0
    plan = _plan.plan_conv_backward(batch, length, groups, limits)
    parts = -(-batch // plan.part) * max(1, -(-length // plan.chunk))
    assert parts <= max(1, multiprocessors * 512 // groups)


@given(st.integers(1, 10**6), st.integers(1, 10**5), st.integers(1, 200))
@settings(max_examples=50)
def test_plans_of_the_norm(rows, width, multiprocessors):
    plan = _plan.plan_norm(rows, width, DeviceLimits(90, multiprocessors, 1 << 16))
    assert plan.threads % 32 == 0
    assert 1 <= plan.threads <= 1024
    assert 1 <= plan.parts <= rows
    assert plan.parts % 32 == 0 or plan.parts < 32


def test_plans_of_the_product():
    warps = {shape: _plan.plan_product(*shape, H200).row_warps for shape in ((10240, 320), (192, 640), (5120, 20))}
    assert warps == {(10240, 320): 1, (192, 640): 8, (5120, 20): 1}
