"""cuscan.interop.torch: problems as elsewhere, gradients by autograd, and what PyTorch does with operators."""

import contextlib
import doctest
import functools
import inspect
import math
import random
import sys
import types

import numpy as np
import pytest
import test_calls
from conftest import H200

import cuscan
from cuscan import _arrays, _compile
from cuscan._plan import Schedule, forced
from cuscan.testing import LinearProblem, problems

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
interop = pytest.importorskip("cuscan.interop.torch", reason="PyTorch is not installed")
functional = torch.nn.functional

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
DIFFERENTIABLE = cuscan.SelectiveGradients._fields


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Threads cost more than they do for tensors as small as these."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=["cpu", "cuda"])
def device(request):
    if request.param == "cuda":
        request.getfixturevalue("cuda_executor")
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device for PyTorch")
    return request.param


@pytest.fixture
def gpu(cuda_executor):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device for PyTorch")
    return cuda_executor.xp


def tensor_of(x, device="cpu"):
    """A copy with the strides of `x`, as far as PyTorch has such strides."""
    strides = [abs(s) for s in x.strides]
    values = x[tuple(slice(None if s else 1) for s in strides)]
    copy = interop._Cpu.tensor(np.array(values))
    if all(s % x.itemsize == 0 for s in strides):
        made = torch.empty_strided(copy.shape, [s // x.itemsize for s in strides], dtype=copy.dtype, device=device)
        copy = made.copy_(copy)
    return copy.to(device).expand(x.shape)


def array_of(x):
    return None if x is None else interop._Cpu.array(x.detach().cpu())


class OnTorch:
    """Runs problems on tensors. Gradients of selective_scan are those that autograd gives."""

    def __init__(self, device):
        self.device = device

    def __call__(self, function, arguments):
        made = {id(x): tensor_of(x, self.device) for x in arguments.values() if isinstance(x, np.ndarray)}
        given = {name: made.get(id(x), x) for name, x in arguments.items()}
        by_autograd = function is cuscan.selective_scan_vjp and given["grad_dtype"] is None
        results = self.gradients(given) if by_autograd else function(**given)
        return tuple(map(array_of, results)) if isinstance(results, tuple) else array_of(results)

    @staticmethod
    def gradients(given):
        grad_y, grad_last = (given.pop(name) for name in ("grad_out", "grad_last_state"))
        del given["states"], given["grad_dtype"]
        inputs = [given[name].requires_grad_() for name in DIFFERENTIABLE if given[name] is not None]
        out_dtype = None if grad_y is None else grad_y.dtype
        y, last = cuscan.selective_scan(**given, return_last_state=True, out_dtype=out_dtype)
        pairs = [(x, grad) for x, grad in ((y, grad_y), (last, grad_last)) if grad is not None]
        outputs, gradients = zip(*pairs, strict=True)
        return torch.autograd.grad(outputs, inputs, gradients)


# --- values and gradients ----------------------------------------------------------------------------------------


def drawn(seed, count, gradients, largest=600):
    for i in range(count):
        source = random.Random(seed * 1000 + i)
        draw = problems.draw_selective if i % 2 else problems.draw_linear
        problem = draw(source.choice, source.randint, largest=largest)
        yield problems.draw_gradients(source.choice, source.randint, problem) if gradients else problem


@pytest.mark.parametrize("gradients", [False, True], ids=["scans", "gradients"])
def test_problems(device, gradients):
    """Layouts, types, options and edge sizes, by the public functions' names."""
    for problem in drawn(1, 60, gradients):
        problem.check(OnTorch(device))


def inputs(dtype=F32, batch=2, length=40, channels=4, state=3, device="cpu", seed=0, **replaced):
    """Arguments of selective_scan, of all kinds."""
    random = torch.Generator().manual_seed(seed)

    def uniform(*shape):
        return torch.rand(shape, generator=random, dtype=dtype).to(device)

    sequence, couple = (batch, length, channels), (batch, length, state)
    made = {"u": uniform(*sequence), "delta": uniform(*sequence), "A": -uniform(channels, state)}
    made |= {"B": uniform(*couple), "C": uniform(*couple), "D": uniform(channels), "z": uniform(*sequence)}
    made |= {"delta_bias": uniform(channels), "h0": uniform(batch, channels, state)}
    return made | replaced


OPTIONS = {"delta_softplus": True, "return_last_state": True}


def leaves(x):
    return {name: value.detach().clone().requires_grad_() for name, value in x.items()}


def plain_scan(u, delta, A, B, C, D=None, z=None, delta_bias=None, h0=None):
    """The recurrence step by step in torch; delta_softplus is on. Gives y and the last state."""
    delta = functional.softplus(delta if delta_bias is None else delta + delta_bias)
    h = A.new_zeros(len(u), *A.shape) if h0 is None else h0
    y = []
    for t in range(u.shape[1]):
        step = delta[:, t, :, None]
        h = torch.exp(step * A) * h + step * u[:, t, :, None] * B[:, t, None]
        y.append((h * C[:, t, None]).sum(-1))
    y = torch.stack(y, 1)
    y = (2 * y.real if A.is_complex() else y) + (0 if D is None else D * u)
    return (y if z is None else y * functional.silu(z)), h


def test_complex_gradients_are_those_of_the_plain_recurrence():
    made = inputs()
    turn = torch.polar(torch.tensor(1.0), torch.tensor(0.4))
    made |= {name: made[name] * turn for name in ("A", "B", "C", "h0")}
    ours, exact = leaves(made), leaves({n: x.to(torch.complex128 if x.is_complex() else F64) for n, x in made.items()})
    for results, given in ((cuscan.selective_scan(**ours, **OPTIONS), ours), (plain_scan(**exact), exact)):
        y, last = results
        (y.square().sum() + (last * torch.arange(3)).real.sum() + last.imag.square().sum()).backward()
        assert all(x.grad is not None for x in given.values())
    for name, x in ours.items():
        assert x.grad.dtype == x.dtype
        torch.testing.assert_close(x.grad, exact[name].grad.to(x.dtype), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "slow"])
def test_gradcheck(fast):
    check = functools.partial(torch.autograd.gradcheck, fast_mode=fast)
    x = leaves(inputs(F64, batch=1, length=4, channels=2, state=2))
    assert check(lambda *args: cuscan.selective_scan(**dict(zip(x, args, strict=True)), **OPTIONS), (*x.values(),))
    a, b, h0 = (torch.rand(shape, dtype=F64, requires_grad=True) for shape in ((2, 5), (2, 5), (2,)))
    linear = functools.partial(cuscan.linear_scan, axis=1, return_last_state=True)
    assert check(linear, (a, b, h0))
    assert check(lambda a, b: linear(a, b, 0.5, reverse=True), (a[:1].detach().requires_grad_(), b))
    assert check(lambda b: linear(0.5, b), (b,))
    complexes = [torch.rand(shape, dtype=torch.complex128) for shape in ((2, 5), (2, 5), (2,))]
    assert check(linear, [x.conj().requires_grad_() for x in complexes])


@pytest.mark.parametrize("of", DIFFERENTIABLE)
def test_one_input_that_requires_a_gradient_gets_the_same_as_with_all(of):
    everything, alone = leaves(inputs()), inputs()
    alone[of].requires_grad_()
    for x in (everything, alone):
        y, last = cuscan.selective_scan(**x, **OPTIONS)
        (y.sum() + last.square().sum()).backward()
    assert [name for name, x in alone.items() if x.grad is not None] == [of]
    assert torch.equal(alone[of].grad, everything[of].grad)


def test_the_last_state_alone_has_gradients():
    x = leaves(inputs(F64))
    cuscan.selective_scan(**x, **OPTIONS)[1].sum().backward()
    exact = leaves(inputs(F64))
    plain_scan(**exact)[1].sum().backward()
    for name, value in x.items():
        expected = exact[name].grad
        torch.testing.assert_close(value.grad, torch.zeros_like(value) if expected is None else expected)


@pytest.mark.parametrize("out_dtype", [None, torch.float16, F64, "float32", np.float64])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_gradients_have_their_inputs_types_whatever_the_output_is(dtype, out_dtype):
    name = str(dtype if out_dtype is None else interop._torch_dtype(out_dtype)).removeprefix("torch.")
    x = leaves(inputs(F32) | {n: inputs()[n].to(dtype) for n in ("u", "z", "B", "C", "delta")})
    y = cuscan.selective_scan(**x, delta_softplus=True, out_dtype=out_dtype)
    h = cuscan.linear_scan(0.5, x["u"], axis=1, out_dtype=out_dtype)
    assert str(y.dtype) == str(h.dtype) == f"torch.{name}"
    (y.sum() + h.sum()).backward()
    assert all(value.grad.dtype == value.dtype for value in x.values())
    exact = leaves({n: value.detach().to(F64) for n, value in x.items()})
    (plain_scan(**exact)[0].sum() + cuscan.linear_scan(0.5, exact["u"], axis=1).sum()).backward()
    for n, value in x.items():
        torch.testing.assert_close(value.grad.to(F64), exact[n].grad, rtol=0.02, atol=0.02)


def test_autograd_of_linear_scan_is_linear_scan_vjp():
    for problem in drawn(2, 40, gradients=False):
        if not isinstance(problem, LinearProblem) or problem.out_dtype is not None:
            continue
        given = {name: x for name, x in problem.arguments().items() if name not in ("out", "return_last_state")}
        h, last = cuscan.linear_scan(**given, return_last_state=True)
        random = np.random.default_rng(0)
        grad_h, grad_last = (random.standard_normal(x.shape).astype(x.dtype) for x in (h, last))
        del given["out_dtype"]
        vjp = {name: x for name, x in given.items() if name != "b"}
        expected = cuscan.linear_scan_vjp(h=h, grad_h=grad_h, grad_last_state=grad_last, **vjp)
        made = {name: tensor_of(x) if isinstance(x, np.ndarray) else x for name, x in given.items()}
        wanted = {n: made[n].requires_grad_() for n in ("a", "b", "h0") if isinstance(made[n], torch.Tensor)}
        results = cuscan.linear_scan(**made, return_last_state=True)
        found = torch.autograd.grad(results, list(wanted.values()), [tensor_of(x) for x in (grad_h, grad_last)])
        for name, x in zip(wanted, found, strict=True):
            np.testing.assert_array_equal(array_of(x), getattr(expected, name))


def test_nothing_flows_into_masks_resets_and_offsets():
    x = leaves(inputs(batch=1))
    marks = {"mask": torch.rand(1, 40) < 0.7, "reset": torch.rand(1, 40) < 0.1}
    marks["cu_seqlens"] = torch.tensor([0, 7, 7, 40])
    x["h0"] = torch.zeros(3, 4, 3, requires_grad=True)
    y, last = cuscan.selective_scan(**x, **marks, **OPTIONS)
    (y.sum() + last.sum()).backward()
    masked = ~marks["mask"]
    assert masked.any()
    for name in ("u", "delta", "B", "C", "z"):
        assert (x[name].grad[masked] == 0).all()
        assert (x[name].grad != 0).any()
    assert (x["h0"].grad[1] == 1).all()  # the empty sequence's


# --- autograd ----------------------------------------------------------------------------------------------------


class Calls(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the calls of cuscan's operators: (name, arguments)."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator.namespace == "cuscan":
            self.calls.append((operator._schema.name.partition("::")[2], args))
        return operator(*args, **kwargs or {})


def test_states_are_saved_only_where_a_gradient_will_be_needed():
    states = interop._SELECTIVE.fresh.names.index("return_states")
    plain, differentiable = inputs(), leaves(inputs())
    with Calls() as seen:
        cuscan.selective_scan(**plain)
        with torch.no_grad():
            cuscan.selective_scan(**differentiable)
        cuscan.selective_scan(**differentiable).sum().backward()
    assert [name for name, _ in seen.calls] == ["selective_scan"] * 3 + ["selective_scan_vjp"]
    assert [args[states] for name, args in seen.calls if name == "selective_scan"] == [False, False, True]
    assert isinstance(seen.calls[-1][1][interop._SELECTIVE_VJP.names.index("states")], torch.Tensor)
    y, states = cuscan.selective_scan(**differentiable, return_states=True)
    assert (y.requires_grad, states.requires_grad) == (True, False)
    assert states.shape == (2, -(-40 // cuscan.STATE_INTERVAL), 4, 3)


def test_second_derivatives_are_refused_by_name():
    x = leaves(inputs())
    (grad,) = torch.autograd.grad(cuscan.selective_scan(**x).sum(), x["u"], create_graph=True)
    with pytest.raises(NotImplementedError, match="selective_scan has no second derivative"):
        grad.sum().backward()
    (grad,) = torch.autograd.grad(cuscan.linear_scan(0.5, x["u"], axis=1).sum(), x["u"], create_graph=True)
    with pytest.raises(NotImplementedError, match="linear_scan has no second derivative"):
        grad.sum().backward()


def test_a_tensor_that_was_saved_and_then_changed_is_noticed():
    x = leaves(inputs())
    u = x["u"] * 1
    y = cuscan.selective_scan(**{**x, "u": u})
    u.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    state = (x["h0"] * 1).detach()
    y = cuscan.selective_scan(**{**x, "h0": state})
    with torch.no_grad():
        cuscan.selective_state_update(state, *step_of(x))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_checkpoint_recomputes():
    x, again = leaves(inputs()), leaves(inputs())
    cuscan.selective_scan(**x).sum().backward()
    run = torch.utils.checkpoint.checkpoint
    run(lambda: cuscan.selective_scan(**again), use_reentrant=False).sum().backward()
    assert all(torch.equal(value.grad, again[name].grad) for name, value in x.items() if value.grad is not None)


# --- memory ------------------------------------------------------------------------------------------------------

EVERY_DTYPE = [*interop._ITEMS]


@pytest.mark.parametrize("dtype", EVERY_DTYPE, ids=str)
def test_arrays_on_the_cpu_share_memory(dtype):
    x = torch.arange(24).reshape(2, 3, 4).to(dtype)
    for view in (x, x.mT, x[1, ::2, 1:], x[0, 0, 0], x[:, :0], x[:, :1].expand(2, 5, 4)):
        array = interop._Cpu.array(view)
        assert array.dtype.name == str(dtype).removeprefix("torch.")
        assert array.ctypes.data == view.data_ptr() or not array.size
        assert array.shape == view.shape
        np.testing.assert_array_equal(array.astype("complex128"), view.to(torch.complex128).numpy())
        back = interop._Cpu.tensor(array)
        assert back.dtype == dtype
        assert back.data_ptr() == view.data_ptr()
    assert torch.equal(x.requires_grad_(x.is_floating_point()), back.new_tensor(x.tolist()))


def test_conjugate_views_are_seen_as_their_values():
    made = inputs()
    turn = torch.polar(torch.tensor(1.0), torch.tensor(0.4))
    made |= {name: made[name] * turn for name in ("A", "B", "C", "h0")}
    lazy = {name: x.conj() if x.is_complex() else x for name, x in made.items()}
    assert lazy["B"].is_conj()
    for mine, its in zip(
        cuscan.selective_scan(**lazy, **OPTIONS),
        cuscan.selective_scan(**{n: x.resolve_conj() for n, x in lazy.items()}, **OPTIONS),
        strict=True,
    ):
        assert torch.equal(mine, its)


# --- selective_scan_fn -------------------------------------------------------------------------------------------


def turned(x):
    return {n: value.transpose(1, 2) if n in ("u", "delta", "z", "B", "C") else value for n, value in x.items()}


def test_selective_scan_fn_is_mamba_ssms():
    made = inputs()
    del made["h0"]
    expected, expected_last = cuscan.selective_scan(**made, **OPTIONS)
    for given in (turned(made), {name: x.contiguous() for name, x in turned(made).items()}):
        y, last = interop.selective_scan_fn(*given.values(), *OPTIONS.values())
        assert torch.equal(y.transpose(1, 2), expected)
        assert torch.equal(last, expected_last)
        assert y.is_contiguous()
        assert torch.equal(interop.selective_scan_fn(**given, delta_softplus=True), y)
    groups = turned(made)
    groups |= {name: groups[name][:, None].expand(2, 2, 3, 40) for name in ("B", "C")}
    assert torch.equal(interop.selective_scan_fn(**groups, delta_softplus=True), y)
    constant = {**turned(made), "B": -made["A"]}
    y = interop.selective_scan_fn(**constant, delta_softplus=True)
    assert torch.equal(y.transpose(1, 2), cuscan.selective_scan(**{**made, "B": -made["A"]}, delta_softplus=True))


def test_selective_scan_fn_takes_complex_couplings_as_pairs_of_reals():
    made = turned(inputs())
    del made["h0"]
    made["A"] = made["A"] * (1 + 0.5j)
    made |= {name: torch.complex(made[name], made[name].flip(-1)).contiguous() for name in ("B", "C")}
    split = made | {name: torch.view_as_real(made[name]).flatten(-2) for name in ("B", "C")}
    assert split["B"].shape == (2, 3, 80)
    assert torch.equal(interop.selective_scan_fn(**split), interop.selective_scan_fn(**made))


# --- autocast ----------------------------------------------------------------------------------------------------


def test_autocast(device):
    x = leaves(inputs(device=device))
    x["delta_bias"] = x["delta_bias"].detach().to(BF16).requires_grad_()
    names = interop._SELECTIVE.fresh.names
    with torch.autocast(device, BF16), Calls() as seen:
        y, last = cuscan.selective_scan(**x, **OPTIONS)
    dtypes = {name: value.dtype for name, value in zip(names, seen.calls[0][1], strict=True) if name in x}
    low = {"u", "delta", "B", "C", "z"}
    assert dtypes == {name: BF16 if name in low else F32 for name in x}
    assert (y.dtype, last.dtype) == (BF16, F32)
    (y.sum() + last.sum()).backward()
    assert all(value.grad.dtype == value.dtype for value in x.values())


def test_autocast_of_the_others(device):
    x = {name: value.detach() for name, value in inputs(device=device).items()}
    state = x["h0"].clone()
    with torch.autocast(device, BF16):
        assert cuscan.linear_scan(x["u"], x["u"].bfloat16(), x["h0"][:, :, 0].bfloat16(), axis=1).dtype == F32
        assert cuscan.linear_scan(x["u"].bfloat16(), x["u"].bfloat16(), axis=1).dtype == BF16
        assert cuscan.linear_scan(0.5, x["u"], axis=1).dtype == F32
        assert cuscan.selective_state_update(state, *step_of(x)).dtype == BF16
        assert cuscan.selective_scan(**inputs(F64, device=device)).dtype == F64
    assert (state != x["h0"]).any()
    with pytest.raises(TypeError, match="a must be b's bfloat16, got float32"):
        cuscan.linear_scan(x["u"], x["u"].bfloat16(), axis=1)


# --- in place ----------------------------------------------------------------------------------------------------


def step_of(x):
    """Arguments of selective_state_update from x to D."""
    return [x[name][:, 0] if x[name].ndim == 3 else x[name] for name in ("u", "delta", "A", "B", "C", "D")]


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_the_state_is_changed_in_place(device, dtype):
    x = inputs()
    cache = torch.zeros(10, 4, 3, dtype=dtype)
    cache[5] = x["h0"][0]
    slots, step = torch.tensor([5, -1]), step_of(x)
    expected = cache.float().numpy().astype(array_of(cache).dtype)
    y = cuscan.selective_state_update(expected, *map(array_of, step), state_batch_indices=slots.numpy())
    cache, slots, *step = (value.to(device) for value in (cache, slots, *step))
    version = cache._version
    found = cuscan.selective_state_update(cache, *step, state_batch_indices=slots)
    assert cache._version > version
    torch.testing.assert_close(found.cpu(), torch.from_numpy(y))
    torch.testing.assert_close(cache.cpu(), tensor_of(expected))
    assert (cache[5] != 0).all()
    given = torch.empty_like(found)
    assert cuscan.selective_state_update(cache, *step, state_batch_indices=slots, out=given) is given
    assert (given[0] != found[0]).all()


def test_out(device):
    x = inputs(device=device)
    y, last, states = cuscan.selective_scan(**x, **OPTIONS, return_states=True)
    out = torch.empty_like(y)
    results = cuscan.selective_scan(**x, **OPTIONS, return_states=True, out=out)
    assert results[0] is out
    for found, expected in zip(results, (y, last, states), strict=True):
        assert torch.equal(found, expected)
    expected = cuscan.linear_scan(x["delta"], x["u"], axis=1)
    out = x["u"].clone()
    assert cuscan.linear_scan(x["delta"], out, axis=1, out=out) is out
    assert torch.equal(out, expected)


# --- routing and refusals ----------------------------------------------------------------------------------------


def test_what_does_not_go_together_is_refused():
    x, arrays = inputs(), {name: array_of(value) for name, value in inputs().items()}
    with pytest.raises(TypeError, match=r"A must be a torch\.Tensor like the others, got ndarray"):
        cuscan.selective_scan(**{**x, "A": arrays["A"]})
    with pytest.raises(TypeError, match=r"u must be a torch\.Tensor like the others, got ndarray"):
        cuscan.selective_scan(**{**arrays, "A": x["A"]})
    with pytest.raises(TypeError, match=r"b must be a torch\.Tensor"):
        cuscan.linear_scan(x["u"], arrays["u"], axis=1)
    with pytest.raises(TypeError, match=r"D must be a torch\.Tensor like the others, got float"):
        cuscan.selective_scan(**{**x, "D": 1.0})
    with pytest.raises(TypeError, match=r"u must be of a type of .*bfloat16.*, got torch\.uint8"):
        cuscan.selective_scan(**{**x, "u": x["u"].to(torch.uint8)})
    with pytest.raises(TypeError, match="u must be float16, bfloat16, float32 or float64, got int64"):
        cuscan.selective_scan(**{**x, "u": x["u"].long()})
    with pytest.raises(ValueError, match="one device, but u is on cpu, A on meta"):
        cuscan.selective_scan(**{**x, "A": x["A"].to("meta")})
    with pytest.raises(ValueError, match=r"B must have shape .*'bdl'"):
        cuscan.selective_scan(**{**x, "B": x["B"].mT})
    with pytest.raises(TypeError, match="delta_softplus must be True or False"):
        cuscan.selective_scan(*x.values())
    with pytest.raises(ValueError, match="out overlaps u"):
        cuscan.selective_scan(**x, out=x["u"])


def test_gradients_that_are_not_there_are_refused():
    x = leaves(inputs())
    with pytest.raises(RuntimeError, match="out= has no gradient"):
        cuscan.selective_scan(**x, out=torch.empty(2, 40, 4))
    with pytest.raises(RuntimeError, match="selective_state_update has no gradient"):
        cuscan.selective_state_update(torch.zeros(2, 4, 3), *step_of(x))
    with torch.inference_mode():
        cuscan.selective_state_update(torch.zeros(2, 4, 3), *step_of(x))


@pytest.mark.parametrize("name", [n for n in interop.__all__ if n != "selective_scan_fn"])
def test_signatures_are_the_public_functions(name):
    ours, public = (inspect.signature(getattr(module, name)).parameters.values() for module in (interop, cuscan))
    assert [(p.name, p.kind, p.default) for p in ours] == [(p.name, p.kind, p.default) for p in public]


def test_vjps_are_plain_computations():
    x = inputs()
    grad = torch.rand(2, 40, 4)
    found = cuscan.selective_scan_vjp(**x, grad_out=grad)
    arrays = {name: array_of(value) for name, value in x.items()}
    for mine, its in zip(found, cuscan.selective_scan_vjp(**arrays, grad_out=grad.numpy()), strict=True):
        np.testing.assert_array_equal(array_of(mine), its)
    assert isinstance(found, cuscan.SelectiveGradients)
    found = cuscan.linear_scan_vjp(0.5, x["u"], grad, axis=1, grad_dtype=F64)
    its = cuscan.linear_scan_vjp(0.5, arrays["u"], grad.numpy(), axis=1, grad_dtype=np.float64)
    assert (found.a, found.h0, found.b.dtype) == (None, None, F64)
    np.testing.assert_array_equal(array_of(found.b), its.b)


def test_examples():
    assert doctest.testmod(interop).failed == 0


# --- operators ---------------------------------------------------------------------------------------------------


class Subclass(torch.Tensor):
    """Nothing of its own."""


def ways(x):
    """Contexts and arguments, and whether torch's dispatcher has anything to do there but autograd."""
    plain = contextlib.nullcontext
    yield plain(), x, False
    yield torch.no_grad(), x, False
    yield torch.inference_mode(), x, False
    yield torch.autocast("cpu", BF16), x, False
    yield plain(), {**x, "A": torch.nn.Parameter(x["A"])}, False
    yield Calls(), x, True
    yield torch.overrides.BaseTorchFunctionMode(), x, True
    yield torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]), x, True
    yield plain(), {**x, "u": x["u"].as_subclass(Subclass)}, True
    yield plain(), {**x, "u": (x["u"] * 1j).conj().imag.detach()}, True


@pytest.mark.filterwarnings("ignore:.torch.jit.*:DeprecationWarning", "ignore:Warning. Profiler clears events")
def test_the_dispatcher_is_asked_only_where_it_has_something_to_do(monkeypatch):
    """And gives the same."""
    operator, asked = interop._SELECTIVE.fresh, []
    registered = operator.registered
    monkeypatch.setattr(operator, "registered", lambda *given: asked.append(given) or registered(*given))
    for where, x, by_dispatcher in ways(inputs()):
        asked.clear()
        with where:
            y, last = cuscan.selective_scan(**x, **OPTIONS)
        assert bool(asked) == by_dispatcher
        if y.dtype == F32:
            as_any = {name: value.detach().resolve_neg().as_subclass(torch.Tensor) for name, value in x.items()}
            for mine, its in zip((y, last), cuscan.selective_scan(**as_any, **OPTIONS), strict=True):
                assert torch.equal(mine, its)
                assert type(mine) is type(x["u"])
    asked.clear()
    x = leaves(inputs())
    cuscan.selective_scan(**x).sum().backward()
    assert not asked
    torch.jit.trace(lambda u: cuscan.selective_scan(**{**inputs(), "u": u}), inputs()["u"], check_trace=False)
    assert asked
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.grad(lambda u: cuscan.selective_scan(**{**inputs(), "u": u}).sum())(inputs()["u"])


def arguments_of(operator, **x):
    return tuple(x.get(name) for name in operator.names)


def checked(device):
    """Operators with arguments."""
    x = leaves(inputs(device=device))
    options = {"delta_softplus": True, "reverse": False, "layout": "bld", "return_last_state": True}
    options |= {"return_states": True, "delta_limit": [0.0, 2.0]}
    fixed = {name: value.detach() for name, value in x.items()}
    grads = {"grad_out": torch.rand(2, 40, 4, device=device), "grad_last_state": torch.rand(2, 4, 3, device=device)}
    yield interop._SELECTIVE.fresh, {**x, **options}
    yield interop._SELECTIVE.given, {**fixed, **options, "out": torch.empty(2, 40, 4, device=device)}
    yield interop._SELECTIVE_VJP, {**fixed, **options, **grads}
    linear = {"b": x["u"], "axis": 1, "reverse": True, "return_last_state": True}
    yield interop._LINEAR.fresh, {**linear, "a": x["delta"], "h0": x["D"].detach().expand(2, 4).requires_grad_()}
    yield interop._LINEAR.fresh, {**linear, "gate": 0.5, "initial": 2, "return_last_state": False}
    yield interop._LINEAR.given, {**linear, "b": fixed["u"], "gate": 0.5, "out": torch.empty(2, 40, 4, device=device)}
    yield interop._LINEAR_VJP, {**linear, "a": fixed["delta"], "h": fixed["u"], "grad_h": grads["grad_out"]}
    names = ("x", "dt", "A", "B", "C", "D")
    step = dict(zip(names, step_of(fixed), strict=True)) | {"state": fixed["h0"].clone(), "dt_softplus": True}
    yield interop._UPDATE.fresh, step
    yield interop._UPDATE.given, {**step, "out": torch.empty(2, 4, device=device)}


@pytest.mark.full
def test_opcheck(device):
    for operator, x in checked(device):
        torch.library.opcheck(operator.registered, arguments_of(operator, **x))


def test_fake_results_are_like_the_real_ones(device):
    """Also where opcheck does not look: layouts, types, sequences."""
    made = {name: value.detach() for name, value in inputs(BF16, batch=1, device=device).items()}
    made["h0"] = torch.zeros(3, 4, 3, device=device)
    offsets = torch.tensor([0, 7, 7, 40], device=device)
    calls = [
        lambda x: cuscan.selective_scan(**x, return_last_state=True, return_states=True),
        lambda x: cuscan.selective_scan(**turned(x), layout="bdl", out_dtype=F64, return_last_state=True),
        lambda x: cuscan.linear_scan(x["delta"], x["u"], axis=-2, cu_seqlens=x["cu_seqlens"], return_last_state=True),
        lambda x: cuscan.linear_scan(x["D"], x["D"].flip(0), return_last_state=True),
        lambda x: cuscan.selective_scan_vjp(**x, grad_out=x["u"], grad_dtype=F32),
        lambda x: cuscan.selective_scan_vjp(**x, grad_out=x["u"]),
        lambda x: cuscan.linear_scan_vjp(x["delta"], x["u"].float(), x["u"].float(), axis=1),
        lambda x: cuscan.linear_scan_vjp(0.5, x["u"].float(), x["u"].float(), axis=1),
    ]
    given = {**made, "cu_seqlens": offsets}
    for call in calls:
        fake = call({name: value.to("meta") for name, value in given.items()})
        for mine, its in zip(call(given), fake, strict=True):
            if its is not None:
                assert (mine.shape, mine.dtype, mine.stride()) == (its.shape, its.dtype, its.stride())


@pytest.fixture
def compiler():
    torch.compiler.reset()
    yield functools.partial(torch.compile, fullgraph=True)
    torch.compiler.reset()


def trained(x):
    y, last = cuscan.selective_scan(**x, **OPTIONS, delta_limit=(0.0, 2.0))
    h = cuscan.linear_scan(torch.sigmoid(x["z"]), y * 2, axis=1)
    return h.square().mean() + last.sum()


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.torch.jit.*:DeprecationWarning")  # inductor's own
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_with_gradients(device, compiler, backend):
    """By the public names, in one graph."""
    eager, compiled = leaves(inputs(device=device)), leaves(inputs(device=device))
    trained(eager).backward()
    compiler(trained, backend=backend, dynamic=False)(compiled).backward()
    for name, x in eager.items():
        torch.testing.assert_close(compiled[name].grad, x.grad)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.torch.jit.*:DeprecationWarning")  # inductor's own
def test_compiled_for_sizes_that_vary(device, compiler):
    run = compiler(lambda x: cuscan.selective_scan(**x, **OPTIONS), backend="aot_eager", dynamic=True)
    for length in (40, 77, 33):
        x = inputs(length=length, device=device)
        for mine, its in zip(run(x), cuscan.selective_scan(**x, **OPTIONS), strict=True):
            assert torch.equal(mine, its)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.torch.jit.*:DeprecationWarning")  # inductor's own
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_in_place(device, compiler, backend):
    def decode(state, step):
        y = cuscan.selective_state_update(state, *step)
        return y + state.sum((1, 2))[:, None]

    run, step = compiler(decode, backend=backend), step_of(inputs(device=device))
    mine, its = (torch.ones(2, 4, 3, device=device) for _ in range(2))
    for _ in range(2):
        torch.testing.assert_close(run(mine, step), decode(its, step))
        torch.testing.assert_close(mine, its)
    assert (mine != 1).all()


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.torch.jit.*:DeprecationWarning")  # inductor's own
def test_compiled_under_autocast(device, compiler):
    def run(x):
        with torch.autocast(device, BF16):
            return cuscan.selective_scan(**x, **OPTIONS)

    x = inputs(device=device)
    for mine, its in zip(compiler(run, backend="aot_eager")(x), run(x), strict=True):
        assert mine.dtype == its.dtype
        assert torch.equal(mine, its)


# --- a GPU -------------------------------------------------------------------------------------------------------


class Entered:
    """What is current within it, as often as it is entered."""

    def __init__(self, current, what):
        self.current, self.what = current, what

    def __enter__(self):
        self.current.append(self.what)

    def __exit__(self, *_):
        self.current.remove(self.what)


class TorchsCupy(test_calls.FakeCupy):
    """CuPy over the CPU's memory, as device 0; the kernels run on the CPU executor."""

    def __init__(self, modules):
        super().__init__(modules)
        self.Stream = self
        self.current, self.ptr = [], 1234

        class Array(self.ndarray):
            __module__ = "cupy"

            @property
            def flags(self):
                return self.values.flags

            def __getitem__(self, where):
                return self._view(self.values[where])

            def transpose(self, *axes):
                return self._view(self.values.transpose(*axes))

            def _view(self, x):
                data = types.SimpleNamespace(ptr=x.ctypes.data, device_id=self.device.id, owner=self)
                return Array(x.shape, x.dtype, data, x.strides)

        self.ndarray = Array

    def entered(self, what):
        return Entered(self.current, what)

    def launchKernel(self, *launch):  # noqa: N802 CuPy's name
        assert self.device == 0 or ("device", 0) in self.current
        super().launchKernel(*launch)

    def Device(self, number):  # noqa: N802 CuPy's name
        return self.entered(("device", number))

    def from_external(self, stream):
        return self.entered(("stream", stream.__cuda_stream__()))

    def using_allocator(self, allocate):
        return self.entered(("allocator", allocate))

    def UnownedMemory(self, address, size, owner, device):  # noqa: N802 CuPy's name
        assert address == owner.data_ptr()
        if size:
            self.memory.register(_arrays.shadow(address, (size,), None, np.dtype(np.uint8)))
        return types.SimpleNamespace(ptr=address, device_id=device, owner=owner)

    def MemoryPointer(self, memory, offset):  # noqa: N802 CuPy's name
        assert offset == 0
        return memory

    def empty(self, shape, dtype):
        current = dict(self.current)
        assert (current["device"], current["stream"]) == (0, (0, 1234))
        memory = current["allocator"](math.prod(shape) * np.dtype(dtype).itemsize)
        self.allocated.append(self.ndarray(shape, dtype, memory))
        return self.allocated[-1]


class TorchsGpu(interop._Gpu):
    """The CPU as device 0."""

    def __init__(self, cupy):
        super().__init__(cupy, torch.empty(0))
        self.index = 0

    def known(self, x):
        memory = x.untyped_storage()
        self._cupy.UnownedMemory(memory.data_ptr(), memory.nbytes(), memory, 0)
        return x

    def results(self, function, x):
        assert [self.known(each) for each in x.values() if isinstance(each, torch.Tensor)]
        return super().results(function, x)

    def allocate(self, shape, dtype):
        self._cupy.allocated.append(self.known(super().allocate(shape, dtype)))
        return self._cupy.allocated[-1]


@pytest.fixture
def no_gpu(host_executor, monkeypatch):
    """Tensors on the CPU are taken for those of a GPU."""
    fake = TorchsCupy(host_executor.modules)
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(_compile, "cupy_limits", lambda _: H200)
    monkeypatch.setattr(_compile, "cupy_modules", fake.modules_of)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 1234, raising=False)
    monkeypatch.setattr(interop, "_place", lambda _: TorchsGpu(fake))
    yield fake
    fake.memory.clear()


@pytest.mark.parametrize("capturing", [False, True])
def test_on_a_gpu_that_is_not_there(host_executor, no_gpu, capturing):
    """From tensors over CuPy's arrays and the kernels to tensors again, on torch's stream, in torch's memory."""
    made = {n: x if n in ("A", "D", "delta_bias", "h0") else x.to(BF16) for n, x in inputs().items()}
    mask, grad = torch.rand(2, 40) < 0.7, torch.rand(2, 40, 4).to(BF16)
    arrays = {name: array_of(x) for name, x in made.items()} | {"mask": mask.numpy()}
    y, last = host_executor(cuscan.selective_scan, **arrays, **OPTIONS)
    gradients = host_executor(cuscan.selective_scan_vjp, **arrays, delta_softplus=True, grad_out=array_of(grad))
    no_gpu.capturing = capturing
    kept = _arrays._workspace.get().nbytes
    x = leaves(made)
    results = cuscan.selective_scan(**x, **OPTIONS, mask=mask)
    found = torch.autograd.grad(results[0], [*x.values()], grad)
    for mine, its in zip((*results, *found), (y, last, *gradients), strict=True):
        np.testing.assert_array_equal(array_of(mine), its)
    addresses = {x.data_ptr() if isinstance(x, torch.Tensor) else x.data.ptr for x in no_gpu.allocated}
    assert {each.data_ptr() for each in (*results, *found)} <= addresses
    assert len(addresses) > 11  # scratch too
    assert no_gpu.launched
    assert no_gpu.current == []
    assert _arrays._workspace.get().nbytes == kept


@pytest.mark.parametrize("update", [False, pytest.param(True, marks=pytest.mark.full)])
def test_calls_on_a_gpu_that_only_launch_make_no_arrays(no_gpu, monkeypatch, update):
    """Where their signature is known; what has to be copied, or is empty, is made arrays of."""
    x = {n: value if n in ("A", "D", "delta_bias", "h0") else value.to(BF16) for n, value in inputs().items()}
    cache, slots, b = torch.rand(5, 4, 3), torch.tensor([4, 0]), x["u"].float()

    def run():
        if update:
            state = cache.clone()
            yield cuscan.selective_state_update(state, *step_of(x), state_batch_indices=slots)
            yield state
        yield from cuscan.selective_scan(**x, **OPTIONS)
        yield from cuscan.selective_scan_vjp(**x, mask=b[..., 0] < 0.7, delta_softplus=True, grad_out=x["u"])
        yield cuscan.linear_scan(0.5, b, axis=1, out=torch.empty_like(b))

    expected = [*run()]
    launched = len(no_gpu.launched)
    with monkeypatch.context() as patch:
        patch.setattr(interop._Gpu, "array", None)
        for mine, its in zip(run(), expected, strict=True):
            assert torch.equal(mine, its)
        no_gpu.device = 1  # another is current
        for mine, its in zip(run(), expected, strict=True):
            assert torch.equal(mine, its)
        no_gpu.device = 0
    assert len(no_gpu.launched) == 3 * launched
    odd = torch.frombuffer(bytearray(1281), dtype=F32, offset=1).view(2, 40, 4)
    for _ in range(2):
        odd[...] = b
        assert torch.equal(cuscan.linear_scan(0.5, odd, axis=1), expected[-1])
        assert cuscan.linear_scan(0.5, b, axis=1, out=odd) is odd
        assert torch.equal(odd, expected[-1])
        stateless = cuscan.selective_scan(x["u"], x["u"], x["A"][:, :0], x["B"][..., :0], x["C"][..., :0])
        assert torch.equal(stateless, torch.zeros_like(x["u"]))
    longer = torch.zeros(2 * 41, 4)
    for _ in range(2):
        with pytest.raises(ValueError, match="out overlaps b in memory"):
            cuscan.linear_scan(0.5, longer[:-1], axis=0, out=longer[1:])
    monkeypatch.setenv("CUSCAN_CHECK", "1")
    with pytest.raises(ValueError, match="cu_seqlens must not descend"):
        cuscan.linear_scan(0.5, b, axis=1, cu_seqlens=torch.tensor([0, 9, 4]))
    assert no_gpu.current == []


def test_arrays_of_cupy_share_memory():
    cupy = pytest.importorskip("cupy", reason="no CUDA device: CuPy is not installed")
    gpu = interop._Gpu(cupy, torch.empty(0))
    gpu.index = 0
    for dtype in EVERY_DTYPE:
        x = torch.arange(24).reshape(2, 3, 4).to(dtype)
        for view in (x, x.mT, x[1, ::2, 1:], x[0, 0, 0], x[:, :0], x[:, :1].expand(2, 5, 4)):
            array = gpu.array(view)
            assert array.dtype.name == str(dtype).removeprefix("torch.")
            assert (array.data.ptr, array.shape) == (view.data_ptr(), view.shape)
            assert array.strides == tuple(view.itemsize * stride for stride in view.stride())
        with cupy.cuda.using_allocator(gpu.memory):
            arrays = [cupy.empty(shape, interop._numpy_dtype(dtype)) for shape in ((2, 3), (), (0, 5))]
        for array in arrays:
            back = gpu.tensor(array)
            assert (back.dtype, back.shape) == (dtype, array.shape)
            assert back.data_ptr() == array.data.ptr
            assert back.untyped_storage().nbytes() == array.nbytes


def on_gpu(**options):
    return inputs(batch=1, length=500, channels=64, state=16, device="cuda", **options)


def trained_twice(x):
    y, last = cuscan.selective_scan(**x, **OPTIONS)
    h = cuscan.linear_scan(0.5, y, axis=1)
    return [y, last, h, *torch.autograd.grad((h, last), [*x.values()], (torch.ones_like(h), torch.ones_like(last)))]


def test_memory_is_torchs(gpu):
    x, pool = on_gpu(), gpu.get_default_memory_pool()
    cuscan.selective_scan(**x, return_last_state=True)
    before, pooled = torch.cuda.memory_allocated(), pool.total_bytes()
    for _ in range(3):
        results = cuscan.selective_scan(**x, return_last_state=True)
        assert torch.cuda.memory_allocated() - before == sum(-(-each.nbytes // 512) * 512 for each in results)
    assert pool.total_bytes() == pooled


@pytest.mark.usefixtures("gpu")
def test_a_call_runs_on_torchs_current_stream():
    x = on_gpu()
    expected = trained_twice(leaves(x))
    late = {name: torch.zeros_like(value) for name, value in x.items()}
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10**9)
        for name, value in late.items():
            value.copy_(x[name])
        results = trained_twice({name: value.requires_grad_() for name, value in late.items()})
    stream.synchronize()
    for mine, its in zip(results, expected, strict=True):
        assert torch.equal(mine, its)


@pytest.mark.usefixtures("gpu")
def test_no_call_waits_for_the_device():
    x = leaves(on_gpu())
    trained_twice(x)
    torch.cuda.synchronize()
    torch.cuda._sleep(4 * 10**9)
    busy = torch.cuda.Event()
    busy.record()
    trained_twice(x)
    assert not busy.query()
    torch.cuda.synchronize()


@pytest.mark.usefixtures("gpu")
# PyTorch says so of any leaf that is used in more than one stream, as its own recipe for graphs does.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
@pytest.mark.parametrize("plan", [{"schedule": Schedule.SERIAL}, {"schedule": Schedule.SPLIT, "chunk": 64}])
def test_a_graph_replays_on_changed_data(plan):
    x, kept = leaves(on_gpu()), _arrays._workspace.get().nbytes
    with forced(**plan):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            trained_twice(x)  # compiles
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = trained_twice(x)
        others = [torch.full((1 << size,), 255, dtype=torch.uint8, device="cuda") for size in range(9, 29)]
        for seed in (1, 2):
            with torch.no_grad():
                for name, value in on_gpu(seed=seed).items():
                    x[name].copy_(value)
            graph.replay()
            torch.cuda.synchronize()
            for replayed, expected in zip(results, trained_twice(x), strict=True):
                assert torch.equal(replayed, expected)
        assert all(int(each.min()) == 255 for each in others)
    assert _arrays._workspace.get().nbytes == kept


@pytest.mark.usefixtures("gpu")
def test_tensors_of_a_second_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs a second CUDA device")
    x = on_gpu()
    expected = trained_twice(leaves(x))
    results = trained_twice(leaves({name: value.to("cuda:1") for name, value in x.items()}))
    for mine, its in zip(results, expected, strict=True):
        assert mine.device.index == 1
        assert torch.equal(mine.cpu(), its.cpu())
    with pytest.raises(ValueError, match="one device, but u is on cuda:1, delta on cuda:0"):
        cuscan.selective_scan(**{**x, "u": x["u"].to("cuda:1")})
