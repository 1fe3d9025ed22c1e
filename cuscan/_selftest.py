"""Checks every kernel family numerically on the device that is there: what `python -m cuscan selftest` runs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ._arrays import _dtype, accumulation, host_place
from ._plan import (
    DeviceLimits,
    Lanes,
    Schedule,
    SelectiveKind,
    UpdateKind,
    backward_tile,
    forced,
    selective_tiles,
    states_a_thread,
)
from ._source import backward_name, linear_backward_name, linear_name, linear_shapes, selective_name, update_name
from .linear import linear_scan
from .linear_vjp import linear_scan_vjp
from .selective import selective_scan
from .selective_vjp import selective_scan_vjp
from .state_update import selective_state_update
from .testing import _bounds, oracle

ITEM = "float32"  # what a plain install has on every device
OTHERS = ("bfloat16", "float16", "float64")
TOGETHER, ROUNDS = 4, 10  # calls at once, and how often on a GPU
Arrays = dict[str, Any]
# Kernels, function, plans that run them, and inputs with whether they are exact.
Family = tuple[str, Any, list[Arrays], list[tuple[Arrays, bool]]]


def run(write: Callable[[str], object] = print, *, only: str = "", every: bool = False) -> bool:
    """Write a line for each kernel family whose name starts with `only`, and give whether all are right.

    Exact inputs (gates in {-1, 0, 1}, small integers) are compared with the oracle bit for bit, real ones within the
    oracle's bound. `every`: of all real types, and linear_scan's gradients.
    """
    with _device() as (xp, layouts, title):
        write(title)
        families = _families(layouts) if layouts else _numpy_families()
        if layouts and every:
            families = (
                each for item in (ITEM, *OTHERS) for each in (*_families(layouts, item), *_linear_backward(item))
            )
        checks = (
            (name, _hows(plans, kernels=bool(layouts)), _Check(xp, function, plans, inputs))
            for name, function, plans, inputs in families
            if name.startswith(only)
        )
        return _report(write, checks)


def run_streams(write: Callable[[str], object] = print, *, only: str = "") -> bool:
    """As `run`, with several calls at once.

    On a GPU calls on several streams must give the bits that each gives alone. On the CPU executor their launches take
    turns, and threads run in other orders, checked: a missing barrier is a race there, shared scratch a wrong value.
    """
    with _device() as (xp, layouts, title):
        write(title)
        if not layouts:
            write("Nothing to check: there are no kernels here.")
            return True
        checks = (
            (name, f"{TOGETHER} at once", _CheckStreams(xp, function, plans[-1], inputs[-1][0]))
            for name, function, plans, inputs in _families(layouts[:1])
            if name.startswith(only) and plans[-1]["schedule"] is Schedule.SPLIT
        )
        return _report(write, checks)


def _hows(plans: list[Arrays], *, kernels: bool) -> str:
    return ", ".join(plan["schedule"].value if kernels else f"{plan['segments']} segments" for plan in plans)


def _report(write: Callable[[str], object], checks: Iterable[tuple[str, str, Callable[[], None]]]) -> bool:
    results = []
    for name, how, check in checks:
        try:
            check()
        except Exception as error:  # noqa: BLE001 - whatever it is, this family fails and the next is checked
            write(f"FAILED  {how:<22}  {name}\n        {type(error).__name__}: {error}")
            results.append(False)
        else:
            write(f"ok      {how:<22}  {name}")
            results.append(True)
    write("Every check passed." if all(results) else f"{results.count(False)} of {len(results)} families FAILED.")
    return all(results)


@dataclass
class _Check:
    """That a family is right."""

    xp: Any
    function: Any
    plans: list[Arrays]
    inputs: list[tuple[Arrays, bool]]

    def __call__(self) -> None:
        for given, exact in self.inputs:
            _check(self.xp, self.function, self.plans, given, exact=exact)


@dataclass
class _CheckStreams:
    """That calls at once give what each gives alone."""

    xp: Any
    function: Any
    plan: Arrays
    given: Arrays

    def __call__(self) -> None:
        calls = [self._inputs(seed) for seed in range(TOGETHER)]
        alone = [self._bits(self._call(given)) for given in calls]
        if self.xp is not np:
            streams = [self.xp.cuda.Stream(non_blocking=True) for _ in calls]
            self.xp.cuda.Device().synchronize()
            for _ in range(ROUNDS):
                results = []
                for stream, given in zip(streams, calls, strict=True):
                    with stream:
                        results.append(self._call(given))
                self.xp.cuda.Device().synchronize()
                self._compare(alone, results)
            return
        for order in ("reverse", "random"):
            with _on_host(host_place_of(host_modules("checked", order), LIMITS)):
                self._compare(alone[:1], [self._call(calls[0])])
        self._compare(alone, self._in_step(calls))

    def _inputs(self, seed: int) -> Arrays:
        r = np.random.default_rng(seed)
        signs = {
            name: r.permutation(x.ravel()).reshape(x.shape) for name, x in self.given.items() if name in ("b", "u")
        }
        return {
            name: _moved(self.xp, x) if isinstance(x, np.ndarray) else x for name, x in (self.given | signs).items()
        }

    def _call(self, given: Arrays) -> Any:
        with forced(**self.plan):
            return self.function(**given)

    def _bits(self, results: Any) -> list[bytes]:
        arrays = results if isinstance(results, tuple) else (results,)
        return [(x if self.xp is np else self.xp.asnumpy(x)).tobytes() for x in arrays if x is not None]

    def _compare(self, alone: list[list[bytes]], results: list[Any]) -> None:
        for i, (expected, result) in enumerate(zip(alone, results, strict=True)):
            if self._bits(result) != expected:
                raise AssertionError(f"call {i} of {len(results)} at once gives other bits than alone")

    def _in_step(self, calls: list[Arrays]) -> list[Any]:
        """The results of calls whose launches take turns: the first of all, the second of all, ..."""
        turn = threading.Barrier(len(calls), timeout=600)
        modules = _InStep(host_modules("fast", "forward"), turn)
        results: list[Any] = [None] * len(calls)

        def work(i: int) -> None:
            try:
                with _on_host(host_place_of(modules, LIMITS)):
                    results[i] = self._call(calls[i])
            except BaseException:
                turn.abort()
                raise

        threads = [threading.Thread(target=work, args=(i,)) for i in range(len(calls))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


class _InStep:
    """A provider of modules that waits until all calls have come to the same launch."""

    def __init__(self, modules: Any, turn: threading.Barrier) -> None:
        self._modules, self._turn, self.memory = modules, turn, modules.memory

    def get_function(self, source: Any, name: str) -> Any:
        self._turn.wait()
        return self._modules.get_function(source, name)


def host_modules(mode: str, order: str) -> Any:
    """The CPU executor's kernels."""
    from .testing import host

    return host.HostModules(mode, order=order)


