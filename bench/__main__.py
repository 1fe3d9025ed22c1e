"""`python -m bench`: the chip's ceilings, then each workload against them.

python -m bench [--quick] [--out FILE]      measure; FILE gets {"digest", "device", "limits", "rows"}
python -m bench --check [FILE]              fail if FILE was measured with other kernels or plans
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from cuscan import _source

from .limits import Limits, measure, milliseconds
from .workloads import LINEAR, SELECTIVE, Linear, Selective

RECORD = Path(__file__).parent / "results" / "h200.json"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the first two rows of each function")
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
    loads: list[Any] = [*SELECTIVE[: 2 if chosen.quick else None], *LINEAR[: 2 if chosen.quick else None]]
    rows = []
    for load in loads:
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


def measure_one(cupy: Any, load: Selective | Linear, limits: Limits) -> dict[str, Any]:
    """Check a slice of the result against float64, then time the call; a row of the record."""
    from cuscan import _launch

    plans: list[Any] = []
    run = {name: getattr(_launch, name) for name in ("linear", "selective")}

    def keep_plan(name: str) -> Any:
        return lambda place, plan, *rest: (plans.append(plan), run[name](place, plan, *rest))

    inputs = load.inputs(cupy)
    call = load.call(inputs)
    try:
        for name in run:
            setattr(_launch, name, keep_plan(name))
        result = call()
    finally:
        for name, function in run.items():
            setattr(_launch, name, function)
    plan = plans[0]
    load.check(inputs, result)
    del result
    times = milliseconds(cupy, call)
    time = statistics.median(times)
    least, bound_by = load.least(limits)
    row = load.row() | {
        "op": load.op,
        "direction": "forward",
        "dtype": load.dtype,
        "ms": round(time, 5),
        "spread_ms": round(float(np.percentile(times, 90) - np.percentile(times, 10)), 5),
        "limit_ms": round(least * 1e3, 5),
        "bound_by": bound_by,
        "ratio": round(time / 1e3 / least, 3),
        "bytes_per_s": round(load.useful_bytes / time * 1e3),
        "schedule": plan.order.schedule.value,
        "chunks": plan.chunks,
    }
    return row | residence(cupy, load, plan)


def residence(cupy: Any, load: Selective | Linear, plan: Any) -> dict[str, Any]:
    """Registers, frame, blocks a multiprocessor and waves of the kernel that writes the result."""
    from cuscan import _compile, _plan

    device = cupy.cuda.Device()
    modules = _compile.cupy_modules(device.id)
    if isinstance(load, Selective):
        kind = _plan.SelectiveKind(load.dtype, complex=False, time_fast=load.layout == "bdl", time_B=True, time_C=True,
                                   states=plan.order.states, segmented=load.mask or load.sequences > 0)  # fmt: skip
        tile = plan.fit.tile
        kernel: Any = modules.get_function(_source.selective_source(kind), _source.selective_name(kind, tile, False))  # noqa: FBT003
        shared, threads = tile.shared_memory(kind), tile.threads
        blocks = load.batch * math.ceil(load.channels / tile.channels) * plan.chunks
    else:
        name = _source.linear_name(plan.order.lanes, False, load.dtype)  # noqa: FBT003
        kernel = modules.get_function(_source.linear_source(load.dtype), name)
        shared, threads = 0, 32 * plan.fit.warps
        rows = math.prod(load.shape) // load.shape[load.axis]
        teams = rows if plan.order.lanes is _plan.Lanes.TIME else math.ceil(rows / 32)
        blocks = math.ceil(teams * plan.chunks / (plan.fit.warps // plan.order.row_warps))
    limits = device.attributes
    warps = limits["MaxThreadsPerMultiProcessor"] // threads
    registers = limits["MaxRegistersPerMultiprocessor"] // (math.ceil(kernel.num_regs / 8) * 8 * threads)
    memory = limits["MaxSharedMemoryPerMultiprocessor"] // (shared + kernel.shared_size_bytes + 1024)
    resident = min(warps, registers, memory)
    return {
        "registers": kernel.num_regs,
        "frame_bytes": kernel.local_size_bytes,
        "blocks_per_sm": resident,
        "waves": round(blocks / (resident * limits["MultiProcessorCount"]), 2),
    }


def line(row: dict[str, Any]) -> str:
    shape = row.get("shape") or [row[name] for name in ("batch", "length", "channels", "state")]
    extra = " ".join(name for name in ("z", "h0", "mask", "sequences") if row.get(name))
    return (f"{row['op']:14s} {row['dtype']:8s} {row.get('layout', 'axis ' + str(row.get('axis'))):6s} {shape!s:24s} "
            f"{extra:9s} {row['ms']:9.4f} ms  limit {row['limit_ms']:8.4f} ({row['bound_by']})  x{row['ratio']:5.2f}  "
            f"{row['bytes_per_s'] / 1e9:6.0f} GB/s  {row['schedule']:6s} {row['registers']:3d} regs "
            f"{row['blocks_per_sm']}/SM {row['waves']} waves")  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
