"""cuscan.interop.jax: problems as elsewhere, JAX's own gradients of the plain recurrence, and its transformations."""

import contextlib
import functools
import inspect
import random
import sys
from dataclasses import replace

import numpy as np
import pytest

import cuscan
from cuscan.testing import (
    Layout,
    LinearGradientProblem,
    LinearProblem,
    SelectiveGradientProblem,
    SelectiveProblem,
    problems,
)
from cuscan.testing.oracle import assert_scan_close

jax = pytest.importorskip("jax", reason="JAX is not installed")
interop = pytest.importorskip("cuscan.interop.jax", reason="JAX is not installed")
jnp = jax.numpy

LAID = Layout()
DIFFERENTIABLE = cuscan.SelectiveGradients._fields


def split(arguments):
    """Arrays, and what is not one."""
    given = {name: x for name, x in arguments.items() if x is not None}
    arrays = {name: jnp.asarray(x) for name, x in given.items() if isinstance(x, np.ndarray)}
    return arrays, {name: x for name, x in given.items() if name not in arrays and name != "out"}


class OnJax:
    """Runs problems on copies of their arrays, under jit; gradients are those that jax.vjp gives."""

    def __init__(self, device):
        self.device = device

    def __call__(self, function, arguments):
        with jax.enable_x64(), jax.default_device(self.device):
            arrays, options = split(arguments)
            if function is cuscan.selective_scan_vjp:
                return self.gradients(arrays, options)
            results = jax.jit(functools.partial(getattr(interop, function.__name__), **options))(**arrays)
            return tuple(map(np.asarray, results)) if isinstance(results, tuple) else np.asarray(results)

    def gradients(self, arrays, options):
        # JAX's convention is the conjugate of the problems'.
        grads = {name: arrays.pop(name, None) for name in ("grad_out", "grad_last_state", "states")}
        grad_y, grad_last = grads["grad_out"], grads["grad_last_state"]
        inputs = {name: x for name, x in arrays.items() if name in DIFFERENTIABLE}
        out_dtype = None if grad_y is None else grad_y.dtype

        @jax.jit
        def gradients(inputs, marks, grad_y, grad_last):
            def results(inputs):
                found = interop.selective_scan(
                    **inputs, **marks, **options, return_last_state=True, out_dtype=out_dtype
                )
                return [x for x, grad in zip(found, (grad_y, grad_last), strict=True) if grad is not None]

            _, pull = jax.vjp(results, inputs)
            return pull([jnp.conj(grad) for grad in (grad_y, grad_last) if grad is not None])[0]

        marks = {name: x for name, x in arrays.items() if name not in inputs}
        found = gradients(inputs, marks, grad_y, grad_last)
        return tuple(np.conj(found[name]) if name in found else None for name in DIFFERENTIABLE)


@pytest.fixture(scope="module", params=["cpu", "cuda"])
def on_jax(request):
    try:
        return OnJax(jax.devices(request.param)[0])
    except RuntimeError as error:
        pytest.skip(f"no CUDA device for JAX: {str(error).split(':')[0]}")


# --- problems ----------------------------------------------------------------------------------------------------

OPTIONAL = dict.fromkeys(("D", "z", "delta_bias", "h0"), LAID)
MARKS = {"mask": LAID, "reset": LAID}
PACKED = {"batch": 1, "cu_seqlens": LAID, "lengths": (9, 0, 25), "head": 2, "offsets": "int32"}
CASES = {
    "plain": {},
    "bfloat16": {**OPTIONAL, "dtype": "bfloat16", "softplus": True},
    "float64": {**OPTIONAL, **MARKS, "dtype": "float64", "limit": (0.05, 0.5), "softplus": True},
    "float16, delta in float32": {**OPTIONAL, "dtype": "float16", "wide": ("delta",), "parameters": "float32"},
    "groups, bdl, reverse": {**OPTIONAL, **MARKS, "groups": 2, "layout": "bdl", "reverse": True},
    "packed": {**OPTIONAL, **PACKED, "reset": LAID},
    "packed, bdl, reverse": {**OPTIONAL, **PACKED, "mask": LAID, "layout": "bdl", "reverse": True},
    "constant B": {"constant": "B", "D": LAID},
    "constant B and C": {"constant": "BC", "h0": LAID},
    "complex": {**OPTIONAL, "complex": True},
    "complex, packed": {**OPTIONAL, **PACKED, "complex": True, "layout": "bdl", "dtype": "bfloat16"},
    "no steps": {"length": 0, "h0": LAID},
    "no states": {"state": 0, "D": LAID, "z": LAID},
    "no channels": {"channels": 0},
}


def problem(*, batch=2, length=37, channels=6, state=3, **fields):
    return SelectiveProblem(batch=batch, length=length, channels=channels, state=state, **{"values": "real", **fields})


@pytest.mark.parametrize("fields", CASES.values(), ids=CASES)
def test_values(on_jax, fields):
    problem(**fields, states=True).check(on_jax)


@pytest.mark.parametrize("fields", CASES.values(), ids=CASES)
def test_gradients(on_jax, fields):
    SelectiveGradientProblem(problem(**fields), LAID, LAID).check(on_jax)


