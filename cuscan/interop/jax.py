"""JAX: the same functions on JAX arrays, under jit, grad, vmap, checkpoint and whatever else traces.

What is traced is a callback that XLA hands its buffers to (jax.experimental.buffer_callback): on the CPU they are NumPy
arrays, on a GPU CuPy arrays, and the kernels run on XLA's stream; nothing is copied to the host. Scratch comes from
CuPy's memory pool: how much it is depends on the device, which is not known when JAX asks for the shapes of results.
The pool hands memory out again in the order of the stream that it was asked for on, which is XLA's.

Shapes and types are checked when JAX traces. Gradients follow JAX's convention: those of complex arrays are the
conjugates of what `cuscan.selective_scan_vjp` gives. Second derivatives are refused.

Under vmap the mapped axis joins the batch, or the channels where a parameter is mapped or gradients are computed. Where
neither can be, because cu_seqlens or, for gradients, a mask or reset is mapped, one item runs after the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import SymbolicZero
from jax.experimental.buffer_callback import buffer_callback

from cuscan import _arrays, _calls, linear, linear_vjp, selective, selective_vjp, state_update
from cuscan._arrays import Array, _cupy
from cuscan._plan import STATE_INTERVAL, SelectiveKind
from cuscan.interop import Stream
from cuscan.linear_vjp import LinearGradients
from cuscan.selective_vjp import SelectiveGradients, _check_gradients, _gradient_dtype
from cuscan.state_update import _REQUIRED, _check_shapes, _check_types

__all__ = ["linear_scan", "linear_scan_vjp", "selective_scan", "selective_scan_vjp", "selective_state_update"]

Arrays = dict[str, Any]  # by the name of the argument; what was not given is not there
Results = dict[str, Any]  # by name, in the order in which the function gives them

# --- calls -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Function:
    """A function with its arguments that are no arrays. For those that are equal JAX compiles once."""

    options: dict[str, Any] = field(compare=False)
    key: str = field(init=False)  # 0.0 and -0.0 are equal, and not the same

    refused: ClassVar[str]  # what is said when JAX wants to differentiate it
    aliases: ClassVar[dict[str, str]] = {}  # argument to result: one memory, unless the argument is needed afterwards
    marks: ClassVar[frozenset[str]] = frozenset()  # arguments that channels share

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", repr(self.options))

    def results(self, x: Arrays) -> Results:
        """Shapes and dtypes of what comes out."""
        raise NotImplementedError

    def run(self, x: Arrays, to: Results) -> Iterable[Array]:
        """Compute, on NumPy or CuPy arrays; what is given back is the results, in `to` or elsewhere."""
        raise NotImplementedError

    def channels(self, axes: dict[str, int]) -> dict[str, int]:
        """The axis of channels, or of their groups, of the arguments (with so many axes) and results that have one."""
        raise NotImplementedError

    def rows(self, axes: dict[str, int]) -> set[str] | None:
        """The arguments and results whose first axis is the batch, if items of vmap may be rows of one batch."""
        raise NotImplementedError


@dataclass(frozen=True)
class _Callback:
    """What XLA calls."""

    function: _Function
    names: tuple[str, ...]
    results: tuple[str, ...]

    def __call__(self, context: Any, results: Sequence[Any], *arrays: Any) -> None:
        with _seen(context, [*arrays, *results]) as seen:
            x = dict(zip(self.names, seen, strict=False))
            to = dict(zip(self.results, seen[len(arrays) :], strict=True))
            for place, found in zip(to.values(), self.function.run(x, to), strict=True):
                if found is not place:
                    _arrays.assign(place, found)


@contextlib.contextmanager
def _seen(context: Any, buffers: Sequence[Any]) -> Iterator[list[Array]]:
    """XLA's buffers as NumPy arrays, or as CuPy arrays with their device and XLA's stream current."""
    kind, device = buffers[0].__dlpack_device__()
    if kind == 1:  # the CPU
        yield [np.asarray(x) for x in buffers]
        return
    cupy = _cupy("the arrays are on a GPU")
    cuda = cupy.cuda

    def array(x: Any) -> Array:
        # Not by cupy.asarray: the interface has no name for bfloat16.
        address, dtype = x.__cuda_array_interface__["data"][0], np.dtype(x.dtype)
        memory = cuda.UnownedMemory(address, dtype.itemsize * int(np.prod(x.shape)), x, device)
        return cupy.ndarray(tuple(x.shape), dtype, cuda.MemoryPointer(memory, 0))

    with cuda.Device(device), cuda.Stream.from_external(Stream(context.stream)):
        yield [array(x) for x in buffers]


def _call(function: _Function, x: Arrays) -> Results:
    """The results of a function, also under vmap."""

    def once(x: Arrays) -> Results:
        names, results = tuple(x), function.results(x)
        aliases = {names.index(name): tuple(results).index(to) for name, to in function.aliases.items()}
        call = buffer_callback(
            _Callback(function, names, tuple(results)), tuple(results.values()), input_output_aliases=aliases
        )
        return dict(zip(results, call(*x.values()), strict=True))

    def of_all(size: int, is_mapped: Sequence[dict[str, bool]], x: Arrays) -> tuple[Results, dict[str, bool]]:
        mapped = {name for name in x if is_mapped[0][name]}
        axes = _common_axes(function, {name: value.ndim - (name in mapped) for name, value in x.items()}, mapped)
        if axes is None:
            found = jax.lax.map(lambda item: call(x | item), {name: x[name] for name in mapped})
        else:
            joined = {n: _join(v, axes[n], size, is_mapped=n in mapped) if n in axes else v for n, v in x.items()}
            found = {name: _part(value, axes[name], size) for name, value in call(joined).items()}
        return found, dict.fromkeys(found, True)

    call = custom_vmap(once)
    call.def_vmap(of_all)
    results: Results = call(x)
    return results


def _common_axes(function: _Function, axes: dict[str, int], mapped: set[str]) -> dict[str, int] | None:
    """Along which axes the items of vmap can lie one after the other; what has none serves all items."""
    rows = function.rows(axes)
    if rows is not None and mapped <= rows:
        return dict.fromkeys(rows, 0)
    return None if mapped & function.marks else function.channels(axes)


def _join(x: Any, axis: int, size: int, *, is_mapped: bool) -> Any:
    """Items (size, ...), or one that stands for all, one after the other along an axis."""
    x = jnp.moveaxis(x if is_mapped else jnp.broadcast_to(x, (size, *x.shape)), 0, axis)
    return x.reshape(*x.shape[:axis], size * x.shape[axis + 1], *x.shape[axis + 2 :])


def _part(x: Any, axis: int, size: int) -> Any:
    """The inverse."""
    return jnp.moveaxis(x.reshape(*x.shape[:axis], size, x.shape[axis] // size, *x.shape[axis + 1 :]), axis, 0)


def _refuse(function: _Function, *_: Any) -> Any:
    raise NotImplementedError(f"{function.refused} are not supported")


_constant = jax.custom_vjp(_call, nondiff_argnums=(0,))
_constant.defvjp(_refuse, _refuse)


# --- arguments ---------------------------------------------------------------------------------------------------


def _arrays_of(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments as JAX arrays; those that are None or scalars stay."""
    for name, x in given.items():
        if not (x is None or isinstance(x, (jax.Array, np.ndarray)) or _arrays.is_python_scalar(x)):
            raise TypeError(f"{name} must be a JAX array, or a NumPy array beside some, got {type(x).__name__}")
    return {name: jnp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in given.items()}


