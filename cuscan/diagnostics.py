"""cuscan.diagnose: what is unusual about a call, where, why, and what to do."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from . import _arrays, _causes, _compare, _figures, _performance
from ._arrays import _dtype
from ._compare import Difference, Precision
from ._figures import Delta, Gates, Memory, NotFinite, Problem
from ._findings import LEVELS, Finding, listed, number, table
from ._performance import Plan
from .linear import linear_scan
from .linear_vjp import linear_scan_vjp
from .selective import selective_scan
from .selective_vjp import selective_scan_vjp


@dataclass
class Report:
    """What `cuscan.diagnose` found; it prints as a table.

    Attributes
    ----------
    function : str
        "selective_scan" or "linear_scan".
    shapes : dict
        Of the arguments, with their types.
    findings : list of Finding
        The worst first; `severe` has the errors and warnings among them.
    gates, memory, delta, precision, plan
        The figures; None where there is nothing to measure.
    not_finite : dict
        Of each array that has NaN or inf where it counts.
    gradients : dict
        Of each given gradient: quantiles of its size by distance from the end, in powers of two.
    differences : dict
        Of each given gradient, with `grad_out`: how it differs from cuscan's.
    """

    function: str
    shapes: dict[str, str]
    findings: list[Finding] = field(default_factory=list)
    gates: Gates | None = None
    memory: Memory | None = None
    delta: Delta | None = None
    precision: Precision | None = None
    plan: Plan | None = None
    not_finite: dict[str, NotFinite] = field(default_factory=dict)
    gradients: dict[str, list[tuple[int, float, float]]] = field(default_factory=dict)
    differences: dict[str, Difference] = field(default_factory=dict)

    @property
    def severe(self) -> list[Finding]:
        """Errors and warnings."""
        return [x for x in self.findings if x.level != "note"]

    def __str__(self) -> str:
        return f"{self.function}\n{table(self._rows())}\n\n{listed(self.findings)}"

    def _rows(self) -> Iterator[tuple[str, Any]]:
        yield "arguments", ", ".join(f"{name} {shape}" for name, shape in self.shapes.items())
        if (g := self.gates) is not None:
            yield "gates", f"{g.smallest:.4g} to {g.largest:.9g}; {g.above_one} above 1, {g.below_1e_30} below 1e-30"
            yield "", f"exactly 0: {g.zero_share:.2%}, exactly 1: {g.one_share:.2%}"
        if (m := self.memory) is not None:
            yield "memory", f"steps until 1e-3 is left: {number(m.quantiles)}  (least, 10 %, median, 90 %, largest)"
            yield "", f"below float32's resolution: {number(m.resolution_quantiles)}"
            if m.hidden is not None:
                yield "", f"the last output cannot see the first {m.hidden_from_all:.1%} of the steps"
        if self.delta is not None:
            yield "delta", f"{number(self.delta.quantiles)}  (least, 10 %, median, 90 %, largest)"
        for name, x in self.not_finite.items():
            yield f"{name}", f"{x.nan} NaN, {x.inf} inf"
        if (q := self.precision) is not None:
            yield (
                "precision",
                f"error {q.level:.1e} of the result's RMS, largest {q.largest:.1e}, {q.of_bound:.2g} of bound",
            )
            yield "", f"{q.growth:.3g} times as large in the last quarter as in the first"
            if q.state_in_bfloat16 is not None:
                yield "", f"with the state kept in bfloat16: {q.state_in_bfloat16:.1e}"
        for name, bins in self.gradients.items():
            far, near = bins[-1], bins[0]
            yield f"gradient {name}", f"median {near[1]:.2e} near the end, {far[1]:.2e} from {far[0]} steps before it"
        if (p := self.plan) is not None:
            yield "plan", f"{p.reason} ({p.device})"
            yield "", f"{len(p.kernels)} launches: {', '.join(dict.fromkeys(p.kernels))}"
            yield "", f"{p.blocks} blocks of {p.threads} threads, {p.scratch_bytes} bytes of scratch"
            if p.registers is not None:
                sits = (
                    f"{p.registers} registers, frame {p.frame_bytes}, {p.blocks_per_sm} blocks an SM, {p.waves} waves"
                )
                yield "", sits
            yield "time", f"limit {p.limit_ms:.3g} ms ({p.bound_by}), expected about {p.expected_ms:.3g} ms"
            if p.measured_ms is not None:
                yield "", f"measured {p.measured_ms:.3g} ms on the device, {p.host_us:.0f} us on the host"

    def plot(self) -> Any:
        """Pictures of decay against distance, gates, and error against length (needs the extra `plot`).

        Returns
        -------
        matplotlib.figure.Figure
            1200 pixels wide at its own resolution; ``report.plot().savefig("report.png")``.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("report.plot needs matplotlib: install cuscan with the extra plot") from error
        figure = Figure(figsize=(12, 4), dpi=100, layout="constrained")
        decay, gates, errors = figure.subplots(1, 3)
        if self.memory is not None:
            steps = np.maximum(self.memory.steps, 1e-3)
            distance = np.geomspace(1, max(10.0, min(float(np.quantile(steps, 0.95, method="nearest")), 1e8) * 2), 200)
            for share, name in ((0.1, "a tenth forgets sooner"), (0.5, "median"), (0.9, "a tenth remembers longer")):
                decay.plot(
                    distance, _figures.DECAYED ** (distance / np.quantile(steps, share, method="nearest")), label=name
                )
            decay.axhline(_figures.RESOLUTION, color="gray", linestyle=":", label="float32's resolution")
            decay.set(
                xscale="log", yscale="log", ylim=(1e-9, 2), xlabel="distance / steps", ylabel="what is left of an input"
            )
            decay.set_title("Decay, over channels and states")
            decay.legend(fontsize="small", loc="lower left")
        if self.gates is not None:
            edges = _figures.HISTOGRAM
            gates.stairs(self.gates.histogram, 10.0**edges, fill=True)
            gates.set(
                xscale="log", xlabel="1 - gate (1e-9: exactly 1 or more)", ylabel="gates of an even sample / count"
            )
            gates.set_title("Gates")
        if self.precision is not None:
            length, level = zip(*self.precision.by_length, strict=True)
            errors.plot(length, np.maximum(level, 1e-12), marker="o")
            errors.set(xscale="log", yscale="log", xlabel="length / steps", ylabel="RMS error / RMS of the result")
            errors.set_ylim(max(min(level), 1e-12) / 3, 3 * max(*level, 1e-12))
            errors.set_title("Error against float64")
        return figure