def host_place_of(modules: Any, limits: DeviceLimits) -> Any:
    """Where they work."""
    from .testing import host

    return host.HostPlace(modules, limits)


@contextlib.contextmanager
def _on_host(place: Any) -> Iterator[None]:
    token = host_place.set(lambda: place)
    try:
        yield
    finally:
        host_place.reset(token)


LIMITS = DeviceLimits(architecture=90, multiprocessors=132, shared_memory=227 * 1024)


@contextlib.contextmanager
def _device() -> Iterator[tuple[Any, tuple[str, ...], str]]:
    """The GPU, else the CPU executor, else NumPy: where arrays are made, the layouts to check, and what to call it."""
    name, missing = gpu()
    if name:
        import cupy

        yield cupy, ("bld", "bdl"), f"On {name}."
        return

    from .testing import host

    try:
        host.compiler()
    except host.CompileError as error:
        yield np, (), f"No GPU: {missing}. No kernels on the CPU: {error}. NumPy's own code is checked."
        return
    with _on_host(host_place_of(host_modules("fast", "forward"), LIMITS)):
        # One layout, for the other has kernels of its own that take as long to compile again.
        yield np, ("bld",), f"No GPU: {missing}. The kernels run on the CPU."


def gpu() -> tuple[str, str]:
    """Name of the GPU, or why there is none."""
    try:
        import cupy
    except ImportError:
        return "", "CuPy is not installed"
    runtime = cupy.cuda.runtime
    try:
        return runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode(), ""
    except runtime.CUDARuntimeError as error:
        return "", str(error).partition(":")[0]


