"""PyTorch: the same functions on tensors, as registered operators with gradients.

The operators are torch.ops.cuscan.linear_scan, selective_scan and selective_state_update, with fake kernels, so that
torch.compile and torch.export see one node, and autograd formulas that call linear_scan_vjp and selective_scan_vjp,
operators themselves. Where torch's dispatcher would have nothing to do but autograd, calls do without it, because it
takes longer than they do. Where a gradient will be needed, selective_scan saves its states for it. Second derivatives
are refused, and so are the transforms of torch.func, which torch does not have for operators that are written in
Python.

No tensor is copied: on the CPU a tensor's memory is read as a NumPy array, on a GPU by its address. There everything
runs on torch's current stream and is allocated by torch, so that torch.cuda.graph captures calls as it does any other:
results and scratch then belong to the graph's pool.

Under torch.autocast selective_scan and selective_state_update take u, delta, B, C and z (x, dt, B, C and z) in
autocast's type, and A, D, the bias and h0 in float32; linear_scan takes a and b in the wider of their two types, and
h0 in the accumulation type. float64 and complex tensors stay as they are.
"""

from __future__ import annotations

import contextlib
import inspect
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache, reduce
from typing import Any

import numpy as np
import torch
from torch._C import DispatchKey, DispatchKeySet, _dispatch_keys, _dispatch_tls_local_include_set
from torch.autograd import _profiler_enabled
from torch.overrides import has_torch_function

from cuscan import _arrays, _calls, _compile, linear, linear_vjp, selective, selective_vjp, state_update
from cuscan._arrays import Array, Workspace, _cupy, _dtype
from cuscan._plan import STATE_INTERVAL
from cuscan.interop import Stream

__all__ = [
    "linear_scan",
    "linear_scan_vjp",
    "selective_scan",
    "selective_scan_fn",
    "selective_scan_vjp",
    "selective_state_update",
]

Tensor = Any  # a torch.Tensor, or None where an argument may be
Arguments = dict[str, Any]

# --- memory ------------------------------------------------------------------------------------------------------


class _Gpu:
    """One GPU. Calls that only launch read tensors' addresses, and make tensors.

    For all else, tensors as CuPy arrays over the same memory, and arrays that a call makes as tensors.
    """

    def __init__(self, cupy: Any, like: Tensor) -> None:
        self._cupy, self._like, self.index = cupy, like, like.get_device()
        self._made: dict[int, Tensor] = {}

    def results(self, function: Callable[..., Any], x: Arguments) -> Any:
        """Of a function on arrays."""
        token = _calls.tensor_place.set(self)
        try:
            return function(**x)
        finally:
            _calls.tensor_place.reset(token)

    # A Place, where there is only to launch.

    @property
    def stream(self) -> int:
        """Torch's current stream."""
        # What torch.cuda.current_stream makes an object of.
        return int(torch._C._cuda_getCurrentRawStream(self.index))  # noqa: SLF001

    @property
    def modules(self) -> Any:
        """The kernels."""
        return _compile.cupy_modules(self.index)

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Tensor:
        """A contiguous tensor."""
        return self._like.new_empty(shape, dtype=_cached_torch_dtype(dtype))  # torch.empty takes longer

    def pointer(self, x: Tensor) -> int:
        """Where it begins."""
        return int(x.data_ptr())

    # CuPy's arrays, where there is more.

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """The GPU with torch's stream and allocator.

        Torch hands out again in the stream's order what is freed, also while a graph is captured. So scratch may go
        when a call ends, and the Workspace, where CuPy's memory is kept during a capture, is one that is thrown away.
        """
        cuda = self._cupy.cuda
        stream = _stream(cuda, self.stream)
        with cuda.Device(self.index), stream, cuda.using_allocator(self.memory), Workspace():
            yield

    def memory(self, size: int) -> Any:
        """So many bytes, as CuPy's allocators give them."""
        memory = self._like.new_empty(size, dtype=torch.uint8)
        self._made[memory.data_ptr()] = memory
        return self._pointer(memory, size)

    def _pointer(self, memory: Tensor, size: int) -> Any:
        cuda = self._cupy.cuda
        return cuda.MemoryPointer(cuda.UnownedMemory(memory.data_ptr(), size, memory, self.index), 0)

    def array(self, x: Tensor) -> Array:
        """The same memory for CuPy."""
        size = x.element_size()
        span = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
        strides = tuple(size * stride for stride in x.stride())
        return self._cupy.ndarray(tuple(x.shape), _numpy_dtype(x.dtype), self._pointer(x, size * span), strides)

    def tensor(self, x: Array) -> Tensor:
        """What a call made: an array's memory came from `memory`."""
        if isinstance(x, torch.Tensor):
            return x
        dtype = _torch_dtype(x.dtype)
        if x.size == 0:
            return self._like.new_empty(x.shape, dtype=dtype)
        return self._made[x.data.ptr].view(dtype).view(x.shape)