def _present(x: dict[str, Any]) -> Arrays:
    return {name: value for name, value in x.items() if value is not None}


def _check_offsets(offsets: Any, length: int) -> None:
    """Look at the values where they are at hand; where they are not, the callback does."""
    at_hand = isinstance(offsets, np.ndarray)
    if isinstance(offsets, jax.Array) and not isinstance(offsets, jax.core.Tracer):
        at_hand = all(device.platform == "cpu" for device in offsets.devices())
    if at_hand:
        _arrays.check_offsets(np.asarray(offsets), length)


def _check_no_out(out: Any) -> None:
    if out is not None:
        raise TypeError("out must be None: JAX arrays cannot be written to")


# --- linear_scan -------------------------------------------------------------------------------------------------


class _Linear(_Function):
    """linear_scan and its gradients, on arrays that have a first axis of length 1, which vmap joins."""

    marks = frozenset(("cu_seqlens",))

    def channels(self, axes: dict[str, Any]) -> dict[str, int]:
        found = dict.fromkeys(("a", "b", "h", "grad_h", "mask", "reset"), 0)
        packed = axes.get("cu_seqlens") is not None
        return found | dict.fromkeys(("h0", "grad_last_state", "last_state"), int(packed))

    def rows(self, axes: dict[str, int]) -> None:
        """Every array has rows of its own."""

    def arguments(self, x: Arrays) -> dict[str, Any]:
        """Those that both functions have."""
        return {name: self.options[name] for name in ("a", "axis", "reverse")} | x