def _numpy_families() -> Iterator[Family]:
    plans = [{"segments": segments} for segments in (1, 5)]
    yield "linear_scan in NumPy", linear_scan, plans, [(_linear_inputs(exact=e), e) for e in (True, False)]
    inputs = [(_selective_inputs(11, exact=e, layout=layout), e) for e in (True, False) for layout in ("bld", "bdl")]
    yield "selective_scan in NumPy", selective_scan, plans, inputs
    inputs = [(_gradient_inputs(exact=e, layout=layout), e) for e in (True, False) for layout in ("bld", "bdl")]
    yield "selective_scan_vjp in NumPy", selective_scan_vjp, plans[:1], inputs
    inputs = [(_update_inputs(11, exact=e), e) for e in (True, False)]
    yield "selective_state_update in NumPy", selective_state_update, [{"segments": 1}], inputs


def _families(layouts: tuple[str, ...], item: str = ITEM) -> Iterator[Family]:
    inputs = [(_cast(_linear_inputs(exact=exact), item), exact) for exact in (True, False)]
    for lanes in Lanes:
        serial: list[Arrays] = [{"schedule": Schedule.SERIAL}] if lanes is Lanes.ROWS else []
        block: Arrays = {"schedule": Schedule.BLOCK, "lanes": lanes, "row_warps": 4}
        plans = [*serial, block, {**block, "schedule": Schedule.SPLIT, "chunk": 50}]
        yield _pair(linear_name(lanes, "apply", item)), linear_scan, plans, inputs
        cut = [(_cut(given, (3, 333)), exact) for given, exact in inputs]
        packed = [(_packed(given, 333, (3,)), exact) for given, exact in inputs]
        name = _pair(linear_name(lanes, "apply", item, segmented=True))
        yield name, linear_scan, plans, cut + packed
    for lanes, pairs in linear_shapes("pass", item, segmented=False):
        shape, axis = ((2000, 2), 0) if pairs else ((3, 5000), 1)
        long = [(_cast(_linear_inputs(shape, axis, exact=exact), item), exact) for exact in (True, False)]
        plans = [{"schedule": Schedule.SPLIT, "lanes": lanes, "row_warps": 2}]
        yield linear_name(lanes, "pass", item, pairs=pairs), linear_scan, plans, long
    for layout in layouts:
        for state in (11, 12, 64, 128):  # 1, 4, 8 and 16 a thread
            states = states_a_thread(accumulation(item), both_vary=True, state=state)
            kind = SelectiveKind(
                item, complex=False, time_fast=layout == "bdl", time_B=True, time_C=True, states=states
            )
            inputs = [
                (_cast(_selective_inputs(state, exact=exact, layout=layout), item), exact) for exact in (True, False)
            ]
            for i, tile in enumerate(selective_tiles(kind)):
                split: Arrays = {"schedule": Schedule.SPLIT, "tile": tile, "chunk": 32}
                plans = [{"schedule": Schedule.SERIAL, "tile": tile}, split]
                name = selective_name(kind, tile, summarise=False)
                yield name if i else _pair(name), selective_scan, plans, inputs  # the first tile is the summaries'
                if state == 12 and not i:
                    cut = [(_cut(given, (1, 47)), exact) for given, exact in inputs]
                    packed = [(_packed(given, 47, (6, state)), exact) for given, exact in inputs]
                    name = _pair(selective_name(replace(kind, segmented=True), tile, summarise=False))
                    yield name, selective_scan, plans, cut + packed
        plans = [{"schedule": Schedule.SERIAL}, {"schedule": Schedule.SPLIT, "chunk": 32}]
        inputs = [(_cast(_gradient_inputs(exact=exact, layout=layout), item), exact) for exact in (True, False)]
        cut = [(_cut(given, (1, 47)), exact) for given, exact in inputs]
        for segmented, given in ((False, inputs), (True, cut)):
            kind = SelectiveKind(item, complex=False, time_fast=layout == "bdl", time_B=True, time_C=True, states=4,
                                 segmented=segmented)  # fmt: skip
            name = backward_name(kind, backward_tile(kind), summarise=False)
            name = name.replace("_backward_", "_backward_{,summarise_}")
            yield name, selective_scan_vjp, plans, given
    for state, vector in ((12, True), (11, False)):
        inputs = [(_cast(_update_inputs(state, exact=exact), item), exact) for exact in (True, False)]
        name = update_name(UpdateKind(item, accumulation(item), vector))
        yield name, selective_state_update, [{"schedule": Schedule.SERIAL}], inputs