@pytest.mark.parametrize(
    "of", [{"grad": LAID, "wide": ("grad",)}, {"grad": None, "grad_last": LAID}], ids=["y", "last"]
)
def test_gradients_of_one_result(on_jax, of):
    SelectiveGradientProblem(problem(**OPTIONAL, dtype="bfloat16"), **of).check(on_jax)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(12))
def test_drawn_problems(on_jax, seed):
    source = random.Random(seed)
    drawn = replace(problems.draw_selective(source.choice, source.randint, largest=4096, plans=0), out=None)
    drawn.check(on_jax)
    replace(problems.draw_gradients(source.choice, source.randint, drawn), grad_dtype=None).check(on_jax)


# --- JAX's own gradients -----------------------------------------------------------------------------------------


def plain(u, delta, A, B, C, D, z, delta_bias, h0, *, mask, reset, reverse):
    """y and the last state, as one would write it in JAX."""
    step = jax.nn.softplus(delta + delta_bias)
    gate, entry = jnp.exp(step[..., None] * A), (step * u)[..., None] * B[:, :, None]
    gate, entry = (jnp.where(mask[..., None, None], x, skipped) for x, skipped in ((gate, 1), (entry, 0)))

    def advance(h, x):
        gate, entry, starts = x
        h = gate * jnp.where(starts[:, None, None], 0, h) + entry
        return h, h

    last, h = jax.lax.scan(advance, h0, [x.swapaxes(0, 1) for x in (gate, entry, reset)], reverse=reverse)
    y = (C[:, :, None] * h.swapaxes(0, 1)).sum(-1)
    y = (2 * y.real if y.dtype.kind == "c" else y) + D * u
    return jnp.where(mask[..., None], y * jax.nn.silu(z), 0), last


@pytest.mark.parametrize(("item", "reverse"), [("float32", False), ("float64", True), ("complex64", True)])
def test_gradients_are_those_that_jax_has_of_the_plain_recurrence(item, reverse):
    dtype, is_complex = ("float32", True) if item == "complex64" else (item, False)
    # With this seed there is no NaN where a mask hides it, which the plain recurrence would bring to light.
    fields = {**OPTIONAL, **MARKS, "dtype": dtype, "complex": is_complex, "softplus": True, "reverse": reverse}
    one = SelectiveGradientProblem(problem(**fields, seed=28), LAID, LAID)
    arguments = one.arguments()
    assert 0 < arguments["mask"].mean() < 1
    bounds = {name: bound for name, (_, bound) in one.expected(arguments).items()}
    inputs = {name: arguments[name] for name in DIFFERENTIABLE}
    marks = {name: arguments[name] for name in MARKS} | {"reverse": reverse}
    grads = arguments["grad_out"], np.conj(arguments["grad_last_state"])

    def ours(inputs):
        return interop.selective_scan(**inputs, **marks, delta_softplus=True, return_last_state=True)

    def gradients_of(function, inputs):
        results, pull = jax.vjp(function, inputs)
        return pull(tuple(grad.astype(x.dtype) for grad, x in zip(grads, results, strict=True)))[0]

    with jax.enable_x64():
        found = jax.jit(functools.partial(gradients_of, ours))(inputs)
        wide = {name: x.astype("complex128" if x.dtype.kind == "c" else "float64") for name, x in inputs.items()}
        known = jax.jit(functools.partial(gradients_of, lambda inputs: plain(**inputs, **marks)))(wide)
    for name in DIFFERENTIABLE:
        assert found[name].dtype == inputs[name].dtype
        # In float64 what JAX computes has roundings of its own.
        assert_scan_close(found[name], known[name], bounds[name] * (2 if item == "float64" else 1))


# --- linear_scan -------------------------------------------------------------------------------------------------

ONE_STEP = Layout(steps=(0, 0, 1))  # a gate for all rows and steps
LINEAR = {
    "plain": {"shape": (40,)},
    "axis 0, everything": {"shape": (40, 2, 3), "h0": LAID, **MARKS, "reverse": True},
    "bfloat16 in float32": {"shape": (2, 40), "axis": 1, "dtype": "bfloat16", "out_dtype": "float32"},
    "float32 in float16": {"shape": (2, 40), "axis": 1, "h0": LAID, "out_dtype": "float16"},
    "a number": {"shape": (40, 2), "a": 0.999, "dtype": "bfloat16", "h0": LAID},
    "a gate for all": {"shape": (2, 40, 3), "axis": 1, "a": ONE_STEP, "dtype": "float64"},
    "complex": {"shape": (3, 40), "axis": 1, "dtype": "complex64", "h0": LAID, "mask": LAID},
    "packed": {"shape": (2, 36, 3), "axis": 1, "cu_seqlens": LAID, "lengths": (9, 0, 25), "head": 2, "h0": LAID},
    "no steps": {"shape": (2, 0), "axis": 1, "h0": LAID},
}


@pytest.mark.parametrize("fields", LINEAR.values(), ids=LINEAR)
def test_linear_values(on_jax, fields):
    LinearProblem(**{"values": "real", **fields}).check(on_jax)


