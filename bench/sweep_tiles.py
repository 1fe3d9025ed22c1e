"""Times the shapes of selective_scan over what its plan chooses: tile, and chunk where time is split."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import cupy

from cuscan import _plan
from cuscan._plan import TILE_STEPS, Schedule, SelectiveKind, states_a_thread

from .limits import milliseconds
from .workloads import SELECTIVE


def main() -> None:
    rows = []
    for load in SELECTIVE:
        inputs = load.inputs(cupy)
        call = load.call(inputs)
        states = states_a_thread("float32", both_vary=True, state=load.state)
        kind = SelectiveKind(
            load.dtype, complex=False, time_fast=load.layout == "bdl", time_B=True, time_C=True, states=states
        )
        for tile in _plan.selective_tiles(kind):
            warps = load.batch * -(-load.channels // tile.channels) * tile.warps
            choices = [{"schedule": Schedule.SERIAL}] if load.length <= 100_000 else []
            if warps < 1600:
                choices += [
                    {"schedule": Schedule.SPLIT, "chunk": -(-load.length // chunks // TILE_STEPS) * TILE_STEPS}
                    for chunks in (2, 4, 8, 16, 32, 64, 128, 256)
                    if warps * chunks <= 8800 and load.length // chunks >= 128
                ]
            for choice in choices:
                with _plan.forced(tile=tile, **choice):
                    time = statistics.median(milliseconds(cupy, call, 7))
                name, chunk = f"{tile.states}x{tile.groups}x{tile.warps}", choice.get("chunk", 0)
                rows.append({"load": repr(load), "tile": name, "chunk": chunk, "ms": time})
                print(f"{load.batch:5d} {load.length:8d} {load.channels:5d} {load.state:4d} {load.dtype} {load.layout} "
                      f"{'z' * load.z}{'h' * load.h0} {name} chunk {chunk:6d} {time:8.4f} ms", flush=True)  # fmt: skip
        del inputs, call
        cupy.get_default_memory_pool().free_all_blocks()
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