def _linear_backward(item: str) -> Iterator[Family]:
    """Gradients of linear_scan, real inputs alone: sums over time are not exact."""
    given = _linear_inputs(exact=False)
    h = oracle.linear_scan(**given).value.astype(ITEM)
    inputs = [(_cast({"a": given["a"], "h": h, "grad_h": given["b"], "axis": 1}, item), False)]
    for lanes in Lanes:
        block: Arrays = {"schedule": Schedule.BLOCK, "lanes": lanes, "row_warps": 4}
        plans = [block, {**block, "schedule": Schedule.SPLIT, "chunk": 50}]
        yield linear_backward_name(lanes, item, segmented=False), linear_scan_vjp, plans, inputs


_STATES = ("h0", "state", "A", "D", "delta_bias", "dt_bias", "grad_last_state")


def _cast(given: Arrays, item: str) -> Arrays:
    """In another type: states and parameters in the accumulation type."""
    if item == ITEM:
        return given
    types = {name: accumulation(item) if name in _STATES else item for name in given}
    return {
        name: x.astype(_dtype(types[name])) if isinstance(x, np.ndarray) and x.dtype.kind == "f" else x
        for name, x in given.items()
    }


def _moved(xp: Any, x: Any) -> Any:
    return xp.asarray(x.view(np.uint16)).view(x.dtype) if x.dtype.name == "bfloat16" else xp.asarray(x)


def _pair(name: str) -> str:
    return name.replace("_apply_", "_{summarise,apply}_")


def _check(xp: Any, function: Any, plans: list[Arrays], given: Arrays, *, exact: bool) -> None:
    item = next(given[name].dtype.name for name in ("u", "x", "b", "h") if name in given)
    wide = accumulation(item)
    eps: Arrays = {"eps": 2.0**-53} if item == "float64" else {}
    if function is selective_state_update:
        _check_update(xp, given, exact=exact, wide=wide, eps=eps)
        return
    if function in (selective_scan_vjp, linear_scan_vjp):
        _check_gradients(xp, function, plans, given, exact=exact, wide=wide, eps=eps)
        return
    known = oracle.linear_scan if function is linear_scan else oracle.selective_scan
    moved = {name: _moved(xp, x) if isinstance(x, np.ndarray) else x for name, x in given.items()}
    for reverse in (False, True):
        expected = known(**given, reverse=reverse, **eps)
        for plan in plans:
            with forced(**plan):
                results = function(**moved, reverse=reverse, return_last_state=True, out_dtype=wide)
            value, last = (x if xp is np else xp.asnumpy(x) for x in results)
            if exact:
                np.testing.assert_array_equal(value, expected.value, f"{plan}")
                np.testing.assert_array_equal(last, expected.last, f"{plan}")
            else:
                oracle.assert_scan_close(value, expected.value, expected.bound)
                oracle.assert_scan_close(last, expected.last, expected.last_bound)


def _check_gradients(
    xp: Any, function: Any, plans: list[Arrays], given: Arrays, *, exact: bool, wide: str, eps: Arrays
) -> None:
    """On exact inputs nothing but the gradient of delta has a bound."""
    moved = {name: _moved(xp, x) if isinstance(x, np.ndarray) else x for name, x in given.items()}
    known = getattr(_bounds, function.__name__)
    for reverse in (False, True):
        expected = known(**given, reverse=reverse, exact=exact, **eps)
        for plan in plans:
            with forced(**plan):
                gradients = function(**moved, reverse=reverse, grad_dtype=wide)
            for name, (value, bound) in expected.items():
                x = getattr(gradients, name)
                oracle.assert_scan_close(x if xp is np else xp.asnumpy(x), value, bound)


