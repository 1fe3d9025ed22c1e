"""Other libraries that compute what a workload does, on the same inputs, where they can be imported.

Each is a generator: it gives nothing where it does not fit, else (call, what makes of the call's result what the
workload's own check takes, or None). Conversions of inputs are outside the call.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from .workloads import Linear, LinearBackward, Load, Selective, SelectiveBackward, Update

Call = Callable[[], Any]
Given = tuple[Call, Callable[[Any], Any] | None]


@dataclass(frozen=True)
class Peer:
    """A library's call on a workload's inputs."""

    name: str
    call: Call
    result: Callable[[Any], Any] | None
    wait: Callable[[Any], object] | None  # for what works on streams of its own, and is timed by the clock


def to_torch(x: Any) -> Any:
    """The same memory as a tensor; what is no array as it is."""
    import torch

    if not hasattr(x, "dtype"):
        return x
    if x.dtype.name == "bfloat16":  # DLPack has it, CuPy's has not
        return torch.from_dlpack(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_dlpack(x)


def from_torch(cupy: Any, x: Any) -> Any:
    """The same memory as a CuPy array."""
    import ml_dtypes
    import torch

    if x.dtype == torch.bfloat16:
        return cupy.from_dlpack(x.view(torch.int16)).view(ml_dtypes.bfloat16)
    return cupy.from_dlpack(x)


def peers(cupy: Any, load: Load, inputs: dict[str, Any]) -> Iterator[Peer]:
    """Those that are installed and fit the workload."""
    for name, (module, make, wait) in _PEERS.items():
        if importable(module):
            for call, result in make(cupy, load, inputs):
                yield Peer(name, call, result, wait)


@cache
def importable(module: str) -> bool:
    """Whether a module is there, and whatever it needs."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what they say of themselves
            importlib.import_module(module)
    except (ImportError, OSError, RuntimeError):
        return False
    return True


# --- selective_scan --------------------------------------------------------------------------------------------------


def _mamba(cupy: Any, load: Load, inputs: dict[str, Any]) -> Iterator[Given]:
    if not isinstance(load, Selective) or load.mask or load.sequences or load.states or load.last:
        return
    import selective_scan_cuda

    def along(name: str) -> Any:
        x = inputs.get(name)
        if x is None:
            return None
        return to_torch(cupy.ascontiguousarray(x.transpose(0, 2, 1)) if load.layout == "bld" else x)

    u, delta, z = (along(name) for name in ("u", "delta", "z"))
    B, C = (along(name)[:, None] for name in ("B", "C"))
    A, D, bias = (to_torch(inputs[name]) for name in ("A", "D", "delta_bias"))
    softplus, again = True, False

    def forward() -> Any:  # it has no state to enter
        return selective_scan_cuda.fwd(u, delta, A, B, C, D, z, bias, softplus)

    def given(x: Any) -> Any:
        x = from_torch(cupy, x)
        return x.transpose(0, 2, 1) if load.layout == "bld" else x

    if not isinstance(load, SelectiveBackward):
        yield forward, None if load.h0 else lambda made: given(made[-1 if load.z else 0])
        return
    out, x, *_ = forward()
    grad = along("grad_out")

    def backward() -> Any:
        return selective_scan_cuda.bwd(
            u, delta, A, B, C, D, z, bias, grad, x, out if load.z else None, None, softplus, again
        )

    def gradients(made: Any) -> Any:
        return _Gradients(given(made[0]), given(made[1]))

    yield backward, None if load.h0 else gradients


@dataclass(frozen=True)
class _Gradients:
    u: Any
    delta: Any


def _mamba_update(cupy: Any, load: Load, inputs: dict[str, Any]) -> Iterator[Given]:
    if not isinstance(load, Update):
        return
    from mamba_ssm.ops.triton.selective_state_update import selective_state_update

    del cupy
    given = {name: to_torch(x) for name, x in inputs.items()}
    yield lambda: selective_state_update(**given), None


# --- linear_scan -----------------------------------------------------------------------------------------------------


