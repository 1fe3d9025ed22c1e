"""`python -m bench ladder`: what each step of the design buys, and where.

The steps: a loop over time from the host; one thread a channel; a parallel scan over gates and inputs that were made
into arrays first; the same in one kernel. Within a block: Hillis and Steele's scan by shuffles against a work-efficient
one in shared memory. Over one row: one block, three kernels, one pass. What the library does not have is in ladder.cu.
Every step is checked against NumPy before it is timed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import cuscan
from cuscan import _source
from cuscan._plan import Schedule, forced
from cuscan.tune import linear_arguments, milliseconds, selective_arguments

SOURCE = Path(__file__).with_suffix(".cu")
THREADS, TILE, GROUP = 256, 2048, 32  # kThreads, kTile, kGroup in ladder.cu
STATES = (4, 16, 64)  # of selective_thread
Rung = tuple[str, Callable[[], Any]]


def text() -> str:
    """Of the kernels, which the messages of compilers name by their file."""
    return f'#line 1 "bench/ladder.cu"\n{SOURCE.read_text()}'


def digest() -> str:
    """Of what is timed."""
    return hashlib.sha256((text() + _source.digest()).encode()).hexdigest()[:16]


# --- the rungs -----------------------------------------------------------------------------------------------------


def selective_rungs(xp: Any, module: Any, sizes: tuple[int, int, int, int], *, most: int = 1 << 28) -> Iterator[Rung]:
    """Selective scans of (batch, length, channels, state) in float32; `most`: items of an array that is made for it."""
    batch, length, channels, state = sizes
    made = selective_arguments(xp, *sizes, "float32", "bld")
    u, A, B, C = (made[name] for name in ("u", "A", "B", "C"))
    delta = abs(made["delta"])
    given = {"u": u, "delta": delta, "A": A, "B": B, "C": C}

    def loop() -> Any:
        h, y = xp.zeros((batch, channels, state), np.float32), xp.empty_like(u)
        for t in range(length):
            d = delta[:, t, :, None]
            h = xp.exp(d * A) * h + d * u[:, t, :, None] * B[:, t, None]
            y[:, t] = (h * C[:, t, None]).sum(-1)
        return y

    def materialised() -> Any:
        a = xp.exp(delta[..., None] * A)
        b = (delta * u)[..., None] * B[:, :, None]
        return (cuscan.linear_scan(a, b, axis=1) * C[:, :, None]).sum(-1)

    scaled = A * np.float32(1 / math.log(2))

    def thread() -> Any:
        y = xp.empty_like(u)
        run = module.get_function(f"selective_thread_{state}")
        sizes = (np.int32(batch), np.int32(length), np.int32(channels))
        run((-(-batch * channels // 64),), (64,), (u, delta, scaled, B, C, y, *sizes))
        return y

    def fused() -> Any:
        return cuscan.selective_scan(**given)

    def fused_serial() -> Any:
        with forced(schedule=Schedule.SERIAL):
            return cuscan.selective_scan(**given)

    if length <= 4096:
        yield "a loop over time", _checked(loop, given)
    yield "one thread a channel", _checked(thread, given)
    if batch * length * channels * state <= most:
        yield "a and b materialised", _checked(materialised, given)
    yield "fused, time in the thread", _checked(fused_serial, given)
    yield "fused, as planned", _checked(fused, given)


def _checked(call: Callable[[], Any], given: dict[str, Any]) -> Callable[[], Any]:
    """The call, once it has given what NumPy gives for two channels."""
    few = {name: _host(x[:1] if x.ndim == 3 else x[:2]).astype(np.float64) for name, x in given.items()}
    few |= {name: few[name][..., :2] for name in ("u", "delta")}
    expected = cuscan.selective_scan(**few)
    _assert_close(_host(call()[:1, :, :2]), expected)
    return call


def block_rungs(xp: Any, module: Any, rows: int, length: int) -> Iterator[Rung]:
    """A block a row, a step a thread: the scan within the block is all that differs."""
    made = linear_arguments(xp, (rows, length), 1, "float32")
    a, b = made["a"], made["b"]
    for name, kernel in (
        ("Hillis-Steele by shuffle", "by_shuffle"),
        ("work-efficient, shared memory", "work_efficient"),
    ):

        def scan(kernel: str = kernel) -> Any:
            h = xp.empty_like(b)
            module.get_function(f"scan_rows_{kernel}")((rows,), (THREADS,), (a, b, h, np.int64(length)))
            return h

        _check_rows(a, b, scan())
        yield name, scan


def row_rungs(xp: Any, module: Any, length: int) -> Iterator[Rung]:
    """One long row."""
    made = linear_arguments(xp, (length,), 0, "float32")
    a, b = made["a"], made["b"]
    tiles, steps = -(-length // TILE), np.int64(length)
    gates, drives, leaving = (xp.empty(tiles, np.float32) for _ in range(3))
    told, group_told, ticket = (xp.zeros(n, np.uint32) for n in (tiles, -(-tiles // GROUP), 1))
    calls = 0

    def one_block() -> Any:
        h = xp.empty_like(b)
        module.get_function("one_block")((1,), (THREADS,), (a, b, h, steps))
        return h

    def three_kernels() -> Any:
        h = xp.empty_like(b)
        module.get_function("summarise_tiles")((tiles,), (THREADS,), (a, b, gates, drives, steps))
        module.get_function("one_block")((1,), (THREADS,), (gates, drives, leaving, np.int64(tiles)))
        module.get_function("apply_tiles")((tiles,), (THREADS,), (a, b, leaving, h, steps))
        return h

    def one_pass() -> Any:
        nonlocal calls
        calls += 1
        h = xp.empty_like(b)
        arrays = (a, b, h, gates, drives, leaving, told, group_told, ticket)
        module.get_function("one_pass")((tiles,), (THREADS,), (*arrays, steps, np.uint32(tiles), np.uint32(calls)))
        return h

    rungs: list[Rung] = [("one block", one_block)] if length <= 1 << 22 else []
    rungs += [("three kernels", three_kernels), ("one pass", one_pass)]
    rungs += [("cuscan.linear_scan", lambda: cuscan.linear_scan(a, b))]
    for name, call in rungs:
        for _ in range(2):  # the second time with what the first one left
            _check_rows(a[None], b[None], call()[None])
        yield name, call


def _check_rows(a: Any, b: Any, h: Any) -> None:
    """Two rows: their begin, and their end, where gates below 1 have forgotten what was long before."""
    forgotten = 2048
    for rows in {0, a.shape[0] - 1}:
        for steps in (slice(0, 1 << 16), slice(max(0, a.shape[1] - (1 << 16)), None)):
            expected = cuscan.linear_scan(*(_host(x[rows, steps]).astype(np.float64) for x in (a, b)))
            skip = forgotten if steps.start else 0
            _assert_close(_host(h[rows, steps])[skip:], expected[skip:])


def _assert_close(actual: Any, expected: Any) -> None:
    error, scale = np.abs(actual - expected).max(), np.abs(expected).max()
    if not error <= 1e-4 * scale:
        raise AssertionError(f"largest error {error:.3g} at a scale of {scale:.3g}")


def _host(x: Any) -> Any:
    return x if isinstance(x, np.ndarray) else x.get()


# --- what is timed -------------------------------------------------------------------------------------------------

SELECTIVE = {
    "length": [(1, 1 << k, 1024, 16) for k in range(6, 17, 2)],
    "batch": [(1 << k, 1024, 1024, 16) for k in range(0, 7, 2)],
    "state": [(8, 1024, 1024, state) for state in STATES],
}
BLOCKS = {
    "block: length": [(1056, 1 << k) for k in range(8, 17, 2)],
    "block: batch": [(1 << k, 4096) for k in range(0, 13, 2)],
}
ROWS = [1 << k for k in range(10, 28, 2)]


def measure(
    xp: Any, module: Any, clock: Callable[[Callable[[], Any]], float], report: Callable[[dict[str, Any]], object]
) -> list[dict[str, Any]]:
    """A row for each rung at each size."""
    rows: list[dict[str, Any]] = []

    def timed(figure: str, x: int, sizes: Sequence[int], rungs: Iterator[Rung]) -> None:
        names = ("batch", "length", "channels", "state")[: len(sizes)]
        for rung, call in rungs:
            row = {"figure": figure, "rung": rung, "x": x, **dict(zip(names, sizes, strict=True))}
            rows.append(row | {"ms": round(clock(call), 5)})
            report(rows[-1])

    for figure, several in SELECTIVE.items():
        at = {"length": 1, "batch": 0, "state": 3}[figure]
        for sizes in several:
            timed(figure, sizes[at], sizes, selective_rungs(xp, module, sizes))
    for figure, shapes in BLOCKS.items():
        for shape in shapes:
            timed(figure, shape[0 if figure.endswith("batch") else 1], shape, block_rungs(xp, module, *shape))
    for length in ROWS:
        timed("row", length, (1, length), row_rungs(xp, module, length))
    return rows


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench ladder", description=__doc__)
    parser.add_argument("--out", type=Path, help="where to write the record; `python -m bench show` draws it")
    chosen = parser.parse_args(arguments)
    import cupy

    module = cupy.RawModule(code=text(), options=_source.OPTIONS)

    def clock(call: Callable[[], Any]) -> float:
        (first,) = milliseconds(cupy, call, 1, 1)
        return first if first > 50 else statistics.median(milliseconds(cupy, call, 9))

    def report(row: dict[str, Any]) -> None:
        print(f"{row['figure']:14s} {row['rung']:32s} {row['x']:>10d} {row['ms']:10.4f} ms", flush=True)

    rows = measure(cupy, module, clock, report)
    name = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode()
    record = {
        "digest": digest(),
        "device": name,
        "rungs": list(dict.fromkeys(row["rung"] for row in rows)),
        "rows": rows,
    }
    if chosen.out:
        chosen.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0