class _LinearScan(_Linear):
    refused = "second derivatives of linear_scan"

    def results(self, x: Arrays) -> Results:
        results = {"h": jax.ShapeDtypeStruct(x["b"].shape, self.options["out_dtype"])}
        if self.options["return_last_state"]:
            shape = list(x["b"].shape)
            del shape[self.options["axis"]]
            sequences = [len(x["cu_seqlens"]) - 1] if "cu_seqlens" in x else []
            item = _arrays.accumulation(_arrays.item_name(x["b"]))
            results["last_state"] = jax.ShapeDtypeStruct((*sequences, *shape), item)
        return results

    def run(self, x: Arrays, to: Results) -> Iterable[Array]:
        last = self.options["return_last_state"]
        found = linear.linear_scan(**self.arguments(x), return_last_state=last, out=to["h"])
        return found if last else [found]


class _LinearScanVjp(_Linear):
    refused = "second derivatives of linear_scan"

    def results(self, x: Arrays) -> Results:
        leading = x["a"] if "a" in x else x["h"]
        dtypes = dict.fromkeys(("a", "h"), leading.dtype) | {"h0": _arrays.accumulation(_arrays.item_name(leading))}
        return {
            "b" if name == "h" else name: jax.ShapeDtypeStruct(
                x[name].shape, self.options["grad_dtype"] or dtypes[name]
            )
            for name in ("a", "h", "h0")
            if name in x
        }

    def run(self, x: Arrays, to: Results) -> Iterable[Array]:
        del to
        given = self.arguments(x) | {"grad_dtype": self.options["grad_dtype"]}
        return _present(linear_vjp.linear_scan_vjp(**given)._asdict()).values()


def _linear_fwd(function: _LinearScan, x: Arrays) -> tuple[Results, Any]:
    x = {name: value.value for name, value in x.items()}
    b, out_dtype = x["b"], function.options["out_dtype"]
    wide = np.dtype(_arrays.accumulation(_arrays.item_name(b)))
    saved = out_dtype if out_dtype in (b.dtype, wide) else wide
    found = _constant(_LinearScan(function.options | {"out_dtype": saved}), x)
    return found | {"h": found["h"].astype(out_dtype)}, (x, found["h"])


def _linear_bwd(function: _LinearScan, kept: Any, grads: Results) -> tuple[Arrays]:
    x, h = kept
    given = {name: value for name, value in x.items() if name != "b"} | {"h": h}
    for name, to in (("h", "grad_h"), ("last_state", "grad_last_state")):
        if name in grads and not isinstance(grads[name], SymbolicZero):
            given[to] = jnp.conj(grads[name])
    if "grad_h" in given:
        given["grad_h"] = given["grad_h"].astype(h.dtype)
    options = {name: function.options[name] for name in ("a", "axis", "reverse")} | {"grad_dtype": None}
    found = _constant(_LinearScanVjp(options), given)
    return ({name: jnp.conj(found[name]).astype(x[name].dtype) if name in found else None for name in x},)


_linear = jax.custom_vjp(_call, nondiff_argnums=(0,))
_linear.defvjp(_linear_fwd, _linear_bwd, symbolic_zeros=True)
_linear = jax.jit(_linear, static_argnums=0)