@pytest.mark.parametrize(
    ("name", "which"), [("complex", ("h",)), ("packed", ("last",)), *((name, ("h", "last")) for name in LINEAR)]
)
def test_linear_gradients_are_those_of_numpy(name, which):
    """Bit for bit; what those are is tested elsewhere."""
    fields = LINEAR[name]
    arguments = LinearProblem(**{"values": "real", **fields}).arguments()
    if fields.get("a") == ONE_STEP:
        arguments["a"] = arguments["a"][:1, :1]
    saved = "float32" if "out_dtype" in fields else arguments["b"].dtype  # of h
    rng = np.random.default_rng(1)
    with jax.enable_x64():
        arrays, options = split(arguments | {"return_last_state": True})
        inputs = {name: x for name, x in arrays.items() if name in ("a", "b", "h0")}
        marks = {name: x for name, x in arrays.items() if name not in inputs}

        @jax.jit
        def results(inputs):
            found = interop.linear_scan(**inputs, **marks, **options)
            return {name: x for name, x in zip(("h", "last"), found, strict=True) if name in which}

        found, pull = jax.vjp(results, inputs)
        grads = {name: np.array(rng.standard_normal(x.shape)).astype(x.dtype) for name, x in found.items()}
        (gradients_of,) = pull(grads)

    given = {name: x for name, x in arguments.items() if name not in ("b", "out", "out_dtype", "return_last_state")}
    h = cuscan.linear_scan(**given, b=arguments["b"], out_dtype=saved)
    grad_h = grads["h"].astype(saved) if "h" in grads else None
    expected = cuscan.linear_scan_vjp(**given, h=h, grad_h=grad_h, grad_last_state=grads.get("last"))
    for name, gradient in gradients_of.items():
        assert gradient.dtype == arguments[name].dtype
        np.testing.assert_array_equal(gradient, np.conj(getattr(expected, name)))


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_linear_gradients_are_those_that_jax_has(dtype):
    rng = np.random.default_rng(0)
    a, b, grad = (
        rng.standard_normal((20, 3)) + (1j * rng.standard_normal((20, 3)) if dtype == "complex128" else 0)
        for _ in range(3)
    )
    a, h0 = a / 2, grad[3]

    def plain(a, b, h0):
        return jax.lax.scan(lambda h, x: (x[0] * h + x[1],) * 2, h0, (a, b))[1]

    def ours(a, b, h0):
        return interop.linear_scan(a, b, h0, axis=0)

    with jax.enable_x64():
        found, known = (jax.vjp(function, a, b, h0)[1](jnp.asarray(grad)) for function in (ours, plain))
    for x, expected in zip(found, known, strict=True):
        np.testing.assert_allclose(x, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "fields", [LINEAR["axis 0, everything"], LINEAR["complex"], LINEAR["packed"]], ids=["axis 0", "complex", "packed"]
)
@pytest.mark.parametrize("change", [{}, {"a": 0.5, "h0": 0.25}])
def test_linear_scan_vjp_gives_what_it_gives_for_numpy(fields, change):
    arguments = LinearGradientProblem(LinearProblem(**{"values": "real", **fields}), LAID, LAID).arguments() | change
    if arguments["h"].dtype.kind != "c":
        arguments["grad_dtype"] = "float16"
    with jax.enable_x64():
        arrays, options = split(arguments)
        found = jax.jit(functools.partial(interop.linear_scan_vjp, **options))(**arrays)
    for x, expected in zip(found, cuscan.linear_scan_vjp(**arguments), strict=True):
        assert (x is None) == (expected is None)
        assert x is None or (x.dtype, x.shape) == (expected.dtype, expected.shape)
        np.testing.assert_array_equal(x, expected)
    with pytest.raises(ValueError, match="grad_h or grad_last_state must be given"):
        interop.linear_scan_vjp(0.5, jnp.ones(3))


def test_a_gate_that_jit_made_a_tracer_of():
    b = np.arange(6, dtype=np.float32)
    np.testing.assert_array_equal(jax.jit(interop.linear_scan)(0.5, b), cuscan.linear_scan(np.float32(0.5), b))
    slope = jax.grad(lambda gate: interop.linear_scan(gate, b).sum())(0.5)
    h = cuscan.linear_scan(0.5, b)
    np.testing.assert_array_equal(slope, cuscan.linear_scan_vjp(np.full(1, 0.5, "f"), h, np.ones(6, "f")).a[0])