@lru_cache(maxsize=256)
def _stream(cuda: Any, address: int) -> Any:
    return cuda.Stream.from_external(Stream(address))


class _Cpu:
    """Tensors as NumPy arrays over the same memory, and the reverse."""

    @classmethod
    def results(cls, function: Callable[..., Any], x: Arguments) -> Any:
        """Of a function on arrays."""
        arrays = {name: cls.array(each) for name, each in x.items() if isinstance(each, torch.Tensor)}
        return function(**{**x, **arrays})

    @staticmethod
    def array(x: Tensor) -> Array:
        """The same memory for NumPy, to which torch does not give bfloat16 as it is."""
        dtype = _numpy_dtype(x.dtype)
        return x.detach().view(torch.int16).numpy().view(dtype) if dtype.kind == "V" else x.detach().numpy()

    @staticmethod
    def tensor(x: Array) -> Tensor:
        """The same memory for torch."""
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if x.dtype.kind == "V" else torch.from_numpy(x)


def _place(like: Tensor) -> Any:
    """Where a tensor is."""
    return _Cpu if like.is_cpu else _Gpu(sys.modules.get("cupy") or _cupy("the tensors are on a GPU"), like)


def _run(function: Callable[..., Any], x: Arguments, like: Tensor) -> tuple[Tensor, ...]:
    """What a function on arrays gives for tensors: `like` is one of them."""
    place = _place(like)
    found = place.results(function, x)
    if not isinstance(found, tuple):
        found = (found,)
    first = () if x.get("out") is None else (x["out"],)
    return (*first, *[each if each is None else place.tensor(each) for each in found[len(first) :]])


_ITEMS = {getattr(torch, name): name for name in (*_arrays.ITEM_CODE, "bool", "int32", "int64")}


@cache
def _numpy_dtype(dtype: Any) -> Any:
    return None if dtype is None else _dtype(_ITEMS[dtype])


def _torch_dtype(dtype: Any) -> Any:
    """Of a dtype of torch or NumPy, or a name."""
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    return getattr(torch, dtype if isinstance(dtype, str) else np.dtype(dtype).name)


_cached_torch_dtype = cache(_torch_dtype)  # not for what torch.compile follows


def _accumulation(dtype: Any) -> Any:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


# --- operators ---------------------------------------------------------------------------------------------------

_PLAIN_KEYS = "CPU CUDA AutogradCPU AutogradCUDA AutocastCPU AutocastCUDA ADInplaceOrView BackendSelect"
_PLAIN = reduce(operator.or_, (DispatchKeySet(getattr(DispatchKey, key)) for key in _PLAIN_KEYS.split())).raw_repr()


def _is_plain(tensors: list[Tensor]) -> bool:
    """Whether torch's dispatcher, which takes longer than a call, would find nothing to do but autograd.

    There is no compiler, mode, transform, tracer or profiler, and tensors are as any other: no subclasses, no fakes, no
    lazily conjugated views.
    """
    if torch.compiler.is_compiling() or _profiler_enabled() or has_torch_function(tensors):
        return False
    keys = _dispatch_tls_local_include_set().raw_repr()
    for x in tensors:
        keys |= _dispatch_keys(x).raw_repr()
    return not keys & ~_PLAIN