def linear_scan(
    a: Any,
    b: Any,
    h0: Any = None,
    *,
    axis: int | None = None,
    reverse: bool = False,
    mask: Any = None,
    reset: Any = None,
    cu_seqlens: Any = None,
    return_last_state: bool = False,
    out: Any = None,
    out_dtype: Any = None,
) -> Any:
    """`cuscan.linear_scan` on JAX arrays and tracers, with gradients.

    Arguments, results and errors are those of `cuscan.linear_scan`; NumPy arrays beside JAX arrays become such. A
    number that jit has made a tracer of is taken in b's type. `out` must be None.
    """
    reverse = _arrays.check_flag("reverse", reverse)
    return_last_state = _arrays.check_flag("return_last_state", return_last_state)
    _check_no_out(out)
    if a is None:
        raise TypeError("a must be an array or a scalar, got None")
    gate, initial = (complex(x) if _arrays.is_python_scalar(x) else None for x in (a, h0))
    given = {"a": a if gate is None else None, "b": b, "h0": h0 if initial is None else None, "out": None}
    x = _arrays_of(given | {"mask": mask, "reset": reset, "cu_seqlens": cu_seqlens})
    if getattr(x["a"], "weak_type", False) and isinstance(b, (jax.Array, np.ndarray)):
        x["a"] = x["a"].astype(x["b"].dtype)
    options = linear._Options(axis, reverse, return_last_state, out_dtype, gate, initial)  # noqa: SLF001
    ready = linear._make_ready(_calls.Given(tuple(x), tuple(map(_stand_in, x.values())), ()), options)  # noqa: SLF001
    _check_offsets(cu_seqlens, ready.length)
    if initial is not None:
        x["h0"] = jnp.full(ready.states, h0, _arrays.accumulation(_arrays.item_name(x["b"])))
    function = _LinearScan({
        "a": None if gate is None else a, "axis": ready.axis - x["b"].ndim, "reverse": reverse,
        "return_last_state": return_last_state, "out_dtype": ready.output,
    })  # fmt: skip
    found = _linear(function, _with_items(function, x, x["b"].ndim))
    axes = function.channels(x)
    h = found["h"].squeeze(axes["h"])
    return (h, found["last_state"].squeeze(axes["last_state"])) if return_last_state else h


def linear_scan_vjp(
    a: Any,
    h: Any,
    grad_h: Any = None,
    h0: Any = None,
    *,
    grad_last_state: Any = None,
    axis: int | None = None,
    reverse: bool = False,
    mask: Any = None,
    reset: Any = None,
    cu_seqlens: Any = None,
    grad_dtype: Any = None,
) -> LinearGradients:
    """`cuscan.linear_scan_vjp` on JAX arrays and tracers; `jax.vjp` of `linear_scan` calls it.

    Arguments, results and errors are those of `cuscan.linear_scan_vjp`, and so is the convention for complex ones.
    """
    reverse = _arrays.check_flag("reverse", reverse)
    if a is None:
        raise TypeError("a must be an array or a scalar, got None")
    if grad_h is None and grad_last_state is None:
        raise ValueError("grad_h or grad_last_state must be given: without both all gradients are zero")
    gate, initial = (complex(x) if _arrays.is_python_scalar(x) else None for x in (a, h0))
    given = {"a": a if gate is None else None, "h": h, "grad_h": grad_h, "h0": h0 if initial is None else None}
    given |= {"grad_last_state": grad_last_state, "mask": mask, "reset": reset, "cu_seqlens": cu_seqlens}
    x = _arrays_of(given)
    options = linear_vjp._Options(axis, reverse, grad_dtype, gate, initial)  # noqa: SLF001
    ready = linear_vjp._make_ready(_calls.Given(tuple(x), tuple(map(_stand_in, x.values())), ()), options)  # noqa: SLF001
    _check_offsets(cu_seqlens, ready.length)
    if initial is not None:
        x["h0"] = jnp.full(ready.states, h0, _arrays.accumulation(ready.item))
    function = _LinearScanVjp({
        "a": None if gate is None else a, "axis": ready.axis - x["h"].ndim, "reverse": reverse,
        "grad_dtype": None if grad_dtype is None else ready.dtypes[1],
    })  # fmt: skip
    found = _constant(function, _with_items(function, x, x["h"].ndim))
    shapes = {"a": None if x["a"] is None else x["a"].shape, "b": x["h"].shape, "h0": ready.states}
    shaped = {name: gradient.reshape(shapes[name]) for name, gradient in found.items()}
    return LinearGradients(*map(shaped.get, LinearGradients._fields))