def _check_update(xp: Any, given: Arrays, *, exact: bool, wide: str, eps: Arrays) -> None:
    """One step against a scan of length 1."""
    x, dt, B, C, z = (
        given[name] if given[name] is None else given[name][:, None] for name in ("x", "dt", "B", "C", "z")
    )
    expected = oracle.selective_scan(
        x, dt, given["A"], B, C, given["D"], z, given["dt_bias"], given["dt_softplus"], h0=given["state"], **eps
    )
    moved = {name: _moved(xp, x).copy() if isinstance(x, np.ndarray) else x for name, x in given.items()}
    results = selective_state_update(**moved, out_dtype=wide), moved["state"]
    y, state = results if xp is np else map(xp.asnumpy, results)
    if exact:
        np.testing.assert_array_equal(y, expected.value[:, 0])
        np.testing.assert_array_equal(state, expected.last)
    else:
        oracle.assert_scan_close(y, expected.value[:, 0], expected.bound[:, 0])
        oracle.assert_scan_close(state, expected.last, expected.last_bound)


def _cut(given: Arrays, steps: tuple[int, int]) -> Arrays:
    """The same with a mask and resets, of shape `steps`."""
    r = np.random.default_rng(0)
    return given | {"mask": r.random(steps) < 0.7, "reset": r.random(steps) < 0.1}


def _packed(given: Arrays, length: int, rest: tuple[int, ...]) -> Arrays:
    """The same as three packed sequences, one of them empty."""
    h0 = np.random.default_rng(0).integers(-4, 5, (3, *rest)).astype(given["h0"].dtype)
    return given | {"cu_seqlens": np.array([1, length // 3, length // 3, length - 2]), "h0": h0}


def _linear_inputs(shape: tuple[int, int] = (3, 333), axis: int = 1, *, exact: bool) -> Arrays:
    r = np.random.default_rng(0)
    a = r.integers(-1, 2, shape) if exact else r.uniform(-1, 1, shape)
    b, h0 = (r.integers(-8, 9, s) if exact else r.normal(size=s) for s in (shape, shape[1 - axis]))
    return {"a": a.astype(ITEM), "b": b.astype(ITEM), "h0": h0.astype(ITEM), "axis": axis}


def _selective_inputs(state: int, *, exact: bool, layout: str) -> Arrays:
    r = np.random.default_rng(0)
    batch, length, channels = 1, 47, 6

    def draw(*shape: int) -> Any:
        x = r.integers(-4, 5, shape) if exact else r.normal(size=shape)
        return np.ascontiguousarray(np.moveaxis(x, 1, -1) if layout == "bdl" and len(shape) == 3 else x, ITEM)

    given: Arrays = {name: draw(batch, length, channels) for name in ("u", "delta", "z")}
    given.update({name: draw(batch, length, state) for name in ("B", "C")})
    given.update(D=draw(channels), delta_bias=draw(channels), delta_softplus=True, layout=layout)
    given["A"] = -r.uniform(0.05, 3, (channels, state)).astype(ITEM)
    given["h0"] = r.integers(-4, 5, (batch, channels, state)).astype(ITEM)
    if exact:
        # Gates are exactly 0 and 1, and nothing else rounds.
        given["A"] = r.choice(np.array([0, -1e4], ITEM), (channels, state))
        given["delta"] = r.integers(0, 2, given["delta"].shape).astype(ITEM)
        given.update(z=None, delta_bias=None, delta_softplus=False)
    return given


def _gradient_inputs(*, exact: bool, layout: str) -> Arrays:
    """Two launches of states."""
    given = _selective_inputs(17, exact=exact, layout=layout)
    r = np.random.default_rng(1)
    for name, like in (("grad_out", "u"), ("grad_last_state", "h0")):
        given[name] = r.integers(-4, 5, given[like].shape).astype(ITEM)
    if exact:
        given["A"] = given["A"].clip(-128)  # the gate is 0 still, and more sums are exact
    return given


def _update_inputs(state: int, *, exact: bool) -> Arrays:
    """A batch that has the steps of what a selective_scan is checked with as its rows."""
    scan = _selective_inputs(state, exact=exact, layout="bld")
    names = {"u": "x", "delta": "dt", "B": "B", "C": "C", "z": "z"}
    given: Arrays = {to: None if scan[name] is None else scan[name][0] for name, to in names.items()}
    given.update(A=scan["A"], D=scan["D"], dt_bias=scan["delta_bias"], dt_softplus=scan["delta_softplus"])
    given["state"] = np.repeat(scan["h0"], len(given["x"]), axis=0)
    return given