@pytest.mark.parametrize("mapped", [("a", "b", "h0"), ("b",), ("a", "mask")])
@pytest.mark.parametrize("offsets", [None, [0, 4, 4, 9]], ids=["rows", "packed"])
def test_linear_vmap(mapped, offsets):
    rng = np.random.default_rng(0)
    shapes = {"a": (2, 1, 4), "b": (2, 9, 4), "h0": (2, 4) if offsets is None else (3, 2, 4)}
    stacked = {name: rng.integers(-2, 3, (3, *shape)).astype("float32") for name, shape in shapes.items()}
    stacked["mask"] = rng.random((3, 9, 1)) < 0.7
    x = {name: value if name in mapped else value[0] for name, value in stacked.items()}
    axes = {name: 0 if name in mapped else None for name in x}
    packed = {} if offsets is None else {"cu_seqlens": np.array(offsets)}

    def gradients_of(x):
        def loss(inputs):
            h, last = interop.linear_scan(**(x | inputs), **packed, axis=1, return_last_state=True)
            return h.sum() + (last * last).sum(), (h, last)

        return jax.grad(loss, has_aux=True)({name: x[name] for name in shapes})

    found = jax.jit(jax.vmap(gradients_of, (axes,)))(x)
    one = jax.jit(gradients_of)
    for i in range(3):
        expected = one({name: value[i] if name in mapped else value for name, value in x.items()})
        jax.tree.map(lambda x, value, i=i: np.testing.assert_array_equal(x[i], value), found, expected)


def test_linear_errors_are_raised_while_tracing():
    b = jnp.ones((2, 9))
    for arguments, kind, message in (
        ({"axis": 2}, ValueError, r"axis must be in \[-2, 2\)"),
        ({}, ValueError, "axis must be given for b of 2 dimensions"),
        ({"axis": 1, "h0": jnp.ones(3)}, ValueError, "h0 must have shape b's shape without axis"),
        ({"axis": 1, "a": jnp.ones((2, 9), "float16")}, TypeError, "a must be b's float32, got float16"),
        ({"axis": 1, "a": 1j}, TypeError, "a is complex and b is float32"),
        ({"axis": 1, "mask": True}, TypeError, "mask must be a"),
        ({"axis": 1, "out": b}, TypeError, "out must be None"),
        ({"axis": 1, "cu_seqlens": np.array([0, 10])}, ValueError, "cu_seqlens must lie in"),
    ):
        with pytest.raises(kind, match=message):
            jax.eval_shape(lambda b, given=arguments: interop.linear_scan(**{"a": 0.5, "b": b, **given}), b)
    with pytest.raises(NotImplementedError, match="second derivatives of linear_scan are not supported"):
        jax.grad(lambda b: jax.grad(lambda b: (interop.linear_scan(0.5, b) ** 2).sum())(b).sum())(b[0])


# --- public functions --------------------------------------------------------------------------------------------


def test_public_functions_take_jax_arrays_and_tracers():
    u = jnp.linspace(0.1, 1, 72).reshape(2, 9, 4)
    delta = u[::-1]
    y, last = cuscan.selective_scan(u, delta, -A, B, B, return_last_state=True)
    for x, expected in zip((y, last), interop.selective_scan(u, delta, -A, B, B, return_last_state=True), strict=True):
        assert isinstance(x, jax.Array)
        np.testing.assert_array_equal(x, expected)
    gradient = jax.jit(jax.grad(lambda u: cuscan.selective_scan(u, np.asarray(delta), -A, B, B).sum()))(u)
    found = cuscan.selective_scan_vjp(u, delta, -A, B, B, grad_out=jnp.ones_like(u))
    np.testing.assert_array_equal(gradient, found.u)
    gradient = jax.grad(lambda u: cuscan.linear_scan(0.5, u, axis=1).sum())(u)
    h = cuscan.linear_scan(0.5, u, axis=1)
    np.testing.assert_array_equal(gradient, cuscan.linear_scan_vjp(0.5, h, jnp.ones_like(h), axis=1).b)
    with pytest.raises(TypeError, match=r"interop\.jax\.selective_state_update"):
        cuscan.selective_state_update(jnp.ones((2, 4, 3)), u[:, 0], u[:, 0], A, B[:, 0], B[:, 0])
    with pytest.raises(TypeError, match="delta must be a JAX array, or a NumPy array beside some, got list"):
        cuscan.selective_scan(u, [1.0], A, B, B)


# --- transformations ---------------------------------------------------------------------------------------------


def exact(size=1, marks=(), **fields):
    """Items of one shape whose sums are exact in any order: arrays by name, with a leading axis, and options."""
    of = {"batch": 2, "length": 9, "channels": 4, "state": 3, "values": "exact", **fields}
    of |= dict.fromkeys(("D", "delta_bias", "h0"), LAID)
    items = []
    for seed in range(size):
        arguments = SelectiveGradientProblem(SelectiveProblem(seed=seed, **of), LAID, LAID).arguments()
        items.append({name: x for name, x in arguments.items() if isinstance(x, np.ndarray)})
    arrays = {name: np.stack([item[name] for item in items]) for name in items[0]}
    rng = np.random.default_rng(0)
    arrays |= {name: rng.random((size, of["batch"], 9)) < {"mask": 0.8, "reset": 0.1}[name] for name in marks}
    return arrays, {name: arguments[name] for name in ("layout", "reverse", "delta_limit")}


def scan(options, x):
    given = {name: value for name, value in x.items() if not name.startswith("grad")}
    return interop.selective_scan(**given, **options, return_last_state=True)


def loss(options, x):
    y, last = scan(options, x)
    return (y * x["grad_out"]).sum() + (last * x["grad_last_state"]).sum(), (y, last)