def diagnose(*args: Any, result: Any = None, grad_out: Any = None, gradients: Any = None, **kwargs: Any) -> Report:
    """Look for what goes wrong without an error: in the arguments of a call, its result and its gradients.

    Parameters
    ----------
    *args, **kwargs
        The arguments of `cuscan.selective_scan` (u, delta, A, B, C, ...) or of `cuscan.linear_scan` (a, b, ...).
    result : array, optional
        What another implementation gave for them: compared with float64, and where it is wrong with what common
        mistakes would give.
    grad_out : array, optional
        Gradient of a loss with respect to the result: given gradients are compared with cuscan's.
    gradients : mapping or named tuple, optional
        Gradients of the arguments, by name.

    Returns
    -------
    Report
        Prints as a table; `findings` has what was found, each with figure, place, cause and action, and `gates`,
        `memory`, `delta`, `not_finite`, `precision`, `gradients` and `plan` the figures.

    Raises
    ------
    TypeError
        The arguments are those of neither function.

    Notes
    -----
    The work is done where the arrays are, some channels at a time: nothing of shape (batch, length, channels, state)
    is made. The call is run once, and on a GPU timed. The rows that are compared with float64 are the worst by memory,
    by size and by difference.

    Examples
    --------
    >>> import numpy as np
    >>> import cuscan
    >>> report = cuscan.diagnose(1.02, np.ones(5000, np.float32))
    >>> print(report.findings[1])
    ERROR: the state diverges: largest gate 1.02; the fastest state grows by 0.02 a step: float32
        overflows at step 4282, found at 4282.
      At: time 4999, row 0.
      Cause: the gates are above 1 for many steps.
      Do: make gates at most 1, as sigmoid does, or exp of what is < 0.
    """
    function, given = _bound(args, kwargs)
    given = {name: x for name, x in given.items() if name not in ("out", "return_last_state", "return_states")}
    arrays = {name: _mine(x) for name, x in given.items() if name in _ARRAYS and not _arrays.is_python_scalar(x)}
    call = _arrays.Call(**arrays)
    given |= {name: call.array(name) for name in arrays}
    shapes = {name: f"{_arrays.item_name(given[name])} {tuple(given[name].shape)}" for name in arrays
              if given[name] is not None}  # fmt: skip
    report = Report(function.__name__, shapes)
    with np.errstate(all="ignore"), call.place() if call.xp is not np else contextlib.nullcontext():
        report.findings += _causes.of_types(given)
        _look(
            call.xp,
            function,
            given,
            report,
            None if result is None else _mine(result[0] if isinstance(result, tuple) else result),
        )
        if gradients is not None and report.gates is not None:
            _look_at_gradients(call.xp, function, given, report, gradients, grad_out)
    report.findings.sort(key=lambda x: LEVELS.index(x.level))
    return report


