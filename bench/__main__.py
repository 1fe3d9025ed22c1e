"""`python -m bench`: the chip's ceilings, then each workload against them.

python -m bench [--quick] [--out FILE]      measure; FILE gets {"digest", "device", "limits", "rows"}
python -m bench --check [FILE]              fail if FILE was measured with other kernels or plans
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from cuscan import _calls, _launch, _source

from .limits import Limits, host_microseconds, measure, milliseconds
from .workloads import LOADS, Load

RECORD = Path(__file__).parent / "results" / "h200.json"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the first two rows of each kind")
    parser.add_argument("--out", type=Path, help="where to write the record")
    parser.add_argument(
        "--check", nargs="?", type=Path, const=RECORD, help="compare a record's digest with the sources"
    )
    chosen = parser.parse_args()
    if chosen.check:
        return check(chosen.check)
    import cupy

    limits = measure(cupy)
    print(f"copy {limits.copy / 1e9:.0f} GB/s, exponentials {limits.exponentials / 1e12:.2f} T/s, "
          f"multiply-adds {limits.multiply_adds / 1e12:.1f} T/s")  # fmt: skip
    rows = []
    for load in [load for kind in LOADS for load in kind[: 2 if chosen.quick else None]]:
        rows.append(measure_one(cupy, load, limits))
        print(line(rows[-1]), flush=True)
    device = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode()
    record = {"digest": _source.digest(), "device": device, "limits": asdict(limits), "rows": rows}
    if chosen.out:
        chosen.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def check(path: Path) -> int:
    """1 if the record's digest is not that of the sources."""
    recorded, now = json.loads(path.read_text())["digest"], _source.digest()
    print(f"{path.name}: {recorded}; sources: {now}: {'fresh' if recorded == now else 'stale'}")
    return int(recorded != now)


def measure_one(cupy: Any, load: Load, limits: Limits) -> dict[str, Any]:
    """Check a slice of the result against float64, then time the call; a row of the record."""
    inputs = load.inputs(cupy)
    call = load.call(inputs)
    with launches() as made:
        result = call()
    load.check(inputs, result)
    del result
    times = milliseconds(cupy, call)
    time = statistics.median(times)
    least, bound_by = load.least(limits)
    row = load.row() | {
        "op": load.op,
        "direction": load.direction,
        "dtype": load.dtype,
        "ms": round(time, 5),
        "spread_ms": round(float(np.percentile(times, 90) - np.percentile(times, 10)), 5),
        "host_us": round(host_microseconds(cupy, call), 1),
        "limit_ms": round(least * 1e3, 5),
        "bound_by": bound_by,
        "ratio": round(time / 1e3 / least, 3),
        "bytes_per_s": round(load.useful_bytes / time * 1e3),
        "launches": len(made),
    }
    return row | residence(cupy, made)


@contextlib.contextmanager
def launches() -> Iterator[list[tuple[Any, int, int, int]]]:
    """What is launched meanwhile: kernel, blocks, threads, dynamic shared memory."""
    made: list[tuple[Any, int, int, int]] = []
    start = _calls.start

    def noted(function: Any, grid: Any, block: Any, packed: Any, shared: int = 0) -> None:
        made.append((function, math.prod(grid), block[0], shared))
        start(function, grid, block, packed, shared)

    with mock.patch.object(_calls, "start", noted), mock.patch.object(_launch, "start", noted):
        yield made


def residence(cupy: Any, made: list[tuple[Any, int, int, int]]) -> dict[str, Any]:
    """Schedule, and registers, frame, blocks a multiprocessor and waves of the kernel that writes the result."""
    names = [kernel.name for kernel, *_ in made]
    of_results = [i for i, name in enumerate(names) if not name.startswith(("step_marks", "sum_partials"))]
    kernel, blocks, threads, shared = made[of_results[-1]]
    split = any("summarise" in name for name in names)
    limits = cupy.cuda.Device().attributes
    warps = limits["MaxThreadsPerMultiProcessor"] // threads
    registers = limits["MaxRegistersPerMultiprocessor"] // (math.ceil(kernel.num_regs / 8) * 8 * threads)
    memory = limits["MaxSharedMemoryPerMultiprocessor"] // (shared + kernel.shared_size_bytes + 1024)
    resident = min(warps, registers, memory)
    return {
        "schedule": "split" if split else "block" if "_time_" in kernel.name and "linear" in kernel.name else "serial",
        "registers": kernel.num_regs,
        "frame_bytes": kernel.local_size_bytes,
        "blocks_per_sm": resident,
        "waves": round(blocks / (resident * limits["MultiProcessorCount"]), 2),
    }


def line(row: dict[str, Any]) -> str:
    shape = row.get("shape") or [row[name] for name in ("batch", "length", "channels", "state")]
    extra = " ".join(name for name in ("z", "h0", "mask", "sequences") if row.get(name))
    op = row["op"].removeprefix("selective_") + " backward" * (row["direction"] == "backward")
    return (f"{op:20s} {row['dtype']:8s} {row.get('layout', 'axis ' + str(row.get('axis'))):6s} {shape!s:24s} "
            f"{extra:9s} {row['ms']:9.4f} ms  limit {row['limit_ms']:8.4f} ({row['bound_by']})  x{row['ratio']:5.2f}  "
            f"{row['bytes_per_s'] / 1e9:6.0f} GB/s  {row['schedule']:6s} {row['registers']:3d} regs "
            f"{row['blocks_per_sm']}/SM {row['waves']} waves  host {row['host_us']:.0f} us")  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