def gradients(function, x):
    """Those of the loss, and the results."""
    inputs = {name: value for name, value in x.items() if name in DIFFERENTIABLE}
    return jax.grad(lambda inputs: function(x | inputs), has_aux=True)(inputs)


@pytest.fixture
def calls(monkeypatch):
    """Names of the functions that JAX called back."""
    names = []

    def count(name, function, **arguments):
        names.append(name)
        return function(**arguments)

    for module, name in ((interop.selective, "selective_scan"), (interop.selective_vjp, "selective_scan_vjp")):
        monkeypatch.setattr(module, name, functools.partial(count, name, getattr(module, name)))
    return names


IN_ROWS = ("u", "delta", "B", "C", "h0", "grad_out", "grad_last_state")
SHORT = {**PACKED, "lengths": (3, 0, 5)}
MARKED = {"marks": ("mask", "reset")}
MAPPED = {  # fields, what is mapped, and calls forward and backward for 3 items
    "rows": ({}, IN_ROWS, 1, 1),
    "rows, bdl": ({"layout": "bdl", "groups": 2, "reverse": True}, IN_ROWS, 1, 1),
    "one input": ({}, ("u",), 1, 1),
    "the state": ({"groups": 1}, ("h0",), 1, 1),
    "everything": ({}, (*IN_ROWS, "A", "D", "delta_bias"), 1, 1),
    "everything, bdl": ({"layout": "bdl", "groups": 2}, (*IN_ROWS, "A", "D", "delta_bias"), 1, 1),
    "a parameter": ({"constant": "B"}, ("A",), 1, 1),
    "constant B and C": ({"constant": "BC", "layout": "bdl"}, IN_ROWS, 1, 1),
    "marks": (MARKED, (*IN_ROWS, "mask", "reset"), 1, 3),
    "the same marks": (MARKED, IN_ROWS, 1, 1),
    "marks and a parameter": (MARKED, ("mask", "D"), 3, 3),
    "packed": (SHORT, IN_ROWS, 1, 1),
    "offsets": (SHORT, (*IN_ROWS, "cu_seqlens"), 3, 3),
}


@pytest.mark.parametrize(("fields", "mapped", "forward", "backward"), MAPPED.values(), ids=MAPPED)
def test_vmap(calls, fields, mapped, forward, backward):
    stacked, options = exact(3, **fields)
    if "cu_seqlens" in mapped:
        stacked["cu_seqlens"] = np.array([[0, 3, 3, 9], [1, 1, 4, 5], [0, 0, 0, 9]], np.int32)
    x = {name: values if name in mapped else values[0] for name, values in stacked.items()}
    axes = ({name: 0 if name in mapped else None for name in x},)
    items = [{name: value[i] if name in mapped else value for name, value in x.items()} for i in range(3)]
    of_one = jax.jit(functools.partial(gradients, functools.partial(loss, options)))
    known = jax.tree.map(lambda *items: np.stack(items), *map(of_one, items))

    calls.clear()
    found = jax.jit(jax.vmap(of_one, axes))(x)
    assert calls == ["selective_scan"] * forward + ["selective_scan_vjp"] * backward
    jax.tree.map(np.testing.assert_array_equal, found, known)

    def loss_of_all(x):
        losses, results = jax.vmap(functools.partial(loss, options), axes)(x)
        return losses.sum(), results

    found, results = jax.jit(functools.partial(gradients, loss_of_all))(x)
    jax.tree.map(np.testing.assert_array_equal, results, known[1])
    for name, expected in known[0].items():
        assert expected.any()
        np.testing.assert_array_equal(found[name], expected if name in mapped else expected.sum(0))


def test_vmap_of_vmap(calls):
    stacked, options = exact(6)
    of_one = jax.jit(functools.partial(gradients, functools.partial(loss, options)))
    known = [of_one({name: x[i] for name, x in stacked.items()}) for i in range(6)]
    calls.clear()
    # The outer one maps an axis in the middle.
    nested = {name: np.moveaxis(x.reshape(2, 3, *x.shape[1:]), 0, -1) for name, x in stacked.items()}
    found = jax.jit(jax.vmap(jax.vmap(of_one), -1))(nested)
    assert calls == ["selective_scan", "selective_scan_vjp"]
    for i, one in zip(np.ndindex(2, 3), known, strict=True):
        jax.tree.map(lambda x, expected, i=i: np.testing.assert_array_equal(x[i], expected), found, one)


TRANSFORMED = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "checkpoint in jit": lambda f: jax.jit(jax.checkpoint(f)),
    "scan": lambda f: lambda x: jax.lax.scan(lambda total, _: (total + f(x), None), 0.0, None, length=1)[0],
    "cond": lambda f: lambda x: jax.lax.cond(x["u"].sum() < 1e9, f, lambda _: 0.0, x),
}


