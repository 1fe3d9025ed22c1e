"""Times every tile of selective_scan, serial and split, on the shapes that the plan's thresholds come from."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import cupy

import cuscan
from cuscan import _plan
from cuscan._plan import Schedule

from .limits import milliseconds
from .workloads import SELECTIVE


def main() -> None:
    rows = []
    for load in SELECTIVE:
        inputs = load.inputs(cupy)
        call = load.call(cuscan, inputs)
        for tile in _plan.selective_tiles("float32", both_vary=True):
            if load.state % tile.states or (tile.states == 1) or load.batch == 4096 and tile.channels == 32:
                continue
            blocks = load.batch * -(-load.channels // tile.channels)
            choices = [{"schedule": Schedule.SERIAL}]
            if blocks < 300 and load.length >= 2048:
                choices += [
                    {"schedule": Schedule.SPLIT, "chunk": -(-load.length // chunks // 16) * 16}
                    for chunks in (2, 4, 8, 16, 64, 256)
                    if blocks * chunks <= 8 * 132 and load.length // chunks >= 256
                ]
            for choice in choices:
                if choice["schedule"] is Schedule.SERIAL and load.length > 100000:
                    continue
                with _plan.forced(tile=tile, **choice):
                    time = statistics.median(milliseconds(cupy, call, 7))
                rows.append({"load": repr(load), "tile": repr(tile), "chunk": choice.get("chunk", 0), "ms": time})
                name = f"{tile.states}x{tile.groups}x{tile.channels}"
                print(f"{load!s:110s} {name:8s} chunk {choice.get('chunk', 0):6d} {time:8.4f} ms", flush=True)
        del inputs, call
        cupy.get_default_memory_pool().free_all_blocks()
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