def _accelerated(cupy: Any, load: Load, inputs: dict[str, Any]) -> Iterator[Given]:
    """Rows of a power of two, at most 65536 steps, along the last axis of (batch, channels, length)."""
    if not isinstance(load, Linear) or load.scalar or len(load.shape) != 3 or load.axis != 2:
        return
    if load.length > 65536 or load.length & (load.length - 1) or load.dtype != "float32":
        return
    import torch
    from accelerated_scan.warp import scan

    if not isinstance(load, LinearBackward):
        a, b = (to_torch(inputs[name]) for name in ("a", "b"))
        yield lambda: scan(a, b), lambda made: from_torch(cupy, made)
        return
    a, grad = (to_torch(inputs[name]) for name in ("a", "grad_h"))
    a, b = a.detach().requires_grad_(), grad.detach().clone().requires_grad_()  # b is what grad_h was made from
    h = scan(a, b)
    yield lambda: torch.autograd.grad(h, (a, b), grad, retain_graph=True), None


def _triton(cupy: Any, load: Load, inputs: dict[str, Any]) -> Iterator[Given]:
    walks = isinstance(load, Linear) and int(np.prod(load.shape)) // load.length < 32  # one program, far too long
    if not isinstance(load, Linear) or isinstance(load, LinearBackward) or load.scalar:
        return
    if walks and load.length > 1 << 22:
        return
    import torch

    from . import triton_scan

    a, b = (to_torch(inputs[name]) for name in ("a", "b"))
    h = torch.empty_like(b)

    def call() -> Any:
        triton_scan.linear_scan(a, b, h, load.axis)
        return h

    yield call, lambda made: from_torch(cupy, made)


def _jax(cupy: Any, load: Load, inputs: dict[str, Any]) -> Iterator[Given]:
    wanted = ((8, 4096, 1536), (8, 1536, 4096), (1, 131072, 512))  # XLA compiles a minute for long rows
    if not isinstance(load, Linear) or isinstance(load, LinearBackward) or load.dtype != "float32":
        return
    if load.shape not in wanted:
        return
    import jax

    def combine(earlier: Any, later: Any) -> Any:
        return earlier[0] * later[0], later[0] * earlier[1] + later[1]

    def scanned(gates: Any, drives: Any) -> Any:
        return jax.lax.associative_scan(combine, (gates, drives), axis=load.axis)[1]

    scan = jax.jit(scanned)
    a, b = (jax.dlpack.from_dlpack(inputs[name]) for name in ("a", "b"))
    yield lambda: scan(a, b), lambda made: cupy.from_dlpack(made)


def _block(made: Any) -> None:
    made.block_until_ready()


def _lfilter(cupy: Any, load: Load, inputs: dict[str, Any]) -> Iterator[Given]:
    if not isinstance(load, Linear) or not load.scalar:
        return
    from cupyx.scipy.signal import lfilter

    numerator, denominator = cupy.ones(1, load.dtype), cupy.array([1, -inputs["a"]], load.dtype)
    yield lambda: lfilter(numerator, denominator, inputs["b"], axis=load.axis), lambda made: made


def _cuda_compute(cupy: Any, load: Load, inputs: dict[str, Any]) -> Iterator[Given]:
    """One row; what it writes are pairs (gate, state)."""
    if not isinstance(load, Linear) or isinstance(load, LinearBackward) or load.scalar or len(load.shape) > 1:
        return
    import cuda.compute as cc

    pair = cc.gpu_struct({"gate": np.float32, "state": np.float32})

    def combine(x: Any, y: Any) -> Any:
        return pair(x[0] * y[0], y[0] * x[1] + y[1])

    both = cupy.empty(load.length, pair.dtype)
    steps, first = cc.ZipIterator(inputs["a"], inputs["b"]), pair(1.0, 0.0)

    def call() -> Any:
        cc.inclusive_scan(d_in=steps, d_out=both, op=combine, init_value=first, num_items=load.length)
        return both

    yield call, lambda made: cupy.ascontiguousarray(made.view(np.float32).reshape(-1, 2)[:, 1])


_PEERS: dict[
    str, tuple[str, Callable[[Any, Load, dict[str, Any]], Iterator[Given]], Callable[[Any], object] | None]
] = {
    "mamba_ssm": ("selective_scan_cuda", _mamba, None),
    "mamba_ssm update": ("mamba_ssm.ops.triton.selective_state_update", _mamba_update, None),
    "accelerated_scan": ("accelerated_scan.warp", _accelerated, None),
    "triton associative_scan": ("bench.triton_scan", _triton, None),
    "jax associative_scan": ("jax", _jax, _block),
    "cupyx lfilter": ("cupyx.scipy.signal", _lfilter, None),
    "cuda.compute": ("cuda.compute", _cuda_compute, None),
}