@pytest.mark.parametrize("transform", TRANSFORMED.values(), ids=TRANSFORMED)
def test_the_gradient_is_the_same_under(transform):
    stacked, options = exact(**MARKED)
    x = {name: values[0] for name, values in stacked.items()}
    inputs = {name: value for name, value in x.items() if name in DIFFERENTIABLE}

    def loss_of(x):
        return loss(options, x)[0]

    expected = jax.grad(lambda inputs: loss_of(x | inputs))(inputs)
    found = jax.grad(lambda inputs: transform(loss_of)(x | inputs))(inputs)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_marks_have_no_gradient():
    stacked, options = exact(**SHORT, **MARKED)
    x = {name: values[0] for name, values in stacked.items()}
    _, pull = jax.vjp(functools.partial(scan, options), x)
    (found,) = pull((x["grad_out"], x["grad_last_state"]))
    for name in ("mask", "reset", "cu_seqlens"):
        assert (found[name].dtype, found[name].shape) == (jax.dtypes.float0, x[name].shape)


def test_what_is_compiled_for_a_number_is_not_used_for_another_that_is_equal():
    b = -jnp.zeros(1)
    signs = [bool(np.signbit(interop.linear_scan(gate, b, 1.0)[0])) for gate in (0.0, -0.0, 0.0)]
    assert signs == [False, True, False]


# --- errors ------------------------------------------------------------------------------------------------------

U, A, B = jax.ShapeDtypeStruct((2, 9, 4), "float32"), jnp.ones((4, 3)), jnp.ones((2, 9, 3))
WRONG = {
    "a shape": (ValueError, r"delta must have shape u's \(batch, length, channels\) = \(2, 9, 4\), got", {"delta": A}),
    "a layout": (ValueError, "its axes are in the order of layout='bdl'", {"B": B.swapaxes(1, 2)}),
    "a type": (TypeError, "z must be u's float32, got float16", {"z": jnp.ones((2, 9, 4), "float16")}),
    "no mask": (TypeError, "mask must be bool, got float32", {"mask": jnp.ones((2, 9))}),
    "a state": (ValueError, r"h0 must have shape \(batch, channels, state\)", {"h0": jnp.ones((2, 4, 4))}),
    "a flag": (TypeError, "reverse must be True or False", {"reverse": A}),
    "limits": (ValueError, "lowest <= highest", {"delta_limit": (2, 1)}),
    "a number": (TypeError, "D must be an array, got float", {"D": 1.0}),
    "nothing": (TypeError, "A must be an array, got NoneType", {"A": None}),
    "a list": (TypeError, "D must be a JAX array, or a NumPy array beside some, got list", {"D": [1.0] * 4}),
    "out": (TypeError, "out must be None: JAX arrays cannot be written to", {"out": jnp.ones((2, 9, 4))}),
    "out_dtype": (TypeError, "out_dtype must be float16", {"out_dtype": "complex64"}),
    "offsets": (ValueError, "cu_seqlens must not descend, got 1 at 2 after 5",
                {"cu_seqlens": np.array([0, 5, 1]), "batch": 1}),
    "offsets of JAX": (ValueError, r"cu_seqlens must lie in \[0, 9\], got 0 to 10",
                       {"cu_seqlens": jnp.array([0, 10]), "batch": 1}),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "message", "change"), WRONG.values(), ids=WRONG)
def test_errors_are_raised_while_tracing(calls, kind, message, change):
    batch = change.get("batch", 2)
    given = {"A": A, "B": B[:batch], "C": B[:batch]} | {n: x for n, x in change.items() if n != "batch"}

    def traced(u):
        interop.selective_scan(u, **{"delta": u} | given)

    with pytest.raises(kind, match=message):
        jax.eval_shape(traced, jax.ShapeDtypeStruct((batch, 9, 4), "float32"))
    assert calls == []


def test_offsets_that_are_traced_are_checked_when_they_are_there():
    u, B = jnp.ones((1, 9, 4)), jnp.ones((1, 9, 3))
    compiled = jax.jit(lambda offsets: interop.selective_scan(u, u, A, B, B, cu_seqlens=offsets))
    assert compiled(jnp.array([0, 9])).shape == u.shape
    with pytest.raises(jax.errors.JaxRuntimeError, match="cu_seqlens must not descend"):
        jax.block_until_ready(compiled(jnp.array([0, 5, 1])))


def test_what_has_no_gradient_says_so():
    u = jnp.ones((2, 9, 4))

    def once(u):
        return interop.selective_scan(u, u, A, B, B).sum()

    with pytest.raises(NotImplementedError, match="second derivatives of selective_scan are not supported"):
        jax.grad(lambda u: jax.grad(once)(u).sum())(u)
    with pytest.raises(NotImplementedError, match="the states of selective_scan have no gradient"):
        jax.grad(lambda u: interop.selective_scan(u, u, A, B, B, return_states=True)[1].sum())(u)
    with pytest.raises(NotImplementedError, match="gradients of selective_state_update are not supported"):
        jax.grad(lambda x: interop.selective_state_update(jnp.ones((2, 4, 3)), x, x, A, B[:, 0], B[:, 0])[0].sum())(
            u[:, 0]
        )
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(once, (u,), (u,))
    saved = jax.grad(lambda u: interop.selective_scan(u, u, A, B, B, return_states=True)[0].sum())(u)
    np.testing.assert_array_equal(saved, jax.grad(once)(u))


