"""`python -m bench`: the chip's ceilings, then each workload, and other libraries beside it, against them.

python -m bench [--quick] [--out FILE]      measure; FILE gets {"digest", "device", "limits", "rows"}
python -m bench --check [FILE]              fail if FILE was measured with other kernels or plans
python -m bench ladder [--out FILE]         time the steps that the design is built from
python -m bench show FILE [--figures DIR]   print a record's table, and draw it
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from cuscan import _calls, _launch, _limits, _source
from cuscan._limits import Limits
from cuscan._plan import watched
from cuscan.tune import milliseconds

from .limits import clock_milliseconds, graph_milliseconds, host_microseconds, measure
from .peers import importable, peers, to_torch
from .workloads import LENGTHS, LOADS, Load

RECORD = Path(__file__).parent / "results" / "h200.json"


def main(arguments: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given[:1] == ["ladder"]:
        from . import ladder

        return ladder.main(given[1:])
    if given[:1] == ["show"]:
        return show(given[1:])
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the first two rows of each kind, and no other libraries")
    parser.add_argument("--out", type=Path, help="where to write the record")
    parser.add_argument(
        "--check", nargs="?", type=Path, const=RECORD, help="compare a record's digest with the sources"
    )
    chosen = parser.parse_args(given)
    if chosen.check:
        return check(chosen.check)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import cupy

    limits = measure(cupy)
    print(ceilings(asdict(limits)))
    device = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode()
    rows: list[dict[str, Any]] = []
    record = {"digest": _source.digest(), "device": device, "plans": os.environ.get("CUSCAN_PLANS"),
              "limits": asdict(limits), "rows": rows}  # fmt: skip
    failed, pool = 0, cupy.get_default_memory_pool()
    for kind in LOADS[:-1] if chosen.quick else LOADS:
        for i, load in enumerate(kind[: 2 if chosen.quick else None]):
            try:
                row = measure_one(cupy, load, limits, others=not chosen.quick, tensors=i < 2 and kind is not LENGTHS)
            except Exception:  # noqa: BLE001 the other rows are measured all the same
                traceback.print_exc()
                print(f"{load} failed", flush=True)
                failed += 1
            else:
                rows.append(row)
                print(line(row), flush=True)
                if chosen.out:
                    chosen.out.write_text(json.dumps(record, indent=1) + "\n")
            if pool.total_bytes() > 1 << 34:  # other libraries have pools of their own
                pool.free_all_blocks()
    return int(failed > 0)


def check(path: Path) -> int:
    """1 if the record's digest is not that of the sources."""
    recorded, now = json.loads(path.read_text())["digest"], _source.digest()
    print(f"{path.name}: {recorded}; sources: {now}: {'fresh' if recorded == now else 'stale'}")
    return int(recorded != now)


def show(arguments: Sequence[str]) -> int:
    """Print and draw a record of `python -m bench`, of the ladder or of tune."""
    parser = argparse.ArgumentParser(prog="python -m bench show", description=show.__doc__)
    parser.add_argument("record", type=Path)
    parser.add_argument("--figures", type=Path, metavar="DIR", help="where to draw it; needs matplotlib")
    parser.add_argument("--png", action="store_true", help="draw PNG, not SVG")
    chosen = parser.parse_args(arguments)
    record = json.loads(chosen.record.read_text())
    kind = "ladder" if "rungs" in record else "tune" if "runs" in record else "bench"
    print(f"{record['device']}, {len(record['rows'])} rows")
    if kind == "bench":
        print(ceilings(record["limits"]))
    for row in record["rows"]:
        if kind == "ladder":
            print(f"{row['figure']:20s} {row['rung']:32s} {row['x']:>10d} {row['ms']:10.4f} ms")
        elif kind == "tune":
            best = row["best"]
            print(f"{row['function']:18s} {row['shape']!s:24s} {row['dtype']:8s} planned {row['own']['ms']:8.4f} ms, "
                  f"best {best['ms']:8.4f} +- {best['spread_ms']:.4f}: {best['order']} {best['fit']}")  # fmt: skip
        else:
            print(line(row))
    if chosen.figures:
        from . import plots

        for path in plots.draw(kind, record, chosen.figures, ".png" if chosen.png else ".svg"):
            print(path)
    return 0


def ceilings(limits: dict[str, float]) -> str:
    return (f"copy {limits['copy'] / 1e9:.0f} GB/s, exponentials {limits['exponentials'] / 1e12:.2f} T/s, "
            f"multiply-adds {limits['multiply_adds'] / 1e12:.1f} T/s")  # fmt: skip