def _with_items(function: _Linear, x: dict[str, Any], ndim: int) -> Arrays:
    """The arrays that are there with an axis of one item, a, mask and reset also with b's axes."""
    x = _present(x)
    for name in x.keys() & {"a", "mask", "reset"}:
        x[name] = x[name].reshape((1,) * (ndim - x[name].ndim) + x[name].shape)
    return x | {name: jnp.expand_dims(x[name], axis) for name, axis in function.channels(x).items() if name in x}


def _stand_in(x: Any) -> Any:
    """A NumPy array of this shape and type, for what is checked by shape and type."""
    return x if x is None or _arrays.is_python_scalar(x) else np.broadcast_to(np.zeros((), x.dtype), x.shape)


# --- selective_scan ----------------------------------------------------------------------------------------------


class _Selective(_Function):
    """What selective_scan and its gradients have in common."""

    marks = frozenset(("mask", "reset", "cu_seqlens"))

    def channels(self, axes: dict[str, int]) -> dict[str, int]:
        found = dict.fromkeys(
            ("u", "delta", "B", "C", "z", "grad_out", "y"), 2 if self.options["layout"] == "bld" else 1
        )
        found |= {"A": 0, "D": 0, "delta_bias": 0, "h0": 1, "grad_last_state": 1, "last_state": 1, "states": 2}
        return found | {name: 0 for name in ("B", "C") if axes[name] == 2}