class _Operator:
    """An operator cuscan::`name`. All functions that are registered for it get its arguments by name."""

    def __init__(
        self,
        name: str,
        arguments: str,
        results: str,
        kernel: Callable[[Arguments], list[Tensor]],
        fake: Callable[[Arguments], list[Tensor]],
    ) -> None:
        """Kernels give None for what is not wanted; for the registered operator that is an empty tensor."""

        def presented(x: Arguments, found: list[Tensor]) -> Any:
            found = [_empty(x) if each is None else each for each in found]
            return found if results == "Tensor[]" else _packed(found)

        each = [argument.split() for argument in arguments.split(", ")]
        self.names = [argument[-1] for argument in each]
        self._tensors = [argument[-1] for argument in each if argument[0].startswith("Tensor")]
        self.changed = [argument[-1] for argument in each if "!" in argument[0]]
        self._kernel = kernel
        # Not torch.library.custom_op, whose checks cost more than a call, and which imports the compiler.
        self.name = f"cuscan::{name}"
        torch.library.define(self.name, f"({arguments}) -> {results}", tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.impl(self.name, ("cpu", "cuda"), lambda *given: presented(x := self._named(given), self._run(x)))
        torch.library.register_fake(self.name, lambda *given: presented(x := self._named(given), fake(x)))
        self.registered = getattr(torch.ops.cuscan, name).default

    def _run(self, x: Arguments) -> list[Tensor]:
        for name in self.changed:
            torch.autograd.graph.increment_version(x[name])
        return self._kernel(x)

    def _named(self, given: Sequence[Any]) -> Arguments:
        return dict(zip(self.names, given, strict=True))

    def __call__(self, arguments: Arguments) -> list[Tensor]:
        """Its results for those of the arguments that it has."""
        x = {name: arguments[name] for name in self.names}
        tensors = [x[name] for name in self._tensors if x[name] is not None]
        if not _is_plain(tensors):
            found = self.registered(*x.values())
        elif _needs_gradient(tensors):
            found = self._differentiable.apply(*x.values())
        else:
            return self._run(x)
        return [found] if isinstance(found, torch.Tensor) else list(found or ())

    def differentiate(self, save: Callable[..., Arguments], back: Callable[..., Arguments]) -> None:
        """Register a gradient.

        `save(context, arguments, results)` gives what `back(saved, *gradients)` needs, which gives the gradients of
        arguments.
        """

        def remember(ctx: Any, x: Arguments, results: Any) -> None:
            saved = save(ctx, x, results)
            tensors = {name: x for name, x in saved.items() if x is not None and isinstance(x, torch.Tensor)}
            ctx.names, ctx.others = tuple(tensors), {name: x for name, x in saved.items() if name not in tensors}
            ctx.save_for_backward(*tensors.values())
            ctx.set_materialize_grads(False)

        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
            saved = {**ctx.others, **dict(zip(ctx.names, ctx.saved_tensors, strict=True))}
            found = {} if all(x is None for x in gradients) else back(saved, *gradients)
            return tuple(found.get(name) for name in self.names)

        def setup_context(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
            remember(ctx, self._named(inputs), output)

        def forward(ctx: Any, *given: Any) -> tuple[Tensor, ...]:
            x = self._named(given)
            found = tuple(self._run(x))
            remember(ctx, x, found)
            return found

        functions = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        self._differentiable: Any = type(self.name, (torch.autograd.Function,), functions)
        torch.library.register_autograd(self.name, backward, setup_context=setup_context)


class _Scan:
    """A function as two operators: the second, with _out after its name, for a call with `out`."""

    def __init__(
        self,
        name: str,
        arguments: str,
        flags: Sequence[str],
        function: Callable[..., Any],
        sizes: Callable[[Arguments], list[tuple[Sequence[int], Any]]],
    ) -> None:
        """The function has a result, and one more for each of the flags that is set; `sizes` are shapes and dtypes."""

        def kernel(x: Arguments) -> list[Tensor]:
            first, *others = _run(function, {**x, "out_dtype": _numpy_dtype(x["out_dtype"])}, _like(x))
            rest = iter(others)
            return ([] if "out" in x else [first]) + [next(rest) if x[flag] else None for flag in flags]

        def fake(x: Arguments) -> list[Tensor]:
            wanted = [True, *(x[flag] for flag in flags)]
            made = [_empty(x, *size) if each else None for size, each in zip(sizes(x), wanted, strict=True)]
            return made[1:] if "out" in x else made

        arguments = ", ".join([arguments, "ScalarType? out_dtype", *(f"bool {flag}" for flag in flags)])
        results = ["Tensor"] * (1 + len(flags))
        self.fresh = _Operator(name, arguments, _listed(results), kernel, fake)
        self.given = _Operator(f"{name}_out", f"Tensor(z!) out, {arguments}", _listed(results[1:]), kernel, fake)
        self._flags, self._function = flags, function

    def __call__(self, x: Arguments, tensors: list[Tensor]) -> Any:
        """What the function returns for these arguments, of which these are tensors."""
        out, differentiable = x["out"], _needs_gradient(tensors)
        if not differentiable and _is_plain(tensors):
            for name in self.given.changed if out is not None else self.fresh.changed:
                torch.autograd.graph.increment_version(x[name])
            if x["out_dtype"] is not None:
                x["out_dtype"] = _numpy_dtype(_torch_dtype(x["out_dtype"]))
            results = _run(self._function, x, tensors[0])
            return results if len(results) > 1 else results[0]
        if out is not None and differentiable:
            raise RuntimeError("out= has no gradient, but one of the tensors requires one: call it in torch.no_grad()")
        more = {"out_dtype": _torch_dtype(x["out_dtype"]), "return_states": differentiable or x.get("return_states")}
        found = (self.fresh if out is None else self.given)({**x, **more})
        if out is not None:
            found.insert(0, out)
        wanted = [True, *(x[flag] for flag in self._flags)]
        results = tuple(each for each, is_wanted in zip(found, wanted, strict=True) if is_wanted)
        return results if len(results) > 1 else results[0]


def _packed(results: list[Tensor]) -> Any:
    return tuple(results) if len(results) > 1 else results[0] if results else None


def _listed(results: list[str]) -> str:
    return results[0] if len(results) == 1 else f"({', '.join(results)})"


def _empty(x: Arguments, shape: Sequence[int] = (0,), dtype: Any = None) -> Tensor:
    return _like(x).new_empty(shape, dtype=dtype)


def _like(x: Arguments) -> Tensor:
    """A tensor of the call."""
    for value in x.values():
        if isinstance(value, torch.Tensor):
            return value
    raise TypeError("a call of no tensors")


def _gradients(
    name: str,
    arguments: str,
    function: Callable[..., Any],
    fields: Sequence[str],
    sizes: Callable[[Arguments], dict[str, tuple[Sequence[int], Any]]],
) -> _Operator:
    """The operator cuscan::`name`_vjp, whose results are the gradients that `sizes` gives shapes and dtypes of."""

    def kernel(x: Arguments) -> list[Tensor]:
        found = _run(function, {**x, "grad_dtype": _numpy_dtype(x["grad_dtype"])}, _like(x))
        wanted = _wanted(fields, x)
        return [each for name, each in zip(fields, found, strict=True) if name in wanted]

    def fake(x: Arguments) -> list[Tensor]:
        wanted = x["grad_dtype"]
        return [
            _empty(x, shape, dtype if wanted is None or wanted.is_complex != dtype.is_complex else wanted)
            for shape, dtype in sizes(x).values()
        ]

    def refuse(*_: Any) -> Arguments:
        raise NotImplementedError(f"{name} has no second derivative, and a gradient of its gradient was asked for")

    made = _Operator(f"{name}_vjp", f"{arguments}, ScalarType? grad_dtype", "Tensor[]", kernel, fake)
    made.differentiate(lambda *_: {}, refuse)
    return made


def _wanted(fields: Sequence[str], x: Arguments) -> list[str]:
    """The gradients that an operator gives: linear_scan's b is not among its arguments, and is always there."""
    return [name for name in fields if name == "b" or x[name] is not None]


def _readable(x: Tensor, dtype: Any) -> Tensor:
    """A result or its gradient, which out_dtype may have made of a type that the gradients' kernels do not read."""
    return x if x is None or x.dtype in (dtype, _accumulation(dtype)) else x.to(_accumulation(dtype))


# --- arguments ---------------------------------------------------------------------------------------------------

_MARKS = "Tensor? mask, Tensor? reset, Tensor? cu_seqlens"


def _check(required: Sequence[str], tensors: Arguments) -> list[Tensor]:
    """Tensors all, on one device, of types that some argument may have; gives those that are there."""
    first = device = None
    given = []
    for name, x in tensors.items():
        if x is None and name not in required:
            continue
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor like the others, got {type(x).__name__}; nothing is moved")
        if x.dtype not in _ITEMS:
            raise TypeError(f"{name} must be of a type of {', '.join(_ITEMS.values())}, got {x.dtype}")
        if device is None:
            first, device = name, x.device
        elif x.device != device:
            raise ValueError(f"all tensors must be on one device, but {first} is on {device}, {name} on {x.device}")
        given.append(x)
    return given


def _needs_gradient(tensors: list[Tensor]) -> bool:
    if torch.is_grad_enabled():
        for x in tensors:  # what any() of a generator would take as long for as all the rest
            if x.requires_grad:
                return True
    return False


def _autocast(like: Tensor) -> Any:
    """The type that autocast is for, if it is on where this tensor is."""
    if not torch._C._is_any_autocast_enabled():  # noqa: SLF001 which takes less than the questions below
        return None
    device = like.device.type
    if device == "meta" or like.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def _cast(x: Arguments, names: str, dtype: Any) -> None:
    for name in names.split():
        if isinstance(x[name], torch.Tensor) and x[name].is_floating_point() and x[name].dtype != torch.float64:
            x[name] = x[name].to(dtype)


# --- linear_scan -------------------------------------------------------------------------------------------------


def linear_scan(
    a: Any,
    b: Tensor,
    h0: Any = None,
    *,
    axis: int | None = None,
    reverse: bool = False,
    mask: Tensor = None,
    reset: Tensor = None,
    cu_seqlens: Tensor = None,
    return_last_state: bool = False,
    out: Tensor = None,
    out_dtype: Any = None,
) -> Any:
    """`cuscan.linear_scan` on tensors: h and the last state are differentiable in a, b and h0.

    Parameters
    ----------
    a, b, h0, axis, reverse, mask, reset, cu_seqlens, return_last_state, out
        As for `cuscan.linear_scan`, on one device. With `out` there is no gradient.
    out_dtype : torch.dtype, optional
        Dtype of the result.

    Returns
    -------
    h : torch.Tensor
        Of b's shape, contiguous; or `out`. It is saved for the gradient: b is not.
    last_state : torch.Tensor
        Only with `return_last_state`.

    Raises
    ------
    TypeError, ValueError
        As `cuscan.linear_scan`.
    RuntimeError
        `out` is given and a tensor requires a gradient.

    Examples
    --------
    >>> import torch
    >>> from cuscan.interop.torch import linear_scan
    >>> decay = torch.tensor(0.5, requires_grad=True)
    >>> linear_scan(decay, torch.ones(4)).sum().backward()
    >>> decay.grad
    tensor(5.7500)
    """
    gate, a = _apart(a)
    initial, h0 = _apart(h0)
    x = {"a": a, "b": b, "h0": h0, "mask": mask, "reset": reset, "cu_seqlens": cu_seqlens, "out": out}
    tensors = _check(("a", "b") if gate is None else ("b",), x)
    if _autocast(b) is not None:
        if a is not None:
            _cast(x, "a b", torch.promote_types(a.dtype, b.dtype))
        _cast(x, "h0", _accumulation(x["b"].dtype))
    x |= {"gate": gate, "initial": initial, "axis": axis, "reverse": _arrays.check_flag("reverse", reverse)}
    x |= {"return_last_state": _arrays.check_flag("return_last_state", return_last_state), "out_dtype": out_dtype}
    return _LINEAR(x, tensors)


def linear_scan_vjp(
    a: Any,
    h: Tensor,
    grad_h: Tensor = None,
    h0: Any = None,
    *,
    grad_last_state: Tensor = None,
    axis: int | None = None,
    reverse: bool = False,
    mask: Tensor = None,
    reset: Tensor = None,
    cu_seqlens: Tensor = None,
    grad_dtype: Any = None,
) -> Any:
    """`cuscan.linear_scan_vjp` on tensors: what the gradient of `linear_scan` is made of."""
    gate, a = _apart(a)
    initial, h0 = _apart(h0)
    x = {"a": a, "h": h, "grad_h": grad_h, "h0": h0, "grad_last_state": grad_last_state}
    x |= {"mask": mask, "reset": reset, "cu_seqlens": cu_seqlens}
    _check(("a", "h") if gate is None else ("h",), x)
    x |= {"gate": gate, "initial": initial, "axis": axis, "reverse": _arrays.check_flag("reverse", reverse)}
    return linear_vjp.LinearGradients(**_linear_gradients({**x, "grad_dtype": _torch_dtype(grad_dtype)}))


def _apart(x: Any) -> tuple[Any, Tensor]:
    """A number, or a tensor."""
    if isinstance(x, (int, float, complex, np.number)) and not isinstance(x, bool):
        return (x.item() if isinstance(x, np.number) else x), None
    return None, x


def _joined(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function of arrays, with numbers as arguments of their own."""
    function = inspect.unwrap(function)

    def call(a: Any, h0: Any, gate: Any, initial: Any, **x: Any) -> Any:
        return function(a=a if gate is None else gate, h0=h0 if initial is None else initial, **x)

    return call


def _linear_sizes(x: Arguments) -> list[tuple[Sequence[int], Any]]:
    b, offsets = x["b"], x["cu_seqlens"]
    rest = [n for d, n in enumerate(b.shape) if d != (x["axis"] or 0) % b.ndim]
    rows = rest if offsets is None else [offsets.shape[0] - 1, *rest]
    return [(b.shape, x["out_dtype"] or b.dtype), (rows, _accumulation(b.dtype))]


def _linear_gradient_sizes(x: Arguments) -> dict[str, tuple[Sequence[int], Any]]:
    a, h, h0 = (x[name] for name in ("a", "h", "h0"))
    sizes = {} if a is None else {"a": (a.shape, a.dtype)}
    sizes["b"] = h.shape, (h if a is None else a).dtype
    return sizes if h0 is None else {**sizes, "h0": (h0.shape, h0.dtype)}


_LINEAR_OPTIONS = f"Tensor? h0, {_MARKS}, Scalar? gate, Scalar? initial, int? axis, bool reverse"
_LINEAR = _Scan(
    "linear_scan",
    f"Tensor? a, Tensor b, {_LINEAR_OPTIONS}",
    ("return_last_state",),
    _joined(linear.linear_scan),
    _linear_sizes,
)
_LINEAR_VJP = _gradients(
    "linear_scan",
    f"Tensor? a, Tensor h, Tensor? grad_h, Tensor? grad_last_state, {_LINEAR_OPTIONS}",
    _joined(linear_vjp.linear_scan_vjp),
    linear_vjp.LinearGradients._fields,
    _linear_gradient_sizes,
)


def _linear_gradients(x: Arguments) -> dict[str, Tensor]:
    fields = linear_vjp.LinearGradients._fields
    return dict.fromkeys(fields) | dict(zip(_wanted(fields, x), _LINEAR_VJP(x), strict=True))


def _save_linear(ctx: Any, x: Arguments, results: tuple[Tensor, Tensor]) -> Arguments:
    h, last = results
    if last is not None and not x["return_last_state"]:
        ctx.mark_non_differentiable(last)
    return {**x, "b": None, "h": h, "item": x["b"].dtype}


def _back_linear(x: Arguments, grad_h: Tensor, grad_last: Tensor) -> dict[str, Tensor]:
    h, grad_h = (_readable(each, x["item"]) for each in (x["h"], grad_h))
    found = _linear_gradients({**x, "h": h, "grad_h": grad_h, "grad_last_state": grad_last, "grad_dtype": None})
    return {**found, "b": found["b"].to(x["item"])}


_LINEAR.fresh.differentiate(_save_linear, _back_linear)

# --- selective_scan ----------------------------------------------------------------------------------------------


def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor = None,
    z: Tensor = None,
    delta_bias: Tensor = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    *,
    h0: Tensor = None,
    reverse: bool = False,
    mask: Tensor = None,
    reset: Tensor = None,
    cu_seqlens: Tensor = None,
    delta_limit: tuple[float, float] | None = None,
    layout: str = "bld",
    return_states: bool = False,
    out: Tensor = None,
    out_dtype: Any = None,
) -> Any:
    """`cuscan.selective_scan` on tensors: y and the last state are differentiable in all inputs of a floating type.

    Parameters
    ----------
    u, delta, A, B, C, D, z, delta_bias, delta_softplus, return_last_state, h0, reverse, mask, reset, cu_seqlens, \
    delta_limit, layout, return_states, out
        As for `cuscan.selective_scan`, on one device. With `out` there is no gradient.
    out_dtype : torch.dtype, optional
        Dtype of y.

    Returns
    -------
    y : torch.Tensor
        Of u's shape, contiguous; or `out`.
    last_state : torch.Tensor
        Only with `return_last_state`.
    states : torch.Tensor
        Only with `return_states`; not differentiable.

    Raises
    ------
    TypeError, ValueError
        As `cuscan.selective_scan`.
    RuntimeError
        `out` is given and a tensor requires a gradient.

    Examples
    --------
    >>> import torch
    >>> from cuscan.interop.torch import selective_scan
    >>> u, delta = torch.rand(2, 3, 64, 5)               # batch 3, length 64, 5 channels
    >>> B, C = torch.rand(2, 3, 64, 16)                  # 16 states
    >>> A_log = torch.zeros(5, 16, requires_grad=True)
    >>> y = selective_scan(u, delta, -torch.exp(A_log), B, C)
    >>> y.square().mean().backward()
    >>> y.shape, A_log.grad.shape
    (torch.Size([3, 64, 5]), torch.Size([5, 16]))
    """
    x = {"u": u, "delta": delta, "A": A, "B": B, "C": C, "D": D, "z": z, "delta_bias": delta_bias, "h0": h0}
    x |= {"mask": mask, "reset": reset, "cu_seqlens": cu_seqlens, "out": out}
    tensors = _check(("u", "delta", "A", "B", "C"), x)
    if (dtype := _autocast(u)) is not None:
        _cast(x, "u delta B C z", dtype)
        _cast(x, "A D delta_bias h0", torch.float32)
    x |= _selective_options(delta_softplus, reverse, delta_limit, layout)
    x |= {"return_last_state": _arrays.check_flag("return_last_state", return_last_state), "out_dtype": out_dtype}
    x["return_states"] = _arrays.check_flag("return_states", return_states)
    return _SELECTIVE(x, tensors)


def selective_scan_fn(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor = None,
    z: Tensor = None,
    delta_bias: Tensor = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
) -> Any:
    """The function of this name in mamba_ssm, with its arguments and layout.

    Parameters
    ----------
    u, delta, z : torch.Tensor (batch, channels, length)
        Inputs, step sizes and gate.
    A : torch.Tensor (channels, state)
        Rates, float32 or complex64.
    B, C : torch.Tensor (channels, state), (batch, state, length) or (batch, groups, state, length)
        Input and output couplings. Where A is complex and they vary in time, they may also be real with a last axis
        of 2 * length, that alternates between real and imaginary parts.
    D, delta_bias : torch.Tensor (channels,), optional
        Skip connection, and what is added to delta.
    delta_softplus, return_last_state : bool
        Apply softplus to delta; return the last state (batch, channels, state) too, which is differentiable here.

    Returns
    -------
    torch.Tensor, or a pair
        y, in u's layout and type, or (y, last state).
    """
    if isinstance(A, torch.Tensor) and A.is_complex():
        B, C = (torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) if _is_split(x) else x for x in (B, C))
    return selective_scan(u, delta, A, B, C, D, z, delta_bias, delta_softplus, return_last_state, layout="bdl")


def _is_split(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.ndim > 2 and not x.is_complex()


def selective_scan_vjp(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor = None,
    z: Tensor = None,
    delta_bias: Tensor = None,
    delta_softplus: bool = False,
    *,
    grad_out: Tensor = None,
    grad_last_state: Tensor = None,
    states: Tensor = None,
    h0: Tensor = None,
    reverse: bool = False,
    mask: Tensor = None,
    reset: Tensor = None,
    cu_seqlens: Tensor = None,
    delta_limit: tuple[float, float] | None = None,
    layout: str = "bld",
    grad_dtype: Any = None,
) -> Any:
    """`cuscan.selective_scan_vjp` on tensors: what the gradient of `selective_scan` is made of."""
    x = {"u": u, "delta": delta, "A": A, "B": B, "C": C, "D": D, "z": z, "delta_bias": delta_bias, "h0": h0}
    x |= {"mask": mask, "reset": reset, "cu_seqlens": cu_seqlens}
    x |= {"grad_out": grad_out, "grad_last_state": grad_last_state, "states": states}
    _check(("u", "delta", "A", "B", "C"), x)
    x |= _selective_options(delta_softplus, reverse, delta_limit, layout)
    return selective_vjp.SelectiveGradients(**_selective_gradients({**x, "grad_dtype": _torch_dtype(grad_dtype)}))


def _selective_options(delta_softplus: bool, reverse: bool, delta_limit: Any, layout: str) -> Arguments:
    selective.check_layout(layout)
    return {
        "delta_softplus": _arrays.check_flag("delta_softplus", delta_softplus),
        "reverse": _arrays.check_flag("reverse", reverse),
        "delta_limit": _arrays.check_limits("delta_limit", delta_limit),
        "layout": layout,
    }


def _selective_sizes(x: Arguments) -> list[tuple[Sequence[int], Any]]:
    u, A, offsets = x["u"], x["A"], x["cu_seqlens"]
    batch, length = u.shape[0], u.shape[1 if x["layout"] == "bld" else 2]
    rows = batch if offsets is None else offsets.shape[0] - 1
    dtype = A.dtype if A.is_complex() else _accumulation(u.dtype)
    saved = (batch, -(-length // STATE_INTERVAL), *A.shape)
    return [(u.shape, x["out_dtype"] or u.dtype), ((rows, *A.shape), dtype), (saved, dtype)]


def _selective_gradient_sizes(x: Arguments) -> dict[str, tuple[Sequence[int], Any]]:
    given = {name: x[name] for name in selective_vjp.SelectiveGradients._fields}
    return {name: (like.shape, like.dtype) for name, like in given.items() if like is not None}


_SELECTIVE_ARGUMENTS = (
    "Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? delta_bias, Tensor? h0, "
    f"{_MARKS}, bool delta_softplus, bool reverse, float[]? delta_limit, str layout"
)
_SELECTIVE = _Scan(
    "selective_scan",
    _SELECTIVE_ARGUMENTS,
    ("return_last_state", "return_states"),
    inspect.unwrap(selective.selective_scan),
    _selective_sizes,
)
_SELECTIVE_VJP = _gradients(
    "selective_scan",
    f"{_SELECTIVE_ARGUMENTS}, Tensor? grad_out, Tensor? grad_last_state, Tensor? states",
    inspect.unwrap(selective_vjp.selective_scan_vjp),
    selective_vjp.SelectiveGradients._fields,
    _selective_gradient_sizes,
)


def _selective_gradients(x: Arguments) -> dict[str, Tensor]:
    fields = selective_vjp.SelectiveGradients._fields
    return dict.fromkeys(fields) | dict(zip(_wanted(fields, x), _SELECTIVE_VJP(x), strict=True))


def _save_selective(ctx: Any, x: Arguments, results: tuple[Tensor, ...]) -> Arguments:
    _, last, states = results
    unwanted = None if x["return_last_state"] else last
    ctx.mark_non_differentiable(*(each for each in (states, unwanted) if each is not None))
    return {**x, "states": states if x["return_states"] else None}


def _back_selective(x: Arguments, grad_out: Tensor, grad_last: Tensor, _: None) -> dict[str, Tensor]:
    grad_out = _readable(grad_out, x["u"].dtype)
    return _selective_gradients({**x, "grad_out": grad_out, "grad_last_state": grad_last, "grad_dtype": None})


_SELECTIVE.fresh.differentiate(_save_selective, _back_selective)

# --- selective_state_update --------------------------------------------------------------------------------------


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor = None,
    z: Tensor = None,
    dt_bias: Tensor = None,
    dt_softplus: bool = False,
    *,
    state_batch_indices: Tensor = None,
    dt_limit: tuple[float, float] | None = None,
    out: Tensor = None,
    out_dtype: Any = None,
) -> Tensor:
    """`cuscan.selective_state_update` on tensors: `state` is changed in place, and there is no gradient.

    Parameters
    ----------
    state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, state_batch_indices, dt_limit, out
        As for `cuscan.selective_state_update`, on one device.
    out_dtype : torch.dtype, optional
        Dtype of y.

    Returns
    -------
    torch.Tensor (batch, channels)
        y, contiguous; or `out`.

    Raises
    ------
    TypeError, ValueError
        As `cuscan.selective_state_update`.
    RuntimeError
        A tensor requires a gradient: `selective_scan` of one step with h0 has one.
    """
    given = {"state": state, "x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "z": z, "dt_bias": dt_bias}
    given |= {"state_batch_indices": state_batch_indices, "out": out}
    tensors = _check(("state", "x", "dt", "A", "B", "C"), given)
    if _needs_gradient(tensors):
        raise RuntimeError(
            "selective_state_update has no gradient, but one of its tensors requires one: call it in torch.no_grad(), "
            "or selective_scan for one step, with the state as h0"
        )
    if (dtype := _autocast(x)) is not None:
        _cast(given, "x dt B C z", dtype)
        _cast(given, "A D dt_bias", torch.float32)
    given |= {"dt_softplus": _arrays.check_flag("dt_softplus", dt_softplus), "out_dtype": out_dtype}
    given["dt_limit"] = _arrays.check_limits("dt_limit", dt_limit)
    return _UPDATE(given, tensors)


_UPDATE = _Scan(
    "selective_state_update",
    "Tensor(a!) state, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? dt_bias, "
    "bool dt_softplus, Tensor? state_batch_indices, float[]? dt_limit",
    (),
    inspect.unwrap(state_update.selective_state_update),
    lambda given: [(given["x"].shape, given["out_dtype"] or given["x"].dtype)],
)