def measure_one(cupy: Any, load: Load, limits: Limits, *, others: bool, tensors: bool) -> dict[str, Any]:
    """Check a slice of the result, then time the call; a row of the record.

    `others`: with other libraries. `tensors`: with the host time of the same call on torch's tensors.
    """
    inputs = load.inputs(cupy)
    call = load.call(inputs)
    with watched() as plans:
        call()  # a first call is planned and recorded; the next one only launches
    with launches() as made:
        result = call()
    load.check(inputs, result)
    del result
    times = milliseconds(cupy, call)
    time = statistics.median(times)
    least, bound_by = load.least(limits)
    host = host_microseconds(cupy, call, 101 if time < 1 else 21)
    rate = load.useful_bytes / time * 1e3
    row = load.row() | {
        "op": load.op,
        "direction": load.direction,
        "dtype": load.dtype,
        "ms": round(time, 5),
        "spread_ms": round(float(np.percentile(times, 90) - np.percentile(times, 10)), 5),
        "graph_ms": None,
        "host_us": round(host, 1),
        "torch_extra_us": None,
        "limit_ms": round(least * 1e3, 5),
        "bound_by": bound_by,
        "ratio": round(time / 1e3 / least, 3),
        "bytes": load.useful_bytes,
        "bytes_per_s": round(rate),
        "copy_share": round(rate / limits.copy, 4),
        load.work[0]: load.work[1],
        "launches": len(made),
    }
    if tensors and importable("torch"):
        on_tensors = load.call({name: to_torch(x) for name, x in inputs.items()})
        row["torch_extra_us"] = round(host_microseconds(cupy, on_tensors, 21) - host, 1)
    if hasattr(load, "slots"):
        attributes = cupy.cuda.Device().attributes
        slots = 128e3 * attributes["MultiProcessorCount"] * attributes.get("ClockRate", 0)  # a second
        row["slots_ms"] = round(load.slots / slots * 1e3, 5) if slots else None
    try:
        row["graph_ms"] = round(statistics.median(graph_milliseconds(cupy, call)), 5)
    except Exception as error:  # noqa: BLE001 what a call takes by itself is measured all the same
        row["graph_error"] = f"{type(error).__name__}: {error}"[:200]
    row |= residence(cupy, made) | schedule([plan for *_, plan in plans])
    if others:
        row["peers"] = [timed(cupy, load, inputs, peer) for peer in peers(cupy, load, inputs)]
    return row


def timed(cupy: Any, load: Load, inputs: dict[str, Any], peer: Any) -> dict[str, Any]:
    """The time of another library's call, or what it raised."""
    try:
        if peer.result is not None:
            load.check(inputs, peer.result(peer.call()), bounded=False)
        if peer.wait is not None:
            time = clock_milliseconds(peer.call, peer.wait)
        else:
            time = statistics.median(milliseconds(cupy, peer.call, 11))
    except Exception as error:  # noqa: BLE001 whatever another library raises is written down
        return {"name": peer.name, "error": f"{type(error).__name__}: {error}"[:200]}
    checked = peer.result is not None
    return {"name": peer.name, "ms": round(time, 5), "checked": checked, "clock": peer.wait is not None}


@contextlib.contextmanager
def launches() -> Iterator[list[tuple[Any, int, int, int]]]:
    """What is launched meanwhile: kernel, blocks, threads, dynamic shared memory."""
    made: list[tuple[Any, int, int, int]] = []
    start = _calls.start

    def noted(function: Any, grid: Any, block: Any, packed: Any, shared: int = 0, stream: int = 0) -> None:
        made.append((function, math.prod(grid), block[0], shared))
        start(function, grid, block, packed, shared, stream)

    with mock.patch.object(_calls, "start", noted), mock.patch.object(_launch, "start", noted):
        yield made


def schedule(plans: Sequence[Any]) -> dict[str, Any]:
    """The plan's schedule and its reason; a single step has none."""
    if not plans:
        return {"schedule": None}
    order = plans[0].order
    # selective_scan_vjp has time in the thread, or cut into chunks.
    name = order.schedule.value if hasattr(order, "schedule") else "split" if plans[0].chunks > 1 else "serial"
    return {"schedule": name, "chunks": plans[0].chunks, "plan": plans[0].reason}


def residence(cupy: Any, made: list[tuple[Any, int, int, int]]) -> dict[str, Any]:
    """Registers, frame, blocks a multiprocessor and waves of the kernel that writes the result."""
    of_results = [x for x in made if not x[0].name.startswith(("step_marks", "sum_partials"))]
    kernel, blocks, threads, shared = of_results[-1]
    found = _limits.residence(cupy.cuda.Device().attributes, kernel, blocks, threads, shared)
    return {"kernel": kernel.name} | asdict(found)


def line(row: dict[str, Any]) -> str:
    shape = row.get("shape") or [row[name] for name in ("batch", "length", "channels", "state")]
    options = ("z", "h0", "last", "mask", "states", "sequences", "text", "scalar")
    extra = " ".join(name for name in options if row.get(name))
    op = row["op"].removeprefix("selective_") + " backward" * (row["direction"] == "backward")
    axis = f"axis {row['axis']}" if "axis" in row else row.get("layout", "")
    parts = [
        f"{op:20s} {row['dtype']:8s} {axis:6s} {shape!s:24s} {extra:9s} {row['ms']:9.4f} ms",
        f"limit {row['limit_ms']:8.4f} ({row['bound_by']})  x{row['ratio']:5.2f}  {row['bytes_per_s'] / 1e9:6.0f} GB/s",
        f"{row['schedule'] or '':6s} {row['registers']:3d} regs {row['frame_bytes']} frame",
        f"{row['blocks_per_sm']}/SM {row['waves']} waves",
        f"host {row['host_us']:.0f} us",
    ]
    if row.get("torch_extra_us") is not None:
        parts[-1] += f" torch +{row['torch_extra_us']:.0f}"
    if "graph_ms" in row:
        parts.append("graph failed" if row["graph_ms"] is None else f"graph {row['graph_ms']:.4f}")
    others = row.get("peers", ())
    parts += [f"[{x['name']} {'failed' if 'error' in x else format(x['ms'], '.4f')}]" for x in others]
    return "  ".join(parts)


if __name__ == "__main__":
    raise SystemExit(main())