@pytest.mark.parametrize("name", interop.__all__)
def test_arguments_are_those_of_the_public_function(name):
    ours, public = (inspect.signature(getattr(module, name)).parameters for module in (interop, cuscan))
    assert list(ours) == list(public)
    assert [(x.kind, x.default) for x in ours.values()] == [(x.kind, x.default) for x in public.values()]


# --- selective_scan_vjp ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [CASES["groups, bdl, reverse"], CASES["complex, packed"]], ids=["real", "complex"])
def test_selective_scan_vjp_gives_what_it_gives_for_numpy(fields):
    arguments = SelectiveGradientProblem(problem(**fields), LAID, LAID, LAID, grad_dtype="float16").arguments()
    arrays, options = split(arguments)
    found = jax.jit(functools.partial(interop.selective_scan_vjp, **options))(**arrays)
    for x, expected in zip(found, cuscan.selective_scan_vjp(**arguments), strict=True):
        assert (x is None) == (expected is None)
        assert x is None or (x.dtype, x.shape) == (expected.dtype, expected.shape)
        np.testing.assert_array_equal(x, expected)
    with pytest.raises(ValueError, match="grad_out or grad_last_state must be given"):
        interop.selective_scan_vjp(**{**arrays, "grad_out": None, "grad_last_state": None}, **options)


# --- selective_state_update --------------------------------------------------------------------------------------


def step(size=1, seed=0):
    """Arrays of a step by name, with a leading axis."""
    rng = np.random.default_rng(seed)
    shapes = {"state": (5, 4, 3), "x": (5, 4), "dt": (5, 4), "A": (4, 3), "B": (5, 3), "C": (5, 2, 3), "D": (4,)}
    return {name: rng.standard_normal((size, *shape)).astype("float32") for name, shape in shapes.items()} | {
        "B": rng.standard_normal((size, 5, 2, 3)).astype("float32")
    }


def stepped(x, **options):
    """What NumPy gives."""
    state = x["state"].copy()
    return cuscan.selective_state_update(**{**x, "state": state}, **options), state


@pytest.mark.parametrize("slots", [None, [4, -1, 0, 7, 2]], ids=["rows", "slots"])
def test_state_update_gives_the_new_state_and_leaves_the_old_one(slots):
    x = {name: value[0] for name, value in step().items()}
    options = {"dt_softplus": True, "dt_limit": (0.1, 1.0), "out_dtype": "float16"}
    slots = {} if slots is None else {"state_batch_indices": np.array(slots, np.int32)}
    expected = stepped(x | slots, **options)
    state = jnp.asarray(x["state"])
    update = functools.partial(interop.selective_state_update, **options)
    for function in (update, jax.jit(update), jax.jit(update, donate_argnames="state")):
        given = {**x, **slots, "state": state}
        for found, value in zip(function(**given), expected, strict=True):
            assert found.dtype == value.dtype
            np.testing.assert_array_equal(found, value)
        assert state.is_deleted() or (state == x["state"]).all()
    assert state.is_deleted()


def test_a_donated_state_is_changed_in_place():
    x = {name: jnp.asarray(value[0]) for name, value in step().items()}
    update = jax.jit(interop.selective_state_update, donate_argnames="state")
    where = x["state"].unsafe_buffer_pointer()
    assert update(**x)[1].unsafe_buffer_pointer() == where


def test_steps_in_a_scan():
    x = {name: value[0] for name, value in step().items()}
    state, several = x.pop("state"), step(6, seed=1)["x"]

    def one(state, inputs):
        y, state = interop.selective_state_update(state, **{**x, "x": inputs})
        return state, y

    last, y = jax.lax.scan(one, state, several)
    for inputs, found in zip(several, y, strict=True):
        expected, state = stepped({**x, "x": inputs, "state": state})
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(last, state)


@pytest.mark.parametrize("mapped", [("state", "x", "dt", "B", "C"), ("A", "x"), ("state", "state_batch_indices")])
@pytest.mark.parametrize("with_slots", [False, True])
def test_state_update_under_vmap(mapped, with_slots):
    stacked = step(3)
    if with_slots or "state_batch_indices" in mapped:
        stacked["state_batch_indices"] = np.array([[4, -1, 0, 7, 2], [0, 1, 2, 3, 4], [4, 3, 2, 1, -7]], np.int32)
    x = {name: values if name in mapped else values[0] for name, values in stacked.items()}
    axes = [0 if name in mapped else None for name in x]
    found = jax.vmap(lambda *values: interop.selective_state_update(**dict(zip(x, values, strict=True))), axes)(
        *x.values()
    )
    for i in range(3):
        expected = stepped({name: value[i] if name in mapped else value for name, value in x.items()})
        for values, value in zip(found, expected, strict=True):
            np.testing.assert_array_equal(values[i], value)