class _SelectiveScan(_Selective):
    refused = "second derivatives of selective_scan"

    def results(self, x: Arrays) -> Results:
        u, A, layout = x["u"], x["A"], self.options["layout"]
        batch, length = u.shape[0], u.shape[1 if layout == "bld" else 2]
        item = _arrays.accumulation(_arrays.item_name(A if A.dtype.kind == "c" else u))
        results = {"y": jax.ShapeDtypeStruct(u.shape, self.options["out_dtype"])}
        if self.options["return_last_state"]:
            rows = len(x["cu_seqlens"]) - 1 if "cu_seqlens" in x else batch
            results["last_state"] = jax.ShapeDtypeStruct((rows, *A.shape), item)
        if self.options["return_states"]:
            results["states"] = jax.ShapeDtypeStruct((batch, -(-length // STATE_INTERVAL), *A.shape), item)
        return results

    def run(self, x: Arrays, to: Results) -> Iterable[Array]:
        found = selective.selective_scan(**x, **self.options, out=to["y"])
        return [found] if len(to) == 1 else found

    def rows(self, axes: dict[str, int]) -> set[str] | None:
        if "cu_seqlens" in axes:
            return None
        varying = (name for name in ("B", "C") if axes[name] > 2)
        return {"u", "delta", "z", "h0", "mask", "reset", "y", "last_state", "states", *varying}


class _SelectiveScanVjp(_Selective):
    refused = "second derivatives of selective_scan"

    def results(self, x: Arrays) -> Results:
        dtype = self.options["grad_dtype"]
        names = [name for name in SelectiveGradients._fields if name in x]
        return {name: jax.ShapeDtypeStruct(x[name].shape, _gradient_dtype(x[name], dtype)) for name in names}

    def run(self, x: Arrays, to: Results) -> Iterable[Array]:
        del to
        return _present(selective_vjp.selective_scan_vjp(**x, **self.options)._asdict()).values()

    def rows(self, axes: dict[str, int]) -> None:
        """Each item has its own gradients of A, D and delta_bias."""


def _selective_fwd(function: _SelectiveScan, x: Arrays) -> tuple[Results, Any]:
    x = {name: value.value for name, value in x.items()}
    found = _constant(_SelectiveScan(function.options | {"return_states": True}), x)
    return {name: found[name] for name in function.results(x)}, (x, found["states"])


def _selective_bwd(function: _SelectiveScan, kept: Any, grads: Results) -> tuple[Arrays]:
    x, states = kept
    grads = {name: grad for name, grad in grads.items() if not isinstance(grad, SymbolicZero)}
    if "states" in grads:
        raise NotImplementedError("the states of selective_scan have no gradient: use jax.lax.stop_gradient on them")
    given = x | {"states": states}
    if "y" in grads:
        real = _arrays.accumulation(_arrays.item_name(x["u"]))
        given["grad_out"] = grads["y"] if grads["y"].dtype == x["u"].dtype else grads["y"].astype(real)
    if "last_state" in grads:
        given["grad_last_state"] = jnp.conj(grads["last_state"])
    options = {name: function.options[name] for name in ("delta_softplus", "reverse", "delta_limit", "layout")}
    found = _constant(_SelectiveScanVjp(options | {"grad_dtype": None}), given)
    return ({name: jnp.conj(found[name]) if name in found else None for name in x},)


_selective = jax.custom_vjp(_call, nondiff_argnums=(0,))
_selective.defvjp(_selective_fwd, _selective_bwd, symbolic_zeros=True)
_selective = jax.jit(_selective, static_argnums=0)  # traced once for many layers; calls outside of jit are fast


def selective_scan(
    u: Any,
    delta: Any,
    A: Any,
    B: Any,
    C: Any,
    D: Any = None,
    z: Any = None,
    delta_bias: Any = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    *,
    h0: Any = None,
    reverse: bool = False,
    mask: Any = None,
    reset: Any = None,
    cu_seqlens: Any = None,
    delta_limit: tuple[float, float] | None = None,
    layout: str = "bld",
    return_states: bool = False,
    out: Any = None,
    out_dtype: Any = None,
) -> Any:
    """`cuscan.selective_scan` on JAX arrays and tracers, with gradients.

    Arguments, results and errors are those of `cuscan.selective_scan`; NumPy arrays beside JAX arrays become such. The
    saved states have no gradient. `out` must be None.
    """
    return_last_state = _arrays.check_flag("return_last_state", return_last_state)
    return_states = _arrays.check_flag("return_states", return_states)
    _check_no_out(out)
    options = _selective_options(delta_softplus, reverse, delta_limit, layout)
    given = {"u": u, "delta": delta, "A": A, "B": B, "C": C, "D": D, "z": z, "delta_bias": delta_bias, "h0": h0}
    x, _, kind = _selective_arrays(given, mask, reset, cu_seqlens, layout)
    options |= {"return_last_state": return_last_state, "return_states": return_states}
    options["out_dtype"] = _arrays.output_item(kind.item, out_dtype, None)
    found = _selective(_SelectiveScan(options), _grouped(x, layout))
    results = [found[name] for name in ("y", "last_state", "states") if name in found]
    return results[0] if len(results) == 1 else tuple(results)


def selective_scan_vjp(
    u: Any,
    delta: Any,
    A: Any,
    B: Any,
    C: Any,
    D: Any = None,
    z: Any = None,
    delta_bias: Any = None,
    delta_softplus: bool = False,
    *,
    grad_out: Any = None,
    grad_last_state: Any = None,
    states: Any = None,
    h0: Any = None,
    reverse: bool = False,
    mask: Any = None,
    reset: Any = None,
    cu_seqlens: Any = None,
    delta_limit: tuple[float, float] | None = None,
    layout: str = "bld",
    grad_dtype: Any = None,
) -> SelectiveGradients:
    """`cuscan.selective_scan_vjp` on JAX arrays and tracers; `jax.vjp` of `selective_scan` calls it.

    Arguments, results and errors are those of `cuscan.selective_scan_vjp`, and so is the convention for complex ones.
    """
    options = _selective_options(delta_softplus, reverse, delta_limit, layout) | {"grad_dtype": grad_dtype}
    if grad_out is None and grad_last_state is None:
        raise ValueError("grad_out or grad_last_state must be given: without both all gradients are zero")
    given = {"u": u, "delta": delta, "A": A, "B": B, "C": C, "D": D, "z": z, "delta_bias": delta_bias, "h0": h0}
    given |= {"grad_out": grad_out, "grad_last_state": grad_last_state, "states": states}
    x, sizes, kind = _selective_arrays(given, mask, reset, cu_seqlens, layout)
    _check_gradients(x, sizes, kind)
    found = _constant(_SelectiveScanVjp(options), _grouped(x, layout))
    shaped = {name: gradient.reshape(x[name].shape) for name, gradient in found.items()}
    return SelectiveGradients(*map(shaped.get, SelectiveGradients._fields))


def _selective_options(delta_softplus: bool, reverse: bool, delta_limit: Any, layout: str) -> dict[str, Any]:
    selective.check_layout(layout)
    return {
        "delta_softplus": _arrays.check_flag("delta_softplus", delta_softplus),
        "reverse": _arrays.check_flag("reverse", reverse),
        "delta_limit": _arrays.check_limits("delta_limit", delta_limit),
        "layout": layout,
    }


def _selective_arrays(
    given: dict[str, Any], mask: Any, reset: Any, offsets: Any, layout: str
) -> tuple[dict[str, Any], selective.Sizes, SelectiveKind]:
    """Checked."""
    x = _arrays_of(given | {"mask": mask, "reset": reset, "cu_seqlens": offsets})
    selective.check_are_arrays(x)
    sizes = selective.check_shapes(x, layout)
    kind = selective.check_types(x)
    _check_offsets(offsets, sizes.length)
    return x, sizes, kind


def _grouped(x: dict[str, Any], layout: str) -> Arrays:
    """The arrays that are there, B and C that vary with an axis of groups, which vmap joins."""
    axis = 2 if layout == "bld" else 1
    return _present(x) | {name: jnp.expand_dims(x[name], axis) for name in ("B", "C") if x[name].ndim == 3}


# --- selective_state_update --------------------------------------------------------------------------------------


class _StateUpdate(_Function):
    refused = "gradients of selective_state_update"
    aliases: ClassVar[dict[str, str]] = {"state": "state"}
    marks = frozenset(("state_batch_indices",))

    def results(self, x: Arrays) -> Results:
        state = jax.ShapeDtypeStruct(x["state"].shape, x["state"].dtype)
        return {"y": jax.ShapeDtypeStruct(x["x"].shape, self.options["out_dtype"]), "state": state}

    def run(self, x: Arrays, to: Results) -> Iterable[Array]:
        state_update.selective_state_update(**x | {"state": to["state"]}, **self.options, out=to["y"])
        return to.values()

    def channels(self, axes: dict[str, int]) -> dict[str, int]:
        return dict.fromkeys({*axes, "y"} - self.marks, 1) | {"A": 0, "D": 0, "dt_bias": 0}

    def rows(self, axes: dict[str, int]) -> set[str] | None:
        return None if "state_batch_indices" in axes else {*axes, "y"} - {"A", "D", "dt_bias"}


def selective_state_update(
    state: Any,
    x: Any,
    dt: Any,
    A: Any,
    B: Any,
    C: Any,
    D: Any = None,
    z: Any = None,
    dt_bias: Any = None,
    dt_softplus: bool = False,
    *,
    state_batch_indices: Any = None,
    dt_limit: tuple[float, float] | None = None,
    out: Any = None,
    out_dtype: Any = None,
) -> tuple[Any, Any]:
    """`cuscan.selective_state_update` on JAX arrays and tracers, which gives (y, new_state) and changes nothing.

    Arguments and errors are those of `cuscan.selective_state_update`. Where `state` is donated to jit, or comes from
    within it and is not needed any more, the new state takes its place in memory. There is no gradient. `out` must be
    None.
    """
    dt_softplus = _arrays.check_flag("dt_softplus", dt_softplus)
    limits = _arrays.check_limits("dt_limit", dt_limit)
    _check_no_out(out)
    given = {"state": state, "x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "z": z, "dt_bias": dt_bias}
    arrays = _arrays_of(given | {"state_batch_indices": state_batch_indices})
    for name, value in arrays.items():
        if _arrays.is_python_scalar(value) or (value is None and name in _REQUIRED):
            raise TypeError(f"{name} must be an array, got {type(value).__name__}")
    _check_shapes(arrays)
    kind = _check_types(arrays)
    options = {
        "dt_softplus": dt_softplus,
        "dt_limit": limits,
        "out_dtype": _arrays.output_item(kind.item, out_dtype, None),
    }
    grouped = {name: arrays[name][:, None] for name in ("B", "C") if arrays[name].ndim == 2}
    found = _state_update(_StateUpdate(options), _present(arrays) | grouped)
    return found["y"], found["state"]


_state_update = jax.jit(_constant, static_argnums=0)
