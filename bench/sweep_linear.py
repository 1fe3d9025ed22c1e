"""Times the shapes of linear_scan over what its plan chooses: lanes, warps a row, chunk."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import cupy

from cuscan import _plan
from cuscan._plan import Lanes, Schedule

from .limits import milliseconds
from .workloads import LINEAR


def main() -> None:
    rows = []
    for load in LINEAR:
        inputs = load.inputs(cupy)
        call = load.call(inputs)
        length = load.shape[load.axis]
        count = inputs["b"].size // length
        for lanes in Lanes:
            if lanes is Lanes.ROWS and (count < 32 or load.axis == len(load.shape) - 1):
                continue
            if lanes is Lanes.TIME and count >= 32 and load.axis != len(load.shape) - 1:
                continue
            teams = -(-count // 32) if lanes is Lanes.ROWS else count
            for row_warps in (1, 2, 4, 8):
                choices = [{"schedule": Schedule.BLOCK}] if teams * row_warps >= 1000 else []
                if teams * row_warps < 3000:
                    choices += [
                        {"schedule": Schedule.SPLIT, "chunk": -(-length // chunks // 4096) * 4096}
                        for chunks in (4096 // (teams * row_warps), 16384 // (teams * row_warps))
                        if chunks > 1 and length // chunks >= 256
                    ]
                for choice in choices:
                    with _plan.forced(lanes=lanes, row_warps=row_warps, **choice):
                        time = statistics.median(milliseconds(cupy, call, 7))
                    rate = load.useful_bytes / time / 1e6
                    rows.append({"load": repr(load), "lanes": lanes.value, "row_warps": row_warps,
                                 "chunk": choice.get("chunk", 0), "ms": time})  # fmt: skip
                    print(f"{load.shape!s:22s} {load.axis} {load.dtype:9s} {lanes.value} x{row_warps} "
                          f"chunk {choice.get('chunk', 0):8d} {time:8.4f} ms {rate:6.0f} GB/s", flush=True)  # fmt: skip
        del inputs, call
        cupy.get_default_memory_pool().free_all_blocks()
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