def test_state_update_checks_while_tracing():
    x = {name: jnp.asarray(value[0]) for name, value in step().items()}
    for change, kind, message in (
        ({"x": x["dt"][:, :3]}, ValueError, "A must have shape"),
        ({"state": x["state"].astype("int32")}, TypeError, "state must be float32, bfloat16 or float16, got int32"),
        ({"dt_softplus": 1}, TypeError, "dt_softplus must be True or False"),
        ({"out": x["x"]}, TypeError, "out must be None"),
        ({"B": 1.0}, TypeError, "B must be an array, got float"),
    ):
        with pytest.raises(kind, match=message):
            jax.eval_shape(
                lambda state, change=change: interop.selective_state_update(**{**x, "state": state, **change}),
                x["state"],
            )


# --- a GPU -------------------------------------------------------------------------------------------------------


class FakeCupy:
    """What is asked of CuPy to see XLA's buffers, with NumPy's memory for the GPU's."""

    ndarray = np.ndarray

    def __init__(self):
        self.cuda = self.Stream = self
        self.current = []

    def UnownedMemory(self, address, size, owner, device):  # noqa: N802 CuPy's name
        assert (owner.array.ctypes.data, owner.array.nbytes, device) == (address, size, 3)
        return owner.array

    def MemoryPointer(self, memory, offset):  # noqa: N802 CuPy's name
        return memory[offset:].data

    def Device(self, number):  # noqa: N802 CuPy's name
        return self.entered(("device", number))

    def from_external(self, stream):
        return self.entered(("stream", stream.__cuda_stream__()))

    @contextlib.contextmanager
    def entered(self, what):
        self.current.append(what)
        yield
        self.current.remove(what)


class FakeBuffer:
    """XLA's buffer on a GPU, or what has its stream."""

    stream = 1234

    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype
        self.__cuda_array_interface__ = {"data": (array.ctypes.data, True), "typestr": "<V2", "shape": array.shape}

    def __dlpack_device__(self):
        return 2, 3


def test_buffers_of_a_gpu_are_seen_where_they_are(monkeypatch):
    x = {name: value[0] for name, value in step().items()}
    y, state = stepped(x)
    results = [FakeBuffer(np.zeros_like(y)), FakeBuffer(x["state"])]
    cupy = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    function = interop._StateUpdate({"dt_softplus": False, "dt_limit": None, "out_dtype": y.dtype})

    def update(**arguments):
        assert cupy.current == [("device", 3), ("stream", (0, 1234))]
        monkeypatch.delitem(sys.modules, "cupy")
        return cuscan.selective_state_update(**arguments)

    monkeypatch.setattr(interop.state_update, "selective_state_update", update)
    interop._Callback(function, tuple(x), ("y", "state"))(FakeBuffer, results, *map(FakeBuffer, x.values()))
    np.testing.assert_array_equal(results[0].array, y)
    np.testing.assert_array_equal(x["state"], state)
    assert cupy.current == []


@pytest.fixture
def gpu(cuda_executor):
    try:
        device = jax.devices("cuda")[0]
    except RuntimeError as error:
        pytest.skip(f"no CUDA device for JAX: {str(error).split(':')[0]}")
    with jax.default_device(device):
        yield cuda_executor.xp


def test_a_callback_waits_for_what_xla_does_before_it_and_xla_for_the_callback(gpu):
    shape = (1, 1 << 17, 64)  # cut into chunks, with scratch
    rng = gpu.random.RandomState(0)
    base, delta = (rng.uniform(size=shape).astype("float32") for _ in range(2))
    B = rng.uniform(size=(*shape[:2], 16)).astype("float32")
    A = -rng.uniform(size=(64, 16)).astype("float32")
    inputs = [jnp.from_dlpack(x) for x in (base, delta, A, B)]

    @jax.jit
    def chain(scale, u, delta, A, B):
        for _ in range(3):
            u = interop.selective_scan(scale * u, delta, A, B, B) / 1024
        return u

    found = [chain(float(i), *inputs) for i in range(1, 9)]
    for i, y in enumerate(found, start=1):
        u = base
        for _ in range(3):
            u = cuscan.selective_scan(gpu.float32(i) * u, delta, A, B, B) / 1024
        np.testing.assert_array_equal(np.asarray(y), gpu.asnumpy(u))


def test_a_state_on_the_gpu_is_changed_in_place_if_it_is_donated(gpu):
    x = {name: value[0] for name, value in step().items()}
    state = gpu.asarray(x["state"])
    y = cuscan.selective_state_update(state, **{n: gpu.asarray(v) for n, v in x.items() if n != "state"})
    given = {name: jnp.asarray(value) for name, value in x.items()}
    update = jax.jit(interop.selective_state_update, donate_argnames="state")
    for _ in range(2):
        kept = {**given, "state": jnp.array(x["state"])}
        where = kept["state"].unsafe_buffer_pointer()
        found = update(**kept)
        assert found[1].unsafe_buffer_pointer() == where
        np.testing.assert_array_equal(np.asarray(found[0]), gpu.asnumpy(y))
        np.testing.assert_array_equal(np.asarray(found[1]), gpu.asnumpy(state))
    kept = jnp.array(x["state"])
    interop.selective_state_update(**{**given, "state": kept})
    np.testing.assert_array_equal(np.asarray(kept), x["state"])
