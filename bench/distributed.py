"""`python -m bench.distributed`: a long and a short sequence on all GPUs of the host, against one of them.

python -m bench.distributed [--out FILE]       FILE gets {"digest", "device", "ranks", "rows"}

A row has the milliseconds of the slowest rank, those of one GPU with the same schedule and with its fastest, and
whether every rank's steps are what one GPU gives: on exact inputs bit for bit, on others how far apart, of the RMS.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import cuscan
from cuscan import _plan, _source
from cuscan import distributed as d
from cuscan.distributed.__main__ import NAMES, devices, everywhere, spawn
from cuscan.tune import milliseconds, selective_arguments

SHAPES = ((1, 2097152, 256, 16), (1, 16384, 256, 16))
EXACT = (1, 65536, 256, 16)
RECORD = Path(__file__).parent / "results" / "distributed.json"


def main(arguments: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(
        prog="python -m bench.distributed", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RECORD, help="where to write the record")
    parser.add_argument("--ranks", type=int, help="how many GPUs (default: all)")
    chosen = parser.parse_args(given)
    if "WORLD_SIZE" not in os.environ:
        count = chosen.ranks or devices()
        if count < 1:
            print("there is no GPU")
            return 1
        return spawn(["-m", "bench.distributed", *given], count)
    ranks = d.Nccl()
    rows = measure(ranks)
    if ranks.rank == 0:
        import cupy

        name = cupy.cuda.runtime.getDeviceProperties(ranks.device)["name"].decode()
        record = {"digest": _source.digest(), "device": name, "ranks": ranks.size, "rows": rows}
        chosen.out.write_text(json.dumps(record, indent=1) + "\n")
    ranks.close()
    return 0 if all(row["right"] for row in rows) else 1


def measure(ranks: d.Communicator) -> list[dict[str, Any]]:
    """The rows, the same on all ranks."""
    rows = [exact(ranks)]
    for shape in SHAPES:
        rows += timed(ranks, shape)
    return rows


def mine(ranks: d.Communicator, given: dict[str, Any], length: int) -> tuple[dict[str, Any], slice]:
    """This rank's part of the arguments, on its own."""
    import cupy

    begin, end = (length * rank // ranks.size for rank in (ranks.rank, ranks.rank + 1))
    part = {name: cupy.ascontiguousarray(x[:, begin:end]) if name in NAMES else x for name, x in given.items()}
    return part, slice(begin, end)


def exact(ranks: d.Communicator) -> dict[str, Any]:
    """Gates of 0 and 1 and small integers: the ranks give the bits of one GPU."""
    import cupy

    batch, length, channels, state = EXACT
    random = cupy.random.RandomState(1)

    def integers(*shape: int) -> Any:
        return random.randint(-2, 3, shape).astype("float32")

    given = {
        "u": integers(batch, length, channels),
        "delta": (random.uniform(size=(batch, length, channels)) < 0.1).astype("float32"),
        "A": cupy.where(random.uniform(size=(channels, state)) < 0.7, cupy.float32(-1e4), cupy.float32(0)),
        "B": integers(batch, length, state),
        "C": integers(batch, length, state),
    }
    part, steps = mine(ranks, given, length)
    y, states = cuscan.selective_scan(**given, return_states=True)
    own, own_states = d.selective_scan(ranks, **part, return_states=True)
    whole = cuscan.selective_scan_vjp(**given, grad_out=given["u"], states=states)
    found = d.selective_scan_vjp(ranks, **part, grad_out=part["u"], states=own_states)
    same = [
        bool((own == y[:, steps]).all()),
        *(bool((getattr(found, x) == getattr(whole, x)[:, steps]).all()) for x in "uBC"),
    ]
    right = bool(everywhere(ranks, float(all(same))).all())
    return {"name": "exact", "shape": list(EXACT), "right": right}


def timed(ranks: d.Communicator, shape: tuple[int, int, int, int]) -> list[dict[str, Any]]:
    """Forward and gradients."""
    import cupy

    length = shape[1]
    given = selective_arguments(cupy, *shape, "bfloat16", "bld")
    part, steps = mine(ranks, given, length)
    y, states = cuscan.selective_scan(**given, return_states=True)
    own, own_states = d.selective_scan(ranks, **part, return_states=True)
    whole = cuscan.selective_scan_vjp(**given, grad_out=y, states=states)
    grad = cupy.ascontiguousarray(y[:, steps])
    found = d.selective_scan_vjp(ranks, **part, grad_out=grad, states=own_states)
    calls: dict[str, tuple[Callable[[], Any], Callable[[], Any], Any, Any]] = {
        "selective_scan": (
            lambda: cuscan.selective_scan(**given),
            lambda: d.selective_scan(ranks, **part),
            own,
            y[:, steps],
        ),
        "selective_scan_vjp": (
            lambda: cuscan.selective_scan_vjp(**given, grad_out=y, states=states),
            lambda: d.selective_scan_vjp(ranks, **part, grad_out=grad, states=own_states),
            found.u,
            whole.u[:, steps],
        ),
    }
    rows = []
    for name, (one, together, got, expected) in calls.items():
        apart = float(abs(got.astype("float32") - expected.astype("float32")).max())
        size = float(cupy.sqrt(cupy.square(expected.astype("float32")).mean()))
        fastest, by_all = (float(np.median(milliseconds(cupy, call))) for call in (one, together))
        with _plan.forced(schedule=_plan.Schedule.SPLIT):
            same = float(np.median(milliseconds(cupy, one)))
        figures = everywhere(ranks, by_all, same, fastest, apart / size).max(0).tolist()
        row = dict(zip(("milliseconds", "one_same", "one_fastest", "apart"), figures, strict=True))
        # Two neighbours in bfloat16 are 2^-7 apart; y is up to some 10 times its RMS.
        row |= {
            "name": name,
            "shape": list(shape),
            "speedup": row["one_same"] / row["milliseconds"],
            "right": row["apart"] < 0.2,
        }
        rows.append(row)
        if ranks.rank == 0:
            print(row, flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(main())
