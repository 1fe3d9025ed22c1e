"""How a call runs on a chip, and how long it takes: measured on a GPU, planned for an H200 on NumPy arrays."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from . import _arrays, _limits
from ._arrays import host_place
from ._figures import Problem
from ._plan import DeviceLimits
from ._trace import Trace, trace

STEP = 25e-9  # seconds that a step takes in a thread that has the chip for itself; rough


@dataclass
class Plan:
    """How the call runs on a chip, and how long it takes.

    Attributes
    ----------
    device : str
        The GPU; on NumPy arrays an H200, for which the call is planned only.
    plans : tuple
        That of the call first; `reason` is why.
    kernels : list of str
        In the order of their launches.
    scratch_bytes : int
        What the call allocates besides its results.
    blocks, threads : int
        Of the last launch, with its `registers`, `frame_bytes`, `blocks_per_sm` and `waves` (on a GPU).
    limit_ms, bound_by
        The least time on this chip, by its nominal rates.
    expected_ms : float
        A rough guess: the limit, the share of the chip that has work, and the length of the longest chain.
    measured_ms, host_us : float, optional
        Of the call: time of the device, and of the host until it returns (on a GPU).
    """

    device: str
    plans: tuple[Any, ...]
    reason: str
    kernels: list[str]
    copies: list[str]
    scratch_bytes: int
    blocks: int
    threads: int
    limit_ms: float
    bound_by: str
    expected_ms: float
    chain: int  # steps that a thread walks
    multiprocessors: int
    registers: int | None = None
    frame_bytes: int | None = None
    blocks_per_sm: int | None = None
    waves: float | None = None
    measured_ms: float | None = None
    host_us: float | None = None


class _DryPlace:
    """An H200 on which nothing runs."""

    limits = DeviceLimits(architecture=90, multiprocessors=132, shared_memory=227 * 1024)

    def __init__(self) -> None:
        self.modules = SimpleNamespace(get_function=lambda *_: _nothing)
        self.next = 1 << 62

    def allocate(self, shape: tuple[int, ...], dtype: Any) -> Any:
        self.next += 1 << 42
        return _arrays.shadow(self.next, shape, None, np.dtype(dtype))

    def pointer(self, array: Any) -> int:
        return int(array.ctypes.data)

    def _ignore(self, *_: Any) -> None:
        pass

    assign = keep = update = done = _ignore


def _dry() -> Any:
    return _DryPlace()


def _nothing(*_: Any, **__: Any) -> None:
    pass


_nothing.max_dynamic_shared_size_bytes = 1 << 20  # type: ignore[attr-defined]


def plan_of(xp: Any, function: Any, given: dict[str, Any], p: Problem) -> Plan:
    """Of function(**given), which is run; on a GPU some times."""
    measured: dict[str, Any] = {}
    if xp is np:
        attributes: Mapping[str, int] = _limits.H200
        token = host_place.set(_dry)
        try:
            with trace() as t:
                function(**given)
        finally:
            host_place.reset(token)
        device = "as on an H200"
    else:
        gpu = xp.cuda.Device()
        attributes, device = gpu.attributes, xp.cuda.runtime.getDeviceProperties(gpu.id)["name"].decode()
        with trace() as t:
            function(**given)
        last = _last(t)
        seen = _limits.residence(attributes, last.function, last.blocks, last.threads, last.shared)
        measured = dict(vars(seen)) | _timed(xp, lambda: function(**given))
    last, call = _last(t), t.calls[0]
    rates = _limits.Limits.nominal(attributes)
    batch, length, channels, state = p.shape
    plan = call.plans[0]
    if p.function == "selective_scan":
        arrays = [given[name] for name in ("u", "u", "delta", "z", "B", "C") if given[name] is not None]
        least, by = _limits.least_selective(
            batch * length * channels,
            state,
            z=given["z"] is not None,
            moved=sum(x.nbytes for x in arrays),
            limits=rates,
        )
        chain = plan.order.chunk
    else:
        gate = given["a"] if not _arrays.is_python_scalar(given["a"]) else None
        least, by = (2 * given["b"].nbytes + (0 if gate is None else gate.nbytes)) / rates.copy, "bytes"
        share = plan.order.row_warps if plan.order.lanes.value == "rows" else 32 * plan.order.row_warps
        chain = -(-plan.order.chunk // share)
    multiprocessors = attributes["MultiProcessorCount"]
    fill = min(1.0, last.blocks * last.threads / (8 * 32 * multiprocessors))
    twice = 2 if plan.chunks > 1 and not getattr(plan.order, "one_pass", False) else 1
    expected = max(twice * least / fill, chain * STEP)
    return Plan(
        device, call.plans, plan.reason, [x.kernel for x in t.launches], [x.what for x in t.copies], call.scratch_bytes,
        last.blocks, last.threads, least * 1e3, by, expected * 1e3, chain, multiprocessors, **measured,
    )  # fmt: skip


def _last(t: Trace) -> Any:
    """The launch that writes the result."""
    return [x for x in t.launches if not x.kernel.startswith(("step_marks", "sum_partials"))][-1]


def _timed(xp: Any, call: Any) -> dict[str, float]:
    """Device and host time of a call like earlier ones, the least of five."""
    device, host = [], []
    for _ in range(5):
        begin, end = xp.cuda.Event(), xp.cuda.Event()
        xp.cuda.Device().synchronize()
        begin.record()
        start = time.perf_counter()
        call()
        host.append(time.perf_counter() - start)
        end.record()
        end.synchronize()
        device.append(float(xp.cuda.get_elapsed_time(begin, end)))
    return {"measured_ms": min(device), "host_us": min(host) * 1e6}