_ARRAYS = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias", "h0", "mask", "reset", "cu_seqlens", "out", "a", "b")


def _bound(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    for function in (selective_scan, linear_scan):
        try:
            bound = inspect.signature(function).bind(*args, **kwargs)
        except TypeError:
            continue
        bound.apply_defaults()
        return function, dict(bound.arguments)
    raise TypeError(
        "expected the arguments of selective_scan (u, delta, A, B, C, ...) or of linear_scan (a, b, ...), "
        f"got {len(args)} without a name and {', '.join(kwargs) or 'none'} by name"
    )


def _mine(x: Any) -> Any:
    """Arrays of PyTorch and JAX as NumPy's or CuPy's, without their gradients."""
    module = type(x).__module__.partition(".")[0]
    if module in ("jax", "jaxlib"):
        return np.asarray(x) if next(iter(x.devices())).platform == "cpu" else sys.modules["cupy"].from_dlpack(x)
    if module != "torch":
        return x
    torch = sys.modules["torch"]
    x = x.detach()
    narrow = x.dtype == torch.bfloat16
    bits = x.view(torch.int16) if narrow else x
    if x.is_cuda:
        import cupy

        array = cupy.from_dlpack(bits)
    else:
        array = bits.numpy()
    return array.view(_dtype("bfloat16")) if narrow else array


def _look(xp: Any, function: Any, given: dict[str, Any], report: Report, theirs: Any) -> None:
    """Run the call, fill in the report."""
    selective = function is selective_scan
    like = given["u" if selective else "b"]
    try:
        if given["cu_seqlens"] is not None:
            axis = (1 if given["layout"] == "bld" else 2) if selective else given["axis"] or 0
            report.findings += _causes.of_offsets(given["cu_seqlens"], like.shape[axis])
            if any(x.level == "error" for x in report.findings):
                return
        y = function(**given | {"out_dtype": _arrays.accumulation(_arrays.item_name(like))})
    except (TypeError, ValueError, IndexError) as error:
        figure = f"{type(error).__name__}: {str(error).rstrip('.')}"
        report.findings.append(
            Finding("error", "the call is refused", figure, "the message says it", "mend that first")
        )
        return
    if not y.size or (selective and not given["A"].size):
        report.findings.append(Finding("note", "the call is empty", f"shape {tuple(like.shape)}", "a size is 0", ""))
        return
    if theirs is not None and tuple(theirs.shape) != tuple(y.shape):
        report.findings.append(_causes.of_shape(tuple(theirs.shape), tuple(y.shape)))
        theirs = None
    p = _problem(xp, function, given)
    passed = _figures.gate_figures(p)
    report.gates, report.memory, report.delta = passed.gates, passed.memory, passed.delta
    y, found = _turned(p, y), report.not_finite
    for name in (*_ARRAYS, "result"):
        x = y if name == "result" else p.arrays.get(name)
        if x is not None and name not in ("mask", "reset"):
            timed = name in ("u", "delta", "z", "a", "b", "result") or (name in ("B", "C") and x.ndim == 4)
            if (bad := _figures.not_finite(p, x if timed else x.reshape(1, 1, -1), marks=timed)) is not None:
                found[name] = bad if timed else NotFinite(bad.nan, bad.inf, (0, 0), bad.kind)
    if "result" in found and passed.gates.overflow_predicted is not None:  # where it is seen first
        b, _, d = found["result"].first
        passed.gates.overflow_predicted = _figures.overflow(p, passed.gates, b, d) or passed.gates.overflow_predicted
    report.findings += _causes.of_values(p, found, passed.gates)
    report.findings += _causes.of_gates(p, passed.gates, found)
    report.findings += _causes.of_memory(p, passed.memory)
    if passed.delta is not None:
        report.findings += [*_causes.of_delta(p, passed.delta), *_causes.of_parameters(p)]
    report.findings += _causes.of_pads(p, passed.pads_change)
    output = _arrays.output_item(p.item, given["out_dtype"], None)
    report.findings += _causes.of_output(p, y, output.name)
    if "result" not in found:
        report.findings += _compared(p, report, y, None if theirs is None else _turned(p, theirs))
    del y
    report.plan = _performance.plan_of(xp, function, given, p)
    report.findings += _causes.of_plan(report.plan)


def _problem(xp: Any, function: Any, given: dict[str, Any]) -> Problem:
    if function is selective_scan:
        names = ("delta_softplus", "delta_limit", "reverse", "layout")
        return _figures.selective_problem(xp, given, {name: given[name] for name in names})
    b, given = given["b"], dict(given)
    axis = (given["axis"] or 0) % b.ndim
    for name, shape in (("a", (1,) * b.ndim), ("h0", b.shape[:axis] + b.shape[axis + 1 :])):
        if _arrays.is_python_scalar(given[name]):
            lead = (len(given["cu_seqlens"]) - 1,) if name == "h0" and given["cu_seqlens"] is not None else ()
            given[name] = xp.full((*lead, *shape), given[name], np.complex128 if b.dtype.kind == "c" else np.float64)
    return _figures.linear_problem(xp, given, {"axis": axis, "reverse": given["reverse"]})


def _turned(p: Problem, y: Any) -> Any:
    """A result as (batch, time, channels) in the direction of the scan."""
    if p.function == "linear_scan":
        y = p.xp.moveaxis(y, p.options["axis"], 0).reshape(p.length, -1)[None]
    elif p.options["layout"] == "bdl":
        y = y.transpose(0, 2, 1)
    return y[:, ::-1] if p.options["reverse"] else y


def _compared(p: Problem, report: Report, y: Any, theirs: Any) -> Iterator[Finding]:
    """The worst rows against float64: by memory, by size, and by how far `theirs` is off."""
    memory = report.memory
    assert memory is not None
    at = np.unravel_index(int(abs(y).argmax()), y.shape)
    b, d = int(at[0]), int(at[2])
    if theirs is not None:
        if (bad := _figures.not_finite(p, theirs)) is not None:
            report.not_finite["given result"] = bad
            yield _causes.of_given_values(bad, p.where(bad.first[0], bad.first[1], bad.first[2]))
            return
        worst = -1.0
        for block in p.blocks(y.shape[2]):
            off = abs(theirs[:, :, block].astype(p.wide) - y[:, :, block])
            if p.function == "selective_scan" and p.counted is not None:  # what is given where nothing counts is free
                off = p.xp.where(p.counted, off, 0)
            if (most := float(off.max())) > worst:
                at = np.unravel_index(int(off.argmax()), off.shape)
                worst, b, d = most, int(at[0]), int(at[2]) + block.start
    longest = int(np.argmax(memory.resolution.max(axis=1))) if len(memory.steps) == p.shape[2] else 0
    rows = _compare.Rows(p, b, sorted({d, longest, p.shape[2] // 2}))
    truth = rows.truth()
    report.precision = q = _compare.precision(rows, rows.of_result(y), truth)
    yield from _causes.of_precision(q, p.where(b, 0, d))
    if theirs is not None:
        item = _arrays.item_name(theirs)
        given = rows.of_result(theirs).astype(truth.dtype)
        error, scale = np.abs(given - truth), max(float(np.sqrt(np.mean(np.abs(truth) ** 2))), 1e-300)
        if p.function == "selective_scan" and p.counted is not None:
            error = np.where(_figures.to_host(p.counted[b]), error, 0)
        allowed = 100 * max(q.largest, 1e-6) * scale + 2 * _causes.NARROW.get(item, 0) * np.abs(truth)
        if (error > allowed).any():
            t, k = (int(i) for i in np.unravel_index(int((error - allowed).argmax()), error.shape))
            where = p.where(b, t, rows.channels[k])
            yield _causes.of_result(rows.guess(given, truth), float(error.max()) / scale, q.largest, where)


def _look_at_gradients(
    xp: Any, function: Any, given: dict[str, Any], report: Report, gradients: Any, grad_out: Any
) -> None:
    named = gradients if isinstance(gradients, Mapping) else gradients._asdict()
    named = {name: _mine(x) for name, x in named.items() if x is not None}
    selective = function is selective_scan
    axis = (1 if given["layout"] == "bld" else 2) if selective else (given["axis"] or 0) % given["b"].ndim
    along = {}  # the axis of time, where there is one
    for name, x in named.items():
        if selective and (name in ("u", "delta", "z") or (name in ("B", "C") and x.ndim > 2)):
            along[name] = axis if given["layout"] == "bld" else x.ndim - 1
        elif not selective and name in ("a", "b") and tuple(x.shape) == tuple(given["b"].shape):
            along[name] = axis
    for name, at in along.items():
        report.gradients[name] = bins = _by_distance(xp, xp.moveaxis(named[name], at, 0), reverse=given["reverse"])
        report.findings += _causes.of_distance(name, bins)
    if grad_out is None:
        return
    grad_out = _mine(grad_out)
    arguments = {name: x for name, x in given.items() if name not in ("b", "out_dtype")}
    ours: Any
    if selective:
        ours = selective_scan_vjp(**arguments, grad_out=grad_out)
    else:
        ours = linear_scan_vjp(h=linear_scan(**given), grad_h=grad_out, **arguments)
    for name, x in named.items():
        mine = getattr(ours, name, None)
        if mine is not None and tuple(mine.shape) == tuple(x.shape):
            report.differences[name] = found = _compare.difference(xp, x, mine, along.get(name))
            if found.relative > max(1e-3, *(4 * _causes.NARROW.get(_arrays.item_name(each), 0) for each in (x, mine))):
                report.findings.append(_causes.of_difference(name, found))


def _by_distance(xp: Any, x: Any, *, reverse: bool) -> list[tuple[int, float, float]]:
    """Distance from the end in steps, median and 99th percentile of the sizes there; time first."""
    length = len(x)
    bins = []
    for k in range(length.bit_length()):
        near, far = (1 << k) - 1, min((1 << (k + 1)) - 1, length)
        part = x[near:far] if reverse else x[length - far : length - near]
        part = abs(part.astype(np.complex64 if x.dtype.kind == "c" else np.float32)).ravel()
        if part.size:
            half, most = xp.percentile(part[:: max(1, part.size >> 20)], xp.asarray([50.0, 99.0]))
            bins.append((near, float(half), float(most)))
    return bins


def read(file: str | os.PathLike[str]) -> dict[str, Any]:
    """The arguments of `diagnose` in an .npz: arrays by name, options as arrays of no dimension, `grad_u` and such."""
    found: dict[str, Any] = {}
    gradients: dict[str, Any] = {}
    with np.load(Path(file)) as saved:
        for name in saved.files:
            x = saved[name]
            if x.dtype.kind == "V" and x.dtype.itemsize == 2:  # NumPy has no name for bfloat16 in a file
                x = x.view(_dtype("bfloat16"))
            if name.startswith("grad_") and name != "grad_out":
                gradients[name.removeprefix("grad_")] = x
            elif name == "delta_limit":
                found[name] = tuple(x.tolist())
            else:
                found[name] = x.item() if x.ndim == 0 else x
    return found | ({"gradients": gradients} if gradients else {})


def on_gpu(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The same with the arrays on CuPy's current device."""
    import cupy

    def moved(x: Any) -> Any:
        if isinstance(x, Mapping):
            return {name: moved(each) for name, each in x.items()}
        if not isinstance(x, np.ndarray):
            return x
        return cupy.asarray(x.view(np.uint16)).view(x.dtype) if x.dtype.name == "bfloat16" else cupy.asarray(x)

    return {name: moved(x) for name, x in arguments.items()}
